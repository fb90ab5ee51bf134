//! A full disk: ENOSPC and nothing else, overwriting and deleting still work, all space comes back, and what was written
//! before, meanwhile and after that is there: it is read back past the kernel's cache, and again after a remount.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use base::rng::Rng;

use super::Context;
use super::memory::forget;
use crate::Fallible;
use crate::report::Suite;
use crate::world::World;

const ROUNDS: u32 = 3;
const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;

pub fn run(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    if world.is_external() {
        suite.exclude("all", "would fill somebody else's disk");
        return Ok(());
    }
    for megabytes in [16, 64, 200] {
        let sizes = vec![format!("{megabytes}M"); 4];
        let mut small = world.sibling(&format!("full-{megabytes}"))?;
        small.set_sizes(&sizes);
        small.mkfs()?;
        small.mount()?;
        let empty = free(&small.mnt)?;
        for round in 0..ROUNDS {
            let result = one_round(&mut small, empty);
            suite.check(&format!("4 x {megabytes} MiB, round {round}"), result);
        }
        small.umount()?;
        suite.check(&format!("4 x {megabytes} MiB, fsck"), small.fsck());
        small.discard();
    }
    Ok(())
}

fn free(mnt: &Path) -> Fallible<u64> {
    rustix::fs::statvfs(mnt)
        .map(|s| s.f_bavail * s.f_frsize)
        .map_err(|e| format!("statfs: {e}"))
}

fn one_round(small: &mut World, empty: u64) -> Fallible<()> {
    let mnt = small.mnt.clone();
    let mut files = Files::new();
    use_up(&mnt, &mut files).map_err(|e| e.to_string())?;
    verify(&mnt, &files).map_err(|e| e.to_string())?;
    small.umount()?;
    small.mount()?;
    verify(&mnt, &files).map_err(|e| format!("after a remount: {e}"))?;
    remove_all(&mnt).map_err(|e| e.to_string())?;
    let (left, count) = (free(&mnt)?, files.len());
    match left >= empty / 10 * 9 {
        true => Ok(()),
        false => Err(format!(
            "{left} bytes are free after everything (at last {count} files) was deleted; {empty} were at first"
        )),
    }
}

/// Fills the disk, with small files at last, overwrites one, deletes many, and fills it again.
fn use_up(mnt: &Path, files: &mut Files) -> io::Result<()> {
    let filled = fill(mnt, "large", MIB, files)?;
    if filled < 8 {
        return Err(io::Error::other(format!("only {filled} MiB fit")));
    }
    // In the place of one there is room for as many small ones as it has blocks: large ones alone may leave nothing.
    let large = filled - 1;
    remove(mnt, format!("large{large}"), files)?;
    File::open(mnt)?.sync_all()?;
    let small = fill(mnt, "small", 3000, files)?;
    if small < MIB / BLOCK {
        return Err(io::Error::other(format!(
            "only {small} small files fit where a MiB was"
        )));
    }
    // In the half that stays.
    overwrite(mnt, "large1", files)?;
    for i in (0..large).step_by(2) {
        remove(mnt, format!("large{i}"), files)?;
    }
    File::open(mnt)?.sync_all()?;
    let again = fill(mnt, "again", MIB, files)?;
    match again < large / 3 {
        true => Err(io::Error::other(format!(
            "of {large} MiB, half of it deleted, only {again} fit again"
        ))),
        false => Ok(()),
    }
}

fn remove_all(mnt: &Path) -> io::Result<()> {
    for entry in fs::read_dir(mnt)? {
        fs::remove_file(entry?.path())?;
    }
    File::open(mnt)?.sync_all()
}

/// Files that are there, by name: what their content follows from, and its size.
type Files = BTreeMap<String, (String, usize)>;

/// No two blocks are alike, of one file or of several.
fn content(of: &str, size: usize) -> Vec<u8> {
    let seed = of
        .bytes()
        .fold(1_u64, |seed, byte| seed.wrapping_mul(257) + u64::from(byte));
    let mut bytes = vec![0; size];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// Writes synced files until no more fit. Returns how many did.
fn fill(mnt: &Path, kind: &str, size: usize, files: &mut Files) -> io::Result<usize> {
    for number in 0.. {
        let name = format!("{kind}{number}");
        let path = mnt.join(&name);
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(&content(&name, size))?;
            file.sync_all()
        });
        match written {
            Ok(()) => files.insert(name.clone(), (name, size)),
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                return match fs::remove_file(&path) {
                    Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                    _ => Ok(number),
                };
            }
            Err(error) => return Err(error),
        };
    }
    Ok(0)
}

fn remove(mnt: &Path, name: String, files: &mut Files) -> io::Result<()> {
    files.remove(&name);
    fs::remove_file(mnt.join(name))
}

/// Existing blocks can be overwritten though nothing is free.
fn overwrite(mnt: &Path, name: &str, files: &mut Files) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(mnt.join(name))?;
    let of = format!("{name} overwritten");
    file.write_all_at(&content(&of, MIB), 0)?;
    file.sync_all()?;
    files.insert(name.to_owned(), (of, MIB));
    read_back(mnt, name, &files[name])
}

/// These files are there with all they hold, and no others.
fn verify(mnt: &Path, files: &Files) -> io::Result<()> {
    let mut found = 0;
    for entry in fs::read_dir(mnt)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let held = files.get(&*name);
        let held = held.ok_or_else(|| io::Error::other(format!("{name} should not be there")))?;
        read_back(mnt, &name, held)?;
        found += 1;
    }
    match found == files.len() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "of {} files {found} are there",
            files.len()
        ))),
    }
}

/// By the file system under test: of what was synced the kernel has no copy then.
fn read_back(mnt: &Path, name: &str, (of, size): &(String, usize)) -> io::Result<()> {
    let mut file = File::open(mnt.join(name))?;
    forget(&file)?;
    let mut bytes = Vec::with_capacity(*size);
    file.read_to_end(&mut bytes)?;
    let held = content(of, *size);
    if bytes == held {
        return Ok(());
    }
    let same = bytes.iter().zip(&held).take_while(|(a, b)| a == b).count();
    Err(io::Error::other(format!(
        "{name} is wrong from byte {same} on, of {} for {size}",
        bytes.len()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process;

    /// Content was not looked at, but for what the kernel had kept of one file.
    #[test]
    fn every_file_that_is_left_is_read_back() {
        let home = process::work_dir().join(format!("full-files-{}", std::process::id()));
        fs::create_dir_all(&home).unwrap();
        let mut files = Files::new();
        for (name, size) in [("large0", MIB), ("large1", MIB), ("small0", 3000)] {
            fs::write(home.join(name), content(name, size)).unwrap();
            files.insert(name.to_owned(), (name.to_owned(), size));
        }
        verify(&home, &files).unwrap();
        overwrite(&home, "large1", &mut files).unwrap();
        verify(&home, &files).unwrap();
        let told = |change: &dyn Fn()| {
            change();
            verify(&home, &files).unwrap_err().to_string()
        };
        let small = home.join("small0");
        let cut = told(&|| fs::write(&small, &content("small0", 3000)[..2999]).unwrap());
        assert!(cut.contains("small0 is wrong from byte 2999"), "{cut}");
        let other = told(&|| fs::write(&small, content("small1", 3000)).unwrap());
        assert!(other.contains("small0 is wrong"), "{other}");
        let gone = told(&|| fs::remove_file(&small).unwrap());
        assert!(gone.contains("of 3 files 2"), "{gone}");
        let more = told(&|| fs::write(home.join("other"), "").unwrap());
        assert!(more.contains("other should not be there"), "{more}");
        fs::remove_dir_all(&home).unwrap();
    }
}

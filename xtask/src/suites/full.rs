//! A full disk: ENOSPC and nothing else, overwriting and deleting still work, and all space
//! comes back.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::Context;
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
            let result = one_round(&small.mnt, empty).map_err(|e| e.to_string());
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

fn one_round(mnt: &Path, empty: u64) -> io::Result<()> {
    let filled = fill(mnt, "large", MIB)?;
    if filled < 8 {
        return Err(io::Error::other(format!("only {filled} MiB fit")));
    }
    // In the place of one there is room for as many small ones as it has blocks: large ones alone may leave nothing.
    let large = filled - 1;
    fs::remove_file(mnt.join(format!("large{large}")))?;
    File::open(mnt)?.sync_all()?;
    let small = fill(mnt, "small", 3000)?;
    if small < MIB / BLOCK {
        return Err(io::Error::other(format!(
            "only {small} small files fit where a MiB was"
        )));
    }
    overwrite(&mnt.join("large0"))?;
    for i in (0..large).step_by(2) {
        fs::remove_file(mnt.join(format!("large{i}")))?;
    }
    File::open(mnt)?.sync_all()?;
    let again = fill(mnt, "again", MIB)?;
    if again < large / 3 {
        return Err(io::Error::other(format!(
            "of {large} MiB, half of it deleted, only {again} fit again"
        )));
    }
    for entry in fs::read_dir(mnt)? {
        fs::remove_file(entry?.path())?;
    }
    File::open(mnt)?.sync_all()?;
    let left = free(mnt).map_err(io::Error::other)?;
    match left >= empty / 10 * 9 {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "{left} bytes are free after everything ({small} small files, too) was deleted; {empty} were at first"
        ))),
    }
}

/// Writes synced files until no more fit. Returns how many did.
fn fill(mnt: &Path, name: &str, size: usize) -> io::Result<usize> {
    for number in 0.. {
        let path = mnt.join(format!("{name}{number}"));
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(&vec![number as u8; size])?;
            file.sync_all()
        });
        match written {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                return match fs::remove_file(&path) {
                    Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                    _ => Ok(number),
                };
            }
            Err(error) => return Err(error),
        }
    }
    Ok(0)
}

/// Existing blocks can be overwritten though nothing is free.
fn overwrite(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    file.write_all_at(&vec![0x77; MIB], 0)?;
    file.sync_all()?;
    let mut bytes = vec![0; MIB];
    file.read_exact_at(&mut bytes, 0)?;
    match bytes.iter().all(|&b| b == 0x77) {
        true => Ok(()),
        false => Err(io::Error::other("an overwrite on the full disk is lost")),
    }
}

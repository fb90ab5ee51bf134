//! The daemon's memory stays within `cache_size`: while many files are made and read, while
//! large files are, and while a crash is recovered.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use super::Context;
use crate::Fallible;
use crate::report::Suite;
use crate::world::World;

const OPTION: &str = "cache_size=96M";
const LIMIT: u64 = 96 << 20;
const FOLDERS: usize = 160;
const FILES: usize = 1000;
/// One file in so many has content.
const WITH_CONTENT: usize = 5;
const LARGE_FILES: usize = 4;
const LARGE_MIB: usize = 24;
const MIB: usize = 1 << 20;

pub fn run(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    if world.is_external() {
        suite.exclude("all", "is about the daemon");
        return Ok(());
    }
    world.umount()?;
    world.mount_with(OPTION)?;
    let mnt = world.mnt.clone();
    suite.check(
        "large files made",
        with_large(|i| make_large(&mnt, i).and_then(|()| read_large(&mnt, i))),
    );
    suite.check("many files made", in_two_threads(&mnt, make_folder));
    suite.check("many files read", in_two_threads(&mnt, read_folder));
    suite.check("peak memory", within_limit(world));
    fs::write(mnt.join("synced"), b"synced")
        .and_then(|()| File::open(mnt.join("synced"))?.sync_all())
        .map_err(|e| e.to_string())?;
    suite.check("more files made", make_folder(&mnt, FOLDERS));
    world.kill_daemon()?;
    world.mount_with(OPTION)?;
    suite.check(
        "files found after a crash",
        in_two_threads(&mnt, find_folder),
    );
    suite.check(
        "large files found after a crash",
        with_large(|i| read_large(&mnt, i)),
    );
    suite.check("peak memory with recovery", within_limit(world));
    Ok(())
}

fn within_limit(world: &World) -> Fallible<()> {
    let peak = world
        .daemon_peak_bytes()
        .ok_or("cannot tell the daemon's memory")?;
    println!("  the daemon's memory peaked at {} MiB", peak >> 20);
    match peak <= LIMIT {
        true => Ok(()),
        false => Err(format!("{} MiB with {OPTION}", peak >> 20)),
    }
}

/// Calls `work` for each large file, several at a time.
fn with_large(work: impl Fn(usize) -> io::Result<()> + Sync) -> io::Result<()> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..LARGE_FILES)
            .map(|i| scope.spawn(move || work(i)))
            .collect();
        threads.into_iter().try_for_each(joined)
    })
}

/// What a MiB of a large file holds: no two blocks are alike.
fn block(i: usize, at: usize) -> Vec<u8> {
    let mut bytes = vec![i as u8 + 1; MIB];
    for (number, block) in bytes.chunks_mut(4096).enumerate() {
        let place = (at * MIB + number * 4096) as u64;
        block[..8].copy_from_slice(&place.to_le_bytes());
    }
    bytes
}

/// Writes with requests of the largest size.
fn make_large(mnt: &Path, i: usize) -> io::Result<()> {
    let mut file = File::create(mnt.join(format!("large{i}")))?;
    (0..LARGE_MIB).try_for_each(|at| file.write_all(&block(i, at)))?;
    file.sync_all()?;
    forget(&file)
}

/// The kernel gives up what it has cached of a file, but what it has not written yet: it asks the daemon for it again.
pub(super) fn forget(file: &File) -> io::Result<()> {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

fn read_large(mnt: &Path, i: usize) -> io::Result<()> {
    let path = mnt.join(format!("large{i}"));
    let mut file = File::open(&path)?;
    let mut read = vec![0; MIB];
    for at in 0..LARGE_MIB {
        file.read_exact(&mut read)?;
        if read != block(i, at) {
            return Err(io::Error::other(format!("MiB {at} of {path:?} is wrong")));
        }
    }
    match file.read(&mut read)? {
        0 => Ok(()),
        _ => Err(io::Error::other(format!("{path:?} is too long"))),
    }
}

fn joined(thread: std::thread::ScopedJoinHandle<'_, io::Result<()>>) -> io::Result<()> {
    let panicked = |_| Err(io::Error::other("a thread panicked"));
    thread.join().unwrap_or_else(panicked)
}

fn in_two_threads(mnt: &Path, work: fn(&Path, usize) -> io::Result<()>) -> io::Result<()> {
    let half = |parity| (0..FOLDERS).filter(move |i| i % 2 == parity);
    std::thread::scope(|scope| {
        let other = scope.spawn(move || half(1).try_for_each(|i| work(mnt, i)));
        half(0).try_for_each(|i| work(mnt, i)).and(joined(other))
    })
}

fn content(i: usize) -> Vec<u8> {
    match i % WITH_CONTENT {
        0 => vec![i as u8 | 1; 1024],
        _ => Vec::new(),
    }
}

fn make_folder(mnt: &Path, folder: usize) -> io::Result<()> {
    let folder = mnt.join(format!("folder{folder}"));
    fs::create_dir(&folder)?;
    (0..FILES).try_for_each(|i| fs::write(folder.join(format!("file{i}")), content(i)))
}

/// Looks at a tenth of a folder, scattered.
fn read_folder(mnt: &Path, folder: usize) -> io::Result<()> {
    look_at(mnt, folder, |i, bytes| bytes == content(i))
}

/// As `read_folder`, but content that was not synced may be gone, all of it: there is no size without it.
fn find_folder(mnt: &Path, folder: usize) -> io::Result<()> {
    look_at(mnt, folder, |i, bytes| {
        bytes.is_empty() || bytes == content(i)
    })
}

fn look_at(mnt: &Path, folder: usize, is_right: fn(usize, &[u8]) -> bool) -> io::Result<()> {
    let path = mnt.join(format!("folder{folder}"));
    for i in (folder % 10..FILES).step_by(10) {
        let mut file = File::open(path.join(format!("file{i}")))?;
        forget(&file)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        if !is_right(i, &bytes) {
            return Err(io::Error::other(format!("file {i} of {path:?} is wrong")));
        }
    }
    Ok(())
}

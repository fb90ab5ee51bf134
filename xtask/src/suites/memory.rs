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
const MIB: usize = 1 << 20;

pub fn run(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    if world.is_external() {
        suite.exclude("all", "is about the daemon");
        return Ok(());
    }
    world.umount()?;
    world.mount_with(OPTION)?;
    let mnt = world.mnt.clone();
    suite.check("large files", large_files(&mnt));
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

/// Writes and reads with requests of the largest size, several at a time.
fn large_files(mnt: &Path) -> io::Result<()> {
    let one = |i: usize| {
        let path = mnt.join(format!("large{i}"));
        let block = vec![i as u8; MIB];
        let mut file = File::create(&path)?;
        (0..24).try_for_each(|_| file.write_all(&block))?;
        file.sync_all()?;
        let mut read = vec![0; MIB];
        File::open(&path)?.read_exact(&mut read)?;
        match read == block {
            true => Ok(()),
            false => Err(io::Error::other("reads differently")),
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..LARGE_FILES)
            .map(|i| scope.spawn(move || one(i)))
            .collect();
        threads.into_iter().try_for_each(joined)
    })
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
        0 => vec![i as u8; 1024],
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
    let path = mnt.join(format!("folder{folder}"));
    for i in (folder % 10..FILES).step_by(10) {
        if fs::read(path.join(format!("file{i}")))? != content(i) {
            return Err(io::Error::other(format!("file {i} of {path:?} is wrong")));
        }
    }
    Ok(())
}

/// As `read_folder`, but content that was not synced may be gone.
fn find_folder(mnt: &Path, folder: usize) -> io::Result<()> {
    let path = mnt.join(format!("folder{folder}"));
    for i in (folder % 10..FILES).step_by(10) {
        let len = fs::metadata(path.join(format!("file{i}")))?.len();
        if len != 0 && len != content(i).len() as u64 {
            return Err(io::Error::other(format!(
                "file {i} of {path:?} has a wrong size"
            )));
        }
    }
    Ok(())
}

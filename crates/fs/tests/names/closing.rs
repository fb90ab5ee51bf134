//! The end of a file system, beside threads that use it.

use crate::world::World;
use base::clock::Clock;
use base::rng::Rng;
use base::thread::parallel;
use device::sim::{SimDevice, Times};
use fs::{Caller, Error, FileSystem, FsOptions, OpenFile, ROOT};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const DIRS: usize = 2;
const FILES: usize = 2;
/// Those whose files only grow, by a cut and by blocks without data.
const CUTS: usize = DIRS + FILES;
const ALLOCATES: usize = CUTS + 1;
const RECORD: usize = 1000;

fn busy(seed: u64) -> World {
    let mut world = World::new(2, 64 << 20, seed);
    world.options = FsOptions::default();
    world
}

/// Makes directories until that is refused; how many were made.
fn make(fs: &FileSystem, me: usize, done: &AtomicU64) -> u64 {
    for number in 0.. {
        let name = format!("dir{me}-{number}");
        match fs.mkdir(&Caller::root(), ROOT, name.as_bytes(), 0o755) {
            Ok(_) => done.fetch_add(1, Ordering::Relaxed),
            Err(Error::ReadOnly) => return number,
            Err(error) => panic!("{error}"),
        };
    }
    unreachable!("there is no end of numbers")
}

fn record(number: u64) -> [u8; RECORD] {
    [number as u8; RECORD]
}

fn create(fs: &FileSystem, me: usize) -> Arc<OpenFile> {
    let name = format!("file{me}");
    let made = fs.create(&Caller::root(), ROOT, name.as_bytes(), 0o644, libc::O_RDWR);
    made.unwrap().1
}

/// The same with records at the end of a file.
fn append(fs: &FileSystem, file: &OpenFile, done: &AtomicU64) -> u64 {
    for number in 0.. {
        match fs.append(file, &record(number)) {
            Ok(_) => done.fetch_add(1, Ordering::Relaxed),
            Err(Error::ReadOnly) => return number,
            Err(error) => panic!("{error}"),
        };
    }
    unreachable!("there is no end of numbers")
}

fn check_directories(fs: &FileSystem, me: usize, made: u64) {
    for number in 0..made {
        let name = format!("dir{me}-{number}");
        let found = fs.lookup(ROOT, name.as_bytes());
        assert!(found.is_ok(), "{name} of {made} is not there");
    }
}

fn check_records(fs: &FileSystem, me: usize, made: u64) {
    let attr = fs.lookup(ROOT, format!("file{me}").as_bytes()).unwrap();
    let file = fs.open_file(attr.ino, libc::O_RDONLY).unwrap();
    for number in 0..made {
        let mut found = [0; RECORD];
        let len = fs.read(&file, number * RECORD as u64, &mut found).unwrap();
        let whole = len == RECORD && found == record(number);
        assert!(whole, "record {number} of {made} is not there");
    }
}

/// The same with sizes.
fn grow(fs: &FileSystem, me: usize, file: &OpenFile, done: &AtomicU64) -> u64 {
    for number in 0.. {
        let grown = match me {
            CUTS => fs.truncate(&Caller::root(), file.ino(), number + 1),
            _ => fs.fallocate(file, 0, number, 1),
        };
        match grown {
            Ok(_) => done.fetch_add(1, Ordering::Relaxed),
            Err(Error::ReadOnly) => return number,
            Err(error) => panic!("{error}"),
        };
    }
    unreachable!("there is no end of numbers")
}

#[test]
fn what_returns_while_a_file_system_ends_is_part_of_it() {
    for round in 0..10 {
        let mut world = busy(round);
        let fs = world.open();
        let done = AtomicU64::new(0);
        // They are there however late a thread begins.
        let files: Vec<_> = (DIRS..=ALLOCATES).map(|me| create(&fs, me)).collect();
        let made = parallel(ALLOCATES + 2, |me| match me {
            _ if me < DIRS => make(&fs, me, &done),
            _ if me < DIRS + FILES => append(&fs, &files[me - DIRS], &done),
            CUTS | ALLOCATES => grow(&fs, me, &files[me - DIRS], &done),
            _ => {
                while done.load(Ordering::Relaxed) < 500 * (round + 1) {
                    base::thread::yield_now();
                }
                fs.close().unwrap();
                0
            }
        });
        drop((files, fs));
        world.devices = world.devices.iter().map(|d| d.reopen()).collect();
        world.check();
        let fs = world.open();
        assert!(fs.recovery().clean);
        for (me, &made) in made.iter().enumerate() {
            if me < DIRS {
                check_directories(&fs, me, made);
            } else if me < DIRS + FILES {
                check_records(&fs, me, made);
            } else if me <= ALLOCATES {
                let attr = fs.lookup(ROOT, format!("file{me}").as_bytes()).unwrap();
                assert!(attr.size >= made, "{} of {made} bytes", attr.size);
            }
        }
        fs.close().unwrap();
    }
}

/// How files are written over: past the cache or in it, page by page or as a whole, each time with a sync, be it the write's own, or without.
const OVER_PAGES: u64 = 8;
const OVER: [(i32, bool, bool); 8] = [
    (libc::O_DIRECT, true, false),
    (libc::O_DIRECT, false, false),
    (0, true, true),
    (0, true, false),
    (0, false, false),
    (libc::O_DSYNC, true, false),
    (libc::O_SYNC, false, false),
    (libc::O_DIRECT | libc::O_SYNC, true, false),
];

/// Writes over a file until that is refused; how often it was done.
fn write_over(fs: &FileSystem, me: usize, file: &OpenFile, done: &AtomicU64) -> u64 {
    let (_, by_page, syncs) = OVER[me];
    for number in 1.. {
        let data = [number as u8; OVER_PAGES as usize * 4096];
        let written = match by_page {
            true => fs.write(file, number % OVER_PAGES * 4096, &data[..4096]),
            false => fs.write(file, 0, &data),
        };
        match written {
            Ok(_) => done.fetch_add(1, Ordering::Relaxed),
            Err(Error::ReadOnly) => return number - 1,
            Err(error) => panic!("{error}"),
        };
        // It may come after the end, which has made durable what was written.
        let synced = if syncs { fs.fsync(file, true) } else { Ok(()) };
        assert!(synced.is_ok(), "{synced:?}");
    }
    unreachable!("there is no end of numbers")
}

/// What devices hold, durable and not.
fn held(world: &World) -> Vec<(u64, usize)> {
    let held = |device: &Arc<SimDevice>| (device.contents_hash(), device.cached_writes().len());
    world.devices.iter().map(held).collect()
}

/// Who had been let in before wrote to the devices of a file system that had ended. And a write that was a part of it was said to be refused, where its own sync met
/// the end.
#[test]
fn devices_change_no_more_once_a_file_system_has_ended() {
    for round in 0..10 {
        let mut world = busy(round);
        let fs = world.open();
        let (done, at_end) = (AtomicU64::new(0), OnceLock::new());
        let open = |(me, (flags, ..)): (usize, &(i32, bool, bool))| {
            let made = create(&fs, me);
            fs.write(&made, 0, &[0; OVER_PAGES as usize * 4096])
                .unwrap();
            fs.fsync(&made, false).unwrap();
            fs.open_file(made.ino(), libc::O_RDWR | flags).unwrap()
        };
        let files: Vec<_> = OVER.iter().enumerate().map(open).collect();
        let written = parallel(OVER.len() + 1, |me| match files.get(me) {
            Some(file) => write_over(&fs, me, file, &done),
            None => {
                while done.load(Ordering::Relaxed) < 500 * (round + 1) {
                    base::thread::yield_now();
                }
                fs.close().unwrap();
                at_end.set(held(&world)).unwrap();
                0
            }
        });
        drop((files, fs));
        assert!(at_end.get() == Some(&held(&world)));
        world.devices = world.devices.iter().map(|d| d.reopen()).collect();
        world.check();
        let fs = world.open();
        assert!(fs.recovery().clean);
        for (me, (_, by_page, _)) in OVER.iter().enumerate() {
            let attr = fs.lookup(ROOT, format!("file{me}").as_bytes()).unwrap();
            let file = fs.open_file(attr.ino, libc::O_RDONLY).unwrap();
            let mut found = [0xEE; OVER_PAGES as usize * 4096];
            assert_eq!(fs.read(&file, 0, &mut found).unwrap(), found.len());
            for (page, found) in found.chunks(4096).enumerate() {
                // The last number that went there.
                let back = match by_page {
                    true => (written[me] + OVER_PAGES - page as u64) % OVER_PAGES,
                    false => 0,
                };
                let number = written[me].saturating_sub(back);
                assert!(found == [number as u8; 4096], "file {me}, page {page}");
            }
        }
        fs.close().unwrap();
    }
}

#[test]
fn a_file_system_has_ended_when_any_of_those_who_close_it_is_told() {
    for round in 0..10 {
        let mut world = busy(round);
        let fs = world.open();
        for number in 0..2000_u32 {
            let name = number.to_string();
            fs.mkdir(&Caller::root(), ROOT, name.as_bytes(), 0o755)
                .unwrap();
        }
        // The first one to return ends the machine.
        let outcomes = parallel(3, |_| {
            let outcome = fs.close();
            world.switch.cut_now();
            outcome
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        drop(fs);
        world.restart(&mut Rng::new(round));
        let fs = world.open();
        assert!(fs.recovery().clean);
        for number in 0..2000_u32 {
            fs.lookup(ROOT, number.to_string().as_bytes()).unwrap();
        }
        fs.close().unwrap();
    }
}

#[test]
fn an_end_that_failed_has_failed_for_whoever_asks_again() {
    let world = busy(1);
    let fs = world.open();
    fs.mkdir(&Caller::root(), ROOT, b"dir", 0o755).unwrap();
    for device in &world.devices {
        device.fail_writes(Times::Always, None);
    }
    let closed = |fs: &Arc<FileSystem>| fs.close().unwrap_err().to_string();
    let first = closed(&fs);
    for device in &world.devices {
        device.fail_writes(Times::Next(0), None);
    }
    assert_eq!(closed(&fs), first);
    assert!(fs.mkdir(&Caller::root(), ROOT, b"more", 0o755).is_err());
    assert!(fs.sync().is_err());
}

/// A sync of all was refused where one of a file succeeded.
#[test]
fn a_sync_after_a_good_end_succeeds_and_nothing_else() {
    let mut world = busy(2);
    let fs = world.open();
    let file = create(&fs, 0);
    fs.write(&file, 0, &[7; 100]).unwrap();
    fs.close().unwrap();
    fs.sync().unwrap();
    fs.fsync(&file, false).unwrap();
    for refused in [
        fs.checkpoint().map(drop),
        fs.write(&file, 0, &[8]).map(drop),
        fs.mkdir(&Caller::root(), ROOT, b"late", 0o755).map(drop),
    ] {
        assert!(matches!(refused, Err(Error::ReadOnly)), "{refused:?}");
    }
    drop((file, fs));
    world.devices = world.devices.iter().map(|d| d.reopen()).collect();
    world.check();
}

/// A thread that had nothing to do kept the file system, and with it the devices, for a second after the program had dropped it.
#[test]
fn devices_are_let_go_when_a_file_system_is_dropped() {
    let world = busy(3);
    let fs = world.open();
    fs.mkdir(&Caller::root(), ROOT, b"dir", 0o755).unwrap();
    fs.sync().unwrap();
    // Its threads come to rest.
    let clock = Clock::real();
    while clock.monotonic_ns() < 30_000_000 {
        base::thread::yield_now();
    }
    let array = Arc::downgrade(fs.store().array());
    drop(fs);
    // One that is at something ends that first, long before one that rests wakes by itself.
    let dropped = clock.monotonic_ns();
    while array.strong_count() > 0 {
        let waited = clock.monotonic_ns() - dropped;
        assert!(waited < 800_000_000, "it has its devices still");
        base::thread::yield_now();
    }
    let fs = world.open();
    fs.lookup(ROOT, b"dir").unwrap();
    fs.close().unwrap();
}

//! What the simulator found, each told as a story of its own.

use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::{sched, thread};
use device::sim::Survival;
use fs::{Caller, FileSystem, Ino, OpenFile, ROOT};
use sim::drive::Driver;
use sim::op::Op;
use sim::world::{Image, Machine, Shape};
use std::sync::Arc;

/// Both copies of a checkpoint slot are written at once, so that one power cut tore both. The
/// checkpoint had not happened, the other slot served, and recovery was right; but fsck called
/// the torn slot an error.
#[test]
fn a_cut_in_the_middle_of_the_checkpoint_record_is_no_damage() {
    let image = Image::format(&Shape::small(2)).unwrap();
    let mut driver = Driver::fresh(Machine::new(&image, 1), true).unwrap();
    driver.machine.tap.collect(true);
    driver.run(&Op::Create("foo".into())).unwrap();
    driver.run(&Op::Checkpoint).unwrap();
    let mut rng = Rng::new(1);
    for point in driver.machine.tap.take() {
        for _ in 0..20 {
            let crashed = point.crash(Survival::Subset, &mut rng);
            let machine = Machine::after(&Shape::small(2), crashed, driver.machine.now_ns());
            machine.fsck().unwrap();
        }
    }
}

/// Records that change a file's size went out before its times were set: after a truncate and an
/// fsync, a crash left the new size under the old mtime, and so did a write that was written
/// back before it had ended. Programs that look at mtime took the file for unchanged.
#[test]
fn a_new_size_is_never_durable_under_an_old_mtime() {
    let image = Image::format(&Shape::small(2)).unwrap();
    let mut driver = Driver::fresh(Machine::new(&image, 1), true).unwrap();
    let write = "write foo 0 20000 1".parse().unwrap();
    driver.run(&Op::Create("foo".into())).unwrap();
    driver.run(&write).unwrap();
    driver.run(&Op::Sync).unwrap();
    for size in [5000, 4096, 100] {
        driver.run(&Op::Truncate("foo".into(), size)).unwrap();
        driver.run(&Op::Fsync("foo".into())).unwrap();
        let crashed = driver
            .machine
            .point()
            .crash(Survival::None, &mut Rng::new(1));
        let machine = Machine::after(&Shape::small(2), crashed, driver.machine.now_ns());
        let found = Driver::recover(machine, &driver.oracle).unwrap();
        let shown = |driver: &Driver| {
            let ino = driver.fs().lookup(fs::ROOT, b"foo").unwrap().ino;
            driver.fs().getattr(ino).unwrap().mtime
        };
        assert_eq!(shown(&found), shown(&driver), "cut to {size} bytes");
    }
}

/// A file system that several tasks use at once, in an order that a seed decides.
struct Shared<'a> {
    fs: &'a FileSystem,
    /// The file that the story is about.
    ino: Ino,
    open: Mutex<Option<Arc<OpenFile>>>,
}

impl Shared<'_> {
    /// The call failed in no other way than these.
    fn allow<T>(&self, result: Result<T, fs::Error>, errors: &[i32]) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) if errors.contains(&error.errno()) => None,
            Err(error) => panic!("{error}"),
        }
    }
}

type Task<'t> = &'t (dyn Fn(&Shared<'_>) + Sync);

/// Runs tasks together on a file system with one synced file, "f", that is open; then `check`.
/// Afterwards everything is sound.
fn together(seeds: u64, tasks: &[Task<'_>], check: impl Fn(&Shared<'_>)) {
    let image = Image::format(&Shape::small(1)).unwrap();
    for seed in 0..seeds {
        let machine = Machine::new(&image, seed);
        sched::run(&format!("seed {seed}"), seed, &machine.clock, || {
            let fs = machine.open().unwrap();
            let file = create(&fs, b"f");
            fs.write(&file, 0, &CONTENT).unwrap();
            fs.sync().unwrap();
            let shared = Shared {
                fs: &fs,
                ino: file.ino(),
                open: Mutex::new(rank::LEAF, Some(file)),
            };
            thread::parallel(tasks.len(), |i| tasks[i](&shared));
            check(&shared);
            drop(shared);
            fs.close().unwrap();
        });
        machine.fsck().unwrap();
    }
}

const CONTENT: [u8; 12_000] = [7; 12_000];

fn create(fs: &FileSystem, name: &[u8]) -> Arc<OpenFile> {
    fs.create(&Caller::root(), ROOT, name, 0o644, libc::O_RDWR)
        .unwrap()
        .1
}

/// Sync looked up by its number each file that had something to write. A file deleted meanwhile has
/// none any more, or a directory has got it: sync failed with ESTALE or EISDIR, and told users
/// that data might be lost where none was.
#[test]
fn sync_succeeds_while_files_go_and_their_numbers_are_used_again() {
    let come_and_go = |shared: &Shared<'_>| {
        let who = Caller::root();
        for _ in 0..4 {
            let file = create(shared.fs, b"a");
            shared.fs.write(&file, 0, &CONTENT).unwrap();
            drop(file);
            shared.fs.unlink(&who, ROOT, b"a").unwrap();
            shared.fs.mkdir(&who, ROOT, b"a", 0o755).unwrap();
            shared.fs.rmdir(&who, ROOT, b"a").unwrap();
        }
    };
    let sync = |shared: &Shared<'_>| {
        for _ in 0..6 {
            shared.fs.sync().unwrap();
            shared.fs.tick().unwrap();
        }
    };
    together(30, &[&come_and_go, &sync], |_| ());
}

/// The blocks of a deleted file go in one record and its inode in another. Who opened it by its number
/// in between, as an NFS client may, read zeros where the file had never had any.
#[test]
fn a_file_that_is_being_deleted_does_not_open() {
    let delete = |shared: &Shared<'_>| {
        let file = shared.open.lock().take();
        drop(file);
        shared.fs.unlink(&Caller::root(), ROOT, b"f").unwrap();
    };
    let read = |shared: &Shared<'_>| {
        for _ in 0..8 {
            let opened = shared.fs.open_file(shared.ino, libc::O_RDONLY);
            let Some(file) = shared.allow(opened, &[libc::ESTALE]) else {
                return;
            };
            let mut bytes = vec![1; CONTENT.len()];
            let read = shared.fs.read(&file, 0, &mut bytes);
            if let Some(len) = shared.allow(read, &[libc::ESTALE]) {
                assert!(bytes[..len] == CONTENT, "the file never held that");
            }
        }
    };
    together(60, &[&delete, &read], |_| ());
}

/// Of two that let go of an unlinked file at the same time, each left its deletion to the other:
/// the file kept its blocks until the next mount.
#[test]
fn an_unlinked_file_goes_with_its_last_user_whoever_that_is() {
    let delete = |shared: &Shared<'_>| shared.fs.unlink(&Caller::root(), ROOT, b"f").unwrap();
    let close = |shared: &Shared<'_>| {
        let file = shared.open.lock().take();
        drop(file);
    };
    let look = |shared: &Shared<'_>| {
        for _ in 0..2 {
            let opened = shared.fs.open_file(shared.ino, libc::O_RDONLY);
            drop(shared.allow(opened, &[libc::ESTALE]));
        }
    };
    together(600, &[&delete, &close, &look], |shared| {
        let left = shared.fs.getattr(shared.ino);
        assert_eq!(left.map_err(|e| e.errno()).err(), Some(libc::ESTALE));
    });
}

/// A name's inode was unlinked, and its number given to a node that is no inode, between two looks of
/// somebody who removed or renamed that name: the call failed with EIO, and spoke of damage in a
/// file system that had none.
#[test]
fn a_number_that_no_longer_is_an_inode_is_no_damage() {
    let reuse = |shared: &Shared<'_>| {
        let who = Caller::root();
        for _ in 0..6 {
            let made = shared.fs.mknod(&who, ROOT, b"x", libc::S_IFREG | 0o644, 0);
            shared.allow(made, &[libc::EEXIST]);
            let removed = shared.fs.unlink(&who, ROOT, b"x");
            shared.allow(removed, &[libc::ENOENT, libc::EBUSY]);
            let (name, value) = (b"user.large", [2; 20_000]);
            shared
                .fs
                .setxattr(&who, shared.ino, name, &value, 0)
                .unwrap();
            shared.fs.removexattr(&who, shared.ino, name).unwrap();
        }
    };
    let remove = |shared: &Shared<'_>| {
        let who = Caller::root();
        for _ in 0..12 {
            let moved = shared.fs.rename(&who, ROOT, b"x", ROOT, b"y", 0);
            shared.allow(moved, &[libc::ENOENT, libc::EBUSY]);
            let removed = shared.fs.unlink(&who, ROOT, b"x");
            shared.allow(removed, &[libc::ENOENT, libc::EBUSY]);
        }
    };
    together(60, &[&reuse, &remove], |_| ());
}

/// The kernel, or an NFS client, may name an inode by a number that another kind of node has got since.
/// Opening that was called damage (EIO), and locking it broke the order of locks.
#[test]
fn an_old_number_is_stale_whatever_has_it_now() {
    let machine = Machine::new(&Image::format(&Shape::small(1)).unwrap(), 1);
    let fs = machine.open().unwrap();
    let who = Caller::root();
    let other = create(&fs, b"g").ino();
    let old = create(&fs, b"f").ino();
    fs.unlink(&who, ROOT, b"f").unwrap();
    fs.setxattr(&who, other, b"user.large", &[2; 20_000], 0)
        .unwrap();
    let node = fs.store().get(old).expect("the number is in use again");
    assert!(node.is_owned());
    let errors = [
        fs.getattr(old).map(drop),
        fs.open_file(old, libc::O_RDONLY).map(drop),
        fs.lookup(old, b"name").map(drop),
        fs.truncate(&who, old, 0),
        fs.getxattr(old, b"user.large").map(drop),
        fs.readlink(old).map(drop),
        fs.fsync_inode(old, false),
    ];
    for (call, result) in errors.into_iter().enumerate() {
        let errno = result.map_err(|e| e.errno());
        assert_eq!(errno, Err(libc::ESTALE), "call {call}");
    }
}

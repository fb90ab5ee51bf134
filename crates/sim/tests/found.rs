//! What the simulator found, each told as a story of its own.

use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::{sched, thread};
use device::sim::{Survival, Times};
use fs::{Caller, FileSystem, Ino, OpenFile, ROOT};
use sim::drive::Driver;
use sim::look;
use sim::op::Op;
use sim::world::{Image, Machine, Shape};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

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

/// An array of one device, on which no record of times comes along with what is overwritten.
fn overwritten() -> Image {
    let mut shape = Shape::small(1);
    shape.options.data.mtime_persist = Duration::from_secs(3600);
    Image::format(&shape).unwrap()
}

/// A file system with one synced file, "f", that is open.
fn one_file(machine: &Machine) -> (Arc<FileSystem>, Arc<OpenFile>) {
    let fs = machine.open().unwrap();
    let file = create(&fs, b"f");
    fs.write(&file, 0, &CONTENT).unwrap();
    fs.sync().unwrap();
    (fs, file)
}

/// A flush failed in the background, and with it went what had been overwritten in place; or the
/// last handle of a file that could not be written was closed. Nobody who could have been told
/// was there, and a sync afterwards returned as if nothing had happened.
#[test]
fn a_sync_tells_of_what_was_lost_before_it() {
    let machine = Machine::new(&overwritten(), 1);
    let (fs, file) = one_file(&machine);
    fs.write(&file, 0, &[8; 12_000]).unwrap();
    drop(file);
    machine.advance(6000);
    machine.devices[0].fail_flushes(Times::Next(1));
    assert!(fs.tick().is_err());
    assert_eq!(fs.sync().unwrap_err().errno(), libc::EIO);
    fs.sync().unwrap();

    let file = fs.open_file(fs.lookup(ROOT, b"f").unwrap().ino, libc::O_RDWR);
    let file = file.unwrap();
    fs.write(&file, 0, &[9; 12_000]).unwrap();
    machine.devices[0].fail_writes(Times::Always, None);
    machine.advance(6000);
    assert!(fs.tick().is_err());
    drop(file);
    machine.devices[0].heal();
    assert_eq!(fs.sync().unwrap_err().errno(), libc::EIO);
    fs.sync().unwrap();
}

/// A checkpoint failed half-way, and the file system turned read-only, as it must. But the nodes
/// that the checkpoint had captured counted as clean: they left the cache, and were read as the
/// checkpoint before had them, beside others that were newer. Names led nowhere, and what was
/// read was old.
#[test]
fn a_failed_checkpoint_leaves_everything_as_it_is_to_be_read() {
    let mut shape = Shape::small(1);
    shape.options.store.node_cache_bytes = 64 << 10;
    let machine = Machine::new(&Image::format(&shape).unwrap(), 1);
    let mut driver = Driver::fresh(machine, false).unwrap();
    for i in 0..900 {
        driver.run(&Op::Create(format!("f{i}"))).unwrap();
    }
    // What is not changed now is read later, and takes the place of what was captured.
    driver.run(&Op::Remount).unwrap();
    for i in 0..100 {
        let value = Op::SetXattr {
            path: format!("f{i}"),
            name: "user.new".to_owned(),
            len: 600,
            tag: i,
        };
        driver.run(&value).unwrap();
        let renamed = Op::Rename(format!("f{i}"), format!("g{i}"), 0);
        driver.run(&renamed).unwrap();
    }
    // The journal is at the beginning.
    driver.machine.devices[0].fail_writes(Times::Always, Some(4 << 20..u64::MAX));
    assert!(driver.fs().store().checkpoint().is_err());
    assert!(driver.fs().read_only());
    driver.verify_now().unwrap();
}

/// The deletion of an unlinked file failed after its blocks had been freed. Whoever opened it by its
/// number after that read zeros.
#[test]
fn a_file_whose_deletion_failed_does_not_open() {
    let set_up = Machine::new(&Image::format(&Shape::small(1)).unwrap(), 1);
    let (fs, file) = one_file(&set_up);
    let ino = file.ino();
    // In nodes of its own, which deletion reads after the data has gone.
    fs.setxattr(&Caller::root(), ino, b"user.large", &[1; 30_000], 0)
        .unwrap();
    drop(file);
    fs.close().unwrap();
    drop(fs);
    let image = set_up.image();
    let mut failed = 0;
    for after in 0..30 {
        let machine = Machine::new(&image, 1);
        let fs = machine.open().unwrap();
        machine.switch.fail_after(after, Times::Next(1));
        let unlinked = fs.unlink(&Caller::root(), ROOT, b"f");
        let is_hit = !machine.devices[0].struck().is_empty();
        let opened = fs.open_file(ino, libc::O_RDONLY);
        match (unlinked, opened) {
            // Whether its deletion says that it failed or not.
            (Ok(()), Err(error)) => assert_eq!(error.errno(), libc::ESTALE, "I/O {after} failed"),
            (Err(_), Ok(file)) => {
                let bytes = look::content_of(&fs, &file).unwrap();
                assert!(bytes == CONTENT, "I/O {after} failed");
            }
            (unlinked, opened) => panic!("I/O {after} failed: {unlinked:?}, {:?}", opened.err()),
        }
        failed += u32::from(is_hit);
        if !is_hit {
            break;
        }
    }
    // Each node with the attribute, one after the other.
    assert!((3..30).contains(&failed), "{failed}");
}

/// When the last leaf below an index node went, the index node after it took over its keys in their
/// parent, but its own first leaf did not. New names in that range went to that leaf, and when it
/// was split they ended up behind a key that nobody looks behind: a directory that had shrunk by
/// tens of thousands of names, and grew again, lost some of the new ones.
#[test]
fn names_made_after_an_index_node_went_are_found() {
    let mut shape = Shape::small(1);
    shape.tight = true;
    let machine = Machine::new(&Image::format(&shape).unwrap(), 1);
    let fs = machine.open().unwrap();
    let who = Caller::root();
    let name = |round: u32, i: u32| format!("{round}-{i:090}").into_bytes();
    let make = |round, i| {
        let made = fs.mknod(&who, ROOT, &name(round, i), libc::S_IFREG | 0o644, 0);
        made.unwrap().ino
    };
    for i in 0..100 {
        make(0, i);
    }
    let mut listed = Vec::new();
    fs.readdir(ROOT, 0, &mut |entry| {
        listed.push(entry.name.to_vec());
        true
    })
    .unwrap();
    // In the order of keys, so that whole index nodes empty; the upper end stays.
    for gone in listed
        .iter()
        .filter(|name| name.starts_with(b"0-"))
        .take(80)
    {
        fs.unlink(&who, ROOT, gone).unwrap();
    }
    let made: Vec<Ino> = (0..100).map(|i| make(1, i)).collect();
    for (i, ino) in made.iter().enumerate() {
        assert_eq!(fs.lookup(ROOT, &name(1, i as u32)).unwrap().ino, *ino);
    }
    fs.close().unwrap();
    machine.fsck().unwrap();
}

/// A tree was removed, and somebody else removed a directory in it that had been found and not
/// begun. A new directory elsewhere got its number, and what was in that was removed.
#[test]
fn what_has_a_removed_directorys_number_is_not_removed() {
    let machine = Machine::new(&Image::format(&Shape::small(1)).unwrap(), 1);
    let (fs, who) = (machine.open().unwrap(), Caller::root());
    let top = fs.mkdir(&who, ROOT, b"tree", 0o755).unwrap().ino;
    let below = fs.mkdir(&who, top, b"below", 0o755).unwrap().ino;
    fs.mknod(&who, top, b"file", libc::S_IFREG | 0o644, 0)
        .unwrap();
    let other = OnceLock::new();
    // The first time, "file" is gone, and "below" has been found.
    let meanwhile = |_| {
        if other.get().is_none() {
            fs.rmdir(&who, top, b"below").unwrap();
            // The numbers that came back last are used again first, in one order or another.
            let make = |i: u32| {
                let name = format!("other-{i}");
                fs.mkdir(&who, ROOT, name.as_bytes(), 0o755).unwrap().ino
            };
            let made = (0..8).map(make).find(|made| *made == below);
            let made = made.expect("the number is used again");
            fs.mknod(&who, made, b"kept", libc::S_IFREG | 0o644, 0)
                .unwrap();
            other.set(made).unwrap();
        }
    };
    let removed = fs.remove_all(&who, ROOT, b"tree", 1, &meanwhile).unwrap();
    let other = *other.get().unwrap();
    assert_eq!((removed.files, removed.directories), (1, 1));
    fs.lookup(other, b"kept").unwrap();
}

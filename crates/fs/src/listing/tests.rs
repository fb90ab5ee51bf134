//! What is read ahead of a listing is what it comes to, nobody waits for it for ever, and a listing of what is cached has none.

use super::Ahead;
use super::ahead::{COURSES, NAMES};
use crate::api::{Caller, DirEntry, Ino, ROOT};
use crate::dir::is_dot;
use crate::rename::tests::file_system;
use crate::{Error, FileSystem, FsOptions, MkfsOptions};
use base::clock::Clock;
use device::sim::{PowerSwitch, SimDevice};
use device::{Array, BlockDevice};
use format::geometry::{Geometry, GeometryOptions};
use std::collections::BTreeSet;
use std::sync::Arc;

const BYTES: u64 = 64 << 20;
const FILES: usize = 3 * NAMES;

struct World {
    device: Arc<SimDevice>,
    options: FsOptions,
}

impl World {
    /// A file system with one folder of empty files, all of it home.
    fn new() -> World {
        let clock = Clock::manual(1_700_000_000_000_000_000);
        let device = SimDevice::on_switch(BYTES, 5, &PowerSwitch::new());
        let world = World {
            device,
            options: FsOptions::default().without_threads(clock.clone()),
        };
        let devices = vec![Arc::clone(&world.device) as Arc<dyn BlockDevice>];
        let geometry = Geometry::plan(&[BYTES], GeometryOptions::default()).unwrap();
        let array = Array::create(devices, geometry, "test", [7; 16], [9; 16]).unwrap();
        let array = Arc::new(array);
        let mkfs = MkfsOptions {
            clock,
            ..MkfsOptions::default()
        };
        FileSystem::mkfs(&array, &mkfs).unwrap();
        array.write_labels().unwrap();
        let fs = world.open();
        let dir = fs.mkdir(&Caller::root(), ROOT, b"folder", 0o755).unwrap();
        for i in 0..FILES {
            let name = format!("file-{i}");
            create(&fs, dir.ino, &name);
        }
        fs.close().unwrap();
        world
    }

    fn open(&self) -> Arc<FileSystem> {
        let devices = vec![Arc::clone(&self.device) as Arc<dyn BlockDevice>];
        let array = Array::assemble(devices, false).unwrap();
        FileSystem::open(Arc::new(array), self.options.clone()).unwrap()
    }
}

fn create(fs: &FileSystem, dir: Ino, name: &str) {
    let made = fs.create(&Caller::root(), dir, name.as_bytes(), 0o644, libc::O_WRONLY);
    made.unwrap();
}

fn folder(fs: &FileSystem) -> Ino {
    fs.lookup(ROOT, b"folder").unwrap().ino
}

/// One request, for `most` entries and the attributes of those that stay; where the next begins, `None` at the end.
fn request(
    fs: &FileSystem,
    dir: Ino,
    cookie: u64,
    most: usize,
    names: &mut BTreeSet<Vec<u8>>,
) -> Option<u64> {
    let (mut taken, mut next, mut full) = (0, cookie, false);
    fs.readdir_plus(dir, cookie, &mut |entry| {
        full = taken == most;
        if full {
            return false;
        }
        taken += 1;
        next = entry.next;
        if entry.name.starts_with(b"file-") {
            fs.getattr(entry.ino).unwrap();
            assert!(names.insert(entry.name.to_vec()), "listed twice");
        }
        true
    })
    .unwrap();
    full.then_some(next)
}

fn reads(fs: &FileSystem) -> u64 {
    let stats = fs.store.array().stats();
    stats.devices.iter().map(|device| device.reads).sum()
}

#[test]
fn a_request_finds_what_was_read_while_it_was_not_there() {
    let world = World::new();
    let fs = world.open();
    fs.listings.open_for_test();
    let (dir, mut names) = (folder(&fs), BTreeSet::new());
    let mut next = request(&fs, dir, 0, 100, &mut names);
    let mut tasks = 0;
    while let Some(cookie) = next {
        if fs.listings.is_due() {
            tasks += 1;
            fs.listings.turn(&fs.store);
        }
        let before = reads(&fs);
        next = request(&fs, dir, cookie, 100, &mut names);
        assert_eq!(reads(&fs), before, "request from {cookie}");
    }
    assert_eq!(names.len(), FILES);
    assert!((2..=4).contains(&tasks), "{tasks}");
    assert_eq!(fs.listings.courses(), 0, "it ends with the directory");
    // All of it is in memory now.
    let (mut names, mut next) = (BTreeSet::new(), Some(0));
    while let Some(cookie) = next {
        next = request(&fs, dir, cookie, 100, &mut names);
        assert_eq!(fs.listings.courses(), 0);
    }
    assert_eq!(names.len(), FILES);
    fs.close().unwrap();
}

#[test]
fn a_course_ends_where_the_next_inodes_are_in_memory() {
    let world = World::new();
    let fs = world.open();
    fs.listings.open_for_test();
    let dir = folder(&fs);
    let first = request(&fs, dir, 0, 100, &mut BTreeSet::new());
    let mut all = Vec::new();
    fs.readdir(dir, 0, &mut |entry| {
        all.push(entry.ino);
        true
    })
    .unwrap();
    for ino in all {
        fs.getattr(ino).unwrap();
    }
    fs.listings.turn(&fs.store);
    assert_eq!(fs.listings.courses(), 0);
    request(&fs, dir, first.unwrap(), 100, &mut BTreeSet::new());
    assert_eq!(fs.listings.courses(), 0);
    fs.close().unwrap();
}

#[test]
fn a_removed_directory_ends_its_course() {
    let world = World::new();
    let fs = world.open();
    fs.listings.open_for_test();
    let dir = folder(&fs);
    request(&fs, dir, 0, 100, &mut BTreeSet::new()).unwrap();
    assert_eq!((fs.listings.courses(), fs.listings.is_due()), (1, true));
    let other = fs.mkdir(&Caller::root(), ROOT, b"gone", 0o755).unwrap();
    fs.rmdir(&Caller::root(), ROOT, b"gone").unwrap();
    fs.listings.went_on(other.ino, 0..9, true);
    fs.listings.turn(&fs.store);
    fs.listings.turn(&fs.store);
    assert_eq!(fs.listings.courses(), 1, "that of what is gone has ended");
    fs.close().unwrap();
}

#[test]
fn courses_are_told_apart_and_bounded() {
    let ahead = Ahead::new();
    let dir = |i: usize| format::Nid(100 + i as u64);
    ahead.went_on(dir(0), 0..10, true);
    assert_eq!(ahead.courses(), 0, "there is no thread");
    ahead.open_for_test();
    ahead.went_on(dir(0), 0..10, false);
    assert_eq!(ahead.courses(), 0, "it read nothing");
    ahead.went_on(dir(0), 0..10, true);
    ahead.went_on(dir(0), 10..20, false);
    assert_eq!(ahead.courses(), 1);
    // Elsewhere in the same directory, and from its beginning again.
    ahead.went_on(dir(0), 500..510, true);
    ahead.went_on(dir(0), 0..10, true);
    assert_eq!(ahead.courses(), 3);
    for i in 1..2 * COURSES {
        ahead.went_on(dir(i), 0..10, true);
    }
    assert_eq!(ahead.courses(), COURSES);
    ahead.close();
    assert!(!ahead.is_due());
}

/// Who needs what a task is about to bring waits for that, and no longer.
#[test]
fn a_reader_waits_for_what_a_task_brings() {
    let ahead = Arc::new(Ahead::new());
    let dir = format::Nid(100);
    ahead.open_for_test();
    ahead.went_on(dir, 0..10, true);
    let task = ahead.take().unwrap();
    // Not begun: nobody waits.
    ahead.wait_for(dir, 10..20);
    ahead.begin(task, 10..100);
    // Others than those it brings.
    ahead.wait_for(dir, 100..120);
    ahead.wait_for(dir, 0..10);
    ahead.wait_for(format::Nid(101), 10..20);
    let waiter = {
        let ahead = Arc::clone(&ahead);
        base::thread::spawn("waiter", move || {
            ahead.wait_for(dir, 20..40);
            assert!(ahead.came_to(dir) >= 40);
            ahead.wait_for(dir, 60..70);
            assert_eq!(ahead.came_to(dir), u64::MAX);
        })
        .unwrap()
    };
    while !ahead.is_waited_for() {
        base::thread::yield_now();
    }
    ahead.reached(task, 30);
    ahead.reached(task, 40);
    while !ahead.is_waited_for() {
        base::thread::yield_now();
    }
    ahead.end(task, true);
    waiter.join().unwrap();
    // The reader has come to what was brought, so that the next is due.
    assert!(!ahead.is_due());
    ahead.went_on(dir, 10..60, false);
    assert!(ahead.is_due());
    assert_eq!(ahead.take().unwrap().from, 100);
}

/// The same by the thread itself, while others change the folder.
#[test]
fn a_listing_with_its_thread_has_every_name_once() {
    let mut world = World::new();
    world.options.store.background = true;
    for most in [1, 7, 100, 5000] {
        let fs = world.open();
        let dir = folder(&fs);
        let changing = {
            let fs = Arc::clone(&fs);
            base::thread::spawn("changing", move || {
                for i in 0..300 {
                    let name = format!("new-{i}");
                    create(&fs, dir, &name);
                    fs.unlink(&Caller::root(), dir, name.as_bytes()).unwrap();
                }
            })
            .unwrap()
        };
        let (mut names, mut next) = (BTreeSet::new(), Some(0));
        while let Some(cookie) = next {
            next = request(&fs, dir, cookie, most, &mut names);
        }
        assert_eq!(names.len(), FILES);
        changing.join().unwrap();
        fs.close().unwrap();
    }
}

/// Lists a folder with `list`. At its first file all files go, and the folder, and others are made elsewhere, files or folders with files in them, until one
/// has its number.
fn list_while_another_gets_the_number(
    kind: u32,
    list: impl Fn(&FileSystem, Ino, &mut dyn FnMut(DirEntry<'_>) -> bool) -> Result<(), Error>,
) {
    // What this thread's core gives back it gets again.
    base::thread::pin(base::thread::current_cpu()).unwrap();
    let (fs, who) = (file_system(), Caller::root());
    let dir = fs.mkdir(&who, ROOT, b"folder", 0o755).unwrap().ino;
    let elsewhere = fs.mkdir(&who, ROOT, b"elsewhere", 0o755).unwrap().ino;
    let names: Vec<String> = (0..400).map(|i| format!("file-{i}")).collect();
    names.iter().for_each(|name| create(&fs, dir, name));
    let (mut listed, mut got_it) = (0, false);
    let outcome = list(&fs, dir, &mut |entry| {
        if is_dot(entry.name) {
            return true;
        }
        assert!(entry.name.starts_with(b"file-"), "of another folder");
        listed += 1;
        if listed == 1 {
            for name in &names {
                fs.unlink(&who, dir, name.as_bytes()).unwrap();
            }
            // Files' numbers come first.
            (0..8).for_each(|i| create(&fs, elsewhere, &format!("before-{i}")));
            fs.rmdir(&who, ROOT, b"folder").unwrap();
            let make = |name: String| match kind {
                libc::S_IFDIR => fs.mkdir(&who, elsewhere, name.as_bytes(), 0o755),
                _ => fs.mknod(&who, elsewhere, name.as_bytes(), kind, 0),
            };
            got_it = (0..8).any(|i| make(format!("{i}")).unwrap().ino == dir);
            for i in (0..400).filter(|_| got_it && kind == libc::S_IFDIR) {
                create(&fs, dir, &format!("new-{i}"));
            }
        }
        true
    });
    assert!(got_it, "nothing has the number");
    assert!((1..names.len()).contains(&listed), "{listed}");
    assert!(
        matches!(outcome, Err(Error::Stale(gone)) if gone == dir),
        "{outcome:?}"
    );
    fs.close().unwrap();
}

/// Who listed was told of damage where a file had the number by then, and of another folder's names.
#[test]
fn a_listing_ends_with_the_folder_that_it_began_in() {
    for kind in [libc::S_IFREG, libc::S_IFDIR] {
        list_while_another_gets_the_number(kind, |fs, dir, each| fs.readdir(dir, 0, each));
        list_while_another_gets_the_number(kind, |fs, dir, each| fs.readdir_plus(dir, 0, each));
        list_while_another_gets_the_number(kind, |fs, dir, each| {
            let mut hidden = Ok(());
            fs.readdir_around(dir, &mut |entry| match entry {
                Ok(entry) => each(entry),
                Err(error) => {
                    hidden = Err(error);
                    true
                }
            })?;
            hidden
        });
    }
}

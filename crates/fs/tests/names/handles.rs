//! Calls relative to a directory handle.

use crate::world::{World, list};
use base::rng::Rng;
use fs::{Caller, Dir, Error, FileSystem, Ino, ROOT};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

const FILE: u32 = libc::S_IFREG | 0o644;

fn made(fs: &Arc<FileSystem>, name: &str) -> Dir {
    fs.mkdir(&Caller::root(), ROOT, name.as_bytes(), 0o755)
        .unwrap();
    fs.open_dir_at(ROOT, name.as_bytes()).unwrap()
}

/// Everything that looks for a name in a directory, or makes one.
fn refused(fs: &Arc<FileSystem>, dir: &Dir, outside: fs::Ino) {
    let who = Caller::root();
    let gone = |what: &str, done: Result<(), Error>| {
        assert!(matches!(done, Err(Error::NotFound)), "{what}: {done:?}");
    };
    gone("lookup", fs.lookup(dir, b"name").map(drop));
    gone("dot", fs.lookup(dir, b"..").map(drop));
    gone(
        "create",
        fs.create(&who, dir, b"name", 0o644, libc::O_RDWR).map(drop),
    );
    gone("mknod", fs.mknod(&who, dir, b"name", FILE, 0).map(drop));
    gone("mkdir", fs.mkdir(&who, dir, b"name", 0o755).map(drop));
    gone("symlink", fs.symlink(&who, dir, b"name", b"to").map(drop));
    gone("link", fs.link(&who, outside, dir, b"name").map(drop));
    gone(
        "tmpfile",
        fs.tmpfile(&who, dir, 0o644, libc::O_RDWR).map(drop),
    );
    gone("open", fs.open_at(dir, b"name", libc::O_RDONLY).map(drop));
    gone("unlink", fs.unlink(&who, dir, b"name"));
    gone("rmdir", fs.rmdir(&who, dir, b"name"));
    gone("rename", fs.rename(&who, dir, b"name", dir, b"other", 0));
    gone(
        "rename into",
        fs.rename(&who, ROOT, b"outside", dir, b"in", 0),
    );
    gone("open_dir", fs.open_dir(dir.ino()).map(drop));
}

#[test]
fn calls_by_handle_do_what_calls_by_number_do() {
    let mut world = World::new(1, 64 << 20, 1);
    let fs = world.open();
    let who = Caller::root();
    let (a, b) = (made(&fs, "a"), made(&fs, "b"));
    assert_eq!(fs.lookup(ROOT, b"a").unwrap(), a.stat().unwrap());
    assert!(matches!(fs.open_dir_at(&a, b"none"), Err(Error::NotFound)));
    // From a few names in the inode to a tree of leaves, under the handle.
    for i in 0..500 {
        let name = format!("name-{i}");
        let attr = fs.mknod(&who, &a, name.as_bytes(), FILE, 0).unwrap();
        assert_eq!(fs.lookup(a.ino(), name.as_bytes()).unwrap(), attr);
        assert_eq!(fs.lookup(&a, name.as_bytes()).unwrap(), attr);
    }
    let (attr, file) = fs.create(&who, &a, b"open", 0o644, libc::O_RDWR).unwrap();
    fs.write(&file, 0, b"content").unwrap();
    let (found, again) = fs.open_at(&a, b"open", libc::O_RDONLY).unwrap();
    assert_eq!((found.ino, found.size), (attr.ino, 7));
    let mut content = [0; 7];
    fs.read(&again, 0, &mut content).unwrap();
    assert_eq!(&content, b"content");
    fs.rename(&who, &a, b"name-7", &b, b"moved", 0).unwrap();
    assert!(matches!(fs.lookup(&a, b"name-7"), Err(Error::NotFound)));
    fs.link(&who, attr.ino, &b, b"linked").unwrap();
    fs.unlink(&who, &b, b"linked").unwrap();
    let inner = fs.mkdir(&who, &b, b"inner", 0o755).unwrap();
    let handle = fs.open_dir_at(&b, b"inner").unwrap();
    assert_eq!(handle.ino(), inner.ino);
    assert_eq!(fs.lookup(&handle, b"..").unwrap().ino, b.ino());
    assert_eq!(a.stat().unwrap().nlink, 2);
    assert_eq!(b.stat().unwrap().nlink, 3);
    assert!(matches!(
        fs.open_dir_at(&a, b"open"),
        Err(Error::NotADirectory)
    ));
    assert!(matches!(
        fs.open_at(&b, b"inner", libc::O_RDONLY),
        Err(Error::IsADirectory)
    ));
    let mut listed = 0;
    fs.readdir(&a, 0, &mut |_| {
        listed += 1;
        true
    })
    .unwrap();
    assert_eq!(listed, 500 + 2);
    drop((a, b, handle, file, again));
    let fs = world.remount(fs);
    assert_eq!(list(&fs, fs.lookup(ROOT, b"a").unwrap().ino, 99).len(), 500);
    fs.close().unwrap();
}

/// A removed directory stays what its handle refers to, and becomes no other.
#[test]
fn a_removed_directory_takes_no_names_and_its_number_is_not_reused() {
    let mut world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let who = Caller::root();
    let outside = fs.mknod(&who, ROOT, b"outside", FILE, 0).unwrap().ino;
    let dir = made(&fs, "d");
    // One with a tree is removed in more steps than one without.
    let large = made(&fs, "large");
    for i in 0..300 {
        let name = format!("name-{i}");
        fs.mknod(&who, &large, name.as_bytes(), FILE, 0).unwrap();
    }
    for i in 0..300 {
        fs.unlink(&who, &large, format!("name-{i}").as_bytes())
            .unwrap();
    }
    fs.rmdir(&who, ROOT, b"d").unwrap();
    fs.rmdir(&who, ROOT, b"large").unwrap();
    for gone in [&dir, &large] {
        refused(&fs, gone, outside);
        let attr = gone.stat().unwrap();
        assert_eq!((attr.ino, attr.nlink), (gone.ino(), 0));
        assert!(list(&fs, gone.ino(), 10).is_empty());
    }
    // Others get numbers, but not theirs, while the handles are there.
    for i in 0..600 {
        let attr = fs.mkdir(&who, ROOT, format!("new-{i}").as_bytes(), 0o755);
        let ino = attr.unwrap().ino;
        assert!(ino != dir.ino() && ino != large.ino());
    }
    refused(&fs, &dir, outside);
    let (ino, generation) = (dir.ino(), dir.generation());
    drop((dir, large));
    // Now it goes, and who has the number next is another.
    assert!(matches!(fs.open_dir(ino), Err(Error::Stale(_))));
    let mut reused = false;
    for i in 0..2000 {
        let attr = fs.mkdir(&who, ROOT, format!("later-{i}").as_bytes(), 0o755);
        let attr = attr.unwrap();
        reused |= attr.ino == ino;
        assert!(attr.ino != ino || attr.generation != generation);
    }
    assert!(reused, "the number comes back");
    fs.close().unwrap();
    drop(fs);
    world.devices = world.devices.iter().map(|d| d.reopen()).collect();
    world.check();
}

/// The power goes while handles of removed directories are there: recovery ends them.
#[test]
fn a_power_cut_leaves_no_directory_that_only_a_handle_kept() {
    let mut world = World::new(1, 64 << 20, 3);
    let fs = world.open();
    let dir = made(&fs, "d");
    let ino = dir.ino();
    fs.rmdir(&Caller::root(), ROOT, b"d").unwrap();
    fs.sync().unwrap();
    world.switch.cut_now();
    drop((dir, fs));
    // It checks what is there, too.
    world.restart(&mut Rng::new(3));
    let fs = world.open();
    assert!(matches!(fs.getattr(ino), Err(Error::Stale(_))));
    fs.close().unwrap();
}

/// Handles open and close while the directory comes and goes: each has a directory, which it keeps, or
/// none; and none is left behind.
#[test]
fn opening_meets_removal() {
    let mut world = World::new(1, 64 << 20, 4);
    let fs = world.open();
    base::thread::parallel(3, |me| {
        let (who, mut rng) = (Caller::root(), Rng::new(me as u64));
        for i in 0..400 {
            if me == 0 {
                fs.mkdir(&who, ROOT, b"d", 0o755).unwrap();
                loop {
                    match fs.rmdir(&who, ROOT, b"d") {
                        Ok(()) => break,
                        Err(Error::NotEmpty) => base::thread::yield_now(),
                        Err(error) => panic!("{error}"),
                    }
                }
                continue;
            }
            let Ok(dir) = fs.open_dir_at(ROOT, b"d") else {
                continue;
            };
            let name = format!("{me}-{i}");
            for _ in 0..rng.below(3) {
                match fs.mknod(&who, &dir, name.as_bytes(), FILE, 0) {
                    Ok(attr) => {
                        assert_eq!(fs.lookup(&dir, name.as_bytes()).unwrap().ino, attr.ino);
                        fs.unlink(&who, &dir, name.as_bytes()).unwrap();
                    }
                    Err(Error::NotFound) => assert_eq!(dir.stat().unwrap().nlink, 0),
                    Err(error) => panic!("{error}"),
                }
            }
            assert_eq!(dir.stat().unwrap().generation, dir.generation());
        }
    });
    let fs = world.remount(fs);
    assert!(list(&fs, ROOT, 9).is_empty());
    fs.close().unwrap();
}

#[test]
fn a_handle_is_of_one_file_system() {
    let (one, other) = (World::new(1, 64 << 20, 5), World::new(1, 64 << 20, 6));
    let (fs, other) = (one.open(), other.open());
    let dir = other.open_dir(ROOT).unwrap();
    let made = fs.mkdir(&Caller::root(), &dir, b"d", 0o755);
    assert!(matches!(made, Err(Error::Invalid(_))), "{made:?}");
    fs.mkdir(&Caller::root(), ROOT, b"d", 0o755).unwrap();
    let moved = fs.rename(&Caller::root(), ROOT, b"d", &dir, b"e", 0);
    assert!(matches!(moved, Err(Error::Invalid(_))), "{moved:?}");
    drop(dir);
    fs.close().unwrap();
    other.close().unwrap();
}

/// A file that a crash took back left its number and its generation to the next one, which who had kept a handle of it then opened.
#[test]
fn a_handle_of_a_file_that_a_crash_took_back_is_no_other_files() {
    let mut world = World::new(1, 64 << 20, 7);
    let mut fs = world.open();
    let who = Caller::root();
    let mut handed_out: BTreeMap<Ino, BTreeSet<u32>> = BTreeMap::new();
    let mut uses = 0;
    for (round, cut) in [true, true, false, true, false, false].iter().enumerate() {
        for i in 0..20 {
            let name = format!("{round}-{i}");
            let attr = fs.mknod(&who, ROOT, name.as_bytes(), FILE, 0).unwrap();
            let before = handed_out.entry(attr.ino).or_default();
            assert!(before.insert(attr.handle_generation()), "{name}: {attr:?}");
            uses += 1;
            if *cut || i % 2 == 0 {
                let found = fs.lookup(ROOT, name.as_bytes()).unwrap();
                assert_eq!(found.handle_generation(), attr.handle_generation());
            } else {
                fs.unlink(&who, ROOT, name.as_bytes()).unwrap();
            }
        }
        let kept = list(&fs, ROOT, 50);
        let handle = |fs: &FileSystem, ino| fs.getattr(ino).unwrap().handle_generation();
        let handles: Vec<u32> = kept.iter().map(|(_, ino)| handle(&fs, *ino)).collect();
        fs = match cut {
            true => {
                world.switch.cut_now();
                drop(fs);
                world.restart(&mut Rng::new(round as u64));
                // A machine takes its time to start.
                world.clock.advance(Duration::from_secs(1));
                world.open()
            }
            false => {
                let fs = world.remount(fs);
                let again: Vec<u32> = kept.iter().map(|(_, ino)| handle(&fs, *ino)).collect();
                assert_eq!(again, handles);
                fs
            }
        };
    }
    assert!(handed_out.len() * 2 < uses, "numbers were used again");
    assert_eq!(fs.getattr(ROOT).unwrap().handle_generation(), 0);
    fs.close().unwrap();
}

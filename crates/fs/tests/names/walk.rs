//! Many threads on one tree: walks, and removal of all of it.

use crate::world::{World, list};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use fs::{Caller, Error, FileSystem, Ino, ROOT, Removed};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

fn mkdir(fs: &FileSystem, parent: Ino, name: &str) -> Ino {
    let made = fs.mkdir(&Caller::root(), parent, name.as_bytes(), 0o755);
    made.unwrap().ino
}

fn file(fs: &FileSystem, parent: Ino, name: &str, bytes: usize) -> Ino {
    let who = Caller::root();
    let (attr, file) = fs
        .create(&who, parent, name.as_bytes(), 0o644, libc::O_RDWR)
        .unwrap();
    let mut written = 0;
    while written < bytes {
        let piece = vec![name.len() as u8; bytes - written];
        written += fs.write(&file, written as u64, &piece).unwrap();
    }
    attr.ino
}

/// Folders in folders, with files of all kinds; returns how many of each it made.
fn grow(fs: &FileSystem, top: Ino, depth: usize) -> Removed {
    let mut made = Removed::default();
    let mut level = vec![top];
    for below in 0..depth {
        let mut next = Vec::new();
        for dir in level {
            for i in 0..3 {
                next.push(mkdir(fs, dir, &format!("folder-{i}")));
                made.directories += 1;
            }
            // Some folders are inline, others have many leaves.
            let files = if below == 1 { 700 } else { 5 };
            for i in 0..files {
                file(fs, dir, &format!("file-with-a-long-name-{i}"), i * 37);
                made.files += 1;
            }
        }
        level = next;
    }
    made
}

fn free(fs: &FileSystem) -> u64 {
    fs.sync().unwrap();
    fs.sync().unwrap();
    fs.statfs().blocks_free
}

#[test]
fn a_tree_goes_with_all_that_is_in_it() {
    for mask in [None, Some(0xF << 60)] {
        let mut world = World::new(2, 64 << 20, 1);
        world.options.hash_mask = mask;
        let fs = world.open();
        let who = Caller::root();
        let before = free(&fs);
        let top = mkdir(&fs, ROOT, "top");
        let made = grow(&fs, top, 3);
        // What is special about a file makes it go alone.
        let linked = file(&fs, top, "linked", 5000);
        fs.link(&who, linked, ROOT, b"outside").unwrap();
        fs.symlink(&who, top, b"symlink", b"nowhere").unwrap();
        let attributed = file(&fs, top, "attributed", 100);
        let value = vec![7; 30_000];
        fs.setxattr(&who, attributed, b"user.x", &value, 0).unwrap();
        let used = file(&fs, top, "used", 9000);
        let open = fs.open_file(used, libc::O_RDONLY).unwrap();

        let told = AtomicU64::new(0);
        let progress = |n| {
            told.fetch_add(n, Ordering::Relaxed);
        };
        let removed = fs.remove_all(&who, ROOT, b"top", 3, &progress).unwrap();
        assert_eq!(removed.files, made.files + 4);
        assert_eq!(removed.directories, made.directories + 1);
        assert_eq!(told.into_inner(), removed.files + removed.directories);
        assert!(matches!(fs.lookup(ROOT, b"top"), Err(Error::NotFound)));
        assert_eq!(fs.lookup(ROOT, b"outside").unwrap().nlink, 1);
        let mut bytes = [0; 9000];
        assert_eq!(fs.read(&open, 0, &mut bytes).unwrap(), 9000);
        drop(open);
        fs.unlink(&who, ROOT, b"outside").unwrap();
        let fs = world.remount(fs);
        let after = free(&fs);
        assert!(
            after + 64 >= before,
            "{before} blocks were free, {after} are"
        );
        assert!(list(&fs, ROOT, 100).is_empty());
        fs.close().unwrap();
    }
}

#[test]
fn what_is_no_tree_is_removed_or_refused_as_usual() {
    let world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let who = Caller::root();
    file(&fs, ROOT, "plain", 10);
    let remove = |name: &[u8]| fs.remove_all(&who, ROOT, name, 2, &|_| {});
    assert_eq!(
        remove(b"plain").unwrap(),
        Removed {
            files: 1,
            directories: 0
        }
    );
    assert!(matches!(remove(b"plain"), Err(Error::NotFound)));
    let dir = mkdir(&fs, ROOT, "dir");
    file(&fs, dir, "kept", 10);
    for name in [&b"."[..], b".."] {
        let error = fs.remove_all(&who, dir, name, 2, &|_| {}).unwrap_err();
        assert!(
            matches!(error, Error::Invalid(_) | Error::NotEmpty),
            "{error}"
        );
    }
    assert_eq!(list(&fs, dir, 10).len(), 1);
    fs.close().unwrap();
}

#[test]
fn a_walk_meets_everything_once() {
    let world = World::new(1, 64 << 20, 3);
    let fs = world.open();
    let top = mkdir(&fs, ROOT, "top");
    let made = grow(&fs, top, 3);
    let met = Mutex::new(rank::LEAF, BTreeMap::new());
    fs.walk(top, 3, &|dir, entry| {
        let place = (dir, entry.name.to_vec());
        let before = met.lock().insert(place, entry.kind);
        assert_eq!(before, None, "met twice");
        Ok(true)
    })
    .unwrap();
    let met = met.into_inner();
    let folders = met.values().filter(|kind| **kind == libc::DT_DIR).count();
    assert_eq!(folders as u64, made.directories);
    assert_eq!(met.len() as u64, made.directories + made.files);

    let shallow = AtomicU64::new(0);
    fs.walk(top, 3, &|_, _| {
        shallow.fetch_add(1, Ordering::Relaxed);
        Ok(false)
    })
    .unwrap();
    assert_eq!(shallow.into_inner(), 3 + 5);

    // So many workers are the most that there are.
    let all = AtomicU64::new(0);
    fs.walk(top, usize::MAX, &|_, _| {
        all.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    })
    .unwrap();
    assert_eq!(all.into_inner(), made.directories + made.files);

    let refused = fs.walk(top, 3, &|_, _| Err(Error::AccessDenied));
    assert!(matches!(refused, Err(Error::AccessDenied)));
    fs.close().unwrap();
}

/// Whatever the moment at which the power goes: what is left is a sound part of what was, and
/// removing it again succeeds.
#[test]
fn a_removal_cut_short_leaves_a_part_of_the_tree() {
    let mut rng = Rng::new(4);
    let mut parts = 0;
    for _ in 0..12 {
        let mut world = World::new(2, 64 << 20, 5);
        let fs = world.open();
        let who = Caller::root();
        let top = mkdir(&fs, ROOT, "top");
        grow(&fs, top, 3);
        let kept = file(&fs, ROOT, "kept", 10_000);
        fs.sync().unwrap();
        fs.store().checkpoint().unwrap();
        let mut names = BTreeMap::new();
        collect(&fs, top, &mut names);

        world.switch.cut_after(rng.below(120));
        let commit = |_| {
            // Many small batches, so that the cut falls between them; one fails at the cut.
            let done = fs.store().commit_through(fs.store().epoch());
            assert!(done.is_ok() || world.switch.is_cut());
        };
        let removed = fs.remove_all(&who, ROOT, b"top", 2, &commit);
        assert!(removed.is_ok() || world.switch.is_cut());
        world.switch.cut_now();
        assert!(fs.close().is_err());
        drop(fs);
        world.restart(&mut rng);
        let fs = world.open();
        assert_eq!(fs.getattr(kept).unwrap().size, 10_000);
        let found = fs.lookup(ROOT, b"top");
        assert!(matches!(found, Ok(_) | Err(Error::NotFound)), "{found:?}");
        if let Ok(attr) = found {
            let mut left = BTreeMap::new();
            collect(&fs, attr.ino, &mut left);
            assert!(
                left.iter()
                    .all(|(place, size)| names.get(place) == Some(size))
            );
            parts += u32::from(left.len() < names.len());
            fs.remove_all(&who, ROOT, b"top", 2, &|_| {}).unwrap();
        }
        fs.close().unwrap();
        drop(fs);
        world.check();
    }
    // The others had not begun when the power went, or were over.
    assert!(parts >= 4, "{parts}");
}

fn collect(fs: &FileSystem, top: Ino, into: &mut BTreeMap<(Ino, Vec<u8>), u64>) {
    let found = Mutex::new(rank::LEAF, Vec::new());
    fs.walk(top, 1, &|dir, entry| {
        found.lock().push((dir, entry.name.to_vec(), entry.ino));
        Ok(true)
    })
    .unwrap();
    for (dir, name, ino) in found.into_inner() {
        let attr = fs.getattr(ino).unwrap();
        let size = if attr.is_dir() { 0 } else { attr.size };
        into.insert((dir, name), size);
    }
}

/// Others make and remove files in the tree meanwhile.
#[test]
fn a_tree_in_use_is_removed_or_found_not_empty() {
    let world = World::new(1, 128 << 20, 6);
    let fs = world.open();
    let who = Caller::root();
    for round in 0..20u64 {
        let top = mkdir(&fs, ROOT, "top");
        grow(&fs, top, 2);
        base::thread::parallel(3, |i| {
            if i == 0 {
                match fs.remove_all(&who, ROOT, b"top", 2, &|_| {}) {
                    Ok(_) | Err(Error::NotEmpty) => {}
                    Err(error) => panic!("{error}"),
                }
                return;
            }
            let mut rng = Rng::new(round * 3 + i as u64);
            for n in 0..400 {
                let name = format!("file-with-a-long-name-{}", rng.below(700));
                let outcome = match n % 3 {
                    0 => fs.unlink(&who, top, name.as_bytes()),
                    1 => fs.rename(&who, top, name.as_bytes(), ROOT, name.as_bytes(), 0),
                    _ => fs
                        .mknod(&who, top, name.as_bytes(), libc::S_IFREG | 0o600, 0)
                        .map(|_| ()),
                };
                match outcome {
                    Ok(()) | Err(Error::NotFound | Error::Exists | Error::Stale(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        match fs.remove_all(&who, ROOT, b"top", 2, &|_| {}) {
            Ok(_) | Err(Error::NotFound) => {}
            Err(error) => panic!("{error}"),
        }
    }
    fs.close().unwrap();
    drop(fs);
    world.check();
}

/// Calls `act` when the first file of a tree has gone, while its removal goes on.
fn remove_beside(fs: &FileSystem, act: impl Fn() + Sync) -> Removed {
    let once = AtomicBool::new(false);
    let progress = |_| {
        if !once.swap(true, Ordering::SeqCst) {
            act();
        }
    };
    fs.remove_all(&Caller::root(), ROOT, b"x", 1, &progress)
        .unwrap()
}

#[test]
fn what_takes_the_name_of_a_tree_meanwhile_is_not_removed() {
    let world = World::new(1, 64 << 20, 10);
    let fs = world.open();
    let who = Caller::root();
    let x = mkdir(&fs, ROOT, "x");
    file(&fs, x, "f", 10);
    let removed = remove_beside(&fs, || {
        fs.rename(&who, ROOT, b"x", ROOT, b"y", 0).unwrap();
        mkdir(&fs, ROOT, "x");
    });
    assert_eq!((removed.files, removed.directories), (1, 0));
    assert_ne!(fs.lookup(ROOT, b"x").unwrap().ino, x);
    assert_eq!(fs.lookup(ROOT, b"y").unwrap().ino, x);
    fs.close().unwrap();
    drop(fs);
    world.check();
}

/// A directory that was moved into one whose names had been read made the removal fail.
#[test]
fn what_others_move_within_a_tree_goes_with_it() {
    let world = World::new(1, 64 << 20, 14);
    let fs = world.open();
    let who = Caller::root();
    let x = mkdir(&fs, ROOT, "x");
    let dir = mkdir(&fs, x, "dir");
    file(&fs, dir, "f", 10);
    for i in 0..16 {
        mkdir(&fs, x, &format!("sub-{i}"));
    }
    let moved = AtomicU64::new(0);
    let progress = |_| {
        if moved.load(Ordering::SeqCst) > 0 || fs.lookup(dir, b"f").is_ok() {
            return;
        }
        for i in 0..16 {
            let name = format!("sub-{i}").into_bytes();
            let done = fs.rename(&who, x, &name, dir, &name, 0);
            moved.fetch_add(u64::from(done.is_ok()), Ordering::SeqCst);
        }
        file(&fs, dir, "g", 10);
    };
    let removed = fs.remove_all(&who, ROOT, b"x", 1, &progress).unwrap();
    assert!(moved.into_inner() > 0);
    assert_eq!((removed.files, removed.directories), (2, 18));
    assert!(matches!(fs.lookup(ROOT, b"x"), Err(Error::NotFound)));
    fs.close().unwrap();
    drop(fs);
    world.check();
}

/// Who makes files without end is not waited for.
#[test]
fn a_tree_that_others_fill_again_and_again_is_found_not_empty() {
    let world = World::new(1, 64 << 20, 15);
    let fs = world.open();
    let x = mkdir(&fs, ROOT, "x");
    file(&fs, x, "f", 10);
    let made = AtomicU64::new(0);
    let progress = |_| {
        let i = made.fetch_add(1, Ordering::SeqCst);
        file(&fs, x, &format!("f{i}"), 10);
    };
    let refused = fs.remove_all(&Caller::root(), ROOT, b"x", 1, &progress);
    assert!(matches!(refused, Err(Error::NotEmpty)), "{refused:?}");
    assert_eq!(list(&fs, x, 10).len(), 1);
    fs.close().unwrap();
    drop(fs);
    world.check();
}

/// The tree is taken away beside its removal, and other directories get the numbers and names of what it had.
#[test]
fn who_has_the_number_of_a_directory_of_a_tree_keeps_what_is_in_it() {
    let world = World::new(1, 64 << 20, 12);
    let fs = world.open();
    let who = Caller::root();
    let x = mkdir(&fs, ROOT, "x");
    let sub = mkdir(&fs, x, "sub");
    file(&fs, sub, "f", 10);
    fs.checkpoint().unwrap();
    let reused = Mutex::new(rank::LEAF, None);
    let removed = remove_beside(&fs, || {
        fs.rmdir(&who, x, b"sub").unwrap();
        fs.rmdir(&who, ROOT, b"x").unwrap();
        fs.checkpoint().unwrap();
        let named = (0..20_000).find(|i| mkdir(&fs, ROOT, &format!("new-{i}")) == x);
        *reused.lock() = named;
        mkdir(&fs, x, "sub");
    });
    assert!(reused.into_inner().is_some(), "the number comes back");
    assert_eq!((removed.files, removed.directories), (1, 0));
    fs.lookup(x, b"sub").unwrap();
    fs.close().unwrap();
    drop(fs);
    world.check();
}

/// The others of the crew do not wait for it for ever.
#[test]
fn a_walk_ends_when_what_it_calls_panics() {
    let world = World::new(1, 64 << 20, 9);
    let fs = world.open();
    for name in ["a", "b", "c"] {
        fs.mkdir(&Caller::root(), ROOT, name.as_bytes(), 0o755)
            .unwrap();
    }
    let walk = || fs.walk(ROOT, 4, &|_, _| panic!("as the test wants"));
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(walk));
    assert!(outcome.is_err());
    fs.close().unwrap();
}

/// What `each` failed with was taken for the removal of the directory: the rest of it was not met, and the walk said that all was well.
#[test]
fn an_error_of_whoever_walks_is_no_removed_directory() {
    let world = World::new(1, 64 << 20, 12);
    let fs = world.open();
    let top = mkdir(&fs, ROOT, "top");
    for i in 0..300 {
        file(&fs, top, &format!("file-with-a-long-name-{i}"), 0);
    }
    for error in [Error::NotFound, Error::Stale(top), Error::Stale(ROOT)] {
        let met = AtomicU64::new(0);
        let walked = fs.walk(top, 1, &|_, _| match met.fetch_add(1, Ordering::Relaxed) {
            2 => Err(error.clone()),
            _ => Ok(true),
        });
        assert_eq!(walked.unwrap_err().to_string(), error.to_string());
        assert_eq!(met.into_inner(), 3);
    }
    // One that is removed at this moment has nothing any more.
    let below = mkdir(&fs, top, "below");
    file(&fs, below, "file", 0);
    let walked = fs.walk(top, 1, &|_, entry| {
        if entry.name == b"below" {
            fs.remove_all(&Caller::root(), top, b"below", 1, &|_| {})?;
        }
        Ok(true)
    });
    walked.unwrap();
    fs.close().unwrap();
}

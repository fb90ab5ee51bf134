//! Paths: names that are followed one after the other.

use crate::world::World;
use base::rng::Rng;
use base::thread::parallel;
use fs::{Attr, Caller, Error, FileSystem, Ino, ROOT};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const FILE: u32 = libc::S_IFREG | 0o644;

fn mkdir(fs: &FileSystem, dir: Ino, name: &str) -> Attr {
    let who = Caller::root();
    fs.mkdir(&who, dir, name.as_bytes(), 0o755).unwrap()
}

fn touch(fs: &FileSystem, dir: Ino, name: &str) -> Attr {
    let who = Caller::root();
    fs.mknod(&who, dir, name.as_bytes(), FILE, 0).unwrap()
}

fn errno(fs: &FileSystem, from: Ino, path: &str) -> i32 {
    fs.stat_at(from, path.as_bytes()).unwrap_err().errno()
}

#[test]
fn a_path_leads_where_its_names_lead() {
    let fs = World::new(1, 64 << 20, 1).open();
    let who = Caller::root();
    let a = mkdir(&fs, ROOT, "a").ino;
    let b = mkdir(&fs, a, "b").ino;
    let file = touch(&fs, b, "file");
    let stat = |from: Ino, path: &str| fs.stat_at(from, path.as_bytes()).unwrap();
    for path in [
        "a/b/file",
        "/a/b/file",
        "a//b/./file",
        "a/b/../../a/b/file",
        "//a/../a/b/file",
    ] {
        assert_eq!(stat(ROOT, path), file, "{path}");
        assert_eq!(fs.resolve(path.as_bytes()).unwrap(), file, "{path}");
    }
    assert_eq!(stat(a, "b/file"), file);
    assert_eq!(stat(b, "/a/b/file"), file);
    assert_eq!(stat(b, "../b/file"), file);
    assert_eq!(stat(ROOT, "../..").ino, ROOT);
    assert_eq!(
        (stat(a, "").ino, stat(a, "/").ino, stat(a, ".").ino),
        (a, ROOT, a)
    );
    assert_eq!(errno(&fs, ROOT, "a/none/file"), libc::ENOENT);
    assert_eq!(errno(&fs, ROOT, "a/b/file/more"), libc::ENOTDIR);
    assert_eq!(errno(&fs, ROOT, "a/b/file/"), libc::ENOTDIR);
    assert_eq!(errno(&fs, ROOT, "a/b/file//"), libc::ENOTDIR);
    assert_eq!(stat(ROOT, "a/b/").ino, b);
    assert_eq!(errno(&fs, ROOT, "a/b/file/."), libc::ENOTDIR);
    assert_eq!(errno(&fs, ROOT, "a/b/file/.."), libc::ENOTDIR);
    assert_eq!(
        errno(&fs, ROOT, &format!("a/{}", "x".repeat(256))),
        libc::ENAMETOOLONG
    );
    assert_eq!(errno(&fs, file.ino, "more"), libc::ENOTDIR);
    assert_eq!(fs.stat_at(file.ino, b"").unwrap(), file);
    // By a handle, and by a handle of a directory that was removed.
    let handle = fs.open_dir(b).unwrap();
    assert_eq!(fs.stat_at(&handle, b"file").unwrap(), file);
    assert_eq!(fs.stat_at(&handle, b"../b/file").unwrap(), file);
    fs.unlink(&who, b, b"file").unwrap();
    fs.rmdir(&who, a, b"b").unwrap();
    assert!(matches!(fs.stat_at(&handle, b"file"), Err(Error::NotFound)));
    assert!(matches!(fs.stat_at(&handle, b".."), Err(Error::NotFound)));
    assert_eq!(errno(&fs, b, "file"), libc::ENOENT);
    drop(handle);
    assert_eq!(errno(&fs, b, "file"), libc::ESTALE);
    fs.close().unwrap();
}

#[test]
fn symbolic_links_are_followed() {
    let fs = World::new(1, 64 << 20, 2).open();
    let who = Caller::root();
    let a = mkdir(&fs, ROOT, "a").ino;
    let b = mkdir(&fs, a, "b").ino;
    let file = touch(&fs, b, "file");
    let link = |dir, name: &str, to: &str| {
        let made = fs.symlink(&who, dir, name.as_bytes(), to.as_bytes());
        made.unwrap()
    };
    link(b, "up", "..");
    link(b, "far", "/a/b");
    link(a, "near", "b/up/b/");
    link(a, "last", "near/file");
    link(b, "loop", "loop");
    for path in [
        "a/b/up/b/file",
        "a/b/far/file",
        "a/near/file",
        "a/last",
        "a/b/far/up/near/far/file",
    ] {
        let found = fs.stat_at(ROOT, path.as_bytes()).unwrap();
        assert_eq!(found, file, "{path}");
    }
    let short = link(a, "short", "b/nothing");
    assert_eq!(errno(&fs, a, "short"), libc::ENOENT);
    assert_eq!(errno(&fs, a, "b/loop"), libc::ELOOP);
    assert_eq!(errno(&fs, a, "last/more"), libc::ENOTDIR);
    // Where a path begins is not followed.
    assert_eq!(fs.stat_at(short.ino, b"").unwrap().ino, short.ino);
    let mut last = "b".to_owned();
    for i in 0..41 {
        let name = format!("l{i}");
        link(a, &name, &last);
        last = name;
    }
    assert_eq!(fs.stat_at(a, b"l39/file").unwrap(), file);
    assert_eq!(errno(&fs, a, "l40/file"), libc::ELOOP);
    fs.close().unwrap();
}

/// As often as directories on the way go and come, and their numbers become files' or other directories': a path leads to
/// what it names, or nowhere.
#[test]
fn a_path_leads_to_nothing_that_took_a_number() {
    let fs = World::new(1, 128 << 20, 3).open();
    let who = Caller::root();
    let done = AtomicBool::new(false);
    base::thread::parallel(3, |i| {
        if i == 0 {
            for round in 0..3000 {
                let outer = mkdir(&fs, ROOT, "outer").ino;
                let inner = mkdir(&fs, outer, "inner").ino;
                let made = fs.mknod(&who, inner, b"file", FILE | 0o111, 0).unwrap();
                assert_eq!(fs.stat_at(ROOT, b"outer/inner/file").unwrap(), made);
                fs.unlink(&who, inner, b"file").unwrap();
                fs.rmdir(&who, outer, b"inner").unwrap();
                // What takes the number has the same name in it.
                let other = mkdir(&fs, ROOT, "other").ino;
                touch(&fs, other, "file");
                touch(&fs, ROOT, "more");
                fs.rmdir(&who, ROOT, b"outer").unwrap();
                fs.unlink(&who, other, b"file").unwrap();
                fs.rmdir(&who, ROOT, b"other").unwrap();
                fs.unlink(&who, ROOT, b"more").unwrap();
                if round % 64 == 0 {
                    fs.store().checkpoint().unwrap();
                }
            }
            return done.store(true, Ordering::Relaxed);
        }
        let mut rng = Rng::new(i as u64);
        while !done.load(Ordering::Relaxed) {
            let path = *rng.pick(&[&b"outer/inner/file"[..], b"outer/inner/../inner/file"]);
            match fs.stat_at(ROOT, path) {
                Ok(found) => assert_eq!(found.mode, FILE | 0o111),
                Err(Error::NotFound) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    fs.close().unwrap();
}

/// Directories of all sizes, from a few names to a tree.
#[test]
fn names_are_found_however_many_there_are() {
    let fs = World::new(1, 128 << 20, 4).open();
    let (who, mut rng) = (Caller::root(), Rng::new(4));
    let dir = mkdir(&fs, ROOT, "dir").ino;
    let name = |i: u64| format!("{i}-{}", "n".repeat(i as usize * 7 % 40));
    let mut there = std::collections::BTreeMap::new();
    for round in 0..4000_u64 {
        let i = rng.below(1 + round / 10);
        match there.remove(&i) {
            Some(_) => fs.unlink(&who, dir, name(i).as_bytes()).unwrap(),
            None => {
                there.insert(i, touch(&fs, dir, &name(i)));
            }
        }
        let i = rng.below(1 + round / 10);
        let path = format!("dir/{}", name(i));
        match fs.stat_at(ROOT, path.as_bytes()) {
            Err(Error::NotFound) => assert!(!there.contains_key(&i)),
            found => assert_eq!(Some(&found.unwrap()), there.get(&i)),
        }
    }
    fs.close().unwrap();
}

/// A handle leads to names of its own file system alone.
#[test]
fn a_handle_of_another_file_system_is_refused() {
    let (one, other) = (
        World::new(1, 64 << 20, 5).open(),
        World::new(1, 64 << 20, 6).open(),
    );
    touch(&one, ROOT, "file");
    let handle = other.open_dir(ROOT).unwrap();
    assert!(matches!(
        one.stat_at(&handle, b"file"),
        Err(Error::Invalid(_))
    ));
    drop(handle);
    one.close().unwrap();
    other.close().unwrap();
}

#[test]
fn files_are_opened_by_path_as_open_does_it() {
    let fs = World::new(1, 64 << 20, 1).open();
    let who = Caller::root();
    let (create, new) = (libc::O_CREAT, libc::O_CREAT | libc::O_EXCL);
    let open = |from: Ino, path: &str, flags: i32| {
        let flags = flags | libc::O_RDWR;
        fs.open_path(&who, from, path.as_bytes(), flags, 0o640)
    };
    let fails = |from: Ino, path: &str, flags: i32| match open(from, path, flags) {
        Ok((attr, _)) => panic!("{path}: {attr:?}"),
        Err(error) => error.errno(),
    };
    let a = mkdir(&fs, ROOT, "a").ino;
    let b = mkdir(&fs, a, "b").ino;
    let link = |dir: Ino, name: &str, to: &str| {
        let made = fs.symlink(&who, dir, name.as_bytes(), to.as_bytes());
        made.unwrap()
    };
    assert_eq!(fails(ROOT, "a/b/file", 0), libc::ENOENT);
    assert_eq!(fails(ROOT, "a/none/file", create), libc::ENOENT);
    let (made, file) = open(ROOT, "a/b/file", create).unwrap();
    assert_eq!(made.mode & 0o7777, 0o640);
    assert_eq!(fs.write(&file, 0, b"content").unwrap(), 7);
    for (from, path, flags) in [
        (ROOT, "/a/b/file", 0),
        (a, "b/../b/./file", create),
        (b, "file", 0),
        (b, "/a//b//file", create),
    ] {
        let (attr, again) = open(from, path, flags).unwrap();
        assert_eq!((attr.ino, attr.size), (made.ino, 7), "{path}");
        let mut bytes = [0; 16];
        assert_eq!(fs.read(&again, 0, &mut bytes).unwrap(), 7);
        assert_eq!(&bytes[..7], b"content");
    }
    assert_eq!(fails(ROOT, "a/b/file", new), libc::EEXIST);
    assert_eq!(open(ROOT, "a/b/new", new).unwrap().0.size, 0);
    assert_eq!(open(ROOT, "a/b/file", libc::O_TRUNC).unwrap().0.size, 0);
    // Nothing but a directory can be meant.
    for flags in [0, create] {
        assert_eq!(fails(ROOT, "a/b", flags), libc::EISDIR);
        assert_eq!(fails(ROOT, "a/b/", flags), libc::EISDIR);
        assert_eq!(fails(ROOT, "/", flags), libc::EISDIR);
        assert_eq!(fails(ROOT, "a/..", flags), libc::EISDIR);
        assert_eq!(fails(ROOT, "", flags), libc::ENOENT);
        assert_eq!(fails(ROOT, "a/b/file/", flags), libc::ENOTDIR);
        assert_eq!(fails(ROOT, "a/b/file/more", flags), libc::ENOTDIR);
    }
    assert_eq!(fails(ROOT, "a/b/none/", 0), libc::ENOENT);
    assert_eq!(fails(ROOT, "a/b/none/", create), libc::EISDIR);
    // Links are followed, from where each lies, also to what is not there yet.
    link(ROOT, "to", "a/near");
    link(a, "near", "b/file");
    link(a, "dangling", "b/made");
    link(a, "gone", "none/made");
    link(a, "folder", "b/");
    link(b, "loop", "loop");
    assert_eq!(open(ROOT, "to", 0).unwrap().0.ino, made.ino);
    assert_eq!(open(ROOT, "a/folder/file", 0).unwrap().0.ino, made.ino);
    assert_eq!(fails(ROOT, "a/folder", 0), libc::EISDIR);
    assert_eq!(fails(ROOT, "to", libc::O_NOFOLLOW), libc::ELOOP);
    assert_eq!(fails(ROOT, "to", new), libc::EEXIST);
    assert_eq!(fails(a, "dangling", 0), libc::ENOENT);
    assert_eq!(fails(a, "dangling", new), libc::EEXIST);
    let (through, _) = open(a, "dangling", create).unwrap();
    assert_eq!(fs.lookup(b, b"made").unwrap().ino, through.ino);
    assert_eq!(fails(a, "gone", create), libc::ENOENT);
    assert_eq!(fails(ROOT, "a/b/loop", create), libc::ELOOP);
    // Directories.
    assert_eq!(fs.open_dir_path(ROOT, b"a/folder").unwrap().ino(), b);
    assert_eq!(fs.open_dir_path(b, b"").unwrap().ino(), b);
    let none = fs.open_dir_path(ROOT, b"a/near");
    assert!(matches!(none, Err(Error::NotADirectory)), "{none:?}");
    drop(file);
    fs.close().unwrap();
}

/// Of threads that make one path at once each opens what one of them made; of those that want a new one, one does.
#[test]
fn threads_that_open_one_path_open_one_file() {
    let fs = World::new(1, 64 << 20, 1).open();
    let who = Caller::root();
    mkdir(&fs, ROOT, "a");
    for round in 0..50 {
        let path = format!("a/{round}");
        let new = AtomicU32::new(0);
        let inos = parallel(4, |thread| {
            let flags = libc::O_RDWR | libc::O_CREAT | [0, libc::O_EXCL][thread % 2];
            match fs.open_path(&who, ROOT, path.as_bytes(), flags, 0o644) {
                Ok((attr, _)) => {
                    new.fetch_add((thread % 2) as u32, Ordering::Relaxed);
                    Some(attr.ino)
                }
                Err(Error::Exists) if thread % 2 == 1 => None,
                Err(error) => panic!("{error}"),
            }
        });
        let ino = fs
            .lookup(ROOT, b"a")
            .and_then(|a| fs.lookup(a.ino, round.to_string().as_bytes()));
        let ino = ino.unwrap().ino;
        assert!(inos.into_iter().flatten().all(|found| found == ino));
        assert!(new.into_inner() <= 1);
    }
    fs.close().unwrap();
}

/// They did nothing: a program took a file for a directory, or found a file without a name in the folder.
#[test]
fn flags_that_no_file_is_opened_by_are_refused() {
    let fs = World::new(1, 64 << 20, 1).open();
    let who = Caller::root();
    let dir = mkdir(&fs, ROOT, "dir").ino;
    touch(&fs, ROOT, "file");
    fs.symlink(&who, ROOT, b"to-dir", b"dir").unwrap();
    let open = |path: &str, flags: i32| {
        let opened = fs.open_path(&who, ROOT, path.as_bytes(), flags, 0o644);
        opened.map(drop).map_err(|error| error.errno())
    };
    let directory = libc::O_DIRECTORY;
    for (path, flags, why) in [
        ("file", directory, libc::ENOTDIR),
        ("dir", directory, libc::EISDIR),
        ("to-dir", directory, libc::EISDIR),
        ("to-dir", directory | libc::O_NOFOLLOW, libc::ENOTDIR),
        ("none", directory, libc::ENOENT),
        ("none", directory | libc::O_CREAT, libc::EINVAL),
        ("none", libc::O_CREAT | libc::O_ACCMODE, libc::EINVAL),
        ("file", libc::O_PATH, libc::EINVAL),
        ("dir", libc::O_TMPFILE | libc::O_RDWR, libc::EOPNOTSUPP),
    ] {
        assert_eq!(open(path, flags), Err(why), "{path} {flags:o}");
    }
    let named = |name: &[u8], flags| fs.open_at(ROOT, name, flags).map(drop);
    let errno = |done: Result<(), Error>| done.map_err(|error| error.errno());
    assert_eq!(errno(named(b"file", directory)), Err(libc::ENOTDIR));
    assert_eq!(errno(named(b"file", libc::O_PATH)), Err(libc::EINVAL));
    open("file", libc::O_RDWR | libc::O_NOFOLLOW).unwrap();
    let told = fs.open_path(&who, dir, b".", libc::O_TMPFILE | libc::O_RDWR, 0o600);
    let told = told.map(drop).unwrap_err().to_string();
    assert!(told.contains("tmpfile"), "{told}");
    let mut names = 0;
    fs.readdir(ROOT, 0, &mut |_| {
        names += 1;
        true
    })
    .unwrap();
    assert_eq!(names, 5, "with . and ..");
    fs.close().unwrap();
}

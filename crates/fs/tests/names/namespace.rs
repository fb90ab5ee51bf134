//! Names, links, attributes and lists, as programs see them.

use crate::world::{World, list};
use base::rng::Rng;
use fs::{Caller, Error, FileSystem, ROOT, SetAttr, SetTime};

fn root() -> Caller {
    Caller::root()
}

fn touch(fs: &FileSystem, dir: fs::Ino, name: &str) -> fs::Attr {
    fs.mknod(&root(), dir, name.as_bytes(), libc::S_IFREG | 0o644, 0)
        .unwrap()
}

#[test]
fn a_tree_of_everything_survives_a_remount() {
    let mut world = World::new(1, 256 << 20, 1);
    let fs = world.open();
    let dir = fs.mkdir(&root(), ROOT, b"dir", 0o755).unwrap();
    let file = touch(&fs, dir.ino, "file");
    fs.link(&root(), file.ino, ROOT, b"also").unwrap();
    let link = fs.symlink(&root(), ROOT, b"link", b"dir/file").unwrap();
    let fifo = fs
        .mknod(&root(), dir.ino, b"fifo", libc::S_IFIFO | 0o600, 0)
        .unwrap();
    let node = fs
        .mknod(&root(), dir.ino, b"null", libc::S_IFCHR | 0o666, 0x103)
        .unwrap();
    let fs = world.remount(fs);
    assert_eq!(fs.lookup(ROOT, b"dir").unwrap().nlink, 2);
    assert_eq!(fs.getattr(ROOT).unwrap().nlink, 3);
    let again = fs.lookup(dir.ino, b"file").unwrap();
    assert_eq!((again.ino, again.nlink), (file.ino, 2));
    assert_eq!(fs.resolve(b"/link").unwrap().ino, file.ino);
    assert_eq!(fs.readlink(link.ino).unwrap(), b"dir/file");
    assert_eq!(fs.lookup(dir.ino, b"fifo").unwrap().ino, fifo.ino);
    assert_eq!(fs.getattr(node.ino).unwrap().rdev, 0x103);
    assert_eq!(fs.lookup(dir.ino, b"..").unwrap().ino, ROOT);
    let names: Vec<_> = list(&fs, ROOT, 2).into_iter().map(|(n, _)| n).collect();
    assert_eq!(names.len(), 3);
    fs.close().unwrap();
}

#[test]
fn names_that_cannot_be_are_refused() {
    let fs = World::new(1, 256 << 20, 1).open();
    let make = |name: &[u8]| {
        fs.mknod(&root(), ROOT, name, libc::S_IFREG | 0o600, 0)
            .unwrap_err()
            .errno()
    };
    assert_eq!(make(&[b'x'; 256]), libc::ENAMETOOLONG);
    assert_eq!(make(b"a/b"), libc::EINVAL);
    assert_eq!(make(b"a\0b"), libc::EINVAL);
    assert_eq!(make(b""), libc::ENOENT);
    assert_eq!(make(b".."), libc::EEXIST);
    assert!(
        fs.mknod(&root(), ROOT, &[b'x'; 255], libc::S_IFREG | 0o600, 0)
            .is_ok()
    );
    let long = fs.symlink(&root(), ROOT, b"s", &[b'x'; 4096]).unwrap_err();
    assert_eq!(long.errno(), libc::ENAMETOOLONG);
    assert!(fs.symlink(&root(), ROOT, b"s", &[b'x'; 4095]).is_ok());
}

#[test]
fn fifty_thousand_names_come_and_go() {
    let mut world = World::new(1, 256 << 20, 1);
    let fs = world.open();
    let dir = fs.mkdir(&root(), ROOT, b"big", 0o755).unwrap().ino;
    let count = 50_000;
    for i in 0..count {
        touch(&fs, dir, &format!("name-{i:06}"));
    }
    let fs = world.remount(fs);
    for i in (0..count).step_by(77) {
        assert!(fs.lookup(dir, format!("name-{i:06}").as_bytes()).is_ok());
        let missing = fs.lookup(dir, format!("none-{i:06}").as_bytes());
        assert!(matches!(missing, Err(Error::NotFound)));
    }
    let mut names: Vec<_> = list(&fs, dir, 333).into_iter().map(|(n, _)| n).collect();
    names.sort();
    assert_eq!(names.len(), count);
    assert!(names.windows(2).all(|w| w[0] < w[1]));
    assert!(matches!(
        fs.rmdir(&root(), ROOT, b"big"),
        Err(Error::NotEmpty)
    ));
    for name in &names {
        fs.unlink(&root(), dir, name).unwrap();
    }
    assert!(list(&fs, dir, 100).is_empty());
    fs.rmdir(&root(), ROOT, b"big").unwrap();
    assert_eq!(fs.getattr(ROOT).unwrap().nlink, 2);
    fs.close().unwrap();
}

#[test]
fn times_can_be_set_and_do_not_run_backwards() {
    let fs = World::new(1, 256 << 20, 1).open();
    let file = touch(&fs, ROOT, "f");
    let then = base::clock::Timestamp::new(-100, 999_999_999);
    let set = SetAttr {
        atime: Some(SetTime::At(then)),
        mtime: Some(SetTime::At(then)),
        ..SetAttr::default()
    };
    let attr = fs.setattr(&root(), file.ino, &set).unwrap();
    assert_eq!((attr.atime, attr.mtime), (then, then));
    assert!(attr.ctime > file.ctime);
    let other = touch(&fs, ROOT, "g");
    assert!(other.mtime > attr.ctime);
}

/// As `read(2)` has it: a file without content, or its end, has been read all the same.
#[test]
fn who_reads_at_the_end_of_a_file_has_read_it() {
    let fs = World::new(1, 256 << 20, 1).open();
    let made = touch(&fs, ROOT, "empty");
    let file = fs.open_file(made.ino, libc::O_RDWR).unwrap();
    let atime = || fs.getattr(made.ino).unwrap().atime;
    assert_eq!(fs.read(&file, 0, &mut []).unwrap(), 0);
    assert_eq!(atime(), made.atime);
    assert_eq!(fs.read(&file, 0, &mut [0; 10]).unwrap(), 0);
    let first = atime();
    assert!(first > made.atime);
    fs.write(&file, 0, &[1; 10]).unwrap();
    assert_eq!(fs.read(&file, 10, &mut [0; 10]).unwrap(), 0);
    assert!(atime() > first);
}

/// Either file has a name that the other one had.
#[test]
fn an_exchange_is_durable_when_either_of_its_files_is_synced() {
    for synced in [0, 1] {
        let mut world = World::new(1, 64 << 20, 90 + synced);
        let fs = world.open();
        let [a, b] = ["a", "b"].map(|name| touch(&fs, ROOT, name).ino);
        let files = [a, b].map(|ino| fs.open_file(ino, libc::O_RDWR).unwrap());
        fs.sync().unwrap();
        let flags = fs::RENAME_EXCHANGE;
        fs.rename(&root(), ROOT, b"a", ROOT, b"b", flags).unwrap();
        fs.fsync(&files[synced as usize], false).unwrap();
        world.switch.cut_now();
        drop((files, fs));
        world.restart(&mut Rng::new(synced));
        let fs = world.open();
        assert_eq!(fs.lookup(ROOT, b"a").unwrap().ino, b);
        assert_eq!(fs.lookup(ROOT, b"b").unwrap().ino, a);
    }
}

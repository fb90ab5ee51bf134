//! Access control lists that new inodes of a transaction get from their directories.

use super::{WHO, begin};
use crate::world::World;
use fs::{Caller, Error, FileSystem, Ino, ROOT, SetAttr, XATTR_CREATE, XATTR_REPLACE};

const ACCESS: &[u8] = b"system.posix_acl_access";
const DEFAULT: &[u8] = b"system.posix_acl_default";

/// Owner rwx, a user rw, the group `group`, others nothing.
fn list(group: u16) -> Vec<u8> {
    let none = u32::MAX;
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in [
        (1u16, 7u16, none),
        (2, 6, 7),
        (4, group, none),
        (0x10, 7, none),
        (0x20, 0, none),
    ] {
        value.extend(tag.to_le_bytes());
        value.extend(perm.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

fn directory_with_list(fs: &FileSystem) -> Ino {
    let dir = fs.mkdir(&WHO(), ROOT, b"dir", 0o755).unwrap().ino;
    fs.setxattr(&WHO(), dir, DEFAULT, &list(7), 0).unwrap();
    dir
}

/// A transaction showed new inodes without the lists that they get, and those below a new directory with the bits that the umask leaves.
#[test]
fn new_inodes_have_their_lists_before_the_commit_as_after_it() {
    let world = World::new(2, 32 << 20, 61);
    let fs = world.open();
    let dir = directory_with_list(&fs);
    let who = Caller {
        umask: 0o077,
        ..WHO()
    };
    let mut tx = fs.transaction(&who).unwrap();
    let below = tx.mkdir(dir, b"below", 0o775).unwrap();
    let deep = tx.mkdir(below, b"deep", 0o750).unwrap();
    let made = [
        below,
        deep,
        tx.create(dir, b"file", 0o664).unwrap(),
        tx.create(below, b"file", 0o664).unwrap(),
        tx.create(deep, b"file", 0o640).unwrap(),
        tx.symlink(below, b"link", b"file").unwrap(),
        tx.create(below, b"changed", 0o664).unwrap(),
        tx.create(ROOT, b"plain", 0o664).unwrap(),
    ];
    let chmod = SetAttr {
        mode: Some(0o604),
        ..SetAttr::default()
    };
    tx.setattr(made[6], &chmod).unwrap();
    tx.setattr(made[7], &chmod).unwrap();
    let value = |value: Result<Vec<u8>, Error>| value.ok();
    let before = made.map(|ino| {
        let mode = tx.getattr(ino).unwrap().mode & 0o7777;
        let lists = [ACCESS, DEFAULT].map(|name| value(tx.getxattr(ino, name)));
        (mode, lists)
    });
    tx.commit().unwrap();
    let after = made.map(|ino| {
        let mode = fs.getattr(ino).unwrap().mode & 0o7777;
        let lists = [ACCESS, DEFAULT].map(|name| value(fs.getxattr(ino, name)));
        (mode, lists)
    });
    assert_eq!(before, after);
    let modes = after.each_ref().map(|(mode, _)| *mode);
    let expected = [0o770, 0o750, 0o660, 0o660, 0o640, 0o777, 0o604, 0o604];
    assert_eq!(modes, expected);
    let has_default = after.each_ref().map(|(_, [_, default])| default.is_some());
    assert_eq!(has_default.iter().filter(|has| **has).count(), 2);
    fs.close().unwrap();
    world.check();
}

/// The names of these lists count once among those that can be listed.
#[test]
fn the_names_of_lists_are_not_counted_twice() {
    let world = World::new(2, 32 << 20, 62);
    let fs = world.open();
    let dir = directory_with_list(&fs);
    let longest_last = |parent: Ino| {
        let mut tx = begin(&fs);
        let new = tx.mkdir(parent, b"new", 0o755).unwrap();
        for i in 0..255 {
            let name = format!("user.{i:0>250}");
            tx.setxattr(new, name.as_bytes(), b"", 0).unwrap();
        }
        let fits = |len: &usize| {
            let name = format!("user.{}", "z".repeat(*len));
            tx.setxattr(new, name.as_bytes(), b"", 0).is_ok()
        };
        (1..250).rev().find(fits).unwrap()
    };
    let left = 256 - 1 - "user.".len() - (ACCESS.len() + 1) - (DEFAULT.len() + 1);
    assert_eq!(longest_last(ROOT), left);
    assert_eq!(longest_last(dir), left);
    fs.close().unwrap();
}

/// The list counted nothing, and is logged with each inode that gets it.
#[test]
fn lists_that_new_inodes_get_are_counted() {
    let world = World::new(2, 256 << 20, 63);
    let fs = world.open();
    let dir = fs.mkdir(&WHO(), ROOT, b"dir", 0o755).unwrap().ino;
    let mut long = list(7);
    let rest = long.split_off(4 + 2 * 8);
    for user in 8..200_u32 {
        long.extend(2u16.to_le_bytes());
        long.extend(6u16.to_le_bytes());
        long.extend(user.to_le_bytes());
    }
    long.extend(rest);
    fs.setxattr(&WHO(), dir, DEFAULT, &long, 0).unwrap();
    let stage = |tx: &mut fs::Transaction<'_>, most: usize| {
        for i in 0..most {
            let name = format!("{i}");
            let made = match i % 8 {
                0 => tx.mkdir(dir, name.as_bytes(), 0o755),
                _ => tx.create(dir, name.as_bytes(), 0o644),
            };
            if let Err(error) = made {
                assert!(matches!(error, Error::TransactionTooLarge), "{error}");
                return i;
            }
        }
        most
    };
    let fits = stage(&mut begin(&fs), 8_000);
    assert!((500..8_000).contains(&fits), "{fits}");
    let mut tx = begin(&fs);
    assert_eq!(stage(&mut tx, fits - 1), fits - 1);
    tx.commit().unwrap();
    fs.close().unwrap();
    world.check();
}

/// Capabilities that a change of owner or content takes were there until the commit, and so was the list that a change of the mode changes.
#[test]
fn attributes_that_follow_from_others_are_before_the_commit_as_after_it() {
    const CAPABILITY: &[u8] = b"security.capability";
    let world = World::new(2, 64 << 20, 64);
    let fs = world.open();
    let user = Caller::user(1000, 1000);
    let make = |name: &str| {
        let ino = crate::make(&fs, name.as_bytes(), b"content").ino;
        fs.setxattr(&WHO(), ino, CAPABILITY, &[1; 20], 0).unwrap();
        fs.setxattr(&WHO(), ino, ACCESS, &list(5), 0).unwrap();
        ino
    };
    let names = [
        "written", "cut", "owner", "group", "mode", "twice", "again", "both",
    ];
    let files = names.map(make);
    let [written, cut, owner, group, mode, twice, again, both] = files;
    let set = |tx: &mut fs::Transaction<'_>, ino, uid, gid, mode| {
        let set = SetAttr {
            uid,
            gid,
            mode,
            ..SetAttr::default()
        };
        tx.setattr(ino, &set).unwrap();
    };
    let mut tx = fs.transaction(&user).unwrap();
    tx.write(written, 0, b"other").unwrap();
    tx.truncate(cut, 3).unwrap();
    set(&mut tx, owner, Some(5), None, None);
    set(&mut tx, group, None, Some(5), None);
    set(&mut tx, mode, None, None, Some(0o640));
    set(&mut tx, twice, None, None, Some(0o777));
    set(&mut tx, twice, None, None, Some(0o604));
    tx.setxattr(again, CAPABILITY, &[2; 20], 0).unwrap();
    set(&mut tx, again, Some(5), None, None);
    set(&mut tx, both, Some(5), Some(5), Some(0o700));
    // What is not there cannot be replaced or removed, and can be made.
    let replaced = tx.setxattr(owner, CAPABILITY, &[3; 20], XATTR_REPLACE);
    assert!(matches!(replaced, Err(Error::NoAttribute)), "{replaced:?}");
    let removed = tx.removexattr(owner, CAPABILITY);
    assert!(matches!(removed, Err(Error::NoAttribute)), "{removed:?}");
    tx.setxattr(group, CAPABILITY, &[4; 20], XATTR_CREATE)
        .unwrap();
    let before = files.map(|ino| {
        let lists = [ACCESS, CAPABILITY].map(|name| tx.getxattr(ino, name).ok());
        (tx.getattr(ino).unwrap().mode, lists)
    });
    tx.commit().unwrap();
    let after = files.map(|ino| {
        let lists = [ACCESS, CAPABILITY].map(|name| fs.getxattr(ino, name).ok());
        (fs.getattr(ino).unwrap().mode, lists)
    });
    for ((name, before), after) in names.iter().zip(before).zip(&after) {
        assert_eq!(before, *after, "{name}");
    }
    let kept = after.map(|(_, [_, capability])| capability.is_some());
    assert_eq!(kept, [false, false, false, true, true, true, false, false]);
    fs.close().unwrap();
    world.check();
}

/// The commit gave a new inode other attributes than the transaction had seen.
#[test]
fn what_new_inodes_were_seen_to_get_from_their_directory_is_relied_on() {
    let world = World::new(2, 64 << 20, 65);
    let fs = world.open();
    let set = |mode, gid| SetAttr {
        mode,
        gid,
        ..SetAttr::default()
    };
    type Look = fn(&mut fs::Transaction<'_>, Ino);
    let looks: [(Look, bool); 3] = [
        (|_, _| {}, false),
        (|tx, ino| assert!(tx.getattr(ino).is_ok()), true),
        (|tx, ino| drop(tx.getxattr(ino, ACCESS)), true),
    ];
    for (number, (look, relies)) in looks.into_iter().enumerate() {
        for change in 0..4 {
            let name = format!("{number}{change}");
            let dir = fs.mkdir(&WHO(), ROOT, name.as_bytes(), 0o755).unwrap().ino;
            let shared = set(Some(0o2755), Some(7));
            if change == 1 {
                fs.setattr(&WHO(), dir, &shared).unwrap();
            }
            let mut tx = begin(&fs);
            let below = tx.mkdir(dir, b"below", 0o755).unwrap();
            let file = tx.create(below, b"file", 0o644).unwrap();
            look(&mut tx, file);
            // What it changes itself is no conflict.
            tx.setattr(file, &set(Some(0o600), Some(9))).unwrap();
            tx.setattr(below, &set(Some(0o700), None)).unwrap();
            let changes = match change {
                0 => fs.setattr(&WHO(), dir, &shared).map(drop),
                1 => fs.setattr(&WHO(), dir, &set(None, Some(8))).map(drop),
                2 => fs.setxattr(&WHO(), dir, DEFAULT, &list(7), 0),
                _ => fs.setattr(&WHO(), dir, &set(Some(0o711), None)).map(drop),
            };
            changes.unwrap();
            let committed = tx.commit();
            match relies && change < 3 {
                true => assert!(matches!(committed, Err(Error::Conflict(_))), "{name}"),
                false => committed.unwrap(),
            }
        }
    }
    fs.close().unwrap();
    world.check();
}

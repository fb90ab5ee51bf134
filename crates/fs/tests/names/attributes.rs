//! Attributes, access lists, ownership rules, and files without a name.

use crate::world::World;
use base::rng::Rng;
use fs::{Caller, Error, FileSystem, Ino, ROOT, SetAttr, SetTime, Timestamp};
use std::collections::BTreeMap;

fn root() -> Caller {
    Caller::root()
}

fn file(fs: &FileSystem, name: &str, mode: u32) -> fs::Attr {
    fs.mknod(&root(), ROOT, name.as_bytes(), libc::S_IFREG | mode, 0)
        .unwrap()
}

fn nodes(fs: &FileSystem) -> u64 {
    fs.store().checkpoint().unwrap();
    fs.store().space().nodes
}

fn names(fs: &FileSystem, ino: Ino) -> Vec<Vec<u8>> {
    let list = fs.listxattr(ino).unwrap();
    let mut names: Vec<_> = list
        .split(|b| *b == 0)
        .filter(|n| !n.is_empty())
        .map(<[u8]>::to_vec)
        .collect();
    names.sort();
    names
}

#[test]
fn attributes_of_all_sizes_come_change_and_go() {
    let mut world = World::new(1, 256 << 20, 1);
    let mut fs = world.open();
    let ino = file(&fs, "f", 0o644).ino;
    let before = nodes(&fs);
    let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    let mut rng = Rng::new(3);
    for i in 0..3000 {
        let name = format!("user.{}", rng.below(120)).into_bytes();
        if rng.below(3) > 0 {
            let most = *rng.pick(&[8, 100, 1024, 5000, 65_536]);
            let mut value = vec![0; rng.below(most + 1) as usize];
            rng.fill(&mut value);
            fs.setxattr(&root(), ino, &name, &value, 0).unwrap();
            model.insert(name, value);
        } else {
            let there = model.remove(&name).is_some();
            let removed = fs.removexattr(&root(), ino, &name);
            assert_eq!(removed.is_ok(), there);
            if let Err(error) = removed {
                assert_eq!(error.errno(), libc::ENODATA);
            }
        }
        if i % 1000 == 0 {
            fs = world.remount(fs);
        }
    }
    for (name, value) in &model {
        assert_eq!(&fs.getxattr(ino, name).unwrap(), value);
    }
    let expected: Vec<_> = model.keys().cloned().collect();
    assert_eq!(names(&fs, ino), expected);
    for name in &expected[1..] {
        fs.removexattr(&root(), ino, name).unwrap();
    }
    fs.removexattr(&root(), ino, &expected[0]).unwrap();
    assert_eq!(nodes(&fs), before, "no value is left behind");
    // A file that is removed takes its attributes with it.
    for i in 0..40 {
        let name = format!("user.{i}").into_bytes();
        fs.setxattr(&root(), ino, &name, &[1; 3000], 0).unwrap();
    }
    fs.unlink(&root(), ROOT, b"f").unwrap();
    assert_eq!(nodes(&fs), before - 1);
    fs.close().unwrap();
}

#[test]
fn a_file_has_no_more_attributes_than_can_be_listed() {
    let world = World::new(4, 256 << 20, 1);
    let fs = world.open();
    let ino = file(&fs, "f", 0o644).ino;
    let name = |i: u32| format!("user.{i:0250}").into_bytes();
    let set = |i, value: &[u8]| fs.setxattr(&root(), ino, &name(i), value, 0);
    // 65,536 bytes of names of 255, each with a zero byte.
    for i in 0..256 {
        set(i, b"value").unwrap();
    }
    assert_eq!(fs.listxattr(ino).unwrap().len(), 64 << 10);
    assert_eq!(set(256, b"").unwrap_err().errno(), libc::ENOSPC);
    set(7, b"another value").unwrap();
    fs.removexattr(&root(), ino, &name(9)).unwrap();
    set(256, b"").unwrap();
    assert_eq!(names(&fs, ino).len(), 256);
}

#[test]
fn attribute_calls_fail_as_they_should() {
    let fs = World::new(1, 256 << 20, 1).open();
    let ino = file(&fs, "f", 0o644).ino;
    let link = fs.symlink(&root(), ROOT, b"l", b"x").unwrap().ino;
    let set = |ino, name: &[u8], flags| {
        fs.setxattr(&root(), ino, name, b"v", flags)
            .map_err(|e| e.errno())
    };
    assert_eq!(set(ino, b"user.a", fs::XATTR_REPLACE), Err(libc::ENODATA));
    assert_eq!(set(ino, b"user.a", fs::XATTR_CREATE), Ok(()));
    assert_eq!(set(ino, b"user.a", fs::XATTR_CREATE), Err(libc::EEXIST));
    assert_eq!(set(ino, b"user.a", fs::XATTR_REPLACE), Ok(()));
    assert_eq!(set(link, b"user.a", 0), Err(libc::EPERM));
    assert_eq!(set(link, b"trusted.a", 0), Ok(()));
    assert_eq!(set(ino, b"user.", 0), Err(libc::EINVAL));
    assert_eq!(set(ino, b"other.a", 0), Err(libc::EOPNOTSUPP));
    assert_eq!(set(ino, b"system.posix_acl_access", 0), Err(libc::EINVAL));
    let large = fs.setxattr(&root(), ino, b"user.b", &[0; 65_537], 0);
    assert_eq!(large.unwrap_err().errno(), libc::E2BIG);
    let missing = fs.getxattr(ino, b"user.c").unwrap_err();
    assert_eq!(missing.errno(), libc::ENODATA);
}

const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const MASK: u16 = 16;
const OTHER: u16 = 32;
const ACCESS: &[u8] = b"system.posix_acl_access";
const DEFAULT: &[u8] = b"system.posix_acl_default";

fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut out = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        out.extend_from_slice(&tag.to_le_bytes());
        out.extend_from_slice(&perm.to_le_bytes());
        out.extend_from_slice(&id.to_le_bytes());
    }
    out
}

fn with_mask(mask: u16) -> Vec<u8> {
    let none = u32::MAX;
    acl(&[
        (USER_OBJ, 7, none),
        (USER, 7, 1000),
        (GROUP_OBJ, 5, none),
        (MASK, mask, none),
        (OTHER, 1, none),
    ])
}

#[test]
fn access_lists_and_permission_bits_follow_each_other() {
    let fs = World::new(1, 256 << 20, 1).open();
    let ino = file(&fs, "f", 0o644).ino;
    fs.setxattr(&root(), ino, ACCESS, &with_mask(6), 0).unwrap();
    assert_eq!(fs.getattr(ino).unwrap().mode & 0o7777, 0o761);
    let chmod = SetAttr {
        mode: Some(0o640),
        ..SetAttr::default()
    };
    fs.setattr(&root(), ino, &chmod).unwrap();
    let list = fs.getxattr(ino, ACCESS).unwrap();
    let none = u32::MAX;
    let expected = acl(&[
        (USER_OBJ, 6, none),
        (USER, 7, 1000),
        (GROUP_OBJ, 5, none),
        (MASK, 4, none),
        (OTHER, 0, none),
    ]);
    assert_eq!(list, expected);
    // A list that says no more than the bits is not kept.
    let minimal = acl(&[(USER_OBJ, 7, none), (GROUP_OBJ, 5, none), (OTHER, 5, none)]);
    fs.setxattr(&root(), ino, ACCESS, &minimal, 0).unwrap();
    assert_eq!(fs.getattr(ino).unwrap().mode & 0o7777, 0o755);
    assert!(names(&fs, ino).is_empty());
    let default = fs.setxattr(&root(), ino, DEFAULT, &minimal, 0);
    assert_eq!(default.unwrap_err().errno(), libc::EACCES);
}

#[test]
fn a_default_list_is_inherited_through_mode_and_mask() {
    let fs = World::new(1, 256 << 20, 1).open();
    let dir = fs.mkdir(&root(), ROOT, b"d", 0o755).unwrap().ino;
    fs.setxattr(&root(), dir, DEFAULT, &with_mask(7), 0)
        .unwrap();
    let made = fs
        .mknod(&root(), dir, b"f", libc::S_IFREG | 0o640, 0)
        .unwrap();
    // The umask plays no part; the mode narrows owner, mask and others.
    assert_eq!(made.mode & 0o7777, 0o640);
    let list = fs.getxattr(made.ino, ACCESS).unwrap();
    assert_eq!(list[4 + 3 * 8 + 2], 4, "the mask is narrowed");
    let sub = fs.mkdir(&root(), dir, b"sub", 0o777).unwrap();
    assert_eq!(sub.mode & 0o7777, 0o771);
    assert_eq!(fs.getxattr(sub.ino, DEFAULT).unwrap(), with_mask(7));
    // Large lists move out of the inode and are inherited all the same.
    let mut entries = vec![(USER_OBJ, 7, u32::MAX)];
    entries.extend((0..300).map(|id| (USER, 7, id)));
    let rest = [(GROUP_OBJ, 5), (MASK, 7), (OTHER, 0)];
    entries.extend(rest.map(|(tag, perm)| (tag, perm, u32::MAX)));
    fs.setxattr(&root(), dir, DEFAULT, &acl(&entries), 0)
        .unwrap();
    let sub = fs.mkdir(&root(), dir, b"sub2", 0o777).unwrap();
    assert_eq!(fs.getxattr(sub.ino, DEFAULT).unwrap(), acl(&entries));
    assert_eq!(fs.getxattr(sub.ino, ACCESS).unwrap(), acl(&entries));
}

#[test]
fn set_id_bits_follow_the_rules() {
    let fs = World::new(1, 256 << 20, 1).open();
    let user = Caller::user(1000, 1000);
    let ino = file(&fs, "f", 0o6777).ino;
    let mode = |ino| fs.getattr(ino).unwrap().mode & 0o7777;
    let own = SetAttr {
        uid: Some(1000),
        gid: Some(1000),
        ..SetAttr::default()
    };
    assert_eq!(mode(ino), 0o6755);
    fs.setattr(&root(), ino, &own).unwrap();
    assert_eq!(mode(ino), 0o755);
    let chmod = |who: &Caller, bits| {
        let set = SetAttr {
            mode: Some(bits),
            ..SetAttr::default()
        };
        fs.setattr(who, ino, &set).unwrap();
        mode(ino)
    };
    assert_eq!(chmod(&user, 0o6711), 0o6711);
    assert_eq!(chmod(&Caller::user(1000, 7), 0o2711), 0o711);
    chmod(&root(), 0o6711);
    fs.kill_privileges(ino).unwrap();
    assert_eq!(mode(ino), 0o711);
    // In a set-group-ID directory files take its group, directories the bit as well.
    let dir = fs.mkdir(&root(), ROOT, b"d", 0o777).unwrap().ino;
    let set = SetAttr {
        mode: Some(0o2777),
        gid: Some(42),
        ..SetAttr::default()
    };
    fs.setattr(&root(), dir, &set).unwrap();
    let f = fs
        .mknod(&user, dir, b"f", libc::S_IFREG | 0o2755, 0)
        .unwrap();
    assert_eq!((f.gid, f.uid, f.mode & 0o7777), (42, 1000, 0o755));
    let sub = fs.mkdir(&user, dir, b"sub", 0o755).unwrap();
    assert_eq!((sub.gid, sub.mode & 0o7777), (42, 0o2755));
}

/// An open that cuts took them from root, and left set-group-ID to who is not in the group.
#[test]
fn set_id_bits_that_an_open_with_a_cut_leaves_are_those_of_a_cut() {
    let fs = World::new(1, 256 << 20, 1).open();
    let flags = libc::O_WRONLY | libc::O_TRUNC;
    let left = |who: &Caller, bits| {
        let ino = file(&fs, "f", 0o644).ino;
        let set = SetAttr {
            mode: Some(bits),
            gid: Some(7),
            ..SetAttr::default()
        };
        fs.setattr(&root(), ino, &set).unwrap();
        fs.setxattr(&root(), ino, b"security.capability", &[1; 20], 0)
            .unwrap();
        fs.open_path(who, ROOT, b"/f", flags, 0).unwrap();
        let mode = fs.getattr(ino).unwrap().mode & 0o7777;
        let attributes = fs.listxattr(ino).unwrap();
        fs.unlink(&root(), ROOT, b"f").unwrap();
        (mode, attributes.len())
    };
    assert_eq!(left(&root(), 0o6755), (0o6755, 0));
    assert_eq!(left(&Caller::user(1, 1), 0o6755), (0o755, 0));
    assert_eq!(left(&Caller::user(1, 1), 0o2644), (0o644, 0));
    assert_eq!(left(&Caller::user(1, 7), 0o2644), (0o2644, 0));
}

/// Its inode could not be read again, nor the journal be replayed that had it.
#[test]
fn a_time_that_there_is_not_is_the_last_of_its_second() {
    let world = World::new(1, 256 << 20, 1);
    let fs = world.open();
    let ino = file(&fs, "f", 0o644).ino;
    for nsec in [1_000_000_000, (1 << 30) - 2, u32::MAX] {
        let time = SetTime::At(Timestamp::new(5, nsec));
        let set = SetAttr {
            atime: Some(time),
            mtime: Some(time),
            ..SetAttr::default()
        };
        fs.setattr(&root(), ino, &set).unwrap();
    }
    fs.sync().unwrap();
    fs.close().unwrap();
    drop(fs);
    let fs = world.open();
    let attr = fs.lookup(ROOT, b"f").unwrap();
    for time in [attr.atime, attr.mtime] {
        assert_eq!((time.sec(), time.nsec()), (5, 999_999_999));
    }
}

/// Root's group is no group of everybody.
#[test]
fn set_group_id_that_the_group_may_not_execute_goes_with_a_change_by_who_is_not_in_it() {
    let fs = World::new(1, 256 << 20, 1).open();
    for gid in [0, 7] {
        let left = |is_in: bool| {
            let ino = file(&fs, &format!("{gid} {is_in}"), 0o644).ino;
            let set = SetAttr {
                mode: Some(0o2644),
                gid: Some(gid),
                ..SetAttr::default()
            };
            fs.setattr(&root(), ino, &set).unwrap();
            let asked = |group| {
                assert_eq!(group, gid);
                is_in
            };
            fs.lose_privileges(ino, asked).unwrap();
            fs.getattr(ino).unwrap().mode & 0o7777
        };
        assert_eq!((left(true), left(false)), (0o2644, 0o644), "{gid}");
    }
}

/// A caller without privileges kept the bits by a cut, which a transaction of the same caller did not.
#[test]
fn a_new_size_takes_set_id_bits_and_capabilities_of_who_has_no_privileges() {
    const CAPABILITY: &[u8] = b"security.capability";
    let fs = World::new(1, 256 << 20, 1).open();
    let of = |who: &Caller, name: &str, bits, change: fn(&FileSystem, &Caller, Ino)| {
        let ino = file(&fs, name, 0o644).ino;
        let set = SetAttr {
            mode: Some(bits),
            gid: Some(7),
            ..SetAttr::default()
        };
        fs.setattr(&root(), ino, &set).unwrap();
        fs.setxattr(&root(), ino, CAPABILITY, &[1; 20], 0).unwrap();
        change(&fs, who, ino);
        let attr = fs.getattr(ino).unwrap();
        let kept = fs.getxattr(ino, CAPABILITY).is_ok();
        (attr.mode & 0o7777, attr.size, kept)
    };
    let changes: [fn(&FileSystem, &Caller, Ino); 2] = [
        |fs, who, ino| fs.truncate(who, ino, 5).unwrap(),
        |fs, who, ino| {
            let set = SetAttr {
                size: Some(5),
                ..SetAttr::default()
            };
            fs.setattr(who, ino, &set).unwrap();
        },
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let name = |who: &str| format!("{who}{at}");
        let (user, member) = (Caller::user(1, 1), Caller::user(1, 7));
        assert_eq!(
            of(&root(), &name("root"), 0o6755, change),
            (0o6755, 5, true)
        );
        assert_eq!(of(&user, &name("user"), 0o6755, change), (0o755, 5, false));
        // Without the group's right to execute the bit is the group's to keep.
        assert_eq!(of(&user, &name("other"), 0o6745, change), (0o745, 5, false));
        assert_eq!(
            of(&member, &name("member"), 0o6745, change),
            (0o2745, 5, false)
        );
    }
    let user = Caller::user(1, 1);
    let ino = file(&fs, "f", 0o6755).ino;
    let set = SetAttr {
        mode: Some(0o6755),
        ..SetAttr::default()
    };
    fs.setattr(&root(), ino, &set).unwrap();
    // What cannot be done takes nothing.
    let refused = fs.truncate(&user, ino, u64::MAX);
    assert!(matches!(refused, Err(Error::FileTooLarge)), "{refused:?}");
    assert_eq!(fs.getattr(ino).unwrap().mode & 0o7777, 0o6755);
}

#[test]
fn an_unlinked_file_lives_as_long_as_it_is_open() {
    let mut world = World::new(1, 256 << 20, 1);
    let fs = world.open();
    let before = nodes(&fs);
    let (attr, open) = fs.create(&root(), ROOT, b"f", 0o600, libc::O_RDWR).unwrap();
    fs.write(&open, 0, &[7; 100_000]).unwrap();
    fs.unlink(&root(), ROOT, b"f").unwrap();
    assert_eq!(fs.getattr(attr.ino).unwrap().nlink, 0);
    let mut buf = [0; 10];
    assert_eq!(fs.read(&open, 99_995, &mut buf).unwrap(), 5);
    assert!(matches!(
        fs.link(&root(), ROOT, ROOT, b"x"),
        Err(Error::NotPermitted)
    ));
    drop(open);
    assert!(matches!(fs.getattr(attr.ino), Err(Error::Stale(_))));
    // The same with a reference by the kernel, for a directory as well.
    let dir = fs.mkdir(&root(), ROOT, b"d", 0o700).unwrap().ino;
    fs.ref_inode(dir);
    fs.rmdir(&root(), ROOT, b"d").unwrap();
    assert_eq!(fs.getattr(dir).unwrap().nlink, 0);
    let late = fs.mknod(&root(), dir, b"x", libc::S_IFREG, 0);
    assert!(matches!(late, Err(Error::NotFound)));
    fs.forget(dir, 1);
    assert!(matches!(fs.getattr(dir), Err(Error::Stale(_))));
    let fs = world.remount(fs);
    // One space map stays with the chunk that held the data, until that chunk is retired.
    assert!(nodes(&fs) <= before + 1);
    fs.close().unwrap();
}

#[test]
fn what_a_crash_leaves_without_names_is_gone_after_the_next_open() {
    let mut world = World::new(1, 256 << 20, 1);
    let fs = world.open();
    let before = nodes(&fs);
    let mut inos = Vec::new();
    let mut open = Vec::new();
    for i in 0..3000 {
        let name = format!("f{i}").into_bytes();
        let (attr, file) = fs
            .create(&root(), ROOT, &name, 0o600, libc::O_RDWR)
            .unwrap();
        fs.unlink(&root(), ROOT, &name).unwrap();
        inos.push(attr.ino);
        open.push(file);
    }
    let (attr, file) = fs.tmpfile(&root(), ROOT, 0o600, libc::O_RDWR).unwrap();
    open.push(file);
    let (kept, file) = fs.tmpfile(&root(), ROOT, 0o600, libc::O_RDWR).unwrap();
    open.push(file);
    assert_eq!(fs.link(&root(), kept.ino, ROOT, b"kept").unwrap().nlink, 1);
    inos.push(attr.ino);
    fs.sync().unwrap();
    world.switch.cut_now();
    drop(open);
    drop(fs);
    world.restart(&mut Rng::new(1));
    let fs = world.open();
    for ino in inos {
        assert!(matches!(fs.getattr(ino), Err(Error::Stale(_))));
    }
    assert_eq!(fs.lookup(ROOT, b"kept").unwrap().ino, kept.ino);
    assert_eq!(nodes(&fs), before + 1);
    fs.close().unwrap();
}

#[test]
fn a_replaced_file_goes_and_an_open_one_stays_until_closed() {
    let fs = World::new(1, 256 << 20, 1).open();
    let before = nodes(&fs);
    file(&fs, "new", 0o600);
    let (old, open) = fs
        .create(&root(), ROOT, b"old", 0o600, libc::O_RDWR)
        .unwrap();
    fs.rename(&root(), ROOT, b"new", ROOT, b"old", 0).unwrap();
    assert_eq!(fs.getattr(old.ino).unwrap().nlink, 0);
    drop(open);
    assert!(fs.getattr(old.ino).is_err());
    assert_eq!(nodes(&fs), before + 1);
}

#[test]
fn owner_and_mode_in_one_call_take_capabilities_away() {
    let capability = b"security.capability";
    for (with_list, staged) in [(false, false), (true, false), (false, true), (true, true)] {
        let fs = World::new(1, 256 << 20, 1).open();
        let ino = file(&fs, "f", 0o755).ino;
        fs.setxattr(&root(), ino, capability, b"cap", 0).unwrap();
        if with_list {
            fs.setxattr(&root(), ino, ACCESS, &with_mask(6), 0).unwrap();
        }
        let set = SetAttr {
            mode: Some(0o751),
            uid: Some(1000),
            ..SetAttr::default()
        };
        if staged {
            let mut tx = fs.transaction(&root()).unwrap();
            tx.setattr(ino, &set).unwrap();
            tx.commit().unwrap();
        } else {
            fs.setattr(&root(), ino, &set).unwrap();
        }
        let attr = fs.getattr(ino).unwrap();
        assert_eq!((attr.mode & 0o7777, attr.uid), (0o751, 1000));
        assert!(fs.getxattr(ino, capability).is_err());
        // The group's bits of the mode are the list's mask.
        let list = with_list.then(|| with_mask(5));
        assert_eq!(fs.getxattr(ino, ACCESS).ok(), list);
    }
}

#[test]
fn a_range_for_which_there_is_no_space_is_not_zeroed() {
    let fs = World::new(1, 256 << 20, 1).open();
    let flags = libc::O_RDWR | libc::O_CREAT;
    let (_, f) = fs.open_path(&root(), ROOT, b"/f", flags, 0o644).unwrap();
    let bytes = [7; 16384];
    assert_eq!(fs.write(&f, 0, &bytes).unwrap(), bytes.len());
    let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    let result = fs.fallocate(&f, mode, 100, 1 << 40);
    assert!(matches!(result, Err(Error::NoSpace)), "{result:?}");
    let mut found = [0; 16384];
    assert_eq!(fs.read(&f, 0, &mut found).unwrap(), found.len());
    assert_eq!(found, bytes);
    fs.fallocate(&f, mode, 100, 1 << 20).unwrap();
    assert_eq!(fs.read(&f, 0, &mut found).unwrap(), found.len());
    assert!(found[..100] == bytes[..100] && found[100..].iter().all(|b| *b == 0));
}

//! The real file system under a real mount, over image files.
//!
//! Needs /dev/fuse and root, or `fusermount3`; without them each test says so and passes.

mod common;
#[path = "common/paths.rs"]
mod paths;
#[path = "common/world.rs"]
mod world;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use common::pattern;
use paths::c_path;
use world::{Mounted, World};

fn set_xattr(path: &Path, name: &std::ffi::CStr, value: &[u8]) {
    let path = c_path(path);
    // SAFETY: strings end with zero; the length is the value's; all outlive the call.
    let result = unsafe {
        libc::setxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn get_xattr(path: &Path, name: &std::ffi::CStr) -> Option<Vec<u8>> {
    let path = c_path(path);
    let mut value = vec![0u8; 65536];
    // SAFETY: strings end with zero; the length is the buffer's; all outlive the call.
    let len = unsafe {
        libc::getxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    value.truncate(usize::try_from(len).ok()?);
    Some(value)
}

#[test]
fn a_tree_survives_a_remount() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let big = pattern(9 << 20, 1);
    fs::write(m.path("big"), &big).unwrap();
    fs::create_dir_all(m.path("a/b/c")).unwrap();
    for n in 0..3000u64 {
        fs::write(m.path(&format!("a/b/f{n}")), pattern(n as usize % 3000, n)).unwrap();
    }
    fs::hard_link(m.path("big"), m.path("a/big")).unwrap();
    symlink("../big", m.path("a/link")).unwrap();
    set_xattr(&m.path("big"), c"user.note", &pattern(60_000, 5));
    fs::set_permissions(m.path("a/b/f7"), Permissions::from_mode(0o600)).unwrap();
    let before = fs::metadata(m.path("a/b/f9")).unwrap();
    m.end();

    let m = world.mount("ro");
    assert_eq!(fs::read(m.path("a/link")).unwrap(), big);
    assert_eq!(fs::metadata(m.path("big")).unwrap().nlink(), 2);
    assert_eq!(fs::read_dir(m.path("a/b")).unwrap().count(), 3001);
    for n in (0..3000u64).rev() {
        let data = fs::read(m.path(&format!("a/b/f{n}"))).unwrap();
        assert_eq!(data, pattern(n as usize % 3000, n), "f{n}");
    }
    let note = get_xattr(&m.path("big"), c"user.note").unwrap();
    assert_eq!(note, pattern(60_000, 5));
    let after = fs::metadata(m.path("a/b/f9")).unwrap();
    assert_eq!(
        (before.ino(), before.mtime(), before.mtime_nsec()),
        (after.ino(), after.mtime(), after.mtime_nsec())
    );
    assert!(after.created().is_ok(), "birth time");
    m.end();
}

#[test]
fn what_is_changed_after_a_stat_has_newer_times_and_a_greater_cookie() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let name = c"sheaf.change_cookie";
    let cookie = |path: &Path| -> u64 {
        let digits = String::from_utf8(get_xattr(path, name).unwrap()).unwrap();
        digits.parse().unwrap()
    };
    let time = |path: &Path| {
        let stat = fs::metadata(path).unwrap();
        (stat.mtime(), stat.mtime_nsec())
    };
    let path = m.path("f");
    let file = File::create(&path).unwrap();
    // What the kernel was given with the new file counts as a look, whether it asks again or not.
    for i in 0..100u8 {
        let (shown, before) = (time(&path), cookie(&path));
        file.write_at(&[i], 0).unwrap();
        assert!(time(&path) > shown, "write {i}");
        assert!(cookie(&path) > before, "write {i}");
        let (shown, before) = (time(&m.at), cookie(&m.at));
        let other = m.path(&format!("f{i}"));
        File::create(&other).unwrap();
        assert!(time(&m.at) > shown, "name {i}");
        assert!(cookie(&m.at) > before, "name {i}");
        let made = time(&other);
        fs::write(&other, "x").unwrap();
        assert!(time(&other) > made, "file {i}");
    }
    drop(file);
    let last = (time(&path), cookie(&path), cookie(&m.at));
    m.end();
    let m = world.mount("");
    assert_eq!((time(&path), cookie(&path), cookie(&m.at)), last);
    let path = c_path(&path);
    // SAFETY: strings end with zero and outlive the call, which reads one byte.
    let set = unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), [49].as_ptr().cast(), 1, 0) };
    assert_eq!(set, -1, "nobody can set it");
    m.end();
}

#[test]
fn everything_can_be_removed_and_space_comes_back() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let free = || m.fs.statfs().blocks_free;
    let before = free();
    fs::create_dir(m.path("d")).unwrap();
    for n in 0..500u64 {
        fs::write(m.path(&format!("d/f{n}")), pattern(40_000, n)).unwrap();
    }
    let held = File::open(m.path("d/f0")).unwrap();
    fs::remove_dir_all(m.path("d")).unwrap();
    let mut data = Vec::new();
    (&held).read_to_end(&mut data).unwrap();
    assert_eq!(data, pattern(40_000, 0));
    drop(held);
    assert_eq!(fs::read_dir(&m.at).unwrap().count(), 0);
    m.fs.sync().unwrap();
    // Within what metadata of an empty tree may take.
    assert!(before - free() < 1024, "{} -> {}", before, free());
    m.end();
}

#[test]
fn a_full_disk_says_so_and_files_can_still_be_removed() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let chunk = pattern(1 << 20, 3);
    let mut file = File::create(m.path("fill")).unwrap();
    let error = loop {
        if let Err(error) = file.write_all(&chunk) {
            break error;
        }
    };
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    drop(file);
    fs::remove_file(m.path("fill")).unwrap();
    fs::write(m.path("again"), &chunk).unwrap();
    m.end();
}

/// The kernel gives back the inode of a file, and with it the space, some time after unlink(2) has returned.
#[test]
fn the_space_of_a_file_is_there_when_it_is_unlinked() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let chunk = pattern(24 << 20, 3);
    let mut kept = File::create(m.path("kept")).unwrap();
    while kept.write_all(&chunk).is_ok() {}
    kept.set_len(kept.metadata().unwrap().len() - chunk.len() as u64 * 3 / 2)
        .unwrap();
    kept.sync_all().unwrap();
    for round in 0..30 {
        let error = match round % 2 {
            0 => fs::write(m.path("next"), &chunk).err(),
            _ => {
                let next = File::create(m.path("next")).unwrap();
                let len = chunk.len() as i64;
                // SAFETY: a descriptor and numbers.
                let done = unsafe { libc::fallocate(next.as_raw_fd(), 0, 0, len) };
                (done < 0).then(std::io::Error::last_os_error)
            }
        };
        assert!(error.is_none(), "round {round}: {error:?}");
        fs::remove_file(m.path("next")).unwrap();
    }
    drop(kept);
    m.end();
}

/// Each file that went was taken for space that may be enough.
#[test]
fn a_request_that_finds_no_space_ends_though_others_unlink_without_end() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let (is_over, begun) = (Arc::new(AtomicBool::new(false)), Arc::new(Barrier::new(2)));
    let (ends, begins, temporary) = (
        Arc::clone(&is_over),
        Arc::clone(&begun),
        m.path("temporary"),
    );
    let unlinks = move || {
        let mut unlinked: Option<File> = None;
        for round in 0.. {
            let next = File::create(&temporary).unwrap();
            fs::remove_file(&temporary).unwrap();
            // One is leaving at any time.
            drop(unlinked.replace(next));
            if round == 10 {
                begins.wait();
            }
            if ends.load(Ordering::SeqCst) {
                break;
            }
        }
    };
    let other = base::thread::spawn("unlinks", unlinks).unwrap();
    let file = File::create(m.path("large")).unwrap();
    begun.wait();
    // SAFETY: a descriptor and numbers.
    let done = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, 1 << 40) };
    let error = std::io::Error::last_os_error();
    is_over.store(true, Ordering::SeqCst);
    other.join().unwrap();
    assert_eq!((done, error.raw_os_error()), (-1, Some(libc::ENOSPC)));
    drop(file);
    m.end();
}

/// The kernel makes an I/O error of a direct write that is told how far it came.
#[test]
fn a_full_disk_is_none_that_fails_to_who_writes_directly() {
    const STEP: usize = 300_000;
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let chunk = pattern(1 << 20, 3);
    let mut fill = File::create(m.path("fill")).unwrap();
    while fill.write_all(&chunk).is_ok() {}
    fill.set_len(fill.metadata().unwrap().len() - (chunk.len() as u64))
        .unwrap();
    fill.sync_all().unwrap();
    let direct = OpenOptions::new()
        .write(true)
        .create(true)
        .custom_flags(libc::O_DIRECT)
        .open(m.path("direct"))
        .unwrap();
    // What is no multiple of pages goes through the cache, as far as there is room.
    let mut len = 5000;
    let error = loop {
        match direct.write_at(&chunk[..STEP], len) {
            Ok(written) => assert_eq!(written, STEP),
            Err(error) => break error,
        }
        len += STEP as u64;
    };
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(direct.metadata().unwrap().len(), len);
    drop((fill, direct));
    m.end();
}

#[test]
fn set_id_bits_go_with_a_write_or_a_change_of_owner() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("tool");
    fs::write(&path, "x").unwrap();
    if chown(&path, Some(1000), Some(1000)).is_err() {
        base::skip("root");
        return m.end();
    }
    let mode = || fs::metadata(&path).unwrap().mode() & 0o7777;
    fs::set_permissions(&path, Permissions::from_mode(0o6777)).unwrap();
    assert_eq!(mode(), 0o6777);
    // As another user, who may not keep them.
    let status = std::process::Command::new("sh")
        .arg("-c")
        .arg(format!("echo y >> {}", path.display()))
        .uid_gid(1001)
        .status()
        .unwrap();
    if status.success() {
        assert_eq!(mode(), 0o777);
    } else {
        base::skip("folder of temporary files that others reach");
    }
    fs::set_permissions(&path, Permissions::from_mode(0o6755)).unwrap();
    chown(&path, Some(1002), None).unwrap();
    assert_eq!(mode(), 0o755);
    m.end();
}

#[test]
fn set_id_bits_go_with_every_change_of_content_by_somebody_without_rights() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("tool");
    fs::write(&path, pattern(1 << 20, 4)).unwrap();
    if chown(&path, Some(1000), Some(1000)).is_err() {
        base::skip("root");
        return m.end();
    }
    fs::write(m.path("source"), pattern(65536, 5)).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path);
    let (file, source) = (file.unwrap(), File::open(m.path("source")).unwrap());
    let copy = |from: &File| {
        let (mut start, mut target) = (0, 512 << 10);
        let (from, to) = (from.as_raw_fd(), file.as_raw_fd());
        // SAFETY: the pointers name live offsets; all else are numbers.
        unsafe { libc::copy_file_range(from, &raw mut start, to, &raw mut target, 65536, 0) as i32 }
    };
    // SAFETY: this call takes a descriptor and numbers only.
    let allocate = |mode| unsafe { libc::fallocate(file.as_raw_fd(), mode, 4096, 8192) };
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let changes: [(&str, &dyn Fn() -> i32); 5] = [
        ("copy", &|| copy(&source)),
        ("copy within the file", &|| copy(&file)),
        ("allocate", &|| allocate(0)),
        ("punch", &|| allocate(punch)),
        ("zero", &|| allocate(libc::FALLOC_FL_ZERO_RANGE)),
    ];
    for (name, change) in changes {
        for (user, left) in [(0, 0o6777), (1001, 0o777)] {
            fs::set_permissions(&path, Permissions::from_mode(0o6777)).unwrap();
            assert!(as_user(user, change) >= 0, "{name}");
            let mode = fs::metadata(&path).unwrap().mode() & 0o7777;
            assert_eq!(mode, left, "{name} by user {user}: {mode:o}");
        }
    }
    drop((file, source));
    m.end();
}

/// As another user does who asks for neither another owner nor another group.
#[test]
fn set_id_bits_go_with_a_chown_that_changes_nothing() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let (path, folder) = (m.path("tool"), m.path("folder"));
    fs::write(&path, "x").unwrap();
    fs::create_dir(&folder).unwrap();
    if chown(&path, Some(1000), Some(1000)).is_err() {
        base::skip("root");
        return m.end();
    }
    // Of others it is refused, or else does nothing.
    for (user, mode, left) in [
        (0, 0o6755, 0o755),
        (0, 0o2644, 0o2644),
        (1000, 0o6755, 0o755),
        (1001, 0o6755, 0o6755),
    ] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let before = fs::metadata(&path).unwrap();
        drop(as_user(user, &|| chown(&path, None, None)));
        let after = fs::metadata(&path).unwrap();
        let is_changed = |of: &fs::Metadata| (of.ctime(), of.ctime_nsec());
        assert_eq!(after.mode() & 0o7777, left, "{mode:o} by {user}");
        let is_new = is_changed(&after) > is_changed(&before);
        assert_eq!(is_new, user != 1001, "{mode:o} by {user}");
    }
    fs::set_permissions(&folder, Permissions::from_mode(0o6755)).unwrap();
    chown(&folder, None, None).unwrap();
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o7777, 0o6755);
    m.end();
}

/// Where the group may not execute, set-group-ID is left to those in the group alone.
#[test]
fn set_group_id_of_another_group_goes_with_every_change() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("file");
    fs::write(&path, "x").unwrap();
    if chown(&path, Some(1000), Some(2000)).is_err() {
        base::skip("root");
        return m.end();
    }
    let open = |truncates| {
        let mut options = OpenOptions::new();
        options.write(true).truncate(truncates).open(&path).unwrap()
    };
    let allocate = || {
        // SAFETY: the call takes a descriptor and numbers only.
        let done = unsafe { libc::fallocate(open(false).as_raw_fd(), 0, 0, 8192) };
        assert_eq!(done, 0);
    };
    let changes: [(&str, &dyn Fn()); 6] = [
        ("write", &|| open(false).write_all(b"new").unwrap()),
        ("cut", &|| open(false).set_len(1).unwrap()),
        ("open", &|| drop(open(true))),
        ("allocate", &allocate),
        ("chown", &|| drop(chown(&path, None, None))),
        ("chgrp", &|| drop(chown(&path, None, Some(1000)))),
    ];
    for (name, change) in changes {
        // The owner, who is not in the group by himself.
        for (groups, left) in [(&[2000u32][..], 0o2666), (&[], 0o666)] {
            chown(&path, Some(1000), Some(2000)).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o2666)).unwrap();
            let of_thread = |groups: &[u32]| {
                // SAFETY: so many groups are there; the call itself, unlike the library's, concerns the calling thread alone.
                let set =
                    unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
                assert_eq!(set, 0);
            };
            of_thread(groups);
            as_user(1000, &|| change());
            of_thread(&[]);
            let mode = fs::metadata(&path).unwrap().mode() & 0o7777;
            assert_eq!(mode, left, "{name} with groups {groups:?}: {mode:o}");
        }
    }
    m.end();
}

type Make = fn(&Path) -> File;
type Change = fn(&Path, &File);

/// How often a plain look shows something else than what the file system has, after somebody else has looked while `change` was made.
fn stale_looks(m: &Mounted, kind: &str, make: Make, change: Change) -> usize {
    const TRIALS: usize = 2000;
    let paths: Vec<_> = (0..TRIALS)
        .map(|i| m.path(&format!("{kind}-{i}")))
        .collect();
    let step = Arc::new(Barrier::new(2));
    let looker = {
        let (step, paths) = (Arc::clone(&step), paths.clone());
        let look = move || {
            for path in paths {
                step.wait();
                drop(fs::metadata(path));
                step.wait();
            }
        };
        base::thread::spawn("looker", look).unwrap()
    };
    let mut stale = 0;
    for (i, path) in paths.iter().enumerate() {
        let held = make(path);
        // The kernel has to ask for attributes after that.
        set_xattr(path, c"user.note", b"new");
        step.wait();
        // The change comes at another point of the look each time.
        (0..i % 60 * 50).for_each(|_| std::hint::spin_loop());
        change(path, &held);
        step.wait();
        let shown = held.metadata().unwrap();
        let is = m.fs.getattr(::fs::Ino { 0: shown.ino() }).unwrap();
        let times = (is.ctime.sec(), i64::from(is.ctime.nsec()));
        let is = (is.mode, is.nlink, is.blocks, times);
        let times = (shown.ctime(), shown.ctime_nsec());
        let shown = (shown.mode(), shown.nlink() as u32, shown.blocks(), times);
        stale += usize::from(shown != is);
    }
    looker.join().unwrap();
    stale
}

/// The answer to the look may reach the kernel after that to the change, with what was there before it.
#[test]
fn what_was_read_before_a_change_is_not_kept_after_it() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let folder: Make = |path| {
        fs::create_dir(path).unwrap();
        File::open(path).unwrap()
    };
    let file: Make = |path| File::create(path).unwrap();
    let changes: [(&str, Make, Change); 5] = [
        ("list", folder, |path, _| {
            let owner_only = acl(&[(1, 7, u32::MAX), (4, 0, u32::MAX), (32, 0, u32::MAX)]);
            set_xattr(path, c"system.posix_acl_access", &owner_only);
        }),
        ("name", folder, |path, _| {
            fs::create_dir(path.join("in")).unwrap();
        }),
        ("attribute", file, |path, _| {
            set_xattr(path, c"user.other", b"more");
        }),
        ("moved", file, |path, _| {
            fs::rename(path, path.with_extension("moved")).unwrap();
        }),
        ("allocated", file, |_, file| {
            let keep = libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: the call takes a descriptor and numbers only.
            let done = unsafe { libc::fallocate(file.as_raw_fd(), keep, 0, 1 << 16) };
            assert_eq!(done, 0);
        }),
    ];
    let stale = changes.map(|(kind, make, change)| {
        let stale = stale_looks(&m, kind, make, change);
        (kind, stale)
    });
    assert!(stale.iter().all(|(_, stale)| *stale == 0), "{stale:?}");
    m.end();
}

#[test]
fn trusted_attributes_are_listed_to_root_alone() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("file");
    fs::write(&path, "x").unwrap();
    if chown(&path, Some(1000), Some(1000)).is_err() {
        base::skip("root");
        return m.end();
    }
    set_xattr(&path, c"trusted.secret", b"hidden");
    set_xattr(&path, c"user.note", b"seen");
    let names = || list_xattr(&path);
    assert_eq!(names(), b"trusted.secret\0user.note\0");
    assert_eq!(as_user(1001, &names), b"user.note\0");
    m.end();
}

fn list_xattr(path: &Path) -> Vec<u8> {
    let path = c_path(path);
    let mut names = vec![0u8; 65536];
    // SAFETY: the path ends with zero; the length is the buffer's; both outlive the call.
    let len = unsafe { libc::listxattr(path.as_ptr(), names.as_mut_ptr().cast(), names.len()) };
    names.truncate(usize::try_from(len).unwrap());
    names
}

/// What `body` says when the calling thread has the rights of user `id` to files.
fn as_user<T>(id: u32, body: &dyn Fn() -> T) -> T {
    // SAFETY: these calls take a number, and concern nothing but the calling thread.
    let become_user = |id| unsafe { (libc::setfsgid(id), libc::setfsuid(id)) };
    become_user(id);
    let said = body();
    become_user(0);
    said
}

/// Runs a command as somebody else.
trait AsUser {
    fn uid_gid(&mut self, id: u32) -> &mut Self;
}

impl AsUser for std::process::Command {
    fn uid_gid(&mut self, id: u32) -> &mut Self {
        use std::os::unix::process::CommandExt;
        self.uid(id).gid(id)
    }
}

/// A POSIX ACL as its attribute: version 2, then (tag, permissions, id) each.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut out = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        out.extend(tag.to_le_bytes());
        out.extend(perm.to_le_bytes());
        out.extend(id.to_le_bytes());
    }
    out
}

#[test]
fn a_default_acl_is_inherited_instead_of_the_umask() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let dir = m.path("shared");
    fs::create_dir(&dir).unwrap();
    const NONE: u32 = u32::MAX;
    let default = acl(&[
        (1, 7, NONE),
        (2, 7, 1234),
        (4, 7, NONE),
        (16, 7, NONE),
        (32, 0, NONE),
    ]);
    set_xattr(&dir, c"system.posix_acl_default", &default);
    fs::write(dir.join("f"), "x").unwrap();
    // 0666 asked for: group class and mask may write, others nothing, whatever the umask.
    assert_eq!(fs::metadata(dir.join("f")).unwrap().mode() & 0o777, 0o660);
    let access = get_xattr(&dir.join("f"), c"system.posix_acl_access").unwrap();
    assert!(access.windows(4).any(|w| w == 1234u32.to_le_bytes()));
    fs::create_dir(dir.join("sub")).unwrap();
    assert_eq!(
        get_xattr(&dir.join("sub"), c"system.posix_acl_default").unwrap(),
        default
    );
    // chmod changes the mask, not the entries.
    fs::set_permissions(dir.join("f"), Permissions::from_mode(0o640)).unwrap();
    let access = get_xattr(&dir.join("f"), c"system.posix_acl_access").unwrap();
    let mask = access[4..].chunks(8).find(|e| e[0] == 16).unwrap();
    assert_eq!(mask[2], 4);
    m.end();
}

#[test]
fn without_extended_attributes_they_stay_as_they_are_but_for_capabilities() {
    const CAPABILITY: &std::ffi::CStr = c"security.capability";
    let Some(world) = World::new() else { return };
    // cap_net_raw=ep, as setcap(8) writes it.
    let capability: Vec<u8> = [0x0200_0001u32, 1 << 13, 0, 0, 0]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    let capable = ["written", "cut", "punched", "given", "left"];
    let m = world.mount("");
    for name in capable {
        fs::write(m.path(name), [1; 8192]).unwrap();
        set_xattr(&m.path(name), CAPABILITY, &capability);
    }
    set_xattr(&m.path("left"), c"user.colour", b"red");
    m.end();

    let m = world.mount("noxattr");
    let refused = || std::io::Error::last_os_error().raw_os_error();
    for round in 0..2 {
        // First by the file system, then by the kernel itself.
        let left = m.path("left");
        assert_eq!(get_xattr(&left, c"user.colour"), None, "{round}");
        assert_eq!(refused(), Some(libc::EOPNOTSUPP));
        let path = c_path(&left);
        // SAFETY: strings end with zero; no buffer is given; all outlive the calls.
        let results = unsafe {
            [
                libc::setxattr(path.as_ptr(), c"user.a".as_ptr(), std::ptr::null(), 0, 0) as isize,
                libc::listxattr(path.as_ptr(), std::ptr::null_mut(), 0),
                libc::removexattr(path.as_ptr(), c"user.colour".as_ptr()) as isize,
            ]
        };
        assert_eq!(results, [-1; 3]);
        assert_eq!(refused(), Some(libc::EOPNOTSUPP));
    }
    let open = |name| fs::OpenOptions::new().write(true).open(m.path(name));
    open("written").unwrap().write_at(b"new", 0).unwrap();
    open("cut").unwrap().set_len(3).unwrap();
    let punched = open("punched").unwrap();
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: a call about an open descriptor, with numbers.
    let done = unsafe { libc::fallocate(punched.as_raw_fd(), mode, 0, 4096) };
    assert_eq!(done, 0);
    let may_give = chown(m.path("given"), Some(1000), None).is_ok();
    drop(punched);
    m.end();

    let m = world.mount("");
    for name in capable {
        let kept = name == "left" || (name == "given" && !may_give);
        let now = get_xattr(&m.path(name), CAPABILITY);
        assert_eq!(now.is_some(), kept, "{name}");
    }
    assert_eq!(get_xattr(&m.path("left"), c"user.colour").unwrap(), b"red");
    m.end();
}

#[test]
fn holes_are_punched_found_and_copied() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(m.path("sparse"))
        .unwrap();
    let data = pattern(1 << 20, 9);
    file.write_all_at(&data, 0).unwrap();
    let fd = file.as_raw_fd();
    // SAFETY: these calls take a descriptor and numbers only.
    unsafe {
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        assert_eq!(libc::fallocate(fd, punch, 65536, 131_072), 0);
        assert_eq!(libc::lseek(fd, 0, libc::SEEK_HOLE), 65536);
        assert_eq!(libc::lseek(fd, 65536, libc::SEEK_DATA), 65536 + 131_072);
        for offset in [2 << 20, -5, i64::MIN] {
            for whence in [libc::SEEK_DATA, libc::SEEK_HOLE] {
                assert_eq!(libc::lseek(fd, offset, whence), -1);
                let error = std::io::Error::last_os_error();
                assert_eq!(error.raw_os_error(), Some(libc::ENXIO), "{offset}");
            }
        }
        assert_eq!(libc::fallocate(fd, 0, 2 << 20, 4096), 0);
    }
    assert_eq!(file.metadata().unwrap().len(), (2 << 20) + 4096);
    let mut want = data;
    want[65536..65536 + 131_072].fill(0);
    let mut got = vec![0; 1 << 20];
    file.read_exact_at(&mut got, 0).unwrap();
    assert!(got == want);
    let copied = fs::copy(m.path("sparse"), m.path("copy")).unwrap();
    assert_eq!(copied, (2 << 20) + 4096);
    assert!(fs::read(m.path("copy")).unwrap()[..1 << 20] == want);
    drop(file);
    m.end();
}

#[test]
fn appends_and_truncating_opens_work() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("log");
    base::thread::parallel(4, |n| {
        let mut log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&path)
            .unwrap();
        for k in 0..100 {
            log.write_all(format!("{n} {k:03}\n").as_bytes()).unwrap();
        }
    });
    let text = fs::read_to_string(&path).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 400);
    lines.sort();
    lines.dedup();
    assert_eq!(lines.len(), 400);
    fs::write(&path, "short").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "short");
    m.end();
}

/// What `name_to_handle_at` says of a file.
#[repr(C)]
struct Handle {
    head: libc::file_handle,
    bytes: [u8; 128],
}

impl Handle {
    fn of(path: &Path) -> Handle {
        // SAFETY: the structure is plain data for which zero is valid.
        let mut handle: Handle = unsafe { std::mem::zeroed() };
        handle.head.handle_bytes = 128;
        let name = c_path(path);
        let mut mount_id = 0;
        // SAFETY: the handle has room for the 128 bytes it claims; the name ends with zero.
        let result = unsafe {
            libc::name_to_handle_at(
                libc::AT_FDCWD,
                name.as_ptr(),
                (&raw mut handle).cast(),
                &raw mut mount_id,
                0,
            )
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        handle
    }

    fn open(&mut self, m: &Mounted, flags: i32) -> std::io::Result<File> {
        use std::os::fd::FromRawFd;
        let top = File::open(&m.at).unwrap();
        // SAFETY: the handle was filled by name_to_handle_at; a descriptor that is returned
        // is ours alone.
        unsafe {
            let fd = libc::open_by_handle_at(top.as_raw_fd(), (&raw mut *self).cast(), flags);
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(File::from_raw_fd(fd))
        }
    }
}

#[test]
fn file_handles_open_the_same_file_after_a_remount() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    fs::create_dir(m.path("d")).unwrap();
    fs::write(m.path("d/f"), "by handle").unwrap();
    let mut handle = Handle::of(&m.path("d/f"));
    m.end();
    let m = world.mount("");
    match handle.open(&m, libc::O_RDONLY) {
        Ok(mut file) => {
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "by handle");
            drop(file);
            fs::remove_file(m.path("d/f")).unwrap();
            fs::write(m.path("d/other"), "x").unwrap();
            // Until the kernel has told that the file was closed, its handle is good.
            let gone = (0..1_000_000).find_map(|_| {
                base::thread::yield_now();
                handle.open(&m, libc::O_RDONLY).err()
            });
            let error = gone.expect("a deleted file opens for ever");
            assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
        }
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM), "needs root"),
    }
    m.end();
}

/// The kernel tells later that it has forgotten a file, and the file is there until then; one of five could be opened so.
#[test]
fn the_handle_of_a_file_that_is_removed_is_stale_at_once() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    for i in 0..300 {
        let path = m.path(&format!("f{i}"));
        let name = c_path(&path);
        // Nobody opens the file, so the kernel has nothing of it once it is removed.
        // SAFETY: the name ends with zero.
        let made = unsafe { libc::mknod(name.as_ptr(), libc::S_IFREG | 0o644, 0) };
        assert_eq!(made, 0);
        let mut handle = Handle::of(&path);
        fs::remove_file(&path).unwrap();
        let error = handle.open(&m, libc::O_PATH).expect_err("it is removed");
        let errno = error.raw_os_error();
        assert!(
            matches!(errno, Some(libc::ESTALE | libc::EPERM)),
            "{error}, round {i}"
        );
    }
    m.end();
}

/// Another one, with devices as these are now.
fn copy_of(world: &World) -> World {
    let copy = World {
        dir: tempfile::tempdir().unwrap(),
        cache: None,
        clock: None,
    };
    for image in ["a.img", "b.img"] {
        fs::copy(world.dir.path().join(image), copy.dir.path().join(image)).unwrap();
    }
    fs::create_dir(copy.dir.path().join("mnt")).unwrap();
    copy
}

/// The kernel asks for no fsync after a copy, as it does after a write.
#[test]
fn what_is_copied_to_a_synchronous_file_is_on_the_devices() {
    let Some(world) = World::new() else { return };
    let content = pattern(1 << 20, 3);
    for (options, flags) in [("", libc::O_DSYNC), ("", libc::O_SYNC), ("sync", 0)] {
        let m = world.mount(options);
        let name = format!("copy of {options}{flags}");
        fs::write(m.path("source"), &content).unwrap();
        let source = File::open(m.path("source")).unwrap();
        source.sync_all().unwrap();
        let target = OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(flags)
            .open(m.path(&name))
            .unwrap();
        File::open(m.path("")).unwrap().sync_all().unwrap();
        let mut left = content.len();
        while left > 0 {
            // SAFETY: no offsets are given, and both descriptors are open.
            let copied = unsafe {
                let (from, to) = (source.as_raw_fd(), target.as_raw_fd());
                let none = std::ptr::null_mut();
                libc::copy_file_range(from, none, to, none, left, 0)
            };
            assert!(copied > 0, "{}", std::io::Error::last_os_error());
            left -= copied as usize;
        }
        // What a crash would leave now.
        let after = copy_of(&world);
        let then = after.mount("ro");
        assert!(
            fs::read(then.path(&name)).unwrap() == content,
            "{options} {flags}"
        );
        then.end();
        drop((source, target));
        m.end();
    }
}

/// The kernel asks for no fsync after a SETATTR or a change of extended attributes either.
#[test]
fn attributes_and_sizes_of_a_mount_with_sync_are_on_the_devices() {
    let Some(world) = World::new() else { return };
    let m = world.mount("sync");
    let content = pattern(6000, 4);
    let path = m.path("f");
    let file = File::create(&path).unwrap();
    // Of what a crash would leave now.
    let check = |what: &str, is_so: &dyn Fn(&Path) -> bool| {
        let after = copy_of(&world);
        let then = after.mount("ro");
        assert!(is_so(&then.path("f")), "{what}");
        then.end();
    };
    let filled = || {
        file.write_all_at(&content, 0).unwrap();
        file.sync_all().unwrap();
    };
    for len in [0, 3000, 20_000] {
        filled();
        file.set_len(len).unwrap();
        let mut expected = content.clone();
        expected.resize(len as usize, 0);
        let is_so = |path: &Path| fs::read(path).unwrap() == expected;
        check(&format!("cut to {len}"), &is_so);
    }
    filled();
    drop(File::create(&path).unwrap());
    check("opened with O_TRUNC", &|path| {
        fs::read(path).unwrap().is_empty()
    });
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    check("chmod", &|path| {
        fs::metadata(path).unwrap().mode() & 0o7777 == 0o640
    });
    set_xattr(&path, c"user.note", b"kept");
    check("setxattr", &|path| {
        get_xattr(path, c"user.note").as_deref() == Some(b"kept")
    });
    let name = c_path(&path);
    // SAFETY: strings end with zero and outlive the call.
    let removed = unsafe { libc::removexattr(name.as_ptr(), c"user.note".as_ptr()) };
    assert_eq!(removed, 0);
    check("removexattr", &|path| {
        get_xattr(path, c"user.note").is_none()
    });
    drop(file);
    m.end();
}

/// The kernel asks for no fsync after a write for which its program does not wait in that call.
#[test]
fn an_asynchronous_direct_write_to_a_synchronous_file_is_on_the_devices() {
    const PAGES: usize = 64;
    let Some(world) = World::new() else { return };
    for (options, flags) in [("", libc::O_DSYNC), ("", libc::O_SYNC), ("sync", 0)] {
        let m = world.mount(options);
        let name = format!("written by {options}{flags}");
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(flags | libc::O_DIRECT)
            .open(m.path(&name))
            .unwrap();
        // One that makes the file longer is waited for.
        file.set_len(1 << 20).unwrap();
        file.sync_all().unwrap();
        let mut queue = base::aio::Queue::new(vec![file], PAGES, 4096).unwrap();
        for slot in 0..PAGES {
            queue.memory(slot).fill(slot as u8 + 1);
            // With holes between them, so that the devices have no place for them yet.
            queue.start(slot, 0, 2 * slot as u64 * 4096, 4096, true);
        }
        let mut ended = Vec::new();
        while ended.len() < PAGES {
            queue.wait(1, &mut ended).unwrap();
        }
        assert!(ended.iter().all(|(_, done)| matches!(done, Ok(4096))));
        let after = copy_of(&world);
        let then = after.mount("ro");
        let content = fs::read(then.path(&name)).unwrap();
        let lost = (0..PAGES).filter(|slot| content[2 * slot * 4096] != *slot as u8 + 1);
        assert_eq!(lost.collect::<Vec<_>>(), [0; 0], "{options} {flags}");
        then.end();
        drop(queue);
        m.end();
    }
}

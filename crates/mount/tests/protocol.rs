//! The protocol layer under a real mount, served by a file system in memory.
//!
//! Needs /dev/fuse and root, or `fusermount3`; without them each test says so and passes.

mod common;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/paths.rs"]
mod paths;
mod toy;

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Session, has_fuse, pattern};
use mapping::Mapping;
use mount::{Insist, MountOptions};
use paths::c_path;
use toy::Toy;

struct Mounted {
    dir: tempfile::TempDir,
    session: Session,
}

/// A toy mounted in a temporary folder; `None` where this machine has no FUSE.
fn mounted(options: &str) -> Option<Mounted> {
    if !has_fuse() {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let options = MountOptions::parse(options).unwrap();
    let session = Session::start(move |ready| {
        mount::mount_operations(Toy::default(), &path, &options, None, ready)
    });
    Some(Mounted { dir, session })
}

impl Mounted {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn end(self) {
        self.session.end();
    }
}

/// Where a process of its own finds where it shall mount.
const MOUNT_AT: &str = "SHEAF_MOUNT_AT";

/// Not a test, but what another process does for one: mounts, says so, and is killed then.
#[test]
fn of_a_process_that_is_killed() {
    let Some(at) = std::env::var_os(MOUNT_AT) else {
        return;
    };
    let options = MountOptions::parse("").unwrap();
    let session = Session::start(move |ready| {
        mount::mount_operations(Toy::default(), Path::new(&at), &options, None, ready)
    });
    // SAFETY: nothing here is to go on.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    session.end();
}

/// Tests that were killed left dead mounts behind.
#[test]
fn a_mount_goes_away_with_a_test_that_is_killed() {
    if !has_fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().canonicalize().unwrap();
    let mut killed = Command::new(std::env::current_exe().unwrap());
    killed.args(["--exact", "of_a_process_that_is_killed"]);
    killed.env(MOUNT_AT, &at).stdout(Stdio::null());
    let ended = killed.status().unwrap();
    assert_eq!(ended.signal(), Some(libc::SIGKILL));
    let is_mounted = || {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts.contains(at.to_str().unwrap())
    };
    while is_mounted() {
        base::thread::yield_now();
    }
}

#[test]
fn files_are_written_read_and_truncated() {
    let Some(m) = mounted("") else { return };
    let path = m.path("file");
    let data = pattern(3 * (1 << 20) + 12345, 1);
    fs::write(&path, &data).unwrap();
    assert_eq!(fs::read(&path).unwrap(), data);
    assert_eq!(fs::metadata(&path).unwrap().len(), data.len() as u64);

    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    file.write_all_at(b"patch", 1 << 20).unwrap();
    let mut got = [0; 7];
    file.read_exact_at(&mut got, (1 << 20) - 1).unwrap();
    assert_eq!(&got[1..6], b"patch");
    file.set_len(10).unwrap();
    assert_eq!(fs::read(&path).unwrap(), &data[..10]);
    file.sync_all().unwrap();

    let mut truncated = File::create(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    truncated.write_all(b"new").unwrap();
    drop((file, truncated));
    m.end();
}

#[test]
fn direct_and_buffered_access_see_each_other() {
    let Some(m) = mounted("") else { return };
    let path = m.path("file");
    fs::write(&path, vec![1u8; 16384]).unwrap();
    let mut buffered = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let direct = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .unwrap();
    let mut all = Vec::new();
    buffered.read_to_end(&mut all).unwrap();
    direct.write_all_at(&[2u8; 4096], 4096).unwrap();
    buffered.seek(SeekFrom::Start(0)).unwrap();
    all.clear();
    buffered.read_to_end(&mut all).unwrap();
    assert!(all[..4096].iter().all(|&b| b == 1) && all[4096..8192].iter().all(|&b| b == 2));
    buffered.write_all_at(&[3u8; 4096], 0).unwrap();
    let mut page = [0u8; 4096];
    direct.read_exact_at(&mut page, 0).unwrap();
    assert!(page.iter().all(|&b| b == 3));
    drop((buffered, direct));
    m.end();
}

#[test]
fn ten_thousand_entries_are_listed_once_each() {
    let Some(m) = mounted("") else { return };
    for n in 0..10_000 {
        File::create(m.path(&format!("entry-{n}"))).unwrap();
    }
    for _ in 0..2 {
        let mut names: Vec<_> = fs::read_dir(m.dir.path())
            .unwrap()
            .map(|e| {
                let entry = e.unwrap();
                assert!(entry.metadata().unwrap().is_file());
                entry.file_name().into_string().unwrap()
            })
            .collect();
        assert_eq!(names.len(), 10_000);
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 10_000);
    }
    // A listing after a change shows the change, cached or not.
    fs::remove_file(m.path("entry-77")).unwrap();
    assert_eq!(fs::read_dir(m.dir.path()).unwrap().count(), 9_999);
    m.end();
}

#[test]
fn names_are_linked_renamed_and_exchanged() {
    let Some(m) = mounted("") else { return };
    fs::write(m.path("a"), "A").unwrap();
    fs::write(m.path("b"), "B").unwrap();
    fs::hard_link(m.path("a"), m.path("a2")).unwrap();
    assert_eq!(fs::metadata(m.path("a")).unwrap().nlink(), 2);
    let rename = |from: &str, to: &str, flags: u32| {
        let (from, to) = (c_path(&m.path(from)), c_path(&m.path(to)));
        // SAFETY: both strings end with zero and outlive the call.
        let result = unsafe {
            libc::renameat2(
                libc::AT_FDCWD,
                from.as_ptr(),
                libc::AT_FDCWD,
                to.as_ptr(),
                flags,
            )
        };
        if result == 0 {
            0
        } else {
            std::io::Error::last_os_error().raw_os_error().unwrap()
        }
    };
    assert_eq!(rename("a", "b", libc::RENAME_EXCHANGE), 0);
    assert_eq!(fs::read_to_string(m.path("a")).unwrap(), "B");
    assert_eq!(fs::read_to_string(m.path("b")).unwrap(), "A");
    assert_eq!(rename("a", "b", libc::RENAME_NOREPLACE), libc::EEXIST);
    assert_eq!(rename("a", "b", 0), 0);
    assert!(!m.path("a").exists());
    assert_eq!(fs::metadata(m.path("a2")).unwrap().nlink(), 1);

    symlink("b", m.path("s")).unwrap();
    assert_eq!(fs::read_link(m.path("s")).unwrap(), Path::new("b"));
    fs::create_dir(m.path("d")).unwrap();
    fs::rename(m.path("b"), m.path("d/b")).unwrap();
    assert!(fs::remove_dir(m.path("d")).is_err());
    fs::remove_file(m.path("d/b")).unwrap();
    fs::remove_dir(m.path("d")).unwrap();
    m.end();
}

#[test]
fn unlinked_and_unnamed_files_live_while_open() {
    let Some(m) = mounted("") else { return };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(m.path("gone"))
        .unwrap();
    fs::remove_file(m.path("gone")).unwrap();
    file.write_all(b"still here").unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "still here");
    assert_eq!(file.metadata().unwrap().nlink(), 0);

    let mut unnamed = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .open(m.dir.path())
        .unwrap();
    unnamed.write_all(b"named later").unwrap();
    let from = CString::new(format!("/proc/self/fd/{}", unnamed.as_raw_fd())).unwrap();
    let to = c_path(&m.path("named"));
    // SAFETY: both strings end with zero and outlive the call.
    let result = unsafe {
        libc::linkat(
            libc::AT_FDCWD,
            from.as_ptr(),
            libc::AT_FDCWD,
            to.as_ptr(),
            libc::AT_SYMLINK_FOLLOW,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    assert_eq!(fs::read_to_string(m.path("named")).unwrap(), "named later");
    drop((file, unnamed));
    m.end();
}

#[test]
fn a_shared_mapping_reaches_the_file() {
    let Some(m) = mounted("") else { return };
    let path = m.path("mapped");
    fs::write(&path, vec![0u8; 8192]).unwrap();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let mut map = Mapping::of(&file, 8192);
    map.store(5000, &[42]);
    map.sync();
    assert_eq!(map.load(5000), 42);
    drop(map);
    drop(file);
    // Past the page cache, to what the server holds.
    let direct = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .unwrap();
    let mut byte = [0u8; 1];
    direct.read_exact_at(&mut byte, 5000).unwrap();
    assert_eq!(byte, [42]);
    drop(direct);
    m.end();
}

#[test]
fn attributes_and_extended_attributes_are_kept() {
    let Some(m) = mounted("noatime") else { return };
    let path = m.path("x");
    fs::write(&path, "x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    let (file, name) = (c_path(&path), c"user.colour");
    let value = pattern(65536, 3);
    let mut got = vec![0u8; 65536];
    let mut list = [0u8; 64];
    // SAFETY: strings end with zero; lengths are those of the buffers; all outlive the calls.
    unsafe {
        let set = |flags| {
            libc::setxattr(
                file.as_ptr(),
                name.as_ptr(),
                value.as_ptr().cast(),
                value.len(),
                flags,
            )
        };
        assert_eq!(set(0), 0);
        assert_eq!(set(libc::XATTR_CREATE), -1);
        let size = libc::getxattr(file.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0);
        assert_eq!(size, 65536);
        let n = libc::getxattr(file.as_ptr(), name.as_ptr(), got.as_mut_ptr().cast(), 65536);
        assert_eq!(n, 65536);
        let n = libc::listxattr(file.as_ptr(), list.as_mut_ptr().cast(), 64);
        assert_eq!(&list[..n as usize], b"user.colour\0");
        assert_eq!(libc::removexattr(file.as_ptr(), name.as_ptr()), 0);
        assert_eq!(libc::removexattr(file.as_ptr(), name.as_ptr()), -1);
    }
    assert_eq!(got, value);
    m.end();
}

#[test]
fn many_clients_at_once_are_served() {
    let Some(m) = mounted("workers=8") else {
        return;
    };
    let top = m.dir.path();
    base::thread::parallel(8, |n| {
        let dir = top.join(format!("d{n}"));
        fs::create_dir(&dir).unwrap();
        for k in 0..200u64 {
            let data = pattern(10_000, k + n as u64);
            fs::write(dir.join(format!("f{k}")), &data).unwrap();
            assert_eq!(fs::read(dir.join(format!("f{k}"))).unwrap(), data);
        }
        fs::remove_dir_all(&dir).unwrap();
    });
    assert_eq!(fs::read_dir(m.dir.path()).unwrap().count(), 0);
    m.end();
}

#[test]
fn a_mount_in_use_is_detached_and_ends_with_its_last_user() {
    let Some(m) = mounted("") else { return };
    let file = File::create(m.path("held")).unwrap();
    assert!(m.session.unmounter.unmount(Insist::No).is_err());
    m.session.unmounter.unmount(Insist::Lazy).unwrap();
    assert!(m.session.ended.try_recv().is_err());
    drop(file);
    m.session.ended.recv().unwrap().unwrap();
}

#[test]
fn a_read_only_mount_refuses_writes() {
    let Some(m) = mounted("ro") else { return };
    let error = File::create(m.path("no")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    m.end();
}

/// Not a test by itself: the daemon of the tests below, in a process of its own.
#[test]
fn daemon() {
    let Some(path) = std::env::var_os("TOY_MOUNTPOINT") else {
        return;
    };
    let toy = toy::Toy::default();
    let options = MountOptions::default();
    mount::mount_operations(toy, Path::new(&path), &options, None, |_| {
        println!("usable");
    })
    .unwrap();
}

struct Daemon {
    child: std::process::Child,
    /// Kept open, so that the daemon may write until it ends.
    _output: BufReader<std::process::ChildStdout>,
}

impl Daemon {
    fn signal(&self, signal: i32) {
        // SAFETY: the call takes numbers only, and the child is not reaped yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn ended_well(&mut self) -> bool {
        self.child.wait().unwrap().success()
    }
}

/// Starts the daemon in a process of its own; returns when its mount is usable.
fn start_daemon(mountpoint: &Path) -> Option<Daemon> {
    if !has_fuse() {
        return None;
    }
    let command = Command::new(std::env::current_exe().unwrap());
    Some(start_daemon_by(command, mountpoint))
}

/// By a command that runs this program with the arguments that follow.
fn start_daemon_by(mut command: Command, mountpoint: &Path) -> Daemon {
    let mut child = command
        .args(["--exact", "daemon", "--nocapture"])
        .env("TOY_MOUNTPOINT", mountpoint)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("usable") {
        line.clear();
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "no mount");
    }
    Daemon {
        child,
        _output: output,
    }
}

#[test]
fn unmounting_waits_for_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut daemon) = start_daemon(dir.path()) else {
        return;
    };
    fs::write(dir.path().join("f"), "x").unwrap();
    mount::unmount(dir.path(), &|_| {}).unwrap();
    let status = daemon.child.try_wait().unwrap();
    assert!(status.expect("the daemon is gone").success());
}

/// What was mounted there last was unmounted in its place, and the daemon went on.
#[test]
fn a_signal_takes_nothing_away_that_somebody_else_has_mounted_over_it() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut daemon) = start_daemon(dir.path()) else {
        return;
    };
    let (path, kind) = (c_path(dir.path()), c"tmpfs".as_ptr());
    // SAFETY: strings that end with zero and outlive the call.
    let mounted = unsafe { libc::mount(kind, path.as_ptr(), kind, 0, std::ptr::null()) };
    if mounted != 0 {
        base::skip("mounts");
        return daemon.signal(libc::SIGTERM);
    }
    fs::write(dir.path().join("theirs"), "x").unwrap();
    // The second one breaks the connection.
    while daemon.child.try_wait().unwrap().is_none() {
        daemon.signal(libc::SIGTERM);
        base::thread::yield_now();
    }
    assert_eq!(fs::read(dir.path().join("theirs")).unwrap(), b"x");
    // SAFETY: as above.
    assert_eq!(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) }, 0);
    mount::clean_up(dir.path()).unwrap();
}

/// It waited for the process that has the daemon's number here.
#[test]
fn unmounting_waits_for_no_daemon_of_another_namespace() {
    let dir = tempfile::tempdir().unwrap();
    if !has_fuse() {
        return;
    }
    let apart = || {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--"]);
        command
    };
    if !apart().arg("true").status().unwrap().success() {
        base::skip("namespaces");
        return;
    }
    let mut command = apart();
    command.arg(std::env::current_exe().unwrap());
    let mut daemon = start_daemon_by(command, dir.path());
    mount::unmount(dir.path(), &|_| panic!("it is somebody else")).unwrap();
    assert!(daemon.ended_well());
}

#[test]
fn unmounting_does_not_wait_while_it_is_mounted_elsewhere() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let Some(mut daemon) = start_daemon(dir.path()) else {
        return;
    };
    let (from, to) = (c_path(dir.path()), c_path(other.path()));
    // SAFETY: the paths end with zero and outlive the call; a bind mount needs no other argument.
    let bound = unsafe {
        let (none, bind) = (std::ptr::null(), libc::MS_BIND);
        libc::mount(from.as_ptr(), to.as_ptr(), none, bind, none.cast())
    };
    if bound == 0 {
        let error = mount::unmount(dir.path(), &|_| {}).unwrap_err();
        let elsewhere = format!("still mounted at {:?}", other.path());
        assert!(error.to_string().contains(&elsewhere), "{error}");
        assert!(daemon.child.try_wait().unwrap().is_none());
        fs::write(other.path().join("f"), "x").unwrap();
        mount::unmount(other.path(), &|_| {}).unwrap();
    } else {
        base::skip("root");
        mount::unmount(dir.path(), &|_| {}).unwrap();
    }
    assert!(daemon.ended_well());
}

#[test]
fn a_daemon_that_hangs_is_waited_for_by_those_alone_who_ask_for_it() {
    for insist in [Insist::Lazy, Insist::Abort] {
        let dir = tempfile::tempdir().unwrap();
        let Some(mut daemon) = start_daemon(dir.path()) else {
            return;
        };
        daemon.signal(libc::SIGSTOP);
        let done = mount::unmount_now(dir.path(), insist);
        daemon.signal(libc::SIGCONT);
        done.unwrap();
        assert!(daemon.ended_well(), "{insist:?}");
        let gone = mount::unmount_now(dir.path(), insist).unwrap_err();
        assert!(matches!(gone, mount::Error::NotMounted(_)), "{gone}");
    }
}

#[test]
fn a_killed_daemon_leaves_a_stale_mount_that_is_cleaned_up() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut daemon) = start_daemon(dir.path()) else {
        return;
    };
    assert!(!mount::is_stale_mount(dir.path()).unwrap());
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(mount::is_stale_mount(dir.path()).unwrap());
    // It was a success, which says that everything is on the devices.
    let error = mount::unmount(dir.path(), &|_| {}).unwrap_err();
    assert!(matches!(error, mount::Error::DaemonDied { .. }), "{error}");
    assert!(!mount::is_stale_mount(dir.path()).unwrap());
}

#[test]
fn sigterm_unmounts_and_sighup_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut daemon) = start_daemon(dir.path()) else {
        return;
    };
    daemon.signal(libc::SIGHUP);
    fs::write(dir.path().join("f"), "x").unwrap();
    // Also while in use: the mount leaves the tree, the daemon waits for the last user.
    let held = File::open(dir.path().join("f")).unwrap();
    daemon.signal(libc::SIGTERM);
    while dir.path().join("f").exists() {
        base::thread::yield_now();
    }
    assert!(daemon.child.try_wait().unwrap().is_none());
    drop(held);
    assert!(daemon.ended_well());
}

#[test]
fn a_second_signal_ends_even_a_mount_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut daemon) = start_daemon(dir.path()) else {
        return;
    };
    let held = File::create(dir.path().join("f")).unwrap();
    daemon.signal(libc::SIGTERM);
    while dir.path().join("f").exists() {
        base::thread::yield_now();
    }
    daemon.signal(libc::SIGTERM);
    assert!(daemon.ended_well());
    assert!((&held).write_all(b"x").is_err());
}

#[test]
fn a_file_handle_opens_a_file_that_the_kernel_forgot() {
    let Some(m) = mounted("") else { return };
    fs::write(m.path("f"), "by handle").unwrap();
    #[repr(C)]
    struct Handle {
        head: libc::file_handle,
        bytes: [u8; 128],
    }
    let top = File::open(m.dir.path()).unwrap();
    let name = c_path(&m.path("f"));
    // SAFETY: the handle has room for the 128 bytes it claims; strings end with zero.
    unsafe {
        let mut handle: Handle = std::mem::zeroed();
        handle.head.handle_bytes = 128;
        let mut mount_id = 0;
        let result = libc::name_to_handle_at(
            libc::AT_FDCWD,
            name.as_ptr(),
            (&raw mut handle).cast(),
            &raw mut mount_id,
            0,
        );
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        let fd = libc::open_by_handle_at(top.as_raw_fd(), (&raw mut handle).cast(), libc::O_RDONLY);
        if fd < 0 {
            // Needs CAP_DAC_READ_SEARCH.
            assert_eq!(
                std::io::Error::last_os_error().raw_os_error(),
                Some(libc::EPERM)
            );
        } else {
            use std::os::fd::FromRawFd;
            let mut text = String::new();
            File::from_raw_fd(fd).read_to_string(&mut text).unwrap();
            assert_eq!(text, "by handle");
        }
    }
    drop(top);
    m.end();
}

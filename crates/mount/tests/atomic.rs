//! Atomic writes of open files under a real mount: what each handle sees, and what is left of them.
//!
//! Needs /dev/fuse and root, or `fusermount3`; without them each test says so and passes.

mod common;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/world.rs"]
mod world;

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};

use common::pattern;
use mapping::Mapping;
use mount::atomic_ioctl::{ABORT, COMMIT, FEATURE_ATOMIC_WRITE, GET_FEATURES, START};
use world::{Mounted, World};

const PAGE: usize = 4096;

fn open(path: &Path, flags: i32) -> File {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(false);
    options.custom_flags(flags).open(path).unwrap()
}

/// The error number, 0 without one.
fn ask(file: &File, command: u32) -> i32 {
    // SAFETY: these commands take no argument.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(command)) } {
        0 => 0,
        _ => std::io::Error::last_os_error().raw_os_error().unwrap(),
    }
}

/// What the file is for the daemon, whatever the kernel has cached.
fn inside(m: &Mounted, name: &str) -> Vec<u8> {
    let ino = m.fs.lookup(::fs::ROOT, name.as_bytes()).unwrap().ino;
    let file = m.fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut data = vec![0; m.fs.getattr(ino).unwrap().size as usize];
    assert_eq!(m.fs.read(&file, 0, &mut data).unwrap(), data.len());
    data
}

fn aborted(m: &Mounted) -> f64 {
    let label = Some(("event", "aborted".to_owned()));
    let all = m.fs.metrics();
    let found = all
        .iter()
        .find(|metric| metric.name == "sheaf_atomic_writes_total" && metric.label == label);
    match found.expect("it is listed").value {
        ::fs::Value::Counter(value) => value,
        other => panic!("{other:?}"),
    }
}

/// Memory that is as aligned as direct reads want it.
#[repr(align(4096))]
struct Aligned([u8; PAGE]);

fn direct_page(path: &Path, page: usize) -> Vec<u8> {
    let file = open(path, libc::O_DIRECT);
    let mut buf = Aligned([0; PAGE]);
    let len = file.read_at(&mut buf.0, (page * PAGE) as u64).unwrap();
    buf.0[..len].to_vec()
}

#[test]
fn what_is_staged_becomes_the_file_with_the_commit() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    let old = pattern(3 * PAGE + 100, 1);
    fs::write(&path, &old).unwrap();
    let file = open(&path, 0);
    let mut features = 0u32;
    // SAFETY: the command writes four bytes there.
    let asked = unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            libc::Ioctl::from(GET_FEATURES),
            &raw mut features,
        )
    };
    assert_eq!((asked, features), (0, FEATURE_ATOMIC_WRITE));
    assert_eq!(ask(&file, START), 0);
    assert_eq!(ask(&file, START), 0, "it goes on");
    let mut new = old.clone();
    for (at, len) in [(10, 20), (PAGE, PAGE), (5 * PAGE, PAGE + 1)] {
        let data = pattern(len, at as u64);
        file.write_all_at(&data, at as u64).unwrap();
        new.resize(new.len().max(at + len), 0);
        new[at..at + len].copy_from_slice(&data);
    }
    assert!(inside(&m, "f") == old);
    assert!(direct_page(&path, 1) == new[PAGE..2 * PAGE]);
    assert!(direct_page(&path, 5) == new[5 * PAGE..6 * PAGE]);
    assert_eq!(file.metadata().unwrap().len(), new.len() as u64);
    let mut seen = vec![0; new.len()];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == new);
    // The pages go and come back, brought by another handle.
    // SAFETY: a descriptor and numbers.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert!(fs::read(&path).unwrap() == new);
    file.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == new);
    assert!(inside(&m, "f") == old);
    assert_eq!(ask(&file, COMMIT), 0);
    assert!(inside(&m, "f") == new);
    assert!(fs::read(&path).unwrap() == new);
    assert!(direct_page(&path, 1) == new[PAGE..2 * PAGE]);
    // The handle is one like others again.
    file.write_all_at(b"plain", 0).unwrap();
    assert_eq!(&inside(&m, "f")[..5], b"plain");
    drop(file);
    m.end();
}

#[test]
fn an_abort_or_a_close_leaves_the_file_as_it_was_in_every_cache() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    let old = pattern(2 * PAGE + 7, 1);
    fs::write(&path, &old).unwrap();
    let reader = File::open(&path).unwrap();
    for how in ["abort", "close", "cut and abort"] {
        let file = open(&path, 0);
        assert_eq!(ask(&file, START), 0);
        file.write_all_at(&[9; 3 * PAGE], PAGE as u64).unwrap();
        file.write_all_at(&[8; 5], 3).unwrap();
        if how == "cut and abort" {
            file.set_len(5).unwrap();
            assert_eq!(fs::read(&path).unwrap(), [&old[..3], &[8; 2]].concat());
            file.set_len(1 << 20).unwrap();
            assert_eq!(fs::read(&path).unwrap().len(), 1 << 20);
        }
        let before = aborted(&m);
        match how {
            "close" => {
                drop(file);
                // The kernel tells the daemon later.
                while aborted(&m) == before {
                    base::thread::yield_now();
                }
                // Whoever asks now waits for a page that is being dropped, but not for those behind it.
                while reader.metadata().unwrap().len() != old.len() as u64
                    || fs::read(&path).unwrap() != old
                {
                    base::thread::yield_now();
                }
            }
            _ => assert_eq!(ask(&file, ABORT), 0),
        }
        assert_eq!(reader.metadata().unwrap().len(), old.len() as u64, "{how}");
        assert!(fs::read(&path).unwrap() == old, "{how}");
        let mut seen = vec![0; 5 * PAGE];
        assert_eq!(reader.read_at(&mut seen, 0).unwrap(), old.len(), "{how}");
        assert!(inside(&m, "f") == old, "{how}");
    }
    drop(reader);
    m.end();
}

/// Where a process of its own finds what it shall do.
const TASK: &str = "SHEAF_ATOMIC_TASK";

/// Not a test, but what another process does for one: starts an atomic write of the file that is its input, and is killed then.
#[test]
fn of_another_process() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    // SAFETY: it is open, and nobody else here uses it.
    let file = unsafe { File::from_raw_fd(0) };
    // Closed before the other one at the end of this process.
    let number = match task.as_str() {
        "one" | "commit" => 0,
        // SAFETY: a descriptor.
        _ => unsafe { libc::dup(file.as_raw_fd()) },
    };
    if number > 0 {
        let path = fs::read_link("/proc/self/fd/0").unwrap();
        let second = match task.as_str() {
            "read" => File::open(&path).unwrap(),
            _ => open(&path, 0),
        };
        // SAFETY: descriptors.
        assert_eq!(unsafe { libc::dup2(second.as_raw_fd(), 0) }, 0);
    }
    // SAFETY: it is open.
    let file = std::mem::ManuallyDrop::new(unsafe { File::from_raw_fd(number) });
    if task == "commit" {
        assert_eq!(ask(&file, COMMIT), libc::EINVAL);
        assert_eq!(ask(&file, START), 0);
        file.write_all_at(b"new", 0).unwrap();
        let path = fs::read_link("/proc/self/fd/0").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(ask(&file, COMMIT), 0);
        return;
    }
    assert_eq!(ask(&file, START), 0);
    file.write_all_at(&[2; PAGE], 0).unwrap();
    if task == "execute" {
        // The other one goes with this program, this one does not.
        // SAFETY: descriptors.
        unsafe { libc::fcntl(0, libc::F_SETFD, libc::FD_CLOEXEC) };
        // SAFETY: as above.
        unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
        let script =
            ["/bin/sh", "-c", "echo; kill -STOP $$"].map(|part| CString::new(part).unwrap());
        let [program, flag, what] = script.each_ref().map(|part| part.as_ptr());
        // SAFETY: strings that end, and a list of them that does.
        unsafe { libc::execv(program, [program, flag, what, std::ptr::null()].as_ptr()) };
        panic!("{}", std::io::Error::last_os_error());
    }
    // SAFETY: nothing here is to go on.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

/// `execve` closed the other descriptor, and never came back: the daemon looked into `/proc` for what the kernel shows after that. What was staged would have
/// stayed until the new program ended, while the locks were free.
#[test]
fn what_a_process_has_staged_goes_with_its_program_once_that_closes_the_file() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    fs::write(&path, [1; PAGE]).unwrap();
    let file = open(&path, 0);
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", "--nocapture", "of_another_process"]);
    program
        .env(TASK, "execute")
        .stdin(file.try_clone().unwrap());
    program.stdout(Stdio::piped());
    let mut child = program.spawn().unwrap();
    let mut status = 0;
    // SAFETY: a process and a number.
    let stopped = unsafe { libc::waitpid(child.id() as i32, &raw mut status, libc::WUNTRACED) };
    assert_eq!(stopped, child.id() as i32);
    assert!(libc::WIFSTOPPED(status), "{status:x}");
    assert_eq!(aborted(&m), 1.0);
    assert_eq!(fs::read(&path).unwrap(), [1; PAGE]);
    child.kill().unwrap();
    child.wait().unwrap();
    drop((file, program));
    m.end();
}

#[test]
fn a_killed_process_leaves_nothing_staged_though_its_open_file_lives() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    let old = [1; 2 * PAGE];
    fs::write(&path, old).unwrap();
    for task in ["one", "one", "write", "read"] {
        let (file, other) = (open(&path, 0), open(&path, 0));
        let mut killed = Command::new(std::env::current_exe().unwrap());
        killed.args(["--exact", "of_another_process"]);
        killed.env(TASK, task).stdin(file.try_clone().unwrap());
        killed.stdout(Stdio::null());
        let before = aborted(&m);
        let ended = killed.status().unwrap();
        assert_eq!(ended.signal(), Some(libc::SIGKILL), "{task}");
        // Its locks are gone now.
        let mut seen = [0; 2 * PAGE];
        other.read_exact_at(&mut seen, 0).unwrap();
        assert!(seen == old, "{task}");
        assert_eq!(aborted(&m), before + 1.0);
        // The rest of what it had begun.
        let refused = |result: std::io::Result<()>| {
            let error = result.unwrap_err().raw_os_error();
            assert_eq!(error, Some(libc::ECANCELED), "{task}");
        };
        refused(file.write_all_at(&[3; 10], 0));
        refused(file.set_len(5));
        other.write_all_at(&[1; 10], 0).unwrap();
        assert!(inside(&m, "f") == old);
        match task {
            "one" => assert_eq!(ask(&file, COMMIT), libc::ECANCELED),
            _ => assert_eq!(ask(&file, ABORT), 0),
        }
        assert_eq!(ask(&file, COMMIT), libc::EINVAL);
        file.write_all_at(&[1; 10], 0).unwrap();
        assert_eq!(ask(&file, START), 0);
        assert_eq!(ask(&file, ABORT), 0);
    }
    m.end();
}

#[test]
fn a_commit_takes_set_user_id_away() {
    let Some(world) = World::new() else { return };
    if fs::metadata(world.dir.path()).unwrap().uid() != 0 {
        base::skip("root");
        return;
    }
    let m = world.mount("allow_other");
    let path = m.path("f");
    fs::write(&path, [1; 10]).unwrap();
    std::os::unix::fs::chown(&path, Some(1000), Some(1000)).unwrap();
    let program = std::env::current_exe().unwrap();
    // Somewhere everybody may run it.
    let copy = world.dir.path().join("program");
    fs::copy(&program, &copy).unwrap();
    let mut other = Command::new(&copy);
    other.args(["--exact", "of_another_process"]);
    other.uid(1000).gid(1000).current_dir("/");
    other.env(TASK, "commit").stdin(open(&path, 0));
    other.stdout(Stdio::null());
    let ended = loop {
        match other.status() {
            // Another test's child has the descriptor that wrote it, until it executes its own program.
            Err(error) if error.raw_os_error() == Some(libc::ETXTBSY) => base::thread::yield_now(),
            ended => break ended.unwrap(),
        }
    };
    assert!(ended.success());
    assert_eq!(&inside(&m, "f")[..4], b"new\x01");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o755);
    drop(other);
    m.end();
}

#[test]
fn closing_a_second_descriptor_ends_it_and_another_process_does_not() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    fs::write(&path, [1; PAGE]).unwrap();
    let file = open(&path, 0);
    assert_eq!(ask(&file, START), 0);
    file.write_all_at(&[2; 10], 0).unwrap();
    // A handle of its own, closed, is no end of it.
    drop(open(&path, 0));
    // Another process that has this one, and closes it at its end.
    // SAFETY: the child calls nothing but what a signal handler may.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: a descriptor that nobody here uses again, and the end.
        unsafe {
            libc::close(file.as_raw_fd());
            libc::_exit(0);
        }
    }
    // SAFETY: no status is wanted.
    let waited = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    assert_eq!(waited, child);
    assert_eq!(ask(&file, COMMIT), 0);
    assert_eq!(inside(&m, "f")[..11], [[2; 10].as_slice(), &[1]].concat());

    assert_eq!(ask(&file, START), 0);
    file.write_all_at(&[3; 10], 0).unwrap();
    drop(file.try_clone().unwrap());
    assert_eq!(fs::read(&path).unwrap(), inside(&m, "f"));
    let refused = file.write_all_at(&[3; 10], 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ECANCELED));
    assert_eq!(ask(&file, COMMIT), libc::ECANCELED);
    drop(file);
    m.end();
}

#[test]
fn what_is_appended_goes_to_the_end_that_its_handle_has() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    for flags in [libc::O_APPEND, libc::O_APPEND | libc::O_DSYNC] {
        fs::write(&path, [1; 100]).unwrap();
        let file = open(&path, flags);
        let mut other = open(&path, flags);
        assert_eq!(ask(&file, START), 0);
        (&file).write_all(&[2; 50]).unwrap();
        assert_eq!(ask(&file, ABORT), 0);
        assert_eq!(ask(&file, START), 0);
        (&file).write_all(&[3; 50]).unwrap();
        (&file).write_all(&[4; 10]).unwrap();
        assert_eq!(ask(&file, COMMIT), 0);
        let mut new = [[1; 100].as_slice(), &[3; 50], &[4; 10]].concat();
        assert!(inside(&m, "f") == new);
        assert!(fs::read(&path).unwrap() == new);

        // Cut, and not.
        assert_eq!(ask(&file, START), 0);
        file.set_len(0).unwrap();
        assert_eq!(ask(&file, ABORT), 0);
        other.write_all(&[5; 7]).unwrap();
        (&file).write_all(&vec![6; 3 * PAGE]).unwrap();
        new.extend([5; 7]);
        new.resize(new.len() + 3 * PAGE, 6);
        assert!(inside(&m, "f") == new);
        // The kernel drops what it has put elsewhere soon after.
        while fs::read(&path).unwrap() != new {
            base::thread::yield_now();
        }
        // While it is staged.
        assert_eq!(ask(&file, START), 0);
        (&file).write_all(&[7; 50]).unwrap();
        file.set_len(10).unwrap();
        other.write_all(&[8; 9]).unwrap();
        new.extend([8; 9]);
        assert!(inside(&m, "f") == new);
        assert_eq!(ask(&file, ABORT), 0);
        assert!(inside(&m, "f") == new);
    }
    m.end();
}

#[test]
fn a_cut_is_staged_with_the_rest() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    let old = pattern(6 * PAGE, 1);
    fs::write(&path, &old).unwrap();
    let file = open(&path, 0);
    assert_eq!(ask(&file, START), 0);
    file.write_all_at(&[1; PAGE], 0).unwrap();
    file.set_len(2 * PAGE as u64 + 5).unwrap();
    file.write_all_at(&[2; 10], 3 * PAGE as u64).unwrap();
    assert!(inside(&m, "f") == old);
    assert_eq!(ask(&file, COMMIT), 0);
    let mut new = old[..2 * PAGE + 5].to_vec();
    new[..PAGE].fill(1);
    new.resize(3 * PAGE, 0);
    new.resize(3 * PAGE + 10, 2);
    assert!(inside(&m, "f") == new);
    assert!(fs::read(&path).unwrap() == new);
    drop(file);
    m.end();
}

/// A direct write beyond the end of the file, which the kernel refuses before it asks the daemon.
fn fail_directly(file: &File, at: usize) {
    // SAFETY: nothing is mapped at the address, which the call finds out.
    let written = unsafe {
        let nowhere = std::ptr::without_provenance(PAGE);
        libc::pwrite(file.as_raw_fd(), nowhere, PAGE, at as i64)
    };
    let error = std::io::Error::last_os_error().raw_os_error();
    assert_eq!((written, error), (-1, Some(libc::EFAULT)));
}

/// After a direct write that fails the kernel sets the file's size to the one it knows, and that was staged: the file was cut, or had zeros behind it, for good.
#[test]
fn a_direct_write_that_fails_leaves_the_file_its_size() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    let old = pattern(1 << 20, 1);
    fs::write(&path, &old).unwrap();
    let (file, other) = (open(&path, 0), open(&path, libc::O_DIRECT));
    for (size, is_over) in [(0, false), (4 << 20, false), (0, true), (4 << 20, true)] {
        assert_eq!(ask(&file, START), 0);
        file.set_len(size).unwrap();
        if is_over {
            assert_eq!(ask(&file, ABORT), 0);
        }
        for _ in 0..2 {
            fail_directly(&other, size as usize);
            assert!(inside(&m, "f") == old, "{size}, aborted: {is_over}");
        }
        // It looks like this.
        let cut = other.set_len(5).map_err(|error| error.raw_os_error());
        assert_eq!(cut, Err(Some(libc::EBUSY)));
        if !is_over {
            assert_eq!(ask(&file, ABORT), 0);
        }
        assert_eq!(other.metadata().unwrap().len(), old.len() as u64);
        assert!(fs::read(&path).unwrap() == old);
    }
    // A size that somebody wants.
    other.set_len(4 << 20).unwrap();
    assert_eq!(inside(&m, "f").len(), 4 << 20);
    other.set_len(0).unwrap();
    assert!(inside(&m, "f").is_empty());
    drop((file, other));
    m.end();
}

#[test]
fn who_comes_second_or_cannot_write_is_refused() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    fs::write(&path, [1; PAGE]).unwrap();
    let (file, other) = (open(&path, 0), open(&path, 0));
    let reader = File::open(&path).unwrap();
    assert_eq!(ask(&file, COMMIT), libc::EINVAL);
    assert_eq!(ask(&file, ABORT), 0);
    assert_eq!(ask(&reader, START), libc::EBADF);
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    assert_eq!(ask(&writer, START), libc::EBADF);
    drop(writer);
    assert_eq!(ask(&file, 0xf503), libc::ENOTTY);
    assert_eq!(ask(&File::open(&m.at).unwrap(), START), libc::EBADF);
    assert_eq!(ask(&file, START), 0);
    assert_eq!(ask(&other, START), libc::EBUSY);
    assert_eq!(ask(&other, COMMIT), libc::EINVAL);
    assert_eq!(ask(&other, ABORT), 0);
    file.write_all_at(&[2; 10], 0).unwrap();
    file.sync_all().unwrap();
    assert_eq!(inside(&m, "f"), [1; PAGE], "a sync is no commit");
    // SAFETY: this call takes a descriptor and numbers only.
    let allocated = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, 1 << 20) };
    let error = std::io::Error::last_os_error().raw_os_error();
    assert_eq!((allocated, error), (-1, Some(libc::EOPNOTSUPP)));
    fs::remove_file(&path).unwrap();
    assert_eq!(ask(&file, COMMIT), libc::ESTALE);
    let mut seen = [0; 10];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(seen, [1; 10]);
    assert_eq!(ask(&other, START), libc::ESTALE);
    drop((file, other, reader));
    m.end();
}

#[test]
fn what_others_change_meanwhile_stays_but_under_staged_bytes() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    for cut in [false, true] {
        for commit in [false, true] {
            fs::write(&path, [1; 4 * PAGE]).unwrap();
            let (file, other) = (open(&path, 0), open(&path, 0));
            assert_eq!(ask(&file, START), 0);
            file.write_all_at(&[2; PAGE], PAGE as u64).unwrap();
            file.write_all_at(&[2; 50], 100).unwrap();
            let mut new = vec![1; 4 * PAGE];
            if cut {
                other.set_len(0).unwrap();
                new.clear();
            }
            other.write_all_at(&[3; 100], 0).unwrap();
            other.write_all_at(&[3; PAGE], PAGE as u64 + 1).unwrap();
            new.resize(new.len().max(2 * PAGE + 1), 0);
            new[..100].fill(3);
            new[PAGE + 1..2 * PAGE + 1].fill(3);
            if commit {
                new[PAGE..2 * PAGE].fill(2);
                new[100..150].fill(2);
            }
            assert_eq!(ask(&file, if commit { COMMIT } else { ABORT }), 0);
            assert!(inside(&m, "f") == new, "cut {cut}, commit {commit}");
            assert!(
                fs::read(&path).unwrap() == new,
                "cut {cut}, commit {commit}"
            );
        }
    }
    m.end();
}

#[test]
fn a_mapping_brings_neither_a_staged_size_nor_a_staged_cut_to_the_file() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    for (cut, flags) in [(false, 0), (true, 0), (true, libc::O_DIRECT)] {
        let old = vec![1; 3 * PAGE + 100];
        fs::write(&path, &old).unwrap();
        let (file, mapper) = (open(&path, 0), open(&path, flags));
        assert_eq!(ask(&file, START), 0);
        if cut {
            file.set_len(5).unwrap();
        }
        // The last page that the file has is not staged itself.
        file.set_len(6 * PAGE as u64).unwrap();
        file.write_all_at(&[2], 5 * PAGE as u64).unwrap();
        let len = 6 * PAGE;
        let mut map = Mapping::of(&mapper, len);
        let seen = [10, 5 * PAGE].map(|place| map.load(place));
        assert_eq!(seen, [u8::from(!cut), 2]);
        for page in [2, 3] {
            map.store(page * PAGE + 1, &[9]);
        }
        map.sync();
        let mut kept = old.clone();
        if !cut {
            kept[2 * PAGE + 1] = 9;
            kept[3 * PAGE + 1] = 9;
        }
        assert!(inside(&m, "f") == kept, "cut {cut}");
        for page in [2, 3] {
            map.store(page * PAGE + 2, &[8]);
        }
        assert_eq!(ask(&file, ABORT), 0);
        drop(map);
        file.sync_all().unwrap();
        assert_eq!(inside(&m, "f").len(), old.len(), "cut {cut}");
        if cut {
            assert!(inside(&m, "f") == old);
        }
        drop((file, mapper));
        assert!(fs::read(&path).unwrap() == inside(&m, "f"));
    }
    m.end();
}

#[test]
fn a_mapping_does_not_bring_staged_bytes_to_the_file() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    let old = vec![1; 4 * PAGE];
    fs::write(&path, &old).unwrap();
    let file = open(&path, 0);
    let mapper = open(&path, 0);
    let len = 4 * PAGE;
    let mut map = Mapping::of(&mapper, len);
    assert_eq!(ask(&file, START), 0);
    file.write_all_at(&[2; PAGE], PAGE as u64).unwrap();
    map.store(PAGE + 1, &[3]);
    map.store(2 * PAGE, &[3]);
    map.store(3 * PAGE, &[3]);
    map.sync();
    let mut kept = old.clone();
    kept[2 * PAGE] = 3;
    kept[3 * PAGE] = 3;
    assert!(
        inside(&m, "f") == kept,
        "only the page without staged bytes came"
    );
    // Dirty while the pages are dropped.
    map.store(PAGE + 2, &[4]);
    assert_eq!(ask(&file, ABORT), 0);
    map.sync();
    assert!(inside(&m, "f") == kept);
    assert!(fs::read(&path).unwrap() == kept);

    assert_eq!(ask(&file, START), 0);
    file.write_all_at(&[2; PAGE], PAGE as u64).unwrap();
    map.store(PAGE + 1, &[3]);
    map.sync();
    assert_eq!(ask(&file, COMMIT), 0);
    kept[PAGE..2 * PAGE].fill(2);
    kept[PAGE + 1] = 3;
    assert!(inside(&m, "f") == kept);
    drop((map, file, mapper));
    m.end();
}

#[test]
fn a_copy_shows_what_is_staged() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    fs::write(m.path("f"), [1; 2 * PAGE]).unwrap();
    let (file, target) = (open(&m.path("f"), 0), open(&m.path("g"), 0));
    assert_eq!(ask(&file, START), 0);
    file.write_all_at(&[2; PAGE], 0).unwrap();
    let copy = |from: &File, to: &File| {
        let (mut start, mut end) = (0, 0);
        let (from, to) = (from.as_raw_fd(), to.as_raw_fd());
        // SAFETY: the pointers name live offsets; all else are numbers.
        unsafe { libc::copy_file_range(from, &raw mut start, to, &raw mut end, PAGE, 0) }
    };
    assert_eq!(copy(&file, &target), PAGE as isize);
    assert_eq!(fs::read(m.path("g")).unwrap(), [2; PAGE]);
    // Into it: staged as writes are.
    target.write_all_at(&[5; PAGE], 0).unwrap();
    assert_eq!(copy(&target, &file), PAGE as isize);
    assert_eq!(inside(&m, "f"), [1; 2 * PAGE]);
    assert_eq!(ask(&file, COMMIT), 0);
    assert_eq!(inside(&m, "f")[..PAGE], [5; PAGE]);
    drop((file, target));
    m.end();
}

#[test]
fn many_files_at_once_are_aborted_and_committed_while_others_read() {
    let Some(world) = World::new() else { return };
    // Few workers: those who drop pages must leave some.
    let m = world.mount("workers=2");
    let paths: Vec<_> = (0..6).map(|n| m.path(&format!("f{n}"))).collect();
    for path in &paths {
        fs::write(path, [0; 8 * PAGE]).unwrap();
    }
    let mut threads = Vec::new();
    for path in &paths {
        let (writer, reader) = (path.clone(), path.clone());
        let write = move || {
            let file = open(&writer, 0);
            for round in 1..40u8 {
                // The pages of the one before may be left to somebody else.
                while ask(&file, START) == libc::EBUSY {
                    base::thread::yield_now();
                }
                file.write_all_at(&[round; 8 * PAGE], 0).unwrap();
                let commit = round % 3 == 0;
                let ended = ask(&file, if commit { COMMIT } else { ABORT });
                assert_eq!(ended, 0);
            }
        };
        let read = move || {
            let file = open(&reader, 0);
            let mut seen = [0; 8 * PAGE];
            for _ in 0..100 {
                assert_eq!(file.read_at(&mut seen, 0).unwrap(), seen.len());
                // SAFETY: a descriptor and numbers.
                unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
            }
        };
        threads.push(base::thread::spawn("writer", write).unwrap());
        threads.push(base::thread::spawn("reader", read).unwrap());
    }
    for thread in threads {
        thread.join().unwrap();
    }
    for (n, path) in paths.iter().enumerate() {
        assert_eq!(inside(&m, &format!("f{n}")), [39; 8 * PAGE]);
        assert_eq!(fs::read(path).unwrap(), [39; 8 * PAGE]);
        assert_eq!(fs::metadata(path).unwrap().size(), 8 * PAGE as u64);
    }
    m.end();
}

//! What a daemon keeps and leaves alone, and what is said of one that has died.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};

use crate::untold::{can_mount, closed};
use crate::{Array, OPERATIONAL, Ran, USAGE, sheaf};

/// An array and where it is mounted, until this is dropped.
struct Mounted {
    array: Array,
    at: PathBuf,
}

impl Mounted {
    /// The place; nothing is mounted yet.
    fn place() -> Self {
        let array = Array::made(1);
        let at = array.path("mnt");
        fs::create_dir(&at).unwrap();
        Mounted { array, at }
    }

    fn new(options: &[&str]) -> Self {
        let mounted = Mounted::place();
        sheaf(&["mount"], options, &mounted.paths()).succeeds();
        mounted
    }

    fn paths(&self) -> [PathBuf; 2] {
        [self.array.images[0].clone(), self.at.clone()]
    }

    fn is_there(&self) -> bool {
        let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev());
        match (device(&self.at), device(self.array.dir.path())) {
            (Ok(at), Ok(above)) => at != above,
            // It is there, and its daemon is not.
            _ => true,
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.is_there() {
            sheaf(&["umount"], &[], std::slice::from_ref(&self.at)).succeeds();
        }
    }
}

const CAP_SYS_RESOURCE: u32 = 24;

/// Of the capabilities that this process has in effect.
fn has_capability(number: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let all = u64::from_str_radix(line.unwrap().trim(), 16).unwrap();
    all >> number & 1 == 1
}

/// It panicked in the middle of mounting, and left a mount that nobody served.
#[test]
fn a_mount_in_the_foreground_serves_though_nobody_reads_what_it_says() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::place();
    let mut serving = Command::new(env!("CARGO_BIN_EXE_sheaf"));
    serving
        .args(["mount", "--foreground"])
        .args(mounted.paths());
    serving.env("SHEAF_LOG", "info");
    serving.stdout(closed()).stderr(closed());
    let mut serving = serving.spawn().unwrap();
    while !mounted.is_there() {
        assert!(serving.try_wait().unwrap().is_none());
    }
    fs::write(mounted.at.join("file"), "file").unwrap();
    drop(mounted);
    assert!(serving.wait().unwrap().success());
}

/// A service writes what it logs to a pipe or socket of somebody else's: once that was full, each request waited for room.
#[test]
fn a_mount_in_the_foreground_serves_though_its_messages_find_no_room() {
    let (unread, full) = std::io::pipe().unwrap();
    serves_though_nobody_reads(full, &[]);
    drop(unread);
}

/// A terminal says that it has room when it has some, and lets the writer wait for room for all.
#[test]
fn a_mount_in_the_foreground_serves_though_nobody_reads_its_terminal() {
    let (unread, terminal) = terminal();
    serves_though_nobody_reads(terminal, &[]);
    drop(unread);
}

/// Nobody is there to read a log that is a pipe.
#[test]
fn a_mount_serves_though_nobody_reads_its_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let made = Command::new("mkfifo").arg(&log).status().unwrap();
    assert!(made.success());
    let unread = fs::File::options().read(true).write(true).open(&log);
    let log = log.to_str().unwrap();
    serves_though_nobody_reads(closed(), &["--log", log]);
    drop(unread.unwrap());
}

/// Both sides of a terminal of which nobody reads what is written.
fn terminal() -> (OwnedFd, fs::File) {
    let near = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    unlockpt(&near).unwrap();
    let far = ptsname(&near, Vec::new()).unwrap();
    let mut options = fs::File::options();
    let options = options.read(true).write(true).custom_flags(libc::O_NOCTTY);
    (near, options.open(far.to_str().unwrap()).unwrap())
}

/// Mounts with a message of each request, and makes many.
fn serves_though_nobody_reads(messages: impl Into<Stdio>, options: &[&str]) {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::place();
    // Ended where it hangs: whoever looks at the mount would wait for ever.
    let mut serving = Command::new("timeout");
    serving.args(["--foreground", "-s", "KILL", "30"]);
    serving.args([env!("CARGO_BIN_EXE_sheaf"), "mount", "--foreground"]);
    serving.args(options);
    serving.args(mounted.paths());
    // Something of each request.
    serving.env("SHEAF_LOG", "trace");
    serving.stdout(closed()).stderr(messages);
    let mut serving = serving.spawn().unwrap();
    let script = "for i in $(seq 300); do
            grep -q \" $0 \" /proc/self/mountinfo && break
            sleep 0.1
        done
        cd \"$0\" && for i in $(seq 2000); do echo $i > file$i || exit; done; cat file2000";
    let mut program = Command::new("sh");
    let ran = program.args(["-c", script]).arg(&mounted.at).output();
    let ran = ran.unwrap();
    assert_eq!(ran.stdout, b"2000\n", "{ran:?}");
    drop(mounted);
    assert!(serving.wait().unwrap().success());
}

/// A lock that the caller had taken was held as long as the mount. What is named on the command line is meant for the daemon.
#[test]
fn a_daemon_keeps_nothing_open_that_its_caller_had() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::place();
    let [lock, log, pid] = ["lock", "log", "pid"].map(|name| mounted.array.path(name));
    let mut shell = Command::new("sh");
    let script = "exec 9>\"$1\" 8>\"$2\"; shift 2; exec \"$0\" \"$@\"";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_sheaf")]);
    shell.args([&lock, &log]);
    shell
        .args(["mount", "--log=/dev/fd/8", "--pid-file"])
        .arg(&pid)
        .args(mounted.paths());
    assert!(shell.stdout(Stdio::null()).status().unwrap().success());
    let pid = fs::read_to_string(pid).unwrap();
    // Nor is it ended before others where memory is short, if it may say so.
    let score = |process: &str| fs::read_to_string(format!("/proc/{process}/oom_score_adj"));
    let wanted = match has_capability(CAP_SYS_RESOURCE) {
        true => "-900".into(),
        false => score("self").unwrap(),
    };
    assert_eq!(score(pid.trim()).unwrap().trim(), wanted.trim());
    let open = fs::read_dir(format!("/proc/{}/fd", pid.trim())).unwrap();
    let open: Vec<PathBuf> = open
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
        .collect();
    assert!(open.contains(&mounted.array.images[0]), "{open:?}");
    assert!(!open.contains(&lock), "{open:?}");
    // Where its last words go, and what the caller waited at: let go before the caller goes on.
    let opened = |number| fs::read_link(format!("/proc/{}/fd/{number}", pid.trim()));
    assert_eq!(opened(2).unwrap(), log);
    assert_eq!(opened(1).unwrap(), Path::new("/dev/null"));
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("is mounted at"), "{log}");
}

/// The file beside the pid file was the user's, and gone.
#[test]
fn a_pid_file_takes_no_name_that_is_taken() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::place();
    let (pid, users) = (mounted.array.path("pid"), mounted.array.path("pid.new"));
    fs::write(&users, "mine").unwrap();
    let option = format!("--pid-file={}", pid.display());
    sheaf(&["mount"], &[&option], &mounted.paths()).succeeds();
    assert!(pid.exists());
    assert_eq!(fs::read(users).unwrap(), b"mine");
    let begins = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with("pid");
    let beside = fs::read_dir(mounted.array.dir.path()).unwrap();
    assert_eq!(
        beside
            .flatten()
            .filter_map(|e| begins(e).then_some(()))
            .count(),
        2
    );
}

/// Mounts there, and kills the daemon.
fn mount_and_kill(place: &Mounted) {
    let pid = place.array.path("pid");
    let option = format!("--pid-file={}", pid.display());
    sheaf(&["mount"], &[&option, "-o", "lazytime"], &place.paths()).succeeds();
    let daemon = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    kill_process(Pid::from_raw(daemon).unwrap(), Signal::KILL).unwrap();
    // Until the kernel has taken down what it had.
    let ask = || sheaf(&["info", "--live"], &[], std::slice::from_ref(&place.at));
    while ask().0.status.success() {}
}

/// It was an unmount like any other, after which everything is on the devices.
#[test]
fn an_unmount_says_that_the_daemon_had_died() {
    if !can_mount() {
        return;
    }
    let place = Mounted::place();
    let at = std::slice::from_ref(&place.at);
    let helper = place.array.path("umount.fuse.sheaf");
    symlink(env!("CARGO_BIN_EXE_sheaf"), &helper).unwrap();
    mount_and_kill(&place);
    sheaf(&["umount"], &[], at)
        .exits(OPERATIONAL)
        .says("its daemon had died")
        .says("the next mount recovers");
    assert!(!place.is_there());
    mount_and_kill(&place);
    Ran(Command::new(helper).args(at).output().unwrap()).exits(32);
    assert!(!place.is_there());
    // Who does not wait has nothing promised.
    for option in ["-l", "-f"] {
        mount_and_kill(&place);
        sheaf(&["umount"], &[option], at).succeeds();
        assert!(!place.is_there());
    }
    mount_and_kill(&place);
    sheaf(&["mount"], &[], &place.paths()).succeeds();
}

/// Nobody was there to read it, nor would be: the mount waited, and its daemon when the command had long been ended.
#[test]
fn a_log_that_is_a_pipe_without_a_reader_is_refused() {
    let place = Mounted::place();
    let log = place.array.path("log");
    let made = Command::new("mkfifo").arg(&log).status().unwrap();
    assert!(made.success());
    for way in [&[][..], &["--foreground"]] {
        // In a file: a daemon that waits keeps a pipe open for as long.
        let told = fs::File::create(place.array.path("told")).unwrap();
        let mut limited = Command::new("timeout");
        limited.args(["-s", "KILL", "30", env!("CARGO_BIN_EXE_sheaf"), "mount"]);
        limited.args(way).arg("--log").arg(&log).args(place.paths());
        let status = limited.stdout(Stdio::null()).stderr(told).status();
        // One that waits sees that its caller has gone.
        let mut reader = fs::File::options();
        let reader = reader.read(true).custom_flags(libc::O_NONBLOCK).open(&log);
        drop(reader.unwrap());
        assert_eq!(status.unwrap().code(), Some(OPERATIONAL));
        let told = fs::read_to_string(place.array.path("told")).unwrap();
        assert!(told.contains("nobody reads this pipe"), "{told}");
    }
}

/// A file that was not there was said to be missing, and not which.
#[test]
fn a_mount_without_proc_says_what_it_lacks() {
    if !can_mount() {
        return;
    }
    let place = Mounted::place();
    for way in [&[][..], &["--foreground"]] {
        let mut apart = Command::new("unshare");
        let script = "umount -l /proc && exec \"$0\" mount \"$@\"";
        apart.args(["-m", "sh", "-c", script, env!("CARGO_BIN_EXE_sheaf")]);
        apart.args(way).args(place.paths());
        Ran(apart.output().unwrap())
            .exits(OPERATIONAL)
            .says("/proc has to be mounted");
    }
}

/// It was an error of the transport, with nothing to be done.
#[test]
fn of_a_daemon_that_has_died_it_is_said_how_to_clean_up() {
    if !can_mount() {
        return;
    }
    let place = Mounted::place();
    mount_and_kill(&place);
    let remedy = format!("`sheaf umount {}` cleans up", place.at.display());
    for command in [
        &["info", "--live"][..],
        &["trim"],
        &["scrub"],
        &["checkpoint"],
    ] {
        sheaf(command, &[], std::slice::from_ref(&place.at))
            .exits(OPERATIONAL)
            .says(&remedy);
    }
    sheaf(&["umount", "-l"], &[], std::slice::from_ref(&place.at)).succeeds();
}

#[test]
fn a_checkpoint_of_a_read_only_mount_is_refused_as_that() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::new(&["-o", "ro"]);
    sheaf(&["checkpoint"], &[], std::slice::from_ref(&mounted.at))
        .exits(OPERATIONAL)
        .says("is read-only, mounted so");
}

/// Interrupted, it began anew, and nobody had been told that it would.
#[test]
fn a_scrub_says_that_its_position_cannot_be_kept() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::new(&[]);
    let file = mounted.array.path("file");
    fs::write(&file, "no folder").unwrap();
    let at = std::slice::from_ref(&mounted.at);
    for state in [file.clone(), file.join("state")] {
        let state = format!("--state={}", state.display());
        sheaf(&["scrub"], &[&state], at)
            .exits(USAGE)
            .says(&state.replace('=', " "))
            .says("cannot be kept");
    }
    let state = format!("--state={}", mounted.array.path("state").display());
    sheaf(&["scrub"], &[&state], at).succeeds();
}

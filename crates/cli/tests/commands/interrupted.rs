//! Signals while a command is at work: it ends, and what it set up goes with it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tempfile::TempDir;

use crate::untold::can_mount;
use crate::{Array, OPERATIONAL, Ran, sheaf};

/// A call, and what it says on standard error: a file, for a daemon that is left would keep a pipe open.
struct Started {
    child: Child,
    errors: File,
}

fn start(command: &[&str]) -> Started {
    let errors = tempfile::tempfile().unwrap();
    let mut sheaf = Command::new(env!("CARGO_BIN_EXE_sheaf"));
    sheaf.args(command).process_group(0).stdout(Stdio::piped());
    sheaf.stderr(errors.try_clone().unwrap());
    let child = sheaf.spawn().unwrap();
    Started { child, errors }
}

impl Started {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn end(mut self) -> Ran {
        let status = self.child.wait().unwrap();
        let mut stderr = Vec::new();
        self.errors.rewind().unwrap();
        self.errors.read_to_end(&mut stderr).unwrap();
        let stdout = Vec::new();
        Ran(Output {
            status,
            stdout,
            stderr,
        })
    }
}

/// The demo in `dir`, of a tree of one file.
fn demo(dir: &Path, options: &[&str]) -> Started {
    let tree = dir.join("tree");
    fs::create_dir_all(&tree).unwrap();
    fs::write(tree.join("file"), "copied").unwrap();
    let [dir, tree] = [dir, &tree].map(|path| path.to_str().unwrap());
    start(&[&["demo", "--dir", dir, "--tree", tree][..], options].concat())
}

#[track_caller]
fn nothing_is_left(ran: Ran, dir: &Path) {
    ran.exits(OPERATIONAL).says("interrupted");
    let left = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["tree"]);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");
}

/// A live mount was left, its daemon, and two gigabytes of images.
#[test]
fn an_interrupted_demo_leaves_nothing() {
    let last = match can_mount() {
        true => "Mounted",
        false => "In-process",
    };
    for (signal, options, word) in [
        (Signal::INT, &[][..], last),
        (Signal::TERM, &[], "Copied"),
        (Signal::HUP, &[], "Killed"),
        (Signal::INT, &["--no-mount"], "Made"),
        (Signal::TERM, &["--no-mount"], "Verified"),
    ] {
        let dir = TempDir::new().unwrap();
        let mut started = demo(dir.path(), options);
        let mut said = BufReader::new(started.child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "no {word}");
        }
        kill_process(started.pid(), signal).unwrap();
        nothing_is_left(started.end(), dir.path());
    }
}

/// As a terminal interrupts it, in the middle of mounting.
#[test]
fn a_demo_that_is_interrupted_with_all_it_has_started_leaves_nothing() {
    if !can_mount() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let mut started = demo(dir.path(), &[]);
    let folder = dir
        .path()
        .join(format!("sheaf-demo-{}", started.child.id()));
    let is_pid_file = |entry: fs::DirEntry| {
        entry
            .file_name()
            .to_string_lossy()
            .starts_with("daemon.pid")
    };
    let begun = || fs::read_dir(&folder).is_ok_and(|all| all.flatten().any(is_pid_file));
    while !begun() {
        assert_eq!(started.child.try_wait().unwrap(), None);
    }
    kill_process_group(started.pid(), Signal::INT).unwrap();
    nothing_is_left(started.end(), dir.path());
}

/// The images stayed, and were what the same command found in its way.
#[test]
fn an_interrupted_mkfs_takes_the_images_with_it_that_it_has_created() {
    let mut interrupted = 0;
    for signal in [Signal::INT, Signal::TERM, Signal::HUP].repeat(4) {
        let array = Array::unmade(16);
        fs::File::create(&array.images[3])
            .unwrap()
            .set_len(64 << 20)
            .unwrap();
        let mut mkfs = vec!["mkfs", "--size", "64M"];
        mkfs.extend(array.images.iter().map(|image| image.to_str().unwrap()));
        let mut started = start(&mkfs);
        while !array.images[0].exists() && started.child.try_wait().unwrap().is_none() {}
        kill_process(started.pid(), signal).unwrap();
        let ran = started.end();
        let left = || fs::read_dir(array.dir.path()).unwrap().count();
        if ran.0.status.success() {
            assert_eq!(left(), 16);
            continue;
        }
        interrupted += 1;
        ran.exits(OPERATIONAL).says("interrupted");
        // But the one that was there.
        assert_eq!(left(), 1);
        sheaf(&mkfs, &["--force"], &[]).succeeds();
    }
    assert!(interrupted > 0);
}

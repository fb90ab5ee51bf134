//! Signals while a command is at work: it ends, and what it set up goes with it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tempfile::TempDir;

use crate::untold::can_mount;
use crate::{OPERATIONAL, Ran};

fn start(command: &[&str]) -> Child {
    let mut sheaf = Command::new(env!("CARGO_BIN_EXE_sheaf"));
    sheaf.args(command).process_group(0);
    sheaf.stdout(Stdio::piped()).stderr(Stdio::piped());
    sheaf.spawn().unwrap()
}

fn ended(child: Child) -> Ran {
    Ran(child.wait_with_output().unwrap())
}

/// The demo in `dir`, of a tree of one file.
fn demo(dir: &Path, options: &[&str]) -> Child {
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
        let mut child = demo(dir.path(), options);
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "no {word}");
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        nothing_is_left(ended(child), dir.path());
    }
}

/// As a terminal interrupts it, in the middle of mounting.
#[test]
fn a_demo_that_is_interrupted_with_all_it_has_started_leaves_nothing() {
    if !can_mount() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let mut child = demo(dir.path(), &[]);
    let folder = dir.path().join(format!("sheaf-demo-{}", child.id()));
    let begun = || ["daemon.pid.new", "daemon.pid"].map(|name| folder.join(name).exists());
    while !begun().contains(&true) {
        assert_eq!(child.try_wait().unwrap(), None);
    }
    kill_process_group(Pid::from_child(&child), Signal::INT).unwrap();
    nothing_is_left(ended(child), dir.path());
}

//! Words that nobody reads, or that cannot be written: what a command says by its exit code it says all the same.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{Array, CORRECTED, OPERATIONAL, Ran, UNCORRECTED, USAGE};

/// An output whose reader has gone.
pub fn closed() -> Stdio {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    writer.into()
}

/// An output that takes nothing.
pub fn full() -> Stdio {
    let full = File::options().write(true).open("/dev/full");
    full.unwrap().into()
}

pub fn sheaf(command: &[&str], array: &Array, out: Stdio) -> Ran {
    let mut sheaf = Command::new(env!("CARGO_BIN_EXE_sheaf"));
    sheaf.args(command).args(&array.images).stdout(out);
    sheaf.stderr(Stdio::piped());
    Ran(sheaf.spawn().unwrap().wait_with_output().unwrap())
}

/// All that is left is what the label says, and what fsck can make of the nodes.
fn lose_checkpoints(array: &Array) {
    let image = File::options().write(true).open(&array.images[0]).unwrap();
    let end = image.metadata().unwrap().len();
    for (from, to) in [(4096, 64 << 10), (end - (64 << 10), end)] {
        let bytes = vec![0xa5; (to - from) as usize];
        image.write_all_at(&bytes, from).unwrap();
    }
}

/// `sheaf fsck | head` with pipefail took a damaged array for a sound one.
#[test]
fn a_reader_that_has_gone_changes_no_verdict() {
    let array = Array::made(1);
    sheaf(&["fsck"], &array, closed()).succeeds();
    lose_checkpoints(&array);
    for command in [&["fsck"][..], &["fsck", "--json"], &["fsck", "-y", "-n"]] {
        sheaf(command, &array, closed()).exits(UNCORRECTED);
        sheaf(command, &array, full())
            .exits(UNCORRECTED | OPERATIONAL)
            .says("standard output");
    }
    sheaf(&["fsck", "-y"], &array, closed()).exits(CORRECTED);
    sheaf(&["fsck"], &array, full()).exits(OPERATIONAL);
}

/// The same of a scrub, whose code 8 would say that nothing is known.
#[test]
fn a_scrub_that_nobody_reads_says_what_it_found() {
    if !can_mount() {
        return;
    }
    let array = Array::made(1);
    let at = array.path("mnt");
    fs::create_dir(&at).unwrap();
    let paths = [array.images[0].clone(), at.clone()];
    crate::sheaf(&["mount"], &[], &paths).succeeds();
    let state = format!("--state={}", array.path("state").display());
    let scrub = |out| sheaf(&["scrub", &state, at.to_str().unwrap()], &none(), out);
    let sound = [scrub(closed()), scrub(full())];
    lose_checkpoints(&array);
    let damaged = [scrub(closed()), scrub(full())];
    crate::sheaf(&["umount"], &[], &[at]).succeeds();
    let [closed, full] = sound;
    closed.succeeds();
    full.exits(OPERATIONAL);
    for ran in damaged {
        ran.exits(UNCORRECTED);
    }
}

/// Each message was a panic, with exit code 101, which none of the commands has.
#[test]
fn a_message_that_nobody_reads_changes_no_exit_code() {
    let array = Array::made(1);
    let device = array.images[0].to_str().unwrap();
    for (call, code) in [
        (&["cat", "-d", device, "/none"][..], OPERATIONAL),
        (&["ls", "-d", device, "/none"], OPERATIONAL),
        (&["info", "/none.img"], OPERATIONAL),
        (&["mkfs", device], OPERATIONAL),
        (&["fsck", "LABEL="], USAGE),
        (
            &["mount", "-o", "device_timeout=0.01", "/none.img", "/none"],
            USAGE,
        ),
    ] {
        for stderr in [closed, full] {
            let mut sheaf = Command::new(env!("CARGO_BIN_EXE_sheaf"));
            sheaf.args(call).stdout(Stdio::null()).stderr(stderr());
            let status = sheaf.status().unwrap();
            assert_eq!(status.code(), Some(code), "{call:?}");
        }
    }
}

/// That there was no room for it was told of all output but this.
#[test]
fn help_that_cannot_be_written_is_an_error() {
    for call in [&["--help"][..], &["--version"], &["help", "mount"]] {
        sheaf(call, &none(), closed()).succeeds();
        sheaf(call, &none(), full())
            .exits(OPERATIONAL)
            .says("standard output");
    }
}

fn none() -> Array {
    Array::unmade(0)
}

pub fn can_mount() -> bool {
    let can = rustix::process::geteuid().is_root() && File::open("/dev/fuse").is_ok();
    if !can {
        base::skip("mounts");
    }
    can
}

/// They ended before they began, and said that all was well.
#[test]
fn torture_and_demo_do_their_work_though_nobody_reads_what_they_say() {
    if !can_mount() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    let torture = ["torture", path, "--kills", "1", "--keep"];
    sheaf(&torture, &none(), closed()).succeeds();
    let kept = fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(kept, 1);
    fs::create_dir(dir.path().join("tree")).unwrap();
    fs::write(dir.path().join("tree/file"), "kept").unwrap();
    let tree = format!("--tree={path}/tree");
    let demo = ["demo", "--keep", "--dir", path, &tree];
    sheaf(&demo, &none(), closed()).succeeds();
    // The daemon was killed, and the next one says in the log what it found.
    let mut entries = fs::read_dir(dir.path()).unwrap().map(Result::unwrap);
    let is_demo = |entry: &fs::DirEntry| entry.path().join("daemon.log").exists();
    let demo = entries.find(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("sheaf-demo-") && is_demo(entry)
    });
    let log = fs::read_to_string(demo.unwrap().path().join("daemon.log")).unwrap();
    assert!(log.contains("Recovered"), "{log}");
}

pub fn child_of(parent: u32) -> Option<i32> {
    let mut entries = fs::read_dir("/proc").unwrap().map(Result::unwrap);
    entries.find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The program's name, in parentheses, may hold anything; state and parent follow.
        let of = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?;
        (of == parent.to_string()).then_some(pid)
    })
}

/// Its writers were hung up by the kill, which was taken for their end.
#[test]
fn torture_sees_a_daemon_that_answers_no_more() {
    if !can_mount() {
        return;
    }
    let dir = TempDir::new().unwrap();
    // With this seed the writers have some tenths of a second. The time limit kills the daemon as well, which is in its group.
    let mut limited = Command::new("timeout")
        .args(["--signal=KILL", "60", env!("CARGO_BIN_EXE_sheaf")])
        .args(["torture", "--kills=1", "--step-limit=3", "--seed=42"])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Once the last writer has made something there, which it begins with when all folders are durable.
    let last = dir.path().join("sheaf-torture/mnt/writer3");
    while !fs::read_dir(&last).is_ok_and(|mut made| made.next().is_some()) {
        assert!(limited.try_wait().unwrap().is_none());
    }
    let torture = child_of(limited.id()).unwrap() as u32;
    let daemon = Pid::from_raw(child_of(torture).unwrap()).unwrap();
    kill_process(daemon, Signal::STOP).unwrap();
    Ran(limited.wait_with_output().unwrap())
        .exits(UNCORRECTED)
        .says("writers hang: 0, 1, 2, 3 ended no step in 3 s");
}

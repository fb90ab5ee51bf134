//! What calls do while the daemon of a mount answers nothing.

use std::fs::{self, File};
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::untold::{can_mount, child_of};
use crate::{Array, Ran, one, sheaf};

/// A mount whose daemon is stopped, until this is dropped.
struct Stopped {
    array: Array,
    at: PathBuf,
    daemon: Pid,
}

impl Stopped {
    fn new() -> Self {
        let array = Array::made(1);
        let (at, pid) = (array.path("mnt"), array.path("pid"));
        fs::create_dir(&at).unwrap();
        let option = format!("--pid-file={}", pid.display());
        let paths = [array.images[0].clone(), at.clone()];
        sheaf(&["mount"], &[&option], &paths).succeeds();
        let daemon = fs::read_to_string(pid).unwrap().trim().parse().unwrap();
        let daemon = Pid::from_raw(daemon).unwrap();
        kill_process(daemon, Signal::STOP).unwrap();
        Stopped { array, at, daemon }
    }

    fn goes_on(&self) {
        kill_process(self.daemon, Signal::CONT).unwrap();
    }

    fn mounts_there(&self) -> usize {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let at = fs::canonicalize(self.array.dir.path()).unwrap().join("mnt");
        let at = format!(" {} ", at.display());
        table.lines().filter(|line| line.contains(&at)).count()
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.goes_on();
        while self.mounts_there() > 0 {
            sheaf(&["umount"], &[], std::slice::from_ref(&self.at)).succeeds();
        }
    }
}

/// The call, ended where it hangs.
fn limited(arguments: &[&str]) -> Command {
    let mut limited = Command::new("timeout");
    limited.args(["-s", "KILL", "30", env!("CARGO_BIN_EXE_sheaf")]);
    limited.args(arguments);
    limited
}

/// Every command looked at all that lies beside an image for the other devices of its array, and so at a mount there.
#[test]
fn a_mount_that_hangs_beside_an_image_keeps_nobody_waiting() {
    if !can_mount() {
        return;
    }
    let stopped = Stopped::new();
    let image = stopped.array.path("other.img");
    sheaf(&["mkfs"], &["--size=64M"], &one(&image)).succeeds();
    let label = limited(&["label", image.to_str().unwrap()]).output();
    drop(stopped);
    Ran(label.unwrap()).succeeds();
}

/// It waited for the daemon, and where that has its requests from rings nobody could end it.
#[test]
fn info_of_an_array_whose_daemon_is_stopped_ends() {
    if !can_mount() {
        return;
    }
    let stopped = Stopped::new();
    let image = stopped.array.images[0].to_str().unwrap();
    let text = Ran(limited(&["info", image]).output().unwrap());
    let json = Ran(limited(&["info", "--json", image]).output().unwrap());
    text.succeeds()
        .says("State         mounted\n")
        .says(&format!("(process {})", stopped.daemon.as_raw_nonzero()))
        .says("Mounted at    ");
    let state = json.succeeds().json()["state"].clone();
    assert_eq!(state["failed"], serde_json::Value::Null);
}

/// It asked all mounts whether they were of this array, though no process that had it open served any.
#[test]
fn info_of_an_array_that_somebody_else_has_open_asks_no_daemon() {
    if !can_mount() {
        return;
    }
    let stopped = Stopped::new();
    let other = Array::made(1);
    let held = File::open(&other.images[0]).unwrap();
    let info = Ran(limited(&["info", other.images[0].to_str().unwrap()])
        .output()
        .unwrap());
    drop((held, stopped));
    info.succeeds()
        .says(&format!("(process {})", std::process::id()));
}

/// The daemon mounted the array once it could, which nobody expected any more.
#[test]
fn a_mount_that_was_ended_while_it_waited_does_not_come_later() {
    if !can_mount() {
        return;
    }
    let stopped = Stopped::new();
    let other = Array::made(1);
    let mut mount = mount(&other, &stopped);
    while child_of(mount.id()).is_none() {
        assert!(mount.try_wait().unwrap().is_none());
    }
    mount.kill().unwrap();
    mount.wait().unwrap();
    stopped.goes_on();
    let mut said = String::new();
    // The daemon's end of it closes when it is ready, or ends.
    let stderr = mount.stderr.as_mut().unwrap();
    stderr.read_to_string(&mut said).unwrap();
    let mounts = stopped.mounts_there();
    drop(stopped);
    assert_eq!(mounts, 1, "{said}");
    assert!(said.contains("nothing is mounted"), "{said}");
}

/// At the same place, which the daemon looks at first.
fn mount(array: &Array, stopped: &Stopped) -> Child {
    let mut mount = Command::new(env!("CARGO_BIN_EXE_sheaf"));
    mount.arg("mount").args([&array.images[0], &stopped.at]);
    let mount = mount.stdout(Stdio::null()).stderr(Stdio::piped());
    mount.spawn().unwrap()
}

//! What `sheaf info` says of the state that an array is in.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

use ::fs::{Caller, FileSystem, FsOptions, OpenOptions, ROOT, open_devices};

use crate::untold::can_mount;
use crate::{Array, OPERATIONAL, Ran, sheaf};

fn info(array: &Array, options: &[&str]) -> Ran {
    sheaf(&["info"], options, &array.images)
}

fn state(array: &Array) -> serde_json::Value {
    info(array, &["--json"]).succeeds().json()["state"].clone()
}

pub fn open(array: &Array) -> Arc<FileSystem> {
    let devices = open_devices(&array.images, &OpenOptions::default()).unwrap();
    let devices = ::fs::Array::assemble(devices, false).unwrap();
    FileSystem::open(Arc::new(devices), FsOptions::default()).unwrap()
}

/// Nothing but a check told whether a mount had to recover, and none what it would cost.
#[test]
fn what_a_crash_left_to_replay_is_told_and_left_alone() {
    let array = Array::made(2);
    info(&array, &[]).succeeds().says("State         clean\n");
    let clean = state(&array);
    assert_eq!(clean["status"], "clean");
    assert_eq!(clean["journal"]["bytes"], 0);
    assert_eq!(clean["failed"], serde_json::Value::Null);
    let fs = open(&array);
    let (_, file) = fs
        .create(&Caller::root(), ROOT, b"file", 0o644, libc::O_RDWR)
        .unwrap();
    fs.write(&file, 0, b"synced").unwrap();
    fs.fsync(&file, false).unwrap();
    let used = state(&array);
    assert_eq!(used["status"], "in-use");
    assert_eq!(used["used_by"][0]["process"], std::process::id());
    assert_eq!(used["journal"], serde_json::Value::Null);
    info(&array, &[])
        .succeeds()
        .says("State         in use\n")
        .says(&format!("(process {})", std::process::id()));
    // As a crash leaves it.
    drop((file, fs));
    let before: Vec<Vec<u8>> = array.images.iter().map(|i| fs::read(i).unwrap()).collect();
    info(&array, &[])
        .succeeds()
        .says("State         needs recovery: the next mount replays ");
    let left = state(&array);
    assert_eq!(left["status"], "needs-recovery");
    let number = |of: &str| left["journal"][of].as_u64().unwrap();
    assert!(number("batches") >= 1 && number("records") >= 1 && number("bytes") >= 512);
    assert_eq!(left["used_by"], serde_json::json!([]));
    let after = array.images.iter().map(|i| fs::read(i).unwrap());
    assert!(after.eq(before), "it wrote");
    open(&array).close().unwrap();
    let closed = state(&array);
    assert_eq!(closed["status"], "clean");
    let numbers = |state: &serde_json::Value| state["last_checkpoint"]["number"].as_u64();
    assert!(numbers(&closed) > numbers(&left));
}

#[test]
fn damage_that_a_look_finds_is_told() {
    let array = Array::made(1);
    let image = File::options().write(true).open(&array.images[0]).unwrap();
    let last = (64 << 20) / 4096 - 1;
    let spoil = |block: u64| image.write_all_at(&[1; 4096], block * 4096).unwrap();
    spoil(last);
    info(&array, &[])
        .succeeds()
        .says("State         clean\n")
        .says("Damage        label of ")
        .says("copy 1");
    assert_eq!(state(&array)["damage"].as_array().unwrap().len(), 1);
    for block in [1, 2, last - 15 + 13, last - 15 + 14] {
        spoil(block);
    }
    info(&array, &[])
        .succeeds()
        .says("State         damaged")
        .says("no slot holds a valid record");
    assert_eq!(state(&array)["status"], "damaged");
}

#[test]
fn a_mounted_array_says_where_it_is_and_who_serves_it() {
    if !can_mount() {
        return;
    }
    let array = Array::made(2);
    let at = array.path("mnt");
    fs::create_dir(&at).unwrap();
    let mut mount = Command::new(env!("CARGO_BIN_EXE_sheaf"));
    mount.args(["mount", "-f"]).args([&array.images[0], &at]);
    let mut mount = mount.stdout(Stdio::piped()).spawn().unwrap();
    let mut said = std::io::BufReader::new(mount.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).unwrap();
    fs::write(at.join("file"), "data").unwrap();
    let text = info(&array, &[]);
    let mounted = state(&array);
    // Its daemon dies: what it had synced is in the journal.
    File::open(at.join("file")).unwrap().sync_all().unwrap();
    mount.kill().unwrap();
    mount.wait().unwrap();
    let left = state(&array);
    sheaf(&["umount"], &[], std::slice::from_ref(&at))
        .exits(OPERATIONAL)
        .says("its daemon had died");
    let at = fs::canonicalize(&at).unwrap();
    text.succeeds()
        .says("State         mounted\n")
        .says(&format!("Used by       sheaf (process {})", mount.id()))
        .says(&format!("Mounted at    {}\n", at.display()));
    assert_eq!(mounted["status"], "in-use");
    assert_eq!(mounted["used_by"][0]["process"], mount.id());
    assert_eq!(mounted["mounted_at"], serde_json::json!([at]));
    assert_eq!(mounted["failed"], false);
    let errors = mounted["device_errors"].as_object().unwrap();
    assert!(errors.len() == 2 && errors.values().all(|count| count == 0));
    assert_eq!(left["status"], "needs-recovery");
    assert!(left["journal"]["records"].as_u64().unwrap() > 0);
}

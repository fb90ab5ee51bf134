//! What cannot be done, or not as it is asked for: codes and words.

use std::fs;
use std::process::Command;

use tempfile::TempDir;

use crate::untold::can_mount;
use crate::{OPERATIONAL, Ran, USAGE, sheaf};

/// All of it was loss or damage.
#[test]
fn a_torture_that_cannot_begin_complains_of_no_loss() {
    if !can_mount() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    for (options, word) in [
        (["-o", "frobnicate"], "frobnicate"),
        (["-o", "ro"], "-o ro"),
        (["--kills", "0"], "--kills"),
        (["--seconds", "0"], "--seconds"),
    ] {
        sheaf(&["torture", path], &options, &[])
            .exits(USAGE)
            .says(word);
    }
    // The daemon says why and ends.
    let mut torture = Command::new(env!("CARGO_BIN_EXE_sheaf"));
    torture.args([
        "torture",
        path,
        "--kills",
        "1",
        "-o",
        "metrics=/none/socket",
    ]);
    let ran = Ran(torture.output().unwrap());
    let ran = ran.exits(OPERATIONAL).says("before the mount was usable");
    assert!(!ran.to_string().contains("LOSS"), "{ran}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

//! What cannot be done, or not as it is asked for: codes and words.

use std::fs;
use std::process::Command;

use tempfile::TempDir;

use crate::untold::can_mount;
use crate::{Array, OPERATIONAL, Ran, USAGE, one, sheaf};

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

/// The one JSON object that a call prints that is refused or fails.
#[track_caller]
fn failed(ran: Ran, code: i32) -> String {
    let ran = ran.exits(code);
    let failed: serde_json::Value = serde_json::from_str(&ran.output()).unwrap();
    assert_eq!(failed["exit_code"], code);
    failed["error"].as_str().unwrap().to_owned()
}

/// A program that reads what is printed read nothing.
#[test]
fn a_wrong_call_is_json_where_that_was_asked_for() {
    for (call, word) in [
        (&["fsck", "--json"][..], "required"),
        (&["fsck", "--json", "--frobnicate", "a"], "--frobnicate"),
        (&["mkfs", "--json", "--size", "much", "a"], "64M"),
        (&["rm", "--json", "-d"], "--device"),
        (&["frobnicate", "--json"], "frobnicate"),
    ] {
        let error = failed(sheaf(call, &[], &[]), USAGE);
        assert!(error.contains(word), "{error}");
        assert!(
            !error.contains("Usage:") && !error.starts_with("error"),
            "{error}"
        );
    }
    let plain = sheaf(&["fsck", "--", "--json"], &["-x"], &[]);
    assert_eq!(plain.exits(OPERATIONAL).output(), "");
}

/// It was two: the report, and then that the page could not be written.
#[test]
fn a_benchmark_whose_page_cannot_be_written_prints_one_json_object() {
    let small = ["bench", "remove", "--count", "100", "--runs", "1"];
    let rest = ["--against", "none", "--json", "--html"];
    let ran = sheaf(&small, &rest, &one("/dev/full".as_ref()));
    let error = failed(ran, OPERATIONAL);
    assert!(error.contains("/dev/full"), "{error}");
}

/// They were errors of the devices.
#[test]
fn what_the_caller_got_wrong_is_a_usage_error() {
    let array = Array::unmade(17);
    array
        .mkfs(&["--size", "64M"])
        .exits(USAGE)
        .says("1 to 16 devices, not 17");
    sheaf(&["fsck"], &[], &array.images)
        .exits(USAGE)
        .says("1 to 16 devices, not 17");
    let long = "x".repeat(65);
    let twice = [array.images[0].clone(), array.images[0].clone()];
    sheaf(&["mkfs"], &["--size", "64M"], &twice)
        .exits(USAGE)
        .says("name each device once");
    sheaf(&["mkfs"], &["--size", "64M", "-L", &long], &twice[..1])
        .exits(USAGE)
        .says("64 bytes");
    assert_eq!(fs::read_dir(array.dir.path()).unwrap().count(), 0);
    let made = Array::made(1);
    let twice = [made.images[0].clone(), made.images[0].clone()];
    for command in ["mkfs", "fsck", "info"] {
        sheaf(&[command], &[], &twice)
            .exits(USAGE)
            .says("name each device once");
    }
    // A mount told the name of the file that both lead to, twice.
    let link = made.path("link");
    std::os::unix::fs::symlink(&made.images[0], &link).unwrap();
    let words = format!("{} and {} are", made.images[0].display(), link.display());
    let named = [made.images[0].clone(), link, made.dir.path().to_owned()];
    sheaf(&["mount"], &[], &named).exits(USAGE).says(&words);
    let device = made.images[0].to_str().unwrap();
    // The range was that of the number's type, and what is more than the most was less without a word.
    for jobs in ["0", "65"] {
        sheaf(&["rm", "-j", jobs, "-r", "-d", device, "/x"], &[], &[])
            .exits(USAGE)
            .says("--jobs")
            .says("1..=64");
    }
    let cp = |paths: &[&str]| sheaf(&["cp", "-d", device], paths, &[]).exits(USAGE);
    // One side is inside, it was told, where both were.
    cp(&[":/new", ":/new2"]).says("must be on the host");
    cp(&["/new", "/new2"]).says("leading ':'");
    cp(&["/new", ":/new", ":/new2"]).says("leading ':'");
}

/// A service was started again and again for them.
#[test]
fn wrong_places_are_usage_errors() {
    let array = Array::made(1);
    let dir = array.dir.path().to_owned();
    sheaf(&["mkfs"], &[], &one(&dir))
        .exits(USAGE)
        .says("neither a block device nor a regular file");
    let paths = [array.images[0].clone(), dir.clone()];
    sheaf(&["mount"], &["-o", "remount"], &paths)
        .exits(USAGE)
        .says("unmount, then mount");
    let file = array.path("file");
    fs::write(&file, "").unwrap();
    for place in [array.path("none"), file.join("below")] {
        for command in [
            &["trim"][..],
            &["scrub"],
            &["checkpoint"],
            &["info", "--live"],
        ] {
            sheaf(command, &[], &one(&place))
                .exits(USAGE)
                .says(place.to_str().unwrap());
        }
    }
    // Other trials had been made by then.
    sheaf(
        &["bench", "reap", "--seconds", "0.001"],
        &["--device"],
        &one(&array.path("none")),
    )
    .exits(USAGE)
    .says("--device");
    let tx = [
        "bench",
        "tx",
        "--against",
        "none",
        "--dir",
        dir.to_str().unwrap(),
    ];
    sheaf(&tx, &["--sqlite"], &one(&array.path("none")))
        .exits(USAGE)
        .says("--sqlite");
}

/// It was told to make a file system on a member whose label was gone, and that was done without --force.
#[test]
fn who_names_no_device_of_sheaf_is_not_told_to_make_a_file_system_there() {
    let array = Array::made(2);
    fs::write(&array.images[0], vec![0; 64 << 20]).unwrap();
    for command in ["fsck", "info", "mount"] {
        let mut paths = one(&array.images[0]);
        if command == "mount" {
            paths.push(array.dir.path().to_owned());
        }
        sheaf(&[command], &[], &paths)
            .exits(OPERATIONAL)
            .says("is not a Sheaf device")
            .says("fsck --relabel")
            .says_not("mkfs");
    }
    sheaf(&["fsck"], &[], &array.images[1..])
        .exits(OPERATIONAL)
        .says("device 0 ")
        .says("numbered 0 to 1")
        .says("fsck --relabel");
}

/// What no mount takes measured something that there is not.
#[test]
fn benchmarks_take_no_less_memory_than_a_mount() {
    let small = ["--runs", "1", "--cache-size", "7M"];
    let fxmark = ["fxmark", "--seconds", "0.01", "--pool", "200"];
    let pool = ["pool", "--live", "30", "--pairs", "50"];
    for suite in [&fxmark[..], &pool] {
        let alone = [suite, &["--against", "none"]].concat();
        sheaf(&["bench"], &[&alone[..], &small].concat(), &[])
            .exits(USAGE)
            .says("at least 8.0 MiB");
    }
}

//! What is said tells what is the matter.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::untold::{can_mount, full};
use crate::{Array, OPERATIONAL, Ran, USAGE, sheaf, untold};

/// A message began with the name, which was empty.
#[test]
fn an_empty_name_of_a_device_is_called_that() {
    let array = Array::made(1);
    let device = array.images[0].to_str().unwrap();
    let after = format!("{device}:");
    for names in [&after, &format!(":{device}"), ":"] {
        for command in ["fsck", "info"] {
            sheaf(&[command, names], &[], &[])
                .exits(USAGE)
                .says(&format!("'{names}': an empty device name"));
        }
    }
}

/// It read as if nothing had been done.
#[test]
fn work_that_was_done_is_not_denied_when_its_report_cannot_be_written() {
    let array = Array::unmade(1);
    untold::sheaf(&["mkfs", "--size", "64M"], &array, full())
        .exits(OPERATIONAL)
        .says("standard output")
        .says("the file system is made");
    let device = array.images[0].to_str().unwrap();
    let file = array.path("file");
    fs::write(&file, "gone").unwrap();
    sheaf(
        &["cp", "-d", device, file.to_str().unwrap(), ":/"],
        &[],
        &[],
    )
    .succeeds();
    let none = Array::unmade(0);
    untold::sheaf(&["rm", "-d", device, "/file"], &none, full())
        .exits(OPERATIONAL)
        .says("1 file and 0 folders removed");
    sheaf(&["fsck"], &[], &array.images)
        .succeeds()
        .says("0 files, 1 folder, 0 symbolic links");
}

#[test]
fn trim_takes_any_folder_of_a_mount_and_a_mount_that_nobody_hears_of_says_why() {
    if !can_mount() {
        return;
    }
    let array = Array::made(1);
    let at = array.path("mnt");
    fs::create_dir(&at).unwrap();
    let mut mount = Command::new(env!("CARGO_BIN_EXE_sheaf"));
    mount.args(["mount", "-f"]).args([&array.images[0], &at]);
    mount.stdout(full()).stderr(Stdio::piped());
    let mut mount = mount.spawn().unwrap();
    let mut said = BufReader::new(mount.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("nobody hears") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0);
    }
    let inner = at.join("one/two");
    fs::create_dir_all(&inner).unwrap();
    let trim = |path: PathBuf| sheaf(&["trim"], &[], &[path]);
    // All of the file system was discarded though the path was mistyped.
    let missing = [at.join("missing"), at.join("one/missing")].map(trim);
    let trimmed = [trim(at.clone()), trim(inner)];
    let elsewhere = trim(array.dir.path().to_owned());
    sheaf(&["umount"], &[], std::slice::from_ref(&at)).succeeds();
    assert!(mount.wait().unwrap().success());
    assert!(
        line.contains("standard output") && !line.contains("Failure"),
        "{line}"
    );
    for ran in trimmed {
        ran.succeeds()
            .says(&format!("{}: ", at.display()))
            .says("discarded");
    }
    for ran in missing {
        ran.exits(USAGE).says("No such file").says("missing");
    }
    elsewhere.exits(OPERATIONAL).says("no Sheaf file system");
}

/// All free space was discarded though the range had none, and `reap=poll` was taken for what it is not.
#[test]
fn what_does_not_apply_is_said() {
    if !can_mount() {
        return;
    }
    let array = Array::made(1);
    let (at, log) = (array.path("mnt"), array.path("log"));
    fs::create_dir(&at).unwrap();
    let file = array.path("file");
    fs::write(&file, "no socket").unwrap();
    let paths = [array.images[0].clone(), at.clone()];
    let metrics = format!("metrics={}", file.display());
    sheaf(&["mount"], &["-o", &metrics], &paths)
        .exits(OPERATIONAL)
        .says("is no socket");
    let log_option = format!("--log={}", log.display());
    let options = [log_option.as_str(), "-o", "io=threads,reap=poll"];
    sheaf(&["mount"], &options, &paths).succeeds();
    let fstrim = |options: &[&str]| {
        let mut fstrim = Command::new("fstrim");
        Ran(fstrim.args(options).arg(&at).output().unwrap())
    };
    let refused = [
        fstrim(&["-l", "4095"]),
        fstrim(&["-o", "64M"]),
        fstrim(&["-o", "1T", "-l", "1G"]),
    ];
    let taken = [fstrim(&[]), fstrim(&["-l", "4096"])];
    let size = rustix::fs::statvfs(&at).unwrap();
    let size = (size.f_blocks * size.f_frsize) as usize;
    let trim = |options: &[&str]| {
        let ran = sheaf(&["trim", "--json"], options, std::slice::from_ref(&at));
        ran.succeeds().json()["discarded"].as_u64().unwrap()
    };
    let all = trim(&[]);
    let piece = 5 << 20;
    let pieces: u64 = (0..size)
        .step_by(piece)
        .map(|start| trim(&["-o", &start.to_string(), "-l", "5M"]))
        .sum();
    let in_part = trim(&["-o", "1", "-l", "8191"]);
    let in_long_runs = trim(&["-m", "4P"]);
    let said = fstrim(&["-v", "-o", "20M", "-l", "8M"]);
    let same = trim(&["-o", "20M", "-l", "8M"]);
    let beyond = sheaf(&["trim", "-o", "1T"], &[], std::slice::from_ref(&at));
    sheaf(&["umount"], &[], std::slice::from_ref(&at)).succeeds();
    for ran in refused {
        ran.exits(1).says("Invalid argument");
    }
    for ran in taken {
        ran.succeeds();
    }
    assert!(all > (size as u64) / 2 && all < size as u64);
    assert_eq!(pieces, all);
    assert_eq!((in_part, in_long_runs), (4096, 0));
    assert!(same > 4 << 20 && same <= 8 << 20);
    said.succeeds().says(&format!("({same} bytes) trimmed"));
    beyond.exits(USAGE).says("behind the end");
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("reap=poll does not apply"), "{log}");
}

/// The label of a device that lost it is another option's affair.
#[test]
fn help_of_fsck_names_the_option_that_writes_a_lost_label() {
    let help = sheaf(&["fsck", "--help"], &[], &[]).succeeds();
    help.says("gets its label again by --relabel");
}

/// Options that the help has and the manual does not.
#[test]
fn the_table_of_mount_options_has_all_that_help_names() {
    let help = sheaf(&["mount", "--help"], &[], &[]).succeeds().output();
    let (_, options) = help.split_once("Options separated by commas: ").unwrap();
    let (options, _) = options.split_once(" (to wait").unwrap();
    let mut outside = String::new();
    for part in options.split('(') {
        outside += part.rsplit(')').next().unwrap();
    }
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    let readme = fs::read_to_string(readme).unwrap();
    let mut named = 0;
    for option in outside.split(',') {
        let name = option.trim().split('=').next().unwrap();
        assert!(readme.contains(&format!("`{name}")), "{name}");
        named += 1;
    }
    assert!(named > 25, "{outside}");
    let help = sheaf(&["bench", "array", "--help"], &[], &[]).succeeds();
    help.says("up to 16").says("1 to 16");
}

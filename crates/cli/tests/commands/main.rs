//! The program as users call it, here without a mount.

mod copied;
mod daemons;
mod damaged;
mod hanging;
mod helpers;
mod interrupted;
mod labels;
mod limits;
mod measured;
mod named;
mod outdated;
mod refused;
mod renamed;
mod repair;
mod said;
mod spared;
mod sparse;
mod states;
mod unmounted;
mod untold;

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

const UNCORRECTED: i32 = 4;
const CORRECTED: i32 = 1;
const OPERATIONAL: i32 = 8;
const USAGE: i32 = 16;

/// Image files in a folder of their own.
struct Array {
    dir: TempDir,
    images: Vec<PathBuf>,
}

impl Array {
    /// Names for `count` images that do not exist.
    fn unmade(count: usize) -> Self {
        let dir = TempDir::new().unwrap();
        let images = (0..count)
            .map(|i| dir.path().join(format!("device{i}.img")))
            .collect();
        Array { dir, images }
    }

    fn made(count: usize) -> Self {
        let array = Array::unmade(count);
        array.mkfs(&["--size", "64M", "--label", "test"]).succeeds();
        array
    }

    fn mkfs(&self, options: &[&str]) -> Ran {
        sheaf(&["mkfs"], options, &self.images)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// What a call did.
struct Ran(Output);

impl Ran {
    fn exits(self, code: i32) -> Self {
        assert_eq!(self.0.status.code(), Some(code), "{self}");
        self
    }

    fn succeeds(self) -> Self {
        self.exits(0)
    }

    fn says(self, words: &str) -> Self {
        assert!(self.to_string().contains(words), "no '{words}' in: {self}");
        self
    }

    fn says_not(self, words: &str) -> Self {
        assert!(!self.to_string().contains(words), "'{words}' in: {self}");
        self
    }

    fn output(&self) -> String {
        String::from_utf8(self.0.stdout.clone()).unwrap()
    }

    fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.0.stdout).unwrap()
    }
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        write!(f, "{}{}", text(&self.0.stdout), text(&self.0.stderr))
    }
}

fn sheaf(command: &[&str], options: &[&str], paths: &[PathBuf]) -> Ran {
    let output = Command::new(env!("CARGO_BIN_EXE_sheaf"))
        .args(command)
        .args(options)
        .args(paths)
        .output()
        .unwrap();
    Ran(output)
}

fn one(path: &Path) -> Vec<PathBuf> {
    vec![path.to_owned()]
}

#[test]
fn mkfs_refuses_what_holds_something() {
    let array = Array::made(2);
    array.mkfs(&[]).exits(OPERATIONAL).says("--force");
    array.mkfs(&["--force"]).succeeds();
}

#[test]
fn mkfs_refuses_an_image_file_with_data_that_nobody_knows() {
    let array = Array::unmade(2);
    let image = fs::File::create(&array.images[0]).unwrap();
    image.set_len(64 << 20).unwrap();
    image
        .write_at(b"the end of a backup", (64 << 20) - 20)
        .unwrap();
    array
        .mkfs(&["--size", "64M"])
        .exits(OPERATIONAL)
        .says("data of an unknown kind")
        .says("--force");
    // It made the other one, which had been there for nobody.
    assert!(!array.images[1].exists());
    array.mkfs(&["--size", "64M", "--force"]).succeeds();
}

#[test]
fn failures_are_json_where_that_was_asked_for() {
    let array = Array::made(1);
    let failed = array.mkfs(&["--json"]).exits(OPERATIONAL);
    let failed: serde_json::Value = serde_json::from_str(&failed.output()).unwrap();
    assert_eq!(failed["exit_code"], OPERATIONAL);
    assert!(failed["error"].as_str().unwrap().contains("--force"));
}

#[test]
fn mkfs_asks_for_a_size_and_leaves_no_image_behind_when_it_fails() {
    let array = Array::unmade(2);
    array.mkfs(&[]).exits(USAGE).says("--size");
    for small in ["1", "8K", "16M"] {
        array.mkfs(&["--size", small]).exits(USAGE).says("--size");
    }
    let elsewhere = [array.images[0].clone(), array.path("none/image")];
    sheaf(&["mkfs"], &["--size", "64M"], &elsewhere).exits(OPERATIONAL);
    assert_eq!(fs::read_dir(array.dir.path()).unwrap().count(), 0);
    array.mkfs(&["--size", "much"]).exits(USAGE).says("64M");
}

/// What it held was looked at first, when its user might still change that.
#[test]
fn mkfs_looks_at_what_it_has_claimed() {
    let array = Array::made(2);
    let user = fs::File::open(&array.images[1]).unwrap();
    user.lock().unwrap();
    for force in [&[][..], &["--force"]] {
        let images = [array.path("new"), array.images[1].clone()];
        let options = [&["--size", "64M"][..], force].concat();
        sheaf(&["mkfs"], &options, &images)
            .exits(OPERATIONAL)
            .says("in use");
        assert!(!array.path("new").exists());
    }
    user.unlock().unwrap();
    sheaf(&["fsck"], &[], &array.images).succeeds();
}

/// One removed the images that the other had made its file system on.
#[test]
fn of_two_mkfs_at_once_none_takes_the_images_away_from_the_other() {
    let array = Array::unmade(2);
    let mut made = 0;
    for _ in 0..20 {
        let start = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_sheaf"));
            command.args(["mkfs", "--size", "64M"]).args(&array.images);
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let both = [start(), start()].map(|child| Ran(child.wait_with_output().unwrap()));
        let succeeded = both.iter().filter(|ran| ran.0.status.success()).count();
        assert!(succeeded < 2, "{} {}", both[0], both[1]);
        made += succeeded;
        if succeeded == 1 {
            sheaf(&["fsck"], &[], &array.images).succeeds();
        }
        for image in array.images.iter().filter(|image| image.exists()) {
            fs::remove_file(image).unwrap();
        }
    }
    assert!(made > 0);
}

#[test]
fn mkfs_says_that_a_link_leads_nowhere() {
    let array = Array::unmade(1);
    symlink(array.path("gone"), &array.images[0]).unwrap();
    for size in [&[][..], &["--size", "64M"]] {
        array
            .mkfs(size)
            .exits(OPERATIONAL)
            .says("symbolic link to")
            .says("gone");
    }
    assert!(array.images[0].is_symlink());
}

/// A line break in a name made two lines of what udev is told.
#[test]
fn mkfs_takes_no_control_characters_in_a_name() {
    let array = Array::unmade(1);
    for name in ["two\nlines", "\u{7f}", "\u{85}"] {
        array
            .mkfs(&["--size", "64M", "--label", name])
            .exits(USAGE)
            .says("control characters");
    }
    assert!(!array.images[0].exists());
    array
        .mkfs(&["--size", "64M", "--label", "café \"x\""])
        .succeeds();
}

#[test]
fn mkfs_names_the_option_that_no_array_is_made_with() {
    let array = Array::unmade(2);
    for (option, value) in [
        ("--stripe-unit", "3K"),
        ("--stripe-unit", "32M"),
        ("--journal-size", "1M"),
        ("--journal-size", "1G"),
    ] {
        array
            .mkfs(&["--size", "64M", option, value])
            .exits(USAGE)
            .says(option);
    }
    assert_eq!(fs::read_dir(array.dir.path()).unwrap().count(), 0);
}

#[test]
fn one_device_finds_its_companions_and_a_missing_one_is_named() {
    let array = Array::made(3);
    let found = sheaf(&["info", "--json"], &[], &one(&array.images[1])).succeeds();
    let info: serde_json::Value = serde_json::from_str(&found.output()).unwrap();
    assert_eq!(info["label"], "test");
    assert_eq!(info["devices"].as_array().unwrap().len(), 3);
    let elsewhere = array.path("away");
    fs::create_dir(&elsewhere).unwrap();
    fs::rename(&array.images[2], elsewhere.join("image")).unwrap();
    sheaf(&["fsck"], &[], &one(&array.images[0]))
        .exits(OPERATIONAL)
        .says("missing");
}

/// The copy took the image's place unasked if its name came first, and what was written to one of both was lost.
#[test]
fn one_device_takes_no_copy_of_another_for_its_companion() {
    let array = Array::made(3);
    let copy = array.path("device2.bak");
    fs::copy(&array.images[2], &copy).unwrap();
    for command in ["fsck", "info"] {
        sheaf(&[command], &[], &one(&array.images[0]))
            .exits(OPERATIONAL)
            .says("device2.bak")
            .says("device2.img")
            .says("one by one");
    }
    sheaf(&["fsck"], &[], &array.images).succeeds();
    sheaf(&["fsck"], &[], &one(&array.images[2])).succeeds();
    // A second name of the same file is no copy.
    fs::remove_file(&copy).unwrap();
    fs::hard_link(&array.images[2], &copy).unwrap();
    sheaf(&["fsck"], &[], &one(&array.images[0])).succeeds();
}

#[test]
fn files_go_in_and_come_out() {
    let array = Array::made(2);
    let tree = array.path("tree");
    fs::create_dir_all(tree.join("inner")).unwrap();
    fs::write(tree.join("inner/large"), vec![7; 3_000_001]).unwrap();
    fs::write(tree.join("small"), "small").unwrap();
    symlink("small", tree.join("link")).unwrap();
    let device = array.images[0].to_str().unwrap();
    let cp = |from: &str, to: &str| sheaf(&["cp", "-r", "-d", device, from, to], &[], &[]);
    cp(tree.to_str().unwrap(), ":/").succeeds();
    let out = array.path("out");
    cp(":/tree", out.to_str().unwrap()).succeeds();
    assert_eq!(
        fs::read(out.join("inner/large")).unwrap(),
        vec![7; 3_000_001]
    );
    assert_eq!(fs::read_link(out.join("link")).unwrap(), Path::new("small"));
    let cat = sheaf(&["cat", "-d", device, "/tree/link"], &[], &[]).succeeds();
    assert_eq!(cat.output(), "small");
    // The same path as cp writes it.
    let cat = sheaf(&["cat", "-d", device, ":/tree/small"], &[], &[]).succeeds();
    assert_eq!(cat.output(), "small");
    for root in [":", ":/", "/"] {
        sheaf(&["ls", "-d", device, root], &[], &[])
            .succeeds()
            .says("tree");
    }
    sheaf(&["ls", "-lR", "-d", device], &[], &[])
        .succeeds()
        .says("link -> small")
        .says("3000001");
    sheaf(&["cat", "-d", device, "/tree/none"], &[], &[])
        .exits(OPERATIONAL)
        .says("/tree/none: no such file");
    let rm = |options: &[&str]| sheaf(&[&["rm", "-d", device], options].concat(), &[], &[]);
    rm(&["/tree"]).exits(OPERATIONAL).says("give --recursive");
    rm(&["/"]).exits(USAGE).says("root folder");
    rm(&["/tree/small"])
        .succeeds()
        .says("1 file and 0 folders removed");
    rm(&["--json", "-r", "/tree"])
        .succeeds()
        .says("\"files\": 2")
        .says("\"directories\": 2");
    rm(&["-r", "/tree"])
        .exits(OPERATIONAL)
        .says("/tree: no such file");
    sheaf(&["fsck"], &[], &array.images)
        .succeeds()
        .says("no errors");
}

#[test]
fn copies_go_through_no_link_and_are_as_private_as_the_original() {
    let array = Array::made(1);
    let device = array.images[0].to_str().unwrap();
    let cp = |paths: &[&str]| sheaf(&["cp", "-r", "-d", device], paths, &[]);
    let (one, two) = (array.path("one/x"), array.path("two/x"));
    let victim = array.path("victim");
    for folder in [&one, &two, &victim] {
        fs::create_dir_all(folder).unwrap();
    }
    // What is a link in the first is a folder, and a file, in the second.
    symlink(&victim, one.join("folder")).unwrap();
    symlink(victim.join("file"), one.join("file")).unwrap();
    fs::create_dir(two.join("folder")).unwrap();
    fs::write(two.join("folder/inner"), "inner").unwrap();
    fs::write(two.join("file"), "secret").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let set = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    set(&two.join("folder"), 0o500);
    set(&two.join("file"), 0o640);
    let (one, two) = (one.parent().unwrap(), two.parent().unwrap());
    cp(&[one.to_str().unwrap(), two.to_str().unwrap(), ":/"]).succeeds();
    let out = array.path("out");
    fs::create_dir(&out).unwrap();
    let out_text = out.to_str().unwrap();
    cp(&[":/one/x", out_text]).succeeds();
    for name in ["folder", "file"] {
        cp(&[":/two/x", out_text])
            .exits(OPERATIONAL)
            .says("symbolic link");
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
        fs::remove_file(out.join("x").join(name)).unwrap();
    }
    cp(&[":/two/x", out_text]).succeeds();
    assert_eq!(fs::read(out.join("x/file")).unwrap(), b"secret");
    let out = array.path("out again");
    cp(&[":/two/x", out.to_str().unwrap()]).succeeds();
    assert_eq!(mode(&out.join("folder")), 0o500);
    assert_eq!(mode(&out.join("file")), 0o640);
    assert_eq!(fs::read(out.join("folder/inner")).unwrap(), b"inner");
}

#[test]
fn fsck_repairs_a_label_from_its_second_copy() {
    let array = Array::made(2);
    let mut bytes = fs::read(&array.images[1]).unwrap();
    bytes[100] ^= 0x55;
    fs::write(&array.images[1], &bytes).unwrap();
    sheaf(&["fsck"], &[], &array.images)
        .succeeds()
        .says("label");
    sheaf(&["fsck", "--repair"], &[], &array.images)
        .exits(CORRECTED)
        .says("repaired");
    let again = sheaf(&["fsck", "--json"], &[], &array.images).succeeds();
    let report: serde_json::Value = serde_json::from_str(&again.output()).unwrap();
    assert_eq!(report["findings"].as_array().unwrap().len(), 0);
}

#[test]
fn fsck_reports_an_array_whose_checkpoints_are_gone() {
    let array = Array::made(1);
    let mut bytes = fs::read(&array.images[0]).unwrap();
    let (head, tail) = (64 << 10, bytes.len() - (64 << 10));
    bytes[4096..head].fill(0xa5);
    bytes[tail..].fill(0xa5);
    fs::write(&array.images[0], &bytes).unwrap();
    sheaf(&["fsck"], &[], &array.images)
        .exits(UNCORRECTED)
        .says("fatal");
    let damaged = fs::read(&array.images[0]).unwrap();
    // To fsck(8), 8 would be no verdict on the file system.
    sheaf(&["fsck", "--quick"], &[], &array.images)
        .exits(UNCORRECTED)
        .says("--repair");
    // It looked, said nothing, and repaired nothing.
    sheaf(&["fsck", "--quick", "--repair"], &[], &array.images).exits(USAGE);
    sheaf(&["fsck", "--preen"], &[], &array.images)
        .exits(UNCORRECTED)
        .says("NOT REPAIRED");
    sheaf(&["fsck", "--repair", "-n"], &[], &array.images)
        .exits(UNCORRECTED)
        .says("would be")
        .says("without `-n`");
    assert!(fs::read(&array.images[0]).unwrap() == damaged);
    sheaf(&["fsck", "--repair"], &[], &array.images)
        .exits(CORRECTED)
        .says("all errors corrected");
    sheaf(&["fsck"], &[], &array.images)
        .succeeds()
        .says("no errors");
}

#[test]
fn documents_come_from_the_definitions() {
    let dir = TempDir::new().unwrap();
    sheaf(&["man", "--dir"], &[], &one(dir.path())).succeeds();
    let mkfs = fs::read_to_string(dir.path().join("sheaf-mkfs.8")).unwrap();
    assert!(mkfs.contains("stripe"), "{mkfs}");
    assert!(dir.path().join("mount.sheaf.8").exists());
    for shell in ["bash", "zsh", "fish"] {
        sheaf(&["completions", shell], &[], &[])
            .succeeds()
            .says("mkfs");
    }
}

#[test]
fn a_benchmark_reports_what_the_contract_says() {
    let dir = TempDir::new().unwrap();
    let page = dir.path().join("report.html");
    let path = dir.path().to_str().unwrap();
    let options = [
        "--json",
        "--runs",
        "1",
        "--seconds",
        "0.01",
        "--pool",
        "200",
        "--threads",
        "1",
        "--workload",
        "mwcl,DRBH",
        "--against",
        path,
        "--dir",
        path,
        "--html",
    ];
    let ran = sheaf(&["bench", "fxmark"], &options, &one(&page)).succeeds();
    let report: serde_json::Value = serde_json::from_str(&ran.output()).unwrap();
    assert_eq!(report["suite"], "fxmark");
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[0]["name"], "MWCL");
    assert_eq!(rows[0]["target"], "sheaf");
    assert_eq!(rows[1]["target"], path);
    assert!(fs::read_to_string(&page).unwrap().contains("<svg"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// Before anything is measured: a window of it would take an hour.
#[test]
fn a_report_that_cannot_be_written_is_refused_at_once_and_none_is_left_of_a_run_that_fails() {
    let dir = TempDir::new().unwrap();
    let fxmark = |options: &[&str], page: &Path| {
        let common = ["--against", "none", "--threads", "1", "--html"];
        sheaf(
            &["bench", "fxmark"],
            &[options, &common].concat(),
            &one(page),
        )
    };
    let hour = ["--seconds", "3600", "--pool", "100000000"];
    fxmark(&hour, &dir.path().join("none/report.html"))
        .exits(OPERATIONAL)
        .says("--html");
    let page = dir.path().join("report.html");
    fxmark(&["--runs", "0"], &page).exits(USAGE);
    assert!(!page.exists());
    fs::write(&page, "an earlier one").unwrap();
    fxmark(&["--runs", "0"], &page).exits(USAGE);
    assert_eq!(fs::read(&page).unwrap(), b"an earlier one");
}

/// Suites that need no mount when they have nobody to compare with.
#[test]
fn suites_in_process_report_what_the_contract_says() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    let small: [(&str, &[&str], &str); 4] = [
        ("pool", &["--live", "30,60", "--pairs", "50"], "pairs/s"),
        ("remove", &["--count", "1000"], "files/s"),
        (
            "ior",
            &[
                "--size",
                "4M",
                "--devices",
                "2",
                "--seconds",
                "0.01",
                "--cache-size",
                "64M",
                "--request",
                "512",
            ],
            "requests/s",
        ),
        (
            "written",
            &["--cache-size", "24M", "--per-folder", "1000"],
            "bytes/file",
        ),
    ];
    for (suite, options, unit) in small {
        let common = ["--json", "--runs", "1", "--against", "none", "--dir", path];
        let options = [&common[..], options].concat();
        let ran = sheaf(&["bench", suite], &options, &[]).succeeds();
        let report: serde_json::Value = serde_json::from_str(&ran.output()).unwrap();
        assert_eq!(report["suite"], suite);
        let row = &report["rows"][0];
        assert_eq!(
            (row["target"].as_str(), row["unit"].as_str()),
            (Some("sheaf"), Some(unit))
        );
        assert!(row["median"].as_f64() > Some(0.0), "{row}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn policies_of_waiting_are_measured_beside_each_other() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    let options = ["step", "disk", "--json", "--runs", "1", "--seconds", "0.01"];
    let ran = sheaf(
        &["bench", "reap"],
        &[&options[..], &["--dir", path]].concat(),
        &[],
    );
    let ran = ran.succeeds();
    let report: serde_json::Value = serde_json::from_str(&ran.output()).unwrap();
    assert_eq!(report["suite"], "reap");
    let rows = report["rows"].as_array().unwrap();
    for policy in ["interrupt", "poll", "lazy"] {
        assert!(rows.iter().any(|row| row["target"] == policy), "{policy}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// On files, and on devices of the process itself: neither needs a loop device.
#[test]
fn an_array_is_measured_beside_its_devices() {
    let dir = TempDir::new().unwrap();
    let page = dir.path().join("report.html");
    let path = dir.path().to_str().unwrap();
    for (storage, raw) in [
        (["--dir", path], "raw-io_uring"),
        (["--latency", "500"], "raw-queue"),
    ] {
        let common = ["--json", "--runs", "1", "--seconds", "0.01", "--depth", "2"];
        let rest = [
            "--devices",
            "1,2",
            "--size",
            "64M",
            "--cache-size",
            "32M",
            "--html",
        ];
        let options = [&common[..], &storage, &rest].concat();
        let ran = sheaf(&["bench", "array"], &options, &one(&page)).succeeds();
        let report: serde_json::Value = serde_json::from_str(&ran.output()).unwrap();
        assert_eq!(report["suite"], "array");
        let row = &report["rows"][0];
        assert_eq!(
            (row["name"].as_str(), row["target"].as_str()),
            (Some("random read"), Some(raw))
        );
        assert!(row["median"].as_f64() > Some(0.0), "{row}");
        assert!(!report["checks"].as_array().unwrap().is_empty());
        let notes = report["notes"].to_string();
        assert!(notes.contains("file systems of the kernel are left out"));
        assert!(
            fs::read_to_string(&page)
                .unwrap()
                .contains("Throughput by devices")
        );
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn benchmarks_refuse_what_makes_no_sense() {
    let fxmark = |options: &[&str]| sheaf(&["bench", "fxmark", "--against", "none"], options, &[]);
    fxmark(&["--workload", "MWXX"]).exits(USAGE).says("MWCL");
    fxmark(&["--threads", "0"]).exits(USAGE);
    fxmark(&["--seconds", "-1"])
        .exits(USAGE)
        .says("no number of seconds");
    fxmark(&["--pool", "1"]).exits(USAGE);
    fxmark(&["--operations", "0"]).exits(USAGE);
    sheaf(&["bench", "fxmark", "--against", "fat"], &[], &[])
        .exits(USAGE)
        .says("f2fs");
    let refused = |suite: &str, options: &[&str]| {
        let alone = [&["--against", "none"][..], options].concat();
        sheaf(&["bench", suite], &alone, &[]).exits(USAGE);
    };
    refused("pool", &["--live", "1"]);
    refused("remove", &["--count", "0"]);
    refused("written", &["--checkpoints", "2"]);
    refused("list", &["--count", "0"]);
    refused("checkpoint", &["--workers", "0"]);
    sheaf(&["bench", "recovery", "--files", "1"], &[], &[]).exits(USAGE);
    sheaf(&["bench", "fsync", "--depth", "4"], &[], &[]).exits(USAGE);
    sheaf(&["bench", "array", "--depth", "0"], &[], &[])
        .exits(USAGE)
        .says("--depth");
    sheaf(&["bench", "array", "--loop"], &[], &[]).exits(USAGE);
    sheaf(&["bench", "array", "--reap", "never"], &[], &[])
        .exits(USAGE)
        .says("lazy");
    sheaf(&["bench", "reap", "disk"], &[], &[])
        .exits(USAGE)
        .says("--dir");
    sheaf(&["bench", "reap", "device"], &[], &[])
        .exits(USAGE)
        .says("--device");
    sheaf(&["bench", "reap", "--overwrite"], &[], &[]).exits(USAGE);
    refused("ior", &["--request", "256"]);
    refused("tx", &["--shape", "2/4"]);
    refused("tx", &["--shape", "2"]);
    for (suite, why) in [
        ("tx", "durable"),
        ("fsync", "durable"),
        ("checkpoint", "durable"),
        ("written", "no device"),
        ("array", "no device"),
    ] {
        sheaf(&["bench", suite, "--against", "tmpfs"], &[], &[])
            .exits(USAGE)
            .says(why);
    }
    sheaf(&["bench", "files", "--against", "sheaf-mount"], &[], &[])
        .exits(USAGE)
        .says("f2fs");
    sheaf(&["bench", "ior", "--way", "mmap"], &[], &[])
        .exits(USAGE)
        .says("direct");
    sheaf(&["bench"], &[], &[]).exits(USAGE);
}

/// A suite that takes what another refuses says so, and the other does not.
#[test]
fn help_says_what_a_suite_compares_with() {
    let help = |suite: &str| {
        let ran = sheaf(&["bench", suite, "--help"], &[], &[]).succeeds();
        let words: Vec<String> = ran.output().split_whitespace().map(str::to_owned).collect();
        words.join(" ")
    };
    let any = help("fxmark");
    assert!(
        any.contains("tmpfs, sheaf-mount, paths of folders; or none"),
        "{any}"
    );
    for suite in ["files", "list", "remove", "pool", "cache"] {
        let help = help(suite);
        assert!(help.contains("btrfs-raid0, tmpfs; or none"), "{help}");
        assert!(!help.contains("sheaf-mount"), "{help}");
    }
    for suite in [
        "fsync",
        "mtime",
        "varmail",
        "tx",
        "ior",
        "array",
        "checkpoint",
    ] {
        let help = help(suite);
        assert!(help.contains("btrfs-raid0; or none"), "{help}");
        assert!(!help.contains("tmpfs"), "{help}");
    }
    let none_of_btrfs = help("written");
    assert!(
        none_of_btrfs.contains("xfs, f2fs; or none"),
        "{none_of_btrfs}"
    );
    assert!(!none_of_btrfs.contains("btrfs"), "{none_of_btrfs}");
}

#[test]
fn what_is_not_mounted_is_neither_scrubbed_nor_trimmed() {
    let dir = TempDir::new().unwrap();
    sheaf(&["trim"], &[], &one(dir.path()))
        .exits(OPERATIONAL)
        .says("no Sheaf file system is mounted");
    sheaf(&["scrub"], &[], &one(dir.path()))
        .exits(OPERATIONAL)
        .says("no Sheaf file system is mounted");
    sheaf(&["scrub"], &["--rate", "fast"], &one(dir.path())).exits(USAGE);
    sheaf(&["scrub"], &["--rate", "0"], &one(dir.path()))
        .exits(USAGE)
        .says("64K or more");
}

#[test]
fn wrong_calls_are_usage_errors() {
    sheaf(&["frobnicate"], &[], &[]).exits(USAGE);
    sheaf(&["mount", "only-one"], &[], &[]).exits(USAGE);
    sheaf(&["mount", "-o", "cache_size=1P", "a", "b"], &[], &[])
        .exits(USAGE)
        .says("of memory");
    sheaf(&["mount", "--cache-size", "1P", "a", "b"], &[], &[])
        .exits(USAGE)
        .says("of memory");
    sheaf(&["mount", "-o", "frobnicate", "a", "b"], &[], &[])
        .exits(USAGE)
        .says("frobnicate");
    sheaf(
        &["torture", "x", "--seconds", "1", "--kills", "1"],
        &[],
        &[],
    )
    .exits(USAGE);
    sheaf(&["--help"], &[], &[]).succeeds().says("mkfs");
}

#[test]
fn what_begins_as_a_uuid_and_is_none_is_named_as_that() {
    let none = [PathBuf::from("UUID=12-34")];
    sheaf(&["info"], &[], &none)
        .exits(USAGE)
        .says("as UUID=01234567-89ab-");
    let unknown = [PathBuf::from("UUID=01234567-89ab-cdef-0123-456789abcdef")];
    sheaf(&["info"], &[], &unknown)
        .exits(OPERATIONAL)
        .says("no block device carries");
}

#[test]
fn a_list_of_devices_that_nobody_may_read_says_so() {
    let mut asked = Command::new(env!("CARGO_BIN_EXE_sheaf"));
    asked.arg("info").uid(65534).gid(65534);
    // Not root: there is nobody else to be. Nor is there always a device that is not for all, or a way to this program.
    let Ok(output) = asked.output() else { return };
    let is_secret = |entry: fs::DirEntry| {
        let device = Path::new("/dev").join(entry.file_name());
        fs::metadata(device).is_ok_and(|of| of.mode() & 0o007 == 0 && of.uid() != 65534)
    };
    let mut devices = fs::read_dir("/sys/class/block").into_iter().flatten();
    if devices.any(|entry| entry.is_ok_and(is_secret)) {
        Ran(output).exits(OPERATIONAL).says("Permission denied");
    }
}

#[test]
fn a_mount_whose_pid_file_cannot_be_written_does_not_happen() {
    let array = Array::made(1);
    let at = array.path("mnt");
    fs::create_dir(&at).unwrap();
    let paths = [array.images[0].clone(), at.clone()];
    // No folder to write it in, and a folder in its place.
    for (pid_file, code) in [(array.path("none/pid"), OPERATIONAL), (at, USAGE)] {
        let option = format!("--pid-file={}", pid_file.display());
        sheaf(&["mount"], &[&option], &paths)
            .exits(code)
            .says("the pid file");
    }
    // Nobody serves it.
    sheaf(&["fsck"], &[], &array.images).succeeds();
}

/// mkfs had wiped the devices before it, and the others had written to them; whoever opened it was told of its first
/// write, which failed.
#[test]
fn nothing_is_written_where_one_device_takes_no_writes() {
    let array = Array::unmade(3);
    for image in &array.images {
        fs::File::create(image).unwrap().set_len(64 << 20).unwrap();
    }
    let attach = |image| {
        let image = fs::File::options().read(true).write(true).open(image);
        base::sys::attach_loop(&image.unwrap())
    };
    let attached: io::Result<Vec<_>> = array.images.iter().map(attach).collect();
    let Ok(attached) = attached else {
        return base::skip("loop devices");
    };
    let devices: Vec<PathBuf> = attached.iter().map(|(device, _)| device.clone()).collect();
    sheaf(&["mkfs"], &["--label", "kept"], &devices).succeeds();
    let file = array.path("file");
    fs::write(&file, b"kept").unwrap();
    let set_writable = |device: &Path, option: &str| {
        let done = Command::new("blockdev").arg(option).arg(device).status();
        assert!(done.unwrap().success());
    };
    let on = |command: &str, rest: &[&str]| {
        let first = devices[0].to_str().unwrap();
        sheaf(&[command], &[&["-d", first], rest].concat(), &[])
    };
    on("cp", &[file.to_str().unwrap(), ":/file"]).succeeds();
    let contents = || array.images.iter().map(|i| fs::read(i).unwrap());
    let before: Vec<Vec<u8>> = contents().collect();
    let mountpoint = array.path("mnt");
    fs::create_dir(&mountpoint).unwrap();
    for protected in &devices {
        set_writable(protected, "--setro");
        for ran in [
            sheaf(&["mkfs"], &["--force"], &devices),
            sheaf(&["fsck"], &["-y"], &devices),
            sheaf(&["fsck"], &["-p"], &devices),
            on("cp", &[file.to_str().unwrap(), ":/other"]),
            on("rm", &[":/file"]),
        ] {
            ran.exits(OPERATIONAL)
                .says(&format!("{}: cannot open", protected.display()))
                .says("blockdev --setrw")
                .says_not("-o ro");
        }
        sheaf(&["mount"], &[], &[devices[0].clone(), mountpoint.clone()])
            .exits(OPERATIONAL)
            .says(&format!("{}: cannot open", protected.display()))
            .says("-o ro");
        assert!(contents().eq(before.iter().cloned()));
        sheaf(&["fsck"], &[], &devices).succeeds();
        sheaf(&["fsck"], &["-n"], &devices).succeeds();
        sheaf(&["fsck"], &["-y", "-n"], &devices).succeeds();
        sheaf(&["info"], &[], &devices).succeeds().says("kept");
        on("ls", &[]).succeeds().says("file");
        on("cat", &[":/file"]).succeeds().says("kept");
        set_writable(protected, "--setrw");
    }
    on("rm", &[":/file"]).succeeds();
}

/// It was told to use a device with smaller blocks: direct I/O on a tmpfs takes, as far as anybody knows, 4,096 bytes.
#[test]
fn images_are_used_where_direct_io_takes_larger_blocks_than_where_they_were_made() {
    let Ok(elsewhere) = TempDir::new_in("/dev/shm") else {
        return base::skip("/dev/shm");
    };
    let array = Array::made(2);
    let file = array.path("file");
    fs::write(&file, b"moved").unwrap();
    let cp = |images: &[PathBuf], options: [&str; 2]| {
        let first = format!("{}:{}", images[0].display(), images[1].display());
        sheaf(&["cp", "-d", &first], &options, &[]).succeeds();
    };
    cp(&array.images, [file.to_str().unwrap(), ":/file"]);
    // All of them, and one of them.
    for moved in [0, 1] {
        let mut images = array.images.clone();
        for image in &mut images[moved..] {
            let to = elsewhere.path().join(image.file_name().unwrap());
            fs::copy(&*image, &to).unwrap();
            *image = to;
        }
        sheaf(&["info"], &[], &images).succeeds().says("test");
        sheaf(&["fsck"], &[], &images).succeeds();
        let back = array.path("back");
        cp(&images, [":/file", back.to_str().unwrap()]);
        assert_eq!(fs::read(&back).unwrap(), b"moved");
        cp(&images, [file.to_str().unwrap(), ":/more"]);
        sheaf(&["fsck"], &[], &images).succeeds().says("2 files");
    }
}

//! Damage as users meet it: what commands say of it, and what scripts can tell by exit codes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use crate::Ran;
use crate::untold::can_mount;

const CORRECTED: i32 = 1;
const UNCORRECTED: i32 = 4;
const OPERATIONAL: i32 = 8;

const DEVICE: u64 = 64 << 20;

fn sheaf(arguments: &[&str], paths: &[PathBuf]) -> Ran {
    crate::sheaf(arguments, &[], paths)
}

/// Two image files in a folder of their own.
struct Array {
    dir: TempDir,
    images: Vec<PathBuf>,
}

impl Array {
    fn made() -> Self {
        let dir = TempDir::new().unwrap();
        let images: Vec<PathBuf> = ["a", "b"].map(|name| dir.path().join(name)).into();
        sheaf(&["mkfs", "--quiet", "--size", "64M"], &images).exits(0);
        Array { dir, images }
    }

    fn mount(&self, options: &[&str]) -> Ran {
        let output = Command::new(env!("CARGO_BIN_EXE_sheaf"))
            .arg("mount")
            .args(options)
            .args(&self.images)
            .arg(self.mountpoint())
            .output();
        Ran(output.unwrap())
    }

    fn mountpoint(&self) -> PathBuf {
        let mountpoint = self.dir.path().join("mnt");
        fs::create_dir_all(&mountpoint).unwrap();
        mountpoint
    }

    fn damage(&self, index: usize, at: u64, bytes: &[u8]) {
        let image = File::options().write(true).open(&self.images[index]);
        image.unwrap().write_all_at(bytes, at).unwrap();
    }

    fn fsck(&self, options: &[&str]) -> Ran {
        sheaf(&[&["fsck"], options].concat(), &self.images)
    }
}

/// A script that asked first did nothing: it was told "no errors", and exit code 0.
#[test]
fn a_dry_run_tells_that_there_is_something_to_repair() {
    let array = Array::made();
    for dry in [&["--repair", "-n"], &["--preen", "-n"]] {
        array.fsck(dry).exits(0).says("no errors");
    }
    // The other copy serves: nothing is wrong with the file system.
    array.damage(1, 100, &[0x55]);
    array.fsck(&[]).exits(0).says("no errors");
    for dry in [&["--repair", "-n"], &["--preen", "-n"]] {
        array
            .fsck(dry)
            .exits(UNCORRECTED)
            .says("would be repaired")
            .says("TO BE REPAIRED")
            .says_not("no errors");
    }
    let told = array.fsck(&["--repair", "-n", "--json"]).exits(UNCORRECTED);
    let report: serde_json::Value = serde_json::from_slice(&told.0.stdout).unwrap();
    assert_eq!(
        (&report["exit_code"], &report["repaired"]),
        (&4.into(), &false.into())
    );
    array.fsck(&["--repair"]).exits(CORRECTED);
    array.fsck(&["--repair", "-n"]).exits(0).says("no errors");
}

/// "checkpoint: no slot holds a valid record", and not a word of what to do.
#[test]
fn damage_that_keeps_it_from_opening_is_told_with_a_remedy() {
    let array = Array::made();
    // Both slots, and their copies.
    array.damage(0, 4096, &[0xa5; 2 * 4096]);
    array.damage(1, DEVICE - 3 * 4096, &[0xa5; 2 * 4096]);
    let a = array.images[0].to_str().unwrap();
    let list = || sheaf(&["ls", "-d", a], &[]);
    for told in [array.mount(&[]), array.mount(&["-o", "ro"]), list()] {
        let told = told.exits(OPERATIONAL).says("checkpoint");
        let images: Vec<_> = array.images.iter().map(|i| i.to_str().unwrap()).collect();
        told.says(&format!("`sheaf fsck {}`", images.join(" ")))
            .says("`sheaf fsck --repair -n ");
    }
}

impl Array {
    /// Scrubs the mount, and ends it whatever came of that. What was said, and the log.
    fn scrubbed(&self, damage: impl FnOnce()) -> (Ran, String) {
        let (log, state) = (self.dir.path().join("log"), self.dir.path().join("state"));
        let log_option = ["--log", log.to_str().unwrap(), "-o", "checkpoint=3600"];
        self.mount(&log_option).exits(0);
        damage();
        let state = ["scrub", "--state", state.to_str().unwrap()];
        let said = sheaf(&state, &[self.mountpoint()]);
        sheaf(&["umount"], &[self.mountpoint()]).exits(0);
        (said, fs::read_to_string(log).unwrap())
    }
}

/// It was an error in the log, and whoever watches that was alarmed, though the command said "no errors".
#[test]
fn a_notice_of_a_scrub_is_no_error_in_the_log() {
    if !can_mount() {
        return;
    }
    let array = Array::made();
    let (said, log) = array.scrubbed(|| array.damage(1, 100, &[0x55]));
    said.exits(0).says("notice: label of device 1");
    assert!(log.contains("WARN scrub: label of device 1"), "{log}");
    assert!(!log.contains("ERROR"), "{log}");
}

/// The advice was to look for an inode by its number, whatever the node was.
#[test]
fn a_scrub_says_what_names_the_files_of_damaged_nodes() {
    if !can_mount() {
        return;
    }
    let array = Array::made();
    let (text, a) = (array.dir.path().join("text"), array.images[0].clone());
    let content = b"the content that will be damaged";
    fs::write(&text, content).unwrap();
    let cp = [
        "cp",
        "-d",
        a.to_str().unwrap(),
        text.to_str().unwrap(),
        ":/",
    ];
    sheaf(&cp, &[]).exits(0);
    let damage = || {
        let mut hits = 0;
        for (index, image) in array.images.iter().enumerate() {
            let bytes = fs::read(image).unwrap();
            let found = bytes.windows(content.len()).enumerate();
            for (at, _) in found.filter(|(_, window)| window == content) {
                array.damage(index, at as u64, b"THE");
                hits += 1;
            }
        }
        assert!(hits > 0);
    };
    let (said, log) = array.scrubbed(damage);
    said.exits(UNCORRECTED)
        .says("error: node ")
        .says("`sheaf fsck`, which names the files concerned by path")
        .says("or a part of one, which has no name");
    assert!(log.contains("ERROR scrub: node "), "{log}");
}

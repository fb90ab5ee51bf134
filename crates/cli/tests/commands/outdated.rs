//! A device that was put back to an old copy: what is said of it, and who accepts its old state.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::{Array, CORRECTED, OPERATIONAL, Ran, UNCORRECTED, sheaf};

/// Two images of which the second is as it was before the last files came.
struct PutBack {
    array: Array,
    /// The second as it was at last.
    latest: std::path::PathBuf,
}

impl PutBack {
    fn new() -> Self {
        let array = Array::made(2);
        let (old, latest) = (array.path("away/old"), array.path("away/latest"));
        fs::create_dir(array.path("away")).unwrap();
        copy_in(&array, "first");
        fs::copy(&array.images[1], &old).unwrap();
        copy_in(&array, "second");
        copy_in(&array, "third");
        fs::rename(&array.images[1], &latest).unwrap();
        fs::rename(&old, &array.images[1]).unwrap();
        PutBack { array, latest }
    }

    fn fsck(&self, options: &[&str]) -> Ran {
        sheaf(&["fsck"], options, &self.array.images)
    }

    /// The program under the name by which fsck(8) calls it.
    fn helper(&self, options: &[&str]) -> Ran {
        let helper = self.array.path("fsck.sheaf");
        if !helper.is_symlink() {
            symlink(env!("CARGO_BIN_EXE_sheaf"), &helper).unwrap();
        }
        let mut command = Command::new(helper);
        Ran(command
            .args(options)
            .args(&self.array.images)
            .output()
            .unwrap())
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        let images = self.array.images.iter();
        images.map(|image| fs::read(image).unwrap()).collect()
    }
}

fn copy_in(array: &Array, name: &str) {
    let file = array.path("away").join(name);
    fs::write(&file, vec![7; 300_000]).unwrap();
    let device = array.images[0].to_str().unwrap();
    let file = file.to_str().unwrap();
    sheaf(&["cp", "-d", device, file, ":/"], &[], &[]).succeeds();
}

const REMEDY: &str = "ttach the latest state of each device";

/// The last line recommended the step that loses what the latest state has, below a count of no files.
#[test]
fn the_remedy_of_an_old_copy_is_the_latest_state_and_not_a_repair() {
    let array = PutBack::new();
    let before = array.bytes();
    for ran in [
        array.fsck(&[]),
        array.fsck(&["--preen"]),
        array.fsck(&["--quick"]),
        array.helper(&["-a"]),
        array.helper(&["-f", "-p"]),
    ] {
        let ran = ran.exits(UNCORRECTED).says(REMEDY);
        let ran = ran.says_not("corrects what can be corrected");
        ran.says_not("0 files");
    }
    let said = array.fsck(&[]).output();
    let last = said.lines().last().unwrap();
    let only = "`sheaf fsck --repair` only if that is gone";
    assert!(last.contains(REMEDY) && last.ends_with(only), "{said}");
    let report = array.fsck(&["--json"]).exits(UNCORRECTED).json();
    for count in [
        "files",
        "folders",
        "names",
        "nodes",
        "data_size",
        "metadata_size",
        "unmounted_cleanly",
    ] {
        assert!(report[count].is_null(), "{count} in {report}");
    }
    let at = array.array.path("mnt");
    fs::create_dir(&at).unwrap();
    let paths = [&array.array.images[..], &[at]].concat();
    sheaf(&["mount"], &[], &paths)
        .exits(OPERATIONAL)
        .says(REMEDY)
        .says_not("the file system is damaged");
    assert!(array.bytes() == before, "it wrote");
    // As the advice says.
    fs::rename(&array.latest, &array.array.images[1]).unwrap();
    array.fsck(&[]).succeeds().says("3 files");
}

/// Unattended, with `fsck.repair=yes` say, it was accepted, and the latest state was worth nothing any more.
#[test]
fn fsck_8_accepts_no_old_copy_and_who_asks_for_a_repair_by_name_does() {
    let array = PutBack::new();
    let before = array.bytes();
    for options in [&["-y"][..], &["-fy"], &["-a", "-y"], &["-y", "-n"]] {
        array
            .helper(options)
            .exits(UNCORRECTED)
            .says("NOT REPAIRED")
            .says(REMEDY);
    }
    let dry = array.fsck(&["--repair", "-n"]).exits(UNCORRECTED);
    dry.says("would be LOST").says(REMEDY);
    assert!(array.bytes() == before, "it wrote");
    array.fsck(&["--repair"]).exits(CORRECTED).says("LOST");
    array.fsck(&[]).succeeds();
    // What loses nothing of another device is still repaired unattended.
    let image = Path::new(&array.array.images[1]);
    let mut bytes = fs::read(image).unwrap();
    bytes[100] ^= 0x55;
    fs::write(image, bytes).unwrap();
    array.helper(&["-y"]).exits(CORRECTED);
}

/// Of the labels alone nobody asked where there was no checkpoint record: it was accepted unattended.
#[test]
fn without_any_checkpoint_record_an_old_copy_is_told_by_the_labels() {
    let array = PutBack::new();
    for image in &array.array.images {
        let image = File::options().write(true).open(image).unwrap();
        let blocks = image.metadata().unwrap().len() / 4096;
        for block in [1, 2, blocks - 16 + 13, blocks - 16 + 14] {
            image.write_all_at(&[0x5a; 4096], block * 4096).unwrap();
        }
    }
    let before = array.bytes();
    for options in [&["-y"][..], &["-p"], &["-a", "-y"]] {
        array.helper(options).exits(UNCORRECTED).says(REMEDY);
    }
    assert!(array.bytes() == before, "it wrote");
    array.fsck(&["--repair"]).exits(CORRECTED).says("LOST");
    array.fsck(&[]).succeeds();
}

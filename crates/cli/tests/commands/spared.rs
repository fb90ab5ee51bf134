//! What is a device of an array is never taken for a file that a command writes beside its work.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::untold::can_mount;
use crate::{Array, USAGE, sheaf};

/// Takes away what should not have been mounted.
struct NotMounted(PathBuf);

impl Drop for NotMounted {
    fn drop(&mut self) {
        sheaf(&["umount"], &[], std::slice::from_ref(&self.0));
    }
}

/// An array of two devices, the first under three names.
fn named() -> (Array, [PathBuf; 3]) {
    let array = Array::made(2);
    let [link, hard] = ["link", "hard"].map(|name| array.path(name));
    symlink(&array.images[0], &link).unwrap();
    fs::hard_link(&array.images[0], &hard).unwrap();
    let names = [array.images[0].clone(), link, hard];
    fs::create_dir(array.path("mnt")).unwrap();
    (array, names)
}

fn contents(array: &Array) -> Vec<Vec<u8>> {
    let read = |image: &PathBuf| fs::read(image).unwrap();
    array.images.iter().map(read).collect()
}

/// The pid file took its place, and went with the mount. A log was appended to it.
#[test]
fn a_device_that_comes_in_place_of_a_forgotten_value_stays_as_it_is() {
    let (array, names) = named();
    let at = array.path("mnt");
    let _guard = NotMounted(at.clone());
    let before = contents(&array);
    for option in ["--pid-file", "--log"] {
        for name in &names {
            let paths = [name.clone(), array.images[1].clone(), at.clone()];
            for mount in [&["mount"][..], &["mount", "--foreground"]] {
                sheaf(mount, &[option], &paths)
                    .exits(USAGE)
                    .says(option)
                    .says(name.to_str().unwrap())
                    .says("this is a device of")
                    .says("forgotten");
            }
        }
        assert!(contents(&array) == before, "{option}");
    }
}

/// A label that is lost can be written again: nothing else is written over the rest meanwhile.
#[test]
fn a_device_without_a_label_is_no_log() {
    let array = Array::made(1);
    let image = &array.images[0];
    let empty = vec![0; fs::read(image).unwrap().len()];
    fs::write(image, empty).unwrap();
    let before = contents(&array);
    let log = format!("--log={}", image.display());
    sheaf(&["mount"], &[&log], &[image.clone(), array.path("mnt")])
        .exits(USAGE)
        .says("a device of the file system");
    assert!(contents(&array) == before);
}

#[test]
fn no_file_of_the_users_becomes_a_pid_file() {
    let array = Array::made(1);
    let at = array.path("mnt");
    fs::create_dir(&at).unwrap();
    let _guard = NotMounted(at.clone());
    let [letter, long] = ["letter", "long"].map(|name| array.path(name));
    fs::write(&letter, "12 apples").unwrap();
    fs::write(&long, "1".repeat(21)).unwrap();
    let paths = [array.images[0].clone(), at];
    for users in [&letter, &long, Path::new("/dev/null")] {
        let before = fs::metadata(users).unwrap().len();
        let option = format!("--pid-file={}", users.display());
        sheaf(&["mount"], &[&option], &paths)
            .exits(USAGE)
            .says(users.to_str().unwrap())
            .says("name another file");
        assert_eq!(fs::metadata(users).unwrap().len(), before);
    }
    if !can_mount() {
        return;
    }
    // What an earlier daemon has left is.
    let pid = array.path("pid");
    for left in ["", "4194304\n"] {
        fs::write(&pid, left).unwrap();
        let option = format!("--pid-file={}", pid.display());
        sheaf(&["mount"], &[&option], &paths).succeeds();
        sheaf(&["umount"], &[], &paths[1..]).succeeds();
        assert!(!pid.exists());
    }
}

/// All of it was cut off for the page.
#[test]
fn a_page_takes_no_place_of_a_device() {
    let (array, names) = named();
    let before = contents(&array);
    let small = ["bench", "remove", "--count", "100", "--runs", "1"];
    for name in &names {
        let rest = ["--against", "none", "--html"];
        sheaf(&small, &rest, std::slice::from_ref(name))
            .exits(USAGE)
            .says("--html");
    }
    assert!(contents(&array) == before);
}

/// Its first bytes were the first message.
#[test]
fn a_block_device_is_no_log() {
    let array = Array::unmade(1);
    fs::write(&array.images[0], vec![0; 1 << 20]).unwrap();
    let image = fs::File::options()
        .read(true)
        .write(true)
        .open(&array.images[0]);
    let Ok((device, _open)) = base::sys::attach_loop(&image.unwrap()) else {
        return base::skip("loop devices");
    };
    let made = Array::made(1);
    let log = format!("--log={}", device.display());
    sheaf(
        &["mount"],
        &[&log],
        &[made.images[0].clone(), made.path("mnt")],
    )
    .exits(USAGE)
    .says("a block device");
    assert_eq!(fs::read(&array.images[0]).unwrap(), vec![0; 1 << 20]);
}

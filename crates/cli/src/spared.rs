//! Files that a command writes beside its work (a log, a pid file, a page) are named by the user, who may have forgotten a value: `--pid-file a.img b.img M`.
//!
//! Nothing that is a device of an array, or may be one, is written to or replaced as such a file.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::slice;

use device::Occupied;

use crate::devices;
use crate::failure::Failure;
use crate::output::shown;

/// Fails if `option` names a block device, or what has a label of Sheaf. What is not there is neither.
pub fn check(option: &str, path: &Path) -> Result<(), Failure> {
    let Ok(meta) = fs::metadata(path) else {
        return Ok(());
    };
    if meta.file_type().is_block_device() {
        return Err(refused(option, path, "a block device"));
    }
    if meta.is_file() && has_label(path) {
        return Err(refused(option, path, "a device of a Sheaf file system"));
    }
    Ok(())
}

/// Fails if `option` names one of these devices, by whatever name, or what one of them lies on. Of those that are not there nothing is said.
pub fn check_beside(option: &str, path: &Path, devices: &[PathBuf]) -> Result<(), Failure> {
    let Ok(meta) = fs::metadata(path) else {
        return Ok(());
    };
    for device in devices {
        let is_it = Occupied::by(slice::from_ref(device)).is_ok_and(|device| device.has(&meta));
        if is_it {
            let what = format!("{}, a device of the file system", shown(device));
            return Err(refused(option, path, &what));
        }
    }
    Ok(())
}

/// The same of devices as they are given, before it is known which belong to them.
pub fn check_beside_given(option: &str, path: &Path, given: &[PathBuf]) -> Result<(), Failure> {
    let devices: Vec<PathBuf> = given.iter().flat_map(|spec| devices::split(spec)).collect();
    check_beside(option, path, &devices)
}

/// In the first block, or in the last one where the first is damaged.
fn has_label(path: &Path) -> bool {
    device::probe(path) == Some("sheaf") || !device::scan(None, &[path.to_owned()]).is_empty()
}

fn refused(option: &str, path: &Path, what: &str) -> Failure {
    Failure::usage(format!(
        "{option} {}: this is {what}, and stays as it is: name a file for {option}, whose value may have been forgotten",
        shown(path)
    ))
}

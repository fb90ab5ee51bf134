//! Asking the daemon of a mount to discard its free space.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use crate::{Error, mount_table, sys};

/// Has the Sheaf file system mounted at `mountpoint` discard its free space; returns the bytes
/// discarded. Needs root. What else is mounted there is left alone. Space whose freeing is not durable yet is made durable first.
pub fn trim(mountpoint: &Path) -> Result<u64, Error> {
    let failed = |error| Error::Trim {
        mountpoint: mountpoint.to_owned(),
        error,
    };
    let resolved = mount_table::resolve(mountpoint).map_err(failed)?;
    let found = mount_table::find(&resolved).map_err(failed)?;
    if !found.is_some_and(|found| found.is_sheaf()) {
        return Err(Error::NotMounted(resolved));
    }
    let root = File::open(mountpoint).map_err(failed)?;
    sys::ioctl_trim(root.as_fd()).map_err(failed)
}

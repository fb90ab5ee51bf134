//! Asking the daemon of a mount to discard its free space.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use crate::{Error, sys};

/// Has the file system mounted at `mountpoint` discard its free space; returns the bytes
/// discarded. Needs root. Space whose freeing is not durable yet is made durable first.
pub fn trim(mountpoint: &Path) -> Result<u64, Error> {
    let failed = |error| Error::Trim {
        mountpoint: mountpoint.to_owned(),
        error,
    };
    let root = File::open(mountpoint).map_err(failed)?;
    sys::ioctl_trim(root.as_fd()).map_err(failed)
}

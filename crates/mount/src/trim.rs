//! Asking the daemon of a mount to discard its free space.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use crate::{Error, mount_table, sys};

/// Has the Sheaf file system mounted at `mountpoint`, or that this is in, discard its free space; returns the bytes
/// discarded. Needs root. What else is mounted there is left alone. Space whose freeing is not durable yet is made durable first.
pub fn trim(mountpoint: &Path) -> Result<u64, Error> {
    let failed = |error| Error::Trim {
        mountpoint: mountpoint.to_owned(),
        error,
    };
    let resolved = mount_table::resolve(mountpoint).map_err(failed)?;
    let root = root_of(&resolved).map_err(failed)?;
    let Some(root) = root else {
        return Err(Error::NotMounted(resolved));
    };
    let root = File::open(root).map_err(failed)?;
    sys::ioctl_trim(root.as_fd()).map_err(failed)
}

/// Where the Sheaf file system is mounted that `path` is in; none if it is in another one.
fn root_of(path: &Path) -> std::io::Result<Option<&Path>> {
    for above in path.ancestors() {
        if let Some(found) = mount_table::find(above)? {
            return Ok(found.is_sheaf().then_some(above));
        }
    }
    Ok(None)
}

//! Asking the daemon of a mount to discard its free space.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::{Error, mount_table, sys};

/// Which free space is discarded, in bytes of the linear address space that is as long as the file system is large: the chunks in their order, each of
/// which is striped over devices. Only whole blocks in there count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimRange {
    pub start: u64,
    pub len: u64,
    /// Shorter runs, as far as they are in the range, are left alone.
    pub least: u64,
}

impl Default for TrimRange {
    /// All of it.
    fn default() -> TrimRange {
        TrimRange {
            start: 0,
            len: u64::MAX,
            least: 0,
        }
    }
}

/// Has the Sheaf file system that is mounted at `root` discard its free space in a range; returns the bytes discarded. Needs root. Freeing
/// that is not durable yet is made durable first.
///
/// # Errors
/// [`Error::NotMounted`] where the name leads past the mount: what is mounted over the root folder is not what is found there.
pub fn trim(root: &Path, range: TrimRange) -> Result<u64, Error> {
    let failed = |error| failed(root, error);
    let file = File::open(root).map_err(failed)?;
    let device = file.metadata().map_err(failed)?.dev();
    let mounted = mount_table::find(root).map_err(failed)?;
    if !mounted.is_some_and(|mount| mount.is_sheaf() && mount.is_of_device(device)) {
        return Err(Error::NotMounted(root.to_owned()));
    }
    let range = [range.start, range.len, range.least];
    sys::ioctl_trim(file.as_fd(), range).map_err(failed)
}

/// Where the Sheaf file system is mounted that `path`, which must be there, is in. What else is mounted there is not looked through.
pub fn root_of(path: &Path) -> Result<PathBuf, Error> {
    let failed = |error| failed(path, error);
    let resolved = mount_table::resolve(path).map_err(failed)?;
    for above in resolved.ancestors() {
        let Some(found) = mount_table::find(above).map_err(failed)? else {
            continue;
        };
        if !found.is_sheaf() {
            break;
        }
        // A mount point is there though its daemon be dead; of what is said to be below only the file system knows.
        if above != resolved {
            std::fs::symlink_metadata(&resolved).map_err(failed)?;
        }
        return Ok(above.to_owned());
    }
    std::fs::symlink_metadata(&resolved).map_err(failed)?;
    Err(Error::NotMounted(resolved))
}

fn failed(mountpoint: &Path, error: std::io::Error) -> Error {
    Error::Trim {
        mountpoint: mountpoint.to_owned(),
        error,
    }
}

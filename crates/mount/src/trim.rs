//! Asking the daemon of a mount to discard its free space.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

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

/// Has the Sheaf file system mounted at `mountpoint`, or that this is in, discard its free space in a range; returns the bytes
/// discarded. Needs root. What else is mounted there is left alone. Space whose freeing is not durable yet is made durable first.
pub fn trim(mountpoint: &Path, range: TrimRange) -> Result<u64, Error> {
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
    let range = [range.start, range.len, range.least];
    sys::ioctl_trim(root.as_fd(), range).map_err(failed)
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

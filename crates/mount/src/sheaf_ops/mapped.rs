//! What programs have stored through mappings, and the kernel alone has.
//!
//! The kernel asks where data and holes are without writing such pages back first. So who may have stored any is a file that somebody has open for reading and
//! writing: a mapping keeps its handle. The kernel writes back what it drops.
//!
//! What a program stores behind the end of the file, in its last page, becomes content when the file grows: the kernel does not clear it, and here it
//! comes as any other bytes.

use super::{SheafOps, ino};
use crate::notify::Pages;
use crate::ops::{Errno, NodeId, Result};

impl SheafOps {
    /// Brings what the kernel alone has of a file here. False: it may still have some.
    pub(super) fn write_back_mapped(&self, pages: Pages, node: NodeId) -> bool {
        let Some(notifier) = self.notifier.get() else {
            return true;
        };
        if !self.fs.may_be_mapped(ino(node)) || self.atomic.of(node).is_some() {
            // What an atomic write has staged is nobody's data yet, wherever it lies.
            return true;
        }
        notifier.drop_pages_and_wait(pages)
    }
}

/// `SEEK_DATA` and `SEEK_HOLE` in a file of which nothing is known but its size.
pub(super) fn all_is_data(size: u64, offset: u64, whence: i32) -> Result<u64> {
    match whence {
        libc::SEEK_DATA | libc::SEEK_HOLE if offset >= size => Err(Errno(libc::ENXIO)),
        libc::SEEK_DATA => Ok(offset),
        libc::SEEK_HOLE => Ok(size),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_nothing_is_known_all_is_data_up_to_the_end() {
        assert_eq!(all_is_data(10, 3, libc::SEEK_DATA).unwrap(), 3);
        assert_eq!(all_is_data(10, 3, libc::SEEK_HOLE).unwrap(), 10);
        for whence in [libc::SEEK_DATA, libc::SEEK_HOLE] {
            assert_eq!(all_is_data(10, 10, whence).unwrap_err().0, libc::ENXIO);
        }
        assert_eq!(
            all_is_data(10, 3, libc::SEEK_SET).unwrap_err().0,
            libc::EINVAL
        );
    }
}

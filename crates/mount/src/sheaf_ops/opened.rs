//! Files that programs have open, and what they opened them with.
//!
//! What the kernel does itself because of such a flag is left out where the file is opened here, and kept beside it: the kernel does not do it for every call.

use std::sync::Arc;

use fs::{Attr, OpenFile};

use super::{FsResult, SheafOps, errno};
use crate::abi::fopen;
use crate::ops::{Entry, Errno, NodeId, Opened, Result};

/// Open flags that the kernel has dealt with before it sends a read or write. `O_APPEND`
/// comes as an offset, and the handle of a write from a mapping is any writable one;
/// `O_SYNC` comes as an fsync after the write.
pub(super) const KERNEL_FLAGS: i32 =
    libc::O_APPEND | libc::O_TRUNC | libc::O_CREAT | libc::O_EXCL | libc::O_SYNC;

/// An open file, and what the program opened it with.
#[derive(Clone)]
pub(super) struct Handle {
    pub file: Arc<OpenFile>,
    pub flags: i32,
}

impl SheafOps {
    pub(super) fn handle(&self, node: NodeId, handle: u64) -> Result<Handle> {
        self.handles
            .get(handle)
            .filter(|handle| handle.file.ino().0 == node)
            .ok_or(Errno(libc::EBADF))
    }

    pub(super) fn file(&self, node: NodeId, handle: u64) -> Result<Arc<OpenFile>> {
        Ok(self.handle(node, handle)?.file)
    }

    /// A file that was opened with these flags.
    pub(super) fn opened(&self, file: Arc<OpenFile>, flags: i32) -> Opened {
        let node = file.ino().0;
        self.direct.opened(node, flags);
        let mut answer = fopen::KEEP_CACHE;
        if !self.atomic.needs_flush(node, file.flags()) {
            answer |= fopen::NOFLUSH;
        }
        Opened {
            handle: self.handles.insert(Handle { file, flags }),
            flags: answer,
        }
    }

    pub(super) fn created(
        &self,
        parent: NodeId,
        created: FsResult<(Attr, Arc<OpenFile>)>,
        flags: i32,
    ) -> Result<(Entry, Opened)> {
        let (attr, file) = created.map_err(errno)?;
        self.directory_changed(parent)?;
        self.fs.ref_inode(attr.ino);
        Ok((self.entry(&attr), self.opened(file, flags)))
    }

    /// A file was changed by a call after which the kernel asks for no fsync where these flags ask for one, as it does after a write that its program waits for.
    pub(super) fn make_durable(&self, file: &OpenFile, flags: i32) -> Result<()> {
        let is_whole = self.sync || flags & libc::O_SYNC == libc::O_SYNC;
        if !is_whole && flags & libc::O_DSYNC == 0 {
            return Ok(());
        }
        self.fs.fsync(file, !is_whole).map_err(errno)
    }
}

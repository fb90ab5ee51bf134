//! Asynchronous direct writes (libaio, io_uring), after which the kernel does not do what it does after others.
//!
//! It drops the pages and attributes that a direct write changes when it begins. If the program waits in that very call, it does so once more at the end, and asks for an fsync where the file or the write is
//! synchronous (`O_DSYNC`, `RWF_DSYNC`); else it does neither, and nothing tells which one it is. What was cached in between would stay: old to whoever reads or maps the file, and one store to
//! such a page would bring all of it back. And who was told that a write is durable would lose it with the power. Hence of each direct write that may be one (`ASYNC_DIO`):
//!
//! 1. Between making it and answering it the kernel is told to drop the file's attributes, and has dropped those of its pages that it may have.
//! 2. What matters was cached after the write began, so since its handle was opened. As long as nothing has filled the page cache with that file since, there are none: programs
//!    that know nothing but direct transfers pay for attributes only.
//! 3. What fills the page cache is noted before it is looked at here, and a write looks for that note after it is made: a read that saw the file as it was before is seen by the write.
//! 4. A handle may become direct when it is open (`F_SETFL`). The kernel may have anything of what is written through one that was not opened so, whoever else has the file open for direct transfers.
//! 5. Pages that are dropped may be locked until other requests are answered: an answer that waits for that holds no worker that those need ([`drop_written`](crate::ops::Operations::drop_written)).
//!    Of more than 128 at a time some are answered before, and so is one that has waited for 5 s. Rings cannot leave an answer to others, and have no such writes.
//! 6. One that is stopped in the middle goes on with the rest, and so meets what stopped it: of an answer that says how far it came the kernel makes `EIO`, on a full disk too.
//! 7. One that is to be durable is, before it is answered. It counts among the requests that wait for a flush (`flushes.rs`).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use base::map::HashMap;
use base::sync::{Mutex, rank};
use fs::OpenFile;

use super::{SheafOps, errno};
use crate::atomic::Pending;
use crate::ops::{Errno, NodeId, Result, Span};

/// The files that somebody has open for direct transfers.
#[derive(Debug)]
pub(super) struct DirectFiles {
    /// The kernel may send asynchronous writes.
    is_asynchronous: AtomicBool,
    /// So many there are: all that others look at.
    count: AtomicUsize,
    files: Mutex<HashMap<NodeId, DirectFile>>,
}

#[derive(Debug, Default)]
struct DirectFile {
    handles: usize,
    /// The kernel's page cache has been filled with some of it since the first of these.
    is_cached: bool,
}

impl Default for DirectFiles {
    fn default() -> Self {
        DirectFiles {
            is_asynchronous: AtomicBool::new(false),
            count: AtomicUsize::new(0),
            files: Mutex::new(rank::LEAF, HashMap::default()),
        }
    }
}

impl DirectFiles {
    /// Before any request comes.
    pub fn agreed(&self, is_asynchronous: bool) {
        self.is_asynchronous
            .store(is_asynchronous, Ordering::SeqCst);
    }

    pub fn opened(&self, node: NodeId, flags: i32) {
        if is_direct(flags) {
            let mut files = self.files.lock();
            files.entry(node).or_default().handles += 1;
            self.count.store(files.len(), Ordering::SeqCst);
        }
    }

    pub fn closed(&self, node: NodeId, flags: i32) {
        if is_direct(flags) {
            let mut files = self.files.lock();
            if let Some(file) = files.get_mut(&node) {
                file.handles -= 1;
                if file.handles == 0 {
                    files.remove(&node);
                }
            }
            self.count.store(files.len(), Ordering::SeqCst);
        }
    }

    /// The kernel's page cache is about to have some of a file.
    pub fn cached(&self, node: NodeId) {
        if self.count.load(Ordering::SeqCst) > 0
            && let Some(file) = self.files.lock().get_mut(&node)
        {
            file.is_cached = true;
        }
    }

    /// Asked when a write is made through a handle that was opened with these flags.
    pub fn may_be_cached(&self, node: NodeId, flags: i32) -> bool {
        if !is_direct(flags) {
            return true;
        }
        let files = self.files.lock();
        files.get(&node).is_none_or(|file| file.is_cached)
    }

    /// Whether a write may be one that its program does not wait for.
    pub fn is_asynchronous(&self, span: &Span) -> bool {
        !span.from_page_cache
            && is_direct(span.open_flags as i32)
            && self.is_asynchronous.load(Ordering::SeqCst)
    }
}

fn is_direct(flags: i32) -> bool {
    flags & libc::O_DIRECT != 0
}

impl SheafOps {
    /// Returns the bytes written: of a write that may be asynchronous all.
    pub(super) fn write_file(&self, file: &OpenFile, span: &Span, data: &[u8]) -> Result<usize> {
        let is_asynchronous = self.direct.is_asynchronous(span);
        let mut done = 0;
        loop {
            let offset = span.offset.saturating_add(done as u64);
            let rest = Span { offset, ..*span };
            let written = self.atomic.write(&self.fs, file, &rest, &data[done..]);
            let written = written?.map_err(errno)?;
            done += written;
            if !is_asynchronous || written == 0 || done >= data.len() {
                return Ok(done);
            }
        }
    }

    /// A write was made, and is not answered.
    pub(super) fn written_past(&self, node: NodeId, span: &Span) {
        if self.direct.is_asynchronous(span) {
            self.attributes_changed(node);
        }
    }

    /// Refuses a size that may be nobody's wish. After a direct write beyond the end of the file that fails the kernel sets the size that it knows, and nothing tells that from an
    /// ftruncate(2). Who sets another one by such a handle has the kernel ask for attributes first, or uses truncate(2).
    ///
    /// # Errors
    /// `EBUSY`
    pub(super) fn refuse_misled(
        &self,
        node: NodeId,
        handle: Option<u64>,
        pending: Option<&Pending>,
    ) -> Result<()> {
        let handle = handle.and_then(|handle| self.handles.get(handle));
        let writes_past = handle.is_some_and(|handle| is_direct(handle.flags));
        match writes_past && !self.atomic.knows_size(&self.fs, node, pending) {
            true => Err(Errno(libc::EBUSY)),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_looked_for_once_something_has_filled_the_page_cache() {
        const DIRECT: i32 = libc::O_DIRECT | libc::O_RDWR;
        let files = DirectFiles::default();
        assert!(files.may_be_cached(1, DIRECT), "nobody has opened it so");
        files.cached(1);
        files.opened(1, DIRECT);
        files.opened(1, libc::O_RDWR);
        assert!(!files.may_be_cached(1, DIRECT), "before it was opened");
        files.cached(2);
        assert!(!files.may_be_cached(1, DIRECT), "another one");
        files.cached(1);
        files.opened(1, DIRECT);
        assert!(files.may_be_cached(1, DIRECT));
        files.closed(1, DIRECT);
        files.closed(1, libc::O_RDWR);
        assert!(files.may_be_cached(1, DIRECT), "one is open still");
        files.closed(1, DIRECT);
        files.opened(1, DIRECT);
        assert!(!files.may_be_cached(1, DIRECT));
        files.closed(1, DIRECT);
        assert_eq!(files.count.load(Ordering::SeqCst), 0);
    }

    /// Its write was on its way when somebody read the file, and when another one opened it for direct transfers: nobody looked for that page any more.
    #[test]
    fn a_handle_that_became_direct_has_pages_looked_for_whoever_else_is_direct() {
        const DIRECT: i32 = libc::O_DIRECT | libc::O_RDWR;
        let files = DirectFiles::default();
        files.opened(1, libc::O_RDWR);
        files.cached(1);
        files.opened(1, DIRECT);
        assert!(files.may_be_cached(1, libc::O_RDWR));
        assert!(!files.may_be_cached(1, DIRECT));
    }
}

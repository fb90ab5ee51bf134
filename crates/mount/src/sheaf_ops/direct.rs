//! Direct writes whose pages the kernel may have read back before they were made.
//!
//! The kernel drops the pages and attributes that a direct write changes when it begins. If the program waits in that very call, it does so once more at the end; of an asynchronous one
//! (libaio, io_uring) it does not, and nothing tells which one it is. What was cached in between would stay: old to whoever reads or maps the file, and one store to
//! such a page would bring all of it back. Hence
//!
//! 1. Between making a direct write and answering it the kernel is told to drop the file's attributes, and those of its pages if it may have any.
//! 2. What matters was cached after the write began, so since its handle was opened. As long as nothing has filled the page cache with that file since, there are none: programs
//!    that know nothing but direct transfers pay for attributes only.
//! 3. What fills the page cache is noted before it is looked at here, and a write looks for that note after it is made: a read that saw the file as it was before is seen by the write.
//! 4. A handle may become direct when it is open. Of a file that was opened for direct transfers by nobody the kernel may have anything.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use base::map::HashMap;
use base::sync::{Mutex, rank};

use super::SheafOps;
use crate::notify::Pages;
use crate::ops::{NodeId, Span};

/// The files that somebody has open for direct transfers.
#[derive(Debug)]
pub(super) struct DirectFiles {
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
            count: AtomicUsize::new(0),
            files: Mutex::new(rank::LEAF, HashMap::default()),
        }
    }
}

impl DirectFiles {
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

    fn may_be_cached(&self, node: NodeId) -> bool {
        let files = self.files.lock();
        files.get(&node).is_none_or(|file| file.is_cached)
    }
}

fn is_direct(flags: i32) -> bool {
    flags & libc::O_DIRECT != 0
}

impl SheafOps {
    /// A write was made, and is not answered.
    pub(super) fn written_past(&self, node: NodeId, span: &Span, bytes: Range<u64>) {
        if span.from_page_cache || !is_direct(span.open_flags as i32) {
            return;
        }
        if let Some(notifier) = self.notifier.get() {
            let is_cached = self.direct.may_be_cached(node);
            let pages = is_cached.then(|| Pages::written_past(node, bytes));
            notifier.drop_written_past(node, pages);
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
        assert!(files.may_be_cached(1), "nobody has opened it so");
        files.cached(1);
        files.opened(1, DIRECT);
        files.opened(1, libc::O_RDWR);
        assert!(!files.may_be_cached(1), "before it was opened");
        files.cached(2);
        assert!(!files.may_be_cached(1), "another one");
        files.cached(1);
        files.opened(1, DIRECT);
        assert!(files.may_be_cached(1));
        files.closed(1, DIRECT);
        files.closed(1, libc::O_RDWR);
        assert!(files.may_be_cached(1), "one is open still");
        files.closed(1, DIRECT);
        files.opened(1, DIRECT);
        assert!(!files.may_be_cached(1));
        files.closed(1, DIRECT);
        assert_eq!(files.count.load(Ordering::SeqCst), 0);
    }
}

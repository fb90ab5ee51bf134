//! Durable writes under way that may turn out to be failed flushes (R17).
//!
//! A device with a volatile cache that cannot force single writes, and any file, is flushed by the kernel after a durable write. When that flush fails it
//! is the write that fails, and what others have in the cache may be gone, though a flush that somebody asks for next succeeds.
//!
//! 1. A doubt is begun before such a write is issued, and ends after its failure, if any, is counted.
//! 2. A flush is told to have ended, well or not, after all doubts are over that had begun when it ended: whoever then finds no failure counted has lost nothing.
//! 3. Who has a doubt neither flushes nor waits for a flush, or for another doubt: but a device may call who does, within a request (that of a test does). He waits for the
//!    doubts of other threads, and not for that of his caller, which ends after him.
//! 4. Such a write is told to have succeeded after all doubts are over that had begun when it ended, and after of all flushes of its devices it is known
//!    whether they failed (`flush.rs`, invariant 6): they may have lost it before its own flush, which then succeeds. Neither of these waits for it, as a flush
//!    that is held up by invariant 2 is answered for before.

use base::atomic::{AtomicUsize, Ordering};
use base::sync::{Condvar, Mutex, rank};
use base::thread::Id;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
struct Open {
    next: u64,
    /// Those under way, by their numbers, and whose they are.
    under_way: BTreeMap<u64, Id>,
}

#[derive(Debug)]
pub(crate) struct Doubts {
    open: Mutex<Open>,
    /// One is over.
    over: Condvar,
    /// As many as are under way, to be looked at without the lock.
    count: AtomicUsize,
}

/// One durable write, until it is dropped.
#[must_use]
pub(crate) struct Doubt<'a> {
    doubts: &'a Doubts,
    number: u64,
}

impl Doubts {
    pub fn new() -> Doubts {
        Doubts {
            open: Mutex::new(rank::DEVICE_DOUBT, Open::default()),
            over: Condvar::new(),
            count: AtomicUsize::new(0),
        }
    }

    pub fn begin(&self) -> Doubt<'_> {
        let mut open = self.open.lock();
        let number = open.next;
        open.next += 1;
        open.under_way.insert(number, Id::current());
        self.count.fetch_add(1, Ordering::SeqCst);
        Doubt {
            doubts: self,
            number,
        }
    }

    /// Nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Waits until those are over that have begun.
    pub fn settle(&self) {
        if self.is_empty() {
            return;
        }
        let mut open = self.open.lock();
        let begun = open.next;
        while (open.under_way.range(..begun)).any(|(_, of)| !of.is_ours()) {
            self.over.wait(&mut open);
        }
    }
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        let mut open = self.doubts.open.lock();
        open.under_way.remove(&self.number);
        self.doubts.count.fetch_sub(1, Ordering::SeqCst);
        self.doubts.over.notify_all();
    }
}

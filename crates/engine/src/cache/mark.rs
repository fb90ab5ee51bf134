//! A mark on a count that only grows, of frames that were given out: who takes the count past it wakes the thread that waits for that, and others
//! pay for a look. Checked by `model/`.
//!
//! Invariants:
//! 1. While the thread sleeps there is a mark, and the count is not past it, or somebody who saw that is about to wake it: the mark is put there under the lock
//!    each time before it sleeps, and a wake comes after that lock. So one that comes late, and takes away a later mark than the one it saw, does no harm.
//! 2. The thread puts the mark there before it looks at the count, and others count before they look for the mark: one of both sees the other.

use super::standby::Standby;
use base::atomic::{AtomicUsize, Ordering, fence};

/// No count is past it.
const NONE: usize = usize::MAX;

#[derive(Debug)]
pub(super) struct Mark {
    pub standby: Standby,
    at: AtomicUsize,
}

impl Mark {
    pub fn new() -> Mark {
        Mark {
            standby: Standby::new(),
            at: AtomicUsize::new(NONE),
        }
    }

    /// The caller has just taken the count to `count`.
    #[inline]
    pub fn counted(&self, count: usize) {
        fence(Ordering::SeqCst);
        if count > self.at.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    /// One of those who see it is enough.
    #[cold]
    fn wake(&self) {
        if self.at.swap(NONE, Ordering::Relaxed) != NONE {
            self.standby.notify();
        }
    }

    /// Waits until the count is past `at`. False: it is stopped.
    pub fn await_past(&self, at: usize, count: impl Fn() -> usize) -> bool {
        self.standby.await_that(|| {
            self.at.store(at, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            count() > at
        })
    }
}

//! A sequence counter per file of writes to several pages at once: readers need no lock of ranges while none is under way.
//!
//! A [`Stores`] is one word of a file: how many such writes have begun, and how many of them are not over. Who reads or
//! writes a single page looks at it once, who reads several looks again afterwards; only where that is not enough do they
//! take part in [`ranges`](super::ranges).
//!
//! Invariants:
//! 1. A write is counted before it changes its first page, in the cache or on a device, and until after its last.
//! 2. So who has seen a page of a write finds the word changed, or the write not over, if it looks after that: the page came by the
//!    version of its tag in the cache, and what precedes the change with it. What came from a device meanwhile, whole or torn, is
//!    neither cached nor used unless the word is still what it was before (`Files::admit`), or those writes were elsewhere
//!    (`Ranges::is_apart`).
//! 3. Who finds the word as it was, and nobody at it, has seen all of each such write or nothing of it. Who finds nobody at it sees
//!    all of those that are over.
//!
//! Checked by `model/`.

use base::atomic::{AtomicU64, Ordering};
use base::canary::{Canary, planted};

/// Threads at work are counted below this, many more than a process has; writes in flight from here on.
const FLIGHT: u64 = 1 << 18;
/// Writes that have begun are counted from here on. That 2^34, or a multiple, begin while somebody reads, and none of them is under way, never is.
const BEGUN: u64 = 1 << 30;
/// Writes in flight at most, so that threads that look at once and then count themselves stay below the next field.
const FLIGHTS_MAX: u64 = 2048;

#[derive(Debug)]
pub(super) struct Stores(AtomicU64);

/// A moment at which no such write was under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Quiet(u64);

/// A write of several pages, or past the cache, until it is dropped.
#[derive(Debug)]
pub(super) struct Storing<'a>(&'a AtomicU64);

impl Stores {
    pub fn new() -> Stores {
        Stores(AtomicU64::new(0))
    }

    /// `None`: somebody is at it.
    #[inline]
    pub fn quiet(&self) -> Option<Quiet> {
        let word = self.0.load(Ordering::Acquire);
        (word.is_multiple_of(BEGUN) || planted(Canary::StoresUnseen)).then_some(Quiet(word))
    }

    /// Nobody has begun since.
    #[inline]
    pub fn is_still(&self, Quiet(word): Quiet) -> bool {
        self.0.load(Ordering::Acquire) == word || planted(Canary::StoresUnseen)
    }

    pub fn begin(&self) -> Storing<'_> {
        let before = self.0.fetch_add(BEGUN + 1, Ordering::AcqRel);
        debug_assert!(before % FLIGHT < FLIGHT - 1, "one for each thread at most");
        Storing(&self.0)
    }

    /// Counts a write that no thread waits for, until [`end_flight`](Self::end_flight). False: there are too many.
    pub fn begin_flight(&self) -> bool {
        if self.flights() >= FLIGHTS_MAX {
            return false;
        }
        self.0.fetch_add(BEGUN + FLIGHT, Ordering::AcqRel);
        true
    }

    pub fn end_flight(&self) {
        let before = self.0.fetch_sub(FLIGHT, Ordering::Release);
        debug_assert!(before % BEGUN >= FLIGHT, "it was counted");
    }

    /// Writes in flight. Who finds none sees all that was done when they landed.
    pub fn flights(&self) -> u64 {
        self.0.load(Ordering::Acquire) % BEGUN / FLIGHT
    }
}

impl Drop for Storing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

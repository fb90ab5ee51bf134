//! Room in the journal's ring: what a checkpoint still needs, what waits for its batch, and the
//! credits of operations that have not staged yet. Takes no lock. Checked by `model/`.
//!
//! Invariants:
//! 1. `head - tail + reserved` never exceeds the ring, nor do the batches, headers and padding
//!    included: a credit is taken before its operation locks anything (R6).
//! 2. Bytes that move from `reserved` to `head` are in both meanwhile, never in neither.
//! 3. A checkpoint can log what it must, whatever else waits for room: that was reserved by the
//!    operation that made it necessary, whose credit has room for it. `owed` says how much of
//!    `reserved` that is; it waits for no commit.

use base::atomic::{AtomicU64, Ordering};
use base::canary::{Canary, planted};

/// Room for what batches are longer than their records, and how much of it one operation takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slack {
    /// Credit of one operation. At least the longest record, and header and padding of a batch of
    /// its own.
    pub credit: u64,
    /// Header and padding of all batches that may be on their way at once.
    pub batches: u64,
}

#[derive(Debug)]
pub(crate) struct Ring {
    size: u64,
    slack: Slack,
    /// End of the last gathered batch; grows for ever, as `tail` does.
    head: AtomicU64,
    /// Where the batches begin that the last checkpoint does not cover.
    tail: AtomicU64,
    /// Credits given out, bytes staged and bytes owed, not yet part of `head`.
    reserved: AtomicU64,
    /// Bytes that checkpoints will log.
    owed: AtomicU64,
}

impl Ring {
    /// A ring of `size` bytes with nothing in it, that goes on at `position`.
    pub fn new(size: u64, position: u64, slack: Slack) -> Ring {
        Ring {
            size,
            slack,
            head: AtomicU64::new(position),
            tail: AtomicU64::new(position),
            reserved: AtomicU64::new(0),
            owed: AtomicU64::new(0),
        }
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes in use or spoken for; too many while others change it, never too few.
    fn used(&self) -> u64 {
        // The tail first, which never passes the head: a checkpoint that ends between these
        // loads makes the result too large, never negative. Reserved before head: bytes move
        // from there to head, and counting them twice is safe (invariant 2).
        let tail = self.tail.load(Ordering::SeqCst);
        let reserved = self.reserved.load(Ordering::SeqCst);
        let head = self.head.load(Ordering::SeqCst);
        (head - tail) + reserved + self.slack.batches
    }

    /// Share of the ring in use, 0 to 1000.
    pub fn fill_permille(&self) -> u64 {
        self.used() * 1000 / self.size
    }

    /// Takes the credit of one operation; false when the ring has no room (invariant 1).
    pub fn try_credit(&self) -> bool {
        // Adds first and looks afterwards: of two that want the last room, one sees the other.
        self.reserved.fetch_add(self.slack.credit, Ordering::SeqCst);
        if self.used() > self.size && !planted(Canary::NoCredits) {
            self.return_credit();
            return false;
        }
        true
    }

    pub fn return_credit(&self) {
        self.reserved.fetch_sub(self.slack.credit, Ordering::SeqCst);
    }

    /// A credit shrinks to the record of `len` bytes that was staged for it.
    pub fn staged(&self, len: u64) {
        self.reserved
            .fetch_sub(self.slack.credit - len, Ordering::SeqCst);
    }

    /// Reserves `len` bytes for a checkpoint (invariant 3). The caller has a credit, with room for
    /// them beside its record.
    pub fn owe(&self, len: u64) {
        self.reserved.fetch_add(len, Ordering::SeqCst);
        self.owed.fetch_add(len, Ordering::SeqCst);
    }

    /// What was owed need not be logged any more.
    pub fn release_owed(&self, len: u64) {
        self.owed.fetch_sub(len, Ordering::SeqCst);
        self.reserved.fetch_sub(len, Ordering::SeqCst);
    }

    /// The record of `len` bytes that was owed was staged.
    pub fn staged_owed(&self, len: u64) {
        self.owed.fetch_sub(len, Ordering::SeqCst);
    }

    /// Staged records of `payload` bytes are now a batch of `len` bytes (invariant 2).
    pub fn gathered(&self, payload: u64, len: u64) {
        self.head.fetch_add(len, Ordering::SeqCst);
        self.reserved.fetch_sub(payload, Ordering::SeqCst);
    }

    /// A checkpoint made everything before `tail` unnecessary.
    pub fn release(&self, tail: u64) {
        self.tail.store(tail, Ordering::SeqCst);
    }

    /// Bytes that wait for a commit, credits in use included; too many while others change it.
    ///
    /// Who has counted a failure first and finds 0 here knows: whoever takes a credit from now on
    /// sees that failure.
    pub fn outstanding(&self) -> u64 {
        // In this order: what is staged between the loads counts.
        let reserved = self.reserved.load(Ordering::SeqCst);
        reserved.saturating_sub(self.owed.load(Ordering::SeqCst))
    }
}

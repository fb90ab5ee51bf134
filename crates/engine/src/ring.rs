//! Room in the journal's ring: what a checkpoint still needs, what waits for its batch, and the
//! credits of operations that have not staged yet. Takes no lock. Checked by `model/`.
//!
//! Room is given out from `reserved` in pieces: each shard keeps a budget, out of which its
//! operations take their credits and into which they put what their records leave of them. So most
//! operations write the line of their shard alone. Who finds no room takes back what shards keep.
//!
//! Invariants:
//! 1. `head - tail + reserved` never exceeds the ring, nor do the batches, headers and padding
//!    included: a credit is taken before its operation locks anything (R6).
//! 2. `reserved` is at least the sum of budgets, credits, staged bytes and bytes owed: it grows before they
//!    do, and shrinks after them. Bytes that move from `reserved` to `head` are in both meanwhile,
//!    never in neither.
//! 3. A checkpoint can log what it must, whatever else waits for room: that was reserved by the
//!    operation that made it necessary, out of its credit; it waits for no commit.
//! 4. Idle shards keep at most a quarter of the ring, and nothing where that is too little to be of use.
//! 5. A shard counts its operation's credit before that looks at anything else, until its record is
//!    staged. So who counts a failure, then finds neither a credit nor a staged record, in this order, knows: whoever
//!    takes a credit from now on sees that failure.

use crate::sum::Padded;
use base::atomic::{AtomicU64, Ordering};
use base::canary::{Canary, planted};

/// Room for what batches are longer than their records, and how much of it one operation takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slack {
    /// Credit of one operation. At least the longest record, and header and padding of a batch of
    /// its own.
    pub credit: u64,
    /// Header and padding of all batches in the ring that no credit has paid for: those of checkpoints.
    pub batches: u64,
}

/// Room that an operation has. Goes back by [`Ring::return_credit`] or [`Ring::staged`].
#[derive(Debug)]
#[must_use]
pub(crate) struct Credit {
    shard: usize,
    bytes: u64,
}

impl Credit {
    /// Sets `len` bytes aside for a checkpoint (invariant 3), whose record needs no credit. There is room for
    /// them beside the operation's own record.
    pub fn owe(&mut self, len: u64) {
        self.bytes -= len;
    }

    /// What was owed need not be logged any more.
    pub fn release_owed(&mut self, len: u64) {
        self.bytes += len;
    }
}

#[derive(Debug)]
pub(crate) struct Ring {
    size: u64,
    slack: Slack,
    /// What a shard takes beyond a credit when it has none left, and what it keeps at most.
    piece: u64,
    keep: u64,
    shards: Box<[Padded<Shard>]>,
    shared: Padded<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// End of the last gathered batch; grows for ever, as `tail` does.
    head: AtomicU64,
    /// Where the batches begin that the last checkpoint does not cover.
    tail: AtomicU64,
    /// Room given out that is not yet part of `head` (invariant 2).
    reserved: AtomicU64,
}

#[derive(Debug)]
struct Shard {
    /// Its budget in bytes, and below that in [`OUT_BITS`] the number of its credits in use.
    state: AtomicU64,
    /// How full the ring was when the shard last looked.
    fill: AtomicU64,
}

/// Enough for each thread of a machine; and a piece for each of them fits into the rest.
const OUT_BITS: u32 = 20;
const OUT_MASK: u64 = (1 << OUT_BITS) - 1;

/// A piece smaller than this part of a credit saves nothing.
const PIECE_LEAST: u64 = 16;
/// How full the ring is, in thousandths, when a shard looks at it for each operation.
const LOOK_FROM: u64 = 400;

impl Shard {
    /// Takes a credit out of the budget, if it is that large.
    fn take(&self, credit: u64) -> bool {
        let mut state = self.state.load(Ordering::SeqCst);
        while state >> OUT_BITS >= credit {
            let taken = state - (credit << OUT_BITS) + 1;
            match self.exchange(state, taken) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Ends a credit of which `bytes` are left; returns what goes beyond a budget of `keep`.
    fn give(&self, bytes: u64, keep: u64) -> u64 {
        let mut state = self.state.load(Ordering::SeqCst);
        loop {
            debug_assert!(state & OUT_MASK > 0, "no credit is out");
            let budget = (state >> OUT_BITS) + bytes;
            let kept = budget.min(keep);
            match self.exchange(state, (kept << OUT_BITS) | ((state & OUT_MASK) - 1)) {
                Ok(_) => return budget - kept,
                Err(now) => state = now,
            }
        }
    }

    fn exchange(&self, now: u64, new: u64) -> Result<u64, u64> {
        self.state
            .compare_exchange(now, new, Ordering::SeqCst, Ordering::SeqCst)
    }
}

impl Ring {
    /// A ring of `size` bytes with nothing in it, that goes on at `position`, for so many shards.
    pub fn new(size: u64, position: u64, slack: Slack, shards: usize) -> Ring {
        // Invariant 4.
        let share = (size / 4 / shards as u64).min(2 * slack.credit);
        let least = (slack.credit / PIECE_LEAST).max(1);
        let piece = share
            .checked_sub(slack.credit)
            .filter(|piece| *piece >= least);
        let shard = |_| {
            Padded(Shard {
                state: AtomicU64::new(0),
                fill: AtomicU64::new(0),
            })
        };
        Ring {
            size,
            slack,
            piece: piece.unwrap_or(0),
            keep: piece.map_or(0, |_| share),
            shards: (0..shards).map(shard).collect(),
            shared: Padded(Shared {
                head: AtomicU64::new(position),
                tail: AtomicU64::new(position),
                reserved: AtomicU64::new(0),
            }),
        }
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes in use or spoken for; too many while others change it, never too few.
    pub fn used(&self) -> u64 {
        // The tail first, which never passes the head: a checkpoint that ends between these
        // loads makes the result too large, never negative. Reserved before head: bytes move
        // from there to head, and counting them twice is safe (invariant 2).
        let tail = self.shared.tail.load(Ordering::SeqCst);
        let reserved = self.shared.reserved.load(Ordering::SeqCst);
        let head = self.shared.head.load(Ordering::SeqCst);
        (head - tail) + reserved + self.slack.batches
    }

    /// Share of the ring in use, 0 to 1000, less what shards may keep.
    pub fn fill(&self) -> u64 {
        let idle = self.keep * self.shards.len() as u64;
        self.used().saturating_sub(idle) * 1000 / (self.size - idle)
    }

    /// Share of the ring in use, 0 to 1000; a low one is of when the shard last asked for room.
    pub fn fill_permille(&self, shard: usize) -> u64 {
        let shard = &self.shards[shard % self.shards.len()];
        let seen = shard.fill.load(Ordering::Relaxed);
        match seen < LOOK_FROM {
            true => seen,
            false => self.look(shard),
        }
    }

    fn look(&self, shard: &Shard) -> u64 {
        let fill = self.fill();
        shard.fill.store(fill, Ordering::Relaxed);
        fill
    }

    /// Takes the credit of one operation; `None` when the ring has no room (invariant 1).
    pub fn try_credit(&self, shard: usize) -> Option<Credit> {
        let number = shard % self.shards.len();
        let (shard, bytes) = (&self.shards[number], self.slack.credit);
        if !shard.take(bytes) {
            let more = self.ask().or_else(|| {
                self.take_back();
                self.ask()
            })?;
            shard
                .state
                .fetch_add((more << OUT_BITS) + 1, Ordering::SeqCst);
            self.look(shard);
        }
        Some(Credit {
            shard: number,
            bytes,
        })
    }

    /// Reserves a credit, and while the ring is not full something for those that follow: returns that.
    fn ask(&self) -> Option<u64> {
        let (credit, more) = (self.slack.credit, self.slack.credit + self.piece);
        let early = self.size / 4 * 3;
        // Who only looks keeps nobody else from a credit.
        if self.piece > 0 && self.used() + more <= early && self.reserve(more, early) {
            return Some(self.piece);
        }
        self.reserve(credit, self.size).then_some(0)
    }

    fn reserve(&self, bytes: u64, limit: u64) -> bool {
        // Adds first and looks afterwards: of two that want the last room, one sees the other.
        self.shared.reserved.fetch_add(bytes, Ordering::SeqCst);
        if self.used() > limit && !planted(Canary::NoCredits) {
            self.unreserve(bytes);
            return false;
        }
        true
    }

    fn unreserve(&self, bytes: u64) {
        self.shared.reserved.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// Takes all budgets back.
    pub fn take_back(&self) {
        for shard in &self.shards {
            let kept = shard.state.fetch_and(OUT_MASK, Ordering::SeqCst) >> OUT_BITS;
            if kept > 0 {
                self.unreserve(kept);
            }
        }
    }

    pub fn return_credit(&self, credit: Credit) {
        self.staged(credit, 0);
    }

    /// A record was staged for a credit, of which `len` bytes stay reserved: the record's, and header's and padding's of
    /// the batch if this record pays for them. The rest goes back, and may be given out without a look at the ring.
    pub fn staged(&self, credit: Credit, len: u64) {
        let surplus = self.shards[credit.shard].give(credit.bytes - len, self.keep);
        if surplus > 0 {
            self.unreserve(surplus);
        }
    }

    /// A record was staged for which `owed` bytes were set aside by a credit that has ended, and that is no longer than
    /// these: what it leaves goes back.
    pub fn staged_owed(&self, owed: u64, len: u64) {
        if len < owed {
            self.unreserve(owed - len);
        }
    }

    /// Staged records, for which `reserved` bytes stayed reserved, are now a batch of `len` bytes (invariant 2), which is
    /// no more unless a checkpoint alone has staged them. False: it must not be written, as it would overrun what a
    /// checkpoint still needs (invariant 1).
    #[must_use]
    pub fn gathered(&self, reserved: u64, len: u64) -> bool {
        let end = self.shared.head.fetch_add(len, Ordering::SeqCst) + len;
        self.unreserve(reserved);
        end - self.shared.tail.load(Ordering::SeqCst) <= self.size || planted(Canary::NoCredits)
    }

    /// A checkpoint made everything before `tail` unnecessary.
    pub fn release(&self, tail: u64) {
        self.shared.tail.store(tail, Ordering::SeqCst);
    }

    /// Whether anything waits for a commit, or has a credit and may come to; `staged` says whether records are
    /// staged that no batch has taken. See invariant 5.
    pub fn outstanding(&self, staged: impl FnOnce() -> bool) -> bool {
        // In this order: a record is staged before its credit ends.
        self.has_credits() || staged()
    }

    /// Operations have credits.
    pub fn has_credits(&self) -> bool {
        let out = |shard: &Padded<Shard>| shard.state.load(Ordering::SeqCst) & OUT_MASK > 0;
        self.shards.iter().any(out)
    }
}

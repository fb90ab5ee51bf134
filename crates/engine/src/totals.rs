//! Free space in numbers: what is available, what is promised. Takes no lock. Checked by `model/`.
//!
//! Invariants:
//! 1. Promises never exceed the available blocks plus the free chunks beyond the reserve, except
//!    for chunks that metadata took since; those come out of the reserve. What may grow counts no chunk that a
//!    promise needs ([`Totals::promised_chunks`]); checkpoints take what they must.
//! 2. What moves from one number to another leaves the one before it enters the other: blocks of
//!    a converted chunk, and those that a promise is redeemed for. Who looks at the other number
//!    first sees too little meanwhile, never the same block twice. Blocks of a retired chunk move
//!    the other way, but only when what is promised, tried promises included, does without them. Those that were taken for a promise
//!    and go back to it are promised before they are available.
//! 3. A chunk that is being converted counts as free for promises until its blocks are available, and for nobody else:
//!    its map may wait for a checkpoint.

use base::atomic::{AtomicI64, AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Totals {
    available: AtomicI64,
    free_chunks: AtomicI64,
    /// Those of them that are being converted.
    converting: AtomicI64,
    promised: AtomicI64,
    /// How often blocks went back to a promise.
    returned: AtomicU64,
    /// Free chunks that promises do not cover.
    reserve_chunks: AtomicI64,
    chunk_blocks: i64,
}

impl Totals {
    pub fn new(available: i64, free_chunks: i64, reserve_chunks: i64, chunk_blocks: u32) -> Totals {
        Totals {
            available: AtomicI64::new(available),
            free_chunks: AtomicI64::new(free_chunks),
            converting: AtomicI64::new(0),
            promised: AtomicI64::new(0),
            returned: AtomicU64::new(0),
            reserve_chunks: AtomicI64::new(reserve_chunks),
            chunk_blocks: chunk_blocks as i64,
        }
    }

    /// Blocks that new promises can have; too few while others take or convert, and never so many
    /// that a promise is granted wrongly.
    pub fn promisable(&self) -> i64 {
        self.promisable_beyond(self.reserve_chunks())
    }

    /// The same with another reserve.
    pub fn promisable_beyond(&self, reserve_chunks: i64) -> i64 {
        // Each before where its blocks come from (invariant 2): promises are redeemed by
        // available blocks, and those of a new data chunk were a free chunk.
        let (promised, available) = self.promised_and_available();
        let free_chunks = self.free_chunks.load(Ordering::SeqCst);
        let spare = (free_chunks - reserve_chunks).max(0);
        available + spare * self.chunk_blocks - promised
    }

    /// What is promised, and then what is available. Of blocks that go back to a promise meanwhile, it may be that the former is without them and the latter
    /// with them: then both are looked at again.
    fn promised_and_available(&self) -> (i64, i64) {
        loop {
            let returned = self.returned.load(Ordering::SeqCst);
            let promised = self.promised.load(Ordering::SeqCst);
            let available = self.available.load(Ordering::SeqCst);
            if self.returned.load(Ordering::SeqCst) == returned {
                return (promised, available);
            }
        }
    }

    /// Free chunks that promises need beside what is available: metadata does without them.
    pub fn promised_chunks(&self) -> i64 {
        let (promised, available) = self.promised_and_available();
        let missing = promised - available;
        let chunks = (missing + self.chunk_blocks - 1) / self.chunk_blocks;
        (chunks - self.converting()).max(0)
    }

    pub fn promised(&self) -> i64 {
        self.promised.load(Ordering::SeqCst)
    }

    pub fn try_promise(&self, blocks: u64) -> bool {
        // What is refused anyway is not missing for metadata meanwhile.
        if blocks as i64 > self.chunk_blocks && self.promisable() < blocks as i64 {
            return false;
        }
        // Adds first and looks afterwards: of two that want the last blocks, one sees the other.
        self.promised.fetch_add(blocks as i64, Ordering::SeqCst);
        if self.promisable() < 0 {
            self.unpromise(blocks);
            return false;
        }
        true
    }

    /// Gives up a promise, or what was taken for it ([`Totals::take`] comes before).
    pub fn unpromise(&self, blocks: u64) {
        self.promised.fetch_sub(blocks as i64, Ordering::SeqCst);
    }

    /// Blocks that were taken for a promise are about to be available again, and promised still: [`Totals::give`] comes after, so that nobody
    /// finds them available and not promised.
    pub fn promise_again(&self, blocks: u64) {
        self.promised.fetch_add(blocks as i64, Ordering::SeqCst);
        // Who finds the blocks available finds this, and who knew this before has found them promised.
        self.returned.fetch_add(1, Ordering::SeqCst);
    }

    /// Blocks that a promise covers are taken, or available ones are lost.
    pub fn take(&self, blocks: u32) {
        self.available.fetch_sub(blocks as i64, Ordering::SeqCst);
    }

    /// Takes blocks that no promise needs, if they are.
    pub fn try_take(&self, blocks: u32) -> bool {
        // As in `try_promise`.
        self.take(blocks);
        if self.promisable() < 0 {
            self.give(blocks as i64);
            return false;
        }
        true
    }

    /// Blocks become available, or turn out not to be.
    pub fn give(&self, blocks: i64) {
        self.available.fetch_add(blocks, Ordering::SeqCst);
    }

    /// Free chunks that are not being converted; too few for a moment when one has been.
    pub fn free_chunks(&self) -> i64 {
        let converting = self.converting();
        self.free_chunks.load(Ordering::SeqCst) - converting
    }

    pub fn converting(&self) -> i64 {
        self.converting.load(Ordering::SeqCst)
    }

    /// A free chunk is to become data (invariant 3).
    pub fn begin_conversion(&self) {
        self.converting.fetch_add(1, Ordering::SeqCst);
    }

    /// It has, and its blocks are given next ([`Totals::take_chunks`] comes before), or it stays free.
    pub fn end_conversion(&self) {
        self.converting.fetch_sub(1, Ordering::SeqCst);
    }

    pub fn take_chunks(&self, chunks: usize) {
        self.free_chunks.fetch_sub(chunks as i64, Ordering::SeqCst);
    }

    /// Takes a free chunk that no promise needs, if it is.
    pub fn try_take_chunk(&self) -> bool {
        // As in `try_promise`.
        self.take_chunks(1);
        if self.promisable() < 0 {
            self.free(1);
            return false;
        }
        true
    }

    /// Chunks become free. Their blocks are not available any more ([`Totals::try_take`]).
    pub fn free(&self, chunks: usize) {
        self.free_chunks.fetch_add(chunks as i64, Ordering::SeqCst);
    }

    pub fn reserve_chunks(&self) -> i64 {
        self.reserve_chunks.load(Ordering::SeqCst)
    }

    pub fn set_reserve(&self, chunks: i64) {
        self.reserve_chunks.store(chunks, Ordering::SeqCst);
    }
}

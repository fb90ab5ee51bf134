//! Data that a batch vouches for: it need not be durable before the batch is, because the batch has its checksum
//! (data checksums in the commit, as in optimistic crash consistency, Chidambaram et al., SOSP 2013).
//!
//! Recovery reads what the last batches vouch for, and the run ends before the first whose data is not what it says
//! (`batches.rs`). So one flush makes data and batch durable. What it takes:
//!
//! Invariants:
//! 1. A batch is *confirmed* when a later durable one, or a checkpoint, says that it was durable: recovery looks at its
//!    data no more. Until then nobody writes to blocks for which it vouches: who wants to waits for that, or
//!    brings it about ([`Store::confirm`](crate::Store::confirm)).
//! 2. Blocks are known here before the record that vouches for them can be in a batch, and before anybody but who wrote them
//!    can come to write to them.
//! 3. What is freed is given out only when every batch up to the one that frees it is confirmed, as far as they vouch for
//!    anything ([`Vouched::settled`]). So a write to new blocks never has to wait, nor a checkpoint's.

use crate::space::Extent;
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Mutex, rank};
use format::Block;
use std::collections::VecDeque;

/// Runs of blocks that may wait to be confirmed: beyond that batches take the other way, and flush first.
const RUNS_MAX: usize = 512;

/// On cache lines of its own: syncs write them.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Vouched {
    /// With the epochs of their records, which grow, but for those of threads that came at the same time.
    runs: Mutex<VecDeque<(u64, Extent)>>,
    /// Their number: mostly there are none, and nobody takes the lock.
    count: AtomicUsize,
    /// Batches of epochs up to this one are confirmed (invariant 1).
    confirmed: AtomicU64,
}

impl Vouched {
    /// Everything up to `confirmed` is.
    pub fn new(confirmed: u64) -> Vouched {
        Vouched {
            runs: Mutex::new(rank::LEAF, VecDeque::new()),
            count: AtomicUsize::new(0),
            confirmed: AtomicU64::new(confirmed),
        }
    }

    /// Whether more may be added. A hint: some more than [`RUNS_MAX`] do no harm.
    pub fn has_room(&self) -> bool {
        self.count.load(Ordering::Relaxed) < RUNS_MAX
    }

    /// The record of this epoch, which is pinned, will vouch for these blocks (invariant 2).
    pub fn add(&self, epoch: u64, runs: &[Extent]) {
        if runs.is_empty() {
            return;
        }
        let mut all = self.runs.lock();
        all.extend(runs.iter().map(|run| (epoch, *run)));
        self.count.store(all.len(), Ordering::SeqCst);
    }

    /// The batch of this epoch, which is durable, does not vouch for anything: what it names was flushed before.
    pub fn flushed(&self, epoch: u64) {
        self.forget(|of| of == epoch);
    }

    /// A batch is durable that says of all up to `epoch` that they are, or a checkpoint that needs none of them.
    pub fn confirm(&self, epoch: u64) {
        // In this order: who finds it confirmed finds nothing of it here.
        self.forget(|of| of <= epoch);
        if self.confirmed.load(Ordering::SeqCst) < epoch {
            self.confirmed.fetch_max(epoch, Ordering::SeqCst);
        }
    }

    fn forget(&self, which: impl Fn(u64) -> bool) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut all = self.runs.lock();
        all.retain(|(epoch, _)| !which(*epoch));
        self.count.store(all.len(), Ordering::SeqCst);
    }

    pub fn is_confirmed(&self, epoch: u64) -> bool {
        self.confirmed.load(Ordering::SeqCst) >= epoch
    }

    /// The newest epoch whose batch vouches for some of these blocks, and is not confirmed; none, if there is none.
    pub fn newest_of(&self, blocks: Extent) -> Option<u64> {
        if self.count.load(Ordering::SeqCst) == 0 || planted(Canary::VouchedOverwritten) {
            return None;
        }
        let meets = |run: &Extent| run.block < end(blocks) && blocks.block < end(*run);
        let all = self.runs.lock();
        let epochs = all.iter().filter(|(_, run)| meets(run));
        epochs.map(|(epoch, _)| *epoch).max()
    }

    /// All of them.
    pub fn runs(&self) -> Vec<Extent> {
        self.runs.lock().iter().map(|(_, run)| *run).collect()
    }

    /// The newest epoch of all that are not confirmed.
    pub fn newest(&self) -> Option<u64> {
        if self.count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        self.runs.lock().iter().map(|(epoch, _)| *epoch).max()
    }

    /// What was freed up to here may be given out, of what is durable up to `durable` (invariant 3).
    pub fn settled(&self, durable: u64) -> u64 {
        if self.count.load(Ordering::SeqCst) == 0 {
            return durable;
        }
        let all = self.runs.lock();
        let first = all.iter().map(|(epoch, _)| *epoch).min();
        first.map_or(durable, |first| durable.min(first - 1))
    }
}

fn end(run: Extent) -> Block {
    Block(run.block.0 + run.len as u64)
}

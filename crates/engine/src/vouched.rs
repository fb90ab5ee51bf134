//! Data that a batch vouches for: it need not be durable before the batch is, because the batch has its checksum
//! (data checksums in the commit, as in optimistic crash consistency, Chidambaram et al., SOSP 2013). Checked by `model/`.
//!
//! Recovery reads what the last batches vouch for, and the run ends before the first whose data is not what it says
//! (`batches.rs`). So the two are written at once, and one flush makes both durable: the data waits in memory until whoever
//! leads the commit writes it beside the batch ([`NewData`]). What it takes:
//!
//! Invariants:
//! 1. A batch is *confirmed* when a later durable one, or a checkpoint, says that it was durable: recovery looks at its
//!    data no more. Until then nobody writes to blocks for which it vouches: who wants to waits for that, or
//!    brings it about ([`Store::confirm`](crate::Store::confirm)).
//! 2. Blocks are known here before the record that vouches for them can be in a batch, and before anybody but who wrote them
//!    can come to write to them.
//! 3. Until the batch is durable these blocks may hold what they did before: who reads them takes what is here instead
//!    ([`Store::waiting_data`](crate::Store::waiting_data)). After a failure that stays so. What is confirmed waits no more, whoever was to say
//!    that it is durable.
//! 4. The data of an epoch is handed out once, when the epoch is closed and its pins are gone, so all of it is written with its batch, and none
//!    is when the operation was undone.
//! 5. What is freed is given out only when every batch up to the one that frees it is confirmed, as far as they vouch for
//!    anything ([`Vouched::settled`]). So a write to new blocks never has to wait, nor a checkpoint's.

use crate::new_data::NewData;
use crate::space::Extent;
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Mutex, rank};
use std::collections::VecDeque;

/// Runs of blocks that may wait to be confirmed, and bytes that may wait for their batch: beyond that batches take the other way, and
/// flush first.
const RUNS_MAX: usize = 512;
const WAITING_MAX: usize = 4 << 20;

/// What is not confirmed, with the epochs of its records. These grow, but for those of threads that came at the same time.
#[derive(Debug, Default)]
struct Known {
    runs: VecDeque<(u64, Extent)>,
    /// What waits until its batch is durable.
    data: Vec<(u64, NewData)>,
}

/// On cache lines of its own: syncs write them.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Vouched {
    known: Mutex<Known>,
    /// Runs: mostly there are none, and nobody takes the lock.
    count: AtomicUsize,
    /// Bytes of data that waits: mostly there is none, and nobody who reads takes the lock.
    waiting: AtomicUsize,
    /// Batches of epochs up to this one are confirmed (invariant 1).
    confirmed: AtomicU64,
}

impl Vouched {
    /// Everything up to `confirmed` is.
    pub fn new(confirmed: u64) -> Vouched {
        Vouched {
            known: Mutex::new(rank::LEAF, Known::default()),
            count: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            confirmed: AtomicU64::new(confirmed),
        }
    }

    /// Whether more may be added. A hint: some more than that do no harm.
    pub fn has_room(&self) -> bool {
        self.count.load(Ordering::Relaxed) < RUNS_MAX
            && self.waiting.load(Ordering::Relaxed) < WAITING_MAX
    }

    /// The record of this epoch, which is pinned, will vouch for this data (invariant 2).
    pub fn add(&self, epoch: u64, data: Vec<NewData>) {
        if data.is_empty() {
            return;
        }
        let bytes: usize = data.iter().map(NewData::len).sum();
        let mut known = self.known.lock();
        let runs = data.iter().map(|one| (epoch, one.blocks()));
        known.runs.extend(runs);
        known.data.extend(data.into_iter().map(|one| (epoch, one)));
        self.count.store(known.runs.len(), Ordering::SeqCst);
        self.waiting.fetch_add(bytes, Ordering::SeqCst);
    }

    /// The data of an epoch that is closed, and that nobody pins, to be written with its batch (invariant 4).
    pub fn take(&self, epoch: u64) -> Vec<NewData> {
        if !self.is_waiting() {
            return Vec::new();
        }
        let known = self.known.lock();
        let of_it = known.data.iter().filter(|(of, _)| *of == epoch);
        of_it.map(|(_, data)| data.clone()).collect()
    }

    pub fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// All batches of epochs up to this one are durable.
    pub fn written(&self, epoch: u64) {
        if !self.is_waiting() {
            return;
        }
        let mut known = self.known.lock();
        let gone = self.take_written(&mut known, |of| of <= epoch);
        drop(known);
        drop(gone);
    }

    /// Data that does not wait any more, to be freed when nobody waits for the lock any more.
    fn take_written(&self, known: &mut Known, which: impl Fn(u64) -> bool) -> Vec<(u64, NewData)> {
        let gone = known.data.extract_if(.., |(of, _)| which(*of));
        let gone: Vec<(u64, NewData)> = gone.collect();
        let bytes = gone.iter().map(|(_, data)| data.len()).sum();
        self.waiting.fetch_sub(bytes, Ordering::SeqCst);
        gone
    }

    /// What some of these blocks are to hold, and may not yet (invariant 3); in the order in which it was staged.
    pub fn waiting_in(&self, blocks: Extent) -> Vec<NewData> {
        if !self.is_waiting() || planted(Canary::DataReadEarly) {
            return Vec::new();
        }
        let known = self.known.lock();
        let met = known
            .data
            .iter()
            .filter(|(_, data)| meet(data.blocks(), blocks));
        met.map(|(_, data)| data.clone()).collect()
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
        let mut known = self.known.lock();
        // Its batch is durable, though its leader may not have come to say so: no block is written over, or given out, whose old
        // content readers would still be given.
        let gone = self.take_written(&mut known, &which);
        known.runs.retain(|(epoch, _)| !which(*epoch));
        self.count.store(known.runs.len(), Ordering::SeqCst);
        drop(known);
        drop(gone);
    }

    pub fn is_confirmed(&self, epoch: u64) -> bool {
        self.confirmed.load(Ordering::SeqCst) >= epoch
    }

    /// The newest epoch whose batch vouches for some of these blocks, and is not confirmed; none, if there is none.
    pub fn newest_of(&self, blocks: Extent) -> Option<u64> {
        if self.count.load(Ordering::SeqCst) == 0 || planted(Canary::VouchedOverwritten) {
            return None;
        }
        let known = self.known.lock();
        let epochs = known.runs.iter().filter(|(_, run)| meet(*run, blocks));
        epochs.map(|(epoch, _)| *epoch).max()
    }

    /// All of them.
    pub fn runs(&self) -> Vec<Extent> {
        let known = self.known.lock();
        known.runs.iter().map(|(_, run)| *run).collect()
    }

    /// The newest epoch of all that are not confirmed.
    pub fn newest(&self) -> Option<u64> {
        if self.count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let known = self.known.lock();
        known.runs.iter().map(|(epoch, _)| *epoch).max()
    }

    /// What was freed up to here may be given out, of what is durable up to `durable` (invariant 5).
    pub fn settled(&self, durable: u64) -> u64 {
        if self.count.load(Ordering::SeqCst) == 0 {
            return durable;
        }
        let known = self.known.lock();
        let first = known.runs.iter().map(|(epoch, _)| *epoch).min();
        first.map_or(durable, |first| durable.min(first - 1))
    }
}

fn meet(one: Extent, other: Extent) -> bool {
    one.block < other.end() && other.block < one.end()
}

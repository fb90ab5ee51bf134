//! Data that a batch vouches for: it need not be durable before the batch is, because the batch has its checksum
//! (data checksums in the commit, as in optimistic crash consistency, Chidambaram et al., SOSP 2013).
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
//! 3. Until the batch is durable nobody reads these blocks either: who wants to brings that about
//!    ([`Store::await_data`](crate::Store::await_data)), as they may hold what was there before.
//! 4. The data of an epoch is taken once, when the epoch is closed and its pins are gone, so all of it is written with its batch, and none
//!    is when the operation was undone.
//! 5. What is freed is given out only when every batch up to the one that frees it is confirmed, as far as they vouch for
//!    anything ([`Vouched::settled`]). So a write to new blocks never has to wait, nor a checkpoint's.

use crate::space::Extent;
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Mutex, rank};
use device::{AlignedBuf, Durability, Io};
use format::{BLOCK_SIZE, Block, checksum};
use std::collections::VecDeque;
use std::sync::Arc;

/// Runs of blocks that may wait to be confirmed: beyond that batches take the other way, and flush first.
const RUNS_MAX: usize = 512;

/// What an operation writes to a run of blocks, with its checksum, in memory that nobody changes any more.
#[derive(Clone, Debug)]
pub struct NewData {
    blocks: Extent,
    crc: u32,
    memory: Arc<AlignedBuf>,
    /// Where in the memory it begins.
    at: usize,
}

impl NewData {
    /// The bytes from `at` on, for these blocks.
    ///
    /// # Panics
    /// The memory has fewer.
    pub fn new(blocks: Extent, memory: &Arc<AlignedBuf>, at: usize) -> NewData {
        NewData {
            blocks,
            crc: checksum(0, &memory[at..at + blocks.len as usize * BLOCK_SIZE]),
            memory: Arc::clone(memory),
            at,
        }
    }

    pub fn blocks(&self) -> Extent {
        self.blocks
    }

    pub(crate) fn crc(&self) -> u32 {
        self.crc
    }

    fn len(&self) -> usize {
        self.blocks.len as usize * BLOCK_SIZE
    }

    /// Whether `next` goes on where this ends, in memory and on the devices.
    fn goes_on(&self, next: &NewData) -> bool {
        Arc::ptr_eq(&self.memory, &next.memory)
            && self.at + self.len() == next.at
            && end(self.blocks) == next.blocks.block
    }

    /// The transfers that write it all: what lies next to each other is one.
    pub fn writes(all: &[NewData]) -> impl Iterator<Item = Io<'_>> {
        all.chunk_by(NewData::goes_on).map(|run| {
            let (first, last) = (&run[0], &run[run.len() - 1]);
            Io::Write {
                byte: first.blocks.block.byte(),
                buf: &first.memory[first.at..last.at + last.len()],
                durability: Durability::Checked,
            }
        })
    }
}

/// What is not confirmed, with the epochs of its records. These grow, but for those of threads that came at the same time.
#[derive(Debug, Default)]
struct Known {
    runs: VecDeque<(u64, Extent)>,
    /// What waits for its batch.
    data: Vec<(u64, NewData)>,
}

/// On cache lines of its own: syncs write them.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Vouched {
    known: Mutex<Known>,
    /// Runs: mostly there are none, and nobody takes the lock.
    count: AtomicUsize,
    /// Bytes of data that waits.
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

    /// Whether more may be added. A hint: some more than [`RUNS_MAX`] do no harm.
    pub fn has_room(&self) -> bool {
        self.count.load(Ordering::Relaxed) < RUNS_MAX
    }

    /// The record of this epoch, which is pinned, will vouch for this data (invariant 2).
    pub fn add(&self, epoch: u64, data: Vec<NewData>) {
        if data.is_empty() {
            return;
        }
        let bytes: usize = data.iter().map(NewData::len).sum();
        let mut known = self.known.lock();
        let runs = data.iter().map(|one| (epoch, one.blocks));
        known.runs.extend(runs);
        known.data.extend(data.into_iter().map(|one| (epoch, one)));
        self.count.store(known.runs.len(), Ordering::SeqCst);
        self.waiting.fetch_add(bytes, Ordering::SeqCst);
    }

    /// The data of an epoch that is closed, and that nobody pins, to be written with its batch (invariant 4).
    pub fn take(&self, epoch: u64) -> Vec<NewData> {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let mut known = self.known.lock();
        let of_it = known.data.extract_if(.., |(of, _)| *of == epoch);
        let data: Vec<NewData> = of_it.map(|(_, data)| data).collect();
        let bytes = data.iter().map(NewData::len).sum();
        self.waiting.fetch_sub(bytes, Ordering::SeqCst);
        data
    }

    /// Bytes of data that waits for its batch.
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed) as u64
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
        known.runs.retain(|(epoch, _)| !which(*epoch));
        self.count.store(known.runs.len(), Ordering::SeqCst);
    }

    pub fn is_confirmed(&self, epoch: u64) -> bool {
        self.confirmed.load(Ordering::SeqCst) >= epoch
    }

    /// The newest epoch whose batch vouches for some of these blocks, and is not confirmed; none, if there is none.
    pub fn newest_of(&self, blocks: Extent) -> Option<u64> {
        match planted(Canary::VouchedOverwritten) {
            true => None,
            false => self.newest_met(blocks),
        }
    }

    /// The newest epoch whose batch writes to some of these blocks, and is not durable yet, as batches up to `durable` are (invariant 3).
    pub fn unwritten_of(&self, blocks: Extent, durable: impl FnOnce() -> u64) -> Option<u64> {
        let epoch = self.newest_met(blocks)?;
        let unread = epoch > durable() && !planted(Canary::DataReadEarly);
        unread.then_some(epoch)
    }

    fn newest_met(&self, blocks: Extent) -> Option<u64> {
        if self.count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let meets = |run: &Extent| run.block < end(blocks) && blocks.block < end(*run);
        let known = self.known.lock();
        let epochs = known.runs.iter().filter(|(_, run)| meets(run));
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

fn end(run: Extent) -> Block {
    Block(run.block.0 + run.len as u64)
}

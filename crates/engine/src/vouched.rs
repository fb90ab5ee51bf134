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
//! 3. Until the batch is durable these blocks may hold what they did before: who reads them takes what is here instead
//!    ([`Store::waiting_data`](crate::Store::waiting_data)). After a failure that stays so. What is confirmed waits no more, whoever was to say
//!    that it is durable.
//! 4. The data of an epoch is handed out once, when the epoch is closed and its pins are gone, so all of it is written with its batch, and none
//!    is when the operation was undone.
//! 5. What is freed is given out only when every batch up to the one that frees it is confirmed, as far as they vouch for
//!    anything ([`Vouched::settled`]). So a write to new blocks never has to wait, nor a checkpoint's.

use crate::space::Extent;
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Mutex, rank};
use device::{Durability, Io};
use format::{BLOCK_SIZE, Block, checksum};
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Runs of blocks that may wait to be confirmed, and bytes that may wait for their batch: beyond that batches take the other way, and
/// flush first.
const RUNS_MAX: usize = 512;
const WAITING_MAX: usize = 4 << 20;

/// What an operation writes to a run of blocks, with its checksum, in memory that nobody changes any more.
#[derive(Clone)]
pub struct NewData {
    blocks: Extent,
    crc: u32,
    memory: Arc<dyn AsRef<[u8]> + Send + Sync>,
    /// Where in the memory it is.
    at: Range<usize>,
}

impl fmt::Debug for NewData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NewData").field(&self.blocks).finish()
    }
}

impl NewData {
    /// The bytes from `at` on, for these blocks.
    ///
    /// # Panics
    /// The memory has fewer.
    pub fn new(blocks: Extent, memory: Arc<dyn AsRef<[u8]> + Send + Sync>, at: usize) -> NewData {
        let at = at..at + blocks.len as usize * BLOCK_SIZE;
        NewData {
            blocks,
            crc: checksum(0, &(*memory).as_ref()[at.clone()]),
            memory,
            at,
        }
    }

    /// What the blocks will hold.
    pub fn bytes(&self) -> &[u8] {
        &(*self.memory).as_ref()[self.at.clone()]
    }

    pub fn blocks(&self) -> Extent {
        self.blocks
    }

    pub(crate) fn crc(&self) -> u32 {
        self.crc
    }

    /// Whether `next` goes on where this ends, in memory and on the devices.
    fn goes_on(&self, next: &NewData) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.memory), Arc::as_ptr(&next.memory))
            && self.at.end == next.at.start
            && end(self.blocks) == next.blocks.block
    }

    /// The transfers that write it all: what lies next to each other is one.
    pub fn writes(all: &[NewData]) -> impl Iterator<Item = Io<'_>> {
        all.chunk_by(NewData::goes_on).map(|run| {
            let (first, last) = (&run[0], &run[run.len() - 1]);
            Io::Write {
                byte: first.blocks.block.byte(),
                buf: &(*first.memory).as_ref()[first.at.start..last.at.end],
                durability: Durability::Checked,
            }
        })
    }
}

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
        let bytes: usize = data.iter().map(|one| one.at.len()).sum();
        let mut known = self.known.lock();
        let runs = data.iter().map(|one| (epoch, one.blocks));
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

    fn is_waiting(&self) -> bool {
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
        let bytes = gone.iter().map(|(_, data)| data.at.len()).sum();
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
            .filter(|(_, data)| meet(data.blocks, blocks));
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
    one.block < end(other) && other.block < end(one)
}

fn end(run: Extent) -> Block {
    Block(run.block.0 + run.len as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::AlignedBuf;

    /// Whoever led the batch may have yet to say that it is durable, when another one has confirmed it.
    #[test]
    fn what_is_confirmed_is_not_read_from_memory_any_more() {
        let vouched = Vouched::new(0);
        let run = Extent {
            block: Block(9),
            len: 1,
        };
        let new = |byte: u8| {
            let memory = Arc::new(AlignedBuf::from_slice(&[byte; BLOCK_SIZE]));
            NewData::new(run, memory, 0)
        };
        vouched.add(5, vec![new(1)]);
        vouched.add(6, vec![new(2)]);
        vouched.confirm(5);
        let waits = vouched.waiting_in(run);
        assert_eq!(
            waits.iter().map(|new| new.bytes()[0]).collect::<Vec<u8>>(),
            [2]
        );
        assert_eq!(vouched.newest_of(run), Some(6));
        vouched.written(5);
        vouched.written(6);
        assert!(vouched.waiting_in(run).is_empty() && vouched.has_room());
        assert_eq!(vouched.waiting.load(Ordering::SeqCst), 0);
        assert_eq!(vouched.newest_of(run), Some(6));
    }

    /// That what one batch names was flushed before it says nothing of those before that vouch for data.
    #[test]
    fn a_batch_that_vouches_for_nothing_confirms_no_other() {
        let vouched = Vouched::new(0);
        let run = |block| Extent {
            block: Block(block),
            len: 1,
        };
        for epoch in [5, 6, 7] {
            let memory = Arc::new(AlignedBuf::from_slice(&[epoch as u8; BLOCK_SIZE]));
            vouched.add(epoch, vec![NewData::new(run(epoch), memory, 0)]);
        }
        vouched.flushed(6);
        let newest = [5, 6, 7].map(|block| vouched.newest_of(run(block)));
        assert_eq!(newest, [Some(5), None, Some(7)]);
        let waiting = [5, 6, 7].map(|block| vouched.waiting_in(run(block)).len());
        assert_eq!(waiting, [1, 0, 1]);
        assert_eq!(vouched.settled(7), 4);
    }
}

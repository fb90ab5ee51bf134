//! Pages of a transaction that are in blocks before it commits: what does not fit its memory.
//!
//! The blocks are reserved and nobody else's; they go back when the transaction is dropped. Invariants:
//! 1. A page is written to its block once, and once more when its end is cut off. One that changes otherwise comes back to memory, and its block is given
//!    back at once, whatever the blocks beside it hold. So each block here holds a page.
//! 2. Before they are named their writes have completed; and if a flush failed since the first of them began, none is
//!    ([`Stored::flush_failures`]).

use crate::Error;
use crate::content::FsNode;
use engine::{Reservation, Store};
use format::{BLOCK_SIZE, Block};
use std::collections::BTreeMap;

/// The block that a page is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(pub Block);

impl Place {
    /// Whether another one is right behind it.
    pub fn is_before(self, other: Place) -> bool {
        self.0.0 + 1 == other.0.0
    }
}

/// Reserved blocks that were written.
#[derive(Debug, Default)]
pub(crate) struct Stored<'s> {
    /// Runs of them, by their first blocks.
    runs: BTreeMap<u64, Reservation<'s, FsNode>>,
    /// Failed flushes of the array before the first was written.
    pub flush_failures: Option<u64>,
}

impl<'s> Stored<'s> {
    /// Adds a run that was written.
    pub fn add(&mut self, run: Reservation<'s, FsNode>) {
        self.runs.insert(run.extent().block.0, run);
    }

    /// A page is not in its block any more; returns that, which goes back when it is dropped.
    pub fn forget(&mut self, place: Place) -> Option<Reservation<'s, FsNode>> {
        let block = place.0.0;
        let (&start, _) = self.runs.range(..=block).next_back()?;
        let mut rest = self.runs.remove(&start)?;
        let before = rest.split_off((block - start) as u32);
        let gone = rest.split_off(1);
        for part in [before, rest] {
            if part.extent().len > 0 {
                self.add(part);
            }
        }
        Some(gone)
    }

    /// What follows from a first write that begins now.
    pub fn begin(&mut self, store: &Store<FsNode>) {
        let now = || store.array().flush_failures();
        self.flush_failures.get_or_insert_with(now);
    }

    /// Reads a page back.
    pub fn read(&self, store: &Store<FsNode>, place: Place, out: &mut [u8]) -> Result<(), Error> {
        let mut page = device::AlignedBuf::zeroed(BLOCK_SIZE);
        let read = store.array().read(place.0.byte(), &mut page);
        read.map_err(engine::Error::from)?;
        out.copy_from_slice(&page);
        Ok(())
    }

    /// The runs, to be taken apart, in the order of their blocks; none is left.
    pub fn take(&mut self) -> BTreeMap<u64, Reservation<'s, FsNode>> {
        std::mem::take(&mut self.runs)
    }
}

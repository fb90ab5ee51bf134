//! Pages of a transaction that are in blocks before it commits: what does not fit its memory.
//!
//! The blocks are reserved and nobody else's; they go back when the transaction is dropped. Invariants:
//! 1. A page is written to its block once, and once more when its end is cut off. One that changes otherwise comes back to memory, and its block holds nothing any more. A run whose blocks
//!    all hold nothing goes back at once.
//! 2. Before they are named their writes have completed; and if a flush failed since the first of them began, none is
//!    ([`Stored::flush_failures`]).

use crate::Error;
use crate::content::FsNode;
use engine::{Reservation, Store};
use format::{BLOCK_SIZE, Block};

/// Where a page is: in which run, and how many blocks from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub run: usize,
    pub at: u32,
}

/// Runs of reserved blocks that were written.
#[derive(Debug, Default)]
pub(crate) struct Stored<'s> {
    runs: Vec<Reservation<'s, FsNode>>,
    /// Of each run the blocks that hold a page.
    used: Vec<u32>,
    /// Failed flushes of the array before the first was written.
    pub flush_failures: Option<u64>,
}

impl<'s> Stored<'s> {
    /// Adds a run that was written; returns its number.
    pub fn add(&mut self, run: Reservation<'s, FsNode>) -> usize {
        self.used.push(run.extent().len);
        self.runs.push(run);
        self.runs.len() - 1
    }

    /// A page is not in its block any more.
    pub fn forget(&mut self, place: Place) {
        let used = &mut self.used[place.run];
        *used -= 1;
        if *used == 0 {
            let run = &mut self.runs[place.run];
            drop(run.split_off(run.extent().len));
        }
    }

    /// What follows from a first write that begins now.
    pub fn begin(&mut self, store: &Store<FsNode>) {
        let now = || store.array().flush_failures();
        self.flush_failures.get_or_insert_with(now);
    }

    pub fn block(&self, place: Place) -> Block {
        Block(self.runs[place.run].extent().block.0 + u64::from(place.at))
    }

    /// Reads a page back.
    pub fn read(&self, store: &Store<FsNode>, place: Place, out: &mut [u8]) -> Result<(), Error> {
        let mut page = device::AlignedBuf::zeroed(BLOCK_SIZE);
        let read = store.array().read(self.block(place).byte(), &mut page);
        read.map_err(engine::Error::from)?;
        out.copy_from_slice(&page);
        Ok(())
    }

    /// The runs, to be taken apart; none is left.
    pub fn take(&mut self) -> Vec<Reservation<'s, FsNode>> {
        self.used.clear();
        std::mem::take(&mut self.runs)
    }
}

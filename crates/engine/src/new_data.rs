//! Data that an operation leaves to whoever commits it to write; see `vouched.rs`.

use crate::space::Extent;
use device::{Durability, Io};
use format::{BLOCK_SIZE, checksum};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

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

    pub(crate) fn len(&self) -> usize {
        self.at.len()
    }

    pub(crate) fn crc(&self) -> u32 {
        self.crc
    }

    /// Whether `next` goes on where this ends, in memory and on the devices.
    fn goes_on(&self, next: &NewData) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.memory), Arc::as_ptr(&next.memory))
            && self.at.end == next.at.start
            && self.blocks.end() == next.blocks.block
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

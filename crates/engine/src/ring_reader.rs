//! Reading the journal's ring, of which a device may not return all.
//!
//! Much is read at once, and of all that one sector can be what a device does not return. What fails is read again, block by block and then by
//! the least that a batch can begin or end with, several times. What no read returns is a *gap*. However much that is, each block of the ring is
//! asked for so many times and no more.
//!
//! Invariants:
//! 1. Nothing is said of what lies in a gap: there is no header in it, and no batch that reaches into one is whole. In memory its bytes are
//!    zeros.
//! 2. A gap is no error here: whether it matters depends on where the journal's run ends, which is for `batches.rs` to say.

use crate::error::Error;
use device::{AlignedBuf, Array};
use format::journal::{BATCH_MAGIC, BatchHeader};
use format::{BLOCK_SIZE, checksum};
use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Bytes that are read at once.
pub(crate) const WINDOW: u64 = 1 << 20;

/// Times that a device is asked for the same before that counts as unreadable.
const READS: usize = 3;

pub(crate) fn read_often(array: &Array, at: u64, out: &mut [u8]) -> Result<(), device::Error> {
    let mut left = READS;
    loop {
        left -= 1;
        match array.read(at, out) {
            Err(error) if left > 0 => tracing::debug!("read once more: {error}"),
            done => return done,
        }
    }
}

/// What devices do not return of the ring.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gaps {
    /// Where each begins in the ring, and ends, and why. They do not overlap.
    all: BTreeMap<u64, (u64, device::Error)>,
}

impl Gaps {
    fn add(&mut self, at: Range<u64>, error: device::Error) {
        let (mut start, mut end, mut error) = (at.start, at.end, error);
        // One with all that it touches.
        while let Some((first, (last, why))) = self.all.range(..=end).next_back()
            && *last >= start
        {
            let first = *first;
            (end, error) = (end.max(*last), why.clone());
            start = start.min(first);
            self.all.remove(&first);
        }
        self.all.insert(start, (end, error));
    }

    pub fn join(&mut self, others: Gaps) {
        for (start, (end, error)) in others.all {
            self.add(start..end, error);
        }
    }

    /// Why the first is not returned.
    pub fn first(&self) -> Option<&device::Error> {
        let (_, (_, error)) = self.all.first_key_value()?;
        Some(error)
    }

    /// The next position, by such steps, that lies in none; the same one if there is none in a ring of this size.
    pub fn behind(&self, ring: u64, position: u64, step: u64) -> u64 {
        let mut all = (position..position + ring).step_by(step as usize);
        all.find(|at| self.within(ring, *at, step).is_none())
            .unwrap_or(position)
    }

    /// Why a device does not return all of `len` bytes at a position in a ring of this size.
    pub fn within(&self, ring: u64, position: u64, len: u64) -> Option<&device::Error> {
        let at = position % ring;
        let first = len.min(ring - at);
        let one = |at: Range<u64>| {
            let (_, (end, error)) = self.all.range(..at.end).next_back()?;
            (*end > at.start).then_some(error)
        };
        one(at..at + first).or_else(|| one(0..len - first))
    }
}

/// Reads what lies at a place in the ring. What is not returned is zeros, and a gap.
pub(crate) fn read_part(
    array: &Array,
    at: u64,
    out: &mut [u8],
    gaps: &mut Gaps,
) -> Result<(), Error> {
    let geometry = array.geometry();
    let byte = geometry.journal_start.byte() + at;
    let Err(error) = array.read(byte, out) else {
        return Ok(());
    };
    tracing::warn!("the journal is read block by block: {error}");
    let least = geometry.journal_align as usize;
    for (block, out) in (0..).zip(out.chunks_mut(BLOCK_SIZE)) {
        let block = block * BLOCK_SIZE as u64;
        if array.read(byte + block, out).is_ok() {
            continue;
        }
        for (part, out) in (0..).zip(out.chunks_mut(least)) {
            let start = block + part * least as u64;
            match read_often(array, byte + start, out) {
                Ok(()) => {}
                Err(error @ device::Error::Io { .. }) => {
                    out.fill(0);
                    gaps.add(at + start..at + start + least as u64, error);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Reads the ring in large pieces, one after the other. Batches refer to what was read, and keep it in memory.
pub(crate) struct RingReader<'a> {
    array: &'a Array,
    pub size: u64,
    window: Arc<AlignedBuf>,
    /// What part of the ring the window has.
    holds: Range<u64>,
    /// What was not returned of all that was read.
    gaps: Gaps,
}

impl<'a> RingReader<'a> {
    pub fn new(array: &'a Array) -> Self {
        let geometry = array.geometry();
        RingReader {
            array,
            size: geometry.journal_bytes(),
            window: Arc::new(AlignedBuf::zeroed(0)),
            holds: 0..0,
            gaps: Gaps::default(),
        }
    }

    /// Why something is not there of `len` bytes at a ring position, which were read.
    pub fn gap(&self, position: u64, len: u64) -> Option<device::Error> {
        self.gaps.within(self.size, position, len).cloned()
    }

    pub fn into_gaps(self) -> Gaps {
        self.gaps
    }

    /// Copies `out.len()` bytes at a ring position.
    pub fn read(&mut self, mut position: u64, mut out: &mut [u8]) -> Result<(), Error> {
        while !out.is_empty() {
            let window = self.peek(position)?;
            let take = out.len().min(window.len());
            let (now, later) = out.split_at_mut(take);
            now.copy_from_slice(&window[..take]);
            out = later;
            position += take as u64;
        }
        Ok(())
    }

    /// `len` bytes at a ring position, as they were read if they are in one piece there.
    pub fn records(&mut self, position: u64, len: u64) -> Result<Records, Error> {
        let at = position % self.size;
        if at + len > self.size || len > WINDOW {
            let mut copy = vec![0; len as usize];
            self.read(position, &mut copy)?;
            return Ok(copy.into());
        }
        if at < self.holds.start || at + len > self.holds.end {
            self.load(at, len)?;
        }
        let from = (at - self.holds.start) as usize;
        Ok(Records {
            window: Arc::clone(&self.window),
            range: from..from + len as usize,
        })
    }

    /// What is in memory from a ring position on: at least a byte, and all up to a multiple of a block.
    fn peek(&mut self, position: u64) -> Result<&[u8], Error> {
        let at = position % self.size;
        if !self.holds.contains(&at) {
            self.load(at, 1)?;
        }
        let held = (self.holds.end - self.holds.start) as usize;
        Ok(&self.window[(at - self.holds.start) as usize..held])
    }

    /// Reads `len` bytes and more from a place in the ring on.
    fn load(&mut self, at: u64, len: u64) -> Result<(), Error> {
        const { assert!(format::geometry::MIN_JOURNAL_BYTES.is_multiple_of(BLOCK_SIZE as u64)) };
        let start = at / BLOCK_SIZE as u64 * BLOCK_SIZE as u64;
        let least = (at - start + len).next_multiple_of(BLOCK_SIZE as u64);
        let len = WINDOW.max(least).min(self.size - start);
        self.holds = 0..0;
        let own = Arc::get_mut(&mut self.window);
        if own.is_none_or(|window| (window.len() as u64) < len) {
            self.window = Arc::new(AlignedBuf::zeroed(len as usize));
        }
        let window = Arc::get_mut(&mut self.window).expect("nobody has it");
        read_part(
            self.array,
            start,
            &mut window[..len as usize],
            &mut self.gaps,
        )?;
        self.holds = start..start + len;
        Ok(())
    }

    /// The header of a batch of this array, if one lies at a ring position, which is aligned as
    /// the journal is. None lies in a gap.
    pub fn header(&mut self, position: u64) -> Result<Option<BatchHeader>, Error> {
        // Both are aligned: no window ends in the middle of the magic, and no gap in the middle of the header.
        const { assert!(BatchHeader::SIZE <= 512) };
        if self.peek(position)?.first_chunk() != Some(&BATCH_MAGIC.to_le_bytes()) {
            return Ok(None);
        }
        let mut raw = [0; BatchHeader::SIZE];
        self.read(position, &mut raw)?;
        let header = BatchHeader::read_from_bytes(&raw).expect("sizes match");
        Ok((header.uuid == self.array.metadata_uuid()).then_some(header))
    }

    /// Whether the batch at a ring position is all there, and its checksum right.
    pub fn is_whole(&mut self, position: u64, header: &BatchHeader) -> Result<bool, Error> {
        let len = header.len.get() as u64;
        if BatchHeader::SIZE as u64 + len > self.size {
            return Ok(false);
        }
        let begun = self.begun_checksum(header);
        let crc = self.checksum(begun, position + BatchHeader::SIZE as u64, len)?;
        Ok(crc == header.crc.get() && self.gap(position, BatchHeader::SIZE as u64 + len).is_none())
    }

    /// Continues a checksum over `len` bytes from a ring position on.
    pub fn checksum(
        &mut self,
        mut crc: u32,
        mut position: u64,
        mut len: u64,
    ) -> Result<u32, Error> {
        while len > 0 {
            let window = self.peek(position)?;
            let here = &window[..len.min(window.len() as u64) as usize];
            crc = checksum(crc, here);
            (position, len) = (position + here.len() as u64, len - here.len() as u64);
        }
        Ok(crc)
    }

    /// The checksum of a batch, as far as its header goes.
    pub fn begun_checksum(&self, header: &BatchHeader) -> u32 {
        begun_checksum(self.array, header)
    }
}

pub(crate) fn begun_checksum(array: &Array, header: &BatchHeader) -> u32 {
    checksum(array.checksum_seed(), &header.as_bytes()[8..])
}

/// Records of a batch, in memory with others that were read with them.
#[derive(Clone)]
pub(crate) struct Records {
    window: Arc<AlignedBuf>,
    range: Range<usize>,
}

impl Records {
    /// A part of what was read.
    pub fn new(window: Arc<AlignedBuf>, range: Range<usize>) -> Records {
        Records { window, range }
    }

    /// The memory that they lie in, if nobody else has it.
    pub fn into_memory(self) -> Option<AlignedBuf> {
        Arc::into_inner(self.window)
    }
}

impl Default for Records {
    fn default() -> Records {
        Records::new(Arc::new(AlignedBuf::zeroed(0)), 0..0)
    }
}

impl Deref for Records {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.window[self.range.clone()]
    }
}

impl From<Vec<u8>> for Records {
    fn from(bytes: Vec<u8>) -> Records {
        Records {
            window: Arc::new(AlignedBuf::from_slice(&bytes)),
            range: 0..bytes.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: u64 = 64 << 10;

    /// Gaps in these blocks of 512 bytes.
    fn gaps(blocks: &[u64]) -> Gaps {
        let mut gaps = Gaps::default();
        for block in blocks {
            let error = device::Error::NoDevices;
            gaps.add(block * 512..(block + 1) * 512, error);
        }
        gaps
    }

    #[test]
    fn what_touches_a_gap_is_not_there() {
        let all = gaps(&[9, 3, 127, 4, 8, 20]);
        assert_eq!(all.all.len(), 4);
        let inside = |position: u64, len: u64| all.within(RING, position, len).is_some();
        for block in 0..128 {
            let missing = [3, 4, 8, 9, 20, 127].contains(&block);
            for lap in [0, 5 * RING] {
                assert_eq!(inside(lap + block * 512, 512), missing, "{block}");
                assert_eq!(inside(lap + block * 512 + 9, 1), missing, "{block}");
            }
        }
        // Between, over, up to and around the end.
        assert!(!inside(5 * 512, 3 * 512) && inside(5 * 512, 3 * 512 + 1));
        assert!(inside(0, 10 << 10) && inside(10 * 512, 20 * 512));
        assert!(inside(126 * 512, 1024) && gaps(&[5]).within(RING, 127 * 512, 1024).is_none());
        assert!(gaps(&[0]).within(RING, 127 * 512, 513).is_some());
        assert!(gaps(&[0]).within(RING, 127 * 512, 512).is_none());
    }

    #[test]
    fn gaps_of_two_reads_are_joined() {
        let mut all = gaps(&[1, 5, 6]);
        all.join(gaps(&[0, 2, 3, 4, 6, 9]));
        let parts: Vec<_> = all
            .all
            .iter()
            .map(|(start, (end, _))| start / 512..end / 512)
            .collect();
        assert_eq!(parts, [0..7, 9..10]);
    }

    #[test]
    fn who_goes_on_behind_gaps_goes_round_the_ring() {
        let all = gaps(&[126, 127, 0, 2]);
        let behind = |block: u64| all.behind(RING, RING + block * 512, 512) / 512 - 128;
        assert_eq!(
            [125, 126, 127, 128, 130].map(behind),
            [125, 129, 129, 129, 131]
        );
        let nothing = gaps(&(0..128).collect::<Vec<_>>());
        assert_eq!(nothing.behind(RING, 512, 512), 512);
    }
}

//! Whether checkpoint records and the journal prove that a device has its place in the array, though it has no label: both carry the file
//! system's UUID, and a batch's checksum its key.
//!
//! 1. A device that has copies of the checkpoint slots is proven by a copy of the newest record that another device has as well.
//! 2. Any device is, by a batch that lies on it at least in part and hangs together with the newest record that others have: each batch
//!    names the checksum of the one before, and the record that of the last one before its anchor. From there the chain is
//!    followed, backwards and forwards, so an old copy of a device does not do in place of what was written later.

use crate::batches::{RingReader, after};
use crate::error::Error;
use crate::journal::Anchor;
use device::{AlignedBuf, Array};
use format::checkpoint::CheckpointRecord;
use format::journal::BatchHeader;
use format::{BLOCK_SIZE, COUNTER_MAX, MAX_DEVICES};
use std::collections::BTreeMap;

/// Whether records or the journal of an array prove that this is its device.
///
/// # Errors
/// A device that does not return what it holds.
pub fn proves(array: &Array, device: usize) -> Result<bool, Error> {
    let copy_of = |slot: usize, copy: usize| {
        let block = array.read_slot(slot, copy).ok()?;
        CheckpointRecord::parse(&block, &array.uuid()).ok()
    };
    let newest = |copy: usize| {
        let records = [0, 1].into_iter().filter_map(|slot| copy_of(slot, copy));
        records.max_by_key(|record| record.sequence.get())
    };
    // Copy 0 lies on device 0, copy 1 on device 1.
    let others = [0, 1].into_iter().filter(|copy| *copy != device);
    let record = others.filter_map(newest).max_by_key(|r| r.sequence.get());
    let Some(record) = record else {
        return Ok(false);
    };
    if device < 2 && newest(device).is_some_and(|own| own.sequence == record.sequence) {
        return Ok(true);
    }
    Chain::of(array)?.reaches(&record, device)
}

/// A whole batch in the ring.
#[derive(Clone, Copy)]
struct Found {
    start: u64,
    end: u64,
    header: BatchHeader,
}

/// All whole batches that lie in the ring, by where they begin, and by where they end.
struct Chain<'a> {
    array: &'a Array,
    size: u64,
    by_start: BTreeMap<u64, Found>,
    by_end: BTreeMap<u64, u64>,
}

impl Chain<'_> {
    fn of(array: &Array) -> Result<Chain<'_>, Error> {
        let mut ring = RingReader::new(array);
        let (size, align) = (ring.size, array.geometry().journal_align as u64);
        let mut chain = Chain {
            array,
            size,
            by_start: BTreeMap::new(),
            by_end: BTreeMap::new(),
        };
        let mut start = 0;
        while start < size {
            let header = ring.header(start)?;
            let header = header.filter(|header| header.is_countable(COUNTER_MAX));
            let Some(header) = header else {
                start += align;
                continue;
            };
            if !ring.is_whole(start, &header)? {
                start += align;
                continue;
            }
            let at = Anchor {
                position: start,
                sequence: header.sequence.get(),
                previous_crc: header.previous_crc.get(),
            };
            let end = after(array, at, &header).position;
            chain.by_end.insert(end % size, start);
            chain.by_start.insert(start, Found { start, end, header });
            start = end;
        }
        Ok(chain)
    }

    fn reaches(&self, record: &CheckpointRecord, device: usize) -> Result<bool, Error> {
        let anchor = record.anchor_position.get() % self.size;
        let (crc, sequence) = (record.anchor_checksum.get(), record.anchor_sequence.get());
        // Each batch at most once.
        let mut left = self.by_start.len();
        let mut wanted = (anchor, crc, sequence.checked_sub(1));
        while let (Some(found), true) = (self.before(wanted), left > 0) {
            if self.lies_on(found, device)? {
                return Ok(true);
            }
            let before = found.header.sequence.get().checked_sub(1);
            wanted = (found.start, found.header.previous_crc.get(), before);
            left -= 1;
        }
        let mut wanted = (anchor, crc, sequence);
        while let (Some(found), true) = (self.behind(wanted), left > 0) {
            if self.lies_on(found, device)? {
                return Ok(true);
            }
            let next = found.header.sequence.get() + 1;
            wanted = (found.end % self.size, found.header.crc.get(), next);
            left -= 1;
        }
        Ok(false)
    }

    /// The batch that ends at a place, if it has this checksum and number.
    fn before(&self, (end, crc, sequence): (u64, u32, Option<u64>)) -> Option<&Found> {
        let found = self.by_start.get(self.by_end.get(&end)?)?;
        let same = found.header.crc.get() == crc && Some(found.header.sequence.get()) == sequence;
        same.then_some(found)
    }

    /// The batch that begins at a place, if it follows one of this checksum, and has this number.
    fn behind(&self, (start, crc, sequence): (u64, u32, u64)) -> Option<&Found> {
        let found = self.by_start.get(&start)?;
        let header = &found.header;
        let same = header.previous_crc.get() == crc && header.sequence.get() == sequence;
        same.then_some(found)
    }

    /// Whether something of the batch lies on a device, and is not what a blank one has too.
    fn lies_on(&self, found: &Found, device: usize) -> Result<bool, Error> {
        let geometry = self.array.geometry();
        let block = BLOCK_SIZE as u64;
        let end = found.start + BatchHeader::SIZE as u64 + found.header.len.get() as u64;
        let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
        let mut at = found.start;
        while at < end {
            let first = at / block * block;
            let len = (first + block).min(end) - at;
            let byte = geometry.journal_start.byte() + first % self.size;
            let mut on = [false; MAX_DEVICES];
            geometry.pieces(byte, BLOCK_SIZE, |piece| on[piece.device] = true);
            if on[device] {
                self.array.read(byte, &mut buf)?;
                let from = (at - first) as usize;
                if buf[from..from + len as usize].iter().any(|b| *b != 0) {
                    return Ok(true);
                }
            }
            at += len;
        }
        Ok(false)
    }
}

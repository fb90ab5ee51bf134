//! Whether checkpoint records and the journal prove that a device has its place in the array, though it has no label: both carry the file
//! system's UUID, and a batch's checksum its key.
//!
//! 1. A device that has copies of the checkpoint slots is proven by a copy of the newest record that another device has as well.
//! 2. Any device is, by a batch that lies on it at least in part and hangs together with the newest record that others have: each batch
//!    names the checksum of the one before, and the record that of the last one before its anchor. From there the chain is
//!    followed, backwards and forwards.
//! 3. Records that the others do not have, or older ones only, speak against a device, whatever its batches say: of a clone that went its own
//!    way, and of an old copy, the batches from before are in the chain too.
//!
//! A device without copies of the slots, or with none that is whole, has nothing of the third kind. Nor has an old copy from after the last
//! checkpoint; recovery refuses it if a batch that it lacks a part of was durable by what lies on others.

use crate::batches::{after, each_whole};
use crate::error::Error;
use crate::journal::Anchor;
use crate::recovery::SEQUENCE_STEP_MAX;
use device::{AlignedBuf, Array};
use format::checkpoint::CheckpointRecord;
use format::journal::BatchHeader;
use format::{BLOCK_SIZE, COUNTER_MAX, MAX_DEVICES};
use std::collections::BTreeMap;
use zerocopy::IntoBytes;

/// What records and the journal of an array say of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    Nothing,
    /// It has the newest record.
    Record,
    /// It has a part of the journal's chain.
    Chain,
    /// Why it is not the array's, or not as it was.
    Against(String),
}

/// Whether records or the journal of an array prove that this is its device.
///
/// # Errors
/// A device that does not return what it holds.
pub fn proves(array: &Array, device: usize) -> Result<Proof, Error> {
    let copies_of = |copy: usize| -> Result<Vec<CheckpointRecord>, Error> {
        let mut records = Vec::new();
        for slot in [0, 1] {
            let block = match array.read_slot(slot, copy) {
                Ok(block) => block,
                Err(error) if copy == device => return Err(error.into()),
                Err(_) => continue,
            };
            records.extend(CheckpointRecord::parse(&block, &array.metadata_uuid()).ok());
        }
        records.sort_by_key(|record| record.sequence.get());
        Ok(records)
    };
    // Copy 0 lies on device 0, copy 1 on device 1. Of the others' one that can be read is enough; an own record that cannot be may be the objection.
    let others = [0, 1].into_iter().filter(|copy| *copy != device);
    let others = others
        .map(copies_of)
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .max_by_key(|records| records.last().map(|record| record.sequence.get()));
    let others = others.unwrap_or_default();
    let Some(record) = others.last() else {
        return Ok(Proof::Nothing);
    };
    let own = match device {
        0 | 1 => copies_of(device)?,
        _ => Vec::new(),
    };
    if let Some(objection) = objection(&own, &others) {
        return Ok(Proof::Against(objection.to_owned()));
    }
    if Chain::of(array)?.reaches(record, device)? {
        return Ok(Proof::Chain);
    }
    Ok(match own.last() {
        Some(own) if own.sequence == record.sequence => Proof::Record,
        _ => Proof::Nothing,
    })
}

/// What a device's own records say against it, beside those of the other device that has some; both in order.
fn objection(own: &[CheckpointRecord], others: &[CheckpointRecord]) -> Option<&'static str> {
    let (last, other) = (own.last()?.sequence.get(), others.last()?.sequence.get());
    let differ = |own: &CheckpointRecord| {
        let same = others.iter().filter(|other| other.sequence == own.sequence);
        same.into_iter()
            .any(|other| other.as_bytes() != own.as_bytes())
    };
    // Both copies of a record are durable before the next one is written, into the other slot.
    let newer = own.iter().filter(|own| own.sequence.get() > other).count();
    let follows = newer == 1 && (last - other) % 2 == 1 && last - other <= SEQUENCE_STEP_MAX;
    if own.iter().any(differ) || last > other && !follows {
        return Some(
            "a checkpoint on it is of another history of this file system: it is a copy that was written to since, or the others are",
        );
    }
    (last < other).then_some(
        "the newest checkpoint on it is older than that of the others: it is an old copy, or a power cut came between two copies",
    )
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
        let size = array.geometry().journal_bytes();
        let mut chain = Chain {
            array,
            size,
            by_start: BTreeMap::new(),
            by_end: BTreeMap::new(),
        };
        each_whole(array, COUNTER_MAX, |start, header| {
            let at = Anchor {
                position: start,
                sequence: header.sequence.get(),
                previous_crc: header.previous_crc.get(),
            };
            let end = after(array, at, &header).position;
            chain.by_end.insert(end % size, start);
            chain.by_start.insert(start, Found { start, end, header });
        })?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use format::U64;

    fn records(sequences: &[u64]) -> Vec<CheckpointRecord> {
        let record = |sequence: &u64| {
            let mut record = CheckpointRecord::zeroed();
            record.sequence = U64::new(*sequence);
            record
        };
        sequences.iter().map(record).collect()
    }

    /// A power cut came between the two copies of a record: its number is the next one, or leaves some out.
    #[test]
    fn one_record_more_is_no_objection_if_it_can_be_the_next() {
        let refused = |own: &[u64]| objection(&records(own), &records(&[9, 10])).is_some();
        for own in [&[9, 10][..], &[10, 11], &[10, 13], &[10, 15], &[13]] {
            assert!(!refused(own), "{own:?}");
        }
        // Old ones, two more, one in the wrong slot, and one of much later.
        for own in [&[8, 9][..], &[11, 12], &[11, 14], &[10, 12], &[10, 17]] {
            assert!(refused(own), "{own:?}");
        }
    }
}

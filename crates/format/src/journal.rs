//! The journal on disk: batches of records, each a list of node changes.

use crate::packed::{NUMBER_MAX, number, number_len, put_number, three_numbers, write_number};
use crate::table::KIND_LIMIT;
use crate::{BLOCK_SIZE, Block, COUNTER_MAX, Damage, U32, U64};
use std::ops::Range;

pub const BATCH_MAGIC: u32 = 0x4A46_4853;

/// The largest record, in bytes. An operation that could need more is a chain of records.
pub const RECORD_MAX: usize = 256 << 10;

layout! {
    /// Header of a batch; records follow it directly, zero-padded to the journal alignment.
    pub struct BatchHeader: 96 {
        /// `SHFJ`.
        pub magic: U32,
        /// CRC-32C of the rest of the header and the records, begun with that of the label's
        /// `hash_key`: records hold bytes that users chose, and must not pass for a batch.
        pub crc: U32,
        /// `crc` of the batch before: a stale batch never continues a chain.
        pub previous_crc: U32,
        /// Bytes of records.
        pub len: U32,
        /// The UUID that the file system was made with.
        pub uuid: [u8; 16],
        /// The mount that wrote it.
        pub mount_id: U64,
        /// Grows by one with every batch.
        pub sequence: U64,
        /// The newest epoch whose records it holds.
        pub epoch: U64,
        /// Newest epoch known durable when it was written.
        pub durable_epoch: U64,
        /// Newest checkpoint when it was written.
        pub checkpoint_sequence: U64,
        /// Sequence number of the newest batch known durable when it was written.
        pub durable_sequence: U64,
        /// Number of records.
        pub records: U32,
        /// Number of checksums of file data in the records that were not durable before the batch was written: it
        /// counts only if they match, or if a later batch or a checkpoint says that it was durable. 0: none needs a look.
        pub checked: U32,
        /// Zero.
        pub reserved: [u8; 8],
    }
}

packed! {
    /// A record: one operation, all or nothing.
    Record {
        /// Bytes of entries that follow.
        len: "number",
        /// Node changes, one after the other.
        entries: "RecordEntry, …",
    }

    /// One node change in a record.
    RecordEntry {
        /// In the lowest three bits: 1 create (the change is the image), 2 apply (a delta), 3 delete (empty), 4 merge (a
        /// delta; comes after what made its version and before what makes the next, in any
        /// order among the merges of that version), 5 fold (empty: changes nothing but the version), 6 checksum (changes
        /// nothing: of data in blocks that the change before it names). In the others the node kind.
        action: "u8",
        /// The node.
        nid: "number",
        /// Its version after the change; of a merge, the version it belongs to; of a checksum 0.
        version: "number",
        /// Bytes of the change.
        len: "number",
        /// The change: an image, a delta or a `DataChecksum`.
        change: "bytes",
    }

    /// The checksum of data that is written no later than its batch, and may not have been durable before that was.
    DataChecksum {
        /// The first block.
        block: "number",
        /// How many there are.
        blocks: "number",
        /// CRC-32C of what they hold.
        crc: "u32",
    }
}

/// A run of blocks and the CRC-32C of what was written to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataSum {
    pub block: Block,
    pub blocks: u32,
    pub crc: u32,
}

impl DataSum {
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_number(out, self.block.0);
        put_number(out, self.blocks.into());
        out.extend_from_slice(&self.crc.to_le_bytes());
    }

    pub fn decode(bytes: &[u8]) -> Result<DataSum, Damage> {
        let damage = || Damage::new("journal record", "a checksum of data that is none");
        let (block, rest) = number(bytes).ok_or_else(damage)?;
        let (blocks, rest) = number(rest).ok_or_else(damage)?;
        let crc = <[u8; 4]>::try_from(rest).map_err(|_| damage())?;
        let blocks = u32::try_from(blocks).map_err(|_| damage())?;
        let end = block.checked_add(blocks.into());
        if blocks == 0 || end.is_none_or(|end| end > u64::MAX / BLOCK_SIZE as u64) {
            return Err(damage());
        }
        Ok(DataSum {
            block: Block(block),
            blocks,
            crc: u32::from_le_bytes(crc),
        })
    }
}

/// Bytes of what comes before a record's entries, at most.
pub const RECORD_HEAD_MAX: usize = 3;
/// Bytes of an entry without its change, at most.
pub const ENTRY_HEAD_MAX: usize = 1 + 2 * NUMBER_MAX + RECORD_HEAD_MAX;
const _: () = assert!(RECORD_MAX < 1 << (7 * RECORD_HEAD_MAX));

const ACTION_BITS: u32 = 3;
const _: () = assert!((KIND_LIMIT as u32) << ACTION_BITS <= 1 << u8::BITS);

/// Appends an entry whose change `encode` appends.
pub fn put_entry(
    record: &mut Vec<u8>,
    nid: u64,
    version: u64,
    action: Action,
    kind: u8,
    encode: impl FnOnce(&mut Vec<u8>),
) {
    debug_assert!(kind < KIND_LIMIT);
    record.push(action as u8 | kind << ACTION_BITS);
    put_number(record, nid);
    put_number(record, version);
    // Most changes are short: one byte is left for the length.
    record.push(0);
    let start = record.len();
    encode(record);
    let len = record.len() - start;
    if len < 0x80 {
        record[start - 1] = len as u8;
        return;
    }
    let more = number_len(len as u64) - 1;
    record.resize(start + more + len, 0);
    record.copy_within(start..start + len, start + more);
    write_number(&mut record[start - 1..start + more], len as u64);
}

/// A record is made behind room for its length, which comes last: puts it there, and returns the record.
pub fn seal_record(bytes: &mut [u8]) -> &[u8] {
    let len = bytes.len() - RECORD_HEAD_MAX;
    let start = RECORD_HEAD_MAX - number_len(len as u64);
    write_number(&mut bytes[start..RECORD_HEAD_MAX], len as u64);
    &bytes[start..]
}

impl BatchHeader {
    /// Whether none of the numbers that others follow is above `most`.
    pub fn is_countable(&self, most: u64) -> bool {
        let counters = [
            self.mount_id,
            self.sequence,
            self.epoch,
            self.checkpoint_sequence,
        ];
        counters.iter().all(|counter| counter.get() <= most)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Action {
    Create = 1,
    Apply = 2,
    Delete = 3,
    Merge = 4,
    Fold = 5,
    /// Of data: see [`DataSum`].
    Sum = 6,
}

/// One node change as read from a record.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    pub nid: u64,
    pub version: u64,
    pub action: Action,
    pub kind: u8,
    pub body: &'a [u8],
}

/// Splits a batch's records into entries; each call of `each` gets one record's entries.
pub fn parse_records<'a>(
    bytes: &'a [u8],
    mut each: impl FnMut(Vec<Entry<'a>>) -> Result<(), Damage>,
) -> Result<u32, Damage> {
    each_record(bytes, |record| {
        let mut body = &bytes[record];
        // Most have a few.
        let mut entries = Vec::with_capacity(4);
        while !body.is_empty() {
            let (entry, tail) = parse_entry(body)?;
            entries.push(entry);
            body = tail;
        }
        each(entries)
    })
}

/// Calls `each` with the entries of a batch's records in their order, and where in `bytes` each begins.
pub fn each_entry<'a>(
    bytes: &'a [u8],
    mut each: impl FnMut(usize, Entry<'a>),
) -> Result<u32, Damage> {
    each_record(bytes, |record| {
        let mut at = record.start;
        while at < record.end {
            let (entry, after) = entry_in(bytes, at, record.end)?;
            each(at, entry);
            at = after;
        }
        Ok(())
    })
}

/// Calls `each` with where the entries of one record after the other lie; returns how many records there were.
#[inline]
fn each_record(
    bytes: &[u8],
    mut each: impl FnMut(Range<usize>) -> Result<(), Damage>,
) -> Result<u32, Damage> {
    let damage = |what: &str| Damage::new("journal record", what);
    let (mut count, mut at) = (0, 0);
    while at < bytes.len() {
        let (len, rest) = number(&bytes[at..]).ok_or_else(|| damage("without a length"))?;
        if len > RECORD_MAX as u64 || len > rest.len() as u64 {
            return Err(damage("length out of range"));
        }
        let start = bytes.len() - rest.len();
        at = start + len as usize;
        each(start..at)?;
        count += 1;
    }
    Ok(count)
}

/// The entry at the beginning of `bytes`, and what follows it.
#[inline]
pub fn parse_entry(bytes: &[u8]) -> Result<(Entry<'_>, &[u8]), Damage> {
    let (entry, after) = entry_in(bytes, 0, bytes.len())?;
    Ok((entry, &bytes[after..]))
}

/// The entry at `at` of a record that ends at `end`, and where it ends itself.
#[inline(always)]
fn entry_in(bytes: &[u8], at: usize, end: usize) -> Result<(Entry<'_>, usize), Damage> {
    let damage = |what: &str| Damage::new("journal record", what);
    let ([nid, version, len], start) = entry_numbers(bytes, at + 1, end)?;
    if len > (end - start) as u64 {
        return Err(damage("entry length out of range"));
    }
    if version > COUNTER_MAX {
        return Err(damage("version out of range"));
    }
    let first = bytes[at];
    let action = match first & ((1 << ACTION_BITS) - 1) {
        1 => Action::Create,
        2 => Action::Apply,
        3 => Action::Delete,
        4 => Action::Merge,
        5 => Action::Fold,
        6 => Action::Sum,
        _ => return Err(damage("unknown action")),
    };
    let after = start + len as usize;
    let entry = Entry {
        nid,
        version,
        action,
        kind: first >> ACTION_BITS,
        body: &bytes[start..after],
    };
    Ok((entry, after))
}

/// An entry's numbers, which begin at `at`, and where its change begins. Of nearly all entries they are in one word, which may reach
/// beyond the record.
#[inline(always)]
fn entry_numbers(bytes: &[u8], at: usize, end: usize) -> Result<([u64; 3], usize), Damage> {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk());
    let numbers = word.and_then(|word| three_numbers(u64::from_le_bytes(*word)));
    if let Some((numbers, len)) = numbers
        && at + len <= end
    {
        return Ok((numbers, at + len));
    }
    longer_numbers(bytes, at, end)
}

#[inline(never)]
fn longer_numbers(bytes: &[u8], at: usize, end: usize) -> Result<([u64; 3], usize), Damage> {
    let cut = || Damage::new("journal record", "entry cut short");
    let mut rest = bytes.get(at..end).ok_or_else(cut)?;
    let mut numbers = [0; 3];
    for one in &mut numbers {
        (*one, rest) = number(rest).ok_or_else(cut)?;
    }
    Ok((numbers, end - rest.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Owned = (u64, u64, Action, u8, Vec<u8>);

    fn entries_of(bytes: &[u8]) -> Result<Vec<Vec<Owned>>, Damage> {
        let mut found = Vec::new();
        parse_records(bytes, |entries| {
            let each = entries.iter();
            let each = each.map(|e| (e.nid, e.version, e.action, e.kind, e.body.to_vec()));
            found.push(each.collect());
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn records_of_any_length_survive_a_round_trip() {
        let (mut batch, mut wanted) = (Vec::new(), Vec::new());
        for len in [0, 1, 100, 127, 128, 129, 5000, 16_383, 16_384, 200_000] {
            let mut record = vec![0; RECORD_HEAD_MAX];
            let body = vec![7; len];
            let last = KIND_LIMIT - 1;
            put_entry(&mut record, 1 << 28, 3, Action::Create, last, |o| {
                o.extend(&body)
            });
            put_entry(&mut record, 4, COUNTER_MAX, Action::Delete, 1, |_| {});
            assert!(record.len() <= RECORD_HEAD_MAX + len + 2 * ENTRY_HEAD_MAX);
            batch.extend_from_slice(seal_record(&mut record));
            wanted.push(vec![
                (1 << 28, 3, Action::Create, last, body),
                (4, COUNTER_MAX, Action::Delete, 1, Vec::new()),
            ]);
        }
        assert_eq!(entries_of(&batch).unwrap(), wanted);
        let mut one_by_one = Vec::new();
        let records = each_entry(&batch, |at, entry| {
            let (same, _) = parse_entry(&batch[at..]).unwrap();
            assert_eq!((same.version, same.body), (entry.version, entry.body));
            one_by_one.push((entry.nid, entry.version, entry.action));
        });
        assert_eq!(records.unwrap() as usize, wanted.len());
        let expected = wanted.iter().flatten().map(|one| (one.0, one.1, one.2));
        assert!(one_by_one.into_iter().eq(expected));
        for cut in [1, 3, 60, batch.len() - 1] {
            assert!(entries_of(&batch[..cut]).is_err(), "{cut}");
        }
    }

    /// An entry's numbers are read as a word where there is one, and else one by one: both say the same.
    #[test]
    fn an_entry_is_what_it_is_whatever_follows_it() {
        let numbers = [
            0,
            1,
            0x7F,
            0x80,
            0x3FFF,
            0x4000,
            0x1F_FFFF,
            1 << 28,
            COUNTER_MAX,
        ];
        let lens = [0, 1, 7, 127, 128, 300];
        let cases = numbers
            .iter()
            .flat_map(|nid| numbers.iter().map(move |v| (*nid, *v)));
        for ((nid, version), len) in cases.flat_map(|case| lens.map(|len| (case, len))) {
            let mut record = vec![0; RECORD_HEAD_MAX];
            put_entry(&mut record, nid, version, Action::Apply, 9, |o| {
                o.resize(o.len() + len, 0xFF)
            });
            let entry = record.split_off(RECORD_HEAD_MAX);
            for follows in 0..12 {
                let mut bytes = entry.clone();
                bytes.resize(entry.len() + follows, 0x01);
                let (found, after) = entry_in(&bytes, 0, entry.len()).unwrap();
                let of = (
                    found.nid,
                    found.version,
                    found.action,
                    found.kind,
                    found.body.len(),
                );
                assert_eq!(of, (nid, version, Action::Apply, 9, len));
                assert_eq!(after, entry.len());
                for end in 1..entry.len() {
                    assert!(
                        entry_in(&bytes, 0, end).is_err(),
                        "{nid} {version} {len}: {end}"
                    );
                }
            }
        }
    }

    /// A number in more bytes than it takes is none, wherever it is read.
    #[test]
    fn a_number_that_is_not_in_its_shortest_form_is_damage() {
        for longer in [
            &[0x82, 0x00, 1, 0][..],
            &[1, 0x81, 0x00, 0],
            &[1, 1, 0x80, 0x00],
        ] {
            for follows in [0, 20] {
                let mut bytes = vec![Action::Delete as u8];
                bytes.extend_from_slice(longer);
                let end = bytes.len();
                bytes.resize(end + follows, 1);
                assert!(entry_in(&bytes, 0, end).is_err(), "{longer:?}");
            }
        }
    }

    #[test]
    fn nonsense_in_a_record_is_damage() {
        let mut record = vec![0; RECORD_HEAD_MAX];
        put_entry(&mut record, 9, 1, Action::Apply, 16, |o| o.push(1));
        let good = seal_record(&mut record).to_vec();
        assert!(entries_of(&good).is_ok());
        let with = |at: usize, byte: u8| {
            let mut bad = good.clone();
            bad[at] = byte;
            entries_of(&bad).is_err()
        };
        assert!(with(0, 4) && with(0, 6), "the record's length");
        assert!(with(1, 16 << ACTION_BITS) && with(1, 7), "the action");
        assert!(with(4, 2) && with(4, 0), "the entry's length");
        assert!(entries_of(&[0xFF; 20]).is_err());
        for version in [COUNTER_MAX + 1, u64::MAX] {
            let mut record = vec![0; RECORD_HEAD_MAX];
            put_entry(&mut record, 9, version, Action::Apply, 16, |o| o.push(1));
            assert!(entries_of(seal_record(&mut record)).is_err(), "{version}");
        }
    }
}

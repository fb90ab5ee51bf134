//! The journal on disk: batches of records, each a list of node changes.

use crate::{COUNTER_MAX, Damage, U32, U64};
use zerocopy::FromBytes;

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
        /// The file system's UUID.
        pub uuid: [u8; 16],
        /// The mount that wrote it.
        pub mount_id: U64,
        /// Grows by one with every batch.
        pub sequence: U64,
        /// The epoch whose records it holds.
        pub epoch: U64,
        /// Newest epoch known durable when it was written.
        pub durable_epoch: U64,
        /// Newest checkpoint when it was written.
        pub checkpoint_sequence: U64,
        /// Sequence number of the newest batch known durable when it was written.
        pub durable_sequence: U64,
        /// Number of records.
        pub records: U32,
        /// Zero.
        pub reserved: [u8; 12],
    }

    /// Header of a record: one operation, all or nothing.
    pub struct RecordHeader: 8 {
        /// Bytes of entries that follow.
        pub len: U32,
        /// Number of entries.
        pub entries: U32,
    }

    /// Header of one node change in a record.
    pub struct EntryHeader: 24 {
        /// The node.
        pub nid: U64,
        /// Its version after the change; of a merge, the version it belongs to.
        pub version: U64,
        /// Bytes of the change that follow.
        pub len: U32,
        /// 1 create (the change is the image), 2 apply (a delta), 3 delete (empty), 4 merge (a
        /// delta; comes after what made its version and before what makes the next, in any
        /// order among the merges of that version), 5 fold (empty: changes nothing but the version).
        pub action: u8,
        /// Node kind.
        pub kind: u8,
        /// Zero.
        pub reserved: [u8; 2],
    }
}

impl BatchHeader {
    /// Whether something can follow what has these numbers.
    pub fn is_countable(&self) -> bool {
        let counters = [
            self.mount_id,
            self.sequence,
            self.epoch,
            self.checkpoint_sequence,
        ];
        counters.iter().all(|counter| counter.get() <= COUNTER_MAX)
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
    mut bytes: &'a [u8],
    mut each: impl FnMut(Vec<Entry<'a>>) -> Result<(), Damage>,
) -> Result<u32, Damage> {
    let damage = |what: &str| Damage::new("journal record", what);
    let mut count = 0;
    while !bytes.is_empty() {
        let (header, rest) =
            RecordHeader::read_from_prefix(bytes).map_err(|_| damage("shorter than its header"))?;
        let len = header.len.get() as usize;
        if len > rest.len() || len > RECORD_MAX {
            return Err(damage("length out of range"));
        }
        let (mut body, after) = rest.split_at(len);
        let mut entries = Vec::with_capacity((header.entries.get() as usize).min(len / 24));
        while !body.is_empty() {
            let (entry, tail) =
                EntryHeader::read_from_prefix(body).map_err(|_| damage("entry cut short"))?;
            let size = entry.len.get() as usize;
            if size > tail.len() {
                return Err(damage("entry length out of range"));
            }
            let action = match entry.action {
                1 => Action::Create,
                2 => Action::Apply,
                3 => Action::Delete,
                4 => Action::Merge,
                5 => Action::Fold,
                _ => return Err(damage("unknown action")),
            };
            entries.push(Entry {
                nid: entry.nid.get(),
                version: entry.version.get(),
                action,
                kind: entry.kind,
                body: &tail[..size],
            });
            body = &tail[size..];
        }
        if entries.len() != header.entries.get() as usize {
            return Err(damage("entry count does not match"));
        }
        each(entries)?;
        count += 1;
        bytes = after;
    }
    Ok(count)
}

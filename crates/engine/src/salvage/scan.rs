//! Looking for things that nothing points at any more: table leaves and node images in segments,
//! batches in the journal's ring.
//!
//! Invariants:
//! 1. What lies inside a sound item or batch is its payload, whatever it looks like: a scan goes
//!    on behind it.
//! 2. With a readable segment table only segments with live bytes are read, so what an
//!    interrupted checkpoint or repair left elsewhere is not taken for anything.

use super::{SalvageError, VERSION_STEP};
use crate::batches::{RingReader, Run, all_there, sums_of};
use crate::content::Content;
use crate::journal::Anchor;
use crate::segments::SegmentId;
use crate::store::Store;
use crate::table::{Entry, Table};
use device::{AlignedBuf, Array};
use format::item::{self, ITEM_ALIGN, ItemKind, ItemPointer, Place};
use format::journal::BatchHeader;
use format::table::LEAF_NIDS;
use format::{COUNTER_FOUND_MAX, COUNTER_MAX, Damage, U64};
use std::collections::{BTreeMap, BTreeSet};

/// Items with greater numbers are none of this array's, and might be in the data of a file: what is found
/// must leave numbers for what follows it.
const VERSION_MAX: u64 = COUNTER_FOUND_MAX;

/// A copy of a leaf page.
pub(super) struct FoundLeaf {
    pub pointer: ItemPointer,
    /// Of the checkpoint that wrote it.
    pub sequence: u64,
    entries: Vec<Entry>,
}

/// What segments hold of the wanted part of the table.
#[derive(Default)]
pub(super) struct Scan {
    /// The newest copy of each leaf page.
    pub leaves: BTreeMap<u64, FoundLeaf>,
    /// The newest image of each node: its version and place.
    pub images: BTreeMap<u64, (u64, Place)>,
    /// Segments that another scan would read, or find something in.
    pub occupied: BTreeSet<SegmentId>,
}

impl Scan {
    /// Reads the segments with `live` bytes; without a segment table, all there could be. `limit` is
    /// the newest checkpoint that counts.
    pub fn run<C: Content>(
        store: &Store<C>,
        live: Option<&BTreeMap<u32, Vec<u32>>>,
        limit: u64,
        wanted: &dyn Fn(u64) -> bool,
    ) -> Result<Scan, SalvageError> {
        let geometry = store.array.geometry();
        let per_chunk = geometry.segments_per_chunk() as u64;
        let mut scan = Scan::default();
        let mut buf = AlignedBuf::zeroed(geometry.segment_bytes());
        for chunk in 0..geometry.chunk_count {
            for index in 0..per_chunk {
                let id = SegmentId(chunk as u64 * per_chunk + index);
                let listed = live.map(|live| {
                    let counts = live.get(&chunk);
                    counts.is_some_and(|counts| counts[index as usize] > 0)
                });
                if listed == Some(false) {
                    continue;
                }
                let start = store.segments.first_block(id).byte();
                store.array.read(start, &mut buf).map_err(|error| {
                    SalvageError::Unreadable(format!("segment at byte {start}: {error}"))
                })?;
                let found = scan.segment(&buf, start, limit, wanted);
                if found || listed == Some(true) {
                    scan.occupied.insert(id);
                }
            }
        }
        Ok(scan)
    }

    /// True when there is any item.
    fn segment(
        &mut self,
        bytes: &[u8],
        start: u64,
        limit: u64,
        wanted: &dyn Fn(u64) -> bool,
    ) -> bool {
        let mut at = 0;
        let mut any = false;
        while let Some(next) = item::next(bytes, at) {
            at = next;
            let Ok((header, payload)) = item::decode(&bytes[at..]) else {
                at += ITEM_ALIGN;
                continue;
            };
            any = true;
            let len = item::padded_len(payload.len());
            let place = Place {
                byte: start + at as u64,
                len: len as u32,
            };
            let (id, version) = (header.id.get(), header.version.get());
            match ItemKind::from_byte(header.kind) {
                _ if version > VERSION_MAX => {}
                Some(ItemKind::TableLeaf) if version <= limit && wanted(id) => {
                    if let Some(entries) = Table::parse_leaf(payload) {
                        self.leaf(id, version, place, header.crc.get(), entries);
                    }
                }
                Some(ItemKind::Node) if wanted(id / LEAF_NIDS) => {
                    let newest = self.images.entry(id).or_insert((version, place));
                    if newest.0 < version {
                        *newest = (version, place);
                    }
                }
                _ => {}
            }
            at += len;
        }
        any
    }

    fn leaf(&mut self, id: u64, sequence: u64, place: Place, crc: u32, entries: Vec<Entry>) {
        if self.leaves.get(&id).is_some_and(|l| l.sequence >= sequence) {
            return;
        }
        let pointer = ItemPointer {
            place: U64::new(place.pack()),
            stamp: U64::new(crc as u64),
        };
        let found = FoundLeaf {
            pointer,
            sequence,
            entries,
        };
        self.leaves.insert(id, found);
    }

    /// The newest copy of a leaf page is not the last one: there are images that it does not know.
    pub fn is_outdated(&self, id: u64) -> bool {
        let first = id * LEAF_NIDS;
        let known = |nid: u64| {
            let leaf = self.leaves.get(&id);
            leaf.map_or(0, |leaf| leaf.entries[(nid - first) as usize].version)
        };
        let mut images = self.images.range(first..first + LEAF_NIDS);
        images.any(|(nid, (version, _))| *version > known(*nid))
    }

    /// The best entries for a lost leaf page, and how many have an image.
    pub fn entries_of(&self, id: u64) -> (Vec<Entry>, usize) {
        let stale = self.leaves.get(&id).map(|leaf| &leaf.entries);
        let first = id * LEAF_NIDS;
        let images = self.images.range(first..first + LEAF_NIDS);
        let newest = images.map(|(_, (version, _))| *version);
        let newest = newest.chain(stale.into_iter().flatten().map(|entry| entry.version));
        let floor = (newest.max().unwrap_or(0) / VERSION_STEP + 1) * VERSION_STEP;
        let floor = floor.min(COUNTER_MAX);
        let mut found = 0;
        let entry = |nid: u64| {
            let old = stale.map_or(Entry::default(), |list| list[(nid - first) as usize]);
            match self.images.get(&nid) {
                // The old page knows of its deletion.
                Some((version, _)) if old.place.is_none() && old.version > *version => {}
                Some((version, place)) => {
                    found += 1;
                    return Entry {
                        place: *place,
                        version: *version,
                    };
                }
                None => {}
            }
            Entry {
                place: Place::NONE,
                version: floor,
            }
        };
        let entries = (first..first + LEAF_NIDS).map(entry).collect();
        (entries, found)
    }
}

/// Everything in the ring that is a whole batch.
#[derive(Default)]
pub(super) struct Survey {
    pub mount_id: u64,
    pub checkpoint_sequence: u64,
    pub epoch: u64,
    /// Batches of the last mount: sequence number, ring offset, header.
    last: BTreeMap<u64, (u64, BatchHeader)>,
}

impl Survey {
    pub fn of(array: &Array) -> Result<Survey, SalvageError> {
        let mut ring = RingReader::new(array);
        let align = array.geometry().journal_align as u64;
        let mut survey = Survey::default();
        let mut offset = 0;
        while offset + BatchHeader::SIZE as u64 <= ring.size {
            if let Some(header) = ring.header(offset)?
                && header.is_countable(VERSION_MAX)
                && ring.is_whole(offset, &header)?
            {
                survey.note(offset, header);
                // Invariant 1, for batches.
                let size = BatchHeader::SIZE as u64 + header.len.get() as u64;
                offset += size.next_multiple_of(align);
            } else {
                offset += align;
            }
        }
        Ok(survey)
    }

    fn note(&mut self, offset: u64, header: BatchHeader) {
        let mount = header.mount_id.get();
        if mount > self.mount_id {
            self.mount_id = mount;
            self.last.clear();
        }
        let named = header.checkpoint_sequence.get();
        self.checkpoint_sequence = self.checkpoint_sequence.max(named);
        self.epoch = self.epoch.max(header.epoch.get());
        if mount == self.mount_id {
            self.last.insert(header.sequence.get(), (offset, header));
        }
    }

    /// Nothing to replay.
    pub fn no_run(&self, loss: Option<Damage>) -> Run {
        let end = Anchor {
            position: 0,
            sequence: self.last.keys().next_back().map_or(1, |s| s + 1),
            previous_crc: 0,
        };
        Run {
            start: end,
            end,
            next_epoch: self.epoch + 1,
            unconfirmed: false,
            vouched: Vec::new(),
            unread: Vec::new(),
            loss,
        }
    }

    /// The records of the unbroken run at the end of the last mount's batches, where no record
    /// says where the journal begins: what the images have already is told by versions.
    /// The run has no anchor: only what it says of data counts.
    pub fn last_run(&self, array: &Array) -> Result<(Run, Vec<Vec<u8>>), SalvageError> {
        let mut run = self.no_run(None);
        let mut batches: Vec<(BatchHeader, Vec<u8>)> = Vec::new();
        let mut ring = RingReader::new(array);
        let mut wanted: Option<(u64, u32)> = None;
        for (sequence, (offset, header)) in self.last.iter().rev() {
            let crc = header.crc.get();
            match wanted {
                Some((before, _)) if before != *sequence => break,
                // Recovery has cut off those behind it, and put this one in the place of the first.
                Some((_, before)) if before != crc => batches.clear(),
                _ => {}
            }
            let mut records = vec![0; header.len.get() as usize];
            ring.read(offset + BatchHeader::SIZE as u64, &mut records)?;
            batches.push((*header, records));
            wanted = Some((sequence.wrapping_sub(1), header.previous_crc.get()));
        }
        batches.reverse();
        let newest = |header: &BatchHeader| header.durable_sequence.get();
        let durable = batches.iter().map(|(header, _)| newest(header)).max();
        let mut whole = |(header, records): &(BatchHeader, Vec<u8>)| {
            let unsure = header.checked.get() > 0 && Some(header.sequence.get()) > durable;
            // Records that say nothing sensible are met when they are replayed.
            let sums = unsure.then(|| sums_of(records).unwrap_or_default());
            sums.is_none_or(|sums| {
                let there = all_there(array, &sums, &mut run.unread).unwrap_or(true);
                run.vouched.extend(sums.into_iter().map(|(_, sum)| sum));
                there
            })
        };
        let whole = batches.iter().take_while(|batch| whole(batch)).count();
        batches.truncate(whole);
        let records = batches.into_iter().map(|(_, records)| records).collect();
        Ok((run, records))
    }
}

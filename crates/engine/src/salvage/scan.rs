//! Looking for things that nothing points at any more: table leaves and node images in segments,
//! batches in the journal's ring.
//!
//! Invariants:
//! 1. What lies inside a sound item or batch is its payload, whatever it looks like: a scan goes
//!    on behind it.
//! 2. What cannot be is not taken for anything: node ids, pages and space maps beyond what a table of this array can have.
//! 3. With a readable segment table only segments with live bytes are read, so what an
//!    interrupted checkpoint or repair left elsewhere is not taken for anything. A checkpoint that is cut off leaves some in segments with live
//!    bytes, too, behind these. Its table pages have a number that none with a record has (`recovery.rs`, invariant 4): later
//!    ones win. (One that only says where nodes have been moved, and that nobody has changed since, is the newest still; what points at the one before
//!    counts as uncertain then.) Its images are not told from others: they can be of changes that never were durable, and a node that has come to fewer
//!    versions since is found as it was there. What would tell is not in an item (`docs/durability.md`, what a repair cannot know).

use super::{SalvageError, VERSION_STEP};
use crate::batches::{Run, all_there, each_whole, sums_of};
use crate::content::Content;
use crate::error::Error;
use crate::journal::Anchor;
use crate::ring_reader::{Gaps, RingReader};
use crate::segments::SegmentId;
use crate::store::Store;
use crate::table::anew::Found;
use crate::table::{Entry, LostPages, Table};
use device::{AlignedBuf, Array};
use format::item::{self, ITEM_ALIGN, ItemKind, ItemPointer, Place};
use format::journal::BatchHeader;
use format::table::{
    LEAF_NIDS, MAP_REGIONS, NID_LIMIT, REGION_LEAVES, REGION_NIDS, SPACE_MAP_FIRST,
};
use format::{COUNTER_FOUND_MAX, Damage, Nid, U64};
use std::collections::{BTreeMap, BTreeSet};

/// What is looked for.
pub(super) struct Wanted<'l> {
    /// Of the whole table; else of what is lost.
    pub all: bool,
    pub lost: &'l LostPages,
}

impl Wanted<'_> {
    pub fn leaf(&self, id: u64) -> bool {
        self.all || self.lost.hides(id)
    }

    fn region(&self, id: u64) -> bool {
        self.lost.maps.contains_key(&(id / MAP_REGIONS))
    }
}

/// A copy of a leaf page.
pub(super) struct FoundLeaf {
    pub found: Found,
    pub entries: Vec<Entry>,
}

/// The best that there is for a lost leaf page.
pub(super) struct Substitute {
    pub entries: Vec<Entry>,
    /// How many have an image.
    pub found: usize,
    /// Nodes of which only older states were found than there have been, and what tells.
    pub stale: Vec<(Nid, String)>,
}

/// What segments hold of the wanted part of the table.
#[derive(Default)]
pub(super) struct Scan {
    /// The newest copy of each leaf page.
    pub leaves: BTreeMap<u64, FoundLeaf>,
    /// The newest copy of each region page below a lost map page.
    pub regions: BTreeMap<u64, Found>,
    /// The newest image of each node: its version, and where it was found first.
    pub images: BTreeMap<u64, (u64, Place)>,
    /// Other places of it: cleaning moves images, and leaves what it has moved where it was.
    copies: BTreeMap<u64, Vec<Place>>,
    /// Segments that another scan would read, or find something in.
    pub occupied: BTreeSet<SegmentId>,
    /// Nodes can have the nids below this.
    nids: u64,
    seed: u32,
}

impl Scan {
    /// Reads the segments with `live` bytes; without a segment table, all there could be: what a device does not return of chunks that are
    /// known to hold `data` is nothing that anybody needs. `limit` is the newest checkpoint that counts.
    pub fn run<C: Content>(
        store: &Store<C>,
        live: Option<&BTreeMap<u32, Vec<u32>>>,
        data: &BTreeSet<u32>,
        limit: u64,
        wanted: &Wanted<'_>,
    ) -> Result<Scan, SalvageError> {
        let geometry = store.array.geometry();
        let per_chunk = geometry.segments_per_chunk() as u64;
        let mut scan = Scan {
            nids: SPACE_MAP_FIRST + u64::from(geometry.chunk_count),
            seed: store.array.checksum_seed(),
            ..Scan::default()
        };
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
                match store.array.read(start, &mut buf) {
                    Ok(()) => {}
                    Err(_) if live.is_none() && data.contains(&chunk) => continue,
                    Err(error) => {
                        let why = format!("segment at byte {start}: {error}");
                        return Err(SalvageError::Unreadable(why));
                    }
                }
                let found = scan.segment(&buf, start, limit, wanted);
                if found || listed == Some(true) {
                    scan.occupied.insert(id);
                }
            }
        }
        Ok(scan)
    }

    /// True when there is any item.
    fn segment(&mut self, bytes: &[u8], start: u64, limit: u64, wanted: &Wanted<'_>) -> bool {
        let mut at = 0;
        let mut any = false;
        while let Some(next) = item::next(bytes, at) {
            at = next;
            let Ok((header, payload)) = item::decode(self.seed, &bytes[at..]) else {
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
                // It might be in the data of a file.
                _ if version > COUNTER_FOUND_MAX => {}
                Some(ItemKind::TableLeaf)
                    if version <= limit && id < NID_LIMIT / LEAF_NIDS && wanted.leaf(id) =>
                {
                    let entries = Table::parse_leaf(payload).filter(|entries| {
                        entries
                            .iter()
                            .all(|entry| entry.version <= COUNTER_FOUND_MAX)
                    });
                    if let Some(entries) = entries {
                        let found = found(version, place, header.crc.get(), 0);
                        self.leaf(id, FoundLeaf { found, entries });
                    }
                }
                Some(ItemKind::TableRegion)
                    if version <= limit && id < NID_LIMIT / REGION_NIDS && wanted.region(id) =>
                {
                    if let Some(free) = Table::free_in_region(payload) {
                        self.region(id, found(version, place, header.crc.get(), free));
                    }
                }
                Some(ItemKind::Node) if id < self.nids && wanted.leaf(id / LEAF_NIDS) => {
                    self.image(id, version, place);
                }
                _ => {}
            }
            at += len;
        }
        any
    }

    fn image(&mut self, nid: u64, version: u64, place: Place) {
        match self.images.get(&nid) {
            Some((newest, _)) if *newest > version => {}
            Some((newest, _)) if *newest == version => {
                self.copies.entry(nid).or_default().push(place);
            }
            _ => {
                self.images.insert(nid, (version, place));
                self.copies.remove(&nid);
            }
        }
    }

    /// Whether the newest image of a node lies there, too.
    fn lies_at(&self, nid: u64, place: Place) -> bool {
        let first = self.images.get(&nid).map(|(_, first)| first);
        let others = self.copies.get(&nid).into_iter().flatten();
        first.into_iter().chain(others).any(|found| *found == place)
    }

    fn leaf(&mut self, id: u64, leaf: FoundLeaf) {
        let newest = self.leaves.get(&id).map(|l| l.found.sequence);
        if newest.is_none_or(|newest| newest < leaf.found.sequence) {
            self.leaves.insert(id, leaf);
        }
    }

    fn region(&mut self, id: u64, page: Found) {
        let newest = self.regions.get(&id).map(|found| found.sequence);
        if newest.is_none_or(|newest| newest < page.sequence) {
            self.regions.insert(id, page);
        }
    }

    /// The copies of leaf pages of a region.
    pub fn leaves_of(&self, region: u64) -> impl Iterator<Item = (u64, &FoundLeaf)> {
        let first = region * REGION_LEAVES;
        let leaves = self.leaves.range(first..first + REGION_LEAVES);
        leaves.map(|(id, leaf)| (*id, leaf))
    }

    /// The copies of region pages of a map page.
    pub fn regions_of(&self, map: u64) -> impl Iterator<Item = (u64, Found)> {
        let first = map * MAP_REGIONS;
        let regions = self.regions.range(first..first + MAP_REGIONS);
        regions.map(|(id, found)| (*id, *found))
    }

    /// The newest copy of a leaf page is not the last one: there are images that it does not know, or that have been moved since.
    pub fn is_outdated(&self, id: u64) -> bool {
        let first = id * LEAF_NIDS;
        let leaf = self.leaves.get(&id);
        let known = |nid: u64| {
            leaf.map_or(Entry::default(), |leaf| {
                leaf.entries[(nid - first) as usize]
            })
        };
        let mut images = self.images.range(first..first + LEAF_NIDS);
        images.any(|(nid, (version, _))| {
            let known = known(*nid);
            let moved = || !known.place.is_none() && !self.lies_at(*nid, known.place);
            *version > known.version || *version == known.version && moved()
        })
    }

    /// The newest image of each node, unless the older copy of the leaf page knows of a later state.
    pub fn entries_of(&self, id: u64) -> Substitute {
        let older = self.leaves.get(&id).map(|leaf| &leaf.entries);
        let first = id * LEAF_NIDS;
        let images = self.images.range(first..first + LEAF_NIDS);
        let newest = images.map(|(_, (version, _))| *version);
        let newest = newest.chain(older.into_iter().flatten().map(|entry| entry.version));
        let floor = (newest.max().unwrap_or(0) / VERSION_STEP + 1) * VERSION_STEP;
        let (mut found, mut stale) = (0, Vec::new());
        let mut entry = |nid: u64| {
            let old = older.map_or(Entry::default(), |list| list[(nid - first) as usize]);
            match self.images.get(&nid) {
                Some((version, place)) if *version >= old.version => {
                    found += 1;
                    // Where the older page says, if it is there still: it may have been moved since.
                    let named = *version == old.version && self.lies_at(nid, old.place);
                    return Entry {
                        place: if named { old.place } else { *place },
                        version: *version,
                    };
                }
                Some((version, _)) if !old.place.is_none() => {
                    let known = old.version;
                    let what = format!("version {known} is lost, and {version} found; dropped");
                    stale.push((Nid(nid), what));
                }
                // Or it is deleted.
                _ => {}
            }
            Entry {
                place: Place::NONE,
                version: floor,
            }
        };
        let entries = (first..first + LEAF_NIDS).map(&mut entry).collect();
        Substitute {
            entries,
            found,
            stale,
        }
    }
}

fn found(sequence: u64, place: Place, crc: u32, free: u64) -> Found {
    let pointer = ItemPointer {
        place: U64::new(place.pack()),
        stamp: U64::new(u64::from(crc) | free << 32),
    };
    Found { pointer, sequence }
}

/// The newest mount that a whole batch in the ring is of; 0: none. And what of the ring devices do not return.
pub(crate) fn newest_mount(array: &Array) -> Result<(u64, Gaps), Error> {
    let survey = Survey::of(array)?;
    Ok((survey.mount_id, survey.gaps))
}

/// Everything in the ring that is a whole batch.
#[derive(Default)]
pub(super) struct Survey {
    pub mount_id: u64,
    pub checkpoint_sequence: u64,
    pub epoch: u64,
    /// Batches of the last mount: sequence number, ring offset, header.
    last: BTreeMap<u64, (u64, BatchHeader)>,
    /// What of the ring devices do not return: there may be more.
    pub gaps: Gaps,
}

impl Survey {
    pub fn of(array: &Array) -> Result<Survey, Error> {
        let mut survey = Survey::default();
        // Invariant 1, for batches.
        survey.gaps = each_whole(array, COUNTER_FOUND_MAX, |at, header| {
            survey.note(at, header)
        })?;
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
            doubt: None,
            gaps: self.gaps.clone(),
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
            let start = offset + BatchHeader::SIZE as u64;
            ring.read(start, &mut records)?;
            if let Some(error) = ring.gap(start, records.len() as u64) {
                return Err(SalvageError::Unreadable(error.to_string()));
            }
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

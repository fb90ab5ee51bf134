//! The node table: nid → place and version of the newest checkpointed image.
//!
//! On disk a copy-on-write radix tree (see [`format::table`]); in memory its map pages, and a
//! bounded number of region pages and leaf pages, each about as large as a block: a clock hand
//! evicts those that were not looked at since it last passed, and all that it meets, in turn, when there are [`KEPT_SHARE`] times as many as should be.
//!
//! Invariants:
//! 1. Only the checkpoint (and recovery, before it) changes entries; everybody reads.
//! 2. An entry's version never falls.
//! 3. A leaf that is dirty, or given to a checkpoint that may not have written it yet, is not
//!    evicted.
//! 4. A region's bitmap has exactly the bits of entries with a place.
//! 5. A region is evicted only when none of its leaves is in memory and nobody refers to it. So
//!    while it is not in memory, the map page's pointer to its page does not change; one that was
//!    read enters memory only if that still is the pointer it was read by, checked under the lock
//!    of `regions`.
//! 6. A leaf of which a node has been marked as changed is in memory, and is not evicted before the checkpoint has set the
//!    node's entry. An operation brings it there before it changes anything ([`Table::prepare`]): so a page that no
//!    device returns is an error for that operation, and not for the checkpoint, which cannot go on without it. That holds for as
//!    many pages as memory may take ([`KEPT_SHARE`]); others, and one that the clock hand takes before the operation has marked
//!    its node, the checkpoint reads again.

pub(crate) mod anew;
mod changed;
mod salvage;
#[cfg(test)]
mod tests;

pub(crate) use changed::ChangedLeaves;
pub(crate) use salvage::LostPages;

use crate::blocks::Blocks;
use crate::error::Error;
use crate::items::{ReadItem, read_page};
use crate::nids::LeafNids;
use crate::node::NidMap;
use base::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use base::sync::{Arc, Mutex, rank};
use device::Array;
use format::checkpoint::CheckpointRecord;
use format::item::{ItemKind, ItemPointer, Place};
use format::table::{
    LEAF_NIDS, LeafEntries, MAP_REGIONS, NID_LIMIT, NodeEntry, REGION_BITMAP_BYTES, REGION_LEAVES,
    REGION_NIDS, REGION_PAGE_BYTES, ROOTS, decode_leaf, encode_leaf,
};
use format::{Damage, Nid, U64};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use zerocopy::{FromBytes, IntoBytes};

const BITMAP_WORDS: usize = REGION_BITMAP_BYTES / 8;
type Leaf = Box<LeafEntries>;

/// What the table says of a nid. Version 0: never used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Entry {
    pub place: Place,
    pub version: u64,
}

/// A page that the checkpoint wrote: its new pointer's place and checksum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    pub place: Place,
    pub crc: u32,
}

/// Where the checkpoint puts pages, and accounts for the ones they replace.
pub(crate) trait PageSink {
    fn write(&mut self, kind: ItemKind, id: u64, payload: &[u8]) -> Result<Written, Error>;
    fn discard(&mut self, old: Place);
}

/// What a region page holds.
pub(crate) struct RegionPage {
    pub pointers: [ItemPointer; REGION_LEAVES as usize],
    /// Bit set: the nid has an image.
    pub bitmap: Box<[u64; BITMAP_WORDS]>,
}

#[derive(Debug)]
struct Region {
    state: Mutex<RegionState>,
}

/// A region with changed pages, which keeps it in memory while they are written, in parts.
#[derive(Debug)]
pub(crate) struct DirtyRegion {
    index: u64,
    region: Arc<Region>,
    /// Bit i: leaf i has changed.
    leaves: u64,
    /// Of these, how many are not written.
    left: AtomicU32,
}

impl DirtyRegion {
    /// The changed leaves.
    pub fn leaf_ids(&self) -> impl Iterator<Item = u64> {
        let changed = (0..REGION_LEAVES).filter(|leaf| self.leaves & 1 << leaf != 0);
        changed.map(|leaf| self.index * REGION_LEAVES + leaf)
    }

    /// Changed leaves of each part, at most so many.
    pub fn parts(&self, most: usize) -> Vec<u64> {
        let leaves: Vec<u64> = (0..REGION_LEAVES)
            .map(|leaf| self.leaves & 1 << leaf)
            .collect();
        let changed: Vec<u64> = leaves.into_iter().filter(|leaf| *leaf != 0).collect();
        let part = |leaves: &[u64]| leaves.iter().fold(0, |all, leaf| all | leaf);
        changed.chunks(most.max(1)).map(part).collect()
    }
}

#[derive(Debug)]
struct RegionState {
    pointers: [ItemPointer; REGION_LEAVES as usize],
    bitmap: Box<[u64; BITMAP_WORDS]>,
    leaves: [Option<Leaf>; REGION_LEAVES as usize],
    /// Bit i: leaf i differs from the devices.
    dirty: u64,
    /// Bit i: leaf i was given to the running checkpoint, which may not have written it yet.
    writing: u64,
    /// Bit i: leaf i was looked at since the clock hand passed.
    recent: u64,
}

impl RegionState {
    fn empty() -> RegionState {
        RegionState {
            pointers: [ItemPointer::zeroed(); REGION_LEAVES as usize],
            bitmap: Box::new([0; BITMAP_WORDS]),
            leaves: [const { None }; REGION_LEAVES as usize],
            dirty: 0,
            writing: 0,
            recent: 0,
        }
    }

    /// Evicts a leaf if it may be, and was not looked at lately, or is to go nevertheless.
    fn evict(&mut self, leaf: usize, any: bool) -> bool {
        let bit = 1 << leaf;
        let recent = self.recent & bit != 0;
        self.recent &= !bit;
        let evicts = (any || !recent) && (self.dirty | self.writing) & bit == 0;
        if evicts {
            self.leaves[leaf] = None;
        }
        evicts
    }

    /// The region may be evicted as far as its leaves go: those that are dirty or being written
    /// are in memory (invariant 3).
    fn is_evictable(&self) -> bool {
        self.leaves.iter().all(Option::is_none)
    }
}

/// The region pointers of one map page.
type MapPage = Box<[ItemPointer; MAP_REGIONS as usize]>;

#[derive(Debug)]
struct Maps {
    /// Those in use.
    pages: BTreeMap<u64, MapPage>,
    /// Those that differ from the devices, whether or not a region below them does.
    changed: BTreeSet<u64>,
    roots: [ItemPointer; ROOTS as usize],
}

#[derive(Debug)]
pub(crate) struct Table {
    array: std::sync::Arc<Array>,
    /// Where pages are read from that come to memory.
    pub blocks: Blocks,
    /// Invariant 6.
    pub changed: Arc<ChangedLeaves>,
    maps: Mutex<Maps>,
    regions: Mutex<NidMap<Arc<Region>>>,
    /// The clock: pages in memory in the order the hand meets them.
    loaded: Mutex<VecDeque<Page>>,
    page_count: AtomicUsize,
    page_limit: usize,
    /// A repair has pages in memory that are nowhere else.
    keeps_regions: bool,
    nodes: AtomicU64,
}

/// A page that can be evicted.
#[derive(Clone, Copy, Debug)]
enum Page {
    Region(u64),
    Leaf(u64, usize),
}

/// How a page is read: from memory, if it is there, or from its device.
type Reading = fn(&Blocks, Place, ItemKind, u64, u32) -> Result<Result<ReadItem, Damage>, Error>;

/// Pages that one that comes may push out, or that are looked at for that.
const LOOKS: usize = 8;
/// How many times as many pages as are kept in memory otherwise may be there for the next checkpoint, or because all are in use.
pub(crate) const KEPT_SHARE: usize = 2;

fn split(nid: Nid) -> (u64, usize, usize) {
    let region = nid.0 / REGION_NIDS;
    let within = nid.0 % REGION_NIDS;
    (
        region,
        (within / LEAF_NIDS) as usize,
        (within % LEAF_NIDS) as usize,
    )
}

fn read_map(
    array: &Array,
    index: u64,
    root: &ItemPointer,
) -> Result<Result<MapPage, Damage>, Error> {
    let crc = root.stamp.get() as u32;
    let read = read_page(array, root.place(), ItemKind::TableMap, index, crc)?;
    Ok(read.and_then(|read| {
        <[ItemPointer; MAP_REGIONS as usize]>::read_from_bytes(read.payload())
            .map(Box::new)
            .map_err(|_| Damage::new("node table", "a map page has the wrong size"))
    }))
}

fn damaged(what: String) -> Error {
    Error::Damaged(Damage::new("node table", what))
}

impl Table {
    /// An empty table.
    pub fn new(array: std::sync::Arc<Array>, page_limit: usize) -> Table {
        let maps = Maps {
            pages: BTreeMap::new(),
            changed: BTreeSet::new(),
            roots: [ItemPointer::zeroed(); ROOTS as usize],
        };
        Table {
            blocks: Blocks::new(std::sync::Arc::clone(&array)),
            changed: Arc::new(ChangedLeaves::new()),
            array,
            maps: Mutex::new(rank::TABLE_MAPS, maps),
            regions: Mutex::new(rank::TABLE_REGIONS, NidMap::default()),
            loaded: Mutex::new(rank::LEAF, VecDeque::new()),
            page_count: AtomicUsize::new(0),
            page_limit: page_limit.max(64),
            keeps_regions: false,
            nodes: AtomicU64::new(0),
        }
    }

    /// Nids with an image.
    pub fn node_count(&self) -> u64 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// The table that a checkpoint record points at; reads its map pages.
    pub fn open(
        array: std::sync::Arc<Array>,
        record: &CheckpointRecord,
        page_limit: usize,
    ) -> Result<Table, Error> {
        let table = Table::new(array, page_limit);
        table
            .nodes
            .store(record.node_count.get(), Ordering::Relaxed);
        let mut maps = table.maps.lock();
        maps.roots = record.roots;
        for (index, root) in (0..).zip(&record.roots) {
            if root.place().is_none() {
                continue;
            }
            let page = read_map(&table.array, index, root)?;
            let page = page.map_err(|d| damaged(format!("map page {index}: {d}")))?;
            maps.pages.insert(index, page);
        }
        drop(maps);
        Ok(table)
    }

    /// Free nids of each region from 0 to `count`, as checkpointed; reads no table page.
    pub fn free_counts(&self, count: u32) -> Vec<u32> {
        let maps = self.maps.lock();
        let free = |region: u64| match maps.pages.get(&(region / MAP_REGIONS)) {
            Some(page) => {
                let pointer = &page[(region % MAP_REGIONS) as usize];
                match pointer.place().is_none() {
                    true => REGION_NIDS as u32,
                    false => (pointer.stamp.get() >> 32) as u32,
                }
            }
            None => REGION_NIDS as u32,
        };
        (0..count as u64).map(free).collect()
    }

    fn region(&self, index: u64) -> Result<Arc<Region>, Error> {
        loop {
            if let Some(region) = self.regions.lock().get(&index) {
                return Ok(Arc::clone(region));
            }
            let pointer = self.region_pointer(index);
            let read = self.read_region(index, pointer, Blocks::page);
            let mut regions = self.regions.lock();
            if let Some(region) = regions.get(&index) {
                return Ok(Arc::clone(region));
            }
            if !same(&self.region_pointer(index), &pointer) {
                // It was in memory, changed, and evicted again meanwhile (invariant 5).
                continue;
            }
            let region = Arc::new(Region {
                state: Mutex::keyed(rank::TABLE, index, read?),
            });
            regions.insert(index, Arc::clone(&region));
            drop(regions);
            if !self.keeps_regions {
                self.note_loaded(Page::Region(index));
            }
            return Ok(region);
        }
    }

    /// The pointer to a region's page that the next checkpoint would write.
    fn region_pointer(&self, index: u64) -> ItemPointer {
        let maps = self.maps.lock();
        let page = maps.pages.get(&(index / MAP_REGIONS));
        page.map_or(ItemPointer::zeroed(), |p| p[(index % MAP_REGIONS) as usize])
    }

    fn read_region(
        &self,
        index: u64,
        pointer: ItemPointer,
        read: Reading,
    ) -> Result<RegionState, Error> {
        let mut state = RegionState::empty();
        if pointer.place().is_none() {
            return Ok(state);
        }
        let crc = pointer.stamp.get() as u32;
        let kind = ItemKind::TableRegion;
        let read = read(&self.blocks, pointer.place(), kind, index, crc)?;
        let read = read.map_err(|d| damaged(format!("region page {index}: {d}")))?;
        let payload = read.payload();
        if payload.len() != REGION_PAGE_BYTES {
            return Err(damaged(format!("region page {index} has the wrong size")));
        }
        let (pointers, bitmap) = payload.split_at(REGION_LEAVES as usize * 16);
        state.pointers.as_mut_bytes().copy_from_slice(pointers);
        for (word, bytes) in state.bitmap.iter_mut().zip(bitmap.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().expect("chunks of 8"));
        }
        Ok(state)
    }

    /// Runs `look` on a loaded leaf, reading it first when it is not in memory.
    fn with_leaf<T>(
        &self,
        region_index: u64,
        leaf: usize,
        look: impl FnOnce(&mut RegionState) -> T,
    ) -> Result<T, Error> {
        let region = self.region(region_index)?;
        loop {
            let mut state = region.state.lock();
            state.recent |= 1 << leaf;
            if state.leaves[leaf].is_some() {
                return Ok(look(&mut state));
            }
            let pointer = state.pointers[leaf];
            if pointer.place().is_none() {
                state.leaves[leaf] = Some(empty_leaf());
                let result = look(&mut state);
                drop(state);
                self.note_loaded(Page::Leaf(region_index, leaf));
                return Ok(result);
            }
            drop(state);
            let read = self.read_leaf(region_index, leaf, pointer, Blocks::page);
            let mut state = region.state.lock();
            if !same(&state.pointers[leaf], &pointer) {
                // A checkpoint moved the page, and its old place may hold something else.
                continue;
            }
            let fresh = read?;
            if state.leaves[leaf].is_none() {
                state.leaves[leaf] = Some(fresh);
                let result = look(&mut state);
                drop(state);
                self.note_loaded(Page::Leaf(region_index, leaf));
                return Ok(result);
            }
        }
    }

    fn read_leaf(
        &self,
        region: u64,
        leaf: usize,
        pointer: ItemPointer,
        read: Reading,
    ) -> Result<Leaf, Error> {
        let id = region * REGION_LEAVES + leaf as u64;
        let crc = pointer.stamp.get() as u32;
        let read = read(&self.blocks, pointer.place(), ItemKind::TableLeaf, id, crc)?;
        let read = read.map_err(|d| damaged(format!("leaf page {id}: {d}")))?;
        decode_leaf(read.payload()).map_err(|d| damaged(format!("leaf page {id}: {d}")))
    }

    /// Keeps the number of pages in memory bounded (invariants 3 and 5).
    fn note_loaded(&self, page: Page) {
        let mut count = self.page_count.fetch_add(1, Ordering::Relaxed) + 1;
        self.loaded.lock().push_back(page);
        for _ in 0..LOOKS {
            if count <= self.page_limit {
                return;
            }
            let Some(victim) = self.loaded.lock().pop_front() else {
                return;
            };
            if self.evict(victim, count > KEPT_SHARE * self.page_limit) {
                count = self.page_count.fetch_sub(1, Ordering::Relaxed) - 1;
            } else {
                self.loaded.lock().push_back(victim);
            }
        }
    }

    /// `any`: also a leaf that the next checkpoint will need, or somebody looked at lately. Else there were no bound where all of them are
    /// looked at while the hand goes round once, as by names made in a large folder.
    fn evict(&self, page: Page, any: bool) -> bool {
        let (Page::Region(index) | Page::Leaf(index, _)) = page;
        let mut regions = self.regions.lock();
        let Some(region) = regions.get(&index) else {
            return true;
        };
        let Some(mut state) = region.state.try_lock() else {
            return false;
        };
        match page {
            Page::Leaf(_, leaf) => {
                let kept = self.changed.keeps(index * REGION_LEAVES + leaf as u64);
                (any || !kept) && state.evict(leaf, any)
            }
            // References are given out under the lock of `regions`.
            Page::Region(_) => {
                let evicted = Arc::strong_count(region) == 1 && state.is_evictable();
                drop(state);
                evicted && regions.remove(&index).is_some()
            }
        }
    }

    pub fn entry(&self, nid: Nid) -> Result<Entry, Error> {
        if nid.0 >= NID_LIMIT {
            return Ok(Entry::default());
        }
        let (region, leaf, slot) = split(nid);
        self.with_leaf(region, leaf, |state| entry_of(state, leaf, slot))
    }

    /// Before a node's first change since a checkpoint (invariant 6).
    pub fn prepare(&self, nid: Nid) -> Result<(), Error> {
        if nid.0 >= NID_LIMIT {
            return Ok(());
        }
        let (region, leaf, _) = split(nid);
        if self.changed.has(region * REGION_LEAVES + leaf as u64) {
            return Ok(());
        }
        self.with_leaf(region, leaf, |_| ())
    }

    /// Nids whose entries cannot be read now for the same cause as this one's, and that cause. `None`: it can be read.
    pub fn unread_with(&self, nid: Nid) -> Option<(Range<u64>, Error)> {
        let (region, leaf, _) = split(nid);
        let (first, len, error) = match self.region(region) {
            Err(error) => (region * REGION_NIDS, REGION_NIDS, error),
            Ok(_) => {
                let first = nid.0 - nid.0 % LEAF_NIDS;
                (
                    first,
                    LEAF_NIDS,
                    self.with_leaf(region, leaf, |_| ()).err()?,
                )
            }
        };
        Some((first..first + len, error))
    }

    /// The versions of nids from `first`, a leaf's, on that have a bit in `wanted`.
    pub fn versions(
        &self,
        first: Nid,
        wanted: &LeafNids,
        versions: &mut [u64; LEAF_NIDS as usize],
    ) -> Result<(), Error> {
        let (region, leaf, _) = split(first);
        self.with_leaf(region, leaf, |state| {
            let page = state.leaves[leaf].as_ref().expect("with_leaf loads it");
            for (i, version) in versions.iter_mut().enumerate() {
                if wanted[i / 64] >> (i % 64) & 1 == 1 {
                    *version = page[i].version;
                }
            }
        })
    }

    /// Whether `entry` is still what the table says; false also when that would need a read.
    pub fn still(&self, nid: Nid, entry: Entry) -> bool {
        let (region, leaf, slot) = split(nid);
        let Some(region) = self.regions.lock().get(&region).cloned() else {
            return false;
        };
        let state = region.state.lock();
        state.leaves[leaf].is_some() && entry_of(&state, leaf, slot) == entry
    }

    /// Records captured images and deletions of nids of one leaf; returns the places they replace.
    /// `None`: the entry has a newer version, and did not change.
    pub fn set(&self, entries: &[(Nid, Entry)]) -> Result<Vec<Option<Place>>, Error> {
        let Some((first, _)) = entries.first() else {
            return Ok(Vec::new());
        };
        let (region, leaf, _) = split(*first);
        let mut more = 0;
        let replaced = self.with_leaf(region, leaf, |state| {
            let one = |(nid, entry): &(Nid, Entry)| {
                let (region_of, leaf_of, slot) = split(*nid);
                assert_eq!((region_of, leaf_of), (region, leaf), "all are of one leaf");
                let before = set_slot(state, leaf, slot, *entry)?;
                more += !entry.place.is_none() as i64 - !before.is_none() as i64;
                Some(before)
            };
            entries.iter().map(one).collect()
        })?;
        if more != 0 {
            // Wraps as a subtraction does.
            self.nodes.fetch_add(more as u64, Ordering::Relaxed);
        }
        Ok(replaced)
    }

    /// Regions with changed pages, in order; for one checkpoint at a time.
    pub fn dirty_regions(&self) -> Vec<DirtyRegion> {
        let regions: Vec<(u64, Arc<Region>)> = {
            let regions = self.regions.lock();
            regions.iter().map(|(i, r)| (*i, Arc::clone(r))).collect()
        };
        let dirty = |(index, region): (u64, Arc<Region>)| {
            let leaves = region.state.lock().dirty;
            (leaves != 0).then(|| DirtyRegion {
                index,
                region,
                leaves,
                left: AtomicU32::new(leaves.count_ones()),
            })
        };
        let mut dirty: Vec<DirtyRegion> = regions.into_iter().filter_map(dirty).collect();
        dirty.sort_unstable_by_key(|one| one.index);
        dirty
    }

    /// What [`write_part`] gave to sinks for these is on the devices' side of them now: their
    /// leaves may be evicted and read again.
    pub fn written(&self, regions: &[DirtyRegion]) {
        for one in regions {
            one.region.state.lock().writing = 0;
        }
    }

    /// Enters the pages that [`write_part`] wrote, writes the map pages above, and returns the new roots.
    pub fn write_maps(
        &self,
        written: Vec<(u64, ItemPointer)>,
        sink: &mut dyn PageSink,
    ) -> Result<[ItemPointer; ROOTS as usize], Error> {
        let changed = {
            let mut maps = self.maps.lock();
            for (index, pointer) in written {
                let map = index / MAP_REGIONS;
                let page = maps
                    .pages
                    .entry(map)
                    .or_insert_with(|| Box::new([ItemPointer::zeroed(); MAP_REGIONS as usize]));
                let slot = &mut page[(index % MAP_REGIONS) as usize];
                sink.discard(slot.place());
                *slot = pointer;
                maps.changed.insert(map);
            }
            maps.changed.clone()
        };
        for map in changed {
            let page = self.maps.lock().pages[&map].clone();
            let written = sink.write(ItemKind::TableMap, map, page.as_bytes())?;
            let mut maps = self.maps.lock();
            maps.changed.remove(&map);
            let root = &mut maps.roots[map as usize];
            sink.discard(root.place());
            *root = pointer_to(written, 0);
        }
        Ok(self.maps.lock().roots)
    }

    /// Pages in memory.
    #[cfg(test)]
    fn pages(&self) -> usize {
        let regions: Vec<Arc<Region>> = self.regions.lock().values().cloned().collect();
        let leaves = |region: &Arc<Region>| region.state.lock().leaves.iter().flatten().count();
        regions.len() + regions.iter().map(leaves).sum::<usize>()
    }

    /// Pointers to the region pages of the last checkpoint, with their regions.
    pub fn region_pointers(&self) -> Vec<(u64, ItemPointer)> {
        let mut all = Vec::new();
        for (map, pointers) in self.map_pages() {
            let used = (0..).zip(pointers.iter());
            let used = used.filter(|(_, p)| !p.place().is_none());
            all.extend(used.map(|(i, p)| (map * MAP_REGIONS + i, *p)));
        }
        all
    }

    /// Regions that have leaf pages on the devices, with the pointers to their own pages: none,
    /// for a region that a repair put together.
    pub fn regions_on_devices(&self) -> Vec<(u64, ItemPointer)> {
        let mut all: BTreeMap<u64, ItemPointer> = self.region_pointers().into_iter().collect();
        let regions: Vec<(u64, Arc<Region>)> = {
            let regions = self.regions.lock();
            regions.iter().map(|(i, r)| (*i, Arc::clone(r))).collect()
        };
        for (index, region) in regions {
            let state = region.state.lock();
            if state.pointers.iter().any(|p| !p.place().is_none()) {
                all.entry(index).or_insert(ItemPointer::zeroed());
            }
        }
        all.into_iter().collect()
    }

    /// Pointers to the map pages of the last checkpoint.
    pub fn map_pointers(&self) -> Vec<(u64, ItemPointer)> {
        let roots = self.maps.lock().roots;
        let used = (0..).zip(roots).filter(|(_, p)| !p.place().is_none());
        used.collect()
    }

    /// A region's leaf pointers and bitmap.
    pub fn region_page(&self, index: u64) -> Result<RegionPage, Error> {
        let region = self.region(index)?;
        let state = region.state.lock();
        Ok(RegionPage {
            pointers: state.pointers,
            bitmap: state.bitmap.clone(),
        })
    }

    /// A region's page as the devices have it; it does not get into memory.
    pub fn stored_region(&self, index: u64, pointer: ItemPointer) -> Result<RegionPage, Error> {
        let RegionState {
            pointers, bitmap, ..
        } = self.read_region(index, pointer, Blocks::stored_page)?;
        Ok(RegionPage { pointers, bitmap })
    }

    /// The entries of one leaf page, which need not be in memory and does not get there.
    pub fn leaf_entries(
        &self,
        region: u64,
        leaf: usize,
        pointer: ItemPointer,
    ) -> Result<Vec<Entry>, Error> {
        let page = self.read_leaf(region, leaf, pointer, Blocks::stored_page)?;
        Ok(page.iter().map(entry_from).collect())
    }

    fn map_pages(&self) -> Vec<(u64, MapPage)> {
        self.maps
            .lock()
            .pages
            .iter()
            .map(|(i, p)| (*i, p.clone()))
            .collect()
    }

    /// Whether the table names `place` for a page.
    pub fn names_page(&self, kind: ItemKind, id: u64, place: Place) -> Result<bool, Error> {
        Ok(match kind {
            ItemKind::TableLeaf if id < NID_LIMIT / LEAF_NIDS => {
                let region = self.region(id / REGION_LEAVES)?;
                let state = region.state.lock();
                state.pointers[(id % REGION_LEAVES) as usize].place() == place
            }
            ItemKind::TableRegion if id < NID_LIMIT / REGION_NIDS => {
                let maps = self.maps.lock();
                let page = maps.pages.get(&(id / MAP_REGIONS));
                page.map(|p| p[(id % MAP_REGIONS) as usize].place()) == Some(place)
            }
            ItemKind::TableMap if id < ROOTS => {
                self.maps.lock().roots[id as usize].place() == place
            }
            _ => false,
        })
    }

    /// Marks a page that the table names as changed, so that the next checkpoint rewrites it.
    /// Pages above leaves are rewritten along with any leaf below.
    pub fn touch_page(&self, kind: ItemKind, id: u64, place: Place) -> Result<(), Error> {
        if !self.names_page(kind, id, place)? {
            return Ok(());
        }
        let region = match kind {
            ItemKind::TableLeaf => id / REGION_LEAVES,
            ItemKind::TableMap => {
                let used = |p: &ItemPointer| !p.place().is_none();
                let first = self.maps.lock().pages[&id].iter().position(used);
                let Some(first) = first else { return Ok(()) };
                id * MAP_REGIONS + first as u64
            }
            _ => id,
        };
        let leaf = match kind {
            ItemKind::TableLeaf => Some((id % REGION_LEAVES) as usize),
            _ => {
                let found = self.region(region)?;
                let state = found.state.lock();
                state.pointers.iter().position(|p| !p.place().is_none())
            }
        };
        if let Some(leaf) = leaf {
            self.with_leaf(region, leaf, |state| state.dirty |= 1 << leaf)?;
        }
        Ok(())
    }

    /// The persisted bitmap of a region, for comparing with its leaves.
    pub fn bitmap(&self, region: u64) -> Result<Vec<u64>, Error> {
        Ok(self.region(region)?.state.lock().bitmap.to_vec())
    }
}

/// Sets an entry of a leaf that is in memory; returns the place that it replaces. `None`: it has a newer version.
fn set_slot(state: &mut RegionState, leaf: usize, slot: usize, entry: Entry) -> Option<Place> {
    let before = entry_of(state, leaf, slot);
    if before.version > entry.version {
        return None;
    }
    let page = state.leaves[leaf].as_mut().expect("with_leaf loads it");
    page[slot] = NodeEntry {
        place: match entry.place.is_none() {
            true => 0,
            false => entry.place.pack(),
        },
        version: entry.version,
    };
    state.dirty |= 1 << leaf;
    let bit = leaf * LEAF_NIDS as usize + slot;
    let word = &mut state.bitmap[bit / 64];
    match entry.place.is_none() {
        true => *word &= !(1 << (bit % 64)),
        false => *word |= 1 << (bit % 64),
    }
    Some(before.place)
}

/// Writes the leaves of a part of one region; with the last of its parts also the page that points at them, whose
/// pointer it returns. The sink may keep pages back; [`Table::written`] says when it has written them.
pub(crate) fn write_part(
    one: &DirtyRegion,
    leaves: u64,
    sink: &mut dyn PageSink,
) -> Result<Option<(u64, ItemPointer)>, Error> {
    let (index, region) = (one.index, &one.region);
    let mut payload = Vec::new();
    for leaf in (0..REGION_LEAVES as usize).filter(|l| leaves >> l & 1 == 1) {
        let id = index * REGION_LEAVES + leaf as u64;
        payload.clear();
        {
            // Only the checkpoint changes entries, so the image stays true while it is written.
            let state = region.state.lock();
            let page = state.leaves[leaf].as_deref();
            encode_leaf(page.expect("a dirty leaf is in memory"), &mut payload);
        }
        let written = sink.write(ItemKind::TableLeaf, id, &payload)?;
        let mut state = region.state.lock();
        sink.discard(state.pointers[leaf].place());
        state.pointers[leaf] = pointer_to(written, 0);
        state.dirty &= !(1 << leaf);
        state.writing |= 1 << leaf;
    }
    let written = leaves.count_ones();
    match one.left.fetch_sub(written, Ordering::AcqRel) == written {
        true => write_region(one, sink).map(Some),
        false => Ok(None),
    }
}

/// Writes the page that points at a region's leaves, all of which are written.
fn write_region(one: &DirtyRegion, sink: &mut dyn PageSink) -> Result<(u64, ItemPointer), Error> {
    let (index, region) = (one.index, &one.region);
    let (payload, free) = {
        let state = region.state.lock();
        encode_region(&state.pointers, &state.bitmap)
    };
    let written = sink.write(ItemKind::TableRegion, index, &payload)?;
    Ok((index, pointer_to(written, free)))
}

/// What a region page holds, and how many free nids the pointer to it says.
fn encode_region(
    pointers: &[ItemPointer; REGION_LEAVES as usize],
    bitmap: &[u64; BITMAP_WORDS],
) -> (Vec<u8>, u64) {
    let mut payload = Vec::with_capacity(REGION_PAGE_BYTES);
    payload.extend_from_slice(pointers.as_bytes());
    for word in bitmap {
        payload.extend_from_slice(&word.to_le_bytes());
    }
    let used = bitmap.iter().map(|w| u64::from(w.count_ones()));
    (payload, REGION_NIDS - used.sum::<u64>())
}

fn same(a: &ItemPointer, b: &ItemPointer) -> bool {
    a.as_bytes() == b.as_bytes()
}

fn empty_leaf() -> Leaf {
    Box::new([NodeEntry::default(); LEAF_NIDS as usize])
}

fn pointer_to(written: Written, free: u64) -> ItemPointer {
    ItemPointer {
        place: U64::new(written.place.pack()),
        stamp: U64::new(written.crc as u64 | free << 32),
    }
}

fn entry_of(state: &RegionState, leaf: usize, slot: usize) -> Entry {
    entry_from(&state.leaves[leaf].as_ref().expect("the caller loaded it")[slot])
}

fn entry_from(raw: &NodeEntry) -> Entry {
    Entry {
        place: Place::unpack(raw.place),
        version: raw.version,
    }
}

//! The node table as a repair sees it: what cannot be read is left out, noted, and later
//! replaced by what is found elsewhere. Everything here changes memory only; a checkpoint
//! writes it.

use super::{
    BITMAP_WORDS, Entry, Error, MapPage, Page, Region, RegionState, Table, empty_leaf, entry_from,
    entry_of, read_map, split,
};
use crate::blocks::Blocks;
use base::sync::{Arc, Mutex, rank};
use device::Array;
use format::checkpoint::CheckpointRecord;
use format::item::{ItemPointer, Place};
use format::table::{
    LEAF_NIDS, MAP_REGIONS, REGION_LEAVES, REGION_NIDS, REGION_PAGE_BYTES, SPACE_MAP_FIRST,
    decode_leaf,
};
use format::{Damage, Nid};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// Pages that the table names and that are not there, with the reasons, and what pointed at those that hide others.
#[derive(Debug, Default)]
pub(crate) struct LostPages {
    pub maps: BTreeMap<u64, (Damage, ItemPointer)>,
    pub regions: BTreeMap<u64, (Damage, ItemPointer)>,
    pub leaves: BTreeMap<u64, Damage>,
}

impl LostPages {
    pub fn is_empty(&self) -> bool {
        self.maps.is_empty() && self.regions.is_empty() && self.leaves.is_empty()
    }

    /// The leaf page is one of them, or is hidden by one of them.
    pub fn hides(&self, leaf: u64) -> bool {
        self.leaves.contains_key(&leaf) || self.hides_pointer(leaf)
    }

    /// The pointer to the leaf page is lost; the page itself may be sound.
    pub fn hides_pointer(&self, leaf: u64) -> bool {
        let region = leaf / REGION_LEAVES;
        self.regions.contains_key(&region) || self.maps.contains_key(&(region / MAP_REGIONS))
    }
}

impl Table {
    /// The table that a record points at, without the pages that are damaged.
    ///
    /// # Errors
    /// A device's only: what cannot be read now may be readable later, and is not given up.
    pub fn open_damaged(
        array: std::sync::Arc<Array>,
        record: &CheckpointRecord,
        page_limit: usize,
    ) -> Result<(Table, LostPages), Error> {
        let table = Table {
            keeps_regions: true,
            ..Table::new(array, page_limit)
        };
        table
            .nodes
            .store(record.node_count.get(), Ordering::Relaxed);
        let mut lost = LostPages::default();
        table.read_maps(record, &mut lost)?;
        table.load_regions(table.region_pointers(), &mut lost)?;
        Ok((table, lost))
    }

    fn load_regions(
        &self,
        pointers: Vec<(u64, ItemPointer)>,
        lost: &mut LostPages,
    ) -> Result<(), Error> {
        for (index, pointer) in pointers {
            let state = match self.read_region(index, pointer, Blocks::stored_page) {
                Ok(state) => state,
                Err(Error::Damaged(damage)) => {
                    lost.regions.insert(index, (damage, pointer));
                    self.forget_region(index);
                    RegionState::empty()
                }
                Err(error) => return Err(error),
            };
            let state = self.check_leaves(index, state, lost)?;
            let region = Arc::new(Region {
                state: Mutex::keyed(rank::TABLE, index, state),
            });
            self.regions.lock().insert(index, region);
        }
        Ok(())
    }

    fn read_maps(&self, record: &CheckpointRecord, lost: &mut LostPages) -> Result<(), Error> {
        let mut maps = self.maps.lock();
        maps.roots = record.roots;
        for (index, root) in (0..).zip(&record.roots) {
            if root.place().is_none() {
                continue;
            }
            match read_map(&self.array, index, root)? {
                Ok(page) => {
                    maps.pages.insert(index, page);
                    if root.stamp.get() >> 32 != 0 {
                        // Bits that mean nothing; the new pointer has none.
                        maps.changed.insert(index);
                    }
                }
                Err(damage) => {
                    lost.maps.insert(index, (damage, *root));
                    maps.roots[index as usize] = ItemPointer::zeroed();
                }
            }
        }
        Ok(())
    }

    /// The next checkpoint writes that there is no such page, if it does not write one.
    fn forget_region(&self, index: u64) {
        let (map, within) = (index / MAP_REGIONS, (index % MAP_REGIONS) as usize);
        let mut maps = self.maps.lock();
        if let Some(page) = maps.pages.get_mut(&map) {
            page[within] = ItemPointer::zeroed();
            maps.changed.insert(map);
        }
    }

    /// A map page that was made anew just as it was lost: what it points at is looked at.
    pub fn restore_map(
        &self,
        index: u64,
        page: MapPage,
        lost: &mut LostPages,
    ) -> Result<(), Error> {
        let regions = (index * MAP_REGIONS..).zip(page.iter().copied());
        let regions = regions.filter(|(_, pointer)| !pointer.place().is_none());
        let regions = regions.collect();
        {
            let mut maps = self.maps.lock();
            maps.pages.insert(index, page);
            maps.changed.insert(index);
        }
        lost.maps.remove(&index);
        self.load_regions(regions, lost)
    }

    /// Forgets the pointers to leaf pages that are damaged.
    fn check_leaves(
        &self,
        region: u64,
        mut state: RegionState,
        lost: &mut LostPages,
    ) -> Result<RegionState, Error> {
        for leaf in 0..REGION_LEAVES as usize {
            let pointer = state.pointers[leaf];
            if pointer.place().is_none() {
                continue;
            }
            match self.read_leaf(region, leaf, pointer, Blocks::stored_page) {
                Ok(_) => {}
                Err(Error::Damaged(damage)) => {
                    lost.leaves
                        .insert(region * REGION_LEAVES + leaf as u64, damage);
                    state.pointers[leaf] = ItemPointer::zeroed();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(state)
    }

    /// Places of all pages that are there.
    pub fn page_places(&self) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        {
            let maps = self.maps.lock();
            places.extend(maps.roots.iter().map(ItemPointer::place));
            let below = maps.pages.values().flat_map(|page| page.iter());
            places.extend(below.map(ItemPointer::place));
        }
        let regions: Vec<Arc<Region>> = self.regions.lock().values().cloned().collect();
        for region in regions {
            let state = region.state.lock();
            places.extend(state.pointers.iter().map(ItemPointer::place));
        }
        places.retain(|place| !place.is_none());
        places
    }

    /// Names a leaf page that was found without its pointer.
    pub fn restore_leaf(&self, id: u64, pointer: ItemPointer) -> Result<(), Error> {
        let (region, leaf) = (id / REGION_LEAVES, (id % REGION_LEAVES) as usize);
        let found = self.region(region)?;
        found.state.lock().pointers[leaf] = pointer;
        // The pages above are written along with any leaf.
        self.with_leaf(region, leaf, |state| state.dirty |= 1 << leaf)
    }

    /// A leaf page anew.
    pub fn rebuild_leaf(&self, id: u64, entries: &[Entry]) -> Result<(), Error> {
        let (region, leaf) = (id / REGION_LEAVES, (id % REGION_LEAVES) as usize);
        let mut page = empty_leaf();
        for (slot, entry) in page.iter_mut().zip(entries) {
            if !entry.place.is_none() {
                slot.place = entry.place.pack();
            }
            slot.version = entry.version;
        }
        let found = self.region(region)?;
        {
            let mut state = found.state.lock();
            state.pointers[leaf] = ItemPointer::zeroed();
            state.leaves[leaf] = Some(page);
            state.dirty |= 1 << leaf;
        }
        self.note_loaded(Page::Leaf(region, leaf));
        Ok(())
    }

    /// Ids of leaf pages that are there, in memory or on the devices, ascending.
    pub fn leaf_ids(&self) -> Vec<u64> {
        let regions: Vec<(u64, Arc<Region>)> = {
            let regions = self.regions.lock();
            regions.iter().map(|(i, r)| (*i, Arc::clone(r))).collect()
        };
        let mut ids = Vec::new();
        for (index, region) in regions {
            let state = region.state.lock();
            let used = (0..REGION_LEAVES as usize).filter(|leaf| {
                state.leaves[*leaf].is_some() || !state.pointers[*leaf].place().is_none()
            });
            ids.extend(used.map(|leaf| index * REGION_LEAVES + leaf as u64));
        }
        ids.sort_unstable();
        ids
    }

    /// The entries of a leaf page as they are now.
    pub fn entries_now(&self, id: u64) -> Result<Vec<Entry>, Error> {
        let (region, leaf) = (id / REGION_LEAVES, (id % REGION_LEAVES) as usize);
        self.with_leaf(region, leaf, |state| {
            (0..LEAF_NIDS as usize)
                .map(|slot| entry_of(state, leaf, slot))
                .collect()
        })
    }

    /// The image of a nid is no image: the version stays, the place goes.
    pub fn forget(&self, nid: Nid) -> Result<(), Error> {
        let (region, leaf, slot) = split(nid);
        self.with_leaf(region, leaf, |state| {
            let page = state.leaves[leaf].as_mut().expect("with_leaf loads it");
            page[slot].place = 0;
            state.dirty |= 1 << leaf;
        })
    }

    /// Brings bitmaps, free counts and the number of nodes in line with the entries. Returns the
    /// free nids of each region from 0 on, below those of the space maps, and whether anything
    /// was wrong.
    pub fn recount(&self) -> Result<(Vec<u32>, bool), Error> {
        let mut bitmaps: BTreeMap<u64, Box<[u64; BITMAP_WORDS]>> = BTreeMap::new();
        let mut nodes = 0;
        for id in self.leaf_ids() {
            let bitmap = bitmaps
                .entry(id / REGION_LEAVES)
                .or_insert_with(|| Box::new([0; BITMAP_WORDS]));
            let first = (id % REGION_LEAVES * LEAF_NIDS) as usize;
            for (i, entry) in self.entries_now(id)?.iter().enumerate() {
                if !entry.place.is_none() {
                    bitmap[(first + i) / 64] |= 1 << ((first + i) % 64);
                    nodes += 1;
                }
            }
        }
        for (index, _) in self.region_pointers() {
            let none = || Box::new([0; BITMAP_WORDS]);
            bitmaps.entry(index).or_insert_with(none);
        }
        let mut wrong = self.nodes.swap(nodes, Ordering::Relaxed) != nodes;
        let mut free = Vec::new();
        for (index, bitmap) in bitmaps {
            let used: u32 = bitmap.iter().map(|w| w.count_ones()).sum();
            let left = REGION_NIDS as u32 - used;
            wrong |= self.correct_region(index, bitmap, left)?;
            if index < SPACE_MAP_FIRST / REGION_NIDS {
                free.resize(index as usize, REGION_NIDS as u32);
                free.push(left);
            }
        }
        Ok((free, wrong))
    }

    fn correct_region(
        &self,
        index: u64,
        bitmap: Box<[u64; BITMAP_WORDS]>,
        free: u32,
    ) -> Result<bool, Error> {
        let stated = {
            let maps = self.maps.lock();
            let page = maps.pages.get(&(index / MAP_REGIONS));
            let pointer = page.map(|p| p[(index % MAP_REGIONS) as usize]);
            pointer.filter(|p| !p.place().is_none())
        };
        let region = self.region(index)?;
        let (wrong, leaf) = {
            let mut state = region.state.lock();
            let wrong = state.bitmap != bitmap
                || stated.is_some_and(|p| p.stamp.get() >> 32 != free as u64);
            state.bitmap = bitmap;
            let loaded = |leaf: &usize| {
                state.leaves[*leaf].is_some() || !state.pointers[*leaf].place().is_none()
            };
            (wrong, (0..REGION_LEAVES as usize).find(loaded))
        };
        match leaf {
            Some(leaf) if wrong || stated.is_none() => {
                self.with_leaf(index, leaf, |state| state.dirty |= 1 << leaf)?;
            }
            None if wrong => self.forget_region(index),
            _ => {}
        }
        Ok(wrong)
    }

    /// Entries of a copy of a leaf page that nothing points at.
    pub fn parse_leaf(payload: &[u8]) -> Option<Vec<Entry>> {
        let page = decode_leaf(payload).ok()?;
        Some(page.iter().map(entry_from).collect())
    }

    /// Free nids of a copy of a region page that nothing points at.
    pub fn free_in_region(payload: &[u8]) -> Option<u64> {
        let bitmap = payload.get(REGION_LEAVES as usize * ItemPointer::SIZE..)?;
        let used = bitmap.iter().map(|byte| u64::from(byte.count_ones()));
        (payload.len() == REGION_PAGE_BYTES).then(|| REGION_NIDS - used.sum::<u64>())
    }
}

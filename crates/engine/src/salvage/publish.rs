//! Changes to a salvaged store, and the checkpoint that makes them true.

use super::{Salvage, SalvageError, bounded};
use crate::checkpoint::CheckpointReport;
use crate::content::Content;
use crate::error::Error;
use crate::finding::Object;
use crate::node::Body;
use crate::recovery::outdated;
use crate::segments::SegmentId;
use crate::space::{ChunkState, Space};
use crate::space_map::SpaceMap;
use format::checkpoint::{SPACE_PAGE_BYTES, SPACE_WORDS_MAX};
use format::item::{ITEM_MAX, PAYLOAD_MAX, padded_len};
use format::table::{LEAF_NIDS, LEAF_PAGE_MAX, MAP_REGIONS, REGION_LEAVES, space_map_nid};
use format::{BLOCK_SIZE, Damage, Nid};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl<C: Content> Salvage<C> {
    /// A nid for a new node, and the version that [`Salvage::put`] will give it.
    pub fn fresh(&self) -> Result<(Nid, u64), Error> {
        let taken = self.store.nids.take(0, &*self.store)?;
        let (nid, _) = taken.ok_or(Error::NoSpace)?;
        // Here a nid can get a version while it is free.
        Ok((nid, self.store.last_version(nid)? + 1))
    }

    /// The version that [`Salvage::put`] gives the nid next.
    pub fn next_version(&self, nid: Nid) -> Result<u64, Error> {
        Ok(self.store.last_version(nid)? + 1)
    }

    /// The node becomes this, as its next version.
    ///
    /// # Errors
    /// [`Error::Damaged`] when its image would be over the bound.
    pub fn put(&self, nid: Nid, content: C) -> Result<(), Error> {
        let mut image = Vec::new();
        content.encode(&mut image);
        if image.len() > PAYLOAD_MAX {
            let what = format!("node {nid} would take {} bytes", image.len());
            return Err(Error::Damaged(Damage::new("node", what)));
        }
        self.replace(nid, Body::User(content))
    }

    /// The node is no more.
    pub fn delete(&self, nid: Nid) -> Result<(), Error> {
        self.replace(nid, Body::Gone)
    }

    fn replace(&self, nid: Nid, body: Body<C>) -> Result<(), Error> {
        let version = self.next_version(nid)?;
        self.set_body(nid, version, body)
    }

    fn set_body(&self, nid: Nid, version: u64, body: Body<C>) -> Result<(), Error> {
        let cell = self.store.nodes.get(nid);
        let dirty = cell.filter(|cell| cell.header.dirty.load(Ordering::Acquire));
        if let Some(cell) = dirty {
            let same_lock = match &body {
                Body::Gone | Body::Space(_) => true,
                Body::User(content) => cell.header.is_owned() == C::owned(content.kind()),
            };
            if same_lock {
                bounded(nid, version)?;
                let mut state = self.store.nodes.write(&cell);
                state.version = version;
                state.body = body;
                self.store.nodes.recharge(&cell, &state.body);
                return Ok(());
            }
            // It has its place in the lock order for life: another takes over.
            for list in &self.store.dirty.lists {
                list.lock()
                    .retain(|other| !base::sync::Arc::ptr_eq(&other.cell, &cell));
            }
        }
        self.adopt(nid, version, body)
    }

    /// Makes the space maps say that exactly the blocks of these bitmaps are in use: one for each
    /// chunk, a set bit for each block; an empty one for a chunk without any. `ever` are chunks
    /// that files had blocks in before the changes: they are not written this time.
    pub fn set_space(
        &mut self,
        used: impl Fn(u32) -> Vec<u64>,
        ever: impl Fn(u32) -> bool,
    ) -> Result<(), SalvageError> {
        let geometry = self.store.array.geometry().clone();
        let per_chunk = geometry.segments_per_chunk() as u64;
        let meta = self.store.segments.live();
        let (mut states, mut allocator) = (Vec::new(), Vec::new());
        for chunk in 0..geometry.chunk_count {
            let words = match meta.contains_key(&chunk) {
                true => Vec::new(),
                false => used(chunk),
            };
            let wanted = words.iter().any(|w| *w != 0);
            let map = wanted.then(|| SpaceMap::of_words(&words, geometry.chunk_blocks));
            let state = match meta.contains_key(&chunk) {
                true => self.set_map(chunk, None, false)?,
                false => self.set_map(chunk, map, true)?,
            };
            states.push(state);
            let segments = SegmentId(u64::from(chunk) * per_chunk)
                ..SegmentId((u64::from(chunk) + 1) * per_chunk);
            let kept = self.kept_chunks.contains(&chunk)
                || ever(chunk)
                || self.occupied.range(segments).next().is_some();
            allocator.push(match (meta.contains_key(&chunk), state) {
                (true, _) => ChunkState::Meta,
                (false, ChunkState::Free) if kept => ChunkState::Data(0),
                (false, state) => state,
            });
        }
        let shards = self.store.options.shards;
        let store = Arc::get_mut(&mut self.store).expect("the caller looks no more");
        store.space = Space::new(&geometry, shards, allocator, 0);
        store.checkpoint_state.get_mut().chunks = states;
        Ok(())
    }

    /// Brings one chunk's map up to date; an empty map may stay where nothing is in use.
    fn set_map(
        &mut self,
        chunk: u32,
        map: Option<SpaceMap>,
        may_stay: bool,
    ) -> Result<ChunkState, SalvageError> {
        let nid = space_map_nid(chunk);
        let old = match self.store.load(nid) {
            Ok(node) => match &node.0.read().body {
                Body::Space(map) => Some(map.clone()),
                _ => None,
            },
            Err(Error::Gone(_)) => None,
            Err(error) => return Err(error.into()),
        };
        let map = match (map, &old) {
            (None, Some(old)) if may_stay => Some(SpaceMap::new(old.blocks())),
            (map, _) => map,
        };
        let state = map
            .as_ref()
            .map_or(ChunkState::Free, |m| ChunkState::Data(m.free()));
        let last = self.store.last_version(nid)?;
        let logged = self.map_versions.get(&nid.0).copied().unwrap_or(0);
        if map == old && logged <= last {
            return Ok(state);
        }
        if map != old && !self.map_versions.contains_key(&nid.0) {
            let what = "its space map does not agree with the files; made anew";
            self.note(Object::Chunk(chunk), false, what);
        }
        let body = map.map_or(Body::Gone, Body::Space);
        self.set_body(nid, last.max(logged) + 1, body)?;
        Ok(state)
    }

    /// Whether there is room beside the old state for all that [`publish`](Self::publish) writes, at the worst: if so, it does not fail for want of room. Writes nothing.
    ///
    /// # Errors
    /// [`Error::NoSpace`]: there may not be enough.
    pub fn check_room(&self) -> Result<(), SalvageError> {
        let store = &self.store;
        store.segments.keep_out(&self.occupied);
        let seed = store.array.checksum_seed();
        let (mut images, mut image) = (0, Vec::new());
        let mut leaves = BTreeSet::new();
        for list in &store.dirty.lists {
            // Nodes are locked without it.
            let dirty = list.lock().clone();
            for one in &dirty {
                let node = one.cell.read();
                image.clear();
                match &node.body {
                    Body::Gone => {}
                    body => body.encode_item(seed, one.nid, node.version, &mut image),
                }
                images += image.len();
                leaves.insert(one.nid.0 / LEAF_NIDS);
            }
        }
        for region in store.table.dirty_regions() {
            leaves.extend(region.leaf_ids());
        }
        let above = |pages: &BTreeSet<u64>, each: u64| -> BTreeSet<u64> {
            pages.iter().map(|page| page / each).collect()
        };
        let regions = above(&leaves, REGION_LEAVES);
        let maps = above(&regions, MAP_REGIONS);
        let pages =
            leaves.len() * padded_len(LEAF_PAGE_MAX) + (regions.len() + maps.len()) * ITEM_MAX;
        let geometry = store.array.geometry();
        let words = geometry.chunk_count as usize * (1 + geometry.segments_per_chunk() as usize);
        let words = words.min(SPACE_WORDS_MAX as usize);
        let space = ITEM_MAX + ((words * 4).div_ceil(SPACE_PAGE_BYTES)) * 2 * BLOCK_SIZE;
        // Each packer leaves a segment of its own, and none fills one by less than an item and its padding.
        let within = geometry.segment_bytes() - ITEM_MAX - BLOCK_SIZE;
        let segments = |bytes: usize| bytes.div_ceil(within);
        // The packers of images come twice.
        let needed = segments(images) + segments(pages) + segments(space) + 3 * store.packers() + 1;
        let room = store.free_meta_bytes() / geometry.segment_bytes() as i64;
        match needed as i64 <= room {
            true => Ok(()),
            false => Err(Error::NoSpace.into()),
        }
    }

    /// **The commit point** of a repair: writes everything that changed beside what is there, then
    /// the record. After an error, or a crash before the record, the devices hold the old state; if it was the record that could not be written, perhaps the new one. Labels of old devices are left as they are: else a mount
    /// would take them for as new as the others, which they are not without the repair. Returns the mount that all labels are to say when it is done
    /// ([`Array::note_mount`](device::Array::note_mount)); until they do, the array is refused as before.
    ///
    /// # Errors
    /// [`Error::NoSpace`] when there is no room beside the old state.
    pub fn publish(self) -> Result<u64, SalvageError> {
        self.store.segments.keep_out(&self.occupied);
        let (array, mount) = (&self.store.array, self.store.journal.mount_id);
        if let Some(record) = &self.record {
            // As a mount does, and for the same reason (recovery, invariant 6). But nothing that this record reaches is written over: one copy of it will do, where
            // a device does not take the other.
            self.slots.silence(array, record)?;
        }
        let old = outdated(array).iter().map(|old| old.device).collect();
        array
            .note_mount_on_others(mount, &old)
            .map_err(Error::from)?;
        let mut state = self.store.checkpoint_state.lock();
        let mut report = CheckpointReport::default();
        self.store
            .write_checkpoint(&mut state, false, &[], &mut report)?;
        Ok(mount)
    }
}

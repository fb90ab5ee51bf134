//! Salvage: a store made from whatever of it can still be read, changed in memory, and written
//! back by one checkpoint. The engine's part of a repair; what nodes mean is the caller's.
//!
//! **What is truth**: node images whose checksum, nid and version are right; the journal's records
//! as far as the chain of batches goes; table pages that are sound. **What is derived** and made
//! anew: the segment table, chunk states, free-nid bitmaps and counts, the number of nodes, and
//! (from what the caller says is in use) the space maps.
//!
//! **Order of work**
//!
//! 1. The newest readable checkpoint record, and the journal behind it as far as it goes. Without
//!    any record: everything that a scan of all segments finds. What a device does not return of the journal is given up if it is where the
//!    next batch would be, and nothing says that one is there (`batches.rs`).
//! 2. The node table. Pages whose pointer is lost are found by a scan ([`scan`]): the newest copy of each, which may be an
//!    older state of what is lost, unless the lost page can be made anew of them ([`anew`]). Of a lost
//!    leaf page, its nodes are found: the newest image of each, unless an old copy of the page knows of
//!    a later state or deletion. Without a segment table the scan reads what metadata has left behind in chunks that became
//!    data, too, by the table or by the journal (`docs/decisions/0038`): a page there, or one that names an image there, is not the last one, and an image is taken from there into memory, so that the chunk stays data.
//! 3. Replay in memory. Of a node that the journal creates or deletes, what precedes the last time that it does is not
//!    needed: neither an image, which may have rotted, nor, where a page of the table is lost, its version. Any other node
//!    that replay cannot bring up to date is dropped, because an older state of it may refer to what has another owner since.
//! 4. All images are read once. What is damaged is dropped: its nid gets the next version and no
//!    image. A *device* that does not return an image is another matter: it may return it
//!    tomorrow, or to a rescue tool, so then nothing is repaired at all; but if replay has put something in its place,
//!    nobody needs it.
//! 5. The caller looks, and changes nodes ([`Salvage::put`], [`Salvage::delete`]).
//! 6. [`Salvage::set_space`] makes space maps of what is in use, [`Salvage::publish`] writes.
//!
//! **Why an interruption is harmless.** Steps 1 to 6 write nothing before `publish`. That is a
//! checkpoint: images, table pages and space tables go where nothing lies that the state so far
//! reaches, nor any data that the journal's end rests on (so the next repair finds the same end, and the same doubts: no batch
//! confirms it, as recovery's does; but for a batch that a device does not return, which is given up: what it names is not known), then a flush, then the record, into the slot that the state so far is not in. *That
//! is the one commit point.* Before it a repeat begins from the very same state; after it the
//! repair is done, but for labels of old devices, by which the array is refused until they are written.
//!
//! Invariants:
//! 1. A segment is written only if nothing that the old record reaches, damaged or not, and
//!    nothing that a scan would use, lies in it; a free chunk only if neither the old space
//!    tables, nor an old space map, nor a file's extents, before or after the changes, have it.
//! 2. The new record's sequence number, mount id and epoch are above all that any record or
//!    journal batch on the devices names, so nothing stale can be taken for its successor. The mount id is above all labels, too, or a device's latest
//!    state that is attached after all would pass for one of the array's; but where all are of the newest record's mount or the next, of
//!    which there is no record, it is that next one, as a mount's would be.
//! 3. No version falls: a dropped node's tombstone has the next version, and nids whose versions
//!    are lost start again far above whatever was seen of them.
//! 4. Memory: the journal, what replay changed, the nodes of lost leaf pages, what the caller
//!    changes, 40 bytes for each nid of a lost part of the table, and as many for each further copy of an image there.

mod publish;
mod scan;

pub(crate) use scan::newest_mount;

use crate::batches::{Run, in_doubt, read_run};
use crate::checkpoint::{CheckpointState, SpaceTables, read_space};
use crate::content::Content;
use crate::error::Error;
use crate::finding::Object;
use crate::journal::{Anchor, Resume};
use crate::nids::Nids;
use crate::node::{Body, new_cell};
use crate::recovery::{RecoveryReport, Slots, newest_record, next_sequence, outdated};
use crate::replay::{Change, fits_an_image};
use crate::segments::{SegmentId, Segments};
use crate::space::ChunkState;
use crate::store::{Parts, Store, StoreOptions};
use crate::table::{Entry, LostPages, Table, anew};
use crate::verify::{Unread, Visitor};
use base::sync::{Mutex, rank};
use device::{AlignedBuf, Array};
use format::checkpoint::CheckpointRecord;
use format::item::{ITEM_MAX, Place};
use format::journal::{Action, DataSum, parse_records};
use format::table::{LEAF_NIDS, MAP_REGIONS, REGION_LEAVES, SPACE_MAP_FIRST, space_map_nid};
use format::{BLOCK_SIZE, Block, COUNTER_MAX, Damage, Nid, U64};
use scan::{Scan, Wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Why an array cannot be salvaged; nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum SalvageError {
    /// A device does not return what it holds.
    #[error("{0}")]
    Unreadable(String),
    #[error(transparent)]
    Store(#[from] Error),
}

/// Something that is not there, or was made anew.
#[derive(Clone, Debug)]
pub struct Loss {
    pub object: Object,
    pub what: String,
    /// Something that nothing else holds is gone, or nobody knows whether it is; else it was derived or found again.
    pub lost: bool,
    /// It stays as it is all the same.
    pub kept: bool,
}

/// Versions of nids whose last version is unknown start at the next multiple of this.
const VERSION_STEP: u64 = 1 << 40;

/// A store as far as it can be read; see the module's head.
#[derive(Debug)]
pub struct Salvage<C: Content> {
    store: Arc<Store<C>>,
    losses: Vec<Loss>,
    /// Invariant 1.
    occupied: BTreeSet<SegmentId>,
    kept_chunks: BTreeSet<u32>,
    /// Newest versions of space maps that the journal names.
    map_versions: BTreeMap<u64, u64>,
    /// The newest record, if there is one.
    record: Option<CheckpointRecord>,
    slots: Slots,
}

/// Leaf pages that were put together from nodes.
#[derive(Default)]
struct Rebuilt {
    /// In ascending order.
    leaves: Vec<u64>,
    /// Nodes of theirs of which only older states were found, and what tells.
    stale: Vec<(Nid, String)>,
    /// Chunks of data, where all chunks were read: what metadata has left behind there was found, too. It lies there until data is written over it.
    data: BTreeSet<u32>,
}

impl Rebuilt {
    fn is_data<C: Content>(&self, store: &Store<C>, place: Place) -> bool {
        let block = Block(place.byte / BLOCK_SIZE as u64);
        let chunk = store.array.geometry().chunk_of(block);
        chunk.is_some_and(|(chunk, _)| self.data.contains(&chunk))
    }
}

/// What there is to start from.
struct Base {
    record: Option<CheckpointRecord>,
    slots: Slots,
    run: Run,
    /// The records of the run's batches.
    batches: Vec<Vec<u8>>,
    /// Of the next checkpoint.
    sequence: u64,
    resume: Resume,
}

impl<C: Content> Salvage<C> {
    /// Reads what can be read; writes nothing.
    ///
    /// # Errors
    /// [`SalvageError::Unreadable`] when a device fails to return something that may be there.
    pub fn open(array: &Arc<Array>, options: StoreOptions) -> Result<Salvage<C>, SalvageError> {
        let mut writer = None;
        if !array.read_only() {
            writer = Some(array.writer().map_err(Error::from)?);
            array.mark_all_unflushed();
            array.flush().map_err(Error::from)?;
        }
        let mut losses = Vec::new();
        let mut base = Base::find(array, &mut losses)?;
        let record = base.record.unwrap_or_else(CheckpointRecord::zeroed);
        let page_limit = options.page_limit();
        let (table, lost) = Table::open_damaged(Arc::clone(array), &record, page_limit)?;
        let space = base.space(array, &mut losses)?;
        let chunks = vec![ChunkState::Free; array.geometry().chunk_count as usize];
        let parts = Parts {
            // Derived when all nodes are known.
            free_nids: Vec::new(),
            chunks: chunks.clone(),
            live: BTreeMap::new(),
            resume: base.resume,
            checkpoint_state: CheckpointState {
                sequence: base.sequence - 1,
                chunks,
                space_places: space.as_ref().map_or_else(Vec::new, |s| s.places.clone()),
                clean: false,
                user: record.user.map(U64::get),
                images_first: true,
            },
            table,
            array: Arc::clone(array),
            options: StoreOptions {
                read_only: true,
                background: false,
                ..options
            },
        };
        let store = Store::assemble(parts)?;
        writer.into_iter().for_each(|writer| store.keep(writer));
        let mut salvage = Salvage {
            store: Arc::new(store),
            losses,
            occupied: BTreeSet::new(),
            kept_chunks: base.vouched_chunks(array),
            map_versions: BTreeMap::new(),
            record: base.record,
            slots: base.slots.clone(),
        };
        let rebuilt = match lost.is_empty() && base.record.is_some() {
            true => Rebuilt::default(),
            false => salvage.rebuild_table(&base, lost, space.as_ref())?,
        };
        salvage.replay(&std::mem::take(&mut base.batches), &rebuilt.leaves)?;
        salvage.load_rebuilt(rebuilt)?;
        salvage.drop_damaged()?;
        salvage.count(space, base.run.loss.is_some())?;
        Ok(salvage)
    }

    /// What was found to be missing or wrong so far.
    pub fn losses(&self) -> &[Loss] {
        &self.losses
    }

    /// The store as it would be; its nodes can be visited and read.
    pub fn store(&self) -> &Arc<Store<C>> {
        &self.store
    }

    fn note(&mut self, object: Object, lost: bool, what: impl Into<String>) {
        self.losses.push(Loss {
            object,
            what: what.into(),
            lost,
            kept: false,
        });
    }

    /// Step 2: finds pages of the table, and nodes, by reading segments.
    fn rebuild_table(
        &mut self,
        base: &Base,
        mut lost: LostPages,
        space: Option<&SpaceTables>,
    ) -> Result<Rebuilt, SalvageError> {
        let all = base.record.is_none();
        let limit = base.record.map_or(u64::MAX, |r| r.sequence.get());
        let wanted = Wanted { all, lost: &lost };
        let since = match space {
            None => base.data_since(),
            Some(_) => BTreeSet::new(),
        };
        if all {
            // Should this repair be interrupted, what it wrote there would not count.
            self.kept_chunks.extend(&since);
        }
        let mut known = self.data_chunks(|leaf| !wanted.leaf(leaf))?;
        known.extend(&since);
        let live = space.map(|s| &s.live);
        let scan = Scan::run(&self.store, live, &known, limit, &wanted)?;
        if all && scan.leaves.is_empty() && scan.images.is_empty() {
            let what = "no checkpoint record, and no metadata on the devices";
            return Err(Error::Damaged(Damage::new("checkpoint", what)).into());
        }
        self.occupied.extend(&scan.occupied);
        // A scan tells old pages from new ones by the checkpoint.
        let newest = scan.leaves.values().map(|leaf| leaf.found.sequence).max();
        {
            let mut state = self.store.checkpoint_state.lock();
            state.sequence = state.sequence.max(newest.unwrap_or(0).min(limit));
        }
        self.restore_maps(&scan, &mut lost)?;
        self.restore_regions(&scan, &mut lost)?;
        let mut rebuilt = Rebuilt {
            data: since,
            ..Rebuilt::default()
        };
        let wanted = Wanted { all, lost: &lost };
        // Those of space maps come first: they tell which chunks hold data.
        let maps = SPACE_MAP_FIRST / LEAF_NIDS;
        self.rebuild_leaves(&wanted, &scan, maps..u64::MAX, &mut rebuilt)?;
        if space.is_none() {
            rebuilt.data.extend(self.data_chunks(|_| true)?);
        }
        self.rebuild_leaves(&wanted, &scan, 0..maps, &mut rebuilt)?;
        rebuilt.leaves.sort_unstable();
        Ok(rebuilt)
    }

    /// Leaf pages with these numbers: those that were found and are the last ones, and those that are put together from nodes.
    fn rebuild_leaves(
        &mut self,
        wanted: &Wanted<'_>,
        scan: &Scan,
        ids: Range<u64>,
        rebuilt: &mut Rebuilt,
    ) -> Result<(), SalvageError> {
        let lost = wanted.lost;
        let mut leaves: BTreeSet<u64> = lost.leaves.range(ids.clone()).map(|(id, _)| *id).collect();
        let found = scan.images.keys().map(|nid| nid / LEAF_NIDS);
        leaves.extend(found.filter(|leaf| ids.contains(leaf) && wanted.leaf(*leaf)));
        for (id, leaf) in scan.leaves.range(ids) {
            let free = (wanted.all || lost.hides_pointer(*id)) && !lost.leaves.contains_key(id);
            if !free || scan.is_outdated(*id) {
                continue;
            }
            // One that metadata has left behind is not the last, nor is one that names what it has left behind.
            let place = leaf.found.pointer.place();
            let named = leaf.entries.iter().map(|entry| entry.place);
            let mut places = named.filter(|place| !place.is_none()).chain([place]);
            match places.any(|place| rebuilt.is_data(&self.store, place)) {
                true => drop(leaves.insert(*id)),
                false => {
                    self.store.table.restore_leaf(*id, leaf.found.pointer)?;
                    leaves.remove(id);
                }
            }
        }
        for id in leaves {
            let best = scan.entries_of(id);
            self.store.table.rebuild_leaf(id, &best.entries)?;
            rebuilt.stale.extend(best.stale);
            rebuilt.leaves.push(id);
            let why = lost
                .leaves
                .get(&id)
                .map_or("lost".into(), ToString::to_string);
            let what = format!(
                "{why}; {} of its nodes were found, deleted ones may be among them",
                best.found
            );
            self.note(Object::LeafPage(id), true, what);
        }
        Ok(())
    }

    /// Chunks that have a space map, by those leaf pages that are `known`.
    fn data_chunks(&self, known: impl Fn(u64) -> bool) -> Result<BTreeSet<u32>, Error> {
        let mut data = BTreeSet::new();
        for chunk in 0..self.store.array.geometry().chunk_count {
            let map = space_map_nid(chunk);
            if known(map.0 / LEAF_NIDS) && !self.store.table.entry(map)?.place.is_none() {
                data.insert(chunk);
            }
        }
        Ok(data)
    }

    /// Map pages that are made anew just as they were are lost no more.
    fn restore_maps(&mut self, scan: &Scan, lost: &mut LostPages) -> Result<(), SalvageError> {
        let seed = self.store.array.checksum_seed();
        for (id, (damage, pointer)) in lost.maps.clone() {
            let regions = scan.regions_of(id);
            let regions = regions.map(|(region, found)| (region % MAP_REGIONS, found));
            let page = anew::map(seed, id, pointer, regions);
            self.note_anew(
                Object::Table,
                page.is_some(),
                format!("map page {id}: {damage}"),
            );
            if let Some(page) = page {
                self.store.table.restore_map(id, page, lost)?;
            }
        }
        Ok(())
    }

    /// The same of region pages.
    fn restore_regions(&mut self, scan: &Scan, lost: &mut LostPages) -> Result<(), SalvageError> {
        let seed = self.store.array.checksum_seed();
        for (id, (damage, pointer)) in lost.regions.clone() {
            let leaves = scan.leaves_of(id);
            let leaves =
                leaves.map(|(id, leaf)| (id % REGION_LEAVES, leaf.found, &leaf.entries[..]));
            let certain = anew::is_region(seed, id, pointer, leaves);
            self.note_anew(Object::RegionPage(id), certain, damage.to_string());
            if certain {
                for (leaf, page) in scan.leaves_of(id) {
                    self.store.table.restore_leaf(leaf, page.found.pointer)?;
                }
                lost.regions.remove(&id);
            }
        }
        Ok(())
    }

    fn note_anew(&mut self, object: Object, certain: bool, why: String) {
        let what = match certain {
            true => format!("{why}; made anew"),
            false => format!(
                "{why}; made anew of what was found: older states may be among it, and newer nodes may be missing"
            ),
        };
        self.note(object, !certain, what);
    }

    /// Step 3, with the leaf pages that were put together from nodes. Space maps are derived, so only their versions count.
    fn replay(&mut self, batches: &[Vec<u8>], rebuilt: &[u64]) -> Result<(), SalvageError> {
        let mut changes: BTreeMap<u64, Vec<Change<'_>>> = BTreeMap::new();
        for records in batches {
            let mut list = Vec::new();
            let parsed = parse_records(records, |entries| {
                let changes = entries.iter().filter(|e| e.action != Action::Sum);
                list.extend(changes.map(|entry| {
                    let change = Change {
                        version: entry.version,
                        action: entry.action,
                        kind: entry.kind,
                        body: entry.body,
                    };
                    (entry.nid, change)
                }));
                Ok(())
            });
            if let Err(damage) = parsed {
                let what = format!("{damage}; it is replayed up to there");
                self.note(Object::Journal, true, what);
                break;
            }
            for (nid, change) in list {
                changes.entry(nid).or_default().push(change);
            }
        }
        for (nid, list) in changes {
            let newest = list.iter().map(|change| change.version).max().unwrap_or(0);
            if nid >= SPACE_MAP_FIRST {
                self.map_versions.insert(nid, newest);
                continue;
            }
            match self.replayed(Nid(nid), list, rebuilt).and_then(settled) {
                Ok(None) => {}
                Ok(Some((version, body))) => self.adopt(Nid(nid), version, body)?,
                Err(Error::DamagedNode { damage, .. } | Error::Damaged(damage)) => {
                    let version = self.store.table.entry(Nid(nid))?.version.max(newest);
                    self.adopt(Nid(nid), version + 1, Body::Gone)?;
                    let what = format!("the journal cannot be replayed on it: {damage}; dropped");
                    self.note(Object::Node(Nid(nid)), true, what);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// A node after these changes; `None`: the table has them all.
    fn replayed(
        &self,
        nid: Nid,
        changes: Vec<Change<'_>>,
        rebuilt: &[u64],
    ) -> Result<Option<(u64, Body<C>)>, Error> {
        let Entry { place, version } = self.store.table.entry(nid)?;
        if let Some(Ok((newest, body))) = self.store.replayed_anew(nid, &changes) {
            // An image that has these changes, too, may have rotted.
            if newest > version || newest == version && !place.is_none() {
                return Ok(Some((newest, body)));
            }
            let unknown = || rebuilt.binary_search(&(nid.0 / LEAF_NIDS)).is_ok();
            if place.is_none() && unknown() {
                // Invariant 3.
                return Ok(Some((version + 1, body)));
            }
        }
        self.store.replayed_node(nid, changes)
    }

    /// A node whose newest state is in memory only.
    fn adopt(&self, nid: Nid, version: u64, body: Body<C>) -> Result<(), Error> {
        bounded(nid, version)?;
        let cell = new_cell(nid, version, body);
        self.store.nodes.insert(cell.clone());
        self.store.mark_dirty(0, &cell);
        Ok(())
    }

    fn is_adopted(&self, nid: Nid) -> bool {
        let cell = self.store.nodes.get(nid);
        cell.is_some_and(|cell| cell.header.dirty.load(Ordering::Acquire))
    }

    /// Nodes of leaf pages that no device has are in memory until the new table names them.
    fn load_rebuilt(&mut self, rebuilt: Rebuilt) -> Result<(), SalvageError> {
        for (nid, what) in &rebuilt.stale {
            // The journal may say all of it.
            if !self.is_adopted(*nid) {
                self.note(Object::Node(*nid), true, what);
            }
        }
        for id in &rebuilt.leaves {
            let entries = self.store.table.entries_now(*id)?;
            for (nid, entry) in (id * LEAF_NIDS..).map(Nid).zip(entries) {
                if entry.place.is_none() {
                    continue;
                }
                if !self.is_adopted(nid) {
                    match self.store.load(nid) {
                        Ok(node) => {
                            let misfit = self.store.misfit(nid, &node.0.read().body);
                            match misfit {
                                Some(why) => self.drop_image(nid, entry, why)?,
                                None => self.store.mark_dirty(0, node.0.all()),
                            }
                        }
                        Err(Error::DamagedNode { damage, .. }) => {
                            self.drop_image(nid, entry, &damage.to_string())?;
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                // Its chunk would count as one of metadata, and what files have there would be lost.
                if rebuilt.is_data(&self.store, entry.place) {
                    self.occupy(entry.place);
                    self.store.table.forget(nid)?;
                }
            }
        }
        Ok(())
    }

    /// Step 4.
    fn drop_damaged(&mut self) -> Result<(), SalvageError> {
        let probe = Probe {
            bad: Mutex::new(rank::LEAF, BTreeMap::new()),
            page: Mutex::new(rank::LEAF, None),
        };
        self.store.visit(&|_| true, &probe);
        // It was read a moment ago.
        if let Some(why) = probe.page.lock().take() {
            return Err(SalvageError::Unreadable(format!("node table: {why}")));
        }
        let bad = std::mem::take(&mut *probe.bad.lock());
        for (nid, why) in bad {
            match why {
                Unread::Device(why) if !self.is_adopted(Nid(nid)) => {
                    return Err(SalvageError::Unreadable(format!("node {nid}: {why}")));
                }
                Unread::Device(why) | Unread::Damage(why) => {
                    let entry = self.store.table.entry(Nid(nid))?;
                    self.drop_image(Nid(nid), entry, &why)?;
                }
            }
        }
        Ok(())
    }

    /// The nid has no image any more; a state that replay made stays.
    fn drop_image(&mut self, nid: Nid, entry: Entry, why: &str) -> Result<(), SalvageError> {
        // Until the new record is written the old one's space map keeps its chunk.
        let chunk = nid.0.checked_sub(SPACE_MAP_FIRST);
        let chunks = self.store.array.geometry().chunk_count as u64;
        match chunk {
            Some(chunk) if chunk < chunks => {
                self.kept_chunks.insert(chunk as u32);
                let newest = self.map_versions.entry(nid.0).or_insert(0);
                *newest = (*newest).max(entry.version);
                self.adopt(nid, entry.version + 1, Body::Gone)?;
                let what = format!("its space map: {why}; made anew");
                self.note(Object::Chunk(chunk as u32), false, what);
            }
            Some(_) => self.note(Object::Node(nid), false, format!("{why}; dropped")),
            None if self.is_adopted(nid) => {}
            None => {
                self.adopt(nid, entry.version + 1, Body::Gone)?;
                self.note(Object::Node(nid), true, format!("{why}; dropped"));
            }
        }
        self.occupy(entry.place);
        self.store.table.forget(nid)?;
        Ok(())
    }

    fn occupy(&mut self, place: Place) {
        for byte in [
            place.byte,
            place.byte + (place.len as u64).saturating_sub(1),
        ] {
            self.occupied.extend(self.store.segments.segment_of(byte));
        }
    }

    /// Derives the segment table and the free nids.
    fn count(&mut self, space: Option<SpaceTables>, cut: bool) -> Result<(), SalvageError> {
        let geometry = self.store.array.geometry().clone();
        let per_chunk = geometry.segments_per_chunk() as u64;
        let zero = || vec![0u32; per_chunk as usize];
        let mut live: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        let mut places = self.entry_places()?;
        places.extend(self.store.table.page_places());
        if let Some(space) = &space {
            places.extend(&space.places);
        }
        for place in places {
            self.occupy(place);
            let Some(SegmentId(segment)) = self.store.segments.segment_of(place.byte) else {
                continue;
            };
            let counts = live
                .entry((segment / per_chunk) as u32)
                .or_insert_with(zero);
            counts[(segment % per_chunk) as usize] += place.len;
        }
        if let Some(space) = space {
            self.compare_space(&space, &live, cut);
            for chunk in space.live.into_keys() {
                // Behind a cut it may have become a data chunk since.
                match cut {
                    true => {
                        self.kept_chunks.insert(chunk);
                    }
                    false => {
                        live.entry(chunk).or_insert_with(zero);
                    }
                }
            }
        }
        let (free, _) = self.store.table.recount()?;
        let shards = self.store.options.shards;
        let store = Arc::get_mut(&mut self.store).expect("nobody else has it yet");
        store.segments = Segments::new(&geometry, live, 0);
        store.nids = Nids::new(shards, free);
        // What is in memory only, and nids that were just given up, are not given out.
        let dirty = store
            .dirty
            .lists
            .iter()
            .flat_map(|list| list.lock().clone());
        for one in dirty.collect::<Vec<_>>() {
            store.nids.recover(one.nid, true, &*store)?;
        }
        Ok(())
    }

    /// Places of all images that the table names; images that lie where no segment is, or across
    /// two, are taken into memory instead.
    fn entry_places(&mut self) -> Result<Vec<Place>, SalvageError> {
        let geometry = self.store.array.geometry().clone();
        let segment = geometry.segment_bytes() as u64;
        let mut places = Vec::new();
        for id in self.store.table.leaf_ids() {
            let entries = self.store.table.entries_now(id)?;
            for (nid, entry) in (id * LEAF_NIDS..).map(Nid).zip(entries) {
                let place = entry.place;
                if nid.0 >= SPACE_MAP_FIRST && !place.is_none() {
                    self.kept_chunks.insert((nid.0 - SPACE_MAP_FIRST) as u32);
                }
                if place.is_none() {
                    continue;
                }
                debug_assert!(place.len as usize <= ITEM_MAX);
                let start = self.store.segments.segment_of(place.byte);
                let first = start.map(|s| self.store.segments.first_block(s).byte());
                if first.is_some_and(|first| place.byte + place.len as u64 <= first + segment) {
                    places.push(place);
                    continue;
                }
                self.occupy(place);
                if !self.is_adopted(nid) {
                    let node = self.store.load(nid)?;
                    self.store.mark_dirty(0, node.0.all());
                }
                self.store.table.forget(nid)?;
                self.note(Object::Node(nid), false, "lies in no segment; moved");
            }
        }
        Ok(places)
    }

    /// Notes where the space tables differ from what is there.
    fn compare_space(&mut self, space: &SpaceTables, live: &BTreeMap<u32, Vec<u32>>, cut: bool) {
        for (chunk, state) in (0..).zip(&space.chunks) {
            if matches!(state, ChunkState::Data(_)) {
                self.kept_chunks.insert(chunk);
            }
        }
        let wrong = |chunk: &u32, stated: &[u32]| match live.get(chunk) {
            Some(found) => found != stated,
            None => stated.iter().any(|bytes| *bytes != 0),
        };
        let missing = live.keys().any(|chunk| !space.live.contains_key(chunk));
        if !cut && (missing || space.live.iter().any(|(c, stated)| wrong(c, stated))) {
            let what = "the segment table does not add up; made anew";
            self.note(Object::SpaceTables, false, what);
        }
    }
}

/// No page of the table can hold a higher version.
fn bounded(nid: Nid, version: u64) -> Result<(), Error> {
    if version > COUNTER_MAX {
        let what = format!("node {nid} would get version {version}, the highest is {COUNTER_MAX}");
        return Err(Error::Damaged(Damage::new("node", what)));
    }
    Ok(())
}

/// A node without merges that are pending. They can make it larger than an image.
fn settled<C: Content>(replayed: Option<(u64, Body<C>)>) -> Result<Option<(u64, Body<C>)>, Error> {
    let Some((version, mut body)) = replayed else {
        return Ok(None);
    };
    body.settle();
    fits_an_image(&body).map_err(Error::Damaged)?;
    Ok(Some((version, body)))
}

/// Notes images that are none.
struct Probe {
    bad: Mutex<BTreeMap<u64, Unread>>,
    page: Mutex<Option<Unread>>,
}

impl<C> Visitor<C> for Probe {
    fn node(&self, _nid: Nid, _version: u64, _content: &C) {}

    fn bad_image(&self, nid: Nid, why: &Unread) {
        self.bad.lock().insert(nid.0, why.clone());
    }

    fn bad_page(&self, why: &Unread) {
        *self.page.lock() = Some(why.clone());
    }
}

impl Base {
    /// Step 1.
    fn find(array: &Array, losses: &mut Vec<Loss>) -> Result<Base, SalvageError> {
        let mut lose = |object, what: String| {
            losses.push(Loss {
                object,
                what,
                lost: true,
                kept: false,
            });
        };
        let mut report = RecoveryReport::default();
        let record = match newest_record(array, &mut report) {
            Ok(record) => Some(record),
            Err(Error::Damaged(damage)) => {
                let what = format!("{damage}; everything is looked for in the segments");
                lose(Object::Store, what);
                None
            }
            Err(error) => return Err(error.into()),
        };
        let survey = scan::Survey::of(array)?;
        if let (None, Some(error)) = (&record, survey.gaps.first()) {
            // Nothing says what of the journal nobody needs.
            return Err(SalvageError::Unreadable(format!("journal: {error}")));
        }
        let mut batches = Vec::new();
        let run = match &record {
            Some(record) => match read_run(array, record) {
                Ok(run) => {
                    run.for_each(array, record, |batch| {
                        batches.push(batch.records.to_vec());
                        Ok(())
                    })?;
                    run
                }
                Err(Error::Damaged(damage)) => survey.no_run(Some(damage)),
                Err(error) => return Err(error.into()),
            },
            None => {
                let (run, records) = survey.last_run(array)?;
                batches = records;
                run
            }
        };
        if let Some(damage) = &run.loss {
            let unread = run.doubt.as_ref().map(|error| format!("journal: {error}"));
            if let Some(why) = unread.or_else(|| hidden_slot(array)) {
                return Err(SalvageError::Unreadable(format!("{why} ({damage})")));
            }
            let what = format!("{damage}; replayed as far as it goes, later changes are lost");
            lose(Object::Journal, what);
        }
        if let Some(error) = &run.doubt {
            let what = in_doubt(error);
            lose(
                Object::Journal,
                format!("{what}; replayed up to there, and given up if it is"),
            );
        }
        losses.extend(run.unread.iter().map(|unread| Loss {
            object: Object::Node(unread.nid),
            what: format!("{unread}; the file stays as it is"),
            lost: true,
            kept: true,
        }));
        let stated = record.map_or(0, |r| r.sequence.get());
        let mut sequence = survey.checkpoint_sequence + 1;
        if let Some(record) = &record {
            // As a mount's first one.
            sequence = sequence.max(next_sequence(record, report.slots.are_hidden()));
        }
        if record.is_some() && sequence % 2 == stated % 2 {
            // Not into the slot that is the only one.
            sequence += 1;
        }
        let recorded = record.map_or(0, |r| r.mount_id.get());
        let mount = recorded.max(survey.mount_id);
        // Invariant 2.
        let begun = record.is_some() && outdated(array).is_empty();
        let mount_id = match begun {
            true => (mount + 1).max(array.newest_label()),
            false => mount.max(array.newest_label()) + 1,
        };
        let resume = Resume {
            anchor: Anchor {
                sequence: run.end.sequence.max(1),
                ..run.goes_on(array)
            },
            epoch: run.next_epoch.max(survey.epoch + 1),
            mount_id,
            checkpoint_sequence: sequence - 1,
        };
        Ok(Base {
            record,
            slots: report.slots,
            run,
            batches,
            sequence,
            resume,
        })
    }

    /// Chunks whose space maps the journal names: they have become data since the last checkpoint, or were data then, and
    /// nothing that it reaches lies there (R4). Without a record the batches are of before it as well, and what lies in a chunk whose
    /// map was deleted may be what metadata has put there since.
    fn data_since(&self) -> BTreeSet<u32> {
        let mut chunks = BTreeSet::new();
        for records in &self.batches {
            let parsed = parse_records(records, |entries| {
                for entry in entries.iter().filter(|e| e.action != Action::Sum) {
                    let Some(chunk) = entry.nid.checked_sub(SPACE_MAP_FIRST) else {
                        continue;
                    };
                    match entry.action == Action::Delete && self.record.is_none() {
                        true => chunks.remove(&(chunk as u32)),
                        false => chunks.insert(chunk as u32),
                    };
                }
                Ok(())
            });
            // It is replayed up to there.
            if parsed.is_err() {
                break;
            }
        }
        chunks
    }

    /// Where the data lies that the run's end rests on, though no file may have it any more.
    fn vouched_chunks(&self, array: &Array) -> BTreeSet<u32> {
        let geometry = array.geometry();
        let ends = |sum: &DataSum| [sum.block, Block(sum.block.0 + u64::from(sum.blocks) - 1)];
        let blocks = self.run.vouched.iter().flat_map(ends);
        let chunks = blocks.filter_map(|block| geometry.chunk_of(block));
        chunks.map(|(chunk, _)| chunk).collect()
    }

    fn space(
        &self,
        array: &Array,
        losses: &mut Vec<Loss>,
    ) -> Result<Option<SpaceTables>, SalvageError> {
        let Some(record) = &self.record else {
            return Ok(None);
        };
        match read_space(array, record.space_root) {
            Ok(mut space) => {
                // A pointer that leads nowhere was not followed; all others were.
                space.places.retain(|place| !place.is_none());
                Ok(Some(space))
            }
            Err(Error::Damaged(damage)) => {
                losses.push(Loss {
                    object: Object::SpaceTables,
                    what: format!("{damage}; made anew"),
                    lost: false,
                    kept: false,
                });
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// A slot whose record a device does not return, and why: it may be the newest one.
fn hidden_slot(array: &Array) -> Option<String> {
    (0..2).find_map(|slot| {
        let copies = [0, 1].map(|copy| array.read_slot(slot, copy));
        let parse = |block: &AlignedBuf| CheckpointRecord::parse(block, &array.metadata_uuid());
        let serves = copies.iter().flatten().any(|block| parse(block).is_ok());
        let error = copies.into_iter().find_map(Result::err)?;
        (!serves).then(|| format!("checkpoint slot {slot}: {error}"))
    })
}

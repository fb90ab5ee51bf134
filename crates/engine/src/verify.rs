//! Full verification of a store that is open read-only: whether everything the last checkpoint
//! reaches is there and adds up, and what the nodes hold now, handed to a visitor.
//!
//! Invariants:
//! 1. Nothing is written, and nothing that is checked changes: a store open read-only makes no
//!    checkpoint, so table, segment table and chunk states are those of the checkpoint record,
//!    and the nodes that replay changed are the dirty ones of the node cache.
//! 2. Accounting is about the checkpoint, the visitor about the state after replay: a node
//!    that replay changed is read and accounted for where the table says, but shown from memory.
//! 3. Memory is bounded by what the devices can hold of metadata: one bit for each 8 bytes of
//!    segments, one read buffer for each worker, [`FINDINGS_MAX`](crate::FINDINGS_MAX) findings.

use crate::batches::in_doubt;
use crate::content::Content;
use crate::dirty::Dirty;
use crate::error::Error;
use crate::finding::{Findings, Object, Severity};
use crate::items::{node_in, read_node};
use crate::node::Body;
use crate::space::ChunkState;
use crate::space_map::SpaceMap;
use crate::store::Store;
use crate::table::{Entry, RegionPage};
use base::sync::{Mutex, OnceLock, rank};
use device::{AlignedBuf, Array};
use format::checkpoint::CheckpointRecord;
use format::geometry::Geometry;
use format::item::{ITEM_ALIGN, ITEM_MAX, ItemPointer, Place};
use format::table::{LEAF_NIDS, REGION_LEAVES, REGION_NIDS, SPACE_MAP_FIRST};
use format::{BLOCK_SIZE, Block, Nid};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Sees nodes as the last operation left them, from several threads at once, in no order.
pub trait Visitor<C>: Sync {
    fn node(&self, nid: Nid, version: u64, content: &C);
    /// The space map of a data chunk.
    fn space_map(&self, chunk: u32, map: &SpaceMap) {
        let _ = (chunk, map);
    }
    /// The nid is in use, or may be, and its content cannot be read; a finding says why.
    fn unreadable(&self, nid: Nid) {
        let _ = nid;
    }
    /// The same of all nids of a region.
    fn region_unreadable(&self, region: u64) {
        let first = region * REGION_NIDS;
        (first..first + REGION_NIDS).for_each(|nid| self.unreadable(Nid(nid)));
    }
    /// An item that the checkpoint reaches lies, or should lie, in this place: a page, or an image with what is in it. Of some that are
    /// wrong the place may be outside the array.
    fn item(&self, place: Place, item: Seen<'_, C>) {
        let _ = (place, item);
    }
    /// The image that the table names is no image of the node, whether or not replay made up
    /// for it.
    fn bad_image(&self, nid: Nid, why: &Unread) {
        let _ = (nid, why);
    }
    /// A page of the table cannot be used, and nothing below it is seen.
    fn bad_page(&self, why: &Unread) {
        let _ = why;
    }
}

/// What lies where an item should.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a, C> {
    Image(&'a C),
    /// A page of a table, or a space map.
    Page,
    /// Something else, or nothing that a device returns.
    Wrong,
}

/// Why an image cannot be used.
#[derive(Clone, Debug)]
pub enum Unread {
    /// A device does not return it; it may be there still.
    Device(String),
    /// It is damaged, or something else is there.
    Damage(String),
}

impl std::fmt::Display for Unread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unread::Device(why) | Unread::Damage(why) => f.write_str(why),
        }
    }
}

/// How much was verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Node images of the last checkpoint.
    pub nodes: u64,
    /// Pages of the node table and of the space tables.
    pub pages: u64,
    /// Bytes of both, as the segment table counts them.
    pub bytes: u64,
    /// Pages or images were unreadable, so that sums over all of them mean nothing.
    pub incomplete: bool,
}

/// Bytes that one read of neighbouring images takes at most, and how large a gap it bridges.
const RUN_MAX: u64 = 1 << 20;
const GAP_MAX: u64 = 32 << 10;

/// An image and where it lies.
#[derive(Clone, Copy, Debug)]
struct Located {
    nid: Nid,
    version: u64,
    place: Place,
}

impl<C: Content> Store<C> {
    /// Verifies everything that the last checkpoint reaches, and shows every node to `visitor`. What is
    /// wrong goes to `findings`; `progress` is told nodes done and nodes in all.
    ///
    /// # Panics
    /// When the store is not open read-only.
    pub fn verify<V: Visitor<C>>(
        &self,
        visitor: &V,
        findings: &Findings,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Verified {
        assert!(
            self.options.read_only,
            "a store that changes is not verified"
        );
        let audit = Audit::new(self, findings, progress);
        for (index, pointer) in self.table.map_pointers() {
            audit.page(Object::Table, pointer.place());
            // They were read when the store was opened, as the next.
            visitor.item(pointer.place(), Seen::Page);
            if pointer.stamp.get() >> 32 != 0 {
                let what = format!("the pointer to map page {index} has stray bits");
                findings.error(Object::Table, what);
            }
        }
        for place in &self.checkpoint_state.lock().space_places {
            audit.page(Object::SpaceTables, *place);
            visitor.item(*place, Seen::Page);
        }
        let all = |_| true;
        let sweep = Sweep {
            store: self,
            visitor,
            audit: Some(&audit),
            wanted: &all,
        };
        sweep.run();
        audit.totals(self)
    }

    /// Shows every node whose nid is `wanted` to `visitor` once more, without checks; nodes that
    /// cannot be read are left out.
    pub fn visit<V: Visitor<C>>(&self, wanted: &(dyn Fn(Nid) -> bool + Sync), visitor: &V) {
        let sweep = Sweep {
            store: self,
            visitor,
            audit: None,
            wanted,
        };
        sweep.run();
    }

    /// Regions of [`REGION_NIDS`] nids that nodes can be in, ascending.
    pub fn regions(&self) -> Vec<u64> {
        let pages = self.table.regions_on_devices().into_iter();
        let mut regions: Vec<u64> = pages.map(|(region, _)| region).collect();
        let replayed = self.replayed();
        regions.extend(replayed.iter().map(|one| one.nid.0 / REGION_NIDS));
        let unreplayed = self.unreplayed.keys();
        regions.extend(unreplayed.map(|nid| nid / REGION_NIDS));
        regions.sort_unstable();
        regions.dedup();
        regions
    }

    /// A space map where none belongs, or something else in its place.
    pub(crate) fn misfit(&self, nid: Nid, body: &Body<C>) -> Option<&'static str> {
        let geometry = self.array.geometry();
        let chunk = nid.0.checked_sub(SPACE_MAP_FIRST);
        match (body, chunk) {
            (_, Some(chunk)) if chunk >= geometry.chunk_count as u64 => {
                Some("is no space map of a chunk of this array")
            }
            (Body::Gone, _) => None,
            (Body::Space(map), Some(_)) => (map.blocks() != geometry.chunk_blocks)
                .then_some("is no space map of a chunk of this array"),
            (Body::Space(_), None) => Some("is a space map, but its nid is an ordinary one"),
            (_, Some(_)) => Some("is no space map, but its nid is kept for one"),
            _ => None,
        }
    }

    /// The nodes that replay changed (invariant 1).
    fn replayed(&self) -> Vec<Dirty<C>> {
        let lists = self.dirty.lists.iter();
        lists.flat_map(|list| list.lock().clone()).collect()
    }
}

/// Checks the second copies of labels and checkpoint slots; [`Store::verify`] does not. It needs
/// no store, so it can tell of an array that does not open.
pub fn check_copies(array: &Array, findings: &Findings) {
    for repair in array.label_repairs() {
        let object = Object::Label {
            device: repair.device,
            copy: repair.copy,
        };
        let what = format!("{}; the other copy serves", repair.damage);
        findings.add(object, Severity::Notice, what);
    }
    check_slots(array, findings);
}

/// Reads all copies of the checkpoint slots, and checks them.
pub(crate) fn check_slots(array: &Array, findings: &Findings) {
    let slots = [0, 1].map(|slot| read_copies(array, slot));
    let newest = slots
        .each_ref()
        .map(|copies| copies.iter().flatten().flatten().max().copied());
    for (slot, copies) in slots.into_iter().enumerate() {
        check_slot(slot, copies, newest[1 - slot], findings);
    }
}

/// Sequence of the record in each copy of a slot, if one was ever written there.
type Copies = [Result<Option<u64>, String>; 2];

fn read_copies(array: &Array, slot: usize) -> Copies {
    [0, 1].map(|copy| {
        let block = array.read_slot(slot, copy).map_err(|e| e.to_string())?;
        if block.iter().all(|b| *b == 0) {
            return Ok(None);
        }
        CheckpointRecord::parse(&block, &array.metadata_uuid())
            .map(|record| Some(record.sequence.get()))
            .map_err(|damage| damage.to_string())
    })
}

/// A slot that was ever written has two good copies. Both are written at once, so a power cut can
/// tear both; the checkpoint did not happen then, and the other slot has the one before it.
/// If it did happen, the journal's batches say so (R9).
///
/// `other` is what the other slot has: the second checkpoint after the array was made wrote both.
fn check_slot(slot: usize, copies: Copies, other: Option<u64>, findings: &Findings) {
    let newest = copies.iter().flatten().flatten().max().copied();
    for (copy, state) in copies.into_iter().enumerate() {
        let (severity, what) = match (state, newest) {
            (Ok(None), None) if other.is_some_and(|sequence| sequence > 1) => {
                (Severity::Notice, "is empty; the other slot serves".into())
            }
            (Ok(sequence), newest) if sequence == newest => continue,
            (Ok(Some(_)), _) => (Severity::Notice, "is older than the other copy".into()),
            (Ok(None), _) => (Severity::Notice, "is empty; the other copy serves".into()),
            (Err(why), Some(_)) => (Severity::Notice, format!("{why}; the other copy serves")),
            (Err(why), None) if other.is_some() => {
                (Severity::Notice, format!("{why}; the other slot serves"))
            }
            (Err(why), None) => (Severity::Error, format!("{why}, and so is the other copy")),
        };
        findings.add(Object::Slot { slot, copy }, severity, what);
    }
}

/// One walk over all images, in the order of nids by region and of places within a region.
struct Sweep<'a, C: Content, V> {
    store: &'a Store<C>,
    visitor: &'a V,
    audit: Option<&'a Audit<'a>>,
    wanted: &'a (dyn Fn(Nid) -> bool + Sync),
}

impl<C: Content, V: Visitor<C>> Sweep<'_, C, V> {
    fn run(&self) {
        let regions = self.store.table.regions_on_devices();
        let next = AtomicUsize::new(0);
        let workers = self.store.options.workers.clamp(1, regions.len().max(1));
        let work = |_| {
            let mut buf = AlignedBuf::zeroed((RUN_MAX as usize) + 2 * ITEM_MAX);
            while let Some((index, pointer)) = regions.get(next.fetch_add(1, Ordering::Relaxed)) {
                let images = self.region(*index, *pointer);
                self.images(images, &mut buf);
            }
        };
        if base::thread::try_parallel(workers, work).is_err() {
            // Where no more threads can be started one does it all.
            work(0);
        }
        if let Some(audit) = self.audit {
            for (nid, damage) in &self.store.unreplayed {
                let what = format!("the journal cannot be replayed on it: {damage}");
                audit.findings.error(Object::Node(Nid(*nid)), what);
                self.visitor.unreadable(Nid(*nid));
            }
            if let Some(error) = &self.store.doubt {
                audit.findings.error(Object::Journal, in_doubt(error));
            }
            for unread in &self.store.unread {
                audit
                    .findings
                    .error(Object::Node(unread.nid), unread.to_string());
            }
        }
        for Dirty { nid, cell } in self.store.replayed() {
            // What is in memory of one that could not be replayed is what it was in the middle of the journal.
            if (self.wanted)(nid) && !self.store.unreplayed.contains_key(&nid.0) {
                let state = cell.read();
                self.show(nid, state.version, &state.body);
            }
        }
    }

    /// The wanted images of a region.
    fn region(&self, index: u64, pointer: ItemPointer) -> Vec<Located> {
        let object = Object::RegionPage(index);
        if let Some(audit) = self.audit {
            audit.page(object.clone(), pointer.place());
        }
        let page = match self.store.table.region_page(index) {
            Ok(page) => page,
            Err(error) => {
                self.visitor.item(pointer.place(), Seen::Wrong);
                self.lost(object, error, std::iter::empty());
                if self.audit.is_some() {
                    self.visitor.region_unreadable(index);
                }
                return Vec::new();
            }
        };
        self.visitor.item(pointer.place(), Seen::Page);
        if let Some(audit) = self.audit {
            audit.free_count(index, pointer, &page);
        }
        let mut images = Vec::new();
        for leaf in 0..REGION_LEAVES as usize {
            self.leaf(index, leaf, &page, &mut images);
        }
        images
    }

    fn leaf(&self, region: u64, leaf: usize, page: &RegionPage, images: &mut Vec<Located>) {
        let first = region * REGION_NIDS + leaf as u64 * LEAF_NIDS;
        let nids = first..first + LEAF_NIDS;
        let object = Object::LeafPage(region * REGION_LEAVES + leaf as u64);
        let in_use = |nid: &u64| {
            let bit = (nid % REGION_NIDS) as usize;
            page.bitmap[bit / 64] >> (bit % 64) & 1 == 1
        };
        let pointer = page.pointers[leaf];
        let entries = if pointer.place().is_none() {
            if !nids.clone().any(|nid| in_use(&nid)) {
                return;
            }
            vec![Entry::default(); LEAF_NIDS as usize]
        } else {
            if let Some(audit) = self.audit {
                audit.page(object.clone(), pointer.place());
            }
            match self.store.table.leaf_entries(region, leaf, pointer) {
                Ok(entries) => {
                    self.visitor.item(pointer.place(), Seen::Page);
                    entries
                }
                Err(error) => {
                    self.visitor.item(pointer.place(), Seen::Wrong);
                    return self.lost(object, error, nids.filter(in_use));
                }
            }
        };
        for (nid, entry) in nids.zip(entries) {
            let Entry { place, version } = entry;
            if let Some(audit) = self.audit {
                audit.entry(Nid(nid), entry, in_use(&nid));
            }
            let nid = Nid(nid);
            if !place.is_none() && (self.wanted)(nid) {
                images.push(Located {
                    nid,
                    version,
                    place,
                });
            }
        }
    }

    /// A table page is unreadable, and with it these nodes.
    fn lost(&self, object: Object, error: Error, nids: impl Iterator<Item = u64>) {
        let why = match error {
            Error::Damaged(damage) => Unread::Damage(damage.to_string()),
            other => Unread::Device(other.to_string()),
        };
        self.visitor.bad_page(&why);
        let Some(audit) = self.audit else { return };
        audit.incomplete.store(true, Ordering::Relaxed);
        audit.findings.error(object, why.to_string());
        nids.for_each(|nid| self.visitor.unreadable(Nid(nid)));
    }

    /// Reads images in the order of their places, neighbours together.
    fn images(&self, mut images: Vec<Located>, buf: &mut AlignedBuf) {
        let limit = self.store.array.geometry().total_blocks() * BLOCK_SIZE as u64;
        images.retain(|at| {
            let inside =
                at.place.len as usize <= ITEM_MAX && at.place.byte + at.place.len as u64 <= limit;
            if !inside {
                let why = "its image lies outside the array".into();
                self.found(at, Err(Unread::Damage(why)));
            }
            inside
        });
        images.sort_unstable_by_key(|at| at.place.byte);
        let mut rest = &images[..];
        while let Some(first) = rest.first() {
            let start = first.place.byte;
            let mut end = start;
            let joins = |at: &&Located| {
                let joined = at.place.byte <= end + GAP_MAX && at.place.byte < start + RUN_MAX;
                end = end.max(at.place.byte + at.place.len as u64);
                joined
            };
            let count = rest.iter().take_while(joins).count().max(1);
            let (run, later) = rest.split_at(count);
            self.read_run(run, buf);
            rest = later;
        }
    }

    fn read_run(&self, run: &[Located], buf: &mut AlignedBuf) {
        let block = BLOCK_SIZE as u64;
        let start = run[0].place.byte / block * block;
        let last = run.iter().map(|at| at.place.byte + at.place.len as u64);
        let end = last.max().unwrap_or(start).next_multiple_of(block);
        let bytes = &mut buf[..(end - start) as usize];
        let whole = self.store.array.read(start, bytes).is_ok();
        for at in run {
            let image = if whole {
                let from = (at.place.byte - start) as usize;
                let item = &bytes[from..from + at.place.len as usize];
                node_in(self.store.array.checksum_seed(), item, at.nid, at.version)
                    .and_then(|(kind, payload)| Body::decode(kind, payload))
                    .map_err(|damage| Unread::Damage(damage.to_string()))
            } else {
                self.read_one(at)
            };
            self.found(at, image);
        }
        if let Some(audit) = self.audit {
            audit.advance(run.len() as u64);
        }
    }

    /// For images whose neighbourhood has unreadable blocks.
    fn read_one(&self, at: &Located) -> Result<Body<C>, Unread> {
        let read = read_node(&self.store.array, at.nid, at.version, at.place);
        let item = read.map_err(|error| Unread::Device(error.to_string()))?;
        item.and_then(|item| Body::decode(item.header.node_kind, item.payload()))
            .map_err(|damage| Unread::Damage(damage.to_string()))
    }

    /// An image was read, or not.
    fn found(&self, at: &Located, image: Result<Body<C>, Unread>) {
        let hidden = self.store.unreplayed.contains_key(&at.nid.0);
        let cached = self.store.nodes.get(at.nid);
        let replayed =
            hidden || cached.is_some_and(|cell| cell.header.dirty.load(Ordering::Acquire));
        match image {
            Ok(body) => {
                if let Some(audit) = self.audit {
                    audit.image(at.nid, &body);
                }
                let misfit = self.store.misfit(at.nid, &body);
                let seen = match (&misfit, &body) {
                    (Some(_), _) => Seen::Wrong,
                    (None, Body::User(content)) => Seen::Image(content),
                    (None, Body::Space(_) | Body::Gone) => Seen::Page,
                };
                self.visitor.item(at.place, seen);
                if let Some(why) = misfit {
                    self.visitor.bad_image(at.nid, &Unread::Damage(why.into()));
                }
                if !replayed {
                    self.show(at.nid, at.version, &body);
                }
            }
            Err(why) => {
                self.visitor.item(at.place, Seen::Wrong);
                self.visitor.bad_image(at.nid, &why);
                let Some(audit) = self.audit else { return };
                audit.bad_image(at.nid, (!hidden).then(|| why.to_string()));
                if !replayed {
                    self.visitor.unreadable(at.nid);
                }
            }
        }
    }

    fn show(&self, nid: Nid, version: u64, body: &Body<C>) {
        match body {
            Body::Gone => {}
            Body::User(content) => self.visitor.node(nid, version, content),
            Body::Space(map) => {
                let chunk = nid.0.saturating_sub(SPACE_MAP_FIRST);
                self.visitor.space_map(chunk as u32, map);
            }
        }
    }
}

/// The segments of one meta chunk as the items found account for them.
struct ChunkUse {
    live: Vec<AtomicU32>,
    /// One bit for each [`ITEM_ALIGN`] bytes; there once an item lies in it, since a damaged segment table can name any chunk.
    units: OnceLock<Vec<AtomicU64>>,
}

/// What a space map's image says.
#[derive(Clone, Copy)]
enum MapSeen {
    Free(u32),
    Unreadable,
}

/// Sums over everything that the checkpoint reaches.
struct Audit<'a> {
    findings: &'a Findings,
    progress: &'a (dyn Fn(u64, u64) + Sync),
    geometry: &'a Geometry,
    chunks: BTreeMap<u32, ChunkUse>,
    maps: Mutex<BTreeMap<u64, MapSeen>>,
    entries: AtomicU64,
    pages: AtomicU64,
    bytes: AtomicU64,
    done: AtomicU64,
    expected: u64,
    /// A table page was unreadable: sums are too small.
    incomplete: AtomicBool,
}

impl<'a> Audit<'a> {
    fn new<C: Content>(
        store: &'a Store<C>,
        findings: &'a Findings,
        progress: &'a (dyn Fn(u64, u64) + Sync),
    ) -> Self {
        let geometry = store.array.geometry();
        let chunk = |(chunk, live): (u32, Vec<u32>)| {
            let live = live.iter().map(|_| AtomicU32::new(0)).collect();
            let units = OnceLock::new();
            (chunk, ChunkUse { live, units })
        };
        Audit {
            findings,
            progress,
            geometry,
            chunks: store.segments.live().into_iter().map(chunk).collect(),
            maps: Mutex::new(rank::LEAF, BTreeMap::new()),
            entries: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            done: AtomicU64::new(0),
            expected: store.table.node_count(),
            incomplete: AtomicBool::new(false),
        }
    }

    fn advance(&self, nodes: u64) {
        let done = self.done.fetch_add(nodes, Ordering::Relaxed) + nodes;
        (self.progress)(done, self.expected.max(done));
    }

    fn page(&self, object: Object, place: Place) {
        self.pages.fetch_add(1, Ordering::Relaxed);
        self.item(object, place);
    }

    /// Accounts for an item; no two may overlap.
    fn item(&self, object: Object, place: Place) {
        let len = place.len as u64;
        self.bytes.fetch_add(len, Ordering::Relaxed);
        let block = BLOCK_SIZE as u64;
        let at = self.geometry.chunk_of(Block(place.byte / block));
        let found = at.and_then(|(chunk, index)| Some((self.chunks.get(&chunk)?, index)));
        let Some((chunk, index)) = found else {
            let what = format!("lies at byte {}, in no segment", place.byte);
            return self.findings.error(object, what);
        };
        let offset = index as u64 * block + place.byte % block;
        let segment = self.geometry.segment_bytes() as u64;
        if offset % segment + len > segment {
            let what = format!("at byte {} reaches past its segment", place.byte);
            return self.findings.error(object, what);
        }
        let live = &chunk.live[(offset / segment) as usize];
        live.fetch_add(place.len, Ordering::Relaxed);
        let mut overlaps = false;
        let unit = ITEM_ALIGN as u64;
        let words = (self.geometry.chunk_blocks as u64 * block / unit).div_ceil(64);
        let units = chunk.units.get_or_init(|| {
            let zeros = (0..words).map(|_| AtomicU64::new(0));
            zeros.collect()
        });
        let (mut next, end) = (offset / unit, (offset + len) / unit);
        while next < end {
            let count = (64 - next % 64).min(end - next);
            let bits = u64::MAX >> (64 - count) << (next % 64);
            let before = units[next as usize / 64].fetch_or(bits, Ordering::Relaxed);
            overlaps |= before & bits != 0;
            next += count;
        }
        if overlaps {
            let what = format!("at byte {} overlaps another item", place.byte);
            self.findings.error(object, what);
        }
    }

    fn free_count(&self, region: u64, pointer: ItemPointer, page: &RegionPage) {
        let used: u64 = page.bitmap.iter().map(|w| w.count_ones() as u64).sum();
        let stated = pointer.stamp.get() >> 32;
        if stated != REGION_NIDS - used {
            let what = format!(
                "the pointer to it says {stated} free nids, its bitmap {}",
                REGION_NIDS - used
            );
            self.findings.error(Object::RegionPage(region), what);
        }
    }

    fn entry(&self, nid: Nid, entry: Entry, in_use: bool) {
        let exists = !entry.place.is_none();
        if exists != in_use {
            let what = match exists {
                true => "exists, but its region's bitmap has it as free",
                false => "does not exist, but its region's bitmap has it as in use",
            };
            self.findings.error(Object::Node(nid), what);
        }
        if exists {
            self.entries.fetch_add(1, Ordering::Relaxed);
            self.item(Object::Node(nid), entry.place);
        }
    }

    fn image<C: Content>(&self, nid: Nid, body: &Body<C>) {
        let chunk = nid.0.checked_sub(SPACE_MAP_FIRST);
        match (body, chunk) {
            (Body::Space(map), Some(chunk)) => {
                if map.blocks() != self.geometry.chunk_blocks {
                    let what = format!("is the space map of {} blocks", map.blocks());
                    self.findings.error(Object::Node(nid), what);
                }
                self.maps.lock().insert(chunk, MapSeen::Free(map.free()));
            }
            (Body::Space(_), None) => {
                let what = "is a space map, but its nid is an ordinary one";
                self.findings.error(Object::Node(nid), what);
            }
            (_, Some(_)) => {
                let what = "is no space map, but its nid is kept for one";
                self.findings.error(Object::Node(nid), what);
            }
            _ => {}
        }
    }

    /// `why` is `None` when that is reported already.
    fn bad_image(&self, nid: Nid, why: Option<String>) {
        if let Some(why) = why {
            self.findings.error(Object::Node(nid), why);
        }
        if let Some(chunk) = nid.0.checked_sub(SPACE_MAP_FIRST) {
            self.maps.lock().insert(chunk, MapSeen::Unreadable);
        }
    }

    /// Compares the sums with what the checkpoint says.
    fn totals<C: Content>(&self, store: &Store<C>) -> Verified {
        let incomplete = self.incomplete.load(Ordering::Relaxed);
        let nodes = self.entries.load(Ordering::Relaxed);
        if !incomplete {
            if nodes != self.expected {
                let what = format!("holds {nodes} nodes; the checkpoint says {}", self.expected);
                self.findings.error(Object::Table, what);
            }
            self.live_bytes(store);
        }
        self.chunk_states(store, incomplete);
        Verified {
            nodes,
            pages: self.pages.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            incomplete,
        }
    }

    fn live_bytes<C: Content>(&self, store: &Store<C>) {
        for (chunk, stated) in store.segments.live() {
            let found = self.chunks.get(&chunk).map(|c| &c.live[..]).unwrap_or(&[]);
            for (index, (stated, found)) in (0..).zip(stated.iter().zip(found)) {
                let found = found.load(Ordering::Relaxed);
                if *stated != found {
                    let what = format!("has {found} live bytes; the segment table says {stated}");
                    self.findings.error(Object::Segment { chunk, index }, what);
                }
            }
        }
    }

    /// A chunk is data exactly if it has a space map, and its free count is the map's.
    fn chunk_states<C: Content>(&self, store: &Store<C>, incomplete: bool) {
        let mut maps = std::mem::take(&mut *self.maps.lock());
        let states = store.checkpoint_state.lock().chunks.clone();
        for (chunk, state) in (0..).zip(states) {
            let seen = maps.remove(&(chunk as u64));
            let meta = self.chunks.contains_key(&chunk);
            let what = match (state, seen) {
                (_, Some(MapSeen::Unreadable)) => continue,
                (ChunkState::Data(_), _) if meta => "holds both data and segments".to_owned(),
                (ChunkState::Data(_), None) if incomplete => continue,
                (ChunkState::Data(_), None) => "is a data chunk without a space map".to_owned(),
                (ChunkState::Data(stated), Some(MapSeen::Free(free))) if stated != free => {
                    format!("has {free} free blocks; the space tables say {stated}")
                }
                (ChunkState::Free | ChunkState::Meta, Some(_)) => {
                    "has a space map but is no data chunk".to_owned()
                }
                _ => continue,
            };
            self.findings.error(Object::Chunk(chunk), what);
        }
        for chunk in maps.into_keys() {
            let what = "is the space map of a chunk that does not exist";
            self.findings
                .error(Object::Node(Nid(SPACE_MAP_FIRST + chunk)), what);
        }
    }
}

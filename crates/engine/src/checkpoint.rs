//! The checkpoint: node images and tables become durable, and the journal's tail moves on.
//!
//! One checkpoint runs at a time, beside all operations. Its steps:
//!
//! 1. close the epoch (E0), and take all dirty lists;
//! 2. workers encode each dirty node under its shared lock, or fold and encode it under its exclusive one, and
//!    write packed segments; a repair's do so twice, first with what inodes have that had no image;
//! 3. make the journal durable through Ef, the newest epoch that an image can hold (R3);
//! 4. enter the images into the node table, write changed table pages and the space tables,
//!    flush;
//! 5. write the record: **the commit point**;
//! 6. free what only the old record reached, and move the journal's tail.
//!
//! Nodes are touched by the workers alone, in steps 2 and 6: what they are is written by the cores that
//! use them, and one thread that fetches a line of each is slower than those cores are together. For the same
//! reason workers sort the dirty lists, enter images into the table and write its pages: what one thread does
//! alone takes as long however many nodes there are, but for a sample of them.
//!
//! Invariants:
//! 1. A node is on a dirty list, or being captured, from its first change until a durable record
//!    reaches an image of its newest version: so it is in memory until then, and for good when the
//!    checkpoint fails. What lies on the devices is older, and would not fit other nodes.
//! 2. Whatever the last durable record reaches is not written over before step 6.
//! 3. A failure at any step latches the store, and so does a panic, before another checkpoint can begin: the last durable
//!    record and the journal behind it stay whole.
//! 4. What was merged into a node up to E0 is in its image (R5): what can be merged into is folded and captured
//!    under one exclusive hold of its lock. So nobody is between merging and marking then, the image has all that
//!    was merged before it, and whoever merges afterwards puts the node on a list again. Taking that lock twice
//!    would hold up everybody who works in a shared directory twice.
//! 5. A data chunk becomes free only between checkpoints (R4): one that is made free while a checkpoint runs could get segments
//!    of this checkpoint, whose images may have its space map still.

use crate::content::Content;
use crate::dirty::{Charge, Dirty, LEAF_COST, reserve_chunks};
use crate::error::Error;
use crate::items::{read_item, read_page};
use crate::journal::Anchor;
use crate::node::{Body, Cell, State, ask_to_change};
use crate::op;
use crate::segments::{Changes, Packer};
use crate::space::ChunkState;
use crate::step::Step;
use crate::store::Store;
use crate::sum::Padded;
use crate::table::{DirtyRegion, Entry, PageSink, write_part};
use crate::written::BytesWritten;
use base::atomic::{AtomicI64, AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Arc, Latch};
use base::tight;
use device::{Array, Durability};
use format::checkpoint::{
    CHECKPOINT_MAGIC, CheckpointRecord, SPACE_PAGE_BYTES, SPACE_PAGES_MAX, SPACE_WORDS_MAX,
};
use format::item::{self, ItemKind, ItemPointer, PAYLOAD_MAX, Place};
use format::table::{LEAF_NIDS, REGION_LEAVES, ROOTS, SPACE_MAP_FIRST};
use format::{BLOCK_SIZE, Damage, Nid, U32, U64};
use std::collections::BTreeMap;
use zerocopy::{FromBytes, IntoBytes};

/// What one checkpoint leaves for the next.
#[derive(Debug)]
pub(crate) struct CheckpointState {
    /// The next one has the number after this.
    pub sequence: u64,
    /// State of each chunk that is not meta, as the captured images have it.
    pub chunks: Vec<ChunkState>,
    /// Root and pages of the space tables.
    pub space_places: Vec<Place>,
    /// The last record said that the journal was empty.
    pub clean: bool,
    /// Words of the store's user, as the next record has them.
    pub user: [u64; USER_WORDS],
    /// Images are durable before any page of the table names them: where no record is left a repair goes by the newest pages that it
    /// finds, and the one that wrote them may have been interrupted. It goes by the newest images, too: none of an inode is durable before
    /// those of the new nodes that it has.
    pub images_first: bool,
}

/// Words that a store's user has in each checkpoint record.
pub const USER_WORDS: usize = 8;

/// Nodes of one part of a checkpoint, about; and parts, at most.
fn part_nodes() -> usize {
    tight::limit(64, 4)
}
const PARTS_MAX: usize = 256;
/// Parts for one worker, about.
const PARTS_EACH: usize = 4;
/// Nodes of each part that are looked at to find where the parts begin.
const SAMPLES: usize = 8;
/// So many nodes ahead of the one that is captured its memory is asked for, and what that refers to.
const CELLS_AHEAD: usize = 12;
/// Changed leaf pages of the node table for one worker, about: what it writes is padded to whole blocks once.
fn part_leaves() -> usize {
    tight::limit(16, 1)
}
/// Bytes of images after which a worker says that they are on the devices' side and in no dirty memory.
const SETTLED: i64 = 64 << 10;

/// What changed since the last checkpoint, in parts.
///
/// Lists are as operations left them, each sorted by nid. A part is all nids from its first to the next part's,
/// which are of other leaves of the node table; in whatever lists they are.
struct Changed<C> {
    lists: Vec<Vec<Dirty<C>>>,
    /// The first nid of each part, in order.
    parts: Vec<u64>,
    /// What the captured ones were charged for, in memory, and are until the checkpoint lets go.
    memory: AtomicI64,
}

impl<C> Changed<C> {
    /// Of sorted lists.
    fn new(lists: Vec<Vec<Dirty<C>>>) -> Self {
        let nodes: usize = lists.iter().map(Vec::len).sum();
        let wanted = (nodes / part_nodes()).clamp(1, PARTS_MAX);
        let step = (nodes / (wanted * SAMPLES)).max(1);
        let samples = lists.iter().flat_map(|list| list.iter().step_by(step));
        let mut samples: Vec<u64> = samples.map(|one| one.nid.0).collect();
        samples.sort_unstable();
        let share = samples.len().div_ceil(wanted).max(1);
        let bounds = samples.iter().step_by(share).skip(1);
        let mut parts = vec![0];
        parts.extend(bounds.map(|nid| nid / LEAF_NIDS * LEAF_NIDS));
        parts.dedup();
        Changed {
            lists,
            parts,
            memory: AtomicI64::new(0),
        }
    }

    fn nodes(&self) -> usize {
        self.lists.iter().map(Vec::len).sum()
    }

    /// The nodes of a part in the order of their nids: neighbours share table pages, and are read together later.
    fn part(&self, part: usize) -> Vec<&Dirty<C>> {
        let below = |bound: u64| move |one: &Dirty<C>| one.nid.0 < bound;
        let mut nodes = Vec::new();
        for list in &self.lists {
            let from = list.partition_point(below(self.parts[part]));
            let to = match self.parts.get(part + 1) {
                Some(next) => list.partition_point(below(*next)),
                None => list.len(),
            };
            nodes.extend(&list[from..to]);
        }
        // Sorted runs are merged.
        nodes.sort_by_key(|one| one.nid);
        nodes
    }
}

/// What a checkpoint has taken; back on a list when it fails or panics (invariant 1).
struct Taken<'s, C: Content> {
    store: &'s Store<C>,
    changed: Changed<C>,
}

impl<C: Content> Taken<'_, C> {
    /// A durable record reaches it all.
    fn let_go(mut self) {
        let memory = self.changed.memory.load(Ordering::Relaxed);
        self.store.release(std::mem::take(&mut self.changed.lists));
        self.store.dirty.let_go(memory);
    }
}

impl<C: Content> Drop for Taken<'_, C> {
    fn drop(&mut self) {
        let lists = std::mem::take(&mut self.changed.lists);
        if !lists.is_empty() {
            let mut list = self.store.dirty.lists[0].lock();
            list.extend(lists.into_iter().flatten());
        }
    }
}

/// An image, or a deletion, captured in step 2.
struct Captured {
    nid: Nid,
    entry: Entry,
    /// Free blocks, for space maps that exist.
    free: Option<u32>,
}

/// What a checkpoint did.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckpointReport {
    pub nodes: u64,
    pub bytes: u64,
    pub cleaned_segments: u64,
}

impl<C: Content> Store<C> {
    /// Makes a checkpoint of everything committed before the call.
    pub fn checkpoint(&self) -> Result<(), Error> {
        if self.options.read_only {
            return Ok(());
        }
        self.checkpoint_now()
    }

    /// What the user of this store left in the newest record, or has set since.
    pub fn user_words(&self) -> [u64; USER_WORDS] {
        self.checkpoint_state.lock().user
    }

    /// Every checkpoint that begins from now on has these; a [`checkpoint`](Self::checkpoint) makes them durable.
    pub fn set_user_words(&self, words: [u64; USER_WORDS]) {
        self.checkpoint_state.lock().user = words;
    }

    /// The number of this opening of the store: one more than the last one's, and durable, unless it is read-only.
    pub fn mount_number(&self) -> u64 {
        self.journal.mount_id
    }

    /// Data chunks without data become free before it.
    pub(crate) fn checkpoint_now(&self) -> Result<(), Error> {
        let mut state = self.checkpoint_state.lock();
        self.retire_chunks(&state);
        self.make_checkpoint_of(&mut state, false)
    }

    /// The last one, of a clean end: nothing is written after it.
    pub(crate) fn closing_checkpoint(&self) -> Result<(), Error> {
        let mut state = self.checkpoint_state.lock();
        self.retire_chunks(&state);
        self.make_checkpoint_of(&mut state, true)?;
        debug_assert_eq!(self.dirty.charged(), Charge::default());
        // Before anybody else who waits for the lock can begin another.
        self.journal.fail(Error::ReadOnly);
        Ok(())
    }

    pub(crate) fn make_checkpoint(&self, clean: bool) -> Result<(), Error> {
        self.make_checkpoint_of(&mut self.checkpoint_state.lock(), clean)
    }

    /// Latches the store when it fails (invariant 3).
    fn make_checkpoint_of(&self, state: &mut CheckpointState, clean: bool) -> Result<(), Error> {
        if let Some(error) = self.journal.failed() {
            return Err(error);
        }
        let began = self.clock().monotonic_ns();
        let step = Step::begin(self, "a checkpoint");
        let result = self.run(state, clean);
        step.end();
        if let Ok(report) = &result {
            let counts = &self.counts;
            counts.checkpoints.record(self.since(began));
            counts
                .checkpoint_nodes
                .fetch_add(report.nodes, Ordering::Relaxed);
            let cleaned = report.cleaned_segments;
            counts
                .cleaned_segments
                .fetch_add(cleaned, Ordering::Relaxed);
        }
        if let Err(error) = &result {
            self.latch(&format!("checkpoint: {error}"));
        }
        result.map(drop)
    }

    fn run(&self, state: &mut CheckpointState, clean: bool) -> Result<CheckpointReport, Error> {
        self.close_segments();
        let mut report = CheckpointReport {
            cleaned_segments: self.clean_segments(&state.space_places)?,
            ..CheckpointReport::default()
        };
        let keep = self.free_segments_wanted();
        let released = self.segments.release_chunks(keep);
        self.write_checkpoint(state, clean, &released, &mut report)?;
        Ok(report)
    }

    /// Of workers that have nothing to do while there is little room: what is live in them can move then.
    fn close_segments(&self) {
        let (packers, of_tables) = (self.packers(), self.options.workers);
        if packers < self.packers_most {
            self.segments.close(|worker| worker % of_tables >= packers);
        }
    }

    /// Steps 1 to 6; `released` are meta chunks that become free.
    pub(crate) fn write_checkpoint(
        &self,
        state: &mut CheckpointState,
        clean: bool,
        released: &[u32],
        report: &mut CheckpointReport,
    ) -> Result<(), Error> {
        // Step 1.
        if clean {
            // Nobody changes anything any more: no fold will follow the anchor.
            for list in &self.dirty.lists {
                let dirty = list.lock().clone();
                let merges = |one: &&Dirty<C>| one.cell.header.merges.load(Ordering::Relaxed);
                for one in dirty.iter().filter(merges) {
                    self.fold(&one.cell, &mut self.nodes.write(&one.cell));
                }
            }
        }
        let (e0, anchor) = self.journal.close_and_commit()?;
        let taken = Taken {
            store: self,
            changed: self.take_dirty(),
        };
        let dirty = &taken.changed;
        report.nodes = dirty.nodes() as u64;
        if dirty.nodes() == 0 && released.is_empty() && state.clean && clean {
            return Ok(());
        }
        self.write_images(state, clean, released, report, (e0, anchor), dirty)?;
        taken.let_go();
        Ok(())
    }

    /// Steps 2 to 6.
    fn write_images(
        &self,
        state: &mut CheckpointState,
        clean: bool,
        released: &[u32],
        report: &mut CheckpointReport,
        (e0, anchor): (u64, Anchor),
        dirty: &Changed<C>,
    ) -> Result<(), Error> {
        let sequence = state.sequence + 1;
        // Step 2.
        let flush_failures = self.array.flush_failures();
        let captured = match state.images_first {
            true => self.capture_in_order(dirty, sequence, report)?,
            false => self.capture(dirty, sequence, None, report)?,
        };
        debug_assert_eq!(captured.iter().map(Vec::len).sum::<usize>(), dirty.nodes());
        // Step 3: nothing captured so far is newer than the epoch open now.
        let (image_epoch, reach) = match planted(Canary::ImagesAheadOfLog) {
            true => (e0, anchor),
            false => self.journal.close_and_commit()?,
        };
        // Step 4.
        self.enter(&captured, state)?;
        self.dirty.leaves.entered();
        let (roots, space_root, bytes) = self.write_tables(state, sequence)?;
        report.bytes += bytes;
        let mut record = self.record(sequence, anchor);
        record.clean = U32::new(clean as u32);
        record.user = state.user.map(U64::new);
        record.epoch = U64::new(e0);
        record.image_epoch = U64::new(image_epoch);
        record.image_sequence = U64::new(reach.sequence);
        record.roots = roots;
        record.space_root = space_root;
        record.seal();
        // One that nobody takes would be in the way of the one before the last.
        CheckpointRecord::parse(record.as_bytes(), &record.uuid).map_err(Error::Damaged)?;
        if planted(Canary::BothSlots) {
            for slot in 0..2 {
                self.array.write_slot(slot, record.as_bytes())?;
            }
        }
        if !planted(Canary::CheckpointUnflushed) {
            let flushed = self.array.flush()?;
            let count = &self.counts.checkpoint_flushes;
            count.fetch_add(flushed, Ordering::Relaxed);
        }
        // Somebody else's flush that fails may have lost what was written here; that ours succeeded says nothing of it (R17).
        let nothing_lost = || match self.array.flush_failures() == flush_failures {
            true => Ok(()),
            false => Err(Error::Failed("a flush failed during a checkpoint".into())),
        };
        nothing_lost()?;
        if let Some(error) = self.journal.failed() {
            // A batch that failed may have taken with it what was written here.
            return Err(error);
        }
        // Step 5.
        if planted(Canary::TailBeforeRecord) {
            self.journal.release(anchor.position, sequence);
        }
        self.array
            .write_slot((sequence % 2) as usize, record.as_bytes())?;
        nothing_lost()?;
        let count = &self.counts.checkpoint_durably;
        count.fetch_add(2, Ordering::Relaxed);
        self.segments.written.add(&BytesWritten {
            slots: 2 * BLOCK_SIZE as u64,
            ..BytesWritten::default()
        });
        // Step 6.
        state.sequence = sequence;
        state.clean = clean;
        self.journal.release(anchor.position, sequence);
        // Recovery takes batches that images depend on as they are.
        self.journal.vouched.confirm(image_epoch);
        self.segments.find_free();
        self.space.chunks_freed(released);
        self.adapt_limits();
        Ok(())
    }

    /// A record of the state now; the caller adds what the steps produced and seals it.
    fn record(&self, sequence: u64, anchor: Anchor) -> CheckpointRecord {
        let mut record = CheckpointRecord::zeroed();
        record.magic = CHECKPOINT_MAGIC;
        record.uuid = self.array.metadata_uuid();
        record.sequence = U64::new(sequence);
        record.mount_id = U64::new(self.journal.mount_id);
        record.anchor_position = U64::new(anchor.position);
        record.anchor_sequence = U64::new(anchor.sequence);
        record.anchor_checksum = U32::new(anchor.previous_crc);
        record.regions = U32::new(self.nids.region_count());
        record.node_count = U64::new(self.table.node_count());
        record.time = U64::new(self.clock().now().sec().max(0) as u64);
        record
    }

    fn take_dirty(&self) -> Changed<C> {
        self.dirty.leaves.begin();
        let take = |list: &Padded<Latch<Vec<_>>>| std::mem::take(&mut *list.lock());
        let mut lists: Vec<Vec<Dirty<C>>> = self.dirty.lists.iter().map(take).collect();
        if planted(Canary::DirtyNodeForgotten) {
            lists.iter_mut().find_map(Vec::pop);
        }
        lists.retain(|list| !list.is_empty());
        let sort = |list: &mut Vec<Dirty<C>>| {
            base::trace::mark("sort");
            // Mostly sorted already: runs are merged.
            list.sort_by_key(|one| one.nid);
        };
        self.run_parts(&mut lists, &sort);
        Changed::new(lists)
    }

    /// Folds what is pending in a node that is held exclusively (invariant 4).
    fn fold(&self, cell: &Arc<Cell<C>>, node: &mut State<C>) {
        if !planted(Canary::MergesNotFolded) {
            op::fold(self, cell, node);
        }
    }

    /// Captures all, and makes them durable; first the new nodes that inodes have. A tree that is made anew is made of such, and its inode's
    /// newest image is worth nothing without them, while the former nodes are named by none that counts.
    fn capture_in_order(
        &self,
        dirty: &Changed<C>,
        sequence: u64,
        report: &mut CheckpointReport,
    ) -> Result<Vec<Vec<Captured>>, Error> {
        let mut captured = self.capture(dirty, sequence, Some(true), report)?;
        self.array.flush()?;
        let others = self.capture(dirty, sequence, Some(false), report)?;
        self.array.flush()?;
        for (part, mut others) in captured.iter_mut().zip(others) {
            part.append(&mut others);
            part.sort_by_key(|one| one.nid);
        }
        Ok(captured)
    }

    /// An owned node that has no image.
    fn is_new(&self, one: &Dirty<C>) -> Result<bool, Error> {
        let owned = one.cell.header.is_owned();
        Ok(owned && self.table.entry(one.nid)?.place.is_none())
    }

    /// Folds, encodes and writes dirty nodes, or those that are `new` or not, with N workers that share no lock but the
    /// segment table's, and hold no node's while they write; returns what was captured of each part.
    fn capture(
        &self,
        dirty: &Changed<C>,
        sequence: u64,
        new: Option<bool>,
        report: &mut CheckpointReport,
    ) -> Result<Vec<Vec<Captured>>, Error> {
        let parts = dirty.parts.len();
        let next = AtomicUsize::new(0);
        // Each writes whole blocks, and leaves a segment open.
        let useful = parts.div_ceil(PARTS_EACH);
        let workers = self.packers().min(useful);
        let results = self.fan_out(workers, |worker| {
            let mut packer =
                Packer::new(&self.segments, &self.space, &self.array, worker, sequence);
            let mut captured = Vec::new();
            while let Some(part) = claim(&next, parts) {
                captured.push((part, self.capture_part(dirty, part, new, &mut packer)?));
            }
            Ok::<_, Error>((captured, packer.finish()?))
        });
        base::trace::joined();
        let mut all = Vec::with_capacity(parts);
        for result in results {
            let (mut captured, written) = result?;
            all.append(&mut captured);
            report.bytes += written;
        }
        all.sort_unstable_by_key(|(part, _)| *part);
        Ok(all.into_iter().map(|(_, captured)| captured).collect())
    }

    fn capture_part(
        &self,
        dirty: &Changed<C>,
        part: usize,
        new: Option<bool>,
        packer: &mut Packer<'_>,
    ) -> Result<Vec<Captured>, Error> {
        base::trace::mark("capture");
        let mut nodes = dirty.part(part);
        if let Some(new) = new {
            let is_new = nodes.iter().map(|one| self.is_new(one));
            let mut is_new = is_new.collect::<Result<Vec<_>, _>>()?.into_iter();
            nodes.retain(|_| is_new.next() == Some(new));
        }
        let mut captured = Vec::with_capacity(nodes.len());
        let enough = SETTLED.min(self.dirty.limit / 16) as u64;
        let mut refunds = Charge::default();
        let mut image = Vec::new();
        for (i, one) in nodes.iter().enumerate() {
            if let Some(later) = nodes.get(i + CELLS_AHEAD) {
                ask_to_change(&later.cell);
            }
            captured.push(self.capture_node(&one.cell, packer, &mut refunds, &mut image)?);
            packer.relieve()?;
            if packer.unsettled() >= enough {
                self.settle(packer, &mut refunds)?;
            }
        }
        self.settle(packer, &mut refunds)?;
        dirty.memory.fetch_add(refunds.memory, Ordering::Relaxed);
        Ok(captured)
    }

    /// Images count as live before their nodes no longer count as dirty: whoever adds both up finds enough.
    fn settle(&self, packer: &mut Packer<'_>, refunds: &mut Charge) -> Result<(), Error> {
        packer.settle()?;
        self.dirty.written(std::mem::take(&mut refunds.image));
        Ok(())
    }

    fn capture_node(
        &self,
        cell: &Arc<Cell<C>>,
        packer: &mut Packer<'_>,
        refunds: &mut Charge,
        image: &mut Vec<u8>,
    ) -> Result<Captured, Error> {
        let node = cell.read();
        if !cell.header.merges.load(Ordering::Relaxed) {
            // Under the shared lock no operation is between changing the node and marking it
            // dirty, so a change after this capture puts it on a list again.
            return self.capture_state(cell, &node, refunds, |image| packer.append(image));
        }
        drop(node);
        // Invariant 4. The lock is held while the image is made, not while it is written.
        image.clear();
        let mut captured = {
            let mut node = self.nodes.write(cell);
            self.fold(cell, &mut node);
            self.capture_state(cell, &node, refunds, |encode| {
                encode(image);
                Ok(Place::NONE)
            })?
        };
        if !image.is_empty() {
            captured.entry.place = packer.append(|out| out.extend_from_slice(image))?;
        }
        Ok(captured)
    }

    /// Captures a node whose lock is held; `put` gets what encodes its image, if it has one.
    fn capture_state(
        &self,
        cell: &Arc<Cell<C>>,
        node: &State<C>,
        refunds: &mut Charge,
        put: impl FnOnce(&mut dyn FnMut(&mut Vec<u8>)) -> Result<Place, Error>,
    ) -> Result<Captured, Error> {
        let nid = cell.header.nid;
        cell.header.dirty.store(false, Ordering::Release);
        *refunds += cell.header.dirty_refund();
        if cell.header.merges.load(Ordering::Relaxed) {
            // What is merged into a node is not counted when it is.
            self.nodes.recharge(cell, &node.body);
        }
        let (place, free) = match &node.body {
            Body::Gone => (Place::NONE, None),
            body => {
                let seed = self.array.checksum_seed();
                let place = put(&mut |out| body.encode_item(seed, nid, node.version, out))?;
                let free = match body {
                    Body::Space(map) => Some(map.free()),
                    _ => None,
                };
                (place, free)
            }
        };
        let entry = Entry {
            place,
            version: node.version,
        };
        Ok(Captured { nid, entry, free })
    }

    /// Enters captured images into the table; their predecessors are no longer live.
    fn enter(&self, captured: &[Vec<Captured>], state: &mut CheckpointState) -> Result<(), Error> {
        let next = AtomicUsize::new(0);
        let workers = self
            .options
            .workers
            .min(captured.len().div_ceil(PARTS_EACH));
        let results = self.fan_out(workers, |_| {
            let mut changes = Changes::default();
            let mut chunks = Vec::new();
            while let Some(part) = claim(&next, captured.len()) {
                self.enter_part(&captured[part], &mut changes, &mut chunks)?;
            }
            self.segments.settle(&mut changes)?;
            Ok::<_, Error>(chunks)
        });
        base::trace::joined();
        for result in results {
            for (chunk, now) in result? {
                if !planted(Canary::ChunkStateStale) {
                    state.chunks[chunk] = now;
                }
            }
        }
        Ok(())
    }

    /// Enters one part; `chunks` learns what became of data chunks.
    fn enter_part(
        &self,
        captured: &[Captured],
        changes: &mut Changes,
        chunks: &mut Vec<(usize, ChunkState)>,
    ) -> Result<(), Error> {
        base::trace::mark("enter");
        let leaf = |one: &Captured| one.nid.0 / LEAF_NIDS;
        for run in captured.chunk_by(|a, b| leaf(a) == leaf(b)) {
            let entries: Vec<_> = run.iter().map(|one| (one.nid, one.entry)).collect();
            for (one, replaced) in run.iter().zip(self.table.set(&entries)?) {
                let Some(replaced) = replaced else {
                    // The nid was used again and its newer node captured as well.
                    changes.remove(&self.segments, one.entry.place);
                    continue;
                };
                changes.remove(&self.segments, replaced);
                if one.nid.0 >= SPACE_MAP_FIRST {
                    let chunk = (one.nid.0 - SPACE_MAP_FIRST) as usize;
                    let now = one.free.map_or(ChunkState::Free, ChunkState::Data);
                    chunks.push((chunk, now));
                }
            }
        }
        Ok(())
    }

    /// Writes changed pages of the node table, and the space tables; returns what the record says of them, and
    /// the bytes written.
    ///
    /// Table pages live shorter than nodes. In segments of their own they leave whole segments behind.
    fn write_tables(
        &self,
        state: &mut CheckpointState,
        sequence: u64,
    ) -> Result<([ItemPointer; ROOTS as usize], ItemPointer, u64), Error> {
        let first = self.options.workers;
        let packer =
            |worker| Packer::new(&self.segments, &self.space, &self.array, worker, sequence);
        let regions = self.table.dirty_regions();
        let parts: Vec<(&DirtyRegion, u64)> = regions
            .iter()
            .flat_map(|one| {
                one.parts(part_leaves())
                    .into_iter()
                    .map(move |leaves| (one, leaves))
            })
            .collect();
        let leaves: u32 = parts.iter().map(|(_, leaves)| leaves.count_ones()).sum();
        let next = AtomicUsize::new(0);
        let workers = (leaves as usize / part_leaves()).clamp(1, self.packers());
        let results = self.fan_out(workers, |worker| {
            let mut packer = packer(first + worker);
            let mut written = Vec::new();
            while let Some(i) = claim(&next, parts.len()) {
                base::trace::mark("table");
                let (region, leaves) = parts[i];
                written.extend(write_part(region, leaves, &mut packer)?);
            }
            let leaf_bytes = packer.leaf_bytes();
            Ok::<_, Error>((written, leaf_bytes, packer.finish()?))
        });
        base::trace::joined();
        let (mut written, mut bytes) = (Vec::with_capacity(regions.len()), 0);
        let mut leaf_bytes = 0;
        for result in results {
            let (mut pointers, of_leaves, more) = result?;
            written.append(&mut pointers);
            leaf_bytes += of_leaves;
            bytes += more;
        }
        self.dirty.leaves.wrote(leaves, leaf_bytes);
        written.sort_unstable_by_key(|(region, _)| *region);
        let mut packer = packer(first);
        let roots = self.table.write_maps(written, &mut packer)?;
        let space_root = self.write_space(state, &mut packer)?;
        bytes += packer.finish()?;
        self.table.written(&regions);
        Ok((roots, space_root, bytes))
    }

    /// Writes the space tables: chunk states, then the live bytes of each meta chunk's
    /// segments. Their own places are accounted for before they are encoded.
    fn write_space(
        &self,
        state: &mut CheckpointState,
        packer: &mut Packer<'_>,
    ) -> Result<ItemPointer, Error> {
        for old in state.space_places.drain(..) {
            packer.discard(old);
        }
        packer.settle()?;
        if planted(Canary::SegmentReusedEarly) {
            self.segments.find_free();
        }
        // Allocating can add a meta chunk, which makes the tables longer.
        let per_chunk = self.array.geometry().segments_per_chunk() as usize;
        let words_now = || state.chunks.len() + self.segments.meta_chunks() * per_chunk;
        let pages_for = |words: usize| (words * 4).div_ceil(SPACE_PAGE_BYTES);
        let mut places = Vec::new();
        let root = packer.allocate(item::ITEM_MAX)?;
        while places.len() < pages_for(words_now()) {
            places.push(packer.allocate(2 * BLOCK_SIZE)?);
        }
        if words_now() as u64 > SPACE_WORDS_MAX || places.len() > SPACE_PAGES_MAX {
            let what = "the array has more chunks than the space tables can describe";
            return Err(Error::Damaged(Damage::new("space tables", what)));
        }
        packer.settle()?;
        let words = space_words(&state.chunks, &self.segments.live());
        let bytes = words.as_bytes();
        let mut pointers = Vec::new();
        for (i, place) in places.iter().enumerate() {
            let part = &bytes[(i * SPACE_PAGE_BYTES).min(bytes.len())
                ..((i + 1) * SPACE_PAGE_BYTES).min(bytes.len())];
            let mut page = vec![0; SPACE_PAGE_BYTES];
            page[..part.len()].copy_from_slice(part);
            let crc = write_at(&self.array, *place, ItemKind::SpacePage, i as u64, &page)?;
            pointers.push(ItemPointer {
                place: U64::new(place.pack()),
                stamp: U64::new(crc as u64),
            });
        }
        let mut payload = vec![0; PAYLOAD_MAX];
        payload[..pointers.as_bytes().len()].copy_from_slice(pointers.as_bytes());
        let crc = write_at(&self.array, root, ItemKind::SpaceRoot, 0, &payload)?;
        state.space_places = places;
        state.space_places.push(root);
        Ok(ItemPointer {
            place: U64::new(root.pack()),
            stamp: U64::new(crc as u64),
        })
    }

    /// Workers that put nodes, and then pages of the node table, into segments at once: each opens one of its own, twice a
    /// checkpoint, and what it leaves of it is of use to nobody else before it goes on there.
    pub(crate) fn packers(&self) -> usize {
        let free = self.free_meta_bytes() / self.array.geometry().segment_bytes() as i64;
        packers_for(free.max(0) as usize).min(self.packers_most)
    }

    /// Free segments that the next checkpoint should find.
    pub(crate) fn free_segments_wanted(&self) -> usize {
        self.segments_for(self.dirty.limit)
    }

    /// Segments that a checkpoint writes at most which is to begin at this limit.
    pub(crate) fn segments_for(&self, limit: i64) -> usize {
        let segment = self.array.geometry().segment_bytes() as i64;
        (2 * limit / segment) as usize + 2 * self.packers_most + 4
    }

    /// Bytes of all leaf pages of the node table, at most: what a checkpoint of changes scattered
    /// over all nodes writes beside the nodes themselves.
    pub(crate) fn table_bytes(&self) -> i64 {
        let leaves = self.nids.region_count() as u64 * REGION_LEAVES;
        leaves.min(self.table.node_count()) as i64 * LEAF_COST
    }

    /// Bytes that checkpoints can write before anything is cleaned.
    pub(crate) fn free_meta_bytes(&self) -> i64 {
        self.meta_bytes_beside(self.meta_chunks_to_take())
    }

    /// The same without one of the free chunks. Where there are more than segments may take, that is no less.
    pub(crate) fn free_meta_bytes_without_one(&self) -> i64 {
        let others = self.space.free_chunks() - 1;
        self.meta_bytes_beside(others.min(self.segments.chunks_left() as i64))
    }

    fn meta_bytes_beside(&self, chunks: i64) -> i64 {
        let geometry = self.array.geometry();
        let per_chunk = geometry.segments_per_chunk() as i64;
        let segments = self.segments.free_segments() as i64 + chunks * per_chunk;
        segments * geometry.segment_bytes() as i64
    }

    /// Free chunks that checkpoints can take: no more than the space tables can describe beside those that they have.
    pub(crate) fn meta_chunks_to_take(&self) -> i64 {
        let left = self.segments.chunks_left() as i64;
        self.space.free_chunks().min(left)
    }

    /// Sets the limits that follow from the space left for checkpoints.
    ///
    /// Metadata may grow to four fifths of what all meta chunks hold, and free chunks that data has not been promised, because a
    /// log-structured space that is fuller gains too little by cleaning; and it leaves room to
    /// write the whole node table twice and a half, because cleaning moves nodes, and moving
    /// nodes changes its pages. Data leaves it that much.
    pub(crate) fn adapt_limits(&self) {
        let chunk = self.array.geometry().chunk_bytes() as i64;
        let (total, live) = self.segments.usage();
        let spare = self.table_bytes() * 5 / 2;
        self.growth_spare.store(spare, Ordering::Relaxed);
        let held_up = self.segments.held_up() as i64;
        let live = live + self.growth_promised.load(Ordering::SeqCst);
        let room = self.spare_beside(live) as i64 - (total as i64 - live as i64 - held_up);
        let base = reserve_chunks(&self.array, &self.options) as i64;
        self.space.set_reserve(base + room.max(0) / chunk);
        let free = self.free_meta_bytes();
        if free >= 2 * self.frugal_room.load(Ordering::Relaxed) {
            self.frugal_room.store(0, Ordering::Relaxed);
        }
        let unpromised = match self.frugal_room.load(Ordering::Relaxed) {
            0 => self.space.unpromised() * BLOCK_SIZE as i64,
            _ => 0,
        };
        // The less room, the smaller the checkpoints: what is not for changed nodes is for
        // cleaning, which must gain as much as a checkpoint takes.
        self.dirty.adapt(free - self.table_bytes(), unpromised);
        self.space.keep((self.dirty.kept() + chunk - 1) / chunk);
    }

    /// Bytes of meta chunks and free chunks that metadata of which so much is live keeps from data; see `adapt_limits`.
    pub(crate) fn spare_beside(&self, live: u64) -> u64 {
        (live / 4).max(self.growth_spare.load(Ordering::Relaxed) as u64)
    }

    /// Live bytes of metadata beyond which nothing may grow; see `adapt_limits`.
    pub(crate) fn growth_limit(&self) -> u64 {
        self.growth_bounds().0
    }

    /// The same, and all that metadata could take. What data has been promised is not for it.
    pub(crate) fn growth_bounds(&self) -> (u64, u64) {
        let geometry = self.array.geometry();
        let chunk = geometry.chunk_bytes();
        let total = self
            .segments
            .total_bytes()
            .saturating_sub(self.segments.held_up());
        // What checkpoints took of what is promised is lent: were it counted, metadata would grow into it, and they would take more.
        let unpromised = self.space.unpromised_chunks() * chunk as i64;
        let capacity = total.saturating_add_signed(unpromised);
        // Nor is there more than the space tables can describe.
        let capacity = capacity.min(geometry.meta_chunks_max() * chunk);
        let spare = self.growth_spare.load(Ordering::Relaxed) + 2 * self.dirty.limit;
        let limit = (capacity / 5 * 4).min(capacity.saturating_sub(spare as u64));
        (limit, capacity)
    }
}

/// So many workers put items down at once where so many segments are free: what they open is a quarter of these.
pub(crate) fn packers_for(free_segments: usize) -> usize {
    (free_segments / 8).max(1)
}

/// The next of so many parts, for whichever worker is free.
fn claim(next: &AtomicUsize, parts: usize) -> Option<usize> {
    let part = next.fetch_add(1, Ordering::Relaxed);
    (part < parts).then_some(part)
}

fn write_at(
    array: &Array,
    place: Place,
    kind: ItemKind,
    id: u64,
    payload: &[u8],
) -> Result<u32, Error> {
    let mut bytes = Vec::with_capacity(place.len as usize);
    let crc = item::encode(array.checksum_seed(), &mut bytes, kind, 0, id, 0, |o| {
        o.extend_from_slice(payload)
    });
    debug_assert_eq!(bytes.len(), place.len as usize);
    array.write(place.byte, &bytes, Durability::Volatile)?;
    Ok(crc)
}

fn space_words(chunks: &[ChunkState], live: &BTreeMap<u32, Vec<u32>>) -> Vec<U32> {
    let state = |chunk: usize| match live.contains_key(&(chunk as u32)) {
        true => ChunkState::Meta,
        false => chunks[chunk],
    };
    let mut words: Vec<U32> = (0..chunks.len())
        .map(|chunk| U32::new(state(chunk).pack()))
        .collect();
    words.extend(live.values().flatten().map(|bytes| U32::new(*bytes)));
    words
}

/// The space tables as a checkpoint record has them.
pub(crate) struct SpaceTables {
    pub chunks: Vec<ChunkState>,
    pub live: BTreeMap<u32, Vec<u32>>,
    pub places: Vec<Place>,
}

pub(crate) fn read_space(array: &Array, root: ItemPointer) -> Result<SpaceTables, Error> {
    let damaged = |what: String| Error::Damaged(Damage::new("space tables", what));
    let read = read_page(
        array,
        root.place(),
        ItemKind::SpaceRoot,
        0,
        root.stamp.get() as u32,
    )?
    .map_err(|d| damaged(d.to_string()))?;
    let mut places = Vec::new();
    let mut bytes = Vec::new();
    for (id, raw) in (0..).zip(read.payload().chunks_exact(ItemPointer::SIZE)) {
        let pointer = ItemPointer::read_from_bytes(raw)
            .map_err(|_| damaged("root of the wrong size".into()))?;
        if pointer.place().is_none() {
            break;
        }
        let crc = pointer.stamp.get() as u32;
        let page =
            read_item(array, pointer.place())?.map_err(|d| damaged(format!("page {id}: {d}")))?;
        let header = &page.header;
        if header.kind != ItemKind::SpacePage as u8
            || header.id.get() != id
            || header.crc.get() != crc
            || page.payload().len() != SPACE_PAGE_BYTES
        {
            return Err(damaged(format!("page {id} is not what is there")));
        }
        bytes.extend_from_slice(page.payload());
        places.push(pointer.place());
    }
    places.push(root.place());
    let mut words = bytes
        .chunks_exact(4)
        .map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]));
    let count = array.geometry().chunk_count as usize;
    let mut chunks = Vec::with_capacity(count);
    for chunk in 0..count {
        let state = words.next().and_then(ChunkState::unpack);
        chunks.push(state.ok_or_else(|| damaged(format!("chunk {chunk} has no state")))?);
    }
    let per_chunk = array.geometry().segments_per_chunk() as usize;
    let mut live = BTreeMap::new();
    for chunk in (0..count).filter(|c| chunks[*c] == ChunkState::Meta) {
        let counts: Vec<u32> = words.by_ref().take(per_chunk).collect();
        if counts.len() != per_chunk {
            return Err(damaged(format!("segments of chunk {chunk} are cut off")));
        }
        live.insert(chunk as u32, counts);
    }
    for chunk in &mut chunks {
        // The segment table rules; a chunk released later starts as free.
        if *chunk == ChunkState::Meta {
            *chunk = ChunkState::Free;
        }
    }
    Ok(SpaceTables {
        chunks,
        live,
        places,
    })
}

#[cfg(test)]
mod tests;

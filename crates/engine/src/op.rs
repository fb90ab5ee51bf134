//! Operations: the only way to change nodes.
//!
//! Phase 1 locks, loads and reserves, and may fail; dropping the operation then leaves nothing.
//! Phase 2 applies deltas and cannot fail; `commit` appends one record for all of them.
//!
//! Invariants:
//! 1. The epoch is pinned after the last lock and released before the first unlock, so an
//!    operation that follows another on any node never has a smaller epoch.
//! 2. Every applied delta is in the record, with the version it made.
//! 3. Touched nodes are on a dirty list before the pin is released, so that the checkpoint that
//!    closes this epoch finds them.
//! 4. Nids and blocks that the operation frees are given back after the record is staged.
//! 5. A delta that does not apply means that nodes contradict each other: their checksums are
//!    right, so somebody wrote them that way. The store latches read-only, and nothing of the
//!    operation is logged. Of a large one nothing is seen either.
//! 6. Changes of a node that commute may be *merged*: under its shared lock, in an entry that names
//!    the version it found and makes none. Whoever makes the next version has waited for all
//!    of them. So the changes of a node have an order for replay, in which only merges of
//!    one version stand in any order; and an image of a version has every merge of the versions before,
//!    and none of its own: those are pending, beside the image's content, until a change settles
//!    them. What a checkpoint's epochs have left pending it folds itself, by a change that
//!    makes a version and nothing else (`checkpoint.rs`, invariant 4); the journal keeps room
//!    for that from the first merge on (R5, R6).
//! 7. Whoever sees what an operation changed of a node finds its epoch where it was noted ([`Op::commit_noting`]): it is there
//!    before the first unlock. So who waits for what is noted waits for all that it has seen.
//! 8. An operation that ends otherwise after its first change, as by a panic, latches the store before it unlocks, and before a pin
//!    of its own goes: no record comes behind one that is missing, and no part of several that belong together is gathered.
//!    Its credits go back however it ends.

use crate::claims::{FreshNid, Reservation};
use crate::content::Content;
use crate::error::Error;
use crate::journal::MERGES_MAX;
use crate::large::Large;
use crate::new_data::NewData;
use crate::node::{Body, Cell, CellHeader, Node, NodeCache, State};
use crate::ring::Credit;
use crate::space::Extent;
use crate::space_map::SpaceDelta;
use crate::step::Step;
use crate::store::Store;
use base::atomic::Ordering;
use base::canary::{Canary, planted};
use base::sync::{Arc, Handle, OwnedReadGuard, OwnedWriteGuard};
use base::thread::lane;
use format::journal::{
    Action, DataSum, ENTRY_HEAD_MAX, RECORD_HEAD_MAX, RECORD_MAX, put_entry, seal_record,
};
use format::table::{KIND_SPACE_MAP, space_map_nid};
use format::{Block, Damage, Nid};
use std::cell;
use std::ops::Deref;

/// An epoch; see [`Store::commit_through`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(pub u64);

/// What an operation needs of a full array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// It makes metadata grow: refused early when space is short.
    Grow,
    /// It changes what there is, or adds what is small beside data: refused when names have long been.
    Change,
    /// It logs what was accepted before, by such a change: refused only where checkpoints would lack room.
    Accepted,
    /// It frees space, or changes in place: always admitted.
    Reclaim,
}

impl Need {
    /// How much of what metadata leaves free, beyond the limit of growth, it may take, in eighths; `None`: all of it.
    pub(crate) fn share(self) -> Option<u64> {
        match self {
            Need::Grow => Some(0),
            Need::Change => Some(2),
            Need::Accepted => Some(4),
            Need::Reclaim => None,
        }
    }
}

/// A node locked by an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub(crate) usize);

/// So many slots need no allocation.
const FEW: usize = 5;

/// Slots in the order of the nodes that were given.
#[derive(Debug)]
pub struct Slots {
    count: usize,
    few: [Slot; FEW],
    /// All of them, if they are more.
    many: Vec<Slot>,
}

impl Slots {
    fn new(count: usize) -> Slots {
        Slots {
            count,
            few: [Slot(0); FEW],
            many: match count <= FEW {
                true => Vec::new(),
                false => vec![Slot(0); count],
            },
        }
    }

    fn as_mut(&mut self) -> &mut [Slot] {
        match self.count <= FEW {
            true => &mut self.few[..self.count],
            false => &mut self.many,
        }
    }
}

impl Deref for Slots {
    type Target = [Slot];
    fn deref(&self) -> &[Slot] {
        match self.count <= FEW {
            true => &self.few[..self.count],
            false => &self.many,
        }
    }
}

/// How an operation locks a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Exclusive,
    /// Shared, if its content takes merged changes now; else exclusively.
    Merging,
}

#[derive(Debug)]
pub(crate) enum Guard<C> {
    Exclusive(OwnedWriteGuard<State<C>, CellHeader>),
    Shared(OwnedReadGuard<State<C>, CellHeader>),
}

impl<C: Content> Guard<C> {
    fn take(nodes: &NodeCache<C>, mut cell: Handle<Cell<C>>, mode: Mode) -> Guard<C> {
        if mode == Mode::Merging && cell.header.merges.load(Ordering::Relaxed) {
            let guard = cell.read_owned();
            // What was said without the lock may be old.
            if guard.body.merges() {
                return Guard::Shared(guard);
            }
            cell = guard.lock().clone();
        }
        Guard::Exclusive(nodes.write_owned(cell))
    }

    pub fn cell(&self) -> &Handle<Cell<C>> {
        match self {
            Guard::Exclusive(guard) => guard.lock(),
            Guard::Shared(guard) => guard.lock(),
        }
    }

    pub fn state(&self) -> &State<C> {
        match self {
            Guard::Exclusive(guard) => guard,
            Guard::Shared(guard) => guard,
        }
    }

    pub fn state_mut(&mut self) -> Option<&mut State<C>> {
        match self {
            Guard::Exclusive(guard) => Some(guard),
            Guard::Shared(_) => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Locked<C> {
    pub guard: Guard<C>,
    pub touched: bool,
    pub created: bool,
    /// A large operation has seen to it that changes can be taken back.
    pub kept: bool,
    /// Gone with the commit; until then it can be looked at.
    deleted: bool,
    /// Bytes of the changes applied.
    changed: usize,
}

/// An operation; see the module's head.
#[derive(Debug)]
pub struct Op<'s, C: Content> {
    pub(crate) store: &'s Store<C>,
    pub(crate) locked: Vec<Locked<C>>,
    /// The greatest nid among them: who locks in the order of nids meets none that is locked.
    greatest: Nid,
    /// Entries, behind room for the record's length.
    pub(crate) record: Vec<u8>,
    entries: u32,
    /// One for each space map; few.
    pub(crate) maps: Vec<MapChange<C>>,
    freed: Vec<Extent>,
    /// What the record vouches for.
    vouched: Vec<NewData>,
    /// With the versions that the deletions made.
    deleted: Vec<(Nid, u64)>,
    finished: bool,
    /// Invariant 5.
    failed: bool,
    /// Room in the journal, until the operation ends.
    credit: Option<Credit>,
    pub(crate) large: Option<Box<Large<'s, C>>>,
}

#[derive(Debug)]
pub(crate) struct MapChange<C> {
    pub map: Node<C>,
    pub deltas: Vec<SpaceDelta>,
}

thread_local! {
    /// Memory for the record of the thread's next operation: that of its last one.
    static SPARE: cell::Cell<Vec<u8>> = const { cell::Cell::new(Vec::new()) };
}

/// Capacity that a record begins with, and that is kept at most.
const RECORD_USUAL: usize = 512;
const RECORD_KEPT: usize = 4 << 10;

fn empty_record() -> Vec<u8> {
    // A thread that is about to end may have none.
    let mut record = SPARE.try_with(cell::Cell::take).unwrap_or_default();
    record.clear();
    record.reserve(RECORD_USUAL);
    record.extend_from_slice(&[0; RECORD_HEAD_MAX]);
    record
}

fn keep_record(record: Vec<u8>) {
    if record.capacity() <= RECORD_KEPT {
        // Else it is freed, which is as well.
        _ = SPARE.try_with(|spare| spare.set(record));
    }
}

impl<'s, C: Content> Op<'s, C> {
    pub(crate) fn new(store: &'s Store<C>, credit: Credit) -> Self {
        let record = empty_record();
        Op {
            store,
            locked: Vec::with_capacity(4),
            greatest: Nid(0),
            record,
            entries: 0,
            maps: Vec::new(),
            freed: Vec::new(),
            vouched: Vec::new(),
            deleted: Vec::new(),
            finished: false,
            failed: false,
            credit: Some(credit),
            large: None,
        }
    }

    pub(crate) fn new_large(store: &'s Store<C>, credit: Credit, large: Large<'s, C>) -> Self {
        let mut op = Op::new(store, credit);
        op.large = Some(Box::new(large));
        op
    }

    /// So many nodes are about to be locked, and changes of so many bytes logged: room for them is made at once.
    pub fn expect(&mut self, nodes: usize, bytes: usize) {
        self.locked.reserve(nodes);
        self.record.reserve(bytes);
    }

    /// Locks a node exclusively until the operation ends; a node locked before keeps its slot.
    pub fn lock(&mut self, node: &Node<C>) -> Result<Slot, Error> {
        self.lock_as(node, Mode::Exclusive)
    }

    /// Locks a node until the operation ends; one locked before keeps its slot and its mode.
    pub fn lock_as(&mut self, node: &Node<C>, mode: Mode) -> Result<Slot, Error> {
        match self.slot_of(node.nid()) {
            Some(slot) => Ok(slot),
            None => self.lock_new(node.clone(), mode),
        }
    }

    /// The same for who needs the reference no more.
    pub fn lock_given(&mut self, node: Node<C>, mode: Mode) -> Result<Slot, Error> {
        match self.slot_of(node.nid()) {
            Some(slot) => Ok(slot),
            None => self.lock_new(node, mode),
        }
    }

    /// Locks a node that is not locked yet.
    fn lock_new(&mut self, node: Node<C>, mode: Mode) -> Result<Slot, Error> {
        let guard = Guard::take(&self.store.nodes, node.0, mode);
        let cell = guard.cell();
        if !matches!(guard.state().body, Body::User(_)) {
            return Err(Error::Gone(cell.header.nid));
        }
        self.store.prepare_change(cell)?;
        Ok(self.hold(guard, false))
    }

    /// Locks a node exclusively if that takes no waiting and it has this version still; so the
    /// order of locks does not matter.
    pub fn try_lock_at(&mut self, node: Node<C>, version: u64) -> Option<Slot> {
        if let Some(slot) = self.slot_of(node.nid()) {
            return (self.version(slot) == version && !self.shares(slot)).then_some(slot);
        }
        let guard = self.store.nodes.try_write_owned(node.0)?;
        let same = guard.version == version && matches!(guard.body, Body::User(_));
        let same = same && self.store.prepare_change(guard.lock()).is_ok();
        same.then(|| self.hold(Guard::Exclusive(guard), false))
    }

    fn hold(&mut self, guard: Guard<C>, touched: bool) -> Slot {
        self.greatest = self.greatest.max(guard.cell().header.nid);
        self.locked.push(Locked {
            guard,
            touched,
            created: false,
            kept: false,
            deleted: false,
            changed: 0,
        });
        let place = self.locked.len() - 1;
        if let Some(large) = &mut self.large {
            large.note_place(self.locked[place].guard.cell().header.nid, place);
        }
        Slot(place)
    }

    /// Locks inodes exclusively in nid order, whatever order they are given in; slots come in the
    /// given one.
    pub fn lock_sorted(&mut self, nodes: &[&Node<C>]) -> Result<Slots, Error> {
        let nid = |i: usize| (nodes[i].nid(), Mode::Exclusive);
        self.lock_each(nodes.len(), nid, |op, i| op.lock(nodes[i]))
    }

    /// [`Op::lock_sorted`] with the mode of each; a node that is given twice is locked exclusively
    /// if one of the two asks for that.
    pub fn lock_sorted_as(&mut self, nodes: &[(&Node<C>, Mode)]) -> Result<Slots, Error> {
        let nid = |i: usize| (nodes[i].0.nid(), nodes[i].1);
        self.lock_each(nodes.len(), nid, |op, i| op.lock_as(nodes[i].0, nodes[i].1))
    }

    /// The same for who needs the references no more.
    pub fn lock_sorted_given<const N: usize>(
        &mut self,
        nodes: [(Node<C>, Mode); N],
    ) -> Result<Slots, Error> {
        let places: [(Nid, Mode); N] = std::array::from_fn(|i| (nodes[i].0.nid(), nodes[i].1));
        let mut nodes = nodes.map(|(node, _)| Some(node));
        self.lock_each(
            N,
            |i| places[i],
            |op, i| {
                let node = nodes[i].take().expect("each is locked once");
                op.lock_given(node, places[i].1)
            },
        )
    }

    fn lock_each(
        &mut self,
        count: usize,
        place: impl Fn(usize) -> (Nid, Mode),
        mut lock: impl FnMut(&mut Self, usize) -> Result<Slot, Error>,
    ) -> Result<Slots, Error> {
        let mut slots = Slots::new(count);
        let (mut few, mut many) = ([0; FEW], Vec::new());
        let order = match count <= FEW {
            true => &mut few[..count],
            false => {
                many.resize(count, 0);
                &mut many[..]
            }
        };
        order.iter_mut().enumerate().for_each(|(i, at)| *at = i);
        order.sort_unstable_by_key(|&i| {
            let (nid, mode) = place(i);
            (nid, mode == Mode::Merging, i)
        });
        for &i in &*order {
            slots.as_mut()[i] = lock(self, i)?;
        }
        Ok(slots)
    }

    pub fn slot_of(&self, nid: Nid) -> Option<Slot> {
        if nid > self.greatest {
            return None;
        }
        if let Some(large) = &self.large {
            return large.place(nid).map(Slot);
        }
        self.locked
            .iter()
            .position(|l| l.guard.cell().header.nid == nid)
            .map(Slot)
    }

    /// Whether others may be merging changes into this node at the same time, so that this operation may
    /// do nothing else with it either.
    pub fn shares(&self, slot: Slot) -> bool {
        matches!(self.locked[slot.0].guard, Guard::Shared(_))
    }

    pub fn peek(&self, slot: Slot) -> &C {
        match &self.locked[slot.0].guard.state().body {
            Body::User(content) => content,
            _ => unreachable!("only user nodes that exist get a slot"),
        }
    }

    pub fn version(&self, slot: Slot) -> u64 {
        self.locked[slot.0].guard.state().version
    }

    pub fn nid(&self, slot: Slot) -> Nid {
        self.locked[slot.0].guard.cell().header.nid
    }

    /// A locked node as a reference.
    pub fn node(&self, slot: Slot) -> Node<C> {
        Node(self.locked[slot.0].guard.cell().clone())
    }

    pub fn store(&self) -> &'s Store<C> {
        self.store
    }

    /// These blocks become free with this operation, and reusable when it is durable.
    /// Phase 1: it may read their space map.
    pub fn free(&mut self, extent: Extent) -> Result<(), Error> {
        let geometry = self.store.array.geometry();
        let mut left = extent;
        while left.len > 0 {
            let (chunk, start) = geometry.chunk_of(left.block).ok_or_else(|| {
                let what = format!("extent {left:?} lies outside the data area");
                Error::Damaged(Damage::new("extent", what))
            })?;
            let len = left.len.min(geometry.chunk_blocks - start);
            let map = self.store.load_map(chunk)?;
            let delta = SpaceDelta {
                allocate: false,
                start,
                len,
            };
            self.note_map(&map, delta);
            self.freed.push(Extent {
                block: left.block,
                len,
            });
            left = Extent {
                block: Block(left.block.0 + len as u64),
                len: left.len - len,
            };
        }
        Ok(())
    }

    fn note_map(&mut self, map: &Node<C>, delta: SpaceDelta) {
        // Mostly the one that was changed last, and often where that change ended.
        let nid = map.nid();
        match self.maps.iter_mut().rfind(|change| change.map.nid() == nid) {
            Some(change) => match change.deltas.last_mut().filter(|last| last.ends_at(&delta)) {
                Some(last) => last.len += delta.len,
                None => change.deltas.push(delta),
            },
            None => self.maps.push(MapChange {
                map: map.clone(),
                deltas: vec![delta],
            }),
        }
    }

    /// Creates a node (phase 2). It is visible to others once the operation committed.
    pub fn create(&mut self, mut fresh: FreshNid<'_, C>, content: C) -> Slot {
        fresh.used = true;
        if let Some(large) = &mut self.large {
            large.note_created(fresh.nid, fresh.last_version);
        }
        self.insert(fresh.nid, fresh.version(), Body::User(content))
    }

    pub(crate) fn create_map(&mut self, chunk: u32, last_version: u64) {
        let blocks = self.store.array.geometry().chunk_blocks;
        let map = crate::space_map::SpaceMap::new(blocks);
        self.insert(space_map_nid(chunk), last_version + 1, Body::Space(map));
    }

    pub(crate) fn insert(&mut self, nid: Nid, version: u64, body: Body<C>) -> Slot {
        let kind = body.kind();
        let guard = NodeCache::new_locked(nid, version, body);
        self.put_entry(nid, version, Action::Create, kind, |out| {
            guard.body.encode(out)
        });
        let slot = self.hold(Guard::Exclusive(guard), true);
        self.locked[slot.0].created = true;
        self.close_record();
        slot
    }

    /// Changes a locked node now, and logs the change (phase 2).
    pub fn apply(&mut self, slot: Slot, delta: C::Delta) {
        if self.failed {
            return;
        }
        self.keep(slot);
        let journal = &self.store.journal;
        let locked = &mut self.locked[slot.0];
        locked.touched = true;
        let nid = locked.guard.cell().header.nid;
        let Some(state) = locked.guard.state_mut() else {
            return self.fail(nid, &Damage::new("node", "is changed under a shared lock"));
        };
        let applied = match &mut state.body {
            Body::User(content) if !locked.deleted => {
                if content.pending() {
                    content.settle();
                    journal.fold_done(self.credit.as_mut());
                }
                content.apply(&delta)
            }
            _ => Err(Damage::new("node", "is changed after it was deleted")),
        };
        if let Err(damage) = applied {
            return self.fail(nid, &damage);
        }
        state.version += 1;
        if planted(Canary::HalfRecord) && self.entries > 0 {
            return;
        }
        let (version, kind) = (state.version, state.body.kind());
        let before = self.record.len();
        self.put_entry(nid, version, Action::Apply, kind, |out| {
            C::encode_delta(&delta, out)
        });
        self.locked[slot.0].changed += self.record.len() - before;
        self.close_record();
    }

    /// Changes a locked node now, and logs the change (phase 2): as one to be merged, if the
    /// node is shared with others who do the same (invariant 6). False: the node did not take it as it is
    /// ([`Merged::taken`]), and nothing was logged.
    #[must_use]
    pub fn merge(&mut self, slot: Slot, delta: C::Delta) -> bool {
        let locked = &mut self.locked[slot.0];
        let Guard::Shared(guard) = &locked.guard else {
            self.apply(slot, delta);
            return true;
        };
        if self.failed {
            return true;
        }
        locked.touched = true;
        let nid = guard.lock().header.nid;
        let merged = match &guard.body {
            Body::User(content) => content.merge(&delta),
            _ => Err(Damage::new("node", "is changed after it was deleted")),
        };
        let merged = match merged {
            Ok(merged) => merged,
            Err(damage) => {
                self.fail(nid, &damage);
                return true;
            }
        };
        if merged.first {
            self.store.journal.owe_fold(self.credit.as_mut());
        }
        if !merged.taken {
            return false;
        }
        let (version, kind) = (guard.version, guard.body.kind());
        if planted(Canary::HalfRecord) && self.entries > 0 {
            return true;
        }
        self.put_entry(nid, version, Action::Merge, kind, |out| {
            C::encode_delta(&delta, out)
        });
        true
    }

    /// Deletes a locked node (phase 2).
    pub fn delete(&mut self, slot: Slot) {
        if self.failed {
            return;
        }
        self.keep(slot);
        let locked = &mut self.locked[slot.0];
        locked.touched = true;
        let nid = locked.guard.cell().header.nid;
        if locked.deleted {
            return self.fail(nid, &Damage::new("node", "is deleted twice"));
        }
        let Some(state) = locked.guard.state_mut() else {
            return self.fail(nid, &Damage::new("node", "is deleted under a shared lock"));
        };
        if let Body::User(content) = &mut state.body
            && content.pending()
        {
            content.settle();
            self.store.journal.fold_done(self.credit.as_mut());
        }
        let kind = state.body.kind();
        locked.deleted = true;
        state.version += 1;
        let version = state.version;
        self.deleted.push((nid, version));
        self.put_entry(nid, version, Action::Delete, kind, |_| {});
        self.close_record();
    }

    /// A large operation goes on in another record when this one is long.
    fn close_record(&mut self) {
        if let Some(large) = &mut self.large {
            large.close(&mut self.record, empty_record);
        }
    }

    /// Invariant 5.
    fn fail(&mut self, nid: Nid, damage: &Damage) {
        self.failed = true;
        self.store
            .latch(&format!("a change of node {nid} does not fit it: {damage}"));
    }

    /// The reserved blocks become allocated with this operation (phase 2).
    pub fn take(&mut self, mut reservation: Reservation<'_, C>) -> Extent {
        reservation.taken = true;
        let extent = reservation.extent;
        self.note_taken(&reservation.map, extent);
        extent
    }

    pub(crate) fn note_taken(&mut self, map: &Node<C>, extent: Extent) {
        let geometry = self.store.array.geometry();
        let (_, start) = geometry
            .chunk_of(extent.block)
            .expect("reserved in a chunk");
        let delta = SpaceDelta {
            allocate: true,
            start,
            len: extent.len,
        };
        self.note_map(map, delta);
    }

    /// This data is written, and durable, when the operation is: its batch vouches for it (phase 2), and whoever writes that writes both.
    /// Until then the blocks hold what they did, and who reads them asks for this ([`Store::waiting_data`]). `slot` is the node
    /// that names them; nobody writes to them who has not waited for [`Store::confirm`].
    pub fn vouch(&mut self, slot: Slot, data: NewData) {
        let blocks = data.blocks();
        let sum = DataSum {
            block: blocks.block,
            blocks: blocks.len,
            crc: data.crc(),
        };
        let (nid, kind) = (
            self.nid(slot),
            self.locked[slot.0].guard.state().body.kind(),
        );
        self.put_entry(nid, 0, Action::Sum, kind, |out| sum.encode(out));
        self.close_record();
        self.vouched.push(data);
    }

    fn put_entry(
        &mut self,
        nid: Nid,
        version: u64,
        action: Action,
        kind: u8,
        body: impl FnOnce(&mut Vec<u8>),
    ) {
        put_entry(&mut self.record, nid.0, version, action, kind, body);
        self.entries += 1;
    }

    fn changed(&self) -> bool {
        self.entries > 0
    }

    /// Appends the record and unlocks. The operation is durable when its epoch is.
    pub fn commit(self) -> Epoch {
        self.commit_noting(|_| {})
    }

    /// The same for who notes the epoch elsewhere: `note` is called when the record is staged, and all is still locked (invariant 7). It
    /// may take locks that come after those of space maps, and waits for nobody who waits for an operation.
    pub fn commit_noting(mut self, note: impl FnOnce(Epoch)) -> Epoch {
        let epoch = self.stage();
        if planted(Canary::ChangeNotedLate) {
            drop(self);
            note(epoch);
            return epoch;
        }
        note(epoch);
        epoch
    }

    /// Appends the record; unlocking is what is left.
    fn stage(&mut self) -> Epoch {
        self.change_maps();
        if !self.failed {
            self.look_at_bounds();
        }
        if self.failed || !self.changed() {
            self.finished = true;
            if self.failed {
                self.undo();
            }
            self.return_credit();
            return Epoch(self.store.journal.epoch());
        }
        let mut memory = std::mem::take(&mut self.record);
        let record = seal_record(&mut memory);
        let mut others = match &mut self.large {
            Some(large) => std::mem::take(&mut large.closed),
            None => Vec::new(),
        };

        let merged = |l: &&Locked<C>| l.touched && matches!(l.guard, Guard::Shared(_));
        debug_assert!(self.locked.iter().filter(merged).count() <= MERGES_MAX);

        let shard = self.store.shard();
        let pin = self.store.journal.pin(shard);
        // Invariant 8.
        let step = Step::begin(self.store, "the commit of an operation");
        let mut made = 0;
        for locked in &mut self.locked {
            if !locked.touched {
                continue;
            }
            made += i64::from(locked.created) - i64::from(locked.deleted);
            if let Some(state) = locked.guard.state_mut() {
                if locked.deleted {
                    state.body = Body::Gone;
                }
                let merges = state.body.merges();
                let cell = locked.guard.cell();
                if locked.deleted {
                    cell.header.set_gone();
                }
                if locked.created {
                    if !locked.deleted {
                        self.store.mark_new(shard, cell.all());
                    }
                    self.store.nodes.insert(Arc::clone(cell.all()));
                }
                if cell.header.merges.load(Ordering::Relaxed) != merges {
                    cell.header.merges.store(merges, Ordering::Relaxed);
                }
                let body = &locked.guard.state().body;
                if locked.deleted
                    || cell.header.changed(locked.changed)
                    || cell.header.shrank(|| body.image())
                {
                    self.store.recharge(cell, &locked.guard.state().body);
                }
            }
            self.store.mark_dirty(shard, locked.guard.cell().all());
        }
        if made != 0 {
            self.store.nodes_made.add(lane(), made);
        }
        for other in &mut others {
            let other = seal_record(other);
            let large = self.large.as_mut();
            if let Some(credit) = large.and_then(|large| large.credits.pop()) {
                self.store.journal.stage(&pin, other, Vec::new(), credit);
            }
        }
        if let Some(credit) = self.credit.take() {
            self.store
                .journal
                .stage(&pin, record, std::mem::take(&mut self.vouched), credit);
        }
        let epoch = pin.epoch();
        self.store.space.freed(epoch, &self.freed);
        if planted(Canary::BlocksReusedEarly) {
            self.store.space.release_through(epoch, false, |_| {});
        }
        for (nid, version) in &self.deleted {
            self.store.nids.put(shard, *nid, *version);
        }
        self.finished = true;
        step.end();
        drop(pin);
        keep_record(memory);
        self.return_credit();
        Epoch(epoch)
    }

    /// Invariant 8.
    fn is_abandoned(&self, after: &str) {
        if self.store.failed().is_none() {
            let by = match base::thread::panicking() {
                true => " by a thread that panicked",
                false => "",
            };
            let why = format!("an operation was abandoned{by} after it had changed {after}");
            self.store.latch(&why);
        }
    }

    /// What others go by is within its bounds; else the operation fails as by invariant 5.
    fn look_at_bounds(&mut self) {
        let len = self.record.len();
        let why = match self.has_credits() {
            false => "an operation has more records than it was begun for",
            true if len > RECORD_MAX => &format!("a record of {len} bytes is over the bound"),
            true => return,
        };
        self.failed = true;
        self.store.latch(why);
    }

    fn return_credit(&mut self) {
        let more = self.large.as_mut().map(|large| &mut large.credits);
        let more = more.into_iter().flat_map(|credits| credits.drain(..));
        for credit in self.credit.take().into_iter().chain(more) {
            self.store.journal.return_credit(credit);
        }
    }

    /// Locks the space maps, in nid order and after everything else, and changes them.
    pub(crate) fn change_maps(&mut self) {
        let mut maps = std::mem::take(&mut self.maps);
        if maps.is_empty() {
            return;
        }
        maps.sort_unstable_by_key(|change| change.map.nid());
        for change in maps {
            if self.failed {
                return;
            }
            let nid = change.map.nid();
            let mut guard = self.store.nodes.write_owned(change.map.0);
            // Nobody else knows of what becomes of this map until it is held.
            let step = Step::begin(self.store, "a change of a space map");
            for delta in &change.deltas {
                let state = &mut *guard;
                let applied = match &mut state.body {
                    Body::Space(map) => map.apply(delta),
                    _ => Err(Damage::new(
                        "space map",
                        "is gone while blocks of its chunk are in use",
                    )),
                };
                if let Err(damage) = applied {
                    self.fail(nid, &damage);
                    return step.end();
                }
                state.version += 1;
                let version = state.version;
                self.put_entry(nid, version, Action::Apply, KIND_SPACE_MAP, |o| {
                    delta.encode(o)
                });
                self.close_record();
            }
            self.hold(Guard::Exclusive(guard), true);
            step.end();
        }
    }

    /// Deletes the empty space map of a chunk; see [`Store::retire_chunks`].
    pub(crate) fn delete_map(&mut self, map: &Node<C>) -> bool {
        let guard = self.store.nodes.write_owned(map.0.clone());
        let empty = matches!(&guard.body, Body::Space(map) if map.free() == map.blocks());
        if !empty {
            return false;
        }
        let slot = self.hold(Guard::Exclusive(guard), false);
        self.delete(slot);
        true
    }
}

impl<C: Content> Drop for Op<'_, C> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        self.return_credit();
        if self.large.is_some() {
            let is_map = |l: &Locked<C>| matches!(l.guard.state().body, Body::Space(_));
            if !self.failed && self.locked.iter().any(is_map) {
                self.is_abandoned("space maps");
            }
            return self.undo();
        }
        if self.locked.iter().any(|l| l.touched) {
            self.is_abandoned("nodes");
        }
    }
}

/// Makes the pending changes of a node part of its image by a version of its own (invariant 6), in a record
/// of its own. The caller holds the node exclusively, and it is on a dirty list or being captured. It waits for no
/// room, so that a checkpoint can call it.
pub(crate) fn fold<C: Content>(store: &Store<C>, cell: &Arc<Cell<C>>, state: &mut State<C>) {
    let Body::User(content) = &mut state.body else {
        return;
    };
    if !content.pending() {
        return;
    }
    // Invariant 8.
    let step = Step::begin(store, "a fold");
    content.settle();
    state.version += 1;
    let mut record = Vec::with_capacity(RECORD_HEAD_MAX + ENTRY_HEAD_MAX);
    record.extend_from_slice(&[0; RECORD_HEAD_MAX]);
    let (nid, kind) = (cell.header.nid.0, state.body.kind());
    put_entry(&mut record, nid, state.version, Action::Fold, kind, |_| {});
    let record = seal_record(&mut record);
    let shard = store.shard();
    let pin = store.journal.pin(shard);
    store.mark_dirty(shard, cell);
    store.journal.stage_fold(&pin, record);
    step.end();
}

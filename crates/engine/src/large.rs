//! Large operations: what a transaction does, in one operation of many nodes and records.
//!
//! An ordinary operation plans all before its first change. In a large one a plan may rest on what the operation itself has done,
//! so it can fail after a change; then all changes are taken back ([decision
//! 0028](../../../docs/decisions/0028-transactions-are-one-large-operation.md)).
//!
//! Invariants, besides those of [`crate::op`]:
//! 1. Before its first change of a node that it has not created, the operation keeps a copy of it; a node with merged changes pending is folded
//!    before that. Until the commit nobody else can have seen a change, since each is made under the node's
//!    exclusive lock. If the operation ends in another way the copies take the nodes' places, and nids of created nodes go back.
//! 2. Its records are staged under one pin, so they are in one batch, which counts whole or not at all. Each has a credit of
//!    its own, taken before the first lock: no record is closed before it has [`RECORD_CLOSED`] bytes, so as many credits suffice as
//!    that is contained in what is logged, and one more. Who finds at the end that what was logged is more than asked for
//!    does not commit ([`Op::excess`]).
//! 3. One at a time that may have more than one record, or more than [`TURN_FROM`] bytes, is between its begin and its end. So what
//!    is staged, or dirty, is beyond what operations wait at by no more than one of them and small ones; and that is within what is
//!    kept for several ordinary ones: see [`Store::large_most`].

use crate::claims::{FreshNid, Reservation};
use crate::content::Content;
use crate::dirty::LEAF_COST;
use crate::error::Error;
use crate::journal::CREDIT;
use crate::node::{Body, Node};
use crate::op::{Op, Slot, fold};
use crate::ring::Credit;
use crate::store::{STAGING_MAX, Store, THREADS_MAX};
use base::atomic::Ordering;
use base::canary::{Canary, planted};
use base::map::{HashMap, HashSet};
use base::sync::MutexGuard;
use base::sync::rank;
use base::tight;
use format::Nid;
use format::item::PAYLOAD_MAX;
use format::journal::{ENTRY_HEAD_MAX, RECORD_MAX};
use format::table::LEAF_NIDS;

/// Bytes at which a record is closed: the longest change, an image, still fits behind them.
const RECORD_CLOSED: usize = RECORD_MAX - (64 << 10);
const _: () = assert!(RECORD_CLOSED + PAYLOAD_MAX + ENTRY_HEAD_MAX < RECORD_MAX);
/// Bytes of a change of a space map, with its entry's head, at most.
const MAP_ENTRY: usize = 48;
/// The part of the ring that one operation may take.
const RING_SHARE: u64 = 4;
/// Bytes of changed nodes as several ordinary operations leave them: as many may be dirty beyond what is waited for.
const DIRTY_USUAL: usize = 256 << 10;
/// Bytes, logged or dirty, up to which an operation of one record takes no turn. [`THREADS_MAX`] of them, and the one that has the
/// turn, together log less than a batch keeps for what operations stage at the moment when others wait: twice what may be staged
/// (`batches.rs`).
const TURN_FROM: usize = 32 << 10;
const _: () = assert!(THREADS_MAX * TURN_FROM + STAGING_MAX < 2 * STAGING_MAX);
/// Checkpoints one after the other that left no more room than there was, after which there will be none.
const ROOM_TRIES: u32 = 16;
/// Memory of a changed node beside its content.
const NODE_MEMORY: usize = 512;

fn record_closed() -> usize {
    tight::limit(RECORD_CLOSED, 16 << 10)
}

/// How much an operation logs, and how much of changed nodes it leaves to the next checkpoint, at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensive {
    /// Bytes of changes in the journal.
    pub logged: usize,
    /// Bytes of changed nodes, in memory or of images, whichever is more; and of pages of the node table.
    pub dirty: usize,
}

impl Extensive {
    fn records(self) -> usize {
        self.logged / record_closed() + 1
    }

    /// Whether it is for one at a time (invariant 3).
    fn needs_turn(self) -> bool {
        self.records() > 1 || self.logged.max(self.dirty) > TURN_FROM
    }

    /// Whether another one has no part that is greater.
    pub fn covers(self, other: Extensive) -> bool {
        self.logged >= other.logged && self.dirty >= other.dirty
    }

    /// Both together.
    pub fn plus(self, other: Extensive) -> Extensive {
        Extensive {
            logged: self.logged + other.logged,
            dirty: self.dirty + other.dirty,
        }
    }

    /// The greater of each part.
    pub fn max(self, other: Extensive) -> Extensive {
        Extensive {
            logged: self.logged.max(other.logged),
            dirty: self.dirty.max(other.dirty),
        }
    }
}

/// What a large operation is going to change, as far as that is known before it begins.
#[derive(Clone, Copy, Debug, Default)]
pub struct Touched {
    pub nodes: usize,
    /// Bytes of memory that the content of each node has, at most.
    pub memory: usize,
    /// Pages of the node table that name them.
    pub table_pages: usize,
    /// Chunks in which it frees blocks, or takes some.
    pub chunks: usize,
    /// Pieces of free space that it makes or takes.
    pub pieces: usize,
}

/// What a large operation has besides.
#[derive(Debug)]
pub(crate) struct Large<'s, C> {
    asked: Extensive,
    /// Where each locked node is in the list.
    places: HashMap<Nid, usize>,
    /// Invariant 1: places in the list, versions, contents.
    before: Vec<(usize, u64, Body<C>)>,
    /// Nids that go back if the operation does not commit, and the versions that they had.
    created: Vec<(Nid, u64)>,
    /// Records that are closed, and their bytes.
    pub closed: Vec<Vec<u8>>,
    closed_bytes: usize,
    /// For all records but one.
    pub credits: Vec<Credit>,
    _turn: Option<MutexGuard<'s, ()>>,
}

impl<C> Large<'_, C> {
    pub fn place(&self, nid: Nid) -> Option<usize> {
        self.places.get(&nid).copied()
    }

    pub fn note_place(&mut self, nid: Nid, place: usize) {
        self.places.insert(nid, place);
    }

    pub fn note_created(&mut self, nid: Nid, last_version: u64) {
        self.created.push((nid, last_version));
    }

    /// A record that is long enough is closed; another one begins.
    pub fn close(&mut self, record: &mut Vec<u8>, empty: impl FnOnce() -> Vec<u8>) {
        if record.len() >= record_closed() {
            self.closed_bytes += record.len();
            self.closed.push(std::mem::replace(record, empty()));
        }
    }
}

impl<C: Content> Store<C> {
    /// What one operation can be, now. Logged: no more than may be staged at any time, and than a part of the ring. Dirty: half of
    /// what operations may leave before they wait for a checkpoint, so that after one there is room; or what ordinary ones leave.
    pub fn large_most(&self) -> Extensive {
        let ring = self.array.geometry().journal_bytes();
        let records = (ring / RING_SHARE / CREDIT).max(1) as usize;
        let logged = (records * record_closed() - 1).min(STAGING_MAX);
        Extensive {
            logged,
            dirty: (self.dirty.least_limit_now().max(0) as usize).max(DIRTY_USUAL),
        }
    }

    /// What one can be that begins now, and waits until nothing else is dirty: it dirties all that operations may before they wait. So what
    /// was within [`large_most`](Self::large_most) when it was staged is possible though the array has filled since (`growth.rs`, invariant 4).
    pub fn large_possible(&self) -> Extensive {
        let Extensive { logged, dirty } = self.large_most();
        Extensive {
            logged,
            dirty: dirty * 2,
        }
    }

    /// What changes of these nodes leave dirty, and of space maps log, by the count of [`Op::excess`].
    pub fn extensive_by(&self, touched: Touched) -> Extensive {
        let geometry = self.array.geometry();
        let all = geometry.chunk_count as usize;
        let maps = touched.chunks.min(all);
        // Numbers of maps follow each other.
        let pages = maps.min(all.div_ceil(LEAF_NIDS as usize) + 1) + touched.table_pages;
        let map = geometry.chunk_blocks as usize / 8 + NODE_MEMORY;
        let nodes = touched.nodes * (touched.memory + NODE_MEMORY);
        Extensive {
            logged: touched.pieces * MAP_ENTRY,
            dirty: nodes + maps * map + pages * LEAF_COST as usize,
        }
    }

    /// As [`begin`](Store::begin), for a large operation that is no more than `asked`. By what it makes metadata grow the caller has been
    /// promised ([`Growth`](crate::Growth)): it is not refused for want of that. The caller holds no lock of nodes, and none of checkpoints or cookies.
    ///
    /// # Errors
    /// Those of `begin`; [`Error::TooLarge`] when no operation can be as large, now or after a wait for room.
    pub fn begin_large(&self, asked: Extensive) -> Result<Op<'_, C>, Error> {
        base::sync::assert_none_held_from(rank::INODE);
        if self.options().read_only {
            return Err(Error::ReadOnly);
        }
        if !self.large_possible().covers(asked) {
            // What the last checkpoint found may be long ago.
            self.checkpoint_now()?;
        }
        let records = asked.records();
        let turn = asked.needs_turn().then(|| self.large_turn.lock());
        let dirty = asked.dirty.saturating_sub(DIRTY_USUAL) as i64;
        let mut in_vain = 0;
        loop {
            // Limits fall when others need the room, and with checkpoints.
            if !self.large_possible().covers(asked) || in_vain == ROOM_TRIES {
                return Err(Error::TooLarge);
            }
            self.before_operation()?;
            let checkpoint = self.journal.checkpoint_sequence.load(Ordering::SeqCst);
            if self.dirty.pressure_with(dirty) <= 1000
                && let Some(mut credits) = self.try_credits(records)
            {
                if let Some(error) = self.refused() {
                    self.return_credits(credits);
                    return Err(error);
                }
                let first = credits.pop().expect("at least one record");
                let large = Large {
                    asked,
                    places: HashMap::default(),
                    before: Vec::new(),
                    created: Vec::new(),
                    closed: Vec::new(),
                    closed_bytes: 0,
                    credits,
                    _turn: turn,
                };
                return Ok(Op::new_large(self, first, large));
            }
            let used = || {
                let fill = self.journal.fill_permille(self.shard());
                (self.dirty.pressure_with(dirty), fill)
            };
            let before = used();
            self.make_room(checkpoint)?;
            let after = used();
            in_vain = match after.0 < before.0 || after.1 < before.1 {
                true => 0,
                false => in_vain + 1,
            };
        }
    }

    /// Credits for so many records; `None`, with nothing taken: the ring has no room for all of them.
    fn try_credits(&self, records: usize) -> Option<Vec<Credit>> {
        let shard = self.shard();
        let mut credits = Vec::with_capacity(records);
        while credits.len() < records {
            match self.journal.try_credit(shard) {
                Some(credit) => credits.push(credit),
                None => {
                    self.return_credits(credits);
                    return None;
                }
            }
        }
        Some(credits)
    }

    fn return_credits(&self, credits: Vec<Credit>) {
        let back = |credit| self.journal.return_credit(credit);
        credits.into_iter().for_each(back);
    }
}

impl<C: Content> FreshNid<'_, C> {
    /// The operation that created its node by [`Op::create_at`] has committed.
    pub fn taken(mut self) {
        self.used = true;
    }
}

impl<C: Content> Reservation<'_, C> {
    /// The operation that took the blocks by [`Op::take_at`] has committed.
    pub fn was_taken(mut self) {
        self.taken = true;
    }
}

impl<'s, C: Content> Op<'s, C> {
    /// Whether changes can be taken back, and plans rest on what the operation has done.
    pub fn is_large(&self) -> bool {
        self.large.is_some()
    }

    /// A node that a large operation has locked, or created, and that nobody else can show. Ordinary ones have none that
    /// matters to who looks for nodes.
    pub fn own(&self, nid: Nid) -> Option<Slot> {
        self.large.as_ref()?;
        self.slot_of(nid)
    }

    /// [`Store::get`], as this operation has the node.
    pub fn get(&self, nid: Nid) -> Result<Node<C>, Error> {
        match self.own(nid) {
            Some(slot) => Ok(self.node(slot)),
            None => self.store().get(nid),
        }
    }

    /// As [`create`](Op::create), at a nid that stays the caller's if the operation does not commit; else the caller says so
    /// ([`FreshNid::taken`]).
    ///
    /// # Errors
    /// When the page of the node table that names it has left memory since it was reserved, and cannot be read.
    pub fn create_at(&mut self, fresh: &FreshNid<'_, C>, content: C) -> Result<Slot, Error> {
        debug_assert!(self.is_large());
        self.store.table.prepare(fresh.nid)?;
        Ok(self.insert(fresh.nid, fresh.version(), Body::User(content)))
    }

    /// As [`take`](Op::take), of blocks that stay the caller's if the operation does not commit; else the caller says so
    /// ([`Reservation::was_taken`]).
    ///
    /// # Errors
    /// As of [`create_at`](Self::create_at), for the page that names the space map.
    pub fn take_at(&mut self, reservation: &Reservation<'_, C>) -> Result<(), Error> {
        debug_assert!(self.is_large());
        self.store.prepare_change(&reservation.map.0)?;
        self.note_taken(&reservation.map, reservation.extent);
        Ok(())
    }

    /// Changes the space maps: the last that can fail before the commit. Afterwards the operation may change nodes that it has locked, and
    /// nothing else.
    ///
    /// # Errors
    /// [`Error::Failed`]: a map contradicts what nodes say, and the store has latched.
    pub fn allocate(&mut self) -> Result<(), Error> {
        debug_assert!(self.is_large());
        self.change_maps();
        match self.store.failed() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Invariant 1, before a change of a node.
    pub(crate) fn keep(&mut self, slot: Slot) {
        let Some(large) = &mut self.large else { return };
        let locked = &mut self.locked[slot.0];
        if std::mem::replace(&mut locked.kept, true) || locked.created {
            return;
        }
        let cell = locked.guard.cell().all().clone();
        if let Some(state) = locked.guard.state_mut() {
            fold(self.store, &cell, state);
            if let Body::User(content) = &state.body {
                let copy = Body::User(content.clone());
                large.before.push((slot.0, state.version, copy));
            }
        }
    }

    /// Bytes that the records take, with changes of space maps to come.
    fn logged(&self) -> usize {
        let closed = self.large.as_ref().map_or(0, |large| large.closed_bytes);
        let maps: usize = self.maps.iter().map(|change| change.deltas.len()).sum();
        closed + self.record.len() + maps * MAP_ENTRY
    }

    /// How large the operation has become, if it logs `more` bytes; `None`: no larger than it was begun for, and it can commit.
    pub fn excess(&self, more: usize) -> Option<Extensive> {
        let large = self.large.as_ref()?;
        let (mut images, mut memory) = (0, 0);
        let mut leaves = HashSet::default();
        for locked in self.locked.iter().filter(|l| l.touched) {
            let body = &locked.guard.state().body;
            images += body.image();
            memory += body.memory() + NODE_MEMORY;
            leaves.insert(locked.guard.cell().header.nid.0 / LEAF_NIDS);
        }
        for change in &self.maps {
            let body = &change.map.0.read().body;
            images += body.image();
            memory += body.memory() + NODE_MEMORY;
            leaves.insert(change.map.nid().0 / LEAF_NIDS);
        }
        let now = Extensive {
            logged: self.logged() + more,
            dirty: images.max(memory) + leaves.len() * LEAF_COST as usize,
        };
        (!large.asked.covers(now)).then_some(now)
    }

    /// Whether it logs more than it was begun for already: there is no use in going on.
    pub fn is_excessive(&self) -> bool {
        let asked = self.large.as_ref().map(|large| large.asked.logged);
        asked.is_some_and(|asked| self.logged() > asked)
    }

    /// Whether the closed records have credits, before the first is staged.
    pub(crate) fn has_credits(&self) -> bool {
        let large = self.large.as_ref();
        large.is_none_or(|large| large.credits.len() >= large.closed.len())
    }

    /// Invariant 1: the operation does not commit. What it may have changed of space maps stays: that is so only when the store has
    /// latched, and then nobody allocates or writes.
    pub(crate) fn undo(&mut self) {
        let Some(large) = &mut self.large else { return };
        if planted(Canary::TransactionNotUndone) {
            large.before.clear();
        }
        for (place, version, body) in large.before.drain(..) {
            if let Some(state) = self.locked[place].guard.state_mut() {
                (state.version, state.body) = (version, body);
            }
        }
        let shard = self.store.shard();
        for (nid, last_version) in large.created.drain(..) {
            self.store.nids.put(shard, nid, last_version);
        }
        let credits = std::mem::take(&mut large.credits);
        self.store.return_credits(credits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dirty::Charge;
    use crate::store::StoreOptions;
    use crate::testing::{TestStore, create, format, options};
    use base::sync::Arc;
    use device::sim::SimDevice;

    /// With memory for changed nodes, so that the array's room is what counts.
    fn open() -> Arc<TestStore> {
        let roomy = StoreOptions {
            dirty_bytes: Some(64 << 20),
            ..options()
        };
        let (store, _) = TestStore::open(format(SimDevice::new(64 << 20, 1)), roomy).unwrap();
        create(&store, 100);
        store.sync().unwrap();
        store
    }

    /// As if nodes had changed that no checkpoint lets go of.
    fn crowd(store: &TestStore, memory: i64) {
        store.dirty.charge(Charge { memory, image: 0 });
    }

    const SMALL: Extensive = Extensive {
        logged: 1 << 10,
        dirty: 1 << 10,
    };

    #[test]
    fn a_limit_that_falls_during_the_wait_for_room_is_noticed() {
        let store = open();
        store.dirty.adapt(1 << 40, 1 << 40);
        let asked = Extensive {
            logged: 100,
            dirty: store.large_possible().dirty,
        };
        assert!(asked.dirty > DIRTY_USUAL);
        crowd(&store, 192 << 20);
        let before = store.newest_checkpoint();
        let refused = store.begin_large(asked);
        assert!(matches!(refused, Err(Error::TooLarge)));
        // The first checkpoint set the limit by the room that there is.
        assert_eq!(store.newest_checkpoint(), before + 1);
        assert!(store.large_possible().dirty < asked.dirty);
        crowd(&store, -(192 << 20));
        assert!(store.begin_large(SMALL).is_ok());
        store.close().unwrap();
    }

    #[test]
    fn a_wait_for_room_that_never_comes_ends() {
        let store = open();
        crowd(&store, 192 << 20);
        let refused = store.begin_large(SMALL);
        assert!(matches!(refused, Err(Error::TooLarge)));
        assert!(store.failed().is_none());
        crowd(&store, -(192 << 20));
        assert!(store.begin_large(SMALL).is_ok());
        store.close().unwrap();
    }

    #[test]
    fn one_at_a_time_is_larger_than_many_together_may_be() {
        let store = open();
        let is_free = || store.large_turn.try_lock().is_some();
        let most = Extensive {
            logged: record_closed().min(TURN_FROM) - 1,
            dirty: TURN_FROM,
        };
        let more = [
            Extensive {
                logged: TURN_FROM + 1,
                ..most
            },
            Extensive {
                dirty: TURN_FROM + 1,
                ..most
            },
        ];
        let op = store.begin_large(most).unwrap();
        assert!(is_free());
        drop(op);
        for asked in more {
            let op = store.begin_large(asked).unwrap();
            assert!(!is_free(), "{asked:?}");
            drop(op);
            assert!(is_free());
        }
        store.close().unwrap();
    }

    #[test]
    fn who_goes_away_after_space_maps_have_changed_leaves_a_store_that_has_failed() {
        for changes_maps in [false, true] {
            let store = open();
            let mut promise = store.promise(4).unwrap();
            let reservation = store.reserve(&mut promise, 4, None).unwrap();
            let mut op = store.begin_large(SMALL).unwrap();
            op.take_at(&reservation).unwrap();
            if changes_maps {
                op.allocate().unwrap();
            }
            drop(op);
            assert_eq!(store.failed().is_some(), changes_maps);
        }
    }
}

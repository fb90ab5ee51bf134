//! The cache that holds the cells of nodes.
//!
//! Invariants:
//! 1. At most one cell per nid is in the cache, and it holds the newest version. A reused nid
//!    gets a fresh cell; holders of the old one find it gone.
//! 2. A dirty cell (its newest version is in no image that the table names) is not evicted,
//!    and neither is one that anybody else refers to. Cores that hold it without using it let go then (`held.rs`).
//! 3. A cell read from a device enters the cache only if the table still names the image it
//!    was read from, checked under the shard's lock.
//! 4. Who glances at a node on the way to others has its shard's lock and not the node's. So whoever takes such a node's lock exclusively takes the
//!    shard's for a moment before it changes the node (`past_glances`): a lock more where names change, and two fewer for each name of
//!    a path.

#[cfg(test)]
mod tests;

use super::groups::{Groups, NEIGHBOURS, bytes_of_one};
use super::seekers::Seeking;
use super::{Body, Cell, CellHeader, State, ask_to_change, cell_overhead, last_version, new_cell};
use crate::content::Content;
use crate::dirty::Charge;
use crate::held::{Glance, HeldNodes};
use crate::nids::LeafNids;
use crate::sum::{Padded, Sum};
use base::atomic::Ordering;
use base::map::{shard_of, shards_for};
use base::prefetch;
use base::sync::{Arc, Handle, Latch, LatchGuard, OwnedWriteGuard, WriteGuard, rank};
use base::thread::lane;
use format::Nid;
use format::table::{LEAF_NIDS, REGION_NIDS};
use std::collections::VecDeque;

/// A nid's group, and its place there.
fn place_in_group(nid: Nid) -> (u64, usize) {
    let neighbours = NEIGHBOURS as u64;
    (nid.0 / neighbours, (nid.0 % neighbours) as usize)
}

#[derive(Debug)]
struct Shard<C> {
    /// Cells of neighbouring nids. Who makes or removes nodes in the order of their nids finds several of them on one line. None is
    /// empty.
    groups: Groups<Arc<Cell<C>>>,
    /// The clock: all groups, in the order the hand meets them.
    clock: VecDeque<u64>,
    /// The core that looked for a node here last, and how many look-ups there were.
    seeker: usize,
    lookups: u32,
}

impl<C> Shard<C> {
    /// A core looks for a node.
    #[inline]
    fn sought_by(&mut self, core: usize) -> Seeking {
        self.lookups = self.lookups.wrapping_add(1);
        Seeking {
            core,
            disturbed: std::mem::replace(&mut self.seeker, core) != core,
            number: self.lookups,
        }
    }

    #[inline]
    fn get(&self, nid: Nid) -> Option<&Arc<Cell<C>>> {
        let (group, place) = place_in_group(nid);
        self.groups.get(group)?.0[place].as_ref()
    }

    /// Puts a cell in its place; returns what was there, and by how many bytes the shard grew.
    fn put(&mut self, cell: Arc<Cell<C>>) -> (Option<Arc<Cell<C>>>, i64) {
        let (number, place) = place_in_group(cell.header.nid);
        let (group, new) = self.groups.get_or_insert(number);
        let before = group.0[place].replace(cell);
        if !new {
            return (before, 0);
        }
        self.clock.push_back(number);
        (None, GROUP_BYTES)
    }
}

/// Memory of a group in the table and in the clock.
const GROUP_BYTES: i64 = (bytes_of_one::<Arc<()>>() + 16) as i64;

/// All nodes in memory, bounded by `limit` bytes as far as clean ones can be dropped.
///
/// Neighbouring nids are in one group of one shard: a core that makes nodes of the nids it has ready uses one
/// shard several times, and seldom one that another core uses. Few are neighbours, because the
/// directories of many cores may be, and because of most files in a large tree no neighbour may be in memory.
#[derive(Debug)]
pub(crate) struct NodeCache<C> {
    shards: Box<[Padded<Latch<Shard<C>>>]>,
    held: HeldNodes<C>,
    bytes: Sum,
    limit: i64,
}

/// Shards for each of a few cores: so many that two cores seldom meet in one.
const SHARDS: usize = 64;
/// Groups that the clock hand looks at for a cell that comes, at most; and so many are likely.
const LOOKS: usize = 8;
const LOOKS_AHEAD: usize = 1;
/// Part of the limit by which the charges may be wrong.
const SLACK: usize = 64;

impl<C: Content> NodeCache<C> {
    /// A cache for so many cores.
    pub fn new(cores: usize, limit: usize) -> Self {
        let shard = |i| {
            let shard = Shard {
                groups: Groups::default(),
                clock: VecDeque::new(),
                seeker: 0,
                lookups: 0,
            };
            Padded(Latch::keyed(rank::NODE_SHARD, i as u64, shard))
        };
        let shards = shards_for(cores, SHARDS);
        NodeCache {
            shards: (0..shards).map(shard).collect(),
            held: HeldNodes::new(cores),
            bytes: Sum::new(cores, (limit / SLACK) as i64),
            limit: limit as i64,
        }
    }

    /// Bytes that the nodes take, while nobody changes any.
    pub fn bytes(&self) -> usize {
        self.bytes.exact().max(0) as usize
    }

    /// The number of a nid's shard. Cores take nids along regions of their own.
    #[inline]
    fn shard_of(&self, nid: Nid) -> usize {
        let row = REGION_NIDS / NEIGHBOURS as u64;
        shard_of(place_in_group(nid).0, row, self.shards.len())
    }

    fn lock(&self, shard: usize) -> LatchGuard<'_, Shard<C>> {
        self.shards[shard].lock()
    }

    /// Asks for the memory in which a node's reference lies.
    #[inline]
    pub fn ask(&self, nid: Nid) {
        let (group, _) = place_in_group(nid);
        self.lock(self.shard_of(nid)).groups.ask(group);
    }

    /// Asks for the memory of a node, for who has let its reference come before ([`ask`](Self::ask)); false: it is not in the cache.
    #[inline]
    pub fn ask_node(&self, nid: Nid, ask: impl FnOnce(&Arc<Cell<C>>)) -> bool {
        let shard = self.lock(self.shard_of(nid));
        shard.get(nid).map(ask).is_some()
    }

    /// The node, of which the lines come at once, not each when it is looked at.
    pub fn get(&self, nid: Nid) -> Option<Arc<Cell<C>>> {
        self.get_once(nid, prefetch::shared)
    }

    /// [`get`](Self::get) for who will change the node.
    pub fn get_to_change(&self, nid: Nid) -> Option<Arc<Cell<C>>> {
        self.get_once(nid, ask_to_change)
    }

    #[inline]
    fn get_once(&self, nid: Nid, ask: impl FnOnce(&Arc<Cell<C>>)) -> Option<Arc<Cell<C>>> {
        let mut shard = self.lock(self.shard_of(nid));
        shard.sought_by(lane());
        let cell = shard.get(nid)?;
        ask(cell);
        cell.header.note_use();
        Some(Arc::clone(cell))
    }

    /// [`get`](Self::get) for what many cores may look up: then each finds it by itself from then on.
    #[inline(never)]
    pub fn get_held(&self, core: usize, nid: Nid) -> Option<Handle<Cell<C>>> {
        if let Some(held) = self.held.get(core, nid) {
            return Some(held);
        }
        let mut shard = self.lock(self.shard_of(nid));
        let seeking = shard.sought_by(core);
        let cell = shard.get(nid)?;
        prefetch::shared(cell);
        cell.header.note_use();
        let cell = Arc::clone(cell);
        match cell.header.is_sought(seeking) {
            true => Some(self.hold(shard, core, cell)),
            false => Some(Handle::common(cell)),
        }
    }

    /// Has a look at a node that is in memory, without a reference to it: `look` is called under the lock of a table, so it
    /// takes no lock. `None` also where that would wait, or counts (`is_sought`, [`RwLock::try_read_again`], [`RwLock::look`]): ask for the
    /// node then.
    #[inline]
    pub fn glance<R>(&self, core: usize, nid: Nid, look: impl Fn(&C) -> Option<R>) -> Option<R> {
        let look_at = |state: &State<C>| match &state.body {
            Body::User(content) => look(content),
            _ => None,
        };
        let read = |cell: &Cell<C>| look_at(&*cell.try_read_again()?);
        if !self.held.is_empty(core) {
            match self.held.glance(core, nid, read) {
                Glance::Looked(found) => return found,
                Glance::Elsewhere => {}
            }
        }
        let mut shard = self.lock(self.shard_of(nid));
        let seeking = shard.sought_by(core);
        let cell = shard.get(nid)?;
        cell.header.note_use();
        match cell.header.is_sought(seeking) {
            true => None,
            false if cell.header.leads => {
                // SAFETY: the shard's lock is held until the look is over, and whoever takes that of a node that leads to others exclusively takes it, too
                // (invariant 4); a new node that is locked was put here under the shard's lock.
                let state = unsafe { cell.look() }?;
                look_at(&state)
            }
            false => {
                prefetch::shared(cell);
                read(cell)
            }
        }
    }

    /// Locks a node exclusively, wherever it came from.
    pub fn write<'c>(&self, cell: &'c Cell<C>) -> WriteGuard<'c, State<C>> {
        // SAFETY: it takes the lock of the shard, under which who glances looks.
        unsafe { cell.write_past(|header| self.past_glances(header)) }
    }

    /// The same with a guard that keeps the node alive.
    #[inline]
    pub fn write_owned(&self, cell: Handle<Cell<C>>) -> OwnedWriteGuard<State<C>, CellHeader> {
        // SAFETY: as above.
        unsafe { cell.write_owned_past(|header| self.past_glances(header)) }
    }

    /// [`write_owned`](Self::write_owned), if nobody has the node's lock.
    pub fn try_write_owned(
        &self,
        cell: Handle<Cell<C>>,
    ) -> Option<OwnedWriteGuard<State<C>, CellHeader>> {
        // SAFETY: as above.
        unsafe { cell.try_write_owned_past(|header| self.past_glances(header)) }
    }

    /// A new node, locked exclusively: nobody else can reach it until it is inserted, so this never waits.
    pub fn new_locked(
        nid: Nid,
        version: u64,
        body: Body<C>,
    ) -> OwnedWriteGuard<State<C>, CellHeader> {
        let cell = Handle::common(new_cell(nid, version, body));
        // SAFETY: it is found in its shard, under that one's lock, and has to be put there first.
        unsafe { cell.write_owned_unordered() }
    }

    /// Invariant 4: the caller has just taken the lock of the node exclusively.
    #[inline]
    fn past_glances(&self, header: &CellHeader) {
        if header.leads {
            drop(self.lock(self.shard_of(header.nid)));
        }
    }

    #[inline(never)]
    fn hold(
        &self,
        shard: LatchGuard<'_, Shard<C>>,
        core: usize,
        cell: Arc<Cell<C>>,
    ) -> Handle<Cell<C>> {
        drop(shard);
        match cell.header.is_gone() {
            true => Handle::common(cell),
            false => self.held.put(core, cell),
        }
    }

    pub fn contains(&self, nid: Nid) -> bool {
        self.lock(self.shard_of(nid)).get(nid).is_some()
    }

    /// Versions of cells in the cache, for nids from `first`, a leaf's, on that have a bit in
    /// `wanted` and are in nobody's hands; returns those found.
    pub fn versions(
        &self,
        first: Nid,
        wanted: &LeafNids,
        versions: &mut [u64; LEAF_NIDS as usize],
    ) -> LeafNids {
        let mut found = LeafNids::default();
        let mut busy = Vec::new();
        for group in (0..LEAF_NIDS as usize).step_by(NEIGHBOURS) {
            let mut rest = wanted[group / 64] >> (group % 64) & ((1 << NEIGHBOURS) - 1);
            if rest == 0 {
                continue;
            }
            let shard = self.lock(self.shard_of(Nid(first.0 + group as u64)));
            while rest != 0 {
                let i = group + rest.trailing_zeros() as usize;
                rest &= rest - 1;
                let Some(cell) = shard.get(Nid(first.0 + i as u64)) else {
                    continue;
                };
                found[i / 64] |= 1 << (i % 64);
                match cell.try_read() {
                    Some(state) => versions[i] = state.version,
                    None => busy.push((i, Arc::clone(cell))),
                }
            }
        }
        for (i, cell) in busy {
            versions[i] = last_version(&cell);
        }
        found
    }

    /// Puts a cell in place of whatever the nid had (invariant 1).
    pub fn insert(&self, cell: Arc<Cell<C>>) {
        let mut charge = cell.header.bytes.load(Ordering::Relaxed) as i64;
        let mut shard = self.lock(self.shard_of(cell.header.nid));
        let (old, grown) = shard.put(cell);
        if let Some(old) = &old {
            // Its last capture may come later and must not charge it again.
            charge -= old.header.bytes.swap(0, Ordering::Relaxed) as i64;
            old.header.set_gone();
        }
        self.bytes.add(lane(), charge + grown);
        self.make_room(&mut shard);
    }

    /// Inserts a cell just read, unless another is there already or `still_current` says
    /// that the table moved on (invariant 3); returns the cell that is in the cache.
    pub fn insert_read(
        &self,
        cell: Arc<Cell<C>>,
        still_current: impl FnOnce() -> bool,
    ) -> Option<Arc<Cell<C>>> {
        let nid = cell.header.nid;
        let mut shard = self.lock(self.shard_of(nid));
        if let Some(present) = shard.get(nid) {
            return Some(Arc::clone(present));
        }
        if !still_current() {
            return None;
        }
        let bytes = cell.header.bytes.load(Ordering::Relaxed) as i64;
        let (_, grown) = shard.put(Arc::clone(&cell));
        self.bytes.add(lane(), bytes + grown);
        self.make_room(&mut shard);
        Some(cell)
    }

    /// Brings the charge of a cell up to date and returns by how much it grew; the caller holds
    /// the cell's lock.
    pub fn recharge(&self, cell: &Cell<C>, body: &Body<C>) -> Charge {
        let now = (cell_overhead::<C>() + body.memory()) as u32;
        let image = body.image() as u32;
        cell.header.uncharged.store(0, Ordering::Relaxed);
        // Under that lock, so no exchange is needed.
        let before = cell.header.image.load(Ordering::Relaxed);
        cell.header.image.store(image, Ordering::Relaxed);
        let image = image as i64 - before as i64;
        let charged = |before: u32| (before != 0).then_some(now);
        let bytes = &cell.header.bytes;
        let memory = match bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charged) {
            Ok(before) => {
                let grown = now as i64 - before as i64;
                self.bytes.add(lane(), grown);
                grown
            }
            Err(_) => 0,
        };
        Charge { memory, image }
    }

    /// Moves the clock hand until the cache fits or a bounded number of groups was looked at.
    fn make_room(&self, shard: &mut Shard<C>) {
        let mut looks = LOOKS;
        while self.bytes.about() > self.limit && looks > 0 {
            looks -= 1;
            let Some(number) = shard.clock.pop_front() else {
                return;
            };
            let Some(group) = shard.groups.get_mut(number) else {
                continue;
            };
            let mut freed = 0;
            for place in &mut group.0 {
                if let Some(cell) = place.take_if(|cell| self.is_unused(cell)) {
                    freed += cell.header.bytes.load(Ordering::Relaxed) as i64;
                }
            }
            if group.is_empty() {
                shard.groups.remove(number);
                freed += GROUP_BYTES;
            } else {
                shard.clock.push_back(number);
            }
            self.bytes.add(lane(), -freed);
        }
        if looks < LOOKS {
            // The hand meets these next, when this shard gets its next node.
            let next = shard.clock.iter().take(LOOKS_AHEAD);
            let next = next.filter_map(|number| shard.groups.get(*number));
            next.flat_map(|group| &group.0)
                .flatten()
                .for_each(prefetch::shared);
        }
    }

    /// Whether a cell may go: it is clean, was not looked up since the hand last passed, and nobody refers to it. Cores that
    /// only hold it let go.
    fn is_unused(&self, cell: &Arc<Cell<C>>) -> bool {
        let header = &cell.header;
        let idle = !header.dirty.load(Ordering::Acquire)
            && !header.was_used()
            && (header.is_common() || Arc::strong_count(cell) == 1);
        if idle && header.is_common() {
            self.held.let_go(header.nid);
        }
        // No core takes it up meanwhile: that begins with a look under this shard's lock.
        idle && Arc::strong_count(cell) == 1
    }
}

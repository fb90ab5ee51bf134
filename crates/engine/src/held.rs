//! Nodes that many cores look up, as each core has them: a small table for each, in which references have
//! a count of the core's own. Who finds a node there writes no line that other cores write, neither of the node
//! cache nor of the node.
//!
//! A core is the caller's `base::thread::lane`, as far as there are tables.
//!
//! Invariants:
//! 1. A cell in a table is the one in the node cache, or its node is gone, which the cell says: it came here by a
//!    reference, and one that anybody refers to is neither evicted nor, before its node is gone, replaced.
//!    What is gone is given to nobody: its nid may have another cell by now.
//! 2. A table keeps a node in memory only as long as the cache does not want it to go ([`HeldNodes::let_go`]).
//! 3. A table is bounded. A node may be in one of several places. Where all are taken by nodes that were asked for since another
//!    wanted a place there, these stay once. There is more than one place because all cores' tables are alike: two nodes that
//!    every operation needs, a directory and an index node of it, would have all cores meet in the node cache for one of them.

use crate::node::Cell;
use crate::sum::Padded;
use base::atomic::{AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Arc, Handle, Latch, OfCore, rank};
use format::Nid;

/// Nodes that a core holds at most.
const PLACES: usize = 64;
/// Places that a node may have.
const WAYS: usize = 4;

#[derive(Debug)]
pub(crate) struct HeldNodes<C> {
    cores: Box<[Padded<Core<C>>]>,
}

#[derive(Debug)]
struct Core<C> {
    /// Nodes in the table; a hint for who has none.
    count: AtomicUsize,
    table: Latch<Box<[Option<Held<C>>]>>,
}

#[derive(Debug)]
struct Held<C> {
    nid: Nid,
    cell: Arc<OfCore<Cell<C>>>,
    /// Asked for since another node wanted one of its places.
    wanted: bool,
}

/// What became of a glance at a node.
pub(crate) enum Glance<R> {
    Looked(Option<R>),
    /// This core does not hold the node.
    Elsewhere,
}

/// The places that a node may have.
fn places<C>(table: &mut [Option<Held<C>>], nid: Nid) -> &mut [Option<Held<C>>] {
    let hash = nid.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    let first = hash as usize % (PLACES / WAYS) * WAYS;
    &mut table[first..first + WAYS]
}

/// The place that has the node.
#[inline]
fn place_of<C>(table: &mut [Option<Held<C>>], nid: Nid) -> Option<&mut Option<Held<C>>> {
    let has = |place: &&mut Option<Held<C>>| place.as_ref().is_some_and(|held| held.nid == nid);
    places(table, nid).iter_mut().find(has)
}

impl<C> Core<C> {
    fn new(number: usize) -> Core<C> {
        let table = (0..PLACES).map(|_| None).collect();
        Core {
            count: AtomicUsize::new(0),
            table: Latch::keyed(rank::HELD_NODES, number as u64, table),
        }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Empties a place; the caller has locked the table.
    fn clear(&self, place: &mut Option<Held<C>>) {
        *place = None;
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<C> HeldNodes<C> {
    pub fn new(cores: usize) -> HeldNodes<C> {
        HeldNodes {
            cores: (0..cores).map(|i| Padded(Core::new(i))).collect(),
        }
    }

    #[inline]
    fn core(&self, core: usize) -> &Core<C> {
        match self.cores.get(core) {
            Some(core) => core,
            None => &self.cores[core % self.cores.len()],
        }
    }

    /// The node, if this core holds it.
    #[inline]
    pub fn get(&self, core: usize, nid: Nid) -> Option<Handle<Cell<C>>> {
        let core = self.core(core);
        match core.is_empty() {
            true => None,
            false => core.find(nid),
        }
    }

    /// Whether this core holds none.
    #[inline]
    pub fn is_empty(&self, core: usize) -> bool {
        self.core(core).is_empty()
    }

    /// Has a look at a node under the lock of the core's table, if this core holds the node.
    pub fn glance<R>(
        &self,
        core: usize,
        nid: Nid,
        look: impl FnOnce(&Cell<C>) -> Option<R>,
    ) -> Glance<R> {
        let mut table = self.core(core).table.lock();
        match place_of(&mut table, nid).and_then(Option::as_mut) {
            Some(held) if !held.cell.all().header.is_gone() => {
                held.wanted = true;
                held.cell.all().header.note_use();
                Glance::Looked(look(held.cell.all()))
            }
            _ => Glance::Elsewhere,
        }
    }

    /// Has this core hold a node from now on, if there is a place for it.
    pub fn put(&self, core: usize, cell: Arc<Cell<C>>) -> Handle<Cell<C>> {
        let core = self.core(core);
        let nid = cell.header.nid;
        let mut table = core.table.lock();
        let places = places(&mut table, nid);
        let at = |is: &dyn Fn(&Option<Held<C>>) -> bool| places.iter().position(is);
        let has = |place: &Option<Held<C>>| place.as_ref().is_some_and(|held| held.nid == nid);
        let unwanted = |place: &Option<Held<C>>| place.as_ref().is_some_and(|held| !held.wanted);
        let at = at(&has)
            .or_else(|| at(&Option::is_none))
            .or_else(|| at(&unwanted));
        let Some(at) = at else {
            let held = places.iter_mut().flatten();
            held.for_each(|held| held.wanted = false);
            return Handle::common(cell);
        };
        let place = &mut places[at];
        if place.is_none() {
            core.count.fetch_add(1, Ordering::Relaxed);
        }
        let own = Handle::of_core(&cell);
        *place = Some(Held {
            nid,
            cell: Arc::clone(&own),
            wanted: true,
        });
        Handle::own(own)
    }

    /// Invariant 2: no core holds the node any more unless somebody uses it there. The caller has locked the
    /// node's shard.
    pub fn let_go(&self, nid: Nid) {
        for core in &self.cores {
            if core.is_empty() {
                continue;
            }
            let mut table = core.table.lock();
            let unused = |held: &Held<C>| Arc::strong_count(&held.cell) == 1;
            if let Some(place) = place_of(&mut table, nid)
                && place.as_ref().is_some_and(unused)
            {
                core.clear(place);
            }
        }
    }
}

impl<C> Core<C> {
    #[inline(never)]
    fn find(&self, nid: Nid) -> Option<Handle<Cell<C>>> {
        let mut table = self.table.lock();
        let place = place_of(&mut table, nid)?;
        let held = place.as_mut()?;
        // Invariant 1.
        if held.cell.all().header.is_gone() && !planted(Canary::GoneNodeHeld) {
            self.clear(place);
            return None;
        }
        held.wanted = true;
        held.cell.all().header.note_use();
        Some(Handle::own(Arc::clone(&held.cell)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Body, new_cell};
    use crate::testing::Bytes;

    /// All cores meet in the node cache for one of two nodes that every operation needs, where a core could hold either
    /// but not both.
    #[test]
    fn nodes_that_are_needed_together_are_held_together() {
        let held: HeldNodes<Bytes> = HeldNodes::new(1);
        let mut table: Vec<Option<Held<Bytes>>> = (0..PLACES).map(|_| None).collect();
        let first = places(&mut table, Nid(1)).as_ptr();
        let same = (1..).filter(|nid| places(&mut table, Nid(*nid)).as_ptr() == first);
        let nids: Vec<Nid> = same.take(WAYS + 1).map(Nid).collect();
        let put = |nid| {
            let cell = new_cell(nid, 1, Body::Gone);
            held.put(0, cell);
        };
        let has = |nid| held.get(0, nid).is_some();
        let (last, others) = nids.split_last().unwrap();
        others.iter().for_each(|nid| put(*nid));
        assert!(others.iter().all(|nid| has(*nid)));
        // It has no place the first time, and then that of one that nobody asked for since.
        put(*last);
        assert!(!has(*last));
        assert!(others[1..].iter().all(|nid| has(*nid)));
        put(*last);
        assert!(has(*last) && !has(others[0]));
        assert!(others[1..].iter().all(|nid| has(*nid)));
        // One that is there keeps its place.
        put(*last);
        assert!(nids[1..].iter().all(|nid| has(*nid)));
    }
}

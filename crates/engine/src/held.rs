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
//! 3. A table is bounded. A node that was asked for since another wanted its place stays once.

use crate::node::Cell;
use crate::sum::Padded;
use base::atomic::{AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Arc, Handle, Mutex, OfCore, rank};
use format::Nid;

/// Nodes that a core holds at most.
const PLACES: usize = 64;

#[derive(Debug)]
pub(crate) struct HeldNodes<C> {
    cores: Box<[Padded<Core<C>>]>,
}

#[derive(Debug)]
struct Core<C> {
    /// Nodes in the table; a hint for who has none.
    count: AtomicUsize,
    table: Mutex<Box<[Option<Held<C>>]>>,
}

#[derive(Debug)]
struct Held<C> {
    nid: Nid,
    cell: Arc<OfCore<Cell<C>>>,
    /// Asked for since another node wanted the place.
    wanted: bool,
}

/// What became of a glance at a node.
pub(crate) enum Glance<R> {
    Looked(Option<R>),
    /// This core does not hold the node.
    Elsewhere,
}

fn place_of(nid: Nid) -> usize {
    let hash = nid.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    hash as usize % PLACES
}

impl<C> Core<C> {
    fn new(number: usize) -> Core<C> {
        let table = (0..PLACES).map(|_| None).collect();
        Core {
            count: AtomicUsize::new(0),
            table: Mutex::keyed(rank::HELD_NODES, number as u64, table),
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
        match table[place_of(nid)].as_mut() {
            Some(held) if held.nid == nid && !held.cell.all().header.is_gone() => {
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
        let place = &mut table[place_of(nid)];
        match place {
            Some(held) if held.wanted && held.nid != nid => {
                held.wanted = false;
                return Handle::common(cell);
            }
            Some(_) => {}
            None => {
                core.count.fetch_add(1, Ordering::Relaxed);
            }
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
            let place = &mut table[place_of(nid)];
            let unused = |held: &Held<C>| held.nid == nid && Arc::strong_count(&held.cell) == 1;
            if place.as_ref().is_some_and(unused) {
                core.clear(place);
            }
        }
    }
}

impl<C> Core<C> {
    #[inline(never)]
    fn find(&self, nid: Nid) -> Option<Handle<Cell<C>>> {
        let mut table = self.table.lock();
        let place = &mut table[place_of(nid)];
        let held = place.as_mut().filter(|held| held.nid == nid)?;
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

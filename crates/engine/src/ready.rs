//! Nids that are ready for use, with the versions they had: [`Recycled`], a few that just became
//! free, which any number of threads put in and take out; and [`Ready`], a ring that one thread
//! fills and any number of threads take from; both without a lock. Checked by `model/`.
//!
//! Invariants of the ring:
//! 1. `state` has the number of entries taken so far in its upper 48 bits, and that of entries
//!    ready in its lower 16. An entry belongs to whoever moves it from the second to the first.
//! 2. Only entries that are not ready are written, by one thread at a time, and before `state`
//!    says that they are. So if `state` did not change since it was read, neither did the entry.

use base::atomic::{AtomicU64, Ordering};

/// Nids below 2^29 and versions below 2^35 fit into one word.
const VERSION_BITS: u32 = 35;
const RECYCLED: usize = 4;

/// Nids that just became free, to be used again at once: where they are in the node table is in
/// the caches, and nothing must be looked up. A word is empty, or has a nid and a version.
#[derive(Debug)]
pub(crate) struct Recycled([AtomicU64; RECYCLED]);

impl Recycled {
    pub fn new() -> Recycled {
        Recycled(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Keeps a nid, above 0, that was last used with this version; false: there is no room.
    pub fn put(&self, nid: u64, version: u64) -> bool {
        if nid >> (64 - VERSION_BITS) != 0 || version >> VERSION_BITS != 0 {
            return false;
        }
        let kept = nid << VERSION_BITS | version;
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.0.iter().any(|word| {
            word.load(Ordering::Relaxed) == 0
                && word.compare_exchange(0, kept, success, failure).is_ok()
        })
    }

    /// Takes a nid and its version.
    pub fn take(&self) -> Option<(u64, u64)> {
        let full = self
            .0
            .iter()
            .filter(|word| word.load(Ordering::Relaxed) != 0);
        let mut kept = full.map(|word| word.swap(0, Ordering::AcqRel));
        let kept = kept.find(|kept| *kept != 0)?;
        Some((kept >> VERSION_BITS, kept & ((1 << VERSION_BITS) - 1)))
    }
}

const TAKEN: u32 = 16;
const READY: u64 = (1 << TAKEN) - 1;

#[derive(Debug)]
struct Entry {
    nid: AtomicU64,
    version: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Ready {
    state: AtomicU64,
    entries: Box<[Entry]>,
}

impl Ready {
    /// A ring of this many entries, a power of two.
    pub fn new(capacity: usize) -> Ready {
        assert!(capacity.is_power_of_two() && capacity as u64 <= READY);
        let entry = |_| Entry {
            nid: AtomicU64::new(0),
            version: AtomicU64::new(0),
        };
        Ready {
            state: AtomicU64::new(0),
            entries: (0..capacity).map(entry).collect(),
        }
    }

    fn entry(&self, number: u64) -> &Entry {
        &self.entries[number as usize & (self.entries.len() - 1)]
    }

    /// Takes a nid and its version.
    pub fn take(&self) -> Option<(u64, u64)> {
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            if state & READY == 0 {
                return None;
            }
            let entry = self.entry(state >> TAKEN);
            let nid = entry.nid.load(Ordering::Relaxed);
            let version = entry.version.load(Ordering::Relaxed);
            base::sched::point();
            let taken = state.wrapping_add((1 << TAKEN) - 1);
            let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
            match self.state.compare_exchange(state, taken, success, failure) {
                Ok(_) => return Some((nid, version)),
                Err(now) => state = now,
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.state.load(Ordering::Acquire) & READY == 0
    }

    /// Makes these ready, for whom there must be room; one caller at a time.
    pub fn fill(&self, nids: impl Iterator<Item = (u64, u64)>) {
        let state = self.state.load(Ordering::Acquire);
        let ready = state & READY;
        let mut filled = 0;
        for (nid, version) in nids {
            assert!(ready + filled < self.entries.len() as u64, "invariant 2");
            let entry = self.entry((state >> TAKEN) + ready + filled);
            entry.nid.store(nid, Ordering::Relaxed);
            entry.version.store(version, Ordering::Relaxed);
            filled += 1;
        }
        self.state.fetch_add(filled, Ordering::AcqRel);
    }
}

//! What the kernel may have read back too early after it was told to drop pages.
//!
//! The kernel changes a page, unlocks it, and then sends the write. If that page is dropped meanwhile and somebody reads it, it comes back with what was there
//! before the write, and stays: to the kernel nothing has changed since. Hence
//! 1. From when pages of a file begin to be dropped, what is read of it is noted, before it is read: a *window*.
//! 2. Who writes any of that has those pages dropped once more, when the write is made and answered: what is read then is what was written.
//! 3. The kernel sends one buffered write of a file at a time, under a lock. So only the first one that ends after the drop can have been on its way, and the window
//!    is closed with it, or after [`WINDOW_NS`] if no such write has come by then; one that has ([`Rereads::writes`]) keeps it open, however long it takes. Direct writes
//!    are sent beside others, and close none. Drops that are asked for under that lock have none.
//! 4. What follows a write has a window in which only those reads count that the kernel sent after the write that ends it, and that overtook it: a program that reads
//!    and writes one page in turn would have it dropped each time. What it leaves is a write that the kernel has not numbered yet.
//! 5. Windows that are over go as others begin: there are those of [`WINDOW_NS`], and those of drops and writes under way.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use base::map::HashMap;
use base::sync::{Mutex, MutexGuard, rank};

use crate::ops::NodeId;

/// In nanoseconds: a write that was on its way when pages were dropped is here by then, done or not.
pub(crate) const WINDOW_NS: u64 = 1_000_000_000;
/// How often windows that are over are looked for.
const PRUNE_NS: u64 = WINDOW_NS / 16;
/// Ranges that are told apart.
const RANGES_MAX: usize = 64;
/// Buffered writes under way whose files are told apart: as many as there are workers, mostly.
const WRITES_MAX: usize = 128;

/// Which reads may have come before a write that the kernel had begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Race {
    /// None: nobody writes meanwhile.
    None,
    /// Those that the kernel sent later.
    Overtaking,
    Any,
}

#[derive(Debug)]
struct Read {
    bytes: Range<u64>,
    /// The kernel's number of the request; of several, the greatest.
    request: u64,
}

#[derive(Debug)]
struct Window {
    race: Race,
    /// Drops that are under way: until they have come to an end no write closes it.
    dropping: usize,
    until_ns: u64,
    read: Vec<Read>,
}

#[derive(Debug)]
struct Windows {
    of_nodes: HashMap<NodeId, Window>,
    prune_at_ns: u64,
}

#[derive(Debug)]
pub(crate) struct Rereads {
    /// There are windows: all that others look at.
    any: AtomicBool,
    windows: Mutex<Windows>,
    writes: Writes,
}

/// The files of buffered writes under way.
#[derive(Debug)]
struct Writes {
    /// 0: none.
    nodes: [AtomicU64; WRITES_MAX],
    /// Writes that found no room there.
    others: AtomicUsize,
}

/// A buffered write of a file, until this is dropped.
#[derive(Debug)]
pub(crate) struct Writing<'a> {
    writes: &'a Writes,
    slot: Option<usize>,
}

impl Writes {
    fn begin(&self, node: NodeId) -> Writing<'_> {
        let first = node as usize % WRITES_MAX;
        let slot = (first..WRITES_MAX).chain(0..first).find(|&slot| {
            let taken =
                self.nodes[slot].compare_exchange(0, node, Ordering::SeqCst, Ordering::Relaxed);
            taken.is_ok()
        });
        if slot.is_none() {
            self.others.fetch_add(1, Ordering::SeqCst);
        }
        Writing { writes: self, slot }
    }

    /// Whether there may be one of a file.
    fn may_have(&self, node: NodeId) -> bool {
        let is_of = |other: &AtomicU64| other.load(Ordering::SeqCst) == node;
        self.others.load(Ordering::SeqCst) > 0 || self.nodes.iter().any(is_of)
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        match self.slot {
            Some(slot) => self.writes.nodes[slot].store(0, Ordering::SeqCst),
            None => {
                self.writes.others.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

impl Rereads {
    pub fn new() -> Rereads {
        let windows = Windows {
            of_nodes: HashMap::default(),
            prune_at_ns: 0,
        };
        Rereads {
            any: AtomicBool::new(false),
            windows: Mutex::new(rank::LEAF, windows),
            writes: Writes {
                nodes: [const { AtomicU64::new(0) }; WRITES_MAX],
                others: AtomicUsize::new(0),
            },
        }
    }

    /// Pages of a file are about to be dropped.
    pub fn begin(&self, node: NodeId, race: Race, now_ns: u64) {
        let mut windows = self.open(now_ns);
        let new = || Window {
            race,
            dropping: 0,
            until_ns: 0,
            read: Vec::new(),
        };
        let window = windows.of_nodes.entry(node).or_insert_with(new);
        if self.is_over(node, window, now_ns) {
            *window = new();
        }
        window.race = window.race.max(race);
        window.dropping += 1;
        // Before who drops them tells the kernel.
        self.any.store(true, Ordering::SeqCst);
    }

    /// They are.
    pub fn end(&self, node: NodeId, now_ns: u64) {
        let mut windows = self.windows.lock();
        if let Some(window) = windows.of_nodes.get_mut(&node) {
            window.dropping -= 1;
            window.until_ns = now_ns + WINDOW_NS;
        }
    }

    /// These bytes are about to be read, for a request of this number.
    pub fn reads(
        &self,
        node: NodeId,
        bytes: Range<u64>,
        request: u64,
        now_ns: impl FnOnce() -> u64,
    ) {
        if !self.any.load(Ordering::SeqCst) {
            return;
        }
        let now_ns = now_ns();
        let mut windows = self.open(now_ns);
        let Some(window) = windows.of_nodes.get_mut(&node) else {
            return;
        };
        if self.is_over(node, window, now_ns) {
            return;
        }
        let touches = |read: &Read| read.bytes.start <= bytes.end && bytes.start <= read.bytes.end;
        let at = match window.read.iter().position(touches) {
            None if window.read.len() < RANGES_MAX => {
                window.read.push(Read { bytes, request });
                return;
            }
            at => at.unwrap_or(0),
        };
        let read = &mut window.read[at];
        let (start, end) = (
            read.bytes.start.min(bytes.start),
            read.bytes.end.max(bytes.end),
        );
        read.bytes = start..end;
        read.request = read.request.max(request);
    }

    /// A buffered write of a file is about to be made. It is under way until it has been asked for by [`wrote`](Self::wrote).
    pub fn writes(&self, node: NodeId) -> Writing<'_> {
        self.writes.begin(node)
    }

    /// Whether any of these bytes, which a request of this number has just written, may be in the kernel's memory as they were before. `closes`: it was a
    /// buffered write.
    pub fn wrote(
        &self,
        node: NodeId,
        bytes: &Range<u64>,
        (request, closes): (u64, bool),
        now_ns: impl FnOnce() -> u64,
    ) -> bool {
        if !self.any.load(Ordering::SeqCst) {
            return false;
        }
        let now_ns = now_ns();
        let mut windows = self.open(now_ns);
        let Some(window) = windows.of_nodes.get(&node) else {
            return false;
        };
        let is_over = self.is_over(node, window, now_ns);
        let mut read = window.read.iter();
        let is_outdated = !is_over
            && read.any(|read| {
                let overlaps = read.bytes.start < bytes.end && bytes.start < read.bytes.end;
                overlaps && (window.race == Race::Any || read.request > request)
            });
        if is_over || (closes && window.dropping == 0) {
            windows.of_nodes.remove(&node);
            self.any
                .store(!windows.of_nodes.is_empty(), Ordering::SeqCst);
        }
        is_outdated
    }

    #[cfg(test)]
    pub fn is_written(&self, node: NodeId) -> bool {
        self.writes.may_have(node)
    }

    /// Invariants 3 and 5.
    fn is_over(&self, node: NodeId, window: &Window, now_ns: u64) -> bool {
        window.dropping == 0 && window.until_ns <= now_ns && !self.writes.may_have(node)
    }

    /// The windows, without those that have been over for some time.
    fn open(&self, now_ns: u64) -> MutexGuard<'_, Windows> {
        let mut windows = self.windows.lock();
        if now_ns >= windows.prune_at_ns {
            windows.prune_at_ns = now_ns + PRUNE_NS;
            windows
                .of_nodes
                .retain(|&node, window| !self.is_over(node, window, now_ns));
            let any = !windows.of_nodes.is_empty();
            self.any.store(any, Ordering::SeqCst);
        }
        windows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dropped(rereads: &Rereads, node: NodeId, race: Race, at: u64) {
        rereads.begin(node, race, at);
        rereads.end(node, at);
    }

    fn count(rereads: &Rereads) -> usize {
        rereads.windows.lock().of_nodes.len()
    }

    #[test]
    fn the_first_write_after_a_drop_finds_what_was_read_since() {
        let rereads = Rereads::new();
        let reads = |node, bytes: Range<u64>, at| rereads.reads(node, bytes, 1, || at);
        let wrote = |node, bytes: Range<u64>, at| rereads.wrote(node, &bytes, (2, true), || at);
        reads(1, 0..10, 5);
        assert!(!wrote(1, 0..10, 5), "nothing was dropped");
        dropped(&rereads, 1, Race::Any, 10);
        reads(1, 4096..8192, 20);
        reads(2, 0..4096, 20);
        assert!(!wrote(2, 0..4096, 30));
        assert!(wrote(1, 8191..9000, 30));
        assert!(!wrote(1, 8191..9000, 30), "that was the one");
        dropped(&rereads, 1, Race::Any, 10);
        reads(1, 4096..8192, 20);
        assert!(!wrote(1, 0..4096, 30));
        assert!(!wrote(1, 4096..8192, 30), "another came first");
        // Until its time is over.
        for (after, found) in [(WINDOW_NS - 1, true), (WINDOW_NS, false)] {
            dropped(&rereads, 1, Race::Any, 10);
            reads(1, 0..1, 20);
            assert_eq!(wrote(1, 0..1, 10 + after), found);
        }
    }

    #[test]
    fn no_write_closes_a_window_before_the_pages_are_dropped() {
        let rereads = Rereads::new();
        rereads.begin(1, Race::Any, 0);
        rereads.reads(1, 0..10, 1, || 0);
        assert!(rereads.wrote(1, &(0..10), (2, true), || 5 * WINDOW_NS));
        assert!(rereads.wrote(1, &(0..10), (3, true), || 5 * WINDOW_NS));
        rereads.end(1, 5 * WINDOW_NS);
        assert!(rereads.wrote(1, &(0..10), (4, true), || 5 * WINDOW_NS));
        assert!(!rereads.wrote(1, &(0..10), (5, true), || 5 * WINDOW_NS));
        assert!(!rereads.any.load(Ordering::SeqCst) && count(&rereads) == 0);
    }

    #[test]
    fn behind_a_write_only_what_overtook_the_next_counts() {
        let rereads = Rereads::new();
        let turn = |race, read: u64, written: u64| {
            dropped(&rereads, 1, race, 0);
            rereads.reads(1, 0..10, read, || 1);
            rereads.wrote(1, &(0..10), (written, true), || 2)
        };
        assert!(!turn(Race::Overtaking, 4, 6));
        assert!(turn(Race::Overtaking, 8, 6));
        assert!(turn(Race::Any, 4, 6));
    }

    #[test]
    fn of_many_ranges_none_is_forgotten() {
        let rereads = Rereads::new();
        for wanted in 0..2 * RANGES_MAX as u64 {
            dropped(&rereads, 1, Race::Any, 0);
            for i in 0..2 * RANGES_MAX as u64 {
                rereads.reads(1, i * 100..i * 100 + 10, i, || 1);
            }
            assert_eq!(rereads.windows.lock().of_nodes[&1].read.len(), RANGES_MAX);
            let bytes = wanted * 100 + 5..wanted * 100 + 6;
            assert!(rereads.wrote(1, &bytes, (0, true), || 1));
        }
    }

    /// A write that waited for the devices longer than a window lasts found that gone, and what was read before it stayed.
    #[test]
    fn a_slow_write_finds_what_was_read_since_the_drop_however_long_it_takes() {
        for begins_before in [true, false] {
            let rereads = Rereads::new();
            let before = begins_before.then(|| rereads.writes(1));
            dropped(&rereads, 1, Race::Any, 0);
            dropped(&rereads, 2, Race::Any, 0);
            rereads.reads(1, 0..10, 1, || 1);
            rereads.reads(2, 0..10, 1, || 1);
            let writing = before.unwrap_or_else(|| rereads.writes(1));
            // Others go on meanwhile, and begin to write files for which that is too late.
            rereads.reads(3, 0..10, 1, || 2 * WINDOW_NS);
            assert_eq!(count(&rereads), 1);
            let other = rereads.writes(2);
            assert!(!rereads.wrote(2, &(0..10), (2, true), || 2 * WINDOW_NS));
            drop(other);
            assert!(rereads.wrote(1, &(0..10), (2, true), || 3 * WINDOW_NS));
            assert!(!rereads.wrote(1, &(0..10), (2, true), || 3 * WINDOW_NS));
            drop(writing);
            assert_eq!(count(&rereads), 0);
        }
    }

    #[test]
    fn a_write_that_fails_keeps_no_window() {
        let rereads = Rereads::new();
        let writing = rereads.writes(1);
        dropped(&rereads, 1, Race::Any, 0);
        rereads.reads(1, 0..10, 1, || 2 * WINDOW_NS);
        drop(writing);
        assert!(!rereads.wrote(1, &(0..10), (2, true), || 2 * WINDOW_NS));
        assert!(!rereads.any.load(Ordering::SeqCst));
    }

    #[test]
    fn of_writes_too_many_to_tell_apart_none_is_forgotten() {
        let rereads = Rereads::new();
        let writing: Vec<_> = (0..WRITES_MAX + 1).map(|_| rereads.writes(7)).collect();
        assert!(rereads.writes.may_have(7) && rereads.writes.may_have(8));
        drop(writing);
        assert!(!rereads.writes.may_have(7) && !rereads.writes.may_have(8));
    }

    /// Direct writes of libaio are sent beside others: the first that ended closed the window of a buffered one.
    #[test]
    fn a_direct_write_leaves_the_window_to_the_write_that_was_on_its_way() {
        let rereads = Rereads::new();
        dropped(&rereads, 1, Race::Any, 10);
        rereads.reads(1, 0..4096, 1, || 20);
        let wrote = |bytes: Range<u64>, closes| rereads.wrote(1, &bytes, (2, closes), || 30);
        assert!(!wrote(4096..8192, false));
        assert!(wrote(0..4096, false), "it overlaps what was read");
        assert!(wrote(0..4096, true));
        assert!(!wrote(0..4096, true));
    }

    /// A user who began atomic writes of many files while nobody read anything had them all remembered.
    #[test]
    fn windows_that_are_over_go_as_others_begin() {
        let rereads = Rereads::new();
        for node in 1..=10_000 {
            dropped(&rereads, node, Race::Any, node * 1_000_000);
        }
        let most = (WINDOW_NS + PRUNE_NS).div_ceil(1_000_000) as usize;
        assert!(count(&rereads) <= most, "{}", count(&rereads));
    }
}

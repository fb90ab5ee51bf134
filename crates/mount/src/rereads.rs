//! What the kernel may have read back too early after it was told to drop pages.
//!
//! The kernel changes a page, unlocks it, and then sends the write. If that page is dropped meanwhile and somebody reads it, it comes back with what was there
//! before the write, and stays: to the kernel nothing has changed since. Hence
//! 1. From when pages of a file begin to be dropped, what is read of it is noted, before it is read: a *window*.
//! 2. Who writes any of that has those pages dropped once more, when the write is made and answered: what is read then is what was written.
//! 3. The kernel sends one buffered write of a file at a time, under a lock. So only the first one that ends after the drop can have been on its way, and the window
//!    is closed with it, or after [`WINDOW_NS`]. Drops that are asked for under that lock have none.
//! 4. What follows a write has a window in which only those reads count that the kernel sent after the write that ends it, and that overtook it: a program that reads
//!    and writes one page in turn would have it dropped each time. What it leaves is a write that the kernel has not numbered yet.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use base::sync::{Mutex, rank};

use crate::ops::NodeId;

/// In nanoseconds: a write that was on its way when pages were dropped is here by then.
const WINDOW_NS: u64 = 1_000_000_000;
/// Ranges that are told apart.
const RANGES_MAX: usize = 64;

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
    node: NodeId,
    race: Race,
    /// Drops that are under way: until they have come to an end no write closes it.
    dropping: usize,
    until_ns: u64,
    read: Vec<Read>,
}

#[derive(Debug)]
pub(crate) struct Rereads {
    /// There are windows: all that others look at.
    any: AtomicBool,
    windows: Mutex<Vec<Window>>,
}

impl Rereads {
    pub fn new() -> Rereads {
        Rereads {
            any: AtomicBool::new(false),
            windows: Mutex::new(rank::LEAF, Vec::new()),
        }
    }

    /// Pages of a file are about to be dropped.
    pub fn begin(&self, node: NodeId, race: Race) {
        let mut windows = self.windows.lock();
        match windows.iter_mut().find(|window| window.node == node) {
            Some(window) => {
                window.race = window.race.max(race);
                window.dropping += 1;
            }
            None => windows.push(Window {
                node,
                race,
                dropping: 1,
                until_ns: 0,
                read: Vec::new(),
            }),
        }
        // Before who drops them tells the kernel.
        self.any.store(true, Ordering::SeqCst);
    }

    /// They are.
    pub fn end(&self, node: NodeId, now_ns: u64) {
        let mut windows = self.windows.lock();
        if let Some(window) = windows.iter_mut().find(|window| window.node == node) {
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
        let mut windows = self.open(now_ns());
        let Some(window) = windows.iter_mut().find(|window| window.node == node) else {
            return;
        };
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

    /// Whether any of these bytes, which a request of this number has just written, may be in the kernel's memory as they were before.
    pub fn wrote(
        &self,
        node: NodeId,
        bytes: &Range<u64>,
        request: u64,
        now_ns: impl FnOnce() -> u64,
    ) -> bool {
        if !self.any.load(Ordering::SeqCst) {
            return false;
        }
        let mut windows = self.open(now_ns());
        let Some(at) = windows.iter().position(|window| window.node == node) else {
            return false;
        };
        let window = &windows[at];
        let mut read = window.read.iter();
        let is_outdated = read.any(|read| {
            let overlaps = read.bytes.start < bytes.end && bytes.start < read.bytes.end;
            overlaps && (window.race == Race::Any || read.request > request)
        });
        if window.dropping == 0 {
            windows.swap_remove(at);
        }
        is_outdated
    }

    /// The windows whose time is not over.
    fn open(&self, now_ns: u64) -> base::sync::MutexGuard<'_, Vec<Window>> {
        let mut windows = self.windows.lock();
        windows.retain(|window| window.dropping > 0 || window.until_ns > now_ns);
        if windows.is_empty() {
            self.any.store(false, Ordering::SeqCst);
        }
        windows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dropped(rereads: &Rereads, node: NodeId, race: Race, at: u64) {
        rereads.begin(node, race);
        rereads.end(node, at);
    }

    #[test]
    fn the_first_write_after_a_drop_finds_what_was_read_since() {
        let rereads = Rereads::new();
        let reads = |node, bytes: Range<u64>, at| rereads.reads(node, bytes, 1, || at);
        let wrote = |node, bytes: Range<u64>, at| rereads.wrote(node, &bytes, 2, || at);
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
        rereads.begin(1, Race::Any);
        rereads.reads(1, 0..10, 1, || 0);
        assert!(rereads.wrote(1, &(0..10), 2, || 5 * WINDOW_NS));
        assert!(rereads.wrote(1, &(0..10), 3, || 5 * WINDOW_NS));
        rereads.end(1, 5 * WINDOW_NS);
        assert!(rereads.wrote(1, &(0..10), 4, || 5 * WINDOW_NS));
        assert!(!rereads.wrote(1, &(0..10), 5, || 5 * WINDOW_NS));
        assert!(!rereads.any.load(Ordering::SeqCst) || rereads.windows.lock().is_empty());
    }

    #[test]
    fn behind_a_write_only_what_overtook_the_next_counts() {
        let rereads = Rereads::new();
        let turn = |race, read: u64, written: u64| {
            dropped(&rereads, 1, race, 0);
            rereads.reads(1, 0..10, read, || 1);
            rereads.wrote(1, &(0..10), written, || 2)
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
            assert_eq!(rereads.windows.lock()[0].read.len(), RANGES_MAX);
            assert!(rereads.wrote(1, &(wanted * 100 + 5..wanted * 100 + 6), 0, || 1));
        }
    }
}

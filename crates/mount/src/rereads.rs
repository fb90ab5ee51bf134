//! What the kernel may have read back too early after it was told to drop pages.
//!
//! The kernel changes a page, unlocks it, and then sends the write. If that page is dropped meanwhile and somebody reads it, it comes back with what was there
//! before the write, and stays: to the kernel nothing has changed since. Hence
//! 1. For [`WINDOW_NS`] after pages of a file were dropped, what is read of it is noted, before it is read.
//! 2. Who writes any of that has those pages dropped once more, when the write is made and answered: what is read then is what was written.
//!
//! A write that was on its way when pages were dropped is assumed to be here within that time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use base::sync::{Mutex, rank};

use crate::ops::NodeId;

/// In nanoseconds.
const WINDOW_NS: u64 = 1_000_000_000;
/// Ranges that are told apart.
const RANGES_MAX: usize = 64;

#[derive(Debug)]
struct File {
    node: NodeId,
    until_ns: u64,
    read: Vec<Range<u64>>,
}

#[derive(Debug)]
pub(crate) struct Rereads {
    /// There are some: all that others look at.
    any: AtomicBool,
    files: Mutex<Vec<File>>,
}

impl Rereads {
    pub fn new() -> Rereads {
        Rereads {
            any: AtomicBool::new(false),
            files: Mutex::new(rank::LEAF, Vec::new()),
        }
    }

    /// Pages of a file are about to be dropped, or have just been.
    pub fn dropped(&self, node: NodeId, now_ns: u64) {
        let mut files = self.files.lock();
        files.retain(|file| file.until_ns > now_ns || file.node == node);
        let until_ns = now_ns + WINDOW_NS;
        match files.iter_mut().find(|file| file.node == node) {
            Some(file) => {
                if file.until_ns <= now_ns {
                    file.read.clear();
                }
                file.until_ns = until_ns;
            }
            None => files.push(File {
                node,
                until_ns,
                read: Vec::new(),
            }),
        }
        // Before who drops them tells the kernel.
        self.any.store(true, Ordering::SeqCst);
    }

    /// These bytes are about to be read.
    pub fn reads(&self, node: NodeId, bytes: Range<u64>, now_ns: impl FnOnce() -> u64) {
        if !self.any.load(Ordering::SeqCst) {
            return;
        }
        self.with(node, now_ns(), |file| {
            let touches = |other: &Range<u64>| other.start <= bytes.end && bytes.start <= other.end;
            match file.read.iter().position(touches) {
                Some(at) => hull(&mut file.read[at], &bytes),
                None if file.read.len() < RANGES_MAX => file.read.push(bytes),
                None => hull(&mut file.read[0], &bytes),
            }
        });
    }

    /// Whether any of these bytes, which were just written, may be in the kernel's memory as they were before.
    pub fn has(&self, node: NodeId, bytes: &Range<u64>, now_ns: impl FnOnce() -> u64) -> bool {
        self.any.load(Ordering::SeqCst)
            && self
                .with(node, now_ns(), |file| {
                    let mut read = file.read.iter();
                    read.any(|other| other.start < bytes.end && bytes.start < other.end)
                })
                .unwrap_or(false)
    }

    fn with<T>(&self, node: NodeId, now_ns: u64, look: impl FnOnce(&mut File) -> T) -> Option<T> {
        let mut files = self.files.lock();
        files.retain(|file| file.until_ns > now_ns);
        if files.is_empty() {
            self.any.store(false, Ordering::SeqCst);
        }
        files.iter_mut().find(|file| file.node == node).map(look)
    }
}

/// `range` grows to have `other` too.
fn hull(range: &mut Range<u64>, other: &Range<u64>) {
    *range = range.start.min(other.start)..range.end.max(other.end);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_soon_after_a_drop_is_known_until_its_time_is_over() {
        let rereads = Rereads::new();
        let reads = |node, bytes: Range<u64>, at| rereads.reads(node, bytes, || at);
        let has = |node, bytes: Range<u64>, at| rereads.has(node, &bytes, || at);
        reads(1, 0..10, 5);
        assert!(!has(1, 0..10, 5), "nothing was dropped");
        rereads.dropped(1, 10);
        reads(1, 4096..8192, 20);
        reads(2, 0..4096, 20);
        assert!(has(1, 8191..9000, 30) && has(1, 0..4097, 30));
        assert!(!has(1, 0..4096, 30) && !has(1, 8192..9000, 30) && !has(2, 0..10, 30));
        // What is read again keeps it no longer; another drop does.
        let later = 10 + WINDOW_NS;
        assert!(has(1, 5000..5001, later - 1));
        rereads.dropped(1, later - 1);
        assert!(has(1, 5000..5001, later + 1));
        assert!(!has(1, 5000..5001, later + WINDOW_NS));
        rereads.dropped(1, later + WINDOW_NS);
        assert!(!has(1, 5000..5001, later + WINDOW_NS));
    }

    #[test]
    fn of_many_ranges_none_is_forgotten() {
        let rereads = Rereads::new();
        rereads.dropped(1, 0);
        for i in 0..2 * RANGES_MAX as u64 {
            rereads.reads(1, i * 100..i * 100 + 10, || 1);
        }
        for i in 0..2 * RANGES_MAX as u64 {
            assert!(rereads.has(1, &(i * 100 + 5..i * 100 + 6), || 1));
        }
        assert_eq!(rereads.files.lock()[0].read.len(), RANGES_MAX);
    }
}

//! Sets that hold so many dirty pages that some should be written home before somebody needs a frame there.
//!
//! Only a set knows that it has no frame left: the cache as a whole may be nearly clean. So sets say so: a bit for each, and a count.
//!
//! Invariants:
//! 1. A set becomes crowded when more than [`crowded`] of its pages are dirty, and ceases to be when no more than [`eased`] are.
//!    Between the two it stays what it was: so it is cleaned a few pages at a time, and not each time one becomes dirty.
//! 2. Its bit is what the set says of itself: both change under its lock. Who looks without the lock has a hint.
//! 3. With [`PageCache::keeping_ways`](super::PageCache::keeping_ways) an overwrite makes no more pages of a set dirty than
//!    [`own_most`]: a read finds a clean page to evict, unless its frame is set aside for another, and what needs a new block a frame, however much is
//!    written over.

use super::WAYS;
use crate::sum::Padded;
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::tight;

/// Invariant 1.
pub(super) fn crowded() -> u32 {
    tight::limit(WAYS - 4, 3) as u32
}

pub(super) fn eased() -> u32 {
    tight::limit(WAYS - 6, 0) as u32
}

/// Invariant 3.
pub(super) fn own_most() -> u32 {
    tight::limit(WAYS - 2, 6) as u32
}

/// Which sets are crowded.
#[derive(Debug)]
pub(super) struct Crowd {
    words: Box<[AtomicU64]>,
    /// On a line of its own: all who write look at it.
    count: Padded<AtomicUsize>,
}

impl Crowd {
    pub fn new(sets: usize) -> Crowd {
        Crowd {
            words: (0..sets.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            count: Padded::default(),
        }
    }

    /// The set's lock is held, and this is a change.
    pub fn set(&self, index: usize, crowded: bool) {
        let (word, bit) = (&self.words[index / 64], 1 << (index % 64));
        match crowded {
            true => {
                word.fetch_or(bit, Ordering::Relaxed);
                self.count.fetch_add(1, Ordering::Relaxed);
            }
            false => {
                word.fetch_and(!bit, Ordering::Relaxed);
                self.count.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// The first crowded set from this one on.
    pub fn next(&self, from: usize) -> Option<usize> {
        let first = from / 64;
        let words = self.words.iter().enumerate().skip(first);
        words
            .map(|(i, word)| match i == first {
                true => (i, word.load(Ordering::Relaxed) & (u64::MAX << (from % 64))),
                false => (i, word.load(Ordering::Relaxed)),
            })
            .find(|(_, bits)| *bits != 0)
            .map(|(i, bits)| i * 64 + bits.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crowded_sets_are_found_in_order() {
        let crowd = Crowd::new(200);
        assert_eq!((crowd.count(), crowd.next(0)), (0, None));
        for set in [0, 63, 64, 130, 199] {
            crowd.set(set, true);
        }
        assert_eq!(crowd.count(), 5);
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(set) = crowd.next(from) {
            found.push(set);
            from = set + 1;
        }
        assert_eq!(found, [0, 63, 64, 130, 199]);
        crowd.set(64, false);
        assert_eq!((crowd.count(), crowd.next(64)), (4, Some(130)));
        assert_eq!(crowd.next(200), None);
    }
}

//! Which leaf pages of the node table the next checkpoint will have to write, and which the running one will.
//!
//! Invariants:
//! 1. A leaf of which a node was marked as changed is in `next`, or in `running` as long as the checkpoint
//!    that took the node has not set its entry: it moves from the one to the other without being in neither.
//! 2. Which of two checkpoints a leaf belongs to that is touched while one begins is a guess: it may be in `next` for
//!    no change, and its cost be counted for the wrong one.

use base::atomic::{AtomicU64, Ordering};
use format::table::{LEAF_NIDS, NID_LIMIT};

const WORDS: usize = (NID_LIMIT / LEAF_NIDS / 64) as usize;

/// See the module's head; leaves go by their numbers.
#[derive(Debug)]
pub(crate) struct ChangedLeaves {
    next: Box<[AtomicU64]>,
    running: Box<[AtomicU64]>,
}

fn is_set(words: &[AtomicU64], leaf: u64) -> bool {
    words[leaf as usize / 64].load(Ordering::SeqCst) >> (leaf % 64) & 1 == 1
}

impl ChangedLeaves {
    pub fn new() -> ChangedLeaves {
        let words = || (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        ChangedLeaves {
            next: words(),
            running: words(),
        }
    }

    /// For the next checkpoint.
    pub fn has(&self, leaf: u64) -> bool {
        is_set(&self.next, leaf)
    }

    /// Whether a checkpoint will set entries of the leaf.
    pub fn keeps(&self, leaf: u64) -> bool {
        // In the order in which it moves.
        is_set(&self.next, leaf) || is_set(&self.running, leaf)
    }

    /// True: it was not there.
    pub fn add(&self, leaf: u64) -> bool {
        let bit = 1 << (leaf % 64);
        !self.has(leaf) && self.next[leaf as usize / 64].fetch_or(bit, Ordering::SeqCst) & bit == 0
    }

    /// A checkpoint takes the changed nodes. Returns how many leaves it gets.
    pub fn begin(&self) -> u64 {
        let mut leaves = 0;
        for (next, running) in self.next.iter().zip(&self.running) {
            let bits = next.load(Ordering::SeqCst);
            if bits != 0 {
                running.fetch_or(bits, Ordering::SeqCst);
                next.fetch_and(!bits, Ordering::SeqCst);
                leaves += u64::from(bits.count_ones());
            }
        }
        leaves
    }

    /// It has set the entries of all that it took.
    pub fn entered(&self) {
        for word in &self.running {
            if word.load(Ordering::SeqCst) != 0 {
                word.store(0, Ordering::SeqCst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaf_is_kept_until_the_checkpoint_that_took_it_has_set_its_entries() {
        let leaves = ChangedLeaves::new();
        assert!(leaves.add(70) && !leaves.add(70));
        assert!(leaves.has(70) && leaves.keeps(70) && !leaves.keeps(71));
        assert_eq!(leaves.begin(), 1);
        assert!(!leaves.has(70) && leaves.keeps(70));
        // It changes again before the first checkpoint has done with it.
        assert!(leaves.add(70) && leaves.add(71));
        leaves.entered();
        assert!(leaves.keeps(70) && leaves.keeps(71));
        assert_eq!(leaves.begin(), 2);
        leaves.entered();
        assert!(!leaves.keeps(70) && !leaves.keeps(71));
    }
}

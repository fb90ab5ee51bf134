//! Which leaf pages of the node table the next checkpoint will have to write, and which the running one will.
//! Checked by `model/`.
//!
//! Invariants:
//! 1. A leaf of which a node was marked as changed is in `next`, or in `running` as long as the checkpoint
//!    that took the node has not set its entry: it moves from the one to the other without being in neither.
//! 2. Which of two checkpoints a leaf belongs to that is touched while one begins is a guess: it may be in `next` for
//!    no change, and its cost be counted for the wrong one.
//! 3. A word of `next` that has, or ever had, a bit has one in `used`, which was set before: so a checkpoint looks at words that
//!    are in use and at no others, which are nearly all.

use base::atomic::{AtomicU64, Ordering};
use format::table::{LEAF_NIDS, NID_LIMIT};

const WORDS: usize = (NID_LIMIT / LEAF_NIDS / 64) as usize;

/// See the module's head; leaves go by their numbers.
#[derive(Debug)]
pub(crate) struct ChangedLeaves {
    next: Box<[AtomicU64]>,
    running: Box<[AtomicU64]>,
    used: Box<[AtomicU64]>,
}

fn is_set(words: &[AtomicU64], leaf: u64) -> bool {
    words[leaf as usize / 64].load(Ordering::SeqCst) >> (leaf % 64) & 1 == 1
}

impl ChangedLeaves {
    pub fn new() -> ChangedLeaves {
        ChangedLeaves::with_words(WORDS)
    }

    /// For so many times 64 leaves.
    pub fn with_words(count: usize) -> ChangedLeaves {
        let words = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        ChangedLeaves {
            next: words(count),
            running: words(count),
            used: words(count.div_ceil(64)),
        }
    }

    /// Words that are in use (invariant 3), of `next` and of `running`.
    pub(super) fn words(&self) -> impl Iterator<Item = (&AtomicU64, &AtomicU64)> {
        let used = self.used.iter().enumerate();
        used.flat_map(move |(i, used)| {
            // From the lowest bit on, each without those below it.
            let rest = |bits: u64| (bits != 0).then_some(bits);
            let set = std::iter::successors(rest(used.load(Ordering::SeqCst)), move |bits| {
                rest(bits & (bits - 1))
            });
            set.map(move |bits| {
                let word = i * 64 + bits.trailing_zeros() as usize;
                (&self.next[word], &self.running[word])
            })
        })
    }

    fn use_word(&self, word: usize) {
        let (used, bit) = (&self.used[word / 64], 1 << (word % 64));
        if used.load(Ordering::SeqCst) & bit == 0 {
            used.fetch_or(bit, Ordering::SeqCst);
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
        if self.has(leaf) {
            return false;
        }
        let (word, bit) = (leaf as usize / 64, 1 << (leaf % 64));
        self.use_word(word);
        self.next[word].fetch_or(bit, Ordering::SeqCst) & bit == 0
    }

    /// A checkpoint takes the changed nodes. Returns how many leaves it gets.
    pub fn begin(&self) -> u64 {
        let mut leaves = 0;
        for (next, running) in self.words() {
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
        for (_, running) in self.words() {
            if running.load(Ordering::SeqCst) != 0 {
                running.store(0, Ordering::SeqCst);
            }
        }
    }
}

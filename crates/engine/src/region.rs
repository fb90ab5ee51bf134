//! The free nids of one region, in memory: given out a leaf of the node table at a time, put
//! back one by one, by any number of threads without a lock. Checked by `model/`.
//!
//! Invariants:
//! 1. As in [`Bitmap`]: a set bit means that the nid is free and in nobody's hands.
//! 2. A word with [`RICH`] free nids or more is among the rich, except while the thread that
//!    changed the word, or one that took from it, is about to say so. (A word that was taken just
//!    then may stay among them until its leaf is taken again.) Whether the region is worth a lease
//!    follows from the number of rich words, so that putting a nid back counts nothing. Of two threads that make words
//!    rich and then count them, one counts both: each says so before it counts, in one order for all.
//! 3. What the node table says is added once, by the thread that `claim` let through; nids that
//!    were put back before are free then already.

use crate::bitmap::Bitmap;
use base::atomic::{AtomicU32, AtomicU64, Ordering};

/// Words of 64 nids in a leaf.
pub(crate) const LEAF_WORDS: usize = 4;
/// Free nids that make a word rich.
const RICH: u32 = 16;

const NOT_LOADED: u32 = 0;
const LOADING: u32 = 1;
const LOADED: u32 = 2;

#[derive(Debug)]
pub(crate) struct Region {
    free: Bitmap,
    /// One bit for each rich word.
    rich: Box<[AtomicU64]>,
    state: AtomicU32,
}

impl Region {
    /// A region of this many words, of which nothing is known to be free.
    pub fn new(words: usize) -> Region {
        Region {
            free: Bitmap::new(words),
            rich: (0..words.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            state: AtomicU32::new(NOT_LOADED),
        }
    }

    /// Whether the caller is the one who shall load the region, and then call `add` for each
    /// word and `loaded`; or, before any `add`, `unclaim`. If it does neither, nobody will.
    pub fn claim(&self) -> bool {
        let (relaxed, acquire) = (Ordering::Relaxed, Ordering::Acquire);
        let claimed = self
            .state
            .compare_exchange(NOT_LOADED, LOADING, acquire, relaxed);
        claimed.is_ok()
    }

    /// The region is to be loaded another time.
    pub fn unclaim(&self) {
        self.state.store(NOT_LOADED, Ordering::Release);
    }

    pub fn loaded(&self) {
        self.state.store(LOADED, Ordering::Release);
    }

    pub fn is_loaded(&self) -> bool {
        self.state.load(Ordering::Acquire) == LOADED
    }

    /// Makes nids of a word free: what the table says, or what a taker gives back.
    pub fn add(&self, w: usize, free: u64) {
        self.free.put_word(w, free);
        self.note_rich(w);
    }

    fn note_rich(&self, w: usize) {
        if self.free.word(w).count_ones() >= RICH {
            self.rich[w / 64].fetch_or(1 << (w % 64), Ordering::AcqRel);
        }
    }

    /// Makes a nid free: one atomic operation, and two more when its word was empty, or becomes
    /// rich. True in the last case.
    pub fn put(&self, within: u64) -> bool {
        let before = self.free.put(within);
        // Put back twice, the nid that would make a word rich says so twice.
        if before.count_ones() != RICH - 1 {
            return false;
        }
        let w = within as usize / 64;
        self.rich[w / 64].fetch_or(1 << (w % 64), Ordering::SeqCst);
        true
    }

    /// Takes a nid if it is free.
    pub fn take_nid(&self, within: u64) -> bool {
        self.free.take_number(within)
    }

    /// Takes all free nids of the first leaf from `from` on that has any.
    pub fn take_leaf(&self, from: usize) -> Option<(usize, [u64; LEAF_WORDS])> {
        let mut word = from * LEAF_WORDS;
        while let Some(found) = self.free.next_word(word) {
            let leaf = found / LEAF_WORDS;
            let first = leaf * LEAF_WORDS;
            let taken = self.free.take_words(first);
            let bits = ((1 << LEAF_WORDS) - 1) << (first % 64);
            let rich = &self.rich[first / 64];
            if rich.load(Ordering::Acquire) & bits != 0 {
                rich.fetch_and(!bits, Ordering::AcqRel);
                (first..first + LEAF_WORDS).for_each(|w| self.note_rich(w));
            }
            if taken != [0; LEAF_WORDS] {
                return Some((leaf, taken));
            }
            word = first + LEAF_WORDS;
        }
        None
    }

    pub fn has_free(&self) -> bool {
        self.free.next_word(0).is_some()
    }

    pub fn rich_words(&self) -> u32 {
        let count = |word: &AtomicU64| word.load(Ordering::SeqCst).count_ones();
        self.rich.iter().map(count).sum()
    }
}

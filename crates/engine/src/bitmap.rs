//! A bitmap of free numbers with a summary level, used by any number of threads without a lock.
//! Checked by `model/`.
//!
//! Invariants:
//! 1. A set bit means: the number is free and in nobody's hands. Whoever clears it has the number.
//! 2. A word with a set bit has its summary bit set, except while the thread that changed the
//!    word, or one that found it empty, is about to set it.

use base::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Bitmap {
    words: Box<[AtomicU64]>,
    /// One bit for each word.
    summary: Box<[AtomicU64]>,
}

impl Bitmap {
    /// This many words of 64 numbers each, none of them free.
    pub fn new(words: usize) -> Bitmap {
        let zeros = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        Bitmap {
            words: zeros(words),
            summary: zeros(words.div_ceil(64)),
        }
    }

    /// The free numbers of a word, as of now.
    pub fn word(&self, w: usize) -> u64 {
        self.words[w].load(Ordering::Acquire)
    }

    /// The first word from `w` on with free numbers.
    pub fn next_word(&self, w: usize) -> Option<usize> {
        let mut below = w % 64;
        for s in w / 64..self.summary.len() {
            let bits = self.summary[s].load(Ordering::Acquire) >> below << below;
            if bits != 0 {
                return Some(s * 64 + bits.trailing_zeros() as usize);
            }
            below = 0;
        }
        None
    }

    /// Takes the lowest free number.
    pub fn take(&self) -> Option<u64> {
        while let Some(w) = self.next_word(0) {
            let word = self.word(w);
            if word == 0 {
                self.found_empty(w, 1);
                continue;
            }
            let bit = word.trailing_zeros();
            let before = self.words[w].fetch_and(!(1 << bit), Ordering::AcqRel);
            if before >> bit & 1 == 1 {
                return Some(w as u64 * 64 + bit as u64);
            }
        }
        None
    }

    /// Takes all free numbers of `N` words from `first`, a multiple of `N`, on.
    pub fn take_words<const N: usize>(&self, first: usize) -> [u64; N] {
        let mut taken = [0; N];
        for (taken, word) in taken.iter_mut().zip(&self.words[first..]) {
            if word.load(Ordering::Relaxed) != 0 {
                *taken = word.swap(0, Ordering::AcqRel);
            }
        }
        self.found_empty(first, N);
        taken
    }

    /// Clears the summary of words that were empty, then looks again: a put that came between
    /// set the word first, and its summary bit perhaps before it was cleared.
    fn found_empty(&self, first: usize, words: usize) {
        let summary = &self.summary[first / 64];
        let bits = (first..first + words).fold(0, |bits, w| bits | 1 << (w % 64));
        summary.fetch_and(!bits, Ordering::AcqRel);
        for w in first..first + words {
            if self.word(w) != 0 {
                summary.fetch_or(1 << (w % 64), Ordering::AcqRel);
            }
        }
    }

    /// Puts a number back; returns its word as it was.
    pub fn put(&self, number: u64) -> u64 {
        self.put_word(number as usize / 64, 1 << (number % 64))
    }

    /// Puts back the numbers of a word that have a bit in `free`; returns the word as it was.
    pub fn put_word(&self, w: usize, free: u64) -> u64 {
        let before = self.words[w].fetch_or(free, Ordering::AcqRel);
        if before == 0 && free != 0 {
            self.summary[w / 64].fetch_or(1 << (w % 64), Ordering::AcqRel);
        }
        before
    }

    /// Takes this number if it is free.
    pub fn take_number(&self, number: u64) -> bool {
        let (w, bit) = (number as usize / 64, number % 64);
        let before = self.words[w].fetch_and(!(1 << bit), Ordering::AcqRel);
        before >> bit & 1 == 1
    }
}

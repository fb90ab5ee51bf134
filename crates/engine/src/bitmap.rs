//! A bitmap of free numbers with a summary level, allocated from without a lock. Checked by
//! `model/`.
//!
//! Invariants:
//! 1. A set bit means: the number is free and in nobody's hands.
//! 2. A word with a set bit has its summary bit set, except while the thread that changed the
//!    word is about to set it.
//! 3. One thread at a time takes; any may put back.

use base::atomic::{AtomicU32, AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Bitmap {
    words: Box<[AtomicU64]>,
    /// One bit for each word.
    summary: Box<[AtomicU64]>,
    /// Set bits; a hint while others take or put.
    free: AtomicU32,
}

impl Bitmap {
    /// A bitmap of 64 numbers a word; a set bit is free.
    pub fn new(words: Vec<u64>) -> Bitmap {
        let summary = words.chunks(64).map(|words| {
            let bits = words.iter().enumerate();
            bits.fold(0, |all, (i, word)| all | ((*word != 0) as u64) << i)
        });
        let free = words.iter().map(|w| w.count_ones()).sum();
        Bitmap {
            summary: summary.map(AtomicU64::new).collect(),
            words: words.into_iter().map(AtomicU64::new).collect(),
            free: AtomicU32::new(free),
        }
    }

    /// Numbers free now, roughly.
    pub fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }

    /// Takes a free number (invariant 3).
    pub fn take(&self) -> Option<u64> {
        for (s, summary) in self.summary.iter().enumerate() {
            loop {
                let bits = summary.load(Ordering::Acquire);
                if bits == 0 {
                    break;
                }
                let w = s * 64 + bits.trailing_zeros() as usize;
                let word = self.words[w].load(Ordering::Acquire);
                if word == 0 {
                    // Clear the summary bit, then look again: a put that came between set
                    // the word first and would set the summary bit after us.
                    summary.fetch_and(!(1 << (w % 64)), Ordering::AcqRel);
                    if self.words[w].load(Ordering::Acquire) != 0 {
                        summary.fetch_or(1 << (w % 64), Ordering::AcqRel);
                    }
                    continue;
                }
                let bit = word.trailing_zeros() as usize;
                self.words[w].fetch_and(!(1 << bit), Ordering::AcqRel);
                self.free.fetch_sub(1, Ordering::Relaxed);
                return Some((w * 64 + bit) as u64);
            }
        }
        None
    }

    /// Puts a number back; true when it was not free already.
    pub fn put(&self, number: u64) -> bool {
        let (w, bit) = (number as usize / 64, number % 64);
        let before = self.words[w].fetch_or(1 << bit, Ordering::AcqRel);
        if before >> bit & 1 == 1 {
            return false;
        }
        if before == 0 {
            self.summary[w / 64].fetch_or(1 << (w % 64), Ordering::AcqRel);
        }
        self.free.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Takes this number if it is free; while nobody else takes.
    pub fn mark_used(&self, number: u64) {
        let (w, bit) = (number as usize / 64, number % 64);
        let before = self.words[w].fetch_and(!(1 << bit), Ordering::AcqRel);
        if before >> bit & 1 == 1 {
            self.free.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

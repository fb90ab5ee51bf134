//! Who looks a node up, and whether cores are to hold it by themselves (`held.rs`).
//!
//! What a cell has of that is one word, read and changed under the lock of the cell's shard in the cache.

use super::CellHeader;
use base::atomic::Ordering;
use base::tight::limit;

/// Look-ups by another core than the one before after which each core holds a node by itself; of a node on the way to others also
/// those after another core's of any node in its shard: directories that were made one after the other lie in one shard, and in each
/// of them another core works.
pub(super) const COMMON: u32 = 16;
/// The latter count as long as no more look-ups of the shard come between them: nodes that are looked up
/// here and there are not held, of which a core would hold too many.
pub(super) const BETWEEN: u32 = 16;

/// Who looked a node up, as far as it decides whether cores hold it by themselves: all in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seekers {
    /// Look-ups by another core than the one before, up to [`COMMON`].
    of_others: u32,
    /// Look-ups, one soon after the other, each after another core's of something else.
    disturbed: u32,
    /// The core that looked it up last.
    core: u32,
    /// The number of the last look-up that was disturbed.
    number: u32,
}

impl Seekers {
    const COUNT: u32 = 5;
    const REST: u32 = 11;
    /// Cores and numbers are told apart up to here.
    const MASK: u32 = (1 << Self::REST) - 1;

    pub(super) fn alone(core: usize) -> Seekers {
        Seekers {
            of_others: 0,
            disturbed: 0,
            core: core as u32 & Self::MASK,
            number: 0,
        }
    }

    pub(super) fn pack(self) -> u32 {
        let counts = self.of_others << Self::COUNT | self.disturbed;
        (counts << Self::REST | self.core) << Self::REST | self.number
    }

    fn unpack(word: u32) -> Seekers {
        let (counts, count) = (word >> (2 * Self::REST), (1 << Self::COUNT) - 1);
        Seekers {
            of_others: counts >> Self::COUNT,
            disturbed: counts & count,
            core: word >> Self::REST & Self::MASK,
            number: word & Self::MASK,
        }
    }

    fn most() -> u32 {
        limit(COMMON as usize, 2) as u32
    }

    /// Cores are to hold it by themselves.
    fn are_common(self) -> bool {
        self.of_others >= Self::most() || self.disturbed >= Self::most()
    }

    fn seek(&mut self, seeking: Seeking, leads: bool) {
        let (core, number) = (
            seeking.core as u32 & Self::MASK,
            seeking.number & Self::MASK,
        );
        self.of_others += u32::from(self.core != core);
        self.core = core;
        if leads && seeking.disturbed {
            let between = number.wrapping_sub(self.number) & Self::MASK;
            self.disturbed = match between > BETWEEN + 1 {
                true => 1,
                false => self.disturbed + 1,
            };
            self.number = number;
        }
    }
}

/// A look-up in a shard.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seeking {
    pub(super) core: usize,
    /// Another core came before.
    pub(super) disturbed: bool,
    /// In the order of the shard's look-ups.
    pub(super) number: u32,
}

impl CellHeader {
    /// Counts a look-up; true if cores are to hold it by themselves.
    #[inline]
    pub(super) fn is_sought(&self, seeking: Seeking) -> bool {
        let word = self.seekers.load(Ordering::Relaxed);
        // One core alone, so far, and no other beside it.
        let alone = word >> Seekers::REST == seeking.core as u32 & Seekers::MASK;
        !(alone && !(self.leads && seeking.disturbed)) && self.is_sought_by_others(seeking)
    }

    #[inline(never)]
    fn is_sought_by_others(&self, seeking: Seeking) -> bool {
        let word = self.seekers.load(Ordering::Relaxed);
        let mut seekers = Seekers::unpack(word);
        if !seekers.are_common() {
            seekers.seek(seeking, self.leads);
            let now = seekers.pack();
            if now != word {
                self.seekers.store(now, Ordering::Relaxed);
            }
        }
        seekers.are_common()
    }

    /// Some core may hold it by itself.
    pub(super) fn is_common(&self) -> bool {
        Seekers::unpack(self.seekers.load(Ordering::Relaxed)).are_common()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seekers_are_one_word() {
        let all = |count| Seekers {
            of_others: count,
            disturbed: COMMON - count,
            core: 0x5A3,
            number: 0x7FE,
        };
        for seekers in [all(0), all(COMMON), all(7), Seekers::alone(usize::MAX)] {
            assert_eq!(Seekers::unpack(seekers.pack()), seekers);
        }
    }
}

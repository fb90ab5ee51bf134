//! Writes that are not durable, and what a power cut leaves of them.

use super::SECTOR;
use super::pages::{Pages, store};
use base::rng::Rng;
use std::ops::Range;
use std::sync::Arc;

/// What of the cached writes survives a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// For each write one of the others, at random.
    Mixed,
    None,
    All,
    /// Each sector by the toss of a coin.
    Subset,
    /// The first sectors of each write.
    Prefix,
}

impl Survival {
    pub const ALL: [Survival; 5] = [
        Survival::Mixed,
        Survival::None,
        Survival::All,
        Survival::Subset,
        Survival::Prefix,
    ];
}

/// What of one cached write survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    All,
    Nothing,
    /// This many sectors from its start.
    First(usize),
}

/// A completed write that is not durable.
#[derive(Clone, Debug)]
pub(super) struct Cached {
    pub offset: u64,
    pub bytes: Arc<[u8]>,
    /// Sectors that a later durable write replaced.
    pub replaced: Vec<bool>,
    /// A flush failed after it: no later flush makes it durable.
    pub doomed: bool,
    /// Flushes that were begun before it was complete, and do not make it durable.
    pub before: u64,
    /// The flush behind it, of a durable write.
    pub behind: Option<u64>,
    /// A sector of a write that failed: the device had all of that in hand, and nothing beside it.
    pub in_part: bool,
}

impl Cached {
    pub fn new(offset: u64, bytes: Arc<[u8]>) -> Cached {
        Cached {
            offset,
            replaced: vec![false; bytes.len() / SECTOR],
            bytes,
            doomed: false,
            before: 0,
            behind: None,
            in_part: false,
        }
    }

    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes.len() as u64
    }

    pub fn sectors(&self) -> usize {
        self.replaced.len()
    }

    /// True when the sector at byte `at` is one of this write's, and not replaced.
    pub fn holds(&self, at: u64) -> bool {
        at.checked_sub(self.offset)
            .and_then(|d| self.replaced.get(d as usize / SECTOR))
            .is_some_and(|replaced| !replaced)
    }

    /// Notes that something newer is durable wherever `newer` says so.
    pub fn replace(&mut self, newer: impl Fn(u64) -> bool) {
        for (i, replaced) in self.replaced.iter_mut().enumerate() {
            *replaced |= newer(self.offset + (i * SECTOR) as u64);
        }
    }

    /// Puts the sectors that `keep` chooses into `pages`, those replaced since excepted.
    pub fn apply(&self, pages: &mut Pages, keep: impl Fn(usize) -> bool) {
        let sectors = self.bytes.chunks(SECTOR).zip(&self.replaced);
        for (i, (sector, replaced)) in sectors.enumerate() {
            if keep(i) && !replaced {
                store(pages, self.offset + (i * SECTOR) as u64, sector);
            }
        }
    }

    /// Applies what survives of it, and damages what lies beside it in its first and last block of `physical` bytes if the
    /// power may have gone while these were written.
    pub fn survive(&self, survival: Survival, physical: u64, rng: &mut Rng, pages: &mut Pages) {
        let class = match survival {
            Survival::Mixed => *rng.pick(&[
                Survival::None,
                Survival::All,
                Survival::Subset,
                Survival::Prefix,
            ]),
            class => class,
        };
        match class {
            Survival::None | Survival::Mixed => {}
            Survival::All => self.apply(pages, |_| true),
            Survival::Subset => {
                let keep: Vec<bool> = (0..self.sectors()).map(|_| rng.one_in(2)).collect();
                self.apply(pages, |i| keep[i]);
                self.damage_beside(physical, rng, pages);
            }
            Survival::Prefix => {
                let kept = rng.below(self.sectors() as u64 + 1) as usize;
                self.apply(pages, |i| i < kept);
                self.damage_beside(physical, rng, pages);
            }
        }
    }

    /// Each sector by the toss of a coin.
    fn damage_beside(&self, physical: u64, rng: &mut Rng, pages: &mut Pages) {
        let range = self.range();
        if self.in_part {
            return;
        }
        let first = range.start / physical * physical..range.start;
        let last = range.end..range.end.next_multiple_of(physical);
        for at in first.chain(last).step_by(SECTOR) {
            if rng.one_in(2) {
                let mut damaged = [0; SECTOR];
                rng.fill(&mut damaged);
                store(pages, at, &damaged);
            }
        }
    }
}

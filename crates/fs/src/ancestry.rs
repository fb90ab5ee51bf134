//! What is above a directory, for who moves others.
//!
//! Invariants:
//! 1. Whoever goes up holds the rename lock: a directory that is there has all the directories above it, and they are the same, as long
//!    as it is held.
//! 2. A directory above is one that was found as the parent of the one below: its generation tells it from what got its number
//!    later. So who finds another, or nothing, has begun at one that is gone by then.
//! 3. A way up ends, however deep the tree is: what is above itself is damage.

use crate::Error;
use crate::api::{Ino, ROOT};
use crate::filesystem::FileSystem;
use crate::namespace::{Looks, live_dir};
use format::Damage;

/// Tells whether a way comes back to where it was, in steps proportional to its length, by Brent's algorithm
/// (BIT 20, 1980): what it meets is compared with one met before, which is exchanged after twice as many steps each time.
#[derive(Debug)]
pub(crate) struct Cycle<T> {
    mark: Option<T>,
    steps: u64,
    most: u64,
}

impl<T: PartialEq> Cycle<T> {
    pub fn new() -> Cycle<T> {
        Cycle {
            mark: None,
            steps: 0,
            most: 1,
        }
    }

    /// One more step leads here. True: it has been here before.
    pub fn closes_at(&mut self, here: T) -> bool {
        if self.mark.as_ref() == Some(&here) {
            return true;
        }
        self.steps += 1;
        if self.steps >= self.most {
            self.mark = Some(here);
            (self.steps, self.most) = (0, self.most.saturating_mul(2));
        }
        false
    }
}

pub(crate) fn is_cycle() -> Damage {
    Damage::new("directory", "its parents form a cycle")
}

impl FileSystem {
    /// Whether a directory is `lower` or above it. The rename lock, which the caller holds, keeps the answer true.
    ///
    /// # Errors
    /// [`Error::NotFound`] when `lower` is removed meanwhile.
    pub(crate) fn is_above(&self, upper: Ino, lower: Ino) -> Result<bool, Error> {
        let mut looks = Looks::default();
        loop {
            let generation = live_dir(self.inode(lower)?.inode()?)?.generation;
            if let Some(above) = self.climb(upper, (lower, generation))? {
                return Ok(above);
            }
            // It is there still, or its number is another directory's by now.
            if looks.are_over(generation) {
                let what = "something above it is not there";
                return Err(Damage::new("directory", what).into());
            }
        }
    }

    /// The same for one of this generation. `None`: a directory on the way is gone (invariant 2).
    fn climb(&self, upper: Ino, lower: (Ino, u64)) -> Result<Option<bool>, Error> {
        let (mut at, mut cycle) = (lower, Cycle::new());
        loop {
            if at.0 == upper {
                return Ok(Some(true));
            }
            if at.0 == ROOT {
                return Ok(Some(false));
            }
            if cycle.closes_at(at) {
                return Err(is_cycle().into());
            }
            let node = match self.inode(at.0) {
                Err(Error::Stale(_)) => return Ok(None),
                node => node?,
            };
            if node.inode()?.generation != at.1 {
                return Ok(None);
            }
            at = match self.look_above(node, |up, dir| (up, dir.generation)) {
                Err(Error::Stale(_)) => return Ok(None),
                above => above?,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps until a way is told to come back, which goes from 0 to `tail + len - 1` and on at `tail`.
    fn steps(tail: u64, len: u64) -> u64 {
        let (mut cycle, mut at) = (Cycle::new(), 0);
        for step in 1.. {
            if cycle.closes_at(at) {
                return step;
            }
            at = if at + 1 == tail + len { tail } else { at + 1 };
        }
        unreachable!("there is no end of numbers")
    }

    #[test]
    fn a_cycle_is_told_in_steps_as_many_as_it_and_the_way_to_it_have() {
        for tail in 0..100 {
            for len in 1..100 {
                let steps = steps(tail, len);
                assert!(steps > tail.max(len), "{tail}, {len}: {steps}");
                assert!(steps <= 3 * (tail + len) + 2, "{tail}, {len}: {steps}");
            }
        }
    }

    #[test]
    fn a_deep_tree_is_no_cycle() {
        let mut cycle = Cycle::new();
        assert!((0..5_000_000u64).all(|at| !cycle.closes_at(at)));
    }
}

//! The kernel's references of inodes, which may be millions at a time: the kernel gives an inode
//! back only when it needs the memory itself.
//!
//! Nids that are given out one after the other lie side by side here, one byte each, so that
//! the references of all inodes of a large tree take about two bytes per inode. Invariants:
//!
//! 1. `groups` has a group exactly when one of its counts is not zero.
//! 2. A count of [`MANY`] means that the true one is in `large`, and only then is it there.

use crate::Ino;
use base::map::HashMap;

/// Neighbouring nids that share a group.
pub(super) const GROUP: u64 = 64;
/// The count is too large for its byte.
const MANY: u8 = u8::MAX;

#[derive(Debug, Default)]
pub(super) struct References {
    groups: HashMap<u64, Box<[u8; GROUP as usize]>>,
    large: HashMap<u64, u32>,
}

impl References {
    pub fn contains(&self, ino: Ino) -> bool {
        let group = self.groups.get(&(ino.0 / GROUP));
        group.is_some_and(|counts| counts[(ino.0 % GROUP) as usize] != 0)
    }

    /// One more. A count that reaches the top of `u32` stays there.
    pub fn add(&mut self, ino: Ino) {
        let group = self.groups.entry(ino.0 / GROUP);
        let count =
            &mut group.or_insert_with(|| Box::new([0; GROUP as usize]))[(ino.0 % GROUP) as usize];
        match *count {
            MANY => {
                let large = self.large.entry(ino.0).or_insert(MANY as u32);
                *large = large.saturating_add(1);
            }
            few => {
                *count = few + 1;
                if *count == MANY {
                    self.large.insert(ino.0, MANY as u32);
                }
            }
        }
    }

    /// `fewer` less, none at the least; true when there was one and now there is none.
    pub fn sub(&mut self, ino: Ino, fewer: u64) -> bool {
        let Some(group) = self.groups.get_mut(&(ino.0 / GROUP)) else {
            return false;
        };
        let count = &mut group[(ino.0 % GROUP) as usize];
        let before = match *count {
            0 => return false,
            MANY => self.large.get(&ino.0).copied().unwrap_or(u32::MAX),
            few => few as u32,
        };
        if before == u32::MAX {
            return false;
        }
        let left = before.saturating_sub(fewer.min(u32::MAX as u64) as u32);
        if left >= MANY as u32 {
            self.large.insert(ino.0, left);
            return false;
        }
        if *count == MANY {
            self.large.remove(&ino.0);
        }
        *count = left as u8;
        if left > 0 {
            return false;
        }
        if group.iter().all(|count| *count == 0) {
            self.groups.remove(&(ino.0 / GROUP));
            if self.groups.capacity() > 4 * self.groups.len() + 1024 {
                self.groups.shrink_to_fit();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;
    use format::Nid;

    #[test]
    fn counts_are_those_of_a_plain_map() {
        let mut rng = Rng::new(11);
        let (mut references, mut plain) = (References::default(), HashMap::default());
        for _ in 0..200_000 {
            let ino = Nid(rng.below(3) * 1000 + rng.below(40));
            let held: &mut u64 = plain.entry(ino).or_default();
            if rng.below(100) < 55 {
                references.add(ino);
                *held += 1;
            } else {
                let bound = if rng.one_in(50) { 2000 } else { 3 };
                let fewer = 1 + rng.below(bound);
                let last = *held > 0 && *held <= fewer;
                *held = held.saturating_sub(fewer);
                assert_eq!(references.sub(ino, fewer), last);
            }
            assert_eq!(references.contains(ino), *held > 0);
        }
        for (ino, held) in plain.into_iter().filter(|(_, held)| *held > 0) {
            assert!(references.sub(ino, held));
        }
        assert!(references.groups.is_empty() && references.large.is_empty());
    }

    #[test]
    fn references_of_neighbours_take_two_bytes_each() {
        let mut references = References::default();
        for ino in 0..100_000 {
            references.add(Nid(ino));
        }
        // A group with its entry and the allocator's share, at the map's lowest load.
        let bytes =
            references.groups.len() * (GROUP as usize + 16) + references.groups.capacity() * 20;
        assert!(bytes < 250_000, "{bytes} bytes");
    }

    #[test]
    fn a_full_count_stays() {
        let mut references = References::default();
        let ino = Nid(7);
        for _ in 0..300 {
            references.add(ino);
        }
        references.large.insert(7, u32::MAX - 1);
        references.add(ino);
        references.add(ino);
        assert!(!references.sub(ino, u64::MAX));
        assert!(references.contains(ino));
    }
}

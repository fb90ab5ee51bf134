//! A table of groups of cells, by their numbers.
//!
//! A group is a line of memory, and the numbers lie apart from the groups, eight on a line. So who looks for a group reads two lines,
//! and which these are, mostly, is known from the number alone: they can be asked for ahead ([`Groups::ask`]), by who has something
//! else to do until they are there.
//!
//! Invariants:
//! 1. A group lies at its number's home, or behind it without a free place between the two; behind the last place is the first.
//! 2. At least a third of the places is free. There is none before the first group comes.
//! 3. A place that is free has an empty group.

use base::prefetch;

/// Elements that are neighbours.
pub(super) const NEIGHBOURS: usize = 8;

/// On a line of its own.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Group<T>(pub [Option<T>; NEIGHBOURS]);

impl<T> Default for Group<T> {
    fn default() -> Self {
        Group(Default::default())
    }
}

impl<T> Group<T> {
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }
}

/// The number of a free place.
const FREE: u64 = u64::MAX;
/// Places that the table begins with.
const FIRST: usize = 4;

#[derive(Debug)]
pub(super) struct Groups<T> {
    /// A power of two of them, or none.
    numbers: Vec<u64>,
    groups: Vec<Group<T>>,
    taken: usize,
}

impl<T> Default for Groups<T> {
    fn default() -> Self {
        Groups {
            numbers: Vec::new(),
            groups: Vec::new(),
            taken: 0,
        }
    }
}

/// Memory of a group, at the table's usual load.
pub(super) const fn bytes_of_one<T>() -> usize {
    (size_of::<u64>() + size_of::<Group<T>>()) * 2
}

impl<T> Groups<T> {
    /// Where a group is at best; numbers in a row, or of equal distance, lie far apart (Fibonacci hashing). There are places.
    #[inline]
    fn home(&self, number: u64) -> usize {
        let bits = self.numbers.len().trailing_zeros();
        (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - bits)) as usize
    }

    /// The place that has the number; else the free one where it would be. `None`: there are no places.
    #[inline]
    fn place(&self, number: u64) -> Option<Result<usize, usize>> {
        let last = self.numbers.len().checked_sub(1)?;
        let mut at = self.home(number);
        loop {
            match self.numbers[at & last] {
                found if found == number => return Some(Ok(at & last)),
                FREE => return Some(Err(at & last)),
                _ => at += 1,
            }
        }
    }

    #[inline]
    pub fn get(&self, number: u64) -> Option<&Group<T>> {
        Some(&self.groups[self.place(number)?.ok()?])
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut Group<T>> {
        let at = self.place(number)?.ok()?;
        Some(&mut self.groups[at])
    }

    /// The group with this number, which is empty if it is new, and whether it is.
    pub fn get_or_insert(&mut self, number: u64) -> (&mut Group<T>, bool) {
        if let Some(Ok(at)) = self.place(number) {
            return (&mut self.groups[at], false);
        }
        if (self.taken + 1) * 3 > self.numbers.len() * 2 {
            self.grow();
        }
        let (Some(Err(at)) | Some(Ok(at))) = self.place(number) else {
            unreachable!("it has grown, if it had no places")
        };
        self.numbers[at] = number;
        self.taken += 1;
        (&mut self.groups[at], true)
    }

    #[cold]
    fn grow(&mut self) {
        let places = (self.numbers.len() * 2).max(FIRST);
        let numbers = std::mem::replace(&mut self.numbers, vec![FREE; places]);
        let empty = || std::iter::repeat_with(Group::default);
        let groups = std::mem::replace(&mut self.groups, empty().take(places).collect());
        for (number, group) in numbers.into_iter().zip(groups) {
            if number != FREE
                && let Some(Err(at)) = self.place(number)
            {
                self.numbers[at] = number;
                self.groups[at] = group;
            }
        }
    }

    /// Takes a group out; those behind it move up, as far as that brings them nearer to their homes (invariant 1).
    pub fn remove(&mut self, number: u64) {
        let Some(Ok(mut hole)) = self.place(number) else {
            return;
        };
        self.groups[hole] = Group::default();
        self.taken -= 1;
        let last = self.numbers.len() - 1;
        let way = |from: usize, to: usize| to.wrapping_sub(from) & last;
        let mut at = hole;
        loop {
            at = (at + 1) & last;
            let next = self.numbers[at];
            if next == FREE {
                break;
            }
            if way(self.home(next), at) >= way(hole, at) {
                self.numbers[hole] = next;
                self.groups.swap(hole, at);
                hole = at;
            }
        }
        self.numbers[hole] = FREE;
    }

    /// Asks for the memory where a group with this number is, mostly, or would be.
    #[inline]
    pub fn ask(&self, number: u64) {
        if !self.numbers.is_empty() {
            let home = self.home(number);
            prefetch::object(&self.numbers[home]);
            prefetch::object(&self.groups[home]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;
    use std::collections::BTreeMap;

    #[test]
    fn a_group_is_a_line() {
        assert_eq!(size_of::<Group<std::sync::Arc<()>>>(), 64);
    }

    /// All invariants, and that every group is found.
    fn check(table: &Groups<u64>, model: &BTreeMap<u64, u64>) {
        assert_eq!(table.taken, model.len());
        assert!(table.taken * 3 <= table.numbers.len() * 2);
        let last = table.numbers.len().wrapping_sub(1);
        for (at, number) in table.numbers.iter().enumerate() {
            if *number == FREE {
                assert!(table.groups[at].is_empty());
                continue;
            }
            let mut between = table.home(*number);
            while between != at {
                assert_ne!(table.numbers[between], FREE);
                between = (between + 1) & last;
            }
        }
        for (number, value) in model {
            assert_eq!(table.get(*number).unwrap().0[3], Some(*value));
        }
    }

    #[test]
    fn groups_are_found_until_they_are_removed() {
        for seed in 0..20 {
            let mut rng = Rng::new(seed);
            let mut table = Groups::default();
            let mut model = BTreeMap::new();
            let numbers = 1 + rng.below(300);
            // As the numbers of a shard are, and any.
            let step = [1, 64, 128, 2048, 0x5851_F42D_4C95_7F2D][seed as usize % 5];
            for i in 0..4000 {
                let number = rng.below(numbers).wrapping_mul(step) & (FREE >> 3);
                table.ask(number);
                assert_eq!(table.get(number).is_some(), model.contains_key(&number));
                // It grows first, and then shrinks.
                if rng.below(4000) > i {
                    let new = model.insert(number, i).is_none();
                    let (group, was_new) = table.get_or_insert(number);
                    assert!(new == was_new && group.is_empty() == new);
                    group.0[3] = Some(i);
                } else {
                    model.remove(&number);
                    table.remove(number);
                    assert!(table.get_mut(number).is_none());
                }
                if i % 50 == 0 {
                    check(&table, &model);
                }
            }
            check(&table, &model);
        }
    }

    #[test]
    fn homes_of_numbers_in_a_row_are_apart() {
        for step in [1_u64, 64, 128, 2048, 16384] {
            let mut table: Groups<u64> = Groups::default();
            for i in 0..1000 {
                table.get_or_insert(i * step).0.0[0] = Some(i);
            }
            let at_home = (0..1000).filter(|i| {
                let home = table.home(i * step);
                table.numbers[home] == i * step
            });
            assert!(at_home.count() > 600, "step {step}");
        }
    }
}

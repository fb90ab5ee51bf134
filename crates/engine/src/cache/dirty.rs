//! The dirty pages of one file.
//!
//! Most files that have any have one: their pages are kept in place, without an allocation. A file
//! that has once had more keeps a tree until it has none: of words with a bit for each page, as pages are dirty in runs.

use std::collections::BTreeMap;
use std::ops::Range;

/// Pages that are kept in place.
const FEW: usize = 4;
/// Pages of a word.
const WORD: u64 = u64::BITS as u64;

/// A set of pages.
#[derive(Debug)]
pub(super) enum PageSet {
    /// The first `count`, ascending.
    Few {
        pages: [u64; FEW],
        count: u8,
    },
    Many(Bits),
}

/// Bits of pages; no word is 0.
#[derive(Debug, Default)]
pub(super) struct Bits {
    words: BTreeMap<u64, u64>,
    count: usize,
}

impl Bits {
    fn insert(&mut self, page: u64) -> bool {
        let (word, bit) = (
            self.words.entry(page / WORD).or_default(),
            1 << (page % WORD),
        );
        let fresh = *word & bit == 0;
        *word |= bit;
        self.count += usize::from(fresh);
        fresh
    }

    fn remove(&mut self, page: u64) -> bool {
        let (at, bit) = (page / WORD, 1 << (page % WORD));
        let Some(word) = self.words.get_mut(&at).filter(|word| **word & bit != 0) else {
            return false;
        };
        *word &= !bit;
        if *word == 0 {
            self.words.remove(&at);
        }
        self.count -= 1;
        true
    }

    fn append(&self, range: Range<u64>, mut most: usize, out: &mut Vec<u64>) {
        if range.is_empty() {
            return;
        }
        let words = range.start / WORD..=(range.end - 1) / WORD;
        for (at, word) in self.words.range(words) {
            let first = at * WORD;
            let mut left = *word & u64::MAX << range.start.saturating_sub(first);
            let beyond = (first + WORD).saturating_sub(range.end);
            left &= u64::MAX >> beyond;
            while left != 0 {
                if most == 0 {
                    return;
                }
                out.push(first + u64::from(left.trailing_zeros()));
                left &= left - 1;
                most -= 1;
            }
        }
    }
}

impl PageSet {
    pub fn new() -> PageSet {
        PageSet::Few {
            pages: [0; FEW],
            count: 0,
        }
    }

    pub fn len(&self) -> usize {
        match self {
            PageSet::Few { count, .. } => *count as usize,
            PageSet::Many(pages) => pages.count,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// False when it was there.
    pub fn insert(&mut self, page: u64) -> bool {
        let PageSet::Few { pages, count } = self else {
            let PageSet::Many(pages) = self else {
                return false;
            };
            return pages.insert(page);
        };
        let len = *count as usize;
        let at = pages[..len].partition_point(|&p| p < page);
        if pages[..len].get(at) == Some(&page) {
            return false;
        }
        if len < FEW {
            pages.copy_within(at..len, at + 1);
            pages[at] = page;
            *count += 1;
            return true;
        }
        let mut many = Bits::default();
        for page in pages.iter().copied().chain([page]) {
            many.insert(page);
        }
        *self = PageSet::Many(many);
        true
    }

    /// False when it was not there.
    pub fn remove(&mut self, page: u64) -> bool {
        match self {
            PageSet::Few { pages, count } => {
                let len = *count as usize;
                let Some(at) = pages[..len].iter().position(|&p| p == page) else {
                    return false;
                };
                pages.copy_within(at + 1..len, at);
                *count -= 1;
                true
            }
            PageSet::Many(pages) => pages.remove(page),
        }
    }

    /// Appends up to `most` of the pages in `range`, ascending.
    pub fn append(&self, range: Range<u64>, most: usize, out: &mut Vec<u64>) {
        match self {
            PageSet::Few { pages, count } => {
                let inside = pages[..*count as usize]
                    .iter()
                    .filter(|p| range.contains(p));
                out.extend(inside.take(most));
            }
            PageSet::Many(pages) => pages.append(range, most, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;
    use std::collections::BTreeSet;

    #[test]
    fn it_is_the_set_that_it_stands_for() {
        let mut rng = Rng::new(11);
        for (most, apart) in [
            (1, 7),
            (FEW as u64, 7),
            (2 * FEW as u64, 7),
            (40, 7),
            (300, 1),
        ] {
            let (mut set, mut model) = (PageSet::new(), BTreeSet::new());
            for step in 0..4000 {
                let page = rng.below(most) * apart;
                match rng.one_in(2) {
                    true => assert_eq!(set.insert(page), model.insert(page), "step {step}"),
                    false => assert_eq!(set.remove(page), model.remove(&page), "step {step}"),
                }
                assert_eq!((set.len(), set.is_empty()), (model.len(), model.is_empty()));
                let from = rng.below(most * apart);
                let range = from..from + rng.below(most * apart);
                let mut found = vec![99];
                set.append(range.clone(), 3, &mut found);
                let expected: Vec<u64> = model.range(range).take(3).copied().collect();
                assert_eq!(found[1..], expected);
            }
        }
    }
}

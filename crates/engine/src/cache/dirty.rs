//! The dirty pages of one file.
//!
//! Most files that have any have one: their pages are kept in place, without an allocation. A file
//! that has once had more keeps a tree until it has none.

use std::collections::BTreeSet;
use std::ops::Range;

/// Pages that are kept in place.
const FEW: usize = 4;

/// A set of pages.
#[derive(Debug)]
pub(super) enum PageSet {
    /// The first `count`, ascending.
    Few {
        pages: [u64; FEW],
        count: u8,
    },
    Many(BTreeSet<u64>),
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
            PageSet::Many(pages) => pages.len(),
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
        let mut many = BTreeSet::from(*pages);
        many.insert(page);
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
            PageSet::Many(pages) => pages.remove(&page),
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
            PageSet::Many(pages) => out.extend(pages.range(range).take(most)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;

    #[test]
    fn it_is_the_set_that_it_stands_for() {
        let mut rng = Rng::new(11);
        for most in [1, FEW as u64, 2 * FEW as u64, 40] {
            let (mut set, mut model) = (PageSet::new(), BTreeSet::new());
            for step in 0..4000 {
                let page = rng.below(most) * 7;
                match rng.one_in(2) {
                    true => assert_eq!(set.insert(page), model.insert(page), "step {step}"),
                    false => assert_eq!(set.remove(page), model.remove(&page), "step {step}"),
                }
                assert_eq!((set.len(), set.is_empty()), (model.len(), model.is_empty()));
                let from = rng.below(most * 7);
                let range = from..from + rng.below(most * 7);
                let mut found = vec![99];
                set.append(range.clone(), 3, &mut found);
                let expected: Vec<u64> = model.range(range).take(3).copied().collect();
                assert_eq!(found[1..], expected);
            }
        }
    }
}

//! Which set a page is in.
//!
//! As many pages of a file as there are sets, one after the other, have one set each, from a set on that follows from which file and
//! which such run it is. So a file that nearly fills the cache fills all sets evenly.
//!
//! But for its first page. Those of files with neighbouring nids lie in sets that follow each other, in the order of the nids: who goes through
//! small files as they were made, as write-back does, or makes them, finds sets side by side in memory, and, of fewer of them, what the index
//! of dirty pages has.

use super::set::Set;
use super::tags::Name;
use super::{COUNTED, DIRTY_SHARDS, DirtyShard, FileKey, PageCache};
use base::canary::{Canary, planted};

/// Files that are neighbours.
const NEIGHBOURS: u64 = 16;

/// Where a page is, if it is cached: its set, and its print there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub set: &'a Set,
    pub print: u16,
    pub page: Name,
}

/// How pages are spread over so many sets.
#[derive(Debug)]
pub(super) struct Spread {
    sets: u64,
    /// 2^64 by the number of sets, rounded down.
    inverse: u64,
}

impl Spread {
    pub fn over(sets: usize) -> Spread {
        let sets = sets as u64;
        Spread {
            sets,
            inverse: u64::MAX / sets,
        }
    }

    /// The set of a page, and its print.
    #[inline]
    fn place(&self, key: FileKey, page: u64) -> (usize, u16) {
        let sets = self.sets;
        let (hash, rest, print) = match page {
            0 => {
                let (_, rest) = divide(key.nid.0 % NEIGHBOURS, sets, self.inverse);
                (mix(key.nid.0 / NEIGHBOURS), rest, mix(number(key)))
            }
            _ => {
                let (run, rest) = divide(page, sets, self.inverse);
                // Numbers of files and runs are small, so no two of them make the same sum.
                let run = run.wrapping_mul(0xD6E8_FEB8_6659_FD93);
                let hash = mix(number(key).wrapping_add(run));
                (hash, rest, hash)
            }
        };
        let set = high(hash, sets) + rest;
        let set = if set < sets { set } else { set - sets };
        // Of bits that have little to do with the choice of the set.
        (set as usize, (print as u16).max(1))
    }
}

impl PageCache {
    #[inline]
    pub(super) fn place(&self, key: FileKey, page: u64) -> Place<'_> {
        let (set, print) = self.spread.place(key, page);
        Place {
            set: &self.sets[set],
            print,
            page: key.page(page),
        }
    }

    /// Where the index has a file, if it has dirty pages.
    pub(super) fn shard(&self, key: FileKey) -> &DirtyShard {
        &self.index[mix(key.nid.0 / COUNTED as u64) as usize % DIRTY_SHARDS]
    }
}

/// Generations count (R11).
fn number(key: FileKey) -> u64 {
    match planted(Canary::GenerationIgnored) {
        true => key.nid.0,
        false => key.nid.0 ^ key.generation.rotate_left(32),
    }
}

pub(super) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The high half of a product.
fn high(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

/// `number / by` and what is left, without a division; `inverse` is `u64::MAX / by`.
#[inline]
fn divide(number: u64, by: u64, inverse: u64) -> (u64, u64) {
    // The inverse is more than 2^64 / by - 1: so the quotient is right, or one too small.
    let mut quotient = high(number, inverse);
    let mut rest = number - quotient * by;
    if rest >= by {
        quotient += 1;
        rest -= by;
    }
    (quotient, rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;
    use format::Nid;

    fn file(nid: u64) -> FileKey {
        FileKey {
            nid: Nid(nid),
            generation: 3,
        }
    }

    /// How many pages each set has.
    fn filled(sets: usize, pages: impl Iterator<Item = (FileKey, u64)>) -> Vec<usize> {
        let (spread, mut filled) = (Spread::over(sets), vec![0; sets]);
        pages.for_each(|(key, page)| filled[spread.place(key, page).0] += 1);
        filled
    }

    #[test]
    fn a_large_file_fills_all_sets_evenly() {
        for sets in [1, 3, 64, 1000, 4096] {
            for runs in [1, 5, 16] {
                let pages = (1..=sets as u64 * runs).map(|page| (file(77), page));
                let filled = filled(sets, pages);
                // But for the run that its first page is none of.
                let most = filled.iter().max().copied();
                assert!(most <= Some(runs as usize + 1), "{sets} sets, {most:?}");
                assert!(filled.iter().all(|&pages| pages + 1 >= runs as usize));
            }
        }
    }

    #[test]
    fn first_pages_of_neighbours_lie_side_by_side() {
        let spread = Spread::over(1000);
        for group in 0..500 {
            let set = |i| spread.place(file(group * NEIGHBOURS + i), 0).0;
            assert!((1..NEIGHBOURS).all(|i| set(i) == (set(0) + i as usize) % 1000));
        }
        let print = |nid| spread.place(file(nid), 0).1;
        let prints: base::map::HashSet<u16> = (0..1000).map(print).collect();
        assert!(prints.len() > 950, "{}", prints.len());
    }

    /// No worse than at random, whichever nids they have: of as many pages as two thirds of the frames few find their set full.
    #[test]
    fn small_files_fill_sets_as_random_numbers_would() {
        const SETS: usize = 4096;
        let (mut rng, files) = (Rng::new(9), SETS as u64 * 10);
        let beyond =
            |filled: Vec<usize>| filled.iter().map(|n| n.saturating_sub(16)).sum::<usize>();
        let mut random = vec![0; SETS];
        (0..files).for_each(|_| random[rng.below(SETS as u64) as usize] += 1);
        let random = beyond(random);
        for step in [1, 2, 3, 16, 17, 64, 1000, 1 << 20] {
            for pages in [1, 2, 5] {
                let all =
                    (0..files / pages).flat_map(|i| (0..pages).map(move |p| (file(i * step), p)));
                let beyond = beyond(filled(SETS, all));
                assert!(
                    beyond <= 2 * random,
                    "step {step}, {pages} pages: {beyond}, {random}"
                );
            }
        }
    }

    #[test]
    fn a_quotient_is_what_a_division_makes_it() {
        let mut rng = Rng::new(3);
        let some = [1, 2, 3, 7, 63, 64, 65, 1000, 16_384, 16_381];
        for by in some.into_iter().chain([u64::from(u32::MAX)]) {
            let edges = [0, 1, by - 1, by, by + 1, 5 * by - 1, 1 << 51];
            let any = (0..1000).map(|i| rng.next_u64() >> (i % 64));
            let large = [u64::MAX / by * by, u64::MAX];
            for number in edges.into_iter().chain(any).chain(large) {
                let inverse = u64::MAX / by;
                assert_eq!(divide(number, by, inverse), (number / by, number % by));
            }
        }
    }
}

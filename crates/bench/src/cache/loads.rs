//! What a cache is asked, in a number of reads that follows from its size and an order that follows from a seed.
//!
//! Each load has a cache of its own. There are ten times as many pages as it holds, but where a load says otherwise. The first
//! reads are not counted: eight times as many as there are frames.

use base::rng::Rng;

use super::policies::Cache;

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// Page i is asked for in proportion to 1/i^0.99; which is which is drawn.
    Zipf,
    /// The same with 1/i^0.8.
    FlatZipf,
    /// As Zipf, and beside it ten times as many pages as the cache holds are read once, in turn.
    Scan,
    /// The reads that follow when all favourites of Zipf have become others.
    Shift,
    /// Nine tenths of the pages that the cache holds, in turn, over and over, after Zipf.
    Loop,
    /// A fifth more than it holds.
    LongLoop,
    /// Any of the last so many pages, eight tenths of what the cache holds; each fourth read they move on by one.
    Window,
}

pub(super) const ALL: [Load; 7] = [
    Load::Zipf,
    Load::FlatZipf,
    Load::Scan,
    Load::Shift,
    Load::Loop,
    Load::LongLoop,
    Load::Window,
];

/// Reads that are counted, and reads before, in caches.
const COUNTED: u64 = 8;
const BEFORE: u64 = 8;
/// Pages in caches.
const DATA: u64 = 10;
/// Where pages begin that no Zipf asks for.
const ELSEWHERE: u64 = 1 << 40;

impl Load {
    pub fn name(self) -> &'static str {
        match self {
            Load::Zipf => "zipf 0.99",
            Load::FlatZipf => "zipf 0.8",
            Load::Scan => "zipf 0.99 beside a scan",
            Load::Shift => "zipf 0.99 after a shift",
            Load::Loop => "loop of 0.9",
            Load::LongLoop => "loop of 1.2",
            Load::Window => "window of 0.8",
        }
    }

    /// Reads of each hundred that find their page, in a cache that holds so many.
    pub fn hits(self, cache: &mut dyn Cache, pages: u64, seed: u64) -> f64 {
        let mut rng = Rng::new(seed);
        let (before, counted) = (BEFORE * pages, COUNTED * pages);
        let power = if self == Load::FlatZipf { 0.8 } else { 0.99 };
        let zipf = Zipf::new(DATA * pages, power, seed);
        let mut zipf_reads = |cache: &mut dyn Cache, reads: u64, zipf: &Zipf, scan: Option<u64>| {
            let (mut found, mut scanned) = (0, 0);
            for i in 0..reads {
                found += u64::from(cache.get(zipf.page(&mut rng)));
                // As evenly as that goes.
                while scan.is_some_and(|pages| scanned * reads < i * pages) {
                    cache.get(ELSEWHERE + scanned);
                    scanned += 1;
                }
            }
            share(found, reads)
        };
        zipf_reads(cache, before, &zipf, None);
        match self {
            Load::Zipf | Load::FlatZipf => zipf_reads(cache, counted, &zipf, None),
            Load::Scan => zipf_reads(cache, counted, &zipf, Some(DATA * pages)),
            Load::Shift => {
                let other = Zipf::new(DATA * pages, power, seed + (1 << 32));
                zipf_reads(cache, counted, &other, None)
            }
            Load::Loop => in_turn(cache, pages * 9 / 10, before, counted),
            Load::LongLoop => in_turn(cache, pages * 12 / 10, before, counted),
            Load::Window => {
                let window = pages * 8 / 10;
                let mut found = 0;
                for i in 0..before + counted {
                    let page = ELSEWHERE + i / 4 + rng.below(window);
                    found += u64::from(cache.get(page) && i >= before);
                }
                share(found, counted)
            }
        }
    }
}

fn in_turn(cache: &mut dyn Cache, pages: u64, before: u64, counted: u64) -> f64 {
    let mut found = 0;
    for i in 0..before + counted {
        found += u64::from(cache.get(ELSEWHERE + i % pages) && i >= before);
    }
    share(found, counted)
}

fn share(found: u64, reads: u64) -> f64 {
    found as f64 / reads as f64 * 100.0
}

/// Pages by how often they are asked for.
struct Zipf {
    /// Of the weights up to each rank.
    sums: Vec<f64>,
    /// The page of each rank.
    pages: Vec<u64>,
}

impl Zipf {
    fn new(count: u64, power: f64, seed: u64) -> Zipf {
        let mut sum = 0.0;
        let sums = (1..=count).map(|rank| {
            sum += (rank as f64).powf(-power);
            sum
        });
        let sums = sums.collect();
        let mut pages: Vec<u64> = (0..count).collect();
        let mut rng = Rng::new(seed);
        for last in (1..pages.len()).rev() {
            pages.swap(last, rng.below(last as u64 + 1) as usize);
        }
        Zipf { sums, pages }
    }

    fn page(&self, rng: &mut Rng) -> u64 {
        let all = self.sums.last().copied().unwrap_or(0.0);
        // 53 bits, as a float has.
        let at = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * all;
        let rank = self.sums.partition_point(|&sum| sum < at);
        self.pages[rank.min(self.pages.len() - 1)]
    }
}

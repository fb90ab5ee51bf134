//! What stays, and what leaves: how many of a load's reads find their page.

use super::super::place::mix;
use super::*;

/// What is asked for in turn, by a seed, of so many pages.
enum Asks {
    /// Page i is asked for in proportion to 1/i^0.99.
    Zipf(Vec<f64>),
    InTurn(u64),
}

impl Asks {
    fn zipf(pages: u64) -> Asks {
        let mut sum = 0.0;
        let mut add = |i: u64| {
            sum += (i as f64).powf(-0.99);
            sum
        };
        Asks::Zipf((1..=pages).map(&mut add).collect())
    }

    fn page(&self, i: u64, rng: &mut Rng) -> u64 {
        match self {
            Asks::InTurn(pages) => i % pages,
            Asks::Zipf(sums) => {
                let all = sums[sums.len() - 1];
                let at = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * all;
                let rank = sums.partition_point(|&sum| sum < at) as u64;
                // Pages that are asked for as often are not neighbours.
                mix(rank) % (1 << 40)
            }
        }
    }
}

/// Pages of each hundred reads that are cached. What is not is read and kept.
fn hits(
    cache: &PageCache,
    asks: &Asks,
    reads: u64,
    rng: &mut Rng,
    mut also: impl FnMut(u64),
) -> f64 {
    let (mut found, content) = (0, page(0));
    for i in 0..reads {
        let n = asks.page(i, rng);
        match cache.read(FILE, n, 0, &mut [0]) {
            true => found += 1,
            false => assert!(insert(cache, n, &content)),
        }
        also(i);
    }
    found as f64 / reads as f64 * 100.0
}

/// The same of a cache of so many pages whose oldest use decides what leaves, exactly.
fn exact_lru_hits(capacity: usize, asks: &Asks, warm: u64, reads: u64, rng: &mut Rng) -> f64 {
    let mut uses: HashMap<u64, u64> = HashMap::default();
    let mut by_use = std::collections::BTreeMap::new();
    let mut found = 0;
    for i in 0..warm + reads {
        let n = asks.page(i, rng);
        match uses.insert(n, i) {
            Some(last) => {
                by_use.remove(&last);
                found += u64::from(i >= warm);
            }
            None if uses.len() > capacity => {
                let (_, oldest) = by_use.pop_first().unwrap();
                uses.remove(&oldest);
            }
            None => {}
        }
        by_use.insert(i, n);
    }
    found as f64 / reads as f64 * 100.0
}

#[test]
fn what_is_used_often_stays_whatever_is_read_once() {
    const PAGES: usize = 2048;
    let cache = PageCache::new(PAGES * BLOCK_SIZE);
    let zipf = Asks::zipf(10 * PAGES as u64);
    let mut rng = Rng::new(1);
    hits(&cache, &zipf, 100_000, &mut rng, |_| {});
    let alone = hits(&cache, &zipf, 100_000, &mut rng, |_| {});
    let lru = exact_lru_hits(PAGES, &zipf, 100_000, 100_000, &mut Rng::new(1));
    assert!(
        alone >= lru + 2.0,
        "{alone} % are found, by use alone {lru} %"
    );
    // Ten times what the cache holds, once, beside it.
    let content = page(0);
    let scanned = |i: u64| {
        if i.is_multiple_of(5) {
            insert(&cache, (1 << 41) + i / 5, &content);
        }
    };
    let beside = hits(&cache, &zipf, 100_000, &mut rng, scanned);
    assert!(
        beside >= alone - 1.0,
        "{beside} % beside a scan, {alone} % without"
    );
}

#[test]
fn a_file_that_nearly_fills_the_cache_stays_whole() {
    for sets in [100, 128, 333] {
        let cache = PageCache::new(sets * WAYS * BLOCK_SIZE);
        let file = Asks::InTurn((sets * WAYS * 9 / 10) as u64);
        let mut rng = Rng::new(1);
        hits(&cache, &file, 2 * (sets * WAYS) as u64, &mut rng, |_| {});
        let found = hits(&cache, &file, 2 * (sets * WAYS) as u64, &mut rng, |_| {});
        assert_eq!(found, 100.0, "{sets} sets");
    }
}

/// Pages that are asked for at random out of the last so many: as good as by exact order of use, or nearly.
#[test]
fn a_window_that_moves_on_is_kept() {
    const PAGES: usize = 2048;
    let cache = PageCache::new(PAGES * BLOCK_SIZE);
    let mut rng = Rng::new(1);
    let content = page(0);
    let window = PAGES as u64 * 8 / 10;
    let mut found = 0;
    for i in 0..120_000 {
        let n = i / 4 + rng.below(window);
        match cache.read(FILE, n, 0, &mut [0]) {
            true => found += u64::from(i >= 60_000),
            false => assert!(insert(&cache, n, &content)),
        }
    }
    // By exact order of use it is 73.6 %.
    assert!(found * 100 / 60_000 >= 71, "{found} of 60,000");
}

/// A file that is read once, in small pieces and ahead of who reads it, costs what is used often nothing either.
#[test]
fn what_is_read_piece_by_piece_or_ahead_is_used_once() {
    const PAGES: usize = 2048;
    const AHEAD: u64 = 64;
    let cache = PageCache::new(PAGES * BLOCK_SIZE);
    let zipf = Asks::zipf(10 * PAGES as u64);
    let mut rng = Rng::new(1);
    hits(&cache, &zipf, 100_000, &mut rng, |_| {});
    let alone = hits(&cache, &zipf, 100_000, &mut rng, |_| {});
    let content = page(0);
    let scanned = |i: u64| {
        if i.is_multiple_of(5) {
            let n = (1 << 41) + i / 5;
            insert(&cache, n + AHEAD, &content);
            (0..4).for_each(|piece| {
                cache.read(FILE, n, piece * 1024, &mut [0; 1024]);
            });
        }
    };
    let beside = hits(&cache, &zipf, 100_000, &mut rng, scanned);
    assert!(
        beside >= alone - 2.0,
        "{beside} % beside a scan, {alone} % without"
    );
}

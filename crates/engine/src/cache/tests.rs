use super::place::mix;
use super::*;
use base::map::HashMap;
use base::rng::Rng;
use std::sync::Arc;

const FILE: FileKey = FileKey {
    nid: Nid(100),
    generation: 3,
};

fn page(byte: u8) -> Vec<u8> {
    vec![byte; BLOCK_SIZE]
}

fn write(cache: &PageCache, n: u64, offset: usize, data: &[u8], rest: Rest<'_>) -> Wrote {
    cache.write(FILE, n, (offset, data), rest, Backing::Promised, 5)
}

/// Reads a page from its device, if it is not cached.
fn insert(cache: &PageCache, n: u64, content: &[u8]) -> bool {
    match cache.absence(FILE, n) {
        Some(absence) => {
            cache.admit(FILE, n, absence, content, true) && cache.state(FILE, n).is_some()
        }
        None => true,
    }
}

#[test]
fn a_page_is_read_as_it_was_inserted_and_written() {
    let cache = PageCache::new(64 * BLOCK_SIZE);
    let mut out = [0u8; 4];
    assert!(!cache.read(FILE, 7, 0, &mut out));
    assert!(insert(&cache, 7, &page(1)));
    assert_eq!(
        write(&cache, 7, 2, &[9], Rest::Unknown),
        Wrote::Done,
        "a cached page needs no rest"
    );
    assert!(cache.read(FILE, 7, 0, &mut out));
    assert_eq!(out, [1, 1, 9, 1]);
    assert_eq!(write(&cache, 8, 2, &[9], Rest::Unknown), Wrote::Absent);
    assert_eq!(write(&cache, 8, 2, &[9], Rest::From(&[4])), Wrote::Done);
    assert!(cache.read(FILE, 8, 0, &mut out));
    assert_eq!(out, [4, 0, 9, 0]);
    let other = FileKey {
        generation: 4,
        ..FILE
    };
    assert!(
        !cache.read(other, 8, 0, &mut out),
        "another use of the nid is another file"
    );
}

#[test]
fn dirty_pages_are_never_evicted_and_a_full_set_says_so() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    for n in 0..WAYS as u64 {
        assert_eq!(
            write(&cache, n, 0, &page(n as u8), Rest::Unknown),
            Wrote::Done
        );
    }
    assert_eq!(write(&cache, 99, 0, &page(0), Rest::Unknown), Wrote::NoRoom);
    assert!(!insert(&cache, 99, &page(0)));
    let mut copy = page(0);
    let (stamp, backing) = cache.copy_dirty(FILE, 3, &mut copy).unwrap();
    assert_eq!((copy[0], backing), (3, Backing::Promised));
    assert!(cache.complete(FILE, 3, stamp));
    assert!(insert(&cache, 99, &page(0)), "the clean page makes room");
    assert_eq!(cache.state(FILE, 3), None);
    assert_eq!(cache.dirty(), WAYS - 1);
}

#[test]
fn a_write_during_write_back_keeps_the_page_dirty() {
    let cache = PageCache::new(64 * BLOCK_SIZE);
    write(&cache, 1, 0, &page(1), Rest::Unknown);
    let (stamp, _) = cache.copy_dirty(FILE, 1, &mut page(0)).unwrap();
    write(&cache, 1, 0, &[2], Rest::Unknown);
    assert!(!cache.complete(FILE, 1, stamp));
    assert_eq!(
        cache.state(FILE, 1),
        Some(PageState::Dirty(Backing::Allocated)),
        "the first write-back gave it its block"
    );
    assert_eq!(cache.promised(FILE), 0);
    let (stamp, _) = cache.copy_dirty(FILE, 1, &mut page(0)).unwrap();
    assert!(cache.complete(FILE, 1, stamp));
    assert!(!cache.is_dirty(FILE));
}

#[test]
fn dirty_pages_come_in_file_order_with_their_age() {
    let cache = PageCache::new(1 << 20);
    for n in [9, 2, 5] {
        write(&cache, n, 0, &page(1), Rest::Unknown);
    }
    assert_eq!(cache.dirty_pages(FILE, 0..u64::MAX, 2), [2, 5]);
    assert_eq!(cache.dirty_pages(FILE, 3..u64::MAX, 9), [5, 9]);
    let files = cache.dirty_files();
    assert_eq!((files[0].pages, files[0].since_ns), (3, 5));
    let dropped = cache.invalidate(FILE, 3..u64::MAX);
    assert_eq!((dropped.dirty, dropped.promised), (2, 2));
    assert_eq!(cache.dirty_pages(FILE, 0..u64::MAX, 9), [2]);
}

/// Random operations against a plain map: whatever the cache returns is right, and dirty
/// pages are never lost.
#[test]
fn it_agrees_with_a_map_under_random_use() {
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let cache = PageCache::new(64 * BLOCK_SIZE);
        let mut truth: HashMap<u64, (u8, bool)> = HashMap::default();
        for _ in 0..5_000 {
            let n = rng.below(200);
            match rng.below(6) {
                0 => {
                    let known = truth.get(&n).map_or(0, |t| t.0);
                    insert(&cache, n, &page(known));
                }
                1 | 2 => {
                    let byte = rng.next_u64() as u8;
                    match write(&cache, n, 0, &page(byte), Rest::Unknown) {
                        Wrote::Done => truth.insert(n, (byte, true)),
                        _ => {
                            let first = cache.dirty_pages(FILE, 0..u64::MAX, 8);
                            for p in first {
                                let (stamp, _) = cache.copy_dirty(FILE, p, &mut page(0)).unwrap();
                                assert!(cache.complete(FILE, p, stamp));
                                truth.get_mut(&p).unwrap().1 = false;
                            }
                            None
                        }
                    };
                }
                3 => {
                    let end = n + rng.below(20);
                    cache.invalidate(FILE, n..end);
                    truth.retain(|p, _| !(n..end).contains(p));
                }
                _ => {
                    let mut out = page(0);
                    let hit = cache.read(FILE, n, 0, &mut out);
                    let expected = truth.get(&n).copied();
                    if hit {
                        assert_eq!(out[17], expected.map_or(0, |e| e.0));
                    } else {
                        assert!(!expected.is_some_and(|e| e.1), "a dirty page was lost");
                    }
                }
            }
            let dirty: Vec<u64> = cache.dirty_pages(FILE, 0..u64::MAX, 999);
            assert_eq!(dirty.len(), truth.values().filter(|t| t.1).count());
            assert_eq!(dirty.len(), cache.dirty());
        }
    }
}

#[test]
fn many_threads_share_it() {
    let cache = PageCache::new(256 * BLOCK_SIZE);
    base::thread::parallel(4, |t| {
        let key = FileKey {
            nid: Nid(t as u64),
            generation: 0,
        };
        let mut rng = Rng::new(t as u64);
        for _ in 0..20_000 {
            let n = rng.below(100);
            let byte = (n as u8).wrapping_add(t as u8);
            if cache.write(
                key,
                n,
                (0, &page(byte)),
                Rest::Unknown,
                Backing::Allocated,
                0,
            ) == Wrote::Done
            {
                let mut copy = page(0);
                let (stamp, _) = cache.copy_dirty(key, n, &mut copy).unwrap();
                assert!(copy.iter().all(|&b| b == byte));
                assert!(cache.complete(key, n, stamp));
            }
            let mut out = page(0);
            if cache.read(key, n, 0, &mut out) {
                assert!(out.iter().all(|&b| b == byte));
            }
        }
    });
    assert_eq!(cache.dirty(), 0);
}

/// Reads copy without a lock, beside overwrites of the same page and pages that give way to others in the same frame. Each byte of
/// a page says which page it is, and how often that was written.
#[test]
fn a_read_is_of_one_page_at_one_moment() {
    const PAGES: u64 = 2 * WAYS as u64;
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    let content = |n: u64, turn: u64| page((n as u8) << 3 | (turn % 8) as u8);
    let found = base::atomic::AtomicU64::new(0);
    base::thread::parallel(4, |t| {
        let mut rng = Rng::new(t as u64);
        let (mut out, mut copy) = (page(0), page(0));
        for turn in 0..30_000 {
            let n = rng.below(PAGES);
            match t {
                0 => _ = insert(&cache, n, &content(n, turn)),
                1 => {
                    if cache.overwrite(FILE, n, (0, &content(n, turn)), Some(5)) == Overwrote::Done
                        && let Some((stamp, _)) = cache.copy_dirty(FILE, n, &mut copy)
                    {
                        cache.complete(FILE, n, stamp);
                    }
                }
                _ => {
                    if cache.read(FILE, n, 0, &mut out) {
                        found.fetch_add(1, Ordering::Relaxed);
                        assert_eq!(out[0] >> 3, n as u8, "another page's");
                        assert!(out.iter().all(|&byte| byte == out[0]), "parts of two");
                    }
                }
            }
        }
    });
    assert!(found.load(Ordering::Relaxed) > 1000);
    let counted = cache.counters();
    assert_eq!(
        counted.hits + counted.misses,
        60_000,
        "each lane is one thread's"
    );
}

#[test]
fn a_hit_needs_no_lock_and_a_miss_does() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    assert!(insert(&cache, 1, &page(7)));
    let held = cache.sets[0].lock();
    let mut out = page(0);
    assert!(cache.read(FILE, 1, 0, &mut out) && cache.look(FILE, 1, 0, &mut out));
    assert_eq!(out, page(7));
    assert!(!cache.look(FILE, 2, 0, &mut out), "it waits for nobody");
    drop(held);
    assert!(!cache.read(FILE, 2, 0, &mut out));
    let counted = cache.counters();
    assert_eq!((counted.hits, counted.misses, counted.inserted), (1, 1, 1));
}

/// What is cached under a name at any moment is that name's: a page that comes brings its content with it.
#[test]
fn a_page_written_whole_never_shows_what_its_frame_held() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    let done = base::atomic::AtomicBool::new(false);
    base::thread::parallel(2, |t| {
        if t == 0 {
            for turn in 0..20_000u64 {
                let n = turn % 64;
                assert_eq!(
                    write(&cache, n, 0, &page(n as u8), Rest::Unknown),
                    Wrote::Done
                );
                cache.invalidate(FILE, n..n + 1);
            }
            done.store(true, Ordering::Release);
        }
        let (mut out, mut n) = (page(0), 0);
        while !done.load(Ordering::Acquire) {
            n = (n + 1) % 64;
            if cache.look(FILE, n, 0, &mut out) {
                assert_eq!(out, page(n as u8));
            }
        }
    });
}

#[test]
fn an_overwrite_takes_neither_a_frame_nor_a_block() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    let part = (1, &[9][..]);
    assert_eq!(cache.overwrite(FILE, 1, part, Some(5)), Overwrote::Absent);
    assert!(insert(&cache, 1, &page(1)));
    assert_eq!(cache.overwrite(FILE, 1, part, None), Overwrote::Clean);
    let mut out = [0; 3];
    assert!(cache.read(FILE, 1, 0, &mut out));
    assert_eq!((out, cache.dirty()), ([1; 3], 0));
    assert_eq!(cache.overwrite(FILE, 1, part, Some(5)), Overwrote::Done);
    let dirty = Some(PageState::Dirty(Backing::Allocated));
    assert_eq!((cache.state(FILE, 1), cache.promised(FILE)), (dirty, 0));
    write(&cache, 2, 0, &page(2), Rest::Unknown);
    let (stamp, _) = cache.copy_dirty(FILE, 2, &mut page(0)).unwrap();
    assert_eq!(cache.overwrite(FILE, 2, part, None), Overwrote::Done);
    assert_eq!(cache.promised(FILE), 1, "it keeps what stands behind it");
    assert!(!cache.inlined(FILE, 2, stamp));
    assert_eq!(cache.promised(FILE), 1, "an inode gives no block");
    assert!(!cache.complete(FILE, 2, stamp));
    assert_eq!(cache.promised(FILE), 0);
    assert_eq!((cache.dirty(), cache.counters().written), (2, 3));
}

#[test]
fn what_is_seen_in_passing_of_the_counts_is_nearly_right() {
    let cache = PageCache::new(64 << 20);
    let all = cache.capacity() as u64 / 2;
    let near =
        |about: usize, exact: u64| about.abs_diff(exact as usize) <= cache.capacity() / SLACK;
    for n in 0..all {
        let backing = [Backing::Allocated, Backing::Promised][n as usize % 2];
        let wrote = cache.write(FILE, n, (0, &page(1)), Rest::Unknown, backing, 5);
        assert_eq!(wrote, Wrote::Done);
        assert!(near(cache.about_dirty(), n + 1) && near(cache.about_promised(), n.div_ceil(2)));
    }
    assert_eq!(
        (cache.dirty() as u64, cache.promised_pages() as u64),
        (all, all / 2)
    );
    base::thread::parallel(2, |thread| {
        let half = |t: u64| all / 2 * t..all / 2 * (t + 1);
        cache.invalidate(FILE, half(thread as u64));
    });
    assert_eq!((cache.dirty(), cache.promised_pages()), (0, 0));
    assert!(near(cache.about_dirty(), 0) && near(cache.about_promised(), 0));
    // Of a small one each tells at once.
    let small = PageCache::new(4 * WAYS * BLOCK_SIZE);
    for n in 0..20 {
        write(&small, n, 0, &page(1), Rest::Unknown);
        assert!(small.about_dirty().abs_diff(n as usize + 1) <= 1);
    }
}

/// Who finds the count as it was, and the page not dirty before, has seen what its device held (invariant 8).
#[test]
fn what_makes_a_page_dirty_is_counted_before_it_is_seen() {
    const ROUNDS: u64 = 300_000;
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    assert!(insert(&cache, 1, &page(0)));
    let (home, over) = (AtomicU64::new(0), AtomicU64::new(0));
    let write = || {
        for round in 1..=ROUNDS {
            let content = page(round as u8);
            match round % 2 {
                0 => assert_eq!(cache.overwrite_whole(FILE, 1, &content, 5), Wrote::Done),
                _ => {
                    let part = (0, &content[..]);
                    assert_eq!(cache.overwrite(FILE, 1, part, Some(5)), Overwrote::Done);
                }
            }
            let (stamp, _) = cache.copy_dirty(FILE, 1, &mut page(0)).unwrap();
            home.store(round % 256, Ordering::SeqCst);
            assert!(cache.complete(FILE, 1, stamp));
        }
        over.store(1, Ordering::SeqCst);
    };
    let look = || {
        let mut looked = 0;
        while over.load(Ordering::SeqCst) == 0 || looked == 0 {
            let before = cache.dirtied(FILE);
            if cache.is_dirty(FILE) && !cache.dirty_pages(FILE, 1..2, 1).is_empty() {
                continue;
            }
            let there = home.load(Ordering::SeqCst) as u8;
            let mut seen = [0];
            assert!(cache.read(FILE, 1, 7, &mut seen));
            if cache.dirtied(FILE) == before {
                assert_eq!(seen[0], there);
                looked += 1;
            }
        }
    };
    base::thread::parallel(2, |me| if me == 0 { write() } else { look() });
}

#[test]
fn a_page_that_was_written_and_lost_meanwhile_is_not_admitted() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    let absence = cache.absence(FILE, 1).unwrap();
    let admit = |content: u8| cache.admit(FILE, 1, absence, &page(content), false);
    assert!(admit(1), "nobody has had it");
    for n in 0..2 * WAYS as u64 {
        assert!(insert(&cache, n, &page(1)));
    }
    assert!(admit(1), "it was read, and gave way to another");
    write(&cache, 1, 0, &page(2), Rest::Unknown);
    assert!(!admit(1), "it was written");
    let (stamp, _) = cache.copy_dirty(FILE, 1, &mut page(0)).unwrap();
    assert!(cache.complete(FILE, 1, stamp) && !admit(1), "it is clean");
    for n in 10..10 + 4 * WAYS as u64 {
        assert!(insert(&cache, n, &page(1)));
    }
    assert_eq!(cache.state(FILE, 1), None);
    assert!(!admit(1), "it gave way to another");
    assert!(
        insert(&cache, 1, &page(2)) && !admit(1),
        "it is there again"
    );
    assert!(cache.absence(FILE, 1).is_none());
}

#[test]
fn what_was_read_before_a_block_was_written_past_the_cache_is_not_admitted() {
    let cache = PageCache::new(64 * BLOCK_SIZE);
    let before = cache.absence(FILE, 3).unwrap();
    assert!(insert(&cache, 1, &page(1)));
    write(&cache, 2, 0, &page(2), Rest::Unknown);
    let dropped = cache.supersede(FILE, 1..4, false);
    assert_eq!((dropped.pages, dropped.dirty), (1, 0));
    assert_eq!(cache.state(FILE, 1), None);
    assert!(matches!(cache.state(FILE, 2), Some(PageState::Dirty(_))));
    assert!(!cache.admit(FILE, 3, before, &page(3), true), "nor used");
    let after = cache.absence(FILE, 3).unwrap();
    assert!(cache.admit(FILE, 3, after, &page(4), true));
    assert!(!cache.admit(FILE, 3, before, &page(3), true));
    let dropped = cache.supersede(FILE, 0..9, true);
    assert_eq!((dropped.pages, dropped.dirty), (2, 1));
    assert_eq!((cache.dirty(), cache.state(FILE, 2)), (0, None));
}

#[test]
fn frames_are_used_from_the_front_on_and_kept() {
    let cache = PageCache::new(64 * WAYS * BLOCK_SIZE);
    let given = || cache.given.load(Ordering::Relaxed);
    let used = || {
        let mut used = Vec::new();
        for set in cache.sets.iter() {
            let frames = (0..WAYS).map(|way| set.number(way));
            used.extend(frames.filter(|frame| *frame != set::NO_FRAME));
        }
        used.sort_unstable();
        used
    };
    // Far apart, so in sets far apart.
    let pages: Vec<u64> = (0..40).map(|n| n << 20).collect();
    for (i, &n) in pages.iter().enumerate() {
        match i % 2 {
            0 => assert_eq!(write(&cache, n, 0, &page(7), Rest::Unknown), Wrote::Done),
            _ => assert!(insert(&cache, n, &page(7))),
        }
        assert_eq!(given(), i + 1);
    }
    assert!(used().into_iter().eq(0..40));
    for &n in &pages {
        assert_eq!(write(&cache, n, 1, &[8], Rest::Unknown), Wrote::Done);
        cache.invalidate(FILE, n..n + 1);
        assert!(insert(&cache, n, &page(9)));
    }
    assert_eq!(given(), 40, "what was given up is used again");
    (0..10_000).for_each(|n| _ = insert(&cache, n, &page(3)));
    let all = cache.capacity() as u32;
    assert!(used().into_iter().eq(0..all), "each way has its own");
}

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

/// A load from a device that has `content`, up to its end.
fn begin(cache: &PageCache, n: u64, content: u8) -> Option<Load<'_>> {
    let mut load = cache.begin_load(FILE, n)?;
    load.fill(&page(content));
    Some(load)
}

#[test]
fn a_page_that_is_loaded_where_it_stays_is_there_when_it_is_published_and_not_before() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    for n in 0..WAYS as u64 {
        assert!(insert(&cache, n, &page(n as u8)));
    }
    let mut out = page(0);
    let load = begin(&cache, 50, 7).unwrap();
    assert!(!cache.read(FILE, 50, 0, &mut out) && cache.state(FILE, 50).is_none());
    assert!(load.publish());
    assert!(cache.read(FILE, 50, 0, &mut out) && out == page(7));
    assert_eq!(cache.state(FILE, 50), Some(PageState::Clean));
    assert!(cache.begin_load(FILE, 50).is_none(), "it is cached");
    let mut load = begin(&cache, 51, 8).unwrap();
    load.zero(1..BLOCK_SIZE);
    assert!(load.publish() && cache.read(FILE, 51, 0, &mut out));
    assert!(out[0] == 8 && out[1..].iter().all(|&byte| byte == 0));
    // What is given up is nobody's, and its frame is used again.
    for round in 0..100 {
        drop(begin(&cache, 60 + round, 9));
        assert!(!cache.read(FILE, 60 + round, 0, &mut out));
    }
    let counters = cache.counters();
    assert_eq!(cache.given.load(Ordering::Relaxed), WAYS, "{counters:?}");
}

#[test]
fn frames_that_are_set_aside_are_few_and_nobody_elses() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    let mut loads: Vec<Load<'_>> = (0..WAYS as u64)
        .map_while(|n| begin(&cache, n, 1))
        .collect();
    assert!((1..WAYS).contains(&loads.len()));
    let rest = (WAYS - loads.len()) as u64;
    for n in 0..rest {
        assert_eq!(
            write(&cache, 100 + n, 0, &page(2), Rest::Unknown),
            Wrote::Done
        );
    }
    assert_eq!(
        write(&cache, 200, 0, &page(2), Rest::Unknown),
        Wrote::NoRoom
    );
    loads.iter_mut().for_each(|load| load.fill(&page(3)));
    let mut out = page(0);
    for n in 0..rest {
        assert!(cache.read(FILE, 100 + n, 0, &mut out) && out == page(2));
    }
    assert!(loads.into_iter().all(Load::publish));
    assert_eq!(write(&cache, 200, 0, &page(2), Rest::Unknown), Wrote::Done);
}

#[test]
fn what_is_loaded_beside_others_is_what_the_page_holds() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    let mut out = page(0);
    // Who publishes second finds it there.
    let (first, second) = (begin(&cache, 1, 1), begin(&cache, 1, 1));
    assert!(first.unwrap().publish() && second.unwrap().publish());
    let held = cache.sets[0].lock().held().count();
    assert_eq!(held, 1);
    // Written meanwhile, and dirty.
    let load = begin(&cache, 2, 2).unwrap();
    assert_eq!(write(&cache, 2, 0, &page(5), Rest::Unknown), Wrote::Done);
    assert!(!load.publish());
    assert!(cache.read(FILE, 2, 0, &mut out) && out == page(5));
    // Written meanwhile, written back and lost.
    let load = begin(&cache, 3, 3).unwrap();
    assert_eq!(write(&cache, 3, 0, &page(6), Rest::Unknown), Wrote::Done);
    let (stamp, _) = cache.copy_dirty(FILE, 3, &mut out).unwrap();
    assert!(cache.complete(FILE, 3, stamp));
    for n in 10..10 + 2 * WAYS as u64 {
        insert(&cache, n, &page(0));
    }
    assert!(cache.state(FILE, 3).is_none(), "it has left");
    assert!(!load.publish() && cache.state(FILE, 3).is_none());
    // Its block written past the cache meanwhile.
    let load = begin(&cache, 4, 4).unwrap();
    cache.supersede(FILE, 4..5, true);
    assert!(!load.publish() && cache.state(FILE, 4).is_none());
}

#[test]
fn clean_pages_are_forgotten_and_what_was_written_counts_as_lost() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    let mut out = page(0);
    for n in 0..8 {
        insert(&cache, n, &page(1));
    }
    assert_eq!(write(&cache, 3, 0, &[9], Rest::Unknown), Wrote::Done);
    assert_eq!(write(&cache, 4, 0, &[9], Rest::Unknown), Wrote::Done);
    let (stamp, _) = cache.copy_dirty(FILE, 4, &mut out).unwrap();
    assert!(cache.complete(FILE, 4, stamp));
    let absence = cache.absence(FILE, 8).unwrap();
    assert_eq!(cache.forget(FILE, 0..8, false), 7);
    assert!(cache.read(FILE, 3, 0, &mut out), "it is dirty");
    assert!(
        !cache.admit(FILE, 8, absence, &page(0), true),
        "one of its set was written and has left"
    );
    assert_eq!(cache.forget(FILE, 0..8, false), 0);
}

#[test]
fn a_set_is_crowded_from_a_mark_on_until_it_is_eased() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE).keeping_ways();
    let put = |n: u64| cache.overwrite_whole(FILE, n, &page(n as u8), 5);
    let dirty = u64::from(crowd::crowded());
    (0..dirty).for_each(|n| assert_eq!(put(n), Wrote::Done));
    assert_eq!((cache.crowded(), cache.next_crowded(0)), (0, None));
    let mut cold = Vec::new();
    assert_eq!(cache.append_cold(0, &mut cold), 0);
    assert_eq!(put(dirty), Wrote::Done);
    assert_eq!((cache.crowded(), cache.next_crowded(0)), (1, Some(0)));
    let wanted = cache.append_cold(0, &mut cold);
    assert_eq!(wanted as u64, dirty + 1 - u64::from(crowd::eased()));
    assert_eq!(
        (cold.len() as u64, cold[0]),
        (dirty + 1, (FILE, 0)),
        "the oldest first"
    );
    for (key, n) in &cold[..wanted - 1] {
        let (stamp, _) = cache.copy_dirty(*key, *n, &mut page(0)).unwrap();
        assert!(cache.complete(*key, *n, stamp));
    }
    assert_eq!(cache.crowded(), 1);
    cache.invalidate(FILE, dirty..dirty + 1);
    assert_eq!((cache.crowded(), cache.next_crowded(0)), (0, None));
}

/// Neither what is read nor what needs a block has to wait for overwrites.
#[test]
fn overwrites_leave_some_ways_of_a_set_to_others() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE).keeping_ways();
    let most = u64::from(crowd::own_most());
    for n in 0..most {
        assert_eq!(cache.overwrite_whole(FILE, n, &page(1), 5), Wrote::Done);
    }
    assert_eq!(cache.overwrite_whole(FILE, 50, &page(1), 5), Wrote::NoRoom);
    assert_eq!(
        cache.overwrite_whole(FILE, 3, &page(2), 5),
        Wrote::Done,
        "it is dirty"
    );
    assert!(!cache.has_room(cache.set_of(FILE, 50)));
    for n in 100..200 {
        assert!(insert(&cache, n, &page(3)), "a read finds a frame");
    }
    assert_eq!(
        cache.overwrite(FILE, 199, (0, &[1]), Some(5)),
        Overwrote::NoRoom
    );
    assert_eq!(
        cache.overwrite(FILE, 199, (0, &[1]), None),
        Overwrote::Clean
    );
    assert_eq!(write(&cache, 60, 0, &page(4), Rest::Unknown), Wrote::Done);
    assert_eq!((cache.promised_pages(), cache.counters().no_room), (1, 2));
    let (stamp, _) = cache.copy_dirty(FILE, 0, &mut page(0)).unwrap();
    assert!(cache.complete(FILE, 0, stamp));
    let (stamp, _) = cache.copy_dirty(FILE, 60, &mut page(0)).unwrap();
    assert!(cache.complete(FILE, 60, stamp));
    assert_eq!(cache.promised_pages(), 0);
    assert_eq!(cache.overwrite_whole(FILE, 50, &page(1), 5), Wrote::Done);
}

#[test]
fn a_file_that_is_written_over_all_the_time_is_as_old_as_its_last_write_back() {
    let cache = PageCache::new(64 * BLOCK_SIZE);
    write(&cache, 1, 0, &page(1), Rest::Unknown);
    cache.written_back(FILE, 70);
    assert_eq!(cache.dirty_since(FILE), Some(70));
    cache.written_back(FILE, 60);
    assert_eq!(cache.dirty_since(FILE), Some(70));
}

/// Whatever the kernel says to large pages: what the frames hold stays what it is, beside who reads and writes them.
#[test]
fn pages_stay_what_they_are_while_large_ones_come_behind_them() {
    let cache = PageCache::new(4 * base::mapping::LARGE);
    // From the second page on, of which each set has as many as it has ways.
    let all = cache.capacity() as u64;
    let byte = |n: u64, round: u64| (n * 7 + round) as u8;
    for n in 1..all {
        assert_eq!(
            write(&cache, n, 0, &page(byte(n, 0)), Rest::Unknown),
            Wrote::Done
        );
    }
    base::thread::parallel(2, |thread| {
        if thread == 0 {
            return cache.keep_large(|| 0);
        }
        let mut out = page(0);
        for round in 0..4 {
            for n in 1..all {
                assert!(cache.read(FILE, n, 0, &mut out));
                assert_eq!(out, page(byte(n, round)));
                write(&cache, n, 0, &page(byte(n, round + 1)), Rest::Unknown);
            }
        }
        cache.stop_keeping();
    });
    let large = cache.large_bytes();
    assert!(large.is_multiple_of(base::mapping::LARGE as u64) && large <= all * 4096 * 2);
    // Who comes when it is stopped does nothing.
    cache.keep_large(|| 0);
    assert_eq!(cache.large_bytes(), large);
}

#[test]
fn memory_comes_ahead_of_first_uses_and_changes_nothing() {
    let cache = PageCache::new(24 << 20);
    let all = cache.capacity() as u64;
    let byte = |n: u64| (n * 11 + 3) as u8;
    base::thread::parallel(2, |thread| {
        if thread == 0 {
            // Ends by itself, because somebody wakes it again and again, when there is memory behind all frames.
            return cache.keep_touched();
        }
        let mut out = page(0);
        for n in 1..all {
            let wrote = write(&cache, n, 0, &page(byte(n)), Rest::Unknown);
            assert_eq!(wrote, Wrote::Done);
            assert!(cache.read(FILE, n.div_ceil(2), 0, &mut out));
            assert_eq!(out, page(byte(n.div_ceil(2))));
            // However late the other thread begins, it has something to do by then.
            while n == all / 2 && cache.touched.end() == 0 {
                base::thread::yield_now();
            }
        }
    });
    let mut out = page(0);
    for n in 1..all {
        assert!(cache.read(FILE, n, 0, &mut out));
        assert_eq!(out, page(byte(n)));
    }
    // Of a cache that nobody uses nothing is touched, and it ends when it is stopped.
    let idle = PageCache::new(24 << 20);
    base::thread::parallel(2, |thread| match thread {
        0 => idle.keep_touched(),
        _ => idle.stop_keeping(),
    });
    assert_eq!(idle.touched.end(), 0);
}

fn guard(cache: &Arc<PageCache>, n: u64) -> Option<Guard> {
    match cache.guard(FILE, n) {
        Guarded::Yes(guard) => Some(guard),
        Guarded::Absent | Guarded::TooMany => None,
    }
}

/// Whatever happens to the page, and to its way.
#[test]
fn a_guard_shows_what_the_page_was() {
    let changes: [fn(&PageCache); 8] = [
        |cache| _ = write(cache, 1, 5, &[9], Rest::Unknown),
        |cache| _ = write(cache, 1, 0, &page(9), Rest::Unknown),
        |cache| _ = cache.overwrite(FILE, 1, (7, &[9]), Some(3)),
        |cache| _ = cache.zero(FILE, 1, 9..BLOCK_SIZE),
        |cache| cache.keep(FILE, 1, &page(9)),
        |cache| {
            cache.invalidate(FILE, 0..9);
            (10..100).for_each(|n| _ = insert(cache, n, &page(9)));
        },
        // Pushed out, by what is read elsewhere and by what devices fill.
        |cache| (10..100).for_each(|n| _ = insert(cache, n, &page(9))),
        |cache| {
            for n in 10..100 {
                let load = begin(cache, n, 9);
                assert!(load.is_none_or(Load::publish));
            }
        },
    ];
    for change in changes {
        let cache = Arc::new(PageCache::new(WAYS * BLOCK_SIZE));
        assert!(insert(&cache, 1, &page(1)));
        let left = cache.guards_left();
        let (first, second) = (guard(&cache, 1).unwrap(), guard(&cache, 1).unwrap());
        assert_eq!(cache.guards_left(), left - 1, "one frame has both");
        change(&cache);
        assert!(*first == page(1) && *second == page(1));
        drop(first);
        change(&cache);
        assert_eq!(*second, page(1));
        let mut out = page(0);
        if cache.read(FILE, 1, 0, &mut out) {
            assert_ne!(out, page(1), "others see what was done");
            let third = guard(&cache, 1).unwrap();
            assert!(*third == out && *second == page(1));
        }
        // The cache goes, the guard stays.
        let weak = Arc::downgrade(&cache);
        drop(cache);
        assert_eq!(*second, page(1));
        assert_eq!(weak.upgrade().unwrap().guards_left(), left - 1);
        drop(second);
        assert!(weak.upgrade().is_none());
    }
}

#[test]
fn as_many_pages_have_guards_as_there_are_spare_frames() {
    let cache = Arc::new(PageCache::new(WAYS * BLOCK_SIZE));
    let most = cache.guards_left();
    for _ in 0..3 {
        (0..WAYS as u64).for_each(|n| assert!(insert(&cache, n, &page(n as u8))));
        let mut guards: Vec<Guard> = (0..most as u64).map_while(|n| guard(&cache, n)).collect();
        assert_eq!((guards.len(), cache.guards_left()), (most, 0));
        assert!(matches!(cache.guard(FILE, 9), Guarded::TooMany));
        assert!(matches!(cache.guard(FILE, 99), Guarded::Absent));
        assert!(
            guard(&cache, 0).is_some(),
            "one that has a guard gets another"
        );
        // Each can be written over, whatever else has guards.
        for n in 0..WAYS as u64 {
            write(&cache, n, 0, &page(99), Rest::Unknown);
        }
        assert!(matches!(cache.guard(FILE, 9), Guarded::TooMany));
        guards.pop();
        assert!(guard(&cache, 9).is_some());
        let shown = guards.iter().zip(0..);
        shown.for_each(|(guard, n)| assert_eq!(**guard, page(n)));
        drop(guards);
        assert_eq!(cache.guards_left(), most);
        cache.invalidate(FILE, 0..WAYS as u64);
    }
    let big = PageCache::new(16 << 20);
    assert!(
        big.capacity() + big.guards_left() <= 4096,
        "within the limit"
    );
}

/// Guards of several threads, beside who writes, loads and reads the same pages. Each byte of a page says how often it was written.
#[test]
fn guards_live_beside_everything_else() {
    const PAGES: u64 = 2 * WAYS as u64;
    let cache = Arc::new(PageCache::new(WAYS * BLOCK_SIZE));
    let left = cache.guards_left();
    base::thread::parallel(4, |thread| {
        let mut rng = Rng::new(thread as u64 + 40);
        let mut held: Vec<(Guard, u8)> = Vec::new();
        for step in 0..20_000u64 {
            let n = rng.below(PAGES);
            match rng.below(5) {
                0 => {
                    let content = page(step as u8);
                    let wrote =
                        cache.write(FILE, n, (0, &content), Rest::Unknown, Backing::Allocated, 0);
                    let mut copy = page(0);
                    if wrote == Wrote::Done
                        && let Some((stamp, _)) = cache.copy_dirty(FILE, n, &mut copy)
                    {
                        cache.complete(FILE, n, stamp);
                    }
                }
                1 => _ = begin(&cache, n, step as u8).map(Load::publish),
                2 => {
                    let mut out = page(0);
                    if cache.read(FILE, n, 0, &mut out) {
                        assert!(out.iter().all(|&byte| byte == out[0]));
                    }
                }
                3 => held.extend(guard(&cache, n).map(|guard| {
                    let byte = guard[0];
                    (guard, byte)
                })),
                _ => held.truncate(rng.below(3) as usize),
            }
            for (guard, byte) in &held {
                assert!(guard.iter().all(|other| other == byte));
            }
        }
    });
    assert_eq!(cache.guards_left(), left);
}

use super::*;
use base::map::HashMap;
use base::rng::Rng;
use std::sync::Arc;

mod found;
mod memory;

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
        let mut mine = 0;
        for turn in 0.. {
            // Whoever reads may have been at it before there was anything.
            if turn >= 30_000 && (t < 2 || mine > 500) {
                break;
            }
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
                        mine += 1;
                        assert_eq!(out[0] >> 3, n as u8, "another page's");
                        assert!(out.iter().all(|&byte| byte == out[0]), "parts of two");
                    }
                }
            }
        }
        found.fetch_add(mine, Ordering::Relaxed);
    });
    let found = found.load(Ordering::Relaxed);
    assert_eq!(cache.counters().hits, found, "each lane is one thread's");
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
    assert!(cache.copy(FILE, 1, 0, &mut out) && !cache.copy(FILE, 2, 0, &mut out));
    let counted = cache.counters();
    assert_eq!((counted.hits, counted.misses, counted.inserted), (1, 0, 1));
    cache.brought(3, 2);
    let counted = cache.counters();
    assert_eq!((counted.hits, counted.misses, counted.ahead), (1, 3, 2));
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
fn what_lands_beside_writes_past_the_cache_of_other_pages_is_used_and_not_kept() {
    let cache = PageCache::new(WAYS * BLOCK_SIZE);
    let before = cache.absence(FILE, 3).unwrap();
    cache.supersede(FILE, 4..5, true);
    assert!(cache.admit_landed(FILE, 3, before, &page(3)));
    assert_eq!(cache.state(FILE, 3), None);
    let after = cache.absence(FILE, 3).unwrap();
    assert!(cache.admit_landed(FILE, 3, after, &page(3)));
    assert_eq!(cache.state(FILE, 3), Some(PageState::Clean));
    // It is there already, and then somebody writes it.
    assert!(cache.admit_landed(FILE, 3, after, &page(3)));
    write(&cache, 3, 0, &[9], Rest::Unknown);
    assert!(!cache.admit_landed(FILE, 3, after, &page(3)));
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

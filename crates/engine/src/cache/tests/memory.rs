//! The memory behind frames, and frames that have guards.

use super::*;

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

//! Free numbers and free space.

use super::check;
use crate::bitmap::Bitmap;
use crate::ready::{Ready, Recycled};
use crate::region::{LEAF_WORDS, Region};
use crate::totals::Totals;
use std::sync::Arc;

/// Two take, one of them whole words, and two put back numbers of a word that is empty at times.
///
/// Found when broken: `found_empty` that does not look at the word again after it cleared the
/// summary bit (a number is lost); `take` that believes the word it saw instead of the one it changed
/// (a number is given out twice); `take_words` that stores zero instead of exchanging (one put back
/// meanwhile is lost); `put_word` that sets the summary bit before the word's.
#[test]
fn a_number_is_given_out_once_and_none_is_lost() {
    check(3, || {
        // Free: 0. In use: 1 and 2.
        let bits = Arc::new(Bitmap::new(1));
        bits.put(0);
        let with = |work: fn(&Bitmap) -> Vec<u64>| {
            let bits = Arc::clone(&bits);
            loom::thread::spawn(move || work(&bits))
        };
        let threads = [
            with(|bits| {
                bits.put(1);
                bits.put(2);
                Vec::new()
            }),
            with(|bits| bits.take().into_iter().collect()),
        ];
        let mut taken = numbers(&bits.take_words::<1>(0));
        for thread in threads {
            taken.extend(thread.join().unwrap());
        }
        taken.extend(std::iter::from_fn(|| bits.take()));
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
        assert!(bits.put(1) == 0 && bits.put(1) == 2);
        assert!(bits.take_number(1) && !bits.take_number(1));
        assert_eq!(bits.take(), None);
    });
}

/// The numbers of these words that have a bit.
fn numbers(words: &[u64]) -> Vec<u64> {
    let bits =
        (0..words.len() as u64 * 64).filter(|i| words[*i as usize / 64] >> (i % 64) & 1 == 1);
    bits.collect()
}

/// A word becomes rich by what one thread puts back, while another takes the word's leaf.
///
/// Found when broken: `take_leaf` that does not look for rich words again after it cleared their bits
/// (a rich word that nobody finds); `put` that says so before the nid is in its word.
#[test]
fn a_region_knows_its_rich_words_and_loses_no_nid() {
    check(3, || {
        let region = Arc::new(Region::new(LEAF_WORDS));
        region.add(1, (1 << 15) - 1);
        let putter = {
            let region = Arc::clone(&region);
            loom::thread::spawn(move || {
                let rich = (64 + 15..64 + 31).filter(|nid| region.put(*nid));
                rich.count()
            })
        };
        let mut taken = 0;
        if let Some((leaf, nids)) = region.take_leaf(0) {
            assert_eq!(leaf, 0);
            taken = numbers(&nids).len();
        }
        let became_rich = putter.join().unwrap();
        assert!(became_rich <= 1);
        // It may also take a word for rich that is no more.
        assert!(region.rich_words() == 1 || 31 - taken < 16);
        let rest = region
            .take_leaf(0)
            .map_or(0, |(_, nids)| numbers(&nids).len());
        assert_eq!(taken + rest, 31);
        assert!(!region.has_free() && !region.take_nid(64));
    });
}

/// Two words become rich, of which different words of the region say so: who comes last finds both.
///
/// Found when broken: `put` or `rich_words` with less than sequential consistency (neither finds the other's).
#[test]
fn two_that_make_words_rich_do_not_both_miss_the_other() {
    check(3, || {
        let region = Arc::new(Region::new(64 + LEAF_WORDS));
        for w in [0, 64] {
            region.add(w, (1 << 15) - 1);
        }
        let put = |region: &Region, w: u64| {
            assert!(region.put(w * 64 + 15));
            region.rich_words()
        };
        let other = {
            let region = Arc::clone(&region);
            loom::thread::spawn(move || put(&region, 64))
        };
        let found = put(&region, 0);
        let found = found.max(other.join().unwrap());
        assert_eq!(found, 2);
    });
}

/// What the table says is free is added to a region that two want to lease, while a nid comes back.
///
/// Found when broken: `claim` that looks and then stores (a nid that was taken is free again).
#[test]
fn a_region_is_loaded_once() {
    check(3, || {
        let region = Arc::new(Region::new(LEAF_WORDS));
        // The table has nids 0 and 1 free and 2 in use, which is being deleted.
        let lease = |region: &Region| {
            if region.claim() {
                region.add(0, 3);
                region.loaded();
            }
            let leaf = region.is_loaded().then(|| region.take_leaf(0)).flatten();
            leaf.map_or(Vec::new(), |(_, nids)| numbers(&nids))
        };
        let other = {
            let region = Arc::clone(&region);
            loom::thread::spawn(move || lease(&region))
        };
        let putter = {
            let region = Arc::clone(&region);
            loom::thread::spawn(move || region.put(2))
        };
        let mut taken = lease(&region);
        taken.extend(other.join().unwrap());
        putter.join().unwrap();
        taken.extend(lease(&region));
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
    });
}

/// Two take from a ring that one of them fills again when it finds it empty.
///
/// Found when broken: `take` that reads the entry after it moved on (another's nid, or its version);
/// `take` that stores the new state instead of exchanging it (a nid given out twice); `state` without
/// the number of entries taken.
#[test]
fn a_ready_nid_is_taken_once_with_its_version() {
    check(3, || {
        let ready = Arc::new(Ready::new(2));
        ready.fill([(1, 10), (2, 20)].into_iter());
        let other = {
            let ready = Arc::clone(&ready);
            loom::thread::spawn(move || [ready.take(), ready.take()])
        };
        let mut taken: Vec<(u64, u64)> = ready.take().into_iter().collect();
        if ready.is_empty() {
            ready.fill([(3, 30), (4, 40)].into_iter());
        }
        taken.extend(std::iter::from_fn(|| ready.take()));
        taken.extend(other.join().unwrap().into_iter().flatten());
        taken.extend(std::iter::from_fn(|| ready.take()));
        taken.sort_unstable();
        taken
            .iter()
            .for_each(|(nid, version)| assert_eq!(nid * 10, *version));
        let nids: Vec<u64> = taken.iter().map(|(nid, _)| *nid).collect();
        assert!(nids == [1, 2] || nids == [1, 2, 3, 4], "{nids:?}");
    });
}

/// Two put in and take out, and there is no more room than for what is in at first.
///
/// Found when broken: `put` that looks and then stores (a nid is lost); `take` that reads and then
/// clears (a nid given out twice).
#[test]
fn a_recycled_nid_is_taken_once_with_its_version() {
    check(3, || {
        let recycled = Arc::new(Recycled::new());
        (1..4).for_each(|nid| assert!(recycled.put(nid, nid * 10)));
        let work = |recycled: &Recycled, nid: u64| {
            let mut mine: Vec<(u64, u64)> = Vec::new();
            if !recycled.put(nid, nid * 10) {
                mine.push((nid, nid * 10));
            }
            mine.extend(recycled.take());
            mine
        };
        let other = {
            let recycled = Arc::clone(&recycled);
            loom::thread::spawn(move || work(&recycled, 5))
        };
        let mut taken = work(&recycled, 4);
        taken.extend(other.join().unwrap());
        taken.extend(std::iter::from_fn(|| recycled.take()));
        taken.sort_unstable();
        assert_eq!(taken, [(1, 10), (2, 20), (3, 30), (4, 40), (5, 50)]);
        assert!(!recycled.put(1 << 29, 1) && !recycled.put(1, 1 << 35));
    });
}

/// Runs `change` beside a promise of `blocks`, and says whether that was granted.
fn promise_beside(
    totals: Totals,
    blocks: u64,
    change: impl FnOnce(&Totals) + Send + 'static,
) -> (bool, Arc<Totals>) {
    let totals = Arc::new(totals);
    let other = {
        let totals = Arc::clone(&totals);
        loom::thread::spawn(move || change(&totals))
    };
    let granted = totals.try_promise(blocks);
    other.join().unwrap();
    assert!(totals.promisable() >= 0, "more is promised than there is");
    (granted, totals)
}

/// Of two available blocks one is promised and being redeemed, while somebody wants a promise of
/// two.
///
/// Found when broken: `promisable` looking at what is promised after what is available, as it did (the
/// block was counted as available, and its promise as redeemed: a write was accepted for which there
/// was no room).
#[test]
fn a_block_is_not_promised_again_while_it_is_taken() {
    check(3, || {
        let totals = Totals::new(2, 0, 0, 4);
        assert!(totals.try_promise(1));
        let (granted, _) = promise_beside(totals, 2, |totals| {
            totals.take(1);
            totals.unpromise(1);
        });
        assert!(!granted);
    });
}

/// Of two blocks that were taken for a promise and are not used, none is for somebody else on the way back to it.
///
/// Found when broken: `give` before `promise_again`, as it was (a write was accepted for which there was room no more once the one
/// before it was tried again); `promise_again` that does not count, so that somebody looks at promises before it and at what is available after it.
#[test]
fn a_block_that_goes_back_to_its_promise_is_nobodys_in_between() {
    check(3, || {
        let totals = Totals::new(2, 0, 0, 4);
        assert!(totals.try_promise(2));
        totals.take(2);
        totals.unpromise(2);
        let (granted, totals) = promise_beside(totals, 1, |totals| {
            totals.promise_again(2);
            totals.give(2);
        });
        assert!(!granted);
        assert_eq!(totals.promisable(), 0);
    });
}

/// The one free chunk becomes a data chunk, or the reverse, while somebody wants more than it has.
///
/// Found when broken: `promisable` looking at the free chunks before what is available, as it did
/// (the chunk counted twice); `try_take` giving the chunk away before it looks at the promises.
#[test]
fn a_chunk_that_changes_hands_is_counted_once() {
    check(3, || {
        let totals = Totals::new(0, 1, 1, 4);
        totals.set_reserve(0);
        let (granted, totals) = promise_beside(totals, 5, |totals| {
            totals.begin_conversion();
            totals.take_chunks(1);
            totals.end_conversion();
            totals.give(4);
        });
        assert!(!granted);
        assert_eq!((totals.promisable(), totals.free_chunks()), (4, 0));
    });
    check(3, || {
        let (granted, totals) = promise_beside(Totals::new(4, 0, 0, 4), 5, |totals| {
            // What the other one wants for a moment keeps the chunk, at times.
            if totals.try_take(4) {
                totals.free(1);
            }
        });
        assert!(!granted);
        assert_eq!(totals.promisable(), 4);
    });
}

/// A free chunk gets its map, and keeps it or does not, while somebody wants a part of it; another one looks at what is left of the
/// two for checkpoints.
///
/// Found when broken: `begin_conversion` taking the chunk, as it was (the array was full until the map was there);
/// `free_chunks` looking at what is converted last (two chunks where there was one).
#[test]
fn a_chunk_that_is_converted_can_be_promised_all_the_time() {
    for converted in [true, false] {
        check(3, move || {
            let totals = Arc::new(Totals::new(0, 2, 0, 4));
            totals.begin_conversion();
            assert_eq!(totals.promisable(), 8);
            let other = {
                let totals = Arc::clone(&totals);
                loom::thread::spawn(move || {
                    if converted {
                        totals.take_chunks(1);
                    }
                    totals.end_conversion();
                })
            };
            let most = if converted { 1 } else { 2 };
            assert!(totals.free_chunks() <= most, "a chunk is for two");
            assert!(totals.try_promise(4));
            other.join().unwrap();
            assert_eq!(totals.free_chunks(), most);
        });
    }
}

/// Somebody wants more than there is, while another one looks at what promises leave of the free chunks.
///
/// Found when broken: `try_promise` adding what is refused anyway (all chunks were taken for promised, and files refused).
#[test]
fn what_is_refused_is_missing_for_nobody_meanwhile() {
    check(3, || {
        let totals = Arc::new(Totals::new(4, 3, 0, 4));
        assert!(totals.try_promise(5));
        let other = {
            let totals = Arc::clone(&totals);
            loom::thread::spawn(move || assert!(!totals.try_promise(100)))
        };
        assert_eq!(totals.promised_chunks(), 1);
        other.join().unwrap();
    });
}

/// Two want a promise of more than half, or one wants a promise and another the whole chunk.
///
/// Found when broken: `try_promise` or `try_take` looking before they add; their accesses with acquire
/// and release instead of sequential consistency (`try_take`).
#[test]
fn the_last_blocks_go_to_one() {
    check(3, || {
        promise_beside(Totals::new(4, 0, 0, 4), 3, |totals| {
            totals.try_promise(3);
        });
    });
    check(3, || {
        promise_beside(Totals::new(4, 0, 0, 4), 1, |totals| {
            totals.try_take(4);
        });
    });
}

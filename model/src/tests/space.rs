//! Free numbers and free space.

use super::check;
use crate::bitmap::Bitmap;
use crate::totals::Totals;
use std::sync::Arc;

/// One thread takes, two put back numbers of a word that is empty at times.
///
/// Found when broken: `take` that does not look at the word again after it cleared the summary bit
/// (a number is lost); `take` that stores the word it saw, less one bit, instead of clearing the bit
/// (one put back meanwhile is lost); `put` that sets the summary bit before the word's.
#[test]
fn a_number_is_given_out_once_and_none_is_lost() {
    check(4, || {
        // Free: 0. In use: 1 and 2.
        let bits = Arc::new(Bitmap::new(vec![1]));
        let putters: Vec<_> = [1, 2]
            .into_iter()
            .map(|number| {
                let bits = Arc::clone(&bits);
                loom::thread::spawn(move || assert!(bits.put(number)))
            })
            .collect();
        let mut taken: Vec<u64> = (0..2).filter_map(|_| bits.take()).collect();
        for putter in putters {
            putter.join().unwrap();
        }
        taken.extend(std::iter::from_fn(|| bits.take()));
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
        assert_eq!(bits.free(), 0);
        assert!(bits.put(1) && !bits.put(1));
        bits.mark_used(1);
        assert_eq!(bits.take(), None);
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
            totals.take_chunks(1);
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

//! Ranges of pages that threads hold.

use crate::data::ranges::{Mode, Ranges, Table};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use std::ops::Range;

/// Against the sentence of invariant 1, for ranges that come and go at random.
#[test]
fn a_range_is_held_when_nothing_before_it_conflicts() {
    let modes = [Mode::Load, Mode::Store, Mode::Direct, Mode::Home];
    for seed in 0..50 {
        let mut rng = Rng::new(seed);
        let mut table = Table::default();
        let mut all: Vec<(u64, u64, Range<u64>, Mode)> = Vec::new();
        for _ in 0..200 {
            if all.len() > 8 || (!all.is_empty() && rng.one_in(3)) {
                let at = rng.below(all.len() as u64) as usize;
                table.leave(all.remove(at).0);
            } else {
                let (file, start) = (rng.below(2), rng.below(12));
                let pages = start..start + rng.below(6);
                let mode = *rng.pick(&modes);
                let ticket = table.enter(file, pages.clone(), mode);
                all.push((ticket, file, pages, mode));
            }
            for (ticket, file, pages, mode) in &all {
                let mut others = all.iter().filter(|other| other.0 < *ticket);
                let waits = others.any(|(_, f, p, m)| {
                    let both = pages.clone().any(|page| p.contains(&page));
                    f == file && both && m.conflicts(*mode)
                });
                assert_eq!(table.is_held(*ticket), !waits, "seed {seed}");
            }
        }
    }
}

#[test]
fn what_is_tried_and_not_had_leaves_nothing_behind() {
    let ranges = Ranges::new(1);
    let direct = ranges.try_hold(7, 3..5, Mode::Direct).unwrap();
    assert!(ranges.try_hold(7, 4..9, Mode::Home).is_none());
    assert!(ranges.try_hold(8, 4..9, Mode::Home).is_some());
    assert!(ranges.try_hold(7, 5..9, Mode::Direct).is_some());
    drop(direct);
    assert!(ranges.try_hold(7, 0..99, Mode::Direct).is_some());
}

/// Somebody who waits for the lock exclusively would close a circle (invariant 2).
#[test]
#[should_panic(expected = "while holding file data range")]
fn nobody_waits_for_a_range_with_a_files_lock_in_hand() {
    let lock = Mutex::new(rank::FILE_IO, ());
    let _held = lock.lock();
    let ranges = Ranges::new(1);
    let _tried = ranges.try_hold(1, 0..1, Mode::Home);
    let _waited = ranges.hold(1, 5..6, Mode::Store, || ());
}

//! What directories gain, by cores that add together or apart.

use super::super::tally::{Pending, Tally};
use crate::times::Shown;
use base::clock::Timestamp;

/// Adds to what nobody was shown; whether nothing was pending.
fn add(pending: &Pending, core: usize, tally: Tally) -> bool {
    let merged = pending.add_by(core, tally, &Shown::never());
    assert!(merged.taken);
    merged.first
}

fn one(names: i32, sec: i64) -> Tally {
    Tally {
        names,
        subdirs: 1,
        time: Timestamp::new(sec, 0),
    }
}

#[test]
fn what_cores_add_apart_is_one_sum() {
    let mut pending = Pending::default();
    assert_eq!(pending.sum(), None);
    for round in 0..3 {
        let firsts = (0..200).filter(|&i| add(&pending, i as usize % 5, one(i, i as i64)));
        assert_eq!(firsts.count(), 1, "round {round}");
        assert!(pending.is_crowded());
        let all = Tally {
            subdirs: 200,
            ..one(199 * 100, 199)
        };
        assert_eq!(pending.sum(), Some(all));
        assert_eq!(pending.take(), Some(all));
        assert_eq!((pending.sum(), pending.is_owed()), (None, false));
        assert!(pending.is_crowded(), "five cores added apart");
    }
    assert!(add(&pending, 3, one(1, 1)));
    assert_eq!(pending.take(), Some(one(1, 1)));
    assert!(!pending.is_crowded());
}

#[test]
fn a_core_alone_adds_to_no_part() {
    let pending = Pending::default();
    (0..1000).for_each(|i| _ = add(&pending, i / 100, one(1, 0)));
    assert!(!pending.is_crowded());
    assert_eq!(pending.sum().map(|sum| sum.names), Some(1000));
}

#[test]
fn a_look_has_what_ended_before_what_it_has() {
    let pending = Pending::default();
    (0..100).for_each(|i| _ = add(&pending, i, one(0, 0)));
    // Each thread adds a name by one core and takes one away by another: at no moment fewer
    // names than none, or more than threads.
    let looks = base::thread::parallel(3, |thread| {
        let mut wrong = 0;
        for i in 0..2000 {
            if thread == 2 {
                let names = pending.sum().map_or(0, |sum| sum.names);
                wrong += u32::from(!(0..=2).contains(&names));
                continue;
            }
            add(&pending, thread * 7 + i, one(1, 0));
            add(&pending, i * 13, one(-1, 0));
        }
        wrong
    });
    assert_eq!(looks, [0; 3]);
}

#[test]
fn what_a_look_did_not_find_has_a_newer_time_than_the_look() {
    for crowd in [false, true] {
        let (pending, shown) = (Pending::default(), Shown::never());
        if crowd {
            (0..100).for_each(|i| _ = add(&pending, i, one(0, 0)));
        }
        assert!(pending.add_by(1, one(1, 5), &shown).taken);
        assert_eq!(pending.sum_shown(&shown).map(|sum| sum.time.sec()), Some(5));
        for (sec, taken) in [(4, false), (5, false), (6, true)] {
            assert_eq!(pending.add_by(2, one(1, sec), &shown).taken, taken);
        }
        assert_eq!(
            pending.sum().map(|sum| sum.names),
            Some(2),
            "those refused do not count"
        );
    }
}

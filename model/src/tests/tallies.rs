//! Directories that several change at once, under their shared lock, beside those who look at them.

use super::check;
use crate::tally::{Pending, Tally};
use crate::times::{Shown, Times};
use base::clock::{Clock, Timestamp};
use loom::thread::spawn;
use std::sync::Arc;

const NO_PANIC: &str = "no thread of a model panics";

/// A directory whose inode was last changed in this tick, before all operations.
struct Directory {
    times: Times,
    shown: Shown,
    pending: Pending,
}

/// The time that somebody was shown, and the names.
type Look = (Timestamp, i32);

impl Directory {
    /// Cores add together, or apart.
    fn new(crowded: bool) -> Directory {
        let directory = Directory {
            times: Times::new(Clock::real()),
            shown: Shown::never(),
            pending: Pending::default(),
        };
        for core in (1..=20).take_while(|_| crowded) {
            directory.add_as(core, 0);
        }
        assert_eq!(directory.pending.is_crowded(), crowded);
        directory
    }

    /// As `FileSystem::count_names`. Says whether nothing was pending.
    fn add_as(&self, core: usize, names: i32) -> bool {
        let mut now = self.times.now();
        let mut first = false;
        loop {
            let tally = Tally {
                names,
                subdirs: 0,
                time: now,
            };
            let merged = self.pending.add_by(core, tally, &self.shown);
            first |= merged.first;
            if merged.taken {
                return first;
            }
            now = self.times.after(self.shown.get());
        }
    }

    /// As `Inode::counts_shown`.
    fn look(&self) -> Look {
        let of_inode = Timestamp::from_ns(10);
        self.shown.show(of_inode.into());
        let sum = self.pending.sum_shown(&self.shown);
        sum.map_or((of_inode, 0), |sum| (sum.time.max(of_inode), sum.names))
    }

    /// See `stamps`.
    fn assert_told(&self, seen: Look) {
        let now = self.look();
        assert!(now.1 == seen.1 || now.0 > seen.0, "{seen:?} became {now:?}");
    }
}

fn beside(interruptions: usize, crowded: bool, before: fn(&Directory), adders: usize) {
    check(interruptions, move || {
        let directory = Arc::new(Directory::new(crowded));
        before(&directory);
        let adders: Vec<_> = (0..adders)
            .map(|core| {
                let directory = Arc::clone(&directory);
                spawn(move || directory.add_as(core, 1))
            })
            .collect();
        let seen = directory.look();
        for adder in adders {
            adder.join().expect(NO_PANIC);
        }
        directory.assert_told(seen);
    });
}

/// Who looked, and did not find a name, finds a newer time when it is there.
///
/// Found when broken: `owed` set after the addition, or looked at relaxed; a look that shows the inode's time after that, or its own when it has given back the locks, or not at all;
/// a relaxed `Shown::get`; an addition with a time that was shown; a part that is made while somebody looks.
#[test]
fn who_did_not_find_a_name_is_shown_a_newer_time_later() {
    let before: [fn(&Directory); 3] = [
        |_| {},
        |directory| _ = directory.add_as(0, 1),
        |directory| {
            directory.add_as(0, 1);
            directory.look();
        },
    ];
    for before in before {
        beside(3, false, before, 1);
        beside(3, false, before, 2);
        beside(2, true, before, 1);
    }
}

/// A look has what ended before what it has. Both cores have a part of their own where cores add apart.
///
/// Found when broken: parts that are locked one after the other.
#[test]
fn a_look_has_what_ended_before_what_it_has() {
    for crowded in [false, true] {
        check(2, move || {
            let directory = Arc::new(Directory::new(crowded));
            let adder = {
                let directory = Arc::clone(&directory);
                spawn(move || {
                    directory.add_as(18, 1);
                    directory.add_as(19, -1);
                })
            };
            let names = directory.pending.sum().map_or(0, |sum| sum.names);
            assert!((0..=1).contains(&names), "{names}");
            adder.join().expect(NO_PANIC);
            assert_eq!(directory.pending.sum().map(|sum| sum.names), Some(0));
        });
    }
}

/// Of several who find nothing pending, one pays for folding it.
///
/// Found when broken: `owed` that is set by a store.
#[test]
fn one_of_those_who_add_is_the_first() {
    check(3, || {
        let directory = Arc::new(Directory::new(false));
        let adder = {
            let directory = Arc::clone(&directory);
            spawn(move || directory.add_as(0, 1))
        };
        let first = directory.add_as(18, 1);
        assert!(first != adder.join().expect(NO_PANIC));
        assert_eq!(directory.pending.sum().map(|sum| sum.names), Some(2));
    });
}

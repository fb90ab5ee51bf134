//! Short runs of every mode. `SHEAF_SEEDS=100-200` runs other seeds.

use base::canary::Canary;
use sim::explore::{Failure, Seen};
use sim::random::{run_seed, run_steps};
use sim::run;
use sim::sequences::Plan;
use sim::setting::{Setting, Trouble};
use sim::world::Shape;

fn seeds(default: &str) -> std::ops::RangeInclusive<u64> {
    let range = std::env::var("SHEAF_SEEDS").unwrap_or(default.into());
    let (first, last) = range.split_once('-').unwrap_or((&range, &range));
    let number = |text: &str| text.parse().expect("SHEAF_SEEDS is no range of numbers");
    let (first, last) = (number(first), number(last));
    assert!(first <= last, "SHEAF_SEEDS has no seed in it");
    first..=last
}

#[test]
fn short_sequences_survive_a_cut_at_every_write_and_flush() {
    let plan = Plan::new(1);
    for number in [0, 100, 700] {
        if let Err(failure) = run::replay_sequence(&plan, number, None) {
            panic!("sequence {number}:\n{failure}");
        }
    }
}

#[test]
fn random_runs_lose_nothing_that_was_synced() {
    let seen = Seen::default();
    for seed in seeds("0-11") {
        if let Some(failure) = run_seed(seed, &seen).failure {
            panic!("seed {seed}: {failure}");
        }
    }
}

#[test]
fn the_same_seed_asks_the_devices_for_the_same_things() {
    let seen = Seen::default();
    // One of each kind of trouble.
    let mut kinds = Vec::new();
    for seed in 0..60 {
        let kind = Setting::of(seed).trouble;
        if kinds.contains(&kind) {
            continue;
        }
        kinds.push(kind);
        let (first, again) = (run_seed(seed, &seen), run_seed(seed, &seen));
        assert_eq!(first.steps, again.steps);
        assert_ne!(first.trace, 0);
        assert_eq!(first.trace, again.trace, "seed {seed}");
    }
    assert_eq!(kinds.len(), 7, "{kinds:?}");
}

fn lies(text: &str) -> Option<Failure> {
    let mut setting = Setting::with(1, Trouble::Lies);
    setting.shape = Shape::small(1);
    let steps = text.split(';').map(|step| step.parse().unwrap());
    run_steps(&setting, steps.collect(), &Seen::default()).failure
}

/// What cannot be noticed is not held against the file system: a lost write of file data, and a
/// lost batch at the journal's end.
#[test]
fn a_lost_write_of_data_or_of_the_last_batch_is_excused() {
    for seed in 1..6 {
        for text in [
            "create f; write f 0 9000 1; sync; lose-writes 0 1; write f 0 4096 2; fsync f",
            "create f; write f 0 9000 1; sync; misdirect-writes 0 1; write f 0 4096 2; fsync f",
            "create f; sync; lose-journal-writes 0 1; create g; sync",
        ] {
            let failure = lies(&format!("{text}; recover {seed}"));
            assert!(failure.is_none(), "{text}: {}", failure.unwrap());
        }
    }
}

/// A lost batch that a later one follows must be noticed. Where it is not, the oracle does.
#[test]
fn a_lost_batch_that_a_later_one_follows_is_not_excused() {
    let text = "create f; sync; lose-journal-writes 0 1; create g; sync; create h; sync; recover 3";
    assert!(lies(text).is_none());
    base::canary::plant(Some(Canary::SilentTruncation));
    let failure = lies(text);
    base::canary::plant(None);
    assert!(failure.is_some());
}

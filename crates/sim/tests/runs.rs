//! Short runs of every mode. `SHEAF_SEEDS=100-200` runs other seeds.

use sim::explore::Seen;
use sim::random::run_seed;
use sim::run;
use sim::sequences::Plan;

fn seeds(default: &str) -> std::ops::RangeInclusive<u64> {
    let range = std::env::var("SHEAF_SEEDS").unwrap_or(default.into());
    let (first, last) = range.split_once('-').unwrap_or((&range, &range));
    first.parse().unwrap()..=last.parse().unwrap()
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
    for seed in [0, 3, 5, 8] {
        let (first, again) = (run_seed(seed, &seen), run_seed(seed, &seen));
        assert_eq!(first.steps, again.steps);
        assert_ne!(first.trace, 0);
        assert_eq!(first.trace, again.trace, "seed {seed}");
    }
}

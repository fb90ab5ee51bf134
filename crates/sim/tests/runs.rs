//! Short runs of every mode. `SHEAF_SEEDS=100-200` runs other seeds.

use base::canary::Canary;
use base::rng::Rng;
use device::sim::Survival;
use sim::drive::Driver;
use sim::explore::{Failure, Seen};
use sim::random::{run_seed, run_steps};
use sim::run;
use sim::sequences::Plan;
use sim::setting::{Setting, Trouble};
use sim::world::{Image, Machine, Shape};

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

/// Any error was excused once a device had lied, also where another copy of what it had lied about is good.
#[test]
fn rot_at_one_end_of_a_device_is_no_excuse() {
    let fails =
        |seed: &u64| lies(&format!("create f; sync; rot-end 0 {seed}; recover 3")).is_some();
    assert_eq!((0..16).find(fails), None);
    base::canary::plant(Some(Canary::SecondCopyIgnored));
    let found = (0..16).find(fails);
    base::canary::plant(None);
    assert!(found.is_some());
}

/// Files were held by their paths alone: one that had lost its last name was not touched again before it was gone.
#[test]
fn a_held_file_is_used_without_a_name() {
    let image = Image::format(&Shape::small(2)).unwrap();
    let mut driver = Driver::fresh(Machine::new(&image, 1), true).unwrap();
    let run = |driver: &mut Driver, ops: &[&str]| {
        for op in ops {
            driver.run(&op.parse().unwrap()).unwrap();
        }
    };
    run(
        &mut driver,
        &["create f", "write f 0 20000 1", "sync", "hold f"],
    );
    let full = driver.fs().statfs().blocks_free;
    let id = driver.oracle.now().file("f").unwrap();
    run(&mut driver, &["unlink f"]);
    assert_eq!(driver.oracle.orphans(), [id]);
    let held = |op: &str| op.replace('@', &format!("@{id}"));
    let ops = ["write @ 9000 30000 2", "truncate @ 38000", "fsync @"].map(held);
    run(&mut driver, &ops.each_ref().map(String::as_str));
    assert_eq!(driver.oracle.content(id).len(), 38_000);
    // The fsync has promised that the file has no name.
    let crashed = driver
        .machine
        .point()
        .crash(Survival::None, &mut Rng::new(1));
    let machine = Machine::after(&Shape::small(2), crashed, driver.machine.now_ns());
    let after = Driver::recover(machine, &driver.oracle).unwrap();
    assert!(after.fs().lookup(fs::ROOT, b"f").is_err());
    run(&mut driver, &[&held("release @"), "sync"]);
    assert!(driver.oracle.orphans().is_empty());
    assert!(
        driver.fs().statfs().blocks_free > full,
        "its blocks are free"
    );
}

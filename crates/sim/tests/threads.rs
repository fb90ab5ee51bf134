//! Threads under the seeded scheduler.

use sim::threads::{Plan, run};

fn short(seed: u64) -> Plan {
    Plan {
        cycles: 2,
        ..Plan::new(seed)
    }
}

#[test]
fn threads_in_any_order_leave_what_each_was_promised() {
    let (mut cuts, mut lied) = (0, 0);
    for seed in 1..24 {
        match run(&short(seed), false) {
            Ok(outcome) => (cuts, lied) = (cuts + outcome.cuts, lied + outcome.lied),
            Err(failure) => panic!("{}\n{failure}", short(seed).replay()),
        }
    }
    assert!((1..cuts).contains(&lied), "{lied} of {cuts}");
}

#[test]
fn a_seed_repeats_every_operation_of_the_devices() {
    for seed in 1..6 {
        let first = run(&short(seed), false).map_err(|f| f.to_string());
        let second = run(&short(seed), false).map_err(|f| f.to_string());
        assert_eq!(first, second);
        assert_ne!(first.unwrap().trace, 0);
    }
}

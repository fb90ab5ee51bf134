//! Times and change cookies on a clock with ticks.

use base::canary::{Canary, plant};

#[test]
fn times_and_cookies_are_as_they_must_be() {
    for seed in 1..60 {
        sim::stamps::run(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

#[test]
fn a_directorys_time_tells_of_its_names() {
    for seed in 1..150 {
        sim::stamps::crowd(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

#[test]
fn each_breakage_of_times_is_found() {
    for canary in [
        Canary::FloorNotRaised,
        Canary::LookForgotten,
        Canary::TimesNotPersisted,
        Canary::CookiesGoOn,
    ] {
        plant(Some(canary));
        let found = (1..200).find(|seed| sim::stamps::run(*seed).is_err());
        plant(None);
        assert!(found.is_some(), "{} survives", canary.name());
    }
    for canary in [Canary::LookNotSeen, Canary::MergesInLogOrder] {
        plant(Some(canary));
        let found = (1..1000).find(|seed| sim::stamps::crowd(*seed).is_err());
        plant(None);
        println!("{}: found by seed {found:?}", canary.name());
        assert!(found.is_some(), "{} survives", canary.name());
    }
}

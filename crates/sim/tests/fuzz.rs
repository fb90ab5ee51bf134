//! The fuzz targets over their corpora; `cargo xtask test --only fuzz` goes on with mutations.

use base::canary::Canary;
use sim::fuzz::{self, Target};
use std::path::Path;
use std::time::Duration;

fn corpora() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

#[test]
fn the_corpora_find_nothing() {
    for target in Target::ALL {
        let corpus = fuzz::corpus(&corpora(), target).unwrap();
        assert!(!corpus.is_empty());
        let outcome = fuzz::run(target, &corpus, 1, Duration::ZERO);
        assert!(outcome.found.is_none(), "{outcome:?}");
        assert_eq!(outcome.inputs, corpus.len() as u64);
        assert_eq!(outcome.mutations, 0);
    }
}

/// The corpus was all that ran where it took as long as there was time.
#[test]
fn any_time_is_enough_for_a_mutation() {
    let target = Target::Delta;
    let corpus = fuzz::corpus(&corpora(), target).unwrap();
    let outcome = fuzz::run(target, &corpus, 1, Duration::from_micros(1));
    assert!(outcome.found.is_none(), "{outcome:?}");
    assert!(outcome.mutations > 0);
    assert_eq!(outcome.inputs, corpus.len() as u64 + outcome.mutations);
}

/// What replay must refuse is in the corpus: without its checks the target panics.
#[test]
fn replay_that_takes_what_it_must_not_is_found() {
    let target = Target::JournalRecords;
    let corpus = fuzz::corpus(&corpora(), target).unwrap();
    for canary in [Canary::VersionGapAccepted, Canary::StaleBatchAccepted] {
        base::canary::plant(Some(canary));
        let outcome = fuzz::run(target, &corpus, 1, Duration::ZERO);
        base::canary::plant(None);
        assert!(outcome.found.is_some(), "{} was not found", canary.name());
    }
}

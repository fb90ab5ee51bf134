//! Fuzzing: bodies that take any bytes, and panic when something is wrong.
//!
//! `fuzz/` runs them under libFuzzer, guided by coverage. [`run`] runs the same bodies over the same
//! corpora with mutations drawn from a seed, without coverage to guide it and without tools
//! beyond cargo; `cargo xtask test --only fuzz` calls it.

mod image;
mod journal;
mod nodes;
mod sealed;

use base::clock::Clock;
use base::rng::Rng;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The largest input that a mutation makes, in bytes.
const INPUT_MAX: usize = 16 << 10;
/// An input that takes longer than this is reported like one that panics.
const SLOW: Duration = Duration::from_secs(10);

/// What is fuzzed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A damaged image is checked, opened, walked and changed.
    Image,
    /// The journal holds any bytes, behind a good checksum or not.
    JournalBytes,
    /// The journal holds records of good form, with gaps, repetitions and broken chains: replay
    /// takes exactly what it may.
    JournalRecords,
    /// A directory bucket and a map do the same.
    Bucket,
    /// Any node takes any delta, and stays what its image says.
    Delta,
}

impl Target {
    pub const ALL: [Target; 5] = [
        Target::Image,
        Target::JournalBytes,
        Target::JournalRecords,
        Target::Bucket,
        Target::Delta,
    ];

    /// Name of the corpus and of the libFuzzer target.
    pub fn name(self) -> &'static str {
        match self {
            Target::Image => "image",
            Target::JournalBytes => "journal_bytes",
            Target::JournalRecords => "journal_records",
            Target::Bucket => "bucket",
            Target::Delta => "delta",
        }
    }

    pub fn from_name(name: &str) -> Option<Target> {
        Target::ALL.into_iter().find(|t| t.name() == name)
    }

    /// Runs one input.
    ///
    /// # Panics
    /// When something is wrong: that is the finding.
    pub fn check(self, input: &[u8]) {
        match self {
            Target::Image => image::check(input),
            Target::JournalBytes => journal::check_bytes(input),
            Target::JournalRecords => journal::check_records(input),
            Target::Bucket => nodes::check_bucket(input),
            Target::Delta => nodes::check_delta(input),
        }
    }
}

/// An input that panicked, or took too long.
#[derive(Clone, Debug)]
pub struct Found {
    pub input: Vec<u8>,
    pub what: String,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub inputs: u64,
    /// Of them, those that are not in the corpus.
    pub mutations: u64,
    pub found: Option<Found>,
}

/// Runs a corpus, then mutations of it for so long, at least one if that is any time, or until an input is found.
pub fn run(target: Target, corpus: &[Vec<u8>], seed: u64, time: Duration) -> Outcome {
    let clock = Clock::real();
    let mut rng = Rng::new(seed);
    let mut outcome = Outcome::default();
    let mut end_ns = None;
    for next in 0.. {
        let before = clock.monotonic_ns();
        let input = match corpus.get(next) {
            Some(input) => input.clone(),
            // What the corpus takes is not theirs.
            None if before < *end_ns.get_or_insert(before + time.as_nanos() as u64) => {
                outcome.mutations += 1;
                mutate(corpus, &mut rng)
            }
            None => break,
        };
        let panicked = std::panic::catch_unwind(|| target.check(&input)).err();
        outcome.inputs += 1;
        let what = match panicked {
            Some(panic) => text_of(&*panic),
            None if clock.monotonic_ns() - before > SLOW.as_nanos() as u64 => "takes long".into(),
            None => continue,
        };
        outcome.found = Some(Found { input, what });
        break;
    }
    outcome
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
    text.unwrap_or_else(|| "panicked".into())
}

/// The corpus of a target in a folder of corpora, in the order of its file names.
pub fn corpus(dir: &Path, target: Target) -> std::io::Result<Vec<Vec<u8>>> {
    let entries = std::fs::read_dir(dir.join(target.name()))?;
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.map(|e| e.path()))
        .collect::<Result<_, _>>()?;
    paths.sort();
    paths.into_iter().map(std::fs::read).collect()
}

/// A few changes of an element of the corpus.
fn mutate(corpus: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    let mut input = match corpus.is_empty() {
        true => Vec::new(),
        false => rng.pick(corpus).clone(),
    };
    for _ in 0..1 + rng.below(6) {
        change(&mut input, corpus, rng);
    }
    input.truncate(INPUT_MAX);
    input
}

fn change(input: &mut Vec<u8>, corpus: &[Vec<u8>], rng: &mut Rng) {
    let len = input.len() as u64;
    let at = rng.below(len + 1) as usize;
    match rng.below(7) {
        0 if at < input.len() => input[at] ^= 1 << rng.below(8),
        1 if at < input.len() => {
            input[at] = *rng.pick(&[0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.clone().next_u64() as u8]);
        }
        2 if at + 8 <= input.len() => {
            let word = *rng.pick(&[0, 1, 255, 4096, u32::MAX as u64, 1 << 63, u64::MAX]);
            input[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        3 if at < input.len() => {
            let end = (at + 1 + rng.below(16) as usize).min(input.len());
            input.drain(at..end);
        }
        4 if !corpus.is_empty() => {
            let other = rng.pick(corpus).clone();
            input.truncate(at);
            input.extend_from_slice(&other[other.len().min(at)..]);
        }
        _ => {
            let mut bytes = vec![0; 1 + rng.below(12) as usize];
            rng.fill(&mut bytes);
            input.splice(at..at, bytes);
        }
    }
}

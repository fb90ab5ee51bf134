//! How long a file system takes to open when its journal is full and nobody unmounted it.
//!
//! 1. Sheaf in this process makes empty files in folders of 1,000, by many threads. Once there are as many as asked for, each new one has the
//!    oldest of its thread unlinked, so that nodes do not grow in number while the journal does. No checkpoint is made: a run of which one was is an
//!    error. The journal has twice the room, for a checkpoint begins when half of it is full.
//! 2. When as much is logged as asked for, all of it is committed and the file system is cut off: from then on nothing is written, not even by
//!    closing it.
//! 3. What is timed is all that opening takes: devices, labels, replay, and the checkpoint at its end. The store's own part is told besides, and
//!    its phases.
//!    What was made last must be there.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::clock::Clock;
use base::thread::try_parallel;
use engine::RecoveryPhases;
use fs::FsOptions;
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::runner::Stop;
use crate::target::{Arrangement, InProcess, Place, Remedies, Side, Storage};
use crate::{Error, interrupt};

const FILES_PER_FOLDER: u64 = 1000;
/// Operations between two looks at how much is logged.
const LOOK: u64 = 64;
/// Of the array, so that not its size limits what may be dirty: a 64th may. Blocks take no room until they are written.
const ARRAY_BYTES: u64 = 128 << 30;
const IMAGES: u64 = 4;
/// Longer than any run.
const NEVER: Duration = Duration::from_secs(24 * 3600);
/// A journal of so many bytes is recovered in so many seconds.
const BAR: (u64, f64) = (1 << 30, 2.0);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes that the journal holds when the file system is cut off.
    pub journal: u64,
    /// That there are then, about.
    pub files: u64,
    /// That make them.
    pub threads: usize,
    pub runs: usize,
    /// Memory, or a folder.
    pub storage: Storage,
    /// For all that Sheaf takes, in bytes.
    pub memory: usize,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if !(1 << 20..=4 << 30).contains(&self.journal) {
            return usage("--journal-size takes 1 MiB to 4 GiB");
        }
        if !(FILES_PER_FOLDER..=100_000_000).contains(&self.files) {
            return usage("--files takes a number from 1000 to 100000000");
        }
        if !(1..=128).contains(&self.threads) {
            return usage("--threads takes a number from 1 to 128");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        match self.storage {
            Storage::Memory | Storage::Dir(_) => Ok(()),
            _ => usage("recovery is measured on image files"),
        }
    }

    /// Of memory or a disk that images take: the journal, and what the checkpoint after recovery writes.
    fn written(&self) -> u64 {
        self.journal + self.journal / 4 + self.files * 512 + (64 << 20)
    }
}

/// What one run gave.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    logged: u64,
    opened_s: f64,
    store_s: f64,
    batches: u64,
    records: u64,
    deltas: u64,
    nodes: u64,
    phases: RecoveryPhases,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let place = Place::sparse(
        &options.storage,
        ARRAY_BYTES,
        options.written(),
        Remedies::less("--journal-size, --files"),
    )?;
    let mut outcomes = Vec::new();
    for run in 1..=options.runs {
        progress(&format!("a full journal, run {run} of {}", options.runs));
        let outcome = one_run(options, &place);
        outcomes.push(outcome.map_err(|error| error.on("recovery", "sheaf"))?);
    }
    let checks = checks(options, &outcomes);
    Ok(Report::new(
        "recovery",
        vec![row(options, &outcomes)],
        checks,
    ))
}

fn one_run(options: &Options, place: &Place) -> Result<Outcome, Error> {
    let devices = place.images(IMAGES, "device")?;
    let mut fs = FsOptions::default().with_memory(options.memory);
    fs.store.dirty_bytes = Some(usize::MAX);
    fs.store.checkpoint_interval = NEVER;
    let arrangement = Arrangement {
        // A checkpoint begins when half of it is full.
        journal: Some(2 * options.journal + (16 << 20)),
        slow: None,
        ..Arrangement::default()
    };
    let side = InProcess::arranged(&devices.paths, fs.clone(), &arrangement)?;
    let before = (side.newest_checkpoint(), side.logged_bytes());
    let last = fill(options, &side)?;
    side.commit()?;
    let logged = side.logged_bytes() - before.1;
    if side.newest_checkpoint() > before.0 {
        return Err(Error::Unable(
            "a checkpoint was made, because much was changed: want fewer --files or more memory (--cache-size)".to_owned(),
        ));
    }
    side.cut();
    open(&devices.paths, fs, logged, &last)
}

/// Times the opening, and looks for what was made last.
fn open(
    devices: &[PathBuf],
    options: FsOptions,
    logged: u64,
    last: &[String],
) -> Result<Outcome, Error> {
    let clock = Clock::real();
    let start = clock.monotonic_ns();
    let side = InProcess::open(devices, options)?;
    let opened = clock.monotonic_ns() - start;
    for path in last {
        side.stat(&side.root(), path)?;
    }
    let report = side.recovery().clone();
    side.close()?;
    if report.clean {
        return Err(Error::Unable("nothing had to be recovered".to_owned()));
    }
    Ok(Outcome {
        logged,
        opened_s: opened as f64 / 1e9,
        store_s: report.took.as_secs_f64(),
        batches: report.batches,
        records: report.records,
        deltas: report.deltas,
        nodes: report.nodes,
        phases: report.phases,
    })
}

/// Makes and unlinks files until enough is logged; the paths of each thread's last one.
fn fill(options: &Options, side: &InProcess) -> Result<Vec<String>, Error> {
    let until = side.logged_bytes() + options.journal;
    let (folders, stop) = (AtomicU64::new(0), Stop::default());
    let most = (options.files / FILES_PER_FOLDER / options.threads as u64).max(1) as usize;
    let results = try_parallel(options.threads, |_| {
        let mut own: VecDeque<(String, _)> = VecDeque::new();
        let mut last = String::new();
        for made in 0.. {
            let place = made % FILES_PER_FOLDER;
            if made % LOOK == 0 {
                stop.check()?;
                if made > 0 && side.logged_bytes() >= until {
                    break;
                }
            }
            if place == 0 {
                if own.len() > most {
                    own.pop_front();
                }
                let name = format!("folder{:07}", folders.fetch_add(1, Ordering::Relaxed));
                let made = side.make_dir(&side.root(), &name)?;
                own.push_back((name, made));
            }
            let name = format!("file{place:03}");
            if let Some((folder, dir)) = own.back() {
                side.create(dir, &name)?;
                last = format!("{folder}/{name}");
            }
            if let Some((_, oldest)) = own.front().filter(|_| own.len() > most) {
                side.unlink(oldest, &name)?;
            }
        }
        Ok(last)
    });
    results.map_err(Error::threads)?.into_iter().collect()
}

fn row(options: &Options, outcomes: &[Outcome]) -> Row {
    let of = |get: fn(&Outcome) -> f64| Spread::of(outcomes.iter().map(get));
    let rate = |outcome: &Outcome| outcome.logged as f64 / 1e6 / outcome.opened_s.max(1e-9);
    let rates = of(rate);
    let mut extra = Map::new();
    let mut put = |key: &str, get: fn(&Outcome) -> f64| {
        extra.insert(key.to_owned(), Value::from(of(get).median));
    };
    put("opened_s", |outcome| outcome.opened_s);
    put("store_s", |outcome| outcome.store_s);
    put("logged_bytes", |outcome| outcome.logged as f64);
    put("batches", |outcome| outcome.batches as f64);
    put("records", |outcome| outcome.records as f64);
    put("changes", |outcome| outcome.deltas as f64);
    put("nodes", |outcome| outcome.nodes as f64);
    put("verify_s", |outcome| outcome.phases.verify.as_secs_f64());
    put("read_s", |outcome| outcome.phases.read.as_secs_f64());
    put("parse_s", |outcome| outcome.phases.parse.as_secs_f64());
    put("link_s", |outcome| outcome.phases.link.as_secs_f64());
    put("apply_s", |outcome| outcome.phases.apply.as_secs_f64());
    put("adopt_s", |outcome| outcome.phases.adopt.as_secs_f64());
    put("checkpoint_s", |outcome| {
        outcome.phases.checkpoint.as_secs_f64()
    });
    put("records_per_s", |outcome| {
        outcome.records as f64 / outcome.opened_s.max(1e-9)
    });
    Row::note_rates(&mut extra, outcomes.iter().map(rate));
    extra.insert("files".to_owned(), Value::from(options.files));
    Row {
        name: "recovery".to_owned(),
        target: "sheaf".to_owned(),
        threads: options.threads,
        unit: "MB/s",
        median: rates.median,
        min: rates.min,
        max: rates.max,
        runs: outcomes.len(),
        extra,
    }
}

/// The bar, which is one of a journal of its size.
fn checks(options: &Options, outcomes: &[Outcome]) -> Vec<Check> {
    let (bytes, seconds) = BAR;
    if options.journal != bytes {
        return Vec::new();
    }
    let value = Spread::of(outcomes.iter().map(|outcome| outcome.opened_s)).median;
    let name = format!("recovery of {} MiB, seconds", bytes >> 20);
    vec![Check::new(name, value, Comparison::AtMost, seconds)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(home: &std::path::Path) -> Options {
        Options {
            journal: 4 << 20,
            files: 4000,
            threads: 2,
            runs: 2,
            storage: Storage::Dir(home.to_owned()),
            memory: 512 << 20,
        }
    }

    #[test]
    fn a_full_journal_is_recovered_and_nothing_is_lost() {
        let home = tempfile::tempdir().unwrap();
        let report = run(&options(home.path()), &|_| {}).unwrap();
        let row = &report.rows[0];
        let extra = |key: &str| row.extra[key].as_f64().unwrap();
        assert!(extra("logged_bytes") >= (4 << 20) as f64, "{row:?}");
        // A create or an unlink is a record of a hundred bytes or so.
        assert!(extra("records") > 10_000.0, "{row:?}");
        assert!(extra("store_s") > 0.0 && extra("opened_s") >= extra("store_s"));
        assert!(extra("changes") > extra("records"), "{row:?}");
        let phases = ["verify_s", "parse_s", "link_s", "apply_s", "checkpoint_s"].map(extra);
        assert!(phases.iter().all(|seconds| *seconds > 0.0), "{row:?}");
        assert!(phases.iter().sum::<f64>() <= extra("store_s"), "{row:?}");
        assert!(row.median > 0.0 && row.runs == 2);
        assert!(report.checks.is_empty());
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_journal_of_the_bar_is_judged() {
        let options = Options {
            journal: 1 << 30,
            ..options(std::path::Path::new("/"))
        };
        let outcome = Outcome {
            logged: 1 << 30,
            opened_s: 2.5,
            store_s: 2.0,
            batches: 1,
            records: 1,
            deltas: 1,
            nodes: 1,
            phases: RecoveryPhases::default(),
        };
        let found = checks(&options, &[outcome]);
        assert!(found.len() == 1 && found[0].value == 2.5 && !found[0].ok);
    }

    #[test]
    fn senseless_options_are_usage_errors() {
        let home = std::path::Path::new("/");
        let refused = |options: Options| matches!(options.check(), Err(Error::Usage(_)));
        assert!(!refused(options(home)));
        assert!(refused(Options {
            journal: 1 << 10,
            ..options(home)
        }));
        assert!(refused(Options {
            files: 10,
            ..options(home)
        }));
    }
}

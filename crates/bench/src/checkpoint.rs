//! Whether operations notice that checkpoints are made, and what many checkpoint threads do for them.
//!
//! 1. Sheaf in this process, on devices in memory that take a set time for each request. Threads make empty files, each in
//!    folders of its own of 1,000, and unlink the oldest once there are 20 folders, until ten times as much has been logged as the
//!    journal holds. So what there is stays the same, and a checkpoint has most of what was made since the last to write.
//! 2. So does a file system whose journal holds all of that and which makes no checkpoint: the rate that
//!    checkpoints are measured by. A run of it that made one all the same is an error.
//! 3. There is no counterpart of a kernel file system's: none can be put on these devices.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use device::Latency;
use fs::FsOptions;
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::meter::Meter;
use crate::runner::{self, Background, Load, Operation, Stop, Window};
use crate::target::{Arrangement, InProcess, Place, Side, Slow, Storage};
use crate::timing::{Latencies, Summary};
use crate::{Error, interrupt};

/// Logged in a run, in journals.
const JOURNALS: u64 = 10;
const FILES_PER_FOLDER: u64 = 1000;
/// Of all threads together, with files in them.
const FOLDERS: u64 = 20;
/// Of the array, so that not its size limits what may be dirty: a 64th may. Blocks take no memory until they are
/// written.
const ARRAY_BYTES: u64 = 128 << 30;
/// Memory that what a run writes may take: records, and each image and table page once or more.
const WRITTEN_JOURNALS: u64 = 60;
/// Longer than any run.
const NEVER: Duration = Duration::from_secs(24 * 3600);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers of checkpoint threads.
    pub workers: Vec<usize>,
    /// Threads that make files.
    pub threads: usize,
    /// Size of the journal in bytes.
    pub journal: u64,
    pub devices: usize,
    pub latency: Latency,
    pub runs: usize,
    /// For all that Sheaf takes, in bytes.
    pub memory: usize,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if self.workers.is_empty() || self.workers.iter().any(|n| !(1..=64).contains(n)) {
            return usage("--workers takes numbers from 1 to 64");
        }
        if !(1..=128).contains(&self.threads) {
            return usage("--threads takes a number from 1 to 128");
        }
        if !(4 << 20..=1 << 30).contains(&self.journal) {
            return usage("--journal-size takes 4 MiB to 1 GiB");
        }
        crate::fsync::check_slow(&self.latency, self.devices)?;
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        Ok(())
    }
}

/// How the file system of one series is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// So many checkpoint threads.
    Workers(usize),
    /// Nothing is reclaimed.
    Endless,
}

impl Kind {
    fn name(self) -> String {
        match self {
            Kind::Workers(workers) => format!("{workers} workers"),
            Kind::Endless => "no checkpoint".to_owned(),
        }
    }
}

/// What one run gave.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    rate: f64,
    times: Summary,
    checkpoints: u64,
    cpu_us: f64,
    logged: f64,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    // What runs write must fit; the array as a whole does not.
    let place = Place::sparse(
        &Storage::Memory,
        ARRAY_BYTES,
        options.journal * WRITTEN_JOURNALS,
    )?;
    let workers = options.workers.iter().map(|&n| Kind::Workers(n));
    let kinds = workers.chain([Kind::Endless]);
    let mut all: Vec<(Kind, Vec<Outcome>)> = kinds.map(|kind| (kind, Vec::new())).collect();
    for run in 1..=options.runs {
        for (kind, outcomes) in &mut all {
            let name = kind.name();
            progress(&format!("{name}, run {run} of {}", options.runs));
            let outcome = one_run(options, &place, *kind);
            outcomes.push(outcome.map_err(|error| error.on("checkpoint", &name))?);
        }
    }
    let rows: Vec<Row> = all
        .iter()
        .map(|(kind, runs)| row(options, *kind, runs))
        .collect();
    let checks = checks(options, &rows);
    Ok(Report::new("checkpoint", rows, checks))
}

fn one_run(options: &Options, place: &Place, kind: Kind) -> Result<Outcome, Error> {
    let devices = place.images(options.devices as u64, "device")?;
    let mut fs = FsOptions::default().with_memory(options.memory);
    let mut journal = options.journal;
    match kind {
        Kind::Workers(workers) => fs.store.workers = workers,
        Kind::Endless => {
            // A checkpoint begins when half of it is full.
            journal *= 2 * JOURNALS + 4;
            fs.store.dirty_bytes = Some(usize::MAX);
            fs.store.checkpoint_interval = NEVER;
        }
    }
    let arrangement = Arrangement {
        journal: Some(journal),
        slow: Some(Slow::new(options.latency)),
    };
    let side = InProcess::arranged(&devices.paths, fs, &arrangement)?;
    let before = side.newest_checkpoint();
    let latencies = Latencies::new();
    let load = Creates {
        side: &side,
        threads: options.threads as u64,
        until: side.logged_bytes() + options.journal * JOURNALS,
        latencies: &latencies,
        folders: AtomicU64::new(0),
    };
    let logged = side.logged_bytes();
    let window = Window {
        time: NEVER,
        threads: options.threads,
        operations: u64::MAX,
        cpus: Vec::new(),
    };
    let measured = runner::measure(&window, &load, &Meter::new(&[])?)?;
    let logged = side.logged_bytes() - logged;
    let checkpoints = side.newest_checkpoint() - before;
    if kind == Kind::Endless && checkpoints > 0 {
        return Err(Error::Unable(format!(
            "{checkpoints} checkpoints were made where none should be, because much was changed: want a smaller \
             journal (--journal-size)"
        )));
    }
    side.close()?;
    Ok(Outcome {
        rate: measured.rate(),
        times: latencies.summary(),
        checkpoints,
        cpu_us: measured.cpu_us(),
        logged: logged as f64 / measured.operations.max(1) as f64,
    })
}

/// Threads that make and unlink empty files until enough is logged.
struct Creates<'a> {
    side: &'a InProcess,
    threads: u64,
    /// Of the journal's position.
    until: u64,
    latencies: &'a Latencies,
    folders: AtomicU64,
}

impl Load for Creates<'_> {
    fn prepare(&self, _thread: usize, _stop: &Stop) -> Result<Operation<'_>, Error> {
        let mut own = self.latencies.own();
        let most = (FOLDERS / self.threads).max(1) as usize;
        let (mut made, mut folders) = (0, VecDeque::new());
        Ok(Box::new(move || {
            let place = made % FILES_PER_FOLDER;
            if place == 0 {
                let number = self.folders.fetch_add(1, Ordering::Relaxed);
                let name = format!("folder{number:06}");
                if folders.len() > most {
                    folders.pop_front();
                }
                folders.push_back(self.side.make_dir(&self.side.root(), &name)?);
            }
            // What others log meanwhile is seen a little late.
            if made % (64 / self.threads).max(1) == 0 && self.side.logged_bytes() >= self.until {
                return Ok(0);
            }
            made += 1;
            let (Some(newest), Some(oldest)) = (folders.back(), folders.front()) else {
                return Ok(0);
            };
            let name = format!("file{place:03}");
            let created = own.time(|| self.side.create(newest, &name).map(drop))?;
            match folders.len() > most {
                true => Ok(created + own.time(|| self.side.unlink(oldest, &name))?),
                false => Ok(created),
            }
        }))
    }

    fn settle(&self) -> Result<(), Error> {
        self.side.sync()
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        self.side.cpu_ns()
    }

    fn background(&self) -> Option<Background> {
        self.side.background()
    }
}

fn row(options: &Options, kind: Kind, outcomes: &[Outcome]) -> Row {
    let of = |get: fn(&Outcome) -> f64| Spread::of(outcomes.iter().map(get));
    let rates = of(|outcome| outcome.rate);
    let mut extra = Map::new();
    let mut put = |key: &str, get: fn(&Outcome) -> f64| {
        extra.insert(key.to_owned(), Value::from(of(get).median));
    };
    put("p50_us", |outcome| outcome.times.p50_us);
    put("p99_us", |outcome| outcome.times.p99_us);
    put("p999_us", |outcome| outcome.times.p999_us);
    put("checkpoints", |outcome| outcome.checkpoints as f64);
    put("cpu_us_per_op", |outcome| outcome.cpu_us);
    put("logged_bytes_per_op", |outcome| outcome.logged);
    extra.insert("journal_bytes".to_owned(), Value::from(options.journal));
    extra.insert("devices".to_owned(), Value::from(options.devices));
    let us = |time: Duration| Value::from(time.as_nanos() as f64 / 1e3);
    extra.insert("service_us".to_owned(), us(options.latency.service));
    extra.insert("flush_us".to_owned(), us(options.latency.flush));
    extra.insert("depth".to_owned(), Value::from(options.latency.depth));
    Row {
        name: kind.name(),
        target: "sheaf".to_owned(),
        threads: options.threads,
        unit: "ops/s",
        median: rates.median,
        min: rates.min,
        max: rates.max,
        runs: outcomes.len(),
        extra,
    }
}

fn checks(options: &Options, rows: &[Row]) -> Vec<Check> {
    let row = |kind: Kind| rows.iter().find(|row| row.name == kind.name());
    let most = options.workers.iter().copied().max().unwrap_or(1);
    let (Some(many), Some(endless)) = (row(Kind::Workers(most)), row(Kind::Endless)) else {
        return Vec::new();
    };
    let tail = |row: &Row| {
        row.extra
            .get("p999_us")
            .and_then(Value::as_f64)
            .unwrap_or(f64::NAN)
    };
    let name = |what: &str| format!("{} vs {what}", many.name);
    let mut checks = Vec::new();
    if let Some(one) = row(Kind::Workers(1)).filter(|_| most > 1) {
        let value = many.median / one.median;
        checks.push(Check::new(name("1"), value, Comparison::AtLeast, 1.92));
    }
    let value = many.median / endless.median;
    checks.push(Check::new(
        name("no checkpoint"),
        value,
        Comparison::AtLeast,
        0.9,
    ));
    let value = tail(many) / tail(endless);
    checks.push(Check::new(
        name("no checkpoint, p99.9"),
        value,
        Comparison::AtMost,
        2.0,
    ));
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            workers: vec![1, 2],
            threads: 2,
            journal: 4 << 20,
            devices: 2,
            latency: Latency {
                service: Duration::from_micros(1),
                flush: Duration::from_micros(1),
                depth: 32,
            },
            runs: 1,
            memory: 512 << 20,
        }
    }

    #[test]
    fn checkpoints_are_made_but_for_the_endless_journal() {
        let report = run(&options(), &|_| {}).unwrap();
        let names: Vec<&str> = report.rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["1 workers", "2 workers", "no checkpoint"]);
        let checkpoints = |row: &Row| row.extra["checkpoints"].as_f64().unwrap();
        assert!(checkpoints(&report.rows[0]) >= 5.0, "{:?}", report.rows[0]);
        assert_eq!(checkpoints(&report.rows[2]), 0.0);
        assert_eq!(report.checks.len(), 3);
    }

    #[test]
    fn senseless_options_are_usage_errors() {
        let refused = |options: Options| matches!(options.check(), Err(Error::Usage(_)));
        assert!(!refused(options()));
        assert!(refused(Options {
            workers: vec![0],
            ..options()
        }));
        assert!(refused(Options {
            journal: 1 << 20,
            ..options()
        }));
    }
}

//! A model for core counts that this machine does not have.
//!
//! In a build that records (feature `trace`) each operation of a workload is recorded as what it
//! computes, and the locks, atomics and counts of references that it touches ([`record`], [`steps`]).
//! A discrete-event simulation ([`simulate`]) replays the recordings on any number of cores, with
//! costs for lines and locks that come from publications ([`costs`]), and with the commits and
//! checkpoints that the operations make. It is compared with what one and two threads are measured to
//! do in the same run, and has to show what is known of a store with one lock for all ([`global_lock`]).
//!
//! What it leaves out: the allocator's locks, what cores share of caches and memory bandwidth,
//! threads that lose their core while they hold a lock, and lines that are shared without being
//! atomics, counts or locks (what a lock protects counts as a fixed number of lines).

mod costs;
mod global_lock;
mod names;
mod record;
mod simulate;
mod steps;

use std::collections::BTreeMap;
use std::time::Duration;

use fs::FsOptions;
use serde_json::{Map, Value, json};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::fxmark::{self, EMPTY_SHARED, Run, Workload};
use crate::meter::Meter;
use crate::runner::{self, Load, Measured, Operation, Stop, Window};
use crate::target::{InProcess, Place, Remedies, Side, Storage};
use crate::{Error, interrupt};
use costs::Costs;
use global_lock::{GlobalLock, NUMBERS};
use record::{Bad, Plan};
use simulate::{CORES_MAX, Devices, Machine, Outcome};
use steps::{Scale, Stage, Step, Trace};

/// Bytes of all image files together.
const BYTES: u64 = 3 << 30;
/// Files of a thread before its operations are recorded.
const BEFORE: u64 = 500;
/// Operations that all threads are recorded with together from one commit to the next, and least of one: some 3 MB of
/// records, where a store commits 4 MiB at once.
const RECORDED: u64 = 10_000;
const RECORDED_LEAST: u64 = 100;
/// Operations from one checkpoint to the next, so many that some 30 MB of records are in the journal then. A store
/// on an array of this size makes one when there are 32 MiB, on large arrays 512: a recording of so many takes too much memory.
const CYCLE: u64 = 120_000;
/// Of the store with one lock each operation is a thousand events.
const RECORDED_BAD: u64 = 24;
/// Limits of a store that is measured, so small that commits and checkpoints are many.
const STAGING: usize = 1 << 20;
const DIRTY: usize = 4 << 20;
/// The model may be off by this factor.
const TOLERANCE: f64 = 1.25;
/// Cores of which the bars speak.
const CORES: usize = 40;
/// (workload, how much faster than one core).
const BARS: [(&str, f64); 4] = [
    ("MWCL", 32.0),
    ("MWUL", 32.0),
    ("MWCM-empty", 16.0),
    ("MWUM", 16.0),
];
/// Lines in the list of work.
const LISTED: usize = 25;

const WORKLOADS: [&str; 6] = ["MWCL", "MWUL", "MWCM-empty", "MWUM", "MWRL", "MRPL"];

/// What to model.
#[derive(Clone, Debug)]
pub struct Options {
    pub workloads: Vec<&'static Workload>,
    /// Numbers of cores.
    pub cores: Vec<usize>,
    pub runs: usize,
    /// Files that each thread has, or makes, where the model is compared with what is measured.
    pub pool: u64,
    pub storage: Storage,
    /// For all that Sheaf takes, in bytes.
    pub memory: usize,
}

/// The workloads with these names, in any case; without names those that the bars are about.
pub fn select(names: &[String]) -> Result<Vec<&'static Workload>, Error> {
    let all = WORKLOADS.map(str::to_owned);
    let names = match names.is_empty() {
        true => &all[..],
        false => names,
    };
    let mut selected = Vec::new();
    for name in names {
        let workload = match name.trim().eq_ignore_ascii_case(EMPTY_SHARED.name) {
            true => &EMPTY_SHARED,
            false => fxmark::select(std::slice::from_ref(name))?[0],
        };
        if !selected.contains(&workload) {
            selected.push(workload);
        }
    }
    Ok(selected)
}

/// 1 to 128.
pub fn default_cores() -> Vec<usize> {
    vec![1, 2, 4, 8, 16, 20, 32, 40, 64, 80, 128]
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if !base::trace::AVAILABLE {
            return Err(Error::Unable(
                "this program does not record what operations touch: run \
                 'cargo run --release --features trace -- bench scale' in a checkout"
                    .to_owned(),
            ));
        }
        let cores = |n: &usize| (1..=CORES_MAX).contains(n);
        if self.cores.is_empty() || !self.cores.iter().all(cores) {
            return usage("--cores takes numbers from 1 to 128");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        if !(1000..=200_000).contains(&self.pool) {
            return usage("--pool takes a number from 1000 to 200000");
        }
        Ok(())
    }
}

/// Measures, records and models. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let bench = Bench {
        options,
        place: Place::new(&options.storage, BYTES, false, Remedies::less(""))?,
        cpus: runner::allowed_cpus()?,
        scale: record::calibrate(),
        progress,
    };
    let mut rows = Vec::new();
    for workload in &options.workloads {
        bench.workload(workload, &Store::Sheaf(workload), &mut rows)?;
        if let Some(bad) = Bad::of(workload.name) {
            bench.workload(workload, &Store::GlobalLock(bad), &mut rows)?;
        }
    }
    let checks = checks(&rows);
    Ok(Report::new("scale", rows, checks))
}

/// What is measured and modelled.
enum Store {
    Sheaf(&'static Workload),
    GlobalLock(Bad),
}

impl Store {
    /// Targets of rows: measured, modelled for this machine, modelled.
    fn targets(&self) -> [&'static str; 3] {
        match self {
            Store::Sheaf(_) => ["sheaf", "modelled-here", "modelled"],
            Store::GlobalLock(_) => [
                "global-lock",
                "modelled-global-lock-here",
                "modelled-global-lock",
            ],
        }
    }
}

impl Store {
    fn costs(&self) -> Costs {
        match self {
            Store::Sheaf(_) => Costs::PUBLISHED,
            Store::GlobalLock(_) => Costs::KERNEL_MUTEX,
        }
    }
}

struct Bench<'a> {
    options: &'a Options,
    place: Place,
    cpus: Vec<usize>,
    scale: Scale,
    progress: &'a dyn Fn(&str),
}

impl Bench<'_> {
    fn workload(
        &self,
        workload: &Workload,
        store: &Store,
        rows: &mut Vec<Row>,
    ) -> Result<(), Error> {
        let [measured, here, modelled] = store.targets();
        let on = |target| move |error: Error| error.on(workload.name, target);
        for threads in [1, 2].into_iter().filter(|n| *n <= self.cpus.len()) {
            let (mut rates, mut cpu) = (Vec::new(), Vec::new());
            for run in 0..=self.options.runs {
                self.tell(workload, threads, measured);
                let window = self.measure(store, threads).map_err(on(measured))?;
                // The first warms up.
                if run > 0 {
                    rates.push(window.rate());
                    cpu.push(window.cpu_us());
                }
            }
            let mut extra = Map::new();
            extra.insert("cpu_us_per_op".to_owned(), rounded(Spread::of(cpu).median));
            rows.push(row(workload.name, measured, threads, &rates, extra));
            let mut rates = Vec::new();
            let mut extra = Map::new();
            for _ in 0..self.options.runs {
                self.tell(workload, threads, here);
                let trace = self.record(store, threads, true).map_err(on(here))?;
                let machine = Machine {
                    costs: store.costs(),
                    cpus: self.cpus.len(),
                    devices: Devices::Here,
                };
                let outcome = simulate::simulate(&trace, &machine);
                rates.push(outcome.rate);
                extra = shares(&trace, &outcome);
            }
            rows.push(row(workload.name, here, threads, &rates, extra));
        }
        let mut one_core = None;
        for &cores in &self.options.cores {
            let machine = Machine {
                costs: store.costs(),
                cpus: cores,
                devices: Devices::Modelled,
            };
            let mut best: Option<(Trace, Outcome)> = None;
            let mut rates = Vec::new();
            for _ in 0..self.options.runs {
                self.tell(workload, cores, modelled);
                let trace = self.record(store, cores, false).map_err(on(modelled))?;
                let outcome = simulate::simulate(&trace, &machine);
                rates.push(outcome.rate);
                if best
                    .as_ref()
                    .is_none_or(|(_, best)| best.rate < outcome.rate)
                {
                    best = Some((trace, outcome));
                }
            }
            let Some((trace, outcome)) = best else {
                continue;
            };
            let mut extra = shares(&trace, &outcome);
            extra.insert("event_ns".to_owned(), rounded(self.scale.event_ns));
            let rate = Spread::of(rates.iter().copied()).median;
            let one_core = *one_core.get_or_insert(rate / cores as f64);
            extra.insert("speedup".to_owned(), rounded(rate / one_core));
            extra.insert("costs".to_owned(), store.costs().json());
            if cores == CORES {
                extra.insert("lines".to_owned(), work_list(&trace, &outcome));
            }
            rows.push(row(workload.name, modelled, cores, &rates, extra));
        }
        Ok(())
    }

    fn tell(&self, workload: &Workload, threads: usize, target: &str) {
        (self.progress)(&format!("{}/{threads} {target}", workload.name));
    }

    /// A recording on so many cores; `compared`: by as many threads, as long and as large as what is measured.
    fn record(&self, store: &Store, threads: usize, compared: bool) -> Result<Trace, Error> {
        let many = threads as u64;
        let plan = match compared {
            true => Plan {
                threads,
                cpus: threads,
                operations: self.options.pool / 4 / many,
                cycle: 0,
                before: self.options.pool / 2,
            },
            false => {
                let taking_turns = threads * CORES.div_ceil(threads);
                Plan {
                    threads: taking_turns,
                    cpus: threads,
                    operations: (RECORDED / taking_turns as u64).max(RECORDED_LEAST),
                    cycle: CYCLE,
                    before: BEFORE,
                }
            }
        };
        let workload = match store {
            Store::Sheaf(workload) => *workload,
            Store::GlobalLock(bad) => {
                let operations = match compared {
                    true => RECORDED_BAD * 16,
                    false => RECORDED_BAD,
                };
                let plan = Plan {
                    threads,
                    operations,
                    ..plan
                };
                return record::global_lock(*bad, &plan, self.scale);
            }
        };
        let mut options = FsOptions::default().with_memory(self.options.memory);
        options.store.background = false;
        options.store.workers = 1;
        options.store.shards = match compared {
            true => self.cpus.len(),
            false => threads,
        };
        options.store.dirty_bytes = Some(256 << 20);
        let devices = self.place.array()?;
        let side = InProcess::with(&devices.paths, options)?;
        let trace = record::sheaf(&side, workload, &plan, self.scale)?;
        side.close()?;
        Ok(trace)
    }

    fn measure(&self, store: &Store, threads: usize) -> Result<Measured, Error> {
        let window = Window {
            time: Duration::from_secs(1),
            threads,
            operations: u64::MAX,
            cpus: self.cpus.clone(),
        };
        let meter = Meter::new(&[])?;
        let share = self.options.pool;
        match store {
            Store::Sheaf(workload) => {
                let mut options = FsOptions::default().with_memory(self.options.memory);
                options.store.staging_bytes = STAGING;
                options.store.dirty_bytes = Some(DIRTY);
                let devices = self.place.array()?;
                let side = InProcess::with(&devices.paths, options)?;
                let scale = fxmark::Scale {
                    threads,
                    pool: share * threads as u64,
                    branches: fxmark::BRANCHES,
                };
                let run = Run::prepare(&side, workload, scale)?;
                let load = Settled { side: &side, run };
                let measured = runner::measure(&window, &load, &meter)?;
                side.close()?;
                Ok(measured)
            }
            Store::GlobalLock(bad) => {
                let share = (2 * share).min((NUMBERS / 2 / threads) as u64);
                let store = GlobalLock::new(threads);
                let load = BadLoad {
                    store: &store,
                    bad: *bad,
                    share,
                };
                runner::measure(&window, &load, &meter)
            }
        }
    }
}

/// A workload that begins with nothing to commit and nothing to checkpoint.
struct Settled<'a> {
    side: &'a InProcess,
    run: Run<'a, InProcess>,
}

impl Load for Settled<'_> {
    fn prepare(&self, thread: usize, stop: &Stop) -> Result<Operation<'_>, Error> {
        self.run.prepare(thread, stop)
    }

    fn settle(&self) -> Result<(), Error> {
        self.side.settle()
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        self.side.cpu_ns()
    }
}

struct BadLoad<'a> {
    store: &'a GlobalLock,
    bad: Bad,
    share: u64,
}

impl Load for BadLoad<'_> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        self.bad.prepare(self.store, thread, self.share)?;
        Ok(self.bad.operation(self.store, thread, self.share))
    }

    fn settle(&self) -> Result<(), Error> {
        Ok(())
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(base::clock::process_cpu_ns())
    }
}

fn row(name: &str, target: &str, threads: usize, rates: &[f64], extra: Map<String, Value>) -> Row {
    let spread = Spread::of(rates.iter().copied());
    Row {
        name: name.to_owned(),
        target: target.to_owned(),
        threads,
        unit: "ops/s",
        median: spread.median,
        min: spread.min,
        max: spread.max,
        runs: rates.len(),
        extra,
    }
}

fn rounded(value: f64) -> Value {
    Value::from((value * 1000.0).round() / 1000.0)
}

/// Where an operation's time goes, in nanoseconds.
fn shares(trace: &Trace, outcome: &Outcome) -> Map<String, Value> {
    let spent = &outcome.spent;
    let each = |time: u64| time as f64 / 1000.0 / outcome.operations as f64;
    let mut extra = Map::new();
    let mut put = |key: &str, value| extra.insert(key.to_owned(), rounded(value));
    put("compute_ns", each(spent.compute));
    put("lines_ns", each(spent.lines.iter().sum()));
    put("locks_ns", each(spent.locks.iter().sum()));
    put("background_ns", each(spent.background));
    put("behind_ns", each(spent.behind));
    put("device_ns", each(spent.device));
    let lines: u64 = spent.lines.iter().sum();
    let cpu = each(spent.compute + lines + spent.background_all);
    put("cpu_us_per_op", cpu / 1000.0);
    put("device_busy", outcome.device_busy);
    let mut stages_of = Vec::new();
    let jobs = trace.jobs.iter().zip(&outcome.lasted);
    for ((job, lasted), name) in jobs.zip(["commit", "checkpoint"]) {
        let computed = |steps: &[Step]| -> f64 {
            let time = steps.iter().map(|step| match step {
                Step::Compute(time) => *time,
                _ => 0,
            });
            time.sum::<u64>() as f64 / 1000.0 / job.cycle as f64
        };
        let serial = |stage: &Stage| computed(&stage.serial);
        let parallel = |stage: &Stage| stage.parts.iter().map(|part| computed(part)).sum::<f64>();
        put(
            &format!("{name}_serial_ns"),
            job.stages.iter().map(serial).sum(),
        );
        put(
            &format!("{name}_parallel_ns"),
            job.stages.iter().map(parallel).sum(),
        );
        // That of the longest part bounds how fast many get.
        let longest = |stage: &Stage| {
            let parts = stage.parts.iter().map(|part| computed(part));
            parts.fold(0.0, f64::max)
        };
        let stage = |(stage, lasted): (&Stage, &u64)| {
            json!({
                "name": stage.name,
                "serial_ns": serial(stage),
                "parallel_ns": parallel(stage),
                "longest_ns": longest(stage),
                "lasts_ns": each(*lasted),
            })
        };
        let stages: Value = job.stages.iter().zip(lasted).map(stage).collect();
        stages_of.push((format!("{name}_stages"), stages));
    }
    let recorded: usize = trace.threads.iter().map(Vec::len).sum();
    let writes: u64 = trace.lines.iter().map(|line| line.writes).sum();
    put("shared_writes", writes as f64 / recorded.max(1) as f64);
    extra.extend(stages_of);
    extra.insert("interruptions".to_owned(), trace.interruptions.into());
    extra
}

/// Lines and locks by what they cost an operation, those of one name together.
fn work_list(trace: &Trace, outcome: &Outcome) -> Value {
    #[derive(Default)]
    struct Entry {
        instances: u64,
        writes: u64,
        exclusive: u64,
        transfers: u64,
        time: u64,
    }
    let mut entries: BTreeMap<&str, Entry> = BTreeMap::new();
    let spent = &outcome.spent;
    for (i, line) in trace.lines.iter().enumerate() {
        let entry = entries.entry(&line.name).or_default();
        entry.instances += 1;
        entry.writes += line.writes;
        entry.transfers += spent.transfers[i];
        entry.time += spent.lines[i];
    }
    for (i, lock) in trace.locks.iter().enumerate() {
        let entry = entries.entry(&lock.name).or_default();
        entry.exclusive += lock.exclusive;
        entry.time += spent.locks[i];
    }
    let recorded: usize = trace.threads.iter().map(Vec::len).sum();
    let mut list: Vec<(&str, Entry)> = entries.into_iter().collect();
    list.retain(|(_, entry)| entry.writes > 0 || entry.time > 0);
    list.sort_by_key(|(_, entry)| std::cmp::Reverse(entry.time));
    let operations = outcome.operations as f64;
    let value = |(name, entry): (&str, Entry)| {
        json!({
            "name": name,
            "instances": entry.instances,
            "writes_per_op": rounded(entry.writes as f64 / recorded.max(1) as f64),
            "exclusive_per_op": rounded(entry.exclusive as f64 / recorded.max(1) as f64),
            "transfers_per_op": rounded(entry.transfers as f64 / operations),
            "ns_per_op": rounded(entry.time as f64 / 1000.0 / operations),
        })
    };
    Value::from(list.into_iter().take(LISTED).map(value).collect::<Vec<_>>())
}

/// The bars that these rows answer for. What the model says of many cores of a workload holds nothing where it is wrong about this machine.
fn checks(rows: &[Row]) -> Vec<Check> {
    // What else the machine does makes a recording slower, never faster.
    let fastest = |name: &str, target: &str, threads: usize| {
        let same = |row: &&Row| row.name == name && row.target == target && row.threads == threads;
        rows.iter().find(same).map(|row| row.max)
    };
    let (validations, missed) = validations(rows);
    let judged = |check: Check, of: (&str, &'static str)| match missed.contains(&of) {
        true => check.doubted("not validated"),
        false => check,
    };
    let mut checks = Vec::new();
    for (name, bar) in BARS {
        let (one, many) = (
            fastest(name, "modelled", 1),
            fastest(name, "modelled", CORES),
        );
        if let (Some(one), Some(many)) = (one, many) {
            let text = format!("{name} modelled, {CORES} cores vs one");
            let check = Check::new(text, many / one, Comparison::AtLeast, bar);
            checks.push(judged(check, (name, "modelled-here")));
        }
    }
    let bad = "modelled-global-lock";
    if let (Some(one), Some(many)) = (fastest("MWUL", bad, 1), fastest("MWUL", bad, CORES)) {
        let text = format!("MWUL {bad}, {CORES} cores vs one");
        let check = Check::new(text, many / one, Comparison::AtMost, 1.0);
        checks.push(judged(check, ("MWUL", "modelled-global-lock-here")));
    }
    checks.extend(validations);
    checks
}

/// What the model says of this machine beside what was measured here; and of which workloads and targets it was wrong by too much.
fn validations(rows: &[Row]) -> (Vec<Check>, Vec<(&str, &'static str)>) {
    let (mut checks, mut missed) = (Vec::new(), Vec::new());
    let median = |name: &str, target: &str, threads: usize| {
        let same = |row: &&Row| row.name == name && row.target == target && row.threads == threads;
        rows.iter().find(same).map(|row| row.median)
    };
    for (measured, modelled) in [
        ("sheaf", "modelled-here"),
        ("global-lock", "modelled-global-lock-here"),
    ] {
        for row in rows.iter().filter(|row| row.target == measured) {
            let Some(predicted) = median(&row.name, modelled, row.threads) else {
                continue;
            };
            let ratio = predicted / row.median;
            let off = ratio.max(1.0 / ratio);
            let which = if ratio < 1.0 { "too slow" } else { "too fast" };
            let text = format!(
                "{}/{} {modelled} vs {measured}, {which}",
                row.name, row.threads
            );
            let check = Check::new(text, off, Comparison::AtMost, TOLERANCE);
            if !check.ok {
                missed.push((row.name.as_str(), modelled));
            }
            checks.push(check);
        }
    }
    (checks, missed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_are_those_of_the_bars_or_those_asked_for() {
        let names = |asked: &[&str]| -> Vec<&str> {
            let asked: Vec<String> = asked.iter().map(|&name| name.to_owned()).collect();
            let selected = select(&asked).unwrap();
            selected.iter().map(|workload| workload.name).collect()
        };
        assert_eq!(names(&[]), WORKLOADS);
        assert_eq!(names(&["mwcm-EMPTY", "MRPH"]), ["MWCM-empty", "MRPH"]);
        assert!(select(&["MWXX".to_owned()]).is_err());
    }

    #[test]
    fn bars_are_computed_from_rows_that_are_there() {
        let row = |name, target, threads, rate| row(name, target, threads, &[rate], Map::new());
        let rows = [
            row("MWCL", "sheaf", 1, 100.0),
            row("MWCL", "modelled-here", 1, 80.0),
            row("MWCL", "modelled", 1, 100.0),
            row("MWCL", "modelled", 40, 3300.0),
            row("MWUL", "modelled-global-lock", 1, 100.0),
            row("MWUL", "modelled-global-lock", 40, 60.0),
        ];
        let found = checks(&rows);
        let found: Vec<_> = found
            .iter()
            .map(|c| (c.name.as_str(), c.value, c.ok))
            .collect();
        assert_eq!(
            found,
            [
                ("MWCL modelled, 40 cores vs one", 33.0, true),
                ("MWUL modelled-global-lock, 40 cores vs one", 0.6, true),
                ("MWCL/1 modelled-here vs sheaf, too slow", 1.25, true),
            ]
        );
    }

    #[test]
    fn a_model_that_is_wrong_about_this_machine_holds_no_bar() {
        let row = |name, target, threads, rate| row(name, target, threads, &[rate], Map::new());
        let rows = [
            row("MWCL", "sheaf", 1, 100.0),
            row("MWCL", "modelled-here", 1, 270.0),
            row("MWCL", "modelled", 1, 100.0),
            row("MWCL", "modelled", 40, 3300.0),
            row("MWUL", "sheaf", 1, 100.0),
            row("MWUL", "modelled-here", 1, 100.0),
            row("MWUL", "modelled", 1, 100.0),
            row("MWUL", "modelled", 40, 3300.0),
        ];
        let found = checks(&rows);
        let found: Vec<_> = found.iter().map(|c| (c.ok, c.verdict())).collect();
        let wanted = [
            (false, "not validated"),
            (true, "holds"),
            (false, "missed"),
            (true, "holds"),
        ];
        assert_eq!(found, wanted.map(|(ok, verdict)| (ok, verdict.to_owned())));
    }

    /// What follows needs something to have been recorded.
    #[cfg(feature = "trace")]
    mod recorded {
        use super::*;

        const PLAN: Plan = Plan {
            threads: 4,
            cpus: 4,
            operations: 50,
            cycle: 0,
            before: 100,
        };
        const OPERATIONS: u64 = PLAN.operations * PLAN.threads as u64;

        fn machine(cpus: usize) -> Machine {
            Machine {
                costs: Costs::PUBLISHED,
                cpus,
                devices: Devices::Modelled,
            }
        }

        fn record(name: &str, plan: &Plan) -> Trace {
            let dir = tempfile::tempdir().unwrap();
            let image = dir.path().join("image");
            device::create_image(&image, 256 << 20).unwrap();
            let mut options = FsOptions::default().with_memory(64 << 20);
            options.store.background = false;
            options.store.shards = plan.threads;
            options.store.workers = 1;
            let side = InProcess::with(&[image], options).unwrap();
            let workload = select(&[name.to_owned()]).unwrap()[0];
            let trace = record::sheaf(&side, workload, plan, record::calibrate()).unwrap();
            side.close().unwrap();
            trace
        }

        #[test]
        fn creates_are_recorded_with_their_commit_and_checkpoint() {
            let trace = record("MWCL", &PLAN);
            assert!(trace.threads.iter().all(|thread| thread.len() == 50));
            assert_eq!(trace.jobs.len(), 2);
            // Each file and each directory at least is captured, under its lock.
            let mut stages = trace.jobs[1].stages.iter();
            let capture = stages.find(|stage| stage.name == "capture").unwrap();
            let steps = capture.parts.iter().flatten();
            let locks = steps.filter(|step| matches!(step, steps::Step::Lock { .. }));
            assert!(locks.count() as u64 > OPERATIONS);
            let device = |job: &steps::Job| {
                let all = job.stages.iter().flat_map(|stage| &stage.serial);
                let bytes = all.map(|step| match step {
                    steps::Step::Device { bytes, .. } => *bytes,
                    _ => 0,
                });
                bytes.sum::<u64>()
            };
            assert!(device(&trace.jobs[0]) > 50 * trace.jobs[0].cycle);
            let outcome = simulate::simulate(&trace, &machine(4));
            assert!(outcome.rate > 1000.0);
        }

        #[test]
        fn a_shared_directory_is_a_shared_lock_and_a_private_one_is_not() {
            let inodes = |name| {
                let trace = record(name, &PLAN);
                let inode = |lock: &&steps::Named| lock.name == "lock: inode node";
                let writes = trace.locks.iter().filter(inode).map(|lock| lock.writes);
                writes.max().unwrap_or(0)
            };
            assert!(inodes("MWCM-empty") >= OPERATIONS);
            // Its thread takes it twice for each file, and checkpoints do, which are few.
            assert!(inodes("MWCL") < 3 * PLAN.operations);
        }

        #[test]
        fn the_store_with_one_lock_collapses() {
            let rate = |cores| {
                let plan = Plan {
                    threads: cores,
                    cpus: cores,
                    operations: 8,
                    cycle: 0,
                    before: 50,
                };
                let scale = record::calibrate();
                let trace = record::global_lock(Bad::Unlink, &plan, scale).unwrap();
                assert!(!trace.locks.is_empty() || cores == 1);
                let machine = Machine {
                    costs: Costs::KERNEL_MUTEX,
                    ..machine(cores)
                };
                simulate::simulate(&trace, &machine).rate
            };
            // Interruptions make a recording slower, never faster; and a machine that was slow for one core may be fast again
            // for forty.
            let pairs = (0..4).map(|_| {
                let one = (0..3).map(|_| rate(1)).fold(0.0, f64::max);
                (one, rate(40))
            });
            let pairs: Vec<(f64, f64)> = pairs.collect();
            // What it takes on this machine decides how far it falls.
            let falls = pairs.iter().filter(|(one, forty)| *forty < 2.0 * one);
            assert!(falls.count() >= 2, "{pairs:?}");
        }
    }
}

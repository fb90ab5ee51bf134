//! A model for core counts that this machine does not have.
//!
//! In a build that records (feature `trace`) each operation of a workload is recorded as what it
//! computes, and the locks, atomics and counts of references that it touches ([`record`], [`steps`]).
//! A discrete-event simulation ([`simulate`]) replays the recordings on any number of cores, with
//! costs for lines and locks that come from publications ([`costs`]), and with the commits and
//! checkpoints that the operations make. It is compared with what one and two threads are measured to
//! do in the same run, with what this machine's lines and wake-ups take ([`here`]), and has to show what is known of a store with one lock for all ([`global_lock`]).
//!
//! What it leaves out: the allocator's locks, what cores share of caches and memory bandwidth,
//! threads that lose their core to other processes, and lines that are shared without being
//! atomics, counts or locks (what a lock protects counts as a fixed number of lines).

mod costs;
mod global_lock;
mod here;
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
use crate::runner::{self, Background, Load, Measured, Operation, Stop, Window};
use crate::target::{InProcess, Place, Remedies, Side, Storage};
use crate::{Error, interrupt};
use costs::Costs;
use global_lock::{GlobalLock, NUMBERS};
use record::{Bad, Plan};
use simulate::{CORES_MAX, Devices, Machine, Outcome};
use steps::{Stage, Step, Trace};

/// Bytes of all image files together.
const BYTES: u64 = 3 << 30;
/// Files of a thread before its operations are recorded.
const BEFORE: u64 = 500;
/// Operations that all threads do in turns from one commit to the next, and least of one: some 3 MB of
/// records, where a store commits 4 MiB at once. All but a fifth of them, which are timed, are recorded.
const IN_TURNS: u64 = 10_000;
const IN_TURNS_LEAST: u64 = 100;
/// Operations that are recorded for a comparison, at most, of all threads.
const RECORDED_HERE: u64 = 60_000;
/// Operations from one checkpoint to the next, so many that some 30 MB of records are in the journal then. A store
/// on an array of this size makes one when there are 32 MiB, on large arrays 512: a recording of so many takes too much memory.
const CYCLE: u64 = 120_000;
/// Of the store with one lock each unlink is a thousand events.
const RECORDED_BAD: u64 = 24;
/// So many times as many unlinks are recorded for a comparison, and creates, which have few events and whose table grows now and then.
const MORE_UNLINKS: u64 = 16;
const MORE_CREATES: u64 = 160;
/// Limits of a store that is measured, so small that commits and checkpoints are several, and so large that what each costs however little it
/// has to do, most of all until its threads run on busy CPUs, weighs no more than it does where cycles are as long as [`CYCLE`].
const STAGING: usize = 1 << 20;
const DIRTY: usize = 16 << 20;
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
        ns_per_tick: record::ns_per_tick(),
        here: Costs::PUBLISHED.measured(&runner::allowed_cpus()?)?,
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
    ns_per_tick: f64,
    /// Costs of this machine, whose locks are `parking_lot`'s for either store.
    here: Costs,
    progress: &'a dyn Fn(&str),
}

impl Bench<'_> {
    fn workload(
        &self,
        workload: &Workload,
        store: &Store,
        rows: &mut Vec<Row>,
    ) -> Result<(), Error> {
        for threads in [1, 2].into_iter().filter(|n| *n <= self.cpus.len()) {
            let plan = self.measured(workload, store, threads, rows)?;
            self.modelled_here(workload, store, &plan, rows)?;
        }
        self.modelled(workload, store, rows)
    }

    /// A row of windows; returns what is to be recorded to be compared with the fastest of them.
    fn measured(
        &self,
        workload: &Workload,
        store: &Store,
        threads: usize,
        rows: &mut Vec<Row>,
    ) -> Result<Plan, Error> {
        let [target, ..] = store.targets();
        let mut windows: Vec<Measured> = Vec::new();
        for run in 0..=self.options.runs {
            self.tell(workload, threads, target);
            let window = self.measure(store, threads);
            let window = window.map_err(|error| error.on(workload.name, target))?;
            // The first warms up.
            if run > 0 {
                windows.push(window);
            }
        }
        let rates: Vec<f64> = windows.iter().map(Measured::rate).collect();
        let mut extra = Map::new();
        let cpu = Spread::of(windows.iter().map(Measured::cpu_us));
        extra.insert("cpu_us_per_op".to_owned(), rounded(cpu.median));
        Measured::put_seconds(&mut extra, &windows);
        Background::put(&mut extra, &windows);
        let waited = |window: &Measured| {
            let background = window.background.unwrap_or_default();
            background.waited_ns as f64 / window.operations.max(1) as f64
        };
        let waited = Spread::of(windows.iter().map(waited));
        extra.insert("waited_ns_per_op".to_owned(), rounded(waited.median));
        rows.push(row(workload.name, target, threads, &rates, extra));
        let fastest = windows
            .into_iter()
            .max_by(|a, b| a.rate().total_cmp(&b.rate()));
        let fastest = fastest.expect("there is a run at least");
        let made = fastest.background.unwrap_or_default();
        let pool = self.options.pool;
        Ok(compared(store, pool, threads, fastest.operations, made))
    }

    /// A row of what the model says of that.
    fn modelled_here(
        &self,
        workload: &Workload,
        store: &Store,
        plan: &Plan,
        rows: &mut Vec<Row>,
    ) -> Result<(), Error> {
        let [_, target, _] = store.targets();
        let machine = Machine {
            costs: self.here,
            cpus: self.cpus.len(),
            devices: Devices::Here,
        };
        let mut rates = Vec::new();
        let mut extra = Map::new();
        for _ in 0..self.options.runs {
            self.tell(workload, plan.threads, target);
            let trace = self.record(store, plan, self.cpus.len());
            let trace = trace.map_err(|error| error.on(workload.name, target))?;
            let outcome = simulate::simulate(&trace, &machine);
            rates.push(outcome.rate);
            extra = shares(&trace, &outcome);
        }
        extra.insert("costs".to_owned(), self.here.json());
        rows.push(row(workload.name, target, plan.threads, &rates, extra));
        Ok(())
    }

    /// A row for each number of cores.
    fn modelled(
        &self,
        workload: &Workload,
        store: &Store,
        rows: &mut Vec<Row>,
    ) -> Result<(), Error> {
        let [.., modelled] = store.targets();
        let on = |error: Error| error.on(workload.name, modelled);
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
                let plan = many(store, cores);
                let trace = self.record(store, &plan, cores).map_err(on)?;
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

    /// A recording by a store with so many shards.
    fn record(&self, store: &Store, plan: &Plan, shards: usize) -> Result<Trace, Error> {
        let workload = match store {
            Store::Sheaf(workload) => *workload,
            Store::GlobalLock(bad) => return record::global_lock(*bad, plan, self.ns_per_tick),
        };
        let mut options = FsOptions::default().with_memory(self.options.memory);
        options.store.background = false;
        options.store.workers = 1;
        options.store.shards = shards;
        options.store.dirty_bytes = Some(256 << 20);
        let devices = self.place.array()?;
        let side = InProcess::with(&devices.paths, options)?;
        let trace = record::sheaf(&side, workload, plan, self.ns_per_tick)?;
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
                let share = bad_share(share, threads);
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

/// Files of a thread in the store with one lock, which is fast for a few of them.
fn bad_share(pool: u64, threads: usize) -> u64 {
    (2 * pool).min((NUMBERS / 2 / threads) as u64)
}

/// What is recorded to be compared with a window: as many threads, in directories as large half way through it, with
/// as many operations from one commit, and one checkpoint, to the next.
fn compared(store: &Store, pool: u64, threads: usize, operations: u64, made: Background) -> Plan {
    let many = threads as u64;
    let own = operations / many;
    let files = match store {
        Store::Sheaf(_) => pool,
        Store::GlobalLock(_) => bad_share(pool, threads),
    };
    let plan = Plan {
        threads,
        cpus: threads,
        operations: IN_TURNS_LEAST / 10 * 8,
        turns: 1,
        rest: 0,
        passes: 1,
        before: own / 2,
        files,
        jobs: 0,
    };
    if let Store::GlobalLock(bad) = store {
        let more = match bad {
            Bad::Create => MORE_CREATES,
            Bad::Unlink => MORE_UNLINKS,
        };
        return Plan {
            operations: RECORDED_BAD * more,
            ..plan
        };
    }
    let (passes, commits, jobs) = match (made.commits, made.checkpoints) {
        (0, _) => (1, 1, 0),
        (commits, 0) => (1, commits, 1),
        (commits, checkpoints) => {
            let passes = ((commits as f64 / checkpoints as f64).round() as u64).max(1);
            (passes, passes * checkpoints, 2)
        }
    };
    let plan = Plan {
        passes,
        jobs,
        ..plan.spread(own / commits, RECORDED_HERE / many / passes)
    };
    Plan {
        before: own.saturating_sub(passes * plan.each()) / 2,
        ..plan
    }
}

/// What is recorded of so many cores.
fn many(store: &Store, cores: usize) -> Plan {
    let taking_turns = cores * CORES.div_ceil(cores);
    let in_turns = (IN_TURNS / taking_turns as u64).max(IN_TURNS_LEAST);
    let plan = Plan {
        threads: taking_turns,
        cpus: cores,
        operations: in_turns / 10 * 8,
        turns: 1,
        rest: 0,
        passes: 1,
        before: BEFORE,
        files: 0,
        jobs: 2,
    };
    match store {
        Store::Sheaf(_) => Plan {
            passes: (CYCLE / (plan.each() * taking_turns as u64)).max(1),
            ..plan
        },
        Store::GlobalLock(_) => Plan {
            threads: cores,
            operations: RECORDED_BAD,
            ..plan
        },
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

    fn background(&self) -> Option<Background> {
        self.run.background()
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
    let recording = &trace.recording;
    put("plain_ns", recording.plain_ns);
    put("recorded_ns", recording.recorded_ns);
    put("events_per_op", recording.events);
    put("event_ns", recording.event_ns);
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
    // On both sides what was disturbed least: other processes make windows longer, and hardly show in recordings.
    let fastest = |name: &str, target: &str, threads: usize| {
        let same = |row: &&Row| row.name == name && row.target == target && row.threads == threads;
        rows.iter().find(same).map(|row| row.max)
    };
    for (measured, modelled) in [
        ("sheaf", "modelled-here"),
        ("global-lock", "modelled-global-lock-here"),
    ] {
        for row in rows.iter().filter(|row| row.target == measured) {
            let Some(predicted) = fastest(&row.name, modelled, row.threads) else {
                continue;
            };
            let ratio = predicted / row.max;
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

    #[test]
    fn what_other_processes_took_of_windows_is_no_error_of_the_model() {
        let of = |target, rates: &[f64]| row("MWUL", target, 1, rates, Map::new());
        let rows = [
            of("sheaf", &[40.0, 60.0, 100.0]),
            of("modelled-here", &[101.0, 90.0, 80.0]),
        ];
        let found = checks(&rows);
        assert_eq!((found[0].value, found[0].ok), (1.01, true));
    }

    #[test]
    fn a_recording_is_as_the_window_that_it_is_compared_with() {
        let store = Store::Sheaf(select(&[]).unwrap()[0]);
        let compared = |pool, threads, operations, (commits, checkpoints)| {
            let made = Background {
                commits,
                checkpoints,
                ..Background::default()
            };
            compared(&store, pool, threads, operations, made)
        };
        let plan = compared(50_000, 2, 80_000, (8, 4));
        // Forty thousand of each thread, in four cycles of two commits each.
        assert_eq!((plan.threads, plan.files, plan.passes), (2, 50_000, 2));
        assert_eq!((plan.jobs, plan.each()), (2, 5000));
        assert_eq!(plan.before, 15_000);
        assert_eq!(plan.share(), 50_000);
        // Long cycles are not recorded whole.
        let plan = compared(200_000, 2, 400_000, (2, 2));
        assert_eq!(plan.each(), 100_000);
        assert_eq!(plan.turns * plan.operations, RECORDED_HERE / 2);
        // Without commits and checkpoints none are replayed.
        let plan = compared(4000, 1, 4000, (0, 0));
        assert_eq!((plan.jobs, plan.each(), plan.before), (0, 4000, 0));
        let plan = compared(4000, 1, 4000, (2, 0));
        assert_eq!((plan.jobs, plan.each(), plan.passes), (1, 2000, 1));
    }

    /// What follows needs something to have been recorded.
    #[cfg(feature = "trace")]
    mod recorded {
        use super::*;

        const PLAN: Plan = Plan {
            threads: 4,
            cpus: 4,
            operations: 48,
            turns: 1,
            rest: 0,
            passes: 1,
            before: 100,
            files: 0,
            jobs: 2,
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
            let trace = record::sheaf(&side, workload, plan, record::ns_per_tick()).unwrap();
            side.close().unwrap();
            trace
        }

        #[test]
        fn creates_are_recorded_with_their_commit_and_checkpoint() {
            let trace = record("MWCL", &PLAN);
            assert!(trace.threads.iter().all(|thread| thread.len() == 48));
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

        /// It was that less a fixed time for each event, what storing events takes that come one after the other: half as much again on one
        /// machine as the operations took, and half as much on another.
        #[test]
        fn what_operations_compute_is_what_they_take_when_nobody_records() {
            let plan = Plan {
                operations: 1000,
                ..PLAN
            };
            let off = |name| {
                let trace = record(name, &plan);
                let steps = trace.threads.iter().flatten().flatten();
                let computed = steps.map(|step| match step {
                    steps::Step::Compute(time) => *time as f64 / 1000.0,
                    _ => 0.0,
                });
                let each = computed.sum::<f64>() / (plan.operations * plan.threads as u64) as f64;
                let off = each / trace.recording.plain_ns;
                (off.max(1.0 / off), trace.recording, each)
            };
            for name in ["MWCL", "MWUL"] {
                // Pauses of other processes are neither operations' own nor alike on both sides.
                let tries: Vec<_> = (0..4).map(|_| off(name)).collect();
                let close = tries.iter().any(|(off, ..)| *off < 1.15);
                assert!(close, "{name}: {tries:?}");
            }
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
                    before: 50,
                    ..PLAN
                };
                let ns_per_tick = record::ns_per_tick();
                let trace = record::global_lock(Bad::Unlink, &plan, ns_per_tick).unwrap();
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

//! Whether operations notice that checkpoints are made, and what many checkpoint threads do for them.
//!
//! 1. Sheaf in this process, on devices in memory that take a set time for each request. Threads make empty files, each in
//!    folders of its own of 1,000, and unlink the oldest once there are 20 folders, until ten times as much has been logged as the
//!    journal holds. So what there is stays the same, and a checkpoint has most of what was made since the last to write.
//! 2. So does a file system whose journal holds all of that and which makes no checkpoint: the rate that
//!    checkpoints are measured by. A run of it that made one all the same is an error.
//! 3. The floor is what these devices take for the bytes that Sheaf wrote in the same turn (`floor.rs`).
//! 4. File systems of the kernel cannot be put on these devices. Where they can be mounted they do the same, with as many operations or for half a minute, on one
//!    loop device over a file on a disk, in turn with Sheaf on the same one; each with the journal that is its default, since most do
//!    not make one as small as Sheaf's is here. A file system of the kernel has no number of workers to vary, and how many checkpoints it made is not
//!    known; so there is no bar, only what an operation took with the sync after the last.

mod floor;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use device::Latency;
use fs::FsOptions;
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::meter::Meter;
use crate::runner::{self, Background, Load, Measured, Operation, Stop, Window};
pub use crate::target::AGAINST;
use crate::target::{
    Arrangement, Disk, InProcess, KernelMount, Place, Posix, Remedies, Side, Slow, Storage, Target,
};
use crate::timing::{Latencies, Summary, put_median};
use crate::{Error, interrupt};
use floor::Floor;

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
/// Of the loop device at least: what is logged there, and images of what is changed over and over.
const LOOP_BYTES: u64 = 2 << 30;
/// Of a window of a file system of the kernel: some take ten times as long for an operation.
const LOOP_TIME: Duration = Duration::from_secs(30);
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
    /// Who does the same on a loop device, beside Sheaf; nobody: neither does. Where none are given, [`AGAINST`] if this process can mount
    /// them, else nobody.
    pub against: Option<Vec<Target>>,
    /// A folder for the file below that loop device, or a device.
    pub storage: Storage,
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
        if matches!(&self.storage, Storage::Devices(devices) if devices.len() != 1) {
            return usage("one device is measured: give one (--device)");
        }
        let given = self.against.as_deref().unwrap_or_default();
        crate::target::only_on_devices(given, "tmpfs makes nothing durable")
    }

    /// Who takes part, and what a report has to say of that.
    fn against(&self) -> Result<(Vec<Target>, Vec<String>), Error> {
        let mounts = rustix::process::geteuid().is_root();
        let loops = Path::new("/dev/loop-control").exists();
        self.against_where(mounts && loops)
    }

    fn against_where(&self, mounts: bool) -> Result<(Vec<Target>, Vec<String>), Error> {
        match &self.against {
            Some(given) if given.is_empty() => Ok((Vec::new(), Vec::new())),
            None if !mounts => {
                let why = "they would be on a loop device, which takes root";
                Ok((Vec::new(), vec![crate::target::left_out(&[], why)]))
            }
            given => {
                let usual = || crate::target::parse_against(&AGAINST.map(str::to_owned));
                let against = given.clone().map_or_else(usual, Ok)?;
                let what = "what is on the loop device has no number of workers, and each journal there but Sheaf's is of its default \
                            size; file systems of the kernel do as many operations as Sheaf in the same turn, or as many as come in \
                            30 s; none of them can be on the slow devices";
                let how = crate::target::notes(&against);
                let notes = how.chain([what.to_owned()]).collect();
                Ok((against, notes))
            }
        }
    }
}

/// What the rows of slow devices are about, and those of the loop device.
const SLOW: &str = "creates and unlinks";
const ON_LOOP: &str = "creates and unlinks on a loop device";

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

    /// As rows have it.
    fn target(self) -> &'static str {
        match self {
            Kind::Workers(_) => "sheaf",
            Kind::Endless => "sheaf-no-checkpoint",
        }
    }
}

/// What one run gave.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    rate: f64,
    times: Summary,
    measured: Measured,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    // First, while there are no other threads: mounts are this process's own.
    let (against, notes) = options.against()?;
    let on_loop = match against.is_empty() {
        true => Vec::new(),
        false => on_loop(options, against, progress)?,
    };
    // What runs write must fit; the array as a whole does not.
    let place = Place::sparse(
        &Storage::Memory,
        ARRAY_BYTES,
        options.journal * WRITTEN_JOURNALS,
        Remedies::in_memory("--journal-size"),
    )?;
    let workers = options.workers.iter().map(|&n| Kind::Workers(n));
    let kinds = workers.chain([Kind::Endless]);
    let mut all: Vec<Series> = kinds.map(Series::new).collect();
    for run in 1..=options.runs {
        for series in &mut all {
            let name = series.kind.name();
            progress(&format!("{name}, run {run} of {}", options.runs));
            let turn = series.turn(options, &place);
            turn.map_err(|error| error.on("checkpoint", &name))?;
        }
    }
    let mut rows: Vec<Row> = all
        .iter()
        .map(|series| row(options, series.kind, &series.outcomes))
        .collect();
    let checks = checks(options, &rows);
    rows.extend(beside_floor(options, &all, &rows));
    rows.extend(
        on_loop
            .iter()
            .map(|(target, runs)| loop_row(options, target, runs)),
    );
    let notes = [floor::note(options)].into_iter().chain(notes);
    Ok(Report::new("checkpoint", rows, checks).with_notes(notes))
}

/// The runs of one kind on slow devices.
struct Series {
    kind: Kind,
    outcomes: Vec<Outcome>,
    /// Of the same turns; of those with checkpoints.
    floors: Vec<Floor>,
}

impl Series {
    fn new(kind: Kind) -> Series {
        Series {
            kind,
            outcomes: Vec::new(),
            floors: Vec::new(),
        }
    }

    fn turn(&mut self, options: &Options, place: &Place) -> Result<(), Error> {
        let outcome = one_run(options, place, self.kind)?;
        self.outcomes.push(outcome);
        if let Kind::Workers(_) = self.kind {
            let floor = floor::measure(options, place, &outcome.measured)?;
            self.floors.push(floor);
        }
        Ok(())
    }
}

/// The floors of all that make checkpoints, and these beside them.
fn beside_floor(options: &Options, all: &[Series], rows: &[Row]) -> Vec<Row> {
    let (mut floors, mut beside) = (Vec::new(), Vec::new());
    for (series, row) in all.iter().zip(rows) {
        if let Kind::Workers(workers) = series.kind {
            let floor = floor::row(options, workers, &series.floors);
            beside.push(row.beside_floor(&floor, &["workers"]));
            floors.push(floor);
        }
    }
    floors.append(&mut beside);
    floors
}

/// Sheaf and the others in turn on a loop device. Those do as many operations as Sheaf did in the same turn.
fn on_loop(
    options: &Options,
    against: Vec<Target>,
    progress: &dyn Fn(&str),
) -> Result<Vec<(Target, Vec<Outcome>)>, Error> {
    let remedies = Remedies::less("--journal-size").without_root("--against none");
    let disk = match &options.storage {
        Storage::Devices(devices) => Disk::given(&devices[0]),
        storage => {
            progress("a file for the loop device");
            Disk::make(
                &crate::fsync::folder(storage),
                LOOP_BYTES.max(8 * options.journal),
                remedies,
            )?
        }
    };
    let devices = vec![disk.path().to_owned()];
    let meter = Meter::new(&devices)?;
    let place = Place::over(&disk, LOOP_BYTES.max(8 * options.journal), remedies)?;
    let own = [Target::Sheaf].into_iter();
    let all = own.chain(against);
    let mut all: Vec<(Target, Vec<Outcome>)> = all.map(|target| (target, Vec::new())).collect();
    for run in 1..=options.runs {
        turn(&mut all, |(target, outcomes), operations| {
            interrupt::check()?;
            let name = target.name();
            progress(&format!("{ON_LOOP}, {name}, run {run} of {}", options.runs));
            let outcome = loop_run(options, &place, &meter, target, operations);
            let outcome = outcome.map_err(|error| error.on(ON_LOOP, &name))?;
            let done = outcome.measured.operations;
            outcomes.push(outcome);
            Ok(done)
        })?;
    }
    Ok(all)
}

/// Has each side do as many operations as the first, which is Sheaf, has done, whatever those between them have done.
fn turn<T>(
    sides: &mut [T],
    mut run: impl FnMut(&mut T, u64) -> Result<u64, Error>,
) -> Result<(), Error> {
    let mut most = u64::MAX;
    for (nth, side) in sides.iter_mut().enumerate() {
        let done = run(side, most)?;
        if nth == 0 {
            most = done;
        }
    }
    Ok(())
}

fn loop_run(
    options: &Options,
    place: &Place,
    meter: &Meter,
    target: &Target,
    operations: u64,
) -> Result<Outcome, Error> {
    match target {
        Target::Kernel(kernel) => {
            // Files come and go; folders stay.
            let mount = KernelMount::make(*kernel, place, FOLDERS * FILES_PER_FOLDER + 200_000)?;
            let side = Posix::new(mount.path(), None)?;
            let outcome = creates(options, &side, &|| false, (LOOP_TIME, operations), meter)?;
            drop(side);
            mount.close()?;
            Ok(outcome)
        }
        _ => {
            let fs = FsOptions::default().with_memory(options.memory);
            let arrangement = Arrangement {
                journal: Some(options.journal),
                slow: None,
                ..Arrangement::default()
            };
            let side = InProcess::arranged(&place.array()?.paths, fs, &arrangement)?;
            let until = side.logged_bytes() + options.journal * JOURNALS;
            let enough = || side.logged_bytes() >= until;
            let outcome = creates(options, &side, &enough, (NEVER, operations), meter)?;
            side.close()?;
            Ok(outcome)
        }
    }
}

/// One window of what threads do, until `enough`, or for so long or so many operations.
fn creates<S: Side>(
    options: &Options,
    side: &S,
    enough: &(dyn Fn() -> bool + Sync),
    (time, operations): (Duration, u64),
    meter: &Meter,
) -> Result<Outcome, Error> {
    let latencies = Latencies::new();
    let load = Creates {
        side,
        threads: options.threads as u64,
        enough,
        latencies: &latencies,
        folders: AtomicU64::new(0),
    };
    let window = Window {
        time,
        threads: options.threads,
        operations: operations / options.threads as u64,
        cpus: Vec::new(),
    };
    let measured = runner::measure(&window, &load, meter)?;
    Ok(Outcome {
        rate: measured.rate(),
        times: latencies.summary(),
        measured,
    })
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
    let slow = Slow::new(options.latency);
    let meter = Meter::of(Arc::clone(&slow.writes));
    let arrangement = Arrangement {
        journal: Some(journal),
        slow: Some(slow),
        ..Arrangement::default()
    };
    let side = InProcess::arranged(&devices.paths, fs, &arrangement)?;
    let before = side.newest_checkpoint();
    let until = side.logged_bytes() + options.journal * JOURNALS;
    let enough = || side.logged_bytes() >= until;
    let outcome = creates(options, &side, &enough, (NEVER, u64::MAX), &meter)?;
    let checkpoints = side.newest_checkpoint() - before;
    if kind == Kind::Endless && checkpoints > 0 {
        return Err(Error::Unable(format!(
            "{checkpoints} checkpoints were made where none should be, because much was changed: want a smaller \
             journal (--journal-size)"
        )));
    }
    side.close()?;
    Ok(outcome)
}

/// Threads that make and unlink empty files until enough is logged.
struct Creates<'a, S: Side> {
    side: &'a S,
    threads: u64,
    enough: &'a (dyn Fn() -> bool + Sync),
    latencies: &'a Latencies,
    folders: AtomicU64,
}

impl<S: Side> Load for Creates<'_, S> {
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
            if made % (64 / self.threads).max(1) == 0 && (self.enough)() {
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

/// What both kinds of rows have.
fn extra(outcomes: &[Outcome]) -> Map<String, Value> {
    let mut extra = Map::new();
    let mut put = |key: &str, get: fn(&Outcome) -> f64| {
        put_median(&mut extra, key, outcomes.iter().map(get));
    };
    put("p50_us", |outcome| outcome.times.p50_us);
    put("p99_us", |outcome| outcome.times.p99_us);
    put("p999_us", |outcome| outcome.times.p999_us);
    put("samples", |outcome| outcome.times.operations as f64);
    put("cpu_us_per_op", |outcome| outcome.measured.cpu_us());
    put("synced_us_per_op", |outcome| {
        outcome.measured.synced.seconds * 1e6 / outcome.measured.operations.max(1) as f64
    });
    let written = outcomes.iter().filter_map(|outcome| {
        let bytes = outcome.measured.synced.written_bytes? as f64;
        Some(bytes / outcome.measured.operations.max(1) as f64)
    });
    let written = Value::from(Spread::of(written).median);
    extra.insert("written_bytes_per_op".to_owned(), written);
    let windows: Vec<Measured> = outcomes.iter().map(|outcome| outcome.measured).collect();
    Background::put(&mut extra, &windows);
    Measured::put_seconds(&mut extra, &windows);
    Row::note_rates(&mut extra, outcomes.iter().map(|outcome| outcome.rate));
    extra
}

fn loop_row(options: &Options, target: &Target, outcomes: &[Outcome]) -> Row {
    let rates = Spread::of(outcomes.iter().map(|outcome| outcome.rate));
    let mut extra = extra(outcomes);
    if *target == Target::Sheaf {
        extra.insert("journal_bytes".to_owned(), Value::from(options.journal));
    }
    Row {
        name: ON_LOOP.to_owned(),
        target: target.name(),
        threads: options.threads,
        unit: "ops/s",
        median: rates.median,
        min: rates.min,
        max: rates.max,
        runs: outcomes.len(),
        extra,
    }
}

fn row(options: &Options, kind: Kind, outcomes: &[Outcome]) -> Row {
    let rates = Spread::of(outcomes.iter().map(|outcome| outcome.rate));
    let mut extra = extra(outcomes);
    if let Kind::Workers(workers) = kind {
        extra.insert("workers".to_owned(), Value::from(workers));
    }
    extra.insert("journal_bytes".to_owned(), Value::from(options.journal));
    extra.insert("devices".to_owned(), Value::from(options.devices));
    let us = |time: Duration| Value::from(time.as_nanos() as f64 / 1e3);
    extra.insert("service_us".to_owned(), us(options.latency.service));
    extra.insert("flush_us".to_owned(), us(options.latency.flush));
    extra.insert("depth".to_owned(), Value::from(options.latency.depth));
    Row {
        name: SLOW.to_owned(),
        target: kind.target().to_owned(),
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
    let row = |kind: Kind| {
        let workers = |row: &Row| row.extra.get("workers").and_then(Value::as_u64);
        let wanted = match kind {
            Kind::Workers(workers) => Some(workers as u64),
            Kind::Endless => None,
        };
        let mut all = rows.iter();
        all.find(|row| row.target == kind.target() && workers(row) == wanted)
    };
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
    let name = |what: &str| format!("{} vs {what}", Kind::Workers(most).name());
    let mut checks = Vec::new();
    if let Some(one) = row(Kind::Workers(1)).filter(|_| most > 1) {
        let value = many.quotients(one);
        checks.push(Check::new(name("1"), value, Comparison::AtLeast, 1.92));
    }
    let value = many.quotients(endless);
    checks.push(Check::new(
        name("no checkpoint"),
        value,
        Comparison::AtLeast,
        0.9,
    ));
    let value = tail(many) / tail(endless);
    let tail = Check::new(name("no checkpoint, p99.9"), value, Comparison::AtMost, 2.0);
    checks.push(tail.of_samples());
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
            against: Some(Vec::new()),
            storage: Storage::Memory,
            memory: 512 << 20,
        }
    }

    #[test]
    fn checkpoints_are_made_but_for_the_endless_journal() {
        let report = run(&options(), &|_| {}).unwrap();
        let workers = |row: &Row| row.extra.get("workers").and_then(Value::as_u64);
        let rows = report.rows.iter();
        let found: Vec<_> = rows
            .map(|row| (row.target.as_str(), workers(row)))
            .collect();
        let wanted = [
            ("sheaf", Some(1)),
            ("sheaf", Some(2)),
            ("sheaf-no-checkpoint", None),
            ("raw-queue", Some(1)),
            ("raw-queue", Some(2)),
            ("sheaf", Some(1)),
            ("sheaf", Some(2)),
        ];
        assert_eq!(found, wanted);
        let bytes = |row: &Row| row.extra["written_bytes_per_op"].as_f64().unwrap();
        for (nth, floor) in report.rows[3..5].iter().enumerate() {
            assert_eq!(bytes(floor), bytes(&report.rows[nth]), "{floor:?}");
            assert!(bytes(floor) > 10.0 && floor.median > 0.0, "{floor:?}");
            let beside = &report.rows[5 + nth];
            assert_eq!(beside.unit, "of the floor");
            let quotient = report.rows[nth].median / floor.median;
            assert!((beside.median - quotient).abs() < 1e-9, "{beside:?}");
        }
        assert!(report.notes[0].contains("raw-queue"), "{:?}", report.notes);
        let shown = [crate::text::render(&report), crate::html::render(&report)];
        for name in ["their bytes alone", "beside the floor"] {
            assert!(shown.iter().all(|page| page.contains(name)), "{name}");
        }
        let checkpoints = |row: &Row| row.extra["checkpoints"].as_f64().unwrap();
        assert!(checkpoints(&report.rows[0]) >= 5.0, "{:?}", report.rows[0]);
        assert_eq!(checkpoints(&report.rows[2]), 0.0);
        assert_eq!(report.checks.len(), 3);
    }

    /// One that was slow had those after it do as little.
    #[test]
    fn each_does_as_many_operations_as_the_first() {
        let mut sides = [(1000, 0), (100, 0), (1000, 0), (2000, 0)];
        turn(&mut sides, |(done, asked), most| {
            *asked = most;
            Ok(most.min(*done))
        })
        .unwrap();
        assert_eq!(sides.map(|(_, asked)| asked), [u64::MAX, 1000, 1000, 1000]);
    }

    #[test]
    fn others_do_as_many_operations() {
        let folder = tempfile::tempdir().unwrap();
        let side = Posix::new(folder.path(), None).unwrap();
        let meter = Meter::new(&[]).unwrap();
        let outcome = creates(&options(), &side, &|| false, (NEVER, 500), &meter).unwrap();
        // The first of two threads that has done half of it ends the window.
        let done = outcome.measured.operations;
        assert!((250..=500).contains(&done), "{done}");
        let target = Target::Kernel(crate::target::Kernel::Xfs);
        let row = loop_row(&options(), &target, &[outcome]);
        assert_eq!((row.target.as_str(), row.name.as_str()), ("xfs", ON_LOOP));
        assert!(row.extra["synced_us_per_op"].as_f64() > Some(0.0));
    }

    #[test]
    fn kernel_file_systems_take_part_by_default_where_they_can_be_mounted() {
        let usual = Options {
            against: None,
            ..options()
        };
        let (nobody, notes) = usual.against_where(false).unwrap();
        assert!(
            nobody.is_empty() && notes[0].contains("which takes root"),
            "{notes:?}"
        );
        let (nobody, notes) = options().against_where(true).unwrap();
        assert!(nobody.is_empty() && notes.is_empty());
        let kernels = AGAINST.map(|name| Target::parse(name).unwrap());
        if kernels.iter().all(|kernel| kernel.check().is_ok()) {
            let (found, notes) = usual.against_where(true).unwrap();
            assert_eq!(found, kernels);
            assert!(
                notes.iter().any(|note| note.starts_with("xfs:")),
                "{notes:?}"
            );
        }
    }

    #[test]
    fn all_sides_are_on_the_loop_device() {
        let control = Path::new("/dev/loop-control");
        let ext4 = Target::Kernel(crate::target::Kernel::Ext4);
        if !rustix::process::geteuid().is_root() || !control.exists() || ext4.check().is_err() {
            return base::skip("loop devices with ext4");
        }
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            workers: vec![1],
            against: Some(vec![ext4]),
            storage: Storage::Dir(home.path().to_owned()),
            ..options()
        };
        let report = run(&options, &|_| {}).unwrap();
        let on_loop = report.rows.iter().filter(|row| row.name == ON_LOOP);
        let targets: Vec<&str> = on_loop.map(|row| row.target.as_str()).collect();
        assert_eq!(targets, ["sheaf", "ext4"]);
        assert!(report.notes.iter().any(|note| note.starts_with("ext4:")));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
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
        assert!(refused(Options {
            against: Some(vec![Target::SheafMount]),
            ..options()
        }));
    }
}

//! What it costs to make small writes durable, beside what the device charges for a write and a flush.
//!
//! 1. All sides are on one block device, in turn, each with a fresh file system for each window: a loop device over a file
//!    on a disk, or one that is given. The floor is the device itself, by three ways of writing and flushing; the best counts.
//! 2. An operation is timed from its first call to the return of fsync(2) or fdatasync(2). Bytes and flushes are the device's own
//!    count: bytes from the first operation to the end of the sync after the last, flushes to the end of the last operation.
//! 3. `overwrite` writes 4 KiB anywhere in a file of 64 MiB and syncs it; `overwrite-stat` looks at the file's times between write
//!    and sync; `append` adds 100 bytes to a file and syncs its data; `create` makes a file of 4 KiB in the thread's own folder and syncs
//!    it; `competing` is `overwrite` beside a thread that writes 1 GiB to another file, over and over: what that one got through is told
//!    besides (`writer.rs`).
//! 4. [`run_varmail`]: rounds of a mail server, as filebench has them, by many threads in one folder of 1,000 files of 16 KiB in the mean.
//!    In a round one file is removed; one is made, gets up to 16 KiB and is synced; one is read, gets up to
//!    16 KiB more and is synced; one is read. The floor is what its two syncs take with no file system (`floor.rs`).
//! 5. With [`Options::slow`] Sheaf and the floor are on devices in memory of this process that take a set time for each request, as many
//!    devices do; bytes and flushes are counted there. No file system of the kernel can be put on them.
//! 6. [`run_mtime`]: the overwrites, in Sheaf with times persisted at each sync, each 1 ms, 10 ms and 1 s; the published figures are beside (`study.rs`).

mod checks;
mod floor;
mod load;
mod study;
mod writer;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use device::{Latency, Reaping};
use fs::FsOptions;
use serde_json::{Map, Value};

use crate::contract::{Report, Row, Spread};
use crate::meter::Meter;
use crate::runner::{self, Background, Window};
use crate::target::{
    Arrangement, Devices, Disk, InProcess, KernelMount, Place, Posix, Remedies, Side, Slow,
    Storage, Target,
};
use crate::timing::{Latencies, put_median};
use crate::{Error, interrupt};
use checks::checks;
use load::{
    ENTRY, FILE_BYTES, LARGE, LETTERS, Letters, Method, OnDevice, OnFiles, PAGE, STREAM_BYTES,
};

/// A kind of write that is synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Overwrite,
    OverwriteStat,
    Append,
    Create,
    Competing,
    /// Rounds, not operations.
    Varmail,
}

impl Kind {
    pub const ALL: [Kind; 5] = [
        Kind::Overwrite,
        Kind::OverwriteStat,
        Kind::Append,
        Kind::Create,
        Kind::Competing,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Overwrite => "overwrite",
            Kind::OverwriteStat => "overwrite-stat",
            Kind::Append => "append",
            Kind::Create => "create",
            Kind::Competing => "competing",
            Kind::Varmail => "varmail",
        }
    }

    /// What the user writes in an operation, if always the same.
    fn bytes(self) -> Option<u64> {
        match self {
            Kind::Append => Some(ENTRY as u64),
            Kind::Varmail => None,
            _ => Some(PAGE as u64),
        }
    }
}

/// The kinds with these names; without names all.
pub fn select(names: &[String]) -> Result<Vec<Kind>, Error> {
    if names.is_empty() {
        return Ok(Kind::ALL.to_vec());
    }
    let find = |name: &String| {
        let found = Kind::ALL
            .into_iter()
            .find(|kind| kind.name() == name.trim());
        found.ok_or_else(|| {
            let all = Kind::ALL.map(Kind::name).join(", ");
            Error::Usage(format!("there is no workload '{name}', but {all}"))
        })
    };
    names.iter().map(find).collect()
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    pub kinds: Vec<Kind>,
    /// Of `create` and `varmail`; the others have one, and `competing` the writer besides.
    pub threads: Vec<usize>,
    /// Of one window.
    pub time: Duration,
    pub runs: usize,
    /// Besides Sheaf in this process and the device.
    pub against: Vec<Target>,
    /// A folder for the file below the loop device, or a device.
    pub storage: Storage,
    /// In the place of that: devices in memory, so many, of this process alone. Who is compared with is left out.
    pub slow: Option<(Latency, usize)>,
    /// How Sheaf waits.
    pub reap: Reaping,
    /// For all that Sheaf takes, in bytes.
    pub memory: usize,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if self.threads.is_empty() || self.threads.iter().any(|n| !(1..=128).contains(n)) {
            return usage("--threads takes numbers from 1 to 128");
        }
        // Each has three letters in hands.
        if self.kinds.contains(&Kind::Varmail)
            && self.threads.iter().any(|n| *n as u64 * 4 > LETTERS)
        {
            return usage("--threads is too many for the letters there are");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(3600));
        if self.time < least || self.time > most {
            return usage("--seconds takes a number from 0.001 to 3600");
        }
        if matches!(&self.storage, Storage::Devices(devices) if devices.len() != 1) {
            return usage("one device is measured: give one (--device)");
        }
        if let Some((latency, devices)) = &self.slow {
            check_slow(latency, *devices)?;
        }
        crate::target::only_on_devices(&self.against, "tmpfs makes nothing durable")
    }

    fn file_systems(&self) -> impl Iterator<Item = Who> {
        let all = [Target::Sheaf].into_iter();
        all.chain(self.against.iter().cloned()).map(Who::FileSystem)
    }

    /// Of the device: each thread has its part of it where there is no file system.
    fn bytes(&self) -> u64 {
        let many = [Kind::Create, Kind::Varmail];
        let many = many.iter().any(|kind| self.kinds.contains(kind));
        let threads = many
            .then_some(&self.threads)
            .into_iter()
            .flatten()
            .copied()
            .max()
            .unwrap_or(1) as u64;
        let least = match self.kinds.contains(&Kind::Competing) {
            true => 2 * STREAM_BYTES + (1 << 30),
            false => 2 << 30,
        };
        // Devices have equal parts, and as many threads or one more.
        let devices = self.slow.map_or(1, |(_, devices)| devices as u64);
        least.max(threads.next_multiple_of(devices) * FILE_BYTES)
    }
}

/// So many slow devices.
pub(crate) fn check_slow(latency: &Latency, devices: usize) -> Result<(), Error> {
    let usage = |text: &str| Err(Error::Usage(text.to_owned()));
    if !(1..=16).contains(&devices) {
        return usage("--devices takes a number from 1 to 16");
    }
    if !(1..=1024).contains(&latency.depth) {
        return usage("--depth takes a number from 1 to 1024");
    }
    if latency.service.max(latency.flush) > Duration::from_secs(1) {
        return usage("--latency and --flush take up to 1000000 microseconds");
    }
    Ok(())
}

/// Who writes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Who {
    Raw(Method),
    FileSystem(Target),
    /// Sheaf in this process, which persists times so coarsely.
    Persisting(Duration),
}

impl Who {
    fn name(&self) -> String {
        match self {
            Who::Raw(method) => method.name().to_owned(),
            Who::FileSystem(target) => target.name(),
            Who::Persisting(interval) => format!("sheaf-{interval:?}"),
        }
    }

    /// How long times may stay in memory alone while their file is synced; of Sheaf in this process.
    fn persists_after(&self) -> Option<Duration> {
        match self {
            Who::FileSystem(Target::Sheaf) => Some(FsOptions::default().data.mtime_persist),
            Who::Persisting(interval) => Some(*interval),
            _ => None,
        }
    }
}

/// The windows of one side in one workload.
struct Series {
    who: Who,
    kind: Kind,
    threads: usize,
    windows: Vec<Outcome>,
}

/// What one window gave, for each operation.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    measured: runner::Measured,
    rate: f64,
    /// Of the writer beside it, in bytes a second.
    writer: Option<f64>,
    bytes: f64,
    flushes: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    /// That were timed.
    samples: f64,
    cpu_us: f64,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    let sides = raw(options).chain(options.file_systems()).collect();
    run_sides("fsync", options, sides, progress)
}

/// The rounds of a mail server; the kinds of `options` are not looked at.
pub fn run_varmail(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    let options = Options {
        kinds: vec![Kind::Varmail],
        ..options.clone()
    };
    let sides = raw(&options).chain(options.file_systems()).collect();
    let mut report = run_sides("varmail", &options, sides, progress)?;
    let notes = floor::put(&mut report.rows);
    Ok(report.with_notes(notes))
}

/// How coarsely times are persisted, against what overwrites cost; the kinds of `options` are not looked at.
pub fn run_mtime(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    let options = Options {
        kinds: vec![Kind::Overwrite, Kind::OverwriteStat],
        ..options.clone()
    };
    let persisting = INTERVALS.map(|ms| Who::Persisting(Duration::from_millis(ms)));
    // The default's place is among those.
    let kernels = options.against.iter().cloned().map(Who::FileSystem);
    let sides = raw(&options).chain(persisting).chain(kernels).collect();
    let mut report = run_sides("mtime", &options, sides, progress)?;
    let study = study::rows(&report.rows);
    report.rows.extend(study);
    Ok(report.with_notes([study::note()]))
}

fn raw(options: &Options) -> impl Iterator<Item = Who> + use<> {
    let methods = match options.slow {
        Some(_) => &Method::SLOW[..],
        None => &Method::KERNEL,
    };
    methods.iter().copied().map(Who::Raw)
}

fn run_sides(
    suite: &'static str,
    options: &Options,
    sides: Vec<Who>,
    progress: &dyn Fn(&str),
) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let bench = match &options.slow {
        Some((latency, _)) => Bench::on_slow(options, sides, *latency)?,
        None => Bench::on_disk(options, sides, progress)?,
    };
    let mut all = Vec::new();
    for &kind in &options.kinds {
        let threads = match kind {
            Kind::Create | Kind::Varmail => &options.threads[..],
            _ => &[1],
        };
        for &threads in threads {
            all.extend(bench.series(kind, threads, progress)?);
        }
    }
    let mut rows: Vec<Row> = all.iter().map(row).collect();
    let checks = checks(&rows);
    rows.extend(all.iter().filter_map(writer::row));
    let notes = bench.notes().into_iter().chain(writer::note(&rows));
    let notes: Vec<String> = notes.collect();
    Ok(Report::new(suite, rows, checks).with_notes(notes))
}

/// Where the file below the loop device is.
pub(crate) fn folder(storage: &Storage) -> PathBuf {
    match storage {
        Storage::Dir(dir) | Storage::Loop(Some(dir)) => dir.clone(),
        // On a disk, as a rule, which /tmp need not be.
        _ => PathBuf::from("/var/tmp"),
    }
}

struct Bench<'a> {
    options: &'a Options,
    /// Who takes part, in this order.
    sides: Vec<Who>,
    meter: Meter,
    place: Place,
    below: Below,
}

/// What is written to.
enum Below {
    Disk(Disk),
    /// Of this process.
    Slow(Slow),
}

impl<'a> Bench<'a> {
    fn on_disk(
        options: &'a Options,
        sides: Vec<Who>,
        progress: &dyn Fn(&str),
    ) -> Result<Bench<'a>, Error> {
        let remedies = Remedies::less("").without_root("--latency MICROSECONDS");
        let disk = match &options.storage {
            Storage::Devices(devices) => Disk::given(&devices[0]),
            storage => {
                progress("a file for the loop device");
                Disk::make(&folder(storage), options.bytes(), remedies)?
            }
        };
        Ok(Bench {
            options,
            sides,
            meter: Meter::new(&[disk.path().to_owned()])?,
            place: Place::over(&disk, options.bytes(), remedies)?,
            below: Below::Disk(disk),
        })
    }

    fn on_slow(
        options: &'a Options,
        mut sides: Vec<Who>,
        latency: Latency,
    ) -> Result<Bench<'a>, Error> {
        sides.retain(|who| !matches!(who, Who::FileSystem(Target::Kernel(_))));
        let slow = Slow::new(latency);
        Ok(Bench {
            options,
            sides,
            meter: Meter::of(Arc::clone(&slow.writes)),
            place: Place::new(
                &Storage::Memory,
                options.bytes(),
                false,
                Remedies::in_memory(""),
            )?,
            below: Below::Slow(slow),
        })
    }

    fn notes(&self) -> Vec<String> {
        let Some((latency, devices)) = &self.options.slow else {
            return crate::target::notes(&self.options.against).collect();
        };
        let mut notes = vec![format!(
            "devices in memory: {devices}, each taking {:?} for 128 KiB or less and {:?} for a flush, {} requests at a time",
            latency.service, latency.flush, latency.depth
        )];
        notes.push(crate::target::left_out(
            &self.options.against,
            "they cannot be put on devices that exist in this process only",
        ));
        notes
    }
}

impl Bench<'_> {
    /// All sides in one workload, taking turns.
    fn series(
        &self,
        kind: Kind,
        threads: usize,
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Series>, Error> {
        let series = |who: &Who| Series {
            who: who.clone(),
            kind,
            threads,
            windows: Vec::new(),
        };
        let mut all: Vec<Series> = self.sides.iter().map(series).collect();
        for run in 1..=self.options.runs {
            for series in &mut all {
                interrupt::check()?;
                let (name, who) = (kind.name(), series.who.name());
                let of = self.options.runs;
                progress(&format!("{name}/{threads} on {who}, run {run} of {of}"));
                let outcome = self.window(series).map_err(|error| error.on(name, &who))?;
                series.windows.push(outcome);
            }
        }
        Ok(all)
    }

    /// One window, on a fresh file system.
    fn window(&self, series: &Series) -> Result<Outcome, Error> {
        let latencies = Latencies::new();
        match &series.who {
            Who::Raw(method) => self.raw(series, *method, &latencies)?,
            Who::FileSystem(Target::Kernel(kernel)) => {
                let mount = KernelMount::make(*kernel, &self.place, 1_000_000)?;
                let measured =
                    self.on_files(series, &Posix::new(mount.path(), None)?, &latencies)?;
                mount.close()?;
                measured
            }
            Who::FileSystem(_) => self.in_process(series, self.fs_options(), &latencies)?,
            Who::Persisting(interval) => {
                let mut options = self.fs_options();
                options.data.mtime_persist = *interval;
                self.in_process(series, options, &latencies)?
            }
        }
        .of(latencies)
    }

    fn raw(
        &self,
        series: &Series,
        method: Method,
        latencies: &Latencies,
    ) -> Result<Measured, Error> {
        match &self.below {
            Below::Disk(disk) => {
                // The load claims it.
                drop(self.place.first(1)?);
                let load = OnDevice::open(disk.path(), series.kind, method, latencies)?;
                self.measure(series, &load)
            }
            Below::Slow(slow) => {
                let images = self.images()?;
                let load = OnDevice::slow(&images.paths, slow, series.kind, method, latencies)?;
                self.measure(series, &load)
            }
        }
    }

    /// What is below slow devices.
    fn images(&self) -> Result<Devices, Error> {
        let count = self.options.slow.map_or(1, |(_, devices)| devices as u64);
        self.place.images(count, "device")
    }

    fn fs_options(&self) -> FsOptions {
        FsOptions::default().with_memory(self.options.memory)
    }

    fn in_process(
        &self,
        series: &Series,
        options: FsOptions,
        latencies: &Latencies,
    ) -> Result<Measured, Error> {
        let (devices, slow) = match &self.below {
            Below::Disk(_) => (self.place.array()?, None),
            Below::Slow(slow) => (self.images()?, Some(slow.clone())),
        };
        let arrangement = Arrangement {
            slow,
            reap: self.options.reap,
            ..Arrangement::default()
        };
        let side = InProcess::arranged(&devices.paths, options, &arrangement)?;
        let measured = self.on_files(series, &side, latencies)?;
        side.close()?;
        Ok(measured)
    }

    fn on_files<S: Side>(
        &self,
        series: &Series,
        side: &S,
        latencies: &Latencies,
    ) -> Result<Measured, Error> {
        let load = OnFiles {
            side,
            kind: series.kind,
            latencies,
            letters: Letters::new(),
        };
        self.measure(series, &load)
    }

    fn measure(&self, series: &Series, load: &dyn runner::Load) -> Result<Measured, Error> {
        let competing = usize::from(series.kind == Kind::Competing);
        let window = Window {
            time: self.options.time,
            threads: series.threads + competing,
            operations: u64::MAX,
            cpus: Vec::new(),
        };
        Ok(Measured {
            window: runner::measure(&window, load, &self.meter)?,
            competing: competing > 0,
        })
    }
}

/// What the runner measured.
struct Measured {
    window: runner::Measured,
    /// The last thread writes, and is not timed.
    competing: bool,
}

impl Measured {
    /// What that is for each operation that was timed.
    fn of(self, latencies: Latencies) -> Result<Outcome, Error> {
        let Measured { window, competing } = self;
        // The other thread may end much later, in a write that waits.
        let seconds = match competing {
            true => window.first.seconds,
            false => window.seconds,
        };
        let times = latencies.summary();
        let operations = times.operations.max(1) as f64;
        let each = |count: Option<u64>| count.map_or(f64::NAN, |count| count as f64 / operations);
        Ok(Outcome {
            measured: window,
            rate: operations / seconds.max(1e-9),
            writer: competing.then(|| window.last.rate() * LARGE as f64),
            bytes: each(window.synced.written_bytes),
            flushes: each(window.ended.flushes),
            p50_us: times.p50_us,
            p99_us: times.p99_us,
            p999_us: times.p999_us,
            samples: times.operations as f64,
            cpu_us: window.cpu_seconds * 1e6 / operations,
        })
    }
}

fn row(series: &Series) -> Row {
    let of = |get: fn(&Outcome) -> f64| Spread::of(series.windows.iter().map(get));
    let rates = of(|outcome| outcome.rate);
    let mut extra = Map::new();
    let mut put = |key: &str, get: fn(&Outcome) -> f64| {
        put_median(&mut extra, key, series.windows.iter().map(get));
    };
    put("written_bytes_per_op", |outcome| outcome.bytes);
    put("flushes_per_op", |outcome| outcome.flushes);
    put("p50_us", |outcome| outcome.p50_us);
    put("p99_us", |outcome| outcome.p99_us);
    put("p999_us", |outcome| outcome.p999_us);
    put("samples", |outcome| outcome.samples);
    put("cpu_us_per_op", |outcome| outcome.cpu_us);
    put("window_s", |outcome| outcome.measured.seconds);
    let windows: Vec<_> = series.windows.iter().map(|w| w.measured).collect();
    Background::put(&mut extra, &windows);
    if let Some(interval) = series.who.persists_after() {
        let seconds = Value::from(interval.as_secs_f64());
        extra.insert("mtime_persist_s".to_owned(), seconds);
    }
    if let Some(bytes) = series.kind.bytes() {
        extra.insert("user_bytes_per_op".to_owned(), Value::from(bytes));
    }
    Row::note_rates(
        &mut extra,
        series.windows.iter().map(|outcome| outcome.rate),
    );
    Row {
        name: series.kind.name().to_owned(),
        target: series.who.name(),
        threads: series.threads,
        unit: "ops/s",
        median: rates.median,
        min: rates.min,
        max: rates.max,
        runs: series.windows.len(),
        extra,
    }
}

/// How coarsely [`run_mtime`] has times persisted, in milliseconds.
const INTERVALS: [u64; 4] = [0, 1, 10, 1000];

/// Whom these suites compare with by default: all that their bars name, and the kernel's own coarse times.
pub const AGAINST: [&str; 4] = ["ext4", "ext4-lazytime", "ext4-fast_commit", "xfs"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_whom_a_bar_names_takes_part_by_default() {
        let parsed = AGAINST.map(|name| Target::parse(name).unwrap().name());
        assert!(
            checks::LOGS
                .iter()
                .all(|name| parsed.iter().any(|p| p == name))
        );
    }

    #[test]
    fn kinds_have_names() {
        let names = |names: &[&str]| names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>();
        assert_eq!(select(&[]).unwrap().len(), 5);
        assert_eq!(select(&names(&["append"])).unwrap(), [Kind::Append]);
        assert!(matches!(select(&names(&["apend"])), Err(Error::Usage(_))));
    }

    fn slow_options() -> Options {
        let latency = Latency {
            service: Duration::from_micros(1),
            flush: Duration::from_micros(1),
            depth: 32,
        };
        Options {
            reap: Reaping::default(),
            kinds: vec![Kind::Overwrite, Kind::Append, Kind::Create],
            threads: vec![1, 3],
            time: Duration::from_millis(20),
            runs: 1,
            against: vec![Target::Kernel(crate::target::Kernel::Xfs)],
            storage: Storage::Memory,
            slow: Some((latency, 2)),
            memory: 64 << 20,
        }
    }

    #[test]
    fn slow_devices_are_measured_without_the_kernel_and_that_is_told() {
        let report = run(&slow_options(), &|_| {}).unwrap();
        let targets: Vec<&str> = report.rows[..3].iter().map(|r| r.target.as_str()).collect();
        assert_eq!(targets, ["raw-durable", "raw-write-flush", "sheaf"]);
        assert_eq!(report.rows.len(), 4 * 3);
        for row in &report.rows {
            let extra = |key: &str| row.extra[key].as_f64().unwrap();
            assert!(extra("written_bytes_per_op") > 100.0, "{row:?}");
            assert!(extra("flushes_per_op") > 0.1, "{row:?}");
        }
        assert!(report.rows[2].extra["commits"].as_f64().is_some());
        assert!(report.checks.iter().any(|c| c.name == "overwrite/1 vs raw"));
        let told = report.notes.join("\n");
        assert!(told.contains("(xfs) are left out"), "{told}");
    }

    #[test]
    fn a_mail_server_runs_on_slow_devices() {
        let report = run_varmail(&slow_options(), &|_| {}).unwrap();
        let rows = report.rows.iter();
        let rows: Vec<_> = rows
            .map(|r| (r.target.as_str(), r.threads, r.unit))
            .collect();
        let sides = [1, 3]
            .map(|n| ["raw-durable", "raw-write-flush", "sheaf"].map(|side| (side, n, "ops/s")));
        let beside = [1, 3].map(|n| ("sheaf", n, "of the floor"));
        assert_eq!(rows, [&sides.concat()[..], &beside].concat());
        for row in report.rows[..6].iter().filter(|r| r.target != "sheaf") {
            let extra = |key: &str| row.extra[key].as_f64().unwrap();
            assert_eq!(extra("flushes_per_op"), 2.0, "{row:?}");
            // Two to eight pages.
            let bytes = extra("written_bytes_per_op");
            assert!((8192.0..=32768.0).contains(&bytes), "{row:?}");
        }
        let floors = report.rows.iter();
        let floors = floors.filter(|row| row.extra.contains_key("floor"));
        assert_eq!(floors.count(), 2);
        assert!(
            report
                .notes
                .iter()
                .any(|n| n.starts_with("the floor with 3"))
        );
    }

    #[test]
    fn the_device_has_a_part_for_each_thread_that_creates() {
        let options = |threads: usize| Options {
            kinds: vec![Kind::Create],
            threads: vec![1, threads],
            slow: None,
            ..slow_options()
        };
        assert_eq!(options(8).bytes(), 2 << 30);
        assert_eq!(options(64).bytes(), 64 * FILE_BYTES);
    }

    #[test]
    fn one_device_is_measured() {
        let options = Options {
            reap: Reaping::default(),
            kinds: vec![Kind::Append],
            threads: vec![1],
            time: Duration::from_secs(1),
            runs: 1,
            against: Vec::new(),
            storage: Storage::Memory,
            slow: None,
            memory: 64 << 20,
        };
        assert!(options.check().is_ok());
        let two = Storage::Devices(vec!["/dev/a".into(), "/dev/b".into()]);
        let two = Options {
            storage: two,
            ..options.clone()
        };
        assert!(matches!(two.check(), Err(Error::Usage(_))));
        let none = Options {
            threads: Vec::new(),
            ..options
        };
        assert!(matches!(none.check(), Err(Error::Usage(_))));
    }
}

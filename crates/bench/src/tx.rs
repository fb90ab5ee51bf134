//! Transactions beside what programs do without them.
//!
//! 1. All sides are on one loop device over a file that was written before, or on a device that is given, in turn, each with a fresh file
//!    system for each window.
//! 2. `WRITESx4KiB in FILES`: so many pages anywhere in so many files of 8 MiB, in one transaction of Sheaf in this process, which is
//!    durable when it returns. The others write the same pages and call fdatasync(2) for each file: a crash leaves any part of
//!    them. `sheaf-fdatasync` is Sheaf in this process asked so.
//! 3. `sqlite row`: transactions of one row of 100 bytes in a new database with `synchronous=FULL`, by a program that
//!    is given ([`Options::sqlite`], by the command the one beside it): on a mount of Sheaf with atomic writes of the database, on others with a rollback journal and with a
//!    write-ahead log. It takes atomic writes in place of a rollback journal wherever there are any, so on F2FS as well, whose row is `f2fs-atomic`. The daemon
//!    of Sheaf counts them: fewer than transactions are an error.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use base::clock::Clock;
use base::rng::Rng;
use fs::FsOptions;
use serde_json::Map;

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::fsync::folder;
use crate::meter::{Meter, Span};
use crate::target::{
    Disk, InProcess, Kernel, KernelMount, Place, Posix, Remedies, SheafMount, Side, Storage,
    Target, only_on_devices,
};
use crate::timing::{Latencies, put_median};
use crate::{Error, interrupt};

/// Pages and files of a transaction.
pub const SHAPES: [(usize, usize); 7] = [(1, 1), (4, 1), (64, 1), (2, 2), (16, 4), (8, 8), (64, 8)];

const PAGE: usize = 4096;
const FILE_BYTES: u64 = 8 << 20;
const FILES_MAX: usize = 8;
const DEVICE_BYTES: u64 = 1 << 30;

/// Rows of SQLite's figures have this name.
const SQLITE: &str = "sqlite row";

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// (writes, files) of a transaction, each.
    pub shapes: Vec<(usize, usize)>,
    /// Of one window.
    pub time: Duration,
    pub runs: usize,
    /// Besides Sheaf.
    pub against: Vec<Target>,
    /// A folder for the file below the loop device, or a device.
    pub storage: Storage,
    /// The program that mounts.
    pub sheaf: PathBuf,
    /// The program `sheaf-sqlite`; without it nothing is measured of SQLite.
    pub sqlite: Option<PathBuf>,
    /// For all that Sheaf takes, in bytes.
    pub memory: usize,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(3600));
        if self.time < least || self.time > most {
            return usage("--seconds takes a number from 0.001 to 3600");
        }
        let fits = |&(writes, files): &(usize, usize)| {
            (1..=64).contains(&writes) && (1..=FILES_MAX).contains(&files) && files <= writes
        };
        if !self.shapes.iter().all(fits) {
            return usage(
                "a transaction has 1 to 64 writes in 1 to 8 files, and no more files than writes",
            );
        }
        if matches!(&self.storage, Storage::Devices(devices) if devices.len() != 1) {
            return usage("one device is measured: give one (--device)");
        }
        if let Some(program) = &self.sqlite
            && !is_program(program)
        {
            return Err(Error::Usage(format!(
                "--sqlite {}: there is no such program; `cargo build --release --package sheaf-sqlite` makes it",
                program.display()
            )));
        }
        only_on_devices(&self.against, "tmpfs makes nothing durable")
    }
}

/// Whether there is a program of this name: one without a folder is searched for as a shell does.
fn is_program(name: &Path) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    match name.components().count() {
        1 if !name.has_root() => std::env::split_paths(&path).any(|dir| dir.join(name).is_file()),
        _ => name.is_file(),
    }
}

/// Who makes changes durable, and how.
#[derive(Clone, Debug)]
enum Who {
    /// Sheaf in this process, by transactions.
    Transactions,
    /// And by a write and an fdatasync after the other.
    Synced,
    Kernel(Target),
    /// SQLite on a mount of Sheaf.
    AtomicWrites,
    /// On others.
    Journal(Target, Journal),
}

/// How SQLite is asked to commit.
#[derive(Clone, Copy, Debug)]
enum Journal {
    /// With a rollback journal, unless the file system has atomic writes.
    Rollback,
    Wal,
}

impl Journal {
    /// As the program has it.
    fn name(self) -> &'static str {
        match self {
            Journal::Rollback => "rollback",
            Journal::Wal => "wal",
        }
    }

    /// What comes of it on that file system.
    fn on(self, target: &Target) -> &'static str {
        match (self, target) {
            (Journal::Rollback, Target::Kernel(Kernel::F2fs)) => "atomic",
            _ => self.name(),
        }
    }
}

impl Who {
    fn name(&self) -> String {
        match self {
            Who::Transactions => "sheaf".to_owned(),
            Who::Synced => "sheaf-fdatasync".to_owned(),
            Who::Kernel(target) => target.name(),
            Who::AtomicWrites => "sheaf-mount".to_owned(),
            Who::Journal(target, journal) => format!("{}-{}", target.name(), journal.on(target)),
        }
    }
}

struct Series {
    name: String,
    who: Who,
    shape: (usize, usize),
    windows: Vec<Outcome>,
}

/// What one window gave.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    rate: f64,
    p50_us: f64,
    p99_us: f64,
    /// That were timed one by one.
    samples: f64,
    bytes: f64,
    flushes: f64,
}

struct Bench<'a> {
    options: &'a Options,
    meter: Meter,
    place: Place,
    _disk: Disk,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let disk = match &options.storage {
        Storage::Devices(devices) => Disk::given(&devices[0]),
        storage => {
            progress("a file for the loop device");
            Disk::make(&folder(storage), DEVICE_BYTES, Remedies::less(""))?
        }
    };
    let devices = vec![disk.path().to_owned()];
    let bench = Bench {
        options,
        meter: Meter::new(&devices)?,
        place: Place::over(&disk, DEVICE_BYTES, Remedies::less(""))?,
        _disk: disk,
    };
    let mut rows = Vec::new();
    for group in groups(options) {
        rows.extend(bench.group(group, progress)?.iter().map(row));
    }
    let checks = checks(&rows);
    let mut notes: Vec<String> = crate::target::notes(&options.against).collect();
    if options.sqlite.is_none() {
        notes.push("SQLite was left out: sheaf-sqlite is not beside this program, and was not given (--sqlite)".to_owned());
    }
    Ok(Report::new("tx", rows, checks).with_notes(notes))
}

/// Sides that take turns with each other.
fn groups(options: &Options) -> Vec<Vec<Series>> {
    let series = |name: &str, who: Who, shape| Series {
        name: name.to_owned(),
        who,
        shape,
        windows: Vec::new(),
    };
    let mut groups: Vec<Vec<Series>> = Vec::new();
    for &shape in &options.shapes {
        let name = shape_name(shape);
        let kernels = options.against.iter().cloned().map(Who::Kernel);
        let sides = [Who::Transactions, Who::Synced].into_iter().chain(kernels);
        groups.push(sides.map(|who| series(&name, who, shape)).collect());
    }
    if options.sqlite.is_some() {
        let mut sides = vec![Who::AtomicWrites];
        for target in &options.against {
            sides.push(Who::Journal(target.clone(), Journal::Rollback));
            sides.push(Who::Journal(target.clone(), Journal::Wal));
        }
        let sides = sides.into_iter();
        groups.push(sides.map(|who| series(SQLITE, who, (1, 1))).collect());
    }
    groups
}

/// A mount takes as much memory as the sides in this process.
fn mount_options(memory: usize) -> Vec<String> {
    vec![format!("cache_size={memory}")]
}

impl Bench<'_> {
    fn group(&self, mut all: Vec<Series>, progress: &dyn Fn(&str)) -> Result<Vec<Series>, Error> {
        for run in 1..=self.options.runs {
            for series in &mut all {
                interrupt::check()?;
                let (name, who, of) = (&series.name, series.who.name(), self.options.runs);
                progress(&format!("{name} on {who}, run {run} of {of}"));
                let outcome = self.window(series).map_err(|error| error.on(name, &who))?;
                series.windows.push(outcome);
            }
        }
        Ok(all)
    }

    /// One window, on a fresh file system.
    fn window(&self, series: &Series) -> Result<Outcome, Error> {
        match &series.who {
            Who::Transactions => {
                let side = self.in_process()?;
                let files = self.files(&side)?;
                let outcome = self.repeat(series, |batch| {
                    let writes = batch
                        .iter()
                        .map(|(file, offset, data)| (&*files[*file], *offset, *data));
                    side.transaction(writes)
                })?;
                drop(files);
                side.close()?;
                Ok(outcome)
            }
            Who::Synced => {
                let side = self.in_process()?;
                let outcome = self.synced(series, &side)?;
                side.close()?;
                Ok(outcome)
            }
            Who::Kernel(target) => {
                let mount = self.kernel(target)?;
                let outcome = self.synced(series, &Posix::new(mount.path(), None)?)?;
                mount.close()?;
                Ok(outcome)
            }
            Who::AtomicWrites => {
                let options = mount_options(self.options.memory);
                let mount = SheafMount::make(&self.options.sheaf, &self.place, &options)?;
                let committed = ("event", "committed");
                let committed = || mount.metric("sheaf_atomic_writes_total", Some(committed));
                let before = committed()?;
                let (outcome, transactions) = self.sqlite(mount.path(), Journal::Rollback)?;
                check_atomic(committed()? - before, transactions)?;
                mount.close()?;
                Ok(outcome)
            }
            Who::Journal(target, journal) => {
                let mount = self.kernel(target)?;
                let (outcome, _) = self.sqlite(mount.path(), *journal)?;
                mount.close()?;
                Ok(outcome)
            }
        }
    }

    fn in_process(&self) -> Result<InProcess, Error> {
        let devices = self.place.array()?;
        let options = FsOptions::default().with_memory(self.options.memory);
        InProcess::with(&devices.paths, options)
    }

    fn kernel(&self, target: &Target) -> Result<KernelMount, Error> {
        match target {
            Target::Kernel(kernel) => KernelMount::make(*kernel, &self.place, 1000),
            other => Err(Error::Usage(format!(
                "{} is none of the kernel's",
                other.name()
            ))),
        }
    }

    /// Files with content, durable.
    fn files<S: Side>(&self, side: &S) -> Result<Vec<S::File>, Error> {
        let piece = vec![7; 1 << 20];
        let mut files = Vec::new();
        for number in 0..FILES_MAX {
            let file = side.create(&side.root(), &format!("file{number}"))?;
            for at in (0..FILE_BYTES).step_by(piece.len()) {
                side.write(&file, at, &piece)?;
            }
            side.fsync(&file)?;
            files.push(file);
        }
        side.sync()?;
        Ok(files)
    }

    fn synced<S: Side>(&self, series: &Series, side: &S) -> Result<Outcome, Error> {
        let files = self.files(side)?;
        self.repeat(series, |batch| {
            for (file, offset, data) in batch {
                side.write(&files[*file], *offset, data)?;
            }
            files[..series.shape.1]
                .iter()
                .try_for_each(|file| side.fdatasync(file))
        })
    }

    /// Has `change` make batches durable until the time is over.
    fn repeat(
        &self,
        series: &Series,
        mut change: impl FnMut(&[(usize, u64, &[u8])]) -> Result<(), Error>,
    ) -> Result<Outcome, Error> {
        let (writes, files) = series.shape;
        let mut rng = Rng::new(1 + series.windows.len() as u64);
        let mut data = vec![0; PAGE];
        rng.fill(&mut data);
        let latencies = Latencies::new();
        let start = self.meter.mark()?;
        let clock = Clock::real();
        let began = clock.monotonic_ns();
        let mut own = latencies.own();
        loop {
            let place = |write| {
                let offset = rng.below(FILE_BYTES / PAGE as u64) * PAGE as u64;
                (write % files, offset, &data[..])
            };
            let batch: Vec<_> = (0..writes).map(place).collect();
            own.time(|| change(&batch))?;
            if clock.monotonic_ns() - began >= self.options.time.as_nanos() as u64 {
                break;
            }
            interrupt::check()?;
        }
        drop(own);
        let seconds = (clock.monotonic_ns() - began) as f64 / 1e9;
        let span = self.meter.since(start)?;
        let times = latencies.summary();
        let operations = times.operations as f64;
        let each = |count: Option<u64>| count.map_or(f64::NAN, |count| count as f64 / operations);
        Ok(Outcome {
            rate: operations / seconds,
            p50_us: times.p50_us,
            p99_us: times.p99_us,
            samples: operations,
            bytes: each(span.written_bytes),
            flushes: each(span.flushes),
        })
    }

    /// Transactions of one row by the program, in a database below `folder`; and how many there were in all.
    fn sqlite(&self, folder: &Path, journal: Journal) -> Result<(Outcome, f64), Error> {
        let program = self.options.sqlite.as_deref();
        let program = program.ok_or_else(|| Error::Usage("--sqlite is missing".to_owned()))?;
        let start = self.meter.mark()?;
        let output = Command::new(program)
            .arg("rows")
            .arg(folder.join("test.db"))
            .args(["--journal", journal.name(), "--milliseconds"])
            .arg(self.options.time.as_millis().to_string())
            .output()
            .map_err(|error| Error::io(program, error))?;
        let span = self.meter.since(start)?;
        let told = String::from_utf8_lossy(&output.stdout);
        let outcome = rows_told(&told, &span).filter(|_| output.status.success());
        outcome.ok_or_else(|| {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let program = program.display();
            Error::Unable(format!("{program} ({}): {told}{said}", output.status))
        })
    }
}

/// A rate of a journal is none of atomic writes.
fn check_atomic(atomic: f64, transactions: f64) -> Result<(), Error> {
    match atomic >= transactions {
        true => Ok(()),
        false => Err(Error::Unable(format!(
            "SQLite made {transactions} transactions and {atomic} atomic writes, and so the others with a journal: give a sheaf-sqlite \
             that `cargo build --release --package sheaf-sqlite` has made in a checkout (--sqlite)"
        ))),
    }
}

/// From what the program prints: transactions that it has timed, nanoseconds, and transactions in all, which are returned as well. The
/// account of the device has them all, and the making of a table besides.
fn rows_told(text: &str, span: &Span) -> Option<(Outcome, f64)> {
    let mut numbers = text.split_whitespace().map(str::parse::<f64>);
    let mut number = || numbers.next()?.ok();
    let (count, ns, all) = (number()?, number()?, number()?);
    let each = |sum: Option<u64>| sum.map_or(f64::NAN, |sum| sum as f64 / all);
    let outcome = Outcome {
        rate: count / (ns / 1e9),
        p50_us: f64::NAN,
        p99_us: f64::NAN,
        samples: f64::NAN,
        bytes: each(span.written_bytes),
        flushes: each(span.flushes),
    };
    Some((outcome, all))
}

fn row(series: &Series) -> Row {
    let of = |get: fn(&Outcome) -> f64| Spread::of(series.windows.iter().map(get));
    let rates = of(|outcome| outcome.rate);
    let mut extra = Map::new();
    let mut put = |key: &str, get: fn(&Outcome) -> f64| {
        put_median(&mut extra, key, series.windows.iter().map(get));
    };
    put("p50_us", |outcome| outcome.p50_us);
    put("p99_us", |outcome| outcome.p99_us);
    put("samples", |outcome| outcome.samples);
    put("written_bytes_per_op", |outcome| outcome.bytes);
    put("flushes_per_op", |outcome| outcome.flushes);
    Row::note_rates(
        &mut extra,
        series.windows.iter().map(|outcome| outcome.rate),
    );
    Row {
        name: series.name.clone(),
        target: series.who.name(),
        threads: 1,
        unit: "tx/s",
        median: rates.median,
        min: rates.min,
        max: rates.max,
        runs: series.windows.len(),
        extra,
    }
}

fn shape_name((writes, files): (usize, usize)) -> String {
    format!("{writes}x4KiB in {files}")
}

/// A transaction of so many pages in so many files is so many times as fast as the same on ext4 with an fdatasync for each file.
const SHAPE_BAR: ((usize, usize), f64) = ((16, 4), 2.0);
/// What SQLite has to gain from atomic writes, by journal.
const BARS: [(&str, f64); 2] = [("ext4-rollback", 1.5), ("ext4-wal", 1.0)];

fn checks(rows: &[Row]) -> Vec<Check> {
    let (shape, bar) = SHAPE_BAR;
    let shape = shape_name(shape);
    let mut bars = vec![(&*shape, "sheaf", "ext4", bar)];
    bars.extend(BARS.map(|(target, bar)| (SQLITE, "sheaf-mount", target, bar)));
    let find = |name: &str, target: &str| {
        let mut all = rows.iter();
        all.find(|row| row.name == name && row.target == target)
    };
    let mut checks = Vec::new();
    for (name, own, target, bar) in bars {
        if let (Some(own), Some(other)) = (find(name, own), find(name, target)) {
            let what = format!("{name} by {target}");
            let quotient = own.quotients(other);
            checks.push(Check::new(what, quotient, Comparison::AtLeast, bar));
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It had what a mount takes by default.
    #[test]
    fn a_mount_has_the_memory_that_was_given() {
        assert_eq!(mount_options(64 << 20), ["cache_size=67108864"]);
    }

    /// Rates of two turns.
    fn row(name: &str, target: &str, rates: [f64; 2]) -> Row {
        let mut extra = Map::new();
        Row::note_rates(&mut extra, rates);
        let Spread { median, min, max } = Spread::of(rates);
        Row {
            name: name.to_owned(),
            target: target.to_owned(),
            threads: 1,
            unit: "tx/s",
            median,
            min,
            max,
            runs: 2,
            extra,
        }
    }

    /// The bar of transactions was judged by nothing.
    #[test]
    fn transactions_and_sqlite_are_judged_beside_ext4() {
        assert!(SHAPES.contains(&SHAPE_BAR.0));
        let (shape, sqlite) = ("16x4KiB in 4", "sqlite row");
        let rows = [
            row(shape, "sheaf", [900.0, 2100.0]),
            row(shape, "sheaf-fdatasync", [300.0, 700.0]),
            row(shape, "ext4", [300.0, 1000.0]),
            row("64x4KiB in 8", "sheaf", [1.0, 1.0]),
            row("64x4KiB in 8", "ext4", [1.0, 1.0]),
            row(sqlite, "sheaf-mount", [2000.0, 2000.0]),
            row(sqlite, "ext4-rollback", [1000.0, 1000.0]),
            row(sqlite, "ext4-wal", [4000.0, 4000.0]),
        ];
        let found = checks(&rows);
        let found: Vec<_> = found
            .iter()
            .map(|c| (&*c.name, c.value, c.bar, c.ok))
            .collect();
        let wanted = [
            ("16x4KiB in 4 by ext4", 2.55, 2.0, true),
            ("sqlite row by ext4-rollback", 2.0, 1.5, true),
            ("sqlite row by ext4-wal", 0.5, 1.0, false),
        ];
        assert_eq!(found, wanted);
        let slow = [
            row(shape, "sheaf", [500.0, 500.0]),
            row(shape, "ext4", [300.0, 300.0]),
        ];
        assert!(!checks(&slow)[0].ok);
        assert!(checks(&slow[..1]).is_empty());
    }

    /// Flushes and bytes of 200 transactions before were taken for some of those that are timed.
    #[test]
    fn what_the_device_has_done_is_of_all_transactions() {
        let span = Span {
            seconds: 1.0,
            busy_seconds: None,
            written_bytes: Some(6_000_000),
            flushes: Some(1200),
        };
        let (outcome, all) = rows_told("1000 500000000 1200\n", &span).unwrap();
        assert_eq!(all, 1200.0);
        assert_eq!(outcome.rate, 2000.0);
        assert_eq!((outcome.bytes, outcome.flushes), (5000.0, 1.0));
        assert!(rows_told("1000 500000000\n", &span).is_none());
        assert!(rows_told("", &span).is_none());
    }

    /// SQLite without them made journals, and the figures were said to be of atomic writes.
    #[test]
    fn sqlite_on_sheaf_commits_by_atomic_writes_alone() {
        assert!(check_atomic(1200.0, 1200.0).is_ok());
        let told = check_atomic(0.0, 1200.0).unwrap_err().to_string();
        assert!(
            told.contains("1200 transactions and 0 atomic writes"),
            "{told}"
        );
    }

    /// It has the same calls for them, and SQLite makes no journal there.
    #[test]
    fn a_row_of_f2fs_is_of_atomic_writes() {
        let name = |kernel, journal| Who::Journal(Target::Kernel(kernel), journal).name();
        assert_eq!(name(Kernel::F2fs, Journal::Rollback), "f2fs-atomic");
        assert_eq!(name(Kernel::F2fs, Journal::Wal), "f2fs-wal");
        assert_eq!(name(Kernel::Ext4, Journal::Rollback), BARS[0].0);
        assert_eq!(name(Kernel::Ext4, Journal::Wal), BARS[1].0);
    }
}

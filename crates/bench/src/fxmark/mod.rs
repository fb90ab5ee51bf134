//! FxMark: metadata and data operations by many threads, on Sheaf in this process and on
//! other file systems.
//!
//! 1. Each window has a fresh file system of its own, so that no side meets what an earlier
//!    workload has left. A folder of a mounted file system is the exception.
//! 2. The sides take turns within each run; a first, short run of each is not counted.
//! 3. Each thread runs on a CPU of its own as long as there are enough.
//! 4. Every window ends with a sync of its file system, and then with an unmount; what an operation
//!    takes up to either is measured besides the throughput. No sync reaches a mount of Sheaf on image files: a checkpoint, which writes
//!    more, takes its place there. Of Sheaf in this process a row has the commits and checkpoints
//!    that a window saw: in a short one there may be none.

mod workloads;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value};

pub use workloads::{Pool, WORKLOADS, Workload, find};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::meter::{Meter, Span};
use crate::runner::{self, Background, Measured, Window};
use crate::target::{InProcess, Kernel, KernelMount, Place, Posix, Remedies, SheafMount};
use crate::target::{Side, Storage, Target};
use crate::{Error, interrupt};
pub(crate) use workloads::{BRANCHES, EMPTY_SHARED, Run, Scale};

/// Longest window of the run that is not counted.
const WARM_UP: Duration = Duration::from_millis(200);
/// The pool of the run that is not counted is this much smaller.
const WARM_UP_PART: u64 = 10;
/// Workloads whose threads must not stand in each other's way.
const SCALING: [&str; 5] = ["MWCL", "MWUL", "MWCM", "MWUM", "DWOM"];
const SCALING_BAR: f64 = 1.8;
/// (workload, how much faster than the better of ext4 and XFS in this process, by one thread).
const BARS: [(&str, f64); 7] = [
    ("MWCL", 6.0),
    ("MWUL", 6.0),
    ("MWCM", 6.0),
    ("MWUM", 6.0),
    ("MWRL", 4.0),
    ("MRPL", 2.0),
    ("MRPM", 2.0),
];

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    pub workloads: Vec<&'static Workload>,
    pub threads: Vec<usize>,
    /// Longest time of a window.
    pub time: Duration,
    pub runs: usize,
    /// Objects that a workload has prepared, or may make, in one window, by all threads.
    pub pools: Vec<u64>,
    /// Most operations of a window, by all threads.
    pub operations: Option<u64>,
    /// Besides Sheaf in this process.
    pub against: Vec<Target>,
    pub storage: Storage,
    /// The program to mount with.
    pub sheaf: PathBuf,
    /// For all that Sheaf takes in this process, in bytes.
    pub memory: usize,
    /// Calls are relative to open directories, on all sides.
    pub relative: bool,
}

/// The workloads with these names, in any case; without names all.
pub fn select(names: &[String]) -> Result<Vec<&'static Workload>, Error> {
    if names.is_empty() {
        return Ok(WORKLOADS.iter().collect());
    }
    let mut selected = Vec::new();
    for name in names {
        let name = name.trim().to_uppercase();
        let workload = find(&name).ok_or_else(|| {
            let all: Vec<&str> = WORKLOADS.iter().map(|workload| workload.name).collect();
            Error::Usage(format!(
                "there is no workload '{name}', but {}",
                all.join(", ")
            ))
        })?;
        if !selected.contains(&workload) {
            selected.push(workload);
        }
    }
    Ok(selected)
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if self.threads.is_empty() || self.threads.iter().any(|n| !(1..=1024).contains(n)) {
            return usage("--threads takes numbers from 1 to 1024");
        }
        if self.pools.is_empty() || self.pools.iter().any(|n| !(100..=100_000_000).contains(n)) {
            return usage("--pool takes numbers from 100 to 100000000");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        if self.operations == Some(0) {
            return usage("--operations takes a number from 1 on");
        }
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(3600));
        if self.time < least || self.time > most {
            return usage("--seconds takes a number from 0.001 to 3600");
        }
        Ok(())
    }

    /// What differs between the sides besides their file systems, which are mounted at `mount_point`.
    fn notes(&self, mount_point: &Path) -> Vec<String> {
        let mut notes = vec![
            "sheaf: its calls are those of a library in this process, and no system calls"
                .to_owned(),
        ];
        if self.against.is_empty() {
            return notes;
        }
        let is_mounted = self.against.iter().any(Target::needs_mount);
        let more = match mount_point.components().count() - 1 {
            more if is_mounted => format!("{more} more components, and the crossing of a mount"),
            _ => "more components".to_owned(),
        };
        notes.push(match self.relative {
            true => "paths begin on all sides in directories that are open (--relative), but for those of truncate"
                .to_owned(),
            false => format!(
                "paths begin, of sheaf, in a directory of its file system, and of the others at the root of this machine: \
                 {more} (--relative has all begin in directories that are open)"
            ),
        });
        let is_kernel =
            |target: &Target| matches!(target, Target::Kernel(kernel) if *kernel != Kernel::Tmpfs);
        let images = matches!(self.storage, Storage::Memory | Storage::Dir(_));
        if images && self.against.contains(&Target::SheafMount) {
            notes.push(
                "sheaf-mount: on image files no sync reaches its daemon; before a window, and in figures with the sync after it, \
                 `sheaf checkpoint` takes its place, which writes home as well what a sync leaves in the journal (--loop has a sync)"
                    .to_owned(),
            );
        }
        if images && self.against.iter().any(is_kernel) {
            notes.push(
                "sheaf: its images are reached without a loop device; file systems of the kernel have one below them \
                 (--loop has all sides on one)"
                    .to_owned(),
            );
        }
        notes
    }

    /// Bytes of storage that the most demanding window needs.
    fn bytes(&self) -> u64 {
        let pages = |w: &&Workload| matches!(w.pool, Pool::Pages | Pool::PageFiles);
        // What a file takes in the most generous of the file systems, its name included.
        let object = 1536;
        let object = match self.workloads.iter().any(pages) {
            true => object + 4096,
            false => object,
        };
        let most = |values: &mut dyn Iterator<Item = u64>| values.max().unwrap_or(0);
        let pool = most(&mut self.pools.iter().copied());
        let threads = most(&mut self.threads.iter().map(|&n| n as u64));
        pool * object + threads * (8 << 20) + (768 << 20)
    }
}

/// The windows of one target, workload, number of threads and pool.
struct Series {
    workload: &'static Workload,
    target: Target,
    threads: usize,
    pool: Option<u64>,
    windows: Vec<Outcome>,
}

/// What one window gave.
struct Outcome {
    measured: Measured,
    /// From the start until the file system was unmounted, where it was.
    unmounted: Option<Span>,
    /// How Sheaf reaches its devices in this process.
    io: Option<String>,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let mounts = options.against.iter().any(Target::needs_mount);
    let place = Place::new(
        &options.storage,
        options.bytes(),
        mounts,
        Remedies::less("--pool").without_root("--against none, or paths only"),
    )?;
    let bench = Bench {
        options,
        meter: Meter::new(place.devices())?,
        place,
        cpus: runner::allowed_cpus()?,
    };
    let notes = options.notes(&bench.place.mount_point()?);
    let mut all = Vec::new();
    for &workload in &options.workloads {
        for pool in pools(workload, &options.pools) {
            for &threads in &options.threads {
                all.extend(bench.series(workload, pool, threads, progress)?);
            }
        }
    }
    let mut rows: Vec<Row> = all.iter().map(row).collect();
    for row in &mut rows {
        let relative = Value::from(options.relative);
        row.extra.insert("relative".to_owned(), relative);
    }
    let checks = checks(&rows);
    let without = without_checkpoints(&rows);
    let report = Report::new("fxmark", rows, checks);
    Ok(report
        .with_notes(notes)
        .with_notes(without)
        .with_notes(crate::target::notes(&options.against)))
}

/// The sizes that make a difference to a workload.
fn pools(workload: &Workload, asked: &[u64]) -> Vec<Option<u64>> {
    match workload.pool {
        Pool::None => vec![None],
        pool => asked.iter().map(|&asked| pool.size(asked)).collect(),
    }
}

struct Bench<'a> {
    options: &'a Options,
    place: Place,
    meter: Meter,
    cpus: Vec<usize>,
}

impl Bench<'_> {
    /// All sides in one workload, taking turns.
    fn series(
        &self,
        workload: &'static Workload,
        pool: Option<u64>,
        threads: usize,
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Series>, Error> {
        let series = |target| Series {
            workload,
            target,
            threads,
            pool,
            windows: Vec::new(),
        };
        let mut sides: Vec<Series> = self.targets(workload, threads).map(series).collect();
        for run in 0..=self.options.runs {
            for side in &mut sides {
                interrupt::check()?;
                let name = format!("{}/{threads}", workload.name);
                let target = side.target.name();
                let of = self.options.runs;
                progress(&match run {
                    0 => format!("{name} on {target}, warm-up"),
                    run => format!("{name} on {target}, run {run} of {of}"),
                });
                let measured = self.window(side, run == 0);
                let measured = measured.map_err(|error| error.on(&name, &target))?;
                if run > 0 {
                    side.windows.push(measured);
                }
            }
        }
        Ok(sides)
    }

    fn targets(&self, workload: &Workload, threads: usize) -> impl Iterator<Item = Target> {
        let scaling = SCALING.contains(&workload.name) && threads == 2 && self.cpus.len() > 1;
        let one_cpu = scaling.then_some(Target::SheafOneCpu);
        let own = [Target::Sheaf].into_iter().chain(one_cpu);
        own.chain(self.options.against.iter().cloned())
    }

    /// One window on a fresh file system.
    fn window(&self, side: &Series, warm_up: bool) -> Result<Outcome, Error> {
        let mut pool = side.pool.unwrap_or(0);
        let mut operations = self.options.operations;
        let mut window = Window {
            time: self.options.time,
            threads: side.threads,
            operations: u64::MAX,
            cpus: self.cpus.clone(),
        };
        if warm_up {
            pool /= WARM_UP_PART;
            operations = operations.map(|count| count / WARM_UP_PART);
            window.time = window.time.min(WARM_UP);
        }
        if let Some(count) = operations {
            window.operations = (count / side.threads as u64).max(1);
        }
        if side.target == Target::SheafOneCpu {
            window.cpus.truncate(1);
        }
        let subject = Subject {
            workload: side.workload,
            window: &window,
            pool,
            branches: BRANCHES,
            meter: &self.meter,
        };
        match &side.target {
            Target::Sheaf => self.in_process(&subject),
            Target::SheafOneCpu => {
                let _pinned = Pinned::to(&window.cpus, &self.cpus)?;
                self.in_process(&subject)
            }
            Target::SheafMount => {
                let mount = SheafMount::make(&self.options.sheaf, &self.place, &[])?;
                let measured = subject.measure(&self.opened(mount.side()?)?)?;
                mount.close()?;
                self.unmounted(measured)
            }
            Target::Kernel(kernel) => self.on_kernel(*kernel, &subject),
            Target::Path(path) => {
                let folder = Folder::make(path)?;
                Ok(Outcome {
                    measured: subject.measure(&self.opened(Posix::new(&folder.0, None)?)?)?,
                    unmounted: None,
                    io: None,
                })
            }
        }
    }

    fn unmounted(&self, measured: Measured) -> Result<Outcome, Error> {
        Ok(Outcome {
            unmounted: Some(self.meter.since(measured.start)?),
            measured,
            io: None,
        })
    }

    fn in_process(&self, subject: &Subject<'_>) -> Result<Outcome, Error> {
        let devices = self.place.array()?;
        let mut fs = InProcess::make(&devices.paths, self.options.memory)?;
        if self.options.relative {
            fs = fs.relative()?;
        }
        let io = fs.io();
        let measured = subject.measure(&fs)?;
        fs.close()?;
        Ok(Outcome {
            io: Some(io),
            ..self.unmounted(measured)?
        })
    }

    fn opened(&self, side: Posix) -> Result<Posix, Error> {
        match self.options.relative {
            true => side.relative(),
            false => Ok(side),
        }
    }

    fn on_kernel(&self, kernel: Kernel, subject: &Subject<'_>) -> Result<Outcome, Error> {
        // Besides the pool there are the tree of MRPM, and directories.
        let files = subject.pool + subject.pool / 10 + 100_000;
        let mount = KernelMount::make(kernel, &self.place, files)?;
        let measured = subject.measure(&self.opened(Posix::new(mount.path(), None)?)?)?;
        mount.close()?;
        self.unmounted(measured)
    }
}

/// What happens in one window, wherever.
#[derive(Clone, Copy)]
struct Subject<'a> {
    workload: &'static Workload,
    window: &'a Window,
    pool: u64,
    branches: u64,
    meter: &'a Meter,
}

impl Subject<'_> {
    fn measure<S: Side>(&self, side: &S) -> Result<Measured, Error> {
        let scale = Scale {
            threads: self.window.threads,
            pool: self.pool,
            branches: self.branches,
        };
        let run = Run::prepare(side, self.workload, scale)?;
        runner::measure(self.window, &run, self.meter)
    }
}

/// The calling thread, and what it starts, stays on some CPUs as long as this lives.
struct Pinned<'a>(&'a [usize]);

impl<'a> Pinned<'a> {
    fn to(cpus: &[usize], before: &'a [usize]) -> Result<Self, Error> {
        runner::pin(cpus)?;
        Ok(Pinned(before))
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        if let Err(error) = runner::pin(self.0) {
            tracing::warn!("the benchmark stays on one CPU: {error}");
        }
    }
}

/// A fresh folder in somebody's file system.
struct Folder(PathBuf);

impl Folder {
    fn make(home: &Path) -> Result<Folder, Error> {
        let dir = home.join(format!("sheaf-bench-{}-files", std::process::id()));
        std::fs::create_dir(&dir).map_err(|e| Error::io(&dir, e))?;
        Ok(Folder(dir))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!("{}: not removed: {error}", self.0.display());
        }
    }
}

fn row(series: &Series) -> Row {
    let windows: Vec<Measured> = series.windows.iter().map(|w| w.measured).collect();
    let median = |value: fn(&Measured) -> f64| Spread::of(windows.iter().map(value)).median;
    let rates = windows.iter().map(Measured::rate);
    let rate = Spread::of(rates.clone());
    let mut extra = Map::new();
    Row::note_rates(&mut extra, rates);
    if let Some(pool) = series.pool {
        extra.insert("pool".to_owned(), Value::from(pool));
        let unit = series.workload.pool.unit();
        extra.insert("pool_unit".to_owned(), Value::from(unit));
        let used_up = windows.iter().filter(|window| window.used_up).count();
        extra.insert("pool_used_up_runs".to_owned(), Value::from(used_up));
    }
    let cpu_us = rounded(median(Measured::cpu_us), 1e3);
    extra.insert("cpu_us_per_op".to_owned(), cpu_us);
    Measured::put_seconds(&mut extra, &windows);
    let operations = median(|window| window.operations as f64);
    extra.insert("operations".to_owned(), Value::from(operations as u64));
    Background::put(&mut extra, &windows);
    all_in(&mut extra, "synced", series, |window| {
        Some(window.measured.synced)
    });
    all_in(&mut extra, "unmounted", series, |window| window.unmounted);
    if let Some(io) = series.windows.iter().find_map(|window| window.io.clone()) {
        extra.insert("io".to_owned(), Value::from(io));
    }
    Row {
        name: series.workload.name.to_owned(),
        target: series.target.name(),
        threads: series.threads,
        unit: "ops/s",
        median: rate.median,
        min: rate.min,
        max: rate.max,
        runs: windows.len(),
        extra,
    }
}

fn rounded(value: f64, unit: f64) -> Value {
    Value::from((value * unit).round() / unit)
}

/// What the machine did for an operation from the start to some end: medians, of what is known.
fn all_in(
    extra: &mut Map<String, Value>,
    end: &str,
    series: &Series,
    span: fn(&Outcome) -> Option<Span>,
) {
    let mut put = |what: &str, value: &dyn Fn(&Span) -> Option<f64>| {
        let each = |window: &Outcome| {
            let operations = window.measured.operations.max(1) as f64;
            Some(value(&span(window)?)? / operations)
        };
        let values: Vec<f64> = series.windows.iter().filter_map(each).collect();
        if !values.is_empty() {
            let median = rounded(Spread::of(values).median, 1e3);
            extra.insert(format!("{end}_{what}_per_op"), median);
        }
    };
    put("us", &|span| Some(span.seconds * 1e6));
    put("busy_us", &|span| Some(span.busy_seconds? * 1e6));
    put("written_bytes", &|span| Some(span.written_bytes? as f64));
}

/// A row of Sheaf's, and what it is judged by.
struct Judged<'a> {
    name: String,
    own: &'a Row,
    other: &'a Row,
    bar: f64,
}

/// The bars that these rows answer for.
fn checks(rows: &[Row]) -> Vec<Check> {
    let judged = judged(rows).into_iter();
    let check =
        |j: Judged<'_>| Check::new(j.name, j.own.quotients(j.other), Comparison::AtLeast, j.bar);
    judged.map(check).collect()
}

/// Rows of changes to metadata that are judged though their windows, or half of them, ended before a checkpoint: what that takes is in none
/// of their operations.
fn without_checkpoints(rows: &[Row]) -> Option<String> {
    let judged = judged(rows).into_iter();
    let judged = judged.filter(|judged| judged.own.name.starts_with("MW"));
    let checkpoints = |row: &Row| row.extra.get("checkpoints").and_then(Value::as_f64);
    let mut without: Vec<String> = judged
        .flat_map(|judged| [judged.own, judged.other])
        .filter(|row| checkpoints(row).is_some_and(|median| median < 1.0))
        .map(|row| format!("{}/{} {}", row.name, row.threads, row.target))
        .collect();
    without.sort_unstable();
    without.dedup();
    let rows = without.join(", ");
    (!without.is_empty())
        .then(|| format!("judged though their windows (by the median) had no checkpoint: {rows}"))
}

/// Of several pools the largest counts.
fn judged(rows: &[Row]) -> Vec<Judged<'_>> {
    let pool = |row: &Row| row.extra.get("pool").and_then(Value::as_u64);
    let find = |name: &str, target: &str, threads: usize| {
        let same = |row: &&Row| row.name == name && row.target == target && row.threads == threads;
        rows.iter().filter(same).max_by_key(|row| pool(row))
    };
    let mut judged = Vec::new();
    for (name, bar) in BARS {
        let Some(sheaf) = find(name, "sheaf", 1) else {
            continue;
        };
        let (whom, best) = match (find(name, "ext4", 1), find(name, "xfs", 1)) {
            (Some(ext4), Some(xfs)) if ext4.median > xfs.median => ("best kernel", ext4),
            (Some(_), Some(xfs)) => ("best kernel", xfs),
            (Some(ext4), None) => ("ext4", ext4),
            (None, Some(xfs)) => ("xfs", xfs),
            (None, None) => continue,
        };
        let name = format!("{name}/1 vs {whom}");
        judged.push(Judged {
            name,
            own: sheaf,
            other: best,
            bar,
        });
    }
    for name in SCALING {
        let two = find(name, "sheaf", 2);
        if let (Some(two), Some(one)) = (two, find(name, "sheaf-one-cpu", 2)) {
            let name = format!("{name}/2 vs one CPU");
            judged.push(Judged {
                name,
                own: two,
                other: one,
                bar: SCALING_BAR,
            });
        }
    }
    judged
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: u64 = 256 << 20;

    fn options() -> Options {
        Options {
            workloads: select(&[]).unwrap(),
            threads: vec![1],
            time: Duration::from_millis(50),
            runs: 1,
            pools: vec![2000],
            operations: None,
            against: Vec::new(),
            storage: Storage::Memory,
            sheaf: PathBuf::from("/no/such/program"),
            memory: 64 << 20,
            relative: false,
        }
    }

    #[test]
    fn a_report_says_what_else_differs_between_the_sides() {
        let at = Path::new("/tmp/bench/mnt");
        let mut options = options();
        let said = |options: &Options| options.notes(at).join("\n");
        let alone = said(&options);
        assert!(
            alone.contains("library") && !alone.contains("paths"),
            "{alone}"
        );
        options.against = vec![Target::Kernel(Kernel::Xfs)];
        let beside = said(&options);
        assert!(beside.contains("3 more components"), "{beside}");
        assert!(beside.contains("--loop"), "{beside}");
        options.relative = true;
        options.storage = Storage::Loop(None);
        let equal = said(&options);
        assert!(equal.contains("directories that are open"), "{equal}");
        assert!(
            !equal.contains("more components") && !equal.contains("--loop"),
            "{equal}"
        );
    }

    fn window() -> Window {
        Window {
            time: Duration::from_millis(50),
            threads: 2,
            operations: u64::MAX,
            cpus: Vec::new(),
        }
    }

    /// Every workload on one side, each where `enter` leads.
    fn all_workloads<S: Side>(mut enter: impl FnMut(&'static Workload) -> S) {
        for workload in WORKLOADS {
            let subject = Subject {
                workload,
                window: &window(),
                pool: 2000,
                branches: 2,
                meter: &Meter::new(&[]).unwrap(),
            };
            let name = workload.name;
            let measured = subject.measure(&enter(workload));
            let measured = measured.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(measured.operations > 0, "{name}");
            let bounded = !matches!(workload.pool, Pool::None | Pool::Files(10));
            assert!(!bounded || measured.operations <= 2000, "{name}");
            assert!(bounded || !measured.used_up, "{name}");
        }
    }

    #[test]
    fn every_workload_runs_in_process() {
        let dir = tempfile::tempdir().unwrap();
        all_workloads(|workload| {
            let image = dir.path().join(workload.name);
            device::create_image(&image, IMAGE).unwrap();
            InProcess::make(&[image], 64 << 20).unwrap()
        });
    }

    /// In process and in a folder, where directories are open.
    #[test]
    fn every_workload_runs_relative_to_open_directories() {
        let dir = tempfile::tempdir().unwrap();
        all_workloads(|workload| {
            let image = dir.path().join(workload.name);
            device::create_image(&image, IMAGE).unwrap();
            let side = InProcess::make(&[image], 64 << 20).unwrap();
            side.relative().unwrap()
        });
        all_workloads(|workload| {
            let folder = dir.path().join(format!("{}-folder", workload.name));
            std::fs::create_dir(&folder).unwrap();
            Posix::new(&folder, None).unwrap().relative().unwrap()
        });
    }

    #[test]
    fn every_workload_runs_in_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        all_workloads(|workload| {
            let folder = dir.path().join(workload.name);
            std::fs::create_dir(&folder).unwrap();
            Posix::new(&folder, None).unwrap()
        });
    }

    #[test]
    fn a_suite_reports_both_sides_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("other");
        std::fs::create_dir(&folder).unwrap();
        let options = Options {
            workloads: select(&["mwcl".to_owned(), "DRBH".to_owned()]).unwrap(),
            time: Duration::from_millis(10),
            pools: vec![200, 400],
            against: vec![Target::Path(folder.clone())],
            storage: Storage::Dir(dir.path().to_owned()),
            ..options()
        };
        let report = run(&options, &|_| {}).unwrap();
        let named = |name: &str| report.rows.iter().filter(|row| row.name == name).count();
        assert_eq!((named("MWCL"), named("DRBH")), (4, 2));
        assert!(report.rows.iter().all(|row| row.median > 0.0));
        assert_eq!(report.rows[0].extra["pool"], 200);
        let extra = |target: &str, key: &str| {
            let row = report.rows.iter().find(|row| row.target == target).unwrap();
            row.extra.get(key).cloned()
        };
        let number = |target: &str, key: &str| extra(target, key).and_then(|value| value.as_f64());
        let synced = number("sheaf", "synced_us_per_op").unwrap();
        assert!(synced > 0.0);
        assert!(number("sheaf", "unmounted_us_per_op").unwrap() >= synced);
        assert!(extra("sheaf", "io").is_some());
        for key in ["commits", "checkpoints", "logged_bytes_per_op"] {
            assert!(number("sheaf", key).is_some(), "{key}");
        }
        let folder = folder.display().to_string();
        assert!(number(&folder, "synced_us_per_op").unwrap() > 0.0);
        assert_eq!(extra(&folder, "unmounted_us_per_op"), None);
        assert_eq!(extra(&folder, "checkpoints"), None);
        assert_eq!(extra(&folder, "synced_written_bytes_per_op"), None);
        assert!(report.checks.is_empty());
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn operations_may_be_counted_out() {
        let options = Options {
            workloads: select(&["MWRL".to_owned()]).unwrap(),
            threads: vec![1, 2],
            time: Duration::from_secs(600),
            operations: Some(300),
            ..options()
        };
        let report = run(&options, &|_| {}).unwrap();
        let operations = |row: usize| report.rows[row].extra["operations"].as_u64().unwrap();
        assert_eq!(operations(0), 300);
        // The first thread that has done its share ends the window.
        assert!((150..=300).contains(&operations(1)), "{}", operations(1));
    }

    #[test]
    fn senseless_options_are_usage_errors() {
        let refused = |options: Options| matches!(options.check(), Err(Error::Usage(_)));
        assert!(!refused(options()));
        assert!(refused(Options {
            threads: vec![0],
            ..options()
        }));
        assert!(refused(Options {
            threads: Vec::new(),
            ..options()
        }));
        assert!(refused(Options {
            pools: vec![5],
            ..options()
        }));
        assert!(refused(Options {
            operations: Some(0),
            ..options()
        }));
        assert!(refused(Options {
            runs: 0,
            ..options()
        }));
        assert!(refused(Options {
            time: Duration::ZERO,
            ..options()
        }));
        assert!(matches!(select(&["MWXX".to_owned()]), Err(Error::Usage(_))));
    }

    #[test]
    fn bars_are_computed_from_rows_that_are_there() {
        let row = |name: &str, target: &str, threads, median| Row {
            name: name.to_owned(),
            target: target.to_owned(),
            threads,
            unit: "ops/s",
            median,
            min: median,
            max: median,
            runs: 1,
            extra: Map::new(),
        };
        let mut rows = vec![
            row("MWCL", "sheaf", 1, 700.0),
            row("MWCL", "ext4", 1, 50.0),
            row("MWCL", "xfs", 1, 100.0),
            row("MWRL", "sheaf", 1, 100.0),
            row("MWRL", "ext4", 1, 50.0),
            row("DWOM", "sheaf", 2, 170.0),
            row("DWOM", "sheaf-one-cpu", 2, 100.0),
            row("DRBL", "sheaf", 1, 1.0),
        ];
        rows[0].extra.insert("pool".to_owned(), Value::from(10));
        let mut smaller = row("MWCL", "sheaf", 1, 1.0);
        smaller.extra.insert("pool".to_owned(), Value::from(5));
        rows.push(smaller);
        let found = checks(&rows);
        let found: Vec<_> = found
            .iter()
            .map(|check| (check.name.as_str(), check.value, check.bar, check.ok))
            .collect();
        assert_eq!(
            found,
            [
                ("MWCL/1 vs best kernel", 7.0, 6.0, true),
                ("MWRL/1 vs ext4", 2.0, 4.0, false),
                ("DWOM/2 vs one CPU", 1.7, 1.8, false),
            ]
        );
    }

    #[test]
    fn judged_rows_without_a_checkpoint_are_told() {
        let row = |name: &str, target: &str, checkpoints: f64| {
            let mut extra = Map::new();
            if target.starts_with("sheaf") {
                extra.insert("checkpoints".to_owned(), Value::from(checkpoints));
            }
            Row {
                name: name.to_owned(),
                target: target.to_owned(),
                threads: 1,
                unit: "ops/s",
                median: 1.0,
                min: 1.0,
                max: 1.0,
                runs: 1,
                extra,
            }
        };
        let mut rows = Vec::new();
        // Reads need none, and who has no bar is not judged.
        for (name, checkpoints) in [("MWCL", 0.0), ("MWUL", 2.0), ("MRPL", 0.0), ("DWAL", 0.0)] {
            rows.push(row(name, "sheaf", checkpoints));
            rows.push(row(name, "ext4", 0.0));
        }
        let told = without_checkpoints(&rows).unwrap();
        assert!(told.ends_with("had no checkpoint: MWCL/1 sheaf"), "{told}");
        assert_eq!(without_checkpoints(&rows[2..]), None);
    }

    #[test]
    fn names_of_workloads_are_unique() {
        for workload in WORKLOADS {
            assert_eq!(find(workload.name), Some(workload));
        }
        assert_eq!(WORKLOADS.len(), 19);
    }
}

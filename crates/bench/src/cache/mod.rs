//! What the page cache finds, and what it costs to find it.
//!
//! 1. *Found*: reads of each hundred whose page is cached, under loads that follow from a seed ([`loads`]). By Sheaf's own
//!    cache, by an exact LRU of as many pages, and by models of other rules in sets like Sheaf's ([`policies`]). Nothing is timed,
//!    and no device is there, so figures repeat exactly; runs differ by their seeds.
//! 2. *Cost*: threads read and overwrite pages of one file that is cached whole, by Sheaf in this process and by pread(2) and
//!    pwrite(2) on kernel file systems, in turn. Each of those has its file filled once by large writes and once by pages (`ext4-by-pages`), which
//!    decides of what size the pieces of its cache (folios) are, and with that what reads and overwrites cost; the better one counts. *hot*: one page that all read; to overwrite, one for each thread. *set*: pages
//!    drawn from the whole file. Before, on each side, pages of the whole file are read for a while, in which Sheaf has large pages put behind
//!    its cache. Write-back runs as ever; the device is memory.
//! 3. *Steady*: overwrites at random places of a file four times as large as the cache, on devices that take a set time for each
//!    request ([`steady`]).
//!
//! The bars: Zipf 0.99 at a tenth of the data at most 1 point below exact LRU; a scan of ten caches takes at most 5; a cached
//! page in at most two thirds of the kernel's time; two threads 1.9 times as many as one; in the steady state at least 0.9 times as many
//! overwrites through the cache as by asynchronous direct writes, and with a device that stalls half of the time 1.6 times as many as
//! without pre-cleaning.

mod loads;
mod policies;
mod steady;

use std::time::Duration;

use base::clock::Clock;
use base::rng::Rng;
use fs::FsOptions;
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::meter::Meter;
use crate::page::{PAGE, Page};
use crate::runner::{self, Load as Timed, Measured, Operation, Stop, Window};
use crate::target::{InProcess, KernelMount, Place, Posix, Remedies, Side, Storage, Target};
use crate::{Error, interrupt};
use loads::Load;

/// Of the file, in a call while it is filled.
const PIECE: usize = 1 << 20;
/// Operations between two looks at whether time is up.
const EACH: u64 = 64;
const LRU_POINTS: f64 = 1.0;
const SCAN_POINTS: f64 = 5.0;
const KERNEL_BAR: f64 = 1.5;
const THREADS_BAR: f64 = 1.9;

/// What can be measured apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Found,
    Cost,
    Steady,
}

impl Part {
    const ALL: [(&str, Part); 3] = [
        ("found", Part::Found),
        ("cost", Part::Cost),
        ("steady", Part::Steady),
    ];

    /// Those that the user names.
    pub fn select(names: &[String]) -> Result<Vec<Part>, Error> {
        let find = |name: &String| {
            let found = Self::ALL.iter().find(|(known, _)| *known == name.trim());
            let unknown = || {
                Error::Usage(format!(
                    "--parts takes found, cost, steady, and no '{name}'"
                ))
            };
            found.map(|(_, part)| *part).ok_or_else(unknown)
        };
        names.iter().map(find).collect()
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    pub parts: Vec<Part>,
    /// Pages that the cache holds where it is asked what it finds.
    pub pages: u64,
    /// Bytes of the file that is cached whole.
    pub set: u64,
    pub threads: Vec<usize>,
    pub time: Duration,
    /// How long the file that is cached whole is read before anything is timed.
    pub warm_up: Duration,
    pub runs: usize,
    /// Besides Sheaf in this process.
    pub against: Vec<Target>,
    pub storage: Storage,
    /// For all that Sheaf takes, in bytes.
    pub memory: usize,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if !(256..=1 << 22).contains(&self.pages) {
            return usage("--pages takes a number from 256 to 4194304");
        }
        if !(1 << 20..=1 << 36).contains(&self.set) || !self.set.is_multiple_of(PIECE as u64) {
            return usage("--set takes a size from 1M to 64G, in whole MiB");
        }
        if self.parts.is_empty() {
            return usage("--parts takes one name at least");
        }
        let room = FsOptions::default().with_memory(self.memory);
        if self.has(Part::Cost) && self.set > room.data.cache_bytes as u64 / 16 * 15 {
            return usage("--set must stay cached: it takes at most a third of --cache-size");
        }
        if self.threads.is_empty() || self.threads.iter().any(|n| !(1..=128).contains(n)) {
            return usage("--threads takes numbers from 1 to 128");
        }
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(3600));
        if self.time < least || self.time > most {
            return usage("--seconds takes a number from 0.001 to 3600");
        }
        if self.has(Part::Cost) && (self.warm_up < least || self.warm_up > most) {
            return usage("--warm-up takes a number from 0.001 to 3600");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        crate::target::only_kernels(&self.against)
    }

    fn has(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }
}

/// What is done to cached pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    ReadHot,
    ReadSet,
    OverwriteHot,
    OverwriteSet,
}

const ACCESSES: [Access; 4] = [
    Access::ReadHot,
    Access::ReadSet,
    Access::OverwriteHot,
    Access::OverwriteSet,
];

impl Access {
    fn name(self) -> &'static str {
        match self {
            Access::ReadHot => "read, hot",
            Access::ReadSet => "read, set",
            Access::OverwriteHot => "overwrite, hot",
            Access::OverwriteSet => "overwrite, set",
        }
    }
}

/// How large the writes are that fill the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fill {
    Pieces,
    Pages,
}

impl Fill {
    fn bytes(self) -> usize {
        match self {
            Fill::Pieces => PIECE,
            Fill::Pages => PAGE,
        }
    }

    /// The side's name in rows.
    fn of(self, target: &Target) -> String {
        match self {
            Fill::Pieces => target.name(),
            Fill::Pages => format!("{}-by-pages", target.name()),
        }
    }
}

/// Sheaf, whose cache has pages of one size, and kernel file systems by both fills.
fn sides(options: &Options) -> impl Iterator<Item = (Target, Fill)> {
    let kernels = options.against.iter().cloned();
    let kernels = kernels.flat_map(|t| [(t.clone(), Fill::Pieces), (t, Fill::Pages)]);
    [(Target::Sheaf, Fill::Pieces)].into_iter().chain(kernels)
}

/// One side, doing one thing by so many threads.
struct Series {
    target: Target,
    fill: Fill,
    access: Access,
    threads: usize,
    windows: Vec<Measured>,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let (mut rows, mut checks) = (Vec::new(), Vec::new());
    if options.has(Part::Found) {
        rows = found(options, progress)?;
        checks = found_checks(&rows);
    }
    if options.has(Part::Cost) {
        let cost = costs(options, progress)?;
        checks.extend(cost_checks(options, &cost));
        rows.extend(cost);
    }
    let mut notes: Vec<String> = crate::target::notes(&options.against).collect();
    if options.has(Part::Steady) {
        let steady = steady::rows(options, progress)?;
        checks.extend(steady::checks(&steady));
        rows.extend(steady);
        notes.push(steady::note());
    }
    Ok(Report::new("cache", rows, checks).with_notes(notes))
}

/// What a cached page costs on each side.
fn costs(options: &Options, progress: &dyn Fn(&str)) -> Result<Vec<Row>, Error> {
    let mut all = Vec::new();
    for (target, fill) in sides(options) {
        for access in ACCESSES {
            for &threads in &options.threads {
                all.push(Series {
                    target: target.clone(),
                    fill,
                    access,
                    threads,
                    windows: Vec::new(),
                });
            }
        }
    }
    let place = Place::new(
        &options.storage,
        4 * options.set + (1 << 30),
        !options.against.is_empty(),
        Remedies::less("--set").without_root("--against none"),
    )?;
    let meter = Meter::new(place.devices())?;
    for run in 1..=options.runs {
        for series in all.chunk_by_mut(|a, b| (&a.target, a.fill) == (&b.target, b.fill)) {
            let name = series[0].fill.of(&series[0].target);
            progress(&format!("{name}, run {run} of {}", options.runs));
            let done = one_run(options, &place, &meter, series);
            done.map_err(|error| error.on("cache", &name))?;
        }
    }
    Ok(all.iter().map(|series| row(options, series)).collect())
}

/// What each cache finds under each load.
fn found(options: &Options, progress: &dyn Fn(&str)) -> Result<Vec<Row>, Error> {
    let mut rows = Vec::new();
    for load in loads::ALL {
        progress(load.name());
        for name in policies::NAMES {
            let mut seeds = Vec::new();
            for seed in 1..=options.runs as u64 {
                interrupt::check()?;
                let mut cache = policies::make(name, options.pages);
                seeds.push(load.hits(&mut *cache, options.pages, seed));
            }
            let mut extra = Map::new();
            extra.insert("cache_pages".to_owned(), Value::from(options.pages));
            let spread = Spread::of(seeds);
            rows.push(Row {
                name: load.name().to_owned(),
                target: name.to_owned(),
                threads: 1,
                unit: "% found",
                median: spread.median,
                min: spread.min,
                max: spread.max,
                runs: options.runs,
                extra,
            });
        }
    }
    Ok(rows)
}

fn found_checks(rows: &[Row]) -> Vec<Check> {
    let of = |load: Load, target: &str| {
        let mut found = rows.iter();
        let row = found.find(|row| row.name == load.name() && row.target == target);
        row.map_or(f64::NAN, |row| row.median)
    };
    let sheaf = of(Load::Zipf, policies::SHEAF);
    let above = sheaf - of(Load::Zipf, policies::LRU);
    let lost = sheaf - of(Load::Scan, policies::SHEAF);
    vec![
        Check::new(
            "zipf 0.99, points above exact LRU",
            above,
            Comparison::AtLeast,
            -LRU_POINTS,
        ),
        Check::new(
            "zipf 0.99, points that a scan takes",
            lost,
            Comparison::AtMost,
            SCAN_POINTS,
        ),
    ]
}

/// Fills a file on a fresh file system, and does each thing to it in turn.
fn one_run(
    options: &Options,
    place: &Place,
    meter: &Meter,
    series: &mut [Series],
) -> Result<(), Error> {
    match series[0].target {
        Target::Kernel(kernel) => {
            let mount = KernelMount::make(kernel, place, 1000)?;
            let side = Posix::new(mount.path(), None)?;
            measure_all(options, &side, meter, series)?;
            drop(side);
            mount.close()
        }
        _ => {
            let devices = place.array()?;
            let side = InProcess::make(&devices.paths, options.memory)?;
            measure_all(options, &side, meter, series)?;
            side.close()
        }
    }
}

fn measure_all<S: Side>(
    options: &Options,
    side: &S,
    meter: &Meter,
    series: &mut [Series],
) -> Result<(), Error> {
    let file = side.create(&side.root(), "cached")?;
    let piece = vec![7; series.first().map_or(PIECE, |series| series.fill.bytes())];
    for offset in (0..options.set).step_by(piece.len()) {
        interrupt::check()?;
        side.write(&file, offset, &piece)?;
    }
    side.sync()?;
    let mut page = Page::of(0);
    for offset in (0..options.set).step_by(PAGE) {
        side.read(&file, offset, &mut page.0)?;
    }
    let (clock, mut rng, pages) = (Clock::real(), Rng::new(0), options.set / PAGE as u64);
    let warm_ns = clock.monotonic_ns() + options.warm_up.as_nanos() as u64;
    while clock.monotonic_ns() < warm_ns {
        interrupt::check()?;
        for _ in 0..EACH {
            side.read(&file, rng.below(pages) * PAGE as u64, &mut page.0)?;
        }
    }
    for series in series {
        let load = Cached {
            side,
            file: &file,
            access: series.access,
            pages,
        };
        let window = Window {
            time: options.time,
            threads: series.threads,
            operations: u64::MAX,
            cpus: runner::allowed_cpus()?,
        };
        let measured = runner::measure(&window, &load, meter)?;
        series.windows.push(measured.whole()?);
    }
    Ok(())
}

/// A file that is cached whole.
struct Cached<'a, S: Side> {
    side: &'a S,
    file: &'a S::File,
    access: Access,
    pages: u64,
}

impl<S: Side> Timed for Cached<'_, S> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let mut rng = Rng::new(thread as u64 + 1);
        let mut page = Page::of(thread as u8);
        let own = thread as u64 % self.pages;
        Ok(Box::new(move || {
            for _ in 0..EACH {
                let number = match self.access {
                    Access::ReadHot => 0,
                    Access::OverwriteHot => own,
                    Access::ReadSet | Access::OverwriteSet => rng.below(self.pages),
                };
                let offset = number * PAGE as u64;
                match self.access {
                    Access::ReadHot | Access::ReadSet => {
                        self.side.read(self.file, offset, &mut page.0)?;
                    }
                    Access::OverwriteHot | Access::OverwriteSet => {
                        self.side.write(self.file, offset, &page.0)?;
                    }
                }
            }
            Ok(EACH)
        }))
    }

    fn settle(&self) -> Result<(), Error> {
        self.side.sync()
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        self.side.cpu_ns()
    }
}

fn row(options: &Options, series: &Series) -> Row {
    let rates = || series.windows.iter().map(Measured::rate);
    let spread = Spread::of(rates());
    let mut extra = Map::new();
    Row::note_rates(&mut extra, rates());
    Measured::put_seconds(&mut extra, &series.windows);
    let cpu = Spread::of(series.windows.iter().map(Measured::cpu_us));
    extra.insert("cpu_us_per_op".to_owned(), Value::from(cpu.median));
    let bytes = match series.access {
        Access::ReadHot => PAGE as u64,
        Access::OverwriteHot => (PAGE * series.threads) as u64,
        Access::ReadSet | Access::OverwriteSet => options.set,
    };
    extra.insert("set_bytes".to_owned(), Value::from(bytes));
    let warm_up = options.warm_up.as_secs_f64();
    extra.insert("warm_up_s".to_owned(), Value::from(warm_up));
    Row {
        name: series.access.name().to_owned(),
        target: series.fill.of(&series.target),
        threads: series.threads,
        unit: "ops/s",
        median: spread.median,
        min: spread.min,
        max: spread.max,
        runs: options.runs,
        extra,
    }
}

/// Against the first kernel file system with one thread, by whichever fill it does this faster, and two threads against one.
fn cost_checks(options: &Options, rows: &[Row]) -> Vec<Check> {
    let find = |access: Access, (target, fill): (&Target, Fill), threads: usize| {
        rows.iter().find(|row| {
            row.name == access.name() && row.target == fill.of(target) && row.threads == threads
        })
    };
    let own = (&Target::Sheaf, Fill::Pieces);
    let mut checks = Vec::new();
    for access in ACCESSES {
        let one = find(access, own, 1);
        let kernel = options.against.first();
        let theirs = kernel.and_then(|kernel| {
            let fills = [Fill::Pieces, Fill::Pages];
            let fills = fills.map(|fill| find(access, (kernel, fill), 1));
            let fills = fills.into_iter().flatten();
            fills.max_by(|a, b| a.median.total_cmp(&b.median))
        });
        if let (Some(one), Some(theirs)) = (one, theirs) {
            let name = format!("{}/1 vs {}", access.name(), theirs.target);
            let bar = (Comparison::AtLeast, KERNEL_BAR);
            checks.push(Check::new(name, one.quotients(theirs), bar.0, bar.1));
        }
        if let (Some(one), Some(two)) = (one, find(access, own, 2)) {
            let name = format!("{}, 2 threads vs 1", access.name());
            let bar = (Comparison::AtLeast, THREADS_BAR);
            checks.push(Check::new(name, two.quotients(one), bar.0, bar.1));
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(home: &std::path::Path) -> Options {
        Options {
            parts: vec![Part::Found, Part::Cost],
            pages: 512,
            set: 2 << 20,
            threads: vec![1, 2],
            time: Duration::from_millis(20),
            warm_up: Duration::from_millis(20),
            runs: 2,
            against: Vec::new(),
            storage: Storage::Dir(home.to_owned()),
            memory: 256 << 20,
        }
    }

    #[test]
    fn what_is_found_and_what_it_costs_is_reported_with_its_bars() {
        let home = tempfile::tempdir().unwrap();
        let report = run(&options(home.path()), &|_| {}).unwrap();
        let found: Vec<&Row> = report.rows.iter().filter(|r| r.unit == "% found").collect();
        assert_eq!(found.len(), loads::ALL.len() * policies::NAMES.len());
        assert!(found.iter().all(|row| (0.0..=100.0).contains(&row.median)));
        let timed: Vec<&Row> = report.rows.iter().filter(|r| r.unit == "ops/s").collect();
        assert_eq!(timed.len(), ACCESSES.len() * 2);
        assert!(timed.iter().all(|row| row.median > 0.0 && row.runs == 2));
        // Two of what is found, and two threads against one.
        assert_eq!(report.checks.len(), 2 + ACCESSES.len());
        assert!(report.checks[..2].iter().all(|check| check.ok));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn each_access_is_judged_by_the_better_of_the_kernels_fills() {
        let home = tempfile::tempdir().unwrap();
        let ext4 = Target::parse("ext4").unwrap();
        let options = Options {
            against: vec![ext4.clone()],
            ..options(home.path())
        };
        let names: Vec<String> = sides(&options).map(|(t, fill)| fill.of(&t)).collect();
        assert_eq!(names, ["sheaf", "ext4", "ext4-by-pages"]);
        let row = |target: &Target, fill: Fill, access: Access, rate: f64| {
            let series = Series {
                target: target.clone(),
                fill,
                access,
                threads: 1,
                windows: Vec::new(),
            };
            Row {
                median: rate,
                extra: Map::new(),
                ..row(&options, &series)
            }
        };
        let (read, write) = (Access::ReadSet, Access::OverwriteSet);
        let found = cost_checks(
            &options,
            &[
                row(&Target::Sheaf, Fill::Pieces, read, 6.0),
                row(&ext4, Fill::Pieces, read, 3.0),
                row(&ext4, Fill::Pages, read, 2.0),
                row(&Target::Sheaf, Fill::Pieces, write, 6.0),
                row(&ext4, Fill::Pieces, write, 1.0),
                row(&ext4, Fill::Pages, write, 4.0),
            ],
        );
        let found: Vec<_> = found.iter().map(|c| (c.name.as_str(), c.value)).collect();
        let wanted = [
            ("read, set/1 vs ext4", 2.0),
            ("overwrite, set/1 vs ext4-by-pages", 1.5),
        ];
        assert_eq!(found, wanted);
    }

    /// Loads are what they are said to be: of a loop that fits everything is found, of one that does not an LRU finds nothing.
    #[test]
    fn models_behave_as_their_rules_say() {
        let hits = |name, load: Load| load.hits(&mut *policies::make(name, 1024), 1024, 3);
        assert_eq!(hits(policies::LRU, Load::Loop), 100.0);
        assert_eq!(hits("lru-in-sets", Load::Loop), 100.0);
        assert_eq!(hits(policies::LRU, Load::LongLoop), 0.0);
        let lru = hits(policies::LRU, Load::Zipf);
        assert!((50.0..90.0).contains(&lru), "{lru}");
        assert!(hits(policies::LRU, Load::Scan) < lru - 3.0, "a scan costs");
        for better in [policies::SHEAF, "s3-fifo", "lfu", "clock"] {
            assert!(hits(better, Load::Zipf) > lru, "{better}");
        }
        assert!((hits("lru-in-sets", Load::Zipf) - lru).abs() < 1.0);
        assert!(hits("lfu", Load::Shift) < hits(policies::LRU, Load::Shift));
    }

    /// None was refused: windows of no time, and of more than anybody waits for.
    #[test]
    fn times_out_of_their_bounds_are_usage_errors() {
        let home = tempfile::tempdir().unwrap();
        let refused = |options: Options| matches!(options.check(), Err(Error::Usage(_)));
        assert!(!refused(options(home.path())));
        for time in [Duration::ZERO, Duration::from_secs(3601), Duration::MAX] {
            assert!(refused(Options {
                time,
                ..options(home.path())
            }));
            assert!(refused(Options {
                warm_up: time,
                ..options(home.path())
            }));
        }
        let fitting = Duration::from_secs(3600);
        assert!(!refused(Options {
            time: fitting,
            warm_up: fitting,
            ..options(home.path())
        }));
    }

    #[test]
    fn a_set_that_does_not_stay_cached_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            set: 100 << 20,
            ..options(home.path())
        };
        let refused = run(&options, &|_| {}).unwrap_err();
        assert!(refused.to_string().contains("a third of --cache-size"));
    }
}

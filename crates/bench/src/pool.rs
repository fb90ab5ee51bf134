//! What a create and an unlink cost as the number of live files grows.
//!
//! 1. Each run of a side has a fresh file system with so many empty files, 100 (or as many as asked for) to a
//!    directory. A pair unlinks any of them and makes another in the directory of the one unlinked before, so that
//!    changes are spread evenly over all directories.
//! 2. A first tenth of the pairs is not measured: it brings the file system into the state that the rest keeps. The measured ones
//!    begin and end with everything at the devices, in Sheaf by a checkpoint, elsewhere by syncfs(2).
//! 3. Instructions are those of this process's threads since the file system was opened, Sheaf's background threads
//!    among them; of a kernel file system, its own threads are missing.
//! 4. Metadata written is what Sheaf counts: records, images, table pages, and what fills them up to blocks.
//! 5. The bars are those of 10^7 files in 2 GiB and of 5x10^6 in 512 MiB, each against 10^4; other numbers have none.

use base::clock::{Clock, process_cpu_ns};
use base::counter::Instructions;
use base::rng::Rng;
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::runner::Stop;
use crate::target::{
    InProcess, KernelMount, Place, Posix, Remedies, Side, Storage, Target, file_bytes,
};
use crate::{Error, interrupt};

/// Directories in each of those that hold directories.
const BRANCHES: u64 = 1000;
/// Live files that others are measured by.
const FEW: u64 = 10_000;
/// (live files, memory in bytes at most, how much of the time with few of them a pair may take).
const TIME_BARS: [(u64, usize, f64); 2] = [(10_000_000, 2 << 30, 1.5), (5_000_000, 512 << 20, 3.0)];
/// (live files, memory in bytes at most, how much of the instructions).
const INSTRUCTIONS_BAR: (u64, usize, f64) = (10_000_000, 2 << 30, 1.1);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers of live files.
    pub live: Vec<u64>,
    /// Pairs that are measured.
    pub pairs: u64,
    /// Files in a directory.
    pub per_dir: u64,
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
        if self.live.is_empty() || self.live.iter().any(|n| !(10..=100_000_000).contains(n)) {
            return usage("--live takes numbers from 10 to 100000000");
        }
        if !(10..=1_000_000_000).contains(&self.pairs) {
            return usage("--pairs takes a number from 10 to 1000000000");
        }
        if !(1..=1_000_000).contains(&self.per_dir) {
            return usage("--per-folder takes a number from 1 to 1000000");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        crate::target::only_kernels(&self.against)
    }
}

/// One side with one number of files.
struct Series {
    target: Target,
    live: u64,
    windows: Vec<Window>,
}

/// What one run measured, for a pair.
#[derive(Clone, Copy)]
struct Window {
    ns: f64,
    cpu_ns: f64,
    instructions: Option<f64>,
    /// They include the kernel's.
    with_kernel: bool,
    /// Bytes of metadata written, where they are counted.
    written: Option<f64>,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let most = options.live.iter().copied().max().unwrap_or(0);
    let bytes = (most + options.pairs.min(most)) * file_bytes(&options.against) + (1 << 30);
    let place = Place::new(
        &options.storage,
        bytes,
        !options.against.is_empty(),
        Remedies::less("--live").without_root("--against none"),
    )?;
    let targets = || {
        [Target::Sheaf]
            .into_iter()
            .chain(options.against.iter().cloned())
    };
    let mut all: Vec<Series> = Vec::new();
    for &live in &options.live {
        let series = |target| Series {
            target,
            live,
            windows: Vec::new(),
        };
        all.extend(targets().map(series));
    }
    for run in 1..=options.runs {
        for series in &mut all {
            let (name, live) = (series.target.name(), series.live);
            progress(&format!(
                "{live} files on {name}, run {run} of {}",
                options.runs
            ));
            let window = one_run(options, &place, &series.target, live);
            let window = window.map_err(|error| error.on("pool", &name))?;
            series.windows.push(window);
        }
    }
    let report = Report::new("pool", rows(options, &all), checks(options, &all));
    Ok(report.with_notes(crate::target::notes(&options.against)))
}

/// Fills a fresh file system and measures pairs on it.
fn one_run(options: &Options, place: &Place, target: &Target, live: u64) -> Result<Window, Error> {
    // Before the store's threads are there, so that they count.
    let counter = Instructions::count().ok();
    match target {
        Target::Kernel(kernel) => {
            let files = live + live.div_ceil(options.per_dir) + live / 10 + 10_000;
            let mount = KernelMount::make(*kernel, place, files)?;
            let side = Posix::new(mount.path(), None)?;
            let window = measure(options, &side, live, counter, &|| side.sync(), &|| None)?;
            drop(side);
            mount.close()?;
            Ok(window)
        }
        _ => {
            let devices = place.array()?;
            let side = InProcess::make(&devices.paths, options.memory)?;
            let written = || Some(side.written_by_cause().total());
            let window = measure(options, &side, live, counter, &|| side.settle(), &written)?;
            side.close()?;
            Ok(window)
        }
    }
}

fn measure<S: Side>(
    options: &Options,
    side: &S,
    live: u64,
    counter: Option<Instructions>,
    settle: &dyn Fn() -> Result<(), Error>,
    written: &dyn Fn() -> Option<u64>,
) -> Result<Window, Error> {
    let mut churn = Churn::fill(side, live, options.per_dir)?;
    settle()?;
    churn.run(options.pairs / 10)?;
    settle()?;
    let clock = Clock::real();
    let read = || counter.as_ref().and_then(|counter| counter.read().ok());
    let (before, before_written) = ((clock.monotonic_ns(), process_cpu_ns(), read()), written());
    churn.run(options.pairs)?;
    settle()?;
    let after = (clock.monotonic_ns(), process_cpu_ns(), read());
    let pair = |spent: u64| spent as f64 / options.pairs as f64;
    let instructions = after.2.zip(before.2);
    let bytes = written().zip(before_written);
    Ok(Window {
        ns: pair(after.0 - before.0),
        cpu_ns: pair(after.1 - before.1),
        instructions: instructions.map(|(after, before)| pair(after - before)),
        with_kernel: counter.is_some_and(|counter| counter.with_kernel()),
        written: bytes.map(|(after, before)| pair(after - before)),
    })
}

/// The live files: each place belongs to a directory, and holds a file of some number.
struct Churn<'s, S: Side> {
    side: &'s S,
    directories: Vec<S::Dir>,
    per_dir: u64,
    places: Vec<u32>,
    next: u32,
    rng: Rng,
    stop: Stop,
}

impl<'s, S: Side> Churn<'s, S> {
    fn fill(side: &'s S, live: u64, per_dir: u64) -> Result<Self, Error> {
        let mut churn = Churn {
            side,
            directories: Vec::new(),
            per_dir,
            places: vec![0; live as usize],
            next: 0,
            rng: Rng::new(1),
            stop: Stop::default(),
        };
        let mut above = side.root();
        for i in 0..live.div_ceil(per_dir) {
            // A level between keeps the root small.
            if i % BRANCHES == 0 {
                above = side.make_dir(&side.root(), &format!("{}", i / BRANCHES))?;
            }
            let made = side.make_dir(&above, &format!("{}", i % BRANCHES))?;
            churn.directories.push(made);
        }
        for place in 0..live as usize {
            churn.create(place)?;
        }
        Ok(churn)
    }

    fn directory(&self, place: usize) -> &S::Dir {
        &self.directories[place / self.per_dir as usize]
    }

    fn create(&mut self, place: usize) -> Result<(), Error> {
        self.stop.check()?;
        self.next += 1;
        self.places[place] = self.next;
        let name = format!("file-{}", self.next);
        self.side.create(self.directory(place), &name)?;
        Ok(())
    }

    /// Unlinks any file, and makes one where the last one was unlinked.
    fn run(&mut self, pairs: u64) -> Result<(), Error> {
        let mut free = None;
        for _ in 0..pairs {
            let mut place = self.rng.below(self.places.len() as u64) as usize;
            if free == Some(place) {
                place = (place + 1) % self.places.len();
            }
            let name = format!("file-{}", self.places[place]);
            self.side.unlink(self.directory(place), &name)?;
            if let Some(place) = free.replace(place) {
                self.create(place)?;
            }
        }
        match free {
            Some(place) => self.create(place),
            None => Ok(()),
        }
    }
}

fn median(series: &Series, of: impl Fn(&Window) -> Option<f64>) -> Option<Spread> {
    let values: Option<Vec<f64>> = series.windows.iter().map(of).collect();
    values.map(Spread::of)
}

fn rows(options: &Options, all: &[Series]) -> Vec<Row> {
    let row = |series: &Series, name: &str, unit, spread: Spread| {
        let mut extra = Map::new();
        extra.insert("pool".to_owned(), Value::from(series.live));
        extra.insert("pairs".to_owned(), Value::from(options.pairs));
        extra.insert("files_per_folder".to_owned(), Value::from(options.per_dir));
        if series.target == Target::Sheaf {
            extra.insert("memory_bytes".to_owned(), Value::from(options.memory));
        }
        let kernel = series.windows.iter().all(|window| window.with_kernel);
        extra.insert("kernel_instructions".to_owned(), Value::from(kernel));
        if let Some(cpu) = median(series, |window| Some(window.cpu_ns)) {
            extra.insert("cpu_us_per_op".to_owned(), Value::from(cpu.median / 1e3));
        }
        Row {
            name: name.to_owned(),
            target: series.target.name(),
            threads: 1,
            unit,
            median: spread.median,
            min: spread.min,
            max: spread.max,
            runs: options.runs,
            extra,
        }
    };
    let mut rows = Vec::new();
    for series in all {
        let times = median(series, |window| Some(1e9 / window.ns.max(1e-9)));
        let instructions = median(series, |window| window.instructions);
        rows.extend(times.map(|spread| row(series, "pairs", "pairs/s", spread)));
        let unit = "instructions/pair";
        rows.extend(instructions.map(|spread| row(series, "instructions", unit, spread)));
        let written = median(series, |window| window.written);
        rows.extend(written.map(|spread| row(series, "metadata", "bytes/pair", spread)));
    }
    rows
}

/// The bars, which are those of some numbers of files and amounts of memory.
fn checks(options: &Options, all: &[Series]) -> Vec<Check> {
    let of = |live: u64, value: fn(&Window) -> Option<f64>| {
        let mut sheaf = all.iter().filter(|series| series.target == Target::Sheaf);
        let series = sheaf.find(|series| series.live == live)?;
        median(series, value).map(|spread| spread.median)
    };
    let check = |what: &str, (live, memory, bar): (u64, usize, f64), value| {
        let (many, few) = (of(live, value)?, of(FEW, value)?);
        if options.memory > memory {
            return None;
        }
        let memory = options.memory >> 20;
        let name = format!("{what} of a pair, {live} files in {memory} MiB against {FEW}");
        Some(Check::new(name, many / few, Comparison::AtMost, bar))
    };
    let time = TIME_BARS.map(|bar| check("time", bar, |window| Some(window.ns)));
    let instructions = check("instructions", INSTRUCTIONS_BAR, |window| {
        window.instructions
    });
    time.into_iter().chain([instructions]).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_measured_and_leave_as_many_files() {
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            live: vec![20, 50],
            pairs: 100,
            per_dir: 7,
            runs: 2,
            against: Vec::new(),
            storage: Storage::Dir(home.path().to_owned()),
            memory: 256 << 20,
        };
        let report = run(&options, &|_| {}).unwrap();
        let names = ["pairs", "instructions", "metadata"];
        assert!(
            report
                .rows
                .iter()
                .all(|row| names.contains(&row.name.as_str()))
        );
        assert!(
            report
                .rows
                .iter()
                .all(|row| row.median > 0.0 && row.runs == 2)
        );
        assert_eq!(report.rows[0].extra["pool"], 20);
        let metadata = |row: &&Row| row.name == "metadata";
        assert_eq!(report.rows.iter().filter(metadata).count(), 2);
        // Of no size that a bar is about.
        assert!(report.checks.is_empty());
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn bars_are_of_their_sizes_and_memory() {
        let series = |live, ns, instructions| Series {
            target: Target::Sheaf,
            live,
            windows: vec![Window {
                ns,
                cpu_ns: ns,
                instructions,
                with_kernel: false,
                written: None,
            }],
        };
        let judged = |memory: usize, counted: bool| -> Vec<(String, f64, f64)> {
            let count = |value| counted.then_some(value);
            let all = [
                series(10_000, 100.0, count(1000.0)),
                series(1_000_000, 900.0, count(9000.0)),
                series(5_000_000, 200.0, count(9000.0)),
                series(10_000_000, 140.0, count(1200.0)),
            ];
            let options = Options {
                live: Vec::new(),
                pairs: 100,
                per_dir: 100,
                runs: 1,
                against: Vec::new(),
                storage: Storage::Memory,
                memory,
            };
            let checks = checks(&options, &all).into_iter();
            checks.map(|c| (c.name, c.value, c.bar)).collect()
        };
        let name = |what: &str, files: u64, memory: u64| {
            format!("{what} of a pair, {files} files in {memory} MiB against 10000")
        };
        let large = [
            (name("time", 10_000_000, 2048), 1.4, 1.5),
            (name("instructions", 10_000_000, 2048), 1.2, 1.1),
        ];
        assert_eq!(judged(2 << 30, true), large);
        assert_eq!(judged(2 << 30, false), large[..1]);
        let small = judged(512 << 20, false);
        assert_eq!(small[1], (name("time", 5_000_000, 512), 2.0, 3.0));
        assert!(judged(4 << 30, true).is_empty());
    }

    #[test]
    fn churning_keeps_the_number_of_files() {
        let dir = tempfile::tempdir().unwrap();
        let side = Posix::new(dir.path(), None).unwrap();
        let mut churn = Churn::fill(&side, 25, 10).unwrap();
        churn.run(333).unwrap();
        let mut files = 0;
        for dir in &churn.directories {
            files += std::fs::read_dir(dir.path()).unwrap().count();
        }
        assert_eq!((churn.directories.len(), files), (3, 25));
        let next = churn.next;
        assert_eq!(next, 25 + 333);
    }

    #[test]
    fn senseless_options_are_usage_errors() {
        let options = Options {
            live: vec![100],
            pairs: 100,
            per_dir: 100,
            runs: 1,
            against: vec![Target::SheafMount],
            storage: Storage::Memory,
            memory: 256 << 20,
        };
        assert!(matches!(options.check(), Err(Error::Usage(_))));
        let none = Options {
            live: Vec::new(),
            against: Vec::new(),
            ..options
        };
        assert!(matches!(none.check(), Err(Error::Usage(_))));
    }
}

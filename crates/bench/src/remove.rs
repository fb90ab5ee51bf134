//! A tree of many empty files is removed: by the library's parallel removal in this process, and by `rm -rf` on
//! kernel file systems.
//!
//! Each run of a side has a fresh file system. Files are in folders of 1,000, made one after the other and synced before
//! the time begins; what a side has in its caches by then it may use. The time ends when the removal is at the
//! devices, too: by a sync.

use std::process::Command;

use base::clock::Clock;
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::runner::Stop;
use crate::target::{
    InProcess, KernelMount, Place, Posix, Remedies, Side, Storage, Target, file_bytes, run_program,
};
use crate::{Error, interrupt};

const FILES_PER_FOLDER: u64 = 1000;
/// So many files Sheaf removes this much faster than `rm -rf` on ext4.
const BAR_FILES: u64 = 1_000_000;
const BAR: f64 = 10.0;
/// Until nothing is left, and until that is at the devices.
const REMOVED: &str = "removed";
const SYNCED: &str = "removed and synced";
const TREE: &str = "tree";

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Empty files; rounded up to whole folders.
    pub count: u64,
    /// Of the parallel removal; `rm` has one.
    pub threads: usize,
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
        if !(1..=1_000_000_000).contains(&self.count) {
            return usage("--count takes a number from 1 to 1000000000");
        }
        if !(1..=1024).contains(&self.threads) {
            return usage("--threads takes a number from 1 to 1024");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        crate::target::only_kernels(&self.against)
    }

    fn folders(&self) -> u64 {
        self.count.div_ceil(FILES_PER_FOLDER)
    }

    fn files(&self) -> u64 {
        self.folders() * FILES_PER_FOLDER
    }
}

/// Files a second of each run, of one target: until nothing is left, and until that is at the devices.
struct Series {
    target: Target,
    removed: Vec<f64>,
    synced: Vec<f64>,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let bytes = options.files() * file_bytes(&options.against) + (1 << 30);
    let place = Place::new(
        &options.storage,
        bytes,
        !options.against.is_empty(),
        Remedies::less("--count").without_root("--against none"),
    )?;
    let targets = [Target::Sheaf]
        .into_iter()
        .chain(options.against.iter().cloned());
    let series = |target| Series {
        target,
        removed: Vec::new(),
        synced: Vec::new(),
    };
    let mut all: Vec<Series> = targets.map(series).collect();
    for run in 1..=options.runs {
        for series in &mut all {
            let name = series.target.name();
            progress(&format!(
                "a removal on {name}, run {run} of {}",
                options.runs
            ));
            let seconds = one_run(options, &place, &series.target);
            let (removed, synced) = seconds.map_err(|error| error.on("remove", &name))?;
            let rate = |seconds: f64| options.files() as f64 / seconds.max(1e-6);
            series.removed.push(rate(removed));
            series.synced.push(rate(synced));
        }
    }
    let rows = rows(options, &all);
    let checks = checks(options, &rows);
    let report = Report::new("remove", rows, checks);
    Ok(report.with_notes(crate::target::notes(&options.against)))
}

/// Seconds until nothing is left, and until that is at the devices.
fn one_run(options: &Options, place: &Place, target: &Target) -> Result<(f64, f64), Error> {
    match target {
        Target::Kernel(kernel) => {
            let files = options.files() + options.folders() + 10_000;
            let mount = KernelMount::make(*kernel, place, files)?;
            let side = Posix::new(mount.path(), None)?;
            let tree = mount.path().join(TREE);
            let seconds = measure(options, &side, &|| {
                run_program(Command::new("rm").arg("-rf").arg(&tree))
            })?;
            drop(side);
            mount.close()?;
            Ok(seconds)
        }
        _ => {
            let devices = place.array()?;
            let side = InProcess::make(&devices.paths, options.memory)?;
            let seconds = measure(options, &side, &|| {
                let files = side.remove_all(TREE, options.threads)?;
                match files == options.files() {
                    true => Ok(()),
                    false => Err(Error::Unable(format!("{files} files were removed"))),
                }
            })?;
            side.close()?;
            Ok(seconds)
        }
    }
}

fn measure<S: Side>(
    options: &Options,
    side: &S,
    remove: &dyn Fn() -> Result<(), Error>,
) -> Result<(f64, f64), Error> {
    let (clock, stop) = (Clock::real(), Stop::default());
    // A fresh ext4 has a folder of its own.
    let before = names(side)?;
    let tree = side.make_dir(&side.root(), TREE)?;
    for folder in 0..options.folders() {
        let dir = side.make_dir(&tree, &format!("{folder:06}"))?;
        for file in 0..FILES_PER_FOLDER {
            stop.check()?;
            side.create(&dir, &format!("file{file:03}"))?;
        }
    }
    side.sync()?;
    let start = clock.monotonic_ns();
    remove()?;
    let removed = clock.monotonic_ns() - start;
    side.sync()?;
    let synced = clock.monotonic_ns() - start;
    match names(side)?.saturating_sub(before) {
        0 => Ok((removed as f64 / 1e9, synced as f64 / 1e9)),
        left => Err(Error::Unable(format!("{left} names are left"))),
    }
}

/// How many are in the root.
fn names<S: Side>(side: &S) -> Result<u64, Error> {
    let mut names = 0;
    side.list(&side.root(), &mut || {
        names += 1;
        true
    })?;
    Ok(names)
}

fn rows(options: &Options, all: &[Series]) -> Vec<Row> {
    let row = |name: &str, series: &Series, rates: &[f64]| {
        let mut extra = Map::new();
        extra.insert("files".to_owned(), Value::from(options.files()));
        Row::note_rates(&mut extra, rates.iter().copied());
        let rates = Spread::of(rates.iter().copied());
        let threads = match series.target {
            Target::Sheaf => options.threads,
            _ => 1,
        };
        Row {
            name: name.to_owned(),
            target: series.target.name(),
            threads,
            unit: "files/s",
            median: rates.median,
            min: rates.min,
            max: rates.max,
            runs: options.runs,
            extra,
        }
    };
    let removed = all.iter().map(|s| row(REMOVED, s, &s.removed));
    let synced = all.iter().map(|s| row(SYNCED, s, &s.synced));
    removed.chain(synced).collect()
}

/// The bar, which is one of a million files.
fn checks(options: &Options, rows: &[Row]) -> Vec<Check> {
    let find = |name: &str, target: &str| {
        let mut all = rows.iter();
        all.find(|row| row.name == name && row.target == target)
    };
    let check = |name: &&str| {
        let value = find(name, "sheaf")?.quotients(find(name, "ext4")?);
        let name = format!("{name} vs rm -rf on ext4");
        Some(Check::new(name, value, Comparison::AtLeast, BAR))
    };
    match options.files() == BAR_FILES {
        true => [REMOVED, SYNCED].iter().filter_map(check).collect(),
        false => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Kernel;

    fn options() -> Options {
        Options {
            count: 1500,
            threads: 2,
            runs: 2,
            against: Vec::new(),
            storage: Storage::Memory,
            memory: 256 << 20,
        }
    }

    #[test]
    fn a_tree_is_made_and_removed_in_each_run() {
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            storage: Storage::Dir(home.path().to_owned()),
            ..options()
        };
        let report = run(&options, &|_| {}).unwrap();
        let names: Vec<&str> = report.rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["removed", "removed and synced"]);
        assert!(report.rows[0].median >= report.rows[1].median);
        assert_eq!(report.rows[0].extra["files"], 2000);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_million_files_are_judged_against_ext4() {
        let series = |target, rate| Series {
            target,
            removed: vec![rate],
            synced: vec![rate / 2.0],
        };
        let all = [
            series(Target::Sheaf, 500.0),
            series(Target::Kernel(Kernel::Ext4), 40.0),
        ];
        let judged = |count| {
            let options = Options { count, ..options() };
            checks(&options, &rows(&options, &all))
        };
        let found = judged(1_000_000);
        assert!(found.len() == 2 && found.iter().all(|check| check.ok && check.value == 12.5));
        assert!(judged(100_000).is_empty());
    }

    #[test]
    fn what_is_left_behind_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let side = Posix::new(dir.path(), None).unwrap();
        let one = Options {
            count: 1,
            ..options()
        };
        let kept = measure(&one, &side, &|| Ok(()));
        assert!(kept.unwrap_err().to_string().contains("1 names are left"));
        // What was there before is none of it.
        let tree = dir.path().join(TREE);
        std::fs::remove_dir_all(&tree).unwrap();
        for other in ["a", "b", "c"] {
            side.make_dir(&side.root(), other).unwrap();
        }
        let removed = || std::fs::remove_dir_all(&tree).map_err(|e| Error::io(&tree, e));
        assert!(measure(&one, &side, &removed).is_ok());
    }

    #[test]
    fn senseless_options_are_usage_errors() {
        let refused = |options: Options| matches!(options.check(), Err(Error::Usage(_)));
        assert!(!refused(options()));
        assert!(refused(Options {
            count: 0,
            ..options()
        }));
        assert!(refused(Options {
            against: vec![Target::SheafMount],
            ..options()
        }));
    }
}

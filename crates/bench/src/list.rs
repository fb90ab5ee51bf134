//! One folder with many entries is listed and each entry stat'ed, cold: on a mount of Sheaf and, in the same run and taking
//! turns, on kernel file systems.
//!
//! Each run of a side has a fresh file system: empty files are made in one folder, one after the other, by one thread. Before each
//! of the two measured ways it is unmounted and mounted again, and the kernel drops what it has cached, so that every entry comes from
//! the devices:
//!
//! 1. `readdir+stat`: getdents64(2) to the end, and fstatat(2) of each entry in the order of the listing.
//! 2. `ls -lU`: the program, which besides reads two extended attributes of each file. Its output goes nowhere.
//!
//! Time is from the start to the last entry. All sides are on the same device, in turn: a loop device, or one that is given.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use base::clock::Clock;
use rustix::fs::{AtFlags, FileType, statat};
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::runner::Stop;
use crate::target::{KernelMount, Place, Remedies, SheafMount, Storage, Target, run_program};
use crate::{Error, interrupt};

const WAYS: [&str; 2] = ["readdir+stat", "ls -lU"];
/// What a file takes in the most generous of the file systems, with its name.
const FILE_BYTES: u64 = 1536;
/// With so many the bar holds: Sheaf no slower than ext4.
const BAR_FILES: u64 = 1_000_000;
const FOLDER: &str = "folder";

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Empty files.
    pub count: u64,
    pub runs: usize,
    /// Besides the mount of Sheaf.
    pub against: Vec<Target>,
    pub storage: Storage,
    /// The program to mount with.
    pub sheaf: std::path::PathBuf,
    /// More mount options for Sheaf.
    pub options: Vec<String>,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if !(1..=1_000_000_000).contains(&self.count) {
            return usage("--count takes a number from 1 to 1000000000");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        crate::target::only_kernels(&self.against)
    }
}

struct Series {
    target: Target,
    /// By way, entries a second of each run.
    rates: [Vec<f64>; 2],
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let place = Place::new(
        &options.storage,
        options.count * FILE_BYTES + (1 << 30),
        true,
        Remedies::less("--count"),
    )?;
    let targets = [Target::SheafMount]
        .into_iter()
        .chain(options.against.iter().cloned());
    let series = |target| Series {
        target,
        rates: [Vec::new(), Vec::new()],
    };
    let mut all: Vec<Series> = targets.map(series).collect();
    for run in 1..=options.runs {
        for series in &mut all {
            let name = series.target.name();
            progress(&format!(
                "a listing on {name}, run {run} of {}",
                options.runs
            ));
            let seconds = one_run(options, &place, &series.target);
            let seconds = seconds.map_err(|error| error.on("list", &name))?;
            for (rates, seconds) in series.rates.iter_mut().zip(seconds) {
                rates.push(options.count as f64 / seconds.max(1e-6));
            }
        }
    }
    let rows = rows(options, &all);
    let checks = checks(options, &rows);
    let report = Report::new("list", rows, checks);
    Ok(report.with_notes(crate::target::notes(&options.against)))
}

/// Seconds of each way on a fresh file system.
fn one_run(options: &Options, place: &Place, target: &Target) -> Result<[f64; 2], Error> {
    match target {
        Target::Kernel(kernel) => {
            let mut mount = KernelMount::make(*kernel, place, options.count + 10_000)?;
            let folder = mount.path().join(FOLDER);
            let seconds = ways(options.count, &folder, &mut || {
                mount.remount(place)?;
                mount.forget(place)
            })?;
            mount.close()?;
            Ok(seconds)
        }
        _ => {
            let mut mount = SheafMount::make(&options.sheaf, place, &options.options)?;
            let folder = mount.path().join(FOLDER);
            let seconds = ways(options.count, &folder, &mut || {
                mount.remount()?;
                mount.forget(place)
            })?;
            mount.close()?;
            Ok(seconds)
        }
    }
}

/// Fills a folder and lists it in both ways, with `remount` before each.
fn ways(
    count: u64,
    folder: &Path,
    remount: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<[f64; 2], Error> {
    let (clock, stop) = (Clock::real(), Stop::default());
    fs::create_dir(folder).map_err(|e| Error::io(folder, e))?;
    for i in 0..count {
        stop.check()?;
        let path = folder.join(format!("file-{i:08}"));
        File::create_new(&path).map_err(|e| Error::io(&path, e))?;
    }
    let mut cold = || {
        remount()?;
        Ok::<u64, Error>(clock.monotonic_ns())
    };
    let start = cold()?;
    let found = list(folder, &stop)?;
    let listed = clock.monotonic_ns() - start;
    if found != count {
        return Err(Error::Unable(format!("{found} files of {count} are there")));
    }
    let start = cold()?;
    let null = File::create("/dev/null").map_err(|e| Error::io(Path::new("/dev/null"), e))?;
    run_program(Command::new("ls").arg("-lU").arg(folder).stdout(null))?;
    let shown = clock.monotonic_ns() - start;
    Ok([listed as f64 / 1e9, shown as f64 / 1e9])
}

/// Regular files in a folder, each stat'ed.
fn list(folder: &Path, stop: &Stop) -> Result<u64, Error> {
    let mut files = 0;
    let opened = File::open(folder).map_err(|e| Error::io(folder, e))?;
    let mut buffer = vec![std::mem::MaybeUninit::uninit(); 32 << 10];
    let mut entries = rustix::fs::RawDir::new(&opened, &mut buffer);
    while let Some(entry) = entries.next() {
        stop.check()?;
        let entry = entry?;
        let stat = statat(&opened, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        files += u64::from(kind == FileType::RegularFile);
    }
    Ok(files)
}

fn rows(options: &Options, all: &[Series]) -> Vec<Row> {
    let row = |way: usize, series: &Series| {
        let rates = Spread::of(series.rates[way].iter().copied());
        let mut extra = Map::new();
        extra.insert("files".to_owned(), Value::from(options.count));
        Row::note_rates(&mut extra, series.rates[way].iter().copied());
        Row {
            name: WAYS[way].to_owned(),
            target: series.target.name(),
            threads: 1,
            unit: "entries/s",
            median: rates.median,
            min: rates.min,
            max: rates.max,
            runs: options.runs,
            extra,
        }
    };
    let ways = 0..WAYS.len();
    ways.flat_map(|way| all.iter().map(move |series| row(way, series)))
        .collect()
}

/// The bar, which is one of a million files.
fn checks(options: &Options, rows: &[Row]) -> Vec<Check> {
    let find = |target: &str| {
        let mut all = rows.iter();
        all.find(|row| row.name == WAYS[0] && row.target == target)
    };
    match (find("sheaf-mount"), find("ext4")) {
        (Some(sheaf), Some(ext4)) if options.count == BAR_FILES => {
            let name = format!("{} vs ext4", WAYS[0]);
            vec![Check::new(
                name,
                sheaf.quotients(ext4),
                Comparison::AtLeast,
                1.0,
            )]
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Kernel;

    #[test]
    fn both_ways_list_a_folder_cold() {
        let dir = tempfile::tempdir().unwrap();
        let mut remounts = 0;
        let mut remount = || {
            remounts += 1;
            Ok(())
        };
        let seconds = ways(30, &dir.path().join(FOLDER), &mut remount).unwrap();
        assert!(seconds.iter().all(|&seconds| seconds > 0.0));
        assert_eq!(remounts, 2);
    }

    #[test]
    fn a_folder_that_lacks_files_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(FOLDER);
        let mut lose = || {
            let lost = fs::remove_file(folder.join("file-00000003"));
            lost.map_err(|e| Error::io(&folder, e))
        };
        assert!(ways(5, &folder, &mut lose).is_err());
    }

    #[test]
    fn a_million_entries_are_judged_against_ext4() {
        let options = |count| Options {
            count,
            runs: 1,
            against: Vec::new(),
            storage: Storage::Memory,
            sheaf: "/no/such/program".into(),
            options: Vec::new(),
        };
        let series = |target, rate| Series {
            target,
            rates: [vec![rate], vec![1.0]],
        };
        let all = [
            series(Target::SheafMount, 90.0),
            series(Target::Kernel(Kernel::Ext4), 100.0),
        ];
        let judged = |count| checks(&options(count), &rows(&options(count), &all));
        let found = judged(1_000_000);
        assert_eq!((found.len(), found[0].value, found[0].ok), (1, 0.9, false));
        assert!(judged(100_000).is_empty());
    }

    #[test]
    fn rows_come_by_way() {
        let options = Options {
            count: 10,
            runs: 3,
            against: Vec::new(),
            storage: Storage::Memory,
            sheaf: "/no/such/program".into(),
            options: Vec::new(),
        };
        let series = Series {
            target: Target::SheafMount,
            rates: [vec![3.0, 1.0, 2.0], vec![1.0; 3]],
        };
        let rows = rows(&options, &[series]);
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, WAYS);
        assert_eq!(
            (rows[0].median, rows[0].extra["files"].as_u64()),
            (2.0, Some(10))
        );
        let none = Options {
            count: 0,
            ..options
        };
        assert!(matches!(none.check(), Err(Error::Usage(_))));
    }
}

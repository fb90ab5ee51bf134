//! Many small files: created, listed, stat'ed, read and removed on a mount of Sheaf and, in
//! the same run and taking turns, on kernel file systems.
//!
//! Each run of a side has a fresh file system. Between writing and reading it is unmounted,
//! which brings everything to the devices, and mounted again: on image files sync(2) would not
//! reach a FUSE daemon. Then, untimed, the kernel drops what it has cached, pages of image files included, so
//! that reads are cold on all sides; but images in memory (a tmpfs) stay there.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use base::clock::Clock;
use base::thread::try_parallel;
use serde_json::{Map, Value};

use crate::contract::{Report, Row, Spread};
use crate::target::{KernelMount, Place, Remedies, SheafMount, Storage, Target};
use crate::{Error, interrupt};

const FILES_PER_FOLDER: u64 = 1000;
const CONTENT: [u8; 1024] = [0x5a; 1024];
const PHASES: [&str; 6] = ["create", "remount", "list", "stat", "read", "remove"];
/// What a file takes in the most generous of the file systems.
const FILE_BYTES: u64 = 4096 + 1536;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Files of 1 KiB, in folders of 1,000; rounded up to whole folders.
    pub count: u64,
    /// Each works in folders of its own.
    pub threads: usize,
    pub runs: usize,
    /// Besides the mount of Sheaf.
    pub against: Vec<Target>,
    pub storage: Storage,
    /// The program to mount with.
    pub sheaf: PathBuf,
    /// More mount options for Sheaf.
    pub options: Vec<String>,
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

/// One file system that takes part.
struct Side {
    target: Target,
    /// Per phase, the files a second of each run.
    rates: Vec<Vec<f64>>,
    /// The most memory that the daemon used in any run, in bytes.
    peak: Option<u64>,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let bytes = options.files() * FILE_BYTES + (1 << 30);
    let place = Place::new(&options.storage, bytes, true, Remedies::less("--count"))?;
    let targets = [Target::SheafMount].into_iter();
    let mut sides: Vec<Side> = targets
        .chain(options.against.iter().cloned())
        .map(|target| Side {
            target,
            rates: vec![Vec::new(); PHASES.len()],
            peak: None,
        })
        .collect();
    for run in 1..=options.runs {
        for side in &mut sides {
            let name = side.target.name();
            progress(&format!(
                "many files on {name}, run {run} of {}",
                options.runs
            ));
            let seconds = one_run(options, &place, side);
            let seconds = seconds.map_err(|error| error.on("files", &name))?;
            for (rates, seconds) in side.rates.iter_mut().zip(seconds) {
                rates.push(options.files() as f64 / seconds.max(1e-6));
            }
        }
    }
    let report = Report::new("files", rows(options, &sides), Vec::new());
    let warm = matches!(options.storage, Storage::Memory | Storage::Loop(None));
    let warm = warm.then(|| {
        "images are in memory: reads after the remount find them there, on all sides".to_owned()
    });
    Ok(report
        .with_notes(crate::target::notes(&options.against))
        .with_notes(warm))
}

/// The seconds of each phase on a fresh file system.
fn one_run(options: &Options, place: &Place, side: &mut Side) -> Result<Vec<f64>, Error> {
    match &side.target {
        Target::Kernel(kernel) => {
            let files = options.files() + options.folders() + 10_000;
            let mut mount = KernelMount::make(*kernel, place, files)?;
            let mnt = mount.path().to_owned();
            let seconds = phases(&mnt, options, &mut |step| match step {
                Step::Remount => mount.remount(place),
                Step::Forget => mount.forget(place),
            })?;
            mount.close()?;
            Ok(seconds)
        }
        _ => {
            let mut mount = SheafMount::make(&options.sheaf, place, &options.options)?;
            let mnt = mount.path().to_owned();
            let mut peak = side.peak;
            let seconds = phases(&mnt, options, &mut |step| match step {
                Step::Remount => {
                    peak = peak.max(mount.peak_bytes());
                    mount.remount()
                }
                Step::Forget => mount.forget(place),
            })?;
            side.peak = peak.max(mount.peak_bytes());
            mount.close()?;
            Ok(seconds)
        }
    }
}

/// What happens between writing and reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Remount,
    /// Not timed.
    Forget,
}

/// Runs the phases, with both steps between writing and reading.
fn phases(
    mnt: &Path,
    options: &Options,
    between: &mut dyn FnMut(Step) -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let clock = Clock::real();
    let mut seconds = Vec::new();
    for phase in PHASES {
        let start = clock.monotonic_ns();
        match phase {
            "create" => in_folders(mnt, options, create)?,
            "remount" => between(Step::Remount)?,
            "list" => in_folders(mnt, options, list)?,
            "stat" => in_folders(mnt, options, stat)?,
            "read" => in_folders(mnt, options, read)?,
            _ => in_folders(mnt, options, remove)?,
        }
        seconds.push((clock.monotonic_ns() - start) as f64 / 1e9);
        if phase == "remount" {
            between(Step::Forget)?;
        }
    }
    Ok(seconds)
}

/// Calls `body`, which returns how many files it found or made, for every folder.
fn in_folders(
    mnt: &Path,
    options: &Options,
    body: impl Fn(&Path) -> io::Result<u64> + Sync,
) -> Result<(), Error> {
    let (threads, folders) = (options.threads, options.folders());
    let results = try_parallel(threads, |thread| {
        for folder in (thread as u64..folders).step_by(threads) {
            interrupt::check()?;
            let dir = mnt.join(format!("{folder:06}"));
            let files = body(&dir).map_err(|e| Error::io(&dir, e))?;
            if files != FILES_PER_FOLDER {
                let dir = dir.display();
                return Err(Error::Unable(format!("{dir}: {files} files are right")));
            }
        }
        Ok(())
    });
    results.map_err(Error::threads)?.into_iter().collect()
}

fn names(dir: &Path) -> impl Iterator<Item = PathBuf> {
    (0..FILES_PER_FOLDER).map(move |i| dir.join(format!("file{i:03}")))
}

fn create(dir: &Path) -> io::Result<u64> {
    fs::create_dir(dir)?;
    for path in names(dir) {
        File::create_new(path)?.write_all(&CONTENT)?;
    }
    Ok(FILES_PER_FOLDER)
}

fn list(dir: &Path) -> io::Result<u64> {
    fs::read_dir(dir)?.try_fold(0, |sum, entry| entry.map(|_| sum + 1))
}

fn stat(dir: &Path) -> io::Result<u64> {
    let mut right = 0;
    for path in names(dir) {
        right += u64::from(fs::symlink_metadata(path)?.size() == CONTENT.len() as u64);
    }
    Ok(right)
}

fn read(dir: &Path) -> io::Result<u64> {
    let mut right = 0;
    for path in names(dir) {
        right += u64::from(fs::read(path)? == CONTENT);
    }
    Ok(right)
}

fn remove(dir: &Path) -> io::Result<u64> {
    for path in names(dir) {
        fs::remove_file(path)?;
    }
    fs::remove_dir(dir)?;
    Ok(FILES_PER_FOLDER)
}

fn rows(options: &Options, sides: &[Side]) -> Vec<Row> {
    let row = |phase: usize, side: &Side| {
        let rates = Spread::of(side.rates[phase].iter().copied());
        let mut extra = Map::new();
        extra.insert("files".to_owned(), Value::from(options.files()));
        if let Some(peak) = side.peak {
            extra.insert("daemon_peak_bytes".to_owned(), Value::from(peak));
        }
        Row {
            name: PHASES[phase].to_owned(),
            target: side.target.name(),
            threads: options.threads,
            unit: "files/s",
            median: rates.median,
            min: rates.min,
            max: rates.max,
            runs: options.runs,
            extra,
        }
    };
    let phases = 0..PHASES.len();
    phases
        .flat_map(|phase| sides.iter().map(move |side| row(phase, side)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            count: 1500,
            threads: 2,
            runs: 1,
            against: Vec::new(),
            storage: Storage::Memory,
            sheaf: PathBuf::from("/no/such/program"),
            options: Vec::new(),
        }
    }

    #[test]
    fn every_phase_runs_in_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let mut steps = Vec::new();
        let mut between = |step| {
            steps.push(step);
            Ok(())
        };
        let seconds = phases(dir.path(), &options(), &mut between).unwrap();
        assert_eq!(seconds.len(), PHASES.len());
        assert_eq!(steps, [Step::Remount, Step::Forget]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_lacks_files_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        in_folders(dir.path(), &options(), create).unwrap();
        fs::remove_file(dir.path().join("000001/file007")).unwrap();
        assert!(in_folders(dir.path(), &options(), list).is_err());
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
            threads: 0,
            ..options()
        }));
        assert!(refused(Options {
            against: vec![Target::Path(PathBuf::from("/"))],
            ..options()
        }));
    }

    #[test]
    fn rows_come_by_phase() {
        let side = Side {
            target: Target::SheafMount,
            rates: vec![vec![3.0, 1.0, 2.0]; PHASES.len()],
            peak: Some(7),
        };
        let rows = rows(&options(), &[side]);
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, PHASES);
        assert_eq!((rows[0].median, rows[0].min), (2.0, 1.0));
        assert_eq!(rows[0].extra["files"], 2000);
        assert_eq!(rows[0].extra["daemon_peak_bytes"], 7);
    }
}

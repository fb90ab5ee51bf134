//! Bytes that reach the devices for each created file, in a steady state.
//!
//! 1. One thread makes empty files in folders of some number, 1,000 or a million by default. Everything counts that the file system writes: journal, nodes or inodes,
//!    directories, tables, allocation maps.
//! 2. Sheaf decides itself when to commit and when to make a checkpoint. Its window begins at the end of a checkpoint and ends at
//!    that of the last of so many later ones, and of more where no folder is full by then, so that each file's part of all of them is in it; both wait for what is
//!    being written. What a file takes does not depend on how fast files are made, but that commits are at least as
//!    frequent as their interval says.
//! 3. A kernel file system makes as many files as Sheaf did in the same run, before the window and within it; its window
//!    begins and ends with syncfs(2). What it then still has in its journal alone, and writes home when it becomes
//!    read-only, is in an extra figure, as is what Sheaf's closing writes: it belongs to files of the window and of
//!    before it in unknown parts.
//! 4. Of Sheaf's bytes an extra says what they are for.

use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::clock::Clock;
use engine::BytesWritten;
use rustix::fs::{major, minor};
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::meter::account_of;
use crate::runner::Stop;
use crate::target::{
    InProcess, Kernel, KernelMount, Place, Posix, Remedies, Side, Storage, Target, file_bytes,
};
use crate::{Error, interrupt};

/// A created file takes at most so many bytes.
const BAR: f64 = 400.0;
/// Files between two looks at the number of checkpoints.
const LOOK: u64 = 50;
/// Without a write, so that there is none to come.
const SETTLE: Duration = Duration::from_millis(100);
const SETTLE_LOOKS: usize = 300;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Of Sheaf, in the window.
    pub checkpoints: u64,
    /// Most files that may be made; ends the run with an error.
    pub most: u64,
    /// Numbers of files in a folder.
    pub per_folder: Vec<u64>,
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
        if !(3..=1000).contains(&self.checkpoints) {
            return usage("--checkpoints takes a number from 3 to 1000");
        }
        if !(1000..=1_000_000_000).contains(&self.most) {
            return usage("--most takes a number from 1000 to 1000000000");
        }
        let folders = &self.per_folder;
        if folders.is_empty() || folders.iter().any(|n| !(1..=1_000_000_000).contains(n)) {
            return usage("--per-folder takes numbers from 1 to 1000000000");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        let is_btrfs =
            |target: &Target| matches!(target, Target::Kernel(Kernel::Btrfs | Kernel::BtrfsRaid0));
        if self.against.iter().any(is_btrfs) {
            return usage(
                "a mount of btrfs does not tell its device, so that nobody counts what it writes",
            );
        }
        crate::target::only_on_devices(&self.against, "tmpfs writes to no device")
    }
}

struct Series {
    target: Target,
    per_folder: u64,
    /// Bytes for each file of each run.
    bytes: Vec<f64>,
    /// With what the end of its use wrote.
    ended: Vec<f64>,
    files: u64,
    /// Of Sheaf, in the window of the last run.
    checkpoints: u64,
    /// In every run a folder was full.
    full: bool,
    /// Of the last run: bytes for each file by cause; of Sheaf only.
    causes: Vec<(&'static str, f64)>,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let bytes = options.most * file_bytes(&options.against) + (1 << 30);
    let place = Place::new(
        &options.storage,
        bytes,
        !options.against.is_empty(),
        Remedies::less("--most").without_root("--against none"),
    )?;
    let targets = || {
        let own = [Target::Sheaf].into_iter();
        own.chain(options.against.iter().cloned())
    };
    let series = |target, per_folder| Series {
        target,
        per_folder,
        full: true,
        bytes: Vec::new(),
        ended: Vec::new(),
        files: 0,
        checkpoints: 0,
        causes: Vec::new(),
    };
    let mut all: Vec<Vec<Series>> = Vec::new();
    for &per_folder in &options.per_folder {
        all.push(targets().map(|target| series(target, per_folder)).collect());
    }
    for run in 1..=options.runs {
        for group in &mut all {
            one_run(options, &place, group, run, progress)?;
        }
    }
    let all: Vec<Series> = all.into_iter().flatten().collect();
    let rows = rows(options, &all);
    let report = Report::new("written", rows, checks(&all));
    let notes = unfilled(options, &all);
    Ok(report
        .with_notes(crate::target::notes(&options.against))
        .with_notes(notes))
}

/// Folders that did not become full, whose bars are not answered.
fn unfilled<'s>(options: &Options, all: &'s [Series]) -> impl Iterator<Item = String> + use<'s> {
    let most = options.most;
    let own = all.iter().filter(|series| series.target == Target::Sheaf);
    own.filter(|series| !series.full).map(move |series| {
        format!(
            "create, {} to a folder: no folder became full, so its bars are missed for want of files: want more than {most} (--most)",
            series.per_folder
        )
    })
}

/// All sides once, which make as many files as the first of them.
fn one_run(
    options: &Options,
    place: &Place,
    group: &mut [Series],
    run: usize,
    progress: &dyn Fn(&str),
) -> Result<(), Error> {
    let mut files = Made {
        per_folder: group.first().map_or(1, |series| series.per_folder),
        before: 0,
        within: 0,
        checkpoints: options.checkpoints,
    };
    for series in group {
        let name = series.target.name();
        progress(&format!("creates on {name}, run {run} of {}", options.runs));
        let counts = match &series.target {
            Target::Kernel(kernel) => on_kernel(place, *kernel, &files),
            _ => in_process(options, place, &mut files),
        };
        let counts = counts.map_err(|error| error.on("written", &name))?;
        let each = |bytes: u64| bytes as f64 / files.within as f64;
        series.bytes.push(each(counts.synced));
        series.ended.push(each(counts.ended));
        series.files = files.within;
        series.checkpoints = files.checkpoints;
        series.full &= files.before + files.within >= files.per_folder;
        let causes = counts.causes.into_iter();
        series.causes = causes.map(|(cause, bytes)| (cause, each(bytes))).collect();
    }
    Ok(())
}

/// Files of one run.
struct Made {
    per_folder: u64,
    before: u64,
    within: u64,
    /// Within the window.
    checkpoints: u64,
}

/// Bytes from the start of a window to its end, and to the end of the use.
struct Counts {
    synced: u64,
    ended: u64,
    /// What the first are for; of Sheaf only.
    causes: Vec<(&'static str, u64)>,
}

fn in_process(options: &Options, place: &Place, files: &mut Made) -> Result<Counts, Error> {
    let devices = place.array()?;
    let side = InProcess::make(&devices.paths, options.memory)?;
    let mut maker = Maker::new(&side, files.per_folder);
    let mut checkpoints_later = |count: u64| -> Result<u64, Error> {
        let made = maker.made;
        let until = side.newest_checkpoint() + count;
        while side.newest_checkpoint() < until {
            if maker.made + LOOK > options.most {
                let most = options.most;
                return Err(Error::Unable(format!(
                    "{most} files make too few checkpoints: want more (--most), or give less memory (--cache-size)"
                )));
            }
            maker.make(LOOK)?;
        }
        Ok(maker.made - made)
    };
    files.before = checkpoints_later(1)?;
    let (start, before) = settled(&side)?;
    files.within = checkpoints_later(options.checkpoints)?;
    // Room for one more checkpoint there must be, too.
    while files.before + files.within < files.per_folder && files.per_folder <= options.most / 2 {
        files.within += checkpoints_later(1)?;
        files.checkpoints += 1;
    }
    let (end, after) = settled(&side)?;
    let synced = end - start;
    let causes = causes(&before, &after, synced);
    let ended = side.close_counting()? - start;
    Ok(Counts {
        synced,
        ended,
        causes,
    })
}

/// Bytes written, all and by cause, once nothing is being written: a checkpoint's causes are counted at its end.
fn settled(side: &InProcess) -> Result<(u64, BytesWritten), Error> {
    let (stop, clock) = (Stop::default(), Clock::real());
    let mut last = (side.written_bytes(), side.written_by_cause());
    for _ in 0..SETTLE_LOOKS {
        stop.check()?;
        clock.sleep_until(clock.monotonic_ns() + SETTLE.as_nanos() as u64);
        let now = (side.written_bytes(), side.written_by_cause());
        if now == last {
            return Ok(now);
        }
        last = now;
    }
    Err(Error::Unable(
        "writing does not end though nothing is changed".to_owned(),
    ))
}

/// What `all` bytes between two counts were for.
fn causes(before: &BytesWritten, after: &BytesWritten, all: u64) -> Vec<(&'static str, u64)> {
    let both = fs::causes(before).into_iter().zip(fs::causes(after));
    let mut causes: Vec<_> = both
        .map(|((cause, before), (_, after))| (cause, after - before))
        .collect();
    let known: u64 = causes.iter().map(|(_, bytes)| bytes).sum();
    causes.push(("rest", all.saturating_sub(known)));
    causes
}

fn on_kernel(place: &Place, kernel: Kernel, files: &Made) -> Result<Counts, Error> {
    let all = files.before + files.within;
    let folders = all.div_ceil(files.per_folder);
    let mount = KernelMount::make(kernel, place, all + folders + 10_000)?;
    let account = mounted_device(mount.path())?;
    let side = Posix::new(mount.path(), None)?;
    let mut maker = Maker::new(&side, files.per_folder);
    maker.make(files.before)?;
    side.sync()?;
    let written = || Ok::<_, Error>(account_of(&account)?.written_bytes);
    let start = written()?;
    maker.make(files.within)?;
    side.sync()?;
    let synced = written()? - start;
    drop(maker);
    drop(side);
    mount.make_read_only()?;
    let ended = written()? - start;
    mount.close()?;
    Ok(Counts {
        synced,
        ended,
        causes: Vec::new(),
    })
}

/// The account of the block device below a mount.
fn mounted_device(path: &Path) -> Result<PathBuf, Error> {
    let mount = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
    let (major, minor) = (major(mount.st_dev()), minor(mount.st_dev()));
    Ok(PathBuf::from(format!(
        "/sys/dev/block/{major}:{minor}/stat"
    )))
}

/// Makes empty files, one after the other, in folders of so many.
struct Maker<'s, S: Side> {
    side: &'s S,
    per_folder: u64,
    folder: Option<S::Dir>,
    made: u64,
    stop: Stop,
}

impl<'s, S: Side> Maker<'s, S> {
    fn new(side: &'s S, per_folder: u64) -> Self {
        Maker {
            side,
            per_folder,
            folder: None,
            made: 0,
            stop: Stop::default(),
        }
    }

    fn make(&mut self, count: u64) -> Result<(), Error> {
        for _ in 0..count {
            self.stop.check()?;
            if self.made.is_multiple_of(self.per_folder) {
                let name = format!("{:06}", self.made / self.per_folder);
                self.folder = Some(self.side.make_dir(&self.side.root(), &name)?);
            }
            if let Some(folder) = &self.folder {
                let name = format!("file{:03}", self.made % self.per_folder);
                self.side.create(folder, &name)?;
            }
            self.made += 1;
        }
        Ok(())
    }
}

fn rows(options: &Options, all: &[Series]) -> Vec<Row> {
    let row = |series: &Series| {
        let spread = Spread::of(series.bytes.iter().copied());
        let ended = Spread::of(series.ended.iter().copied());
        let mut extra = Map::new();
        extra.insert("files".to_owned(), Value::from(series.files));
        extra.insert("pool".to_owned(), Value::from(series.per_folder));
        extra.insert("pool_unit".to_owned(), Value::from("files/folder"));
        extra.insert("checkpoints".to_owned(), Value::from(series.checkpoints));
        extra.insert("ended_bytes_per_file".to_owned(), Value::from(ended.median));
        if !series.causes.is_empty() {
            let causes = series.causes.iter();
            let causes = causes.map(|(cause, bytes)| ((*cause).to_owned(), Value::from(*bytes)));
            extra.insert("bytes_per_file_by_cause".to_owned(), causes.collect());
        }
        Row {
            name: "create".to_owned(),
            target: series.target.name(),
            threads: 1,
            unit: "bytes/file",
            median: spread.median,
            min: spread.min,
            max: spread.max,
            runs: options.runs,
            extra,
        }
    };
    all.iter().map(row).collect()
}

/// At most the bar, and no more than ext4 and XFS. Where no folder was as full as asked for that is missed: nobody knows.
fn checks(all: &[Series]) -> Vec<Check> {
    let median = |series: &Series| Spread::of(series.bytes.iter().copied()).median;
    let mut checks = Vec::new();
    let own = all.iter();
    for sheaf in own.filter(|series| series.target == Target::Sheaf) {
        let folder = sheaf.per_folder;
        let bytes = match sheaf.full {
            true => median(sheaf),
            false => f64::NAN,
        };
        let mut check = |what: &str, value, bar| {
            let name = format!("create, {folder} to a folder, {what}");
            checks.push(Check::new(name, value, Comparison::AtMost, bar));
        };
        check("bytes", bytes, BAR);
        for kernel in [Kernel::Ext4, Kernel::Xfs] {
            let same = |series: &&Series| {
                series.target == Target::Kernel(kernel) && series.per_folder == folder
            };
            if let Some(other) = all.iter().find(same) {
                let what = format!("bytes vs {}", kernel.name());
                check(&what, bytes / median(other), 1.0);
            }
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(home: &Path) -> Options {
        Options {
            checkpoints: 3,
            most: 200_000,
            per_folder: vec![1000, 10_000_000],
            runs: 1,
            against: Vec::new(),
            storage: Storage::Dir(home.to_owned()),
            memory: 24 << 20,
        }
    }

    #[test]
    fn checkpoints_come_by_themselves_and_all_bytes_count() {
        let home = tempfile::tempdir().unwrap();
        let report = run(&options(home.path()), &|_| {}).unwrap();
        let [row, one_folder] = &report.rows[..] else {
            panic!("{} rows", report.rows.len());
        };
        assert_eq!(one_folder.extra["pool"], 10_000_000);
        // Missed where no folder came to be full, and that is told.
        let found = report.checks.iter();
        let found: Vec<_> = found.map(|c| (c.name.as_str(), c.ok)).collect();
        assert_eq!(
            found[0],
            ("create, 1000 to a folder, bytes", row.median <= BAR)
        );
        assert_eq!(found[1..], [("create, 10000000 to a folder, bytes", false)]);
        assert!(
            report
                .notes
                .iter()
                .any(|note| note.contains("no folder became full"))
        );
        // At least a record for each file, and its inode.
        assert!(row.median > 100.0, "{row:?}");
        assert!(row.extra["ended_bytes_per_file"].as_f64() >= Some(row.median));
        assert!(row.extra["files"].as_u64() > Some(1000));
        let causes = row.extra["bytes_per_file_by_cause"].as_object().unwrap();
        let of = |cause: &str| causes[cause].as_f64().unwrap();
        assert!(
            of("inodes") > 0.0 && of("directory_leaves") > 0.0,
            "{row:?}"
        );
        assert!(
            of("journal_records") > 0.0 && of("table_leaves") > 0.0,
            "{row:?}"
        );
        let all: f64 = causes.keys().map(|cause| of(cause)).sum();
        // Nothing is counted twice, and little without a cause.
        assert!((all - row.median).abs() < row.median / 50.0, "{row:?}");
        assert!(of("rest") < row.median / 50.0, "{row:?}");
    }

    #[test]
    fn a_window_goes_on_until_a_folder_is_full() {
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            most: 400_000,
            per_folder: vec![100_000],
            ..options(home.path())
        };
        let report = run(&options, &|_| {}).unwrap();
        let extra = &report.rows[0].extra;
        assert!(extra["checkpoints"].as_u64() >= Some(3), "{extra:?}");
        assert!(report.checks[0].value.is_finite(), "{:?}", report.checks);
    }

    #[test]
    fn a_file_takes_no_more_than_in_the_kernels() {
        let series = |target, per_folder, bytes| Series {
            target,
            per_folder,
            bytes: vec![bytes],
            ended: vec![bytes],
            files: 1_000_000,
            checkpoints: 3,
            full: per_folder < 1_000_000,
            causes: Vec::new(),
        };
        let found = checks(&[
            series(Target::Sheaf, 1000, 300.0),
            series(Target::Kernel(Kernel::Ext4), 1000, 600.0),
            series(Target::Kernel(Kernel::Xfs), 1000, 200.0),
            series(Target::Sheaf, 1_000_000, 100.0),
        ]);
        let found: Vec<_> = found
            .iter()
            .map(|c| (&c.name[26..], c.value, c.ok))
            .collect();
        let wanted = [
            ("bytes", 300.0, true),
            ("bytes vs ext4", 0.5, true),
            ("bytes vs xfs", 1.5, false),
        ];
        assert_eq!(found[..3], wanted);
        assert!(found.len() == 4 && found[3].1.is_nan() && !found[3].2);
    }

    #[test]
    fn too_few_files_for_the_window_are_an_error() {
        let home = tempfile::tempdir().unwrap();
        let few = Options {
            most: 1000,
            memory: 1 << 30,
            ..options(home.path())
        };
        let error = run(&few, &|_| {}).unwrap_err();
        assert!(error.to_string().contains("--most"), "{error}");
    }

    #[test]
    fn senseless_options_are_usage_errors() {
        let home = tempfile::tempdir().unwrap();
        let refused = |options: Options| matches!(options.check(), Err(Error::Usage(_)));
        assert!(!refused(options(home.path())));
        assert!(refused(Options {
            checkpoints: 2,
            ..options(home.path())
        }));
        for kernel in [Kernel::Tmpfs, Kernel::Btrfs, Kernel::BtrfsRaid0] {
            assert!(refused(Options {
                against: vec![Target::Kernel(Kernel::Ext4), Target::Kernel(kernel)],
                ..options(home.path())
            }));
        }
    }
}

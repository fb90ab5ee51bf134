//! Large files read and written by many threads, as IOR does it: one shared file or one for each thread, at random places or one
//! after the other, in requests of 512 B to 16 MiB.
//!
//! 1. All sides are on the same devices, in turn, each with a fresh file system and files of the same size of which every block was
//!    written: Sheaf and btrfs as RAID-0 on all of them, ext4 and XFS on the first, as neither stripes by itself. The floor,
//!    `raw-io_uring`, moves the same requests to and from the devices themselves, striped by request, with no file system.
//! 2. A side's ways are told apart by its name: plain calls through its cache (`ext4`), the same with `O_DIRECT` (`ext4-direct`), and
//!    `O_DIRECT` with `depth` requests of each thread in flight, by Linux AIO (`ext4-aio`) or a context of Sheaf's (`sheaf-aio`). If asked for,
//!    the same through the cache (`ext4-aio-buffered`): by io_uring, since Linux AIO waits for what is not cached when it is told of it.
//! 3. Files are read after a mount, so that nothing of them is in a cache, then written over; where each thread has its own and writes in
//!    order, they are then removed and new ones written. What goes through a cache, or is new, ends when as
//!    much was read or written as there is: a cache that is read again, or absorbs writes, is not measured. Other windows take their
//!    time, and go round.
//! 4. The rate of writes is that up to the end of the sync after the last, on every side.
//! 5. Each request's first bytes in a file tell its place: what is read from elsewhere is an error.
//! 6. Memory is this process's most while Sheaf is open (`VmHWM`), without the requests' own buffers, beside the limit it was given.

mod kind;
mod report;
mod sides;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fs::{FsOptions, OpenFile};

use crate::contract::{Report, Row};
use crate::counted::Counters;
use crate::meter::Meter;
use crate::runner::{self, Load, Measured, Window};
use crate::target::{
    Arrangement, Devices, InProcess, Kernel, KernelMount, Place, Remedies, Side, Storage, Target,
    open_direct,
};
use crate::{Error, interrupt};
pub use kind::{Access, Layout, Way, select_accesses, select_layouts, select_ways};
use kind::{Deed, Kind};
use report::{checks, rows};
use sides::{OnDevices, OnKernel, OnSheaf, Plan, sync};

const PAGE: u64 = 4096;
/// Written at once by who fills a file.
const FILL: usize = 16 << 20;
/// Of a device at least: Sheaf takes little, btrfs more, and XFS refuses less than 300 MiB.
const DEVICE_BYTES: [u64; 3] = [64 << 20, 256 << 20, 512 << 20];
const MIB: f64 = (1 << 20) as f64;

/// Whom this compares with by default.
pub const AGAINST: [&str; 3] = ["ext4", "xfs", "btrfs-raid0"];

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    pub layouts: Vec<Layout>,
    pub accesses: Vec<Access>,
    pub ways: Vec<Way>,
    /// Bytes of a request; none: 4 KiB at random places, 1 MiB one after the other.
    pub requests: Vec<u64>,
    pub threads: Vec<usize>,
    pub devices: usize,
    /// Requests of a thread in flight where several are.
    pub depth: usize,
    /// Of all files together.
    pub bytes: u64,
    /// Of one window.
    pub time: Duration,
    pub runs: usize,
    /// Besides Sheaf in this process and the devices.
    pub against: Vec<Target>,
    pub storage: Storage,
    /// For all that Sheaf takes, in bytes.
    pub memory: usize,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if self.layouts.is_empty() || self.accesses.is_empty() || self.ways.is_empty() {
            return usage("--layout, --access and --way take one name at least");
        }
        if self.threads.is_empty() || self.threads.iter().any(|n| !(1..=128).contains(n)) {
            return usage("--threads takes numbers from 1 to 128");
        }
        let sound = |n: &u64| n.is_power_of_two() && (512..=16 << 20).contains(n);
        if !self.requests.iter().all(sound) {
            return usage("--request takes powers of two from 512 to 16M");
        }
        if !(1..=16).contains(&self.devices) {
            return usage("--devices takes a number from 1 to 16");
        }
        if matches!(&self.storage, Storage::Devices(given) if given.len() != self.devices) {
            return usage("as many devices must be given (--device) as --devices says");
        }
        if !(1..=1024).contains(&self.depth) {
            return usage("--depth takes a number from 1 to 1024");
        }
        if !(1 << 20..=1 << 40).contains(&self.bytes) || !self.bytes.is_multiple_of(1 << 20) {
            return usage("--size takes 1M to 1T, in whole MiB");
        }
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(3600));
        if self.time < least || self.time > most {
            return usage("--seconds takes a number from 0.001 to 3600");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        if self.kinds().iter().any(|kind| kind.units(self) == 0) {
            return usage("--size is less than a request for each thread: give more");
        }
        crate::target::only_on_devices(&self.against, "tmpfs has no device to compare on")
    }

    fn requests(&self, access: Access) -> Vec<u64> {
        match self.requests.is_empty() {
            true => vec![access.request()],
            false => self.requests.clone(),
        }
    }

    fn kinds(&self) -> Vec<Kind> {
        let mut kinds = Vec::new();
        for &threads in &self.threads {
            for &layout in &self.layouts {
                for &access in &self.accesses {
                    // Turns are taken in order.
                    if layout == Layout::Strided && access == Access::Random {
                        continue;
                    }
                    let kind = |request| Kind {
                        layout,
                        access,
                        request,
                        threads,
                    };
                    kinds.extend(self.requests(access).into_iter().map(kind));
                }
            }
        }
        kinds
    }

    /// Of each device: one of them holds everything, as ext4 and XFS have it.
    fn device_bytes(&self) -> u64 {
        let [own, others, xfs] = DEVICE_BYTES;
        let least = match &self.against[..] {
            [] => own,
            against if against.contains(&Target::Kernel(Kernel::Xfs)) => xfs,
            _ => others,
        };
        (self.bytes + self.bytes / 2).max(least)
    }
}

/// Who does it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Who {
    Raw,
    Sheaf(Way),
    Kernel(Kernel, Way),
}

impl Who {
    fn name(&self) -> String {
        let of = |name: &str, way: Way| match way {
            Way::Buffered => name.to_owned(),
            way => format!("{name}-{}", way.name()),
        };
        match self {
            Who::Raw => "raw-io_uring".to_owned(),
            Who::Sheaf(way) => of("sheaf", *way),
            Who::Kernel(kernel, way) => of(kernel.name(), *way),
        }
    }

    fn is_sheaf(&self) -> bool {
        matches!(self, Who::Sheaf(_))
    }

    fn is_buffered(&self) -> bool {
        match self {
            Who::Raw => false,
            Who::Sheaf(way) | Who::Kernel(_, way) => way.is_buffered(),
        }
    }
}

/// What the windows of one turn gave.
struct Outcome {
    windows: Vec<(Deed, Measured)>,
    /// Most memory of this process meanwhile, in bytes, without the requests' buffers.
    peak: Option<u64>,
}

struct Series {
    kind: Kind,
    who: Who,
    turns: Vec<Outcome>,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    progress("devices whose blocks are all written");
    let bench = Bench::new(options)?;
    let mut all = Vec::new();
    for kind in options.kinds() {
        all.extend(bench.series(kind, progress)?);
    }
    let rows: Vec<Row> = all
        .iter()
        .flat_map(|series| rows(options, series))
        .collect();
    let checks = checks(options, &rows);
    Ok(Report::new("ior", rows, checks).with_notes(bench.notes()))
}

struct Bench<'a> {
    options: &'a Options,
    meter: Meter,
    devices: Devices,
    place: Place,
}

impl<'a> Bench<'a> {
    fn new(options: &'a Options) -> Result<Bench<'a>, Error> {
        let bytes = options.device_bytes() * options.devices as u64;
        let place = Place::new(
            &options.storage,
            bytes,
            !options.against.is_empty(),
            Remedies::less("--size").without_root("--against none"),
        )?;
        let devices = match place.devices().is_empty() {
            true => place.written(options.devices as u64)?,
            false => place.all(),
        };
        Ok(Bench {
            options,
            meter: Meter::new(&[])?,
            devices,
            place,
        })
    }

    fn sides(&self, kind: Kind) -> Vec<Who> {
        let ways = || {
            let ways = self.options.ways.iter().copied();
            ways.filter(|way| way.takes(kind.request))
        };
        let raw = Some(Who::Raw).filter(|_| kind.request.is_multiple_of(PAGE));
        let mut sides: Vec<Who> = raw.into_iter().collect();
        sides.extend(ways().map(Who::Sheaf));
        for target in &self.options.against {
            if let Target::Kernel(kernel) = target {
                sides.extend(ways().map(|way| Who::Kernel(*kernel, way)));
            }
        }
        sides
    }

    /// All sides in one workload, taking turns.
    fn series(&self, kind: Kind, progress: &dyn Fn(&str)) -> Result<Vec<Series>, Error> {
        let series = |who| Series {
            kind,
            who,
            turns: Vec::new(),
        };
        let mut all: Vec<Series> = self.sides(kind).into_iter().map(series).collect();
        let of = self.options.runs;
        for run in 1..=of {
            for series in &mut all {
                interrupt::check()?;
                let (name, who) = (kind.name(Deed::Read), series.who.name());
                progress(&format!("{name}, {who}, run {run} of {of}"));
                let turn = self.turn(kind, &series.who);
                series
                    .turns
                    .push(turn.map_err(|error| error.on(&name, &who))?);
            }
        }
        Ok(all)
    }

    fn turn(&self, kind: Kind, who: &Who) -> Result<Outcome, Error> {
        // Before Sheaf's threads are there, so that they count.
        let counters = Counters::start();
        let plan = Plan {
            options: self.options,
            kind,
            counters: &counters,
        };
        match who {
            Who::Raw => {
                let _claim = self.place.claim(self.options.devices)?;
                let below = |deed: Deed| OnDevices {
                    plan,
                    paths: &self.devices.paths,
                    write: deed.writes(),
                };
                let measured = |&deed| Ok((deed, self.measure(kind, &below(deed))?));
                Ok(Outcome {
                    windows: kind
                        .deeds()
                        .iter()
                        .map(measured)
                        .collect::<Result<_, Error>>()?,
                    peak: None,
                })
            }
            Who::Sheaf(way) => {
                // It makes one of its own.
                drop(self.place.claim(self.options.devices)?);
                self.sheaf(plan, *way)
            }
            Who::Kernel(kernel, way) => self.kernel(plan, *kernel, *way),
        }
    }

    fn sheaf(&self, plan: Plan<'_>, way: Way) -> Result<Outcome, Error> {
        let paths = &self.devices.paths;
        let options = || FsOptions::default().with_memory(self.options.memory);
        let made = InProcess::arranged(paths, options(), &Arrangement::default())?;
        for file in 0..plan.kind.files() {
            let file = made.create(&made.root(), &file_name(file))?;
            plan.fill(|at, bytes| made.write(&file, at, bytes))?;
        }
        made.close()?;
        forget_peak()?;
        let side = InProcess::open(paths, options())?;
        let flags = match way {
            Way::Direct | Way::Aio => libc::O_DIRECT,
            Way::Buffered | Way::AioBuffered => 0,
        };
        let open = |name: String| side.open_with(&side.root(), &name, flags);
        let files = |name: fn(usize) -> String| {
            let files = (0..plan.kind.files()).map(|file| open(name(file)));
            files.collect::<Result<Vec<Arc<OpenFile>>, Error>>()
        };
        let mut opened = files(file_name)?;
        let mut windows = Vec::new();
        for &deed in deeds(plan.kind, way) {
            if deed == Deed::WriteNew {
                opened.clear();
                for file in 0..plan.kind.files() {
                    side.unlink(&side.root(), &file_name(file))?;
                    side.create(&side.root(), &new_name(file))?;
                }
                side.sync()?;
                opened = files(new_name)?;
            }
            let load = OnSheaf {
                plan,
                side: &side,
                files: &opened,
                way,
                deed,
            };
            windows.push((deed, self.measure(plan.kind, &load)?));
        }
        let each = way.depth(self.options) as u64;
        let buffers = plan.kind.threads as u64 * each * plan.kind.request;
        let peak = peak()?.map(|bytes| bytes.saturating_sub(buffers));
        drop(opened);
        side.close()?;
        Ok(Outcome { windows, peak })
    }

    fn kernel(&self, plan: Plan<'_>, kernel: Kernel, way: Way) -> Result<Outcome, Error> {
        let mut mount = KernelMount::make(kernel, &self.place, 10_000)?;
        let paths: Vec<PathBuf> = (0..plan.kind.files())
            .map(|file| mount.path().join(file_name(file)))
            .collect();
        for path in &paths {
            let io = |e| Error::io(path, e);
            let file = File::create_new(path).map_err(io)?;
            plan.fill(|at, bytes| file.write_all_at(bytes, at).map_err(io))?;
            file.sync_all().map_err(io)?;
        }
        mount.remount(&self.place)?;
        let open = |paths: &[PathBuf]| match way {
            Way::Buffered | Way::AioBuffered => open_buffered(paths),
            Way::Direct | Way::Aio => open_direct(paths),
        };
        let (mut paths, mut files) = (paths.clone(), open(&paths)?);
        let mut windows = Vec::new();
        for &deed in deeds(plan.kind, way) {
            if deed == Deed::WriteNew {
                files.clear();
                for (file, path) in paths.iter_mut().enumerate() {
                    std::fs::remove_file(&path).map_err(|e| Error::io(path, e))?;
                    path.set_file_name(new_name(file));
                    File::create_new(&path).map_err(|e| Error::io(path, e))?;
                }
                files = open(&paths)?;
                sync(&files)?;
            }
            let load = OnKernel {
                plan,
                way,
                paths: &paths,
                files: &files,
                deed,
            };
            windows.push((deed, self.measure(plan.kind, &load)?));
        }
        drop(files);
        mount.close()?;
        Ok(Outcome {
            windows,
            peak: None,
        })
    }

    fn measure(&self, kind: Kind, load: &dyn Load) -> Result<Measured, Error> {
        let window = Window {
            time: self.options.time,
            threads: kind.threads,
            operations: u64::MAX,
            cpus: Vec::new(),
        };
        runner::measure(&window, load, &self.meter)
    }

    fn notes(&self) -> Vec<String> {
        let devices = match &self.options.storage {
            Storage::Loops(None, _) => "loop devices over files in a tmpfs".to_owned(),
            Storage::Loops(Some(dir), _) => format!("loop devices over files in {}", dir.display()),
            Storage::Devices(_) => "block devices that were given".to_owned(),
            _ => "files themselves, opened past the page cache".to_owned(),
        };
        let mut notes = vec![format!("{} devices: {devices}", self.options.devices)];
        if !self.options.against.is_empty() {
            notes.push(
                "ext4 and XFS are on the first device alone: they stripe over several only with a volume manager of the kernel (md, \
                 dm) below, which is not set up here"
                    .to_owned(),
            );
        }
        if self
            .options
            .requests
            .iter()
            .any(|bytes| !bytes.is_multiple_of(PAGE))
        {
            notes.push("requests of parts of pages are made through caches only".to_owned());
        }
        if !Path::new(CLEAR).exists() {
            notes.push(format!(
                "memory is not measured: this kernel has no {CLEAR}"
            ));
        }
        notes.push(Counters::note());
        notes.extend(crate::target::notes(&self.options.against));
        notes
    }
}

fn file_name(file: usize) -> String {
    format!("file{file}")
}

/// Of the file that takes its place.
fn new_name(file: usize) -> String {
    format!("new{file}")
}

/// What of a workload is done that way: requests in flight have no order in which a file could grow.
fn deeds(kind: Kind, way: Way) -> impl Iterator<Item = &'static Deed> {
    let deeds = kind.deeds().iter();
    let in_flight = matches!(way, Way::Aio | Way::AioBuffered);
    deeds.filter(move |deed| **deed != Deed::WriteNew || !in_flight)
}

fn open_buffered(paths: &[PathBuf]) -> Result<Vec<File>, Error> {
    let open = |path: &PathBuf| {
        let opened = File::options().read(true).write(true).open(path);
        opened.map_err(|e| Error::io(path, e))
    };
    paths.iter().map(open).collect()
}

const CLEAR: &str = "/proc/self/clear_refs";
const STATUS: &str = "/proc/self/status";

/// From here on the most memory of this process is counted anew, if the kernel was built to do that.
fn forget_peak() -> Result<(), Error> {
    match Path::new(CLEAR).exists() {
        true => std::fs::write(CLEAR, "5").map_err(|e| Error::io(Path::new(CLEAR), e)),
        false => Ok(()),
    }
}

/// The most memory of this process since then, in bytes.
fn peak() -> Result<Option<u64>, Error> {
    if !Path::new(CLEAR).exists() {
        return Ok(None);
    }
    let status = std::fs::read_to_string(STATUS);
    let status = status.map_err(|e| Error::io(Path::new(STATUS), e))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kib.map(|kib| kib << 10))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, Value};

    pub fn options(dir: &Path) -> Options {
        Options {
            layouts: vec![Layout::Shared, Layout::Strided, Layout::Apart],
            accesses: vec![Access::Random, Access::Sequential],
            ways: Way::ALL.into(),
            requests: Vec::new(),
            threads: vec![2],
            devices: 2,
            depth: 3,
            bytes: 8 << 20,
            time: Duration::from_millis(10),
            runs: 1,
            against: Vec::new(),
            storage: Storage::Dir(dir.to_owned()),
            memory: 64 << 20,
        }
    }

    /// Without file systems of the kernel, which take root.
    #[test]
    fn sheaf_and_the_devices_are_measured_and_their_figures_agree() {
        let home = tempfile::tempdir().unwrap();
        let options = options(home.path());
        let report = run(&options, &|_| {}).unwrap();
        // Five workloads of five sides that are read and written; new files of three.
        assert_eq!(report.rows.len(), 5 * 5 * 2 + 3);
        for row in &report.rows {
            let number = |key: &str| row.extra[key].as_f64().unwrap();
            assert!(row.median > 0.0, "{row:?}");
            let bandwidth = row.median * number("request_bytes") / MIB;
            assert!((bandwidth - number("mib_per_s")).abs() <= 1e-6 * bandwidth);
            let sheaf = row.target.starts_with("sheaf");
            assert_eq!(
                row.extra.contains_key("peak_bytes"),
                sheaf && Path::new(CLEAR).exists()
            );
            // What passes the cache reaches devices request by request, large ones in pieces.
            let direct = ["sheaf-direct", "sheaf-aio"].contains(&row.target.as_str());
            if direct && row.name.contains("random read") {
                assert!(number("requests_per_op") >= 1.0, "{row:?}");
            }
        }
        let names: Vec<&str> = report
            .checks
            .iter()
            .map(|check| check.name.as_str())
            .collect();
        let raw = names
            .iter()
            .filter(|name| name.ends_with("vs raw-io_uring"));
        assert_eq!(raw.count(), 3 * 2 + 1, "{names:?}");
        assert_eq!(names.len(), 8);
        assert!(names[7].starts_with("memory"));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn parts_of_pages_are_buffered() {
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            layouts: vec![Layout::Apart],
            requests: vec![512],
            ..options(home.path())
        };
        let report = run(&options, &|_| {}).unwrap();
        let targets: Vec<&str> = report.rows.iter().map(|row| row.target.as_str()).collect();
        let both = ["sheaf", "sheaf-aio-buffered"];
        assert_eq!(
            targets,
            [
                both[0], both[0], both[1], both[1], both[0], both[0], both[0], both[1], both[1]
            ]
        );
        assert!(report.rows[0].name.ends_with("512 B"));
    }

    #[test]
    fn kernel_file_systems_take_part_where_they_can_be_mounted() {
        let control = Path::new("/dev/loop-control");
        if !rustix::process::geteuid().is_root() || !control.exists() {
            return base::skip("loop devices");
        }
        let home = tempfile::tempdir().unwrap();
        let kernels = [Kernel::Ext4, Kernel::BtrfsRaid0];
        let against = kernels.into_iter().filter(|kernel| kernel.check().is_ok());
        let options = Options {
            layouts: vec![Layout::Shared],
            accesses: vec![Access::Random],
            against: against.map(Target::Kernel).collect(),
            storage: Storage::Loops(Some(home.path().to_owned()), 2),
            ..options(home.path())
        };
        let report = run(&options, &|_| {}).unwrap();
        assert_eq!(report.rows.len(), 2 * (5 + 4 * options.against.len()));
        assert!(report.rows.iter().all(|row| row.median > 0.0));
        if options.against.len() == 2 {
            let bars: Vec<f64> = report.checks.iter().map(|check| check.bar).collect();
            assert_eq!(bars, [1.2, 2.0, 1.05]);
        }
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_remedy() {
        let refused = |change: &dyn Fn(&mut Options), word: &str| {
            let mut options = options(Path::new("/nowhere"));
            change(&mut options);
            let Err(Error::Usage(text)) = options.check() else {
                panic!("{word} was taken");
            };
            assert!(text.contains(word), "{text}");
        };
        assert!(options(Path::new("/nowhere")).check().is_ok());
        refused(&|o| o.ways = vec![], "--way");
        refused(&|o| o.threads = vec![0], "--threads");
        refused(&|o| o.requests = vec![256], "512");
        refused(&|o| o.requests = vec![3 << 10], "powers of two");
        refused(&|o| o.devices = 0, "--devices");
        refused(&|o| o.depth = 0, "--depth");
        refused(&|o| o.bytes = 1000, "--size");
        refused(&|o| o.requests = vec![16 << 20], "--size");
        refused(&|o| o.runs = 0, "--runs");
        refused(
            &|o| o.against = vec![Target::Kernel(Kernel::Tmpfs)],
            "tmpfs",
        );
        let unknown = select_ways(&["mmap".to_owned()]);
        assert!(
            matches!(unknown, Err(Error::Usage(text)) if text.contains("buffered, direct, aio, aio-buffered"))
        );
        assert!(select_layouts(&["apart".to_owned()]).is_ok());
        assert!(select_accesses(&["sequential".to_owned(), "random".to_owned()]).is_ok());
    }

    #[test]
    fn bars_are_those_of_the_best_side() {
        let row = |name: &str, target: &str, rate: f64| Row {
            name: name.to_owned(),
            target: target.to_owned(),
            threads: 2,
            unit: "requests/s",
            median: rate,
            min: rate,
            max: rate,
            runs: 1,
            extra: Map::new(),
        };
        let name = "shared random write, 4 KiB";
        let rows = [
            // What is past no cache is judged by nobody who is.
            row(name, "sheaf", 900.0),
            row(name, "sheaf-aio-buffered", 900.0),
            row(name, "xfs-aio-buffered", 900.0),
            row(name, "sheaf-direct", 100.0),
            row(name, "sheaf-aio", 300.0),
            row(name, "xfs-aio", 100.0),
            row(name, "xfs-direct", 200.0),
            row(name, "btrfs-raid0-aio", 150.0),
            row(name, "ext4-aio", 900.0),
        ];
        let found = checks(&options(Path::new("/")), &rows);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, format!("{name}/2, sheaf-aio vs xfs-direct"));
        assert!((found[0].value - 1.5).abs() < 1e-9 && !found[0].ok);
        // Sequential requests are those through the cache, whatever is faster past it.
        let name = "apart sequential write, 1 MiB";
        let rows = [
            row(name, "sheaf", 80.0),
            row(name, "sheaf-direct", 200.0),
            row(name, "raw-io_uring", 100.0),
            row(name, "ext4", 70.0),
            row(name, "ext4-direct", 300.0),
            row(name, "xfs", 90.0),
        ];
        let found = checks(&options(Path::new("/")), &rows);
        let values: Vec<(f64, f64)> = found.iter().map(|check| (check.value, check.bar)).collect();
        assert_eq!(values, [(0.8, 0.9), (80.0 / 90.0, 1.0)]);
        // A peak that is above what was given.
        let mut over = row(name, "sheaf", 1.0);
        let peak = Value::from(70u64 << 20);
        over.extra.insert("peak_bytes".to_owned(), peak);
        let found = checks(&options(Path::new("/")), &[over]);
        assert!(found.len() == 1 && !found[0].ok, "{found:?}");
    }
}

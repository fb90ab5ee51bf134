//! The array beside its devices: 4 KiB transfers at random places, by the kernel's interfaces and through Sheaf.
//!
//! 1. All sides are on the same devices, in turn: loop devices over files in memory or on a disk, such files themselves, block
//!    devices that are given, or devices of this process that take a set time. Every block was written before, of given devices in as many
//!    bytes as the others have. Raw sides touch the first half of these bytes; Sheaf's file takes as many, wherever it puts them.
//! 2. *Deep*: `depth` transfers are in flight on each device all the time. The floor is a program's own ring: one thread, one io_uring
//!    over all devices with registered files and memory, and a new transfer for each that ends (`raw-io_uring`, and `-coop` with the
//!    flags of a ring that several threads may use); `raw-aio` does the same by Linux AIO. `sheaf-array` hands batches of `depth` for
//!    each device to [`device::Array::execute`], which returns when all have ended: what is above the devices in Sheaf today.
//!    `sheaf-file` has transfers of one large file in flight, past the cache, by a context ([`fs::IoContext`]), as users do.
//! 3. *Lone*: one transfer at a time by one thread, and so what each layer adds to it; `raw-pread` is the plain system call here,
//!    and `sheaf-file` a call that waits.
//! 4. Reads by Sheaf reach the devices, which its own count of requests shows: fewer than were asked for are an error.
//!    Both sides of Sheaf's are there in each submission topology; bars are those of the default.
//! 5. Devices of this process have no kernel interface. Their floor, `raw-queue`, is one thread with a heap of ends
//!    ([`SlowQueue`]); it performs each transfer below when it starts it, as [`device::LatencyDevice`] does for Sheaf.
//! 6. File systems of the kernel have one large file each on block devices (`kernels.rs`). They are no floor.

mod kernels;
mod loads;
mod topology;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::clock::Clock;
use device::{BlockDevice, Latency, OpenOptions, Reaping, Topology};
use fs::FsOptions;
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::counted::{self, Counters};
pub use crate::ior::AGAINST;
use crate::ior::Way;
use crate::meter::Meter;
use crate::runner::{self, Load, Measured, Window};
use crate::target::{
    Arrangement, Devices, InProcess, Interface, Kernel, Place, Queue, Remedies, Slow, SlowQueue,
    Storage, Target, open_direct,
};
use crate::{Error, interrupt};
use kernels::LargeFile;
use loads::{OnArray, OnFiles, OnLargeFile, OnQueue, Plan};

const PAGE: usize = 4096;
/// Written at once by who fills the file.
const LARGE: usize = 1 << 20;
/// Of the large file.
const FILE: &str = "large";

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers of devices.
    pub devices: Vec<usize>,
    /// Transfers in flight on each.
    pub depth: usize,
    /// Threads of those sides that have several transfers in flight; they share the depth.
    pub threads: usize,
    /// Of one window.
    pub time: Duration,
    pub runs: usize,
    /// Of each device, in bytes.
    pub bytes: u64,
    /// Besides Sheaf in this process and the devices; on block devices only.
    pub against: Vec<Target>,
    pub storage: Storage,
    /// Devices of this process that take so long.
    pub latency: Option<Duration>,
    /// How Sheaf waits.
    pub reap: Reaping,
    /// For all that Sheaf takes, in bytes.
    pub memory: usize,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if self.devices.is_empty() || self.devices.iter().any(|n| !(1..=16).contains(n)) {
            return usage("--devices takes numbers from 1 to 16");
        }
        if !self.devices.is_sorted_by(|a, b| a < b) {
            return usage("--devices takes growing numbers: 1,2,4,8");
        }
        if let Storage::Devices(given) = &self.storage
            && given.len() < self.most()
        {
            return usage("more devices are wanted (--devices) than are given (--device)");
        }
        if !(1..=1024).contains(&self.depth) {
            return usage("--depth takes a number from 1 to 1024");
        }
        if !(1..=128).contains(&self.threads) || !self.depth.is_multiple_of(self.threads) {
            return usage("--threads takes a number from 1 to 128 that divides the depth");
        }
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(3600));
        if self.time < least || self.time > most {
            return usage("--seconds takes a number from 0.001 to 3600");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        if !(64 << 20..=1 << 40).contains(&self.bytes) || !self.bytes.is_multiple_of(1 << 20) {
            return usage("--size takes 64M to 1T, in whole MiB");
        }
        if self
            .latency
            .is_some_and(|time| time.is_zero() || time > Duration::from_secs(1))
        {
            return usage("--latency takes 1 to 1000000 microseconds");
        }
        crate::target::only_on_devices(&self.against, "tmpfs has no device to compare on")
    }

    fn most(&self) -> usize {
        self.devices.iter().copied().max().unwrap_or(1)
    }
}

/// Powers of two up to 8, or to as many devices as are given, and that number.
pub fn default_devices(given: usize) -> Vec<usize> {
    let most = if given == 0 { 8 } else { given };
    let mut counts: Vec<usize> = [1, 2, 4, 8].into_iter().filter(|n| *n < most).collect();
    counts.push(most);
    counts
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    write: bool,
    /// One transfer at a time.
    lone: bool,
}

impl Kind {
    const DEEP: [Kind; 2] = [Kind::of(false, false), Kind::of(true, false)];
    const LONE: [Kind; 2] = [Kind::of(false, true), Kind::of(true, true)];

    const fn of(write: bool, lone: bool) -> Kind {
        Kind { write, lone }
    }

    fn name(self) -> &'static str {
        match (self.write, self.lone) {
            (false, false) => "random read",
            (true, false) => "random write",
            (false, true) => "lone read",
            (true, true) => "lone write",
        }
    }
}

/// Who does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Raw(Interface),
    /// Devices of this process.
    RawSlow,
    Pread,
    SheafArray(Topology),
    SheafFile(Topology),
    Kernel(Kernel, Way),
}

impl Who {
    fn name(self) -> String {
        match self {
            Who::Raw(interface) => format!("raw-{}", interface.name()),
            Who::RawSlow => "raw-queue".to_owned(),
            Who::Pread => "raw-pread".to_owned(),
            Who::SheafArray(topology) => of_sheaf("sheaf-array", topology),
            Who::SheafFile(topology) => of_sheaf("sheaf-file", topology),
            Who::Kernel(kernel, way) => format!("{}-{}", kernel.name(), way.name()),
        }
    }

    /// Of Sheaf's sides.
    fn topology(self) -> Option<Topology> {
        match self {
            Who::SheafArray(topology) | Who::SheafFile(topology) => Some(topology),
            Who::Raw(_) | Who::RawSlow | Who::Pread | Who::Kernel(..) => None,
        }
    }

    /// On the devices, without any file system.
    fn is_raw(self) -> bool {
        matches!(self, Who::Raw(_) | Who::RawSlow | Who::Pread)
    }
}

fn of_sheaf(what: &str, topology: Topology) -> String {
    match topology {
        Topology::PerCore => what.to_owned(),
        Topology::PerDevice => format!("{what}-{}", topology.name()),
    }
}

/// The windows of one side.
struct Series {
    kind: Kind,
    who: Who,
    members: usize,
    threads: usize,
    windows: Vec<Measured>,
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    progress("devices whose blocks are all written");
    let bench = Bench::new(options)?;
    let mut all: Vec<Series> = Vec::new();
    for (nth, &members) in options.devices.iter().enumerate() {
        for kind in Kind::DEEP {
            all.extend(bench.series(kind, members, progress)?);
        }
        // What one transfer at a time takes is measured on the first number of devices alone.
        for kind in Kind::LONE.into_iter().filter(|_| nth == 0) {
            all.extend(bench.series(kind, members, progress)?);
        }
    }
    let mut rows: Vec<Row> = all.iter().map(|series| row(options, series)).collect();
    let checks = checks(options, &all, &rows);
    let advice = topology::recommend(&mut rows);
    let notes = bench.notes(&all).into_iter().chain(advice);
    Ok(Report::new("array", rows, checks).with_notes(notes))
}

struct Bench<'a> {
    options: &'a Options,
    meter: Meter,
    /// As many as are measured at most; each measurement takes the first of them.
    devices: Devices,
    slow: Option<Slow>,
    kernels: Vec<Kernel>,
    // After the devices in it.
    place: Place,
}

impl<'a> Bench<'a> {
    fn new(options: &'a Options) -> Result<Bench<'a>, Error> {
        let kernels = kernels::taking_part(options);
        let mounts = !kernels.is_empty();
        let each = kernels::device_bytes(options, &kernels);
        let bytes = match &options.storage {
            // The first holds those file systems that are on it alone.
            Storage::Devices(_) if mounts => each,
            _ => options.most() as u64 * each,
        };
        let less = match mounts {
            true => "--devices, --size, --against",
            false => "--size",
        };
        let slow = options.latency.map(|service| {
            Slow::new(Latency {
                service,
                flush: service,
                depth: options.depth,
            })
        });
        let loops = matches!(options.storage, Storage::Loops(..));
        if loops && slow.is_none() && !rustix::process::geteuid().is_root() {
            return Err(Error::Unable(
                "loop devices need root: run this as root, or give --dir FOLDER for files themselves, or --latency \
                 MICROSECONDS for devices of this process"
                    .to_owned(),
            ));
        }
        let place = match &slow {
            Some(_) => Place::new(
                &Storage::Memory,
                bytes,
                false,
                Remedies::in_memory("--size"),
            )?,
            None => Place::new(
                &options.storage,
                bytes,
                mounts,
                Remedies::less(less).without_root("--against none"),
            )?,
        };
        let devices = match place.devices().is_empty() {
            true => place.written(options.most() as u64)?,
            false => {
                let given = place.all();
                let _claim = place.claim(given.paths.len())?;
                given.fill(options.bytes)?;
                given
            }
        };
        Ok(Bench {
            options,
            meter: Meter::new(&[])?,
            devices,
            slow,
            kernels,
            place,
        })
    }

    fn sides(&self, kind: Kind, members: usize) -> Vec<Who> {
        let mut sides: Vec<Who> = match self.slow {
            Some(_) => vec![Who::RawSlow],
            None => Interface::ALL.map(Who::Raw).into(),
        };
        if kind.lone && self.slow.is_none() {
            sides.push(Who::Pread);
        }
        for topology in Topology::ALL {
            sides.extend([Who::SheafArray(topology), Who::SheafFile(topology)]);
        }
        for &kernel in self
            .kernels
            .iter()
            .filter(|kernel| kernels::is_on(**kernel, members))
        {
            sides.push(Who::Kernel(kernel, Way::Aio));
            if kind.lone {
                sides.push(Who::Kernel(kernel, Way::Direct));
            }
        }
        sides
    }

    fn threads(&self, kind: Kind) -> usize {
        match kind.lone {
            true => 1,
            false => self.options.threads,
        }
    }

    /// All sides in one workload, taking turns.
    fn series(
        &self,
        kind: Kind,
        members: usize,
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Series>, Error> {
        let series = |who| Series {
            kind,
            who,
            members,
            threads: self.threads(kind),
            windows: Vec::new(),
        };
        let mut all: Vec<Series> = self.sides(kind, members).into_iter().map(series).collect();
        let of = self.options.runs;
        for run in 1..=of {
            for series in &mut all {
                interrupt::check()?;
                let (name, who) = (kind.name(), series.who.name());
                progress(&format!(
                    "{name}, {members} devices, {who}, run {run} of {of}"
                ));
                let window = self.window(series).map_err(|error| error.on(name, &who))?;
                series.windows.push(window);
            }
        }
        Ok(all)
    }

    fn window(&self, series: &Series) -> Result<Measured, Error> {
        // Some that the side before has left.
        self.place.write_holes()?;
        // Others make one of their own.
        let claim = self.place.claim(series.members)?;
        let _claim = claim.filter(|_| series.who.is_raw());
        // Before Sheaf's threads are there, so that they count.
        let counters = Counters::start();
        let paths = &self.devices.paths[..series.members];
        let plan = Plan {
            kind: series.kind,
            members: series.members,
            per_device: self.options.depth / self.options.threads,
            pages: self.options.bytes / 2 / PAGE as u64,
            counters: &counters,
        };
        let measured = match series.who {
            Who::Raw(interface) => self.queued(series, plan, paths, interface)?,
            Who::RawSlow => self.slow_queue(series, plan, paths)?,
            Who::Pread => self.called(series, plan, paths)?,
            Who::SheafArray(topology) => {
                let devices = topology.over(self.open(paths)?)?;
                self.measure(series, &OnArray::open(plan, devices)?)?
            }
            Who::SheafFile(topology) => self.on_large_file(series, plan, paths, topology)?,
            Who::Kernel(kernel, way) => self.on_kernel(series, plan.on_one_file(), kernel, way)?,
        };
        must_reach_devices(series, &measured)?;
        Ok(measured)
    }

    /// Devices or files by an interface of the kernel's, past its cache.
    fn queued(
        &self,
        series: &Series,
        plan: Plan<'_>,
        paths: &[PathBuf],
        interface: Interface,
    ) -> Result<Measured, Error> {
        let make = |slots| interface.queue(open_direct(paths)?, slots, PAGE);
        let load = OnQueue {
            plan,
            make: &make,
            files: open_direct(paths)?,
        };
        self.measure(series, &load)
    }

    /// The same by plain calls.
    fn called(
        &self,
        series: &Series,
        plan: Plan<'_>,
        paths: &[PathBuf],
    ) -> Result<Measured, Error> {
        let files = open_direct(paths)?;
        self.measure(series, &OnFiles { plan, files })
    }

    fn on_kernel(
        &self,
        series: &Series,
        plan: Plan<'_>,
        kernel: Kernel,
        way: Way,
    ) -> Result<Measured, Error> {
        let bytes = plan.pages * PAGE as u64;
        let file = LargeFile::make(kernel, &self.place, series.members, bytes)?;
        let path = std::slice::from_ref(&file.path);
        let measured = match way {
            Way::Aio => self.queued(series, plan, path, Interface::Aio)?,
            _ => self.called(series, plan, path)?,
        };
        file.close()?;
        Ok(measured)
    }

    /// The devices, as slow as they shall be.
    fn open(&self, paths: &[PathBuf]) -> Result<Vec<Arc<dyn BlockDevice>>, Error> {
        let reap = self.options.reap;
        let how = OpenOptions {
            reap: match &self.slow {
                Some(_) => Reaping::Interrupt,
                None => reap,
            },
            ..OpenOptions::default()
        };
        let opened = device::open_devices(paths, &how)?;
        Ok(match &self.slow {
            Some(slow) => slow.reaping(reap).over_all(opened),
            None => opened,
        })
    }

    fn slow_queue(
        &self,
        series: &Series,
        plan: Plan<'_>,
        paths: &[PathBuf],
    ) -> Result<Measured, Error> {
        let below = device::open_devices(paths, &OpenOptions::default())?;
        let service = self.options.latency.unwrap_or_default();
        let make = |slots| {
            let queue = SlowQueue::new(below.clone(), service, Clock::real(), slots, PAGE);
            Ok(Box::new(queue) as Box<dyn Queue>)
        };
        let load = OnQueue {
            plan,
            make: &make,
            files: open_direct(paths)?,
        };
        self.measure(series, &load)
    }

    fn on_large_file(
        &self,
        series: &Series,
        plan: Plan<'_>,
        paths: &[PathBuf],
        topology: Topology,
    ) -> Result<Measured, Error> {
        let arrangement = Arrangement {
            slow: self.slow.clone(),
            topology,
            reap: self.options.reap,
            ..Arrangement::default()
        };
        let options = FsOptions::default().with_memory(self.options.memory);
        let side = InProcess::arranged(paths, options, &arrangement)?;
        let load = OnLargeFile { plan, side: &side };
        load.fill()?;
        let measured = self.measure(series, &load)?;
        side.close()?;
        Ok(measured)
    }

    fn measure(&self, series: &Series, load: &dyn Load) -> Result<Measured, Error> {
        let window = Window {
            time: self.options.time,
            threads: series.threads,
            operations: u64::MAX,
            cpus: Vec::new(),
        };
        runner::measure(&window, load, &self.meter)?.whole()
    }

    fn notes(&self, all: &[Series]) -> Vec<String> {
        let what = match (&self.slow, &self.options.storage) {
            (Some(slow), _) => format!(
                "devices of this process, over files in memory, each taking {:?} for a transfer and {} at a time; kernel interfaces \
                 cannot be used on them",
                slow.latency.service, slow.latency.depth
            ),
            (None, Storage::Loops(None, _)) => "loop devices over files in a tmpfs".to_owned(),
            (None, Storage::Loops(Some(dir), _)) => {
                format!("loop devices over files in {}", dir.display())
            }
            (None, Storage::Devices(_)) => "block devices that were given".to_owned(),
            (None, _) => "files themselves, opened past the page cache".to_owned(),
        };
        let mut notes = vec![format!(
            "{what}: {} MiB of each are used, by raw sides the first",
            self.options.bytes >> 21
        )];
        notes.push(
            "sheaf-array is a batch at a time, whose end is waited for; sheaf-file has as many transfers in flight as the others"
                .to_owned(),
        );
        notes.extend(
            self.options
                .latency
                .and_then(|service| limit(self.options, service, all)),
        );
        notes.extend(kernels::notes(self.options, &self.kernels));
        notes.push(Counters::note());
        notes
    }
}

/// From how many devices on the processor, and not they, is the limit.
fn limit(options: &Options, service: Duration, all: &[Series]) -> Option<String> {
    let reads = |who: Who| {
        all.iter()
            .filter(move |s| s.who == who && s.kind == Kind::DEEP[0])
    };
    let ideal = |members: usize| (members * options.depth) as f64 / service.as_secs_f64();
    let of = |who: Who| {
        let short = |s: &&Series| rate(s).median < 0.9 * ideal(s.members);
        let found = reads(who).find(short).map(|s| s.members);
        match found {
            Some(members) => format!("{} from {members} devices on", who.name()),
            None => format!("{} with none of these numbers", who.name()),
        }
    };
    let core = Topology::PerCore;
    let sides = [Who::RawSlow, Who::SheafArray(core), Who::SheafFile(core)].into_iter();
    let said: Vec<String> = sides
        .filter(|who| reads(*who).next().is_some())
        .map(of)
        .collect();
    Some(format!(
        "less than 0.9 of what the devices can do, {:.0} reads/s each: {}",
        ideal(1),
        said.join(", ")
    ))
}

fn rate(series: &Series) -> Spread {
    Spread::of(series.windows.iter().map(Measured::rate))
}

/// What Sheaf reads comes from the devices, or the measurement is none of them.
fn must_reach_devices(series: &Series, measured: &Measured) -> Result<(), Error> {
    match measured.counts.requests {
        Some(requests) if !series.kind.write && requests < measured.operations => {
            Err(Error::Unable(format!(
                "{requests} requests reached the devices for {} reads: they were served elsewhere",
                measured.operations
            )))
        }
        _ => Ok(()),
    }
}

fn row(options: &Options, series: &Series) -> Row {
    let mut extra = Map::new();
    let in_flight = match series.kind.lone {
        true => 1,
        false => options.depth * series.members,
    };
    extra.insert("members".to_owned(), Value::from(series.members));
    extra.insert("in_flight".to_owned(), Value::from(in_flight));
    if let Some(topology) = series.who.topology() {
        extra.insert("topology".to_owned(), Value::from(topology.name()));
    }
    counted::put(&mut extra, &series.windows);
    Row::note_rates(&mut extra, series.windows.iter().map(Measured::rate));
    let Spread { median, min, max } = rate(series);
    Row {
        name: series.kind.name().to_owned(),
        target: series.who.name(),
        threads: series.threads,
        unit: "transfers/s",
        median,
        min,
        max,
        runs: series.windows.len(),
        extra,
    }
}

/// One workload with so many devices: each series with its row.
struct Cell<'a> {
    kind: Kind,
    members: usize,
    sides: Vec<(&'a Series, &'a Row)>,
}

impl<'a> Cell<'a> {
    fn of(all: &'a [Series], rows: &'a [Row], kind: Kind, members: usize) -> Cell<'a> {
        let sides = all.iter().zip(rows);
        let sides = sides.filter(|(series, _)| series.kind == kind && series.members == members);
        Cell {
            kind,
            members,
            sides: sides.collect(),
        }
    }

    /// The fastest without Sheaf.
    fn raw(&self) -> Option<&'a Row> {
        let raw = self.sides.iter().filter(|(series, _)| series.who.is_raw());
        let raw = raw.map(|(_, row)| *row);
        raw.max_by(|a, b| a.median.total_cmp(&b.median))
    }

    /// Sheaf as it is by default.
    fn sheaf(&self) -> impl Iterator<Item = &'a Row> {
        let usual = Some(Topology::default());
        let sheaf = self
            .sides
            .iter()
            .filter(move |(series, _)| series.who.topology() == usual);
        sheaf.map(|(_, row)| *row)
    }

    fn name(&self, row: &Row, what: &str) -> String {
        let (kind, members) = (self.kind.name(), self.members);
        match self.kind.lone {
            true => format!("{kind}, {}, {what}", row.target),
            false => format!("{kind}, {members} devices, {}, {what}", row.target),
        }
    }

    /// Rate beside the floor's, and processor time above it.
    fn deep(&self) -> Vec<Check> {
        let Some(raw) = self.raw() else {
            return Vec::new();
        };
        let cpu = |row: &Row| row.extra.get("cpu_us_per_op").and_then(Value::as_f64);
        let check = |row: &'a Row| {
            let above = cpu(row)
                .zip(cpu(raw))
                .map_or(f64::NAN, |(own, raw)| own - raw);
            let rate = self.name(row, &format!("vs {}", raw.target));
            let time = self.name(row, &format!("CPU µs above {}", raw.target));
            [
                Check::new(rate, row.quotients(raw), Comparison::AtLeast, 0.95),
                Check::new(time, above, Comparison::AtMost, 1.0),
            ]
        };
        self.sheaf().flat_map(check).collect()
    }

    /// Time of a transfer above the floor's.
    fn lone(&self) -> Vec<Check> {
        let Some(raw) = self.raw() else {
            return Vec::new();
        };
        let us = |row: &Row| 1e6 / row.median;
        let check = |row: &'a Row| {
            let name = self.name(row, &format!("µs above {}", raw.target));
            Check::new(name, us(row) - us(raw), Comparison::AtMost, 1.0)
        };
        self.sheaf().map(check).collect()
    }
}

/// Of slow devices, how the rate grows with their number: 7.2 times from one to eight.
const GROWTH: f64 = 0.9;

fn checks(options: &Options, all: &[Series], rows: &[Row]) -> Vec<Check> {
    let (reads, lone) = (Kind::DEEP[0], Kind::LONE[0]);
    let mut checks = Vec::new();
    for &members in &options.devices {
        checks.extend(Cell::of(all, rows, reads, members).deep());
        checks.extend(Cell::of(all, rows, lone, members).lone());
    }
    let (Some(&few), Some(&many)) = (options.devices.first(), options.devices.last()) else {
        return checks;
    };
    if options.latency.is_none() || few == many {
        return checks;
    }
    let (few_cell, many_cell) = (
        Cell::of(all, rows, reads, few),
        Cell::of(all, rows, reads, many),
    );
    for row in many_cell.sheaf() {
        let same = few_cell.sheaf().find(|other| other.target == row.target);
        checks.extend(same.map(|other| {
            let name = format!("{}, {}, {few} to {many} devices", reads.name(), row.target);
            let bar = GROWTH * many as f64 / few as f64;
            Check::new(name, row.quotients(other), Comparison::AtLeast, bar)
        }));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::{Counts, Own};
    use base::rng::Rng;
    use std::collections::BTreeSet;
    use std::path::Path;

    pub fn options(dir: &Path) -> Options {
        Options {
            reap: Reaping::default(),
            devices: vec![1, 2],
            depth: 4,
            threads: 2,
            time: Duration::from_millis(20),
            runs: 2,
            bytes: 64 << 20,
            against: Vec::new(),
            storage: Storage::Dir(dir.to_owned()),
            latency: None,
            memory: 32 << 20,
        }
    }

    pub fn extra(row: &Row, key: &str) -> f64 {
        row.extra[key].as_f64().unwrap()
    }

    #[test]
    fn all_sides_are_measured_on_files_and_their_figures_agree() {
        let home = tempfile::tempdir().unwrap();
        let report = run(&options(home.path()), &|_| {}).unwrap();
        // Of two numbers of devices reads and writes by seven sides each, and of one of them lone ones by eight.
        assert_eq!(report.rows.len(), 2 * 2 * 7 + 2 * 8);
        let advised = report.notes.iter();
        let advised = advised.filter(|note| note.starts_with("recommended"));
        assert_eq!(advised.count(), 2);
        for row in &report.rows {
            assert!(row.median > 0.0 && row.min <= row.median && row.median <= row.max);
            assert_eq!(row.runs, 2);
            let lone = row.name.starts_with("lone");
            let in_flight = extra(row, "in_flight");
            assert_eq!(
                in_flight,
                if lone {
                    1.0
                } else {
                    4.0 * extra(row, "members")
                }
            );
            let threads = if lone { 1 } else { 2 };
            assert_eq!(row.threads, threads, "{} {}", row.name, row.target);
            // One transfer is one request of one device; a sync of a window may add some.
            if row.target.starts_with("sheaf") && row.name.ends_with("read") {
                let requests = extra(row, "requests_per_op");
                assert!((1.0..1.5).contains(&requests), "{}: {requests}", row.target);
            }
        }
        let calls = |name: &str, target: &str| {
            let mut rows = report.rows.iter();
            let row = rows.find(|row| row.name == name && row.target == target);
            row.unwrap()
                .extra
                .get("calls_per_op")
                .and_then(Value::as_f64)
        };
        // A plain call is one; counting them may not be allowed.
        if let Some(calls) = calls("lone read", "raw-pread") {
            assert!((1.0..2.0).contains(&calls), "{calls}");
        }
        let bars = report
            .checks
            .iter()
            .filter(|check| check.bar == 0.95)
            .count();
        assert_eq!((bars, report.checks.len()), (4, 4 + 4 + 2));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn slow_devices_are_no_faster_than_they_say() {
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            latency: Some(Duration::from_millis(2)),
            runs: 1,
            ..options(home.path())
        };
        let report = run(&options, &|_| {}).unwrap();
        assert_eq!(report.rows.len(), 2 * 2 * 5 + 2 * 5);
        for row in report.rows.iter().filter(|row| row.name.ends_with("read")) {
            let most = extra(row, "in_flight") / 0.002;
            assert!(
                row.median <= 1.05 * most,
                "{} {}: {} of {most}",
                row.name,
                row.target,
                row.median
            );
        }
        let growth = |check: &&Check| check.name.ends_with("1 to 2 devices");
        let growth: Vec<&Check> = report.checks.iter().filter(growth).collect();
        assert_eq!((growth.len(), growth[0].bar), (2, 1.8));
        assert!(
            report
                .notes
                .iter()
                .any(|note| note.contains("2000 reads/s each")),
            "{:?}",
            report.notes
        );
    }

    #[test]
    fn a_page_of_a_device_is_where_the_array_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..3).map(|i| dir.path().join(i.to_string())).collect();
        for path in &paths {
            device::create_image(path, 64 << 20).unwrap();
        }
        let counters = Counters::start();
        let plan = Plan {
            kind: Kind::DEEP[0],
            members: 3,
            per_device: 1,
            pages: (64 << 20) / 2 / PAGE as u64,
            counters: &counters,
        };
        let devices = device::open_devices(&paths, &OpenOptions::default()).unwrap();
        let load = OnArray::open(plan, devices).unwrap();
        let (mut places, geometry) = (Rng::new(7), load.array.geometry());
        let (mut asked, mut found) = (BTreeSet::new(), BTreeSet::new());
        for slot in 0..3000 {
            let place = plan.place(slot, &mut places);
            let mut pieces = Vec::new();
            geometry.pieces(load.byte(place), PAGE, |piece| pieces.push(piece));
            assert_eq!((pieces.len(), pieces[0].device), (1, place.0));
            asked.insert(place);
            found.insert((place.0, pieces[0].offset));
        }
        // Different pages are in different places.
        assert_eq!(found.len(), asked.len());
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_remedy() {
        let dir = Path::new("/nowhere");
        let refused = |change: &dyn Fn(&mut Options), word: &str| {
            let mut options = options(dir);
            change(&mut options);
            let Err(Error::Usage(text)) = options.check() else {
                panic!("{word} was taken");
            };
            assert!(text.contains(word), "{text}");
        };
        assert!(options(dir).check().is_ok());
        refused(&|o| o.devices = vec![], "--devices");
        refused(&|o| o.devices = vec![2, 1], "growing");
        refused(&|o| o.devices = vec![17], "1 to 16");
        refused(&|o| o.depth = 0, "--depth");
        refused(&|o| o.threads = 3, "divides");
        refused(&|o| o.runs = 0, "--runs");
        refused(&|o| o.time = Duration::ZERO, "--seconds");
        refused(&|o| o.bytes = 1 << 20, "--size");
        refused(&|o| o.latency = Some(Duration::ZERO), "--latency");
        refused(
            &|o| o.against = vec![Target::Kernel(Kernel::Tmpfs)],
            "tmpfs",
        );
        refused(
            &|o| o.storage = Storage::Devices(vec!["/dev/a".into()]),
            "--device",
        );
        assert_eq!(default_devices(0), [1, 2, 4, 8]);
        assert_eq!(default_devices(3), [1, 2, 3]);
        assert_eq!(default_devices(1), [1]);
    }

    #[test]
    fn reads_that_reached_no_device_are_no_measurement() {
        let series = |write| Series {
            kind: Kind::of(write, false),
            who: Who::SheafFile(Topology::PerCore),
            members: 1,
            threads: 1,
            windows: Vec::new(),
        };
        let meter = Meter::new(&[]).unwrap();
        let start = meter.mark().unwrap();
        let span = meter.since(start).unwrap();
        let mut measured = Measured {
            operations: 10,
            seconds: 1.0,
            first: Own::default(),
            last: Own::default(),
            cpu_seconds: 1.0,
            used_up: false,
            start,
            ended: span,
            synced: span,
            background: None,
            counts: Counts {
                requests: Some(9),
                ..Counts::default()
            },
        };
        assert!(must_reach_devices(&series(false), &measured).is_err());
        assert!(must_reach_devices(&series(true), &measured).is_ok());
        measured.counts.requests = Some(10);
        assert!(must_reach_devices(&series(false), &measured).is_ok());
    }
}

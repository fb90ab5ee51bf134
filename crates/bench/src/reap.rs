//! How threads wait for what they have in flight: by interrupts, by polling, and by sleeping until it is nearly there, side by side.
//!
//! The first parts are on devices of this process that do nothing and take a set time for it, so that what differs is the wait alone:
//! the rate, the latencies, and the CPU time of the thread that waits and of the whole machine. Their sleeps and wake-ups are real ones.
//! `group` has a file system on them; `disk` is the same on a file, and `device` on a device that is there already. One thread keeps a group of transfers in flight at a time and waits for all of them.

mod disk;
mod group;
mod loads;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::atomic::AtomicBool;
use base::clock::{self, Clock};
use device::{
    AlignedBuf, BlockDevice, Costs, DeviceInfo, Durability, Latency, LatencyDevice, Operation,
    Reaped, Reaping, Request, Topology,
};
use hdrhistogram::Histogram;
use serde_json::{Map, Value};

use crate::contract::{Check, Comparison, Report, Row, Spread};
use crate::meter::Meter;
use crate::timing::quantile_us;
use crate::{Error, interrupt};

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// One size and depth at a time.
    Fixed,
    /// Sizes, depths and bursts, beside a writer.
    Mix,
    /// The service time eight times as long, and back.
    Step,
    /// The device does nothing for a second.
    Stall,
    /// Writes that depend on each other, on a file system.
    Group,
    /// A file.
    Disk,
    /// A device, or a file, that is there already.
    Device,
}

impl Part {
    pub const ALL: [Part; 7] = [
        Part::Fixed,
        Part::Mix,
        Part::Step,
        Part::Stall,
        Part::Group,
        Part::Disk,
        Part::Device,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Part::Fixed => "fixed",
            Part::Mix => "mix",
            Part::Step => "step",
            Part::Stall => "stall",
            Part::Group => "group",
            Part::Disk => "disk",
            Part::Device => "device",
        }
    }

    /// Those of these names; of none all, `disk` only where a folder is given, and `device` where a device is.
    pub fn select(names: &[String], dir: bool, device: bool) -> Result<Vec<Part>, Error> {
        if names.is_empty() {
            let has = |part: &Part| match part {
                Part::Disk => dir,
                Part::Device => device,
                _ => true,
            };
            return Ok(Part::ALL.into_iter().filter(has).collect());
        }
        let find = |name: &String| {
            let found = Part::ALL.into_iter().find(|part| part.name() == name);
            found.ok_or_else(|| {
                let all = Part::ALL.map(Part::name).join(", ");
                Error::Usage(format!("there is no part {name:?}: there are {all}"))
            })
        };
        names.iter().map(find).collect()
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    pub parts: Vec<Part>,
    pub time: Duration,
    pub runs: usize,
    /// For the file of `disk`.
    pub dir: Option<PathBuf>,
    /// Of `device`, and how many transfers are waited for together there, one series for each.
    pub device: Option<PathBuf>,
    pub depths: Vec<usize>,
    /// It is written to as well, and loses what it holds.
    pub overwrite: bool,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if self.time.is_zero() || self.time > Duration::from_secs(3600) {
            return usage("--seconds takes more than 0 and at most 3600");
        }
        if !(1..=1000).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 1000");
        }
        if self.dir.is_none() && self.parts.contains(&Part::Disk) {
            return usage("disk needs --dir FOLDER");
        }
        if self.device.is_none() && self.parts.contains(&Part::Device) {
            return usage("device needs --device PATH");
        }
        if let Some(path) = &self.device
            && let Err(error) = std::fs::metadata(path)
        {
            return Err(Error::Usage(format!(
                "--device {}: {error}",
                path.display()
            )));
        }
        if !self
            .depths
            .iter()
            .all(|depth| (1..=DEPTH_MAX).contains(depth))
        {
            return Err(Error::Usage(format!(
                "--depth takes numbers from 1 to {DEPTH_MAX}"
            )));
        }
        Ok(())
    }

    /// The policies in the order of a run: each is first in its turn.
    fn order(&self, run: usize) -> impl Iterator<Item = usize> {
        (0..Reaping::ALL.len()).map(move |at| (at + run) % Reaping::ALL.len())
    }
}

/// A group that is started and waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group {
    bytes: usize,
    depth: usize,
    write: Option<Durability>,
}

impl Group {
    const fn reads(bytes: usize, depth: usize) -> Group {
        Group {
            bytes,
            depth,
            write: None,
        }
    }

    fn name(self) -> String {
        let size = match self.bytes {
            bytes if bytes < 1024 => format!("{bytes} B"),
            bytes if bytes < 1 << 20 => format!("{} KiB", bytes >> 10),
            bytes => format!("{} MiB", bytes >> 20),
        };
        let what = match self.write {
            None => "read",
            Some(Durability::Durable) => "durable write",
            Some(_) => "write",
        };
        format!("{size} {what}, depth {}", self.depth)
    }
}

/// Largest transfer, and most of them in a group.
const BYTES_MAX: usize = 1 << 20;
const DEPTH_MAX: usize = 32;

/// Memory for a group, and what it is read from and written to.
struct Buffers(Vec<AlignedBuf>);

impl Buffers {
    fn new(bytes: usize, depth: usize) -> Buffers {
        Buffers((0..depth).map(|_| AlignedBuf::zeroed(bytes)).collect())
    }

    /// Runs a group at these places, and waits for it.
    fn run(
        &mut self,
        device: &dyn BlockDevice,
        group: Group,
        mut place: impl FnMut() -> u64,
    ) -> Result<(), Error> {
        let mut requests = Vec::with_capacity(group.depth);
        for buf in self.0.iter_mut().take(group.depth) {
            let (offset, buf) = (place(), &mut buf[..group.bytes]);
            let operation = match group.write {
                None => Operation::Read { offset, buf },
                Some(durability) => Operation::Write {
                    offset,
                    buf,
                    durability,
                },
            };
            requests.push(Request::new(operation, 0));
        }
        device.run(&mut requests, None);
        match requests.into_iter().find_map(|request| request.error) {
            Some(source) => Err(Error::Io {
                what: device.name().to_owned(),
                source,
            }),
            None => Ok(()),
        }
    }
}

/// A device that does nothing, at once.
struct Nothing(AtomicBool);

impl BlockDevice for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }

    fn bytes(&self) -> u64 {
        1 << 40
    }

    fn logical_block(&self) -> u32 {
        512
    }

    fn memory_align(&self) -> usize {
        1
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.name().to_owned(),
            backend: "nothing",
            kind: "memory",
            direct: true,
            bytes: self.bytes(),
            logical_block: self.logical_block(),
            rotational: Some(false),
            topology: Topology::PerCore,
            reap: Reaping::Interrupt,
            polled: false,
            numa_node: None,
        }
    }

    fn has_writer(&self) -> &AtomicBool {
        &self.0
    }

    fn run(&self, _requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
    }

    fn discard(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }
}

/// A device that takes so long for each transfer, and serves a whole group at a time.
fn slow(service: Duration, policy: Reaping) -> LatencyDevice {
    let latency = Latency {
        service,
        flush: service,
        depth: DEPTH_MAX * BYTES_MAX / (128 << 10),
    };
    LatencyDevice::new(
        Arc::new(Nothing(AtomicBool::new(false))),
        latency,
        Clock::real(),
    )
    .reaping(policy)
}

/// What one side did in one window.
#[derive(Debug)]
struct Window {
    transfers: u64,
    seconds: f64,
    /// CPU time of the threads that waited, and of the machine, in seconds.
    cpu: f64,
    machine: Option<f64>,
    times: Histogram<u64>,
    /// What the device counted meanwhile; `None`: it does not count.
    reaped: Option<Reaped>,
}

fn histogram() -> Histogram<u64> {
    // The bounds are constants that it takes.
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds of a histogram")
}

impl Window {
    fn rate(&self) -> f64 {
        self.transfers as f64 / self.seconds
    }

    /// Percent of a CPU.
    fn cpu_percent(&self) -> f64 {
        100.0 * self.cpu / self.seconds
    }
}

/// Seconds in which CPUs were not idle so far, as far as the kernel counts its ticks: for where it has no better account.
fn machine_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let ticks = text.lines().next()?.split_whitespace().skip(1);
    let ticks: Vec<u64> = ticks.map_while(|word| word.parse().ok()).collect();
    // user, nice, system, idle, waiting for I/O, interrupts; then what is told elsewhere or stolen.
    let busy = ticks
        .iter()
        .enumerate()
        .filter(|(at, _)| matches!(at, 0..=2 | 5..=6));
    Some(busy.map(|(_, ticks)| ticks).sum::<u64>() as f64 / 100.0)
}

/// Repeats a group until the time is over.
fn measure(
    device: &dyn BlockDevice,
    time: Duration,
    mut body: impl FnMut(&dyn BlockDevice) -> Result<u64, Error>,
) -> Result<Window, Error> {
    let meter = Meter::new(&[])?;
    let mut times = histogram();
    let busy = machine_seconds();
    let counted = device.reaped();
    let (mark, cpu, start) = (meter.mark()?, clock::thread_cpu_ns(), clock::now_ns());
    let mut transfers = 0;
    let mut before = start;
    loop {
        transfers += body(device)?;
        let now = clock::now_ns();
        times.saturating_record(now - before);
        before = now;
        if now - start >= time.as_nanos() as u64 {
            break;
        }
    }
    let cpu = clock::thread_cpu_ns() - cpu;
    let span = meter.since(mark)?;
    Ok(Window {
        transfers,
        seconds: (before - start) as f64 / 1e9,
        cpu: cpu as f64 / 1e9,
        machine: span
            .busy_seconds
            .or_else(|| Some(machine_seconds()? - busy?)),
        times,
        reaped: counted.and_then(|counted| Some(device.reaped()?.since(counted))),
    })
}

/// The windows of one side of one workload.
struct Series {
    name: String,
    target: String,
    windows: Vec<Window>,
}

impl Series {
    fn new(name: &str, policy: Reaping) -> Series {
        Series::of(name, policy.name().to_owned())
    }

    fn of(name: &str, target: String) -> Series {
        Series {
            name: name.to_owned(),
            target,
            windows: Vec::new(),
        }
    }

    fn row(&self, unit: &'static str) -> Row {
        let mut extra = Map::new();
        let mut times = histogram();
        for window in &self.windows {
            // All have the same bounds.
            let added = times.add(&window.times);
            debug_assert!(added.is_ok());
        }
        let round = |value: f64| (value * 100.0).round() / 100.0;
        let mut put = |key: &str, value: f64| {
            extra.insert(key.to_owned(), Value::from(round(value)));
        };
        for (key, quantile) in [("p50_us", 0.5), ("p99_us", 0.99), ("p999_us", 0.999)] {
            let us = quantile_us(&times, quantile);
            if us.is_finite() {
                put(key, us);
            }
        }
        put(
            "window_s",
            Spread::of(self.windows.iter().map(|w| w.seconds)).median,
        );
        put("samples", times.len() as f64);
        let median = |get: &dyn Fn(&Window) -> f64| Spread::of(self.windows.iter().map(get)).median;
        put("cpu_percent", median(&Window::cpu_percent));
        put(
            "cpu_us_per_op",
            median(&|w| 1e6 * w.cpu / w.transfers.max(1) as f64),
        );
        if self.windows.iter().all(|w| w.machine.is_some()) {
            let busy = |w: &Window| 100.0 * w.machine.unwrap_or(0.0) / w.seconds;
            put("machine_cpu_percent", median(&busy));
        }
        let counted = self.windows.iter().map(|window| window.reaped.clone());
        let sum = |mut all: Reaped, one: Reaped| {
            all.add(one);
            all
        };
        if let Some(reaped) = counted.flatten().reduce(sum) {
            let part = |count: u64| 100.0 * count as f64 / reaped.waits.max(1) as f64;
            put("blocked_percent", part(reaped.blocked));
            put("overslept_percent", part(reaped.overslept));
            put("caught_percent", part(reaped.caught));
        }
        Row::note_rates(&mut extra, self.windows.iter().map(Window::rate));
        let rates = Spread::of(self.windows.iter().map(Window::rate));
        Row {
            name: self.name.clone(),
            target: self.target.clone(),
            threads: 1,
            unit,
            median: rates.median,
            min: rates.min,
            max: rates.max,
            runs: self.windows.len(),
            extra,
        }
    }
}

/// Rows and checks of a part.
#[derive(Default)]
struct Findings {
    rows: Vec<Row>,
    checks: Vec<Check>,
    notes: Vec<String>,
}

impl Findings {
    fn row(&self, name: &str, policy: Reaping) -> Option<&Row> {
        let mut rows = self.rows.iter();
        rows.find(|row| row.name == name && row.target == policy.name())
    }

    fn check(&mut self, name: String, value: impl Into<Spread>, op: Comparison, bar: f64) {
        self.checks.push(Check::new(name, value, op, bar));
    }

    /// The rate of `lazy` in that of `poll`, and its CPU time likewise.
    fn beside_poll(&mut self, name: &str, rate: f64, cpu: f64) {
        let (Some(lazy), Some(poll)) =
            (self.row(name, Reaping::Lazy), self.row(name, Reaping::Poll))
        else {
            return;
        };
        let (quotient, used) = (lazy.quotients(poll), cpu_of(lazy) / cpu_of(poll));
        self.check(
            format!("{name}: lazy's rate by poll's"),
            quotient,
            Comparison::AtLeast,
            rate,
        );
        self.check(
            format!("{name}: lazy's CPU time by poll's"),
            used,
            Comparison::AtMost,
            cpu,
        );
    }
}

/// Percent of a CPU.
fn cpu_of(row: &Row) -> f64 {
    let cpu = row.extra.get("cpu_percent").and_then(Value::as_f64);
    cpu.unwrap_or(f64::NAN)
}

/// Measures. `progress` is told what comes next.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    options.check()?;
    interrupt::catch()?;
    let costs = Costs::get();
    let us = |ns: u64| ns as f64 / 1e3;
    let mut all = Findings::default();
    all.notes.push(format!(
        "here a sleeper runs {:.0} µs late, a sleep takes {:.0} µs of CPU time, and none is shorter than {:.0} µs",
        us(costs.wake_ns),
        us(costs.cpu_ns),
        us(costs.shortest_ns)
    ));
    for part in &options.parts {
        let found = match part {
            Part::Fixed => fixed(options, progress)?,
            Part::Mix => loads::mix(options, progress)?,
            Part::Step => loads::step(options, progress)?,
            Part::Stall => loads::stall(options, progress)?,
            Part::Group => group::run(options, progress)?,
            Part::Disk => disk::run(options, progress)?,
            Part::Device => disk::given(options, progress)?,
        };
        all.rows.extend(found.rows);
        all.checks.extend(found.checks);
        all.notes.extend(found.notes);
    }
    let report = Report::new("reap", all.rows, all.checks);
    Ok(report.with_notes(all.notes))
}

/// Microseconds of devices, and what is read from them.
const FIXED: [(u64, Group); 19] = [
    (20, Group::reads(4096, 1)),
    (50, Group::reads(4096, 1)),
    (100, Group::reads(4096, 1)),
    (200, Group::reads(4096, 1)),
    (300, Group::reads(4096, 1)),
    (500, Group::reads(4096, 1)),
    (1000, Group::reads(4096, 1)),
    (2000, Group::reads(4096, 1)),
    (5000, Group::reads(4096, 1)),
    (300, Group::reads(512, 1)),
    (300, Group::reads(4096, 8)),
    (300, Group::reads(4096, 32)),
    (1000, Group::reads(4096, 2)),
    (1000, Group::reads(4096, 8)),
    (1000, Group::reads(4096, 32)),
    (1000, Group::reads(128 << 10, 1)),
    (5000, Group::reads(128 << 10, 1)),
    (1000, Group::reads(1 << 20, 1)),
    (5000, Group::reads(1 << 20, 1)),
];

fn fixed(options: &Options, progress: &dyn Fn(&str)) -> Result<Findings, Error> {
    let name = |us: u64, group: Group| format!("{us} µs, {}", group.name());
    let mut sides = Vec::new();
    for (us, group) in FIXED {
        for policy in Reaping::ALL {
            let device = slow(Duration::from_micros(us), policy);
            sides.push((group, device, Series::new(&name(us, group), policy)));
        }
    }
    let mut buffers = Buffers::new(BYTES_MAX, DEPTH_MAX);
    for run in 0..options.runs {
        for (at, sides) in sides.chunks_mut(Reaping::ALL.len()).enumerate() {
            progress(&format!("{}, run {}", sides[0].2.name, run + 1));
            for policy in options.order(run + at) {
                interrupt::check()?;
                let (group, device, series) = &mut sides[policy];
                let body = |device: &dyn BlockDevice| {
                    buffers.run(device, *group, || 0)?;
                    Ok(group.depth as u64)
                };
                series.windows.push(measure(device, options.time, body)?);
            }
        }
    }
    let rows = sides.iter();
    let mut found = Findings {
        rows: rows.map(|(.., series)| series.row("transfers/s")).collect(),
        ..Findings::default()
    };
    let wake = Costs::get().wake_ns;
    for (us, group) in FIXED {
        let (name, ns) = (name(us, group), us * 1000);
        match group.bytes {
            bytes if bytes >= 128 << 10 => large_checks(&mut found, &name, bytes),
            _ if us == 1000 || ns >= 20 * wake => found.beside_poll(&name, 0.99, 0.25),
            _ if ns >= 3 * wake => found.beside_poll(&name, 0.95, 0.5),
            _ => {}
        }
    }
    Ok(found)
}

fn large_checks(found: &mut Findings, name: &str, bytes: usize) {
    let rows = Reaping::ALL.map(|policy| found.row(name, policy));
    let [Some(interrupt), Some(poll), Some(lazy)] = rows else {
        return;
    };
    if bytes != 128 << 10 {
        return;
    }
    let (rate, more) = (lazy.quotients(poll), cpu_of(lazy) - cpu_of(interrupt));
    found.check(
        format!("{name}: lazy's rate by poll's"),
        rate,
        Comparison::AtLeast,
        0.99,
    );
    found.check(
        format!("{name}: percent of a CPU that lazy takes above interrupt"),
        more,
        Comparison::AtMost,
        3.0,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(parts: &[Part]) -> Options {
        Options {
            parts: parts.to_vec(),
            time: Duration::from_millis(1),
            runs: 1,
            dir: None,
            device: None,
            depths: vec![1],
            overwrite: false,
        }
    }

    #[test]
    fn each_policy_does_what_is_fixed_and_is_judged() {
        let report = run(&options(&[Part::Fixed]), &|_| {}).unwrap();
        assert_eq!(report.rows.len(), 3 * FIXED.len());
        assert!(report.rows.iter().all(|row| row.median > 0.0));
        let of = |name: &str| {
            let mut checks = report.checks.iter();
            checks.any(|check| check.name.starts_with(name))
        };
        assert!(of("1000 µs, 4 KiB read, depth 1") && of("5000 µs, 128 KiB read, depth 1"));
    }

    /// What a device had counted before, of other groups, was counted again with each.
    #[test]
    fn a_window_has_the_counts_of_its_own_waits() {
        let device = slow(Duration::from_micros(1), Reaping::Poll);
        let mut buffers = Buffers::new(4096, 8);
        for depth in [1, 8, 1] {
            let group = Group::reads(4096, depth);
            let body = |device: &dyn BlockDevice| {
                buffers.run(device, group, || 0)?;
                Ok(depth as u64)
            };
            let window = measure(&device, Duration::from_millis(1), body).unwrap();
            let waits = window.reaped.map(|reaped| reaped.waits);
            assert_eq!(waits, Some(window.transfers / depth as u64));
        }
    }

    #[test]
    fn a_mix_a_step_and_a_file_are_measured() {
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            dir: Some(home.path().to_owned()),
            ..options(&[Part::Mix, Part::Step, Part::Group, Part::Disk])
        };
        let report = run(&options, &|_| {}).unwrap();
        for part in ["mix", "step", "commit", "file"] {
            let mut rows = report.rows.iter();
            assert!(rows.any(|row| row.name.starts_with(part)), "{part}");
        }
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn senseless_options_are_usage_errors() {
        let refused = |options: Options| matches!(options.check(), Err(Error::Usage(_)));
        assert!(!refused(options(&[Part::Fixed])));
        assert!(refused(options(&[Part::Disk])));
        assert!(refused(options(&[Part::Device])));
        // All other parts had run before it was opened.
        assert!(refused(Options {
            device: Some("/none/device".into()),
            ..options(&[Part::Fixed])
        }));
        assert!(refused(Options {
            depths: vec![DEPTH_MAX + 1],
            ..options(&[])
        }));
        assert!(refused(Options {
            runs: 0,
            ..options(&[])
        }));
        assert!(Part::select(&["sleep".to_owned()], false, false).is_err());
        assert_eq!(Part::select(&[], false, false).unwrap().len(), 5);
        assert_eq!(Part::select(&[], true, true).unwrap().len(), 7);
    }

    #[test]
    fn what_is_there_is_written_to_only_by_who_asks_for_it_and_if_nothing_known_is_on_it() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        let content = vec![7; 2 << 20];
        std::fs::write(&path, &content).unwrap();
        let reads = Options {
            device: Some(path.clone()),
            depths: vec![1, 4],
            ..options(&[Part::Device])
        };
        let report = run(&reads, &|_| {}).unwrap();
        assert!(report.rows.iter().all(|row| row.name.contains("read")));
        assert_eq!(std::fs::read(&path).unwrap(), content);
        let writes = Options {
            overwrite: true,
            ..reads
        };
        let report = run(&writes, &|_| {}).unwrap();
        assert!(
            report
                .rows
                .iter()
                .any(|row| row.name.contains("durable write"))
        );
        assert_ne!(std::fs::read(&path).unwrap(), content);
        let mut known = content;
        known[..4].copy_from_slice(b"XFSB");
        std::fs::write(&path, &known).unwrap();
        assert!(matches!(run(&writes, &|_| {}), Err(Error::Unable(_))));
        assert_eq!(std::fs::read(&path).unwrap(), known);
    }
}

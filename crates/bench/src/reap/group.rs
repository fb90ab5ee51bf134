//! Groups of writes that depend on each other: a transaction of eight pages on a file system over slow devices.
//!
//! A commit has two phases, of which the first must be over before the second may begin: data and journal, flush. What is parallel within a phase
//! takes as long as its slowest member, and wakes its waiter once; so a commit takes twice what a device takes, and each
//! device is waited for twice at most.

use std::time::Duration;

use base::clock;
use device::{Latency, Reaping};
use fs::FsOptions;
use serde_json::Value;

use super::{Findings, Options, Series, histogram};
use crate::contract::{Comparison, Spread};
use crate::meter::Meter;
use crate::target::{Arrangement, InProcess, Place, Remedies, Side, Slow, Storage};
use crate::{Error, interrupt};

const SERVICE: Duration = Duration::from_millis(1);
const PHASES: f64 = 2.0;
const DEVICES: [u64; 2] = [1, 4];
const WRITES: u64 = 8;
const PAGE: usize = 4096;
/// Where the pages of a transaction lie from each other, and how large the file is.
const APART: u64 = 1 << 20;
const FILE: u64 = WRITES * APART;
const BYTES: u64 = 1 << 30;
const MEMORY: usize = 128 << 20;
/// What is not measured, at the beginning.
const WARM: u32 = 8;

struct Case {
    devices: u64,
    policy: Reaping,
    series: Series,
    /// Waits for a device while a commit ran, of each commit; now and then others wait meanwhile.
    waits: Vec<f64>,
}

pub(super) fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Findings, Error> {
    let place = Place::new(&Storage::Memory, BYTES, false, Remedies::in_memory(""))?;
    let name = |devices: u64| format!("commit of 8 writes, {devices} x 1000 µs");
    let mut cases: Vec<Case> = Vec::new();
    for devices in DEVICES {
        cases.extend(Reaping::ALL.map(|policy| Case {
            devices,
            policy,
            series: Series::new(&name(devices), policy),
            waits: Vec::new(),
        }));
    }
    for run in 0..options.runs {
        for (at, cases) in cases.chunks_mut(Reaping::ALL.len()).enumerate() {
            progress(&format!("{}, run {}", cases[0].series.name, run + 1));
            for policy in options.order(run + at) {
                interrupt::check()?;
                commits(&mut cases[policy], &place, options)?;
            }
        }
    }
    let mut found = Findings::default();
    for case in &cases {
        let mut row = case.series.row("transactions/s");
        let waits = Spread::of(case.waits.iter().copied());
        for (key, value) in [
            ("waits_per_device", waits.median),
            ("waits_per_device_max", waits.max),
        ] {
            row.extra.insert(key.to_owned(), Value::from(value));
        }
        let p50 = row.extra.get("p50_us").and_then(Value::as_f64);
        let phases = PHASES * SERVICE.as_micros() as f64;
        let who = format!("{}, {}", row.name, row.target);
        found.check(
            format!("{who}: waits for a device, median"),
            waits.median,
            Comparison::AtMost,
            PHASES,
        );
        found.check(
            format!("{who}: median latency by the sum of its phases"),
            p50.unwrap_or(f64::NAN) / phases,
            Comparison::AtMost,
            1.05,
        );
        found.rows.push(row);
    }
    Ok(found)
}

fn commits(case: &mut Case, place: &Place, options: &Options) -> Result<(), Error> {
    let devices = place.images(case.devices, "group")?;
    let arrangement = Arrangement {
        slow: Some(Slow::new(Latency {
            service: SERVICE,
            flush: SERVICE,
            depth: super::DEPTH_MAX,
        })),
        reap: case.policy,
        ..Arrangement::default()
    };
    let settings = FsOptions::default().with_memory(MEMORY);
    let side = InProcess::arranged(&devices.paths, settings, &arrangement)?;
    let made = side.create(&side.root(), "file")?;
    let page = vec![7; PAGE];
    side.write(&made, FILE - PAGE as u64, &page)?;
    for number in 0..WRITES {
        side.write(&made, number * APART, &page)?;
    }
    side.sync()?;
    side.settle()?;
    let file = side.open_with(&side.root(), "file", 0)?;
    let commit = || {
        let writes = (0..WRITES).map(|number| (&*file, number * APART, &page[..]));
        side.transaction(writes)
    };
    for _ in 0..WARM {
        commit()?;
    }
    let meter = Meter::new(&[])?;
    let mut times = histogram();
    let counted = side.reaped();
    let (mark, cpu, start) = (meter.mark()?, clock::thread_cpu_ns(), clock::now_ns());
    let (mut transfers, mut before) = (0, start);
    while transfers == 0 || before - start < options.time.as_nanos() as u64 {
        let waits = side.reaped().waits;
        commit()?;
        transfers += 1;
        let now = clock::now_ns();
        times.saturating_record(now - before);
        let waits = side.reaped().waits - waits;
        case.waits.push(waits as f64 / case.devices as f64);
        before = clock::now_ns();
    }
    let cpu = clock::thread_cpu_ns() - cpu;
    let span = meter.since(mark)?;
    case.series.windows.push(super::Window {
        transfers,
        seconds: (before - start) as f64 / 1e9,
        cpu: cpu as f64 / 1e9,
        machine: span.busy_seconds,
        times,
        reaped: Some(side.reaped().since(counted)),
    });
    drop((made, file));
    side.close()
}

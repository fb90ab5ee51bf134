//! Loads and devices that change.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::clock;
use base::rng::Rng;
use device::{BlockDevice, Durability, LatencyDevice, Reaping, Stall};
use serde_json::{Map, Value};

use super::{BYTES_MAX, Buffers, Findings, Group, Options, Series, Window, measure, slow};
use crate::contract::{Comparison, Row, Spread};
use crate::{Error, interrupt};

/// The devices of the mix, in microseconds.
const DEVICES: [u64; 2] = [300, 1000];
/// Groups of a burst, and how long nothing comes after it.
const BURST: u32 = 32;
const PAUSE: Duration = Duration::from_millis(2);

/// A reader of various sizes and depths in bursts, and a writer of 128 KiB beside it, each on a thread of its own. What is counted are
/// the reader's transfers; the CPU time is that of both.
pub(super) fn mix(options: &Options, progress: &dyn Fn(&str)) -> Result<Findings, Error> {
    let mut found = Findings::default();
    for us in DEVICES {
        let name = format!("mix, {us} µs");
        let mut all: Vec<(LatencyDevice, Series)> = Reaping::ALL
            .into_iter()
            .map(|policy| {
                let device = slow(Duration::from_micros(us), policy);
                (device, Series::new(&name, policy))
            })
            .collect();
        for run in 0..options.runs {
            progress(&format!("{name}, run {}", run + 1));
            for policy in options.order(run) {
                interrupt::check()?;
                let (device, series) = &mut all[policy];
                series.windows.push(mixed(device, options, run as u64)?);
            }
        }
        let rows = all.iter().map(|(_, series)| series.row("transfers/s"));
        found.rows.extend(rows);
        found.beside_poll(&name, 0.97, 0.41);
    }
    Ok(found)
}

fn mixed(device: &LatencyDevice, options: &Options, seed: u64) -> Result<Window, Error> {
    let over = AtomicBool::new(false);
    let sides = base::thread::try_parallel(2, |thread| match thread {
        0 => {
            let window = reader(device, options, seed);
            over.store(true, Ordering::Relaxed);
            window
        }
        _ => writer(device, &over),
    });
    let mut sides = sides.map_err(Error::threads)?.into_iter();
    let mut next = || sides.next().expect("each thread has an outcome");
    let (mut reader, writer) = (next()?, next()?);
    reader.cpu += writer.cpu;
    Ok(reader)
}

fn reader(device: &LatencyDevice, options: &Options, seed: u64) -> Result<Window, Error> {
    let mut rng = Rng::new(seed);
    let mut buffers = Buffers::new(128 << 10, 8);
    let mut groups = 0;
    measure(device, options.time, |device| {
        let sizes = [512, 4096, 4096, 16384, 65536, 128 << 10];
        let depths = [1, 1, 1, 2, 4, 8];
        let group = Group::reads(
            sizes[rng.below(sizes.len() as u64) as usize],
            depths[rng.below(depths.len() as u64) as usize],
        );
        groups += 1;
        if groups % BURST == 0 {
            clock::nap(PAUSE.as_nanos() as u64);
        }
        buffers.run(device, group, || 0)?;
        Ok(group.depth as u64)
    })
}

fn writer(device: &LatencyDevice, over: &AtomicBool) -> Result<Window, Error> {
    let group = Group {
        bytes: 128 << 10,
        depth: 4,
        write: Some(Durability::Volatile),
    };
    let mut buffers = Buffers::new(group.bytes, group.depth);
    let mut body = || buffers.run(device, group, || 0);
    let (cpu, start) = (clock::thread_cpu_ns(), clock::now_ns());
    while !over.load(Ordering::Relaxed) {
        body()?;
    }
    Ok(Window {
        transfers: 0,
        seconds: (clock::now_ns() - start) as f64 / 1e9,
        cpu: (clock::thread_cpu_ns() - cpu) as f64 / 1e9,
        machine: None,
        times: super::histogram(),
        reaped: None,
    })
}

/// Requests between two steps.
const STEP: usize = 300;
/// The device before and after, and eight times as slow between.
const SERVICE: Duration = Duration::from_micros(300);
/// It is settled when of so many requests all but two were found by a spin.
const SETTLED: usize = 10;

/// Requests from a step on until waits go as before it.
pub(super) fn step(options: &Options, progress: &dyn Fn(&str)) -> Result<Findings, Error> {
    let mut counts: [Vec<f64>; 2] = [Vec::new(), Vec::new()];
    let mut buffers = Buffers::new(4096, 1);
    for run in 0..options.runs {
        progress(&format!("a step of the service time, run {}", run + 1));
        let device = slow(SERVICE, Reaping::Lazy);
        let mut requests = |service: Duration| -> Result<Vec<bool>, Error> {
            device.set_service(service);
            let mut caught = Vec::with_capacity(STEP);
            for _ in 0..STEP {
                interrupt::check()?;
                let before = caught_by(&device);
                buffers.run(&device, Group::reads(4096, 1), || 0)?;
                caught.push(caught_by(&device) > before);
            }
            Ok(caught)
        };
        requests(SERVICE)?;
        for (count, service) in counts.iter_mut().zip([8 * SERVICE, SERVICE]) {
            count.push(settled(&requests(service)?) as f64);
        }
    }
    let mut found = Findings::default();
    for (name, counts) in ["step, 8 times as long", "step, back"]
        .into_iter()
        .zip(counts)
    {
        let spread = Spread::of(counts.iter().copied());
        found.rows.push(plain_row(name, "requests", &counts));
        let name = format!("{name}: requests until it is settled, at most");
        found.check(name, spread.max, Comparison::AtMost, 100.0);
    }
    Ok(found)
}

fn caught_by(device: &LatencyDevice) -> u64 {
    device.reaped().map_or(0, |reaped| reaped.caught)
}

/// The first request from which on nearly all were caught.
fn settled(caught: &[bool]) -> usize {
    let good = |some: &[bool]| some.iter().filter(|&&one| one).count() + 2 >= SETTLED;
    let found = caught.windows(SETTLED).position(good);
    found.unwrap_or(caught.len())
}

fn plain_row(name: &str, unit: &'static str, values: &[f64]) -> Row {
    let spread = Spread::of(values.iter().copied());
    Row {
        name: name.to_owned(),
        target: Reaping::Lazy.name().to_owned(),
        threads: 1,
        unit,
        median: spread.median,
        min: spread.min,
        max: spread.max,
        runs: values.len(),
        extra: Map::from_iter([(
            "service_us".to_owned(),
            Value::from(SERVICE.as_micros() as u64),
        )]),
    }
}

/// How long the device does nothing.
const STALLED: Duration = Duration::from_secs(1);

/// What a wait spins that meets a device which does nothing for a second.
pub(super) fn stall(options: &Options, progress: &dyn Fn(&str)) -> Result<Findings, Error> {
    let mut spun = Vec::new();
    let mut buffers = Buffers::new(BYTES_MAX, 1);
    for run in 0..options.runs {
        progress(&format!("a stall of a second, run {}", run + 1));
        let device = slow(SERVICE, Reaping::Lazy).stalling(Stall {
            period: STALLED + STALLED / 4,
            stalled: STALLED,
        });
        // Begins with a stall, by which nothing is known, and ends with one.
        for stalls in [1, 2] {
            loop {
                interrupt::check()?;
                let (start, before) = (clock::now_ns(), spun_by(&device));
                buffers.run(&device, Group::reads(4096, 1), || 0)?;
                if clock::now_ns() - start > STALLED.as_nanos() as u64 / 2 {
                    if stalls == 2 {
                        spun.push((spun_by(&device) - before) as f64 / 1e6);
                    }
                    break;
                }
            }
        }
    }
    let mut found = Findings::default();
    found
        .rows
        .push(plain_row("stall of 1 s", "ms of spinning", &spun));
    let most = Spread::of(spun.iter().copied()).max;
    let name = "stall of 1 s: milliseconds of spinning, at most".to_owned();
    found.check(name, most, Comparison::AtMost, 5.0);
    Ok(found)
}

fn spun_by(device: &LatencyDevice) -> u64 {
    device.reaped().map_or(0, |reaped| reaped.spun_ns)
}

//! The policies on a file, and `fio` beside them where it is installed.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use base::rng::Rng;
use device::{BlockDevice, Durability, OpenOptions, Reaping};
use serde_json::Value;

use super::{BYTES_MAX, Buffers, DEPTH_MAX, Findings, Group, Options, Series, Window, measure};
use crate::target::{Place, Storage, program_exists};
use crate::{Error, interrupt};

/// Size of the file.
const BYTES: u64 = 256 << 20;

fn groups() -> Vec<Group> {
    let durable = Group {
        bytes: 4096,
        depth: 1,
        write: Some(Durability::Durable),
    };
    vec![
        Group::reads(4096, 1),
        Group::reads(4096, 8),
        Group::reads(4096, 32),
        Group::reads(128 << 10, 1),
        Group::reads(1 << 20, 1),
        durable,
    ]
}

pub(super) fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Findings, Error> {
    let dir = options.dir.clone().unwrap_or_default();
    let place = Place::new(&Storage::Dir(dir), BYTES, false)?;
    let file = place.written(1)?;
    let mut found = Findings::default();
    let fio = program_exists("fio");
    if !fio {
        found
            .notes
            .push("fio is not installed, and not beside".to_owned());
    }
    let devices = Reaping::ALL.map(|reap| {
        let options = OpenOptions {
            // Three of this process share the file.
            exclusive: false,
            reap,
            ..OpenOptions::default()
        };
        device::open_devices(&file.paths, &options)
    });
    let devices: Vec<Arc<dyn BlockDevice>> = devices
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .flatten()
        .collect();
    let mut buffers = Buffers::new(BYTES_MAX, DEPTH_MAX);
    let mut rng = Rng::new(1);
    for group in groups() {
        let name = format!("file, {}", group.name());
        let mut all = Reaping::ALL.map(|policy| Series::new(&name, policy));
        let mut others: Vec<Series> = ["psync", "io_uring"]
            .into_iter()
            .filter(|engine| fio && (group.depth == 1 || *engine == "io_uring"))
            .map(|engine| Series {
                name: name.clone(),
                target: format!("fio-{engine}"),
                windows: Vec::new(),
            })
            .collect();
        for run in 0..options.runs {
            progress(&format!("{name}, run {}", run + 1));
            for policy in options.order(run) {
                interrupt::check()?;
                let window = measure(devices[policy].as_ref(), options.time, |device| {
                    let places = BYTES / group.bytes as u64;
                    buffers.run(device, group, || rng.below(places) * group.bytes as u64)?;
                    Ok(group.depth as u64)
                })?;
                all[policy].windows.push(window);
            }
            for series in &mut others {
                interrupt::check()?;
                let engine = series.target.trim_start_matches("fio-");
                let window = fio_window(&file.paths[0], engine, group, options.time)?;
                series.windows.push(window);
            }
        }
        let rows = all.iter().chain(&others);
        found
            .rows
            .extend(rows.map(|series| series.row("transfers/s")));
    }
    Ok(found)
}

/// What fio does in that time. Its latencies are those of its own histogram, of a few points.
fn fio_window(path: &Path, engine: &str, group: Group, time: Duration) -> Result<Window, Error> {
    let (rw, sync) = match group.write {
        None => ("randread", "0"),
        Some(_) => ("randwrite", "dsync"),
    };
    let output = Command::new("fio")
        .args([
            "--name=reap",
            "--direct=1",
            "--output-format=json",
            "--time_based",
        ])
        .args([format!("--filename={}", path.display())])
        .args([format!("--ioengine={engine}"), format!("--rw={rw}")])
        .args([format!("--bs={}", group.bytes), format!("--size={BYTES}")])
        .args([
            format!("--iodepth={}", group.depth),
            format!("--sync={sync}"),
        ])
        .args([format!("--iodepth_batch={}", group.depth)])
        .args([format!("--iodepth_batch_complete_min={}", group.depth)])
        .args([format!("--runtime={}ms", time.as_millis().max(1))])
        .stdin(Stdio::null())
        .output();
    let output = output.map_err(|e| Error::io(Path::new("fio"), e))?;
    let said: Value = serde_json::from_slice(&output.stdout)
        .map_err(|e| Error::Unable(format!("fio says what is not understood: {e}")))?;
    let job = &said["jobs"][0];
    let side = &job[if group.write.is_none() {
        "read"
    } else {
        "write"
    }];
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let seconds = number(&side["runtime"]) / 1e3;
    let mut times = super::histogram();
    let points = &side["clat_ns"]["percentile"];
    for (key, count) in [("50.000000", 90), ("99.000000", 9), ("99.900000", 1)] {
        let ns = number(&points[key]) as u64;
        times.saturating_record_n(ns.max(1), count);
    }
    let cpu = number(&job["usr_cpu"]) + number(&job["sys_cpu"]);
    Ok(Window {
        transfers: number(&side["total_ios"]) as u64,
        seconds: seconds.max(1e-3),
        cpu: cpu / 100.0 * seconds,
        machine: None,
        times,
        reaped: None,
    })
}

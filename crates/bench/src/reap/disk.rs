//! The policies on a file or a device of the machine, and `fio` beside them where it is installed.
//!
//! Three of this process, one for each policy, share it, two more where it has queues that are polled, and fio opens it again. What is there already is read only, unless its owner has
//! said that it may be overwritten: then it is claimed until the end, and one that holds something known is refused.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use base::rng::Rng;
use device::{BlockDevice, Durability, OpenOptions, ReapRing, Reaping};
use serde_json::Value;

use super::{BYTES_MAX, Buffers, Findings, Group, Options, Series, Window, measure};
use crate::target::{Place, Remedies, Storage, claim_unused, program_exists};
use crate::{Error, interrupt};

/// Size of the file.
const BYTES: u64 = 256 << 20;

const DURABLE: Group = write(Durability::Durable);

const fn write(durability: Durability) -> Group {
    Group {
        bytes: 4096,
        depth: 1,
        write: Some(durability),
    }
}

/// What is measured.
struct Subject {
    /// What rows call it.
    name: &'static str,
    path: PathBuf,
    read_only: bool,
    groups: Vec<Group>,
}

/// On a new file in a folder.
pub(super) fn run(options: &Options, progress: &dyn Fn(&str)) -> Result<Findings, Error> {
    let dir = options.dir.clone().unwrap_or_default();
    let place = Place::new(&Storage::Dir(dir), BYTES, false, Remedies::less(""))?;
    let file = place.written(1)?;
    let subject = Subject {
        name: "file",
        path: file.paths[0].clone(),
        read_only: false,
        groups: vec![
            Group::reads(4096, 1),
            Group::reads(4096, 8),
            Group::reads(4096, 32),
            Group::reads(128 << 10, 1),
            Group::reads(1 << 20, 1),
            DURABLE,
        ],
    };
    sides(&subject, options, progress)
}

/// On a device, or a file, that is there already.
pub(super) fn given(options: &Options, progress: &dyn Fn(&str)) -> Result<Findings, Error> {
    let path = options.device.clone().unwrap_or_default();
    let claim = match options.overwrite {
        true => Some(claim_unused(std::slice::from_ref(&path))?),
        false => None,
    };
    let depths = options.depths.iter();
    let mut groups: Vec<Group> = depths.map(|&depth| Group::reads(4096, depth)).collect();
    if claim.is_some() {
        groups.extend([write(Durability::Volatile), DURABLE]);
    }
    let subject = Subject {
        name: "device",
        path,
        read_only: claim.is_none(),
        groups,
    };
    sides(&subject, options, progress)
}

/// Policies, and the rings on which they have what they wait for.
const WAYS: [(Reaping, ReapRing); 5] = [
    (Reaping::Interrupt, ReapRing::Ordinary),
    (Reaping::Poll, ReapRing::Ordinary),
    (Reaping::Lazy, ReapRing::Ordinary),
    (Reaping::Poll, ReapRing::Iopoll),
    (Reaping::Lazy, ReapRing::Iopoll),
];

/// One of this process.
struct Way {
    target: String,
    device: Arc<dyn BlockDevice>,
}

impl Way {
    fn new(
        subject: &Subject,
        (reap, reap_ring): (Reaping, ReapRing),
    ) -> Result<Option<Way>, Error> {
        let iopoll = reap_ring == ReapRing::Iopoll;
        if iopoll && !device::has_poll_queues(&subject.path) {
            return Ok(None);
        }
        let device = open(subject, reap, reap_ring)?;
        let suffix = if iopoll { "-iopoll" } else { "" };
        let target = format!("{}{suffix}", reap.name());
        Ok((device.info().polled == iopoll).then_some(Way { target, device }))
    }
}

fn open(
    subject: &Subject,
    reap: Reaping,
    reap_ring: ReapRing,
) -> Result<Arc<dyn BlockDevice>, Error> {
    let options = OpenOptions {
        read_only: subject.read_only,
        exclusive: false,
        reap,
        reap_ring,
        ..OpenOptions::default()
    };
    let mut devices = device::open_devices(std::slice::from_ref(&subject.path), &options)?;
    devices
        .pop()
        .ok_or_else(|| Error::Unable("no device was opened".to_owned()))
}

fn sides(subject: &Subject, options: &Options, progress: &dyn Fn(&str)) -> Result<Findings, Error> {
    let mut found = Findings::default();
    let fio = program_exists("fio");
    if !fio {
        found
            .notes
            .push("fio is not installed, and not beside".to_owned());
    }
    let ways = WAYS.into_iter().map(|way| Way::new(subject, way));
    let ways: Vec<Option<Way>> = ways.collect::<Result<_, _>>()?;
    let ways: Vec<Way> = ways.into_iter().flatten().collect();
    let bytes = ways.first().map_or(0, |way| way.device.bytes());
    let largest = subject.groups.iter().map(|group| group.bytes).max();
    if bytes < largest.unwrap_or(0) as u64 {
        return Err(Error::Usage(format!(
            "{} is too small",
            subject.path.display()
        )));
    }
    let depth = subject.groups.iter().map(|group| group.depth).max();
    let mut buffers = Buffers::new(BYTES_MAX, depth.unwrap_or(1));
    let mut rng = Rng::new(1);
    for &group in &subject.groups {
        let name = format!("{}, {}", subject.name, group.name());
        let mut all: Vec<Series> = ways
            .iter()
            .map(|way| Series::of(&name, way.target.clone()))
            .collect();
        let mut others: Vec<(Engine, Series)> = Engine::ALL
            .into_iter()
            .filter(|engine| fio && engine.does(subject, group))
            .map(|engine| (engine, engine.series(&name)))
            .collect();
        for run in 0..options.runs {
            progress(&format!("{name}, run {}", run + 1));
            // Each is first in its turn.
            for at in (0..ways.len()).map(|at| (at + run) % ways.len()) {
                interrupt::check()?;
                let window = measure(ways[at].device.as_ref(), options.time, |device| {
                    let places = bytes / group.bytes as u64;
                    buffers.run(device, group, || rng.below(places) * group.bytes as u64)?;
                    Ok(group.depth as u64)
                })?;
                all[at].windows.push(window);
            }
            for (engine, series) in &mut others {
                interrupt::check()?;
                let window = engine.window(subject, group, bytes, options.time)?;
                series.windows.push(window);
            }
        }
        let rows = all.iter().chain(others.iter().map(|(_, series)| series));
        found
            .rows
            .extend(rows.map(|series| series.row("transfers/s")));
    }
    Ok(found)
}

/// How fio reaches it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Engine {
    Psync,
    Uring,
    /// By a ring that polls the device.
    Hipri,
}

impl Engine {
    const ALL: [Engine; 3] = [Engine::Psync, Engine::Uring, Engine::Hipri];

    fn target(self) -> &'static str {
        match self {
            Engine::Psync => "fio-psync",
            Engine::Uring => "fio-io_uring",
            Engine::Hipri => "fio-io_uring-hipri",
        }
    }

    fn series(self, name: &str) -> Series {
        Series::of(name, self.target().to_owned())
    }

    fn does(self, subject: &Subject, group: Group) -> bool {
        match self {
            Engine::Psync => group.depth == 1,
            Engine::Uring => true,
            // What is durable is flushed, which is no transfer.
            Engine::Hipri => {
                group.write != Some(Durability::Durable) && device::has_poll_queues(&subject.path)
            }
        }
    }

    /// What fio does in that time. Its latencies are those of its own histogram, of each transfer.
    fn window(
        self,
        subject: &Subject,
        group: Group,
        bytes: u64,
        time: Duration,
    ) -> Result<Window, Error> {
        let depth = group.depth;
        let mut fio = Command::new("fio");
        fio.args(["--name=reap", "--direct=1", "--output-format=json+"])
            // A job that leaves the caches alone, and whose CPU time is that of one thread.
            .args(["--time_based", "--thread", "--invalidate=0"])
            .args(["--norandommap", "--lat_percentiles=1"])
            .arg(format!("--filename={}", subject.path.display()))
            .args([format!("--bs={}", group.bytes), format!("--size={bytes}")])
            .args([
                format!("--iodepth={depth}"),
                format!("--iodepth_batch={depth}"),
            ])
            .arg(format!("--iodepth_batch_complete_min={depth}"))
            .arg(format!("--runtime={}ms", time.as_millis().max(1)));
        fio.arg(match self {
            Engine::Psync => "--ioengine=psync",
            Engine::Uring | Engine::Hipri => "--ioengine=io_uring",
        });
        if self == Engine::Hipri {
            fio.arg("--hipri");
        }
        match group.write {
            None => fio.args(["--rw=randread", "--readonly"]),
            Some(Durability::Durable) => fio.args(["--rw=randwrite", "--sync=dsync"]),
            Some(_) => fio.arg("--rw=randwrite"),
        };
        let output = fio.stdin(Stdio::null()).output();
        let output = output.map_err(|e| Error::io(Path::new("fio"), e))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(Error::Unable(format!("fio fails: {}", said.trim())));
        }
        let said: Value = serde_json::from_slice(&output.stdout)
            .map_err(|e| Error::Unable(format!("fio says what is not understood: {e}")))?;
        told(&said["jobs"][0], group)
    }
}

/// A window of what fio says of its job. A sample is a transfer, as fio has timed it.
fn told(job: &Value, group: Group) -> Result<Window, Error> {
    let side = match group.write {
        None => &job["read"],
        Some(_) => &job["write"],
    };
    let missing = |what: &str| Error::Unable(format!("fio does not say {what}"));
    let number = |of: &Value, key: &str| of[key].as_f64().ok_or_else(|| missing(key));
    let seconds = number(side, "runtime")? / 1e3;
    let mut times = super::histogram();
    let bins = side["lat_ns"]["bins"].as_object();
    for (ns, count) in bins.ok_or_else(|| missing("bins"))? {
        let bin = ns.parse::<u64>().ok().zip(count.as_u64());
        let (ns, count) = bin.ok_or_else(|| missing("bins"))?;
        times.saturating_record_n(ns.max(1), count);
    }
    let cpu = number(job, "usr_cpu")? + number(job, "sys_cpu")?;
    Ok(Window {
        transfers: number(side, "total_ios")? as u64,
        seconds: seconds.max(1e-3),
        cpu: cpu / 100.0 * seconds,
        machine: None,
        times,
        reaped: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// As fio 3.33 has it, of `count` transfers; the slowest hundredth take 3.9 µs and more.
    fn job(count: u64) -> Value {
        let slow = count / 100;
        let slowest = slow / 10;
        json!({
            "read": {"total_ios": 0, "runtime": 0, "lat_ns": {"N": 0}},
            "write": {
                "total_ios": count, "runtime": 220,
                "lat_ns": {"N": count, "bins": {
                    "502": count - slow, "3920": slow - slowest, "8640": slowest,
                }},
            },
            "usr_cpu": 6.4, "sys_cpu": 10.0,
        })
    }

    fn row(windows: &[Value]) -> crate::contract::Row {
        let mut series = Engine::Psync.series("file");
        for job in windows {
            series.windows.push(told(job, DURABLE).unwrap());
        }
        series.row("transfers/s")
    }

    /// All windows had a hundred samples, of three points, which is too few for the 99th percentile.
    #[test]
    fn latencies_of_fio_are_those_of_all_its_transfers() {
        let row = row(&[job(40_000), job(20_000)]);
        let extra = |key: &str| row.extra[key].as_f64().unwrap();
        assert_eq!(extra("samples"), 60_000.0);
        assert!((extra("p50_us") - 0.5).abs() < 0.01, "{row:?}");
        // Of the whole windows a hundredth is slow, and that begins behind the 99th percentile.
        assert!((extra("p99_us") - 0.5).abs() < 0.01, "{row:?}");
        assert!((extra("p999_us") - 3.92).abs() < 0.01, "{row:?}");
        assert_eq!(row.max, 40_000.0 / 0.22);
        assert!((extra("cpu_percent") - 16.4).abs() < 0.01, "{row:?}");
    }

    #[test]
    fn few_transfers_of_fio_are_few_samples() {
        let row = row(&[job(900)]);
        assert_eq!(row.extra["samples"], 900.0);
        assert!(row.extra.contains_key("p50_us") && !row.extra.contains_key("p99_us"));
    }

    #[test]
    fn what_fio_does_not_say_is_an_error() {
        let whole = job(1000);
        for key in ["total_ios", "runtime", "lat_ns"] {
            let mut job = whole.clone();
            job["write"].as_object_mut().unwrap().remove(key);
            assert!(matches!(told(&job, DURABLE), Err(Error::Unable(_))));
        }
        assert!(matches!(told(&json!({}), DURABLE), Err(Error::Unable(_))));
        // It did nothing of that kind.
        assert!(told(&whole, Group::reads(4096, 1)).is_err());
    }
}

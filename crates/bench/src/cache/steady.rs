//! Overwrites of pages at random places of a file that is four times as large as the cache, for so long that the cache is full of dirty
//! pages before they are counted: each needs a frame that somebody has cleaned.
//!
//! 1. The devices are four of this process, which take a set time for each request and serve a few at a time; the data lies in memory
//!    or in the folder that is given, whatever the other parts are on. In the second case one of them does nothing in the first half of each period.
//! 2. Sides in turn, each on a fresh file system: through the cache with pre-cleaning, through the cache without, and past the cache with
//!    several writes of each thread in flight. All write pages drawn in the same way, as many threads each.
//! 3. What is counted is writes that have returned, or ended, in the window, without a sync after it: it is the same before and after.

use std::sync::Arc;
use std::time::Duration;

use base::clock::process_cpu_ns;
use base::rng::Rng;
use device::{Latency, Stall};
use fs::{FsOptions, OpenFile};
use serde_json::{Map, Value};

use super::{Options, PIECE};
use crate::contract::{Check, Comparison, Row, Spread};
use crate::meter::Meter;
use crate::page::{PAGE, Page};
use crate::runner::{self, Load, Measured, Operation, Stop, Window};
use crate::target::{
    Arrangement, InProcess, Place, Remedies, Side, Slow, Storage, Transfer, keep_busy,
};
use crate::{Error, interrupt};

const DEVICES: u64 = 4;
const SERVICE: Duration = Duration::from_millis(1);
/// Requests that a device serves at a time.
const SERVED: usize = 8;
const PERIOD: Duration = Duration::from_millis(100);
const THREADS: usize = 2;
/// Writes of a thread in flight, past the cache.
const IN_FLIGHT: usize = 32;
/// Sizes of the file, in caches.
const CACHES: u64 = 4;
/// For all that Sheaf takes, at most.
const MEMORY: usize = 128 << 20;
/// Windows that go before the one that counts.
const WARM: u32 = 4;

const DIRECT_BAR: f64 = 0.9;
const STALLED_BAR: f64 = 1.6;

const ALL: &str = "overwrite at random, steady";
const STALLED: &str = "overwrite at random, a device stalled half of the time";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Cached { pre_clean: bool },
    InFlight,
}

const SIDES: [Who; 3] = [
    Who::Cached { pre_clean: true },
    Who::Cached { pre_clean: false },
    Who::InFlight,
];

impl Who {
    fn name(self) -> &'static str {
        match self {
            Who::Cached { pre_clean: true } => "sheaf",
            Who::Cached { pre_clean: false } => "sheaf-without-pre-cleaning",
            Who::InFlight => "sheaf-aio",
        }
    }
}

struct Series {
    name: &'static str,
    who: Who,
    windows: Vec<Measured>,
    /// Pages that were cleaned for each write that took, and waits for room for each overwrite.
    cleaned: Vec<[f64; 2]>,
}

pub fn note() -> String {
    format!(
        "steady: {DEVICES} devices of this process that take {} µs for each request and serve {SERVED} at a time; one of them does nothing \
         for the first half of each {} ms where it says so; {THREADS} threads, {IN_FLIGHT} writes in flight each past the cache",
        SERVICE.as_micros(),
        PERIOD.as_millis()
    )
}

fn memory(options: &Options) -> usize {
    options.memory.min(MEMORY)
}

fn file_bytes(options: &Options) -> u64 {
    let room = FsOptions::default().with_memory(memory(options));
    let bytes = CACHES * room.data.cache_bytes as u64;
    bytes.next_multiple_of(PIECE as u64)
}

/// Where the data of devices of this process lies: none of it on devices that are given, or below a loop device.
fn below(storage: &Storage) -> Storage {
    match storage {
        Storage::Dir(dir) | Storage::Loop(Some(dir)) | Storage::Loops(Some(dir), _) => {
            Storage::Dir(dir.clone())
        }
        Storage::Memory | Storage::Loop(None) | Storage::Loops(None, _) | Storage::Devices(_) => {
            Storage::Memory
        }
    }
}

/// Both cases on all sides, taking turns.
pub fn rows(options: &Options, progress: &dyn Fn(&str)) -> Result<Vec<Row>, Error> {
    let mut all = Vec::new();
    for name in [ALL, STALLED] {
        all.extend(SIDES.map(|who| Series {
            name,
            who,
            windows: Vec::new(),
            cleaned: Vec::new(),
        }));
    }
    let place = Place::new(
        &below(&options.storage),
        2 * file_bytes(options) + (1 << 29),
        false,
        Remedies::less("--cache-size").without_root("--against none"),
    )?;
    let meter = Meter::new(&[])?;
    for run in 1..=options.runs {
        for series in &mut all {
            interrupt::check()?;
            let (name, who) = (series.name, series.who.name());
            progress(&format!("{name}, {who}, run {run} of {}", options.runs));
            let done = turn(options, &place, &meter, series);
            done.map_err(|error| error.on("cache", who))?;
        }
    }
    Ok(all.iter().map(row).collect())
}

fn turn(options: &Options, place: &Place, meter: &Meter, series: &mut Series) -> Result<(), Error> {
    let devices = place.images(DEVICES, "steady")?;
    let mut slow = Slow::new(Latency {
        service: SERVICE,
        flush: SERVICE,
        depth: SERVED,
    });
    slow.stall = (series.name == STALLED).then_some(Stall {
        period: PERIOD,
        stalled: PERIOD / 2,
    });
    let arrangement = Arrangement {
        slow: Some(slow),
        ..Arrangement::default()
    };
    let mut settings = FsOptions::default().with_memory(memory(options));
    settings.data.pre_clean = series.who != Who::Cached { pre_clean: false };
    let side = InProcess::arranged(&devices.paths, settings, &arrangement)?;
    let bytes = file_bytes(options);
    let made = side.create(&side.root(), "steady")?;
    let piece = vec![7; PIECE];
    for offset in (0..bytes).step_by(PIECE) {
        interrupt::check()?;
        side.write(&made, offset, &piece)?;
    }
    side.sync()?;
    side.settle()?;
    let flags = match series.who {
        Who::InFlight => libc::O_DIRECT,
        Who::Cached { .. } => 0,
    };
    let file = side.open_with(&side.root(), "steady", flags)?;
    let load = Overwrites {
        side: &side,
        file: &file,
        who: series.who,
        pages: bytes / PAGE as u64,
    };
    let window = |time| Window {
        time,
        threads: THREADS,
        operations: u64::MAX,
        cpus: Vec::new(),
    };
    runner::measure(&window(options.time * WARM), &load, meter)?;
    let before = side.cleaning();
    let measured = runner::measure(&window(options.time), &load, meter)?;
    let after = side.cleaning();
    let [cleaned, writes, waits] = [0, 1, 2].map(|i| (after[i] - before[i]) as f64);
    let each = measured.operations.max(1) as f64;
    series
        .cleaned
        .push([cleaned / writes.max(1.0), waits / each]);
    series.windows.push(measured);
    drop((made, file));
    side.close()
}

struct Overwrites<'a> {
    side: &'a InProcess,
    file: &'a Arc<OpenFile>,
    who: Who,
    pages: u64,
}

impl Load for Overwrites<'_> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let mut rng = Rng::new(thread as u64 + 1);
        let pages = self.pages;
        let mut next = move || rng.below(pages) * PAGE as u64;
        if self.who == Who::InFlight {
            let queue = self
                .side
                .queue(vec![Arc::clone(self.file)], IN_FLIGHT, PAGE)?;
            let next = move |slot| {
                Some(Transfer {
                    slot,
                    file: 0,
                    offset: next(),
                    bytes: PAGE,
                    write: true,
                })
            };
            return Ok(keep_busy(Box::new(queue), IN_FLIGHT, false, next));
        }
        let page = Page::of(thread as u8 + 1);
        Ok(Box::new(move || {
            self.side.write(self.file, next(), &page.0)?;
            Ok(1)
        }))
    }

    /// The state is what it was before.
    fn settle(&self) -> Result<(), Error> {
        Ok(())
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }
}

fn row(series: &Series) -> Row {
    let rates: Vec<f64> = series.windows.iter().map(Measured::rate).collect();
    let Spread { median, min, max } = Spread::of(rates.iter().copied());
    let mut extra = Map::new();
    let cpu = Spread::of(series.windows.iter().map(Measured::cpu_us));
    extra.insert("cpu_us_per_op".to_owned(), Value::from(cpu.median));
    for (i, key) in ["pages_per_cleaning_write", "waits_per_op"]
        .into_iter()
        .enumerate()
    {
        let of = Spread::of(series.cleaned.iter().map(|cleaned| cleaned[i]));
        extra.insert(key.to_owned(), Value::from(of.median));
    }
    Row::note_rates(&mut extra, rates.iter().copied());
    Measured::put_seconds(&mut extra, &series.windows);
    Row {
        name: series.name.to_owned(),
        target: series.who.name().to_owned(),
        threads: THREADS,
        unit: "ops/s",
        median,
        min,
        max,
        runs: series.windows.len(),
        extra,
    }
}

pub fn checks(rows: &[Row]) -> Vec<Check> {
    let [on, off, aio] = SIDES.map(Who::name);
    let find = |name: &str, target: &str| {
        let mut rows = rows.iter();
        rows.find(|row| row.name == name && row.target == target)
    };
    let check = |name: &str, theirs: &str, bar| {
        let (own, other) = (find(name, on)?, find(name, theirs)?);
        let what = format!("{name}, {on} vs {theirs}");
        Some(Check::new(
            what,
            own.quotients(other),
            Comparison::AtLeast,
            bar,
        ))
    };
    let all = [
        check(ALL, aio, DIRECT_BAR),
        check(STALLED, off, STALLED_BAR),
    ];
    all.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::super::Part;
    use super::*;

    /// With --device the files lay in the temporary folder, where nobody had looked for room.
    #[test]
    fn data_lies_in_memory_or_in_the_folder() {
        let dir = || "/dir".into();
        for (given, wanted) in [
            (Storage::Memory, Storage::Memory),
            (Storage::Devices(vec!["/dev/sdx".into()]), Storage::Memory),
            (Storage::Loop(None), Storage::Memory),
            (Storage::Dir(dir()), Storage::Dir(dir())),
            (Storage::Loop(Some(dir())), Storage::Dir(dir())),
        ] {
            assert_eq!(below(&given), wanted);
        }
    }

    #[test]
    fn all_sides_overwrite_in_both_cases() {
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            parts: vec![Part::Steady],
            pages: 512,
            set: 1 << 20,
            threads: vec![1],
            time: Duration::from_millis(20),
            warm_up: Duration::ZERO,
            runs: 1,
            against: Vec::new(),
            storage: Storage::Dir(home.path().to_owned()),
            memory: 32 << 20,
        };
        let report = super::super::run(&options, &|_| {}).unwrap();
        assert_eq!(report.rows.len(), 2 * SIDES.len());
        assert!(
            report
                .rows
                .iter()
                .all(|row| row.median > 0.0 && row.runs == 1)
        );
        let names: Vec<&str> = report
            .checks
            .iter()
            .map(|check| check.name.as_str())
            .collect();
        assert_eq!(names.len(), 2);
        assert!(
            names[0].ends_with("steady, sheaf vs sheaf-aio"),
            "{names:?}"
        );
        let waits = |row: &Row| row.extra["waits_per_op"].as_f64().unwrap();
        assert_eq!(waits(&report.rows[1]), 0.0, "nobody cleans");
    }
}

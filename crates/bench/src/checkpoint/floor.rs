//! What slow devices would take for the bytes that Sheaf wrote to them in a run, and nothing else: its floor.
//!
//! As many bytes are written one after the other to all devices in turn, in requests of 128 KiB of which each device has as many in
//! flight as it serves, by as many threads as make files, each with a heap of ends ([`SlowQueue`]). Nothing is flushed. Each request is
//! copied into memory below when it starts, as those of Sheaf are; that may well take longer than the time that is set.

use std::sync::Arc;
use std::time::Duration;

use base::clock::{Clock, process_cpu_ns};
use device::{AlignedBuf, BlockDevice, Durability, OpenOptions};
use serde_json::{Map, Value};

use super::{NEVER, Options, SLOW};
use crate::contract::{Row, Spread};
use crate::meter::Meter;
use crate::runner::{self, Load, Measured, Operation, Stop, Window};
use crate::target::{Place, SlowQueue, Transfer, keep_busy};
use crate::{Error, interrupt};

/// What a slow device takes its time for once.
const REQUEST: u64 = 128 << 10;

/// Of one run of Sheaf.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floor {
    /// Operations in a second, if nothing took longer.
    pub rate: f64,
    /// Of an operation.
    pub bytes: f64,
}

/// Writes as much as Sheaf did in `run`, on devices like its own.
pub(super) fn measure(options: &Options, place: &Place, run: &Measured) -> Result<Floor, Error> {
    let bytes = run.synced.written_bytes.unwrap_or(0);
    let images = place.images(options.devices as u64, "device")?;
    let devices = device::open_devices(&images.paths, &OpenOptions::default())?;
    let count = devices.len() as u64;
    let load = Writes {
        devices,
        service: options.latency.service,
        threads: options.threads as u64,
        slots: (options.latency.depth * options.devices / options.threads).max(1),
        requests: bytes.div_ceil(REQUEST),
        // Over and over: what is written for the first time has to be allocated below.
        places: (options.journal / count / REQUEST).max(1),
    };
    load.fill()?;
    let window = Window {
        time: NEVER,
        threads: options.threads,
        operations: u64::MAX,
        cpus: Vec::new(),
    };
    let written = runner::measure(&window, &load, &Meter::new(&[])?)?;
    // The first thread that has written its part ends the window.
    let share = load.requests as f64 / written.operations.max(1) as f64;
    let operations = run.operations.max(1) as f64;
    Ok(Floor {
        rate: operations / (written.seconds * share).max(1e-9),
        bytes: bytes as f64 / operations,
    })
}

struct Writes {
    devices: Vec<Arc<dyn BlockDevice>>,
    service: Duration,
    threads: u64,
    /// Requests of a thread in flight.
    slots: usize,
    /// In all.
    requests: u64,
    /// Requests that the part of a device holds that is written.
    places: u64,
}

impl Writes {
    fn fill(&self) -> Result<(), Error> {
        let piece = AlignedBuf::zeroed(REQUEST as usize);
        for device in &self.devices {
            for place in 0..self.places {
                interrupt::check()?;
                let written = device.write(place * REQUEST, &piece, Durability::Volatile);
                written.map_err(|e| Error::io(device.name().as_ref(), e))?;
            }
        }
        Ok(())
    }
}

impl Load for Writes {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let (clock, bytes) = (Clock::real(), REQUEST as usize);
        let queue = SlowQueue::new(self.devices.clone(), self.service, clock, self.slots, bytes);
        let count = self.devices.len() as u64;
        let mut numbers = (thread as u64..self.requests).step_by(self.threads as usize);
        let next = move |slot| {
            let number = numbers.next()?;
            Some(Transfer {
                slot,
                file: (number % count) as usize,
                offset: number / count % self.places * REQUEST,
                bytes,
                write: true,
            })
        };
        Ok(keep_busy(Box::new(queue), self.slots, false, next))
    }

    fn settle(&self) -> Result<(), Error> {
        Ok(())
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }
}

/// The floor of a row of Sheaf's.
pub(super) fn row(options: &Options, workers: usize, floors: &[Floor]) -> Row {
    let Spread { median, min, max } = Spread::of(floors.iter().map(|floor| floor.rate));
    let bytes = Spread::of(floors.iter().map(|floor| floor.bytes)).median;
    let in_flight = options.latency.depth * options.devices;
    let mut extra = Map::new();
    extra.insert("floor".to_owned(), Value::from(true));
    extra.insert("workers".to_owned(), Value::from(workers));
    extra.insert("in_flight".to_owned(), Value::from(in_flight));
    extra.insert("request_bytes".to_owned(), Value::from(REQUEST));
    extra.insert("written_bytes_per_op".to_owned(), Value::from(bytes));
    Row::note_rates(&mut extra, floors.iter().map(|floor| floor.rate));
    Row {
        // By itself: in one plot with the others nothing else could be seen.
        name: format!("{SLOW}, their bytes alone"),
        target: "raw-queue".to_owned(),
        threads: options.threads,
        unit: "ops/s",
        median,
        min,
        max,
        runs: floors.len(),
        extra,
    }
}

/// What these rows are.
pub(super) fn note(options: &Options) -> String {
    format!(
        "the floor, raw-queue, is the bytes that Sheaf wrote to the devices in the same turn, written one after the other in requests of \
         {} KiB, {} in flight on each device, without flushes, as operations a second that this would allow; copies into memory are in \
         it, as in Sheaf's",
        REQUEST >> 10,
        options.latency.depth
    )
}

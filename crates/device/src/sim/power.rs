//! The power of several devices, cut at one moment.

use super::faults::Times;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Cuts the power of all devices that share it, after a number of operations.
#[derive(Debug)]
pub struct PowerSwitch {
    operations: AtomicU64,
    /// Operations that still happen; the one after is caught by the cut.
    cut_after: AtomicU64,
    off: AtomicBool,
    /// Operations that work; those after them fail, this many.
    fail_after: AtomicU64,
    failures: AtomicU64,
}

/// What an operation meets at the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Power {
    On,
    /// There is power, but this operation is one of those that fail.
    Failing,
    /// The power goes while this operation is in flight.
    Going,
    Off,
}

impl PowerSwitch {
    pub fn new() -> Arc<PowerSwitch> {
        Arc::new(PowerSwitch {
            operations: AtomicU64::new(0),
            cut_after: AtomicU64::new(u64::MAX),
            off: AtomicBool::new(false),
            fail_after: AtomicU64::new(u64::MAX),
            failures: AtomicU64::new(0),
        })
    }

    /// Operations started since the start or the last [`restore`](Self::restore).
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Acquire)
    }

    /// Lets `count` more operations complete; the next one is caught in flight, together with
    /// what is left of its batch, and the power is off from then on.
    pub fn cut_after(&self, count: u64) {
        let now = self.operations();
        self.cut_after
            .store(now.saturating_add(count), Ordering::Release);
    }

    /// Lets `count` more operations work; those after them fail with an I/O error on whichever
    /// device they meet, as often as `times` says.
    pub fn fail_after(&self, count: u64, times: Times) {
        let failures = match times {
            Times::Next(failures) => failures,
            Times::Always => u64::MAX,
        };
        self.failures.store(failures, Ordering::Release);
        let now = self.operations();
        self.fail_after
            .store(now.saturating_add(count), Ordering::Release);
    }

    /// Cuts the power between two operations.
    pub fn cut_now(&self) {
        self.off.store(true, Ordering::Release);
    }

    pub fn is_cut(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }

    /// Turns the power on again, counting from 0 and with no cut and no failure ahead.
    pub fn restore(&self) {
        self.fail_after.store(u64::MAX, Ordering::Release);
        self.cut_after.store(u64::MAX, Ordering::Release);
        self.operations.store(0, Ordering::Release);
        self.off.store(false, Ordering::Release);
    }

    pub(super) fn meet(&self) -> Power {
        if self.is_cut() {
            return caught_with_its_batch();
        }
        let number = self.operations.fetch_add(1, Ordering::AcqRel);
        let cut = self.cut_after.load(Ordering::Acquire);
        if number < cut {
            return match self.fails(number) {
                true => Power::Failing,
                false => Power::On,
            };
        }
        self.cut_now();
        if number == cut {
            BATCH.set(Batch {
                caught: true,
                ..BATCH.get()
            });
            Power::Going
        } else {
            caught_with_its_batch()
        }
    }
}

impl PowerSwitch {
    fn fails(&self, number: u64) -> bool {
        let first = self.fail_after.load(Ordering::Acquire);
        let failures = self.failures.load(Ordering::Acquire);
        number >= first && number - first < failures
    }
}

/// The batch that the calling thread has started, on one device or on several.
#[derive(Clone, Copy)]
struct Batch {
    /// Devices that are at it, one inside the other.
    devices: u32,
    /// The power went while it was in flight.
    caught: bool,
}

thread_local! {
    static BATCH: Cell<Batch> = const { Cell::new(Batch { devices: 0, caught: false }) };
}

/// All requests of a batch are under way at once, so the cut that catches one of them catches
/// those that have not completed as well.
fn caught_with_its_batch() -> Power {
    match BATCH.get().caught {
        true => Power::Going,
        false => Power::Off,
    }
}

/// A device's part in the calling thread's batch, until it is dropped.
pub(super) struct InBatch;

impl InBatch {
    pub fn enter() -> InBatch {
        let batch = BATCH.get();
        BATCH.set(Batch {
            devices: batch.devices + 1,
            ..batch
        });
        InBatch
    }
}

impl Drop for InBatch {
    fn drop(&mut self) {
        let batch = BATCH.get();
        let devices = batch.devices - 1;
        BATCH.set(Batch {
            devices,
            caught: batch.caught && devices > 0,
        });
    }
}

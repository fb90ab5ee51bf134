//! The open epoch, and the operations that are pinned in it. Checked by `model/`.
//!
//! Invariants:
//! 1. Once `close` has returned epoch e and `wait` for e has returned, on every shard's pins, no
//!    pin of e is held and none will be; and what their holders did before they let go is seen.
//! 2. Two counts suffice: epoch e+1 is closed only after `wait` for e has returned, so at most the
//!    open epoch and the one before it are pinned.

use base::atomic::{AtomicU32, AtomicU64, Ordering};

/// The open epoch.
#[derive(Debug)]
pub(crate) struct OpenEpoch(AtomicU64);

/// Pins of one shard: of the even and of the odd epoch.
#[derive(Debug)]
pub(crate) struct Pins([AtomicU32; 2]);

/// Keeps an epoch from being gathered until it is dropped.
#[derive(Debug)]
pub(crate) struct EpochPin<'a> {
    pins: &'a Pins,
    pub epoch: u64,
}

impl OpenEpoch {
    pub fn new(epoch: u64) -> OpenEpoch {
        OpenEpoch(AtomicU64::new(epoch))
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Pins the open epoch.
    pub fn pin<'a>(&self, pins: &'a Pins) -> EpochPin<'a> {
        loop {
            let epoch = self.0.load(Ordering::SeqCst);
            base::sched::point();
            // SeqCst, as in `close` and `wait`: either the second look sees that the epoch was
            // closed, or whoever closed it sees this pin.
            pins.of(epoch).fetch_add(1, Ordering::SeqCst);
            base::sched::point();
            let pin = EpochPin { pins, epoch };
            if self.0.load(Ordering::SeqCst) == epoch {
                return pin;
            }
        }
    }

    /// Opens the next epoch and returns the one that was open. One caller at a time.
    pub fn close(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

impl Pins {
    pub fn new() -> Pins {
        Pins([AtomicU32::new(0), AtomicU32::new(0)])
    }

    fn of(&self, epoch: u64) -> &AtomicU32 {
        &self.0[(epoch % 2) as usize]
    }

    /// Waits until nobody is pinned in an epoch that was closed: microseconds.
    pub fn wait(&self, epoch: u64) {
        let mut spins = 0;
        while self.of(epoch).load(Ordering::SeqCst) != 0 {
            base::thread::spin(&mut spins);
        }
    }
}

impl Drop for EpochPin<'_> {
    fn drop(&mut self) {
        // Release: `wait` sees what was done under the pin.
        self.pins.of(self.epoch).fetch_sub(1, Ordering::Release);
    }
}

//! Devices of this process alone that take a set time for each request, and count what is written to them: in the
//! place of a block device's account, which they have not.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::clock::Clock;
use device::{
    Bell, BlockDevice, DeviceQueue, Durability, Latency, LatencyDevice, Operation, Reaped, Reaping,
    Request, Stall,
};

/// How slow devices are, and their account.
#[derive(Clone, Debug)]
pub struct Slow {
    pub latency: Latency,
    /// The first device does nothing now and then.
    pub stall: Option<Stall>,
    /// How threads wait for them.
    pub reap: Reaping,
    pub writes: Arc<Writes>,
}

/// What was written to some devices so far, all together. A write that is durable at once has a flush in it.
#[derive(Debug, Default)]
pub struct Writes {
    bytes: AtomicU64,
    flushes: AtomicU64,
}

impl Writes {
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    fn count(&self, operation: &Operation<'_>) {
        let flushes = match operation {
            Operation::Write { durability, .. } => {
                let bytes = operation.bytes() as u64;
                self.bytes.fetch_add(bytes, Ordering::Relaxed);
                *durability == Durability::Durable
            }
            Operation::Flush => true,
            Operation::Read { .. } => false,
        };
        self.flushes
            .fetch_add(u64::from(flushes), Ordering::Relaxed);
    }
}

impl Slow {
    pub fn new(latency: Latency) -> Slow {
        Slow {
            latency,
            stall: None,
            reap: Reaping::default(),
            writes: Arc::new(Writes::default()),
        }
    }

    /// The same devices, waited for so.
    pub fn reaping(&self, reap: Reaping) -> Slow {
        let same = self.clone();
        Slow { reap, ..same }
    }

    /// Devices made slow, and counted in this account.
    pub fn over_all(&self, below: Vec<Arc<dyn BlockDevice>>) -> Vec<Arc<dyn BlockDevice>> {
        let below = below.into_iter().enumerate();
        below
            .map(|(number, below)| self.over(number, below))
            .collect()
    }

    fn over(&self, number: usize, below: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
        let slow = LatencyDevice::new(below, self.latency, Clock::real()).reaping(self.reap);
        let slow = match self.stall {
            Some(stall) if number == 0 => slow.stalling(stall),
            _ => slow,
        };
        Arc::new(Counted {
            below: Arc::new(slow),
            writes: Arc::clone(&self.writes),
        })
    }
}

struct Counted {
    below: Arc<LatencyDevice>,
    writes: Arc<Writes>,
}

impl BlockDevice for Counted {
    device::described_by!(below);

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        for request in requests.iter() {
            self.writes.count(&request.operation);
        }
        self.below.run(requests, meanwhile);
    }

    /// What is in flight by itself is reads, which nobody counts.
    fn queue(self: Arc<Self>, bell: &Arc<Bell>) -> DeviceQueue {
        Arc::clone(&self.below).queue(bell)
    }

    fn reaped(&self) -> Option<Reaped> {
        self.below.reaped()
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(offset, len)
    }

    fn release_claim(&self) -> io::Result<()> {
        self.below.release_claim()
    }
}

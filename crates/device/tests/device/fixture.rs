//! Arrays for tests.

use base::rng::Rng;
use base::sync::{Mutex, rank};
use device::sim::{PowerSwitch, SimDevice};
use device::{Array, BlockDevice};
use format::geometry::{Geometry, GeometryOptions};
use std::sync::Arc;

/// Held by tests that claim block devices, and by others while they start a child: until that executes its own program it has copies of all
/// descriptors, and what is claimed by one of them cannot be claimed again.
pub static CLAIMS: Mutex<()> = Mutex::new(rank::MOUNT_SESSION, ());

pub const UUID: [u8; 16] = *b"sheaf-test-array";

/// Three devices of different sizes: three zones, the widest over all three.
pub const UNEQUAL: [u64; 3] = [20 << 20, 28 << 20, 44 << 20];

pub fn plan(sizes: &[u64], stripe: u64) -> Geometry {
    let options = GeometryOptions {
        stripe_bytes: Some(stripe),
        journal_align: Some(512),
        ..GeometryOptions::default()
    };
    Geometry::plan(sizes, options).unwrap()
}

pub fn create(devices: Vec<Arc<dyn BlockDevice>>, stripe: u64) -> Array {
    let sizes: Vec<u64> = devices.iter().map(|d| d.bytes()).collect();
    Array::create(devices, plan(&sizes, stripe), "test", UUID, [7; 16]).unwrap()
}

/// Simulated devices on one power switch.
pub struct Sims {
    pub switch: Arc<PowerSwitch>,
    pub devices: Vec<Arc<SimDevice>>,
}

impl Sims {
    pub fn new(sizes: &[u64], seed: u64) -> Sims {
        let switch = PowerSwitch::new();
        let devices = sizes
            .iter()
            .zip(seed..)
            .map(|(&bytes, seed)| SimDevice::on_switch(bytes, seed, &switch))
            .collect();
        Sims { switch, devices }
    }

    pub fn members(&self) -> Vec<Arc<dyn BlockDevice>> {
        let devices = self.devices.iter();
        devices
            .map(|d| Arc::clone(d) as Arc<dyn BlockDevice>)
            .collect()
    }

    pub fn restart(&mut self, rng: &mut Rng) {
        self.switch.restore();
        for device in &mut self.devices {
            *device = device.restart(rng);
        }
    }
}

/// `len` bytes that depend on the seed.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

//! One small array in memory, and a file system on it.

use base::clock::Clock;
use device::sim::{PowerSwitch, SimDevice};
use device::{Array, BlockDevice, Topology};
use format::geometry::{Geometry, GeometryOptions};
use fs::fsck::{FsckOptions, Report};
use fs::{FileSystem, FsOptions, MkfsOptions};
use std::sync::Arc;

/// The simulated machine: devices on one power switch, a clock, and what runs on them.
pub struct World {
    pub devices: Vec<Arc<SimDevice>>,
    pub switch: Arc<PowerSwitch>,
    pub clock: Clock,
    pub options: FsOptions,
    pub topology: Topology,
}

impl World {
    /// A formatted array of `count` devices of `bytes` each.
    pub fn new(count: usize, bytes: u64, seed: u64) -> World {
        let switch = PowerSwitch::new();
        let devices: Vec<_> = (0..count as u64)
            .map(|i| SimDevice::on_switch(bytes, seed.wrapping_mul(31) + i, &switch))
            .collect();
        let clock = Clock::manual(1_700_000_000_000_000_000);
        let options = FsOptions::default().without_threads(clock.clone());
        let world = World {
            devices,
            switch,
            clock,
            options,
            topology: Topology::PerCore,
        };
        let geometry = Geometry::plan(&vec![bytes; count], GeometryOptions::default()).unwrap();
        let array = Array::create(world.dyn_devices(), geometry, "test", [7; 16], [9; 16]).unwrap();
        let array = Arc::new(array);
        let mkfs = MkfsOptions {
            clock: world.clock.clone(),
            ..MkfsOptions::default()
        };
        FileSystem::mkfs(&array, &mkfs).unwrap();
        array.write_labels().unwrap();
        world
    }

    fn dyn_devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        self.devices
            .iter()
            .map(|d| Arc::clone(d) as Arc<dyn BlockDevice>)
            .collect()
    }

    pub fn try_open(&self) -> Result<Arc<FileSystem>, fs::Error> {
        let devices = self.topology.over(self.dyn_devices());
        let array = devices.and_then(|devices| Array::assemble(devices, false));
        let array = array.map_err(|error| fs::Error::from(engine::Error::from(error)))?;
        FileSystem::open(Arc::new(array), self.options.clone())
    }

    pub fn open(&self) -> Arc<FileSystem> {
        self.try_open().unwrap()
    }

    /// Checks what is on the devices now, the journal included: nothing may be wrong.
    pub fn check(&self) -> Report {
        let options = FsckOptions {
            hash_mask: self.options.hash_mask,
            cache_bytes: 1 << 20,
            workers: 2,
        };
        self.check_by(&options)
    }

    /// The same with these options.
    pub fn check_by(&self, options: &FsckOptions) -> Report {
        let array = Array::assemble(self.dyn_devices(), true).unwrap();
        let report = fs::fsck::fsck(Arc::new(array), options, &|_| {}).unwrap();
        if !report.is_sound() {
            let findings: Vec<String> = report.findings.iter().map(|f| f.to_string()).collect();
            panic!("fsck: {}", findings.join("\n"));
        }
        report
    }

    /// Closes and opens again.
    pub fn remount(&mut self, fs: Arc<FileSystem>) -> Arc<FileSystem> {
        fs.close().unwrap();
        drop(fs);
        self.devices = self.devices.iter().map(|d| d.reopen()).collect();
        self.check();
        self.open()
    }
}

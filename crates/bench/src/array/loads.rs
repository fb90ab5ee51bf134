//! What the threads of a window do: transfers by queues of their own, plain calls, the device layer, and one large file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use base::clock::process_cpu_ns;
use base::rng::Rng;
use device::{AlignedBuf, Array, BlockDevice, Durability, Io};
use format::geometry::{Geometry, GeometryOptions};

use super::{FILE, Kind, LARGE, PAGE};
use crate::counted::Counters;
use crate::runner::{Counts, Load, Operation, Stop};
use crate::target::{InProcess, Queue, Side, Transfer, keep_busy, whole};
use crate::{Error, interrupt};

/// What the threads of a window do, wherever.
#[derive(Clone, Copy)]
pub(super) struct Plan<'a> {
    pub kind: Kind,
    pub members: usize,
    /// In flight on a device by one thread.
    pub per_device: usize,
    /// Of each device.
    pub pages: u64,
    pub counters: &'a Counters,
}

impl Plan<'_> {
    /// Transfers that one thread has in flight.
    fn slots(&self) -> usize {
        match self.kind.lone {
            true => 1,
            false => self.per_device * self.members,
        }
    }

    /// The same on one file that has the pages of all devices, and as many transfers in flight.
    pub fn on_one_file(self) -> Self {
        Plan {
            members: 1,
            per_device: self.per_device * self.members,
            pages: self.pages * self.members as u64,
            ..self
        }
    }

    /// The device of a slot's next transfer, and its page there.
    pub fn place(&self, slot: usize, places: &mut Rng) -> (usize, u64) {
        let device = match self.kind.lone {
            true => places.below(self.members as u64) as usize,
            false => slot % self.members,
        };
        (device, places.below(self.pages))
    }
}

/// What is written.
pub(super) fn page() -> AlignedBuf {
    AlignedBuf::from_slice(&[0xa5; PAGE])
}

/// By a queue of each thread's own, on the devices.
pub(super) struct OnQueue<'a> {
    pub plan: Plan<'a>,
    pub make: &'a (dyn Fn(usize) -> Result<Box<dyn Queue>, Error> + Sync),
    /// What it is on, to be synced: no side finds what another one left to write.
    pub files: Vec<File>,
}

pub(super) fn sync(files: &[File]) -> Result<(), Error> {
    let each = |file: &File| file.sync_data();
    let synced = files.iter().try_for_each(each);
    synced.map_err(|e| Error::io(Path::new("a device"), e))
}

impl Load for OnQueue<'_> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let plan = self.plan;
        let queue = (self.make)(plan.slots())?;
        let mut places = Rng::new(thread as u64);
        let next = move |slot| {
            let (file, page) = plan.place(slot, &mut places);
            Some(Transfer {
                slot,
                file,
                offset: page * PAGE as u64,
                bytes: PAGE,
                write: plan.kind.write,
            })
        };
        Ok(keep_busy(queue, plan.slots(), false, next))
    }

    fn settle(&self) -> Result<(), Error> {
        sync(&self.files)
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }

    fn counts(&self) -> Counts {
        self.plan.counters.read()
    }
}

/// By pread(2) and pwrite(2).
pub(super) struct OnFiles<'a> {
    pub plan: Plan<'a>,
    pub files: Vec<File>,
}

impl Load for OnFiles<'_> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let (mut places, mut buf) = (Rng::new(thread as u64), page());
        Ok(Box::new(move || {
            let (file, page) = self.plan.place(0, &mut places);
            let (file, at) = (&self.files[file], page * PAGE as u64);
            let moved = match self.plan.kind.write {
                true => file.write_at(&buf, at),
                false => file.read_at(&mut buf, at),
            };
            whole(moved, PAGE, "a transfer of a device").map(|()| 1)
        }))
    }

    fn settle(&self) -> Result<(), Error> {
        sync(&self.files)
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }

    fn counts(&self) -> Counts {
        self.plan.counters.read()
    }
}

/// By Sheaf's device layer, which has no file system on it.
pub(super) struct OnArray<'a> {
    plan: Plan<'a>,
    pub array: Array,
}

impl<'a> OnArray<'a> {
    pub fn open(plan: Plan<'a>, devices: Vec<Arc<dyn BlockDevice>>) -> Result<OnArray<'a>, Error> {
        let sizes: Vec<u64> = devices.iter().map(|device| device.bytes()).collect();
        let geometry = Geometry::plan(&sizes, GeometryOptions::default())?;
        let uuid = device::new_uuid().map_err(Error::no_entropy)?;
        let key = base::rng::entropy().map_err(Error::no_entropy)?;
        let array = Array::create(devices, geometry, "bench", uuid, key)?;
        Ok(OnArray { plan, array })
    }

    /// The logical address of a page of a device: the first zone is striped over all of them.
    pub fn byte(&self, (device, page): (usize, u64)) -> u64 {
        let stripe = u64::from(self.array.geometry().stripe_blocks);
        let (row, within) = (page / stripe, page % stripe);
        let stripes = row * self.plan.members as u64 + device as u64;
        (stripes * stripe + within) * PAGE as u64
    }

    fn stats(&self) -> u64 {
        let stats = self.array.stats();
        stats.devices.iter().map(|d| d.reads + d.writes).sum()
    }
}

impl Load for OnArray<'_> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let (plan, mut places) = (self.plan, Rng::new(thread as u64));
        let mut bufs: Vec<AlignedBuf> = (0..plan.slots()).map(|_| page()).collect();
        Ok(Box::new(move || {
            let transfers = bufs.iter_mut().enumerate().map(|(slot, buf)| {
                let byte = self.byte(plan.place(slot, &mut places));
                let durability = Durability::Volatile;
                match plan.kind.write {
                    true => Io::Write {
                        byte,
                        buf,
                        durability,
                    },
                    false => Io::Read { byte, buf },
                }
            });
            let mut transfers: Vec<Io<'_>> = transfers.collect();
            self.array.execute(&mut transfers)?;
            Ok(transfers.len() as u64)
        }))
    }

    fn settle(&self) -> Result<(), Error> {
        self.array.flush()?;
        Ok(())
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }

    fn counts(&self) -> Counts {
        Counts {
            requests: Some(self.stats()),
            ..self.plan.counters.read()
        }
    }
}

/// Through one large file past the cache.
pub(super) struct OnLargeFile<'a> {
    pub plan: Plan<'a>,
    pub side: &'a InProcess,
}

impl OnLargeFile<'_> {
    /// As many bytes as the other sides use of all devices.
    fn pages(&self) -> u64 {
        self.plan.on_one_file().pages
    }

    /// Writes every block of the file, past the cache: nothing of it is there to be found in it.
    pub fn fill(&self) -> Result<(), Error> {
        let root = self.side.root();
        drop(self.side.create(&root, FILE)?);
        let file = self.side.open_with(&root, FILE, libc::O_DIRECT)?;
        let piece = AlignedBuf::zeroed(LARGE);
        for at in (0..self.pages() * PAGE as u64).step_by(LARGE) {
            interrupt::check()?;
            self.side.write(&file, at, &piece)?;
        }
        self.side.settle()
    }
}

impl Load for OnLargeFile<'_> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let root = self.side.root();
        let file = self.side.open_with(&root, FILE, libc::O_DIRECT)?;
        let mut places = Rng::new(thread as u64);
        let (write, pages) = (self.plan.kind.write, self.pages());
        if !self.plan.kind.lone {
            let slots = self.plan.slots();
            let queue = self.side.queue(vec![file], slots, PAGE)?;
            let next = move |slot| {
                Some(Transfer {
                    slot,
                    file: 0,
                    offset: places.below(pages) * PAGE as u64,
                    bytes: PAGE,
                    write,
                })
            };
            return Ok(keep_busy(Box::new(queue), slots, false, next));
        }
        let mut buf = page();
        Ok(Box::new(move || {
            let at = places.below(pages) * PAGE as u64;
            match write {
                true => self.side.write(&file, at, &buf)?,
                false => self.side.read(&file, at, &mut buf)?,
            }
            Ok(1)
        }))
    }

    fn settle(&self) -> Result<(), Error> {
        self.side.sync()
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }

    fn counts(&self) -> Counts {
        Counts {
            requests: Some(self.side.device_requests()),
            ..self.plan.counters.read()
        }
    }
}

//! Simulated machines: devices that lose power, a clock, and a file system on them.
//!
//! Invariants:
//! 1. A machine's devices share one power switch that no other machine has.
//! 2. Nothing but the seed and the operations decides what a machine does: no threads unless
//!    the shape asks for them, manual time.

use base::clock::Clock;
use base::rng::Rng;
use base::sync::{Mutex, rank};
use device::sim::{PowerSwitch, SECTOR, SimDevice, Snapshot, Survival};
use device::{Array, Bell, BlockDevice, DeviceQueue, Durability, Operation, Request, Topology};
use format::BLOCK_SIZE;
use format::geometry::{Geometry, GeometryOptions};
use format::journal::{BATCH_MAGIC, BatchHeader};
use format::label::{HEAD_BLOCKS, TAIL_BLOCKS};
use fs::fsck::FsckOptions;
use fs::{AtimePolicy, Caller, FileSystem, FsOptions, MkfsOptions, ROOT, SetAttr};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Of the arrays' labels.
const HASH_KEY: [u8; 16] = [9; 16];

/// What a machine is made of.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Bytes of each device.
    pub devices: Vec<u64>,
    /// Bytes of a stripe unit.
    pub stripe: u64,
    /// Logical block of the devices, in bytes: what the journal is aligned to.
    pub logical_block: u32,
    /// What devices write as one, unless their logical block is larger.
    pub physical_block: u32,
    /// Whether the devices have a cache that a power cut empties.
    pub has_cache: bool,
    /// Whether these can force a write past it; if not they flush it behind each durable one.
    pub forces_writes: bool,
    /// How a batch on a device has ended is known only when those on others have that were begun meanwhile.
    pub told_late: bool,
    /// Batches written to the journal beforehand, so that its ring wraps soon.
    pub age: u32,
    /// Trees have small nodes ([`base::tight`]).
    pub tight: bool,
    /// Of threads that a seed orders ([`base::sched`]); others submit for themselves.
    pub topology: Topology,
    /// Devices with threads of their own do what these have at once, where the tap sees it.
    pub plain: bool,
    /// Of the clock, for stamps; 0: it is exact.
    pub tick: Duration,
    /// Whether a crash is given memory enough that only syncs write back.
    pub options: FsOptions,
}

/// Size of the small arrays that most runs use, in bytes over all devices.
pub const SMALL: u64 = 64 << 20;

impl Shape {
    /// A small array of one or two devices, with a shard for each of two threads.
    pub fn of_two_threads(seed: u64) -> Shape {
        let mut shape = Shape::small(1 + seed % 2);
        shape.options.store.shards = 2;
        shape
    }

    /// A small array of so many equal devices, with memory enough for what tests do.
    pub fn small(devices: u64) -> Shape {
        let bytes = (SMALL / devices).next_multiple_of(4096);
        let mut options = FsOptions::default();
        options.store.workers = 1;
        options.store.shards = 1;
        options.store.background = false;
        options.store.node_cache_bytes = 4 << 20;
        options.data.cache_bytes = 4 << 20;
        options.data.atime = AtimePolicy::Never;
        Shape {
            devices: vec![bytes; devices as usize],
            stripe: 64 << 10,
            logical_block: 512,
            physical_block: 512,
            has_cache: true,
            forces_writes: true,
            told_late: false,
            age: 0,
            tight: false,
            topology: Topology::PerCore,
            plain: true,
            tick: Duration::ZERO,
            options,
        }
    }

    pub fn geometry(&self) -> Geometry {
        let device = self.device("any", 4096, 0, PowerSwitch::new());
        let device = device as Arc<dyn BlockDevice>;
        let options = GeometryOptions {
            stripe_bytes: Some(self.stripe),
            journal_align: device::journal_align([&device]),
            ..GeometryOptions::default()
        };
        Geometry::plan(&self.devices, options).expect("a shape has a geometry")
    }

    /// A new device of its kind.
    fn device(
        &self,
        name: &str,
        bytes: u64,
        seed: u64,
        switch: Arc<PowerSwitch>,
    ) -> Arc<SimDevice> {
        let device = SimDevice::with(name, bytes, self.logical_block, seed, switch);
        let mut device = device.with_physical_block(self.physical_block);
        if !self.has_cache {
            device = device.without_cache();
        }
        if !self.forces_writes {
            device = device.without_forced_writes();
        }
        device
    }
}

/// A formatted array at rest: what machines begin with.
#[derive(Clone, Debug)]
pub struct Image {
    pub shape: Shape,
    contents: Vec<Snapshot>,
    now_ns: u64,
}

const START_NS: u64 = 1_700_000_000_000_000_000;

impl Image {
    /// Formats an array, and ages its journal.
    pub fn format(shape: &Shape) -> Result<Image, String> {
        let blank = Image {
            shape: shape.clone(),
            contents: Vec::new(),
            now_ns: START_NS,
        };
        let machine = Machine::new(&blank, 1);
        let key = ([7; 16], HASH_KEY);
        let devices = machine.handles();
        let array = Array::create(devices, shape.geometry(), "sim", key.0, key.1);
        let array = array.map_err(|e| e.to_string())?;
        let array = Arc::new(array.created_at(machine.clock.now()));
        let mkfs = MkfsOptions {
            clock: machine.clock.clone(),
            ..MkfsOptions::default()
        };
        FileSystem::mkfs(&array, &mkfs).map_err(|e| e.to_string())?;
        array.write_labels().map_err(|e| e.to_string())?;
        drop(array);
        if shape.age > 0 {
            machine.age(shape.age).map_err(|e| e.to_string())?;
        }
        Ok(machine.image())
    }
}

/// A moment at which the power may go: the devices as they are then.
#[derive(Debug)]
pub struct CrashPoint {
    devices: Vec<Arc<SimDevice>>,
}

impl CrashPoint {
    /// The devices as they come back, with a hash of all that is on them. Mixed, it is one time in three a class of its own for each device.
    pub fn crash(&self, survival: Survival, rng: &mut Rng) -> Crashed {
        let switch = PowerSwitch::new();
        let apart = survival == Survival::Mixed && self.devices.len() > 1 && rng.one_in(3);
        let survivals = Survival::ALL;
        let devices: Vec<Arc<SimDevice>> = self
            .devices
            .iter()
            .map(|device| {
                let survival = match apart {
                    true => *rng.pick(&survivals),
                    false => survival,
                };
                device.restart_with(survival, rng).fork(&switch)
            })
            .collect();
        let hash = devices.iter().fold(0u64, |hash, d| {
            hash.wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .wrapping_add(d.contents_hash())
        });
        Crashed {
            switch,
            devices,
            hash,
        }
    }
}

/// Devices after a power cut.
#[derive(Debug)]
pub struct Crashed {
    switch: Arc<PowerSwitch>,
    devices: Vec<Arc<SimDevice>>,
    pub hash: u64,
}

/// What watches a machine's devices: it collects the moments before each write and flush.
pub struct Tap {
    devices: Vec<Arc<SimDevice>>,
    on: AtomicBool,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// With the order in which they were begun: others may come in while one is caught.
    points: Vec<(usize, CrashPoint)>,
    begun: usize,
    /// Each with its ticket, in the order in which they were begun, whoever completes first.
    in_flight: Vec<(u64, InFlight)>,
    /// Tickets that were given.
    tickets: u64,
    interposed: Option<(u64, Box<dyn FnOnce() + Send>)>,
    watch: Option<Arc<dyn Watch>>,
}

/// Somebody who is told of every write, before and after it, and after every read.
pub trait Watch: Send + Sync {
    fn before(&self, device: usize, offset: u64, bytes: &[u8]);
    fn after(&self);
    fn after_read(&self) {}
}

impl std::fmt::Debug for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tap").finish_non_exhaustive()
    }
}

impl Tap {
    fn new(devices: Vec<Arc<SimDevice>>) -> Arc<Tap> {
        Arc::new(Tap {
            devices,
            on: AtomicBool::new(false),
            seen: Mutex::new(rank::LEAF, Seen::default()),
        })
    }

    /// Collects crash points from now on, or no longer.
    pub fn collect(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    /// The points collected since the last call.
    pub fn take(&self) -> Vec<CrashPoint> {
        let mut points = {
            let mut seen = self.seen.lock();
            seen.begun = 0;
            std::mem::take(&mut seen.points)
        };
        points.sort_by_key(|(number, _)| *number);
        points.into_iter().map(|(_, point)| point).collect()
    }

    /// How many points have begun to be collected since then: those after them show all that is durable now.
    pub fn count(&self) -> usize {
        self.seen.lock().begun
    }

    /// Runs `action` in the middle of the machine's work: before the write to the ends of a
    /// device, where labels and checkpoint records are, that comes after `skip` others.
    pub fn interpose_at_label(&self, skip: u64, action: Box<dyn FnOnce() + Send>) {
        self.seen.lock().interposed = Some((skip, action));
    }

    /// Tells `watch` of every write from now on.
    pub fn watch(&self, watch: Arc<dyn Watch>) {
        self.seen.lock().watch = Some(watch);
    }

    fn watching(&self) -> Option<Arc<dyn Watch>> {
        self.seen.lock().watch.clone()
    }

    /// Called before a write or flush; `label`: it goes to an end of the device.
    fn before(&self, label: bool) {
        let due = if !label {
            None
        } else {
            let mut seen = self.seen.lock();
            match &mut seen.interposed {
                Some((0, _)) => seen.interposed.take(),
                Some((skip, _)) => {
                    *skip -= 1;
                    None
                }
                None => None,
            }
        };
        if let Some((_, action)) = due {
            action();
        }
        if self.on.load(Ordering::Relaxed) {
            let (number, in_flight) = {
                let mut seen = self.seen.lock();
                seen.begun += 1;
                (seen.begun - 1, seen.in_flight.clone())
            };
            let point = caught(&self.devices, &in_flight);
            self.seen.lock().points.push((number, point));
        }
    }

    /// Notes the writes of a batch that is about to run; returns the ticket of the first of them, whose successors have the next ones.
    fn start(&self, device: usize, requests: &[Request<'_>]) -> Option<u64> {
        if !self.on.load(Ordering::Relaxed) {
            return None;
        }
        let writes = requests
            .iter()
            .filter_map(|request| match &request.operation {
                Operation::Write { offset, buf, .. } => Some(InFlight {
                    device,
                    offset: *offset,
                    bytes: (*buf).into(),
                }),
                _ => None,
            });
        let seen = &mut *self.seen.lock();
        let first = seen.tickets;
        let before = seen.in_flight.len();
        seen.in_flight.extend((first..).zip(writes));
        seen.tickets += (seen.in_flight.len() - before) as u64;
        Some(first)
    }

    /// The write with this ticket has completed.
    fn completed(&self, ticket: u64) {
        let in_flight = &mut self.seen.lock().in_flight;
        in_flight.retain(|(other, _)| *other != ticket);
    }
}

/// A write that was issued and has not completed.
#[derive(Clone, Debug)]
struct InFlight {
    device: usize,
    offset: u64,
    bytes: Arc<[u8]>,
}

/// The devices at the moment when the power goes, with writes in flight: any of their sectors
/// may be written, whatever durability was asked for.
fn caught(devices: &[Arc<SimDevice>], in_flight: &[(u64, InFlight)]) -> CrashPoint {
    let switch = PowerSwitch::new();
    let forks: Vec<Arc<SimDevice>> = devices.iter().map(|d| d.fork(&switch)).collect();
    for (_, write) in in_flight {
        let operation = Operation::Write {
            offset: write.offset,
            buf: &write.bytes,
            durability: Durability::Volatile,
        };
        // Whether it would have worked makes no difference any more.
        forks[write.device].run(&mut [Request::new(operation, 0)], None);
    }
    CrashPoint { devices: forks }
}

/// A device with a tap on it.
#[derive(Debug)]
struct Tapped {
    index: usize,
    inner: Arc<SimDevice>,
    tap: Arc<Tap>,
    plain: bool,
    told_late: bool,
}

impl BlockDevice for Tapped {
    device::described_by!(inner);

    fn has_cache(&self) -> bool {
        self.inner.has_cache()
    }

    fn run(&self, requests: &mut [Request<'_>], mut meanwhile: Option<&mut dyn FnMut()>) {
        // Batches of several devices are in flight at once: this one has started, and completes
        // after those that start meanwhile. A power cut finds all of them under way.
        let mut batch = self.inner.begin(requests);
        let mut ticket = self.tap.start(self.index, requests);
        if let Some(meanwhile) = meanwhile.take_if(|_| !self.told_late) {
            meanwhile();
        }
        for request in requests {
            let write = matches!(request.operation, Operation::Write { .. });
            if write || matches!(request.operation, Operation::Flush) {
                let at = request.operation.offset() / BLOCK_SIZE as u64;
                let last = self.inner.bytes() / BLOCK_SIZE as u64 - TAIL_BLOCKS;
                self.tap.before(write && !(HEAD_BLOCKS..last).contains(&at));
            }
            let watch = match &request.operation {
                Operation::Write { offset, buf, .. } => {
                    let watch = self.tap.watching();
                    watch.inspect(|watch| watch.before(self.index, *offset, buf))
                }
                _ => None,
            };
            batch.perform(request);
            if let Some(watch) = watch {
                watch.after();
            }
            if matches!(request.operation, Operation::Read { .. })
                && let Some(watch) = self.tap.watching()
            {
                watch.after_read();
            }
            if let Some(ticket) = ticket.as_mut().filter(|_| write) {
                self.tap.completed(*ticket);
                *ticket += 1;
            }
        }
        // Or before them, and nobody knows yet.
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
    }

    /// What is in flight is not tapped: a power cut finds it in the device's hands.
    fn queue(self: Arc<Self>, bell: &Arc<Bell>) -> DeviceQueue {
        if self.plain {
            return DeviceQueue::blocking(self);
        }
        Arc::clone(&self.inner).queue(bell)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.discard(offset, len)
    }
}

/// Devices on one power switch, and a clock.
#[derive(Debug)]
pub struct Machine {
    pub shape: Shape,
    pub devices: Vec<Arc<SimDevice>>,
    pub switch: Arc<PowerSwitch>,
    pub clock: Clock,
    pub tap: Arc<Tap>,
}

impl Machine {
    /// A machine with an image's contents.
    pub fn new(image: &Image, seed: u64) -> Machine {
        let switch = PowerSwitch::new();
        let shape = image.shape.clone();
        let device = |(i, bytes): (usize, &u64)| {
            let seed = seed.wrapping_mul(31).wrapping_add(i as u64);
            let name = format!("sim{i}");
            let switch = Arc::clone(&switch);
            let device = shape.device(&name, *bytes, seed, switch);
            if let Some(contents) = image.contents.get(i) {
                device.restore(contents);
            }
            device
        };
        let devices: Vec<_> = shape.devices.iter().enumerate().map(device).collect();
        Machine::of(shape.clone(), devices, switch, image.now_ns)
    }

    /// A machine that comes back after a power cut.
    pub fn after(shape: &Shape, crashed: Crashed, now_ns: u64) -> Machine {
        Machine::of(shape.clone(), crashed.devices, crashed.switch, now_ns)
    }

    fn of(
        shape: Shape,
        devices: Vec<Arc<SimDevice>>,
        switch: Arc<PowerSwitch>,
        now_ns: u64,
    ) -> Machine {
        let tap = Tap::new(devices.clone());
        let clock = Clock::manual_with_ticks(now_ns, shape.tick);
        Machine {
            shape,
            clock,
            devices,
            switch,
            tap,
        }
    }

    fn handles(&self) -> Vec<Arc<dyn BlockDevice>> {
        let devices = self.devices.iter().enumerate();
        let handle = |(index, device): (usize, &Arc<SimDevice>)| {
            Arc::new(Tapped {
                index,
                inner: Arc::clone(device),
                tap: Arc::clone(&self.tap),
                plain: self.shape.plain && self.topology() == Topology::PerDevice,
                told_late: self.shape.told_late,
            }) as Arc<dyn BlockDevice>
        };
        devices.map(handle).collect()
    }

    /// Only a seed's order of threads can be had again.
    fn topology(&self) -> Topology {
        match base::sched::active() {
            true => self.shape.topology,
            false => Topology::PerCore,
        }
    }

    pub fn open(&self) -> Result<Arc<FileSystem>, fs::Error> {
        self.open_on(self.handles())
    }

    fn open_on(&self, handles: Vec<Arc<dyn BlockDevice>>) -> Result<Arc<FileSystem>, fs::Error> {
        let handles = self.topology().over(handles);
        let array = handles.and_then(|handles| Array::assemble(handles, false));
        let array = array.map_err(|error| fs::Error::from(engine::Error::from(error)))?;
        let mut options = self.shape.options.clone();
        options.store.clock = self.clock.clone();
        base::tight::set(self.shape.tight);
        FileSystem::open(Arc::new(array), options)
    }

    /// Checks what is on the devices now, the journal included: nothing may be wrong.
    pub fn fsck(&self) -> Result<(), String> {
        let switch = PowerSwitch::new();
        let copies = self.devices.iter();
        let copies = copies.map(|d| d.fork(&switch) as Arc<dyn BlockDevice>);
        let array = Array::assemble(copies.collect(), true).map_err(|e| format!("labels: {e}"))?;
        let options = FsckOptions {
            hash_mask: self.shape.options.hash_mask,
            cache_bytes: 1 << 20,
            workers: 1,
        };
        let report = fs::fsck::fsck(Arc::new(array), &options, &|_| {})
            .map_err(|error| format!("fsck: {error}"))?;
        if report.is_sound() {
            return Ok(());
        }
        let findings: Vec<String> = report.findings.iter().map(|f| f.to_string()).collect();
        Err(format!("fsck: {}", findings.join("; ")))
    }

    /// This moment, as one at which the power may go.
    pub fn point(&self) -> CrashPoint {
        caught(&self.devices, &[])
    }

    /// The power goes now: the devices as they come back, on a new switch.
    pub fn cut(&self, survival: Survival, rng: &mut Rng) -> Crashed {
        self.switch.cut_now();
        caught(&self.devices, &[]).crash(survival, rng)
    }

    /// Flips bits somewhere in the written part of the journal's ring.
    pub fn rot_journal(&self, rng: &mut Rng) {
        let geometry = self.shape.geometry();
        let mut written = Vec::new();
        for at in (0..geometry.journal_bytes()).step_by(SECTOR) {
            geometry.pieces(geometry.journal_start.byte() + at, SECTOR, |piece| {
                let mut bytes = [0; SECTOR];
                self.devices[piece.device].peek(piece.offset, &mut bytes);
                if bytes.iter().any(|b| *b != 0) {
                    written.push(piece);
                }
            });
        }
        if !written.is_empty() {
            let piece = rng.pick(&written);
            self.devices[piece.device].corrupt(piece.offset, piece.len as u64, rng);
        }
    }

    /// Whether a range of bytes on a device has anything to do with the journal's ring.
    pub fn in_journal(&self, device: usize, range: &Range<u64>) -> bool {
        let geometry = self.shape.geometry();
        let (start, len) = (geometry.journal_start.byte(), geometry.journal_bytes());
        let mut inside = false;
        geometry.pieces(start, len as usize, |piece| {
            let end = piece.offset + piece.len as u64;
            inside |= piece.device == device && range.start < end && piece.offset < range.end;
        });
        inside
    }

    /// What opening gives while one of several devices is not there.
    pub fn open_without(&self, absent: usize) -> Result<Arc<FileSystem>, fs::Error> {
        let mut handles = self.handles();
        handles.remove(absent);
        self.open_on(handles)
    }

    /// The ring's bytes, or what replaces them.
    fn ring(&self, replacement: Option<&[u8]>) -> Vec<u8> {
        let geometry = self.shape.geometry();
        let mut ring = vec![0; geometry.journal_bytes() as usize];
        let mut at = 0;
        geometry.pieces(geometry.journal_start.byte(), ring.len(), |piece| {
            let device = &self.devices[piece.device];
            match replacement {
                Some(bytes) => device.poke(piece.offset, &bytes[at..at + piece.len]),
                None => device.peek(piece.offset, &mut ring[at..at + piece.len]),
            }
            at += piece.len;
        });
        ring
    }

    /// Takes the last batch but one out of the journal. With `close` the last one takes its place
    /// in the chain, which no crash does; without, the journal is as if both had been in flight
    /// when the power went, and only the later one had arrived.
    ///
    /// # Errors
    /// When the journal has no two batches.
    pub fn lose_batch(&self, close: bool) -> Result<(), String> {
        let mut ring = self.ring(None);
        let align = self.shape.geometry().journal_align as usize;
        let header = |ring: &[u8], at: usize| -> Option<BatchHeader> {
            let raw = ring.get(at..at + size_of::<BatchHeader>())?;
            let header = BatchHeader::read_from_bytes(raw).ok()?;
            (header.magic.get() == BATCH_MAGIC).then_some(header)
        };
        let places = (0..ring.len()).step_by(align);
        let mut found: Vec<(usize, BatchHeader)> = places
            .filter_map(|at| Some((at, header(&ring, at)?)))
            .collect();
        found.sort_by_key(|(_, header)| header.sequence.get());
        let [.., (hole, gone), (last, mut header)] = found[..] else {
            return Err("the journal has no two batches".into());
        };
        let bytes_of = |header: &BatchHeader| size_of::<BatchHeader>() + header.len.get() as usize;
        let len = bytes_of(&header);
        if close {
            header.sequence = gone.sequence;
            header.previous_crc = gone.previous_crc;
        }
        header.durable_epoch = gone.durable_epoch;
        header.durable_sequence = gone.durable_sequence;
        let mut bytes = ring[last..last + len].to_vec();
        bytes[..size_of::<BatchHeader>()].copy_from_slice(header.as_bytes());
        let crc = format::checksum(format::checksum(0, &HASH_KEY), &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        ring[last..last + len].fill(0);
        ring[hole..hole + bytes_of(&gone)].fill(0);
        let place = if close { hole } else { last };
        ring[place..place + len].copy_from_slice(&bytes);
        self.ring(Some(&ring));
        Ok(())
    }

    pub fn now_ns(&self) -> u64 {
        self.clock.monotonic_ns()
    }

    pub fn advance(&self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
    }

    /// What is durable, for other machines to begin with.
    pub fn image(&self) -> Image {
        Image {
            shape: self.shape.clone(),
            contents: self.devices.iter().map(|d| d.snapshot()).collect(),
            now_ns: self.now_ns(),
        }
    }

    /// Commits many times and closes.
    fn age(&self, batches: u32) -> Result<(), fs::Error> {
        let fs = self.open()?;
        for _ in 0..batches {
            let same = SetAttr {
                mode: Some(0o755),
                ..SetAttr::default()
            };
            fs.setattr(&Caller::root(), ROOT, &same)?;
            fs.store().commit_through(fs.store().epoch())?;
        }
        fs.close()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::{sched, thread};

    /// A machine of two empty devices.
    fn blank(seed: u64) -> Machine {
        let image = Image {
            shape: Shape::small(2),
            contents: Vec::new(),
            now_ns: START_NS,
        };
        Machine::new(&image, seed)
    }

    fn write(offset: usize, bytes: &[u8]) -> Request<'_> {
        let operation = Operation::Write {
            offset: offset as u64,
            buf: bytes,
            durability: Durability::Durable,
        };
        Request::new(operation, 0)
    }

    /// Whether a sector is written, after a cut.
    fn survives(crashed: &Crashed, device: usize, offset: usize) -> bool {
        let mut found = [0; SECTOR];
        crashed.devices[device].peek(offset as u64, &mut found);
        found != [0; SECTOR]
    }

    /// The tap handed over one request after the other, so that the power cut found only one of them in flight: a later durable
    /// write was never there without those before it.
    #[test]
    fn a_cut_catches_all_that_is_left_of_a_batch() {
        let bytes = [1; SECTOR];
        let places = [(0, 0), (0, 1 << 20), (1, 0), (1, 1 << 20)];
        let mut alone = [false; 4];
        for seed in 0..64 {
            let machine = blank(seed);
            let [first, second] = &machine.handles()[..] else {
                unreachable!("two devices")
            };
            machine.switch.cut_after(0);
            let mut others = [write(0, &bytes), write(1 << 20, &bytes)];
            let mut meanwhile = || second.run(&mut others, None);
            first.run(
                &mut [write(0, &bytes), write(1 << 20, &bytes)],
                Some(&mut meanwhile),
            );
            let crashed = machine.cut(Survival::Mixed, &mut Rng::new(seed));
            let there = places.map(|(device, offset)| survives(&crashed, device, offset));
            for (place, alone) in alone.iter_mut().enumerate() {
                let others = there
                    .iter()
                    .enumerate()
                    .filter(|(other, _)| *other != place);
                *alone |= there[place] && others.clone().all(|(_, there)| !there);
            }
        }
        assert_eq!(alone, [true; 4]);
    }

    /// What had completed last was taken for what had been begun last, whoever had begun it.
    #[test]
    fn each_thread_completes_what_it_has_begun() {
        for seed in 0..16 {
            let machine = blank(seed);
            let handles = machine.handles();
            machine.tap.collect(true);
            sched::run("two writers", seed, &machine.clock, || {
                thread::parallel(2, |me| {
                    for at in 0..4 {
                        handles[me].run(&mut [write(at * SECTOR, &[1; SECTOR])], None);
                    }
                });
            });
            for point in machine.tap.take() {
                for device in &point.devices {
                    let mut volatile = device.cached_writes();
                    volatile.dedup();
                    assert!(volatile.len() <= 1, "durable, and in flight: {volatile:?}");
                }
            }
            assert!(machine.tap.seen.lock().in_flight.is_empty());
        }
    }
}

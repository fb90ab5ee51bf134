//! Transfers in flight, of one thread: by io_uring, by Linux AIO, by Sheaf, and to devices of this process that take a set time.
//!
//! 1. A slot has memory of its own and holds one transfer at a time. Its memory is looked at only while it holds none.
//! 2. Nothing is lost: what was started ends in some [`wait`](Queue::wait), or when the queue is dropped.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::clock::Clock;
use device::{AlignedBuf, BlockDevice, Completion, Durability, RawQueue};
use fs::{IoContext, OpenFile, Request};

use crate::Error;
use crate::runner::Operation;

/// One transfer: between a slot and a place in a file.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    pub slot: usize,
    pub file: usize,
    pub offset: u64,
    pub bytes: usize,
    pub write: bool,
}

/// How a transfer ended: its slot, and the bytes moved.
pub type Ended = (usize, io::Result<usize>);

pub trait Queue: Send {
    /// The memory of a slot that holds no transfer.
    fn memory(&mut self, slot: usize) -> &mut [u8];
    fn start(&mut self, transfer: Transfer);
    /// Hands in what was started, and waits until at least `least` have ended, or all; adds those that have.
    fn wait(&mut self, least: usize, ended: &mut Vec<Ended>) -> io::Result<()>;
}

impl Queue for RawQueue {
    fn memory(&mut self, slot: usize) -> &mut [u8] {
        RawQueue::memory(self, slot)
    }

    fn start(&mut self, t: Transfer) {
        RawQueue::start(self, t.slot, t.file, t.offset, t.bytes, t.write);
    }

    fn wait(&mut self, least: usize, ended: &mut Vec<Ended>) -> io::Result<()> {
        RawQueue::wait(self, least, ended);
        Ok(())
    }
}

impl Queue for base::aio::Queue {
    fn memory(&mut self, slot: usize) -> &mut [u8] {
        base::aio::Queue::memory(self, slot)
    }

    fn start(&mut self, t: Transfer) {
        base::aio::Queue::start(self, t.slot, t.file, t.offset, t.bytes, t.write);
    }

    fn wait(&mut self, least: usize, ended: &mut Vec<Ended>) -> io::Result<()> {
        base::aio::Queue::wait(self, least, ended)
    }
}

/// Transfers by Sheaf, as a program that links the library keeps many in flight.
pub struct ContextQueue {
    context: IoContext,
    files: Vec<Arc<OpenFile>>,
    /// Of slots that hold no transfer.
    memory: Vec<Option<AlignedBuf>>,
    started: Vec<(u64, Request)>,
    completed: Vec<fs::Completion>,
}

impl ContextQueue {
    pub fn new(
        mut context: IoContext,
        files: Vec<Arc<OpenFile>>,
        slots: usize,
        bytes: usize,
    ) -> Result<ContextQueue, fs::Error> {
        let memory = context.buffers(bytes, slots)?;
        Ok(ContextQueue {
            context,
            files,
            memory: memory.into_iter().map(Some).collect(),
            started: Vec::with_capacity(slots),
            completed: Vec::with_capacity(slots),
        })
    }
}

impl Queue for ContextQueue {
    fn memory(&mut self, slot: usize) -> &mut [u8] {
        self.memory[slot]
            .as_mut()
            .expect("the slot holds no transfer")
    }

    /// Of as many bytes as the slot has.
    fn start(&mut self, t: Transfer) {
        let buf = self.memory[t.slot]
            .take()
            .expect("the slot holds no transfer");
        assert_eq!(buf.len(), t.bytes, "transfers take all of a slot's memory");
        let (file, offset) = (Arc::clone(&self.files[t.file]), t.offset);
        let request = match t.write {
            true => Request::Write { file, offset, buf },
            false => Request::Read { file, offset, buf },
        };
        self.started.push((t.slot as u64, request));
    }

    fn wait(&mut self, least: usize, ended: &mut Vec<Ended>) -> io::Result<()> {
        let Self {
            context,
            started,
            completed,
            ..
        } = self;
        context.submit_and_wait(started, least, completed, None);
        for completion in self.completed.drain(..) {
            let slot = completion.user as usize;
            self.memory[slot] = Some(completion.buf);
            let moved = completion
                .result
                .map_err(|e| io::Error::from_raw_os_error(e.errno()));
            ended.push((slot, moved));
        }
        Ok(())
    }
}

/// Transfers to devices that take a set time for each, as long as no more are in flight on one than it serves at once: an
/// asynchronous user's floor on them. The transfer itself is performed when it is started, as [`device::LatencyDevice`] does.
pub struct SlowQueue {
    devices: Vec<Arc<dyn BlockDevice>>,
    service: Duration,
    clock: Clock,
    memory: Vec<AlignedBuf>,
    /// What is in flight, and when it ends; the first on top.
    ends: BinaryHeap<Reverse<(u64, usize)>>,
    results: Vec<io::Result<usize>>,
}

impl SlowQueue {
    pub fn new(
        devices: Vec<Arc<dyn BlockDevice>>,
        service: Duration,
        clock: Clock,
        slots: usize,
        bytes: usize,
    ) -> SlowQueue {
        SlowQueue {
            devices,
            service,
            clock,
            memory: (0..slots).map(|_| AlignedBuf::zeroed(bytes)).collect(),
            ends: BinaryHeap::with_capacity(slots),
            results: (0..slots).map(|_| Ok(0)).collect(),
        }
    }
}

impl Queue for SlowQueue {
    fn memory(&mut self, slot: usize) -> &mut [u8] {
        &mut self.memory[slot]
    }

    fn start(&mut self, t: Transfer) {
        let (device, memory) = (&self.devices[t.file], &mut self.memory[t.slot][..t.bytes]);
        let done = match t.write {
            true => device.write(t.offset, memory, Durability::Volatile),
            false => device.read(t.offset, memory),
        };
        self.results[t.slot] = done.map(|()| t.bytes);
        let end = self.clock.monotonic_ns() + self.service.as_nanos() as u64;
        self.ends.push(Reverse((end, t.slot)));
    }

    fn wait(&mut self, least: usize, ended: &mut Vec<Ended>) -> io::Result<()> {
        let mut left = least.min(self.ends.len());
        while let Some(&Reverse((end, slot))) = self.ends.peek() {
            if left == 0 && end > self.clock.monotonic_ns() {
                break;
            }
            self.clock.sleep_until(end);
            self.ends.pop();
            let result = std::mem::replace(&mut self.results[slot], Ok(0));
            ended.push((slot, result));
            left = left.saturating_sub(1);
        }
        Ok(())
    }
}

/// How the kernel is asked for transfers of which several are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    Uring(Completion),
    Aio,
}

impl Interface {
    pub const ALL: [Interface; 3] = [
        Interface::Uring(Completion::Deferred),
        Interface::Uring(Completion::Cooperative),
        Interface::Aio,
    ];

    /// As rows have it, behind whose devices or files they are.
    pub fn name(self) -> &'static str {
        match self {
            Interface::Uring(Completion::Deferred) => "io_uring",
            Interface::Uring(Completion::Cooperative) => "io_uring-coop",
            Interface::Aio => "aio",
        }
    }

    /// For the calling thread: `slots` transfers of up to `bytes` bytes at the same time.
    pub fn queue(
        self,
        files: Vec<File>,
        slots: usize,
        bytes: usize,
    ) -> Result<Box<dyn Queue>, Error> {
        let made: io::Result<Box<dyn Queue>> = match self {
            Interface::Uring(completion) => RawQueue::new(files, slots, bytes, completion)
                .map(|queue| Box::new(queue) as Box<dyn Queue>),
            Interface::Aio => base::aio::Queue::new(files, slots, bytes)
                .map(|queue| Box::new(queue) as Box<dyn Queue>),
        };
        made.map_err(|source| {
            let remedy = match self {
                Interface::Uring(_) => "sysctl kernel.io_uring_disabled=0, Linux 6.1 or newer",
                Interface::Aio => "sysctl fs.aio-max-nr=1048576",
            };
            Error::Unable(format!(
                "no {} for {slots} transfers ({source}): allow it ({remedy}), or want fewer (--depth)",
                self.name()
            ))
        })
    }
}

/// Opens each for direct I/O, also where that is buffered below, as it is in an old tmpfs. Claims nothing: who writes to devices that
/// were given has claimed them ([`super::Place::claim`]).
pub fn open_direct(paths: &[PathBuf]) -> Result<Vec<File>, Error> {
    let open = |path: &PathBuf| {
        let flags = |flags: i32| {
            let mut options = File::options();
            options
                .read(true)
                .write(true)
                .custom_flags(flags)
                .open(path)
        };
        let opened = match flags(libc::O_DIRECT) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => flags(0),
            opened => opened,
        };
        opened.map_err(|e| Error::io(path, e))
    };
    paths.iter().map(open).collect()
}

/// A transfer that has ended moved as much as it should.
pub fn whole(moved: io::Result<usize>, wanted: usize, what: &str) -> Result<(), Error> {
    let moved = moved.map_err(|e| Error::io(Path::new(what), e))?;
    super::short(moved, wanted)
}

/// Bytes that tell a place.
const STAMP: usize = 8;

/// Has memory that is written to a file begin with its place there.
pub fn stamp(memory: &mut [u8], at: u64) {
    memory[..STAMP].copy_from_slice(&at.to_le_bytes());
}

/// What was read begins with the place that it should be from.
pub fn check_stamp(memory: &[u8], at: u64) -> Result<(), Error> {
    match memory[..STAMP] == at.to_le_bytes() {
        true => Ok(()),
        false => Err(Error::Unable(format!(
            "what was read at {at} is not what was written there"
        ))),
    }
}

/// An operation that keeps all slots of a queue in flight, and counts those that end. `next` tells a slot's next transfer; none ends
/// it once nothing is in flight any more. With `stamped` what is written has its place, and what is read is looked at.
pub fn keep_busy<'a>(
    mut queue: Box<dyn Queue>,
    slots: usize,
    stamped: bool,
    mut next: impl FnMut(usize) -> Option<Transfer> + Send + 'a,
) -> Operation<'a> {
    let mut idle: Vec<usize> = (0..slots).collect();
    let mut in_flight: Vec<Option<Transfer>> = vec![None; slots];
    let mut ended = Vec::with_capacity(slots);
    Box::new(move || {
        idle.retain(|&slot| {
            let transfer = next(slot);
            if let Some(transfer) = transfer {
                if stamped && transfer.write {
                    stamp(queue.memory(slot), transfer.offset);
                }
                queue.start(transfer);
            }
            in_flight[slot] = transfer;
            transfer.is_none()
        });
        let waited = queue.wait(1, &mut ended);
        waited.map_err(|e| Error::io(Path::new("a queue of transfers"), e))?;
        let count = ended.len() as u64;
        for (slot, moved) in ended.drain(..) {
            if let Some(transfer) = in_flight[slot].take() {
                whole(moved, transfer.bytes, "a transfer")?;
                if stamped && !transfer.write {
                    check_stamp(queue.memory(slot), transfer.offset)?;
                }
            }
            idle.push(slot);
        }
        Ok(count)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::OpenOptions;

    const PAGE: usize = 4096;

    /// Four pages on two files, each with a number of its own, read by `queue`.
    fn images() -> (tempfile::TempDir, Vec<PathBuf>) {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..2).map(|i| dir.path().join(i.to_string())).collect();
        for (i, path) in paths.iter().enumerate() {
            let page = |number: usize| vec![(4 * i + number) as u8 + 1; PAGE];
            std::fs::write(path, (0..4).flat_map(page).collect::<Vec<u8>>()).unwrap();
        }
        (dir, paths)
    }

    fn read_and_write(queue: &mut dyn Queue) {
        let mut ended = Vec::new();
        let transfer = |slot: usize, write| Transfer {
            slot,
            file: slot % 2,
            offset: (slot / 2 * PAGE) as u64,
            bytes: PAGE,
            write,
        };
        (0..6).for_each(|slot| queue.start(transfer(slot, false)));
        queue.wait(6, &mut ended).unwrap();
        let mut slots: Vec<usize> = ended.iter().map(|(slot, _)| *slot).collect();
        slots.sort_unstable();
        assert_eq!(slots, [0, 1, 2, 3, 4, 5]);
        for (slot, moved) in ended.drain(..) {
            whole(moved, PAGE, "a file").unwrap();
            let wanted = (4 * (slot % 2) + slot / 2) as u8 + 1;
            assert!(queue.memory(slot).iter().all(|&byte| byte == wanted));
        }
        queue.memory(5).fill(0xee);
        queue.start(transfer(5, true));
        queue.wait(1, &mut ended).unwrap();
        let (slot, moved) = ended.pop().unwrap();
        assert_eq!((slot, moved.unwrap(), ended.len()), (5, PAGE, 0));
    }

    #[test]
    fn transfers_reach_the_file_they_name_by_every_interface() {
        for interface in Interface::ALL {
            let (_dir, paths) = images();
            let files = open_direct(&paths).unwrap();
            // A kernel may have io_uring forbidden; AIO every one has.
            let mut queue = match interface.queue(files, 6, PAGE) {
                Ok(queue) => queue,
                Err(error) => {
                    assert!(matches!(interface, Interface::Uring(_)), "{error}");
                    continue;
                }
            };
            read_and_write(&mut *queue);
            let bytes = std::fs::read(&paths[1]).unwrap();
            assert!(bytes[2 * PAGE..3 * PAGE].iter().all(|&byte| byte == 0xee));
        }
    }

    #[test]
    fn slow_transfers_take_their_time_together() {
        let (_dir, paths) = images();
        let devices = device::open_devices(&paths, &OpenOptions::default()).unwrap();
        let (clock, service) = (Clock::manual(0), Duration::from_millis(1));
        let mut queue = SlowQueue::new(devices, service, clock.clone(), 6, PAGE);
        read_and_write(&mut queue);
        // Six at once, then one.
        assert_eq!(clock.monotonic_ns(), 2_000_000);
        let outside = Transfer {
            slot: 0,
            file: 0,
            offset: 1 << 40,
            bytes: PAGE,
            write: false,
        };
        queue.start(outside);
        let mut ended = Vec::new();
        queue.wait(1, &mut ended).unwrap();
        assert!(ended[0].1.is_err());
    }

    #[test]
    fn a_queue_kept_busy_does_each_transfer_once_and_finds_what_is_from_elsewhere() {
        let (_dir, paths) = images();
        let run = |stamped: bool, write: bool| {
            let queue = Interface::Aio.queue(open_direct(&paths)?, 3, PAGE)?;
            let mut left = 0..8;
            let next = |slot| {
                let number = left.next()?;
                Some(Transfer {
                    slot,
                    file: number % 2,
                    offset: (number / 2 * PAGE) as u64,
                    bytes: PAGE,
                    write,
                })
            };
            let mut operation = keep_busy(queue, 3, stamped, next);
            let mut done = 0;
            loop {
                match operation()? {
                    0 => return Ok::<u64, Error>(done),
                    count => done += count,
                }
            }
        };
        assert_eq!(run(false, false).unwrap(), 8);
        // Nothing tells its place yet.
        assert!(matches!(run(true, false), Err(Error::Unable(_))));
        assert_eq!(run(true, true).unwrap(), 8);
        assert_eq!(run(true, false).unwrap(), 8);
        std::fs::write(&paths[1], b"short").unwrap();
        assert!(run(false, false).is_err());
    }

    #[test]
    fn too_many_transfers_name_the_remedy() {
        let (_dir, paths) = images();
        let files = open_direct(&paths).unwrap();
        let Err(Error::Unable(text)) = Interface::Aio.queue(files, 1 << 26, 1) else {
            panic!("a context for 64 Mi transfers");
        };
        assert!(
            text.contains("aio-max-nr") && text.contains("--depth"),
            "{text}"
        );
    }
}

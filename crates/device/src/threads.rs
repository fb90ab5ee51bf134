//! The backend for hosts without io_uring, and for who gets no ring: positioned reads and writes on a thread pool.

use crate::block::{BlockDevice, Durability, Operation, Request};
use crate::file::FileDevice;
use crate::queue::{Bell, Blocking, Ended, Kind, Part, Queue, Wake, panicked};
#[cfg(test)]
use base::atomic::Ordering;
use base::sync::{Mutex, rank};
use base::sys;
use base::thread::Pool;
use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Threads for an array of `devices`: enough to keep each of them busy, and few enough to
/// be cheap.
pub(crate) fn pool_size(devices: usize) -> usize {
    (devices * 2).clamp(4, 16)
}

/// See [`crate::BlockDevice::run`].
pub(crate) fn run(
    device: &FileDevice,
    pool: &Pool,
    requests: &mut [Request<'_>],
    meanwhile: Option<&mut dyn FnMut()>,
) {
    match (requests, meanwhile) {
        // Nothing to overlap with: the caller's own thread is the cheapest.
        ([request], None) => perform(device, request),
        (requests, meanwhile) => {
            pool.run(requests, &|request| perform(device, request), meanwhile);
        }
    }
}

/// Threads that work on one device's parts in flight, at most. They are the device's own: one that hangs takes none of another's.
pub(crate) const WORKERS: usize = 2;

/// What all owners have in flight on one device, in the order in which it came, as far as no thread has begun it.
#[derive(Default)]
pub(crate) struct Waiting {
    parts: VecDeque<Order>,
    workers: usize,
}

struct Order {
    part: Part,
    device: Arc<FileDevice>,
    told: Told,
}

/// Where an owner is told of what has ended.
#[derive(Clone)]
struct Told {
    ended: Arc<Mutex<Vec<Ended>>>,
    bell: Arc<Bell>,
}

impl Told {
    fn tell(&self, done: Ended) {
        self.ended.lock().push(done);
        self.bell.ring();
    }
}

/// What an owner has in flight on one device, each part on one of its pool's threads.
pub(crate) struct PoolQueue {
    device: Arc<FileDevice>,
    pool: Arc<Pool>,
    pushed: Vec<Part>,
    told: Told,
}

impl PoolQueue {
    pub fn new(device: Arc<FileDevice>, pool: Arc<Pool>, bell: Arc<Bell>) -> PoolQueue {
        PoolQueue {
            device,
            pool,
            pushed: Vec::new(),
            told: Told {
                ended: Arc::new(Mutex::new(rank::LEAF, Vec::new())),
                bell,
            },
        }
    }
}

/// A queue of one device by the threads that it has for this; where there are none either, its owner does what it starts.
pub(crate) fn queue(device: &Arc<FileDevice>, bell: &Arc<Bell>) -> Box<dyn Queue> {
    let device = Arc::clone(device);
    match device.own_pool() {
        Ok(pool) => Box::new(PoolQueue::new(device, pool, Arc::clone(bell))),
        Err(error) => {
            tracing::warn!(%error, "no threads either, one transfer is done at a time");
            Box::new(Blocking::new(device))
        }
    }
}

/// A thread of the pool does what waits for a device.
fn work(waiting: &Mutex<Waiting>) {
    loop {
        let next = {
            let mut waiting = waiting.lock();
            let next = waiting.parts.pop_front();
            waiting.workers -= usize::from(next.is_none());
            next
        };
        let Some(Order {
            mut part,
            device,
            told,
        }) = next
        else {
            return;
        };
        let result = match device.refuses(part.kind == Kind::Read) {
            Some(error) => Err(error),
            None => perform_part(&device, &mut part),
        };
        // Before anybody is told: the last of a pool's devices ends the pool, which no thread of its own may wait for.
        drop(device);
        told.tell(Ended { part, result });
    }
}

impl Queue for PoolQueue {
    fn push(&mut self, part: Part) {
        self.pushed.push(part);
    }

    fn ring(&mut self) {
        let fresh = {
            let mut waiting = self.device.waiting.lock();
            let orders = self.pushed.drain(..).map(|part| Order {
                part,
                device: Arc::clone(&self.device),
                told: self.told.clone(),
            });
            waiting.parts.extend(orders);
            let fresh = (WORKERS - waiting.workers).min(waiting.parts.len());
            waiting.workers += fresh;
            fresh
        };
        for _ in 0..fresh {
            let waiting = Arc::clone(&self.device.waiting);
            self.pool.give(move || work(&waiting));
        }
    }

    fn reap(&mut self, ended: &mut Vec<Ended>) {
        ended.append(&mut self.told.ended.lock());
    }

    fn wake(&self) -> Wake<'_> {
        match self.told.ended.lock().is_empty() {
            true => Wake::Bell,
            false => Wake::Now,
        }
    }

    fn cancel(&mut self, mine: &dyn Fn(u64) -> bool) {
        let mut gone: Vec<Part> = self.pushed.extract_if(.., |part| mine(part.user)).collect();
        {
            let mut waiting = self.device.waiting.lock();
            let of_ours = |told: &Told| Arc::ptr_eq(&told.ended, &self.told.ended);
            for order in std::mem::take(&mut waiting.parts) {
                match of_ours(&order.told) && mine(order.part.user) {
                    true => gone.push(order.part),
                    false => waiting.parts.push_back(order),
                }
            }
        }
        let gone = gone.into_iter().map(Ended::cancelled);
        self.told.ended.lock().extend(gone);
    }
}

/// A part by a plain call, which has failed if it panics: whoever does it has others to see to (queue, invariant 5).
pub(crate) fn perform_part(device: &FileDevice, part: &mut Part) -> io::Result<()> {
    let call = || {
        let mut request = Request::new(part.operation(), 0);
        perform(device, &mut request);
        request.error.map_or(Ok(()), Err)
    };
    // The panic has been reported.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(panicked()))
}

/// Performs one request on the calling thread. A request that has failed already is left.
pub(crate) fn perform(device: &FileDevice, request: &mut Request<'_>) {
    if request.error.is_some() {
        return;
    }
    #[cfg(test)]
    assert!(!device.panics.swap(false, Ordering::SeqCst), "on purpose");
    let done = match &mut request.operation {
        Operation::Read { offset, buf } => read_all(device, *offset, buf),
        Operation::Write {
            offset,
            buf,
            durability,
        } => write_all(device, *offset, buf, *durability),
        Operation::Flush => device.file.sync_data(),
    };
    request.error = done.err();
}

fn read_all(device: &FileDevice, mut offset: u64, mut buf: &mut [u8]) -> io::Result<()> {
    while !buf.is_empty() {
        let done = retry(|| device.file.read_at(buf, offset))?;
        let done = usable_progress(done, buf.len(), device.logical_block(), true)?;
        buf = &mut buf[done..];
        offset += done as u64;
    }
    Ok(())
}

fn write_all(
    device: &FileDevice,
    mut offset: u64,
    mut buf: &[u8],
    durability: Durability,
) -> io::Result<()> {
    // On a block device a data-sync write flushes the device at its end anyway, and forces
    // the write itself to the medium on top of that: write and flush is one step less.
    let flush_after = durability == Durability::Durable && device.block_device && device.direct();
    while !buf.is_empty() {
        let done = retry(|| match durability {
            Durability::Durable if !flush_after => sys::pwrite_dsync(&device.file, buf, offset),
            _ => device.file.write_at(buf, offset),
        })?;
        let done = usable_progress(done, buf.len(), device.logical_block(), false)?;
        buf = &buf[done..];
        offset += done as u64;
    }
    if flush_after {
        device.file.sync_data()?;
    }
    Ok(())
}

fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// How far a transfer of `len` bytes that moved `done` got: whole logical blocks only, since
/// the rest must start at one. No progress is an error, so that no loop is endless.
pub(crate) fn usable_progress(
    done: usize,
    len: usize,
    logical_block: u32,
    read: bool,
) -> io::Result<usize> {
    if done >= len {
        return Ok(len);
    }
    let whole = done / logical_block as usize * logical_block as usize;
    match (whole, read) {
        (0, true) => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the device ends before the requested bytes",
        )),
        (0, false) => Err(io::ErrorKind::WriteZero.into()),
        _ => Ok(whole),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::{AlignedBuf, Lent};
    use crate::file::{Engine, OpenOptions};
    use std::time::Duration;

    /// Its owner waited for ever for what the thread had in hand, and for what came behind it.
    #[test]
    fn a_part_whose_thread_panics_fails_and_the_others_go_on() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        crate::create_image(&path, 1 << 20).unwrap();
        let device = FileDevice::open(&path, &OpenOptions::default(), Engine::Caller).unwrap();
        let (device, bell) = (Arc::new(device), Arc::new(Bell::new()));
        let pool = Arc::new(Pool::start("test", WORKERS).unwrap());
        let mut queue = PoolQueue::new(Arc::clone(&device), Arc::clone(&pool), Arc::clone(&bell));
        for round in 0..20 {
            let panics = round % 2 == 0;
            device.panics.store(panics, Ordering::SeqCst);
            let mut lent = Lent::new(AlignedBuf::zeroed(8 * 4096));
            for user in 0..8 {
                let at = user as usize * 4096;
                queue.push(Part {
                    user,
                    device: 0,
                    kind: Kind::Read,
                    offset: 4096 * user,
                    segment: lent.lend(at..at + 4096),
                });
            }
            queue.ring();
            let mut ended = Vec::new();
            for _ in 0..100 {
                let rung = bell.rung();
                queue.reap(&mut ended);
                if ended.len() == 8 {
                    break;
                }
                bell.wait(rung, Some(Duration::from_millis(100)));
            }
            let failed = ended.iter().filter(|ended| ended.result.is_err()).count();
            assert_eq!((ended.len(), failed), (8, usize::from(panics)));
            for Ended { part, .. } in ended {
                lent.give_back(part.segment);
            }
        }
        pool.finish();
        assert_eq!(device.waiting.lock().workers, 0);
    }
}

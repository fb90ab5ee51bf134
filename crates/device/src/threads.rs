//! The backend for hosts without io_uring: positioned reads and writes on a thread pool.

use crate::block::{Durability, Operation, Request};
use crate::file::FileDevice;
use crate::queue::{Bell, Ended, Kind, Part, Queue, Wake};
use base::sync::{Mutex, rank};
use base::sys;
use base::thread::Pool;
use std::io;
use std::os::unix::fs::FileExt;
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

/// What an owner has in flight on one device, each part on one of the pool's threads.
pub(crate) struct PoolQueue {
    device: Arc<FileDevice>,
    pool: Arc<Pool>,
    pushed: Vec<Part>,
    ended: Arc<Mutex<Vec<Ended>>>,
    bell: Arc<Bell>,
}

impl PoolQueue {
    pub fn new(device: Arc<FileDevice>, pool: Arc<Pool>, bell: Arc<Bell>) -> PoolQueue {
        PoolQueue {
            device,
            pool,
            pushed: Vec::new(),
            ended: Arc::new(Mutex::new(rank::LEAF, Vec::new())),
            bell,
        }
    }
}

impl Queue for PoolQueue {
    fn push(&mut self, part: Part) {
        self.pushed.push(part);
    }

    fn ring(&mut self) {
        for part in self.pushed.drain(..) {
            let (ended, bell) = (Arc::clone(&self.ended), Arc::clone(&self.bell));
            let device = Arc::clone(&self.device);
            self.pool.give(move || {
                let done = match device.refuses(part.kind == Kind::Read) {
                    Some(error) => Ended {
                        part,
                        result: Err(error),
                    },
                    None => perform_part(&device, part),
                };
                drop(device);
                ended.lock().push(done);
                bell.ring();
            });
        }
    }

    fn reap(&mut self, ended: &mut Vec<Ended>) {
        ended.append(&mut self.ended.lock());
    }

    fn wake(&self) -> Wake<'_> {
        match self.ended.lock().is_empty() {
            true => Wake::Bell,
            false => Wake::Now,
        }
    }

    fn cancel(&mut self, mine: &dyn Fn(u64) -> bool) {
        let gone = self.pushed.extract_if(.., |part| mine(part.user));
        self.ended.lock().extend(gone.map(Ended::cancelled));
    }
}

fn perform_part(device: &FileDevice, mut part: Part) -> Ended {
    let mut request = Request::new(part.operation(), 0);
    perform(device, &mut request);
    let result = request.error.map_or(Ok(()), Err);
    Ended { part, result }
}

/// Performs one request on the calling thread. A request that has failed already is left.
pub(crate) fn perform(device: &FileDevice, request: &mut Request<'_>) {
    if request.error.is_some() {
        return;
    }
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
        let done = usable_progress(done, buf.len(), device.logical_block, true)?;
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
    let flush_after = durability == Durability::Durable && device.block_device && device.direct;
    while !buf.is_empty() {
        let done = retry(|| match durability {
            Durability::Durable if !flush_after => sys::pwrite_dsync(&device.file, buf, offset),
            _ => device.file.write_at(buf, offset),
        })?;
        let done = usable_progress(done, buf.len(), device.logical_block, false)?;
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

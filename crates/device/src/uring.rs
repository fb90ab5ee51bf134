//! The io_uring backend: one ring per device and thread.
//!
//! Owns the calling thread's rings and, during [`run`], the requests in flight on one.
//!
//! 1. A ring belongs to one thread and one device, so that nothing is shared and a slow
//!    device stalls only those who wait for it. It is made at the first I/O and dropped when
//!    the thread ends, or when the thread makes another ring after the device is gone.
//! 2. The kernel uses buffers of the caller between submission and completion. [`InFlight`]
//!    borrows them and does not go away, by return or by panic, before all have completed.
//! 3. `in_flight` never exceeds the ring's entries, so the submission queue never overflows
//!    and the completion queue, twice as long, loses nothing.
//!
//! A thread that cannot get a ring (out of descriptors) does its I/O by plain calls. Fork
//! before opening devices: a ring does not follow into the child.

pub(crate) mod raw;

use crate::block::{Durability, Operation, Request};
use crate::file::FileDevice;
use crate::reap::{self, Policy};
use crate::threads;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use std::cell::RefCell;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Weak};

const RING_ENTRIES: u32 = 64;
/// Largest single transfer; the kernel's own limit is just below 2 GiB.
const TRANSFER_MAX: usize = 1 << 30;
/// How often a request that the kernel turned away is submitted again before it is done by a
/// plain call instead.
const RETRIES_MAX: u8 = 16;

thread_local! {
    static RINGS: RefCell<Vec<(Weak<()>, IoUring)>> = const { RefCell::new(Vec::new()) };
}

/// Finds out whether this process may use io_uring and it has all that is needed.
pub(crate) fn probe() -> io::Result<()> {
    let ring = make_ring(2)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE];
    if needed.iter().all(|&code| probe.is_supported(code)) {
        Ok(())
    } else {
        Err(io::ErrorKind::Unsupported.into())
    }
}

fn make_ring(entries: u32) -> io::Result<IoUring> {
    // Completions are run when the owner waits, not by interrupting it; kernels before 6.1
    // do not know this and do without.
    IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(entries)
        .or_else(|_| IoUring::builder().build(entries))
}

fn take_ring(device: &FileDevice) -> io::Result<IoUring> {
    let kept = RINGS.try_with(|rings| {
        let mut rings = rings.borrow_mut();
        let mine = |(id, _): &(Weak<()>, IoUring)| std::ptr::eq(id.as_ptr(), &*device.id);
        match rings.iter().position(mine) {
            Some(at) => Some(rings.swap_remove(at).1),
            None => {
                rings.retain(|(id, _)| id.strong_count() > 0);
                None
            }
        }
    });
    match kept {
        Ok(Some(ring)) => Ok(ring),
        // While a thread ends its table is gone: a ring for this batch alone.
        Ok(None) | Err(_) => make_ring(RING_ENTRIES),
    }
}

fn keep_ring(device: &FileDevice, ring: IoUring) {
    let entry = (Arc::downgrade(&device.id), ring);
    // An error means that the thread ends: the ring is dropped with the closure.
    let kept = RINGS.try_with(move |rings| rings.borrow_mut().push(entry));
    tracing::trace!(kept = kept.is_ok(), "ring");
}

/// See [`crate::BlockDevice::run`].
pub(crate) fn run(
    device: &FileDevice,
    requests: &mut [Request<'_>],
    meanwhile: Option<&mut dyn FnMut()>,
) {
    if let ([request], None, Policy::Interrupt) = (&mut *requests, &meanwhile, Policy::default())
        && call_is_as_good(device, request)
    {
        threads::perform(device, request);
        return;
    }
    let mut ring = match take_ring(device) {
        Ok(ring) => ring,
        Err(error) => {
            tracing::debug!(%error, "no ring for this thread");
            if let Some(meanwhile) = meanwhile {
                meanwhile();
            }
            for request in requests {
                threads::perform(device, request);
            }
            return;
        }
    };
    let mut batch = InFlight::new(&mut ring, device, requests);
    batch.fill();
    if let Some(meanwhile) = meanwhile {
        reap::start(batch.ring);
        meanwhile();
    }
    batch.finish();
    drop(batch);
    keep_ring(device, ring);
}

/// Blocking in the kernel for one request is what a plain call does, without the ring's
/// detour (for a flush, through a worker thread of the kernel's). Batches on other devices,
/// if any, are in flight already. A durable write to a block device is the exception: a call
/// flushes the whole device after a write that was forced to the medium by itself.
fn call_is_as_good(device: &FileDevice, request: &Request<'_>) -> bool {
    let durable = matches!(
        request.operation,
        Operation::Write {
            durability: Durability::Durable,
            ..
        }
    );
    !(durable && device.block_device)
}

#[derive(Clone, Copy, Default)]
struct Progress {
    done: usize,
    retries: u8,
}

/// Requests of one batch on one ring (invariant 2).
struct InFlight<'r, 'b, 'a> {
    ring: &'r mut IoUring,
    device: &'r FileDevice,
    requests: &'b mut [Request<'a>],
    progress: Vec<Progress>,
    /// The next request that was never submitted.
    next: usize,
    /// Requests to submit again.
    again: Vec<usize>,
    in_flight: usize,
}

impl<'r, 'b, 'a> InFlight<'r, 'b, 'a> {
    fn new(ring: &'r mut IoUring, device: &'r FileDevice, requests: &'b mut [Request<'a>]) -> Self {
        InFlight {
            ring,
            device,
            progress: vec![Progress::default(); requests.len()],
            requests,
            next: 0,
            again: Vec::new(),
            in_flight: 0,
        }
    }

    /// Queues requests while the ring has room (invariant 3).
    fn fill(&mut self) {
        while self.in_flight < RING_ENTRIES as usize {
            let Some(index) = self.again.pop().or_else(|| self.take_next()) else {
                return;
            };
            let entry = self.entry(index);
            // SAFETY: the entry's buffer is borrowed by `requests` until this `InFlight` is
            // gone, and that waits for the completion (invariant 2). The descriptor is open as
            // long as `device`.
            let queued = unsafe { self.ring.submission().push(&entry) };
            queued.expect("the submission queue holds all in flight");
            self.in_flight += 1;
        }
    }

    /// The next request to submit; those that failed before are passed over.
    fn take_next(&mut self) -> Option<usize> {
        let skip = self.requests[self.next..]
            .iter()
            .position(|r| r.error.is_none());
        let Some(skip) = skip else {
            self.next = self.requests.len();
            return None;
        };
        let index = self.next + skip;
        self.next = index + 1;
        Some(index)
    }

    fn entry(&mut self, index: usize) -> squeue::Entry {
        let fd = types::Fd(self.device.file.as_raw_fd());
        let done = self.progress[index].done;
        let entry = match &mut self.requests[index].operation {
            Operation::Read { offset, buf } => {
                let rest = &mut buf[done..];
                let len = rest.len().min(TRANSFER_MAX) as u32;
                opcode::Read::new(fd, rest.as_mut_ptr(), len)
                    .offset(*offset + done as u64)
                    .build()
            }
            Operation::Write {
                offset,
                buf,
                durability,
            } => {
                let rest = &buf[done..];
                let len = rest.len().min(TRANSFER_MAX) as u32;
                let flags = match durability {
                    Durability::Volatile | Durability::Checked => 0,
                    Durability::Durable => libc::RWF_DSYNC,
                };
                opcode::Write::new(fd, rest.as_ptr(), len)
                    .offset(*offset + done as u64)
                    .rw_flags(flags)
                    .build()
            }
            Operation::Flush => opcode::Fsync::new(fd)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
        };
        entry.user_data(index as u64)
    }

    /// Submits and waits until every request has ended.
    fn finish(&mut self) {
        loop {
            self.fill();
            if self.in_flight == 0 {
                return;
            }
            // With more to submit, the first free entry is worth waking up for.
            let more = self.next < self.requests.len();
            let want = if more { 1 } else { self.in_flight };
            reap::wait(self.ring, Policy::default(), want);
            self.collect();
        }
    }

    fn collect(&mut self) {
        let mut ended = [(0usize, 0i32); RING_ENTRIES as usize];
        loop {
            let mut count = 0;
            for (cqe, place) in self.ring.completion().zip(&mut ended) {
                *place = (cqe.user_data() as usize, cqe.result());
                count += 1;
            }
            if count == 0 {
                return;
            }
            for &(index, result) in &ended[..count] {
                self.in_flight -= 1;
                self.complete(index, result);
            }
        }
    }

    fn complete(&mut self, index: usize, result: i32) {
        let request = &mut self.requests[index];
        let progress = &mut self.progress[index];
        let moved = match usize::try_from(result) {
            Ok(moved) => moved,
            Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => {
                progress.retries += 1;
                if progress.retries < RETRIES_MAX {
                    self.again.push(index);
                } else {
                    threads::perform(self.device, request);
                }
                return;
            }
            Err(_) => {
                request.error = Some(io::Error::from_raw_os_error(-result));
                return;
            }
        };
        let left = request.operation.bytes() - progress.done;
        let read = matches!(request.operation, Operation::Read { .. });
        match threads::usable_progress(moved, left, self.device.logical_block, read) {
            Ok(moved) if moved == left => {}
            Ok(moved) => {
                progress.done += moved;
                progress.retries = 0;
                self.again.push(index);
            }
            Err(error) => request.error = Some(error),
        }
    }
}

impl Drop for InFlight<'_, '_, '_> {
    /// Reached with requests in flight only by a panic in between: waits for them.
    fn drop(&mut self) {
        while self.in_flight > 0 {
            reap::wait(self.ring, Policy::default(), self.in_flight);
            self.collect();
        }
    }
}

//! Reads into memory in many pieces, by io_uring: a ring of its own for each device and thread.
//!
//! The kernel uses the memory, and the list of its pieces, between submission and completion: [`InFlight`] does not go away, by return
//! or by panic, before all has completed.

use super::OfThread;
use crate::file::FileDevice;
use crate::kept::Kept;
use crate::queue::Kind;
use crate::reap::{Class, Source, enter};
use crate::vectored::{Vectored, copied};
use base::clock;
use io_uring::{IoUring, opcode, squeue, types};
use std::cell::RefCell;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Requests in flight on a device.
const ENTRIES: usize = 16;

thread_local! {
    static RINGS: RefCell<Kept<OfThread<IoUring>>> = const { RefCell::new(Kept::new()) };
}

fn take_ring(device: &FileDevice) -> Option<OfThread<IoUring>> {
    match RINGS.try_with(|rings| rings.borrow_mut().take(&device.id)) {
        Ok(Some(ring)) => Some(ring),
        // While a thread ends its table is gone: a ring for this batch alone.
        Ok(None) | Err(_) => super::make_counted(true, || {
            super::make_ring(ENTRIES as u32, super::Sort::Ordinary)
        })
        .ok(),
    }
}

fn keep_ring(device: &FileDevice, ring: OfThread<IoUring>) {
    if ring.may_stay() {
        let kept = RINGS.try_with(|rings| rings.borrow_mut().keep(&device.id, ring));
        tracing::trace!(kept = kept.is_ok(), "ring");
    }
}

/// See [`crate::BlockDevice::read_vectored`].
pub(crate) fn run(
    device: &FileDevice,
    requests: &mut [Vectored<'_>],
    mut meanwhile: Option<&mut dyn FnMut()>,
) {
    for request in requests.iter_mut() {
        request.error = device.refuses(true);
    }
    let Some(mut ring) = take_ring(device) else {
        return copied(device, requests, meanwhile);
    };
    let mut again: Vec<usize> = Vec::new();
    let reaper = &device.reaper;
    let mut times = reaper.take();
    for (chunk, requests) in requests.chunks(ENTRIES).enumerate() {
        // Before what waits for the kernel, so that it goes after that.
        let lists: Vec<Vec<libc::iovec>> = requests.iter().map(pieces).collect();
        let largest = requests.iter().map(|request| request.len).max();
        let class = Class::of(Kind::Read, largest.unwrap_or(0), requests.len());
        let group = reaper.begin(&mut times, class);
        let mut flight = InFlight {
            ring: &mut ring.ring,
            left: 0,
        };
        for (at, (request, list)) in requests.iter().zip(&lists).enumerate() {
            if request.error.is_none() {
                flight.push(&entry(device, request, list).user_data(at as u64));
            }
        }
        if let Some(meanwhile) = meanwhile.take() {
            enter::start(flight.ring);
            meanwhile();
        }
        if flight.left > 0 {
            reaper.wait(&mut times, group, &mut flight);
        }
        flight.finish(|at, moved| {
            if usize::try_from(moved).ok() != Some(requests[at].len) {
                again.push(chunk * ENTRIES + at);
            }
        });
    }
    reaper.keep(times);
    keep_ring(device, ring);
    for at in again {
        copied(device, &mut requests[at..=at], None);
    }
}

fn pieces(request: &Vectored<'_>) -> Vec<libc::iovec> {
    let piece = |memory: &crate::buf::Shared<'_>| libc::iovec {
        iov_base: memory.start().cast(),
        iov_len: memory.len(),
    };
    request.memory.iter().map(piece).collect()
}

fn entry(device: &FileDevice, request: &Vectored<'_>, list: &[libc::iovec]) -> squeue::Entry {
    let fd = types::Fd(device.file.as_raw_fd());
    let (start, count) = (list.as_ptr(), list.len() as u32);
    let read = opcode::Readv::new(fd, start, count);
    read.offset(request.offset).build()
}

/// Requests that the kernel has.
struct InFlight<'a> {
    ring: &'a mut IoUring,
    left: usize,
}

impl InFlight<'_> {
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the pieces, and their list, are there until this is dropped, which waits for the kernel: they are borrowed by
        // whoever made it, and declared before it or outlive the call.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("as many entries as requests in flight");
        self.left += 1;
    }

    /// Waits for all; `each` is told which ended, and with what.
    fn finish(&mut self, mut each: impl FnMut(usize, i32)) {
        while self.left > 0 {
            if self.ring.completion().len() < self.left {
                enter::wait(self.ring, self.left);
            }
            while let Some(entry) = self.ring.completion().next() {
                self.left -= 1;
                each(entry.user_data() as usize, entry.result());
            }
        }
    }
}

impl Source for InFlight<'_> {
    fn is_there(&mut self) -> bool {
        let submission = self.ring.submission();
        // What the kernel did not take at once it is given again.
        let (left, told) = (!submission.is_empty(), submission.taskrun());
        drop(submission);
        if left || told {
            enter::start(self.ring);
        }
        self.ring.completion().len() >= self.left
    }

    fn start(&mut self) {
        enter::start(self.ring);
    }

    fn sleep(&mut self, until: Option<u64>) {
        let left = |until: u64| Duration::from_nanos(until.saturating_sub(clock::now_ns()));
        enter::wait_for(self.ring, self.left, until.map(left));
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.finish(|_, _| {});
    }
}

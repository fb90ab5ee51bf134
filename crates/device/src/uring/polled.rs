//! Rings that poll the device: nothing tells of what has ended there, until somebody looks.
//!
//! Only transfers past the page cache of devices with queues that are polled go there, and none that flush; a thread that would sleep
//! until the kernel wakes it uses its ordinary ring. So a device may have two rings of a thread, and a batch is on one of them.

use super::ring::Ring;
use super::{RING_ENTRIES, Sort, builder};
use crate::block::{Durability, Operation, Request};
use crate::buf::AlignedBuf;
use crate::reap::{Costs, Source, enter};
use base::clock;
use io_uring::{IoUring, opcode, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Longest sleep of who waits for a transfer that is late.
const PAUSE_MAX_NS: u64 = 1_000_000;

/// On which ring threads that look for what they wait for have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReapRing {
    /// One of whose completions the device tells by an interrupt.
    #[default]
    Ordinary,
    /// One that polls the device, which does not interrupt anybody; of devices that have no queues for that the ordinary one.
    Iopoll,
}

impl ReapRing {
    pub const ALL: [ReapRing; 2] = [ReapRing::Ordinary, ReapRing::Iopoll];

    pub fn name(self) -> &'static str {
        match self {
            ReapRing::Ordinary => "ordinary",
            ReapRing::Iopoll => "iopoll",
        }
    }

    /// The one that is called so.
    pub fn parse(name: &str) -> Option<ReapRing> {
        ReapRing::ALL.into_iter().find(|ring| ring.name() == name)
    }
}

/// Whether that can be on such a ring.
pub(super) fn takes(requests: &[Request<'_>]) -> bool {
    let transfer = |request: &Request<'_>| match request.operation {
        Operation::Read { .. } => true,
        Operation::Write { durability, .. } => durability != Durability::Durable,
        Operation::Flush => false,
    };
    requests.len() <= RING_ENTRIES as usize && requests.iter().all(transfer)
}

/// Reads the first block by such a ring, which tells whether the kernel does that.
pub(crate) fn try_read(file: &File) -> io::Result<()> {
    let mut ring = super::make_ring(2, Sort::Polled)?;
    let mut block = AlignedBuf::zeroed(4096);
    let (fd, len) = (types::Fd(file.as_raw_fd()), block.len() as u32);
    let entry = opcode::Read::new(fd, block.as_mut_ptr(), len).build();
    // SAFETY: nobody else uses the memory before the completion is there, which is waited for whatever happens.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.map_err(io::Error::other)?;
    loop {
        enter::wait(&mut ring, 1);
        if let Some(done) = ring.completion().next() {
            return match done.result() {
                error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
                _ => Ok(()),
            };
        }
    }
}

pub(super) fn build(entries: u32) -> io::Result<IoUring> {
    builder()
        .setup_iopoll()
        .setup_single_issuer()
        .build(entries)
        .or_else(|_| builder().setup_iopoll().build(entries))
}

/// The completions of all that is in flight on such a ring. Nobody is woken by them: who sleeps does so for a set time.
pub(super) struct Looked<'a>(pub &'a mut Ring);

impl Source for Looked<'_> {
    fn is_there(&mut self) -> bool {
        let want = self.0.in_flight();
        self.0.has(want)
    }

    fn start(&mut self) {
        self.0.start();
    }

    fn found(&self) -> Option<usize> {
        Some(self.0.found())
    }

    fn sleep(&mut self, until: Option<u64>) {
        self.0.start();
        if let Some(until) = until {
            return clock::nap(until.saturating_sub(clock::now_ns()));
        }
        let (mut pause, mut found) = (Costs::get().shortest_ns, self.0.found());
        while !self.is_there() {
            // A look that found something may have stopped before the end.
            if std::mem::replace(&mut found, self.0.found()) == self.0.found() {
                clock::nap(pause);
                pause = (2 * pause).min(PAUSE_MAX_NS);
            }
        }
    }
}

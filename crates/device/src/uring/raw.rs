//! Transfers by one ring over some files, with nothing of Sheaf between: what its own way to devices is measured by.
//!
//! A floor for a program that does as well as the kernel lets it: one ring and one call of the kernel for all devices,
//! registered files, registered memory where the kernel takes it, and no accounting.
//!
//! 1. A slot is idle or in flight. While it is in flight the kernel alone uses its memory; [`RawQueue::memory`] refuses it.
//! 2. The ring has as many entries as there are slots or more, and a slot is in flight once at most: no queue overflows.
//! 3. A queue that is dropped waits for what is in flight before its memory goes.

use crate::buf::AlignedBuf;
use crate::reap::enter;
use crate::uring::builder;
use io_uring::{IoUring, opcode, squeue, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// When the kernel does what is left to do of a request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Only when the ring's one thread waits for completions, as in Sheaf's own rings.
    Deferred,
    /// When a thread enters the kernel anyway, of a ring that several may use.
    Cooperative,
}

/// How a transfer ended: its slot, and the bytes moved.
pub type Ended = (usize, io::Result<usize>);

/// Transfers on some files; see the module's head. To be used by the thread that made it.
pub struct RawQueue {
    ring: IoUring,
    /// Open as long as they are registered.
    _files: Vec<File>,
    memory: Vec<AlignedBuf>,
    /// The memory is registered, slot by slot.
    registered: bool,
    busy: Vec<bool>,
    in_flight: usize,
}

impl RawQueue {
    /// A queue of `slots` transfers of up to `bytes` bytes each.
    ///
    /// # Errors
    /// This process may not use io_uring, or not with so many entries.
    pub fn new(
        files: Vec<File>,
        slots: usize,
        bytes: usize,
        completion: Completion,
    ) -> io::Result<RawQueue> {
        let entries = u32::try_from(slots.max(1)).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut builder = builder();
        match completion {
            Completion::Deferred => builder.setup_single_issuer().setup_defer_taskrun(),
            Completion::Cooperative => builder.setup_coop_taskrun().setup_taskrun_flag(),
        };
        let ring: IoUring = builder.build(entries)?;
        let descriptors: Vec<i32> = files.iter().map(File::as_raw_fd).collect();
        ring.submitter().register_files(&descriptors)?;
        let mut memory: Vec<AlignedBuf> = (0..slots).map(|_| AlignedBuf::zeroed(bytes)).collect();
        let vectors: Vec<libc::iovec> = memory
            .iter_mut()
            .map(|buf| libc::iovec {
                iov_base: buf.as_mut_ptr().cast(),
                iov_len: bytes,
            })
            .collect();
        // SAFETY: the buffers are neither moved nor freed before the ring is gone: fields are dropped in order.
        let registered = unsafe { ring.submitter().register_buffers(&vectors) };
        if let Err(error) = &registered {
            tracing::warn!(
                "memory is not registered with io_uring, which makes it a little slower: {error}"
            );
        }
        let registered = registered.is_ok();
        Ok(RawQueue {
            ring,
            _files: files,
            memory,
            registered,
            busy: vec![false; slots],
            in_flight: 0,
        })
    }

    /// A slot's memory: what was read, or what is to be written.
    ///
    /// # Panics
    /// The slot is in flight.
    pub fn memory(&mut self, slot: usize) -> &mut [u8] {
        assert!(!self.busy[slot], "slot {slot} is in flight");
        &mut self.memory[slot]
    }

    /// Puts a transfer of `bytes` bytes between an idle slot and a file; [`wait`](RawQueue::wait) submits it.
    ///
    /// # Panics
    /// The slot is in flight or too small, or there is no such file.
    pub fn start(&mut self, slot: usize, file: usize, offset: u64, bytes: usize, write: bool) {
        assert!(!self.busy[slot], "slot {slot} is in flight");
        assert!(file < self._files.len(), "there is no file {file}");
        let entry = self.entry(slot, file, offset, bytes, write);
        // SAFETY: the entry's memory is the slot's, which is busy from here on until the completion (invariants 1 and 3); its
        // file is registered.
        let queued = unsafe { self.ring.submission().push(&entry) };
        queued.expect("the submission queue holds all slots");
        self.busy[slot] = true;
        self.in_flight += 1;
    }

    fn entry(
        &mut self,
        slot: usize,
        file: usize,
        offset: u64,
        bytes: usize,
        write: bool,
    ) -> squeue::Entry {
        let (file, index) = (types::Fixed(file as u32), slot as u16);
        let memory = &mut self.memory[slot][..bytes];
        let (address, bytes) = (memory.as_mut_ptr(), bytes as u32);
        let entry = match (self.registered, write) {
            (true, false) => opcode::ReadFixed::new(file, address, bytes, index)
                .offset(offset)
                .build(),
            (true, true) => opcode::WriteFixed::new(file, address, bytes, index)
                .offset(offset)
                .build(),
            (false, false) => opcode::Read::new(file, address, bytes)
                .offset(offset)
                .build(),
            (false, true) => opcode::Write::new(file, address, bytes)
                .offset(offset)
                .build(),
        };
        entry.user_data(slot as u64)
    }

    /// Submits what was started and waits until at least `least` transfers have ended, or all; adds those that have.
    pub fn wait(&mut self, least: usize, ended: &mut Vec<Ended>) {
        let least = least.min(self.in_flight);
        let before = ended.len();
        loop {
            let want = least.saturating_sub(ended.len() - before);
            enter::wait(&mut self.ring, want);
            for entry in self.ring.completion() {
                let (slot, result) = (entry.user_data() as usize, entry.result());
                self.busy[slot] = false;
                self.in_flight -= 1;
                let moved =
                    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
                ended.push((slot, moved));
            }
            if ended.len() - before >= least {
                return;
            }
        }
    }
}

impl Drop for RawQueue {
    fn drop(&mut self) {
        let mut ended = Vec::new();
        self.wait(self.in_flight, &mut ended);
        // The kernel takes a ring apart later, and with it lets go of registered files: a file system of theirs could not be unmounted meanwhile. If it refuses, it
        // lets go then.
        let _ = self.ring.submitter().unregister_files();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn queue(completion: Completion, slots: usize) -> Option<RawQueue> {
        let files = vec![tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        match RawQueue::new(files, slots, PAGE, completion) {
            Ok(queue) => Some(queue),
            // Here as elsewhere the machine may not have it.
            Err(_) => crate::uring::probe().map(|()| panic!("no queue")).ok(),
        }
    }

    #[test]
    fn what_is_written_is_read_back_by_any_slot_of_either_ring() {
        for completion in [Completion::Deferred, Completion::Cooperative] {
            let Some(mut queue) = queue(completion, 5) else {
                return base::skip("io_uring");
            };
            let mut ended = Vec::new();
            for slot in 0..5 {
                queue.memory(slot).fill(slot as u8 + 1);
                queue.start(slot, slot % 2, slot as u64 * PAGE as u64, PAGE, true);
            }
            queue.wait(5, &mut ended);
            let mut slots: Vec<usize> = ended.iter().map(|(slot, _)| *slot).collect();
            slots.sort_unstable();
            assert_eq!(slots, [0, 1, 2, 3, 4]);
            ended.clear();
            for slot in 0..5 {
                let other = 4 - slot;
                queue.start(slot, other % 2, other as u64 * PAGE as u64, PAGE, false);
            }
            queue.wait(usize::MAX, &mut ended);
            assert!(
                ended
                    .iter()
                    .all(|(_, moved)| *moved.as_ref().unwrap() == PAGE)
            );
            for slot in 0..5 {
                assert!(queue.memory(slot).iter().all(|&b| b == 5 - slot as u8));
            }
            // Goes with a transfer in flight.
            queue.start(0, 0, 0, PAGE, false);
        }
    }

    #[test]
    fn the_end_of_a_file_is_a_short_transfer() {
        let Some(mut queue) = queue(Completion::Deferred, 1) else {
            return base::skip("io_uring");
        };
        let mut ended = Vec::new();
        queue.start(0, 0, 0, PAGE, true);
        queue.wait(1, &mut ended);
        queue.start(0, 0, PAGE as u64 - 6, PAGE, false);
        queue.wait(1, &mut ended);
        assert_eq!(*ended[1].1.as_ref().unwrap(), 6);
    }
}

//! Entries of a FUSE connection on one io_uring of one thread: each waits in the kernel for a request, comes back with it,
//! and goes again with the answer and the wish for the next one, in one system call for both.
//!
//! The protocol is that of `fs/fuse/dev_uring.c` of Linux 6.14 and later.
//!
//! Invariants:
//! 1. An entry is the kernel's from its registration, or from [`Ring::answer`], until its completion is taken; else it is ours. The kernel
//!    writes to its memory only while the entry is its own, and slices of that memory exist only while it is ours.
//! 2. An entry's memory is not freed while the entry is the kernel's: a ring that is dropped before leaves it where it is.
//! 3. A ring is used by the thread that made it alone.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::{IoUring, cqueue, squeue::Entry128};

use super::super::{DATA_MAX, PAGE, PageMemory};
use crate::{abi, sys};

const OP_URING_CMD: u8 = 46;
const CMD_REGISTER: u32 = 1;
const CMD_COMMIT_AND_FETCH: u32 = 2;

/// How often an entry that the kernel is not ready for is registered again.
const REFUSALS_MAX: u32 = 100_000;

/// `struct fuse_uring_req_header`.
#[repr(C)]
struct Head {
    in_out: [u8; 128],
    op_in: [u8; 128],
    flags: u64,
    commit_id: u64,
    payload_len: u32,
    padding: u32,
    reserved: u64,
}

const _: () = assert!(size_of::<Head>() == 288);

/// An entry of the submission queue: what a command to /dev/fuse needs of it. In `command`, `struct fuse_uring_cmd_req`.
#[repr(C)]
struct Submission {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: RawFd,
    command_op: u32,
    padding: u32,
    address: u64,
    len: u32,
    command_flags: u32,
    user_data: u64,
    buffer: u16,
    personality: u16,
    file_index: u32,
    command_req_flags: u64,
    commit_id: u64,
    queue: u16,
    rest: [u16; 3],
    unused: [u64; 7],
}

const _: () = assert!(size_of::<Submission>() == size_of::<Entry128>());

/// What an answer's bytes are.
pub enum Body<'a> {
    /// So many bytes of the room that [`Ring::request`] gave.
    InPlace(usize),
    Bytes(&'a [u8]),
}

struct Entry {
    queue: u16,
    /// Boxed: the kernel keeps its address.
    head: Box<Head>,
    /// A page, and the payload.
    pages: PageMemory,
    /// Head and payload, as the kernel is told at the registration.
    areas: Box<[libc::iovec; 2]>,
    /// Invariant 1.
    with_kernel: bool,
    /// Registrations that the kernel was not ready for.
    refused: u32,
}

/// See the module's head.
pub struct Ring {
    ring: IoUring<Entry128>,
    file: Arc<File>,
    entries: Vec<Entry>,
}

// SAFETY: the pointers in `areas` are into memory that the entry owns; the ring is used by one thread at a time, since all
// calls take `&mut self`.
unsafe impl Send for Ring {}

/// A ring for so many entries.
pub fn build(entries: u32) -> Result<IoUring<Entry128>> {
    IoUring::<Entry128>::builder()
        .dontfork()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(entries)
}

impl Entry {
    fn new(queue: u16) -> Result<Entry> {
        let mut head = Box::new(Head {
            in_out: [0; 128],
            op_in: [0; 128],
            flags: 0,
            commit_id: 0,
            payload_len: 0,
            padding: 0,
            reserved: 0,
        });
        let mut pages = PageMemory::new(PAGE + DATA_MAX)?;
        let payload = &mut pages.bytes_mut()[PAGE..];
        let areas = Box::new([
            libc::iovec {
                iov_base: (&raw mut *head).cast(),
                iov_len: size_of::<Head>(),
            },
            libc::iovec {
                iov_base: payload.as_mut_ptr().cast(),
                iov_len: payload.len(),
            },
        ]);
        Ok(Entry {
            queue,
            head,
            pages,
            areas,
            with_kernel: false,
            refused: 0,
        })
    }
}

impl Ring {
    /// A ring with an entry for each of these queues, for the calling thread.
    pub fn new(file: Arc<File>, queues: &[u16]) -> Result<Ring> {
        let entries: Result<Vec<Entry>> = queues.iter().map(|&queue| Entry::new(queue)).collect();
        Ok(Ring {
            ring: build(queues.len().next_power_of_two() as u32)?,
            file,
            entries: entries?,
        })
    }

    /// Hands all entries to the kernel.
    pub fn register(&mut self) -> Result<()> {
        (0..self.entries.len()).try_for_each(|i| self.register_one(i))
    }

    fn register_one(&mut self, i: usize) -> Result<()> {
        let areas = self.entries[i].areas.as_ptr().expose_provenance() as u64;
        self.push(i, CMD_REGISTER, areas, 2, 0)
    }

    /// Waits for an entry with a request, and returns which one it is; what was answered goes to the kernel first. `None`: no
    /// entry will have one any more.
    pub fn next(&mut self) -> Result<Option<usize>> {
        while self.entries.iter().any(|entry| entry.with_kernel) {
            // Before another request is taken: who waits for an answer does not wait for that one as well. One that is there already is not waited for,
            // so this is the one system call.
            if !self.ring.submission().is_empty() {
                self.submit(1)?;
            }
            let Some((i, result)) = self.take()? else {
                self.submit(1)?;
                continue;
            };
            self.entries[i].with_kernel = false;
            match -result {
                ..=0 => return Ok(Some(i)),
                errno if is_end(errno, || !sys::has_failed(self.file.as_fd())) => {}
                // The kernel has not come to the end of INIT yet.
                libc::EAGAIN if self.entries[i].refused < REFUSALS_MAX => {
                    self.entries[i].refused += 1;
                    base::thread::yield_now();
                    self.register_one(i)?;
                }
                errno => return Err(Error::from_raw_os_error(errno)),
            }
        }
        Ok(None)
    }

    /// Submits what was pushed and waits for so many completions, or for less if something comes between.
    fn submit(&mut self, want: usize) -> Result<()> {
        match self.ring.submit_and_wait(want) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => Ok(()),
                Some(libc::EAGAIN | libc::EBUSY) => {
                    base::thread::yield_now();
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    fn take(&mut self) -> Result<Option<(usize, i32)>> {
        let completion: Option<cqueue::Entry> = self.ring.completion().next();
        let Some(completion) = completion else {
            return Ok(None);
        };
        let i = completion.user_data() as usize;
        match i < self.entries.len() {
            true => Ok(Some((i, completion.result()))),
            false => Err(ErrorKind::InvalidData.into()),
        }
    }

    /// The request that an entry came with, as /dev/fuse would have it, and room for the data of an answer, which is empty where
    /// the request has data itself. `None`: its lengths contradict each other.
    pub fn request(&mut self, i: usize) -> Option<(&[u8], &mut [u8])> {
        let entry = &mut self.entries[i];
        assert!(!entry.with_kernel, "invariant 1");
        const IN: usize = size_of::<abi::InHeader>();
        let head = &entry.head;
        let len = u32::from_ne_bytes(*head.in_out.first_chunk()?) as usize;
        let payload = head.payload_len as usize;
        let own = len.checked_sub(IN + payload)?;
        if own > head.op_in.len() || payload > DATA_MAX {
            return None;
        }
        let start = PAGE - IN - own;
        let front = &mut entry.pages.bytes_mut()[start..PAGE];
        front[..IN].copy_from_slice(&head.in_out[..IN]);
        front[IN..].copy_from_slice(&head.op_in[..own]);
        if payload > 0 {
            return Some((&entry.pages.bytes()[start..PAGE + payload], &mut []));
        }
        let (front, room) = entry.pages.bytes_mut().split_at_mut(PAGE);
        Some((&front[start..], room))
    }

    /// The number that the answer to the request of an entry needs.
    pub fn unique(&self, i: usize) -> u64 {
        let header = &self.entries[i].head.in_out;
        // `struct fuse_in_header`: after its length and the opcode.
        header[8..]
            .first_chunk()
            .map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    }

    /// Answers the request of an entry, and asks for the next one, when [`next`](Self::next) is called.
    pub fn answer(&mut self, i: usize, header: &abi::OutHeader, body: Body<'_>) -> Result<()> {
        use zerocopy::IntoBytes;
        let entry = &mut self.entries[i];
        let len = match body {
            Body::InPlace(len) => len,
            Body::Bytes(bytes) => {
                let payload = &mut entry.pages.bytes_mut()[PAGE..];
                let room = payload.get_mut(..bytes.len());
                room.ok_or(ErrorKind::InvalidInput)?.copy_from_slice(bytes);
                bytes.len()
            }
        };
        entry.head.in_out[..size_of::<abi::OutHeader>()].copy_from_slice(header.as_bytes());
        entry.head.payload_len = len as u32;
        let commit = entry.head.commit_id;
        self.push(i, CMD_COMMIT_AND_FETCH, 0, 0, commit)
    }

    fn push(
        &mut self,
        i: usize,
        command_op: u32,
        address: u64,
        len: u32,
        commit_id: u64,
    ) -> Result<()> {
        let entry = &mut self.entries[i];
        let submission = Submission {
            opcode: OP_URING_CMD,
            flags: 0,
            priority: 0,
            fd: self.file.as_raw_fd(),
            command_op,
            padding: 0,
            address,
            len,
            command_flags: 0,
            user_data: i as u64,
            buffer: 0,
            personality: 0,
            file_index: 0,
            command_req_flags: 0,
            commit_id,
            queue: entry.queue,
            rest: [0; 3],
            unused: [0; 7],
        };
        // SAFETY: both are plain bytes of this size, asserted above, without padding; the layout is that of `struct io_uring_sqe`.
        let submission: Entry128 = unsafe { std::mem::transmute(submission) };
        // SAFETY: the memory that the command names is the entry's, which is the kernel's from now on (invariants 1 and 2); the file is open as
        // long as the ring lives.
        let pushed = unsafe { self.ring.submission().push(&submission) };
        // There is a place for each entry.
        pushed.map_err(|_| ErrorKind::StorageFull)?;
        entry.with_kernel = true;
        Ok(())
    }
}

/// Whether an entry that came back with an error has none because the file system was unmounted, or its connection aborted. While that goes on,
/// an answer may find its request gone (`ENOENT`), or its entry taken away (`EIO`), which are faults of this side else. Asks for the connection where that decides.
fn is_end(errno: i32, is_connected: impl FnOnce() -> bool) -> bool {
    match errno {
        libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV | libc::ECANCELED => true,
        libc::ENOENT | libc::EIO => !is_connected(),
        _ => false,
    }
}

impl Drop for Ring {
    /// Invariant 2.
    fn drop(&mut self) {
        for entry in self.entries.drain(..) {
            if entry.with_kernel {
                std::mem::forget(entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer that met the end of the connection aborted the process, and what was not synced was lost.
    #[test]
    fn an_answer_that_meets_the_end_of_the_connection_is_no_fault() {
        let always = [
            libc::ENOTCONN,
            libc::ECONNABORTED,
            libc::ENODEV,
            libc::ECANCELED,
        ];
        for (errnos, connected, broken_off) in [
            (&always[..], true, true),
            (&[libc::ENOENT, libc::EIO], false, true),
            (&[libc::EINVAL, libc::EAGAIN, libc::ENOMEM], false, false),
        ] {
            for &errno in errnos {
                assert_eq!(is_end(errno, || true), connected, "{errno}");
                assert_eq!(is_end(errno, || false), broken_off, "{errno}");
            }
        }
    }
}

//! How requests arrive and answers leave.
//!
//! A [`Transport`] belongs to one mount and makes a [`Channel`] per worker thread, which hands out the request and takes the
//! answer within one call and owns its buffers. Requests come by /dev/fuse ([`dev_fuse`]), or by queues of each CPU
//! ([`uring`]).

pub mod backlog;
pub mod dev_fuse;
pub mod uring;

use std::io::IoSlice;
use std::sync::Arc;

use zerocopy::FromZeros;

use crate::abi;
use crate::dispatch::Reply;
use crate::session::Config;
use backlog::Backlog;

/// The largest WRITE and READ, in bytes.
pub const DATA_MAX: usize = 1 << 20;
/// Memory that a worker's buffers come to take: a request's and an answer's.
pub const WORKER_BYTES: usize = 2 * DATA_MAX;

/// What answers a request: its bytes, room for data, and where the answer goes.
pub type Handler<'a> = dyn FnMut(&[u8], &mut [u8], &mut dyn Reply) + 'a;

/// Where requests wait, with workers of its own.
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    pub workers_max: usize,
    /// Workers kept waiting.
    pub workers_idle: usize,
    /// Workers at the beginning.
    pub workers_first: usize,
}

impl Queue {
    /// With one worker.
    pub const OF_ONE: Queue = Queue {
        workers_max: 1,
        workers_idle: 1,
        workers_first: 1,
    };
}

/// The kernel's side of one mount.
pub trait Transport: Send + Sync + 'static {
    type Channel: Channel;

    /// INIT flags that it can use beyond those of the session.
    fn wants(&self) -> u64 {
        0
    }

    /// INIT flags of the session's that it cannot serve.
    fn refuses(&self) -> u64 {
        0
    }

    /// The INIT flags that both sides agreed on; told before any channel is made but the one for INIT.
    fn agreed(&mut self, _flags: u64) {}

    /// Where requests come from, of which INIT's come from the first.
    fn queues(&self, config: &Config) -> Vec<Queue> {
        vec![Queue {
            workers_max: config.workers_max,
            workers_idle: config.workers_idle,
            workers_first: config.workers_idle,
        }]
    }

    /// Whether requests hang without a worker that was counted on.
    fn needs_all(&self) -> bool {
        false
    }

    /// One more way to the kernel, for one more worker of a queue.
    fn channel(&self, queue: usize) -> std::io::Result<Self::Channel>;

    /// Messages without an answer, where they wait for others' sake; `None`: they come as other requests do.
    fn backlog(&self) -> Option<Arc<Backlog>> {
        None
    }

    /// Where messages go that answer no request; `None`: nobody takes them.
    fn bell(&self) -> Option<Arc<dyn Bell>> {
        None
    }
}

/// Takes messages that answer no request.
pub trait Bell: Send + Sync {
    /// Sends one message made of `parts`, which may wait for requests that others serve. `Ok(false)`: the kernel does not know what it is about, or
    /// the mount is gone.
    fn ring(&self, parts: &[IoSlice<'_>]) -> std::io::Result<bool>;
}

/// One worker's way to the kernel.
pub trait Channel: Send + 'static {
    /// Called once, by the worker, before it waits for requests.
    fn begin(&mut self) -> std::io::Result<()> {
        Ok(())
    }

    /// Waits for a request and hands it to `handler`. False: the file system was unmounted,
    /// or its connection aborted, and no request will come any more.
    fn serve_one(&mut self, handler: &mut Handler<'_>) -> std::io::Result<bool>;
}

const PAGE: usize = 4096;

/// Page-aligned memory that costs nothing until it is used: asked for without an alignment,
/// the allocator gives out fresh pages as they are; with one, it would clear them all.
struct PageMemory {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl PageMemory {
    fn new(bytes: usize) -> std::io::Result<Self> {
        let memory = <u8 as FromZeros>::new_vec_zeroed(bytes + PAGE)
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
        let start = memory.as_ptr().addr().next_multiple_of(PAGE) - memory.as_ptr().addr();
        Ok(PageMemory {
            memory,
            start,
            len: bytes,
        })
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// Length of what precedes the data of a WRITE.
const WRITE_HEAD: usize = size_of::<abi::InHeader>() + size_of::<abi::WriteIn>();

/// Room for one request. It starts `WRITE_HEAD` bytes before a page boundary, so that the
/// data of a WRITE is page-aligned and can go to a device as it is.
pub struct RequestBuffer(PageMemory);

impl RequestBuffer {
    const START: usize = PAGE - WRITE_HEAD;

    pub fn new() -> std::io::Result<Self> {
        PageMemory::new(PAGE + DATA_MAX).map(RequestBuffer)
    }

    /// Where the next request goes.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.0.bytes_mut()[Self::START..]
    }

    pub fn message(&self, len: usize) -> &[u8] {
        let room = &self.0.bytes()[Self::START..];
        &room[..len.min(room.len())]
    }
}

const _: () = assert!(WRITE_HEAD + DATA_MAX >= abi::MIN_READ_BUFFER);

/// Page-aligned room for the data of one answer.
pub struct Scratch(PageMemory);

impl Scratch {
    pub fn new() -> std::io::Result<Self> {
        PageMemory::new(DATA_MAX).map(Scratch)
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_of_a_write_is_page_aligned() {
        let mut buffer = RequestBuffer::new().unwrap();
        assert_eq!(buffer.room().len(), WRITE_HEAD + DATA_MAX);
        let data = &buffer.message(WRITE_HEAD + 1)[WRITE_HEAD..];
        assert_eq!(data.as_ptr().addr() % PAGE, 0);
        assert!(buffer.message(usize::MAX).len() == WRITE_HEAD + DATA_MAX);
    }
}

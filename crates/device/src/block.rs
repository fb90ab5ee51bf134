//! One device, as the array uses it.

use crate::queue::{Bell, Blocking, DeviceQueue};
use crate::reap::{Reaped, Reaping};
use crate::topology::Topology;
use crate::vectored::{self, Vectored};
use base::atomic::AtomicBool;
use base::canary::{Canary, planted};
use std::io;
use std::sync::Arc;

/// What a completed write promises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durability {
    /// May sit in the device's volatile cache until a flush.
    Volatile,
    /// As `Volatile`, but a checksum elsewhere tells after a crash whether it got to the medium: what names it need not
    /// wait for a flush ([`Array::is_ordered`](crate::Array::is_ordered)).
    Checked,
    /// Survives power loss once completed (forced unit access); promises nothing about
    /// other writes.
    Durable,
}

/// One operation on a device; `offset` in bytes, like all lengths a multiple of the
/// device's logical block.
#[derive(Debug)]
pub enum Operation<'a> {
    Read {
        offset: u64,
        buf: &'a mut [u8],
    },
    Write {
        offset: u64,
        buf: &'a [u8],
        durability: Durability,
    },
    /// Makes every write completed before this was issued durable.
    Flush,
}

impl Operation<'_> {
    pub fn name(&self) -> &'static str {
        match self {
            Operation::Read { .. } => "read",
            Operation::Write { .. } => "write",
            Operation::Flush => "flush",
        }
    }

    /// Byte offset on the device; 0 for a flush.
    pub fn offset(&self) -> u64 {
        match self {
            Operation::Read { offset, .. } | Operation::Write { offset, .. } => *offset,
            Operation::Flush => 0,
        }
    }

    /// Bytes moved; 0 for a flush.
    pub fn bytes(&self) -> usize {
        match self {
            Operation::Read { buf, .. } => buf.len(),
            Operation::Write { buf, .. } => buf.len(),
            Operation::Flush => 0,
        }
    }
}

/// An operation of a batch, and after [`BlockDevice::run`] how it ended.
#[derive(Debug)]
pub struct Request<'a> {
    pub operation: Operation<'a>,
    /// The caller's own mark; devices do not look at it.
    pub tag: usize,
    /// Set when the operation failed; its write may then have happened in part.
    pub error: Option<io::Error>,
}

impl<'a> Request<'a> {
    pub fn new(operation: Operation<'a>, tag: usize) -> Self {
        Request {
            operation,
            tag,
            error: None,
        }
    }
}

/// How a device is reached, for `sheaf info`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub name: String,
    /// `io_uring`, `preadv2+pool` or `simulated`.
    pub backend: &'static str,
    /// `block device`, `file` or `memory`.
    pub kind: &'static str,
    /// Bypasses the kernel's page cache.
    pub direct: bool,
    pub bytes: u64,
    pub logical_block: u32,
    /// A disk that spins; `None` when the kernel does not say.
    pub rotational: Option<bool>,
    /// Who submits to it.
    pub topology: Topology,
    /// How threads wait for it.
    pub reap: Reaping,
    /// Those that look poll the device itself.
    pub polled: bool,
    /// That it is attached to; `None` when the kernel does not say.
    pub numa_node: Option<usize>,
}

/// Those methods of a [`BlockDevice`] that describe it, for one that stands before another, by which it is described: that is in this field. What
/// it does by itself, [`BlockDevice::run`] first of all, stands beside.
#[macro_export]
macro_rules! described_by {
    ($below:tt) => {
        fn name(&self) -> &str {
            $crate::BlockDevice::name(&*self.$below)
        }

        fn bytes(&self) -> u64 {
            $crate::BlockDevice::bytes(&*self.$below)
        }

        fn logical_block(&self) -> u32 {
            $crate::BlockDevice::logical_block(&*self.$below)
        }

        fn physical_block(&self) -> u32 {
            $crate::BlockDevice::physical_block(&*self.$below)
        }

        fn memory_align(&self) -> usize {
            $crate::BlockDevice::memory_align(&*self.$below)
        }

        fn info(&self) -> $crate::DeviceInfo {
            $crate::BlockDevice::info(&*self.$below)
        }

        fn has_writer(&self) -> &base::atomic::AtomicBool {
            $crate::BlockDevice::has_writer(&*self.$below)
        }
    };
}

/// What batches of the journal fill on these devices: the largest unit that any of them writes as one (decision 0041).
pub fn journal_align<'a>(
    devices: impl IntoIterator<Item = &'a Arc<dyn BlockDevice>>,
) -> Option<u32> {
    let unit = |device: &Arc<dyn BlockDevice>| match planted(Canary::SmallBatches) {
        true => device.logical_block(),
        false => device.physical_block(),
    };
    devices.into_iter().map(unit).max()
}

/// A block device or a file that stands for one. All methods may be called from any thread
/// at once.
pub trait BlockDevice: Send + Sync + 'static {
    /// The path, or whatever the user calls it.
    fn name(&self) -> &str;

    /// Size in bytes.
    fn bytes(&self) -> u64;

    /// Smallest unit of I/O in bytes: 512 or 4096.
    fn logical_block(&self) -> u32;

    /// What it writes as one in bytes, 512 to 4096, and no less than [`logical_block`](Self::logical_block): of a smaller write it makes one of the whole, by which a
    /// power cut may damage what lies beside.
    fn physical_block(&self) -> u32 {
        self.logical_block()
    }

    /// Before an array uses it: makes its [`logical_block`](Self::logical_block) at most `bytes`, if there is a way to,
    /// slower maybe. Fails if that way is barred; who has none is as it was.
    fn take_smaller_blocks(&self, _bytes: u32) -> io::Result<()> {
        Ok(())
    }

    /// Alignment that buffers must have in memory, in bytes.
    fn memory_align(&self) -> usize;

    fn info(&self) -> DeviceInfo;

    /// The device's own mark, false at first, that somebody may change what it holds ([`Array::writer`](crate::Array::writer)).
    /// Who stands before another device has that one's.
    fn has_writer(&self) -> &AtomicBool;

    /// Whether what it says is written may be in a cache of its own or the kernel's, which a power loss empties. A durable write may be a write and a
    /// flush then.
    fn has_cache(&self) -> bool {
        true
    }

    /// Starts all requests at once, calls `meanwhile` while they run (so that the caller can
    /// start batches on other devices), and returns when all have completed. Requests of one
    /// batch complete in any order. Every request is attempted, whatever becomes of the
    /// others.
    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>);

    /// As [`run`](Self::run) of reads into memory in many pieces. Who has no better way copies what it has read.
    fn read_vectored(&self, requests: &mut [Vectored<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        vectored::copied(self, requests, meanwhile);
    }

    /// What somebody who has several transfers in flight reaches the device by; `bell` is to be rung when something ended of
    /// which the kernel does not tell. Who has no better way does what was pushed when it is started, by [`run`](Self::run).
    fn queue(self: Arc<Self>, _bell: &Arc<Bell>) -> DeviceQueue {
        DeviceQueue::alone(Blocking::new(self))
    }

    /// What waits for it came to so far, if it counts them.
    fn reaped(&self) -> Option<Reaped> {
        None
    }

    /// Tells the device that a range holds nothing of value; the bytes read back are then
    /// undefined. Not supported counts as success.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Gives up the exclusive claim on the device but keeps it open, so that the kernel can
    /// claim it on the file system's behalf.
    fn release_claim(&self) -> io::Result<()> {
        Ok(())
    }

    /// Reads `buf.len()` bytes at `offset`.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        run_one(self, Operation::Read { offset, buf })
    }

    /// Writes `buf` at `offset`.
    fn write(&self, offset: u64, buf: &[u8], durability: Durability) -> io::Result<()> {
        run_one(
            self,
            Operation::Write {
                offset,
                buf,
                durability,
            },
        )
    }

    /// Makes every completed write durable.
    fn flush(&self) -> io::Result<()> {
        run_one(self, Operation::Flush)
    }
}

fn run_one<D: BlockDevice + ?Sized>(device: &D, operation: Operation<'_>) -> io::Result<()> {
    let mut request = [Request::new(operation, 0)];
    device.run(&mut request, None);
    let [request] = request;
    request.error.map_or(Ok(()), Err)
}

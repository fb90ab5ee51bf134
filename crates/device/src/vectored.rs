//! Reads into memory in many pieces: the frames of a cache, which others may look at meanwhile.
//!
//! 1. A run of the array is cut into the devices' pieces; those that follow each other on a device are one request, up to
//!    [`BYTES_MAX`] and [`PIECES_MAX`].
//! 2. Whoever fills the memory directly fills all of it or nothing that counts: what does not come through whole is read anew,
//!    by way of a copy, as one ordinary transfer. So short transfers, passing refusals and errors are told in one place.
//! 3. A device that knows only ordinary transfers is asked for those, and what it read is copied.

use crate::array::{Array, Tally};
use crate::block::{BlockDevice, Operation, Request};
use crate::buf::{AlignedBuf, Shared};
use crate::error::Error;
use crate::queue::Kind;
use std::io;
use std::sync::Arc;

/// Bytes of a request, and pieces of memory: more than a device takes at once the kernel does not start while a ring is
/// entered, but hands to a thread of its own, after it has looked at all of the memory for nothing.
const BYTES_MAX: usize = 256 << 10;
const PIECES_MAX: usize = 64;

/// A run of the array, and the memory that is filled from there, one piece after the other.
#[derive(Debug)]
pub struct Scattered<'a> {
    /// A logical byte address, as for [`Array::read`].
    pub byte: u64,
    pub memory: Vec<Shared<'a>>,
}

impl Scattered<'_> {
    fn bytes(&self) -> usize {
        self.memory.iter().map(Shared::len).sum()
    }
}

/// A read of one device, and after [`BlockDevice::read_vectored`] how it ended.
#[derive(Debug)]
pub struct Vectored<'a> {
    /// On the device, in bytes.
    pub(crate) offset: u64,
    pub(crate) len: usize,
    pub(crate) memory: Vec<Shared<'a>>,
    /// The first of the caller's runs in it.
    tag: usize,
    pub(crate) error: Option<io::Error>,
}

impl<'a> Vectored<'a> {
    /// Takes memory for what comes next on the device, if it can.
    fn add(&mut self, offset: u64, memory: Shared<'a>) -> Result<(), Shared<'a>> {
        let follows = self.offset + self.len as u64 == offset;
        let len = memory.len();
        if !follows || self.len + len > BYTES_MAX || self.memory.len() == PIECES_MAX {
            return Err(memory);
        }
        let apart = match self.memory.last_mut() {
            Some(last) => last.join(memory),
            None => Some(memory),
        };
        self.memory.extend(apart);
        self.len += len;
        Ok(())
    }
}

/// Requests of one device.
type Batch<'a> = (usize, Vec<Vectored<'a>>);

impl Array {
    /// Fills memory from runs of the array, over all devices in parallel; otherwise as [`execute`](Self::execute).
    pub fn read_scattered(&self, runs: Vec<Scattered<'_>>) -> Result<(), Error> {
        for run in &runs {
            self.check_range(run.byte, run.bytes() as u64)?;
        }
        let _waiting = base::trace::device(|| runs.iter().map(|run| run.bytes() as u64).sum());
        let mut batches: Vec<Batch<'_>> = Vec::new();
        for (tag, run) in runs.into_iter().enumerate() {
            let (byte, len) = (run.byte, run.bytes());
            let mut memory = run.memory.into_iter();
            let mut next = None;
            self.each_piece(byte, len, |piece| {
                let (mut offset, end) = (piece.offset, piece.offset + piece.len as u64);
                while offset < end {
                    let part: Shared<'_> = next
                        .take()
                        .or_else(|| memory.next())
                        .expect("as much memory as pieces");
                    let (part, rest) = part.split_at_most((end - offset) as usize);
                    next = rest;
                    let len = part.len() as u64;
                    add(&mut batches, piece.device, tag, offset, part);
                    offset += len;
                }
            });
        }
        self.read_vectored(&mut batches);
        let all = batches
            .iter()
            .flat_map(|(d, list)| list.iter().map(move |r| (*d, r)));
        let failed = all.filter(|(_, request)| request.error.is_some());
        match failed.min_by_key(|(_, request)| request.tag) {
            None => Ok(()),
            Some((device, request)) => {
                let error = request.error.as_ref();
                let number = error.and_then(io::Error::raw_os_error);
                let source = match number {
                    Some(number) => io::Error::from_raw_os_error(number),
                    None => io::Error::other(error.map_or(String::new(), ToString::to_string)),
                };
                Err(Error::Io {
                    device: self.members[device].device.name().to_owned(),
                    operation: Kind::Read.name(),
                    offset: request.offset,
                    len: request.len as u64,
                    source: Arc::new(source),
                })
            }
        }
    }

    /// Starts the batches of all devices before it waits for any.
    fn read_vectored(&self, batches: &mut [Batch<'_>]) {
        let Some(((index, requests), rest)) = batches.split_first_mut() else {
            return;
        };
        let device = &self.members[*index].device;
        if rest.is_empty() {
            device.read_vectored(requests, None);
        } else {
            let mut others = || self.read_vectored(rest);
            device.read_vectored(requests, Some(&mut others));
        }
        let mut tally = Tally::default();
        for request in requests.iter() {
            tally.add(Kind::Read, request.len, request.error.is_some());
        }
        self.account(*index, &mut tally);
    }
}

fn add<'a>(
    batches: &mut Vec<Batch<'a>>,
    device: usize,
    tag: usize,
    offset: u64,
    memory: Shared<'a>,
) {
    let at = match batches.iter().position(|(d, _)| *d == device) {
        Some(at) => at,
        None => {
            batches.push((device, Vec::new()));
            batches.len() - 1
        }
    };
    let requests = &mut batches[at].1;
    let memory = match requests.last_mut() {
        Some(last) => match last.add(offset, memory) {
            Ok(()) => return,
            Err(memory) => memory,
        },
        None => memory,
    };
    requests.push(Vectored {
        offset,
        len: memory.len(),
        memory: vec![memory],
        tag,
        error: None,
    });
}

/// Reads by way of copies, as one batch of ordinary transfers.
pub(crate) fn copied(
    device: &(impl BlockDevice + ?Sized),
    requests: &mut [Vectored<'_>],
    meanwhile: Option<&mut dyn FnMut()>,
) {
    let copy = |request: &Vectored<'_>| AlignedBuf::zeroed(request.len);
    let mut copies: Vec<AlignedBuf> = requests.iter().map(copy).collect();
    let reads = requests.iter().zip(&mut copies).enumerate();
    let mut reads: Vec<Request<'_>> = reads
        .map(|(tag, (request, buf))| {
            let offset = request.offset;
            Request::new(Operation::Read { offset, buf }, tag)
        })
        .collect();
    device.run(&mut reads, meanwhile);
    let errors: Vec<Option<io::Error>> = reads.into_iter().map(|read| read.error).collect();
    for ((request, copy), error) in requests.iter_mut().zip(&copies).zip(errors) {
        let mut rest = &copy[..];
        for memory in request.memory.iter_mut().filter(|_| error.is_none()) {
            let (from, behind) = rest.split_at(memory.len());
            memory.copy_from(from);
            rest = behind;
        }
        request.error = error;
    }
}

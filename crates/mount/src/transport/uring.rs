//! FUSE over io_uring: a queue of requests for each CPU, and workers for each queue.
//!
//! A program's request goes to the queue of the CPU that it runs on, and wakes the worker there that answered last. An answer and the wish
//! for the next request are one system call. What has no answer (FORGET, INTERRUPT) and INIT come by /dev/fuse still.
//! Workers run where the scheduler wants them (decision 0032).
//!
//! The kernel offers it from Linux 6.14 on, where `enable_uring` of the module `fuse` is set. Without the offer this is
//! [`DevFuse`] and nothing else.
//!
//! Invariants:
//! 1. Each queue that the kernel has, one for each CPU that there may ever be, has an entry as long as the mount is served: until
//!    then the kernel lets requests wait, and those of a queue without one for ever. So a worker that cannot
//!    begin ends the process.
//! 2. An answer goes to the kernel when its handler has returned, since the entry may then have the next request at once. So a handler waits for nothing that may wait
//!    for its answer: pages are dropped by threads of their own (`notify`).
//! 3. All entries of a queue are there from the beginning. The kernel gives a request that finds none to whoever answers next at its
//!    queue, and not to an entry that is registered meanwhile: it could wait for ever.

mod ring;

use std::fs::File;
use std::io::{ErrorKind, IoSlice};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use zerocopy::FromBytes;

use super::backlog::Backlog;
use super::dev_fuse::{DevFuse, DevFuseChannel};
use super::{Bell, Channel, DATA_MAX, Handler, Queue, Transport};
use crate::abi::{self, init};
use crate::dispatch::Reply;
use crate::session::Config;
use ring::{Body, Ring};

/// The module's parameter; root writes `Y` to it.
pub const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";
const CPUS: &str = "/sys/devices/system/cpu";

/// Workers of a queue at most: requests of one CPU that wait for devices at a time.
const QUEUE_WORKERS_MAX: usize = 8;
const QUEUE_WORKERS_MIN: usize = 2;
/// FORGETs and INTERRUPTs that come within this time are taken together.
const NAP: Duration = Duration::from_millis(2);
/// Room for the data of an answer to a request that has data itself: of an ioctl, which moves 14 bits of length.
const SCRATCH: usize = 16 << 10;

/// Whether the kernel will offer it for the next mount.
pub fn is_enabled() -> bool {
    std::fs::read(PARAMETER).is_ok_and(|value| value.first() == Some(&b'Y'))
}

/// CPUs by number, from a list like `0-3,8`.
fn cpu_list(name: &str) -> std::io::Result<Vec<u16>> {
    let text = std::fs::read_to_string(Path::new(CPUS).join(name))?;
    parse_cpu_list(text.trim()).ok_or_else(|| ErrorKind::InvalidData.into())
}

fn parse_cpu_list(text: &str) -> Option<Vec<u16>> {
    let mut cpus = Vec::new();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse().ok()?..=last.parse::<u16>().ok()?);
    }
    Some(cpus)
}

/// The kernel's queues, by who serves them.
#[derive(Debug)]
pub struct Plan {
    /// Of CPUs that run: with workers of its own each.
    online: Vec<u16>,
    /// Of others: one worker has all of these.
    offline: Vec<u16>,
}

impl Plan {
    /// What rings would serve; an error where there can be none, or queues would have too few workers.
    pub fn new(config: &Config) -> std::io::Result<Plan> {
        ring::build(1)?;
        let plan = Plan::of(cpu_list("online")?, cpu_list("possible")?.len());
        let online = plan.online.len();
        if online == 0 || online > config.workers_max {
            let what = format!(
                "{} workers at most (option workers) cannot serve the queues of {online} CPUs",
                config.workers_max
            );
            return Err(std::io::Error::other(what));
        }
        Ok(plan)
    }

    /// As if this CPU ran only after the mount.
    pub fn with_late(mut self, cpu: u16) -> Plan {
        if let Some(at) = self.online.iter().position(|&online| online == cpu) {
            self.offline.push(self.online.remove(at));
        }
        self
    }

    /// The kernel numbers its queues from zero, as many as there may be CPUs. Requests of a CPU with a higher number, as there
    /// is where numbers are left out, come to the first.
    fn of(mut online: Vec<u16>, possible: usize) -> Plan {
        let queues = 0..u16::try_from(possible).unwrap_or(u16::MAX);
        online.retain(|cpu| queues.contains(cpu));
        let offline = queues.filter(|cpu| !online.contains(cpu)).collect();
        Plan { online, offline }
    }
}

/// A mounted file system whose requests come by io_uring, if the kernel agrees.
#[derive(Debug)]
pub struct RingFuse {
    dev: DevFuse,
    plan: Option<Plan>,
    /// What comes by /dev/fuse then.
    backlog: Arc<Backlog>,
}

impl RingFuse {
    /// Over the descriptor that the file system was mounted with.
    pub fn new(dev: DevFuse, plan: Plan) -> RingFuse {
        RingFuse {
            backlog: Arc::new(Backlog::new(dev.file())),
            dev,
            plan: Some(plan),
        }
    }
}

impl Transport for RingFuse {
    type Channel = RingFuseChannel;

    fn wants(&self) -> u64 {
        match self.plan {
            Some(_) => init::OVER_IO_URING,
            None => 0,
        }
    }

    /// The answer to an asynchronous direct write may have to wait for what another request waits for, and a ring gives each in its turn.
    fn refuses(&self) -> u64 {
        self.plan.as_ref().map_or(0, |_| init::ASYNC_DIO)
    }

    fn agreed(&mut self, flags: u64) {
        if flags & init::OVER_IO_URING == 0 {
            tracing::warn!(
                "the kernel does not offer io_uring for this mount: requests come by /dev/fuse"
            );
            self.plan = None;
        }
    }

    fn queues(&self, config: &Config) -> Vec<Queue> {
        let Some(plan) = &self.plan else {
            return self.dev.queues(config);
        };
        // A worker here takes half the memory of one that reads /dev/fuse.
        let most = 2 * config.workers_max / plan.online.len();
        let most = most.clamp(QUEUE_WORKERS_MIN, QUEUE_WORKERS_MAX);
        let several = Queue {
            workers_max: most,
            workers_idle: most,
            workers_first: most,
        };
        let mut queues = vec![Queue::OF_ONE];
        queues.extend(plan.online.iter().map(|_| several));
        if !plan.offline.is_empty() {
            queues.push(Queue::OF_ONE);
        }
        queues
    }

    fn needs_all(&self) -> bool {
        self.plan.is_some()
    }

    fn channel(&self, queue: usize) -> std::io::Result<RingFuseChannel> {
        let (Some(plan), Some(number)) = (&self.plan, queue.checked_sub(1)) else {
            let (channel, backlog) = (self.dev.channel(queue)?, self.backlog());
            if backlog.is_some() {
                channel.set_nonblocking(&self.dev.file())?;
            }
            return Ok(RingFuseChannel::Dev { channel, backlog });
        };
        let file = self.dev.file();
        let queues = match plan.online.get(number) {
            Some(&cpu) => vec![cpu],
            None => plan.offline.clone(),
        };
        let channel = RingChannel::new(file, queues);
        Ok(RingFuseChannel::Ring(Box::new(channel)))
    }

    fn backlog(&self) -> Option<Arc<Backlog>> {
        let agreed = self.plan.is_some();
        agreed.then(|| Arc::clone(&self.backlog))
    }

    fn bell(&self) -> Option<Arc<dyn Bell>> {
        self.dev.bell()
    }
}

/// See [`RingFuse`].
pub enum RingFuseChannel {
    Dev {
        channel: DevFuseChannel,
        /// It has nothing else.
        backlog: Option<Arc<Backlog>>,
    },
    Ring(Box<RingChannel>),
}

impl Channel for RingFuseChannel {
    fn begin(&mut self) -> std::io::Result<()> {
        match self {
            RingFuseChannel::Dev { .. } => Ok(()),
            RingFuseChannel::Ring(channel) => channel.begin(),
        }
    }

    fn serve_one(&mut self, handler: &mut Handler<'_>) -> std::io::Result<bool> {
        match self {
            RingFuseChannel::Dev { channel, backlog } => match backlog {
                Some(backlog) => backlog.serve(NAP, || channel.serve_one(handler))?,
                None => channel.serve_one(handler),
            },
            RingFuseChannel::Ring(channel) => channel.serve_one(handler),
        }
    }
}

/// One worker's entries.
pub struct RingChannel {
    file: Arc<File>,
    queues: Vec<u16>,
    /// From the worker's begin on.
    ring: Option<Ring>,
    scratch: Vec<u8>,
    /// Of an answer that was not made in its place.
    body: Vec<u8>,
}

impl RingChannel {
    fn new(file: Arc<File>, queues: Vec<u16>) -> RingChannel {
        RingChannel {
            file,
            queues,
            ring: None,
            scratch: Vec::new(),
            body: Vec::new(),
        }
    }

    fn begin(&mut self) -> std::io::Result<()> {
        self.scratch.resize(SCRATCH, 0);
        let ring = Ring::new(Arc::clone(&self.file), &self.queues)?;
        self.ring.insert(ring).register()
    }

    fn serve_one(&mut self, handler: &mut Handler<'_>) -> std::io::Result<bool> {
        let Some(ring) = &mut self.ring else {
            return Err(ErrorKind::NotConnected.into());
        };
        let Some(entry) = ring.next()? else {
            return Ok(false);
        };
        let mut answer = Answer {
            header: None,
            room: (0, 0),
            in_place: 0,
            body: &mut self.body,
        };
        answer.body.clear();
        if let Some((message, room)) = ring.request(entry) {
            let room = match room.is_empty() {
                true => &mut self.scratch[..],
                false => {
                    answer.room = (room.as_ptr().addr(), room.len());
                    room
                }
            };
            handler(message, room, &mut answer);
        }
        let (header, in_place) = (answer.header, answer.in_place);
        // Without an answer the entry would be lost, and who waits for it with it.
        let header = header.unwrap_or_else(|| abi::OutHeader {
            len: size_of::<abi::OutHeader>() as u32,
            error: -libc::EIO,
            unique: ring.unique(entry),
        });
        let body = match in_place {
            0 => Body::Bytes(&self.body),
            len => Body::InPlace(len),
        };
        ring.answer(entry, &header, body)?;
        Ok(true)
    }
}

/// Keeps an answer until the request's memory, into which it goes, is looked at no more.
struct Answer<'b> {
    header: Option<abi::OutHeader>,
    /// Where the room for data is that goes to the kernel as it is, and how long.
    room: (usize, usize),
    /// So many bytes of the answer are there.
    in_place: usize,
    body: &'b mut Vec<u8>,
}

impl Reply for Answer<'_> {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
        let Some((header, body)) = parts.split_first() else {
            return Err(ErrorKind::InvalidInput.into());
        };
        let header = abi::OutHeader::read_from_bytes(header);
        let header = header.map_err(|_| ErrorKind::InvalidInput)?;
        match body {
            [data] if data.as_ptr().addr() == self.room.0 && data.len() <= self.room.1 => {
                self.in_place = data.len();
            }
            _ => {
                let len: usize = body.iter().map(|part| part.len()).sum();
                if len > DATA_MAX {
                    return Err(ErrorKind::InvalidInput.into());
                }
                body.iter()
                    .for_each(|part| self.body.extend_from_slice(part));
            }
        }
        self.header = Some(header);
        // Who asked waits until it is answered, unless the connection is broken off and nothing is kept.
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn lists_of_cpus_are_understood() {
        assert_eq!(parse_cpu_list("0-1"), Some(vec![0, 1]));
        assert_eq!(parse_cpu_list("0,2-4,9"), Some(vec![0, 2, 3, 4, 9]));
        assert_eq!(parse_cpu_list(""), Some(vec![]));
        assert_eq!(parse_cpu_list("0-x"), None);
    }

    #[test]
    fn each_queue_of_the_kernel_has_a_worker() {
        let plan = Plan::of(vec![0, 1], 4);
        assert_eq!((plan.online, plan.offline), (vec![0, 1], vec![2, 3]));
        let with_gaps = Plan::of(vec![0, 2, 4], 3);
        assert_eq!((with_gaps.online, with_gaps.offline), (vec![0, 2], vec![1]));
    }

    #[test]
    fn an_answer_in_its_place_is_not_copied() {
        let (mut body, room) = (Vec::new(), [7u8; 100]);
        let mut answer = Answer {
            header: None,
            room: (room.as_ptr().addr(), room.len()),
            in_place: 0,
            body: &mut body,
        };
        let header = abi::OutHeader {
            len: 116,
            error: 0,
            unique: 5,
        };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(&room)];
        assert!(answer.send(&parts).unwrap());
        assert_eq!((answer.in_place, answer.body.len()), (100, 0));
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(b"elsewhere")];
        assert!(answer.send(&parts).unwrap());
        assert_eq!(*answer.body, b"elsewhere");
    }
}

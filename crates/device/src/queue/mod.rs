//! Queues of devices: transfers that are started now and end later, of memory that is lent to them.
//!
//! A [`Part`] is one transfer of one device. It is the caller's until it is pushed, and its segment with it, the queue's until
//! it is reaped: so what a device or the kernel may still use is nobody else's to look at.
//!
//! 1. What was pushed is reaped once, in whatever order, also when it failed or was cancelled; not before it has ended.
//! 2. A queue moves all bytes of a part or tells an error: short transfers and passing refusals stay below.
//! 3. No more parts are in a queue than it has room for. Nothing in it grows with use.
//! 4. Nothing here waits but [`Queues::wait`] and the queues of devices that know no other way ([`Blocking`]).
//! 5. No part is lost by a panic of a device's code: it is reaped as one that failed.

mod bell;
mod blocking;
mod flights;

pub use bell::Bell;
pub(crate) use bell::Sleep;
pub(crate) use blocking::Blocking;
pub use flights::{Flight, FlightId, Landed, Queues, Refused, Run};

use crate::block::{BlockDevice, Durability, Operation, Request};
use crate::buf::{Loans, Segment};
use crate::file::FileDevice;
use base::clock::{self, Clock};
use base::mapping::Mapping;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// What a part does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write(Durability),
    Flush,
}

impl Kind {
    /// A thread of the kernel's does it, which needs a CPU, where a ring is asked for it.
    pub(crate) fn takes_a_thread(self) -> bool {
        matches!(self, Kind::Flush | Kind::Write(Durability::Durable))
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Write(_) => "write",
            Kind::Flush => "flush",
        }
    }
}

/// One transfer of one device.
#[derive(Debug)]
pub struct Part {
    /// The pusher's own mark. No two parts in a queue have the same.
    pub(crate) user: u64,
    /// Which device of the queue's.
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    /// On the device, in bytes.
    pub(crate) offset: u64,
    pub(crate) segment: Segment,
}

impl Part {
    /// What a request of one device asks for. Its memory is on loan until the part's segment is given back; its mark is the
    /// place among `errors` of where it tells its own.
    pub(crate) fn lent<'b>(
        request: &'b mut Request<'_>,
        errors: &mut Vec<&'b mut Option<io::Error>>,
        loans: &mut Loans<'b>,
    ) -> Part {
        let user = errors.len() as u64;
        errors.push(&mut request.error);
        let offset = request.operation.offset();
        let (kind, segment) = match &mut request.operation {
            Operation::Read { buf, .. } => (Kind::Read, loans.lend(buf)),
            Operation::Write {
                buf, durability, ..
            } => (Kind::Write(*durability), loans.show(buf)),
            Operation::Flush => (Kind::Flush, Segment::empty()),
        };
        Part {
            user,
            device: 0,
            kind,
            offset,
            segment,
        }
    }

    /// What is to be done, for who does it at once.
    pub(crate) fn operation(&mut self) -> Operation<'_> {
        let offset = self.offset;
        match self.kind {
            Kind::Read => Operation::Read {
                offset,
                buf: self.segment.bytes_mut(),
            },
            Kind::Write(durability) => Operation::Write {
                offset,
                buf: self.segment.bytes(),
                durability,
            },
            Kind::Flush => Operation::Flush,
        }
    }
}

/// Does parts at once, as one batch, on the device that is meant. They have ended even if that panics.
pub(crate) fn perform(
    device: &(impl BlockDevice + ?Sized),
    parts: Vec<Part>,
    ended: &mut Vec<Ended>,
) {
    let mut performing = Performing {
        errors: parts.iter().map(|_| Some(panicked())).collect(),
        parts,
        ended,
    };
    let parts = performing.parts.iter_mut().enumerate();
    let mut requests: Vec<Request<'_>> = parts
        .map(|(tag, part)| Request::new(part.operation(), tag))
        .collect();
    device.run(&mut requests, None);
    let errors: Vec<_> = requests.into_iter().map(|request| request.error).collect();
    performing.errors = errors;
}

struct Performing<'a> {
    parts: Vec<Part>,
    /// What they end with.
    errors: Vec<Option<io::Error>>,
    ended: &'a mut Vec<Ended>,
}

impl Drop for Performing<'_> {
    fn drop(&mut self) {
        let parts = self.parts.drain(..).zip(self.errors.drain(..));
        self.ended.extend(parts.map(|(part, error)| Ended {
            part,
            result: error.map_or(Ok(()), Err),
        }));
    }
}

/// A part that has ended, and how.
#[derive(Debug)]
pub struct Ended {
    pub(crate) part: Part,
    pub(crate) result: io::Result<()>,
}

impl Ended {
    /// A part that was given up before it began.
    pub(crate) fn cancelled(part: Part) -> Ended {
        let result = Err(cancelled());
        Ended { part, result }
    }
}

/// When it is worth to look for ended parts.
pub(crate) enum Wake<'a> {
    Now,
    /// At this time of a clock.
    At(u64, &'a Clock),
    /// When the bell is rung that the queue was made with.
    Bell,
    /// When [`Queue::wait`] returns.
    Kernel,
}

/// The transfers in flight of one owner at a time, on one device or on several.
pub(crate) trait Queue: Send {
    /// Takes a part; [`ring`](Queue::ring) starts it. There are never more than the queue was made for.
    fn push(&mut self, part: Part);

    /// Parts may be of this memory: where that makes them cheaper, the kernel is told beforehand.
    fn register(&mut self, _memory: &Arc<Mapping>) {}

    /// Starts what was pushed.
    fn ring(&mut self);

    /// Takes out what has ended. Does not wait.
    fn reap(&mut self, ended: &mut Vec<Ended>);

    /// There is a part in it.
    fn wake(&self) -> Wake<'_>;

    /// For [`Wake::Kernel`]: starts what was pushed, and waits until something has ended, the time is over or, of a bell that was rung so often, it is rung
    /// again; or not quite so long.
    fn wait(&mut self, _bell: Option<(&Bell, u64)>, _patience: Option<Duration>) {}

    /// For [`Wake::At`]: waits until that time of its clock or, of a bell that was rung so often, until it is rung again; or not quite so long.
    fn sleep_until(&mut self, ns: u64, bell: Option<(&Bell, u64)>) {
        if let Wake::At(_, clock) = self.wake() {
            sleep_until(clock, ns, bell);
        }
    }

    /// For [`Wake::Bell`]: waits until that bell, which was rung so often, is rung again, or the time is over; or not quite so long.
    fn wait_for_bell(&mut self, (bell, rung): (&Bell, u64), patience: Option<Duration>) {
        bell.wait(rung, patience);
    }

    /// Asks for an early end of the parts with such marks, which are reaped then as they would be: done, failed, or as
    /// [`cancelled`].
    fn cancel(&mut self, mine: &dyn Fn(u64) -> bool);
}

/// Sleeps until that time of a clock or, of a bell that was rung so often, until it is rung again.
pub(crate) fn sleep_until(clock: &Clock, ns: u64, bell: Option<(&Bell, u64)>) {
    let Some((bell, rung)) = bell else {
        return clock.sleep_until(ns);
    };
    let left = ns.saturating_sub(clock.monotonic_ns());
    if left > 0 {
        clock::exact_timers();
        bell.wait(rung, Some(Duration::from_nanos(left)));
    }
}

/// How a device takes part in somebody's queues; made by [`BlockDevice::queue`](crate::BlockDevice::queue).
pub struct DeviceQueue(pub(crate) Own);

pub(crate) enum Own {
    /// A queue for it alone.
    Alone(Box<dyn Queue>),
    /// One ring for all such devices of an owner.
    OnRing(Arc<FileDevice>),
}

impl DeviceQueue {
    /// For a device that does what was pushed when it is started, by [`BlockDevice::run`].
    pub fn blocking(device: Arc<dyn BlockDevice>) -> DeviceQueue {
        DeviceQueue::alone(Blocking::new(device))
    }

    pub(crate) fn alone(queue: impl Queue + 'static) -> DeviceQueue {
        DeviceQueue(Own::Alone(Box::new(queue)))
    }
}

pub(crate) fn is_cancelled(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ECANCELED)
}

/// The error of what was in the hands of a device's code that has panicked.
pub(crate) fn panicked() -> io::Error {
    io::Error::other("the device's code has failed")
}

/// The error of what was cancelled in time.
pub(crate) fn cancelled() -> io::Error {
    io::Error::from_raw_os_error(libc::ECANCELED)
}

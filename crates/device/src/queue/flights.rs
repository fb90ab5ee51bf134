//! What somebody has in flight on an array: transfers of owned memory, started now and landed later.
//!
//! Owns one caller's queues to all devices, the *flights*, and the memory they are lent.
//!
//! 1. A flight's memory is neither looked at, freed nor handed out before its last part has ended, whether it ends well, is
//!    cancelled or its owner goes: [`Lent`] sees to it, and `Drop` waits for all.
//! 2. A part is waiting, in its device's queue, or ended. No device has more than `depth` in its queue; the others wait here,
//!    in the order in which they came. There are never more flights than the owner asked for.
//! 3. A completion is accounted before it is told: as unflushed (array, invariant 3) and in the counts. The error is that of
//!    the first part that failed, in the order of its addresses in memory.
//! 4. Every flight lands once. A device that does not answer keeps its own flights; those of the others land.
//! 5. No flight is a durable write or a flush: a flush that fails takes what others wrote with it, and those must be told before
//!    the flight lands (R17). So these are calls that wait.
//! 6. No lock is held between calls, and nothing that others wait for, but by the owner's own doing.
//! 7. What a thread has submitted to a ring the kernel tells only as that thread runs, or sleeps so that it can be woken. Where several threads use queues in turn, one that submits must not sleep otherwise for
//!    what may depend on those that wait here (`docs/concurrency.md`).

use super::{Bell, Ended, Kind, Own, Part, Queue, Wake, is_cancelled};
use crate::array::{Array, Tally};
use crate::block::Durability;
use crate::buf::{AlignedBuf, Lent};
use crate::error::Error;
use crate::file::FileDevice;
use crate::threads;
use crate::uring::{self, RingQueue};
use base::clock;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Flights of one owner at most; see [`mark`].
const FLIGHTS_MAX: usize = 1 << 20;
/// Parts of a flight at most.
const PARTS_MAX: usize = 1 << 28;
/// Parts on a ring at most: a completion queue that loses none of them, and of what else it tells, is still one that the kernel makes.
const RING_PARTS_MAX: usize = 8192;
/// A wait at most, of those that have an end: the kernel adds it to its time, where some would overflow.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);
/// Devices at most.
const LANES_MAX: usize = 1 << 16;

/// Bytes of a flight's memory and where they lie in the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// A logical byte address, as for [`Array::read`].
    pub byte: u64,
    /// Where in the memory, a multiple of the array's alignment; behind what earlier runs take.
    pub at: usize,
    pub len: usize,
}

/// One transfer, as its owner sees it.
#[derive(Debug)]
pub struct Flight {
    pub kind: Kind,
    pub memory: AlignedBuf,
    /// The owner's own mark.
    pub tag: u64,
}

/// A flight that has ended.
#[derive(Debug)]
pub struct Landed {
    pub tag: u64,
    pub memory: AlignedBuf,
    /// Boxed, as it is moved from hand to hand.
    pub result: Result<(), Box<Error>>,
}

/// A flight that did not start.
#[derive(Debug)]
pub struct Refused {
    pub flight: Flight,
    /// `None`: there are as many as there may be.
    pub error: Option<Box<Error>>,
}

/// Names a flight until it has landed, and nothing after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlightId {
    index: u32,
    generation: u32,
}

struct Entry {
    generation: u32,
    flying: Option<Flying>,
}

struct Flying {
    tag: u64,
    kind: Kind,
    lent: Lent,
    parts: u32,
    left: u32,
    /// Of the first part that failed, and which.
    failed: Option<(u32, Box<Error>)>,
}

/// One device as its owner sees it.
struct Lane {
    /// The queue, and the device's number in it.
    queue: usize,
    number: usize,
    /// Parts in its queue at most.
    depth: usize,
    in_flight: usize,
    /// Parts for which the queue has no room (invariant 2).
    waiting: VecDeque<Part>,
    tally: Tally,
}

/// One owner's flights; see the module's head.
pub struct Queues {
    array: Arc<Array>,
    lanes: Vec<Lane>,
    queues: Vec<Line>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Parts that have ended, until they are accounted.
    ended: Vec<Ended>,
    /// Flights that have landed while nobody reaped, by being cancelled.
    early: Vec<Landed>,
    bell: Arc<Bell>,
}

/// A queue, and how much is in it.
struct Line {
    queue: Box<dyn Queue>,
    in_flight: usize,
    /// Pushed and not started.
    pushed: bool,
}

impl Queues {
    /// Queues with room for so many flights, of which each device works on at most `depth` parts at a time.
    ///
    /// Where the kernel has no memory or descriptor for such a ring a smaller one does, or threads.
    ///
    /// # Errors
    /// The kernel refuses a ring for another reason than a lack.
    pub fn new(array: &Arc<Array>, flights: usize, depth: usize) -> Result<Queues, Error> {
        let depth = depth.max(1);
        let bell = Arc::new(Bell::new());
        let mut lanes = Vec::new();
        let mut queues: Vec<Line> = Vec::new();
        let mut on_ring = Vec::new();
        for (index, device) in array.devices().enumerate() {
            let (queue, number) = match Arc::clone(device).queue(&bell).0 {
                Own::Alone(queue) => {
                    queues.push(Line::new(queue));
                    (queues.len() - 1, 0)
                }
                Own::OnRing(file) => {
                    on_ring.push((index, file));
                    (usize::MAX, 0)
                }
            };
            lanes.push(Lane {
                queue,
                number,
                depth,
                in_flight: 0,
                waiting: VecDeque::new(),
                tally: Tally::default(),
            });
        }
        if !on_ring.is_empty() {
            on_rings(&mut lanes, &mut queues, &on_ring, &bell)?;
        }
        let flights = flights.clamp(1, FLIGHTS_MAX);
        Ok(Queues {
            array: Arc::clone(array),
            lanes,
            queues,
            entries: (0..flights).map(|_| Entry::free()).collect(),
            free: (0..flights as u32).rev().collect(),
            ended: Vec::with_capacity(flights),
            early: Vec::new(),
            bell,
        })
    }

    /// What wakes [`wait`](Queues::wait) besides flights that land.
    pub fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Flights that have not been reaped.
    pub fn in_flight(&self) -> usize {
        self.entries.len() - self.free.len() + self.early.len()
    }

    /// So many buffers of `len` bytes for flights of this owner, which cost the kernel less than others where devices are reached by io_uring ("registered
    /// buffers"): it looks their pages up now, once. They are buffers like any others besides, and outlive this. `None`: there is
    /// no memory for so many.
    pub fn buffers(&mut self, len: usize, count: usize) -> Option<Vec<AlignedBuf>> {
        let made = AlignedBuf::try_in_large_pages(len, count)?;
        if let Some(mapping) = made.first().and_then(AlignedBuf::mapping) {
            for line in &mut self.queues {
                line.queue.register(mapping);
            }
        }
        Some(made)
    }

    /// Takes a flight; [`ring`](Queues::ring) starts it. One without runs is not taken: it has no place to go.
    pub fn submit(&mut self, flight: Flight, runs: &[Run]) -> Result<FlightId, Refused> {
        let error = self.check(&flight, runs).err().map(Box::new);
        if error.is_some() || self.in_flight() >= self.entries.len() {
            return Err(Refused { flight, error });
        }
        let Flight { kind, memory, tag } = flight;
        let index = self.free.pop().expect("looked at before");
        let mut flying = Flying {
            tag,
            kind,
            lent: Lent::new(memory),
            parts: 0,
            left: 0,
            failed: None,
        };
        for run in runs {
            let mut at = run.at;
            let (lanes, queues) = (&mut self.lanes, &mut self.queues);
            self.array.each_piece(run.byte, run.len, |piece| {
                let lane = &mut lanes[piece.device];
                let part = Part {
                    user: mark(index, piece.device, flying.parts),
                    device: lane.number,
                    kind,
                    offset: piece.offset,
                    segment: flying.lent.lend(at..at + piece.len),
                };
                at += piece.len;
                flying.parts += 1;
                lane.send(part, queues);
            });
        }
        flying.left = flying.parts;
        let entry = &mut self.entries[index as usize];
        entry.flying = Some(flying);
        Ok(FlightId {
            index,
            generation: entry.generation,
        })
    }

    fn check(&self, flight: &Flight, runs: &[Run]) -> Result<(), Error> {
        if flight.kind != Kind::Read && self.array.read_only() {
            return Err(Error::ReadOnly);
        }
        let mut next = 0;
        for run in runs {
            let (byte, len) = (run.byte, run.len as u64);
            self.array.check_range(byte, len)?;
            let align = self.array.geometry().journal_align;
            let fits = run.at >= next
                && run.at.is_multiple_of(align as usize)
                && run.len > 0
                && run.at.saturating_add(run.len) <= flight.memory.len();
            if !fits {
                return Err(Error::Misaligned { byte, len, align });
            }
            next = run.at + run.len;
        }
        let waits = matches!(flight.kind, Kind::Flush | Kind::Write(Durability::Durable));
        match runs.is_empty() || waits {
            true => Err(Error::NotInFlight),
            false => Ok(()),
        }
    }

    /// Starts what was submitted.
    pub fn ring(&mut self) {
        for line in &mut self.queues {
            if std::mem::take(&mut line.pushed) {
                line.queue.ring();
            }
        }
    }

    /// Takes out the flights that have landed, and starts what waited for room. Does not wait.
    pub fn reap(&mut self, landed: &mut Vec<Landed>) {
        landed.append(&mut self.early);
        for line in self.queues.iter_mut().filter(|line| line.in_flight > 0) {
            let before = self.ended.len();
            line.queue.reap(&mut self.ended);
            line.in_flight -= self.ended.len() - before;
        }
        let mut ended = std::mem::take(&mut self.ended);
        let any = !ended.is_empty();
        for ended in ended.drain(..) {
            self.lanes[device_of(ended.part.user)].in_flight -= 1;
            landed.extend(self.end(ended));
        }
        self.ended = ended;
        if any {
            // Nobody has seen what landed yet (invariant 3).
            self.account();
            self.refill();
        }
    }

    /// Notes the end of a part; the flight, if it was the last one.
    fn end(&mut self, ended: Ended) -> Option<Landed> {
        let Ended { part, result } = ended;
        let device = device_of(part.user);
        if !result.as_ref().is_err_and(is_cancelled) {
            let failed = result.is_err();
            let tally = &mut self.lanes[device].tally;
            tally.add(part.kind, part.segment.len(), failed);
        }
        let index = index_of(part.user);
        let entry = &mut self.entries[index as usize];
        let flying = entry.flying.as_mut().expect("a part is of a flight");
        if let Err(error) = result {
            let order = order_of(part.user);
            if flying
                .failed
                .as_ref()
                .is_none_or(|(first, _)| order < *first)
            {
                let error = self.array.part_error(device, &part, error);
                flying.failed = Some((order, Box::new(error)));
            }
        }
        flying.lent.give_back(part.segment);
        flying.left -= 1;
        if flying.left > 0 {
            return None;
        }
        let flying = entry.flying.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(index);
        Some(Landed {
            tag: flying.tag,
            memory: flying.lent.into_inner(),
            result: flying.failed.map_or(Ok(()), |(_, error)| Err(error)),
        })
    }

    fn account(&mut self) {
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            self.array.account(index, &mut lane.tally);
        }
    }

    fn refill(&mut self) {
        for lane in &mut self.lanes {
            while lane.in_flight < lane.depth
                && let Some(part) = lane.waiting.pop_front()
            {
                lane.push(part, &mut self.queues);
            }
        }
        self.ring();
    }

    /// Waits until something has landed, `patience` is over, or, if the bell's count was `rung` when its owner last looked
    /// what others have done, it is rung again. May return earlier. Returns at once when nothing can happen.
    /// Starts what was submitted, with the same call of the kernel if that is what it waits in.
    pub fn wait(&mut self, rung: Option<u64>, patience: Option<Duration>) {
        let patience = patience.map(|time| time.min(PATIENCE_MAX));
        for line in &mut self.queues {
            let in_kernel = matches!(line.queue.wake(), Wake::Kernel);
            if !in_kernel && std::mem::take(&mut line.pushed) {
                line.queue.ring();
            }
        }
        if !self.sleep(rung, patience) {
            self.ring();
        }
    }

    /// False: there is no need to.
    fn sleep(&mut self, rung: Option<u64>, patience: Option<Duration>) -> bool {
        let before = self.bell.rung();
        let (mut kernel, mut due, mut told) = (None, None, None);
        for (index, line) in self.queues.iter().enumerate() {
            match (line.in_flight > 0).then(|| line.queue.wake()) {
                None => {}
                Some(Wake::Now) => return false,
                Some(Wake::At(ns, clock)) => {
                    let left = Duration::from_nanos(ns.saturating_sub(clock.monotonic_ns()));
                    let this = (left, clock.monotonic_ns(), index);
                    due = due.into_iter().chain([this]).min_by_key(|due| due.0);
                }
                Some(Wake::Bell) => told = told.or(Some(index)),
                Some(Wake::Kernel) => kernel = Some(index),
            }
        }
        if !self.early.is_empty() || due.is_some_and(|(left, ..)| left.is_zero()) {
            return false;
        }
        let left = due.map(|(left, ..)| left);
        let time = left.into_iter().chain(patience).min();
        let bells = rung.is_some() || told.is_some();
        let bell = bells.then(|| (&*self.bell, rung.unwrap_or(before)));
        match (kernel, bell, due, time) {
            (Some(index), bell, ..) => {
                let line = &mut self.queues[index];
                line.pushed = false;
                line.queue.wait(bell, time);
            }
            (None, bell, Some((_, now, index)), Some(time)) => {
                let queue = &mut self.queues[index].queue;
                queue.sleep_until(now.saturating_add(clock::ns_of(time)), bell);
            }
            (None, Some((bell, rung)), None, time) => match told {
                Some(index) => {
                    let queue = &mut self.queues[index].queue;
                    queue.wait_for_bell((bell, rung), time);
                }
                None => bell.wait(rung, time),
            },
            (None, ..) => return false,
        }
        true
    }

    /// Whether something is in flight whose end is known beforehand.
    pub fn keep_time(&self) -> bool {
        let mut busy = self.queues.iter().filter(|line| line.in_flight > 0);
        busy.any(|line| matches!(line.queue.wake(), Wake::At(..)))
    }

    /// Asks for an early end of a read; it lands as it would, or with an error that says so. A write goes on.
    pub fn cancel(&mut self, id: FlightId) {
        let entry = self.entries.get(id.index as usize);
        let flying = entry.filter(|entry| entry.generation == id.generation);
        let Some(flying) = flying.and_then(|entry| entry.flying.as_ref()) else {
            return;
        };
        if flying.kind == Kind::Read {
            self.give_up(&|index| index == id.index);
        }
    }

    /// Asks for an early end of reads.
    fn give_up(&mut self, flights: &dyn Fn(u32) -> bool) {
        let mine = |user: u64| flights(index_of(user));
        for line in self.queues.iter_mut().filter(|line| line.in_flight > 0) {
            line.queue.cancel(&mine);
            line.pushed = true;
        }
        let mut gone = Vec::new();
        for lane in &mut self.lanes {
            let waiting = std::mem::take(&mut lane.waiting);
            for part in waiting {
                match mine(part.user) {
                    true => gone.push(part),
                    false => lane.waiting.push_back(part),
                }
            }
        }
        for part in gone {
            let landed = self.end(Ended::cancelled(part));
            self.early.extend(landed);
        }
        self.account();
        self.ring();
    }

    /// [`cancel`](Queues::cancel) for all flights.
    pub fn cancel_all(&mut self) {
        let is_read = |entry: &Entry| entry.flying.as_ref().is_some_and(|f| f.kind == Kind::Read);
        let reads: Vec<bool> = self.entries.iter().map(is_read).collect();
        self.give_up(&|index| reads[index as usize]);
    }
}

impl Drop for Queues {
    /// Invariant 1: waits for what is in flight, after asking for an early end.
    fn drop(&mut self) {
        if self.in_flight() == 0 {
            return;
        }
        self.cancel_all();
        let mut landed = Vec::new();
        while self.in_flight() > 0 {
            self.wait(None, None);
            self.reap(&mut landed);
            landed.clear();
        }
    }
}

impl std::fmt::Debug for Queues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queues")
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

/// One ring for these devices, or, where the kernel gives none, a queue without one for each.
fn on_rings(
    lanes: &mut [Lane],
    queues: &mut Vec<Line>,
    devices: &[(usize, Arc<FileDevice>)],
    bell: &Arc<Bell>,
) -> Result<(), Error> {
    let count = devices.len();
    let files: Vec<_> = devices.iter().map(|(_, file)| Arc::clone(file)).collect();
    let most = lanes[devices[0].0].depth;
    let most = most.min((RING_PARTS_MAX / count).max(1));
    let ring = uring::as_deep(most, |depth| RingQueue::new(&files, depth * count));
    let ring = ring.map_err(|source| Error::NoIoUring {
        source: Arc::new(source),
    })?;
    let Some((ring, depth)) = ring else {
        for (lane, file) in devices {
            lanes[*lane].queue = queues.len();
            queues.push(Line::new(threads::queue(file, bell)));
        }
        return Ok(());
    };
    for (number, (lane, _)) in devices.iter().enumerate() {
        let lane = &mut lanes[*lane];
        (lane.queue, lane.number, lane.depth) = (queues.len(), number, depth);
    }
    queues.push(Line::new(Box::new(ring)));
    Ok(())
}

impl Line {
    fn new(queue: Box<dyn Queue>) -> Line {
        Line {
            queue,
            in_flight: 0,
            pushed: false,
        }
    }
}

impl Lane {
    fn send(&mut self, part: Part, lines: &mut [Line]) {
        match self.in_flight < self.depth {
            true => self.push(part, lines),
            false => self.waiting.push_back(part),
        }
    }

    fn push(&mut self, part: Part, lines: &mut [Line]) {
        let line = &mut lines[self.queue];
        line.queue.push(part);
        (line.in_flight, line.pushed) = (line.in_flight + 1, true);
        self.in_flight += 1;
    }
}

impl Entry {
    fn free() -> Entry {
        Entry {
            generation: 0,
            flying: None,
        }
    }
}

/// A part's mark: its flight, its device, and its place among the flight's parts.
fn mark(index: u32, device: usize, order: u32) -> u64 {
    assert!((order as usize) < PARTS_MAX && device < LANES_MAX);
    u64::from(index) << 44 | (device as u64) << 28 | u64::from(order)
}

fn index_of(mark: u64) -> u32 {
    (mark >> 44) as u32
}

fn device_of(mark: u64) -> usize {
    (mark >> 28) as usize % LANES_MAX
}

fn order_of(mark: u64) -> u32 {
    (mark % PARTS_MAX as u64) as u32
}

//! A device that takes a set time for each request, over another one that is faster: for measuring what many
//! devices, or slow ones, do on a machine that has none.
//!
//! 1. A device works on at most `depth` units at a time, and takes `service` for each; a request is as many units as
//!    it has pieces of 128 KiB, one at least. What finds no place waits for the first that becomes free, in order of arrival.
//! 2. The request itself is performed when it is submitted, so that its data is there at the end of its time, and
//!    never after. Its time begins when that is done.
//! 3. One that stalls does nothing in the first part of each period: what is in service then takes that much longer.
//! 4. A caller waits until its last request's time is over, by the policy that it was made with ([`crate::reap`]): it sleeps in the
//!    kernel, whose wake-up is a real one and costs what one costs, or looks at the clock in the place of a completion queue. When
//!    the time is over is nothing that the policy is told.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::atomic::{AtomicBool, AtomicU64, Ordering};
use base::clock::{self, Clock};
use base::sync::{Mutex, rank};

use crate::block::{BlockDevice, DeviceInfo, Durability, Operation, Request};
use crate::queue::{Bell, DeviceQueue, Ended, Part, Queue, Wake, perform, sleep_until};
use crate::reap::{BELL_EACH, Class, Group, Reaped, Reaper, Reaping, Seen, Source, Times};

/// Bytes that take a device's service time once.
const UNIT: usize = 128 << 10;

/// How slow a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latency {
    /// Of a read or write of up to 128 KiB.
    pub service: Duration,
    /// Of a flush, which a durable write takes besides.
    pub flush: Duration,
    /// Units in service at a time; at least 1.
    pub depth: usize,
}

/// When a device does nothing: for so long at the beginning of each period of its clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    pub period: Duration,
    pub stalled: Duration,
}

impl Stall {
    /// When so much has been done that begins then.
    fn end(self, from: u64, time: u64) -> u64 {
        let (period, stalled) = (
            self.period.as_nanos() as u64,
            self.stalled.as_nanos() as u64,
        );
        if stalled >= period {
            // It never works: that is no stall.
            return from + time;
        }
        let (mut at, mut left) = (from, time);
        loop {
            at += stalled.saturating_sub(at % period);
            let works = period - at % period;
            if left <= works {
                return at + left;
            }
            (at, left) = (at + works, left - works);
        }
    }
}

/// A device with a service time; see the module's head.
pub struct LatencyDevice {
    below: Arc<dyn BlockDevice>,
    latency: Latency,
    stall: Option<Stall>,
    clock: Clock,
    /// When each place becomes free, in nanoseconds of the clock; the first on top.
    places: Mutex<BinaryHeap<Reverse<u64>>>,
    /// In the place of the one in `latency`, in nanoseconds.
    service: AtomicU64,
    reaper: Reaper,
}

impl LatencyDevice {
    /// `below` made as slow as that. With a manual clock a request moves it forward instead of sleeping.
    pub fn new(below: Arc<dyn BlockDevice>, latency: Latency, clock: Clock) -> LatencyDevice {
        let places = (0..latency.depth.max(1)).map(|_| Reverse(0)).collect();
        LatencyDevice {
            below,
            latency,
            stall: None,
            clock,
            places: Mutex::new(rank::LEAF, places),
            service: AtomicU64::new(latency.service.as_nanos() as u64),
            reaper: Reaper::new(Reaping::Interrupt),
        }
    }

    /// Callers wait so.
    pub fn reaping(mut self, policy: Reaping) -> LatencyDevice {
        self.reaper = Reaper::new(policy);
        self
    }

    /// What is submitted from now on takes another service time.
    pub fn set_service(&self, time: Duration) {
        let ns = time.as_nanos() as u64;
        self.service.store(ns, Ordering::Relaxed);
    }

    /// It does nothing now and then.
    pub fn stalling(mut self, stall: Stall) -> LatencyDevice {
        self.stall = Some(stall);
        self
    }

    /// When all of the requests' times are over.
    fn admit(&self, requests: &[Request<'_>]) -> u64 {
        let now = self.clock.monotonic_ns();
        let service = Duration::from_nanos(self.service.load(Ordering::Relaxed));
        let mut places = self.places.lock();
        let mut serve = |from: u64, time: Duration| {
            // There is at least one place.
            let Reverse(free) = places.pop().unwrap_or_default();
            let (from, time) = (free.max(from), time.as_nanos() as u64);
            let over = self
                .stall
                .map_or(from + time, |stall| stall.end(from, time));
            places.push(Reverse(over));
            over
        };
        let mut end = now;
        for request in requests {
            let mut over = now;
            for _ in 0..request.operation.bytes().div_ceil(UNIT) {
                over = over.max(serve(now, service));
            }
            if flushes(&request.operation) {
                over = serve(over, self.latency.flush);
            }
            end = end.max(over);
        }
        end
    }
}

impl LatencyDevice {
    /// Until a time of the device's clock.
    fn wait(&self, times: &mut Times, group: Group, end: u64) -> Option<Seen> {
        let clock = &self.clock;
        match clock {
            Clock::Manual(_) => {
                clock.sleep_until(end);
                None
            }
            Clock::Real(_) => {
                let mut over = Over {
                    clock,
                    end,
                    bell: None,
                    looks: 0,
                };
                Some(self.reaper.wait(times, group, &mut over))
            }
        }
    }
}

/// The end of a request's time, as something to wait for.
struct Over<'a> {
    clock: &'a Clock,
    end: u64,
    /// Or this one, which was rung so often, is rung again.
    bell: Option<(&'a Bell, u64)>,
    looks: u32,
}

impl Over<'_> {
    fn is_over(&self) -> bool {
        self.clock.monotonic_ns() >= self.end
    }
}

impl Source for Over<'_> {
    fn is_there(&mut self) -> bool {
        self.looks += 1;
        // A bell has a lock.
        let rung = self.looks.is_multiple_of(BELL_EACH)
            && self.bell.is_some_and(|(bell, rung)| bell.rung() != rung);
        rung || self.is_over()
    }

    fn sleep(&mut self, until: Option<u64>) {
        let left = until.map(|until| until.saturating_sub(clock::now_ns()));
        let until = left.map(|left| self.clock.monotonic_ns() + left);
        let until = until.map_or(self.end, |until| until.min(self.end));
        sleep_until(self.clock, until, self.bell);
        // Rung or not, it is the next to be looked at.
        self.looks = BELL_EACH - 1;
    }

    fn is_other(&mut self) -> bool {
        self.bell.is_some() && !self.is_over()
    }
}

/// Whether a flush is it, or is in it.
fn flushes(operation: &Operation<'_>) -> bool {
    match operation {
        Operation::Flush => true,
        Operation::Write { durability, .. } => *durability == Durability::Durable,
        Operation::Read { .. } => false,
    }
}

impl BlockDevice for LatencyDevice {
    fn name(&self) -> &str {
        self.below.name()
    }

    fn bytes(&self) -> u64 {
        self.below.bytes()
    }

    fn logical_block(&self) -> u32 {
        self.below.logical_block()
    }

    fn physical_block(&self) -> u32 {
        self.below.physical_block()
    }

    fn take_smaller_blocks(&self, bytes: u32) -> io::Result<()> {
        self.below.take_smaller_blocks(bytes)
    }

    fn memory_align(&self) -> usize {
        self.below.memory_align()
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            reap: self.reaper.policy(),
            ..self.below.info()
        }
    }

    fn has_writer(&self) -> &AtomicBool {
        self.below.has_writer()
    }

    fn reaped(&self) -> Option<Reaped> {
        Some(self.reaper.reaped())
    }

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        if requests.is_empty() {
            return self.below.run(requests, meanwhile);
        }
        self.below.run(requests, None);
        let end = self.admit(requests);
        let mut times = self.reaper.take();
        let class = Class::of_operations(requests.iter().map(|request| &request.operation));
        let group = self.reaper.begin(&mut times, class);
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        self.wait(&mut times, group, end);
        self.reaper.keep(times);
    }

    fn queue(self: Arc<Self>, _bell: &Arc<Bell>) -> DeviceQueue {
        DeviceQueue::alone(LatencyQueue {
            device: self,
            times: Times::default(),
            seen: None,
            in_service: BinaryHeap::new(),
            count: 0,
            pushed: Vec::new(),
            parts: Vec::new(),
            free: Vec::new(),
            performed: Vec::new(),
        })
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(offset, len)
    }

    fn release_claim(&self) -> io::Result<()> {
        self.below.release_claim()
    }
}

/// What an owner has in flight on such a device: each part has been performed (invariant 2), and ends when its time is over.
struct LatencyQueue {
    device: Arc<LatencyDevice>,
    times: Times,
    /// How what has ended was found, if it was waited for.
    seen: Option<Seen>,
    /// Ends of parts' times, the first on top, and where the parts are.
    in_service: BinaryHeap<Reverse<(u64, usize)>>,
    parts: Vec<Option<InService>>,
    /// How many have been performed.
    count: u64,
    /// Until it is rung.
    pushed: Vec<Part>,
    /// Places of `parts` without one.
    free: Vec<usize>,
    /// On the way there; what is left when the device below panics has failed.
    performed: Vec<Ended>,
}

struct InService {
    ended: Ended,
    /// If its time is taken.
    since: Option<u64>,
    class: Class,
}

impl Queue for LatencyQueue {
    fn push(&mut self, part: Part) {
        self.pushed.push(part);
    }

    fn ring(&mut self) {
        if self.pushed.is_empty() {
            return;
        }
        let pushed = std::mem::take(&mut self.pushed);
        perform(&*self.device.below, pushed, &mut self.performed);
        for Ended { mut part, result } in self.performed.drain(..) {
            let end = self.device.admit(&[Request::new(part.operation(), 0)]);
            let at = self.free.pop().unwrap_or_else(|| {
                self.parts.push(None);
                self.parts.len() - 1
            });
            let class = Class::of(part.kind, part.segment.len(), self.in_service.len() + 1);
            self.parts[at] = Some(InService {
                ended: Ended { part, result },
                since: self.device.reaper.start(self.count),
                class,
            });
            self.count += 1;
            self.in_service.push(Reverse((end, at)));
        }
    }

    fn reap(&mut self, ended: &mut Vec<Ended>) {
        ended.append(&mut self.performed);
        let now = self.device.clock.monotonic_ns();
        let mut seen = self.seen.take();
        while let Some(&Reverse((end, at))) = self.in_service.peek()
            && end <= now
        {
            self.in_service.pop();
            self.free.push(at);
            let Some(part) = self.parts[at].take() else {
                continue;
            };
            if let (Some(since), Ok(())) = (part.since, &part.ended.result) {
                let seen = *seen.get_or_insert_with(Seen::found);
                let (reaper, times) = (&self.device.reaper, &mut self.times);
                reaper.ended(times, (part.class, since), seen);
            }
            ended.push(part.ended);
        }
    }

    /// A part whose end it is, by the device's policy; who has less patience than that sleeps.
    fn sleep_until(&mut self, ns: u64, bell: Option<(&Bell, u64)>) {
        let clock = &self.device.clock;
        let first = match self.in_service.peek() {
            Some(&Reverse((end, at))) if end <= ns => self.parts[at].as_ref(),
            _ => None,
        };
        match (first, clock) {
            (Some(part), Clock::Real(_)) => {
                let reaper = &self.device.reaper;
                let group = match part.since {
                    Some(since) if reaper.learns() => {
                        let count = self.in_service.len();
                        reaper.begin_first(&mut self.times, (part.class, since), count)
                    }
                    _ => reaper.begin_any(),
                };
                let mut over = Over {
                    clock,
                    end: ns,
                    bell,
                    looks: 0,
                };
                let seen = reaper.wait_for_first(&mut self.times, group, &mut over);
                self.seen = seen.tells().then_some(seen);
            }
            _ => sleep_until(clock, ns, bell),
        }
    }

    fn wake(&self) -> Wake<'_> {
        match self.in_service.peek() {
            _ if !self.performed.is_empty() => Wake::Now,
            Some(&Reverse((end, _))) => Wake::At(end, &self.device.clock),
            None => Wake::Now,
        }
    }

    /// What has begun takes its time.
    fn cancel(&mut self, _mine: &dyn Fn(u64) -> bool) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OpenOptions, create_image, open_devices};

    const SERVICE: u64 = 100_000;
    const FLUSH: u64 = 250_000;

    fn device(depth: usize) -> (tempfile::TempDir, LatencyDevice, Clock) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        create_image(&path, 1 << 20).unwrap();
        let below = open_devices(&[path], &OpenOptions::default())
            .unwrap()
            .remove(0);
        let clock = Clock::manual(1_000);
        let latency = Latency {
            service: Duration::from_nanos(SERVICE),
            flush: Duration::from_nanos(FLUSH),
            depth,
        };
        let device = LatencyDevice::new(below, latency, clock.clone());
        (dir, device, clock)
    }

    fn write<'a>(offset: u64, buf: &'a [u8]) -> Request<'a> {
        let durability = Durability::Volatile;
        let operation = Operation::Write {
            offset,
            buf,
            durability,
        };
        Request::new(operation, 0)
    }

    #[test]
    fn a_request_takes_its_service_time_and_a_flush_its_own() {
        let (_dir, device, clock) = device(4);
        let block = crate::AlignedBuf::from_slice(&[7; 4096]);
        let start = clock.monotonic_ns();
        device.write(4096, &block, Durability::Volatile).unwrap();
        assert_eq!(clock.monotonic_ns() - start, SERVICE);
        device.flush().unwrap();
        assert_eq!(clock.monotonic_ns() - start, SERVICE + FLUSH);
        device.write(0, &block, Durability::Durable).unwrap();
        assert_eq!(clock.monotonic_ns() - start, 2 * (SERVICE + FLUSH));
        let mut back = crate::AlignedBuf::zeroed(4096);
        device.read(4096, &mut back).unwrap();
        assert_eq!(&back[..], &block[..]);
        assert_eq!(clock.monotonic_ns() - start, 3 * SERVICE + 2 * FLUSH);
    }

    #[test]
    fn as_many_requests_as_its_depth_are_served_at_once() {
        let (_dir, device, clock) = device(4);
        let block = crate::AlignedBuf::zeroed(4096);
        let start = clock.monotonic_ns();
        let mut four: Vec<Request<'_>> = (0..4).map(|i| write(i * 4096, &block)).collect();
        device.run(&mut four, None);
        assert_eq!(clock.monotonic_ns() - start, SERVICE);
        let mut nine: Vec<Request<'_>> = (0..9).map(|i| write(i * 4096, &block)).collect();
        device.run(&mut nine, None);
        assert_eq!(clock.monotonic_ns() - start, 4 * SERVICE);
    }

    #[test]
    fn a_device_that_stalls_works_in_the_rest_of_each_period() {
        let ms = |n: u64| Duration::from_millis(n);
        let stall = Stall {
            period: ms(10),
            stalled: ms(4),
        };
        let end = |from: u64, time: u64| stall.end(from * 1_000_000, time * 1_000_000) / 1_000_000;
        assert_eq!(end(0, 1), 5);
        assert_eq!(end(5, 1), 6);
        assert_eq!(end(9, 1), 10);
        assert_eq!(end(9, 3), 16);
        assert_eq!(end(12, 6), 20);
        assert_eq!(end(12, 13), 35);
        let (_dir, device, clock) = device(4);
        let device = device.stalling(stall);
        let block = crate::AlignedBuf::from_slice(&[7; 4096]);
        device.write(0, &block, Durability::Volatile).unwrap();
        assert_eq!(clock.monotonic_ns(), 4_000_000 + SERVICE);
    }

    #[test]
    fn large_requests_take_the_time_of_their_pieces() {
        let (_dir, device, clock) = device(2);
        let large = crate::AlignedBuf::zeroed(3 * UNIT + 4096);
        let start = clock.monotonic_ns();
        device.write(0, &large, Durability::Volatile).unwrap();
        assert_eq!(clock.monotonic_ns() - start, 2 * SERVICE);
    }

    #[test]
    fn other_devices_are_started_before_the_wait() {
        let (_dir, device, clock) = device(1);
        let block = crate::AlignedBuf::zeroed(4096);
        let (start, mut seen) = (clock.monotonic_ns(), 0);
        let mut look = || seen = clock.monotonic_ns();
        device.run(&mut [write(0, &block)], Some(&mut look));
        assert_eq!(seen, start);
        assert_eq!(clock.monotonic_ns() - start, SERVICE);
    }
}

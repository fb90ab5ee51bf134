//! The thread that owns one device's queue.
//!
//! Owns the parts in hand, and to whom each goes back.
//!
//! 1. A part is in the mail, taken, in the device's queue under the number of its slot, or back with its sender.
//! 2. It sleeps only after it has found its mail as it was when it read its bell, and with what is in hand started: so neither a letter
//!    nor an end is missed.
//! 3. A panic of the device's code fails what the queue says, and ends nothing else: a queue loses no part by it
//!    ([`crate::queue`], 5). One that does nothing but panic ends the process: what it has in hand can be given back to nobody.

use super::mail::{Left, Room};
use super::returns::Returns;
use super::{Cancel, Sent, Shared};
use crate::queue::{Bell, DeviceQueue, Ended, Own, Queue, Wake};
use crate::threads;
use crate::topology::Urgency;
use crate::uring::{self, RingQueue};
use base::clock::{self, Clock};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Parts in hand at most: enough for any device, few enough that what is urgent does not wait behind many.
pub(super) const DEPTH: usize = 256;
/// Panics after which a device's code does nothing else.
const PANICS_MAX: u32 = 1000;

struct Slot {
    to: Arc<Returns<Ended>>,
    /// The sender's mark.
    user: u64,
    urgency: Urgency,
}

/// See the module's head.
pub(super) struct IoThread {
    shared: Arc<Shared>,
    queue: Box<dyn Queue>,
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    /// In hand, and not urgent.
    low: usize,
    taken: VecDeque<(Urgency, Sent)>,
    told: Vec<Arc<Bell>>,
    ended: Vec<Ended>,
    /// On their way to one sender.
    back: Vec<Ended>,
    owners: Vec<Arc<Returns<Ended>>>,
    /// In a row, without anything that ended.
    panics: u32,
}

impl IoThread {
    /// To be made by the thread itself: a ring belongs to who makes it.
    pub fn new(shared: Arc<Shared>, queue: DeviceQueue) -> IoThread {
        let (queue, depth): (Box<dyn Queue>, usize) = match queue.0 {
            Own::Alone(queue) => (queue, DEPTH),
            Own::OnRing(file) => {
                let ring = |depth| RingQueue::of_thread(Arc::clone(&file), depth);
                match uring::as_deep(DEPTH, ring) {
                    Ok(Some((ring, depth))) => (Box::new(ring), depth),
                    Ok(None) => (threads::queue(&file, &shared.bell), DEPTH),
                    Err(error) => {
                        tracing::warn!(%error, "no ring for a driver");
                        (threads::queue(&file, &shared.bell), DEPTH)
                    }
                }
            }
        };
        IoThread {
            shared,
            queue,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth as u32).rev().collect(),
            low: 0,
            taken: VecDeque::new(),
            told: Vec::new(),
            ended: Vec::new(),
            back: Vec::new(),
            owners: Vec::new(),
            panics: 0,
        }
    }

    /// Works until the device is given up.
    pub fn live(mut self) {
        clock::exact_timers();
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.step())) {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => self.stumble(),
            }
        }
    }

    fn stumble(&mut self) {
        self.panics += 1;
        if self.panics == PANICS_MAX {
            tracing::error!("a device's code does nothing but panic, with I/O in flight");
            std::process::abort();
        }
    }

    fn in_hand(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// A turn; false: it was the last.
    fn step(&mut self) -> bool {
        let rung = self.shared.bell.rung();
        let left = self.take();
        self.cancel();
        if !self.ended.is_empty() {
            // What was found before a panic is told first.
        } else if self.in_hand() > 0 {
            self.sleep(rung);
        } else if left.closed {
            return false;
        } else {
            self.shared.bell.wait(rung, None);
        }
        self.queue.reap(&mut self.ended);
        self.give_back();
        true
    }

    /// Takes what there is room for, and hands it to the queue.
    fn take(&mut self) -> Left {
        // What a panic left.
        self.push();
        let room = Room {
            all: self.free.len(),
            low: (self.slots.len() / 2).saturating_sub(self.low),
        };
        let left = self.shared.mail.take(room, &mut self.taken, &mut self.told);
        for bell in self.told.drain(..) {
            bell.ring();
        }
        self.push();
        left
    }

    fn push(&mut self) {
        while !self.free.is_empty()
            && let Some((urgency, Sent { mut part, to })) = self.taken.pop_front()
            && let Some(index) = self.free.pop()
        {
            self.low += usize::from(urgency == Urgency::Low);
            let user = std::mem::replace(&mut part.user, u64::from(index));
            let slot = Slot { to, user, urgency };
            self.slots[index as usize] = Some(slot);
            self.queue.push(part);
        }
    }

    fn cancel(&mut self) {
        let cancels = std::mem::take(&mut *self.shared.cancels.lock());
        for Cancel { of, users } in cancels {
            let slots = &self.slots;
            let mine = |index: u64| {
                let slot = slots.get(index as usize).and_then(Option::as_ref);
                slot.is_some_and(|s| Arc::ptr_eq(&s.to, &of) && users.contains(&s.user))
            };
            self.queue.cancel(&mine);
        }
    }

    /// Starts what was pushed, and waits until something may have ended or come (invariant 2).
    fn sleep(&mut self, rung: u64) {
        let bell = &self.shared.bell;
        if let Wake::Kernel = self.queue.wake() {
            return self.queue.wait(Some((bell, rung)), None);
        }
        self.queue.ring();
        match self.queue.wake() {
            Wake::Now | Wake::Kernel => {}
            Wake::Bell => bell.wait(rung, None),
            Wake::At(ns, Clock::Manual(_)) => self.queue.sleep_until(ns, None),
            Wake::At(ns, Clock::Real(_)) => self.queue.sleep_until(ns, Some((bell, rung))),
        }
    }

    /// Gives back what has ended: of one sender that lies together at once.
    fn give_back(&mut self) {
        let mut last: Option<Arc<Returns<Ended>>> = None;
        for Ended { mut part, result } in self.ended.drain(..) {
            let index = part.user as usize;
            let Some(Slot { to, user, urgency }) = self.slots[index].take() else {
                continue;
            };
            self.free.push(index as u32);
            self.low -= usize::from(urgency == Urgency::Low);
            self.panics = 0;
            part.user = user;
            if let Some(before) = last.replace(to)
                && let Some(now) = &last
                && !Arc::ptr_eq(&before, now)
            {
                before.put(self.back.drain(..));
                self.owners.push(before);
            }
            self.back.push(Ended { part, result });
        }
        if let Some(last) = last {
            last.put(self.back.drain(..));
            self.owners.push(last);
        }
        for at in 0..self.owners.len() {
            let (before, rest) = self.owners.split_at(at);
            if !before.iter().any(|other| Arc::ptr_eq(other, &rest[0])) {
                rest[0].ring();
            }
        }
        self.owners.clear();
    }
}

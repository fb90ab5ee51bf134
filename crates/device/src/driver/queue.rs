//! The flights of one owner on a device with a driver.
//!
//! 1. A part is held, sent, or back. What the driver's mail has no room for is held here, in the order in which it came, until it has:
//!    the owner's bell says so.
//! 2. A part that was sent has a mark of its own, which no part had before: who asks for an early end of one that has ended asks
//!    for nothing.

use super::mail::PARTS;
use super::returns::Returns;
use super::{Cancel, Driven, Sent, left};
use crate::queue::{Bell, Ended, Part, Queue, Wake};
use crate::reap::{Class, Group, Seen, Source, Times};
use crate::topology::Urgency;
use base::{clock, thread};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// With more in flight something comes back all the time, and who waits for it sleeps.
const LOOKED_AT: usize = 64;

pub(super) struct DrivenQueue {
    driven: Arc<Driven>,
    bell: Arc<Bell>,
    returns: Arc<Returns<Ended>>,
    held: VecDeque<Part>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Given up before the driver had them.
    given_up: Vec<Ended>,
    times: Times,
    pushed: u64,
    /// How what is back was found, if it was waited for.
    seen: Option<Seen>,
}

/// A part that is held or sent; its mark is its place and its generation.
struct Entry {
    generation: u32,
    /// The owner's mark.
    user: u64,
    in_flight: bool,
    cancelled: bool,
    /// With what it has in common how long it takes, and when it was pushed, if its time is taken.
    pushed: Option<(Class, u64)>,
}

impl DrivenQueue {
    pub fn new(driven: Arc<Driven>, bell: Arc<Bell>) -> DrivenQueue {
        DrivenQueue {
            driven,
            returns: Arc::new(Returns::new(Some(Arc::clone(&bell)))),
            bell,
            held: VecDeque::new(),
            entries: Vec::new(),
            free: Vec::new(),
            given_up: Vec::new(),
            times: Times::default(),
            pushed: 0,
            seen: None,
        }
    }

    fn in_flight(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// The part that should be the first to come back, as a group of its own; where nothing is learnt, any.
    fn first(&mut self) -> Option<Group> {
        let (reaper, in_flight) = (&self.driven.reaper, self.in_flight());
        if !reaper.learns() {
            return Some(reaper.begin_any());
        }
        if in_flight > LOOKED_AT {
            return None;
        }
        let times = &self.times;
        let finish = |(class, since): &(Class, u64)| {
            let ns = times.prediction(*class);
            ns.map_or(u64::MAX, |ns| since + ns)
        };
        let in_hand = self.entries.iter().filter(|entry| entry.in_flight);
        let first = in_hand
            .filter_map(|entry| entry.pushed)
            .min_by_key(finish)?;
        Some(reaper.begin_first(&mut self.times, first, in_flight))
    }

    /// Sends what is held, as far as there is room.
    fn send(&mut self) {
        let mut any = false;
        while !self.held.is_empty() {
            let count = self.held.len().min(PARTS);
            let sent = self.held.drain(..count).map(|part| Sent {
                part,
                to: Arc::clone(&self.returns),
            });
            let mail = &self.driven.shared.mail;
            match mail.try_send(Urgency::of_caller(), sent.collect(), &self.bell) {
                Ok(()) => any = true,
                Err(letter) => {
                    for Sent { part, .. } in letter.into_iter().rev() {
                        self.held.push_front(part);
                    }
                    break;
                }
            }
        }
        if any {
            self.driven.shared.bell.ring();
        }
    }

    /// A part is back.
    fn settle(&mut self, ended: &mut Ended) {
        let index = ended.part.user as u32;
        let entry = &mut self.entries[index as usize];
        // What failed, or was given up, tells nothing of how long transfers take.
        if let (Some(pushed), Ok(())) = (entry.pushed.take(), &ended.result) {
            let seen = *self.seen.get_or_insert_with(Seen::found);
            self.driven.reaper.ended(&mut self.times, pushed, seen);
        }
        ended.part.user = entry.user;
        entry.in_flight = false;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(index);
    }

    fn give_up(&mut self, parts: impl IntoIterator<Item = Part>) {
        for part in parts {
            let mut ended = Ended::cancelled(part);
            self.settle(&mut ended);
            self.given_up.push(ended);
        }
    }
}

impl Entry {
    fn mark(&self, index: u32) -> u64 {
        u64::from(self.generation) << 32 | u64::from(index)
    }
}

impl Queue for DrivenQueue {
    fn push(&mut self, mut part: Part) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry {
                generation: 0,
                user: 0,
                in_flight: false,
                cancelled: false,
                pushed: None,
            });
            self.entries.len() as u32 - 1
        });
        let class = Class::of(part.kind, part.segment.len(), self.in_flight());
        let since = self.driven.reaper.start(self.pushed);
        self.pushed += 1;
        let entry = &mut self.entries[index as usize];
        (entry.in_flight, entry.cancelled) = (true, false);
        entry.pushed = since.map(|since| (class, since));
        entry.user = std::mem::replace(&mut part.user, entry.mark(index));
        self.held.push_back(part);
    }

    fn ring(&mut self) {
        self.send();
    }

    fn reap(&mut self, ended: &mut Vec<Ended>) {
        ended.append(&mut self.given_up);
        let from = ended.len();
        self.returns.take(ended);
        for ended in &mut ended[from..] {
            self.settle(ended);
        }
        self.seen = None;
        self.send();
    }

    fn wake(&self) -> Wake<'_> {
        // Held, and no more on the list of those who are told: there was room since (invariant 4 of the mail).
        let untold = !self.held.is_empty() && !self.driven.shared.mail.will_tell(&self.bell);
        match untold || !self.given_up.is_empty() || !self.returns.is_empty() {
            true => Wake::Now,
            false => Wake::Bell,
        }
    }

    /// By the device's policy.
    fn wait_for_bell(&mut self, (bell, rung): (&Bell, u64), patience: Option<Duration>) {
        let Some(group) = self.first() else {
            return bell.wait(rung, patience);
        };
        let mut rings = Rings {
            returns: &self.returns,
            bell: (bell, rung),
            until: patience.map(|time| clock::now_ns().saturating_add(clock::ns_of(time))),
        };
        let reaper = &self.driven.reaper;
        let seen = reaper.wait_for_first(&mut self.times, group, &mut rings);
        self.seen = seen.tells().then_some(seen);
    }

    fn cancel(&mut self, mine: &dyn Fn(u64) -> bool) {
        let (entries, returns) = (&self.entries, &self.returns);
        let meant = |part: &Part| mine(entries[part.user as u32 as usize].user);
        let (mut gone, mut kept) = (Vec::new(), VecDeque::new());
        for part in std::mem::take(&mut self.held) {
            match meant(&part) {
                true => gone.push(part),
                false => kept.push_back(part),
            }
        }
        let of_ours = |sent: &Sent| Arc::ptr_eq(&sent.to, returns) && meant(&sent.part);
        let withdrawn = self.driven.shared.mail.withdraw(of_ours);
        gone.extend(withdrawn.into_iter().map(|sent| sent.part));
        self.held = kept;
        self.give_up(gone);
        let mut users = Vec::new();
        for (index, entry) in self.entries.iter_mut().enumerate() {
            if entry.in_flight && !entry.cancelled && mine(entry.user) {
                entry.cancelled = true;
                users.push(entry.mark(index as u32));
            }
        }
        if !users.is_empty() {
            let of = Arc::clone(&self.returns);
            self.driven.shared.cancels.lock().push(Cancel { of, users });
            self.driven.shared.bell.ring();
        }
    }
}

/// Something that is back, a bell that was rung so often, or the end of the owner's patience.
struct Rings<'a> {
    returns: &'a Returns<Ended>,
    bell: (&'a Bell, u64),
    until: Option<u64>,
}

impl Source for Rings<'_> {
    fn is_there(&mut self) -> bool {
        let (bell, rung) = self.bell;
        let is_over = self.until.is_some_and(|until| clock::now_ns() >= until);
        is_over || bell.rung() != rung || !self.returns.is_empty()
    }

    fn sleep(&mut self, until: Option<u64>) {
        let (bell, rung) = self.bell;
        let until = until.into_iter().chain(self.until).min();
        bell.wait(rung, until.map(left));
    }

    fn pause(&mut self) {
        thread::yield_now();
    }

    fn is_other(&mut self) -> bool {
        self.returns.is_empty()
    }
}

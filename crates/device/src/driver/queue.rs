//! The flights of one owner on a device with a driver.
//!
//! 1. A part is held, sent, or back. What the driver's mail has no room for is held here, in the order in which it came, until it has:
//!    the owner's bell says so.
//! 2. A part that was sent has a mark of its own, which no part had before: who asks for an early end of one that has ended asks
//!    for nothing.

use super::mail::PARTS;
use super::returns::Returns;
use super::{Cancel, Driven, Sent};
use crate::queue::{Bell, Ended, Part, Queue, Wake};
use crate::topology::Urgency;
use std::collections::VecDeque;
use std::sync::Arc;

pub(super) struct DrivenQueue {
    driven: Arc<Driven>,
    bell: Arc<Bell>,
    returns: Arc<Returns<Ended>>,
    held: VecDeque<Part>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Given up before the driver had them.
    given_up: Vec<Ended>,
}

/// A part that is held or sent; its mark is its place and its generation.
struct Entry {
    generation: u32,
    /// The owner's mark.
    user: u64,
    in_flight: bool,
    cancelled: bool,
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
        }
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
            });
            self.entries.len() as u32 - 1
        });
        let entry = &mut self.entries[index as usize];
        (entry.in_flight, entry.cancelled) = (true, false);
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

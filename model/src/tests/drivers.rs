//! Letters to a device's thread, and what comes back.

use super::check;
use crate::bell::Bell;
use crate::mail::{Mail, Room, Waiter};
use crate::returns::Returns;
use crate::topology::Urgency;
use std::collections::VecDeque;
use std::sync::Arc;

/// The bell of an owner of flights.
#[derive(Clone)]
struct Owner(Arc<Bell>);

impl Waiter for Owner {
    fn is(&self, other: &Owner) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

type Sent = (u32, Arc<Returns<u32>>);

struct Driver {
    mail: Mail<Sent, Owner>,
    bell: Bell,
}

impl Driver {
    /// With room for one letter of each urgency.
    fn new() -> Arc<Driver> {
        Arc::new(Driver {
            mail: Mail::new(1),
            bell: Bell::new(),
        })
    }

    /// The driver's thread over a device that does everything at once, until it is closed.
    fn live(&self) {
        let (mut taken, mut told) = (VecDeque::new(), Vec::new());
        loop {
            let rung = self.bell.rung();
            let left = self
                .mail
                .take(Room { all: 2, low: 1 }, &mut taken, &mut told);
            for owner in told.drain(..) {
                owner.0.ring();
            }
            if taken.is_empty() {
                if left.closed {
                    return;
                }
                self.bell.wait(rung, None);
            }
            for (_, (part, to)) in taken.drain(..) {
                to.put([part]);
                to.ring();
            }
        }
    }

    /// A call: sends letters of one part, and waits for all.
    fn call(&self, urgency: Urgency, parts: &[u32]) {
        let returns = Arc::new(Returns::new(None));
        for &part in parts {
            self.mail
                .send(urgency, [(part, Arc::clone(&returns))].into());
            self.bell.ring();
        }
        let mut back = Vec::new();
        // Awake for a look, then asleep.
        let there = returns.has(parts.len());
        returns.wait(parts.len(), &mut back);
        assert!(!there || back.len() == parts.len());
        back.sort_unstable();
        assert_eq!(back, parts);
    }

    /// An owner of flights: sends what there is room for, keeps the others, and goes by its bell.
    fn fly(&self, parts: &[u32]) {
        let owner = Owner(Arc::new(Bell::new()));
        let returns = Arc::new(Returns::new(Some(Arc::clone(&owner.0))));
        let mut held: VecDeque<u32> = parts.iter().copied().collect();
        let mut back = Vec::new();
        loop {
            while let Some(part) = held.pop_front() {
                let letter = [(part, Arc::clone(&returns))].into();
                if self.mail.try_send(Urgency::High, letter, &owner).is_err() {
                    held.push_front(part);
                    break;
                }
                self.bell.ring();
            }
            if back.len() == parts.len() {
                break;
            }
            // As `Queues` does: the bell first, then a look, then sleep.
            let rung = owner.0.rung();
            let untold = !held.is_empty() && !self.mail.will_tell(&owner);
            if returns.is_empty() && !untold {
                owner.0.wait(rung, None);
            }
            returns.take(&mut back);
        }
        back.sort_unstable();
        assert_eq!(back, parts);
    }

    fn close(&self) {
        self.mail.close();
        self.bell.ring();
    }
}

fn start(body: impl FnOnce() + 'static) -> loom::thread::JoinHandle<()> {
    loom::thread::spawn(body)
}

/// Two calls, one of them urgent, beside each other with room for one letter: each has back what it sent, and nobody waits for ever.
///
/// Found when broken: a driver that reads its bell after its mail; `take` that tells nobody who waits for room; `put` that wakes
/// nobody; `close` without the bell.
#[test]
fn whoever_waits_for_what_it_sent_has_it_back() {
    check(2, || {
        let driver = Driver::new();
        let (thread, other) = (Arc::clone(&driver), Arc::clone(&driver));
        let thread = start(move || thread.live());
        let other = start(move || other.call(Urgency::Low, &[1]));
        driver.call(Urgency::High, &[2, 3]);
        other.join().unwrap();
        driver.close();
        thread.join().unwrap();
    });
}

/// An owner of flights whose letters are refused, beside a call that takes the room: it is told when there is some, whenever it
/// looks.
///
/// Found when broken: `will_tell` left out of the look; `take` that forgets those who were refused; the bell read after the look.
#[test]
fn whoever_is_refused_hears_of_room() {
    check(2, || {
        let driver = Driver::new();
        let (thread, other) = (Arc::clone(&driver), Arc::clone(&driver));
        let thread = start(move || thread.live());
        let other = start(move || other.call(Urgency::High, &[7]));
        driver.fly(&[1, 2]);
        other.join().unwrap();
        driver.close();
        thread.join().unwrap();
    });
}

//! Batches on their way to one thread: bounded, of two urgencies. Checked by `model/`.
//!
//! Owns what was sent and not taken, and who waits for room.
//!
//! 1. No more than [`LETTERS`] letters of each urgency are here, of [`PARTS`] things each at most. Who sends more waits
//!    ([`Mail::send`]) or keeps it ([`Mail::try_send`]), and is then told by its bell once there is room.
//! 2. What was sent is taken once, or withdrawn; of one urgency in the order in which it came.
//! 3. What is urgent is taken first, but after [`SHARE`] letters of that one goes that is not.
//! 4. Who was refused is on the list of those who wait until it is told: both happen under the lock, so who finds itself no more on
//!    the list tries again.

use crate::topology::Urgency;
use base::sync::{Condvar, Mutex, rank};
use std::collections::VecDeque;

/// Letters of each urgency at most.
pub(crate) const LETTERS: usize = 64;
/// Things in a letter at most.
pub(crate) const PARTS: usize = 64;
/// Urgent letters between two that are not, while there are both.
pub(super) const SHARE: u32 = 4;

/// Something of one sender.
type Letter<T> = VecDeque<T>;

/// Who waits for room without sleeping here.
pub(crate) trait Waiter: Clone {
    fn is(&self, other: &Self) -> bool;
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Mail<T, W> {
    letters: usize,
    state: Mutex<State<T, W>>,
    /// For those who sleep here.
    room: Condvar,
}

#[derive(Debug)]
struct State<T, W> {
    high: VecDeque<Letter<T>>,
    low: VecDeque<Letter<T>>,
    /// Urgent letters since the last one that was not, while there was one.
    passed: u32,
    refused: Vec<W>,
    closed: bool,
}

/// How much the taker has room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub all: usize,
    /// For what is not urgent.
    pub low: usize,
}

/// What is left after something was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub empty: bool,
    pub closed: bool,
}

impl<T, W: Waiter> Mail<T, W> {
    /// Room for so many letters of each urgency.
    pub fn new(letters: usize) -> Mail<T, W> {
        let state = State {
            high: VecDeque::new(),
            low: VecDeque::new(),
            passed: 0,
            refused: Vec::new(),
            closed: false,
        };
        Mail {
            letters,
            state: Mutex::new(rank::LEAF, state),
            room: Condvar::new(),
        }
    }

    /// Sends a letter; waits until there is room.
    pub fn send(&self, urgency: Urgency, letter: Letter<T>) {
        let mut state = self.state.lock();
        while state.of(urgency).len() >= self.letters {
            self.room.wait(&mut state);
        }
        state.add(urgency, letter);
    }

    /// Sends a letter if there is room for it; else `who` is told when there is some.
    ///
    /// # Errors
    /// There is none; the letter comes back.
    pub fn try_send(&self, urgency: Urgency, letter: Letter<T>, who: &W) -> Result<(), Letter<T>> {
        let mut state = self.state.lock();
        if state.of(urgency).len() < self.letters {
            state.add(urgency, letter);
            return Ok(());
        }
        if !state.refused.iter().any(|other| other.is(who)) {
            state.refused.push(who.clone());
        }
        Err(letter)
    }

    /// Whether `who` was refused and has not been told of room (invariant 4).
    pub fn will_tell(&self, who: &W) -> bool {
        let state = self.state.lock();
        state.refused.iter().any(|other| other.is(who))
    }

    /// Takes as much as there is room for, and whom to tell that there is room again.
    pub fn take(
        &self,
        mut room: Room,
        into: &mut VecDeque<(Urgency, T)>,
        told: &mut Vec<W>,
    ) -> Left {
        let mut state = self.state.lock();
        let mut freed = false;
        while let Some(urgency) = state.next(room) {
            let letters = state.of(urgency);
            let Some(letter) = letters.front_mut() else {
                break;
            };
            let most = match urgency {
                Urgency::High => room.all,
                Urgency::Low => room.all.min(room.low),
            };
            let count = letter.len().min(most);
            into.extend(letter.drain(..count).map(|part| (urgency, part)));
            room.all -= count;
            if urgency == Urgency::Low {
                room.low -= count;
            }
            let whole = letter.is_empty();
            if whole {
                letters.pop_front();
                freed = true;
            }
            state.passed = match urgency {
                // A letter that goes in pieces keeps its turn.
                Urgency::Low if whole => 0,
                Urgency::Low => state.passed,
                Urgency::High if state.low.is_empty() => 0,
                Urgency::High => state.passed + u32::from(whole),
            };
        }
        if freed {
            told.append(&mut state.refused);
        }
        let left = Left {
            empty: state.high.is_empty() && state.low.is_empty(),
            closed: state.closed,
        };
        drop(state);
        if freed {
            self.room.notify_all();
        }
        left
    }

    /// Takes out what is meant, wherever it is.
    pub fn withdraw(&self, mine: impl Fn(&T) -> bool) -> Vec<T> {
        let mut gone = Vec::new();
        let mut state = self.state.lock();
        let State { high, low, .. } = &mut *state;
        for letter in high.iter_mut().chain(low) {
            for part in std::mem::take(letter) {
                match mine(&part) {
                    true => gone.push(part),
                    false => letter.push_back(part),
                }
            }
        }
        // An empty letter keeps its place until it is taken, and takes no room of the taker's.
        gone
    }

    /// Nothing more will come: who takes can end when all is done.
    pub fn close(&self) {
        self.state.lock().closed = true;
    }
}

impl<T, W> State<T, W> {
    fn of(&mut self, urgency: Urgency) -> &mut VecDeque<Letter<T>> {
        match urgency {
            Urgency::High => &mut self.high,
            Urgency::Low => &mut self.low,
        }
    }

    fn add(&mut self, urgency: Urgency, letter: Letter<T>) {
        debug_assert!(letter.len() <= PARTS);
        self.of(urgency).push_back(letter);
    }

    /// Whose turn it is (invariant 3).
    fn next(&self, room: Room) -> Option<Urgency> {
        let high = !self.high.is_empty() && room.all > 0;
        let low = !self.low.is_empty() && room.all.min(room.low) > 0;
        match (high, low) {
            (true, true) if self.passed >= SHARE => Some(Urgency::Low),
            (true, _) => Some(Urgency::High),
            (false, true) => Some(Urgency::Low),
            (false, false) => None,
        }
    }
}

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
const SHARE: u32 = 4;

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
                Urgency::Low => 0,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq, Eq)]
    struct Who(u32);

    impl Waiter for Who {
        fn is(&self, other: &Who) -> bool {
            self == other
        }
    }

    const AMPLE: Room = Room {
        all: 1000,
        low: 1000,
    };

    fn take(mail: &Mail<u32, Who>, room: Room) -> (Vec<u32>, Left) {
        let mut taken = VecDeque::new();
        let left = mail.take(room, &mut taken, &mut Vec::new());
        (taken.into_iter().map(|(_, part)| part).collect(), left)
    }

    #[test]
    fn what_is_urgent_goes_first_and_the_rest_in_its_turn() {
        let mail = Mail::new(64);
        for i in 0..10 {
            mail.send(Urgency::Low, [100 + 2 * i, 101 + 2 * i].into());
            mail.send(Urgency::High, [i].into());
        }
        let (taken, left) = take(&mail, AMPLE);
        let turns = [0, 1, 2, 3, 100, 101, 4, 5, 6, 7, 102, 103, 8, 9];
        assert_eq!(taken[..14], turns);
        assert_eq!((taken.len(), left.empty, left.closed), (30, true, false));
    }

    #[test]
    fn what_is_not_urgent_moves_under_endless_urgent_letters_with_little_room() {
        let mail = Mail::new(4);
        mail.send(Urgency::Low, [100, 101].into());
        let room = Room { all: 1, low: 1 };
        let (mut low, mut steps) = (0, 0);
        while low < 2 {
            mail.send(Urgency::High, [7].into());
            let (taken, _) = take(&mail, room);
            low += taken.iter().filter(|part| **part >= 100).count();
            steps += 1;
            assert!(steps <= 2 * (SHARE + 1));
            if taken[0] >= 100 {
                assert_eq!(take(&mail, room).0, [7]);
            }
        }
        // What has no room of its own keeps nobody from going.
        mail.send(Urgency::Low, [100].into());
        for _ in 0..10 {
            mail.send(Urgency::High, [7].into());
            assert_eq!(take(&mail, Room { all: 8, low: 0 }).0, [7]);
        }
    }

    #[test]
    fn mail_is_bounded_and_who_was_refused_is_told_once() {
        let mail = Mail::new(2);
        let who = Who(1);
        for i in 0..2 {
            mail.try_send(Urgency::High, [i, i].into(), &who).unwrap();
        }
        for _ in 0..3 {
            let back = mail.try_send(Urgency::High, [9].into(), &who);
            assert_eq!(back, Err([9].into()));
        }
        mail.try_send(Urgency::Low, [5].into(), &who).unwrap();
        assert!(mail.will_tell(&who) && !mail.will_tell(&Who(2)));
        let (mut taken, mut told) = (VecDeque::new(), Vec::new());
        // Half a letter makes no room.
        mail.take(Room { all: 1, low: 1 }, &mut taken, &mut told);
        assert!(told.is_empty() && mail.will_tell(&who));
        mail.take(Room { all: 1, low: 1 }, &mut taken, &mut told);
        assert_eq!(told, [who.clone()]);
        assert!(!mail.will_tell(&who));
        mail.try_send(Urgency::High, [9].into(), &who).unwrap();
        assert_eq!(take(&mail, AMPLE).0, [1, 1, 9, 5]);
    }

    #[test]
    fn who_sends_too_much_waits_until_there_is_room() {
        let mail = std::sync::Arc::new(Mail::<u32, Who>::new(1));
        let sender = std::sync::Arc::clone(&mail);
        let sends = move || (0..100).for_each(|i| sender.send(Urgency::High, [i].into()));
        let sends = base::thread::spawn("sends", sends).unwrap();
        let mut all = Vec::new();
        while all.len() < 100 {
            let (taken, _) = take(&mail, AMPLE);
            assert!(taken.len() <= 1);
            all.extend(taken);
            base::thread::yield_now();
        }
        sends.join().unwrap();
        assert!(all.is_sorted());
    }

    #[test]
    fn what_is_withdrawn_is_not_taken() {
        let mail = Mail::new(4);
        mail.send(Urgency::Low, [1, 2, 3].into());
        mail.send(Urgency::High, [4].into());
        assert_eq!(mail.withdraw(|part| part % 2 == 0), [4, 2]);
        mail.close();
        let (taken, left) = take(&mail, AMPLE);
        assert_eq!(taken, [1, 3]);
        assert!(left.empty && left.closed);
    }
}

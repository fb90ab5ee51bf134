//! The machine's locks: who has each, who waits for it and how, and what comes with it.
//!
//! A lock is as `parking_lot`'s:
//!
//! 1. Who comes while it is free has it, whoever waits. Who waits spins
//!    for a while, then sleeps. Releasing hands it to the first that spins; if none does it is free.
//!    The first that sleeps is woken in any case, and comes again when it runs; by who held it exclusively all
//!    sharers that sleep are, up to the first that wants it exclusively, and that (`RawRwLock::wake_parked_threads`).
//! 2. Sharers hold it together, but none gets in past one that spins for it exclusively. Who wants it exclusively while it is
//!    shared is next, spinning or asleep: no sharer gets in any more, and the last that leaves hands it over
//!    (`RawRwLock::wait_for_readers`).
//! 3. Who tries to share it and finds it taken goes on without it, as the code does; it waits when it has let go of what
//!    it held meanwhile, since then it asks for what it did not get.

use std::collections::VecDeque;

use super::super::costs::Time;
use super::super::steps::{PRIVATE, Step};
use super::lines::{Ahead, Cores, bit};
use super::{Run, Thread};

/// A thread that waits for a lock.
#[derive(Clone, Copy)]
pub(super) struct Waiter {
    thread: usize,
    exclusive: bool,
    since: Time,
}

#[derive(Default)]
pub(super) struct Lock {
    /// Threads that hold it.
    holders: usize,
    exclusive: bool,
    /// Wants it exclusively, and has it when those who share it are out.
    next: Option<Waiter>,
    /// The first of them may have fallen asleep meanwhile.
    spinning: VecDeque<Waiter>,
    asleep: VecDeque<Waiter>,
    /// Cores that have what the lock protects as it is now.
    pub(super) fresh: Cores,
    /// Cores that have asked for the first line of it, the one that lies beside the lock.
    asked: Cores,
}

impl Lock {
    /// What it protects is in no core's cache.
    pub(super) fn comes_anew(&mut self) {
        (self.fresh, self.asked) = (0, 0);
    }

    /// A core changed what it protects: others have to fetch that.
    pub(super) fn is_changed_by(&mut self, core: usize) {
        (self.fresh, self.asked) = (bit(core), 0);
    }
}

impl Thread {
    fn gives_back(&mut self, lock: u32) {
        let at = self.held.iter().rposition(|held| *held == lock);
        self.held.remove(at.expect("who gives a lock back has it"));
    }
}

/// A lock that was tried in vain (invariant 3).
#[derive(Clone, Copy)]
pub(super) struct Missed {
    lock: u32,
    line: u32,
    stage: MissedStage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MissedStage {
    /// The thread is where it would hold the lock.
    Skipped,
    /// It may hold another that it took right before.
    Passed,
    /// It waits for the lock.
    Due,
    /// It has it.
    Held,
}

impl Missed {
    /// The thread waits for it or has it now.
    pub(super) fn is_due(&self) -> bool {
        matches!(self.stage, MissedStage::Due | MissedStage::Held)
    }

    /// Whether the thread begins to wait for it before this step.
    pub(super) fn falls_due(&mut self, step: Option<Step>) -> bool {
        let due =
            self.stage == MissedStage::Passed && matches!(step, None | Some(Step::Lock { .. }));
        if due {
            self.stage = MissedStage::Due;
        }
        due
    }
}

impl Run<'_> {
    /// Which locks threads wait for, and what they hold.
    pub(super) fn waits(&self) -> String {
        let name = |lock: &u32| format!("{} {lock}", self.trace.locks[*lock as usize].name);
        let mut text = String::new();
        for (number, lock) in (0..).zip(&self.locks) {
            let waiters = lock.spinning.iter().chain(&lock.asleep);
            for waiter in waiters.chain(&lock.next) {
                let held = self.threads[waiter.thread].held.iter().map(name);
                let held: Vec<String> = held.collect();
                let how = match waiter.exclusive {
                    true => "exclusive",
                    false => "shared",
                };
                let (thread, wanted) = (waiter.thread, name(&number));
                text += &format!("{thread} wants {wanted} {how}, has {held:?}; ");
            }
        }
        text
    }

    /// Whether who comes gets the lock at once.
    fn is_free(&self, lock: u32, exclusive: bool) -> bool {
        let at = &self.locks[lock as usize];
        let barred = !exclusive && at.spinning.iter().any(|waiter| waiter.exclusive);
        at.next.is_none() && (at.holders == 0 || (!exclusive && !at.exclusive && !barred))
    }

    /// Whether a thread that tries to share a lock goes on without it.
    pub(super) fn misses(&mut self, thread: usize, lock: u32, line: u32) -> bool {
        let misses = self.threads[thread].missed.is_none() && !self.is_free(lock, false);
        if misses {
            self.threads[thread].missed = Some(Missed {
                lock,
                line,
                stage: MissedStage::Skipped,
            });
        }
        misses
    }

    /// A thread comes to where it gives back a lock, which it has unless it missed it. Returns when it goes on.
    pub(super) fn leave(
        &mut self,
        thread: usize,
        lock: u32,
        line: u32,
        now: Time,
        counted: bool,
    ) -> Time {
        use MissedStage::{Due, Passed, Skipped};
        let at = &mut self.threads[thread];
        match &mut at.missed {
            Some(missed) if missed.stage == Skipped && missed.lock == lock => {
                missed.stage = Passed;
                now
            }
            missed => {
                if let Some(missed) = missed
                    && missed.stage == Passed
                {
                    missed.stage = Due;
                }
                let core = at.core;
                at.gives_back(lock);
                self.unlock(core, lock, line, now, counted)
            }
        }
    }

    /// A thread waits for the lock that it tried in vain, or gives it back.
    pub(super) fn make_up(&mut self, thread: usize, missed: Missed, now: Time, counted: bool) {
        let Missed { lock, line, .. } = missed;
        let core = self.threads[thread].core;
        if missed.stage == MissedStage::Held {
            self.threads[thread].missed = None;
            self.threads[thread].gives_back(lock);
            let until = self.unlock(core, lock, line, now, counted);
            return self.at(until, thread);
        }
        if let Some(until) = self.lock(thread, lock, line, false, now, counted) {
            self.got(thread);
            self.at(until, thread);
        }
    }

    /// The thread has a lock: the one of its step, or the one that it missed.
    fn got(&mut self, thread: usize) {
        match &mut self.threads[thread].missed {
            Some(missed) if missed.stage == MissedStage::Due => missed.stage = MissedStage::Held,
            _ => self.advance(thread),
        }
    }

    /// A core asks for the first line of what a lock protects: what that refers to it does not know. Returns when it goes on.
    pub(super) fn ask_protected(&mut self, core: usize, lock: u32, now: Time) -> Time {
        let Lock { fresh, asked, .. } = self.locks[lock as usize];
        if fresh == 0 || (fresh | asked) & bit(core) != 0 || self.costs.protected_lines == 0 {
            return now;
        }
        let free = self.ahead[core].free(now, self.costs.fills);
        let comes = free + self.transfer(core, fresh, false);
        self.locks[lock as usize].asked |= bit(core);
        self.ahead[core].tidy(now);
        self.ahead[core].send(comes);
        self.ahead[core].locks.insert(lock, comes);
        free
    }

    /// `None`: the thread waits.
    pub(super) fn lock(
        &mut self,
        thread: usize,
        lock: u32,
        line: u32,
        exclusive: bool,
        now: Time,
        counted: bool,
    ) -> Option<Time> {
        let core = self.threads[thread].core;
        let free = self.is_free(lock, exclusive);
        let at = &mut self.locks[lock as usize];
        if !free {
            let waiter = Waiter {
                thread,
                exclusive,
                since: now,
            };
            match exclusive && !at.exclusive && at.next.is_none() {
                true => at.next = Some(waiter),
                false => at.spinning.push_back(waiter),
            }
            self.threads[thread].locked_out_since.get_or_insert(now);
            // It looks at the lock, and says in it that it waits.
            self.touch(core, line, true, now, false);
            return None;
        }
        at.holders += 1;
        at.exclusive = exclusive;
        self.threads[thread].held.push(lock);
        if let Some(since) = self.threads[thread].locked_out_since.take()
            && counted
        {
            self.spent.locks[lock as usize] += now - since;
        }
        let fetched = self.touch(core, line, true, now, counted);
        Some(self.protected(core, lock, exclusive, fetched, counted))
    }

    /// What the lock protects comes to the core.
    pub(super) fn protected(
        &mut self,
        core: usize,
        lock: u32,
        exclusive: bool,
        now: Time,
        counted: bool,
    ) -> Time {
        let Lock { fresh, asked, .. } = self.locks[lock as usize];
        let comes = Ahead::comes(&mut self.ahead[core].locks, lock, now);
        let line = self.transfer(core, fresh, false);
        let time = match (fresh == 0 || fresh & bit(core) != 0, asked & bit(core) != 0) {
            (true, _) => 0,
            (false, true) => comes - now + (self.costs.protected_lines - 1) * line,
            (false, false) => self.costs.protected_lines * line,
        };
        let at = &mut self.locks[lock as usize];
        (at.fresh, at.asked) = match exclusive {
            true => (bit(core), 0),
            false => (fresh | bit(core), asked & !bit(core)),
        };
        if counted {
            self.spent.locks[lock as usize] += time;
        }
        now + time
    }

    pub(super) fn unlock(
        &mut self,
        core: usize,
        lock: u32,
        line: u32,
        now: Time,
        counted: bool,
    ) -> Time {
        let released = self.touch(core, line, true, now, counted);
        let spin = self.costs.spin;
        let at = &mut self.locks[lock as usize];
        let was_exclusive = at.exclusive;
        if was_exclusive {
            // What others asked for meanwhile was changed.
            at.is_changed_by(core);
        }
        at.holders -= 1;
        if at.holders > 0 {
            return released;
        }
        if let Some(waiter) = at.next.take() {
            (at.holders, at.exclusive) = (1, true);
            let asleep = released.saturating_sub(waiter.since) > spin;
            let (runs, called) = match asleep {
                true => (released + self.costs.wake, released + self.costs.wake_call),
                false => (released, released),
            };
            self.give(waiter, core, (lock, line), runs);
            return called;
        }
        while let Some(waiter) = at.spinning.front()
            && released.saturating_sub(waiter.since) > spin
        {
            at.asleep.push_back(*waiter);
            at.spinning.pop_front();
        }
        // The first, and if it shares, those that share after it.
        let count = match at.spinning.front() {
            Some(first) if first.exclusive => 1,
            _ => {
                let waiters = at.spinning.iter();
                waiters.take_while(|waiter| !waiter.exclusive).count()
            }
        };
        let sharers = at.asleep.iter().take_while(|waiter| !waiter.exclusive);
        let woken = match was_exclusive {
            true => at.asleep.len().min(sharers.count() + 1),
            false => at.asleep.len().min(1),
        };
        let woken: Vec<Waiter> = at.asleep.drain(..woken).collect();
        let next: Vec<Waiter> = at.spinning.drain(..count).collect();
        at.holders = count;
        at.exclusive = next.first().is_some_and(|first| first.exclusive);
        for waiter in next {
            self.give(waiter, core, (lock, line), released);
        }
        // One after the other.
        let mut called = released;
        for waiter in woken {
            self.at(called + self.costs.wake, waiter.thread);
            called += self.costs.wake_call;
        }
        called
    }

    /// A thread goes on with a lock that is its now.
    fn give(&mut self, waiter: Waiter, from: usize, (lock, line): (u32, u32), runs: Time) {
        let given = self.hand_over(waiter, from, lock, runs);
        if line != PRIVATE {
            self.lines[line as usize].sharers = bit(self.threads[waiter.thread].core);
        }
        self.threads[waiter.thread].held.push(lock);
        self.got(waiter.thread);
        self.at(given, waiter.thread);
    }

    /// A thread that spins is given the lock that `from` has released; returns when it goes on.
    fn hand_over(&mut self, waiter: Waiter, from: usize, lock: u32, released: Time) -> Time {
        let Waiter {
            thread, exclusive, ..
        } = waiter;
        let to = self.threads[thread].core;
        let given = released + 2 * self.transfer(to, bit(from), false);
        let since = self.threads[thread].locked_out_since.take();
        let counted = self.threads[thread].job.is_none() && self.counting();
        if counted {
            self.spent.locks[lock as usize] += given - since.unwrap_or(waiter.since);
        }
        self.protected(to, lock, exclusive, given, counted)
    }
}

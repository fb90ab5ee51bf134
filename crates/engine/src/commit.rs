//! Commits under way, and those who wait for them. Checked by `model/`.
//!
//! Callers share batches: whoever may gather leads, the others wait for the outcome. Batches are
//! written at once and completed in the order in which they were gathered.
//!
//! Invariants:
//! 1. `durable` = e only if every batch of an epoch up to e was completed without an error.
//! 2. After a failure `durable` never advances again, and everyone who waits learns of it.
//! 3. Who waits, waits for something that is under way and that its end tells: a batch, which completes, or somebody who is
//!    gathering or was told to. All of that is looked at under the lock under which it changes. So no wait is bounded by time.
//!    Whoever may not gather because too few are here for that (`may_gather`) is told by the end of a batch, or by who comes.
//! 4. Nobody is woken for nothing: a batch's end wakes those whose epoch it makes durable, and when somebody may gather, one of
//!    those is whose epoch nobody has. If one is told and finds that it need not, then somebody else has gathered since, and
//!    tells the next; or its epoch is closed, and whoever closed it does when its batch has its place.
//! 5. What was gathered is in a [`Place`], then in a [`Ticket`], until it is complete. One that goes in another way, as by a panic, takes records with it
//!    that are in no batch: that is a failure (2). A place goes before others may gather, so no batch comes behind what is lost.
//!
//! *Who gathers beside a batch that is under way.* Threads that sync one change after the other come back soon after their batch
//! is complete. A batch that is gathered before they all wait leaves some of them to the next, and each costs a flush; one that is gathered
//! after they do has nobody to wait for. So where those who were here of late mostly come back while a batch is under way, it is gathered when they have, or
//! when nothing is under way any more ([`Crowd`]). Where they mostly do not, to wait for them is in vain: then half of those who wait for anything are
//! worth a batch.

use base::atomic::{AtomicBool, AtomicU64, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Condvar, Mutex, MutexGuard, rank};
use std::collections::VecDeque;
use std::sync::Arc;

/// Batches that may be on their way to the devices at once, but for one of a checkpoint, which waits for none of them.
pub(crate) const PIPELINE: u64 = 4;

/// Part of all who wait for whom a batch must be that is not the only one under way, where those who were here do not come back soon.
const BATCH_SHARE: usize = 2;

/// Who syncs, of late.
#[derive(Debug, Default)]
struct Crowd {
    /// How many were here at once: a moving maximum, in parts of [`Crowd::UNIT`].
    of_late: usize,
    /// Since the last batch was complete.
    most: usize,
    /// While what part of the batches they all were here: a moving mean, in parts of [`Crowd::UNIT`].
    complete: usize,
}

impl Crowd {
    const UNIT: usize = 1 << 10;
    /// By one part in so many what is known comes nearer, with each batch, to what that shows. A maximum of fewer batches misses some that come back, and
    /// makes small ones.
    const MEMORY: usize = 32;
    /// They come back if they were all here while so many of a hundred batches were under way. Of threads that do little else it was 44 to 83, of those
    /// that pause for as long as a commit takes 8 to 22.
    const OFTEN: usize = 40;

    fn saw(&mut self, here: usize) {
        self.most = self.most.max(here);
    }

    /// A batch is complete.
    fn forget(&mut self) {
        let most = std::mem::take(&mut self.most);
        let complete = Crowd::UNIT * usize::from(self.is_complete(most));
        self.complete = nearer(self.complete, complete);
        self.of_late = nearer(self.of_late, most * Crowd::UNIT).max(most * Crowd::UNIT);
    }

    fn is_complete(&self, here: usize) -> bool {
        here >= (self.of_late + Crowd::UNIT / 2) / Crowd::UNIT
    }

    fn comes_back(&self) -> bool {
        self.complete * 100 >= Crowd::OFTEN * Crowd::UNIT
    }
}

/// One part in [`Crowd::MEMORY`] of the way from one to the other, and at least a step.
fn nearer(from: usize, to: usize) -> usize {
    match from < to {
        true => from + (to - from).div_ceil(Crowd::MEMORY),
        false => from - (from - to).div_ceil(Crowd::MEMORY),
    }
}

#[derive(Debug)]
struct State<E> {
    /// Tickets given out, and completed in order.
    issued: u64,
    completed: u64,
    /// Somebody has found nobody gathering, and does that now.
    gathering: bool,
    /// The newest epoch of a ticket.
    closed: u64,
    durable: u64,
    failed: Option<E>,
    /// Those whose epoch is in no ticket, in the order in which they came; and the others.
    open: VecDeque<Waiting>,
    covered: Vec<Waiting>,
    /// Batches under way whose leaders came to wait.
    leaders: usize,
    crowd: Crowd,
}

/// Somebody who waits until its epoch is durable, or until it is to gather.
#[derive(Debug)]
struct Waiting {
    epoch: u64,
    turn: Arc<Turn>,
}

#[derive(Debug)]
struct Turn {
    /// Under the lock of the state.
    told: AtomicBool,
    wake: Condvar,
}

impl<E> State<E> {
    /// Whether somebody may gather now, if `more` than those in the list wait for that. While no batch is under way, any is
    /// better than none: who is alone never waits.
    fn may_gather(&self, more: usize) -> bool {
        let under_way = self.issued - self.completed;
        if self.gathering || under_way >= PIPELINE {
            return false;
        }
        if under_way == 0 {
            return true;
        }
        match self.crowd.comes_back() {
            true => self.crowd.is_complete(self.here() + more),
            false => {
                let open = self.open.len() + more;
                open * BATCH_SHARE >= open + self.covered.len()
            }
        }
    }

    /// Those who wait, and who of those who wrote the batches under way was one of them.
    fn here(&self) -> usize {
        self.open.len() + self.covered.len() + self.leaders
    }

    /// An epoch is in a ticket.
    fn cover(&mut self, epoch: u64) {
        self.closed = epoch;
        let mut at = 0;
        while at < self.open.len() {
            match self.open[at].epoch <= epoch {
                true => self.covered.extend(self.open.remove(at)),
                false => at += 1,
            }
        }
    }

    /// Takes those out of the lists who have nothing to wait for any more, and, when somebody may gather, one who can
    /// (invariant 4); they are woken when the lock is given back.
    fn tell(&mut self) -> Vec<Arc<Turn>> {
        let (durable, failed) = (self.durable, self.failed.is_some());
        let over = |waiting: &mut Waiting| failed || waiting.epoch <= durable;
        let over = self.covered.extract_if(.., over);
        let mut told: Vec<Arc<Turn>> = over.map(|waiting| waiting.turn).collect();
        if failed {
            told.extend(self.open.drain(..).map(|waiting| waiting.turn));
        } else if self.may_gather(0) {
            told.extend(self.open.pop_front().map(|waiting| waiting.turn));
        }
        for turn in &told {
            turn.told.store(true, Ordering::Relaxed);
        }
        told
    }
}

fn wake(told: Vec<Arc<Turn>>) {
    for turn in told {
        turn.wake.notify_all();
    }
}

/// The right to gather a batch and give it a place among the others (invariant 5).
#[must_use]
#[derive(Debug)]
pub(crate) struct Place<'a, E: Clone> {
    commits: &'a Commits<E>,
    /// Of somebody who gathers because [`Commits::through`] said so, which keeps others from gathering meanwhile.
    through: bool,
    free: bool,
}

impl<'a, E: Clone> Place<'a, E> {
    /// A batch has it.
    pub fn issue(mut self, epoch: u64, sequence: Option<u64>) -> Ticket<'a, E> {
        self.free = false;
        let mut state = self.commits.state.lock();
        let number = state.issued;
        state.issued += 1;
        if self.through {
            state.gathering = false;
            state.leaders += 1;
        }
        state.cover(epoch);
        let told = state.tell();
        drop(state);
        wake(told);
        Ticket {
            commits: self.commits,
            number,
            epoch,
            sequence,
            through: self.through,
            complete: false,
        }
    }

    /// Nothing was gathered.
    pub fn leave(mut self) {
        self.free = false;
        let mut state = self.commits.state.lock();
        self.is_left(&mut state);
        let told = state.tell();
        drop(state);
        wake(told);
    }

    fn is_left(&self, state: &mut State<E>) {
        if self.through {
            state.gathering = false;
        }
    }
}

impl<E: Clone> Drop for Place<'_, E> {
    fn drop(&mut self) {
        if self.free {
            let commits = self.commits;
            commits.stop(commits.lost, |state| self.is_left(state));
        }
    }
}

/// The place of a gathered batch among the others.
#[must_use]
#[derive(Debug)]
pub(crate) struct Ticket<'a, E: Clone> {
    commits: &'a Commits<E>,
    number: u64,
    epoch: u64,
    /// `None`: the epoch had no records, and nothing is written.
    sequence: Option<u64>,
    /// Who gathered it waited for it.
    through: bool,
    complete: bool,
}

impl<E: Clone> Ticket<'_, E> {
    fn is_over(&mut self, state: &mut State<E>) {
        self.complete = true;
        state.leaders -= usize::from(self.through);
        state.completed += 1;
    }
}

impl<E: Clone> Drop for Ticket<'_, E> {
    fn drop(&mut self) {
        if !self.complete {
            let commits = self.commits;
            commits.stop(commits.lost, |state| self.is_over(state));
        }
    }
}

#[derive(Debug)]
pub(crate) struct Commits<E> {
    durable: AtomicU64,
    /// Sequence number of the newest durable batch.
    durable_sequence: AtomicU64,
    state: Mutex<State<E>>,
    /// Whether `state.failed` holds an error.
    has_failed: AtomicBool,
    /// For who completes a batch: those before it are complete.
    completed: Condvar,
    /// Tells of the failure that is invariant 5's.
    lost: fn() -> E,
}

impl<E: Clone> Commits<E> {
    /// As if so many had synced together all the time.
    #[cfg(test)]
    pub fn expect(&self, here: usize) {
        self.state.lock().crowd = Crowd {
            of_late: here * Crowd::UNIT,
            most: 0,
            complete: Crowd::UNIT,
        };
    }

    /// Everything up to this epoch and this batch is durable. `lost` makes the error of what goes by a panic.
    pub fn new(durable: u64, durable_sequence: u64, lost: fn() -> E) -> Commits<E> {
        let state = State {
            issued: 0,
            completed: 0,
            gathering: false,
            closed: durable,
            durable,
            failed: None,
            open: VecDeque::new(),
            covered: Vec::new(),
            leaders: 0,
            crowd: Crowd::default(),
        };
        Commits {
            durable: AtomicU64::new(durable),
            durable_sequence: AtomicU64::new(durable_sequence),
            state: Mutex::new(rank::COMMIT_STATE, state),
            has_failed: AtomicBool::new(false),
            completed: Condvar::new(),
            lost,
        }
    }

    pub fn durable_epoch(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    pub fn durable_sequence(&self) -> u64 {
        self.durable_sequence.load(Ordering::Acquire)
    }

    pub fn failed(&self) -> Option<E> {
        // Every operation asks; only a failure is worth the lock.
        if !self.has_failed.load(Ordering::Acquire) {
            return None;
        }
        self.state.lock().failed.clone()
    }

    /// A failure elsewhere stops all commits (invariant 2).
    pub fn fail(&self, error: E) {
        self.stop(|| error, |_| {});
    }

    /// Fails, and notes what ends by that.
    fn stop(&self, error: impl FnOnce() -> E, note: impl FnOnce(&mut State<E>)) {
        let mut state = self.state.lock();
        self.latch(&mut state, error);
        note(&mut state);
        let told = state.tell();
        drop(state);
        self.completed.notify_all();
        wake(told);
    }

    fn latch(&self, state: &mut State<E>, error: impl FnOnce() -> E) {
        if state.failed.is_none() {
            state.failed = Some(error());
            self.has_failed.store(true, Ordering::Release);
        }
    }

    /// For a batch that nobody here waits for. Taken, and used, by whoever alone closes epochs meanwhile.
    pub fn place(&self) -> Place<'_, E> {
        Place {
            commits: self,
            through: false,
            free: true,
        }
    }

    /// No batch is between its place and its completion. Holds until somebody gathers.
    pub fn idle(&self) -> bool {
        let state = self.state.lock();
        state.issued == state.completed
    }

    /// Returns when no batch is between its place and its completion. Commits have failed, and nobody is gathering: none follows.
    pub fn await_idle(&self) {
        let mut state = self.state.lock();
        debug_assert!(state.failed.is_some());
        while state.issued != state.completed {
            self.completed.wait(&mut state);
        }
    }

    /// Completes a batch that was written, or was not, once those before it are.
    pub fn complete(&self, mut ticket: Ticket<'_, E>, written: Result<(), E>) -> Result<(), E> {
        let mut state = self.state.lock();
        let in_order = !planted(Canary::DurableOutOfOrder);
        while state.completed != ticket.number && state.failed.is_none() && in_order {
            self.completed.wait(&mut state);
        }
        if let Err(error) = written {
            self.latch(&mut state, || error);
        }
        let here = state.here();
        state.crowd.saw(here);
        state.crowd.forget();
        ticket.is_over(&mut state);
        let outcome = match &state.failed {
            Some(error) => Err(error.clone()),
            None => {
                state.durable = ticket.epoch;
                if let Some(sequence) = ticket.sequence {
                    self.durable_sequence.store(sequence, Ordering::Release);
                }
                self.durable.store(ticket.epoch, Ordering::Release);
                Ok(())
            }
        };
        let told = state.tell();
        // After a failure somebody may wait for the last one (`await_idle`).
        let others = state.issued > state.completed || state.failed.is_some();
        drop(state);
        if others {
            self.completed.notify_all();
        }
        wake(told);
        outcome
    }

    /// Returns when every record of an epoch up to `epoch` is durable. `open` is the open epoch;
    /// `gather` closes it and gathers a batch for the place, unless it is past `epoch` by then, or commits have failed;
    /// `write` writes and completes that.
    pub fn through<'a, B>(
        &'a self,
        epoch: u64,
        open: impl Fn() -> u64,
        gather: impl Fn(Place<'a, E>) -> Option<B>,
        write: impl Fn(B) -> Result<(), E>,
    ) -> Result<(), E> {
        loop {
            if self.durable_epoch() >= epoch {
                return Ok(());
            }
            let mut state = self.state.lock();
            // It may have become durable since, and commits have failed after that.
            if state.durable >= epoch {
                return Ok(());
            }
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if open() > epoch || !state.may_gather(1) {
                self.wait(state, epoch);
                continue;
            }
            state.gathering = true;
            drop(state);
            let place = Place {
                commits: self,
                through: true,
                free: true,
            };
            if let Some(batch) = gather(place) {
                write(batch)?;
            }
        }
    }

    fn wait(&self, mut state: MutexGuard<'_, State<E>>, epoch: u64) {
        if state.durable >= epoch {
            return;
        }
        let turn = Arc::new(Turn {
            told: AtomicBool::new(false),
            wake: Condvar::new(),
        });
        let waiting = Waiting {
            epoch,
            turn: Arc::clone(&turn),
        };
        let covered = epoch <= state.closed;
        match covered {
            true => state.covered.push(waiting),
            false => state.open.push_back(waiting),
        }
        let here = state.here();
        state.crowd.saw(here);
        if covered {
            // It may have been the last one for whom those in `open` waited.
            wake(state.tell());
        }
        while !turn.told.load(Ordering::Relaxed) {
            turn.wake.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Beside one batch, whose leader waits for it.
    fn beside_a_batch(crowd: Crowd) -> State<()> {
        State {
            issued: 1,
            completed: 0,
            gathering: false,
            closed: 0,
            durable: 0,
            failed: None,
            open: VecDeque::new(),
            covered: Vec::new(),
            leaders: 1,
            crowd,
        }
    }

    /// So many were here while each of so many batches was under way.
    fn seen(crowd: &mut Crowd, here: usize, batches: usize) {
        for _ in 0..batches {
            crowd.saw(here);
            crowd.forget();
        }
    }

    #[test]
    fn who_comes_beside_a_batch_waits_for_as_many_as_came_of_late() {
        let nobody = beside_a_batch(Crowd::default());
        assert!(nobody.may_gather(1), "nobody else was there of late");
        let mut crowd = Crowd::default();
        seen(&mut crowd, 4, 100);
        let mut state = beside_a_batch(crowd);
        assert!(!state.may_gather(1) && !state.may_gather(2));
        assert!(state.may_gather(3), "with the leader they are four");
        state.issued = PIPELINE;
        assert!(!state.may_gather(3));
        (state.completed, state.leaders) = (PIPELINE, 0);
        assert!(state.may_gather(1), "the batch under way is complete");
    }

    #[test]
    fn nobody_waits_for_those_who_seldom_come_back_in_time() {
        let mut crowd = Crowd::default();
        for _ in 0..100 {
            seen(&mut crowd, 8, 1);
            seen(&mut crowd, 3, 4);
        }
        assert!(!crowd.is_complete(5) && !crowd.comes_back());
        assert!(beside_a_batch(crowd).may_gather(1));
    }

    #[test]
    fn a_crowd_that_is_gone_is_forgotten_and_one_that_misses_once_is_not() {
        let mut crowd = Crowd::default();
        seen(&mut crowd, 16, 1);
        assert!(crowd.is_complete(16) && !crowd.is_complete(15));
        seen(&mut crowd, 14, 1);
        assert!(!crowd.is_complete(15));
        seen(&mut crowd, 2, Crowd::MEMORY * 6);
        assert!(crowd.is_complete(2) && !crowd.is_complete(1));
        assert!(crowd.comes_back());
    }
}

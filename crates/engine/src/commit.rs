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
//!    Whoever may not gather because too few wait for that (`may_gather`) is told by the end of a batch.
//! 4. Nobody is woken for nothing: a batch's end wakes those whose epoch it makes durable, and when somebody may gather, one of
//!    those is whose epoch nobody has. If one is told and finds that it need not, then somebody else has gathered since, and
//!    tells the next; or its epoch is closed, and whoever closed it does when its batch has its place.

use base::atomic::{AtomicBool, AtomicU64, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Condvar, Mutex, MutexGuard, rank};
use std::collections::VecDeque;
use std::sync::Arc;

/// Batches that may be on their way to the devices at once, but for one of a checkpoint, which waits for none of them.
pub(crate) const PIPELINE: u64 = 4;

/// Part of all who wait for whom a batch must be that is not the only one under way.
const BATCH_SHARE: usize = 2;

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
    /// better than none: who is alone never waits. Beside others a batch must be worth a flush of its own.
    fn may_gather(&self, more: usize) -> bool {
        let under_way = self.issued - self.completed;
        if self.gathering || under_way >= PIPELINE {
            return false;
        }
        let open = self.open.len() + more;
        under_way == 0 || open * BATCH_SHARE >= open + self.covered.len()
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

/// The place of a gathered batch among the others.
#[derive(Debug)]
pub(crate) struct Ticket {
    number: u64,
    epoch: u64,
    /// `None`: the epoch had no records, and nothing is written.
    sequence: Option<u64>,
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
}

impl<E: Clone> Commits<E> {
    /// Everything up to this epoch and this batch is durable.
    pub fn new(durable: u64, durable_sequence: u64) -> Commits<E> {
        let state = State {
            issued: 0,
            completed: 0,
            gathering: false,
            closed: durable,
            durable,
            failed: None,
            open: VecDeque::new(),
            covered: Vec::new(),
        };
        Commits {
            durable: AtomicU64::new(durable),
            durable_sequence: AtomicU64::new(durable_sequence),
            state: Mutex::new(rank::COMMIT_STATE, state),
            has_failed: AtomicBool::new(false),
            completed: Condvar::new(),
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
        let mut state = self.state.lock();
        self.latch(&mut state, error);
        let told = state.tell();
        drop(state);
        self.completed.notify_all();
        wake(told);
    }

    fn latch(&self, state: &mut State<E>, error: E) {
        if state.failed.is_none() {
            state.failed = Some(error);
            self.has_failed.store(true, Ordering::Release);
        }
    }

    /// Gives a batch its place. `through`: of somebody who gathers because [`through`](Self::through) said so, which keeps others
    /// from gathering until this returns.
    pub fn issue(&self, epoch: u64, sequence: Option<u64>, through: bool) -> Ticket {
        let mut state = self.state.lock();
        let number = state.issued;
        state.issued += 1;
        if through {
            state.gathering = false;
        }
        state.cover(epoch);
        let told = state.tell();
        drop(state);
        wake(told);
        Ticket {
            number,
            epoch,
            sequence,
        }
    }

    /// No batch is between its place and its completion. Holds until somebody gathers.
    pub fn idle(&self) -> bool {
        let state = self.state.lock();
        state.issued == state.completed
    }

    /// Completes a batch that was written, or was not, once those before it are.
    pub fn complete(&self, ticket: Ticket, written: Result<(), E>) -> Result<(), E> {
        let mut state = self.state.lock();
        let in_order = !planted(Canary::DurableOutOfOrder);
        while state.completed != ticket.number && state.failed.is_none() && in_order {
            self.completed.wait(&mut state);
        }
        if let Err(error) = written {
            self.latch(&mut state, error);
        }
        state.completed += 1;
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
        let others = state.issued > state.completed;
        drop(state);
        if others {
            self.completed.notify_all();
        }
        wake(told);
        outcome
    }

    /// Returns when every record of an epoch up to `epoch` is durable. `open` is the open epoch;
    /// `gather` closes it and gathers a batch, unless it is past `epoch` by then;
    /// `write` writes and completes that.
    pub fn through<B>(
        &self,
        epoch: u64,
        open: impl Fn() -> u64,
        gather: impl Fn() -> Option<B>,
        write: impl Fn(B) -> Result<(), E>,
    ) -> Result<(), E> {
        loop {
            if self.durable_epoch() >= epoch {
                return Ok(());
            }
            let mut state = self.state.lock();
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if open() > epoch || !state.may_gather(1) {
                self.wait(state, epoch);
                continue;
            }
            state.gathering = true;
            drop(state);
            match gather() {
                Some(batch) => write(batch)?,
                None => {
                    let mut state = self.state.lock();
                    state.gathering = false;
                    let told = state.tell();
                    drop(state);
                    wake(told);
                }
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
        match epoch > state.closed {
            true => state.open.push_back(waiting),
            false => state.covered.push(waiting),
        }
        while !turn.told.load(Ordering::Relaxed) {
            turn.wake.wait(&mut state);
        }
    }
}

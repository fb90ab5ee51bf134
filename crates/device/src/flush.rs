//! Coalesced flushes of one device (R17). Checked by `model/`.
//!
//! Owns what of a device is unflushed, whose turn it is to flush it, and which flushes may have failed that nobody has counted yet.
//!
//! 1. A write is unflushed until a flush *issued after its completion* has completed:
//!    `written` counts completed writes, a flush covers the count read before it is issued
//!    ([`FlushGate::begin`]), and only a good one raises `flushed` ([`Lead::finish`]).
//! 2. At most one flush is in flight. Everyone who arrives meanwhile holds the ticket of the
//!    next one; one of them issues it for all.
//! 3. `ordered` is at least the value of `written` after each completed write that no checksum vouches for; who has learnt
//!    of such a write and finds `flushed` there may write what names it.
//! 4. A failed flush is an error for every holder of its ticket and leaves `flushed` alone.
//! 5. The end of a flush wakes those who wait for it, and one of those who wait for the next. While one waits for a flush that is not in
//!    flight, somebody has been woken who will look whether to issue it.
//! 6. A flush is begun before it is issued, and answered for after its failure, if any, is counted: at the latest when it is published. So who has written
//!    durably and waits until all flushes are answered for that had begun by then ([`FlushGate::settle`]) finds the failure of each that may have lost what he wrote.

use base::atomic::{AtomicU64, Ordering};
use base::sync::{Condvar, Mutex, rank};
use std::io;
use std::sync::Arc;

type Outcome = Result<(), Arc<io::Error>>;

/// Flushes of an array that have failed.
///
/// Sequentially consistent: somebody counts a failure, then looks whether records wait that name
/// data; an operation announces a record, then looks at the count. One of the two sees the other.
#[derive(Debug)]
pub(crate) struct Failures(AtomicU64);

impl Failures {
    pub fn new() -> Failures {
        Failures(AtomicU64::new(0))
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    pub fn count(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// One flush.
#[derive(Debug)]
struct Ticket {
    /// How it ended, once it has.
    outcome: Mutex<Option<Outcome>>,
    /// It has ended, or one of those who wait for it may issue it. Under the lock of the gate.
    news: Condvar,
}

/// A share in one flush: the one that is issued next when the share is drawn.
#[derive(Debug)]
pub(crate) struct Share {
    ticket: Arc<Ticket>,
    /// The value of `written` when it was drawn.
    need: u64,
}

impl Ticket {
    fn new() -> Arc<Ticket> {
        Arc::new(Ticket {
            outcome: Mutex::new(rank::DEVICE_STATE, None),
            news: Condvar::new(),
        })
    }
}

#[derive(Debug)]
struct State {
    in_flight: bool,
    next: Arc<Ticket>,
}

#[derive(Debug)]
pub(crate) struct FlushGate {
    /// Writes completed without durability, failed ones included.
    written: AtomicU64,
    /// The value of `written` that the last good flush covered.
    flushed: AtomicU64,
    /// The value of `written` after the last write that must be flushed before what names it is written.
    ordered: AtomicU64,
    /// Flushes that were begun.
    begun: AtomicU64,
    /// As many of these, from the first on, are answered for. At most one is not (invariant 2).
    answered: AtomicU64,
    /// One is. Under the lock.
    answer: Condvar,
    state: Mutex<State>,
}

/// What a caller of flush has to do next.
pub(crate) enum Turn<'a> {
    /// Issue the flush, then [`Lead::finish`].
    Lead(Lead<'a>),
    /// The flush of the ticket has ended.
    Done(Outcome),
    /// Another one's flush is in flight.
    Wait,
}

/// The right and duty to issue one flush.
pub(crate) struct Lead<'a> {
    gate: &'a FlushGate,
    ticket: Arc<Ticket>,
    covers: u64,
    /// Which of those begun it is.
    number: u64,
    finished: bool,
}

impl FlushGate {
    /// A device of which nothing is known: it counts as unflushed (R8).
    pub fn new(device: usize) -> FlushGate {
        let state = State {
            in_flight: false,
            next: Ticket::new(),
        };
        FlushGate {
            written: AtomicU64::new(1),
            flushed: AtomicU64::new(0),
            ordered: AtomicU64::new(1),
            begun: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            answer: Condvar::new(),
            state: Mutex::keyed(rank::DEVICE_FLUSH, device as u64, state),
        }
    }

    /// Notes completed volatile writes; called before their completion is reported.
    pub fn wrote(&self) {
        let before = self.written.fetch_add(1, Ordering::Release);
        self.ordered.fetch_max(before + 1, Ordering::Release);
    }

    /// As [`wrote`](Self::wrote), of writes for which a checksum vouches.
    pub fn wrote_checked(&self) {
        self.written.fetch_add(1, Ordering::Release);
    }

    /// Whether all completed writes are flushed but those for which a checksum vouches.
    pub fn is_ordered(&self) -> bool {
        self.flushed.load(Ordering::Acquire) >= self.ordered.load(Ordering::Acquire)
    }

    /// A share in a flush that covers every write completed so far; `None` when all are
    /// flushed.
    pub fn draw(&self) -> Option<Share> {
        let need = self.written.load(Ordering::Acquire);
        if self.flushed.load(Ordering::Acquire) >= need {
            return None;
        }
        let ticket = Arc::clone(&self.state.lock().next);
        Some(Share { ticket, need })
    }

    /// Whose turn it is, without waiting.
    pub fn turn(&self, share: &Share) -> Turn<'_> {
        let mut state = self.state.lock();
        self.turn_locked(&mut state, share)
    }

    /// Waits until the share's flush has ended or is the caller's to issue.
    pub fn wait(&self, share: &Share) -> Turn<'_> {
        let mut state = self.state.lock();
        loop {
            match self.turn_locked(&mut state, share) {
                Turn::Wait => share.ticket.news.wait(&mut state),
                Turn::Done(outcome) => {
                    if !state.in_flight {
                        // Who was woken to issue it, and need not, leaves that to the next (invariant 5).
                        share.ticket.news.notify_one();
                    }
                    return Turn::Done(outcome);
                }
                lead => return lead,
            }
        }
    }

    /// Returns when all flushes that were begun by now are answered for (invariant 6). Costs a look when none is under way.
    pub fn settle(&self) {
        let begun = self.begun.load(Ordering::SeqCst);
        if self.answered.load(Ordering::SeqCst) >= begun {
            return;
        }
        let mut state = self.state.lock();
        while self.answered.load(Ordering::SeqCst) < begun {
            self.answer.wait(&mut state);
        }
    }

    fn turn_locked(&self, state: &mut State, share: &Share) -> Turn<'_> {
        if let Some(outcome) = &*share.ticket.outcome.lock() {
            return Turn::Done(outcome.clone());
        }
        if self.flushed.load(Ordering::Acquire) >= share.need {
            // The flush in flight when the share was drawn covered its writes after all.
            return Turn::Done(Ok(()));
        }
        if state.in_flight {
            return Turn::Wait;
        }
        // Invariant 2: no flush in flight and no outcome, so the ticket is the next one's.
        debug_assert!(Arc::ptr_eq(&state.next, &share.ticket));
        Turn::Lead(self.begin(state))
    }

    fn begin(&self, state: &mut State) -> Lead<'_> {
        state.in_flight = true;
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        Lead {
            gate: self,
            ticket: std::mem::replace(&mut state.next, Ticket::new()),
            covers: self.written.load(Ordering::Acquire),
            number,
            finished: false,
        }
    }
}

impl Lead<'_> {
    /// The flush has ended, and is counted if it has failed: nobody need wait for more to know.
    pub fn answered(&self) {
        let _state = self.gate.state.lock();
        self.answer();
    }

    /// Under the lock of the gate.
    fn answer(&self) {
        self.gate.answered.store(self.number, Ordering::SeqCst);
        self.gate.answer.notify_all();
    }

    /// Publishes how the flush ended and wakes everyone who waits for it.
    pub fn finish(mut self, outcome: Outcome) {
        self.publish(outcome);
    }

    fn publish(&mut self, outcome: Outcome) {
        self.finished = true;
        let mut state = self.gate.state.lock();
        if outcome.is_ok() {
            self.gate.flushed.fetch_max(self.covers, Ordering::AcqRel);
        }
        *self.ticket.outcome.lock() = Some(outcome);
        self.answer();
        state.in_flight = false;
        self.ticket.news.notify_all();
        state.next.news.notify_one();
    }
}

impl Drop for Lead<'_> {
    /// A leader that never issued its flush (it panicked) must not strand the others.
    fn drop(&mut self) {
        if !self.finished {
            self.publish(Err(Arc::new(io::Error::other("the flush was not issued"))));
        }
    }
}

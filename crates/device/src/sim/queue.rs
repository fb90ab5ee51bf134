//! What somebody has in flight on a simulated device.
//!
//! 1. A part is in the device's hands from when it was started until it is performed, in an order that a generator decides, so it may happen
//!    after what was started later. A read is performed when it is reaped; a write then, or long before that. What is performed together is
//!    one batch to a power cut.
//! 2. To a power cut a write in hand is one that is under way: any part of it may have happened, whatever was completed since it was started.
//! 3. A stuck device keeps what it has in hand, but for reads that are cancelled. Whoever waits for it is rung when it
//!    answers again.

use super::SimDevice;
use super::power::InBatch;
use crate::queue::{Ended, Kind, Part, Queue, Wake};
use base::rng::Rng;
use std::sync::Arc;

pub(super) struct SimQueue {
    device: Arc<SimDevice>,
    pushed: Vec<Part>,
    in_hand: Vec<Held>,
    ended: Vec<Ended>,
    order: Rng,
}

/// A part in hand, and the mark of a write that the device knows of.
struct Held {
    part: Part,
    mark: Option<u64>,
}

impl SimQueue {
    pub fn new(device: Arc<SimDevice>, seed: u64) -> SimQueue {
        SimQueue {
            device,
            pushed: Vec::new(),
            in_hand: Vec::new(),
            ended: Vec::new(),
            order: Rng::new(seed),
        }
    }
}

impl Queue for SimQueue {
    fn push(&mut self, part: Part) {
        self.pushed.push(part);
    }

    fn ring(&mut self) {
        for part in std::mem::take(&mut self.pushed) {
            self.start(part);
        }
        let _batch = InBatch::enter();
        for at in (0..self.in_hand.len()).rev() {
            if self.in_hand[at].mark.is_some() && self.order.one_in(2) {
                self.perform(at);
            }
        }
    }

    fn reap(&mut self, ended: &mut Vec<Ended>) {
        self.perform_some();
        // What was performed long ago is told late as well.
        let told = match self.ended.len() as u64 {
            0 => 0,
            all => 1 + self.order.below(all),
        };
        for _ in 0..told {
            let at = self.order.below(self.ended.len() as u64) as usize;
            ended.push(self.ended.swap_remove(at));
        }
    }

    fn wake(&self) -> Wake<'_> {
        match self.ended.is_empty() && self.device.is_stuck() {
            true => Wake::Bell,
            false => Wake::Now,
        }
    }

    fn cancel(&mut self, mine: &dyn Fn(u64) -> bool) {
        let reads = |held: &mut Held| held.part.kind == Kind::Read && mine(held.part.user);
        let gone = self.in_hand.extract_if(.., reads).map(|held| held.part);
        self.ended.extend(gone.map(Ended::cancelled));
        let reads = |part: &mut Part| part.kind == Kind::Read && mine(part.user);
        let gone = self.pushed.extract_if(.., reads);
        self.ended.extend(gone.map(Ended::cancelled));
    }
}

impl SimQueue {
    fn start(&mut self, part: Part) {
        let is_write = matches!(part.kind, Kind::Write(_)) && !part.segment.is_empty();
        let mark = is_write.then(|| {
            let mut state = self.device.state.lock();
            state.take_in_hand(part.offset, part.segment.bytes())
        });
        self.in_hand.push(Held { part, mark });
    }

    fn perform_some(&mut self) {
        if self.in_hand.is_empty() {
            return;
        }
        let _batch = InBatch::enter();
        // Some of them, so that others are overtaken by what comes later.
        for _ in 0..1 + self.order.below(self.in_hand.len() as u64) {
            let at = self.order.below(self.in_hand.len() as u64) as usize;
            if !self.perform(at) {
                return;
            }
        }
    }

    /// False: the device does not answer.
    fn perform(&mut self, at: usize) -> bool {
        let part = &mut self.in_hand[at].part;
        let Some(result) = self.device.perform_if_it_answers(&mut part.operation()) else {
            return false;
        };
        let Held { part, mark } = self.in_hand.swap_remove(at);
        if let Some(mark) = mark {
            self.device.state.lock().performed(mark, &result);
        }
        self.ended.push(Ended { part, result });
        true
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        let mut state = self.device.state.lock();
        state
            .in_hand
            .retain(|(mark, _)| !self.in_hand.iter().any(|held| held.mark == Some(*mark)));
    }
}

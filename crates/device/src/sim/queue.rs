//! What somebody has in flight on a simulated device.
//!
//! 1. A part is in the device's hands from when it was pushed. It is performed when it is reaped, in an order that a generator
//!    decides, so it may happen, and end, after what was pushed later. What is performed together is one batch to a power
//!    cut; what was only in hand when the power went has not happened.
//! 2. A stuck device keeps what it has in hand, but for reads that are cancelled. Whoever waits for it is rung when it
//!    answers again.

use super::SimDevice;
use super::power::InBatch;
use crate::block::BlockDevice;
use crate::queue::{Ended, Kind, Part, Queue, Wake, perform};
use base::rng::Rng;
use std::sync::Arc;

pub(super) struct SimQueue {
    device: Arc<SimDevice>,
    in_hand: Vec<Part>,
    ended: Vec<Ended>,
    order: Rng,
}

impl SimQueue {
    pub fn new(device: Arc<SimDevice>, seed: u64) -> SimQueue {
        SimQueue {
            device,
            in_hand: Vec::new(),
            ended: Vec::new(),
            order: Rng::new(seed),
        }
    }
}

impl Queue for SimQueue {
    fn push(&mut self, part: Part) {
        self.in_hand.push(part);
    }

    fn ring(&mut self) {}

    fn reap(&mut self, ended: &mut Vec<Ended>) {
        self.perform_some();
        ended.append(&mut self.ended);
    }

    fn wake(&self) -> Wake<'_> {
        match self.ended.is_empty() && self.device.is_stuck() {
            true => Wake::Bell,
            false => Wake::Now,
        }
    }

    fn cancel(&mut self, mine: &dyn Fn(u64) -> bool) {
        let reads = |part: &mut Part| part.kind == Kind::Read && mine(part.user);
        let gone = self.in_hand.extract_if(.., reads);
        self.ended.extend(gone.map(Ended::cancelled));
    }
}

impl SimQueue {
    fn perform_some(&mut self) {
        if self.in_hand.is_empty() || self.device.is_stuck() {
            return;
        }
        let _batch = InBatch::enter();
        // Some of them, so that others are overtaken by what comes later.
        for _ in 0..1 + self.order.below(self.in_hand.len() as u64) {
            let at = self.order.below(self.in_hand.len() as u64) as usize;
            let part = self.in_hand.swap_remove(at);
            let device = &*self.device as &dyn BlockDevice;
            perform(device, vec![part], &mut self.ended);
        }
    }
}

//! The queue of a device that only knows how to do things at once.

use super::{Ended, Part, Queue, Wake};
use crate::block::BlockDevice;
use std::sync::Arc;

/// Performs what was pushed, as one batch, when it is started.
pub(crate) struct Blocking<D: ?Sized> {
    device: Arc<D>,
    pushed: Vec<Part>,
    ended: Vec<Ended>,
}

impl<D: BlockDevice + ?Sized> Blocking<D> {
    pub fn new(device: Arc<D>) -> Self {
        Blocking {
            device,
            pushed: Vec::new(),
            ended: Vec::new(),
        }
    }
}

impl<D: BlockDevice + ?Sized> Queue for Blocking<D> {
    fn push(&mut self, part: Part) {
        self.pushed.push(part);
    }

    fn ring(&mut self) {
        if self.pushed.is_empty() {
            return;
        }
        super::perform(
            &*self.device,
            std::mem::take(&mut self.pushed),
            &mut self.ended,
        );
    }

    fn reap(&mut self, ended: &mut Vec<Ended>) {
        ended.append(&mut self.ended);
    }

    fn wake(&self) -> Wake<'_> {
        Wake::Now
    }

    fn cancel(&mut self, mine: &dyn Fn(u64) -> bool) {
        let gone = self.pushed.extract_if(.., |part| mine(part.user));
        self.ended.extend(gone.map(Ended::cancelled));
    }
}

//! The queue of a device that only knows how to do things at once.

use super::{Ended, Part, Queue, Wake};
use crate::block::{BlockDevice, Request};
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
        let mut requests: Vec<Request<'_>> = self
            .pushed
            .iter_mut()
            .enumerate()
            .map(|(tag, part)| Request::new(part.operation(), tag))
            .collect();
        self.device.run(&mut requests, None);
        let errors: Vec<_> = requests.into_iter().map(|request| request.error).collect();
        let ended = self.pushed.drain(..).zip(errors);
        self.ended.extend(ended.map(|(part, error)| Ended {
            part,
            result: error.map_or(Ok(()), Err),
        }));
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

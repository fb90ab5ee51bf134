//! A batch that is in flight on a simulated device.

use super::SimDevice;
use super::power::InBatch;
use crate::block::Request;
use std::vec::IntoIter;

/// Requests of the calling thread that have been handed to a device, all at once: a power cut finds those that are not performed yet under
/// way, as it does the rest of what the same thread has in flight on other devices.
pub struct Batch<'a> {
    device: &'a SimDevice,
    marks: IntoIter<Option<u64>>,
    _within: InBatch,
}

impl SimDevice {
    /// All of these requests are in flight from now on, each until [`Batch::perform`] has performed it.
    pub fn begin(&self, requests: &[Request<'_>]) -> Batch<'_> {
        Batch {
            device: self,
            marks: self.take_in_hand(requests).into_iter(),
            _within: InBatch::enter(),
        }
    }
}

impl Batch<'_> {
    /// Performs the next of the requests that the batch was begun with, and notes how it has ended.
    pub fn perform(&mut self, request: &mut Request<'_>) {
        let result = self.device.perform(&mut request.operation);
        if let Some(mark) = self.marks.next().flatten() {
            self.device.state.lock().performed(mark, &result);
        }
        request.error = result.err();
    }
}

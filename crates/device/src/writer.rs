//! One at a time writes to an array that is open: two file systems on it, or one and its repair, would ruin each other.

use crate::array::Array;
use crate::error::Error;
use base::atomic::Ordering;
use std::sync::Arc;

/// Who may change what an array holds. Dropped, it lets the next one.
#[derive(Debug)]
pub struct Writer(Arc<Array>);

impl Array {
    /// Taken by whoever makes, opens or repairs what is on the array, before the first look at it; nobody is asked for it who only
    /// reads.
    ///
    /// # Errors
    /// [`Error::InUse`]
    pub fn writer(self: &Arc<Self>) -> Result<Writer, Error> {
        match self.has_writer.swap(true, Ordering::AcqRel) {
            false => Ok(Writer(Arc::clone(self))),
            true => Err(Error::InUse {
                device: self.device_names().join(", "),
            }),
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.has_writer.store(false, Ordering::Release);
    }
}

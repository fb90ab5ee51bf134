//! One at a time writes to devices that are open: two file systems on them, or one and its repair, would ruin each other.
//!
//! 1. The claim is with each device ([`BlockDevice::has_writer`]), so that every array over it knows, and goes with the [`Writer`].
//! 2. Who gets it has it on all devices; who does not, on none.

use crate::array::Array;
use crate::block::BlockDevice;
use crate::error::Error;
use base::atomic::Ordering;
use std::sync::Arc;

/// Who may change what an array holds. Dropped, it lets the next one.
pub struct Writer(Vec<Arc<dyn BlockDevice>>);

impl Writer {
    /// Of these devices, all or none.
    pub(crate) fn of<'a>(
        devices: impl Iterator<Item = &'a Arc<dyn BlockDevice>>,
    ) -> Result<Writer, Error> {
        let mut writer = Writer(Vec::new());
        for device in devices {
            if device.has_writer().swap(true, Ordering::AcqRel) {
                return Err(Error::InUse {
                    device: device.name().to_owned(),
                });
            }
            writer.0.push(Arc::clone(device));
        }
        Ok(writer)
    }
}

impl Array {
    /// Taken by whoever makes, opens or repairs what is on the array, before the first look at it; nobody is asked for it who only
    /// reads. Another array over one of the devices, as they are open here, has none meanwhile.
    ///
    /// # Errors
    /// [`Error::InUse`], with the first device that somebody else writes to.
    pub fn writer(&self) -> Result<Writer, Error> {
        Writer::of(self.devices())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        for device in &self.0 {
            device.has_writer().store(false, Ordering::Release);
        }
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.0.iter().map(|device| device.name());
        f.debug_list().entries(names).finish()
    }
}

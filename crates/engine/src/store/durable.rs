//! What makes a store's changes and its data durable: commits, flushes, durable writes; and data for which batches vouch
//! ([`crate::vouched`]) until others confirm them.

use super::Store;
use crate::content::Content;
use crate::error::Error;
use crate::new_data::NewData;
use crate::op::Epoch;
use crate::space::Extent;
use base::atomic::Ordering;
use device::Io;

impl<C: Content> Store<C> {
    /// The open epoch: everything committed so far belongs to it or to an earlier one.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.journal.epoch())
    }

    pub fn durable_epoch(&self) -> Epoch {
        Epoch(self.journal.durable_epoch())
    }

    /// Returns when every operation of an epoch up to `epoch` is durable, together with the data
    /// written before them. Concurrent callers share one batch and one flush.
    pub fn commit_through(&self, epoch: Epoch) -> Result<(), Error> {
        self.journal.commit_through(epoch.0)?;
        self.release_freed(false);
        Ok(())
    }

    /// Everything committed and written so far becomes durable.
    pub fn sync(&self) -> Result<(), Error> {
        if self.options.read_only {
            return Ok(());
        }
        self.commit_through(self.epoch())?;
        // An empty epoch writes no batch and so flushes nothing; data may still wait.
        self.flush()
    }

    /// Makes everything written so far durable, without a commit. After a failure what was
    /// written since the last good flush may be lost, whatever later flushes say (R17): callers
    /// that wrote in place remember that, and if a record that waits for its commit may name such
    /// data, the store turns read-only.
    pub fn flush(&self) -> Result<(), Error> {
        let error = match self.array.flush() {
            Ok(flushed) => {
                let count = &self.counts.data_flushes;
                count.fetch_add(flushed, Ordering::Relaxed);
                return Ok(());
            }
            Err(error) => error,
        };
        self.after_failed_flush(&error);
        Err(error.into())
    }

    fn after_failed_flush(&self, error: &device::Error) {
        if !self.journal.forgive_flush() {
            self.latch(&format!("data of changes that wait for a commit: {error}"));
        }
    }

    /// Writes, and has what it wrote durable when it returns. Meant for a single transfer: each waits for the medium by
    /// itself. Durable after success if no flush has failed since before. After a failure they are as any that failed, and where a device caches writes it counts as a
    /// failed flush ([`Array::write_durably`]).
    pub fn write_durably(&self, ios: &mut [Io<'_>]) -> Result<(), Error> {
        let count = &self.counts.data_durably;
        count.fetch_add(ios.len() as u64, Ordering::Relaxed);
        let failures = self.array.flush_failures();
        let Err(error) = self.array.write_durably(ios) else {
            return Ok(());
        };
        if self.array.flush_failures() != failures {
            self.after_failed_flush(&error);
        }
        Err(error.into())
    }

    /// Up to which epoch what was freed may be given out (R4; vouched, invariant 5).
    pub(super) fn settled_epoch(&self) -> u64 {
        let durable = self.journal.durable_epoch();
        self.journal.vouched.settled(durable)
    }

    /// Blocks for whose content a batch vouches that recovery would look at after a crash now.
    pub fn vouched(&self) -> Vec<Extent> {
        self.journal.vouched.runs()
    }

    /// Returns when nothing hinders a write to these blocks: when no batch vouches for what they hold that recovery
    /// might look at.
    ///
    /// # Errors
    /// Those of a commit; [`Error::ReadOnly`] when the store ends.
    pub fn confirm(&self, blocks: Extent) -> Result<(), Error> {
        match self.journal.vouched.newest_of(blocks) {
            Some(epoch) => self.confirm_through(epoch),
            None => Ok(()),
        }
    }

    /// What operations have left to their commit to write ([`Op::vouch`](crate::Op::vouch)) and some of these blocks may not hold yet: for who reads
    /// them from the devices, after having learnt in a node that they are meant, and before reading. What is not among it is there.
    pub fn waiting_data(&self, blocks: Extent) -> Vec<NewData> {
        self.journal.vouched.waiting_in(blocks)
    }

    /// Whether a batch that is not confirmed vouches for any block.
    pub fn vouches(&self) -> bool {
        self.journal.vouched.newest().is_some()
    }

    /// Whether [`Store::confirm`] would have to wait.
    pub fn is_vouched(&self, blocks: Extent) -> bool {
        self.journal.vouched.newest_of(blocks).is_some()
    }

    /// Returns when no batch of an epoch up to this one vouches for data any more.
    fn confirm_through(&self, epoch: u64) -> Result<(), Error> {
        while !self.journal.vouched.is_confirmed(epoch) {
            // Somebody else's batch may have done it by now.
            self.journal.commit_through(epoch)?;
            let (seen, shard) = (self.newest_checkpoint(), self.shard());
            match self.journal.try_credit(shard) {
                Some(credit) => {
                    if let Some(error) = self.refused() {
                        self.journal.return_credit(credit);
                        return Err(error);
                    }
                    // This one is gathered when that one is durable, and says so.
                    let next = self.journal.stage_nothing(shard, credit);
                    self.journal.commit_through(next)?;
                    self.journal.vouched.confirm(epoch);
                }
                None => self.make_room(seen)?,
            }
        }
        Ok(())
    }

    /// What was freed so far need not wait for batches that vouch for what it held.
    pub(crate) fn confirm_all(&self) -> Result<(), Error> {
        match self.journal.vouched.newest() {
            Some(epoch) => self.confirm_through(epoch),
            None => Ok(()),
        }
    }

    /// Whether an operation may vouch for data instead of having it flushed first ([`Op::vouch`]).
    pub fn may_vouch(&self) -> bool {
        self.journal.vouched.has_room()
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{TestStore, create, format, options};
    use device::sim::{SimDevice, Times};
    use device::{Durability, Io};
    use std::sync::Arc;

    /// A bad block ended all writing while records waited, where no flush could have lost what they name.
    #[test]
    fn a_block_that_cannot_be_written_is_a_failed_flush_only_where_something_is_cached() {
        for is_cached in [true, false] {
            let device = SimDevice::new(64 << 20, 1);
            let device = match is_cached {
                true => device,
                false => device.without_cache(),
            };
            let array = format(Arc::clone(&device) as _);
            let (store, _) = TestStore::open(array, options()).unwrap();
            create(&store, 10);
            device.fail_writes(Times::Always, None);
            let write = Io::Write {
                byte: 32 << 20,
                buf: &[1; 4096],
                durability: Durability::Durable,
            };
            store.write_durably(&mut [write]).unwrap_err();
            device.heal();
            assert_eq!(store.failed().is_some(), is_cached);
        }
    }
}

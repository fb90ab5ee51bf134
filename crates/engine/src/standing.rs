//! How an array was left, as its last checkpoint record and the journal say: a look that changes nothing and takes no memory for nodes.
//!
//! It says what [`Store::open`](crate::Store::open) would find before it replays. Damage of nodes, of pages of the table, or of what records in the journal say is not
//! looked for: that is a check's work. Of an array that somebody writes to it says nothing that holds.

use crate::batches::{in_doubt, read_run};
use crate::error::Error;
use crate::recovery::{RecoveryReport, newest_record, older, outdated_text};
use device::Array;
use format::Damage;

/// What a look at an array found.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The last mount that wrote ended with everything on the devices and an empty journal.
    pub clean: bool,
    /// The mount that wrote the newest checkpoint record, the number of that, and its time in seconds since the epoch.
    pub mount: u64,
    pub checkpoint: u64,
    pub time: u64,
    /// What the next mount replays: batches of the journal, the records in them, and the bytes that they take there.
    pub batches: u64,
    pub records: u64,
    pub bytes: u64,
    /// Checkpoint record copies that are unreadable or damaged, as (slot, copy, why); others serve.
    pub damaged_copies: Vec<(usize, usize, String)>,
    /// Why a mount for writing would be refused, as far as the record and the journal tell.
    pub refused: Option<String>,
}

/// Looks at how an array was left.
///
/// # Errors
/// No record can be found, or a device does not return what it holds.
pub fn standing(array: &Array) -> Result<Standing, Error> {
    let mut report = RecoveryReport::default();
    let record = newest_record(array, &mut report)?;
    let mut standing = Standing {
        clean: record.clean.get() == 1,
        mount: record.mount_id.get(),
        checkpoint: record.sequence.get(),
        time: record.time.get(),
        batches: 0,
        records: 0,
        bytes: 0,
        damaged_copies: report.damaged_copies,
        refused: None,
    };
    let old = older(array, &record)?;
    if !old.is_empty() {
        let damage = Damage::new("label", outdated_text(array, &old));
        standing.refused = Some(damage.to_string());
        return Ok(standing);
    }
    let run = read_run(array, &record)?;
    run.for_each(array, &record, |batch| {
        standing.records += u64::from(batch.header.records.get());
        Ok(())
    })?;
    standing.batches = run.end.sequence - run.start.sequence;
    standing.bytes = run.end.position - run.start.position;
    let loss = run.loss.map(|damage| damage.to_string());
    let doubt = run.doubt.as_ref().map(in_doubt);
    let unread = run.unread.first().map(|unread| unread.to_string());
    standing.refused = loss.or(doubt).or(unread);
    Ok(standing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestStore, create, format, options};
    use device::sim::SimDevice;
    use std::sync::Arc;

    #[test]
    fn what_a_mount_would_replay_is_told_and_left_alone() {
        let array = format(SimDevice::new(64 << 20, 1));
        let made = standing(&array).unwrap();
        assert!(made.clean && made.batches == 0 && made.refused.is_none());
        let (store, _) = TestStore::open(Arc::clone(&array), options()).unwrap();
        let begun = standing(&array).unwrap();
        assert!(!begun.clean && begun.mount > made.mount);
        assert_eq!((begun.batches, begun.records, begun.bytes), (0, 0, 0));
        for _ in 0..3 {
            create(&store, 100);
            store.sync().unwrap();
        }
        drop(store);
        for _ in 0..2 {
            let left = standing(&array).unwrap();
            assert!(!left.clean && left.refused.is_none());
            assert!(left.batches == 3 && left.records >= 3, "{left:?}");
            assert!(left.bytes >= 3 * 512);
        }
        let (store, report) = TestStore::open(Arc::clone(&array), options()).unwrap();
        assert_eq!(report.batches, 3);
        store.close().unwrap();
        let closed = standing(&array).unwrap();
        assert!(closed.clean && closed.batches == 0);
        assert!(closed.checkpoint > begun.checkpoint);
    }

    #[test]
    fn an_array_without_a_record_is_damaged() {
        let device = SimDevice::new(64 << 20, 1);
        let array = format(Arc::clone(&device) as Arc<dyn device::BlockDevice>);
        for block in [1, 2, (64 << 8) - 16 + 13, (64 << 8) - 16 + 14] {
            device.poke(block * 4096, &[1; 4096]);
        }
        let error = standing(&array).unwrap_err();
        assert!(matches!(error, Error::Damaged(_)), "{error}");
    }
}

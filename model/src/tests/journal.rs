//! Staging, credits, and waiting for a commit.

use super::check;
use crate::commit::{Commits, Ticket};
use crate::ring::{Ring, Slack};
use crate::staging::Staging;
use crate::sum::Sum;
use base::sync::{Mutex, rank};
use std::sync::Arc;

/// Two operations, and a leader that closes two epochs meanwhile: what was staged in an epoch is
/// in its batch, and nothing else is.
///
/// Found when broken: `pin` without its second look at the epoch; any one access of `pin`, `close` or
/// `wait` with acquire and release instead of sequential consistency; `Staging::close` without
/// `wait`; a staging slot that is chosen by the open epoch and not by the pinned one.
#[test]
fn an_epoch_is_gathered_whole() {
    check(3, || {
        let staging = Arc::new(Staging::new(6, 2, 1 << 20));
        let operations: Vec<_> = (0..2)
            .map(|shard| {
                let staging = Arc::clone(&staging);
                loom::thread::spawn(move || {
                    let pin = staging.pin(shard);
                    staging.push(&pin, &[pin.epoch() as u8]);
                    pin.epoch()
                })
            })
            .collect();
        let batches = [staging.close(), staging.close()];
        let mut staged = [0; 3];
        for operation in operations {
            staged[operation.join().unwrap() as usize - 6] += 1;
        }
        let left = staged[2];
        for (epoch, records) in batches {
            let bytes = records.pieces.concat();
            assert!(bytes.iter().all(|e| *e as u64 == epoch));
            assert_eq!(bytes.len() as u64, records.payload());
            assert_eq!(bytes.len(), staged[epoch as usize - 6]);
            assert_eq!(bytes.len(), records.count as usize);
        }
        assert_eq!(staging.close().1.count as usize, left);
        assert_eq!(staging.bytes(), 0);
        assert_eq!(staging.epoch(), 9);
    });
}

/// Two threads add to the same part of a sum, which hands over what it has: nothing is lost, and nothing is
/// counted twice.
///
/// Found when broken: `add` that hands over what it saw and not what it took.
#[test]
fn what_is_added_to_a_sum_is_in_it_once() {
    check(3, || {
        let sum = Arc::new(Sum::new(1, 2));
        let other = {
            let sum = Arc::clone(&sum);
            loom::thread::spawn(move || (0..2).for_each(|_| sum.add(0, 1)))
        };
        sum.add(0, 1);
        sum.add(1, -3);
        other.join().unwrap();
        assert_eq!(sum.exact(), 0);
        assert!(sum.about().abs() < 2);
    });
}

/// Record of an operation, header of a batch, and what a credit is for.
const RECORD: u64 = 3;
const HEADER: u64 = 1;
const SLACK: Slack = Slack {
    credit: RECORD + HEADER,
    batches: HEADER,
};
/// A ring for a batch of one record and the credit of one operation.
const SIZE: u64 = 2 * (RECORD + HEADER) + HEADER;

struct Log {
    ring: Ring,
    /// Payload staged, end of the ring, and where the last checkpoint begins.
    staged: Mutex<u64>,
    end: Mutex<(u64, u64)>,
}

impl Log {
    fn operate(&self) {
        if self.ring.try_credit() {
            *self.staged.lock() += RECORD;
            self.ring.staged(RECORD);
        }
    }

    fn gather(&self) {
        let mut end = self.end.lock();
        let payload = std::mem::take(&mut *self.staged.lock());
        if payload > 0 {
            end.0 += payload + HEADER;
            self.ring.gathered(payload, payload + HEADER);
        }
        assert!(end.0 - end.1 <= SIZE, "a batch overruns what is needed");
    }

    fn checkpoint(&self) {
        let mut end = self.end.lock();
        end.1 = end.0;
        self.ring.release(end.1);
    }
}

/// Two operations on a ring that holds a batch already, commits and a checkpoint: no batch ever
/// overruns what a checkpoint has not made unnecessary, and no room is lost.
///
/// Found when broken: `used` looking at the head before what is outstanding, or at the tail last;
/// `gathered` subtracting before it adds; `try_credit` looking before it adds, or keeping the credit
/// that it refuses.
#[test]
fn the_ring_is_not_overrun_and_loses_no_room() {
    check(3, || {
        let log = Arc::new(Log {
            ring: Ring::new(SIZE, 0, SLACK),
            staged: Mutex::new(rank::STAGING, 0),
            end: Mutex::new(rank::GATHER, (0, 0)),
        });
        log.operate();
        log.gather();
        let operations: Vec<_> = (0..2)
            .map(|_| {
                let log = Arc::clone(&log);
                loom::thread::spawn(move || log.operate())
            })
            .collect();
        log.gather();
        log.gather();
        log.checkpoint();
        for operation in operations {
            operation.join().unwrap();
        }
        log.gather();
        log.checkpoint();
        assert_eq!(log.ring.outstanding(), 0);
        let all = log.ring.size();
        assert_eq!(log.ring.fill_permille(), HEADER * 1000 / all);
    });
}

/// What a checkpoint will log for an operation, and room for it in the operation's credit.
const OWED: u64 = 2;
const OWING: Slack = Slack {
    credit: RECORD + HEADER + OWED,
    batches: 2 * HEADER,
};
/// A ring for a batch of one record, a batch of what is owed for it, and not for two of each.
const OWING_SIZE: u64 = 2 * (RECORD + HEADER) + OWED + 2 * HEADER;

/// Two operations leave something to a checkpoint, which logs it without a credit: there is room, whatever
/// else wants some.
///
/// Found when broken: `owe` that reserves nothing; what is owed kept apart from `reserved` and
/// added by `used`, in whatever order of loads.
#[test]
fn a_checkpoint_has_room_for_what_is_owed() {
    check(3, || {
        let ring = Arc::new(Ring::new(OWING_SIZE, 0, OWING));
        // Payload staged, and how much is owed.
        let staged = Arc::new(Mutex::new(rank::STAGING, (0, 0)));
        let operations: Vec<_> = (0..2)
            .map(|_| {
                let (ring, staged) = (Arc::clone(&ring), Arc::clone(&staged));
                loom::thread::spawn(move || {
                    if ring.try_credit() {
                        ring.owe(OWED);
                        let mut staged = staged.lock();
                        *staged = (staged.0 + RECORD, staged.1 + OWED);
                        ring.staged(RECORD);
                    }
                })
            })
            .collect();
        let mut end = 0;
        let mut gather = |staged: &Mutex<(u64, u64)>| {
            let payload = std::mem::take(&mut staged.lock().0);
            if payload > 0 {
                end += payload + HEADER;
                ring.gathered(payload, payload + HEADER);
            }
            assert!(end <= OWING_SIZE, "a batch overruns what is needed");
        };
        gather(&staged);
        let fold = |staged: &Mutex<(u64, u64)>| {
            let mut staged = staged.lock();
            let owed = std::mem::take(&mut staged.1);
            if owed > 0 {
                staged.0 += owed;
                ring.staged_owed(owed);
            }
        };
        fold(&staged);
        gather(&staged);
        for operation in operations {
            operation.join().unwrap();
        }
        gather(&staged);
        fold(&staged);
        gather(&staged);
        ring.owe(OWED);
        ring.release_owed(OWED);
        assert_eq!(ring.outstanding(), 0);
        assert_eq!(
            ring.fill_permille(),
            (end + OWING.batches) * 1000 / OWING_SIZE
        );
    });
}

struct Batch {
    ticket: Ticket,
    sequence: u64,
    records: Vec<u8>,
}

/// What the journal does for a commit, over a device that is a list of batches.
struct Journal {
    staging: Staging,
    commits: Commits<&'static str>,
    /// Sequence number of the next batch.
    gather: Mutex<u64>,
    device: Mutex<Vec<(u64, Vec<u8>)>>,
    /// The batch that the device does not take.
    refused: Option<u64>,
}

impl Journal {
    fn new(refused: Option<u64>) -> Arc<Journal> {
        Arc::new(Journal {
            staging: Staging::new(6, 1, 0),
            commits: Commits::new(5, 0),
            gather: Mutex::new(rank::GATHER, 1),
            device: Mutex::new(rank::DEVICE_STATE, Vec::new()),
            refused,
        })
    }

    fn gather(&self, epoch: u64) -> Option<Batch> {
        let mut next = self.gather.try_lock()?;
        if self.staging.epoch() > epoch {
            return None;
        }
        let (epoch, records) = self.staging.close();
        let sequence = *next;
        *next += 1;
        Some(Batch {
            ticket: self.commits.issue(epoch, Some(sequence)),
            sequence,
            records: records.pieces.concat(),
        })
    }

    fn write(&self, batch: Batch) -> Result<(), &'static str> {
        let mut written = Err("refused");
        if self.refused != Some(batch.sequence) {
            self.device.lock().push((batch.sequence, batch.records));
            written = Ok(());
        }
        self.commits.complete(batch.ticket, written)
    }

    /// Changes something and syncs it.
    fn sync(&self, record: u8) -> Result<(), &'static str> {
        let epoch = {
            let pin = self.staging.pin(0);
            self.staging.push(&pin, &[record]);
            pin.epoch()
        };
        self.commits.through(
            epoch,
            || self.staging.epoch(),
            || self.gather(epoch),
            |batch| self.write(batch),
        )?;
        assert!(self.commits.durable_epoch() >= epoch);
        let durable = self.commits.durable_sequence();
        let device = self.device.lock();
        let has = |sequence| device.iter().any(|(s, _)| *s == sequence);
        assert!((1..=durable).all(has), "a batch before the last one lacks");
        let mut batches = device.iter().filter(|(s, _)| *s <= durable);
        assert!(batches.any(|(_, records)| records.contains(&record)));
        Ok(())
    }
}

/// Two threads change something and sync it, in one batch or in two, which are written at once: what
/// is said to be durable is, with all before it, and nobody waits for ever.
///
/// Found when broken: `complete` out of order, or without waking; `durable` stored relaxed, or before
/// `durable_sequence`.
#[test]
fn a_commit_is_durable_with_all_before_it() {
    check(2, || {
        let journal = Journal::new(None);
        let other = {
            let journal = Arc::clone(&journal);
            loom::thread::spawn(move || journal.sync(1).unwrap())
        };
        journal.sync(2).unwrap();
        other.join().unwrap();
    });
}

/// The device refuses the first batch: nothing is durable from then on, whatever later batches do,
/// and everybody learns of it.
///
/// Found when broken: `complete` or `through` that ignores a failure; one that is reported and not
/// latched.
#[test]
fn after_a_failure_nothing_becomes_durable() {
    check(2, || {
        let journal = Journal::new(Some(1));
        let other = {
            let journal = Arc::clone(&journal);
            loom::thread::spawn(move || assert!(journal.sync(1).is_err()))
        };
        assert!(journal.sync(2).is_err());
        other.join().unwrap();
        assert_eq!(journal.commits.durable_epoch(), 5);
        assert!(journal.commits.failed().is_some());
        assert!(journal.commits.idle());
        assert!(journal.sync(3).is_err());
    });
}

/// Something else fails while two threads sync: what was durable by then is, the other learns of the
/// failure, and nobody waits for ever.
///
/// Found when broken: `through` that does not look for a failure.
#[test]
fn a_failure_elsewhere_strands_nobody() {
    check(2, || {
        let journal = Journal::new(None);
        let other = {
            let journal = Arc::clone(&journal);
            loom::thread::spawn(move || journal.sync(1))
        };
        journal.commits.fail("elsewhere");
        let (mine, others) = (journal.sync(2), other.join().unwrap());
        assert_eq!(mine, Err("elsewhere"));
        assert_eq!(journal.commits.durable_epoch() > 5, others.is_ok());
    });
}

//! Staging, credits, and waiting for a commit.

use super::check;
use crate::commit::{Commits, Place, Ticket};
use crate::ring::{Ring, Slack};
use crate::staging::{Records, Staging};
use crate::sum::Sum;
use base::atomic::{AtomicU64, Ordering};
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
                    base::thread::set_lane(shard + 1);
                    let pin = staging.pin(shard);
                    staging.push(&pin, &[pin.epoch() as u8], 0, true);
                    pin.epoch()
                })
            })
            .collect();
        let mut kept = Records::default();
        let batches = [(); 2].map(|()| staging.close(&mut kept, false));
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
            assert_eq!(records.paid > 0, records.count > 0);
        }
        assert_eq!(staging.close(&mut kept, false).1.count as usize, left);
        assert_eq!(staging.bytes(), 0);
        assert_eq!(staging.epoch(), 9);
    });
}

/// A record that pays for no batch and one after it that does, while epochs are closed: no batch is of the first alone
/// unless it is asked for, and none has the second before it.
///
/// Found when broken: `close` that keeps what is paid for, or forgets what it kept, or puts it last; one that keeps
/// nothing, or keeps although a batch is asked for.
#[test]
fn what_pays_for_no_batch_waits_for_one_that_is_paid_for() {
    check(3, || {
        let staging = Arc::new(Staging::new(6, 1, 1 << 20));
        let other = {
            let staging = Arc::clone(&staging);
            loom::thread::spawn(move || {
                base::thread::set_lane(1);
                staging.push(&staging.pin(0), &[1], 0, false);
                staging.push(&staging.pin(0), &[2], 0, true);
            })
        };
        let mut kept = Records::default();
        let mut batches: Vec<_> = (0..2).map(|_| staging.close(&mut kept, false)).collect();
        other.join().unwrap();
        batches.push(staging.close(&mut kept, false));
        staging.push(&staging.pin(0), &[3], 0, false);
        batches.extend([false, false, true].map(|asked| staging.close(&mut kept, asked)));
        let (last, paid) = batches.split_last().unwrap();
        assert!(
            paid.iter()
                .all(|(_, batch)| batch.paid > 0 || batch.count == 0)
        );
        assert_eq!((last.1.paid, last.1.count), (0, 1));
        let all = batches.iter().flat_map(|(_, batch)| batch.pieces.concat());
        assert_eq!(all.collect::<Vec<u8>>(), [1, 2, 3]);
        assert_eq!(staging.bytes(), 0);
    });
}

/// A thread adds to a part of its own, and to one that it shares with another: each hands over what it has, nothing is lost, and nothing is
/// counted twice.
///
/// Found when broken: `add` or `add_shared` that hand over what they were given, or what they saw, and not what the part has; `show` that does not look at the
/// total again.
#[test]
fn what_is_added_to_a_sum_is_in_it_once() {
    // All is handed over at once; or what is 2 and more.
    for slack in [2, 8] {
        check(3, move || {
            let sum = Arc::new(Sum::new(1, slack));
            let other = {
                let sum = Arc::clone(&sum);
                loom::thread::spawn(move || (0..2).for_each(|_| sum.add(1, 1)))
            };
            (0..2).for_each(|_| sum.add(0, 1));
            sum.add(2, -5);
            other.join().unwrap();
            assert_eq!(sum.exact(), -1);
            assert!((sum.about() + 1).abs() < slack / 2);
        });
    }
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
        if let Some(credit) = self.ring.try_credit(0) {
            // Each pays for a batch of its own.
            *self.staged.lock() += RECORD;
            self.ring.staged(credit, RECORD + HEADER);
        }
    }

    fn gather(&self) {
        let mut end = self.end.lock();
        let payload = std::mem::take(&mut *self.staged.lock());
        if payload > 0 {
            end.0 += payload + HEADER;
            let paid = payload / RECORD * HEADER;
            assert!(self.ring.gathered(payload + paid, payload + HEADER));
        }
        assert!(
            end.0 - end.1 <= self.ring.size(),
            "a batch overruns what is needed"
        );
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
            ring: Ring::new(SIZE, 0, SLACK, 1),
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
        assert!(!log.ring.outstanding(|| false));
        assert_eq!(log.ring.fill(), HEADER * 1000 / log.ring.size());
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

/// Two operations leave something to a checkpoint, which logs it without a credit, in a record as long as what is
/// owed or shorter: there is room, whatever else wants some, and none is lost.
///
/// Found when broken: `owe` that reserves nothing, `release_owed` that forgets; `staged_owed` that gives nothing back, or
/// all; `give` that keeps what is beyond `keep`, or forgets it.
#[test]
fn a_checkpoint_has_room_for_what_is_owed() {
    for len in [OWED, OWED - 1] {
        check(3, move || log_what_is_owed(len));
    }
}

fn log_what_is_owed(len: u64) {
    let ring = Arc::new(Ring::new(OWING_SIZE, 0, OWING, 1));
    // Payload staged, and what is owed.
    let staged = Arc::new(Mutex::new(rank::STAGING, (0, 0)));
    let operations: Vec<_> = (0..2)
        .map(|_| {
            let (ring, staged) = (Arc::clone(&ring), Arc::clone(&staged));
            loom::thread::spawn(move || {
                if let Some(mut credit) = ring.try_credit(0) {
                    credit.owe(OWED);
                    let mut staged = staged.lock();
                    *staged = (staged.0 + RECORD, staged.1 + OWED);
                    ring.staged(credit, RECORD);
                }
            })
        })
        .collect();
    let mut end = 0;
    let mut gather = |staged: &Mutex<(u64, u64)>| {
        let payload = std::mem::take(&mut staged.lock().0);
        if payload > 0 {
            end += payload + HEADER;
            assert!(ring.gathered(payload, payload + HEADER));
        }
        assert!(end <= OWING_SIZE, "a batch overruns what is needed");
    };
    gather(&staged);
    let fold = |staged: &Mutex<(u64, u64)>| {
        let mut staged = staged.lock();
        for _ in 0..std::mem::take(&mut staged.1) / OWED {
            staged.0 += len;
            ring.staged_owed(OWED, len);
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
    assert!(!ring.outstanding(|| false));
    assert_eq!(ring.fill(), (end + OWING.batches) * 1000 / OWING_SIZE);
    ring.release(end);
    let mut credit = ring.try_credit(0).expect("the ring is empty");
    assert_eq!(ring.fill_permille(0), ring.fill());
    credit.owe(OWED);
    credit.release_owed(OWED);
    ring.return_credit(credit);
    assert_eq!(ring.used(), OWING.batches);
}

/// Operations that leave something to a checkpoint, and a ring that is full after them: of more batches than there is
/// room for beside those that they have paid for.
const MANY: u64 = OWING.batches / HEADER + 1;
const MANY_SIZE: u64 = MANY * OWING.credit + OWING.batches;

/// A checkpoint logs what is owed, and each time two others commit: there is room, though none of these batches would be
/// paid for; and what was logged is in the one that the checkpoint asks for.
///
/// Found when broken: `close` that keeps nothing, or forgets what it kept.
#[test]
fn commits_between_what_a_checkpoint_logs_overrun_nothing() {
    check(2, || {
        let ring = Ring::new(MANY_SIZE, 0, OWING, 1);
        let staging = Staging::new(6, 1, 1 << 20);
        let gathered = Mutex::new(rank::GATHER, (Records::default(), 0));
        let shared = Arc::new((ring, staging, gathered));
        let commit = |shared: &(Ring, Staging, Mutex<(Records, u64)>), asked| {
            let (ring, staging, gathered) = shared;
            let mut gathered = gathered.lock();
            let (_, records) = staging.close(&mut gathered.0, asked);
            if records.count > 0 {
                let len = records.payload() + HEADER;
                let paid = records.payload() + records.paid as u64 * HEADER;
                assert!(ring.gathered(paid, len), "a batch overruns what is needed");
                gathered.1 += len;
            }
        };
        let (ring, staging, gathered) = &*shared;
        for _ in 0..MANY {
            let mut credit = ring.try_credit(0).expect("there is room");
            credit.owe(OWED);
            staging.push(&staging.pin(0), &[0; RECORD as usize], 0, true);
            ring.staged(credit, RECORD + HEADER);
            commit(&shared, false);
        }
        assert!(ring.try_credit(0).is_none());
        let other = {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || commit(&shared, false))
        };
        for _ in 0..MANY {
            staging.push(&staging.pin(0), &[0; OWED as usize], 0, false);
            ring.staged_owed(OWED, OWED);
            commit(&shared, false);
        }
        other.join().unwrap();
        commit(&shared, true);
        let end = gathered.lock().1;
        assert_eq!(end, MANY * (RECORD + HEADER + OWED) + HEADER);
        assert_eq!(ring.used(), end + OWING.batches);
    });
}

/// A ring of which each of two shards may keep a credit and a little more.
const KEEPING_SIZE: u64 = 8 * (SLACK.credit + 1);

/// A ring of two shards that is full: two records are in its only batch, and the first shard keeps a credit.
fn full_ring() -> Ring {
    let ring = Ring::new(KEEPING_SIZE, 0, SLACK, 2);
    for _ in 0..2 {
        let credit = ring.try_credit(0).unwrap();
        ring.staged(credit, RECORD);
    }
    let batch = KEEPING_SIZE - SLACK.credit - SLACK.batches;
    assert!(ring.gathered(2 * RECORD, batch));
    assert!(!ring.outstanding(|| false));
    ring
}

/// The ring is full but for what one shard keeps. An operation there and one of another shard want it: one of
/// them may have it, and whoever comes later finds it where the other has left it.
///
/// Found when broken: `take_back` that takes nothing from `reserved`, or takes it before it has taken the budget, or reads the
/// budget and stores 0; `take` by a load and a store;
/// `try_credit` that does not take budgets back, or gives out a credit without a reservation.
#[test]
fn what_a_shard_keeps_is_given_out_once_and_can_be_taken_back() {
    check(3, || {
        let ring = Arc::new(full_ring());
        let others = {
            let ring = Arc::clone(&ring);
            loom::thread::spawn(move || ring.try_credit(1))
        };
        let mine = ring.try_credit(0);
        let others = others.join().unwrap();
        let given = mine.iter().chain(&others).count();
        assert!(given <= 1, "a credit was given out twice");
        for credit in mine.into_iter().chain(others) {
            ring.return_credit(credit);
        }
        for shard in [1, 0, 1] {
            let credit = ring.try_credit(shard).expect("there is room for one");
            assert!(ring.try_credit(1 - shard).is_none());
            ring.return_credit(credit);
        }
        // All that is left: one record.
        let credit = ring.try_credit(0).unwrap();
        ring.staged(credit, RECORD);
        assert!(ring.gathered(RECORD, RECORD + HEADER));
        assert!(ring.try_credit(0).is_none() && ring.try_credit(1).is_none());
        ring.release(KEEPING_SIZE - SLACK.batches);
        ring.take_back();
        assert!(!ring.outstanding(|| false));
        assert_eq!(ring.used(), SLACK.batches);
    });
}

/// Operations of two shards, each committed by itself, until there is no room: the ring is not overrun, though most
/// take their credits out of a budget.
///
/// Found when broken: records that do not pay for their batches.
#[test]
fn batches_are_paid_for_out_of_budgets() {
    check(2, || {
        let log = Log {
            ring: Ring::new(KEEPING_SIZE, 0, SLACK, 2),
            staged: Mutex::new(rank::STAGING, 0),
            end: Mutex::new(rank::GATHER, (0, 0)),
        };
        for _ in 0..KEEPING_SIZE / SLACK.credit + 2 {
            log.operate();
            log.gather();
        }
        let room = KEEPING_SIZE - log.end.lock().0;
        assert!(room < 2 * SLACK.credit, "{room} bytes are not given out");
        log.checkpoint();
        log.ring.take_back();
        assert_eq!(log.ring.used(), SLACK.batches);
    });
}

/// Two operations of a shard, in room that it keeps or asks for, while the other shard finds none and takes back:
/// no room is lost, and none is made.
///
/// Found when broken: `give` that forgets what it could not exchange; a piece that is put into the budget and not reserved;
/// `take_back` that loses credits in use.
#[test]
fn a_shard_loses_no_room_to_one_that_takes_it_back() {
    check(2, || {
        let ring = Arc::new(full_ring());
        // Room for a credit, and for the piece beyond it while the ring is not three quarters full.
        ring.release(KEEPING_SIZE / 2);
        let staged = Arc::new(Mutex::new(rank::STAGING, 0));
        let operate = |shard| {
            let (ring, staged) = (Arc::clone(&ring), Arc::clone(&staged));
            loom::thread::spawn(move || {
                if let Some(credit) = ring.try_credit(shard) {
                    *staged.lock() += RECORD;
                    ring.staged(credit, RECORD);
                }
            })
        };
        let operations = [operate(0), operate(0)];
        ring.take_back();
        for operation in operations {
            operation.join().unwrap();
        }
        assert!(!ring.outstanding(|| false));
        ring.take_back();
        let staged = *staged.lock();
        let batch = KEEPING_SIZE - SLACK.credit - SLACK.batches;
        assert_eq!(
            ring.used(),
            batch - KEEPING_SIZE / 2 + staged + SLACK.batches
        );
    });
}

/// An operation takes a credit, looks at the count of failures and stages its record, of another shard than the credit's;
/// meanwhile a failure is counted and somebody looks whether anything is outstanding. If nothing is, the operation sees
/// the failure. They yield where the checker interrupts nobody by itself: next to locks that are free.
///
/// Found when broken: `outstanding` looking at staged records first, or at none, or not at all shards; credits in
/// use not counted when they come from the budget, or when they do not; any of the accesses with acquire and release only.
#[test]
fn who_finds_nothing_outstanding_is_seen_by_whoever_begins_later() {
    for kept in [true, false] {
        check(4, move || {
            let ring = match kept {
                true => full_ring(),
                false => Ring::new(SIZE, 0, SLACK, 2),
            };
            let staging = Staging::new(6, 2, 1 << 20);
            let shared = Arc::new((ring, staging, AtomicU64::new(0)));
            let operation = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (ring, staging, failures) = &*shared;
                    let credit = ring.try_credit(0).unwrap();
                    let sees = failures.load(Ordering::SeqCst) > 0;
                    match sees {
                        true => ring.return_credit(credit),
                        false => {
                            loom::thread::yield_now();
                            let pin = staging.pin(1);
                            staging.push(&pin, &[1], 0, true);
                            ring.staged(credit, 1);
                        }
                    }
                    sees
                })
            };
            let (ring, staging, failures) = &*shared;
            failures.fetch_add(1, Ordering::SeqCst);
            let outstanding = ring.outstanding(|| {
                let found = staging.has_records();
                loom::thread::yield_now();
                found
            });
            let sees = operation.join().unwrap();
            assert!(outstanding || sees, "what has failed is forgiven");
            assert_eq!(ring.outstanding(|| staging.has_records()), !sees);
        });
    }
}

struct Batch<'a> {
    ticket: Ticket<'a, &'static str>,
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
    fails: Option<Fails>,
}

/// What becomes of the first batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fails {
    /// The device does not take it.
    Refused,
    /// Whoever writes it panics, and lets go of it.
    Dropped,
    /// Whoever gathers it does, before it has its place.
    NotGathered,
}

impl Journal {
    fn new(fails: Option<Fails>) -> Arc<Journal> {
        Arc::new(Journal {
            staging: Staging::new(6, 1, 0),
            commits: Commits::new(5, 0, || "lost"),
            gather: Mutex::new(rank::GATHER, 1),
            device: Mutex::new(rank::DEVICE_STATE, Vec::new()),
            fails,
        })
    }

    fn gather<'a>(&self, epoch: u64, place: Place<'a, &'static str>) -> Option<Batch<'a>> {
        let mut next = self.gather.lock();
        if self.staging.epoch() > epoch || self.commits.failed().is_some() {
            place.leave();
            return None;
        }
        self.close(&mut next, place)
    }

    /// As a checkpoint does.
    fn close_and_commit(&self) -> Result<(), &'static str> {
        let batch = {
            let mut next = self.gather.lock();
            if let Some(error) = self.commits.failed() {
                return Err(error);
            }
            self.close(&mut next, self.commits.place())
        };
        self.write(batch.ok_or("lost")?)
    }

    /// `None`: the place is gone, and the records with it.
    fn close<'a>(&self, next: &mut u64, place: Place<'a, &'static str>) -> Option<Batch<'a>> {
        let (epoch, records) = self.staging.close(&mut Records::default(), true);
        let sequence = *next;
        *next += 1;
        if self.fails == Some(Fails::NotGathered) && sequence == 1 {
            return None;
        }
        Some(Batch {
            ticket: place.issue(epoch, Some(sequence)),
            sequence,
            records: records.pieces.concat(),
        })
    }

    fn write(&self, batch: Batch<'_>) -> Result<(), &'static str> {
        let written = match self.fails.filter(|_| batch.sequence == 1) {
            Some(Fails::Dropped) => return Err("dropped"),
            Some(_) => Err("refused"),
            None => {
                self.device.lock().push((batch.sequence, batch.records));
                Ok(())
            }
        };
        self.commits.complete(batch.ticket, written)
    }

    /// Works with it on a thread of its own.
    fn aside<T: 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Journal) -> T + 'static,
    ) -> loom::thread::JoinHandle<T> {
        let journal = Arc::clone(self);
        loom::thread::spawn(move || work(&journal))
    }

    /// Changes something and commits that; returns its epoch.
    fn commit(&self, record: u8) -> (u64, Result<(), &'static str>) {
        let epoch = {
            let pin = self.staging.pin(0);
            self.staging.push(&pin, &[record], 0, true);
            pin.epoch()
        };
        let committed = self.commits.through(
            epoch,
            || self.staging.epoch(),
            |place| self.gather(epoch, place),
            |batch| self.write(batch),
        );
        (epoch, committed)
    }

    /// Changes something and syncs it.
    fn sync(&self, record: u8) -> Result<(), &'static str> {
        let (epoch, committed) = self.commit(record);
        committed?;
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
        let other = journal.aside(|journal| journal.sync(1).unwrap());
        journal.sync(2).unwrap();
        other.join().unwrap();
    });
}

/// A checkpoint closes epochs for itself while somebody syncs, and may take the record along: whoever found nothing left to
/// gather is not in the way of those who come later.
#[test]
fn a_commit_beside_a_checkpoint_ends() {
    check(2, || {
        let journal = Journal::new(None);
        let other = journal.aside(|journal| journal.close_and_commit().unwrap());
        journal.sync(2).unwrap();
        other.join().unwrap();
        journal.sync(3).unwrap();
    });
}

/// Two sync beside a checkpoint, after so many have synced together all the time; neither waits for ever.
fn two_beside_a_checkpoint(of_late: Option<usize>) {
    check(2, move || {
        let journal = Journal::new(None);
        if let Some(here) = of_late {
            journal.commits.expect(here);
        }
        let others = [
            journal.aside(|journal| journal.close_and_commit().unwrap()),
            journal.aside(|journal| journal.sync(1).unwrap()),
        ];
        journal.sync(2).unwrap();
        for other in others {
            other.join().unwrap();
        }
    });
}

/// A checkpoint takes along what one of them is about to gather.
///
/// Found when broken: `tell` that tells nobody; `wake` that wakes nobody; `through` that tells nobody when it found nothing.
#[test]
fn who_finds_nothing_to_gather_leaves_nobody_behind() {
    two_beside_a_checkpoint(None);
}

/// They wait for more, who do not come: the end of a batch tells them.
///
/// Found when broken: `tell` that tells nobody who waits in `open`.
#[test]
fn who_waits_for_others_that_do_not_come_is_told() {
    two_beside_a_checkpoint(Some(5));
}

/// The device refuses the first batch: nothing is durable from then on, whatever later batches do,
/// and everybody learns of it.
///
/// Found when broken: `complete` or `through` that ignores a failure; one that is reported and not
/// latched.
#[test]
fn after_a_failure_nothing_becomes_durable() {
    check(2, || {
        let journal = Journal::new(Some(Fails::Refused));
        let other = journal.aside(|journal| assert!(journal.sync(1).is_err()));
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
        let other = journal.aside(|journal| journal.sync(1));
        journal.commits.fail("elsewhere");
        let (mine, others) = (journal.sync(2), other.join().unwrap());
        assert_eq!(mine, Err("elsewhere"));
        assert_eq!(journal.commits.durable_epoch() > 5, others.is_ok());
    });
}

/// Something else fails once one of two has synced: the other is told of that only if what it changed is not durable.
///
/// Found when broken: `through` that looks for a failure before it looks, under the lock, at what is durable.
#[test]
fn what_is_durable_before_a_failure_is_told_as_that() {
    check(2, || {
        let journal = Journal::new(None);
        let other = journal.aside(|journal| journal.commit(1));
        journal.sync(2).unwrap();
        journal.commits.fail("elsewhere");
        let (epoch, committed) = other.join().unwrap();
        assert_eq!(committed.is_ok(), journal.commits.durable_epoch() >= epoch);
    });
}

/// Something else fails while a batch is under way: who waits for that before it lets others have the devices comes after it, and does not wait for ever.
///
/// Found when broken: `complete` that tells nobody after a failure.
#[test]
fn nothing_is_under_way_for_who_waits_after_a_failure() {
    check(2, || {
        let journal = Journal::new(None);
        let other = journal.aside(|journal| journal.sync(1));
        journal.commits.fail("elsewhere");
        drop(journal.gather.lock());
        journal.commits.await_idle();
        let written = journal.device.lock().len();
        let _told: Result<(), &str> = other.join().unwrap();
        assert_eq!(journal.device.lock().len(), written);
    });
}

/// The first batch, or what was to become it, is lost with a thread that panics, while another one syncs, or makes a checkpoint: whoever
/// had a record in it learns of that, nothing behind it is durable, and nobody waits for ever.
///
/// Found when broken: a ticket or a place that is dropped and tells nobody, does not latch, or leaves others waiting for who gathers; `complete` that
/// waits for one that is lost.
fn lost_beside(fails: Fails, other: fn(&Journal) -> Result<(), &'static str>) {
    check(2, move || {
        let journal = Journal::new(Some(fails));
        let beside = journal.aside(other);
        let mine = journal.sync(2);
        assert!(mine.is_err() && beside.join().unwrap().is_err());
        assert_eq!(journal.commits.durable_epoch(), 5);
        assert_eq!(journal.commits.failed(), Some("lost"));
        assert!(journal.commits.idle());
        assert!(journal.sync(3).is_err());
    });
}

#[test]
fn a_batch_that_is_lost_strands_nobody() {
    lost_beside(Fails::Dropped, |journal| journal.sync(1));
    lost_beside(Fails::Dropped, Journal::close_and_commit);
}

#[test]
fn an_epoch_that_is_lost_strands_nobody() {
    lost_beside(Fails::NotGathered, |journal| journal.sync(1));
    lost_beside(Fails::NotGathered, Journal::close_and_commit);
}

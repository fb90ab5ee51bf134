//! The models. Each has been made to fail by breaking the part on purpose; how is said with it.

use crate::bitmap::Bitmap;
use crate::epoch::{OpenEpoch, Pins};
use crate::flush::{FlushGate, Turn};
use base::sync::{Mutex, rank};
use loom::sync::atomic::{AtomicU64, Ordering};
use std::io;
use std::sync::Arc;

/// Checks a model under all schedules with at most this many interruptions of threads that could
/// have gone on.
fn check(interruptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(interruptions);
    builder.check(model);
}

/// A shard as the journal has it: pins, and what was staged in the even and in the odd epoch.
struct Shard {
    pins: Pins,
    staged: Mutex<[Vec<u64>; 2]>,
}

struct Journal {
    open: OpenEpoch,
    shards: [Shard; 2],
}

impl Journal {
    fn new() -> Arc<Journal> {
        let shard = || Shard {
            pins: Pins::new(),
            staged: Mutex::new(rank::STAGING, Default::default()),
        };
        Arc::new(Journal {
            open: OpenEpoch::new(6),
            shards: [shard(), shard()],
        })
    }

    fn operate(&self, shard: usize) -> u64 {
        let shard = &self.shards[shard];
        let pin = self.open.pin(&shard.pins);
        shard.staged.lock()[(pin.epoch % 2) as usize].push(pin.epoch);
        pin.epoch
    }

    /// Closes the open epoch and takes its records.
    fn gather(&self) -> (u64, Vec<u64>) {
        let epoch = self.open.close();
        let mut all = Vec::new();
        for shard in &self.shards {
            shard.pins.wait(epoch);
            all.append(&mut shard.staged.lock()[(epoch % 2) as usize]);
        }
        (epoch, all)
    }
}

/// Two operations, and a leader that closes two epochs meanwhile: what was staged in an epoch is
/// in its batch, and nothing else is.
///
/// Found when broken: `pin` without its second look at the epoch; any one access of `pin`, `close` or
/// `wait` with acquire and release instead of sequential consistency; `gather` without `wait`.
#[test]
fn an_epoch_is_gathered_whole() {
    check(3, || {
        let journal = Journal::new();
        let operations: Vec<_> = (0..2)
            .map(|shard| {
                let journal = Arc::clone(&journal);
                loom::thread::spawn(move || journal.operate(shard))
            })
            .collect();
        let batches = [journal.gather(), journal.gather()];
        let mut staged = [0; 3];
        for operation in operations {
            staged[operation.join().unwrap() as usize - 6] += 1;
        }
        for (epoch, records) in batches {
            assert!(records.iter().all(|e| *e == epoch));
            assert_eq!(records.len(), staged[epoch as usize - 6]);
        }
        assert_eq!(journal.open.get(), 8);
    });
}

/// One thread takes, two put back numbers of a word that is empty at times.
///
/// Found when broken: `take` that does not look at the word again after it cleared the summary bit
/// (a number is lost); `take` that stores the word it saw, less one bit, instead of clearing the bit
/// (one put back meanwhile is lost); `put` that sets the summary bit before the word's.
#[test]
fn a_number_is_given_out_once_and_none_is_lost() {
    check(4, || {
        // Free: 0. In use: 1 and 2.
        let bits = Arc::new(Bitmap::new(vec![1]));
        let putters: Vec<_> = [1, 2]
            .into_iter()
            .map(|number| {
                let bits = Arc::clone(&bits);
                loom::thread::spawn(move || assert!(bits.put(number)))
            })
            .collect();
        let mut taken: Vec<u64> = (0..2).filter_map(|_| bits.take()).collect();
        for putter in putters {
            putter.join().unwrap();
        }
        taken.extend(std::iter::from_fn(|| bits.take()));
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
        assert_eq!(bits.free(), 0);
        assert!(bits.put(1) && !bits.put(1));
        bits.mark_used(1);
        assert_eq!(bits.take(), None);
    });
}

/// A device whose flush makes durable what was written before it was issued.
struct Device {
    gate: FlushGate,
    written: AtomicU64,
    durable: AtomicU64,
}

impl Device {
    fn new() -> Arc<Device> {
        let device = Device {
            gate: FlushGate::new(0),
            written: AtomicU64::new(0),
            durable: AtomicU64::new(0),
        };
        Arc::new(device)
    }

    /// Writes, and flushes as the array does; returns the number of the write.
    fn write_and_flush(&self) -> u64 {
        let number = self.written.fetch_add(1, Ordering::AcqRel) + 1;
        self.gate.wrote();
        let Some(share) = self.gate.draw() else {
            return number;
        };
        let mut turn = self.gate.turn(&share);
        loop {
            turn = match turn {
                Turn::Done(outcome) => {
                    outcome.unwrap();
                    return number;
                }
                Turn::Lead(lead) => {
                    let issued = self.written.load(Ordering::Acquire);
                    self.durable.fetch_max(issued, Ordering::AcqRel);
                    lead.finish(Ok(()));
                    self.gate.turn(&share)
                }
                Turn::Wait => self.gate.wait(&share),
            };
        }
    }
}

/// Two threads write and flush at once: whoever's flush has returned finds its write durable, whether
/// it issued the flush, shared it, or found that none was needed.
///
/// Found when broken: `finish` raising `flushed` to what is written by then, or raising it with a
/// relaxed access; `begin` leaving the ticket of the flush in flight to those who come later.
#[test]
fn a_flush_covers_what_was_written_before_it_was_issued() {
    check(3, || {
        let device = Device::new();
        let other = {
            let device = Arc::clone(&device);
            loom::thread::spawn(move || {
                let number = device.write_and_flush();
                assert!(device.durable.load(Ordering::Acquire) >= number);
            })
        };
        let number = device.write_and_flush();
        assert!(device.durable.load(Ordering::Acquire) >= number);
        other.join().unwrap();
    });
}

/// A flush that fails is an error for those who shared it, and covers nothing: the next one asks the
/// device again. A leader that gives up strands nobody.
///
/// Found when broken: a failed flush raising `flushed`; `drop` of a leader that publishes nothing.
#[test]
fn a_failed_flush_covers_nothing_and_strands_nobody() {
    check(3, || {
        let device = Device::new();
        let other = {
            let device = Arc::clone(&device);
            loom::thread::spawn(move || device.fail_to_flush())
        };
        device.fail_to_flush();
        other.join().unwrap();
        assert!(device.gate.draw().is_some(), "nothing is flushed");
    });
}

impl Device {
    fn fail_to_flush(&self) {
        self.gate.wrote();
        let share = self.gate.draw().expect("no flush has succeeded");
        match self.gate.wait(&share) {
            Turn::Done(outcome) => assert!(outcome.is_err()),
            Turn::Lead(lead) => match self.written.fetch_add(1, Ordering::AcqRel) {
                0 => drop(lead),
                _ => lead.finish(Err(Arc::new(io::Error::other("a flush failed")))),
            },
            Turn::Wait => unreachable!("wait returns when it is over"),
        }
    }
}

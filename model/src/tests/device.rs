//! Flushes that callers share, and those that fail.

use super::check;
use crate::flush::{Failures, FlushGate, Turn};
use crate::ring::{Ring, Slack};
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU64, Ordering};
use std::io;
use std::sync::Arc;

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
        self.flush();
        number
    }

    fn flush(&self) {
        let Some(share) = self.gate.draw() else {
            return;
        };
        let mut turn = self.gate.turn(&share);
        loop {
            turn = match turn {
                Turn::Done(outcome) => {
                    outcome.unwrap();
                    return;
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

/// Three threads do: while one flushes two wait for the next flush, or for none. Nobody waits for ever.
///
/// Found when broken: `publish` that wakes nobody who waits for the next flush, or nobody who waited for this one; `wait`
/// that leaves it to nobody when it was woken and finds that its writes are flushed.
#[test]
fn the_end_of_a_flush_strands_nobody() {
    check(2, || {
        let device = Device::new();
        let others = [(); 2].map(|()| {
            let device = Arc::clone(&device);
            loom::thread::spawn(move || {
                let number = device.write_and_flush();
                assert!(device.durable.load(Ordering::Acquire) >= number);
            })
        });
        device.write_and_flush();
        for other in others {
            other.join().unwrap();
        }
    });
}

/// Two threads write, one of them data for which a checksum vouches, and flush. Who finds all in order that must be has the
/// other's write durable, if that had to be, once it is known to have been done.
///
/// Found when broken: `wrote` raising `ordered` to the count before it, or not at all.
#[test]
fn what_is_in_order_is_durable_but_for_what_is_vouched_for() {
    check(3, || {
        let device = Device::new();
        let other = {
            let device = Arc::clone(&device);
            loom::thread::spawn(move || {
                device.written.fetch_add(1, Ordering::AcqRel);
                device.gate.wrote_checked();
            })
        };
        let first = device.written.fetch_add(1, Ordering::AcqRel) + 1;
        device.gate.wrote();
        assert!(!device.gate.is_ordered(), "nobody flushes");
        device.flush();
        assert!(device.gate.is_ordered());
        assert!(device.durable.load(Ordering::Acquire) >= first);
        other.join().unwrap();
        assert!(
            device.gate.is_ordered(),
            "what is vouched for need not be flushed"
        );
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

/// Where a write is that its own flush is to make durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Nowhere,
    Cached,
    /// Another flush has failed since, and what the cache held is gone.
    Dropped,
    Durable,
}

/// Somebody writes durably, which is a write and a flush behind it, while another one's flush fails. That may have dropped the write before the flush behind it,
/// which succeeds: who finds no failure counted then has lost nothing.
///
/// Found when broken: `settle` that does not wait; to answer for a flush when it is begun, or before its failure is counted.
#[test]
fn a_durable_write_learns_of_a_flush_that_fails_beside_it() {
    check(3, || {
        let shared = Arc::new((
            FlushGate::new(0),
            Failures::new(),
            Mutex::new(Place::Nowhere),
        ));
        let flushing = {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || {
                let (gate, failures, place) = &*shared;
                let share = gate.draw().expect("a new device counts as unflushed");
                let Turn::Lead(lead) = gate.turn(&share) else {
                    unreachable!("nobody else flushes");
                };
                {
                    let mut place = place.lock().unwrap();
                    if *place == Place::Cached {
                        *place = Place::Dropped;
                    }
                }
                failures.count();
                lead.answered();
                lead.finish(Err(Arc::new(io::Error::other("a flush failed"))));
            })
        };
        let (gate, failures, place) = &*shared;
        let before = failures.get();
        *place.lock().unwrap() = Place::Cached;
        {
            let mut place = place.lock().unwrap();
            if *place == Place::Cached {
                *place = Place::Durable;
            }
        }
        gate.settle();
        let counted = failures.get() != before;
        assert!(counted || *place.lock().unwrap() == Place::Durable);
        flushing.join().unwrap();
    });
}

/// A flush fails outside a commit, and whoever noticed goes on if no record waits that may name
/// data; an operation takes its credit and looks at the failures before it names any. Never do both
/// miss the other: then a record would name data that the flush has lost.
///
/// Found when broken: `Failures::count`, the counting of `try_credit`, or `outstanding` with acquire and
/// release instead of sequential consistency (the first was so).
#[test]
fn a_failed_flush_is_forgiven_only_while_nobody_relies_on_it() {
    check(3, || {
        let slack = Slack {
            credit: 4,
            batches: 1,
        };
        let shared = Arc::new((Ring::new(100, 0, slack, 2), Failures::new()));
        let operation = {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || {
                let credit = shared.0.try_credit(1);
                assert!(credit.is_some());
                shared.1.get()
            })
        };
        shared.1.count();
        let forgiven = !shared.0.outstanding(|| false);
        let seen = operation.join().unwrap();
        assert!(seen == 1 || !forgiven);
    });
}

/// A second flush fails while the first is looked into, and with it goes what an operation wrote after the first: its batch must not find all failures
/// forgiven.
///
/// Found when broken: to count what is forgiven after the look for who relies on it.
#[test]
fn what_fails_after_the_look_is_not_forgiven() {
    check(3, || {
        let slack = Slack {
            credit: 4,
            batches: 1,
        };
        let ring = Ring::new(100, 0, slack, 2);
        let shared = Arc::new((ring, Failures::new(), AtomicU64::new(0)));
        shared.1.count();
        let operation = {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || {
                let (ring, failures, forgiven) = &*shared;
                let before = failures.get();
                // Here it writes its data. The credit stands for the record, too, until the batch is written.
                let credit = ring.try_credit(1).unwrap();
                let same = failures.get() == before;
                // The flush that covers its data.
                failures.count();
                loom::thread::yield_now();
                let written = failures.get() == forgiven.load(Ordering::SeqCst);
                ring.return_credit(credit);
                same && written
            })
        };
        let (ring, failures, forgiven) = &*shared;
        let seen = failures.get();
        loom::thread::yield_now();
        let outstanding = ring.outstanding(|| false);
        loom::thread::yield_now();
        if !outstanding {
            forgiven.store(seen, Ordering::SeqCst);
        }
        let committed = operation.join().unwrap();
        assert!(!committed);
    });
}

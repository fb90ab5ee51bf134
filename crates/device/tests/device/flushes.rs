//! Flushes are shared by those who may share them, and only by those (R17).

use crate::fixture::{Sims, UNEQUAL, create};
use base::sync::{Condvar, Mutex, rank};
use device::sim::{SimDevice, Times};
use device::{BlockDevice, Durability, Error, Io, Operation, Request};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A device whose flushes, or writes of one durability, wait for the test.
struct Gated {
    inner: Arc<SimDevice>,
    state: Mutex<Gate>,
    changed: Condvar,
}

#[derive(Default)]
struct Gate {
    /// Flushes that may proceed.
    permits: u64,
    started: u64,
    open: bool,
    writes: Option<Durability>,
}

impl Gated {
    fn new(inner: Arc<SimDevice>) -> Arc<Gated> {
        let gate = Gate {
            open: true,
            ..Gate::default()
        };
        Arc::new(Gated {
            inner,
            state: Mutex::new(rank::LEAF, gate),
            changed: Condvar::new(),
        })
    }

    fn close(&self) {
        *self.state.lock() = Gate::default();
    }

    /// These writes wait, and flushes do not.
    fn close_for_writes(&self, durability: Durability) {
        *self.state.lock() = Gate {
            writes: Some(durability),
            ..Gate::default()
        };
    }

    fn open(&self) {
        self.state.lock().open = true;
        self.changed.notify_all();
    }

    fn permit(&self) {
        self.state.lock().permits += 1;
        self.changed.notify_all();
    }

    fn wait_for_started(&self, count: u64) {
        let mut state = self.state.lock();
        while state.started < count {
            self.changed.wait(&mut state);
        }
    }

    fn pass(&self) {
        let mut state = self.state.lock();
        state.started += 1;
        self.changed.notify_all();
        while !state.open && state.permits == 0 {
            self.changed.wait(&mut state);
        }
        state.permits = state.permits.saturating_sub(1);
    }
}

impl BlockDevice for Gated {
    device::described_by!(inner);
    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let waits = match (&requests[0].operation, self.state.lock().writes) {
            (Operation::Flush, writes) => writes.is_none(),
            (Operation::Write { durability, .. }, writes) => writes == Some(*durability),
            (Operation::Read { .. }, _) => false,
        };
        if waits {
            self.pass();
        }
        self.inner.run(requests, meanwhile);
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.discard(offset, len)
    }
}

fn flushes(array: &device::Array) -> Vec<u64> {
    let stats = array.stats();
    stats.devices.iter().map(|d| d.flushes).collect()
}

#[test]
fn only_devices_with_unflushed_writes_are_flushed() {
    let sims = Sims::new(&UNEQUAL, 1);
    let array = create(sims.members(), 4096);
    array.flush().unwrap();
    assert_eq!(
        flushes(&array),
        [1, 1, 1],
        "a new array counts as unflushed"
    );
    array.flush().unwrap();
    assert_eq!(flushes(&array), [1, 1, 1]);
    array.write(4096, &[1; 4096], Durability::Volatile).unwrap();
    array.flush().unwrap();
    assert_eq!(flushes(&array), [1, 2, 1]);
    array.write(0, &[1; 4096], Durability::Durable).unwrap();
    array.flush().unwrap();
    assert_eq!(flushes(&array), [1, 2, 1], "a durable write needs no flush");
    array.mark_all_unflushed();
    array.flush().unwrap();
    assert_eq!(flushes(&array), [2, 3, 2]);
}

#[test]
fn a_flush_covers_what_completed_before_it_was_issued_and_no_more() {
    let sims = Sims::new(&[64 << 20], 1);
    let gated = Gated::new(Arc::clone(&sims.devices[0]));
    let array = create(vec![gated.clone()], 4096);
    array.flush().unwrap();
    gated.close();
    array.write(0, &[1; 4096], Durability::Volatile).unwrap();
    base::thread::parallel(10, |thread| match thread {
        0 => assert!(array.flush().unwrap() <= 1),
        1 => {
            gated.wait_for_started(1);
            // After the flush in flight was issued: it does not count for this write.
            array.write(4096, &[2; 4096], Durability::Volatile).unwrap();
            gated.permit();
            array.flush().unwrap();
            assert_eq!(sims.devices[0].volatile_bytes(), 0);
        }
        2 => {
            gated.wait_for_started(2);
            gated.permit();
        }
        _ => {
            // All of these share the second flush, or come after it and find nothing to do.
            gated.wait_for_started(1);
            array.flush().unwrap();
        }
    });
    assert_eq!(flushes(&array), [3], "one for mkfs, and two");
}

#[test]
fn a_failed_flush_is_an_error_for_every_waiter_and_leaves_the_device_unflushed() {
    let sims = Sims::new(&[64 << 20], 1);
    let gated = Gated::new(Arc::clone(&sims.devices[0]));
    let array = create(vec![gated.clone()], 4096);
    array.flush().unwrap();
    gated.close();
    sims.devices[0].fail_flushes(Times::Next(2));
    array.write(0, &[1; 4096], Durability::Volatile).unwrap();
    let outcomes = base::thread::parallel(6, |thread| {
        if thread == 0 {
            let first = array.flush();
            // The waiters' flush follows: it is theirs, and fails as well.
            gated.open();
            return first;
        }
        gated.wait_for_started(1);
        if thread == 1 {
            gated.permit();
        }
        array.flush()
    });
    let failed = outcomes.iter().filter(|o| o.is_err()).count();
    for outcome in &outcomes {
        if let Err(error) = outcome {
            assert!(matches!(error, Error::Flush { .. }), "{error}");
            assert_eq!(error.raw_os_error(), Some(5));
        }
    }
    // Waiters that came after the second failure lead a third flush, which is good; but the
    // first two flushes reached at least their leaders.
    assert!(failed >= 2, "{outcomes:?}");
    assert_eq!(array.flush_failures(), 2);
}

#[test]
fn after_a_failed_flush_the_device_is_flushed_again() {
    let sims = Sims::new(&UNEQUAL, 1);
    let array = create(sims.members(), 4096);
    array.flush().unwrap();
    for block in 0..3u64 {
        array
            .write(block * 4096, &[1; 4096], Durability::Volatile)
            .unwrap();
    }
    sims.devices[2].fail_flushes(Times::Next(1));
    let error = array.flush().unwrap_err();
    assert!(error.to_string().contains("sim3"), "{error}");
    assert_eq!(
        flushes(&array),
        [2, 2, 2],
        "the others were flushed all the same"
    );
    array.flush().unwrap();
    assert_eq!(flushes(&array), [2, 2, 3]);
}

#[test]
fn a_write_that_failed_still_counts_as_unflushed() {
    let sims = Sims::new(&UNEQUAL, 1);
    let array = create(sims.members(), 4096);
    array.flush().unwrap();
    // Of one that was to be durable some may be in the cache.
    for (durability, count) in [(Durability::Volatile, 2), (Durability::Durable, 3)] {
        sims.devices[0].fail_writes(Times::Next(1), None);
        assert!(array.write(0, &[1; 4096], durability).is_err());
        array.flush().unwrap();
        assert_eq!(flushes(&array), [count, 1, 1]);
    }
}

/// Something durable is written, which fails and counts as a failed flush while `gated` holds a part of it up. A flush of somebody else's succeeds
/// meanwhile, and says nothing of what the first may have lost: it ends when that is known.
fn flush_beside_doubt(
    array: &device::Array,
    gated: &Gated,
    write: impl Fn() -> Result<(), Error> + Sync,
) {
    let failures = array.flush_failures();
    let returned = (Mutex::new(rank::LEAF, false), Condvar::new());
    base::thread::parallel(3, |thread| match thread {
        0 => {
            write().unwrap_err();
            assert_eq!(array.flush_failures(), failures + 1);
        }
        1 => {
            gated.wait_for_started(1);
            array.flush().unwrap();
            assert_eq!(array.flush_failures(), failures + 1);
            *returned.0.lock() = true;
            returned.1.notify_all();
        }
        _ => {
            gated.wait_for_started(1);
            // Time for a flush that does not wait to return.
            let mut done = returned.0.lock();
            if !*done {
                returned.1.wait_for(&mut done, Duration::from_millis(100));
            }
            drop(done);
            let (ordered, counted) = (array.is_ordered(), array.flush_failures());
            gated.open();
            assert!(!ordered);
            assert_eq!(counted, failures);
        }
    });
}

fn durable(byte: u64, buf: &[u8]) -> Io<'_> {
    Io::Write {
        byte,
        buf,
        durability: Durability::Durable,
    }
}

/// A link that was reset fails the flush behind a durable write, and the write itself when that is tried again: that it failed twice says nothing of what
/// others had in the cache. So a block that cannot be written counts, too.
#[test]
fn a_durable_write_that_fails_counts_as_a_failed_flush() {
    let sims = Sims::new(&[64 << 20], 1);
    let array = create(sims.members(), 4096);
    let mut ios = [durable(0, &[1; 4096])];
    for (times, counted) in [(Times::Next(1), 1), (Times::Always, 2)] {
        sims.devices[0].fail_writes(times, None);
        array.write_durably(&mut ios).unwrap_err();
        assert_eq!(array.flush_failures(), counted);
        sims.devices[0].heal();
    }
    array.write_durably(&mut ios).unwrap();
    array.flush().unwrap();
    assert_eq!(array.flush_failures(), 2);
}

/// A bad block was told to everybody where no flush was.
#[test]
fn a_durable_write_that_fails_on_a_device_without_a_cache_is_its_own_affair() {
    let device = SimDevice::new(64 << 20, 1).without_cache();
    let array = create(vec![Arc::clone(&device) as _], 4096);
    device.fail_writes(Times::Always, None);
    array
        .write_durably(&mut [durable(0, &[1; 4096])])
        .unwrap_err();
    array.write_slot(0, &[0; 4096]).unwrap_err();
    assert_eq!(array.flush_failures(), 0);
}

/// A flush of two devices has failed on the first, with what that had in its cache, and the other takes its time. What is written durably meanwhile may have
/// been lost there, though the flush behind it succeeded.
#[test]
fn no_durable_write_is_good_while_a_flush_beside_it_may_have_failed() {
    let sims = Sims::new(&[64 << 20; 2], 1);
    let gated = Gated::new(Arc::clone(&sims.devices[1]));
    let array = create(vec![sims.members()[0].clone(), gated.clone()], 4096);
    let over = || array.write_durably(&mut [durable(0, &[1; 4096])]);
    let batch = || array.write_durably(&mut [durable(0, &[1; 4096]), durable(4096, &[1; 4096])]);
    let record = || array.write_slot(0, &[0; 4096]);
    let writes: [&(dyn Fn() -> Result<(), Error> + Sync); 3] = [&over, &batch, &record];
    for write in writes {
        array.mark_all_unflushed();
        gated.close();
        sims.devices[0].fail_flushes(Times::Next(1));
        let failures = array.flush_failures();
        let returned = (Mutex::new(rank::LEAF, false), Condvar::new());
        base::thread::parallel(3, |thread| match thread {
            0 => drop(array.flush().unwrap_err()),
            1 => {
                gated.wait_for_started(1);
                write().unwrap();
                let counted = array.flush_failures();
                *returned.0.lock() = true;
                returned.1.notify_all();
                assert_eq!(counted, failures + 1);
            }
            _ => {
                gated.wait_for_started(1);
                // Time for a write that does not wait to return.
                let mut done = returned.0.lock();
                if !*done {
                    returned.1.wait_for(&mut done, Duration::from_millis(100));
                }
                drop(done);
                gated.open();
            }
        });
    }
}

/// Nobody else's flush is waited for where it cannot have lost anything.
#[test]
fn a_durable_write_waits_for_no_flush_of_another_device() {
    let sims = Sims::new(&[64 << 20; 2], 1);
    let gated = Gated::new(Arc::clone(&sims.devices[1]));
    let array = create(vec![sims.members()[0].clone(), gated.clone()], 4096);
    array.flush().unwrap();
    array.write(4096, &[1; 4096], Durability::Volatile).unwrap();
    gated.close();
    base::thread::parallel(2, |thread| match thread {
        0 => assert_eq!(array.flush().unwrap(), 1),
        _ => {
            gated.wait_for_started(1);
            array.write_durably(&mut [durable(0, &[1; 4096])]).unwrap();
            gated.open();
        }
    });
    assert_eq!(flushes(&array), [1, 2]);
}

/// One of two devices has lost what was in its cache, and the other takes its time.
#[test]
fn no_flush_is_good_while_a_durable_write_is_under_way() {
    let sims = Sims::new(&[64 << 20; 2], 1);
    let gated = Gated::new(Arc::clone(&sims.devices[1]));
    let array = create(vec![sims.members()[0].clone(), gated.clone()], 4096);
    let record = || array.write_slot(0, &[0; 4096]);
    let batch = || array.write_durably(&mut [durable(0, &[1; 4096]), durable(4096, &[1; 4096])]);
    let over = || array.write_durably(&mut [durable(0, &[1; 4096]), durable(4096, &[1; 4096])]);
    let writes: [&(dyn Fn() -> Result<(), Error> + Sync); 3] = [&record, &batch, &over];
    for write in writes {
        array.flush().unwrap();
        array.write(0, &[2; 4096], Durability::Volatile).unwrap();
        gated.close_for_writes(Durability::Durable);
        sims.devices[0].fail_writes(Times::Next(1), None);
        flush_beside_doubt(&array, &gated, write);
    }
}

/// With them the kernel may do a flush.
#[test]
fn a_checkpoint_record_that_fails_counts_as_a_failed_flush() {
    let sims = Sims::new(&[64 << 20], 1);
    let array = create(sims.members(), 4096);
    sims.devices[0].fail_writes(Times::Next(1), None);
    array.write_slot(0, &[0; 4096]).unwrap_err();
    assert_eq!(array.flush_failures(), 1);
}

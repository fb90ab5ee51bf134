//! What sleeps and wakes at the word of a latch ([`crate::latch`]).

use crate::atomic::of_locks::{AtomicBool, AtomicU32};
use crate::clock;
use crate::latch::Word;
use parking_lot::lock_api::{GuardNoSend, RawMutex};
use parking_lot_core::{
    DEFAULT_PARK_TOKEN, DEFAULT_UNPARK_TOKEN, ParkResult, SpinWait, park, unpark_one,
};
use std::time::Duration;

/// How long a thread sleeps that nobody wakes: at first, and at most.
const FIRST_SLEEP: Duration = Duration::from_micros(100);
const LONGEST_SLEEP: Duration = Duration::from_millis(10);

/// A latch without what it protects.
pub struct RawLatch(Word);

impl RawLatch {
    fn name(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    #[cold]
    fn take_late(&self) {
        let (mut spins, mut time) = (SpinWait::new(), FIRST_SLEEP);
        while !self.0.try_again() {
            if spins.spin() {
                continue;
            }
            let mut late = false;
            self.0.sleep(|| {
                let until = Some(clock::moment_in(time));
                // SAFETY: the key is the address of this latch, which nothing else is at; what is called under the lock of its queue neither panics nor
                // parks or wakes anybody.
                let ended = unsafe {
                    park(
                        self.name(),
                        || self.0.is_taken(),
                        || {},
                        |_, _| {},
                        DEFAULT_PARK_TOKEN,
                        until,
                    )
                };
                late = ended == ParkResult::TimedOut;
            });
            time = match late {
                true => LONGEST_SLEEP.min(time * 2),
                false => FIRST_SLEEP,
            };
            spins.reset();
        }
    }

    #[cold]
    fn wake(&self) {
        // SAFETY: as in `take_late`.
        unsafe { unpark_one(self.name(), |_| DEFAULT_UNPARK_TOKEN) };
    }
}

// SAFETY: `Word`'s invariant 1.
unsafe impl RawMutex for RawLatch {
    const INIT: RawLatch = RawLatch(Word {
        taken: AtomicBool::new(false),
        sleeping: AtomicU32::new(0),
    });

    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock(&self) {
        if !self.0.try_take() {
            self.take_late();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.try_again()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.give_back(|| self.wake());
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.is_taken()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Latch, rank};
    use crate::clock;
    use crate::thread;
    use std::time::Duration;

    #[test]
    fn threads_that_wait_for_a_latch_get_it_one_after_the_other() {
        let sum = Latch::new(rank::LEAF, (0u64, 0u64));
        thread::parallel(4, |thread| {
            for round in 0..20_000 {
                let mut sum = sum.lock();
                sum.0 += 1;
                // The others go to sleep meanwhile.
                if thread == 0 && round % 4_000 == 0 {
                    clock::nap(Duration::from_millis(2).as_nanos() as u64);
                }
                sum.1 += 1;
                assert_eq!(sum.0, sum.1);
            }
        });
        assert_eq!(sum.into_inner(), (80_000, 80_000));
    }

    #[test]
    fn who_only_tries_does_not_wait() {
        let latch = Latch::new(rank::LEAF, 7);
        let held = latch.lock();
        assert!(latch.try_lock().is_none());
        drop(held);
        assert_eq!(latch.try_lock().map(|value| *value), Some(7));
    }
}

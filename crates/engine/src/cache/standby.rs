//! How the threads sleep that look after the cache's memory: until there is something to do, for a time, or until they are stopped for good.

use base::atomic::{AtomicBool, Ordering};
use base::clock::Clock;
use base::sync::{Condvar, Mutex, rank};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Standby {
    stopped: AtomicBool,
    /// Held by who has changed what the thread waits for.
    state: Mutex<()>,
    wake: Condvar,
}

impl Standby {
    pub fn new() -> Standby {
        Standby {
            stopped: AtomicBool::new(false),
            state: Mutex::new(rank::LEAF, ()),
            wake: Condvar::new(),
        }
    }

    /// After a change of what is waited for.
    #[cold]
    pub fn notify(&self) {
        drop(self.state.lock());
        self.wake.notify_all();
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.notify();
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Waits until that is so. False: it is stopped.
    pub fn await_that(&self, is_so: impl Fn() -> bool) -> bool {
        let mut state = self.state.lock();
        while !is_so() && !self.is_stopped() {
            self.wake.wait(&mut state);
        }
        !self.is_stopped()
    }

    /// Waits that long, or until it is stopped: true.
    pub fn pause(&self, time: Duration) -> bool {
        let (clock, mut state) = (Clock::real(), self.state.lock());
        let until_ns = clock.monotonic_ns() + time.as_nanos() as u64;
        // It is woken for other reasons, too.
        while !self.is_stopped() {
            let left = until_ns.saturating_sub(clock.monotonic_ns());
            if left == 0 {
                break;
            }
            self.wake.wait_for(&mut state, Duration::from_nanos(left));
        }
        self.is_stopped()
    }
}

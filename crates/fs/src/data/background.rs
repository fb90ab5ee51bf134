//! What the thread that writes back waits for. It has this while [`Files`](super::Files), and with it the devices, may go.

use base::sync::{Condvar, Mutex, rank};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Background {
    flags: Mutex<Flags>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Flags {
    stop: bool,
    /// Somebody waits for dirty pages to be written.
    hurry: bool,
}

impl Background {
    pub fn new() -> Background {
        Background {
            flags: Mutex::new(rank::LEAF, Flags::default()),
            wake: Condvar::new(),
        }
    }

    /// The next look is now, not in its time.
    pub fn hurry(&self) {
        let mut flags = self.flags.lock();
        if !flags.hurry {
            flags.hurry = true;
            self.wake.notify_all();
        }
    }

    /// There is no other look.
    pub fn stop(&self) {
        self.flags.lock().stop = true;
        self.wake.notify_all();
    }

    /// Sleeps until the next look, for so long at most; false: there is none.
    pub fn rest(&self, period: Duration) -> bool {
        let mut flags = self.flags.lock();
        if !flags.stop && !flags.hurry {
            self.wake.wait_for(&mut flags, period);
        }
        flags.hurry = false;
        !flags.stop
    }
}

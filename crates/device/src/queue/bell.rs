//! What wakes who waits for transfers and for other threads at once.
//!
//! 1. Who waits has counted before it looked what there is to do, and does not sleep if the bell was rung since: both are
//!    decided under the lock, so no ring is lost.
//! 2. Who sleeps in the kernel, with a ring, has said so under the lock; who rings then makes the descriptor readable.

use base::sync::{Condvar, Mutex, rank};
use base::sys::EventFd;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;
use std::time::Duration;

/// See the module's head.
#[derive(Debug)]
pub struct Bell {
    state: Mutex<State>,
    news: Condvar,
    /// There once somebody slept in the kernel.
    event: OnceLock<EventFd>,
}

#[derive(Debug)]
struct State {
    rung: u64,
    /// The owner sleeps in the kernel.
    in_kernel: bool,
    /// The descriptor is readable.
    signaled: bool,
}

/// How to sleep in the kernel.
pub(crate) enum Sleep {
    /// Not at all: it was rung since.
    Rung,
    /// Until this is readable.
    Until(RawFd),
    /// Not for long: there is nothing that would wake the sleeper.
    Deaf,
}

impl Default for Bell {
    fn default() -> Self {
        Self::new()
    }
}

impl Bell {
    pub fn new() -> Bell {
        Bell {
            state: Mutex::new(
                rank::LEAF,
                State {
                    rung: 0,
                    in_kernel: false,
                    signaled: false,
                },
            ),
            news: Condvar::new(),
            event: OnceLock::new(),
        }
    }

    /// How often it was rung. To be asked before looking what there is.
    pub fn rung(&self) -> u64 {
        self.state.lock().rung
    }

    /// Wakes whoever waits, or the next that would.
    pub fn ring(&self) {
        {
            let mut state = self.state.lock();
            state.rung += 1;
            if state.in_kernel
                && !state.signaled
                && let Some(event) = self.event.get()
            {
                event.signal();
                state.signaled = true;
            }
        }
        self.news.notify_all();
    }

    /// Waits until it was rung more often than that, or the time is over.
    pub fn wait(&self, rung: u64, patience: Option<Duration>) {
        let mut state = self.state.lock();
        while state.rung == rung {
            match patience {
                None => self.news.wait(&mut state),
                Some(time) => {
                    if self.news.wait_for(&mut state, time) {
                        return;
                    }
                }
            }
        }
    }

    /// For who is about to sleep in the kernel, and calls [`awake`](Bell::awake) after that.
    pub(crate) fn sleeping(&self, rung: u64) -> Sleep {
        if self.event.get().is_none() {
            match EventFd::new() {
                // Another one's is as good.
                Ok(event) => drop(self.event.set(event)),
                Err(error) => tracing::debug!(%error, "no descriptor for a bell"),
            }
        }
        let mut state = self.state.lock();
        state.in_kernel = state.rung == rung;
        match self.event.get() {
            _ if !state.in_kernel => Sleep::Rung,
            Some(event) => Sleep::Until(event.as_raw_fd()),
            None => Sleep::Deaf,
        }
    }

    pub(crate) fn awake(&self) {
        let mut state = self.state.lock();
        state.in_kernel = false;
        if std::mem::take(&mut state.signaled)
            && let Some(event) = self.event.get()
        {
            event.clear();
        }
    }
}

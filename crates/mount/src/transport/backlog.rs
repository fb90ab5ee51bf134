//! What the kernel tells without waiting for an answer, where other requests come by rings: that it refers to inodes no more (FORGET), and
//! that a request is no longer wanted (INTERRUPT).
//!
//! Removing a file ends with a FORGET, which gives its space back. One thread reads these, and naps after each, so that many come together: a
//! wake for each would cost more than it does. Whoever asks how much space is free, or finds none, has them done first
//! ([`Backlog::catch_up`]), so that nobody sees what is removed, but not gone.
//!
//! Invariants:
//! 1. `working` is true from before a message is taken from the kernel until it is done. So a message that is not done is seen by who looks at
//!    `working` and then at what the kernel has.
//! 2. No nap goes on while somebody waits.
//! 3. Who waits holds no lock but this one, and waits `patience` at most, as a message may wait for requests that others serve; and for
//!    [`ROUNDS`] messages at most, however many come meanwhile: one takes all FORGETs that there are.
//! 4. The thread that reads waits for messages by poll(2) alone, where it has a descriptor of its own: one that is taken back before it is read
//!    keeps nobody waiting.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use base::clock::Clock;
use base::sync::{Condvar, Mutex, rank};

use crate::sys;

/// How long anybody waits for messages to be done.
const PATIENCE: Duration = Duration::from_millis(200);
/// The message that is being done, all FORGETs that have come, and two INTERRUPTs, which are read before those.
const ROUNDS: u32 = 4;

/// Messages of one mount that have no answer.
#[derive(Debug)]
pub struct Backlog {
    /// Readable when there is a message.
    source: Arc<File>,
    patience: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    working: bool,
    /// Who waits for messages to be done.
    waiting: u32,
    /// Messages done, or found to be there no more.
    done: u64,
}

impl Backlog {
    pub fn new(source: Arc<File>) -> Backlog {
        Backlog::with_patience(source, PATIENCE)
    }

    fn with_patience(source: Arc<File>, patience: Duration) -> Backlog {
        Backlog {
            source,
            patience,
            state: Mutex::new(rank::LEAF, State::default()),
            changed: Condvar::new(),
        }
    }

    /// For the thread that reads them: waits for a message, which `take` is to read and do, if it is still there, and naps after it.
    pub fn serve<T>(&self, nap: Duration, take: impl FnOnce() -> T) -> std::io::Result<T> {
        sys::wait_for_input(self.source.as_fd())?;
        self.state.lock().working = true;
        let taken = take();
        let clock = Clock::real();
        let until_ns = clock.monotonic_ns().saturating_add(nap.as_nanos() as u64);
        let mut state = self.state.lock();
        (state.working, state.done) = (false, state.done + 1);
        self.changed.notify_all();
        while state.waiting == 0 {
            let left = until_ns.saturating_sub(clock.monotonic_ns());
            if left == 0 {
                break;
            }
            self.changed
                .wait_for(&mut state, Duration::from_nanos(left));
        }
        Ok(taken)
    }

    /// Waits until what the kernel has told so far is done. True: there was something.
    pub fn catch_up(&self) -> bool {
        let clock = Clock::real();
        let until_ns = clock.monotonic_ns() + self.patience.as_nanos() as u64;
        let mut state = self.state.lock();
        for round in 0..ROUNDS {
            if !state.working && !sys::has_input(self.source.as_fd()) {
                return round > 0;
            }
            state.waiting += 1;
            self.changed.notify_all();
            let done = state.done;
            while state.done == done {
                let left = until_ns.saturating_sub(clock.monotonic_ns());
                if left == 0 {
                    break;
                }
                self.changed
                    .wait_for(&mut state, Duration::from_nanos(left));
            }
            state.waiting -= 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    /// So long that a test which has to wait for its end does not end.
    const NAP: Duration = Duration::from_secs(10_000);

    /// The side that tells something, and the one that is told.
    fn told() -> (UnixStream, Arc<File>) {
        let (kernel, source) = UnixStream::pair().unwrap();
        (kernel, Arc::new(File::from(OwnedFd::from(source))))
    }

    #[test]
    fn who_waits_for_what_nobody_reads_goes_on() {
        let (kernel, source) = told();
        let backlog = Backlog::with_patience(source, Duration::from_millis(1));
        (&kernel).write_all(b"-").unwrap();
        assert!(backlog.catch_up());
    }

    #[test]
    fn who_waits_while_messages_keep_coming_goes_on() {
        let (kernel, source) = told();
        let backlog = Backlog::with_patience(source, NAP);
        // It stays there, however often it is taken for done.
        (&kernel).write_all(b"-").unwrap();
        let over = AtomicBool::new(false);
        base::thread::parallel(2, |thread| {
            if thread == 0 {
                while !over.load(Ordering::Relaxed) {
                    backlog.serve(NAP, || ()).unwrap();
                }
                return;
            }
            assert!(backlog.catch_up());
            over.store(true, Ordering::Relaxed);
            // Somebody waits for good, so that the thread takes no nap before it ends.
            backlog.state.lock().waiting += 1;
            backlog.changed.notify_all();
        });
    }

    #[test]
    fn who_catches_up_ends_naps_and_finds_all_that_was_told_done() {
        let (kernel, source) = told();
        let backlog = Backlog::with_patience(Arc::clone(&source), NAP);
        assert!(!backlog.catch_up(), "nothing was told");
        let done = AtomicU64::new(0);
        base::thread::parallel(2, |thread| {
            if thread == 0 {
                let take = || {
                    let mut byte = [0];
                    (&*source).read_exact(&mut byte).unwrap();
                    base::thread::yield_now();
                    done.fetch_add(1, Ordering::Relaxed);
                    byte != *b"."
                };
                while backlog.serve(NAP, take).unwrap() {}
                return;
            }
            let mut told = 0;
            for i in 0..3000 {
                let some = i % 4;
                (0..some).for_each(|_| (&kernel).write_all(b"-").unwrap());
                told += some;
                backlog.catch_up();
                assert_eq!(done.load(Ordering::Relaxed), told);
            }
            // Somebody waits for good, so that the thread takes no nap before it ends.
            backlog.state.lock().waiting += 1;
            (&kernel).write_all(b".").unwrap();
        });
    }
}

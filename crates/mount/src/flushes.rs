//! Requests that wait for devices to flush (FSYNC, FSYNCDIR, SYNCFS), and who waits for them.
//!
//! A flush takes a device as long as thousands of look-ups take, and as many programs as like ask for one at a time. So that they do not have all
//! workers, those that come when half of the workers wait for flushes already are left to threads that have no buffers, and the worker goes on to
//! the next request. Whoever syncs alone, or with few others, is served by the worker that has read his request, as by others.
//!
//! Invariants:
//! 1. No more than half of the workers wait for flushes, as long as there are threads to leave others to: where none can be had, or [`LEFT_MAX`] are
//!    left, workers wait as well.
//! 2. What was left is answered once, where its request was read: the way for its answer is open as long as it is owed.
//! 3. No thread is here before something is left. There are never more than [`THREADS_MAX`]; what is left beyond that has its turn when one of
//!    these is done, which were there before and share their flushes.
//! 4. The session is over only when all is answered ([`Flushes::finish`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use base::thread::{GrowingPool, Needs};

use crate::abi::opcode;

/// Threads at most.
const THREADS_MAX: usize = 128;
/// Requests that are left to them at most, each with a program that waits for it.
const LEFT_MAX: usize = 1 << 14;

/// Whether all that a message asks for is a flush, so that it is short and its answer has no data.
pub fn is_one(message: &[u8]) -> bool {
    // `struct fuse_in_header`: after its length.
    let opcode = message.get(4..).and_then(|rest| rest.first_chunk());
    opcode.is_some_and(|bytes| {
        let opcode = u32::from_ne_bytes(*bytes);
        [opcode::FSYNC, opcode::FSYNCDIR, opcode::SYNCFS].contains(&opcode)
    })
}

/// See the module's head.
#[derive(Debug)]
pub struct Flushes {
    /// Workers that may wait at a time.
    most: usize,
    /// Those that do.
    waiting: Arc<AtomicUsize>,
    /// Requests that were left and are not answered.
    left: Arc<AtomicUsize>,
    pool: OnceLock<GrowingPool>,
}

/// One of a count, which orders nothing.
#[derive(Debug)]
pub struct Turn(Arc<AtomicUsize>);

impl Turn {
    /// `None`: there are `most` already.
    fn take(count: &Arc<AtomicUsize>, most: usize) -> Option<Turn> {
        let more = |count: usize| (count < most).then_some(count + 1);
        let taken = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok().then(|| Turn(Arc::clone(count)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Flushes {
    /// For so many workers.
    pub fn new(workers_max: usize) -> Flushes {
        Flushes {
            most: (workers_max / 2).max(1),
            waiting: Arc::default(),
            left: Arc::default(),
            pool: OnceLock::new(),
        }
    }

    /// For a worker that is about to wait, until it has answered; `None`: enough of them do.
    pub fn turn(&self) -> Option<Turn> {
        Turn::take(&self.waiting, self.most)
    }

    /// Has another thread do what a worker would. A panic in it ends the process, as a worker's does. False: too much is left already, or no
    /// thread can be had, and it is for the worker.
    pub fn leave(&self, serve: impl FnOnce() + Send + 'static) -> bool {
        let Some(turn) = Turn::take(&self.left, LEFT_MAX) else {
            return false;
        };
        let pool = match self.pool() {
            Ok(pool) => pool,
            Err(error) => {
                tracing::debug!(%error, "no thread waits for flushes but the workers");
                return false;
            }
        };
        pool.give(Needs::Wait, move || {
            if catch_unwind(AssertUnwindSafe(serve)).is_err() {
                tracing::error!("a flush panicked; aborting so that no caller hangs");
                std::process::abort();
            }
            drop(turn);
        });
        true
    }

    /// With its first thread, from the first call on.
    fn pool(&self) -> std::io::Result<&GrowingPool> {
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        // Of several that come at once all but one start theirs in vain.
        let pool = GrowingPool::start("fuse-flush", THREADS_MAX, 1)?;
        Ok(self.pool.get_or_init(|| pool))
    }

    /// Waits until all that was left before is done.
    pub fn finish(&self) {
        if let Some(pool) = self.pool.get() {
            pool.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::InHeader;
    use zerocopy::IntoBytes;

    #[test]
    fn what_asks_for_a_flush_alone_is_known_by_its_head() {
        let asked = |opcode| {
            let header = InHeader {
                opcode,
                ..Default::default()
            };
            is_one(header.as_bytes())
        };
        assert!([opcode::FSYNC, opcode::FSYNCDIR, opcode::SYNCFS].map(asked) == [true; 3]);
        assert!([opcode::WRITE, opcode::FLUSH, opcode::LOOKUP].map(asked) == [false; 3]);
        assert!(!is_one(b"") && !is_one(&[20; 7]));
    }

    #[test]
    fn half_of_the_workers_wait_and_others_do_the_rest() {
        let flushes = Flushes::new(4);
        let turns = [flushes.turn(), flushes.turn()].map(Option::unwrap);
        assert!(flushes.turn().is_none());
        let all = Arc::new(std::sync::Barrier::new(6));
        for _ in 0..5 {
            let all = Arc::clone(&all);
            let left = flushes.leave(move || {
                all.wait();
            });
            assert!(left);
        }
        // All of these are at it.
        all.wait();
        flushes.finish();
        assert_eq!(flushes.left.load(Ordering::Relaxed), 0);
        drop(turns);
        assert!(flushes.turn().is_some() && Flushes::new(1).turn().is_some());
    }
}

//! Requests that wait for devices to flush (FSYNC, FSYNCDIR, SYNCFS, direct WRITEs that are synchronous), and who waits for them.
//!
//! A flush takes a device as long as thousands of look-ups take, and as many programs as like ask for one at a time. So that they do not have all
//! workers, those that come when half of the workers wait for flushes already are left, and the worker goes on to the next request. What is left is
//! done by threads that have no buffers where flushes take long, so that as many as possible share one; where they do not, to wake a thread would take longer than to
//! wait, and workers that have waited for one take the next. Whoever syncs alone, or with few others, is served by the worker that has read his request.
//!
//! Invariants:
//! 1. No more than half of the workers wait for flushes that these requests ask for, unless [`LEFT_MAX`] requests are left, or [`LEFT_BYTES_MAX`] of their messages: that is memory beside `cache_size`. Others wait uncounted: on mounts with `sync`
//!    SETATTR, SETXATTR and REMOVEXATTR, and what makes or removes names (with `dirsync`, too), each in the worker that has read it, as writes that are long and synchronous FALLOCATEs and copies do, and direct writes that only `sync` makes synchronous.
//! 2. Something is left only while workers wait, each of which looks for it before it waits no more. So all is done, whether there are threads or not.
//! 3. What was left is done once, and answered where its request was read: the way for its answer is open as long as it is owed.
//! 4. No thread is here before something is left where flushes take long. There are never more than [`THREADS_MAX`].
//! 5. The session is over only when all is answered ([`Flushes::finish`]).

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use base::clock::now_ns;
use base::sync::{Mutex, rank};
use base::thread::{GrowingPool, Needs};

use zerocopy::FromBytes;

use crate::abi::{InHeader, WRITE_CACHE, WriteIn, opcode};

/// Threads at most.
const THREADS_MAX: usize = 128;
/// Bytes of a message that writes before it asks for a flush, at most: others wait in workers.
const WRITTEN_MAX: usize = 64 << 10;
/// Requests that are left at most, each with a program that waits for it.
const LEFT_MAX: usize = 1 << 14;
/// Bytes of messages that are left, and one message more: as many as the threads have in their hands.
const LEFT_BYTES_MAX: usize = 8 << 20;
const _: () = assert!(THREADS_MAX * WRITTEN_MAX <= LEFT_BYTES_MAX);
/// What takes as long is worth another thread.
const LONG_NS: u64 = 100_000;

/// Whether a message asks for a flush, so that its answer has no data, and is short: what is left is copied.
pub fn is_one(message: &[u8]) -> bool {
    let Ok((header, body)) = InHeader::ref_from_prefix(message) else {
        return false;
    };
    match header.opcode {
        opcode::FSYNC | opcode::FSYNCDIR | opcode::SYNCFS => true,
        opcode::WRITE => WriteIn::ref_from_prefix(body).is_ok_and(|(write, _)| {
            let flags = write.flags as i32;
            let is_direct = flags & libc::O_DIRECT != 0 && write.write_flags & WRITE_CACHE == 0;
            let is_short = message.len() <= WRITTEN_MAX;
            is_short && is_direct && flags & libc::O_DSYNC != 0
        }),
        _ => false,
    }
}

/// Serves a request.
type Job = Box<dyn FnOnce() + Send>;

struct Left {
    job: Job,
    bytes: usize,
}

#[derive(Default)]
struct State {
    /// Workers that wait.
    waiting: usize,
    left: VecDeque<Left>,
    /// Of the messages of these.
    left_bytes: usize,
    /// Threads that were called and have not looked yet.
    called: usize,
}

impl State {
    /// Another one may be left.
    fn has_room(&self) -> bool {
        self.left.len() < LEFT_MAX && self.left_bytes < LEFT_BYTES_MAX
    }

    fn add(&mut self, job: Job, bytes: usize) {
        self.left.push_back(Left { job, bytes });
        self.left_bytes += bytes;
    }

    fn take(&mut self) -> Option<Job> {
        let Left { job, bytes } = self.left.pop_front()?;
        self.left_bytes -= bytes;
        Some(job)
    }
}

/// See the module's head.
pub struct Flushes {
    /// Workers that may wait at a time.
    most: usize,
    state: Mutex<State>,
    /// How long the short ones of late took, in nanoseconds. A hint: of two who note one, one may be lost.
    took_ns: AtomicU64,
    pool: OnceLock<GrowingPool>,
}

/// Of a worker that waits itself. When it is dropped, others that are left have been served.
pub struct Turn<'a> {
    flushes: &'a Arc<Flushes>,
    since_ns: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.flushes.note(self.since_ns);
        while let Some(job) = self.flushes.next() {
            self.flushes.serve(job);
        }
    }
}

impl Flushes {
    /// For so many workers.
    pub fn new(workers_max: usize) -> Flushes {
        Flushes {
            most: (workers_max / 2).max(1),
            state: Mutex::new(rank::LEAF, State::default()),
            took_ns: AtomicU64::new(LONG_NS),
            pool: OnceLock::new(),
        }
    }

    /// For a worker that is about to wait, until it has answered; `None`: enough of them do.
    pub fn turn(self: &Arc<Self>) -> Option<Turn<'_>> {
        self.turn_in(&mut self.state.lock())
    }

    fn turn_in(self: &Arc<Self>, state: &mut State) -> Option<Turn<'_>> {
        if state.waiting >= self.most && state.has_room() {
            return None;
        }
        state.waiting += 1;
        Some(Turn {
            flushes: self,
            since_ns: now_ns(),
        })
    }

    /// Has others do what a worker would that had no [`turn`](Self::turn), with a message of so many bytes. A panic in it ends the process, as a worker's does. Or gives the
    /// worker a turn, if there is one by now.
    pub fn leave(self: &Arc<Self>, job: Job, bytes: usize) -> Option<Turn<'_>> {
        {
            let mut state = self.state.lock();
            if let Some(turn) = self.turn_in(&mut state) {
                return Some(turn);
            }
            state.add(job, bytes);
        }
        self.call();
        None
    }

    /// The next for a worker that has waited; `None`: there is none, and it waits no more.
    fn next(self: &Arc<Self>) -> Option<Job> {
        let next = {
            let mut state = self.state.lock();
            let next = state.take();
            if next.is_none() {
                state.waiting -= 1;
            }
            next
        };
        if next.is_some() {
            self.call();
        }
        next
    }

    fn serve(&self, job: Job) {
        let since_ns = now_ns();
        job();
        self.note(since_ns);
    }

    fn note(&self, since_ns: u64) {
        let took = now_ns().saturating_sub(since_ns);
        let before = self.took_ns.load(Ordering::Relaxed);
        let now = match took.checked_sub(before) {
            Some(more) => before + more / 16,
            None => took,
        };
        self.took_ns.store(now, Ordering::Relaxed);
    }

    /// Where flushes take long, sees to it that there is a thread for each that is left.
    fn call(self: &Arc<Self>) {
        if self.took_ns.load(Ordering::Relaxed) < LONG_NS {
            return;
        }
        let Some(pool) = self.pool() else { return };
        let wanted = {
            let mut state = self.state.lock();
            let wanted = state.left.len().saturating_sub(state.called);
            state.called += wanted;
            wanted
        };
        for _ in 0..wanted {
            let flushes = Arc::clone(self);
            pool.give(Needs::Wait, move || {
                if catch_unwind(AssertUnwindSafe(|| flushes.look())).is_err() {
                    tracing::error!("a flush panicked; aborting so that no caller hangs");
                    std::process::abort();
                }
            });
        }
    }

    /// For a thread that was called.
    fn look(&self) {
        let job = {
            let mut state = self.state.lock();
            state.called -= 1;
            state.take()
        };
        if let Some(job) = job {
            self.serve(job);
        }
    }

    /// With its first thread, from the first call on.
    fn pool(&self) -> Option<&GrowingPool> {
        if self.pool.get().is_none() {
            // Of several that come at once all but one start theirs in vain.
            match GrowingPool::start("fuse-flush", THREADS_MAX, 1) {
                Ok(pool) => drop(self.pool.set(pool)),
                Err(error) => tracing::debug!(%error, "workers alone wait for flushes"),
            }
        }
        self.pool.get()
    }

    /// Waits until all is done, when no worker can leave anything any more.
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
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;
    use zerocopy::IntoBytes;

    #[test]
    fn what_asks_for_a_flush_is_known_by_its_head() {
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
        // A write that is to be durable, and that its program may not wait for.
        let message = |flags: i32, write_flags, data: usize| {
            let header = InHeader {
                opcode: opcode::WRITE,
                ..Default::default()
            };
            let write = WriteIn {
                flags: flags as u32,
                write_flags,
                ..Default::default()
            };
            [header.as_bytes(), write.as_bytes(), &vec![0; data]].concat()
        };
        let writes = |flags, write_flags| is_one(&message(flags, write_flags, 4096));
        let direct = libc::O_DIRECT;
        assert!(writes(direct | libc::O_DSYNC, 0) && writes(direct | libc::O_SYNC, 0));
        assert!(!writes(direct, 0) && !writes(libc::O_SYNC, 0));
        assert!(!writes(direct | libc::O_DSYNC, WRITE_CACHE));
        assert!(!is_one(&message(direct | libc::O_DSYNC, 0, WRITTEN_MAX)));
    }

    #[test]
    fn half_of_the_workers_wait_and_threads_do_the_rest() {
        let flushes = Arc::new(Flushes::new(4));
        let turns = [flushes.turn(), flushes.turn()].map(Option::unwrap);
        assert!(flushes.turn().is_none());
        let all = Arc::new(Barrier::new(6));
        for _ in 0..5 {
            let all = Arc::clone(&all);
            let job = move || {
                all.wait();
            };
            assert!(flushes.leave(Box::new(job), 0).is_none());
        }
        // All of these are at it.
        all.wait();
        flushes.finish();
        drop(turns);
        assert_eq!(flushes.state.lock().waiting, 0);
        assert!(flushes.turn().is_some());
        assert!(Arc::new(Flushes::new(1)).turn().is_some());
    }

    #[test]
    fn where_flushes_are_soon_over_workers_do_the_rest() {
        let flushes = Arc::new(Flushes::new(2));
        flushes.took_ns.store(0, Ordering::Relaxed);
        let turn = flushes.turn().unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..5 {
            let done = Arc::clone(&done);
            let job = move || {
                done.fetch_add(1, Ordering::Relaxed);
            };
            assert!(flushes.leave(Box::new(job), 0).is_none());
        }
        assert!(flushes.pool.get().is_none() && flushes.turn().is_none());
        drop(turn);
        assert_eq!(done.load(Ordering::Relaxed), 5);
        assert!(
            flushes.leave(Box::new(|| ()), 0).is_some(),
            "nobody would do it"
        );
    }

    #[test]
    fn one_long_flush_is_enough_to_call_threads_for_those_left_before() {
        let flushes = Arc::new(Flushes::new(2));
        flushes.took_ns.store(0, Ordering::Relaxed);
        let mut turn = flushes.turn().unwrap();
        let all = Arc::new(Barrier::new(5));
        for _ in 0..5 {
            let all = Arc::clone(&all);
            let job = move || {
                all.wait();
            };
            assert!(flushes.leave(Box::new(job), 0).is_none());
        }
        turn.since_ns = turn.since_ns.saturating_sub(32 * LONG_NS);
        // One by one they would wait for ever.
        drop(turn);
        flushes.finish();
        assert!(flushes.state.lock().left.is_empty());
    }

    /// A gigabyte could be left of what programs wrote one by one, and each waited for.
    #[test]
    fn what_is_left_takes_little_memory() {
        let flushes = Arc::new(Flushes::new(2));
        flushes.took_ns.store(0, Ordering::Relaxed);
        let turn = flushes.turn().unwrap();
        let (mut left, mut turns) = (0, Vec::new());
        while turns.is_empty() && left < LEFT_MAX {
            turns.extend(flushes.leave(Box::new(|| ()), WRITTEN_MAX));
            left += 1;
        }
        assert_eq!((left - 1) * WRITTEN_MAX, LEFT_BYTES_MAX);
        // Beyond that workers wait, as many as there are.
        turns.extend(flushes.turn());
        assert_eq!(turns.len(), 2);
        drop(turns);
        assert_eq!(flushes.state.lock().left_bytes, 0);
        assert!(flushes.turn().is_none());
        drop(turn);
    }
}

//! A pool of threads for what waits: as many as are needed at once, and no more for long.
//!
//! Invariants:
//! 1. What was given is done once, by one thread. The first is started with the pool and never ends before it, so that all is done even if
//!    no other can be had.
//! 2. What [`Needs::Wait`]s is not kept waiting by others: a thread is woken for it, or else started, unless there are as many as [`GrowingPool::start`] was told.
//!    So there are never more threads than were given things to do at once, and one.
//! 3. Of what [`Needs::Little`] so many at a time are done as [`GrowingPool::start`] was told, and others only when one of these has ended: its thread looks for them.
//!    More threads would only wait for each other's locks.
//!    What was given first has its turn first, as far as that allows: where more waits all the time than there may be threads, the rest is done, too.
//! 4. Who has nothing to do sleeps on top of a stack, from which the next is woken. So those that are not needed sleep on, and a thread
//!    that has slept for [`PATIENCE`] ends.
//! 5. A thread that is taken from the stack looks for something to do before it sleeps or ends. It may find nothing: another one was faster.

use super::{JoinHandle, spawn};
use crate::sync::{Condvar, Mutex, MutexGuard, rank};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// How long a thread waits for something to do before it ends.
const PATIENCE: Duration = Duration::from_secs(2);

type Job = Box<dyn FnOnce() + Send>;

/// What something to be done needs most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// It waits for devices, or for others who do: many at a time are as fast as one.
    Wait,
    /// It is soon over, or waits for something that all of its sort wait for.
    Little,
}

#[derive(Default)]
struct State {
    /// With their numbers, which grow.
    waits: VecDeque<(u64, Job)>,
    little: VecDeque<(u64, Job)>,
    /// Jobs that were given.
    given: u64,
    /// The numbers of those that a thread is at.
    under_way: Vec<u64>,
    /// Threads that are at what needs little.
    at_little: usize,
    /// Those that have nothing to do; the last is woken first.
    idle: Vec<Arc<Condvar>>,
    /// Threads there are, or that are being started.
    threads: usize,
    closing: bool,
    /// Some of them have ended.
    handles: Vec<JoinHandle>,
}

struct Shared {
    name: String,
    most: usize,
    /// At a time, of what needs little.
    few: usize,
    state: Mutex<State>,
    /// Something that was given is done.
    finished: Condvar,
}

/// See the module's head. Dropping it ends the threads, after what they were given.
pub struct GrowingPool(Arc<Shared>);

impl std::fmt::Debug for GrowingPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrowingPool")
            .field("threads", &self.threads())
            .finish_non_exhaustive()
    }
}

impl GrowingPool {
    /// Starts the first thread; there are up to `most` of this name, and up to `few` of them at what needs little.
    pub fn start(name: &str, most: usize, few: usize) -> std::io::Result<GrowingPool> {
        let pool = GrowingPool(Arc::new(Shared {
            name: name.to_owned(),
            most: most.max(1),
            few: few.max(1),
            state: Mutex::new(rank::LEAF, State::default()),
            finished: Condvar::new(),
        }));
        pool.0.state.lock().threads = 1;
        pool.start_one(true)?;
        Ok(pool)
    }

    /// Threads there are.
    pub fn threads(&self) -> usize {
        self.0.state.lock().threads
    }

    fn start_one(&self, stays: bool) -> std::io::Result<()> {
        let shared = Arc::clone(&self.0);
        let handle = spawn(&self.0.name, move || shared.work(stays))?;
        let mut state = self.0.state.lock();
        state.handles.retain(|handle| !handle.has_ended());
        state.handles.push(handle);
        Ok(())
    }

    /// Has one of the threads do something soon. Callers see to it that they do not give without bound. A panic in it ends nothing else.
    pub fn give(&self, needs: Needs, job: impl FnOnce() + Send + 'static) {
        let mut state = self.0.state.lock();
        let number = state.given;
        state.given += 1;
        match needs {
            Needs::Wait => state.waits.push_back((number, Box::new(job))),
            Needs::Little => {
                state.little.push_back((number, Box::new(job)));
                if state.at_little + state.little.len() > self.0.few {
                    return;
                }
            }
        }
        self.call_one(state);
    }

    /// Wakes a thread, or starts one.
    fn call_one(&self, mut state: MutexGuard<'_, State>) {
        if let Some(sleeper) = state.idle.pop() {
            drop(state);
            sleeper.notify_one();
            return;
        }
        if state.threads == self.0.most {
            return;
        }
        state.threads += 1;
        drop(state);
        if self.start_one(false).is_err() {
            // Those that there are do it later.
            let mut state = self.0.state.lock();
            state.threads -= 1;
        }
    }

    /// Waits until all that was given before has been done, whatever is given meanwhile. Not for a job of the pool itself.
    pub fn finish(&self) {
        let mut state = self.0.state.lock();
        let given = state.given;
        while !state.is_done(given) {
            self.0.finished.wait(&mut state);
        }
    }
}

impl Drop for GrowingPool {
    fn drop(&mut self) {
        let (handles, sleepers) = {
            let mut state = self.0.state.lock();
            state.closing = true;
            let handles = std::mem::take(&mut state.handles);
            (handles, std::mem::take(&mut state.idle))
        };
        sleepers.iter().for_each(|sleeper| sleeper.notify_one());
        for handle in handles {
            // What a job had may have been the last that kept the pool.
            handle.join_unless_it_is_ours();
        }
    }
}

impl State {
    /// All jobs with numbers below this one.
    fn is_done(&self, number: u64) -> bool {
        let later = |queue: &VecDeque<(u64, Job)>| queue.front().is_none_or(|(n, _)| *n >= number);
        later(&self.waits) && later(&self.little) && self.under_way.iter().all(|n| *n >= number)
    }

    /// The next thing to do.
    fn take(&mut self, few: usize) -> Option<(Needs, u64, Job)> {
        let first = |queue: &VecDeque<(u64, Job)>| queue.front().map(|(number, _)| *number);
        let little = first(&self.little).filter(|_| self.at_little < few);
        let is_little = little.is_some_and(|little| first(&self.waits).is_none_or(|n| little < n));
        let (needs, (number, job)) = match is_little {
            true => (Needs::Little, self.little.pop_front()?),
            false => (Needs::Wait, self.waits.pop_front()?),
        };
        self.at_little += usize::from(needs == Needs::Little);
        self.under_way.push(number);
        Some((needs, number, job))
    }
}

impl Shared {
    fn work(&self, stays: bool) {
        let mine = Arc::new(Condvar::new());
        let is_mine = |other: &Arc<Condvar>| Arc::ptr_eq(other, &mine);
        let mut state = self.state.lock();
        loop {
            if let Some((needs, number, job)) = state.take(self.few) {
                drop(state);
                // A panic has been reported.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = self.state.lock();
                state.at_little -= usize::from(needs == Needs::Little);
                state.under_way.retain(|other| *other != number);
                self.finished.notify_all();
                continue;
            }
            if state.closing {
                return;
            }
            state.idle.push(Arc::clone(&mine));
            while state.idle.iter().any(is_mine) {
                if stays {
                    mine.wait(&mut state);
                } else if mine.wait_for(&mut state, PATIENCE)
                    && let Some(at) = state.idle.iter().position(is_mine)
                {
                    state.idle.remove(at);
                    state.threads -= 1;
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{parallel, yield_now};
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn as_many_are_there_as_are_needed_at_once_and_no_more() {
        let pool = GrowingPool::start("test", 8, 2).unwrap();
        let all = Arc::new(Barrier::new(9));
        for round in 0..20 {
            for _ in 0..8 {
                let all = Arc::clone(&all);
                pool.give(Needs::Wait, move || {
                    all.wait();
                });
            }
            all.wait();
            pool.finish();
            assert_eq!(pool.threads(), 8, "round {round}");
        }
        let few = GrowingPool::start("test", 8, 2).unwrap();
        for _ in 0..100 {
            few.give(Needs::Wait, yield_now);
            few.finish();
        }
        assert!(few.threads() <= 2, "{}", few.threads());
    }

    #[test]
    fn of_what_needs_little_few_are_done_at_a_time_and_they_hold_up_nobody_else() {
        let pool = GrowingPool::start("test", 8, 2).unwrap();
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let gate = Arc::new(Barrier::new(3));
        for number in 0..40 {
            let (now, most, gate) = (Arc::clone(&now), Arc::clone(&most), Arc::clone(&gate));
            pool.give(Needs::Little, move || {
                let others = now.fetch_add(1, Ordering::SeqCst);
                most.fetch_max(others + 1, Ordering::SeqCst);
                if number < 2 {
                    gate.wait();
                }
                yield_now();
                now.fetch_sub(1, Ordering::SeqCst);
            });
        }
        // Two are at it, and wait for this.
        pool.give(Needs::Wait, move || {
            gate.wait();
        });
        pool.finish();
        assert_eq!(most.load(Ordering::SeqCst), 2);
        assert!(pool.threads() <= 4);
    }

    #[test]
    fn who_waits_until_all_is_done_does_not_wait_for_what_is_given_meanwhile() {
        fn give_again(pool: Arc<GrowingPool>, left: Arc<AtomicUsize>) {
            let (theirs, again) = (Arc::clone(&pool), Arc::clone(&left));
            pool.give(Needs::Wait, move || {
                yield_now();
                if again.load(Ordering::SeqCst) > 0 {
                    give_again(theirs, again);
                }
            });
        }
        let pool = Arc::new(GrowingPool::start("test", 3, 2).unwrap());
        let left = Arc::new(AtomicUsize::new(1));
        for _ in 0..3 {
            give_again(Arc::clone(&pool), Arc::clone(&left));
        }
        for _ in 0..20 {
            pool.finish();
        }
        left.store(0, Ordering::SeqCst);
        while Arc::strong_count(&left) > 1 {
            pool.finish();
        }
    }

    #[test]
    fn what_is_given_by_many_is_done_once_though_some_panic() {
        let pool = GrowingPool::start("test", 3, 2).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        for round in 1..20 {
            parallel(4, |_| {
                for number in 0..25 {
                    let done = Arc::clone(&done);
                    let needs = [Needs::Wait, Needs::Little][number % 2];
                    pool.give(needs, move || {
                        done.fetch_add(1, Ordering::Relaxed);
                        assert!(number % 25 > 0, "meant to fail");
                    });
                }
            });
            pool.finish();
            assert_eq!(done.load(Ordering::Relaxed), 100 * round);
        }
        let count = Arc::clone(&done);
        pool.give(Needs::Wait, move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        drop(pool);
        assert_eq!(done.load(Ordering::Relaxed), 1901);
    }

    /// As many wait all the time as there are threads, and one more.
    #[test]
    fn what_needs_little_has_its_turn_beside_more_that_waits_than_there_are_threads() {
        fn again(pool: &Arc<GrowingPool>, over: &Arc<AtomicUsize>) {
            let (theirs, left) = (Arc::clone(pool), Arc::clone(over));
            pool.give(Needs::Wait, move || {
                if left.load(Ordering::SeqCst) == 0 {
                    again(&theirs, &left);
                    yield_now();
                }
            });
        }
        let pool = Arc::new(GrowingPool::start("test", 2, 1).unwrap());
        let over = Arc::new(AtomicUsize::new(0));
        (0..3).for_each(|_| again(&pool, &over));
        let (sender, done) = std::sync::mpsc::channel();
        pool.give(Needs::Little, move || sender.send(()).unwrap());
        let done = done.recv_timeout(Duration::from_secs(20));
        over.store(1, Ordering::SeqCst);
        while Arc::strong_count(&over) > 1 {
            pool.finish();
        }
        assert!(done.is_ok(), "it was never done");
    }
}

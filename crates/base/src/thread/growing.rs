//! A pool of threads for what waits: as many as are needed at once, and no more for long.
//!
//! Invariants:
//! 1. What was given is done once, by one thread. The first is started with the pool and never ends before it, so that all is done even if
//!    no other can be had.
//! 2. What [`Needs::Wait`]s is not kept waiting by others: a thread is woken for it, or else started, unless there are as many as [`GrowingPool::start`] was told.
//!    So there are never more threads than were given things to do at once, and one.
//! 3. Of each other sort so many at a time are done as [`GrowingPool::start`] was told, whatever becomes of the other sorts, and more only when one of these has ended: its thread
//!    looks for them. More threads would only wait for each other's locks.
//!    What was given first has its turn first, as far as that allows: where more waits all the time than there may be threads, the rest is done, too.
//! 4. Who has nothing to do sleeps on top of a stack, from which the next is woken. So those that are not needed sleep on, and a thread
//!    that has slept for [`PATIENCE`] ends.
//! 5. A thread that is taken from the stack looks for something to do before it sleeps or ends. It may find nothing: another one was faster.
//! 6. Of what stands in one [`Line`] so many at a time are given to threads as that says, in the order in which they came. The next one is when one of these has ended,
//!    also by a panic; until then it counts as nothing of its sort.

use super::{JoinHandle, spawn};
use crate::map::HashMap;
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
    /// It is soon over, or waits for a lock that others of its sort have.
    Little,
    /// It waits for what many of its sort wait for: more of them at a time are no faster.
    Common,
}

impl Needs {
    const ALL: [Needs; 3] = [Needs::Wait, Needs::Little, Needs::Common];
}

/// Those who would wait for each other, whatever they need: of all with this name, and this `at_once`, so many are done at a time (at least one).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Line {
    pub name: usize,
    pub at_once: usize,
}

struct Given {
    /// These grow.
    number: u64,
    needs: Needs,
    line: Option<Line>,
    job: Job,
}

/// Those of one sort.
#[derive(Default)]
struct Sort {
    /// By their numbers.
    queue: VecDeque<Given>,
    /// Threads that are at others.
    at: usize,
}

/// What stands in a line that has something to do.
#[derive(Default)]
struct Standing {
    /// Those that threads are given, or at.
    out: usize,
    queue: VecDeque<Given>,
}

#[derive(Default)]
struct State {
    /// As in [`Needs::ALL`].
    sorts: [Sort; Needs::ALL.len()],
    lines: HashMap<Line, Standing>,
    /// Jobs that were given.
    given: u64,
    /// The numbers of those that a thread is at.
    under_way: Vec<u64>,
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
    /// At a time, of each sort but what waits.
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
    /// Starts the first thread; there are up to `most` of this name, and up to `few` of them at what [`Needs::Little`], and as many at what needs something in [`Common`](Needs::Common).
    pub fn start(name: &str, most: usize, few: usize) -> std::io::Result<GrowingPool> {
        let pool = GrowingPool(Arc::new(Shared {
            name: name.to_owned(),
            most: most.max(1),
            few: few.max(1),
            state: Mutex::new(rank::LEAF, State::default()),
            finished: Condvar::new(),
        }));
        pool.0.state.lock().threads = 1;
        pool.0.start_one(true)?;
        Ok(pool)
    }

    /// Threads there are.
    pub fn threads(&self) -> usize {
        self.0.state.lock().threads
    }

    /// Has one of the threads do something soon. Callers see to it that they do not give without bound. A panic in it ends nothing else.
    pub fn give(&self, needs: Needs, job: impl FnOnce() + Send + 'static) {
        self.add(needs, None, Box::new(job));
    }

    /// The same behind those who stand in a line.
    pub fn give_in_line(&self, needs: Needs, line: Line, job: impl FnOnce() + Send + 'static) {
        self.add(needs, Some(line), Box::new(job));
    }

    fn add(&self, needs: Needs, line: Option<Line>, job: Job) {
        let mut state = self.0.state.lock();
        let number = state.given;
        state.given += 1;
        let given = Given {
            number,
            needs,
            line,
            job,
        };
        if let Some(line) = line {
            let standing = state.lines.entry(line).or_default();
            if standing.out >= line.at_once.max(1) {
                standing.queue.push_back(given);
                return;
            }
            standing.out += 1;
        }
        if state.add(given, self.0.few) {
            self.0.call_one(state);
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
        let mut state = self.0.state.lock();
        state.closing = true;
        let sleepers = std::mem::take(&mut state.idle);
        sleepers.iter().for_each(|sleeper| sleeper.notify_one());
        // Whom one of them was about to start is known when that one has ended.
        while !state.handles.is_empty() {
            let handles = std::mem::take(&mut state.handles);
            drop(state);
            for handle in handles {
                // What a job had may have been the last that kept the pool.
                handle.join_unless_it_is_ours();
            }
            state = self.0.state.lock();
        }
    }
}

impl State {
    /// All jobs with numbers below this one.
    fn is_done(&self, number: u64) -> bool {
        let sorts = self.sorts.iter().map(|sort| &sort.queue);
        let mut queues = sorts.chain(self.lines.values().map(|standing| &standing.queue));
        let later = |queue: &VecDeque<Given>| queue.front().is_none_or(|g| g.number >= number);
        queues.all(later) && self.under_way.iter().all(|n| *n >= number)
    }

    /// Puts it among those of its sort; whether a thread may be at it now.
    fn add(&mut self, given: Given, few: usize) -> bool {
        let needs = given.needs;
        let Sort { queue, at } = &mut self.sorts[needs as usize];
        // Who stood in a line may be older than others here.
        let place = queue.partition_point(|other| other.number < given.number);
        queue.insert(place, given);
        *at + queue.len() <= most_of(needs, few)
    }

    /// The next thing to do.
    fn take(&mut self, few: usize) -> Option<Given> {
        let first = |&needs: &Needs| {
            let sort = &self.sorts[needs as usize];
            let may = sort.at < most_of(needs, few);
            Some((sort.queue.front().filter(|_| may)?.number, needs as usize))
        };
        let (number, sort) = Needs::ALL.iter().filter_map(first).min()?;
        let sort = &mut self.sorts[sort];
        sort.at += 1;
        self.under_way.push(number);
        sort.queue.pop_front()
    }

    /// A thread was at this job; whether there is something now for which it is not enough that this thread looks.
    fn end(&mut self, (number, needs, line): (u64, Needs, Option<Line>), few: usize) -> bool {
        self.sorts[needs as usize].at -= 1;
        self.under_way.retain(|other| *other != number);
        // Invariant 6.
        let Some(line) = line else {
            return false;
        };
        let standing = self.lines.entry(line).or_default();
        let Some(next) = standing.queue.pop_front() else {
            standing.out = standing.out.saturating_sub(1);
            if standing.out == 0 {
                self.lines.remove(&line);
            }
            return false;
        };
        let other_sort = next.needs != needs;
        self.add(next, few) && other_sort
    }
}

/// So many of a sort at a time.
fn most_of(needs: Needs, few: usize) -> usize {
    match needs {
        Needs::Wait => usize::MAX,
        Needs::Little | Needs::Common => few,
    }
}

impl Shared {
    fn start_one(self: &Arc<Self>, stays: bool) -> std::io::Result<()> {
        let shared = Arc::clone(self);
        let handle = spawn(&self.name, move || shared.work(stays))?;
        let mut state = self.state.lock();
        state.handles.retain(|handle| !handle.has_ended());
        state.handles.push(handle);
        Ok(())
    }

    /// Wakes a thread, or starts one.
    fn call_one(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if let Some(sleeper) = state.idle.pop() {
            drop(state);
            sleeper.notify_one();
            return;
        }
        // Nobody would wait for one that is started at the end: those that there are do it.
        if state.threads == self.most || state.closing {
            return;
        }
        state.threads += 1;
        drop(state);
        if self.start_one(false).is_err() {
            // Those that there are do it later.
            let mut state = self.state.lock();
            state.threads -= 1;
        }
    }

    fn work(self: &Arc<Self>, stays: bool) {
        let mine = Arc::new(Condvar::new());
        let is_mine = |other: &Arc<Condvar>| Arc::ptr_eq(other, &mine);
        let mut state = self.state.lock();
        loop {
            if let Some(given) = state.take(self.few) {
                drop(state);
                let done = (given.number, given.needs, given.line);
                // A panic has been reported.
                let _ = catch_unwind(AssertUnwindSafe(given.job));
                state = self.state.lock();
                let calls = state.end(done, self.few);
                self.finished.notify_all();
                if calls {
                    self.call_one(state);
                    state = self.state.lock();
                }
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

    #[test]
    fn what_waits_for_something_in_common_holds_up_nothing_that_needs_little() {
        let pool = GrowingPool::start("test", 16, 2).unwrap();
        let gate = Arc::new(Barrier::new(3));
        for number in 0..20 {
            let gate = Arc::clone(&gate);
            let wait = move || {
                if number < 2 {
                    gate.wait();
                }
            };
            pool.give(Needs::Common, wait);
        }
        let (sender, done) = std::sync::mpsc::channel();
        pool.give(Needs::Little, move || sender.send(()).unwrap());
        let done = done.recv_timeout(Duration::from_secs(20));
        gate.wait();
        assert!(done.is_ok(), "it was never done");
        pool.finish();
        assert!(pool.threads() <= 4, "{}", pool.threads());
    }

    #[test]
    fn who_stands_in_a_line_holds_up_nobody_elsewhere() {
        let pool = GrowingPool::start("test", 16, 2).unwrap();
        let line = Line {
            name: 7,
            at_once: 1,
        };
        let (gate, seen) = (
            Arc::new(Barrier::new(2)),
            Arc::new(Mutex::new(rank::LEAF, Vec::new())),
        );
        for number in 0..20 {
            let (gate, seen) = (Arc::clone(&gate), Arc::clone(&seen));
            let job = move || {
                if number == 0 {
                    gate.wait();
                }
                seen.lock().push(number);
                assert!(number % 3 > 0, "meant to fail");
            };
            // Behind what needs little is what waits, and in turn.
            let needs = [Needs::Little, Needs::Wait][number % 2];
            pool.give_in_line(needs, line, job);
        }
        let (sender, done) = std::sync::mpsc::channel();
        for _ in 0..20 {
            let sender = sender.clone();
            pool.give(Needs::Little, move || sender.send(()).unwrap());
        }
        for _ in 0..20 {
            let done = done.recv_timeout(Duration::from_secs(20));
            if done.is_err() {
                gate.wait();
            }
            assert!(done.is_ok(), "it was never done");
        }
        assert!(seen.lock().is_empty());
        gate.wait();
        // All in the line, too.
        pool.finish();
        assert_eq!(*seen.lock(), (0..20).collect::<Vec<_>>());
        assert!(pool.0.state.lock().lines.is_empty());
    }

    /// Two threads are at what needs little, and the one that ends goes on with that: for what waits it calls another one.
    #[test]
    fn what_waits_is_not_kept_waiting_behind_what_needs_little_in_its_line() {
        let pool = GrowingPool::start("test", 16, 1).unwrap();
        let line = Line {
            name: 7,
            at_once: 1,
        };
        let (first, gate) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let (theirs, their_gate) = (Arc::clone(&first), Arc::clone(&gate));
        pool.give_in_line(Needs::Little, line, move || {
            theirs.wait();
        });
        pool.give(Needs::Little, move || {
            their_gate.wait();
        });
        let (sender, done) = std::sync::mpsc::channel();
        pool.give_in_line(Needs::Wait, line, move || sender.send(()).unwrap());
        first.wait();
        let done = done.recv_timeout(Duration::from_secs(20));
        gate.wait();
        assert!(done.is_ok(), "it was never done");
    }

    #[test]
    fn so_many_of_a_line_are_done_at_a_time_as_it_says() {
        let pool = Arc::new(GrowingPool::start("test", 16, 4).unwrap());
        let line = Line {
            name: 7,
            at_once: 2,
        };
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        parallel(4, |_| {
            for number in 0..100 {
                let (now, most) = (Arc::clone(&now), Arc::clone(&most));
                let needs = Needs::ALL[number % 3];
                pool.give_in_line(needs, line, move || {
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    yield_now();
                    // For a while, until another one has been done beside one.
                    for _ in 0..1_000 {
                        if most.load(Ordering::SeqCst) == 1 {
                            yield_now();
                        }
                    }
                    now.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        drop(pool);
        assert_eq!(
            (Arc::strong_count(&now), most.load(Ordering::SeqCst)),
            (1, 2)
        );
    }
}

//! Runs the real threads of a program one at a time, in an order that a seed decides.
//!
//! [`run`] makes the calling thread the first *task* of a world; a thread that a task starts
//! through [`crate::thread`] becomes a task too. Exactly one task runs at any moment. It
//! hands over at *points*: when it takes or gives back a lock, waits on a condition, joins,
//! yields or ends, and wherever code calls [`point`]. Who goes on is drawn from the seed, so a
//! run is repeated exactly by its seed, and another seed is another interleaving.
//!
//! Time is a manual clock. It jumps to the earliest deadline when nobody can run, and now
//! and then while somebody could, so that timers fire in the middle of work as well.
//!
//! Invariants:
//! 1. `current` names the one task that may run; every other task's thread waits on its own
//!    `turn` until it is named.
//! 2. A task that waits for something is not `Ready`; whoever makes that thing happen makes it
//!    `Ready`, while it is `current` itself. So no wake-up is lost.
//! 3. All choices are drawn from `rng` by the current task under `state`: nothing else decides.
//!
//! A world in which nobody can run and no deadline is ahead is a deadlock; one that takes
//! more than [`STEPS_MAX`] hand-overs is taken for a livelock. Either prints who waits for what
//! and aborts the process: locks are held all over, so nothing can be unwound.
//!
//! The technique is that of deterministic simulation as FoundationDB made it known; handing a
//! baton between operating-system threads is how `shuttle` and `loom` run theirs. Atomics
//! are no points: the lock-free parts are model-checked on their own.

use crate::clock::{Clock, Manual};
use crate::rng::Rng;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Hand-overs after which a world counts as one that goes nowhere.
pub const STEPS_MAX: u64 = 200_000_000;

/// The CPUs that tasks are told of: a seed is the same run on every machine.
pub(crate) const CPUS: usize = 2;

/// What a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// The lock at this address.
    Lock(usize),
    /// The condition variable at this address.
    Condition(usize),
    /// The end of a task.
    End(usize),
    /// The clock alone.
    Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ready,
    Waiting(On),
    Ended,
}

struct Task {
    name: String,
    status: Status,
    /// When the wait ends by itself, in nanoseconds of the world's clock.
    deadline: Option<u64>,
    /// The last wait ended by its deadline.
    timed_out: bool,
    turn: Arc<Condvar>,
}

struct State {
    what: String,
    rng: Rng,
    tasks: Vec<Task>,
    current: usize,
    steps: u64,
    /// A point hands over once in so many times.
    switch_every: u64,
}

struct World {
    clock: Arc<Manual>,
    state: Mutex<State>,
}

thread_local! {
    static TASK: RefCell<Option<(Arc<World>, usize)>> = const { RefCell::new(None) };
}

/// Points between two early timers, on average.
const EARLY_TIMER_EVERY: u64 = 512;

/// Runs `body` as the first task of a world of its own. `clock` must be a manual one; the
/// world moves it. All threads that tasks start must have ended when `body` returns. `what`
/// says what runs, for the report of a deadlock.
///
/// # Panics
/// When a task's thread outlives `body`, and when `clock` is the machine's.
pub fn run<T>(what: &str, seed: u64, clock: &Clock, body: impl FnOnce() -> T) -> T {
    let Clock::Manual(manual) = clock else {
        panic!("a world needs a clock that it can move");
    };
    let mut rng = Rng::new(seed);
    let switch_every = *rng.pick(&[1, 2, 4, 16, 64]);
    let world = Arc::new(World {
        clock: Arc::clone(manual),
        state: Mutex::new(State {
            what: what.to_owned(),
            rng,
            tasks: Vec::new(),
            current: 0,
            steps: 0,
            switch_every,
        }),
    });
    // One goes on at a time: to wake the next one on another CPU costs several times as much.
    let on_one_cpu = crate::thread::OneCpu::keep();
    let first = world.state.lock().add("main");
    TASK.set(Some((Arc::clone(&world), first)));
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
    TASK.set(None);
    drop(on_one_cpu);
    let result = match outcome {
        Ok(result) => result,
        // Tasks that are left stay parked for ever: what they hold cannot be taken from them.
        Err(panic) => std::panic::resume_unwind(panic),
    };
    let state = world.state.lock();
    let left = state.tasks.iter().skip(1);
    let left: Vec<&str> = left
        .filter(|t| t.status != Status::Ended)
        .map(|t| t.name.as_str())
        .collect();
    assert!(left.is_empty(), "threads outlive their world: {left:?}");
    result
}

/// Whether the caller is a task of a world.
pub fn active() -> bool {
    TASK.try_with(|task| task.borrow().is_some())
        .unwrap_or(false)
}

/// Calls `body` without points: for what only watches the run, and must not change its order.
/// `body` must not wait for another task.
pub fn quietly<T>(body: impl FnOnce() -> T) -> T {
    let task = TASK.take();
    let result = body();
    TASK.set(task);
    result
}

/// The number of the calling task; `None` outside a world.
pub fn task() -> Option<usize> {
    let task = TASK.try_with(|task| task.borrow().as_ref().map(|(_, id)| *id));
    task.ok().flatten()
}

/// Hand-overs so far; 0 outside a world. Equal for equal seeds.
pub fn steps() -> u64 {
    with(|world, _| world.state.lock().steps).unwrap_or(0)
}

/// A moment at which another task may go on.
pub fn point() {
    if std::thread::panicking() {
        return;
    }
    with(|world, me| {
        let mut state = world.state.lock();
        if state.rng.one_in(EARLY_TIMER_EVERY) {
            state.fire_earliest(&world.clock.now_ns);
        }
        let every = state.switch_every;
        if every == 1 || state.rng.one_in(every) {
            world.hand_over(state, me);
        }
    });
}

/// Lets another task go on, if there is one that can.
pub(crate) fn yield_now() -> bool {
    with(|world, me| {
        let mut state = world.state.lock();
        let others = state.ready().any(|task| task != me);
        if !others || state.rng.one_in(EARLY_TIMER_EVERY) {
            // A task that spins for something that only time brings must see time pass.
            state.fire_earliest(&world.clock.now_ns);
        }
        state.tasks[me].status = Status::Waiting(On::Time);
        let next = state.draw(&world.clock.now_ns);
        state.tasks[me].status = Status::Ready;
        let next = next.unwrap_or(me);
        world.pass_to(state, me, next);
    })
    .is_some()
}

/// Spends `time` of the world's clock while others run. Outside a world it does nothing.
pub fn spend(time: Duration) {
    block(On::Time, Some(time));
}

/// Waits until somebody wakes the caller, or for `timeout`; true when it ran out.
pub(crate) fn block(on: On, timeout: Option<Duration>) -> bool {
    with(|world, me| {
        let mut state = world.state.lock();
        let now = world.clock.now_ns.load(Ordering::Relaxed);
        let task = &mut state.tasks[me];
        task.status = Status::Waiting(on);
        task.deadline = timeout.map(|t| now.saturating_add(crate::clock::ns_of(t)));
        task.timed_out = false;
        world.hand_over(state, me);
        world.state.lock().tasks[me].timed_out
    })
    .unwrap_or(false)
}

/// Makes every task ready that waits for `on`.
pub(crate) fn wake_all(on: On) {
    with(|world, _| world.state.lock().wake(on));
}

/// Makes one task ready that waits for `on`; which one is drawn.
pub(crate) fn wake_one(on: On) {
    with(|world, _| {
        let mut state = world.state.lock();
        let waiting = |t: &(usize, &Task)| t.1.status == Status::Waiting(on);
        let tasks = state.tasks.iter().enumerate();
        let waiting: Vec<usize> = tasks.filter(waiting).map(|(id, _)| id).collect();
        if !waiting.is_empty() {
            let task = *state.rng.pick(&waiting);
            state.tasks[task].make_ready();
        }
    });
}

/// A task that was announced and has no thread yet; dropped without one, it has ended.
pub(crate) struct Birth {
    world: Arc<World>,
    id: usize,
    lives: bool,
}

/// Announces a task for a thread that the caller is about to start; `None` outside a world.
pub(crate) fn announce(name: &str) -> Option<Birth> {
    with(|world, _| Birth {
        world: Arc::clone(world),
        id: world.state.lock().add(name),
        lives: false,
    })
}

impl Birth {
    pub fn id(&self) -> usize {
        self.id
    }

    /// Runs `body` as this task, on the thread that was started for it.
    pub fn live<T>(mut self, body: impl FnOnce() -> T) -> T {
        self.lives = true;
        let (world, id) = (Arc::clone(&self.world), self.id);
        {
            let mut state = world.state.lock();
            let turn = Arc::clone(&state.tasks[id].turn);
            while state.current != id {
                turn.wait(&mut state);
            }
        }
        TASK.set(Some((Arc::clone(&world), id)));
        let _end = End { world, id };
        body()
    }
}

impl Drop for Birth {
    fn drop(&mut self) {
        if !self.lives {
            let mut state = self.world.state.lock();
            state.tasks[self.id].status = Status::Ended;
            state.wake(On::End(self.id));
        }
    }
}

/// Ends a task when dropped, also by a panic.
struct End {
    world: Arc<World>,
    id: usize,
}

impl Drop for End {
    fn drop(&mut self) {
        TASK.set(None);
        let mut state = self.world.state.lock();
        state.tasks[self.id].status = Status::Ended;
        state.wake(On::End(self.id));
        let next = self.world.next(&mut state);
        state.current = next;
        state.tasks[next].turn.notify_one();
    }
}

/// Waits for the end of a task.
pub(crate) fn join(id: usize) {
    let ended = |world: &Arc<World>| world.state.lock().tasks[id].status == Status::Ended;
    while with(|world, _| ended(world)) == Some(false) {
        block(On::End(id), None);
    }
}

fn with<R>(action: impl FnOnce(&Arc<World>, usize) -> R) -> Option<R> {
    let task = TASK.try_with(|task| task.borrow().clone()).ok().flatten();
    task.map(|(world, id)| action(&world, id))
}

impl World {
    /// Lets a drawn task go on, and returns when the caller is drawn again.
    fn hand_over(&self, mut state: MutexGuard<'_, State>, me: usize) {
        let next = self.next(&mut state);
        self.pass_to(state, me, next);
    }

    fn pass_to(&self, mut state: MutexGuard<'_, State>, me: usize, next: usize) {
        state.steps += 1;
        if state.steps > STEPS_MAX {
            state.give_up("livelock");
        }
        if next == me {
            return;
        }
        state.current = next;
        state.tasks[next].turn.notify_one();
        let turn = Arc::clone(&state.tasks[me].turn);
        while state.current != me {
            turn.wait(&mut state);
        }
    }

    fn next(&self, state: &mut State) -> usize {
        match state.draw(&self.clock.now_ns) {
            Some(next) => next,
            None => state.give_up("deadlock"),
        }
    }
}

impl State {
    fn add(&mut self, name: &str) -> usize {
        self.tasks.push(Task {
            name: name.to_owned(),
            status: Status::Ready,
            deadline: None,
            timed_out: false,
            turn: Arc::new(Condvar::new()),
        });
        self.tasks.len() - 1
    }

    fn ready(&self) -> impl Iterator<Item = usize> {
        let tasks = self.tasks.iter().enumerate();
        tasks
            .filter(|(_, task)| task.status == Status::Ready)
            .map(|(id, _)| id)
    }

    /// A ready task; when there is none, one whose deadline comes first, at that time.
    fn draw(&mut self, now: &AtomicU64) -> Option<usize> {
        if self.ready().next().is_none() && !self.fire_earliest(now) {
            return None;
        }
        let count = self.ready().count() as u64;
        let index = self.rng.below(count) as usize;
        self.ready().nth(index)
    }

    /// Moves the clock to the earliest deadline and makes its task ready; false if there is none.
    fn fire_earliest(&mut self, now: &AtomicU64) -> bool {
        let waiting = |task: &Task| matches!(task.status, Status::Waiting(_));
        let tasks = self.tasks.iter().enumerate();
        let deadlines = tasks.filter(|(_, task)| waiting(task));
        let earliest = deadlines
            .filter_map(|(id, task)| Some((task.deadline?, id)))
            .min();
        let Some((deadline, id)) = earliest else {
            return false;
        };
        now.fetch_max(deadline, Ordering::Relaxed);
        self.tasks[id].make_ready();
        self.tasks[id].timed_out = true;
        true
    }

    fn wake(&mut self, on: On) {
        for task in &mut self.tasks {
            if task.status == Status::Waiting(on) {
                task.make_ready();
            }
        }
    }

    fn give_up(&self, what: &str) -> ! {
        eprintln!("{}: {what} after {} steps:", self.what, self.steps);
        for (id, task) in self.tasks.iter().enumerate() {
            eprintln!("  task {id} {}: {:?}", task.name, task.status);
        }
        std::process::abort();
    }
}

impl Task {
    fn make_ready(&mut self) {
        self.status = Status::Ready;
        self.deadline = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{Condvar, Handle, Mutex, RwLock, rank};
    use crate::thread;

    /// The order in which three threads append to a list, and the time it took.
    fn history(seed: u64) -> (Vec<u64>, u64) {
        let clock = Clock::manual(0);
        let list = Arc::new((Mutex::new(rank::LEAF, Vec::new()), Condvar::new()));
        run("test", seed, &clock, || {
            let append = |who: u64| {
                let list = Arc::clone(&list);
                let body = move || {
                    for _ in 0..5 {
                        let mut items = list.0.lock();
                        items.push(who);
                        list.1.notify_one();
                        if who == 2 {
                            list.1.wait_for(&mut items, Duration::from_millis(3));
                        }
                    }
                };
                thread::spawn("appender", body).unwrap()
            };
            let handles: Vec<_> = (0..3).map(append).collect();
            for handle in handles {
                handle.join().unwrap();
            }
        });
        let items = list.0.lock().clone();
        (items, clock.monotonic_ns())
    }

    #[test]
    fn a_seed_repeats_its_order_and_seeds_differ() {
        let first: Vec<_> = (0..20).map(history).collect();
        let second: Vec<_> = (0..20).map(history).collect();
        assert_eq!(first, second);
        let orders: std::collections::HashSet<_> = first.iter().map(|(o, _)| o).collect();
        assert!(orders.len() > 10, "{} orders of 20", orders.len());
        assert!(first.iter().all(|(order, _)| order.len() == 15));
    }

    #[test]
    fn readers_and_writers_exclude_each_other() {
        for seed in 0..50 {
            let lock = Arc::new(RwLock::new(rank::INODE, (0u64, 0u64)));
            let lock = Handle::common(lock);
            run("test", seed, &Clock::manual(0), || {
                let failures = thread::parallel(4, |i| {
                    let mut wrong = 0;
                    for _ in 0..10 {
                        if i == 0 {
                            let mut pair = lock.clone().write_owned();
                            pair.0 += 1;
                            point();
                            pair.1 += 1;
                        } else {
                            let pair = lock.read();
                            point();
                            wrong += u32::from(pair.0 != pair.1);
                        }
                    }
                    wrong
                });
                assert_eq!(failures, [0; 4]);
            });
            assert_eq!(*lock.read(), (10, 10));
        }
    }

    /// Rounds of three readers and a writer, by a seed: half changes seen, and looks that found the lock crowded.
    fn crowd(seed: u64) -> (u32, u32) {
        let lock = RwLock::new(rank::INODE, (0u64, 0u64));
        let rounds = |i: u64| {
            let (mut wrong, mut crowded) = (0, 0);
            for round in 0..20 {
                if i == 0 && round % 5 == 0 {
                    let mut pair = lock.write();
                    pair.0 += 1;
                    point();
                    pair.1 += 1;
                } else {
                    let pair = lock.read();
                    point();
                    wrong += u32::from(pair.0 != pair.1);
                    crowded += u32::from(lock.is_crowded());
                }
            }
            (wrong, crowded)
        };
        crate::tight::set(true);
        let results = run("test", seed, &Clock::manual(0), || {
            thread::parallel(4, |i| rounds(i as u64))
        });
        crate::tight::set(false);
        let sum = |a: (u32, u32), b: (u32, u32)| (a.0 + b.0, a.1 + b.1);
        results.into_iter().fold((0, 0), sum)
    }

    #[test]
    fn readers_that_enter_and_writers_exclude_each_other() {
        use crate::canary::{Canary, plant};
        let results: Vec<_> = (0..50).map(crowd).collect();
        assert!(results.iter().all(|(wrong, _)| *wrong == 0));
        let crowded = results.iter().filter(|(_, crowded)| *crowded > 0).count();
        assert!(crowded > 25, "readers entered by {crowded} of 50 seeds");
        plant(Some(Canary::ReadersNotAwaited));
        let broken = (0..50).find(|&seed| std::panic::catch_unwind(|| crowd(seed)).is_err());
        plant(None);
        crate::tight::set(false);
        assert!(broken.is_some(), "a writer that does not wait is seen");
    }

    #[test]
    fn a_lost_update_is_found_by_some_seed() {
        let lost = (0..50).filter(|&seed| {
            let sum = Mutex::new(rank::LEAF, 0);
            run("test", seed, &Clock::manual(0), || {
                thread::parallel(2, |_| {
                    for _ in 0..3 {
                        let seen = *sum.lock();
                        *sum.lock() = seen + 1;
                    }
                });
            });
            sum.into_inner() != 6
        });
        assert!(lost.count() > 10);
    }

    #[test]
    fn time_passes_when_everybody_waits_for_it() {
        let clock = Clock::manual(5);
        run("test", 1, &clock, || spend(Duration::from_secs(3)));
        assert_eq!(clock.monotonic_ns(), 3_000_000_005);
    }

    #[test]
    fn tasks_keep_to_one_cpu_and_leave_their_caller_free() {
        let before = thread::allowed_cpus();
        let within = run("test", 1, &Clock::manual(0), || {
            assert_eq!(thread::cpu_count(), CPUS);
            thread::parallel(2, |_| thread::allowed_cpus())
        });
        assert!(within.iter().all(|cpus| cpus.len() == 1), "{within:?}");
        assert_eq!(within[0], within[1]);
        assert_eq!(thread::allowed_cpus(), before);
    }

    #[test]
    fn pools_and_panics_work_as_outside() {
        for seed in 0..20 {
            run("test", seed, &Clock::manual(0), || {
                let pool = thread::Pool::start("pool", 2).unwrap();
                let mut items = vec![0; 10];
                pool.run(&mut items, &|item| *item += 1, None);
                assert_eq!(items, [1; 10]);
                let panicked = thread::spawn("unlucky", || panic!("on purpose")).unwrap();
                assert!(panicked.join().is_err());
            });
        }
    }
}

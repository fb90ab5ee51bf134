//! Threads and CPU topology.

mod growing;

use crate::sync::{Condvar, Mutex, MutexGuard, rank};
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread::Builder;

pub use growing::{GrowingPool, Line, Needs};

/// A started thread.
#[derive(Debug)]
pub struct JoinHandle {
    thread: std::thread::JoinHandle<()>,
    /// Its number in the caller's world, when that runs under the seeded scheduler.
    #[cfg(feature = "simulate")]
    task: Option<usize>,
}

/// Which thread a handle is of.
#[derive(Clone, Copy, Debug)]
pub struct Id(std::thread::ThreadId);

impl Id {
    /// The caller's.
    pub fn current() -> Id {
        Id(std::thread::current().id())
    }

    /// The caller is that thread, and must not wait for it.
    pub fn is_ours(self) -> bool {
        self.0 == std::thread::current().id()
    }
}

impl JoinHandle {
    pub fn id(&self) -> Id {
        Id(self.thread.thread().id())
    }

    /// The caller is that thread, and must not wait for it.
    pub fn is_ours(&self) -> bool {
        self.id().is_ours()
    }

    /// Nothing has to be waited for.
    fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the thread's end; its panic is the error.
    pub fn join(self) -> std::thread::Result<()> {
        #[cfg(feature = "simulate")]
        if let Some(task) = self.task {
            crate::sched::join(task);
        }
        self.thread.join()
    }

    /// The same of a thread that does not panic; returns at once if the caller is that thread, which ends by itself then.
    pub fn join_unless_it_is_ours(self) {
        if !self.is_ours() {
            let ended = self.join();
            debug_assert!(ended.is_ok());
        }
    }
}

/// Number of CPUs this process may run on; at least 1. The seeded scheduler's tasks are told a number that does not
/// depend on the machine.
pub fn cpu_count() -> usize {
    #[cfg(feature = "simulate")]
    if crate::sched::active() {
        return crate::sched::CPUS;
    }
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The CPUs that the calling thread may run on; `None` where the system does not say.
fn allowed() -> Option<libc::cpu_set_t> {
    // SAFETY: an all-zero set is a valid value of that plain structure.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one set of this size, which `set` is.
    let done = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    (done == 0).then_some(set)
}

/// The calling thread may run on these CPUs from now on, and what it starts.
fn allow(set: &libc::cpu_set_t) -> std::io::Result<()> {
    // SAFETY: the call reads one set of this size, which `set` is.
    let done = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) };
    match done {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The CPUs that the calling thread may run on, by their numbers; none where the system does not say.
pub fn allowed_cpus() -> Vec<usize> {
    let count = 8 * size_of::<libc::cpu_set_t>();
    allowed().map_or_else(Vec::new, |set| {
        // SAFETY: the numbers are within the set.
        (0..count)
            .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
            .collect()
    })
}

/// Keeps the calling thread on a CPU from now on. Threads under the seeded scheduler stay where they are.
///
/// # Errors
/// There is no such CPU, or it is not for this process.
pub fn pin(cpu: usize) -> std::io::Result<()> {
    #[cfg(feature = "simulate")]
    if crate::sched::active() {
        return Ok(());
    }
    if cpu >= 8 * size_of::<libc::cpu_set_t>() {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: an all-zero set is a valid value of that plain structure.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the number is within the set, as was just looked at.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    allow(&set)
}

/// Keeps the calling thread, and those that it starts, on one CPU until this is dropped: for threads of
/// which one goes on at a time, which another CPU would only keep waiting. The CPU is the one of the
/// allowed ones with the fewest of these in this process, the caller's own if that is one of them.
/// Where the system does not let threads be kept, nothing happens.
#[cfg(feature = "simulate")]
pub(crate) struct OneCpu {
    cpu: usize,
    before: libc::cpu_set_t,
}

/// The CPUs of all [`OneCpu`]s.
#[cfg(feature = "simulate")]
static KEPT: parking_lot::Mutex<Vec<usize>> = parking_lot::Mutex::new(Vec::new());

#[cfg(feature = "simulate")]
impl OneCpu {
    pub(crate) fn keep() -> Option<OneCpu> {
        let before = allowed()?;
        // SAFETY: the call has no preconditions; -1 is no CPU's number.
        let own = unsafe { libc::sched_getcpu() };
        let mut kept = KEPT.lock();
        let load = |cpu: usize| kept.iter().filter(|other| **other == cpu).count();
        let cpus = allowed_cpus().into_iter();
        let cpu = cpus.min_by_key(|&cpu| (load(cpu), cpu as i32 != own))?;
        pin(cpu).ok()?;
        kept.push(cpu);
        Some(OneCpu { cpu, before })
    }
}

#[cfg(feature = "simulate")]
impl Drop for OneCpu {
    fn drop(&mut self) {
        let mut kept = KEPT.lock();
        if let Some(at) = kept.iter().position(|cpu| *cpu == self.cpu) {
            kept.swap_remove(at);
        }
        // What was allowed before is allowed still, unless an administrator meddles: then it stays.
        let _ = allow(&self.before);
    }
}

/// The NUMA node that a CPU belongs to, where the system says.
pub fn numa_node(cpu: usize) -> Option<usize> {
    let entries = std::fs::read_dir(format!("/sys/devices/system/cpu/cpu{cpu}")).ok()?;
    let node = |name: &str| name.strip_prefix("node")?.parse().ok();
    let names = entries.flatten().map(|entry| entry.file_name());
    names.filter_map(|name| node(name.to_str()?)).next()
}

/// The CPU the caller runs on, or did a moment ago; a hint, for choosing per-core structures.
#[inline]
pub fn current_cpu() -> usize {
    #[cfg(feature = "simulate")]
    if let Some(task) = crate::sched::task() {
        return task;
    }
    #[cfg(feature = "trace")]
    if let Some(cpu) = crate::trace::cpu() {
        return cpu;
    }
    let (cpu, good_for) = CPU.get();
    match good_for {
        0 => ask_cpu(),
        _ => {
            CPU.set((cpu, good_for - 1));
            cpu as usize
        }
    }
}

/// So often it is told again before the system is asked again: threads move seldom.
const CPU_GOOD_FOR: u32 = 31;

#[cold]
fn ask_cpu() -> usize {
    // SAFETY: sched_getcpu takes no arguments and touches no memory of ours.
    let cpu = unsafe { libc::sched_getcpu() }.max(0);
    CPU.set((cpu as u32, CPU_GOOD_FOR));
    cpu as usize
}

thread_local! {
    /// The CPU that the thread was found on, and how often that is told still.
    static CPU: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
    /// The thread's lane and one; 0: it has none yet.
    static LANE: Cell<u32> = const { Cell::new(0) };
    static LEASE: Lease = Lease::take();
}

/// Lanes that ended threads gave back, and the first that nobody had.
static LANES: parking_lot::Mutex<(Vec<u32>, u32)> = parking_lot::Mutex::new((Vec::new(), 0));

/// A lane as long as its thread lives.
struct Lease(u32);

impl Lease {
    fn take() -> Lease {
        let (free, next) = &mut *LANES.lock();
        // The least: parts there are for low ones.
        let least = (0..free.len()).min_by_key(|i| free[*i]);
        Lease(match least {
            Some(least) => free.swap_remove(least),
            None => {
                *next += 1;
                *next - 1
            }
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Before another thread may have it.
        LANE.set(NO_LANE + 1);
        LANES.lock().0.push(self.0);
    }
}

/// Of threads that are about to end, all together. Where lanes share parts it is as the first one.
const NO_LANE: u32 = 0xFFFF << 16;

/// A small number that no other running thread has, for structures with a part for each: as good as
/// [`current_cpu`] where threads stay on their cores, and cheaper. Threads that are about to end share one that is not small. In
/// builds that record a thread has that of the core for which it is recorded, and another one may have it, too.
#[inline]
pub fn lane() -> usize {
    #[cfg(feature = "simulate")]
    if let Some(task) = crate::sched::task() {
        return task;
    }
    #[cfg(feature = "trace")]
    if let Some(cpu) = crate::trace::cpu() {
        return cpu;
    }
    match LANE.get() {
        0 => new_lane(),
        lane => lane as usize - 1,
    }
}

#[cold]
fn new_lane() -> usize {
    let lane = LEASE.try_with(|lease| lease.0).unwrap_or(NO_LANE);
    LANE.set(lane + 1);
    lane as usize
}

/// Bytes of a thread's stack, whatever the variable `RUST_MIN_STACK` of the environment says: the standard library's default.
const STACK: usize = 2 << 20;

/// Starts a named thread. Failing to start one is an environment error the caller reports.
pub fn spawn<F>(name: &str, body: F) -> std::io::Result<JoinHandle>
where
    F: FnOnce() + Send + 'static,
{
    let heir = Heir::of_caller(name);
    #[cfg(feature = "simulate")]
    let task = heir.task();
    let thread = Builder::new().name(name.to_owned()).stack_size(STACK);
    let thread = thread.spawn(move || heir.live(body))?;
    Ok(JoinHandle {
        thread,
        #[cfg(feature = "simulate")]
        task,
    })
}

/// [`try_parallel`] for who cannot do without the threads.
///
/// # Panics
/// Without any of them; or as a worker does.
pub fn parallel<T: Send>(workers: usize, worker: impl Fn(usize) -> T + Sync) -> Vec<T> {
    try_parallel(workers, worker).unwrap_or_else(|error| panic!("cannot start a thread: {error}"))
}

/// Runs `worker(i)` for `i` in `0..workers` at once and returns the results in order.
/// With one worker the caller's own thread does the work. They may wait for each other: none begins before all threads are there.
///
/// # Errors
/// A thread cannot be started; then no worker has run, but under the scheduler, where none waits for the others to be there.
///
/// # Panics
/// As a worker does.
pub fn try_parallel<T: Send>(
    workers: usize,
    worker: impl Fn(usize) -> T + Sync,
) -> std::io::Result<Vec<T>> {
    parallel_on(|_| STACK, workers, worker)
}

fn parallel_on<T: Send>(
    stack: impl Fn(usize) -> usize,
    workers: usize,
    worker: impl Fn(usize) -> T + Sync,
) -> std::io::Result<Vec<T>> {
    if workers <= 1 {
        return Ok(vec![worker(0)]);
    }
    // Under the scheduler threads are started in any case, and wait by it alone.
    let all_there = OnceLock::new();
    let begins = || is_scheduled() || *all_there.wait();
    let (worker, begins) = (&worker, &begins);
    std::thread::scope(|scope| {
        let start = |i| {
            let heir = Heir::of_caller("parallel");
            #[cfg(feature = "simulate")]
            let task = heir.task();
            let thread = Builder::new().stack_size(stack(i));
            let body = move || heir.live(|| begins().then(|| worker(i)));
            let handle = thread.spawn_scoped(scope, body)?;
            #[cfg(feature = "simulate")]
            return std::io::Result::Ok((task, handle));
            #[cfg(not(feature = "simulate"))]
            std::io::Result::Ok(handle)
        };
        let mut handles = Vec::with_capacity(workers);
        let started = (0..workers).try_for_each(|i| {
            handles.push(start(i)?);
            Ok(())
        });
        let _ = all_there.set(started.is_ok());
        // Under the scheduler the caller keeps its turn while it waits for a thread's real
        // end: first all of them must be done.
        #[cfg(feature = "simulate")]
        let handles = {
            let tasks = handles.iter().filter_map(|(task, _)| *task);
            tasks.for_each(crate::sched::join);
            handles.into_iter().map(|(_, handle)| handle)
        };
        let end = |handle: std::thread::ScopedJoinHandle<'_, Option<T>>| {
            handle
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let ended = handles.into_iter().filter_map(end).collect();
        started.map(|()| ended)
    })
}

/// What a new thread takes over from the one that starts it; nothing outside simulation.
struct Heir {
    #[cfg(feature = "simulate")]
    canary: Option<crate::canary::Canary>,
    #[cfg(feature = "simulate")]
    tight: bool,
    #[cfg(feature = "simulate")]
    birth: Option<crate::sched::Birth>,
}

impl Heir {
    fn of_caller(_name: &str) -> Heir {
        Heir {
            #[cfg(feature = "simulate")]
            canary: crate::canary::current(),
            #[cfg(feature = "simulate")]
            tight: crate::tight::current(),
            #[cfg(feature = "simulate")]
            birth: crate::sched::announce(_name),
        }
    }

    #[cfg(feature = "simulate")]
    fn task(&self) -> Option<usize> {
        self.birth.as_ref().map(|birth| birth.id())
    }

    /// Runs the new thread's body.
    fn live<T>(self, body: impl FnOnce() -> T) -> T {
        #[cfg(feature = "simulate")]
        {
            crate::canary::plant(self.canary);
            crate::tight::set(self.tight);
            if let Some(birth) = self.birth {
                let done = birth.live(body);
                // What is left of the thread runs beside tasks, whose numbers are lanes.
                LANE.set(NO_LANE + 1);
                return done;
            }
        }
        body()
    }
}

/// One turn of a loop that waits for another thread for microseconds: spins at first, then yields.
/// `spins` starts at 0.
pub fn spin(spins: &mut u32) {
    *spins += 1;
    if *spins < 100 {
        std::hint::spin_loop();
    } else {
        yield_now();
    }
}

/// Tells the processor that the caller looks at memory again and again.
#[inline]
pub fn relax() {
    std::hint::spin_loop();
}

/// Whether the calling thread runs under the seeded scheduler, where nobody may wait for time to pass but by it.
#[inline]
pub fn is_scheduled() -> bool {
    #[cfg(feature = "simulate")]
    return crate::sched::active();
    #[cfg(not(feature = "simulate"))]
    false
}

/// The calling thread is unwinding from a panic.
pub fn panicking() -> bool {
    std::thread::panicking()
}

/// Lets other runnable threads go first.
pub fn yield_now() {
    #[cfg(feature = "simulate")]
    if crate::sched::yield_now() {
        return;
    }
    std::thread::yield_now();
}

/// Most jobs a pool keeps waiting; beyond that callers do their work themselves.
const POOL_QUEUE_MAX: usize = 1024;

/// One item of a batch, or something by itself, as a pool's worker sees it.
struct Job {
    /// Calls the batch's closure on the item. See `Pool::run` for why the lifetime holds.
    body: Box<dyn FnOnce() + Send>,
    batch: Option<Arc<Batch>>,
}

/// Counts a batch's unfinished jobs.
struct Batch {
    state: Mutex<BatchState>,
    ended: Condvar,
}

struct BatchState {
    left: usize,
    panicked: bool,
}

struct PoolQueue {
    jobs: VecDeque<Job>,
    /// Threads that are at a job.
    busy: usize,
    closing: bool,
}

impl PoolQueue {
    fn is_idle(&self) -> bool {
        self.busy == 0 && self.jobs.is_empty()
    }
}

struct PoolShared {
    queue: Mutex<PoolQueue>,
    wake: Condvar,
    /// No thread is at a job, and none waits.
    idle: Condvar,
}

/// A fixed set of threads that run batches of borrowed work. Dropping it ends the threads.
pub struct Pool {
    shared: Arc<PoolShared>,
    workers: Vec<JoinHandle>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("workers", &self.workers.len())
            .finish()
    }
}

impl Pool {
    /// Starts `workers` threads named `name`.
    pub fn start(name: &str, workers: usize) -> std::io::Result<Pool> {
        let queue = PoolQueue {
            jobs: VecDeque::new(),
            busy: 0,
            closing: false,
        };
        let mut pool = Pool {
            shared: Arc::new(PoolShared {
                queue: Mutex::new(rank::LEAF, queue),
                wake: Condvar::new(),
                idle: Condvar::new(),
            }),
            workers: Vec::new(),
        };
        for _ in 0..workers {
            let shared = Arc::clone(&pool.shared);
            pool.workers.push(spawn(name, move || shared.work())?);
        }
        Ok(pool)
    }

    /// Has one of the pool's threads do something some time. Callers see to it that they do not give without bound. A panic
    /// in it ends nothing else.
    pub fn give(&self, body: impl FnOnce() + Send + 'static) {
        self.shared.queue.lock().jobs.push_back(Job {
            body: Box::new(body),
            batch: None,
        });
        self.shared.wake.notify_one();
    }

    /// Waits until all that was given has been done. Not for a job of the pool itself.
    pub fn finish(&self) {
        let mut queue = self.shared.queue.lock();
        while !queue.is_idle() {
            self.shared.idle.wait(&mut queue);
        }
    }

    /// Calls `body` once for each item, on the pool's threads and, after `meanwhile` has
    /// returned, on the caller's; returns when all calls have. A panic in one is passed on.
    pub fn run<T: Send>(
        &self,
        items: &mut [T],
        body: &(dyn Fn(&mut T) + Sync),
        meanwhile: Option<&mut dyn FnMut()>,
    ) {
        let batch = Arc::new(Batch {
            state: Mutex::new(
                rank::LEAF,
                BatchState {
                    left: 0,
                    panicked: false,
                },
            ),
            ended: Condvar::new(),
        });
        // From here on jobs may be queued that borrow `items` and `body`: the guard waits for
        // all of them before this call returns or unwinds.
        let guard = BatchGuard {
            shared: &self.shared,
            batch: &batch,
        };
        for item in items {
            let call: Box<dyn FnOnce() + Send + '_> = Box::new(move || body(item));
            // SAFETY: only the lifetime changes. The job runs before `guard` is dropped, which
            // is before the borrows of `items` and `body` end; each item has one job.
            let call: Box<dyn FnOnce() + Send + 'static> = unsafe { std::mem::transmute(call) };
            batch.state.lock().left += 1;
            let job = Job {
                body: call,
                batch: Some(Arc::clone(&batch)),
            };
            if let Some(refused) = self.shared.push(job) {
                refused.perform();
            }
        }
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        drop(guard);
        let panicked = batch.state.lock().panicked;
        assert!(!panicked, "a pool job panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.queue.lock().closing = true;
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A job's panic was caught and passed to its batch, so the thread itself ends well. What a job had may have been
            // the last that kept the pool.
            worker.join_unless_it_is_ours();
        }
    }
}

impl PoolShared {
    /// Queues a job, or gives it back when the queue is full.
    fn push(&self, job: Job) -> Option<Job> {
        let mut queue = self.queue.lock();
        if queue.jobs.len() >= POOL_QUEUE_MAX {
            return Some(job);
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.wake.notify_one();
        None
    }

    /// The next queued job of a batch.
    fn take_of(&self, batch: &Batch) -> Option<Job> {
        let mut queue = self.queue.lock();
        let own = |job: &Job| job.batch.as_deref().is_some_and(|b| std::ptr::eq(b, batch));
        let at = queue.jobs.iter().position(own)?;
        let job = queue.jobs.remove(at);
        self.tell_if_idle(queue);
        job
    }

    /// After whatever may have been what [`Pool::finish`] waits for.
    fn tell_if_idle(&self, queue: MutexGuard<'_, PoolQueue>) {
        if queue.is_idle() {
            drop(queue);
            self.idle.notify_all();
        }
    }

    fn work(&self) {
        loop {
            let mut queue = self.queue.lock();
            let job = loop {
                match queue.jobs.pop_front() {
                    Some(job) => break job,
                    None if queue.closing => return,
                    None => self.wake.wait(&mut queue),
                }
            };
            queue.busy += 1;
            drop(queue);
            job.perform();
            let mut queue = self.queue.lock();
            queue.busy -= 1;
            self.tell_if_idle(queue);
        }
    }
}

impl Job {
    fn perform(self) {
        let Job { body, batch } = self;
        let outcome = catch_unwind(AssertUnwindSafe(body));
        let Some(batch) = batch else {
            // The panic has been reported.
            return;
        };
        let mut state = batch.state.lock();
        state.left -= 1;
        state.panicked |= outcome.is_err();
        if state.left == 0 {
            batch.ended.notify_all();
        }
    }
}

/// Waits for all jobs of a batch when dropped, doing those still queued meanwhile. Not those of
/// other batches: they may wait for what the caller does.
struct BatchGuard<'a> {
    shared: &'a PoolShared,
    batch: &'a Batch,
}

impl Drop for BatchGuard<'_> {
    fn drop(&mut self) {
        while self.batch.state.lock().left > 0 {
            match self.shared.take_of(self.batch) {
                Some(job) => job.perform(),
                None => break,
            }
        }
        let mut state = self.batch.state.lock();
        while state.left > 0 {
            self.batch.ended.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_pinned_thread_stays_on_its_cpu() {
        let cpus = allowed_cpus();
        // A quota may allow fewer at a time.
        assert!(cpus.len() >= cpu_count());
        let last = cpus[cpus.len() - 1];
        let pinned = spawn("pinned", move || {
            pin(last).unwrap();
            assert_eq!(allowed_cpus(), [last]);
            assert!(pin(usize::MAX).is_err());
        });
        pinned.unwrap().join().unwrap();
        assert_eq!(allowed_cpus(), cpus);
    }

    /// Those that were there waited for the others, and the caller for them.
    #[test]
    fn threads_of_which_one_cannot_be_started_do_nothing() {
        let stack = |i| [STACK, STACK, 1 << 62, STACK][i];
        let failed = parallel_on(stack, 4, |i| panic!("worker {i} runs"));
        assert!(failed.is_err_and(|error: std::io::Error| error.raw_os_error().is_some()));
        let meeting = std::sync::Barrier::new(4);
        let met = try_parallel(4, |i| {
            meeting.wait();
            i
        });
        assert_eq!(met.unwrap(), [0, 1, 2, 3]);
    }

    /// A small number there had each of them end the process at its first deep call.
    #[test]
    fn no_variable_of_the_environment_makes_stacks_small() {
        const MARK: &str = "SHEAF_TEST_SMALL_STACKS";
        if std::env::var_os(MARK).is_none() {
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            again.args(["--test-threads=1", "--exact"]);
            again.arg("thread::tests::no_variable_of_the_environment_makes_stacks_small");
            again.env(MARK, "").env("RUST_MIN_STACK", "524288");
            let ran = again.output().unwrap();
            assert!(ran.status.success(), "{ran:?}");
            return;
        }
        // Not the caller's own frame, which has a small stack.
        #[inline(never)]
        fn deep() {
            std::hint::black_box([0u8; 1 << 20]);
        }
        spawn("deep", deep).unwrap().join().unwrap();
        parallel(2, |_| deep());
    }

    #[test]
    fn a_pool_does_every_item_once_however_many_there_are() {
        for workers in [0, 1, 4] {
            let pool = Pool::start("test", workers).unwrap();
            let mut items = vec![0u32; 3 * POOL_QUEUE_MAX];
            let mut between = 0;
            pool.run(&mut items, &|item| *item += 1, Some(&mut || between += 1));
            assert!(items.iter().all(|&i| i == 1));
            assert_eq!(between, 1);
            pool.run(&mut [0u8; 0], &|_| {}, None);
        }
    }

    /// A checkpoint that waits for its own parts must not begin somebody else's, which may wait
    /// for that checkpoint.
    #[test]
    fn whoever_waits_for_a_batch_does_no_job_of_another() {
        let pool = Pool::start("test", 1).unwrap();
        let (blocked, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        parallel(2, |caller| {
            let me = std::thread::current().id();
            if caller == 0 {
                // Two block the pool's thread and this one, the third stays queued.
                let body = |item: &mut usize| {
                    blocked.fetch_add(1, Ordering::SeqCst);
                    while done.load(Ordering::SeqCst) == 0 {
                        yield_now();
                    }
                    *item = 1;
                };
                let mut items = [0; 3];
                pool.run(&mut items, &body, None);
                assert_eq!(items, [1; 3]);
                return;
            }
            while blocked.load(Ordering::SeqCst) < 2 {
                yield_now();
            }
            let mut ids = [None; 3];
            let body = |id: &mut Option<_>| *id = Some(std::thread::current().id());
            pool.run(&mut ids, &body, None);
            assert_eq!(ids, [Some(me); 3]);
            assert_eq!(blocked.load(Ordering::SeqCst), 2);
            done.store(1, Ordering::SeqCst);
        });
    }

    #[test]
    fn batches_of_several_threads_and_nested_ones_share_a_pool() {
        let pool = Pool::start("test", 2).unwrap();
        let done = AtomicUsize::new(0);
        parallel(4, |_| {
            for _ in 0..100 {
                let body = |_: &mut u8| {
                    done.fetch_add(1, Ordering::Relaxed);
                };
                let mut inner = || pool.run(&mut [0u8; 5], &body, None);
                pool.run(&mut [0u8; 7], &body, Some(&mut inner));
            }
        });
        assert_eq!(done.into_inner(), 4 * 100 * 12);
    }

    #[test]
    fn a_pool_that_has_finished_has_done_all_that_was_given() {
        let pool = Pool::start("test", 2).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        for round in 1..50 {
            for _ in 0..20 {
                let done = Arc::clone(&done);
                pool.give(move || {
                    yield_now();
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
            pool.finish();
            assert_eq!(done.load(Ordering::Relaxed), 20 * round);
        }
    }

    /// Whoever ran the batch took the last job, and told nobody that there was none any more.
    #[test]
    fn whoever_waits_for_a_pool_is_told_when_a_caller_does_the_last_job() {
        let pool = Pool::start("test", 0).unwrap();
        for _ in 0..20 {
            let (waits, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
            parallel(2, |caller| {
                let until = |count: &AtomicUsize| {
                    let mut turns = 0;
                    while count.load(Ordering::SeqCst) == 0 && turns < 1_000_000 {
                        yield_now();
                        turns += 1;
                    }
                };
                if caller == 1 {
                    until(&waits);
                    waits.store(2, Ordering::SeqCst);
                    pool.finish();
                    finished.store(1, Ordering::SeqCst);
                    return;
                }
                let mut meanwhile = || {
                    waits.store(1, Ordering::SeqCst);
                    while waits.load(Ordering::SeqCst) == 1 {
                        yield_now();
                    }
                    // It cannot be seen whether a thread waits.
                    (0..1000).for_each(|_| yield_now());
                };
                pool.run(&mut [0u8; 3], &|_| {}, Some(&mut meanwhile));
                until(&finished);
                let told = finished.load(Ordering::SeqCst);
                // Else the other one would have no end.
                pool.shared.idle.notify_all();
                assert_eq!(told, 1);
            });
        }
    }

    #[test]
    fn a_panic_in_a_job_reaches_the_caller_after_all_jobs_have_ended() {
        let pool = Pool::start("test", 2).unwrap();
        let done = AtomicUsize::new(0);
        let mut items = [0, 1, 2, 3, 4, 5];
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(
                &mut items,
                &|item| {
                    assert_ne!(*item, 3);
                    done.fetch_add(1, Ordering::Relaxed);
                },
                None,
            );
        }));
        assert!(outcome.is_err());
        assert_eq!(done.load(Ordering::Relaxed), 5);
        // The pool works on.
        pool.run(&mut items, &|item| *item = 0, None);
        assert_eq!(items, [0; 6]);
    }
}

//! One timed window: threads prepare, start together, repeat an operation until time is up
//! or there is nothing left to do, and are counted.
//!
//! 1. No operation is counted that began before all threads were ready, or outside of its
//!    thread's own time.
//! 2. A window ends when its time is over, when the first thread has used up its share of
//!    what was prepared or of the operations, when one fails, and when the user interrupts; all
//!    threads then stop after the operation they are in. Each does one at least, however short
//!    the window.
//! 3. A file system that is full is no such end, but an error: what was measured until then was done with little room left.
//! 4. Throughput is the sum of all operations over the mean of the threads' times, as FxMark
//!    has it.
//! 5. What an operation costs all in is the time from the start, with all threads ready, to the
//!    end of the sync that follows the last operation, over the sum of all operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::clock::Clock;
use base::sync::{Condvar, Mutex, rank};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use serde_json::{Map, Value};

use crate::contract::Spread;
use crate::meter::{Mark, Meter, Span};
use crate::{Error, interrupt};

/// How often the conductor looks for a signal.
const LOOK: Duration = Duration::from_millis(10);

/// What a thread repeats: returns how many operations it did, 0 when nothing is left.
pub type Operation<'a> = Box<dyn FnMut() -> Result<u64, Error> + Send + 'a>;

/// Tells a thread that it shall come to an end.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// An error when preparations shall not go on.
    pub fn check(&self) -> Result<(), Error> {
        match self.is_set() || interrupt::requested() {
            true => Err(Error::Interrupted),
            false => Ok(()),
        }
    }
}

/// How long, by how many threads, and where.
#[derive(Clone, Debug)]
pub struct Window {
    pub time: Duration,
    pub threads: usize,
    /// The first thread that has done so many ends the window.
    pub operations: u64,
    /// Thread `i` runs on CPU `i` of these alone, counting round; empty: wherever it likes.
    pub cpus: Vec<usize>,
}

/// What one thread did in its own time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Own {
    pub operations: u64,
    pub seconds: f64,
}

impl Own {
    /// Operations in a second.
    pub fn rate(&self) -> f64 {
        self.operations as f64 / self.seconds.max(1e-9)
    }
}

/// What one window measured.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    pub operations: u64,
    /// Mean of the threads' times.
    pub seconds: f64,
    /// Of the first thread, and of the last.
    pub first: Own,
    pub last: Own,
    pub cpu_seconds: f64,
    /// The window ended early because nothing was left to do.
    pub used_up: bool,
    /// When it started.
    pub start: Mark,
    /// From the start until the last thread was done.
    pub ended: Span,
    /// From the start until everything was at the devices.
    pub synced: Span,
    /// Until the last thread was done; of Sheaf in this process only.
    pub background: Option<Background>,
    /// Likewise, of whatever is counted.
    pub counts: Counts,
}

/// What was counted so far, or between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of this process's threads.
    pub instructions: Option<u64>,
    /// Calls that they made of the kernel.
    pub calls: Option<u64>,
    /// Requests that Sheaf made of devices.
    pub requests: Option<u64>,
}

impl Counts {
    fn since(self, then: Counts) -> Counts {
        let since = |now: Option<u64>, then: Option<u64>| Some(now?.saturating_sub(then?));
        Counts {
            instructions: since(self.instructions, then.instructions),
            calls: since(self.calls, then.calls),
            requests: since(self.requests, then.requests),
        }
    }
}

impl Measured {
    /// Operations in a second.
    pub fn rate(&self) -> f64 {
        self.operations as f64 / self.seconds.max(1e-9)
    }

    /// Of a load that never ends by itself: an error if it did.
    pub fn whole(self) -> Result<Measured, Error> {
        match self.used_up {
            false => Ok(self),
            true => Err(Error::Unable(
                "there was nothing left to do before the time was over".to_owned(),
            )),
        }
    }

    /// How long the windows of a row were, into it: the median.
    pub fn put_seconds(extra: &mut Map<String, Value>, windows: &[Measured]) {
        let seconds = Spread::of(windows.iter().map(|window| window.seconds));
        let seconds = (seconds.median * 1e6).round() / 1e6;
        extra.insert("window_s".to_owned(), Value::from(seconds));
    }

    /// CPU time of an operation in microseconds.
    pub fn cpu_us(&self) -> f64 {
        self.cpu_seconds * 1e6 / self.operations.max(1) as f64
    }
}

/// What a file system did besides what was asked of it, or has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Background {
    /// Batches written to the journal.
    pub commits: u64,
    /// Syncs of a file that needed one. To overwrites only times that are due for it do that.
    pub sync_commits: u64,
    /// That ended.
    pub checkpoints: u64,
    /// Of the batches, with their headers and padding.
    pub logged_bytes: u64,
    /// For how long operations were slowed down, or waited, because of a checkpoint: the sum.
    pub waited_ns: u64,
}

impl Background {
    fn since(self, then: Background) -> Background {
        Background {
            commits: self.commits - then.commits,
            sync_commits: self.sync_commits - then.sync_commits,
            checkpoints: self.checkpoints - then.checkpoints,
            logged_bytes: self.logged_bytes - then.logged_bytes,
            waited_ns: self.waited_ns - then.waited_ns,
        }
    }

    /// Medians of windows that have it, into a row.
    pub fn put(extra: &mut Map<String, Value>, windows: &[Measured]) {
        let all: Option<Vec<Background>> = windows.iter().map(|window| window.background).collect();
        let Some(all) = all.filter(|all| !all.is_empty()) else {
            return;
        };
        let mut put = |key: &str, get: fn(&Background) -> u64| {
            let median = Spread::of(all.iter().map(|one| get(one) as f64)).median;
            extra.insert(key.to_owned(), Value::from(median));
        };
        put("commits", |one| one.commits);
        put("sync_commits", |one| one.sync_commits);
        put("checkpoints", |one| one.checkpoints);
        let operations = windows.iter().map(|window| window.operations.max(1) as f64);
        let logged = all.iter().zip(operations);
        let logged = Spread::of(logged.map(|(one, count)| one.logged_bytes as f64 / count));
        let logged = (logged.median * 1e3).round() / 1e3;
        extra.insert("logged_bytes_per_op".to_owned(), Value::from(logged));
    }
}

/// What a window is about.
pub trait Load: Sync {
    /// Prepares one thread, on that thread, and returns what it shall repeat.
    fn prepare(&self, thread: usize, stop: &Stop) -> Result<Operation<'_>, Error>;
    /// Brings everything done so far to the devices: once all threads are ready, before the first
    /// operation, and after the last.
    fn settle(&self) -> Result<(), Error>;
    /// CPU time used so far for the operations, in nanoseconds.
    fn cpu_ns(&self) -> Result<u64, Error>;
    /// What was done so far besides, where that is known.
    fn background(&self) -> Option<Background> {
        None
    }
    /// What was counted so far.
    fn counts(&self) -> Counts {
        Counts::default()
    }
}

/// CPUs that the calling thread may run on.
pub fn allowed_cpus() -> Result<Vec<usize>, Error> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect())
}

/// Has the calling thread, and those it starts from now on, run on these CPUs.
pub fn pin(cpus: &[usize]) -> Result<(), Error> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu);
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// Runs one window.
pub fn measure(window: &Window, load: &dyn Load, meter: &Meter) -> Result<Measured, Error> {
    let gate = Gate {
        meter,
        stop: Stop::default(),
        state: Mutex::new(rank::LEAF, State::default()),
        changed: Condvar::new(),
        clock: Clock::real(),
    };
    let results = base::thread::try_parallel(window.threads + 1, |i| match i {
        0 => gate
            .conduct(window, load)
            .map(|whole| Part::Conductor(Box::new(whole))),
        i => gate.perform(window, load, i - 1).map(Part::Thread),
    });
    gather(results.map_err(Error::threads)?, window.threads)
}

/// What a window that filled its file system ends with.
fn no_space(error: &Error) -> Error {
    Error::Unable(format!(
        "the file system became full before the window was over ({error}): give more (--size, --dir, --device), or want less \
         (--seconds, --pool)"
    ))
}

struct Share {
    operations: u64,
    ns: u64,
    used_up: bool,
}

struct Whole {
    cpu_ns: u64,
    start: Mark,
    ended: Span,
    synced: Span,
    background: Option<Background>,
    counts: Counts,
}

enum Part {
    Conductor(Box<Whole>),
    Thread(Share),
}

/// Adds up; of several errors the one that is not a consequence.
fn gather(results: Vec<Result<Part, Error>>, threads: usize) -> Result<Measured, Error> {
    let (mut operations, mut ns, mut used_up) = (0, 0, false);
    let mut each = Vec::new();
    let (mut whole, mut failure) = (None, None);
    for result in results {
        match result {
            Ok(Part::Conductor(conductor)) => whole = Some(conductor),
            Ok(Part::Thread(share)) => {
                operations += share.operations;
                ns += share.ns;
                each.push(Own {
                    operations: share.operations,
                    seconds: share.ns as f64 / 1e9,
                });
                used_up |= share.used_up;
            }
            Err(Error::Interrupted) => {
                failure.get_or_insert(Error::Interrupted);
            }
            Err(error) => failure = Some(error),
        }
    }
    if let Some(error) = failure {
        return Err(error);
    }
    let whole = whole.expect("a conductor without an error has measured");
    Ok(Measured {
        operations,
        seconds: ns as f64 / 1e9 / threads as f64,
        first: each.first().copied().unwrap_or_default(),
        last: each.last().copied().unwrap_or_default(),
        cpu_seconds: whole.cpu_ns as f64 / 1e9,
        used_up,
        start: whole.start,
        ended: whole.ended,
        synced: whole.synced,
        background: whole.background,
        counts: whole.counts,
    })
}

#[derive(Debug, Default)]
struct State {
    ready: usize,
    started: bool,
    ended: usize,
}

struct Gate<'a> {
    meter: &'a Meter,
    stop: Stop,
    state: Mutex<State>,
    changed: Condvar,
    clock: Clock,
}

impl Gate<'_> {
    fn perform(&self, window: &Window, load: &dyn Load, thread: usize) -> Result<Share, Error> {
        let ending = Ending(self);
        let share = self.operate(window, load, thread);
        if share.is_err() {
            self.stop.set();
        }
        drop(ending);
        share
    }

    fn operate(&self, window: &Window, load: &dyn Load, thread: usize) -> Result<Share, Error> {
        if !window.cpus.is_empty() {
            pin(&[window.cpus[thread % window.cpus.len()]])?;
        }
        let mut operation = load.prepare(thread, &self.stop)?;
        self.wait_for_start();
        let mut share = Share {
            operations: 0,
            ns: 0,
            used_up: false,
        };
        let start = self.clock.monotonic_ns();
        loop {
            match operation() {
                Ok(0) => share.used_up = true,
                Ok(count) => share.operations += count,
                Err(error) if error.is_no_space() => return Err(no_space(&error)),
                Err(error) => return Err(error),
            }
            if share.used_up || share.operations >= window.operations {
                self.stop.set();
            }
            if self.stop.is_set() {
                break;
            }
        }
        share.ns = self.clock.monotonic_ns() - start;
        Ok(share)
    }

    fn wait_for_start(&self) {
        let mut state = self.state.lock();
        state.ready += 1;
        self.changed.notify_all();
        while !state.started {
            self.changed.wait(&mut state);
        }
    }

    /// Starts the threads, stops them in time, and measures what all of them did.
    fn conduct(&self, window: &Window, load: &dyn Load) -> Result<Whole, Error> {
        let release = Release(self);
        let threads = window.threads;
        self.wait_until(None, |state| state.ready + state.ended >= threads);
        interrupt::check()?;
        load.settle()?;
        let before = load.cpu_ns()?;
        let background = load.background();
        let counts = load.counts();
        let start = self.meter.mark()?;
        let end = self.clock.monotonic_ns() + window.time.as_nanos() as u64;
        self.start();
        self.wait_until(Some(end), |state| state.ended >= threads);
        drop(release);
        self.wait_until(None, |state| state.ended >= threads);
        interrupt::check()?;
        let cpu_ns = load.cpu_ns()?.saturating_sub(before);
        let ended = self.meter.since(start)?;
        let counts = load.counts().since(counts);
        let now = load.background();
        load.settle()?;
        Ok(Whole {
            cpu_ns,
            start,
            ended,
            synced: self.meter.since(start)?,
            background: now.zip(background).map(|(now, then)| now.since(then)),
            counts,
        })
    }

    fn start(&self) {
        self.state.lock().started = true;
        self.changed.notify_all();
    }

    /// Waits for `reached`, for a time or for an interruption, which stops all threads.
    fn wait_until(&self, end_ns: Option<u64>, reached: impl Fn(&State) -> bool) {
        let mut state = self.state.lock();
        while !reached(&state) {
            let mut pause = LOOK;
            if let Some(end) = end_ns {
                let left = end.saturating_sub(self.clock.monotonic_ns());
                if left == 0 {
                    return;
                }
                pause = pause.min(Duration::from_nanos(left));
            }
            if interrupt::requested() {
                self.stop.set();
            }
            self.changed.wait_for(&mut state, pause);
        }
    }
}

/// A thread is done, however.
struct Ending<'a>(&'a Gate<'a>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if base::thread::panicking() {
            self.0.stop.set();
        }
        self.0.state.lock().ended += 1;
        self.0.changed.notify_all();
    }
}

/// Nobody waits for a start that does not come.
struct Release<'a>(&'a Gate<'a>);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.stop.set();
        self.0.start();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads that do `share` operations each, and fail where told to.
    struct Counted {
        share: u64,
        fails_to_prepare: Option<usize>,
        fails_at: Option<u64>,
    }

    impl Load for Counted {
        fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
            if self.fails_to_prepare == Some(thread) {
                return Err(Error::Unable("not prepared".to_owned()));
            }
            let mut done = 0;
            Ok(Box::new(move || {
                if self.fails_at == Some(done) {
                    return Err(Error::Unable("failed".to_owned()));
                }
                done += 1;
                Ok(u64::from(done <= self.share))
            }))
        }

        fn settle(&self) -> Result<(), Error> {
            Ok(())
        }

        fn cpu_ns(&self) -> Result<u64, Error> {
            Ok(base::clock::process_cpu_ns())
        }
    }

    fn window(threads: usize, ms: u64) -> Window {
        Window {
            time: Duration::from_millis(ms),
            threads,
            operations: u64::MAX,
            cpus: Vec::new(),
        }
    }

    fn measure(window: &Window, load: &Counted) -> Result<Measured, Error> {
        super::measure(window, load, &Meter::new(&[])?)
    }

    const ENDLESS: Counted = Counted {
        share: u64::MAX,
        fails_to_prepare: None,
        fails_at: None,
    };

    #[test]
    fn a_window_ends_in_time() {
        let measured = measure(&window(2, 20), &ENDLESS).unwrap();
        assert!(measured.operations > 2);
        assert!(!measured.used_up);
        assert!(measured.seconds >= 0.015, "{measured:?}");
        assert!(measured.rate() > 0.0 && measured.cpu_us() > 0.0);
    }

    #[test]
    fn the_first_and_the_last_thread_have_their_own_operations_and_time() {
        let measured = measure(&window(2, 20), &ENDLESS).unwrap();
        let (first, last) = (measured.first, measured.last);
        assert_eq!(first.operations + last.operations, measured.operations);
        let mean = (first.seconds + last.seconds) / 2.0;
        assert!((mean - measured.seconds).abs() < 1e-9, "{measured:?}");
        assert!(first.rate() > 0.0);
    }

    #[test]
    fn a_window_ends_early_when_nothing_is_left() {
        let load = Counted {
            share: 100,
            ..ENDLESS
        };
        let measured = measure(&window(1, 600_000), &load).unwrap();
        assert_eq!(measured.operations, 100);
        assert!(measured.used_up);
    }

    #[test]
    fn a_full_file_system_is_an_error_and_no_end_like_others() {
        struct Full;

        impl Load for Full {
            fn prepare(&self, _: usize, _: &Stop) -> Result<Operation<'_>, Error> {
                let mut done = 0;
                Ok(Box::new(move || {
                    done += 1;
                    match done {
                        10 => Err(Error::Call(rustix::io::Errno::NOSPC)),
                        _ => Ok(1),
                    }
                }))
            }

            fn settle(&self) -> Result<(), Error> {
                Ok(())
            }

            fn cpu_ns(&self) -> Result<u64, Error> {
                Ok(base::clock::process_cpu_ns())
            }
        }
        let full = super::measure(&window(2, 600_000), &Full, &Meter::new(&[]).unwrap());
        let told = full.unwrap_err().to_string();
        assert!(told.contains("became full"), "{told}");
    }

    #[test]
    fn a_window_ends_after_its_operations() {
        let bounded = Window {
            operations: 50,
            ..window(1, 600_000)
        };
        let measured = measure(&bounded, &ENDLESS).unwrap();
        assert_eq!(measured.operations, 50);
        assert!(!measured.used_up);
    }

    #[test]
    fn the_sync_is_all_in() {
        struct Syncing(Counted, AtomicBool);

        impl Load for Syncing {
            fn prepare(&self, thread: usize, stop: &Stop) -> Result<Operation<'_>, Error> {
                self.0.prepare(thread, stop)
            }

            /// The second time it takes 20 ms.
            fn settle(&self) -> Result<(), Error> {
                let clock = Clock::real();
                while self.1.load(Ordering::Relaxed) && clock.monotonic_ns() < 20_000_000 {
                    std::hint::spin_loop();
                }
                self.1.store(true, Ordering::Relaxed);
                Ok(())
            }

            fn cpu_ns(&self) -> Result<u64, Error> {
                self.0.cpu_ns()
            }
        }
        let load = Counted {
            share: 1,
            ..ENDLESS
        };
        let load = Syncing(load, AtomicBool::new(false));
        let meter = Meter::new(&[]).unwrap();
        let measured = super::measure(&window(1, 600_000), &load, &meter).unwrap();
        assert!(measured.synced.seconds >= measured.seconds + 0.02);
    }

    #[test]
    fn a_thread_that_fails_ends_the_window_and_is_reported() {
        for (fails_to_prepare, fails_at) in [(Some(1), None), (None, Some(5))] {
            let load = Counted {
                fails_to_prepare,
                fails_at,
                ..ENDLESS
            };
            let error = measure(&window(3, 600_000), &load).unwrap_err();
            assert!(matches!(error, Error::Unable(_)), "{error}");
        }
    }

    #[test]
    fn threads_run_where_they_are_told_to() {
        let cpus = allowed_cpus().unwrap();
        assert!(!cpus.is_empty());
        let pinned = Window {
            cpus,
            ..window(2, 5)
        };
        assert!(measure(&pinned, &ENDLESS).unwrap().operations > 0);
    }
}

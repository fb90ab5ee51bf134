//! What this machine's cores take for what published costs ([`super::costs`]) say of others: a comparison with what is measured
//! here is one with this machine.
//!
//! 1. Each is measured by threads on CPUs of their own, which begin when all of them are there; where there is one CPU, nothing is.
//! 2. What else the machine does makes any of them longer and none shorter: the shortest batch counts for lines, and what a quarter of all
//!    wake-ups did not exceed for these.

use std::sync::atomic::{AtomicU64, Ordering};

use base::clock::Clock;
use base::sync::{Condvar, Mutex, rank};

use super::costs::{Costs, Time};
use super::simulate::CORES_MAX;
use crate::Error;
use crate::runner::pin;

/// Lines that are handed over at once, no more than the fastest cache holds, and how often.
const LINES: usize = 256;
const STRIDE: usize = 101;
const TURNS: usize = 200;
const WAKE_UPS: usize = 400;
/// A thread that is about to sleep does so by then.
const ASLEEP_NS: u64 = 30_000;

/// A number on a line of its own.
#[repr(align(128))]
struct Alone(AtomicU64);

impl Costs {
    /// These, with what lines, waits and wake-ups take on these CPUs.
    pub fn measured(self, cpus: &[usize]) -> Result<Costs, Error> {
        let &[first, second, ..] = cpus else {
            return Ok(self);
        };
        let cpus = [first, second];
        let (line, spin) = (line(cpus)?, spin(cpus)?);
        let (wake, wake_call) = wake_up(cpus)?;
        Ok(Costs {
            line,
            far_line: line,
            socket_cores: CORES_MAX,
            spin,
            wake,
            wake_call,
            ..self
        })
    }
}

fn picoseconds(ns: f64) -> Time {
    (ns * 1000.0).round() as Time
}

/// Runs `body` on each of two CPUs at once, if there is a thread on both: who waits for the other one does not wait in vain.
fn on_both<T: Send>(cpus: [usize; 2], body: impl Fn(usize) -> T + Sync) -> Result<[T; 2], Error> {
    /// Added to the count of those who have come by one who could not be pinned.
    const FAILED: u64 = 1 << 32;
    let come = AtomicU64::new(0);
    let results = base::thread::try_parallel(2, |thread| {
        let pinned = pin(&cpus[thread..=thread]);
        let failed = FAILED * u64::from(pinned.is_err());
        come.fetch_add(1 + failed, Ordering::AcqRel);
        let mut spins = 0;
        while come.load(Ordering::Acquire) % FAILED < 2 {
            base::thread::spin(&mut spins);
        }
        pinned?;
        Ok((come.load(Ordering::Acquire) < FAILED).then(|| body(thread)))
    });
    let results: Result<Vec<Option<T>>, Error> =
        results.map_err(Error::threads)?.into_iter().collect();
    let mut both = results?.into_iter().flatten();
    let mut next = || both.next().expect("both are pinned");
    Ok([next(), next()])
}

/// Two threads change the same lines in turns: what a change takes more where the other one made the last, than where the thread itself did.
fn line(cpus: [usize; 2]) -> Result<Time, Error> {
    let lines: Vec<Alone> = (0..LINES).map(|_| Alone(AtomicU64::new(0))).collect();
    let turn = Alone(AtomicU64::new(0));
    let clock = Clock::real();
    // All of them, none beside the last, so that no neighbour comes along.
    let change = || {
        let begin = clock.monotonic_ns();
        for i in 0..LINES {
            lines[i * STRIDE % LINES].0.fetch_add(1, Ordering::AcqRel);
        }
        clock.monotonic_ns() - begin
    };
    let both = on_both(cpus, |thread| {
        let (mut others, mut own) = (u64::MAX, u64::MAX);
        for round in 0..=TURNS {
            while turn.0.load(Ordering::Acquire) % 2 != thread as u64 {
                std::hint::spin_loop();
            }
            let (first, again) = (change(), change());
            // Before the first the other one may have changed none of them.
            if round > 0 {
                (others, own) = (others.min(first), own.min(again));
            }
            turn.0.fetch_add(1, Ordering::AcqRel);
        }
        others.saturating_sub(own)
    })?;
    let shortest = both[0].min(both[1]);
    Ok(picoseconds(shortest as f64 / LINES as f64))
}

/// How long who waits for a lock of `parking_lot`'s pauses and yields before it sleeps: so often as its `SpinWait` does.
fn spin(cpus: [usize; 2]) -> Result<Time, Error> {
    let clock = Clock::real();
    let wait = |_| {
        let begin = clock.monotonic_ns();
        for round in 1..=10 {
            match round {
                ..=3 => (0..1 << round).for_each(|_| std::hint::spin_loop()),
                _ => rustix::thread::sched_yield(),
            }
        }
        clock.monotonic_ns() - begin
    };
    let both = on_both(cpus, |_| (0..WAKE_UPS).map(wait).collect::<Vec<u64>>())?;
    Ok(quarter(both.into_iter().flatten()))
}

#[derive(Default)]
struct Sleeper {
    waits: bool,
    woken: bool,
}

/// From the call that wakes a thread until it runs, and until the call is over.
fn wake_up(cpus: [usize; 2]) -> Result<(Time, Time), Error> {
    let (state, changed) = (Mutex::new(rank::LEAF, Sleeper::default()), Condvar::new());
    let clock = Clock::real();
    let sleep = || {
        let mut state = state.lock();
        state.waits = true;
        while !std::mem::take(&mut state.woken) {
            changed.wait(&mut state);
        }
        clock.monotonic_ns()
    };
    let wake = || {
        while !std::mem::take(&mut state.lock().waits) {
            std::hint::spin_loop();
        }
        let now = clock.monotonic_ns();
        while clock.monotonic_ns() - now < ASLEEP_NS {
            std::hint::spin_loop();
        }
        state.lock().woken = true;
        let begin = clock.monotonic_ns();
        changed.notify_all();
        (begin, clock.monotonic_ns())
    };
    // When each call began and was over, and when who slept ran.
    let [calls, ran] = on_both(cpus, |thread| {
        let each = |_| match thread {
            0 => wake(),
            _ => (sleep(), 0),
        };
        (0..WAKE_UPS).map(each).collect::<Vec<(u64, u64)>>()
    })?;
    let latencies = calls.iter().zip(&ran);
    let latencies = latencies.map(|((begin, _), (ran, _))| ran.saturating_sub(*begin));
    let lasted = calls.iter().map(|(begin, end)| end - begin);
    Ok((quarter(latencies), quarter(lasted)))
}

/// What a quarter of these does not exceed.
fn quarter(ns: impl Iterator<Item = u64>) -> Time {
    let mut ns: Vec<u64> = ns.collect();
    ns.sort_unstable();
    picoseconds(ns.get(ns.len() / 4).copied().unwrap_or(0) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::allowed_cpus;

    /// Who was there alone waited for ever for the other one.
    #[test]
    fn nothing_is_measured_where_one_cpu_is_not_there() {
        // The last one that a set can have; no machine of ours has it.
        let (cpu, none) = (allowed_cpus().unwrap()[0], 1023);
        for cpus in [[cpu, none], [none, cpu]] {
            let outcome = on_both(cpus, |thread| -> () { unreachable!("{thread} runs alone") });
            assert!(matches!(outcome, Err(Error::Call(_))), "{outcome:?}");
        }
    }

    #[test]
    fn two_cpus_have_costs_of_their_own_and_one_has_those_published() {
        let cpus = allowed_cpus().unwrap();
        let alone = Costs::PUBLISHED.measured(&cpus[..1]).unwrap();
        assert_eq!(alone, Costs::PUBLISHED);
        if cpus.len() < 2 {
            return;
        }
        let here = Costs::PUBLISHED.measured(&cpus).unwrap();
        // Of any machine. It was nothing for a line that the other one had not changed yet.
        let us = 1_000_000;
        assert!(here.line > 1000 && here.line < us, "{here:?}");
        assert!(here.wake > here.line, "{here:?}");
        assert!(here.wake_call > 0 && here.spin > 0, "{here:?}");
        assert_eq!(allowed_cpus().unwrap(), cpus);
    }
}

//! What waiting for a device came to: counted by relaxed additions, on lines that few threads share.

use super::estimate::Outcome;
use base::atomic::{AtomicU64, Ordering};
use base::thread::lane;

/// Parts of the counts, each for the threads of some lanes.
const PARTS: usize = 4;
/// Powers of two that are told apart, from 2^[`FIRST`] nanoseconds on, and how many steps each has.
const POWERS: usize = 26;
const FIRST: u32 = 9;
const STEPS: usize = 8;
/// Of so many waits the CPU time of one is taken.
pub(super) const CPU_EACH: u64 = 64;

/// How long waits took, in nanoseconds: each in a bucket that is an eighth of a power of two wide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram([u64; POWERS * STEPS]);

impl Default for Histogram {
    fn default() -> Self {
        Histogram([0; POWERS * STEPS])
    }
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(1 << FIRST);
    let power = ns.ilog2();
    let step = (ns >> (power - STEPS.ilog2())) as usize % STEPS;
    ((power - FIRST) as usize * STEPS + step).min(POWERS * STEPS - 1)
}

/// The largest time of a bucket.
fn top(bucket: usize) -> u64 {
    let power = FIRST as usize + bucket / STEPS;
    let step = (bucket % STEPS + 1) as u64;
    (1 << power) + (step << (power - STEPS.ilog2() as usize)) - 1
}

impl Histogram {
    /// A time that so great a part of all did not exceed; within an eighth.
    pub fn quantile(&self, part: f64) -> u64 {
        let all: u64 = self.0.iter().sum();
        let rank = ((all as f64 * part).ceil() as u64).max(1);
        let mut seen = 0;
        for (at, count) in self.0.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return top(at);
            }
        }
        0
    }
}

/// What waits came to so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    pub waits: u64,
    /// Groups of transfers that were waited for as such, and transfers that were in flight by themselves; the latter are estimated
    /// from one in 16 where nothing is learnt from them.
    pub timed: u64,
    /// Nanoseconds from their start until the end of the wait that found them.
    pub ns: u64,
    /// That slept in the kernel until it was there: all, and those that had spun for nothing before.
    pub blocked: u64,
    pub late: u64,
    /// Sleeps until a moment that was thought to be just before the end; those that ended after it, and those that were
    /// cut short because it was there before.
    pub sleeps: u64,
    pub overslept: u64,
    pub early: u64,
    /// Waits that spun, those whose spin found it, and nanoseconds of all spins.
    pub spins: u64,
    pub caught: u64,
    pub spun_ns: u64,
    /// CPU time of the threads that waited, in nanoseconds: estimated from one wait in 64.
    pub cpu_ns: u64,
    /// The longest time of any, in nanoseconds.
    pub longest: u64,
    pub times: Histogram,
}

/// The numbers of [`Reaped`], in the order of [`Reaped::values`].
#[derive(Clone, Copy)]
enum Value {
    Waits,
    Timed,
    Ns,
    Blocked,
    Late,
    Sleeps,
    Overslept,
    Early,
    Spins,
    Caught,
    SpunNs,
    CpuNs,
}

const VALUES: usize = Value::CpuNs as usize + 1;

impl Reaped {
    /// As [`Histogram::quantile`], and no more than the longest time.
    pub fn quantile(&self, part: f64) -> u64 {
        self.times.quantile(part).min(self.longest)
    }

    fn values(&mut self) -> [&mut u64; VALUES] {
        [
            &mut self.waits,
            &mut self.timed,
            &mut self.ns,
            &mut self.blocked,
            &mut self.late,
            &mut self.sleeps,
            &mut self.overslept,
            &mut self.early,
            &mut self.spins,
            &mut self.caught,
            &mut self.spun_ns,
            &mut self.cpu_ns,
        ]
    }

    /// What has been counted since these were, of the same device; the longest time is that of all.
    pub fn since(mut self, mut earlier: Reaped) -> Reaped {
        for (now, then) in self.values().into_iter().zip(earlier.values()) {
            *now = now.saturating_sub(*then);
        }
        for (now, then) in self.times.0.iter_mut().zip(earlier.times.0) {
            *now = now.saturating_sub(then);
        }
        self
    }

    /// Adds what waits came to that others counted, without the times of transfers.
    pub(crate) fn add_waits(&mut self, other: Reaped) {
        self.add(Reaped {
            timed: 0,
            ns: 0,
            longest: 0,
            times: Histogram::default(),
            ..other
        });
    }

    /// Adds what another one counted.
    pub fn add(&mut self, mut other: Reaped) {
        for (sum, more) in self.values().into_iter().zip(other.values()) {
            *sum += *more;
        }
        self.longest = self.longest.max(other.longest);
        for (sum, more) in self.times.0.iter_mut().zip(other.times.0) {
            *sum += more;
        }
    }
}

#[derive(Debug)]
#[repr(align(128))]
struct Part {
    values: [AtomicU64; VALUES],
    longest: AtomicU64,
    times: [AtomicU64; POWERS * STEPS],
}

impl Part {
    fn add(&self, value: Value, more: u64) {
        self.values[value as usize].fetch_add(more, Ordering::Relaxed);
    }
}

/// Of one device.
#[derive(Debug)]
pub(super) struct Counts(Box<[Part]>);

impl Counts {
    pub fn new() -> Counts {
        let part = |_| Part {
            values: std::array::from_fn(|_| AtomicU64::new(0)),
            longest: AtomicU64::new(0),
            times: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        Counts((0..PARTS).map(part).collect())
    }

    /// Counts a wait that ended so, whether it slept until a set moment, and the CPU time that it tells.
    pub fn add(&self, outcome: Outcome, slept: bool, cpu_ns: u64) {
        let part = &self.0[lane() % PARTS];
        part.add(Value::Waits, 1);
        if slept {
            part.add(Value::Sleeps, 1);
        }
        if cpu_ns > 0 {
            part.add(Value::CpuNs, cpu_ns);
        }
        match outcome {
            Outcome::Found => {}
            Outcome::Blocked => part.add(Value::Blocked, 1),
            Outcome::Early => part.add(Value::Early, 1),
            Outcome::Overslept { .. } => part.add(Value::Overslept, 1),
            Outcome::Caught { spun } => {
                part.add(Value::Spins, 1);
                part.add(Value::Caught, 1);
                part.add(Value::SpunNs, spun);
            }
            Outcome::Late { spun: 0 } => part.add(Value::Blocked, 1),
            Outcome::Late { spun } => {
                part.add(Value::Spins, 1);
                part.add(Value::Late, 1);
                part.add(Value::Blocked, 1);
                part.add(Value::SpunNs, spun);
            }
        }
    }

    /// Counts so many transfers that each took so long.
    pub fn add_time(&self, took: u64, count: u64) {
        let part = &self.0[lane() % PARTS];
        part.times[bucket(took)].fetch_add(count, Ordering::Relaxed);
        part.add(Value::Timed, count);
        part.add(Value::Ns, took.saturating_mul(count));
        if took > part.longest.load(Ordering::Relaxed) {
            part.longest.fetch_max(took, Ordering::Relaxed);
        }
    }

    pub fn get(&self) -> Reaped {
        let mut all = Reaped::default();
        for part in &self.0 {
            for (sum, more) in all.values().into_iter().zip(&part.values) {
                *sum += more.load(Ordering::Relaxed);
            }
            all.longest = all.longest.max(part.longest.load(Ordering::Relaxed));
            for (sum, more) in all.times.0.iter_mut().zip(&part.times) {
                *sum += more.load(Ordering::Relaxed);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_within_an_eighth() {
        let counts = Counts::new();
        for us in 1..=1000 {
            counts.add(Outcome::Blocked, false, 0);
            counts.add_time(us * 1000, 2);
        }
        assert_eq!(counts.get().longest, 1_000_000);
        assert_eq!(counts.get().quantile(1.0), 1_000_000);
        counts.add(Outcome::Late { spun: 7 }, true, 5);
        counts.add_time(u64::MAX >> 1, 1);
        let all = counts.get();
        for (part, us) in [(0.5, 500), (0.99, 990)] {
            let told = all.times.quantile(part);
            assert!((us * 1000..us * 1130).contains(&told), "{told}");
        }
        assert_eq!(Histogram::default().quantile(0.5), 0);
        assert_eq!((all.waits, all.blocked, all.late), (1001, 1001, 1));
        assert_eq!((all.timed, all.longest), (2001, u64::MAX >> 1));
        counts.add(Outcome::Found, false, 3);
        let since = counts.get().since(all.clone());
        assert_eq!(
            (since.waits, since.blocked, since.timed, since.cpu_ns),
            (1, 0, 0, 3)
        );
        assert_eq!(
            (all.sleeps, all.spins, all.spun_ns, all.cpu_ns),
            (1, 1, 7, 5)
        );
        for at in 0..POWERS * STEPS {
            assert_eq!(bucket(top(at)), at);
        }
    }

    #[test]
    fn each_end_is_counted_as_such() {
        let counts = Counts::new();
        let caught = Outcome::Caught { spun: 40 };
        for (outcome, slept, cpu_ns) in [
            (Outcome::Early, true, 0),
            (Outcome::Overslept { late: 9 }, true, 0),
            (caught, false, 0),
            (caught, true, 100),
            (Outcome::Late { spun: 3 }, true, 0),
            (Outcome::Blocked, false, 0),
            (Outcome::Found, false, 0),
        ] {
            counts.add(outcome, slept, cpu_ns);
        }
        counts.add_time(1000, 3);
        let mut expected = Reaped {
            waits: 7,
            timed: 3,
            ns: 3000,
            blocked: 2,
            late: 1,
            sleeps: 4,
            overslept: 1,
            early: 1,
            spins: 3,
            caught: 2,
            spun_ns: 83,
            cpu_ns: 100,
            longest: 1000,
            times: Histogram::default(),
        };
        expected.times.0[bucket(1000)] = 3;
        assert_eq!(counts.get(), expected);
    }
}

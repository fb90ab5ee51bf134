//! Time as a value: real clocks in production, a manual clock under simulation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A wall-clock instant, nanosecond resolution, as inodes store it. Without padding: an inode in memory has four.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C, packed(4))]
pub struct Timestamp {
    sec: i64,
    nsec: u32,
}

const NS: i64 = 1_000_000_000;

impl Timestamp {
    /// So many seconds since the Unix epoch, negative before 1970, and nanoseconds below 1,000,000,000: more count as one less than that, as there is no such time, and
    /// devices hold none.
    pub const fn new(sec: i64, nsec: u32) -> Timestamp {
        let nsec = match (nsec as i64) < NS {
            true => nsec,
            false => NS as u32 - 1,
        };
        Timestamp { sec, nsec }
    }

    /// Seconds since the Unix epoch; negative before 1970.
    pub const fn sec(self) -> i64 {
        self.sec
    }

    /// Nanoseconds within the second, below 1,000,000,000.
    pub const fn nsec(self) -> u32 {
        self.nsec
    }

    /// Nanoseconds since the epoch, or the nearest that there is a number for.
    pub fn ns(self) -> i64 {
        self.sec
            .saturating_mul(NS)
            .saturating_add(i64::from(self.nsec))
    }

    pub fn from_ns(ns: i64) -> Timestamp {
        Timestamp {
            sec: ns.div_euclid(NS),
            nsec: ns.rem_euclid(NS) as u32,
        }
    }
}

impl From<Duration> for Timestamp {
    fn from(since_epoch: Duration) -> Timestamp {
        Timestamp {
            sec: since_epoch.as_secs() as i64,
            nsec: since_epoch.subsec_nanos(),
        }
    }
}

/// Where time comes from. Cloning shares the clock.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine's clocks.
    Real(Instant),
    /// A clock that moves only when told to.
    Manual(Arc<Manual>),
}

/// What a manual clock shows.
#[derive(Debug)]
pub struct Manual {
    /// Nanoseconds since the epoch.
    pub(crate) now_ns: AtomicU64,
    /// Length of its ticks; 0: it has none.
    tick_ns: u64,
    /// How far the wall clock was set back, in nanoseconds.
    behind_ns: AtomicU64,
}

impl Manual {
    fn wall(&self, now_ns: u64) -> Timestamp {
        let behind_ns = self.behind_ns.load(Ordering::Relaxed);
        Duration::from_nanos(now_ns.saturating_sub(behind_ns)).into()
    }
}

impl Clock {
    pub fn real() -> Self {
        Clock::Real(Instant::now())
    }

    /// A clock that starts at `start_ns` nanoseconds after the epoch.
    pub fn manual(start_ns: u64) -> Self {
        Clock::manual_with_ticks(start_ns, Duration::ZERO)
    }

    /// The same with ticks, as [`now_coarse`](Self::now_coarse) shows them.
    pub fn manual_with_ticks(start_ns: u64, tick: Duration) -> Self {
        Clock::Manual(Arc::new(Manual {
            now_ns: AtomicU64::new(start_ns),
            tick_ns: tick.as_nanos() as u64,
            behind_ns: AtomicU64::new(0),
        }))
    }

    /// Nanoseconds since an arbitrary fixed point; never goes backwards.
    pub fn monotonic_ns(&self) -> u64 {
        match self {
            Clock::Real(start) => start.elapsed().as_nanos() as u64,
            Clock::Manual(manual) => manual.now_ns.load(Ordering::Relaxed),
        }
    }

    /// Wall-clock time.
    pub fn now(&self) -> Timestamp {
        match self {
            Clock::Real(_) => SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or(Duration::ZERO)
                .into(),
            // Each look advances by one nanosecond so that order stays visible.
            Clock::Manual(manual) => manual.wall(manual.now_ns.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// Wall-clock time of the last tick, as kernel file systems stamp files: 1 to 10 ms old, so
    /// that many stamps are equal. A manual clock without ticks is exact.
    pub fn now_coarse(&self) -> Timestamp {
        match self {
            Clock::Real(_) => {
                let time = read(libc::CLOCK_REALTIME_COARSE);
                Timestamp {
                    sec: time.tv_sec.max(0),
                    nsec: time.tv_nsec as u32,
                }
            }
            Clock::Manual(manual) => match self.monotonic_ns().checked_div(manual.tick_ns) {
                None => self.now(),
                Some(ticks) => manual.wall(ticks * manual.tick_ns),
            },
        }
    }

    /// Sleeps until [`monotonic_ns`](Self::monotonic_ns) has come to `ns`, woken by a timer of the kernel's that
    /// is as exact as it can be; at once if that has passed. A manual clock moves there instead.
    pub fn sleep_until(&self, ns: u64) {
        match self {
            Clock::Real(_) => {
                exact_timers();
                while let Some(left) = ns.checked_sub(self.monotonic_ns()).filter(|&left| left > 0)
                {
                    std::thread::sleep(Duration::from_nanos(left));
                }
            }
            Clock::Manual(manual) => {
                manual.now_ns.fetch_max(ns, Ordering::Relaxed);
            }
        }
    }

    /// Sets the wall clock of a manual clock back. A real clock cannot be set: this is a bug in the caller.
    pub fn set_back(&self, by: Duration) {
        match self {
            Clock::Real(_) => panic!("a real clock cannot be set"),
            Clock::Manual(manual) => {
                manual
                    .behind_ns
                    .fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
            }
        }
    }

    /// Moves a manual clock forward. A real clock cannot be moved: this is a bug in the caller.
    pub fn advance(&self, by: Duration) {
        match self {
            Clock::Real(_) => panic!("a real clock cannot be advanced"),
            Clock::Manual(manual) => {
                manual
                    .now_ns
                    .fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
            }
        }
    }
}

/// From now on the calling thread's sleeps end when they should; by default up to 50 µs later, together with
/// others'.
pub fn exact_timers() {
    thread_local! {
        static SET: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
    if !SET.replace(true) {
        // SAFETY: this option takes one number and touches no memory.
        let done = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
        // Every Linux has it; without it sleeps would be longer and nothing else.
        debug_assert_eq!(done, 0);
    }
}

/// Nanoseconds of a duration; of one that is longer than these tell, the most there are.
pub fn ns_of(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds of the machine's clock that never goes backwards, the same in all threads.
#[inline]
pub fn now_ns() -> u64 {
    let time = read(libc::CLOCK_MONOTONIC);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// For who waits that long for something.
pub(crate) fn moment_in(time: Duration) -> std::time::Instant {
    std::time::Instant::now() + time
}

/// Sleeps so long, woken by a timer that is as exact as it can be.
pub fn nap(ns: u64) {
    exact_timers();
    std::thread::sleep(Duration::from_nanos(ns));
}

/// CPU time that all threads of this process have used so far, in user and kernel mode, in
/// nanoseconds.
pub fn process_cpu_ns() -> u64 {
    cpu_ns(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// The same of the calling thread alone.
pub fn thread_cpu_ns() -> u64 {
    cpu_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn cpu_ns(clock: libc::clockid_t) -> u64 {
    let time = read(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn read(clock: libc::clockid_t) -> libc::timespec {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes one timespec, which `time` is.
    let done = unsafe { libc::clock_gettime(clock, &raw mut time) };
    // Every Linux has these clocks.
    debug_assert_eq!(done, 0);
    time
}

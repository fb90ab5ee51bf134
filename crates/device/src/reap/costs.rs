//! What waiting costs on this machine: measured once in a process, when it is first needed.

use base::clock;
use std::sync::OnceLock;

/// Sleeps of each kind that are measured: all of them take a few milliseconds.
const TRIES: usize = 7;
/// Long enough that a CPU with nothing to do goes to rest meanwhile.
const REST_NS: u64 = 400_000;
/// A machine that seems slower than that was busy with something else.
const WAKE_MAX_NS: u64 = 500_000;

/// Medians, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// How much later than asked for a sleeper runs.
    pub wake_ns: u64,
    /// CPU time that a sleep takes of the thread.
    pub cpu_ns: u64,
    /// The time that the shortest sleep takes: none that shall be shorter is worth it.
    pub shortest_ns: u64,
}

impl Costs {
    /// Of this machine.
    pub fn get() -> &'static Costs {
        static COSTS: OnceLock<Costs> = OnceLock::new();
        if let Some(costs) = COSTS.get() {
            return costs;
        }
        // By a thread of its own: exact timers stay with who has asked for them.
        let measure = || _ = COSTS.get_or_init(Costs::measure);
        if let Ok(thread) = base::thread::spawn("costs", measure) {
            _ = thread.join();
        }
        COSTS.get_or_init(Costs::measure)
    }

    fn measure() -> Costs {
        let (long, cpu) = naps(REST_NS);
        let (shortest, _) = naps(1);
        let costs = Costs {
            wake_ns: long.saturating_sub(REST_NS).clamp(1_000, WAKE_MAX_NS),
            cpu_ns: cpu.min(WAKE_MAX_NS),
            shortest_ns: shortest.min(WAKE_MAX_NS),
        };
        tracing::debug!(?costs, "what waiting costs");
        costs
    }
}

/// What sleeps of that length take, in time and in CPU time.
fn naps(ns: u64) -> (u64, u64) {
    let mut naps = [(0, 0); TRIES];
    for nap in &mut naps {
        let (start, cpu) = (clock::now_ns(), clock::thread_cpu_ns());
        clock::nap(ns);
        *nap = (clock::now_ns() - start, clock::thread_cpu_ns() - cpu);
    }
    let median = |mut all: [u64; TRIES]| {
        all.sort_unstable();
        all[TRIES / 2]
    };
    (
        median(naps.map(|(time, _)| time)),
        median(naps.map(|(_, cpu)| cpu)),
    )
}

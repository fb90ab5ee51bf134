//! What the model takes the machine's parts to cost. None of it is measured here (but [`super::here`] does, for a comparison with this machine). Each constant has its
//! source, or is called an assumption, and was written down before the first run of the model, but for the lines
//! on their way to a core at once (`fills`): they came after runs that they favour.
//!
//! | constant | value | source |
//! |---|---:|---|
//! | line from a core of the same socket | 60 ns | Intel Memory Latency Checker, Xeon Platinum 8360Y, L2 to L2 of a modified line: 59.8 ns (8269CY: 51.7 ns) |
//! | line from another socket | 126 ns | the same: 126.0 ns where the writer's socket is the line's home (8269CY: 111 ns) |
//! | cores of a socket | 20 | the 40 cores of the study on F2FS (Sogang University, 2022) as two sockets |
//! | hand-off of a lock to a waiter that spins | two lines | the store that releases it, and the waiter's atomic operation; David, Guerraoui, Trigonakis, *Everything You Always Wanted to Know About Synchronization but Were Afraid to Ask*, SOSP 2013: a lock costs what its lines cost |
//! | hand-off to a waiter that sleeps | 2,500 ns | Falsafi et al., *Unlocking Energy*, USENIX ATC 2016: 7,000 cycles at least from the call that wakes a thread to its running, at 2.8 GHz |
//! | what releasing a lock to a sleeper costs its holder | 960 ns | the same: 2,700 cycles for the call |
//! | how long a waiter spins | 3,000 ns | an assumption: `parking_lot` spins three rounds of a few pauses and yields seven times, each of which is a system call |
//! | lines of what a lock protects | 2 | an assumption: what was changed under a lock by another core has to come over too |
//! | lines on their way to a core at once | 10 | line fill buffers of a core: *Intel 64 and IA-32 Architectures Optimization Reference Manual*, Sandy Bridge to Skylake; later ones have more |
//! | devices | four of 4,300 MB/s | Intel SSD D7-P5500, sequential writes; as many as `sheaf bench` has image files |

use serde_json::{Value, json};

/// Time in the model, in picoseconds.
pub type Time = u64;

/// Picoseconds.
pub const fn ns(ns: u64) -> Time {
    ns * 1000
}

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    pub line: Time,
    pub far_line: Time,
    pub socket_cores: usize,
    pub spin: Time,
    pub wake: Time,
    pub wake_call: Time,
    pub protected_lines: u64,
    /// Of one core, when they are asked for ahead.
    pub fills: usize,
    /// Bytes that all devices take in a second.
    pub device_rate: f64,
}

impl Costs {
    pub const PUBLISHED: Costs = Costs {
        line: ns(60),
        far_line: ns(126),
        socket_cores: 20,
        spin: ns(3_000),
        wake: ns(2_500),
        wake_call: ns(960),
        protected_lines: 2,
        fills: 10,
        device_rate: 4.0 * 4_300e6,
    };

    /// The same where whoever waits for a lock spins in a queue as long as its holder runs, and is
    /// handed it in turn: so do the kernel's mutexes (`MUTEX_SPIN_ON_OWNER`), by one of which F2FS
    /// guards its table.
    pub const KERNEL_MUTEX: Costs = Costs {
        spin: Time::MAX,
        ..Costs::PUBLISHED
    };

    /// For the report.
    pub fn json(&self) -> Value {
        let ns = |time: Time| time / 1000;
        json!({
            "line_ns": ns(self.line),
            "far_line_ns": ns(self.far_line),
            "socket_cores": self.socket_cores,
            // Without end: no number.
            "spin_ns": (self.spin < Time::MAX).then_some(ns(self.spin)),
            "wake_ns": ns(self.wake),
            "wake_call_ns": ns(self.wake_call),
            "protected_lines": self.protected_lines,
            "fills": self.fills,
            "device_mb_s": self.device_rate / 1e6,
        })
    }
}

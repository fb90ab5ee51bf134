//! Whether the kernel has threads of its own for what rings ask of it and cannot do at once: flushes, and writes where a file's blocks have to be found first.
//!
//! Where the process may have no more threads (`pids.max` of its control group, systemd's `TasksMax`, docker's `--pids-limit`, `ulimit -u`) the kernel tries for
//! some 50 ms to start one, each time, and then gives back what it should have done, with nothing of it done.
//!
//! 1. After a lack was found nobody has the kernel look for a thread for [`REST_NS`]: who asks a ring meanwhile asks for what needs none. Then somebody tries again.
//! 2. The log is told of a lack, and not again before [`FORGOTTEN_NS`] have gone by without one.

use base::atomic::{AtomicU64, Ordering};

/// So long a lack lasts, as far as anybody knows.
const REST_NS: u64 = 10_000_000_000;
/// So long what is given back is taken for one at once.
const FORGOTTEN_NS: u64 = 60_000_000_000;

/// See the module's head.
pub(super) struct Workers {
    /// When the last lack was found; 0: there was none.
    lacked_ns: AtomicU64,
}

impl Workers {
    pub const fn new() -> Workers {
        Workers {
            lacked_ns: AtomicU64::new(0),
        }
    }

    fn lacked_within(&self, time_ns: u64, now_ns: impl Fn() -> u64) -> bool {
        match self.lacked_ns.load(Ordering::Relaxed) {
            0 => false,
            lacked_ns => now_ns().saturating_sub(lacked_ns) < time_ns,
        }
    }

    /// Nobody is to wait for one now.
    pub fn lack(&self, now_ns: impl Fn() -> u64) -> bool {
        self.lacked_within(REST_NS, now_ns)
    }

    /// There was a lack not long ago: what is given back is so for that again.
    pub fn lacked(&self, now_ns: impl Fn() -> u64) -> bool {
        self.lacked_within(FORGOTTEN_NS, now_ns)
    }

    /// The kernel had none.
    pub fn tell_lack(&self, now_ns: impl Fn() -> u64) {
        if self.note_lack(now_ns) {
            tracing::warn!(
                "the kernel seems to have no thread for what io_uring should flush or write: this process, its user or its control group may have as many as it \
                 is allowed (pids.max; TasksMax of systemd, --pids-limit of docker, ulimit -u). Meanwhile that is done by calls, as with io=threads; raise the limit"
            );
        }
    }

    /// Whether that is news.
    fn note_lack(&self, now_ns: impl Fn() -> u64) -> bool {
        let is_news = !self.lacked(&now_ns);
        self.lacked_ns.store(now_ns().max(1), Ordering::Relaxed);
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_threads_lasts_a_while_and_is_told_once_as_long_as_it_comes_again() {
        let workers = Workers::new();
        let start = 5;
        assert!(!workers.lack(|| start) && !workers.lacked(|| start));
        assert!(workers.note_lack(|| start), "it is told");
        for round in 0..100 {
            let now = start + round * REST_NS;
            assert!(workers.lack(|| now + REST_NS - 1));
            assert!(!workers.lack(|| now + REST_NS), "somebody tries again");
            assert!(workers.lacked(|| now + REST_NS));
            assert!(!workers.note_lack(|| now + REST_NS), "it is known");
        }
        let late = start + 100 * REST_NS + FORGOTTEN_NS;
        assert!(!workers.lacked(|| late) && workers.note_lack(|| late));
    }
}

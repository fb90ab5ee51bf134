//! A sum that many threads add to, each in memory of its own for as long as it can, and that many look at.
//! Checked by `model/`.
//!
//! A part is one thread's alone, which adds to it without a locked instruction; threads for which there is none share a few. A part hands what it has over to `total` when that is much; `seen`, on a line of its own, follows `total` in
//! steps. So who looks fetches a line once a step and not whenever one of many parts hands over.
//!
//! Invariants:
//! 1. What parts have not handed over is less than `batch` each.
//! 2. `seen` is less than `step` away from `total` when nobody adds. So `about` differs from `exact` by less
//!    than the number of parts times `batch`, and `step`.
//! 3. Nobody but the thread that adds to a part of its own changes it.

use base::atomic::{AtomicI64, Ordering, add_alone};
use std::ops::Deref;

/// Something of one core's, on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Padded<T>(pub T);

impl<T> Deref for Padded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// Least threads that have a part of their own, of a sum for several cores.
const OWN: usize = 32;

/// A sum in parts; see the module's head.
#[derive(Debug)]
pub struct Sum {
    own: Box<[Padded<AtomicI64>]>,
    shared: Box<[Padded<AtomicI64>]>,
    total: Padded<AtomicI64>,
    seen: Padded<AtomicI64>,
    batch: i64,
    step: i64,
}

impl Sum {
    /// A sum for so many cores, of which `about` may be `slack` away.
    pub fn new(cores: usize, slack: i64) -> Sum {
        let own = match cores {
            1 => 1,
            // Threads are more than cores.
            cores => cores.max(OWN),
        };
        let parts = |count| (0..count).map(|_| Padded(AtomicI64::new(0))).collect();
        Sum {
            own: parts(own),
            shared: parts(cores),
            total: Padded(AtomicI64::new(0)),
            seen: Padded(AtomicI64::new(0)),
            batch: (slack / 2 / (own + cores) as i64).max(1),
            step: (slack / 2).max(1),
        }
    }

    /// Adds `value`, for a lane (`base::thread::lane`): no other thread adds for that one meanwhile.
    pub fn add(&self, lane: usize, value: i64) {
        let Some(part) = self.own.get(lane) else {
            return self.add_shared(lane, value);
        };
        let now = add_alone(part, value);
        if now.abs() >= self.batch {
            add_alone(part, -now);
            self.hand_over(now);
        }
    }

    #[inline(never)]
    fn add_shared(&self, lane: usize, value: i64) {
        let part = &self.shared[lane % self.shared.len()];
        let now = part.fetch_add(value, Ordering::Relaxed) + value;
        if now.abs() >= self.batch {
            self.hand_over(part.swap(0, Ordering::Relaxed));
        }
    }

    #[cold]
    fn hand_over(&self, moved: i64) {
        let total = self.total.fetch_add(moved, Ordering::SeqCst) + moved;
        self.show(total);
    }

    /// Invariant 2: whoever stores last looks at the total after that.
    fn show(&self, mut total: i64) {
        while (total - self.seen.load(Ordering::SeqCst)).abs() >= self.step {
            self.seen.store(total, Ordering::SeqCst);
            total = self.total.load(Ordering::SeqCst);
        }
    }

    /// The sum but for what the parts have not handed over, and less than a step of that.
    pub fn about(&self) -> i64 {
        self.seen.load(Ordering::Relaxed)
    }

    /// The sum when nobody adds.
    pub fn exact(&self) -> i64 {
        let parts = self.own.iter().chain(&self.shared);
        let parts = parts.map(|part| part.load(Ordering::Relaxed));
        self.total.load(Ordering::Relaxed) + parts.sum::<i64>()
    }
}

//! A sum that many threads add to, each in memory of its own for as long as it can, and that many look at.
//! Checked by `model/`.
//!
//! A part is one thread's alone, which adds to it without a locked instruction; threads for which there is none add to the total. A part hands what it has over to `total` when that is much; `seen`, on a line of its own, follows `total` in
//! steps. So who looks fetches a line once a step and not whenever one of many parts hands over.
//!
//! Invariants:
//! 1. What parts have not handed over is less than `batch` each.
//! 2. `seen` is less than `step` away from `total` when nobody adds. So `about` differs from `exact` by less
//!    than the number of parts times `batch`, and `step`.
//! 3. Nobody but who adds to a part changes it.

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

/// Least parts of a sum for several cores.
const PARTS: usize = 32;

/// A sum in parts; see the module's head.
#[derive(Debug)]
pub struct Sum {
    parts: Box<[Padded<AtomicI64>]>,
    total: Padded<AtomicI64>,
    seen: Padded<AtomicI64>,
    batch: i64,
    step: i64,
}

impl Sum {
    /// A sum for so many cores, of which `about` may be `slack` away.
    pub fn new(cores: usize, slack: i64) -> Sum {
        let parts = match cores {
            1 => 1,
            // Threads are more than cores.
            cores => cores.max(PARTS),
        };
        Sum {
            parts: (0..parts).map(|_| Padded(AtomicI64::new(0))).collect(),
            total: Padded(AtomicI64::new(0)),
            seen: Padded(AtomicI64::new(0)),
            batch: (slack / 2 / parts as i64).max(1),
            step: (slack / 2).max(1),
        }
    }

    /// Adds `value`, in the part of a lane (`base::thread::lane`): no other thread adds there meanwhile.
    pub fn add(&self, lane: usize, value: i64) {
        let moved = match self.parts.get(lane) {
            Some(part) => {
                let now = add_alone(part, value);
                if now.abs() < self.batch {
                    return;
                }
                part.store(0, Ordering::Relaxed);
                now
            }
            None => value,
        };
        self.hand_over(moved);
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
        let parts = self.parts.iter().map(|part| part.load(Ordering::Relaxed));
        self.total.load(Ordering::Relaxed) + parts.sum::<i64>()
    }
}

//! A sum that many cores add to, each in memory of its own for as long as it can, and that many look at.
//! Checked by `model/`.
//!
//! A part hands what it has over to `total` when that is much; `seen`, on a line of its own, follows `total` in
//! steps. So who looks fetches a line once a step and not whenever one of many parts hands over.
//!
//! Invariants:
//! 1. What shards have not handed over is less than `batch` each.
//! 2. `seen` is less than `step` away from `total` when nobody adds. So `about` differs from `exact` by less
//!    than the number of shards times `batch`, and `step`.

use base::atomic::{AtomicI64, Ordering};
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
    /// A sum of `shards` parts, of which `about` may be `slack` away.
    pub fn new(shards: usize, slack: i64) -> Sum {
        Sum {
            parts: (0..shards).map(|_| Padded(AtomicI64::new(0))).collect(),
            total: Padded(AtomicI64::new(0)),
            seen: Padded(AtomicI64::new(0)),
            batch: (slack / 2 / shards as i64).max(1),
            step: (slack / 2).max(1),
        }
    }

    /// Adds `value` to the part of a shard.
    pub fn add(&self, shard: usize, value: i64) {
        let part = &self.parts[shard % self.parts.len()];
        let now = part.fetch_add(value, Ordering::Relaxed) + value;
        if now.abs() >= self.batch {
            let moved = part.swap(0, Ordering::Relaxed);
            let total = self.total.fetch_add(moved, Ordering::SeqCst) + moved;
            self.show(total);
        }
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

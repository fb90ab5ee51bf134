//! A sum that many cores add to, each in memory of its own for as long as it can. Tested in `tests/sum.rs`.
//!
//! Invariant: what shards have not handed over is less than `batch` each, so `about` differs from
//! `exact` by less than the number of shards times that.

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
    total: AtomicI64,
    batch: i64,
}

impl Sum {
    /// A sum of `shards` parts, of which `about` may be `slack` away.
    pub fn new(shards: usize, slack: i64) -> Sum {
        Sum {
            parts: (0..shards).map(|_| Padded(AtomicI64::new(0))).collect(),
            total: AtomicI64::new(0),
            batch: (slack / shards as i64).max(1),
        }
    }

    /// Adds `value` to the part of a shard.
    pub fn add(&self, shard: usize, value: i64) {
        let part = &self.parts[shard % self.parts.len()];
        let now = part.fetch_add(value, Ordering::Relaxed) + value;
        if now.abs() >= self.batch {
            let moved = part.swap(0, Ordering::Relaxed);
            self.total.fetch_add(moved, Ordering::Relaxed);
        }
    }

    /// The sum but for what the parts have not handed over.
    pub fn about(&self) -> i64 {
        self.total.load(Ordering::Relaxed)
    }

    /// The sum when nobody adds.
    pub fn exact(&self) -> i64 {
        let parts = self.parts.iter().map(|part| part.load(Ordering::Relaxed));
        self.about() + parts.sum::<i64>()
    }
}

//! A sum that many cores add to, each in memory of its own for as long as it can.
//!
//! Invariant: what shards have not handed over is less than `batch` each, so `about` differs from
//! `exact` by less than the number of shards times that.

use base::atomic::{AtomicI64, Ordering};
use std::ops::Deref;

/// Something of one core's, on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub T);

impl<T> Deref for Padded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

#[derive(Debug)]
pub(crate) struct Sum {
    parts: Box<[Padded<AtomicI64>]>,
    total: AtomicI64,
    batch: i64,
}

impl Sum {
    /// A sum of `shards` parts, of which `about` may be `slack` away.
    pub fn new(shards: usize, slack: i64) -> Sum {
        Sum {
            parts: (0..shards).map(|_| Padded::default()).collect(),
            total: AtomicI64::new(0),
            batch: (slack / shards as i64).max(1),
        }
    }

    pub fn add(&self, shard: usize, value: i64) {
        let part = &self.parts[shard % self.parts.len()];
        let now = part.fetch_add(value, Ordering::Relaxed) + value;
        if now.abs() >= self.batch {
            let moved = part.swap(0, Ordering::Relaxed);
            self.total.fetch_add(moved, Ordering::Relaxed);
        }
    }

    pub fn about(&self) -> i64 {
        self.total.load(Ordering::Relaxed)
    }

    /// The sum when nobody adds.
    pub fn exact(&self) -> i64 {
        let parts = self.parts.iter().map(|part| part.load(Ordering::Relaxed));
        self.about() + parts.sum::<i64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_added_is_lost_and_the_slack_is_kept() {
        let sum = Sum::new(4, 1000);
        base::thread::parallel(4, |shard| {
            let mut rng = base::rng::Rng::new(shard as u64);
            for _ in 0..10_000 {
                sum.add(shard + rng.below(2) as usize, rng.below(100) as i64);
                sum.add(shard, -(rng.below(90) as i64));
            }
            // Takes out what it added, within the slack.
            let mut rng = base::rng::Rng::new(shard as u64);
            for _ in 0..10_000 {
                rng.below(2);
                sum.add(shard, -(rng.below(100) as i64));
                sum.add(shard, rng.below(90) as i64);
            }
        });
        assert_eq!(sum.exact(), 0);
        assert!(sum.about().abs() < 1000, "{}", sum.about());
        sum.add(7, 2500);
        assert_eq!(sum.exact(), 2500);
        assert!((sum.about() - 2500).abs() < 1000, "{}", sum.about());
    }
}

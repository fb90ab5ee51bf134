//! How long each operation of a window took.
//!
//! Each thread keeps its own histogram, so that timing shares no cache line; it is added to the others' when the thread ends.

use base::clock::Clock;
use base::sync::{Mutex, rank};
use hdrhistogram::Histogram;
use serde_json::{Map, Value};

use crate::Error;
use crate::contract::Spread;

/// Longest latency that is told apart from others, in nanoseconds.
const LONGEST_NS: u64 = 60_000_000_000;

/// Samples above a quantile, at least, for it to say anything.
const ABOVE: f64 = 10.0;

/// So many of all took at most this long, in microseconds; no number where too few took longer.
pub fn quantile_us(times: &Histogram<u64>, quantile: f64) -> f64 {
    // By whole samples: 1 - 0.99 is a little more than a hundredth.
    match (times.len() as f64 * (1.0 - quantile)).round() < ABOVE {
        true => f64::NAN,
        false => times.value_at_quantile(quantile) as f64 / 1e3,
    }
}

/// The median of what all windows have; nothing where one has no number.
pub fn put_median(extra: &mut Map<String, Value>, key: &str, values: impl Iterator<Item = f64>) {
    let values: Vec<f64> = values.collect();
    if values.iter().all(|value| value.is_finite()) {
        extra.insert(key.to_owned(), Value::from(Spread::of(values).median));
    }
}

/// Latencies of one window in nanoseconds.
pub struct Latencies {
    clock: Clock,
    all: Mutex<Histogram<u64>>,
}

/// Those of one thread, given to all when it ends.
pub struct Own<'a> {
    of: &'a Latencies,
    times: Histogram<u64>,
}

fn histogram() -> Histogram<u64> {
    // The bounds are constants that it takes.
    Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("bounds of a histogram")
}

impl Latencies {
    pub fn new() -> Latencies {
        Latencies {
            clock: Clock::real(),
            all: Mutex::new(rank::LEAF, histogram()),
        }
    }

    /// For the calling thread.
    pub fn own(&self) -> Own<'_> {
        Own {
            of: self,
            times: histogram(),
        }
    }

    /// What threads that have ended measured.
    pub fn summary(self) -> Summary {
        let times = self.all.into_inner();
        let us = |quantile| quantile_us(&times, quantile);
        Summary {
            operations: times.len(),
            p50_us: us(0.5),
            p99_us: us(0.99),
            p999_us: us(0.999),
        }
    }
}

impl Own<'_> {
    /// Times one operation.
    pub fn time(&mut self, body: impl FnOnce() -> Result<(), Error>) -> Result<u64, Error> {
        let start = self.of.clock.monotonic_ns();
        body()?;
        self.times
            .saturating_record(self.of.clock.monotonic_ns() - start);
        Ok(1)
    }
}

impl Drop for Own<'_> {
    fn drop(&mut self) {
        // Both have the same bounds, so that nothing is out of range.
        let added = self.of.all.lock().add(&self.times);
        debug_assert!(added.is_ok());
    }
}

/// The operations of a window, and how long half, 99 % and 99.9 % of them took at most, in microseconds: no number where
/// fewer than ten took longer.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    pub operations: u64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_all_threads_count_once_they_end() {
        let all = Latencies::new();
        for _ in 0..2 {
            let mut own = all.own();
            for _ in 0..5000 {
                assert_eq!(own.time(|| Ok(())).unwrap(), 1);
            }
            assert!(own.time(|| Err(Error::Interrupted)).is_err());
        }
        let summary = all.summary();
        assert_eq!(summary.operations, 10_000);
        assert!(summary.p50_us <= summary.p99_us && summary.p99_us <= summary.p999_us);
    }

    #[test]
    fn a_quantile_with_fewer_than_ten_samples_above_it_is_left_out() {
        let mut times = histogram();
        for ns in 1..1000 {
            times.record(ns * 1000).unwrap();
        }
        assert!(quantile_us(&times, 0.5).is_finite());
        times.record(1_000_000).unwrap();
        assert!(quantile_us(&times, 0.99) > 980.0);
        assert!(quantile_us(&times, 0.999).is_nan());
        let mut extra = Map::new();
        put_median(&mut extra, "p99_us", [1.0, 3.0, 2.0].into_iter());
        put_median(&mut extra, "p999_us", [1.0, f64::NAN, 2.0].into_iter());
        assert_eq!(extra["p99_us"], 2.0);
        assert!(!extra.contains_key("p999_us"));
    }
}

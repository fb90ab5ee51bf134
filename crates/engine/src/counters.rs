//! What a running store counts for whoever watches it.
//!
//! Only what waits for a device, or is done once for many operations, is counted: a commit, a checkpoint, a delay, a
//! flush. An operation alone counts nothing, so it writes no line for this that another core writes.

use crate::written::BytesWritten;
use base::atomic::{AtomicU64, Ordering};
use base::sync::{Mutex, rank};
use base::thread::lane;
use hdrhistogram::Histogram;

use crate::sum::Padded;

/// Recorders that do not wait for each other.
const PARTS: usize = 4;
/// Significant decimal digits of a value.
const DIGITS: u8 = 2;

/// Values that are recorded while the store runs, in the logarithmic buckets of a high dynamic range histogram.
#[derive(Debug)]
pub struct Distribution {
    parts: Box<[Padded<Mutex<Values>>]>,
}

#[derive(Debug)]
struct Values {
    histogram: Histogram<u64>,
    sum: u64,
    max: u64,
}

/// What a [`Distribution`] has at one moment. Quantiles are within 1 % of what was recorded; count, sum and maximum are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub count: u64,
    pub sum: u64,
    /// Half of the values are at most this.
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

impl Values {
    fn new() -> Values {
        // Takes memory for the values that come, up to the largest.
        let histogram = Histogram::new(DIGITS).expect("so many digits are allowed");
        Values {
            histogram,
            sum: 0,
            max: 0,
        }
    }
}

impl Default for Distribution {
    fn default() -> Self {
        let part = |_| Padded(Mutex::new(rank::LEAF, Values::new()));
        Distribution {
            parts: (0..PARTS).map(part).collect(),
        }
    }
}

impl Distribution {
    pub fn record(&self, value: u64) {
        let mut part = self.parts[lane() % PARTS].lock();
        // It grows for any value, unless there is no memory for that.
        if part.histogram.record(value).is_err() {
            part.histogram.saturating_record(value);
        }
        part.sum = part.sum.saturating_add(value);
        part.max = part.max.max(value);
    }

    pub fn summary(&self) -> Summary {
        let mut all = Values::new();
        for part in &self.parts {
            let part = part.lock();
            // It grows as far as that part has.
            all.histogram
                .add(&part.histogram)
                .expect("a histogram that grows takes all values");
            all.sum = all.sum.saturating_add(part.sum);
            all.max = all.max.max(part.max);
        }
        // A bucket is known by its upper end.
        let at = |quantile| all.histogram.value_at_quantile(quantile).min(all.max);
        Summary {
            count: all.histogram.len(),
            sum: all.sum,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: all.max,
        }
    }
}

/// How often something made operations wait, and how long in all.
#[derive(Debug, Default)]
pub(crate) struct Delays {
    count: AtomicU64,
    ns: AtomicU64,
}

impl Delays {
    pub fn add(&self, ns: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn get(&self) -> Waits {
        Waits {
            count: self.count.load(Ordering::Relaxed),
            ns: self.ns.load(Ordering::Relaxed),
        }
    }
}

/// Operations that waited, and nanoseconds for which they did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    pub count: u64,
    pub ns: u64,
}

/// What the store counts beside the journal.
#[derive(Debug, Default)]
pub(crate) struct StoreCounts {
    /// Nanoseconds from the start of a checkpoint to its end.
    pub checkpoints: Distribution,
    pub checkpoint_nodes: AtomicU64,
    pub cleaned_segments: AtomicU64,
    /// Operations slowed down because a checkpoint was near.
    pub paced: Delays,
    /// Operations that waited for a checkpoint, or made it.
    pub stalled: Delays,
    pub data_flushes: AtomicU64,
    pub checkpoint_flushes: AtomicU64,
    pub data_durably: AtomicU64,
    pub checkpoint_durably: AtomicU64,
    pub cleaned_bytes: AtomicU64,
}

/// What a store has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounters {
    /// Bytes of metadata, by cause.
    pub written: BytesWritten,
    /// Operations that were logged.
    pub records: u64,
    /// Nanoseconds that a batch of the journal took, with the flush before it.
    pub batches: Summary,
    /// Records of a batch.
    pub batch_records: Summary,
    /// Bytes of a batch, with its header and padding.
    pub batch_bytes: Summary,
    /// Nanoseconds that a checkpoint took.
    pub checkpoints: Summary,
    /// Nodes that checkpoints wrote.
    pub checkpoint_nodes: u64,
    pub cleaned_segments: u64,
    /// Bytes that these had live and checkpoints wrote again: what cleaning costs.
    pub cleaned_bytes: u64,
    pub paced: Waits,
    pub stalled: Waits,
    /// Flushes of devices, by who issued them: for data alone. Others that waited share them.
    pub data_flushes: u64,
    /// Before a batch of the journal.
    pub journal_flushes: u64,
    /// Before a checkpoint's record.
    pub checkpoint_flushes: u64,
    /// Writes that were durable by themselves: of data.
    pub data_durably: u64,
    /// Of batches of the journal.
    pub journal_durably: u64,
    /// Of checkpoint records.
    pub checkpoint_durably: u64,
}

impl StoreCounts {
    /// All but what the journal and the segments know.
    pub fn get(&self) -> StoreCounters {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        StoreCounters {
            checkpoints: self.checkpoints.summary(),
            checkpoint_nodes: get(&self.checkpoint_nodes),
            cleaned_segments: get(&self.cleaned_segments),
            paced: self.paced.get(),
            stalled: self.stalled.get(),
            data_flushes: get(&self.data_flushes),
            checkpoint_flushes: get(&self.checkpoint_flushes),
            data_durably: get(&self.data_durably),
            checkpoint_durably: get(&self.checkpoint_durably),
            cleaned_bytes: get(&self.cleaned_bytes),
            ..StoreCounters::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_all_threads_are_in_a_summary() {
        let distribution = Distribution::default();
        base::thread::parallel(4, |thread| {
            for value in 1..=250 {
                distribution.record(thread as u64 * 250 + value);
            }
        });
        let summary = distribution.summary();
        assert_eq!((summary.count, summary.sum), (1000, 500_500));
        let near = |value: u64, wanted: u64| value.abs_diff(wanted) * 100 <= wanted;
        assert!(
            near(summary.p50, 500) && near(summary.p99, 990),
            "{summary:?}"
        );
        assert_eq!(summary.max, 1000);
    }

    #[test]
    fn the_largest_value_is_kept_and_nothing_is_a_summary() {
        let distribution = Distribution::default();
        assert_eq!(distribution.summary(), Summary::default());
        distribution.record(u64::MAX);
        distribution.record(0);
        let summary = distribution.summary();
        assert_eq!((summary.count, summary.sum), (2, u64::MAX));
        assert_eq!(summary.max, u64::MAX);
        let one = Distribution::default();
        one.record(1_234_567);
        let summary = one.summary();
        assert_eq!((summary.p50, summary.p999), (1_234_567, 1_234_567));
        assert_eq!((summary.max, summary.sum), (1_234_567, 1_234_567));
    }
}

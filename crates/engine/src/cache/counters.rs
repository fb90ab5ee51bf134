//! What a page cache counts: each thread in a lane of its own, without telling others.

use crate::sum::Padded;
use base::atomic::{AtomicU64, Ordering};
use base::thread::lane;

/// More threads share lanes, and may lose a count when they count at once.
const LANES: usize = 64;

macro_rules! counters {
    ($($name:ident),*) => {
        /// Counters since the cache was made.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct CacheCounters {
            $(pub $name: u64,)*
        }

        /// What the threads of one lane have counted.
        #[derive(Debug, Default)]
        pub(super) struct Lane {
            $($name: AtomicU64,)*
        }

        impl Counters {
            pub fn all(&self) -> CacheCounters {
                let sum = |of: fn(&Lane) -> &AtomicU64| {
                    self.0.iter().map(|lane| of(lane).load(Ordering::Relaxed)).sum()
                };
                CacheCounters {
                    $($name: sum(|lane| &lane.$name),)*
                }
            }
        }

        impl Lane {
            $(pub fn $name(&self) {
                // Nobody else counts here, so this need not be one step.
                self.$name.store(self.$name.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            })*
        }
    };
}

counters!(
    hits, misses, ahead, inserted, evicted, written, cleaned, no_room
);

#[derive(Debug)]
pub(super) struct Counters(Box<[Padded<Lane>]>);

impl Counters {
    pub fn new() -> Counters {
        Counters((0..LANES).map(|_| Padded::default()).collect())
    }

    /// That of the calling thread.
    #[inline]
    pub fn mine(&self) -> &Lane {
        &self.0[lane() % LANES]
    }
}

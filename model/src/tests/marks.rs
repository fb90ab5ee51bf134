//! A thread that waits for a count to pass one mark after the other, and those who count.

use super::check;
use crate::mark::Mark;
use base::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;

struct Counted {
    mark: Mark,
    count: AtomicUsize,
}

impl Counted {
    fn new() -> Arc<Counted> {
        Arc::new(Counted {
            mark: Mark::new(),
            count: AtomicUsize::new(0),
        })
    }

    fn count(&self) {
        let before = self.count.fetch_add(1, Relaxed);
        self.mark.counted(before + 1);
    }

    fn await_past(&self, at: usize) -> bool {
        self.mark.await_past(at, || self.count.load(Relaxed))
    }
}

/// Fails as a deadlock without the fence of either side, and when the mark is put there once before the thread sleeps
/// instead of each time: a wake for the first mark, that comes late, takes away the second.
#[test]
fn who_waits_for_a_count_is_woken_by_who_takes_it_past_the_mark() {
    check(3, || {
        let counted = Counted::new();
        let others = [(); 2].map(|()| {
            let counted = Arc::clone(&counted);
            loom::thread::spawn(move || counted.count())
        });
        assert!(counted.await_past(0));
        assert!(counted.await_past(1));
        for other in others {
            other.join().unwrap();
        }
    });
}

/// Fails as a deadlock when it is not told of the end.
#[test]
fn who_waits_for_a_count_that_stays_ends_when_it_is_stopped() {
    check(3, || {
        let counted = Counted::new();
        let other = {
            let counted = Arc::clone(&counted);
            loom::thread::spawn(move || {
                counted.count();
                counted.mark.standby.stop();
            })
        };
        counted.await_past(0);
        assert!(!counted.await_past(1));
        other.join().unwrap();
    });
}

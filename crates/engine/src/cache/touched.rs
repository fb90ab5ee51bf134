//! Memory behind frames before they are given out: who fills a frame for the first time waits for the kernel to find a page and clear it
//! otherwise, and on a virtual machine for its host to do the same, longer than it takes to copy what goes into it.
//!
//! A thread of its own has that done for the frames that come next. Frames are given out in order, so those are the ones behind the last.
//!
//! Invariants:
//! 1. It is ahead by [`LEAD`] frames at most, and by no more than were given out: so a cache that was never used takes nothing, and one that stops
//!    growing has no more than twice what it uses, all of it within its limit.
//! 2. It sleeps until half of its lead is used up ([`mark`](super::mark)).
//! 3. What is in a frame stays as it is: it does not matter whether somebody fills it meanwhile.

use super::PageCache;
use super::mark::Mark;
use base::atomic::{AtomicUsize, Ordering};
use base::mapping::large_pages_are_usual;
use format::BLOCK_SIZE;
use std::ops::Range;

/// Frames that are ahead, at most: of 8 MiB.
const LEAD: usize = 2048;
/// Frames that are given out before anything is done.
const FIRST: usize = 64;
/// Frames at a time: where others catch up with it, it goes on behind them soon. And where heaps cannot grow meanwhile
/// ([`Mapping::touch`](base::mapping::Mapping::touch)), they can soon.
const STEP: usize = 8;

#[derive(Debug)]
pub(super) struct Touched {
    pub mark: Mark,
    /// There is memory behind the frames before this one, or they were given out.
    end: AtomicUsize,
}

impl Touched {
    pub fn new() -> Touched {
        Touched {
            mark: Mark::new(),
            end: AtomicUsize::new(0),
        }
    }

    #[cfg(test)]
    pub fn end(&self) -> usize {
        self.end.load(Ordering::Relaxed)
    }
}

/// How far ahead it is when so many frames were given out.
fn lead(given: usize) -> usize {
    given.min(LEAD)
}

/// The frames that are next, if there is something to do.
fn next(end: usize, given: usize, capacity: usize) -> Option<Range<usize>> {
    let most = (given + lead(given)).min(capacity);
    // What was given out is the business of who has it.
    let start = end.max(given);
    (given >= FIRST && start < most).then(|| start..(start + STEP).min(most))
}

/// It is woken when more frames than these are given out, after it has nothing to do.
fn mark(end: usize, given: usize) -> usize {
    end.saturating_sub(lead(given) / 2).max(FIRST)
}

impl PageCache {
    /// Whether [`keep_touched`](Self::keep_touched) is of use: there is a CPU for it, the kernel does not give a large page, which takes long, to whoever touches a small one, and this
    /// is no world of a simulation, which knows no such cost.
    pub fn may_be_touched(&self) -> bool {
        !base::thread::is_scheduled() && base::thread::cpu_count() > 1 && !large_pages_are_usual()
    }

    /// Has memory put behind the frames that are given out next until [`stop_keeping`](Self::stop_keeping), or all have some: for a thread
    /// that does nothing else.
    pub fn keep_touched(&self) {
        let given = || self.given.load(Ordering::Relaxed);
        let (frames, touched) = (self.frames.mapping(), &self.touched);
        let mut end = 0;
        while end < self.capacity() && !touched.mark.standby.is_stopped() {
            let now = given();
            if let Some(range) = next(end, now, self.capacity()) {
                end = range.end;
                frames.touch(range.start * BLOCK_SIZE..range.end * BLOCK_SIZE);
                touched.end.store(end, Ordering::Relaxed);
                // Else whoever is woken on this CPU waits for the kernel's next tick.
                base::thread::yield_now();
                continue;
            }
            if now >= self.capacity() {
                return;
            }
            if !touched.mark.await_past(mark(end, now), given) {
                return;
            }
        }
    }

    /// Ends what keeps memory large, and what touches it.
    pub fn stop_keeping(&self) {
        self.large.stop();
        self.touched.mark.standby.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever is given out meanwhile: it never goes too far, always gets on, and sleeps only where it will be woken in time.
    #[test]
    fn it_is_ahead_by_no_more_than_its_lead_and_wakes_before_that_is_used_up() {
        let capacity = 5 * LEAD + 3;
        for pace in [1, 7, STEP, 63, 1000, 4 * LEAD] {
            let (mut end, mut given) = (0, 0);
            while given < capacity {
                while let Some(range) = next(end, given, capacity) {
                    assert!(range.start >= end && range.start >= given && !range.is_empty());
                    end = range.end;
                    assert!(
                        end <= capacity && end - given <= lead(given),
                        "{end}, {given}"
                    );
                }
                if given >= FIRST && end < capacity {
                    assert_eq!(end, given + lead(given));
                    let mark = mark(end, given);
                    assert!((given..end).contains(&mark), "{mark} of {given}..{end}");
                    assert!(
                        next(end, mark + 1, capacity).is_some(),
                        "it is woken for something"
                    );
                }
                given += pace;
            }
        }
        assert_eq!(next(0, FIRST - 1, capacity), None);
    }
}

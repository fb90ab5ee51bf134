//! Memory behind frames before they are given out: who fills a frame for the first time waits for the kernel to find a page and clear it
//! otherwise, and on a virtual machine for its host to do the same, longer than it takes to copy what goes into it.
//!
//! A thread of its own has that done for the frames that come next. Frames are given out in order, so those are the ones behind the last.
//!
//! Invariants:
//! 1. It is ahead by [`LEAD`] frames at most, and by no more than were given out: so an idle cache takes nothing, and a busy one little that it
//!    would not take in a moment, all of it within its limit.
//! 2. It sleeps until half of its lead is used up. Who is given the frame `mark` wakes it; nobody does twice, and a call that is missed is made
//!    up for by who is given the next frame.
//! 3. What is in a frame stays as it is: it does not matter whether somebody fills it meanwhile.

use super::PageCache;
use super::standby::Standby;
use base::atomic::{AtomicUsize, Ordering};
use format::BLOCK_SIZE;
use std::io;
use std::time::Duration;

/// Frames that are ahead, at most: of 8 MiB.
const LEAD: usize = 2048;
/// Frames that are given out before anything is done.
const FIRST: usize = 64;
/// Frames of a call. Heaps cannot grow meanwhile, and where others catch up with it, it goes on behind them soon.
const STEP: usize = 8;
/// Until it goes on when the kernel had no memory.
const AGAIN: Duration = Duration::from_millis(100);
/// No frame has that number.
const NONE: usize = usize::MAX;

#[derive(Debug)]
pub(super) struct Touched {
    pub standby: Standby,
    /// Who is given this frame, or one behind it, wakes the thread.
    mark: AtomicUsize,
}

impl Touched {
    pub fn new() -> Touched {
        Touched {
            standby: Standby::new(),
            mark: AtomicUsize::new(NONE),
        }
    }

    /// A frame was given out, by this number.
    #[inline]
    pub fn given(&self, frame: usize) {
        if frame >= self.mark.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if self.mark.swap(NONE, Ordering::Relaxed) != NONE {
            self.standby.notify();
        }
    }
}

/// How far ahead it is when so many frames were given out.
fn lead(given: usize) -> usize {
    given.min(LEAD)
}

impl PageCache {
    /// Whether [`keep_touched`](Self::keep_touched) is of use: there is a CPU for it, and no world of a simulation, which knows no such cost.
    pub fn may_be_touched(&self) -> bool {
        !base::thread::is_scheduled() && base::thread::cpu_count() > 1
    }

    /// Has memory put behind the frames that are given out next until [`stop_keeping`](Self::stop_keeping), or all have some, or the kernel
    /// refuses: for a thread that does nothing else.
    pub fn keep_touched(&self) {
        let given = || self.counts.given.load(Ordering::Relaxed);
        let (frames, touched) = (self.frames.mapping(), &self.touched);
        let mut end = 0;
        while end < self.capacity() && !touched.standby.is_stopped() {
            let now = given();
            if now >= FIRST && end < now + lead(now) {
                // What was given out is the business of who has it.
                let start = end.max(now).min(self.capacity());
                end = (start + STEP).min(self.capacity());
                match frames.populate(start * BLOCK_SIZE..end * BLOCK_SIZE) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
                    Err(error) => {
                        tracing::debug!("no memory for the page cache ahead of its use: {error}");
                        touched.standby.pause(AGAIN);
                    }
                }
                continue;
            }
            let mark = (end.saturating_sub(lead(now) / 2)).max(FIRST);
            touched.mark.store(mark, Ordering::Relaxed);
            if !touched.standby.await_that(|| given() > mark) {
                return;
            }
        }
    }

    /// Ends what keeps memory large, and what touches it.
    pub fn stop_keeping(&self) {
        self.large.stop();
        self.touched.standby.stop();
    }
}

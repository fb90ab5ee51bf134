//! The word of a lock that is held for a moment. Checked by `model/`.
//!
//! Why: each locked instruction costs what a dozen others do, and waits for all stores before it. A mutex takes two, as who gives it back
//! has to see in the same step whether somebody sleeps. Here that is a plain store and then a look: whoever goes to sleep between the two may not be
//! seen, and sleeps for a bounded time.
//!
//! Invariants:
//! 1. One thread at a time has it: who finds it free takes it in the same step, and who takes it sees all that was done before it was
//!    given back.
//! 2. Who sleeps has said so before, and looks at the word again then. Who gives the word back looks whether anybody has said so afterwards. One of the
//!    two may see what was before, as the store may be under way still: so nobody sleeps longer than a time that is given.

use base::atomic::Ordering;
use base::atomic::of_locks::{AtomicBool, AtomicU32};
use std::sync::atomic::compiler_fence;

#[derive(Debug)]
pub struct Word {
    pub taken: AtomicBool,
    /// Threads that sleep, or are about to.
    pub sleeping: AtomicU32,
}

impl Word {
    #[inline]
    pub fn try_take(&self) -> bool {
        let (free, taken) = (false, true);
        let done = (self.taken).compare_exchange(free, taken, Ordering::Acquire, Ordering::Relaxed);
        done.is_ok()
    }

    /// [`try_take`](Self::try_take) for who tries again and again: as long as another has the word its line is not written.
    #[inline]
    pub fn try_again(&self) -> bool {
        !self.is_taken() && self.try_take()
    }

    #[inline]
    pub fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed)
    }

    /// Calls `sleep`, which is over when somebody gives the word back, and if nobody says so, in a bounded time (invariant 2). Then try again.
    pub fn sleep(&self, sleep: impl FnOnce()) {
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        sleep();
        self.sleeping.fetch_sub(1, Ordering::Relaxed);
    }

    /// The caller has taken it. `wake` wakes one of those that sleep.
    #[inline]
    pub fn give_back(&self, wake: impl FnOnce()) {
        self.taken.store(false, Ordering::Release);
        // The processor may have it otherwise, for a moment; the compiler for as long as it likes.
        compiler_fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) != 0 {
            wake();
        }
    }
}

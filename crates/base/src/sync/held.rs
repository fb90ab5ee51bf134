//! Which locks a thread holds.
//!
//! Debug builds keep the held locks per thread and panic at the first violation of the order of [`rank`](super::rank), so
//! that an order that could deadlock fails in every test run that executes it, not only in the unlucky one.
//!
//! 1. The order is checked before a thread waits for a lock. One that it gets without waiting may come in any order.
//! 2. A lock is released by the thread that took it.
//! 3. A thread that ends may take locks when its list of them is gone already, for what its other thread-locals let go: those are not checked.

use super::Rank;
#[cfg(feature = "simulate")]
use crate::sched::On;

/// Debug-build proof that this thread holds a lock; a no-op in release builds. Dropped after
/// the lock is given back, so in simulation builds it tells the scheduler so, and in builds that
/// record the recorder.
#[derive(Debug)]
pub(super) struct Held {
    #[cfg(debug_assertions)]
    rank: Rank,
    #[cfg(debug_assertions)]
    key: u64,
    #[cfg(any(feature = "simulate", feature = "trace"))]
    lock: usize,
}

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Shared,
    /// Shared, without a word of the lock written.
    Entered,
    Exclusive,
}

#[cfg(debug_assertions)]
thread_local! {
    static HELD: std::cell::RefCell<Vec<(Rank, u64)>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Looks at the calling thread's list, or does nothing (invariant 3).
#[cfg(debug_assertions)]
fn with_held(look: impl FnOnce(&mut Vec<(Rank, u64)>)) {
    // An error says that it is gone.
    let _gone = HELD.try_with(|held| look(&mut held.borrow_mut()));
}

impl Held {
    /// Before waiting for a lock: the order must allow it.
    #[inline(always)]
    #[cfg_attr(feature = "trace", track_caller)]
    pub(super) fn take(rank: Rank, key: u64, lock: usize, mode: Mode) -> Self {
        Self::check(rank, key);
        Self::record(rank, key, lock, mode)
    }

    #[inline(always)]
    pub(super) fn check(_rank: Rank, _key: u64) {
        #[cfg(debug_assertions)]
        with_held(|held| {
            for &(other, other_key) in held.iter() {
                let ordered = other.level < _rank.level
                    || (other.level == _rank.level && (_rank.owned || other_key < _key));
                assert!(
                    ordered,
                    "lock order: taking {} {_key} (level {}) while holding {} {other_key} (level {})",
                    _rank.name(),
                    _rank.level,
                    other.name(),
                    other.level
                );
            }
        });
    }

    /// Records a lock taken without waiting: it cannot deadlock, whatever the order.
    #[inline(always)]
    #[cfg_attr(feature = "trace", track_caller)]
    pub(super) fn record(_rank: Rank, _key: u64, _lock: usize, _mode: Mode) -> Self {
        #[cfg(feature = "trace")]
        crate::trace::locked(
            match _mode {
                Mode::Shared => crate::trace::Kind::LockShared,
                Mode::Entered => crate::trace::Kind::LockEntered,
                Mode::Exclusive => crate::trace::Kind::LockExclusive,
            },
            _lock,
            _rank.name(),
            std::panic::Location::caller(),
        );
        #[cfg(debug_assertions)]
        with_held(|held| held.push((_rank, _key)));
        Held {
            #[cfg(debug_assertions)]
            rank: _rank,
            #[cfg(debug_assertions)]
            key: _key,
            #[cfg(any(feature = "simulate", feature = "trace"))]
            lock: _lock,
        }
    }
}

#[cfg(any(debug_assertions, feature = "simulate", feature = "trace"))]
impl Drop for Held {
    fn drop(&mut self) {
        #[cfg(debug_assertions)]
        with_held(|held| {
            let last = held
                .iter()
                .rposition(|&(r, k)| r == self.rank && k == self.key);
            // A guard dropped on another thread than the one that took it would be found here.
            let index = last.expect("a lock is released by the thread that took it");
            held.remove(index);
        });
        #[cfg(feature = "trace")]
        crate::trace::unlocked(self.lock);
        #[cfg(feature = "simulate")]
        if crate::sched::active() {
            crate::sched::wake_all(On::Lock(self.lock));
            crate::sched::point();
        }
    }
}

/// Takes a lock: by `wait`, or under the seeded scheduler by trying again each time it is
/// given back, so that the thread that holds it can run meanwhile.
#[inline(always)]
pub(super) fn acquire<G>(
    _lock: usize,
    _attempt: impl Fn() -> Option<G>,
    wait: impl Fn() -> G,
) -> G {
    #[cfg(feature = "simulate")]
    if crate::sched::active() {
        crate::sched::point();
        loop {
            if let Some(guard) = _attempt() {
                return guard;
            }
            crate::sched::block(On::Lock(_lock), None);
        }
    }
    wait()
}

/// Panics (debug builds) when the caller holds a lock of `rank` or a later one. Called
/// where a thread is about to wait for a commit or a checkpoint.
#[inline]
pub fn assert_none_held_from(_rank: Rank) {
    #[cfg(debug_assertions)]
    with_held(|held| {
        for &(other, key) in held.iter() {
            assert!(
                other.level < _rank.level,
                "waiting for the store while holding {} {key}",
                other.name()
            );
        }
    });
}

/// What the scheduler knows a lock by.
#[inline(always)]
pub(super) fn address<T>(lock: &T) -> usize {
    std::ptr::from_ref(lock).addr()
}

#[cfg(test)]
mod tests {
    use crate::sync::{Mutex, rank};
    use crate::thread;
    use std::cell::RefCell;
    use std::sync::Arc;

    /// What a program keeps for a thread, and takes a lock to let go of.
    struct Kept(Arc<Mutex<u32>>);

    impl Drop for Kept {
        fn drop(&mut self) {
            super::assert_none_held_from(rank::INODE);
            *self.0.lock() += 1;
        }
    }

    thread_local! {
        static KEPT: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
    }

    /// The process was aborted.
    #[test]
    fn a_thread_that_ends_may_take_locks_when_its_list_of_them_is_gone() {
        let count = Arc::new(Mutex::new(rank::LEAF, 0));
        for keeps_first in [true, false] {
            let count = Arc::clone(&count);
            // The list goes before what was there before it.
            let thread = thread::spawn("ends", move || {
                if !keeps_first {
                    drop(count.lock());
                }
                KEPT.with_borrow_mut(|kept| kept.push(Kept(Arc::clone(&count))));
                drop(count.lock());
            });
            thread.unwrap().join().unwrap();
        }
        assert_eq!(*count.lock(), 2);
    }
}

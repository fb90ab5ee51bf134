//! Locks with ranks.
//!
//! Every lock has a [`Rank`]. A thread takes locks in strictly growing rank; locks of one
//! rank are taken in growing `key` (a node's nid, a shard's index). Debug builds see to it (`held.rs`).
//!
//! The one list of ranks is [`rank`]; `docs/concurrency.md` says who takes each.
//!
//! Here are locks that one thread has alone, and conditions that it waits for while it has one. Readers of an [`RwLock`]
//! share it; references that each core counts by itself are [`Handle`]s.

mod handle;
mod held;
pub mod rank;
mod rwlock;

pub use handle::{Handle, OfCore};
pub use held::assert_none_held_from;
pub use rank::Rank;
pub use rwlock::{Keyed, OwnedReadGuard, OwnedWriteGuard, ReadGuard, RwLock, WriteGuard};

#[cfg(feature = "simulate")]
use crate::sched::On;
use held::{Held, Mode, acquire, address};
#[cfg(feature = "simulate")]
use std::mem::forget;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// Counted references to what several cores may touch.
#[cfg(feature = "trace")]
pub use crate::arc::Arc;
/// Counted references to what several cores may touch.
#[cfg(not(feature = "trace"))]
pub use std::sync::Arc;
/// For values that are made without waiting for anything.
pub use std::sync::OnceLock;

#[derive(Debug)]
pub struct Mutex<T: ?Sized> {
    rank: Rank,
    key: u64,
    inner: parking_lot::Mutex<T>,
}

#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    inner: parking_lot::MutexGuard<'a, T>,
    _held: Held,
}

impl<T> Mutex<T> {
    pub const fn new(rank: Rank, value: T) -> Self {
        Self::keyed(rank, 0, value)
    }

    /// A lock among several of one rank, ordered by `key`.
    pub const fn keyed(rank: Rank, key: u64, value: T) -> Self {
        Mutex {
            rank,
            key,
            inner: parking_lot::Mutex::new(value),
        }
    }

    pub fn into_inner(self) -> T {
        self.inner.into_inner()
    }

    #[cfg_attr(feature = "trace", track_caller)]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let lock = address(&self.inner);
        let held = Held::take(self.rank, self.key, lock, Mode::Exclusive);
        MutexGuard {
            inner: acquire(lock, || self.inner.try_lock(), || self.inner.lock()),
            _held: held,
        }
    }

    #[cfg_attr(feature = "trace", track_caller)]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = self.inner.try_lock()?;
        Some(MutexGuard {
            inner,
            _held: Held::record(self.rank, self.key, address(&self.inner), Mode::Exclusive),
        })
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    pub const fn new() -> Self {
        Condvar(parking_lot::Condvar::new())
    }

    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        #[cfg(feature = "simulate")]
        if crate::sched::active() {
            self.wait_as_task(guard, None);
            return;
        }
        self.0.wait(&mut guard.inner);
    }

    /// Waits at most `timeout`; true when it ran out.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) -> bool {
        #[cfg(feature = "simulate")]
        if crate::sched::active() {
            return self.wait_as_task(guard, Some(timeout));
        }
        self.0.wait_for(&mut guard.inner, timeout).timed_out()
    }

    /// The wait of a task: while it waits others take the lock, one at a time.
    #[cfg(feature = "simulate")]
    fn wait_as_task<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Option<Duration>) -> bool {
        let mutex = parking_lot::MutexGuard::mutex(&guard.inner);
        let lock = address(mutex);
        // SAFETY: the caller's guard holds the lock, and it is taken again, and that hold left
        // to the guard, before the guard is used again; `guard` is borrowed until then.
        unsafe { mutex.force_unlock() };
        crate::sched::wake_all(On::Lock(lock));
        let timed_out = crate::sched::block(On::Condition(address(self)), timeout);
        loop {
            if let Some(again) = mutex.try_lock() {
                forget(again);
                return timed_out;
            }
            crate::sched::block(On::Lock(lock), None);
        }
    }

    pub fn notify_one(&self) {
        #[cfg(feature = "simulate")]
        if crate::sched::active() {
            crate::sched::wake_one(On::Condition(address(self)));
            return;
        }
        self.0.notify_one();
    }

    pub fn notify_all(&self) {
        #[cfg(feature = "simulate")]
        if crate::sched::active() {
            crate::sched::wake_all(On::Condition(address(self)));
            return;
        }
        self.0.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_in_rank_order_are_taken() {
        let outer = Mutex::new(rank::INODE, 1);
        let inner = Mutex::new(rank::LEAF, 2);
        let a = outer.lock();
        let b = inner.lock();
        assert_eq!(*a + *b, 3);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "lock order")]
    fn a_lock_against_its_rank_panics() {
        let outer = Mutex::new(rank::INODE, 1);
        let inner = Mutex::new(rank::LEAF, 2);
        let _b = inner.lock();
        let _a = outer.lock();
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "lock order")]
    fn locks_of_one_rank_are_taken_by_key() {
        let low = Mutex::keyed(rank::INODE, 1, ());
        let high = Mutex::keyed(rank::INODE, 2, ());
        let _h = high.lock();
        let _l = low.lock();
    }
}

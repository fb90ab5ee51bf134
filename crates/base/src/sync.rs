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
mod latch;
pub mod rank;
mod rwlock;

pub use handle::{Handle, OfCore};
pub use held::assert_none_held_from;
pub use rank::Rank;
pub use rwlock::{
    Keyed, Look, OwnedReadGuard, OwnedWriteGuard, ReadGuard, RwLock, Unseen, WriteGuard,
};

#[cfg(feature = "simulate")]
use crate::sched::On;
use held::{Held, Mode, acquire, address};
use latch::RawLatch;
use parking_lot::lock_api::{self, RawMutex};
use std::fmt;
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

/// A lock that one thread has at a time.
pub type Mutex<T> = Alone<parking_lot::RawMutex, T>;
/// A [`Mutex`] for what is done in a moment, by threads that wait for nothing meanwhile but locks of that kind that come later: it costs one
/// locked instruction in the place of two, has no [`Condvar`], and is given to whoever comes first. See [`crate::latch`].
pub type Latch<T> = Alone<RawLatch, T>;

pub type MutexGuard<'a, T> = AloneGuard<'a, parking_lot::RawMutex, T>;
pub type LatchGuard<'a, T> = AloneGuard<'a, RawLatch, T>;

/// What [`Mutex`] and [`Latch`] have in common: `R` waits.
pub struct Alone<R, T: ?Sized> {
    rank: Rank,
    key: u64,
    inner: lock_api::Mutex<R, T>,
}

pub struct AloneGuard<'a, R: RawMutex, T: ?Sized> {
    inner: lock_api::MutexGuard<'a, R, T>,
    _held: Held,
}

impl<R: RawMutex, T: ?Sized + fmt::Debug> fmt::Debug for Alone<R, T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(out)
    }
}

impl<R: RawMutex, T: ?Sized + fmt::Debug> fmt::Debug for AloneGuard<'_, R, T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(out)
    }
}

impl<R: RawMutex, T> Alone<R, T> {
    pub const fn new(rank: Rank, value: T) -> Self {
        Self::keyed(rank, 0, value)
    }

    /// A lock among several of one rank, ordered by `key`.
    pub const fn keyed(rank: Rank, key: u64, value: T) -> Self {
        Alone {
            rank,
            key,
            inner: lock_api::Mutex::from_raw(R::INIT, value),
        }
    }

    pub fn into_inner(self) -> T {
        self.inner.into_inner()
    }

    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn lock(&self) -> AloneGuard<'_, R, T> {
        let lock = address(&self.inner);
        let held = Held::take(self.rank, self.key, lock, Mode::Exclusive);
        AloneGuard {
            inner: acquire(lock, || self.inner.try_lock(), || self.inner.lock()),
            _held: held,
        }
    }

    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn try_lock(&self) -> Option<AloneGuard<'_, R, T>> {
        let inner = self.inner.try_lock()?;
        Some(AloneGuard {
            inner,
            _held: Held::record(self.rank, self.key, address(&self.inner), Mode::Exclusive),
        })
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<R: RawMutex, T: ?Sized> Deref for AloneGuard<'_, R, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<R: RawMutex, T: ?Sized> DerefMut for AloneGuard<'_, R, T> {
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

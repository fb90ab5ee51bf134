//! Guards that keep their lock alive by themselves.
//!
//! 1. A guard owns one hold of its lock, got when it was made and given up only in `drop`.
//! 2. It gives its reference back last.

use super::super::Handle;
use super::super::held::{Held, Mode, acquire, address};
use super::{Keyed, RwLock, Unseen};
use crate::readers::Entry;
use std::mem::forget;
use std::ops::{Deref, DerefMut};

impl<T, H: Keyed> Handle<RwLock<T, H>> {
    /// A shared guard that keeps the lock alive by itself.
    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn read_owned(self) -> OwnedReadGuard<T, H> {
        let all: &RwLock<T, H> = &self;
        let lock = address(&all.inner);
        Held::check(all.rank, all.key());
        let entry = all.share();
        let mode = match &entry {
            Some(_) => Mode::Entered,
            None => Mode::Shared,
        };
        OwnedReadGuard {
            entry,
            _held: Held::record(all.rank, all.key(), lock, mode),
            lock: self,
        }
    }

    /// An exclusive guard that keeps the lock alive by itself.
    ///
    /// # Safety
    /// As of [`RwLock::write_past`].
    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub unsafe fn write_owned_past(self, past: impl FnOnce(&H)) -> OwnedWriteGuard<T, H> {
        let all: &RwLock<T, H> = &self;
        let lock = address(&all.inner);
        let held = Held::take(all.rank, all.key(), lock, Mode::Exclusive);
        forget(acquire(
            lock,
            || all.inner.try_write(),
            || all.inner.write(),
        ));
        let guard = OwnedWriteGuard {
            _held: held,
            lock: self,
        };
        past(&guard.lock.header);
        guard.lock.revoke();
        guard
    }

    /// An exclusive guard that keeps the lock alive by itself, if nobody holds the lock: it
    /// waits for nobody but who looks, so its rank does not matter.
    ///
    /// # Safety
    /// As of [`RwLock::write_past`].
    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub unsafe fn try_write_owned_past(
        self,
        past: impl FnOnce(&H),
    ) -> Option<OwnedWriteGuard<T, H>> {
        let lock = address(&self.inner);
        // Dropped after the guard: who waits meanwhile is told that the lock is free.
        let held;
        let guard = self.inner.try_write()?;
        held = Held::record(self.rank, self.key(), lock, Mode::Exclusive);
        past(&self.header);
        if !self.try_revoke() {
            return None;
        }
        forget(guard);
        Some(OwnedWriteGuard {
            _held: held,
            lock: self,
        })
    }

    /// An exclusive guard of a lock that nobody else can reach yet: it never waits, so its rank
    /// does not matter.
    ///
    /// # Safety
    /// Nobody finds the lock, to [`look`](RwLock::look), before the lock under which that is done has been taken.
    #[cfg_attr(feature = "trace", track_caller)]
    pub unsafe fn write_owned_unordered(self) -> OwnedWriteGuard<T, H> {
        // SAFETY: nobody looks at it.
        unsafe { self.try_write_owned_past(|_| {}) }.expect("nobody else can reach this lock yet")
    }
}

impl<T, H: Unseen> Handle<RwLock<T, H>> {
    /// An exclusive guard that keeps the lock alive by itself.
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn write_owned(self) -> OwnedWriteGuard<T, H> {
        // SAFETY: nobody looks at such a lock's value without it.
        unsafe { self.write_owned_past(|_| {}) }
    }
}

/// See `read_owned` of a lock's handle. Stays on the thread that made it.
#[derive(Debug)]
pub struct OwnedReadGuard<T, H = ()> {
    /// Instead of a hold of the underlying lock.
    entry: Option<Entry<'static>>,
    // Before the reference, which is given back last.
    _held: Held,
    lock: Handle<RwLock<T, H>>,
}

/// See `write_owned_past` of a lock's handle. Stays on the thread that made it.
#[derive(Debug)]
pub struct OwnedWriteGuard<T, H = ()> {
    // Before the reference, which is given back last.
    _held: Held,
    lock: Handle<RwLock<T, H>>,
}

impl<T, H> OwnedReadGuard<T, H> {
    pub fn lock(&self) -> &Handle<RwLock<T, H>> {
        &self.lock
    }
}

impl<T, H> OwnedWriteGuard<T, H> {
    pub fn lock(&self) -> &Handle<RwLock<T, H>> {
        &self.lock
    }
}

impl<T, H> Deref for OwnedReadGuard<T, H> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard owns one shared hold of the lock or an entry into it, got in `read_owned`
        // and given up only in `drop`, so no writer exists while the reference lives.
        unsafe { &*self.lock.inner.data_ptr() }
    }
}

impl<T, H> Deref for OwnedWriteGuard<T, H> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard owns the exclusive hold taken when it was made.
        unsafe { &*self.lock.inner.data_ptr() }
    }
}

impl<T, H> DerefMut for OwnedWriteGuard<T, H> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard owns the exclusive hold taken when it was made, and `&mut self`
        // makes this the only reference derived from it.
        unsafe { &mut *self.lock.inner.data_ptr() }
    }
}

impl<T, H> Drop for OwnedReadGuard<T, H> {
    #[inline]
    fn drop(&mut self) {
        if self.entry.take().is_none() {
            // SAFETY: `read_owned` took this shared hold and forgot its borrowed guard.
            unsafe { self.lock.inner.force_unlock_read() }
        }
    }
}

impl<T, H> Drop for OwnedWriteGuard<T, H> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `write_owned_past` took this exclusive hold and forgot its borrowed guard.
        unsafe { self.lock.inner.force_unlock_write() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{Arc, rank};
    use super::super::READERS;
    use super::*;

    #[test]
    fn readers_and_writers_of_many_threads_exclude_each_other() {
        let lock = Handle::common(Arc::new(RwLock::new(rank::INODE, (0u64, 0u64))));
        let seen_crowded = crate::thread::parallel(4, |i| {
            let mut crowded = 0;
            for round in 0..20_000 {
                // A core's view changes with where the machine runs the thread; here it need not.
                lock.bias.count(i, &READERS);
                if i == 0 && round % 50 == 0 {
                    let mut pair = lock.clone().write_owned();
                    pair.0 += 1;
                    pair.1 += 1;
                } else {
                    let pair = lock.clone().read_owned();
                    assert_eq!(pair.0, pair.1);
                    crowded += u32::from(pair.entry.is_some());
                }
            }
            crowded
        });
        assert_eq!(*lock.read(), (400, 400));
        assert!(seen_crowded.iter().sum::<u32>() > 0);
    }

    #[test]
    fn an_owned_guard_releases_on_drop() {
        let lock = Handle::common(Arc::new(RwLock::new(rank::INODE, 7)));
        {
            let mut guard = lock.clone().write_owned();
            *guard += 1;
            assert!(lock.try_read().is_none());
        }
        assert_eq!(*lock.clone().read_owned(), 8);
        assert!(lock.try_write().is_some());
    }
}

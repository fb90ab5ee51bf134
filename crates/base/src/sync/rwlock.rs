//! Locks that readers share.
//!
//! Readers of an [`RwLock`] that many cores read write no line that others write ([`crate::readers`]).
//!
//! 1. Who has a lock shared has a shared hold of the underlying lock, or an entry instead.
//! 2. Who has it exclusively has the underlying lock exclusively, and has waited for those who had entered: nobody enters meanwhile.
//! 3. Who *looks* ([`RwLock::look`]) at what a lock protects holds neither. Whoever takes the underlying lock exclusively then waits until no look is
//!    under way that may have come before (`past`), and each later one finds it taken.

mod owned;

pub use owned::{OwnedReadGuard, OwnedWriteGuard};

use super::Rank;
use super::held::{Held, Mode, acquire, address};
use crate::canary::{Canary, planted};
use crate::readers::{Bias, Entry, Readers};
#[cfg(feature = "simulate")]
use crate::sched::On;
use crate::thread::lane;
use std::mem::forget;
use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// Cores whose readers have places of their own.
const CORES: usize = 256;

/// Of all reader-writer locks.
static READERS: LazyLock<Readers> = LazyLock::new(|| Readers::new(CORES));

/// Waits for readers that have entered a lock: a turn of a loop.
struct Patience {
    spins: u32,
    _lock: usize,
}

/// Turns after which readers are taken to wait for something themselves, a device for example.
const LONG: u32 = 1000;

impl Patience {
    fn new(lock: usize) -> Patience {
        Patience {
            spins: 0,
            _lock: lock,
        }
    }

    fn wait(&mut self) {
        #[cfg(feature = "simulate")]
        if crate::sched::active() {
            // As it gives the lock back, each reader wakes whoever waits for it.
            crate::sched::block(On::Lock(self._lock), None);
            return;
        }
        crate::thread::spin(&mut self.spins);
        if self.spins > LONG {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// What a lock's header knows of the lock's place among those of its rank.
pub trait Keyed {
    fn key(&self) -> u64;
}

/// A header of locks at which nobody looks (invariant 3).
pub trait Unseen: Keyed {}

impl Unseen for () {}
impl Unseen for u64 {}

/// One of its rank alone.
impl Keyed for () {
    fn key(&self) -> u64 {
        0
    }
}

/// A key and nothing else.
impl Keyed for u64 {
    fn key(&self) -> u64 {
        *self
    }
}

/// A reader-writer lock with a rank, and a header `H` that is readable without the lock and orders locks of one rank. In
/// this order in memory: what who takes the lock does not look at, and then the end of the header, the lock and what it
/// protects together.
#[derive(Debug)]
#[repr(C)]
pub struct RwLock<T, H = ()> {
    pub header: H,
    rank: Rank,
    bias: Bias,
    inner: parking_lot::RwLock<T>,
}

/// How a lock is held shared.
#[derive(Debug)]
enum Share<'a, T> {
    Taken(parking_lot::RwLockReadGuard<'a, T>),
    Entered {
        value: &'a T,
        _entry: Entry<'static>,
    },
}

#[derive(Debug)]
pub struct ReadGuard<'a, T> {
    share: Share<'a, T>,
    _held: Held,
}

/// What [`RwLock::look`] lets one see.
#[derive(Debug)]
pub struct Look<'a, T> {
    value: &'a T,
    _held: Held,
}

#[derive(Debug)]
pub struct WriteGuard<'a, T> {
    inner: parking_lot::RwLockWriteGuard<'a, T>,
    _held: Held,
}

impl<T> RwLock<T> {
    pub fn new(rank: Rank, value: T) -> Self {
        Self::with_header(rank, (), value)
    }
}

impl<T, H: Keyed> RwLock<T, H> {
    pub fn with_header(rank: Rank, header: H, value: T) -> Self {
        RwLock {
            header,
            rank,
            bias: Bias::of(lane()),
            inner: parking_lot::RwLock::new(value),
        }
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub fn key(&self) -> u64 {
        self.header.key()
    }

    /// Whether many cores read it and none writes; a hint.
    pub fn is_crowded(&self) -> bool {
        self.bias.is_on()
    }

    #[cfg_attr(feature = "trace", track_caller)]
    pub fn read(&self) -> ReadGuard<'_, T> {
        let lock = address(&self.inner);
        Held::check(self.rank, self.key());
        let (share, mode) = match self.share() {
            Some(entry) => {
                // SAFETY: while the entry lives no writer gets the value (invariants 1 and 2 of `readers`),
                // and the guard drops it last.
                let value = unsafe { &*self.inner.data_ptr() };
                let share = Share::Entered {
                    value,
                    _entry: entry,
                };
                (share, Mode::Entered)
            }
            None => {
                // SAFETY: `share` has taken a shared hold and left it to the caller.
                let taken = unsafe { self.inner.make_read_guard_unchecked() };
                (Share::Taken(taken), Mode::Shared)
            }
        };
        ReadGuard {
            share,
            _held: Held::record(self.rank, self.key(), lock, mode),
        }
    }

    /// Enters, if many cores read; else takes the underlying lock shared and leaves that hold to the caller.
    #[inline]
    fn share(&self) -> Option<Entry<'static>> {
        let core = lane();
        if self.bias.is_left_to(core) {
            self.take_shared();
            return None;
        }
        self.share_among(core)
    }

    #[inline]
    fn take_shared(&self) {
        let lock = address(&self.inner);
        forget(acquire(
            lock,
            || self.inner.try_read(),
            || self.inner.read(),
        ));
    }

    #[inline(never)]
    fn share_among(&self, core: usize) -> Option<Entry<'static>> {
        if self.bias.is_on() {
            #[cfg(feature = "simulate")]
            crate::sched::point();
            if let Some(entry) = self.bias.enter(&READERS, core) {
                return Some(entry);
            }
        }
        self.take_shared();
        self.bias.count(core, &READERS);
        None
    }

    /// Waits for those who entered; the caller has the underlying lock exclusively.
    #[inline]
    fn revoke(&self) {
        if self.bias.is_written() {
            self.await_readers();
        }
        self.assert_alone();
    }

    /// A writer is alone. Tasks take turns between whole steps, so none is seen that takes its entry back.
    #[inline(always)]
    fn assert_alone(&self) {
        #[cfg(feature = "simulate")]
        if crate::sched::active() {
            let alone = !self.bias.is_entered(&READERS);
            assert!(
                alone,
                "{} {} is written while somebody reads",
                self.rank.name(),
                self.key()
            );
        }
    }

    #[cold]
    fn await_readers(&self) {
        if !planted(Canary::ReadersNotAwaited) {
            let mut patience = Patience::new(address(&self.inner));
            self.bias.turn_off(&READERS, || patience.wait());
        }
    }

    /// The same without waiting; false if somebody has entered.
    #[inline]
    fn try_revoke(&self) -> bool {
        let alone = !self.bias.is_written() || self.bias.try_turn_off(&READERS);
        if alone {
            self.assert_alone();
        }
        alone
    }

    /// Takes the lock exclusively, and waits by `past` for looks (invariant 3).
    ///
    /// # Safety
    /// `past` takes the lock, for a moment, that is held by who may [`look`](Self::look).
    #[cfg_attr(feature = "trace", track_caller)]
    pub unsafe fn write_past(&self, past: impl FnOnce(&H)) -> WriteGuard<'_, T> {
        let lock = address(&self.inner);
        let held = Held::take(self.rank, self.key(), lock, Mode::Exclusive);
        let inner = acquire(lock, || self.inner.try_write(), || self.inner.write());
        past(&self.header);
        self.revoke();
        WriteGuard { inner, _held: held }
    }

    /// What the lock protects, without a hold of it, for the core that read last; `None` while somebody has it exclusively, or readers
    /// enter. It writes nothing.
    ///
    /// # Safety
    /// As long as the look lasts the caller holds a lock that every `past` with which this one is taken exclusively takes, too, and without which nobody
    /// finds this one that was locked when it was made.
    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub unsafe fn look(&self) -> Option<Look<'_, T>> {
        if !self.bias.is_left_to(lane()) || self.inner.is_locked_exclusive() {
            return None;
        }
        // What was written under the last exclusive hold was before it was seen to be over.
        fence(Ordering::Acquire);
        let held = Held::record(self.rank, self.key(), address(&self.inner), Mode::Entered);
        #[cfg(feature = "trace")]
        crate::trace::tried();
        Some(Look {
            // SAFETY: whoever takes the lock exclusively from now on waits for the lock that the caller holds.
            value: unsafe { &*self.inner.data_ptr() },
            _held: held,
        })
    }

    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        let inner = self.inner.try_read()?;
        let held = Held::record(self.rank, self.key(), address(&self.inner), Mode::Shared);
        #[cfg(feature = "trace")]
        crate::trace::tried();
        Some(ReadGuard {
            share: Share::Taken(inner),
            _held: held,
        })
    }

    /// [`try_read`](Self::try_read) for the core that read last, if readers do not enter; nothing is counted then. `None` for
    /// others: they have to `read`.
    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn try_read_again(&self) -> Option<ReadGuard<'_, T>> {
        match self.bias.is_left_to(lane()) {
            true => self.try_read(),
            false => None,
        }
    }
}

impl<T, H: Unseen> RwLock<T, H> {
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn write(&self) -> WriteGuard<'_, T> {
        // SAFETY: nobody looks at such a lock's value without it.
        unsafe { self.write_past(|_| {}) }
    }

    #[cfg_attr(feature = "trace", track_caller)]
    pub fn try_write(&self) -> Option<WriteGuard<'_, T>> {
        let inner = self.inner.try_write()?;
        if !self.try_revoke() {
            return None;
        }
        Some(WriteGuard {
            inner,
            _held: Held::record(self.rank, self.key(), address(&self.inner), Mode::Exclusive),
        })
    }
}

impl<T> Deref for Look<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        match &self.share {
            Share::Taken(guard) => guard,
            Share::Entered { value, .. } => value,
        }
    }
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

#[cfg(test)]
mod tests {
    use super::super::rank;
    use super::*;
    use crate::readers::CORES_LEAST;

    #[test]
    fn who_read_last_reads_again_without_waiting() {
        let lock = RwLock::new(rank::INODE, 7);
        assert_eq!(lock.try_read_again().map(|value| *value), Some(7));
        let (reader, again) = (lock.read(), lock.try_read_again());
        assert!(again.is_some());
        drop((reader, again));
        let writer = lock.write();
        assert!(lock.try_read_again().is_none());
        drop(writer);
        // Another core reads, and counts; whoever read before has to count, too.
        let elsewhere = || lock.try_read_again().is_none() && *lock.read() == 7;
        let counted = std::thread::scope(|scope| scope.spawn(elsewhere).join());
        assert!(counted.unwrap() && lock.try_read_again().is_none());
        assert_eq!(*lock.read(), 7);
        assert!(lock.try_read_again().is_some());
        assert!(crowded(1).try_read_again().is_none());
    }

    /// A lock that readers enter, as it is after reads by several cores.
    fn crowded(key: u64) -> RwLock<u32, u64> {
        let lock = RwLock::with_header(rank::INODE, key, 0);
        for core in 0..CORES.max(CORES_LEAST) + 1 {
            lock.bias.count(core % 2, &READERS);
        }
        assert!(lock.is_crowded());
        lock
    }

    #[test]
    fn who_enters_a_lock_keeps_writers_out() {
        let lock = crowded(1);
        let first = lock.read();
        assert!(matches!(first.share, Share::Entered { .. }));
        assert!(
            lock.inner.try_write().is_some(),
            "the underlying lock is free"
        );
        assert!(lock.try_write().is_none() && lock.is_crowded());
        drop(first);
        *lock.try_write().unwrap() += 1;
        assert!(!lock.is_crowded());
        let second = lock.read();
        assert!(matches!(second.share, Share::Taken(_)) && *second == 1);
    }

    #[test]
    fn a_lock_that_is_read_and_written_in_turn_has_no_crowd() {
        let lock = RwLock::new(rank::INODE, 0);
        for round in 0..10_000 {
            // Each core reads twice before it writes.
            lock.bias.count(round, &READERS);
            lock.bias.count(round + 1, &READERS);
            match round % 2 {
                0 => *lock.write() += 1,
                _ => *lock.try_write().unwrap() += 1,
            }
            assert!(!lock.is_crowded());
        }
    }

    #[test]
    fn more_locks_than_a_core_has_places_are_taken_as_usual() {
        let locks: Vec<RwLock<u32, u64>> = (0..20).map(crowded).collect();
        let guards: Vec<_> = locks.iter().map(RwLock::read).collect();
        let entered = |guard: &&ReadGuard<'_, u32>| matches!(guard.share, Share::Entered { .. });
        let count = guards.iter().filter(entered).count();
        assert!((1..20).contains(&count), "{count} entered");
        assert!(locks.iter().all(|lock| lock.try_write().is_none()));
        drop(guards);
        assert!(locks.iter().all(|lock| lock.try_write().is_some()));
    }
}

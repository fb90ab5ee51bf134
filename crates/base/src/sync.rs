//! Locks with ranks.
//!
//! Every lock has a [`Rank`]. A thread takes locks in strictly growing rank; locks of one
//! rank are taken in growing `key` (a node's nid, a shard's index). Debug builds keep the
//! held locks per thread and panic at the first violation, so that an order that could
//! deadlock fails in every test run that executes it, not only in the unlucky one.
//! Ranks marked *owned* may be taken in any order among themselves: they belong to an
//! object whose own lock (of a lower rank) is held meanwhile.
//!
//! The one list of ranks is [`rank`]; `docs/concurrency.md` says who takes each.
//!
//! Readers of an [`RwLock`] that many cores read write no line that others write ([`crate::readers`]), and
//! neither do they for their references, if each core has a count of its own ([`Handle`]).

use crate::canary::{Canary, planted};
use crate::readers::{Bias, Entry, Readers};
#[cfg(feature = "simulate")]
use crate::sched::On;
use crate::thread::lane;
use std::mem::{ManuallyDrop, forget};
use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;
use std::time::Duration;

/// Counted references to what several cores may touch.
#[cfg(feature = "trace")]
pub use crate::arc::Arc;
/// Counted references to what several cores may touch.
#[cfg(not(feature = "trace"))]
pub use std::sync::Arc;
/// For values that are made without waiting for anything.
pub use std::sync::OnceLock;

/// A position in the lock order. Small: each node in memory has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    level: u16,
    /// Locks of this rank may be taken in any order among themselves.
    owned: bool,
}

impl Rank {
    /// What locks of this rank are for.
    pub fn name(self) -> &'static str {
        let named = rank::NAMES.iter().find(|(level, _)| *level == self.level);
        named.map_or("lock of a test", |(_, name)| name)
    }
}

/// The lock order of the whole project, outermost first.
pub mod rank {
    use super::Rank;

    /// Constants of ranks, and the list of their names.
    macro_rules! ranks {
        ($($(#[$doc:meta])* $constant:ident = $kind:ident($level:expr, $name:literal);)*) => {
            $($(#[$doc])* pub const $constant: Rank = $kind($level);)*
            pub(super) const NAMES: &[(u16, &str)] = &[$(($level, $name)),*];
        };
    }

    const fn ranked(level: u16) -> Rank {
        Rank {
            level,
            owned: false,
        }
    }
    const fn owned(level: u16) -> Rank {
        Rank { level, owned: true }
    }

    ranks! {
        MOUNT_SESSION = ranked(10, "mount session");
        MOUNT_HANDLES = ranked(12, "mount handle table");
        MOUNT_ATOMIC = ranked(14, "files with an atomic write");
        /// Held over the commit.
        ATOMIC_WRITE = ranked(16, "atomic write of a file");
        RENAME = ranked(30, "directory rename");
        IO_CONTEXT = ranked(32, "what somebody has in flight");
        /// Tried, never waited for.
        FILE_STREAM = ranked(34, "seat of a reader");
        FILE_BALANCE = ranked(36, "dirty page balance");
        FILE_FLUSH = ranked(38, "file write-back");
        FILE_IO = ranked(39, "file data range");
        /// Only ever one.
        FILE_BEHIND = ranked(40, "seat of a writer");
        /// Held for a look; who has a range holds no lock for it.
        FILE_RANGES = ranked(41, "ranges of files");
        FILE_TURN = ranked(42, "turn of write-back beside syncs");
        /// After all that a transaction takes before it begins; held while that waits for a checkpoint.
        LARGE_OPERATION = ranked(43, "large operation");
        COOKIES = ranked(44, "change cookies");
        /// After the file locks: an operation may have to wait for a checkpoint while it holds
        /// them, and a checkpoint takes none of them.
        CHECKPOINT = ranked(45, "checkpoint");
        INODE = ranked(50, "inode node");
        OWNED_NODE = owned(60, "node owned by an inode");
        SPACE_MAP = ranked(70, "space map node");
        FILE_STATE = ranked(80, "open file state");
        FILE_TABLE = ranked(82, "open file table shard");
        PAGE_SET = ranked(84, "page cache set");
        DIRTY_PAGES = ranked(86, "dirty page index shard");
        NID_LEASE = ranked(96, "nid lease");
        NODE_SHARD = ranked(100, "node cache shard");
        HELD_NODES = ranked(102, "nodes held by a core");
        TABLE = ranked(110, "node table region");
        TABLE_REGIONS = ranked(111, "node table regions in memory");
        TABLE_MAPS = ranked(112, "node table map pages");
        SPACE_LEASE = ranked(116, "chunk lease");
        SPACE_RELEASE = ranked(118, "release of freed blocks");
        ALLOCATOR = ranked(120, "chunk allocator");
        CHUNK_BITS = ranked(122, "available blocks of a chunk");
        SPACE_PENDING = ranked(124, "blocks freed and not yet durable");
        SEGMENTS = ranked(130, "segment table");
        GATHER = ranked(140, "journal gather");
        STAGING = ranked(150, "journal staging shard");
        DIRTY_LIST = ranked(160, "dirty list shard");
        COMMIT_STATE = ranked(170, "commit state");
        DEVICE_DOUBT = ranked(190, "durable write of data");
        DEVICE_FLUSH = ranked(200, "device flush");
        DEVICE_STATE = ranked(220, "device state");
        TALLY = ranked(240, "pending changes of a directory");
        LEDGER = ranked(300, "ledger of a simulated task");
        /// A lock that is never held while another is taken.
        LEAF = ranked(u16::MAX, "leaf");
    }
}

/// Debug-build proof that this thread holds a lock; a no-op in release builds. Dropped after
/// the lock is given back, so in simulation builds it tells the scheduler so, and in builds that
/// record the recorder.
#[derive(Debug)]
struct Held {
    #[cfg(debug_assertions)]
    rank: Rank,
    #[cfg(debug_assertions)]
    key: u64,
    #[cfg(any(feature = "simulate", feature = "trace"))]
    lock: usize,
}

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Shared,
    /// Shared, without a word of the lock written.
    Entered,
    Exclusive,
}

#[cfg(debug_assertions)]
thread_local! {
    static HELD: std::cell::RefCell<Vec<(Rank, u64)>> = const { std::cell::RefCell::new(Vec::new()) };
}

impl Held {
    /// Before waiting for a lock: the order must allow it.
    #[inline(always)]
    #[cfg_attr(feature = "trace", track_caller)]
    fn take(rank: Rank, key: u64, lock: usize, mode: Mode) -> Self {
        Self::check(rank, key);
        Self::record(rank, key, lock, mode)
    }

    #[inline(always)]
    fn check(_rank: Rank, _key: u64) {
        #[cfg(debug_assertions)]
        HELD.with_borrow(|held| {
            for &(other, other_key) in held.iter() {
                let ordered = other.level < _rank.level
                    || (other.level == _rank.level && (_rank.owned || other_key < _key));
                assert!(
                    ordered,
                    "lock order: taking {} {_key} (level {}) while holding {} {other_key} (level {})",
                    _rank.name(), _rank.level, other.name(), other.level
                );
            }
        });
    }

    /// Records a lock taken without waiting: it cannot deadlock, whatever the order.
    #[inline(always)]
    #[cfg_attr(feature = "trace", track_caller)]
    fn record(_rank: Rank, _key: u64, _lock: usize, _mode: Mode) -> Self {
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
        HELD.with_borrow_mut(|held| held.push((_rank, _key)));
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
        HELD.with_borrow_mut(|held| {
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
fn acquire<G>(_lock: usize, _attempt: impl Fn() -> Option<G>, wait: impl Fn() -> G) -> G {
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
    HELD.with_borrow(|held| {
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
fn address<T>(lock: &T) -> usize {
    std::ptr::from_ref(lock).addr()
}

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

    #[cfg_attr(feature = "trace", track_caller)]
    pub fn write(&self) -> WriteGuard<'_, T> {
        let lock = address(&self.inner);
        let held = Held::take(self.rank, self.key(), lock, Mode::Exclusive);
        let inner = acquire(lock, || self.inner.try_write(), || self.inner.write());
        self.revoke();
        WriteGuard { inner, _held: held }
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

/// A counted reference that belongs to one core, which counts it by itself.
#[derive(Debug)]
#[repr(align(128))]
pub struct OfCore<L>(Arc<L>);

/// A counted reference: one of all, or one that is counted where one core alone does so.
#[derive(Debug)]
pub struct Handle<L> {
    /// Counted here if there is no `own`; else the one that `own` has, so that nobody asks which of the two it is but who
    /// copies or drops it.
    all: ManuallyDrop<Arc<L>>,
    own: ManuallyDrop<Option<Arc<OfCore<L>>>>,
}

impl<L> Handle<L> {
    /// What references of one core share from now on.
    pub fn of_core(this: &Arc<L>) -> Arc<OfCore<L>> {
        Arc::new(OfCore(Arc::clone(this)))
    }

    /// One of all.
    #[inline]
    pub fn common(all: Arc<L>) -> Handle<L> {
        Handle {
            all: ManuallyDrop::new(all),
            own: ManuallyDrop::new(None),
        }
    }

    /// One of a core's own.
    pub fn own(own: Arc<OfCore<L>>) -> Handle<L> {
        // SAFETY: the copy lives as long as `own`, beside it, and is never dropped.
        let all = unsafe { std::ptr::read(&own.0) };
        Handle {
            all: ManuallyDrop::new(all),
            own: ManuallyDrop::new(Some(own)),
        }
    }

    /// Whether it is one of a core's own.
    pub fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// The reference of all.
    #[inline]
    pub fn all(&self) -> &Arc<L> {
        &self.all
    }

    #[inline(never)]
    fn clone_own(own: &Arc<OfCore<L>>) -> Handle<L> {
        Handle::own(Arc::clone(own))
    }

    #[inline(never)]
    fn drop_own(own: &mut ManuallyDrop<Option<Arc<OfCore<L>>>>) {
        // SAFETY: called by `drop` alone, once.
        unsafe { ManuallyDrop::drop(own) }
    }
}

impl<L> OfCore<L> {
    /// The reference of all.
    pub fn all(&self) -> &Arc<L> {
        &self.0
    }
}

impl<L> Clone for Handle<L> {
    #[inline]
    fn clone(&self) -> Self {
        match &*self.own {
            None => Handle::common(Arc::clone(&self.all)),
            Some(own) => Handle::clone_own(own),
        }
    }
}

impl<L> Drop for Handle<L> {
    #[inline]
    fn drop(&mut self) {
        match self.own.is_some() {
            // SAFETY: it is counted here, and not used afterwards.
            false => unsafe { ManuallyDrop::drop(&mut self.all) },
            true => Handle::drop_own(&mut self.own),
        }
    }
}

impl<L> Deref for Handle<L> {
    type Target = L;
    #[inline]
    fn deref(&self) -> &L {
        &self.all
    }
}

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
    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn write_owned(self) -> OwnedWriteGuard<T, H> {
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
        guard.lock.revoke();
        guard
    }

    /// An exclusive guard that keeps the lock alive by itself, if nobody holds the lock: it
    /// never waits, so its rank does not matter.
    #[inline]
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn try_write_owned(self) -> Option<OwnedWriteGuard<T, H>> {
        let guard = self.inner.try_write()?;
        if !self.try_revoke() {
            return None;
        }
        forget(guard);
        let lock = address(&self.inner);
        Some(OwnedWriteGuard {
            _held: Held::record(self.rank, self.key(), lock, Mode::Exclusive),
            lock: self,
        })
    }

    /// `write_owned` for a lock that nobody else can reach yet: it never waits, so its rank
    /// does not matter.
    #[cfg_attr(feature = "trace", track_caller)]
    pub fn write_owned_unordered(self) -> OwnedWriteGuard<T, H> {
        self.try_write_owned()
            .expect("nobody else can reach this lock yet")
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

/// See `read_owned` of a lock's handle. Stays on the thread that made it.
#[derive(Debug)]
pub struct OwnedReadGuard<T, H = ()> {
    /// Instead of a hold of the underlying lock.
    entry: Option<Entry<'static>>,
    // Before the reference, which is given back last.
    _held: Held,
    lock: Handle<RwLock<T, H>>,
}

/// See `write_owned` of a lock's handle. Stays on the thread that made it.
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
        // SAFETY: this guard owns the exclusive hold taken in `write_owned`.
        unsafe { &*self.lock.inner.data_ptr() }
    }
}

impl<T, H> DerefMut for OwnedWriteGuard<T, H> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard owns the exclusive hold taken in `write_owned`, and `&mut self`
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
        // SAFETY: `write_owned` took this exclusive hold and forgot its borrowed guard.
        unsafe { self.lock.inner.force_unlock_write() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::readers::CORES_LEAST;

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

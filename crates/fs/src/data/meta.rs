//! What is known of a file in use beyond its inode, behind a lock, and what of that is seen without it.
//! Checked by `model/`.
//!
//! Invariants:
//! 1. What [`Shown`] has is what [`Meta`] had when its lock was last given back. Whoever holds the file's I/O lock sees the size that
//!    is, and a write or read whose time is not after [`Meta::stamped`] or [`Meta::read_until`] would change
//!    no time: so those of many cores write nothing that all of them read, but once a tick.
//! 2. Who was shown a time of the file, and then read old content, is shown another one when that has changed. Who looks takes the file's time from
//!    [`Shown`], then a fence, and may then read a page, without a lock; who changes the content stamps the file, changes the
//!    page, then a fence, and looks at [`Shown`] again ([`MetaLock::stamp_again`]). Either the read has the new content, or the file gets another time.

use crate::times::{Stamp, Times};
use base::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering, fence};
use base::clock::Timestamp;
use base::sync::{Mutex, MutexGuard, rank};
use engine::Epoch;
use format::Nid;

/// How long the background leaves a file alone whose write-back has failed.
const RETRY_NS: u64 = 1_000_000_000;
/// How long it tries the write-back of a file that nobody has open: nobody is left who could react to the failure, and the pages take others' room.
const GIVE_UP_NS: u64 = 30_000_000_000;

/// Times that are newer than those in the inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NewTimes {
    pub atime: Option<Timestamp>,
    pub mtime: Option<Timestamp>,
    pub ctime: Option<Timestamp>,
    /// How often somebody has set times: what is logged of earlier ones settles none of later ones, were they the same.
    pub(super) sets: u64,
}

impl NewTimes {
    pub fn any(&self) -> bool {
        self.atime.is_some() || self.mtime.is_some() || self.ctime.is_some()
    }
}

/// A write-back failure that is remembered (promise 5 of the design).
#[derive(Clone, Debug, Default)]
pub(super) struct Failure {
    /// Failures so far.
    pub count: u64,
    /// The newest one.
    pub why: String,
    /// Somebody was told of the newest one, or nobody need be.
    pub reported: bool,
    /// Since somebody was told something was lost: no later try makes that good.
    pub lost: bool,
}

/// Batches of a file that were written in place. The counts only grow: whoever flushes knows by the one it saw before what
/// its flush is for, whatever others flushed, logged or wrote meanwhile.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InPlace {
    pub written: u64,
    /// How many of them a flush or the commit of a record made durable, or are known to be lost.
    flushed: u64,
    /// Failed flushes of the array before the first of the others.
    pub flush_failures: u64,
}

impl InPlace {
    pub fn unflushed(&self) -> bool {
        self.written > self.flushed
    }

    /// Another one, begun when this many flushes had failed.
    pub fn wrote(&mut self, flush_failures: u64) {
        if !self.unflushed() {
            self.flush_failures = flush_failures;
        }
        self.written += 1;
    }

    /// The first `written` are flushed.
    pub fn flushed(&mut self, written: u64) {
        self.flushed = self.flushed.max(written);
    }

    pub fn all_flushed(&mut self) {
        self.flushed = self.written;
    }
}

/// What is known of a file beyond its inode; see the module's invariants.
#[derive(Debug, Default)]
pub(super) struct Meta {
    /// The inode is being deleted: nothing is written back any more.
    pub dead: bool,
    pub size: u64,
    pub logged_size: u64,
    pub times: NewTimes,
    /// The newest stamp that the file was shown with, as far as its state knows.
    pub looked: Stamp,
    /// Monotonic time since which `times`, the size or `replaced` is ahead of the inode.
    pub ahead_since_ns: Option<u64>,
    /// Monotonic time at which times were last logged.
    pub persisted_ns: u64,
    /// The change time of the last change that may have logged nothing and wrote nothing over: one to the size that the file has, or of a
    /// range that is as it should be. The next sync has it in the inode, however short ago times were logged, and whoever logs it notes
    /// a change.
    pub owed: Option<Timestamp>,
    /// Modification and change time that the last sync left in memory alone.
    pub kept: (Option<Timestamp>, Option<Timestamp>),
    pub changed: Epoch,
    /// At least the epoch of the newest record of times alone, before they cease to be in `times`.
    pub times_logged: Epoch,
    pub in_place: InPlace,
    pub promised: u64,
    /// Blocks that pieces of a stream will have brought when they end.
    pub pending: u64,
    /// The logged content is superseded: the file was cut to nothing and is being rewritten.
    pub replaced: bool,
    /// The body must become extents, however small the file is.
    pub keep_extents: bool,
    /// A dirty page is in the inode, as it was when it was last synced, and the file has this number among those with such
    /// pages, or had it until it was taken to go home. A hint: it is none too early rather than one too long, which would hide the file there.
    pub logged: Option<u64>,
    /// A cut stopped half way: the inode has a pending truncate.
    pub cutting: bool,
    /// The time of the last change of content, which is the file's mtime and ctime, in memory or in the inode.
    /// `None`: somebody may have set one of them since, or was shown it, so that the next change must have a newer one.
    pub stamped: Option<Timestamp>,
    /// The last moment at which a read would leave the access time as it is. `None`: not known.
    pub read_until: Option<Timestamp>,
    pub failure: Failure,
    /// Monotonic time at which write-back of the file last failed. `None`: all that was dirty has gone home since.
    pub failing_ns: Option<u64>,
    /// And since when it has failed.
    pub failing_since_ns: Option<u64>,
}

impl Meta {
    pub fn is_ahead(&self) -> bool {
        !self.dead && (self.size != self.logged_size || self.times.any() || self.replaced)
    }

    /// The size, or all of the content, is ahead of the inode: their times go with them.
    pub fn content_is_ahead(&self) -> bool {
        self.replaced || self.size != self.logged_size
    }

    /// Notes that something is ahead of the inode from now on.
    pub fn ahead(&mut self, now_ns: u64) {
        self.ahead_since_ns.get_or_insert(now_ns);
    }

    /// The content is being rewritten from nothing from now on, whatever else has been ahead for longer: the old one stays that long.
    pub fn begin_replacement(&mut self, now_ns: u64) {
        (self.replaced, self.keep_extents) = (true, false);
        self.ahead_since_ns = Some(now_ns);
    }

    /// The new content is in the place of the old one, or given up.
    pub fn end_replacement(&mut self) {
        self.replaced = false;
        self.settle_ahead();
    }

    fn settle_ahead(&mut self) {
        if !self.is_ahead() {
            self.ahead_since_ns = None;
        }
    }

    /// Content changed at `now`, if no later change came first.
    fn touch(&mut self, now: Timestamp, now_ns: u64) {
        if self.stamped.is_some_and(|stamped| stamped >= now) {
            return;
        }
        self.times.mtime = Some(now);
        self.times.ctime = Some(now);
        self.times_changed();
        self.stamped = Some(now);
        self.ahead(now_ns);
    }

    /// The content changes now, and the file was shown with `looked` at most: the one place where a change of content gets its time.
    pub fn stamp(&mut self, times: &Times, now_ns: u64) {
        let now = times.after(self.looked);
        self.touch(now, now_ns);
    }

    /// Somebody is shown the file, with this time of the inode's if none is newer. Writers that look without the lock see that theirs must
    /// have another one.
    pub fn look(&mut self, ctime: Timestamp) {
        let ctime = self.times.ctime.unwrap_or(ctime);
        self.looked = self.looked.max(ctime.into());
        let stale = |stamped: &Timestamp| Stamp::from(*stamped) <= self.looked;
        if self.stamped.as_ref().is_some_and(stale) {
            self.stamped = None;
        }
    }

    /// A time of the file may be another one now, and not the time of a change of content.
    pub fn times_changed(&mut self) {
        self.stamped = None;
        self.read_until = None;
    }

    /// Something was changed otherwise than by writing over it, or found to be so already. A record of times alone that has the change's
    /// is one that the next sync waits for.
    pub fn owe_times(&mut self) {
        match self.times.ctime {
            Some(time) => self.owed = Some(time),
            None => self.changed = self.changed.max(self.times_logged),
        }
    }

    /// Times as logged are no longer ahead, unless they moved on meanwhile.
    pub fn logged_times(&mut self, logged: NewTimes) {
        if self.owed.is_some() && logged.ctime >= self.owed {
            self.changed = self.changed.max(self.times_logged);
            self.owed = None;
        }
        if self.times.sets != logged.sets {
            return;
        }
        let settle = |new: &mut Option<Timestamp>, old: Option<Timestamp>| {
            if *new == old {
                *new = None;
            }
        };
        settle(&mut self.times.atime, logged.atime);
        settle(&mut self.times.mtime, logged.mtime);
        settle(&mut self.times.ctime, logged.ctime);
        self.settle_ahead();
    }

    pub fn fail(&mut self, why: String) {
        // It may have been taken from the files with logged pages: the next fsync puts it there again.
        self.logged = None;
        self.failure = Failure {
            count: self.failure.count + 1,
            why,
            reported: false,
            lost: self.failure.lost && !self.failure.reported,
        };
    }

    /// Dirty pages could not be written; they are still there.
    pub fn fail_write_back(&mut self, why: String, now_ns: u64) {
        self.fail(why);
        self.failing_ns = Some(now_ns);
        self.failing_since_ns.get_or_insert(now_ns);
    }

    /// Nothing is left that could not be written: it has gone home, or is given up.
    pub fn fails_no_more(&mut self) {
        (self.failing_ns, self.failing_since_ns) = (None, None);
    }

    /// Its write-back has failed for as long as is tried for a file that nobody has open.
    pub fn failed_for_long(&self, now_ns: u64) -> bool {
        let long = |since| now_ns.saturating_sub(since) >= GIVE_UP_NS;
        self.failing_since_ns.is_some_and(long)
    }

    /// Nobody but who waits for it tries its write-back again now.
    pub fn failed_lately(&self, now_ns: u64) -> bool {
        let lately = |since| now_ns.saturating_sub(since) < RETRY_NS;
        self.failing_ns.is_some_and(lately)
    }

    /// Failures that whoever opens the file now does not report: somebody was told of them.
    pub fn forgiven(&self) -> u64 {
        self.failure.count - (self.failure.count > 0 && !self.failure.reported) as u64
    }
}

/// What of [`Meta`] is seen without its lock (invariant 1).
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) size: AtomicU64,
    dead: AtomicBool,
    /// In nanoseconds; [`NO_TIME`]: none.
    stamped: AtomicI64,
    read_until: AtomicI64,
}

const NO_TIME: i64 = i64::MIN;

fn ns_of(time: Option<Timestamp>) -> i64 {
    time.map_or(NO_TIME, Timestamp::ns)
}

/// [`Meta`] behind its lock.
#[derive(Debug)]
pub(super) struct MetaLock {
    inner: Mutex<Meta>,
    pub(super) shown: Shown,
}

/// The lock of a file's [`Meta`]. What others see without it is made to agree before it is given back, if it may have changed.
pub(super) struct MetaGuard<'a> {
    meta: MutexGuard<'a, Meta>,
    shown: &'a Shown,
    mutated: bool,
}

impl MetaLock {
    pub fn new(ino: Nid) -> MetaLock {
        MetaLock {
            inner: Mutex::keyed(rank::FILE_STATE, ino.0, Meta::default()),
            shown: Shown {
                size: AtomicU64::new(0),
                dead: AtomicBool::new(false),
                stamped: AtomicI64::new(NO_TIME),
                read_until: AtomicI64::new(NO_TIME),
            },
        }
    }

    /// What is known at first, of a state that nobody else knows yet; no times are.
    pub fn fill(&mut self, fill: impl FnOnce(&mut Meta)) {
        let meta = self.inner.get_mut();
        fill(meta);
        self.shown.size = AtomicU64::new(meta.size);
    }

    /// For who has it alone, without the lock.
    pub fn alone(&mut self) -> &Meta {
        self.inner.get_mut()
    }

    pub fn lock(&self) -> MetaGuard<'_> {
        MetaGuard {
            meta: self.inner.lock(),
            shown: &self.shown,
            mutated: false,
        }
    }

    pub fn try_lock(&self) -> Option<MetaGuard<'_>> {
        Some(MetaGuard {
            meta: self.inner.try_lock()?,
            shown: &self.shown,
            mutated: false,
        })
    }

    pub fn size(&self) -> u64 {
        self.shown.size.load(Ordering::Acquire)
    }

    pub fn is_dead(&self) -> bool {
        self.shown.dead.load(Ordering::Acquire)
    }

    /// Whether a change of content now needs to set no time.
    pub fn is_stamped(&self, now: Timestamp) -> bool {
        self.shown.stamped.load(Ordering::Acquire) >= ns_of(Some(now))
    }

    /// The content changes at `now`, but not the size. The file gets that time if its own is older, or a newer one if
    /// it was shown with that.
    pub fn stamp(&self, now: Timestamp, times: &Times, now_ns: impl FnOnce() -> u64) {
        if !self.is_stamped(now) {
            let now_ns = now_ns();
            self.lock().stamp(times, now_ns);
        }
    }

    /// As `stamp`, once the content has changed (invariant 2).
    pub fn stamp_again(&self, now: Timestamp, times: &Times, now_ns: impl FnOnce() -> u64) {
        fence(Ordering::SeqCst);
        self.stamp(now, times, now_ns);
    }

    /// Whether a read now leaves the access time as it is.
    pub fn is_read(&self, now: Timestamp) -> bool {
        self.shown.read_until.load(Ordering::Acquire) >= ns_of(Some(now))
    }
}

impl std::ops::Deref for MetaGuard<'_> {
    type Target = Meta;
    fn deref(&self) -> &Meta {
        &self.meta
    }
}

impl std::ops::DerefMut for MetaGuard<'_> {
    fn deref_mut(&mut self) -> &mut Meta {
        self.mutated = true;
        &mut self.meta
    }
}

impl Drop for MetaGuard<'_> {
    fn drop(&mut self) {
        if !self.mutated {
            return;
        }
        // Written under the lock alone; what does not change is not written, for those who read it.
        let Meta { size, dead, .. } = *self.meta;
        if self.shown.size.load(Ordering::Relaxed) != size {
            self.shown.size.store(size, Ordering::Release);
        }
        if self.shown.dead.load(Ordering::Relaxed) != dead {
            self.shown.dead.store(dead, Ordering::Release);
        }
        let set = |shown: &AtomicI64, time| {
            let ns = ns_of(time);
            let changed = shown.load(Ordering::Relaxed) != ns;
            if changed {
                shown.store(ns, Ordering::Release);
            }
            changed
        };
        set(&self.shown.read_until, self.meta.read_until);
        if set(&self.shown.stamped, self.meta.stamped) && self.meta.stamped.is_none() {
            // Invariant 2.
            fence(Ordering::SeqCst);
        }
    }
}

//! Timestamps: as coarse as the machine's ticks, and exact where somebody could tell. Checked by
//! `model/`.
//!
//! A change takes the time of the machine's last tick, so that the floor below changes once a tick, and not with
//! every operation of every core. But whoever looks at an inode twice must see by its times whether it
//! changed in between. So each inode in memory knows the newest stamp that it was shown with ([`Shown`]), and a
//! change that would get this one, or an older one, reads the exact clock.
//!
//! Invariants:
//! 1. A stamp is handed out only when the floor has come to it, and is no older than the floor was before. So
//!    no change gets an older stamp than another that had ended when it began, whichever files they are of, and
//!    even when the machine's clock steps back.
//! 2. A change of an inode gets a newer stamp than any that it was shown with before.
//!
//! A look and a change of one inode exclude one another, but for changes of a directory's names, which share
//! it: see `content/tally`, invariant 5; and for changes of a file's content, which stamp once more if somebody looked
//! meanwhile: see `data/meta`, invariant 2. An inode that was read from its image counts as shown: what had been shown when it
//! was last in memory is not known.

use base::atomic::{AtomicI64, Ordering};
use base::canary::{Canary, planted};
use base::clock::{Clock, Timestamp};

/// On a cache line of its own.
#[repr(align(128))]
#[derive(Debug)]
pub struct Times {
    clock: Clock,
    /// Nanoseconds since the epoch of the newest stamp.
    floor: AtomicI64,
}

impl Times {
    pub fn new(clock: Clock) -> Times {
        // Beyond what was exact at the end of the last use, however short ago that was.
        let floor = AtomicI64::new(clock.now().ns());
        Times { clock, floor }
    }

    /// The time for a change of what nobody has looked at.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_ns(self.tick())
    }

    /// The time for a change of what was shown with stamps up to this one: a newer one.
    #[inline]
    pub fn after(&self, shown: Stamp) -> Timestamp {
        let now = self.tick();
        Timestamp::from_ns(match shown.0 < now {
            true => now,
            false => self.exact(shown.0),
        })
    }

    /// The newest stamp that was handed out, in nanoseconds since the epoch.
    pub fn floor(&self) -> i64 {
        self.floor.load(Ordering::Relaxed)
    }

    fn tick(&self) -> i64 {
        let now = self.clock.now_coarse().ns();
        // Relaxed: the value is all that is shared, and it only grows: what was handed out before
        // an operation began is shown by it, or something newer.
        let floor = self.floor.load(Ordering::Relaxed);
        match floor < now {
            true => self.floor.fetch_max(now, Ordering::Relaxed).max(now),
            false => floor,
        }
    }

    /// Only here the floor goes beyond the machine's ticks.
    #[inline(never)]
    fn exact(&self, shown: i64) -> i64 {
        let floor = self.floor();
        let mut now = self.clock.now().ns().max(floor);
        if now <= shown {
            // The clock stepped back, or is no finer than that. A stamp that lies beyond the floor was not made
            // here: it was set by somebody, or when the clock was wrong. What comes now has to differ from it, and from all
            // that was made since.
            now = match shown <= floor {
                true => shown.saturating_add(1),
                false => now.max(floor.saturating_add(1)),
            };
            now = now.saturating_add(i64::from(now == shown));
        }
        if planted(Canary::FloorNotRaised) {
            return now;
        }
        self.floor.fetch_max(now, Ordering::Relaxed).max(now)
    }
}

/// A stamp as it is compared: nanoseconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp(i64);

impl Stamp {
    pub const NEVER: Stamp = Stamp(i64::MIN);
}

impl Default for Stamp {
    fn default() -> Stamp {
        Stamp::NEVER
    }
}

impl From<Timestamp> for Stamp {
    fn from(time: Timestamp) -> Stamp {
        Stamp(time.ns())
    }
}

/// The newest stamp that an inode was shown with. It is of the inode in memory: copies have it, images do
/// not, and for comparisons it does not count.
#[derive(Debug)]
pub struct Shown(AtomicI64);

impl Shown {
    /// Nobody was shown the inode.
    pub fn never() -> Shown {
        Shown(AtomicI64::new(Stamp::NEVER.0))
    }

    #[inline]
    pub fn get(&self) -> Stamp {
        // SeqCst, here and below: `content/tally`, invariant 5.
        Stamp(self.0.load(Ordering::SeqCst))
    }

    /// The inode is shown with this stamp. A look like those before writes nothing.
    #[inline]
    pub fn show(&self, stamp: Stamp) {
        if self.get() < stamp && !planted(Canary::LookForgotten) {
            self.0.fetch_max(stamp.0, Ordering::SeqCst);
        }
    }

    /// The stamp `beyond` was made by a clock that was ahead, or was set: what this use of the file system makes is older, and
    /// what it had shown so far is older than `now`. Unless somebody has looked since; whoever looks may put it there again.
    pub fn forget_beyond(&self, beyond: Stamp, now: Timestamp) {
        let before = now.ns().saturating_sub(1);
        // Another one may have come first, with a stamp that does as well.
        let _ = self
            .0
            .compare_exchange(beyond.0, before, Ordering::SeqCst, Ordering::SeqCst);
    }
}

impl Clone for Shown {
    fn clone(&self) -> Shown {
        Shown(AtomicI64::new(self.get().0))
    }
}

impl PartialEq for Shown {
    fn eq(&self, _: &Shown) -> bool {
        true
    }
}

impl Eq for Shown {}

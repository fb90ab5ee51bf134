//! Timestamps. One floor for the whole file system: a stamp is never older than one handed
//! out before, even when the machine's clock steps back.
//!
//! The clock is that of the machine's ticks, as kernel file systems have it, so the floor changes once a
//! tick, and not with every operation of every core. Invariant: a stamp is handed out only when the
//! floor has come to it.

use crate::api::AtimePolicy;
use crate::content::Inode;
use base::atomic::{AtomicI64, Ordering};
use base::clock::{Clock, Timestamp};

const NS: i64 = 1_000_000_000;
/// An access time older than this is renewed under the relative policy, in seconds.
const ATIME_AGE: i64 = 24 * 60 * 60;

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
        Times {
            clock,
            floor: AtomicI64::new(0),
        }
    }

    /// The time for a change that happens now.
    pub fn now(&self) -> Timestamp {
        let now = self.clock.now_coarse();
        let ns = now.sec.saturating_mul(NS).saturating_add(now.nsec as i64);
        // Relaxed: the value is all that is shared, and it only grows: what was handed out before
        // an operation began is seen by it, or something newer.
        let floor = self.floor.load(Ordering::Relaxed);
        let ns = match floor < ns {
            true => self.floor.fetch_max(ns, Ordering::Relaxed).max(ns),
            false => floor,
        };
        Timestamp {
            sec: ns.div_euclid(NS),
            nsec: ns.rem_euclid(NS) as u32,
        }
    }
}

/// Whether reading the inode now must renew its access time.
pub fn atime_due(policy: AtimePolicy, inode: &Inode, now: Timestamp) -> bool {
    match policy {
        AtimePolicy::Never => false,
        AtimePolicy::Always => inode.atime < now,
        AtimePolicy::Relative => {
            let changed = match inode.is_dir() {
                true => inode.counts().mtime.max(inode.counts().ctime),
                false => inode.mtime.max(inode.ctime),
            };
            inode.atime <= changed || now.sec.saturating_sub(inode.atime.sec) >= ATIME_AGE
        }
    }
}

//! Timestamps. One floor for the whole file system: a stamp is never older than one handed
//! out before, even when the machine's clock steps back.

use crate::api::AtimePolicy;
use crate::content::Inode;
use base::atomic::{AtomicI64, Ordering};
use base::clock::{Clock, Timestamp};

const NS: i64 = 1_000_000_000;
/// An access time older than this is renewed under the relative policy, in seconds.
const ATIME_AGE: i64 = 24 * 60 * 60;

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
        let now = self.clock.now();
        let ns = now.sec.saturating_mul(NS).saturating_add(now.nsec as i64);
        // Relaxed: the value is all that is shared; max makes it grow only.
        let ns = self.floor.fetch_max(ns, Ordering::Relaxed).max(ns);
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
            let (mtime, ctime) = inode.changed();
            inode.atime <= mtime.max(ctime) || now.sec.saturating_sub(inode.atime.sec) >= ATIME_AGE
        }
    }
}

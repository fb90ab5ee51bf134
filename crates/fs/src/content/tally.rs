//! What a directory gained since its inode was last changed: names, subdirectories, and the
//! time of the newest change, merged from operations that share the directory.
//!
//! Invariants:
//! 1. Operations add under the directory's shared lock; who holds it exclusively sees all of them.
//! 2. All were made after the last change of the inode itself, with clocks read under the lock. So
//!    the newest time replaces the inode's, whatever that is.
//! 3. `shape` grows under the locks of all nodes of the directory's tree that change with it, when names
//!    move between leaves under the shared lock. Who finds it unchanged after it has locked a leaf
//!    came to the right one.

use base::atomic::{AtomicU64, Ordering};
use base::clock::Timestamp;
use base::sync::{Mutex, rank};

/// A directory's change by names that come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally {
    pub names: i32,
    pub subdirs: i32,
    /// When the newest of them came or went.
    pub time: Timestamp,
}

impl Tally {
    /// Both one after the other, in either order.
    fn and(self, other: Tally) -> Tally {
        Tally {
            names: self.names.saturating_add(other.names),
            subdirs: self.subdirs.saturating_add(other.subdirs),
            time: self.time.max(other.time),
        }
    }
}

/// Pending changes of a directory; see the module's head.
#[derive(Debug)]
pub struct Pending {
    sum: Mutex<Option<Tally>>,
    shape: AtomicU64,
}

impl Default for Pending {
    fn default() -> Pending {
        Pending {
            sum: Mutex::new(rank::LEAF, None),
            shape: AtomicU64::new(0),
        }
    }
}

impl Pending {
    /// Adds to what is pending; true when nothing was.
    pub fn add(&self, tally: Tally) -> bool {
        let mut sum = self.sum.lock();
        let first = sum.is_none();
        *sum = Some(sum.map_or(tally, |sum| sum.and(tally)));
        first
    }

    pub fn sum(&self) -> Option<Tally> {
        *self.sum.lock()
    }

    /// Changes when names move between leaves (invariant 3).
    pub fn shape(&self) -> u64 {
        self.shape.load(Ordering::Acquire)
    }

    pub fn reshaped(&self) {
        self.shape.fetch_add(1, Ordering::Release);
    }
}

/// The pending changes of an inode; only directories have any. Equal if they come to the same.
#[derive(Debug, Default)]
pub struct Gains(Option<Box<Pending>>);

impl Gains {
    pub fn new(directory: bool) -> Gains {
        Gains(directory.then(Box::default))
    }

    pub fn get(&self) -> Option<&Pending> {
        self.0.as_deref()
    }

    pub fn take(&mut self) -> Option<Tally> {
        self.0.as_mut()?.sum.get_mut().take()
    }

    fn sum(&self) -> Option<Tally> {
        self.get()?.sum()
    }
}

impl Clone for Gains {
    fn clone(&self) -> Gains {
        let copy = |pending: &Pending| Pending {
            sum: Mutex::new(rank::LEAF, pending.sum()),
            shape: AtomicU64::new(pending.shape()),
        };
        Gains(self.get().map(copy).map(Box::new))
    }
}

impl PartialEq for Gains {
    fn eq(&self, other: &Gains) -> bool {
        self.sum() == other.sum()
    }
}

impl Eq for Gains {}

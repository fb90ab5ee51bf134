//! Requests that find no space while space is on its way.
//!
//! A program that has unlinked a file expects to have its space. The kernel gives the inode back a little later, in a request that nobody waits for. So who finds the array full waits for
//! inodes that are leaving, and tries again as often as one has gone. Half of the workers wait at most: others serve what brings the inodes.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::SheafOps;
use crate::ops::Errno;
use crate::options::MountOptions;

/// Those who wait.
#[derive(Debug)]
pub(super) struct Awaiting {
    now: AtomicUsize,
    most: usize,
}

impl Awaiting {
    pub fn new(options: &MountOptions) -> Awaiting {
        let workers = options.workers.unwrap_or(WORKERS);
        Awaiting {
            now: AtomicUsize::new(0),
            most: (workers / 2).max(1),
        }
    }
}

/// As many as there may be where nothing is said.
const WORKERS: usize = 16;

/// What may be tried again.
pub(super) trait Attempt {
    fn found_no_space(&self) -> bool;
}

impl<T> Attempt for std::result::Result<T, Errno> {
    fn found_no_space(&self) -> bool {
        matches!(self, Err(Errno::NOSPC))
    }
}

impl<T> Attempt for std::result::Result<T, fs::Error> {
    fn found_no_space(&self) -> bool {
        matches!(self, Err(fs::Error::NoSpace))
    }
}

impl SheafOps {
    /// The last of as many attempts as are worth it. One that finds no space may have made a part of it, as the next one does.
    pub(super) fn in_time<A: Attempt>(&self, mut attempt: impl FnMut() -> A) -> A {
        loop {
            let gone = self.fs.orphans_gone();
            let made = attempt();
            if !made.found_no_space() || !self.await_orphan(gone) {
                return made;
            }
        }
    }

    #[cold]
    fn await_orphan(&self, gone: u64) -> bool {
        let waiting = self.awaiting.now.fetch_add(1, Ordering::SeqCst);
        let is_gone = waiting < self.awaiting.most && self.fs.await_orphan(gone);
        self.awaiting.now.fetch_sub(1, Ordering::SeqCst);
        is_gone
    }
}

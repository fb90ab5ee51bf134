//! Which nids may have a state in a shard of the table of files, for who looks without its lock. Checked by `model/`.
//!
//! A nid has a place of [`PLACES`], with others, and a place counts the states of its nids.
//!
//! Invariants:
//! 1. A place counts a state before anybody else gets it, and until after it has left the table. Who has the shard's lock changes it.
//! 2. Who shows an inode under its shared lock marks it as shown, and then looks here; who makes a state of an inode that it has not locked alone counts
//!    it, then a fence, and takes from the inode what that was shown with. So either the first finds that there may be a state, or the second knows what
//!    was shown ([`times`](crate::times)). Who has the inode alone shows and makes it with nobody beside.

use base::atomic::{AtomicU32, Ordering};

/// So many that one in a few thousand files is seldom taken for another: two cache lines.
const PLACES: usize = 32;

/// Counts of states.
#[derive(Debug, Default)]
pub(super) struct Present([AtomicU32; PLACES]);

impl Present {
    /// Whether a nid of this shard may have a state; false is certain.
    #[inline]
    pub fn may_have(&self, nid: u64) -> bool {
        self.place(nid).load(Ordering::SeqCst) != 0
    }

    /// A nid gets a state.
    pub fn count(&self, nid: u64) {
        let place = self.place(nid);
        let states = place.load(Ordering::Relaxed);
        place.store(states + 1, Ordering::Release);
    }

    /// The state of a nid is gone.
    pub fn uncount(&self, nid: u64) {
        let place = self.place(nid);
        let states = place.load(Ordering::Relaxed);
        debug_assert!(states > 0, "no state of nid {nid} was counted");
        place.store(states - 1, Ordering::Release);
    }

    fn place(&self, nid: u64) -> &AtomicU32 {
        &self.0[nid as usize % PLACES]
    }
}

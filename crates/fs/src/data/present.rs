//! Which nids may have a state in a shard of the table of files, for who looks without its lock. Checked by `model/`.
//!
//! A nid has a place of [`PLACES`], with others, and a place counts the states of its nids.
//!
//! Invariants:
//! 1. A place counts a state before anybody else gets it, and until after it has left the table. Who has the shard's lock changes it.
//! 2. Whoever looks and learns that there is none knows that of states that began before, in an order that it has by itself: by the inode's lock, or by what told it
//!    of the file. Who shows an inode under its shared lock marks it as shown, and then looks here; who makes a state of an inode that it has not locked alone counts
//!    it, then a fence, and takes from the inode what that was shown with. So either the first finds that there may be a state, or the second knows what
//!    was shown ([`times`](crate::times)). Who has the inode alone shows and makes it with nobody beside.

use base::atomic::{AtomicU32, Ordering, fence};

/// So many that one in a few thousand files is seldom taken for another: two cache lines, which nothing else is on.
const PLACES: usize = 32;

/// Counts of states.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Present([AtomicU32; PLACES]);

impl Present {
    /// Whether a nid of this shard may have a state (invariant 2).
    #[inline]
    pub fn may_have(&self, nid: u64) -> bool {
        self.place(nid).load(Ordering::SeqCst) != 0
    }

    /// The same for who shows an inode, which `mark` notes.
    #[inline]
    pub fn may_have_after(&self, nid: u64, mark: impl FnOnce()) -> bool {
        mark();
        self.may_have(nid)
    }

    /// A nid is about to have a state.
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

    /// Whether exactly these nids are counted, while nobody changes that.
    pub fn agrees(&self, nids: impl Iterator<Item = u64>) -> bool {
        let mut counts = [0; PLACES];
        nids.for_each(|nid| counts[nid as usize % PLACES] += 1);
        let mut places = self.0.iter().zip(counts);
        places.all(|(place, count)| place.load(Ordering::Relaxed) == count)
    }

    fn place(&self, nid: u64) -> &AtomicU32 {
        &self.0[nid as usize % PLACES]
    }
}

/// What an inode was shown with, by `marked`, for the state that is made of it and counted.
#[inline]
pub(super) fn shown_before<T>(marked: impl FnOnce() -> T) -> T {
    fence(Ordering::SeqCst);
    marked()
}

//! Room for metadata that is promised before it is made, so that who stages much learns of a full array then, not at its commit.
//!
//! Invariants:
//! 1. `Store::growth_promised` is what all promises hold together.
//! 2. One is granted only while metadata, what is dirty, and all promises are within the limit of growth; whoever else makes metadata grow
//!    needs room beside all of them. The limit is of what data has not been promised. Data leaves them their room from the next checkpoint on
//!    ([`adapt_limits`](Store::adapt_limits)).
//! 3. Who holds one is not refused for want of room when it begins ([`Store::begin_large`]). Should the limit have fallen since, or more be needed
//!    than was estimated, that comes out of what metadata keeps free for cleaning, and is no more than what may be dirty at a time.
//! 4. Nor is it refused as too large, if it dirties no more than is reserved for a checkpoint (`DirtyNodes::limit`): of what it dirties [`TIMES`] as
//!    much is promised, and operations wait when a quarter of the room is dirty.
//! 5. Of what is free beyond the limit of growth a quarter is for changes that add little each, of which there can be many (attributes, extents of data), and another
//!    for what was accepted before by that measure and is logged later; the limit may have fallen since. All else is for checkpoints, cleaning and deletions: metadata that
//!    grew into that could be written no more, and the array could not even be mounted.

use crate::content::Content;
use crate::error::Error;
use crate::op::Need;
use crate::store::Store;
use base::atomic::Ordering;

/// Room for each byte that becomes dirty.
const TIMES: u64 = 4;
/// So much more than is asked for is promised while there is room: the count is shared by all threads.
const AHEAD: u64 = 64 << 10;

/// Room for metadata; until it is dropped.
#[derive(Debug)]
pub struct Growth<'s, C: Content> {
    store: &'s Store<C>,
    bytes: u64,
}

impl<C: Content> Growth<'_, C> {
    /// Has room promised for an operation that leaves so many bytes of metadata dirty. The caller holds no lock of nodes.
    ///
    /// # Errors
    /// [`Error::NoSpace`], after a look for room; what was promised before stays.
    pub fn cover(&mut self, dirty: usize) -> Result<(), Error> {
        let missing = (dirty as u64 * TIMES).saturating_sub(self.bytes);
        if missing == 0 || self.add(missing + AHEAD) || self.add(missing) {
            return Ok(());
        }
        self.store.find_room()?;
        match self.add(missing) {
            true => Ok(()),
            false => Err(Error::NoSpace),
        }
    }

    /// Only what is granted is ever in the count, but for a moment in which metadata grew: of two that want the last room, one has it.
    fn add(&mut self, bytes: u64) -> bool {
        let promised = &self.store.growth_promised;
        let with = |promised: u64| Some(promised + bytes).filter(|all| self.store.has_room(*all));
        while (promised.fetch_update(Ordering::SeqCst, Ordering::SeqCst, with)).is_ok() {
            if self.store.room_to_grow() {
                self.bytes += bytes;
                return true;
            }
            promised.fetch_sub(bytes, Ordering::SeqCst);
        }
        false
    }
}

impl<C: Content> Drop for Growth<'_, C> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            (self.store.growth_promised).fetch_sub(self.bytes, Ordering::SeqCst);
        }
    }
}

impl<C: Content> Store<C> {
    /// A promise of nothing yet.
    pub fn growth(&self) -> Growth<'_, C> {
        Growth {
            store: self,
            bytes: 0,
        }
    }

    /// Metadata can grow, beside what is promised, without coming near what checkpoints and deletions need.
    pub fn room_to_grow(&self) -> bool {
        self.has_room(self.growth_promised.load(Ordering::SeqCst))
    }

    /// The same, were so much promised.
    fn has_room(&self, promised: u64) -> bool {
        self.metadata_about() + promised <= self.growth_limit()
    }

    /// Before data is accepted for which metadata will grow when it is logged, as data of so many bytes of metadata does that waits already: invariant 5.
    /// The caller holds no lock of nodes.
    ///
    /// # Errors
    /// [`Error::NoSpace`], after a look for room.
    pub fn accept(&self, waiting: u64) -> Result<(), Error> {
        if self.may_accept(waiting) {
            return Ok(());
        }
        self.find_room()?;
        match self.may_accept(waiting) {
            true => Ok(()),
            false => Err(Error::NoSpace),
        }
    }

    /// The same, without a look for room where there is none.
    pub fn may_accept(&self, waiting: u64) -> bool {
        self.has_room_for(Need::Change, waiting)
    }

    /// Whether an operation of this need, beside so many bytes that are yet to be logged, leaves checkpoints the room that they want: invariant 5.
    pub(crate) fn has_room_for(&self, need: Need, waiting: u64) -> bool {
        let Some(share) = need.share() else {
            return true;
        };
        let (limit, capacity) = self.growth_bounds();
        let beyond = (capacity - limit) / 8 * share;
        let promised = self.growth_promised.load(Ordering::SeqCst);
        self.metadata_about() + promised + waiting <= limit + beyond
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestStore, format, options};
    use base::atomic::AtomicUsize;
    use base::thread::{parallel, yield_now};
    use device::sim::SimDevice;

    /// Each saw what the other had added to look, and both went away.
    #[test]
    fn of_two_that_want_the_last_room_one_has_it() {
        const ROUNDS: usize = 20_000;
        let (store, _) = TestStore::open(format(SimDevice::new(64 << 20, 1)), options()).unwrap();
        let room = store.space().growth_bytes;
        let (here, granted) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let meet = |times: usize| {
            here.fetch_add(1, Ordering::SeqCst);
            while here.load(Ordering::SeqCst) < 2 * times {
                yield_now();
            }
        };
        parallel(2, |_| {
            for round in 0..ROUNDS {
                let mut growth = store.growth();
                meet(2 * round + 1);
                if growth.add(room) {
                    granted.fetch_add(1, Ordering::SeqCst);
                }
                meet(2 * round + 2);
            }
        });
        assert_eq!(granted.into_inner(), ROUNDS);
    }
}

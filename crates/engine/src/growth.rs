//! Room for metadata that is promised before it is made, so that who stages much learns of a full array then, not at its commit.
//!
//! Invariants:
//! 1. `Store::growth_promised` is what all promises hold together.
//! 2. One is granted only while metadata, what is dirty, and all promises are within the limit of growth; whoever else makes metadata grow
//!    needs room beside all of them. Data leaves them their room from the next checkpoint on
//!    ([`adapt_limits`](Store::adapt_limits)).
//! 3. Who holds one is not refused for want of room when it begins ([`Store::begin_large`]). Should the limit have fallen since, or more be needed
//!    than was estimated, that comes out of what metadata keeps free for cleaning, and is no more than what may be dirty at a time.
//! 4. Nor is it refused as too large, if it dirties no more than is reserved for a checkpoint (`DirtyNodes::limit`): of what it dirties [`TIMES`] as
//!    much is promised, and operations wait when a quarter of the room is dirty.

use crate::content::Content;
use crate::error::Error;
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

    fn add(&mut self, bytes: u64) -> bool {
        let promised = &self.store.growth_promised;
        // Adds first and looks afterwards: of two that want the last room, one sees the other.
        promised.fetch_add(bytes, Ordering::SeqCst);
        let granted = self.store.room_to_grow();
        match granted {
            true => self.bytes += bytes,
            false => drop(promised.fetch_sub(bytes, Ordering::SeqCst)),
        }
        granted
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
    pub(crate) fn room_to_grow(&self) -> bool {
        let promised = self.growth_promised.load(Ordering::SeqCst);
        self.metadata_about() + promised <= self.growth_limit()
    }
}

//! What one search for blocks has found unreadable: it goes on with what is left, and ends soon.

use crate::error::Error;
use std::ops::Range;

/// Chunks of a kind whose maps one search for blocks finds unreadable before it leaves that kind alone.
pub(crate) const TRIES_MAX: u32 = 4;

/// What one search for blocks has tried in vain; the next search knows nothing of it (`space`, invariant 6).
#[derive(Debug, Default)]
pub(crate) struct Tried {
    /// Loaded chunks whose maps cannot be changed now.
    loaded: Vec<u32>,
    /// The last one that was loaded, or converted, since the search began.
    fresh: Option<u32>,
    /// Chunks whose maps cannot be read or made now. Those that a page of the node table is to blame for are tried once.
    unread: Vec<Range<u32>>,
    loads: u32,
    conversions: u32,
    error: Option<Error>,
    /// One of the chunks that data leaves alone is for it now.
    may_take_last: bool,
}

impl Tried {
    /// Not in vain.
    pub fn made(&mut self, chunk: u32) {
        self.fresh = Some(chunk);
    }

    pub fn changing(&mut self, chunk: u32, error: Error) {
        self.loaded.push(chunk);
        self.error.get_or_insert(error);
    }

    /// The same cause keeps all of `chunks` from being loaded, or converted.
    pub fn loading(&mut self, chunks: Range<u32>, error: Error) {
        self.loads += 1;
        self.pass_over(chunks, error);
    }

    pub fn converting(&mut self, chunks: Range<u32>, error: Error) {
        self.conversions += 1;
        self.pass_over(chunks, error);
    }

    pub fn pass_over(&mut self, chunks: Range<u32>, error: Error) {
        self.unread.push(chunks);
        self.error.get_or_insert(error);
    }

    pub fn is_passed_over(&self, chunk: u32) -> bool {
        self.unread.iter().any(|chunks| chunks.contains(&chunk))
    }

    /// Whether metadata does without one of the chunks that data leaves alone, when there is nothing else.
    pub fn take_last(&mut self, may: bool) {
        self.may_take_last = may;
    }

    pub(super) fn may_take_last(&self) -> bool {
        self.may_take_last
    }

    /// Why less was found than there may be.
    pub fn into_error(self) -> Option<Error> {
        self.error
    }

    pub(super) fn may_change(&self, chunk: u32) -> bool {
        let few = self.loaded.len() < TRIES_MAX as usize || self.fresh == Some(chunk);
        few && !self.loaded.contains(&chunk)
    }

    pub(super) fn may_load(&self, chunk: u32) -> bool {
        self.loads < TRIES_MAX && self.may_add(chunk)
    }

    pub(super) fn may_convert(&self, chunk: u32) -> bool {
        self.conversions < TRIES_MAX && self.may_add(chunk)
    }

    fn may_add(&self, chunk: u32) -> bool {
        self.loaded.len() < 2 * TRIES_MAX as usize && !self.is_passed_over(chunk)
    }
}

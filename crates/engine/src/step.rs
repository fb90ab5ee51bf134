//! Steps that a panic must not leave halfway.
//!
//! What a thread has changed in such a step, and not handed on, nobody finds any more. So the store turns read-only before the thread
//! lets go of what keeps others away: a step begins after what is locked, or pinned, for it.

#[cfg(test)]
mod tests;

use crate::content::Content;
use crate::store::Store;

/// Latches the store unless it ends.
#[must_use]
pub(crate) struct Step<'s, C: Content> {
    store: &'s Store<C>,
    what: &'static str,
}

impl<'s, C: Content> Step<'s, C> {
    pub fn begin(store: &'s Store<C>, what: &'static str) -> Self {
        Step { store, what }
    }

    /// All that others rely on is done, or told.
    pub fn end(self) {
        std::mem::forget(self);
    }
}

impl<C: Content> Drop for Step<'_, C> {
    fn drop(&mut self) {
        let what = self.what;
        self.store
            .latch(&format!("a thread panicked during {what}"));
    }
}

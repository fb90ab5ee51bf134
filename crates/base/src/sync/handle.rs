//! Counted references, for which no core has to write a line that others write: each may have a count of its own.
//!
//! 1. What a core's own references share has one reference of all, and ends with the last of them.
//! 2. A reference is counted in one place: where all are, or where its core's own are.

use super::Arc;
use std::mem::ManuallyDrop;
use std::ops::Deref;

/// A counted reference that belongs to one core, which counts it by itself.
#[derive(Debug)]
#[repr(align(128))]
pub struct OfCore<L>(Arc<L>);

/// A counted reference: one of all, or one that is counted where one core alone does so.
#[derive(Debug)]
pub struct Handle<L> {
    /// Counted here if there is no `own`; else the one that `own` has, so that nobody asks which of the two it is but who
    /// copies or drops it.
    all: ManuallyDrop<Arc<L>>,
    own: ManuallyDrop<Option<Arc<OfCore<L>>>>,
}

impl<L> Handle<L> {
    /// What references of one core share from now on.
    pub fn of_core(this: &Arc<L>) -> Arc<OfCore<L>> {
        Arc::new(OfCore(Arc::clone(this)))
    }

    /// One of all.
    #[inline]
    pub fn common(all: Arc<L>) -> Handle<L> {
        Handle {
            all: ManuallyDrop::new(all),
            own: ManuallyDrop::new(None),
        }
    }

    /// One of a core's own.
    pub fn own(own: Arc<OfCore<L>>) -> Handle<L> {
        // SAFETY: the copy lives as long as `own`, beside it, and is never dropped.
        let all = unsafe { std::ptr::read(&own.0) };
        Handle {
            all: ManuallyDrop::new(all),
            own: ManuallyDrop::new(Some(own)),
        }
    }

    /// Whether it is one of a core's own.
    pub fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// The reference of all.
    #[inline]
    pub fn all(&self) -> &Arc<L> {
        &self.all
    }

    #[inline(never)]
    fn clone_own(own: &Arc<OfCore<L>>) -> Handle<L> {
        Handle::own(Arc::clone(own))
    }

    #[inline(never)]
    fn drop_own(own: &mut ManuallyDrop<Option<Arc<OfCore<L>>>>) {
        // SAFETY: called by `drop` alone, once.
        unsafe { ManuallyDrop::drop(own) }
    }
}

impl<L> OfCore<L> {
    /// The reference of all.
    pub fn all(&self) -> &Arc<L> {
        &self.0
    }
}

impl<L> Clone for Handle<L> {
    #[inline]
    fn clone(&self) -> Self {
        match &*self.own {
            None => Handle::common(Arc::clone(&self.all)),
            Some(own) => Handle::clone_own(own),
        }
    }
}

impl<L> Drop for Handle<L> {
    #[inline]
    fn drop(&mut self) {
        match self.own.is_some() {
            // SAFETY: it is counted here, and not used afterwards.
            false => unsafe { ManuallyDrop::drop(&mut self.all) },
            true => Handle::drop_own(&mut self.own),
        }
    }
}

impl<L> Deref for Handle<L> {
    type Target = L;
    #[inline]
    fn deref(&self) -> &L {
        &self.all
    }
}

//! The sets of a cache, one behind the other in a mapping of their own.

use super::set::Set;
use base::mapping::Mapping;
use std::ops::Deref;
use std::ptr::NonNull;

#[derive(Debug)]
pub(super) struct Sets {
    /// Begins with `count` sets.
    mapping: Mapping,
    count: usize,
}

impl Sets {
    /// `None`: there is no room for them.
    pub fn try_new(count: usize) -> Option<Sets> {
        assert!(count > 0, "a cache has sets");
        let mapping = Mapping::try_new(count.checked_mul(size_of::<Set>())?)?;
        mapping.interleave();
        // What was made before one that cannot be made is leaked: that is a bug, and sets own nothing.
        let sets = Sets { mapping, count };
        let first = sets.first().as_ptr();
        for number in 0..count {
            // SAFETY: it lies in the mapping, which is aligned to more than a set; nobody refers to it yet.
            unsafe { first.add(number).write(Set::new(number)) };
        }
        Some(sets)
    }

    fn first(&self) -> NonNull<Set> {
        self.mapping.start().cast()
    }

    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

impl Deref for Sets {
    type Target = [Set];

    #[inline]
    fn deref(&self) -> &[Set] {
        // SAFETY: so many sets were made there, which only their own methods change, and stay as long as the mapping.
        unsafe { std::slice::from_raw_parts(self.first().as_ptr(), self.count) }
    }
}

/// A set owns nothing besides, so there is nothing to drop; and it can be shared as a slice of them can.
const _: () = {
    assert!(!std::mem::needs_drop::<Set>());
    const fn shared<T: Send + Sync>() {}
    shared::<Set>();
};

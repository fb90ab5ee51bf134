//! Which page a frame holds, for those who look, and copy its bytes, without the lock of its set. Checked by `model/`.
//!
//! A *version* goes with each tag: a sequence lock (Lameter, *Effective Synchronization on Linux/NUMA Systems*, 2005; the
//! fences are those of Boehm, *Can Seqlocks Get Along with Programming Language Memory Models?*, MSPC 2012).
//!
//! Invariants:
//! 1. A tag, and the bytes of the frame of a tag that names a page, change under the lock of their set alone, and within [`Tag::change`]: the
//!    version is odd from before the first change until after the last. Bytes of a frame whose tag names none change in any way, after the change that
//!    took the name away and before the one that gives the next. So each content that a page has ever had there has an even version of its own. A frame
//!    may go from one tag to another by way of the spare ones: the first tag's change comes before anybody can write the frame again, so who looks at
//!    the first and copies what the other puts there finds the version changed.
//! 2. Who looks reads the version, then name and bytes, then the version again. If it is the same both times and even, that
//!    was one content, and the name its name. Else what was copied is of no account.
//! 3. A version comes back after 2^31 changes. To be fooled a look would have to last as long as these, under one lock.
//! 4. That a page is not found proves nothing: it may be on its way to another frame. Who has to know takes the lock.

use base::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use base::canary::{Canary, planted};

/// Names a page for good: a file, which use of its number that is, and a page of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub nid: u64,
    pub generation: u64,
    pub page: u64,
}

impl Name {
    /// Of no page: files end long before.
    pub const NONE: Name = Name {
        nid: 0,
        generation: 0,
        page: u64::MAX,
    };

    /// Generations count (R11).
    fn same(&self, other: &Name) -> bool {
        self.page == other.page
            && self.nid == other.nid
            && (self.generation == other.generation || planted(Canary::GenerationIgnored))
    }
}

/// Whose page a frame holds. Half a cache line.
#[derive(Debug)]
#[repr(C, align(32))]
pub(super) struct Tag {
    nid: AtomicU64,
    generation: AtomicU64,
    page: AtomicU64,
    /// Odd while something changes (invariant 1).
    version: AtomicU32,
}

/// What a look without the lock has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// What was copied is the page's.
    Found,
    /// Another page.
    Other,
    /// It changed meanwhile: another look may find it.
    Changed,
}

impl Tag {
    pub fn new() -> Tag {
        Tag {
            nid: AtomicU64::new(Name::NONE.nid),
            generation: AtomicU64::new(Name::NONE.generation),
            page: AtomicU64::new(Name::NONE.page),
            version: AtomicU32::new(0),
        }
    }

    /// The page it names. Certain only under the set's lock.
    pub fn name(&self) -> Name {
        Name {
            nid: self.nid.load(Ordering::Relaxed),
            generation: self.generation.load(Ordering::Relaxed),
            page: self.page.load(Ordering::Relaxed),
        }
    }

    /// Whether it names this page. Certain only under the set's lock.
    pub fn is(&self, page: &Name) -> bool {
        self.name().same(page)
    }

    /// Copies the page's bytes, if it is this one. `copy` reads the frame as relaxed atomics do.
    #[inline]
    pub fn look(&self, page: &Name, copy: impl FnOnce()) -> Look {
        // With the last change's release, so that its name and bytes, or newer ones, are what is seen.
        let version = self.version.load(Ordering::Acquire);
        if !version.is_multiple_of(2) {
            return Look::Changed;
        }
        if !self.is(page) {
            return Look::Other;
        }
        copy();
        // With that of a change which was seen in part: its odd version is seen then.
        fence(Ordering::Acquire);
        match self.version.load(Ordering::Relaxed) == version || planted(Canary::VersionUnchecked) {
            true => Look::Found,
            false => Look::Changed,
        }
    }

    /// Changes name or bytes (invariant 1). The caller holds the set's lock; `change` writes the frame as relaxed atomics do.
    #[inline]
    pub fn change<R>(&self, change: impl FnOnce() -> R) -> R {
        let version = self.version.load(Ordering::Relaxed);
        debug_assert!(version.is_multiple_of(2), "invariant 1");
        self.version
            .store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        let changed = change();
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
        changed
    }

    /// Within [`change`](Self::change) only.
    pub fn set_name(&self, name: Name) {
        self.nid.store(name.nid, Ordering::Relaxed);
        self.generation.store(name.generation, Ordering::Relaxed);
        self.page.store(name.page, Ordering::Relaxed);
    }
}

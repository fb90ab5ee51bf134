//! What a directory gained since its inode was last changed: names, subdirectories, and the
//! time of the newest change, merged from operations that share the directory. Checked by `model/`.
//!
//! Invariants:
//! 1. Operations add under the directory's shared lock; who holds it exclusively sees all of them.
//! 2. All were made after the last change of the inode itself, with clocks read under the lock. So
//!    the newest time replaces the inode's, whatever that is.
//! 3. `shape` grows under the locks of all nodes of the directory's tree that change with it, when names
//!    move between leaves, or a leaf goes. Who finds it unchanged after it has locked a leaf
//!    came to the right one, also if it was told the way before it locked the directory.
//! 4. In a directory that several cores change, each adds to a part of its own; who looks locks all of them, in
//!    order. So a look has an operation if, and only if, it has all that ended before that one began.
//! 5. Who was shown the directory and did not find an operation has an older time than that operation. A look that is
//!    shown to somebody says so ([`Shown`]): where nothing is pending, before it finds that; else under the locks of all
//!    parts. An operation first sets `owed`; then, under the lock of its part, it adds unless the directory was shown with
//!    its time, or a newer one: then it gets another time. If it adds after the look was in its part, or sets `owed`
//!    after the look found that clear, it sees what the look said; else the look has it.

use crate::times::Shown;
use base::atomic::{AtomicBool, AtomicU64, Ordering};
use base::canary::{Canary, planted};
use base::clock::Timestamp;
use base::sync::{Latch, OnceLock, rank};
use base::thread::lane;
use base::tight::limit;
use engine::Merged;
use engine::sum::Padded;

/// A directory's change by names that come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally {
    pub names: i32,
    pub subdirs: i32,
    /// When the newest of them came or went.
    pub time: Timestamp,
}

impl Tally {
    /// Both one after the other, in either order.
    fn and(self, other: Tally) -> Tally {
        Tally {
            names: self.names.saturating_add(other.names),
            subdirs: self.subdirs.saturating_add(other.subdirs),
            time: self.time.max(other.time),
        }
    }
}

/// Parts that a crowded directory's sum can have; cores beyond that share them.
const PARTS: usize = 64;
/// Additions by another core than the one before after which cores add apart.
const CROWDED: usize = 16;

/// What some core added, on lines of its own.
type Part = Padded<Latch<Option<Tally>>>;

/// Pending changes of a directory; see the module's head.
#[derive(Debug)]
pub struct Pending {
    /// Anything was added.
    owed: AtomicBool,
    together: Latch<Together>,
    /// Of each core that has added since the directory was crowded.
    parts: OnceLock<Box<[OnceLock<Box<Part>>]>>,
    shape: AtomicU64,
}

/// What was added before cores added apart.
#[derive(Debug, Default)]
struct Together {
    sum: Option<Tally>,
    last_core: usize,
    /// Additions by another core than the one before.
    others: usize,
}

impl Default for Pending {
    fn default() -> Pending {
        Pending::new(None, 0)
    }
}

impl Pending {
    fn new(sum: Option<Tally>, shape: u64) -> Pending {
        let together = Together {
            sum,
            ..Together::default()
        };
        Pending {
            owed: AtomicBool::new(sum.is_some()),
            together: Latch::new(rank::TALLY, together),
            parts: OnceLock::new(),
            shape: AtomicU64::new(shape),
        }
    }

    /// Adds to what is pending, unless the directory was shown with a time as new (invariant 5).
    pub fn add(&self, tally: Tally, shown: &Shown) -> Merged {
        self.add_by(lane(), tally, shown)
    }

    /// Adds what was added once, whatever was shown.
    pub fn add_again(&mut self, tally: Tally) {
        *self.owed.get_mut() = true;
        add_to(&mut self.together.get_mut().sum, tally);
    }

    /// As a thread of this core.
    pub(super) fn add_by(&self, core: usize, tally: Tally, shown: &Shown) -> Merged {
        // Of several that find nothing, one is the first.
        let first = !self.owed.load(Ordering::SeqCst) && !self.owed.swap(true, Ordering::SeqCst);
        let taken = match self.parts.get() {
            Some(parts) => self.add_apart(parts, core, tally, shown),
            None => self.add_together(core, tally, shown),
        };
        Merged { first, taken }
    }

    fn add_together(&self, core: usize, tally: Tally, shown: &Shown) -> bool {
        let mut together = self.together.lock();
        if together.last_core != core {
            together.last_core = core;
            together.others += 1;
            if together.others > limit(CROWDED, 2) {
                self.parts
                    .get_or_init(|| (0..PARTS).map(|_| OnceLock::new()).collect());
            }
        }
        add_later(&mut together.sum, tally, shown)
    }

    #[inline(never)]
    fn add_apart(
        &self,
        parts: &[OnceLock<Box<Part>>],
        core: usize,
        tally: Tally,
        shown: &Shown,
    ) -> bool {
        let core = core % parts.len();
        let part = parts[core].get().unwrap_or_else(|| {
            // No look is under way (invariant 4).
            let _together = self.together.lock();
            let new = || Box::new(Padded(Latch::keyed(rank::TALLY, core as u64 + 1, None)));
            parts[core].get_or_init(new)
        });
        add_later(&mut part.lock(), tally, shown)
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        let parts = self.parts.get().into_iter().flatten();
        parts.filter_map(|part| part.get().map(Box::as_ref))
    }

    /// All that was added by operations that have ended, and nothing of later ones (invariant 4).
    pub fn sum(&self) -> Option<Tally> {
        self.sum_for(None)
    }

    /// The same for who is shown it (invariant 5).
    pub fn sum_shown(&self, shown: &Shown) -> Option<Tally> {
        self.sum_for(Some(shown))
    }

    fn sum_for(&self, shown: Option<&Shown>) -> Option<Tally> {
        if !self.is_owed() {
            return None;
        }
        let together = self.together.lock();
        let parts: Vec<_> = self.parts().map(|part| part.lock()).collect();
        let mut sum = together.sum;
        for part in parts.iter().filter_map(|part| **part) {
            add_to(&mut sum, part);
        }
        if let (Some(shown), Some(sum)) = (shown, &sum) {
            shown.show(sum.time.into());
        }
        sum
    }

    pub fn is_owed(&self) -> bool {
        self.owed.load(Ordering::SeqCst)
    }

    /// Takes what is pending. Cores that no longer add apart from others add together again.
    pub(super) fn take(&mut self) -> Option<Tally> {
        *self.owed.get_mut() = false;
        let mut sum = self.together.get_mut().sum.take();
        let mut adders = 0;
        let parts = self.parts.get_mut().into_iter().flatten();
        for part in parts.filter_map(|part| part.get_mut()) {
            if let Some(part) = part.0.get_mut().take() {
                if planted(Canary::TallyPartForgotten) && adders > 0 {
                    continue;
                }
                add_to(&mut sum, part);
                adders += 1;
            }
        }
        if adders < 2 {
            self.parts = OnceLock::new();
            self.together.get_mut().others = 0;
        }
        sum
    }

    /// Cores add apart.
    pub fn is_crowded(&self) -> bool {
        self.parts.get().is_some()
    }

    /// Changes when names move between leaves, or a leaf goes (invariant 3).
    pub fn shape(&self) -> u64 {
        self.shape.load(Ordering::Acquire)
    }

    pub fn reshaped(&self) {
        self.shape.fetch_add(1, Ordering::Release);
    }
}

/// Adds what has a newer time than the directory was shown with; the sum's lock is held.
fn add_later(sum: &mut Option<Tally>, tally: Tally, shown: &Shown) -> bool {
    let later = shown.get() < tally.time.into() || planted(Canary::LookNotSeen);
    if later {
        add_to(sum, tally);
    }
    later
}

fn add_to(sum: &mut Option<Tally>, tally: Tally) {
    *sum = Some(sum.map_or(tally, |sum| sum.and(tally)));
}

/// The pending changes of an inode; only directories have any. Equal if they come to the same.
#[derive(Debug, Default)]
pub struct Gains(Option<Box<Pending>>);

impl Gains {
    pub fn new(directory: bool) -> Gains {
        Gains(directory.then(Box::default))
    }

    pub fn get(&self) -> Option<&Pending> {
        self.0.as_deref()
    }

    pub fn get_mut(&mut self) -> Option<&mut Pending> {
        self.0.as_deref_mut()
    }

    pub fn take(&mut self) -> Option<Tally> {
        self.get_mut()?.take()
    }

    fn sum(&self) -> Option<Tally> {
        self.get()?.sum()
    }
}

impl Clone for Gains {
    fn clone(&self) -> Gains {
        let copy = |pending: &Pending| Pending::new(pending.sum(), pending.shape());
        Gains(self.get().map(copy).map(Box::new))
    }
}

impl PartialEq for Gains {
    fn eq(&self, other: &Gains) -> bool {
        self.sum() == other.sum()
    }
}

impl Eq for Gains {}

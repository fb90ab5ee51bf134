//! Pages that somebody reads where they are, without a copy.
//!
//! A guard is of the content that its page had when it was taken, and keeps that for as long as it lives: a snapshot. It does not keep the page: that may be
//! written, evicted, cut off or loaded anew meanwhile. Whoever would write the frame gives the way another frame first, a *spare* one, and leaves the old one to the guard.
//! So a guard costs nobody a wait, nor a way of its set, nor can a thread lock itself out by writing what it has a guard of.
//!
//! Invariants:
//! 1. The bytes of a frame that has guards are not written, by nobody and no device.
//! 2. What has guards is counted: by its way ([`set`](super::set), 6) while that has the frame, and by [`Spares`] when it is *apart*.
//! 3. For each frame with guards there is one spare frame that nobody else can get, or it is apart, and its way has that. So
//!    who writes always gets one. When there are as many frames with guards as there are spare frames, no other gets any.
//! 4. A frame that is apart is nobody's again, and a spare one, when its last guard is dropped.
//! 5. Guards keep the cache: its memory goes with the last of them, whatever becomes of the file system.

use super::{FileKey, PageCache};
use base::map::HashMap;
use base::sync::{Mutex, rank};
use format::BLOCK_SIZE;
use std::ops::Deref;
use std::sync::Arc;

/// Of so many frames one is spare.
const SPARE_SHARE: usize = 64;
/// At least.
const SPARES_MIN: usize = 4;

/// Spare frames, those that are apart, and who may get one.
#[derive(Debug)]
pub(super) struct Spares(Mutex<Pool>);

#[derive(Debug)]
struct Pool {
    /// Frames that may get their first guard (invariant 3).
    left: usize,
    /// Spare frames: these, and from `next` to `end`, which were never used.
    frames: Vec<u32>,
    next: u32,
    end: u32,
    /// How many guards those have that are apart.
    apart: HashMap<u32, u32>,
}

/// How many of so many frames are spare ones. A small cache has them besides.
pub(super) fn spares_of(frames: usize) -> usize {
    (frames / SPARE_SHARE).max(SPARES_MIN)
}

/// Whether these are within so many frames.
pub(super) fn are_within(frames: usize) -> bool {
    frames / SPARE_SHARE > SPARES_MIN
}

impl Spares {
    /// `count` frames from the first on.
    pub fn new(first: usize, count: usize) -> Spares {
        Spares(Mutex::new(
            rank::LEAF,
            Pool {
                left: count,
                frames: Vec::new(),
                next: first as u32,
                end: (first + count) as u32,
                apart: HashMap::default(),
            },
        ))
    }

    /// A frame gets its first guard. False: it must not.
    fn begin(&self) -> bool {
        let mut pool = self.0.lock();
        let left = pool.left.checked_sub(1);
        pool.left = left.unwrap_or(0);
        left.is_some()
    }

    /// One that no way has lent to anybody has lost its last guard.
    fn end(&self) {
        self.0.lock().left += 1;
    }

    /// A frame with so many guards is apart from now on; returns the one that its way gets. The set's lock is held.
    #[cold]
    pub fn take_apart(&self, frame: u32, guards: u8) -> u32 {
        let mut pool = self.0.lock();
        let fresh = pool.apart.insert(frame, u32::from(guards)).is_none();
        debug_assert!(fresh && guards > 0, "invariant 2");
        let spare = pool.frames.pop().unwrap_or_else(|| {
            pool.next += 1;
            pool.next - 1
        });
        assert!(pool.next <= pool.end, "invariant 3");
        spare
    }

    /// A frame that is apart loses a guard.
    #[cold]
    fn end_apart(&self, frame: u32) {
        let mut pool = self.0.lock();
        let Some(guards) = pool.apart.get_mut(&frame) else {
            debug_assert!(false, "invariant 2");
            return;
        };
        *guards -= 1;
        if *guards == 0 {
            pool.apart.remove(&frame);
            pool.frames.push(frame);
            pool.left += 1;
        }
    }
}

/// What became of the wish for a guard.
#[derive(Debug)]
pub enum Guarded {
    Yes(Guard),
    /// The page is not cached.
    Absent,
    /// As many have guards as may have.
    TooMany,
}

/// A page's content at the moment when this was taken, for as long as it lives.
#[derive(Debug)]
pub struct Guard {
    cache: Arc<PageCache>,
    set: u32,
    way: u32,
    frame: u32,
}

impl PageCache {
    /// A guard of a page that is cached; a use of it. Takes the lock of the page's set.
    pub fn guard(self: &Arc<Self>, key: FileKey, page: u64) -> Guarded {
        let place = self.place(key, page);
        let mut set = place.set.lock();
        let Some(way) = set.find(place.print, &place.page) else {
            return Guarded::Absent;
        };
        let first = set.guards(way) == 0;
        if (first && !self.spares.begin()) || !set.add_guard(way) {
            return Guarded::TooMany;
        }
        set.used(way);
        self.counters.mine().hits();
        Guarded::Yes(Guard {
            cache: Arc::clone(self),
            set: set.index() as u32,
            way: way as u32,
            frame: place.set.number(way),
        })
    }

    /// Frames that could get guards.
    pub fn guards_left(&self) -> usize {
        self.spares.0.lock().left
    }
}

impl Deref for Guard {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        let frame = self.cache.frames.frame(self.frame);
        // SAFETY: it lies in the mapping, which the cache keeps, all of which is initialised. Nobody writes it while
        // this lives (invariant 1), and what was written before was written under the lock under which this was taken, or by who took it since.
        unsafe { std::slice::from_raw_parts(frame.as_ptr(), BLOCK_SIZE) }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let (cache, way) = (&self.cache, self.way as usize);
        let mut set = cache.sets[self.set as usize].lock();
        // A frame with guards comes back to no way, so this is the one that it was taken of.
        if set.has(way, self.frame) {
            if set.end_guard(way) {
                cache.spares.end();
            }
            return;
        }
        drop(set);
        cache.spares.end_apart(self.frame);
    }
}

//! Pages that devices fill where they will stay: frames that are set aside for them before they are read.
//!
//! Invariants:
//! 1. A frame is set aside by one [`Load`], and no page's meanwhile: who looks for a page does not find it, whatever it holds. One who
//!    found the page that was there before sees by the tag's version that it has gone ([`tags`](super::tags), 2): that was
//!    changed before the frame was set aside, with a fence, and what the frame gets comes after that, whoever writes it.
//! 2. A load holds no lock, and keeps nobody waiting: others may load the same page, or write it. Who publishes second finds it there,
//!    and gives its frame back.
//! 3. What is published is what the page holds: as for what was read elsewhere ([`PageCache::admit`], invariant 6 there).

use super::place::Place;
use super::{Absence, FileKey, PageCache};
use base::canary::{Canary, planted};
use device::Shared;
use format::BLOCK_SIZE;
use std::ops::Range;

/// A frame set aside for a page that is being read from its device. Given back when it is dropped.
#[derive(Debug)]
pub struct Load<'a> {
    cache: &'a PageCache,
    place: Place<'a>,
    way: usize,
    frame: u32,
    absence: Absence,
    /// Invariant 1 is over.
    ended: bool,
}

impl PageCache {
    /// Sets a frame aside for a page that is absent. `None`: it is cached, or no frame can be had.
    pub fn begin_load(&self, key: FileKey, page: u64) -> Option<Load<'_>> {
        let place = self.place(key, page);
        let mut set = place.set.lock();
        if set.find(place.print, &place.page).is_some() {
            return None;
        }
        let (way, frame, evicted) = set.set_aside(place.print, self)?;
        if evicted {
            self.counters.mine().evicted();
        }
        // Still absent: what has just left is another page.
        let absence = Absence(set.inner.departed);
        drop(set);
        Some(Load {
            cache: self,
            place,
            way,
            frame,
            absence,
            ended: false,
        })
    }
}

impl Load<'_> {
    pub fn page(&self) -> u64 {
        self.place.page.page
    }

    /// The frame, for a device.
    pub fn memory(&mut self) -> Shared<'_> {
        // SAFETY: the frame is set aside, and the borrow keeps it so.
        unsafe { self.cache.frames.shared(self.frame) }
    }

    /// Zeroes bytes of the frame.
    pub fn zero(&mut self, bytes: Range<usize>) {
        // SAFETY: the frame is set aside.
        unsafe { self.cache.frames.zero(self.frame, bytes) };
    }

    /// Makes the frame hold a page.
    pub fn fill(&mut self, content: &[u8]) {
        // SAFETY: the frame is set aside.
        unsafe { self.cache.frames.fill(self.frame, content) };
    }

    /// Zeroes all of it.
    pub fn clear(&mut self) {
        self.zero(0..BLOCK_SIZE);
    }

    /// Copies what the frame holds by now, from `offset` on.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) {
        self.cache.frames.copy_out(self.frame, offset, out);
    }

    /// The frame has the page's content, as its device held it since the load began: it is cached from now on, unless
    /// somebody has written it meanwhile (false), or it is there already.
    pub fn publish(mut self) -> bool {
        let mut set = self.place.set.lock();
        if std::mem::replace(&mut self.ended, true) {
            return true;
        }
        let found = set.find(self.place.print, &self.place.page);
        let fresh = set.inner.departed == self.absence.0;
        let page = (found.is_none() && fresh).then_some((self.place.print, self.place.page));
        set.end_aside(self.way, page);
        if page.is_some() {
            self.cache.counters.mine().inserted();
        }
        fresh && found.is_none_or(|way| set.stamp(way) == 0)
    }

    /// Only to prove that this is found: others see the page before it is there.
    pub fn show_early(&mut self) {
        if planted(Canary::LoadPublishedEarly) && !self.ended {
            let mut set = self.place.set.lock();
            if set.find(self.place.print, &self.place.page).is_none() {
                self.ended = true;
                set.end_aside(self.way, Some((self.place.print, self.place.page)));
            }
        }
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.place.set.lock().end_aside(self.way, None);
        }
    }
}

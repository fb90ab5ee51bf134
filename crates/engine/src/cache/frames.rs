//! The memory behind the page cache: one page-aligned region, cut into 4 KiB frames.
//!
//! Bytes of a frame are written under the lock of its set, or by whoever has it set aside ([`loads`](super::loads)), and copied
//! out of it at any time: there are no references to them, but to those that have guards ([`guards`](super::guards)), which nobody writes.
//!
//! Frames are used from the front on. Large pages come behind them when they have all been used ([`large`](super::large)).

use base::mapping::Mapping;
use base::{prefetch, racy};
use device::Shared;
use format::BLOCK_SIZE;
use std::ops::Range;
use std::ptr::NonNull;

/// All frames of a cache. Memory is touched (and so charged to the process) only when a
/// frame is first filled, or shortly before ([`touched`](super::touched)).
#[derive(Debug)]
pub(super) struct Frames {
    mapping: Mapping,
    count: usize,
}

impl Frames {
    /// `None`: there is no room for them.
    pub fn try_new(count: usize) -> Option<Self> {
        assert!(count > 0, "a cache has frames");
        assert!(count < u32::MAX as usize, "frames have numbers");
        let mapping = Mapping::try_new(count * BLOCK_SIZE)?;
        // Else all of it were on the node of the thread that touches it ahead of its use.
        mapping.interleave();
        Some(Frames { mapping, count })
    }

    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    fn pointer(&self, index: u32) -> *mut u8 {
        let index = index as usize;
        assert!(index < self.count, "frame index in range");
        // SAFETY: the index is in range, so the offset stays inside the mapping.
        unsafe { self.mapping.start().as_ptr().add(index * BLOCK_SIZE) }
    }

    /// Where a part of a frame begins.
    fn part(&self, index: u32, offset: usize, len: usize) -> *mut u8 {
        let fits = offset <= BLOCK_SIZE && len <= BLOCK_SIZE - offset;
        assert!(fits, "the part lies in its frame");
        // SAFETY: in range by `pointer` and the assertion.
        unsafe { self.pointer(index).add(offset) }
    }

    /// Has the first bytes of a part fetched.
    #[inline]
    pub fn prefetch(&self, index: u32, offset: usize, len: usize) {
        prefetch::start(self.part(index, offset, len), len);
    }

    /// Copies from a frame that others may change meanwhile: what its tag's version says is right.
    #[inline]
    pub fn copy_out(&self, index: u32, offset: usize, out: &mut [u8]) {
        let from = self.part(index, offset, out.len());
        // SAFETY: it lies in the mapping, all of which is initialised, and is written by the methods here and the kernel alone; a slice
        // that the caller may change is no part of it.
        unsafe { racy::copy_out(from, out.as_mut_ptr(), out.len()) };
    }

    /// Copies `data` into a frame from `offset` on.
    ///
    /// # Safety
    /// The caller holds the lock of the frame's set, and the frame is nobody's; or it has the frame set aside.
    pub unsafe fn copy_in(&self, index: u32, offset: usize, data: &[u8]) {
        let to = self.part(index, offset, data.len());
        // SAFETY: it lies in the mapping; nobody else writes it, by the caller's promise, and it is read by `copy_out` alone.
        unsafe { racy::copy_in(data.as_ptr(), to, data.len()) };
    }

    /// Zeroes part of a frame.
    ///
    /// # Safety
    /// As for `copy_in`.
    pub unsafe fn zero(&self, index: u32, bytes: Range<usize>) {
        let to = self.part(index, bytes.start, bytes.end - bytes.start);
        // SAFETY: as in `copy_in`.
        unsafe { racy::zero(to, bytes.end - bytes.start) };
    }

    /// Where a frame begins, for who has a guard of it.
    pub fn frame(&self, index: u32) -> NonNull<u8> {
        // SAFETY: a pointer into a mapping is none to nothing.
        unsafe { NonNull::new_unchecked(self.pointer(index)) }
    }

    /// Makes a frame hold what another one does, which has guards.
    ///
    /// # Safety
    /// As for `copy_in`; and nobody writes the other one.
    pub unsafe fn copy(&self, from: u32, to: u32) {
        assert_ne!(from, to, "two frames");
        let (from, to) = (self.pointer(from), self.pointer(to));
        // SAFETY: both lie in the mapping, and apart; by the caller's promise nobody else writes either.
        unsafe { racy::copy_in(from, to, BLOCK_SIZE) };
    }

    /// A whole frame, for a device.
    ///
    /// # Safety
    /// As for `copy_in`, for as long as it is there.
    pub unsafe fn shared(&self, index: u32) -> Shared<'_> {
        let start = self.part(index, 0, BLOCK_SIZE);
        // SAFETY: a pointer into a mapping is none to nothing.
        let start = unsafe { NonNull::new_unchecked(start) };
        // SAFETY: it lies in the mapping, all of which is initialised, and is accessed by racing copies alone; nobody else
        // writes it, by the caller's promise.
        unsafe { Shared::new(start, BLOCK_SIZE) }
    }

    /// Makes a frame hold `content`, then zeros.
    ///
    /// # Safety
    /// As for `copy_in`.
    pub unsafe fn fill(&self, index: u32, content: &[u8]) {
        let content = &content[..content.len().min(BLOCK_SIZE)];
        // SAFETY: the caller's promise.
        unsafe {
            self.copy_in(index, 0, content);
            self.zero(index, content.len()..BLOCK_SIZE);
        }
    }
}

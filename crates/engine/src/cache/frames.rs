//! The memory behind the page cache: one page-aligned region, cut into 4 KiB frames.
//!
//! Frames are used from the front on. The region is not advised to be of large pages: measured, their first use was dearer
//! than that of small ones and took from a third to twice as long in all (docs/performance.md).

use format::BLOCK_SIZE;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr::NonNull;

/// All frames of a cache. Memory is touched (and so charged to the process) only when a
/// frame is first filled.
#[derive(Debug)]
pub(super) struct Frames {
    base: NonNull<u8>,
    layout: Layout,
    count: usize,
}

// SAFETY: the region is plain memory owned by this value; access to a frame goes through
// its unsafe methods, whose callers hold the lock of the set that the frame belongs to.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

impl Frames {
    pub fn new(count: usize) -> Self {
        assert!(count > 0, "a cache has frames");
        assert!(count < u32::MAX as usize, "frames have numbers");
        let layout = Layout::from_size_align(count * BLOCK_SIZE, BLOCK_SIZE)
            .expect("the cache size is bounded by the address space");
        // SAFETY: the layout has a non-zero size.
        let base = unsafe { alloc(layout) };
        let Some(base) = NonNull::new(base) else {
            handle_alloc_error(layout)
        };
        Frames {
            base,
            layout,
            count,
        }
    }

    fn pointer(&self, index: usize) -> *mut u8 {
        assert!(index < self.count, "frame index in range");
        // SAFETY: the index is in range, so the offset stays inside the allocation.
        unsafe { self.base.as_ptr().add(index * BLOCK_SIZE) }
    }

    /// The bytes of a frame.
    ///
    /// # Safety
    /// The caller holds the lock of the frame's set for as long as the reference lives, and
    /// the frame was filled before, by `fill` or by a `copy_in` of all of it.
    pub unsafe fn frame(&self, index: usize) -> &[u8] {
        // SAFETY: in range by `pointer`; initialised and not written meanwhile by the
        // caller's promise.
        unsafe { std::slice::from_raw_parts(self.pointer(index), BLOCK_SIZE) }
    }

    /// Copies `data` into a frame from `offset` on.
    ///
    /// # Safety
    /// The caller holds the lock of the frame's set and no reference to the frame.
    pub unsafe fn copy_in(&self, index: usize, offset: usize, data: &[u8]) {
        assert!(
            offset + data.len() <= BLOCK_SIZE,
            "the part lies in its frame"
        );
        // SAFETY: in range by `pointer` and the assertion; `data` cannot overlap a frame to
        // which no reference exists.
        unsafe {
            std::ptr::copy_nonoverlapping(
                data.as_ptr(),
                self.pointer(index).add(offset),
                data.len(),
            );
        }
    }

    /// Zeroes part of a frame.
    ///
    /// # Safety
    /// As for `copy_in`.
    pub unsafe fn zero(&self, index: usize, bytes: Range<usize>) {
        assert!(
            bytes.start <= bytes.end && bytes.end <= BLOCK_SIZE,
            "inside the frame"
        );
        // SAFETY: in range by `pointer` and the assertion.
        unsafe { std::ptr::write_bytes(self.pointer(index).add(bytes.start), 0, bytes.len()) };
    }

    /// Initialises a frame: `content`, then zeros.
    ///
    /// # Safety
    /// The caller holds the lock of the frame's set and no reference to the frame.
    pub unsafe fn fill(&self, index: usize, content: &[u8]) {
        let len = content.len().min(BLOCK_SIZE);
        let pointer = self.pointer(index);
        // SAFETY: `pointer` names BLOCK_SIZE writable bytes, `len` is at most that, and
        // `content` cannot overlap a frame to which no reference exists.
        unsafe {
            std::ptr::copy_nonoverlapping(content.as_ptr(), pointer, len);
            std::ptr::write_bytes(pointer.add(len), 0, BLOCK_SIZE - len);
        }
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; no frame reference outlives `self`.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

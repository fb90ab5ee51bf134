//! The memory behind the page cache: one page-aligned region, cut into 4 KiB frames.
//!
//! Bytes of a frame are written under the lock of its set, or by whoever has it set aside ([`loads`](super::loads)), and copied
//! out of it at any time: there are no references to them.
//!
//! Frames are used from the front on. The region is not advised to be of large pages: measured, their first use was dearer
//! than that of small ones and took from a third to twice as long in all (docs/performance.md).

use base::{prefetch, racy};
use device::Shared;
use format::BLOCK_SIZE;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr::NonNull;

/// All frames of a cache. Memory is touched (and so charged to the process) only when a
/// frame is first filled.
#[derive(Debug)]
pub(super) struct Frames {
    /// The first frame: the first place in the allocation that is aligned to one.
    base: NonNull<u8>,
    allocation: NonNull<u8>,
    layout: Layout,
    count: usize,
}

// SAFETY: the region is plain memory owned by this value. It is changed by unsafe methods, whose callers hold the lock of the
// set that the frame belongs to or have the frame set aside, by the kernel for those who have it set aside, and read as by atomics meanwhile.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

impl Frames {
    pub fn new(count: usize) -> Self {
        assert!(count > 0, "a cache has frames");
        assert!(count < u32::MAX as usize, "frames have numbers");
        // Zeroed, so that nobody ever reads what is not initialised. With a greater alignment the allocator would write the
        // zeros itself, and so touch all of it.
        let layout = Layout::from_size_align((count + 1) * BLOCK_SIZE, 16)
            .expect("the cache size is bounded by the address space");
        // SAFETY: the layout has a non-zero size.
        let Some(allocation) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        let skip = allocation.addr().get().next_multiple_of(BLOCK_SIZE) - allocation.addr().get();
        Frames {
            // SAFETY: less than one frame is skipped, and there is one more than is used.
            base: unsafe { allocation.add(skip) },
            allocation,
            layout,
            count,
        }
    }

    fn pointer(&self, index: u32) -> *mut u8 {
        let index = index as usize;
        assert!(index < self.count, "frame index in range");
        // SAFETY: the index is in range, so the offset stays inside the allocation.
        unsafe { self.base.as_ptr().add(index * BLOCK_SIZE) }
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
        // SAFETY: it lies in the allocation, all of which is initialised, and is written by the methods here and the kernel alone; a slice
        // that the caller may change is no part of it.
        unsafe { racy::copy_out(from, out.as_mut_ptr(), out.len()) };
    }

    /// Copies `data` into a frame from `offset` on.
    ///
    /// # Safety
    /// The caller holds the lock of the frame's set, and the frame is nobody's; or it has the frame set aside.
    pub unsafe fn copy_in(&self, index: u32, offset: usize, data: &[u8]) {
        let to = self.part(index, offset, data.len());
        // SAFETY: it lies in the allocation; nobody else writes it, by the caller's promise, and it is read by `copy_out` alone.
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

    /// A whole frame, for a device.
    ///
    /// # Safety
    /// As for `copy_in`, for as long as it is there.
    pub unsafe fn shared(&self, index: u32) -> Shared<'_> {
        let start = self.part(index, 0, BLOCK_SIZE);
        // SAFETY: a pointer into an allocation is none to nothing.
        let start = unsafe { NonNull::new_unchecked(start) };
        // SAFETY: it lies in the allocation, all of which is initialised, and is accessed by racing copies alone; nobody else
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

impl Drop for Frames {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; nobody refers to a frame.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}

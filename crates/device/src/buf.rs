//! Heap buffers that direct I/O accepts as they are.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of every [`AlignedBuf`], in bytes: enough for any device.
pub const BUFFER_ALIGN: usize = 4096;

/// Length from which a buffer is cut out of a longer allocation that asks for no alignment: the
/// allocator hands out fresh zero pages for that as they are, and would clear aligned ones.
const LARGE: usize = 128 << 10;

/// A fixed-size heap buffer whose address is a multiple of [`BUFFER_ALIGN`].
pub struct AlignedBuf {
    /// What was allocated; dangles when `len` is 0.
    memory: NonNull<u8>,
    start: NonNull<u8>,
    len: usize,
}

/// Gives empty buffers an aligned address too.
#[repr(align(4096))]
struct Aligned;

const _: () = assert!(align_of::<Aligned>() == BUFFER_ALIGN);

impl AlignedBuf {
    /// A buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> AlignedBuf {
        let memory = match Self::layout(len) {
            None => NonNull::<Aligned>::dangling().cast(),
            Some(layout) => {
                // SAFETY: the layout's size is not zero.
                let memory = unsafe { alloc_zeroed(layout) };
                NonNull::new(memory).unwrap_or_else(|| handle_alloc_error(layout))
            }
        };
        let at = memory.as_ptr() as usize;
        let skip = at.next_multiple_of(BUFFER_ALIGN) - at;
        // SAFETY: aligned memory is skipped by nothing, and a large allocation is longer than
        // `len` by more than what can be skipped.
        let start = unsafe { memory.add(skip) };
        AlignedBuf { memory, start, len }
    }

    /// A copy of `bytes`.
    pub fn from_slice(bytes: &[u8]) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn layout(len: usize) -> Option<Layout> {
        let layout = match len < LARGE {
            true => Layout::from_size_align(len, BUFFER_ALIGN),
            false => Layout::from_size_align(len.saturating_add(BUFFER_ALIGN), 16),
        };
        (len > 0).then(|| layout.expect("a buffer is smaller than the address space"))
    }
}

// SAFETY: the buffer owns its memory alone, as a `Box<[u8]>` would.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared references give only shared access to plain bytes.
unsafe impl Sync for AlignedBuf {}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: `memory` came from `alloc_zeroed` with this very layout.
            unsafe { dealloc(self.memory.as_ptr(), layout) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start` names `len` initialised bytes (or dangles with `len` 0), owned by self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsMut<[u8]> for AlignedBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Clone for AlignedBuf {
    fn clone(&self) -> Self {
        AlignedBuf::from_slice(self)
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// True when direct I/O that wants `align`-byte alignment can use `bytes` in place.
pub(crate) fn is_aligned(bytes: &[u8], align: usize) -> bool {
    (bytes.as_ptr() as usize).is_multiple_of(align)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_zeroed_and_copied() {
        for len in [0, 1, 512, 4096, 100_000, LARGE - 1, LARGE, 1_000_000] {
            let mut buf = AlignedBuf::zeroed(len);
            assert!(is_aligned(&buf, BUFFER_ALIGN));
            assert_eq!(buf.len(), len);
            assert!(buf.iter().all(|&b| b == 0));
            buf.as_mut().fill(7);
            assert_eq!(&*buf.clone(), &*buf);
        }
    }
}

//! The allocator of a program that holds many small objects: the C library's, or mimalloc once it is asked for.
//!
//! Why: the C library's heaps grow by a few small pages at a time, under a lock of the whole process, and what is on so many pages is mostly on one that the
//! processor has no translation of. mimalloc takes large pages where the system has them. But it keeps what is freed for a while, some ten megabytes: too much
//! for a process with a small limit on its memory.
//!
//! Invariants:
//! 1. Memory goes back to the allocator that it is of, whichever gives new memory by then.
//! 2. Until [`use_large_pages`] is called none is of mimalloc, and nobody has to ask. Whoever has memory of it was told of it by somebody who knew
//!    of that call, so needs no order of its own to know of it.

use libmimalloc_sys as mimalloc;
use rustix::process::{Resource, getrlimit};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

/// The program's allocator, with `#[global_allocator]`.
#[derive(Debug)]
pub struct Heap;

static LARGE: AtomicBool = AtomicBool::new(false);

/// A limit on what a process uses by which it may keep some 80 MiB more than that.
const LIMIT_MIN: usize = 1 << 30;

/// For a process that is to use no more than so many bytes: decides which allocator new memory is of from now on. Where its address space has a limit
/// (`ulimit -v`, `ulimit -d`) the C library's stays: mimalloc takes a GiB of it at a time.
pub fn suit(limit: usize) {
    let is_bounded = |resource| getrlimit(resource).current.is_some();
    if limit >= LIMIT_MIN && ![Resource::As, Resource::Data].into_iter().any(is_bounded) {
        use_large_pages();
    }
}

fn use_large_pages() {
    LARGE.store(true, Ordering::Relaxed);
}

fn large() -> bool {
    LARGE.load(Ordering::Relaxed)
}

/// Whether memory in use is of mimalloc.
fn is_large(memory: *mut u8) -> bool {
    // SAFETY: it looks the address up, and reads nothing there.
    large() && unsafe { mimalloc::mi_is_in_heap_region(memory.cast()) }
}

// SAFETY: everything is left to the allocator that the memory is of.
unsafe impl GlobalAlloc for Heap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match large() {
            // SAFETY: a layout's alignment is a power of two.
            true => unsafe { mimalloc::mi_malloc_aligned(layout.size(), layout.align()).cast() },
            // SAFETY: as the caller promises.
            false => unsafe { System.alloc(layout) },
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match large() {
            // SAFETY: a layout's alignment is a power of two.
            true => unsafe { mimalloc::mi_zalloc_aligned(layout.size(), layout.align()).cast() },
            // SAFETY: as the caller promises.
            false => unsafe { System.alloc_zeroed(layout) },
        }
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match is_large(memory) {
            // SAFETY: the memory is of mimalloc; the rest is as the caller promises.
            true => unsafe {
                mimalloc::mi_realloc_aligned(memory.cast(), size, layout.align()).cast()
            },
            // SAFETY: the memory is of the system's; the rest is as the caller promises.
            false => unsafe { System.realloc(memory, layout, size) },
        }
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        match is_large(memory) {
            // SAFETY: the memory is of mimalloc, and in use until now, as the caller promises.
            true => unsafe { mimalloc::mi_free(memory.cast()) },
            // SAFETY: the memory is of the system's; the rest is as the caller promises.
            false => unsafe { System.dealloc(memory, layout) },
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    const SIZES: [(usize, usize); 5] = [(1, 1), (24, 8), (250, 64), (4000, 4096), (3 << 20, 16)];

    #[test]
    fn memory_goes_back_to_the_allocator_it_is_of() {
        let layouts = SIZES.map(|(size, align)| Layout::from_size_align(size, align).unwrap());
        // SAFETY: no layout is of no bytes.
        let one_of_each = || layouts.map(|layout| unsafe { Heap.alloc_zeroed(layout) });
        let before = one_of_each();
        use_large_pages();
        let after = one_of_each();
        for (pieces, expected) in [(before, false), (after, true)] {
            for (layout, memory) in layouts.into_iter().zip(pieces) {
                assert!(!memory.is_null());
                assert_eq!(memory.addr() % layout.align(), 0);
                assert_eq!(is_large(memory), expected);
                let size = layout.size();
                let grown = Layout::from_size_align(2 * size, layout.align()).unwrap();
                // SAFETY: it is used within its size, and given back once, with the layout that it has by then.
                unsafe {
                    assert!(
                        std::slice::from_raw_parts(memory, size)
                            .iter()
                            .all(|&byte| byte == 0)
                    );
                    memory.write_bytes(7, size);
                    let memory = Heap.realloc(memory, layout, grown.size());
                    assert!(
                        std::slice::from_raw_parts(memory, size)
                            .iter()
                            .all(|&byte| byte == 7)
                    );
                    assert_eq!(is_large(memory), expected);
                    Heap.dealloc(memory, grown);
                }
            }
        }
    }
}

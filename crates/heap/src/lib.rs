//! The allocator of a program that holds many small objects: the C library's, or mimalloc once it is asked for.
//!
//! Why: the C library's heaps grow by a few small pages at a time, under a lock of the whole process, and what is on so many pages is mostly on one that the
//! processor has no translation of. mimalloc takes large pages where the system has them. But it keeps what is freed for a while, some tens of megabytes: too
//! much for a process with a small limit on its memory.
//!
//! Invariants:
//! 1. Memory goes back to the allocator that it is of, whichever gives new memory by then.
//! 2. Until [`use_mimalloc`] is called none is of mimalloc, and nobody has to ask. Whoever has memory of it was told of it by somebody who knew
//!    of that call, so needs no order of its own to know of it.

use libmimalloc_sys as mimalloc;
use rustix::process::{Resource, getrlimit};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

/// The program's allocator, with `#[global_allocator]`.
#[derive(Debug)]
pub struct Heap;

/// Bytes to which mimalloc aligns all blocks that have so many (`MI_MAX_ALIGN_SIZE`).
const MAX_ALIGN: usize = 16;
const PAGE: usize = 4096;
/// Bytes that mimalloc is asked for at most.
const SMALL: usize = 64 << 10;

static USES_MIMALLOC: AtomicBool = AtomicBool::new(false);

/// Limits from which on there is room for what mimalloc keeps: some 40 MiB were measured.
const LIMIT_MIN: usize = 512 << 20;

/// Has new memory come from mimalloc from now on, if this process is to use no more than so many bytes and that is enough. Where its address space has a
/// limit (`ulimit -v`, `ulimit -d`) nothing changes: mimalloc takes a GiB of it at a time.
pub fn suit(limit: usize) {
    let bounds = [Resource::As, Resource::Data].map(|resource| getrlimit(resource).current);
    if has_room(limit, bounds) {
        use_mimalloc();
    }
}

/// Whether a process has, with a limit on what it uses and these on its address space.
fn has_room(limit: usize, bounds: [Option<u64>; 2]) -> bool {
    limit >= LIMIT_MIN && bounds.iter().all(Option::is_none)
}

fn use_mimalloc() {
    USES_MIMALLOC.store(true, Ordering::Relaxed);
}

fn uses_mimalloc() -> bool {
    USES_MIMALLOC.load(Ordering::Relaxed)
}

/// Whether new memory for this layout is of mimalloc.
#[inline]
fn is_for_mimalloc(layout: &Layout) -> bool {
    is_small(layout) && uses_mimalloc()
}

/// What mimalloc may be asked for. Longer memory the C library can take from the system as it is, zeroed, and give back at once; what begins at a page
/// mostly is longer, and for some alignments beyond 64 KiB it is not certain that mimalloc finds a block.
#[inline]
fn is_small(layout: &Layout) -> bool {
    layout.size() <= SMALL && layout.align() <= PAGE
}

/// Whether every block of mimalloc that is long enough is aligned enough: who asks it for an alignment waits longer, and may get a longer block.
#[inline]
fn is_aligned_anyway(layout: &Layout) -> bool {
    layout.align() <= MAX_ALIGN && layout.align() <= layout.size()
}

/// Whether memory in use, of this layout, is of mimalloc.
#[inline]
fn is_of_mimalloc(memory: *mut u8, layout: &Layout) -> bool {
    // SAFETY: it looks the address up, and reads nothing there.
    is_for_mimalloc(layout) && unsafe { mimalloc::mi_is_in_heap_region(memory.cast()) }
}

// SAFETY: everything is left to the allocator that the memory is of.
unsafe impl GlobalAlloc for Heap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match is_for_mimalloc(&layout) {
            true if is_aligned_anyway(&layout) => {
                // SAFETY: it takes any size.
                unsafe { mimalloc::mi_malloc(layout.size()).cast() }
            }
            // SAFETY: a layout's alignment is a power of two.
            true => unsafe { mimalloc::mi_malloc_aligned(layout.size(), layout.align()).cast() },
            // SAFETY: as the caller promises.
            false => unsafe { System.alloc(layout) },
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match is_for_mimalloc(&layout) {
            true if is_aligned_anyway(&layout) => {
                // SAFETY: it takes any size.
                unsafe { mimalloc::mi_zalloc(layout.size()).cast() }
            }
            // SAFETY: a layout's alignment is a power of two.
            true => unsafe { mimalloc::mi_zalloc_aligned(layout.size(), layout.align()).cast() },
            // SAFETY: as the caller promises.
            false => unsafe { System.alloc_zeroed(layout) },
        }
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_of_mimalloc(memory, &layout) {
            // SAFETY: the memory is of the system's; the rest is as the caller promises.
            return unsafe { System.realloc(memory, layout, size) };
        }
        // SAFETY: as the caller promises of the size.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if is_small(&new) {
            // SAFETY: the memory is of mimalloc; the rest is as the caller promises.
            return unsafe {
                mimalloc::mi_realloc_aligned(memory.cast(), size, layout.align()).cast()
            };
        }
        // SAFETY: the new memory is longer than the old one, which ends once it is copied.
        unsafe {
            let longer = System.alloc(new);
            if !longer.is_null() {
                longer.copy_from_nonoverlapping(memory, layout.size());
                mimalloc::mi_free(memory.cast());
            }
            longer
        }
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        match is_of_mimalloc(memory, &layout) {
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

    #[test]
    fn small_limits_change_nothing() {
        assert!(!has_room(LIMIT_MIN - 1, [None, None]));
        assert!(has_room(LIMIT_MIN, [None, None]));
        assert!(!has_room(LIMIT_MIN, [Some(u64::MAX), None]));
        assert!(!has_room(LIMIT_MIN, [None, Some(1 << 40)]));
    }

    const SIZES: [(usize, usize); 8] = [
        (1, 1),
        (4, 16),
        (24, 8),
        (48, 16),
        (250, 64),
        (4000, PAGE),
        (SMALL / 2 + 1, 16),
        (3 << 20, 16),
    ];

    #[test]
    fn memory_goes_back_to_the_allocator_it_is_of_aligned_and_zeroed() {
        let layouts = SIZES.map(|(size, align)| Layout::from_size_align(size, align).unwrap());
        // SAFETY: no layout is of no bytes.
        let one_of_each = || layouts.map(|layout| unsafe { Heap.alloc_zeroed(layout) });
        let before = one_of_each();
        use_mimalloc();
        let after = one_of_each();
        for (pieces, expected) in [(before, false), (after, true)] {
            for (layout, memory) in layouts.into_iter().zip(pieces) {
                let given = expected && is_small(&layout);
                assert_eq!(is_of_mimalloc(memory, &layout), given);
                let size = layout.size();
                let grown = Layout::from_size_align(2 * size, layout.align()).unwrap();
                let shrunk = Layout::from_size_align(size.div_ceil(3), layout.align()).unwrap();
                // SAFETY: it is used within its size, and given back once, with the layout that it has by then.
                unsafe {
                    let holds = |memory: *mut u8, size, value| {
                        assert_eq!(memory.addr() % layout.align(), 0);
                        let bytes = std::slice::from_raw_parts(memory, size);
                        assert!(bytes.iter().all(|&byte| byte == value));
                    };
                    holds(memory, size, 0);
                    memory.write_bytes(7, size);
                    let memory = Heap.realloc(memory, layout, grown.size());
                    holds(memory, size, 7);
                    let moved = expected && is_small(&grown);
                    assert_eq!(is_of_mimalloc(memory, &grown), moved);
                    let memory = Heap.realloc(memory, grown, shrunk.size());
                    holds(memory, shrunk.size(), 7);
                    assert_eq!(is_of_mimalloc(memory, &shrunk), moved);
                    Heap.dealloc(memory, shrunk);
                }
            }
        }
        used_memory_is_aligned_and_zeroed();
    }

    /// Nobody is asked for an alignment that all memory has, so that has to be so. What is zeroed was used before.
    fn used_memory_is_aligned_and_zeroed() {
        let layouts = (0..=21).map(|bits| 1 << bits);
        for align in layouts {
            for size in [1, 8, 15, 16, 17, 48, 100, 4095, 4097, SMALL, SMALL + 1] {
                let layout = Layout::from_size_align(size, align).unwrap();
                // SAFETY: no layout is of no bytes; each is given back once.
                unsafe {
                    for ask in [Heap::alloc, Heap::alloc_zeroed] {
                        let pieces: Vec<*mut u8> = (0..20).map(|_| ask(&Heap, layout)).collect();
                        for piece in pieces {
                            assert_eq!(piece.addr() % align, 0, "{size} {align}");
                            piece.write_bytes(7, size);
                            Heap.dealloc(piece, layout);
                        }
                    }
                    let zeroed = Heap.alloc_zeroed(layout);
                    assert!(
                        std::slice::from_raw_parts(zeroed, size)
                            .iter()
                            .all(|&byte| byte == 0)
                    );
                    Heap.dealloc(zeroed, layout);
                }
            }
        }
    }
}

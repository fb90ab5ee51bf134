//! Memory fetched before it is needed. Who goes through many objects that lie anywhere waits for each in turn; asked for
//! some objects ahead, several are on their way at once.
//!
//! All of it is a hint: nothing is read, and nothing depends on what is there.

use crate::sync::Arc;
use crate::trace;

/// Bytes that the processor fetches at once; where it fetches more, some are asked for twice.
const LINE: usize = 64;
/// Bytes by which the processor knows that more will be read in order.
const AHEAD: usize = 4 * LINE;
/// Of the counts in front of what an [`Arc`] refers to.
const COUNTS: usize = 16;

/// What is done with memory that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Read,
    /// The line is fetched for writing (in exclusive state) at once, instead of for reading first and upgraded later.
    Change,
}

/// All of an object, without what it refers to.
#[inline]
pub fn object<T>(of: &T) {
    lines(std::ptr::from_ref(of).cast(), size_of::<T>(), Use::Read);
}

/// What a reference refers to, and how often that is referred to.
#[inline]
pub fn shared<T>(of: &Arc<T>) {
    lines(counts_of(of), COUNTS + size_of::<T>(), Use::Read);
}

/// The same, when the first bytes, or the counts, will be changed.
#[inline]
pub fn shared_to_change<T>(of: &Arc<T>, first: usize) {
    let start = counts_of(of);
    let end = COUNTS + size_of::<T>();
    let changed =
        ((start as usize + COUNTS + first).next_multiple_of(LINE) - start as usize).min(end);
    lines(start, changed, Use::Change);
    if changed < end {
        lines(start.wrapping_add(changed), end - changed, Use::Read);
    }
}

/// The first bytes of memory that is read in order: the processor fetches what follows by itself.
#[inline]
pub fn start(of: *const u8, len: usize) {
    lines(of, len.min(AHEAD), Use::Read);
}

#[inline]
fn counts_of<T>(of: &Arc<T>) -> *const u8 {
    Arc::as_ptr(of).cast::<u8>().wrapping_sub(COUNTS)
}

#[inline]
fn lines(start: *const u8, len: usize, what_for: Use) {
    trace::ahead(start, len, what_for == Use::Change);
    let skip = start as usize % LINE;
    for at in (0..skip + len).step_by(LINE) {
        line(start.wrapping_sub(skip).wrapping_add(at), what_for);
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn line(at: *const u8, what_for: Use) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    match what_for {
        // SAFETY: a prefetch reads nothing and fails nowhere, whatever the address.
        Use::Read => unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) },
        // SAFETY: as above. By its name, since compilers take it for the former where they must not count on it: processors of
        // 64 bits that do not have it do nothing.
        Use::Change => unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
        },
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline]
fn line(_: *const u8, _: Use) {}

//! Memory fetched before it is needed. Who goes through many objects that lie anywhere waits for each in turn; asked for
//! some objects ahead, several are on their way at once.
//!
//! All of it is a hint: nothing is read, and nothing depends on what is there.

use crate::sync::Arc;

/// Bytes that the processor fetches at once; where it fetches more, some are asked for twice.
const LINE: usize = 64;
/// Bytes by which the processor knows that more will be read in order.
const AHEAD: usize = 4 * LINE;
/// Of the counts in front of what an [`Arc`] refers to.
const COUNTS: usize = 16;

/// All of an object, without what it refers to.
#[inline]
pub fn object<T>(of: &T) {
    lines(std::ptr::from_ref(of).cast(), size_of::<T>());
}

/// What a reference refers to, and how often that is referred to.
#[inline]
pub fn shared<T>(of: &Arc<T>) {
    let start = Arc::as_ptr(of).cast::<u8>().wrapping_sub(COUNTS);
    lines(start, COUNTS + size_of::<T>());
}

/// The first bytes of memory that is read in order: the processor fetches what follows by itself.
#[inline]
pub fn start(of: *const u8, len: usize) {
    lines(of, len.min(AHEAD));
}

#[inline]
fn lines(start: *const u8, len: usize) {
    let skip = start as usize % LINE;
    for at in (0..skip + len).step_by(LINE) {
        line(start.wrapping_sub(skip).wrapping_add(at));
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn line(at: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch reads nothing and fails nowhere, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline]
fn line(_: *const u8) {}

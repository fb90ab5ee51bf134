//! Bytes that some threads copy while another one may change them.
//!
//! What is read so may be part old and part new; a version around it tells ([`crate::atomic`], a sequence lock). Each byte is
//! read and written as by atomic accesses of relaxed order, so a race is no undefined behaviour. On x86-64 they
//! are moved by instructions of which the compiler knows no more than that memory is read and written; others come
//! after those, or before them, in the order of the program (Intel SDM 3A, 9.2.4; Boehm, *Can Seqlocks Get Along with Programming
//! Language Memory Models?*, MSPC 2012, for the fences that the callers need). Some bytes may be moved twice, with what they are then.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use crate::moves::moved;

/// Reads `len` bytes that others may change meanwhile.
///
/// # Safety
/// `from` is valid for reads of `len` bytes, and while this runs they are written through this module, or by the kernel, only. `to` is valid
/// for writes of as many, which nobody else looks at and which are none of those.
#[inline]
pub unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(feature = "simulate")]
    if crate::sched::active() {
        let half = len / 2;
        // SAFETY: the caller's promise, for both parts. What others do in between is seen by halves.
        unsafe {
            copied_out(from, to, half);
            crate::sched::point();
            copied_out(from.add(half), to.add(half), len - half);
        }
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { copied_out(from, to, len) }
}

/// # Safety
/// As for [`copy_out`].
#[inline]
unsafe fn copied_out(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller's promise.
    unsafe {
        moved(from, to, len);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller's promise.
    unsafe {
        by_parts::copy_out(from, to, len);
    }
}

/// Writes `len` bytes that others may read meanwhile, through [`copy_out`].
///
/// # Safety
/// `to` is valid for writes of `len` bytes, and while this runs nobody else writes them, nor reads them but through this
/// module. `from` is valid for reads of as many, which nobody changes and which are none of those.
#[inline]
pub unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller's promise.
    unsafe {
        moved(from, to, len);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller's promise.
    unsafe {
        by_parts::copy_in(from, to, len);
    }
}

/// Zeroes `len` bytes that others may read meanwhile, through [`copy_out`].
///
/// # Safety
/// As for `to` of [`copy_in`].
#[inline]
pub unsafe fn zero(to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller's promise; the direction flag is clear, as everywhere.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            in("al") 0u8,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller's promise.
    unsafe {
        by_parts::zero(to, len);
    }
}

/// Has the kernel put memory behind bytes where there is none, as a write does, and changes none of them. For who reads or writes them meanwhile
/// it is less than a read: by one instruction, of which the compiler knows nothing, and which writes what is there, in one step.
///
/// # Safety
/// `at` is valid for writes of eight bytes, and aligned.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub unsafe fn touch(at: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { std::arch::asm!("lock or qword ptr [{}], 0", in(reg) at, options(nostack)) };
}

/// The same by atomics: of eight bytes where the shared side is aligned to that, else of one.
#[cfg(any(test, miri, not(target_arch = "x86_64")))]
mod by_parts {
    // Not those of `crate::atomic`: a page is no word that cores share, and nobody wants to see each.
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    const WORD: usize = size_of::<u64>();

    /// Calls `byte` and `word` with what offsets they are for.
    fn parts(shared: *const u8, len: usize, byte: impl Fn(usize), word: impl Fn(usize)) {
        let mut at = 0;
        while at < len {
            if shared.addr().wrapping_add(at).is_multiple_of(WORD) && len - at >= WORD {
                word(at);
                at += WORD;
            } else {
                byte(at);
                at += 1;
            }
        }
    }

    /// # Safety
    /// As for the one of the module above.
    pub unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: inside both by `parts`, and aligned; the caller's promise.
        let byte = |at| unsafe { *to.add(at) = shared_u8(from.add(at)).load(Relaxed) };
        let word = |at| {
            // SAFETY: as above.
            unsafe {
                let value = shared_u64(from.add(at)).load(Relaxed);
                to.add(at).cast::<u64>().write_unaligned(value);
            }
        };
        parts(from, len, byte, word);
    }

    /// # Safety
    /// As for the one of the module above.
    pub unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: inside both by `parts`, and aligned; the caller's promise.
        let byte = |at| unsafe { shared_u8(to.add(at)).store(*from.add(at), Relaxed) };
        let word = |at| {
            // SAFETY: as above.
            unsafe {
                let value = from.add(at).cast::<u64>().read_unaligned();
                shared_u64(to.add(at)).store(value, Relaxed);
            }
        };
        parts(to, len, byte, word);
    }

    /// # Safety
    /// As for the one of the module above.
    pub unsafe fn zero(to: *mut u8, len: usize) {
        // SAFETY: inside by `parts`, and aligned; the caller's promise.
        let byte = |at| unsafe { shared_u8(to.add(at)).store(0, Relaxed) };
        // SAFETY: as above.
        let word = |at| unsafe { shared_u64(to.add(at)).store(0, Relaxed) };
        parts(to, len, byte, word);
    }

    /// # Safety
    /// It is valid, and others access it by atomics only, for as long as the reference lives.
    unsafe fn shared_u8<'a>(at: *const u8) -> &'a AtomicU8 {
        // SAFETY: the caller's promise.
        unsafe { AtomicU8::from_ptr(at.cast_mut()) }
    }

    /// # Safety
    /// As for `shared_u8`, and it is aligned.
    unsafe fn shared_u64<'a>(at: *const u8) -> &'a AtomicU64 {
        // SAFETY: the caller's promise.
        unsafe { AtomicU64::from_ptr(at.cast_mut().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared bytes, private bytes, how many.
    type Copy = unsafe fn(*const u8, *mut u8, usize);

    fn check(copy_out: Copy, copy_in: Copy, zero: unsafe fn(*mut u8, usize)) {
        let source: Vec<u8> = (0..100).map(|i| i + 1).collect();
        for start in 0..17 {
            for len in 0..60 {
                for copy in [copy_out, copy_in] {
                    let mut target = [0; 100];
                    // SAFETY: both are longer than what is copied, and apart.
                    unsafe {
                        copy(
                            source[start..].as_ptr(),
                            target[20 - start..].as_mut_ptr(),
                            len,
                        )
                    };
                    let (from, to) = (start..start + len, 20 - start..20 - start + len);
                    assert_eq!(target[to.clone()], source[from]);
                    let others = target[..to.start].iter().chain(&target[to.end..]);
                    assert!(others.into_iter().all(|&byte| byte == 0));
                }
                let mut target = source.clone();
                // SAFETY: it is longer than that.
                unsafe { zero(target[start..].as_mut_ptr(), len) };
                assert!(target[start..start + len].iter().all(|&byte| byte == 0));
                assert_eq!(target[..start], source[..start]);
                assert_eq!(target[start + len..], source[start + len..]);
            }
        }
    }

    #[test]
    fn bytes_come_where_they_belong_and_no_others_change() {
        check(copy_out, copy_in, zero);
        check(by_parts::copy_out, by_parts::copy_in, by_parts::zero);
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[test]
    fn a_touch_changes_nothing() {
        for value in [0, 1, 1 << 63, u64::MAX] {
            let mut words = [7, value, 9];
            // SAFETY: it is ours.
            unsafe { touch((&raw mut words[1]).cast()) };
            assert_eq!(words, [7, value, 9]);
        }
    }
}

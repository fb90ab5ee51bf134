//! Copies of bytes, by what this processor does best.
//!
//! On x86-64 there are two ways. *Strings*: one `rep movsb`, which Intel's processors do by whole lines once they have begun. *Vectors*: 32
//! bytes an instruction where there is AVX, else 16; the last bytes go once more with those before them where they are fewer. The compiler knows no more of
//! either than that memory is read and written, which [`crate::racy`] builds on.
//!
//! On AMD's Zen 3 a `rep movsb` to a place that lies 1 to 31 bytes further in its page of 4 KiB than the bytes do in theirs takes 2.2 µs for
//! 4 KiB from near caches, and else 0.08; vectors take 0.06 to 0.14 wherever it lies. A large buffer of a C library begins 16 bytes
//! behind the begin of a page, so who reads pages of a cache asks for just that, and C libraries have the same instruction in
//! their `memcpy` (seen of glibc 2.36, from 3 KiB on). Copies of some hundred bytes take strings 20 ns, and vectors 3 to 8 (`docs/performance.md`, "Copies of a page").

/// Copies all of `from` to `to`, which is as long. Panics if it is not.
#[inline]
pub fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "as many bytes");
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: so long, and they do not overlap, as one of them is exclusive.
    unsafe {
        moved(from.as_ptr(), to.as_mut_ptr(), from.len());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    to.copy_from_slice(from);
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) use ways::moved;

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod ways {
    use std::arch::asm;
    use std::arch::x86_64::__cpuid;

    use crate::sync::OnceLock;

    /// Copies of so many bytes, and longer ones, are by strings where those are good.
    const LONG: usize = 2048;
    /// What one step by vectors moves.
    const STEP: usize = 4 * 32;

    /// How this processor's copies are best.
    #[derive(Clone, Copy)]
    struct Way {
        /// Strings for [`LONG`] ones.
        strings: bool,
        /// It has vectors of 32 bytes.
        wide: bool,
    }

    fn way() -> Way {
        static WAY: OnceLock<Way> = OnceLock::new();
        *WAY.get_or_init(|| Way {
            strings: &maker() == b"GenuineIntel" && is_x86_feature_detected!("ermsb"),
            wide: is_wide(),
        })
    }

    fn is_wide() -> bool {
        is_x86_feature_detected!("avx")
    }

    /// Who made the processor, in twelve letters.
    fn maker() -> [u8; 12] {
        let found = __cpuid(0);
        let mut maker = [0; 12];
        for (letters, part) in maker
            .chunks_exact_mut(4)
            .zip([found.ebx, found.edx, found.ecx])
        {
            letters.copy_from_slice(&part.to_le_bytes());
        }
        maker
    }

    /// # Safety
    /// `from` is valid for reads of `len` bytes, `to` for writes, and they do not overlap.
    #[inline]
    pub(crate) unsafe fn moved(from: *const u8, to: *mut u8, len: usize) {
        let way = way();
        // SAFETY: the caller's promise, and what the processor has.
        unsafe {
            match way.strings && len >= LONG {
                true => by_strings(from, to, len),
                false => by_vectors(from, to, len, way.wide),
            }
        }
    }

    /// # Safety
    /// As for [`moved`].
    #[inline]
    unsafe fn by_strings(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's promise; the direction flag is clear, as everywhere.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") len => _,
                inout("rdi") to => _,
                inout("rsi") from => _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// # Safety
    /// As for [`moved`], and the processor has AVX if it is `wide`.
    #[inline]
    unsafe fn by_vectors(from: *const u8, to: *mut u8, len: usize, wide: bool) {
        // SAFETY: the caller's promise, and it is so long.
        unsafe {
            match len {
                STEP.. if wide => steps(from, to, len),
                16.. => sixteens(from, to, len),
                8.. => two_words(from, to, len),
                _ => bytes(from, to, len),
            }
        }
    }

    /// # Safety
    /// As for [`moved`], the processor has AVX, and there are at least [`STEP`] bytes.
    #[inline]
    unsafe fn steps(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: a step is done where as many bytes are left; the last one ends with the last byte, and begins behind the first or there.
        unsafe {
            asm!(
                "2:",
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + 32]",
                "vmovdqu ymm2, [{from} + 64]",
                "vmovdqu ymm3, [{from} + 96]",
                "vmovdqu [{to}], ymm0",
                "vmovdqu [{to} + 32], ymm1",
                "vmovdqu [{to} + 64], ymm2",
                "vmovdqu [{to} + 96], ymm3",
                "add {from}, {step}",
                "add {to}, {step}",
                "sub {left}, {step}",
                "cmp {left}, {step}",
                "jae 2b",
                "test {left}, {left}",
                "jz 3f",
                "vmovdqu ymm0, [{from} + {left} - 128]",
                "vmovdqu ymm1, [{from} + {left} - 96]",
                "vmovdqu ymm2, [{from} + {left} - 64]",
                "vmovdqu ymm3, [{from} + {left} - 32]",
                "vmovdqu [{to} + {left} - 128], ymm0",
                "vmovdqu [{to} + {left} - 96], ymm1",
                "vmovdqu [{to} + {left} - 64], ymm2",
                "vmovdqu [{to} + {left} - 32], ymm3",
                "3:",
                // Clears the upper halves of all of them.
                "vzeroupper",
                step = const STEP,
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                left = inout(reg) len => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                options(nostack)
            );
        }
    }

    /// # Safety
    /// As for [`moved`], and there are at least sixteen bytes.
    #[inline]
    unsafe fn sixteens(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: as in `steps`.
        unsafe {
            asm!(
                "2:",
                "movdqu {part}, [{from}]",
                "movdqu [{to}], {part}",
                "add {from}, 16",
                "add {to}, 16",
                "sub {left}, 16",
                "cmp {left}, 16",
                "jae 2b",
                "test {left}, {left}",
                "jz 3f",
                "movdqu {part}, [{from} + {left} - 16]",
                "movdqu [{to} + {left} - 16], {part}",
                "3:",
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                left = inout(reg) len => _,
                part = out(xmm_reg) _,
                options(nostack)
            );
        }
    }

    /// # Safety
    /// As for [`moved`], and there are eight to sixteen bytes.
    #[inline]
    unsafe fn two_words(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the first eight bytes, and the last.
        unsafe {
            asm!(
                "mov {first}, [{from}]",
                "mov {last}, [{from} + {len} - 8]",
                "mov [{to}], {first}",
                "mov [{to} + {len} - 8], {last}",
                from = in(reg) from,
                to = in(reg) to,
                len = in(reg) len,
                first = out(reg) _,
                last = out(reg) _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// # Safety
    /// As for [`moved`].
    #[inline]
    unsafe fn bytes(from: *const u8, to: *mut u8, len: usize) {
        for at in 0..len {
            // SAFETY: inside both.
            unsafe {
                asm!(
                    "mov {byte}, [{from}]",
                    "mov [{to}], {byte}",
                    from = in(reg) from.add(at),
                    to = in(reg) to.add(at),
                    byte = out(reg_byte) _,
                    options(nostack, preserves_flags)
                );
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// A byte that tells its place, and is never 0.
        fn at(place: usize) -> u8 {
            (place % 251) as u8 + 1
        }

        /// # Safety
        /// As for `moved`.
        unsafe fn narrow(from: *const u8, to: *mut u8, len: usize) {
            // SAFETY: the caller's promise.
            unsafe { by_vectors(from, to, len, false) }
        }

        /// # Safety
        /// As for `moved`, and the processor has AVX.
        unsafe fn wide(from: *const u8, to: *mut u8, len: usize) {
            // SAFETY: the caller's promise.
            unsafe { by_vectors(from, to, len, true) }
        }

        fn check(copy: unsafe fn(*const u8, *mut u8, usize)) {
            const ROOM: usize = 40;
            let lengths = (0..300).chain([383, 384, 385, 2047, 2048, 2049, 4096]);
            for len in lengths {
                for (start, end) in [(0, 16), (1, 0), (7, 24), (16, 17), (33, 1)] {
                    let source: Vec<u8> = (0..len + ROOM).map(at).collect();
                    let mut target = vec![0; len + ROOM];
                    // SAFETY: both are longer than that, and apart.
                    unsafe { copy(source[start..].as_ptr(), target[end..].as_mut_ptr(), len) };
                    assert_eq!(target[end..end + len], source[start..start + len], "{len}");
                    let others = target[..end].iter().chain(&target[end + len..]);
                    assert!(others.into_iter().all(|&byte| byte == 0), "{len}");
                }
            }
        }

        #[test]
        fn either_way_moves_all_bytes_and_no_others() {
            check(by_strings);
            check(moved);
            check(narrow);
            if is_wide() {
                check(wide);
            }
        }

        #[test]
        fn the_maker_is_told_in_letters() {
            assert!(
                maker().iter().all(|&letter| matches!(letter, b' '..=b'~')),
                "{:?}",
                maker()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::copy;

    #[test]
    fn a_slice_is_copied_whole() {
        let from: Vec<u8> = (0..10_000).map(|i| (i % 251) as u8).collect();
        for len in [0, 1, 15, 16, 4095, 4096, 10_000] {
            let mut to = vec![0xff; len];
            copy(&from[..len], &mut to);
            assert_eq!(to, from[..len]);
        }
    }

    #[test]
    #[should_panic(expected = "as many bytes")]
    fn what_is_longer_is_not_copied() {
        copy(&[1, 2], &mut [0]);
    }
}

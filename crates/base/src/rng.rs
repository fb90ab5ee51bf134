//! Seeded randomness (SplitMix64 seeding xoshiro256**) and the machine's entropy.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// A small, fast, seeded generator. Not for secrets.
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

impl Rng {
    pub fn new(seed: u64) -> Self {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        };
        Rng([next(), next(), next(), next()])
    }

    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in `0..bound`; `bound` must not be zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0);
        ((self.next_u64() as u128 * bound as u128) >> 64) as u64
    }

    /// Uniform in `low..high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// True once in `n` times on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn fill(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(8) {
            let bytes = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
    }

    /// One element of a non-empty slice.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }
}

/// 16 bytes from the kernel's entropy pool, for identifiers and hash keys.
///
/// # Errors
/// The kernel gives none, by its call or by /dev/urandom.
pub fn entropy() -> io::Result<[u8; 16]> {
    entropy_by(getrandom, Path::new("/dev/urandom"))
}

/// As many as the kernel has now.
fn getrandom(out: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the pointer and length name `out`.
    let n = unsafe { libc::getrandom(out.as_mut_ptr().cast(), out.len(), 0) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// By a call, or by a device where that fails: a filter of system calls may know nothing of it.
fn entropy_by(
    call: impl Fn(&mut [u8]) -> io::Result<usize>,
    device: &Path,
) -> io::Result<[u8; 16]> {
    let mut out = [0u8; 16];
    let mut filled = 0;
    let failed = loop {
        match call(&mut out[filled..]) {
            Ok(0) => break io::ErrorKind::UnexpectedEof.into(),
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => break error,
        }
        if filled == out.len() {
            return Ok(out);
        }
    };
    let read = File::open(device).and_then(|mut device| device.read_exact(&mut out));
    read.map(|()| out).map_err(|error| {
        let device = device.display();
        io::Error::other(format!(
            "the kernel gives no random bytes: getrandom(2) fails ({failed}), and so does {device} ({error}); allow one of them"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// It asked again for ever.
    #[test]
    fn entropy_is_of_the_device_where_the_call_is_forbidden_and_an_error_where_that_is_not_there() {
        let device = Path::new("/dev/urandom");
        for number in [libc::ENOSYS, libc::EPERM] {
            let calls = Cell::new(0);
            let forbidden = |_: &mut [u8]| {
                calls.set(calls.get() + 1);
                assert_eq!(calls.get(), 1, "it is asked again");
                Err(io::Error::from_raw_os_error(number))
            };
            assert_ne!(entropy_by(forbidden, device).unwrap(), [0; 16]);
            calls.set(0);
            let nothing = entropy_by(forbidden, Path::new("/dev/null/none"));
            let error = nothing.unwrap_err().to_string();
            assert!(
                error.contains("getrandom") && error.contains("/dev/null/none"),
                "{error}"
            );
        }
        // A signal, and a few bytes at a time, are neither.
        let calls = Cell::new(0_u8);
        let slow = |out: &mut [u8]| {
            calls.set(calls.get() + 1);
            if calls.get().is_multiple_of(2) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let few = out.len().min(5);
            out[..few].fill(calls.get());
            Ok(few)
        };
        let filled = entropy_by(slow, Path::new("/dev/null/none")).unwrap();
        assert_eq!(filled, [1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 5, 5, 5, 5, 5, 7]);
        assert_ne!(entropy().unwrap(), entropy().unwrap());
    }
}

//! Numbers and times of variable length.
//!
//! A number has seven bits in each byte, the lowest first; all bytes but the last have their highest
//! bit set. A time is one word, seconds above nanoseconds, if it is one from 1970 to 2514; else that
//! word has all bits set, and a `Time` follows. Only the shortest form is read, so what is equal has
//! equal bytes.

use crate::inode::Time;
use crate::{Damage, I64, U32};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of the longest number.
pub const NUMBER_MAX: usize = 10;
/// Bytes of the longest time.
pub const TIME_MAX: usize = 8 + Time::SIZE;

const NSEC_BITS: u32 = 30;
const NSEC_MASK: u64 = (1 << NSEC_BITS) - 1;
const NSECS: u32 = 1_000_000_000;
/// Says that a `Time` follows; its nanoseconds would be out of range.
const WIDE: u64 = u64::MAX;

/// Bytes that a number takes.
#[inline]
pub fn number_len(number: u64) -> usize {
    // A seventh of the bits, rounded up, without a division.
    let highest = 63 - (number | 1).leading_zeros() as usize;
    (highest * 9 + 73) / 64
}

#[inline]
pub fn put_number(out: &mut Vec<u8>, number: u64) {
    match number < 0x80 {
        true => out.push(number as u8),
        false => put_long(out, number),
    }
}

/// What is written at once for a number of more than one byte: always enough.
const LONG: usize = 16;

#[inline(never)]
fn put_long(out: &mut Vec<u8>, number: u64) {
    // One look at the capacity; whatever calls something else is apart, so that this saves no registers.
    if out.capacity() - out.len() < LONG {
        return put_growing(out, number);
    }
    let (start, len) = (out.len(), number_len(number));
    if number < 1 << 56 {
        let more = MORE & ((1 << (8 * (len - 1))) - 1);
        out.extend_from_slice(&(spread(number) | more).to_le_bytes());
    } else {
        let mut bytes = [0; 10];
        bytes[..8].copy_from_slice(&(spread(number) | MORE).to_le_bytes());
        bytes[8] = (number >> 56) as u8 & 0x7F | ((number >> 63) as u8) << 7;
        bytes[9] = (number >> 63) as u8;
        out.extend_from_slice(&bytes);
    }
    out.truncate(start + len);
}

#[cold]
#[inline(never)]
fn put_growing(out: &mut Vec<u8>, number: u64) {
    out.reserve(LONG);
    put_long(out, number);
}

/// The highest bit of each byte.
const MORE: u64 = 0x8080_8080_8080_8080;

/// The lowest 56 bits, seven in each byte.
fn spread(number: u64) -> u64 {
    let halves = number & 0x0FFF_FFFF | (number & 0x00FF_FFFF_F000_0000) << 4;
    let pairs = halves & 0x0000_3FFF_0000_3FFF | (halves & 0x0FFF_C000_0FFF_C000) << 2;
    pairs & 0x007F_007F_007F_007F | (pairs & 0x3F80_3F80_3F80_3F80) << 1
}

/// Fills `bytes` with a number of that length.
#[inline]
pub fn write_number(bytes: &mut [u8], mut number: u64) {
    debug_assert_eq!(bytes.len(), number_len(number));
    let Some((last, first)) = bytes.split_last_mut() else {
        return;
    };
    for byte in first {
        *byte = number as u8 | 0x80;
        number >>= 7;
    }
    *last = number as u8;
}

/// The number at the start of `bytes`, and what follows; `None` when there is none in its shortest form.
#[inline]
pub fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    match bytes {
        [byte, rest @ ..] if *byte < 0x80 => Some(((*byte).into(), rest)),
        _ => long_number(bytes),
    }
}

/// One that may have several bytes: all at once, if they are in a word, and that is there.
#[inline]
fn long_number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    // A word without an end is no word at all.
    let word = bytes
        .first_chunk()
        .map_or(u64::MAX, |word| u64::from_le_bytes(*word));
    let len = match ends(word) {
        0 => return longer_number(bytes),
        ends => ends.trailing_zeros() + 1,
    };
    let own = word & (u64::MAX >> (u64::BITS - len)) & !MORE;
    let is_shortest = own >> (len - 8) != 0;
    is_shortest.then(|| (gather(own), &bytes[len as usize / 8..]))
}

#[inline(never)]
fn longer_number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut number = 0;
    for (i, &byte) in bytes.iter().take(NUMBER_MAX).enumerate() {
        let bits = (byte & 0x7F) as u64;
        if (i == NUMBER_MAX - 1 && byte > 1) || (i > 0 && byte == 0) {
            return None;
        }
        number |= bits << (7 * i);
        if byte & 0x80 == 0 {
            return Some((number, &bytes[i + 1..]));
        }
    }
    None
}

/// The three numbers that `word` begins with, and the bytes that they take; `None` if they are not all in it, or one is not in its
/// shortest form: [`number`] tells which.
#[inline(always)]
pub fn three_numbers(word: u64) -> Option<([u64; 3], usize)> {
    let (mut ends, mut from) = (ends(word), 0);
    let mut numbers = [0; 3];
    for number in &mut numbers {
        if ends == 0 {
            return None;
        }
        let to = ends.trailing_zeros() + 1;
        let own = ((word & (u64::MAX >> (u64::BITS - to))) >> from) & !MORE;
        let len = to - from;
        if len > 8 && own >> (len - 8) == 0 {
            return None;
        }
        *number = if len == 8 { own } else { gather(own) };
        (ends, from) = (ends & (ends - 1), to);
    }
    Some((numbers, from as usize / 8))
}

/// Undoes [`spread`].
#[inline]
fn gather(bytes: u64) -> u64 {
    let pairs = bytes & 0x007F_007F_007F_007F | (bytes & 0x7F00_7F00_7F00_7F00) >> 1;
    let halves = pairs & 0x0000_3FFF_0000_3FFF | (pairs & 0x3FFF_0000_3FFF_0000) >> 2;
    halves & 0x0FFF_FFFF | (halves & 0x0FFF_FFFF_0000_0000) >> 4
}

/// The number at the start of `bytes`, and what follows; [`number`] has read it before.
#[inline]
pub fn known_number(bytes: &[u8]) -> (u64, &[u8]) {
    let (mut number, mut at) = (0, 0);
    loop {
        let byte = bytes[at];
        number |= ((byte & 0x7F) as u64) << (7 * at);
        at += 1;
        if byte & 0x80 == 0 {
            return (number, &bytes[at..]);
        }
    }
}

/// The highest bits of those bytes of a word that numbers end with.
#[inline]
pub fn ends(word: u64) -> u64 {
    !word & MORE
}

/// Bytes of the number at the start of `bytes`; [`number`] has read it before.
#[inline]
pub fn known_len(bytes: &[u8]) -> usize {
    let ends = match bytes.first_chunk() {
        Some(word) => ends(u64::from_le_bytes(*word)),
        None => 0,
    };
    match ends {
        0 => bytes.iter().take_while(|byte| **byte & 0x80 != 0).count() + 1,
        _ => ends.trailing_zeros() as usize / 8 + 1,
    }
}

/// A signed number as one without a sign: small when it is near 0.
pub fn unsigned(number: i64) -> u64 {
    (number << 1 ^ number >> 63) as u64
}

pub fn signed(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
}

/// Appends a time; `nsec` is below 1,000,000,000.
#[inline]
pub fn put_time(out: &mut Vec<u8>, sec: i64, nsec: u32) {
    if (0..1 << (64 - NSEC_BITS)).contains(&sec) {
        let word = (sec as u64) << NSEC_BITS | nsec as u64;
        return out.extend_from_slice(&word.to_le_bytes());
    }
    out.extend_from_slice(&WIDE.to_le_bytes());
    let (sec, nsec) = (I64::new(sec), U32::new(nsec));
    out.extend_from_slice(Time { sec, nsec }.as_bytes());
}

/// The time at the start of `bytes`, in seconds and nanoseconds, and what follows.
pub fn time(bytes: &[u8]) -> Result<((i64, u32), &[u8]), Damage> {
    let damage = |what: &str| Damage::new("time", what);
    let (word, rest) = bytes
        .split_first_chunk()
        .ok_or_else(|| damage("cut short"))?;
    let word = u64::from_le_bytes(*word);
    let (time, rest) = match word {
        WIDE => {
            let (time, rest) = Time::read_from_prefix(rest).map_err(|_| damage("cut short"))?;
            let sec = time.sec.get();
            if (0..1 << (64 - NSEC_BITS)).contains(&sec) {
                return Err(damage("not in its shortest form"));
            }
            ((sec, time.nsec.get()), rest)
        }
        _ => {
            let (sec, nsec) = (word >> NSEC_BITS, word & NSEC_MASK);
            ((sec as i64, nsec as u32), rest)
        }
    };
    if time.1 >= NSECS {
        return Err(damage("nanoseconds out of range"));
    }
    Ok((time, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_a_round_trip_in_as_many_bytes_as_said() {
        let near = |bits: u32| [(1u64 << bits) - 1, 1 << bits, (1 << bits) + 1];
        let all = (0..64).flat_map(near).chain([u64::MAX]);
        for wanted in all {
            let mut bytes = Vec::new();
            put_number(&mut bytes, wanted);
            assert_eq!(bytes.len(), number_len(wanted), "{wanted}");
            assert!(bytes.len() <= NUMBER_MAX);
            let len = bytes.len();
            bytes.push(7);
            assert_eq!(number(&bytes), Some((wanted, &[7][..])));
            for behind in [0, 0x7F, 0x80, 0xFF] {
                let mut more = bytes[..len].to_vec();
                more.resize(len + 9, behind);
                assert_eq!(number(&more), Some((wanted, &[behind; 9][..])));
            }
            for cut in 0..len {
                assert_eq!(number(&bytes[..cut]), None);
            }
            assert_eq!(unsigned(signed(wanted)), wanted);
        }
        assert_eq!([0, -1, 1, -2].map(unsigned), [0, 1, 2, 3]);
    }

    #[test]
    fn a_number_has_one_form() {
        assert_eq!(number(&[0x81, 0]), None);
        assert_eq!(number(&[0x80, 0]), None);
        for len in 1..8 {
            let mut longer = [0x81; 9];
            longer[len..].fill(0);
            assert_eq!(number(&longer), None);
        }
        assert_eq!(number(&[0xFF; 11]), None);
        let mut most = [0xFF; 10];
        most[9] = 1;
        assert_eq!(number(&most), Some((u64::MAX, &[][..])));
        most[9] = 2;
        assert_eq!(number(&most), None);
    }

    #[test]
    fn times_survive_a_round_trip_and_have_one_form() {
        let seconds = [
            0,
            1,
            1_763_000_000,
            (1 << 34) - 1,
            1 << 34,
            -1,
            i64::MIN,
            i64::MAX,
        ];
        for sec in seconds {
            for nsec in [0, 5, NSECS - 1] {
                let mut bytes = Vec::new();
                put_time(&mut bytes, sec, nsec);
                let small = (0..1 << 34).contains(&sec);
                assert_eq!(bytes.len(), if small { 8 } else { TIME_MAX });
                assert_eq!(time(&bytes).unwrap(), ((sec, nsec), &[][..]));
                assert!(time(&bytes[..bytes.len() - 1]).is_err());
            }
        }
        let word = |nsec: u64| (5u64 << 30 | nsec).to_le_bytes();
        assert!(time(&word(NSECS as u64 - 1)).is_ok());
        assert!(time(&word(NSECS as u64)).is_err());
        let wide = |sec, nsec| {
            let mut bytes = vec![0xFF; 8];
            let (sec, nsec) = (I64::new(sec), U32::new(nsec));
            bytes.extend_from_slice(Time { sec, nsec }.as_bytes());
            time(&bytes).is_ok()
        };
        assert!(wide(-3, 1));
        assert!(!wide(-3, NSECS), "nanoseconds");
        assert!(!wide(3, 1), "fits the short form");
    }
}

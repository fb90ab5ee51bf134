//! Every byte that Sheaf puts on a device: structures, checksums, versions and the
//! geometry computed from them. No I/O, no threads, no caches.
//!
//! All integers are little-endian and unaligned, so a structure's offsets are the same
//! on every machine. Each on-disk structure is declared with [`layout!`], which asserts
//! its size and records its fields, from which `docs/format.md` is generated.

#[macro_use]
mod layout;
pub mod checkpoint;
pub mod delta;
pub mod dir;
pub mod extent;
pub mod geometry;
pub mod inode;
pub mod item;
pub mod journal;
pub mod label;
pub mod packed;
pub mod table;
pub mod xattr;

pub use layout::{FieldDoc, PackedDoc, PackedFieldDoc, StructDoc, packed_tables, tables};
pub use zerocopy::byteorder::little_endian::{I64, U16, U32, U64};

/// The unit of addressing and of data allocation, in bytes.
pub const BLOCK_SIZE: usize = 4096;
pub const BLOCK_SHIFT: u32 = 12;

/// The version this code writes, and the only one it reads: a label with another is refused.
/// Version 2 keys the checksums of journal batches by the array's label; version 4 packs inodes, names
/// and records; version 5 keeps the last page of a
/// file that grows by synced appends in its inode; version 6 has checksums of data in the journal; version 7 keys those of items, too.
pub const FORMAT_VERSION: u32 = 7;

/// The most devices one array can have.
pub const MAX_DEVICES: usize = 16;

/// Identifies a node: inode, directory bucket, extent-tree node and so on. 0 names none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nid(pub u64);

/// Index of a 4 KiB block in the array's logical space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u64);

impl Block {
    /// The byte address of the block's first byte.
    pub fn byte(self) -> u64 {
        self.0 << BLOCK_SHIFT
    }
}

impl std::fmt::Display for Nid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::fmt::Display for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A structure that does not hold what it must.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{structure}: {what}")]
pub struct Damage {
    /// Which structure, in the words of `docs/format.md`.
    pub structure: &'static str,
    /// What is wrong with it.
    pub what: String,
}

impl Damage {
    pub fn new(structure: &'static str, what: impl Into<String>) -> Self {
        Damage {
            structure,
            what: what.into(),
        }
    }
}

/// Mounts, epochs, checkpoints, batches and versions of nodes have numbers up to this. No array lives to see it, and
/// what is added to such a number does not overflow.
pub const COUNTER_MAX: u64 = 1 << 62;

/// A checkpoint record, where everything begins, has numbers up to this; one with greater numbers is not written. What follows
/// it has greater ones.
pub const COUNTER_RECORD_MAX: u64 = COUNTER_MAX / 2;

/// What a search finds and nothing points at counts only with numbers up to this: what is made of it must be followed by
/// records.
pub const COUNTER_FOUND_MAX: u64 = COUNTER_RECORD_MAX / 2;

/// CRC-32C of `bytes`, continuing from `seed`.
pub fn checksum(seed: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(seed, bytes)
}

/// The checksum of bytes that follow each other, of which the first have the checksum `first` and the others, `len` of
/// them, the checksum `then` from seed 0. Takes a microsecond.
///
/// A checksum is a polynomial over GF(2) modulo that of CRC-32C, its highest bit the coefficient of x⁰. `len` bytes
/// more multiply it by x to the power of 8 · `len`.
pub fn checksum_joined(first: u32, then: u32, len: u64) -> u32 {
    let mut shifted = first;
    for (bit, power) in BYTE_POWERS.iter().enumerate() {
        if len >> bit & 1 == 1 {
            shifted = multiply(shifted, *power);
        }
    }
    shifted ^ then
}

/// x⁸ to the powers of two.
const BYTE_POWERS: [u32; 64] = {
    let mut powers = [1 << (31 - 8); 64];
    let mut i = 1;
    while i < powers.len() {
        powers[i] = multiply(powers[i - 1], powers[i - 1]);
        i += 1;
    }
    powers
};

/// The product of two polynomials modulo that of CRC-32C.
const fn multiply(a: u32, b: u32) -> u32 {
    // x³² modulo the polynomial.
    const REST: u32 = 0x82F6_3B78;
    // `power` is b · xⁱ.
    let (mut product, mut power, mut i) = (0, b, 0);
    while i < 32 {
        if a >> (31 - i) & 1 == 1 {
            product ^= power;
        }
        power = (power >> 1) ^ (REST & (power & 1).wrapping_neg());
        i += 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_pieces_join_to_that_of_the_whole() {
        let bytes: Vec<u8> = (0..70_000u32)
            .map(|i| (i.wrapping_mul(i) >> 7) as u8)
            .collect();
        for (seed, len) in [(0, 0), (7, 1), (u32::MAX, 300), (0x1234_5678, bytes.len())] {
            let whole = checksum(seed, &bytes[..len]);
            for cut in [0, 1, len / 3, len / 2, len.saturating_sub(1), len] {
                let cut = cut.min(len);
                let first = checksum(seed, &bytes[..cut]);
                let then = checksum(0, &bytes[cut..len]);
                assert_eq!(checksum_joined(first, then, (len - cut) as u64), whole);
            }
        }
    }
}

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
/// and records.
pub const FORMAT_VERSION: u32 = 4;

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

/// Mounts, epochs, checkpoints and batches have numbers below this. No array lives to see it, and
/// what is added to such a number does not overflow.
pub const COUNTER_MAX: u64 = 1 << 62;

/// CRC-32C of `bytes`, continuing from `seed`.
pub fn checksum(seed: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(seed, bytes)
}

//! Directory entries on disk.

use crate::U64;

/// The longest name, in bytes.
pub const NAME_MAX: usize = 255;

/// Bits of an entry's key that tell entries with equal hashes apart.
pub const COLLISION_BITS: u32 = 7;
/// Bits of the name's hash that a key holds. Keys stay below 2^62, so that a directory
/// offset, which is a key plus a small number, is a positive `off_t`.
pub const HASH_BITS: u32 = 55;

layout! {
    /// Header of a directory entry; the name follows.
    pub struct DirEntryHeader: 26 {
        /// The name's hash (55 bits, SipHash-1-3 under the label's key), then 7 bits that tell
        /// entries with equal hashes apart. Entries are in ascending order of it.
        pub key: U64,
        /// The inode.
        pub nid: U64,
        /// The inode's generation.
        pub generation: U64,
        /// File type as in `d_type`.
        pub kind: u8,
        /// Length of the name, 1 to 255.
        pub name_len: u8,
    }
}

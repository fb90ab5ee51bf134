//! Directory entries on disk.

use crate::packed::NUMBER_MAX;

/// The longest name, in bytes.
pub const NAME_MAX: usize = 255;

/// Bits of an entry's key that tell entries with equal hashes apart.
pub const COLLISION_BITS: u32 = 7;
/// Bits of the name's hash that a key holds. Keys stay below 2^62, so that a directory
/// offset, which is a key plus a small number, is a positive `off_t`.
pub const HASH_BITS: u32 = 55;

packed! {
    /// A directory entry.
    DirEntry {
        /// Length of the name, 1 to 255.
        name_len: "u8",
        /// File type as in `d_type` in the lowest four bits; see `ENTRY_*`.
        kind: "u8",
        /// 55 bits, SipHash-1-3 under the label's key. With the tie-breaker below, of 7 bits, it is the entry's key:
        /// entries are in ascending order of it.
        hash: "7 bytes",
        /// Tells entries with equal hashes apart, if `ENTRY_TIE` says that it is there; else 0.
        tie: "u8",
        /// The inode.
        nid: "number",
        /// The inode's generation, if `ENTRY_GENERATION` says that it is there; else 1.
        generation: "number",
        /// The name.
        name: "bytes",
    }
}

/// Bits of an entry's `kind` for the file type.
pub const ENTRY_TYPE: u8 = 0x0F;
/// The tie-breaker is there.
pub const ENTRY_TIE: u8 = 0x10;
/// The generation is there.
pub const ENTRY_GENERATION: u8 = 0x20;
/// Bytes of a hash.
pub const HASH_BYTES: usize = 7;
/// Keys are below this.
pub const KEY_LIMIT: u64 = 1 << (HASH_BITS + COLLISION_BITS);
/// Bytes of an entry beside its name, at least and at most.
pub const ENTRY_MIN: usize = 2 + HASH_BYTES + 1;
pub const ENTRY_MAX: usize = 2 + HASH_BYTES + 1 + 2 * NUMBER_MAX;

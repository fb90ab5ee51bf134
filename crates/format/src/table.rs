//! The node table on disk: a copy-on-write radix tree of items.
//!
//! ```text
//! checkpoint record ─ 128 roots ─► map page: 256 regions ─► region page: 64 leaves + bitmap
//!                                                            └► leaf page: 256 node entries
//! ```

use crate::{Nid, U64};

/// Node entries in a leaf page.
pub const LEAF_NIDS: u64 = 256;
/// Leaf pages in a region.
pub const REGION_LEAVES: u64 = 64;
/// Nids in a region.
pub const REGION_NIDS: u64 = LEAF_NIDS * REGION_LEAVES;
/// Regions in a map page.
pub const MAP_REGIONS: u64 = 256;
/// Map pages that the checkpoint record points at.
pub const ROOTS: u64 = 128;
/// Nids at or above this do not exist.
pub const NID_LIMIT: u64 = ROOTS * MAP_REGIONS * REGION_NIDS;
/// Bytes of a region's allocation bitmap (bit set: nid in use).
pub const REGION_BITMAP_BYTES: usize = (REGION_NIDS / 8) as usize;
/// Payload of a region page: 64 pointers, then the bitmap.
pub const REGION_PAGE_BYTES: usize = REGION_LEAVES as usize * 16 + REGION_BITMAP_BYTES;

/// The space map of chunk `c` has nid `SPACE_MAP_FIRST + c`; ordinary nids lie below.
pub const SPACE_MAP_FIRST: u64 = (ROOTS - 1) * MAP_REGIONS * REGION_NIDS;
/// Nids below this are given out by number at mkfs, never by the allocator.
pub const RESERVED_NIDS: u64 = 64;

/// The node kind of a space map; file-system kinds start at [`FIRST_FS_KIND`].
pub const KIND_SPACE_MAP: u8 = 1;
pub const FIRST_FS_KIND: u8 = 16;
/// Node kinds are below this.
pub const KIND_LIMIT: u8 = 32;

pub fn space_map_nid(chunk: u32) -> Nid {
    Nid(SPACE_MAP_FIRST + chunk as u64)
}

layout! {
    /// One entry of the node table.
    pub struct NodeEntry: 16 {
        /// Place of the newest checkpointed image, packed as in `ItemPointer`; 0: no node.
        pub place: U64,
        /// Version of that image, or of the deletion; never reset, so that deltas of an
        /// earlier use of the nid are told from those of a later one.
        pub version: U64,
    }
}

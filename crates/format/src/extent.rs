//! Extents on disk.

use crate::{U32, U64};

/// The blocks are allocated but hold no data yet: they read as zeros.
pub const EXTENT_UNWRITTEN: u32 = 1;

layout! {
    /// A run of a file's pages in consecutive blocks.
    pub struct ExtentEntry: 24 {
        /// First page of the file; entries are in ascending order and do not overlap.
        pub page: U64,
        /// First block.
        pub block: U64,
        /// Pages, at least 1.
        pub len: U32,
        /// See `EXTENT_*`.
        pub flags: U32,
    }
}

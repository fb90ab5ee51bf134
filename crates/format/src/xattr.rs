//! Extended attributes on disk.

use crate::{U32, U64};

/// The longest value, in bytes.
pub const VALUE_MAX: usize = 64 << 10;
/// Longer values are stored in nodes of their own.
pub const VALUE_INLINE_MAX: usize = 1 << 10;
/// Bytes of a value in each of its nodes but the last.
pub const VALUE_PIECE: usize = 15 << 10;
/// Bytes of attributes that an inode holds before they move to a tree.
pub const XATTR_INLINE_MAX: usize = 512;

layout! {
    /// Header of an extended attribute; the name follows, then the value or the nids
    /// (8 bytes each) of the nodes that hold it.
    pub struct XattrHeader: 14 {
        /// Hash and tie-breaker, as in a directory entry.
        pub key: U64,
        /// Bytes of the value.
        pub value_len: U32,
        /// Length of the name, 1 to 255, prefix included.
        pub name_len: u8,
        /// Nodes that hold the value; 0: it follows the name.
        pub nodes: u8,
    }
}

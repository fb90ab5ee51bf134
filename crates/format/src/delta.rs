//! Deltas of file-system nodes on disk: one tag byte, then what the tag says.
//! Integers are little-endian; numbers and times are those of `packed.rs`; lists run to the end of the delta.

/// `u16` mask of `ATTR_*`, then the fields in the order of their bits: numbers and times.
pub const ATTRS: u8 = 1;
/// Body kind (`BODY_*`), depth, then the body: replaces an inode's body.
pub const BODY: u8 = 2;
/// Offset (a number), bytes: overwrites or extends an inline body, a gap reads as zeros.
pub const INLINE_WRITE: u8 = 3;
/// Length (a number): cuts an inline body or extends it with zeros.
pub const INLINE_LEN: u8 = 4;
/// A directory entry: inserted.
pub const ENTRY_INSERT: u8 = 5;
/// `u64` key: that directory entry is removed.
pub const ENTRY_REMOVE: u8 = 6;
/// `u64` key, nid and generation (numbers), `u8` kind: the entry of that key refers to this inode now.
pub const ENTRY_RETARGET: u8 = 7;
/// `u64` first page, `u64` end page, extents: they replace whatever maps that range.
pub const EXTENTS: u8 = 8;
/// An orphan entry: inserted.
pub const ORPHAN_INSERT: u8 = 9;
/// `u64` nid: that orphan entry is removed.
pub const ORPHAN_REMOVE: u8 = 10;
/// An extended attribute: inserted, or replaces the one of its key.
pub const XATTR_SET: u8 = 11;
/// `u64` key: that extended attribute is removed.
pub const XATTR_REMOVE: u8 = 12;
/// `u64` key: everything at or above it leaves a leaf or an index node.
pub const DROP_FROM: u8 = 13;
/// `u8` tree (0 body, 1 attributes), `u64` key, nid: a child is added to a root or index node.
pub const CHILD_INSERT: u8 = 14;
/// `u8` tree, `u64` key: the child of that key is removed; a successor of the first child
/// takes over its key.
pub const CHILD_REMOVE: u8 = 15;
/// `u8` tree, `u8` depth, children: the root becomes this.
pub const ROOT_SET: u8 = 16;
/// Inline attributes, as in an inode: replace all of them.
pub const XATTRS_INLINE: u8 = 17;
/// Names, subdirectories (numbers with a sign), time: a directory gains so many names and links, and was
/// changed then.
pub const TALLY: u8 = 18;
/// `u64` key: the first child of an index node, and so the node, covers the keys from this lower one on.
pub const CHILD_LOWER: u8 = 19;
/// Page, length, offset (numbers), bytes: the inode's tail, begun as an empty one if there is none, is of this page;
/// it is cut to that length, or extended with zeros, and then overwritten at the offset.
pub const TAIL: u8 = 20;
/// The tail ends: what its page holds is in its block.
pub const TAIL_END: u8 = 21;

pub const ATTR_MODE: u16 = 1 << 0;
pub const ATTR_UID: u16 = 1 << 1;
pub const ATTR_GID: u16 = 1 << 2;
pub const ATTR_NLINK: u16 = 1 << 3;
pub const ATTR_FLAGS: u16 = 1 << 4;
pub const ATTR_SIZE: u16 = 1 << 5;
pub const ATTR_BLOCKS: u16 = 1 << 6;
pub const ATTR_PARENT: u16 = 1 << 7;
/// All bits set ends the pending truncate.
pub const ATTR_PENDING_TRUNCATE: u16 = 1 << 8;
pub const ATTR_ATIME: u16 = 1 << 9;
pub const ATTR_MTIME: u16 = 1 << 10;
pub const ATTR_CTIME: u16 = 1 << 11;
/// The change sets ctime to the mtime that it sets.
pub const ATTR_CTIME_AS_MTIME: u16 = 1 << 12;
pub const ATTR_KNOWN: u16 = (1 << 13) - 1;

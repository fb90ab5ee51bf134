//! Inodes on disk: what differs from the usual, the inline attributes, the attribute tree's root, the body.

use crate::packed::{NUMBER_MAX, TIME_MAX};
use crate::table::FIRST_FS_KIND;
use crate::{I64, U32, U64};

/// Node kind of an inode.
pub const KIND_INODE: u8 = FIRST_FS_KIND;
/// Node kind of a tree's index node: a list of `TreeEntry`.
pub const KIND_INDEX: u8 = FIRST_FS_KIND + 1;
/// Node kind of a directory bucket: a list of directory entries.
pub const KIND_BUCKET: u8 = FIRST_FS_KIND + 2;
/// Node kind of an extent leaf: a list of `ExtentEntry`.
pub const KIND_EXTENTS: u8 = FIRST_FS_KIND + 3;
/// Node kind of an attribute leaf: a list of extended attributes.
pub const KIND_XATTRS: u8 = FIRST_FS_KIND + 4;
/// Node kind of a piece of a large attribute value.
pub const KIND_VALUE: u8 = FIRST_FS_KIND + 5;
/// Node kind of an orphan leaf: a list of `OrphanEntry`.
pub const KIND_ORPHANS: u8 = FIRST_FS_KIND + 6;

/// What follows the header and the attributes of an inode.
pub const BODY_INLINE: u8 = 0;
/// The body is a list of `ExtentEntry`.
pub const BODY_EXTENTS: u8 = 1;
/// The body is a list of directory entries.
pub const BODY_ENTRIES: u8 = 2;
/// The body is a list of `OrphanEntry`.
pub const BODY_ORPHANS: u8 = 3;
/// The body is the root of a tree: a list of `TreeEntry`.
pub const BODY_TREE: u8 = 4;

/// The root directory.
pub const ROOT_INO: u64 = 1;
/// Nid of the first orphan directory; an unlinked inode with references is in the one with
/// index nid mod [`ORPHAN_DIRECTORIES`].
pub const FIRST_ORPHANS: u64 = 2;
pub const ORPHAN_DIRECTORIES: u64 = 16;

packed! {
    /// An inode. Fields after `generation` are there if their bit in `has` is set, and only if they are not what they are
    /// without.
    PackedInode {
        /// Which of the fields below are there; see `HAS_*`.
        has: "u16",
        /// What the body is in the lowest four bits (see `BODY_*`), in the others the index levels below its root, if
        /// it is a tree.
        body_kind: "u8",
        /// File type and permission bits, as in `st_mode`.
        mode: "number",
        /// Creation.
        btime: "time",
        /// Version at which this use of the nid began.
        generation: "number",
        /// Owner; else 0.
        uid: "number",
        /// Group; else 0.
        gid: "number",
        /// Names that refer to it; a directory has 2 and one per subdirectory. Else 1.
        nlink: "number",
        /// Device number of a device node, as Linux encodes it in 32 bits; else 0.
        rdev: "number",
        /// Room for per-inode flags; else 0.
        flags: "number",
        /// Bytes of a file or a symbolic link's target; entries of a directory. Else 0.
        size: "number",
        /// 4 KiB blocks of data that belong to it; else 0.
        blocks: "number",
        /// Last access; else as `btime`.
        atime: "time",
        /// Last change of the content; else as `btime`.
        mtime: "time",
        /// Last change of the inode; else as `mtime`.
        ctime: "time",
        /// Parent of a directory; else 0.
        parent: "number",
        /// Bytes from here on are being freed and read as holes; else none are.
        pending_truncate: "number",
        /// Inline extended attributes, behind the number of their bytes; else none.
        xattrs: "number, Xattr, …",
        /// Root of the attribute tree: index levels below it, the number of its children, the children. Else there is none.
        xattr_root: "u8, number, TreeEntry, …",
        /// The tail: a page's number, how many bytes it has, the bytes. They and zeros behind them are what the page
        /// holds, whatever its block does; the body is extents or their tree. Else there is none.
        tail: "number, number, bytes",
        /// The body, to the end.
        body: "bytes",
    }
}

pub const HAS_UID: u16 = 1 << 0;
pub const HAS_GID: u16 = 1 << 1;
pub const HAS_NLINK: u16 = 1 << 2;
pub const HAS_RDEV: u16 = 1 << 3;
pub const HAS_FLAGS: u16 = 1 << 4;
pub const HAS_SIZE: u16 = 1 << 5;
pub const HAS_BLOCKS: u16 = 1 << 6;
pub const HAS_ATIME: u16 = 1 << 7;
pub const HAS_MTIME: u16 = 1 << 8;
pub const HAS_CTIME: u16 = 1 << 9;
pub const HAS_PARENT: u16 = 1 << 10;
pub const HAS_PENDING_TRUNCATE: u16 = 1 << 11;
pub const HAS_XATTRS: u16 = 1 << 12;
pub const HAS_XATTR_ROOT: u16 = 1 << 13;
pub const HAS_TAIL: u16 = 1 << 14;
pub const HAS_KNOWN: u16 = (1 << 15) - 1;
/// Bits of `body_kind` below the depth.
pub const BODY_KIND_BITS: u32 = 4;
/// Bytes of an inode without attributes, tail and body, at most.
pub const INODE_HEAD_MAX: usize = 3 + 12 * NUMBER_MAX + 4 * TIME_MAX;

layout! {
    /// A point in time before 1970 or after 2514; see the section on packed structures.
    pub struct Time: 12 {
        /// Seconds since 1970-01-01 00:00:00 UTC; may be negative.
        pub sec: I64,
        /// Nanoseconds, below 1,000,000,000.
        pub nsec: U32,
    }

    /// A child in a tree's root or index node. It covers keys from its own up to the next
    /// entry's; the first entry's key is the lower bound of the whole node.
    pub struct TreeEntry: 16 {
        /// Lowest key of the child.
        pub key: U64,
        /// The child.
        pub nid: U64,
    }

    /// An unlinked inode that is still in use, or whose content is still being freed.
    pub struct OrphanEntry: 16 {
        /// The inode.
        pub nid: U64,
        /// Its generation.
        pub generation: U64,
    }
}

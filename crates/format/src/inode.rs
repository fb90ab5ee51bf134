//! Inodes on disk: a fixed header, the inline attributes, the attribute tree's root, the body.

use crate::table::FIRST_FS_KIND;
use crate::{I64, U16, U32, U64};

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

layout! {
    /// A point in time.
    pub struct Time: 12 {
        /// Seconds since 1970-01-01 00:00:00 UTC; may be negative.
        pub sec: I64,
        /// Nanoseconds, below 1,000,000,000.
        pub nsec: U32,
    }

    /// Header of an inode.
    pub struct InodeHeader: 128 {
        /// File type and permission bits, as in `st_mode`.
        pub mode: U32,
        /// Owner.
        pub uid: U32,
        /// Group.
        pub gid: U32,
        /// Names that refer to it; a directory has 2 and one per subdirectory.
        pub nlink: U32,
        /// Device number of a device node, as Linux encodes it in 32 bits.
        pub rdev: U32,
        /// Zero; room for per-inode flags.
        pub flags: U32,
        /// Bytes of a file or a symbolic link's target; entries of a directory.
        pub size: U64,
        /// 4 KiB blocks of data that belong to it.
        pub blocks: U64,
        /// Last access.
        pub atime: Time,
        /// Last change of the content.
        pub mtime: Time,
        /// Last change of the inode.
        pub ctime: Time,
        /// Creation.
        pub btime: Time,
        /// Version at which this use of the nid began.
        pub generation: U64,
        /// Parent of a directory; else 0.
        pub parent: U64,
        /// Bytes from here on are being freed and read as holes; all bits set: none are.
        pub pending_truncate: U64,
        /// What the body is; see `BODY_*`.
        pub body: u8,
        /// Index levels below the root in the body, if that is a tree.
        pub body_depth: u8,
        /// Index levels below the attribute root.
        pub xattr_depth: u8,
        /// Zero.
        pub reserved: u8,
        /// Bytes of inline extended attributes.
        pub xattr_len: U16,
        /// Entries of the attribute tree's root, which follows them; 0: no tree.
        pub xattr_children: U16,
        /// Bytes of the body, which comes last.
        pub body_len: U32,
        /// Zero.
        pub reserved2: U32,
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

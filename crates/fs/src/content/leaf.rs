//! Which elements fill which leaves of trees.

use super::entry::{Entry, list_len};
use super::{FileExtent, FsNode, Name, Orphan, Xattr};
use format::Damage;
use format::dir::{COLLISION_BITS, ENTRY_MAX, ENTRY_MIN};

/// What the leaves of a tree hold.
pub trait InLeaf: Entry + Clone + PartialEq {
    /// Elements whose keys differ in so many lowest bits only are in one leaf.
    const GROUP_BITS: u32;
    /// Bytes by which an element can grow where it is.
    const GROWS: usize = 0;
    /// Damage when the node is no leaf of such a tree.
    fn in_leaf(node: &FsNode) -> Result<&[Self], Damage>;
    fn leaf(list: Vec<Self>) -> FsNode;
    /// Bytes of all elements of a leaf, encoded.
    fn leaf_len(node: &FsNode) -> Result<usize, Damage> {
        Ok(list_len(Self::in_leaf(node)?))
    }
}

impl InLeaf for Name {
    const GROUP_BITS: u32 = COLLISION_BITS;
    /// When it refers to another inode.
    const GROWS: usize = ENTRY_MAX - ENTRY_MIN;

    fn in_leaf(node: &FsNode) -> Result<&[Name], Damage> {
        node.bucket()
    }

    fn leaf(list: Vec<Name>) -> FsNode {
        FsNode::Bucket(list.into())
    }

    fn leaf_len(node: &FsNode) -> Result<usize, Damage> {
        match node {
            FsNode::Bucket(list) => Ok(list.encoded_len()),
            _ => Ok(list_len(Self::in_leaf(node)?)),
        }
    }
}

impl InLeaf for Xattr {
    const GROUP_BITS: u32 = COLLISION_BITS;

    fn in_leaf(node: &FsNode) -> Result<&[Xattr], Damage> {
        node.xattrs()
    }

    fn leaf(list: Vec<Xattr>) -> FsNode {
        FsNode::Xattrs(list)
    }
}

impl InLeaf for Orphan {
    const GROUP_BITS: u32 = 0;

    fn in_leaf(node: &FsNode) -> Result<&[Orphan], Damage> {
        node.orphans()
    }

    fn leaf(list: Vec<Orphan>) -> FsNode {
        FsNode::Orphans(list)
    }
}

impl InLeaf for FileExtent {
    const GROUP_BITS: u32 = 0;

    fn in_leaf(node: &FsNode) -> Result<&[FileExtent], Damage> {
        node.extents()
    }

    fn leaf(list: Vec<FileExtent>) -> FsNode {
        FsNode::Extents(list)
    }
}

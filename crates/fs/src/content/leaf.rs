//! Which elements fill which leaves of trees.

use super::entry::{Entry, list_len};
use super::{FileExtent, FsNode, Name, NameList, Orphan, Xattr};
use format::Damage;
use format::dir::{COLLISION_BITS, ENTRY_MAX, ENTRY_MIN};
use std::ops::Range;

/// Elements in the order of their keys.
pub trait Elements<T> {
    fn len(&self) -> usize;
    /// A copy of one.
    fn at(&self, i: usize) -> T;
    fn key_at(&self, i: usize) -> u64;
    /// Bytes of one, encoded.
    fn len_at(&self, i: usize) -> usize;
    /// How many have a key below this one.
    fn lower(&self, key: u64) -> usize;
    /// Bytes of all, encoded.
    fn encoded_len(&self) -> usize;

    /// Copies of some.
    fn copy(&self, some: Range<usize>) -> Vec<T> {
        some.map(|i| self.at(i)).collect()
    }
}

impl<T: Entry + Clone> Elements<T> for [T] {
    fn len(&self) -> usize {
        <[T]>::len(self)
    }

    fn at(&self, i: usize) -> T {
        self[i].clone()
    }

    fn key_at(&self, i: usize) -> u64 {
        self[i].key()
    }

    fn len_at(&self, i: usize) -> usize {
        self[i].encoded_len()
    }

    fn lower(&self, key: u64) -> usize {
        self.partition_point(|e| e.key() < key)
    }

    fn encoded_len(&self) -> usize {
        list_len(self)
    }
}

/// What the leaves of a tree hold.
pub trait InLeaf: Entry + Clone + PartialEq {
    /// Elements whose keys differ in so many lowest bits only are in one leaf.
    const GROUP_BITS: u32;
    /// Bytes by which an element can grow where it is.
    const GROWS: usize = 0;
    /// How a node holds them.
    type List: Elements<Self> + ?Sized;
    /// Damage when the node is no leaf of such a tree.
    fn in_leaf(node: &FsNode) -> Result<&Self::List, Damage>;
    fn leaf(list: Vec<Self>) -> FsNode;
}

impl InLeaf for Name {
    const GROUP_BITS: u32 = COLLISION_BITS;
    /// When it refers to another inode.
    const GROWS: usize = ENTRY_MAX - ENTRY_MIN;

    type List = NameList;

    fn in_leaf(node: &FsNode) -> Result<&NameList, Damage> {
        node.bucket()
    }

    fn leaf(list: Vec<Name>) -> FsNode {
        FsNode::Bucket(list.into())
    }
}

impl InLeaf for Xattr {
    const GROUP_BITS: u32 = COLLISION_BITS;

    type List = [Xattr];

    fn in_leaf(node: &FsNode) -> Result<&[Xattr], Damage> {
        node.xattrs()
    }

    fn leaf(list: Vec<Xattr>) -> FsNode {
        FsNode::Xattrs(list)
    }
}

impl InLeaf for Orphan {
    const GROUP_BITS: u32 = 0;

    type List = [Orphan];

    fn in_leaf(node: &FsNode) -> Result<&[Orphan], Damage> {
        node.orphans()
    }

    fn leaf(list: Vec<Orphan>) -> FsNode {
        FsNode::Orphans(list)
    }
}

impl InLeaf for FileExtent {
    const GROUP_BITS: u32 = 0;

    type List = [FileExtent];

    fn in_leaf(node: &FsNode) -> Result<&[FileExtent], Damage> {
        node.extents()
    }

    fn leaf(list: Vec<FileExtent>) -> FsNode {
        FsNode::Extents(list)
    }
}

//! Which elements fill which leaves of trees.

use super::entry::{Entry, list_len};
use super::entry::{Link, NameView};
use super::{FileExtent, FsNode, Name, NameList, Orphan, Xattr};
use format::Damage;
use format::dir::{COLLISION_BITS, ENTRY_MAX, ENTRY_MIN};
use std::ops::Range;

/// Elements in the order of their keys.
pub trait Elements<T> {
    /// One where it lies.
    type View<'a>: Copy
    where
        Self: 'a;
    fn view(&self, i: usize) -> Self::View<'_>;
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
    /// Whether there is one and no more.
    fn is_single(&self) -> bool;
    /// Asks for the memory where those of a group are looked for, by its lowest key.
    fn ask(&self, _first: u64) {}
    /// The one with this very key.
    fn with_key(&self, key: u64) -> Option<Self::View<'_>>;
    /// Bytes of the one with this key, encoded; 0: there is none.
    fn len_of(&self, key: u64) -> usize;
    /// Looks for one that is wanted among those of a group: whose keys differ from `first`, its lowest, in so many lowest bits
    /// at most.
    fn pick(
        &self,
        first: u64,
        bits: u32,
        wanted: impl Fn(Self::View<'_>) -> bool,
    ) -> Pick<Self::View<'_>>;

    /// Copies of some.
    fn copy(&self, some: Range<usize>) -> Vec<T> {
        some.map(|i| self.at(i)).collect()
    }
}

impl<T: Entry + Clone> Elements<T> for [T] {
    type View<'a>
        = &'a T
    where
        T: 'a;

    fn view(&self, i: usize) -> &T {
        &self[i]
    }

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

    fn is_single(&self) -> bool {
        <[T]>::len(self) == 1
    }

    fn with_key(&self, key: u64) -> Option<&T> {
        let at = self.binary_search_by_key(&key, Entry::key).ok()?;
        Some(&self[at])
    }

    fn len_of(&self, key: u64) -> usize {
        self.with_key(key).map_or(0, Entry::encoded_len)
    }

    fn pick(&self, first: u64, bits: u32, wanted: impl Fn(&T) -> bool) -> Pick<&T> {
        let group = &self[self.lower(first)..];
        let group = group
            .iter()
            .take_while(|e| e.key() >> bits == first >> bits);
        Pick::of(group, |e| wanted(e))
    }
}

/// What a look at a group finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick<V> {
    Found(V),
    /// Others of the group.
    Others,
    /// No element of the group.
    Nothing,
}

impl<V> Pick<V> {
    /// `group`: all of it.
    #[inline]
    pub fn of(group: impl Iterator<Item = V>, wanted: impl Fn(&V) -> bool) -> Pick<V> {
        let mut picked = Pick::Nothing;
        for element in group {
            if wanted(&element) {
                return Pick::Found(element);
            }
            picked = Pick::Others;
        }
        picked
    }

    #[inline]
    pub fn found(self) -> Option<V> {
        match self {
            Pick::Found(element) => Some(element),
            Pick::Others | Pick::Nothing => None,
        }
    }
}

/// An element where it lies in a node.
pub type View<'a, T> = <<T as InLeaf>::List as Elements<T>>::View<'a>;

/// What the leaves of a tree hold.
pub trait InLeaf: Entry + Clone + PartialEq {
    /// Elements whose keys differ in so many lowest bits only are in one leaf.
    const GROUP_BITS: u32;
    /// Bytes by which an element can grow where it is.
    const GROWS: usize = 0;
    /// How a node holds them.
    type List: Elements<Self> + ?Sized;
    /// What a look-up tells of one.
    type Found;
    fn found(view: View<'_, Self>) -> Self::Found;
    fn found_key(found: &Self::Found) -> u64;
    /// Damage when the node is no leaf of such a tree.
    fn in_leaf(node: &FsNode) -> Result<&Self::List, Damage>;
    fn leaf(list: Vec<Self>) -> FsNode;
}

impl InLeaf for Name {
    const GROUP_BITS: u32 = COLLISION_BITS;
    /// When it refers to another inode.
    const GROWS: usize = ENTRY_MAX - ENTRY_MIN;

    type List = NameList;
    type Found = Link;

    #[inline]
    fn found(view: NameView<'_>) -> Link {
        view.link()
    }

    fn found_key(found: &Link) -> u64 {
        found.key
    }

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
    type Found = Xattr;

    fn found(view: &Xattr) -> Xattr {
        view.clone()
    }

    fn found_key(found: &Xattr) -> u64 {
        found.key()
    }

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
    type Found = Orphan;

    fn found(view: &Orphan) -> Orphan {
        *view
    }

    fn found_key(found: &Orphan) -> u64 {
        found.key()
    }

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
    type Found = FileExtent;

    fn found(view: &FileExtent) -> FileExtent {
        *view
    }

    fn found_key(found: &FileExtent) -> u64 {
        found.key()
    }

    fn in_leaf(node: &FsNode) -> Result<&[FileExtent], Damage> {
        node.extents()
    }

    fn leaf(list: Vec<FileExtent>) -> FsNode {
        FsNode::Extents(list)
    }
}

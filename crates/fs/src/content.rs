//! What nodes hold: the one type through which the engine stores everything of a file
//! system. Images and deltas are decoded from bytes that may hold anything, so every
//! decoder is total; the layouts are in `format::{inode, dir, extent, xattr, delta}`.

pub mod codec;
pub mod delta;
pub mod entry;
pub mod inode;
pub(crate) mod leaf;
pub mod names;
pub mod tally;

pub use delta::{AttrChange, Delta};
pub use entry::{Child, FileExtent, Link, Name, Orphan, Value, Xattr};
pub use inode::{Body, Inode, Root, Tail, TreeId};
pub use names::NameList;
pub use tally::Tally;

use codec::Reader;
use engine::Merged;
use format::Damage;
use format::inode::{
    KIND_BUCKET, KIND_EXTENTS, KIND_INDEX, KIND_INODE, KIND_ORPHANS, KIND_VALUE, KIND_XATTRS,
};

/// One node of the file system. All but inodes are owned by an inode, and locked only
/// while that inode's lock is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FsNode {
    Inode(Inode),
    /// Inner node of a tree.
    Index(Vec<Child>),
    /// Leaf of a directory.
    Bucket(NameList),
    /// Leaf of a file's extents.
    Extents(Vec<FileExtent>),
    /// Leaf of an attribute tree.
    Xattrs(Vec<Xattr>),
    /// A piece of a large attribute value.
    Value(Vec<u8>),
    /// Leaf of an orphan directory.
    Orphans(Vec<Orphan>),
}

impl FsNode {
    /// The inode, or damage: something refers to this node as one.
    pub fn inode(&self) -> Result<&Inode, Damage> {
        match self {
            FsNode::Inode(inode) => Ok(inode),
            _ => Err(Damage::new("node", "is no inode")),
        }
    }

    pub fn index(&self) -> Result<&[Child], Damage> {
        match self {
            FsNode::Index(list) if !list.is_empty() => Ok(list),
            _ => Err(Damage::new("node", "is no index node")),
        }
    }

    pub fn bucket(&self) -> Result<&NameList, Damage> {
        match self {
            FsNode::Bucket(list) => Ok(list),
            _ => Err(Damage::new("node", "is no directory bucket")),
        }
    }

    pub fn extents(&self) -> Result<&[FileExtent], Damage> {
        match self {
            FsNode::Extents(list) => Ok(list),
            _ => Err(Damage::new("node", "is no extent leaf")),
        }
    }

    pub fn xattrs(&self) -> Result<&[Xattr], Damage> {
        match self {
            FsNode::Xattrs(list) => Ok(list),
            _ => Err(Damage::new("node", "is no attribute leaf")),
        }
    }

    pub fn orphans(&self) -> Result<&[Orphan], Damage> {
        match self {
            FsNode::Orphans(list) => Ok(list),
            _ => Err(Damage::new("node", "is no orphan leaf")),
        }
    }

    pub fn kind(&self) -> u8 {
        match self {
            FsNode::Inode(_) => KIND_INODE,
            FsNode::Index(_) => KIND_INDEX,
            FsNode::Bucket(_) => KIND_BUCKET,
            FsNode::Extents(_) => KIND_EXTENTS,
            FsNode::Xattrs(_) => KIND_XATTRS,
            FsNode::Value(_) => KIND_VALUE,
            FsNode::Orphans(_) => KIND_ORPHANS,
        }
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            FsNode::Inode(inode) => inode.encode(out),
            FsNode::Index(list) => entry::encode_list(list, out),
            FsNode::Bucket(list) => list.encode(out),
            FsNode::Extents(list) => entry::encode_list(list, out),
            FsNode::Xattrs(list) => entry::encode_list(list, out),
            FsNode::Value(bytes) => out.extend_from_slice(bytes),
            FsNode::Orphans(list) => entry::encode_list(list, out),
        }
    }

    pub fn decode(kind: u8, body: &[u8]) -> Result<FsNode, Damage> {
        let mut reader = Reader::new("node", body);
        Ok(match kind {
            KIND_INODE => FsNode::Inode(Inode::decode(body)?),
            KIND_INDEX => FsNode::Index(entry::decode_list(&mut reader)?),
            KIND_BUCKET => FsNode::Bucket(NameList::decode(&mut reader)?),
            KIND_EXTENTS => FsNode::Extents(entry::decode_list(&mut reader)?),
            KIND_XATTRS => FsNode::Xattrs(entry::decode_list(&mut reader)?),
            KIND_VALUE => FsNode::Value(body.to_vec()),
            KIND_ORPHANS => FsNode::Orphans(entry::decode_list(&mut reader)?),
            _ => return Err(Damage::new("node", format!("unknown kind {kind}"))),
        })
    }

    pub fn memory(&self) -> usize {
        match self {
            FsNode::Inode(inode) => inode.memory(),
            FsNode::Index(list) => entry::list_memory(list),
            FsNode::Bucket(list) => list.memory(),
            FsNode::Extents(list) => entry::list_memory(list),
            FsNode::Xattrs(list) => entry::list_memory(list),
            FsNode::Value(bytes) => entry::heap(bytes.capacity()),
            FsNode::Orphans(list) => entry::list_memory(list),
        }
    }
}

impl engine::Content for FsNode {
    type Delta = Delta;

    fn kind(&self) -> u8 {
        FsNode::kind(self)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        FsNode::encode(self, out);
    }

    fn decode(kind: u8, body: &[u8]) -> Result<Self, Damage> {
        FsNode::decode(kind, body)
    }

    fn apply(&mut self, delta: &Delta) -> Result<(), Damage> {
        self.change(delta)
    }

    fn encode_delta(delta: &Delta, out: &mut Vec<u8>) {
        delta.encode(out);
    }

    fn decode_delta(_kind: u8, bytes: &[u8]) -> Result<Delta, Damage> {
        Delta::decode(bytes)
    }

    /// Names in leaves come and go under the directory's shared lock.
    fn merges(&self) -> bool {
        matches!(self, FsNode::Inode(inode)
            if inode.pending.get().is_some() && matches!(inode.body, Body::Tree(_)))
    }

    fn merge(&self, delta: &Delta) -> Result<Merged, Damage> {
        match (self, delta) {
            (FsNode::Inode(inode), Delta::Tally(tally)) => match inode.gain(*tally) {
                Some(merged) => Ok(merged),
                None => Err(Damage::new("delta", "counts names of what is no directory")),
            },
            _ => Err(Damage::new("delta", "cannot be merged")),
        }
    }

    fn merge_again(&mut self, _kind: u8, delta: &[u8]) -> Result<(), Damage> {
        let gained = match (self, Tally::decode_delta(delta)?) {
            (FsNode::Inode(inode), Some(tally)) => inode.gain_again(tally),
            _ => false,
        };
        match gained {
            true => Ok(()),
            false => Err(Damage::new("delta", "cannot be merged")),
        }
    }

    fn pending(&self) -> bool {
        match self {
            FsNode::Inode(inode) => inode.is_pending(),
            _ => false,
        }
    }

    fn settle(&mut self) {
        if let FsNode::Inode(inode) = self {
            inode.settle();
        }
    }

    /// Directories and index nodes.
    fn leads(&self) -> bool {
        match self {
            FsNode::Inode(inode) => inode.mode & libc::S_IFMT == libc::S_IFDIR,
            FsNode::Index(_) => true,
            _ => false,
        }
    }

    fn owned(kind: u8) -> bool {
        kind != KIND_INODE
    }

    fn memory(&self) -> usize {
        FsNode::memory(self)
    }

    fn image_len(&self) -> usize {
        match self {
            FsNode::Inode(inode) => inode.image_len(),
            FsNode::Index(list) => entry::list_len(list),
            FsNode::Bucket(list) => list.encoded_len(),
            FsNode::Extents(list) => entry::list_len(list),
            FsNode::Xattrs(list) => entry::list_len(list),
            FsNode::Value(bytes) => bytes.len(),
            FsNode::Orphans(list) => entry::list_len(list),
        }
    }
}

#[cfg(test)]
mod tests;

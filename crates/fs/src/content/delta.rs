//! Deltas: every way in which a node changes. Small and semantic; each is one journal entry.
//! [`FsNode::change`] is deterministic and refuses nonsense as damage, because recovery
//! runs it on what a device returned.

use super::FsNode;
use super::codec::{Reader, put_time, put_u64};
use super::entry::{self, Child, Entry, FileExtent, Name, Orphan, Xattr};
use super::inode::{self, Body, Inode, Root, Tail, TreeId};
use super::names::NameList;
use super::tally::Tally;
use base::clock::Timestamp;
use format::delta as tag;
use format::dir::ENTRY_TYPE;
use format::item::PAYLOAD_MAX;
use format::packed::{self, put_number};
use format::{Damage, Nid, U16};

/// Fields of an inode to set; `None` leaves one as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttrChange {
    /// All of the mode, type bits included.
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub nlink: Option<u32>,
    pub flags: Option<u32>,
    pub size: Option<u64>,
    pub blocks: Option<u64>,
    pub atime: Option<Timestamp>,
    pub mtime: Option<Timestamp>,
    pub ctime: Option<Timestamp>,
    pub parent: Option<Nid>,
    /// `Some(None)` ends the pending truncate.
    pub pending_truncate: Option<Option<u64>>,
}

/// One change of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    Attrs(AttrChange),
    /// Replaces an inode's body.
    Body(Body),
    /// Overwrites or extends an inline body; a gap reads as zeros.
    InlineWrite {
        offset: u32,
        data: Vec<u8>,
    },
    /// Cuts an inline body, or extends it with zeros.
    InlineLen(u32),
    /// The tail, made if there is none, gets this length, and then these bytes at the offset.
    Tail {
        page: u64,
        len: u32,
        offset: u32,
        data: Vec<u8>,
    },
    /// The tail ends; there is one.
    EndTail,
    /// Adds a name to an inline directory or a bucket.
    InsertName(Name),
    RemoveName(u64),
    /// The name of this key refers to another inode from now on.
    Retarget {
        key: u64,
        nid: Nid,
        generation: u64,
        kind: u8,
    },
    /// Pages `start..end` of an inode with inline extents or of an extent leaf are mapped
    /// as `with` says, and only so; see [`entry::replace_extents`].
    Extents {
        start: u64,
        end: u64,
        with: Vec<FileExtent>,
    },
    InsertOrphan(Orphan),
    RemoveOrphan(Nid),
    /// Inserts, or replaces the attribute of the same key, in an inode or a leaf.
    SetXattr(Xattr),
    RemoveXattr(u64),
    /// A leaf or index node loses all entries at or above the key (to a new node).
    DropFrom(u64),
    /// To an inode's root or an index node.
    InsertChild {
        tree: TreeId,
        child: Child,
    },
    RemoveChild {
        tree: TreeId,
        key: u64,
    },
    /// The root of a tree becomes this; no children: the attribute tree ends.
    SetRoot {
        tree: TreeId,
        root: Root,
    },
    /// Replaces all inline attributes.
    InlineXattrs(Vec<Xattr>),
    /// The first child of an index node covers the keys from this one on, which is no higher.
    Lower(u64),
    /// Names of a directory came and went. The one that can be merged.
    Tally(Tally),
}

impl Delta {
    /// Only ctime and, if asked, mtime.
    pub fn touch(now: Timestamp, content: bool) -> Delta {
        Delta::Attrs(AttrChange {
            mtime: content.then_some(now),
            ctime: Some(now),
            ..AttrChange::default()
        })
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Delta::Attrs(change) => {
                out.push(tag::ATTRS);
                change.encode(out);
            }
            Delta::Body(body) => {
                out.push(tag::BODY);
                let at = out.len();
                out.extend_from_slice(&[0, 0]);
                let (kind, depth) = body.encode(out);
                out[at..at + 2].copy_from_slice(&[kind, depth]);
            }
            Delta::InlineWrite { offset, data } => {
                out.push(tag::INLINE_WRITE);
                put_number(out, (*offset).into());
                out.extend_from_slice(data);
            }
            Delta::InlineLen(len) => {
                out.push(tag::INLINE_LEN);
                put_number(out, (*len).into());
            }
            Delta::Tail {
                page,
                len,
                offset,
                data,
            } => {
                out.push(tag::TAIL);
                put_number(out, *page);
                put_number(out, (*len).into());
                put_number(out, (*offset).into());
                out.extend_from_slice(data);
            }
            Delta::EndTail => out.push(tag::TAIL_END),
            Delta::InsertName(name) => tagged(out, tag::ENTRY_INSERT, name),
            Delta::RemoveName(key) => keyed(out, tag::ENTRY_REMOVE, *key),
            Delta::Retarget {
                key,
                nid,
                generation,
                kind,
            } => {
                keyed(out, tag::ENTRY_RETARGET, *key);
                put_number(out, nid.0);
                put_number(out, *generation);
                out.push(*kind);
            }
            Delta::Extents { start, end, with } => {
                keyed(out, tag::EXTENTS, *start);
                put_u64(out, *end);
                entry::encode_list(with, out);
            }
            Delta::InsertOrphan(orphan) => tagged(out, tag::ORPHAN_INSERT, orphan),
            Delta::RemoveOrphan(nid) => keyed(out, tag::ORPHAN_REMOVE, nid.0),
            Delta::SetXattr(xattr) => tagged(out, tag::XATTR_SET, xattr),
            Delta::RemoveXattr(key) => keyed(out, tag::XATTR_REMOVE, *key),
            Delta::DropFrom(key) => keyed(out, tag::DROP_FROM, *key),
            Delta::InsertChild { tree, child } => {
                out.extend_from_slice(&[tag::CHILD_INSERT, tree_byte(*tree)]);
                child.encode(out);
            }
            Delta::RemoveChild { tree, key } => {
                out.extend_from_slice(&[tag::CHILD_REMOVE, tree_byte(*tree)]);
                put_u64(out, *key);
            }
            Delta::SetRoot { tree, root } => {
                out.extend_from_slice(&[tag::ROOT_SET, tree_byte(*tree), root.depth]);
                entry::encode_list(&root.children, out);
            }
            Delta::InlineXattrs(list) => {
                out.push(tag::XATTRS_INLINE);
                entry::encode_list(list, out);
            }
            Delta::Lower(key) => keyed(out, tag::CHILD_LOWER, *key),
            Delta::Tally(tally) => {
                out.push(tag::TALLY);
                put_number(out, packed::unsigned(tally.names.into()));
                put_number(out, packed::unsigned(tally.subdirs.into()));
                put_time(out, tally.time);
            }
        }
    }

    pub fn decode(bytes: &[u8]) -> Result<Delta, Damage> {
        let mut r = Reader::new("delta", bytes);
        let delta = match r.u8()? {
            tag::ATTRS => Delta::Attrs(AttrChange::decode(&mut r)?),
            tag::BODY => {
                let (kind, depth) = (r.u8()?, r.u8()?);
                Delta::Body(Body::decode(kind, depth, &mut r)?)
            }
            tag::INLINE_WRITE => Delta::InlineWrite {
                offset: r.small_number()?,
                data: r.rest().to_vec(),
            },
            tag::INLINE_LEN => Delta::InlineLen(r.small_number()?),
            tag::TAIL => Delta::Tail {
                page: r.number()?,
                len: r.small_number()?,
                offset: r.small_number()?,
                data: r.rest().to_vec(),
            },
            tag::TAIL_END => Delta::EndTail,
            tag::ENTRY_INSERT => Delta::InsertName(Name::decode(&mut r)?),
            tag::ENTRY_REMOVE => Delta::RemoveName(r.u64()?),
            tag::ENTRY_RETARGET => Delta::Retarget {
                key: r.u64()?,
                nid: Nid(r.number()?),
                generation: r.number()?,
                kind: file_type(&mut r)?,
            },
            tag::EXTENTS => Delta::Extents {
                start: r.u64()?,
                end: r.u64()?,
                with: entry::decode_list(&mut r)?,
            },
            tag::ORPHAN_INSERT => Delta::InsertOrphan(Orphan::decode(&mut r)?),
            tag::ORPHAN_REMOVE => Delta::RemoveOrphan(Nid(r.u64()?)),
            tag::XATTR_SET => Delta::SetXattr(Xattr::decode(&mut r)?),
            tag::XATTR_REMOVE => Delta::RemoveXattr(r.u64()?),
            tag::DROP_FROM => Delta::DropFrom(r.u64()?),
            tag::CHILD_INSERT => Delta::InsertChild {
                tree: tree_from(&mut r)?,
                child: Child::decode(&mut r)?,
            },
            tag::CHILD_REMOVE => Delta::RemoveChild {
                tree: tree_from(&mut r)?,
                key: r.u64()?,
            },
            tag::ROOT_SET => {
                let (tree, depth) = (tree_from(&mut r)?, r.u8()?);
                // When no attribute is left there is no tree.
                let none = tree == TreeId::Xattrs && depth == 0 && r.is_empty();
                let root = match none {
                    true => Root::default(),
                    false => inode::decode_root(depth, &mut r)?,
                };
                Delta::SetRoot { tree, root }
            }
            tag::XATTRS_INLINE => Delta::InlineXattrs(entry::decode_list(&mut r)?),
            tag::CHILD_LOWER => Delta::Lower(r.u64()?),
            tag::TALLY => Delta::Tally(Tally::decode(&mut r)?),
            _ => return Err(r.damage("unknown tag")),
        };
        r.finish()?;
        Ok(delta)
    }
}

impl Tally {
    /// The tally that an encoded delta is; `None`: it is another one.
    pub fn decode_delta(bytes: &[u8]) -> Result<Option<Tally>, Damage> {
        let mut r = Reader::new("delta", bytes);
        if r.u8()? != tag::TALLY {
            return Ok(None);
        }
        let tally = Tally::decode(&mut r)?;
        r.finish()?;
        Ok(Some(tally))
    }

    fn decode(r: &mut Reader<'_>) -> Result<Tally, Damage> {
        Ok(Tally {
            names: difference(r)?,
            subdirs: difference(r)?,
            time: r.time()?,
        })
    }
}

/// What a name's image can hold.
fn file_type(r: &mut Reader<'_>) -> Result<u8, Damage> {
    match r.u8()? {
        kind if kind <= ENTRY_TYPE => Ok(kind),
        _ => Err(r.damage("unknown file type")),
    }
}

fn difference(r: &mut Reader<'_>) -> Result<i32, Damage> {
    let number = packed::signed(r.number()?);
    i32::try_from(number).map_err(|_| r.damage("number out of range"))
}

fn tagged(out: &mut Vec<u8>, tag: u8, entry: &impl Entry) {
    out.push(tag);
    entry.encode(out);
}

fn keyed(out: &mut Vec<u8>, tag: u8, key: u64) {
    out.push(tag);
    put_u64(out, key);
}

fn tree_byte(tree: TreeId) -> u8 {
    match tree {
        TreeId::Body => 0,
        TreeId::Xattrs => 1,
    }
}

fn tree_from(r: &mut Reader<'_>) -> Result<TreeId, Damage> {
    match r.u8()? {
        0 => Ok(TreeId::Body),
        1 => Ok(TreeId::Xattrs),
        _ => Err(r.damage("unknown tree")),
    }
}

impl AttrChange {
    fn encode(&self, out: &mut Vec<u8>) {
        let at = out.len();
        out.extend_from_slice(&[0, 0]);
        let mut mask = 0;
        let mut number = |bit, number: Option<u64>| {
            if let Some(number) = number {
                mask |= bit;
                put_number(out, number);
            }
        };
        number(tag::ATTR_MODE, self.mode.map(u64::from));
        number(tag::ATTR_UID, self.uid.map(u64::from));
        number(tag::ATTR_GID, self.gid.map(u64::from));
        number(tag::ATTR_NLINK, self.nlink.map(u64::from));
        number(tag::ATTR_FLAGS, self.flags.map(u64::from));
        number(tag::ATTR_SIZE, self.size);
        number(tag::ATTR_BLOCKS, self.blocks);
        number(tag::ATTR_PARENT, self.parent.map(|nid| nid.0));
        let pending = self.pending_truncate.map(|p| p.unwrap_or(u64::MAX));
        number(tag::ATTR_PENDING_TRUNCATE, pending);
        let mut time = |bit, time: Option<Timestamp>| {
            if let Some(time) = time {
                mask |= bit;
                put_time(out, time);
            }
        };
        time(tag::ATTR_ATIME, self.atime);
        time(tag::ATTR_MTIME, self.mtime);
        match self.mtime.is_some() && self.mtime == self.ctime {
            true => mask |= tag::ATTR_CTIME_AS_MTIME,
            false => time(tag::ATTR_CTIME, self.ctime),
        }
        out[at..at + 2].copy_from_slice(&mask.to_le_bytes());
    }

    fn decode(r: &mut Reader<'_>) -> Result<AttrChange, Damage> {
        let mask = r.get::<U16>()?.get();
        let has = |bit: u16| mask & bit != 0;
        let once = has(tag::ATTR_CTIME_AS_MTIME);
        if mask & !tag::ATTR_KNOWN != 0 || once && (has(tag::ATTR_CTIME) || !has(tag::ATTR_MTIME)) {
            return Err(r.damage("unknown attribute"));
        }
        let word = |r: &mut Reader<'_>, bit| has(bit).then(|| r.small_number()).transpose();
        let long = |r: &mut Reader<'_>, bit| has(bit).then(|| r.number()).transpose();
        let time = |r: &mut Reader<'_>, bit| has(bit).then(|| r.time()).transpose();
        let mut change = AttrChange {
            mode: word(r, tag::ATTR_MODE)?,
            uid: word(r, tag::ATTR_UID)?,
            gid: word(r, tag::ATTR_GID)?,
            nlink: word(r, tag::ATTR_NLINK)?,
            flags: word(r, tag::ATTR_FLAGS)?,
            size: long(r, tag::ATTR_SIZE)?,
            blocks: long(r, tag::ATTR_BLOCKS)?,
            parent: long(r, tag::ATTR_PARENT)?.map(Nid),
            pending_truncate: long(r, tag::ATTR_PENDING_TRUNCATE)?
                .map(|p| (p != u64::MAX).then_some(p)),
            atime: time(r, tag::ATTR_ATIME)?,
            mtime: time(r, tag::ATTR_MTIME)?,
            ctime: time(r, tag::ATTR_CTIME)?,
        };
        if once {
            change.ctime = change.mtime;
        }
        let (size, blocks) = (change.size.unwrap_or(0), change.blocks.unwrap_or(0));
        if size > inode::SIZE_MAX || blocks > inode::BLOCKS_MAX {
            return Err(r.damage("size or blocks out of range"));
        }
        Ok(change)
    }

    fn apply(&self, inode: &mut Inode) {
        fn set<T: Copy>(field: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *field = value;
            }
        }
        set(&mut inode.mode, self.mode);
        set(&mut inode.uid, self.uid);
        set(&mut inode.gid, self.gid);
        set(&mut inode.nlink, self.nlink);
        set(&mut inode.size, self.size);
        set(&mut inode.blocks, self.blocks);
        set(&mut inode.atime, self.atime);
        set(&mut inode.mtime, self.mtime);
        set(&mut inode.ctime, self.ctime);
        set(&mut inode.parent, self.parent);
        if self.flags.is_some() || self.pending_truncate.is_some() {
            set(&mut inode.seldom.flags, self.flags);
            set(&mut inode.seldom.pending_truncate, self.pending_truncate);
            inode.seldom.tidy();
        }
    }
}

fn mismatch() -> Damage {
    Damage::new("delta", "does not fit the node")
}

impl FsNode {
    /// Applies one delta. On damage the node may be half changed; the store then fails it.
    pub fn change(&mut self, delta: &Delta) -> Result<(), Damage> {
        match delta {
            Delta::Attrs(change) => change.apply(self.inode_mut()?),
            Delta::Body(body) => {
                let inode = self.inode_mut()?;
                if !body.takes_tail() {
                    inode.tail = None;
                }
                inode.body = body.clone();
            }
            Delta::InlineWrite { offset, data } => {
                let (bytes, start) = (self.inline_mut()?, *offset as usize);
                let end = start.checked_add(data.len()).filter(|&e| e <= PAYLOAD_MAX);
                let end = end.ok_or_else(mismatch)?;
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[start..end].copy_from_slice(data);
            }
            Delta::InlineLen(len) => {
                let len = *len as usize;
                if len > PAYLOAD_MAX {
                    return Err(mismatch());
                }
                self.inline_mut()?.resize(len, 0);
            }
            Delta::Tail {
                page,
                len,
                offset,
                data,
            } => self.change_tail(*page, *len, *offset as usize, data)?,
            Delta::EndTail => {
                let ended = self.inode_mut()?.tail.take();
                ended.ok_or_else(mismatch)?;
            }
            Delta::InsertName(name) => self.names_mut()?.insert(name)?,
            Delta::RemoveName(key) => self.names_mut()?.remove(*key)?,
            Delta::Retarget {
                key,
                nid,
                generation,
                kind,
            } => self.names_mut()?.retarget(*key, *nid, *generation, *kind)?,
            Delta::Extents { start, end, with } => {
                entry::replace_extents(self.extents_mut()?, *start, *end, with)?;
            }
            Delta::InsertOrphan(orphan) => entry::insert(self.orphans_mut()?, *orphan)?,
            Delta::RemoveOrphan(nid) => {
                entry::remove(self.orphans_mut()?, nid.0)?;
            }
            Delta::SetXattr(xattr) => self.set_xattr(xattr)?,
            Delta::RemoveXattr(key) => {
                entry::remove(self.xattrs_mut()?, *key)?;
                if let FsNode::Inode(inode) = self {
                    inode.seldom.tidy();
                }
            }
            Delta::DropFrom(key) => self.drop_from(*key)?,
            Delta::InsertChild { tree, child } => entry::insert(self.children_mut(*tree)?, *child)?,
            Delta::RemoveChild { tree, key } => {
                entry::remove_child(self.children_mut(*tree)?, *key)?;
            }
            Delta::SetRoot { tree, root } => self.set_root(*tree, root)?,
            Delta::Lower(key) => match self {
                FsNode::Index(list) => match list.first_mut() {
                    Some(first) if *key <= first.key => first.key = *key,
                    _ => return Err(mismatch()),
                },
                _ => return Err(mismatch()),
            },
            Delta::Tally(tally) => match self.inode_mut()? {
                inode if inode.is_dir() => inode.count(tally),
                _ => return Err(mismatch()),
            },
            Delta::InlineXattrs(list) => {
                let inode = self.inode_mut()?;
                inode.seldom.xattrs = list.clone();
                inode::check_inline_xattrs(&inode.seldom.xattrs)?;
                inode.seldom.tidy();
            }
        }
        Ok(())
    }

    fn change_tail(
        &mut self,
        page: u64,
        len: u32,
        offset: usize,
        data: &[u8],
    ) -> Result<(), Damage> {
        let inode = self.inode_mut()?;
        let end = offset
            .checked_add(data.len())
            .filter(|&e| e <= len as usize);
        if !inode::tail_fits(page, len.into()) || !inode.body.takes_tail() {
            return Err(mismatch());
        }
        let end = end.ok_or_else(mismatch)?;
        let bytes = Vec::new();
        let tail = inode
            .tail
            .get_or_insert_with(|| Box::new(Tail { page, bytes }));
        if tail.page != page {
            return Err(mismatch());
        }
        tail.bytes.resize(len as usize, 0);
        tail.bytes[offset..end].copy_from_slice(data);
        Ok(())
    }

    fn set_xattr(&mut self, xattr: &Xattr) -> Result<(), Damage> {
        let list = self.xattrs_mut()?;
        match list.binary_search_by_key(&xattr.key, |x| x.key) {
            Ok(at) => list[at] = xattr.clone(),
            Err(at) => list.insert(at, xattr.clone()),
        }
        match self {
            FsNode::Inode(inode) => inode::check_inline_xattrs(&inode.seldom.xattrs),
            _ => Ok(()),
        }
    }

    fn set_root(&mut self, tree: TreeId, root: &Root) -> Result<(), Damage> {
        let inode = self.inode_mut()?;
        match tree {
            TreeId::Body if root.children.is_empty() => return Err(mismatch()),
            TreeId::Body => inode.body = Body::Tree(root.clone()),
            TreeId::Xattrs if root.children.is_empty() => {
                inode.seldom.xattr_root = None;
                inode.seldom.tidy();
            }
            TreeId::Xattrs => inode.seldom.xattr_root = Some(root.clone()),
        }
        Ok(())
    }

    fn drop_from(&mut self, key: u64) -> Result<(), Damage> {
        match self {
            FsNode::Index(list) => entry::drop_from(list, key),
            FsNode::Bucket(list) => list.drop_from(key),
            FsNode::Extents(list) => entry::drop_from(list, key),
            FsNode::Xattrs(list) => entry::drop_from(list, key),
            FsNode::Orphans(list) => entry::drop_from(list, key),
            FsNode::Inode(_) | FsNode::Value(_) => return Err(mismatch()),
        }
        Ok(())
    }

    fn inode_mut(&mut self) -> Result<&mut Inode, Damage> {
        match self {
            FsNode::Inode(inode) => Ok(inode),
            _ => Err(mismatch()),
        }
    }

    fn inline_mut(&mut self) -> Result<&mut Vec<u8>, Damage> {
        match &mut self.inode_mut()?.body {
            Body::Inline(bytes) => Ok(bytes),
            _ => Err(mismatch()),
        }
    }

    fn names_mut(&mut self) -> Result<&mut NameList, Damage> {
        match self {
            FsNode::Bucket(list) => Ok(list),
            FsNode::Inode(inode) => match &mut inode.body {
                Body::Entries(list) => Ok(list),
                _ => Err(mismatch()),
            },
            _ => Err(mismatch()),
        }
    }

    fn extents_mut(&mut self) -> Result<&mut Vec<FileExtent>, Damage> {
        match self {
            FsNode::Extents(list) => Ok(list),
            FsNode::Inode(inode) => match &mut inode.body {
                Body::Extents(list) => Ok(list),
                _ => Err(mismatch()),
            },
            _ => Err(mismatch()),
        }
    }

    fn orphans_mut(&mut self) -> Result<&mut Vec<Orphan>, Damage> {
        match self {
            FsNode::Orphans(list) => Ok(list),
            FsNode::Inode(inode) => match &mut inode.body {
                Body::Orphans(list) => Ok(list),
                _ => Err(mismatch()),
            },
            _ => Err(mismatch()),
        }
    }

    fn xattrs_mut(&mut self) -> Result<&mut Vec<Xattr>, Damage> {
        match self {
            FsNode::Xattrs(list) => Ok(list),
            FsNode::Inode(inode) => Ok(&mut inode.seldom.xattrs),
            _ => Err(mismatch()),
        }
    }

    fn children_mut(&mut self, tree: TreeId) -> Result<&mut Vec<Child>, Damage> {
        match self {
            FsNode::Index(list) => Ok(list),
            FsNode::Inode(inode) => Ok(&mut inode.root_mut(tree)?.children),
            _ => Err(mismatch()),
        }
    }
}

//! An inode in memory, and its image.

use super::codec::{Reader, put};
use super::entry::{self, Child, FileExtent, Orphan, Xattr};
use super::names::NameList;
use super::tally::{Gains, Pending, Tally};
use base::clock::Timestamp;
use format::inode::{
    BODY_ENTRIES, BODY_EXTENTS, BODY_INLINE, BODY_ORPHANS, BODY_TREE, InodeHeader, Time,
};
use format::xattr::XATTR_INLINE_MAX;
use format::{Damage, I64, Nid, U16, U32, U64};

/// Bytes of file data that an inode holds itself.
pub const INLINE_DATA_MAX: usize = 2 << 10;
/// Bytes of encoded directory entries that an inode holds itself.
pub const INLINE_ENTRIES_MAX: usize = 2 << 10;
/// Extents that an inode holds itself.
pub const INLINE_EXTENTS_MAX: usize = 16;
/// Orphans that an orphan directory's inode holds itself.
pub const INLINE_ORPHANS_MAX: usize = 64;
/// The largest size of a file, in bytes.
pub const SIZE_MAX: u64 = i64::MAX as u64;
/// More blocks than any file has.
pub const BLOCKS_MAX: u64 = 1 << 52;
/// The longest target of a symbolic link, always inline.
pub const SYMLINK_MAX: usize = 4095;
/// Children of a tree's root.
pub const ROOT_MAX: usize = 96;
/// Index levels that a tree can have; more would not fit 2^64 keys.
pub const DEPTH_MAX: u8 = 12;

/// The top of a tree: its children are leaves at depth 0, else index nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Root {
    /// Index levels between the root and the leaves.
    pub depth: u8,
    pub children: Vec<Child>,
}

/// What an inode holds, or where that is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Data of a small file, target of a symbolic link, nothing for special files.
    Inline(Vec<u8>),
    Extents(Vec<FileExtent>),
    Entries(NameList),
    Orphans(Vec<Orphan>),
    /// A large file's extents, a large directory's entries, many orphans.
    Tree(Root),
}

/// Which of an inode's two trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeId {
    Body,
    Xattrs,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    /// File type and permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub rdev: u32,
    pub flags: u32,
    /// Bytes of a file or symlink target; entries of a directory, but for those that
    /// [`Inode::gained`] tells of.
    pub size: u64,
    /// 4 KiB data blocks that belong to it.
    pub blocks: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
    /// Version at which this use of the nid began.
    pub generation: u64,
    /// Of a directory, the one that names it; else 0.
    pub parent: Nid,
    /// From this byte on the file reads as holes while a chain of operations frees it.
    pub pending_truncate: Option<u64>,
    /// Small attributes; empty when `xattr_root` is there.
    pub xattrs: Vec<Xattr>,
    pub xattr_root: Option<Root>,
    pub body: Body,
    /// Of a directory: what its image does not have yet.
    pub(super) pending: Gains,
}

impl Inode {
    /// A new inode with one link, no owner and nothing in it; a directory has two links.
    pub fn new(mode: u32, generation: u64, now: Timestamp) -> Inode {
        let dir = mode & libc::S_IFMT == libc::S_IFDIR;
        Inode {
            mode,
            uid: 0,
            gid: 0,
            nlink: if dir { 2 } else { 1 },
            rdev: 0,
            flags: 0,
            size: 0,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            generation,
            parent: Nid(0),
            pending_truncate: None,
            xattrs: Vec::new(),
            xattr_root: None,
            body: if dir {
                Body::Entries(NameList::default())
            } else {
                Body::Inline(Vec::new())
            },
            pending: Gains::new(dir),
        }
    }

    /// What a directory gained beyond `size`, `nlink` and its times.
    pub fn gained(&self) -> Option<Tally> {
        self.pending.get()?.sum()
    }

    /// When it was last changed: content, and anything.
    pub fn changed(&self) -> (Timestamp, Timestamp) {
        match self.gained() {
            Some(tally) => (tally.time, tally.time),
            None => (self.mtime, self.ctime),
        }
    }

    /// Names in a directory, under its shared or exclusive lock.
    pub fn names(&self) -> u64 {
        let gained = self.gained().map_or(0, |tally| tally.names);
        self.size.saturating_add_signed(gained.into())
    }

    /// Links of a directory, under its shared or exclusive lock.
    pub fn dir_links(&self) -> u32 {
        let gained = self.gained().map_or(0, |tally| tally.subdirs);
        self.nlink.saturating_add_signed(gained)
    }

    /// Counts names that came and went.
    pub(super) fn count(&mut self, tally: &Tally) {
        let size = self.size.saturating_add_signed(tally.names.into());
        self.size = size.min(SIZE_MAX);
        self.nlink = self.nlink.saturating_add_signed(tally.subdirs);
        (self.mtime, self.ctime) = (tally.time, tally.time);
    }

    /// Counts what is pending.
    pub(super) fn settle(&mut self) {
        if let Some(tally) = self.pending.take() {
            self.count(&tally);
        }
    }

    /// See [`Pending::shape`]; constant for what is no directory.
    pub fn shape(&self) -> u64 {
        self.pending.get().map_or(0, Pending::shape)
    }

    /// Names of a directory moved between leaves, whose locks are held.
    pub fn reshaped(&self) {
        if let Some(pending) = self.pending.get() {
            pending.reshaped();
        }
    }

    /// The type bits of the mode.
    pub fn kind(&self) -> u32 {
        self.mode & libc::S_IFMT
    }

    pub fn is_dir(&self) -> bool {
        self.kind() == libc::S_IFDIR
    }

    pub fn is_file(&self) -> bool {
        self.kind() == libc::S_IFREG
    }

    pub fn is_symlink(&self) -> bool {
        self.kind() == libc::S_IFLNK
    }

    /// As in `d_type`.
    pub fn dirent_kind(&self) -> u8 {
        (self.kind() >> 12) as u8
    }

    /// The root of one of its trees, if that is a tree.
    pub fn root(&self, tree: TreeId) -> Option<&Root> {
        match (tree, &self.body) {
            (TreeId::Body, Body::Tree(root)) => Some(root),
            (TreeId::Body, _) => None,
            (TreeId::Xattrs, _) => self.xattr_root.as_ref(),
        }
    }

    pub(super) fn root_mut(&mut self, tree: TreeId) -> Result<&mut Root, Damage> {
        let root = match (tree, &mut self.body) {
            (TreeId::Body, Body::Tree(root)) => Some(root),
            (TreeId::Body, _) => None,
            (TreeId::Xattrs, _) => self.xattr_root.as_mut(),
        };
        root.ok_or_else(|| Damage::new("delta", "changes a tree that is not there"))
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        put(out, &InodeHeader::zeroed());
        entry::encode_list(&self.xattrs, out);
        let xattr_len = out.len() - start - InodeHeader::SIZE;
        if let Some(root) = &self.xattr_root {
            entry::encode_list(&root.children, out);
        }
        let body_start = out.len();
        let (body, body_depth) = self.body.encode(out);
        let header = InodeHeader {
            mode: U32::new(self.mode),
            uid: U32::new(self.uid),
            gid: U32::new(self.gid),
            nlink: U32::new(self.nlink),
            rdev: U32::new(self.rdev),
            flags: U32::new(self.flags),
            size: U64::new(self.size),
            blocks: U64::new(self.blocks),
            atime: time_to_disk(self.atime),
            mtime: time_to_disk(self.mtime),
            ctime: time_to_disk(self.ctime),
            btime: time_to_disk(self.btime),
            generation: U64::new(self.generation),
            parent: U64::new(self.parent.0),
            pending_truncate: U64::new(self.pending_truncate.unwrap_or(u64::MAX)),
            body,
            body_depth,
            xattr_depth: self.xattr_root.as_ref().map_or(0, |r| r.depth),
            reserved: 0,
            xattr_len: U16::new(xattr_len as u16),
            xattr_children: U16::new(
                self.xattr_root.as_ref().map_or(0, |r| r.children.len()) as u16
            ),
            body_len: U32::new((out.len() - body_start) as u32),
            reserved2: U32::new(0),
        };
        out[start..start + InodeHeader::SIZE]
            .copy_from_slice(zerocopy::IntoBytes::as_bytes(&header));
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Inode, Damage> {
        let mut reader = Reader::new("inode", bytes);
        let header: InodeHeader = reader.get()?;
        let xattr_len = header.xattr_len.get() as usize;
        if xattr_len > XATTR_INLINE_MAX {
            return Err(reader.damage("inline attributes too long"));
        }
        let xattrs = entry::decode_list(&mut reader.part(xattr_len)?)?;
        let children = header.xattr_children.get() as usize;
        let xattr_root = if children > 0 {
            let mut part = reader.part(children * format::inode::TreeEntry::SIZE)?;
            Some(decode_root(header.xattr_depth, &mut part)?)
        } else {
            None
        };
        if header.body_len.get() as usize != reader.left() {
            return Err(reader.damage("body length does not match"));
        }
        let body = Body::decode(header.body, header.body_depth, &mut reader)?;
        let pending = header.pending_truncate.get();
        if header.size.get() > SIZE_MAX || header.blocks.get() > BLOCKS_MAX {
            return Err(Damage::new("inode", "size or blocks out of range"));
        }
        Ok(Inode {
            mode: header.mode.get(),
            uid: header.uid.get(),
            gid: header.gid.get(),
            nlink: header.nlink.get(),
            rdev: header.rdev.get(),
            flags: header.flags.get(),
            size: header.size.get(),
            blocks: header.blocks.get(),
            atime: time_from_disk(header.atime)?,
            mtime: time_from_disk(header.mtime)?,
            ctime: time_from_disk(header.ctime)?,
            btime: time_from_disk(header.btime)?,
            generation: header.generation.get(),
            parent: Nid(header.parent.get()),
            pending_truncate: (pending != u64::MAX).then_some(pending),
            xattrs,
            xattr_root,
            body,
            pending: Gains::new(header.mode.get() & libc::S_IFMT == libc::S_IFDIR),
        })
    }

    pub(super) fn memory(&self) -> usize {
        let root = self.xattr_root.as_ref();
        let root = root.map_or(0, |r| entry::list_memory(&r.children));
        let xattrs = entry::list_memory(&self.xattrs);
        let pending = self.pending.get();
        let pending = pending.map_or(0, |_| entry::heap(size_of::<Pending>()));
        entry::heap(size_of::<Inode>()) + xattrs + root + pending + self.body.memory()
    }
}

impl Body {
    /// Appends the body; returns its kind and depth.
    pub(super) fn encode(&self, out: &mut Vec<u8>) -> (u8, u8) {
        match self {
            Body::Inline(bytes) => {
                out.extend_from_slice(bytes);
                (BODY_INLINE, 0)
            }
            Body::Extents(list) => {
                entry::encode_list(list, out);
                (BODY_EXTENTS, 0)
            }
            Body::Entries(list) => {
                list.encode(out);
                (BODY_ENTRIES, 0)
            }
            Body::Orphans(list) => {
                entry::encode_list(list, out);
                (BODY_ORPHANS, 0)
            }
            Body::Tree(root) => {
                entry::encode_list(&root.children, out);
                (BODY_TREE, root.depth)
            }
        }
    }

    pub(super) fn decode(kind: u8, depth: u8, reader: &mut Reader<'_>) -> Result<Body, Damage> {
        if depth != 0 && kind != BODY_TREE {
            return Err(reader.damage("a body with a depth that is no tree"));
        }
        Ok(match kind {
            BODY_INLINE => Body::Inline(reader.rest().to_vec()),
            BODY_EXTENTS => Body::Extents(entry::decode_list(reader)?),
            BODY_ENTRIES => Body::Entries(NameList::decode(reader)?),
            BODY_ORPHANS => Body::Orphans(entry::decode_list(reader)?),
            BODY_TREE => Body::Tree(decode_root(depth, reader)?),
            _ => return Err(reader.damage("unknown body")),
        })
    }

    fn memory(&self) -> usize {
        match self {
            Body::Inline(bytes) => entry::heap(bytes.capacity()),
            Body::Extents(list) => entry::list_memory(list),
            Body::Entries(list) => list.memory(),
            Body::Orphans(list) => entry::list_memory(list),
            Body::Tree(root) => entry::list_memory(&root.children),
        }
    }
}

/// What an image may not hold, no delta may make.
pub(super) fn check_inline_xattrs(list: &[entry::Xattr]) -> Result<(), Damage> {
    match entry::list_len(list) <= XATTR_INLINE_MAX {
        true => Ok(()),
        false => Err(Damage::new("inode", "inline attributes too long")),
    }
}

pub(super) fn decode_root(depth: u8, reader: &mut Reader<'_>) -> Result<Root, Damage> {
    if depth > DEPTH_MAX {
        return Err(reader.damage("tree too deep"));
    }
    let children = entry::decode_list(reader)?;
    if children.is_empty() {
        return Err(reader.damage("tree root without children"));
    }
    Ok(Root { depth, children })
}

pub(super) fn time_to_disk(time: Timestamp) -> Time {
    Time {
        sec: I64::new(time.sec),
        nsec: U32::new(time.nsec),
    }
}

pub(super) fn time_from_disk(time: Time) -> Result<Timestamp, Damage> {
    let (sec, nsec) = (time.sec.get(), time.nsec.get());
    if nsec >= 1_000_000_000 {
        return Err(Damage::new("inode", "nanoseconds out of range"));
    }
    Ok(Timestamp { sec, nsec })
}

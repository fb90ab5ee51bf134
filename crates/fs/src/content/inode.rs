//! An inode in memory, and its image.

use super::codec::{Reader, put_time};
use super::entry::{self, Child, FileExtent, Orphan, Xattr};
use super::names::NameList;
use super::tally::{Gains, Pending, Tally};
use crate::filesystem::DIR_LINK_MAX;
use crate::times::{Shown, Stamp};
use base::clock::Timestamp;
use engine::Merged;
use format::inode::{
    BODY_ENTRIES, BODY_EXTENTS, BODY_INLINE, BODY_KIND_BITS, BODY_ORPHANS, BODY_TREE, HAS_ATIME,
    HAS_BLOCKS, HAS_CTIME, HAS_FLAGS, HAS_GID, HAS_KNOWN, HAS_MTIME, HAS_NLINK, HAS_PARENT,
    HAS_PENDING_TRUNCATE, HAS_RDEV, HAS_SIZE, HAS_TAIL, HAS_UID, HAS_XATTR_ROOT, HAS_XATTRS,
    TreeEntry,
};
use format::packed::{NUMBER_MAX, put_number};
use format::xattr::XATTR_INLINE_MAX;
use format::{BLOCK_SIZE, Damage, Nid, U16};
use std::ops::{Deref, DerefMut};

/// Bytes of file data that an inode holds itself for good. Until its page is written back, it may hold a page of them.
pub const INLINE_DATA_MAX: usize = 2 << 10;
/// Bytes of encoded directory entries that an inode holds itself: some 60 names.
pub const INLINE_ENTRIES_MAX: usize = 1280;
/// Extents that an inode holds itself.
pub const INLINE_EXTENTS_MAX: usize = 16;
/// Orphans that an orphan directory's inode holds itself.
pub const INLINE_ORPHANS_MAX: usize = 64;
/// The largest size of a file, in bytes.
pub const SIZE_MAX: u64 = i64::MAX as u64;
/// More blocks than any file has.
pub const BLOCKS_MAX: u64 = 1 << 52;
/// Bytes that an inode's fields take encoded, but for one that has all of them.
const FIELDS_LEN: usize = 96;
/// The longest target of a symbolic link, always inline.
pub const SYMLINK_MAX: usize = 4095;
/// Children of a tree's root.
pub const ROOT_MAX: usize = 96;
/// Index levels that a tree can have; more would not fit 2^64 keys.
pub const DEPTH_MAX: u8 = 12;
const _: () = assert!(DEPTH_MAX < 1 << (u8::BITS - BODY_KIND_BITS));

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
    /// By a reference: other inodes need no room for it.
    Entries(Box<NameList>),
    Orphans(Vec<Orphan>),
    /// A large file's extents, a large directory's entries, many orphans.
    Tree(Root),
}

/// What a page of a file holds, whatever its block does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    pub page: u64,
    /// From the page's start, at most a page of them; what follows is zeros.
    pub bytes: Vec<u8>,
}

impl Tail {
    /// Where its page begins, in bytes of the file.
    pub fn start(&self) -> u64 {
        self.page * BLOCK_SIZE as u64
    }

    /// The end of its bytes.
    pub fn end(&self) -> u64 {
        self.start() + self.bytes.len() as u64
    }
}

/// Which of an inode's two trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeId {
    Body,
    Xattrs,
}

/// In memory in this order: what a look-up of a name takes comes first, then what `stat` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Inode {
    /// File type and permission bits.
    pub mode: u32,
    pub nlink: u32,
    /// Version at which this use of the nid began.
    pub generation: u64,
    pub body: Body,
    /// Bytes of a file or symlink target; entries of a directory, but for those that
    /// [`Inode::gained`] tells of.
    pub size: u64,
    /// 4 KiB data blocks that belong to it.
    pub blocks: u64,
    pub uid: u32,
    pub gid: u32,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
    /// Of a directory: what its image does not have yet.
    pub(super) pending: Gains,
    /// Of a directory, the one that names it; else 0.
    pub parent: Nid,
    /// A page, mostly the last, that was logged and is not in its block yet; see `data/tail.rs`. Only beside extents.
    pub tail: Option<Box<Tail>>,
    pub seldom: Seldom,
    shown: Shown,
}

/// An inode and what it belongs to, in memory, are four lines of 64 bytes.
const _: () = assert!(size_of::<Inode>() <= 160);

/// What few inodes have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rare {
    pub rdev: u32,
    pub flags: u32,
    /// Small attributes; empty when `xattr_root` is there.
    pub xattrs: Vec<Xattr>,
    pub xattr_root: Option<Root>,
    /// From this byte on the file reads as holes while a chain of operations frees it.
    pub pending_truncate: Option<u64>,
}

static NOTHING_RARE: Rare = Rare {
    rdev: 0,
    flags: 0,
    xattrs: Vec::new(),
    xattr_root: None,
    pending_truncate: None,
};

/// [`Rare`] fields, which take memory from the first change on. Equal if they are.
#[derive(Clone, Debug, Default)]
pub struct Seldom(Option<Box<Rare>>);

impl Deref for Seldom {
    type Target = Rare;
    fn deref(&self) -> &Rare {
        self.0.as_deref().unwrap_or(&NOTHING_RARE)
    }
}

impl DerefMut for Seldom {
    fn deref_mut(&mut self) -> &mut Rare {
        self.0.get_or_insert_default()
    }
}

impl PartialEq for Seldom {
    fn eq(&self, other: &Seldom) -> bool {
        **self == **other
    }
}

impl Eq for Seldom {}

impl From<Rare> for Seldom {
    fn from(rare: Rare) -> Seldom {
        Seldom((rare != NOTHING_RARE).then(|| Box::new(rare)))
    }
}

impl Seldom {
    /// Gives the memory back if nothing is in it any more.
    pub(super) fn tidy(&mut self) {
        if self.0.as_deref() == Some(&NOTHING_RARE) {
            self.0 = None;
        }
    }

    fn memory(&self) -> usize {
        let Some(rare) = &self.0 else {
            return 0;
        };
        let root = rare.xattr_root.as_ref();
        let root = root.map_or(0, |r| entry::list_memory(&r.children));
        entry::heap(size_of::<Rare>()) + entry::list_memory(&rare.xattrs) + root
    }
}

/// A directory's counts, and when it was last changed: content, and anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub names: u64,
    pub links: u32,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
}

impl Inode {
    /// Something of a file's content is in the inode itself.
    pub fn has_inline(&self) -> bool {
        matches!(&self.body, Body::Inline(bytes) if !bytes.is_empty())
    }

    /// A new inode with one link, no owner and nothing in it; a directory has two links.
    pub fn new(mode: u32, generation: u64, now: Timestamp) -> Inode {
        let dir = mode & libc::S_IFMT == libc::S_IFDIR;
        Inode {
            mode,
            uid: 0,
            gid: 0,
            nlink: if dir { 2 } else { 1 },
            size: 0,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            generation,
            parent: Nid(0),
            seldom: Seldom::default(),
            tail: None,
            body: if dir {
                Body::Entries(Box::default())
            } else {
                Body::Inline(Vec::new())
            },
            pending: Gains::new(dir),
            shown: Shown::never(),
        }
    }

    /// What a directory gained beyond `size`, `nlink` and its times.
    pub fn gained(&self) -> Option<Tally> {
        self.pending.get()?.sum()
    }

    /// Counts names of a directory that come and go, under its shared lock; `None`: this is no directory.
    pub(super) fn gain(&self, tally: Tally) -> Option<Merged> {
        Some(self.pending.get()?.add(tally, &self.shown))
    }

    /// The same as the journal has it, whatever the inode was shown with meanwhile; false: this is no directory.
    pub(super) fn gain_again(&mut self, tally: Tally) -> bool {
        let pending = self.pending.get_mut();
        pending.map(|pending| pending.add_again(tally)).is_some()
    }

    /// Whether it gained anything, under its exclusive lock.
    pub fn is_pending(&self) -> bool {
        self.pending.get().is_some_and(Pending::is_owed)
    }

    /// What a directory is with all that it gained, under its shared or exclusive lock.
    pub fn counts(&self) -> Counts {
        self.counts_with(self.gained())
    }

    fn counts_with(&self, gained: Option<Tally>) -> Counts {
        let (names, subdirs) = gained.map_or((0, 0), |tally| (tally.names, tally.subdirs));
        Counts {
            names: self.size.saturating_add_signed(names.into()),
            links: self.nlink.saturating_add_signed(subdirs),
            mtime: gained.map_or(self.mtime, |tally| tally.time),
            ctime: gained.map_or(self.ctime, |tally| tally.time),
        }
    }

    /// The newest stamp that this was shown with; changes must have newer ones.
    #[inline]
    pub fn shown(&self) -> Stamp {
        self.shown.get()
    }

    /// See [`Shown::forget_beyond`].
    pub fn forget_beyond(&self, beyond: Stamp, now: Timestamp) {
        self.shown.forget_beyond(beyond, now);
    }

    /// It is shown with this ctime, under its shared or exclusive lock. Not of a directory.
    #[inline]
    pub fn show(&self, ctime: Timestamp) {
        self.shown.show(ctime.into());
    }

    /// As [`counts`](Self::counts), for who is shown that: what comes later gets newer times.
    pub fn counts_shown(&self) -> Counts {
        // First, then the look at what is pending (tally, invariant 5).
        self.shown.show(self.ctime.into());
        let gained = self.pending.get();
        self.counts_with(gained.and_then(|pending| pending.sum_shown(&self.shown)))
    }

    /// The same where nothing is pending, which takes no lock.
    pub fn own_counts_shown(&self) -> Option<Counts> {
        // First, as above.
        self.shown.show(self.ctime.into());
        (!self.is_pending()).then(|| self.counts_with(None))
    }

    /// Names in a directory, under its shared or exclusive lock.
    pub fn names(&self) -> u64 {
        self.counts().names
    }

    /// Links of a directory, under its shared or exclusive lock.
    pub fn dir_links(&self) -> u32 {
        self.counts().links
    }

    /// Whether a directory may have one more subdirectory, under its shared or exclusive lock.
    pub fn takes_subdir(&self) -> bool {
        // What it gained is in the journal, which has no room for so many: no need to add it up.
        self.nlink < DIR_LINK_MAX / 2 || self.dir_links() < DIR_LINK_MAX
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

    /// Whether several cores change a directory's names at once.
    pub fn is_crowded(&self) -> bool {
        self.pending.get().is_some_and(Pending::is_crowded)
    }

    /// See [`Pending::shape`]; constant for what is no directory.
    pub fn shape(&self) -> u64 {
        self.pending.get().map_or(0, Pending::shape)
    }

    /// Names of a directory moved between leaves, or a leaf goes; their locks are held.
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
            (TreeId::Xattrs, _) => self.seldom.xattr_root.as_ref(),
        }
    }

    pub(super) fn root_mut(&mut self, tree: TreeId) -> Result<&mut Root, Damage> {
        let root = match (tree, &mut self.body) {
            (TreeId::Body, Body::Tree(root)) => Some(root),
            (TreeId::Body, _) => None,
            (TreeId::Xattrs, _) => self.seldom.xattr_root.as_mut(),
        };
        root.ok_or_else(|| Damage::new("delta", "changes a tree that is not there"))
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; 3]);
        put_number(out, self.mode.into());
        put_time(out, self.btime);
        put_number(out, self.generation);
        let mut has = 0;
        let mut number = |bit, number: u64, usual: u64| {
            if number != usual {
                has |= bit;
                put_number(out, number);
            }
        };
        number(HAS_UID, self.uid.into(), 0);
        number(HAS_GID, self.gid.into(), 0);
        number(HAS_NLINK, self.nlink.into(), 1);
        number(HAS_RDEV, self.seldom.rdev.into(), 0);
        number(HAS_FLAGS, self.seldom.flags.into(), 0);
        number(HAS_SIZE, self.size, 0);
        number(HAS_BLOCKS, self.blocks, 0);
        let mut time = |bit, time: Timestamp, usual: Timestamp| {
            if time != usual {
                has |= bit;
                put_time(out, time);
            }
        };
        time(HAS_ATIME, self.atime, self.btime);
        time(HAS_MTIME, self.mtime, self.btime);
        time(HAS_CTIME, self.ctime, self.mtime);
        if self.parent != Nid(0) {
            has |= HAS_PARENT;
            put_number(out, self.parent.0);
        }
        if let Some(pending) = self.seldom.pending_truncate {
            has |= HAS_PENDING_TRUNCATE;
            put_number(out, pending);
        }
        if !self.seldom.xattrs.is_empty() {
            has |= HAS_XATTRS;
            put_number(out, entry::list_len(&self.seldom.xattrs) as u64);
            entry::encode_list(&self.seldom.xattrs, out);
        }
        if let Some(root) = &self.seldom.xattr_root
            && !root.children.is_empty()
        {
            has |= HAS_XATTR_ROOT;
            out.push(root.depth);
            put_number(out, root.children.len() as u64);
            entry::encode_list(&root.children, out);
        }
        if let Some(tail) = &self.tail {
            has |= HAS_TAIL;
            put_number(out, tail.page);
            put_number(out, tail.bytes.len() as u64);
            out.extend_from_slice(&tail.bytes);
        }
        let (kind, depth) = self.body.encode(out);
        let [low, high] = has.to_le_bytes();
        out[start..start + 3].copy_from_slice(&[low, high, kind | depth << BODY_KIND_BITS]);
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Inode, Damage> {
        let mut r = Reader::new("inode", bytes);
        let has = r.get::<U16>()?.get();
        if has & !HAS_KNOWN != 0 {
            return Err(r.damage("unknown fields"));
        }
        let body = r.u8()?;
        let mode = r.small_number()?;
        let btime = r.time()?;
        let generation = r.number()?;
        let numbers = [
            (HAS_UID, 0),
            (HAS_GID, 0),
            (HAS_NLINK, 1),
            (HAS_RDEV, 0),
            (HAS_FLAGS, 0),
        ];
        let mut small = [0; 5];
        for (field, (bit, usual)) in small.iter_mut().zip(numbers) {
            *field = unusual(&mut r, has & bit != 0, usual, Reader::small_number)?;
        }
        let [uid, gid, nlink, rdev, flags] = small;
        let size = unusual(&mut r, has & HAS_SIZE != 0, 0, Reader::number)?;
        let blocks = unusual(&mut r, has & HAS_BLOCKS != 0, 0, Reader::number)?;
        let atime = unusual(&mut r, has & HAS_ATIME != 0, btime, Reader::time)?;
        let mtime = unusual(&mut r, has & HAS_MTIME != 0, btime, Reader::time)?;
        let ctime = unusual(&mut r, has & HAS_CTIME != 0, mtime, Reader::time)?;
        // To whom it was shown before is not known.
        let shown = Shown::never();
        shown.show(ctime.into());
        let parent = Nid(unusual(&mut r, has & HAS_PARENT != 0, 0, Reader::number)?);
        let mut rare = Rare {
            rdev,
            flags,
            ..Rare::default()
        };
        rare.pending_truncate = match has & HAS_PENDING_TRUNCATE {
            0 => None,
            _ => Some(r.number()?),
        };
        if size > SIZE_MAX || blocks > BLOCKS_MAX {
            return Err(r.damage("size or blocks out of range"));
        }
        let xattr_len = unusual(&mut r, has & HAS_XATTRS != 0, 0, Reader::small_number)? as usize;
        if xattr_len > XATTR_INLINE_MAX {
            return Err(r.damage("inline attributes too long"));
        }
        rare.xattrs = entry::decode_list(&mut r.part(xattr_len)?)?;
        rare.xattr_root = match has & HAS_XATTR_ROOT {
            0 => None,
            _ => {
                let (depth, children) = (r.u8()?, r.number()?);
                let len = children.saturating_mul(TreeEntry::SIZE as u64);
                let len = usize::try_from(len).map_err(|_| r.damage("cut short"))?;
                Some(decode_root(depth, &mut r.part(len)?)?)
            }
        };
        let tail = match has & HAS_TAIL {
            0 => None,
            _ => Some(decode_tail(&mut r)?),
        };
        let (kind, depth) = (body & ((1 << BODY_KIND_BITS) - 1), body >> BODY_KIND_BITS);
        let body = Body::decode(kind, depth, &mut r)?;
        if tail.is_some() && !body.takes_tail() {
            return Err(r.damage("a tail without extents"));
        }
        Ok(Inode {
            mode,
            uid,
            gid,
            nlink,
            size,
            blocks,
            atime,
            mtime,
            ctime,
            btime,
            generation,
            parent,
            seldom: rare.into(),
            tail,
            body,
            pending: Gains::new(mode & libc::S_IFMT == libc::S_IFDIR),
            shown,
        })
    }

    /// Bytes of its image, or some more.
    pub(super) fn image_len(&self) -> usize {
        let root = self.seldom.xattr_root.as_ref();
        let root = root.map_or(0, |r| entry::list_len(&r.children));
        let tail = self.tail.as_ref();
        let tail = tail.map_or(0, |t| 2 * NUMBER_MAX + t.bytes.len());
        FIELDS_LEN + entry::list_len(&self.seldom.xattrs) + root + tail + self.body.image_len()
    }

    pub(super) fn memory(&self) -> usize {
        let pending = self.pending.get();
        let pending = pending.map_or(0, |_| entry::heap(size_of::<Pending>()));
        let tail = self.tail.as_ref();
        let tail = tail.map_or(0, |t| {
            entry::heap(size_of::<Tail>()) + entry::heap(t.bytes.capacity())
        });
        self.seldom.memory() + pending + tail + self.body.memory()
    }
}

impl Body {
    /// Whether a tail may be beside it.
    pub(super) fn takes_tail(&self) -> bool {
        matches!(self, Body::Extents(_) | Body::Tree(_))
    }

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
            BODY_ENTRIES => Body::Entries(NameList::decode(reader)?.into()),
            BODY_ORPHANS => Body::Orphans(entry::decode_list(reader)?),
            BODY_TREE => Body::Tree(decode_root(depth, reader)?),
            _ => return Err(reader.damage("unknown body")),
        })
    }

    fn image_len(&self) -> usize {
        match self {
            Body::Inline(bytes) => bytes.len(),
            Body::Extents(list) => entry::list_len(list),
            Body::Entries(list) => list.encoded_len(),
            Body::Orphans(list) => entry::list_len(list),
            Body::Tree(root) => entry::list_len(&root.children),
        }
    }

    fn memory(&self) -> usize {
        match self {
            Body::Inline(bytes) => entry::heap(bytes.capacity()),
            Body::Extents(list) => entry::list_memory(list),
            Body::Entries(list) => entry::heap(size_of::<NameList>()) + list.memory(),
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

/// Whether a tail can be of this page and so long.
pub(super) fn tail_fits(page: u64, len: u64) -> bool {
    let start = page.checked_mul(BLOCK_SIZE as u64);
    len <= BLOCK_SIZE as u64 && start.is_some_and(|start| start + len <= SIZE_MAX)
}

fn decode_tail(reader: &mut Reader<'_>) -> Result<Box<Tail>, Damage> {
    let (page, len) = (reader.number()?, reader.number()?);
    if !tail_fits(page, len) {
        return Err(reader.damage("tail out of range"));
    }
    let bytes = reader.take(len as usize)?.to_vec();
    Ok(Box::new(Tail { page, bytes }))
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

/// A field that is there only if it is not what is usual.
fn unusual<'a, T: Copy + PartialEq>(
    reader: &mut Reader<'a>,
    there: bool,
    usual: T,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, Damage>,
) -> Result<T, Damage> {
    if !there {
        return Ok(usual);
    }
    match read(reader)? {
        value if value == usual => Err(reader.damage("a field that says nothing")),
        value => Ok(value),
    }
}

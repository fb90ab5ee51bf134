//! The first pass: every inode by itself, with the blocks and nodes that it owns.

use super::state::{INODE, OWNED, TRUNCATING, UNLINKED, UNREADABLE};
use super::{Check, add, tree_name};
use crate::acl::{ACCESS, Acl, DEFAULT};
use crate::api::ROOT;
use crate::content::inode::SYMLINK_MAX;
use crate::content::{Body, FileExtent, FsNode, Inode, TreeId, Value, Xattr};
use crate::data::SIZE_MAX;
use engine::{Extent, Seen, Unread, Visitor};
use format::dir::COLLISION_BITS;
use format::inode::{FIRST_ORPHANS, ORPHAN_DIRECTORIES};
use format::item::Place;
use format::table::RESERVED_NIDS;
use format::xattr::VALUE_PIECE;
use format::{BLOCK_SIZE, Block, Nid};
use std::sync::atomic::Ordering;

/// Sees all nodes once.
pub struct Contents<'c, 'a>(pub &'c Check<'a>);

impl Visitor<FsNode> for Contents<'_, '_> {
    fn node(&self, nid: Nid, version: u64, content: &FsNode) {
        match content {
            FsNode::Inode(inode) => self.inode(nid, version, inode),
            _ => {
                self.0.inodes.mark(nid, OWNED);
            }
        }
    }

    fn item(&self, place: Place, seen: Seen<'_, FsNode>) {
        self.0.tally.add(self.0.store.array(), place, seen);
    }

    fn bad_image(&self, _nid: Nid, why: &Unread) {
        self.0.bad_image(why);
    }

    fn bad_page(&self, why: &Unread) {
        self.0.bad_page(why);
    }

    fn unreadable(&self, nid: Nid) {
        // What it was is unknown: an inode, part of a directory, of a file.
        self.0.owners_hidden.store(true, Ordering::Relaxed);
        self.0.names_hidden.store(true, Ordering::Relaxed);
        self.0.inodes.mark(nid, UNREADABLE);
    }

    fn region_unreadable(&self, region: u64) {
        self.0.owners_hidden.store(true, Ordering::Relaxed);
        self.0.names_hidden.store(true, Ordering::Relaxed);
        self.0.inodes.lose(region);
    }
}

/// True for the directories of unlinked inodes.
pub fn is_orphan_directory(nid: Nid) -> bool {
    (FIRST_ORPHANS..FIRST_ORPHANS + ORPHAN_DIRECTORIES).contains(&nid.0)
}

impl Check<'_> {
    /// A part of the run, which lies in the data area, is in a chunk of segments.
    pub(super) fn in_segments(&self, extent: Extent) -> bool {
        let geometry = self.store.array().geometry();
        let last = Block(extent.block.0 + extent.len as u64 - 1);
        let chunks = (geometry.chunk_of(extent.block), geometry.chunk_of(last));
        let (Some((first, _)), Some((last, _))) = chunks else {
            return false;
        };
        self.meta[first as usize..=last as usize].contains(&true)
    }
}

/// The page from which on a file has no data; `None`: a cut that is under way takes away what it has there.
pub(super) fn data_end(inode: &Inode) -> Option<u64> {
    let cut = inode.seldom.pending_truncate.is_some();
    (!cut).then(|| inode.size.div_ceil(BLOCK_SIZE as u64))
}

impl Contents<'_, '_> {
    fn inode(&self, nid: Nid, version: u64, inode: &Inode) {
        let check = self.0;
        let mut flags = inode.dirent_kind() as u16;
        if inode.nlink == 0 {
            flags |= UNLINKED;
        }
        if inode.seldom.pending_truncate.is_some() {
            flags |= TRUNCATING;
        }
        let parent = if inode.is_dir() { inode.parent } else { Nid(0) };
        let (generation, nlink) = (inode.generation, inode.nlink);
        check
            .inodes
            .inode(nid, flags | INODE, generation, nlink, parent);
        if inode.generation > version {
            check.error(nid, "its generation is newer than its version");
        }
        if inode.mode >> 16 != 0 {
            check.error(nid, format!("has mode {:o}", inode.mode));
        }
        if is_orphan_directory(nid) {
            return;
        }
        if nid.0 < RESERVED_NIDS && nid != ROOT {
            check.error(nid, "is an inode, but its number is reserved");
        }
        if inode.tail.is_some() && !inode.is_file() {
            check.error(nid, "has a tail, and is no file");
        }
        match inode.kind() {
            libc::S_IFREG => self.file(nid, inode),
            libc::S_IFDIR => {
                add(&check.counts.directories, 1);
                if !matches!(inode.body, Body::Entries(_) | Body::Tree(_)) {
                    check.error(nid, "is a directory without entries");
                }
                self.no_blocks(nid, inode);
            }
            libc::S_IFLNK => self.symlink(nid, inode),
            libc::S_IFCHR | libc::S_IFBLK | libc::S_IFIFO | libc::S_IFSOCK => {
                add(&check.counts.specials, 1);
                if !matches!(&inode.body, Body::Inline(bytes) if bytes.is_empty()) {
                    check.error(nid, "is a special file with a content");
                }
                self.no_blocks(nid, inode);
            }
            kind => check.error(nid, format!("has the unknown file type {:o}", kind >> 12)),
        }
        self.attributes(nid, inode);
    }

    fn no_blocks(&self, nid: Nid, inode: &Inode) {
        if inode.blocks != 0 {
            let what = format!("counts {} blocks, and cannot have any", inode.blocks);
            self.0.error(nid, what);
        }
    }

    fn symlink(&self, nid: Nid, inode: &Inode) {
        add(&self.0.counts.symlinks, 1);
        let len = match &inode.body {
            Body::Inline(bytes) => bytes.len(),
            _ => return self.0.error(nid, "is a symbolic link without a target"),
        };
        if len as u64 != inode.size || len == 0 || len > SYMLINK_MAX {
            let what = format!("has a target of {len} bytes and the size {}", inode.size);
            self.0.error(nid, what);
        }
        self.no_blocks(nid, inode);
    }

    fn file(&self, nid: Nid, inode: &Inode) {
        let check = self.0;
        add(&check.counts.files, 1);
        let mut blocks = 0;
        let mut whole = true;
        match &inode.body {
            Body::Inline(bytes) if bytes.len() as u64 > inode.size => {
                let what = format!(
                    "holds {} bytes beyond its size",
                    bytes.len() as u64 - inode.size
                );
                check.error(nid, what);
            }
            Body::Inline(_) => {}
            Body::Extents(list) => self.extents(nid, inode, list, &mut blocks),
            Body::Tree(root) => {
                whole = check.walk_tree(nid, root, &mut |leaf, node, low, high| {
                    let Some(list) = self.leaf(nid, leaf, TreeId::Body, node.extents()) else {
                        return;
                    };
                    let inside =
                        |e: &FileExtent| e.page >= low && high.is_none_or(|high| e.end() <= high);
                    if !list.iter().all(inside) {
                        check.error(nid, format!("leaf {leaf} maps pages of another leaf"));
                    }
                    self.extents(nid, inode, list, &mut blocks);
                });
            }
            Body::Entries(_) | Body::Orphans(_) => {
                check.error(nid, "is a file with a directory's content");
            }
        }
        if let Some(tail) = &inode.tail
            && (tail.start() >= inode.size || tail.end() > inode.size)
        {
            check.error(
                nid,
                format!("its tail, page {}, lies beyond its size", tail.page),
            );
        }
        add(&check.counts.blocks, blocks);
        if whole && blocks != inode.blocks {
            let what = format!("has {blocks} blocks and counts {}", inode.blocks);
            check.error(nid, what);
        }
    }

    /// The list in a leaf; a leaf of the wrong kind is reported.
    fn leaf<T>(
        &self,
        owner: Nid,
        leaf: Nid,
        tree: TreeId,
        list: Result<T, format::Damage>,
    ) -> Option<T> {
        match list {
            Ok(list) => Some(list),
            Err(damage) => {
                let tree = tree_name(tree);
                self.0
                    .error(owner, format!("leaf {leaf} of its {tree} {}", damage.what));
                None
            }
        }
    }

    fn extents(&self, nid: Nid, inode: &Inode, list: &[FileExtent], blocks: &mut u64) {
        let check = self.0;
        let end = data_end(inode);
        for extent in list {
            let (block, len) = (extent.block, extent.len);
            if !check.store.is_data_extent(Extent { block, len }) {
                check.error(nid, format!("{extent:?} lies outside the data area"));
                continue;
            }
            *blocks += len as u64;
            if check.in_segments(Extent { block, len }) {
                check.error(nid, format!("{extent:?} lies where metadata is"));
            }
            if extent.end() > SIZE_MAX.div_ceil(BLOCK_SIZE as u64) {
                check.error(nid, format!("{extent:?} lies beyond the largest file size"));
            }
            if extent.written && end.is_some_and(|end| extent.end() > end) {
                check.error(nid, format!("{extent:?} holds data behind the end"));
            }
            // Who else claims them, and which, is looked for when all are known.
            let _ = check.blocks.claim(Extent { block, len });
        }
    }

    fn attributes(&self, nid: Nid, inode: &Inode) {
        let check = self.0;
        self.attribute_list(nid, inode, &inode.seldom.xattrs);
        let Some(root) = &inode.seldom.xattr_root else {
            return;
        };
        if !inode.seldom.xattrs.is_empty() {
            check.error(nid, "has attributes both in the inode and in a tree");
        }
        check.walk_tree(nid, root, &mut |leaf, node, low, high| {
            check.check_beginning(nid, leaf, low);
            let Some(list) = self.leaf(nid, leaf, TreeId::Xattrs, node.xattrs()) else {
                return;
            };
            let inside = |x: &Xattr| x.key >= low && high.is_none_or(|high| x.key < high);
            if !list.iter().all(inside) {
                check.error(nid, format!("leaf {leaf} has attributes of another leaf"));
            }
            self.attribute_list(nid, inode, list);
        });
    }

    fn attribute_list(&self, nid: Nid, inode: &Inode, list: &[Xattr]) {
        let check = self.0;
        for (i, attribute) in list.iter().enumerate() {
            let name = String::from_utf8_lossy(&attribute.name);
            if attribute.key >> COLLISION_BITS
                != check.hash.first_key(&attribute.name) >> COLLISION_BITS
            {
                check.error(
                    nid,
                    format!("attribute {name:?} is where its name does not belong"),
                );
            }
            let group = attribute.key >> COLLISION_BITS;
            let twin = list[..i]
                .iter()
                .rev()
                .take_while(|other| other.key >> COLLISION_BITS == group)
                .any(|other| other.name == attribute.name);
            if twin {
                check.error(nid, format!("attribute {name:?} exists twice"));
            }
            let prefixes: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system."];
            if !prefixes.iter().any(|p| attribute.name.starts_with(p)) {
                check.error(nid, format!("attribute {name:?} is of no known kind"));
            }
            self.value(nid, attribute, &name);
            if &*attribute.name == ACCESS || &*attribute.name == DEFAULT {
                self.acl(nid, inode, attribute);
            }
        }
    }

    fn value(&self, nid: Nid, attribute: &Xattr, name: &str) {
        let check = self.0;
        let Value::Nodes { len, nids } = &attribute.value else {
            return;
        };
        let mut left = *len as usize;
        for piece in nids {
            let expected = left.min(VALUE_PIECE);
            left -= expected;
            if !check.claim(nid, *piece) {
                continue;
            }
            let Some(node) = check.read_owned(nid, *piece) else {
                continue;
            };
            if !matches!(&*node, FsNode::Value(bytes) if bytes.len() == expected) {
                let what = format!("node {piece} is no piece of {expected} bytes of {name:?}");
                check.error(nid, what);
            }
        }
    }

    fn acl(&self, nid: Nid, inode: &Inode, attribute: &Xattr) {
        let Value::Here(bytes) = &attribute.value else {
            // A list of more than a hundred entries; reading it checks it.
            return;
        };
        let name = String::from_utf8_lossy(&attribute.name);
        match Acl::parse(bytes) {
            Err(error) => self.0.error(nid, format!("{name:?}: {error}")),
            Ok(None) => self.0.error(nid, format!("{name:?} has no entries")),
            Ok(Some(acl)) if &*attribute.name == ACCESS && acl.mode() != inode.mode & 0o777 => {
                let what = format!(
                    "{name:?} stands for mode {:o}; the mode is {:o}",
                    acl.mode(),
                    inode.mode & 0o777
                );
                self.0.error(nid, what);
            }
            Ok(Some(_)) if &*attribute.name == DEFAULT && !inode.is_dir() => {
                self.0
                    .error(nid, format!("{name:?} on what is no directory"));
            }
            Ok(Some(_)) => {}
        }
    }
}

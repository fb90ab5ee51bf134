//! The stage of structure: an inode by itself: its type, its data, its attributes.

use super::super::contents::{data_end, is_orphan_directory};
use super::super::state::OWNED;
use super::ActionKind;
use super::collect::Collected;
use super::names::LOOKS_MAX;
use super::rounds::Round;
use crate::Error;
use crate::acl::{ACCESS, Acl, DEFAULT};
use crate::api::ROOT;
use crate::content::entry::list_len;
use crate::content::inode::{INLINE_EXTENTS_MAX, SYMLINK_MAX};
use crate::content::{Body, FileExtent, FsNode, Inode, Root, Value, Xattr};
use crate::data::SIZE_MAX;
use crate::dir::NameHash;
use engine::Extent;
use format::dir::COLLISION_BITS;
use format::item::PAYLOAD_MAX;
use format::table::RESERVED_NIDS;
use format::xattr::{VALUE_PIECE, XATTR_INLINE_MAX};
use format::{BLOCK_SIZE, Block, Nid};
use std::collections::{BTreeMap, HashSet};

/// Pages that a file can have.
const PAGES_MAX: u64 = SIZE_MAX.div_ceil(BLOCK_SIZE as u64);

/// Gives a key back to what is named: a name or an attribute.
pub(super) trait Keyed {
    fn key_mut(&mut self) -> &mut u64;
    fn text(&self) -> &[u8];
}

impl Keyed for Xattr {
    fn key_mut(&mut self) -> &mut u64 {
        &mut self.key
    }
    fn text(&self) -> &[u8] {
        &self.name
    }
}

impl Keyed for crate::content::Name {
    fn key_mut(&mut self) -> &mut u64 {
        &mut self.key
    }
    fn text(&self) -> &[u8] {
        &self.name
    }
}

/// Puts everything where its name belongs, in key order. `false`: there is no room for it.
pub(super) fn place_by_name<T: Keyed>(list: Vec<T>, hash: &NameHash) -> (Vec<T>, Vec<T>) {
    let mut placed: BTreeMap<u64, T> = BTreeMap::new();
    let mut moved = Vec::new();
    for mut item in list {
        let first = hash.first_key(item.text());
        let key = *item.key_mut();
        if key >> COLLISION_BITS == first >> COLLISION_BITS && !placed.contains_key(&key) {
            placed.insert(key, item);
        } else {
            moved.push((first, item));
        }
    }
    let mut rest = Vec::new();
    for (first, mut item) in moved {
        let mut keys = first..first + (1 << COLLISION_BITS);
        match keys.find(|key| !placed.contains_key(key)) {
            Some(key) => {
                *item.key_mut() = key;
                placed.insert(key, item);
            }
            None => rest.push(item),
        }
    }
    (placed.into_values().collect(), rest)
}

impl Round<'_> {
    /// Makes an inode right by itself, its names included.
    pub fn mend_inode(&mut self, nid: Nid) -> Result<(), Error> {
        let Some(FsNode::Inode(mut inode)) = self.load(nid)? else {
            return Ok(());
        };
        let orphans = is_orphan_directory(nid);
        if nid.0 < RESERVED_NIDS && nid != ROOT && !orphans {
            self.act(
                ActionKind::Dropped,
                nid,
                true,
                "has a reserved number; dropped",
            );
            return self.delete(nid);
        }
        let before = inode.clone();
        let version = {
            let node = self.salvage.store().get(nid)?.into_read()?;
            node.version()
        };
        if inode.generation > version {
            inode.generation = version;
            self.act(
                ActionKind::Field,
                nid,
                false,
                "its generation was corrected",
            );
        }
        if orphans {
            inode.mode &= 0xFFFF;
            return match inode != before {
                true => self.put(nid, FsNode::Inode(inode)),
                false => Ok(()),
            };
        }
        self.mend_type(nid, &mut inode)?;
        self.mend_attributes(nid, &mut inode)?;
        match inode.kind() {
            libc::S_IFDIR => self.mend_directory(nid, &mut inode)?,
            libc::S_IFREG => self.mend_file(nid, &mut inode)?,
            libc::S_IFLNK if !self.mend_symlink(nid, &mut inode) => {
                self.act(ActionKind::Dropped, nid, true, "has no target; dropped");
                return self.delete(nid);
            }
            _ => {}
        }
        if !inode.is_file() {
            self.correct(nid, "block count", &mut inode.blocks, 0);
        }
        if inode != before {
            self.put(nid, FsNode::Inode(inode))?;
        }
        Ok(())
    }

    /// Sets a counter, and says so.
    pub fn correct(&mut self, nid: Nid, name: &str, field: &mut u64, value: u64) {
        if *field != value {
            let what = format!("its {name} was {field}, and is {value}");
            self.act(ActionKind::Field, nid, false, what);
            *field = value;
        }
    }

    /// The type is what the body says, where the two do not go together.
    fn mend_type(&mut self, nid: Nid, inode: &mut Inode) -> Result<(), Error> {
        let stated = inode.mode;
        inode.mode &= 0xFFFF;
        let kind = inode.kind();
        let known = [
            libc::S_IFREG,
            libc::S_IFDIR,
            libc::S_IFLNK,
            libc::S_IFCHR,
            libc::S_IFBLK,
            libc::S_IFIFO,
            libc::S_IFSOCK,
        ];
        let special = |kind| ![libc::S_IFREG, libc::S_IFDIR, libc::S_IFLNK].contains(&kind);
        let proper = match &inode.body {
            _ if nid == ROOT => libc::S_IFDIR,
            Body::Entries(_) => libc::S_IFDIR,
            Body::Extents(_) => libc::S_IFREG,
            Body::Tree(root) => self.kind_of_tree(nid, root, kind)?,
            Body::Inline(_) if kind == libc::S_IFDIR => libc::S_IFREG,
            Body::Inline(bytes) if special(kind) && !bytes.is_empty() => libc::S_IFREG,
            Body::Inline(_) | Body::Orphans(_) if known.contains(&kind) => kind,
            Body::Inline(_) | Body::Orphans(_) => libc::S_IFREG,
        };
        inode.mode = inode.mode & 0o7777 | proper;
        let fits = match &inode.body {
            Body::Entries(_) => proper == libc::S_IFDIR,
            Body::Orphans(_) => false,
            Body::Inline(_) => proper != libc::S_IFDIR,
            Body::Extents(_) => proper == libc::S_IFREG,
            Body::Tree(_) => true,
        };
        if !fits {
            inode.body = match proper {
                libc::S_IFDIR => Body::Entries(Box::default()),
                _ => Body::Inline(Vec::new()),
            };
            self.act(
                ActionKind::Dropped,
                nid,
                true,
                "its content was of no use; now empty",
            );
        }
        if proper != libc::S_IFDIR {
            inode.parent = Nid(0);
        }
        if proper != libc::S_IFREG {
            inode.seldom.pending_truncate = None;
        }
        if (!fits || proper != libc::S_IFREG) && inode.tail.take().is_some() {
            self.act(ActionKind::Dropped, nid, true, "its tail was of no use");
        }
        if inode.mode != stated {
            let what = format!("its mode was {stated:o}, and is {:o}", inode.mode);
            self.act(ActionKind::Field, nid, false, what);
        }
        Ok(())
    }

    /// What is stated, if one of the inode's leaves says so too; else what the first that is there says.
    fn kind_of_tree(&self, owner: Nid, root: &Root, stated: u32) -> Result<u32, Error> {
        let mut todo: Vec<Nid> = root.children.iter().rev().map(|c| c.nid).collect();
        let mut looks = 0;
        let mut first = None;
        while let Some(nid) = todo.pop() {
            looks += 1;
            if looks > LOOKS_MAX {
                break;
            }
            if !self
                .facts(nid)
                .is_some_and(|f| f.is(OWNED) && f.above == owner)
            {
                continue;
            }
            let kind = match self.load(nid)? {
                Some(FsNode::Bucket(_)) => libc::S_IFDIR,
                Some(FsNode::Extents(_)) => libc::S_IFREG,
                Some(FsNode::Index(list)) => {
                    todo.extend(list.iter().rev().map(|c| c.nid));
                    continue;
                }
                _ => continue,
            };
            if kind == stated {
                return Ok(kind);
            }
            first = first.or(Some(kind));
        }
        Ok(first.unwrap_or(match stated {
            libc::S_IFDIR => libc::S_IFDIR,
            _ => libc::S_IFREG,
        }))
    }

    /// False: there is no target.
    fn mend_symlink(&mut self, nid: Nid, inode: &mut Inode) -> bool {
        let len = match &inode.body {
            Body::Inline(bytes) => bytes.len(),
            _ => 0,
        };
        self.correct(nid, "size", &mut inode.size, len as u64);
        (1..=SYMLINK_MAX).contains(&len)
    }

    fn mend_file(&mut self, nid: Nid, inode: &mut Inode) -> Result<(), Error> {
        if let Some(tail) = &inode.tail {
            let least = tail.end().max(tail.start() + 1);
            if least > inode.size {
                self.correct(nid, "size", &mut inode.size, least);
            }
        }
        let found: Collected<FileExtent> = match &inode.body {
            Body::Inline(bytes) => {
                let len = bytes.len() as u64;
                if len > inode.size {
                    self.correct(nid, "size", &mut inode.size, len);
                }
                self.correct(nid, "block count", &mut inode.blocks, 0);
                return Ok(());
            }
            Body::Extents(list) => Collected::of_list(list.clone()),
            Body::Tree(root) => self.collect(nid, root, true)?,
            _ => return Ok(()),
        };
        for (node, low, high) in &found.missing {
            let end = high.map_or("the end".into(), |page| {
                page.saturating_mul(BLOCK_SIZE as u64).to_string()
            });
            let from = low.saturating_mul(BLOCK_SIZE as u64);
            let what = format!("bytes {from} to {end} are lost with node {node}: now a hole");
            self.act(ActionKind::Hole, nid, true, what);
            self.name_node(*node, nid);
        }
        let mut sound = self.sound_extents(nid, &found.items);
        if let Some(end) = data_end(inode)
            && let Some(hidden) = hide_behind(&sound, end)
        {
            let what =
                "holds data behind the end, which would be seen in a longer file: zeros there";
            self.act(ActionKind::Field, nid, false, what);
            sound = hidden;
        }
        let blocks = sound.iter().map(|e| e.len as u64).sum();
        self.correct(nid, "block count", &mut inode.blocks, blocks);
        if found.sound && sound == found.items {
            return Ok(());
        }
        if sound.len() > INLINE_EXTENTS_MAX && self.rewrite(&found, &sound)? {
            return Ok(());
        }
        inode.body = match sound.len() <= INLINE_EXTENTS_MAX {
            true => Body::Extents(sound),
            false => Body::Tree(self.build(&sound)?),
        };
        self.discard_nodes(&found.nodes)
    }

    /// What an action says of a node gets the path of the inode that has it.
    pub fn name_node(&mut self, node: Nid, owner: Nid) {
        if let Some(path) = self.path(owner) {
            self.actions.name(node, &path);
        }
    }

    pub fn discard_nodes(&mut self, nodes: &[Nid]) -> Result<(), Error> {
        nodes.iter().try_for_each(|nid| self.discard(*nid))
    }

    /// Deletes a node that an inode does not need; one that a second place refers to goes when none does any more.
    fn discard(&mut self, nid: Nid) -> Result<(), Error> {
        let places = (nid, Nid(0))..=(nid, Nid(u64::MAX));
        let contested = self.check.contested.lock().range(places).next().is_some();
        match contested {
            true => Ok(()),
            false => self.delete(nid),
        }
    }

    /// In order, apart, in the data area, and nobody else's.
    fn sound_extents(&mut self, nid: Nid, list: &[FileExtent]) -> Vec<FileExtent> {
        let mut sorted = list.to_vec();
        sorted.sort_by_key(|extent| extent.page);
        let mut sound: Vec<FileExtent> = Vec::new();
        let mut next = 0;
        for extent in sorted {
            let end = extent.end().min(PAGES_MAX);
            let start = extent.page.max(next);
            if start > extent.page || end < extent.end() {
                let what = format!("{extent:?} overlaps another or lies too far: cut");
                self.act(ActionKind::Hole, nid, true, what);
            }
            if start >= end {
                continue;
            }
            next = end;
            let cut = FileExtent {
                page: start,
                block: Block(extent.block.0 + (start - extent.page)),
                len: (end - start) as u32,
                ..extent
            };
            self.keep_blocks(nid, cut, &mut sound);
        }
        sound
    }

    /// Keeps the part of an extent that is rightly the file's.
    fn keep_blocks(&mut self, nid: Nid, extent: FileExtent, sound: &mut Vec<FileExtent>) {
        let geometry = self.salvage.store().array().geometry().clone();
        let blocks = extent.block.0..extent.block.0 + extent.len as u64;
        let claims = &self.check.blocks;
        let run = Extent {
            block: extent.block,
            len: extent.len,
        };
        let outside = !self.check.store.is_data_extent(run);
        let suspect = outside || self.check.in_segments(run) || claims.first_shared(run).is_some();
        if !suspect {
            sound.push(extent);
            return;
        }
        let mut cut: Option<(u64, u64)> = None;
        let mut keep: Option<FileExtent> = None;
        // Nothing beyond the array is looked at block by block.
        let end = blocks.end.min(geometry.total_blocks()).max(blocks.start);
        for block in blocks.start..end {
            let page = extent.page + (block - extent.block.0);
            let chunk = geometry.chunk_of(Block(block));
            let inside = chunk.is_some_and(|(chunk, _)| !self.check.meta[chunk as usize]);
            let one = Extent {
                block: Block(block),
                len: 1,
            };
            let mine = !claims.is_shared(one.block) || self.taken.claim(one);
            if inside && mine {
                match &mut keep {
                    Some(keep) if keep.end() == page => keep.len += 1,
                    _ => {
                        sound.extend(keep.take());
                        keep = Some(FileExtent {
                            page,
                            block: Block(block),
                            len: 1,
                            ..extent
                        });
                    }
                }
            } else {
                cut = Some((cut.map_or(page, |(first, _)| first), page));
            }
        }
        sound.extend(keep);
        if end < blocks.end {
            let first = extent.page + (end - blocks.start);
            cut = Some((cut.map_or(first, |(page, _)| page), extent.end() - 1));
        }
        if let Some((first, last)) = cut {
            let (from, to) = (
                first.saturating_mul(BLOCK_SIZE as u64),
                (last + 1).saturating_mul(BLOCK_SIZE as u64),
            );
            let what = format!("blocks of bytes {from} to {to} belong elsewhere: now a hole there");
            self.act(ActionKind::Hole, nid, true, what);
        }
    }

    fn mend_attributes(&mut self, nid: Nid, inode: &mut Inode) -> Result<(), Error> {
        let mut found = match &inode.seldom.xattr_root {
            Some(root) => self.collect(nid, root, true)?,
            None => Collected::of_list(Vec::new()),
        };
        let both = inode.seldom.xattr_root.is_some() && !inode.seldom.xattrs.is_empty();
        found
            .items
            .splice(0..0, inode.seldom.xattrs.iter().cloned());
        for (node, _, _) in &found.missing {
            let what = format!("attributes are lost with node {node}");
            self.act(ActionKind::Attribute, nid, true, what);
            self.name_node(*node, nid);
        }
        let mut kept: Vec<Xattr> = Vec::new();
        let (mut names, mut pieces) = (HashSet::new(), HashSet::new());
        for mut attribute in found.items.clone() {
            let why = self.bad_attribute(nid, inode, &mut attribute, &names, &mut pieces)?;
            let Some(why) = why else {
                names.insert(attribute.name.clone());
                kept.push(attribute);
                continue;
            };
            let name = String::from_utf8_lossy(&attribute.name).into_owned();
            let what = format!("attribute {name:?} {why}; removed");
            self.act(ActionKind::Attribute, nid, true, what);
        }
        let (kept, rest) = place_by_name(kept, self.hash);
        if !rest.is_empty() {
            let what = format!("{} attributes of one hash too many; removed", rest.len());
            self.act(ActionKind::Attribute, nid, true, what);
        }
        if found.sound && !both && kept == found.items {
            return Ok(());
        }
        self.discard_values(nid, &found.items, &kept)?;
        let body = match &inode.body {
            Body::Inline(bytes) => bytes.len(),
            _ => 0,
        };
        let room = body + XATTR_INLINE_MAX + 2048 <= PAYLOAD_MAX;
        (inode.seldom.xattrs, inode.seldom.xattr_root) = match list_len(&kept) <= XATTR_INLINE_MAX {
            true if room => (kept, None),
            _ if kept.is_empty() => (Vec::new(), None),
            _ => (Vec::new(), Some(self.build(&kept)?)),
        };
        self.act(
            ActionKind::Rebuilt,
            nid,
            false,
            "its attributes were put in order",
        );
        self.discard_nodes(&found.nodes)
    }

    /// Deletes the values of attributes that were removed.
    fn discard_values(&mut self, nid: Nid, old: &[Xattr], kept: &[Xattr]) -> Result<(), Error> {
        let pieces = |list: &[Xattr]| -> HashSet<Nid> {
            let nodes = |x: &Xattr| match &x.value {
                Value::Nodes { nids, .. } => nids.to_vec(),
                Value::Here(_) => Vec::new(),
            };
            list.iter().flat_map(nodes).collect()
        };
        let kept = pieces(kept);
        for piece in pieces(old) {
            let facts = self.facts(piece);
            let mine = facts.is_some_and(|f| f.is(OWNED) && f.above == nid);
            if mine && !kept.contains(&piece) {
                self.discard(piece)?;
            }
        }
        Ok(())
    }

    /// Why an attribute cannot stay.
    fn bad_attribute(
        &mut self,
        nid: Nid,
        inode: &Inode,
        attribute: &mut Xattr,
        names: &HashSet<Box<[u8]>>,
        pieces: &mut HashSet<Nid>,
    ) -> Result<Option<&'static str>, Error> {
        let prefixes: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system."];
        if !prefixes.iter().any(|p| attribute.name.starts_with(p)) {
            return Ok(Some("is of no known kind"));
        }
        if names.contains(&attribute.name) {
            return Ok(Some("exists twice"));
        }
        if let Value::Nodes { len, nids } = &attribute.value {
            let mut left = *len as usize;
            for piece in nids {
                let expected = left.min(VALUE_PIECE);
                left -= expected;
                let facts = self.facts(*piece);
                let mine = facts.is_some_and(|f| f.is(OWNED) && f.above == nid);
                let whole = mine
                    && pieces.insert(*piece)
                    && matches!(self.load(*piece)?, Some(FsNode::Value(b)) if b.len() == expected);
                if !whole {
                    self.name_node(*piece, nid);
                    return Ok(Some("has lost its value"));
                }
            }
        }
        let Value::Here(bytes) = &mut attribute.value else {
            return Ok(None);
        };
        if &*attribute.name != ACCESS && &*attribute.name != DEFAULT {
            return Ok(None);
        }
        Ok(match Acl::parse(bytes) {
            Ok(Some(_)) if &*attribute.name == DEFAULT && !inode.is_dir() => {
                Some("is for directories")
            }
            Ok(Some(mut acl)) if &*attribute.name == ACCESS => {
                if acl.mode() != inode.mode & 0o777 {
                    acl.chmod(inode.mode);
                    *bytes = acl.encode().into();
                }
                None
            }
            Ok(Some(_)) => None,
            _ => Some("is no valid list"),
        })
    }
}

/// The extents with nothing written from this page on; `None`: they are so.
fn hide_behind(list: &[FileExtent], end: u64) -> Option<Vec<FileExtent>> {
    if !list
        .iter()
        .any(|extent| extent.written && extent.end() > end)
    {
        return None;
    }
    let mut hidden = Vec::new();
    for extent in list {
        let kept = end.saturating_sub(extent.page).min(extent.len as u64);
        if !extent.written || kept == extent.len as u64 {
            hidden.push(*extent);
            continue;
        }
        if kept > 0 {
            hidden.push(FileExtent {
                len: kept as u32,
                ..*extent
            });
        }
        hidden.push(FileExtent {
            page: extent.page + kept,
            block: Block(extent.block.0 + kept),
            len: extent.len - kept as u32,
            written: false,
        });
    }
    Some(hidden)
}

//! What leaves hold: directory entries, extents, orphans, attributes, children. All are
//! kept in lists sorted by a unique 64-bit key.

use super::codec::{Reader, put, put_u64};
use crate::dir::has_separator;
use engine::Extent;
use format::dir::{
    COLLISION_BITS, ENTRY_GENERATION, ENTRY_TIE, ENTRY_TYPE, HASH_BITS, HASH_BYTES, KEY_LIMIT,
};
use format::extent::{EXTENT_UNWRITTEN, ExtentEntry};
use format::inode::{OrphanEntry, TreeEntry};
use format::packed::{self, number_len, put_number};
use format::xattr::{VALUE_INLINE_MAX, VALUE_MAX, VALUE_PIECE, XattrHeader};
use format::{Block, Damage, Nid, U32, U64};

/// An element of a sorted list.
pub trait Entry: Sized {
    fn key(&self) -> u64;
    fn encoded_len(&self) -> usize;
    fn encode(&self, out: &mut Vec<u8>);
    fn decode(reader: &mut Reader<'_>) -> Result<Self, Damage>;
    /// The first key that a successor may have.
    fn end(&self) -> u64 {
        self.key().saturating_add(1)
    }
    /// Heap bytes beyond the list's own.
    fn memory(&self) -> usize {
        0
    }
}

/// What an allocation takes, in bytes: the allocator adds a word, rounds up, and has a least.
pub fn heap(bytes: usize) -> usize {
    match bytes {
        0 => 0,
        _ => (bytes + 8).next_multiple_of(16).max(32),
    }
}

/// The bytes of a name. Those of most names are here, without an allocation of their own: a
/// directory that is read or freed has up to a hundred in each leaf.
#[derive(Clone)]
pub struct NameBytes(Bytes);

/// Names up to this length are held in place.
const SHORT: usize = 22;

#[derive(Clone)]
enum Bytes {
    Short { len: u8, bytes: [u8; SHORT] },
    Long(Box<[u8]>),
}

const _: () = assert!(size_of::<NameBytes>() == 24);

impl NameBytes {
    fn memory(&self) -> usize {
        match &self.0 {
            Bytes::Short { .. } => 0,
            Bytes::Long(bytes) => heap(bytes.len()),
        }
    }
}

impl From<&[u8]> for NameBytes {
    fn from(name: &[u8]) -> NameBytes {
        if name.len() > SHORT {
            return NameBytes(Bytes::Long(name.into()));
        }
        let mut bytes = [0; SHORT];
        bytes[..name.len()].copy_from_slice(name);
        let len = name.len() as u8;
        NameBytes(Bytes::Short { len, bytes })
    }
}

impl std::ops::Deref for NameBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Short { len, bytes } => &bytes[..*len as usize],
            Bytes::Long(bytes) => bytes,
        }
    }
}

impl PartialEq for NameBytes {
    fn eq(&self, other: &NameBytes) -> bool {
        **self == **other
    }
}

impl Eq for NameBytes {}

impl std::hash::Hash for NameBytes {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl std::fmt::Debug for NameBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// Below [`KEY_LIMIT`].
    pub key: u64,
    pub nid: Nid,
    pub generation: u64,
    /// As in `d_type`, below 16.
    pub kind: u8,
    pub name: NameBytes,
}

/// What a name refers to, with the key that tells it from the other names of its directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    pub key: u64,
    pub nid: Nid,
    pub generation: u64,
    /// As in `d_type`, below 16.
    pub kind: u8,
}

/// A run of file pages in consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// First page of the file.
    pub page: u64,
    pub block: Block,
    /// Pages, at least 1.
    pub len: u32,
    /// False: reads as zeros.
    pub written: bool,
}

/// An unlinked inode that is still in use or being freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphan {
    pub nid: Nid,
    pub generation: u64,
}

/// A child of a tree's root or index node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Child {
    pub key: u64,
    pub nid: Nid,
}

/// Where an attribute's value is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Here(Box<[u8]>),
    /// In value nodes, [`VALUE_PIECE`] bytes in each but the last.
    Nodes {
        len: u32,
        nids: Box<[Nid]>,
    },
}

/// An extended attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xattr {
    pub key: u64,
    /// With its prefix, such as `user.`.
    pub name: Box<[u8]>,
    pub value: Value,
}

impl FileExtent {
    /// Where its pages are.
    pub fn blocks(&self) -> Extent {
        Extent {
            block: self.block,
            len: self.len,
        }
    }

    /// The page after the last.
    pub fn end(&self) -> u64 {
        self.page + self.len as u64
    }
}

impl Value {
    pub fn byte_len(&self) -> usize {
        match self {
            Value::Here(bytes) => bytes.len(),
            Value::Nodes { len, .. } => *len as usize,
        }
    }
}

/// A name where it lies encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameView<'a> {
    pub key: u64,
    pub nid: Nid,
    pub generation: u64,
    pub kind: u8,
    pub name: &'a [u8],
}

impl<'a> NameView<'a> {
    /// Reads and checks a name.
    pub fn read(reader: &mut Reader<'a>) -> Result<NameView<'a>, Damage> {
        let [len, kind, hash @ ..]: [u8; 2 + HASH_BYTES] = reader.get()?;
        let hash = word(&hash);
        if kind & !(ENTRY_TYPE | ENTRY_TIE | ENTRY_GENERATION) != 0 || hash >= 1 << HASH_BITS {
            return Err(reader.damage("directory entry with an impossible kind or hash"));
        }
        let tie = match kind & ENTRY_TIE {
            0 => 0,
            _ => reader.u8()?,
        };
        let nid = Nid(reader.number()?);
        let generation = match kind & ENTRY_GENERATION {
            0 => 1,
            _ => reader.number()?,
        };
        let said = (kind & ENTRY_TIE == 0 || tie != 0)
            && (kind & ENTRY_GENERATION == 0 || generation != 1);
        if !said || tie >= 1 << COLLISION_BITS {
            return Err(reader.damage("directory entry that is not in its shortest form"));
        }
        let name = reader.take(len as usize)?;
        if name.is_empty() || has_separator(name) {
            return Err(reader.damage("directory entry with an impossible name"));
        }
        Ok(NameView {
            key: hash << COLLISION_BITS | tie as u64,
            nid,
            generation,
            kind: kind & ENTRY_TYPE,
            name,
        })
    }

    /// The name at the beginning of bytes that were read before.
    #[inline]
    pub fn at(bytes: &'a [u8]) -> NameView<'a> {
        NameView::split(bytes).0
    }

    /// That name, and what follows it.
    #[inline]
    pub fn split(bytes: &'a [u8]) -> (NameView<'a>, &'a [u8]) {
        let (key, kind, rest) = NameView::begin(bytes);
        let (nid, mut rest) = packed::known_number(rest);
        let mut generation = 1;
        if kind & ENTRY_GENERATION != 0 {
            (generation, rest) = packed::known_number(rest);
        }
        let (name, rest) = rest.split_at(bytes[0] as usize);
        let view = NameView {
            key,
            nid: Nid(nid),
            generation,
            kind: kind & ENTRY_TYPE,
            name,
        };
        (view, rest)
    }

    /// What the name refers to.
    #[inline]
    pub fn link(&self) -> Link {
        Link {
            key: self.key,
            nid: self.nid,
            generation: self.generation,
            kind: self.kind,
        }
    }

    /// The key of that name.
    #[inline]
    pub fn key_at(bytes: &[u8]) -> u64 {
        NameView::begin(bytes).0
    }

    /// Key and length of that name, if it has neither a tie nor a generation, its number is no longer than a word, and
    /// that much follows: then they are two words to look at.
    #[inline]
    pub fn plain(bytes: &[u8]) -> Option<(u64, usize)> {
        let [len, words @ ..] = *bytes.first_chunk::<17>()?;
        let [kind, number]: [U64; 2] = zerocopy::transmute!(words);
        let (kind, ends) = (kind.get(), packed::ends(number.get()));
        let flags = (ENTRY_TIE | ENTRY_GENERATION) as u64;
        let plain = kind & flags == 0 && ends != 0;
        let len = 2 + HASH_BYTES + ends.trailing_zeros() as usize / 8 + 1 + len as usize;
        plain.then_some((kind >> 8 << COLLISION_BITS, len))
    }

    /// Bytes of that name.
    pub fn len_at(bytes: &[u8]) -> usize {
        let (len, kind) = (bytes[0] as usize, bytes[1]);
        let mut at = 2 + HASH_BYTES + (kind & ENTRY_TIE != 0) as usize;
        at += packed::known_len(&bytes[at..]);
        if kind & ENTRY_GENERATION != 0 {
            at += packed::known_len(&bytes[at..]);
        }
        at + len
    }

    /// The key, what is said besides the kind with it, and what follows.
    #[inline]
    fn begin(bytes: &[u8]) -> (u64, u8, &[u8]) {
        // Kind and hash are a word.
        const _: () = assert!(HASH_BYTES == 7);
        let cut = "checked when it was read";
        let (head, rest) = bytes.split_first_chunk::<{ 2 + HASH_BYTES }>().expect(cut);
        let [_, word @ ..] = *head;
        let word = u64::from_le_bytes(word);
        let (kind, key) = (word as u8, word >> 8 << COLLISION_BITS);
        match kind & ENTRY_TIE {
            0 => (key, kind, rest),
            _ => (key | rest[0] as u64, kind, &rest[1..]),
        }
    }
}

fn word(hash: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..HASH_BYTES].copy_from_slice(hash);
    u64::from_le_bytes(word)
}

impl From<NameView<'_>> for Name {
    fn from(view: NameView<'_>) -> Name {
        Name {
            key: view.key,
            nid: view.nid,
            generation: view.generation,
            kind: view.kind,
            name: view.name.into(),
        }
    }
}

impl Name {
    /// What it refers to.
    pub fn link(&self) -> Link {
        Link {
            key: self.key,
            nid: self.nid,
            generation: self.generation,
            kind: self.kind,
        }
    }

    /// The last part of its key.
    fn tie(&self) -> u8 {
        self.key as u8 & ((1 << COLLISION_BITS) - 1)
    }
}

impl Entry for Name {
    fn key(&self) -> u64 {
        self.key
    }

    fn encoded_len(&self) -> usize {
        let generation = match self.generation {
            1 => 0,
            generation => number_len(generation),
        };
        let numbers = number_len(self.nid.0) + generation;
        2 + HASH_BYTES + (self.tie() != 0) as usize + numbers + self.name.len()
    }

    fn encode(&self, out: &mut Vec<u8>) {
        debug_assert!(self.key < KEY_LIMIT && self.kind <= ENTRY_TYPE);
        let tie = (self.tie() != 0) as u8 * ENTRY_TIE;
        let generation = (self.generation != 1) as u8 * ENTRY_GENERATION;
        let mut head = [0; 2 + HASH_BYTES];
        head[0] = self.name.len() as u8;
        head[1] = self.kind | tie | generation;
        head[2..].copy_from_slice(&(self.key >> COLLISION_BITS).to_le_bytes()[..HASH_BYTES]);
        out.extend_from_slice(&head);
        if tie != 0 {
            out.push(self.tie());
        }
        put_number(out, self.nid.0);
        if generation != 0 {
            put_number(out, self.generation);
        }
        out.extend_from_slice(&self.name);
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, Damage> {
        Ok(NameView::read(reader)?.into())
    }

    fn memory(&self) -> usize {
        self.name.memory()
    }
}

impl Entry for FileExtent {
    fn key(&self) -> u64 {
        self.page
    }

    fn encoded_len(&self) -> usize {
        ExtentEntry::SIZE
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let flags = if self.written { 0 } else { EXTENT_UNWRITTEN };
        let entry = ExtentEntry {
            page: U64::new(self.page),
            block: U64::new(self.block.0),
            len: U32::new(self.len),
            flags: U32::new(flags),
        };
        put(out, &entry);
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, Damage> {
        let entry: ExtentEntry = reader.get()?;
        let (page, block, len) = (entry.page.get(), entry.block.get(), entry.len.get());
        let fits = |start: u64| {
            start
                .checked_add(len as u64)
                .is_some_and(|end| end < 1 << 52)
        };
        if len == 0 || !fits(page) || !fits(block) || entry.flags.get() > EXTENT_UNWRITTEN {
            return Err(reader.damage("extent out of range"));
        }
        Ok(FileExtent {
            page,
            block: Block(block),
            len,
            written: entry.flags.get() & EXTENT_UNWRITTEN == 0,
        })
    }

    fn end(&self) -> u64 {
        FileExtent::end(self)
    }
}

impl Entry for Orphan {
    fn key(&self) -> u64 {
        self.nid.0
    }

    fn encoded_len(&self) -> usize {
        OrphanEntry::SIZE
    }

    fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.nid.0);
        put_u64(out, self.generation);
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, Damage> {
        let entry: OrphanEntry = reader.get()?;
        Ok(Orphan {
            nid: Nid(entry.nid.get()),
            generation: entry.generation.get(),
        })
    }
}

impl Entry for Child {
    fn key(&self) -> u64 {
        self.key
    }

    fn encoded_len(&self) -> usize {
        TreeEntry::SIZE
    }

    fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.key);
        put_u64(out, self.nid.0);
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, Damage> {
        let entry: TreeEntry = reader.get()?;
        Ok(Child {
            key: entry.key.get(),
            nid: Nid(entry.nid.get()),
        })
    }
}

impl Entry for Xattr {
    fn key(&self) -> u64 {
        self.key
    }

    fn encoded_len(&self) -> usize {
        let value = match &self.value {
            Value::Here(bytes) => bytes.len(),
            Value::Nodes { nids, .. } => nids.len() * 8,
        };
        XattrHeader::SIZE + self.name.len() + value
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let nodes = match &self.value {
            Value::Here(_) => 0,
            Value::Nodes { nids, .. } => nids.len() as u8,
        };
        let header = XattrHeader {
            key: U64::new(self.key),
            value_len: U32::new(self.value.byte_len() as u32),
            name_len: self.name.len() as u8,
            nodes,
        };
        put(out, &header);
        out.extend_from_slice(&self.name);
        match &self.value {
            Value::Here(bytes) => out.extend_from_slice(bytes),
            Value::Nodes { nids, .. } => nids.iter().for_each(|nid| put_u64(out, nid.0)),
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, Damage> {
        let header: XattrHeader = reader.get()?;
        let name: Box<[u8]> = reader.take(header.name_len as usize)?.into();
        let (len, nodes) = (header.value_len.get() as usize, header.nodes as usize);
        if name.is_empty() || len > VALUE_MAX {
            return Err(reader.damage("attribute out of range"));
        }
        let value = if nodes == 0 {
            if len > VALUE_INLINE_MAX {
                return Err(reader.damage("attribute value too long for its leaf"));
            }
            Value::Here(reader.take(len)?.into())
        } else {
            if nodes != len.div_ceil(VALUE_PIECE) {
                return Err(reader.damage("attribute value in a wrong number of nodes"));
            }
            let nids = (0..nodes)
                .map(|_| reader.u64().map(Nid))
                .collect::<Result<_, _>>()?;
            Value::Nodes {
                len: len as u32,
                nids,
            }
        };
        Ok(Xattr {
            key: header.key.get(),
            name,
            value,
        })
    }

    fn memory(&self) -> usize {
        let value = match &self.value {
            Value::Here(bytes) => bytes.len(),
            Value::Nodes { nids, .. } => size_of_val(&**nids),
        };
        heap(self.name.len()) + heap(value)
    }
}

/// Reads a list to the end of the reader; damage when it is not in strict order.
pub fn decode_list<T: Entry>(reader: &mut Reader<'_>) -> Result<Vec<T>, Damage> {
    let mut list: Vec<T> = Vec::new();
    while !reader.is_empty() {
        let entry = T::decode(reader)?;
        if list.last().is_some_and(|last| last.end() > entry.key()) {
            return Err(reader.damage("entries out of order"));
        }
        list.push(entry);
    }
    Ok(list)
}

pub fn encode_list<T: Entry>(list: &[T], out: &mut Vec<u8>) {
    list.iter().for_each(|entry| entry.encode(out));
}

pub fn list_len<T: Entry>(list: &[T]) -> usize {
    list.iter().map(Entry::encoded_len).sum()
}

/// Heap bytes of a list, room for growth included.
pub fn list_memory<T: Entry>(list: &Vec<T>) -> usize {
    let entries: usize = list.iter().map(Entry::memory).sum();
    heap(list.capacity() * size_of::<T>()) + entries
}

/// The entry with this very key.
pub fn find<T: Entry>(list: &[T], key: u64) -> Option<&T> {
    list.binary_search_by_key(&key, Entry::key)
        .ok()
        .map(|i| &list[i])
}

pub fn insert<T: Entry>(list: &mut Vec<T>, entry: T) -> Result<(), Damage> {
    match list.binary_search_by_key(&entry.key(), Entry::key) {
        Ok(_) => Err(Damage::new("delta", "inserts a key that is there")),
        Err(at) => {
            list.insert(at, entry);
            Ok(())
        }
    }
}

pub fn remove<T: Entry>(list: &mut Vec<T>, key: u64) -> Result<T, Damage> {
    match list.binary_search_by_key(&key, Entry::key) {
        Ok(at) => Ok(list.remove(at)),
        Err(_) => Err(Damage::new("delta", "removes a key that is not there")),
    }
}

pub fn drop_from<T: Entry>(list: &mut Vec<T>, key: u64) {
    list.truncate(list.partition_point(|entry| entry.key() < key));
}

/// Removes the child of this key; its successor takes over the key if it was the first, so
/// that the first child goes on covering the node's whole lower end.
pub fn remove_child(list: &mut Vec<Child>, key: u64) -> Result<(), Damage> {
    let first = list.first().is_some_and(|child| child.key == key);
    remove(list, key)?;
    if first && let Some(next) = list.first_mut() {
        next.key = key;
    }
    Ok(())
}

/// The child that covers `key`.
pub fn child_for(list: &[Child], key: u64) -> Option<usize> {
    if list.is_empty() {
        return None;
    }
    Some(list.partition_point(|c| c.key <= key).saturating_sub(1))
}

/// Maps pages `start..end` as `with` says, which must lie inside, ascending and apart;
/// whatever mapped a part of the range before is cut. Neighbours that continue each other
/// are merged.
pub fn replace_extents(
    list: &mut Vec<FileExtent>,
    start: u64,
    end: u64,
    with: &[FileExtent],
) -> Result<(), Damage> {
    let nonsense = || Damage::new("delta", "extents out of range");
    let mut floor = start;
    for extent in with {
        if extent.page < floor || extent.end() > end {
            return Err(nonsense());
        }
        floor = extent.end();
    }
    if start > end {
        return Err(nonsense());
    }
    let first = list.partition_point(|e| e.end() <= start);
    let last = list.partition_point(|e| e.page < end);
    let mut middle: Vec<FileExtent> = Vec::with_capacity(with.len() + 4);
    // One neighbour on each side takes part, for merging.
    let low = first.saturating_sub(1);
    let high = (last + 1).min(list.len()).max(first);
    middle.extend_from_slice(&list[low..first]);
    for old in &list[first..last.max(first)] {
        if old.page < start {
            middle.push(FileExtent {
                len: (start - old.page) as u32,
                ..*old
            });
        }
    }
    middle.extend_from_slice(with);
    for old in &list[first..last.max(first)] {
        if old.end() > end {
            let cut = end - old.page.min(end);
            middle.push(FileExtent {
                page: old.page + cut,
                block: Block(old.block.0 + cut),
                len: (old.end() - end) as u32,
                written: old.written,
            });
        }
    }
    middle.extend_from_slice(&list[last.max(first)..high]);
    middle.dedup_by(|next, previous| {
        let joins = previous.end() == next.page
            && previous.block.0 + previous.len as u64 == next.block.0
            && previous.written == next.written
            && previous.len.checked_add(next.len).is_some();
        if joins {
            previous.len += next.len;
        }
        joins
    });
    list.splice(low..high, middle);
    Ok(())
}

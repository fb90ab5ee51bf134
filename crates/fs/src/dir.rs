//! Directories: names in an inode while they are few, else in the buckets of a tree.
//!
//! Invariants:
//! 1. A name's key is 55 bits of a keyed hash and 7 bits that tell names of equal hash apart.
//!    It never changes while the name exists, so a readdir offset made of it stays valid
//!    whatever is inserted, removed or split meanwhile.
//! 2. All names of one hash are in one bucket.
//! 3. The inode's `size` counts the names, "." and ".." not included.

use crate::content::{Inode, Link, Name, NameList};
use crate::list::{self, Addition, Listed, Seen, Spot};
use crate::tree::Ahead;
use crate::{Error, Ino, content::FsNode};
use engine::{Node, Op, Slot, Store};
use format::dir::{COLLISION_BITS, HASH_BITS, NAME_MAX};
use siphasher::sip::SipHasher13;
use std::hash::Hasher;

/// The keyed hash of names.
#[derive(Clone, Debug)]
pub struct NameHash {
    hasher: SipHasher13,
    mask: u64,
}

impl NameHash {
    pub fn new(key: &[u8; 16]) -> NameHash {
        NameHash {
            hasher: SipHasher13::new_with_key(key),
            mask: u64::MAX,
        }
    }

    /// A hash of which only the bits of `mask` vary, for tests of collisions.
    pub fn weakened(key: &[u8; 16], mask: u64) -> NameHash {
        NameHash {
            mask,
            ..NameHash::new(key)
        }
    }

    /// The lowest key that the name can have.
    pub fn first_key(&self, name: &[u8]) -> u64 {
        let mut hasher = self.hasher;
        hasher.write(name);
        let hash = hasher.finish() & self.mask;
        hash >> (64 - HASH_BITS) << COLLISION_BITS
    }
}

/// Refuses what cannot name a file.
pub fn check_name(name: &[u8]) -> Result<(), Error> {
    if name.is_empty() {
        return Err(Error::NotFound);
    }
    if name.len() > NAME_MAX {
        return Err(Error::NameTooLong);
    }
    if has_separator(name) {
        return Err(Error::Invalid("a name with a slash or a zero byte"));
    }
    Ok(())
}

/// Whether there is a slash or a zero byte, eight bytes at a time.
pub(crate) fn has_separator(name: &[u8]) -> bool {
    const ONES: u64 = u64::MAX / 0xFF;
    const SLASHES: u64 = ONES * b'/' as u64;
    // Some byte of a word is zero exactly if this is not.
    let zero = |word: u64| word.wrapping_sub(ONES) & !word & (ONES << 7);
    let found = |bytes: &[u8; 8]| {
        let word = u64::from_le_bytes(*bytes);
        zero(word) | zero(word ^ SLASHES) != 0
    };
    match name.last_chunk() {
        // The last eight bytes may have been looked at before, in part.
        Some(last) => found(last) || name.as_chunks().0.iter().any(found),
        None => name.iter().any(|&byte| byte == 0 || byte == b'/'),
    }
}

pub fn is_dot(name: &[u8]) -> bool {
    name == b"." || name == b".."
}

/// Bytes of a name as a caller gives them, with the first key that the name can have: worked out
/// once, however often it is looked for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub text: &'a [u8],
    pub first: u64,
}

impl<'a> Wanted<'a> {
    /// Refuses what cannot name a file.
    pub fn new(hash: &NameHash, text: &'a [u8]) -> Result<Wanted<'a>, Error> {
        check_name(text)?;
        let first = hash.first_key(text);
        Ok(Wanted { text, first })
    }

    /// Whether these are its bytes; eight at a time.
    #[inline]
    pub fn is(&self, name: &[u8]) -> bool {
        let text = self.text;
        let same = || match (text.last_chunk::<8>(), name.last_chunk::<8>()) {
            // The last eight bytes are looked at twice, in part.
            (Some(last), Some(other)) => {
                let words = text.as_chunks::<8>().0.iter().zip(name.as_chunks().0);
                last == other && words.into_iter().all(|(word, other)| word == other)
            }
            _ => text.iter().zip(name).all(|(byte, other)| byte == other),
        };
        text.len() == name.len() && same()
    }
}

/// Looks a name up among those of one node.
#[inline]
pub fn pick(list: &NameList, name: Wanted<'_>) -> Option<Link> {
    list::pick::<Name>(list, name.first, |n| name.is(n.name))
}

/// Looks a name up; the directory is locked at least shared.
pub fn find(store: &Store<FsNode>, dir: &Inode, name: Wanted<'_>) -> Result<Option<Link>, Error> {
    list::find::<Name>(store, dir, name.first, |n| name.is(n.name))
}

/// Looks a name up, and tells where; the directory is locked at least shared. `ahead` is what [`look_ahead`] told of the name.
pub fn look(
    store: &Store<FsNode>,
    dir: &Inode,
    name: Wanted<'_>,
    ahead: Option<Ahead>,
) -> Result<(Option<Link>, Seen), Error> {
    list::look::<Name>(store, dir, name.first, ahead, |n| name.is(n.name))
}

/// [`spot`] for a name that was looked up in the same directory before.
pub fn spot_seen(
    op: &mut Op<'_, FsNode>,
    dir: Slot,
    name: Wanted<'_>,
    seen: &Seen,
) -> Result<Spot<Name>, Error> {
    list::spot_seen::<Name>(op, dir, name.first, seen, |n| name.is(n.name))
}

/// Tells where names are going to be looked for, and has the memory of that come; see [`list::look_ahead`].
#[inline]
pub fn look_ahead<const N: usize>(
    store: &Store<FsNode>,
    dir: &Node<FsNode>,
    names: [Wanted<'_>; N],
) -> [Option<Ahead>; N] {
    let ahead = dir.glance(|node| {
        let inode = node.inode().ok()?;
        inode.root(Name::TREE)?;
        Some(names.map(|name| list::look_ahead::<Name>(store, inode, name.first)))
    });
    ahead.unwrap_or([None; N])
}

/// [`spot`] in two steps, as [`list::place`].
pub fn place(
    op: &mut Op<'_, FsNode>,
    dir: Slot,
    name: Wanted<'_>,
    ahead: Option<Ahead>,
) -> Result<Spot<Name>, Error> {
    list::place::<Name>(op, dir, name.first, ahead)
}

/// Looks for the name in its place, the second step.
pub fn sought(
    op: &Op<'_, FsNode>,
    spot: Spot<Name>,
    name: Wanted<'_>,
) -> Result<Spot<Name>, Error> {
    spot.sought(op, |n| name.is(n.name))
}

/// Locks the place of a name in a directory that the operation holds.
pub fn spot(op: &mut Op<'_, FsNode>, dir: Slot, name: Wanted<'_>) -> Result<Spot<Name>, Error> {
    list::spot::<Name>(op, dir, name.first, |n| name.is(n.name))
}

/// Plans to add a name, which `spot` did not find, for an inode.
pub fn insert<'s>(
    op: &mut Op<'s, FsNode>,
    spot: Spot<Name>,
    name: &[u8],
    target: Target,
) -> Result<Addition<'s, Name>, Error> {
    let element = Name {
        key: spot.free_key(op)?,
        nid: target.ino,
        generation: target.generation,
        kind: target.kind,
        name: name.into(),
    };
    spot.put(op, element)
}

/// What a name refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub ino: Ino,
    pub generation: u64,
    /// As in `d_type`.
    pub kind: u8,
}

impl Target {
    pub fn of(ino: Ino, inode: &Inode) -> Target {
        Target {
            ino,
            generation: inode.generation,
            kind: inode.dirent_kind(),
        }
    }
}

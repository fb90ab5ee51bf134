//! Directories: names in an inode while they are few, else in the buckets of a tree.
//!
//! Invariants:
//! 1. A name's key is 55 bits of a keyed hash and 7 bits that tell names of equal hash apart.
//!    It never changes while the name exists, so a readdir offset made of it stays valid
//!    whatever is inserted, removed or split meanwhile.
//! 2. All names of one hash are in one bucket.
//! 3. The inode's `size` counts the names, "." and ".." not included.

use crate::content::{Inode, Name};
use crate::list::{self, Addition, Spot};
use crate::{Error, Ino, content::FsNode};
use engine::{Op, Slot, Store};
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
    if name.iter().any(|&b| b == 0 || b == b'/') {
        return Err(Error::Invalid("a name with a slash or a zero byte"));
    }
    Ok(())
}

pub fn is_dot(name: &[u8]) -> bool {
    name == b"." || name == b".."
}

/// Looks a name up; the directory is locked at least shared.
pub fn find(
    store: &Store<FsNode>,
    hash: &NameHash,
    dir: &Inode,
    name: &[u8],
) -> Result<Option<Name>, Error> {
    list::find(store, dir, hash.first_key(name), |n: &Name| {
        &*n.name == name
    })
}

/// Locks the place of a name in a directory that the operation holds.
pub fn spot(
    op: &mut Op<'_, FsNode>,
    hash: &NameHash,
    dir: Slot,
    name: &[u8],
) -> Result<Spot<Name>, Error> {
    list::spot(op, dir, hash.first_key(name), |n: &Name| &*n.name == name)
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

//! POSIX access control lists, stored as the value of their extended attribute: a version
//! word, then (tag, permissions, id) entries, as the kernel passes them.

use crate::content::codec::{Reader, put_u32};
use crate::content::{Child, entry::list_len};
use crate::content::{FsNode, Inode, Root, Value, Xattr};
use crate::filesystem::FileSystem;
use crate::tree::FreshNid;
use crate::{Error, xattr};
use engine::{Op, Store};
use format::Damage;
use format::xattr::XATTR_INLINE_MAX;

pub const ACCESS: &[u8] = b"system.posix_acl_access";
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: u16,
    /// rwx
    perm: u16,
    id: u32,
}

/// A valid list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<Entry>);

impl Acl {
    /// Reads and checks a list. `None`: it has no entries, which means no list.
    pub fn parse(value: &[u8]) -> Result<Option<Acl>, Error> {
        Self::read(value).map_err(|_| Error::Invalid("not a valid access control list"))
    }

    fn read(value: &[u8]) -> Result<Option<Acl>, Damage> {
        let mut r = Reader::new("access control list", value);
        if r.u32()? != VERSION {
            return Err(r.damage("unknown version"));
        }
        let mut entries = Vec::new();
        while !r.is_empty() {
            let [tag, perm] = [r.get::<format::U16>()?.get(), r.get::<format::U16>()?.get()];
            let id = r.u32()?;
            entries.push(Entry { tag, perm, id });
        }
        if entries.is_empty() {
            return Ok(None);
        }
        let acl = Acl(entries);
        match acl.is_valid() {
            true => Ok(Some(acl)),
            false => Err(r.damage("entries missing, repeated or out of order")),
        }
    }

    /// One owner, group and other entry, in the order of the tags; a mask where somebody
    /// is named.
    fn is_valid(&self) -> bool {
        let count = |tag| self.0.iter().filter(|e| e.tag == tag).count();
        let named = count(USER) + count(GROUP) > 0;
        let rank = |tag| {
            [USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER]
                .iter()
                .position(|t| *t == tag)
        };
        self.0
            .iter()
            .all(|e| rank(e.tag).is_some() && e.perm & !7 == 0)
            && self.0.windows(2).all(|w| rank(w[0].tag) <= rank(w[1].tag))
            && count(USER_OBJ) == 1
            && count(GROUP_OBJ) == 1
            && count(OTHER) == 1
            && count(MASK) <= 1
            && (count(MASK) == 1 || !named)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(4 + self.0.len() * 8);
        put_u32(&mut out, VERSION);
        for entry in &self.0 {
            out.extend_from_slice(&entry.tag.to_le_bytes());
            out.extend_from_slice(&entry.perm.to_le_bytes());
            put_u32(&mut out, entry.id);
        }
        out
    }

    fn perm(&self, tag: u16) -> Option<u32> {
        self.0.iter().find(|e| e.tag == tag).map(|e| e.perm as u32)
    }

    fn perm_mut(&mut self, tag: u16) -> Option<&mut u16> {
        self.0
            .iter_mut()
            .find(|e| e.tag == tag)
            .map(|e| &mut e.perm)
    }

    /// The nine permission bits that go with the list.
    pub fn mode(&self) -> u32 {
        let group = self.perm(MASK).or(self.perm(GROUP_OBJ)).unwrap_or(0);
        self.perm(USER_OBJ).unwrap_or(0) << 6 | group << 3 | self.perm(OTHER).unwrap_or(0)
    }

    /// The list says no more than permission bits can.
    pub fn is_minimal(&self) -> bool {
        self.0
            .iter()
            .all(|e| matches!(e.tag, USER_OBJ | GROUP_OBJ | OTHER))
    }

    /// The tag that the group permission bits stand for.
    fn group_class(&self) -> u16 {
        if self.perm(MASK).is_some() {
            MASK
        } else {
            GROUP_OBJ
        }
    }

    /// What chmod makes of the list.
    pub fn chmod(&mut self, mode: u32) {
        let class = self.group_class();
        for (tag, shift) in [(USER_OBJ, 6), (class, 3), (OTHER, 0)] {
            if let Some(perm) = self.perm_mut(tag) {
                *perm = (mode >> shift & 7) as u16;
            }
        }
    }

    /// Narrows a default list to what a new file's mode allows; returns the new file's
    /// permission bits.
    fn narrow(&mut self, mode: u32) -> u32 {
        let class = self.group_class();
        for (tag, shift) in [(USER_OBJ, 6), (class, 3), (OTHER, 0)] {
            if let Some(perm) = self.perm_mut(tag) {
                *perm &= (mode >> shift & 7) as u16;
            }
        }
        self.mode()
    }
}

/// What a new inode takes over from its directory.
#[derive(Debug)]
pub struct Inherited {
    /// With type bits.
    pub mode: u32,
    /// Attributes it starts with.
    attributes: Vec<Xattr>,
}

/// [`Inherited`], with nids for what does not fit into the inode.
pub struct PlannedAttributes<'s> {
    attributes: Vec<Xattr>,
    values: xattr::Pieces<'s>,
    leaf: Option<FreshNid<'s>>,
}

impl Inherited {
    /// The new inode gets no attributes.
    pub fn is_empty(&self) -> bool {
        self.attributes.is_empty()
    }

    pub fn attributes(&self) -> &[Xattr] {
        &self.attributes
    }

    /// The same of an inode that stays in memory, which has them in itself whatever they take.
    pub fn put_in(self, inode: &mut Inode) {
        if !self.attributes.is_empty() {
            inode.seldom.xattrs = self.attributes;
        }
    }

    pub fn plan<'s>(self, store: &'s Store<FsNode>) -> Result<PlannedAttributes<'s>, Error> {
        let mut planned = PlannedAttributes {
            attributes: self.attributes,
            values: Vec::new(),
            leaf: None,
        };
        for attribute in &mut planned.attributes {
            if let Value::Here(bytes) = &attribute.value {
                let (value, nodes) = xattr::plan_value(store, bytes)?;
                attribute.value = value;
                planned.values.extend(nodes);
            }
        }
        if list_len(&planned.attributes) > XATTR_INLINE_MAX {
            planned.leaf = Some(store.reserve_nid()?);
        }
        Ok(planned)
    }
}

impl PlannedAttributes<'_> {
    /// Puts the attributes into an inode that is about to be created (phase 2).
    pub fn finish(self, op: &mut Op<'_, FsNode>, inode: &mut Inode) {
        for (fresh, bytes) in self.values {
            op.create(fresh, FsNode::Value(bytes));
        }
        let Some(fresh) = self.leaf else {
            if !self.attributes.is_empty() {
                inode.seldom.xattrs = self.attributes;
            }
            return;
        };
        let child = Child {
            key: 0,
            nid: fresh.nid(),
        };
        op.create(fresh, FsNode::Xattrs(self.attributes));
        inode.seldom.xattr_root = Some(Root {
            depth: 0,
            children: vec![child],
        });
    }
}

/// What chmod makes of an access list.
pub(crate) fn chmod_of(value: Vec<u8>, mode: u32) -> Result<Vec<u8>, Error> {
    Ok(match Acl::parse(&value)? {
        Some(mut acl) => {
            acl.chmod(mode);
            acl.encode()
        }
        None => value,
    })
}

/// What chmod makes of the access list of an inode that stays in memory, and has its attributes in itself.
pub(crate) fn chmod_in(inode: &mut Inode, mode: u32) -> Result<(), Error> {
    let Some(at) = (inode.seldom.xattrs.iter()).position(|x| &*x.name == ACCESS) else {
        return Ok(());
    };
    let access = &mut inode.seldom.xattrs[at].value;
    if let Value::Here(value) = access {
        *access = Value::Here(chmod_of(value.to_vec(), mode)?.into());
    }
    Ok(())
}

impl FileSystem {
    /// Mode and lists of a new inode in a directory with this default list. `mode` is what the
    /// caller asked for, type bits included.
    pub(crate) fn inherit_acl(
        &self,
        default: Option<Vec<u8>>,
        mode: u32,
        umask: u32,
    ) -> Result<Inherited, Error> {
        let mut inherited = Inherited {
            mode,
            attributes: Vec::new(),
        };
        if mode & libc::S_IFMT == libc::S_IFLNK {
            return Ok(inherited);
        }
        let default = match default {
            Some(value) => Acl::read(&value)?.map(|acl| (acl, value)),
            None => None,
        };
        let Some((mut acl, value)) = default else {
            inherited.mode &= !(umask & 0o777);
            return Ok(inherited);
        };
        inherited.mode = (mode & !0o777) | acl.narrow(mode);
        let mut add = |name: &[u8], value: Vec<u8>| {
            inherited.attributes.push(Xattr {
                key: self.hash.first_key(name),
                name: name.into(),
                value: Value::Here(value.into()),
            });
        };
        if !acl.is_minimal() {
            add(ACCESS, acl.encode());
        }
        if mode & libc::S_IFMT == libc::S_IFDIR {
            add(DEFAULT, value);
        }
        // Two names of one hash get keys of their own.
        let list = &mut inherited.attributes;
        list.sort_by_key(|x| x.key);
        if let [first, second] = &mut list[..]
            && first.key == second.key
        {
            second.key += 1;
        }
        Ok(inherited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let entries = entries
            .iter()
            .map(|&(tag, perm, id)| Entry { tag, perm, id });
        Acl(entries.collect()).encode()
    }

    const NONE: u32 = u32::MAX;

    #[test]
    fn a_list_is_checked_as_the_kernel_does() {
        let good = acl(&[
            (USER_OBJ, 7, NONE),
            (USER, 6, 5),
            (GROUP_OBJ, 5, NONE),
            (MASK, 4, NONE),
            (OTHER, 0, NONE),
        ]);
        let parsed = Acl::parse(&good).unwrap().unwrap();
        assert_eq!((parsed.mode(), parsed.is_minimal()), (0o740, false));
        assert_eq!(parsed.encode(), good);
        assert_eq!(Acl::parse(&2u32.to_le_bytes()).unwrap(), None);
        let bad = [
            acl(&[(USER_OBJ, 7, NONE), (GROUP_OBJ, 5, NONE)]),
            acl(&[
                (USER_OBJ, 7, NONE),
                (USER, 6, 5),
                (GROUP_OBJ, 5, NONE),
                (OTHER, 0, NONE),
            ]),
            acl(&[(OTHER, 7, NONE), (GROUP_OBJ, 5, NONE), (USER_OBJ, 5, NONE)]),
            acl(&[(USER_OBJ, 8, NONE), (GROUP_OBJ, 5, NONE), (OTHER, 5, NONE)]),
            good[..good.len() - 1].to_vec(),
            Vec::new(),
        ];
        for value in bad {
            assert!(Acl::parse(&value).is_err(), "{value:?}");
        }
    }

    #[test]
    fn chmod_changes_the_mask_where_there_is_one() {
        let value = acl(&[
            (USER_OBJ, 7, NONE),
            (USER, 6, 5),
            (GROUP_OBJ, 5, NONE),
            (MASK, 4, NONE),
            (OTHER, 0, NONE),
        ]);
        let mut list = Acl::parse(&value).unwrap().unwrap();
        list.chmod(0o627);
        assert_eq!(list.mode(), 0o627);
        assert_eq!(list.perm(GROUP_OBJ), Some(5));
        let mut minimal = Acl::parse(&acl(&[
            (USER_OBJ, 7, NONE),
            (GROUP_OBJ, 5, NONE),
            (OTHER, 0, NONE),
        ]))
        .unwrap()
        .unwrap();
        minimal.chmod(0o640);
        assert_eq!((minimal.mode(), minimal.is_minimal()), (0o640, true));
    }
}

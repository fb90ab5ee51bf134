//! Extended attributes: up to 512 bytes in the inode, more in a tree; a value of more than
//! 1 KiB is in nodes of its own, wherever its entry is.

use crate::Error;
use crate::acl::{ACCESS, Acl, DEFAULT};
use crate::api::{Caller, Ino};
use crate::content::{AttrChange, Delta, FsNode, Inode, Value, Xattr};
use crate::filesystem::FileSystem;
use crate::list::{self, Addition, Deletion, Emptied};
use crate::times::Stamp;
use crate::tree::{self, FreshNid};
use engine::{Need, Op, Slot, Store};
use format::Damage;
use format::dir::NAME_MAX;
use format::xattr::{VALUE_INLINE_MAX, VALUE_MAX, VALUE_PIECE};

/// Flags of `setxattr`: the attribute must not exist.
pub const XATTR_CREATE: i32 = libc::XATTR_CREATE;
/// The attribute must exist.
pub const XATTR_REPLACE: i32 = libc::XATTR_REPLACE;
/// Setting an access list clears set-group-ID: the kernel found the caller not in the group.
pub const XATTR_ACL_KILL_SGID: i32 = 1 << 8;

/// Bytes that the names of all attributes of a file may take, each with a zero byte: what listxattr(2) can return.
pub const NAMES_MAX: usize = 64 << 10;

/// File capabilities, which a change of content or owner takes away.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";

/// No value is outside the inode.
pub(crate) fn is_plain(list: &[Xattr]) -> bool {
    list.iter().all(|x| matches!(x.value, Value::Here(_)))
}

/// Value nodes to create.
pub(crate) type Pieces<'s> = Vec<(FreshNid<'s>, Vec<u8>)>;

/// Decides where a value goes; returns the nodes to create for it.
pub(crate) fn plan_value<'s>(
    store: &'s Store<FsNode>,
    bytes: &[u8],
) -> Result<(Value, Pieces<'s>), Error> {
    if bytes.len() <= VALUE_INLINE_MAX {
        return Ok((Value::Here(bytes.into()), Vec::new()));
    }
    let mut nodes = Vec::new();
    for piece in bytes.chunks(VALUE_PIECE) {
        nodes.push((store.reserve_nid()?, piece.to_vec()));
    }
    let value = Value::Nodes {
        len: bytes.len() as u32,
        nids: nodes.iter().map(|(fresh, _)| fresh.nid()).collect(),
    };
    Ok((value, nodes))
}

/// Locks the nodes of all values in a list, for deletion.
pub(crate) fn lock_values(op: &mut Op<'_, FsNode>, list: &[Xattr]) -> Result<Vec<Slot>, Error> {
    let mut slots = Vec::new();
    for attribute in list {
        if let Value::Nodes { nids, .. } = &attribute.value {
            for nid in nids {
                let node = tree::load_in(op, *nid)?;
                slots.push(op.lock(&node)?);
            }
        }
    }
    Ok(slots)
}

/// Which kind of attribute a name asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    User,
    /// Trusted and security attributes, which the kernel guards.
    Guarded,
    AccessAcl,
    DefaultAcl,
}

pub(crate) fn space_of(name: &[u8]) -> Result<Space, Error> {
    if name.len() > NAME_MAX {
        return Err(Error::NameTooLong);
    }
    if name.contains(&0) {
        return Err(Error::Invalid("an attribute name with a zero byte"));
    }
    let prefixes: [(&[u8], Space); 3] = [
        (b"user.", Space::User),
        (b"trusted.", Space::Guarded),
        (b"security.", Space::Guarded),
    ];
    for (prefix, space) in prefixes {
        if let Some(rest) = name.strip_prefix(prefix) {
            return match rest.is_empty() {
                true => Err(Error::Invalid("an attribute name that is only a prefix")),
                false => Ok(space),
            };
        }
    }
    match name {
        _ if name == ACCESS => Ok(Space::AccessAcl),
        _ if name == DEFAULT => Ok(Space::DefaultAcl),
        _ => Err(Error::Unsupported("attributes of this namespace")),
    }
}

/// Refuses what this kind of file cannot have.
pub(crate) fn check_space(space: Space, inode: &Inode) -> Result<(), Error> {
    match space {
        Space::User if !inode.is_file() && !inode.is_dir() => Err(Error::NotPermitted),
        Space::AccessAcl | Space::DefaultAcl if inode.is_symlink() => Err(Error::Unsupported(
            "an access control list on a symbolic link",
        )),
        _ => Ok(()),
    }
}

/// A change of one attribute, everything locked and reserved.
pub(crate) struct Plan<'s> {
    old_values: Vec<Slot>,
    new_values: Pieces<'s>,
    change: Change<'s>,
}

enum Change<'s> {
    Nothing,
    Put(Addition<'s, Xattr>),
    Remove(Deletion<Xattr>),
}

impl Plan<'_> {
    pub(crate) fn finish(self, op: &mut Op<'_, FsNode>) {
        self.old_values.into_iter().for_each(|slot| op.delete(slot));
        for (fresh, bytes) in self.new_values {
            op.create(fresh, FsNode::Value(bytes));
        }
        match self.change {
            Change::Nothing => {}
            Change::Put(addition) => addition.finish(op),
            Change::Remove(deletion) => deletion.finish(op),
        }
    }
}

impl FileSystem {
    fn attribute_spot(
        &self,
        op: &mut Op<'_, FsNode>,
        inode: Slot,
        name: &[u8],
    ) -> Result<list::Spot<Xattr>, Error> {
        let first = self.hash.first_key(name);
        list::spot::<Xattr>(op, inode, first, |x| &*x.name == name)
    }

    /// Plans to set an attribute (phase 1). `flags` as for [`FileSystem::setxattr`].
    pub(crate) fn plan_set<'s>(
        &'s self,
        op: &mut Op<'s, FsNode>,
        inode: Slot,
        name: &[u8],
        value: &[u8],
        flags: i32,
    ) -> Result<Plan<'s>, Error> {
        let spot = self.attribute_spot(op, inode, name)?;
        let key = match &spot.found {
            Some(_) if flags & XATTR_CREATE != 0 => return Err(Error::Exists),
            None if flags & XATTR_REPLACE != 0 => return Err(Error::NoAttribute),
            Some(old) => old.key,
            None => spot.free_key(op)?,
        };
        let old_values = lock_values(op, spot.found.as_slice())?;
        let (value, new_values) = plan_value(&self.store, value)?;
        let attribute = Xattr {
            key,
            name: name.into(),
            value,
        };
        Ok(Plan {
            old_values,
            new_values,
            change: Change::Put(spot.put(op, attribute)?),
        })
    }

    /// Plans to remove an attribute, which need not be there.
    pub(crate) fn plan_unset<'s>(
        &self,
        op: &mut Op<'s, FsNode>,
        inode: Slot,
        name: &[u8],
    ) -> Result<Plan<'s>, Error> {
        let spot = self.attribute_spot(op, inode, name)?;
        let old_values = lock_values(op, spot.found.as_slice())?;
        let change = match spot.found {
            Some(_) => Change::Remove(spot.remove(op, Emptied::Goes)?),
            None => Change::Nothing,
        };
        Ok(Plan {
            old_values,
            new_values: Vec::new(),
            change,
        })
    }

    /// An attribute's value, as an operation that holds the inode exclusively has it.
    pub(crate) fn attribute_in(
        &self,
        op: &mut Op<'_, FsNode>,
        slot: Slot,
        name: &[u8],
    ) -> Result<Option<Vec<u8>>, Error> {
        let inode = op.peek(slot).inode()?;
        if inode.seldom.xattrs.is_empty() && inode.seldom.xattr_root.is_none() {
            return Ok(None);
        }
        let Some(found) = self.attribute_spot(op, slot, name)?.found else {
            return Ok(None);
        };
        if let Value::Here(bytes) = found.value {
            return Ok(Some(bytes.into()));
        }
        let mut bytes = Vec::new();
        for slot in lock_values(op, &[found])? {
            match op.peek(slot) {
                FsNode::Value(piece) => bytes.extend_from_slice(piece),
                _ => return Err(Damage::new("attribute", "its value is elsewhere").into()),
            }
        }
        Ok(Some(bytes))
    }

    /// An attribute's value; the inode is locked at least shared.
    pub(crate) fn attribute(&self, inode: &Inode, name: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        if inode.seldom.xattrs.is_empty() && inode.seldom.xattr_root.is_none() {
            return Ok(None);
        }
        let first = self.hash.first_key(name);
        let found = list::find::<Xattr>(&self.store, inode, first, |x| &*x.name == name)?;
        match found.map(|x| x.value) {
            None => Ok(None),
            Some(Value::Here(bytes)) => Ok(Some(bytes.into())),
            Some(Value::Nodes { len, nids }) => {
                let mut bytes = Vec::with_capacity(len as usize);
                for nid in nids {
                    match &*tree::read(&self.store, nid)? {
                        FsNode::Value(piece) => bytes.extend_from_slice(piece),
                        _ => return Err(Damage::new("attribute", "its value is elsewhere").into()),
                    }
                }
                if bytes.len() != len as usize {
                    return Err(Damage::new("attribute", "its value has another length").into());
                }
                Ok(Some(bytes))
            }
        }
    }

    /// The value of an extended attribute.
    pub fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, Error> {
        let space = space_of(name)?;
        let node = self.inode(ino)?;
        let inode = node.inode()?;
        match check_space(space, inode) {
            Err(Error::NotPermitted) => return Err(Error::NoAttribute),
            other => other?,
        }
        self.attribute(inode, name)?.ok_or(Error::NoAttribute)
    }

    /// The names of all extended attributes, each followed by a zero byte; at most 64 KiB.
    ///
    /// # Errors
    /// [`Error::AttributeTooLarge`] when there are more, which [`FileSystem::setxattr`] refuses to make.
    pub fn listxattr(&self, ino: Ino) -> Result<Vec<u8>, Error> {
        let node = self.inode(ino)?;
        self.attribute_names(node.inode()?)
    }

    /// See [`FileSystem::listxattr`]; the inode is locked at least shared.
    pub(crate) fn attribute_names(&self, inode: &Inode) -> Result<Vec<u8>, Error> {
        let mut names = Vec::new();
        let mut from = Some(0);
        while let Some(key) = from {
            let (run, next) = list::run_from::<Xattr>(&self.store, inode, key)?;
            for attribute in run {
                names.extend_from_slice(&attribute.name);
                names.push(0);
            }
            if names.len() > NAMES_MAX {
                return Err(Error::AttributeTooLarge);
            }
            from = next;
        }
        Ok(names)
    }

    /// Refuses a new attribute whose name listxattr(2) could not return beside the others.
    fn check_names(&self, inode: &Inode, name: &[u8]) -> Result<(), Error> {
        // What an inode holds itself is far from that.
        if inode.seldom.xattr_root.is_none() || self.attribute(inode, name)?.is_some() {
            return Ok(());
        }
        match self.attribute_names(inode) {
            Ok(names) if names.len() + name.len() < NAMES_MAX => Ok(()),
            Ok(_) | Err(Error::AttributeTooLarge) => Err(Error::NoSpace),
            Err(error) => Err(error),
        }
    }

    /// Sets an extended attribute in one step; `flags`: [`XATTR_CREATE`], [`XATTR_REPLACE`],
    /// [`XATTR_ACL_KILL_SGID`]. An access list changes the permission bits with it.
    ///
    /// # Errors
    /// [`Error::NoSpace`] also when the names of all of the file's attributes would take more than 64 KiB.
    pub fn setxattr(
        &self,
        who: &Caller,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: i32,
    ) -> Result<(), Error> {
        let space = space_of(name)?;
        if value.len() > VALUE_MAX {
            return Err(Error::AttributeTooLarge);
        }
        let acl = match space {
            Space::AccessAcl | Space::DefaultAcl => Acl::parse(value)?,
            _ => None,
        };
        let node = self.node(ino)?;
        let mut op = self.store.begin(Need::Grow)?;
        let slot = op.lock(&node)?;
        let inode = op.peek(slot).inode()?;
        check_space(space, inode)?;
        if space == Space::DefaultAcl && !inode.is_dir() {
            return match acl {
                Some(_) => Err(Error::AccessDenied),
                None => Ok(()),
            };
        }
        let mut mode = None;
        if let (Space::AccessAcl, Some(acl)) = (space, &acl) {
            let mut new = (inode.mode & !0o777) | acl.mode();
            let outside = !(who.privileged || who.in_group || who.gid == inode.gid);
            if flags & XATTR_ACL_KILL_SGID != 0 || outside {
                new &= !libc::S_ISGID;
            }
            mode = Some(new);
        }
        let no_list = match space {
            Space::AccessAcl => acl.is_none_or(|acl| acl.is_minimal()),
            Space::DefaultAcl => acl.is_none(),
            _ => false,
        };
        let plan = match no_list {
            true => self.plan_unset(&mut op, slot, name)?,
            false => {
                self.check_names(op.peek(slot).inode()?, name)?;
                self.plan_set(&mut op, slot, name, value, flags)?
            }
        };
        self.finish_attribute(op, slot, plan, mode);
        Ok(())
    }

    /// Removes an extended attribute.
    pub fn removexattr(&self, _who: &Caller, ino: Ino, name: &[u8]) -> Result<(), Error> {
        let space = space_of(name)?;
        let node = self.node(ino)?;
        let mut op = self.store.begin(Need::Reclaim)?;
        let slot = op.lock(&node)?;
        check_space(space, op.peek(slot).inode()?)?;
        let plan = self.plan_unset(&mut op, slot, name)?;
        if matches!(plan.change, Change::Nothing) {
            return match space {
                // No list there is what was wanted.
                Space::AccessAcl | Space::DefaultAcl => Ok(()),
                Space::User | Space::Guarded => Err(Error::NoAttribute),
            };
        }
        self.finish_attribute(op, slot, plan, None);
        Ok(())
    }

    fn finish_attribute(
        &self,
        mut op: Op<'_, FsNode>,
        slot: Slot,
        plan: Plan<'_>,
        mode: Option<u32>,
    ) {
        let ino = op.nid(slot);
        let shown = op.peek(slot).inode().map_or(Stamp::NEVER, Inode::shown);
        plan.finish(&mut op);
        let change = AttrChange {
            mode,
            mtime: self.files.times_set(ino, false, false),
            ctime: Some(self.times.after(shown)),
            ..AttrChange::default()
        };
        op.apply(slot, Delta::Attrs(change));
        op.commit_noting(|epoch| self.files.changed(ino, epoch));
    }
}

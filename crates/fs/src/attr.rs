//! Attributes: stat and its counterpart.

use crate::Error;
use crate::acl::{ACCESS, Acl};
use crate::api::{Attr, Caller, Ino, SetAttr, SetTime};
use crate::content::{AttrChange, Delta, Inode};
use crate::filesystem::FileSystem;
use crate::xattr::CAPABILITY;
use base::clock::Timestamp;
use engine::Need;
use format::BLOCK_SIZE;

/// 512-byte units in a block.
const UNITS: u64 = BLOCK_SIZE as u64 / 512;
/// Bytes that `stat` shows a directory entry with, about what one takes.
const ENTRY_BYTES: u64 = 64;

/// Permission bits left when a change of owner or content takes privileges away: no
/// set-user-ID; no set-group-ID where the group may execute, or the caller is outside of it.
pub fn without_privileges(mode: u32, in_group: bool) -> u32 {
    let mut left = mode & !libc::S_ISUID;
    if mode & libc::S_IXGRP != 0 || !in_group {
        left &= !libc::S_ISGID;
    }
    left
}

impl FileSystem {
    /// What `stat` shows, with what is not in the inode yet.
    pub fn getattr(&self, ino: Ino) -> Result<Attr, Error> {
        let node = self.inode(ino)?;
        Ok(self.attr_of(ino, node.inode()?))
    }

    pub(crate) fn attr_of(&self, ino: Ino, inode: &Inode) -> Attr {
        let mut attr = Attr {
            ino,
            generation: inode.generation,
            mode: inode.mode,
            nlink: inode.nlink,
            uid: inode.uid,
            gid: inode.gid,
            rdev: inode.rdev,
            size: inode.size,
            blocks: inode.blocks.saturating_mul(UNITS),
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
            btime: inode.btime,
        };
        if inode.is_dir() {
            let counts = inode.counts();
            attr.nlink = counts.links;
            (attr.mtime, attr.ctime) = (counts.mtime, counts.ctime);
            // A damaged count must not overflow what stat shows.
            let bytes = counts.names.saturating_mul(ENTRY_BYTES).min(1 << 62);
            attr.size = bytes.next_multiple_of(BLOCK_SIZE as u64);
            attr.size = attr.size.max(BLOCK_SIZE as u64);
            attr.blocks = attr.size / 512;
            return attr;
        }
        if inode.is_file()
            && let Some(volatile) = self.files.volatile(ino, inode.generation)
        {
            attr.size = volatile.size;
            attr.blocks = attr.blocks.saturating_add(volatile.promised * UNITS);
            attr.atime = volatile.times.atime.unwrap_or(attr.atime);
            attr.mtime = volatile.times.mtime.unwrap_or(attr.mtime);
            attr.ctime = volatile.times.ctime.unwrap_or(attr.ctime);
        }
        if attr.blocks == 0 && inode.is_file() {
            // Data inside the inode: not a hole, lest archivers take it for one.
            attr.blocks = attr.size.min(BLOCK_SIZE as u64).div_ceil(512);
        }
        attr
    }

    /// Changes attributes. A new size comes first, in steps of its own; all else is one step.
    pub fn setattr(&self, who: &Caller, ino: Ino, set: &SetAttr) -> Result<Attr, Error> {
        if let Some(size) = set.size {
            self.truncate(who, ino, size)?;
            if set.kill_suidgid {
                self.kill_privileges(ino)?;
            }
        }
        let rest = SetAttr {
            size: None,
            kill_suidgid: set.kill_suidgid && set.size.is_none(),
            ..*set
        };
        if rest == SetAttr::default() {
            return self.getattr(ino);
        }
        let node = self.node(ino)?;
        let now = self.times.now();
        let mut op = self.store.begin(Need::Reclaim)?;
        let slot = op.lock(&node)?;
        let inode = op.peek(slot).inode()?;
        let mut change = attr_change(who, inode, &rest, now);
        if change.mode == Some(inode.mode) && set.mode.is_none() {
            change.mode = None;
        }
        let mut list = None;
        if let Some(mode) = set.mode
            && let Some(value) = self.attribute(inode, ACCESS)?
            && let Some(mut acl) = Acl::parse(&value)?
        {
            acl.chmod(mode);
            list = Some(acl.encode());
        }
        let taken = (set.uid.is_some() || set.gid.is_some() || rest.kill_suidgid)
            && inode.is_file()
            && self.attribute(inode, CAPABILITY)?.is_some();
        let plan = match list {
            Some(value) => Some(self.plan_set(&mut op, slot, ACCESS, &value, 0)?),
            None if taken => Some(self.plan_unset(&mut op, slot, CAPABILITY)?),
            None => None,
        };
        if let Some(plan) = plan {
            plan.finish(&mut op);
        }
        op.apply(slot, Delta::Attrs(change));
        self.files
            .times_set(ino, rest.atime.is_some(), rest.mtime.is_some());
        let attr = self.attr_of(ino, op.peek(slot).inode()?);
        let epoch = op.commit();
        self.files.changed(ino, epoch);
        Ok(attr)
    }
}

fn attr_change(who: &Caller, inode: &Inode, set: &SetAttr, now: Timestamp) -> AttrChange {
    let at = |time: SetTime| match time {
        SetTime::Now => now,
        SetTime::At(time) => time,
    };
    let group = set.gid.unwrap_or(inode.gid);
    let in_group = who.privileged || who.in_group || who.gid == group;
    let type_bits = inode.mode & libc::S_IFMT;
    let mode = match set.mode {
        Some(bits) => {
            let mut bits = bits & 0o7777;
            if !in_group {
                bits &= !libc::S_ISGID;
            }
            Some(type_bits | bits)
        }
        None if (set.uid.is_some() || set.gid.is_some()) && !inode.is_dir() => {
            Some(without_privileges(inode.mode, in_group))
        }
        None if set.kill_suidgid && inode.is_file() => Some(without_privileges(inode.mode, true)),
        None => None,
    };
    AttrChange {
        mode,
        uid: set.uid,
        gid: set.gid,
        atime: set.atime.map(at),
        mtime: set.mtime.map(at),
        ctime: Some(set.ctime.map_or(now, at)),
        ..AttrChange::default()
    }
}

//! Attributes: stat and its counterpart.

use crate::Error;
use crate::acl::{ACCESS, Acl};
use crate::api::{Attr, Caller, Ino, SetAttr, SetTime};
use crate::content::inode::Counts;
use crate::content::{AttrChange, Delta, FsNode, Inode};
use crate::data::Volatile;
use crate::filesystem::{FileSystem, is_hidden};
use crate::xattr::CAPABILITY;
use base::clock::Timestamp;
use engine::{Need, Op, Slot};
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

/// Whether a mode has a set-group-ID bit that those in the group may keep, and others may not.
pub fn needs_group(mode: u32) -> bool {
    mode & (libc::S_ISGID | libc::S_IXGRP) == libc::S_ISGID
}

impl FileSystem {
    /// What `stat` shows, with what is not in the inode yet.
    pub fn getattr(&self, ino: Ino) -> Result<Attr, Error> {
        if let Some(attr) = self.glance_attr(ino, None) {
            return Ok(attr);
        }
        let node = self.inode(ino)?;
        Ok(self.show(ino, node.inode()?))
    }

    /// What `stat` shows, as somebody is shown it: a later change gets newer times. Under the inode's lock.
    pub(crate) fn show(&self, ino: Ino, inode: &Inode) -> Attr {
        if inode.is_dir() {
            return attr_with(ino, inode, Some(inode.counts_shown()));
        }
        // The inode first: who uses the file from now on starts from what that was shown with.
        inode.show(inode.ctime);
        let mut attr = attr_with(ino, inode, None);
        if inode.is_file() {
            let volatile = self
                .files
                .volatile_shown(ino, inode.generation, inode.ctime);
            add_volatile(&mut attr, volatile);
            inode.show(attr.ctime);
        }
        attr
    }

    /// The same of an inode of this generation that is in memory, if it says it all, as most do that somebody looks at: of a file that is not in use, of a
    /// directory of which nothing is pending, and of others. `None`: nothing is known.
    #[inline]
    pub(crate) fn glance_attr(&self, ino: Ino, generation: Option<u64>) -> Option<Attr> {
        if self.files.may_be_volatile(ino) || is_hidden(ino) {
            return None;
        }
        self.store.glance(ino, |node| {
            let inode = node.inode().ok()?;
            if generation.is_some_and(|own| own != inode.generation) {
                return None;
            }
            if inode.is_dir() {
                return Some(attr_with(ino, inode, Some(inode.own_counts_shown()?)));
            }
            let mark = || inode.show(inode.ctime);
            if self.files.may_be_volatile_after(ino, mark) {
                return None;
            }
            let mut attr = attr_with(ino, inode, None);
            if inode.is_file() {
                add_volatile(&mut attr, None);
            }
            Some(attr)
        })
    }

    /// The same for who keeps what an operation returns; else what it is, shown to nobody who would look again.
    pub(crate) fn attr_for(&self, who: &Caller, ino: Ino, inode: &Inode) -> Attr {
        match who.keeps_attributes {
            true => self.show(ino, inode),
            false => self.attr_of(ino, inode),
        }
    }

    pub(crate) fn attr_of(&self, ino: Ino, inode: &Inode) -> Attr {
        let counts = inode.is_dir().then(|| inode.counts());
        let mut attr = attr_with(ino, inode, counts);
        if inode.is_file() {
            add_volatile(&mut attr, self.files.volatile(ino, inode.generation));
        }
        attr
    }

    /// Changes attributes. A new size comes first, in steps of its own, and before it what a change of content takes away, from a caller without
    /// privileges or with `kill_suidgid`; of a file with an
    /// access list capabilities go before owner and mode do; all else is one step.
    ///
    /// # Errors
    /// [`Error::NoSpace`] on an array on which metadata can hardly grow any more, before the size changes; never where privileges are only taken away.
    pub fn setattr(&self, who: &Caller, ino: Ino, set: &SetAttr) -> Result<Attr, Error> {
        let rest = SetAttr {
            kill_suidgid: set.kill_suidgid && set.size.is_none(),
            ..set.without_size()
        };
        let mut need = match rest == SetAttr::STRIP {
            // A full array's files can be cut and written over by whoever may.
            true => Need::Reclaim,
            false => Need::Change,
        };
        if let Some(size) = set.size {
            if rest != SetAttr::default() {
                self.files.check_size(size)?;
                self.store.accept(0)?;
                need = Need::Accepted;
            }
            if set.kill_suidgid && who.privileged {
                self.lose_privileges(ino, |group| who.is_in(group))?;
            }
            self.truncate(who, ino, size)?;
        }
        if rest == SetAttr::default() {
            return self.getattr(ino);
        }
        let node = self.node(ino)?;
        let (mut op, slot) = loop {
            let mut op = self.store.begin(need)?;
            let slot = op.lock(&node)?;
            let has_both = rest.mode.is_some()
                && self.loses_capabilities(&mut op, slot, &rest)?
                && self.attribute_in(&mut op, slot, ACCESS)?.is_some();
            if !has_both {
                break (op, slot);
            }
            // An operation that cannot be taken back plans the change of one attribute. So these go before the owner does.
            self.take_capabilities(&mut op, slot)?;
            op.commit_noting(|epoch| self.files.changed(ino, epoch));
        };
        let now = self.times.after(op.peek(slot).inode()?.shown());
        let mut change = self.change_lists(&mut op, slot, (who, &rest), now)?;
        let (atime, mtime) = (rest.atime.is_some(), rest.mtime.is_some());
        change.mtime = self.files.times_set(ino, atime, mtime).or(change.mtime);
        op.apply(slot, Delta::Attrs(change));
        let attr = self.attr_for(who, ino, op.peek(slot).inode()?);
        op.commit_noting(|epoch| self.files.changed(ino, epoch));
        Ok(attr)
    }

    /// As [`kill_privileges`](Self::kill_privileges), where set-group-ID goes also if the group may not execute, unless `is_in_group` says that who changes
    /// the content is in it. That is asked only then.
    pub fn lose_privileges(
        &self,
        ino: Ino,
        is_in_group: impl FnOnce(u32) -> bool,
    ) -> Result<(), Error> {
        let (has_any, in_group) = {
            let node = self.inode(ino)?;
            let inode = node.inode()?;
            let in_group = !needs_group(inode.mode) || is_in_group(inode.gid);
            let has_any = inode.is_file()
                && (without_privileges(inode.mode, in_group) != inode.mode
                    || self.attribute(inode, CAPABILITY)?.is_some());
            (has_any, in_group)
        };
        if has_any {
            // In no group but the file's, if that: root's own group is one that files have.
            let who = Caller {
                in_group,
                ..Caller::user(u32::MAX, u32::MAX)
            };
            self.setattr(&who, ino, &SetAttr::STRIP)?;
        }
        Ok(())
    }

    /// Takes file capabilities away before a change of content, whoever makes it: for who serves a mount whose kernel does not look for them. Costs one shared lock when there
    /// are none.
    pub fn lose_capabilities(&self, ino: Ino) -> Result<(), Error> {
        let has_any = {
            let node = self.inode(ino)?;
            self.attribute(node.inode()?, CAPABILITY)?.is_some()
        };
        if !has_any {
            return Ok(());
        }
        match self.removexattr(&Caller::root(), ino, CAPABILITY) {
            // Somebody else took them meanwhile.
            Err(Error::NoAttribute) => Ok(()),
            done => done,
        }
    }

    /// Whether an inode, which is locked exclusively, has capabilities that it does not keep.
    pub(crate) fn loses_capabilities(
        &self,
        op: &mut Op<'_, FsNode>,
        slot: Slot,
        set: &SetAttr,
    ) -> Result<bool, Error> {
        let is_taking = set.uid.is_some() || set.gid.is_some() || set.kill_suidgid;
        Ok(is_taking
            && op.peek(slot).inode()?.is_file()
            && self.attribute_in(op, slot, CAPABILITY)?.is_some())
    }

    pub(crate) fn take_capabilities(
        &self,
        op: &mut Op<'_, FsNode>,
        slot: Slot,
    ) -> Result<(), Error> {
        self.plan_unset(op, slot, CAPABILITY)?.finish(op);
        Ok(())
    }

    /// Changes an attribute that follows from others, the access list or capabilities, and returns the change of the others, all but the
    /// size. The inode is locked exclusively. Of one that has both, capabilities are taken before.
    pub(crate) fn change_lists<'s>(
        &'s self,
        op: &mut Op<'s, FsNode>,
        slot: Slot,
        (who, set): (&Caller, &SetAttr),
        now: Timestamp,
    ) -> Result<AttrChange, Error> {
        let inode = op.peek(slot).inode()?;
        let change = attr_change(who, inode, set, now);
        let kept = change.mode == Some(inode.mode) && set.mode.is_none();
        let mut list = None;
        if let Some(mode) = set.mode
            && let Some(value) = self.attribute_in(op, slot, ACCESS)?
            && let Some(mut acl) = Acl::parse(&value)?
        {
            acl.chmod(mode);
            list = Some(acl.encode());
        }
        match list {
            Some(value) => self.plan_set(op, slot, ACCESS, &value, 0)?.finish(op),
            None if self.loses_capabilities(op, slot, set)? => self.take_capabilities(op, slot)?,
            None => {}
        }
        Ok(AttrChange {
            mode: change.mode.filter(|_| !kept),
            ..change
        })
    }
}

/// What an inode is that nobody knows of yet.
pub(crate) fn attr_of_new(ino: Ino, inode: &Inode) -> Attr {
    let counts = inode.is_dir().then(|| inode.counts());
    let mut attr = attr_with(ino, inode, counts);
    if inode.is_file() {
        add_volatile(&mut attr, None);
    }
    attr
}

/// What an inode shows by itself; a directory with these counts.
fn attr_with(ino: Ino, inode: &Inode, counts: Option<Counts>) -> Attr {
    let mut attr = Attr {
        ino,
        generation: inode.generation,
        mode: inode.mode,
        nlink: inode.nlink,
        uid: inode.uid,
        gid: inode.gid,
        rdev: inode.seldom.rdev,
        size: inode.size,
        blocks: inode.blocks.saturating_mul(UNITS),
        atime: inode.atime,
        mtime: inode.mtime,
        ctime: inode.ctime,
        btime: inode.btime,
    };
    if let Some(counts) = counts {
        attr.nlink = counts.links;
        (attr.mtime, attr.ctime) = (counts.mtime, counts.ctime);
        // A damaged count must not overflow what stat shows.
        let bytes = counts.names.saturating_mul(ENTRY_BYTES).min(1 << 62);
        attr.size = bytes.next_multiple_of(BLOCK_SIZE as u64);
        attr.size = attr.size.max(BLOCK_SIZE as u64);
        attr.blocks = attr.size / 512;
    }
    attr
}

/// Adds what is known of a file beyond its inode.
fn add_volatile(attr: &mut Attr, volatile: Option<Volatile>) {
    if let Some(volatile) = volatile {
        attr.size = volatile.size;
        attr.blocks = attr.blocks.saturating_add(volatile.promised * UNITS);
        attr.atime = volatile.times.atime.unwrap_or(attr.atime);
        attr.mtime = volatile.times.mtime.unwrap_or(attr.mtime);
        attr.ctime = volatile.times.ctime.unwrap_or(attr.ctime);
    }
    if attr.blocks == 0 {
        // Data inside the inode: not a hole, lest archivers take it for one.
        attr.blocks = attr.size.min(BLOCK_SIZE as u64).div_ceil(512);
    }
}

pub(crate) fn attr_change(
    who: &Caller,
    inode: &Inode,
    set: &SetAttr,
    now: Timestamp,
) -> AttrChange {
    let at = |time: SetTime| match time {
        SetTime::Now => now,
        SetTime::At(time) => time,
    };
    let type_bits = inode.mode & libc::S_IFMT;
    let mode = match set.mode {
        Some(bits) => {
            let mut bits = bits & 0o7777;
            if !who.is_in(set.gid.unwrap_or(inode.gid)) {
                bits &= !libc::S_ISGID;
            }
            Some(type_bits | bits)
        }
        None if (set.uid.is_some() || set.gid.is_some()) && !inode.is_dir() => {
            // By the group that the file had.
            Some(without_privileges(inode.mode, who.is_in(inode.gid)))
        }
        None if set.kill_suidgid && inode.is_file() => {
            Some(without_privileges(inode.mode, who.is_in(inode.gid)))
        }
        None => None,
    };
    AttrChange {
        mode,
        uid: set.uid,
        gid: set.gid,
        atime: set.atime.map(at),
        mtime: set.mtime.map(at),
        ctime: Some(now),
        ..AttrChange::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ROOT;
    use crate::rename::tests::file_system;
    use std::sync::Arc;

    /// What a glance shows of an inode, which is what a look with its lock shows, if it shows anything.
    fn glanced(fs: &FileSystem, ino: Ino) -> Option<Attr> {
        let glanced = fs.glance_attr(ino, None)?;
        let node = fs.inode(ino).unwrap();
        assert_eq!(fs.show(ino, node.inode().unwrap()), glanced);
        assert_eq!(fs.glance_attr(ino, Some(glanced.generation)), Some(glanced));
        assert_eq!(fs.glance_attr(ino, Some(glanced.generation + 1)), None);
        Some(glanced)
    }

    /// Makes a file with these bytes at an offset, closed and written back.
    fn written(fs: &Arc<FileSystem>, name: &[u8], offset: u64, bytes: &[u8]) -> Ino {
        let who = Caller::root();
        let (attr, file) = fs.create(&who, ROOT, name, 0o644, libc::O_RDWR).unwrap();
        fs.write(&file, offset, bytes).unwrap();
        fs.fsync(&file, false).unwrap();
        drop(file);
        fs.sync().unwrap();
        attr.ino
    }

    #[test]
    fn a_glance_shows_what_has_nothing_beyond_its_inode_and_nothing_else() {
        let (fs, who) = (file_system(), Caller::root());
        let page = [7; 4096];
        let files = [
            written(&fs, b"inline", 0, b"few"),
            written(&fs, b"blocks", 0, &page.repeat(3)),
            written(&fs, b"sparse", 1 << 30, &page),
        ];
        for ino in files {
            assert!(glanced(&fs, ino).is_some_and(|attr| attr.blocks > 0));
        }
        let link = fs.symlink(&who, ROOT, b"link", b"blocks").unwrap().ino;
        let fifo = fs.mknod(&who, ROOT, b"fifo", libc::S_IFIFO, 0).unwrap().ino;
        let dir = fs.mkdir(&who, ROOT, b"dir", 0o755).unwrap().ino;
        for ino in [link, fifo, dir, ROOT] {
            assert!(glanced(&fs, ino).is_some(), "{ino:?}");
        }
        // A path goes on where a link leads to.
        assert_eq!(fs.resolve(b"link").unwrap().ino, files[1]);
        assert_eq!(fs.lookup(ROOT, b"link").unwrap().ino, link);

        let file = fs.open_file(files[0], libc::O_RDWR).unwrap();
        assert_eq!(fs.glance_attr(files[0], None), None, "it is in use");
        fs.write(&file, 10, b"more").unwrap();
        drop(file);
        assert_eq!(
            fs.glance_attr(files[0], None),
            None,
            "not all is written back"
        );
        assert_eq!(fs.getattr(files[0]).unwrap().size, 14);
        for hidden in [0, format::inode::FIRST_ORPHANS] {
            assert_eq!(fs.glance_attr(Ino { 0: hidden }, None), None);
        }
    }

    /// Whoever was shown a file by a glance sees by its time that it has changed since, however soon.
    #[test]
    fn what_changes_after_a_glance_has_a_newer_time() {
        let (fs, who) = (file_system(), Caller::root());
        let ino = written(&fs, b"file", 0, b"few");
        let mut last = glanced(&fs, ino).unwrap();
        for round in 0..20 {
            match round % 2 {
                0 => {
                    let mode = SetAttr {
                        mode: Some(0o600 + round % 4),
                        ..SetAttr::default()
                    };
                    fs.setattr(&who, ino, &mode).unwrap();
                }
                _ => {
                    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
                    fs.write(&file, 0, b"new").unwrap();
                    fs.fsync(&file, false).unwrap();
                    drop(file);
                    fs.sync().unwrap();
                }
            }
            let now = glanced(&fs, ino).unwrap();
            assert!(now.ctime > last.ctime, "{round}: {last:?}, {now:?}");
            last = now;
        }
    }
}

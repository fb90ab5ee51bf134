//! Names: lookup, creation, links and their removal, listing.
//!
//! Operations that meet several inodes look names up first, lock the inodes in nid order,
//! and then check under the locks that the names still mean what they did; else they start
//! again. Each is one record.

#[cfg(test)]
mod tests;

use crate::Error;
use crate::acl::{DEFAULT, Inherited};
use crate::api::{AtimePolicy, Attr, Caller, Ino};
use crate::attr::attr_of_new;
use crate::content::{AttrChange, Body, Delta, FsNode, Inode, Link, Orphan, Tally};
use crate::data::{Entered, Files, OpenFile};
use crate::dir::{self, Target, Wanted, is_dot};
use crate::directory::{At, dir_of};
use crate::filesystem::{FileSystem, LINK_MAX};
use crate::list::{Emptied, Seen};
use crate::orphan::Disposal;
use crate::times::Stamp;
use crate::tree::{Ahead, Purpose};
use base::canary::{Canary, planted};
use base::clock::Timestamp;
use engine::{Mode, Need, Node, NodeRead, Op, Slot};
use format::Damage;
use std::sync::Arc;

/// An access time older than this is renewed under the relative policy, in seconds.
const ATIME_AGE: i64 = 24 * 60 * 60;

/// Looks at one name that may find it pointing at an inode just gone.
pub(crate) const LOOKS: u32 = 100;

/// Looks at names that come too late. Those that find the same as the one before count: whom others come before for ever tries for ever.
#[derive(Debug)]
pub(crate) struct Looks<T> {
    last: Option<T>,
    same: u32,
}

impl<T> Default for Looks<T> {
    fn default() -> Self {
        Looks {
            last: None,
            same: 0,
        }
    }
}

impl<T: PartialEq> Looks<T> {
    /// One more has found this. True after [`LOOKS`] that found the same: it will not be another thing.
    pub fn are_over(&mut self, found: T) -> bool {
        let found = Some(found);
        self.same = match self.last == found {
            true => self.same + 1,
            false => 0,
        };
        self.last = found;
        self.same >= LOOKS
    }
}

/// A new inode in the making.
pub(crate) struct Draft<'a> {
    pub mode: u32,
    pub rdev: u32,
    pub body: &'a [u8],
}

impl Draft<'_> {
    pub(crate) fn file(mode: u32) -> Self {
        Draft {
            mode: libc::S_IFREG | (mode & 0o7777),
            rdev: 0,
            body: &[],
        }
    }
}

impl FileSystem {
    /// The inode that a name in a directory refers to; "." and ".." as well.
    pub fn lookup<'d>(&self, parent: impl Into<At<'d>>, name: &[u8]) -> Result<Attr, Error> {
        let parent = parent.into();
        if is_dot(name) {
            let node = self.dir_inode(parent)?;
            let dir = live_dir(node.inode()?)?;
            return match name {
                b"." => Ok(self.show(parent.ino(), dir)),
                _ => self.look_above(node, |up, inode| self.show(up, inode)),
            };
        }
        let name = self.wanted(name)?;
        let mut looks = Looks::default();
        loop {
            let found = self.find(parent, name)?.ok_or(Error::NotFound)?;
            if looks.are_over(found) {
                return Err(self.dangling(parent.ino()));
            }
            between_steps();
            match self.getattr(found.nid) {
                Ok(attr) if attr.generation == found.generation => return Ok(attr),
                // Unlinked, perhaps replaced, between the two looks.
                Ok(_) | Err(Error::Stale(_)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Looks at the directory above one that is locked, which is given up for that. While it is locked it has a name in the one above, which
    /// therefore is not removed; and from then on that is referred to until it has been looked at, so that nothing else gets its number.
    pub(crate) fn look_above<T>(
        &self,
        dir: NodeRead<FsNode>,
        look: impl FnOnce(Ino, &Inode) -> T,
    ) -> Result<T, Error> {
        let up = live_dir(dir.inode()?)?.parent;
        self.ref_inode(up);
        drop(dir);
        between_steps();
        let seen = (|| Ok(look(up, self.inode(up)?.inode()?)))();
        self.forget(up, 1);
        seen
    }

    pub(crate) fn dangling(&self, dir: Ino) -> Error {
        Error::Damaged {
            ino: dir,
            damage: Damage::new("directory", "a name refers to an inode that is not there"),
        }
    }

    /// Looks a name up without locking longer than that takes.
    pub(crate) fn find(&self, parent: At<'_>, name: Wanted<'_>) -> Result<Option<Link>, Error> {
        if let Some(link) = self.glance(parent, None, name) {
            return Ok(Some(link));
        }
        let node = self.dir_inode(parent)?;
        dir::find(&self.store, live_dir(node.inode()?)?, name)
    }

    /// [`find`](Self::find), with the place for an operation that follows.
    pub(crate) fn look_in(
        &self,
        dir: &Node<FsNode>,
        name: Wanted<'_>,
        ahead: Option<Ahead>,
    ) -> Result<(Option<Link>, Seen), Error> {
        let node = dir_of(dir.read()?)?;
        dir::look(&self.store, live_dir(node.inode()?)?, name, ahead)
    }

    pub(crate) fn wanted<'a>(&self, name: &'a [u8]) -> Result<Wanted<'a>, Error> {
        Wanted::new(&self.hash, name)
    }

    /// The target of a symbolic link.
    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>, Error> {
        let target = {
            let node = self.inode(ino)?;
            let inode = node.inode()?;
            match &inode.body {
                Body::Inline(target) if inode.is_symlink() => target.clone(),
                _ => return Err(Error::Invalid("not a symbolic link")),
            }
        };
        self.touch_atime(ino)?;
        Ok(target)
    }

    /// Makes a file, fifo, socket or device node.
    pub fn mknod<'d>(
        &self,
        who: &Caller,
        parent: impl Into<At<'d>>,
        name: &[u8],
        mode: u32,
        rdev: u32,
    ) -> Result<Attr, Error> {
        let (kind, rdev) = match mode & libc::S_IFMT {
            0 | libc::S_IFREG => (libc::S_IFREG, 0),
            kind @ (libc::S_IFIFO | libc::S_IFSOCK) => (kind, 0),
            kind @ (libc::S_IFCHR | libc::S_IFBLK) => (kind, rdev),
            libc::S_IFDIR => return Err(Error::NotPermitted),
            _ => return Err(Error::Invalid("unknown file type")),
        };
        let draft = Draft {
            mode: kind | (mode & 0o7777),
            rdev,
            body: &[],
        };
        Ok(self.make(who, parent.into(), name, &draft, None)?.attr)
    }

    pub fn mkdir<'d>(
        &self,
        who: &Caller,
        parent: impl Into<At<'d>>,
        name: &[u8],
        mode: u32,
    ) -> Result<Attr, Error> {
        let draft = Draft {
            mode: libc::S_IFDIR | (mode & 0o1777),
            rdev: 0,
            body: &[],
        };
        Ok(self.make(who, parent.into(), name, &draft, None)?.attr)
    }

    pub fn symlink<'d>(
        &self,
        who: &Caller,
        parent: impl Into<At<'d>>,
        name: &[u8],
        target: &[u8],
    ) -> Result<Attr, Error> {
        if target.is_empty() {
            return Err(Error::NotFound);
        }
        if target.len() > crate::content::inode::SYMLINK_MAX {
            return Err(Error::NameTooLong);
        }
        if target.contains(&0) {
            return Err(Error::Invalid("a target with a zero byte"));
        }
        let draft = Draft {
            mode: libc::S_IFLNK | 0o777,
            rdev: 0,
            body: target,
        };
        Ok(self.make(who, parent.into(), name, &draft, None)?.attr)
    }

    /// Makes a regular file and opens it. The name must not exist.
    pub fn create<'d>(
        &self,
        who: &Caller,
        parent: impl Into<At<'d>>,
        name: &[u8],
        mode: u32,
        flags: i32,
    ) -> Result<(Attr, Arc<OpenFile>), Error> {
        let draft = Draft::file(mode);
        let flags = flags & !libc::O_TRUNC;
        let made = self.make(who, parent.into(), name, &draft, Some(flags))?;
        let entered = made.entered.ok_or(Error::Stale(made.attr.ino))?;
        Ok((made.attr, Files::handle(&self.owners, entered)))
    }

    /// Makes a regular file without a name in the file system of `parent` and opens it;
    /// `link` can give it a name, else it goes when it is closed.
    pub fn tmpfile<'d>(
        &self,
        who: &Caller,
        parent: impl Into<At<'d>>,
        mode: u32,
        flags: i32,
    ) -> Result<(Attr, Arc<OpenFile>), Error> {
        let draft = Draft::file(mode);
        let dir = self.dir_node(parent.into())?;
        let fresh = self.store.reserve_nid()?;
        let ino = fresh.nid();
        let orphans = self.orphan_node(ino)?;
        let mut op = self.store.begin(Need::Grow)?;
        let slots = op.lock_sorted(&[&dir, &orphans])?;
        let parent_inode = live_dir(op.peek(slots[0]).inode()?)?;
        let (mut inode, attributes) = self.draft(who, parent_inode, &draft, fresh.version())?;
        inode.nlink = 0;
        let attributes = attributes.plan(&self.store)?;
        let orphan = Orphan {
            nid: ino,
            generation: inode.generation,
        };
        let addition = self.plan_nameless(&mut op, slots[1], orphan)?;
        self.files.ref_inode(ino);
        attributes.finish(&mut op, &mut inode);
        let attr = self.attr_of(ino, &inode);
        op.create(fresh, FsNode::Inode(inode));
        addition.finish(&mut op);
        self.note_orphan(ino);
        op.commit();
        let file = self.files.open(&self.owners, ino, flags & !libc::O_TRUNC);
        self.forget(ino, 1);
        Ok((attr, file?))
    }

    fn make(
        &self,
        who: &Caller,
        parent: At<'_>,
        name: &[u8],
        draft: &Draft<'_>,
        open: Option<i32>,
    ) -> Result<Made, Error> {
        if is_dot(name) {
            return Err(Error::Exists);
        }
        let name = self.wanted(name)?;
        match self.try_make(who, parent, name, draft, open, Mode::Merging)? {
            Some(made) => Ok(made),
            None => self
                .try_make(who, parent, name, draft, open, Mode::Exclusive)?
                .ok_or(Error::Busy),
        }
    }

    /// `open`: with which flags. `None`: it takes the directory's exclusive lock.
    fn try_make(
        &self,
        who: &Caller,
        parent: At<'_>,
        name: Wanted<'_>,
        draft: &Draft<'_>,
        open: Option<i32>,
        mode: Mode,
    ) -> Result<Option<Made>, Error> {
        let dir_node = self.dir_node(parent)?;
        // What comes from memory for the look at the name comes while something else is done.
        let [ahead] = dir::look_ahead(&self.store, &dir_node, [name]);
        let fresh = self.store.reserve_nid()?;
        let ino = fresh.nid();
        if let Some(ahead) = &ahead {
            ahead.ask(&self.store, Purpose::Change);
        }
        let mut op = self.store.begin(Need::Grow)?;
        once_told();
        let dir = op.lock_given(dir_node.given(), mode)?;
        let parent_inode = live_dir(op.peek(dir).inode()?)?;
        let default = self.default_of(parent_inode, draft)?;
        let spot = dir::place(&mut op, dir, name, ahead)?;
        let (parent_inode, version) = (op.peek(dir).inode()?, fresh.version());
        let drafted = self.draft_with(who, parent_inode, draft, version, default);
        let (mut inode, attributes) = drafted?;
        if inode.is_dir() {
            inode.parent = parent.ino();
            if !parent_inode.takes_subdir() {
                return Err(Error::TooManyLinks);
            }
        }
        let spot = dir::sought(&op, spot, name)?;
        if spot.found.is_some() {
            return Err(Error::Exists);
        }
        let addition = dir::insert(&mut op, spot, name.text, Target::of(ino, &inode))?;
        if addition.is_blocked(&op) {
            return Ok(None);
        }
        let attributes = attributes.plan(&self.store)?;
        let (subdirs, now) = (inode.is_dir() as i32, inode.btime);
        attributes.finish(&mut op, &mut inode);
        let (attr, shown) = (attr_of_new(ino, &inode), inode.shown());
        let made = op.create(fresh, FsNode::Inode(inode));
        addition.finish(&mut op);
        self.count_names(&mut op, dir, (1, subdirs), now);
        let open = open.map(|flags| (flags, op.node(made)));
        let mut entered = None;
        op.commit_noting(|epoch| {
            // Open before anybody can unlink it.
            if let Some((flags, node)) = open {
                let new = (epoch, attr.size, shown);
                entered = (self.files).enter_new(node, attr.generation, flags, new);
            }
        });
        Ok(Some(Made { attr, entered }))
    }

    /// The new inode as its directory's owner, set-group-ID bit and default ACL make it.
    pub(crate) fn draft(
        &self,
        who: &Caller,
        parent: &Inode,
        draft: &Draft<'_>,
        generation: u64,
    ) -> Result<(Inode, Inherited), Error> {
        let default = self.default_of(parent, draft)?;
        self.draft_with(who, parent, draft, generation, default)
    }

    /// The directory's default list, if what is made takes one.
    fn default_of(&self, parent: &Inode, draft: &Draft<'_>) -> Result<Option<Vec<u8>>, Error> {
        match draft.mode & libc::S_IFMT {
            libc::S_IFLNK => Ok(None),
            _ => self.attribute(parent, DEFAULT),
        }
    }

    /// The same, with the directory's default list.
    pub(crate) fn draft_with(
        &self,
        who: &Caller,
        parent: &Inode,
        draft: &Draft<'_>,
        generation: u64,
        default: Option<Vec<u8>>,
    ) -> Result<(Inode, Inherited), Error> {
        let mut mode = draft.mode;
        let directory = mode & libc::S_IFMT == libc::S_IFDIR;
        let shared_group = parent.mode & libc::S_ISGID != 0;
        if shared_group && directory {
            mode |= libc::S_ISGID;
        } else if shared_group
            && mode & (libc::S_ISGID | libc::S_IXGRP) == libc::S_ISGID | libc::S_IXGRP
            && !(who.privileged || who.in_group || who.gid == parent.gid)
        {
            mode &= !libc::S_ISGID;
        }
        let inherited = self.inherit_acl(default, mode, who.umask)?;
        let now = self.times.after(parent.shown());
        let mut inode = Inode::new(inherited.mode, generation, now);
        if who.keeps_attributes {
            inode.show(now);
        }
        inode.uid = who.uid;
        inode.gid = if shared_group { parent.gid } else { who.gid };
        if draft.rdev != 0 {
            inode.seldom.rdev = draft.rdev;
        }
        if !directory {
            inode.body = Body::Inline(draft.body.to_vec());
            inode.size = draft.body.len() as u64;
        }
        Ok((inode, inherited))
    }

    /// Gives an inode one more name. Directories have only one.
    pub fn link<'d>(
        &self,
        who: &Caller,
        ino: Ino,
        parent: impl Into<At<'d>>,
        name: &[u8],
    ) -> Result<Attr, Error> {
        let parent = parent.into();
        if is_dot(name) {
            return Err(Error::Exists);
        }
        let name = self.wanted(name)?;
        let mut mode = Mode::Merging;
        for _ in 0..LOOKS {
            match self.try_link(who, ino, parent, name, mode)? {
                Linked::Done(attr) => return Ok(*attr),
                Linked::Again => {}
                Linked::Blocked => mode = Mode::Exclusive,
            }
        }
        Err(Error::Busy)
    }

    fn try_link(
        &self,
        who: &Caller,
        ino: Ino,
        parent: At<'_>,
        name: Wanted<'_>,
        mode: Mode,
    ) -> Result<Linked, Error> {
        let (node, dir_node) = (self.node(ino)?, self.dir_node(parent)?);
        let orphans = self.orphan_node(ino)?;
        let nameless = self.inode(ino)?.inode()?.nlink == 0;
        let mut op = self.store.begin(Need::Grow)?;
        let mut nodes = vec![(&node, Mode::Exclusive), (&dir_node, mode)];
        if nameless {
            nodes.push((&orphans, Mode::Exclusive));
        }
        let slots = op.lock_sorted_as(&nodes)?;
        let (file, dir) = (slots[0], slots[1]);
        let inode = op.peek(file).inode()?;
        if inode.is_dir() {
            return Err(Error::NotPermitted);
        }
        if inode.nlink >= LINK_MAX {
            return Err(Error::TooManyLinks);
        }
        if (inode.nlink == 0) != nameless {
            return Ok(Linked::Again);
        }
        let (target, nlink) = (Target::of(ino, inode), inode.nlink + 1);
        let shown = live_dir(op.peek(dir).inode()?)?.shown().max(inode.shown());
        let spot = dir::spot(&mut op, dir, name)?;
        if spot.found.is_some() {
            return Err(Error::Exists);
        }
        let addition = dir::insert(&mut op, spot, name.text, target)?;
        if addition.is_blocked(&op) {
            return Ok(Linked::Blocked);
        }
        let adoption = match nameless {
            true => self.plan_adoption(&mut op, slots[2], file)?,
            false => None,
        };
        between_steps();
        let now = self.times.after(shown);
        addition.finish(&mut op);
        self.count_names(&mut op, dir, (1, 0), now);
        let mtime = self.files.times_set(ino, false, false);
        op.apply(file, links(nlink, now, mtime));
        if let Some(adoption) = adoption {
            adoption.finish(&mut op);
        }
        if nameless {
            self.adopted(ino);
        }
        let attr = self.attr_for(who, ino, op.peek(file).inode()?);
        op.commit_noting(|epoch| self.files.changed(ino, epoch));
        Ok(Linked::Done(Box::new(attr)))
    }

    /// Removes a name of something that is not a directory.
    pub fn unlink<'d>(
        &self,
        _who: &Caller,
        parent: impl Into<At<'d>>,
        name: &[u8],
    ) -> Result<(), Error> {
        if is_dot(name) {
            return Err(Error::IsADirectory);
        }
        self.remove(parent.into(), name, false, None)
    }

    /// Removes an empty directory.
    pub fn rmdir<'d>(
        &self,
        _who: &Caller,
        parent: impl Into<At<'d>>,
        name: &[u8],
    ) -> Result<(), Error> {
        match name {
            b"." => return Err(Error::Invalid("\".\" cannot be removed")),
            b".." => return Err(Error::NotEmpty),
            _ => {}
        }
        self.remove(parent.into(), name, true, None)
    }

    /// Removes a name if it still refers to the inode that was found by it, in the directory that was looked in, each told by its
    /// generation. False: something there is another by now, or gone, and nothing was done.
    pub(crate) fn remove_found(
        &self,
        dir: (Ino, u64),
        name: &[u8],
        victim: (Ino, u64),
        directory: bool,
    ) -> Result<bool, Error> {
        let found = Some(FoundBefore { dir: dir.1, victim });
        match self.remove(dir.0.into(), name, directory, found) {
            Ok(()) => Ok(true),
            // The last two are said of a number that something else has now.
            Err(Error::NotFound | Error::NotADirectory | Error::Stale(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn remove(
        &self,
        parent: At<'_>,
        name: &[u8],
        directory: bool,
        before: Option<FoundBefore>,
    ) -> Result<(), Error> {
        let name = self.wanted(name)?;
        let (mut orphanage, mut mode) = (false, Mode::Merging);
        let mut looks = Looks::default();
        loop {
            let dir_node = self.dir_node(parent)?;
            let [ahead] = dir::look_ahead(&self.store, &dir_node, [name]);
            let mut op = self.begin_meanwhile(ahead);
            once_told();
            let (found, seen) = self.look_in(&dir_node, name, ahead)?;
            let found = found.ok_or(Error::NotFound)?;
            if looks.are_over(found) {
                break;
            }
            if before.is_some_and(|before| before.victim != (found.nid, found.generation)) {
                return Err(Error::NotFound);
            }
            let at_hand = self.store.at_hand(found.nid);
            let victim_node = match at_hand.filter(|node| !node.is_owned()) {
                Some(node) => Ok(node),
                None => {
                    op = None;
                    self.named_node(found.nid)
                }
            };
            let victim_node = match victim_node {
                Ok(node) => node,
                Err(engine::Error::Gone(_)) => continue,
                Err(error) => return Err(error.into()),
            };
            // What most are, small files that nobody uses, needs no look before it is locked. Then it is seen as well whether there is much to free.
            if self.files.is_active(found.nid, found.generation) {
                match victim_node.read() {
                    Ok(node) => orphanage |= directory || node.inode()?.nlink <= 1,
                    Err(engine::Error::Gone(_)) => continue,
                    Err(error) => return Err(error.into()),
                }
            }
            let mut orphans = None;
            if orphanage {
                op = None;
                orphans = Some(self.orphan_node(found.nid)?);
            }
            let mut op = op.unwrap_or_else(|| self.store.begin(Need::Reclaim))?;
            let (victim, dir) = ((victim_node, Mode::Exclusive), (dir_node.given(), mode));
            let locked = match orphans {
                Some(orphans) => op.lock_sorted_given([dir, victim, (orphans, Mode::Exclusive)]),
                None => op.lock_sorted_given([dir, victim]),
            };
            let slots = match locked {
                Ok(slots) => slots,
                Err(engine::Error::Gone(nid)) if nid == found.nid => continue,
                Err(error) => return Err(error.into()),
            };
            let removal = Removal {
                dir: slots[0],
                victim: slots[1],
                orphans: slots.get(2).copied(),
                name,
                expected: &found,
                seen: &seen,
                directory,
                dir_before: before.map(|before| before.dir),
            };
            match self.try_remove(op, removal)? {
                Outcome::Done => return Ok(()),
                Outcome::Again => {}
                Outcome::Blocked => mode = Mode::Exclusive,
                Outcome::NeedsOrphanage => orphanage = true,
            }
        }
        // Others rename faster than this looks, or the name refers to nothing.
        self.lookup(parent, name.text)?;
        Err(Error::Busy)
    }

    /// Begins a removal while the memory comes of a leaf that is in some, which was told of; whether it may be matters once there is something to
    /// remove. Where nodes come from devices, as far as can be told, nobody has room in the journal meanwhile.
    fn begin_meanwhile(&self, ahead: Option<Ahead>) -> Option<Begun<'_>> {
        let ahead = ahead?;
        let begun = self.store.begin(Need::Reclaim);
        ahead.ask(&self.store, Purpose::Change).then_some(begun)
    }

    fn try_remove(&self, mut op: Op<'_, FsNode>, r: Removal<'_>) -> Result<Outcome, Error> {
        let dir = live_dir(op.peek(r.dir).inode()?)?;
        if r.dir_before.is_some_and(|before| before != dir.generation) {
            return Err(Error::NotFound);
        }
        let shown = dir.shown();
        let spot = dir::spot_seen(&mut op, r.dir, r.name, r.seen)?;
        let inode = op.peek(r.victim).inode()?;
        let shown = shown.max(inode.shown());
        let same = |n: &Link| n == r.expected && n.generation == inode.generation;
        if !spot.found.as_ref().is_some_and(same) {
            return Ok(Outcome::Again);
        }
        let nlink = match (r.directory, inode.is_dir()) {
            (true, false) => return Err(Error::NotADirectory),
            (false, true) => return Err(Error::IsADirectory),
            (true, true) if inode.names() > 0 && !planted(Canary::FullDirectoryRemoved) => {
                return Err(Error::NotEmpty);
            }
            (true, true) => 0,
            (false, false) => inode.nlink.saturating_sub(1),
        };
        let Some(disposal) = self.plan_disposal(&mut op, r.victim, nlink, r.orphans)? else {
            return Ok(Outcome::NeedsOrphanage);
        };
        let deletion = spot.remove(&mut op, Emptied::Goes)?;
        if deletion.is_blocked() {
            return Ok(Outcome::Blocked);
        }
        let now = self.times.after(shown);
        deletion.finish(&mut op);
        self.count_names(&mut op, r.dir, (-1, -(r.directory as i32)), now);
        // One that goes at once has no state that would have times, or to note the change in.
        let stays = !matches!(disposal, Disposal::Delete);
        let mtime = stays.then(|| self.files.times_set(r.expected.nid, false, false));
        let change = links(nlink, now, mtime.flatten());
        let orphaned = self.dispose(&mut op, r.victim, disposal, change);
        op.commit_noting(|epoch| {
            if stays {
                self.files.changed(r.expected.nid, epoch);
            }
        });
        if orphaned {
            self.settle_orphan(r.expected.nid);
        }
        Ok(Outcome::Done)
    }

    /// A directory gains names and subdirectories at `now` (phase 2).
    pub(crate) fn count_names(
        &self,
        op: &mut Op<'_, FsNode>,
        dir: Slot,
        (names, subdirs): (i32, i32),
        mut now: Timestamp,
    ) {
        while !op.merge(dir, grown(names, subdirs, now)) {
            // Somebody looked meanwhile, and has not found the change (tally, invariant 5).
            let inode = op.peek(dir).inode();
            let shown = inode.as_ref().map_or(Stamp::NEVER, |inode| inode.shown());
            now = self.times.after(shown);
            if let Ok(inode) = inode
                && Stamp::from(now) <= shown
            {
                inode.forget_beyond(shown, now);
            }
        }
    }

    /// Renews the access time of something that was read, if that is due. What is read is read, whether that can be noted or not.
    ///
    /// # Errors
    /// It is not there any more, or cannot be read.
    pub(crate) fn touch_atime(&self, ino: Ino) -> Result<(), Error> {
        let policy = self.files.options().atime;
        let now = self.times.now();
        let due = |inode: &Inode| atime_due(policy, inode, now);
        // On an array that is too full for it, it is not worth a look for room.
        if self.store.read_only() || !due(self.inode(ino)?.inode()?) || !self.store.may_accept(0) {
            return Ok(());
        }
        let node = self.node(ino)?;
        let began = self.store.begin(Need::Change);
        let locked = began.and_then(|mut op| op.lock(&node).map(|slot| (op, slot)));
        let (mut op, slot) = match locked {
            Ok(locked) => locked,
            Err(error @ engine::Error::Gone(_)) => return Err(error.into()),
            Err(error) => {
                tracing::debug!("the access time of inode {ino} stays: {error}");
                return Ok(());
            }
        };
        if due(op.peek(slot).inode()?) {
            let change = AttrChange {
                atime: Some(now),
                ..AttrChange::default()
            };
            op.apply(slot, Delta::Attrs(change));
        }
        op.commit();
        Ok(())
    }
}

/// Where others may come in between two steps of a call; in tests somebody does.
#[inline(always)]
pub(crate) fn between_steps() {
    #[cfg(test)]
    meanwhile::happen();
}

/// The same where it was told in which leaf a name is, and the directory is not locked yet.
#[inline(always)]
pub(crate) fn once_told() {
    #[cfg(test)]
    meanwhile::happen_once_told();
}

#[cfg(test)]
pub(crate) mod meanwhile {
    use std::cell::RefCell;

    thread_local! {
        static OTHERS: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
        static ONCE_TOLD: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    }

    /// What happens in calls of this thread from now on, but not in calls that it makes itself.
    pub fn others_do(what: impl FnMut() + 'static) {
        OTHERS.set(Some(Box::new(what)));
    }

    /// What happens in the next such call of this thread.
    pub fn others_do_once_told(what: impl FnOnce() + 'static) {
        ONCE_TOLD.set(Some(Box::new(what)));
    }

    pub fn nobody_does() {
        OTHERS.set(None);
    }

    pub(super) fn happen() {
        if let Some(mut what) = OTHERS.take() {
            what();
            OTHERS.set(Some(what));
        }
    }

    pub(super) fn happen_once_told() {
        if let Some(what) = ONCE_TOLD.take() {
            what();
        }
    }
}

/// What was made.
struct Made {
    attr: Attr,
    /// If it was to be opened.
    entered: Option<Entered>,
}

type Begun<'s> = Result<Op<'s, FsNode>, engine::Error>;

/// A removal whose inodes are locked.
struct Removal<'a> {
    dir: Slot,
    victim: Slot,
    orphans: Option<Slot>,
    name: Wanted<'a>,
    expected: &'a Link,
    seen: &'a Seen,
    directory: bool,
    /// See [`FoundBefore`].
    dir_before: Option<u64>,
}

/// What a removal is of, and nothing else that has the number or the name since.
#[derive(Clone, Copy)]
struct FoundBefore {
    /// The directory's generation.
    dir: u64,
    /// Number and generation.
    victim: (Ino, u64),
}

enum Outcome {
    Done,
    /// The name means something else now.
    Again,
    /// It takes the directory's exclusive lock.
    Blocked,
    NeedsOrphanage,
}

/// What became of a try to give an inode one more name.
enum Linked {
    Done(Box<Attr>),
    /// The inode lost its last name or got its first meanwhile.
    Again,
    /// It takes the directory's exclusive lock.
    Blocked,
}

/// A directory that can hold names: not a file, not removed.
pub(crate) fn live_dir(inode: &Inode) -> Result<&Inode, Error> {
    if !inode.is_dir() {
        return Err(Error::NotADirectory);
    }
    if inode.nlink == 0 {
        return Err(Error::NotFound);
    }
    Ok(inode)
}

/// A directory's change when it gains `names` names and `subdirs` subdirectories.
fn grown(names: i32, subdirs: i32, time: Timestamp) -> Delta {
    Delta::Tally(Tally {
        names,
        subdirs,
        time,
    })
}

/// An inode's change when its link count becomes `nlink`; `mtime` is one to be carried.
pub(crate) fn links(nlink: u32, now: Timestamp, mtime: Option<Timestamp>) -> Delta {
    Delta::Attrs(AttrChange {
        nlink: Some(nlink),
        mtime,
        ctime: Some(now),
        ..AttrChange::default()
    })
}

/// Whether reading the inode now must renew its access time.
fn atime_due(policy: AtimePolicy, inode: &Inode, now: Timestamp) -> bool {
    match policy {
        AtimePolicy::Never => false,
        AtimePolicy::Always => inode.atime < now,
        AtimePolicy::Relative => {
            let changed = match inode.is_dir() {
                true => inode.counts().mtime.max(inode.counts().ctime),
                false => inode.mtime.max(inode.ctime),
            };
            inode.atime <= changed || now.sec().saturating_sub(inode.atime.sec()) >= ATIME_AGE
        }
    }
}

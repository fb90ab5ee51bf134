//! A transaction's steps on the real nodes, within one operation that holds all inodes exclusively and can be undone.

use super::commit::{gone, looks_again};
use super::names::Target;
use super::{Gets, Staged, Step, Transaction, changed};
use crate::acl::{ACCESS, DEFAULT};
use crate::api::{Ino, SetAttr};
use crate::content::{AttrChange, Delta, FsNode, Inode};
use crate::data::transact::{Intended, LockedFile, Written};
use crate::dir::{self, Target as Named};
use crate::filesystem::{FileSystem, LINK_MAX};
use crate::list::Emptied;
use crate::namespace::{Draft, links, live_dir};
use crate::rename::{check_replaceable, retarget};
use crate::times::Stamp;
use crate::xattr::NAMES_MAX;
use crate::{Caller, Error};
use base::canary::{Canary, planted};
use base::clock::Timestamp;
use base::map::{HashMap, HashSet};
use engine::{Node, Op, Slot};
use std::collections::BTreeMap;

/// What the operation is about.
pub(super) struct Concerned<'a, 'fs> {
    pub nodes: &'a [(Ino, Node<FsNode>)],
    pub locked: &'a [LockedFile<'a>],
    pub files: &'a [(Ino, Intended)],
    pub written: &'a Written<'fs>,
}

/// What was carried out.
#[derive(Default)]
pub(super) struct Carried {
    slots: HashMap<Ino, Slot>,
    pub made: Vec<Ino>,
    /// Deleted with their last name.
    pub deleted: HashSet<Ino>,
    /// Not deleted, as they are in use or large.
    pub orphans: Vec<Ino>,
    /// Inodes that were there before and have changed, and whether their access and modification times were set.
    pub changed: BTreeMap<Ino, (bool, bool)>,
}

impl Carried {
    fn slot(&self, ino: Ino) -> Result<Slot, Error> {
        let slot = self.slots.get(&ino).copied();
        slot.ok_or_else(|| gone(Error::Stale(ino)))
    }

    /// The same of an inode that has a name still, as the transaction knows it to have. It may have lost others to somebody else, and by an
    /// earlier step the last one.
    fn named(&self, op: &Op<'_, FsNode>, ino: Ino) -> Result<Slot, Error> {
        let slot = self.slot(ino)?;
        match !self.deleted.contains(&ino) && op.peek(slot).inode()?.nlink > 0 {
            true => Ok(slot),
            false => Err(gone(Error::Stale(ino))),
        }
    }

    fn note(&mut self, ino: Ino, times: (bool, bool)) {
        let changed = self.changed.entry(ino).or_default();
        *changed = (changed.0 || times.0, changed.1 || times.1);
    }
}

/// Which inode, in which directory, under which name.
struct Place<'a> {
    dir: Ino,
    name: &'a [u8],
}

impl<'fs> Transaction<'fs> {
    /// Looks again, then carries out all steps and changes all content. What fails is undone with the operation.
    pub(super) fn carry_out(
        &self,
        op: &mut Op<'fs, FsNode>,
        concerned: &Concerned<'_, 'fs>,
    ) -> Result<Carried, Error> {
        let mut carried = Carried::default();
        let nodes: Vec<&Node<FsNode>> = concerned.nodes.iter().map(|(_, node)| node).collect();
        let slots = op.lock_sorted(&nodes).map_err(|error| gone(error.into()))?;
        for ((ino, _), slot) in concerned.nodes.iter().zip(slots.iter()) {
            carried.slots.insert(*ino, *slot);
        }
        self.look_again(op, &carried)?;
        let now = self.time(op, &carried, concerned)?;
        for step in &self.steps {
            self.carry_out_step(op, &mut carried, step, now)
                .map_err(|error| lost(step, error))?;
            if op.is_excessive() {
                return Err(Error::TransactionTooLarge);
            }
        }
        self.change_contents(op, &mut carried, concerned, now)?;
        Ok(carried)
    }

    /// Whether all means what it meant.
    fn look_again(&self, op: &mut Op<'fs, FsNode>, carried: &Carried) -> Result<(), Error> {
        for (ino, staged) in &self.inodes {
            if staged.fresh.is_some() {
                continue;
            }
            let inode = op.peek(carried.slot(*ino)?).inode()?;
            let there = inode.generation == staged.generation && inode.nlink > 0;
            if !there {
                return Err(gone(Error::Stale(*ino)));
            }
            let newest = || self.fs.attr_of(*ino, inode).ctime;
            let is_other = |seen| seen != newest() || planted(Canary::ReadersConflict);
            if staged.looked.is_some_and(is_other) && looks_again() {
                return Err(changed(*ino));
            }
            if !staged.xattrs.is_empty() && !self.can_list_xattrs(inode, staged)? {
                return Err(changed(*ino));
            }
        }
        for (dir, names) in &self.names {
            if self.inodes[dir].fresh.is_some() {
                continue;
            }
            let slot = carried.slot(*dir)?;
            live_dir(op.peek(slot).inode()?).map_err(gone)?;
            for (name, entry) in names {
                let spot = dir::spot(op, slot, self.fs.wanted(name)?)?;
                let found = spot.found.as_ref().map(Target::from);
                if found != entry.before && looks_again() {
                    let name = String::from_utf8_lossy(name);
                    let what = format!("the name {name:?} in directory {dir} means something else");
                    return Err(Error::Conflict(what));
                }
            }
        }
        Ok(())
    }

    /// The time of all changes: newer than any that the inodes were shown with.
    fn time(
        &self,
        op: &Op<'fs, FsNode>,
        carried: &Carried,
        concerned: &Concerned<'_, 'fs>,
    ) -> Result<Timestamp, Error> {
        let mut shown = Stamp::NEVER;
        for slot in carried.slots.values() {
            shown = shown.max(op.peek(*slot).inode()?.shown());
        }
        for file in concerned.locked {
            shown = shown.max(self.fs.files.looked_at(file));
        }
        Ok(self.fs.times.after(shown))
    }

    fn carry_out_step(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        step: &Step,
        now: Timestamp,
    ) -> Result<(), Error> {
        match step {
            Step::Make {
                dir,
                name,
                ino,
                mode,
                rdev,
                body,
            } => {
                let draft = Draft {
                    mode: *mode,
                    rdev: *rdev,
                    body,
                };
                let place = Place { dir: *dir, name };
                self.make_in(op, carried, &place, *ino, &draft, now)
            }
            Step::Link { ino, dir, name } => {
                let place = Place { dir: *dir, name };
                let slot = carried.named(op, *ino)?;
                let inode = op.peek(slot).inode()?;
                if inode.nlink >= LINK_MAX {
                    return Err(Error::TooManyLinks);
                }
                let (target, nlink) = (Named::of(*ino, inode), inode.nlink + 1);
                self.put_name(op, carried, &place, target, now)?;
                op.apply(slot, links(nlink, now, None));
                carried.note(*ino, (false, false));
                Ok(())
            }
            Step::Remove {
                dir,
                name,
                victim,
                directory,
            } => {
                let place = Place { dir: *dir, name };
                let inode = op.peek(carried.slot(*victim)?).inode()?;
                if *directory && inode.names() > 0 {
                    return Err(Error::NotEmpty);
                }
                self.take_name(op, carried, &place, *victim, *directory, now)?;
                self.lose_name(op, carried, *victim, now)
            }
            Step::Rename {
                from,
                to,
                source,
                target,
                exchange,
            } => {
                let from = Place {
                    dir: from.0,
                    name: &from.1,
                };
                let to = Place {
                    dir: to.0,
                    name: &to.1,
                };
                match (target, exchange) {
                    (Some(target), true) => {
                        self.exchange(op, carried, (&from, *source), (&to, *target), now)
                    }
                    _ => self.move_name(op, carried, (&from, *source), (&to, *target), now),
                }
            }
            Step::SetAttr(ino, set) => self.set_attributes(op, carried, *ino, set, now),
            Step::SetXattr { ino, name, value } => {
                let slot = carried.named(op, *ino)?;
                let plan = self.fs.plan_set(op, slot, name, value, 0)?;
                plan.finish(op);
                self.touch(op, carried, *ino, now)
            }
            Step::RemoveXattr(ino, name) => {
                let slot = carried.named(op, *ino)?;
                let plan = self.fs.plan_unset(op, slot, name)?;
                plan.finish(op);
                self.touch(op, carried, *ino, now)
            }
        }
    }

    fn make_in(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        place: &Place<'_>,
        ino: Ino,
        draft: &Draft<'_>,
        now: Timestamp,
    ) -> Result<(), Error> {
        let (fs, parent) = (self.fs, carried.slot(place.dir)?);
        let default = fs.attribute_in(op, parent, DEFAULT)?;
        let above = live_dir(op.peek(parent).inode()?)?;
        let staged = self.inodes.get(&ino).ok_or(Error::Stale(ino))?;
        let fresh = staged.fresh.as_ref().ok_or(Error::Stale(ino))?;
        let who: &Caller = &self.who;
        let (mut inode, attributes) = fs.draft_with(who, above, draft, fresh.version(), default)?;
        if staged.has_looked && staged.gets != Gets::new(&inode, &attributes) && looks_again() {
            let dir = place.dir;
            let what = format!("new inode {ino} gets something else from directory {dir}");
            return Err(Error::Conflict(what));
        }
        if inode.is_dir() {
            inode.parent = place.dir;
        }
        (inode.atime, inode.mtime, inode.ctime, inode.btime) = (now, now, now, now);
        let target = Named::of(ino, &inode);
        attributes.plan(&fs.store)?.finish(op, &mut inode);
        let slot = op.create_at(fresh, FsNode::Inode(inode))?;
        carried.slots.insert(ino, slot);
        carried.made.push(ino);
        self.put_name(op, carried, place, target, now)
    }

    fn put_name(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        place: &Place<'_>,
        target: Named,
        now: Timestamp,
    ) -> Result<(), Error> {
        let slot = carried.slot(place.dir)?;
        let spot = dir::spot(op, slot, self.fs.wanted(place.name)?)?;
        if spot.found.is_some() {
            return Err(Error::Exists);
        }
        let is_dir = target.kind == libc::DT_DIR;
        if is_dir && !op.peek(slot).inode()?.takes_subdir() {
            return Err(Error::TooManyLinks);
        }
        dir::insert(op, spot, place.name, target)?.finish(op);
        let subdirs = is_dir as i32;
        self.fs.count_names(op, slot, (1, subdirs), now);
        Ok(())
    }

    fn take_name(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        place: &Place<'_>,
        ino: Ino,
        directory: bool,
        now: Timestamp,
    ) -> Result<(), Error> {
        let slot = carried.slot(place.dir)?;
        let spot = dir::spot(op, slot, self.fs.wanted(place.name)?)?;
        match &spot.found {
            Some(found) if found.nid == ino => {}
            _ => return Err(Error::NotFound),
        }
        spot.remove(op, Emptied::Goes)?.finish(op);
        self.fs
            .count_names(op, slot, (-1, -(directory as i32)), now);
        Ok(())
    }

    /// An inode has lost a name.
    fn lose_name(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        ino: Ino,
        now: Timestamp,
    ) -> Result<(), Error> {
        let slot = carried.slot(ino)?;
        let inode = op.peek(slot).inode()?;
        let nlink = match inode.is_dir() {
            true => 0,
            false => inode.nlink.saturating_sub(1),
        };
        let orphanage = self.fs.orphan_node(ino)?;
        let orphans = op.slot_of(orphanage.nid());
        let disposal = self.fs.plan_disposal(op, slot, nlink, orphans)?;
        let disposal = disposal.ok_or(Error::Busy)?;
        let deletes = matches!(disposal, crate::orphan::Disposal::Delete);
        if FileSystem::dispose_of(op, slot, disposal, links(nlink, now, None)) {
            carried.orphans.push(ino);
        }
        if deletes {
            carried.deleted.insert(ino);
        }
        carried.note(ino, (false, false));
        Ok(())
    }

    fn move_name(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        (from, source): (&Place<'_>, Ino),
        (to, target): (&Place<'_>, Option<Ino>),
        now: Timestamp,
    ) -> Result<(), Error> {
        let slot = carried.slot(source)?;
        let inode = op.peek(slot).inode()?;
        let (named, is_dir) = (Named::of(source, inode), inode.is_dir());
        if let Some(victim) = target {
            let other = op.peek(carried.slot(victim)?).inode()?;
            check_replaceable(inode, other)?;
            self.take_name(op, carried, to, victim, is_dir, now)?;
            self.lose_name(op, carried, victim, now)?;
        }
        self.take_name(op, carried, from, source, is_dir, now)?;
        self.put_name(op, carried, to, named, now)?;
        let parent = (is_dir && from.dir != to.dir).then_some(to.dir);
        self.moved(op, carried, source, parent, now)
    }

    fn exchange(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        (from, source): (&Place<'_>, Ino),
        (to, target): (&Place<'_>, Ino),
        now: Timestamp,
    ) -> Result<(), Error> {
        let fs = self.fs;
        let of = |ino: Ino| -> Result<(Named, bool), Error> {
            let inode = op.peek(carried.slot(ino)?).inode()?;
            Ok((Named::of(ino, inode), inode.is_dir()))
        };
        let ((first, up), (second, down)) = (of(source)?, of(target)?);
        for (place, old, new) in [(from, first, second), (to, second, first)] {
            let spot = dir::spot(op, carried.slot(place.dir)?, fs.wanted(place.name)?)?;
            match &spot.found {
                Some(found) if found.nid == old.ino => {
                    let key = found.key;
                    retarget(op, (spot.slot(), key, new));
                }
                _ => return Err(Error::NotFound),
            }
        }
        let (up_count, down_count) = (up as i32, down as i32);
        let crosses = from.dir != to.dir;
        let gained = match crosses {
            true => down_count - up_count,
            false => 0,
        };
        for (dir, gained) in [(from.dir, gained), (to.dir, -gained)] {
            let slot = carried.slot(dir)?;
            if gained > 0 && !op.peek(slot).inode()?.takes_subdir() {
                return Err(Error::TooManyLinks);
            }
            fs.count_names(op, slot, (0, gained), now);
        }
        let parent = |is_dir: bool, dir| (is_dir && crosses).then_some(dir);
        self.moved(op, carried, source, parent(up, to.dir), now)?;
        self.moved(op, carried, target, parent(down, from.dir), now)
    }

    fn moved(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        ino: Ino,
        parent: Option<Ino>,
        now: Timestamp,
    ) -> Result<(), Error> {
        let change = AttrChange {
            parent,
            ctime: Some(now),
            ..AttrChange::default()
        };
        op.apply(carried.slot(ino)?, Delta::Attrs(change));
        carried.note(ino, (false, false));
        Ok(())
    }

    fn touch(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        ino: Ino,
        now: Timestamp,
    ) -> Result<(), Error> {
        self.moved(op, carried, ino, None, now)
    }

    fn set_attributes(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        ino: Ino,
        set: &SetAttr,
        now: Timestamp,
    ) -> Result<(), Error> {
        let slot = carried.named(op, ino)?;
        if self.fs.loses_capabilities(op, slot, set)? {
            self.fs.take_capabilities(op, slot)?;
        }
        let change = self.fs.change_lists(op, slot, (&self.who, set), now)?;
        op.apply(slot, Delta::Attrs(change));
        carried.note(ino, (set.atime.is_some(), set.mtime.is_some()));
        Ok(())
    }

    /// Whether the names of an inode's attributes stay fewer than can be listed, as it is now: the tree that the model refers to may be gone. The commit looks again.
    pub(super) fn can_list_now(&self, ino: Ino, staged: &Staged<'_>) -> Result<bool, Error> {
        if staged.fresh.is_some() {
            return self.can_list_xattrs(&staged.model, staged);
        }
        let node = self.fs.inode(ino).map_err(gone)?;
        let inode = node.inode()?;
        match inode.generation == staged.generation {
            true => self.can_list_xattrs(inode, staged),
            false => Err(gone(Error::Stale(ino))),
        }
    }

    /// Whether the names of an inode's attributes stay fewer than can be listed. Before the first step: later the operation may have locked what they are in.
    pub(super) fn can_list_xattrs(
        &self,
        inode: &Inode,
        staged: &Staged<'_>,
    ) -> Result<bool, Error> {
        let names = match inode.seldom.xattr_root {
            None => Vec::new(),
            Some(_) => self.fs.attribute_names(inode)?,
        };
        let here = inode.seldom.xattrs.iter().map(|attribute| &*attribute.name);
        let kept = names
            .split(|byte| *byte == 0)
            .filter(|name| !name.is_empty());
        // What it may get from its directory, whether it does as that is now or not.
        let inherited: &[&[u8]] = match staged.fresh {
            Some(_) => &[ACCESS, DEFAULT],
            None => &[],
        };
        let kept = here
            .chain(kept)
            .filter(|name| !staged.xattrs.contains_key(*name) && !inherited.contains(name));
        let set = staged.xattrs.iter().filter(|(_, value)| value.is_some());
        let inherited = inherited.iter().copied();
        let all = kept.chain(set.map(|(name, _)| &**name)).chain(inherited);
        Ok(all.map(|name| name.len() + 1).sum::<usize>() <= NAMES_MAX)
    }

    fn change_contents(
        &self,
        op: &mut Op<'fs, FsNode>,
        carried: &mut Carried,
        concerned: &Concerned<'_, 'fs>,
        now: Timestamp,
    ) -> Result<(), Error> {
        for (file, reservation) in &concerned.written.reservations {
            if !carried.deleted.contains(&concerned.files[*file].0) {
                op.take_at(reservation)?;
            }
        }
        for (number, (ino, intended)) in concerned.files.iter().enumerate() {
            if carried.deleted.contains(ino) {
                continue;
            }
            let slot = carried.slot(*ino)?;
            let staged = &self.inodes[ino];
            let mtime = staged.content.is_newer.then_some(now);
            let change = self.fs.files.change_content(op, slot, intended, mtime)?;
            let change = AttrChange {
                ctime: Some(now),
                ..change
            };
            op.apply(slot, Delta::Attrs(change));
            let new = concerned.written.new.iter();
            for (_, data) in new.filter(|(file, _)| *file == number) {
                op.vouch(slot, data.clone());
            }
            if staged.fresh.is_none() {
                carried.note(*ino, (false, mtime.is_some()));
            }
            if op.is_excessive() {
                return Err(Error::TransactionTooLarge);
            }
        }
        Ok(())
    }

    /// Times in memory give way to those that were set; what is not logged yet goes with the operation.
    pub(super) fn settle_times(&self, op: &mut Op<'fs, FsNode>, carried: &Carried) {
        for (ino, (atime, mtime)) in &carried.changed {
            if carried.deleted.contains(ino) {
                self.fs.files.times_gone(*ino);
                continue;
            }
            let kept = self.fs.files.times_set(*ino, *atime, *mtime);
            if let (Some(mtime), Some(slot)) = (kept, carried.slots.get(ino)) {
                let change = AttrChange {
                    mtime: Some(mtime),
                    ..AttrChange::default()
                };
                op.apply(*slot, Delta::Attrs(change));
            }
        }
    }
}

/// A step that fails though all means what it meant has met another change.
fn lost(step: &Step, error: Error) -> Error {
    match error {
        Error::Exists
        | Error::NotFound
        | Error::NotEmpty
        | Error::NotADirectory
        | Error::IsADirectory
        | Error::NoAttribute
        | Error::Stale(_) => Error::Conflict(format!("{error} in {}", step.name())),
        other => other,
    }
}

impl Step {
    fn name(&self) -> String {
        let of = |what: &str, name: &[u8]| format!("{what} {:?}", String::from_utf8_lossy(name));
        match self {
            Step::Make { name, .. } => of("making", name),
            Step::Link { name, .. } => of("linking", name),
            Step::Remove { name, .. } => of("removing", name),
            Step::Rename { from, .. } => of("renaming", &from.1),
            Step::SetAttr(ino, _) => format!("setting attributes of inode {ino}"),
            Step::SetXattr { name, .. } | Step::RemoveXattr(_, name) => of("setting", name),
        }
    }
}

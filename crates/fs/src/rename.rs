//! Rename: plain, replacing, without replacing, and exchanging.

use crate::Error;
use crate::api::{Caller, Ino};
use crate::content::{AttrChange, Delta, FsNode, Inode, Link, Name};
use crate::dir::{self, Target, Wanted, is_dot};
use crate::directory::At;
use crate::filesystem::{DIR_LINK_MAX, FileSystem};
use crate::list::{self, Addition, Deletion, Emptied, Pruned, Seen, Spot};
use crate::namespace::{Looks, between_steps, links, live_dir, once_told};
use crate::orphan::Disposal;
use crate::tree::Purpose;
use base::canary::{Canary, planted};
use base::clock::Timestamp;
use base::sync::MutexGuard;
use engine::{Mode, Need, Node, Op, Slot};

/// Fails when the new name exists.
pub const RENAME_NOREPLACE: u32 = libc::RENAME_NOREPLACE;
/// Both names exist, and change places.
pub const RENAME_EXCHANGE: u32 = libc::RENAME_EXCHANGE;

/// A rename as asked for.
#[derive(Clone, Copy)]
struct Request<'a> {
    from: Ino,
    name: Wanted<'a>,
    to: Ino,
    new_name: Wanted<'a>,
    exchange: bool,
}

/// What it was found to be about, to be checked again under the locks.
struct Found {
    source: Link,
    target: Option<Link>,
    old_seen: Seen,
    new_seen: Seen,
}

/// The inodes, locked.
#[derive(Clone, Copy)]
struct Slots {
    from: Slot,
    to: Slot,
    source: Slot,
    target: Option<Slot>,
    orphans: Option<Slot>,
}

enum Outcome {
    Done(Done),
    Again,
    /// It takes the directories' exclusive locks.
    Blocked,
    NeedsOrphanage,
}

/// What is left to do after a rename.
struct Done {
    /// The inode that lost its last name and is an orphan now.
    orphan: Option<Ino>,
    /// The leaf that had the old name is empty.
    emptied: bool,
}

/// What a try to rename brings along from those before it.
#[derive(Clone, Copy)]
struct Try {
    /// How the directories are locked.
    mode: Mode,
    orphanage: bool,
}

impl Request<'_> {
    fn crosses(&self) -> bool {
        self.from != self.to
    }

    /// Of the place that loses a name.
    fn emptied(&self) -> Emptied {
        match self.crosses() {
            true => Emptied::GoesAlone,
            false => Emptied::Stays,
        }
    }
}

impl FileSystem {
    /// Renames in one atomic step; `flags`: [`RENAME_NOREPLACE`] or [`RENAME_EXCHANGE`].
    /// A file that takes the place of another is written back first, both where they change places, so that no crash shows
    /// a name with less than the old content or the new one.
    pub fn rename<'d>(
        &self,
        _who: &Caller,
        parent: impl Into<At<'d>>,
        name: &[u8],
        new_parent: impl Into<At<'d>>,
        new_name: &[u8],
        flags: u32,
    ) -> Result<(), Error> {
        let exchange = flags & RENAME_EXCHANGE != 0;
        let keep = flags & RENAME_NOREPLACE != 0;
        if flags & !(RENAME_EXCHANGE | RENAME_NOREPLACE) != 0 || (exchange && keep) {
            return Err(Error::Invalid("unknown rename flags"));
        }
        check_dots(name, new_name, keep)?;
        let (name, new_name) = (self.wanted(name)?, self.wanted(new_name)?);
        let (parent, new_parent) = (parent.into(), new_parent.into());
        let request = Request {
            from: parent.ino(),
            name,
            to: new_parent.ino(),
            new_name,
            exchange,
        };
        let mut this = Try {
            mode: Mode::Merging,
            orphanage: false,
        };
        let mut looks = Looks::default();
        loop {
            let from = self.dir_node(parent)?;
            // A handle is looked at even so: it may be another file system's.
            let other = match request.crosses() || new_parent.number().is_none() {
                true => Some(self.dir_node(new_parent)?),
                false => None,
            };
            let to = other.as_deref().unwrap_or(&from);
            // What comes from memory for the two comes at once.
            let [old, new] = match &other {
                None => dir::look_ahead(&self.store, &from, [name, new_name]),
                Some(to) => {
                    let [old] = dir::look_ahead(&self.store, &from, [name]);
                    let [new] = dir::look_ahead(&self.store, to, [new_name]);
                    [old, new]
                }
            };
            let both = [&old, &new].into_iter().flatten();
            both.for_each(|ahead| _ = ahead.ask(&self.store, Purpose::Change));
            once_told();
            let (source, old_seen) = self.look_in(&from, name, old)?;
            let source = source.ok_or(Error::NotFound)?;
            let (target, new_seen) = self.look_in(to, new_name, new)?;
            if looks.are_over((source, target)) {
                break;
            }
            match &target {
                None if exchange => return Err(Error::NotFound),
                Some(_) if keep => return Err(Error::Exists),
                _ => {}
            }
            let found = Found {
                source,
                target,
                old_seen,
                new_seen,
            };
            if target.is_some_and(|target| target.nid == source.nid) {
                // Two names of one file: POSIX wants nothing to happen. Or one name became the other between the two looks, or the number another file's.
                match self.are_one(&request, &found, (&from, to))? {
                    true => return Ok(()),
                    false => continue,
                }
            }
            between_steps();
            match self.try_rename(&request, &found, (&from, to), this)? {
                Outcome::Done(done) => {
                    if let Some(ino) = done.orphan {
                        self.settle_orphan(ino);
                    }
                    if done.emptied
                        && let Err(error) = self.prune(&from, request.name.first)
                    {
                        tracing::debug!("directory {} keeps an empty leaf: {error}", request.from);
                    }
                    return Ok(());
                }
                Outcome::Again => {}
                Outcome::Blocked => this.mode = Mode::Exclusive,
                Outcome::NeedsOrphanage => this.orphanage = true,
            }
        }
        // Others rename faster than this looks, or the name refers to nothing.
        self.lookup(parent, name.text)?;
        Err(Error::Busy)
    }

    fn try_rename(
        &self,
        request: &Request<'_>,
        found: &Found,
        (from, to): (&Node<FsNode>, &Node<FsNode>),
        this: Try,
    ) -> Result<Outcome, Error> {
        // It may take long, and others that move directories wait for the lock that is taken next.
        if !self.write_back_moved(request, found)? {
            return Ok(Outcome::Again);
        }
        let directory = |name: &Link| name.kind == libc::DT_DIR;
        let moves_up = directory(&found.source);
        let moves_down = request.exchange && found.target.as_ref().is_some_and(directory);
        let guard = match request.crosses() && (moves_up || moves_down) {
            true => match self.check_ancestry(request, found, (from, to))? {
                None => return Ok(Outcome::Again),
                guard => guard,
            },
            false => None,
        };
        let _held = guard.filter(|_| !planted(Canary::RenameUnlocked));
        let named = |name: &Link| match self.named_node(name.nid) {
            Ok(node) => Ok(Some(node)),
            Err(engine::Error::Gone(_)) => Ok(None),
            Err(error) => Err(error),
        };
        let Some(source) = named(&found.source)? else {
            return Ok(Outcome::Again);
        };
        let target = match &found.target {
            Some(name) => match named(name)? {
                Some(node) => Some(node),
                None => return Ok(Outcome::Again),
            },
            None => None,
        };
        let replaced = found.target.as_ref().filter(|_| !request.exchange);
        let mut orphaned = this.orphanage;
        let mut orphans = None;
        if let (Some(target), Some(node)) = (replaced, &target) {
            match node.read() {
                Ok(node) => orphaned |= self.needs_orphanage(target.nid, node.inode()?),
                Err(engine::Error::Gone(_)) => return Ok(Outcome::Again),
                Err(error) => return Err(error.into()),
            }
            if orphaned {
                orphans = Some(self.orphan_node(target.nid)?);
            }
        }
        let need = if found.target.is_some() {
            Need::Reclaim
        } else {
            Need::Grow
        };
        let mut op = self.store.begin(need)?;
        // A place that stays empty has the source's node: one that is given twice is locked once.
        let nodes = [
            (from, this.mode),
            (to, this.mode),
            (&source, Mode::Exclusive),
            (target.as_ref().unwrap_or(&source), Mode::Exclusive),
            (orphans.as_ref().unwrap_or(&source), Mode::Exclusive),
        ];
        let count = match (&target, &orphans) {
            (None, _) => 3,
            (Some(_), None) => 4,
            (Some(_), Some(_)) => 5,
        };
        let slots = match op.lock_sorted_as(&nodes[..count]) {
            Ok(slots) => slots,
            Err(engine::Error::Gone(nid)) if nid != request.from && nid != request.to => {
                return Ok(Outcome::Again);
            }
            Err(error) => return Err(error.into()),
        };
        let slots = Slots {
            from: slots[0],
            to: slots[1],
            source: slots[2],
            target: found.target.as_ref().map(|_| slots[3]),
            orphans: slots.get(4).copied(),
        };
        self.rename_locked(op, request, found, slots)
    }

    /// Writes back what takes another's place: a file must have its content before it has a name under which a crash may leave another's. False: one
    /// is gone.
    fn write_back_moved(&self, request: &Request<'_>, found: &Found) -> Result<bool, Error> {
        let Some(target) = &found.target else {
            return Ok(true);
        };
        if planted(Canary::ReplaceBeforeData) {
            return Ok(true);
        }
        let both = request.exchange && !planted(Canary::ExchangeBeforeData);
        let moved = [Some(&found.source), both.then_some(target)];
        let files = moved.into_iter().flatten();
        for file in files.filter(|name| name.kind == libc::DT_REG) {
            match self.files.write_back(file.nid) {
                Err(Error::Stale(_)) => return Ok(false),
                other => other?,
            }
        }
        Ok(true)
    }

    /// Whether both names refer to one inode at one moment.
    fn are_one(
        &self,
        request: &Request<'_>,
        found: &Found,
        (from, to): (&Node<FsNode>, &Node<FsNode>),
    ) -> Result<bool, Error> {
        let mut op = self.store.begin(Need::Reclaim)?;
        let slots = op.lock_sorted_as(&[(from, Mode::Merging), (to, Mode::Merging)])?;
        live_dir(op.peek(slots[0]).inode()?)?;
        live_dir(op.peek(slots[1]).inode()?)?;
        let (old, new) = self.rename_spots(&mut op, request, found, (slots[0], slots[1]))?;
        let source = &found.source;
        let there = old.found.as_ref() == Some(source) && new.found == found.target;
        Ok(there
            && new
                .found
                .is_some_and(|to| to.generation == source.generation))
    }

    /// Takes the rename lock and checks that no directory would end up inside itself (R13). `None`: a name refers to something
    /// else by now.
    fn check_ancestry(
        &self,
        request: &Request<'_>,
        found: &Found,
        dirs: (&Node<FsNode>, &Node<FsNode>),
    ) -> Result<Option<MutexGuard<'_, ()>>, Error> {
        let guard = self.renames.lock();
        if planted(Canary::AncestryUnchecked) {
            return Ok(Some(guard));
        }
        let Some(refusal) = self.refusal(request, found)? else {
            return Ok(Some(guard));
        };
        // They were looked up before the lock was waited for, and what they referred to then may have moved there since.
        match self.are_still(request, found, dirs)? {
            true => Err(refusal),
            false => Ok(None),
        }
    }

    /// Why the directories that were found cannot move to where they shall be.
    fn refusal(&self, request: &Request<'_>, found: &Found) -> Result<Option<Error>, Error> {
        let inside = Error::Invalid("a directory cannot move into itself");
        if found.source.kind == libc::DT_DIR && self.is_above(found.source.nid, request.to)? {
            return Ok(Some(inside));
        }
        if let Some(target) = &found.target
            && target.kind == libc::DT_DIR
            && self.is_above(target.nid, request.from)?
        {
            return Ok(Some(match request.exchange {
                true => inside,
                false => Error::NotEmpty,
            }));
        }
        Ok(None)
    }

    /// Whether both names refer to what was found.
    fn are_still(
        &self,
        request: &Request<'_>,
        found: &Found,
        (from, to): (&Node<FsNode>, &Node<FsNode>),
    ) -> Result<bool, Error> {
        let (source, _) = self.look_in(from, request.name, None)?;
        let (target, _) = self.look_in(to, request.new_name, None)?;
        Ok(source.as_ref() == Some(&found.source) && target == found.target)
    }

    fn rename_locked(
        &self,
        mut op: Op<'_, FsNode>,
        request: &Request<'_>,
        found: &Found,
        slots: Slots,
    ) -> Result<Outcome, Error> {
        let shown = live_dir(op.peek(slots.from).inode()?)?.shown();
        let shown = live_dir(op.peek(slots.to).inode()?)?.shown().max(shown);
        let (old, new) = self.rename_spots(&mut op, request, found, (slots.from, slots.to))?;
        let source = op.peek(slots.source).inode()?;
        let holds = old.found.as_ref() == Some(&found.source)
            && new.found == found.target
            && source.generation == found.source.generation;
        if !holds && !planted(Canary::NameNotRechecked) {
            return Ok(Outcome::Again);
        }
        let target = match slots.target {
            Some(slot) => Some(op.peek(slot).inode()?),
            None => None,
        };
        if let (Some(inode), Some(name)) = (target, &found.target)
            && inode.generation != name.generation
        {
            return Ok(Outcome::Again);
        }
        if let (Some(target), false) = (target, request.exchange) {
            check_replaceable(source, target)?;
        }
        let tally = Tally::count(request, source, target);
        tally.check(&op, slots, request)?;
        let shown = shown.max(source.shown());
        let now = self
            .times
            .after(target.map_or(shown, |target| target.shown().max(shown)));
        let names = (old, new);
        let Some(step) = self.plan_step(&mut op, request, found, slots, names)? else {
            return Ok(Outcome::NeedsOrphanage);
        };
        if step.is_blocked(&op) {
            return Ok(Outcome::Blocked);
        }
        let changed = [Some(slots.source), slots.target].map(|s| s.map(|s| op.nid(s)));
        let mtimes = changed.map(|ino| self.files.times_set(ino?, false, false));
        let left = step.left().filter(|_| !request.crosses());
        let orphan = self.carry_out(&mut op, step, now, mtimes[1]);
        let emptied = left.is_some_and(|slot| list::is_empty_leaf::<Name>(&op, slot));
        tally.apply(self, &mut op, slots, request, (now, mtimes));
        op.commit_noting(|epoch| {
            let changed = changed.into_iter().flatten();
            changed.for_each(|ino| self.files.changed(ino, epoch));
        });
        Ok(Outcome::Done(Done { orphan, emptied }))
    }

    /// Takes out the leaf for this key, which a rename within the directory has left empty, unless it has names again: in one
    /// operation a leaf cannot go beside the addition of the new name to the same list.
    fn prune(&self, dir: &Node<FsNode>, first: u64) -> Result<(), Error> {
        for mode in [Mode::Merging, Mode::Exclusive] {
            let mut op = self.store.begin(Need::Reclaim)?;
            let slot = op.lock_as(dir, mode)?;
            live_dir(op.peek(slot).inode()?)?;
            match list::spot::<Name>(&mut op, slot, first, |_| false)?.prune(&mut op)? {
                Pruned::Blocked => {}
                Pruned::Nothing => break,
                Pruned::Done => {
                    op.commit();
                    break;
                }
            }
        }
        Ok(())
    }

    /// Locks the places of both names, in the order that all follow who share the directories:
    /// by inode, then by key.
    fn rename_spots(
        &self,
        op: &mut Op<'_, FsNode>,
        request: &Request<'_>,
        found: &Found,
        (from_slot, to_slot): (Slot, Slot),
    ) -> Result<(Spot<Name>, Spot<Name>), Error> {
        let (from, to) = (
            (request.from, request.name.first),
            (request.to, request.new_name.first),
        );
        let old =
            |op: &mut Op<'_, FsNode>| dir::spot_seen(op, from_slot, request.name, &found.old_seen);
        let new = |op: &mut Op<'_, FsNode>| {
            dir::spot_seen(op, to_slot, request.new_name, &found.new_seen)
        };
        if from <= to {
            let old = old(op)?;
            return Ok((old, new(op)?));
        }
        let new = new(op)?;
        Ok((old(op)?, new))
    }

    /// Locks and reserves what the change of names takes (phase 1). `None`: it takes the orphan
    /// directory, which is not locked.
    fn plan_step<'s>(
        &self,
        op: &mut Op<'s, FsNode>,
        request: &Request<'_>,
        found: &Found,
        slots: Slots,
        (old, new): (Spot<Name>, Spot<Name>),
    ) -> Result<Option<Step<'s>>, Error> {
        let moved = Target::of(found.source.nid, op.peek(slots.source).inode()?);
        let step = match (slots.target, &found.target, &found.source) {
            (Some(victim), Some(name), first) if request.exchange => Step::Exchange {
                old: (
                    old.slot(),
                    first.key,
                    Target::of(name.nid, op.peek(victim).inode()?),
                ),
                new: (new.slot(), name.key, moved),
            },
            (Some(victim), Some(name), _) => {
                let nlink = match op.peek(victim).inode()? {
                    inode if inode.is_dir() => 0,
                    inode => inode.nlink.saturating_sub(1),
                };
                let Some(disposal) = self.plan_disposal(op, victim, nlink, slots.orphans)? else {
                    return Ok(None);
                };
                Step::Replace {
                    new: (new.slot(), name.key, moved),
                    old: old.remove(op, request.emptied())?,
                    victim,
                    disposal,
                    nlink,
                }
            }
            _ => {
                let addition = dir::insert(op, new, request.new_name.text, moved)?;
                let old = old.remove(op, request.emptied())?;
                Step::Move { old, addition }
            }
        };
        Ok(Some(step))
    }

    /// Changes the names (phase 2); returns an inode that became an orphan.
    /// `mtime`: what the record of a target must carry.
    fn carry_out(
        &self,
        op: &mut Op<'_, FsNode>,
        step: Step<'_>,
        now: Timestamp,
        mtime: Option<Timestamp>,
    ) -> Option<Ino> {
        match step {
            Step::Move { old, addition } => {
                // In this order an addition may share the directory; see `list`.
                old.finish(op);
                addition.finish(op);
            }
            Step::Exchange { old, new } => {
                retarget(op, old);
                retarget(op, new);
            }
            Step::Replace {
                new,
                old,
                victim,
                disposal,
                nlink,
            } => {
                retarget(op, new);
                old.finish(op);
                let ino = op.nid(victim);
                if self.dispose(op, victim, disposal, links(nlink, now, mtime)) {
                    return Some(ino);
                }
            }
        }
        None
    }
}

/// A name, by the node that holds it and its key, and what it will refer to.
pub(crate) type Retargeted = (Slot, u64, Target);

enum Step<'s> {
    Move {
        old: Deletion<Name>,
        addition: Addition<'s, Name>,
    },
    Exchange {
        old: Retargeted,
        new: Retargeted,
    },
    Replace {
        new: Retargeted,
        old: Deletion<Name>,
        victim: Slot,
        disposal: Disposal<'s>,
        nlink: u32,
    },
}

impl Step<'_> {
    /// The leaf that may be empty without the old name.
    fn left(&self) -> Option<Slot> {
        match self {
            Step::Move { old, .. } | Step::Replace { old, .. } => old.left(),
            Step::Exchange { .. } => None,
        }
    }

    fn is_blocked(&self, op: &Op<'_, FsNode>) -> bool {
        match self {
            Step::Move { old, addition } => old.is_blocked() || addition.is_blocked(op),
            Step::Exchange { .. } => false,
            Step::Replace { old, .. } => old.is_blocked(),
        }
    }
}

pub(crate) fn retarget(op: &mut Op<'_, FsNode>, (slot, key, target): Retargeted) {
    let delta = Delta::Retarget {
        key,
        nid: target.ino,
        generation: target.generation,
        kind: target.kind,
    };
    op.apply(slot, delta);
}

/// Neither name may be "." or "..": the old one is busy, whatever the flags; a new one exists for who must not replace it.
pub(crate) fn check_dots(name: &[u8], new_name: &[u8], keep: bool) -> Result<(), Error> {
    match (is_dot(name), is_dot(new_name)) {
        (false, false) => Ok(()),
        (false, true) if keep => Err(Error::Exists),
        _ => Err(Error::Busy),
    }
}

pub(crate) fn check_replaceable(source: &Inode, target: &Inode) -> Result<(), Error> {
    match (source.is_dir(), target.is_dir()) {
        (true, false) => Err(Error::NotADirectory),
        (false, true) => Err(Error::IsADirectory),
        (true, true) if target.names() > 0 => Err(Error::NotEmpty),
        _ => Ok(()),
    }
}

/// By how much the directories' counts change, and who gets another parent.
struct Tally {
    from_names: i32,
    from_dirs: i32,
    to_names: i32,
    to_dirs: i32,
    source_moves: bool,
    target_moves: bool,
}

impl Tally {
    fn count(request: &Request<'_>, source: &Inode, target: Option<&Inode>) -> Tally {
        let is_dir = |inode: Option<&Inode>| inode.is_some_and(Inode::is_dir);
        let up = source.is_dir() as i32;
        let down = is_dir(target) as i32;
        let crosses = request.crosses();
        if request.exchange {
            return Tally {
                from_names: 0,
                from_dirs: down - up,
                to_names: 0,
                to_dirs: up - down,
                source_moves: crosses && up == 1,
                target_moves: crosses && down == 1,
            };
        }
        Tally {
            from_names: -1,
            from_dirs: -up,
            to_names: target.is_none() as i32,
            to_dirs: up - down,
            source_moves: crosses && up == 1,
            target_moves: false,
        }
    }

    fn check(&self, op: &Op<'_, FsNode>, slots: Slots, request: &Request<'_>) -> Result<(), Error> {
        // One of them may gain a directory; by an exchange either.
        for (slot, dirs) in [(slots.from, self.from_dirs), (slots.to, self.to_dirs)] {
            let links = op.peek(slot).inode()?.dir_links();
            if request.crosses() && dirs > 0 && links >= DIR_LINK_MAX {
                return Err(Error::TooManyLinks);
            }
        }
        Ok(())
    }

    /// Changes the counts and times of the directories and of what moved (phase 2).
    fn apply(
        &self,
        fs: &FileSystem,
        op: &mut Op<'_, FsNode>,
        slots: Slots,
        request: &Request<'_>,
        (now, mtimes): (Timestamp, [Option<Timestamp>; 2]),
    ) {
        let mut count = |slot, names, dirs| fs.count_names(op, slot, (names, dirs), now);
        match request.crosses() {
            true => {
                count(slots.from, self.from_names, self.from_dirs);
                count(slots.to, self.to_names, self.to_dirs);
            }
            false => count(
                slots.from,
                self.from_names + self.to_names,
                self.from_dirs + self.to_dirs,
            ),
        }
        let mut moves = |slot, parent, mtime| {
            let change = AttrChange {
                parent,
                mtime,
                ctime: Some(now),
                ..AttrChange::default()
            };
            op.apply(slot, Delta::Attrs(change));
        };
        moves(
            slots.source,
            self.source_moves.then_some(request.to),
            mtimes[0],
        );
        if let (Some(slot), true) = (slots.target, request.exchange) {
            moves(slot, self.target_moves.then_some(request.from), mtimes[1]);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::api::ROOT;
    use crate::namespace::meanwhile::{nobody_does, others_do};
    use crate::{FsOptions, MkfsOptions};
    use base::clock::Clock;
    use device::Array;
    use device::sim::SimDevice;
    use format::geometry::{Geometry, GeometryOptions};
    use std::cell::Cell;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    const BYTES: u64 = 64 << 20;

    /// Has `a` and `b` in it removed at a step of moving directory `x` into `b`, and then what `then` does, whose answer is returned, too.
    fn move_while_both_go(
        step: u32,
        then: impl Fn(&FileSystem, Ino, Ino) -> bool + 'static,
    ) -> (Result<(), Error>, bool) {
        // What this thread's core gives back it gets again.
        base::thread::pin(base::thread::current_cpu()).unwrap();
        let (fs, who) = (file_system(), Caller::root());
        let above = fs.mkdir(&who, ROOT, b"a", 0o755).unwrap().ino;
        let below = fs.mkdir(&who, above, b"b", 0o755).unwrap().ino;
        let moved = fs.mkdir(&who, ROOT, b"x", 0o755).unwrap().ino;
        // The kernel knows where it moves to.
        fs.ref_inode(below);
        let (others, mut steps) = (Arc::clone(&fs), 0);
        let answer = Rc::new(Cell::new(false));
        let answers = Rc::clone(&answer);
        others_do(move || {
            steps += 1;
            if steps == step {
                others.rmdir(&who, above, b"b").unwrap();
                others.rmdir(&who, ROOT, b"a").unwrap();
                answers.set(then(&others, moved, above));
            }
        });
        let outcome = fs.rename(&who, ROOT, b"x", below, b"y", 0);
        nobody_does();
        fs.forget(below, 1);
        (outcome, answer.get())
    }

    /// It was told of whatever had the number of a directory above by then: that there is nothing, or a file, or that it would be inside itself.
    #[test]
    fn who_moves_a_directory_into_one_that_goes_finds_it_gone() {
        fn make(fs: &FileSystem, dir: Ino, kind: u32, wanted: Ino) -> bool {
            let make = |i: u32| {
                let (who, name) = (Caller::root(), format!("{i}"));
                match kind {
                    libc::S_IFDIR => fs.mkdir(&who, dir, name.as_bytes(), 0o755),
                    _ => fs.mknod(&who, dir, name.as_bytes(), kind, 0),
                }
            };
            (0..500).any(|i| make(i).unwrap().ino == wanted)
        }
        type Then = fn(&FileSystem, Ino, Ino) -> bool;
        let thens: [Then; 3] = [
            |_, _, _| true,
            |fs, _, above| make(fs, ROOT, libc::S_IFREG, above),
            |fs, moved, above| make(fs, moved, libc::S_IFDIR, above),
        ];
        for (i, then) in thens.into_iter().enumerate() {
            for step in 1..4 {
                let (outcome, got) = move_while_both_go(step, then);
                // While it is looked for above `b` nothing else gets its number.
                assert_eq!(got, i == 0 || step != 2, "{i}, step {step}");
                let is_right = matches!(outcome, Err(Error::NotFound));
                assert!(is_right, "{i}, step {step}: {outcome:?}");
            }
        }
    }

    /// What had the name when it was looked up had become another's.
    #[test]
    fn a_move_is_not_refused_for_what_had_the_name_before() {
        let (fs, who) = (file_system(), Caller::root());
        let above = fs.mkdir(&who, ROOT, b"a", 0o755).unwrap().ino;
        let below = fs.mkdir(&who, above, b"b", 0o755).unwrap().ino;
        let (others, mut done) = (Arc::clone(&fs), false);
        others_do(move || {
            if !std::mem::replace(&mut done, true) {
                others.rename(&who, ROOT, b"a", ROOT, b"c", 0).unwrap();
                others.mkdir(&who, ROOT, b"a", 0o755).unwrap();
            }
        });
        let moved = fs.rename(&who, ROOT, b"a", below, b"x", 0);
        nobody_does();
        moved.unwrap();
        assert!(fs.stat_at(ROOT, b"c/b/x").unwrap().is_dir());
        // Nor what is in its place.
        let (others, mut done) = (Arc::clone(&fs), false);
        others_do(move || {
            if !std::mem::replace(&mut done, true) {
                others.rename(&who, ROOT, b"c", ROOT, b"d", 0).unwrap();
            }
        });
        let moved = fs.rename(&who, below, b"x", ROOT, b"c", 0);
        nobody_does();
        moved.unwrap();
        for name in [&b"c"[..], b"d"] {
            assert!(fs.lookup(ROOT, name).unwrap().is_dir());
        }
        let refused = fs.rename(&who, ROOT, b"d", below, b"x", 0);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        fs.mkdir(&who, below, b"x", 0o755).unwrap();
        let refused = fs.rename(&who, below, b"x", ROOT, b"d", 0);
        assert!(matches!(refused, Err(Error::NotEmpty)), "{refused:?}");
    }

    /// Who went up took a million steps, and called a healthy tree that is deeper than that damaged.
    #[test]
    fn parents_that_form_a_cycle_are_found_soon() {
        let (fs, who) = (file_system(), Caller::root());
        let mut dirs = vec![ROOT];
        for _ in 0..10 {
            let above = dirs[dirs.len() - 1];
            dirs.push(fs.mkdir(&who, above, b"d", 0o755).unwrap().ino);
        }
        fs.mkdir(&who, ROOT, b"x", 0o755).unwrap();
        let node = fs.node(dirs[3]).unwrap();
        let mut op = fs.store.begin(Need::Reclaim).unwrap();
        let slot = op.lock(&node).unwrap();
        let parent = AttrChange {
            parent: Some(dirs[8]),
            ..AttrChange::default()
        };
        op.apply(slot, Delta::Attrs(parent));
        op.commit();
        let steps = Arc::new(AtomicU32::new(0));
        let taken = Arc::clone(&steps);
        others_do(move || {
            taken.fetch_add(1, Ordering::Relaxed);
        });
        let refused = fs.rename(&who, ROOT, b"x", dirs[10], b"x", 0);
        nobody_does();
        assert!(refused.as_ref().is_err_and(Error::is_damage), "{refused:?}");
        let steps = steps.load(Ordering::Relaxed);
        assert!(steps < 40, "{steps}");
    }

    pub(crate) fn file_system() -> Arc<FileSystem> {
        let devices = vec![SimDevice::new(BYTES, 1) as Arc<dyn device::BlockDevice>];
        let geometry = Geometry::plan(&[BYTES], GeometryOptions::default()).unwrap();
        let array = Array::create(devices, geometry, "test", [7; 16], [9; 16]).unwrap();
        let array = Arc::new(array);
        FileSystem::mkfs(&array, &MkfsOptions::default()).unwrap();
        array.write_labels().unwrap();
        FileSystem::open(array, FsOptions::default().without_threads(Clock::real())).unwrap()
    }

    /// A directory that has as many subdirectories as there can be, with a file in it, and another one with a folder in it.
    fn full_and_other() -> (Arc<FileSystem>, Ino, Ino) {
        let fs = file_system();
        let who = Caller::root();
        let [full, other] = [b"full", b"next"].map(|name| fs.mkdir(&who, ROOT, name, 0o755));
        let (full, other) = (full.unwrap().ino, other.unwrap().ino);
        fs.mknod(&who, full, b"file", libc::S_IFREG, 0).unwrap();
        fs.mkdir(&who, other, b"folder", 0o755).unwrap();
        let node = fs.node(full).unwrap();
        let mut op = fs.store.begin(Need::Reclaim).unwrap();
        let slot = op.lock(&node).unwrap();
        let links = AttrChange {
            nlink: Some(DIR_LINK_MAX),
            ..AttrChange::default()
        };
        op.apply(slot, Delta::Attrs(links));
        op.commit();
        (fs, full, other)
    }

    #[test]
    fn no_directory_gains_a_subdirectory_that_it_has_no_count_for() {
        let (fs, full, other) = full_and_other();
        let rename = |from: (Ino, &[u8]), to: (Ino, &[u8]), flags| {
            fs.rename(&Caller::root(), from.0, from.1, to.0, to.1, flags)
        };
        let (file, folder) = ((full, &b"file"[..]), (other, &b"folder"[..]));
        // Whichever side of an exchange it is.
        for refused in [
            rename(folder, (full, b"new"), 0),
            rename(folder, file, RENAME_EXCHANGE),
            rename(file, folder, RENAME_EXCHANGE),
        ] {
            assert!(matches!(refused, Err(Error::TooManyLinks)), "{refused:?}");
        }
        rename(file, (other, b"file"), 0).unwrap();
    }

    /// By a transaction the count went beyond what there is room for, and that was committed.
    #[test]
    fn nor_does_one_by_a_transaction() {
        let (fs, full, other) = full_and_other();
        type Names<'a> = &'a [((Ino, &'a [u8]), (Ino, &'a [u8]), u32)];
        let rename = |names: Names<'_>| {
            let mut tx = fs.transaction(&Caller::root()).unwrap();
            for (from, to, flags) in names {
                tx.rename(from.0, from.1, to.0, to.1, *flags)?;
            }
            tx.commit()
        };
        let (file, folder, new) = ((full, &b"file"[..]), (other, &b"folder"[..]), &b"new"[..]);
        for refused in [
            rename(&[(folder, (full, new), 0)]),
            rename(&[(folder, file, RENAME_EXCHANGE)]),
            rename(&[(file, folder, RENAME_EXCHANGE)]),
        ] {
            assert!(matches!(refused, Err(Error::TooManyLinks)), "{refused:?}");
        }
        rename(&[(file, (other, b"file"), 0)]).unwrap();
        // Within it, and in place of one that it has.
        let links = |nlink| {
            let node = fs.node(full).unwrap();
            let mut op = fs.store.begin(Need::Reclaim).unwrap();
            let slot = op.lock(&node).unwrap();
            let links = AttrChange {
                nlink: Some(nlink),
                ..AttrChange::default()
            };
            op.apply(slot, Delta::Attrs(links));
            op.commit();
        };
        links(DIR_LINK_MAX - 1);
        rename(&[(folder, (full, new), 0)]).unwrap();
        fs.mkdir(&Caller::root(), other, b"folder", 0o755).unwrap();
        rename(&[
            ((full, new), (full, b"newer"), 0),
            (folder, (full, b"newer"), 0),
        ])
        .unwrap();
        fs.close().unwrap();
    }

    /// With NOREPLACE it was told that the new name exists, whichever it was.
    #[test]
    fn an_old_name_that_is_a_dot_is_busy_and_a_new_one_exists() {
        let (fs, who) = (file_system(), Caller::root());
        fs.mkdir(&who, ROOT, b"a", 0o755).unwrap();
        let errno = |name: &[u8], new_name: &[u8], flags| {
            let mut tx = fs.transaction(&who).unwrap();
            let staged = tx.rename(ROOT, name, ROOT, new_name, flags).unwrap_err();
            let refused = fs.rename(&who, ROOT, name, ROOT, new_name, flags);
            let errno = refused.unwrap_err().errno();
            assert_eq!(errno, staged.errno());
            errno
        };
        for dot in [&b"."[..], b".."] {
            for flags in [0, RENAME_NOREPLACE, RENAME_EXCHANGE] {
                assert_eq!(errno(dot, b"b", flags), libc::EBUSY);
                assert_eq!(errno(dot, dot, flags), libc::EBUSY);
            }
            assert_eq!(errno(b"a", dot, 0), libc::EBUSY);
            assert_eq!(errno(b"a", dot, RENAME_EXCHANGE), libc::EBUSY);
            assert_eq!(errno(b"a", dot, RENAME_NOREPLACE), libc::EEXIST);
        }
    }
}

//! Many names of one directory in one call: made, looked at, unlinked.
//!
//! The names are taken in the order of their keys, up to [`TOGETHER`] in one operation, which is one record
//! for all of them. Invariants:
//!
//! 1. An operation shares the directory (R12) and locks its leaves in the order of their keys, and nothing of the
//!    tree but leaves: it splits none and takes the last name out of none. So it is never in the
//!    way of others who share the directory for longer than they are in each other's.
//! 2. What takes more than a change of leaves, an inode and the directory's count goes alone, by the call for one
//!    name: a name in a leaf that is full or would become empty, one with the key of another, what inherits
//!    attributes, a file with other names, in use, or large.
//! 3. Each name has one result, at its place among the names given. Each round settles one name at least.
//! 4. All rounds, and the calls for one name, are in the directory that the first one is in: it is referred to from before that.

use crate::Error;
use crate::api::{Attr, Caller};
use crate::content::{FsNode, Inode, Link, Name};
use crate::dir::{self, NameHash, Wanted, check_name, is_dot};
use crate::directory::{At, dir_of};
use crate::filesystem::FileSystem;
use crate::list::{self, Filling, Spot};
use crate::namespace::{Draft, between_steps, live_dir, once_told};
use crate::times::Stamp;
use crate::tree::{Ahead, FreshNid, Purpose};
use engine::{Mode, Need, Node, Op, Slot};
use format::dir::{ENTRY_MAX, NAME_MAX};
use format::inode::INODE_HEAD_MAX;
use format::journal::{ENTRY_HEAD_MAX, RECORD_MAX};
use std::collections::VecDeque;

/// Names that one operation handles, at most.
const TOGETHER: usize = 128;

/// Names that a directory has for each one given, from which on few of those share a leaf, so that one
/// operation for several costs more than one for each.
const APART: u64 = 16;

/// What a new name takes in a record: the creation of an inode without content, and the name.
const NAME_BYTES: usize = 2 * ENTRY_HEAD_MAX + INODE_HEAD_MAX + ENTRY_MAX + NAME_MAX;
// The rest is the directory's count and what an inode may begin with.
const _: () = assert!(TOGETHER * NAME_BYTES < RECORD_MAX / 2);

/// A name that was asked for.
struct Item<'n> {
    /// The lowest key that the name can have.
    key: u64,
    /// Its place among the names given.
    index: usize,
    name: &'n [u8],
}

impl<'n> Item<'n> {
    fn wanted(&self) -> Wanted<'n> {
        Wanted {
            text: self.name,
            first: self.key,
        }
    }
}

/// What an operation for many says of one of them.
enum Fate<T> {
    Done(Result<T, Error>),
    /// It needs an operation of its own.
    Alone,
    /// It waits for one that needs an operation of its own.
    Later,
}

/// The names of a call and what became of them.
struct Batch<'n, T> {
    /// In the order of their keys.
    left: VecDeque<Item<'n>>,
    results: Vec<Option<Result<T, Error>>>,
}

impl<'n, T> Batch<'n, T> {
    /// `check` refuses names without a look at the directory.
    fn new<N: AsRef<[u8]>>(
        hash: &NameHash,
        names: &'n [N],
        check: impl Fn(&[u8]) -> Result<(), Error>,
    ) -> Self {
        let mut results: Vec<_> = names.iter().map(|_| None).collect();
        let mut left = Vec::with_capacity(names.len());
        for (index, name) in names.iter().map(AsRef::as_ref).enumerate() {
            match check(name) {
                Ok(()) => left.push(Item {
                    key: hash.first_key(name),
                    index,
                    name,
                }),
                Err(error) => results[index] = Some(Err(error)),
            }
        }
        // Stable: of one name that is given twice the first comes first.
        left.sort_by_key(|item| item.key);
        Batch {
            left: left.into(),
            results,
        }
    }

    /// Handles all names: by `together`, and by `alone` where that says so.
    fn run(
        mut self,
        (fs, dir): (&FileSystem, At<'_>),
        together: impl Fn(&[Item<'n>]) -> Result<Vec<Fate<T>>, Error>,
        alone: impl Fn(&[u8]) -> Result<T, Error>,
    ) -> Vec<Result<T, Error>> {
        // Invariant 4.
        let _stay = match fs.stay_in(dir) {
            Ok(stay) => Some(stay),
            Err(error) => {
                self.give_up(&error);
                None
            }
        };
        while !self.left.is_empty() {
            between_steps();
            let round: Vec<Item<'n>> = self.left.drain(..TOGETHER.min(self.left.len())).collect();
            let fates = match together(&round) {
                Ok(fates) => fates,
                // Of which name it is the damage shows when each is tried.
                Err(Error::Damaged { .. } | Error::Damage(_)) => {
                    let mut fates: Vec<_> = round.iter().map(|_| Fate::Later).collect();
                    fates[0] = Fate::Alone;
                    fates
                }
                Err(error) => {
                    self.left.extend(round);
                    self.give_up(&error);
                    break;
                }
            };
            let mut later = Vec::new();
            let mut fatal = None;
            for (item, fate) in round.into_iter().zip(fates) {
                let result = match fate {
                    Fate::Done(result) => result,
                    Fate::Alone if fatal.is_none() => alone(item.name),
                    Fate::Alone | Fate::Later => {
                        later.push(item);
                        continue;
                    }
                };
                if let Err(error) = &result
                    && concerns_all(error)
                {
                    fatal = Some(error.clone());
                }
                self.results[item.index] = Some(result);
            }
            for item in later.into_iter().rev() {
                self.left.push_front(item);
            }
            if let Some(error) = fatal {
                self.give_up(&error);
            }
        }
        let busy = |result: Option<_>| result.unwrap_or(Err(Error::Busy));
        self.results.into_iter().map(busy).collect()
    }

    /// Whatever is left fails for this reason.
    fn give_up(&mut self, error: &Error) {
        for item in self.left.drain(..) {
            self.results[item.index] = Some(Err(error.clone()));
        }
    }
}

/// Whether what failed for this reason fails for all names.
fn concerns_all(error: &Error) -> bool {
    matches!(error, Error::NoSpace | Error::ReadOnly | Error::Store(_))
}

/// A place that an operation for many is at, and the names that it changes there.
struct Place<P> {
    spot: Spot<Name>,
    plan: P,
}

/// Where leaves are, by what was told of them, for who comes by in the order of keys.
struct Told(std::iter::Peekable<std::vec::IntoIter<Ahead>>);

impl Told {
    fn new(told: Vec<Ahead>) -> Told {
        Told(told.into_iter().peekable())
    }

    /// Where the leaf is that covers this key, if that was told.
    fn of(&mut self, key: u64) -> Option<Ahead> {
        while self.0.next_if(|ahead| !ahead.covers(key)).is_some() {}
        self.0.peek().copied()
    }
}

/// The place of the next name, unless it is the one where the operation is. It is that one also if it has come to
/// cover more since it was locked, as the leaf beside it went: then its plan, which knows what it has taken, goes on.
fn next_spot<P>(
    op: &mut Op<'_, FsNode>,
    dir: Slot,
    (item, ahead): (&Item<'_>, Option<Ahead>),
    place: &mut Option<Place<P>>,
) -> Result<Option<Spot<Name>>, Error> {
    if place
        .as_ref()
        .is_some_and(|place| place.spot.covers(item.key))
    {
        return Ok(None);
    }
    let spot = dir::place(op, dir, item.wanted(), ahead)?;
    let spot = dir::sought(op, spot, item.wanted())?;
    match place {
        Some(place) if place.spot.slot() == spot.slot() => {
            place.spot = spot;
            Ok(None)
        }
        _ => Ok(Some(spot)),
    }
}

impl FileSystem {
    /// Makes regular files, empty and not open, in one directory; returns for each name, in the order given, the new
    /// file's attributes or why it was not made. `mode` and `who` count as for [`FileSystem::mknod`].
    /// It takes fewer instructions and locks than as many calls of that, the more of the names share leaves of the
    /// directory (`docs/performance.md`): up to 128 names are one record.
    ///
    /// Each name is made, or not, atomically with its file. The call as a whole is not atomic: others may see
    /// some of the names before the rest, and a crash may leave any of them without the others. All are durable after a
    /// [`FileSystem::sync`], or `fsync_inode` of the directory, that begins after the call; a commit takes
    /// them along within its interval.
    ///
    /// # Errors
    /// For one name, the others not affected: [`Error::Exists`], also for a name given twice;
    /// [`Error::NameTooLong`], [`Error::Invalid`] and, for an empty name, [`Error::NotFound`]; damage of the
    /// part of the directory where it would be. What concerns the whole ends the call, and is the error of every name that was not
    /// handled by then: [`Error::NotADirectory`], [`Error::NotFound`] (the directory was removed),
    /// [`Error::Stale`], [`Error::NoSpace`], [`Error::ReadOnly`], failures of devices. Which
    /// names were made then the results say; they are not the first ones given.
    #[must_use = "each name says by itself whether its file was made"]
    pub fn create_many<'d, N: AsRef<[u8]>>(
        &self,
        who: &Caller,
        dir: impl Into<At<'d>>,
        names: &[N],
        mode: u32,
    ) -> Vec<Result<Attr, Error>> {
        let dir = dir.into();
        let batch = Batch::new(&self.hash, names, |name| match is_dot(name) {
            true => Err(Error::Exists),
            false => check_name(name),
        });
        batch.run(
            (self, dir),
            |items| self.create_together(who, dir, mode, items),
            |name| self.mknod(who, dir, name, libc::S_IFREG | (mode & 0o7777), 0),
        )
    }

    /// Looks names of one directory up, "." and ".." as well; returns for each name, in the order given, its
    /// attributes or why there are none. Each result is true at some moment of the call, not all at one moment.
    ///
    /// # Errors
    /// For one name those of [`FileSystem::lookup`]; what concerns the whole as for
    /// [`FileSystem::create_many`].
    #[must_use = "looking alone does nothing"]
    pub fn stat_many<'d, N: AsRef<[u8]>>(
        &self,
        dir: impl Into<At<'d>>,
        names: &[N],
    ) -> Vec<Result<Attr, Error>> {
        let dir = dir.into();
        let batch = Batch::new(&self.hash, names, |name| match is_dot(name) {
            true => Ok(()),
            false => check_name(name),
        });
        batch.run(
            (self, dir),
            |items| self.stat_together(dir, items),
            |name| self.lookup(dir, name),
        )
    }

    /// Unlinks names of one directory, none of them a directory's; returns for each name, in the order given,
    /// whether it went. It takes fewer instructions than as many calls of [`FileSystem::unlink`] where the names share
    /// leaves of the directory, of which up to 128 go in one record; where they do not, each goes alone.
    ///
    /// Each name goes, or stays, atomically with what that means for its file. The call as a whole is not atomic:
    /// others may see some names gone and others there, and a crash may bring any of them back without the
    /// others. Durable as with [`FileSystem::create_many`].
    ///
    /// # Errors
    /// For one name those of [`FileSystem::unlink`], among them [`Error::NotFound`], also for a name given
    /// twice, and [`Error::IsADirectory`]; what concerns the whole as for [`FileSystem::create_many`], of which
    /// [`Error::NoSpace`] does not occur.
    #[must_use = "each name says by itself whether it went"]
    pub fn unlink_many<'d, N: AsRef<[u8]>>(
        &self,
        who: &Caller,
        dir: impl Into<At<'d>>,
        names: &[N],
    ) -> Vec<Result<(), Error>> {
        let dir = dir.into();
        let batch = Batch::new(&self.hash, names, |name| match is_dot(name) {
            true => Err(Error::IsADirectory),
            false => check_name(name),
        });
        batch.run(
            (self, dir),
            |items| self.unlink_together(dir, items),
            |name| self.unlink(who, dir, name),
        )
    }

    /// Makes what fits into the leaves as they are, in one record.
    fn create_together(
        &self,
        who: &Caller,
        dir: At<'_>,
        mode: u32,
        items: &[Item<'_>],
    ) -> Result<Vec<Fate<Attr>>, Error> {
        let dir_node = self.dir_node(dir)?;
        let told = self.ask_leaves(&dir_node, items, Purpose::Change);
        let mut told = Told::new(told);
        once_told();
        let mut op = self.store.begin(Need::Grow)?;
        let slot = op.lock_as(&dir_node, Mode::Merging)?;
        let parent = live_dir(op.peek(slot).inode()?)?;
        let (model, inherited) = self.draft(who, parent, &Draft::file(mode), 0)?;
        if !inherited.is_empty() {
            return Ok(items.iter().map(|_| Fate::Alone).collect());
        }
        let mut fates = Vec::with_capacity(items.len());
        let mut made: Vec<(FreshNid<'_>, Inode)> = Vec::new();
        let mut filled: Vec<Filling<Name>> = Vec::new();
        let mut place: Option<Place<Filling<Name>>> = None;
        for (i, item) in items.iter().enumerate() {
            if i > 0 && items[i - 1].key == item.key {
                // After the one before, which may be the same name.
                fates.push(match fates.last() {
                    Some(Fate::Later) => Fate::Later,
                    _ => Fate::Alone,
                });
                continue;
            }
            let ahead = told.of(item.key);
            let spot = next_spot(&mut op, slot, (item, ahead), &mut place)?;
            if let Some(spot) = spot {
                let plan = spot.fill(&op)?;
                filled.extend(place.replace(Place { spot, plan }).map(|done| done.plan));
            }
            let Some(Place { spot, plan }) = &mut place else {
                unreachable!("there is a place for each name");
            };
            if spot.look(&op, item.key, |n| n.name == item.name)?.is_some() {
                fates.push(Fate::Done(Err(Error::Exists)));
                continue;
            }
            if plan.is_full() {
                fates.push(Fate::Later);
                continue;
            }
            let Ok(key) = spot.free_key_of(&op, item.key) else {
                fates.push(Fate::Alone);
                continue;
            };
            let fresh = self.store.reserve_nid()?;
            let mut inode = model.clone();
            inode.generation = fresh.version();
            let element = Name {
                key,
                nid: fresh.nid(),
                generation: inode.generation,
                kind: inode.dirent_kind(),
                name: item.name.into(),
            };
            match plan.add(element) {
                false => fates.push(Fate::Alone),
                true => {
                    fates.push(Fate::Done(Ok(self.attr_of(fresh.nid(), &inode))));
                    made.push((fresh, inode));
                }
            }
        }
        filled.extend(place.map(|place| place.plan));
        if made.is_empty() {
            return Ok(fates);
        }
        let (names, now) = (made.len() as i32, model.btime);
        for (fresh, inode) in made {
            op.create(fresh, FsNode::Inode(inode));
        }
        filled.into_iter().for_each(|plan| plan.finish(&mut op));
        self.count_names(&mut op, slot, (names, 0), now);
        op.commit();
        Ok(fates)
    }

    /// The names in the directory, as one look at it finds them; their inodes are in memory then.
    fn find_together(&self, dir: At<'_>, items: &[Item<'_>]) -> Result<Vec<Option<Link>>, Error> {
        let keys: Vec<u64> = items.iter().map(|item| item.key).collect();
        let found = {
            let dir_node = self.dir_node(dir)?;
            let told = self.ask_leaves(&dir_node, items, Purpose::Read);
            let mut told = Told::new(told);
            once_told();
            let node = dir_of(dir_node.read()?)?;
            let inode = live_dir(node.inode()?)?;
            let ahead = |key| told.of(key);
            list::find_each::<Name>(&self.store, inode, &keys, ahead, |i, name| {
                name.name == items[i].name
            })?
        };
        let nids = found.iter().flatten().map(|name| name.nid);
        nids.clone().for_each(|nid| self.store.ask(nid));
        self.store.read_ahead(nids);
        Ok(found)
    }

    /// Tells where the leaves are in which names are, that come in the order of their keys, and has the memory of all of them come at
    /// once, if they are several.
    fn ask_leaves(&self, dir: &Node<FsNode>, items: &[Item<'_>], purpose: Purpose) -> Vec<Ahead> {
        let mut told: Vec<Ahead> = Vec::new();
        for item in items {
            if told.last().is_some_and(|last| last.covers(item.key)) {
                continue;
            }
            match dir::look_ahead(&self.store, dir, [item.wanted()]) {
                [Some(ahead)] => told.push(ahead),
                [None] => break,
            }
        }
        if told.len() > 1 {
            let told = told.iter();
            told.for_each(|ahead| _ = ahead.ask(&self.store, purpose));
        }
        told
    }

    fn stat_together(&self, dir: At<'_>, items: &[Item<'_>]) -> Result<Vec<Fate<Attr>>, Error> {
        let found = self.find_together(dir, items)?;
        let fates = found.into_iter().zip(items).map(|(found, item)| {
            let Some(name) = found else {
                return match is_dot(item.name) {
                    true => Fate::Alone,
                    false => Fate::Done(Err(Error::NotFound)),
                };
            };
            match self.getattr(name.nid) {
                Ok(attr) if attr.generation == name.generation => Fate::Done(Ok(attr)),
                // Unlinked, perhaps replaced, between the two looks.
                Ok(_) | Err(Error::Stale(_)) => Fate::Alone,
                Err(error) => Fate::Done(Err(error)),
            }
        });
        Ok(fates.collect())
    }

    /// Unlinks what can go in a record with others.
    fn unlink_together(&self, dir: At<'_>, items: &[Item<'_>]) -> Result<Vec<Fate<()>>, Error> {
        if self.dir_inode(dir)?.inode()?.names() > items.len() as u64 * APART {
            return Ok(items.iter().map(|_| Fate::Alone).collect());
        }
        let dir_node = self.dir_node(dir)?;
        let mut fates: Vec<Fate<()>> = Vec::with_capacity(items.len());
        let (mut victims, mut nodes) = (Vec::new(), Vec::new());
        for (i, found) in self.find_together(dir, items)?.into_iter().enumerate() {
            fates.push(Fate::Alone);
            match found {
                _ if i > 0 && items[i - 1].key == items[i].key => {}
                None => fates[i] = Fate::Done(Err(Error::NotFound)),
                Some(name) => match self.named_node(name.nid) {
                    Ok(node) => {
                        victims.push((i, name));
                        nodes.push(node);
                    }
                    Err(engine::Error::Gone(_)) => {}
                    Err(error) => fates[i] = Fate::Done(Err(error.into())),
                },
            }
        }
        let mut op = self.store.begin(Need::Reclaim)?;
        let mut locked = vec![(&*dir_node, Mode::Merging)];
        locked.extend(nodes.iter().map(|node| (node, Mode::Exclusive)));
        let slots = match op.lock_sorted_as(&locked) {
            Ok(slots) => slots,
            // One of them goes at this moment.
            Err(engine::Error::Gone(nid)) if nid != dir.ino() => return Ok(fates),
            Err(error) => return Err(error.into()),
        };
        live_dir(op.peek(slots[0]).inode()?)?;
        let mut removal = Removal {
            clearings: Vec::new(),
            taken: Vec::new(),
            blocks: 0,
        };
        let mut place: Option<Place<Vec<u64>>> = None;
        for ((i, name), slot) in victims.iter().zip(&slots[1..]) {
            let item = &items[*i];
            if let Some(spot) = next_spot(&mut op, slots[0], (item, None), &mut place)? {
                let plan = Vec::new();
                if let Some(done) = place.replace(Place { spot, plan }) {
                    removal.leave(&mut op, done)?;
                }
            }
            let Some(here) = &mut place else {
                unreachable!("there is a place for each name");
            };
            // Damage may have given an inode two names and one link.
            let twice = removal.taken.contains(slot);
            let spare = here.plan.len() < here.spot.spare(&op)?;
            let blocks = &mut removal.blocks;
            if spare && !twice && self.can_go(&mut op, &here.spot, name, *slot, blocks)? {
                here.plan.push(name.key);
                removal.taken.push(*slot);
                fates[*i] = Fate::Done(Ok(()));
            }
        }
        if let Some(done) = place {
            removal.leave(&mut op, done)?;
        }
        self.finish_together(op, slots[0], removal);
        Ok(fates)
    }

    /// Carries a removal of many names out (phase 2).
    fn finish_together(&self, mut op: Op<'_, FsNode>, dir: Slot, removal: Removal) {
        if removal.taken.is_empty() {
            return;
        }
        let gone = -(removal.taken.len() as i32);
        let shown = op.peek(dir).inode().map_or(Stamp::NEVER, Inode::shown);
        let now = self.times.after(shown);
        for clearing in removal.clearings {
            clearing.finish(&mut op);
        }
        self.count_names(&mut op, dir, (gone, 0), now);
        // They have no state, and nobody opens them any more.
        removal.taken.iter().for_each(|slot| op.delete(*slot));
        op.commit();
    }
}

/// What an operation removes.
struct Removal {
    clearings: Vec<list::Clearing<Name>>,
    /// The inodes that go.
    taken: Vec<Slot>,
    /// Blocks that they free.
    blocks: u64,
}

impl Removal {
    /// Plans for a place whose names are all known.
    fn leave(&mut self, op: &mut Op<'_, FsNode>, place: Place<Vec<u64>>) -> Result<(), Error> {
        if !place.plan.is_empty() {
            self.clearings.push(place.spot.clear(op, place.plan)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Ino, ROOT};
    use crate::namespace::meanwhile::{nobody_does, others_do};
    use crate::rename::tests::file_system;
    use std::sync::Arc;

    const NAMES: usize = 2 * TOGETHER + 44;

    fn make(fs: &FileSystem, dir: Ino, name: &[u8]) {
        let (who, mode) = (Caller::root(), libc::S_IFREG | 0o644);
        fs.mknod(&who, dir, name, mode, 0).unwrap();
    }

    /// A folder, what somebody does with names in it while, after the first round, others remove it, and make folders until one has its
    /// number, with files of those names or without.
    fn while_another_gets_the_number<T>(
        (before, after): (bool, bool),
        call: impl FnOnce(&FileSystem, Ino, &[Vec<u8>]) -> Vec<Result<T, Error>>,
    ) {
        // What this thread's core gives back it gets again.
        base::thread::pin(base::thread::current_cpu()).unwrap();
        let (fs, who) = (file_system(), Caller::root());
        let names: Vec<Vec<u8>> = (0..NAMES).map(|i| format!("{i}").into_bytes()).collect();
        let dir = fs.mkdir(&who, ROOT, b"folder", 0o755).unwrap().ino;
        let elsewhere = fs.mkdir(&who, ROOT, b"elsewhere", 0o755).unwrap().ino;
        if before {
            names.iter().for_each(|name| make(&fs, dir, name));
        }
        let (others, all, mut step) = (Arc::clone(&fs), names.clone(), 0);
        others_do(move || {
            step += 1;
            if step != 2 {
                return;
            }
            for name in &all {
                let gone = others.unlink(&who, dir, name);
                assert!(matches!(gone, Ok(()) | Err(Error::NotFound)), "{gone:?}");
            }
            // Files' numbers come first.
            (0..8).for_each(|i| make(&others, elsewhere, format!("before {i}").as_bytes()));
            others.rmdir(&who, ROOT, b"folder").unwrap();
            for i in 0..8 {
                let name = format!("{i}");
                let made = others.mkdir(&who, elsewhere, name.as_bytes(), 0o755);
                if made.unwrap().ino == dir {
                    let again = all.iter().filter(|_| after);
                    again.for_each(|name| make(&others, dir, name));
                    break;
                }
            }
        });
        let results = call(&fs, dir, &names);
        nobody_does();
        let done = results.iter().filter(|result| result.is_ok()).count();
        assert!((1..=TOGETHER).contains(&done), "{done}");
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            assert!(matches!(error, Error::NotFound), "{error}");
        }
        // Nothing refers to it any more.
        let gone = fs.getattr(dir);
        assert!(matches!(gone, Err(Error::Stale(_))), "{gone:?}");
        fs.close().unwrap();
    }

    /// From the second round on it was what had the number by then that was changed and looked at.
    #[test]
    fn all_rounds_are_in_the_directory_that_the_first_one_was_in() {
        let who = Caller::root();
        while_another_gets_the_number((true, true), |fs, dir, names| {
            fs.unlink_many(&who, dir, names)
        });
        while_another_gets_the_number((true, true), |fs, dir, names| fs.stat_many(dir, names));
        while_another_gets_the_number((false, false), |fs, dir, names| {
            fs.create_many(&who, dir, names, 0o644)
        });
    }
}

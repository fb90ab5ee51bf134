//! Many threads in one tree of directories: a walk over all that is in it, and its removal.
//!
//! Invariants:
//! 1. A directory has one open part for its own entries and one for each directory found in it.
//!    Whoever closes its last part leaves it, which closes a part of the one above: so a
//!    directory is left once, after everything below it. One that is not empty then, as others have moved something into it, is begun again
//!    instead, with a part for its own entries as before.
//! 2. A worker that finds nothing to do waits only while another is in a directory and may yet
//!    find some.
//! 3. After a failure no directory is begun any more.
//! 4. A directory is the one that was found: one that has got its number since is not gone into. What is removed is what was found,
//!    where it was found: what others have moved or replaced since is left alone, and so is what came into its place.
//!
//! What is in memory is one entry for each directory found and not left yet, about 100 bytes
//! and its name.

use crate::api::{DirEntry, Ino};
use crate::content::{FsNode, Inode, Link, Name};
use crate::filesystem::FileSystem;
use crate::namespace::live_dir;
use crate::orphan::Disposal;
use crate::{Caller, Error, data, list};
use base::sync::{Condvar, Mutex, rank};
use engine::{Need, Op, Slot, THREADS_MAX};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Times that a directory is begun, at most: others may fill one without end.
const BEGUN_MAX: u32 = 100;
/// Names that one record removes, at most.
const REMOVED_AT_ONCE: usize = 128;

/// What [`FileSystem::remove_all`] removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Names of everything but directories.
    pub files: u64,
    pub directories: u64,
}

/// A directory that was found and not left yet.
struct Found {
    dir: Ino,
    /// Invariant 4.
    generation: u64,
    /// Where it was found; `None`: it is the first.
    above: Option<(Arc<Found>, Box<[u8]>)>,
    /// Open parts (invariant 1).
    open: AtomicUsize,
    /// How often it was begun again.
    again: AtomicU32,
    /// Something in it was removed since it was begun again; true before that.
    loses: AtomicBool,
}

impl Found {
    fn new(dir: Ino, generation: u64, above: Option<(Arc<Found>, Box<[u8]>)>) -> Arc<Found> {
        Arc::new(Found {
            dir,
            generation,
            above,
            open: AtomicUsize::new(1),
            again: AtomicU32::new(0),
            loses: AtomicBool::new(true),
        })
    }
}

impl Drop for Found {
    /// Whoever goes last takes those above along, one after the other: a tree may be deeper than a stack.
    fn drop(&mut self) {
        let mut above = self.above.take();
        while let Some((found, _)) = above {
            above = Arc::into_inner(found).and_then(|mut found| found.above.take());
        }
    }
}

/// The directories that nobody has begun, newest last, so that a tree is walked in depth.
struct Queue {
    waiting: Vec<Arc<Found>>,
    /// Workers in a directory.
    busy: usize,
    failed: Option<Error>,
}

struct Crew {
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// What is done in each directory.
trait Work: Sync {
    /// Handles a directory's entries; those that are directories, and shall be begun, go to
    /// `found`.
    fn enter(&self, begun: &Found, found: &mut dyn FnMut(&Name)) -> Result<(), Error>;
    /// Everything below a directory is done. False: it is to be begun again.
    fn leave(&self, left: &Found) -> Result<bool, Error>;
}

/// Somebody is in a directory; also one who panics there must leave it, or the others wait for ever.
struct Busy<'a>(&'a Crew);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().busy -= 1;
        self.0.changed.notify_all();
    }
}

impl Crew {
    /// Works until there is nothing left, or something failed.
    fn work(&self, work: &dyn Work) {
        while let Some(found) = self.next() {
            let busy = Busy(self);
            let outcome = self.visit(work, &found);
            if let Err(error) = outcome {
                self.queue.lock().failed.get_or_insert(error);
            }
            drop(busy);
        }
    }

    fn next(&self) -> Option<Arc<Found>> {
        let mut queue = self.queue.lock();
        loop {
            if queue.failed.is_some() {
                return None;
            }
            if let Some(found) = queue.waiting.pop() {
                queue.busy += 1;
                return Some(found);
            }
            if queue.busy == 0 {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    fn visit(&self, work: &dyn Work, found: &Arc<Found>) -> Result<(), Error> {
        let begin = |new: Arc<Found>| {
            self.queue.lock().waiting.push(new);
            self.changed.notify_one();
        };
        work.enter(found, &mut |name| {
            found.open.fetch_add(1, Ordering::Relaxed);
            let above = (Arc::clone(found), Box::from(&*name.name));
            begin(Found::new(name.nid, name.generation, Some(above)));
        })?;
        let mut at = Some(found);
        // AcqRel: whoever leaves a directory sees what was done in all of its parts.
        while let Some(closed) = at.filter(|f| f.open.fetch_sub(1, Ordering::AcqRel) == 1) {
            if !work.leave(closed)? {
                // Nobody else knows of it now; the queue's lock hands it on.
                closed.open.store(1, Ordering::Relaxed);
                begin(Arc::clone(closed));
                break;
            }
            at = closed.above.as_ref().map(|(up, _)| up);
        }
        Ok(())
    }
}

impl FileSystem {
    /// Runs `work` in a directory and all below it, on up to `workers` of the store's threads,
    /// which are no more than [`THREADS_MAX`], and the caller's.
    fn through(
        &self,
        (dir, generation): (Ino, u64),
        workers: usize,
        work: &dyn Work,
    ) -> Result<(), Error> {
        let crew = Crew {
            queue: Mutex::new(
                rank::LEAF,
                Queue {
                    waiting: vec![Found::new(dir, generation, None)],
                    busy: 0,
                    failed: None,
                },
            ),
            changed: Condvar::new(),
        };
        self.store
            .fan_out(workers.clamp(1, THREADS_MAX), |_| crew.work(work));
        match crew.queue.into_inner().failed {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Hands every entry below a directory to `each`, with the directory it is in, from up to
    /// `workers` threads at once, in no order; `each` says whether to go into an entry that is a
    /// directory. What exists throughout is met once; no lock is held in `each`. Entries' `next`
    /// is where [`FileSystem::readdir`] would go on.
    ///
    /// # Errors
    /// The first of `each` or of a directory that cannot be read; directories that were begun are
    /// finished first.
    pub fn walk(
        &self,
        dir: Ino,
        workers: usize,
        each: &(dyn Fn(Ino, DirEntry<'_>) -> Result<bool, Error> + Sync),
    ) -> Result<(), Error> {
        let generation = self.inode(dir)?.inode()?.generation;
        self.through((dir, generation), workers, &Walk { fs: self, each })
    }

    /// Removes a name and, if it is a directory, everything below it, on up to `workers` threads.
    /// Each file and each directory goes atomically, and what is below a directory before the
    /// directory; the whole is not atomic, and durable after a [`FileSystem::sync`]. `progress` is
    /// told how many names went since it was told last. What others remove, rename or replace meanwhile
    /// is left alone, the first name included, and is no error; but a directory that was found is
    /// emptied wherever it is by then, and what is moved to, or made in, another directory of the tree goes with that.
    ///
    /// # Errors
    /// [`Error::NotEmpty`] when others make files in a directory of the tree again and again; what was removed by then
    /// stays removed.
    pub fn remove_all(
        &self,
        who: &Caller,
        parent: Ino,
        name: &[u8],
        workers: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Removed, Error> {
        let above = (parent, self.inode(parent)?.inode()?.generation);
        let attr = self.lookup(parent, name)?;
        if !attr.is_dir() {
            let files =
                u64::from(self.remove_found(above, name, (attr.ino, attr.generation), false)?);
            progress(files);
            return Ok(Removed {
                files,
                directories: 0,
            });
        }
        // Refused before anything is gone.
        if crate::dir::is_dot(name) {
            self.rmdir(who, parent, name)?;
        }
        let removal = RemoveAll {
            fs: self,
            top: (above, name),
            progress,
            files: AtomicU64::new(0),
            directories: AtomicU64::new(0),
        };
        self.through((attr.ino, attr.generation), workers, &removal)?;
        Ok(Removed {
            files: removal.files.into_inner(),
            directories: removal.directories.into_inner(),
        })
    }

    /// The names of a directory, one leaf after the other. One that was removed since it was found has nothing any more; what `each` fails with is
    /// another matter.
    fn runs(
        &self,
        dir: Ino,
        generation: u64,
        mut each: impl FnMut(Vec<Name>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut from = Some(0);
        while let Some(key) = from {
            let looked = || {
                let node = self.inode(dir)?;
                let inode = same_dir(dir, generation, node.inode()?)?;
                list::run_from::<Name>(&self.store, inode, key)
            };
            let Some((names, next)) = unless_gone(dir, looked())? else {
                return Ok(());
            };
            each(names)?;
            from = next;
        }
        Ok(())
    }

    /// Removes names of one leaf of a directory, none of them a directory's, in one record.
    /// Returns those that need a record of their own, or are not there any more.
    fn remove_together<'n>(
        &self,
        dir: Ino,
        generation: u64,
        names: &'n [Name],
    ) -> Result<Vec<&'n Name>, Error> {
        let (mut left, mut victims) = (Vec::new(), Vec::new());
        self.store.read_ahead(names.iter().map(|name| name.nid));
        for name in names {
            match self.named_node(name.nid) {
                Ok(node) => victims.push((name, node)),
                Err(engine::Error::Gone(_)) => left.push(name),
                Err(error) => return Err(error.into()),
            }
        }
        let dir_node = self.node(dir)?;
        let mut nodes = vec![&dir_node];
        nodes.extend(victims.iter().map(|(_, node)| node));
        let mut op = self.store.begin(Need::Reclaim)?;
        let slots = match op.lock_sorted(&nodes) {
            Ok(slots) => slots,
            // One of them goes at this moment.
            Err(engine::Error::Gone(nid)) if nid != dir => return Ok(names.iter().collect()),
            Err(error) => return Err(error.into()),
        };
        same_dir(dir, generation, op.peek(slots[0]).inode()?)?;
        let Some(first) = names.first() else {
            return Ok(left);
        };
        let spot = list::spot::<Name>(&mut op, slots[0], first.key, |_| false)?;
        let mut taken: Vec<(&Name, Slot)> = Vec::with_capacity(victims.len());
        let mut blocks = 0;
        for ((name, _), slot) in victims.iter().zip(&slots[1..]) {
            // Damage may have given an inode two names and one link.
            let twice = taken.iter().any(|(_, other)| other == slot);
            if !twice && self.can_go(&mut op, &spot, &name.link(), *slot, &mut blocks)? {
                taken.push((name, *slot));
            } else {
                left.push(name);
            }
        }
        if taken.is_empty() {
            return Ok(left);
        }
        let keys = taken.iter().map(|(name, _)| name.key).collect();
        let clearing = spot.clear(&mut op, keys)?;
        let now = self.times.after(op.peek(slots[0]).inode()?.shown());
        clearing.finish(&mut op);
        self.count_names(&mut op, slots[0], (-(taken.len() as i32), 0), now);
        // They have no state, and nobody opens them any more.
        taken.iter().for_each(|(_, slot)| op.delete(*slot));
        op.commit();
        Ok(left)
    }

    /// Whether a locked inode goes with this name, and can go in a record with others; then its
    /// blocks are freed. `blocks`: how many the record frees.
    pub(crate) fn can_go(
        &self,
        op: &mut Op<'_, FsNode>,
        spot: &list::Spot<Name>,
        name: &Link,
        victim: Slot,
        blocks: &mut u64,
    ) -> Result<bool, Error> {
        let FsNode::Inode(inode) = op.peek(victim) else {
            return Ok(false);
        };
        let listed = spot.get(op, name.key)?;
        let same = listed.is_some_and(|n| n == *name && n.generation == inode.generation);
        let freed = *blocks + inode.blocks;
        if !same || inode.is_dir() || inode.nlink != 1 || freed > data::FREE_MAX {
            return Ok(false);
        }
        let disposal = self.plan_disposal(op, victim, 0, None)?;
        *blocks = freed;
        Ok(matches!(disposal, Some(Disposal::Delete)))
    }
}

/// The inode of a directory that was found before, unless it is gone (invariant 4).
fn same_dir(dir: Ino, generation: u64, inode: &Inode) -> Result<&Inode, Error> {
    match inode.generation == generation {
        true => live_dir(inode),
        false => Err(Error::Stale(dir)),
    }
}

/// What came of a look at a directory, or of a change of it. `None`: it was removed since it was found.
fn unless_gone<T>(dir: Ino, looked: Result<T, Error>) -> Result<Option<T>, Error> {
    match looked {
        Err(Error::Stale(ino)) if ino == dir => Ok(None),
        Err(Error::NotFound) => Ok(None),
        other => other.map(Some),
    }
}

struct Walk<'a> {
    fs: &'a FileSystem,
    each: &'a (dyn Fn(Ino, DirEntry<'_>) -> Result<bool, Error> + Sync),
}

impl Work for Walk<'_> {
    fn enter(&self, begun: &Found, found: &mut dyn FnMut(&Name)) -> Result<(), Error> {
        let dir = begun.dir;
        self.fs.runs(dir, begun.generation, |names| {
            for name in &names {
                let entry = crate::listing::entry_of(name);
                if (self.each)(dir, entry)? && name.kind == libc::DT_DIR {
                    found(name);
                }
            }
            Ok(())
        })
    }

    fn leave(&self, _left: &Found) -> Result<bool, Error> {
        Ok(true)
    }
}

struct RemoveAll<'a> {
    fs: &'a FileSystem,
    /// Where the first directory is, and its name there.
    top: ((Ino, u64), &'a [u8]),
    progress: &'a (dyn Fn(u64) + Sync),
    files: AtomicU64,
    directories: AtomicU64,
}

impl RemoveAll<'_> {
    fn files(&self, begun: &Found, names: &[Name]) -> Result<(), Error> {
        let &Found {
            dir, generation, ..
        } = begun;
        for names in names.chunks(REMOVED_AT_ONCE) {
            let left = self.fs.remove_together(dir, generation, names)?;
            let mut gone = names.len() as u64;
            for name in left {
                let victim = (name.nid, name.generation);
                let removed =
                    (self.fs).remove_found((dir, generation), &name.name, victim, false)?;
                gone -= u64::from(!removed);
            }
            self.files.fetch_add(gone, Ordering::Relaxed);
            begun.loses.fetch_or(gone > 0, Ordering::Relaxed);
            (self.progress)(gone);
        }
        Ok(())
    }

    /// Whether a directory that is not empty is begun again: if that has removed something the last time, and not too often.
    fn goes_on(&self, dir: &Found) -> bool {
        dir.loses.swap(false, Ordering::Relaxed)
            && dir.again.fetch_add(1, Ordering::Relaxed) + 1 < BEGUN_MAX
    }
}

impl Work for RemoveAll<'_> {
    fn enter(&self, begun: &Found, found: &mut dyn FnMut(&Name)) -> Result<(), Error> {
        self.fs.runs(begun.dir, begun.generation, |names| {
            let (below, files): (Vec<Name>, Vec<Name>) = names
                .into_iter()
                .partition(|name| name.kind == libc::DT_DIR);
            below.iter().for_each(&mut *found);
            unless_gone(begun.dir, self.files(begun, &files)).map(drop)
        })
    }

    fn leave(&self, left: &Found) -> Result<bool, Error> {
        let up = left.above.as_ref();
        let above = up.map(|(up, name)| ((up.dir, up.generation), &**name));
        let (dir, name) = above.unwrap_or(self.top);
        let victim = (left.dir, left.generation);
        match self.fs.remove_found(dir, name, victim, true) {
            Ok(false) => {}
            Ok(true) => {
                self.directories.fetch_add(1, Ordering::Relaxed);
                if let Some((up, _)) = up {
                    up.loses.store(true, Ordering::Relaxed);
                }
                (self.progress)(1);
            }
            Err(Error::NotEmpty) if self.goes_on(left) => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FsOptions, MkfsOptions, ROOT};
    use base::clock::Clock;
    use device::Array;
    use device::sim::SimDevice;
    use format::geometry::{Geometry, GeometryOptions};

    /// Numbers of inodes come back, with other generations.
    #[test]
    fn a_name_goes_only_with_what_was_found_and_where() {
        const BYTES: u64 = 64 << 20;
        let device = SimDevice::new(BYTES, 1);
        let geometry = Geometry::plan(&[BYTES], GeometryOptions::default()).unwrap();
        let array = Array::create(vec![device], geometry, "test", [7; 16], [9; 16]).unwrap();
        let array = Arc::new(array);
        FileSystem::mkfs(&array, &MkfsOptions::default()).unwrap();
        let options = FsOptions::default().without_threads(Clock::real());
        let fs = FileSystem::open(array, options).unwrap();
        let who = Caller::root();
        let dir = fs.mkdir(&who, ROOT, b"dir", 0o755).unwrap();
        let other = fs.mkdir(&who, ROOT, b"other", 0o755).unwrap();
        let sub = fs.mkdir(&who, dir.ino, b"sub", 0o755).unwrap();
        let file = fs.mknod(&who, dir.ino, b"file", libc::S_IFREG, 0).unwrap();
        for (victim, name, directory) in [(file, &b"file"[..], false), (sub, b"sub", true)] {
            let remove = |dir: (Ino, u64), victim: (Ino, u64)| {
                fs.remove_found(dir, name, victim, directory).unwrap()
            };
            let (parent, found) = ((dir.ino, dir.generation), (victim.ino, victim.generation));
            assert!(!remove((dir.ino, dir.generation + 1), found));
            assert!(!remove((other.ino, other.generation), found));
            assert!(!remove(parent, (victim.ino, victim.generation + 1)));
            assert!(!remove(parent, (other.ino, victim.generation)));
            assert!(!remove((file.ino, file.generation), found));
            assert!(remove(parent, found));
            assert!(!remove(parent, found));
        }
        fs.close().unwrap();
    }

    #[test]
    fn a_tree_may_be_deeper_than_a_stack() {
        let mut found = Found::new(crate::ROOT, 1, None);
        for _ in 0..500_000 {
            found = Found::new(crate::ROOT, 1, Some((found, Box::from(&b"folder"[..]))));
        }
        drop(found);
    }
}

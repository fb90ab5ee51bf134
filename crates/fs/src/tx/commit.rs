//! The commit of a transaction: locks, content to fresh blocks, one operation.

use super::carry::{Carried, Concerned};
use super::content::{Content, Counts, Page};
use super::stored::Place;
use super::{Step, Transaction};
use crate::Error;
use crate::ancestry::{Cycle, is_cycle};
use crate::api::{Ino, ROOT};
use crate::content::FsNode;
use crate::data::transact::{FileUse, InlineRoom, Intended, LockedFile, Written};
use crate::namespace::live_dir;
use base::canary::{Canary, planted};
use base::map::HashMap;
use engine::{Epoch, Extensive, Node, Reservation};
use format::BLOCK_SIZE;

/// Bytes of an entry that sets times.
const TIMES_LOGGED: usize = 48;
/// What an operation is begun for at least.
const LEAST: Extensive = Extensive {
    logged: 4 << 10,
    dirty: 16 << 10,
};

/// What a file becomes, and the blocks that this takes.
struct Contents<'s> {
    files: Vec<(Ino, Intended)>,
    written: Written<'s>,
}

impl<'fs> Transaction<'fs> {
    /// Makes all changes in one step, and returns when they are durable.
    ///
    /// # Errors
    /// [`Error::Conflict`] when something has changed that the transaction relied on. After this and all other errors nothing of it has
    /// happened; but when the store fails while it waits to be durable, it is read-only from then on, and a crash may leave all of it or none.
    pub fn commit(self) -> Result<(), Error> {
        let fs = self.fs;
        let epoch = self.apply()?;
        Ok(fs.store.commit_through(epoch)?)
    }

    /// As [`commit`](Self::commit), but does not wait: a crash soon after may undo all of it. Changes of names and attributes that are made later, and
    /// transactions, do not survive without it; bytes that single calls write later may, where the file had blocks for them before.
    pub fn commit_relaxed(mut self) -> Result<(), Error> {
        if planted(Canary::TransactionWrittenOver) {
            self.write_over()?;
        }
        self.apply().map(drop)
    }

    /// Only with a canary planted.
    fn write_over(&mut self) -> Result<(), Error> {
        let staged = self.inodes.iter_mut();
        for (ino, staged) in staged.filter(|(_, staged)| staged.fresh.is_none()) {
            for (number, page) in &staged.content.pages {
                if let Page::Whole(bytes) = page {
                    let file = self.fs.open_file(*ino, libc::O_RDWR)?;
                    self.fs.write(&file, number * BLOCK_SIZE as u64, bytes)?;
                }
            }
            let whole = |page: &Page| matches!(page, Page::Whole(_));
            staged.content.pages.retain(|_, page| !whole(page));
            staged.looked = None;
        }
        Ok(())
    }

    /// Fails with [`Error::Conflict`] unless all that it relied on is so still, at one moment.
    pub(super) fn look_back(mut self) -> Result<(), Error> {
        self.broken = None;
        self.expected = Extensive::default();
        self.counts = Counts::default();
        self.steps.clear();
        self.inodes.retain(|_, staged| staged.fresh.is_none());
        let there = &self.inodes;
        self.names.retain(|dir, _| there.contains_key(dir));
        for staged in self.inodes.values_mut() {
            staged.content = Content::default();
            staged.xattrs.clear();
            staged.unlinked = false;
        }
        self.apply().map(drop)
    }

    fn apply(mut self) -> Result<Epoch, Error> {
        if let Some(broken) = self.broken.take() {
            return Err(broken);
        }
        self.fs.files.check_writable()?;
        for staged in self.inodes.values_mut() {
            staged.handle = None;
        }
        let fs = self.fs;
        let renames = self.moves_directories().then(|| fs.renames.lock());
        if renames.is_some() {
            self.check_ancestry()?;
        }
        self.write_back_renamed()?;
        let early = match planted(Canary::TransactionMergedEarly) {
            true => Some(self.merge_early()?),
            false => None,
        };
        let (epoch, orphans) = {
            let uses = self.use_files()?;
            let locked = uses.iter().map(|file| fs.files.lock_for_commit(file));
            let locked: Vec<LockedFile<'_>> = locked.collect::<Result<_, _>>().map_err(gone)?;
            self.apply_locked(&locked, early)?
        };
        drop(renames);
        for ino in orphans {
            fs.settle_orphan(ino);
        }
        Ok(epoch)
    }

    /// The files whose content is changed or was read, in the order of their numbers.
    fn use_files(&self) -> Result<Vec<FileUse<'fs>>, Error> {
        let mut uses = Vec::new();
        for (ino, staged) in &self.inodes {
            let content = staged.content.is_changed() || staged.looked.is_some();
            if staged.fresh.is_none() && staged.model.is_file() && content {
                uses.push(self.fs.files.use_for_commit(*ino).map_err(reused)?);
            }
        }
        Ok(uses)
    }

    /// Files that take others' places are written back before that, as by a rename.
    fn write_back_renamed(&self) -> Result<(), Error> {
        for step in &self.steps {
            let Step::Rename {
                source,
                target: Some(target),
                exchange,
                ..
            } = step
            else {
                continue;
            };
            let moved = [Some(source), exchange.then_some(target)];
            for ino in moved.into_iter().flatten() {
                if let Some(staged) = self.inodes.get(ino)
                    && staged.fresh.is_none()
                    && staged.model.is_file()
                {
                    self.fs.files.write_back(*ino).map_err(gone)?;
                }
            }
        }
        Ok(())
    }

    /// Only with a canary planted.
    fn merge_early(&mut self) -> Result<Contents<'fs>, Error> {
        let uses = self.use_files()?;
        let locked = uses.iter().map(|file| self.fs.files.lock_for_commit(file));
        let locked: Vec<LockedFile<'_>> = locked.collect::<Result<_, _>>().map_err(gone)?;
        let changed = |file: &&LockedFile<'_>| self.inodes[&file.ino()].content.is_changed();
        for file in locked.iter().filter(changed) {
            self.fs.files.bring_home(file)?;
        }
        self.contents(&locked)
    }

    fn apply_locked(
        &mut self,
        locked: &[LockedFile<'_>],
        early: Option<Contents<'fs>>,
    ) -> Result<(Epoch, Vec<Ino>), Error> {
        let fs = self.fs;
        // Before anything of theirs is written (R17).
        if locked
            .iter()
            .any(|file| self.inodes[&file.ino()].content.is_changed())
        {
            self.stored.begin(&fs.store);
        }
        for file in locked {
            let staged = &self.inodes[&file.ino()];
            if staged.generation != file.generation() {
                return Err(gone(Error::Stale(file.ino())));
            }
            if staged.content.is_changed() {
                fs.files.bring_home(file)?;
            }
        }
        let mut contents = match early {
            Some(contents) => contents,
            None => self.contents(locked)?,
        };
        let pieces = self.stored_pieces(&contents.files);
        contents.written.reservations.extend(pieces);
        let in_parts = !self.steps.is_empty() && !contents.files.is_empty();
        if in_parts && planted(Canary::TransactionInParts) {
            let none = Contents {
                files: Vec::new(),
                written: Written::default(),
            };
            let (epoch, _) = self.operate(locked, none)?;
            fs.store.commit_through(epoch)?;
            self.steps.clear();
            self.names.clear();
            (self.inodes.values_mut()).for_each(|staged| staged.looked = None);
        }
        self.operate(locked, contents)
    }

    /// The operation, begun anew until it was asked for as large as it becomes.
    fn operate(
        &mut self,
        locked: &[LockedFile<'_>],
        contents: Contents<'fs>,
    ) -> Result<(Epoch, Vec<Ino>), Error> {
        let fs = self.fs;
        let nodes = self.nodes()?;
        let most = fs.store.large_possible();
        // What follows from where blocks are is counted high. Whether it is too much shows.
        let expected = Some(self.expected()).filter(|all| most.covers(*all));
        let mut asked = expected.unwrap_or(self.expected).max(LEAST);
        loop {
            let mut op = fs.store.begin_large(asked)?;
            fs.files.check_written(self.stored.flush_failures)?;
            let concerned = Concerned {
                nodes: &nodes,
                locked,
                files: &contents.files,
                written: &contents.written,
            };
            let carried = match self.carry_out(&mut op, &concerned) {
                Err(Error::TransactionTooLarge) if asked.logged < most.logged => {
                    asked.logged = (asked.logged * 4).min(most.logged);
                    continue;
                }
                carried => carried?,
            };
            if let Some(needed) = op.excess(carried.changed.len() * TIMES_LOGGED) {
                drop(op);
                if !most.covers(needed) {
                    return Err(Error::TransactionTooLarge);
                }
                asked = asked.max(Extensive {
                    logged: (needed.logged * 9 / 8).min(most.logged),
                    dirty: (needed.dirty * 9 / 8).min(most.dirty),
                });
                continue;
            }
            // It fails, too, when the store has failed.
            op.allocate()?;
            // From here on nothing can fail.
            self.settle_times(&mut op, &carried);
            carried.orphans.iter().for_each(|ino| fs.note_orphan(*ino));
            for (file, intended) in changed_files(locked, &contents.files) {
                fs.files.content_changed(file, intended);
            }
            let epoch = op.commit_noting(|epoch| {
                let changed = carried.changed.keys();
                changed.for_each(|ino| fs.files.changed(*ino, epoch));
            });
            self.committed(contents, &carried, locked, epoch);
            return match fs.store.failed() {
                Some(failed) => Err(failed.into()),
                None => Ok((epoch, carried.orphans)),
            };
        }
    }

    /// Half of what the commit is not expected to take: it may be more. Staging counts no content, as each page has its block.
    fn inline_room(&self) -> InlineRoom {
        let (most, expected) = (self.fs.store.large_most(), self.expected());
        let logged = most.logged.saturating_sub(expected.logged);
        let dirty = most.dirty.saturating_sub(expected.dirty);
        match self.fs.store.room_to_grow() {
            true => InlineRoom(logged.min(dirty) / 2),
            false => InlineRoom(0),
        }
    }

    /// What the files become, with their pages in fresh blocks.
    fn contents(&mut self, locked: &[LockedFile<'_>]) -> Result<Contents<'fs>, Error> {
        let fs = self.fs;
        let mut files = Vec::new();
        let mut room = self.inline_room();
        let stored = |place: Place, out: &mut [u8]| self.stored.read(&fs.store, place, out);
        for (ino, staged) in &self.inodes {
            let content = &staged.content;
            if staged.fresh.is_some() {
                if staged.model.nlink > 0 && content.size(0) > 0 {
                    files.push((*ino, fs.files.intend_new(content, &stored, &mut room)?));
                }
            } else if content.is_changed()
                && let Some(file) = find_locked(locked, *ino)
            {
                files.push((*ino, fs.files.intend(file, content, &stored, &mut room)?));
            }
        }
        let pages: u64 = files.iter().map(|(_, file)| file.pages.len() as u64).sum();
        let missing = pages.saturating_sub(self.promise.blocks());
        if missing > 0 {
            self.promise_more(missing)?;
        }
        if pages > 0 {
            self.stored.begin(&fs.store);
        }
        let written = (fs.files).write_intended(&mut self.promise, &mut files)?;
        Ok(Contents { files, written })
    }

    /// The blocks of pages that were stored before, by file; those that nothing names go back.
    fn stored_pieces(
        &mut self,
        files: &[(Ino, Intended)],
    ) -> Vec<(usize, Reservation<'fs, FsNode>)> {
        let mut used: Vec<(Place, usize)> = Vec::new();
        for (file, (_, intended)) in files.iter().enumerate() {
            used.extend(intended.stored.iter().map(|(_, place)| (*place, file)));
        }
        used.sort_unstable();
        let mut used = used.into_iter().peekable();
        let mut pieces = Vec::new();
        for (mut at, mut run) in self.stored.take() {
            let end = at + u64::from(run.extent().len);
            while let Some((place, file)) = used.next_if(|(place, _)| place.0.0 < end) {
                drop(run.split_off((place.0.0 - at) as u32));
                let mut last = place;
                let goes_on = |next: &(Place, usize), last: Place| {
                    next.0.0.0 < end && last.is_before(next.0) && next.1 == file
                };
                while let Some((next, _)) = used.next_if(|next| goes_on(next, last)) {
                    last = next;
                }
                at = last.0.0 + 1;
                pieces.push((file, run.split_off((at - place.0.0) as u32)));
            }
        }
        pieces
    }

    /// All inodes that are there and that the transaction has to do with, and the orphan directories of those that may lose their
    /// last name.
    fn nodes(&self) -> Result<Vec<(Ino, Node<FsNode>)>, Error> {
        let mut nodes = Vec::new();
        let mut orphanages: HashMap<Ino, Node<FsNode>> = HashMap::default();
        for (ino, staged) in &self.inodes {
            if staged.fresh.is_none() {
                nodes.push((*ino, self.fs.node(*ino).map_err(gone)?));
            }
            if staged.unlinked {
                let node = self.fs.orphan_node(*ino)?;
                orphanages.insert(node.nid(), node);
            }
        }
        nodes.extend(orphanages);
        Ok(nodes)
    }

    /// The operation has committed.
    fn committed(
        &mut self,
        contents: Contents<'fs>,
        carried: &Carried,
        locked: &[LockedFile<'_>],
        epoch: Epoch,
    ) {
        let fs = self.fs;
        for ino in &carried.made {
            let fresh = self.inodes.get_mut(ino).and_then(|s| s.fresh.take());
            fresh.into_iter().for_each(engine::FreshNid::taken);
        }
        fs.files.left_to_commit(&contents.written);
        for (file, reservation) in contents.written.reservations {
            if !carried.deleted.contains(&contents.files[file].0) {
                reservation.was_taken();
            }
        }
        for (file, intended) in changed_files(locked, &contents.files) {
            fs.files.content_logged(file, intended, epoch);
        }
    }

    /// Whether a step moves a directory to another one.
    fn moves_directories(&self) -> bool {
        let is_dir = |ino: &Ino| self.inodes.get(ino).is_some_and(|s| s.model.is_dir());
        self.steps.iter().any(|step| match step {
            Step::Rename {
                from,
                to,
                source,
                target,
                ..
            } => from.0 != to.0 && (is_dir(source) || target.as_ref().is_some_and(is_dir)),
            _ => false,
        })
    }

    /// Goes through the moves of directories again, on the parents that these have now, which the rename lock keeps (R13).
    fn check_ancestry(&self) -> Result<(), Error> {
        let mut parents: HashMap<Ino, Ino> = HashMap::default();
        let is_dir = |ino: &Ino| self.inodes.get(ino).is_some_and(|s| s.model.is_dir());
        for step in &self.steps {
            match step {
                Step::Make { dir, ino, .. } if is_dir(ino) => drop(parents.insert(*ino, *dir)),
                Step::Rename {
                    from,
                    to,
                    source,
                    target,
                    exchange,
                } if from.0 != to.0 => {
                    if is_dir(source) {
                        self.check_below(&parents, *source, to.0)?;
                    }
                    if let Some(target) = target.filter(|target| is_dir(target)) {
                        self.check_below(&parents, target, from.0)?;
                        if *exchange {
                            parents.insert(target, from.0);
                        }
                    }
                    if is_dir(source) {
                        parents.insert(*source, to.0);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Fails if `upper` is `lower` or above it.
    fn check_below(
        &self,
        parents: &HashMap<Ino, Ino>,
        upper: Ino,
        lower: Ino,
    ) -> Result<(), Error> {
        let (mut at, mut cycle) = (lower, Cycle::new());
        loop {
            if at == upper {
                let what = format!("directory {upper} has come above {lower}");
                return Err(Error::Conflict(what));
            }
            if at == ROOT {
                return Ok(());
            }
            if cycle.closes_at(at) {
                return Err(is_cycle().into());
            }
            at = match parents.get(&at) {
                Some(parent) => *parent,
                None => {
                    live_dir(self.fs.inode(at).map_err(gone)?.inode()?)
                        .map_err(gone)?
                        .parent
                }
            };
        }
    }
}

fn changed_files<'a>(
    locked: &'a [LockedFile<'_>],
    files: &'a [(Ino, Intended)],
) -> impl Iterator<Item = (&'a LockedFile<'a>, &'a Intended)> {
    files
        .iter()
        .filter_map(|(ino, intended)| Some((find_locked(locked, *ino)?, intended)))
}

/// They are in the order of their numbers.
fn find_locked<'a, 'l>(locked: &'a [LockedFile<'l>], ino: Ino) -> Option<&'a LockedFile<'l>> {
    let found = locked.binary_search_by_key(&ino, LockedFile::ino);
    found.ok().map(|at| &locked[at])
}

/// What is not there any more was there when it was staged.
pub(super) fn gone(error: Error) -> Error {
    match error {
        Error::Stale(ino) => Error::Conflict(format!("inode {ino} is gone")),
        Error::NotFound | Error::NotADirectory => Error::Conflict("a directory is gone".to_owned()),
        other => other,
    }
}

/// The same of a number that was a regular file's: who has it now may be something else.
pub(super) fn reused(error: Error) -> Error {
    match error {
        Error::IsADirectory | Error::Invalid(_) => {
            Error::Conflict("a file is gone, and its number is another's".to_owned())
        }
        other => gone(other),
    }
}

/// Names are looked at again, and files that were read.
pub(super) fn looks_again() -> bool {
    !planted(Canary::TransactionUnchecked)
}

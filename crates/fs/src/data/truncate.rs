//! Changing a file's size, and freeing what lies beyond.
//!
//! A cut of a few extents is one record. A larger one is a chain of records: the first sets
//! the size and `pending_truncate` and lists the inode among the orphans, the last undoes
//! both; recovery finishes a chain it finds. The chain runs under the exclusive I/O lock, so
//! nobody reads or allocates beyond the cut meanwhile (R16). A chain always ends: where it meets damage, that is reported,
//! and blocks that only a damaged node names are lost until a repair finds them. A cut that meets damage is a chain.
//!
//! Cutting a file to nothing is usually the first half of rewriting it. A file whose extents are
//! in its inode is only marked `replaced`: the old content stays logged until the new one takes
//! its place in one record (see `writeback`).

use super::extents;
use super::file::FileState;
use super::{Files, PAGE, SIZE_MAX, tail};
use crate::content::{AttrChange, Body, Delta, FsNode, Orphan};
use crate::list::Emptied;
use crate::orphan::directory_of;
use crate::{Error, Ino, list};
use base::counted::Counted;
use base::sync::WriteGuard;
use engine::{Need, Node, Op, Slot};

/// A file of more blocks, and more than are free, is cut at once.
const KEPT_BLOCKS: u64 = 16;

const LOST: &str = "blocks that only this names are lost";
const CUT_FAILED: &str = "it was beyond the end of a truncation that failed";

impl Files {
    /// Whether files can be of this size, and changed at all.
    pub(crate) fn check_size(&self, size: u64) -> Result<(), Error> {
        self.check_writable()?;
        match size > SIZE_MAX {
            true => Err(Error::FileTooLarge),
            false => Ok(()),
        }
    }

    /// Sets a file's size. What is cut off is freed, what is added reads as zeros.
    pub(crate) fn truncate(&self, ino: Ino, size: u64) -> Result<(), Error> {
        self.check_size(size)?;
        let state = self.use_file(ino)?;
        let exclusive = self.lock_to_change(&state)?;
        self.set_size(&state, size, &exclusive)
    }

    /// Sets the size under the exclusive I/O lock.
    pub(super) fn set_size(
        &self,
        state: &Counted<FileState>,
        size: u64,
        _exclusive: &WriteGuard<'_, ()>,
    ) -> Result<(), Error> {
        self.touch(state, u64::MAX)?;
        let old = state.size();
        if size > old {
            // No write touches the last page, so it must be settled even if it stays the last.
            self.extend_tail(state, u64::MAX)?;
        } else {
            self.shrink(state, size)?;
        }
        state.meta.lock().size = size;
        self.note_ahead(state);
        state.meta.lock().owe_times();
        Ok(())
    }

    /// Makes a file shorter. If that fails and nothing of it was logged, the file keeps its size: a smaller one
    /// is logged here or never, so that memory must not show what no later fsync makes durable. If written pages went with
    /// the attempt, so does what it grew by since its size was logged: behind that the device has what was there once.
    fn shrink(&self, state: &Counted<FileState>, size: u64) -> Result<(), Error> {
        let (old, logged) = {
            let meta = state.meta.lock();
            (meta.size, meta.logged_size)
        };
        let cut = size.div_ceil(PAGE);
        let dropped = self.drop_pages(state, cut..old.div_ceil(PAGE).max(cut));
        // Pages beyond are gone: the promise of a smaller size may not be kept otherwise.
        state.meta.lock().size = size;
        let outcome = self.shrink_to(state, size, logged);
        let mut meta = state.meta.lock();
        if outcome.is_err() && size < logged && meta.logged_size == logged && !meta.replaced {
            meta.size = old;
            if dropped.dirty > 0 {
                meta.size = old.min(logged);
                self.lost(state, &mut meta, CUT_FAILED);
            }
            let end = meta.size;
            drop(meta);
            // What the page that stays has behind it is lost, too.
            if dropped.dirty > 0 && !end.is_multiple_of(PAGE) {
                let behind = (end % PAGE) as usize..PAGE as usize;
                self.pages.zero(state.key, end / PAGE, behind);
            }
            self.note_ahead(state);
            return outcome;
        }
        drop(meta);
        // Only now: where the file keeps its size these bytes are its own.
        if !size.is_multiple_of(PAGE) {
            let from = (size % PAGE) as usize;
            self.pages.zero(state.key, size / PAGE, from..PAGE as usize);
        }
        outcome
    }

    /// Logs a smaller size, if that must be, and frees what lies beyond.
    fn shrink_to(&self, state: &Counted<FileState>, size: u64, logged: u64) -> Result<(), Error> {
        let replaced = state.meta.lock().replaced;
        if replaced || (size == 0 && self.replace(state)?) {
            return Ok(());
        }
        let beyond = || -> Result<bool, Error> {
            let content = state.node.read()?;
            let range = size.div_ceil(PAGE)..extents::PAGE_LIMIT;
            Ok(!extents::lookup(&self.store, content.inode()?, range, 1)?.is_empty())
        };
        if size < logged || beyond()? {
            self.cut(state, size)?;
        }
        Ok(())
    }

    /// Marks a file as being rewritten from nothing, if its old content can be replaced in one
    /// record; false when it must be cut right away.
    fn replace(&self, state: &Counted<FileState>) -> Result<bool, Error> {
        let content = state.node.read()?;
        let inode = content.inode()?;
        let worth_it = match &inode.body {
            Body::Inline(bytes) => !bytes.is_empty() || inode.size > 0,
            Body::Extents(list) => {
                let any = !list.is_empty() || inode.tail.is_some();
                inode.size > 0 && any && inode.blocks <= extents::FREE_MAX
            }
            _ => false,
        };
        let worth_it = worth_it && inode.seldom.pending_truncate.is_none();
        // Who makes room by that has it at once.
        let in_the_way =
            || inode.blocks > KEPT_BLOCKS && inode.blocks > self.store.space().free_blocks;
        let worth_it = worth_it && !in_the_way();
        let mut meta = state.meta.lock();
        if worth_it {
            meta.begin_replacement(self.now_ns());
        }
        Ok(worth_it)
    }

    /// Logs a smaller size and frees what lies beyond, in one record or a chain of them.
    fn cut(&self, state: &Counted<FileState>, size: u64) -> Result<(), Error> {
        let page = size.div_ceil(PAGE);
        let new_size = size.min(state.meta.lock().logged_size);
        {
            let (mut op, slot) = self.begin(state, Need::Reclaim)?;
            let inode = op.peek(slot).inode()?;
            let blocks = inode.blocks;
            let shorter = match &inode.body {
                Body::Inline(bytes) if bytes.len() as u64 > size => Some(size as u32),
                _ => None,
            };
            let tail = tail::cut(inode, size);
            let step = match extents::plan_cut(&mut op, slot, page) {
                Err(error) if error.is_damage() => None,
                step => Some(step?),
            };
            if let Some(step) = step.filter(|step| step.done) {
                if let Some(len) = shorter {
                    op.apply(slot, Delta::InlineLen(len));
                }
                if let Some(tail) = tail {
                    op.apply(slot, tail);
                }
                let attrs = AttrChange {
                    blocks: Some(blocks.saturating_sub(step.freed)),
                    ..AttrChange::default()
                };
                step.apply(&mut op);
                if size == 0 {
                    // What is written next may be small enough for the inode.
                    op.apply(slot, Delta::Body(Body::Inline(Vec::new())));
                    state.meta.lock().keep_extents = false;
                }
                self.commit_attrs(state, op, slot, attrs, Some(new_size));
                return Ok(());
            }
        }
        self.begin_chain(state, size, new_size)?;
        self.finish_cut(state)
    }

    /// Carries a cut to its end, under the exclusive I/O lock. One that failed is carried on before the file
    /// grows: who finishes it later would free what was added.
    pub(super) fn finish_cut(&self, state: &Counted<FileState>) -> Result<(), Error> {
        self.finish_chain(&state.node)?;
        let epoch = self.store.epoch();
        let mut meta = state.meta.lock();
        meta.changed = meta.changed.max(epoch);
        meta.cutting = false;
        Ok(())
    }

    /// Locks an inode together with the orphan directory that is to list it.
    fn begin_with_orphans(
        &self,
        node: &Node<FsNode>,
    ) -> Result<(Op<'_, FsNode>, Slot, Slot), Error> {
        let directory = self.store.get(directory_of(node.nid()))?;
        let mut op = self.store.begin(Need::Reclaim)?;
        let slots = op.lock_sorted(&[&directory, node])?;
        Ok((op, slots[0], slots[1]))
    }

    /// The first record of a chain: the size is cut, and the intent to free the rest is noted.
    fn begin_chain(
        &self,
        state: &Counted<FileState>,
        size: u64,
        new_size: u64,
    ) -> Result<(), Error> {
        let (mut op, directory, slot) = self.begin_with_orphans(&state.node)?;
        let ino = state.ino();
        let orphan = Orphan {
            nid: ino,
            generation: state.key.generation,
        };
        let spot = list::spot::<Orphan>(&mut op, directory, ino.0, |o| o.nid == ino)?;
        // One without a name is listed already.
        let addition = match spot.found {
            Some(_) => None,
            None => Some(spot.put(&mut op, orphan)?),
        };
        let tail = tail::cut(op.peek(slot).inode()?, size);
        if let Some(addition) = addition {
            addition.finish(&mut op);
        }
        if let Some(tail) = tail {
            op.apply(slot, tail);
        }
        let attrs = AttrChange {
            pending_truncate: Some(Some(size)),
            ..AttrChange::default()
        };
        self.commit_attrs(state, op, slot, attrs, Some(new_size));
        state.meta.lock().cutting = true;
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn test_begin_chain(
        &self,
        state: &Counted<FileState>,
        size: u64,
    ) -> Result<(), Error> {
        self.begin_chain(state, size, size)
    }

    /// Carries on a chain, to its end. Whoever calls it keeps others from the file's data;
    /// recovery does for inodes with a pending truncate.
    pub(crate) fn finish_chain(&self, node: &Node<FsNode>) -> Result<(), Error> {
        let ino = node.nid();
        let mut damaged = false;
        loop {
            let (mut op, directory, slot) = self.begin_with_orphans(node)?;
            let inode = op.peek(slot).inode()?;
            let Some(size) = inode.seldom.pending_truncate else {
                return Ok(());
            };
            let (blocks, unlinked) = (inode.blocks, inode.nlink == 0);
            let page = size.div_ceil(PAGE);
            let step = match std::mem::take(&mut damaged) {
                true => extents::plan_leak(&mut op, slot, page)?,
                false => match extents::plan_cut(&mut op, slot, page) {
                    Err(error) if error.is_damage() => {
                        tracing::error!("inode {ino}: {error}; {LOST}");
                        damaged = true;
                        continue;
                    }
                    step => step?,
                },
            };
            let done = step.done;
            let delist = match done && !unlinked {
                true => {
                    let spot = list::spot::<Orphan>(&mut op, directory, ino.0, |o| o.nid == ino)?;
                    match spot.found.is_some() {
                        true => Some(spot.remove(&mut op, Emptied::Goes)?),
                        false => None,
                    }
                }
                false => None,
            };
            let attrs = AttrChange {
                blocks: Some(blocks.saturating_sub(step.freed)),
                pending_truncate: done.then_some(None),
                ..AttrChange::default()
            };
            step.apply(&mut op);
            if let Some(delist) = delist {
                delist.finish(&mut op);
            }
            op.apply(slot, Delta::Attrs(attrs));
            op.commit();
            if done {
                return Ok(());
            }
        }
    }

    /// Frees all data of an inode that is about to be deleted, in a chain of records: the
    /// inode is among the orphans, so recovery starts it again. Dirty pages are dropped. Where
    /// a tree is damaged, what hangs there is reported and leaked, so that deletion ends.
    pub(crate) fn release_data(&self, ino: Ino) -> Result<(), Error> {
        let state = match self.use_file(ino) {
            Ok(state) => state,
            Err(Error::Stale(_) | Error::Invalid(_) | Error::IsADirectory) => return Ok(()),
            Err(error) => return Err(error),
        };
        let _exclusive = self.lock_alone(&state);
        let size = {
            let mut meta = state.meta.lock();
            meta.dead = true;
            meta.size
        };
        self.drop_pages(&state, 0..size.div_ceil(PAGE));
        loop {
            match self.release_step(&state) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) if error.is_damage() => {
                    tracing::error!("inode {ino}: {error}; {LOST}");
                    return self.leak(&state);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// One record of `release_data`; true when nothing is left, of a cut that stopped half way neither.
    fn release_step(&self, state: &Counted<FileState>) -> Result<bool, Error> {
        let (mut op, slot) = self.begin(state, Need::Reclaim)?;
        let inode = op.peek(slot).inode()?;
        let (blocks, cutting) = (inode.blocks, inode.seldom.pending_truncate.is_some());
        let step = extents::plan_cut(&mut op, slot, 0)?;
        let (done, freed) = (step.done, step.freed);
        step.apply(&mut op);
        let ends_cut = done && cutting;
        if freed > 0 || ends_cut {
            let attrs = AttrChange {
                blocks: Some(blocks.saturating_sub(freed)),
                pending_truncate: ends_cut.then_some(None),
                ..AttrChange::default()
            };
            op.apply(slot, Delta::Attrs(attrs));
        }
        op.commit();
        Ok(done)
    }

    /// Takes the body away from an inode without freeing what it names.
    fn leak(&self, state: &Counted<FileState>) -> Result<(), Error> {
        let (mut op, slot) = self.begin(state, Need::Reclaim)?;
        op.apply(slot, Delta::Body(Body::Inline(Vec::new())));
        let attrs = AttrChange {
            blocks: Some(0),
            pending_truncate: Some(None),
            ..AttrChange::default()
        };
        op.apply(slot, Delta::Attrs(attrs));
        op.commit();
        Ok(())
    }
}

//! `fallocate`: allocate, punch, zero. Each is a chain of bounded records, not one atomic
//! step: a crash may leave a part of the range done.
//!
//! Invariant: a page leaves the cache unwritten only when nothing of it is left behind that: its block, its tail, its
//! inline body have gone by a record, or it had none. Whatever fails before that leaves what was written; else
//! old content would be seen again, and no sync would say so.

use super::extents::{self, CHANGES_MAX, Change, PAGE_LIMIT};
use super::file::{FileState, OpenFile};
use super::{Files, PAGE, SIZE_MAX};
use crate::Error;
use crate::content::inode::INLINE_DATA_MAX;
use crate::content::{AttrChange, Body, Delta, FileExtent};
use base::counted::Counted;
use engine::Need;
use engine::cache::{Backing, PageState};
use std::ops::Range;

/// Blocks that one record allocates.
const ALLOCATE_STEP: u64 = 1 << 16;
/// Pages of a range that may split an extent however full the array is: what that takes is nothing beside what may be freed.
const SPLIT_FREELY: u64 = 64;
/// Reservations that one record takes.
const RUNS_MAX: usize = 64;
/// Zeros for the edges of a range.
static ZEROS: [u8; PAGE as usize] = [0; PAGE as usize];

impl Files {
    /// As `fallocate(2)` with mode 0, `KEEP_SIZE`, `PUNCH_HOLE | KEEP_SIZE`, `ZERO_RANGE`
    /// with or without `KEEP_SIZE`.
    pub fn fallocate(
        &self,
        file: &OpenFile,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Result<(), Error> {
        if !file.writable() {
            return Err(Error::BadHandle);
        }
        self.check_writable()?;
        let end = offset.checked_add(len).filter(|&end| end <= SIZE_MAX);
        let Some(end) = end else {
            return Err(Error::FileTooLarge);
        };
        if len == 0 {
            return Err(Error::Invalid("an empty range"));
        }
        let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let change = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            0 => Files::allocate,
            libc::FALLOC_FL_PUNCH_HOLE if keep_size => Files::punch,
            libc::FALLOC_FL_ZERO_RANGE => Files::zero,
            _ => return Err(Error::Unsupported("this mode of fallocate")),
        };
        let state = &file.state;
        let exclusive = self.lock_to_change(state)?;
        self.touch(state, end)?;
        let changed = change(self, state, offset..end);
        self.note_ahead(state);
        state.meta.lock().owe_times();
        changed.inspect_err(|_| self.spare_inline(state))?;
        if mode & libc::FALLOC_FL_PUNCH_HOLE == 0 && !keep_size && end > state.size() {
            self.set_size(state, end, &exclusive)?;
        }
        Ok(())
    }

    /// The body must be extents: what is in the cache goes home, an inline body and the tail move out.
    fn settle_extents(&self, state: &Counted<FileState>) -> Result<(), Error> {
        self.leave_inline(state, INLINE_DATA_MAX as u64 + 1)?;
        self.dirty_tail(state)?;
        state.meta.lock().keep_extents = true;
        self.flush_locked(state)
    }

    /// Gives every hole of the range blocks that read as zeros.
    fn allocate(&self, state: &Counted<FileState>, bytes: Range<u64>) -> Result<(), Error> {
        let pages = super::pages_of(bytes);
        if self.lacks_more(state, &pages, self.store.space().free_blocks)? {
            // Hopeless: neither fill the disk first, nor move what is in the inode out.
            return Err(Error::NoSpace);
        }
        self.settle_extents(state)?;
        let mut at = pages.start;
        while at < pages.end {
            at = self.allocate_step(state, at..pages.end)?;
        }
        Ok(())
    }

    /// Whether more than so many pages of a range have no block, nor are promised one. Of a file that is being replaced the old content
    /// counts: its blocks come back first.
    fn lacks_more(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
        most: u64,
    ) -> Result<bool, Error> {
        let mut missing = pages.end - pages.start;
        let is_replaced = state.meta.lock().replaced;
        if is_replaced {
            missing = missing.saturating_sub(state.node.read()?.inode()?.blocks);
        }
        let mut at = pages.start;
        while missing > most && at < pages.end && !is_replaced {
            let content = state.node.read()?;
            let mapped =
                extents::lookup(&self.store, content.inode()?, at..pages.end, CHANGES_MAX)?;
            let has = mapped.iter().map(|extent| u64::from(extent.len)).sum();
            missing = missing.saturating_sub(has);
            at = match mapped.len() {
                CHANGES_MAX => mapped[CHANGES_MAX - 1].end(),
                _ => pages.end,
            };
        }
        if missing > most && self.pages.promised(state.key) > 0 {
            let dirty = (self.pages).dirty_pages(state.key, pages.clone(), usize::MAX);
            let promised = Some(PageState::Dirty(Backing::Promised));
            let promised = (dirty.into_iter())
                .filter(|page| self.pages.state(state.key, *page) == promised)
                .count();
            missing = missing.saturating_sub(promised as u64);
        }
        Ok(missing > most)
    }

    /// Allocates the first holes of a range in one record; returns where to go on.
    fn allocate_step(&self, state: &Counted<FileState>, pages: Range<u64>) -> Result<u64, Error> {
        let (mapped, bound) = {
            let content = state.node.read()?;
            let inode = content.inode()?;
            let bound = extents::leaf_end(&self.store, inode, pages.start)?.min(pages.end);
            let range = pages.start..bound;
            (
                extents::lookup(&self.store, inode, range, CHANGES_MAX)?,
                bound,
            )
        };
        let mut holes: Vec<Range<u64>> = Vec::new();
        let (mut at, mut blocks) = (pages.start, 0);
        let ends = mapped.iter().map(|e| (e.page, e.end()));
        // A lookup that stopped at its limit says nothing of what follows.
        let stop = match mapped.len() {
            CHANGES_MAX => None,
            _ => Some((bound, bound)),
        };
        for (start, end) in ends.chain(stop) {
            if at < start {
                let hole = at..start.min(at + (ALLOCATE_STEP - blocks));
                blocks += hole.end - hole.start;
                let cut = hole.end < start;
                at = hole.end;
                holes.push(hole);
                if cut || holes.len() == RUNS_MAX {
                    break;
                }
            }
            at = at.max(end);
        }
        if blocks > 0 {
            at = self.allocate_holes(state, &holes, blocks)?;
        }
        Ok(at)
    }

    fn allocate_holes(
        &self,
        state: &Counted<FileState>,
        holes: &[Range<u64>],
        blocks: u64,
    ) -> Result<u64, Error> {
        let mut promise = self.promise(blocks)?;
        state.meta.lock().promised += promise.give(blocks);
        let outcome = self.take_holes(state, holes);
        self.trim_promise(state);
        outcome
    }

    fn take_holes(&self, state: &Counted<FileState>, holes: &[Range<u64>]) -> Result<u64, Error> {
        let (mut changes, mut reservations) = (Vec::new(), Vec::new());
        let mut reached = holes.first().map_or(0, |h| h.start);
        let mut goal = None;
        'holes: for hole in holes {
            reached = hole.start;
            while reached < hole.end {
                if changes.len() == RUNS_MAX {
                    break 'holes;
                }
                let want = (hole.end - reached) as u32;
                let reservation = self.reserve(state, want, goal)?;
                let extent = reservation.extent();
                let pages = reached..reached + extent.len as u64;
                changes.push(Change {
                    pages,
                    with: vec![FileExtent {
                        page: reached,
                        block: extent.block,
                        len: extent.len,
                        written: false,
                    }],
                    same_blocks: false,
                });
                reservations.push(reservation);
                reached += extent.len as u64;
                goal = Some(format::Block(extent.block.0 + extent.len as u64));
            }
        }
        let size = state.meta.lock().logged_size;
        self.log_changes(state, changes, reservations, size)?;
        Ok(reached)
    }

    /// Frees the whole pages of a range and zeroes its edges. The size stays. Pages in the hole are not written first.
    fn punch(&self, state: &Counted<FileState>, bytes: Range<u64>) -> Result<(), Error> {
        self.accept_split(state, &bytes)?;
        let whole = self.zero_edges(state, bytes)?;
        if whole.is_empty() {
            return Ok(());
        }
        let mut freed = Vec::new();
        let outcome = self.free_pages(state, &whole, &mut freed);
        let gone = match &outcome {
            Ok(()) => vec![whole],
            Err(_) => freed,
        };
        for pages in gone {
            self.drop_pages(state, pages);
        }
        outcome
    }

    /// Before something is done to a few pages in the midst of others: one extent becomes two, or three, and of such there can be as many as pages.
    fn accept_split(&self, state: &Counted<FileState>, bytes: &Range<u64>) -> Result<(), Error> {
        let pages = bytes.start.div_ceil(PAGE)..(bytes.end / PAGE).min(PAGE_LIMIT);
        if pages.is_empty() || pages.end - pages.start >= SPLIT_FREELY {
            return Ok(());
        }
        let has_block = |page| Ok::<_, Error>(!self.mapped(state, page..page + 1)?.is_empty());
        match pages.start > 0 && has_block(pages.start - 1)? && has_block(pages.end)? {
            true => self.accept_extents(),
            false => Ok(()),
        }
    }

    /// Takes from pages what the inode has of them, which the cache may supersede. `freed`: those of which it has nothing any more,
    /// however this ends.
    fn free_pages(
        &self,
        state: &Counted<FileState>,
        whole: &Range<u64>,
        freed: &mut Vec<Range<u64>>,
    ) -> Result<(), Error> {
        if state.meta.lock().replaced {
            // It has nothing of the new content, and the old goes as a whole.
            return Ok(());
        }
        if whole.start == 0 && self.empty_inline(state)? {
            freed.push(0..1);
        }
        let mut at = whole.start;
        while at < whole.end {
            let bound = {
                let content = state.node.read()?;
                let inode = content.inode()?;
                let next = extents::lookup(&self.store, inode, at..whole.end, 1)?;
                let Some(first) = next.first() else { break };
                at = first.page;
                let bound = extents::leaf_end(&self.store, inode, at)?.min(whole.end);
                let mapped = extents::lookup(&self.store, inode, at..bound, usize::MAX)?;
                extents::bounded_end(&mapped, bound)
            };
            let change = Change {
                pages: at..bound,
                with: Vec::new(),
                same_blocks: false,
            };
            let size = state.meta.lock().logged_size;
            self.log_changes(state, vec![change], Vec::new(), size)?;
            freed.push(at..bound);
            at = bound;
        }
        // It may have no block.
        self.drop_tail(state, whole)
    }

    /// Makes an inline body, which is page 0, read as zeros; false if there is none.
    fn empty_inline(&self, state: &Counted<FileState>) -> Result<bool, Error> {
        if !state.node.read()?.inode()?.has_inline() {
            return Ok(false);
        }
        let (mut op, slot) = self.begin(state, Need::Reclaim)?;
        op.apply(slot, Delta::Body(Body::Inline(Vec::new())));
        let size = state.meta.lock().logged_size;
        self.commit_attrs(state, op, slot, AttrChange::default(), Some(size));
        Ok(true)
    }

    /// Makes the range read as zeros, with blocks behind it.
    fn zero(&self, state: &Counted<FileState>, bytes: Range<u64>) -> Result<(), Error> {
        // First, as it may fail for want of space: nothing is zeroed then.
        self.accept_split(state, &bytes)?;
        self.allocate(state, bytes.clone())?;
        self.settle_extents(state)?;
        let whole = self.zero_edges(state, bytes)?;
        self.flush_locked(state)?;
        if !whole.is_empty() {
            self.drop_pages(state, whole.clone());
            self.unwrite(state, whole)?;
        }
        Ok(())
    }

    /// Marks the mapped pages of a range as unwritten, their blocks kept.
    fn unwrite(&self, state: &Counted<FileState>, pages: Range<u64>) -> Result<(), Error> {
        let mut at = pages.start;
        while at < pages.end {
            let mut changes = Vec::new();
            {
                let content = state.node.read()?;
                let inode = content.inode()?;
                let bound = extents::leaf_end(&self.store, inode, at)?.min(pages.end);
                let found = extents::lookup(&self.store, inode, at..bound, CHANGES_MAX)?;
                at = match found.len() {
                    CHANGES_MAX => found.last().map_or(bound, FileExtent::end),
                    _ => bound,
                };
                for extent in found.into_iter().filter(|e| e.written) {
                    changes.push(Change {
                        pages: extent.page..extent.end(),
                        with: vec![FileExtent {
                            written: false,
                            ..extent
                        }],
                        same_blocks: true,
                    });
                }
            }
            if !changes.is_empty() {
                let size = state.meta.lock().logged_size;
                self.log_changes(state, changes, Vec::new(), size)?;
            }
        }
        Ok(())
    }

    /// Writes zeros to the parts of a range that are no whole pages, as far as the file goes;
    /// returns the whole pages. A range that reaches the end of the file covers the last
    /// page.
    fn zero_edges(
        &self,
        state: &Counted<FileState>,
        bytes: Range<u64>,
    ) -> Result<Range<u64>, Error> {
        let size = state.size();
        let to_eof = bytes.end >= size;
        let first = bytes.start.div_ceil(PAGE);
        let last = match to_eof {
            true => bytes.end.div_ceil(PAGE),
            false => bytes.end / PAGE,
        };
        if !bytes.start.is_multiple_of(PAGE) {
            self.zero_edge(state, bytes.start..bytes.end.min(first * PAGE).min(size))?;
        }
        if last >= first && !to_eof {
            self.zero_edge(state, last * PAGE..bytes.end)?;
        }
        Ok(first..last.max(first).min(PAGE_LIMIT))
    }

    /// Zeroes bytes of one page, unless it is a hole anyway.
    fn zero_edge(&self, state: &Counted<FileState>, bytes: Range<u64>) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let page = bytes.start / PAGE;
        let dirty = matches!(self.pages.state(state.key, page), Some(PageState::Dirty(_)));
        let inline = page == 0 && self.is_inline(state)? && !state.meta.lock().replaced;
        let written = || -> Result<bool, Error> {
            let mapped = self.mapped(state, page..page + 1)?;
            Ok(mapped.iter().any(|e| e.written))
        };
        let logged = self.tail_page(state)? == Some(page);
        if dirty || inline || logged || written()? {
            let len = (bytes.end - bytes.start) as usize;
            self.write_locked(state, bytes.start, &ZEROS[..len])?;
        }
        Ok(())
    }
}

//! Direct writes into space of a file that holds nothing yet, holes and what was allocated, beside all that is elsewhere in it.
//!
//! ```text
//! range, shared lock ─► blocks for holes ─► the devices ─► one record maps them, or has them hold data
//! ```
//!
//! Invariants:
//! 1. As a write past the cache over blocks that hold data ([`Files::write_past`]) one holds its range and the file's shared lock, and is counted in
//!    the file, from before it looks until its record is staged. So nobody else changes the mapping of its pages: cuts and allocation are exclusive,
//!    write-back holds the range, and a page that has only a promise is refused.
//! 2. The record is staged when the data has been written, and unless a flush has failed since before that. So its commit flushes the data first.
//! 3. The record maps nothing behind the size that is logged, and logs no size.
//! 4. It leaves the shape of the file's tree as it is (`extents`, 3). Where it cannot, it is not staged: fresh blocks go back, those of the
//!    file hold nothing still, and who has the file alone does all of it anew.
//! 5. Nobody sees anything of it before the record, and all of it then: none of its blocks holds data of the file before. So a write that is over such
//!    blocks in part is done by who has the file alone.

use super::Files;
use super::extents::{self, CHANGES_MAX, Change};
use super::file::FileState;
use super::writeback::Writes;
use crate::Error;
use crate::content::{AttrChange, Body, FileExtent, FsNode, TreeId};
use crate::tree;
use base::canary::{Canary, planted};
use base::counted::Counted;
use engine::{Extent, Need, Reservation};
use format::Block;
use std::ops::Range;

/// Where pages go.
#[derive(Default)]
struct Filled<'s> {
    /// All of them, ascending.
    runs: Vec<(Block, u64)>,
    changes: Vec<Change>,
    reservations: Vec<Reservation<'s, FsNode>>,
}

impl Filled<'_> {
    fn add(&mut self, page: u64, block: Block, len: u32, is_fresh: bool) {
        self.runs.push((block, u64::from(len)));
        self.changes.push(Change {
            pages: page..page + u64::from(len),
            with: vec![FileExtent {
                page,
                block,
                len,
                written: true,
            }],
            same_blocks: !is_fresh,
        });
    }

    /// The block behind the last one.
    fn end(&self) -> Option<Block> {
        self.runs.last().map(|(block, len)| Block(block.0 + len))
    }
}

impl Files {
    /// Writes whole pages, of which `mapped` have blocks; the caller has their range and the shared lock, and has found them logged. False: it has
    /// to be done by who has the file alone.
    pub(super) fn fill(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
        mapped: &[FileExtent],
        data: &[u8],
    ) -> Result<bool, Error> {
        let filled = match self.find_room(state, pages, mapped) {
            Err(Error::NoSpace) => return Ok(false),
            filled => filled?,
        };
        let Some(filled) = filled else {
            return Ok(false);
        };
        let now = self.now();
        self.stamp(state, now);
        let storing = state.stores.begin();
        let done = match self.write_filled(state, filled, data) {
            // Nodes of metadata had no room, which the other way may not need.
            Err(Error::NoSpace) => Ok(false),
            done => done,
        };
        self.superseded(state, pages.clone(), matches!(done, Ok(true)));
        drop(storing);
        self.stamp_again(state, now);
        done
    }

    fn write_filled(
        &self,
        state: &Counted<FileState>,
        filled: Filled<'_>,
        data: &[u8],
    ) -> Result<bool, Error> {
        let flush_failures = self.store.array().flush_failures();
        let mut writes = Writes::new(data);
        writes.add(0, filled.runs.iter().copied());
        if planted(Canary::FilledBeforeWritten) {
            let done = self.log_filled(state, filled, flush_failures)?;
            self.store.commit_through(self.store.epoch())?;
            self.write_at_once(writes)?;
            return Ok(done);
        }
        self.write_at_once(writes)?;
        self.log_filled(state, filled, flush_failures)
    }

    /// Blocks for all of the pages. `None`: they are too many pieces, or some of them hold data, or the body has no mapping yet.
    fn find_room(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
        mapped: &[FileExtent],
    ) -> Result<Option<Filled<'_>>, Error> {
        let mut goal = {
            let content = state.node.read()?;
            let inode = content.inode()?;
            if !matches!(inode.body, Body::Extents(_) | Body::Tree(_)) {
                return Ok(None);
            }
            // The page before tells where the file goes on.
            let before = pages.start.saturating_sub(1)..pages.start;
            let before = extents::lookup(&self.store, inode, before, 1)?;
            before.first().map(|e| Block(e.block.0 + u64::from(e.len)))
        };
        let has: u64 = mapped.iter().map(|extent| u64::from(extent.len)).sum();
        let mut promise = match pages.end - pages.start - has {
            0 => self.store.adopt_promise(0),
            missing => self.store.promise(missing)?,
        };
        let mut filled = Filled::default();
        let mut at = pages.start;
        let mut mapped = mapped.iter().peekable();
        while at < pages.end {
            if filled.runs.len() == CHANGES_MAX {
                return Ok(None);
            }
            if let Some(extent) = mapped.next_if(|extent| extent.page == at) {
                if extent.written {
                    return Ok(None);
                }
                filled.add(at, extent.block, extent.len, false);
                at = extent.end();
                continue;
            }
            let end = mapped.peek().map_or(pages.end, |next| next.page);
            let want = (end - at).min(u64::from(u32::MAX)) as u32;
            goal = filled.end().or(goal);
            let reservation = self.store.reserve(&mut promise, want, goal)?;
            let Extent { block, len } = reservation.extent();
            filled.add(at, block, len, true);
            filled.reservations.push(reservation);
            at += u64::from(len);
        }
        Ok(Some(filled))
    }

    /// Stages the record. False, with nothing staged: invariant 4.
    fn log_filled(
        &self,
        state: &Counted<FileState>,
        filled: Filled<'_>,
        flush_failures: u64,
    ) -> Result<bool, Error> {
        let (mut op, slot) = self.begin(state, Need::Change)?;
        // The operation has begun: a flush that fails from here on finds it.
        self.check_flushes(state, flush_failures)?;
        if let (Some(first), Some(last)) = (filled.changes.first(), filled.changes.last())
            && let Body::Tree(_) = &op.peek(slot).inode()?.body
        {
            let end = tree::high_in(&op, slot, TreeId::Body, first.pages.start)?;
            if end.is_some_and(|end| end < last.pages.end) {
                return Ok(false);
            }
        }
        let plan = extents::plan(&self.store, &mut op, slot, filled.changes)?;
        if !plan.keeps_shape() {
            return Ok(false);
        }
        for reservation in filled.reservations {
            op.take(reservation);
        }
        let attrs = AttrChange {
            blocks: Some(self.blocks_after(&op, slot, plan.gained())),
            ..AttrChange::default()
        };
        plan.apply(&mut op);
        self.commit_attrs(state, op, slot, attrs, None);
        Ok(true)
    }
}

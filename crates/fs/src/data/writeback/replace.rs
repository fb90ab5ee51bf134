//! The new content of a file that was cut to nothing takes the place of the old in one record.

use super::inline::inline_max;
use super::layout::{Layout, changes_of, part_of};
use crate::Error;
use crate::content::{AttrChange, Body, Delta};
use crate::data::Files;
use crate::data::extents::{self, PAGE_LIMIT};
use crate::data::file::FileState;
use crate::data::tail::How;
use base::counted::Counted;
use engine::Need;
use format::BLOCK_SIZE;

/// Pages of a rewritten file that replace the old content in one record: 64 MiB.
const REPLACE_MAX: usize = 16 << 10;
/// The same in bytes.
pub(in super::super) const REPLACED_MAX: u64 = (REPLACE_MAX * BLOCK_SIZE) as u64;

impl Files {
    /// Puts the new content of a replaced file in place of the old in one record, so that a
    /// crash leaves one or the other. More than [`REPLACE_MAX`] pages, or pages scattered over
    /// more than [`CHANGES_MAX`] runs of blocks, are not kept together: then the old content
    /// goes first.
    pub(super) fn flush_replaced(
        &self,
        state: &Counted<FileState>,
        size: u64,
        how: How,
    ) -> Result<Option<u64>, Error> {
        let keep_extents = state.meta.lock().keep_extents;
        let pages = self
            .pages
            .dirty_pages(state.key, 0..PAGE_LIMIT, REPLACE_MAX + 1);
        let small = self.is_small_sync(how, &pages);
        if size <= inline_max(how)
            && !keep_extents
            && let Some(need) = self.need_inline(state, size)?
        {
            let copies = self.copy_pages(state, pages)?;
            let bytes = match &copies {
                Some(copies) => copies.data[..size as usize].to_vec(),
                None => vec![0; size as usize],
            };
            self.log_replacement(state, Body::Inline(bytes), size, need)?;
            self.inlined(state, copies, size);
            return Ok(None);
        }
        if pages.len() <= REPLACE_MAX && self.store_replacement(state, &pages, size, small)? {
            return Ok(None);
        }
        self.log_replacement(state, Body::Inline(Vec::new()), 0, Need::Reclaim)?;
        Ok(Some(0))
    }

    /// Replaces the body by one without extents.
    pub(super) fn log_replacement(
        &self,
        state: &Counted<FileState>,
        body: Body,
        size: u64,
        need: Need,
    ) -> Result<(), Error> {
        let (mut op, slot) = self.begin(state, need)?;
        extents::free_inline_extents(&mut op, slot)?;
        op.apply(slot, Delta::Body(body));
        let attrs = AttrChange {
            blocks: Some(0),
            ..AttrChange::default()
        };
        self.commit_attrs(state, op, slot, attrs, Some(size));
        state.meta.lock().end_replacement();
        Ok(())
    }

    /// Writes all pages to fresh blocks and replaces the body; false, with nothing changed, when
    /// the blocks are too scattered for one record.
    fn store_replacement(
        &self,
        state: &Counted<FileState>,
        pages: &[u64],
        size: u64,
        at_once: bool,
    ) -> Result<bool, Error> {
        let mut layout = self.lay_out(state, pages, true)?;
        layout.at_once = at_once;
        if layout.covered < pages.len() {
            self.unreserve(state, layout);
            return Ok(false);
        }
        let outcome = self.replace_by(state, &mut layout, pages, size);
        if outcome.is_err() {
            self.unreserve(state, layout);
        }
        outcome.map(|()| true)
    }

    /// Takes the layout's blocks, unless it fails.
    fn replace_by(
        &self,
        state: &Counted<FileState>,
        layout: &mut Layout<'_>,
        pages: &[u64],
        size: u64,
    ) -> Result<(), Error> {
        let mut stamps = Vec::with_capacity(pages.len());
        for part in pages.chunks(self.batch_pages()) {
            if let Some(copies) = self.copy_pages(state, part.to_vec())? {
                let at = stamps.len()..stamps.len() + part.len();
                let segments = part_of(&layout.segments, at);
                self.write_segments(&segments, &copies.data, layout)?;
                stamps.extend(copies.stamps);
            }
        }
        let (mut op, slot) = self.begin(state, Need::Accepted)?;
        self.check_flushes(state, layout.flush_failures)?;
        extents::free_inline_extents(&mut op, slot)?;
        let plan = extents::plan_replacement(&self.store, slot, changes_of(&layout.segments))?;
        let has_tail = op.peek(slot).inode()?.tail.is_some();
        for reservation in layout.reservations.drain(..) {
            op.take(reservation);
        }
        let attrs = AttrChange {
            blocks: Some(plan.gained().max(0) as u64),
            ..AttrChange::default()
        };
        if has_tail {
            op.apply(slot, Delta::EndTail);
        }
        plan.apply(&mut op);
        self.commit_attrs(state, op, slot, attrs, Some(size));
        state.meta.lock().end_replacement();
        self.complete_pages(state, pages, &stamps);
        Ok(())
    }
}

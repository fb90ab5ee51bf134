//! Write-back: dirty pages to blocks in few large writes, then one record for each batch.
//!
//! Called with the file's I/O lock held exclusively, or shared together with its flusher lock: nobody else
//! allocates for the same pages, and size and mapping stay. Pages may be overwritten meanwhile (see `write`).
//!
//! What a sync writes to new blocks, if it is little, is neither written nor flushed before its record is: the record vouches for it
//! ([`engine::Op::vouch`]), whoever leads the commit writes both, and one flush makes both durable.
//!
//! When a write fails the failure is latched on the file, and what does not depend on it is written all the same (`rescue`). The other pages stay dirty, and are
//! tried again, until the last handle is closed, or for half a minute if it is closed already; then they are dropped (see `settle_failed`). Until then they have their room: blocks that were
//! reserved for them and are not used are promised to them again, and nobody else can have them in between (`Files::take_back`).
//! What a record vouches for is clean as soon as that is staged; if its write fails, the commit does, and the store with it.

mod inline;
mod layout;
mod replace;
mod rescue;
mod through;

pub(super) use layout::{Layout, Parts, Writes};
pub(super) use replace::REPLACED_MAX;

use super::bounce::Bounce;
use super::extents::{self, Change, PAGE_LIMIT};
use super::file::FileState;
use super::fsync::FLUSH_FAILED;
use super::meta::NewTimes;
use super::pace::piece_pages;
use super::ranges::Mode;
use super::tail::{How, whole_tail};
use super::{Files, PAGE};
use crate::Error;
use crate::content::inode::INLINE_DATA_MAX;
use crate::content::{AttrChange, Body, Delta, FileExtent, FsNode};
use base::atomic::{Ordering, fence};
use base::canary::{Canary, planted};
use base::counted::Counted;
use device::{Durability, Io};
use engine::cache::{Backing, PageState, Stamp};
use engine::{Epoch, Need, NewData, Op, Reservation, Slot};
use format::BLOCK_SIZE;
use inline::inline_max;
use layout::{Segment, Target, blocks_written, changes_of, new_data};
use rescue::Rescue;
use std::ops::Range;

/// Dirty pages that one batch takes at most; see [`Files::batch_pages`].
const BATCH_MAX: usize = 1024;
const BATCH_MIN: usize = 64;
pub(super) const FLUSH_FAILED_MEANWHILE: &str = "a flush failed while it was written";

/// Bytes for which one record vouches, and runs of blocks: beyond that a flush more costs little beside the data, and recovery
/// would read much.
const VOUCHED_MAX: usize = 128 << 10;
const VOUCHED_RUNS: usize = 16;

/// What an operation logs of a file, and what had been written of it before the record was staged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logged {
    size: Option<u64>,
    times: NewTimes,
    persisted_ns: u64,
    written_in_place: u64,
}

/// A copy of dirty pages.
pub(super) struct Copies<'a> {
    pub(super) pages: Vec<u64>,
    pub(super) stamps: Vec<Stamp>,
    pub(super) data: Bounce<'a>,
}

impl Files {
    /// Dirty pages that are copied at once for writing them: few in a small cache, because the
    /// copies come on top of it.
    pub(super) fn batch_pages(&self) -> usize {
        (self.pages.capacity() / 64).clamp(BATCH_MIN, BATCH_MAX)
    }

    /// Writes back one file: its dirty pages as they are now, then its size. Times alone stay
    /// in memory. Nothing is flushed or committed.
    pub(super) fn flush_file(&self, state: &Counted<FileState>) -> Result<(), Error> {
        self.flush_file_by(state, How::Home)
    }

    /// As `flush_file`, but a page may be logged instead, if `how` says so. Then one that has begun since the caller came does for it, too: of many that
    /// sync one file each would write what the others have written over meanwhile.
    pub(super) fn flush_file_by(&self, state: &Counted<FileState>, how: How) -> Result<(), Error> {
        // What the caller has made dirty is seen by whoever takes a later number.
        fence(Ordering::SeqCst);
        let mut before = state.flushes.load(Ordering::SeqCst);
        if planted(Canary::FlushUnderWayCovers) && state.flusher.try_lock().is_none() {
            before = before.wrapping_sub(1);
        }
        let mut turn = state.flusher.lock();
        if how != How::Home && turn.wrapping_sub(before).cast_signed() > 0 {
            return Ok(());
        }
        let number = state.flushes.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        fence(Ordering::SeqCst);
        let began_ns = self.now_ns();
        // What is appended from now on is not waited for. Not while pieces end: the size is that of what is before one that was refused,
        // until that has gone through the cache.
        let end = {
            let _shared = self.lock_ended(state);
            state.size().div_ceil(PAGE)
        };
        self.flush_shared(state, 0..end, how)?;
        self.fails_no_more(state);
        if how == How::Home {
            self.pages.written_back(state.key, began_ns);
        }
        *turn = number;
        Ok(())
    }

    /// Writes back pages under the shared I/O lock; the caller has the file's turn.
    fn flush_shared(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
        how: How,
    ) -> Result<(), Error> {
        let (mut next, mut failed) = (Some(pages.start), None);
        while let Some(from) = next {
            let pages = from..pages.end.max(from);
            let hold = || self.hold(state, pages.clone(), Mode::Home);
            let mut range = self.pages.is_dirty(state.key).then(hold);
            let _shared = loop {
                let shared = self.lock_ended(state);
                if range.is_some() || !self.pages.is_dirty(state.key) {
                    break shared;
                }
                drop(shared);
                range = Some(hold());
            };
            // Without a range nothing was dirty just now: what is by now was overwritten, and is the next one's.
            let take = match range {
                Some(_) => Take::Dirty,
                None => Take::Nothing,
            };
            next = self.flush_or_rescue(state, pages, (how, take), &mut failed);
        }
        Rescue::outcome(failed)
    }

    /// As `flush_file`, under the exclusive I/O lock.
    pub(super) fn flush_locked(&self, state: &Counted<FileState>) -> Result<(), Error> {
        self.flush_locked_by(state, How::Home)
    }

    /// As `flush_file`, but only the pages of a range; and those before it that are not logged, so that no block is mapped
    /// behind the size that is: who makes the file longer after a crash would find in it what is there. Content that is
    /// [kept together](Self::is_kept_together) stays.
    pub(super) fn flush_range(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
    ) -> Result<(), Error> {
        let _turn = state.flusher.lock();
        let logged = state.meta.lock().logged_size / PAGE;
        self.flush_shared(state, pages.start.min(logged)..pages.end, How::Early)
    }

    /// As `flush_range`, under the exclusive I/O lock; all of it, if its content takes the place of another one.
    pub(super) fn flush_range_locked(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
    ) -> Result<(), Error> {
        let logged = state.meta.lock().logged_size / PAGE;
        self.flush_alone(state, pages.start.min(logged)..pages.end, How::Home)
    }

    /// As `flush_locked`, in the middle of a write up to `end`: content that this write takes out of the inode
    /// is not put there again, clean, as if it could stay.
    pub(super) fn flush_within(&self, state: &Counted<FileState>, end: u64) -> Result<(), Error> {
        let how = match end <= INLINE_DATA_MAX as u64 {
            true => How::Home,
            false => How::Blocks,
        };
        self.flush_locked_by(state, how)
    }

    fn flush_locked_by(&self, state: &Counted<FileState>, how: How) -> Result<(), Error> {
        self.flush_alone(state, 0..PAGE_LIMIT, how)?;
        self.fails_no_more(state);
        Ok(())
    }

    fn flush_alone(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
        how: How,
    ) -> Result<(), Error> {
        let (mut next, mut failed) = (Some(pages.start), None);
        while let Some(from) = next {
            let pages = from..pages.end.max(from);
            next = self.flush_or_rescue(state, pages, (how, Take::Dirty), &mut failed);
        }
        Rescue::outcome(failed)
    }

    fn try_flush_pass(
        &self,
        state: &Counted<FileState>,
        range: Range<u64>,
        how: How,
        take: Take,
    ) -> Result<Option<u64>, Error> {
        let (size, logged_size, replaced, keep_extents) = {
            let meta = state.meta.lock();
            if meta.dead {
                return Ok(None);
            }
            (
                meta.size,
                meta.logged_size,
                meta.replaced,
                meta.keep_extents,
            )
        };
        if replaced {
            if how == How::Early && self.is_kept_together(state, 0) {
                return Ok(None);
            }
            return self.flush_replaced(state, size, how);
        }
        // Of what is not logged yet, the first page that an earlier batch has left or that was written since.
        let dirty = |pages, most| self.pages.dirty_pages(state.key, pages, most);
        let before = dirty(logged_size / PAGE..range.start, 1).first().copied();
        let batch = self.batch_pages();
        let mut pages = match take {
            Take::Dirty => dirty(range.clone(), batch + 1),
            Take::Nothing => Vec::new(),
        };
        // Cut and written again between two passes: that first, or it would be mapped behind the size that is.
        if let Some(first) = before
            && !pages.is_empty()
        {
            return Ok(Some(first));
        }
        let outside = || dirty(range.end..PAGE_LIMIT, 1).first().copied();
        let beyond = pages.get(batch).copied().or_else(outside);
        pages.truncate(batch);
        let small = range.start == 0 && beyond.is_none() && self.is_small_sync(how, &pages);
        if size <= inline_max(how)
            && !keep_extents
            && self.is_inline(state)?
            && let Some(need) = self.need_inline(state, size)?
        {
            if !pages.is_empty() || size != logged_size {
                self.flush_inline(state, size, need)?;
            }
            return Ok(None);
        }
        if let (How::Logged | How::Alone, 0, &[page], None) =
            (how, range.start, pages.as_slice(), beyond)
            && self.log_page(state, page, size)?
        {
            return Ok(None);
        }
        let synced = matches!(how, How::Logged | How::Alone) && range.start == 0;
        if synced
            && beyond.is_none()
            && let Some(appended) = self.log_append(state, &pages, size)?
        {
            return Ok(appended.left);
        }
        let Some(copies) = self.copy_pages(state, pages)? else {
            let limit = size_limit(size, before.or(beyond));
            if limit > logged_size {
                self.log_changes(state, Vec::new(), Vec::new(), limit)?;
            }
            return Ok(None);
        };
        let mut layout = self.lay_out(state, &copies.pages, false)?;
        let covered = layout.covered;
        let done = &copies.pages[..covered];
        let left = copies.pages.get(covered).copied();
        let rest = left.or(beyond);
        let synced = synced && rest.is_none();
        layout.at_once = synced && small;
        if synced && how == How::Alone && (small || !self.keeps_pace()) {
            layout.durability = self.best_alone(&layout);
        }
        let limit = size_limit(size, rest).max(logged_size);
        if synced {
            layout = self.vouch_if_possible(state, layout, limit)?;
        }
        let last = done.last().map_or(range.start, |p| p + 1);
        let Copies {
            pages,
            stamps,
            data,
        } = copies;
        match layout.durability {
            Durability::Checked => self.store_with_record(state, layout, data, limit, None)?,
            _ => self.store(state, layout, &data, limit)?,
        }
        self.complete_pages(state, &pages[..covered], &stamps[..covered]);
        let more = !self
            .pages
            .dirty_pages(state.key, last..range.end, 1)
            .is_empty();
        Ok(more.then_some(last))
    }

    pub(super) fn is_inline(&self, state: &Counted<FileState>) -> Result<bool, Error> {
        let content = state.node.read()?;
        Ok(matches!(content.inode()?.body, Body::Inline(_)))
    }

    pub(super) fn copy_pages(
        &self,
        state: &Counted<FileState>,
        pages: Vec<u64>,
    ) -> Result<Option<Copies<'_>>, Error> {
        if pages.is_empty() {
            return Ok(None);
        }
        let mut data = self.memory.take(pages.len() * BLOCK_SIZE);
        let mut stamps = Vec::with_capacity(pages.len());
        for (&page, out) in pages.iter().zip(data.chunks_mut(BLOCK_SIZE)) {
            match self.pages.copy_dirty(state.key, page, out) {
                Some((stamp, _)) => stamps.push(stamp),
                // Pages are cleaned and dropped only under the locks, and the range, that the caller holds.
                None => return Err(Error::Invalid("a dirty page vanished")),
            }
        }
        Ok(Some(Copies {
            pages,
            stamps,
            data,
        }))
    }

    pub(super) fn complete_pages(
        &self,
        state: &Counted<FileState>,
        pages: &[u64],
        stamps: &[Stamp],
    ) {
        for (&page, &stamp) in pages.iter().zip(stamps) {
            self.pages.complete(state.key, page, stamp);
        }
        self.not_logged(state);
    }

    /// Writes laid-out pages to their blocks and logs what changed.
    fn store(
        &self,
        state: &Counted<FileState>,
        layout: Layout<'_>,
        data: &[u8],
        size: u64,
    ) -> Result<(), Error> {
        let written = self
            .move_inline(state, &layout)
            .and_then(|()| self.write_segments(&layout.segments, data, &layout));
        let ((), layout) = self.or_unreserve(state, layout, written)?;
        self.log_stored(state, layout, size)
    }

    /// Stores what a sync adds to a file but for its last page, which is logged, as the next sync is likely to write more
    /// of it: then no block is written twice. `None`, with nothing done: that is not what these pages are.
    fn log_append(
        &self,
        state: &Counted<FileState>,
        pages: &[u64],
        size: u64,
    ) -> Result<Option<Appended>, Error> {
        let Some((&last, whole)) = pages.split_last().filter(|(_, whole)| !whole.is_empty()) else {
            return Ok(None);
        };
        // What can be told before blocks are reserved: who gives them back may not get them again.
        let little = whole.len() * BLOCK_SIZE <= VOUCHED_MAX && self.store.may_vouch();
        if !little || !self.may_be_tail(state, last, whole, size)? {
            return Ok(None);
        }
        let Some(copies) = self.copy_pages(state, pages.to_vec())? else {
            return Ok(None);
        };
        let mut layout = self.lay_out(state, whole, false)?;
        layout.at_once = true;
        let covered = layout.covered;
        let limit = match covered == whole.len() {
            true => size,
            false => size_limit(size, Some(whole[covered])),
        };
        layout = self.vouch_if_possible(state, layout, limit)?;
        let Copies {
            pages,
            stamps,
            data,
        } = copies;
        if limit < size || layout.durability != Durability::Checked {
            // Blocks are scattered. The rest has its turn by itself.
            let logged_size = state.meta.lock().logged_size;
            let limit = size_limit(size, Some(pages[covered])).max(logged_size);
            layout.durability = Durability::Volatile;
            self.store(state, layout, &data[..covered * BLOCK_SIZE], limit)?;
            self.complete_pages(state, &pages[..covered], &stamps[..covered]);
            return Ok(Some(Appended {
                left: Some(pages[covered]),
            }));
        }
        let end = (size % PAGE) as usize;
        let tail = whole_tail(last, &data[covered * BLOCK_SIZE..][..end]);
        self.store_with_record(state, layout, data, size, Some(tail))?;
        self.complete_pages(state, &pages[..covered], &stamps[..covered]);
        self.stays_logged(state);
        Ok(Some(Appended { left: None }))
    }

    /// A layout whose record vouches for what is written, if it may and one follows.
    fn vouch_if_possible<'s>(
        &self,
        state: &Counted<FileState>,
        layout: Layout<'s>,
        size: u64,
    ) -> Result<Layout<'s>, Error> {
        let vouched = self.is_vouched(state, &layout, size);
        let (vouched, mut layout) = self.or_unreserve(state, layout, vouched)?;
        if vouched {
            layout.durability = Durability::Checked;
        }
        Ok(layout)
    }

    /// Gives an inline body a block of its own before extents take its place that do not cover it. A write has
    /// made its page dirty before it dirties others, so that it goes home with them or before: what is left for this
    /// are writers and cuts between the passes of one write-back.
    fn move_inline(&self, state: &Counted<FileState>, before: &Layout<'_>) -> Result<(), Error> {
        let covered = before.segments.iter().any(|s| s.pages.contains(&0));
        let (replaced, logged_size) = {
            let meta = state.meta.lock();
            (meta.replaced, meta.logged_size)
        };
        if covered || replaced {
            return Ok(());
        }
        let mut content = self.memory.take(BLOCK_SIZE);
        match &state.node.read()?.inode()?.body {
            Body::Inline(bytes) if !bytes.is_empty() => {
                let (body, rest) = content.split_at_mut(bytes.len());
                body.copy_from_slice(bytes);
                rest.fill(0);
            }
            _ => return Ok(()),
        }
        let has_promise =
            self.pages.state(state.key, 0) == Some(PageState::Dirty(Backing::Promised));
        let mut promise = self.promise(!has_promise as u64)?;
        state.meta.lock().promised += promise.give(1);
        let mut layout = self.lay_out(state, &[0], false)?;
        layout.at_once = before.at_once;
        self.store(state, layout, &content, logged_size)
    }

    /// How much of this size may be logged: not more than what is home.
    fn size_home(&self, state: &Counted<FileState>, size: u64) -> u64 {
        let logged_size = state.meta.lock().logged_size;
        let pages = logged_size / PAGE..PAGE_LIMIT;
        let dirty = self.pages.dirty_pages(state.key, pages, 1);
        size_limit(size, dirty.first().copied()).max(logged_size)
    }

    /// Whether a record follows what a sync writes that can vouch for it.
    fn is_vouched(
        &self,
        state: &Counted<FileState>,
        layout: &Layout<'_>,
        size: u64,
    ) -> Result<bool, Error> {
        let bytes: usize = layout.segments.iter().map(Segment::bytes).sum();
        if bytes > VOUCHED_MAX || layout.segments.len() > VOUCHED_RUNS || !self.store.may_vouch() {
            return Ok(false);
        }
        let tail = self.stored_tail(state, layout)?;
        Ok(self.needs_record(state, layout, tail, size))
    }

    /// The page of the tail, if it is among those laid out.
    fn stored_tail(
        &self,
        state: &Counted<FileState>,
        layout: &Layout<'_>,
    ) -> Result<Option<u64>, Error> {
        let tail = self.tail_page(state)?;
        let stored = |page| layout.segments.iter().any(|s| s.pages.contains(&page));
        Ok(tail.filter(|page| stored(*page) && !planted(Canary::TailOutlived)))
    }

    /// Logs laid-out pages that were written.
    pub(super) fn log_stored(
        &self,
        state: &Counted<FileState>,
        layout: Layout<'_>,
        size: u64,
    ) -> Result<(), Error> {
        let tail = self.stored_tail(state, &layout);
        let (tail, layout) = self.or_unreserve(state, layout, tail)?;
        if self.needs_record(state, &layout, tail, size) {
            let written = Written {
                flush_failures: layout.flush_failures,
                new: Vec::new(),
                tail: None,
            };
            return self.log_laid_out(state, layout, size, tail, written);
        }
        match layout.durability {
            Durability::Volatile | Durability::Checked => {
                self.wrote_in_place(state, layout.flush_failures)
            }
            Durability::Durable => {
                let count = &self.counts.written_durably;
                count.fetch_add(1, Ordering::Relaxed);
                // Whether what a failed flush of another's lost was this is not known.
                self.check_flushes(state, layout.flush_failures)
            }
        }
    }

    /// Logs laid-out pages that are written with the record, which vouches for them ([`Durability::Checked`]); `data` has them, and may
    /// have more. With a new tail, if there is one.
    fn store_with_record(
        &self,
        state: &Counted<FileState>,
        layout: Layout<'_>,
        data: Bounce<'_>,
        size: u64,
        new_tail: Option<Delta>,
    ) -> Result<(), Error> {
        let moved = self.move_inline(state, &layout);
        let tail = moved.and_then(|()| self.await_blocks(state, &layout));
        let (tail, layout) = self.or_unreserve(state, layout, tail)?;
        if !self.needs_record(state, &layout, tail, size) && new_tail.is_none() {
            // What made one necessary has been logged since, with an inline body.
            return self.store(state, layout, &data, size);
        }
        let bytes: usize = layout.segments.iter().map(Segment::bytes).sum();
        let written = Written {
            flush_failures: layout.flush_failures,
            new: new_data(&layout.segments, &data.into_shared(&self.memory)),
            tail: new_tail,
        };
        self.log_laid_out(state, layout, size, tail, written)?;
        (self.counts.data_bytes).fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Waits until blocks that are written with a record may be, and tells of the tail among their pages.
    fn await_blocks(
        &self,
        state: &Counted<FileState>,
        layout: &Layout<'_>,
    ) -> Result<Option<u64>, Error> {
        for segment in &layout.segments {
            // What is new is not vouched for; what is not, may be.
            self.store.confirm(segment.blocks())?;
        }
        self.stored_tail(state, layout)
    }

    /// Whether a file with these pages stored differs from what its inode says.
    fn needs_record(
        &self,
        state: &Counted<FileState>,
        layout: &Layout<'_>,
        tail: Option<u64>,
        size: u64,
    ) -> bool {
        let mapped = layout.segments.iter().any(|s| s.kind != Target::InPlace);
        mapped || tail.is_some() || size != state.meta.lock().logged_size
    }

    fn log_laid_out(
        &self,
        state: &Counted<FileState>,
        layout: Layout<'_>,
        size: u64,
        tail: Option<u64>,
        written: Written,
    ) -> Result<(), Error> {
        let changes = changes_of(&layout.segments);
        let mut reservations = layout.reservations;
        let outcome =
            self.log_written(state, changes, &mut reservations, size, tail, Some(written));
        if outcome.is_err() {
            self.take_back(state, reservations);
        }
        outcome
    }

    /// Data of a file was written in place, begun when this many flushes had failed.
    pub(super) fn wrote_in_place(
        &self,
        state: &Counted<FileState>,
        flush_failures: u64,
    ) -> Result<(), Error> {
        {
            let mut meta = state.meta.lock();
            let first = !meta.in_place.unflushed();
            meta.in_place.wrote(flush_failures);
            // Files with something unflushed are among these already.
            if first {
                self.unflushed
                    .lock()
                    .insert(state.ino(), Counted::clone(state));
            }
        }
        self.check_flushes(state, flush_failures)
    }

    /// Writes over blocks that the file has, past the cache.
    pub(super) fn write_in_place(
        &self,
        state: &Counted<FileState>,
        writes: Writes<'_>,
    ) -> Result<(), Error> {
        let flush_failures = self.store.array().flush_failures();
        self.write_at_once(writes)?;
        self.wrote_in_place(state, flush_failures)
    }

    pub(super) fn write_at_once(&self, writes: Writes<'_>) -> Result<(), Error> {
        self.write_out_by(writes, |ios| Ok(self.store.array().execute(ios)?))
    }

    /// Fails when a flush failed since `before`: what was written since then may be lost, even
    /// if a later flush succeeds (R17).
    pub(super) fn check_flushes(
        &self,
        state: &Counted<FileState>,
        before: u64,
    ) -> Result<(), Error> {
        match self.flush_failed_since(before) {
            false => Ok(()),
            true => Err(Error::WriteFailed {
                ino: state.ino(),
                why: FLUSH_FAILED_MEANWHILE.into(),
            }),
        }
    }

    pub(super) fn flush_failed_since(&self, before: u64) -> bool {
        self.store.array().flush_failures() != before && !planted(Canary::FailedFlushForgotten)
    }

    /// Whether this is a sync of a file that has no more than these pages to write, and they are few; write-back beside it keeps
    /// the pace from now on.
    fn is_small_sync(&self, how: How, pages: &[u64]) -> bool {
        // A rename logs what is logged already, and nobody waits for it as for a sync.
        let syncing = self.syncing.load(Ordering::Relaxed) > 0;
        let logged = matches!(how, How::Logged | How::Alone);
        let small = syncing && logged && pages.len() <= piece_pages();
        if small {
            self.pace.note_sync(self.now_ns());
        }
        small
    }

    /// How to write what a sync that no other runs beside waits for: one write in place is best made durable by itself,
    /// where the device turns the two steps into one. Several share the flush that follows them, as syncs at a time do.
    fn best_alone(&self, layout: &Layout<'_>) -> Durability {
        let array = self.store.array();
        match layout.segments.as_slice() {
            [only]
                if only.kind == Target::InPlace
                    && array.is_one_piece(only.block.byte(), only.bytes()) =>
            {
                Durability::Durable
            }
            _ => Durability::Volatile,
        }
    }

    /// Whether a batch that is not confirmed vouches for blocks that these pages have, or pages between them.
    pub(super) fn is_vouched_for(
        &self,
        state: &Counted<FileState>,
        pages: &[u64],
    ) -> Result<bool, Error> {
        let (Some(first), Some(last)) = (pages.first(), pages.last()) else {
            return Ok(false);
        };
        if !self.store.vouches() {
            return Ok(false);
        }
        let mapped = self.mapped(state, *first..last + 1)?;
        let vouched = |extent: &FileExtent| self.store.is_vouched(extent.blocks());
        Ok(mapped.iter().any(vouched))
    }

    /// Whether what is written to these blocks has to wait for a batch that confirms another one.
    pub(super) fn must_confirm(&self, layout: &Layout<'_>) -> bool {
        let vouched = |segment: &Segment| self.store.is_vouched(segment.blocks());
        layout.segments.iter().any(vouched)
    }

    /// Writes segments of a layout, or parts of them.
    fn write_segments(
        &self,
        segments: &[Segment],
        data: &[u8],
        layout: &Layout<'_>,
    ) -> Result<(), Error> {
        let mut writes = Writes::new(data);
        writes.add_segments(0, segments);
        match layout.durability {
            Durability::Durable if !planted(Canary::OverwriteUnflushed) => {
                // The flush of what was written in turns may not be in it: a device may force one write to the medium.
                self.write_out_by(writes, |ios| self.store.write_durably(ios))
            }
            _ if layout.at_once => self.write_at_once(writes),
            _ => self.write_out(writes),
        }
    }

    /// One device batch, or beside syncs one piece after the other.
    pub(super) fn write_out(&self, writes: Writes<'_>) -> Result<(), Error> {
        self.write_out_by(writes, |ios| self.write_at_pace(ios))
    }

    pub(super) fn write_out_by(
        &self,
        mut writes: Writes<'_>,
        write: impl FnOnce(&mut [Io<'_>]) -> Result<(), engine::Error>,
    ) -> Result<(), Error> {
        self.check_not_ended()?;
        let last = writes.last.take();
        writes.push(last);
        let bytes = writes.ios.iter().map(Io::bytes).sum::<u64>();
        for io in &writes.ios {
            // What is new is not vouched for; what is not, may be.
            self.store.confirm(blocks_written(io))?;
        }
        self.counts.data_bytes.fetch_add(bytes, Ordering::Relaxed);
        match write(&mut writes.ios) {
            Err(_) if planted(Canary::FailedWriteIgnored) => Ok(()),
            done => Ok(done?),
        }
    }

    /// Begins an operation on the file's inode.
    pub(super) fn begin(
        &self,
        state: &Counted<FileState>,
        need: Need,
    ) -> Result<(Op<'_, FsNode>, Slot), Error> {
        let mut op = self.store.begin(need)?;
        let slot = op.lock(&state.node)?;
        if op.peek(slot).inode()?.generation != state.key.generation {
            return Err(Error::Stale(state.ino()));
        }
        Ok((op, slot))
    }

    /// The record of a batch: new extents, size, times, block count. Its blocks are promised, and room for its extents was found when it was accepted. One that
    /// only takes extents away is always logged.
    pub(super) fn log_changes(
        &self,
        state: &Counted<FileState>,
        changes: Vec<Change>,
        mut reservations: Vec<Reservation<'_, FsNode>>,
        size: u64,
    ) -> Result<(), Error> {
        let tail = self.tail_page(state)?;
        let tail = tail.filter(|page| changes.iter().any(|c| c.pages.contains(page)));
        self.log_written(state, changes, &mut reservations, size, tail, None)
    }

    /// As `log_changes`, of data that was `written`. With the page of a `tail` that ends by this. After an error the reservations are
    /// the caller's still.
    fn log_written(
        &self,
        state: &Counted<FileState>,
        changes: Vec<Change>,
        reservations: &mut Vec<Reservation<'_, FsNode>>,
        size: u64,
        tail: Option<u64>,
        written: Option<Written>,
    ) -> Result<(), Error> {
        let maps = changes.iter().any(|change| !change.with.is_empty());
        let need = match maps {
            true => Need::Accepted,
            false => Need::Reclaim,
        };
        let (mut op, slot) = self.begin(state, need)?;
        if let Some(written) = &written {
            // The operation has begun: a flush that fails from here on finds it.
            self.check_flushes(state, written.flush_failures)?;
        }
        let mut attrs = AttrChange::default();
        let plan = match changes.is_empty() {
            true => None,
            false => Some(extents::plan(&self.store, &mut op, slot, changes)?),
        };
        for reservation in reservations.drain(..) {
            op.take(reservation);
        }
        if let Some(plan) = plan {
            attrs.blocks = Some(self.blocks_after(&op, slot, plan.gained()));
            plan.apply(&mut op);
        }
        if tail.is_some() {
            op.apply(slot, Delta::EndTail);
        }
        if let Some(written) = written {
            if let Some(tail) = written.tail {
                op.apply(slot, tail);
            }
            for data in written.new {
                op.vouch(slot, data);
            }
        }
        self.commit_attrs(state, op, slot, attrs, Some(size));
        Ok(())
    }

    pub(super) fn blocks_after(&self, op: &Op<'_, FsNode>, slot: Slot, gained: i64) -> u64 {
        let before = op.peek(slot).inode().map_or(0, |inode| inode.blocks);
        before.saturating_add_signed(gained)
    }

    /// Ends an operation on a file's inode: logs the size and the times that are ahead along
    /// with it, commits, and notes what the inode has now.
    pub(super) fn commit_attrs(
        &self,
        state: &Counted<FileState>,
        mut op: Op<'_, FsNode>,
        slot: Slot,
        mut attrs: AttrChange,
        size: Option<u64>,
    ) {
        let (logged, times) = self.about_to_log(state, size);
        attrs.size = size;
        op.apply(slot, Delta::Attrs(times.on(attrs)));
        op.commit_noting(|epoch| self.note_logged(state, epoch, logged));
    }

    /// For who has begun an operation that will log this size, if any, of a file, and the times that are returned.
    pub(super) fn about_to_log(&self, state: &FileState, size: Option<u64>) -> (Logged, NewTimes) {
        let meta = state.meta.lock();
        let logged = Logged {
            size,
            times: meta.times,
            persisted_ns: self.now_ns(),
            written_in_place: meta.in_place.written,
        };
        (logged, meta.times)
    }

    /// The record of this epoch has this of a file. Called before its inode is unlocked.
    pub(super) fn note_logged(&self, state: &Counted<FileState>, epoch: Epoch, logged: Logged) {
        let mut meta = state.meta.lock();
        if let Some(size) = logged.size {
            meta.logged_size = size;
        }
        meta.changed = meta.changed.max(epoch);
        // The commit of this epoch flushes all data written before the record, unless a flush
        // failed before the operation began: one that fails later finds it. What was written since, past the
        // cache, may have come after the flush.
        if meta.in_place.unflushed() {
            let lost = self.store.array().flush_failures() != meta.in_place.flush_failures;
            match lost {
                true => meta.in_place.all_flushed(),
                false => meta.in_place.flushed(logged.written_in_place),
            }
            if lost && !planted(Canary::FailedFlushForgotten) {
                self.lost(state, &mut meta, FLUSH_FAILED);
            }
            if !meta.in_place.unflushed() {
                self.forget_unflushed(state);
            }
        }
        meta.persisted_ns = logged.persisted_ns;
        meta.logged_times(logged.times);
    }

    /// Writes whole pages straight to their blocks, past the cache, and logs them with `size`.
    /// New blocks come out of the file's promise. The I/O lock is held exclusively, and no
    /// dirty page that is not logged lies before them.
    pub(super) fn store_run(
        &self,
        state: &Counted<FileState>,
        page: u64,
        data: &[u8],
        size: u64,
    ) -> Result<(), Error> {
        let pages: Vec<u64> = (page..page + (data.len() / BLOCK_SIZE) as u64).collect();
        let mut done = 0;
        while done < pages.len() {
            let rest = &pages[done..];
            let mut layout = self.lay_out(state, rest, false)?;
            layout.at_once = true;
            let covered = layout.covered;
            // No record maps what lies behind the size that it has: who makes the file longer one day must not find it. Nor has one a size
            // that the file is yet to get.
            let upto = (page + (done + covered) as u64) * PAGE;
            let upto = upto.max(state.size());
            let logged = self.size_home(state, size.min(upto));
            let bytes = &data[done * BLOCK_SIZE..(done + covered) * BLOCK_SIZE];
            self.store(state, layout, bytes, logged)?;
            done += covered;
            let mut meta = state.meta.lock();
            meta.size = meta.size.max(logged);
        }
        let mut meta = state.meta.lock();
        meta.size = meta.size.max(size);
        Ok(())
    }
}

/// What one pass of write-back may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Take {
    /// The dirty pages: nobody writes past the cache where they are.
    Dirty,
    /// Nothing: there was nothing when it began.
    Nothing,
}

/// A sync's pages but the last are stored, as far as `left`, where write-back goes on.
struct Appended {
    left: Option<u64>,
}

/// Data that a record is of.
struct Written {
    /// Flushes that had failed before it was laid out.
    flush_failures: u64,
    /// What the record vouches for, and is written with it.
    new: Vec<NewData>,
    /// The tail that the file has from then on.
    tail: Option<Delta>,
}

/// The size that may be logged when this is the first page that is neither home nor clean since write-back began.
pub(super) fn size_limit(size: u64, left: Option<u64>) -> u64 {
    left.map_or(size, |page| size.min(page * PAGE))
}

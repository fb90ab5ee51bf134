//! Writing: into the cache, against promised blocks; direct writes to the device, coherently.
//!
//! A write holds the file's I/O lock exclusively, but for an *overwrite*, which changes bytes under the shared lock, beside
//! readers, write-back and other overwrites. Invariants:
//!
//! 1. An overwrite changes bytes below the size, of pages that are dirty, or have blocks of their own. So it
//!    changes neither size nor mapping and needs no space. Everything else that
//!    changes content is exclusive: appends, growth, cuts, holes.
//! 2. A page is one unit: its set's lock orders overwrites of it, and a read comes before or after each. So all see a whole write or none of it. A write of
//!    several pages, or past the cache, is one unit by its range ([`ranges`](super::ranges)) and by being counted
//!    ([`gate`](super::gate)). If it meets a full set when it has begun it is done anew, the range still held: when there is room, or else
//!    under the exclusive lock.
//! 3. The file has the write's times, in memory or in its inode, before its pages have the bytes.
//! 4. Who has found a page clean and with a block under the shared lock may make it dirty later under the same: what is
//!    mapped stays mapped. A page that is not dirty and has none stays so; a dirty one keeps what stands behind it.
//! 5. Write-back takes what is dirty when it begins. A page that is overwritten later stays dirty by its stamp; if it was clean
//!    until then, its content of that time is home, so it holds back neither the logged size nor anything else.
//! 6. Who loads a page under the shared lock uses what it read only if nobody can have written the page meanwhile
//!    (`PageCache::admit`).
//! 7. An overwrite that finds no room waits for it without the I/O lock, and looks at everything again ([`clean`](super::clean)).
//! 8. A write past the cache supersedes what the cache has of its pages when it has completed, and not before: who reads them
//!    meanwhile may cache what they held before. Nobody writes these pages back meanwhile, nor vouches for them.
//! 9. What finds no block, but room in the inode, is logged at once and leaves no page dirty ([`through`](super::writeback)).
//! 10. While a crash leaves the old content of a file that was cut to nothing, or the new one as a whole ([`is_kept_together`](Files::is_kept_together)),
//!     nothing of the new one goes past the cache, or home because of where it was written: the first page that did would take the old content away.

use super::extents::{self, Mapped};
use super::file::{FileState, OpenFile};
use super::flight::is_written;
use super::gate::Storing;
use super::ranges::Mode;
use super::read::{Reading, TRIES};
use super::writeback::{REPLACED_MAX, Writes};
use super::{Files, PAGE, Promised, SIZE_MAX, is_one_page, pages_of};
use crate::Error;
use crate::content::FileExtent;
use crate::content::inode::INLINE_DATA_MAX;
use base::canary::{Canary, planted};
use base::clock::Timestamp;
use base::counted::Counted;
use engine::cache::{Backing, Overwrote, PageState, Rest, Wrote};
use format::{BLOCK_SIZE, Block};
use std::ops::Range;

/// Bytes that one step of a write covers: its mapping is looked up and its blocks are
/// promised at once.
const STEP: u64 = 1 << 20;

/// How often a write waits for room before it makes some.
const ROOM_TRIES: usize = 64;

/// What became of an overwrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Put {
    Done,
    /// As many pages of the set are dirty as may be.
    NoRoom,
    /// It is not one, or not one that can be done beside others.
    Refused,
}

/// Pages without a block, ascending. The first run, mostly the only one, is kept in place.
#[derive(Debug, Default)]
pub(super) struct Holes {
    first: Range<u64>,
    more: Vec<Range<u64>>,
}

impl Holes {
    fn add(&mut self, page: u64) {
        let last = self.more.last_mut().unwrap_or(&mut self.first);
        if last.is_empty() {
            *last = page..page + 1;
        } else if last.end == page {
            last.end += 1;
        } else {
            self.more.push(page..page + 1);
        }
    }

    fn runs(&self) -> impl Iterator<Item = &Range<u64>> {
        std::iter::once(&self.first).chain(&self.more)
    }

    fn contains(&self, page: u64) -> bool {
        self.runs().any(|run| run.contains(&page))
    }

    /// How many.
    pub fn pages(&self) -> u64 {
        self.runs().map(|run| run.end - run.start).sum()
    }
}

/// Whether these are whole pages.
pub(super) fn is_whole(offset: u64, len: usize) -> bool {
    offset.is_multiple_of(PAGE) && len.is_multiple_of(BLOCK_SIZE)
}

/// Whether so many bytes from there on lie below the end of the file; it stays under the I/O lock.
pub(super) fn is_inside(state: &FileState, offset: u64, len: usize) -> bool {
    offset.saturating_add(len as u64) <= state.size()
}

/// What of `data`, written at `offset`, goes to which page, and where in it.
fn parts_of(offset: u64, mut data: &[u8]) -> impl Iterator<Item = (u64, (usize, &[u8]))> {
    let mut at = offset;
    std::iter::from_fn(move || {
        let (page, within) = (at / PAGE, (at % PAGE) as usize);
        let (part, rest) = data.split_at(data.len().min(BLOCK_SIZE - within));
        (at, data) = (at + part.len() as u64, rest);
        (!part.is_empty()).then_some((page, (within, part)))
    })
}

impl Files {
    /// Writes `data` at `offset`, or at the end with `O_APPEND`; returns the bytes written, fewer
    /// only when space ran out, or a device failed, in the middle, or at the largest size. Other writers and readers see all of it or
    /// nothing. With `O_SYNC` or `O_DSYNC` it is durable on return; if that fails it is written all the same.
    ///
    /// `O_DIRECT` with offset and length in whole pages bypasses the cache; otherwise it is a
    /// buffered write that is written back before it returns; if that fails it is written all the same. Of a file that was cut to nothing and is written anew both stay in the cache, up to 64 MiB.
    pub fn write(&self, file: &OpenFile, offset: u64, data: &[u8]) -> Result<usize, Error> {
        if !file.writable() {
            return Err(Error::BadHandle);
        }
        self.check_writable()?;
        if data.is_empty() {
            return Ok(0);
        }
        let state = &file.state;
        self.balance(state)?;
        let plain = file.flags() & (libc::O_APPEND | libc::O_DIRECT) == 0;
        let one = plain && is_one_page(offset, data.len());
        let written = match one && self.overwrite(state, offset, data)? {
            true => data.len(),
            false => self.write_more(file, offset, data)?,
        };
        self.give_way(written);
        if file.has(libc::O_DSYNC) {
            self.fsync(file, !file.has(libc::O_SYNC))?;
        }
        Ok(written)
    }

    /// As [`write`](Self::write), if nothing has to be waited for: one page below the end of the file that is cached, or is written whole and
    /// has a block, as what is in memory tells, while there is much room in the cache. False: nothing is written, as it is another one.
    pub(crate) fn write_now(
        &self,
        file: &OpenFile,
        offset: u64,
        data: &[u8],
    ) -> Result<bool, Error> {
        let others = libc::O_APPEND | libc::O_DIRECT | libc::O_DSYNC;
        let is_one = !data.is_empty() && is_one_page(offset, data.len());
        if !is_one || !file.writable() || file.flags() & others != 0 {
            return Ok(false);
        }
        self.check_writable()?;
        let (state, page) = (&file.state, offset / PAGE);
        let is_known = || data.len() == BLOCK_SIZE || self.pages.absence(state.key, page).is_none();
        if self.unwritten() > self.pages.capacity() / 4
            || !is_inside(state, offset, data.len())
            || !is_known()
        {
            return Ok(false);
        }
        self.cleaning.note_dirty();
        let put = match state.try_lock_shared()? {
            Some(_shared) if state.stores.quiet().is_some() => {
                self.check_open()?;
                let clean = |page, part| self.overwrite_clean_now(state, page, part);
                self.overwrite_locked(state, offset, data, clean)?
            }
            _ => Put::Refused,
        };
        Ok(put == Put::Done)
    }

    /// Writes `data` at the end of the file, whatever the handle's flags, in one step with finding out where that is; returns
    /// where, and the bytes written, fewer only when space ran out, or a device failed, or at the largest size. Otherwise as [`write`](Self::write).
    pub fn append(&self, file: &OpenFile, data: &[u8]) -> Result<(u64, usize), Error> {
        if !file.writable() {
            return Err(Error::BadHandle);
        }
        self.check_writable()?;
        if data.is_empty() {
            return Ok((file.state.size(), 0));
        }
        self.balance(&file.state)?;
        let done = self.write_end(file, data)?;
        self.give_way(done.1);
        if file.has(libc::O_DSYNC) {
            self.fsync(file, !file.has(libc::O_SYNC))?;
        }
        Ok(done)
    }

    /// What is no overwrite of one page.
    #[inline(never)]
    fn write_more(&self, file: &OpenFile, offset: u64, data: &[u8]) -> Result<usize, Error> {
        let state = &file.state;
        if file.has(libc::O_APPEND) {
            return Ok(self.write_end(file, data)?.1);
        }
        if !file.has(libc::O_DIRECT) {
            return match self.write_stream(file, offset, data)? {
                Some(written) => Ok(written),
                None => {
                    self.pages.ask_to_write(state.key, offset / PAGE);
                    self.write_over(state, offset, data)
                }
            };
        }
        if is_whole(offset, data.len()) {
            return match self.write_past(state, offset, data)? {
                true => Ok(data.len()),
                false => self.write_direct(state, offset, data),
            };
        }
        let written = self.write_over(state, offset, data)?;
        self.flush_range(state, pages_of(offset..offset + written as u64))?;
        Ok(written)
    }

    /// Writes behind what the file has; returns where that is.
    fn write_end(&self, file: &OpenFile, data: &[u8]) -> Result<(u64, usize), Error> {
        let state = &file.state;
        let (at, written) = {
            let _exclusive = self.lock_to_change(state)?;
            let at = state.size();
            (at, self.write_locked(state, at, data)?)
        };
        if file.has(libc::O_DIRECT) {
            self.flush_range(state, pages_of(at..at + written as u64))?;
        }
        Ok((at, written))
    }

    /// Writes into one page that has a block, below the end of the file, under the shared I/O lock (see the module's head).
    /// False: nothing is written, and the write has to be done under the exclusive one.
    fn overwrite(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<bool, Error> {
        for _ in 0..ROOM_TRIES {
            match self.overwrite_once(state, offset, data)? {
                Put::Done => return Ok(true),
                Put::Refused => return Ok(false),
                // Others may take it before this one comes again.
                Put::NoRoom if self.wait_for_room(state, offset / PAGE) => {}
                Put::NoRoom => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Waits, without any lock, until a page may become dirty in its set; false: for nothing.
    #[cold]
    fn wait_for_room(&self, state: &FileState, page: u64) -> bool {
        let set = self.pages.set_of(state.key, page);
        self.cleaning.wait_for_room(set)
    }

    #[inline(always)]
    fn overwrite_once(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<Put, Error> {
        // Before the lock, too: who makes a file longer does not take it twice.
        if !is_inside(state, offset, data.len()) {
            return Ok(Put::Refused);
        }
        let clean = |page, part, in_turn| self.overwrite_clean(state, page, part, in_turn);
        let shared = self.share_to_change(state)?;
        if state.stores.quiet().is_some() {
            return self
                .overwrite_locked(state, offset, data, |page, part| clean(page, part, false));
        }
        drop(shared);
        let page = offset / PAGE;
        let _range = self.hold(state, page..page + 1, Mode::Store);
        let _shared = self.share_to_change(state)?;
        self.overwrite_locked(state, offset, data, |page, part| clean(page, part, true))
    }

    /// As `overwrite`, under the shared lock, when nobody writes several pages with this one. A page that is not dirty is for `clean`.
    #[inline(always)]
    fn overwrite_locked<'d>(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &'d [u8],
        clean: impl FnOnce(u64, (usize, &'d [u8])) -> Result<Put, Error>,
    ) -> Result<Put, Error> {
        if !is_inside(state, offset, data.len()) {
            return Ok(Put::Refused);
        }
        let (page, within) = (offset / PAGE, (offset % PAGE) as usize);
        let now = self.now();
        self.stamp(state, now);
        let part = (within, data);
        let written = match self.pages.overwrite(state.key, page, part, None) {
            Overwrote::Done => Put::Done,
            _ => clean(page, part)?,
        };
        self.stamp_again(state, now);
        Ok(written)
    }

    /// Writes into a page that is not dirty, and is loaded if it must be. Refused: it has no block, or it keeps leaving the cache.
    #[inline(never)]
    fn overwrite_clean(
        &self,
        state: &Counted<FileState>,
        page: u64,
        part: (usize, &[u8]),
        in_turn: bool,
    ) -> Result<Put, Error> {
        if !self.may_overwrite(state, page)? {
            return Ok(Put::Refused);
        }
        if part.1.len() == BLOCK_SIZE {
            return Ok(self.put_whole(state, page, part.1));
        }
        for _ in 0..TRIES {
            match self.put_part(state, page, part) {
                Put::Refused => self.load_page(state, page, in_turn)?,
                put => return Ok(put),
            }
        }
        Ok(self.put_part(state, page, part))
    }

    /// The same without a wait. Refused also: it is not cached, or whether it has a block is not in memory.
    fn overwrite_clean_now(
        &self,
        state: &Counted<FileState>,
        page: u64,
        part: (usize, &[u8]),
    ) -> Result<Put, Error> {
        if state.meta.lock().replaced || !self.may_overwrite_now(state, page)? {
            return Ok(Put::Refused);
        }
        Ok(match part.1.len() {
            BLOCK_SIZE => self.put_whole(state, page, part.1),
            _ => self.put_part(state, page, part),
        })
    }

    /// Part of a page with a block. Refused: it is not cached.
    fn put_part(&self, state: &Counted<FileState>, page: u64, part: (usize, &[u8])) -> Put {
        let now_ns = Some(self.now_ns());
        match self.pages.overwrite(state.key, page, part, now_ns) {
            Overwrote::Done => Put::Done,
            Overwrote::NoRoom => Put::NoRoom,
            Overwrote::Clean | Overwrote::Absent => Put::Refused,
        }
    }

    /// A page with a block, all of it.
    fn put_whole(&self, state: &Counted<FileState>, page: u64, data: &[u8]) -> Put {
        match (self.pages).overwrite_whole(state.key, page, data, self.now_ns()) {
            Wrote::Done => Put::Done,
            Wrote::NoRoom | Wrote::Absent => Put::NoRoom,
        }
    }

    /// Caches a page below the end of the file, if it can be. `in_turn`: the caller has a range with it.
    fn load_page(&self, state: &Counted<FileState>, page: u64, in_turn: bool) -> Result<(), Error> {
        let how = Reading {
            in_turn,
            ..Reading::beside()
        };
        if let Some(missing) =
            self.missing_run(state, page..self.run_end(state, page, page + 1, how.ahead))
        {
            let loaded = self.load_pages(state, missing.pages.clone())?;
            self.admit(state, &missing, &loaded, &how);
        }
        Ok(())
    }

    /// A buffered write. One of several pages that have blocks runs beside all that is elsewhere in the file, others alone.
    fn write_over(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, Error> {
        let pages = || pages_of(offset..offset + data.len() as u64);
        let wide = !is_one_page(offset, data.len()) && is_inside(state, offset, data.len());
        let hold = || self.hold(state, pages(), Mode::Store);
        let _range = wide.then(hold);
        let (mut storing, mut stored) = (None, 0);
        for _ in 0..if wide { ROOM_TRIES } else { 0 } {
            let (put, page) = match self.put_pages(state, offset, data, &mut storing) {
                Ok(outcome) => outcome,
                Err(error) if stored == 0 => return Err(error),
                Err(_) => break,
            };
            stored = stored.max((page * PAGE).saturating_sub(offset) as usize);
            match put {
                Put::Done => return Ok(data.len()),
                Put::NoRoom if self.wait_for_room(state, page) => {}
                Put::NoRoom | Put::Refused => break,
            }
        }
        // All of it anew: who has seen a part, or comes meanwhile, waits for the range.
        let anew = self.lock_to_change(state);
        match anew.and_then(|_exclusive| self.write_locked(state, offset, data)) {
            // What is written is told; who goes on with the rest meets the error.
            Err(_) if stored > 0 => Ok(stored),
            anew => anew.map(|written| written.max(stored)),
        }
    }

    /// Writes pages that have blocks, under the shared I/O lock. One that could not be written is told; those before it are then, and
    /// `storing` says so, as long as the caller keeps it.
    fn put_pages<'s>(
        &self,
        state: &'s Counted<FileState>,
        offset: u64,
        data: &[u8],
        storing: &mut Option<Storing<'s>>,
    ) -> Result<(Put, u64), Error> {
        let pages = pages_of(offset..offset + data.len() as u64);
        let _shared = self.share_to_change(state)?;
        let inside = is_inside(state, offset, data.len());
        if !inside || self.holes(state, pages.clone())?.pages() > 0 {
            return Ok((Put::Refused, pages.start));
        }
        // What cannot be read is known before anything is changed.
        for edge in [offset, offset + data.len() as u64] {
            if !edge.is_multiple_of(PAGE) {
                self.load_page(state, edge / PAGE, true)?;
            }
        }
        let now = self.now();
        self.stamp(state, now);
        storing.get_or_insert_with(|| state.stores.begin());
        let put = |(page, part): (u64, (usize, &[u8]))| match part.1.len() {
            BLOCK_SIZE => (self.put_whole(state, page, part.1), page),
            _ => (self.put_part(state, page, part), page),
        };
        let mut all = parts_of(offset, data).map(put);
        let stopped = all.find(|(put, _)| *put != Put::Done);
        self.stamp_again(state, now);
        Ok(stopped.unwrap_or((Put::Done, pages.end)))
    }

    /// See [`MetaLock::stamp_again`](super::meta::MetaLock::stamp_again).
    pub(super) fn stamp_again(&self, state: &Counted<FileState>, now: Timestamp) {
        (state.meta).stamp_again(now, &self.times, || self.now_ns());
    }

    /// See [`MetaLock::stamp`](super::meta::MetaLock::stamp).
    pub(super) fn stamp(&self, state: &Counted<FileState>, now: Timestamp) {
        state.meta.stamp(now, &self.times, || self.now_ns());
    }

    /// Whether a page has a block of its own, as long as the I/O lock is held shared, and may become dirty: for one that holds nothing yet metadata has room to
    /// tell that it does.
    fn may_overwrite(&self, state: &Counted<FileState>, page: u64) -> Result<bool, Error> {
        let mapped = self.mapped(state, page..page + 1)?;
        Ok(!mapped.is_empty() && self.has_room_for(&mapped))
    }

    fn has_room_for(&self, mapped: &[FileExtent]) -> bool {
        mapped.iter().all(|extent| extent.written) || self.has_room_for_extents()
    }

    /// The same if that can be told without a wait. False also: it cannot.
    fn may_overwrite_now(&self, state: &Counted<FileState>, page: u64) -> Result<bool, Error> {
        let content = state.node.read()?;
        let found = extents::glance(&self.store, content.inode()?, &(page..page + 1));
        Ok(found.is_some_and(|found| !found.is_empty() && self.has_room_for(&found)))
    }

    /// A buffered write; the caller holds the I/O lock exclusively.
    pub(super) fn write_locked(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, Error> {
        self.write_promised(state, offset, data, &mut self.promise(0)?)
    }

    /// The same for who has blocks promised already, which it uses before others.
    pub(super) fn write_promised<'s>(
        &'s self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
        in_hand: &mut Promised<'s>,
    ) -> Result<usize, Error> {
        let end = offset.saturating_add(data.len() as u64).min(SIZE_MAX);
        if end <= offset {
            return Err(Error::FileTooLarge);
        }
        let now_ns = self.touch(state, end)?;
        let mut at = offset;
        let outcome = self.extend_tail(state, offset).and_then(|()| {
            while at < end {
                // Steps end at multiples of the step, so that the next ones are whole pages.
                let stop = (at / STEP * STEP).saturating_add(STEP).min(end);
                let upto = &data[..(stop - offset) as usize];
                let part = &upto[(at - offset) as usize..];
                match self.write_step(state, &mut at, part, (now_ns, in_hand)) {
                    Ok(()) => {}
                    Err(Error::NoSpace) => {
                        let rest = &upto[(at - offset) as usize..];
                        return self.write_pages(state, &mut at, rest, (now_ns, in_hand));
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        if planted(Canary::FullWriteZeroes)
            && matches!(outcome, Err(Error::NoSpace))
            && state.size() > 0
            && self.dirty_page(state, 0).is_ok()
        {
            self.pages.zero(state.key, 0, 0..BLOCK_SIZE);
        }
        self.note_ahead(state);
        if at > offset {
            if planted(Canary::SizeBeforeData) {
                self.log_changes(state, Vec::new(), Vec::new(), state.size())?;
            }
            return Ok((at - offset) as usize);
        }
        if planted(Canary::FullTakenForFailure) && matches!(outcome, Err(Error::NoSpace)) {
            let (ino, why) = (state.ino(), "no space is left".to_owned());
            return Err(Error::WriteFailed { ino, why });
        }
        outcome.map(|()| 0)
    }

    /// The content up to `end` is about to change. Records of the change itself carry the new times: a crash
    /// must not leave a new size under an old time. Returns the monotonic time.
    pub(super) fn touch(&self, state: &Counted<FileState>, end: u64) -> Result<u64, Error> {
        let now_ns = self.now_ns();
        let mut meta = state.meta.lock();
        if meta.cutting && end > meta.size {
            drop(meta);
            self.finish_cut(state)?;
            meta = state.meta.lock();
        }
        meta.stamp(&self.times, now_ns);
        Ok(now_ns)
    }

    /// The content has changed. Who looked meanwhile may have seen the new time with the old content: then it gets
    /// a newer one. What was logged meanwhile may have ended what `touch` began.
    pub(super) fn note_ahead(&self, state: &Counted<FileState>) {
        let mut meta = state.meta.lock();
        if meta.stamped.is_none() {
            meta.stamp(&self.times, self.now_ns());
        }
        if meta.ahead_since_ns.is_none() && meta.is_ahead() {
            meta.ahead(self.now_ns());
        }
    }

    /// Writes page by page where a whole step found no space, as far as it goes.
    fn write_pages<'s>(
        &'s self,
        state: &Counted<FileState>,
        at: &mut u64,
        part: &[u8],
        (now_ns, in_hand): (u64, &mut Promised<'s>),
    ) -> Result<(), Error> {
        let (start, end) = (*at, *at + part.len() as u64);
        while *at < end {
            let stop = ((*at / PAGE + 1) * PAGE).min(end);
            let bytes = &part[(*at - start) as usize..(stop - start) as usize];
            self.write_step(state, at, bytes, (now_ns, in_hand))?;
        }
        Ok(())
    }

    /// Writes bytes within one step: promises what is needed, then fills pages. `at` is where, and goes on as far as bytes are
    /// written, however this ends.
    fn write_step<'s>(
        &'s self,
        state: &Counted<FileState>,
        at: &mut u64,
        data: &[u8],
        (now_ns, in_hand): (u64, &mut Promised<'s>),
    ) -> Result<(), Error> {
        let (offset, end) = (*at, *at + data.len() as u64);
        let pages = pages_of(offset..end);
        match self.leave_inline(state, end) {
            // It may hold these bytes, more than new content gets there.
            Err(Error::NoSpace) if self.write_through(state, offset, data)? => {
                *at = end;
                return Ok(());
            }
            done => done?,
        }
        let holes = self.holes(state, pages.clone())?;
        // Held apart from the file's promise until the pages are dirty: a write-back in
        // between gives back what no dirty page needs.
        let mut promise = match self.promise_beside(in_hand, holes.pages()) {
            Err(Error::NoSpace) if self.write_through(state, offset, data)? => {
                *at = end;
                return Ok(());
            }
            promise => self.or_settled(state, promise, holes.pages(), end)?,
        };
        self.fill_pages(state, at, data, (&holes, &mut promise), now_ns)
    }

    fn fill_pages(
        &self,
        state: &Counted<FileState>,
        at: &mut u64,
        data: &[u8],
        (holes, promise): (&Holes, &mut Promised<'_>),
        now_ns: u64,
    ) -> Result<(), Error> {
        for (page, part) in parts_of(*at, data) {
            let promise = holes.contains(page).then_some(&mut *promise);
            self.write_page(state, page, part, promise, now_ns)?;
            *at += part.1.len() as u64;
        }
        Ok(())
    }

    /// Puts bytes into one page of the cache; the page is loaded first when only part of it
    /// is written. `promise` gives a block to a page that has none. When the cache is full
    /// of dirty pages the file is written back, and at worst the page goes straight home.
    fn write_page(
        &self,
        state: &Counted<FileState>,
        page: u64,
        part: (usize, &[u8]),
        promise: Option<&mut Promised<'_>>,
        now_ns: u64,
    ) -> Result<(), Error> {
        let (key, backing) = match promise {
            Some(_) => (state.key, Backing::Promised),
            None => (state.key, Backing::Allocated),
        };
        let end = match part.1.len() {
            0 => 0,
            len => page * PAGE + (part.0 + len) as u64,
        };
        let put = |rest: Rest<'_>| self.pages.write(key, page, part, rest, backing, now_ns);
        let account = |promise: Option<&mut Promised<'_>>| {
            let blocks = promise.map_or(0, |p| p.give(1));
            let mut meta = state.meta.lock();
            meta.promised += blocks;
            meta.size = meta.size.max(end);
        };
        if put(Rest::Unknown) == Wrote::Done {
            account(promise);
            return Ok(());
        }
        let mut around = if part.1.len() < BLOCK_SIZE {
            self.load_pages(state, page..page + 1)?
        } else {
            self.memory.take(BLOCK_SIZE)
        };
        if put(Rest::From(&around)) == Wrote::Done {
            account(promise);
            return Ok(());
        }
        // This file's older pages go home first, so that its size never passes them.
        self.flush_within(state, page * PAGE + (part.0 + part.1.len()) as u64)?;
        if put(Rest::From(&around)) == Wrote::Done {
            account(promise);
            return Ok(());
        }
        around[part.0..part.0 + part.1.len()].copy_from_slice(part.1);
        self.store_promised(state, page, &around, (promise, end))
    }

    /// Stores whole pages past the cache, in blocks that they have or that are promised, of a file that reaches to this byte at least then. If that
    /// fails it is longer by no more than what is stored.
    fn store_promised(
        &self,
        state: &Counted<FileState>,
        page: u64,
        data: &[u8],
        (promise, end): (Option<&mut Promised<'_>>, u64),
    ) -> Result<(), Error> {
        let blocks = promise.map_or(0, |p| p.give(data.len() as u64 / PAGE));
        let size = {
            let mut meta = state.meta.lock();
            meta.promised += blocks;
            meta.size.max(end)
        };
        let outcome = self.store_run(state, page, data, size);
        self.trim_promise(state);
        outcome
    }

    /// Pages of a range that are neither dirty nor mapped: each needs a promised block. For those that are mapped but hold nothing metadata has room to
    /// tell that they do.
    fn holes(&self, state: &Counted<FileState>, pages: Range<u64>) -> Result<Holes, Error> {
        let mut holes = Holes::default();
        let dirty = |page| {
            let state = self.pages.state(state.key, page);
            matches!(state, Some(PageState::Dirty(_)))
        };
        let Some(first) = pages.clone().find(|&page| !dirty(page)) else {
            return Ok(holes);
        };
        let mapped = self.mapped(state, first..pages.end)?;
        if mapped.iter().any(|extent| !extent.written) {
            self.accept_extents()?;
        }
        let mut extents = mapped.iter().peekable();
        for page in first..pages.end {
            while extents.peek().is_some_and(|e| e.end() <= page) {
                extents.next();
            }
            let has_block = extents.peek().is_some_and(|e| e.page <= page);
            if !has_block && (page == first || !dirty(page)) {
                holes.add(page);
            }
        }
        Ok(holes)
    }

    /// The mapping of a range as new data sees it: nothing is mapped in a replaced file.
    pub(super) fn mapped(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
    ) -> Result<Mapped, Error> {
        if state.meta.lock().replaced {
            return Ok(Mapped::new());
        }
        let content = state.node.read()?;
        extents::lookup(&self.store, content.inode()?, pages, usize::MAX)
    }

    /// Whether the file's content, with so many pages more, takes the place of another one in one record ([`flush_replaced`](Self::flush_replaced)), and waits
    /// for that: for who syncs or closes the file, or has waited long enough.
    pub(super) fn is_kept_together(&self, state: &FileState, more: u64) -> bool {
        // All its dirty pages are promised: it has no block of its own yet.
        state.meta.lock().replaced
            && (self.pages.promised(state.key)).saturating_add(more) < REPLACED_MAX / PAGE
    }

    /// The promise of blocks for a write up to `end`; a full disk first gets back what a replaced file still holds.
    fn or_settled<'s>(
        &'s self,
        state: &Counted<FileState>,
        promise: Result<Promised<'s>, Error>,
        blocks: u64,
        end: u64,
    ) -> Result<Promised<'s>, Error> {
        match promise {
            Err(Error::NoSpace) if state.meta.lock().replaced => {
                self.flush_within(state, end)?;
                self.promise(blocks)
            }
            other => other,
        }
    }

    /// Before a file with an inline body grows beyond what fits there, its content becomes a
    /// dirty page, so that write-back moves it out of the inode.
    pub(super) fn leave_inline(&self, state: &Counted<FileState>, end: u64) -> Result<(), Error> {
        if end <= INLINE_DATA_MAX as u64 && !state.meta.lock().keep_extents {
            return Ok(());
        }
        let inline = state.node.read()?.inode()?.has_inline();
        if inline && !state.meta.lock().replaced {
            self.dirty_page(state, 0)?;
        }
        Ok(())
    }

    /// Makes a page dirty as it is.
    pub(super) fn dirty_page(&self, state: &Counted<FileState>, page: u64) -> Result<(), Error> {
        if let Some(PageState::Dirty(_)) = self.pages.state(state.key, page) {
            return Ok(());
        }
        let holes = self.holes(state, page..page + 1)?;
        let promise = self.promise(holes.pages());
        let mut promise = self.or_settled(state, promise, holes.pages(), (page + 1) * PAGE)?;
        let promise = holes.contains(page).then_some(&mut promise);
        self.write_page(state, page, (0, &[]), promise, self.now_ns())
    }

    /// Before the file grows beyond `from`: the rest of its last page on the device may hold
    /// old bytes, so the page, which reads as zeros there, is made dirty (R16).
    pub(super) fn extend_tail(&self, state: &Counted<FileState>, from: u64) -> Result<(), Error> {
        let size = state.size();
        let page = size / PAGE;
        if size.is_multiple_of(PAGE) || from < size || from / PAGE == page {
            // A write into the page itself loads and dirties it.
            return Ok(());
        }
        let stale = self.mapped(state, page..page + 1)?;
        if stale.iter().any(|e| e.written) && !planted(Canary::TailNotZeroed) {
            self.dirty_page(state, page)?;
        }
        Ok(())
    }

    /// Writes whole pages past the cache, inside the file, over blocks that hold something already, for which no record is needed, or
    /// [into space](super::fill) that does not. Nobody but who is at these pages waits. What the cache has of them, dirty or not, is superseded; if
    /// the write fails the dirty pages stay. False: nothing is written, they are not such pages.
    pub(super) fn write_past(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<bool, Error> {
        if !is_inside(state, offset, data.len()) {
            return Ok(false);
        }
        let pages = pages_of(offset..offset + data.len() as u64);
        let _range = self.hold(state, pages.clone(), Mode::Direct);
        let _shared = self.share_to_change(state)?;
        let Some(mapped) = self.mapped_blocks(state, &pages)? else {
            return Ok(false);
        };
        if !is_written(mapped.iter(), &pages) {
            return self.fill(state, &pages, &mapped, data);
        }
        let now = self.now();
        self.stamp(state, now);
        let storing = state.stores.begin();
        let mut writes = Writes::new(data);
        writes.add(0, mapped.iter().map(|e| (e.block, u64::from(e.len))));
        let written = self.write_in_place(state, writes);
        self.superseded(state, pages, written.is_ok());
        drop(storing);
        self.stamp_again(state, now);
        written.map(|()| true)
    }

    /// These pages have been written past the cache, or some of them, if that failed. Not before: who reads the old
    /// content meanwhile must not keep it.
    pub(super) fn superseded(&self, state: &FileState, pages: Range<u64>, well: bool) {
        let dropped = self.pages.supersede(state.key, pages, well);
        if dropped.dirty > 0 {
            self.not_logged(state);
        }
    }

    /// Whether the sizes that are logged reach beyond these pages, and none of them has a block only promised: what they are is
    /// in the file's inode. It stays under the I/O lock.
    pub(super) fn is_logged(&self, state: &FileState, pages: &Range<u64>) -> bool {
        {
            let meta = state.meta.lock();
            let logged = meta.logged_size.min(meta.size);
            if meta.replaced || meta.cutting || pages.end * PAGE > logged {
                return false;
            }
        }
        let promised = |page| {
            let state = self.pages.state(state.key, page);
            state == Some(PageState::Dirty(Backing::Promised))
        };
        !(self.pages.promised(state.key) > 0 && pages.clone().any(promised))
    }

    /// The blocks of pages that are in use, all written, logged, and read from there if not from the cache.
    pub(super) fn written_blocks(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
    ) -> Result<Option<Vec<(Block, u64)>>, Error> {
        let mapped = self.mapped_blocks(state, pages)?;
        let mapped = mapped.filter(|mapped| is_written(mapped.iter(), pages));
        let runs = |e: &FileExtent| (e.block, u64::from(e.len));
        Ok(mapped.map(|mapped| mapped.iter().map(runs).collect()))
    }

    /// What is mapped of pages that are logged. `None`: they are not, or one of them is the tail.
    fn mapped_blocks(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
    ) -> Result<Option<Mapped>, Error> {
        if !self.is_logged(state, pages) {
            return Ok(None);
        }
        let content = state.node.read()?;
        let inode = content.inode()?;
        if inode.tail.as_ref().is_some_and(|t| pages.contains(&t.page)) {
            return Ok(None);
        }
        let mapped = extents::lookup(&self.store, inode, pages.clone(), usize::MAX)?;
        Ok(Some(mapped))
    }

    /// A direct write of whole pages: what the cache has of them is written back and
    /// dropped, then the data goes to its blocks and one record maps new ones (invariant 10).
    fn write_direct(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, Error> {
        let _exclusive = self.lock_to_change(state)?;
        let end = offset.checked_add(data.len() as u64);
        let Some(end) = end.filter(|end| *end <= SIZE_MAX) else {
            return Err(Error::FileTooLarge);
        };
        let pages = pages_of(offset..end);
        if self.is_kept_together(state, pages.end - pages.start) {
            return self.write_locked(state, offset, data);
        }
        self.make_way(state, pages.clone())?;
        let mut at = pages.start;
        while at < pages.end {
            let stop = pages.end.min(at + STEP / PAGE);
            let part = &data[((at - pages.start) * PAGE) as usize..];
            let part = &part[..((stop - at) * PAGE) as usize];
            match self.direct_step(state, at, part) {
                Ok(bytes) => {
                    at += bytes as u64 / PAGE;
                    if at < stop {
                        break;
                    }
                }
                Err(error) if at == pages.start => {
                    self.note_ahead(state);
                    self.spare_inline(state);
                    return Err(error);
                }
                // What is written is told; who goes on with the rest meets the error.
                Err(_) => break,
            }
        }
        self.note_ahead(state);
        Ok(((at - pages.start) * PAGE) as usize)
    }

    /// Whole pages are about to be written past the cache, under the exclusive lock: what it has of them, and what a record of
    /// their size needs before them, is home then. So is all of a file that was cut to nothing, and nothing of its old content is left.
    pub(super) fn make_way(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
    ) -> Result<(), Error> {
        let end = pages.end * PAGE;
        self.touch(state, end)?;
        self.extend_tail(state, pages.start * PAGE)?;
        self.leave_inline(state, end.max(INLINE_DATA_MAX as u64 + 1))?;
        state.meta.lock().keep_extents = true;
        self.flush_range_locked(state, pages.clone())
            .inspect_err(|_| self.spare_inline(state))?;
        self.drop_pages(state, pages);
        Ok(())
    }

    /// Pages for which was [made way](Self::make_way). Without space for all of them nothing is written. Says how many bytes are: fewer, in whole
    /// pages, where the file grew by some before the rest failed.
    pub(super) fn direct_step(
        &self,
        state: &Counted<FileState>,
        page: u64,
        data: &[u8],
    ) -> Result<usize, Error> {
        let pages = page..page + data.len() as u64 / PAGE;
        let holes = self.holes(state, pages.clone())?;
        let mut promise = self.promise(holes.pages())?;
        let size = state.size();
        let stored = self.store_promised(state, page, data, (Some(&mut promise), pages.end * PAGE));
        let grown = match state.size() {
            grown if grown > size => grown.saturating_sub(page * PAGE).min(data.len() as u64),
            _ => 0,
        };
        match stored {
            Ok(()) => Ok(data.len()),
            Err(_) if grown > 0 => Ok(grown as usize),
            Err(error) => Err(error),
        }
    }

    /// After a call that wanted blocks for a file and failed: what is still in the inode may stay there.
    pub(super) fn spare_inline(&self, state: &Counted<FileState>) {
        if let Ok(true) = self.is_inline(state) {
            state.meta.lock().keep_extents = false;
        }
    }
}

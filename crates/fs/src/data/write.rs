//! Writing: into the cache, against promised blocks; direct writes to the device, coherently.
//!
//! A write holds the file's I/O lock exclusively, but for an *overwrite*, of many of which each changes bytes of one page
//! under the shared lock, beside readers and write-back. Invariants:
//!
//! 1. An overwrite changes bytes below the size, of a page that is cached and dirty, or clean with a block of its own. So it
//!    changes neither size nor mapping, needs no space and no frame, and reads nothing. Everything else that
//!    changes content is exclusive: appends, growth, cuts, holes, direct writes, writes of several pages.
//! 2. A page is one unit: its set's lock orders overwrites of it, and a read comes before or after each. So all see a whole write or none of it: what is
//!    larger than a page is not written so.
//! 3. The file has the write's times, in memory or in its inode, before its page has the bytes.
//! 4. Who has found a page clean and with a block under the shared lock may make it dirty later under the same: what is
//!    mapped stays mapped. A page that is not dirty and has none stays so; a dirty one keeps what stands behind it.
//! 5. Write-back takes what is dirty when it begins. A page that is overwritten later stays dirty by its stamp; if it was clean
//!    until then, its content of that time is home, so it holds back neither the logged size nor anything else.
//! 6. Who loads a page under the shared lock uses what it read only if nobody can have written the page meanwhile
//!    (`PageCache::admit`).

use super::extents;
use super::file::{FileState, Meta, OpenFile};
use super::{Files, PAGE, Promised, SIZE_MAX, pages_of};
use crate::Error;
use crate::content::inode::INLINE_DATA_MAX;
use crate::content::{Body, FileExtent};
use base::atomic::{Ordering, fence};
use base::canary::{Canary, planted};
use base::clock::Timestamp;
use base::sync::Arc;
use engine::cache::{Backing, Overwrote, PageState, Rest, Wrote};
use format::BLOCK_SIZE;
use std::ops::Range;

/// Bytes that one step of a write covers: its mapping is looked up and its blocks are
/// promised at once.
const STEP: u64 = 1 << 20;

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

impl Files {
    /// Writes `data` at `offset`, or at the end with `O_APPEND`; returns the bytes written, fewer
    /// only when space ran out in the middle. Other writers and readers see all of it or
    /// nothing. With `O_SYNC` or `O_DSYNC` it is durable on return.
    ///
    /// `O_DIRECT` with offset and length in whole pages bypasses the cache; otherwise it is a
    /// buffered write that is written back before it returns.
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
        let whole = offset.is_multiple_of(PAGE) && (data.len() as u64).is_multiple_of(PAGE);
        let direct = file.has(libc::O_DIRECT) && !file.has(libc::O_APPEND);
        let plain = !file.has(libc::O_DIRECT) && !file.has(libc::O_APPEND);
        let written = if direct && whole {
            self.write_direct(state, offset, data)?
        } else if plain && self.overwrite(state, offset, data)? {
            data.len()
        } else {
            let _exclusive = state.lock_exclusive()?;
            let at = match file.has(libc::O_APPEND) {
                true => state.size(),
                false => offset,
            };
            let written = self.write_locked(state, at, data)?;
            if file.has(libc::O_DIRECT) {
                self.flush_locked(state)?;
            }
            written
        };
        if file.has(libc::O_DSYNC) {
            self.fsync(file, !file.has(libc::O_SYNC))?;
        }
        Ok(written)
    }

    /// Writes into one page that the cache has and that has a block, below the end of the file, under the shared I/O lock
    /// (see the module's head). False: nothing is written, and the write has to be done under the exclusive one.
    fn overwrite(&self, state: &Arc<FileState>, offset: u64, data: &[u8]) -> Result<bool, Error> {
        let (page, within) = (offset / PAGE, (offset % PAGE) as usize);
        let fits = within + data.len() <= BLOCK_SIZE;
        let inside = || offset.saturating_add(data.len() as u64) <= state.size();
        // Before the lock, too: who makes a file longer does not take it twice.
        if !fits || !inside() {
            return Ok(false);
        }
        let _shared = state.lock_shared()?;
        if !inside() {
            return Ok(false);
        }
        let now = self.now();
        self.stamp(state, now);
        let put = |dirty_at| {
            let part = (within, data);
            self.pages.overwrite(state.key, page, part, dirty_at)
        };
        let written = match put(None) {
            Overwrote::Done => true,
            Overwrote::Clean if self.has_block(state, page)? => {
                put(Some(self.now_ns())) == Overwrote::Done
            }
            _ => false,
        };
        // Who looked meanwhile, and read the old content after that, must find another time now. It took no lock to read: that
        // its look is seen here follows from a fence of its own, before it read, and this one.
        fence(Ordering::SeqCst);
        self.stamp(state, now);
        Ok(written)
    }

    /// The content changes at `now`, but not the size. The file gets that time if its own is older, or a newer one if
    /// it was shown with that.
    fn stamp(&self, state: &Arc<FileState>, now: Timestamp) {
        if !state.meta.is_stamped(now) {
            let now_ns = self.now_ns();
            self.stamp_locked(&mut state.meta.lock(), now_ns);
        }
    }

    /// Whether a page has a block of its own, as long as the I/O lock is held shared.
    fn has_block(&self, state: &Arc<FileState>, page: u64) -> Result<bool, Error> {
        Ok(!self.mapped(state, page..page + 1)?.is_empty())
    }

    /// A buffered write; the caller holds the I/O lock exclusively.
    pub(super) fn write_locked(
        &self,
        state: &Arc<FileState>,
        offset: u64,
        data: &[u8],
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
                let part = &data[(at - offset) as usize..(stop - offset) as usize];
                match self.write_step(state, at, part, now_ns) {
                    Ok(()) => at = stop,
                    Err(Error::NoSpace) => return self.write_pages(state, &mut at, part, now_ns),
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        self.note_ahead(state);
        if at > offset {
            if planted(Canary::SizeBeforeData) {
                self.log_changes(state, Vec::new(), Vec::new(), state.size())?;
            }
            return Ok((at - offset) as usize);
        }
        outcome.map(|()| 0)
    }

    /// The content up to `end` is about to change. Records of the change itself carry the new times: a crash
    /// must not leave a new size under an old time. Returns the monotonic time.
    pub(super) fn touch(&self, state: &Arc<FileState>, end: u64) -> Result<u64, Error> {
        let now_ns = self.now_ns();
        let mut meta = state.meta.lock();
        if meta.cutting && end > meta.size {
            drop(meta);
            self.finish_cut(state)?;
            meta = state.meta.lock();
        }
        self.stamp_locked(&mut meta, now_ns);
        Ok(now_ns)
    }

    /// The one place where a change of content gets its time.
    fn stamp_locked(&self, meta: &mut Meta, now_ns: u64) {
        let now = self.times.after(meta.looked);
        meta.touch(now, now_ns);
    }

    /// The content has changed. Who looked meanwhile may have seen the new time with the old content: then it gets
    /// a newer one. What was logged meanwhile may have ended what `touch` began.
    pub(super) fn note_ahead(&self, state: &Arc<FileState>) {
        let mut meta = state.meta.lock();
        if meta.stamped.is_none() {
            self.stamp_locked(&mut meta, self.now_ns());
        }
        if meta.ahead_since_ns.is_none() && meta.is_ahead() {
            meta.ahead(self.now_ns());
        }
    }

    /// Writes page by page where a whole step found no space, as far as it goes.
    fn write_pages(
        &self,
        state: &Arc<FileState>,
        at: &mut u64,
        part: &[u8],
        now_ns: u64,
    ) -> Result<(), Error> {
        let (start, end) = (*at, *at + part.len() as u64);
        while *at < end {
            let stop = ((*at / PAGE + 1) * PAGE).min(end);
            let bytes = &part[(*at - start) as usize..(stop - start) as usize];
            self.write_step(state, *at, bytes, now_ns)?;
            *at = stop;
        }
        Ok(())
    }

    /// Writes bytes within one step: promises what is needed, then fills pages.
    fn write_step(
        &self,
        state: &Arc<FileState>,
        offset: u64,
        data: &[u8],
        now_ns: u64,
    ) -> Result<(), Error> {
        let end = offset + data.len() as u64;
        let pages = pages_of(offset..end);
        self.leave_inline(state, end)?;
        let holes = self.holes(state, pages.clone())?;
        // Held apart from the file's promise until the pages are dirty: a write-back in
        // between gives back what no dirty page needs.
        let mut promise = self.promise_or_settle(state, holes.pages(), end)?;
        self.fill_pages(state, offset, data, (&holes, &mut promise), now_ns)
    }

    fn fill_pages(
        &self,
        state: &Arc<FileState>,
        offset: u64,
        data: &[u8],
        (holes, promise): (&Holes, &mut Promised<'_>),
        now_ns: u64,
    ) -> Result<(), Error> {
        let end = offset + data.len() as u64;
        let mut at = offset;
        while at < end {
            let page = at / PAGE;
            let stop = ((page + 1) * PAGE).min(end);
            let bytes = &data[(at - offset) as usize..(stop - offset) as usize];
            let part = ((at % PAGE) as usize, bytes);
            let promise = holes.contains(page).then_some(&mut *promise);
            self.write_page(state, page, part, promise, now_ns)?;
            at = stop;
        }
        Ok(())
    }

    /// Puts bytes into one page of the cache; the page is loaded first when only part of it
    /// is written. `promise` gives a block to a page that has none. When the cache is full
    /// of dirty pages the file is written back, and at worst the page goes straight home.
    fn write_page(
        &self,
        state: &Arc<FileState>,
        page: u64,
        part: (usize, &[u8]),
        promise: Option<&mut Promised<'_>>,
        now_ns: u64,
    ) -> Result<(), Error> {
        let (key, backing) = match promise {
            Some(_) => (state.key, Backing::Promised),
            None => (state.key, Backing::Allocated),
        };
        let put = |rest: Rest<'_>| self.pages.write(key, page, part, rest, backing, now_ns);
        let account = |promise: Option<&mut Promised<'_>>| {
            let blocks = promise.map_or(0, |p| p.give(1));
            let mut meta = state.meta.lock();
            meta.promised += blocks;
            if !part.1.is_empty() {
                let end = page * PAGE + (part.0 + part.1.len()) as u64;
                meta.size = meta.size.max(end);
            }
            meta.size
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
        let size = account(promise);
        self.store_run(state, page, &around, size)
    }

    /// Pages of a range that are neither dirty nor mapped: each needs a promised block.
    fn holes(&self, state: &Arc<FileState>, pages: Range<u64>) -> Result<Holes, Error> {
        let mut holes = Holes::default();
        let dirty = |page| {
            let state = self.pages.state(state.key, page);
            matches!(state, Some(PageState::Dirty(_)))
        };
        let Some(first) = pages.clone().find(|&page| !dirty(page)) else {
            return Ok(holes);
        };
        let mapped = self.mapped(state, first..pages.end)?;
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
        state: &Arc<FileState>,
        pages: Range<u64>,
    ) -> Result<Vec<FileExtent>, Error> {
        if state.meta.lock().replaced {
            return Ok(Vec::new());
        }
        let content = state.node.read()?;
        extents::lookup(&self.store, content.inode()?, pages, usize::MAX)
    }

    /// Promises blocks for a write up to `end`; a full disk first gets back what a replaced file still holds.
    fn promise_or_settle(
        &self,
        state: &Arc<FileState>,
        blocks: u64,
        end: u64,
    ) -> Result<Promised<'_>, Error> {
        match self.promise(blocks) {
            Err(Error::NoSpace) if state.meta.lock().replaced => {
                self.flush_within(state, end)?;
                self.promise(blocks)
            }
            other => other,
        }
    }

    /// Before a file with an inline body grows beyond what fits there, its content becomes a
    /// dirty page, so that write-back moves it out of the inode.
    pub(super) fn leave_inline(&self, state: &Arc<FileState>, end: u64) -> Result<(), Error> {
        if end <= INLINE_DATA_MAX as u64 && !state.meta.lock().keep_extents {
            return Ok(());
        }
        let inline = {
            let content = state.node.read()?;
            matches!(&content.inode()?.body, Body::Inline(bytes) if !bytes.is_empty())
        };
        if inline && !state.meta.lock().replaced {
            self.dirty_page(state, 0)?;
        }
        Ok(())
    }

    /// Makes a page dirty as it is.
    pub(super) fn dirty_page(&self, state: &Arc<FileState>, page: u64) -> Result<(), Error> {
        if let Some(PageState::Dirty(_)) = self.pages.state(state.key, page) {
            return Ok(());
        }
        let holes = self.holes(state, page..page + 1)?;
        let mut promise = self.promise_or_settle(state, holes.pages(), (page + 1) * PAGE)?;
        let promise = holes.contains(page).then_some(&mut promise);
        self.write_page(state, page, (0, &[]), promise, self.now_ns())
    }

    /// Before the file grows beyond `from`: the rest of its last page on the device may hold
    /// old bytes, so the page, which reads as zeros there, is made dirty (R16).
    pub(super) fn extend_tail(&self, state: &Arc<FileState>, from: u64) -> Result<(), Error> {
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

    /// A direct write of whole pages: the cached pages of the range are written back and
    /// dropped, then the data goes to its blocks and one record maps new ones.
    fn write_direct(
        &self,
        state: &Arc<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, Error> {
        let _exclusive = state.lock_exclusive()?;
        let end = offset.checked_add(data.len() as u64);
        let Some(end) = end.filter(|end| *end <= SIZE_MAX) else {
            return Err(Error::FileTooLarge);
        };
        self.touch(state, end)?;
        self.extend_tail(state, offset)?;
        self.leave_inline(state, end.max(INLINE_DATA_MAX as u64 + 1))?;
        state.meta.lock().keep_extents = true;
        self.flush_locked(state)?;
        let pages = pages_of(offset..end);
        self.drop_pages(state, pages.clone());
        let mut at = pages.start;
        while at < pages.end {
            let stop = pages.end.min(at + STEP / PAGE);
            let part = &data[((at - pages.start) * PAGE) as usize..];
            let part = &part[..((stop - at) * PAGE) as usize];
            let outcome = self.direct_step(state, at, part);
            if let Err(error) = outcome {
                if at == pages.start || !matches!(error, Error::NoSpace) {
                    self.note_ahead(state);
                    return Err(error);
                }
                break;
            }
            at = stop;
        }
        self.note_ahead(state);
        Ok(((at - pages.start) * PAGE) as usize)
    }

    fn direct_step(&self, state: &Arc<FileState>, page: u64, data: &[u8]) -> Result<(), Error> {
        let pages = page..page + data.len() as u64 / PAGE;
        let holes = self.holes(state, pages.clone())?;
        let mut promise = self.promise(holes.pages())?;
        let size = {
            let mut meta = state.meta.lock();
            meta.promised += promise.give(u64::MAX);
            meta.size.max(pages.end * PAGE)
        };
        let outcome = self.store_run(state, page, data, size);
        self.trim_promise(state);
        outcome
    }
}

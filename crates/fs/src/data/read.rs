//! Reading: cache hits are copied; misses are read in clusters, with read-ahead.

use super::advice::Advice;
use super::ahead::Found;
use super::bounce::Bounce;
use super::extents::{self, Mapped, PAGE_LIMIT};
use super::file::{FileState, OpenFile};
use super::gate::Quiet;
use super::ranges::Mode;
use super::runs::ReadRun;
use super::stream::Streamed;
use super::{Files, PAGE, is_one_page, pages_of};
use crate::content::{Body, FileExtent};
use crate::{AtimePolicy, Error};
use base::atomic::Ordering;
use base::canary::{Canary, planted};
use base::clock::Timestamp;
use base::counted::Counted;
use base::moves;
use base::tight;
use device::{Io, Scattered};
use engine::cache::{Absence, Load, WAYS};
use engine::{Extent, NewData};
use format::BLOCK_SIZE;
use smallvec::SmallVec;
use std::ops::Range;

/// Pages that one device batch reads.
pub(super) const CLUSTER: u64 = 256;
/// Pages from which on a read has devices fill the frames where they stay: for less, the kernel takes longer over memory in pieces than a
/// copy takes.
const FRAMED_MIN: usize = 8;
const DAY_SECONDS: i64 = 24 * 60 * 60;

/// How often a read takes up what was written while it read from a device, before it keeps writers out.
pub(super) const TRIES: u32 = 3;

fn framed_min() -> usize {
    tight::limit(FRAMED_MIN, 2)
}

/// How a range is read.
pub(super) struct Reading<'a> {
    /// Pages beyond it.
    pub ahead: u64,
    /// Through this handle, if what is read is cached, and its run that this goes on with, if it does.
    pub by: Option<(&'a OpenFile, Option<&'a ReadRun>)>,
    /// What is read from a device is cached.
    pub keep: bool,
    /// The I/O lock is held exclusively.
    pub alone: bool,
    /// A range is held that has all pages that are read: nobody writes them past the cache.
    pub in_turn: bool,
    /// It renews the access time where that is due.
    pub counts: bool,
}

/// A read that goes on where one before it through the same handle ended: with which run, and pages to read beyond it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Going {
    run: usize,
    window: u64,
}

impl Going {
    /// Something is read beyond it.
    pub fn is_ahead(self) -> bool {
        self.window > 0
    }
}

impl Reading<'_> {
    /// Nothing but what is asked for, beside writers.
    pub const fn beside() -> Self {
        Reading {
            ahead: 0,
            by: None,
            keep: true,
            alone: false,
            in_turn: false,
            counts: false,
        }
    }
}

/// Pages that were not cached, and that they were not.
pub(super) struct Missing {
    pub pages: Range<u64>,
    absences: SmallVec<[Absence; 4]>,
    /// That nobody wrote several pages, or past the cache, when they were not cached.
    quiet: Option<Quiet>,
}

impl Missing {
    pub fn bytes(&self) -> usize {
        self.absences.len() * BLOCK_SIZE
    }

    /// Nobody has written several pages, or past the cache, since it was known that they are not cached.
    pub fn is_undisturbed(&self, state: &FileState) -> bool {
        is_undisturbed(state, self.quiet)
    }
}

/// Nobody has written several pages, or past the cache, since.
pub(super) fn is_undisturbed(state: &FileState, quiet: Option<Quiet>) -> bool {
    let still = |quiet| state.stores.is_still(quiet);
    quiet.is_some_and(still) || planted(Canary::LoadUndoomed)
}

impl OpenFile {
    fn run_of(&self, going: Going) -> Option<(&ReadRun, u64)> {
        let run = self.reads.iter().find(|run| run.id() == going.run)?;
        Some((run, going.window))
    }
}

impl Files {
    /// Reads up to `buf.len()` bytes at `offset`; fewer only at the end of the file.
    ///
    /// # Errors
    /// [`Error::BadHandle`] through a handle that is for writing alone.
    pub fn read(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> Result<usize, Error> {
        file.check_readable()?;
        let most = self.most_ahead(file);
        let going = file.go_on_reading(offset, buf.len() as u64, most);
        self.read_on(file, offset, buf, going)
    }

    /// Pages to read beyond a request at most.
    fn most_ahead(&self, file: &OpenFile) -> u64 {
        match file.has(libc::O_DIRECT) || file.is_advised(Advice::Random) {
            true => 0,
            false => self.options.read_ahead / PAGE,
        }
    }

    /// Notes that a request of a handle begins here which [`read_going`](Self::read_going) does later, if nobody else does: once for each request, in the order in which they come.
    pub(crate) fn note_going(&self, file: &OpenFile, offset: u64, len: usize) -> Option<Going> {
        if file.has(libc::O_DIRECT) {
            return None;
        }
        let going = file.go_on_reading(offset, len as u64, self.most_ahead(file));
        going.map(|(run, window)| Going {
            run: run.id(),
            window,
        })
    }

    /// As [`read`](Self::read) of a request that was noted.
    pub(crate) fn read_going(
        &self,
        file: &OpenFile,
        offset: u64,
        buf: &mut [u8],
        going: Option<Going>,
    ) -> Result<usize, Error> {
        file.check_readable()?;
        let going = going.and_then(|going| file.run_of(going));
        self.read_on(file, offset, buf, going)
    }

    /// Whether such a request [is a stream's](Self::is_stream).
    pub(super) fn is_stream_of(
        &self,
        file: &OpenFile,
        going: Going,
        offset: u64,
        len: usize,
    ) -> bool {
        let going = file.run_of(going).filter(|&(_, window)| window > 0);
        going.is_some_and(|(run, _)| self.is_stream(file, run, offset, len))
    }

    /// Has read what lies behind such a request, which has found all it wanted.
    pub(super) fn ask_ahead_of(&self, file: &OpenFile, going: Going, bytes: Range<u64>) {
        if let Some((run, window)) = file.run_of(going).filter(|&(_, window)| window > 0) {
            self.ask_ahead(file, run, bytes, window);
        }
    }

    /// Whether a write of these bytes begins or ends within a page of the file that is not cached. A hint.
    pub(crate) fn has_to_load(&self, file: &OpenFile, offset: u64, len: usize) -> bool {
        let (state, end) = (&file.state, offset.saturating_add(len as u64));
        let has_to = |at: u64| {
            let part = !at.is_multiple_of(PAGE) && at < state.size();
            part && self.pages.absence(state.key, at / PAGE).is_some()
        };
        has_to(offset) || has_to(end)
    }

    fn read_on(
        &self,
        file: &OpenFile,
        offset: u64,
        buf: &mut [u8],
        going: Option<(&ReadRun, u64)>,
    ) -> Result<usize, Error> {
        let direct = file.has(libc::O_DIRECT);
        let bytes = offset..offset.saturating_add(buf.len() as u64);
        let run = going.map(|(run, _)| run);
        let going = going.filter(|&(_, window)| window > 0);
        let streams = |&(run, _): &(&ReadRun, u64)| self.is_stream(file, run, offset, buf.len());
        let beside = match going.filter(streams) {
            None => false,
            Some((run, _)) => match self.read_stream((file, run), offset, buf) {
                Streamed::Read(len) => return Ok(len),
                Streamed::Beside => true,
                Streamed::Not => false,
            },
        };
        let mut how = Reading {
            ahead: match going {
                Some((run, window)) if !beside => self.ask_ahead(file, run, bytes, window),
                _ => 0,
            },
            by: (!direct).then_some((file, run)),
            keep: !direct,
            alone: false,
            in_turn: false,
            counts: !file.has(libc::O_NOATIME),
        };
        let state = &file.state;
        {
            let _shared = self.lock_shared(state)?;
            // A page is seen as one; of several it must be known that none was written meanwhile.
            if let Some(quiet) = state.stores.quiet()
                && let Some(len) = self.read_locked(state, offset, buf, &how)?
                && (state.stores.is_still(quiet) || is_one_page(offset, buf.len()))
            {
                self.forget_read(file, offset..offset + len as u64);
                return Ok(len);
            }
        }
        self.read_in_turn(state, offset, buf, &mut how)
    }

    /// A read that meets writes of several pages, or pages that are written as it reads them.
    #[cold]
    fn read_in_turn(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        buf: &mut [u8],
        how: &mut Reading,
    ) -> Result<usize, Error> {
        let pages = pages_of(offset..offset.saturating_add(buf.len() as u64));
        let _range = self.hold(state, pages, Mode::Load);
        // Nothing beyond them is read.
        (how.in_turn, how.ahead, how.by) = (true, 0, None);
        {
            let _shared = self.lock_shared(state)?;
            if let Some(len) = self.read_locked(state, offset, buf, how)? {
                return Ok(len);
            }
        }
        let _exclusive = self.lock_exclusive(state)?;
        how.alone = true;
        let len = self.read_locked(state, offset, buf, how)?;
        Ok(len.unwrap_or(0))
    }

    /// As `read`, under the I/O lock. `None`: others have written too often meanwhile, which they cannot under the
    /// exclusive one.
    pub(super) fn read_locked(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        buf: &mut [u8],
        how: &Reading<'_>,
    ) -> Result<Option<usize>, Error> {
        let size = state.size();
        if buf.is_empty() {
            return Ok(Some(0));
        }
        let len = (size.saturating_sub(offset)).min(buf.len() as u64) as usize;
        if len > 0 && !self.read_range(state, offset, &mut buf[..len], how)? {
            return Ok(None);
        }
        if how.counts {
            self.touch_atime(state)?;
        }
        Ok(Some(len))
    }

    /// Reads bytes that lie below the end of the file. The caller holds the I/O lock. False: see `read_locked`.
    fn read_range(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        buf: &mut [u8],
        how: &Reading<'_>,
    ) -> Result<bool, Error> {
        let end = offset + buf.len() as u64;
        let last = end.div_ceil(PAGE);
        let (mut at, mut stale) = (offset, 0);
        // Pages below were tried to be read to their frames.
        let mut framed = 0;
        while at < end {
            let (page, within) = (at / PAGE, (at % PAGE) as usize);
            let len = (BLOCK_SIZE - within).min((end - at) as usize);
            let from = (at - offset) as usize;
            let out = &mut buf[from..][..len];
            let found = match how.keep {
                true => self.pages.read(state.key, page, within, out),
                false => self.pages.copy(state.key, page, within, out),
            };
            if found {
                at += len as u64;
                continue;
            }
            let Some(until) = self.until(state, page, end, how) else {
                continue;
            };
            // Devices fill the caller's memory, where that has whole pages and the cache has no use for them.
            let whole = match !how.keep && within == 0 && self.suits_devices(&buf[from..]) {
                true => (end - at) / PAGE,
                false => 0,
            };
            let last = match whole {
                0 => last.max(until),
                whole => page + whole,
            };
            let reach = self.run_end(state, page, last, how.ahead);
            if how.keep && !how.in_turn && page >= framed && (reach - page) as usize >= framed_min()
            {
                framed = reach;
                let good = self.read_framed(state, page..reach, at, &mut buf[from..]);
                let stop = end.min(good * PAGE);
                if stop > at {
                    self.note_asked(how, until == page + 1, last.max(good));
                    let wanted = stop.div_ceil(PAGE);
                    self.pages.brought(wanted - page, good - wanted);
                    at = stop;
                    continue;
                }
            }
            let Some(mut missing) = self.missing_run(state, page..reach) else {
                continue;
            };
            self.note_asked(how, until == page + 1, last.max(missing.pages.end));
            let mut apart = (whole == 0).then(|| self.memory.take(missing.bytes()));
            let mut loaded = match &mut apart {
                Some(memory) => &mut memory[..],
                None => &mut buf[from..][..missing.bytes()],
            };
            if let Err(error) = self.load_into(state, missing.pages.clone(), loaded) {
                // What cannot be read may be a neighbour that nobody asked for.
                if missing.pages.end == page + 1 {
                    return Err(error);
                }
                missing.pages.end = page + 1;
                loaded = &mut loaded[..BLOCK_SIZE];
                self.load_into(state, missing.pages.clone(), loaded)?;
            }
            let good = self.admit(state, &missing, loaded, how);
            if good.is_empty() && !(how.alone || how.in_turn || missing.is_undisturbed(state)) {
                // It takes its turn.
                return Ok(false);
            }
            let stop = end.min(good.end * PAGE);
            if stop > at {
                if let Some(memory) = &apart {
                    let len = (stop - at) as usize;
                    moves::copy(&memory[within..within + len], &mut buf[from..][..len]);
                }
                if how.keep {
                    let wanted = stop.div_ceil(PAGE);
                    self.pages.brought(wanted - page, good.end - wanted);
                }
                at = stop;
            }
            if at < end && good.end < missing.pages.end {
                stale += 1;
                if stale == TRIES {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// A read waits for a device: threads shall be asked for what comes next, whatever they were asked for before, unless they were asked for what it needs.
    fn note_asked(&self, how: &Reading<'_>, alone: bool, next: u64) {
        if let Some((_, Some(run))) = how.by.filter(|_| alone) {
            run.asked.store(next, Ordering::Relaxed);
        }
    }

    /// Reads absent pages to the frames where they stay, and from there into `buf`, which is for the bytes from `at` on. Returns the page before which `buf` has what the file
    /// holds; what is not so, for lack of frames, or since a device fails or somebody writes, is the caller's to read otherwise. The caller holds the I/O lock.
    fn read_framed(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
        at: u64,
        buf: &mut [u8],
    ) -> u64 {
        let mut good = pages.start;
        let beside = self.cleaning.beside_read();
        let loads = match self.framed(state, pages, framed_min()) {
            Ok(loads) => loads.unwrap_or_default(),
            Err(error) => {
                // It may be a neighbour that nobody asked for.
                tracing::debug!("a read of inode {} to the cache: {error}", state.ino());
                return good;
            }
        };
        drop(beside);
        let end = at + buf.len() as u64;
        for load in loads {
            let page = load.page();
            let (start, stop) = ((page * PAGE).max(at), ((page + 1) * PAGE).min(end));
            if good == page && start < stop {
                let out = &mut buf[(start - at) as usize..(stop - at) as usize];
                load.copy_out((start % PAGE) as usize, out);
            }
            if load.publish() && good == page {
                good += 1;
            }
        }
        good
    }

    /// The first of these pages, as far as they are absent and if they are `least` at least, in frames where they may stay. `None`: somebody has written meanwhile, and they
    /// may be another thing. The caller holds the I/O lock.
    pub(super) fn framed(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
        least: usize,
    ) -> Result<Option<Vec<Load<'_>>>, Error> {
        // Before it is known that they are not cached, and before they are read.
        let quiet = state.stores.quiet();
        if !is_undisturbed(state, quiet) {
            return Ok(None);
        }
        let absent = |page| self.pages.begin_load(state.key, page);
        let mut loads: Vec<Load<'_>> = pages.map_while(absent).collect();
        if loads.len() < least {
            return Ok(Some(Vec::new()));
        }
        loads.iter_mut().for_each(Load::show_early);
        self.load_frames(state, &mut loads)?;
        Ok(is_undisturbed(state, quiet).then_some(loads))
    }

    /// Devices take this memory as it lies; of other memory they get a copy.
    pub(super) fn suits_devices(&self, memory: &[u8]) -> bool {
        memory
            .as_ptr()
            .addr()
            .is_multiple_of(self.store.array().memory_align())
    }

    /// How far a request is to read at least that needs a page which is not cached, and ends at byte `end`. `None`: it was being loaded.
    fn until(
        &self,
        state: &Counted<FileState>,
        page: u64,
        end: u64,
        how: &Reading<'_>,
    ) -> Option<u64> {
        let Some((file, run)) = how.by else {
            return Some(page + 1);
        };
        if run.is_none() {
            file.reads.jumped(end);
        }
        match self.ahead.look_for(file.id(), state.key, page) {
            Found::Loaded => None,
            Found::Free(until) => Some(until),
        }
    }

    /// How far a read at `page` goes at once: to `last`, and `ahead` more inside the file.
    pub(super) fn run_end(&self, state: &FileState, page: u64, last: u64, ahead: u64) -> u64 {
        let eof = state.size().div_ceil(PAGE);
        let wanted = last.max((page + 1).saturating_add(ahead)).min(eof);
        wanted.min(page + self.room_ahead()).max(page + 1)
    }

    /// The first of these pages, as far as they are not cached. `None`: the first one is by now.
    pub(super) fn missing_run(&self, state: &FileState, pages: Range<u64>) -> Option<Missing> {
        let page = pages.start;
        // Before it is known that they are not cached, and before they are read.
        let quiet = state.stores.quiet();
        let absent = |page| self.pages.absence(state.key, page);
        let absences: SmallVec<_> = pages.map_while(absent).collect();
        let end = page + absences.len() as u64;
        (end > page).then_some(Missing {
            pages: page..end,
            absences,
            quiet,
        })
    }

    /// Pages that are read at once, or ahead of a reader. These must not push out each other: one page for each set, at most.
    pub(super) fn room_ahead(&self) -> u64 {
        CLUSTER.min((self.pages.capacity() / WAYS) as u64).max(1)
    }

    /// Caches what was read from a device. Returns the first of these pages, as far as this is what they hold: one
    /// that somebody has loaded, overwritten, written back and lost again meanwhile may hold anything. So may one that somebody writes
    /// past the cache at that time: in part what it was, in part what it will be, and not yet what a sync would make durable.
    pub(super) fn admit(
        &self,
        state: &Counted<FileState>,
        missing: &Missing,
        loaded: &[u8],
        how: &Reading<'_>,
    ) -> Range<u64> {
        let mut good = missing.pages.start..missing.pages.start;
        if !(how.alone || how.in_turn || missing.is_undisturbed(state)) {
            return good;
        }
        let contents = loaded.chunks(BLOCK_SIZE).zip(&missing.absences);
        for (page, (content, absence)) in (missing.pages.start..).zip(contents) {
            let fresh = match how.in_turn {
                true => (self.pages).admit_apart(state.key, page, *absence, content, how.keep),
                false => (self.pages).admit(state.key, page, *absence, content, how.keep),
            };
            if (fresh || how.alone) && good.end == page {
                good.end += 1;
            }
        }
        good
    }

    /// Reads pages that are not cached; see [`load_into`](Self::load_into).
    pub(super) fn load_pages(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
    ) -> Result<Bounce<'_>, Error> {
        let mut buf = self
            .memory
            .take((pages.end - pages.start) as usize * BLOCK_SIZE);
        self.load_into(state, pages, &mut buf)?;
        Ok(buf)
    }

    /// Data of a mapping that was just looked up which its blocks may not hold yet.
    fn waiting_data(&self, mapped: &[FileExtent]) -> Vec<Waiting> {
        let mut found = Vec::new();
        for extent in mapped.iter().filter(|extent| extent.written) {
            for data in self.store.waiting_data(extent.blocks()) {
                let Extent { block, len } = data.blocks();
                let first = block.0.max(extent.block.0);
                let end = (block.0 + u64::from(len)).min(extent.block.0 + u64::from(extent.len));
                let page = |block: u64| extent.page + (block - extent.block.0);
                found.push(Waiting {
                    pages: page(first)..page(end),
                    at: (first - block.0) as usize * BLOCK_SIZE,
                    data,
                });
            }
        }
        found
    }

    /// Fills memory with pages that are not cached: holes, unwritten extents and whatever lies beyond the
    /// end of the file are zeros. The caller holds the I/O lock.
    pub(super) fn load_into(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
        buf: &mut [u8],
    ) -> Result<(), Error> {
        let (size, replaced) = {
            let meta = state.meta.lock();
            (meta.size, meta.replaced)
        };
        if replaced || pages.start * PAGE >= size {
            buf.fill(0);
            return Ok(());
        }
        let _beside = self.cleaning.beside_read();
        let (mapped, tail) = {
            let content = state.node.read()?;
            let inode = content.inode()?;
            let tail = inode.tail.as_ref().filter(|t| pages.contains(&t.page));
            let mapped = match &inode.body {
                Body::Inline(_) => Mapped::new(),
                _ => extents::lookup(&self.store, inode, pages.clone(), usize::MAX)?,
            };
            zero_between(&mapped, pages.start, buf);
            if let Body::Inline(bytes) = &inode.body
                && pages.start == 0
            {
                let len = bytes.len().min(buf.len());
                buf[..len].copy_from_slice(&bytes[..len]);
            }
            (mapped, tail.cloned())
        };
        // What the block behind a tail holds, or whether it can be read, is of no account.
        let mut mapped = match &tail {
            Some(tail) => without(&mapped, &(tail.page..tail.page + 1)),
            None => mapped,
        };
        let waiting = self.waiting_data(&mapped);
        for Waiting { pages, .. } in &waiting {
            mapped = without(&mapped, pages);
        }
        let mut ios: SmallVec<[Io<'_>; 2]> = SmallVec::with_capacity(mapped.len());
        let mut rest = &mut *buf;
        let mut at = pages.start;
        for extent in mapped.iter().filter(|e| e.written) {
            let (_, tail) = rest.split_at_mut((extent.page - at) as usize * BLOCK_SIZE);
            let (part, tail) = tail.split_at_mut(extent.len as usize * BLOCK_SIZE);
            ios.push(Io::Read {
                byte: extent.block.byte(),
                buf: part,
            });
            rest = tail;
            at = extent.end();
        }
        if !ios.is_empty() {
            let done = self.store.array().execute(&mut ios);
            done.map_err(engine::Error::from)?;
        }
        drop(ios);
        // What was staged last comes last.
        for waiting in &waiting {
            let start = (waiting.pages.start - pages.start) as usize * BLOCK_SIZE;
            let len = (waiting.pages.end - waiting.pages.start) as usize * BLOCK_SIZE;
            let bytes = &waiting.data.bytes()[waiting.at..waiting.at + len];
            buf[start..start + len].copy_from_slice(bytes);
        }
        if let Some(tail) = tail {
            tail.overlay(pages.start, buf);
        }
        let valid = size.saturating_sub(pages.start * PAGE);
        if valid < buf.len() as u64 {
            buf[valid as usize..].fill(0);
        }
        Ok(())
    }

    /// Fills frames that were set aside for pages that follow each other with what [`load_into`](Self::load_into) would. The
    /// caller holds the I/O lock.
    pub(super) fn load_frames(
        &self,
        state: &Counted<FileState>,
        loads: &mut [Load<'_>],
    ) -> Result<(), Error> {
        let (Some(first), Some(last)) = (loads.first(), loads.last()) else {
            return Ok(());
        };
        let pages = first.page()..last.page() + 1;
        let size = state.size();
        let Some(mapped) = self.mapped_alone(state, &pages)? else {
            let content = self.load_pages(state, pages)?;
            let each = loads.iter_mut().zip(content.chunks(BLOCK_SIZE));
            each.for_each(|(load, content)| load.fill(content));
            return Ok(());
        };
        let mut runs = Vec::with_capacity(mapped.len());
        let (mut rest, mut at) = (&mut *loads, pages.start);
        for extent in mapped.iter().filter(|e| e.written) {
            let (hole, behind) = rest.split_at_mut((extent.page - at) as usize);
            hole.iter_mut().for_each(Load::clear);
            let (here, behind) = behind.split_at_mut(extent.len as usize);
            runs.push(Scattered {
                byte: extent.block.byte(),
                memory: here.iter_mut().map(Load::memory).collect(),
            });
            (rest, at) = (behind, extent.end());
        }
        rest.iter_mut().for_each(Load::clear);
        let done = self.store.array().read_scattered(runs);
        done.map_err(engine::Error::from)?;
        for load in loads {
            let valid = size.saturating_sub(load.page() * PAGE);
            if valid < PAGE {
                load.zero(valid as usize..BLOCK_SIZE);
            }
        }
        Ok(())
    }

    /// The mapping of pages whose content is in their blocks alone; `None`: some of it is elsewhere.
    fn mapped_alone(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
    ) -> Result<Option<Mapped>, Error> {
        if state.meta.lock().replaced {
            return Ok(None);
        }
        let content = state.node.read()?;
        let inode = content.inode()?;
        let tail = inode.tail.as_ref();
        let elsewhere = tail.is_some_and(|tail| pages.contains(&tail.page));
        if elsewhere || matches!(inode.body, Body::Inline(_)) {
            return Ok(None);
        }
        let mapped = extents::lookup(&self.store, inode, pages.clone(), usize::MAX)?;
        let is_there = self.waiting_data(&mapped).is_empty();
        Ok(is_there.then_some(mapped))
    }

    /// Reading through this handle renews the access time if that is due, whoever has the bytes. Says whether it did.
    pub(crate) fn note_read(&self, file: &OpenFile) -> Result<bool, Error> {
        match file.has(libc::O_NOATIME) {
            true => Ok(false),
            false => self.touch_atime(&file.state),
        }
    }

    /// Notes an access time if the policy wants one; it reaches the inode with its next record. Says whether it was due.
    fn touch_atime(&self, state: &Counted<FileState>) -> Result<bool, Error> {
        if self.options.atime == AtimePolicy::Never || self.store.read_only() {
            return Ok(false);
        }
        let now = self.now();
        if state.meta.is_read(now) {
            return Ok(false);
        }
        let content = state.node.read()?;
        let inode = content.inode()?;
        let mut meta = state.meta.lock();
        let atime = meta.times.atime.unwrap_or(inode.atime);
        let changed = |new: Option<Timestamp>, old: Timestamp| atime <= new.unwrap_or(old);
        let due = self.options.atime == AtimePolicy::Always
            || changed(meta.times.mtime, inode.mtime)
            || changed(meta.times.ctime, inode.ctime)
            || now.sec().saturating_sub(atime.sec()) >= DAY_SECONDS;
        if due && atime != now {
            meta.times.atime = Some(now);
            meta.ahead(self.now_ns());
        }
        meta.read_until = Some(match due {
            true => now,
            false => Timestamp::new(atime.sec().saturating_add(DAY_SECONDS - 1), 0),
        });
        Ok(due)
    }

    /// The first page at or after `page` that is written to its block or in the inode, and where such pages end.
    pub(super) fn next_written(
        &self,
        state: &Counted<FileState>,
        mut page: u64,
    ) -> Result<Option<Range<u64>>, Error> {
        loop {
            let content = state.node.read()?;
            let inode = content.inode()?;
            if let Body::Inline(bytes) = &inode.body {
                let data = page == 0 && !bytes.is_empty();
                return Ok(data.then_some(0..1));
            }
            let tail = inode.tail.as_ref().map(|t| t.page..t.page + 1);
            let tail = tail.filter(|tail| tail.start >= page);
            let found = extents::lookup(&self.store, inode, page..PAGE_LIMIT, 64)?;
            if let Some(extent) = found.iter().find(|e| e.written) {
                let run = extent.page..extent.end();
                return Ok(Some(tail.filter(|t| t.start < run.start).unwrap_or(run)));
            }
            match found.last() {
                // Unwritten up to there, but for the tail.
                Some(last) if tail.as_ref().is_none_or(|tail| tail.start >= last.end()) => {
                    page = last.end();
                }
                _ => return Ok(tail),
            }
        }
    }
}

/// Data that waits for its commit: of these pages, which begin at `at` in it.
struct Waiting {
    pages: Range<u64>,
    at: usize,
    data: NewData,
}

/// What is mapped outside these pages.
fn without(mapped: &[FileExtent], pages: &Range<u64>) -> Mapped {
    let mut others = Mapped::from_vec(extents::clip(mapped, &(0..pages.start)));
    others.extend(extents::clip(mapped, &(pages.end..PAGE_LIMIT)));
    others
}

/// Zeros what no written extent covers of pages from `first` on.
fn zero_between(mapped: &[FileExtent], first: u64, pages: &mut [u8]) {
    let mut at = 0;
    for extent in mapped.iter().filter(|e| e.written) {
        let start = (extent.page - first) as usize * BLOCK_SIZE;
        pages[at..start].fill(0);
        at = start + extent.len as usize * BLOCK_SIZE;
    }
    pages[at..].fill(0);
}

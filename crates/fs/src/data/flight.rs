//! Reads in flight: begun under the file's shared lock, landed without waiting for any.
//!
//! 1. A flight holds nothing that anybody waits for. What it was told of the file may be over when it lands: then what it
//!    has read is not used, and it begins again.
//! 2. Blocks are taken from a file only under its exclusive I/O lock, and only after that was counted
//!    ([`FileState::exclusives`]). So a flight that finds the count it saw under the shared lock, with the mapping, has read
//!    blocks that were the file's all the time; also if they are another file's now.
//! 3. A page that is cached is read from the cache; of one past the cache ([`Flying::past`]) maybe from its device, if none of its pages is dirty, and it counts as long as
//!    nothing of the file becomes dirty ([`PageCache::dirtied`](engine::cache::PageCache::dirtied)). One that was absent when the flight began is what its device held, unless
//!    somebody wrote it meanwhile: the same question as that of a read which waits ([`Files::admit`]).
//! 4. Nobody wrote several pages, or past the cache, that the flight reads between its beginning and its end: nobody did anywhere
//!    ([`gate`](super::gate)), or it was elsewhere ([`ranges`](super::ranges)). So it has all of such a write or nothing, and no page half.
//! 5. What comes for a handle that is not direct is cached when it lands, if the file's shared lock can be had without a wait: that keeps out who cuts the file
//!    between the look at the count (2) and the page's entry. Nothing keeps out a write past the cache that begins after the look at the ranges (4). Either it has
//!    landed, and the page is not entered, since its set counts that ([`PageCache::admit_landed`](engine::cache::PageCache::admit_landed)); or it forgets the page when it lands.
//!    No frame is set aside meanwhile: a flight that ends early, or is lost with its owner, has none to give back. Two flights of one page read it twice, and the first that lands enters it.
//! 6. A page is entered with zeros behind the end of the file. An error of a device enters nothing.
//! 7. Devices fill the request's memory where that has whole pages, else memory of the flight's own ([`Flying::apart`]), from which it is copied: only of a
//!    flight that stands, and as far as the request goes.
//! 8. A read that goes on where another ended, and misses, is done by a thread that may wait, since it has read ahead or waits for what was ([`ahead`](super::ahead)). Which one that is, is noted in the order in
//!    which requests are handed over ([`Going`]), not in that in which threads come to them.
//! 9. Beginning waits for no device and no lock that is held over a wait: what would, is done by a thread that may. One that goes past the cache
//!    ([`Flying::past`]) is begun by such a thread, and may read what the file's mapping is.

mod writing;

pub(super) use writing::is_written;
pub(crate) use writing::{InFlight, Writing};

use super::extents::{self, Mapped};
use super::file::{FileState, OpenFile};
use super::gate::Quiet;
use super::ranges::Moment;
use super::read::Going;
use super::{Files, PAGE, pages_of};
use crate::Error;
use crate::content::Body;
use base::canary::{Canary, planted};
use base::moves;
use base::thread::yield_now;
use device::{AlignedBuf, Run};
use engine::Extent;
use engine::cache::Absence;
use format::{BLOCK_SIZE, Block};
use std::ops::Range;

/// Pages that one flight reads at most.
const PAGES_MAX: u64 = 4096;
/// Pages whose places in the cache are asked for before they are looked at.
const ASKED: u64 = 12;

/// What a flight knows of its file. Made once and used for many.
#[derive(Debug)]
pub(crate) struct Flying {
    offset: u64,
    /// Bytes that are the file's.
    pub len: usize,
    /// It brings what is not cached, also for a handle that is not direct, and leaves out what is.
    pub past: bool,
    /// What it brings is cached.
    keep: bool,
    /// The read that this goes on with, if it does.
    pub going: Option<Going>,
    /// The byte of the file at which the memory begins that devices fill.
    base: u64,
    /// That memory, if it is not the request's own; while the devices have it its owner keeps the request's.
    pub apart: Option<AlignedBuf>,
    exclusives: u64,
    began: Option<Beginning>,
    /// [`PageCache::dirtied`](engine::cache::PageCache::dirtied) when none of its pages was dirty: then all are read from a device, also those that are cached, and
    /// counted as one. `None`: they were looked at one by one.
    clean: Option<u64>,
    /// Whether to do without the former.
    pub one_by_one: bool,
    /// The pages that are read from a device.
    absent: Vec<(u64, Absence)>,
    /// What of the memory lies behind the end of the file.
    beyond: Range<usize>,
}

/// What tells whether somebody wrote since.
#[derive(Clone, Copy, Debug)]
struct Beginning {
    /// Nobody was writing.
    quiet: Option<Quiet>,
    moment: Moment,
}

impl Default for Flying {
    fn default() -> Flying {
        Flying {
            offset: 0,
            len: 0,
            past: false,
            keep: false,
            going: None,
            base: 0,
            apart: None,
            exclusives: 0,
            clean: None,
            one_by_one: false,
            began: None,
            // As many as most flights have, so that no request allocates.
            absent: Vec::with_capacity(8),
            beyond: 0..0,
        }
    }
}

impl Flying {
    /// The bytes of the file that it is about.
    fn span(&self) -> Range<u64> {
        self.offset..self.offset + self.len as u64
    }

    /// The read that this goes on with, if what it brings is cached.
    fn goes_on(&self) -> Option<Going> {
        self.going.filter(|_| self.keep)
    }
}

/// Whether memory of so many bytes has room for all pages of a span: devices read whole pages to aligned memory.
fn is_whole(span: &Range<u64>, memory: usize) -> bool {
    let pages = pages_of(span.clone());
    span.start.is_multiple_of(PAGE) && (pages.end - pages.start) * PAGE <= memory as u64
}

/// How far a read came at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Began {
    /// So many bytes have been read.
    Done(usize),
    /// The rest is in the runs.
    Flies,
    /// It has to wait for something.
    Waits,
}

impl Files {
    /// Begins to read up to `buf.len()` bytes at `offset`: as far as it can be done at once, and what has to come from
    /// the devices is put into `runs`, for memory of the flight's own if [`Flying::apart`] has some. What they bring counts after [`land_read`](Self::land_read)
    /// alone.
    pub(crate) fn begin_read(
        &self,
        file: &OpenFile,
        offset: u64,
        buf: &mut [u8],
        flying: &mut Flying,
        runs: &mut Vec<Run>,
    ) -> Result<Began, Error> {
        file.check_readable()?;
        // What an earlier one of another file knew is of no account.
        (flying.len, flying.began, flying.clean) = (0, None, None);
        (flying.keep, flying.apart) = (!flying.past && !file.has(libc::O_DIRECT), None);
        flying.absent.clear();
        let state = &file.state;
        let Some(shared) = state.try_shared() else {
            return Ok(Began::Waits);
        };
        state.check_alive()?;
        let size = state.size();
        if buf.is_empty() {
            return Ok(Began::Done(0));
        }
        if offset >= size {
            self.note_read(file)?;
            return Ok(Began::Done(0));
        }
        let end = size.min(offset.saturating_add(buf.len() as u64));
        let len = (end - offset) as usize;
        let pages = pages_of(offset..end);
        if pages.end - pages.start > PAGES_MAX {
            return Ok(Began::Waits);
        }
        let goes_on = flying.goes_on();
        if goes_on.is_some_and(|going| self.is_stream_of(file, going, offset, buf.len())) {
            return Ok(Began::Waits);
        }
        let began = Beginning {
            moment: self.ranges.moment(state.ino().0),
            quiet: state.stores.quiet(),
        };
        if began.quiet.is_none() && !self.is_apart(state, &pages, began) {
            return Ok(Began::Waits);
        }
        (flying.offset, flying.len, flying.began) = (offset, len, Some(began));
        flying.exclusives = state.exclusives();
        if flying.past && !is_whole(&(offset..end), buf.len()) {
            return Ok(Began::Waits);
        }
        if flying.past && !flying.one_by_one {
            flying.clean = self.count_clean(state, &pages);
        }
        if !self.look_at_pages(file, flying, buf) {
            return Ok(Began::Waits);
        }
        if !self.is_apart(state, &pages, began) {
            return Ok(Began::Waits);
        }
        runs.clear();
        if !self.look_for_runs(file, flying, runs, size, buf)? {
            return Ok(Began::Waits);
        }
        self.note_read(file)?;
        drop(shared);
        if !runs.is_empty() {
            return Ok(Began::Flies);
        }
        if let Some(going) = goes_on {
            self.ask_ahead_of(file, going, offset..end);
        }
        if flying.keep {
            self.forget_read(file, offset..end);
        }
        Ok(Began::Done(len))
    }

    /// Copies what the cache has of these pages, and notes what it has not. False: the read has to wait.
    fn look_at_pages(&self, file: &OpenFile, flying: &mut Flying, buf: &mut [u8]) -> bool {
        let (key, span) = (file.state.key, flying.span());
        let pages = pages_of(span.clone());
        if flying.clean.is_some() {
            let unseen = pages.map(|page| (page, Absence::UNSEEN));
            flying.absent.extend(unseen);
            return true;
        }
        let ask = |page| {
            if page < pages.end {
                self.pages.ask_for(key, page);
            }
        };
        (pages.start + 1..pages.start + ASKED).for_each(ask);
        let is_ahead = flying.goes_on().is_some_and(Going::is_ahead);
        for page in pages.clone() {
            ask(page + ASKED);
            let at = (page * PAGE).max(span.start);
            let stop = ((page + 1) * PAGE).min(span.end);
            let out = &mut buf[(at - span.start) as usize..(stop - span.start) as usize];
            match self.pages.absence(key, page) {
                // It reads ahead, or waits for who does.
                Some(_) if is_ahead => return false,
                Some(absence) => flying.absent.push((page, absence)),
                None if flying.past => {}
                None if self.pages.read(key, page, (at % PAGE) as usize, out) => {}
                _ => return false,
            }
        }
        true
    }

    /// Finds where the devices have what is absent of a file of this size. False: the read has to wait.
    fn look_for_runs(
        &self,
        file: &OpenFile,
        flying: &mut Flying,
        runs: &mut Vec<Run>,
        size: u64,
        buf: &mut [u8],
    ) -> Result<bool, Error> {
        let (Some((first, _)), Some((last, _))) = (flying.absent.first(), flying.absent.last())
        else {
            return Ok(true);
        };
        let span = flying.span();
        let pages = pages_of(span.clone());
        let is_whole = is_whole(&span, buf.len());
        let (base, until) = match is_whole {
            true => (span.start, pages.end * PAGE),
            false => (first * PAGE, (last + 1) * PAGE),
        };
        let bytes = (until - base) as usize;
        let beyond = size.min(until) - base;
        (flying.base, flying.beyond) = (base, beyond as usize..bytes);
        if flying.keep && flying.going.is_none() {
            file.reads.jumped(span.end);
        }
        let mut apart = (!is_whole).then(|| self.memory.take_out(bytes));
        let memory = apart.as_deref_mut().unwrap_or(buf);
        let found = self.find_runs(file, memory, flying, runs)?;
        flying.apart = apart;
        if found.is_none() {
            self.end_apart(flying);
            return Ok(false);
        }
        let is_here = runs.is_empty() && !flying.past;
        Ok(!is_here || self.land_at_once(file, flying, &pages, buf))
    }

    /// What is absent is nowhere on the devices, and all in memory. The caller has the file's shared lock.
    fn land_at_once(
        &self,
        file: &OpenFile,
        flying: &mut Flying,
        pages: &Range<u64>,
        buf: &mut [u8],
    ) -> bool {
        let apart = flying.apart.take();
        let stands = self.stands_and_stays(
            file,
            flying,
            pages,
            apart.as_deref().unwrap_or(buf),
            flying.keep,
        );
        if let Some(memory) = apart {
            if stands {
                flying.copy_out(&memory, buf);
            }
            self.memory.give(memory);
        }
        stands
    }

    /// Memory of a flight's own is needed no more.
    pub(crate) fn end_apart(&self, flying: &mut Flying) {
        if let Some(memory) = flying.apart.take() {
            self.memory.give(memory);
        }
    }

    /// The count by which it is known later that none of these pages has been written, if none is dirty.
    fn count_clean(&self, state: &FileState, pages: &Range<u64>) -> Option<u64> {
        // Before the look: what becomes dirty behind it counts.
        let count = self.pages.dirtied(state.key);
        let dirty = self.pages.is_dirty(state.key)
            && !self
                .pages
                .dirty_pages(state.key, pages.clone(), 1)
                .is_empty();
        (!dirty).then_some(count)
    }

    /// Invariant 4, so far.
    fn is_apart(&self, state: &FileState, pages: &Range<u64>, began: Beginning) -> bool {
        let Beginning { quiet, moment } = began;
        quiet.is_some_and(|quiet| state.stores.is_still(quiet))
            || self.ranges.is_apart(state.ino().0, pages, moment)
    }

    /// Where the absent pages lie; what is nowhere reads as zeros. `None`: to tell would take a wait.
    fn find_runs(
        &self,
        file: &OpenFile,
        buf: &mut [u8],
        flying: &Flying,
        runs: &mut Vec<Run>,
    ) -> Result<Option<()>, Error> {
        let state = &file.state;
        if state.meta.lock().replaced {
            return Ok(None);
        }
        let (Some((first, _)), Some((last, _))) = (flying.absent.first(), flying.absent.last())
        else {
            return Ok(Some(()));
        };
        let pages = *first..last + 1;
        let found: Mapped = {
            let content = state.node.read()?;
            let inode = content.inode()?;
            let tail = inode.tail.as_ref();
            if tail.is_some_and(|tail| pages.contains(&tail.page)) {
                return Ok(None);
            }
            if flying.past && !matches!(inode.body, Body::Inline(_)) {
                // Its owner may wait.
                extents::lookup(&self.store, inode, pages, usize::MAX)?
            } else {
                let Some(found) = extents::glance(&self.store, inode, &pages) else {
                    return Ok(None);
                };
                found
            }
        };
        let waits = |blocks| !self.store.waiting_data(blocks).is_empty();
        let some_wait = found.iter().any(|e| e.written && waits(e.blocks()));
        let mut extents = found.iter().filter(|extent| extent.written).peekable();
        for &(page, _) in &flying.absent {
            let at = (page * PAGE - flying.base) as usize;
            while extents.next_if(|extent| extent.end() <= page).is_some() {}
            let Some(extent) = extents.peek().filter(|extent| extent.page <= page) else {
                buf[at..at + BLOCK_SIZE].fill(0);
                continue;
            };
            let block = Block(extent.block.0 + (page - extent.page));
            if some_wait && waits(Extent { block, len: 1 }) {
                return Ok(None);
            }
            let byte = block.byte();
            match runs.last_mut() {
                Some(run) if run.byte + run.len as u64 == byte && run.at + run.len == at => {
                    run.len += BLOCK_SIZE;
                }
                _ => runs.push(Run {
                    byte,
                    at,
                    len: BLOCK_SIZE,
                }),
            }
        }
        Ok(Some(()))
    }

    /// Whether what a flight has read, to `memory`, is what the file holds; else it has to begin again. `own`: the request's memory, if that is another. `came`: all has
    /// been read; else it is not used in any case.
    pub(crate) fn land_read(
        &self,
        file: &OpenFile,
        flying: &Flying,
        memory: &mut [u8],
        own: Option<&mut [u8]>,
        came: bool,
    ) -> bool {
        let bytes = flying.span();
        // Invariants 5 and 6.
        let shared = (flying.keep && came)
            .then(|| match planted(Canary::FlightKeptLate) {
                true => Some(None),
                false => file.state.try_shared().map(Some),
            })
            .flatten();
        memory[flying.beyond.clone()].fill(0);
        let keep = shared.is_some();
        let stands = self.stands_and_stays(file, flying, &pages_of(bytes.clone()), memory, keep);
        drop(shared);
        if stands && came {
            if let Some(own) = own {
                flying.copy_out(memory, own);
            }
            if keep {
                self.forget_read(file, bytes);
            }
        }
        stands
    }

    /// Whether what a flight has read of these pages of its own is what the file holds.
    pub(super) fn stands(
        &self,
        file: &OpenFile,
        flying: &Flying,
        pages: &Range<u64>,
        buf: &[u8],
    ) -> bool {
        self.stands_and_stays(file, flying, pages, buf, false)
    }

    /// The same; `keep`: it is cached from now on, and the caller has the file's shared lock.
    fn stands_and_stays(
        &self,
        file: &OpenFile,
        flying: &Flying,
        pages: &Range<u64>,
        memory: &[u8],
        keep: bool,
    ) -> bool {
        let state = &file.state;
        if flying.past && planted(Canary::StreamUnasked) {
            return true;
        }
        let apart = flying
            .began
            .is_some_and(|began| self.is_apart(state, pages, began));
        if state.exclusives() != flying.exclusives || !apart {
            return false;
        }
        if let Some(count) = flying.clean {
            return self.pages.dirtied(state.key) == count;
        }
        if keep && planted(Canary::FlightKeptLate) {
            // Only what is between the looks and the entries shows it.
            (0..100).for_each(|_| yield_now());
        }
        let absent = flying.absent_of(pages);
        let ask = |&(page, _): &(u64, Absence)| self.pages.ask_for(state.key, page);
        absent.iter().skip(1).take(ASKED as usize).for_each(ask);
        let soon = absent.iter().skip(ASKED as usize).map(Some);
        let soon = soon.chain(std::iter::repeat(None));
        let stands = absent.iter().zip(soon).all(|(&(page, absence), soon)| {
            soon.into_iter().for_each(ask);
            let at = (page * PAGE - flying.base) as usize;
            let content = &memory[at..at + BLOCK_SIZE];
            match keep {
                true => (self.pages).admit_landed(state.key, page, absence, content),
                false => (self.pages).admit_apart(state.key, page, absence, content, false),
            }
        });
        if keep && stands {
            self.pages.brought(absent.len() as u64, 0);
        }
        stands
    }
}

impl Flying {
    /// Hands over what was read to memory of its own.
    fn copy_out(&self, memory: &[u8], out: &mut [u8]) {
        let bytes = self.offset..self.offset + self.len as u64;
        for &(page, _) in &self.absent {
            let here = bytes.start.max(page * PAGE)..bytes.end.min((page + 1) * PAGE);
            let within = |from: u64| (here.start - from) as usize..(here.end - from) as usize;
            moves::copy(&memory[within(self.base)], &mut out[within(self.offset)]);
        }
    }

    /// What of these pages it brings.
    fn absent_of(&self, pages: &Range<u64>) -> &[(u64, Absence)] {
        let before = |end| self.absent.partition_point(|&(page, _)| page < end);
        &self.absent[before(pages.start)..before(pages.end)]
    }

    /// These pages, which are not empty, in runs that it brings (true) or leaves out.
    pub fn runs(&self, pages: Range<u64>) -> impl Iterator<Item = (bool, Range<u64>)> {
        let mut absent = self
            .absent_of(&pages)
            .iter()
            .map(|&(page, _)| page)
            .peekable();
        let mut at = pages.start;
        std::iter::from_fn(move || {
            let start = at;
            let next = *absent
                .peek()
                .filter(|_| start < pages.end)
                .unwrap_or(&pages.end);
            if start < next {
                at = next;
                return Some((false, start..next));
            }
            while absent.next_if_eq(&at).is_some() {
                at += 1;
            }
            (start < at).then_some((true, start..at))
        })
    }
}

//! Reads in flight: begun under the file's shared lock, landed without any.
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
//! 5. Beginning waits for no device and no lock that is held over a wait: what would, is done by a thread that may. One that goes past the cache
//!    ([`Flying::past`]) is begun by such a thread, and may read what the file's mapping is.

mod writing;

pub(super) use writing::is_written;
pub(crate) use writing::{InFlight, Writing};

use super::extents::{self, Glanced};
use super::file::{FileState, OpenFile};
use super::gate::Quiet;
use super::ranges::Moment;
use super::{Files, PAGE, pages_of};
use crate::Error;
use crate::content::{Body, FileExtent};
use base::canary::{Canary, planted};
use device::Run;
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
    /// the devices is put into `runs`. What they bring counts after [`land_read`](Self::land_read) alone.
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
        let taken = (pages.end - pages.start) * PAGE;
        if pages.end - pages.start > PAGES_MAX {
            return Ok(Began::Waits);
        }
        // Devices read whole pages to aligned memory.
        let flies = (flying.past || file.has(libc::O_DIRECT))
            && offset.is_multiple_of(PAGE)
            && taken <= buf.len() as u64;
        let began = Beginning {
            moment: self.ranges.moment(state.ino().0),
            quiet: state.stores.quiet(),
        };
        if began.quiet.is_none() && !self.is_apart(state, &pages, began) {
            return Ok(Began::Waits);
        }
        (flying.offset, flying.len, flying.began) = (offset, len, Some(began));
        flying.exclusives = state.exclusives();
        if flies && flying.past && !flying.one_by_one {
            flying.clean = self.count_clean(state, &pages);
        }
        let mut one_by_one = pages.clone();
        if flying.clean.is_some() {
            let all = std::mem::replace(&mut one_by_one, pages.end..pages.end);
            flying
                .absent
                .extend(all.map(|page| (page, Absence::UNSEEN)));
        }
        let ask = |page| {
            if page < pages.end {
                self.pages.ask_for(state.key, page);
            }
        };
        (one_by_one.start + 1..one_by_one.start + ASKED).for_each(ask);
        for page in one_by_one {
            ask(page + ASKED);
            let at = (page * PAGE).max(offset);
            let stop = ((page + 1) * PAGE).min(end);
            let out = &mut buf[(at - offset) as usize..(stop - offset) as usize];
            match self.pages.absence(state.key, page) {
                Some(absence) if flies => flying.absent.push((page, absence)),
                None if flying.past => {}
                None if self.pages.read(state.key, page, (at % PAGE) as usize, out) => {}
                _ => return Ok(Began::Waits),
            }
        }
        if !self.is_apart(state, &pages, began) {
            return Ok(Began::Waits);
        }
        runs.clear();
        if !flying.absent.is_empty() {
            flying.beyond = len..taken as usize;
            if self.find_runs(file, buf, flying, runs)?.is_none() {
                return Ok(Began::Waits);
            }
        }
        self.note_read(file)?;
        drop(shared);
        Ok(match runs.is_empty() {
            true => Began::Done(len),
            false => Began::Flies,
        })
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
        let (few, all): (Glanced, Vec<FileExtent>);
        let found: &[FileExtent] = {
            let content = state.node.read()?;
            let inode = content.inode()?;
            let tail = inode.tail.as_ref();
            if tail.is_some_and(|tail| pages.contains(&tail.page)) {
                return Ok(None);
            }
            if flying.past && !matches!(inode.body, Body::Inline(_)) {
                // Its owner may wait.
                all = extents::lookup(&self.store, inode, pages, usize::MAX)?;
                &all
            } else {
                let Some(found) = extents::glance(&self.store, inode, &pages) else {
                    return Ok(None);
                };
                few = found;
                &few
            }
        };
        let waits = |blocks| !self.store.waiting_data(blocks).is_empty();
        let some_wait = found.iter().any(|e| e.written && waits(e.blocks()));
        let mut extents = found.iter().filter(|extent| extent.written).peekable();
        for &(page, _) in &flying.absent {
            let at = (page * PAGE - flying.offset) as usize;
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

    /// Whether what a flight has read is what the file holds; else it has to begin again.
    pub(crate) fn land_read(&self, file: &OpenFile, flying: &Flying, buf: &mut [u8]) -> bool {
        let pages = pages_of(flying.offset..flying.offset + flying.len as u64);
        let stands = self.stands(file, flying, &pages, buf);
        if stands {
            buf[flying.beyond.clone()].fill(0);
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
        let absent = flying.absent_of(pages);
        let ask = |&(page, _): &(u64, Absence)| self.pages.ask_for(state.key, page);
        absent.iter().skip(1).take(ASKED as usize).for_each(ask);
        let soon = absent.iter().skip(ASKED as usize).map(Some);
        let soon = soon.chain(std::iter::repeat(None));
        absent.iter().zip(soon).all(|(&(page, absence), soon)| {
            soon.into_iter().for_each(ask);
            let at = (page * PAGE - flying.offset) as usize;
            let content = &buf[at..at + BLOCK_SIZE];
            (self.pages).admit_apart(state.key, page, absence, content, false)
        })
    }
}

impl Flying {
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

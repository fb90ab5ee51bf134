//! Reading without a copy: guards of cached pages.
//!
//! Invariants (those of a guard's memory are in [`engine::cache::Guard`]):
//! 1. What the guards of one call show is what one read would have brought: of a write of several pages all or nothing.
//! 2. Whoever loads pages for it holds no guard: so it never waits for what it has itself.
//! 3. No more is loaded than can get guards: a small part of the cache, so that what comes last does not push out what came first.

use super::advice::Advice;
use super::file::{FileState, OpenFile};
use super::ranges::Mode;
use super::read::TRIES;
use super::{Files, PAGE, is_one_page, pages_of};
use crate::Error;
use base::counted::Counted;
use engine::cache::{Guard, Guarded};
use std::ops::{Deref, Range};

/// Pages of one call.
const MOST: u64 = 256;

/// Bytes of one page of a file, where the page cache has them, as they were when this was taken: it does not see what
/// is written later, though the file does. It may outlive the handle and the file system.
///
/// There is a bound on how many pages can have guards at a time, a 64th of the cache: keep them short.
#[derive(Debug)]
pub struct PageGuard {
    page: Guard,
    bytes: Range<usize>,
    offset: u64,
}

impl PageGuard {
    /// Where in the file its first byte is.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Deref for PageGuard {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.page[self.bytes.clone()]
    }
}

impl AsRef<[u8]> for PageGuard {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// What comes next.
enum Step {
    Done(Vec<PageGuard>),
    /// Pages up to this byte can have guards, and not all are cached.
    Load(u64),
    /// Somebody writes several pages, or past the cache.
    TakeTurn,
}

/// Guards of the first pages of a range.
struct Taken {
    guards: Vec<PageGuard>,
    /// The page behind them is not cached but could have one, and so could those up to this byte.
    missing: Option<u64>,
}

impl Files {
    /// See [`FileSystem::read_guards`](crate::FileSystem::read_guards).
    pub fn read_guards(
        &self,
        file: &OpenFile,
        offset: u64,
        len: u64,
    ) -> Result<Vec<PageGuard>, Error> {
        file.check_readable()?;
        if file.has(libc::O_DIRECT) || len == 0 {
            return Ok(Vec::new());
        }
        let end = offset.saturating_add(len);
        let bytes = offset..end.min((offset / PAGE).saturating_add(MOST).saturating_mul(PAGE));
        let (state, one_page) = (
            &file.state,
            is_one_page(offset, (bytes.end - bytes.start) as usize),
        );
        let (mut range, mut loads) = (None, 0);
        // What such a handle reads leaves the cache at once.
        let tries = match file.is_advised(Advice::NoReuse) {
            true => 0,
            false => TRIES,
        };
        loop {
            let step = {
                let _shared = self.lock_shared(state)?;
                let quiet = state.stores.quiet();
                let taken = self.take_guards(state, bytes.clone());
                // As for a read.
                let still = quiet.is_some_and(|quiet| state.stores.is_still(quiet) || one_page);
                if range.is_none() && !still {
                    Step::TakeTurn
                } else if let Some(end) = taken.missing.filter(|_| loads < tries) {
                    Step::Load(end)
                } else {
                    self.note_read(file)?;
                    Step::Done(taken.guards)
                }
            };
            match step {
                Step::Done(guards) => {
                    if loads == 0 {
                        self.went_on(file, &bytes);
                    }
                    return Ok(guards);
                }
                Step::Load(end) => {
                    // Nothing is held while others are waited for.
                    range = None;
                    loads += 1;
                    self.load_for_guards(file, bytes.start..end)?;
                }
                Step::TakeTurn => {
                    range = Some(self.hold(state, pages_of(bytes.clone()), Mode::Load));
                }
            }
        }
    }

    /// The caller holds the I/O lock.
    fn take_guards(&self, state: &Counted<FileState>, bytes: Range<u64>) -> Taken {
        let end = bytes.end.min(state.size());
        let mut taken = Taken {
            guards: Vec::new(),
            missing: None,
        };
        let mut at = bytes.start;
        while at < end {
            let (page, stop) = (at / PAGE, end.min((at / PAGE + 1) * PAGE));
            match self.pages.guard(state.key, page) {
                Guarded::Yes(guard) => taken.guards.push(PageGuard {
                    page: guard,
                    bytes: (at % PAGE) as usize..(stop - page * PAGE) as usize,
                    offset: at,
                }),
                Guarded::Absent => {
                    let left = self.pages.guards_left() as u64;
                    let until = (page + left).saturating_mul(PAGE).min(end);
                    taken.missing = (left > 0).then_some(until);
                    break;
                }
                Guarded::TooMany => break,
            }
            at = stop;
        }
        taken
    }

    /// Has pages cached, and read-ahead go on, as a read does; holds neither lock nor guard.
    fn load_for_guards(&self, file: &OpenFile, bytes: Range<u64>) -> Result<(), Error> {
        let mut buf = self.memory.take((bytes.end - bytes.start) as usize);
        self.read(file, bytes.start, &mut buf)?;
        Ok(())
    }

    /// A reader has found all it wanted: what comes next is asked for.
    fn went_on(&self, file: &OpenFile, bytes: &Range<u64>) {
        let most = match file.is_advised(Advice::Random) {
            true => 0,
            false => self.options.read_ahead / PAGE,
        };
        let going = file.go_on_reading(bytes.start, bytes.end - bytes.start, most);
        if let Some((run, window)) = going.filter(|&(_, window)| window > 0) {
            self.ask_ahead(file, run, bytes.clone(), window);
        }
    }
}

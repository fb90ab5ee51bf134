//! What programs say of how they will use a file. Hints: none changes what is read, or what is durable.

use super::ahead::PIECE;
use super::file::OpenFile;
use super::{Files, PAGE, pages_of};
use crate::Error;
use base::atomic::Ordering;
use engine::cache::WAYS;
use std::ops::Range;

/// How a program will use a file, as `posix_fadvise(2)` has it, but that an empty range is no range. The first four are of the handle, from now on; the
/// others of a range, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Advice {
    /// Who goes on where it stopped is read ahead of, the more the longer that goes on.
    #[default]
    Normal,
    /// As far ahead as there is, from the second read on.
    Sequential,
    /// Nothing is read ahead.
    Random,
    /// What is read leaves the cache right after, unless it looks as if it was used besides: that is told for most pages, not for all.
    NoReuse,
    /// Threads bring what is not cached, as long as there is room for tasks, and a quarter of the cache at most.
    WillNeed,
    /// Clean pages that lie in the range as a whole leave the cache; dirty ones are written in the background, and stay.
    DontNeed,
}

/// Whose reads neither take over what a program wants to have cached, nor end it by closing.
const NOBODY: usize = 0;

impl OpenFile {
    pub(super) fn is_advised(&self, advice: Advice) -> bool {
        self.advice.load(Ordering::Relaxed) == advice as u8
    }
}

impl Files {
    /// See [`FileSystem::advise`](crate::FileSystem::advise).
    pub fn advise(&self, file: &OpenFile, bytes: Range<u64>, advice: Advice) -> Result<(), Error> {
        let bytes = bytes.start..bytes.end.min(file.state.size());
        match advice {
            Advice::Normal | Advice::Sequential | Advice::Random | Advice::NoReuse => {
                file.advice.store(advice as u8, Ordering::Relaxed);
            }
            Advice::WillNeed => self.will_need(file, bytes),
            Advice::DontNeed => return self.dont_need(file, bytes),
        }
        Ok(())
    }

    fn will_need(&self, file: &OpenFile, bytes: Range<u64>) {
        let capacity = self.pages.capacity();
        let pages = pages_of(bytes.start..bytes.end.max(bytes.start));
        let end = pages.end.min(pages.start + (capacity / 4) as u64);
        // A task's pages must not push out each other.
        let piece = PIECE.min((capacity / WAYS) as u64).max(1);
        let absent = |page| self.pages.absence(file.state.key, page).is_some();
        let mut at = pages.start;
        while at < end {
            let next = (at + piece).min(end);
            if let Some(first) = (at..next).find(|&page| absent(page))
                && !(self.ahead).ask(NOBODY, file.state.key, first..next)
            {
                return;
            }
            at = next;
        }
    }

    fn dont_need(&self, file: &OpenFile, bytes: Range<u64>) -> Result<(), Error> {
        let state = &file.state;
        let end = match bytes.end == state.size() {
            true => bytes.end.div_ceil(PAGE),
            false => bytes.end / PAGE,
        };
        let pages = bytes.start.div_ceil(PAGE)..end;
        if !pages.is_empty() {
            self.pages.forget(state.key, pages.clone(), false);
            if !(self.pages).dirty_pages(state.key, pages, 1).is_empty() {
                return self.write_range(file, bytes, false);
            }
        }
        Ok(())
    }

    /// After a read through a handle whose program will not read the same again.
    pub(super) fn forget_read(&self, file: &OpenFile, bytes: Range<u64>) {
        if file.is_advised(Advice::NoReuse) {
            self.pages
                .forget(file.state.key, bytes.start / PAGE..bytes.end / PAGE, true);
        }
    }
}

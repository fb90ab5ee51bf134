//! `SEEK_DATA` and `SEEK_HOLE`, and copying between files.

use super::extents::PAGE_LIMIT;
use super::file::{FileState, OpenFile};
use super::{Files, PAGE};
use crate::Error;
use base::counted::Counted;

/// Bytes that a copy moves at a time.
const COPY_STEP: usize = 1 << 20;

impl Files {
    /// `SEEK_DATA` or `SEEK_HOLE` from `offset`. Pages that are dirty count as data; the end of
    /// the file is a hole.
    pub fn seek(&self, file: &OpenFile, offset: u64, whence: i32) -> Result<u64, Error> {
        let state = &file.state;
        let _shared = self.lock_shared(state)?;
        let size = state.size();
        if offset >= size {
            return Err(Error::NoSuchOffset);
        }
        let found = match whence {
            libc::SEEK_DATA => match self.next_data(state, offset / PAGE)? {
                Some(page) => (page * PAGE).max(offset),
                None => return Err(Error::NoSuchOffset),
            },
            libc::SEEK_HOLE => (self.next_hole(state, offset / PAGE)? * PAGE).max(offset),
            _ => return Err(Error::Invalid("neither SEEK_DATA nor SEEK_HOLE")),
        };
        match (found < size, whence) {
            (true, _) => Ok(found),
            (false, libc::SEEK_HOLE) => Ok(size),
            (false, _) => Err(Error::NoSuchOffset),
        }
    }

    fn written_from(
        &self,
        state: &Counted<FileState>,
        page: u64,
    ) -> Result<Option<std::ops::Range<u64>>, Error> {
        if state.meta.lock().replaced {
            return Ok(None);
        }
        self.next_written(state, page)
    }

    /// The first page at or after `page` that holds data. Dirty pages are looked at before the
    /// mapping: write-back, which may run meanwhile, moves pages from the one to the other.
    fn next_data(&self, state: &Counted<FileState>, page: u64) -> Result<Option<u64>, Error> {
        let dirty = self.pages.dirty_pages(state.key, page..PAGE_LIMIT, 1);
        let written = self
            .written_from(state, page)?
            .map(|run| run.start.max(page));
        Ok(match (written, dirty.first()) {
            (Some(a), Some(&b)) => Some(a.min(b)),
            (a, b) => a.or(b.copied()),
        })
    }

    /// The first page at or after `page` that holds none.
    fn next_hole(&self, state: &Counted<FileState>, mut page: u64) -> Result<u64, Error> {
        loop {
            let before = page;
            for found in self.pages.dirty_pages(state.key, page..PAGE_LIMIT, 1024) {
                if found != page {
                    break;
                }
                page += 1;
            }
            if let Some(run) = self.written_from(state, page)?
                && run.start <= page
            {
                page = run.end;
            }
            if page == before {
                return Ok(page);
            }
        }
    }

    /// Copies up to `len` bytes between files, or within one if the ranges are apart; never past the current end of the source.
    /// Returns how many. Not atomic: a concurrent writer may come between two steps.
    pub fn copy_range(
        &self,
        from: &OpenFile,
        from_offset: u64,
        to: &OpenFile,
        to_offset: u64,
        len: u64,
    ) -> Result<u64, Error> {
        from.check_readable()?;
        if !to.writable() || to.has(libc::O_APPEND) {
            return Err(Error::BadHandle);
        }
        let len = len.min(from.state.size().saturating_sub(from_offset));
        let apart = |a: u64, b: u64| a.saturating_add(len) <= b;
        let same = from.ino() == to.ino();
        if same && !apart(from_offset, to_offset) && !apart(to_offset, from_offset) {
            return Err(Error::Invalid("the ranges overlap"));
        }
        let mut buf = vec![0u8; COPY_STEP.min(len as usize)];
        let mut copied = 0;
        while copied < len {
            let want = buf.len().min((len - copied) as usize);
            let got = match self.read(from, from_offset + copied, &mut buf[..want]) {
                Ok(0) => break,
                Ok(got) => got,
                // What is copied is told; who goes on with the rest meets the error.
                Err(_) if copied > 0 => break,
                Err(error) => return Err(error),
            };
            match self.write(to, to_offset + copied, &buf[..got]) {
                Ok(0) => break,
                Ok(written) => copied += written as u64,
                Err(_) if copied > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(copied)
    }
}

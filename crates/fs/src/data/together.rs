//! Many small files written back at once: one device batch for all of them, so that syncing a
//! tree of small files runs at the devices' queue depth and not one file at a time.
//!
//! The locks of several files are held together. They are tried, never waited for, so holding
//! them cannot close a circle; a file that is busy, large, or not the simple case is left to
//! `flush_file`, and so is one whose batch failed, which then finds out by itself and latches.

use super::Files;
use super::extents::PAGE_LIMIT;
use super::file::{FileState, StateUse};
use super::writeback::{Copies, Layout, collect_writes};
use crate::Error;
use crate::content::inode::INLINE_DATA_MAX;
use base::sync::Arc;
use base::sync::{MutexGuard, ReadGuard};
use device::Io;

/// Files in one batch.
pub(super) const TOGETHER: usize = 64;
/// Dirty pages of a file that still goes with others.
const PAGES_MAX: usize = 64;

/// A file's dirty pages, ready to be written.
struct Ready<'a> {
    state: &'a Arc<FileState>,
    copies: Copies,
    layout: Layout<'a>,
    size: u64,
    _turn: MutexGuard<'a, ()>,
    _shared: ReadGuard<'a, ()>,
}

impl Files {
    /// Writes back the small files among `states`, as far as that works at once. Failures are
    /// latched or met again by `flush_file`.
    pub(super) fn flush_together(&self, states: &[StateUse<'_>]) {
        let mut ready: Vec<Ready<'_>> = Vec::new();
        let mut pages = 0;
        for state in states {
            if pages >= self.batch_pages() {
                break;
            }
            if let Some(one) = self.make_ready(state) {
                pages += one.copies.pages.len();
                ready.push(one);
            }
        }
        if ready.is_empty() {
            return;
        }
        let mut ios: Vec<Io<'_>> = Vec::new();
        for one in &ready {
            let pages = &one.copies.pages[..one.layout.covered];
            collect_writes(&one.layout.segments, &one.copies.data, pages, &mut ios);
        }
        let written = self.store.array().execute(&mut ios);
        drop(ios);
        for one in ready {
            if written.is_err() {
                self.unreserve(one.state, one.layout);
                continue;
            }
            let covered = one.layout.covered;
            match self.log_stored(one.state, one.layout, one.size) {
                Ok(()) => self.complete(one.state, &one.copies, covered),
                Err(error) => one.state.meta.lock().fail(error.to_string()),
            }
            self.trim_promise(one.state);
        }
    }

    /// `None`: the file has nothing to write, or must be written by itself.
    fn make_ready<'a>(&'a self, state: &'a Arc<FileState>) -> Option<Ready<'a>> {
        let turn = state.flusher.try_lock()?;
        let shared = state.io.try_read()?;
        let (size, logged_size, simple) = {
            let meta = state.meta.lock();
            let simple = !meta.dead && !meta.replaced && meta.loaded && meta.failure.count == 0;
            (meta.size, meta.logged_size, simple)
        };
        if !simple || size <= INLINE_DATA_MAX as u64 {
            return None;
        }
        let pages = self
            .pages
            .dirty_pages(state.key, 0..PAGE_LIMIT, PAGES_MAX + 1);
        if pages.is_empty() || pages.len() > PAGES_MAX {
            return None;
        }
        let prepare = || -> Result<Option<(Copies, Layout<'a>)>, Error> {
            let Some(copies) = self.copy_pages(state, pages)? else {
                return Ok(None);
            };
            let layout = self.lay_out(state, &copies.pages, false)?;
            Ok(Some((copies, layout)))
        };
        // A failure here is met again, and latched, by `flush_file`.
        let (copies, layout) = prepare().ok()??;
        let done = &copies.pages[..layout.covered];
        let size = self.size_limit(state, size, done).max(logged_size);
        Some(Ready {
            state,
            copies,
            layout,
            size,
            _turn: turn,
            _shared: shared,
        })
    }
}

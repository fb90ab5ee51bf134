//! Writes to one open file that become the file's content in one step: a transaction that outlives the calls that stage it.
//!
//! ```text
//! write, truncate ─► pages over the file, in memory ─► commit: a transaction of this one file
//! ```
//!
//! Invariants:
//! 1. Until the commit the file is what it was, and after a drop it is; promised blocks go back with it.
//! 2. Each page staged has a promised block, so that only staging meets [`Error::NoSpace`] for data. Blocks of pages that were cut again serve
//!    the next ones.
//! 3. A call that fails has staged nothing of what it was given. A write that would make the commit too large for the store fails: what maps its
//!    pages is looked up, unless they are so few that each may be in a leaf of extents of its own. What others do to the file until the commit may
//!    make that larger; so may a staged cut, by what it frees.
//! 4. It relies on nothing that it reads: what others write meanwhile to bytes that it has not written stays, of the rest its own
//!    bytes win.

use super::content::Content;
use super::{PAGE, PARTS_MAX, RUN_LOGGED, STEP_DIRTY, STEP_LOGGED, memory_max};
use crate::Error;
use crate::api::{Caller, Ino};
use crate::data::transact::Reach;
use crate::data::{EXTENT_BYTES, OpenFile, SIZE_MAX};
use crate::filesystem::FileSystem;
use base::atomic::{AtomicU64, Ordering};
use base::canary::{Canary, planted};
use engine::Extensive;
use format::BLOCK_SIZE;
use std::ops::Range;
use std::sync::Arc;

/// Pages that one may have in memory.
const PAGES_MAX: u64 = (PARTS_MAX / BLOCK_SIZE) as u64;
/// Bytes that all of a file system may have, unless its memory is limited to less.
pub(crate) const ALL_BYTES_MAX: usize = 4 * PARTS_MAX;
/// The file's last page, and what lies in its inode, may have to be written besides.
const BESIDES: u64 = 2;

/// How many there were, and what they have in memory.
#[derive(Debug)]
pub(crate) struct AtomicCounts {
    pub started: AtomicU64,
    pub committed: AtomicU64,
    /// Those that ended otherwise.
    pub aborted: AtomicU64,
    pages: AtomicU64,
    /// As many may be in memory.
    pages_max: u64,
}

impl AtomicCounts {
    pub fn new(bytes_max: usize) -> AtomicCounts {
        AtomicCounts {
            started: AtomicU64::new(0),
            committed: AtomicU64::new(0),
            aborted: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            pages_max: (bytes_max / BLOCK_SIZE) as u64,
        }
    }
}

/// Writes to one file that [`commit`](AtomicWrite::commit) makes in one step; dropped without, they never were. Made by
/// [`FileSystem::atomic_write`].
///
/// Limits: 64 MiB of pages touched; in all that are staged in a file system at a time 256 MiB, or an eighth of its memory if that is limited and less
/// ([`FsOptions::with_memory`](crate::FsOptions::with_memory)); and no more pieces without a gap than
/// a transaction takes, some 4,600 on the smallest arrays, nor pages in more parts of a file's map than one may change: of a file in many pieces some 45 of up to 600 each
/// with 8 MiB of memory ([`Error::TransactionTooLarge`], with nothing staged of the call). A page whose bytes
/// are written one here, one there has up to twice as much memory again that says which.
#[must_use = "dropped without a commit it writes nothing"]
pub struct AtomicWrite {
    fs: Arc<FileSystem>,
    who: Caller,
    ino: Ino,
    generation: u64,
    content: Content,
    /// Blocks promised for it, to be adopted.
    promised: u64,
    /// Counted in [`AtomicCounts::pages`].
    counted: u64,
    /// Pieces without a gap that the pages make.
    runs: usize,
    /// What its pages reach, once they are so many that it matters.
    reach: Option<Reach>,
    is_committed: bool,
}

impl std::fmt::Debug for AtomicWrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AtomicWrite")
            .field("ino", &self.ino)
            .field("pages", &self.content.pages.len())
            .finish_non_exhaustive()
    }
}

impl FileSystem {
    /// Begins an atomic write of a file that is open for writing. Nothing is locked until it commits.
    ///
    /// # Errors
    /// [`Error::BadHandle`] if it is not open for writing, [`Error::Stale`] if the file has no name any more, [`Error::ReadOnly`], or what
    /// turned the file system read-only.
    pub fn atomic_write(
        self: &Arc<Self>,
        who: &Caller,
        file: &OpenFile,
    ) -> Result<AtomicWrite, Error> {
        self.files.owning(file)?.check_writable()?;
        if file.flags() & libc::O_ACCMODE == libc::O_RDONLY {
            return Err(Error::BadHandle);
        }
        let attr = self.getattr(file.ino())?;
        if attr.nlink == 0 {
            return Err(Error::Stale(file.ino()));
        }
        self.atomic.started.fetch_add(1, Ordering::Relaxed);
        Ok(AtomicWrite {
            fs: Arc::clone(self),
            who: *who,
            ino: file.ino(),
            generation: attr.generation,
            content: Content::default(),
            promised: 0,
            counted: 0,
            runs: 0,
            reach: None,
            is_committed: false,
        })
    }
}

impl AtomicWrite {
    /// Stages a write of all of `data` at `offset`.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Error> {
        if data.is_empty() {
            return Ok(());
        }
        let end = offset.checked_add(data.len() as u64);
        let end = end.filter(|end| *end <= SIZE_MAX);
        let end = end.ok_or(Error::FileTooLarge)?;
        self.fs.files.check_writable()?;
        let pages = offset / PAGE..end.div_ceil(PAGE);
        let held = self.content.pages.range(pages.clone()).count() as u64;
        // It makes one piece of those that it lies in or touches.
        let touched = pages.start.saturating_sub(1)..pages.end + 1;
        let touched = self.content.pages.range(touched);
        let runs = self.runs + 1 - runs_of(touched.map(|(page, _)| *page));
        let added = self.check_commit(&pages, held, runs)?;
        self.make_room(pages.end - pages.start - held)?;
        self.content.write(offset, data);
        self.runs = runs;
        if let Some(reach) = &mut self.reach {
            reach.merge(added);
        }
        Ok(())
    }

    /// Fails if a commit with these pages besides, of which `held` are staged, would be too large: then the pages would make so many runs. Returns
    /// what they reach, if that is kept.
    fn check_commit(&mut self, pages: &Range<u64>, held: u64, runs: usize) -> Result<Reach, Error> {
        let (fs, file) = (&*self.fs, (self.ino, self.generation));
        let most = fs.store.large_most();
        // Counted again by its blocks, of which nothing is known yet: as many runs, unless free space is in pieces.
        let least = of_commit(2 * runs);
        let is_possible = |touched| most.covers(least.plus(fs.store.extensive_by(touched)));
        let count = self.content.pages.len() as u64 + (pages.end - pages.start) - held;
        let mut added = Reach::default();
        if self.reach.is_none() {
            if is_possible(Reach::touched_most(count as usize)) {
                return Ok(added);
            }
            // They may be too many by far, or lie side by side: that is looked at from here on.
            let mut all = Reach::default();
            for run in runs_in(self.content.pages.keys().copied()) {
                fs.files.reach(file, run, &mut all)?;
            }
            self.reach = Some(all);
        }
        let staged = &self.content.pages;
        for run in runs_in(pages.clone().filter(|page| !staged.contains_key(page))) {
            fs.files.reach(file, run, &mut added)?;
        }
        let touched = self
            .reach
            .as_ref()
            .map(|reach| reach.touched_with(&added, runs));
        match touched.is_none_or(is_possible) {
            true => Ok(added),
            false => Err(Error::TransactionTooLarge),
        }
    }

    /// Stages a new size; what is added reads as zeros.
    pub fn truncate(&mut self, size: u64) -> Result<(), Error> {
        if size > SIZE_MAX {
            return Err(Error::FileTooLarge);
        }
        self.fs.files.check_writable()?;
        // A cut takes no block, so that a full array can be emptied; nor does what is staged for a file that is gone, and never commits.
        let grows = match self.fs.getattr(self.ino) {
            Ok(attr) => size > self.content.left_of(attr.size),
            Err(Error::Stale(_)) => false,
            Err(error) => return Err(error),
        };
        if grows {
            self.make_room(0)?;
        }
        let gone = self.content.truncate(size).len() as u64;
        self.runs = runs_of(self.pages());
        self.reach = None;
        // Their blocks stay promised, for what is staged next.
        self.fs.atomic.pages.fetch_sub(gone, Ordering::Relaxed);
        self.counted -= gone;
        Ok(())
    }

    /// The size of the file as staged, which has `base` bytes without.
    pub fn size(&self, base: u64) -> u64 {
        self.content.size(base)
    }

    /// Numbers of the pages that were written, growing.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        self.content.pages.keys().copied()
    }

    /// Whether some of these bytes lie in a page that was written.
    pub fn touches(&self, bytes: &Range<u64>) -> bool {
        let pages = bytes.start / PAGE..bytes.end.div_ceil(PAGE).max(bytes.start / PAGE);
        self.content.pages.range(pages).next().is_some()
    }

    /// What of the file is still there: so many bytes, if it is cut.
    pub fn cut(&self) -> Option<u64> {
        self.content.cut
    }

    /// Reads as [`FileSystem::read`], with what was staged. `file` is any handle of the file that can be read.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is another file's; those of [`FileSystem::read`].
    pub fn read(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> Result<usize, Error> {
        if (file.ino(), file.generation()) != (self.ino, self.generation) {
            return Err(Error::Invalid("a handle of another file"));
        }
        let base = self.fs.read(file, offset, buf)?;
        // The file ends behind what was read of it, or goes on behind the buffer.
        let known = if base > 0 { offset + base as u64 } else { 0 };
        let size = self.content.size(known);
        let len = buf.len().min(size.saturating_sub(offset) as usize);
        let left = self.content.left_of(known).saturating_sub(offset) as usize;
        let buf = &mut buf[..len];
        buf[left.min(len)..].fill(0);
        let none = |_, _: &mut [u8]| -> Result<(), Error> {
            unreachable!("nothing is stored before the commit")
        };
        self.content.over(offset, buf, none)?;
        Ok(len)
    }

    /// Makes what was staged the file's content, in one step, and returns when it is durable.
    ///
    /// # Errors
    /// [`Error::Stale`] when the file has lost its last name, or what keeps a transaction from its commit: then the file is what it was, less what
    /// a device has lost of earlier writes that were not synced, since those are written back first. When the
    /// store fails while it waits to be durable, it is read-only from then on, and a crash may leave all or nothing.
    pub fn commit(mut self) -> Result<(), Error> {
        let content = std::mem::take(&mut self.content);
        if content.is_changed() {
            if planted(Canary::AtomicInParts) {
                let mut half = content.clone();
                let middle = half.pages.keys().nth(half.pages.len() / 2).copied();
                drop(half.take_from(middle.unwrap_or(0)));
                self.commit_content(half)?;
            }
            self.commit_content(content)?;
        }
        self.is_committed = true;
        Ok(())
    }

    fn commit_content(&mut self, content: Content) -> Result<(), Error> {
        let fs = Arc::clone(&self.fs);
        let mut transaction = fs.transaction(&self.who)?;
        // Its number may be another's, of whatever kind.
        let staged = transaction.inode(self.ino)?;
        if staged.generation != self.generation {
            return Err(Error::Stale(self.ino));
        }
        let pages = content.pages.len();
        let expected = of_commit(runs_of(content.pages.keys().copied()));
        transaction.edit(self.ino, |staged| *staged = content);
        transaction.strip(self.ino)?;
        transaction.promise = fs.store.adopt_promise(std::mem::take(&mut self.promised));
        transaction.expect(expected.logged, expected.dirty)?;
        if pages * BLOCK_SIZE > memory_max() {
            // Before any lock is taken.
            transaction.store_whole()?;
        }
        let committed = match planted(Canary::AtomicNotAwaited) {
            true => transaction.commit_relaxed(),
            false => transaction.commit(),
        };
        // It relies on nothing but the file.
        committed.map_err(|error| match error {
            Error::Conflict(_) => Error::Stale(self.ino),
            error => error,
        })
    }

    /// Promises blocks for so many pages more.
    fn make_room(&mut self, pages: u64) -> Result<(), Error> {
        let most = base::tight::limit(PAGES_MAX as usize, 16) as u64;
        if self.content.pages.len() as u64 + pages > most {
            return Err(Error::TransactionTooLarge);
        }
        let wanted = self.content.pages.len() as u64 + pages + BESIDES;
        if wanted > self.promised {
            self.fs
                .store
                .accept(self.content.pages.len() as u64 * EXTENT_BYTES)?;
        }
        let promise = self
            .fs
            .store
            .promise(wanted.saturating_sub(self.promised))?;
        let AtomicCounts {
            pages: all,
            pages_max,
            ..
        } = &self.fs.atomic;
        if all.fetch_add(pages, Ordering::Relaxed) + pages > *pages_max {
            all.fetch_sub(pages, Ordering::Relaxed);
            return Err(Error::TransactionTooLarge);
        }
        self.counted += pages;
        self.promised += promise.into_blocks();
        Ok(())
    }
}

impl Drop for AtomicWrite {
    fn drop(&mut self) {
        let counts = &self.fs.atomic;
        counts.pages.fetch_sub(self.counted, Ordering::Relaxed);
        let ended = match self.is_committed {
            true => &counts.committed,
            false => &counts.aborted,
        };
        ended.fetch_add(1, Ordering::Relaxed);
        if !planted(Canary::AtomicPromiseKept) {
            drop(self.fs.store.adopt_promise(self.promised));
        }
    }
}

/// What the commit of so many pieces logs and leaves dirty, about, with the change of attributes.
fn of_commit(runs: usize) -> Extensive {
    Extensive {
        logged: runs * RUN_LOGGED + STEP_LOGGED,
        dirty: runs * RUN_LOGGED + STEP_DIRTY,
    }
}

/// Pieces without a gap that pages make, which grow.
fn runs_in(pages: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for page in pages {
        match runs.last_mut().filter(|run| run.end == page) {
            Some(run) => run.end += 1,
            None => runs.push(page..page + 1),
        }
    }
    runs
}

/// How many of them there are.
fn runs_of(pages: impl Iterator<Item = u64>) -> usize {
    let mut next = None;
    let begins = pages.filter(|&page| {
        let begins = next != Some(page);
        next = Some(page + 1);
        begins
    });
    begins.count()
}

//! Bytes in the journal instead of pages on a device: what makes a synced append, and a small new file, one write.
//!
//! A page that is the only dirty one of a file is logged by fsync as a change of the inode: as its inline body, if the
//! file is no larger than that page, else as its *tail*. So is the last page, which is not full, of several that fsync adds to
//! a file. The page goes home later, with others.
//!
//! Invariants:
//! 1. A tail is all that its page holds, whatever the block behind it does: zeros follow its bytes. So does an inline
//!    body of page 0. Whoever reads a page from its block asks the inode first.
//! 2. A record that maps the tail's page anew, or that follows a write of it in place, ends the tail; no other ends it. It
//!    is staged after that write has completed, so that its commit flushes the page before it is durable; or vouches for it, and
//!    the commit writes both.
//! 3. The tail ends within the size: it is logged together with that, and cut together with that.
//! 4. A logged page stays dirty, with the promise of a block that it has, until it is home. So write-back needs no space
//!    that it might not get. A tail is without a dirty page only after a crash or after a page was given up; then it may
//!    stay as long as nobody writes to its page.
//! 5. What is in the inode changes only under the file's I/O lock, exclusive, or shared together with its flusher lock.
//!
//! What was changed since a page was last logged is what differs from the inode: nothing else keeps account of that.

use super::file::FileState;
use super::{Files, PAGE, extents};
use crate::content::{AttrChange, Body, Delta, Inode, Tail};
use crate::{Error, Ino};
use base::counted::Counted;
use engine::Need;
use format::BLOCK_SIZE;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a page that are logged rather than written at most, of a file that has more than this page; of a page that is
/// likely to be written again soon, as the file has just grown into it and does not fill it, any number is.
const LOGGED_MAX: u64 = PAGE / 2;
/// A part of the page cache, and of what may change between two checkpoints, that logged pages take before they go
/// home; and as many as always may be.
const LOGGED_SHARE: usize = 16;
const LOGGED_MIN: usize = 4;

/// So many go home at a time, the part whose pages were logged first: the more of the others are deleted before their turn, or written over, and few at a
/// time keep syncs beside them waiting for less.
pub(super) const HOME_SHARE: usize = 4;

/// Files with a logged page, in the order in which each was first logged; of some it may be gone.
#[derive(Debug, Default)]
pub(super) struct LoggedFiles {
    pub files: BTreeMap<u64, Ino>,
    next: u64,
}

impl LoggedFiles {
    fn insert(&mut self, ino: Ino) -> u64 {
        let number = self.next;
        self.next += 1;
        self.files.insert(number, ino);
        number
    }

    /// The first ones, if there are `most` in all: so many that all but a part of `most` are left.
    pub fn take_first(&mut self, most: usize) -> Vec<Ino> {
        let all = self.files.len();
        if all < most {
            return Vec::new();
        }
        let left = most - most.div_ceil(HOME_SHARE);
        std::iter::from_fn(|| self.files.pop_first())
            .take(all - left)
            .map(|(_, ino)| ino)
            .collect()
    }
}

/// What write-back does with a page that the journal can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// It goes to its block, like all others; to the inode if the file is small enough to stay there.
    Home,
    /// As `Home`, before its time: somebody wants these pages there. Not if they are of content that takes the place of another one as a whole.
    Early,
    /// It goes to its block, however small the file is: it is about to outgrow its inode.
    Blocks,
    /// It is logged if that costs less than making its block durable, and stays dirty.
    Logged,
    /// As `Logged`, while no other sync runs: one contiguous write in place may be made durable by a durable write, without a flush.
    Alone,
}

/// What is best done with the one dirty page of a file.
enum Step {
    Home,
    /// The inode has it.
    Nothing,
    Log(Option<Delta>),
}

/// What of `new` must be written over `old`, if they differ: all that is behind the end of `old`, too.
pub(super) fn changed(old: &[u8], new: &[u8]) -> Option<Range<usize>> {
    let both = old.len().min(new.len());
    let first = (old.iter().zip(new)).position(|(a, b)| a != b);
    let first = first.unwrap_or(both);
    if first == both && old.len() == new.len() {
        return None;
    }
    if new.len() > old.len() {
        return Some(first..new.len());
    }
    let same = old[first..both]
        .iter()
        .rev()
        .zip(new[first..both].iter().rev());
    Some(first..both - same.take_while(|(a, b)| a == b).count())
}

/// What a cut to `size` bytes does to the tail, if anything.
pub(super) fn cut(inode: &Inode, size: u64) -> Option<Delta> {
    let tail = inode.tail.as_ref()?;
    if tail.start() >= size {
        return Some(Delta::EndTail);
    }
    (tail.end() > size).then(|| Delta::Tail {
        page: tail.page,
        len: (size - tail.start()) as u32,
        offset: 0,
        data: Vec::new(),
    })
}

/// Whether a file of `logged` bytes grows into this page, and not to its end.
fn grows_into(page: u64, logged: u64, size: u64) -> bool {
    0 < logged && logged < size && page == size / PAGE && !size.is_multiple_of(PAGE)
}

/// What is done with a page that holds these bytes and zeros, of a file whose inode says that it has `logged`.
fn step(inode: &Inode, page: u64, bytes: &[u8], logged: u64, size: u64) -> Step {
    let same_size = logged == size;
    let old = inode.tail.as_ref().map(|tail| tail.bytes.as_slice());
    let range = match (changed(old.unwrap_or_default(), bytes), old) {
        (None, Some(_)) if same_size => return Step::Nothing,
        (None, Some(_)) => return Step::Log(None),
        (None, None) => 0..0,
        (Some(range), _) => range,
    };
    // Without a tail there is all of the page to log, once, however little of it is new.
    let known = (old.is_some() || same_size) && !grows_into(page, logged, size);
    if known && range.len() as u64 > LOGGED_MAX {
        return Step::Home;
    }
    Step::Log(Some(Delta::Tail {
        page,
        len: bytes.len() as u32,
        offset: range.start as u32,
        data: bytes[range].to_vec(),
    }))
}

/// All but the zeros at the end.
fn used(bytes: &[u8]) -> &[u8] {
    let last = bytes.iter().rposition(|b| *b != 0);
    &bytes[..last.map_or(0, |last| last + 1)]
}

/// Makes a page the tail, whatever the file has for one that is not another page's.
pub(super) fn whole_tail(page: u64, bytes: &[u8]) -> Delta {
    let bytes = used(bytes);
    Delta::Tail {
        page,
        len: bytes.len() as u32,
        offset: 0,
        data: bytes.to_vec(),
    }
}

impl Tail {
    /// Puts it over what the blocks of pages from `first` on hold.
    pub(super) fn overlay(&self, first: u64, pages: &mut [u8]) {
        if let Some(place) = self.page.checked_sub(first)
            && let Some(page) = pages.chunks_mut(BLOCK_SIZE).nth(place as usize)
        {
            let (bytes, rest) = page.split_at_mut(self.bytes.len());
            bytes.copy_from_slice(&self.bytes);
            rest.fill(0);
        }
    }
}

impl Files {
    /// Logs the one dirty page of a file, and its size. False: it should go home.
    pub(super) fn log_page(
        &self,
        state: &Counted<FileState>,
        page: u64,
        size: u64,
    ) -> Result<bool, Error> {
        let logged_size = state.meta.lock().logged_size;
        let worth_it = {
            let content = state.node.read()?;
            self.worth_logging(content.inode()?, page, logged_size, size)?
        };
        let copies = match worth_it {
            true => self.copy_pages(state, vec![page])?,
            false => None,
        };
        let Some(copies) = copies else {
            return Ok(false);
        };
        let valid = (size - page * PAGE).min(PAGE) as usize;
        let bytes = used(&copies.data[..valid]);
        let step = {
            let content = state.node.read()?;
            step(content.inode()?, page, bytes, logged_size, size)
        };
        match step {
            Step::Home => return Ok(false),
            Step::Nothing => {}
            Step::Log(delta) => {
                let (mut op, slot) = self.begin(state, Need::Accepted)?;
                if let Some(delta) = delta {
                    op.apply(slot, delta);
                }
                self.commit_attrs(state, op, slot, AttrChange::default(), Some(size));
            }
        }
        self.stays_logged(state);
        Ok(true)
    }

    /// Whether the one dirty page of a file, if any is, is in the inode as it is, and nothing else of the content is ahead of that: so nothing is lost
    /// with the page.
    pub(super) fn is_all_logged(&self, state: &Counted<FileState>) -> Result<bool, Error> {
        let (size, ahead) = {
            let meta = state.meta.lock();
            (meta.size, meta.content_is_ahead())
        };
        if ahead {
            return Ok(false);
        }
        let pages = 0..size.div_ceil(PAGE);
        let page = match self.pages.dirty_pages(state.key, pages, 2)[..] {
            [] => return Ok(true),
            [page] => page,
            _ => return Ok(false),
        };
        let Some(copies) = self.copy_pages(state, vec![page])? else {
            return Ok(false);
        };
        let valid = (size - page * PAGE).min(PAGE) as usize;
        let bytes = &copies.data[..valid];
        let content = state.node.read()?;
        let inode = content.inode()?;
        Ok(match (&inode.body, &inode.tail) {
            (Body::Inline(own), _) => page == 0 && own == bytes,
            (_, Some(tail)) => tail.page == page && tail.bytes == used(bytes),
            _ => false,
        })
    }

    /// Whether a dirty page may be the tail, and is not done more cheaply.
    fn worth_logging(
        &self,
        inode: &Inode,
        page: u64,
        logged_size: u64,
        size: u64,
    ) -> Result<bool, Error> {
        let start = page * PAGE;
        let fits = matches!(inode.body, Body::Extents(_) | Body::Tree(_));
        if !fits || inode.seldom.pending_truncate.is_some() || start >= size || size < logged_size {
            return Ok(false);
        }
        match &inode.tail {
            Some(tail) => Ok(tail.page == page),
            None if grows_into(page, logged_size, size) => Ok(true),
            None if size > logged_size => Ok(size - logged_size.max(start) <= LOGGED_MAX),
            None => {
                let mapped = extents::lookup(&self.store, inode, page..page + 1, 1)?;
                // Overwritten in place it needs no record at all.
                Ok(!mapped.iter().any(|e| e.written))
            }
        }
    }

    /// Whether a page without a block can become the tail, and is better than stored, when these before it are.
    pub(super) fn may_be_tail(
        &self,
        state: &Counted<FileState>,
        page: u64,
        stored: &[u64],
        size: u64,
    ) -> Result<bool, Error> {
        if !grows_into(page, state.meta.lock().logged_size, size) {
            return Ok(false);
        }
        let content = state.node.read()?;
        let inode = content.inode()?;
        let fits = matches!(inode.body, Body::Extents(_) | Body::Tree(_));
        if !fits || inode.seldom.pending_truncate.is_some() {
            return Ok(false);
        }
        match &inode.tail {
            Some(tail) if tail.page == page => Ok(true),
            Some(tail) if !stored.contains(&tail.page) => Ok(false),
            _ => {
                let mapped = extents::lookup(&self.store, inode, page..page + 1, 1)?;
                Ok(!mapped.iter().any(|e| e.written))
            }
        }
    }

    /// A dirty page of the file is in the inode: it goes home when it is old, or when there are many of the kind.
    pub(super) fn stays_logged(&self, state: &Counted<FileState>) {
        if state.meta.lock().logged.is_some() {
            return;
        }
        let (number, many) = {
            let mut logged = self.logged.lock();
            let number = logged.insert(state.ino());
            (number, logged.files.len() >= self.logged_max())
        };
        state.meta.lock().logged = Some(number);
        if many {
            self.hurry();
        }
    }

    /// Pages of the file are clean or gone: if none is dirty any more, none of those is in its inode.
    pub(super) fn not_logged(&self, state: &FileState) {
        let number = state.meta.lock().logged;
        let Some(number) = number else { return };
        let dirty = self.pages.is_dirty(state.key);
        {
            let mut logged = self.logged.lock();
            if dirty && logged.files.contains_key(&number) {
                return;
            }
            logged.files.remove(&number);
        }
        state.meta.lock().logged = None;
    }

    /// Files with logged pages at which the first of these go home. Few of those that there are between two checkpoints, so
    /// that few of them are written to a segment besides.
    pub(super) fn logged_max(&self) -> usize {
        let nodes = self.store.dirty_limit() as usize / BLOCK_SIZE;
        (self.pages.capacity().min(nodes) / LOGGED_SHARE).max(LOGGED_MIN)
    }

    /// The files whose logged pages are to go home now, if there are many of them.
    pub(super) fn take_logged(&self) -> Vec<Ino> {
        self.logged.lock().take_first(self.logged_max())
    }

    /// The page of the tail as new data sees it: there is none in a replaced file.
    pub(super) fn tail_page(&self, state: &Counted<FileState>) -> Result<Option<u64>, Error> {
        if state.meta.lock().replaced {
            return Ok(None);
        }
        let content = state.node.read()?;
        Ok(content.inode()?.tail.as_ref().map(|tail| tail.page))
    }

    /// Makes the tail's page dirty, so that write-back takes it home.
    pub(super) fn dirty_tail(&self, state: &Counted<FileState>) -> Result<(), Error> {
        match self.tail_page(state)? {
            Some(page) => self.dirty_page(state, page),
            None => Ok(()),
        }
    }

    /// Ends a tail that is of one of these pages, which become holes.
    pub(super) fn drop_tail(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
    ) -> Result<(), Error> {
        if !self
            .tail_page(state)?
            .is_some_and(|page| pages.contains(&page))
        {
            return Ok(());
        }
        let (mut op, slot) = self.begin(state, Need::Reclaim)?;
        op.apply(slot, Delta::EndTail);
        let size = state.meta.lock().logged_size;
        self.commit_attrs(state, op, slot, AttrChange::default(), Some(size));
        Ok(())
    }
}

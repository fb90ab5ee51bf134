//! Writes in flight, past the cache: begun under the file's shared lock, landed without any.
//!
//! 1. A flight goes over what a write past the cache that waits may go over under the shared lock ([`Files::write_past`]): whole
//!    pages below the size, written, logged, and vouched for by nobody. It needs neither space nor a record.
//! 2. It holds its range, and is counted in the file ([`gate`](super::super::gate)), from before it is submitted until it has landed. So what
//!    overlaps waits for it, and what is elsewhere does not.
//! 3. Blocks are taken from a file under its exclusive lock alone, and who has that waits until none of the file's writes is
//!    in flight ([`Files::lock_exclusive`]). None begins meanwhile.
//! 4. Nobody waits for the owner of a flight: who waits for a flight asks all owners to land what has ended ([`InFlight`]), again and
//!    again. Landing waits for nothing, takes no lock that is held over a wait, and lets go of no file.
//! 5. A flight lands once. One whose owner loses it has failed.
//! 6. When a flight's owner is told, it is noted as unflushed, what the cache had of its pages is superseded, and its range is left, in that order.

use super::super::extents;
use super::super::file::{FileState, OpenFile};
use super::super::{Files, PAGE, pages_of};
use super::PAGES_MAX;
use crate::Error;
use crate::content::FileExtent;
use base::atomic::Ordering;
use base::canary::{Canary, planted};
use base::clock::Timestamp;
use base::counted::Counted;
use base::sync::{Condvar, Mutex, WriteGuard, rank};
use device::Run;
use engine::Extent;
use format::BLOCK_SIZE;
use std::ops::Range;
use std::sync::Weak;
use std::time::Duration;

/// What somebody has in flight.
pub(crate) trait InFlight: Send + Sync {
    /// Lands the writes that have ended, unless somebody is at it.
    fn land(&self);

    /// Writes that have begun and not landed.
    fn writes(&self) -> u64;

    /// A handle was closed: reads of it may end early.
    fn closed(&self);
}

/// How long who waits until nothing is in flight leaves what is to its owner, before it looks again.
const PATIENCE: Duration = Duration::from_micros(200);

/// A write that is about to fly, or flies. Dropped before it has landed, it has failed.
#[derive(Debug)]
pub(crate) struct Writing {
    file: std::sync::Arc<OpenFile>,
    pages: Range<u64>,
    ticket: u64,
    flush_failures: u64,
    begun: Timestamp,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The range is.
    Held,
    Counted,
    Landed,
}

impl Files {
    /// Begins to write `len` bytes at `offset`: the blocks are put into `runs`, and what is to go there is the caller's to send.
    /// `None`: nothing is begun, it has to be a call that waits, or fails. The caller has counted it ([`InFlight::writes`]).
    pub(crate) fn begin_write(
        &self,
        file: &std::sync::Arc<OpenFile>,
        offset: u64,
        len: usize,
        runs: &mut Vec<Run>,
    ) -> Result<Option<Writing>, Error> {
        let past = file.has(libc::O_DIRECT) && file.flags() & (libc::O_APPEND | libc::O_DSYNC) == 0;
        let whole = offset.is_multiple_of(PAGE) && len.is_multiple_of(BLOCK_SIZE) && len > 0;
        let closing = self.closing.load(Ordering::SeqCst);
        if !past || !whole || !file.writable() || closing || self.check_writable().is_err() {
            return Ok(None);
        }
        let state = &file.state;
        let Some(_shared) = state.try_lock_shared()? else {
            return Ok(None);
        };
        let end = offset.saturating_add(len as u64);
        let pages = pages_of(offset..end);
        if end > state.size() || pages.end - pages.start > PAGES_MAX {
            return Ok(None);
        }
        let Some(ticket) = self.ranges.try_fly(state.ino().0, pages.clone()) else {
            return Ok(None);
        };
        let mut writing = Writing {
            file: std::sync::Arc::clone(file),
            pages,
            ticket,
            flush_failures: self.store.array().flush_failures(),
            begun: self.now(),
            stage: Stage::Held,
        };
        if !self.found_written(state, &writing.pages, runs)? || !state.stores.begin_flight() {
            return Ok(None);
        }
        writing.stage = Stage::Counted;
        self.stamp(state, writing.begun);
        let bytes = &self.counts.data_bytes;
        bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(Some(writing))
    }

    /// Where these pages lie. False: some are nowhere, or not as invariant 1 says, or to tell would take a wait.
    fn found_written(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
        runs: &mut Vec<Run>,
    ) -> Result<bool, Error> {
        if !self.is_logged(state, pages) {
            return Ok(false);
        }
        let found = {
            let content = state.node.read()?;
            let inode = content.inode()?;
            match inode.tail.as_ref().is_some_and(|t| pages.contains(&t.page)) {
                true => None,
                false => extents::glance(&self.store, inode, pages),
            }
        };
        let Some(found) = found.filter(|found| is_written(found.iter(), pages)) else {
            return Ok(false);
        };
        runs.clear();
        for extent in found.iter() {
            let (block, len) = (extent.block, extent.len);
            if self.store.is_vouched(Extent { block, len }) {
                return Ok(false);
            }
            runs.push(Run {
                byte: block.byte(),
                at: ((extent.page - pages.start) * PAGE) as usize,
                len: len as usize * BLOCK_SIZE,
            });
        }
        Ok(true)
    }

    /// The file's I/O lock, exclusive, of a file that is not being deleted, when none of its writes is in flight.
    pub(in super::super) fn lock_exclusive<'a>(
        &self,
        state: &'a Counted<FileState>,
    ) -> Result<WriteGuard<'a, ()>, Error> {
        let guard = self.lock_alone(state);
        state.check_alive()?;
        Ok(guard)
    }

    /// The same for who changes content.
    pub(in super::super) fn lock_to_change<'a>(
        &self,
        state: &'a Counted<FileState>,
    ) -> Result<WriteGuard<'a, ()>, Error> {
        let guard = self.lock_exclusive(state)?;
        self.check_open()?;
        Ok(guard)
    }

    /// As `lock_exclusive` of a file that may be being deleted. What streams have written behind has ended, too.
    pub(in super::super) fn lock_alone<'a>(
        &self,
        state: &'a Counted<FileState>,
    ) -> WriteGuard<'a, ()> {
        let guard = self.lock_landed(state);
        self.end_pieces(state, true);
        guard
    }

    /// The same beside a stream's pieces.
    pub(in super::super) fn lock_landed<'a>(&self, state: &'a FileState) -> WriteGuard<'a, ()> {
        let guard = state.lock_beside_flights();
        if state.stores.flights() > 0 && !planted(Canary::FlightsNotAwaited) {
            let landed = || state.stores.flights() == 0;
            (self.ranges).wait_landed(state.ino().0, || self.land_writes(), landed);
        }
        guard
    }

    /// Lands the writes in flight that have ended, whosever they are.
    pub(in super::super) fn land_writes(&self) {
        let owners: Vec<_> = self.owners_in_flight();
        for owner in owners {
            owner.land();
        }
    }

    /// No write begins any more; waits until none is in flight.
    pub(crate) fn finish_writes(&self) {
        self.closing.store(true, Ordering::SeqCst);
        let (lock, never) = (Mutex::new(rank::LEAF, ()), Condvar::new());
        for owner in self.owners_in_flight() {
            while owner.writes() > 0 {
                owner.land();
                never.wait_for(&mut lock.lock(), PATIENCE);
            }
        }
    }

    /// No request of this handle begins any more, and reads of it that are in flight may end early.
    pub(crate) fn close_handle(&self, file: &OpenFile) {
        file.close();
        for owner in self.owners_in_flight() {
            owner.closed();
        }
    }

    fn owners_in_flight(&self) -> Vec<std::sync::Arc<dyn InFlight>> {
        let owners = self.in_flight.lock();
        owners.iter().filter_map(Weak::upgrade).collect()
    }

    /// From now on somebody may have writes in flight.
    pub(crate) fn add_in_flight(&self, owner: Weak<dyn InFlight>) {
        let mut owners = self.in_flight.lock();
        owners.retain(|owner| owner.strong_count() > 0);
        owners.push(owner);
    }
}

/// Whether these extents, ascending, are all of these pages, and hold data.
pub(in super::super) fn is_written<'a>(
    extents: impl Iterator<Item = &'a FileExtent>,
    pages: &Range<u64>,
) -> bool {
    let mut at = pages.start;
    for extent in extents {
        if extent.page != at || !extent.written {
            return false;
        }
        at = extent.end();
    }
    at == pages.end
}

impl Writing {
    /// The devices have done with it, and this is what they say. Invariants 4 and 6.
    pub fn land(mut self, written: Result<(), Error>) -> Result<(), Error> {
        self.end(written)
    }

    /// It was not sent: nothing is written.
    pub fn never_flew(mut self) {
        self.leave();
    }

    fn leave(&mut self) {
        let state = &self.file.state;
        if self.stage == Stage::Counted {
            state.stores.end_flight();
        }
        self.stage = Stage::Landed;
        self.file.files().ranges.land(state.ino().0, self.ticket);
    }

    fn end(&mut self, written: Result<(), Error>) -> Result<(), Error> {
        let (files, state) = (self.file.files(), &self.file.state);
        let written = written.and_then(|()| match planted(Canary::FlightUnnoted) {
            true => Ok(()),
            false => files.wrote_in_place(state, self.flush_failures),
        });
        files.superseded(state, self.pages.clone(), written.is_ok());
        files.stamp_again(state, self.begun);
        self.leave();
        written
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if self.stage == Stage::Held {
            self.leave();
        }
        if self.stage == Stage::Counted {
            let lost = Err(Error::WriteFailed {
                ino: self.file.ino(),
                why: "it was given up while it was in flight".to_owned(),
            });
            // Who let go of it is told by whoever did that.
            drop(self.end(lost));
        }
    }
}

//! Large writes, one behind the other, go past the cache.
//!
//! Why. Through the cache each byte is copied three times, into its frame, out of it again and by the device, and each page is looked up,
//! noted as dirty, cleaned, and pushes out another: four to five times the processor time of the transfer alone. That buys a return before the
//! device has the data, and memory that the next reader finds. A stream longer than [`run_min`] wants neither: who writes the next request waits for
//! the same device, and what leaves the cache for its pages is worth more than they are.
//!
//! A *run* is how much was written through a handle by large requests of whole pages, each where the one before ended.
//!
//! Invariants:
//! 1. It is a direct write by another reason: coherent with the cache, one unit for readers; over blocks that the file has beside all that is
//!    elsewhere in it ([`write_past`](Files::write_past)), into new ones alone and with a record for each. One that fails goes through the cache, under the same lock if
//!    it had the file alone: the pages are dirty then, and what is promised of writes that fail holds as ever.
//! 2. While small syncs go on beside, streams go through the cache, which keeps the pace ([`pace`](super::super::pace)).
//! 3. While devices take longer than [`SLOW_NS`] for each MiB, nearly each time, only one request in [`PROBE`] goes there: it is worth more to
//!    return early. What counts is the devices' time, not that for a lock or for what lay before. Not in the mean: what goes through the cache keeps the devices busy, too, so that who has once gone there would find them slow for ever.
//! 4. Content that takes the place of another, which a crash leaves as a whole ([`flush_replaced`](Files::flush_replaced)), goes through the cache as long as that is
//!    promised.

use super::super::SIZE_MAX;
use super::super::file::{FileState, OpenFile};
use super::super::write::is_whole;
use super::super::writeback::REPLACED_MAX;
use super::super::{Files, pages_of};
use crate::Error;
use base::atomic::{AtomicU64, Ordering};
use base::counted::Counted;
use base::tight;
use format::BLOCK_SIZE;
use std::ops::Range;

/// Bytes of a request at least: several pieces for each of some devices.
const REQUEST_MIN: usize = 256 << 10;
/// And at most: it needs as much memory if it lies where devices do not take it from, and is on its way as a whole when a small sync begins.
const REQUEST_MAX: usize = 4 << 20;
/// Bytes of a run that go through the cache first.
const RUN_MIN: usize = 4 << 20;
/// A MiB through the cache takes 0.3 to 0.5 ms of the processors: a device that is twice as slow is still one that is not worth to be kept waiting.
const SLOW_NS: u64 = 1_000_000;
const PROBE: u64 = 64;
/// Who tries devices that were slow, into new space, does not write more of what lies before at once: then it would wait for that.
const BEHIND_MAX: u64 = 16 << 20;
/// A request that took less than the usual time changes that by half of the difference, one that took more by one part in so many; and counts as so many
/// times [`SLOW_NS`] at most. So one in some ten that are fast is enough.
const SLOWER: u64 = 32;
const WORST: u64 = 4;

fn request_min() -> usize {
    tight::limit(REQUEST_MIN, 2 * BLOCK_SIZE)
}

fn run_min() -> u64 {
    tight::limit(RUN_MIN, 0) as u64
}

/// What all streams have in common.
#[derive(Debug, Default)]
pub(in super::super) struct Streams {
    /// For a MiB, when it goes well. Threads that note at once may lose one's note.
    usual_ns: AtomicU64,
    /// Requests that might have gone there meanwhile.
    spared: AtomicU64,
    /// Bytes that went past the cache.
    bytes: AtomicU64,
}

impl Streams {
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn is_slow(&self) -> bool {
        self.usual_ns.load(Ordering::Relaxed) > SLOW_NS
    }

    /// While devices are slow: whether this request goes there, to see how slow.
    pub fn is_probe(&self) -> bool {
        self.spared.fetch_add(1, Ordering::Relaxed) % PROBE == PROBE - 1
    }

    /// The devices do not what they should: they are left to the cache for a while.
    fn note_failed(&self) {
        self.usual_ns.store(WORST * SLOW_NS, Ordering::Relaxed);
    }

    /// So many bytes took so long, and were waited for.
    pub fn note(&self, bytes: usize, took_ns: u64) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.judge(bytes, took_ns);
    }

    /// So many bytes took so long.
    pub fn judge(&self, bytes: usize, took_ns: u64) {
        let each = took_ns.saturating_mul(1 << 20) / bytes as u64;
        let each = each.min(WORST * SLOW_NS);
        let usual = self.usual_ns.load(Ordering::Relaxed);
        let usual = match each < usual {
            true => each + (usual - each) / 2,
            false => usual + (each - usual) / SLOWER,
        };
        self.usual_ns.store(usual, Ordering::Relaxed);
    }
}

/// A request that the devices have, and how long they took for it, beside the locks and what lay before.
struct Stored {
    bytes: usize,
    took_ns: u64,
}

impl Files {
    /// Writes past the cache if this goes on with a long run, and returns how many bytes; `None`: nothing is written.
    pub(in super::super) fn write_stream(
        &self,
        file: &OpenFile,
        offset: u64,
        data: &[u8],
    ) -> Result<Option<usize>, Error> {
        let right = (request_min()..=REQUEST_MAX).contains(&data.len());
        let fits = offset <= SIZE_MAX - data.len() as u64;
        if !right || !fits || !is_whole(offset, data.len()) {
            return Ok(None);
        }
        let run = file.writes.go_on(offset, data.len());
        if run < run_min() || self.keeps_pace() || !self.is_next(&file.state, offset, run) {
            return Ok(None);
        }
        if !self.streams.is_slow()
            && let Some(written) = self.write_behind(&file.state, offset, data)?
        {
            return Ok(Some(written));
        }
        if self.suits_devices(data) {
            return self.write_to_devices(&file.state, offset, data);
        }
        // Memory that no device takes is copied to some that all do.
        let mut copy = self.memory.take(data.len());
        copy.copy_from_slice(data);
        self.write_to_devices(&file.state, offset, &copy)
    }

    /// Whether a request of a run after so many bytes goes to the devices.
    fn is_next(&self, state: &FileState, offset: u64, run: u64) -> bool {
        let (kept, logged) = {
            let meta = state.meta.lock();
            (meta.replaced || meta.cutting, meta.logged_size)
        };
        // Content that replaces another is kept together as far as one record takes it.
        if kept && run.min(state.size()) < REPLACED_MAX {
            return false;
        }
        let behind = offset.saturating_sub(logged);
        match self.streams.is_slow() {
            true => behind <= BEHIND_MAX && self.streams.is_probe(),
            false => true,
        }
    }

    fn write_to_devices(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<Option<usize>, Error> {
        let began_ns = self.now_ns();
        match self.write_past(state, offset, data) {
            Ok(true) => {
                let took_ns = self.now_ns().saturating_sub(began_ns);
                self.streams.note(data.len(), took_ns);
                return Ok(Some(data.len()));
            }
            Ok(false) => {}
            Err(error) => {
                self.spare_devices(state, &error);
                return Ok(None);
            }
        }
        let pages = pages_of(offset..offset + data.len() as u64);
        // A record's size has all before it behind it: that goes home while others go on with the file.
        if let Err(error) = self.flush_range(state, pages.clone()) {
            self.spare_devices(state, &error);
            return Ok(None);
        }
        let _exclusive = self.lock_to_change(state)?;
        match self.store_new(state, pages, data) {
            Ok(stored) if stored.bytes < data.len() => {
                self.streams.note_failed();
                // What the devices did not take.
                let (at, rest) = (offset + stored.bytes as u64, &data[stored.bytes..]);
                let more = self.write_locked(state, at, rest).unwrap_or(0);
                Ok(Some(stored.bytes + more))
            }
            Ok(stored) => {
                self.streams.note(stored.bytes, stored.took_ns);
                Ok(Some(stored.bytes))
            }
            // Through the cache there may be room yet, and who has none learns it there. Nobody has seen a part of it.
            Err(error) => {
                self.spare_devices(state, &error);
                self.spare_inline(state);
                self.write_locked(state, offset, data).map(Some)
            }
        }
    }

    /// Whole pages, in place of what the cache has of them; of a file that grows not all, if the devices fail. The I/O lock is held exclusively.
    fn store_new(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
        data: &[u8],
    ) -> Result<Stored, Error> {
        self.make_way(state, pages.clone())?;
        let began_ns = self.now_ns();
        let outcome = self.direct_step(state, pages.start, data);
        self.note_ahead(state);
        outcome.map(|bytes| Stored {
            bytes,
            took_ns: self.now_ns().saturating_sub(began_ns),
        })
    }

    /// A request that failed goes through the cache, and others do if it was for the devices.
    pub(super) fn spare_devices(&self, state: &FileState, error: &Error) {
        let ino = state.ino();
        match error {
            Error::NoSpace => {}
            Error::Store(_) | Error::WriteFailed { .. } => {
                if let Some(left_out) = self.told.through_cache.may_say(self.now_ns()) {
                    tracing::warn!(
                        left_out,
                        "a write of inode {ino} past the cache failed, and goes through it: {error}"
                    );
                }
                self.streams.note_failed();
            }
            _ => tracing::debug!("a write of inode {ino} goes through the cache: {error}"),
        }
    }
}

//! The ring read ahead: one window after the other, the next of which is read while batches of the last are looked at.
//!
//! A window's memory has room in front of what is read into it. There the beginning of a batch is put that lies at the end of the
//! window before, or of the ring: so each batch is in one piece, and only such beginnings are copied. A batch
//! that has no room there is read by itself, if it is whole: its length is only as good as its checksum.
//!
//! Invariants:
//! 1. A batch that was found follows the one before it, as far as headers say: that it is whole is for others to see,
//!    and that the run goes on to it.
//! 2. Memory of windows is used again when no batch refers to it. No more is read than all of the ring, and no
//!    window behind the next.
//! 3. Nothing is found in a gap of the ring, nor behind the first one that a batch reaches into: what is found are the batches before
//!    it, and [`Ahead::gap`] says where it is.

use crate::batches::{Batch, after, follows};
use crate::error::Error;
use crate::journal::Anchor;
use crate::ring_reader::{Gaps, Records, RingReader, read_part};
use base::tight;
use device::{AlignedBuf, Array};
use format::BLOCK_SIZE;
use format::checkpoint::CheckpointRecord;
use format::journal::{BATCH_MAGIC, BatchHeader};
use std::ops::Range;
use std::sync::Arc;
use zerocopy::FromBytes;

/// Bytes of the first window, and of any: enough for all devices at once, and few enough that they stay near the processor.
const FIRST: usize = 1 << 20;
const MOST: usize = 8 << 20;
/// Of the memory for batches, the part that one window may take.
const SHARE: usize = 16;

/// A batch, and where it and the next one lie.
pub(crate) struct Found {
    pub batch: Batch,
    pub at: Anchor,
    pub after: Anchor,
}

/// Part of the ring in memory.
struct Window {
    memory: Arc<AlignedBuf>,
    /// What of the memory was read, from this ring position on.
    holds: Range<usize>,
    position: u64,
}

/// A window to be read.
pub(crate) struct Fetch {
    memory: AlignedBuf,
    into: Range<usize>,
    /// In the ring.
    place: u64,
    position: u64,
    outcome: Result<(), Error>,
    gaps: Gaps,
}

impl Fetch {
    pub fn run(&mut self, array: &Array) {
        let into = &mut self.memory[self.into.clone()];
        self.outcome = read_part(array, self.place, into, &mut self.gaps);
    }
}

/// What lies where a batch is expected.
enum Look {
    Batch(Found),
    /// One that needs room of its own.
    Large(BatchHeader),
    /// What says it is not in memory.
    Unread,
    /// A device does not return all of it.
    Gap(device::Error),
    Nothing,
}

pub(crate) struct Ahead<'a> {
    array: &'a Array,
    record: &'a CheckpointRecord,
    /// Where the next batch is expected.
    next: Anchor,
    /// Where the next window begins, and where the last ends.
    position: u64,
    until: u64,
    /// Bytes of it, of any, and in front of them.
    len: usize,
    most: usize,
    window: Option<Window>,
    fetched: Option<Fetch>,
    /// Memory: nobody's, and of windows that batches may refer to.
    free: Vec<AlignedBuf>,
    lent: Vec<Arc<AlignedBuf>>,
    /// Of all that was read.
    gaps: Gaps,
    /// Where the batch is expected that reaches into one, and why it is one.
    gap: Option<(Anchor, device::Error)>,
    ended: bool,
}

fn in_blocks(bytes: usize) -> usize {
    bytes / BLOCK_SIZE * BLOCK_SIZE
}

impl<'a> Ahead<'a> {
    /// From `start` on, for who has so many bytes for batches.
    pub fn new(
        array: &'a Array,
        record: &'a CheckpointRecord,
        start: Anchor,
        bytes: usize,
    ) -> Ahead<'a> {
        let most = in_blocks((bytes / SHARE).clamp(FIRST / 4, MOST));
        Ahead::by_windows(array, record, start, tight::limit(most, 2 * BLOCK_SIZE))
    }

    /// By windows of so many bytes at most, whole blocks.
    pub fn by_windows(
        array: &'a Array,
        record: &'a CheckpointRecord,
        start: Anchor,
        most: usize,
    ) -> Ahead<'a> {
        let position = start.position / BLOCK_SIZE as u64 * BLOCK_SIZE as u64;
        Ahead {
            array,
            record,
            next: start,
            position,
            until: position + array.geometry().journal_bytes(),
            len: FIRST.min(most),
            most,
            window: None,
            fetched: None,
            free: Vec::new(),
            lent: Vec::new(),
            gaps: Gaps::default(),
            gap: None,
            ended: false,
        }
    }

    /// Where the batch is expected of which a device does not return all, and why; what was found is all that is before it.
    pub fn gap(self) -> Option<(Anchor, device::Error)> {
        self.gap
    }

    /// Nothing is found any more.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// The next window, to be read by whoever has time and given back by [`fetched`](Self::fetched).
    pub fn fetch(&mut self) -> Option<Fetch> {
        if self.ended || self.fetched.is_some() || self.position >= self.until {
            return None;
        }
        let ring = self.array.geometry().journal_bytes();
        let at = self.position % ring;
        let len = (self.len as u64)
            .min(ring - at)
            .min(self.until - self.position);
        let memory = self.free.pop();
        let fetch = Fetch {
            memory: memory.unwrap_or_else(|| AlignedBuf::zeroed(2 * self.most)),
            into: self.most..self.most + len as usize,
            place: at,
            position: self.position,
            outcome: Ok(()),
            gaps: Gaps::default(),
        };
        self.position += len;
        self.len = (2 * self.len).min(self.most);
        Some(fetch)
    }

    pub fn fetched(&mut self, fetch: Fetch) {
        self.fetched = Some(fetch);
    }

    /// The batches in the window, if any is; else in the next, if that was read.
    pub fn find(&mut self) -> Result<Vec<Found>, Error> {
        let mut found = Vec::new();
        while !self.ended {
            match self.look() {
                Look::Batch(batch) => {
                    self.next = batch.after;
                    found.push(batch);
                }
                Look::Large(_) | Look::Unread if !found.is_empty() => break,
                Look::Large(header) => {
                    let large = self.large(header)?;
                    self.ended = large.is_none();
                    found.extend(large);
                    break;
                }
                Look::Unread => match self.fetched.take() {
                    Some(next) => self.turn(next)?,
                    None => {
                        self.ended = self.position >= self.until;
                        break;
                    }
                },
                Look::Gap(error) => {
                    self.gap = Some((self.next, error));
                    self.ended = true;
                }
                Look::Nothing => self.ended = true,
            }
        }
        Ok(found)
    }

    fn look(&self) -> Look {
        let gap = |len: usize| {
            let ring = self.array.geometry().journal_bytes();
            self.gaps
                .within(ring, self.next.position, len as u64)
                .cloned()
        };
        if let Some(error) = gap(BatchHeader::SIZE) {
            return Look::Gap(error);
        }
        let Some(window) = &self.window else {
            return Look::Unread;
        };
        let start = window.holds.start + (self.next.position - window.position) as usize;
        let Some(bytes) = window.memory.get(start..window.holds.end) else {
            return Look::Unread;
        };
        let magic = BATCH_MAGIC.to_le_bytes();
        if bytes.first_chunk().is_some_and(|first| *first != magic) {
            return Look::Nothing;
        }
        let Ok((header, _)) = BatchHeader::read_from_prefix(bytes) else {
            return Look::Unread;
        };
        let own = header.uuid == self.array.metadata_uuid();
        if !own || !follows(self.array, self.record, self.next, &header) {
            return Look::Nothing;
        }
        let len = BatchHeader::SIZE + header.len.get() as usize;
        if len > bytes.len() {
            return match len > self.most {
                true => Look::Large(header),
                false => Look::Unread,
            };
        }
        if let Some(error) = gap(len) {
            return Look::Gap(error);
        }
        let range = start + BatchHeader::SIZE..start + len;
        let records = Records::new(Arc::clone(&window.memory), range);
        Look::Batch(self.found(header, records))
    }

    fn found(&self, header: BatchHeader, records: Records) -> Found {
        Found {
            batch: Batch { header, records },
            at: self.next,
            after: after(self.array, self.next, &header),
        }
    }

    /// Goes on to the next window, with what is left of the last.
    fn turn(&mut self, next: Fetch) -> Result<(), Error> {
        next.outcome?;
        self.gaps.join(next.gaps);
        let (mut memory, mut holds, mut position) = (next.memory, next.into, next.position);
        if let Some(last) = self.window.take() {
            let start = last.holds.start + (self.next.position - last.position) as usize;
            // What pads the last batch may reach beyond the window.
            let left = last.memory.get(start..last.holds.end).unwrap_or(&[]);
            holds.start -= left.len();
            position -= left.len() as u64;
            memory[holds.start..][..left.len()].copy_from_slice(left);
            self.lent.push(last.memory);
        }
        self.window = Some(Window {
            memory: Arc::new(memory),
            holds,
            position,
        });
        Ok(())
    }

    /// Reads a batch by itself, and goes on behind it.
    fn large(&mut self, header: BatchHeader) -> Result<Option<Found>, Error> {
        let mut ring = RingReader::new(self.array);
        let is_whole = ring.is_whole(self.next.position, &header)?;
        let mut records = Vec::new();
        if is_whole {
            records.resize(header.len.get() as usize, 0);
            let start = self.next.position + BatchHeader::SIZE as u64;
            ring.read(start, &mut records)?;
        }
        let len = BatchHeader::SIZE as u64 + u64::from(header.len.get());
        self.gap = ring
            .gap(self.next.position, len)
            .map(|error| (self.next, error));
        if !is_whole || self.gap.is_some() {
            return Ok(None);
        }
        let found = self.found(header, records.into());
        self.next = found.after;
        if let Some(window) = self.window.take() {
            self.lent.push(window.memory);
        }
        if let Some(fetch) = self.fetched.take() {
            self.free.push(fetch.memory);
        }
        self.position = self.next.position / BLOCK_SIZE as u64 * BLOCK_SIZE as u64;
        Ok(Some(found))
    }

    /// Batches were let go of: memory that was theirs is used again.
    pub fn reclaim(&mut self) {
        for memory in std::mem::take(&mut self.lent) {
            match Arc::try_unwrap(memory) {
                Ok(memory) => self.free.push(memory),
                Err(memory) => self.lent.push(memory),
            }
        }
    }
}

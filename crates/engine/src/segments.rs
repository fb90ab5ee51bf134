//! Segments: where checkpoints put items, written sequentially and never in place.
//!
//! Invariants:
//! 1. A segment's live count is the padded bytes of items in it that the newest capture of the
//!    table or the space tables points at.
//! 2. A segment is free, and may be written, only if nothing that the last durable checkpoint
//!    record reaches lies in it: free segments are found anew after each commit point.
//! 3. A worker goes on in its open segment from checkpoint to checkpoint, at the next whole
//!    block, so blocks that a durable record reaches are not written again.
//! 4. Meta chunks come from durably free chunks, and go back after the commit point of the
//!    checkpoint that no longer lists them (R4).

use crate::error::Error;
use crate::space::Space;
use crate::table::{PageSink, Written};
use crate::written::{BytesWritten, Counters};
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::sync::{Mutex, rank};
use device::{AlignedBuf, Array, Durability};
use format::geometry::Geometry;
use format::item::{self, ItemKind, Place};
use format::{BLOCK_SIZE, Block, Damage};
use std::collections::BTreeMap;

/// A segment by number: chunk × segments per chunk + index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SegmentId(pub u64);

#[derive(Clone, Copy, Debug)]
struct Open {
    segment: SegmentId,
    /// Bytes used, a multiple of the block size.
    used: usize,
}

#[derive(Debug)]
struct State {
    /// Live bytes of each segment, by meta chunk.
    live: BTreeMap<u32, Vec<u32>>,
    free: Vec<SegmentId>,
    open: Vec<Option<Open>>,
}

#[derive(Debug)]
pub(crate) struct Segments {
    geometry: Geometry,
    state: Mutex<State>,
    /// Bytes of all segments, and live bytes in them.
    total_bytes: AtomicU64,
    live_bytes: AtomicU64,
    /// How many segments are free, for operations, which look before they begin.
    free: AtomicUsize,
    /// What packers wrote.
    pub written: Counters,
}

impl Segments {
    /// `live` holds the live bytes of every segment of every meta chunk.
    pub fn new(geometry: &Geometry, live: BTreeMap<u32, Vec<u32>>) -> Self {
        let state = State {
            live,
            free: Vec::new(),
            open: Vec::new(),
        };
        let live_bytes = state.live.values().flatten().map(|l| *l as u64).sum();
        let total_bytes = (state.live.len() * geometry.chunk_blocks as usize * BLOCK_SIZE) as u64;
        let segments = Segments {
            geometry: geometry.clone(),
            state: Mutex::new(rank::SEGMENTS, state),
            total_bytes: AtomicU64::new(total_bytes),
            live_bytes: AtomicU64::new(live_bytes),
            free: AtomicUsize::new(0),
            written: Counters::default(),
        };
        segments.find_free();
        segments
    }

    fn per_chunk(&self) -> u64 {
        self.geometry.segments_per_chunk() as u64
    }

    pub fn first_block(&self, segment: SegmentId) -> Block {
        let chunk = self
            .geometry
            .chunk_block((segment.0 / self.per_chunk()) as u32);
        Block(chunk.0 + segment.0 % self.per_chunk() * self.geometry.segment_blocks as u64)
    }

    pub fn segment_of(&self, byte: u64) -> Option<SegmentId> {
        let (chunk, index) = self.geometry.chunk_of(Block(byte / BLOCK_SIZE as u64))?;
        let within = index / self.geometry.segment_blocks;
        Some(SegmentId(chunk as u64 * self.per_chunk() + within as u64))
    }

    pub fn free_segments(&self) -> usize {
        self.free.load(Ordering::Relaxed)
    }

    /// After every change of the list of free segments.
    fn count_free(&self, state: &State) {
        self.free.store(state.free.len(), Ordering::Relaxed);
    }

    /// Meta chunks with the live bytes of their segments, as the space tables store them.
    pub fn live(&self) -> BTreeMap<u32, Vec<u32>> {
        self.state.lock().live.clone()
    }

    /// These segments are not written before the next commit point.
    pub fn keep_out(&self, occupied: &std::collections::BTreeSet<SegmentId>) {
        let mut state = self.state.lock();
        state.free.retain(|s| !occupied.contains(s));
        self.count_free(&state);
    }

    pub fn meta_chunks(&self) -> usize {
        self.state.lock().live.len()
    }

    /// Finds free segments anew; right after a commit point only (invariant 2).
    pub fn find_free(&self) {
        let mut state = self.state.lock();
        let open: Vec<SegmentId> = state.open.iter().flatten().map(|o| o.segment).collect();
        let mut free = Vec::new();
        for (chunk, live) in &state.live {
            for (i, _) in live.iter().enumerate().filter(|(_, l)| **l == 0) {
                let id = SegmentId(*chunk as u64 * self.per_chunk() + i as u64);
                if !open.contains(&id) {
                    free.push(id);
                }
            }
        }
        // Taken from the end: low segments first.
        free.reverse();
        state.free = free;
        self.count_free(&state);
    }

    /// Segments of at most `share` percent live bytes, emptiest first, at most `most`.
    pub fn emptiest(&self, share: u32, most: usize) -> Vec<(SegmentId, u32)> {
        let state = self.state.lock();
        let limit = (self.geometry.segment_bytes() as u64 * share as u64 / 100) as u32;
        let open: Vec<SegmentId> = state.open.iter().flatten().map(|o| o.segment).collect();
        let mut found = Vec::new();
        for (chunk, live) in &state.live {
            for (i, &bytes) in live.iter().enumerate() {
                let id = SegmentId(*chunk as u64 * self.per_chunk() + i as u64);
                if bytes > 0 && bytes <= limit && !open.contains(&id) {
                    found.push((id, bytes));
                }
            }
        }
        found.sort_unstable_by_key(|(_, bytes)| *bytes);
        found.truncate(most);
        found
    }

    /// Total bytes of all segments and live bytes in them.
    pub fn usage(&self) -> (u64, u64) {
        let total = self.total_bytes.load(Ordering::Relaxed);
        (total, self.live_bytes.load(Ordering::Relaxed))
    }

    fn chunk_bytes(&self) -> u64 {
        self.geometry.chunk_blocks as u64 * BLOCK_SIZE as u64
    }

    /// Meta chunks without any live byte beyond `keep` free segments leave the list; they
    /// are free after the next commit point.
    pub fn release_chunks(&self, keep: usize) -> Vec<u32> {
        let mut state = self.state.lock();
        let per_chunk = self.per_chunk();
        let mut released = Vec::new();
        let open: Vec<u64> = state
            .open
            .iter()
            .flatten()
            .map(|o| o.segment.0 / per_chunk)
            .collect();
        let empty: Vec<u32> = state
            .live
            .iter()
            .filter(|(c, live)| !open.contains(&(**c as u64)) && live.iter().all(|l| *l == 0))
            .map(|(c, _)| *c)
            .collect();
        for chunk in empty {
            if state.free.len() < keep + per_chunk as usize {
                break;
            }
            state.free.retain(|s| s.0 / per_chunk != chunk as u64);
            state.live.remove(&chunk);
            self.total_bytes
                .fetch_sub(self.chunk_bytes(), Ordering::Relaxed);
            released.push(chunk);
        }
        self.count_free(&state);
        released
    }

    fn take_open(&self, worker: usize) -> Option<Open> {
        let mut state = self.state.lock();
        if state.open.len() <= worker {
            state.open.resize(worker + 1, None);
        }
        state.open[worker].take()
    }

    fn put_open(&self, worker: usize, open: Option<Open>) {
        self.state.lock().open[worker] = open;
    }

    /// A free segment, from a new meta chunk when none is left.
    fn take_free(&self, space: &Space) -> Result<SegmentId, Error> {
        let mut state = self.state.lock();
        if let Some(segment) = state.free.pop() {
            self.count_free(&state);
            return Ok(segment);
        }
        drop(state);
        let chunks = space.take_free_chunks(1);
        let mut state = self.state.lock();
        for chunk in chunks {
            let per_chunk = self.per_chunk();
            self.total_bytes
                .fetch_add(self.chunk_bytes(), Ordering::Relaxed);
            state.live.insert(chunk, vec![0; per_chunk as usize]);
            let first = chunk as u64 * per_chunk;
            state
                .free
                .extend((first..first + per_chunk).rev().map(SegmentId));
        }
        let segment = state.free.pop();
        self.count_free(&state);
        segment.ok_or(Error::NoSpace)
    }

    /// Accounts for an item that is pointed at (or no longer).
    fn account(&self, place: Place, live: bool) -> Result<(), Error> {
        if place.is_none() {
            return Ok(());
        }
        let damage = |what: String| Error::Damaged(Damage::new("segment table", what));
        let segment = self.segment_of(place.byte);
        let mut state = self.state.lock();
        let per_chunk = self.per_chunk();
        let count = segment
            .and_then(|s| {
                let chunk = state.live.get_mut(&((s.0 / per_chunk) as u32))?;
                chunk.get_mut((s.0 % per_chunk) as usize)
            })
            .ok_or_else(|| damage(format!("{place:?} lies in no segment")))?;
        let changed = match live {
            true => count.checked_add(place.len),
            false => count.checked_sub(place.len),
        };
        *count = changed.ok_or_else(|| damage(format!("live bytes of {place:?} do not add up")))?;
        match live {
            true => self
                .live_bytes
                .fetch_add(place.len as u64, Ordering::Relaxed),
            false => self
                .live_bytes
                .fetch_sub(place.len as u64, Ordering::Relaxed),
        };
        Ok(())
    }
}

/// Packs items into segments for one worker of a checkpoint.
pub(crate) struct Packer<'a> {
    segments: &'a Segments,
    space: &'a Space,
    array: &'a Array,
    worker: usize,
    open: Option<Open>,
    /// Items not written yet; they start at `open.used`.
    buf: Vec<u8>,
    sequence: u64,
    pub bytes: u64,
    written: BytesWritten,
    /// First error of `discard`, which has no way to return it.
    pub damage: Option<Error>,
}

impl<'a> Packer<'a> {
    pub fn new(
        segments: &'a Segments,
        space: &'a Space,
        array: &'a Array,
        worker: usize,
        sequence: u64,
    ) -> Self {
        let open = segments.take_open(worker);
        let (buf, bytes, damage) = (Vec::new(), 0, None);
        Packer {
            segments,
            space,
            array,
            worker,
            open,
            buf,
            sequence,
            bytes,
            written: BytesWritten::default(),
            damage,
        }
    }

    /// Appends one item that `encode` writes; returns its place.
    pub fn append(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<Place, Error> {
        let before = self.buf.len();
        encode(&mut self.buf);
        let len = self.buf.len() - before;
        let fits = self
            .open
            .is_some_and(|o| o.used + self.buf.len() <= self.segments.geometry.segment_bytes());
        if !fits {
            let item = self.buf.split_off(before);
            self.flush()?;
            self.open = Some(Open {
                segment: self.segments.take_free(self.space)?,
                used: 0,
            });
            self.buf = item;
        }
        let open = self.open.as_ref().expect("opened above");
        let offset = open.used + self.buf.len() - len;
        let byte = self.segments.first_block(open.segment).byte() + offset as u64;
        let place = Place {
            byte,
            len: len as u32,
        };
        self.segments.account(place, true)?;
        self.bytes += len as u64;
        self.written.add_item(&self.buf[self.buf.len() - len..]);
        Ok(place)
    }

    /// Whole blocks for `len` bytes of space tables, which the caller writes itself.
    pub fn allocate(&mut self, len: usize) -> Result<Place, Error> {
        self.flush()?;
        let blocks = len.next_multiple_of(BLOCK_SIZE);
        let room = self.segments.geometry.segment_bytes();
        if self.open.is_none_or(|o| o.used + blocks > room) {
            self.open = Some(Open {
                segment: self.segments.take_free(self.space)?,
                used: 0,
            });
        }
        let open = self.open.as_mut().expect("opened above");
        let byte = self.segments.first_block(open.segment).byte() + open.used as u64;
        open.used += blocks;
        let place = Place {
            byte,
            len: len as u32,
        };
        self.segments.account(place, true)?;
        self.bytes += blocks as u64;
        self.written.space += blocks as u64;
        Ok(place)
    }

    /// Writes what is packed, to the next whole block.
    pub fn flush(&mut self) -> Result<(), Error> {
        if self.buf.is_empty() {
            return Ok(());
        }
        let open = self.open.as_mut().expect("items lie in an open segment");
        let padded = self.buf.len().next_multiple_of(BLOCK_SIZE);
        let mut out = AlignedBuf::zeroed(padded);
        out[..self.buf.len()].copy_from_slice(&self.buf);
        let byte = self.segments.first_block(open.segment).byte() + open.used as u64;
        self.array.write(byte, &out, Durability::Volatile)?;
        open.used += padded;
        self.written.padding += (padded - self.buf.len()) as u64;
        self.buf.clear();
        Ok(())
    }

    /// Writes the rest and leaves the segment open for the worker's next checkpoint.
    pub fn finish(mut self) -> Result<u64, Error> {
        self.flush()?;
        self.segments.put_open(self.worker, self.open);
        self.segments.written.add(&self.written);
        match self.damage.take() {
            Some(error) => Err(error),
            None => Ok(self.bytes),
        }
    }
}

impl PageSink for Packer<'_> {
    fn write(&mut self, kind: ItemKind, id: u64, payload: &[u8]) -> Result<Written, Error> {
        let mut crc = 0;
        let sequence = self.sequence;
        let place = self.append(|out| {
            crc = item::encode(out, kind, 0, id, sequence, |o| o.extend_from_slice(payload));
        })?;
        Ok(Written { place, crc })
    }

    fn discard(&mut self, old: Place) {
        if let Err(error) = self.segments.account(old, false)
            && self.damage.is_none()
        {
            self.damage = Some(error);
        }
    }
}

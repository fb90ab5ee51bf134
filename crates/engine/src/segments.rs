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
//! 5. A packer writes what it has now and then, when its caller says that nothing is locked ([`Packer::relieve`]);
//!    beside that only where a segment ends. What it wrote is whole blocks, and goes on in the middle of an item.
//! 6. Workers count what they put down and what that replaces apart ([`Changes`]), and settle it now and then; all of
//!    it is settled before the space tables are written.
//! 7. No segment of a chunk that is being emptied is given out or stays open, as long as others are free: it is empty
//!    once what was live in it has been written elsewhere.
//! 8. There are no more meta chunks than the space tables describe (`Geometry::meta_chunks_max`): who counts on free chunks for segments counts
//!    on no more of them than that leaves ([`Segments::chunks_left`]).

use crate::error::Error;
use crate::space::Space;
use crate::sum::{Padded, Sum};
use crate::table::{PageSink, Written};
use crate::written::{BytesWritten, Counters};
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::map::HashMap;
use base::sync::{Mutex, rank};
use base::thread::lane;
use base::tight;
use device::{AlignedBuf, Array, Durability};
use format::geometry::Geometry;
use format::item::{self, ItemKind, Place};
use format::{BLOCK_SIZE, Block, Damage};
use std::collections::{BTreeMap, BTreeSet};

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
    /// Not worth a look of those who clean, until nothing in them is live.
    aside: BTreeMap<SegmentId, Aside>,
    /// Meta chunks that are being emptied, and segments of theirs that are free but not given out (invariant 7).
    leaving: BTreeSet<u32>,
    withheld: Vec<SegmentId>,
}

/// Why a segment is not cleaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aside {
    /// There is damage in it.
    Damaged,
    /// A device did not return something, and may do so later.
    Unread,
}

impl State {
    /// None of these chunks is emptied any more.
    fn stay(&mut self, per_chunk: u64, is_one: impl Fn(&[u32]) -> bool) {
        let live = &self.live;
        let leaving = &mut self.leaving;
        leaving.retain(|chunk| !is_one(&live[chunk]));
        let stays = |id: &mut SegmentId| !leaving.contains(&((id.0 / per_chunk) as u32));
        self.free.extend(self.withheld.extract_if(.., stays));
    }
}

/// What operations look at before they begin: on lines of its own.
#[derive(Debug)]
struct Counts {
    /// Bytes of all segments.
    total_bytes: AtomicU64,
    /// How many segments are free.
    free: AtomicUsize,
    /// Bytes that are dead in segments that are not cleaned.
    held_up: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Segments {
    geometry: Geometry,
    state: Padded<Mutex<State>>,
    /// Held by the one worker that takes another chunk.
    growth: Mutex<()>,
    counts: Padded<Counts>,
    live_bytes: Sum,
    /// What packers wrote.
    pub written: Counters,
}

/// Changes of live bytes that are in no count yet (invariant 6).
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Added and removed, by segment; `None`: in no segment.
    segments: HashMap<Option<SegmentId>, (u64, u64)>,
    added: u64,
}

impl Changes {
    fn of(&mut self, segments: &Segments, place: Place) -> &mut (u64, u64) {
        let segment = segments.segment_of(place.byte);
        self.segments.entry(segment).or_default()
    }

    /// An item is pointed at.
    fn add(&mut self, segments: &Segments, place: Place) {
        self.of(segments, place).0 += place.len as u64;
        self.added += place.len as u64;
    }

    /// An item is no longer pointed at, if there was one.
    pub fn remove(&mut self, segments: &Segments, place: Place) {
        if !place.is_none() {
            self.of(segments, place).1 += place.len as u64;
        }
    }
}

impl Segments {
    /// `live` holds the live bytes of every segment of every meta chunk. Operations may find the sum of these
    /// wrong by `slack`.
    pub fn new(geometry: &Geometry, live: BTreeMap<u32, Vec<u32>>, slack: i64) -> Self {
        let state = State {
            live,
            free: Vec::new(),
            open: Vec::new(),
            aside: BTreeMap::new(),
            leaving: BTreeSet::new(),
            withheld: Vec::new(),
        };
        let live_bytes: u64 = state.live.values().flatten().map(|l| *l as u64).sum();
        let total_bytes = state.live.len() as u64 * geometry.chunk_bytes();
        let segments = Segments {
            geometry: geometry.clone(),
            state: Padded(Mutex::new(rank::SEGMENTS, state)),
            growth: Mutex::new(rank::SEGMENT_GROWTH, ()),
            counts: Padded(Counts {
                total_bytes: AtomicU64::new(total_bytes),
                free: AtomicUsize::new(0),
                held_up: AtomicU64::new(0),
            }),
            live_bytes: Sum::new(1, slack),
            written: Counters::default(),
        };
        segments.live_bytes.add(lane(), live_bytes as i64);
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
        self.counts.free.load(Ordering::Relaxed)
    }

    /// After every change of the list of free segments.
    fn count_free(&self, state: &State) {
        self.counts.free.store(state.free.len(), Ordering::Relaxed);
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

    /// No segment is free but for those of free chunks.
    #[cfg(test)]
    pub fn use_up(&self) {
        let mut state = self.state.lock();
        state.free.clear();
        self.count_free(&state);
    }

    pub fn meta_chunks(&self) -> usize {
        self.state.lock().live.len()
    }

    /// Chunks that may become meta chunks (invariant 8).
    pub fn chunks_left(&self) -> u64 {
        let chunks = self.total_bytes() / self.geometry.chunk_bytes();
        self.geometry.meta_chunks_max().saturating_sub(chunks)
    }

    /// Finds free segments anew; right after a commit point only (invariant 2).
    pub fn find_free(&self) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let open: Vec<SegmentId> = state.open.iter().flatten().map(|o| o.segment).collect();
        let (mut free, mut withheld) = (Vec::new(), Vec::new());
        for (chunk, live) in &state.live {
            let list = match state.leaving.contains(chunk) {
                true => &mut withheld,
                false => &mut free,
            };
            for (i, _) in live.iter().enumerate().filter(|(_, l)| **l == 0) {
                let id = SegmentId(*chunk as u64 * self.per_chunk() + i as u64);
                if !open.contains(&id) {
                    list.push(id);
                }
            }
        }
        // Taken from the end: low segments first.
        free.reverse();
        state
            .aside
            .retain(|id, _| free.binary_search_by(|one| id.cmp(one)).is_err());
        state.free = free;
        state.withheld = withheld;
        self.count_free(state);
        self.count_held_up(state);
    }

    /// Who cleans need not look at this segment again. Its chunk stays.
    pub fn set_aside(&self, segment: SegmentId, why: Aside) {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.aside.insert(segment, why);
        self.count_held_up(state);
        let (chunk, per_chunk) = ((segment.0 / self.per_chunk()) as u32, self.per_chunk());
        if state.leaving.remove(&chunk) {
            state.stay(per_chunk, |_| false);
            self.count_free(state);
        }
    }

    /// Those that a device did not return may be looked at again.
    pub fn look_again(&self) {
        let mut state = self.state.lock();
        state.aside.retain(|_, why| *why != Aside::Unread);
        self.count_held_up(&state);
    }

    fn count_held_up(&self, state: &State) {
        let per_chunk = self.per_chunk();
        let live = |id: &SegmentId| {
            let counts = state.live.get(&((id.0 / per_chunk) as u32))?;
            counts.get((id.0 % per_chunk) as usize).copied()
        };
        let segment = self.geometry.segment_bytes() as u64;
        let dead = state.aside.keys().filter_map(live);
        let dead = dead.map(|live| segment.saturating_sub(u64::from(live)));
        self.counts.held_up.store(dead.sum(), Ordering::Relaxed);
    }

    /// Bytes that are dead and cannot be had, because what is live beside them cannot be read.
    pub fn held_up(&self) -> u64 {
        self.counts.held_up.load(Ordering::Relaxed)
    }

    /// Begins to empty the meta chunk in which least is live, at most `share` percent of it, none with a segment that was
    /// set aside. Once all that is live in chunks being emptied has moved, `keep` segments are free in the others,
    /// and `spare` bytes of theirs are dead or free. False: there is none.
    pub fn empty_one(&self, share: u32, keep: usize, spare: u64) -> bool {
        let mut state = self.state.lock();
        let state = &mut *state;
        let per_chunk = self.per_chunk();
        let chunk_of = |id: &SegmentId| (id.0 / per_chunk) as u32;
        let bytes_of = |live: &[u32]| live.iter().map(|bytes| *bytes as u64).sum::<u64>();
        let least = state
            .live
            .iter()
            .filter(|(chunk, _)| !state.leaving.contains(chunk))
            .filter(|(chunk, _)| !state.aside.keys().any(|id| chunk_of(id) == **chunk))
            .map(|(chunk, live)| (bytes_of(live), *chunk))
            .min();
        let Some((bytes, chunk)) = least else {
            return false;
        };
        let (total, live) = self.usage();
        let gone = (state.leaving.len() as u64 + 1) * self.geometry.chunk_bytes();
        let moving = state
            .leaving
            .iter()
            .map(|chunk| bytes_of(&state.live[chunk]));
        let moving = (bytes + moving.sum::<u64>()).div_ceil(self.geometry.segment_bytes() as u64);
        let is_its = |id: &SegmentId| chunk_of(id) == chunk;
        let free = state.free.iter().filter(|id| !is_its(id)).count();
        if bytes * 100 > self.geometry.chunk_bytes() * share as u64
            || free < keep + moving as usize
            || total < gone + live + spare
        {
            return false;
        }
        state.leaving.insert(chunk);
        let its = state.free.extract_if(.., |id| is_its(id));
        state.withheld.extend(its);
        for open in &mut state.open {
            open.take_if(|open| chunk_of(&open.segment) == chunk);
        }
        self.count_free(state);
        true
    }

    /// No chunk is being emptied any more, but for those that are empty: there is need of what is free in them.
    pub fn stay(&self) {
        let mut state = self.state.lock();
        state.stay(self.per_chunk(), |live| live.iter().any(|bytes| *bytes > 0));
        self.count_free(&state);
    }

    /// Segments in which something is live of chunks that are being emptied, with their live bytes.
    pub fn leaving(&self) -> Vec<(SegmentId, u32)> {
        let state = self.state.lock();
        let chunks = state.leaving.iter();
        let segments = chunks.flat_map(|chunk| {
            let ids = (*chunk as u64 * self.per_chunk()..).map(SegmentId);
            ids.zip(state.live[chunk].iter().copied())
        });
        segments.filter(|(_, live)| *live > 0).collect()
    }

    /// Segments of at most `share` percent live bytes, emptiest first, at most `most`; none that were set aside.
    pub fn emptiest(&self, share: u32, most: usize) -> Vec<(SegmentId, u32)> {
        let state = self.state.lock();
        let limit = (self.geometry.segment_bytes() as u64 * share as u64 / 100) as u32;
        let open: Vec<SegmentId> = state.open.iter().flatten().map(|o| o.segment).collect();
        let mut found = Vec::new();
        for (chunk, live) in &state.live {
            for (i, &bytes) in live.iter().enumerate() {
                let id = SegmentId(*chunk as u64 * self.per_chunk() + i as u64);
                let may = !open.contains(&id) && !state.aside.contains_key(&id);
                if bytes > 0 && bytes <= limit && may {
                    found.push((id, bytes));
                }
            }
        }
        found.sort_unstable_by_key(|(_, bytes)| *bytes);
        found.truncate(most);
        found
    }

    pub fn total_bytes(&self) -> u64 {
        self.counts.total_bytes.load(Ordering::Relaxed)
    }

    /// Total bytes of all segments and live bytes in them.
    pub fn usage(&self) -> (u64, u64) {
        let total = self.total_bytes();
        (total, self.live_bytes.exact().max(0) as u64)
    }

    /// Live bytes in all segments, roughly; for operations.
    pub fn live_about(&self) -> u64 {
        self.live_bytes.about().max(0) as u64
    }

    /// Meta chunks without any live byte beyond `keep` free segments, and those that were emptied, leave the list; they
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
            let emptied = state.leaving.remove(&chunk);
            if !emptied && state.free.len() < keep + per_chunk as usize {
                continue;
            }
            let others = |s: &SegmentId| s.0 / per_chunk != chunk as u64;
            state.free.retain(others);
            state.withheld.retain(others);
            state.live.remove(&chunk);
            self.counts
                .total_bytes
                .fetch_sub(self.geometry.chunk_bytes(), Ordering::Relaxed);
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

    /// Such workers go on in other segments.
    pub fn close(&self, is_such: impl Fn(usize) -> bool) {
        let mut state = self.state.lock();
        let such = state.open.iter_mut().enumerate();
        such.filter(|(worker, _)| is_such(*worker))
            .for_each(|(_, open)| *open = None);
    }

    fn put_open(&self, worker: usize, open: Option<Open>) {
        self.state.lock().open[worker] = open;
    }

    /// A free segment of the chunks that there are.
    fn pop_free(&self) -> Option<SegmentId> {
        let mut state = self.state.lock();
        if state.free.is_empty() {
            state.stay(self.per_chunk(), |_| true);
        }
        let segment = state.free.pop()?;
        self.count_free(&state);
        Some(segment)
    }

    /// A free segment, from a new meta chunk when none is left.
    fn take_free(&self, space: &Space) -> Result<SegmentId, Error> {
        if let Some(segment) = self.pop_free() {
            return Ok(segment);
        }
        let _one_takes = self.growth.lock();
        // Of a chunk that somebody else has just taken.
        if let Some(segment) = self.pop_free() {
            return Ok(segment);
        }
        let may = self.chunks_left().min(1) as usize;
        let chunks = space.take_free_chunks(may);
        let mut state = self.state.lock();
        for chunk in chunks {
            let per_chunk = self.per_chunk();
            self.counts
                .total_bytes
                .fetch_add(self.geometry.chunk_bytes(), Ordering::Relaxed);
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

    /// Enters changes into the table.
    pub fn settle(&self, changes: &mut Changes) -> Result<(), Error> {
        let damage = |what: String| Error::Damaged(Damage::new("segment table", what));
        let per_chunk = self.per_chunk();
        let mut sum = 0;
        let mut state = self.state.lock();
        for (segment, (added, removed)) in changes.segments.drain() {
            let count = segment
                .and_then(|s| {
                    let chunk = state.live.get_mut(&((s.0 / per_chunk) as u32))?;
                    chunk.get_mut((s.0 % per_chunk) as usize)
                })
                .ok_or_else(|| damage("an item lies in no segment".to_owned()))?;
            let now = (*count as u64 + added).checked_sub(removed);
            *count = now
                .and_then(|now| u32::try_from(now).ok())
                .ok_or_else(|| damage(format!("live bytes of {segment:?} do not add up")))?;
            sum += added as i64 - removed as i64;
        }
        drop(state);
        changes.added = 0;
        if sum != 0 {
            self.live_bytes.add(lane(), sum);
        }
        Ok(())
    }
}

/// Bytes that a packer writes at a time: few enough for the processor's caches, and for an allocator that
/// hands out memory which was in use before; fresh memory for whole segments takes longer than encoding what they hold.
fn write_bytes() -> usize {
    tight::limit(64 << 10, BLOCK_SIZE)
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
    /// What `buf` is written from.
    out: AlignedBuf,
    sequence: u64,
    pub bytes: u64,
    written: BytesWritten,
    pub changes: Changes,
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
        let (buf, bytes, changes) = (Vec::new(), 0, Changes::default());
        Packer {
            segments,
            space,
            array,
            worker,
            open,
            buf,
            out: AlignedBuf::zeroed(0),
            sequence,
            bytes,
            written: BytesWritten::default(),
            changes,
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
            self.write_out(before)?;
            self.open = Some(Open {
                segment: self.segments.take_free(self.space)?,
                used: 0,
            });
        }
        let open = self.open.as_ref().expect("opened above");
        let offset = open.used + self.buf.len() - len;
        let byte = self.segments.first_block(open.segment).byte() + offset as u64;
        let place = Place {
            byte,
            len: len as u32,
        };
        self.changes.add(self.segments, place);
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
        self.changes.add(self.segments, place);
        self.bytes += blocks as u64;
        self.written.space += blocks as u64;
        Ok(place)
    }

    /// Writes what is packed, to the next whole block.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.write_out(self.buf.len())
    }

    /// Writes the first `len` bytes of what is packed.
    fn write_out(&mut self, len: usize) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        let open = self.open.as_mut().expect("items lie in an open segment");
        let padded = len.next_multiple_of(BLOCK_SIZE);
        if self.out.len() < padded {
            self.out = AlignedBuf::zeroed(padded);
        }
        let (items, rest) = self.out[..padded].split_at_mut(len);
        items.copy_from_slice(&self.buf[..len]);
        rest.fill(0);
        let byte = self.segments.first_block(open.segment).byte() + open.used as u64;
        self.array
            .write(byte, &self.out[..padded], Durability::Volatile)?;
        open.used += padded;
        self.written.padding += (padded - len) as u64;
        self.buf.drain(..len);
        Ok(())
    }

    /// Writes whole blocks of what is packed, if that is much. Nobody should wait for a lock of the caller's
    /// (invariant 5).
    pub fn relieve(&mut self) -> Result<(), Error> {
        while self.buf.len() >= write_bytes() {
            self.write_out(write_bytes())?;
        }
        Ok(())
    }

    /// Bytes of items appended that are not settled.
    pub fn unsettled(&self) -> u64 {
        self.changes.added
    }

    /// Bytes of leaf pages of the node table appended.
    pub fn leaf_bytes(&self) -> u64 {
        self.written.table_leaves
    }

    pub fn settle(&mut self) -> Result<(), Error> {
        self.segments.settle(&mut self.changes)
    }

    /// Writes the rest and leaves the segment open for the worker's next checkpoint.
    pub fn finish(mut self) -> Result<u64, Error> {
        self.flush()?;
        self.settle()?;
        self.segments.put_open(self.worker, self.open);
        self.segments.written.add(&self.written);
        Ok(self.bytes)
    }
}

impl PageSink for Packer<'_> {
    fn write(&mut self, kind: ItemKind, id: u64, payload: &[u8]) -> Result<Written, Error> {
        let mut crc = 0;
        let (seed, sequence) = (self.array.checksum_seed(), self.sequence);
        let place = self.append(|out| {
            crc = item::encode(seed, out, kind, 0, id, sequence, |o| {
                o.extend_from_slice(payload)
            });
        })?;
        self.relieve()?;
        Ok(Written { place, crc })
    }

    fn discard(&mut self, old: Place) {
        self.changes.remove(self.segments, old);
    }
}

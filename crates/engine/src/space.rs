//! Free space: chunks, their leases, and delayed allocation.
//!
//! A chunk is free, data (it has a space map node) or meta (it holds segments). Cores lease data
//! chunks, so that an allocation takes no lock that another core wants.
//!
//! Invariants:
//! 1. A block is available (bit set in its `ChunkSpace`) only if it is free in its space map, is
//!    reserved by nobody, and its freeing, if any, is durable.
//! 2. The totals count the available blocks of all data chunks, loaded or not, and the chunks
//!    that are durably free and not taken by a running checkpoint; for promises one that is being
//!    converted is free until it is data.
//! 3. Promises never exceed those beyond the reserve that checkpoints and deletions live on; see
//!    `totals.rs`.
//! 4. Lock order: a lease, then the chunk list, then one chunk's bits.
//! 5. Only a chunk whose state is data is loaded or waits to be, and only its blocks are given back. One that
//!    is being retired, or whose map became unreadable while blocks of it were in others' hands, is not: its
//!    map, read before that, would show blocks as free that are not.
//! 6. A device that does not return a map, or a page of the node table, may return it later: nothing is lost by that,
//!    neither a chunk nor a block in the totals. Only damage takes free space away until the next mount.

mod tried;

pub(crate) use tried::{TRIES_MAX, Tried};

use crate::error::Error;
use crate::totals::Totals;
use base::atomic::{AtomicI64, Ordering};
use base::sync::{Arc, Condvar, Mutex, rank};
use format::Block;
use format::geometry::Geometry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A run of logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    pub block: Block,
    pub len: u32,
}

impl Extent {
    /// The block behind it.
    pub(crate) fn end(self) -> Block {
        Block(self.block.0 + self.len as u64)
    }
}

/// What the space summary of a checkpoint says of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkState {
    Free,
    Meta,
    /// Data, with this many blocks free.
    Data(u32),
}

impl ChunkState {
    pub(crate) fn pack(self) -> u32 {
        match self {
            ChunkState::Free => 0,
            ChunkState::Meta => 1 << 30,
            ChunkState::Data(free) => 2 << 30 | free,
        }
    }

    pub(crate) fn unpack(raw: u32) -> Option<ChunkState> {
        match (raw >> 30, raw & !(3 << 30)) {
            (0, 0) => Some(ChunkState::Free),
            (1, 0) => Some(ChunkState::Meta),
            (2, free) => Some(ChunkState::Data(free)),
            _ => None,
        }
    }
}

/// The available blocks of one data chunk (invariant 1).
#[derive(Debug)]
pub(crate) struct ChunkSpace {
    pub chunk: u32,
    bits: Mutex<ChunkBits>,
}

#[derive(Debug)]
struct ChunkBits {
    /// Empty while no block is available: of a full array that is all of them, 32 MiB for each TiB.
    available: Vec<u64>,
    count: u32,
    cursor: u32,
    blocks: u32,
    /// Somebody has taken blocks since the map was read, and may have them without the map's knowing.
    taken_from: bool,
}

impl ChunkBits {
    fn run_at(&self, start: u32, want: u32) -> u32 {
        if self.count == 0 {
            return 0;
        }
        let end = start.saturating_add(want).min(self.blocks);
        let is_free = |b: u32| self.available[b as usize / 64] >> (b % 64) & 1 == 1;
        (start..end).take_while(|&b| is_free(b)).count() as u32
    }

    /// First available block at or after `from`.
    fn next_available(&self, from: u32) -> Option<u32> {
        let mut word = from as usize / 64;
        let mut mask = u64::MAX << (from % 64);
        while word < self.available.len() {
            let bits = self.available[word] & mask;
            if bits != 0 {
                let block = word as u32 * 64 + bits.trailing_zeros();
                return (block < self.blocks).then_some(block);
            }
            mask = u64::MAX;
            word += 1;
        }
        None
    }

    /// The first run of at least `least` blocks from the cursor on, wrapping once.
    fn find(&self, want: u32, least: u32) -> Option<(u32, u32)> {
        for (mut from, end) in [(self.cursor, self.blocks), (0, self.cursor)] {
            while let Some(start) = self.next_available(from).filter(|&s| s < end) {
                let run = self.run_at(start, want);
                if run >= least {
                    return Some((start, run));
                }
                from = start + run;
            }
        }
        None
    }

    fn set(&mut self, start: u32, len: u32, available: bool) {
        if self.available.is_empty() {
            self.available = vec![0; (self.blocks as usize).div_ceil(64)];
        }
        for b in start..start + len {
            let bit = 1u64 << (b % 64);
            let word = &mut self.available[b as usize / 64];
            assert_ne!(*word & bit != 0, available, "block {b} changes state twice");
            *word ^= bit;
        }
        if available {
            self.count += len;
        } else {
            self.count -= len;
            self.cursor = (start + len) % self.blocks;
        }
        if self.count == 0 {
            self.available = Vec::new();
        }
    }

    /// For whoever enters it in the map later, or not.
    fn take(&mut self, start: u32, len: u32) {
        self.taken_from = true;
        self.set(start, len, false);
    }
}

impl ChunkSpace {
    /// Up to `want` contiguous blocks, best at `goal`.
    fn take(&self, want: u32, goal: Option<u32>) -> Option<(u32, u32)> {
        let mut bits = self.bits.lock();
        if bits.count == 0 {
            return None;
        }
        if let Some(goal) = goal.filter(|&g| g < bits.blocks) {
            let run = bits.run_at(goal, want);
            if run > 0 {
                bits.take(goal, run);
                return Some((goal, run));
            }
        }
        let (start, run) = bits
            .find(want, want)
            .or_else(|| bits.find(want, want.div_ceil(8)))
            .or_else(|| bits.find(want, 1))?;
        bits.take(start, run);
        Some((start, run))
    }

    fn give(&self, start: u32, len: u32) {
        self.bits.lock().set(start, len, true);
    }

    /// Available blocks now.
    pub fn count(&self) -> u32 {
        self.bits.lock().count
    }
}

#[derive(Debug)]
struct Chunks {
    /// How many blocks are free is said as of the mount. Not all that are free here are in `free` (invariant 5).
    state: Vec<ChunkState>,
    free: BTreeSet<u32>,
    loaded: BTreeMap<u32, Arc<ChunkSpace>>,
    /// Those of them that had available blocks when they were last looked at; all that have any are among them.
    roomy: BTreeSet<u32>,
    leased: Vec<u32>,
    /// Data chunks that are not loaded and have free blocks.
    unloaded: BTreeMap<u32, u32>,
    /// The one of these that is tried first, if there are several: those before it were tried last, in vain.
    from: u32,
    /// Chunks that can get no map before the next mount, and what is damaged. Metadata can have them.
    mapless: Vec<(Range<u32>, Error)>,
}

impl Chunks {
    fn is_data(&self, chunk: u32) -> bool {
        matches!(self.state[chunk as usize], ChunkState::Data(_))
    }

    /// A loaded chunk that is such a one; those that turn out to be full are not looked at again before they are given blocks.
    fn find_loaded(&mut self, wanted: impl Fn(&ChunkSpace) -> bool) -> Option<Arc<ChunkSpace>> {
        let (mut found, mut full) = (None, Vec::new());
        for chunk in &self.roomy {
            let space = &self.loaded[chunk];
            match space.count() {
                0 => full.push(*chunk),
                _ if wanted(space) => {
                    found = Some(Arc::clone(space));
                    break;
                }
                _ => {}
            }
        }
        for chunk in full {
            self.roomy.remove(&chunk);
        }
        found
    }

    /// The loaded chunk leaves the allocator.
    fn unload(&mut self, chunk: u32) -> Option<Arc<ChunkSpace>> {
        self.roomy.remove(&chunk);
        self.loaded.remove(&chunk)
    }

    fn why_mapless(&self, chunk: u32) -> Option<&Error> {
        let damaged = self.mapless.iter().find(|(all, _)| all.contains(&chunk));
        damaged.map(|(_, error)| error)
    }

    /// Data chunks that are not loaded, with what is free in them, in the order in which they are tried.
    fn not_loaded(&self) -> impl Iterator<Item = (u32, u32)> {
        let next = self.unloaded.range(self.from..);
        let all = next.chain(self.unloaded.range(..self.from));
        all.map(|(chunk, free)| (*chunk, *free))
    }

    /// A data chunk that is not loaded and has at least so many blocks free.
    fn to_load(&self, least: u32, tried: &Tried) -> Option<u32> {
        let mut all = self.not_loaded();
        let found = all.find(|(chunk, free)| *free >= least && tried.may_load(*chunk));
        found.map(|(chunk, _)| chunk)
    }

    fn to_convert(&self, tried: &Tried) -> Option<u32> {
        let mut all = self.free.iter().copied();
        all.find(|chunk| tried.may_convert(*chunk) && self.why_mapless(*chunk).is_none())
    }
}

/// Where a shard's next blocks come from.
pub(crate) enum Source {
    /// The lease is a loaded chunk now.
    Loaded,
    /// A data chunk whose space map must be read.
    Load(u32),
    /// A free chunk that must get a space map; it is out of the free set until its
    /// [`Conversion`] ends.
    Convert(u32),
    /// There is nothing else, and others convert chunks; see [`Space::await_conversion`].
    Converting,
    None,
}

/// Of a [`Source::Convert`]: the chunk is free again when this is dropped, also by a panic, unless it has a space map.
#[derive(Debug)]
pub(crate) struct Conversion<'a> {
    space: &'a Space,
    chunk: u32,
    has_map: bool,
}

impl<'a> Conversion<'a> {
    pub fn of(space: &'a Space, chunk: u32) -> Conversion<'a> {
        Conversion {
            space,
            chunk,
            has_map: false,
        }
    }

    pub fn succeed(mut self) {
        self.has_map = true;
    }
}

impl Drop for Conversion<'_> {
    fn drop(&mut self) {
        match self.has_map {
            true => self.space.converted(self.chunk),
            false => self.space.unconverted(self.chunk),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Space {
    geometry: Geometry,
    leases: Vec<Mutex<Option<Arc<ChunkSpace>>>>,
    chunks: Mutex<Chunks>,
    /// Of the chunk list: a chunk is converted, or is not.
    conversions: Condvar,
    totals: Totals,
    /// The totals' reserve: what is one always, and what is kept besides. Changed under the checkpoint's lock.
    reserve: AtomicI64,
    kept: AtomicI64,
    /// Free chunks that data leaves alone even when a promise stands for them, unless metadata has room elsewhere.
    least_chunks: i64,
    /// Freed by an epoch that may not be durable yet.
    pending: Mutex<BTreeMap<u64, Vec<Extent>>>,
    pending_blocks: AtomicI64,
    /// Held by the one thread that releases.
    releasing: Mutex<()>,
}

impl Space {
    pub fn new(geometry: &Geometry, shards: usize, states: Vec<ChunkState>, reserve: u32) -> Self {
        let mut chunks = Chunks {
            free: BTreeSet::new(),
            loaded: BTreeMap::new(),
            roomy: BTreeSet::new(),
            leased: Vec::new(),
            unloaded: BTreeMap::new(),
            from: 0,
            mapless: Vec::new(),
            state: states,
        };
        let mut available = 0;
        for (chunk, state) in (0..).zip(&chunks.state) {
            match state {
                ChunkState::Free => {
                    chunks.free.insert(chunk);
                }
                ChunkState::Meta => {}
                ChunkState::Data(free) => {
                    available += *free as i64;
                    chunks.unloaded.insert(chunk, *free);
                }
            }
        }
        let free_chunks = chunks.free.len() as i64;
        Space {
            geometry: geometry.clone(),
            leases: (0..shards)
                .map(|i| Mutex::keyed(rank::SPACE_LEASE, i as u64, None))
                .collect(),
            chunks: Mutex::new(rank::ALLOCATOR, chunks),
            conversions: Condvar::new(),
            totals: Totals::new(
                available,
                free_chunks,
                reserve as i64,
                geometry.chunk_blocks,
            ),
            reserve: AtomicI64::new(reserve as i64),
            kept: AtomicI64::new(0),
            least_chunks: reserve as i64 * 3 / 4,
            pending: Mutex::new(rank::SPACE_PENDING, BTreeMap::new()),
            pending_blocks: AtomicI64::new(0),
            releasing: Mutex::new(rank::SPACE_RELEASE, ()),
        }
    }

    pub fn pending_blocks(&self) -> i64 {
        self.pending_blocks.load(Ordering::Relaxed)
    }

    pub fn free_chunks(&self) -> i64 {
        self.totals.free_chunks()
    }

    /// Free chunks that no promise needs. Less than none: so many that metadata has taken are needed by promises.
    pub fn unpromised_chunks(&self) -> i64 {
        self.free_chunks() - self.totals.promised_chunks()
    }

    /// Free chunks that data leaves alone.
    pub fn reserve_chunks(&self) -> i64 {
        self.reserve.load(Ordering::Relaxed)
    }

    /// Free chunks that data leaves alone besides, but gets when it has need of them.
    pub fn kept_chunks(&self) -> i64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// Data takes no free chunk beyond this many from now on, and those kept.
    pub fn set_reserve(&self, chunks: i64) {
        self.reserve.store(chunks, Ordering::Relaxed);
        self.keep(self.kept_chunks());
    }

    pub fn keep(&self, chunks: i64) {
        self.kept.store(chunks, Ordering::Relaxed);
        self.totals.set_reserve(self.reserve_chunks() + chunks);
    }

    /// Blocks that new promises could have if no chunks were kept.
    pub fn unpromised(&self) -> i64 {
        self.totals.promisable_beyond(self.reserve_chunks())
    }

    /// Free blocks as statfs shows them: pending ones count, and chunks that are `retired` and not free yet; the reserve does not.
    pub fn free_blocks(&self, retired: i64) -> u64 {
        let unpromised = self
            .totals
            .promisable_beyond(self.reserve_chunks() - retired);
        (unpromised + self.pending_blocks()).max(0) as u64
    }

    pub fn promised_blocks(&self) -> i64 {
        self.totals.promised()
    }

    pub fn try_promise(&self, blocks: u64) -> bool {
        self.totals.try_promise(blocks)
    }

    pub fn unpromise(&self, blocks: u64) {
        self.totals.unpromise(blocks);
    }

    /// See [`Totals::promise_again`].
    pub fn promise_again(&self, blocks: u64) {
        self.totals.promise_again(blocks);
    }

    /// Takes up to `want` contiguous blocks that a promise covers from the shard's lease or, when
    /// `goal` lies in a loaded chunk, from there.
    pub fn take(
        &self,
        shard: usize,
        want: u32,
        goal: Option<Block>,
        tried: &Tried,
    ) -> Option<Extent> {
        let goal = goal.and_then(|g| self.geometry.chunk_of(g));
        if let Some((chunk, index)) = goal.filter(|(chunk, _)| tried.may_change(*chunk)) {
            let near = self.chunks.lock().loaded.get(&chunk).cloned();
            let taken = near.and_then(|c| {
                let run = c.take_at(index, want)?;
                Some(self.taken(&c, index, run))
            });
            if taken.is_some() {
                return taken;
            }
        }
        let lease = self.leases[shard % self.leases.len()].lock();
        let chunk = lease.as_ref().filter(|c| tried.may_change(c.chunk))?;
        let (start, len) = chunk.take(want, None)?;
        Some(self.taken(chunk, start, len))
    }

    fn taken(&self, chunk: &ChunkSpace, start: u32, len: u32) -> Extent {
        self.totals.take(len);
        self.extent(chunk.chunk, start, len)
    }

    fn extent(&self, chunk: u32, start: u32, len: u32) -> Extent {
        Extent {
            block: Block(self.geometry.chunk_block(chunk).0 + start as u64),
            len,
        }
    }

    /// Chooses the shard's next chunk after `take` found nothing in the lease.
    pub fn next_source(&self, shard: usize, tried: &Tried) -> Source {
        let mut lease = self.leases[shard % self.leases.len()].lock();
        let mut chunks = self.chunks.lock();
        if let Some(old) = lease.take() {
            chunks.leased.retain(|&c| c != old.chunk);
        }
        let quarter = self.geometry.chunk_blocks / 4;
        let has = |c: &ChunkSpace, least| c.count() >= least && tried.may_change(c.chunk);
        for least in [quarter, 1] {
            let leased = std::mem::take(&mut chunks.leased);
            let loaded = chunks.find_loaded(|c| has(c, least) && !leased.contains(&c.chunk));
            chunks.leased = leased;
            if let Some(chunk) = loaded {
                chunks.leased.push(chunk.chunk);
                *lease = Some(chunk);
                return Source::Loaded;
            }
            if let Some(chunk) = chunks.to_load(least, tried) {
                return Source::Load(chunk);
            }
            let convertible = || chunks.to_convert(tried);
            let may = tried.may_take_last() || self.has_spare();
            if let Some(chunk) = may.then(convertible).flatten() {
                chunks.free.remove(&chunk);
                self.totals.begin_conversion();
                return Source::Convert(chunk);
            }
        }
        // Other shards' leases hold the last blocks: share one of them.
        match chunks.find_loaded(|c| has(c, 1)) {
            Some(chunk) => {
                *lease = Some(chunk);
                Source::Loaded
            }
            None if self.totals.converting() > 0 => Source::Converting,
            None => Source::None,
        }
    }

    /// Who asks has a promise, and metadata may have taken a chunk, or the reserve
    /// may have grown, since it was made. What is kept for checkpoints is given up before it is taken.
    fn has_spare(&self) -> bool {
        self.totals.free_chunks() > self.least_chunks + self.kept_chunks()
    }

    /// A free chunk became a data chunk with an empty map.
    pub fn converted(&self, chunk: u32) {
        let blocks = self.geometry.chunk_blocks;
        let mut chunks = self.chunks.lock();
        chunks.state[chunk as usize] = ChunkState::Data(blocks);
        let words = (blocks as usize).div_ceil(64);
        let mut available = vec![u64::MAX; words];
        trim(&mut available, blocks);
        self.insert(&mut chunks, chunk, available, blocks);
        self.totals.take_chunks(1);
        self.totals.end_conversion();
        self.totals.give(blocks as i64);
        self.conversions.notify_all();
    }

    /// Undoes [`Source::Convert`].
    pub fn unconverted(&self, chunk: u32) {
        let mut chunks = self.chunks.lock();
        chunks.free.insert(chunk);
        self.totals.end_conversion();
        self.conversions.notify_all();
    }

    /// Returns when a conversion has ended, if one goes on. Who converts needs nothing of who waits here that it would not need
    /// of itself: both hold no node lock. It ends with a thread that panics, too ([`Conversion`]).
    pub fn await_conversion(&self) {
        let mut chunks = self.chunks.lock();
        // None begins or ends without the chunk list.
        if self.totals.converting() > 0 {
            self.conversions.wait(&mut chunks);
        }
    }

    /// Damage keeps these from getting a map before the next mount.
    pub fn mapless(&self, these: Range<u32>, why: Error) {
        self.chunks.lock().mapless.push((these, why));
    }

    /// Why a chunk that is free for data, if there is such a one, can get no map before the next mount.
    pub fn why_mapless(&self) -> Option<Error> {
        let chunks = self.chunks.lock();
        let mut all = chunks.free.iter().filter(|_| self.has_spare());
        all.find_map(|chunk| chunks.why_mapless(*chunk)).cloned()
    }

    /// The next search tries chunks that are not loaded from this one on.
    pub fn load_from(&self, chunk: u32) {
        self.chunks.lock().from = chunk;
    }

    /// A data chunk's map was read; `allocated` are its words. Others may have read it as well, and have
    /// retired the chunk since (invariant 5).
    pub fn loaded(&self, chunk: u32, allocated: &[u64]) {
        let mut chunks = self.chunks.lock();
        if chunks.loaded.contains_key(&chunk) || !chunks.is_data(chunk) {
            return;
        }
        let mut available: Vec<u64> = allocated.iter().map(|w| !w).collect();
        trim(&mut available, self.geometry.chunk_blocks);
        // Blocks freed by an epoch that is not durable yet are not available (invariant 1).
        let pending = self.pending.lock();
        for extent in pending.values().flatten() {
            if let Some((c, start)) = self.geometry.chunk_of(extent.block)
                && c == chunk
            {
                for b in start..start + extent.len {
                    available[b as usize / 64] &= !(1 << (b % 64));
                }
            }
        }
        let count: u32 = available.iter().map(|w| w.count_ones()).sum();
        let assumed = chunks.unloaded.remove(&chunk).unwrap_or(0);
        self.totals.give(count as i64 - assumed as i64);
        self.insert(&mut chunks, chunk, available, count);
        drop(pending);
    }

    fn insert(&self, chunks: &mut Chunks, chunk: u32, available: Vec<u64>, count: u32) {
        let blocks = self.geometry.chunk_blocks;
        let bits = ChunkBits {
            available: match count {
                0 => Vec::new(),
                _ => available,
            },
            count,
            cursor: 0,
            blocks,
            taken_from: false,
        };
        let space = ChunkSpace {
            chunk,
            bits: Mutex::keyed(rank::CHUNK_BITS, chunk as u64, bits),
        };
        chunks.loaded.insert(chunk, Arc::new(space));
        chunks.roomy.insert(chunk);
    }

    /// Replay found a chunk's map in this state (`None`: deleted). Before any other use.
    pub fn recovered(&self, chunk: u32, allocated: Option<&[u64]>) {
        {
            let mut chunks = self.chunks.lock();
            match chunks.state[chunk as usize] {
                // It got segments after its map was gone: no journal that a store wrote changes that (R4).
                ChunkState::Meta => return,
                ChunkState::Free => {
                    chunks.free.remove(&chunk);
                    self.totals.take_chunks(1);
                }
                ChunkState::Data(free) => {
                    chunks.unloaded.remove(&chunk);
                    self.totals.take(free);
                }
            }
            chunks.state[chunk as usize] = ChunkState::Data(0);
        }
        match allocated {
            Some(words) => self.loaded(chunk, words),
            None => self.chunks_freed(&[chunk]),
        }
    }

    /// Gives back blocks that were taken and not allocated.
    pub fn give(&self, extent: Extent) {
        let given = self.put_back(&mut self.chunks.lock(), extent);
        self.totals.give(given);
    }

    /// The same for who has them promised again: nobody else can have them in between (totals, invariant 2). What is damaged meanwhile is
    /// promised all the same, and missing like everything that damage takes away.
    pub fn give_promised(&self, extent: Extent) {
        self.totals.promise_again(extent.len.into());
        self.give(extent);
    }

    /// Blocks freed in `epoch`; available once it is durable.
    pub fn freed(&self, epoch: u64, extents: &[Extent]) {
        if extents.is_empty() {
            return;
        }
        let blocks: i64 = extents.iter().map(|e| e.len as i64).sum();
        self.pending_blocks.fetch_add(blocks, Ordering::Relaxed);
        self.pending
            .lock()
            .entry(epoch)
            .or_default()
            .extend_from_slice(extents);
    }

    /// Everything freed up to `durable` becomes available, after `discard` saw it: what was
    /// given back could be written again before a later discard reached the device. While
    /// another thread releases, this one waits or, without `wait`, leaves it to a later call.
    pub fn release_through(&self, durable: u64, wait: bool, mut discard: impl FnMut(Extent)) {
        if self.pending_blocks() == 0 {
            return;
        }
        let _releasing = match self.releasing.try_lock() {
            Some(guard) => guard,
            None if wait => self.releasing.lock(),
            None => return,
        };
        let due: Vec<Extent> = {
            let pending = self.pending.lock();
            pending
                .range(..=durable)
                .flat_map(|(_, extents)| extents)
                .copied()
                .collect()
        };
        due.iter().copied().for_each(&mut discard);
        // Chunk list before pending, as in `loaded`: a map loaded meanwhile must see a
        // block either as pending or as given back, never as neither.
        let mut chunks = self.chunks.lock();
        let mut pending = self.pending.lock();
        let later = pending.split_off(&(durable + 1));
        *pending = later;
        drop(pending);
        let given: i64 = due.iter().map(|e| self.put_back(&mut chunks, *e)).sum();
        drop(chunks);
        let blocks: i64 = due.iter().map(|e| e.len as i64).sum();
        self.totals.give(given);
        self.pending_blocks.fetch_sub(blocks, Ordering::Relaxed);
    }

    /// Whoever releases has done so when this returns.
    pub fn await_release(&self) {
        drop(self.releasing.lock());
    }

    /// How many blocks are available again: none of an unusable chunk.
    fn put_back(&self, chunks: &mut Chunks, extent: Extent) -> i64 {
        let Some((chunk, start)) = self.geometry.chunk_of(extent.block) else {
            return 0;
        };
        if !chunks.is_data(chunk) {
            return 0;
        }
        match chunks.loaded.get(&chunk).cloned() {
            Some(space) => {
                space.give(start, extent.len);
                chunks.roomy.insert(chunk);
            }
            None => *chunks.unloaded.entry(chunk).or_insert(0) += extent.len,
        }
        extent.len as i64
    }

    /// Takes the next available run of at least `least` blocks in a part of a loaded chunk, for
    /// a discard; the caller gives it back, and goes on at the block that is returned. Runs that promises
    /// need are left alone.
    pub fn take_run(&self, chunk: u32, part: Range<u32>, least: u64) -> Option<(Extent, u32)> {
        let space = self.chunks.lock().loaded.get(&chunk).cloned()?;
        let mut bits = space.bits.lock();
        let mut from = part.start;
        while let Some(start) = bits.next_available(from).filter(|start| *start < part.end) {
            let len = bits.run_at(start, part.end - start);
            from = start + len;
            if u64::from(len) >= least && self.totals.try_take(len) {
                bits.set(start, len, false);
                return Some((self.extent(chunk, start, len), from));
            }
        }
        None
    }

    /// Data chunks that are not loaded, and durably free chunks.
    pub fn unloaded_and_free(&self) -> (Vec<u32>, Vec<u32>) {
        let chunks = self.chunks.lock();
        (
            chunks.unloaded.keys().copied().collect(),
            chunks.free.iter().copied().collect(),
        )
    }

    pub fn loaded_chunks(&self) -> Vec<u32> {
        self.chunks.lock().loaded.keys().copied().collect()
    }

    /// Takes one particular free chunk out, for a discard, unless promises need it; [`Space::give_free_chunk`]
    /// returns it. The caller sees to it that no checkpoint needs it either.
    pub fn take_free_chunk(&self, chunk: u32) -> bool {
        let mut chunks = self.chunks.lock();
        let taken = chunks.free.contains(&chunk) && self.totals.try_take_chunk();
        if taken {
            chunks.free.remove(&chunk);
        }
        taken
    }

    pub fn give_free_chunk(&self, chunk: u32) {
        self.chunks.lock().free.insert(chunk);
        self.totals.free(1);
    }

    /// Takes up to `want` durably free chunks for segments (R4).
    pub fn take_free_chunks(&self, want: usize) -> Vec<u32> {
        let mut chunks = self.chunks.lock();
        let taken: Vec<u32> = chunks.free.iter().rev().take(want).copied().collect();
        for chunk in &taken {
            chunks.free.remove(chunk);
            chunks.state[*chunk as usize] = ChunkState::Meta;
        }
        self.totals.take_chunks(taken.len());
        taken
    }

    /// Chunks that are durably free again: released meta chunks, or data chunks whose map
    /// is durably deleted.
    pub fn chunks_freed(&self, freed: &[u32]) {
        let mut chunks = self.chunks.lock();
        for &chunk in freed {
            chunks.state[chunk as usize] = ChunkState::Free;
            chunks.free.insert(chunk);
        }
        self.totals.free(freed.len());
    }

    /// Shards let go of chunks without data, so that these can be taken; each finds another one when it has need of it.
    pub fn end_empty_leases(&self) {
        for lease in &self.leases {
            let mut lease = lease.lock();
            let empty = |c: &mut Arc<ChunkSpace>| c.count() == self.geometry.chunk_blocks;
            if let Some(old) = lease.take_if(empty) {
                self.chunks.lock().leased.retain(|&c| c != old.chunk);
            }
        }
    }

    /// Unleased data chunks all of whose blocks are available and not promised, loaded ones first; they
    /// leave the allocator, and the caller deletes their maps or calls [`Space::unretired`].
    pub fn take_empty_chunks(&self, most: usize) -> Vec<u32> {
        let blocks = self.geometry.chunk_blocks;
        let mut chunks = self.chunks.lock();
        // That nobody else refers to it is looked at first: who does takes blocks without the chunk list.
        let loaded = (chunks.roomy.iter())
            .map(|chunk| &chunks.loaded[chunk])
            .filter(|c| !chunks.leased.contains(&c.chunk) && Arc::strong_count(c) == 1)
            .filter(|c| c.count() == blocks)
            .map(|c| c.chunk);
        // From one that is not loaded nobody takes, and a map that is read late changes nothing (invariant 5).
        let unloaded = chunks.not_loaded().filter(|(_, free)| *free == blocks);
        let empty: Vec<u32> = loaded
            .chain(unloaded.map(|(chunk, _)| chunk))
            .take(most)
            .collect();
        let mut taken = Vec::new();
        for chunk in empty {
            if !self.totals.try_take(blocks) {
                break;
            }
            chunks.unload(chunk);
            chunks.unloaded.remove(&chunk);
            chunks.state[chunk as usize] = ChunkState::Free;
            taken.push(chunk);
        }
        taken
    }

    /// The chunk is as it was before its map was read, if that is all that it was read for: nobody has taken any of its blocks since, whose map would say that
    /// they are free, nor can do so. The caller sees to it that nobody discards any ([`Space::take_run`]).
    pub fn unload_unused(&self, chunk: u32) {
        let mut chunks = self.chunks.lock();
        let count = chunks.loaded.get(&chunk).and_then(|space| {
            // Who is to take some refers to it, or has the lease, which does.
            let alone = Arc::strong_count(space) == 1;
            let bits = space.bits.lock();
            (alone && !bits.taken_from).then_some(bits.count)
        });
        if let Some(count) = count {
            chunks.unload(chunk);
            chunks.unloaded.insert(chunk, count);
        }
    }

    /// The chunk's map stays: it is a data chunk again, to be loaded. All its blocks are available still.
    pub fn unretired(&self, chunk: u32) {
        let blocks = self.geometry.chunk_blocks;
        let mut chunks = self.chunks.lock();
        chunks.state[chunk as usize] = ChunkState::Data(blocks);
        chunks.unloaded.insert(chunk, blocks);
        self.totals.give(blocks as i64);
    }

    /// The maps of chunks that are not loaded are damaged: what is free in them is lost until something of it
    /// is freed. Those that another thread has loaded, or retired, are not concerned. Returns how many blocks that is.
    pub fn unloadable(&self, these: Range<u32>) -> u32 {
        let mut chunks = self.chunks.lock();
        let lost = chunks.unloaded.extract_if(these, |_, _| true);
        let lost: u32 = lost.map(|(_, free)| free).sum();
        self.totals.take(lost);
        lost
    }

    /// The map of a chunk that is loaded is damaged: nothing is allocated there before the next
    /// mount, and what is free in it is lost until then (invariant 5).
    pub fn unusable(&self, chunk: u32) {
        let mut chunks = self.chunks.lock();
        chunks.state[chunk as usize] = ChunkState::Free;
        let mut lost = chunks.unloaded.remove(&chunk).unwrap_or(0);
        if let Some(space) = chunks.unload(chunk) {
            // Leases may still refer to it.
            let mut bits = space.bits.lock();
            bits.available = Vec::new();
            lost += std::mem::take(&mut bits.count);
        }
        self.totals.take(lost);
    }
}

impl ChunkSpace {
    /// A run that starts exactly at `start`, if it is available.
    fn take_at(&self, start: u32, want: u32) -> Option<u32> {
        let mut bits = self.bits.lock();
        let run = bits.run_at(start, want);
        if run == 0 {
            return None;
        }
        bits.take(start, run);
        Some(run)
    }
}

/// Clears the bits beyond the chunk's last block.
fn trim(words: &mut [u64], blocks: u32) {
    let tail = blocks % 64;
    if tail != 0
        && let Some(last) = words.last_mut()
    {
        *last &= (1 << tail) - 1;
    }
}

#[cfg(test)]
mod tests;

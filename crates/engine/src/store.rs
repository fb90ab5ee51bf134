//! The store: nodes, space and journal put together, and the threads that serve them.

use crate::batches::Unread;
use crate::cache::PageCache;
use crate::checkpoint::CheckpointState;
use crate::content::Content;
use crate::counters::{StoreCounters, StoreCounts};
use crate::dirty::{DirtyNodes, reserve_chunks};
use crate::error::Error;
use crate::items;
use crate::journal::{Journal, Resume};
use crate::nids::{LeafNids, NidSource, Nids};
use crate::node::{Body, Cell, Node, NodeCache, last_version, new_cell};
use crate::op::{Dirty, Epoch, FreshNid, Need, Op, Promise, Reservation};
use crate::segments::Segments;
use crate::space::{ChunkState, Extent, Source, Space};
use crate::table::{Entry, Table};
use crate::written::BytesWritten;
use base::atomic::{AtomicBool, AtomicI64, Ordering};
use base::canary::{Canary, planted};
use base::clock::Clock;
use base::prefetch;
use base::sync::{Condvar, Handle, Mutex, rank};
use base::thread::{Pool, lane};
use device::{Array, Io};
use format::item::Place;
use format::table::{LEAF_NIDS, SPACE_MAP_FIRST, space_map_nid};
use format::{Block, Damage, Nid};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of records that may wait for a commit before one begins. No larger, because recovery looks for what
/// proves a loss only so far behind the journal's end (`batches.rs`).
pub const STAGING_MAX: usize = 4 << 20;

/// Threads of a checkpoint, and shards, at most.
pub const THREADS_MAX: usize = 64;

/// So many nodes ahead of the one that a checkpoint lets go of its memory is asked for.
const RELEASED_AHEAD: usize = 8;

/// How a store runs; none of it is on disk.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Bound on memory for clean nodes and table pages, in bytes.
    pub node_cache_bytes: usize,
    /// Unsynced operations are committed at least this often.
    pub commit_interval: Duration,
    /// A checkpoint is made at least this often while anything is dirty.
    pub checkpoint_interval: Duration,
    /// Memory of changed nodes at which a checkpoint begins; operations wait at twice this.
    /// `None`: half of `node_cache_bytes`. One begins earlier when it would write more than a part of the
    /// array: a 64th at least, up to a 16th while there is room (`dirty.rs`).
    pub dirty_bytes: Option<usize>,
    /// Memory of records that wait for a commit at which one begins, in bytes; operations
    /// wait at twice this. More than [`STAGING_MAX`] counts as that.
    pub staging_bytes: usize,
    /// Threads that a checkpoint and recovery use: by default one for each core. From 1 to [`THREADS_MAX`]; what is outside
    /// counts as the nearest.
    pub workers: usize,
    /// Shards of per-core structures, likewise.
    pub shards: usize,
    /// Commit and checkpoint in threads of the store. Without, the caller does both.
    pub background: bool,
    /// Nothing is written; the journal is replayed in memory.
    pub read_only: bool,
    /// Blocks whose freeing is durable are discarded.
    pub discard: bool,
    pub clock: Clock,
}

impl Default for StoreOptions {
    fn default() -> Self {
        let cpus = base::thread::cpu_count();
        StoreOptions {
            node_cache_bytes: 128 << 20,
            commit_interval: Duration::from_millis(500),
            checkpoint_interval: Duration::from_secs(30),
            dirty_bytes: None,
            staging_bytes: STAGING_MAX,
            workers: cpus.min(THREADS_MAX),
            shards: cpus.min(THREADS_MAX),
            background: true,
            read_only: false,
            discard: false,
            clock: Clock::real(),
        }
    }
}

/// Free and total space, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceInfo {
    pub total_blocks: u64,
    pub free_blocks: u64,
    /// Nodes in the table as of the last checkpoint.
    pub nodes: u64,
}

/// What the store's threads wait on.
#[derive(Debug, Default)]
pub(crate) struct Control {
    pub stop: bool,
    pub checkpoint_wanted: bool,
    pub commit_wanted: bool,
}

#[derive(Debug)]
pub struct Store<C: Content> {
    pub(crate) array: Arc<Array>,
    pub(crate) options: StoreOptions,
    pub(crate) nodes: NodeCache<C>,
    pub(crate) nids: Nids,
    pub(crate) space: Space,
    pub(crate) journal: Journal,
    pub(crate) table: Table,
    pub(crate) segments: Segments,
    pub(crate) dirty: DirtyNodes<C>,
    /// Room for checkpoints at which they gave way to data; 0: they need not.
    pub(crate) frugal_room: AtomicI64,
    /// Bytes that metadata leaves free for cleaning.
    pub(crate) growth_spare: AtomicI64,
    /// Room for checkpoints at which cleaning gained nothing any more; 0: it does.
    pub(crate) stalled_room: AtomicI64,
    /// Data chunks whose space map was deleted, with the epoch that must be durable first.
    pub(crate) retired: Mutex<Vec<(u64, u32)>>,
    pub(crate) checkpoint_state: Mutex<CheckpointState>,
    pub(crate) control: Arc<(Mutex<Control>, Condvar)>,
    /// As `checkpoint_wanted`, under whose lock it changes: who finds it set has nothing to ask for.
    pub(crate) checkpoint_asked: Arc<AtomicBool>,
    pub(crate) threads: Mutex<Vec<base::thread::JoinHandle>>,
    pub(crate) closed: AtomicBool,
    /// Nodes that replay could not bring up to date; only in a store open read-only. They are
    /// damaged to whoever asks: what the table has of them is old.
    pub(crate) unreplayed: BTreeMap<u64, Damage>,
    /// Data of which nobody knows whether it is what was synced; only a store that is open read-only has some.
    pub(crate) unread: Vec<Unread>,
    pub(crate) counts: StoreCounts,
    pool: Arc<Pool>,
}

/// What a store begins with: nothing, what a checkpoint record says, or what salvage found.
pub(crate) struct Parts {
    pub array: Arc<Array>,
    pub options: StoreOptions,
    pub table: Table,
    /// Free nids of each region.
    pub free_nids: Vec<u32>,
    pub chunks: Vec<ChunkState>,
    /// Live bytes of each segment, by chunk.
    pub live: BTreeMap<u32, Vec<u32>>,
    pub resume: Resume,
    pub checkpoint_state: CheckpointState,
}

impl<C: Content> NidSource for Store<C> {
    type Error = Error;

    fn may_pass(error: &Error) -> bool {
        matches!(error, Error::Device(_))
    }

    fn used_nids(&self, region: u32) -> Result<Vec<u64>, Error> {
        self.table.bitmap(region as u64)
    }

    fn last_versions(
        &self,
        first: Nid,
        wanted: &mut LeafNids,
    ) -> Result<Box<[u64; LEAF_NIDS as usize]>, Error> {
        let mut versions = Box::new([0; LEAF_NIDS as usize]);
        // The newest version of a nid is in the cache, or else in the table; and as nobody else
        // has these nids, none comes to the cache between the two looks.
        let cached = self.nodes.versions(first, wanted, &mut versions);
        let mut rest = *wanted;
        for (rest, cached) in rest.iter_mut().zip(cached) {
            *rest &= !cached;
        }
        match self.table.versions(first, &rest, &mut versions) {
            // Its table page is damaged. They stay out of use, or everybody would be given
            // them again and nobody could create anything.
            Err(Error::Damaged(damage)) => {
                tracing::warn!("free nids of {LEAF_NIDS} from {first} on are not used: {damage}");
                *wanted = cached;
                Ok(versions)
            }
            result => result.map(|()| versions),
        }
    }
}

impl<C: Content> Store<C> {
    pub(crate) fn assemble(parts: Parts) -> Result<Self, Error> {
        let Parts {
            array, mut options, ..
        } = parts;
        options.staging_bytes = options.staging_bytes.min(STAGING_MAX);
        options.workers = options.workers.clamp(1, THREADS_MAX);
        options.shards = options.shards.clamp(1, THREADS_MAX);
        let geometry = array.geometry();
        let reserve = reserve_chunks(&array, &options);
        let dirty = DirtyNodes::new(
            &array,
            &options,
            base::sync::Arc::clone(&parts.table.changed),
        );
        let pool = Pool::start("sheaf-worker", options.workers.saturating_sub(1))
            .map_err(|error| Error::Thread(Arc::new(error)))?;
        let pool = Arc::new(pool);
        Ok(Store {
            nodes: NodeCache::new(options.shards, options.node_cache_bytes),
            nids: Nids::new(options.shards, parts.free_nids),
            space: Space::new(geometry, options.shards, parts.chunks, reserve),
            journal: Journal::new(
                Arc::clone(&array),
                Arc::clone(&pool),
                &options,
                parts.resume,
            ),
            table: parts.table,
            segments: Segments::new(geometry, parts.live, dirty.limit / 64),
            dirty,
            frugal_room: AtomicI64::new(0),
            growth_spare: AtomicI64::new(0),
            stalled_room: AtomicI64::new(0),
            retired: Mutex::new(rank::SPACE_PENDING, Vec::new()),
            checkpoint_state: Mutex::new(rank::CHECKPOINT, parts.checkpoint_state),
            control: Arc::new((Mutex::new(rank::LEAF, Control::default()), Condvar::new())),
            checkpoint_asked: Arc::new(AtomicBool::new(false)),
            threads: Mutex::new(rank::LEAF, Vec::new()),
            closed: AtomicBool::new(false),
            unreplayed: BTreeMap::new(),
            unread: Vec::new(),
            counts: StoreCounts::default(),
            pool,
            array,
            options,
        })
    }

    pub fn array(&self) -> &Arc<Array> {
        &self.array
    }

    /// Blocks of metadata are kept in this cache from now on, beside pages of files.
    pub fn share_pages(&self, pages: Arc<PageCache>) {
        self.table.blocks.keep_in(pages);
    }

    pub fn clock(&self) -> &Clock {
        &self.options.clock
    }

    pub fn options(&self) -> &StoreOptions {
        &self.options
    }

    pub fn read_only(&self) -> bool {
        self.options.read_only || self.journal.failed().is_some()
    }

    /// Batches gathered for the journal since the store was opened.
    pub fn journal_batches(&self) -> u64 {
        self.journal.stats.batches.load(Ordering::Relaxed)
    }

    /// Bytes of these batches, with their headers and padding.
    pub fn journal_bytes(&self) -> u64 {
        self.journal.stats.batch_bytes.load(Ordering::Relaxed)
    }

    /// What this store has done since it was opened.
    pub fn counters(&self) -> StoreCounters {
        let mut counters = self.counts.get();
        self.journal.stats.add_to(&mut counters);
        counters.written = self.bytes_written();
        counters
    }

    /// Bytes of metadata written to the devices since the store was opened, by cause.
    pub fn bytes_written(&self) -> BytesWritten {
        let records = self.journal.stats.record_bytes.load(Ordering::Relaxed);
        BytesWritten {
            records,
            batches: self.journal_bytes().saturating_sub(records),
            ..self.segments.written.get()
        }
    }

    /// The newest checkpoint's number; each has the next one.
    pub fn newest_checkpoint(&self) -> u64 {
        self.journal.checkpoint_sequence.load(Ordering::Relaxed)
    }

    /// The failure that turned the store read-only, if one did.
    pub fn failed(&self) -> Option<Error> {
        self.journal.failed()
    }

    /// Turns the store read-only: nothing is written any more, what is durable stays.
    pub fn latch(&self, why: &str) {
        tracing::error!("the file system turns read-only: {why}");
        self.journal.fail(Error::Failed(why.into()));
    }

    /// The shard of per-core structures that the caller uses.
    pub(crate) fn shard(&self) -> usize {
        match self.options.shards {
            1 => 0,
            shards => base::thread::current_cpu() % shards,
        }
    }

    /// The node, read from the array when it is not in memory.
    #[inline]
    pub fn get(&self, nid: Nid) -> Result<Node<C>, Error> {
        if nid.0 >= SPACE_MAP_FIRST {
            return Err(Error::Gone(nid));
        }
        self.load(nid)
    }

    /// What `look` finds in a node that is in memory; `None` also when that is nothing, or would take a wait or a reference
    /// to the node: [`get`](Self::get) tells. `look` must take no lock.
    #[inline]
    pub fn glance<R>(&self, nid: Nid, look: impl Fn(&C) -> Option<R>) -> Option<R> {
        match self.unreplayed.is_empty() {
            true => self.nodes.glance(lane(), nid, look),
            false => None,
        }
    }

    /// [`get`](Self::get) for a node that one core at a time has to do with, as whoever asks changes it mostly:
    /// nothing is kept for the caller's core.
    #[inline]
    pub fn get_once(&self, nid: Nid) -> Result<Node<C>, Error> {
        if nid.0 >= SPACE_MAP_FIRST {
            return Err(Error::Gone(nid));
        }
        match self.nodes.get(nid) {
            Some(cell) if self.unreplayed.is_empty() => Ok(Node(Handle::common(cell))),
            _ => self.load_absent(nid),
        }
    }

    #[inline(always)]
    pub(crate) fn load(&self, nid: Nid) -> Result<Node<C>, Error> {
        match self.nodes.get_held(lane(), nid) {
            Some(cell) if self.unreplayed.is_empty() => Ok(Node(cell)),
            _ => self.load_absent(nid),
        }
    }

    #[cold]
    fn load_absent(&self, nid: Nid) -> Result<Node<C>, Error> {
        if let Some(damage) = self.unreplayed.get(&nid.0) {
            return Err(Error::node(nid, damage.clone()));
        }
        loop {
            if let Some(cell) = self.nodes.get_held(lane(), nid) {
                return Ok(Node(cell));
            }
            let entry = self.table.entry(nid)?;
            if entry.place.is_none() {
                // A cell may have come between the two looks; then the nid is not gone.
                match self.nodes.get(nid) {
                    Some(cell) => return Ok(Node(Handle::common(cell))),
                    None => return Err(Error::Gone(nid)),
                }
            }
            let read = self.table.blocks.node(nid, entry.version, entry.place)?;
            let decoded = read.and_then(|item| {
                Ok(new_cell(
                    nid,
                    entry.version,
                    Body::<C>::decode(item.header.node_kind, item.payload())?,
                ))
            });
            match decoded {
                Ok(cell) => {
                    let current = || self.table.still(nid, entry);
                    if let Some(cell) = self.nodes.insert_read(cell, current) {
                        return Ok(Node(Handle::common(cell)));
                    }
                }
                // The checkpoint may have moved the image and reused its place (R11).
                Err(_) if self.table.entry(nid)? != entry => {}
                Err(damage) => return Err(Error::node(nid, damage)),
            }
        }
    }

    /// Brings nodes into memory that are not there, by reads that are made all at once: for who is about
    /// to [`get`](Self::get) one after the other. A node that cannot be read is left to `get`, which tells why.
    pub fn read_ahead(&self, nids: impl IntoIterator<Item = Nid>) {
        let mut wanted: Vec<(Nid, Entry)> = Vec::new();
        for nid in nids {
            let readable = nid.0 < SPACE_MAP_FIRST && !self.unreplayed.contains_key(&nid.0);
            if readable
                && !self.nodes.contains(nid)
                && let Ok(entry) = self.table.entry(nid)
                && !entry.place.is_none()
            {
                wanted.push((nid, entry));
            }
        }
        if wanted.len() < 2 {
            return;
        }
        wanted.sort_unstable_by_key(|(_, entry)| entry.place.byte);
        let places: Vec<Place> = wanted.iter().map(|(_, entry)| entry.place).collect();
        let read = items::read_places(&self.array, &places, |i, image| {
            let (nid, entry) = wanted[i];
            self.take_image(nid, entry, image);
        });
        if let Err(error) = read {
            tracing::debug!("reading ahead: {error}");
        }
    }

    /// Brings a node into memory whose image was read, if it is not there and the table has it at that place.
    pub(crate) fn take_in(&self, nid: Nid, place: Place, image: &[u8]) -> Result<(), Error> {
        if !self.nodes.contains(nid) {
            let entry = self.table.entry(nid)?;
            if entry.place == place {
                self.take_image(nid, entry, image);
            }
        }
        Ok(())
    }

    /// One that cannot be read is left to who asks for it.
    fn take_image(&self, nid: Nid, entry: Entry, image: &[u8]) {
        let body = items::node_in(image, nid, entry.version)
            .and_then(|(kind, payload)| Body::<C>::decode(kind, payload));
        if let Ok(body) = body {
            let cell = new_cell(nid, entry.version, body);
            self.nodes
                .insert_read(cell, || self.table.still(nid, entry));
        }
    }

    /// The space map node of a data chunk.
    pub(crate) fn load_map(&self, chunk: u32) -> Result<Node<C>, Error> {
        let damaged = |what: String| Error::Damaged(Damage::new("space map", what));
        let node = self
            .load(space_map_nid(chunk))
            .map_err(|error| match error {
                Error::Gone(nid) => damaged(format!(
                    "chunk {chunk} holds data but has no space map (node {nid})"
                )),
                other => other,
            })?;
        match &node.0.read().body {
            Body::Space(map) if map.blocks() == self.array.geometry().chunk_blocks => {}
            Body::Gone => return Err(damaged(format!("chunk {chunk} lost its space map"))),
            _ => {
                return Err(damaged(format!(
                    "chunk {chunk} has another chunk's space map"
                )));
            }
        }
        self.prepare_change(&node.0)?;
        Ok(node)
    }

    /// The version the nid had when it was last used; 0 when it never was.
    pub(crate) fn last_version(&self, nid: Nid) -> Result<u64, Error> {
        if let Some(cell) = self.nodes.get(nid) {
            return Ok(last_version(&cell));
        }
        let version = self.table.entry(nid)?.version;
        // As in `load`: the newest version is in the cache or in the table at every moment,
        // and moves from the first to the second.
        match self.nodes.get(nid) {
            Some(cell) => Ok(last_version(&cell)),
            None => Ok(version),
        }
    }

    /// A nid for a new node.
    pub fn reserve_nid(&self) -> Result<FreshNid<'_, C>, Error> {
        let (nid, last_version) = loop {
            let taken = self.nids.take(self.shard(), self)?;
            let (nid, last_version) = taken.ok_or(Error::NoSpace)?;
            match self.table.prepare(nid) {
                Ok(()) => break (nid, last_version),
                // What is free there has become useless since it was found; until the next mount nobody gets it again.
                Err(error) => tracing::error!("node {nid} is not used: {error}"),
            }
        };
        Ok(FreshNid {
            store: self,
            nid,
            last_version: match planted(Canary::VersionReset) {
                true => 0,
                false => last_version,
            },
            used: false,
        })
    }

    /// A nid below [`format::table::RESERVED_NIDS`], for making the file system.
    pub fn reserved_nid(&self, nid: Nid) -> Result<FreshNid<'_, C>, Error> {
        let last_version = self.last_version(nid)?;
        Ok(FreshNid {
            store: self,
            nid,
            last_version,
            used: false,
        })
    }

    /// Begins an operation. Waits for a commit or a checkpoint when the journal or the memory
    /// for changed nodes is short, so the caller holds no node lock.
    ///
    /// # Errors
    /// [`Error::NoSpace`] when `need` is [`Need::Grow`] and the array is full;
    /// [`Error::ReadOnly`] or [`Error::Failed`] when nothing can be changed.
    pub fn begin(&self, need: Need) -> Result<Op<'_, C>, Error> {
        base::sync::assert_none_held_from(rank::INODE);
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        let mut tried = false;
        loop {
            if need == Need::Grow && !self.room_to_grow() {
                if tried {
                    return Err(Error::NoSpace);
                }
                tried = true;
                self.give_way()?;
                self.reclaim()?;
                continue;
            }
            if self.free_meta_bytes() < self.clean_room() / 2 {
                self.clean_up()?;
            }
            self.bound_staging()?;
            let checkpoint = self.journal.checkpoint_sequence.load(Ordering::SeqCst);
            let pressure = self.dirty.pressure();
            let shard = self.shard();
            if pressure <= 1000
                && let Some(credit) = self.journal.try_credit(shard)
            {
                if let Some(error) = self.journal.failed() {
                    self.journal.return_credit(credit);
                    return Err(error);
                }
                self.pace(shard, pressure);
                return Ok(Op::new(self, credit));
            }
            self.make_room(checkpoint)?;
        }
    }

    /// Bytes of changed metadata that wait for a checkpoint, roughly.
    pub fn dirty_metadata_bytes(&self) -> u64 {
        self.dirty.to_write().max(0) as u64
    }

    /// Bytes of changed nodes, in memory or to be written, at which a checkpoint begins, at the least.
    pub fn dirty_limit(&self) -> u64 {
        self.dirty.least_limit() as u64
    }

    /// Metadata can grow without coming near what checkpoints and deletions need.
    fn room_to_grow(&self) -> bool {
        let live = self.segments.live_about();
        live + self.dirty.to_write().max(0) as u64 <= self.growth_limit()
    }

    /// Asks for a commit when much is staged, and makes one when that did not help.
    fn bound_staging(&self) -> Result<(), Error> {
        let (staged, limit) = (self.journal.staged(), self.options.staging_bytes as u64);
        if staged > 2 * limit {
            return self.journal.commit_through(self.journal.epoch());
        }
        if staged > limit && self.options.background {
            let (control, wake) = &*self.control;
            let mut control = control.lock();
            if !control.commit_wanted {
                control.commit_wanted = true;
                wake.notify_all();
            }
        }
        Ok(())
    }

    /// Asks for a checkpoint before one is urgent, and slows the caller down the closer it is.
    fn pace(&self, shard: usize, dirty: i64) {
        let pressure = dirty.max(self.journal.fill_permille(shard) as i64);
        if pressure < 500 || !self.options.background || planted(Canary::PaceIgnored) {
            return;
        }
        if !self.checkpoint_asked.load(Ordering::Relaxed) {
            self.ask_for_checkpoint();
        }
        if pressure > 750 {
            let delay = Duration::from_micros((pressure - 750) as u64 * 4);
            let began = self.clock().monotonic_ns();
            let (control, wake) = &*self.control;
            wake.wait_for(&mut control.lock(), delay);
            self.counts.paced.add(self.since(began));
        }
    }

    #[cold]
    fn ask_for_checkpoint(&self) {
        let (control, wake) = &*self.control;
        let mut control = control.lock();
        control.checkpoint_wanted = true;
        self.checkpoint_asked.store(true, Ordering::Relaxed);
        drop(control);
        wake.notify_all();
    }

    /// After a checkpoint: whoever asked for one while it ran need not be answered by another, unless one is due again.
    pub(crate) fn answer_checkpoint(&self) {
        let fill = self.journal.fill_permille(self.shard()) as i64;
        if self.dirty.pressure().max(fill) < 500 {
            let mut control = self.control.0.lock();
            control.checkpoint_wanted = false;
            self.checkpoint_asked.store(false, Ordering::Relaxed);
        }
    }

    /// Returns after a checkpoint later than `seen`: another thread's, or one made here.
    pub(crate) fn make_room(&self, seen: u64) -> Result<(), Error> {
        let began = self.clock().monotonic_ns();
        let state = self.checkpoint_state.lock();
        let newest = state.sequence;
        drop(state);
        let outcome = match self.journal.failed() {
            Some(error) => Err(error),
            None if newest > seen => Ok(()),
            None => self.checkpoint_now(),
        };
        self.counts.stalled.add(self.since(began));
        outcome
    }

    /// Nanoseconds since a time of the clock.
    pub(crate) fn since(&self, began: u64) -> u64 {
        self.clock().monotonic_ns().saturating_sub(began)
    }

    /// Checkpoints content themselves with the room that is always kept for them, until there is
    /// twice as much as now. The caller holds no node lock.
    fn give_way(&self) -> Result<(), Error> {
        base::sync::assert_none_held_from(rank::INODE);
        while self.space.kept_chunks() != 0 {
            let room = self.free_meta_bytes().max(1);
            self.frugal_room.store(room, Ordering::Relaxed);
            {
                // A checkpoint that ran may have looked before that; none runs now, and those that follow see it.
                let _none = self.checkpoint_state.lock();
                self.dirty.adapt(room, 0);
                if self.dirty.pressure() <= 1000 {
                    self.space.keep(0);
                    return Ok(());
                }
            }
            // Operations wait at twice the limit now, so a checkpoint begun from now on is enough.
            self.make_room(self.newest_checkpoint())?;
        }
        Ok(())
    }

    /// Makes freed blocks available and empty chunks free, for callers that found none.
    fn reclaim(&self) -> Result<(), Error> {
        self.settle_freed()?;
        self.retire_chunks(&self.checkpoint_state.lock());
        self.settle_freed()?;
        self.checkpoint_now()
    }

    /// The open epoch: everything committed so far belongs to it or to an earlier one.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.journal.epoch())
    }

    pub fn durable_epoch(&self) -> Epoch {
        Epoch(self.journal.durable_epoch())
    }

    /// Returns when every operation of an epoch up to `epoch` is durable, together with the data
    /// written before them. Concurrent callers share one batch and one flush.
    pub fn commit_through(&self, epoch: Epoch) -> Result<(), Error> {
        self.journal.commit_through(epoch.0)?;
        self.release_freed(false);
        Ok(())
    }

    /// Everything committed and written so far becomes durable.
    pub fn sync(&self) -> Result<(), Error> {
        if self.options.read_only {
            return Ok(());
        }
        self.commit_through(self.epoch())?;
        // An empty epoch writes no batch and so flushes nothing; data may still wait.
        self.flush()
    }

    /// Makes everything written so far durable, without a commit. After a failure what was
    /// written since the last good flush may be lost, whatever later flushes say (R17): callers
    /// that wrote in place remember that, and if a record that waits for its commit may name such
    /// data, the store turns read-only.
    pub fn flush(&self) -> Result<(), Error> {
        let error = match self.array.flush() {
            Ok(flushed) => {
                let count = &self.counts.data_flushes;
                count.fetch_add(flushed, Ordering::Relaxed);
                return Ok(());
            }
            Err(error) => error,
        };
        self.after_failed_flush(&error);
        Err(error.into())
    }

    fn after_failed_flush(&self, error: &device::Error) {
        if !self.journal.forgive_flush() {
            self.latch(&format!("data of changes that wait for a commit: {error}"));
        }
    }

    /// Writes, and has what it wrote durable when it returns. Meant for a single transfer: each waits for the medium by
    /// itself. After a failure they are as any that failed; it may have been a flush that did ([`Array::write_durably`]).
    pub fn write_durably(&self, ios: &mut [Io<'_>]) -> Result<(), Error> {
        let count = &self.counts.data_durably;
        count.fetch_add(ios.len() as u64, Ordering::Relaxed);
        let failures = self.array.flush_failures();
        let Err(error) = self.array.write_durably(ios) else {
            return Ok(());
        };
        if self.array.flush_failures() != failures {
            self.after_failed_flush(&error);
        }
        Err(error.into())
    }

    /// Up to which epoch what was freed may be given out (R4; vouched, invariant 3).
    fn settled_epoch(&self) -> u64 {
        let durable = self.journal.durable_epoch();
        self.journal.vouched.settled(durable)
    }

    /// Blocks for whose content a batch vouches that recovery would look at after a crash now.
    pub fn vouched(&self) -> Vec<Extent> {
        self.journal.vouched.runs()
    }

    /// Returns when nothing hinders a write to these blocks: when no batch vouches for what they hold that recovery
    /// might look at.
    pub fn confirm(&self, blocks: Extent) -> Result<(), Error> {
        match self.journal.vouched.newest_of(blocks) {
            Some(epoch) => self.confirm_through(epoch),
            None => Ok(()),
        }
    }

    /// Whether [`Store::confirm`] would have to wait.
    pub fn is_vouched(&self, blocks: Extent) -> bool {
        self.journal.vouched.newest_of(blocks).is_some()
    }

    /// Returns when no batch of an epoch up to this one vouches for data any more.
    fn confirm_through(&self, epoch: u64) -> Result<(), Error> {
        while !self.journal.vouched.is_confirmed(epoch) {
            // Somebody else's batch may have done it by now.
            self.journal.commit_through(epoch)?;
            let seen = self.newest_checkpoint();
            match self.journal.stage_nothing(self.shard()) {
                // This one is gathered when that one is durable, and says so.
                Some(next) => {
                    self.journal.commit_through(next)?;
                    self.journal.vouched.confirm(epoch);
                }
                None => self.make_room(seen)?,
            }
        }
        Ok(())
    }

    /// Commits, and makes everything available that was freed until then.
    fn settle_freed(&self) -> Result<(), Error> {
        self.sync()?;
        self.confirm_all()?;
        self.release_freed(true);
        Ok(())
    }

    /// What was freed so far need not wait for batches that vouch for what it held.
    pub(crate) fn confirm_all(&self) -> Result<(), Error> {
        match self.journal.vouched.newest() {
            Some(epoch) => self.confirm_through(epoch),
            None => Ok(()),
        }
    }

    /// Whether an operation may vouch for data instead of having it flushed first ([`Op::vouch`]).
    pub fn may_vouch(&self) -> bool {
        self.journal.vouched.has_room()
    }

    fn release_freed(&self, wait: bool) {
        if self.space.pending_blocks() == 0 {
            return;
        }
        let settled = self.settled_epoch();
        self.space.release_through(settled, wait, |extent| {
            if self.options.discard {
                self.discard(extent);
            }
        });
    }

    /// Lets go of nodes that were captured, on the store's threads and the caller's: each count
    /// of references is one that another core has written.
    pub(crate) fn release(&self, lists: Vec<Vec<Dirty<C>>>) {
        let nodes: usize = lists.iter().map(Vec::len).sum();
        let share = nodes.div_ceil(self.options.workers).max(256);
        let mut parts = Vec::new();
        for mut list in lists {
            while list.len() > share {
                parts.push(list.split_off(list.len() - share));
            }
            parts.push(list);
        }
        let release = |part: &mut Vec<Dirty<C>>| {
            while let Some(one) = part.pop() {
                base::trace::mark("release");
                if let Some(later) = part.len().checked_sub(RELEASED_AHEAD) {
                    prefetch::shared(&part[later].cell);
                }
                drop(one);
            }
        };
        self.run_parts(&mut parts, &release);
    }

    /// Runs `work` on each part on the store's threads and the caller's. Nothing is locked.
    pub(crate) fn run_parts<T: Send>(&self, parts: &mut [T], work: &(dyn Fn(&mut T) + Sync)) {
        self.pool.run(parts, work, None);
        base::trace::joined();
    }

    /// Runs `work(i)` for `i` in `0..parts` on the store's threads and the caller's. A part waits
    /// for no other part that may not have begun: there may be one thread for all. Nothing is
    /// locked.
    pub fn fan_out<T: Send>(&self, parts: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
        let mut results: Vec<(usize, Option<T>)> = (0..parts).map(|i| (i, None)).collect();
        self.pool
            .run(&mut results, &|slot| slot.1 = Some(work(slot.0)), None);
        results
            .into_iter()
            .filter_map(|(_, result)| result)
            .collect()
    }

    /// A device that cannot discard loses speed, not data: warned of, not failed.
    fn discard(&self, extent: Extent) {
        let bytes = extent.len as u64 * format::BLOCK_SIZE as u64;
        if let Err(error) = self.array.discard(extent.block.byte(), bytes) {
            tracing::warn!("discard of {extent:?} failed: {error}");
        }
    }

    /// Discards all free space in runs of at least `least_blocks`; returns the bytes discarded. A run ends where
    /// chunks with and without data meet. Space whose freeing is not durable yet is left out, and what promises need.
    pub fn trim(&self, least_blocks: u32) -> Result<u64, Error> {
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        self.sync()?;
        let (unloaded, free) = self.space.unloaded_and_free();
        unloaded
            .into_iter()
            .for_each(|chunk| self.load_space(chunk));
        let mut blocks = 0;
        for chunk in self.space.loaded_chunks() {
            let mut from = 0;
            while let Some((run, end)) = self.space.take_run(chunk, from, least_blocks.max(1)) {
                self.discard(run);
                self.space.give(run);
                blocks += run.len as u64;
                from = end;
            }
        }
        let geometry = self.array.geometry();
        let len = geometry.chunk_blocks;
        for chunk in in_long_runs(&free, least_blocks.div_ceil(len) as usize) {
            // A checkpoint may need the last free chunk.
            let _none = self.checkpoint_state.lock();
            if self.space.take_free_chunk(chunk) {
                self.discard(Extent {
                    block: geometry.chunk_block(chunk),
                    len,
                });
                self.space.unconverted(chunk);
                blocks += len as u64;
            }
        }
        Ok(blocks * format::BLOCK_SIZE as u64)
    }

    /// Brings the charges of a cell up to date; the caller holds its lock exclusively.
    pub(crate) fn recharge(&self, cell: &Cell<C>, body: &Body<C>) {
        let grown = self.nodes.recharge(cell, body);
        if cell.header.dirty_grew(grown) {
            self.dirty.charge(self.shard(), grown);
        }
    }

    /// Before a change, while an error harms nobody but the caller: the checkpoint will need the page of the node table
    /// that names the node.
    #[inline]
    pub(crate) fn prepare_change(&self, cell: &Cell<C>) -> Result<(), Error> {
        match cell.header.dirty.load(Ordering::Acquire) {
            true => Ok(()),
            false => self.table.prepare(cell.header.nid),
        }
    }

    pub(crate) fn mark_dirty(&self, shard: usize, cell: &base::sync::Arc<Cell<C>>) {
        if cell.header.dirty.load(Ordering::Acquire) {
            return;
        }
        {
            // Of two that merge changes into one node, one finds it marked: a checkpoint that waited
            // for that one's pin then takes this lock later than the other did.
            let lists = &self.dirty.lists;
            let mut list = lists[shard % lists.len()].lock();
            if cell.header.dirty.swap(true, Ordering::AcqRel) {
                return;
            }
            list.push(Dirty {
                nid: cell.header.nid,
                cell: cell.clone(),
            });
        }
        self.dirty.charge(shard, cell.header.dirty_charge());
        self.dirty.leaves.touch(shard, cell.header.nid);
    }

    /// Sets space aside for data to be allocated later.
    ///
    /// # Errors
    /// [`Error::NoSpace`], after a commit and a second look.
    pub fn promise(&self, blocks: u64) -> Result<Promise<'_, C>, Error> {
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        if !self.space.try_promise(blocks) {
            if self.space.pending_blocks() > 0 || self.journal.outstanding() {
                self.settle_freed()?;
            }
            // What checkpoints keep beyond their reserve is for whoever needs it.
            if !self.space.try_promise(blocks) {
                self.give_way()?;
                if !self.space.try_promise(blocks) {
                    return Err(Error::NoSpace);
                }
            }
        }
        Ok(Promise {
            store: self,
            blocks,
        })
    }

    /// Takes over a promise left by [`Promise::into_blocks`].
    pub fn adopt_promise(&self, blocks: u64) -> Promise<'_, C> {
        Promise {
            store: self,
            blocks,
        }
    }

    /// Reserves one run of 1 to `blocks` contiguous blocks, at `goal` if possible, out of `promise`.
    /// May commit a record of its own; the caller holds no node lock.
    pub fn reserve(
        &self,
        promise: &mut Promise<'_, C>,
        blocks: u32,
        goal: Option<Block>,
    ) -> Result<Reservation<'_, C>, Error> {
        let shard = self.shard();
        let blocks = blocks.min(self.array.geometry().chunk_blocks);
        let mut committed = false;
        loop {
            if let Some(extent) = self.space.take(shard, blocks, goal) {
                let geometry = self.array.geometry();
                let (chunk, _) = geometry.chunk_of(extent.block).expect("space is in chunks");
                match self.load_map(chunk) {
                    Ok(map) => {
                        promise.consume(extent.len as u64);
                        return Ok(Reservation {
                            store: self,
                            extent,
                            map,
                            taken: false,
                        });
                    }
                    Err(error) => {
                        not_used(chunk, &error);
                        self.space.unusable(chunk);
                    }
                }
                continue;
            }
            match self.space.next_source(shard) {
                Source::Loaded => {}
                Source::Load(chunk) => self.load_space(chunk),
                Source::Convert(chunk) => {
                    if let Err(error) = self.convert_chunk(chunk) {
                        self.space.unconverted(chunk);
                        return Err(error);
                    }
                    self.space.converted(chunk);
                }
                Source::None if !committed => {
                    committed = true;
                    self.settle_freed()?;
                    self.release_retired();
                    self.give_way()?;
                }
                Source::None => return Err(Error::NoSpace),
            }
        }
    }

    /// Makes the free blocks of a data chunk available. Allocation goes on without a chunk whose map is unreadable.
    fn load_space(&self, chunk: u32) {
        if let Err(error) = self.read_space(chunk) {
            let lost = self.space.unloadable(chunk);
            // One that others have retired meanwhile has no map, and that is right.
            if lost > 0 || !matches!(error, Error::Gone(_)) {
                not_used(chunk, &error);
            }
        }
    }

    fn read_space(&self, chunk: u32) -> Result<(), Error> {
        let map = self.load_map(chunk)?;
        let state = map.0.read();
        match &state.body {
            Body::Space(map) => {
                self.space.loaded(chunk, map.words());
                Ok(())
            }
            _ => Err(Error::Gone(space_map_nid(chunk))),
        }
    }

    /// Gives a free chunk a space map, in a record of its own.
    fn convert_chunk(&self, chunk: u32) -> Result<(), Error> {
        let last_version = self.last_version(space_map_nid(chunk))?;
        let mut op = self.begin(Need::Reclaim)?;
        op.create_map(chunk, last_version);
        op.commit();
        Ok(())
    }

    /// Turns data chunks without data into free ones, in records of their own; they can be
    /// used again once those are durable. No checkpoint runs meanwhile (checkpoint, invariant 5).
    pub(crate) fn retire_chunks(&self, _none_runs: &CheckpointState) {
        for chunk in self.space.take_empty_chunks(64) {
            if !matches!(self.retire_chunk(chunk), Ok(true)) {
                self.space.unretired(chunk);
                self.load_space(chunk);
            }
        }
        self.release_retired();
    }

    /// False when the chunk is in use again, or the journal has no room now: the checkpoint
    /// that makes room may be what calls this, so it must not wait for one.
    fn retire_chunk(&self, chunk: u32) -> Result<bool, Error> {
        let map = self.load_map(chunk)?;
        if self.journal.failed().is_some() {
            return Ok(false);
        }
        let Some(credit) = self.journal.try_credit(self.shard()) else {
            return Ok(false);
        };
        let mut op = Op::new(self, credit);
        if !op.delete_map(&map) {
            return Ok(false);
        }
        let epoch = op.commit();
        self.retired.lock().push((epoch.0, chunk));
        Ok(true)
    }

    /// Chunks whose space map is durably gone become free.
    pub(crate) fn release_retired(&self) {
        let mut retired = self.retired.lock();
        if retired.is_empty() {
            return;
        }
        let settled = self.settled_epoch();
        let ready = retired.extract_if(.., |(epoch, _)| *epoch <= settled);
        let chunks: Vec<u32> = ready.map(|(_, chunk)| chunk).collect();
        drop(retired);
        self.space.chunks_freed(&chunks);
    }

    pub fn space(&self) -> SpaceInfo {
        let geometry = self.array.geometry();
        let free_blocks = self.space.free_blocks();
        // What the next checkpoint will take beyond the reserve.
        let soon = self.dirty.beyond_reserve() / format::BLOCK_SIZE as i64;
        SpaceInfo {
            total_blocks: geometry.chunk_count as u64 * geometry.chunk_blocks as u64,
            free_blocks: free_blocks.saturating_sub(soon as u64),
            nodes: self.table.node_count(),
        }
    }

    /// For each chunk, whether segments of metadata lie in it.
    pub fn meta_chunks(&self) -> Vec<bool> {
        let live = self.segments.live();
        let count = self.array.geometry().chunk_count;
        (0..count).map(|chunk| live.contains_key(&chunk)).collect()
    }

    /// A run of blocks is inside the data area; fsck and readers check before use.
    pub fn is_data_extent(&self, extent: Extent) -> bool {
        let geometry = self.array.geometry();
        let last = Block(
            extent
                .block
                .0
                .saturating_add(extent.len.saturating_sub(1) as u64),
        );
        extent.len > 0
            && geometry.chunk_of(extent.block).is_some()
            && geometry.chunk_of(last).is_some()
    }
}

fn not_used(chunk: u32, error: &Error) {
    tracing::error!("free space of chunk {chunk} is not used: {error}");
}

/// Those of sorted chunks that have neighbours enough to be `least` in a row.
fn in_long_runs(chunks: &[u32], least: usize) -> impl Iterator<Item = u32> {
    let runs = chunks.chunk_by(|a, b| a + 1 == *b);
    runs.filter(move |run| run.len() >= least)
        .flatten()
        .copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestStore, create, format, log, options};
    use device::sim::SimDevice;

    /// While no checkpoint can be made, and the journal fills: from half on one is asked for, from three quarters on
    /// operations are slowed down, and none has to wait for a checkpoint before the ring is full.
    #[test]
    fn writers_ask_for_a_checkpoint_and_slow_down_before_the_journal_is_full() {
        let array = format(SimDevice::new(64 << 20, 1));
        let threads = StoreOptions {
            background: true,
            ..options()
        };
        let (store, _) = TestStore::open(array, threads).unwrap();
        let nid = create(&store, 100);
        store.sync().unwrap();
        let running = store.checkpoint_state.lock();
        let began = store.counts.get();
        let fill = || store.journal.fill_permille(0);
        let asked = || store.checkpoint_asked.load(Ordering::Relaxed);
        let seen = base::thread::parallel(2, |thread| {
            // The first one holds the lock of checkpoints.
            let (mut before, mut after, mut slowed) = ((false, 0), false, 0);
            while thread == 1 && fill() < 900 {
                log(&store, nid, 2000);
                let paced = store.counts.get().paced.count - began.paced.count;
                after |= fill() > 600 && asked();
                // What operations may need counts until they have ended, so this goes up and down a little.
                match fill() {
                    ..350 => before = (before.0 | asked(), paced),
                    350..650 => assert_eq!(paced, 0),
                    _ => slowed = paced,
                }
            }
            (before, after, slowed)
        });
        let (before, after, slowed) = seen[1];
        assert_eq!(before, (false, 0));
        // The store's thread may have taken the first question up, and waits then; whoever came next asked again.
        assert!(after);
        assert!(slowed > 100, "{slowed} operations were slowed down");
        assert_eq!(store.counts.get().stalled.count, began.stalled.count);
        drop(running);
        store.close().unwrap();
    }

    #[test]
    fn neighbours_are_one_run() {
        let chunks = [0, 1, 3, 5, 6, 7, 9];
        let of = |least| in_long_runs(&chunks, least).collect::<Vec<_>>();
        assert_eq!(of(0), chunks);
        assert_eq!(of(1), chunks);
        assert_eq!(of(2), [0, 1, 5, 6, 7]);
        assert_eq!(of(3), [5, 6, 7]);
        assert!(of(4).is_empty());
    }
}

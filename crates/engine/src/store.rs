//! The store: nodes, space and journal put together, and the threads that serve them.

mod durable;
mod space;

pub use space::SpaceInfo;

use crate::batches::{Unread, in_doubt};
use crate::cache::PageCache;
use crate::checkpoint::{CheckpointState, packers_for};
use crate::claims::FreshNid;
use crate::clean::HeldUp;
use crate::content::Content;
use crate::counters::{StoreCounters, StoreCounts};
use crate::dirty::{Dirty, DirtyNodes, reserve_chunks};
use crate::error::Error;
use crate::items;
use crate::journal::{Journal, Resume};
use crate::nids::{LeafNids, NidSource, Nids};
use crate::node::{Body, Cell, Node, NodeCache, ask_to_change, last_version, new_cell};
use crate::op::{Need, Op};
use crate::segments::Segments;
use crate::space::{ChunkState, Space};
use crate::sum::Sum;
use crate::table::{Entry, KEPT_SHARE, Table};
use crate::written::BytesWritten;
use base::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::clock::Clock;
use base::prefetch;
use base::sync::{Condvar, Handle, Mutex, rank};
use base::thread::{Pool, lane};
use device::{Array, Writer};
use format::item::Place;
use format::table::{LEAF_NIDS, SPACE_MAP_FIRST, space_map_nid};
use format::{BLOCK_SIZE, Damage, Nid};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Most bytes of records that may wait for a commit before one begins. No larger, because recovery looks for what
/// proves a loss only so far behind the journal's end (`batches.rs`).
pub const STAGING_MAX: usize = 4 << 20;

/// Threads of a checkpoint, and shards, at most.
pub const THREADS_MAX: usize = 64;

/// So many nodes ahead of the one that a checkpoint lets go of its memory is asked for.
const RELEASED_AHEAD: usize = 8;
/// Nodes that a worker lets go of at once, at least.
const RELEASED_LEAST: usize = 256;

/// How a store runs; none of it is on disk.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Bound on memory for clean nodes, in bytes. Pages of the node table take up to half as much besides
    /// ([`table_bytes_max`](Self::table_bytes_max)).
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

impl StoreOptions {
    /// Pages of the node table in memory beyond which some are evicted.
    pub(crate) fn page_limit(&self) -> usize {
        self.node_cache_bytes / 4 / BLOCK_SIZE
    }

    /// Memory that pages of the node table take at most, about, in bytes.
    pub fn table_bytes_max(&self) -> usize {
        KEPT_SHARE * self.page_limit() * BLOCK_SIZE
    }
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
    /// Bytes that metadata will grow by; see `growth.rs`.
    pub(crate) growth_promised: AtomicU64,
    /// Nodes that there were when recovery was done.
    pub(crate) nodes_opened: u64,
    /// How many more there are since.
    pub(crate) nodes_made: Sum,
    /// Room for checkpoints at which cleaning gained nothing any more; 0: it does.
    pub(crate) stalled_room: AtomicI64,
    pub(crate) held_up: Mutex<HeldUp>,
    /// The most that [`packers`](Self::packers) says.
    pub(crate) packers_most: usize,
    /// How many wait for what metadata can do without.
    pub(crate) data_waits: AtomicUsize,
    /// Sparse chunks that could not be emptied when data waited for them.
    pub(crate) emptied_in_vain: AtomicU64,
    /// Data chunks whose space map was deleted, with the epoch that must be durable first.
    pub(crate) retired: Mutex<Vec<(u64, u32)>>,
    pub(crate) checkpoint_state: Mutex<CheckpointState>,
    /// Free space that is being discarded is missing meanwhile.
    pub(crate) trimming: Mutex<()>,
    /// Held over a large operation (`large.rs`, invariant 3).
    pub(crate) large_turn: Mutex<()>,
    pub(crate) control: Arc<(Mutex<Control>, Condvar)>,
    /// As `checkpoint_wanted`, under whose lock it changes: who finds it set has nothing to ask for.
    pub(crate) checkpoint_asked: Arc<AtomicBool>,
    pub(crate) threads: Mutex<Vec<base::thread::JoinHandle>>,
    /// No operation begins any more.
    pub(crate) ending: AtomicBool,
    /// It has ended, and free space is discarded no more.
    pub(crate) at_rest: AtomicBool,
    /// How it ended.
    pub(crate) ended: Mutex<Option<Result<(), Error>>>,
    /// Nodes that replay could not bring up to date; only in a store open read-only. They are
    /// damaged to whoever asks: what the table has of them is old.
    pub(crate) unreplayed: BTreeMap<u64, Damage>,
    /// Data of which nobody knows whether it is what was synced; only a store that is open read-only has some.
    pub(crate) unread: Vec<Unread>,
    /// What lies where the journal's next batch would be is not returned.
    pub(crate) doubt: Option<device::Error>,
    pub(crate) counts: StoreCounts,
    pool: Arc<Pool>,
    /// Last: nothing of the store is at work when others may write.
    writer: OnceLock<Writer>,
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
        let used = self.table.bitmap(region as u64);
        used.inspect_err(|error| {
            if !Self::may_pass(error) {
                tracing::warn!("free nids of region {region} are not used: {error}");
            }
        })
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
            // It may pass, and others are used meanwhile.
            Err(error) => {
                tracing::warn!("free nids of {LEAF_NIDS} from {first} on are not used: {error}");
                Err(error)
            }
            Ok(()) => Ok(versions),
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
            nodes_opened: parts.table.node_count(),
            table: parts.table,
            segments: Segments::new(geometry, parts.live, dirty.limit / 64),
            dirty,
            frugal_room: AtomicI64::new(0),
            growth_spare: AtomicI64::new(0),
            growth_promised: AtomicU64::new(0),
            // Who looks adds up all parts: none is ever handed over.
            nodes_made: Sum::new(options.shards, i64::MAX),
            stalled_room: AtomicI64::new(0),
            held_up: Mutex::new(rank::LEAF, HeldUp::default()),
            packers_most: packers_for(reserve as usize * geometry.segments_per_chunk() as usize)
                .min(options.workers),
            data_waits: AtomicUsize::new(0),
            emptied_in_vain: AtomicU64::new(0),
            retired: Mutex::new(rank::SPACE_PENDING, Vec::new()),
            checkpoint_state: Mutex::new(rank::CHECKPOINT, parts.checkpoint_state),
            trimming: Mutex::new(rank::TRIM, ()),
            large_turn: Mutex::new(rank::LARGE_OPERATION, ()),
            control: Arc::new((Mutex::new(rank::LEAF, Control::default()), Condvar::new())),
            checkpoint_asked: Arc::new(AtomicBool::new(false)),
            threads: Mutex::new(rank::LEAF, Vec::new()),
            ending: AtomicBool::new(false),
            at_rest: AtomicBool::new(false),
            ended: Mutex::new(rank::STORE_END, None),
            unreplayed: BTreeMap::new(),
            unread: Vec::new(),
            doubt: None,
            counts: StoreCounts::default(),
            pool,
            array,
            options,
            writer: OnceLock::new(),
        })
    }

    /// From now on the journal goes on there; nobody has used it.
    pub(crate) fn resume(&mut self, resume: Resume) {
        let (array, pool) = (Arc::clone(&self.array), Arc::clone(&self.pool));
        self.journal = Journal::new(array, pool, &self.options, resume);
    }

    pub fn array(&self) -> &Arc<Array> {
        &self.array
    }

    /// Nobody else writes to the array until the store is gone. Whoever opened it has taken the right before that.
    pub fn keep(&self, writer: Writer) {
        let first = self.writer.set(writer).is_ok();
        debug_assert!(first, "one opens a store");
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

    /// Says of something that was synced last that a device does not return it, if there is or may be such data: only a store that is open
    /// read-only may have any.
    pub fn unread(&self) -> Option<String> {
        let doubt = self.doubt.as_ref().map(in_doubt);
        doubt.or_else(|| self.unread.first().map(ToString::to_string))
    }

    /// Says of a node that the journal cannot be replayed on why that is, if there is one: only a store that is open read-only may have any.
    pub fn unreplayed(&self) -> Option<String> {
        let first = self.unreplayed.iter().next();
        first.map(|(nid, damage)| Error::node(Nid(*nid), damage.clone()).to_string())
    }

    /// Whether the journal has something that could not be replayed, or may be read wrong: only a store that is open read-only
    /// may have, and what it has replayed goes to no device before a repair.
    pub fn is_partly_replayed(&self) -> bool {
        !self.unreplayed.is_empty() || !self.unread.is_empty() || self.doubt.is_some()
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

    /// Why no operation may go on. The caller has its credit: whoever ends the store waits for it, or it finds that here.
    pub(crate) fn refused(&self) -> Option<Error> {
        match self.ending.load(Ordering::SeqCst) {
            true => Some(self.failed().unwrap_or(Error::ReadOnly)),
            false => self.failed(),
        }
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

    /// Asks for the memory in which the reference to a node lies, for who will look for the node after doing something else. A hint.
    #[inline]
    pub fn ask(&self, nid: Nid) {
        self.nodes.ask(nid);
    }

    /// Asks for the memory of a node, for who has let its reference come ([`ask`](Self::ask)). A hint; false: the node is not in memory.
    #[inline]
    pub fn ask_node(&self, nid: Nid) -> bool {
        self.nodes.ask_node(nid, prefetch::shared)
    }

    /// [`ask_node`](Self::ask_node) for who will lock the node exclusively.
    #[inline]
    pub fn ask_node_to_change(&self, nid: Nid) -> bool {
        self.nodes.ask_node(nid, ask_to_change)
    }

    /// [`get_to_change`](Self::get_to_change), if the node is in memory and there is none that could not be replayed.
    #[inline]
    pub fn at_hand(&self, nid: Nid) -> Option<Node<C>> {
        let usable = nid.0 < SPACE_MAP_FIRST && self.unreplayed.is_empty();
        let found = usable.then(|| self.nodes.get_to_change(nid))?;
        Some(Node(Handle::common(found?)))
    }

    /// [`get`](Self::get) for a node that one core at a time has to do with, as whoever asks changes it mostly:
    /// nothing is kept for the caller's core.
    #[inline]
    pub fn get_once(&self, nid: Nid) -> Result<Node<C>, Error> {
        let found = self.nodes.get(nid);
        self.found_once(nid, found.map(Handle::common))
    }

    /// [`get_once`](Self::get_once) for who will lock the node exclusively.
    #[inline]
    pub fn get_to_change(&self, nid: Nid) -> Result<Node<C>, Error> {
        let found = self.nodes.get_to_change(nid);
        self.found_once(nid, found.map(Handle::common))
    }

    #[inline(always)]
    fn found_once(&self, nid: Nid, found: Option<Handle<Cell<C>>>) -> Result<Node<C>, Error> {
        match found {
            _ if nid.0 >= SPACE_MAP_FIRST => Err(Error::Gone(nid)),
            Some(cell) if self.unreplayed.is_empty() => Ok(Node(cell)),
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
    /// to [`get`](Self::get) one after the other. A node that cannot be read is left to `get`, which tells why, and so is
    /// the only one that is missing. Returns how many were missing.
    pub fn read_ahead(&self, nids: impl IntoIterator<Item = Nid>) -> usize {
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
            return wanted.len();
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
        wanted.len()
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
        let body = items::node_in(self.array.checksum_seed(), image, nid, entry.version)
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
        let shard = self.shard();
        let (nid, last_version) = loop {
            let taken = self.nids.take(shard, self)?;
            let (nid, last_version) = taken.ok_or(Error::NoSpace)?;
            match self.table.prepare(nid) {
                Ok(()) => break (nid, last_version),
                // What is free there has become useless since it was found, all of it at once.
                Err(error) => {
                    tracing::error!("free nids beside node {nid} are not used: {error}");
                    let for_now = Self::may_pass(&error);
                    self.nids.leave_leaf(shard, nid, for_now);
                }
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
    /// [`Error::NoSpace`] when the array is too full for this `need`;
    /// [`Error::ReadOnly`] or [`Error::Failed`] when nothing can be changed.
    pub fn begin(&self, need: Need) -> Result<Op<'_, C>, Error> {
        base::sync::assert_none_held_from(rank::INODE);
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        let mut tried = false;
        loop {
            if !self.has_room_for(need, 0) {
                if tried {
                    return Err(Error::NoSpace);
                }
                tried = true;
                self.find_room()?;
                continue;
            }
            self.before_operation()?;
            let checkpoint = self.journal.checkpoint_sequence.load(Ordering::SeqCst);
            let pressure = self.dirty.pressure();
            let shard = self.shard();
            if pressure <= 1000
                && let Some(credit) = self.journal.try_credit(shard)
            {
                if let Some(error) = self.refused() {
                    self.journal.return_credit(credit);
                    return Err(error);
                }
                self.pace(shard, pressure);
                return Ok(Op::new(self, credit));
            }
            self.make_room(checkpoint)?;
        }
    }

    /// For who may not grow: what others can do without, and what was freed.
    pub(crate) fn find_room(&self) -> Result<(), Error> {
        self.give_way()?;
        self.reclaim()
    }

    /// What must be put in order before an operation begins.
    #[inline]
    pub(crate) fn before_operation(&self) -> Result<(), Error> {
        if self.free_meta_bytes() < self.clean_room() / 2 {
            self.clean_up()?;
            self.leave_last_room()?;
        }
        self.bound_staging()
    }

    /// Bytes of changed metadata that wait for a checkpoint, roughly.
    pub fn dirty_metadata_bytes(&self) -> u64 {
        self.dirty.to_write().max(0) as u64
    }

    /// Bytes of changed nodes, in memory or to be written, at which a checkpoint begins, at the least.
    pub fn dirty_limit(&self) -> u64 {
        self.dirty.least_limit() as u64
    }

    /// Bytes of metadata once what is dirty is written.
    pub(crate) fn metadata_about(&self) -> u64 {
        self.segments.live_about() + self.dirty.to_write().max(0) as u64
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
    pub(crate) fn give_way(&self) -> Result<(), Error> {
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

    /// Lets go of nodes that were captured, on the store's threads and the caller's: each count
    /// of references is one that another core has written.
    pub(crate) fn release(&self, lists: Vec<Vec<Dirty<C>>>) {
        let nodes: usize = lists.iter().map(Vec::len).sum();
        let share = nodes.div_ceil(self.options.workers).max(RELEASED_LEAST);
        let mut parts = Vec::new();
        for mut list in lists {
            while list.len() > share {
                parts.push(list.split_off(list.len() - share));
            }
            parts.push(list);
        }
        let release = |part: &mut Vec<Dirty<C>>| {
            base::trace::mark("release");
            while let Some(one) = part.pop() {
                if part.len().is_multiple_of(RELEASED_LEAST) {
                    // The rest could be another worker's.
                    base::trace::mark("release");
                }
                if let Some(later) = part.len().checked_sub(RELEASED_AHEAD) {
                    ask_to_change(&part[later].cell);
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

    /// Brings the charges of a cell up to date; the caller holds its lock exclusively.
    pub(crate) fn recharge(&self, cell: &Cell<C>, body: &Body<C>) {
        let grown = self.nodes.recharge(cell, body);
        if cell.header.dirty_grew(grown) {
            self.dirty.charge(grown);
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

    /// [`mark_dirty`](Self::mark_dirty) for a node that nobody else can find yet.
    pub(crate) fn mark_new(&self, shard: usize, cell: &base::sync::Arc<Cell<C>>) {
        cell.header.dirty.store(true, Ordering::Release);
        let charge = cell.header.first_charge();
        let lists = &self.dirty.lists;
        lists[shard % lists.len()].lock().push(Dirty {
            nid: cell.header.nid,
            cell: cell.clone(),
        });
        self.dirty.charge(charge);
        self.dirty.leaves.touch(cell.header.nid);
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
        self.dirty.charge(cell.header.dirty_charge());
        self.dirty.leaves.touch(cell.header.nid);
    }
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
}

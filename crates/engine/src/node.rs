//! Nodes in memory: cells, references, guards, and the cache that holds them.
//!
//! Invariants:
//! 1. At most one cell per nid is in the cache, and it holds the newest version. A reused nid
//!    gets a fresh cell; holders of the old one find it gone.
//! 2. A dirty cell (its newest version is in no image that the table names) is not evicted,
//!    and neither is one that anybody else refers to. Cores that hold it without using it let go then (`held.rs`).
//! 3. A cell read from a device enters the cache only if the table still names the image it
//!    was read from, checked under the shard's lock.

use crate::content::Content;
use crate::dirty::Charge;
use crate::error::Error;
use crate::held::{Glance, HeldNodes};
use crate::nids::LeafNids;
use crate::space_map::SpaceMap;
use crate::sum::{Padded, Sum};
use base::atomic::{AtomicBool, AtomicU32, Ordering};
use base::map::{shard_of, shards_for};
use base::prefetch;
use base::sync::{Arc, Handle, Keyed, Mutex, MutexGuard, OwnedReadGuard, Rank, RwLock, rank};
use base::thread::{current_cpu, lane};
use base::tight::limit;
use format::item::{ItemKind, padded_len};
use format::table::{KIND_SPACE_MAP, LEAF_NIDS, REGION_NIDS};
use format::{Damage, Nid};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Deref;

/// What a cell knows without its lock. What a look-up looks at is last, beside the lock.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct CellHeader {
    /// Bytes charged to the cache; 0 once another cell took the place.
    bytes: AtomicU32,
    /// Bytes of its image, as charged.
    image: AtomicU32,
    /// Charged to the store while dirty.
    dirty_memory: AtomicU32,
    dirty_image: AtomicU32,
    /// Bytes of changes since the charge was brought up to date.
    uncharged: AtomicU32,
    pub nid: Nid,
    /// What [`Content::merges`] said at the last exclusive change: right for who holds the lock.
    pub merges: AtomicBool,
    /// On a dirty list, or about to be captured by the running checkpoint.
    pub dirty: AtomicBool,
    /// Of a kind that belongs to an inode; decides the lock's rank.
    owned: bool,
    /// Looked up since the clock hand last passed.
    recent: AtomicBool,
    /// Its node was deleted, and its nid may have another cell.
    gone: AtomicBool,
    /// [`Seekers`]. Changed under the shard's lock.
    seekers: AtomicU32,
    /// See [`Content::leads`].
    leads: bool,
}

/// Bytes of changes that a charge may lag behind, and part of a larger image that it may: working
/// it out looks at every entry.
const UNCHARGED_MAX: u32 = 128;
const UNCHARGED_PART: u32 = 8;
/// Bytes that an image is charged for beyond its own, for what it may grow uncharged.
const IMAGE_SLACK: usize = 32;

/// Images of fewer bytes are not looked at for having shrunk.
const SHRUNK_MIN: usize = 2 << 10;

/// Look-ups by another core than the one before after which each core holds a node by itself; of a node on the way to others also
/// those after another core's of any node in its shard: directories that were made one after the other lie in one shard, and in each
/// of them another core works.
const COMMON: u32 = 16;
/// The latter count as long as no more look-ups of the shard come between them: nodes that are looked up
/// here and there are not held, of which a core would hold too many.
const BETWEEN: u32 = 16;

/// Who looked a node up, as far as it decides whether cores hold it by themselves: all in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seekers {
    /// Look-ups by another core than the one before, up to [`COMMON`].
    of_others: u32,
    /// Look-ups, one soon after the other, each after another core's of something else.
    disturbed: u32,
    /// The core that looked it up last.
    core: u32,
    /// The number of the last look-up that was disturbed.
    number: u32,
}

impl Seekers {
    const COUNT: u32 = 5;
    const REST: u32 = 11;
    /// Cores and numbers are told apart up to here.
    const MASK: u32 = (1 << Self::REST) - 1;

    fn alone(core: usize) -> Seekers {
        Seekers {
            of_others: 0,
            disturbed: 0,
            core: core as u32 & Self::MASK,
            number: 0,
        }
    }

    fn pack(self) -> u32 {
        let counts = self.of_others << Self::COUNT | self.disturbed;
        (counts << Self::REST | self.core) << Self::REST | self.number
    }

    fn unpack(word: u32) -> Seekers {
        let (counts, count) = (word >> (2 * Self::REST), (1 << Self::COUNT) - 1);
        Seekers {
            of_others: counts >> Self::COUNT,
            disturbed: counts & count,
            core: word >> Self::REST & Self::MASK,
            number: word & Self::MASK,
        }
    }

    fn most() -> u32 {
        limit(COMMON as usize, 2) as u32
    }

    /// Cores are to hold it by themselves.
    fn are_common(self) -> bool {
        self.of_others >= Self::most() || self.disturbed >= Self::most()
    }

    fn seek(&mut self, seeking: Seeking, leads: bool) {
        let (core, number) = (
            seeking.core as u32 & Self::MASK,
            seeking.number & Self::MASK,
        );
        self.of_others += u32::from(self.core != core);
        self.core = core;
        if leads && seeking.disturbed {
            let between = number.wrapping_sub(self.number) & Self::MASK;
            self.disturbed = match between > BETWEEN + 1 {
                true => 1,
                false => self.disturbed + 1,
            };
            self.number = number;
        }
    }
}

impl CellHeader {
    /// See [`Node::is_owned`].
    pub fn is_owned(&self) -> bool {
        self.owned
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// The caller holds the cell's lock exclusively, or has replaced it.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    #[inline]
    pub fn note_use(&self) {
        if !self.recent.load(Ordering::Relaxed) {
            self.recent.store(true, Ordering::Relaxed);
        }
    }

    /// Whether it was looked up since the clock hand last asked. That is a hint, so no exchange is needed, for which the
    /// processor would wait until all it has asked memory for is there.
    fn was_used(&self) -> bool {
        let recent = self.recent.load(Ordering::Relaxed);
        if recent {
            self.recent.store(false, Ordering::Relaxed);
        }
        recent
    }

    /// Counts a look-up; true if cores are to hold it by themselves.
    #[inline]
    fn is_sought(&self, seeking: Seeking) -> bool {
        let word = self.seekers.load(Ordering::Relaxed);
        // One core alone, so far, and no other beside it.
        let alone = word >> Seekers::REST == seeking.core as u32 & Seekers::MASK;
        !(alone && !(self.leads && seeking.disturbed)) && self.is_sought_by_others(seeking)
    }

    #[inline(never)]
    fn is_sought_by_others(&self, seeking: Seeking) -> bool {
        let word = self.seekers.load(Ordering::Relaxed);
        let mut seekers = Seekers::unpack(word);
        if !seekers.are_common() {
            seekers.seek(seeking, self.leads);
            let now = seekers.pack();
            if now != word {
                self.seekers.store(now, Ordering::Relaxed);
            }
        }
        seekers.are_common()
    }

    /// Some core may hold it by itself.
    fn is_common(&self) -> bool {
        Seekers::unpack(self.seekers.load(Ordering::Relaxed)).are_common()
    }

    /// What becoming dirty charges.
    pub fn dirty_charge(&self) -> Charge {
        let memory = self.bytes.load(Ordering::Relaxed) as usize;
        let charge = Charge::of_dirty(memory, self.image.load(Ordering::Relaxed) as usize);
        // Who marks a node without its lock may find that it grew meanwhile.
        let charged = |of: &AtomicU32, now: i64| of.swap(now as u32, Ordering::Relaxed) as i32;
        Charge {
            memory: charge.memory - i64::from(charged(&self.dirty_memory, charge.memory)),
            image: charge.image - i64::from(charged(&self.dirty_image, charge.image)),
        }
    }

    /// Counts a change of this many bytes; true when the charge must be brought up to date.
    /// The caller holds the cell's lock exclusively.
    pub fn changed(&self, bytes: usize) -> bool {
        // Under that lock, so no exchange is needed.
        let uncharged = self.uncharged.load(Ordering::Relaxed) + bytes as u32;
        self.uncharged.store(uncharged, Ordering::Relaxed);
        let part = self.image.load(Ordering::Relaxed) / UNCHARGED_PART;
        uncharged > part.max(UNCHARGED_MAX)
    }

    /// Its charge has become much too large: what takes bytes away is itself short. `now` are the image's bytes.
    pub fn shrank(&self, now: impl FnOnce() -> usize) -> bool {
        let image = self.image.load(Ordering::Relaxed) as usize;
        image > SHRUNK_MIN && now() < image / 2
    }

    /// A dirty node grew by this much; true if it is dirty. The caller holds the cell's lock
    /// exclusively, so no checkpoint is between giving back its charge and taking it.
    pub fn dirty_grew(&self, by: Charge) -> bool {
        let dirty = self.dirty.load(Ordering::Acquire);
        if dirty {
            // Wraps as a subtraction does.
            let (memory, image) = (by.memory as u32, by.image as u32);
            self.dirty_memory.fetch_add(memory, Ordering::Relaxed);
            self.dirty_image.fetch_add(image, Ordering::Relaxed);
        }
        dirty
    }

    /// What becoming clean gives back. Less than nothing when the node shrank while it was marked without its lock: then
    /// the first charge had the new size already, and the shrinking was charged besides.
    pub fn dirty_refund(&self) -> Charge {
        Charge {
            memory: i64::from(self.dirty_memory.swap(0, Ordering::Relaxed) as i32),
            image: i64::from(self.dirty_image.swap(0, Ordering::Relaxed) as i32),
        }
    }
}

/// Nodes of one rank are locked in the order of their nids.
impl Keyed for CellHeader {
    fn key(&self) -> u64 {
        self.nid.0
    }
}

#[derive(Debug)]
#[repr(C)]
pub(crate) struct State<C> {
    pub body: Body<C>,
    pub version: u64,
}

#[derive(Debug)]
pub(crate) enum Body<C> {
    Gone,
    Space(SpaceMap),
    User(C),
}

pub(crate) type Cell<C> = RwLock<State<C>, CellHeader>;

/// Asks for the memory of a node of which the counts, the header or the lock will be changed.
#[inline]
pub(crate) fn ask_to_change<C>(cell: &Arc<Cell<C>>) {
    prefetch::shared_to_change(cell, size_of::<Cell<C>>() - size_of::<State<C>>());
}

impl<C: Content> Body<C> {
    pub fn kind(&self) -> u8 {
        match self {
            Body::Gone => 0,
            Body::Space(_) => KIND_SPACE_MAP,
            Body::User(content) => content.kind(),
        }
    }

    pub fn decode(kind: u8, bytes: &[u8]) -> Result<Self, Damage> {
        if kind == KIND_SPACE_MAP {
            Ok(Body::Space(SpaceMap::decode(bytes)?))
        } else if kind >= format::table::FIRST_FS_KIND {
            Ok(Body::User(C::decode(kind, bytes)?))
        } else {
            Err(Damage::new("node", format!("unknown kind {kind}")))
        }
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Body::Gone => {}
            Body::Space(map) => map.encode(out),
            Body::User(content) => content.encode(out),
        }
    }

    /// Appends the node's image as an item.
    pub fn encode_item(&self, nid: Nid, version: u64, out: &mut Vec<u8>) {
        format::item::encode(out, ItemKind::Node, self.kind(), nid.0, version, |o| {
            self.encode(o)
        });
    }

    pub fn merges(&self) -> bool {
        matches!(self, Body::User(content) if content.merges())
    }

    /// Whether merged changes are pending.
    pub fn is_pending(&self) -> bool {
        matches!(self, Body::User(content) if content.pending())
    }

    /// Makes pending changes part of the image.
    pub fn settle(&mut self) {
        if let Body::User(content) = self {
            content.settle();
        }
    }

    pub fn memory(&self) -> usize {
        match self {
            Body::Gone => 0,
            Body::Space(map) => map.words().len() * 8,
            Body::User(content) => content.memory(),
        }
    }

    /// Bytes charged for its image.
    pub fn image(&self) -> usize {
        let payload = match self {
            Body::Gone => return 0,
            Body::Space(map) => map.words().len() * 8 + 64,
            Body::User(content) => content.image_len(),
        };
        padded_len(payload) + IMAGE_SLACK
    }
}

/// Memory of a group's entries in the map, at its usual load, and in the clock.
const GROUP_BYTES: i64 = (size_of::<(u64, Group<()>)>() * 3 / 2 + 16) as i64;

/// Fixed part of a cell's memory: itself, with counts and the allocator's share.
const fn cell_overhead<C>() -> usize {
    (size_of::<Cell<C>>() + 24).next_multiple_of(16)
}

/// Whether a node is owned, and the rank of its lock: constant over a cell's life.
fn place_of<C: Content>(body: &Body<C>) -> (bool, Rank) {
    match body {
        Body::Space(_) => (false, rank::SPACE_MAP),
        Body::User(content) if C::owned(content.kind()) => (true, rank::OWNED_NODE),
        _ => (false, rank::INODE),
    }
}

/// Whether a body is on the way to others: constant over a cell's life, too.
fn leads<C: Content>(body: &Body<C>) -> bool {
    matches!(body, Body::User(content) if content.leads())
}

/// Whether a body of this kind can be in this cell.
pub(crate) fn suits<C: Content>(cell: &Cell<C>, body: &Body<C>) -> bool {
    let CellHeader {
        owned,
        leads: on_way,
        ..
    } = cell.header;
    matches!(body, Body::Gone) || (place_of(body), leads(body)) == ((owned, cell.rank()), on_way)
}

pub(crate) fn new_cell<C: Content>(nid: Nid, version: u64, body: Body<C>) -> Arc<Cell<C>> {
    let (owned, lock_rank) = place_of(&body);
    let header = CellHeader {
        leads: leads(&body),
        nid,
        owned,
        dirty: AtomicBool::new(false),
        recent: AtomicBool::new(true),
        gone: AtomicBool::new(false),
        seekers: AtomicU32::new(Seekers::alone(lane()).pack()),
        bytes: AtomicU32::new((cell_overhead::<C>() + body.memory()) as u32),
        image: AtomicU32::new(body.image() as u32),
        dirty_memory: AtomicU32::new(0),
        dirty_image: AtomicU32::new(0),
        uncharged: AtomicU32::new(0),
        merges: AtomicBool::new(body.merges()),
    };
    Arc::new(RwLock::with_header(
        lock_rank,
        header,
        State { version, body },
    ))
}

/// The version of a cell whose nid is in nobody's hands. Only the operation that deleted the node
/// can hold the cell, and it is about to let go without waiting for anything; so this look may
/// come in any lock order.
pub(crate) fn last_version<C>(cell: &Cell<C>) -> u64 {
    loop {
        if let Some(state) = cell.try_read() {
            return state.version;
        }
        base::thread::yield_now();
    }
}

/// A reference to a node; the node stays in memory while one exists.
#[derive(Debug)]
pub struct Node<C>(pub(crate) Handle<Cell<C>>);

impl<C> Clone for Node<C> {
    fn clone(&self) -> Self {
        Node(self.0.clone())
    }
}

impl<C: Content> Node<C> {
    pub fn nid(&self) -> Nid {
        self.0.header.nid
    }

    /// Whether it is of a kind that belongs to an inode. Who expects the other kind must not
    /// lock it: the two have different places in the lock order.
    pub fn is_owned(&self) -> bool {
        self.0.header.owned
    }

    /// Locks the node shared. [`Error::Gone`] when it was deleted meanwhile.
    #[inline]
    pub fn read(&self) -> Result<NodeRead<C>, Error> {
        self.clone().into_read()
    }

    /// [`Node::read`] for who needs the reference no more.
    #[inline(always)]
    pub fn into_read(self) -> Result<NodeRead<C>, Error> {
        let guard = self.0.read_owned();
        match guard.body {
            Body::User(_) => Ok(NodeRead(guard)),
            _ => Err(Self::gone(guard)),
        }
    }

    #[cold]
    #[inline(never)]
    fn gone(guard: OwnedReadGuard<State<C>, CellHeader>) -> Error {
        Error::Gone(guard.lock().header.nid)
    }
}

/// A shared lock on a node's content.
#[derive(Debug)]
pub struct NodeRead<C>(OwnedReadGuard<State<C>, CellHeader>);

impl<C> NodeRead<C> {
    pub fn version(&self) -> u64 {
        self.0.version
    }

    pub fn nid(&self) -> Nid {
        self.0.lock().header.nid
    }
}

impl<C> Deref for NodeRead<C> {
    type Target = C;
    fn deref(&self) -> &C {
        match &self.0.body {
            Body::User(content) => content,
            _ => unreachable!("checked when the guard was made"),
        }
    }
}

/// Spreads nids over hash buckets (Fibonacci hashing); nids are ours, nobody can flood it.
#[derive(Default)]
pub(crate) struct NidHasher(u64);

impl Hasher for NidHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte as u64);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(29);
    }
}

pub(crate) type NidMap<V> = HashMap<u64, V, BuildHasherDefault<NidHasher>>;

/// Cells of neighbouring nids. Who makes or removes nodes in the order of their nids finds several of them on one line.
type Group<C> = [Option<Arc<Cell<C>>>; NEIGHBOURS];

/// A nid's group, and its place there.
fn place_in_group(nid: Nid) -> (u64, usize) {
    let neighbours = NEIGHBOURS as u64;
    (nid.0 / neighbours, (nid.0 % neighbours) as usize)
}

#[derive(Debug)]
struct Shard<C> {
    /// By number; none is empty.
    groups: NidMap<Group<C>>,
    /// The clock: all groups, in the order the hand meets them.
    clock: VecDeque<u64>,
    /// The core that looked for a node here last, and how many look-ups there were.
    seeker: usize,
    lookups: u32,
}

/// A look-up in a shard.
#[derive(Clone, Copy, Debug)]
struct Seeking {
    core: usize,
    /// Another core came before.
    disturbed: bool,
    /// In the order of the shard's look-ups.
    number: u32,
}

impl<C> Shard<C> {
    /// A core looks for a node.
    #[inline]
    fn sought_by(&mut self, core: usize) -> Seeking {
        self.lookups = self.lookups.wrapping_add(1);
        Seeking {
            core,
            disturbed: std::mem::replace(&mut self.seeker, core) != core,
            number: self.lookups,
        }
    }

    #[inline]
    fn get(&self, nid: Nid) -> Option<&Arc<Cell<C>>> {
        let (group, place) = place_in_group(nid);
        self.groups.get(&group)?[place].as_ref()
    }

    /// Puts a cell in its place; returns what was there, and by how many bytes the shard grew.
    fn put(&mut self, cell: Arc<Cell<C>>) -> (Option<Arc<Cell<C>>>, i64) {
        let (number, place) = place_in_group(cell.header.nid);
        match self.groups.entry(number) {
            Entry::Occupied(mut group) => (group.get_mut()[place].replace(cell), 0),
            Entry::Vacant(entry) => {
                entry.insert(Group::default())[place] = Some(cell);
                self.clock.push_back(number);
                (None, GROUP_BYTES)
            }
        }
    }
}

/// All nodes in memory, bounded by `limit` bytes as far as clean ones can be dropped.
///
/// Neighbouring nids are in one group of one shard: a core that makes nodes of the nids it has ready uses one
/// shard several times, and seldom one that another core uses. Few are neighbours, because the
/// directories of many cores may be, and because of most files in a large tree no neighbour may be in memory.
#[derive(Debug)]
pub(crate) struct NodeCache<C> {
    shards: Box<[Padded<Mutex<Shard<C>>>]>,
    held: HeldNodes<C>,
    bytes: Sum,
    limit: i64,
}

/// Nids that are neighbours.
const NEIGHBOURS: usize = 8;
/// Shards for each of a few cores: so many that two cores seldom meet in one.
const SHARDS: usize = 64;
/// Groups that the clock hand looks at for a cell that comes, at most; and so many are likely.
const LOOKS: usize = 8;
const LOOKS_AHEAD: usize = 1;
/// Part of the limit by which the charges may be wrong.
const SLACK: usize = 64;

impl<C: Content> NodeCache<C> {
    /// A cache for so many cores.
    pub fn new(cores: usize, limit: usize) -> Self {
        let shard = |i| {
            let shard = Shard {
                groups: NidMap::default(),
                clock: VecDeque::new(),
                seeker: 0,
                lookups: 0,
            };
            Padded(Mutex::keyed(rank::NODE_SHARD, i as u64, shard))
        };
        let shards = shards_for(cores, SHARDS);
        NodeCache {
            shards: (0..shards).map(shard).collect(),
            held: HeldNodes::new(cores),
            bytes: Sum::new(cores, (limit / SLACK) as i64),
            limit: limit as i64,
        }
    }

    /// Bytes that the nodes take, while nobody changes any.
    pub fn bytes(&self) -> usize {
        self.bytes.exact().max(0) as usize
    }

    /// The number of a nid's shard. Cores take nids along regions of their own.
    #[inline]
    fn shard_of(&self, nid: Nid) -> usize {
        let row = REGION_NIDS / NEIGHBOURS as u64;
        shard_of(place_in_group(nid).0, row, self.shards.len())
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard<C>> {
        self.shards[shard].lock()
    }

    /// The node, of which the lines come at once, not each when it is looked at.
    pub fn get(&self, nid: Nid) -> Option<Arc<Cell<C>>> {
        self.get_once(nid, prefetch::shared)
    }

    /// [`get`](Self::get) for who will change the node.
    pub fn get_to_change(&self, nid: Nid) -> Option<Arc<Cell<C>>> {
        self.get_once(nid, ask_to_change)
    }

    #[inline]
    fn get_once(&self, nid: Nid, ask: impl FnOnce(&Arc<Cell<C>>)) -> Option<Arc<Cell<C>>> {
        let mut shard = self.lock(self.shard_of(nid));
        shard.sought_by(lane());
        let cell = shard.get(nid)?;
        ask(cell);
        cell.header.note_use();
        Some(Arc::clone(cell))
    }

    /// [`get`](Self::get) for what many cores may look up: then each finds it by itself from then on.
    #[inline(never)]
    pub fn get_held(&self, core: usize, nid: Nid) -> Option<Handle<Cell<C>>> {
        if let Some(held) = self.held.get(core, nid) {
            return Some(held);
        }
        let mut shard = self.lock(self.shard_of(nid));
        let seeking = shard.sought_by(core);
        let cell = shard.get(nid)?;
        cell.header.note_use();
        let cell = Arc::clone(cell);
        match cell.header.is_sought(seeking) {
            true => Some(self.hold(shard, core, cell)),
            false => Some(Handle::common(cell)),
        }
    }

    /// Has a look at a node that is in memory, without a reference to it: `look` is called under the lock of a table, so it
    /// takes no lock. `None` also where that would wait, or counts (`is_sought`, [`RwLock::try_read_again`]): ask for the
    /// node then.
    #[inline]
    pub fn glance<R>(&self, core: usize, nid: Nid, look: impl Fn(&C) -> Option<R>) -> Option<R> {
        let look = |cell: &Cell<C>| match &cell.try_read_again()?.body {
            Body::User(content) => look(content),
            _ => None,
        };
        if !self.held.is_empty(core) {
            match self.held.glance(core, nid, look) {
                Glance::Looked(found) => return found,
                Glance::Elsewhere => {}
            }
        }
        let mut shard = self.lock(self.shard_of(nid));
        let seeking = shard.sought_by(core);
        let cell = shard.get(nid)?;
        cell.header.note_use();
        match cell.header.is_sought(seeking) {
            true => None,
            false => look(cell),
        }
    }

    #[inline(never)]
    fn hold(
        &self,
        shard: MutexGuard<'_, Shard<C>>,
        core: usize,
        cell: Arc<Cell<C>>,
    ) -> Handle<Cell<C>> {
        drop(shard);
        match cell.header.is_gone() {
            true => Handle::common(cell),
            false => self.held.put(core, cell),
        }
    }

    pub fn contains(&self, nid: Nid) -> bool {
        self.lock(self.shard_of(nid)).get(nid).is_some()
    }

    /// Versions of cells in the cache, for nids from `first`, a leaf's, on that have a bit in
    /// `wanted` and are in nobody's hands; returns those found.
    pub fn versions(
        &self,
        first: Nid,
        wanted: &LeafNids,
        versions: &mut [u64; LEAF_NIDS as usize],
    ) -> LeafNids {
        let mut found = LeafNids::default();
        let mut busy = Vec::new();
        for group in (0..LEAF_NIDS as usize).step_by(NEIGHBOURS) {
            let mut rest = wanted[group / 64] >> (group % 64) & ((1 << NEIGHBOURS) - 1);
            if rest == 0 {
                continue;
            }
            let shard = self.lock(self.shard_of(Nid(first.0 + group as u64)));
            while rest != 0 {
                let i = group + rest.trailing_zeros() as usize;
                rest &= rest - 1;
                let Some(cell) = shard.get(Nid(first.0 + i as u64)) else {
                    continue;
                };
                found[i / 64] |= 1 << (i % 64);
                match cell.try_read() {
                    Some(state) => versions[i] = state.version,
                    None => busy.push((i, Arc::clone(cell))),
                }
            }
        }
        for (i, cell) in busy {
            versions[i] = last_version(&cell);
        }
        found
    }

    /// Puts a cell in place of whatever the nid had (invariant 1).
    pub fn insert(&self, cell: Arc<Cell<C>>) {
        let mut charge = cell.header.bytes.load(Ordering::Relaxed) as i64;
        let mut shard = self.lock(self.shard_of(cell.header.nid));
        let (old, grown) = shard.put(cell);
        if let Some(old) = &old {
            // Its last capture may come later and must not charge it again.
            charge -= old.header.bytes.swap(0, Ordering::Relaxed) as i64;
            old.header.set_gone();
        }
        self.bytes.add(current_cpu(), charge + grown);
        self.make_room(&mut shard);
    }

    /// Inserts a cell just read, unless another is there already or `still_current` says
    /// that the table moved on (invariant 3); returns the cell that is in the cache.
    pub fn insert_read(
        &self,
        cell: Arc<Cell<C>>,
        still_current: impl FnOnce() -> bool,
    ) -> Option<Arc<Cell<C>>> {
        let nid = cell.header.nid;
        let mut shard = self.lock(self.shard_of(nid));
        if let Some(present) = shard.get(nid) {
            return Some(Arc::clone(present));
        }
        if !still_current() {
            return None;
        }
        let bytes = cell.header.bytes.load(Ordering::Relaxed) as i64;
        let (_, grown) = shard.put(Arc::clone(&cell));
        self.bytes.add(current_cpu(), bytes + grown);
        self.make_room(&mut shard);
        Some(cell)
    }

    /// Brings the charge of a cell up to date and returns by how much it grew; the caller holds
    /// the cell's lock.
    pub fn recharge(&self, cell: &Cell<C>, body: &Body<C>) -> Charge {
        let now = (cell_overhead::<C>() + body.memory()) as u32;
        let image = body.image() as u32;
        cell.header.uncharged.store(0, Ordering::Relaxed);
        let before = cell.header.image.swap(image, Ordering::Relaxed);
        let image = image as i64 - before as i64;
        let charged = |before: u32| (before != 0).then_some(now);
        let bytes = &cell.header.bytes;
        let memory = match bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charged) {
            Ok(before) => {
                let grown = now as i64 - before as i64;
                self.bytes.add(current_cpu(), grown);
                grown
            }
            Err(_) => 0,
        };
        Charge { memory, image }
    }

    /// Moves the clock hand until the cache fits or a bounded number of groups was looked at.
    fn make_room(&self, shard: &mut Shard<C>) {
        let mut looks = LOOKS;
        while self.bytes.about() > self.limit && looks > 0 {
            looks -= 1;
            let Some(number) = shard.clock.pop_front() else {
                return;
            };
            let Entry::Occupied(mut group) = shard.groups.entry(number) else {
                continue;
            };
            let mut freed = 0;
            for place in group.get_mut() {
                if let Some(cell) = place.take_if(|cell| self.is_unused(cell)) {
                    freed += cell.header.bytes.load(Ordering::Relaxed) as i64;
                }
            }
            if group.get().iter().any(Option::is_some) {
                shard.clock.push_back(number);
            } else {
                group.remove();
                freed += GROUP_BYTES;
            }
            self.bytes.add(current_cpu(), -freed);
        }
        if looks < LOOKS {
            // The hand meets these next, when this shard gets its next node.
            let next = shard.clock.iter().take(LOOKS_AHEAD);
            let next = next.filter_map(|number| shard.groups.get(number));
            next.flatten().flatten().for_each(prefetch::shared);
        }
    }

    /// Whether a cell may go: it is clean, was not looked up since the hand last passed, and nobody refers to it. Cores that
    /// only hold it let go.
    fn is_unused(&self, cell: &Arc<Cell<C>>) -> bool {
        let header = &cell.header;
        let idle = !header.dirty.load(Ordering::Acquire)
            && !header.was_used()
            && (header.is_common() || Arc::strong_count(cell) == 1);
        if idle && header.is_common() {
            self.held.let_go(header.nid);
        }
        // No core takes it up meanwhile: that begins with a look under this shard's lock.
        idle && Arc::strong_count(cell) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone)]
    struct Words<const LEADS: bool>;
    type Word = Words<false>;
    /// To others.
    type Way = Words<true>;

    impl<const LEADS: bool> Content for Words<LEADS> {
        type Delta = ();
        fn kind(&self) -> u8 {
            format::table::FIRST_FS_KIND
        }
        fn encode(&self, _: &mut Vec<u8>) {}
        fn decode(_: u8, _: &[u8]) -> Result<Self, Damage> {
            Ok(Words)
        }
        fn apply(&mut self, _: &()) -> Result<(), Damage> {
            Ok(())
        }
        fn encode_delta(_: &(), _: &mut Vec<u8>) {}
        fn decode_delta(_: u8, _: &[u8]) -> Result<(), Damage> {
            Ok(())
        }
        fn leads(&self) -> bool {
            LEADS
        }
        fn owned(_: u8) -> bool {
            false
        }
        fn memory(&self) -> usize {
            1000
        }
        fn image_len(&self) -> usize {
            0
        }
    }

    /// A cache with a node that two cores hold by themselves.
    fn sought(limit: usize) -> NodeCache<Word> {
        let cache = NodeCache::<Word>::new(2, limit);
        cache.insert(new_cell(Nid(70), 1, Body::User(Words)));
        let found = |core| cache.get_held(core, Nid(70)).unwrap();
        let held = |core| found(core).is_own();
        assert!(!held(0) && !held(0) && !held(1));
        (0..2 * COMMON as usize).for_each(|i| drop(found(i % 2)));
        assert!(held(0) && held(1));
        cache
    }

    /// Nodes that are neighbours.
    fn neighbours<const LEADS: bool>() -> NodeCache<Words<LEADS>> {
        let cache = NodeCache::new(2, 1 << 20);
        for nid in 72..80 {
            cache.insert(new_cell(Nid(nid), 1, Body::User(Words)));
        }
        cache
    }

    fn held<const LEADS: bool>(cache: &NodeCache<Words<LEADS>>, core: usize, nid: u64) -> bool {
        cache.get_held(core, Nid(nid)).unwrap().is_own()
    }

    #[test]
    fn cores_hold_ways_that_are_neighbours_though_each_seeks_its_own() {
        let cache: NodeCache<Way> = neighbours();
        let nid = |core| 72 + core as u64;
        // One core after the other may seek both as long as it likes.
        for core in 0..2 {
            assert!((0..4 * COMMON as usize).all(|_| !held(&cache, core, nid(core))));
        }
        (0..2 * COMMON as usize).for_each(|i| _ = held(&cache, i % 2, nid(i % 2)));
        assert!(held(&cache, 0, 72) && held(&cache, 1, 73));
        // What lies where neither core seeks anything.
        assert!(!held(&cache, 0, 74));
    }

    #[test]
    fn what_is_no_way_is_held_only_if_several_cores_seek_it() {
        let cache: NodeCache<Word> = neighbours();
        (0..8 * COMMON as usize).for_each(|i| assert!(!held(&cache, i % 2, 72 + i as u64 % 2)));
        (0..2 * COMMON as usize).for_each(|i| _ = held(&cache, i % 2, 74));
        assert!(held(&cache, 0, 74) && held(&cache, 1, 74));
    }

    #[test]
    fn seekers_are_one_word() {
        let all = |count| Seekers {
            of_others: count,
            disturbed: COMMON - count,
            core: 0x5A3,
            number: 0x7FE,
        };
        for seekers in [all(0), all(COMMON), all(7), Seekers::alone(usize::MAX)] {
            assert_eq!(Seekers::unpack(seekers.pack()), seekers);
        }
    }

    #[test]
    fn ways_that_are_looked_up_now_and_then_are_not_held() {
        let cache: NodeCache<Way> = neighbours();
        for _ in 0..4 * COMMON {
            // Each is disturbed each time, with others of the shard between.
            assert!(!held(&cache, 0, 72) && !held(&cache, 1, 73));
            for _ in 0..BETWEEN {
                assert!(cache.get(Nid(74)).is_some());
            }
        }
    }

    #[test]
    fn a_core_that_holds_a_node_writes_no_count_of_others() {
        let cache = sought(1 << 20);
        let cell = cache.get(Nid(70)).unwrap();
        let before = Arc::strong_count(&cell);
        let _more: Vec<_> = (0..10).map(|i| cache.get_held(i % 2, Nid(70))).collect();
        assert_eq!(Arc::strong_count(&cell), before);
    }

    #[test]
    fn a_glance_sees_what_is_there_and_waits_for_nothing() {
        let cache = NodeCache::<Word>::new(2, 1 << 20);
        let glance = |nid| cache.glance(0, Nid(nid), |_: &Word| Some(()));
        assert_eq!(glance(70), None);
        cache.insert(new_cell(Nid(70), 1, Body::User(Words)));
        cache.insert(new_cell(Nid(71), 1, Body::Gone));
        let cell = cache.get(Nid(70)).unwrap();
        let before = Arc::strong_count(&cell);
        assert_eq!((glance(70), glance(71)), (Some(()), None));
        assert_eq!(cache.glance(0, Nid(70), |_: &Word| None::<()>), None);
        assert_eq!(Arc::strong_count(&cell), before);
        let reader = cell.read();
        assert_eq!(glance(70), Some(()));
        drop(reader);
        let writer = cell.write();
        assert_eq!(glance(70), None);
        drop(writer);
        assert_eq!(glance(70), Some(()));
    }

    #[test]
    fn a_glance_counts_for_the_cores_that_seek_a_node() {
        let cache = NodeCache::<Word>::new(2, 1 << 20);
        cache.insert(new_cell(Nid(70), 1, Body::User(Words)));
        let glance = |core| cache.glance(core, Nid(70), |_: &Word| Some(()));
        for i in 0..2 * COMMON as usize {
            glance(i % 2);
        }
        // From now on each core is to hold it by itself, which a glance does not bring about.
        assert_eq!((glance(0), glance(1)), (None, None));
        assert!((0..2).all(|core| cache.get_held(core, Nid(70)).unwrap().is_own()));
        let cell = cache.get(Nid(70)).unwrap();
        let before = Arc::strong_count(&cell);
        assert_eq!((glance(0), glance(1)), (Some(()), Some(())));
        assert_eq!(Arc::strong_count(&cell), before);
        // Nobody has a glance at what is gone.
        cell.header.set_gone();
        cache.insert(new_cell(Nid(70), 9, Body::Gone));
        assert_eq!((glance(0), glance(1)), (None, None));
    }

    #[test]
    fn a_node_that_shrinks_while_it_is_marked_gives_back_what_was_charged() {
        let cell = new_cell::<Word>(Nid(70), 1, Body::User(Words));
        let header = &cell.header;
        let image = header.image.load(Ordering::Relaxed) as i64;
        // A deletion works out the new size, cleaning marks the node, and then the deletion looks whether it is dirty.
        header.image.store(0, Ordering::Relaxed);
        header.dirty.store(true, Ordering::Release);
        let mut charged = header.dirty_charge();
        let less = Charge {
            memory: -900_000,
            image: -image,
        };
        assert!(header.dirty_grew(less));
        charged += less;
        assert!(charged.image < 0 && charged.memory < 0);
        assert_eq!(header.dirty_refund(), charged);
    }

    #[test]
    fn an_image_that_shrank_by_a_short_change_is_charged_anew() {
        let cell = new_cell::<Word>(Nid(70), 1, Body::User(Words));
        let shrank = |from: usize, to| {
            cell.header.image.store(from as u32, Ordering::Relaxed);
            cell.header.shrank(|| to)
        };
        assert!(shrank(4200, 150) && !shrank(4200, 2500) && !shrank(400, 100));
    }

    #[test]
    fn a_node_that_cores_only_hold_is_evicted() {
        let cache = sought(64 * (cell_overhead::<Word>() + 1000));
        let in_use = cache.get_held(1, Nid(70));
        let fill = |from: u64| {
            for nid in (from..from + 10_000).step_by(NEIGHBOURS) {
                cache.insert(new_cell(Nid(nid), 1, Body::User(Words)));
            }
        };
        fill(1000);
        assert!(cache.contains(Nid(70)), "it is in use");
        drop(in_use);
        fill(20_000);
        assert!(!cache.contains(Nid(70)));
        assert!(cache.get_held(0, Nid(70)).is_none() && cache.get_held(1, Nid(70)).is_none());
        assert!(cache.bytes.exact() <= 2 * cache.limit);
    }

    #[test]
    fn a_node_that_is_gone_is_given_to_no_core() {
        let cache = sought(1 << 20);
        cache.get(Nid(70)).unwrap().header.set_gone();
        // Its nid has no other cell yet: whoever asks finds it gone.
        assert!(!cache.get_held(0, Nid(70)).unwrap().is_own());
        cache.insert(new_cell(Nid(70), 9, Body::User(Words)));
        for core in [1, 0, 1] {
            assert_eq!(cache.get_held(core, Nid(70)).unwrap().read().version, 9);
        }
    }

    #[test]
    fn a_replaced_cell_is_charged_no_more() {
        let cache = NodeCache::<Word>::new(1, 1 << 20);
        for version in 0..100 {
            let cell = new_cell::<Word>(Nid(70), version, Body::User(Words));
            cache.insert(Arc::clone(&cell));
            cache.recharge(&cell, &Body::Gone);
            cache.insert(new_cell(Nid(70), version, Body::User(Words)));
            // The checkpoint captures the old cell last.
            cache.recharge(&cell, &Body::User(Words));
        }
        let one = (cell_overhead::<Word>() + 1000) as i64;
        assert_eq!(cache.bytes.exact(), one + GROUP_BYTES);
    }
}

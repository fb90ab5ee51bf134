//! Nodes in memory: cells, references and guards. The [`cache`] holds the cells.
//!
//! Invariants:
//! 1. Whether a node is owned, whether it is on the way to others, and the rank of its lock are constant over its
//!    cell's life: what does not suit a cell gets another one.
//! 2. A cell that is gone stays so.
//! 3. What becoming clean gives back is what was charged while the cell was dirty.

mod cache;
mod groups;
mod map;
mod seekers;
#[cfg(test)]
mod testing;

pub(crate) use cache::NodeCache;
pub(crate) use map::NidMap;

use crate::content::Content;
use crate::dirty::{Charge, Charged};
use crate::error::Error;
use crate::space_map::SpaceMap;
use base::atomic::{AtomicBool, AtomicU32, Ordering};
use base::prefetch;
use base::sync::{Arc, Handle, Keyed, OwnedReadGuard, Rank, ReadGuard, RwLock, rank};
use base::thread::lane;
use format::item::{ItemKind, padded_len};
use format::table::KIND_SPACE_MAP;
use format::{Damage, Nid};
use seekers::Seekers;
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
    charged: Charged,
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

    /// What a node is charged for while it is dirty.
    fn full_charge(&self) -> Charge {
        let memory = self.bytes.load(Ordering::Relaxed) as usize;
        Charge::of_dirty(memory, self.image.load(Ordering::Relaxed) as usize)
    }

    /// What becoming dirty charges, if it is the first time and nobody else can find the cell.
    pub fn first_charge(&self) -> Charge {
        let charge = self.full_charge();
        self.charged.set(charge);
        charge
    }

    /// What becoming dirty charges.
    pub fn dirty_charge(&self) -> Charge {
        let charge = self.full_charge();
        // Who marks a node without its lock may find that it grew meanwhile.
        let before = self.charged.replace(charge);
        Charge {
            memory: charge.memory - before.memory,
            image: charge.image - before.image,
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
            self.charged.add(by);
        }
        dirty
    }

    /// What becoming clean gives back. Less than nothing when the node shrank while it was marked without its lock: then
    /// the first charge had the new size already, and the shrinking was charged besides.
    pub fn dirty_refund(&self) -> Charge {
        self.charged.replace(Charge::default())
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
    pub fn encode_item(&self, seed: u32, nid: Nid, version: u64, out: &mut Vec<u8>) {
        format::item::encode(
            seed,
            out,
            ItemKind::Node,
            self.kind(),
            nid.0,
            version,
            |o| self.encode(o),
        );
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
        charged: Charged::default(),
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
    pub fn read(&self) -> Result<NodeRef<'_, C>, Error> {
        let guard = self.0.read();
        match guard.body {
            Body::User(_) => Ok(NodeRef { node: self, guard }),
            _ => Err(self.gone()),
        }
    }

    /// What `look` finds in the node; `None` also where that would take a wait, or counts.
    #[inline]
    pub fn glance<R>(&self, look: impl FnOnce(&C) -> Option<R>) -> Option<R> {
        match &self.0.try_read_again()?.body {
            Body::User(content) => look(content),
            _ => None,
        }
    }

    /// [`Node::read`] for who needs the reference no more.
    #[inline(always)]
    pub fn into_read(self) -> Result<NodeRead<C>, Error> {
        let guard = self.0.read_owned();
        match guard.body {
            Body::User(_) => Ok(NodeRead(guard)),
            _ => Err(Node(guard.lock().clone()).gone()),
        }
    }

    #[cold]
    #[inline(never)]
    fn gone(&self) -> Error {
        Error::Gone(self.nid())
    }
}

/// A shared lock on a node's content.
pub trait NodeLock<C>: Deref<Target = C> {
    fn nid(&self) -> Nid;
}

/// A [`NodeLock`] of who has a reference to the node.
#[derive(Debug)]
pub struct NodeRef<'n, C> {
    node: &'n Node<C>,
    guard: ReadGuard<'n, State<C>>,
}

/// A [`NodeLock`] with a reference of its own.
#[derive(Debug)]
pub struct NodeRead<C>(OwnedReadGuard<State<C>, CellHeader>);

impl<C: Content> NodeLock<C> for NodeRef<'_, C> {
    fn nid(&self) -> Nid {
        self.node.nid()
    }
}

impl<C> NodeRef<'_, C> {
    pub fn version(&self) -> u64 {
        self.guard.version
    }
}

impl<C: Content> NodeLock<C> for NodeRead<C> {
    fn nid(&self) -> Nid {
        self.0.lock().header.nid
    }
}

impl<C> NodeRead<C> {
    pub fn version(&self) -> u64 {
        self.0.version
    }
}

impl<C> Deref for NodeRef<'_, C> {
    type Target = C;
    #[inline]
    fn deref(&self) -> &C {
        content_of(&self.guard)
    }
}

impl<C> Deref for NodeRead<C> {
    type Target = C;
    #[inline]
    fn deref(&self) -> &C {
        content_of(&self.0)
    }
}

#[inline]
fn content_of<C>(state: &State<C>) -> &C {
    match &state.body {
        Body::User(content) => content,
        _ => unreachable!("checked when the lock was taken"),
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{Word, Words};
    use super::*;

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
}

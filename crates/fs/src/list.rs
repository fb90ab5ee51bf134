//! Sorted lists that live in an inode while they are small and in the leaves of a tree when
//! they are not: the names of a directory, the attributes of a file, the orphans.
//!
//! Invariants:
//! 1. Keys that differ only in the lowest `GROUP_BITS` bits are in one leaf: leaves are split
//!    between such groups only.
//! 2. A leaf may be empty. A list that shrinks goes back into the inode when its last leaf goes. What is removed from a
//!    list that many cores change at once may leave empty leaves behind, which go when they are next
//!    emptied without such a crowd, or with the list. So does a rename within a directory if a crash, or a failure, comes
//!    between it and the operation that takes out its leaf ([`Spot::prune`]).
//! 3. Plans ([`Addition`], [`Deletion`]) hold nodes and keys, not copies of lists: a deletion
//!    that leaves an emptied leaf may be carried out before an addition planned beside it.

use crate::Error;
use crate::content::entry::Entry;
use crate::content::inode::{INLINE_ENTRIES_MAX, INLINE_ORPHANS_MAX};
use crate::content::leaf::{Elements, InLeaf, Pick, View};
use crate::content::{
    Body, Child, Delta, FsNode, Inode, Name, NameList, Orphan, Root, TreeId, Xattr,
};
use crate::tree::{self, Ahead, FreshNid, Growth, Leaf, Path, Purpose, Removal};
use base::tight::limit;
use engine::{NodeRef, Op, Slot, Store};
use format::Damage;
use format::dir::{ENTRY_MAX, ENTRY_MIN};
use format::inode::OrphanEntry;
use format::item::PAYLOAD_MAX;
use format::xattr::XATTR_INLINE_MAX;
use std::cell::Cell;

// Names that refer to other inodes than before keep their leaf within a node.
const _: () = assert!(<Name as Listed>::LEAF_MAX / ENTRY_MIN * ENTRY_MAX <= PAYLOAD_MAX);

/// What such a list can hold.
pub trait Listed: InLeaf {
    const TREE: TreeId;
    /// Bytes that the inode holds itself.
    const INLINE_MAX: usize;
    /// A leaf is split when it would grow beyond this many bytes.
    const LEAF_MAX: usize = 4 << 10;
    /// The list in the inode, which has no tree of this kind.
    fn in_inode(inode: &Inode) -> Result<&Self::List, Damage>;
    fn put(self) -> Delta;
    fn remove(key: u64) -> Delta;
    /// Takes the list out of the inode, where setting the tree's root does not.
    fn clear_inline() -> Option<Delta>;
    /// The inode's body when the last leaf is gone, where that is the body's tree.
    fn emptied() -> Option<Body>;
}

impl Listed for Name {
    const TREE: TreeId = TreeId::Body;
    const INLINE_MAX: usize = INLINE_ENTRIES_MAX;
    /// Up to some 120 names: more are slower to put in order, fewer make more leaves.
    const LEAF_MAX: usize = 2560;

    fn in_inode(inode: &Inode) -> Result<&NameList, Damage> {
        match &inode.body {
            Body::Entries(list) => Ok(list),
            _ => Err(Damage::new("directory", "its body holds something else")),
        }
    }

    fn put(self) -> Delta {
        Delta::InsertName(self)
    }

    fn remove(key: u64) -> Delta {
        Delta::RemoveName(key)
    }

    fn clear_inline() -> Option<Delta> {
        None
    }

    fn emptied() -> Option<Body> {
        Some(Body::Entries(Box::default()))
    }
}

impl Listed for Orphan {
    const TREE: TreeId = TreeId::Body;
    const INLINE_MAX: usize = INLINE_ORPHANS_MAX * OrphanEntry::SIZE;

    fn in_inode(inode: &Inode) -> Result<&[Orphan], Damage> {
        match &inode.body {
            Body::Orphans(list) => Ok(list),
            _ => Err(Damage::new(
                "orphan directory",
                "its body holds something else",
            )),
        }
    }

    fn put(self) -> Delta {
        Delta::InsertOrphan(self)
    }

    fn remove(key: u64) -> Delta {
        Delta::RemoveOrphan(format::Nid(key))
    }

    fn clear_inline() -> Option<Delta> {
        None
    }

    fn emptied() -> Option<Body> {
        Some(Body::Orphans(Vec::new()))
    }
}

impl Listed for Xattr {
    const TREE: TreeId = TreeId::Xattrs;
    const INLINE_MAX: usize = XATTR_INLINE_MAX;

    fn in_inode(inode: &Inode) -> Result<&[Xattr], Damage> {
        Ok(&inode.seldom.xattrs)
    }

    fn put(self) -> Delta {
        Delta::SetXattr(self)
    }

    fn remove(key: u64) -> Delta {
        Delta::RemoveXattr(key)
    }

    fn clear_inline() -> Option<Delta> {
        Some(Delta::InlineXattrs(Vec::new()))
    }

    fn emptied() -> Option<Body> {
        None
    }
}

/// The element that is wanted, of those whose keys share a group with `first`, which is the group's lowest key.
#[inline]
pub fn pick<T: Listed>(
    list: &T::List,
    first: u64,
    wanted: impl Fn(View<'_, T>) -> bool,
) -> Option<T::Found> {
    let view = list.pick(first, T::GROUP_BITS, wanted).found()?;
    Some(T::found(view))
}

/// Where somebody looked for a group: the leaf that covered it, and the leaf's version then. As
/// long as it has that version it covers it still, and all that it covered: a leaf loses keys only by a
/// change of its own.
#[derive(Default)]
pub struct Seen(Cell<Option<(Leaf, u64)>>);

/// Looks for an element of a group, to change it, and tells where; the inode is locked at least shared. `ahead` is what was told of the
/// group in this very inode.
pub fn look<T: Listed>(
    store: &Store<FsNode>,
    inode: &Inode,
    first: u64,
    ahead: Option<Ahead>,
    wanted: impl Fn(View<'_, T>) -> bool,
) -> Result<(Option<T::Found>, Seen), Error> {
    look_for::<T>(store, inode, first, (Purpose::Change, ahead), wanted)
}

fn look_for<T: Listed>(
    store: &Store<FsNode>,
    inode: &Inode,
    first: u64,
    (purpose, ahead): (Purpose, Option<Ahead>),
    wanted: impl Fn(View<'_, T>) -> bool,
) -> Result<(Option<T::Found>, Seen), Error> {
    match inode.root(T::TREE) {
        None => Ok((
            pick::<T>(T::in_inode(inode)?, first, wanted),
            Seen::default(),
        )),
        Some(root) => {
            let look = |node: &NodeRef<'_, FsNode>, _: &Leaf| {
                let found = pick::<T>(T::in_leaf(node)?, first, &wanted);
                Ok((found, node.version()))
            };
            let ((found, version), leaf) =
                tree::read_leaf(store, inode, root, first, (purpose, ahead), look)?;
            Ok((found, Seen(Cell::new(Some((leaf, version))))))
        }
    }
}

/// Looks for an element of a group; the inode is locked at least shared.
pub fn find<T: Listed>(
    store: &Store<FsNode>,
    inode: &Inode,
    first: u64,
    wanted: impl Fn(View<'_, T>) -> bool,
) -> Result<Option<T::Found>, Error> {
    let Some(root) = inode.root(T::TREE) else {
        return Ok(pick::<T>(T::in_inode(inode)?, first, wanted));
    };
    let seen = tree::glance(store, inode, root, first, |node, _| {
        Some(pick::<T>(T::in_leaf(node).ok()?, first, &wanted))
    });
    match seen {
        Some(found) => Ok(found),
        None => Ok(look_for::<T>(store, inode, first, (Purpose::Read, None), wanted)?.0),
    }
}

/// Copies elements with keys from `from` on, to the end of one leaf. The second value is
/// where to go on, `None` at the end. The inode is locked at least shared.
pub fn run_from<T: Listed>(
    store: &Store<FsNode>,
    inode: &Inode,
    from: u64,
) -> Result<(Vec<T>, Option<u64>), Error> {
    let tail = |list: &T::List| list.copy(list.lower(from)..list.len());
    match inode.root(T::TREE) {
        None => Ok((tail(T::in_inode(inode)?), None)),
        Some(root) => {
            let look = |node: &NodeRef<'_, FsNode>, _: &Leaf| Ok(tail(T::in_leaf(node)?));
            let (tail, leaf) =
                tree::read_leaf(store, inode, root, from, (Purpose::Read, None), look)?;
            Ok((tail, leaf.high))
        }
    }
}

/// Where a list goes on behind what keeps [`run_from`] from telling the element with key `from`; always behind that.
/// `None`: nowhere. The inode is locked at least shared.
pub fn behind<T: Listed>(store: &Store<FsNode>, inode: &Inode, from: u64) -> Option<u64> {
    tree::hidden_to(store, inode.root(T::TREE)?, from)
}

/// Looks for an element of each of several groups, whose lowest keys come in growing order; the inode is
/// locked at least shared. `wanted` is told which group it is asked about, and `ahead` tells what was told of a group in this very inode.
pub fn find_each<T: Listed>(
    store: &Store<FsNode>,
    inode: &Inode,
    firsts: &[u64],
    mut ahead: impl FnMut(u64) -> Option<Ahead>,
    wanted: impl Fn(usize, View<'_, T>) -> bool,
) -> Result<Vec<Option<T::Found>>, Error> {
    let pick = |list: &T::List, i: usize| pick::<T>(list, firsts[i], |e| wanted(i, e));
    let mut found = Vec::with_capacity(firsts.len());
    while let Some(&first) = firsts.get(found.len()) {
        let Some(root) = inode.root(T::TREE) else {
            found.push(pick(T::in_inode(inode)?, found.len()));
            continue;
        };
        let ahead = ahead(first);
        let look = |node: &NodeRef<'_, FsNode>, leaf: &Leaf| {
            let list = T::in_leaf(node)?;
            let ends = |first: &u64| leaf.high.is_some_and(|high| *first >= high);
            let rest = firsts[found.len()..].iter();
            for _ in rest.take_while(|first| !ends(first)) {
                found.push(pick(list, found.len()));
            }
            Ok(())
        };
        tree::read_leaf(store, inode, root, first, (Purpose::Read, ahead), look)?;
    }
    Ok(found)
}

/// The place of one group in a list whose inode an operation holds.
pub struct Spot<T: InLeaf> {
    inode: Slot,
    /// The leaf that has or would have the group; `None`: the inode itself.
    leaf: Option<Slot>,
    /// Keys below this are in that leaf, if they are no lower than `first`; `None`: no end.
    high: Option<u64>,
    first: u64,
    /// No element of the group is there.
    vacant: bool,
    /// The wanted element, if it is there.
    pub found: Option<T::Found>,
}

/// Tells where a group is going to be looked for; see [`tree::look_ahead`]. The inode is locked at least shared.
#[inline]
pub fn look_ahead<T: Listed>(store: &Store<FsNode>, inode: &Inode, first: u64) -> Option<Ahead> {
    tree::look_ahead(store, inode, inode.root(T::TREE)?, first)
}

/// Locks the place of a group in a list. An operation that shares the inode and needs two
/// places does so in the order of their inodes and keys, and plans afterwards.
pub fn spot<T: Listed>(
    op: &mut Op<'_, FsNode>,
    inode: Slot,
    first: u64,
    wanted: impl Fn(View<'_, T>) -> bool,
) -> Result<Spot<T>, Error> {
    place::<T>(op, inode, first, None)?.sought(op, wanted)
}

/// [`spot`] in two steps, of which the second is [`Spot::sought`]: between them the memory comes where the group is looked for. `ahead` is
/// what was told of the group in this very inode.
pub fn place<T: Listed>(
    op: &mut Op<'_, FsNode>,
    inode: Slot,
    first: u64,
    ahead: Option<Ahead>,
) -> Result<Spot<T>, Error> {
    let leaf = match op.peek(inode).inode()?.root(T::TREE) {
        None => None,
        Some(_) => Some(tree::lock_leaf(op, inode, T::TREE, first, ahead)?),
    };
    let spot: Spot<T> = Spot::of(inode, leaf, first);
    spot.list(op)?.ask(first);
    Ok(spot)
}

/// [`spot`] for a group that was looked for before, in this very inode. What was seen serves once.
pub fn spot_seen<T: Listed>(
    op: &mut Op<'_, FsNode>,
    inode: Slot,
    first: u64,
    seen: &Seen,
    wanted: impl Fn(View<'_, T>) -> bool,
) -> Result<Spot<T>, Error> {
    let leaf = match (op.peek(inode).inode()?.root(T::TREE), seen.0.take()) {
        (None, _) => None,
        (Some(_), None) => Some(tree::lock_leaf(op, inode, T::TREE, first, None)?),
        // Tried, not waited for: in what order several are locked does not matter then.
        (Some(_), Some((leaf, version))) => Some(match op.try_lock_at(leaf.node, version) {
            Some(slot) => (slot, leaf.high),
            None => tree::lock_leaf(op, inode, T::TREE, first, None)?,
        }),
    };
    Spot::of(inode, leaf, first).sought(op, wanted)
}

/// What becomes of a leaf that a removal empties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emptied {
    Stays,
    Goes,
    /// It goes if the inode is not shared. The operation plans a change of another list besides, whose index nodes it
    /// has: who waits for this list's then, and others the other way round, waits for ever.
    GoesAlone,
}

/// What came of taking out an empty leaf.
pub enum Pruned {
    /// It has elements again, or stays because of a crowd.
    Nothing,
    /// It takes the inode's exclusive lock.
    Blocked,
    Done,
}

/// Whether this is a leaf without elements, by what the operation has done by now.
pub fn is_empty_leaf<T: Listed>(op: &Op<'_, FsNode>, slot: Slot) -> bool {
    T::in_leaf(op.peek(slot)).is_ok_and(|list| list.len() == 0)
}

/// How an element will be added, or take the place of one with its key.
pub struct Addition<'s, T> {
    inode: Slot,
    element: T,
    place: Place<'s>,
}

enum Place<'s> {
    /// The inode's own list.
    Inline,
    /// The inode's list moves to a first leaf.
    Spill(FreshNid<'s>),
    Leaf(Slot),
    /// The leaf's elements from `at` on move to a new one.
    Split {
        path: Path,
        leaf: Slot,
        fresh: FreshNid<'s>,
        growth: Growth<'s>,
        at: u64,
    },
}

/// How an element will be removed.
pub struct Deletion<T> {
    slot: Slot,
    key: u64,
    shrink: Option<Removal>,
    /// The inode is shared, and the plan would take it exclusively.
    blocked: bool,
    /// The leaf that the element was alone in, if that stays.
    left: Option<Slot>,
    kind: std::marker::PhantomData<T>,
}

impl<T: Listed> Spot<T> {
    fn of(inode: Slot, leaf: Option<(Slot, Option<u64>)>, first: u64) -> Spot<T> {
        Spot {
            inode,
            leaf: leaf.map(|(slot, _)| slot),
            high: leaf.and_then(|(_, high)| high),
            first,
            vacant: false,
            found: None,
        }
    }

    /// Looks for the element that is wanted.
    pub fn sought(
        mut self,
        op: &Op<'_, FsNode>,
        wanted: impl Fn(View<'_, T>) -> bool,
    ) -> Result<Spot<T>, Error> {
        match self.list(op)?.pick(self.first, T::GROUP_BITS, wanted) {
            Pick::Found(view) => self.found = Some(T::found(view)),
            Pick::Others => {}
            Pick::Nothing => self.vacant = true,
        }
        Ok(self)
    }

    fn list<'a>(&self, op: &'a Op<'_, FsNode>) -> Result<&'a T::List, Error> {
        Ok(match &self.leaf {
            Some(slot) => T::in_leaf(op.peek(*slot))?,
            None => T::in_inode(op.peek(self.inode).inode()?)?,
        })
    }

    /// Bytes of the list, encoded.
    fn len(&self, op: &Op<'_, FsNode>) -> Result<usize, Error> {
        Ok(self.list(op)?.encoded_len())
    }

    /// The way to the leaf, for changes of the tree's shape.
    fn path(&self, op: &Op<'_, FsNode>, leaf: Slot) -> Result<Path, Error> {
        tree::path_to(op, self.inode, T::TREE, self.first, leaf)
    }

    /// A key of the group that nothing has yet.
    pub fn free_key(&self, op: &Op<'_, FsNode>) -> Result<u64, Error> {
        self.free_key_of(op, self.first)
    }

    /// The same for another group that has this place, by its lowest key.
    pub fn free_key_of(&self, op: &Op<'_, FsNode>, first: u64) -> Result<u64, Error> {
        if self.vacant && first == self.first {
            return Ok(first);
        }
        let list = self.list(op)?;
        (first..first + (1 << T::GROUP_BITS))
            .find(|key| list.with_key(*key).is_none())
            .ok_or(Error::NoSpace)
    }

    /// Whether this is the place of another group, too, whose lowest key is `first` and no lower.
    pub fn covers(&self, first: u64) -> bool {
        self.high.is_none_or(|high| first < high)
    }

    /// Looks for an element of a group that the place covers.
    pub fn look(
        &self,
        op: &Op<'_, FsNode>,
        first: u64,
        wanted: impl Fn(View<'_, T>) -> bool,
    ) -> Result<Option<T::Found>, Error> {
        Ok(pick::<T>(self.list(op)?, first, wanted))
    }

    /// Plans to put several elements, of groups of their own, into the place as it is.
    pub fn fill(&self, op: &Op<'_, FsNode>) -> Result<Filling<T>, Error> {
        let most = match &self.leaf {
            Some(_) => limit(T::LEAF_MAX, 400),
            None if op.shares(self.inode) => 0,
            None => T::INLINE_MAX,
        };
        Ok(Filling {
            slot: self.slot(),
            room: most.saturating_sub(self.len(op)?),
            full: false,
            elements: Vec::new(),
        })
    }

    /// How many elements may go without a leaf that goes with them.
    pub fn spare(&self, op: &Op<'_, FsNode>) -> Result<usize, Error> {
        let len = self.list(op)?.len();
        match &self.leaf {
            Some(_) => Ok(len.saturating_sub(1)),
            None if op.shares(self.inode) => Ok(0),
            None => Ok(len),
        }
    }

    /// The element with this key, if it is in the place's leaf.
    pub fn get(&self, op: &Op<'_, FsNode>, key: u64) -> Result<Option<T::Found>, Error> {
        let list = self.list(op)?;
        Ok(list.with_key(key).map(T::found))
    }

    /// Plans to remove the elements with these keys, which [`Spot::get`] found. A leaf that they
    /// empty goes whole.
    pub fn clear(self, op: &mut Op<'_, FsNode>, keys: Vec<u64>) -> Result<Clearing<T>, Error> {
        let all = self.list(op)?.len() == keys.len();
        let slot = self.slot();
        let shrink = match self.leaf {
            Some(slot) if all => Some(self.path(op, slot)?.plan_removal(op, slot)?),
            _ => None,
        };
        Ok(Clearing {
            slot,
            keys,
            shrink,
            kind: std::marker::PhantomData,
        })
    }

    /// The node that holds the group.
    pub fn slot(&self) -> Slot {
        self.leaf.unwrap_or(self.inode)
    }

    /// Plans to put an element of this group into the list.
    pub fn put<'s>(self, op: &mut Op<'s, FsNode>, element: T) -> Result<Addition<'s, T>, Error> {
        let store = op.store();
        let list = self.list(op)?;
        debug_assert_eq!(element.key() >> T::GROUP_BITS, self.first >> T::GROUP_BITS);
        let old = match self.vacant {
            true => 0,
            false => list.len_of(element.key()),
        };
        let room = list.encoded_len() - old + element.encoded_len();
        let inode = self.inode;
        let place = match self.leaf {
            None if room <= T::INLINE_MAX => Place::Inline,
            None => Place::Spill(store.reserve_nid()?),
            Some(slot) if room <= limit(T::LEAF_MAX, 400) => Place::Leaf(slot),
            Some(leaf) => match split_key(list, &element)? {
                None => Place::Leaf(leaf),
                Some(at) => {
                    let path = self.path(op, leaf)?;
                    Place::Split {
                        leaf,
                        fresh: store.reserve_nid()?,
                        growth: path.plan_growth(store, op, 1)?,
                        path,
                        at,
                    }
                }
            },
        };
        Ok(Addition {
            inode,
            element,
            place,
        })
    }

    /// Takes the leaf out if it is empty, in an operation of its own.
    pub fn prune(self, op: &mut Op<'_, FsNode>) -> Result<Pruned, Error> {
        let crowded = op.peek(self.inode).inode()?.is_crowded();
        let Some(leaf) = self.leaf.filter(|leaf| is_empty_leaf::<T>(op, *leaf)) else {
            return Ok(Pruned::Nothing);
        };
        let path = self.path(op, leaf)?;
        let removal = match op.shares(self.inode) {
            true => path.plan_shared_removal(op, leaf)?,
            false => Some(path.plan_removal(op, leaf)?),
        };
        Ok(match removal {
            Some(removal) => {
                removal.finish(op, T::emptied());
                Pruned::Done
            }
            None if crowded => Pruned::Nothing,
            None => Pruned::Blocked,
        })
    }

    /// Plans to remove the element that was found. If an emptied leaf stays, an addition to the same list may share
    /// the operation.
    pub fn remove(self, op: &mut Op<'_, FsNode>, emptied: Emptied) -> Result<Deletion<T>, Error> {
        let last = self.list(op)?.is_single();
        let slot = self.slot();
        let key = T::found_key(self.found.as_ref().ok_or(Error::NotFound)?);
        let shrink = last && emptied != Emptied::Stays;
        let shared = op.shares(self.inode);
        let removal = match self.leaf {
            Some(_) if shrink && shared && emptied == Emptied::GoesAlone => None,
            Some(slot) if shrink && shared => self.path(op, slot)?.plan_shared_removal(op, slot)?,
            Some(slot) if shrink => Some(self.path(op, slot)?.plan_removal(op, slot)?),
            _ => None,
        };
        // Where many cores are at work an empty leaf stays: to take it out keeps all of them out.
        let crowded = op.peek(self.inode).inode()?.is_crowded();
        let blocked = shrink && shared && removal.is_none() && !crowded;
        let left = self.leaf.filter(|_| last && removal.is_none());
        Ok(Deletion {
            slot,
            key,
            shrink: removal,
            blocked,
            left,
            kind: std::marker::PhantomData,
        })
    }
}

/// How several elements will be added to one place, which has room for them without a split.
pub struct Filling<T> {
    slot: Slot,
    /// Bytes that are left.
    room: usize,
    full: bool,
    elements: Vec<T>,
}

impl<T: Listed> Filling<T> {
    /// Takes one more element, unless there is no room for it.
    pub fn add(&mut self, element: T) -> bool {
        let len = element.encoded_len();
        self.full |= len > self.room;
        if !self.full {
            self.room -= len;
            self.elements.push(element);
        }
        !self.full
    }

    /// There was no room for one.
    pub fn is_full(&self) -> bool {
        self.full
    }

    pub fn finish(self, op: &mut Op<'_, FsNode>) {
        for element in self.elements {
            op.apply(self.slot, element.put());
        }
    }
}

/// How several elements of one place will be removed.
pub struct Clearing<T> {
    slot: Slot,
    keys: Vec<u64>,
    shrink: Option<Removal>,
    kind: std::marker::PhantomData<T>,
}

impl<T: Listed> Clearing<T> {
    pub fn finish(self, op: &mut Op<'_, FsNode>) {
        match self.shrink {
            Some(removal) => removal.finish(op, T::emptied()),
            None => self
                .keys
                .into_iter()
                .for_each(|key| op.apply(self.slot, T::remove(key))),
        }
    }
}

impl<T: Listed> Deletion<T> {
    /// It cannot be carried out in an operation that shares the inode.
    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// The leaf that may be empty then.
    pub fn left(&self) -> Option<Slot> {
        self.left
    }

    pub fn finish(self, op: &mut Op<'_, FsNode>) {
        match self.shrink {
            Some(removal) => removal.finish(op, T::emptied()),
            None => op.apply(self.slot, T::remove(self.key)),
        }
    }
}

impl<T: Listed> Addition<'_, T> {
    /// It cannot be carried out in an operation that shares the inode.
    pub fn is_blocked(&self, op: &Op<'_, FsNode>) -> bool {
        op.shares(self.inode)
            && match &self.place {
                Place::Inline | Place::Spill(_) => true,
                Place::Leaf(_) => false,
                Place::Split { growth, .. } => growth.is_exclusive(),
            }
    }

    /// Puts the element in. The lists are those the plan was made on, but for deletions.
    pub fn finish(self, op: &mut Op<'_, FsNode>) {
        let Addition {
            inode,
            element,
            place,
        } = self;
        let planned = "the plan was made on this kind of node";
        match place {
            Place::Inline => op.apply(inode, element.put()),
            Place::Leaf(slot) => op.apply(slot, element.put()),
            Place::Spill(fresh) => {
                let content = op.peek(inode).inode().expect(planned);
                let list = T::in_inode(content).expect(planned);
                let mut list = list.copy(0..list.len());
                replace(&mut list, element);
                let child = Child {
                    key: 0,
                    nid: fresh.nid(),
                };
                op.create(fresh, T::leaf(list));
                if let Some(clear) = T::clear_inline() {
                    op.apply(inode, clear);
                }
                let root = Root {
                    depth: 0,
                    children: vec![child],
                };
                let tree = T::TREE;
                op.apply(inode, Delta::SetRoot { tree, root });
            }
            Place::Split {
                path,
                leaf,
                fresh,
                growth,
                at,
            } => {
                let list = T::in_leaf(op.peek(leaf)).expect(planned);
                let mut upper = list.copy(list.lower(at)..list.len());
                op.apply(leaf, Delta::DropFrom(at));
                if element.key() < at {
                    op.apply(leaf, element.put());
                } else {
                    replace(&mut upper, element);
                }
                let child = Child {
                    key: at,
                    nid: fresh.nid(),
                };
                op.create(fresh, T::leaf(upper));
                path.grow(op, growth, vec![child]);
                op.peek(inode).inode().expect(planned).reshaped();
            }
        }
    }
}

fn replace<T: Entry>(list: &mut Vec<T>, element: T) {
    match list.binary_search_by_key(&element.key(), Entry::key) {
        Ok(at) => list[at] = element,
        Err(at) => list.insert(at, element),
    }
}

/// Where to split a leaf that `new` makes too large: between two groups, nearest to the
/// middle. `None`: nowhere, and the leaf can still take it.
fn split_key<T: Listed>(list: &T::List, new: &T) -> Result<Option<u64>, Error> {
    let size = |i: usize| (list.key_at(i) >> T::GROUP_BITS, list.len_at(i) + T::GROWS);
    let (at, old) = (list.lower(new.key()), list.len_of(new.key()));
    let own = (new.key() >> T::GROUP_BITS, new.encoded_len() + T::GROWS);
    let after = at + usize::from(old > 0)..list.len();
    let total = list.encoded_len() - old + own.1 + (at + after.len()) * T::GROWS;
    let sizes = (0..at).map(size).chain([own]).chain(after.map(size));
    let (mut below, mut last) = (0, None);
    let mut best: Option<(usize, u64)> = None;
    for (group, len) in sizes {
        let larger = below.max(total - below);
        if last.is_some_and(|last| last != group) && best.is_none_or(|(least, _)| larger < least) {
            best = Some((larger, group << T::GROUP_BITS));
        }
        (below, last) = (below + len, Some(group));
    }
    match best {
        Some((larger, at)) if larger <= PAYLOAD_MAX => Ok(Some(at)),
        None if total <= PAYLOAD_MAX => Ok(None),
        // So many names of one hash: only who knows the key gets here.
        _ => Err(Error::NoSpace),
    }
}

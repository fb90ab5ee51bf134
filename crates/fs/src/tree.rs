//! The tree that directories, extents, attributes and orphans share: keyed by `u64`, its
//! root in an inode, its index nodes and leaves nodes of their own.
//!
//! Invariants:
//! 1. Every node of a tree belongs to the inode that holds the root. It is read under that
//!    inode's lock and changed under its exclusive lock, so the shape stands still meanwhile. But
//!    operations that share a directory change its leaves, each under the leaf's own lock, and split
//!    them as long as that changes index nodes only. So under the shared lock a leaf is locked before
//!    index nodes are, these from the bottom up, and whoever has locked one looks whether the shape
//!    changed on the way (`content/tally.rs`, invariant 3). They take leaves out as well, but no index node: so
//!    between finding a leaf and locking it they look, too, for its nid may be another node's by now, for which
//!    nobody must wait.
//! 2. A child covers the keys from its own key up to its right neighbour's. The first child's
//!    key is the lower bound of its parent, so that every key has exactly one leaf.
//! 3. All leaves are at one depth. No index node is empty, and no tree's root is.
//! 4. Before the first change of an operation, everything that a change of shape needs is
//!    locked and every nid reserved: [`Growth`] and [`Removal`] are such plans.

use crate::Error;
use crate::content::entry::child_for;
use crate::content::{Child, Delta, FsNode, Inode, Root, TreeId, inode::ROOT_MAX};
use base::canary::{Canary, planted};
use base::tight::limit;
use engine::{Mode, Node, NodeRead, NodeRef, Op, Slot, Store};
use format::{Damage, Nid};

/// Children of an index node.
pub const INDEX_MAX: usize = 250;

/// Leaves right below the root of a tree that many cores change: whatever changes the root keeps all of them out.
const CROWDED_ROOT: usize = 4;
/// Children of an index node right below the root of such a tree, while the root has room for more of them. All who look for a
/// leaf lock the index node above it, if only shared, so its lock goes from core to core twice for each.
const CROWDED_INDEX: usize = 32;
/// Index nodes that take the place of one that is full then. The root is changed, and all kept out, for each such split, some 14
/// times until it has no room for more.
const CROWDED_PIECES: usize = 8;

fn index_max() -> usize {
    limit(INDEX_MAX, 4)
}

fn crowded_index() -> usize {
    limit(CROWDED_INDEX, 3)
}

fn root_max() -> usize {
    limit(ROOT_MAX, 3)
}

/// A nid in reserve for a new node.
pub type FreshNid<'s> = engine::FreshNid<'s, FsNode>;

/// A leaf and the keys it covers: `low` up to, not including, `high` (`None`: no end).
#[derive(Debug)]
pub struct Leaf {
    pub node: Node<FsNode>,
    pub low: u64,
    pub high: Option<u64>,
}

impl Leaf {
    fn lock(self, op: &mut Op<'_, FsNode>) -> Result<Slot, Error> {
        let nid = self.node.nid();
        op.lock_given(self.node, Mode::Exclusive)
            .map_err(|error| owned_error(nid, error))
    }
}

/// Where a node hangs, in an operation that holds the inode exclusively. Index nodes are not locked yet.
#[derive(Debug)]
struct Way {
    inode: Slot,
    tree: TreeId,
    /// Index nodes from the top down, each with its key in its parent.
    index: Vec<(Node<FsNode>, u64)>,
}

/// Where a leaf hangs. It is not locked yet.
#[derive(Debug)]
pub struct Path {
    way: Way,
    pub leaf: Leaf,
}

/// Where a node hangs that is damaged, so that nobody finds what is below it.
#[derive(Debug)]
pub struct Broken {
    way: Way,
    nid: Nid,
    /// The lowest key that it covers.
    pub low: u64,
    /// Levels of nodes below it.
    height: u8,
}

/// Everything needed to have an empty leaf cover the upper keys of a damaged node, which keeps the others.
pub struct Relief<'s> {
    way: Way,
    growth: Growth<'s>,
    key: u64,
    /// For the leaf, and for index nodes above it up to the level of the damaged node.
    fresh: Vec<FreshNid<'s>>,
}

/// Everything needed to link new leaves beside a path's leaf.
pub struct Growth<'s> {
    /// Index nodes to change, from the bottom up, and how many new ones take a part of each; none of the last, unless new
    /// children reach the root.
    levels: Vec<(Slot, usize)>,
    /// For these, then for a deeper root.
    fresh: Vec<FreshNid<'s>>,
    /// New children reach the root.
    reaches_root: bool,
    deepens: bool,
    /// The way to the leaf changed before it was locked, by who shares the inode.
    passed: bool,
}

/// Everything needed to take leaves out of a tree.
pub struct Removal {
    inode: Slot,
    tree: TreeId,
    /// Leaves and index nodes that go.
    delete: Vec<Slot>,
    /// The index node that loses `keys`; `None`: the root does.
    at: Option<Slot>,
    keys: Vec<u64>,
    /// Index nodes whose first child takes over the keys of an index node that goes, as it is now
    /// the first: all on the way to the lowest leaf.
    lower: Vec<Slot>,
    /// The tree has no leaf left: the caller gives the inode another body.
    empties: bool,
    /// The root takes over its only child's children.
    collapse: bool,
}

/// What a leaf is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Read,
    /// It is going to be locked exclusively, if it has what is wanted.
    Change,
}

/// Loads a node that something owned refers to: that it is missing is damage.
#[inline]
fn load(store: &Store<FsNode>, nid: Nid) -> Result<Node<FsNode>, Error> {
    owned(nid, store.get(nid))
}

/// `load`, as the operation has the node: in a large one, of nodes that it has made or locked before.
pub fn load_in(op: &Op<'_, FsNode>, nid: Nid) -> Result<Node<FsNode>, Error> {
    match op.own(nid) {
        Some(slot) => Ok(op.node(slot)),
        None => load(op.store(), nid),
    }
}

#[inline]
fn owned(nid: Nid, node: Result<Node<FsNode>, engine::Error>) -> Result<Node<FsNode>, Error> {
    match node {
        Ok(node) if node.is_owned() => Ok(node),
        Ok(_) => Err(foreign(nid)),
        Err(error) => Err(owned_error(nid, error)),
    }
}

#[cold]
fn foreign(nid: Nid) -> Error {
    let damage = Damage::new("tree", format!("node {nid} is no part of a tree"));
    Error::Damaged { ino: nid, damage }
}

pub fn read(store: &Store<FsNode>, nid: Nid) -> Result<NodeRead<FsNode>, Error> {
    load(store, nid)?
        .into_read()
        .map_err(|error| owned_error(nid, error))
}

#[cold]
fn owned_error(nid: Nid, error: engine::Error) -> Error {
    match error {
        engine::Error::Gone(_) => Error::Damaged {
            ino: nid,
            damage: Damage::new("tree", format!("node {nid} is missing")),
        },
        other => other.into(),
    }
}

/// The leaf that covers `key`, and its bounds. The inode is locked at least shared.
pub fn find(store: &Store<FsNode>, root: &Root, key: u64, purpose: Purpose) -> Result<Leaf, Error> {
    let mut at = Descent::enter(&root.children, key)?;
    for _ in 0..root.depth {
        at = match at.glance(store, key) {
            Some(below) => below,
            None => at.step(read(store, at.nid)?.index()?, key)?,
        };
    }
    at.leaf(store, purpose)
}

/// [`find`], as the operation has the nodes on the way.
#[inline]
fn find_in(op: &Op<'_, FsNode>, root: &Root, key: u64) -> Result<Leaf, Error> {
    match op.is_large() {
        false => find(op.store(), root, key, Purpose::Change),
        true => find_own(op, root, key),
    }
}

fn find_own(op: &Op<'_, FsNode>, root: &Root, key: u64) -> Result<Leaf, Error> {
    let mut at = Descent::enter(&root.children, key)?;
    for _ in 0..root.depth {
        at = match op.own(at.nid) {
            Some(slot) => at.step(op.peek(slot).index()?, key)?,
            None => at.step(read(op.store(), at.nid)?.index()?, key)?,
        };
    }
    at.leaf_in(op)
}

/// Where the leaf ends that covers `key`, as the operation, which holds the inode exclusively, has the tree.
pub fn high_in(
    op: &Op<'_, FsNode>,
    inode: Slot,
    tree: TreeId,
    key: u64,
) -> Result<Option<u64>, Error> {
    Ok(find_in(op, root_of(op, inode, tree)?, key)?.high)
}

/// Has a look at the leaf that covers `key`, locked shared; its bounds hold while it is locked. The inode is
/// locked at least shared. `ahead` is what was told in this very inode.
pub fn read_leaf<R>(
    store: &Store<FsNode>,
    inode: &Inode,
    root: &Root,
    key: u64,
    (purpose, mut ahead): (Purpose, Option<Ahead>),
    look: impl FnOnce(&NodeRef<'_, FsNode>, &Leaf) -> Result<R, Error>,
) -> Result<(R, Leaf), Error> {
    loop {
        let shape = inode.shape();
        let same = || inode.shape() == shape || planted(Canary::ShapeIgnored);
        let told = ahead.take();
        let told = told.and_then(|ahead| ahead.leaf((key, shape), store, purpose));
        let leaf = told.unwrap_or_else(|| find(store, root, key, purpose));
        if !same() {
            continue;
        }
        let leaf = match leaf {
            Ok(leaf) => leaf,
            Err(error) if same() => return Err(error),
            Err(_) => continue,
        };
        let content = leaf.node.read();
        if same() {
            let content = content.map_err(|e| owned_error(leaf.node.nid(), e))?;
            let seen = look(&content, &leaf)?;
            drop(content);
            return Ok((seen, leaf));
        }
    }
}

/// Where the keys end that are hidden with `key` by a node that cannot be read, the leaf or an index node above
/// it; always behind `key`. `None`: no end. The inode is locked at least shared.
pub fn hidden_to(store: &Store<FsNode>, root: &Root, key: u64) -> Option<u64> {
    let mut at = Descent::enter(&root.children, key).ok()?;
    for _ in 0..root.depth {
        let below = read(store, at.nid).and_then(|node| at.step(node.index()?, key));
        let Ok(below) = below else { break };
        at = below;
    }
    at.high
}

/// Calls `each` with every leaf in key order from the one that covers `from`, until it
/// returns false. The inode is locked at least shared.
pub fn walk(
    store: &Store<FsNode>,
    root: &Root,
    from: u64,
    mut each: impl FnMut(&NodeRef<'_, FsNode>, &Leaf) -> Result<bool, Error>,
) -> Result<(), Error> {
    let mut next = Some(from);
    while let Some(key) = next {
        let leaf = find(store, root, key, Purpose::Read)?;
        let content = leaf
            .node
            .read()
            .map_err(|error| owned_error(leaf.node.nid(), error))?;
        if !each(&content, &leaf)? {
            return Ok(());
        }
        next = leaf.high;
    }
    Ok(())
}

/// What `look` finds in the leaf that covers `key`, and that ends where it is told (`None`: no end), if all nodes on the way are in memory and nobody changes them; see
/// [`Store::glance`]. The inode is locked at least shared.
#[inline]
pub fn glance<R>(
    store: &Store<FsNode>,
    inode: &Inode,
    root: &Root,
    key: u64,
    look: impl Fn(&FsNode, Option<u64>) -> Option<R>,
) -> Option<R> {
    let shape = inode.shape();
    let mut at = Descent::enter(&root.children, key).ok()?;
    for _ in 0..root.depth {
        at = at.glance(store, key)?;
    }
    let found = store.glance(at.nid, |node| look(node, at.high))?;
    // Else names may have moved, or another node may have the leaf's nid, since the way to it was seen.
    (inode.shape() == shape || planted(Canary::ShapeIgnored)).then_some(found)
}

/// Where the leaf that covers a key is, as it was told before the inode was locked.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    at: Descent,
    /// The tree's then: as long as it has that one the leaf covers the key still.
    shape: u64,
}

impl Ahead {
    /// The leaf that covers `key`, as a look at a tree of this shape would find it, if that was told.
    fn leaf(
        self,
        (key, shape): (u64, u64),
        store: &Store<FsNode>,
        purpose: Purpose,
    ) -> Option<Result<Leaf, Error>> {
        let same = self.shape == shape || planted(Canary::ShapeIgnored);
        (same && self.covers(key)).then(|| self.at.leaf(store, purpose))
    }

    /// Whether it is the leaf of this key.
    pub fn covers(&self, key: u64) -> bool {
        self.at.low <= key && self.at.high.is_none_or(|high| key < high)
    }

    /// Asks for the leaf's memory, of which the reference was asked for before; false: it is in none.
    #[inline]
    pub fn ask(&self, store: &Store<FsNode>, purpose: Purpose) -> bool {
        match purpose {
            Purpose::Read => store.ask_node(self.at.nid),
            Purpose::Change => store.ask_node_to_change(self.at.nid),
        }
    }
}

/// Tells where the leaf is that covers `key`, if all nodes on the way are in memory and nobody changes them, and asks for the memory of the
/// reference to it. The inode is locked at least shared.
#[inline]
pub fn look_ahead(store: &Store<FsNode>, inode: &Inode, root: &Root, key: u64) -> Option<Ahead> {
    let shape = inode.shape();
    let mut at = Descent::enter(&root.children, key).ok()?;
    for _ in 0..root.depth {
        at = at.glance(store, key)?;
    }
    store.ask(at.nid);
    Some(Ahead { at, shape })
}

/// A position on the way down.
#[derive(Clone, Copy, Debug)]
struct Descent {
    nid: Nid,
    low: u64,
    high: Option<u64>,
}

impl Descent {
    fn enter(children: &[Child], key: u64) -> Result<Descent, Error> {
        let all = Descent {
            nid: Nid(0),
            low: 0,
            high: None,
        };
        all.step(children, key)
    }

    fn step(self, children: &[Child], key: u64) -> Result<Descent, Error> {
        let at = child_for(children, key)
            .ok_or_else(|| Damage::new("tree", "a node without children"))?;
        let low = children[at].key;
        let high = children.get(at + 1).map(|c| c.key).or(self.high);
        // Bounds that do not nest would make a walk run backwards.
        if (at > 0 && low < self.low) || high.is_some_and(|high| high <= key) {
            return Err(Damage::new("tree", "children reach outside their parent").into());
        }
        Ok(Descent {
            nid: children[at].nid,
            low,
            high,
        })
    }

    /// [`Descent::step`] into an index node, if that is in memory and nobody changes it.
    #[inline]
    fn glance(self, store: &Store<FsNode>, key: u64) -> Option<Descent> {
        store.glance(self.nid, |node| self.step(node.index().ok()?, key).ok())
    }

    /// The index node that this is, and the way on from there, as the operation has it.
    fn below(self, op: &Op<'_, FsNode>, key: u64) -> Result<(Node<FsNode>, Descent), Error> {
        let node = load_in(op, self.nid)?;
        let below = match op.slot_of(node.nid()) {
            // Locked by a plan of this operation.
            Some(slot) => self.step(op.peek(slot).index()?, key)?,
            None => {
                let content = node.read().map_err(|e| owned_error(node.nid(), e))?;
                self.step(content.index()?, key)?
            }
        };
        Ok((node, below))
    }

    /// Leaves are what cores take turns to change.
    fn leaf(self, store: &Store<FsNode>, purpose: Purpose) -> Result<Leaf, Error> {
        let node = match purpose {
            Purpose::Read => store.get_once(self.nid),
            Purpose::Change => store.get_to_change(self.nid),
        };
        Ok(self.leaf_at(owned(self.nid, node)?))
    }

    fn leaf_in(self, op: &Op<'_, FsNode>) -> Result<Leaf, Error> {
        match op.own(self.nid) {
            Some(slot) => Ok(self.leaf_at(op.node(slot))),
            None => self.leaf(op.store(), Purpose::Change),
        }
    }

    fn leaf_at(self, node: Node<FsNode>) -> Leaf {
        Leaf {
            node,
            low: self.low,
            high: self.high,
        }
    }
}

fn inode_of<'a>(op: &'a Op<'_, FsNode>, slot: Slot) -> Result<&'a Inode, Error> {
    Ok(op.peek(slot).inode()?)
}

fn root_of<'a>(op: &'a Op<'_, FsNode>, slot: Slot, tree: TreeId) -> Result<&'a Root, Error> {
    let root = inode_of(op, slot)?.root(tree);
    Ok(root.ok_or_else(|| Damage::new("inode", "has no tree"))?)
}

/// Locks the leaf that covers `key`, and tells where its keys end. The operation holds the inode,
/// shared with others or not. `ahead` is what was told in this very inode.
pub fn lock_leaf(
    op: &mut Op<'_, FsNode>,
    inode: Slot,
    tree: TreeId,
    key: u64,
    mut ahead: Option<Ahead>,
) -> Result<(Slot, Option<u64>), Error> {
    loop {
        let before = inode_of(op, inode)?;
        let shape = before.shape();
        let same = |inode: &Inode| inode.shape() == shape || planted(Canary::ShapeIgnored);
        let told = ahead.take();
        let told = told.and_then(|ahead| ahead.leaf((key, shape), op.store(), Purpose::Change));
        let leaf = match told {
            Some(leaf) => leaf,
            None => find_in(op, root_of(op, inode, tree)?, key),
        };
        if !same(before) {
            continue;
        }
        let found = leaf.and_then(|leaf| {
            let high = leaf.high;
            Ok((leaf.lock(op)?, high))
        });
        // A leaf that was locked in vain stays locked: its keys are lower than those wanted, as
        // a split moves the upper ones, and leaves are locked in that order. One that went while this
        // waited was not locked.
        if same(inode_of(op, inode)?) {
            return found;
        }
    }
}

/// The way to the leaf that covers `key`, which the operation has locked: others may split the
/// index nodes above it meanwhile, but not move `key` to another leaf.
pub fn path_to(
    op: &Op<'_, FsNode>,
    inode: Slot,
    tree: TreeId,
    key: u64,
    leaf: Slot,
) -> Result<Path, Error> {
    loop {
        let shape = inode_of(op, inode)?.shape();
        let found = path(op, inode, tree, key);
        if found
            .as_ref()
            .is_ok_and(|path| path.leaf.node.nid() == op.nid(leaf))
        {
            return found;
        }
        if inode_of(op, inode)?.shape() == shape {
            found?;
            return Err(Damage::new("tree", "a key leads to two leaves").into());
        }
    }
}

/// Finds the way to the leaf that covers `key`. The operation holds the inode.
pub fn path(op: &Op<'_, FsNode>, inode: Slot, tree: TreeId, key: u64) -> Result<Path, Error> {
    let (mut way, mut at, depth) = Way::enter(op, inode, tree, key)?;
    for _ in 0..depth {
        let (node, below) = at.below(op, key)?;
        way.index.push((node, at.low));
        at = below;
    }
    let leaf = at.leaf_in(op)?;
    Ok(Path { way, leaf })
}

/// Finds the first node that is damaged on the way to the leaf that covers `key`, or that leaf, if it is none by what `check` says.
/// The operation holds the inode exclusively, and has locked nothing below.
pub fn broken(
    op: &Op<'_, FsNode>,
    inode: Slot,
    tree: TreeId,
    key: u64,
    check: impl Fn(&FsNode) -> Result<(), Damage>,
) -> Result<Option<Broken>, Error> {
    let (mut way, mut at, depth) = Way::enter(op, inode, tree, key)?;
    for height in (0..=depth).rev() {
        let below = match height {
            0 => at.leaf_in(op).and_then(|leaf| {
                let nid = leaf.node.nid();
                let content = leaf.node.read().map_err(|e| owned_error(nid, e))?;
                Ok(check(&content).map(|()| None)?)
            }),
            _ => at.below(op, key).map(Some),
        };
        match below {
            Ok(Some((node, below))) => {
                way.index.push((node, at.low));
                at = below;
            }
            Ok(None) => {}
            Err(error) if error.is_damage() => {
                let Descent { nid, low, .. } = at;
                return Ok(Some(Broken {
                    way,
                    nid,
                    low,
                    height,
                }));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

impl Way {
    /// The first step of a way, with the levels of index nodes on it.
    fn enter(
        op: &Op<'_, FsNode>,
        inode: Slot,
        tree: TreeId,
        key: u64,
    ) -> Result<(Way, Descent, u8), Error> {
        let root = root_of(op, inode, tree)?;
        let at = Descent::enter(&root.children, key)?;
        let index = Vec::with_capacity(root.depth as usize);
        Ok((Way { inode, tree, index }, at, root.depth))
    }

    fn lock_index(&self, op: &mut Op<'_, FsNode>, level: usize) -> Result<Slot, Error> {
        let node = &self.index[level].0;
        op.lock(node)
            .map_err(|error| owned_error(node.nid(), error))
    }

    /// Plans for `more` nodes (few) beside the one at its end.
    fn plan_growth<'s>(
        &self,
        store: &'s Store<FsNode>,
        op: &mut Op<'_, FsNode>,
        mut below: Nid,
        mut more: usize,
    ) -> Result<Growth<'s>, Error> {
        let mut growth = Growth {
            levels: Vec::new(),
            fresh: Vec::new(),
            reaches_root: false,
            deepens: false,
            passed: false,
        };
        for level in (0..self.index.len()).rev() {
            let slot = self.lock_index(op, level)?;
            growth.levels.push((slot, 0));
            let above = |child: &Child| child.nid == below;
            if op.shares(self.inode) && !op.peek(slot).index()?.iter().any(above) {
                growth.passed = true;
                return Ok(growth);
            }
            below = self.index[level].0.nid();
            let children = op.peek(slot).index()?.len() + more;
            let new = self.splits(op, level, children)?;
            if new == 0 {
                return Ok(growth);
            }
            if level == 0 && op.shares(self.inode) {
                // Somebody comes again who shares it with nobody.
                growth.reaches_root = true;
                return Ok(growth);
            }
            for _ in 0..new {
                growth.fresh.push(store.reserve_nid()?);
            }
            growth.levels.last_mut().expect("pushed above").1 = new;
            more = new;
        }
        growth.reaches_root = true;
        let inode = inode_of(op, self.inode)?;
        let most = match self.index.is_empty() && inode.is_crowded() {
            true => CROWDED_ROOT.min(root_max()),
            false => root_max(),
        };
        if root_of(op, self.inode, self.tree)?.children.len() + more > most {
            growth.deepens = true;
            growth.fresh.push(store.reserve_nid()?);
        }
        Ok(growth)
    }

    /// How many index nodes must take a part of one of this level that would have so many children.
    fn splits(&self, op: &Op<'_, FsNode>, level: usize, children: usize) -> Result<usize, Error> {
        let room = match level == 0 && inode_of(op, self.inode)?.is_crowded() {
            true => root_max().saturating_sub(root_of(op, self.inode, self.tree)?.children.len()),
            false => 0,
        };
        let (most, pieces) = match room {
            0 => (index_max(), 2),
            room => (crowded_index(), limit(CROWDED_PIECES, 3).min(room + 1)),
        };
        Ok(match children <= most {
            true => 0,
            false => pieces.min(children) - 1,
        })
    }

    /// Links new nodes, already created, whose keys lie inside the one at its end.
    fn grow(&self, op: &mut Op<'_, FsNode>, growth: Growth<'_>, mut pending: Vec<Child>) {
        let mut fresh = growth.fresh.into_iter();
        for (slot, new) in growth.levels {
            if new > 0 {
                pending = split_index(op, slot, fresh.by_ref().take(new).collect(), pending);
            } else {
                let tree = self.tree;
                for child in std::mem::take(&mut pending) {
                    op.apply(slot, Delta::InsertChild { tree, child });
                }
            }
        }
        if !growth.reaches_root {
            return;
        }
        if growth.deepens {
            let fresh = fresh.next().expect("one nid is reserved for a deeper root");
            deepen(op, self.inode, self.tree, fresh, pending);
        } else {
            let tree = self.tree;
            for child in pending {
                op.apply(self.inode, Delta::InsertChild { tree, child });
            }
        }
    }

    fn plan_removals(
        &self,
        op: &mut Op<'_, FsNode>,
        leaves: Vec<Slot>,
        keys: Vec<u64>,
    ) -> Result<Removal, Error> {
        let mut removal = Removal {
            inode: self.inode,
            tree: self.tree,
            delete: leaves,
            at: None,
            keys,
            lower: Vec::new(),
            empties: false,
            collapse: false,
        };
        for level in (0..self.index.len()).rev() {
            let slot = self.lock_index(op, level)?;
            let children = op.peek(slot).index()?;
            if children.len() > removal.keys.len() {
                let root = root_of(op, self.inode, self.tree)?;
                removal.collapse =
                    level == 0 && root.children.len() == 1 && children.len() <= root_max() / 2;
                removal.at = Some(slot);
                let children = children.to_vec();
                self.plan_lower(op, &mut removal, level + 1, &children)?;
                return Ok(removal);
            }
            removal.delete.push(slot);
            removal.keys = vec![self.index[level].1];
        }
        let children = root_of(op, self.inode, self.tree)?.children.clone();
        removal.empties = children.len() == removal.keys.len();
        if !removal.empties {
            self.plan_lower(op, &mut removal, 0, &children)?;
        }
        Ok(removal)
    }

    /// Plans for the index node that takes over the keys of the first of `children`, if that is what
    /// goes: `level` is theirs, and invariant 2 holds for all levels below.
    fn plan_lower(
        &self,
        op: &mut Op<'_, FsNode>,
        removal: &mut Removal,
        level: usize,
        children: &[Child],
    ) -> Result<(), Error> {
        let mut successor = match (children, removal.keys.as_slice()) {
            ([first, second, ..], [key]) if first.key == *key => second.nid,
            _ => return Ok(()),
        };
        for _ in level..self.index.len() {
            let node = load_in(op, successor)?;
            let slot = op.lock(&node).map_err(|e| owned_error(successor, e))?;
            removal.lower.push(slot);
            successor = op.peek(slot).index()?[0].nid;
        }
        Ok(())
    }
}

impl Path {
    /// Locks the leaf.
    pub fn lock_leaf(&self, op: &mut Op<'_, FsNode>) -> Result<Slot, Error> {
        let nid = self.leaf.node.nid();
        let locked = op.lock(&self.leaf.node);
        locked.map_err(|error| owned_error(nid, error))
    }

    /// Plans for `leaves` more leaves (few) beside this one.
    pub fn plan_growth<'s>(
        &self,
        store: &'s Store<FsNode>,
        op: &mut Op<'_, FsNode>,
        leaves: usize,
    ) -> Result<Growth<'s>, Error> {
        let leaf = self.leaf.node.nid();
        self.way.plan_growth(store, op, leaf, leaves)
    }

    /// Links new leaves, already created, whose keys lie inside this path's leaf.
    pub fn grow(&self, op: &mut Op<'_, FsNode>, growth: Growth<'_>, leaves: Vec<Child>) {
        self.way.grow(op, growth, leaves);
    }

    /// Plans to take this leaf, which `lock_leaf` locked, out of the tree.
    pub fn plan_removal(&self, op: &mut Op<'_, FsNode>, leaf: Slot) -> Result<Removal, Error> {
        self.way.plan_removals(op, vec![leaf], vec![self.leaf.low])
    }

    /// Plans to take this leaf, which is locked, out of a tree whose inode is shared: `None` if that is more than a change
    /// of the index node right above it.
    pub fn plan_shared_removal(
        &self,
        op: &mut Op<'_, FsNode>,
        leaf: Slot,
    ) -> Result<Option<Removal>, Error> {
        let Some(level) = self.way.index.len().checked_sub(1) else {
            return Ok(None);
        };
        let slot = self.way.lock_index(op, level)?;
        let nid = op.nid(leaf);
        let children = op.peek(slot).index()?;
        // The first one's keys go to no neighbour; and others may have moved it to another index node.
        let key = match children.iter().position(|child| child.nid == nid) {
            None | Some(0) => return Ok(None),
            Some(at) => children[at].key,
        };
        Ok(Some(Removal {
            inode: self.way.inode,
            tree: self.way.tree,
            delete: vec![leaf],
            at: Some(slot),
            keys: vec![key],
            lower: Vec::new(),
            empties: false,
            collapse: false,
        }))
    }
}

impl Broken {
    /// Plans to take the node out of the tree. It stays, and with it all that only it names.
    pub fn plan_removal(&self, op: &mut Op<'_, FsNode>) -> Result<Removal, Error> {
        self.way.plan_removals(op, Vec::new(), vec![self.low])
    }

    /// Plans to have the keys from `key` on, which the node covers, covered by an empty leaf.
    pub fn plan_relief<'s>(self, op: &mut Op<'s, FsNode>, key: u64) -> Result<Relief<'s>, Error> {
        let store = op.store();
        let growth = self.way.plan_growth(store, op, self.nid, 1)?;
        let mut fresh = Vec::with_capacity(self.height as usize + 1);
        for _ in 0..=self.height {
            fresh.push(store.reserve_nid()?);
        }
        let way = self.way;
        Ok(Relief {
            way,
            growth,
            key,
            fresh,
        })
    }
}

impl Relief<'_> {
    /// Links `leaf`, which is empty.
    pub fn finish(self, op: &mut Op<'_, FsNode>, leaf: FsNode) {
        let (key, mut node, mut top) = (self.key, leaf, Vec::new());
        for fresh in self.fresh {
            let nid = fresh.nid();
            op.create(fresh, node);
            top = vec![Child { key, nid }];
            node = FsNode::Index(top.clone());
        }
        let inode = self.way.inode;
        self.way.grow(op, self.growth, top);
        if let Ok(inode) = op.peek(inode).inode() {
            inode.reshaped();
        }
    }
}

/// Plans to take out up to `most` of the last leaves under one parent; `leaves` in the
/// result are locked, in descending key order. Repeating it empties a tree in bounded steps.
pub fn plan_tail(
    op: &mut Op<'_, FsNode>,
    inode: Slot,
    tree: TreeId,
    most: usize,
) -> Result<(Removal, Vec<Slot>), Error> {
    let path = path(op, inode, tree, u64::MAX)?;
    let parent = match path.way.index.len() {
        0 => root_of(op, inode, tree)?.children.clone(),
        n => {
            let slot = path.way.lock_index(op, n - 1)?;
            op.peek(slot).index()?.to_vec()
        }
    };
    let (mut leaves, mut keys) = (Vec::new(), Vec::new());
    for child in parent.iter().rev().take(most) {
        let node = load_in(op, child.nid)?;
        leaves.push(op.lock(&node).map_err(|e| owned_error(child.nid, e))?);
        keys.push(child.key);
    }
    let removal = path.way.plan_removals(op, leaves.clone(), keys)?;
    Ok((removal, leaves))
}

impl Growth<'_> {
    /// Whether it takes the inode's exclusive lock.
    pub fn is_exclusive(&self) -> bool {
        self.reaches_root || self.passed
    }
}

impl Removal {
    /// True when no leaf will be left: the caller must give the inode another body (or, for
    /// attributes, `finish` ends the tree).
    pub fn empties(&self) -> bool {
        self.empties
    }

    /// Takes the leaves out. When the plan empties a body's tree, `empty_body` must be there
    /// and becomes the body.
    pub fn finish(self, op: &mut Op<'_, FsNode>, empty_body: Option<crate::content::Body>) {
        let (inode, tree) = (self.inode, self.tree);
        for slot in self.delete {
            op.delete(slot);
        }
        // Also where nobody shares the inode, for who was told before where a leaf is.
        if let Ok(inode) = op.peek(inode).inode() {
            inode.reshaped();
        }
        if self.empties {
            match (tree, empty_body) {
                (TreeId::Body, Some(body)) => op.apply(inode, Delta::Body(body)),
                (TreeId::Body, None) => unreachable!("the caller gives an emptied body"),
                (TreeId::Xattrs, _) => {
                    let root = Root::default();
                    op.apply(inode, Delta::SetRoot { tree, root });
                }
            }
            return;
        }
        let slot = self.at.unwrap_or(inode);
        if let ([key], false) = (self.keys.as_slice(), planted(Canary::IndexNotLowered)) {
            for slot in self.lower {
                op.apply(slot, Delta::Lower(*key));
            }
        }
        for key in self.keys {
            op.apply(slot, Delta::RemoveChild { tree, key });
        }
        if self.collapse
            && let (Some(slot), Some(root)) = (self.at, old_root(op, inode, tree))
        {
            let children = op.peek(slot).index().map(<[Child]>::to_vec);
            if let Ok(children) = children {
                let depth = root - 1;
                let root = Root { depth, children };
                op.delete(slot);
                op.apply(inode, Delta::SetRoot { tree, root });
            }
        }
    }
}

fn old_root(op: &Op<'_, FsNode>, inode: Slot, tree: TreeId) -> Option<u8> {
    root_of(op, inode, tree).ok().map(|root| root.depth)
}

/// Splits an index node, with `pending` added, into parts of about one size, of which new nodes have all but the first; returns
/// the new ones.
fn split_index(
    op: &mut Op<'_, FsNode>,
    slot: Slot,
    fresh: Vec<FreshNid<'_>>,
    pending: Vec<Child>,
) -> Vec<Child> {
    let mut merged = match op.peek(slot) {
        FsNode::Index(list) => list.clone(),
        _ => unreachable!("checked when the growth was planned"),
    };
    merged.extend_from_slice(&pending);
    merged.sort_unstable_by_key(|child| child.key);
    let (all, parts) = (merged.len(), fresh.len() + 1);
    debug_assert!(parts > 1 && all >= parts, "no part is empty");
    let child = |(i, nid): (usize, &FreshNid<'_>)| Child {
        key: merged[(i + 1) * all / parts].key,
        nid: nid.nid(),
    };
    let children: Vec<Child> = fresh.iter().enumerate().map(child).collect();
    let first = children[0].key;
    op.apply(slot, Delta::DropFrom(first));
    for new in pending.into_iter().filter(|new| new.key < first) {
        let tree = TreeId::Body; // an index node has one list only
        op.apply(slot, Delta::InsertChild { tree, child: new });
    }
    for (i, nid) in fresh.into_iter().enumerate().rev() {
        let part = merged.split_off((i + 1) * all / parts);
        op.create(nid, FsNode::Index(part));
    }
    children
}

/// Moves the root's children, and `pending`, to a new index node below the root.
fn deepen(
    op: &mut Op<'_, FsNode>,
    inode: Slot,
    tree: TreeId,
    fresh: FreshNid<'_>,
    pending: Vec<Child>,
) {
    let old = root_of(op, inode, tree).expect("planned on this root");
    let depth = old.depth + 1;
    let mut children = old.children.clone();
    children.extend(pending);
    children.sort_unstable_by_key(|child| child.key);
    let top = Child {
        key: children[0].key,
        nid: fresh.nid(),
    };
    op.create(fresh, FsNode::Index(children));
    let root = Root {
        depth,
        children: vec![top],
    };
    op.apply(inode, Delta::SetRoot { tree, root });
}

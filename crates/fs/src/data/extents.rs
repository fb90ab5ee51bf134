//! Where a file's pages are: lookup and change of its extents, in the inode while there are
//! few of them, else in a tree.
//!
//! Invariants:
//! 1. Extents of one file never overlap, and none reaches past the key range of its leaf.
//! 2. One operation changes one leaf, which may split, or go if nothing is left in it, with index nodes above. Its record is bounded by the leaf,
//!    the depth of the tree, and the number of changes, at most [`CHANGES_MAX`].
//! 3. The shape of a file's tree changes only under its exclusive I/O lock, or under the shared
//!    one together with the flusher lock; so a leaf bound looked up there stays true.

use crate::content::entry::replace_extents;
use crate::content::inode::INLINE_EXTENTS_MAX;
use crate::content::{Body, Child, Delta, FileExtent, FsNode, Inode, Root, TreeId};
use crate::{Error, tree};
use engine::{Extent, FreshNid, Op, Slot, Store};
use format::{Block, Damage};
use smallvec::SmallVec;
use std::ops::Range;

/// Extents in a leaf.
pub(super) const LEAF_MAX: usize = 600;
/// Ranges that one operation maps anew.
pub(super) const CHANGES_MAX: usize = 512;
/// Leaves that one operation empties when a file is cut.
const CUT_LEAVES: usize = 4;
/// Blocks that one operation frees. An extent is logged once for each chunk it reaches into: chunks
/// have at least 2^15 blocks, or an array has at most 128, so this is 512 pieces at most, and
/// one more for each extent that crosses a border.
pub(crate) const FREE_MAX: u64 = 1 << 24;
/// No file has this page.
pub(super) const PAGE_LIMIT: u64 = 1 << 52;

/// A range of pages that is to be mapped as `with` says.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub pages: Range<u64>,
    pub with: Vec<FileExtent>,
    /// `with` names the blocks that are there already, in another state: nothing is freed.
    pub same_blocks: bool,
}

/// Everything locked and reserved for some changes of one leaf.
pub(super) struct Plan<'s> {
    inode: Slot,
    place: Place<'s>,
    changes: Vec<Change>,
    /// Blocks that the file gains, less those it loses.
    gained: i64,
}

enum Place<'s> {
    /// The inode keeps its list.
    Inode {
        replaces_inline: bool,
    },
    /// The inode's list grows into a tree with these leaves.
    NewTree(Vec<(FreshNid<'s, FsNode>, Vec<FileExtent>)>),
    Leaf(Slot),
    /// Nothing is left in the leaf: it goes, and index nodes above it that it empties.
    Removed(Box<tree::Removal>),
    Split {
        leaf: Slot,
        path: Box<tree::Path>,
        growth: Box<tree::Growth<'s>>,
        /// What the old leaf has from `from` on.
        from: u64,
        low: Vec<FileExtent>,
        high: Vec<(FreshNid<'s, FsNode>, Vec<FileExtent>)>,
    },
}

/// The parts of extents that lie in `pages`.
pub(super) fn clip(list: &[FileExtent], pages: &Range<u64>) -> Vec<FileExtent> {
    let first = list.partition_point(|e| e.end() <= pages.start);
    list[first..]
        .iter()
        .take_while(|e| e.page < pages.end)
        .map(|e| clip_one(e, pages))
        .collect()
}

fn clip_one(extent: &FileExtent, pages: &Range<u64>) -> FileExtent {
    let start = extent.page.max(pages.start);
    let end = extent.end().min(pages.end);
    FileExtent {
        page: start,
        block: Block(extent.block.0 + (start - extent.page)),
        len: (end - start) as u32,
        written: extent.written,
    }
}

/// Extents of a file that were looked up: mostly one, seldom more than lie here without memory from the heap.
pub(super) type Mapped = SmallVec<[FileExtent; 4]>;

/// The mapped parts of `pages`, ascending, at most `most` of them. The inode is locked.
pub(super) fn lookup(
    store: &Store<FsNode>,
    inode: &Inode,
    pages: Range<u64>,
    most: usize,
) -> Result<Mapped, Error> {
    let mut found = Mapped::new();
    if pages.is_empty() {
        return Ok(found);
    }
    let mut add = |list: &[FileExtent], bounds: Range<u64>| -> Result<bool, Error> {
        let first = list.partition_point(|e| e.end() <= pages.start);
        for extent in list[first..].iter().take_while(|e| e.page < pages.end) {
            let (block, len) = (extent.block, extent.len);
            if !store.is_data_extent(Extent { block, len }) {
                let what = format!("{extent:?} lies outside the data area");
                return Err(Damage::new("extent", what).into());
            }
            if extent.page < bounds.start || extent.end() > bounds.end {
                let what = format!("{extent:?} maps pages of another leaf");
                return Err(Damage::new("extent", what).into());
            }
            if found.len() == most {
                return Ok(false);
            }
            found.push(clip_one(extent, &pages));
        }
        Ok(true)
    };
    match &inode.body {
        Body::Inline(_) => {}
        Body::Extents(list) => {
            add(list, 0..u64::MAX)?;
        }
        Body::Tree(root) => tree::walk(store, root, pages.start, |content, leaf| {
            let bounds = leaf.low..leaf.high.unwrap_or(u64::MAX);
            Ok(add(content.extents()?, bounds)? && leaf.high.is_some_and(|high| high < pages.end))
        })?,
        Body::Entries(_) | Body::Orphans(_) => {
            return Err(Damage::new("inode", "a file with a directory's body").into());
        }
    }
    Ok(found)
}

/// Extents that [`glance`] finds at most.
const GLANCED_MAX: usize = 16;

/// As [`lookup`] without waiting. `None`: they are too many, or in nodes that are not in memory or that somebody
/// changes, or in more than one leaf, or not as they should be: `lookup` tells.
pub(super) fn glance(store: &Store<FsNode>, inode: &Inode, pages: &Range<u64>) -> Option<Mapped> {
    match &inode.body {
        Body::Extents(list) => few(store, list, pages),
        Body::Tree(root) => {
            let found = tree::glance(store, inode, root, pages.start, |leaf, high| {
                let list = leaf.extents().ok()?;
                let outside = |last: &FileExtent| high.is_some_and(|high| last.end() > high);
                match list.last().is_some_and(outside) {
                    true => None,
                    false => few(store, list, pages),
                }
            })?;
            // What follows the last one may be in the next leaf.
            (found.last()?.end() >= pages.end).then_some(found)
        }
        Body::Inline(_) | Body::Entries(_) | Body::Orphans(_) => None,
    }
}

fn few(store: &Store<FsNode>, list: &[FileExtent], pages: &Range<u64>) -> Option<Mapped> {
    let mut found = Mapped::new();
    let first = list.partition_point(|e| e.end() <= pages.start);
    for extent in list[first..].iter().take_while(|e| e.page < pages.end) {
        let (block, len) = (extent.block, extent.len);
        if found.len() == GLANCED_MAX || !store.is_data_extent(Extent { block, len }) {
            return None;
        }
        found.push(clip_one(extent, pages));
    }
    Some(found)
}

/// The page at which the leaf that covers `page` ends: one operation maps pages below it.
pub(super) fn leaf_end(store: &Store<FsNode>, inode: &Inode, page: u64) -> Result<u64, Error> {
    match &inode.body {
        Body::Tree(root) => Ok(tree::find(store, root, page, tree::Purpose::Read)?
            .high
            .unwrap_or(PAGE_LIMIT)),
        _ => Ok(PAGE_LIMIT),
    }
}

/// Applies changes to a copy of a list; returns it, with what is freed and what is gained.
fn preview(
    list: &[FileExtent],
    changes: &[Change],
) -> Result<(Vec<FileExtent>, Vec<Extent>, i64), Error> {
    let mut merged = list.to_vec();
    let (mut freed, mut gained) = (Vec::new(), 0i64);
    for change in changes {
        if !change.same_blocks {
            for old in clip(&merged, &change.pages) {
                gained -= old.len as i64;
                freed.push(Extent {
                    block: old.block,
                    len: old.len,
                });
            }
            gained += change.with.iter().map(|e| e.len as i64).sum::<i64>();
        }
        let Range { start, end } = change.pages;
        replace_extents(&mut merged, start, end, &change.with)?;
    }
    Ok((merged, freed, gained))
}

/// Cuts a list into pieces that fit leaves: full ones when a file grows at its end, roomy
/// ones otherwise.
fn leaves_of(list: Vec<FileExtent>, appends: bool) -> Vec<Vec<FileExtent>> {
    let each = if appends {
        LEAF_MAX
    } else {
        list.len()
            .div_ceil(list.len().div_ceil(LEAF_MAX * 3 / 4).max(2))
    };
    list.chunks(each.max(1)).map(<[_]>::to_vec).collect()
}

/// Locks and reserves what the changes need. They are ascending, apart, at most
/// [`CHANGES_MAX`], and end below the [`leaf_end`] of the first.
pub(super) fn plan<'s>(
    store: &'s Store<FsNode>,
    op: &mut Op<'s, FsNode>,
    inode: Slot,
    changes: Vec<Change>,
) -> Result<Plan<'s>, Error> {
    assert!(changes.len() <= CHANGES_MAX, "bounded by the callers");
    let body = &op.peek(inode).inode()?.body;
    let (place, freed, gained) = match body {
        Body::Tree(_) => plan_leaf(store, op, inode, &changes)?,
        _ => plan_in_inode(store, body, &changes)?,
    };
    for extent in freed {
        op.free(extent)?;
    }
    Ok(Plan {
        inode,
        place,
        changes,
        gained,
    })
}

fn plan_in_inode<'s>(
    store: &'s Store<FsNode>,
    body: &Body,
    changes: &[Change],
) -> Result<(Place<'s>, Vec<Extent>, i64), Error> {
    let list: &[FileExtent] = match body {
        Body::Extents(list) => list,
        Body::Inline(bytes)
            if !bytes.is_empty() && !changes.iter().any(|c| c.pages.contains(&0)) =>
        {
            debug_assert!(
                false,
                "an inline body is moved before extents take its place"
            );
            return Err(Error::Invalid("extents in place of an inline body"));
        }
        _ => &[],
    };
    let (merged, freed, gained) = preview(list, changes)?;
    if merged.len() <= INLINE_EXTENTS_MAX {
        let replaces_inline = matches!(body, Body::Inline(_));
        return Ok((Place::Inode { replaces_inline }, freed, gained));
    }
    let pieces = leaves_of(merged, true);
    let mut leaves = Vec::with_capacity(pieces.len());
    for piece in pieces {
        leaves.push((store.reserve_nid()?, piece));
    }
    Ok((Place::NewTree(leaves), freed, gained))
}

fn plan_leaf<'s>(
    store: &'s Store<FsNode>,
    op: &mut Op<'s, FsNode>,
    inode: Slot,
    changes: &[Change],
) -> Result<(Place<'s>, Vec<Extent>, i64), Error> {
    let Some(first) = changes.first() else {
        return Ok((
            Place::Inode {
                replaces_inline: false,
            },
            Vec::new(),
            0,
        ));
    };
    let start = first.pages.start;
    let path = tree::path(op, inode, TreeId::Body, start)?;
    let leaf = path.lock_leaf(op)?;
    let old = op.peek(leaf).extents()?;
    let (merged, freed, gained) = preview(old, changes)?;
    if merged.is_empty() && !old.is_empty() {
        let removal = path.plan_removal(op, leaf)?;
        return Ok((Place::Removed(Box::new(removal)), freed, gained));
    }
    if merged.len() <= LEAF_MAX {
        return Ok((Place::Leaf(leaf), freed, gained));
    }
    let appends = old.last().is_none_or(|last| last.end() <= start);
    let mut pieces = leaves_of(merged, appends).into_iter();
    let low = pieces.next().unwrap_or_default();
    let mut high = Vec::new();
    for piece in pieces {
        high.push((store.reserve_nid()?, piece));
    }
    let growth = path.plan_growth(store, op, high.len())?;
    let from = start.min(high.first().map_or(start, |(_, piece)| piece[0].page));
    let place = Place::Split {
        leaf,
        path: Box::new(path),
        growth: Box::new(growth),
        from,
        low,
        high,
    };
    Ok((place, freed, gained))
}

fn create_leaves(
    op: &mut Op<'_, FsNode>,
    leaves: Vec<(FreshNid<'_, FsNode>, Vec<FileExtent>)>,
) -> Vec<Child> {
    let mut children = Vec::with_capacity(leaves.len());
    for (fresh, list) in leaves {
        children.push(Child {
            key: list[0].page,
            nid: fresh.nid(),
        });
        op.create(fresh, FsNode::Extents(list));
    }
    children
}

impl Plan<'_> {
    /// Blocks that the file gains with this plan, less those it loses.
    pub fn gained(&self) -> i64 {
        self.gained
    }

    /// Whether all leaves keep their bounds, and the body its kind.
    pub fn keeps_shape(&self) -> bool {
        match &self.place {
            Place::Inode { replaces_inline } => !replaces_inline,
            Place::Leaf(_) => true,
            Place::NewTree(_) | Place::Split { .. } | Place::Removed(_) => false,
        }
    }

    /// Makes the changes; cannot fail.
    pub fn apply(self, op: &mut Op<'_, FsNode>) {
        match self.place {
            Place::Inode { replaces_inline } => {
                if replaces_inline {
                    op.apply(self.inode, Delta::Body(Body::Extents(Vec::new())));
                }
                apply_to(op, self.inode, self.changes);
            }
            Place::Leaf(leaf) => apply_to(op, leaf, self.changes),
            Place::Removed(removal) => removal.finish(op, Some(Body::Extents(Vec::new()))),
            Place::NewTree(leaves) => {
                let mut children = create_leaves(op, leaves);
                // The first child covers everything below the second.
                children[0].key = 0;
                let root = Root { depth: 0, children };
                op.apply(self.inode, Delta::Body(Body::Tree(root)));
            }
            Place::Split {
                leaf,
                path,
                growth,
                from,
                low,
                high,
            } => {
                let with = clip(&low, &(from..PAGE_LIMIT));
                let (start, end) = (from, PAGE_LIMIT);
                op.apply(leaf, Delta::Extents { start, end, with });
                let children = create_leaves(op, high);
                path.grow(op, *growth, children);
            }
        }
    }
}

fn apply_to(op: &mut Op<'_, FsNode>, slot: Slot, changes: Vec<Change>) {
    for change in changes {
        let Range { start, end } = change.pages;
        let with = change.with;
        op.apply(slot, Delta::Extents { start, end, with });
    }
}

/// One step of cutting a file.
pub(super) struct Cut<'s> {
    step: CutStep<'s>,
    /// Blocks that the file loses.
    pub freed: u64,
    /// Nothing is mapped at or above the cut after this step.
    pub done: bool,
}

enum CutStep<'s> {
    Nothing,
    /// This node, the inode or a leaf, loses what lies at or above the page.
    From(Slot, u64),
    Leaves(tree::Removal),
    /// An empty leaf covers what is above the cut of a node that is damaged.
    Relief(Box<tree::Relief<'s>>),
}

/// The page at or above `page` from which on a list maps at most [`FREE_MAX`] pages.
fn bounded_cut(list: &[FileExtent], page: u64) -> u64 {
    let mut left = FREE_MAX;
    for extent in list.iter().rev() {
        if extent.len as u64 > left {
            return (extent.end() - left).max(page);
        }
        left -= extent.len as u64;
    }
    page
}

/// Where a range must end for its mapped pages to be freed by one operation; `mapped` are the
/// extents in it.
pub(super) fn bounded_end(mapped: &[FileExtent], end: u64) -> u64 {
    let mut left = FREE_MAX;
    for extent in mapped {
        if extent.len as u64 > left {
            return extent.page + left;
        }
        left -= extent.len as u64;
    }
    end
}

/// Plans one bounded step of freeing all pages at or above `page`.
pub(super) fn plan_cut<'s>(
    op: &mut Op<'s, FsNode>,
    inode: Slot,
    page: u64,
) -> Result<Cut<'s>, Error> {
    plan_step(op, inode, page, false)
}

/// As [`plan_cut`], where that met damage: what is damaged of the last leaf, or above it, is lost to the file, with all that only it names,
/// and nobody frees that. But what it has below `page` stays, for who reads there to learn.
pub(super) fn plan_leak<'s>(
    op: &mut Op<'s, FsNode>,
    inode: Slot,
    page: u64,
) -> Result<Cut<'s>, Error> {
    if let Body::Tree(root) = &op.peek(inode).inode()?.body {
        let root = root.clone();
        let is_leaf = |leaf: &FsNode| leaf.extents().map(drop);
        if let Some(broken) = tree::broken(op, inode, TreeId::Body, u64::MAX, is_leaf)? {
            return plan_around(op, inode, &root, broken, page);
        }
    }
    plan_step(op, inode, page, true)
}

fn plan_around<'s>(
    op: &mut Op<'s, FsNode>,
    inode: Slot,
    root: &Root,
    broken: tree::Broken,
    page: u64,
) -> Result<Cut<'s>, Error> {
    if broken.low < page {
        let relief = broken.plan_relief(op, page)?;
        return Ok(Cut {
            step: CutStep::Relief(Box::new(relief)),
            freed: 0,
            done: true,
        });
    }
    // How many it named is what nobody counts.
    let blocks = op.peek(inode).inode()?.blocks;
    let left = match blocks_below(op.store(), root, broken.low) {
        Err(error) if error.is_damage() => blocks,
        left => left?,
    };
    let removal = broken.plan_removal(op)?;
    let done = removal.empties();
    Ok(Cut {
        step: CutStep::Leaves(removal),
        freed: blocks.saturating_sub(left),
        done,
    })
}

/// Blocks that leaves name which end at `end` or before.
fn blocks_below(store: &Store<FsNode>, root: &Root, end: u64) -> Result<u64, Error> {
    let mut blocks = 0;
    if end > 0 {
        tree::walk(store, root, 0, |content, leaf| {
            let list = content.extents()?;
            blocks += list.iter().map(|e| u64::from(e.len)).sum::<u64>();
            Ok(leaf.high.is_some_and(|high| high < end))
        })?;
    }
    Ok(blocks)
}

/// `leaking`: whatever cannot be freed is lost.
fn plan_step<'s>(
    op: &mut Op<'s, FsNode>,
    inode: Slot,
    page: u64,
    leaking: bool,
) -> Result<Cut<'s>, Error> {
    let nothing = Cut {
        step: CutStep::Nothing,
        freed: 0,
        done: true,
    };
    let (step, lost, done) = match &op.peek(inode).inode()?.body {
        Body::Extents(list) => {
            let from = bounded_cut(list, page);
            let lost = clip(list, &(from..PAGE_LIMIT));
            if lost.is_empty() {
                return Ok(nothing);
            }
            (CutStep::From(inode, from), lost, from <= page)
        }
        Body::Tree(_) => {
            let last = tree::path(op, inode, TreeId::Body, u64::MAX)?;
            let leaf = last.lock_leaf(op)?;
            let list = op.peek(leaf).extents()?;
            let from = bounded_cut(list, page);
            if last.leaf.low < page || from > last.leaf.low.max(page) {
                let lost = clip(list, &(from..PAGE_LIMIT));
                (CutStep::From(leaf, from), lost, from <= page)
            } else {
                let few = page > 0 || leaking || op.peek(inode).inode()?.blocks > FREE_MAX;
                let most = if few { 1 } else { CUT_LEAVES };
                let (removal, leaves) = tree::plan_tail(op, inode, TreeId::Body, most)?;
                let mut lost = Vec::new();
                for leaf in leaves {
                    lost.extend_from_slice(op.peek(leaf).extents()?);
                }
                let done = removal.empties();
                (CutStep::Leaves(removal), lost, done)
            }
        }
        _ => return Ok(nothing),
    };
    let mut freed = 0;
    for FileExtent { block, len, .. } in lost {
        freed += len as u64;
        match op.free(Extent { block, len }).map_err(Error::from) {
            Err(error) if leaking && error.is_damage() => {}
            done => done?,
        }
    }
    Ok(Cut { step, freed, done })
}

impl Cut<'_> {
    pub fn apply(self, op: &mut Op<'_, FsNode>) {
        match self.step {
            CutStep::Nothing => {}
            CutStep::From(slot, page) => {
                let delta = Delta::Extents {
                    start: page,
                    end: PAGE_LIMIT,
                    with: Vec::new(),
                };
                op.apply(slot, delta);
            }
            CutStep::Leaves(removal) => {
                removal.finish(op, Some(Body::Extents(Vec::new())));
            }
            CutStep::Relief(relief) => relief.finish(op, FsNode::Extents(Vec::new())),
        }
    }
}

/// Frees the extents that an inode holds itself; for a body that is about to be replaced,
/// which is never a tree.
pub(super) fn free_inline_extents(op: &mut Op<'_, FsNode>, inode: Slot) -> Result<(), Error> {
    let list = match &op.peek(inode).inode()?.body {
        Body::Extents(list) => list.clone(),
        Body::Inline(_) => Vec::new(),
        _ => return Err(Damage::new("inode", "a replaced file with a tree").into()),
    };
    for FileExtent { block, len, .. } in list {
        op.free(Extent { block, len })?;
    }
    Ok(())
}

/// A plan that gives the inode a body of nothing but `changes`. What it had is freed by
/// [`free_inline_extents`].
pub(super) fn plan_replacement(
    store: &Store<FsNode>,
    inode: Slot,
    changes: Vec<Change>,
) -> Result<Plan<'_>, Error> {
    let (place, _, gained) = plan_in_inode(store, &Body::Inline(Vec::new()), &changes)?;
    Ok(Plan {
        inode,
        place,
        changes,
        gained,
    })
}

//! Trees: gathering what their leaves hold, as far as there are any, and making new ones.

use super::super::state::OWNED;
use super::rounds::Round;
use crate::Error;
use crate::content::entry::list_len;
use crate::content::inode::{DEPTH_MAX, ROOT_MAX};
use crate::content::leaf::{Elements, InLeaf};
use crate::content::{Child, FsNode, Root};
use crate::tree::INDEX_MAX;
use format::Nid;
use format::item::PAYLOAD_MAX;
use std::collections::HashSet;

/// A new leaf is filled to this many bytes.
const LEAF_BYTES: usize = 4 << 10;

/// What a tree holds.
pub(super) struct Collected<T> {
    /// In the order of the leaves.
    pub items: Vec<T>,
    /// Leaves and index nodes of the tree.
    pub nodes: Vec<Nid>,
    /// The leaves with the keys that they cover, and how many items they hold.
    leaves: Vec<(Nid, Option<u64>, usize)>,
    /// Nodes that are not there, or are not the tree's, with the keys that they cover.
    pub missing: Vec<(Nid, u64, Option<u64>)>,
    /// The shape is as it should be.
    pub sound: bool,
}

impl<T> Collected<T> {
    pub fn of_list(items: Vec<T>) -> Collected<T> {
        Collected {
            items,
            nodes: Vec::new(),
            leaves: Vec::new(),
            missing: Vec::new(),
            sound: true,
        }
    }
}

struct Walk<'w, 'r, T> {
    round: &'w Round<'r>,
    owner: Nid,
    /// Nodes that another inode has are left to it.
    respect_claims: bool,
    seen: HashSet<Nid>,
    /// Index nodes above.
    level: u8,
    found: Collected<T>,
}

impl Round<'_> {
    /// Gathers what a tree holds.
    pub fn collect<T: InLeaf>(
        &self,
        owner: Nid,
        root: &Root,
        respect_claims: bool,
    ) -> Result<Collected<T>, Error> {
        let mut walk = Walk {
            round: self,
            owner,
            respect_claims,
            seen: HashSet::new(),
            level: 0,
            found: Collected::of_list(Vec::new()),
        };
        walk.children(&root.children, root.depth, (0, None))?;
        Ok(walk.found)
    }

    /// Makes a tree of a list in key order.
    pub fn build<T: InLeaf>(&mut self, list: &[T]) -> Result<Root, Error> {
        let mut level: Vec<Child> = Vec::new();
        for part in leaves_of(list) {
            let key = match level.is_empty() {
                true => 0,
                false => part[0].key() >> T::GROUP_BITS << T::GROUP_BITS,
            };
            let nid = self.add_node(T::leaf(part.to_vec()))?;
            level.push(Child { key, nid });
        }
        let mut depth = 0;
        while level.len() > ROOT_MAX {
            let mut above = Vec::new();
            for part in level.chunks(INDEX_MAX * 3 / 4) {
                let key = part[0].key;
                let nid = self.add_node(FsNode::Index(part.to_vec()))?;
                above.push(Child { key, nid });
            }
            level = above;
            depth += 1;
        }
        Ok(Root {
            depth,
            children: level,
        })
    }

    /// Writes a list in key order into the leaves that are there; false when that is not
    /// possible, and nothing was changed. A tree of which little changes costs little then, which
    /// matters on a full array.
    pub fn rewrite<T: InLeaf>(&mut self, found: &Collected<T>, list: &[T]) -> Result<bool, Error> {
        if !found.sound || found.leaves.is_empty() {
            return Ok(false);
        }
        let (mut old, mut rest) = (&found.items[..], list);
        let mut changes = Vec::new();
        for (nid, end, count) in &found.leaves {
            let (before, later) = old.split_at(*count);
            let here = rest.partition_point(|item| end.is_none_or(|end| item.key() < end));
            let (now, others) = rest.split_at(here);
            (old, rest) = (later, others);
            let inside = now
                .last()
                .is_none_or(|i| end.is_none_or(|end| i.end() <= end));
            if !inside || list_len(now) > PAYLOAD_MAX {
                return Ok(false);
            }
            if now != before {
                changes.push((*nid, now));
            }
        }
        for (nid, now) in changes {
            self.put(nid, T::leaf(now.to_vec()))?;
        }
        Ok(true)
    }

    fn add_node(&mut self, node: FsNode) -> Result<Nid, Error> {
        let (nid, _) = self.salvage.fresh()?;
        self.put(nid, node)?;
        Ok(nid)
    }
}

/// Cuts a list between groups. At least one leaf.
fn leaves_of<T: InLeaf>(list: &[T]) -> Vec<&[T]> {
    let group = |item: &T| item.key() >> T::GROUP_BITS;
    let mut parts = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for groups in list.chunk_by(|a, b| group(a) == group(b)) {
        let len = list_len(groups);
        let at = (groups.as_ptr() as usize - list.as_ptr() as usize) / size_of::<T>();
        if bytes > 0 && bytes + len > LEAF_BYTES {
            parts.push(&list[start..at]);
            (start, bytes) = (at, 0);
        }
        bytes += len;
    }
    parts.push(&list[start..]);
    parts
}

impl<T: InLeaf> Walk<'_, '_, T> {
    fn children(
        &mut self,
        children: &[Child],
        depth: u8,
        (low, high): (u64, Option<u64>),
    ) -> Result<(), Error> {
        let first = children.first().map(|child| child.key);
        let last = children.last().map(|child| child.key);
        let inside = first == Some(low) && last.is_some_and(|l| high.is_none_or(|h| l < h));
        self.found.sound &= inside;
        for (i, child) in children.iter().enumerate() {
            let end = children.get(i + 1).map(|next| next.key).or(high);
            self.child(child, depth, end)?;
        }
        Ok(())
    }

    fn child(&mut self, child: &Child, depth: u8, end: Option<u64>) -> Result<(), Error> {
        let node = match self.mine(child.nid) {
            true => self.round.load(child.nid)?,
            false => None,
        };
        match node {
            // A depth that says otherwise is wrong; no tree has more levels, whatever it says.
            Some(FsNode::Index(list))
                if !list.is_empty() && depth <= DEPTH_MAX && self.level < DEPTH_MAX =>
            {
                self.found.nodes.push(child.nid);
                self.found.sound &= depth > 0;
                self.level += 1;
                let done = self.children(&list, depth.saturating_sub(1), (child.key, end));
                self.level -= 1;
                done
            }
            Some(node) if T::in_leaf(&node).is_ok() => {
                let list = T::in_leaf(&node).map_or(Vec::new(), |l| l.copy(0..l.len()));
                self.found.nodes.push(child.nid);
                let inside =
                    |item: &T| item.key() >= child.key && end.is_none_or(|end| item.end() <= end);
                let begins_group = child.key.is_multiple_of(1 << T::GROUP_BITS);
                self.found.sound &= depth == 0 && begins_group && list.iter().all(inside);
                self.found.leaves.push((child.nid, end, list.len()));
                self.found.items.extend(list);
                Ok(())
            }
            _ => {
                self.found.sound = false;
                self.found.missing.push((child.nid, child.key, end));
                Ok(())
            }
        }
    }

    fn mine(&mut self, nid: Nid) -> bool {
        let facts = self.round.facts(nid);
        let mine = |above: Nid| !self.respect_claims || above == self.owner;
        facts.is_some_and(|facts| facts.is(OWNED) && mine(facts.above)) && self.seen.insert(nid)
    }
}

//! The stage of structure: what directories name.

use super::super::contents::is_orphan_directory;
use super::super::state::{INODE, OWNED};
use super::ActionKind;
use super::collect::Collected;
use super::contents::place_by_name;
use super::rounds::Round;
use crate::Error;
use crate::api::ROOT;
use crate::content::entry::{Entry, list_len};
use crate::content::inode::INLINE_ENTRIES_MAX;
use crate::content::{Body, FileExtent, FsNode, Inode, Name};
use crate::dir::{check_name, is_dot};
use format::Nid;
use format::dir::COLLISION_BITS;
use format::item::PAYLOAD_MAX;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Subdirectories that are known by their parents, and these, at most; but for those of one parent.
const KNOWN_MAX: usize = 1 << 20;

/// Which subdirectories some directories have names for, by number and generation: many may say that one directory is their parent, and
/// to go through it for each takes too long where it is large.
#[derive(Default)]
pub(super) struct Subdirectories {
    known: BTreeMap<Nid, HashSet<(Nid, u64)>>,
    count: usize,
}

impl Subdirectories {
    fn note(&mut self, dir: Nid, list: HashSet<(Nid, u64)>) -> &HashSet<(Nid, u64)> {
        if self.count + list.len() >= KNOWN_MAX {
            *self = Subdirectories::default();
        }
        self.count += list.len() + 1;
        self.known.entry(dir).insert_entry(list).into_mut()
    }

    /// The directory has changed.
    pub fn forget(&mut self, dir: Nid) {
        if let Some(list) = self.known.remove(&dir) {
            self.count -= list.len() + 1;
        }
    }
}

#[cfg(test)]
thread_local! {
    /// How often a directory was gone through for the sake of one that says it is in it.
    pub(super) static GONE_THROUGH: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Nodes that are looked at to tell what a tree is of: a forged one may have no end.
pub(super) const LOOKS_MAX: usize = 1000;

impl Round<'_> {
    /// Gathers a directory's names, removes those that name nothing, and puts them in order.
    pub fn mend_directory(&mut self, dir: Nid, inode: &mut Inode) -> Result<(), Error> {
        let found: Collected<Name> = match &inode.body {
            Body::Entries(list) => Collected::of_list(list.to_vec()),
            Body::Tree(root) => self.collect(dir, root, true)?,
            _ => return Ok(()),
        };
        for (node, _, _) in &found.missing {
            let what = format!("names are lost with node {node}");
            self.act(ActionKind::Name, dir, true, what);
            self.name_node(*node, dir);
        }
        let mut kept: Vec<Name> = Vec::new();
        let (mut texts, mut directories) = (HashSet::new(), HashSet::new());
        for mut name in found.items.clone() {
            let why = match texts.contains(&name.name) {
                true => Some("exists twice"),
                false => self.bad_name(dir, &mut name, &mut directories)?,
            };
            match why {
                None => {
                    // One that goes takes the place of none.
                    texts.insert(name.name.clone());
                    kept.push(name);
                }
                Some(why) => self.remove_name(dir, &name, why),
            }
        }
        let (kept, rest) = place_by_name(kept, self.hash);
        for name in &rest {
            self.remove_name(dir, name, "is one of too many with one hash");
        }
        let kept = self.bound_groups(dir, kept);
        self.correct(dir, "count of names", &mut inode.size, kept.len() as u64);
        if dir == ROOT && inode.parent != ROOT {
            inode.parent = ROOT;
            self.act(ActionKind::Field, dir, false, "is its own parent again");
        }
        if found.sound && kept == found.items {
            return Ok(());
        }
        self.act(
            ActionKind::Rebuilt,
            dir,
            false,
            "its names were put in order",
        );
        self.subdirectories.forget(dir);
        self.put_names(inode, &found, &kept)
    }

    /// Gives a directory other names, which are in order.
    pub fn put_names(
        &mut self,
        inode: &mut Inode,
        found: &Collected<Name>,
        names: &[Name],
    ) -> Result<(), Error> {
        inode.size = names.len() as u64;
        if list_len(names) > INLINE_ENTRIES_MAX && self.rewrite(found, names)? {
            return Ok(());
        }
        inode.body = self.names_body(names)?;
        self.discard_nodes(&found.nodes)
    }

    /// A directory's body with these names, which are in order.
    fn names_body(&mut self, names: &[Name]) -> Result<Body, Error> {
        Ok(match list_len(names) <= INLINE_ENTRIES_MAX {
            true => Body::Entries(Box::new(names.to_vec().into())),
            false => Body::Tree(self.build(names)?),
        })
    }

    /// Names of one hash must fit one leaf.
    fn bound_groups(&mut self, dir: Nid, names: Vec<Name>) -> Vec<Name> {
        let mut kept: Vec<Name> = Vec::with_capacity(names.len());
        let (mut group, mut bytes) = (u64::MAX, 0);
        for name in names {
            if name.key >> COLLISION_BITS != group {
                (group, bytes) = (name.key >> COLLISION_BITS, 0);
            }
            bytes += name.encoded_len();
            match bytes <= PAYLOAD_MAX {
                true => kept.push(name),
                false => self.remove_name(dir, &name, "is one of too many with one hash"),
            }
        }
        kept
    }

    /// A path of a name in a directory, if the directory's is known.
    pub fn path_of_name(&self, dir: Nid, name: &[u8]) -> Option<String> {
        let text = String::from_utf8_lossy(name);
        let above = self.path(dir)?;
        Some(format!("{}/{text}", above.trim_end_matches('/')))
    }

    fn remove_name(&mut self, dir: Nid, name: &Name, why: &str) {
        let path = self.path_of_name(dir, &name.name);
        if self.facts(name.nid).is_none()
            && let Some(path) = &path
        {
            self.actions.name(name.nid, path);
        }
        let text = String::from_utf8_lossy(&name.name);
        let what = format!("the name {text:?} (inode {}) {why}; removed", name.nid);
        self.act_at(ActionKind::Name, dir, path, true, what);
    }

    /// Why a name cannot stay; corrects what can be.
    fn bad_name(
        &mut self,
        dir: Nid,
        name: &mut Name,
        directories: &mut HashSet<Nid>,
    ) -> Result<Option<&'static str>, Error> {
        if check_name(&name.name).is_err() || is_dot(&name.name) {
            return Ok(Some("is no possible name"));
        }
        let Some(facts) = self.facts(name.nid) else {
            return Ok(Some("names an inode that is lost"));
        };
        if !facts.is(INODE) || is_orphan_directory(name.nid) {
            return Ok(Some("names something that is no inode"));
        }
        if facts.generation != name.generation {
            return Ok(Some("names another use of its inode's number"));
        }
        if name.kind != facts.kind() {
            name.kind = facts.kind();
            let path = self.path_of_name(dir, &name.name);
            let what = "the file type in its name was corrected";
            self.act_at(ActionKind::Name, name.nid, path, false, what);
        }
        if !facts.is_dir() {
            return Ok(None);
        }
        if name.nid == ROOT {
            return Ok(Some("names the root directory"));
        }
        if !directories.insert(name.nid) {
            return Ok(Some("is a second name of a directory"));
        }
        let second = match self.parents.get(&name.nid) {
            Some(parent) => *parent != dir,
            None if facts.above == dir => false,
            None => self.names(facts.above, name.nid)? || !self.adopt(name.nid, dir)?,
        };
        Ok(second.then_some("is a second name of a directory"))
    }

    /// The directory gets another parent; false when it is none any more.
    pub fn adopt(&mut self, dir: Nid, parent: Nid) -> Result<bool, Error> {
        let Some(FsNode::Inode(mut inode)) = self.load(dir)? else {
            return Ok(false);
        };
        inode.parent = parent;
        self.parents.insert(dir, parent);
        let what = format!("its parent is inode {parent} now");
        self.act(ActionKind::Field, dir, false, what);
        self.put(dir, FsNode::Inode(inode))?;
        Ok(true)
    }

    /// Whether a directory has a name for another one.
    fn names(&mut self, dir: Nid, wanted: Nid) -> Result<bool, Error> {
        let generation = self.facts(wanted).map(|facts| facts.generation);
        let wanted = generation.map(|generation| (wanted, generation));
        if let Some(list) = self.subdirectories.known.get(&dir) {
            return Ok(wanted.is_some_and(|wanted| list.contains(&wanted)));
        }
        if !self.facts(dir).is_some_and(|facts| facts.is_dir()) || is_orphan_directory(dir) {
            return Ok(false);
        }
        let Some(FsNode::Inode(inode)) = self.load(dir)? else {
            return Ok(false);
        };
        #[cfg(test)]
        GONE_THROUGH.set(GONE_THROUGH.get() + 1);
        let names = self.names_of(dir, &inode)?;
        let is_dir = |name: &&Name| self.facts(name.nid).is_some_and(|facts| facts.is_dir());
        let below = names.iter().filter(is_dir);
        let below = below.map(|name| (name.nid, name.generation)).collect();
        let list = self.subdirectories.note(dir, below);
        Ok(wanted.is_some_and(|wanted| list.contains(&wanted)))
    }

    /// The names of a directory, as far as they are there.
    pub fn names_of(&self, dir: Nid, inode: &Inode) -> Result<Vec<Name>, Error> {
        Ok(match &inode.body {
            Body::Entries(list) => list.to_vec(),
            Body::Tree(root) => self.collect::<Name>(dir, root, true)?.items,
            _ => Vec::new(),
        })
    }

    /// A node that two inodes refer to belongs to the one whose tree adds up with it. Returns those that have lost one by that.
    pub fn settle_contested(&mut self) -> Result<BTreeSet<Nid>, Error> {
        let contested: BTreeSet<(Nid, Nid)> = self.check.contested.lock().clone();
        // Two trees may have all their nodes in common.
        let mut known = BTreeMap::new();
        let (mut losers, mut winners) = (BTreeSet::new(), BTreeSet::new());
        for (node, second) in contested {
            let Some(facts) = self.facts(node).filter(|facts| facts.is(OWNED)) else {
                continue;
            };
            let first = facts.above;
            self.nids.extend([first, second]);
            if first == second || !self.may_have(second, node)? {
                continue;
            }
            let mut adds_up = |nid| -> Result<bool, Error> {
                if let Some(known) = known.get(&nid) {
                    return Ok(*known);
                }
                let found = self.adds_up(nid)?;
                known.insert(nid, found);
                Ok(found)
            };
            let others = !adds_up(first)? && adds_up(second)?;
            if others || !self.may_have(first, node)? {
                self.check.inodes.set_above(node, second);
                losers.insert(first);
                winners.insert(second);
            }
        }
        // Each of the others has lost one to one of these, and lets go of it in the next round.
        match losers.is_subset(&winners) {
            true => Ok(losers),
            false => Ok(&losers - &winners),
        }
    }

    /// Whether a node can be an inode's, by the kinds of both.
    fn may_have(&self, nid: Nid, node: Nid) -> Result<bool, Error> {
        let Some(FsNode::Inode(inode)) = self.load(nid)? else {
            return Ok(false);
        };
        let kind = self.kind_below(node)?;
        Ok(kind.is_none_or(|kind| kind == inode.kind()))
    }

    /// Which kind of inode has a node, by the first leaf that is there of those below it; `None`: any can.
    fn kind_below(&self, node: Nid) -> Result<Option<u32>, Error> {
        let mut todo = vec![node];
        for _ in 0..LOOKS_MAX {
            let Some(nid) = todo.pop() else {
                return Ok(None);
            };
            match self.load(nid)? {
                Some(FsNode::Bucket(_)) => return Ok(Some(libc::S_IFDIR)),
                Some(FsNode::Extents(_)) => return Ok(Some(libc::S_IFREG)),
                Some(FsNode::Index(list)) => todo.extend(list.iter().rev().map(|c| c.nid)),
                _ => {}
            }
        }
        Ok(None)
    }

    /// Whether an inode's tree is sound, and as large as the inode says.
    fn adds_up(&self, nid: Nid) -> Result<bool, Error> {
        let Some(FsNode::Inode(inode)) = self.load(nid)? else {
            return Ok(false);
        };
        let Body::Tree(root) = &inode.body else {
            return Ok(false);
        };
        Ok(match inode.is_dir() {
            true => {
                let found = self.collect::<Name>(nid, root, false)?;
                found.sound && found.items.len() as u64 == inode.size
            }
            false => {
                let found = self.collect::<FileExtent>(nid, root, false)?;
                let blocks: u64 = found.items.iter().map(|e| e.len as u64).sum();
                found.sound && blocks == inode.blocks
            }
        })
    }
}

//! The last pass, mostly in memory: link counts, what nothing refers to, what cannot be reached
//! from the root, and used blocks against the space maps.

use super::contents::is_orphan_directory;
use super::state::{
    CLAIMED, Difference, Facts, INODE, LISTED, OWNED, REACHED, TRUNCATING, UNLINKED, UNREADABLE,
    WALKING,
};
use super::{Check, Phase, Progress};
use crate::api::ROOT;
use crate::content::{Body, FileExtent, FsNode};
use engine::{Extent, Object, Severity, SpaceMap, Unread, Visitor};
use format::Nid;
use format::table::SPACE_MAP_FIRST;
use std::sync::atomic::{AtomicU64, Ordering};

impl Check<'_> {
    pub(super) fn check_sums(&self) {
        (self.progress)(Progress {
            phase: Phase::Sums,
            done: 0,
            total: 1,
        });
        self.check_links();
        self.check_reach();
        self.check_shared_blocks();
        self.check_space();
        (self.progress)(Progress {
            phase: Phase::Sums,
            done: 1,
            total: 1,
        });
    }

    pub(super) fn check_links(&self) {
        let names_hidden = self.names_hidden.load(Ordering::Relaxed);
        let owners_hidden = self.owners_hidden.load(Ordering::Relaxed);
        match self.inodes.get(ROOT) {
            Some(facts) if facts.is_dir() && facts.above != ROOT => {
                let what = format!("is the root, and its parent is said to be {}", facts.above);
                self.error(ROOT, what);
            }
            Some(facts) if facts.is_dir() || facts.is(UNREADABLE) => {}
            _ => self.error(ROOT, "the root directory does not exist"),
        }
        let (mut nameless, mut leaked) = (0u64, 0u64);
        self.inodes.each(|nid, facts| {
            if facts.is(OWNED) && !facts.is(CLAIMED) {
                match owners_hidden {
                    true => leaked += 1,
                    false => self.error(nid, "belongs to no inode"),
                }
            }
            if !facts.is(INODE) || is_orphan_directory(nid) {
                return;
            }
            if self.check_orphanage(nid, facts) {
                return;
            }
            let names = match facts.is_dir() {
                true => facts.is(CLAIMED) as u32,
                false => facts.refs,
            };
            let expected = match facts.is_dir() {
                true => !facts.is(UNLINKED) as u32,
                false => facts.nlink,
            };
            if names < expected && names_hidden {
                nameless += 1;
            } else if names != expected {
                self.error(
                    nid,
                    format!("has {names} names, and should have {expected}"),
                );
            }
        });
        if nameless > 0 {
            let what = format!("{nameless} inodes have lost names to the damage above");
            self.findings.add(Object::Store, Severity::Notice, what);
        }
        if leaked > 0 {
            let what = format!("{leaked} nodes have lost their owner to the damage above");
            self.findings.add(Object::Store, Severity::Notice, what);
        }
    }

    /// Whether being unlinked and being listed as an orphan go together; true when that is
    /// reported.
    fn check_orphanage(&self, nid: Nid, facts: Facts) -> bool {
        if facts.is(LISTED) || self.names_hidden.load(Ordering::Relaxed) {
            return false;
        }
        if facts.is(UNLINKED) && facts.refs == 0 {
            self.error(nid, "is unlinked, but no orphan directory lists it");
            return true;
        }
        if facts.is(TRUNCATING) {
            self.error(nid, "is being truncated, but no orphan directory lists it");
        }
        false
    }

    /// Every named directory leads up to the root.
    pub(super) fn check_reach(&self) {
        self.inodes.mark(ROOT, REACHED);
        let mut cycles = Vec::new();
        self.inodes.each(|nid, facts| {
            if !facts.is_dir() || is_orphan_directory(nid) || facts.is(UNLINKED) {
                return;
            }
            let mut way = Vec::new();
            let mut at = nid;
            while let Some(facts) = self.inodes.get(at).filter(Facts::is_dir) {
                if facts.is(REACHED) {
                    break;
                }
                if facts.is(WALKING) {
                    cycles.push(at);
                    break;
                }
                self.inodes.mark(at, WALKING);
                way.push(at);
                at = facts.above;
            }
            for dir in way {
                self.inodes.mark(dir, REACHED);
                self.inodes.clear(dir, WALKING);
            }
        });
        for nid in &cycles {
            self.error(
                *nid,
                "is its own ancestor: it cannot be reached from the root",
            );
        }
        *self.cycles.lock() = cycles;
    }

    /// Names everybody who claims a block that was claimed twice.
    pub(super) fn check_shared_blocks(&self) {
        if !self.blocks.any_shared() {
            return;
        }
        let files = |nid| {
            let facts = self.inodes.get(nid);
            facts.is_some_and(|f| f.is(INODE) && f.kind() == libc::DT_REG)
        };
        self.store.visit(&files, &Owners { check: self });
    }

    pub(super) fn check_space(&self) {
        let space = Space {
            check: self,
            leaked: AtomicU64::new(0),
        };
        self.store
            .visit(&|nid: Nid| nid.0 >= SPACE_MAP_FIRST, &space);
        for chunk in self.blocks.left() {
            space.compare(chunk, None);
        }
        let leaked = space.leaked.load(Ordering::Relaxed);
        if leaked > 0 {
            let what = format!("{leaked} blocks have lost their owner to the damage above");
            self.findings.add(Object::Store, Severity::Notice, what);
        }
    }
}

/// Looks for the owners of blocks that were claimed twice.
struct Owners<'c, 'a> {
    check: &'c Check<'a>,
}

impl Visitor<FsNode> for Owners<'_, '_> {
    fn bad_image(&self, _nid: Nid, why: &Unread) {
        self.check.bad_image(why);
    }

    fn bad_page(&self, why: &Unread) {
        self.check.bad_page(why);
    }

    fn node(&self, nid: Nid, _version: u64, content: &FsNode) {
        let FsNode::Inode(inode) = content else {
            return;
        };
        match &inode.body {
            Body::Extents(list) => self.extents(nid, list),
            Body::Tree(root) => {
                // Its shape was reported, if it is wrong; a bounded walk is enough here.
                let walk = crate::tree::walk(&self.check.store, root, 0, |node, _| {
                    self.extents(nid, node.extents()?);
                    Ok(true)
                });
                if let Err(error) = walk {
                    self.check
                        .error(nid, format!("owns blocks that cannot be listed: {error}"));
                }
            }
            _ => {}
        }
    }
}

impl Owners<'_, '_> {
    fn extents(&self, nid: Nid, list: &[FileExtent]) {
        for extent in list {
            let (block, len) = (extent.block, extent.len);
            if let Some(block) = self.check.blocks.first_shared(Extent { block, len }) {
                let what = format!("{extent:?} shares block {block} with another place");
                self.check.error(nid, what);
            }
        }
    }
}

/// Sees all space maps.
struct Space<'c, 'a> {
    check: &'c Check<'a>,
    leaked: AtomicU64,
}

impl Visitor<FsNode> for Space<'_, '_> {
    fn node(&self, _nid: Nid, _version: u64, _content: &FsNode) {}

    fn bad_image(&self, _nid: Nid, why: &Unread) {
        self.check.bad_image(why);
    }

    fn bad_page(&self, why: &Unread) {
        self.check.bad_page(why);
    }

    fn space_map(&self, chunk: u32, map: &SpaceMap) {
        self.compare(chunk, Some(map));
    }
}

impl Space<'_, '_> {
    fn compare(&self, chunk: u32, map: Option<&SpaceMap>) {
        let check = self.check;
        let owners_hidden = check.owners_hidden.load(Ordering::Relaxed);
        if map.is_none() && owners_hidden {
            // Its map may be among what is unreadable.
            return;
        }
        check.blocks.compare(chunk, map, |difference| {
            let Difference { extent, leaked } = difference;
            let object = Object::Blocks(extent);
            match leaked {
                true if owners_hidden => {
                    self.leaked.fetch_add(extent.len as u64, Ordering::Relaxed);
                }
                true => check
                    .findings
                    .error(object, "allocated, but no file has them"),
                false => check.findings.error(object, "free, but a file has them"),
            }
        });
    }
}

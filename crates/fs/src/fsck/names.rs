//! The second pass: every name against the inode that it names, and the orphan directories.

use super::contents::is_orphan_directory;
use super::state::{CLAIMED, INODE, LISTED, TRUNCATING, UNLINKED, UNREADABLE};
use super::{Check, Phase, Progress, add};
use crate::api::ROOT;
use crate::content::{Body, FsNode, Inode, Name, Orphan};
use crate::dir::{check_name, is_dot};
use engine::{Unread, Visitor};
use format::Nid;
use format::dir::COLLISION_BITS;
use format::inode::{FIRST_ORPHANS, ORPHAN_DIRECTORIES};
use std::sync::atomic::{AtomicU64, Ordering};

impl Check<'_> {
    pub(super) fn check_names(&self) {
        // Nothing may name the root.
        self.inodes.mark(ROOT, CLAIMED);
        for i in 0..ORPHAN_DIRECTORIES {
            let nid = Nid(FIRST_ORPHANS + i);
            match self.inodes.get(nid) {
                Some(facts) if facts.is_dir() || facts.is(UNREADABLE) => {}
                _ => self.error(nid, "is no orphan directory, and must be one"),
            }
        }
        let wanted = |nid| self.inodes.get(nid).is_some_and(|facts| facts.is_dir());
        let names = Names {
            check: self,
            done: AtomicU64::new(0),
            total: self.counts.directories.load(Ordering::Relaxed) + ORPHAN_DIRECTORIES,
        };
        self.store.visit(&wanted, &names);
    }
}

/// Sees all directories.
struct Names<'c, 'a> {
    check: &'c Check<'a>,
    done: AtomicU64,
    total: u64,
}

impl Visitor<FsNode> for Names<'_, '_> {
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
        if is_orphan_directory(nid) {
            self.orphans(nid, inode);
        } else {
            self.directory(nid, inode);
        }
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        if done.is_multiple_of(256) || done == self.total {
            (self.check.progress)(Progress {
                phase: Phase::Names,
                done,
                total: self.total.max(done),
            });
        }
    }
}

/// What the names of one directory add up to.
#[derive(Default)]
struct Sum {
    names: u64,
    subdirectories: u64,
}

impl Names<'_, '_> {
    fn directory(&self, dir: Nid, inode: &Inode) {
        let check = self.check;
        let mut sum = Sum::default();
        let mut whole = true;
        match &inode.body {
            Body::Entries(list) => self.list(dir, &list.to_vec(), &mut sum),
            Body::Tree(root) => {
                whole = check.walk_tree(dir, root, &mut |leaf, node, low, high| {
                    check.check_beginning(dir, leaf, low);
                    let list = match node.bucket() {
                        Ok(list) => list.to_vec(),
                        Err(damage) => {
                            return check.error(dir, format!("bucket {leaf} {}", damage.what));
                        }
                    };
                    let inside = |n: &Name| n.key >= low && high.is_none_or(|high| n.key < high);
                    if !list.iter().all(inside) {
                        check.error(dir, format!("bucket {leaf} has names of another bucket"));
                    }
                    self.list(dir, &list, &mut sum);
                });
            }
            // Reported by the first pass.
            _ => whole = false,
        }
        add(&check.counts.names, sum.names);
        if !whole {
            check.names_hidden.store(true, Ordering::Relaxed);
            return;
        }
        if sum.names != inode.size {
            let what = format!("has {} names and counts {}", sum.names, inode.size);
            check.error(dir, what);
        }
        let links = match inode.nlink {
            0 => 0,
            _ => sum.subdirectories + 2,
        };
        if links != inode.nlink as u64 {
            let what = format!(
                "has {} subdirectories and a link count of {}",
                sum.subdirectories, inode.nlink
            );
            check.error(dir, what);
        }
        if inode.nlink == 0 && sum.names > 0 {
            check.error(dir, "was removed, but it is not empty");
        }
    }

    fn list(&self, dir: Nid, list: &[Name], sum: &mut Sum) {
        let check = self.check;
        for (i, name) in list.iter().enumerate() {
            let group = name.key >> COLLISION_BITS;
            if group != check.hash.first_key(&name.name) >> COLLISION_BITS {
                self.bad_name(dir, name, "is where it does not belong");
            }
            let twin = list[..i]
                .iter()
                .rev()
                .take_while(|other| other.key >> COLLISION_BITS == group)
                .any(|other| other.name == name.name);
            if twin {
                self.bad_name(dir, name, "exists twice");
            }
            if check_name(&name.name).is_err() || is_dot(&name.name) {
                self.bad_name(dir, name, "is no possible name");
            }
            sum.names += 1;
            sum.subdirectories += self.target(dir, name) as u64;
        }
    }

    /// Compares a name with the inode that it names; true when that is a directory.
    fn target(&self, dir: Nid, name: &Name) -> bool {
        let check = self.check;
        let nid = name.nid;
        let is_dir = name.kind == libc::DT_DIR;
        let Some(facts) = check.inodes.get(nid) else {
            self.bad_name(dir, name, "names an inode that does not exist");
            return is_dir;
        };
        check.inodes.add_ref(nid);
        if facts.is(UNREADABLE) {
            // The store has reported the node or the table page that hides it.
            check.inodes.set_above(nid, dir);
            self.hidden(dir, name);
            return is_dir;
        }
        if !facts.is(INODE) || is_orphan_directory(nid) {
            self.bad_name(dir, name, "names something that is no inode");
            return is_dir;
        }
        if facts.generation != name.generation {
            self.bad_name(dir, name, "names another use of its inode's number");
        }
        if facts.kind() != name.kind {
            let what = format!("says file type {}, its inode {}", name.kind, facts.kind());
            self.bad_name(dir, name, &what);
        }
        if !facts.is_dir() {
            check.inodes.set_above(nid, dir);
            return is_dir;
        }
        if check.inodes.mark(nid, CLAIMED) & CLAIMED != 0 {
            self.bad_name(dir, name, "is a second name of a directory");
        } else if facts.above != dir {
            let what = format!(
                "is a directory whose parent is said to be inode {}",
                facts.above
            );
            self.bad_name(dir, name, &what);
        }
        is_dir
    }

    /// A name whose inode is unreadable.
    fn hidden(&self, dir: Nid, name: &Name) {
        self.bad_name(dir, name, "names an inode that is unreadable");
    }

    fn bad_name(&self, dir: Nid, name: &Name, what: &str) {
        let text = String::from_utf8_lossy(&name.name);
        self.check.error(
            dir,
            format!("the name {text:?} (inode {}) {what}", name.nid),
        );
    }

    fn orphans(&self, dir: Nid, inode: &Inode) {
        let check = self.check;
        match &inode.body {
            Body::Orphans(list) => list.iter().for_each(|orphan| self.orphan(dir, orphan)),
            Body::Tree(root) => {
                let whole = check.walk_tree(dir, root, &mut |leaf, node, low, high| {
                    let list = match node.orphans() {
                        Ok(list) => list,
                        Err(damage) => {
                            return check.error(dir, format!("leaf {leaf} {}", damage.what));
                        }
                    };
                    let inside =
                        |o: &Orphan| o.nid.0 >= low && high.is_none_or(|high| o.nid.0 < high);
                    if !list.iter().all(inside) {
                        check.error(dir, format!("leaf {leaf} has orphans of another leaf"));
                    }
                    list.iter().for_each(|orphan| self.orphan(dir, orphan));
                });
                if !whole {
                    check.names_hidden.store(true, Ordering::Relaxed);
                }
            }
            _ => check.error(dir, "is an orphan directory with another content"),
        }
    }

    fn orphan(&self, dir: Nid, orphan: &Orphan) {
        let check = self.check;
        let nid = orphan.nid;
        if FIRST_ORPHANS + nid.0 % ORPHAN_DIRECTORIES != dir.0 {
            check.error(dir, format!("lists inode {nid}, which is another's"));
        }
        let facts = check.inodes.get(nid);
        if facts.is_some_and(|facts| facts.is(UNREADABLE)) {
            return;
        }
        let Some(facts) = facts.filter(|f| f.is(INODE) && f.generation == orphan.generation) else {
            return check.error(dir, format!("lists inode {nid}, which does not exist"));
        };
        if check.inodes.mark(nid, LISTED) & LISTED != 0 {
            check.error(nid, "is listed as an orphan twice");
        }
        if facts.is(UNLINKED) {
            add(&check.counts.orphans, 1);
        } else if !facts.is(TRUNCATING) {
            check.error(nid, "is listed as an orphan, but it has names");
        }
    }
}

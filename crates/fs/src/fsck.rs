//! Verification of a whole file system, read-only: what the store owns, then what the nodes mean.
//!
//! 1. One pass over all nodes (`contents`): each inode by itself, the blocks and the nodes that
//!    it owns. What later passes need of an inode is kept in 22 bytes.
//! 2. One pass over the directories (`names`): every name against the inode that it names.
//! 3. The sums: link counts, what nothing refers to, what cannot be reached from the root,
//!    used blocks against the space maps.
//!
//! Invariants:
//! 1. Nothing is written; the journal is replayed in memory.
//! 2. Memory does not grow with names or with file sizes: 22 bytes for each nid of a region in use
//!    (`state::Inodes`), one or two bits for each block of a data chunk in use (`state::Blocks`), a
//!    bounded list of findings, and the store's caches.
//! 3. What an unreadable node or table page hides is not reported again as missing, leaked
//!    or miscounted.

mod contents;
mod devices;
mod names;
mod paths;
pub mod repair;
mod state;
mod sums;
#[cfg(test)]
mod tests;

use crate::content::{FsNode, Root, TreeId};
use crate::dir::NameHash;
use crate::{Error, Ino};
use base::sync::{Mutex, rank};
use device::Array;
use devices::Tally;
pub use devices::{DeviceItems, is_member};
use engine::{Findings, Object, RecoveryReport, Severity, Store, StoreOptions, Unread, Verified};
use format::Nid;
use format::dir::COLLISION_BITS;
use state::{Blocks, Inodes, WRONG};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How a check runs.
#[derive(Clone, Debug)]
pub struct FsckOptions {
    /// Bound on the store's caches, in bytes.
    pub cache_bytes: usize,
    /// Threads that read and check nodes.
    pub workers: usize,
    /// A mask on name hashes, for tests of collisions. `None`: the whole hash.
    pub hash_mask: Option<u64>,
}

impl Default for FsckOptions {
    fn default() -> Self {
        FsckOptions {
            cache_bytes: 64 << 20,
            workers: base::thread::cpu_count().min(16),
            hash_mask: None,
        }
    }
}

impl FsckOptions {
    fn hash(&self, array: &Array) -> NameHash {
        match self.hash_mask {
            Some(mask) => NameHash::weakened(&array.label().hash_key, mask),
            None => NameHash::new(&array.label().hash_key),
        }
    }

    fn store(&self) -> StoreOptions {
        StoreOptions {
            node_cache_bytes: self.cache_bytes,
            workers: self.workers.max(1),
            background: false,
            read_only: true,
            ..StoreOptions::default()
        }
    }
}

/// What a check is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Reading and checking all nodes.
    Nodes,
    /// Comparing names with inodes, in directories.
    Names,
    /// Adding up links and blocks.
    Sums,
    /// Deciding what a repair changes; rounds of the phases above come between.
    Mending,
    /// Writing what a repair changed.
    Writing,
}

/// How far a check is. `done` and `total` count nodes in the first phase and directories in
/// the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub phase: Phase,
    pub done: u64,
    pub total: u64,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub object: Object,
    /// A path of the file concerned, if one is known; bytes that are not UTF-8 are replaced.
    pub path: Option<String>,
    pub what: String,
    pub severity: Severity,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{path} ({}): {}", self.object, self.what),
            None => write!(f, "{}: {}", self.object, self.what),
        }
    }
}

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub findings: Vec<Finding>,
    /// Findings beyond the most that are kept.
    pub more_findings: u64,
    pub files: u64,
    pub directories: u64,
    pub symlinks: u64,
    /// Device nodes, fifos and sockets.
    pub specials: u64,
    /// Unlinked inodes that the next mount deletes.
    pub orphans: u64,
    /// Names in all directories.
    pub names: u64,
    /// Nodes of all kinds, as of the last checkpoint.
    pub nodes: u64,
    /// Blocks of 4 KiB that files hold.
    pub blocks: u64,
    /// Bytes of metadata in use.
    pub metadata_bytes: u64,
    /// Metadata on each device, as of the last checkpoint; empty if nothing could be looked at.
    pub devices: Vec<DeviceItems>,
    /// The last mount ended cleanly; else the journal was replayed, in memory.
    pub clean: bool,
    pub recovery: RecoveryReport,
    /// No mount that may write opens this before a repair.
    pub refuses_writes: bool,
}

impl Report {
    /// The worst severity among the findings; `None` when there are none.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|f| f.severity).max()
    }

    /// Nothing but notices was found.
    pub fn is_sound(&self) -> bool {
        self.worst().is_none_or(|worst| worst == Severity::Notice)
    }

    /// The report on what does not even open.
    fn of_findings(findings: Vec<engine::Finding>) -> Report {
        let without_path = |f: engine::Finding| Finding {
            object: f.object,
            path: None,
            what: f.what,
            severity: f.severity,
        };
        let mut findings: Vec<Finding> = findings.into_iter().map(without_path).collect();
        findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
        Report {
            findings,
            refuses_writes: true,
            ..Report::default()
        }
    }
}

/// Checks a file system from end to end. Damage is never an error of this function: what cannot
/// even be opened is a report with a [`Severity::Fatal`] finding. No file system may be open for writing on the array meanwhile,
/// in this process or another: what is being changed looks damaged.
///
/// # Errors
/// What is not the devices' fault: a thread that cannot be started, say.
pub fn fsck(
    array: Arc<Array>,
    options: &FsckOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Report, Error> {
    let hash = options.hash(&array);
    let store_options = options.store();
    let findings = Findings::new();
    engine::check_copies(&array, &findings);
    let fatal = |object: Object, what: String| {
        findings.add(object, Severity::Fatal, what);
        Ok(Report::of_findings(findings.take().0))
    };
    let (store, recovery) = match Store::<FsNode>::open(array, store_options) {
        Ok(opened) => opened,
        Err(engine::Error::Damaged(damage)) => return fatal(Object::Store, damage.to_string()),
        Err(error @ engine::Error::Device(_)) => return fatal(Object::Store, error.to_string()),
        Err(error) => return Err(error.into()),
    };
    let check = Check::new(store, hash, findings, progress);
    Ok(check.run(recovery))
}

/// A check under way.
struct Check<'a> {
    store: Arc<Store<FsNode>>,
    hash: NameHash,
    progress: &'a (dyn Fn(Progress) + Sync),
    findings: Findings,
    inodes: Inodes,
    blocks: Blocks,
    counts: Counts,
    tally: Tally,
    /// Chunks that hold segments, by number: no file has blocks there.
    meta: Vec<bool>,
    /// Nodes that a second place refers to, with that place's inode.
    contested: Mutex<BTreeSet<(Nid, Nid)>>,
    /// One directory of each loop.
    cycles: Mutex<Vec<Nid>>,
    /// Something is unreadable that may own nodes or blocks.
    owners_hidden: AtomicBool,
    /// Something is unreadable that may hold names.
    names_hidden: AtomicBool,
    /// A device did not return something, and says why.
    trouble: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct Counts {
    files: AtomicU64,
    directories: AtomicU64,
    symlinks: AtomicU64,
    specials: AtomicU64,
    orphans: AtomicU64,
    names: AtomicU64,
    blocks: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl<'a> Check<'a> {
    fn new(
        store: Arc<Store<FsNode>>,
        hash: NameHash,
        findings: Findings,
        progress: &'a (dyn Fn(Progress) + Sync),
    ) -> Self {
        Check {
            inodes: Inodes::new(&store.regions()),
            blocks: Blocks::new(store.array().geometry()),
            meta: store.meta_chunks(),
            tally: Tally::new(store.array()),
            store,
            hash,
            progress,
            findings,
            counts: Counts::default(),
            contested: Mutex::new(rank::LEAF, BTreeSet::new()),
            cycles: Mutex::new(rank::LEAF, Vec::new()),
            owners_hidden: AtomicBool::new(false),
            names_hidden: AtomicBool::new(false),
            trouble: Mutex::new(rank::LEAF, None),
        }
    }

    fn run(self, recovery: RecoveryReport) -> Report {
        let report_nodes = |done, total| {
            (self.progress)(Progress {
                phase: Phase::Nodes,
                done,
                total,
            });
        };
        let contents = contents::Contents(&self);
        let verified = self.store.verify(&contents, &self.findings, &report_nodes);
        if verified.incomplete {
            self.owners_hidden.store(true, Ordering::Relaxed);
            self.names_hidden.store(true, Ordering::Relaxed);
        }
        self.check_names();
        self.check_sums();
        self.report(verified, recovery)
    }

    fn report(self, verified: Verified, recovery: RecoveryReport) -> Report {
        let (found, more_findings) = self.findings.take();
        let paths = paths::resolve(&self, &found);
        let mut findings: Vec<Finding> = found
            .into_iter()
            .map(|f| Finding {
                path: match &f.object {
                    Object::Node(nid) => paths.get(nid).cloned(),
                    _ => None,
                },
                object: f.object,
                what: f.what,
                severity: f.severity,
            })
            .collect();
        findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = &self.counts;
        Report {
            findings,
            more_findings,
            files: get(&counts.files),
            directories: get(&counts.directories),
            symlinks: get(&counts.symlinks),
            specials: get(&counts.specials),
            orphans: get(&counts.orphans),
            names: get(&counts.names),
            nodes: verified.nodes,
            blocks: get(&counts.blocks),
            metadata_bytes: verified.bytes,
            devices: self.tally.take(),
            clean: recovery.clean && recovery.batches == 0,
            recovery,
            refuses_writes: self.store.is_partly_replayed(),
        }
    }

    fn bad_image(&self, why: &Unread) {
        if let Unread::Device(why) = why {
            *self.trouble.lock() = Some(why.clone());
        }
    }

    /// Nobody knows what is below it. A repair has read all pages before.
    fn bad_page(&self, why: &Unread) {
        self.owners_hidden.store(true, Ordering::Relaxed);
        self.names_hidden.store(true, Ordering::Relaxed);
        *self.trouble.lock() = Some(why.to_string());
    }

    fn error(&self, nid: Nid, what: impl Into<String>) {
        self.inodes.mark(nid, WRONG);
        self.findings.error(Object::Node(nid), what);
    }

    /// Walks a tree that belongs to `owner`: its nodes are claimed, its shape is checked, and
    /// `leaf` is called with each leaf in key order. False: a part of it cannot be read.
    fn walk_tree(&self, owner: Ino, root: &Root, leaf: &mut OnLeaf<'_>) -> bool {
        let children: Vec<(u64, Nid)> = root.children.iter().map(|c| (c.key, c.nid)).collect();
        self.walk_children(owner, &children, root.depth, (0, None), leaf)
    }

    fn walk_children(
        &self,
        owner: Ino,
        children: &[(u64, Nid)],
        depth: u8,
        (low, high): (u64, Option<u64>),
        leaf: &mut OnLeaf<'_>,
    ) -> bool {
        let in_range = children.first().is_some_and(|(key, _)| *key == low)
            && children
                .last()
                .is_some_and(|(key, _)| high.is_none_or(|high| *key < high));
        if !in_range {
            let what = format!("a tree node does not cover the keys from {low} as its parent says");
            self.error(owner, what);
        }
        let mut whole = true;
        for (i, &(key, nid)) in children.iter().enumerate() {
            let end = children.get(i + 1).map(|(key, _)| *key).or(high);
            if !self.claim(owner, nid) {
                whole = false;
                continue;
            }
            let Some(node) = self.read_owned(owner, nid) else {
                whole = false;
                continue;
            };
            if depth == 0 {
                leaf(nid, &node, key, end);
                continue;
            }
            let below: Vec<(u64, Nid)> = match node.index() {
                Ok(list) => list.iter().map(|c| (c.key, c.nid)).collect(),
                Err(damage) => {
                    self.error(owner, format!("tree node {nid} {}", damage.what));
                    whole = false;
                    continue;
                }
            };
            drop(node);
            whole &= self.walk_children(owner, &below, depth - 1, (key, end), leaf);
        }
        whole
    }

    /// Names and attributes of one hash are in one leaf, in which alone they are looked for: it begins with the first key of a hash.
    fn check_beginning(&self, owner: Ino, leaf: Nid, low: u64) {
        if !low.is_multiple_of(1 << COLLISION_BITS) {
            let what = format!("leaf {leaf} begins at key {low}, among the names of one hash");
            self.error(owner, what);
        }
    }

    /// Notes that `owner` refers to an owned node; only one reference is right.
    fn claim(&self, owner: Ino, nid: Nid) -> bool {
        match self.inodes.claim(nid, owner) {
            None => {
                self.error(owner, format!("refers to node {nid}, which does not exist"));
                false
            }
            Some(true) => true,
            Some(false) => {
                self.contested.lock().insert((nid, owner));
                self.error(
                    owner,
                    format!("refers to node {nid}, which belongs to another place too"),
                );
                false
            }
        }
    }

    /// A node that an inode refers to. One that is unreadable is reported by the store.
    fn read_owned(&self, owner: Ino, nid: Nid) -> Option<engine::NodeRead<FsNode>> {
        match self.store.get(nid).and_then(|node| node.into_read()) {
            Ok(node) => Some(node),
            Err(engine::Error::Gone(_)) => {
                self.error(owner, format!("refers to node {nid}, which does not exist"));
                None
            }
            Err(error) => {
                self.owners_hidden.store(true, Ordering::Relaxed);
                if let engine::Error::Device(error) = error {
                    *self.trouble.lock() = Some(error.to_string());
                }
                None
            }
        }
    }
}

/// Called with a leaf: its nid, its content, and the keys that it covers, from a first one up to
/// another (`None`: no end).
type OnLeaf<'a> = dyn FnMut(Nid, &FsNode, u64, Option<u64>) + 'a;

/// The word for a tree in a finding.
fn tree_name(tree: TreeId) -> &'static str {
    match tree {
        TreeId::Body => "content",
        TreeId::Xattrs => "attributes",
    }
}

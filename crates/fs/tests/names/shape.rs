//! The tree itself, with leaves so small that it gets deep.

use crate::world::{World, list};
use base::rng::Rng;
use engine::{Need, Store};
use format::Nid;
use fs::content::{Body, Child, Delta, FsNode, Inode, Orphan, Root, TreeId};
use fs::{Caller, FileSystem, Ino, tree};
use std::collections::BTreeSet;

const TREE: TreeId = TreeId::Body;

struct Fixture<'a> {
    store: &'a Store<FsNode>,
    inode: Nid,
    keys: BTreeSet<u64>,
}

fn orphan(key: u64) -> Orphan {
    Orphan {
        nid: Nid(key),
        generation: 1,
    }
}

impl Fixture<'_> {
    fn new(store: &Store<FsNode>) -> Fixture<'_> {
        let (inode, leaf) = (store.reserve_nid().unwrap(), store.reserve_nid().unwrap());
        let nid = inode.nid();
        let mut content = Inode::new(libc::S_IFDIR, inode.version(), store.clock().now());
        let children = vec![Child {
            key: 0,
            nid: leaf.nid(),
        }];
        content.body = Body::Tree(Root { depth: 0, children });
        let mut op = store.begin(Need::Grow).unwrap();
        op.create(inode, FsNode::Inode(content));
        op.create(leaf, FsNode::Orphans(Vec::new()));
        op.commit();
        Fixture {
            store,
            inode: nid,
            keys: BTreeSet::new(),
        }
    }

    /// Adds a key in a new leaf that begins with it.
    fn insert(&mut self, key: u64) {
        if !self.keys.insert(key) {
            return;
        }
        let node = self.store.get(self.inode).unwrap();
        let mut op = self.store.begin(Need::Grow).unwrap();
        let inode = op.lock(&node).unwrap();
        let path = tree::path(&op, inode, TREE, key).unwrap();
        let slot = path.lock_leaf(&mut op).unwrap();
        let fresh = self.store.reserve_nid().unwrap();
        let growth = path.plan_growth(self.store, &mut op, 1).unwrap();
        let old = op.peek(slot).orphans().unwrap();
        let mut upper: Vec<Orphan> = old.iter().copied().filter(|o| o.nid.0 > key).collect();
        upper.insert(0, orphan(key));
        op.apply(slot, Delta::DropFrom(key));
        let nid = fresh.nid();
        op.create(fresh, FsNode::Orphans(upper));
        path.grow(&mut op, growth, vec![Child { key, nid }]);
        op.commit();
    }

    /// Takes out the whole leaf that covers a key; false when it is the tree's last.
    fn remove(&mut self, key: u64) -> bool {
        let node = self.store.get(self.inode).unwrap();
        let mut op = self.store.begin(Need::Reclaim).unwrap();
        let inode = op.lock(&node).unwrap();
        let path = tree::path(&op, inode, TREE, key).unwrap();
        let slot = path.lock_leaf(&mut op).unwrap();
        for gone in op.peek(slot).orphans().unwrap() {
            assert!(self.keys.remove(&gone.nid.0));
        }
        let removal = path.plan_removal(&mut op, slot).unwrap();
        let last = removal.empties();
        removal.finish(&mut op, Some(Body::Inline(Vec::new())));
        op.commit();
        !last
    }

    fn root(&self) -> Root {
        let node = self.store.get(self.inode).unwrap().into_read().unwrap();
        node.inode().unwrap().root(TREE).unwrap().clone()
    }

    fn check(&self) {
        let mut found = Vec::new();
        let mut low = 0;
        tree::walk(self.store, &self.root(), 0, |leaf, place| {
            assert_eq!(place.low, low);
            low = place.high.unwrap_or(0);
            found.extend(leaf.orphans()?.iter().map(|o| o.nid.0));
            Ok(true)
        })
        .unwrap();
        assert_eq!(found, self.keys.iter().copied().collect::<Vec<_>>());
    }
}

fn nodes(store: &Store<FsNode>) -> u64 {
    store.checkpoint().unwrap();
    store.space().nodes
}

#[test]
fn a_deep_tree_grows_and_shrinks_in_any_order() {
    for order in ["random", "ascending", "descending"] {
        let fs = World::new(1, 128 << 20, 1).open();
        let mut rng = Rng::new(8);
        let before = nodes(fs.store());
        let mut fixture = Fixture::new(fs.store());
        let count = 26_000u64;
        for i in 0..count {
            let key = match order {
                "ascending" => i + 1,
                "descending" => count - i,
                _ => rng.next_u64() >> 2,
            };
            fixture.insert(key);
            if i % 5000 == 0 {
                fixture.check();
            }
        }
        fixture.check();
        assert!(
            fixture.root().depth >= 2,
            "{order}: {}",
            fixture.root().depth
        );
        let mut keys: Vec<u64> = fixture.keys.iter().copied().collect();
        for i in 0..keys.len() {
            if order == "random" {
                let j = rng.range(i as u64, keys.len() as u64) as usize;
                keys.swap(i, j);
            }
            if !fixture.remove(keys[i]) {
                break;
            }
            if i % 5000 == 4999 {
                fixture.check();
            }
        }
        let node = fs.store().get(fixture.inode).unwrap();
        let mut op = fs.store().begin(Need::Reclaim).unwrap();
        let slot = op.lock(&node).unwrap();
        // The first leaf, which no key began, may be left.
        if op.peek(slot).inode().unwrap().root(TREE).is_some() {
            let (removal, _) = tree::plan_tail(&mut op, slot, TREE, 16).unwrap();
            assert!(removal.empties());
            removal.finish(&mut op, Some(Body::Inline(Vec::new())));
        }
        op.delete(slot);
        op.commit();
        assert_eq!(nodes(fs.store()), before, "{order}");
    }
}

/// A directory that loses nearly all its names loses their leaves, too, by changes that share it: its inode, which every
/// exclusive hold gives a new version, hardly changes.
#[test]
fn leaves_go_under_the_shared_lock() {
    let (leaves, changes) = leaves_go(|fs, dir, name| fs.unlink(&Caller::root(), dir, name));
    // The last fifty or so hang right below the root.
    assert!(
        changes < leaves / 2,
        "{changes} changes of the inode for {leaves} leaves"
    );
}

/// What a rename within a directory emptied stayed, until the directory was removed.
#[test]
fn leaves_go_when_their_names_become_others() {
    leaves_go(|fs, dir, name| {
        let (who, new) = (Caller::root(), [b"gone-", name].concat());
        fs.rename(&who, dir, name, dir, &new, 0)?;
        fs.unlink(&who, dir, &new)
    });
    // In the place of one name, which stays.
    leaves_go(|fs, dir, name| {
        let (who, other) = (Caller::root(), b"other");
        fs.rename(&who, dir, name, dir, other, 0)?;
        let last = name.ends_with(format!("-{}", COUNT - 1).as_bytes());
        if last {
            fs.unlink(&who, dir, other)
        } else {
            Ok(())
        }
    });
}

const COUNT: u32 = 9000;

/// Fills a directory and takes nearly all names out. Returns how many leaves it had, and how often its inode changed.
fn leaves_go(take: impl Fn(&FileSystem, Ino, &[u8]) -> Result<(), fs::Error>) -> (u64, u64) {
    let world = World::new(1, 128 << 20, 1);
    let fs = world.open();
    let who = Caller::root();
    let dir = fs.mkdir(&who, fs::ROOT, b"d", 0o755).unwrap().ino;
    let name = |i: u32| format!("a-name-that-is-not-short-{i}").into_bytes();
    let version = || fs.store().get(dir).unwrap().into_read().unwrap().version();
    let before = nodes(fs.store());
    let (count, stay) = (COUNT, 10);
    for i in 0..count {
        fs.mknod(&who, dir, &name(i), libc::S_IFREG, 0).unwrap();
    }
    let leaves = nodes(fs.store()) - before - u64::from(count);
    assert!(leaves > 120, "{leaves} leaves");
    let full = version();
    for i in stay..count {
        take(&fs, dir, &name(i)).unwrap();
    }
    let changes = version() - full;
    let left = nodes(fs.store()) - before - u64::from(stay);
    assert!(
        left <= u64::from(stay) + 8,
        "{left} nodes are left of the tree"
    );
    for i in 0..count {
        assert_eq!(fs.lookup(dir, &name(i)).is_ok(), i < stay);
    }
    (0..stay).for_each(|i| fs.unlink(&who, dir, &name(i)).unwrap());
    fs.rmdir(&who, fs::ROOT, b"d").unwrap();
    assert_eq!(nodes(fs.store()), before - 1);
    fs.close().unwrap();
    world.check();
    (leaves, changes)
}

/// Several threads take names out of one directory by renames within it, while others make some.
#[test]
fn leaves_go_beside_those_who_use_them() {
    const EACH: u32 = 2000;
    let world = World::new(1, 128 << 20, 3);
    let fs = world.open();
    let who = Caller::root();
    let dir = fs.mkdir(&who, fs::ROOT, b"d", 0o755).unwrap().ino;
    let name = |i: u32| format!("a-name-that-is-not-short-{i}").into_bytes();
    for i in 0..2 * EACH {
        fs.mknod(&who, dir, &name(i), libc::S_IFREG, 0).unwrap();
    }
    base::thread::parallel(3, |thread| {
        let first = thread as u32 * EACH;
        for i in first..first + EACH {
            if thread == 2 {
                fs.mknod(&who, dir, &name(i), libc::S_IFREG, 0).unwrap();
                continue;
            }
            let new = [b"gone-", &name(i)[..]].concat();
            fs.rename(&who, dir, &name(i), dir, &new, 0).unwrap();
            fs.unlink(&who, dir, &new).unwrap();
        }
    });
    for i in 0..3 * EACH {
        assert_eq!(fs.lookup(dir, &name(i)).is_ok(), i >= 2 * EACH);
    }
    assert_eq!(list(&fs, dir, 1000).len(), EACH as usize);
    fs.close().unwrap();
    world.check();
}

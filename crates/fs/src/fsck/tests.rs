//! Each kind of inconsistency is made on purpose, past the file system, and must be found.

mod leaves;

use super::repair::{Outcome, RepairOptions, RepairReport, repair};
use super::*;
use crate::api::{Caller, ROOT};
use crate::content::{AttrChange, Body, Child, Delta, FileExtent, Name, Orphan, Value, Xattr};
use crate::{FileSystem, FsOptions, MkfsOptions};
use base::clock::Clock;
use device::BlockDevice;
use device::sim::SimDevice;
use engine::Need;
use format::Block;
use format::geometry::{Geometry, GeometryOptions};
use format::inode::FIRST_ORPHANS;

const BYTES: u64 = 64 << 20;

/// A device with a small tree on it: `/file` (data and a large attribute), `/dir/sub/inner`,
/// `/link`, and `/many` with enough names for a tree of buckets.
pub(super) struct World {
    pub device: Arc<SimDevice>,
    pub clock: Clock,
}

fn root() -> Caller {
    Caller::root()
}

impl World {
    pub(super) fn new() -> World {
        World::of(BYTES)
    }

    pub(super) fn of(bytes: u64) -> World {
        let clock = Clock::manual(1_700_000_000_000_000_000);
        let device = SimDevice::new(bytes, 1);
        let world = World { device, clock };
        let geometry = Geometry::plan(&[bytes], GeometryOptions::default()).unwrap();
        let array = Array::create(world.handles(), geometry, "test", [7; 16], [9; 16]).unwrap();
        let array = Arc::new(array);
        let mkfs = MkfsOptions {
            clock: world.clock.clone(),
            ..MkfsOptions::default()
        };
        FileSystem::mkfs(&array, &mkfs).unwrap();
        array.write_labels().unwrap();
        world.change(|fs| {
            let who = root();
            for name in ["file", "other"] {
                let (attr, file) = fs
                    .create(&who, ROOT, name.as_bytes(), 0o644, libc::O_RDWR)
                    .unwrap();
                fs.write(&file, 0, &[1; 40_000]).unwrap();
                fs.setxattr(&who, attr.ino, b"user.large", &[2; 20_000], 0)
                    .unwrap();
                drop(file);
                fs.forget(attr.ino, 1);
            }
            let dir = fs.mkdir(&who, ROOT, b"dir", 0o755).unwrap().ino;
            let sub = fs.mkdir(&who, dir, b"sub", 0o755).unwrap().ino;
            let regular = libc::S_IFREG | 0o644;
            fs.mknod(&who, sub, b"inner", regular, 0).unwrap();
            fs.symlink(&who, ROOT, b"link", b"dir/sub").unwrap();
            let many = fs.mkdir(&who, ROOT, b"many", 0o755).unwrap().ino;
            for i in 0..400 {
                let name = format!("name {i}");
                fs.mknod(&who, many, name.as_bytes(), regular, 0).unwrap();
            }
        });
        world
    }

    fn handles(&self) -> Vec<Arc<dyn BlockDevice>> {
        vec![Arc::clone(&self.device) as Arc<dyn BlockDevice>]
    }

    pub(super) fn array(&self, read_only: bool) -> Arc<Array> {
        Arc::new(Array::assemble(self.handles(), read_only).unwrap())
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&FileSystem) -> T) -> T {
        let options = FsOptions::default().without_threads(self.clock.clone());
        let fs = FileSystem::open(self.array(false), options).unwrap();
        let result = change(&fs);
        fs.close().unwrap();
        result
    }

    pub(super) fn ino(&self, path: &str) -> Nid {
        self.change(|fs| fs.resolve(path.as_bytes()).unwrap().ino)
    }

    /// Applies deltas to nodes behind the file system's back.
    pub(super) fn edit(&self, edits: Vec<(Nid, Delta)>) {
        self.change(|fs| {
            for (nid, delta) in edits {
                let node = fs.store().get(nid).unwrap();
                let mut op = fs.store().begin(Need::Reclaim).unwrap();
                let slot = op.lock(&node).unwrap();
                op.apply(slot, delta);
                op.commit();
            }
        });
    }

    pub(super) fn inode(&self, nid: Nid) -> crate::content::Inode {
        self.change(|fs| {
            let node = fs.store().get(nid).unwrap().into_read().unwrap();
            node.inode().unwrap().clone()
        })
    }

    pub(super) fn fsck(&self) -> Report {
        fsck(self.array(true), &FsckOptions::default(), &|_| {}).unwrap()
    }

    /// Uses and removes everything on a copy of the device. Errors are right, panics are not.
    fn exercise(&self) {
        let copy = World {
            device: self.device.clone_state(5),
            clock: self.clock.clone(),
        };
        let options = FsOptions::default().without_threads(copy.clock.clone());
        let Ok(fs) = FileSystem::open(copy.array(false), options) else {
            return;
        };
        let mut todo = vec![(ROOT, 0)];
        while let Some((dir, depth)) = todo.pop() {
            let mut names = Vec::new();
            let listed = fs.readdir(dir, 0, &mut |entry| {
                names.push((entry.name.to_vec(), entry.ino, entry.kind));
                names.len() < 5000
            });
            drop(listed);
            for (name, ino, kind) in names {
                if name == b"." || name == b".." {
                    continue;
                }
                if kind == libc::DT_DIR && depth < 6 {
                    todo.push((ino, depth + 1));
                }
                use_and_remove(&fs, dir, &name, ino);
            }
        }
        drop(fs.sync());
        drop(fs.store().checkpoint());
        drop(fs.close());
        drop(fs);
        fsck(copy.array(true), &FsckOptions::default(), &|_| {}).unwrap();
    }

    /// A copy of the device, repaired: nothing is found then, and everything can be used.
    pub(super) fn repaired(&self) -> (World, RepairReport) {
        let copy = World {
            device: self.device.clone_state(6),
            clock: self.clock.clone(),
        };
        let options = RepairOptions {
            clock: self.clock.clone(),
            ..RepairOptions::default()
        };
        let report = repair(&copy.array(false), &options, &|_| {}).unwrap();
        assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
        assert_eq!(copy.fsck().findings, [], "{:#?}", report.actions);
        copy.exercise();
        assert_eq!(copy.fsck().findings, []);
        (copy, report)
    }

    /// Every expected finding (path, part of the text) is there, and no other is.
    fn expect(&self, expected: &[(Option<&str>, &str)]) {
        self.exercise();
        self.repaired();
        let report = self.fsck();
        let matches = |f: &Finding, (path, what): &(Option<&str>, &str)| {
            f.path.as_deref() == *path && f.what.contains(what)
        };
        for one in expected {
            let found = report.findings.iter().any(|f| matches(f, one));
            assert!(found, "{one:?} is not among {:#?}", report.findings);
        }
        for finding in &report.findings {
            let known = expected.iter().any(|one| matches(finding, one));
            assert!(known, "unexpected: {finding}");
        }
    }
}

/// Most calls that touch a file's nodes, the last of which removes it.
fn use_and_remove(fs: &FileSystem, dir: Nid, name: &[u8], ino: Nid) {
    let who = root();
    drop(fs.getattr(ino));
    drop(fs.lookup(dir, name));
    drop(fs.setxattr(&who, ino, b"user.large", &[7; 3000], 0));
    drop(fs.removexattr(&who, ino, b"user.large"));
    if let Ok(file) = fs.open_file(ino, libc::O_RDWR) {
        let mut bytes = vec![0; 50_000];
        drop(fs.read(&file, 0, &mut bytes));
        drop(fs.write(&file, 30_000, &[3; 20_000]));
        drop(fs.fsync(&file, false));
        drop(fs.truncate(&who, ino, 5_000));
    }
    drop(fs.rename(&who, dir, name, ROOT, b"moved", 0));
    drop(fs.rename(&who, ROOT, b"moved", dir, name, 0));
    drop(fs.link(&who, ino, ROOT, b"linked"));
    drop(fs.unlink(&who, ROOT, b"linked"));
    drop(fs.unlink(&who, dir, name));
    drop(fs.rmdir(&who, dir, name));
}

fn attrs(change: AttrChange) -> Delta {
    Delta::Attrs(change)
}

#[test]
fn a_sound_file_system_has_no_findings() {
    let world = World::new();
    let report = world.fsck();
    assert_eq!(report.findings, []);
    assert_eq!((report.files, report.directories), (403, 4));
    assert_eq!((report.symlinks, report.names), (1, 407));
    assert_eq!(report.blocks, 20);
    assert!(report.clean && report.is_sound());
}

#[test]
fn progress_reaches_the_end() {
    let world = World::new();
    let last: Mutex<Vec<Progress>> = Mutex::new(rank::LEAF, Vec::new());
    fsck(world.array(true), &FsckOptions::default(), &|p| {
        last.lock().push(p)
    })
    .unwrap();
    let all = std::mem::take(&mut *last.lock());
    for phase in [Phase::Nodes, Phase::Names, Phase::Sums] {
        let done = |p: &Progress| p.phase == phase && p.done == p.total;
        assert!(all.iter().any(done), "{phase:?} in {all:?}");
    }
}

#[test]
fn link_counts_and_sizes_that_do_not_add_up_are_found() {
    let world = World::new();
    let (file, dir) = (world.ino("/file"), world.ino("/dir"));
    let nlink = Some(3);
    world.edit(vec![
        (
            file,
            attrs(AttrChange {
                nlink,
                blocks: Some(3),
                ..AttrChange::default()
            }),
        ),
        (
            dir,
            attrs(AttrChange {
                nlink: Some(2),
                size: Some(7),
                ..AttrChange::default()
            }),
        ),
    ]);
    world.expect(&[
        (Some("/file"), "has 1 names, and should have 3"),
        (Some("/file"), "has 10 blocks and counts 3"),
        (Some("/dir"), "has 1 names and counts 7"),
        (Some("/dir"), "has 1 subdirectories and a link count of 2"),
    ]);
}

#[test]
fn a_tail_beyond_the_end_of_its_file_is_found_and_kept() {
    let world = World::new();
    let file = world.ino("/file");
    let tail = Delta::Tail {
        page: 9,
        len: 3200,
        offset: 3136,
        data: vec![3; 64],
    };
    world.edit(vec![(file, tail)]);
    world.expect(&[(Some("/file"), "its tail, page 9, lies beyond its size")]);
    let (mended, _) = world.repaired();
    mended.change(|fs| {
        let attr = fs.getattr(file).unwrap();
        assert_eq!(attr.size, 9 * 4096 + 3200);
    });
}

#[test]
fn names_of_nothing_and_of_the_wrong_thing_are_found() {
    let world = World::new();
    let inner = world.ino("/dir/sub/inner");
    let sub = world.ino("/dir/sub");
    let list = match world.inode(sub).body {
        Body::Entries(list) => list,
        other => panic!("{other:?}"),
    };
    let name = list.to_vec().remove(0);
    let retarget = |nid: Nid, generation, kind| Delta::Retarget {
        key: name.key,
        nid,
        generation,
        kind,
    };
    world.edit(vec![(sub, retarget(inner, name.generation + 1, name.kind))]);
    world.expect(&[(Some("/dir/sub"), "names another use of its inode's number")]);
    world.edit(vec![(sub, retarget(inner, name.generation, libc::DT_LNK))]);
    world.expect(&[(Some("/dir/sub"), "says file type 10, its inode 8")]);
    world.edit(vec![(sub, retarget(Nid(9_999), 1, name.kind))]);
    world.expect(&[
        (Some("/dir/sub"), "names an inode that does not exist"),
        (None, "has 0 names, and should have 1"),
    ]);
    let value = match &world.inode(world.ino("/file")).seldom.xattrs[0].value {
        Value::Nodes { nids, .. } => nids[0],
        other => panic!("{other:?}"),
    };
    world.edit(vec![(sub, retarget(value, 1, name.kind))]);
    world.expect(&[
        (Some("/dir/sub"), "names something that is no inode"),
        (None, "has 0 names, and should have 1"),
    ]);
}

#[test]
fn a_name_in_the_wrong_place_is_found() {
    let world = World::new();
    let sub = world.ino("/dir/sub");
    let Body::Entries(list) = world.inode(sub).body else {
        panic!("a small directory is inline");
    };
    let list = list.to_vec();
    let moved = Name {
        key: list[0].key ^ 1 << 40,
        ..list[0].clone()
    };
    world.edit(vec![
        (sub, Delta::RemoveName(list[0].key)),
        (sub, Delta::InsertName(moved)),
    ]);
    world.expect(&[(Some("/dir/sub"), "\"inner\" (inode")]);
    let twin = Name {
        key: list[0].key ^ 1,
        ..list[0].clone()
    };
    let Body::Entries(now) = world.inode(sub).body else {
        panic!("a small directory is inline");
    };
    let now = now.to_vec();
    world.edit(vec![
        (sub, Delta::RemoveName(now[0].key)),
        (sub, Delta::InsertName(list[0].clone())),
        (sub, Delta::InsertName(twin)),
    ]);
    world.expect(&[
        (Some("/dir/sub"), "exists twice"),
        (Some("/dir/sub"), "has 2 names and counts 1"),
        (Some("/dir/sub/inner"), "has 2 names, and should have 1"),
    ]);
}

#[test]
fn directories_out_of_the_tree_are_found() {
    let world = World::new();
    let (dir, sub) = (world.ino("/dir"), world.ino("/dir/sub"));
    let parent = |nid| {
        attrs(AttrChange {
            parent: Some(nid),
            ..AttrChange::default()
        })
    };
    world.edit(vec![(sub, parent(ROOT))]);
    world.expect(&[(Some("/dir"), "whose parent is said to be inode 1")]);
    // A ring that hangs from nowhere: dir names sub, sub names dir, the root names neither.
    let Body::Entries(top) = world.inode(ROOT).body else {
        panic!("a small directory is inline");
    };
    let name = top.iter().find(|n| n.nid == dir).unwrap().clone();
    let (size, nlink) = (world.inode(ROOT).size, world.inode(ROOT).nlink);
    let counts = |size, nlink| {
        attrs(AttrChange {
            size: Some(size),
            nlink: Some(nlink),
            ..AttrChange::default()
        })
    };
    world.edit(vec![
        (sub, parent(dir)),
        (dir, parent(sub)),
        (ROOT, Delta::RemoveName(name.key)),
        (ROOT, counts(size - 1, nlink - 1)),
        (sub, Delta::InsertName(name)),
        (sub, counts(2, 3)),
    ]);
    world.expect(&[(None, "is its own ancestor")]);
}

#[test]
fn a_directory_with_two_names_or_none_is_found() {
    let world = World::new();
    let dir = world.ino("/dir");
    let Body::Entries(top) = world.inode(ROOT).body else {
        panic!("a small directory is inline");
    };
    let name = top.iter().find(|n| n.nid == dir).unwrap().clone();
    world.edit(vec![(ROOT, Delta::RemoveName(name.key))]);
    world.expect(&[
        (Some("/"), "has 4 names and counts 5"),
        (Some("/"), "has 1 subdirectories and a link count of 4"),
        (None, "has 0 names, and should have 1"),
    ]);
}

#[test]
fn nodes_without_an_owner_or_with_two_are_found() {
    let world = World::new();
    world.change(|fs| {
        let fresh = fs.store().reserve_nid().unwrap();
        let mut op = fs.store().begin(Need::Grow).unwrap();
        op.create(fresh, FsNode::Value(vec![1]));
        op.commit();
    });
    world.expect(&[(None, "belongs to no inode")]);
    let (file, other) = (world.ino("/file"), world.ino("/other"));
    let mine = world.inode(file).seldom.xattrs[0].clone();
    let theirs = world.inode(other).seldom.xattrs[0].clone();
    let stolen = Xattr {
        value: theirs.value,
        ..mine
    };
    world.edit(vec![(file, Delta::SetXattr(stolen))]);
    let report = world.fsck();
    let twice = |f: &&Finding| f.what.contains("which belongs to another place too");
    let found: Vec<_> = report.findings.iter().filter(twice).collect();
    assert_eq!(found.len(), 2, "{:#?}", report.findings);
    let leaked = |f: &&Finding| f.what.contains("belongs to no inode");
    assert_eq!(report.findings.iter().filter(leaked).count(), 3);
}

#[test]
fn blocks_with_two_owners_or_none_or_free_ones_are_found() {
    let world = World::new();
    let (file, other) = (world.ino("/file"), world.ino("/other"));
    let extents = |nid| match world.inode(nid).body {
        Body::Extents(list) => list,
        other => panic!("{other:?}"),
    };
    let theirs = extents(other);
    let mine = extents(file);
    let set = |with: Vec<FileExtent>| Delta::Extents {
        start: 0,
        end: 1 << 51,
        with,
    };
    world.edit(vec![(file, set(theirs.clone()))]);
    world.expect(&[
        (Some("/file"), "shares block"),
        (Some("/other"), "shares block"),
        (None, "allocated, but no file has them"),
    ]);
    let mut free = mine.clone();
    free[0].block = Block(theirs[0].block.0 + 100);
    world.edit(vec![(file, set(free))]);
    world.expect(&[
        (None, "free, but a file has them"),
        (None, "allocated, but no file has them"),
    ]);
    let mut outside = mine.clone();
    outside[0].block = Block(1 << 40);
    world.edit(vec![(file, set(outside))]);
    world.expect(&[
        (Some("/file"), "lies outside the data area"),
        (Some("/file"), "has 0 blocks and counts 10"),
        (None, "allocated, but no file has them"),
    ]);
}

#[test]
fn orphans_that_are_none_and_unlisted_ones_are_found() {
    let world = World::new();
    let file = world.ino("/file");
    let directory = Nid(FIRST_ORPHANS + file.0 % 16);
    let generation = world.inode(file).generation;
    let orphan = Orphan {
        nid: file,
        generation,
    };
    let stray = Orphan {
        nid: Nid(file.0 + 1),
        generation,
    };
    // The next open finds them too, and leaves them alone.
    world.edit(vec![(directory, Delta::InsertOrphan(orphan))]);
    world.expect(&[(Some("/file"), "is listed as an orphan, but it has names")]);
    world.edit(vec![
        (directory, Delta::RemoveOrphan(file)),
        (directory, Delta::InsertOrphan(stray)),
    ]);
    world.expect(&[(None, "which is another's"), (None, "which does not exist")]);
    let world = World::new();
    let Body::Entries(list) = world.inode(world.ino("/dir/sub")).body else {
        panic!("a small directory is inline");
    };
    let list = list.to_vec();
    let sub = world.ino("/dir/sub");
    let gone = attrs(AttrChange {
        nlink: Some(0),
        ..AttrChange::default()
    });
    let fewer = attrs(AttrChange {
        size: Some(0),
        ..AttrChange::default()
    });
    world.edit(vec![
        (sub, Delta::RemoveName(list[0].key)),
        (sub, fewer),
        (list[0].nid, gone),
    ]);
    world.expect(&[(None, "is unlinked, but no orphan directory lists it")]);
}

#[test]
fn tree_shapes_that_hide_keys_are_found() {
    let world = World::new();
    let many = world.ino("/many");
    let Body::Tree(mut root) = world.inode(many).body else {
        panic!("a large directory is a tree");
    };
    assert!(root.children.len() > 2);
    // The second bucket's range now begins in the middle of its names.
    let low = root.children[1].key;
    let high = root.children[2].key;
    let middle = low + (high - low) / 2;
    root.children[1].key = middle.next_multiple_of(1 << COLLISION_BITS);
    let tree = TreeId::Body;
    world.edit(vec![(many, Delta::SetRoot { tree, root })]);
    world.expect(&[(Some("/many"), "has names of another bucket")]);
}

#[test]
fn attributes_that_make_no_sense_are_found() {
    let world = World::new();
    let file = world.ino("/file");
    let attribute = |name: &[u8], value: &[u8]| {
        let hash = NameHash::new(&[9; 16]);
        Delta::SetXattr(Xattr {
            key: hash.first_key(name),
            name: name.into(),
            value: Value::Here(value.into()),
        })
    };
    world.edit(vec![(file, attribute(b"system.posix_acl_access", b"junk"))]);
    world.expect(&[(Some("/file"), "not a valid access control list")]);
    world.edit(vec![(file, attribute(b"nonsense", b"x"))]);
    world.expect(&[
        (Some("/file"), "not a valid access control list"),
        (Some("/file"), "is of no known kind"),
    ]);
}

#[test]
fn a_damaged_node_is_reported_with_its_path_and_hides_nothing_else() {
    let world = World::new();
    let sub = world.ino("/dir/sub");
    // The image of `sub` holds the name of its only entry.
    let mut all = vec![0; BYTES as usize];
    world.device.peek(0, &mut all);
    let mut hits = Vec::new();
    for at in 0..all.len() - 5 {
        if &all[at..at + 5] == b"inner" {
            hits.push(at as u64);
        }
    }
    assert!(!hits.is_empty());
    for at in hits {
        world.device.poke(at, b"INNER");
    }
    let report = world.fsck();
    let damaged = report
        .findings
        .iter()
        .find(|f| f.object == Object::Node(sub));
    let damaged = damaged.expect("the damaged directory is reported");
    assert_eq!(damaged.path.as_deref(), Some("/dir/sub"));
    assert!(damaged.what.contains("checksum"));
    let errors = report
        .findings
        .iter()
        .filter(|f| f.severity == Severity::Error);
    // The node itself and the name that leads to it.
    assert_eq!(errors.count(), 2, "{:#?}", report.findings);
}

fn in_use(what: &str, done: Result<(), Error>) {
    match done {
        Err(Error::Store(engine::Error::Device(error))) => {
            assert!(matches!(*error, device::Error::InUse { .. }), "{what}");
        }
        other => panic!("{what}: {other:?}"),
    }
}

/// The claim was the array's own: two file systems over the same open devices, each on an array of its own, ruined each other.
#[test]
fn devices_that_a_file_system_writes_to_are_not_written_to_through_another_array() {
    let world = World::new();
    let options = FsOptions::default().without_threads(world.clock.clone());
    let open = || FileSystem::open(world.array(false), options.clone());
    let fs = open().unwrap();
    in_use("open", open().map(drop));
    let made = FileSystem::mkfs(&world.array(false), &MkfsOptions::default());
    in_use("mkfs", made);
    let repaired = repair(&world.array(false), &RepairOptions::default(), &|_| {});
    in_use("repair", repaired.map(drop));
    let reader = FileSystem::open(world.array(true), options.clone().read_only()).unwrap();
    reader.close().unwrap();
    drop(reader);
    fs.mkdir(&root(), ROOT, b"after", 0o755).unwrap();
    fs.sync().unwrap();
    // As by a crash.
    drop(fs);
    let fs = open().unwrap();
    fs.lookup(ROOT, b"after").unwrap();
    fs.close().unwrap();
    drop(fs);
    let repaired = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(repaired.outcome, Outcome::Sound);
}

/// Each would write where the other does.
#[test]
fn an_array_that_is_open_is_neither_opened_again_nor_made_anew_nor_repaired() {
    let world = World::new();
    let array = world.array(false);
    let options = FsOptions::default().without_threads(world.clock.clone());
    let fs = FileSystem::open(Arc::clone(&array), options.clone()).unwrap();
    let open = || FileSystem::open(Arc::clone(&array), options.clone());
    in_use("open", open().map(drop));
    let made = FileSystem::mkfs(&array, &MkfsOptions::default());
    in_use("mkfs", made);
    let repaired = repair(&array, &RepairOptions::default(), &|_| {});
    in_use("repair", repaired.map(drop));
    let reader = FileSystem::open(Arc::clone(&array), options.clone().read_only()).unwrap();
    reader.close().unwrap();
    drop(reader);
    let file = fs.open_file(fs.resolve(b"file").unwrap().ino, libc::O_RDONLY);
    fs.close().unwrap();
    drop(fs);
    in_use("open beside a handle", open().map(drop));
    drop(file);
    open().unwrap().close().unwrap();
    let repaired = repair(&array, &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(repaired.outcome, Outcome::Sound);
}

//! What becomes of each kind of damage that is not a broken checksum, made on purpose.

use super::super::tests::World;
use super::*;
use crate::api::{Caller, ROOT};
use crate::content::{AttrChange, Body, Delta, FileExtent, FsNode, TreeId};
use device::sim::Times;
use engine::Need;
use format::Block;
use format::item::{self, ItemKind};
use format::label::HEAD_BLOCKS;
use format::table::LEAF_NIDS;
use std::collections::HashSet;
use std::ops::Range;

fn bytes_of(world: &World, path: &str) -> Vec<u8> {
    world.change(|fs| {
        let attr = fs.resolve(path.as_bytes()).unwrap();
        let file = fs.open_file(attr.ino, libc::O_RDONLY).unwrap();
        let mut bytes = vec![0; attr.size as usize];
        assert_eq!(fs.read(&file, 0, &mut bytes).unwrap(), bytes.len());
        bytes
    })
}

fn exists(world: &World, path: &str) -> bool {
    world.change(|fs| fs.resolve(path.as_bytes()).is_ok())
}

fn extents(world: &World, path: &str) -> Vec<FileExtent> {
    match world.inode(world.ino(path)).body {
        Body::Extents(list) => list,
        other => panic!("{other:?}"),
    }
}

/// Damages every image of a node.
fn break_node(world: &World, nid: Nid) {
    let seed = world.device.checksum_seed();
    let mut block = vec![0; 4096 + item::ITEM_MAX];
    for number in 0..(64 << 20) / 4096 - 5 {
        world.device.peek(number * 4096, &mut block);
        for at in (0..4096).step_by(item::ITEM_ALIGN) {
            if let Ok((header, _)) = item::decode(seed, &block[at..])
                && header.kind == ItemKind::Node as u8
                && header.id.get() == nid.0
            {
                world.device.poke(number * 4096 + at as u64 + 40, &[0x5A]);
            }
        }
    }
}

fn actions(report: &RepairReport, kind: ActionKind, path: &str) -> Vec<String> {
    let of = |a: &&Action| a.kind == kind && a.path.as_deref() == Some(path);
    let found = report.actions.iter().filter(of);
    found.map(|action| action.what.clone()).collect()
}

/// A preen looked at the actions that are kept only.
#[test]
fn a_loss_counts_though_the_list_is_full() {
    let mut actions = Actions::default();
    for i in 0..=ACTIONS_MAX as u64 {
        assert!(!actions.lost);
        actions.add(Action {
            kind: ActionKind::Field,
            object: Object::Node(Nid(i)),
            path: None,
            what: "its size was corrected".to_owned(),
            lost: i == ACTIONS_MAX as u64,
        });
    }
    assert_eq!((actions.list.len(), actions.more), (ACTIONS_MAX, 1));
    assert!(actions.lost);
}

/// Damage that a round stumbled over ended the repair as an error of the program's, without a word
/// of what to do.
#[test]
fn damage_that_a_round_stumbles_over_refuses_the_repair_with_a_remedy() {
    let damage = || format::Damage::new("inode", "is not there");
    let damaged = Error::Damaged {
        ino: ROOT,
        damage: damage(),
    };
    for error in [Error::Damage(damage()), damaged] {
        let why = error.to_string();
        let refused = refusal(Err(error)).unwrap();
        let remedy = COPY_OUT.to_owned();
        assert_eq!(refused, Some(Outcome::Refused { why, remedy }));
    }
    assert!(refusal(Err(Error::ReadOnly)).is_err());
}

#[test]
fn a_sound_file_system_is_left_alone() {
    let world = World::new();
    let before = world.device.contents_hash();
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Sound);
    assert!(report.actions.is_empty());
    assert_eq!(world.device.contents_hash(), before);
}

/// Whoever made the file longer would find it.
#[test]
fn data_behind_the_end_of_a_file_is_hidden() {
    let world = World::new();
    let file = world.ino("/file");
    let (size, before) = (world.inode(file).size, bytes_of(&world, "/file"));
    assert!(size > 4096);
    let shorter = AttrChange {
        size: Some(4000),
        ..AttrChange::default()
    };
    world.edit(vec![(file, Delta::Attrs(shorter))]);
    let (copy, report) = world.repaired();
    let told = actions(&report, ActionKind::Field, "/file");
    assert!(told[0].contains("behind the end"), "{told:?}");
    assert!(!report.lost());
    copy.change(|fs| fs.truncate(&Caller::root(), file, size).unwrap());
    let after = bytes_of(&copy, "/file");
    assert_eq!(after[..4000], before[..4000]);
    // Of a page that is in the file in part the rest is made zeros by whoever makes it longer.
    assert!(after[4000..].iter().all(|byte| *byte == 0));
}

#[test]
fn of_two_files_with_one_block_the_one_that_changed_last_keeps_it() {
    let world = World::new();
    let (file, other) = (world.ino("/file"), world.ino("/other"));
    let theirs = extents(&world, "/file");
    let mine = extents(&world, "/other");
    let stolen = FileExtent {
        block: theirs[0].block,
        len: 1,
        ..mine[0]
    };
    let later = |nid| {
        let time = base::clock::Timestamp::new(1_800_000_000, 0);
        let change = AttrChange {
            ctime: Some(time),
            ..AttrChange::default()
        };
        (nid, Delta::Attrs(change))
    };
    world.edit(vec![
        (
            other,
            Delta::Extents {
                start: mine[0].page,
                end: mine[0].page + 1,
                with: vec![stolen],
            },
        ),
        later(file),
    ]);
    let (copy, report) = world.repaired();
    let holes = actions(&report, ActionKind::Hole, "/other");
    assert_eq!(holes.len(), 1, "{:#?}", report.actions);
    drop(copy);
    // On the state before the repaired copy was used up.
    let (array, clean) = (world.array(false), RepairOptions::default());
    repair(&array, &clean, &|_| {}).unwrap();
    drop(array);
    assert_eq!(bytes_of(&world, "/file"), [1; 40_000]);
    let other = bytes_of(&world, "/other");
    assert_eq!(other[..4096], [0; 4096]);
    assert_eq!(other[4096..], [1; 40_000 - 4096]);
}

#[test]
fn a_lost_directory_gives_its_children_to_lost_and_found() {
    let world = World::new();
    let (dir, sub, inner) = (
        world.ino("/dir"),
        world.ino("/dir/sub"),
        world.ino("/dir/sub/inner"),
    );
    break_node(&world, dir);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired);
    assert_eq!(world.fsck().findings, []);
    let lost = report
        .actions
        .iter()
        .find(|a| a.object == Object::Node(dir));
    assert_eq!(lost.unwrap().path.as_deref(), Some("/dir"));
    assert!(!exists(&world, "/dir"));
    let found = format!("/lost+found/{sub}/inner");
    assert_eq!(world.ino(&found), inner);
    let places = actions(&report, ActionKind::Found, &format!("/lost+found/{sub}"));
    assert_eq!(places.len(), 1);
    assert_eq!(bytes_of(&world, "/file"), [1; 40_000]);
}

#[test]
fn without_a_root_everything_is_in_lost_and_found() {
    let world = World::new();
    let (file, many) = (world.ino("/file"), world.ino("/many"));
    break_node(&world, ROOT);
    let array = world.array(false);
    let refused = repair(
        &array,
        &RepairOptions {
            lossless: true,
            ..RepairOptions::default()
        },
        &|_| {},
    );
    let refused = refused.unwrap().outcome;
    assert!(matches!(refused, Outcome::Refused { .. }), "{refused:?}");
    let report = repair(&array, &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired);
    drop(array);
    assert_eq!(world.fsck().findings, []);
    let found = format!("/lost+found/{file}");
    assert_eq!(bytes_of(&world, &found), [1; 40_000]);
    assert!(exists(&world, &format!("/lost+found/{many}/name 399")));
}

#[test]
fn a_loop_of_directories_comes_to_lost_and_found() {
    let world = World::new();
    let (dir, sub) = (world.ino("/dir"), world.ino("/dir/sub"));
    // The root's name of /dir goes into /dir/sub.
    let list = match world.inode(ROOT).body {
        Body::Entries(list) => list,
        other => panic!("{other:?}"),
    };
    let name = list.iter().find(|name| name.nid == dir).unwrap().clone();
    let parent = AttrChange {
        parent: Some(sub),
        ..AttrChange::default()
    };
    world.edit(vec![
        (ROOT, Delta::RemoveName(name.key)),
        (sub, Delta::InsertName(name)),
        (dir, Delta::Attrs(parent)),
    ]);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    assert_eq!(world.fsck().findings, []);
    let whole = [
        format!("/lost+found/{dir}/sub/inner"),
        format!("/lost+found/{sub}/inner"),
    ];
    assert!(whole.iter().any(|path| exists(&world, path)));
}

#[test]
fn a_lost_leaf_of_attributes_costs_the_attributes() {
    let world = World::new();
    let file = world.ino("/file");
    world.change(|fs| {
        let node = fs.store().get(file).unwrap();
        let mut op = fs.store().begin(Need::Reclaim).unwrap();
        let slot = op.lock(&node).unwrap();
        assert!(matches!(op.peek(slot), FsNode::Inode(_)));
        drop(op);
    });
    let value = match &world.inode(file).seldom.xattrs[0].value {
        crate::content::Value::Nodes { nids, .. } => nids[1],
        other => panic!("{other:?}"),
    };
    break_node(&world, value);
    let (_, report) = world.repaired();
    let lost = actions(&report, ActionKind::Attribute, "/file");
    assert_eq!(lost.len(), 1, "{:#?}", report.actions);
    assert!(lost[0].contains("user.large"), "{lost:?}");
}

#[test]
fn a_lost_bucket_costs_its_names_alone() {
    let world = World::new();
    let many = world.ino("/many");
    let bucket = match world.inode(many).body {
        Body::Tree(root) => root.children[1].nid,
        other => panic!("{other:?}"),
    };
    break_node(&world, bucket);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired);
    assert_eq!(world.fsck().findings, []);
    let count = |path: &str| {
        world.change(|fs| {
            let ino = fs.resolve(path.as_bytes()).unwrap().ino;
            let mut count = 0;
            fs.readdir(ino, 0, &mut |entry| {
                count += !entry.name.starts_with(b".") as usize;
                true
            })
            .unwrap();
            count
        })
    };
    let (left, found) = (count("/many"), count("/lost+found"));
    assert_eq!(left + found, 400);
    assert!(left > 200 && found > 10, "{left} and {found}");
    let who = Caller::root();
    world.change(|fs| {
        let found = fs.resolve(b"/lost+found").unwrap();
        assert_eq!(found.mode & 0o777, 0o700);
        fs.unlink(&who, many, b"name 1").ok()
    });
}

fn tree(world: &World, nid: Nid) -> crate::content::Root {
    match world.inode(nid).body {
        Body::Tree(root) => root,
        other => panic!("{other:?}"),
    }
}

fn parent(parent: Nid) -> Delta {
    Delta::Attrs(AttrChange {
        parent: Some(parent),
        ..AttrChange::default()
    })
}

fn name_of(world: &World, dir: Nid, nid: Nid) -> crate::content::Name {
    let list = match world.inode(dir).body {
        Body::Entries(list) => list,
        other => panic!("{other:?}"),
    };
    let name = list.iter().find(|name| name.nid == nid);
    name.unwrap().clone()
}

/// It lost the names in it: a loop was cut in the directory, which was then put back as it had been, without its buckets.
#[test]
fn a_directory_without_a_name_whose_parent_is_below_it_keeps_its_names() {
    let world = World::new();
    let (many, dir) = (world.ino("/many"), world.ino("/dir"));
    world.change(|fs| {
        let who = Caller::root();
        for i in 5..400 {
            let name = format!("name {i}");
            fs.unlink(&who, many, name.as_bytes()).unwrap();
        }
        fs.rename(&who, ROOT, b"dir", many, b"dir", 0).unwrap();
    });
    assert!(tree(&world, many).depth == 0);
    let name = name_of(&world, ROOT, many);
    world.edit(vec![
        (ROOT, Delta::RemoveName(name.key)),
        (many, parent(dir)),
    ]);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    assert_eq!(world.fsck().findings, []);
    for name in ["name 0", "name 4", "dir/sub/inner"] {
        let path = format!("/lost+found/{many}/{name}");
        assert!(exists(&world, &path), "{path}: {:#?}", report.actions);
    }
    assert!(!report.lost());
}

/// It lost the names in it in the same way.
#[test]
fn a_directory_in_itself_keeps_its_other_names() {
    let world = World::new();
    let many = world.ino("/many");
    world.change(|fs| {
        for i in 5..400 {
            let name = format!("name {i}");
            fs.unlink(&Caller::root(), many, name.as_bytes()).unwrap();
        }
    });
    let buckets = tree(&world, many);
    let name = name_of(&world, ROOT, many);
    let of = |key: u64| buckets.children.iter().rfind(|child| child.key <= key);
    let bucket = of(name.key).unwrap().nid;
    world.edit(vec![
        (ROOT, Delta::RemoveName(name.key)),
        (bucket, Delta::InsertName(name)),
        (many, parent(many)),
    ]);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    assert_eq!(world.fsck().findings, []);
    for i in 0..5 {
        let path = format!("/lost+found/{many}/name {i}");
        assert!(exists(&world, &path), "{path}: {:#?}", report.actions);
    }
}

/// The good one went with it, and the file came to `/lost+found`.
#[test]
fn a_name_that_names_nothing_costs_no_other_of_the_same_text() {
    let world = World::new();
    let file = world.ino("/file");
    let name = name_of(&world, ROOT, file);
    let bad = crate::content::Name {
        nid: Nid(file.0 + 5000),
        ..name.clone()
    };
    let good = crate::content::Name {
        key: name.key + 1,
        ..name.clone()
    };
    world.edit(vec![
        (ROOT, Delta::RemoveName(name.key)),
        (ROOT, Delta::InsertName(bad)),
        (ROOT, Delta::InsertName(good)),
    ]);
    let (copy, report) = world.repaired();
    assert_eq!(copy.ino("/file"), file, "{:#?}", report.actions);
    assert!(!exists(&copy, "/lost+found"));
    let removed = actions(&report, ActionKind::Name, "/file");
    assert_eq!(removed.len(), 1, "{removed:?}");
}

/// It told the plan of a repair that it would refuse.
#[test]
fn a_preen_that_would_be_refused_says_so_in_a_dry_run_too() {
    let world = World::new();
    break_node(&world, world.ino("/dir"));
    let before = world.device.contents_hash();
    let options = |dry_run, lossless| RepairOptions {
        dry_run,
        lossless,
        ..RepairOptions::default()
    };
    for (dry_run, lossless) in [(true, true), (false, true), (true, false)] {
        let report = repair(&world.array(dry_run), &options(dry_run, lossless), &|_| {}).unwrap();
        let refused = matches!(report.outcome, Outcome::Refused { .. });
        assert_eq!(refused, lossless, "{:?}", report.outcome);
        assert!(report.lost());
    }
    assert_eq!(world.device.contents_hash(), before);
}

/// It was to be mounted read-only, which it could not be.
#[test]
fn what_does_not_open_is_not_to_be_mounted_for_its_files() {
    for (severity, remedy) in [(Severity::Error, COPY_OUT), (Severity::Fatal, BACKUP)] {
        let world = World::new();
        let mut before = world.fsck();
        before.findings.push(super::super::Finding {
            severity,
            object: Object::Table,
            path: None,
            what: "damaged".to_owned(),
        });
        let report = RepairReport {
            outcome: outcome_of(SalvageError::Store(engine::Error::NoSpace)).unwrap(),
            before,
            actions: Vec::new(),
            more_actions: 0,
            lost: false,
        };
        let Outcome::Refused { remedy: told, .. } = report.with(Actions::default()).outcome else {
            panic!("it was written");
        };
        assert_eq!(told, remedy);
    }
}

/// Nothing was changed because of it, and the repair was refused.
#[test]
fn a_root_among_unlinked_inodes_is_taken_off_the_list() {
    let world = World::new();
    let list = Nid(format::inode::FIRST_ORPHANS + ROOT.0 % format::inode::ORPHAN_DIRECTORIES);
    let orphan = crate::content::Orphan {
        nid: ROOT,
        generation: world.inode(ROOT).generation,
    };
    world.edit(vec![(list, Delta::InsertOrphan(orphan))]);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report);
    assert_eq!(world.fsck().findings, []);
    assert_eq!(bytes_of(&world, "/file"), [1; 40_000]);
}

/// A file of so many extents that they lie in leaves, and what it holds.
fn sparse_file(world: &World, name: &str, pages: u64) -> (Nid, Vec<u8>) {
    let mut whole = vec![0; pages as usize * 8192 - 4096];
    let ino = world.change(|fs| {
        let who = Caller::root();
        let made = fs.create(&who, ROOT, name.as_bytes(), 0o644, libc::O_RDWR);
        let (attr, file) = made.unwrap();
        for page in 0..pages {
            let bytes = [page as u8 | 1; 4096];
            fs.write(&file, page * 8192, &bytes).unwrap();
            whole[page as usize * 8192..][..4096].copy_from_slice(&bytes);
        }
        drop(file);
        fs.forget(attr.ino, 1);
        attr.ino
    });
    (ino, whole)
}

/// The node was deleted with the attribute, and the file's content with it.
#[test]
fn an_attribute_that_claims_a_leaf_of_its_file_costs_no_content() {
    let world = World::new();
    let (nid, whole) = sparse_file(&world, "sparse", 40);
    let leaf = tree(&world, nid).children[0].nid;
    world.change(|fs| {
        let who = Caller::root();
        fs.setxattr(&who, nid, b"user.large", &[2; 20_000], 0)
            .unwrap();
    });
    let mut stolen = world.inode(nid).seldom.xattrs[0].clone();
    let crate::content::Value::Nodes { nids, .. } = &mut stolen.value else {
        panic!("{stolen:?}");
    };
    nids[1] = leaf;
    world.edit(vec![(nid, Delta::SetXattr(stolen))]);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report);
    assert_eq!(world.fsck().findings, []);
    assert!(
        bytes_of(&world, "/sparse") == whole,
        "{:#?}",
        report.actions
    );
}

/// It was taken for a directory, and all of its content dropped.
#[test]
fn a_file_whose_tree_names_a_bucket_loses_what_that_covers_alone() {
    let world = World::new();
    let (nid, whole) = sparse_file(&world, "sparse", 1500);
    let many = world.ino("/many");
    let bucket = tree(&world, many).children[0].nid;
    let mut root = tree(&world, nid);
    assert!(root.depth == 0 && root.children.len() > 1, "{root:?}");
    root.children[0].nid = bucket;
    let intact = root.children[1].key as usize * 4096;
    world.edit(vec![(nid, Delta::Body(Body::Tree(root)))]);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report);
    assert_eq!(world.fsck().findings, []);
    let bytes = bytes_of(&world, "/sparse");
    assert!(bytes[intact..] == whole[intact..], "{:#?}", report.actions);
    for i in 0..400 {
        assert!(exists(&world, &format!("/many/name {i}")));
    }
}

/// The file had the bucket, since the directory did not add up for another reason.
#[test]
fn a_damaged_directory_keeps_a_bucket_that_a_file_claims_too() {
    let world = World::new();
    let (nid, _) = sparse_file(&world, "sparse", 1500);
    let many = world.ino("/many");
    let buckets = tree(&world, many).children;
    let mut root = tree(&world, nid);
    root.children[1].nid = buckets[0].nid;
    world.edit(vec![(nid, Delta::Body(Body::Tree(root)))]);
    break_node(&world, buckets[1].nid);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report);
    assert_eq!(world.fsck().findings, []);
    let lost = actions(&report, ActionKind::Name, "/many");
    assert_eq!(lost.len(), 1, "{lost:#?}");
}

/// A round settled so few of the blocks that no number of rounds was enough, and the repair was refused.
#[test]
fn two_files_that_share_much_are_told_apart() {
    let world = World::of(4 << 30);
    let (file, other) = (world.ino("/file"), world.ino("/other"));
    world.change(|fs| {
        let file = fs.open_file(file, libc::O_RDWR).unwrap();
        fs.fallocate(&file, libc::FALLOC_FL_KEEP_SIZE, 0, 3 << 29)
            .unwrap();
    });
    let body = world.inode(file).body;
    world.edit(vec![(other, Delta::Body(body))]);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report);
    assert_eq!(world.fsck().findings, []);
    assert_eq!(bytes_of(&world, "/file"), [1; 40_000]);
}

const LARGE: usize = 20_000;

/// A directory of so many names that index nodes lie above its buckets, made after `/before`.
fn large_directory() -> (World, Nid) {
    let world = World::new();
    let large = world.change(|fs| {
        let who = Caller::root();
        fs.mkdir(&who, ROOT, b"before", 0o755).unwrap();
        let large = fs.mkdir(&who, ROOT, b"large", 0o755).unwrap().ino;
        for i in 0..LARGE {
            let name = format!("name {i}");
            let made = fs.mknod(&who, large, name.as_bytes(), libc::S_IFREG | 0o644, 0);
            fs.forget(made.unwrap().ino, 1);
        }
        large
    });
    assert_eq!(tree(&world, large).depth, 1);
    (world, large)
}

/// Gives an inode with a lower number the first index node of a directory.
fn claim_index(world: &World, path: &str, large: Nid) {
    let nid = world.ino(path);
    assert!(nid < large);
    let mut root = tree(world, large);
    root.children.truncate(1);
    world.edit(vec![(nid, Delta::Body(Body::Tree(root)))]);
}

fn names_in(world: &World, path: &str) -> usize {
    world.change(|fs| {
        let ino = fs.resolve(path.as_bytes()).unwrap().ino;
        let mut names = HashSet::new();
        fs.readdir(ino, 0, &mut |entry| {
            if !entry.name.starts_with(b".") {
                names.insert(entry.name.to_vec());
            }
            true
        })
        .unwrap();
        names.len()
    })
}

/// It got its index node back and nothing below: all names there were lost, and the files came to `/lost+found`.
#[test]
fn a_directory_whose_index_node_an_old_one_claims_keeps_its_names() {
    let (world, large) = large_directory();
    claim_index(&world, "/before", large);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    assert_eq!(world.fsck().findings, []);
    let told = actions(&report, ActionKind::Name, "/large");
    assert_eq!(told, Vec::<String>::new());
    assert_eq!(names_in(&world, "/large"), LARGE);
    assert_eq!(names_in(&world, "/before"), 0);
}

/// The file had it, since the directory did not add up for another reason.
#[test]
fn a_damaged_directory_keeps_an_index_node_that_a_file_claims_too() {
    let (world, large) = large_directory();
    claim_index(&world, "/file", large);
    let last = tree(&world, large).children.pop().unwrap();
    let bucket = world.change(|fs| {
        let node = fs.store().get(last.nid).unwrap().into_read().unwrap();
        node.index().unwrap().last().unwrap().nid
    });
    break_node(&world, bucket);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    assert_eq!(world.fsck().findings, []);
    let told = actions(&report, ActionKind::Name, "/large");
    assert_eq!(told.len(), 1, "{told:#?}");
    let (left, found) = (names_in(&world, "/large"), names_in(&world, "/lost+found"));
    assert_eq!(left + found, LARGE);
    assert!((1..200).contains(&found), "{found}");
}

/// Sound items on the device: their versions, where they begin, and how long they are.
fn items(world: &World, is_it: impl Fn(&item::ItemHeader) -> bool) -> Vec<(u64, u64, usize)> {
    let seed = world.device.checksum_seed();
    let mut block = vec![0; 4096 + item::ITEM_MAX];
    let mut found = Vec::new();
    for number in 0..(64 << 20) / 4096 - 5 {
        world.device.peek(number * 4096, &mut block);
        for at in (0..4096).step_by(item::ITEM_ALIGN) {
            if let Ok((header, payload)) = item::decode(seed, &block[at..])
                && is_it(&header)
            {
                let len = item::padded_len(payload.len());
                found.push((header.version.get(), number * 4096 + at as u64, len));
            }
        }
    }
    found
}

/// All names of the other directory were gone through for each.
#[test]
fn many_directories_that_name_one_other_parent_cost_one_look_at_it() {
    let world = World::new();
    let (many, dir) = (world.ino("/many"), world.ino("/dir"));
    let subdirectories: Vec<Nid> = world.change(|fs| {
        let who = Caller::root();
        let make = |i| fs.mkdir(&who, dir, format!("sub {i}").as_bytes(), 0o755);
        (0..100).map(|i| make(i).unwrap().ino).collect()
    });
    let elsewhere = |nid: &Nid| (*nid, parent(many));
    world.edit(subdirectories.iter().map(elsewhere).collect());
    names::GONE_THROUGH.set(0);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(names::GONE_THROUGH.get(), 1);
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    assert!(!report.lost());
    assert_eq!(world.fsck().findings, []);
    for (i, nid) in subdirectories.iter().enumerate() {
        assert_eq!(world.ino(&format!("/dir/sub {i}")), *nid);
    }
}

/// A chunk that metadata has given up keeps what was in it until data is written over that. A repair that found an image or a page of the node table there took all
/// of the chunk for metadata, and made holes of what files have in it.
#[test]
fn what_metadata_left_where_data_is_now_costs_no_file_its_data() {
    for page in [false, true] {
        let world = World::new();
        let sub = world.ino("/dir/sub");
        let block = extents(&world, "/file")[0].block;
        let geometry = world.array(true).geometry().clone();
        let (chunk, _) = geometry.chunk_of(block).unwrap();
        let end = geometry.chunk_block(chunk).byte() + geometry.chunk_bytes();
        let is = |header: &item::ItemHeader, kind: ItemKind, id: u64| {
            header.kind == kind as u8 && header.id.get() == id
        };
        let leaf = |header: &item::ItemHeader| is(header, ItemKind::TableLeaf, sub.0 / LEAF_NIDS);
        let left = |header: &item::ItemHeader| match page {
            true => leaf(header),
            false => is(header, ItemKind::Node, sub.0),
        };
        let newest = items(&world, left).into_iter().max();
        let (_, at, len) = newest.unwrap();
        let mut bytes = vec![0; len];
        world.device.peek(at, &mut bytes);
        let lost = |header: &item::ItemHeader| {
            let above = page && header.kind == ItemKind::TableRegion as u8;
            above || left(header) || leaf(header) || header.kind == ItemKind::SpaceRoot as u8
        };
        for (_, at, _) in items(&world, lost) {
            world.device.poke(at + 40, &[0x5A]);
        }
        // The array begins behind what the device has of its own.
        let place = HEAD_BLOCKS * 4096 + end - 4096;
        world.device.poke(place, &bytes);
        assert_eq!(items(&world, left)[0].1, place);
        let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
        assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
        assert_eq!(world.fsck().findings, []);
        for file in ["/file", "/other"] {
            let holes = actions(&report, ActionKind::Hole, file);
            assert_eq!(holes, Vec::<String>::new());
            assert_eq!(bytes_of(&world, file), [1; 40_000]);
        }
        assert!(exists(&world, "/dir/sub/inner"));
    }
}

/// Nothing was repaired, though no repair needs what files hold.
#[test]
fn a_sector_of_file_data_is_needed_by_no_repair() {
    let world = World::new();
    let sub = world.ino("/dir/sub");
    let block = extents(&world, "/file")[0].block;
    let lost = |header: &item::ItemHeader| {
        let leaf = header.kind == ItemKind::TableLeaf as u8 && header.id.get() == sub.0 / LEAF_NIDS;
        leaf || header.kind == ItemKind::SpaceRoot as u8
    };
    for (_, at, _) in items(&world, lost) {
        world.device.poke(at + 40, &[0x5A]);
    }
    let place = HEAD_BLOCKS * 4096 + block.byte();
    let sector = Some(place..place + 512);
    world.device.fail_reads(Times::Always, sector);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    world.device.heal();
    assert_eq!(world.fsck().findings, []);
    assert_eq!(bytes_of(&world, "/file"), [1; 40_000]);
    assert!(exists(&world, "/dir/sub/inner"));
}

/// A file whose data goes on in a chunk that has become one of data since the last checkpoint: the journal alone says that. Where that chunk is on the device.
fn new_data_chunk(world: &World) -> Range<u64> {
    let geometry = world.array(true).geometry().clone();
    let chunk_of = |extent: &FileExtent| {
        let last = Block(extent.block.0 + u64::from(extent.len) - 1);
        geometry.chunk_of(last).unwrap().0
    };
    let before: Vec<u32> = ["/file", "/other"]
        .iter()
        .flat_map(|path| extents(world, path))
        .map(|extent| chunk_of(&extent))
        .collect();
    let options = FsOptions::default().without_threads(world.clock.clone());
    let fs = FileSystem::open(world.array(false), options).unwrap();
    let who = Caller::root();
    let made = fs.create(&who, ROOT, b"new", 0o644, libc::O_RDWR);
    let (attr, file) = made.unwrap();
    let piece = vec![3; 1 << 20];
    let new = (0..32).find_map(|i| {
        fs.write(&file, i * piece.len() as u64, &piece).unwrap();
        fs.sync().unwrap();
        let node = fs.store().get(attr.ino).unwrap().into_read().unwrap();
        let Body::Extents(list) = &node.inode().unwrap().body else {
            panic!("{:?}", node.inode().unwrap().body);
        };
        list.iter()
            .map(chunk_of)
            .find(|chunk| !before.contains(chunk))
    });
    let start = HEAD_BLOCKS * 4096 + geometry.chunk_block(new.unwrap()).byte();
    start..start + geometry.chunk_bytes()
}

/// Damages the pages of the node table that `/dir/sub` is in, and the space tables. The bytes of the last leaf page.
fn lose_pages_and_tables(world: &World, sub: Nid) -> Vec<u8> {
    let is_leaf = |header: &item::ItemHeader| {
        header.kind == ItemKind::TableLeaf as u8 && header.id.get() == sub.0 / LEAF_NIDS
    };
    let (_, at, len) = items(world, is_leaf).into_iter().max().unwrap();
    let mut bytes = vec![0; len];
    world.device.peek(at, &mut bytes);
    let lost = |header: &item::ItemHeader| {
        let above = [ItemKind::TableRegion as u8, ItemKind::SpaceRoot as u8];
        is_leaf(header) || above.contains(&header.kind)
    };
    for (_, at, _) in items(world, lost) {
        world.device.poke(at + 40, &[0x5A]);
    }
    bytes
}

/// Damages all copies of the checkpoint record.
fn lose_records(world: &World) {
    let tail = (64 << 20) - format::label::TAIL_BLOCKS * 4096 + 13 * 4096;
    for place in [4096, 2 * 4096, tail, tail + 4096] {
        world.device.poke(place + 100, &[0xEE; 8]);
    }
}

/// Only the journal says that data is there: what metadata had left there made a chunk of metadata of it all the same, and that where there was no record still after the others.
#[test]
fn a_page_where_data_is_since_the_last_checkpoint_costs_no_file_its_data() {
    for (unreadable, record) in [(false, true), (true, true), (false, false), (true, false)] {
        let world = World::new();
        let sub = world.ino("/dir/sub");
        let chunk = new_data_chunk(&world);
        let bytes = lose_pages_and_tables(&world, sub);
        if !record {
            lose_records(&world);
        }
        let last = chunk.end - 4096;
        match unreadable {
            false => world.device.poke(last, &bytes),
            true => world
                .device
                .fail_reads(Times::Always, Some(last..last + 512)),
        }
        let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
        world.device.heal();
        lost_nothing(&world, &report);
    }
}

/// After a repair the file of the new data chunk has its data, and the folder its file.
fn lost_nothing(world: &World, report: &RepairReport) {
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    assert_eq!(world.fsck().findings, []);
    let holes = actions(report, ActionKind::Hole, "/new");
    assert_eq!(holes, Vec::<String>::new());
    assert!(bytes_of(world, "/new").iter().all(|byte| *byte == 3));
    assert!(exists(world, "/dir/sub/inner"));
}

/// An older page of the table says that an image is where data is by now, and there it is still.
#[test]
fn an_image_where_data_is_by_now_costs_no_file_its_data_though_a_page_names_it() {
    let world = World::new();
    let sub = world.ino("/dir/sub");
    let chunk = new_data_chunk(&world);
    let is = |header: &item::ItemHeader, kind: ItemKind, id: u64| {
        header.kind == kind as u8 && header.id.get() == id
    };
    let newest = |kind: ItemKind, id: u64| {
        let found = items(&world, |header| is(header, kind, id));
        found.into_iter().max().unwrap()
    };
    let (_, at, len) = newest(ItemKind::Node, sub.0);
    let mut image = vec![0; len];
    world.device.peek(at, &mut image);
    let left = chunk.end - 4096;
    world.device.poke(left, &image);

    let leaf = sub.0 / LEAF_NIDS;
    let (version, at, len) = newest(ItemKind::TableLeaf, leaf);
    let mut bytes = vec![0; len];
    world.device.peek(at, &mut bytes);
    let seed = world.device.checksum_seed();
    let (_, page) = item::decode(seed, &bytes).unwrap();
    let mut entries = format::table::decode_leaf(page).unwrap();
    let place = item::Place {
        byte: left - HEAD_BLOCKS * 4096,
        len: image.len() as u32,
    };
    entries[(sub.0 % LEAF_NIDS) as usize].place = place.pack();
    let mut older = Vec::new();
    item::encode(
        seed,
        &mut older,
        ItemKind::TableLeaf,
        0,
        leaf,
        version,
        |out| format::table::encode_leaf(&entries, out),
    );
    lose_pages_and_tables(&world, sub);
    lose_records(&world);
    world.device.poke(at, &older);
    let report = repair(&world.array(false), &RepairOptions::default(), &|_| {}).unwrap();
    lost_nothing(&world, &report);
}

/// Both were written: a power cut could have torn the good one, and where a device did not take that the repair failed.
#[test]
fn of_a_record_with_a_bad_copy_that_copy_alone_is_written() {
    let world = World::new();
    let tail = (64 << 20) - format::label::TAIL_BLOCKS * 4096 + 13 * 4096;
    for slot in 0..2 {
        let places = [(1 + slot) * 4096, tail + slot * 4096];
        for (bad, good) in [(0, 1), (1, 0)] {
            let array = world.array(false);
            let block = array.read_slot(slot as usize, good).unwrap();
            world.device.poke(places[bad] + 100, &[0xEE; 8]);
            let range = places[good]..places[good] + 4096;
            world.device.fail_writes(Times::Always, Some(range));
            write_slots(&array).unwrap();
            world.device.heal();
            assert_eq!(array.read_slot(slot as usize, bad).unwrap()[..], block[..]);
        }
    }
}

/// All names were where the tree said, but one of that hash which came later was where nobody looks for it.
#[test]
fn a_leaf_that_begins_among_the_names_of_one_hash_is_found_and_put_right() {
    let world = World::new();
    let (many, file) = (world.ino("/many"), world.ino("/file"));
    world.change(|fs| {
        for i in 0..100 {
            let name = format!("user.{i}");
            fs.setxattr(&Caller::root(), file, name.as_bytes(), &[i; 300], 0)
                .unwrap();
        }
    });
    let mut names = tree(&world, many);
    let mut attributes = world.inode(file).seldom.xattr_root.clone().unwrap();
    let last = |node: &FsNode| match (node.bucket(), node.xattrs()) {
        (Ok(list), _) => list.to_vec().last().unwrap().key,
        (_, Ok(list)) => list.last().unwrap().key,
        other => panic!("{other:?}"),
    };
    for root in [&mut names, &mut attributes] {
        assert!(root.depth == 0 && root.children.len() > 1, "{root:?}");
        let first = root.children[0].nid;
        let key = world.change(|fs| last(&fs.store().get(first).unwrap().into_read().unwrap()));
        root.children[1].key = key + 1;
    }
    let set = |tree, root| Delta::SetRoot { tree, root };
    world.edit(vec![
        (many, set(TreeId::Body, names)),
        (file, set(TreeId::Xattrs, attributes)),
    ]);
    let found = world.fsck().findings;
    for path in ["/many", "/file"] {
        let told = |f: &super::super::Finding| {
            f.path.as_deref() == Some(path) && f.what.contains("names of one hash")
        };
        assert!(found.iter().any(told), "{path}: {found:?}");
    }
    let (copy, report) = world.repaired();
    assert!(!report.lost(), "{:#?}", report.actions);
    for i in 0..400 {
        assert!(exists(&copy, &format!("/many/name {i}")));
    }
    copy.change(|fs| {
        for i in 0..100u8 {
            let value = fs.getxattr(file, format!("user.{i}").as_bytes()).unwrap();
            assert_eq!(value[..], [i; 300]);
        }
    });
    assert_eq!(copy.fsck().findings, []);
}

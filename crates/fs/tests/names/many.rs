//! Many names of one directory in one call.

use crate::world::{World, list};
use base::rng::Rng;
use fs::{Attr, Caller, Error, FileSystem, Ino, ROOT};
use std::collections::BTreeMap;

const FILE: u32 = libc::S_IFREG | 0o644;

/// Some names are long, so that leaves fill.
fn name(i: u64) -> Vec<u8> {
    let tail = "x".repeat((i * 53 % 200) as usize * usize::from(i.is_multiple_of(3)));
    format!("name-{i}{tail}").into_bytes()
}

fn pick(rng: &mut Rng, names: u64, most: u64) -> Vec<Vec<u8>> {
    (0..rng.below(most))
        .map(|_| name(rng.below(names)))
        .collect()
}

fn unexpected(error: &Error, what: &str) {
    panic!("{what}: {error}");
}

/// A directory, and what must be in it.
struct Model<'f> {
    fs: &'f FileSystem,
    dir: Ino,
    names: BTreeMap<Vec<u8>, Ino>,
}

impl Model<'_> {
    fn create(&mut self, batch: &[Vec<u8>]) {
        let results = self.fs.create_many(&Caller::root(), self.dir, batch, 0o640);
        assert_eq!(results.len(), batch.len());
        for (name, result) in batch.iter().zip(results) {
            match result {
                Ok(attr) => {
                    assert_eq!(attr.mode, libc::S_IFREG | 0o640);
                    assert_eq!((attr.nlink, attr.size), (1, 0));
                    assert_eq!(self.names.insert(name.clone(), attr.ino), None);
                }
                Err(Error::Exists) => assert!(self.names.contains_key(name)),
                Err(error) => unexpected(&error, "create"),
            }
        }
    }

    fn unlink(&mut self, batch: &[Vec<u8>], dirs: &[Vec<u8>]) {
        let results = self.fs.unlink_many(&Caller::root(), self.dir, batch);
        assert_eq!(results.len(), batch.len());
        for (name, result) in batch.iter().zip(results) {
            match result {
                Ok(()) => assert!(self.names.remove(name).is_some()),
                Err(Error::NotFound) => assert!(!self.names.contains_key(name)),
                Err(Error::IsADirectory) => assert!(dirs.contains(name)),
                Err(error) => unexpected(&error, "unlink"),
            }
        }
    }

    fn stat(&self, batch: &[Vec<u8>]) {
        let results = self.fs.stat_many(self.dir, batch);
        assert_eq!(results.len(), batch.len());
        for (name, result) in batch.iter().zip(results) {
            let single: Result<Attr, Error> = self.fs.lookup(self.dir, name);
            match (result, single) {
                (Ok(many), Ok(one)) => {
                    assert_eq!(many, one);
                    assert_eq!(self.names[name], one.ino);
                }
                (Err(Error::NotFound), Err(Error::NotFound)) => {
                    assert!(!self.names.contains_key(name));
                }
                (many, one) => panic!("{many:?}, alone {one:?}"),
            }
        }
    }

    fn check(&self) {
        let listed: BTreeMap<_, _> = list(self.fs, self.dir, 50).into_iter().collect();
        assert_eq!(listed, self.names);
    }
}

/// Random batches, with names that are there and that are not, given twice, of directories, of files with
/// two names, and of open files.
#[test]
fn batches_do_what_single_calls_do() {
    for (seed, mask) in [(1, None), (2, Some(0xF << 60)), (3, Some(0xFF << 56))] {
        let mut world = World::new(1, 64 << 20, seed);
        world.options.hash_mask = mask;
        let fs = world.open();
        let (who, mut rng) = (Caller::root(), Rng::new(seed));
        let dir = fs.mkdir(&who, ROOT, b"d", 0o755).unwrap().ino;
        let mut model = Model {
            fs: &fs,
            dir,
            names: BTreeMap::new(),
        };
        let dirs: Vec<Vec<u8>> = (2000..2003).map(name).collect();
        for name in &dirs {
            let made = fs.mkdir(&who, dir, name, 0o755).unwrap();
            model.names.insert(name.clone(), made.ino);
        }
        for round in 0..40 {
            // The directory is inline, small and large in turn.
            let range = [8, 60, 900][round % 3];
            model.create(&pick(&mut rng, range, 300));
            for (_, ino) in model.names.iter().take(3) {
                let to = format!("link-{round}-{ino}");
                match fs.link(&who, *ino, ROOT, to.as_bytes()) {
                    Ok(_) | Err(Error::NotPermitted) => {}
                    Err(error) => unexpected(&error, "link"),
                }
            }
            let open = model.names.keys().nth(5).cloned();
            let open = open.map(|name| fs.open_at(dir, &name, libc::O_RDWR));
            model.stat(&pick(&mut rng, range, 300));
            let mut batch = pick(&mut rng, range, 400);
            batch.extend(dirs.clone());
            model.unlink(&batch, &dirs);
            if round % 10 == 9 {
                let all: Vec<_> = model.names.keys().cloned().collect();
                model.unlink(&all, &dirs);
                assert_eq!(model.names.len(), dirs.len());
            }
            drop(open);
            model.check();
        }
        let names = std::mem::take(&mut model.names);
        let fs = world.remount(fs);
        let listed: BTreeMap<_, _> = list(&fs, dir, 50).into_iter().collect();
        assert_eq!(listed, names);
        fs.close().unwrap();
    }
}

#[test]
fn each_name_has_its_own_error() {
    let world = World::new(1, 64 << 20, 4);
    let fs = world.open();
    let who = Caller::root();
    let long = vec![b'n'; 256];
    let names: [&[u8]; 8] = [b"a", b"", b".", b"..", b"a/b", &long, b"a", b"b"];
    let numbers = |results: Vec<Result<(), Error>>| -> Vec<i32> {
        let number = |r: Result<(), Error>| r.map_or_else(|e| e.errno(), |()| 0);
        results.into_iter().map(number).collect()
    };
    let plain = |results: Vec<Result<Attr, Error>>| {
        numbers(results.into_iter().map(|r| r.map(drop)).collect())
    };
    use libc::{EEXIST, EINVAL, EISDIR, ENAMETOOLONG, ENOENT, ENOTDIR};
    let made = plain(fs.create_many(&who, ROOT, &names, 0o644));
    let due = [0, ENOENT, EEXIST, EEXIST, EINVAL, ENAMETOOLONG, EEXIST, 0];
    assert_eq!(made, due);
    let found = plain(fs.stat_many(ROOT, &names));
    assert_eq!(found, [0, ENOENT, 0, 0, EINVAL, ENAMETOOLONG, 0, 0]);
    let gone = numbers(fs.unlink_many(&who, ROOT, &names));
    let due = [0, ENOENT, EISDIR, EISDIR, EINVAL, ENAMETOOLONG, ENOENT, 0];
    assert_eq!(gone, due);
    // What concerns the directory is the error of all.
    let file = fs.mknod(&who, ROOT, b"file", FILE, 0).unwrap().ino;
    let made = plain(fs.create_many(&who, file, &[b"a", b"b"], 0o644));
    assert_eq!(made, [ENOTDIR; 2]);
    fs.mkdir(&who, ROOT, b"gone", 0o755).unwrap();
    let dir = fs.open_dir_at(ROOT, b"gone").unwrap();
    fs.rmdir(&who, ROOT, b"gone").unwrap();
    let two = [b"a", b"b"];
    assert_eq!(plain(fs.create_many(&who, &dir, &two, 0o644)), [ENOENT; 2]);
    assert_eq!(plain(fs.stat_many(&dir, &two)), [ENOENT; 2]);
    assert_eq!(numbers(fs.unlink_many(&who, &dir, &two)), [ENOENT; 2]);
    assert!(fs.create_many::<&[u8]>(&who, ROOT, &[], 0o644).is_empty());
    drop(dir);
    fs.close().unwrap();
}

/// Owner, group, mode and lists come from caller and directory as for one file.
#[test]
fn files_of_a_batch_inherit_what_single_ones_do() {
    let world = World::new(1, 64 << 20, 5);
    let fs = world.open();
    let root = Caller::root();
    let who = Caller {
        umask: 0o027,
        ..Caller::user(7, 8)
    };
    for (dir, list) in [(&b"plain"[..], false), (b"listed", true)] {
        let at = fs.mkdir(&root, ROOT, dir, 0o777).unwrap().ino;
        let set = fs::SetAttr {
            mode: Some(0o2777),
            gid: Some(99),
            ..fs::SetAttr::default()
        };
        fs.setattr(&root, at, &set).unwrap();
        if list {
            // Version 2; owner rwx, user 5 r-x, group r-x, mask rwx, others nothing.
            let mut acl = 2u32.to_le_bytes().to_vec();
            let none = u32::MAX;
            for (tag, perm, id) in [
                (1u16, 7u16, none),
                (2, 5, 5),
                (4, 5, none),
                (16, 7, none),
                (32, 0, none),
            ] {
                acl.extend(tag.to_le_bytes());
                acl.extend(perm.to_le_bytes());
                acl.extend(id.to_le_bytes());
            }
            fs.setxattr(&root, at, b"system.posix_acl_default", &acl, 0)
                .unwrap();
        }
        let one = fs
            .mknod(&who, at, b"one", libc::S_IFREG | 0o6775, 0)
            .unwrap();
        let names: Vec<Vec<u8>> = (0..50).map(name).collect();
        for many in fs.create_many(&who, at, &names, 0o6775) {
            let many = many.unwrap();
            assert_eq!(
                (many.mode, many.uid, many.gid),
                (one.mode, one.uid, one.gid)
            );
            let value = |ino| fs.getxattr(ino, b"system.posix_acl_access").ok();
            assert_eq!(value(many.ino), value(one.ino));
            assert_eq!(value(many.ino).is_some(), list);
        }
    }
    fs.close().unwrap();
}

/// Whatever the moment at which the power goes: what was synced is there or gone, of later batches any name
/// may be either, and nothing else is there. `World::restart` checks that names, counts and inodes agree.
#[test]
fn a_power_cut_leaves_whole_names_of_a_batch() {
    for seed in 0..30 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(2, 64 << 20, seed);
        world.options.store.staging_bytes = 4 << 10;
        let fs = world.open();
        let who = Caller::root();
        let dir = fs.mkdir(&who, ROOT, b"d", 0o755).unwrap().ino;
        let start: Vec<_> = (0..200).map(name).collect();
        for made in fs.create_many(&who, dir, &start, 0o644) {
            made.unwrap();
        }
        fs.sync().unwrap();
        // What a name may be, by what was synced and what came later: there, or not there.
        let mut may: BTreeMap<Vec<u8>, (bool, bool)> = BTreeMap::new();
        may.extend(start.into_iter().map(|name| (name, (true, false))));
        let mut now = may.clone();
        world.switch.cut_after(rng.below(60));
        while !world.switch.is_cut() {
            let batch = pick(&mut rng, 400, 200);
            let there = rng.one_in(2);
            for name in &batch {
                let entry = may.entry(name.clone()).or_insert((false, true));
                entry.0 |= there;
                entry.1 |= !there;
                now.insert(name.clone(), (there, !there));
            }
            let failed = match there {
                true => fs
                    .create_many(&who, dir, &batch, 0o644)
                    .into_iter()
                    .any(|r| !matches!(r, Ok(_) | Err(Error::Exists))),
                false => fs
                    .unlink_many(&who, dir, &batch)
                    .into_iter()
                    .any(|r| !matches!(r, Ok(()) | Err(Error::NotFound))),
            };
            assert!(!failed || world.switch.is_cut());
            if rng.one_in(8) && fs.store().checkpoint().is_err() {
                assert!(world.switch.is_cut());
            }
            if rng.one_in(3) && fs.sync().is_ok() {
                may = now.clone();
            }
        }
        drop(fs);
        world.restart(&mut rng);
        let fs = world.open();
        let listed: BTreeMap<_, _> = list(&fs, dir, 50).into_iter().collect();
        for (name, (there, gone)) in &may {
            let text = String::from_utf8_lossy(name);
            match listed.contains_key(name) {
                true => assert!(there, "seed {seed}: {text} is back"),
                false => assert!(gone, "seed {seed}: {text} is lost"),
            }
        }
        for (name, ino) in &listed {
            assert!(may.contains_key(name));
            let attr = fs.getattr(*ino).unwrap();
            assert_eq!((attr.mode, attr.nlink), (FILE, 1));
        }
        fs.close().unwrap();
    }
}

/// When space runs out the results say which names were made, and unlinking goes on.
#[test]
fn a_full_array_ends_a_batch() {
    let mut world = World::new(1, 64 << 20, 6);
    let fs = world.open();
    let who = Caller::root();
    // Most of it is a file's.
    let (_, file) = fs
        .create(&who, ROOT, b"large", 0o600, libc::O_RDWR)
        .unwrap();
    let mut end = 0;
    while fs.fallocate(&file, 0, end, 256 << 10).is_ok() {
        end += 256 << 10;
    }
    let dir = fs.mkdir(&who, ROOT, b"d", 0o755).unwrap().ino;
    let mut names = Vec::new();
    let mut full = false;
    for round in 0..1000 {
        let batch: Vec<_> = (0..500)
            .map(|i| format!("{round}-{i}-{}", "x".repeat(200)))
            .collect();
        let results = fs.create_many(&who, dir, &batch, 0o644);
        for (name, result) in batch.into_iter().zip(results) {
            match result {
                Ok(_) => names.push(name),
                Err(Error::NoSpace) => {
                    full = true;
                    let found = fs.lookup(dir, name.as_bytes());
                    assert!(matches!(found, Err(Error::NotFound)));
                }
                Err(error) => unexpected(&error, "create"),
            }
        }
        if full {
            break;
        }
    }
    assert!(full && !names.is_empty());
    assert_eq!(list(&fs, dir, 100).len(), names.len());
    for gone in fs.unlink_many(&who, dir, &names) {
        gone.unwrap();
    }
    assert!(list(&fs, dir, 100).is_empty());
    let fs = world.remount(fs);
    fs.close().unwrap();
}

/// Batches of several threads, and single calls, in one directory.
#[test]
fn batches_share_a_directory() {
    let mut world = World::new(1, 128 << 20, 7);
    let fs = world.open();
    let who = Caller::root();
    let dir = fs.mkdir(&who, ROOT, b"d", 0o755).unwrap().ino;
    let kept = base::thread::parallel(4, |me| {
        let handle = fs.open_dir(dir).unwrap();
        let mut rng = Rng::new(me as u64);
        let mut mine: BTreeMap<Vec<u8>, Ino> = BTreeMap::new();
        for round in 0..40 {
            let batch: Vec<Vec<u8>> = (0..rng.below(300))
                .map(|i| format!("{me}-{round}-{i}").into_bytes())
                .collect();
            let made = fs.create_many(&who, &handle, &batch, 0o644);
            for (name, made) in batch.iter().zip(made) {
                mine.insert(name.clone(), made.unwrap().ino);
            }
            // One name that all want.
            let _ = fs.create_many(&who, &handle, &[b"contended"], 0o644);
            let batch: Vec<Vec<u8>> = mine.keys().filter(|_| rng.one_in(2)).cloned().collect();
            let found = fs.stat_many(&handle, &batch);
            for (name, found) in batch.iter().zip(found) {
                assert_eq!(found.unwrap().ino, mine[name]);
            }
            let _ = fs.unlink_many(&who, &handle, &[b"contended"]);
            for (i, name) in batch.iter().enumerate().filter(|(i, _)| i % 5 == 0) {
                fs.unlink(&who, &handle, name).unwrap();
                assert!(i % 5 == 0 && mine.remove(name).is_some());
            }
            for (name, gone) in batch.iter().zip(fs.unlink_many(&who, &handle, &batch)) {
                assert_eq!(gone.is_ok(), mine.remove(name).is_some());
            }
        }
        mine
    });
    let _ = fs.unlink(&who, dir, b"contended");
    let all: BTreeMap<_, _> = kept.into_iter().flatten().collect();
    let listed: BTreeMap<_, _> = list(&fs, dir, 100).into_iter().collect();
    assert_eq!(listed, all);
    let fs = world.remount(fs);
    fs.close().unwrap();
}

/// A long name, of which few fit into a leaf.
fn long_name(i: u64) -> Vec<u8> {
    let mut name = format!("{i}-").into_bytes();
    name.resize(255, b'n');
    name
}

fn shuffle(names: &mut [Vec<u8>], rng: &mut Rng) {
    for i in (1..names.len()).rev() {
        names.swap(i, rng.below(i as u64 + 1) as usize);
    }
}

/// Nodes of a checkpoint, which is made.
fn nodes(fs: &FileSystem) -> u64 {
    fs.sync().unwrap();
    fs.store().checkpoint().unwrap();
    fs.store().space().nodes
}

/// One call makes so many names that one leaf becomes dozens, on several levels; one call takes nearly all away, and the tree
/// shrinks to what the rest needs. So it does again, and with a power cut in between.
#[test]
fn one_call_splits_a_leaf_many_times_and_one_takes_the_leaves_away() {
    for (seed, mask) in [(11, None), (12, Some(0xFF << 56))] {
        let mut world = World::new(1, 64 << 20, seed);
        world.options.hash_mask = mask;
        let mut fs = world.open();
        let (who, mut rng) = (Caller::root(), Rng::new(seed));
        let dir = fs.mkdir(&who, ROOT, b"d", 0o755).unwrap().ino;
        let others = nodes(&fs);
        let mut names = BTreeMap::new();
        for round in 0..3 {
            let mut model = Model {
                fs: &fs,
                dir,
                names: std::mem::take(&mut names),
            };
            let mut batch: Vec<_> = (0..3000).map(long_name).collect();
            shuffle(&mut batch, &mut rng);
            model.create(&batch);
            assert_eq!(model.names.len(), 3000);
            let leaves = nodes(&fs) - others - 3000;
            assert!(leaves > 50, "{leaves} nodes of the directory");
            model.check();
            model.stat(&batch[..500]);

            // All but a few of the first leaf's and the last's.
            let all: Vec<_> = list(&fs, dir, 50)
                .into_iter()
                .map(|(name, _)| name)
                .collect();
            let mut gone: Vec<_> = all[2..all.len() - 2].to_vec();
            shuffle(&mut gone, &mut rng);
            model.unlink(&gone, &[]);
            assert_eq!(model.names.len(), 4);
            let leaves = nodes(&fs) - others - 4;
            assert!(leaves <= 8, "{leaves} nodes of the directory");
            model.check();
            names = std::mem::take(&mut model.names);
            if round == 1 {
                fs.sync().unwrap();
                world.switch.cut_now();
                drop(fs);
                world.restart(&mut rng);
                fs = world.open();
            }
        }
        let fs = world.remount(fs);
        let listed: BTreeMap<_, _> = list(&fs, dir, 50).into_iter().collect();
        assert_eq!(listed, names);
        let rest: Vec<_> = names.into_keys().collect();
        let results = fs.unlink_many(&who, dir, &rest);
        assert!(results.iter().all(Result::is_ok));
        assert_eq!(nodes(&fs), others);
        fs.close().unwrap();
        drop(fs);
        world.check();
    }
}

//! Transactions on a simulated array, checked by fsck after every chapter.

#[path = "tx/atomic.rs"]
mod atomic;
#[path = "tx/lists.rs"]
mod lists;
#[path = "tx/space.rs"]
mod space;
#[path = "names/world.rs"]
mod world;

use base::rng::Rng;
use device::sim::Times;
use fs::{Attr, Caller, Error, FileSystem, Ino, ROOT, SetAttr, Transaction};
use std::collections::BTreeMap;
use std::sync::Arc;
use world::{World, list};

const WHO: fn() -> Caller = Caller::root;

fn begin(fs: &FileSystem) -> Transaction<'_> {
    fs.transaction(&WHO()).unwrap()
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    Rng::new(seed).fill(&mut data);
    data
}

fn contents(fs: &FileSystem, ino: Ino) -> Vec<u8> {
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut buf = vec![0; fs.getattr(ino).unwrap().size as usize];
    assert_eq!(fs.read(&file, 0, &mut buf).unwrap(), buf.len());
    buf
}

fn staged(tx: &mut Transaction<'_>, ino: Ino) -> Vec<u8> {
    let mut buf = vec![0; tx.getattr(ino).unwrap().size as usize];
    assert_eq!(tx.read(ino, 0, &mut buf).unwrap(), buf.len());
    buf
}

fn staged_bytes(tx: &mut Transaction<'_>, ino: Ino, len: usize) -> Vec<u8> {
    let mut buf = vec![0; len];
    assert_eq!(tx.read(ino, 0, &mut buf).unwrap(), len);
    buf
}

fn write(fs: &FileSystem, ino: Ino, at: u64, data: &[u8]) {
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    assert_eq!(fs.write(&file, at, data).unwrap(), data.len());
}

fn make(fs: &FileSystem, name: &[u8], data: &[u8]) -> Attr {
    let attr = fs
        .mknod(&WHO(), ROOT, name, libc::S_IFREG | 0o644, 0)
        .unwrap();
    write(fs, attr.ino, 0, data);
    attr
}

fn names(fs: &FileSystem, dir: Ino) -> Vec<Vec<u8>> {
    let mut names: Vec<_> = list(fs, dir, 100)
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    names.sort();
    names
}

/// What was synced is there after the power went, and sound.
fn after_a_cut(world: &mut World, fs: Arc<FileSystem>) -> Arc<FileSystem> {
    world.switch.cut_now();
    drop(fs);
    world.restart(&mut Rng::new(3));
    world.open()
}

#[test]
fn files_made_and_written_together_are_seen_together() {
    let mut world = World::new(2, 32 << 20, 1);
    let fs = world.open();
    let old = make(&fs, b"old", &pattern(1, 10_000));
    let mut tx = begin(&fs);
    let dir = tx.mkdir(ROOT, b"dir", 0o755).unwrap();
    let small = tx.create(dir, b"small", 0o600).unwrap();
    let large = tx.create(dir, b"large", 0o600).unwrap();
    tx.symlink(dir, b"link", b"large").unwrap();
    tx.write(small, 0, b"few").unwrap();
    tx.write(large, 100, &pattern(2, 50_000)).unwrap();
    tx.write(old.ino, 4000, &pattern(3, 1000)).unwrap();
    tx.setxattr(old.ino, b"user.tx", b"yes", 0).unwrap();
    tx.rename(ROOT, b"old", dir, b"renamed", 0).unwrap();
    tx.link(old.ino, ROOT, b"again").unwrap();
    let mut wanted = pattern(1, 10_000);
    wanted[4000..5000].copy_from_slice(&pattern(3, 1000));
    assert_eq!(staged(&mut tx, old.ino), wanted);
    assert_eq!(staged(&mut tx, small), b"few");
    assert_eq!(tx.lookup(dir, b"renamed").unwrap(), old.ino);
    assert!(matches!(tx.lookup(ROOT, b"old"), Err(Error::NotFound)));
    assert_eq!(tx.list(dir).unwrap().len(), 4);
    assert_eq!(tx.getattr(old.ino).unwrap().nlink, 2);
    // Nobody else sees any of it.
    assert_eq!(names(&fs, ROOT), [b"old"]);
    assert_eq!(contents(&fs, old.ino), pattern(1, 10_000));
    tx.commit().unwrap();
    let fs = after_a_cut(&mut world, fs);
    assert_eq!(names(&fs, ROOT), [&b"again"[..], b"dir"]);
    let dir = fs.lookup(ROOT, b"dir").unwrap();
    assert_eq!((dir.nlink, dir.mode & 0o777), (2, 0o755));
    assert_eq!(
        names(&fs, dir.ino),
        [&b"large"[..], b"link", b"renamed", b"small"]
    );
    assert_eq!(contents(&fs, old.ino), wanted);
    assert_eq!(contents(&fs, small), b"few");
    let mut wanted = vec![0; 100];
    wanted.extend(pattern(2, 50_000));
    assert_eq!(contents(&fs, large), wanted);
    assert_eq!(fs.getxattr(old.ino, b"user.tx").unwrap(), b"yes");
    assert_eq!(fs.getattr(old.ino).unwrap().nlink, 2);
    fs.close().unwrap();
    world.check();
}

#[test]
fn what_is_dropped_leaves_nothing() {
    let world = World::new(2, 32 << 20, 2);
    let fs = world.open();
    let old = make(&fs, b"old", &pattern(1, 10_000));
    fs.sync().unwrap();
    let before = (fs.statfs().blocks_free, fs.store().journal_batches());
    {
        let mut tx = begin(&fs);
        let dir = tx.mkdir(ROOT, b"dir", 0o755).unwrap();
        let file = tx.create(dir, b"f", 0o600).unwrap();
        tx.write(file, 0, &pattern(2, 12 << 20)).unwrap();
        tx.truncate(old.ino, 3).unwrap();
        tx.unlink(ROOT, b"old").unwrap();
        assert!(fs.statfs().blocks_free < before.0);
    }
    let after = (fs.statfs().blocks_free, fs.store().journal_batches());
    assert_eq!(before, after);
    assert_eq!(contents(&fs, old.ino), pattern(1, 10_000));
    fs.close().unwrap();
    world.check();
}

#[test]
fn who_relied_on_what_has_changed_meets_a_conflict_and_has_done_nothing() {
    let world = World::new(2, 32 << 20, 3);
    let fs = world.open();
    let file = make(&fs, b"f", b"old");
    let conflict = |stage: &dyn Fn(&mut Transaction<'_>), between: &dyn Fn()| {
        let mut tx = begin(&fs);
        let marker = tx.create(ROOT, b"marker", 0o600).unwrap();
        tx.write(marker, 0, b"marker").unwrap();
        stage(&mut tx);
        between();
        let outcome = tx.commit();
        assert!(matches!(outcome, Err(Error::Conflict(_))), "{outcome:?}");
        assert!(matches!(fs.lookup(ROOT, b"marker"), Err(Error::NotFound)));
    };
    // A name that was missing.
    conflict(
        &|tx| assert!(tx.create(ROOT, b"new", 0o600).is_ok()),
        &|| assert!(make(&fs, b"new", b"").ino != ROOT),
    );
    conflict(&|tx| assert!(tx.lookup(ROOT, b"none").is_err()), &|| {
        assert!(make(&fs, b"none", b"").ino != ROOT)
    });
    // A name that meant something else.
    conflict(&|tx| tx.unlink(ROOT, b"new").unwrap(), &|| {
        fs.rename(&WHO(), ROOT, b"none", ROOT, b"new", 0).unwrap();
    });
    // Content that was read.
    let read = |tx: &mut Transaction<'_>| {
        let mut buf = [0; 3];
        assert_eq!(tx.read(file.ino, 0, &mut buf).unwrap(), 3);
        tx.write(file.ino, 10, b"x").unwrap();
    };
    conflict(&read, &|| write(&fs, file.ino, 0, b"new"));
    conflict(&read, &|| {
        fs.transact(&WHO(), |tx| tx.write(file.ino, 1, b"y"))
            .unwrap()
    });
    // A directory that was listed.
    conflict(&|tx| drop(tx.list(ROOT).unwrap()), &|| {
        fs.unlink(&WHO(), ROOT, b"new").unwrap();
    });
    // A file that is gone.
    let other = make(&fs, b"other", b"");
    conflict(&|tx| tx.write(other.ino, 0, b"x").unwrap(), &|| {
        fs.unlink(&WHO(), ROOT, b"other").unwrap();
    });
    // A directory that is not empty any more.
    let dir = fs.mkdir(&WHO(), ROOT, b"dir", 0o755).unwrap();
    conflict(&|tx| tx.rmdir(ROOT, b"dir").unwrap(), &|| {
        fs.mknod(&WHO(), dir.ino, b"in", libc::S_IFREG, 0).unwrap();
    });
    // A directory that was not empty, and one that was below another.
    conflict(
        &|tx| assert!(matches!(tx.rmdir(ROOT, b"dir"), Err(Error::NotEmpty))),
        &|| fs.unlink(&WHO(), dir.ino, b"in").unwrap(),
    );
    let (mid, low) = (fs.mkdir(&WHO(), dir.ino, b"mid", 0o755).unwrap(), |up| {
        fs.mkdir(&WHO(), up, b"low", 0o755).unwrap()
    });
    let low = low(mid.ino);
    conflict(
        &|tx| {
            let refused = tx.rename(ROOT, b"dir", low.ino, b"dir", 0);
            assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        },
        &|| {
            fs.rename(&WHO(), dir.ino, b"mid", ROOT, b"mid", 0).unwrap();
        },
    );
    // What is only written does not depend on it.
    let mut tx = begin(&fs);
    tx.write(file.ino, 0, b"tx!").unwrap();
    write(&fs, file.ino, 0, b"other");
    tx.commit().unwrap();
    assert_eq!(contents(&fs, file.ino), b"tx!er");
    fs.close().unwrap();
    world.check();
}

#[test]
fn an_error_that_comes_of_two_moments_is_tried_again() {
    let world = World::new(1, 64 << 20, 5);
    let fs = world.open();
    let dirs = [b"a", b"b"].map(|name| fs.mkdir(&WHO(), ROOT, name, 0o755).unwrap().ino);
    fs.mknod(&WHO(), dirs[1], b"name", libc::S_IFREG, 0)
        .unwrap();
    let mut tries = 0;
    let found = fs.transact(&WHO(), |tx| {
        tries += 1;
        if let Ok(ino) = tx.lookup(dirs[0], b"name") {
            return Ok(ino);
        }
        if tries == 1 {
            fs.rename(&WHO(), dirs[1], b"name", dirs[0], b"name", 0)?;
        }
        // It is in neither, so this fails.
        tx.lookup(dirs[1], b"name")
    });
    assert_eq!(found.unwrap(), fs.lookup(dirs[0], b"name").unwrap().ino);
    assert_eq!(tries, 2);
    // What is so stays so.
    let mut tries = 0;
    let missing = fs.transact(&WHO(), |tx| {
        tries += 1;
        tx.create(ROOT, b"marker", 0o600)?;
        tx.lookup(dirs[1], b"name")
    });
    assert!(matches!(missing, Err(Error::NotFound)), "{missing:?}");
    assert_eq!(tries, 1);
    assert!(fs.lookup(ROOT, b"marker").is_err());
    fs.close().unwrap();
    world.check();
}

#[test]
fn directories_that_cross_are_a_conflict() {
    let world = World::new(1, 64 << 20, 4);
    let fs = world.open();
    let dir = |name: &[u8]| fs.mkdir(&WHO(), ROOT, name, 0o755).unwrap().ino;
    let (a, b) = (dir(b"a"), dir(b"b"));
    let mut tx = begin(&fs);
    tx.rename(ROOT, b"a", b, b"a", 0).unwrap();
    fs.rename(&WHO(), ROOT, b"b", a, b"b", 0).unwrap();
    assert!(matches!(tx.commit(), Err(Error::Conflict(_))));
    let mut tx = begin(&fs);
    assert!(tx.rename(ROOT, b"a", b, b"a", 0).is_err());
    tx.rename(a, b"b", ROOT, b"b", 0).unwrap();
    tx.rename(ROOT, b"a", b, b"a", 0).unwrap();
    tx.commit().unwrap();
    assert_eq!(fs.lookup(b, b"..").unwrap().ino, ROOT);
    assert_eq!(fs.lookup(a, b"..").unwrap().ino, b);
    fs.close().unwrap();
    world.check();
}

#[test]
fn an_open_file_that_is_unlinked_by_a_transaction_stays_until_it_is_closed() {
    let world = World::new(1, 64 << 20, 5);
    let fs = world.open();
    let attr = make(&fs, b"f", &pattern(1, 9000));
    let held = fs.open_file(attr.ino, libc::O_RDWR).unwrap();
    let mut tx = begin(&fs);
    tx.unlink(ROOT, b"f").unwrap();
    let new = tx.create(ROOT, b"f", 0o600).unwrap();
    tx.write(new, 0, b"new").unwrap();
    tx.commit().unwrap();
    assert_eq!(contents(&fs, attr.ino), pattern(1, 9000));
    assert_eq!(contents(&fs, fs.lookup(ROOT, b"f").unwrap().ino), b"new");
    drop(held);
    assert!(matches!(fs.getattr(attr.ino), Err(Error::Stale(_))));
    fs.close().unwrap();
    world.check();
}

#[test]
fn attributes_in_nodes_of_their_own_are_set_many_at_once() {
    let world = World::new(2, 32 << 20, 1);
    let fs = world.open();
    let file = make(&fs, b"file", b"x").ino;
    fs.setxattr(&WHO(), file, b"user.long", &pattern(1, 600), 0)
        .unwrap();
    fs.sync().unwrap();
    let mut tx = begin(&fs);
    tx.setxattr(file, b"user.a", b"1", 0).unwrap();
    tx.setxattr(file, b"user.b", b"2", 0).unwrap();
    tx.removexattr(file, b"user.long").unwrap();
    let mode = Some(0o600);
    let set = SetAttr {
        mode,
        ..SetAttr::default()
    };
    tx.setattr(file, &set).unwrap();
    tx.setxattr(file, b"user.c", b"3", 0).unwrap();
    tx.commit().unwrap();
    for (name, value) in [(b"user.a", b"1"), (b"user.b", b"2"), (b"user.c", b"3")] {
        assert_eq!(fs.getxattr(file, name).unwrap(), value);
    }
    let gone = fs.getxattr(file, b"user.long");
    assert!(matches!(gone, Err(Error::NoAttribute)));
    // As many names as can be listed, whoever set them, and none more.
    let long = |n: usize| format!("user.{n:0250}").into_bytes();
    for round in 0..26 {
        let mut tx = begin(&fs);
        for n in 0..10 {
            match tx.setxattr(file, &long(round * 10 + n), b"", 0) {
                Ok(()) => assert!(round * 10 + n < 255, "more than can be listed"),
                Err(error) => {
                    assert!(matches!(error, Error::NoSpace), "{error}");
                    assert!(round * 10 + n >= 255, "{round}, {n}");
                }
            }
        }
        tx.commit().unwrap();
    }
    // Somebody else sets the last one that there is room for: it is known at the commit alone.
    fs.removexattr(&WHO(), file, &long(0)).unwrap();
    let mut tx = begin(&fs);
    tx.setxattr(file, &long(300), b"", 0).unwrap();
    fs.setxattr(&WHO(), file, &long(0), b"", 0).unwrap();
    let outcome = tx.commit();
    assert!(matches!(outcome, Err(Error::Conflict(_))), "{outcome:?}");
    assert_eq!(fs.listxattr(file).unwrap().len(), 255 * 256 + 3 * 7);
    fs.close().unwrap();
    world.check();
}

/// What a file has of attributes is looked at as it is, and not by a tree that was there when the transaction met the file: that was said to be damaged.
#[test]
fn attributes_that_are_removed_meanwhile_are_no_damage() {
    let world = World::new(2, 32 << 20, 1);
    let fs = world.open();
    let file = make(&fs, b"f", b"x").ino;
    let name = |n: usize| format!("user.{n}").into_bytes();
    for n in 0..10 {
        fs.setxattr(&WHO(), file, &name(n), &pattern(1, 200), 0)
            .unwrap();
    }
    let mut tx = begin(&fs);
    tx.setxattr(file, b"user.a", b"1", 0).unwrap();
    for n in 0..10 {
        fs.removexattr(&WHO(), file, &name(n)).unwrap();
    }
    for n in 0..10 {
        make(&fs, &name(n), b"");
    }
    tx.setxattr(file, b"user.b", b"2", 0).unwrap();
    tx.commit().unwrap();
    assert_eq!(fs.getxattr(file, b"user.a").unwrap(), b"1");
    assert_eq!(fs.getxattr(file, b"user.b").unwrap(), b"2");
    fs.close().unwrap();
}

#[test]
fn a_file_that_lost_its_last_name_meanwhile_gets_nothing_more() {
    let world = World::new(2, 32 << 20, 1);
    let fs = world.open();
    for keep_open in [false, true] {
        let file = make(&fs, b"a", b"x").ino;
        fs.link(&WHO(), file, ROOT, b"b").unwrap();
        let handle = keep_open.then(|| fs.open_file(file, libc::O_RDONLY).unwrap());
        let mut tx = begin(&fs);
        tx.unlink(ROOT, b"a").unwrap();
        tx.link(file, ROOT, b"c").unwrap();
        fs.unlink(&WHO(), ROOT, b"b").unwrap();
        assert!(matches!(tx.commit(), Err(Error::Conflict(_))));
        assert_eq!(names(&fs, ROOT), [b"a"], "nothing has happened");
        drop(handle);
        // The file system goes on.
        fs.unlink(&WHO(), ROOT, b"a").unwrap();
    }
    fs.close().unwrap();
    world.check();
}

#[test]
fn nothing_is_written_after_the_end() {
    let world = World::new(2, 32 << 20, 1);
    let fs = world.open();
    let file = make(&fs, b"file", b"x").ino;
    let (mut tx, mut other) = (begin(&fs), begin(&fs));
    tx.write(file, 0, b"y").unwrap();
    // More than is kept in memory.
    other.write(file, 0, &pattern(1, 9 << 20)).unwrap();
    fs.close().unwrap();
    other.write(file, 0, b"z").unwrap_err();
    // Within a page that is in its block.
    other.truncate(file, 5).unwrap_err();
    tx.commit().unwrap_err();
    fn is_send<T: Send>(_: &T) {}
    is_send(&other);
    drop(other);
    drop(fs);
    let fs = world.open();
    assert_eq!(contents(&fs, file), b"x");
    fs.close().unwrap();
    world.check();
}

#[test]
fn attributes_of_two_moments_are_a_conflict() {
    let world = World::new(2, 32 << 20, 1);
    let fs = world.open();
    let file = make(&fs, b"file", b"x").ino;
    let mut tx = begin(&fs);
    tx.write(file, 0, b"y").unwrap();
    let set = |mode| SetAttr {
        mode: Some(mode),
        ..SetAttr::default()
    };
    fs.setattr(&WHO(), file, &set(0o600)).unwrap();
    let attr = tx.getattr(file);
    assert!(matches!(attr, Err(Error::Conflict(_))), "{attr:?}");
    // What it reads needs no more of the inode than it has not looked at yet.
    let mut tx = begin(&fs);
    tx.write(file, 0, b"y").unwrap();
    write(&fs, file, 0, b"zz");
    assert_eq!(staged_bytes(&mut tx, file, 2), b"yz");
    tx.commit().unwrap();
    assert_eq!(contents(&fs, file), b"yz");
    fs.close().unwrap();
}

#[test]
fn ten_thousand_names_are_one_step() {
    let mut world = World::new(2, 512 << 20, 6);
    let fs = world.open();
    let mut tx = begin(&fs);
    let mut dir = ROOT;
    for i in 0..10_000 {
        if i % 2_500 == 0 {
            dir = tx.mkdir(ROOT, format!("dir{i}").as_bytes(), 0o755).unwrap();
        }
        let name = format!("a name of some length {i}");
        tx.create(dir, name.as_bytes(), 0o644).unwrap();
    }
    let batches = fs.store().journal_batches();
    tx.commit().unwrap();
    assert_eq!(fs.store().journal_batches(), batches + 1);
    let fs = after_a_cut(&mut world, fs);
    let dir = fs.lookup(ROOT, b"dir2500").unwrap().ino;
    assert_eq!(names(&fs, dir).len(), 2_500);
    // Renamed and removed together, too.
    let mut tx = begin(&fs);
    for i in 2_500..5_000 {
        let name = format!("a name of some length {i}");
        match i % 2 {
            0 => tx.unlink(dir, name.as_bytes()).unwrap(),
            _ => tx
                .rename(dir, name.as_bytes(), ROOT, name.as_bytes(), 0)
                .unwrap(),
        }
    }
    tx.rmdir(ROOT, b"dir2500").unwrap();
    tx.commit().unwrap();
    let fs = after_a_cut(&mut world, fs);
    assert_eq!(names(&fs, ROOT).len(), 3 + 1_250);
    fs.close().unwrap();
    world.check();
}

#[test]
fn what_does_not_fit_the_journal_is_refused_and_leaves_nothing() {
    let world = World::new(1, 64 << 20, 7);
    let fs = world.open();
    let mut tx = begin(&fs);
    let mut refused = None;
    for i in 0..100_000 {
        if let Err(error) = tx.create(ROOT, format!("{i}").as_bytes(), 0o644) {
            refused = Some(error);
            break;
        }
    }
    assert!(matches!(refused, Some(Error::TransactionTooLarge)));
    assert!(matches!(tx.commit(), Err(Error::TransactionTooLarge)));
    assert!(names(&fs, ROOT).is_empty());
    // Names that take more than was expected, as each splits a leaf, are undone and begun again.
    let mut tx = begin(&fs);
    for i in 0..300 {
        let name = format!("{}{i}", "long ".repeat(45));
        tx.create(ROOT, name.as_bytes(), 0o644).unwrap();
    }
    tx.commit().unwrap();
    assert_eq!(names(&fs, ROOT).len(), 300);
    fs.close().unwrap();
    world.check();
}

/// What transactions and single calls in between do to some files, beside a model.
#[derive(Clone, Default)]
struct Model {
    files: BTreeMap<Vec<u8>, (Ino, Vec<u8>, u32)>,
}

impl Model {
    fn check(&self, fs: &FileSystem) {
        let found: Vec<Vec<u8>> = names(fs, ROOT);
        let wanted: Vec<Vec<u8>> = self.files.keys().cloned().collect();
        assert_eq!(found, wanted);
        for (name, (ino, bytes, mode)) in &self.files {
            let attr = fs.lookup(ROOT, name).unwrap();
            assert_eq!((attr.ino, attr.mode & 0o777), (*ino, *mode));
            assert!(
                contents(fs, *ino) == *bytes,
                "{}",
                String::from_utf8_lossy(name)
            );
        }
    }
}

fn step(rng: &mut Rng, tx: &mut Transaction<'_>, model: &mut Model) {
    let name = format!("f{}", rng.below(8)).into_bytes();
    let other = format!("f{}", rng.below(8)).into_bytes();
    let Some((ino, bytes, mode)) = model.files.get_mut(&name) else {
        let ino = tx.create(ROOT, &name, 0o644).unwrap();
        model.files.insert(name, (ino, Vec::new(), 0o644));
        return;
    };
    let ino = *ino;
    match rng.below(12) {
        0..6 => {
            let most = *rng.pick(&[50, 5_000, 60_000]);
            let (at, len) = (rng.below(most), rng.range(1, most) as usize);
            let data = pattern(rng.next_u64(), len);
            tx.write(ino, at, &data).unwrap();
            let end = at as usize + len;
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[at as usize..end].copy_from_slice(&data);
        }
        6 | 7 => {
            let most = *rng.pick(&[100, 3_000, 80_000]);
            let size = rng.below(most) as usize;
            tx.truncate(ino, size as u64).unwrap();
            bytes.resize(size, 0);
        }
        8 => {
            *mode = *rng.pick(&[0o600, 0o640, 0o755]);
            let set = SetAttr {
                mode: Some(*mode),
                ..SetAttr::default()
            };
            tx.setattr(ino, &set).unwrap();
        }
        9 => {
            tx.unlink(ROOT, &name).unwrap();
            model.files.remove(&name);
        }
        10 => {
            tx.rename(ROOT, &name, ROOT, &other, 0).unwrap();
            let moved = model.files.remove(&name).unwrap();
            model.files.insert(other, moved);
        }
        _ => assert!(staged(tx, ino) == *bytes),
    }
}

#[test]
fn random_transactions_do_what_a_model_does() {
    for seed in 0..12 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(2, 32 << 20, seed);
        let mut fs = world.open();
        let mut model = Model::default();
        for _ in 0..60 {
            // Between them files are written as usual, and left dirty.
            if let Some((ino, bytes, _)) = model.files.values_mut().next()
                && rng.one_in(2)
            {
                let (at, data) = (rng.below(20_000) as usize, pattern(rng.next_u64(), 700));
                write(&fs, *ino, at as u64, &data);
                if bytes.len() < at + 700 {
                    bytes.resize(at + 700, 0);
                }
                bytes[at..at + 700].copy_from_slice(&data);
            }
            let mut new = model.clone();
            let mut tx = begin(&fs);
            for _ in 0..rng.range(1, 20) {
                step(&mut rng, &mut tx, &mut new);
            }
            match rng.below(4) {
                0 => drop(tx),
                1 => {
                    tx.commit_relaxed().unwrap();
                    model = new;
                }
                _ => {
                    tx.commit().unwrap();
                    model = new;
                }
            }
            model.check(&fs);
            if rng.one_in(10) {
                fs.sync().unwrap();
                fs = after_a_cut(&mut world, fs);
                model.check(&fs);
            }
        }
        let fs = world.remount(fs);
        model.check(&fs);
        fs.close().unwrap();
        world.check();
    }
}

/// Sums that move between files: each transaction reads both, so no two that overlap commit.
#[test]
fn transactions_of_several_threads_come_one_after_the_other() {
    let world = World::new(2, 64 << 20, 9);
    let fs = world.open();
    const FILES: u64 = 4;
    let files: Vec<Ino> = (0..FILES)
        .map(|i| make(&fs, format!("{i}").as_bytes(), &100u64.to_le_bytes()).ino)
        .collect();
    let sum = |fs: &FileSystem| -> u64 {
        fs.transact(&WHO(), |tx| {
            let mut sum = 0;
            for ino in &files {
                let mut word = [0; 8];
                tx.read(*ino, 0, &mut word)?;
                sum += u64::from_le_bytes(word);
            }
            Ok(sum)
        })
        .unwrap()
    };
    let moved = base::thread::parallel(3, |thread| {
        let mut rng = Rng::new(thread as u64);
        let (mut commits, mut by) = (0, [0i64; FILES as usize]);
        for _ in 0..60 {
            let (from, to) = (rng.below(FILES) as usize, rng.below(FILES) as usize);
            let moved = fs.transact(&WHO(), |tx| {
                let mut word = |ino: Ino, by: i64| -> Result<(), Error> {
                    let mut word = [0; 8];
                    tx.read(ino, 0, &mut word)?;
                    let value = u64::from_le_bytes(word).wrapping_add_signed(by);
                    tx.write(ino, 0, &value.to_le_bytes())
                };
                word(files[from], -1)?;
                word(files[to], 1)
            });
            match moved {
                Ok(()) => {
                    commits += 1;
                    by[from] -= 1;
                    by[to] += 1;
                }
                Err(Error::Conflict(_)) => {}
                Err(error) => panic!("{error}"),
            }
            if rng.one_in(10) {
                assert_eq!(sum(&fs), FILES * 100);
            }
        }
        // Whoever meets a conflict does so because another one has committed.
        (commits, by)
    });
    let commits: u32 = moved.iter().map(|(commits, _)| commits).sum();
    assert!(commits > 0);
    for (i, ino) in files.iter().enumerate() {
        let by: i64 = moved.iter().map(|(_, by)| by[i]).sum();
        let word = contents(&fs, *ino).try_into().unwrap();
        assert_eq!(u64::from_le_bytes(word), 100u64.wrapping_add_signed(by));
    }
    assert_eq!(sum(&fs), FILES * 100);
    fs.close().unwrap();
    world.check();
}

/// Its blocks are written with the commit's batch; who reads the file before gets the same.
#[test]
fn what_a_relaxed_commit_has_left_to_the_batch_is_read_as_it_will_be() {
    let mut world = World::new(2, 32 << 20, 41);
    let fs = world.open();
    let old = make(&fs, b"old", &pattern(1, 20_000));
    fs.sync().unwrap();
    let durable = fs.store().durable_epoch();
    let mut tx = begin(&fs);
    let new = tx.create(ROOT, b"new", 0o644).unwrap();
    tx.write(new, 0, &pattern(2, 40_000)).unwrap();
    tx.write(old.ino, 4096, &pattern(3, 8192)).unwrap();
    tx.commit_relaxed().unwrap();
    assert_eq!(fs.store().durable_epoch(), durable);
    assert_eq!(contents(&fs, new), pattern(2, 40_000));
    let mut merged = pattern(1, 20_000);
    merged[4096..12288].copy_from_slice(&pattern(3, 8192));
    assert_eq!(contents(&fs, old.ino), merged);
    // Not those of a commit that was made meanwhile.
    assert_eq!(fs.store().durable_epoch(), durable);
    fs.sync().unwrap();
    assert_eq!(contents(&fs, old.ino), merged);
    let fs = after_a_cut(&mut world, fs);
    assert_eq!(contents(&fs, new), pattern(2, 40_000));
    assert_eq!(contents(&fs, old.ino), merged);
}

/// Data that is written with its commit's batch fails with that: nothing is acknowledged, and what was synced before is there.
#[test]
fn data_that_cannot_be_written_with_its_batch_fails_the_commit_and_costs_nothing_else() {
    let mut world = World::new(1, 64 << 20, 42);
    let fs = world.open();
    let before = pattern(1, 20_000);
    let ino = make(&fs, b"file", &before).ino;
    fs.sync().unwrap();
    let geometry = fs.store().array().geometry();
    let mut data = 0..u64::MAX;
    geometry.pieces(geometry.chunk_block(0).byte(), 4096, |piece| {
        data.start = piece.offset;
    });
    world.devices[0].fail_writes(Times::Always, Some(data));
    let mut tx = begin(&fs);
    tx.write(ino, 4096, &pattern(2, 8192)).unwrap();
    let failed = tx.commit().unwrap_err();
    assert_eq!(failed.errno(), libc::EROFS, "{failed}");
    // Later commits would be of no use behind this one.
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    assert_eq!(fs.fsync(&file, false).unwrap_err().errno(), libc::EROFS);
    let made = fs.mknod(&WHO(), ROOT, b"more", libc::S_IFREG | 0o644, 0);
    made.unwrap_err();
    // What was accepted is read until the end.
    let mut after = before.clone();
    after[4096..12288].copy_from_slice(&pattern(2, 8192));
    assert_eq!(contents(&fs, ino), after);
    world.devices[0].heal();
    drop(file);
    let fs = after_a_cut(&mut world, fs);
    assert_eq!(contents(&fs, ino), before);
    write(&fs, ino, 0, &pattern(4, 12_000));
    fs.sync().unwrap();
}

/// As a write or a cut by the same caller would.
#[test]
fn who_has_no_privileges_takes_those_of_a_file_with_its_content() {
    let mut world = World::new(1, 64 << 20, 21);
    let fs = world.open();
    let user = Caller::user(1000, 1000);
    let mode = SetAttr {
        mode: Some(0o6755),
        ..SetAttr::default()
    };
    let capability = b"security.capability";
    let privileged = |name: &[u8]| {
        let ino = make(&fs, name, b"content").ino;
        fs.setattr(&WHO(), ino, &mode).unwrap();
        fs.setxattr(&WHO(), ino, capability, &[1; 20], 0).unwrap();
        ino
    };
    let has = |ino: Ino| {
        let kept = fs.getxattr(ino, capability).is_ok();
        (fs.getattr(ino).unwrap().mode & 0o7777, kept)
    };
    let [written, cut, atomic, kept, late] =
        [&b"written"[..], b"cut", b"atomic", b"kept", b"late"].map(privileged);
    let mut tx = fs.transaction(&user).unwrap();
    tx.write(written, 0, b"other").unwrap();
    tx.truncate(cut, 3).unwrap();
    assert_eq!(tx.getattr(written).unwrap().mode & 0o7777, 0o755);
    // What is set afterwards stays.
    tx.write(late, 0, b"other").unwrap();
    tx.setattr(late, &mode).unwrap();
    let new = tx.create(ROOT, b"new", 0o4755).unwrap();
    tx.write(new, 0, b"other").unwrap();
    assert_eq!(has(written), (0o6755, true));
    tx.commit().unwrap();
    let mut tx = begin(&fs);
    tx.write(kept, 0, b"other").unwrap();
    tx.commit().unwrap();
    let file = fs.open_file(atomic, libc::O_RDWR).unwrap();
    let mut write = fs.atomic_write(&user, &file).unwrap();
    write.write(0, b"other").unwrap();
    write.commit().unwrap();
    drop(file);
    for ino in [written, cut, atomic] {
        assert_eq!(has(ino), (0o755, false));
    }
    assert_eq!(has(new), (0o755, false));
    assert_eq!(has(kept), (0o6755, true));
    // Its group is not the caller's.
    assert_eq!(has(late), (0o4755, false));
    let fs = after_a_cut(&mut world, fs);
    assert_eq!(fs.getattr(written).unwrap().mode & 0o7777, 0o755);
    fs.close().unwrap();
}

/// It said that the file system had turned read-only, which went on.
#[test]
fn a_flush_that_failed_beside_what_was_staged_is_an_error_of_that_transaction() {
    let world = World::new(1, 128 << 20, 1);
    let fs = world.open();
    let other = make(&fs, b"other", &[1; 1 << 20]).ino;
    let other = fs.open_file(other, libc::O_RDWR).unwrap();
    fs.fsync(&other, false).unwrap();
    fs.checkpoint().unwrap();
    let fill = |tx: &mut Transaction<'_>, name: &[u8]| {
        let made = tx.create(ROOT, name, 0o644)?;
        // More than is kept in memory.
        tx.write(made, 0, &vec![2; 9 << 20])
    };
    let mut tx = begin(&fs);
    fill(&mut tx, b"f").unwrap();
    // Over blocks of its own, in several places: a flush without a record.
    for at in [0, 100_000, 300_000, 900_000] {
        assert_eq!(fs.write(&other, at, &[3; 4096]).unwrap(), 4096);
    }
    fs.store().commit_through(fs.store().epoch()).unwrap();
    world.devices[0].fail_flushes(Times::Next(1));
    assert_eq!(fs.fsync(&other, true).unwrap_err().errno(), libc::EIO);
    world.devices[0].heal();
    assert!(fs.store().failed().is_none());
    let error = tx.commit().unwrap_err();
    assert!(matches!(error, Error::TransactionNotWritten), "{error}");
    assert_eq!(error.errno(), libc::EIO);
    assert!(!names(&fs, ROOT).contains(&b"f".to_vec()));
    // Again it goes.
    fs.transact(&WHO(), |tx| fill(tx, b"f")).unwrap();
    let made = fs.lookup(ROOT, b"f").unwrap();
    assert!(contents(&fs, made.ino) == vec![2; 9 << 20]);
    drop((other, fs));
    world.check();
}

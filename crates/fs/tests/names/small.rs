//! Small files on an array that is full of data: what is in their inodes can be written over for ever, as long as it fits there.

use crate::world::World;
use base::rng::Rng;
use fs::{Caller, Error, FileSystem, OpenFile, ROOT};
use std::sync::Arc;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
/// What an inode holds at most.
const INLINE: usize = 2048;

fn open(fs: &FileSystem, name: &str, flags: i32) -> Arc<OpenFile> {
    let (flags, name) = (flags | libc::O_RDWR, name.as_bytes());
    match fs.lookup(ROOT, name) {
        Ok(attr) => fs.open_file(attr.ino, flags).unwrap(),
        Err(_) => {
            let made = fs.create(&Caller::root(), ROOT, name, 0o644, flags);
            made.unwrap().1
        }
    }
}

/// A synced file.
fn store(fs: &FileSystem, name: &str, bytes: &[u8]) {
    let file = open(fs, name, 0);
    assert_eq!(fs.write(&file, 0, bytes).unwrap(), bytes.len());
    fs.fsync(&file, false).unwrap();
}

fn contents(fs: &FileSystem, name: &str) -> Vec<u8> {
    let ino = fs.lookup(ROOT, name.as_bytes()).unwrap().ino;
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut bytes = vec![0xEE; fs.getattr(ino).unwrap().size as usize];
    assert_eq!(fs.read(&file, 0, &mut bytes).unwrap(), bytes.len());
    bytes
}

fn is_full<T: std::fmt::Debug>(outcome: Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::NoSpace))
}

/// Appends to a file until there is no block left, and none comes back.
fn fill(fs: &FileSystem) {
    let file = open(fs, "ball", 0);
    for piece in [64 << 10, 4 << 10] {
        let bytes = vec![7; piece];
        loop {
            match fs.append(&file, &bytes) {
                Ok(_) if piece == 4 << 10 => fs.fsync(&file, false).unwrap(),
                Ok(_) => {}
                Err(Error::NoSpace) => break,
                Err(error) => panic!("{error}"),
            }
        }
        fs.sync().unwrap();
    }
    assert!(is_full(fs.append(&file, &[7; 4 << 10])));
}

/// All of it ended with ENOSPC, as each first dirty page wants a block, and what was replaced was left empty.
#[test]
fn small_files_change_on_a_full_array_as_long_as_they_fit_their_inodes() {
    let mut world = World::new(2, 32 << 20, 1);
    let fs = world.open();
    let old = vec![b'o'; 500];
    for name in ["over", "longer", "hole", "new", "direct", "sparse"] {
        store(&fs, name, &old);
    }
    store(&fs, "large", &[b'l'; 20_000]);
    fill(&fs);

    let file = open(&fs, "over", 0);
    assert_eq!(fs.write(&file, 10, b"zz").unwrap(), 2);
    let mut over = old.clone();
    over[10..12].copy_from_slice(b"zz");
    assert_eq!(contents(&fs, "over"), over);

    let file = open(&fs, "longer", libc::O_APPEND);
    let mut longer = old.clone();
    while longer.len() + 100 <= INLINE {
        let line = [longer.len() as u8; 100];
        assert_eq!(fs.write(&file, 0, &line).unwrap(), 100);
        longer.extend(line);
    }
    assert!(is_full(fs.write(&file, 0, &[1; 100])));
    assert_eq!(contents(&fs, "longer"), longer);

    let file = open(&fs, "hole", 0);
    fs.fallocate(&file, PUNCH, 10, 20).unwrap();
    let mut hole = old.clone();
    hole[10..30].fill(0);
    assert_eq!(contents(&fs, "hole"), hole);

    for name in ["new", "large", "fresh"] {
        let file = open(&fs, name, libc::O_TRUNC);
        assert_eq!(fs.write(&file, 0, b"new\n").unwrap(), 4);
        assert_eq!(contents(&fs, name), b"new\n");
    }

    let file = open(&fs, "direct", libc::O_DIRECT | libc::O_DSYNC);
    assert_eq!(fs.write(&file, 499, b"dd").unwrap(), 2);
    let mut direct = old[..499].to_vec();
    direct.extend(b"dd");

    // Replacing a large file has brought blocks back.
    fill(&fs);
    let file = open(&fs, "sparse", 0);
    let set = fs::SetAttr {
        size: Some(10_000),
        ..fs::SetAttr::default()
    };
    fs.setattr(&Caller::root(), file.ino(), &set).unwrap();
    assert_eq!(fs.write(&file, 600, b"s").unwrap(), 1);
    assert!(is_full(fs.write(&file, 5_000, b"s")));
    let mut sparse = old.clone();
    sparse.resize(10_000, 0);
    sparse[600] = b's';
    drop(file);

    let check = |fs: &FileSystem| {
        assert_eq!(contents(fs, "over"), over);
        assert_eq!(contents(fs, "longer"), longer);
        assert_eq!(contents(fs, "hole"), hole);
        assert_eq!(contents(fs, "direct"), direct);
        assert_eq!(contents(fs, "sparse"), sparse);
        for name in ["new", "large", "fresh"] {
            assert_eq!(contents(fs, name), b"new\n");
        }
    };
    check(&fs);
    let fs = world.remount(fs);
    check(&fs);
    fs.close().unwrap();
    world.check();
}

/// As many were in use as at the last checkpoint, and none could be made where no block was free.
#[test]
fn inodes_are_counted_as_they_come_and_go_and_more_can_be_made_on_a_full_array() {
    let mut world = World::new(2, 32 << 20, 3);
    let fs = world.open();
    let used = |fs: &FileSystem| {
        let now = fs.statfs();
        now.files - now.files_free
    };
    // What a directory has beside its inode, and maps of space, are nodes, too.
    let more = |fs: &FileSystem, before: u64, files: u64| {
        let more = used(fs) - before;
        assert!((files..files + 20).contains(&more), "{more} for {files}");
    };
    let before = used(&fs);
    let who = Caller::root();
    for i in 0..100 {
        store(&fs, &format!("small{i}"), b"x");
        more(&fs, before, i + 1);
    }
    for i in 0..40 {
        fs.unlink(&who, ROOT, format!("small{i}").as_bytes())
            .unwrap();
    }
    more(&fs, before, 60);
    fill(&fs);
    let now = fs.store().space();
    fs.checkpoint().unwrap();
    assert_eq!(fs.store().space().nodes, now.nodes_now);
    let (filled, free) = (used(&fs), fs.statfs().files_free);
    assert!(fs.statfs().blocks_free < 16 && free > 1000, "{free}");
    for i in 0..500 {
        fs.mknod(&who, ROOT, format!("empty{i}").as_bytes(), libc::S_IFREG, 0)
            .unwrap();
    }
    more(&fs, filled, 500);
    let now = used(&fs);
    let fs = world.remount(fs);
    assert_eq!(used(&fs), now);
    fs.close().unwrap();
    world.check();
}

/// Metadata may grow no more either: then no content does, and what there is can be changed and deleted still.
#[test]
fn small_files_are_written_over_where_metadata_has_no_room_either() {
    let mut world = World::new(2, 32 << 20, 2);
    let mut fs = world.open();
    fill(&fs);
    let name = |i: u64| format!("small{i}");
    let bytes = |i: u64, round: u64| {
        let mut bytes = vec![0; INLINE - 100];
        Rng::new(round << 32 | i).fill(&mut bytes);
        bytes
    };
    let make = |i: u64| -> Result<usize, Error> {
        let (who, name) = (Caller::root(), name(i));
        let file = match fs.lookup(ROOT, name.as_bytes()) {
            Ok(attr) => fs.open_file(attr.ino, libc::O_RDWR)?,
            Err(_) => {
                let made = fs.create(&who, ROOT, name.as_bytes(), 0o644, libc::O_RDWR);
                made?.1
            }
        };
        fs.write(&file, 0, &bytes(i, 0))
    };
    let (mut count, mut settled) = (0, false);
    loop {
        match is_full(make(count)) {
            true if settled => break,
            // What is dirty counts for more than it is once it is written: one that a thread makes later would find room for a little.
            true => settled = fs.checkpoint().is_ok(),
            false => (count, settled) = (count + 1, false),
        }
    }
    assert!(count > 500, "{count}");
    let file = open(&fs, &name(0), 0);
    assert!(is_full(fs.append(&file, &[1; 50])));
    assert_eq!(contents(&fs, &name(0)), bytes(0, 0));
    drop(file);
    for round in 1..5 {
        for i in 0..count {
            // One half is written over, the other replaced.
            let flags = [0, libc::O_TRUNC][(i % 2) as usize];
            let file = open(&fs, &name(i), flags);
            fs.write(&file, 0, &bytes(i, round)).unwrap();
        }
        fs = world.remount(fs);
        for i in 0..count {
            assert_eq!(contents(&fs, &name(i)), bytes(i, round), "{i}");
        }
    }
    for i in 0..count {
        let name = name(i);
        fs.unlink(&Caller::root(), ROOT, name.as_bytes()).unwrap();
    }
    fs.unlink(&Caller::root(), ROOT, b"ball").unwrap();
    fs.close().unwrap();
    world.check();
}

/// What a sync puts in an inode may be more than what is written home there. Behind that a write found no block, though it needed none.
#[test]
fn a_synced_small_file_is_written_over_to_its_end_on_a_full_array() {
    let mut world = World::new(2, 32 << 20, 7);
    let fs = world.open();
    let mut bytes = vec![b'a'; 3_000];
    store(&fs, "file", &bytes);
    let mut fs = world.remount(fs);
    fill(&fs);
    for (round, byte) in (b'b'..b'f').enumerate() {
        let at = 2_400 + 100 * round;
        let file = open(&fs, "file", 0);
        fs.write(&file, at as u64, &[byte; 100]).unwrap();
        bytes[at..at + 100].fill(byte);
        drop(file);
        if round % 2 == 1 {
            fs = world.remount(fs);
        }
        assert_eq!(contents(&fs, "file"), bytes);
    }
    fs.close().unwrap();
    world.check();
}

/// No record cuts the file before its new content is there.
#[test]
fn a_crash_leaves_a_small_file_that_is_replaced_on_a_full_array_old_or_new() {
    let (mut olds, mut news) = (0, 0);
    for seed in 0..24 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(2, 32 << 20, seed);
        let fs = world.open();
        let old = vec![b'o'; if seed % 2 == 0 { 500 } else { 9_000 }];
        store(&fs, "config", &old);
        fill(&fs);
        world.switch.cut_after(rng.below(6));
        let replace = || -> Result<(), Error> {
            let ino = fs.lookup(ROOT, b"config")?.ino;
            let file = fs.open_file(ino, libc::O_RDWR | libc::O_TRUNC)?;
            fs.write(&file, 0, b"new")?;
            fs.fsync(&file, false)
        };
        let done = replace();
        world.switch.cut_now();
        drop(fs);
        world.restart(&mut rng);
        let fs = world.open();
        let found = contents(&fs, "config");
        match found == old {
            true => olds += 1,
            false => news += 1,
        }
        assert!(found == b"new" || (found == old && done.is_err()), "{seed}");
        fs.close().unwrap();
        world.check();
    }
    assert!(olds > 0 && news > 0, "{olds} {news}");
}

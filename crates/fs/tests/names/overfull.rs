//! An array whose metadata has grown as far as names may make it grow, and is then made to grow by all else: each change is made or refused, and
//! afterwards there are checkpoints still, mounts, and room after deletions.

use crate::world::{World, list};
use fs::{Caller, Error, FileSystem, Ino, ROOT, SetAttr, SetTime};
use std::sync::Arc;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const PAGE: u64 = 4096;

/// Whether it was made.
fn is_made<T>(what: &str, outcome: Result<T, Error>) -> bool {
    match outcome {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.errno(), libc::ENOSPC, "{what}: {error}");
            false
        }
    }
}

/// A large file, and as many empty ones as there is room for beside it. Of the large one every second page is a hole then, so that
/// there are blocks for data, but no chunk.
fn full_of_names(world: &World) -> (Arc<FileSystem>, Vec<Ino>) {
    let fs = world.open();
    let who = Caller::root();
    let (_, large) = (fs.create(&who, ROOT, b"large", 0o644, libc::O_RDWR)).unwrap();
    let mut size = 0;
    while fs.statfs().blocks_available * PAGE > 6 << 20 {
        size += fs.write(&large, size, &vec![1; 1 << 18]).unwrap() as u64;
    }
    fs.fsync(&large, false).unwrap();
    let mut files = Vec::new();
    loop {
        let name = files.len().to_string();
        match fs.mknod(&who, ROOT, name.as_bytes(), libc::S_IFREG | 0o600, 0) {
            Ok(attr) => files.push(attr.ino),
            Err(error) => {
                assert_eq!(error.errno(), libc::ENOSPC);
                break;
            }
        }
    }
    assert!(files.len() > 20_000, "{}", files.len());
    let holes = (0..size / PAGE).step_by(2);
    let punched = holes.map_while(|page| {
        let punched = fs.fallocate(&large, PUNCH, page * PAGE, PAGE);
        is_made("a hole", punched).then_some(())
    });
    assert!(punched.count() > 100);
    fs.fsync(&large, false).unwrap();
    (fs, files)
}

/// `change` says how long the file is then, of bytes that are 5.
fn grown_by(what: &str, change: impl Fn(&FileSystem, Ino) -> Result<u64, Error>) {
    let mut world = World::new(1, 64 << 20, 9);
    world.options.data.cache_bytes = 8 << 20;
    let (fs, files) = full_of_names(&world);
    let (mut made, mut refused) = (Vec::new(), 0);
    for (i, ino) in files.iter().enumerate() {
        let changed = change(&fs, *ino);
        match changed {
            Ok(size) => made.push((*ino, size)),
            refusal => refused += usize::from(!is_made(what, refusal)),
        }
        // Each refusal is after a look for room, which is a checkpoint.
        if refused == 30 {
            break;
        }
        if i % 1000 == 0 {
            fs.sync().unwrap();
        }
    }
    fs.sync().unwrap();
    assert!(
        made.len() > 100,
        "{what}: {} of {}",
        made.len(),
        files.len()
    );
    let fs = world.remount(fs);
    for (ino, size) in &made {
        assert_eq!(fs.getattr(*ino).unwrap().size, *size, "{what}");
    }
    for (ino, size) in made.iter().filter(|(_, size)| *size > 0).step_by(50) {
        let file = fs.open_file(*ino, libc::O_RDONLY).unwrap();
        let mut bytes = vec![0; *size as usize];
        assert_eq!(fs.read(&file, 0, &mut bytes).unwrap(), bytes.len());
        let written = bytes.iter().position(|b| *b != 0).expect("it was written");
        assert!(
            written % 4096 == 0 && bytes[written..].iter().all(|b| *b == 5),
            "{what}"
        );
    }
    for (name, _) in list(&fs, ROOT, 1000) {
        fs.unlink(&Caller::root(), ROOT, &name).unwrap();
    }
    fs.sync().unwrap();
    let fs = world.remount(fs);
    let free = fs.statfs().blocks_available * PAGE;
    assert!(
        free > 48 << 20,
        "{what}: {free} bytes free when all is gone"
    );
    fs.close().unwrap();
}

/// What is accepted is synced.
fn write(fs: &FileSystem, ino: Ino, flags: i32, bytes: &[u8], sync: bool) -> Result<u64, Error> {
    let file = fs.open_file(ino, libc::O_RDWR | flags)?;
    assert_eq!(fs.write(&file, 0, bytes)?, bytes.len());
    if sync {
        fs.fsync(&file, false).unwrap();
    }
    Ok(bytes.len() as u64)
}

/// After some thousands a checkpoint found no room. The file system turned read-only, and no mount could make that checkpoint either.
#[test]
fn small_contents_do_not_fill_what_checkpoints_need() {
    grown_by("2 KiB", |fs, ino| write(fs, ino, 0, &[5; 2048], false));
}

#[test]
fn pages_do_not_fill_what_checkpoints_need() {
    grown_by("pages", |fs, ino| match ino.0 % 4 {
        0 => {
            let page = device::AlignedBuf::from_slice(&[5; 4096]);
            write(fs, ino, libc::O_DIRECT, &page, false)
        }
        1 => {
            let file = fs.open_file(ino, libc::O_RDWR)?;
            fs.fallocate(&file, 0, 0, 2 * PAGE)?;
            fs.write(&file, PAGE, &[5; 4096]).map(|_| 2 * PAGE)
        }
        2 => write(fs, ino, libc::O_TRUNC, &[5; 1000], false),
        _ => write(fs, ino, 0, &[5; 4000], true),
    });
}

#[test]
fn transactions_do_not_fill_what_checkpoints_need() {
    grown_by("transactions", |fs, ino| {
        let mut transaction = fs.transaction(&Caller::root())?;
        let size = if ino.0 % 2 == 0 { 2048 } else { 4096 };
        transaction.write(ino, 0, &vec![5; size])?;
        transaction.commit()?;
        Ok(size as u64)
    });
}

#[test]
fn attributes_do_not_fill_what_checkpoints_need() {
    grown_by("owner and times", |fs, ino| {
        let at = |n: u64| {
            SetTime::At(base::clock::Timestamp::from_ns(
                (ino.0 + n) as i64 * 7_919_000_000_001,
            ))
        };
        let set = SetAttr {
            uid: Some(u32::MAX - 1),
            gid: Some(u32::MAX - 2),
            mode: Some(0o7777),
            atime: Some(at(1)),
            mtime: Some(at(2)),
            ..SetAttr::default()
        };
        fs.setattr(&Caller::root(), ino, &set).map(|_| 0)
    });
}

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
    let files = fill_with_names(&fs);
    (fs, files)
}

fn fill_with_names(fs: &FileSystem) -> Vec<Ino> {
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
    files
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
        fs.setattr(&Caller::root(), ino, &new_owner(ino)).map(|_| 0)
    });
}

/// Owner, mode and times that take more room than those that a new file has.
fn new_owner(ino: Ino) -> SetAttr {
    let at = |n: u64| {
        SetTime::At(base::clock::Timestamp::from_ns(
            (ino.0 + n) as i64 * 7_919_000_000_001,
        ))
    };
    SetAttr {
        uid: Some(u32::MAX - 1),
        gid: Some(u32::MAX - 2),
        mode: Some(0o7777),
        atime: Some(at(1)),
        mtime: Some(at(2)),
        ..SetAttr::default()
    }
}

const SIZE: u64 = 2 * PAGE;
const CUT: u64 = 100;
const CAPABILITY: &[u8] = b"security.capability";

/// So many programs with privileges, on an array that refuses changes of attributes.
fn programs<const N: usize>(world: &World) -> (Arc<FileSystem>, [Ino; N]) {
    let (fs, root) = (world.open(), Caller::root());
    let programs = std::array::from_fn(|i| {
        let name = format!("program {i}");
        let (attr, file) = (fs.create(&root, ROOT, name.as_bytes(), 0o4755, libc::O_RDWR)).unwrap();
        fs.write(&file, 0, &[7; SIZE as usize]).unwrap();
        fs.fsync(&file, false).unwrap();
        let set = SetAttr {
            mode: Some(0o4755),
            ..SetAttr::default()
        };
        fs.setattr(&root, attr.ino, &set).unwrap();
        fs.setxattr(&root, attr.ino, CAPABILITY, &[1; 20], 0)
            .unwrap();
        attr.ino
    });
    let mut refused = 0;
    for (i, ino) in fill_with_names(&fs).into_iter().enumerate() {
        let changed = fs.setattr(&root, ino, &new_owner(ino));
        refused += usize::from(!is_made("owner and times", changed));
        if refused == 30 {
            return (fs, programs);
        }
        if i % 1000 == 0 {
            fs.sync().unwrap();
        }
    }
    panic!("{refused} refused");
}

fn has_privileges(fs: &FileSystem, ino: Ino) -> bool {
    let mode = fs.getattr(ino).unwrap().mode & 0o7777;
    let capability = fs.getxattr(ino, CAPABILITY);
    match mode {
        0o4755 => capability.unwrap() == [1; 20],
        mode => {
            assert!(mode == 0o755 && matches!(capability, Err(Error::NoAttribute)));
            false
        }
    }
}

/// Taking privileges away counted as a change of attributes: it was refused, and so were truncation and overwriting by whom it concerns.
/// What changed attributes with the size was told no, and the file was cut.
#[test]
fn programs_are_cut_and_written_over_where_attributes_cannot_change() {
    let mut world = World::new(1, 64 << 20, 9);
    world.options.data.cache_bytes = 8 << 20;
    let (fs, [cut, set, stripped, both, by_root]) = programs(&world);
    let user = Caller::user(1000, 1000);
    let cuts = SetAttr {
        size: Some(CUT),
        ..SetAttr::default()
    };
    let cuts_and_more = SetAttr {
        mode: Some(0o700),
        ..cuts
    };
    for (who, ino) in [(user, both), (Caller::root(), by_root)] {
        let refused = fs.setattr(&who, ino, &cuts_and_more);
        assert!(!is_made("size and mode", refused));
        assert_eq!(fs.getattr(ino).unwrap().size, SIZE);
        assert!(has_privileges(&fs, ino));
    }
    fs.truncate(&user, cut, CUT).unwrap();
    // As servers of NFS do it.
    let cuts_now = SetAttr {
        mtime: Some(SetTime::Now),
        ..cuts
    };
    let attr = fs.setattr(&user, set, &cuts_now).unwrap();
    assert_eq!(attr.size, CUT);
    let file = fs.open_file(stripped, libc::O_RDWR).unwrap();
    fs.kill_privileges(stripped).unwrap();
    assert_eq!(
        fs.write(&file, 0, &[8; SIZE as usize]).unwrap() as u64,
        SIZE
    );
    drop(file);
    let fs = world.remount(fs);
    for (ino, size) in [(cut, CUT), (set, CUT), (stripped, SIZE)] {
        assert_eq!(fs.getattr(ino).unwrap().size, size);
        assert!(!has_privileges(&fs, ino));
    }
    fs.close().unwrap();
    world.check();
}

/// A cut was staged when what it takes away was refused: who was told no, and committed the rest, cut the file and left it its privileges.
#[test]
fn transactions_cut_programs_where_attributes_cannot_change() {
    let mut world = World::new(1, 64 << 20, 9);
    world.options.data.cache_bytes = 8 << 20;
    let (fs, [cut, both, atomic]) = programs(&world);
    let user = Caller::user(1000, 1000);
    let mut transaction = fs.transaction(&user).unwrap();
    transaction.truncate(cut, CUT).unwrap();
    let cuts_and_more = SetAttr {
        size: Some(CUT),
        mode: Some(0o700),
        ..SetAttr::default()
    };
    assert!(!is_made(
        "size and mode",
        transaction.setattr(both, &cuts_and_more)
    ));
    transaction.commit().unwrap();
    let file = fs.open_file(atomic, libc::O_RDWR).unwrap();
    let mut write = fs.atomic_write(&user, &file).unwrap();
    write.truncate(CUT).unwrap();
    write.commit().unwrap();
    drop(file);
    let fs = world.remount(fs);
    for ino in [cut, atomic] {
        assert_eq!(fs.getattr(ino).unwrap().size, CUT);
        assert!(!has_privileges(&fs, ino));
    }
    assert_eq!(fs.getattr(both).unwrap().size, SIZE);
    assert!(has_privileges(&fs, both));
    fs.close().unwrap();
    world.check();
}

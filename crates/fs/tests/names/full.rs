//! A full array: refused early and cleanly, and deletion always works. One that is nearly empty is never taken for full.

use crate::world::{World, list};
use device::sim::Times;
use fs::{Caller, Error, FileSystem, Ino, ROOT};

fn no_space(error: &Error) -> bool {
    error.errno() == libc::ENOSPC
}

/// Creates small files until there is no room; returns how many there are.
fn fill_with_names(fs: &FileSystem, dir: Ino) -> usize {
    let who = Caller::root();
    for i in 0.. {
        let name = format!("{i}-{}", "n".repeat(200)).into_bytes();
        let made = fs.mknod(&who, dir, &name, libc::S_IFREG | 0o600, 0);
        let set = made.and_then(|attr| fs.setxattr(&who, attr.ino, b"user.x", &[1; 4000], 0));
        if let Err(error) = set {
            assert!(no_space(&error), "{error}");
            return i;
        }
    }
    unreachable!("an array is full some time")
}

fn empty(fs: &FileSystem, dir: Ino) {
    for (name, _) in list(fs, dir, 500) {
        fs.unlink(&Caller::root(), dir, &name).unwrap();
    }
}

#[test]
fn an_array_full_of_names_can_be_emptied_and_filled_again() {
    let mut world = World::new(1, 64 << 20, 4);
    let mut fs = world.open();
    let mut counts = Vec::new();
    for _ in 0..3 {
        counts.push(fill_with_names(&fs, ROOT));
        fs = world.remount(fs);
        empty(&fs, ROOT);
        fs.sync().unwrap();
    }
    assert!(counts[0] > 2000, "{counts:?}");
    assert!(counts[2] * 10 > counts[0] * 9, "space is lost: {counts:?}");
    fs.close().unwrap();
}

/// Writes files until there is no room; returns the bytes in them.
fn fill_with_data(fs: &FileSystem, round: usize) -> u64 {
    let who = Caller::root();
    let mut bytes = 0;
    for i in 0.. {
        let name = format!("{round}-{i}").into_bytes();
        let file = match fs.create(&who, ROOT, &name, 0o600, libc::O_RDWR) {
            Ok((_, file)) => file,
            Err(error) => {
                assert!(no_space(&error), "{error}");
                return bytes;
            }
        };
        for piece in 0..64u64 {
            match fs.write(&file, piece << 16, &vec![i as u8; 1 << 16]) {
                Ok(written) if written == 1 << 16 => bytes += 1 << 16,
                Ok(_) => {}
                Err(error) => {
                    assert!(no_space(&error), "{error}");
                    fs.fsync(&file, false).unwrap();
                    return bytes;
                }
            }
        }
    }
    unreachable!("an array is full some time")
}

#[test]
fn an_array_full_of_data_can_be_emptied_and_filled_again() {
    let mut world = World::new(2, 64 << 20, 5);
    let mut fs = world.open();
    let mut sizes = Vec::new();
    for round in 0..3 {
        sizes.push(fill_with_data(&fs, round));
        fs = world.remount(fs);
        empty(&fs, ROOT);
        fs.sync().unwrap();
    }
    assert!(sizes[0] > 64 << 20, "{sizes:?}");
    assert!(sizes[2] * 10 > sizes[0] * 9, "space is lost: {sizes:?}");
    fs.close().unwrap();
}

/// What was data at the mount was data until the next one: an array without files had room for no names.
#[test]
fn names_have_the_room_of_data_that_was_deleted_after_a_remount() {
    let mut world = World::new(1, 64 << 20, 6);
    let fs = world.open();
    let most = fill_with_names(&fs, ROOT);
    fs.close().unwrap();
    world = World::new(1, 64 << 20, 6);
    let mut fs = world.open();
    fill_with_data(&fs, 0);
    fs = world.remount(fs);
    empty(&fs, ROOT);
    fs.sync().unwrap();
    let names = fill_with_names(&fs, ROOT);
    assert!(names * 10 >= most * 9, "{names} of {most}");
    fs.close().unwrap();
}

/// One write needs a chunk while the device returns nothing: all free space was gone until the next mount, and both this
/// and later writes failed as if the array were full.
#[test]
fn a_moment_without_reads_is_no_lack_of_space() {
    let mut world = World::new(1, 512 << 20, 1);
    world.options.store.node_cache_bytes = 2 << 20;
    world.options.data.cache_bytes = 16 << 20;
    let who = Caller::root();
    let fs = world.open();
    let write = |fs: &FileSystem, name: &[u8], len: usize| {
        let (_, file) = fs.create(&who, ROOT, name, 0o644, libc::O_RDWR).unwrap();
        let written = fs.write(&file, 0, &vec![1; len]);
        (written.and_then(|_| fs.fsync(&file, false)), file)
    };
    write(&fs, b"old", 1 << 20).0.unwrap();
    let fs = world.remount(fs);
    let before = fs.statfs().blocks_free;
    let (_, file) = fs.create(&who, ROOT, b"new", 0o644, libc::O_RDWR).unwrap();
    world.devices[0].fail_reads(Times::Always, None);
    let outcome = fs
        .write(&file, 0, &vec![2; 8 << 20])
        .and_then(|_| fs.fsync(&file, false));
    assert_eq!(outcome.unwrap_err().errno(), libc::EIO);
    world.devices[0].heal();
    // Metadata may have grown a little.
    let little = 4096;
    assert!(fs.statfs().blocks_free + 2048 + little >= before);
    let (outcome, other) = write(&fs, b"other", 64 << 10);
    outcome.unwrap();
    // What could not be written is there still, and goes home with the next sync.
    let again = fs.open_file(file.ino(), libc::O_RDWR).unwrap();
    fs.fsync(&again, false).unwrap();
    drop((file, other, again));
    fs.sync().unwrap();
    let after = fs.statfs().blocks_free;
    assert!(after + 2048 + 16 + little >= before, "{before}, {after}");
    let fs = world.remount(fs);
    let mounted = fs.statfs().blocks_free;
    assert!(after.abs_diff(mounted) < little, "{after}, {mounted}");
    let ino = fs.lookup(ROOT, b"new").unwrap().ino;
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut bytes = vec![0; 8 << 20];
    assert_eq!(fs.read(&file, 0, &mut bytes).unwrap(), bytes.len());
    assert!(bytes.iter().all(|byte| *byte == 2));
    drop(file);
    fs.close().unwrap();
}

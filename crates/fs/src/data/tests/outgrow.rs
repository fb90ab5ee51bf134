//! Small files that outgrow their inodes while a write-back comes between.

use super::*;

fn promise_all_but(m: &Mounted, blocks: u64) -> Promised<'_> {
    m.store.sync().unwrap();
    let free = m.store.space().free_blocks;
    let hold = (0..free).find_map(|less| m.files.promise(free - less).ok());
    let mut hold = hold.unwrap();
    let given = hold.give(blocks);
    assert_eq!(given, blocks);
    drop(m.store.adopt_promise(given));
    hold
}

/// The last block is for the new content of a cut file, and a write further on finds none: the write-back
/// that makes room had put the first bytes in the inode, and those of the second write took their place.
#[test]
fn a_sparse_write_to_a_full_disk_keeps_what_came_before() {
    let world = World::new(80, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 4096));
    m.write(&file, 4096, &pattern(1, 4096));
    m.files.fsync(&file, false).unwrap();
    m.files.write_back_all().unwrap();
    let hold = promise_all_but(&m, 1);
    m.files.truncate(ino, 0).unwrap();
    let mut bytes = pattern(2, 1000);
    m.write(&file, 0, &bytes);
    match m.files.write(&file, 8192, &[7; 100]) {
        Ok(_) => {
            bytes.resize(8192, 0);
            bytes.extend([7; 100]);
        }
        Err(error) => assert!(matches!(error, Error::NoSpace), "{error}"),
    }
    m.files.fsync(&file, false).unwrap();
    assert_eq!(m.contents(ino), bytes);
    drop((hold, file));
    m.close();
    let m = world.mount();
    assert_eq!(m.contents(ino), bytes);
    m.check(ino);
}

/// The page of the second write has no room in the cache: the file is written back for that.
#[test]
fn a_sparse_write_to_a_full_cache_keeps_what_came_before() {
    let world = World::new(81, 64, 64);
    let m = world.mount();
    let others: Vec<_> = (0..48).map(|_| m.open(m.make())).collect();
    for n in 1..60 {
        m.files.write_back_all().unwrap();
        let (ino, mut bytes) = (m.make(), pattern(n, 1000));
        let file = m.open(ino);
        m.write(&file, 0, &bytes);
        m.files.fsync(&file, false).unwrap();
        // Not by `write`, which would make room. Some sets of the cache are full of these, others are not.
        for other in &others {
            let _exclusive = m.files.lock_exclusive(&other.state).unwrap();
            m.files.write_locked(&other.state, n * PAGE, b"x").unwrap();
        }
        {
            let _exclusive = m.files.lock_exclusive(&file.state).unwrap();
            m.files.write_locked(&file.state, n * PAGE, b"far").unwrap();
        }
        m.files.fsync(&file, false).unwrap();
        bytes.resize((n * PAGE) as usize, 0);
        bytes.extend(b"far");
        // As the devices have it.
        m.files.drop_pages(&file.state, 0..n + 1);
        assert_eq!(m.contents(ino), bytes, "{n}");
        m.check(ino);
    }
}

/// Pages alone, without the first: the bytes in the inode get a block first, whoever asks for it.
#[test]
fn extents_take_the_place_of_no_inline_body() {
    for together in [false, true] {
        let world = World::new(82, 64, 64);
        let m = world.mount();
        let ino = m.make();
        let file = m.open(ino);
        let mut bytes = pattern(3, 1000);
        m.write(&file, 0, &bytes);
        m.files.fsync(&file, false).unwrap();
        m.write(&file, 8192, b"far");
        m.files.drop_pages(&file.state, 0..1);
        if together {
            m.files.write_back_all().unwrap();
        } else {
            m.files.flush_file(&file.state).unwrap();
        }
        bytes.resize(8192, 0);
        bytes.extend(b"far");
        assert_eq!(m.contents(ino), bytes);
        assert_eq!(m.check(ino), 2);
        drop(file);
        m.close();
        assert_eq!(world.mount().contents(ino), bytes);
    }
}

/// Who makes room on a full disk by cutting a file finds it, for whatever is written next.
#[test]
fn what_a_cut_frees_on_a_full_disk_is_there_for_others_at_once() {
    let world = World::new(83, 64, 256);
    let m = world.mount();
    let (large, small, other) = (m.make(), m.make(), m.make());
    m.write(&m.open(large), 0, &pattern(1, 100 * 4096));
    m.write(&m.open(small), 0, &pattern(2, 10 * 4096));
    m.files.write_back_all().unwrap();
    m.store.sync().unwrap();
    let hold = promise_all_but(&m, 50);
    let more = pattern(3, 120 * 4096);
    let full = m.files.write(&m.open(other), 0, &more);
    assert!(full.unwrap() < more.len());
    m.files.truncate(small, 0).unwrap();
    assert!(
        m.open(small).state.meta.lock().replaced,
        "the rest of it is little"
    );
    m.files.truncate(large, 0).unwrap();
    m.write(&m.open(other), 0, &more);
    drop(hold);
    assert_eq!(m.contents(other), more);
    m.close();
    let m = world.mount();
    assert_eq!(m.contents(other), more);
    assert_eq!((m.size(large), m.size(small)), (0, 0));
    m.check(large);
}

//! Files of many extents, within a leaf of their tree and at its borders.

use super::*;
use device::sim::Times as Strikes;
use extents::{CHANGES_MAX, LEAF_MAX};

const PIECES: u64 = 560;
const _: () = assert!(CHANGES_MAX < PIECES as usize && (PIECES as usize) < LEAF_MAX);

/// A file of so many pages, none of which lies beside the next one on the devices; in one leaf.
fn in_pieces(m: &Mounted) -> (Ino, Vec<u8>) {
    let (ino, other) = (m.make(), m.make());
    let (file, between) = (m.open(ino), m.open(other));
    let bytes = pattern(1, PIECES as usize * BLOCK_SIZE);
    for (page, bytes) in (0..).zip(bytes.chunks(BLOCK_SIZE)) {
        for file in [&file, &between] {
            m.write(file, page * PAGE, bytes);
            m.files.write_back(file.ino()).unwrap();
        }
    }
    let found = m.files.mapped(&file.state, 0..PIECES).unwrap();
    assert_eq!(found.len() as u64, PIECES);
    (ino, bytes)
}

/// More than one operation takes.
#[test]
fn what_has_blocks_keeps_them_when_the_rest_gets_some() {
    let world = World::new(80, 64, 2048);
    let m = world.mount();
    let (ino, mut bytes) = in_pieces(&m);
    let file = m.open(ino);
    let pages = PIECES + 20;
    m.files.fallocate(&file, 0, 0, pages * PAGE).unwrap();
    assert_eq!(m.check(ino), pages);
    drop(file);
    m.close();
    let m = world.mount();
    bytes.resize((pages * PAGE) as usize, 0);
    assert!(m.contents(ino) == bytes);
}

#[test]
fn all_of_a_range_is_zero_in_however_many_pieces_it_lies() {
    let world = World::new(81, 64, 2048);
    let m = world.mount();
    let (ino, mut bytes) = in_pieces(&m);
    let file = m.open(ino);
    let zero = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    let pages = 1..PIECES - 1;
    let len = (pages.end - pages.start) * PAGE;
    m.files.fallocate(&file, zero, PAGE, len).unwrap();
    bytes[BLOCK_SIZE..(pages.end * PAGE) as usize].fill(0);
    assert!(m.contents(ino) == bytes);
    assert_eq!(m.check(ino), PIECES);
    drop(file);
    m.close();
    let m = world.mount();
    assert!(m.contents(ino) == bytes);
}

/// A file that is added to at its end and punched at its beginning has as much at any time, and so have its leaves: those that nothing was left in stayed, and
/// more came with all that had ever passed through.
#[test]
fn a_leaf_that_a_hole_empties_goes() {
    const PIECES: u64 = LEAF_MAX as u64 + 50;
    let world = World::new(86, 64, 2048);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let keep = libc::FALLOC_FL_KEEP_SIZE;
    let punch = libc::FALLOC_FL_PUNCH_HOLE | keep;
    let window = 2 * PIECES * PAGE;
    for round in 0..8 {
        for piece in 0..PIECES {
            let at = round * window + 2 * piece * PAGE;
            m.files.fallocate(&file, keep, at, PAGE).unwrap();
        }
        if round > 0 {
            let before = (round - 1) * window;
            m.files.fallocate(&file, punch, before, window).unwrap();
        }
        assert_eq!(m.check(ino), PIECES);
        let Body::Tree(root) = m.inode(ino).body else {
            panic!("more than an inode has room for");
        };
        let mut leaves = 0;
        let walked = crate::tree::walk(&m.store, &root, 0, |_, _| {
            leaves += 1;
            Ok(true)
        });
        walked.unwrap();
        assert!((2..=3).contains(&leaves), "{leaves} after {round}");
    }
    m.files.fallocate(&file, punch, 0, 8 * window).unwrap();
    assert_eq!(m.check(ino), 0);
    assert!(matches!(m.inode(ino).body, Body::Extents(list) if list.is_empty()));
    // It is like a new one.
    m.write(&file, 0, &pattern(1, 3 * BLOCK_SIZE));
    m.files.write_back(ino).unwrap();
    assert_eq!(m.contents(ino), pattern(1, 3 * BLOCK_SIZE));
    drop(file);
    m.close();
    let m = world.mount();
    assert_eq!(m.contents(ino), pattern(1, 3 * BLOCK_SIZE));
}

/// Blocks beyond the end hold nothing yet, and pages before them are not home: a record that frees the ones has no size that
/// takes in the others.
#[test]
fn a_cut_of_what_lies_beyond_the_end_logs_no_size_that_is_not_home() {
    let mut world = World::new(82, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let bytes = pattern(3, 10 * BLOCK_SIZE);
    m.write(&file, 0, &bytes[..2 * BLOCK_SIZE]);
    m.files.write_back(ino).unwrap();
    let keep = libc::FALLOC_FL_KEEP_SIZE;
    m.files.fallocate(&file, keep, 0, 20 * PAGE).unwrap();
    m.write(&file, 2 * PAGE, &bytes[2 * BLOCK_SIZE..]);
    m.files.truncate(ino, 5 * PAGE).unwrap();
    m.store.sync().unwrap();
    drop(file);
    world.switch.cut_now();
    drop(m);
    world.restart(&mut Rng::new(82));
    let m = world.mount();
    let found = m.contents(ino);
    assert!(found.len() >= 2 * BLOCK_SIZE && bytes.starts_with(&found));
    m.check(ino);
}

/// A split in the middle, and the new extent lies far behind it.
#[test]
fn a_full_leaf_splits_before_the_place_that_is_written() {
    let world = World::new(83, 64, 2048);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let pages = 2 * LEAF_MAX as u64 + 400;
    let mut bytes = vec![0; (pages * PAGE) as usize];
    let mut put = |page: u64| {
        let new = pattern(page, BLOCK_SIZE);
        m.write(&file, page * PAGE, &new);
        bytes[(page * PAGE) as usize..][..BLOCK_SIZE].copy_from_slice(&new);
    };
    (0..pages).step_by(2).for_each(&mut put);
    m.files.write_back(ino).unwrap();
    // Behind the last one there is room: the first leaf is full.
    for page in [2 * LEAF_MAX as u64 - 21, 2 * LEAF_MAX as u64 - 301, 1] {
        put(page);
        m.files.write_back(ino).unwrap();
        m.check(ino);
    }
    bytes.truncate(((pages - 1) * PAGE) as usize);
    assert!(m.contents(ino) == bytes);
    drop(file);
    m.close();
    let m = world.mount();
    assert_eq!(m.check(ino), pages / 2 + 3);
    assert!(m.contents(ino) == bytes);
    m.delete(ino);
}

/// It goes over the border of two leaves and behind the end, in a record for each leaf, and a device fails at one I/O of it after the other.
#[test]
fn a_write_past_the_cache_that_fails_half_way_leaves_no_size_without_content() {
    let world = World::new(84, 64, 4096);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let border = 2 * LEAF_MAX as u64;
    for page in (0..border + 100).step_by(2) {
        m.write(&file, page * PAGE, &[1; BLOCK_SIZE]);
    }
    m.files.fsync(&file, false).unwrap();
    drop(file);
    let (size, from, to) = (m.size(ino), border - 10, border + 120);
    let new = vec![2; ((to - from) * PAGE) as usize];
    for requests in 0..1_000 {
        m.files.truncate(ino, size).unwrap();
        let flags = libc::O_RDWR | libc::O_DIRECT;
        let file = m.files.open(&m.owners, ino, flags).unwrap();
        world.switch.fail_after(requests, Strikes::Next(1));
        let written = m.files.write(&file, from * PAGE, &new);
        world.switch.restore();
        let found = m.contents(ino);
        assert!(found[size as usize..].iter().all(|byte| *byte == 2));
        m.check(ino);
        if written.is_ok() {
            assert!(requests > 20 && found.len() as u64 == to * PAGE);
            return;
        }
    }
    panic!("it takes more requests than that");
}

/// Room was made behind a file's end in pieces of many leaves, and a write goes over the border of two: a record for each. It told of nothing when the second
/// failed, and who tried it again at the end of the file had the first part twice.
#[test]
fn a_direct_append_that_fails_half_way_tells_what_it_has_appended() {
    let keep = libc::FALLOC_FL_KEEP_SIZE;
    let appended = [0, 1].map(|broken| {
        let world = World::new(83, 64, 2048);
        let m = world.mount();
        let (ino, other) = (m.make(), m.make());
        let file = m.open_direct(ino);
        let between = m.open(other);
        for page in 0..2 * LEAF_MAX as u64 {
            for file in [&file, &between] {
                m.files.fallocate(file, keep, page * PAGE, PAGE).unwrap();
            }
        }
        let border = {
            let content = file.state.node.read().unwrap();
            extents::leaf_end(&m.store, content.inode().unwrap(), 0).unwrap()
        };
        let end = (border - 3) * PAGE;
        m.write(&m.open(ino), end - 1, b"x");
        m.files.fsync(&file, false).unwrap();
        world.devices[broken].fail_writes(Strikes::Always, None);
        let bytes = pattern(4, 64 * BLOCK_SIZE);
        let written = m.files.write(&file, end, &bytes).unwrap_or(0);
        world.devices[broken].heal();
        assert!(written < bytes.len(), "it lies on both devices");
        assert_eq!(m.size(ino), end + written as u64);
        assert!(m.contents(ino)[end as usize..] == bytes[..written]);
        m.check(ino);
        written
    });
    assert!(appended.contains(&(3 * BLOCK_SIZE)), "{appended:?}");
}

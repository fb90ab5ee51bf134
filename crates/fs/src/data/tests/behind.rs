//! What streams have written and the devices do not have yet.

use super::*;
use base::atomic::{AtomicBool, Ordering};
use device::sim::Times as Strikes;

const MIB: u64 = 1 << 20;
/// What goes through the cache first.
const RUN: u64 = 4 * MIB;

/// A world, mounted, with a file of so many MiB that is at home, and a handle of it that has a run behind it.
fn streaming(mib: u64) -> (World, Mounted, Ino, Arc<OpenFile>, Vec<u8>) {
    streaming_to(mib, mib)
}

/// The same, when the run has come so far.
fn streaming_to(mib: u64, end: u64) -> (World, Mounted, Ino, Arc<OpenFile>, Vec<u8>) {
    // Room for four requests of 1 MiB.
    let world = World::new(1, 96, 32_768);
    let m = world.mount();
    let ino = m.make();
    let content = pattern(2, (mib * MIB) as usize);
    let file = m.open(ino);
    m.write(&file, 0, &content);
    m.files.fsync(&file, false).unwrap();
    m.commit_more();
    let file = m.open(ino);
    let mut content = content;
    write_in(&m, &file, &mut content, end * MIB - RUN..end * MIB);
    m.files.fsync(&file, false).unwrap();
    assert_eq!(m.files.behind_bytes(), 0);
    (world, m, ino, file, content)
}

/// Writes in requests of 1 MiB; returns how much of that was written behind.
fn write_in(m: &Mounted, file: &OpenFile, content: &mut Vec<u8>, range: Range<u64>) -> u64 {
    let before = m.files.behind_bytes();
    content.resize(content.len().max(range.end as usize), 0);
    for at in range.step_by(MIB as usize) {
        let data = &mut content[at as usize..(at + MIB) as usize];
        data.iter_mut().for_each(|byte| *byte ^= 0x5A);
        m.write(file, at, data);
    }
    m.files.behind_bytes() - before
}

fn fail_writes(world: &World, times: Strikes) {
    for device in &world.devices {
        device.fail_writes(times, None);
    }
}

#[test]
fn what_is_on_its_way_is_there_for_all_and_durable_when_it_is_synced() {
    let (mut world, m, ino, file, mut content) = streaming(10);
    assert_eq!(
        write_in(&m, &file, &mut content, 10 * MIB..13 * MIB),
        3 * MIB
    );
    assert_eq!(m.size(ino), 13 * MIB);
    let inode = m.inode(ino);
    assert!(inode.size < 13 * MIB, "some of it is not logged");
    let volatile = m.files.volatile(ino, inode.generation).unwrap();
    assert_eq!(inode.blocks + volatile.promised, 13 * MIB / PAGE);
    assert!(m.contents(ino) == content);
    assert_eq!(m.check(ino), 13 * MIB / PAGE);
    // Who looked would have waited again: for a while nothing is.
    assert_eq!(write_in(&m, &file, &mut content, 13 * MIB..14 * MIB), 0);
    m.files.fsync(&file, true).unwrap();
    drop(file);
    world.switch.cut_now();
    drop(m);
    world.restart(&mut Rng::new(3));
    let m = world.mount();
    assert!(m.contents(ino) == content, "what was synced is there");
    m.check(ino);
}

/// It was logged over what was in the inode, which no record takes.
#[test]
fn what_is_in_the_inode_moves_out_before_pieces_come() {
    let world = World::new(1, 96, 32_768);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let mut content = Vec::new();
    write_in(&m, &file, &mut content, 0..RUN);
    m.files.truncate(ino, 0).unwrap();
    m.write(&m.open(ino), 0, &[7; 100]);
    m.files.flush_file(&file.state).unwrap();
    m.files.truncate(ino, RUN).unwrap();
    m.files.flush_file(&file.state).unwrap();
    let inode = m.inode(ino);
    assert_eq!((inode.size, inode.has_inline()), (RUN, true));
    content.fill(0);
    content[..100].fill(7);
    write_in(&m, &file, &mut content, RUN..RUN + 2 * MIB);
    m.files.fsync(&file, false).unwrap();
    assert!(m.contents(ino) == content);
    assert_eq!(m.check(ino), 1 + 2 * MIB / PAGE);
}

#[test]
fn no_size_is_logged_over_what_another_handle_left_in_the_cache() {
    let (mut world, m, ino, file, mut content) = streaming(20);
    let other = m.open(ino);
    let cached = 20 * MIB + RUN;
    assert_eq!(write_in(&m, &other, &mut content, 20 * MIB..cached), 0);
    // From the beginning again, as a run of its own: the first of it through the cache.
    assert_eq!(write_in(&m, &file, &mut content, 0..RUN + 2 * MIB), 2 * MIB);
    assert_eq!(
        write_in(&m, &other, &mut content, cached..cached + MIB),
        MIB
    );
    // Ends what is on its way, and logs it.
    drop(other);
    m.store.sync().unwrap();
    world.switch.cut_now();
    drop((file, m));
    world.restart(&mut Rng::new(3));
    let m = world.mount();
    let (found, size) = (m.contents(ino), m.size(ino));
    for page in 20 * MIB / PAGE..size / PAGE {
        let bytes = page as usize * BLOCK_SIZE..(page as usize + 1) * BLOCK_SIZE;
        assert!(
            found[bytes.clone()] == content[bytes],
            "page {page} of {size} bytes"
        );
    }
    m.check(ino);
}

#[test]
fn what_a_device_refuses_goes_through_the_cache_in_its_order() {
    for good in 0..4 {
        let (world, m, ino, file, mut content) = streaming_to(13, 12);
        // One over what the file has, and three that make it longer: so many of them are good.
        let failing = (12 + good) * MIB;
        write_in(&m, &file, &mut content, 12 * MIB..failing);
        fail_writes(&world, Strikes::Next(1));
        write_in(&m, &file, &mut content, failing..16 * MIB);
        assert!(m.files.behind_bytes() > 0);
        assert!(m.contents(ino) == content, "{good}");
        fail_writes(&world, Strikes::Next(0));
        m.files.fsync(&file, false).unwrap();
        assert_eq!(m.files.dirty_pages(), 0);
        assert!(m.contents(ino) == content, "{good}");
        m.check(ino);
    }
}

#[test]
fn a_sync_has_what_a_device_refused_though_the_size_is_less_meanwhile() {
    for _ in 0..4 {
        let (world, m, ino, file, mut content) = streaming(12);
        fail_writes(&world, Strikes::Next(1));
        assert_eq!(
            write_in(&m, &file, &mut content, 12 * MIB..15 * MIB),
            3 * MIB
        );
        let ended = AtomicBool::new(false);
        base::thread::parallel(2, |thread| {
            if thread == 0 {
                // Whoever looks ends the pieces.
                assert!(m.contents(ino) == content);
                ended.store(true, Ordering::Relaxed);
                return;
            }
            while file.state.size() == 15 * MIB && !ended.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            m.files.fsync(&file, true).unwrap();
            assert_eq!(m.files.dirty_pages(), 0);
        });
        m.check(ino);
    }
}

#[test]
fn on_devices_that_are_full_nothing_is_lost_that_was_accepted() {
    let (world, m, ino, file, mut content) = streaming(12);
    let other = m.make();
    let filler = m.open(other);
    // As much as it will take, and a little for what tells where that is.
    let left = 4 * MIB / PAGE + 64;
    let mut at = 0;
    while m.free_blocks() > left {
        let len = (m.free_blocks() - left).min(64) * PAGE;
        m.write(&filler, at, &pattern(at, len as usize));
        m.files.fsync(&filler, false).unwrap();
        at += len;
    }
    fail_writes(&world, Strikes::Next(1));
    write_in(&m, &file, &mut content, 12 * MIB..16 * MIB);
    assert!(m.contents(ino) == content);
    fail_writes(&world, Strikes::Next(0));
    m.files.fsync(&file, false).unwrap();
    assert!(m.contents(ino) == content);
    m.check(ino);
}

#[test]
fn a_handle_that_goes_leaves_nothing_on_its_way() {
    let (world, m, ino, file, mut content) = streaming(12);
    fail_writes(&world, Strikes::Always);
    write_in(&m, &file, &mut content, 12 * MIB..14 * MIB);
    drop(file);
    assert!(m.contents(ino) == content, "it is in the cache");
    fail_writes(&world, Strikes::Next(0));
    m.files.write_back_all().unwrap();
    assert_eq!(m.files.dirty_pages(), 0);
    assert!(m.contents(ino) == content);
    m.check(ino);
}

#[test]
fn what_nobody_goes_on_with_ends_by_itself() {
    let (_world, m, ino, file, mut content) = streaming(12);
    write_in(&m, &file, &mut content, 12 * MIB..14 * MIB);
    assert!(m.inode(ino).size < 14 * MIB);
    m.files.tick().unwrap();
    m.files.tick().unwrap();
    assert_eq!(m.inode(ino).size, 14 * MIB);
    assert!(m.contents(ino) == content);
}

/// A page in the middle was synced just now: recovery looks for what its batch says until another one confirms it.
#[test]
fn a_piece_goes_over_nothing_for_which_a_batch_vouches() {
    let (mut world, m, ino, file, mut content) = streaming(10);
    let hole = 9 * MIB;
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    m.files.fallocate(&file, punch, hole, PAGE).unwrap();
    m.store.sync().unwrap();
    m.write(&file, hole, &content[hole as usize..][..BLOCK_SIZE]);
    m.files.fsync(&file, true).unwrap();
    drop(file);
    // Streams do not wait for small syncs any more.
    world.clock.advance(Duration::from_secs(60));
    let file = m.open(ino);
    write_in(&m, &file, &mut content, 4 * MIB..8 * MIB);
    assert!(m.store.vouches());
    let behind = write_in(&m, &file, &mut content, 8 * MIB..10 * MIB);
    assert_eq!(behind, 2 * MIB);
    assert!(!m.store.vouches());
    m.files.fsync(&file, true).unwrap();
    drop(file);
    world.switch.cut_now();
    drop(m);
    world.restart(&mut Rng::new(4));
    let m = world.mount();
    assert!(m.contents(ino) == content);
}

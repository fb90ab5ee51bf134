//! Flushes of somebody else that fail between a write and what is said of it. No record waits then, so the store goes on.

use super::pace::{Hook, watch};
use super::*;
use base::sync::{Mutex, rank};
use device::sim::Times as Strikes;

/// Asks for a failure beside the next write.
type Asked = Arc<Mutex<Option<Arc<Store<FsNode>>>>>;

/// Somebody flushes, and what was written since the last flush may be lost.
fn fail_a_flush(devices: &[Arc<SimDevice>], store: &Store<FsNode>) {
    store.array().mark_all_unflushed();
    devices
        .iter()
        .for_each(|d| d.fail_flushes(Strikes::Next(1)));
    store.flush().unwrap_err();
    devices.iter().for_each(|d| d.heal());
}

/// A world, mounted, in which a flush fails while something is written when that was asked for.
fn failing(world: &World) -> (Mounted, Asked) {
    let asked: Asked = Arc::new(Mutex::new(rank::LEAF, None));
    let (told, devices) = (Arc::clone(&asked), world.devices.clone());
    let hook: Hook = Arc::new(move || {
        let store = told.lock().take();
        let Some(store) = store else { return };
        let devices = devices.clone();
        // On a thread of its own: whoever writes holds locks.
        let beside = move || fail_a_flush(&devices, &store);
        let beside = base::thread::spawn("beside", beside).unwrap();
        beside.join().unwrap();
    });
    (watch(world, hook).0, asked)
}

/// Blocks that the record of a rewritten file would name may not hold what was written: the old content stays.
#[test]
fn a_file_is_not_replaced_over_a_flush_that_failed_since_its_blocks_were_written() {
    let mut world = World::new(70, 64, 256);
    let (m, asked) = failing(&world);
    let ino = m.make();
    let file = m.open(ino);
    let (old, new) = (pattern(1, 30_000), pattern(2, 40_000));
    m.write(&file, 0, &old);
    m.files.fsync(&file, false).unwrap();
    m.commit_more();
    m.files.truncate(ino, 0).unwrap();
    m.write(&file, 0, &new);
    *asked.lock() = Some(Arc::clone(&m.store));
    assert!(m.files.write_back(ino).is_err());
    assert!(asked.lock().is_none() && !m.store.read_only());
    m.store.sync().unwrap();
    assert_eq!(m.inode(ino).size, 30_000);
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    m.files.fsync(&m.open(ino), false).unwrap();
    drop((file, m));
    world.switch.cut_now();
    world.restart(&mut Rng::new(70));
    assert_eq!(world.mount().contents(ino), new);
}

/// As before, of new files that are logged together.
#[test]
fn a_group_is_not_logged_over_a_flush_that_failed_while_it_was_written() {
    let world = World::new(71, 64, 256);
    let (m, asked) = failing(&world);
    // There is a chunk for data: no record comes first.
    let other = m.open(m.make());
    m.write(&other, 0, &pattern(9, BLOCK_SIZE));
    m.files.write_back_all().unwrap();
    let files: Vec<_> = (0..40).map(|_| m.open(m.make())).collect();
    for (file, seed) in files.iter().zip(0..) {
        m.write(file, 0, &pattern(seed, BLOCK_SIZE));
    }
    m.store.sync().unwrap();
    *asked.lock() = Some(Arc::clone(&m.store));
    // Each of them is told, and goes home by itself.
    _ = m.files.write_back_all();
    assert!(asked.lock().is_none());
    assert!(!m.store.read_only());
    for (file, seed) in files.iter().zip(0..) {
        assert_eq!(m.files.fsync(file, false).unwrap_err().errno(), libc::EIO);
        m.files.fsync(&m.open(file.ino()), false).unwrap();
        assert_eq!(m.contents(file.ino()), pattern(seed, BLOCK_SIZE));
    }
}

/// The devices have done with it before the flush that failed, and it is landed behind that.
#[test]
fn a_write_in_flight_is_not_good_over_a_flush_that_failed_since_it_began() {
    let world = World::new(72, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m
        .files
        .open(&m.owners, ino, libc::O_RDWR | libc::O_DIRECT)
        .unwrap();
    m.write(&file, 0, &pattern(1, 20_480));
    m.files.fsync(&file, false).unwrap();
    m.commit_more();
    let mut runs = Vec::new();
    let begun = m.files.begin_write(&file, 0, BLOCK_SIZE, &mut runs);
    let writing = begun.unwrap().unwrap();
    fail_a_flush(&world.devices, &m.store);
    writing.land(Ok(())).unwrap_err();
    assert_eq!(m.files.fsync(&file, true).unwrap_err().errno(), libc::EIO);
    assert!(!m.store.read_only(), "no record named what is lost");
}

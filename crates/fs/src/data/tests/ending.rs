//! The end of a file system, in the middle of calls that change content.

use super::*;
use crate::namespace::meanwhile::{nobody_does, others_do};
use device::sim::Times as Strikes;
use std::io::IoSlice;

const OLD: u8 = 1;
const NEW: u8 = 2;
const PAGES: u64 = 8;

/// A file of pages that are home.
fn mounted(world: &World) -> (Mounted, Ino) {
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &[OLD; (PAGES * PAGE) as usize]);
    m.files.write_back_all().unwrap();
    m.commit_more();
    (m, ino)
}

/// As `FileSystem::close`.
fn end(files: &Files, store: &Store<FsNode>) -> Result<(), Error> {
    files.finish_writes();
    let written = files.end();
    store.close()?;
    written
}

/// What devices hold, durable and not. A write that fails may have changed a part of what it was for.
fn held(devices: &[Arc<SimDevice>]) -> Vec<(u64, Vec<Range<u64>>)> {
    let held = |device: &Arc<SimDevice>| (device.contents_hash(), device.cached_writes());
    devices.iter().map(held).collect()
}

/// They had been let in before, and changed bytes on the devices of a file system that had ended well; or in the cache, from where an fsync took them there.
#[test]
fn who_was_let_in_before_the_end_changes_nothing_after_it() {
    type Call = fn(&Files, &OpenFile) -> Result<(), Error>;
    const PAGE_NEW: [u8; PAGE as usize] = [NEW; PAGE as usize];
    let calls: [(i32, Call); 9] = [
        (libc::O_DIRECT, |files, file| {
            files.write(file, 0, &PAGE_NEW).map(drop)
        }),
        (libc::O_DIRECT, |files, file| {
            let data = [NEW; 2 * PAGE as usize];
            files.write(file, (PAGES - 1) * PAGE, &data).map(drop)
        }),
        (0, |files, file| {
            files.write(file, 100, &[NEW; 100]).map(drop)
        }),
        (0, |files, file| {
            let data = [NEW; 2 * PAGE as usize];
            files.write(file, 100, &data).map(drop)
        }),
        (0, |files, file| files.append(file, &[NEW; 100]).map(drop)),
        (0, |files, file| {
            files.write_now(file, PAGE, &PAGE_NEW).map(drop)
        }),
        (0, |files, file| {
            let part = [NEW; 400 << 10];
            let parts = [IoSlice::new(&part), IoSlice::new(&part)];
            files.write_vectored(file, 0, &parts).map(drop)
        }),
        (0, |files, file| {
            files.fallocate(file, libc::FALLOC_FL_ZERO_RANGE, 100, PAGE)
        }),
        (0, |files, file| files.truncate(file.ino(), 100)),
    ];
    for (i, (flags, call)) in calls.into_iter().enumerate() {
        let world = World::new(50, 64, 4096);
        let (m, ino) = mounted(&world);
        let file = m.files.open(&m.owners, ino, libc::O_RDWR | flags).unwrap();
        let (files, store) = (Arc::clone(&m.files), Arc::clone(&m.store));
        let (devices, at_end) = (world.devices.clone(), Arc::new(OnceLock::new()));
        let ended = Arc::clone(&at_end);
        others_do(move || {
            if ended.get().is_none() {
                end(&files, &store).unwrap();
                ended.set(held(&devices)).unwrap();
            }
        });
        let changed = call(&m.files, &file);
        nobody_does();
        assert!(matches!(changed, Err(Error::ReadOnly)), "{i}: {changed:?}");
        assert_eq!(m.files.dirty_pages(), 0, "{i}");
        drop(m.files.fsync(&file, true));
        drop(file);
        drop(m);
        assert!(Some(&held(&world.devices)) == at_end.get(), "{i}");
        let m = world.mount();
        assert!(m.contents(ino) == [OLD; (PAGES * PAGE) as usize], "{i}");
    }
}

/// A later fsync wrote what the end could not.
#[test]
fn what_could_not_be_written_at_the_end_is_not_written_later() {
    let world = World::new(51, 64, 4096);
    let (m, ino) = mounted(&world);
    let file = m.open(ino);
    m.write(&file, PAGE, &[NEW; PAGE as usize]);
    let block = m.files.mapped(&file.state, 1..2).unwrap()[0].block;
    let geometry = m.store.array().geometry();
    geometry.pieces(block.byte(), BLOCK_SIZE, |piece| {
        let range = piece.offset..piece.offset + piece.len as u64;
        world.devices[piece.device].fail_writes(Strikes::Always, Some(range));
    });
    assert_eq!(end(&m.files, &m.store).unwrap_err().errno(), libc::EIO);
    for device in &world.devices {
        device.heal();
    }
    let at_end = held(&world.devices);
    assert!(m.files.fsync(&file, true).is_err());
    drop(file);
    drop(m);
    assert!(held(&world.devices) == at_end);
}

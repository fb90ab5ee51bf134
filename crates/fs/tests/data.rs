//! File data through the whole file system, checked by fsck after every chapter.

#[path = "names/world.rs"]
mod world;

use base::rng::Rng;
use device::AlignedBuf;
use device::sim::Times;
use fs::{
    Advice, Attr, Caller, Error, FileSystem, FsOptions, Ino, OpenFile, ROOT, Request, SetAttr,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;
use world::{World, list};

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    Rng::new(seed).fill(&mut data);
    data
}

fn create(fs: &FileSystem, name: &[u8]) -> (Attr, Arc<OpenFile>) {
    fs.create(&Caller::root(), ROOT, name, 0o644, libc::O_RDWR)
        .unwrap()
}

fn contents(fs: &FileSystem, ino: Ino) -> Vec<u8> {
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut buf = vec![0; fs.getattr(ino).unwrap().size as usize];
    assert_eq!(fs.read(&file, 0, &mut buf).unwrap(), buf.len());
    buf
}

/// Nothing of a file is left, and so many blocks are free.
fn is_gone(world: &mut World, fs: Arc<FileSystem>, ino: Ino, free: u64) {
    assert!(matches!(fs.getattr(ino), Err(Error::Stale(_))));
    fs.sync().unwrap();
    assert_eq!(fs.statfs().blocks_free, free);
    let fs = world.remount(fs);
    fs.close().unwrap();
    world.check();
}

#[test]
fn an_unlinked_open_file_keeps_its_data_until_it_is_closed() {
    let mut world = World::new(2, 32 << 20, 1);
    let fs = world.open();
    let before = {
        fs.sync().unwrap();
        fs.statfs().blocks_free
    };
    let (attr, file) = create(&fs, b"doomed");
    let data = pattern(1, 4 << 20);
    fs.write(&file, 0, &data).unwrap();
    fs.unlink(&Caller::root(), ROOT, b"doomed").unwrap();
    assert_eq!(contents(&fs, attr.ino), data);
    fs.fsync(&file, false).unwrap();
    assert_eq!(contents(&fs, attr.ino), data);
    drop(file);
    is_gone(&mut world, fs, attr.ino, before);
}

/// A file `doomed` with a byte in every second page, so that the mapping has some leaves; synced.
fn scattered(fs: &FileSystem) -> (Attr, Arc<OpenFile>) {
    let (attr, file) = create(fs, b"doomed");
    for page in 0..4000 {
        fs.write(&file, page * 2 * 4096, &[7]).unwrap();
    }
    fs.fsync(&file, false).unwrap();
    (attr, file)
}

/// It is listed among those without a name, and those whose cut takes several records are, too.
#[test]
fn a_file_without_a_name_is_cut_in_steps_and_goes_on() {
    let mut world = World::new(2, 64 << 20, 11);
    let fs = world.open();
    fs.sync().unwrap();
    let before = fs.statfs().blocks_free;
    let (attr, file) = scattered(&fs);
    fs.unlink(&Caller::root(), ROOT, b"doomed").unwrap();
    for size in [6000 * 4096, 100 * 4096 + 1, 0] {
        fs.truncate(&Caller::root(), attr.ino, size).unwrap();
        let found = contents(&fs, attr.ino);
        assert_eq!(found.len() as u64, size);
        let odd = |(i, byte): (usize, &u8)| *byte != 7 * u8::from(i.is_multiple_of(2 * 4096));
        assert!(!found.iter().enumerate().any(odd));
        fs.fsync(&file, false).unwrap();
    }
    fs.write(&file, 0, b"more").unwrap();
    assert_eq!(contents(&fs, attr.ino), b"more");
    drop(file);
    is_gone(&mut world, fs, attr.ino, before);
}

/// It goes all the same, when it is closed or with the next mount.
#[test]
fn a_file_without_a_name_whose_cut_stopped_half_way_is_deleted() {
    for crashes in [false, true] {
        let mut world = World::new(2, 64 << 20, 12);
        let fs = world.open();
        fs.sync().unwrap();
        let before = fs.statfs().blocks_free;
        let (attr, file) = scattered(&fs);
        drop(file);
        let mut fs = world.remount(fs);
        let file = fs.open_file(attr.ino, libc::O_RDWR).unwrap();
        fs.unlink(&Caller::root(), ROOT, b"doomed").unwrap();
        // The leaves are not in memory; one of them cannot be read now.
        world.switch.fail_after(4, Times::Next(1));
        let cut = fs.truncate(&Caller::root(), attr.ino, 5 * 4096);
        assert!(cut.is_err(), "{cut:?}");
        assert_eq!(fs.getattr(attr.ino).unwrap().size, 5 * 4096);
        assert!(fs.getattr(attr.ino).unwrap().blocks > 3 * 8);
        fs.sync().unwrap();
        if crashes {
            world.switch.cut_now();
            drop((file, fs));
            world.restart(&mut Rng::new(1));
            fs = world.open();
        } else {
            drop(file);
        }
        assert!(matches!(fs.getattr(attr.ino), Err(Error::Stale(_))));
        fs.sync().unwrap();
        assert_eq!(fs.statfs().blocks_free, before);
        fs.close().unwrap();
        assert_eq!(world.check().orphans, 0);
    }
}

/// Who adds the rest finds nothing twice.
#[test]
fn an_append_that_a_device_stops_tells_how_far_it_came() {
    let mut world = World::new(2, 64 << 20, 13);
    world.options.data.cache_bytes = 1 << 20;
    let fs = world.open();
    let (attr, file) = create(&fs, b"log");
    let mut expected = vec![1; 100];
    fs.write(&file, 0, &expected).unwrap();
    fs.fsync(&file, false).unwrap();
    let data = pattern(1, 1_000_000);
    // More than the cache takes: some pages have to go home.
    for device in &world.devices {
        device.fail_writes(Times::Next(1), None);
    }
    let (at, written) = fs.append(&file, &data).unwrap();
    assert_eq!(at, 100);
    assert!(written > 0 && written < data.len(), "{written} bytes");
    let size = |fs: &FileSystem| fs.getattr(attr.ino).unwrap().size;
    assert_eq!(size(&fs), 100 + written as u64);
    world.devices.iter().for_each(|device| device.heal());
    let rest = &data[written..];
    let appended = fs.append(&file, rest).unwrap();
    assert_eq!(appended, (100 + written as u64, rest.len()));
    expected.extend(&data);
    assert!(contents(&fs, attr.ino) == expected);
}

/// Past the cache, and whichever transfer fails.
#[test]
fn a_direct_write_that_a_device_stops_tells_how_far_it_came() {
    const STEP: usize = 1 << 20;
    let mut data = AlignedBuf::zeroed(3 * STEP);
    data.copy_from_slice(&pattern(2, 3 * STEP));
    let mut told = BTreeSet::new();
    for transfer in 0.. {
        let world = World::new(2, 64 << 20, 14);
        let fs = world.open();
        let made = fs.create(
            &Caller::root(),
            ROOT,
            b"direct",
            0o644,
            libc::O_RDWR | libc::O_DIRECT,
        );
        let (attr, file) = made.unwrap();
        world.switch.fail_after(transfer, Times::Next(1));
        let result = fs.write(&file, 0, &data);
        world.switch.fail_after(0, Times::Next(0));
        let written = result.as_ref().map_or(0, |written| *written);
        assert_eq!(fs.getattr(attr.ino).unwrap().size, written as u64);
        assert!(contents(&fs, attr.ino) == data[..written]);
        told.insert(result.ok());
        if written == data.len() {
            break;
        }
    }
    assert!(
        told == [None, Some(STEP), Some(2 * STEP), Some(3 * STEP)].into(),
        "{told:?}"
    );
}

/// As a write does that a device stops.
#[test]
fn a_copy_that_a_device_stops_tells_how_far_it_came() {
    const LEN: usize = 3 << 20;
    let data = pattern(3, LEN);
    let mut told = BTreeSet::new();
    for transfer in 0.. {
        let mut world = World::new(2, 64 << 20, 15);
        let fs = world.open();
        let (attr, file) = create(&fs, b"from");
        fs.write(&file, 0, &data).unwrap();
        fs.fsync(&file, false).unwrap();
        drop(file);
        let fs = world.remount(fs);
        let from = fs.open_file(attr.ino, libc::O_RDONLY).unwrap();
        let (attr, to) = create(&fs, b"to");
        world.switch.fail_after(transfer, Times::Always);
        let result = fs.copy_range(&from, 0, &to, 0, LEN as u64);
        world.switch.fail_after(0, Times::Next(0));
        let copied = result.as_ref().map_or(0, |copied| *copied as usize);
        assert_eq!(fs.getattr(attr.ino).unwrap().size, copied as u64);
        assert!(contents(&fs, attr.ino) == data[..copied]);
        told.insert(result.ok());
        if copied == LEN {
            break;
        }
    }
    assert!(told.contains(&None) && told.len() > 2, "{told:?}");
}

/// What a cut that failed took, and the file had grown by, showed again behind the end.
#[test]
fn what_a_cut_that_failed_took_does_not_show_again() {
    let mut world = World::new(2, 64 << 20, 16);
    let fs = world.open();
    let (attr, file) = create(&fs, b"f");
    fs.write(&file, 0, &[1; 900]).unwrap();
    // Behind the end, so that the mapping has leaves there.
    for page in 1..7000 {
        fs.fallocate(&file, libc::FALLOC_FL_KEEP_SIZE, page * 2 * 4096, 4096)
            .unwrap();
    }
    fs.fsync(&file, false).unwrap();
    drop(file);
    let fs = world.remount(fs);
    let file = fs.open_file(attr.ino, libc::O_RDWR).unwrap();
    fs.write(&file, 900, &[9; 8192]).unwrap();
    world.switch.fail_after(0, Times::Always);
    let cut = fs.truncate(&Caller::root(), attr.ino, 100);
    assert!(cut.is_err(), "{cut:?}");
    world.switch.fail_after(0, Times::Next(0));
    let size = fs.getattr(attr.ino).unwrap().size;
    assert_eq!(size, 900);
    fs.write(&file, 3000, &[7]).unwrap();
    let found = contents(&fs, attr.ino);
    assert_eq!(found.len(), 3001);
    assert!(found[..900] == [1; 900] && found[900..3000].iter().all(|byte| *byte == 0));
}

#[test]
fn stat_shows_size_and_time_of_a_write_at_once() {
    let world = World::new(2, 32 << 20, 2);
    let fs = world.open();
    let (attr, file) = create(&fs, b"f");
    world.clock.advance(Duration::from_secs(5));
    fs.write(&file, 10_000, b"x").unwrap();
    let after = fs.getattr(attr.ino).unwrap();
    assert_eq!(after.size, 10_001);
    assert!(after.blocks > 0 && after.mtime > attr.mtime && after.ctime > attr.ctime);
    // An explicit time wins over the one that write left in memory.
    let set = SetAttr {
        mtime: Some(fs::SetTime::At(base::clock::Timestamp::new(77, 5))),
        ..SetAttr::default()
    };
    fs.setattr(&Caller::root(), attr.ino, &set).unwrap();
    fs.fsync(&file, false).unwrap();
    assert_eq!(fs.getattr(attr.ino).unwrap().mtime.sec(), 77);
    drop(file);
    fs.close().unwrap();
    drop(fs);
    let fs = world.open();
    assert_eq!(fs.getattr(attr.ino).unwrap().mtime.sec(), 77);
    fs.close().unwrap();
    world.check();
}

#[test]
fn a_large_fragmented_file_is_sound_through_growth_punches_and_truncation() {
    let mut world = World::new(2, 64 << 20, 3);
    let mut fs = world.open();
    let mut rng = Rng::new(3);
    let (attr, file) = create(&fs, b"big");
    let mut file = Some(file);
    let mut model: BTreeMap<u64, u8> = BTreeMap::new();
    for round in 0..6u64 {
        for _ in 0..1_500 {
            let page = rng.below(20_000);
            let byte = rng.below(255) as u8 + 1;
            fs.write(file.as_ref().unwrap(), page * 4096, &[byte])
                .unwrap();
            model.insert(page, byte);
        }
        for _ in 0..20 {
            let (page, len) = (rng.below(20_000), rng.below(200) + 1);
            fs.fallocate(file.as_ref().unwrap(), PUNCH, page * 4096, len * 4096)
                .unwrap();
            model.retain(|p, _| !(page..page + len).contains(p));
        }
        let cut = 20_000 - round * 2_000;
        let set = SetAttr {
            size: Some(cut * 4096),
            ..SetAttr::default()
        };
        fs.setattr(&Caller::root(), attr.ino, &set).unwrap();
        model.retain(|p, _| *p < cut);
        drop(file.take());
        fs = world.remount(fs);
        let reader = fs.open_file(attr.ino, libc::O_RDWR).unwrap();
        for (page, byte) in &model {
            let mut found = [0];
            fs.read(&reader, page * 4096, &mut found).unwrap();
            assert_eq!(found[0], *byte, "page {page}");
        }
        file = Some(reader);
    }
    drop(file);
    fs.close().unwrap();
    drop(fs);
    world.check();
    let fs = world.open();
    fs.unlink(&Caller::root(), ROOT, b"big").unwrap();
    fs.close().unwrap();
    world.check();
}

/// Where one leaf of its extents ends and the next one begins, which then has nothing left.
#[test]
fn a_file_is_sound_wherever_it_is_cut() {
    let mut world = World::new(2, 64 << 20, 4);
    let mut fs = world.open();
    let (attr, file) = create(&fs, b"long");
    for page in (0..1_400).step_by(2) {
        fs.write(&file, page * 4096, &[page as u8 | 1]).unwrap();
    }
    drop(file);
    // A leaf takes 600.
    for page in (1_190..=1_210).rev().step_by(2) {
        let set = SetAttr {
            size: Some(page * 4096),
            ..SetAttr::default()
        };
        fs.setattr(&Caller::root(), attr.ino, &set).unwrap();
        fs = world.remount(fs);
        assert_eq!(fs.getattr(attr.ino).unwrap().blocks, page / 2 * 8);
    }
    fs.unlink(&Caller::root(), ROOT, b"long").unwrap();
    fs.close().unwrap();
    world.check();
}

/// Nobody has to touch the file for that.
#[test]
fn a_long_cut_that_the_power_interrupts_is_finished_by_the_next_mount() {
    for requests in 0..100 {
        let mut world = World::new(2, 64 << 20, 5);
        // Each record waits for the batch of the one before.
        world.options.store.staging_bytes = 1;
        let fs = world.open();
        let (attr, file) = create(&fs, b"long");
        for page in (0..6_000).step_by(2) {
            fs.write(&file, page * 4096, &[1]).unwrap();
        }
        fs.sync().unwrap();
        let look = |fs: &FileSystem| {
            let attr = fs.getattr(attr.ino).unwrap();
            (attr.size, attr.blocks)
        };
        let whole = look(&fs);
        let set = SetAttr {
            size: Some(4096),
            ..SetAttr::default()
        };
        world.switch.cut_after(requests);
        let cut = fs.setattr(&Caller::root(), attr.ino, &set);
        world.switch.cut_now();
        drop((file, fs));
        world.restart(&mut Rng::new(requests));
        let fs = world.open();
        let found = look(&fs);
        assert!(found == whole || found == (4096, 8), "{found:?}");
        fs.close().unwrap();
        if cut.is_ok() {
            assert!(requests > 2);
            return;
        }
    }
    panic!("it takes more requests than that");
}

#[test]
fn a_full_file_system_refuses_data_and_takes_deletions() {
    let world = World::new(2, 32 << 20, 4);
    let fs = world.open();
    let mut made = 0;
    let data = pattern(4, 300_000);
    'full: loop {
        let name = format!("f{made}");
        let Ok((_, file)) = fs.create(&Caller::root(), ROOT, name.as_bytes(), 0o644, libc::O_RDWR)
        else {
            break;
        };
        made += 1;
        let mut at = 0;
        while at < data.len() {
            match fs.write(&file, at as u64, &data[at..]) {
                Ok(n) => at += n,
                Err(Error::NoSpace) => break 'full,
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(made > 100, "{made} files fit");
    fs.sync().unwrap();
    for i in 0..made {
        let name = format!("f{i}");
        fs.unlink(&Caller::root(), ROOT, name.as_bytes()).unwrap();
    }
    assert_eq!(list(&fs, ROOT, 10), []);
    let (_, file) = create(&fs, b"again");
    fs.write(&file, 0, &pattern(5, 10 << 20)).unwrap();
    fs.fsync(&file, false).unwrap();
    drop(file);
    fs.close().unwrap();
    world.check();
}

#[test]
fn replacing_by_rename_without_fsync_leaves_old_or_new() {
    for seed in 0..25 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(2, 32 << 20, seed);
        let (old, new) = (pattern(1, 50_000), pattern(2, 70_000));
        let fs = world.open();
        let (_, file) = create(&fs, b"config");
        fs.write(&file, 0, &old).unwrap();
        fs.sync().unwrap();
        drop(file);
        world.switch.cut_after(rng.below(12));
        let replace = || -> Result<(), Error> {
            let root = Caller::root();
            let (_, file) = fs.create(&root, ROOT, b"config.new", 0o644, libc::O_RDWR)?;
            fs.write(&file, 0, &new)?;
            drop(file);
            fs.rename(&root, ROOT, b"config.new", ROOT, b"config", 0)?;
            fs.store().sync()?;
            Ok(())
        };
        let _ = replace();
        world.switch.cut_now();
        drop(fs);
        world.restart(&mut rng);
        let fs = world.open();
        let found = contents(&fs, fs.lookup(ROOT, b"config").unwrap().ino);
        assert!(found == old || found == new, "seed {seed}");
        fs.close().unwrap();
        world.check();
    }
}

/// The content of what had got the other name by an exchange was nowhere.
#[test]
fn exchanging_without_fsync_leaves_all_of_either_content() {
    for (seed, by_transaction) in (0..50).map(|i| (i / 2, i % 2 == 1)) {
        let mut rng = Rng::new(seed);
        let mut world = World::new(2, 32 << 20, seed);
        let (old, new) = (pattern(1, 50_000), pattern(2, 70_000));
        let fs = world.open();
        let (_, file) = create(&fs, b"old");
        fs.write(&file, 0, &old).unwrap();
        fs.sync().unwrap();
        drop(file);
        world.switch.cut_after(rng.below(12));
        // Either may be named first.
        let mut names = [&b"old"[..], b"new"];
        names.rotate_left(rng.below(2) as usize);
        let exchange = || -> Result<(), Error> {
            let root = Caller::root();
            let (_, file) = fs.create(&root, ROOT, b"new", 0o644, libc::O_RDWR)?;
            fs.write(&file, 0, &new)?;
            drop(file);
            if by_transaction {
                let mut tx = fs.transaction(&root)?;
                tx.rename(ROOT, names[0], ROOT, names[1], fs::RENAME_EXCHANGE)?;
                return tx.commit();
            }
            fs.rename(&root, ROOT, names[0], ROOT, names[1], fs::RENAME_EXCHANGE)?;
            Ok(fs.store().sync()?)
        };
        let _ = exchange();
        world.switch.cut_now();
        drop(fs);
        world.restart(&mut rng);
        let fs = world.open();
        let old_ino = fs.lookup(ROOT, b"old").unwrap().ino;
        let found = contents(&fs, old_ino);
        assert!(
            found == old || found == new,
            "seed {seed}, {by_transaction}"
        );
        if found == new {
            let ino = fs.lookup(ROOT, b"new").unwrap().ino;
            assert!(contents(&fs, ino) == old, "seed {seed}, {by_transaction}");
        }
        fs.close().unwrap();
        world.check();
    }
}

/// Threads work on files of their own and on one that they share, with the background
/// threads running and hardly any memory.
#[test]
fn threads_share_a_small_cache() {
    let mut world = World::new(3, 32 << 20, 5);
    world.options.store.background = true;
    world.options.store.clock = base::clock::Clock::real();
    world.options.store.node_cache_bytes = 64 << 10;
    world.options.data.cache_bytes = 64 * 4096;
    world.options.data.write_back_age = Duration::ZERO;
    let fs = world.open();
    let root = Caller::root();
    let (shared, _) = create(&fs, b"shared");
    base::thread::parallel(4, |t| {
        let mut rng = Rng::new(t as u64);
        let name = |i: u64| format!("t{t}-{i}").into_bytes();
        let mut model: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        let common = fs.open_file(shared.ino, libc::O_RDWR).unwrap();
        for round in 0..500u64 {
            let which = rng.below(4);
            // Each thread owns every fourth page of the shared file.
            let page = rng.below(50) * 4 + t as u64;
            fs.write(&common, page * 4096, &[t as u8 + 1; 4096])
                .unwrap();
            let mut seen = [0; 4096];
            fs.read(&common, page * 4096, &mut seen).unwrap();
            assert!(seen.iter().all(|&b| b == t as u8 + 1));
            match (rng.below(8), model.contains_key(&which)) {
                (0, true) => {
                    fs.unlink(&root, ROOT, &name(which)).unwrap();
                    model.remove(&which);
                }
                (1, true) => {
                    let to = name(which + 10);
                    fs.rename(&root, ROOT, &name(which), ROOT, &to, 0).unwrap();
                    fs.rename(&root, ROOT, &to, ROOT, &name(which), 0).unwrap();
                }
                (2, true) => {
                    let ino = fs.lookup(ROOT, &name(which)).unwrap().ino;
                    assert!(contents(&fs, ino) == model[&which]);
                }
                (3, true) => {
                    let ino = fs.lookup(ROOT, &name(which)).unwrap().ino;
                    let size = rng.below(40_000);
                    fs.truncate(&root, ino, size).unwrap();
                    let bytes = model.get_mut(&which).unwrap();
                    bytes.resize(size as usize, 0);
                }
                (_, true) => {
                    let ino = fs.lookup(ROOT, &name(which)).unwrap().ino;
                    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
                    let data = pattern(round, rng.below(30_000) as usize + 1);
                    let at = rng.below(30_000) as usize;
                    fs.write(&file, at as u64, &data).unwrap();
                    let bytes = model.get_mut(&which).unwrap();
                    bytes.resize(bytes.len().max(at + data.len()), 0);
                    bytes[at..at + data.len()].copy_from_slice(&data);
                    if rng.one_in(5) {
                        fs.fsync(&file, rng.one_in(2)).unwrap();
                    }
                }
                (_, false) => {
                    create(&fs, &name(which));
                    model.insert(which, Vec::new());
                }
            }
        }
        for (which, bytes) in model {
            let ino = fs.lookup(ROOT, &name(which)).unwrap().ino;
            assert!(contents(&fs, ino) == bytes);
        }
    });
    fs.close().unwrap();
    drop(fs);
    world.check();
}

/// What programs never sync: a small and a large new file, one overwritten in place and still
/// open, one being written anew, and three hundred that go to the devices in batches. With the
/// default options a power cut 30 s later finds all of it.
#[test]
fn data_is_durable_within_thirty_seconds() {
    let mut world = World::new(2, 64 << 20, 9);
    let fs = world.open();
    let (old, new) = (pattern(1, 50_000), pattern(2, 50_000));
    let (_, in_place) = create(&fs, b"in-place");
    fs.write(&in_place, 0, &old).unwrap();
    let (anew, rewritten) = create(&fs, b"anew");
    fs.write(&rewritten, 0, &old).unwrap();
    fs.sync().unwrap();

    let mut expected: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    let mut open = Vec::new();
    fs.write(&in_place, 0, &new).unwrap();
    expected.push((b"in-place".to_vec(), new.clone()));
    fs.truncate(&Caller::root(), anew.ino, 0).unwrap();
    fs.write(&rewritten, 0, &new).unwrap();
    expected.push((b"anew".to_vec(), new));
    for (i, len) in [3usize, 900, 3_000_000]
        .into_iter()
        .chain([9_000; 300])
        .enumerate()
    {
        let name = format!("f{i}").into_bytes();
        let (_, file) = create(&fs, &name);
        let data = pattern(100 + i as u64, len);
        fs.write(&file, 0, &data).unwrap();
        expected.push((name, data));
        open.push(file);
    }
    for _ in 0..30 {
        world.clock.advance(Duration::from_secs(1));
        fs.tick().unwrap();
        // The commit thread, which a real clock would drive.
        fs.store().commit_through(fs.store().epoch()).unwrap();
    }
    world.switch.cut_now();
    drop((open, in_place, rewritten, fs));
    world.restart(&mut Rng::new(9));
    let fs = world.open();
    for (name, data) in expected {
        let ino = fs.lookup(ROOT, &name).unwrap().ino;
        assert!(contents(&fs, ino) == data, "{}", name.escape_ascii());
    }
    fs.close().unwrap();
    world.check();
}

/// The files have the same number, so that each call would do it to the other one.
#[test]
fn a_file_handle_is_of_one_file_system() {
    let (world, others) = (World::new(1, 64 << 20, 8), World::new(1, 64 << 20, 9));
    let (fs, other) = (world.open(), others.open());
    let ((_, own), (_, file)) = (create(&fs, b"file"), create(&other, b"file"));
    assert_eq!(own.ino(), file.ino());
    fs.write(&own, 0, b"ours").unwrap();
    other.write(&file, 0, b"theirs").unwrap();
    let refused = |what: &str, done: Result<(), Error>| {
        assert!(matches!(done, Err(Error::Invalid(_))), "{what}: {done:?}");
    };
    let mut bytes = [0; 8];
    refused("read", fs.read(&file, 0, &mut bytes).map(drop));
    let mut parts = [IoSliceMut::new(&mut bytes)];
    refused(
        "read_vectored",
        fs.read_vectored(&file, 0, &mut parts).map(drop),
    );
    refused("read_guards", fs.read_guards(&file, 0, 8).map(drop));
    refused("write", fs.write(&file, 0, b"no").map(drop));
    let parts = [IoSlice::new(b"n"), IoSlice::new(b"o")];
    refused(
        "write_vectored",
        fs.write_vectored(&file, 0, &parts).map(drop),
    );
    refused("append", fs.append(&file, b"no").map(drop));
    refused("flush", fs.flush(&file));
    refused("fsync", fs.fsync(&file, false));
    refused("write_range", fs.write_range(&file, 0, 8, true));
    refused("advise", fs.advise(&file, 0, 8, Advice::DontNeed));
    refused("fallocate", fs.fallocate(&file, PUNCH, 0, 4096));
    refused("seek", fs.seek(&file, 0, libc::SEEK_DATA).map(drop));
    refused(
        "copy_range from",
        fs.copy_range(&file, 0, &own, 0, 2).map(drop),
    );
    refused(
        "copy_range to",
        fs.copy_range(&own, 0, &file, 0, 2).map(drop),
    );
    let atomic = fs.atomic_write(&Caller::root(), &file).map(drop);
    refused("atomic_write", atomic);
    assert_eq!(contents(&fs, own.ino()), b"ours");
    assert_eq!(contents(&other, file.ino()), b"theirs");
    drop((own, file));
    fs.close().unwrap();
    other.close().unwrap();
}

#[test]
fn what_is_open_for_writing_alone_is_not_read() {
    let world = World::new(1, 64 << 20, 10);
    let fs = world.open();
    let (attr, whole) = create(&fs, b"file");
    for direct in [0, libc::O_DIRECT] {
        let flags = libc::O_WRONLY | direct;
        let file = fs.open_file(attr.ino, flags).unwrap();
        assert_eq!(fs.write(&file, 0, &[7; 8192]).unwrap(), 8192);
        let refused = |what: &str, done: Result<usize, Error>| {
            assert!(matches!(done, Err(Error::BadHandle)), "{what}: {done:?}");
        };
        let mut bytes = [0; 100];
        refused("read", fs.read(&file, 0, &mut bytes));
        refused("read at the end", fs.read(&file, 8192, &mut bytes));
        let (one, other) = bytes.split_at_mut(50);
        let parts = &mut [IoSliceMut::new(one), IoSliceMut::new(other)];
        refused("read_vectored", fs.read_vectored(&file, 0, parts));
        refused(
            "read_guards",
            fs.read_guards(&file, 0, 100).map(|g| g.len()),
        );
        let copied = fs.copy_range(&file, 0, &whole, 8192, 0);
        refused("copy_range", copied.map(|len| len as usize));
        let mut context = fs.io_context(1).unwrap();
        let request = Request::Read {
            file: Arc::clone(&file),
            offset: 0,
            buf: AlignedBuf::zeroed(4096),
        };
        assert_eq!(context.submit(&mut vec![(0, request)]), 1);
        let mut done = Vec::new();
        context.wait(1, &mut done, None);
        refused("a request", done.remove(0).result);
        assert_eq!(fs.seek(&file, 0, libc::SEEK_HOLE).unwrap(), 8192);
    }
    drop(whole);
    assert_eq!(contents(&fs, attr.ino), [7; 8192]);
    fs.close().unwrap();
}

/// More than any machine has would end the program when it is asked for.
#[test]
fn a_limit_of_memory_is_no_more_than_the_machine_has() {
    let options = FsOptions::default().with_memory(usize::MAX);
    let wanted = [options.data.cache_bytes, options.store.node_cache_bytes];
    let all = base::sys::memory_bytes();
    assert!(wanted.iter().sum::<usize>() as u64 <= all && all < u64::MAX);
}

/// Blocks that the file had elsewhere counted: what could never be allocated filled the array first, and gave nothing back.
#[test]
fn a_range_that_is_larger_than_what_is_free_takes_nothing() {
    let world = World::new(2, 32 << 20, 14);
    let fs = world.open();
    let (attr, file) = create(&fs, b"large");
    let mut size = 0;
    while fs.statfs().blocks_available * 4096 > 12 << 20 {
        size += fs.write(&file, size, &vec![1; 1 << 20]).unwrap() as u64;
    }
    // Behind that, so many holes that records of several steps allocate them.
    let (start, pages) = (size + (1 << 20), (fs.statfs().blocks_free / 15 + 40) * 16);
    for page in (0..pages).step_by(16) {
        let written = fs.write(&file, start + page * 4096, &[3; 4096]);
        assert_eq!(written.unwrap(), 4096);
    }
    fs.fsync(&file, false).unwrap();
    let free = || {
        fs.sync().unwrap();
        fs.statfs().blocks_free
    };
    let (before, size) = (free(), fs.getattr(attr.ino).unwrap().size);
    for mode in [libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_ZERO_RANGE, 0] {
        let refused = fs.fallocate(&file, mode, start, pages * 4096);
        assert!(matches!(refused, Err(Error::NoSpace)), "{refused:?}");
        assert_eq!((free(), fs.getattr(attr.ino).unwrap().size), (before, size));
    }
    // Written, and dirty: each page of a larger range has a block, or is promised one.
    let end = start + (8 << 20);
    for at in (start..end).step_by(1 << 20) {
        assert_eq!(fs.write(&file, at, &vec![2; 1 << 20]).unwrap(), 1 << 20);
    }
    assert!(end / 4096 - 256 > fs.statfs().blocks_free);
    fs.fallocate(&file, 0, 1 << 20, end - (1 << 20)).unwrap();
    fs.fallocate(&file, libc::FALLOC_FL_ZERO_RANGE, 0, end)
        .unwrap();
    assert_eq!(fs.getattr(attr.ino).unwrap().size, size);
    drop((file, fs));
    world.check();
}

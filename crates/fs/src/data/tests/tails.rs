//! Pages that fsync logs instead of writing them.

use super::*;
use crate::data::fsync::Syncing;
use crate::data::tail::{HOME_SHARE, How};
use crate::data::writeback::Take;
use device::sim::Times as Strikes;

/// Writes and flushes that the devices were asked for, the flush in a durable write not counted.
fn requests(m: &Mounted) -> (u64, u64) {
    let stats = m.store.array().stats();
    let of = |get: fn(&device::DeviceStats) -> u64| stats.devices.iter().map(get).sum::<u64>();
    (of(|d| d.writes), of(|d| d.flushes))
}

fn written(m: &Mounted) -> u64 {
    let stats = m.store.array().stats();
    stats.devices.iter().map(|d| d.written_bytes).sum()
}

impl Mounted {
    /// The bytes of the file's tail.
    fn tail(&self, ino: Ino) -> Option<Vec<u8>> {
        self.inode(ino).tail.map(|tail| tail.bytes)
    }

    fn append(&self, file: &OpenFile, bytes: &mut Vec<u8>, more: &[u8]) {
        self.write(file, bytes.len() as u64, more);
        bytes.extend_from_slice(more);
    }
}

/// A handle by which writes go past the cache.
fn past(m: &Mounted, ino: Ino) -> Arc<OpenFile> {
    let flags = libc::O_RDWR | libc::O_DIRECT;
    m.files.open(&m.owners, ino, flags).unwrap()
}

/// The power goes now, and nothing survives that was not flushed.
fn cut(world: &mut World, m: Mounted) -> Mounted {
    world.switch.cut_now();
    drop(m);
    cut_now(world)
}

/// The same where nothing is mounted.
fn cut_now(world: &mut World) -> Mounted {
    world.switch.restore();
    world.devices = world
        .devices
        .iter()
        .map(|d| d.restart_with(device::sim::Survival::None, &mut Rng::new(1)))
        .collect();
    world.mount()
}

/// A file of 9,000 bytes at home, and its content.
fn settled(m: &Mounted) -> (Ino, Vec<u8>) {
    let ino = m.make();
    let bytes = pattern(7, 9_000);
    m.write(&m.open(ino), 0, &bytes);
    m.files.write_back_all().unwrap();
    m.store.sync().unwrap();
    (ino, bytes)
}

#[test]
fn an_overwrite_is_one_write_and_survives() {
    let mut world = World::new(59, 64, 256);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    m.write(&file, 4096, &pattern(1, 4096));
    m.files.fsync(&file, true).unwrap();
    let before = requests(&m);
    for i in 0..30 {
        let new = pattern(i, 4096);
        m.write(&file, 0, &new);
        bytes[..4096].copy_from_slice(&new);
        m.files.fsync(&file, true).unwrap();
    }
    let (writes, flushes) = requests(&m);
    assert_eq!((writes - before.0, flushes - before.1), (30, 0));
    bytes[4096..8192].copy_from_slice(&pattern(1, 4096));
    drop(file);
    let m = cut(&mut world, m);
    assert_eq!(m.contents(ino), bytes);
}

/// What is written in two places, and what is synced beside others, is flushed once for all.
#[test]
fn several_overwrites_share_a_flush_and_survive() {
    let mut world = World::new(58, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let mut bytes = pattern(7, 40_960);
    m.write(&file, 0, &bytes);
    m.files.fsync(&file, true).unwrap();
    m.commit_more();
    let mut put = |page: usize, i| {
        let at = page * 4096;
        bytes[at..at + 4096].copy_from_slice(&pattern(i, 4096));
        m.write(&file, at as u64, &pattern(i, 4096));
    };
    let before = requests(&m);
    put(1, 1);
    put(7, 2);
    m.files.fsync(&file, true).unwrap();
    let (writes, flushes) = requests(&m);
    assert_eq!((writes - before.0, flushes - before.1), (2, 1));
    put(3, 3);
    let other = Syncing::begin(&m.files.syncing);
    m.files.fsync(&file, true).unwrap();
    drop(other);
    let (writes, flushes) = requests(&m);
    assert_eq!((writes - before.0, flushes - before.1), (3, 2));
    put(3, 4);
    m.files.fsync(&file, true).unwrap();
    let (writes, flushes) = requests(&m);
    assert_eq!((writes - before.0, flushes - before.1), (4, 2));
    drop(file);
    let m = cut(&mut world, m);
    assert_eq!(m.contents(ino), bytes);
}

/// Two flush for a file, and it is written again between the end of the one and that of the other. The count of what was
/// not flushed was then what it had been: the second took the new write for flushed as well, and so did the next sync.
#[test]
fn a_flush_is_not_taken_for_one_of_what_was_written_during_it() {
    let mut world = World::new(57, 64, 256);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    let write_home = |i| {
        m.write(&file, 0, &pattern(i, 4096));
        m.files.write_back(ino).unwrap();
    };
    write_home(1);
    let (first, second) = (m.files.written_in_place(), m.files.written_in_place());
    m.store.flush().unwrap();
    m.files.flushed(first, 0);
    write_home(2);
    m.files.flushed(second, 0);
    m.files.fsync(&file, true).unwrap();
    bytes[..4096].copy_from_slice(&pattern(2, 4096));
    drop(file);
    let m = cut(&mut world, m);
    assert_eq!(m.contents(ino), bytes);
}

/// So do records, which are another way for a write to become durable.
#[test]
fn a_flush_is_not_taken_for_one_of_what_was_written_after_a_record() {
    let mut world = World::new(56, 64, 256);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    let write_home = |i| {
        m.write(&file, 0, &pattern(i, 4096));
        m.files.write_back(ino).unwrap();
    };
    write_home(1);
    let waiting = m.files.written_in_place();
    m.append(&file, &mut bytes, &pattern(3, 5000));
    m.files.fsync(&file, true).unwrap();
    write_home(2);
    m.files.flushed(waiting, 0);
    m.files.fsync(&file, true).unwrap();
    bytes[..4096].copy_from_slice(&pattern(2, 4096));
    drop(file);
    let m = cut(&mut world, m);
    assert_eq!(m.contents(ino), bytes);
}

/// A flush waits for one device, and meanwhile something is written to another, which has done with it.
#[test]
fn a_flush_that_is_under_way_is_not_taken_for_one_of_what_is_written_beside_it() {
    let world = World::new(64, 64, 256);
    let m = world.mount();
    let ino = m.make();
    m.write(&m.open(ino), 0, &pattern(7, 73 * 4096));
    m.files.write_back_all().unwrap();
    m.store.sync().unwrap();
    let file = past(&m, ino);
    let geometry = m.store.array().geometry();
    let device_of = |page: u64| {
        let extent = m.files.mapped(&file.state, page..page + 1).unwrap()[0];
        let mut device = None;
        geometry.pieces(extent.block.byte(), BLOCK_SIZE, |piece| {
            device = Some(piece.device);
        });
        device
    };
    let on = |device| {
        (0..73)
            .find(|page| device_of(*page) == Some(device))
            .unwrap()
    };
    let (slow, fast) = (on(0), on(1));
    m.write(&file, slow * PAGE, &pattern(1, 4096));
    world.devices[0].stick();
    base::thread::parallel(2, |thread| {
        if thread == 0 {
            return m.files.fsync(&file, true).unwrap();
        }
        while world.devices[0].waiting() == 0 {
            base::thread::yield_now();
        }
        m.write(&file, fast * PAGE, &pattern(2, 4096));
        world.devices[0].release();
    });
    m.files.fsync(&file, true).unwrap();
    assert!(world.devices.iter().all(|d| d.volatile_bytes() == 0));
}

/// A record is about to be logged, and then something is written past the cache: the record's commit may have flushed before that.
#[test]
fn a_record_is_not_taken_for_a_flush_of_what_was_written_since_it_was_begun() {
    let world = World::new(65, 64, 256);
    let m = world.mount();
    let (ino, _) = settled(&m);
    let file = past(&m, ino);
    let (logged, _) = m.files.about_to_log(&file.state, None);
    m.write(&file, 0, &pattern(1, 4096));
    m.files.note_logged(&file.state, m.store.epoch(), logged);
    m.files.fsync(&file, true).unwrap();
    assert!(world.devices.iter().all(|d| d.volatile_bytes() == 0));
}

/// The state of a file holds its inode in memory.
#[test]
fn a_file_that_was_flushed_after_its_close_is_not_kept() {
    let world = World::new(55, 64, 256);
    let m = world.mount();
    let (closed, other) = (m.make(), m.make());
    let file = m.open(other);
    for ino in [closed, other] {
        m.write(&m.open(ino), 0, &pattern(1, 9000));
        m.files.fsync(&m.open(ino), false).unwrap();
    }
    m.write(&m.open(closed), 0, &pattern(2, 4096));
    m.files.write_back(closed).unwrap();
    m.write(&file, 0, &pattern(3, 4096));
    m.files.write_back(other).unwrap();
    m.files
        .persist_times(&m.files.use_active(closed).unwrap())
        .unwrap();
    assert!(m.files.table.inos().contains(&closed));
    m.files.fsync(&file, true).unwrap();
    assert!(!m.files.table.inos().contains(&closed));
}

/// Nor are blocks mapped behind the size that is logged, which whoever makes the file longer would read.
#[test]
fn what_a_range_writes_ahead_is_not_found_behind_the_end() {
    let mut world = World::new(54, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let start = pattern(1, 8192);
    m.write(&file, 0, &start);
    m.files.fsync(&file, false).unwrap();
    m.write(&file, 8192, &pattern(2, 120_000));
    m.files
        .write_range(&file, 20 * 4096..24 * 4096, true)
        .unwrap();
    let logged = m.inode(ino).size;
    m.store.sync().unwrap();
    drop(file);
    let m = cut(&mut world, m);
    assert_eq!(m.size(ino), logged);
    m.files.truncate(ino, 140_000).unwrap();
    let content = m.contents(ino);
    assert_eq!(content[..8192], start);
    let kept = (logged as usize).max(8192);
    assert_eq!(content[8192..kept], pattern(2, 120_000)[..kept - 8192]);
    assert!(content[kept..].iter().all(|byte| *byte == 0));
}

/// Nor what was written after a cut that came between two passes of one write-back.
#[test]
fn what_is_cut_and_written_between_two_passes_is_not_found_behind_the_end() {
    let mut world = World::new(55, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 100 * 4096));
    let pass = |from| {
        (m.files)
            .flush_pass(&file.state, from..100, How::Home, Take::Dirty)
            .unwrap()
    };
    let next = pass(0).unwrap();
    assert!(next < 80, "one pass took {next} pages");
    m.files.truncate(ino, 100).unwrap();
    m.write(&file, 80 * 4096, &pattern(2, 4096));
    let next = pass(next);
    let inode = m.inode(ino);
    assert!(inode.size == 100 || inode.size == 81 * 4096);
    m.store.sync().unwrap();
    // The power goes here in another world.
    let copies: Vec<_> = world.devices.iter().map(|d| d.clone_state(1)).collect();
    assert_eq!(next, Some(0));
    assert_eq!(pass(0), None);
    m.files.fsync(&file, false).unwrap();
    drop(file);
    let m = cut(&mut world, m);
    assert_eq!(m.size(ino), 81 * 4096);
    assert_eq!(m.contents(ino)[80 * 4096..], pattern(2, 4096));
    m.close();
    world.devices = copies;
    let m = cut_now(&mut world);
    assert_eq!(m.size(ino), 100);
    m.files.truncate(ino, 100 * 4096).unwrap();
    let content = m.contents(ino);
    assert_eq!(content[..100], pattern(1, 100));
    assert!(content[100..].iter().all(|byte| *byte == 0));
}

#[test]
fn an_append_is_one_write_and_survives() {
    let mut world = World::new(60, 64, 256);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    let (before, first) = (requests(&m), written(&m));
    for i in 0..30 {
        m.append(&file, &mut bytes, &pattern(i, 100));
        m.files.fsync(&file, true).unwrap();
        assert_eq!(m.inode(ino).size, bytes.len() as u64);
    }
    let (writes, flushes) = requests(&m);
    assert_eq!((writes - before.0, flushes - before.1), (30, 0));
    // One block of the journal each: these devices have no smaller ones.
    assert_eq!(written(&m) - first, 30 * PAGE);
    assert_eq!(m.tail(ino).unwrap(), bytes[8192..]);
    drop(file);
    let m = cut(&mut world, m);
    assert_eq!(m.contents(ino), bytes);
    assert_eq!(m.tail(ino).unwrap(), bytes[8192..]);
    // And once more from an image.
    m.close();
    let m = world.mount();
    assert_eq!(m.contents(ino), bytes);
    m.delete(ino);
    m.close();
}

#[test]
fn appends_over_many_pages_survive_wherever_the_power_goes() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(seed, 64, 256);
        let m = world.mount();
        let ino = m.make();
        m.store.sync().unwrap();
        let mut bytes = Vec::new();
        let mut synced = 0;
        world.switch.cut_after(rng.below(200));
        'run: {
            let file = m.open(ino);
            for i in 0..150 {
                let more = pattern(i, rng.below(300) as usize + 1);
                if m.files.write(&file, bytes.len() as u64, &more).is_err() {
                    break 'run;
                }
                bytes.extend(more);
                if m.files.fsync(&file, rng.one_in(2)).is_err() {
                    break 'run;
                }
                synced = bytes.len();
                if rng.one_in(20) {
                    world.clock.advance(Duration::from_secs(6));
                    let _ = m.files.tick();
                }
                if rng.one_in(30) {
                    let _ = m.store.checkpoint();
                }
            }
        }
        world.switch.cut_now();
        drop(m);
        world.restart(&mut rng);
        let m = world.mount();
        let found = m.contents(ino);
        assert!(
            found.len() >= synced,
            "seed {seed}: {} of {synced}",
            found.len()
        );
        assert_eq!(found, bytes[..found.len()], "seed {seed}");
        m.check(ino);
        m.close();
    }
}

#[test]
fn a_small_new_file_is_one_write_and_goes_home_later_with_others() {
    let mut world = World::new(61, 64, 1024);
    let m = world.mount();
    let before = requests(&m);
    let new = |i: u64| {
        let ino = m.make();
        let file = m.open(ino);
        m.write(&file, 0, &pattern(i, 2100 + i as usize * 49));
        m.files.fsync(&file, false).unwrap();
        ino
    };
    let inos: Vec<Ino> = (0..40).map(new).collect();
    let (writes, flushes) = requests(&m);
    assert_eq!((writes - before.0, flushes - before.1), (40, 0));
    let check = |m: &Mounted| {
        for (i, &ino) in inos.iter().enumerate() {
            assert_eq!(m.contents(ino), pattern(i as u64, 2100 + i * 49));
        }
    };
    check(&m);
    let m = cut(&mut world, m);
    check(&m);
    assert!(inos.iter().all(|&ino| m.check(ino) == 0));
    // Written again they are as any others.
    for (i, &ino) in inos.iter().enumerate() {
        let file = m.open(ino);
        m.write(&file, 7, &pattern(i as u64, 2100)[7..8]);
        m.files.fsync(&file, false).unwrap();
    }
    world.clock.advance(Duration::from_secs(6));
    let before = requests(&m);
    m.files.tick().unwrap();
    assert!(requests(&m).0 - before.0 <= 4);
    assert!(inos.iter().all(|&ino| m.check(ino) == 1));
    check(&m);
    let m = cut(&mut world, m);
    check(&m);
}

/// What is in the inode must show to whoever reads, seeks, or changes a part of it, when its page is in no cache.
#[test]
fn a_tail_without_a_page_is_read_and_changed_as_one() {
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    type Change = fn(&Mounted, Ino, &mut Vec<u8>);
    let changes: [Change; 12] = [
        |_, _, _| {},
        |m, ino, bytes| {
            m.write(&m.open(ino), 8200, b"part");
            bytes[8200..8204].copy_from_slice(b"part");
        },
        |m, ino, bytes| {
            m.write(&m.open(ino), 20_000, b"far");
            bytes.resize(20_000, 0);
            bytes.extend_from_slice(b"far");
        },
        |m, ino, bytes| {
            m.files.truncate(ino, 8300).unwrap();
            m.files.truncate(ino, 9000).unwrap();
            bytes.truncate(8300);
            bytes.resize(9000, 0);
        },
        |m, ino, bytes| {
            m.files.truncate(ino, 8192).unwrap();
            bytes.truncate(8192);
        },
        |m, ino, bytes| {
            m.files.truncate(ino, 50_000).unwrap();
            bytes.resize(50_000, 0);
        },
        |m, ino, bytes| {
            m.files.truncate(ino, 0).unwrap();
            m.write(&m.open(ino), 0, b"new");
            *bytes = b"new".to_vec();
        },
        |m, ino, bytes| {
            let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            m.files.fallocate(&m.open(ino), punch, 8250, 50).unwrap();
            bytes[8250..8300].fill(0);
        },
        |m, ino, bytes| {
            let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            m.files
                .fallocate(&m.open(ino), punch, 4096, 20_000)
                .unwrap();
            bytes[4096..].fill(0);
        },
        |m, ino, bytes| {
            let zero = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
            m.files.fallocate(&m.open(ino), zero, 8000, 400).unwrap();
            bytes[8000..8400].fill(0);
        },
        |m, ino, bytes| {
            m.files.fallocate(&m.open(ino), 0, 0, 30_000).unwrap();
            bytes.resize(30_000, 0);
        },
        |m, ino, bytes| {
            let direct = libc::O_RDWR | libc::O_DIRECT;
            let file = m.files.open(&m.owners, ino, direct).unwrap();
            m.write(&file, 8192, &pattern(9, 4096));
            bytes.truncate(8192);
            bytes.extend(pattern(9, 4096));
        },
    ];
    for (i, change) in changes.iter().enumerate() {
        for hole in [false, true] {
            let mut world = World::new(i as u64, 64, 256);
            let m = world.mount();
            let before = m.free_blocks();
            let (ino, mut bytes) = settled(&m);
            let file = m.open(ino);
            if hole {
                m.files.fallocate(&file, punch, 8192, 4096).unwrap();
                bytes[8192..].fill(0);
                m.write(&file, 8195, &[5; 200]);
                bytes[8195..8395].fill(5);
            } else {
                m.append(&file, &mut bytes, &[5; 100]);
            }
            m.files.fsync(&file, false).unwrap();
            drop(file);
            let m = cut(&mut world, m);
            assert!(m.tail(ino).is_some());
            let file = m.open(ino);
            assert_eq!(m.files.seek(&file, 8192, libc::SEEK_DATA).unwrap(), 8192);
            let end = bytes.len() as u64;
            assert_eq!(m.files.seek(&file, 8192, libc::SEEK_HOLE).unwrap(), end);
            drop(file);
            change(&m, ino, &mut bytes);
            assert!(m.contents(ino) == bytes, "change {i}, hole {hole}");
            m.files.fsync(&m.open(ino), false).unwrap();
            m.check(ino);
            let m = cut(&mut world, m);
            assert!(m.contents(ino) == bytes, "change {i}, hole {hole}, synced");
            // Now with everything at home, and no cache.
            m.write(&m.open(ino), 1, &bytes[1..2]);
            m.close();
            let m = world.mount();
            assert!(m.contents(ino) == bytes, "change {i}, hole {hole}, at home");
            m.delete(ino);
            assert_eq!(m.free_blocks(), before, "change {i}, hole {hole}");
            m.close();
        }
    }
}

/// Overwritten in place after it went home, a page is what it is overwritten with.
#[test]
fn a_tail_ends_when_its_page_goes_home() {
    let mut world = World::new(63, 64, 256);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    m.append(&file, &mut bytes, b"logged");
    m.files.fsync(&file, true).unwrap();
    assert!(m.tail(ino).is_some());
    world.clock.advance(Duration::from_secs(6));
    m.files.tick().unwrap();
    assert_eq!(m.tail(ino), None);
    m.store.sync().unwrap();
    let durable = m.store.durable_epoch();
    m.write(&file, 8192, b"in place");
    bytes[8192..8200].copy_from_slice(b"in place");
    m.files.fsync(&file, true).unwrap();
    assert_eq!(m.store.durable_epoch(), durable, "it needs no record");
    drop(file);
    let m = cut(&mut world, m);
    assert_eq!(m.contents(ino), bytes);
}

/// There is no extent to be freed there.
#[test]
fn a_hole_takes_away_a_tail_without_a_block() {
    let world = World::new(66, 64, 256);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    m.write(&file, 20_000, &pattern(1, 100));
    m.files.fsync(&file, true).unwrap();
    assert!(m.tail(ino).is_some());
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    m.files.fallocate(&file, punch, 16_384, 4_096).unwrap();
    assert_eq!(m.tail(ino), None);
    bytes.resize(20_100, 0);
    assert_eq!(m.contents(ino), bytes);
}

/// The tail counts before the block: whoever wrote to that wrote for nobody.
#[test]
fn a_write_past_the_cache_does_not_go_under_a_tail() {
    let world = World::new(68, 64, 256);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    m.append(&file, &mut bytes, &[5; 100]);
    m.files.fsync(&file, true).unwrap();
    m.files.truncate(ino, 30_000).unwrap();
    m.files.fsync(&file, true).unwrap();
    bytes.resize(30_000, 0);
    drop(file);
    m.store.sync().unwrap();
    let tail = m.tail(ino).is_some();
    assert!(tail, "it is in the middle of the file by now");
    let new = pattern(3, 4096);
    m.write(&past(&m, ino), 8192, &new);
    bytes[8192..12_288].copy_from_slice(&new);
    assert_eq!(m.contents(ino), bytes);
    m.close();
    let m = world.mount();
    assert_eq!(m.contents(ino), bytes);
}

/// The last page of what was cut has old bytes behind the end.
#[test]
fn a_write_past_the_cache_behind_the_end_shows_nothing_that_was_cut_off() {
    let mut world = World::new(69, 64, 256);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    m.files.truncate(ino, 5_000).unwrap();
    m.files.fsync(&m.open(ino), true).unwrap();
    m.close();
    let m = world.mount();
    let file = past(&m, ino);
    let new = pattern(3, 4096);
    m.write(&file, 12_288, &new);
    bytes.truncate(5_000);
    bytes.resize(12_288, 0);
    bytes.extend_from_slice(&new);
    assert_eq!(m.contents(ino), bytes);
    m.files.fsync(&file, true).unwrap();
    drop(file);
    let m = cut(&mut world, m);
    assert_eq!(m.contents(ino), bytes);
}

/// Recovery looks for what the batch says until another one confirms it.
#[test]
fn no_write_flies_over_blocks_for_which_a_batch_vouches() {
    let world = World::new(70, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = past(&m, ino);
    m.write(&m.open(ino), 0, &pattern(1, 20_480));
    m.files.fsync(&file, false).unwrap();
    assert!(m.store.vouches());
    let begin = || {
        let begun = m.files.begin_write(&file, 0, BLOCK_SIZE, &mut Vec::new());
        begun.unwrap().map(|writing| writing.never_flew())
    };
    assert!(begin().is_none());
    m.commit_more();
    assert!(begin().is_some());
}

/// A file of which nothing is mapped gets its first block in a group.
#[test]
fn a_tail_of_a_file_without_blocks_goes_home_with_others() {
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let mut world = World::new(67, 64, 256);
    let m = world.mount();
    let new = |i: u8| {
        let (ino, mut bytes) = settled(&m);
        let file = m.open(ino);
        m.files.fallocate(&file, punch, 0, 12_288).unwrap();
        bytes.fill(0);
        m.write(&file, 100, &[i; 50]);
        bytes[100..150].fill(i);
        m.files.fsync(&file, true).unwrap();
        assert_eq!(m.tail(ino).unwrap(), bytes[..150]);
        (ino, bytes)
    };
    let all: Vec<_> = (1..6).map(new).collect();
    world.clock.advance(Duration::from_secs(6));
    m.files.tick().unwrap();
    for (ino, bytes) in &all {
        assert_eq!(m.tail(*ino), None);
        assert_eq!(m.check(*ino), 1);
        assert_eq!(&m.contents(*ino), bytes);
    }
    let m = cut(&mut world, m);
    for (ino, bytes) in &all {
        assert_eq!(&m.contents(*ino), bytes);
    }
    m.close();
}

/// The home block cannot be written: what was synced is in the inode, and stays there.
#[test]
fn what_was_logged_survives_a_home_that_cannot_be_written() {
    let world = World::new(64, 64, 256);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    m.append(&file, &mut bytes, b"logged");
    m.files.fsync(&file, true).unwrap();
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    world.clock.advance(Duration::from_secs(6));
    m.files.tick().unwrap_err();
    m.files.fsync(&file, true).unwrap_err();
    world.devices.iter().for_each(|d| d.heal());
    assert_eq!(m.contents(ino), bytes);
    drop(file);
    m.close();
    let m = world.mount();
    assert_eq!(m.contents(ino), bytes);
}

/// A name is taken by a file whose content is in the journal: nothing is written for that.
#[test]
fn what_is_logged_need_not_go_home_before_a_rename() {
    let world = World::new(65, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 4096));
    m.files.fsync(&file, true).unwrap();
    let before = requests(&m);
    m.files.write_back(ino).unwrap();
    assert_eq!(requests(&m), before);
    // What was written since is logged, too.
    m.write(&file, 100, b"more");
    m.files.write_back(ino).unwrap();
    assert!(matches!(&m.inode(ino).body, Body::Inline(bytes) if &bytes[100..104] == b"more"));
}

/// Many files with a logged page each: before there are more than a part of the cache holds, the first ones go home.
#[test]
fn logged_pages_are_bounded() {
    let world = World::new(66, 64, 64 * 16);
    let m = world.mount();
    let most = m.files.logged_max();
    let new = |i| {
        let ino = m.make();
        let file = m.open(ino);
        m.write(&file, 0, &pattern(i, 4096));
        m.files.fsync(&file, false).unwrap();
        ino
    };
    let inos: Vec<Ino> = (0..most as u64).map(new).collect();
    m.files.tick().unwrap();
    let home = most.div_ceil(HOME_SHARE);
    let are_home = |inos: &[Ino]| inos.iter().all(|&ino| m.check(ino) == 1);
    assert!(are_home(&inos[..home]), "those that were logged first");
    assert_eq!(m.files.pages.dirty(), most - home);
    // What is home in another way, or deleted, is no longer one of them.
    m.files.flush_file(&m.open(inos[home]).state).unwrap();
    m.files.truncate(inos[home + 1], 0).unwrap();
    assert_eq!(m.files.logged.lock().files.len(), most - home - 2);
    m.files.tick().unwrap();
    assert_eq!(m.files.pages.dirty(), most - home - 2);
}

/// A logged page is dropped, or cannot go home when its file's turn comes: the next one counts again.
#[test]
fn a_file_counts_again_after_its_logged_page_is_gone() {
    let world = World::new(68, 64, 64 * 16);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let counted = || m.files.logged.lock().take_first(1) == [ino];
    m.write(&file, 0, &pattern(1, 4096));
    m.files.fsync(&file, true).unwrap();
    assert!(counted());
    m.files.truncate(ino, 0).unwrap();
    m.write(&file, 0, &pattern(2, 4000));
    m.files.fsync(&file, true).unwrap();
    assert!(counted());
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    m.files.flush_file(&file.state).unwrap_err();
    world.devices.iter().for_each(|d| d.heal());
    m.write(&file, 0, b"more");
    m.files.fsync(&file, true).unwrap_err();
    assert!(counted());
}

/// Other pages of its file that go home do not take a logged page out of the count; its own way home, and its end, do.
#[test]
fn a_file_counts_as_long_as_its_logged_page_is_dirty() {
    let world = World::new(70, 64, 64 * 16);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    let counted = || m.files.logged.lock().files.len();
    m.append(&file, &mut bytes, b"logged");
    m.files.fsync(&file, true).unwrap();
    assert_eq!(counted(), 1);
    m.write(&file, 0, b"not logged");
    m.files.write_range(&file, 0..PAGE, true).unwrap();
    assert!(m.files.pages.is_dirty(file.state.key));
    assert_eq!(counted(), 1);
    m.files.flush_file(&file.state).unwrap();
    assert_eq!(counted(), 0);
    m.append(&file, &mut bytes, b"logged again");
    m.files.fsync(&file, true).unwrap();
    assert_eq!(counted(), 1);
    drop(file);
    m.delete(ino);
    assert_eq!(counted(), 0);
}

#[test]
fn a_block_behind_a_tail_need_not_be_readable() {
    let mut world = World::new(69, 64, 64);
    let m = world.mount();
    let (ino, mut bytes) = settled(&m);
    let file = m.open(ino);
    m.append(&file, &mut bytes, b"logged");
    m.files.fsync(&file, true).unwrap();
    drop(file);
    let m = cut(&mut world, m);
    let file = m.open(ino);
    assert!(m.tail(ino).is_some());
    for device in &world.devices {
        device.fail_reads(Strikes::Always, None);
    }
    let mut read = vec![0; bytes.len() - 8192];
    assert_eq!(m.files.read(&file, 8192, &mut read).unwrap(), read.len());
    assert_eq!(read, bytes[8192..]);
    m.files.read(&file, 0, &mut read).unwrap_err();
    world.devices.iter().for_each(|d| d.heal());
    assert_eq!(m.contents(ino), bytes);
}

#[test]
fn what_differs_is_logged_and_nothing_else() {
    use tail::changed;
    assert_eq!(changed(b"", b""), None);
    assert_eq!(changed(b"same", b"same"), None);
    assert_eq!(changed(b"", b"new"), Some(0..3));
    assert_eq!(changed(b"log", b"log more"), Some(3..8));
    assert_eq!(changed(b"a b c", b"a B c"), Some(2..3));
    assert_eq!(changed(b"a b c", b"a b"), Some(3..3));
    assert_eq!(changed(b"abc", b"aXcde"), Some(1..5));
    let mut rng = Rng::new(3);
    for _ in 0..2000 {
        let mut some = || {
            (0..rng.below(6))
                .map(|_| rng.below(2) as u8)
                .collect::<Vec<u8>>()
        };
        let (old, new) = (some(), some());
        let mut made = old.clone();
        made.resize(new.len(), 0);
        match changed(&old, &new) {
            Some(range) => made[range.clone()].copy_from_slice(&new[range]),
            None => assert_eq!(old, new),
        }
        assert_eq!(made, new, "from {old:?}");
    }
}

/// New pages that are synced need one flush, and no durable write: the record vouches for them. So does what makes a file
/// longer. When such a block is written in place, that takes a batch first, once, that says that the other was durable.
#[test]
fn what_a_sync_adds_takes_one_flush_and_survives() {
    let mut world = World::new(59, 64, 256);
    let m = world.mount();
    let mut inos: Vec<_> = (0..4).map(|_| m.make()).collect();
    m.store.sync().unwrap();
    let mut wanted = Vec::new();
    for (i, ino) in inos.iter().enumerate() {
        let file = m.open(*ino);
        let mut bytes = pattern(i as u64, 9_000 + 4_096 * i);
        let before = requests(&m);
        m.write(&file, 0, &bytes);
        m.files.fsync(&file, true).unwrap();
        let after = requests(&m);
        assert_eq!(
            (after.0 - before.0, after.1 - before.1),
            (2, 1),
            "data and batch"
        );
        // Something else is committed, which confirms that.
        m.commit_more();
        let more = pattern(9, 10_000);
        m.write(&file, bytes.len() as u64, &more);
        bytes.extend(more);
        let before = requests(&m);
        m.files.fsync(&file, true).unwrap();
        let after = requests(&m);
        assert_eq!(after.1 - before.1, 1);
        wanted.push(bytes);
    }
    let ino = m.make();
    let (file, mut bytes) = (m.open(ino), pattern(11, 9_000));
    m.write(&file, 0, &bytes);
    m.files.fsync(&file, true).unwrap();
    let batches = || m.store.counters().batches.count;
    for (i, confirmed) in [(1, 1), (2, 0), (3, 0)] {
        let before = batches();
        let new = pattern(i, 4_096);
        m.write(&file, 4_096, &new);
        bytes[4_096..8_192].copy_from_slice(&new);
        assert_eq!(m.store.vouched().is_empty(), i > 1);
        m.files.fsync(&file, true).unwrap();
        assert_eq!(batches() - before, confirmed);
    }
    inos.push(ino);
    wanted.push(bytes);
    drop(file);
    let m = cut(&mut world, m);
    for (ino, bytes) in inos.iter().zip(wanted) {
        assert_eq!(m.contents(*ino), bytes);
    }
}

/// A log that grows by more than a page with each sync: one batch and one flush each, as no block is written twice.
#[test]
fn a_log_that_grows_by_pages_takes_one_flush_each_time() {
    for step in [2_500, 5_000, 12_345, 70_000] {
        let mut world = World::new(60, 64, 256);
        let m = world.mount();
        let ino = m.make();
        let file = m.open(ino);
        let mut bytes = pattern(1, 5_000);
        m.write(&file, 0, &bytes);
        m.files.fsync(&file, true).unwrap();
        let mut more = |i| {
            let new = pattern(i, step);
            m.write(&file, bytes.len() as u64, &new);
            bytes.extend(new);
            m.files.fsync(&file, true).unwrap();
        };
        // The first finds its page in a block for which a batch vouches.
        more(2);
        let (before, batches) = (requests(&m), m.store.counters().batches.count);
        (0..20).for_each(&mut more);
        let after = requests(&m);
        assert_eq!(m.store.counters().batches.count - batches, 20, "{step}");
        // Of each device at most; what is logged alone goes by a durable write.
        let (flushes, devices) = (after.1 - before.1, m.store.array().devices().count());
        assert!(flushes <= 20 * devices as u64, "{step}: {flushes}");
        drop(file);
        let m = cut(&mut world, m);
        assert_eq!(m.contents(ino), bytes, "{step}");
    }
}

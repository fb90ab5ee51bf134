//! Small files written back in groups.

use super::*;
use crate::data::together::Room;
use base::atomic::{AtomicBool, Ordering};
use device::sim::Times as Strikes;
use extents::PAGE_LIMIT;
use table::StateUse;

const FILES: u64 = 40;

fn page_of(seed: u64) -> Vec<u8> {
    pattern(seed, PAGE as usize)
}

/// Files of one page each, written and not yet written back.
fn written(m: &Mounted) -> Vec<Ino> {
    let make = |i| {
        let ino = m.make();
        m.write(&m.open(ino), 0, &page_of(i));
        ino
    };
    (0..FILES).map(make).collect()
}

fn writes(m: &Mounted) -> u64 {
    let stats = m.store.array().stats();
    stats.devices.iter().map(|d| d.writes).sum()
}

/// The blocks of a file.
fn blocks(m: &Mounted, ino: Ino) -> Vec<u64> {
    let found = extents::lookup(&m.store, &m.inode(ino), 0..PAGE_LIMIT, usize::MAX).unwrap();
    let each = |e: &crate::content::FileExtent| e.block.0..e.block.0 + e.len as u64;
    found.iter().flat_map(each).collect()
}

#[test]
fn files_without_a_block_get_one_run_and_go_by_few_writes() {
    let world = World::new(40, 64, 256);
    let m = world.mount();
    let inos = written(&m);
    let before = writes(&m);
    m.files.write_back_all().unwrap();
    assert!(writes(&m) - before <= 4, "{} writes", writes(&m) - before);
    let all: Vec<u64> = inos.iter().flat_map(|&ino| blocks(&m, ino)).collect();
    assert!(all.windows(2).all(|two| two[1] == two[0] + 1), "{all:?}");
    m.close();
    let m = world.mount();
    for (i, &ino) in inos.iter().enumerate() {
        assert_eq!(m.contents(ino), page_of(i as u64));
        m.check(ino);
    }
}

#[test]
fn files_of_all_kinds_go_together() {
    let world = World::new(41, 64, 512);
    let m = world.mount();
    let before = m.free_blocks();
    let mut expected = Vec::new();
    for i in 0..FILES {
        let ino = m.make();
        let file = m.open(ino);
        let mut data = Vec::new();
        // Inline, one page, several, grown from inline, with a hole, overwritten, continued, cut, rewritten.
        let sizes = [100, 4096, 20_000, 300, 3_000, 9_000, 8192, 30_000, 5_000];
        m.write(&file, 0, &pattern(i, sizes[i as usize % 9]));
        data.extend(pattern(i, sizes[i as usize % 9]));
        let mut put = |at: usize, more: Vec<u8>| {
            m.write(&file, at as u64, &more);
            data.resize(data.len().max(at + more.len()), 0);
            data[at..at + more.len()].copy_from_slice(&more);
        };
        match i % 9 {
            3 => {
                m.files.write_back(ino).unwrap();
                put(5_000, pattern(i, 7_000));
            }
            4 => put(40_000, pattern(i, 100)),
            5 => {
                m.files.write_back(ino).unwrap();
                put(4_096, pattern(i + 1, 4_096));
            }
            6 => {
                m.files.write_back(ino).unwrap();
                put(8_192, pattern(i + 1, 50_000));
            }
            7 => {
                m.files.truncate(ino, 4_100).unwrap();
                data.truncate(4_100);
            }
            8 => {
                m.files.write_back(ino).unwrap();
                m.files.truncate(ino, 0).unwrap();
                data = pattern(i + 2, 6_000);
                m.write(&file, 0, &data);
            }
            _ => {}
        }
        expected.push((ino, data));
    }
    m.files.write_back_all().unwrap();
    assert_eq!(m.files.pages.dirty(), 0);
    m.close();
    let m = world.mount();
    for (ino, data) in &expected {
        assert_eq!(&m.contents(*ino), data, "inode {ino}");
        m.check(*ino);
    }
    expected.into_iter().for_each(|(ino, _)| m.delete(ino));
    assert_eq!(m.free_blocks(), before);
}

#[test]
fn groups_are_bounded_and_leave_nobody_out() {
    // More pages than a group takes, files larger than one that goes with others, and a busy one.
    let world = World::new(42, 64, 2048);
    let m = world.mount();
    let make = |i: u64| {
        let ino = m.make();
        let pages = [30, 1, 64, 65][i as usize % 4];
        m.write(&m.open(ino), 0, &pattern(i, pages * PAGE as usize));
        ino
    };
    let inos: Vec<Ino> = (0..32).map(make).collect();
    base::thread::parallel(2, |t| match t {
        0 => m.files.write_back_all().unwrap(),
        _ => drop(m.files.use_file(inos[5]).unwrap().io.write()),
    });
    assert_eq!(m.files.pages.dirty(), 0);
    for (i, &ino) in inos.iter().enumerate() {
        let pages = [30, 1, 64, 65][i % 4];
        assert_eq!(m.check(ino), pages);
        assert_eq!(m.contents(ino), pattern(i as u64, (pages * PAGE) as usize));
    }
}

#[test]
fn a_write_of_a_group_that_fails_once_costs_nobody_anything() {
    let world = World::new(43, 64, 256);
    let m = world.mount();
    let before = m.free_blocks();
    let inos = written(&m);
    for device in &world.devices {
        device.fail_writes(Strikes::Next(1), None);
    }
    m.files.write_back_all().unwrap();
    for (i, &ino) in inos.iter().enumerate() {
        m.files.fsync(&m.open(ino), false).unwrap();
        assert_eq!(m.contents(ino), page_of(i as u64));
        assert_eq!(m.check(ino), 1);
    }
    assert_eq!(m.free_blocks(), before - FILES);
}

/// The end of the run that a group gets cannot be written, nor the blocks behind it, where each file tries
/// by itself. Those whose bytes meet them then, and nobody else, learn of it, by every fsync; and their
/// bytes are in memory until they can be written.
#[test]
fn a_failing_write_of_a_group_latches_on_the_files_whose_bytes_it_takes() {
    let world = World::new(44, 64, 256);
    let m = world.mount();
    let first = m.make();
    m.write(&m.open(first), 0, &page_of(99));
    m.files.write_back_all().unwrap();
    let mut inos = written(&m);
    inos.sort_unstable();
    let handles: Vec<_> = inos.iter().map(|&ino| m.open(ino)).collect();
    let contents: Vec<_> = inos.iter().map(|&ino| m.contents(ino)).collect();
    let bad = format::Block(blocks(&m, first)[0] + FILES - 1);
    m.store
        .array()
        .geometry()
        .pieces(bad.byte(), 5 * BLOCK_SIZE, |piece| {
            let range = piece.offset..piece.offset + piece.len as u64;
            world.devices[piece.device].fail_writes(Strikes::Always, Some(range));
        });
    m.files.write_back_all().unwrap_err();
    // The group had the first two of the five, files that tried by themselves the others.
    for (i, file) in handles.iter().enumerate() {
        for _ in 0..2 {
            let synced = m.files.fsync(file, false).map_err(|e| e.errno());
            assert_eq!(synced.is_err(), i < 3, "file {i}: {synced:?}");
        }
    }
    for (device, (&ino, content)) in world.devices.iter().cycle().zip(inos.iter().zip(&contents)) {
        device.heal();
        m.files.fsync(&m.open(ino), false).unwrap();
        assert_eq!(&m.contents(ino), content);
    }
    // The syncs have logged what the devices refused.
    m.files.write_back_all().unwrap();
    inos.iter().for_each(|&ino| assert_eq!(m.check(ino), 1));
    drop(handles);
    m.close();
    let m = world.mount();
    for (&ino, content) in inos.iter().zip(&contents) {
        assert_eq!(&m.contents(ino), content);
    }
}

/// A flush fails after a group was written and before its record: what was written may be lost, so it is
/// neither logged nor forgotten.
#[test]
fn a_group_is_not_logged_over_a_flush_that_failed_meanwhile() {
    let world = World::new(45, 64, 256);
    let m = world.mount();
    let inos = written(&m);
    let handles: Vec<_> = inos.iter().map(|&ino| m.open(ino)).collect();
    world.devices.iter().for_each(|d| d.stick());
    let waiting = || world.devices.iter().map(|d| d.waiting()).sum::<u64>();
    let wait_for = |count| {
        while waiting() < count {
            base::thread::yield_now();
        }
    };
    base::thread::parallel(3, |t| match t {
        0 => {
            let outcome = m.files.write_back_all();
            assert!(outcome.is_ok() || m.store.read_only());
        }
        1 => {
            wait_for(1);
            m.store.array().mark_all_unflushed();
            world
                .devices
                .iter()
                .for_each(|d| d.fail_flushes(Strikes::Next(1)));
            m.store.flush().unwrap_err();
        }
        _ => {
            wait_for(2);
            world.devices.iter().for_each(|d| d.release());
        }
    });
    if m.store.read_only() {
        // The record came first: no commit names what may be lost.
        m.store.sync().unwrap_err();
        return;
    }
    for (i, file) in handles.iter().enumerate() {
        m.files.fsync(file, false).unwrap_err();
        m.files.fsync(&m.open(inos[i]), false).unwrap();
        assert_eq!(m.contents(inos[i]), page_of(i as u64));
    }
}

/// A group that overwrites blocks in place has no record of that, which a sync took for all there is to
/// do: the new times were gone after a remount.
#[test]
fn times_of_files_overwritten_in_a_group_are_synced() {
    let world = World::new(49, 64, 256);
    let m = world.mount();
    let inos = written(&m);
    m.files.write_back_all().unwrap();
    world.clock.advance(Duration::from_secs(3));
    let overwritten = m.files.now();
    for &ino in &inos {
        m.write(&m.open(ino), 0, b"new");
    }
    m.files.write_back_all().unwrap();
    for &ino in &inos {
        let inode = m.inode(ino);
        assert!(inode.mtime >= overwritten && inode.ctime >= overwritten);
    }
    m.close();
}

/// Overwritten, continued, cut, deleted and synced while the group is on its way.
#[test]
fn files_of_a_group_are_changed_while_it_is_on_its_way() {
    let world = World::new(46, 64, 256);
    let m = world.mount();
    let before = m.free_blocks();
    let inos = written(&m);
    world.devices.iter().for_each(|d| d.stick());
    let change = |i: usize| {
        let ino = inos[i];
        match i % 5 {
            0 => m.write(&m.open(ino), 0, &page_of(1000 + i as u64)),
            1 => m.write(&m.open(ino), PAGE, &page_of(1000 + i as u64)),
            2 => m.files.truncate(ino, 10).unwrap(),
            3 => m.delete(ino),
            _ => m.files.fsync(&m.open(ino), false).unwrap(),
        }
    };
    // Whoever looks at the devices itself may look when they have been released already.
    let on_its_way = AtomicBool::new(false);
    base::thread::parallel(12, |t| match t {
        0 => m.files.write_back_all().unwrap(),
        1 => {
            while world.devices.iter().all(|d| d.waiting() == 0) {
                base::thread::yield_now();
            }
            on_its_way.store(true, Ordering::SeqCst);
            (0..2000).for_each(|_| base::thread::yield_now());
            world.devices.iter().for_each(|d| d.release());
        }
        _ => {
            while !on_its_way.load(Ordering::SeqCst) {
                base::thread::yield_now();
            }
            change(t - 2);
        }
    });
    (10..inos.len()).for_each(change);
    m.files.write_back_all().unwrap();
    let check = |m: &Mounted| {
        for (i, &ino) in inos.iter().enumerate().filter(|(i, _)| i % 5 != 3) {
            let (old, new) = (page_of(i as u64), page_of(1000 + i as u64));
            let expected = match i % 5 {
                0 => new,
                1 => [old, new].concat(),
                2 => old[..10].to_vec(),
                _ => old,
            };
            assert_eq!(m.contents(ino), expected, "file {i}");
            m.check(ino);
        }
    };
    check(&m);
    m.close();
    let m = world.mount();
    check(&m);
    let rest = inos.iter().enumerate().filter(|(i, _)| i % 5 != 3);
    rest.for_each(|(_, &ino)| m.delete(ino));
    assert_eq!(m.free_blocks(), before);
}

/// Power is cut at every moment of writing a group and its record back, and of the commit: each file is
/// empty or whole, and no block is lost.
#[test]
fn after_a_power_cut_each_file_of_a_group_is_there_or_not() {
    let (mut empty, mut whole) = (0, 0);
    for cut in 0..24 {
        let mut rng = Rng::new(cut);
        let mut world = World::new(47, 64, 256);
        let (before, inos) = {
            let m = world.mount();
            let before = m.free_blocks();
            let inos: Vec<Ino> = (0..FILES).map(|_| m.make()).collect();
            m.close();
            (before, inos)
        };
        let m = world.mount();
        for (i, &ino) in inos.iter().enumerate() {
            m.write(&m.open(ino), 0, &page_of(i as u64));
        }
        world.switch.cut_after(cut / 2);
        let synced = m.files.write_back_all().is_ok() && m.store.sync().is_ok();
        world.switch.cut_now();
        drop(m);
        world.restart(&mut rng);
        let m = world.mount();
        for (i, &ino) in inos.iter().enumerate() {
            let content = m.contents(ino);
            match content.is_empty() {
                true => {
                    assert!(!synced, "cut {cut}: file {i} was synced");
                    empty += 1;
                }
                false => {
                    assert_eq!(content, page_of(i as u64), "cut {cut}: file {i}");
                    whole += 1;
                }
            }
            m.check(ino);
            m.delete(ino);
        }
        assert_eq!(m.free_blocks(), before, "cut {cut}");
    }
    assert!(empty > 0 && whole > 0, "{empty} empty, {whole} whole");
}

#[test]
fn a_group_on_a_full_array_takes_what_was_promised() {
    let world = World::new(48, 64, 256);
    let m = world.mount();
    let before = m.free_blocks();
    let filler = m.make();
    let file = m.open(filler);
    let keep = libc::FALLOC_FL_KEEP_SIZE;
    // All but so many, and those in pieces.
    let most = before - 2 * FILES;
    m.files.fallocate(&file, keep, 0, most * PAGE).unwrap();
    for i in 0..FILES / 2 {
        let punch = libc::FALLOC_FL_PUNCH_HOLE | keep;
        m.files.fallocate(&file, punch, 7 * i * PAGE, PAGE).unwrap();
    }
    m.store.sync().unwrap();
    let mut inos = Vec::new();
    loop {
        let ino = m.make();
        match m.files.write(
            &m.open(ino),
            0,
            &pattern(inos.len() as u64, 2 * PAGE as usize),
        ) {
            Ok(_) => inos.push(ino),
            Err(error) => {
                assert_eq!(error.errno(), libc::ENOSPC);
                break;
            }
        }
    }
    assert!(inos.len() as u64 > FILES / 2);
    m.files.write_back_all().unwrap();
    assert_eq!(m.files.pages.dirty(), 0);
    for (i, &ino) in inos.iter().enumerate() {
        assert_eq!(m.contents(ino), pattern(i as u64, 2 * PAGE as usize));
        m.check(ino);
        m.delete(ino);
    }
    drop(file);
    m.delete(filler);
    assert!(m.free_blocks() >= before, "no block is lost");
}

/// A batch vouches for some files' blocks: to write in them takes another one that confirms it. The files of a group once all waited for that,
/// and whoever synced one of them.
#[test]
fn nobody_waits_in_a_group_for_a_batch() {
    let world = World::new(58, 64, 256);
    let m = world.mount();
    let vouched: Vec<Ino> = (0..2).map(|_| m.make()).collect();
    let mut inos = written(&m);
    m.files.write_back_all().unwrap();
    m.store.sync().unwrap();
    m.commit_more();
    for &ino in &vouched {
        let file = m.open(ino);
        m.write(&file, 0, &pattern(7, 9_000));
        m.files.fsync(&file, true).unwrap();
    }
    assert!(!m.store.vouched().is_empty());
    inos.splice(3..3, vouched.iter().copied());
    let each = |ino: &Ino| {
        m.write(&m.open(*ino), 100, b"over");
        m.files.use_file(*ino).unwrap()
    };
    let states: Vec<StateUse<'_>> = inos.iter().map(each).collect();
    let batches = || m.store.counters().batches.count;
    let before = batches();
    let left = m.files.flush_together(&states, &mut Room::new());
    assert_eq!(batches(), before, "nobody has waited for one");
    // The last to be synced: the batch of the second says that the first was durable.
    let dirty = |state: &&StateUse<'_>| m.files.pages.is_dirty(state.key);
    let dirty: Vec<&StateUse<'_>> = left.into_iter().filter(dirty).collect();
    let [alone] = dirty[..] else {
        panic!("{} are dirty", dirty.len());
    };
    assert_eq!(alone.ino(), vouched[1]);
    m.files.flush_file(alone).unwrap();
    assert_eq!(batches(), before + 1);
    assert_eq!(m.files.pages.dirty(), 0);
    for ino in inos {
        assert_eq!(m.contents(ino)[100..104], *b"over");
        m.check(ino);
    }
}

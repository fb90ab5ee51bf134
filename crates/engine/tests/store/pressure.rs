//! Full and fragmented arrays, damage in one place, lost checkpoint slots: what one bad spot
//! must not do to the rest.

use crate::world::{Change, TestStore, World, change, create, delete, fill, free, take_all};
use base::clock::Clock;
use base::rng::Rng;
use device::sim::Times;
use engine::{Error, Need, StoreOptions};
use format::Nid;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn set(store: &TestStore, nid: Nid, value: u64) -> Result<(), Error> {
    change(store, nid, Need::Reclaim, Change::Set(0, value))
}

/// Options as users have them, without threads.
fn plain() -> StoreOptions {
    StoreOptions {
        dirty_bytes: None,
        node_cache_bytes: 8 << 20,
        ..World::options()
    }
}

fn updates_on_a_full_array(words: usize) {
    let mut world = World::new(21, &[64]);
    let store = world.open_with(plain()).unwrap();
    let nids = fill(&store, words);
    let mut rng = Rng::new(words as u64);
    for round in 0..4 {
        for i in 0..4_000 {
            let nid = *rng.pick(&nids);
            set(&store, nid, i).unwrap_or_else(|e| panic!("round {round}, update {i}: {e}"));
        }
    }
    store.sync().unwrap();
    drop(store);
    world.switch.cut_now();
    world.restart(&mut rng);
    world.check("after updates");
    let store = world.open_with(plain()).unwrap();
    for nid in nids {
        delete(&store, nid).unwrap();
    }
    assert!(!fill(&store, words).is_empty());
    store.close().unwrap();
    drop(store);
    world.check("after deletions");
}

#[test]
fn large_nodes_change_in_place_on_a_full_array() {
    updates_on_a_full_array(1500);
}

#[test]
fn small_nodes_change_in_place_on_a_full_array() {
    updates_on_a_full_array(20);
}

#[test]
fn threads_change_nodes_on_a_full_array_while_checkpoints_run() {
    let world = World::new(27, &[64]);
    let store = world.open_with(plain()).unwrap();
    let nids = fill(&store, 300);
    store.close().unwrap();
    drop(store);
    let options = StoreOptions {
        background: true,
        workers: 4,
        shards: 4,
        checkpoint_interval: Duration::from_millis(5),
        ..plain()
    };
    let store = world.open_with(options).unwrap();
    base::thread::parallel(4, |worker| {
        let mut rng = Rng::new(worker as u64);
        let share = nids.len() / 4;
        let mut mine = nids[worker * share..][..share].to_vec();
        for i in 0..4_000 {
            let at = rng.below(mine.len() as u64) as usize;
            if i % 100 == 0 {
                delete(&store, mine.swap_remove(at)).unwrap();
            } else if i % 100 == 50 {
                match create(&store, vec![1; 300]) {
                    Ok(nid) => mine.push(nid),
                    Err(Error::NoSpace) => {}
                    Err(error) => panic!("{error}"),
                }
            } else {
                set(&store, mine[at], i).unwrap();
            }
        }
    });
    store.close().unwrap();
    drop(store);
    world.check("after threads");
}

#[test]
fn a_full_array_with_holes_everywhere_takes_as_much_again() {
    let world = World::new(22, &[64]);
    let store = world.open_with(plain()).unwrap();
    let mut nids = fill(&store, 100);
    let full = nids.len();
    let mut rng = Rng::new(22);
    for round in 0..4 {
        for _ in 0..full / 2 {
            let at = rng.below(nids.len() as u64) as usize;
            delete(&store, nids.swap_remove(at)).unwrap();
        }
        store.checkpoint().unwrap();
        nids.extend(fill(&store, 100));
        assert!(
            nids.len() * 10 > full * 9,
            "round {round}: {} of {full} nodes fit",
            nids.len()
        );
    }
    store.close().unwrap();
    drop(store);
    world.check("after refills");
}

/// Each worker of a checkpoint opens segments of its own, and after a crash others: there must be room for these, and for
/// cleaning besides, when data has all the rest (or with `nodes` 0, metadata).
fn changes_and_crashes_on_a_full_array(
    mib: u64,
    filled_by: usize,
    workers: usize,
    (nodes, words): (u64, usize),
) {
    let with = |workers| StoreOptions {
        workers,
        shards: workers,
        node_cache_bytes: 128 << 20,
        ..plain()
    };
    let mut world = World::new(28, &[mib]);
    let mut rng = Rng::new(28);
    let store = world.open_with(with(filled_by)).unwrap();
    let nids = match nodes {
        0 => fill(&store, words),
        _ => {
            let make = |i| create(&store, vec![i; words]).unwrap();
            let nids = (0..nodes).map(make).collect();
            take_all(&store, 64);
            nids
        }
    };
    store.sync().unwrap();
    drop(store);
    for round in 0..6 {
        world.switch.cut_now();
        world.restart(&mut rng);
        let store = world
            .open_with(with(workers))
            .unwrap_or_else(|e| panic!("round {round}: {e}"));
        for i in 0..nids.len() as u64 {
            set(&store, *rng.pick(&nids), i)
                .unwrap_or_else(|e| panic!("round {round}, update {i}: {e}"));
        }
        store.sync().unwrap();
    }
    world.switch.cut_now();
    world.restart(&mut rng);
    assert_eq!(world.check("after updates by many").len(), nids.len());
    world.open_with(with(1)).unwrap().close().unwrap();
}

#[test]
fn many_workers_change_nodes_when_metadata_fills_a_small_array() {
    changes_and_crashes_on_a_full_array(64, 2, 64, (0, 1500));
}

#[test]
fn many_workers_change_nodes_when_data_fills_an_array_of_few_segments() {
    changes_and_crashes_on_a_full_array(530, 2, 32, (60_000, 60));
}

/// Blocks that data gets, and loses again.
fn taken_by_data(store: &TestStore) -> u64 {
    let held = take_all(store, 64);
    let blocks = held.iter().map(|extent| extent.len as u64).sum();
    free(store, held);
    store.sync().unwrap();
    blocks
}

/// Nodes fill the array and go, all but a few in each of its chunks.
fn leave_few(store: &TestStore) -> Vec<Nid> {
    let (mut few, mut gone) = (Vec::new(), Vec::new());
    for (i, nid) in fill(store, 100).into_iter().enumerate() {
        match i % 400 {
            0 => few.push(nid),
            _ => gone.push(nid),
        }
    }
    gone.into_iter().for_each(|nid| delete(store, nid).unwrap());
    store.sync().unwrap();
    few
}

#[test]
fn data_gets_chunks_in_which_little_metadata_is_live() {
    let world = World::new(27, &[64]);
    let store = world.open_with(plain()).unwrap();
    let before = taken_by_data(&store);
    let few = leave_few(&store);
    let metadata = store.meta_chunks().iter().filter(|is| **is).count();
    let free_blocks = store.space().free_blocks;
    let taken = taken_by_data(&store);
    assert!(
        taken >= free_blocks / 100 * 95,
        "{taken} of {free_blocks} blocks"
    );
    assert!(taken >= before / 10 * 8, "{taken} of {before} blocks");
    let left = store.meta_chunks().iter().filter(|is| **is).count();
    assert!(left * 3 < metadata, "{left} of {metadata} chunks");
    for nid in &few {
        set(&store, *nid, 9).unwrap();
    }
    // What data gave back is there for metadata.
    assert!(fill(&store, 100).len() > few.len() * 100);
    store.close().unwrap();
    drop(store);
    let nodes = world.check("after metadata gave way");
    assert!(few.iter().all(|nid| nodes[nid].0[0] == 9));
}

/// What was not emptied because nothing could be read counted as nothing to gain from then on.
#[test]
fn data_gets_chunks_of_metadata_after_a_short_outage() {
    let world = World::new(30, &[64]);
    let options = plain();
    let clock = options.clock.clone();
    let store = world.open_with(options).unwrap();
    let few = leave_few(&store);
    store.checkpoint().unwrap();
    let free_blocks = store.space().free_blocks;
    let mut held = 0;
    world.devices[0].fail_reads(Times::Always, None);
    while let Ok(promise) = store.promise(64) {
        held += promise.into_blocks();
    }
    world.devices[0].heal();
    assert!(held < free_blocks / 2, "{held} of {free_blocks} blocks");
    clock.advance(Duration::from_secs(2));
    while let Ok(promise) = store.promise(64) {
        held += promise.into_blocks();
    }
    assert!(
        held >= free_blocks / 100 * 95,
        "{held} of {free_blocks} blocks"
    );
    drop(store.adopt_promise(held));
    store.close().unwrap();
    drop(store);
    assert_eq!(world.check("after the outage").len(), few.len());
}

/// The blocks that somebody had taken for a promise were missing for others, once as taken and once as promised, until their map had been read.
#[test]
fn who_reads_a_map_for_promised_blocks_takes_them_once() {
    let world = World::new(31, &[64]);
    let options = StoreOptions {
        // Whatever CPUs make the nodes, they lie where the map does, and take its place.
        shards: 1,
        ..World::options()
    };
    let store = world.open_with(options).unwrap();
    let mut first = store.promise(1).unwrap();
    let reservation = store.reserve(&mut first, 1, None).unwrap();
    let mut op = store.begin(Need::Reclaim).unwrap();
    op.take(reservation);
    op.commit();
    drop(first);
    let nids: Vec<Nid> = (0..2_000)
        .map(|i| create(&store, vec![i; 100]).unwrap())
        .collect();
    store.checkpoint().unwrap();
    let mut held = 0;
    for blocks in [4096, 256, 16, 1] {
        while let Ok(promise) = store.promise(blocks) {
            held += promise.into_blocks();
        }
    }
    store.checkpoint().unwrap();
    // These take the place of the map in memory.
    for nid in nids.iter().cycle().take(4 * nids.len()) {
        store.get(*nid).unwrap().into_read().unwrap();
    }
    drop(store.adopt_promise(65));
    let promised = store.promise(64).unwrap().into_blocks();
    world.devices[0].stick();
    let has_taken = Arc::new(AtomicBool::new(false));
    let taking = {
        let (store, has_taken) = (Arc::clone(&store), Arc::clone(&has_taken));
        let take = move || {
            let mut promise = store.adopt_promise(promised);
            let reserved = store.reserve(&mut promise, 64, None).unwrap();
            assert_eq!(reserved.extent().len, 64);
            has_taken.store(true, Ordering::Relaxed);
        };
        base::thread::spawn("takes", take).unwrap()
    };
    while world.devices[0].waiting() == 0 {
        assert!(!has_taken.load(Ordering::Relaxed), "the map is in memory");
        base::thread::yield_now();
    }
    let last = store.promise(1).map(|promise| promise.into_blocks());
    world.devices[0].release();
    taking.join().unwrap();
    store.adopt_promise(last.unwrap());
    drop(store.adopt_promise(held - 65));
    store.close().unwrap();
    drop(store);
    world.check("at the end");
}

/// Half of each segment is live, and more must be free for checkpoints than one of them cleans.
#[test]
fn data_gets_what_is_free_when_half_of_all_metadata_is_live() {
    let world = World::new(29, &[512]);
    let options = StoreOptions {
        node_cache_bytes: 64 << 20,
        ..plain()
    };
    let store = world.open_with(options).unwrap();
    let mut left = 0;
    for (i, nid) in fill(&store, 1500).into_iter().enumerate() {
        match i % 2 {
            0 => left += 1,
            _ => delete(&store, nid).unwrap(),
        }
    }
    store.checkpoint().unwrap();
    let free_blocks = store.space().free_blocks;
    assert!(free_blocks > 30_000, "{free_blocks}");
    let taken = taken_by_data(&store);
    assert!(
        taken >= free_blocks / 100 * 95,
        "{taken} of {free_blocks} blocks"
    );
    store.close().unwrap();
    drop(store);
    assert_eq!(world.check("after data took all").len(), left);
}

#[test]
fn power_cuts_while_chunks_are_emptied_lose_nothing() {
    for seed in 0..16 {
        let mut world = World::new(40 + seed, &[64]);
        let mut rng = Rng::new(40 + seed);
        let store = world.open_with(plain()).unwrap();
        let few = leave_few(&store);
        for (i, nid) in few.iter().enumerate() {
            set(&store, *nid, i as u64 + 2).unwrap();
        }
        store.sync().unwrap();
        world.switch.cut_after(rng.below(120));
        let mut held = 0;
        let error = loop {
            let promise = store.promise(64).map(|promise| promise.into_blocks());
            match promise {
                Ok(blocks) => held += blocks,
                Err(error) => break error,
            }
        };
        if !world.switch.is_cut() {
            assert!(matches!(error, Error::NoSpace), "seed {seed}: {error}");
            store.adopt_promise(held);
        }
        drop(store);
        world.switch.cut_now();
        world.restart(&mut rng);
        let nodes = world.check(&format!("seed {seed}"));
        assert_eq!(nodes.len(), few.len(), "seed {seed}");
        for (i, nid) in few.iter().enumerate() {
            assert_eq!(nodes[nid].0[0], i as u64 + 2, "seed {seed}");
        }
        let store = world.open_with(plain()).unwrap();
        assert!(taken_by_data(&store) > 10_000, "seed {seed}");
        store.close().unwrap();
        drop(store);
        world.check(&format!("seed {seed}, after data took all"));
    }
}

#[test]
fn nodes_change_when_data_and_metadata_fill_the_array() {
    let world = World::new(23, &[64]);
    let store = world.open_with(plain()).unwrap();
    let nids: Vec<Nid> = (0..10_000)
        .map(|i| create(&store, vec![i; 200]).unwrap())
        .collect();
    let held = take_all(&store, 64);
    let mut rng = Rng::new(23);
    for i in 0..10_000 {
        let nid = *rng.pick(&nids);
        set(&store, nid, i).unwrap_or_else(|e| panic!("update {i}: {e}"));
    }
    free(&store, held);
    store.close().unwrap();
    drop(store);
    world.check("after updates");
}

#[test]
fn promises_hold_while_metadata_grows_and_chunks_retire() {
    let world = World::new(24, &[64]);
    let store = world.open_with(plain()).unwrap();
    let mut held = take_all(&store, 64);
    let mut rng = Rng::new(24);
    for round in 0..20 {
        // Whole chunks become empty.
        held.sort();
        let from = rng.below(held.len() as u64 * 3 / 4) as usize;
        let emptied = from..from + held.len() / 4;
        free(&store, held.drain(emptied));
        store.sync().unwrap();
        let mut promises = Vec::new();
        while let Ok(promise) = store.promise(64) {
            promises.push(promise);
        }
        for _ in 0..500 {
            match create(&store, vec![1; 200]) {
                Ok(_) | Err(Error::NoSpace) => {}
                Err(error) => panic!("{error}"),
            }
        }
        store.checkpoint().unwrap();
        store.checkpoint().unwrap();
        for (i, promise) in promises.iter_mut().enumerate() {
            while promise.blocks() > 0 {
                let blocks = promise.blocks() as u32;
                let reservation = store
                    .reserve(promise, blocks, None)
                    .unwrap_or_else(|e| panic!("round {round}, promise {i}: {e}"));
                let mut op = store.begin(Need::Reclaim).unwrap();
                held.push(op.take(reservation));
                op.commit();
            }
        }
    }
    assert!(store.failed().is_none());
}

/// A checkpoint turns data chunks without data into free ones; until it is durable that they have no map they are neither.
#[test]
fn space_is_there_for_who_wants_it_while_empty_chunks_retire() {
    let world = World::new(26, &[64]);
    let store = world.open_with(plain()).unwrap();
    let before = store.space().free_blocks;
    let held = take_all(&store, 64);
    let full = store.space().free_blocks;
    free(&store, held);
    store.sync().unwrap();
    let emptied = store.space().free_blocks;
    assert!(
        full < before / 8 && emptied > before / 8 * 7,
        "{full}, {emptied} of {before}"
    );
    store.checkpoint().unwrap();
    store.sync().unwrap();
    // Nobody has released them since.
    assert!(store.space().free_blocks > before / 8 * 7);
    let promise = store.promise(before / 2).unwrap();
    assert_eq!(promise.blocks(), before / 2);
    drop(promise);
    store.close().unwrap();
    drop(store);
    world.check("after all chunks were empty");
}

/// Byte offsets of both copies of both slots on an array of one device of 64 MiB.
pub fn slot_places() -> [[u64; 2]; 2] {
    let tail = (64 << 20) / 4096 - 16 + 13;
    [0, 1].map(|slot| [(1 + slot) * 4096, (tail + slot) * 4096])
}

fn peek<const N: usize>(world: &World, offset: u64) -> [u8; N] {
    let mut bytes = [0; N];
    world.devices[0].peek(offset, &mut bytes);
    bytes
}

#[test]
fn the_loss_of_the_newest_slot_is_told_even_if_recovery_wrote_it() {
    let mut rng = Rng::new(25);
    let mut world = World::new(25, &[64]);
    let store = world.open().unwrap();
    let nid = create(&store, vec![1]).unwrap();
    store.sync().unwrap();
    drop(store);
    world.switch.cut_now();
    world.restart(&mut rng);
    // The first checkpoint of this mount is recovery's own.
    let store = world.open().unwrap();
    set(&store, nid, 2).unwrap();
    store.sync().unwrap();
    drop(store);
    world.switch.cut_now();
    world.restart(&mut rng);
    let sequence = |slot: usize| u64::from_le_bytes(peek(&world, slot_places()[slot][0] + 32));
    let newest = (sequence(1) > sequence(0)) as usize;
    for place in slot_places()[newest] {
        world.devices[0].poke(place, &[0x5A; 4096]);
    }
    match world.open() {
        Err(Error::Damaged(_)) => {}
        Err(error) => panic!("{error}"),
        Ok(store) => panic!(
            "synced 2, found {:?}",
            store.get(nid).unwrap().into_read().unwrap().0
        ),
    }
}

/// Which of the slots is the newest, of a node that was changed between two checkpoints and after them.
fn after_two_checkpoints(seed: u64) -> (World, Nid, [u64; 2]) {
    let mut world = World::new(seed, &[64]);
    let store = world.open().unwrap();
    let nid = create(&store, vec![1]).unwrap();
    for value in [2, 3] {
        store.checkpoint().unwrap();
        set(&store, nid, value).unwrap();
    }
    store.sync().unwrap();
    drop(store);
    world.switch.cut_now();
    world.restart(&mut Rng::new(seed));
    let sequence = |slot: usize| u64::from_le_bytes(peek(&world, slot_places()[slot][0] + 32));
    let newest = (sequence(1) > sequence(0)) as usize;
    (world, nid, slot_places()[newest])
}

#[test]
fn either_copy_of_the_newest_slot_serves() {
    for copy in 0..2 {
        let (world, nid, places) = after_two_checkpoints(28);
        world.devices[0].poke(places[copy], &[0x5A; 4096]);
        let store = world.open().unwrap();
        assert_eq!(store.get(nid).unwrap().into_read().unwrap().0, [3]);
    }
}

/// The chain of the older one goes on to batches that name the other.
#[test]
fn the_loss_of_the_newest_slot_is_told_by_the_journal_of_the_one_before() {
    let (world, _, places) = after_two_checkpoints(29);
    for place in places {
        world.devices[0].poke(place, &[0x5A; 4096]);
    }
    assert!(matches!(world.open(), Err(Error::Damaged(_))));
}

/// A batch as large as batches get, and one after it that was gathered when it was durable.
#[test]
fn the_loss_of_a_large_batch_is_told() {
    let mut rng = Rng::new(38);
    let mut world = World::new(38, &[4096]);
    let options = StoreOptions {
        node_cache_bytes: 256 << 20,
        dirty_bytes: Some(128 << 20),
        staging_bytes: 64 << 20,
        ..World::options()
    };
    let store = world.open_with(options).unwrap();
    let first = store.journal_batches();
    let nids: Vec<Nid> = (0..2_500)
        .map(|i| create(&store, vec![i; 1900]).unwrap())
        .collect();
    store.sync().unwrap();
    assert!(
        store.journal_batches() - first > 1,
        "none is larger than recovery looks"
    );
    set(&store, nids[0], 7).unwrap();
    store.sync().unwrap();
    assert!(store.journal_bytes() > 32 << 20);
    drop(store);
    world.switch.cut_now();
    world.restart(&mut rng);
    // In the records of the first batch, which begins where the mount's first checkpoint left the ring.
    world.devices[0].corrupt(world.journal_start() + (1 << 20), 512, &mut rng);
    assert!(matches!(world.open(), Err(Error::Damaged(_))));
}

#[test]
fn checkpoints_wait_for_more_changes_while_there_is_room_and_give_way_to_data() {
    let mut world = World::new(34, &[256]);
    let options = StoreOptions {
        node_cache_bytes: 64 << 20,
        dirty_bytes: Some(16 << 20),
        ..World::options()
    };
    let store = world.open_with(options.clone()).unwrap();
    // 12 MB: more than twice a 64th of the array, less than twice a 32nd.
    let node = |i| create(&store, vec![i; 1500]).unwrap();
    let nids: Vec<Nid> = (0..1000).map(node).collect();
    store.checkpoint().unwrap();
    let change_all = |value| {
        let before = store.newest_checkpoint();
        nids.iter()
            .for_each(|nid| set(&store, *nid, value).unwrap());
        store.newest_checkpoint() - before
    };
    assert_eq!(change_all(1), 0);
    // What is free is there for data, but for what the next checkpoint writes.
    let free_blocks = store.space().free_blocks;
    let promises: Vec<_> = std::iter::from_fn(|| store.promise(64).ok()).collect();
    let promised: u64 = promises.iter().map(|promise| promise.blocks()).sum();
    assert!(
        promised >= free_blocks / 100 * 92,
        "{promised} of {free_blocks}"
    );
    assert!(change_all(2) > 0);
    drop(promises);
    let extents = take_all(&store, 64);
    let taken: u64 = extents.iter().map(|extent| extent.len as u64).sum();
    assert!(taken >= free_blocks / 10 * 9, "{taken} of {free_blocks}");
    for value in 3..6 {
        assert!(change_all(value) > 0);
    }
    free(&store, extents);
    store.sync().unwrap();
    drop(store);
    world.switch.cut_now();
    world.restart(&mut Rng::new(34));
    let nodes = world.check("after changes beside data");
    assert!(nids.iter().all(|nid| nodes[nid].0[0] == 5));
    world.open_with(options).unwrap().close().unwrap();
}

/// While nothing can be read nothing is cleaned, and each checkpoint takes room: it must not take what the end of that needs. Once the last free segment
/// was gone no checkpoint could be made any more, not even that of a mount.
#[test]
fn a_full_array_outlives_a_time_in_which_nothing_can_be_read() {
    for (words, data) in [(20, true), (20, false), (300, true), (1500, true)] {
        let mut world = World::new(71, &[64]);
        let clock = Clock::manual(1);
        let options = StoreOptions {
            // All nodes and pages stay in memory.
            node_cache_bytes: 64 << 20,
            dirty_bytes: Some(1 << 20),
            clock: clock.clone(),
            ..World::options()
        };
        let store = world.open_with(options.clone()).unwrap();
        let nids = fill(&store, words);
        let mut rng = Rng::new(words as u64);
        // The first error that is not the device's.
        let mut some = |store: &TestStore, most: usize, fails: bool| {
            (0..most).find_map(|i| {
                let nid = *rng.pick(&nids);
                match change(store, nid, Need::Reclaim, Change::Set(0, i as u64)) {
                    Err(Error::Device(_)) if fails => None,
                    outcome => outcome.err(),
                }
            })
        };
        assert!(some(&store, 2_000, false).is_none());
        let held = if data {
            take_all(&store, 8)
        } else {
            Vec::new()
        };
        world.devices[0].fail_reads(Times::Always, None);
        for _ in 0..50 {
            let error = some(&store, 4_000, true);
            assert!(error.is_none(), "{words}, {data}: {error:?}");
            store.checkpoint().unwrap();
            clock.advance(Duration::from_secs(10));
        }
        world.devices[0].heal();
        clock.advance(Duration::from_secs(100));
        let error = some(&store, 4_000, false);
        assert!(error.is_none(), "{words}, {data}: {error:?}");
        store.sync().unwrap();
        drop((store, held));
        world.switch.cut_now();
        world.restart(&mut Rng::new(1));
        let store = world.open_with(options).unwrap();
        assert!(some(&store, 4_000, false).is_none());
        for nid in &nids {
            delete(&store, *nid).unwrap();
        }
        store.close().unwrap();
        drop(store);
        world.check("at the end");
    }
}

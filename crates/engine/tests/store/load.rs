//! Many threads, full arrays, small memory: the store under pressure.

use crate::world::{Change, TestStore, World, change, create, delete, fill, free, take_all};
use base::rng::Rng;
use device::sim::Times;
use engine::{Need, StoreOptions};
use format::Nid;
use std::collections::BTreeMap;
use std::time::Duration;

fn busy_options() -> StoreOptions {
    StoreOptions {
        background: true,
        workers: 4,
        shards: 4,
        commit_interval: Duration::from_millis(2),
        checkpoint_interval: Duration::from_millis(5),
        ..World::options()
    }
}

#[test]
fn threads_create_change_delete_and_sync_while_checkpoints_run() {
    let mut world = World::new(11, &[64, 64]);
    let store = world.open_with(busy_options()).unwrap();
    let models = base::thread::parallel(4, |worker| {
        let mut rng = Rng::new(worker as u64);
        let mut model: BTreeMap<Nid, Vec<u64>> = BTreeMap::new();
        for i in 0..6_000u64 {
            match rng.below(8) {
                0..=2 => {
                    let state = vec![i; rng.below(60) as usize];
                    let nid = create(&store, state.clone()).unwrap();
                    assert!(model.insert(nid, state).is_none());
                }
                3..=5 if !model.is_empty() => {
                    let nid = *model
                        .keys()
                        .nth(rng.below(model.len() as u64) as usize)
                        .unwrap();
                    change(&store, nid, Need::Grow, Change::Push(i)).unwrap();
                    model.get_mut(&nid).unwrap().push(i);
                }
                6 if !model.is_empty() => {
                    let nid = *model
                        .keys()
                        .nth(rng.below(model.len() as u64) as usize)
                        .unwrap();
                    delete(&store, nid).unwrap();
                    model.remove(&nid);
                }
                _ if rng.one_in(20) => store.sync().unwrap(),
                _ => {}
            }
        }
        store.sync().unwrap();
        model
    });
    let check = |store: &TestStore| {
        for (nid, state) in models.iter().flatten() {
            assert_eq!(
                store.get(*nid).unwrap().into_read().unwrap().0,
                *state,
                "node {nid}"
            );
        }
    };
    check(&store);
    drop(store);
    world.switch.cut_now();
    world.restart(&mut Rng::new(1));
    let store = world.open_with(busy_options()).unwrap();
    check(&store);
    store.close().unwrap();
    world.check("after the end");
    drop(store);
    check(&world.open().unwrap());
}

#[test]
fn batches_and_checkpoints_that_several_threads_make_hold_everything() {
    let mut world = World::new(17, &[512]);
    let options = StoreOptions {
        workers: 3,
        shards: 4,
        node_cache_bytes: 256 << 20,
        dirty_bytes: None,
        staging_bytes: 64 << 20,
        ..World::options()
    };
    let store = world.open_with(options.clone()).unwrap();
    let mut nodes: BTreeMap<Nid, u64> = BTreeMap::new();
    for round in 0..3 {
        // Every other node goes, and others take their nids.
        let gone: Vec<Nid> = nodes.keys().copied().step_by(2).collect();
        for nid in gone {
            delete(&store, nid).unwrap();
            nodes.remove(&nid);
        }
        let made = base::thread::parallel(4, |_| {
            let make = |i| (create(&store, vec![i; 2]).unwrap(), i);
            (0..8_000).map(make).collect::<Vec<_>>()
        });
        nodes.extend(made.into_iter().flatten());
        match round {
            0 => store.checkpoint().unwrap(),
            _ => store.sync().unwrap(),
        }
    }
    drop(store);
    world.switch.cut_now();
    world.restart(&mut Rng::new(1));
    let store = world.open_with(options).unwrap();
    store.close().unwrap();
    let found = world.check("after the end");
    let found: BTreeMap<Nid, u64> = found.into_iter().map(|(nid, n)| (nid, n.0[0])).collect();
    assert_eq!(found, nodes);
}

#[test]
fn many_small_batches_do_not_overrun_the_ring() {
    // Operations took their credits out of what earlier ones had left, which had not paid for the padding of
    // their batches.
    let mut world = World::new(18, &[64]);
    let store = world.open().unwrap();
    let nid = create(&store, vec![0]).unwrap();
    // The ring has room for two thirds of these batches, of a sector each.
    for i in 1..=12_000 {
        change(&store, nid, Need::Reclaim, Change::Set(0, i)).unwrap();
        store.sync().unwrap();
    }
    drop(store);
    world.switch.cut_now();
    world.restart(&mut Rng::new(1));
    let store = world.open().unwrap();
    assert_eq!(store.get(nid).unwrap().into_read().unwrap().0, [12_000]);
    store.close().unwrap();
    world.check("after the end");
}

#[test]
fn a_full_array_refuses_growth_and_still_deletes() {
    let world = World::new(12, &[64]);
    let store = world.open().unwrap();
    for _ in 0..3 {
        let nids = fill(&store, 1500);
        assert!(
            nids.len() > 1500,
            "only {} nodes of 12 kB fit in 64 MiB",
            nids.len()
        );
        assert!(store.failed().is_none());
        for nid in nids {
            delete(&store, nid).unwrap();
        }
        store.checkpoint().unwrap();
        store.checkpoint().unwrap();
    }
    store.close().unwrap();
    world.check("after the end");
}

#[test]
fn changes_scattered_over_a_full_array_do_not_exhaust_checkpoints() {
    let world = World::new(15, &[64]);
    let options = StoreOptions {
        dirty_bytes: None,
        ..World::options()
    };
    let store = world.open_with(options).unwrap();
    let nids = fill(&store, 4);
    assert!(
        nids.len() > 100_000,
        "only {} small nodes fit in 64 MiB",
        nids.len()
    );
    let mut rng = Rng::new(1);
    for i in 0..60_000 {
        let nid = *rng.pick(&nids);
        let set = Change::Set(i % 4, i as u64);
        change(&store, nid, Need::Reclaim, set).unwrap();
    }
    for nid in nids {
        delete(&store, nid).unwrap();
    }
    store.close().unwrap();
    world.check("after the end");
}

#[test]
fn data_fills_the_array_and_comes_back() {
    let world = World::new(13, &[64]);
    let store = world.open().unwrap();
    let mut counts = Vec::new();
    for _ in 0..3 {
        let held = take_all(&store, 100);
        counts.push(held.iter().map(|e| e.len as u64).sum::<u64>());
        free(&store, held);
        store.sync().unwrap();
    }
    let blocks = (64 << 20) / 4096;
    assert!(
        counts.iter().all(|c| *c > blocks / 2),
        "{counts:?} of {blocks} blocks"
    );
    assert!(
        counts[2] * 100 > counts[0] * 95,
        "{counts:?}: space is not lost"
    );
}

#[test]
fn a_hundred_thousand_nodes_work_in_little_memory() {
    let world = World::new(14, &[256]);
    let options = StoreOptions {
        node_cache_bytes: 1 << 20,
        ..World::options()
    };
    let store = world.open_with(options.clone()).unwrap();
    let nids: Vec<Nid> = (0..100_000)
        .map(|i| create(&store, vec![i; 3]).unwrap())
        .collect();
    let mut rng = Rng::new(4);
    for _ in 0..20_000 {
        let i = rng.below(nids.len() as u64);
        assert_eq!(
            store.get(nids[i as usize]).unwrap().into_read().unwrap().0,
            [i; 3]
        );
    }
    store.close().unwrap();
    world.check("after the end");
    drop(store);
    let store = world.open_with(options).unwrap();
    for (i, nid) in (0..).zip(&nids).step_by(97) {
        assert_eq!(store.get(*nid).unwrap().into_read().unwrap().0, [i; 3]);
    }
}

#[test]
fn readers_find_every_node_while_checkpoints_move_table_pages() {
    // A leaf page was evicted after a checkpoint had taken it and before it was written, and a
    // page that moved while it was being read was called damaged.
    let world = World::new(16, &[256]);
    let options = StoreOptions {
        node_cache_bytes: 128 << 10,
        ..busy_options()
    };
    let store = world.open_with(options).unwrap();
    let nids: Vec<Nid> = (0..60_000)
        .map(|i| create(&store, vec![i; 2]).unwrap())
        .collect();
    base::thread::parallel(4, |worker| {
        let mut rng = Rng::new(worker as u64);
        for i in 0..8_000 {
            let nid = nids[rng.below(nids.len() as u64) as usize];
            if worker > 1 {
                if i % 64 == 0 {
                    let some = (0..64).map(|_| *rng.pick(&nids));
                    store.read_ahead(some.collect::<Vec<_>>());
                }
                let node = store.get(nid).unwrap();
                assert_eq!(node.read().unwrap().0.len(), 2);
            } else {
                change(&store, nid, Need::Reclaim, Change::Set(1, i)).unwrap();
            }
        }
    });
    store.close().unwrap();
}

#[test]
fn nodes_that_were_read_ahead_take_no_reads_of_their_own() {
    let world = World::new(17, &[64, 64]);
    let options = StoreOptions {
        node_cache_bytes: 16 << 20,
        ..World::options()
    };
    let store = world.open_with(options.clone()).unwrap();
    let mut nids: Vec<Nid> = (0..3_000)
        .map(|i| create(&store, vec![i; 1 + i as usize % 40]).unwrap())
        .collect();
    let gone = nids.pop().unwrap();
    delete(&store, gone).unwrap();
    store.close().unwrap();
    drop(store);
    let store = world.open_with(options).unwrap();
    let reads = || {
        store
            .array()
            .stats()
            .devices
            .iter()
            .map(|d| d.reads)
            .sum::<u64>()
    };
    // Devices that fail are met by those who get the nodes.
    let fail = |times| world.devices.iter().for_each(|d| d.fail_reads(times, None));
    let first = nids[..2].iter().copied();
    store.get(nids[2]).unwrap();
    fail(Times::Always);
    assert_eq!(store.read_ahead(first.clone()), 2);
    assert!(store.get(nids[0]).is_err());
    world.devices.iter().for_each(|d| d.heal());
    store.read_ahead(nids.iter().copied().chain([gone, Nid(1 << 40)]));
    let before = reads();
    for (i, nid) in (0..).zip(&nids) {
        let state = vec![i; 1 + i as usize % 40];
        assert_eq!(store.get(*nid).unwrap().into_read().unwrap().0, state);
    }
    assert_eq!(reads(), before);
    assert!(store.get(gone).is_err());
    // What is there already costs nothing, and what changed is not read back old.
    change(&store, nids[7], Need::Grow, Change::Push(7)).unwrap();
    assert_eq!(store.read_ahead(nids.iter().copied()), 0);
    assert_eq!(reads(), before);
    assert_eq!(store.get(nids[7]).unwrap().into_read().unwrap().0, [7; 9]);
}

//! What bounds the store's memory: staged records, nodes that grow, replay in groups.

use crate::world::{Change, Numbers, TestStore, World, change, create, delete};
use base::rng::Rng;
use engine::{Need, StoreOptions};
use format::Nid;
use std::collections::BTreeMap;

#[test]
fn records_that_nobody_syncs_are_committed_when_they_are_many() {
    let world = World::new(31, &[64]);
    let options = StoreOptions {
        staging_bytes: 32 << 10,
        ..World::options()
    };
    let store = world.open_with(options).unwrap();
    let before = store.durable_epoch();
    let mut committed = 0;
    for i in 0..200 {
        let epoch = store.epoch();
        create(&store, vec![i; 256]).unwrap();
        committed += (store.epoch() > epoch) as u32;
    }
    // 400 KiB of records, committed whenever 64 KiB wait.
    assert!(store.durable_epoch() > before);
    assert!((5..=7).contains(&committed), "{committed} commits");
}

#[test]
fn nodes_that_grow_by_small_changes_bring_a_checkpoint() {
    let world = World::new(32, &[64]);
    let options = StoreOptions {
        dirty_bytes: Some(64 << 10),
        ..World::options()
    };
    let store = world.open_with(options).unwrap();
    let new = || create(&store, Vec::new()).unwrap();
    let nids: Vec<Nid> = std::iter::repeat_with(new).take(20).collect();
    assert_eq!(store.space().nodes, 0);
    for i in 0..1000 {
        for nid in &nids {
            change(&store, *nid, Need::Grow, Change::Push(i)).unwrap();
        }
    }
    // Twice 64 KiB may be dirty; the nodes take 160 KiB by now.
    assert_eq!(store.space().nodes, 20);
}

/// Creates, changes and deletes nodes; nids come back, and versions go on.
fn busy(store: &TestStore, rng: &mut Rng, model: &mut BTreeMap<Nid, Vec<u64>>, rounds: u64) {
    for i in 0..rounds {
        let any = (!model.is_empty()).then(|| {
            let place = rng.below(model.len() as u64) as usize;
            *model.keys().nth(place).unwrap()
        });
        match (rng.below(8), any) {
            (0..=2, _) | (_, None) => {
                let state = vec![i; rng.below(40) as usize];
                let nid = create(store, state.clone()).unwrap();
                assert!(model.insert(nid, state).is_none());
            }
            (3..=5, Some(nid)) => {
                change(store, nid, Need::Grow, Change::Push(i)).unwrap();
                model.get_mut(&nid).unwrap().push(i);
            }
            (_, Some(nid)) if model.len() > 100 => {
                delete(store, nid).unwrap();
                model.remove(&nid);
            }
            _ => {}
        }
    }
}

#[test]
fn a_long_journal_is_replayed_in_groups() {
    let mut rng = Rng::new(33);
    let mut model = BTreeMap::new();
    let mut world = World::new(33, &[256]);
    // Groups of one batch, of several, of all; a batch is at least as long as a sync's.
    for (staging_bytes, replayed_by) in [
        (1, 1),
        (4 << 10, 1),
        (8 << 10, 64 << 10),
        (1 << 10, 8 << 20),
    ] {
        let options = |staging_bytes| StoreOptions {
            staging_bytes,
            // No checkpoint on the way: all is left to replay.
            dirty_bytes: Some(4 << 20),
            ..World::options()
        };
        let store = world.open_with(options(staging_bytes)).unwrap();
        busy(&store, &mut rng, &mut model, 3000);
        store.sync().unwrap();
        drop(store);
        world.switch.cut_now();
        world.restart(&mut rng);
        let plain: BTreeMap<Nid, Vec<u64>> = world
            .check("before replay")
            .into_iter()
            .map(|(nid, Numbers(state))| (nid, state))
            .collect();
        assert!(plain == model, "staging {staging_bytes}");
        let store = world.open_with(options(replayed_by)).unwrap();
        for (nid, state) in &model {
            assert_eq!(
                store.get(*nid).unwrap().into_read().unwrap().0,
                *state,
                "node {nid}"
            );
        }
        busy(&store, &mut rng, &mut model, 300);
        store.close().unwrap();
        drop(store);
        world.check("after the end");
        drop(world.open().unwrap());
    }
}

#[test]
fn nodes_of_a_checkpoint_that_runs_count_until_it_lets_go() {
    // Charges that are not given back, or twice, would make checkpoints begin earlier and earlier, or never.
    let world = World::new(35, &[64]);
    let options = StoreOptions {
        background: true,
        workers: 2,
        shards: 2,
        dirty_bytes: Some(64 << 10),
        ..World::options()
    };
    let store = world.open_with(options).unwrap();
    base::thread::parallel(2, |worker| {
        let (mut rng, mut model) = (Rng::new(worker as u64), BTreeMap::new());
        busy(&store, &mut rng, &mut model, 5000);
    });
    assert!(store.newest_checkpoint() > 10);
    // Closing asserts that nothing is charged any more.
    store.close().unwrap();
}

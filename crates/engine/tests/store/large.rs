//! Large operations: taken back as a whole, or logged in many records that a crash leaves together.

use crate::world::{Change, Numbers, TestStore, World, create};
use base::rng::Rng;
use engine::{Error, Extensive, Op};
use format::Nid;

const ASKED: Extensive = Extensive {
    logged: 400 << 10,
    dirty: 200 << 10,
};

fn show(store: &TestStore, nid: Nid) -> Option<Vec<u64>> {
    let node = store.get(nid).and_then(|node| Ok(node.read()?.0.clone()));
    match node {
        Ok(numbers) => Some(numbers),
        Err(Error::Gone(_)) => None,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_large_operation_that_does_not_commit_leaves_nothing() {
    let world = World::new(1, &[64]);
    let store = world.open().unwrap();
    let nids: Vec<Nid> = (0..20).map(|i| create(&store, vec![i]).unwrap()).collect();
    store.sync().unwrap();
    let batches = store.journal_batches();
    let mut made = Vec::new();
    for _ in 0..3 {
        let mut op = store.begin_large(ASKED).unwrap();
        made.push(change_all(&store, &mut op, &nids, 77));
        drop(op);
        for (i, nid) in (0..).zip(&nids) {
            assert_eq!(show(&store, *nid), Some(vec![i]));
        }
        assert_eq!(show(&store, *made.last().unwrap()), None);
    }
    // The number goes back, and the next one gets it.
    assert!(made.iter().all(|nid| *nid == made[0]), "{made:?}");
    store.sync().unwrap();
    assert_eq!(store.journal_batches(), batches);
    assert!(store.failed().is_none());
    // And all goes on as if nothing had been.
    let mut op = store.begin_large(ASKED).unwrap();
    let new = change_all(&store, &mut op, &nids, 78);
    assert_eq!(op.excess(0), None);
    let epoch = op.commit();
    store.commit_through(epoch).unwrap();
    assert_eq!(show(&store, nids[3]), Some(vec![78, 78]));
    assert_eq!(show(&store, nids[19]), None);
    assert_eq!(show(&store, new), Some(vec![78; 4]));
    store.close().unwrap();
    world.check("after all");
}

fn change_all(store: &TestStore, op: &mut Op<'_, Numbers>, nids: &[Nid], mark: u64) -> Nid {
    let nodes: Vec<_> = nids.iter().map(|nid| store.get(*nid).unwrap()).collect();
    let slots = op.lock_sorted(&nodes.iter().collect::<Vec<_>>()).unwrap();
    let (last, others) = slots.split_last().unwrap();
    for slot in others {
        op.apply(*slot, Change::Set(0, mark));
        op.apply(*slot, Change::Push(mark));
    }
    let fresh = store.reserve_nid().unwrap();
    let nid = fresh.nid();
    let slot = op.create(fresh, Numbers(vec![mark; 3]));
    // A plan may rest on what the operation made.
    assert_eq!(op.own(nid), Some(slot));
    op.apply(slot, Change::Push(mark));
    op.delete(*last);
    nid
}

#[test]
fn what_is_larger_than_it_was_begun_for_is_told() {
    let world = World::new(2, &[64]);
    let store = world.open().unwrap();
    let nid = create(&store, vec![0; 100]).unwrap();
    let small = Extensive {
        logged: 100,
        dirty: 200 << 10,
    };
    let mut op = store.begin_large(small).unwrap();
    let slot = op.lock(&store.get(nid).unwrap()).unwrap();
    op.apply(slot, Change::Set(0, 1));
    assert!(!op.is_excessive());
    assert_eq!(op.excess(0), None);
    (0..10).for_each(|i| op.apply(slot, Change::Set(1, i)));
    assert!(op.is_excessive());
    let needed = op.excess(0).unwrap();
    assert!(needed.logged > 100 && needed.dirty < small.dirty);
    drop(op);
    assert_eq!(show(&store, nid), Some(vec![0; 100]));
    let too_much = Extensive {
        logged: store.large_most().logged + 1,
        dirty: 0,
    };
    let refused = store.begin_large(too_much);
    assert!(matches!(refused, Err(Error::TooLarge)));
}

/// The damage is found after changes of other nodes, and of the same one.
#[test]
fn a_large_operation_that_meets_damage_leaves_nothing() {
    for commits in [false, true] {
        let world = World::new(3, &[64]);
        let store = world.open().unwrap();
        let nids: Vec<Nid> = (0..20).map(|i| create(&store, vec![i]).unwrap()).collect();
        store.sync().unwrap();
        let batches = store.journal_batches();
        let mut op = store.begin_large(ASKED).unwrap();
        let made = change_all(&store, &mut op, &nids, 77);
        let slot = op.slot_of(nids[3]).unwrap();
        op.apply(slot, Change::Set(1000, 1));
        assert!(store.failed().is_some());
        match commits {
            true => _ = op.commit(),
            false => drop(op),
        }
        for (i, nid) in (0..).zip(&nids) {
            assert_eq!(show(&store, *nid), Some(vec![i]));
        }
        assert_eq!(show(&store, made), None);
        assert_eq!(store.journal_batches(), batches);
        drop(store);
        let nodes = world.check("after damage");
        let found: Vec<_> = nids.iter().map(|nid| nodes[nid].0[0]).collect();
        assert_eq!(found, (0..20).collect::<Vec<_>>());
    }
}

#[test]
fn an_operation_with_more_records_than_it_was_begun_for_fails_as_a_whole() {
    let world = World::new(4, &[64]);
    let store = world.open().unwrap();
    let nid = create(&store, vec![0; 100]).unwrap();
    store.sync().unwrap();
    let batches = store.journal_batches();
    let small = Extensive {
        logged: 100,
        dirty: 200 << 10,
    };
    let mut op = store.begin_large(small).unwrap();
    let slot = op.lock(&store.get(nid).unwrap()).unwrap();
    // Some records' worth, and nobody asked.
    (0..40_000).for_each(|i| op.apply(slot, Change::Set(1, i)));
    op.commit();
    assert!(store.failed().is_some());
    assert_eq!(show(&store, nid), Some(vec![0; 100]));
    assert_eq!(store.journal_batches(), batches);
    drop(store);
    assert_eq!(world.check("after that")[&nid].0, vec![0; 100]);
}

/// Records of hundreds of KiB, beside others, while power goes at any I/O.
#[test]
fn many_records_of_one_operation_survive_together() {
    let mut survived = 0;
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(seed, &[64, 64]);
        let store = world.open().unwrap();
        let nids: Vec<Nid> = (0..30)
            .map(|_| create(&store, vec![0; 60]).unwrap())
            .collect();
        store.sync().unwrap();
        world.switch.cut_after(rng.below(30));
        let mut durable = 0;
        for mark in 1..8 {
            let done = change_much(&store, &nids, mark).and_then(|epoch| match rng.one_in(3) {
                true => Ok(()),
                false => store.commit_through(epoch).map(|()| durable = mark),
            });
            if done.is_err() {
                break;
            }
        }
        drop(store);
        world.switch.cut_now();
        world.restart(&mut rng);
        world.check("after a cut");
        let store = world.open().unwrap();
        let found: Vec<u64> = nids
            .iter()
            .map(|nid| show(&store, *nid).unwrap()[7])
            .collect();
        assert!(
            found.iter().all(|mark| *mark == found[0]) && found[0] >= durable,
            "seed {seed}: {found:?}, and {durable} was durable"
        );
        survived += found[0];
        store.close().unwrap();
    }
    assert!(survived > 0);
}

fn change_much(store: &TestStore, nids: &[Nid], mark: u64) -> Result<engine::Epoch, Error> {
    let mut op = store.begin_large(ASKED)?;
    let nodes: Vec<_> = nids.iter().map(|nid| store.get(*nid).unwrap()).collect();
    let slots = op.lock_sorted(&nodes.iter().collect::<Vec<_>>())?;
    // Twice, so that changes of each node are in several records.
    for _ in 0..2 {
        for slot in slots.iter() {
            (0..200).for_each(|i| op.apply(*slot, Change::Set(i % 60, mark)));
        }
    }
    assert_eq!(op.excess(0), None);
    Ok(op.commit())
}

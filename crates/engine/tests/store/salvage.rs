//! A store of which something has rotted is put together again: nothing that the journal says is lost for that.

use crate::damage::{damage_leaf, items, newest};
use crate::world::{Change, Numbers, TestStore, World, change, create, delete};
use base::rng::Rng;
use device::sim::Times;
use engine::{Error, Need, Object, Salvage, SalvageError, StoreOptions};
use format::Nid;
use format::item::ItemKind;
use format::table::LEAF_NIDS;
use std::sync::Arc;

/// Numbers in a node: it has a block by itself.
const WORDS: usize = 1500;

fn reading() -> StoreOptions {
    StoreOptions {
        read_only: true,
        ..World::options()
    }
}

/// What comes of a node.
fn found(store: &TestStore, nid: Nid) -> Option<Vec<u64>> {
    match store.get(nid).and_then(|node| Ok(node.read()?.0.clone())) {
        Ok(numbers) => Some(numbers),
        Err(Error::Gone(_)) => None,
        Err(error) => panic!("node {nid}: {error}"),
    }
}

/// A store whose journal, when the power goes, deletes these nodes, uses the nid of the first anew, and says no more of
/// the last one than that it changes.
struct Reused {
    world: World,
    anew: Nid,
    deleted: Nid,
    changed: Nid,
    version: u64,
}

fn reused(seed: u64) -> Reused {
    let mut world = World::new(seed, &[64]);
    let store = world.open().unwrap();
    let make = |i| create(&store, vec![i; WORDS]).unwrap();
    let nids: Vec<Nid> = (0..20).map(make).collect();
    store.checkpoint().unwrap();
    let [anew, deleted, changed] = [nids[7], nids[8], nids[9]];
    change(&store, anew, Need::Grow, Change::Push(1)).unwrap();
    delete(&store, deleted).unwrap();
    delete(&store, anew).unwrap();
    let mut others = Vec::new();
    let version = loop {
        let fresh = store.reserve_nid().unwrap();
        if fresh.nid() == anew {
            let version = fresh.version();
            let mut op = store.begin(Need::Grow).unwrap();
            op.create(fresh, Numbers(vec![5, 6]));
            op.commit();
            break version;
        }
        others.push(fresh);
    };
    drop(others);
    for nid in [anew, changed] {
        change(&store, nid, Need::Grow, Change::Push(7)).unwrap();
    }
    store.sync().unwrap();
    drop(store);
    world.switch.cut_now();
    world.restart(&mut Rng::new(seed));
    Reused {
        world,
        anew,
        deleted,
        changed,
        version,
    }
}

impl Reused {
    /// Bytes of a node's image on the device.
    fn image(&self, nid: Nid) -> std::ops::Range<u64> {
        let store = self.world.open_with(reading()).unwrap();
        let items = items(&self.world, &store);
        newest(&items, ItemKind::Node, nid.0).range.clone()
    }

    fn rot(&self, nid: Nid) {
        let at = self.image(nid).end - 70;
        let device = &self.world.devices[0];
        let mut byte = [0];
        device.peek(at, &mut byte);
        device.poke(at, &[!byte[0]]);
    }
}

fn lost(salvage: &Salvage<Numbers>) -> Vec<Object> {
    let lost = salvage.losses().iter().filter(|loss| loss.lost);
    lost.map(|loss| loss.object.clone()).collect()
}

/// A mount needs no image of a node that the journal deletes, whatever comes of its nid afterwards; a repair once dropped
/// the node that had the nid by then.
#[test]
fn what_precedes_a_nodes_last_deletion_is_not_needed() {
    let reused = reused(61);
    reused.rot(reused.anew);
    reused.rot(reused.deleted);
    let mounted = reused.world.open_with(reading()).unwrap();
    assert_eq!(found(&mounted, reused.anew), Some(vec![5, 6, 7]));
    let salvage = reused.world.salvage().unwrap();
    assert_eq!(lost(&salvage), []);
    assert_eq!(found(salvage.store(), reused.anew), Some(vec![5, 6, 7]));
    assert_eq!(found(salvage.store(), reused.deleted), None);
    // As it was created, and changed once.
    let next = salvage.next_version(reused.anew).unwrap();
    assert_eq!(next, reused.version + 2);
}

/// Of a node that the journal only changes everything is needed.
#[test]
fn a_node_whose_image_has_rotted_is_lost_if_the_journal_only_changes_it() {
    let reused = reused(62);
    reused.rot(reused.changed);
    let salvage = reused.world.salvage().unwrap();
    assert_eq!(lost(&salvage), [Object::Node(reused.changed)]);
    assert_eq!(found(salvage.store(), reused.changed), None);
}

/// A device that does not return what nobody needs hinders nobody; else nothing is repaired.
#[test]
fn an_image_that_a_device_does_not_return_matters_to_who_needs_it() {
    for needed in [false, true] {
        let reused = reused(63);
        let image = reused.image(match needed {
            true => reused.changed,
            false => reused.anew,
        });
        // A block that it has alone.
        let block = image.start.next_multiple_of(4096)..image.end / 4096 * 4096;
        assert!(!block.is_empty());
        reused.world.devices[0].fail_reads(Times::Always, Some(block));
        match reused.world.salvage() {
            Ok(salvage) => {
                assert!(!needed);
                assert_eq!(lost(&salvage), []);
                assert_eq!(found(salvage.store(), reused.anew), Some(vec![5, 6, 7]));
            }
            Err(SalvageError::Unreadable(_) | SalvageError::Store(Error::Device(_))) => {
                assert!(needed);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A page of the node table is lost, and the versions of all of its nodes: what the journal has made since was lost with it.
#[test]
fn what_the_journal_makes_survives_the_loss_of_its_leaf_page() {
    let reused = reused(64);
    let store = reused.world.open_with(reading()).unwrap();
    damage_leaf(&reused.world, &store, reused.anew);
    drop(store);
    reused.rot(reused.anew);
    let salvage = reused.world.salvage().unwrap();
    assert_eq!(
        lost(&salvage),
        [Object::LeafPage(reused.anew.0 / LEAF_NIDS)]
    );
    assert_eq!(found(salvage.store(), reused.anew), Some(vec![5, 6, 7]));
    assert_eq!(found(salvage.store(), reused.deleted), None);
    let changed = found(salvage.store(), reused.changed).unwrap();
    assert_eq!(changed[WORDS..], [7]);
    // Nobody knows which versions it has had.
    let next = salvage.next_version(reused.anew).unwrap();
    assert!(next > 1 << 40, "{next}");
}

/// Salvage looks at what a mount writes, and would be published over that.
#[test]
fn an_array_that_somebody_writes_to_is_not_salvaged() {
    let reused = reused(66);
    let array = Arc::new(reused.world.array());
    let _writer = array.writer().unwrap();
    match Salvage::<Numbers>::open(&array, World::options()) {
        Err(SalvageError::Store(Error::Device(error))) => {
            assert!(matches!(*error, device::Error::InUse { .. }), "{error}");
        }
        other => panic!("{:?}", other.map(drop)),
    }
}

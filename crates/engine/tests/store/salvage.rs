//! A store of which something has rotted is put together again: nothing that the journal says is lost for that.

use crate::damage::{Item, damage_leaf, items, newest};
use crate::world::{Change, Numbers, TestStore, World, change, create, delete};
use base::rng::Rng;
use device::sim::Times;
use engine::{Error, Need, Object, Salvage, SalvageError, StoreOptions};
use format::checkpoint::CheckpointRecord;
use format::item::{self, ItemKind};
use format::table::{LEAF_NIDS, NID_LIMIT, REGION_NIDS, SPACE_MAP_FIRST};
use format::{BLOCK_SIZE, COUNTER_RECORD_MAX, Nid, U64};
use std::sync::Arc;
use zerocopy::IntoBytes;

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

/// A byte of an item is another one now.
fn rot(world: &World, item: &Item) {
    let at = item.range.end - 9;
    let mut byte = [0];
    world.devices[0].peek(at, &mut byte);
    world.devices[0].poke(at, &[!byte[0]]);
}

/// A store in which one of two nodes of a leaf page was changed after the first of three checkpoints, and the other one after the
/// second.
struct Changed {
    world: World,
    first: Nid,
    second: Nid,
    items: Vec<Item>,
}

/// The last two copies of the leaf page are in one segment: both are found.
fn changed(seed: u64) -> Changed {
    let tries = (0..8).map(|before| changed_after(before, seed));
    let mut found = tries.filter(|all| {
        let leaf = all.second.0 / LEAF_NIDS;
        let copies = all.items.iter();
        let copies = copies.filter(|item| item.is(ItemKind::TableLeaf, leaf));
        let mut segments: Vec<_> = copies.map(|item| (item.version, &item.segment)).collect();
        segments.sort_by_key(|(version, _)| *version);
        let [.., (_, last), (_, newest)] = &segments[..] else {
            return false;
        };
        last == newest
    });
    found.next().expect("a segment has room for more than one")
}

fn changed_after(checkpoints: u64, seed: u64) -> Changed {
    let world = World::new(seed, &[64]);
    let store = world.open().unwrap();
    let other = create(&store, vec![0]).unwrap();
    for i in 0..checkpoints {
        change(&store, other, Need::Grow, Change::Set(0, i)).unwrap();
        store.checkpoint().unwrap();
    }
    let all: Vec<Nid> = (0..20)
        .map(|_| create(&store, vec![7; 100]).unwrap())
        .collect();
    // The creating thread may have wandered from core to core, each with numbers of its own.
    let leaf = |nid: &Nid| nid.0 / LEAF_NIDS;
    let two = all.windows(2).find(|two| leaf(&two[0]) == leaf(&two[1]));
    let (first, second) = two.map(|two| (two[0], two[1])).unwrap();
    store.checkpoint().unwrap();
    for nid in [first, second] {
        change(&store, nid, Need::Grow, Change::Set(0, 77)).unwrap();
        store.checkpoint().unwrap();
    }
    // To close it would write these pages once more.
    let items = items(&world, &store);
    drop(store);
    Changed {
        world,
        first,
        second,
        items,
    }
}

impl Changed {
    fn rot(&self, kind: ItemKind, id: u64) {
        rot(&self.world, newest(&self.items, kind, id));
    }

    /// Both nodes are there as they were last, and all others, before the repair is published and after.
    fn comes_of(&self, salvage: Salvage<Numbers>) {
        for nid in [self.first, self.second] {
            assert_eq!(found(salvage.store(), nid).unwrap()[0], 77);
        }
        publish(salvage);
        let (findings, nodes) = self.world.verify();
        assert_eq!((findings, nodes.len()), (Vec::new(), 21));
    }
}

/// Bytes at the end of the segment that an item lies in, where nothing has been written.
fn room(items: &[Item], beside: &Item) -> u64 {
    let same = items.iter().filter(|item| item.segment == beside.segment);
    let end = same.map(|item| item.range.end).max().unwrap();
    assert!(end + (16 << 10) <= beside.segment.end, "a full segment");
    end.next_multiple_of(BLOCK_SIZE as u64)
}

/// Makes what a repair makes of a store without data.
fn publish(mut salvage: Salvage<Numbers>) {
    salvage.set_space(|_| Vec::new(), |_| false).unwrap();
    salvage.publish().unwrap();
}

/// What a lost page of the node table pointed at is all there: it is the same as before, whatever else lies in the segments.
#[test]
fn a_lost_page_of_which_all_below_is_found_costs_nothing() {
    for (kind, object) in [
        (ItemKind::TableRegion, Object::RegionPage(0)),
        (ItemKind::TableMap, Object::Table),
    ] {
        let all = changed(67);
        all.rot(kind, 0);
        let salvage = all.world.salvage().unwrap();
        assert!(salvage.losses().iter().any(|loss| loss.object == object));
        assert_eq!(lost(&salvage), [], "{:?}", salvage.losses());
        all.comes_of(salvage);
    }
}

/// The newest state of a leaf page and of a node, and the page that pointed at the first, are lost. What is found is the state before, with
/// as many nodes and as many bytes in each segment; a repair said that nothing was lost.
#[test]
fn an_older_leaf_page_in_the_place_of_a_lost_one_is_a_loss() {
    for (map_too, object) in [(false, Object::RegionPage(0)), (true, Object::Table)] {
        let all = changed(68);
        let nid = all.second;
        if map_too {
            all.rot(ItemKind::TableMap, 0);
        }
        all.rot(ItemKind::TableRegion, 0);
        all.rot(ItemKind::TableLeaf, nid.0 / LEAF_NIDS);
        all.rot(ItemKind::Node, nid.0);
        let salvage = all.world.salvage().unwrap();
        assert_eq!(lost(&salvage), [object]);
        assert_eq!(found(salvage.store(), nid).unwrap()[0], 7);
    }
}

/// Cleaning has moved the image of a node that an older copy of a lost leaf page names, and something else is where that says. A repair dropped the node,
/// though its image is there.
#[test]
fn an_image_that_was_moved_is_found_where_it_is_now() {
    let all = changed(70);
    let nid = all.first;
    let image = newest(&all.items, ItemKind::Node, nid.0);
    let mut bytes = vec![0; (image.range.end - image.range.start) as usize];
    let device = &all.world.devices[0];
    device.peek(image.range.start, &mut bytes);
    device.poke(room(&all.items, image), &bytes);
    device.poke(image.range.start, &vec![0xAA; bytes.len()]);
    all.rot(ItemKind::TableLeaf, nid.0 / LEAF_NIDS);
    let salvage = all.world.salvage().unwrap();
    assert_eq!(lost(&salvage), [Object::LeafPage(nid.0 / LEAF_NIDS)]);
    all.comes_of(salvage);
}

/// What looks like an item, and is another file system's or of no node or page that this table can have, was found in the data of a file, or has been
/// there for long. A repair failed, or ended by an assertion.
#[test]
fn what_no_table_of_this_array_can_have_is_not_taken_for_a_part_of_it() {
    let all = changed(71);
    let nid = all.first;
    let leaf = newest(&all.items, ItemKind::TableLeaf, nid.0 / LEAF_NIDS);
    let mut page = vec![0; (leaf.range.end - leaf.range.start) as usize];
    let device = &all.world.devices[0];
    device.peek(leaf.range.start, &mut page);
    let array = all.world.array();
    let seed = array.checksum_seed();
    let chunks = u64::from(array.geometry().chunk_count);
    drop(array);
    let page = item::decode(seed, &page).unwrap().1.to_vec();
    let mut bytes = Vec::new();
    for (kind, id, payload) in [
        (ItemKind::Node, NID_LIMIT, &[1; 8][..]),
        (ItemKind::Node, NID_LIMIT + 5 * LEAF_NIDS, &[1; 8]),
        (ItemKind::Node, SPACE_MAP_FIRST + chunks, &[1; 8]),
        (ItemKind::TableLeaf, NID_LIMIT / LEAF_NIDS, &page),
        (ItemKind::TableLeaf, u64::MAX / LEAF_NIDS, &page),
    ] {
        item::encode(seed, &mut bytes, kind, 3, id, 1, |out| out.extend(payload));
    }
    // Of another file system.
    item::encode(
        seed + 1,
        &mut bytes,
        ItemKind::Node,
        3,
        nid.0,
        1000,
        |out| {
            out.extend([1; 8]);
        },
    );
    let image = newest(&all.items, ItemKind::Node, nid.0);
    device.poke(room(&all.items, image), &bytes);
    // With no record everything is looked at.
    for slot in [0, 1] {
        all.world
            .array()
            .write_slot(slot, &[0; BLOCK_SIZE])
            .unwrap();
    }
    let salvage = all.world.salvage().unwrap();
    assert_eq!(lost(&salvage)[0], Object::Store);
    all.comes_of(salvage);
}

/// Of a leaf page that is lost an older copy names a later state of a node than any that is found. What was found may refer to what
/// has another owner since.
#[test]
fn a_state_older_than_one_that_is_known_is_not_taken() {
    let all = changed(69);
    let nid = all.first;
    all.rot(ItemKind::TableLeaf, nid.0 / LEAF_NIDS);
    all.rot(ItemKind::Node, nid.0);
    let salvage = all.world.salvage().unwrap();
    let leaf = Object::LeafPage(nid.0 / LEAF_NIDS);
    assert_eq!(lost(&salvage), [leaf, Object::Node(nid)]);
    assert_eq!(found(salvage.store(), nid), None);
    assert_eq!(found(salvage.store(), all.second).unwrap()[0], 77);
    assert!(salvage.next_version(nid).unwrap() > 2);
    publish(salvage);
    assert_eq!(all.world.verify().0, []);
}

/// A region's page is lost with its leaf page, and no node is there to be found. No repair wrote that the page is no more, and nobody
/// could create a node in the region.
#[test]
fn a_region_without_nodes_is_no_more() {
    let world = World::new(70, &[64]);
    let store = world.open().unwrap();
    let mut far = Vec::new();
    while far.is_empty() {
        let nid = create(&store, Vec::new()).unwrap();
        far.extend((nid.0 >= REGION_NIDS).then_some(nid));
    }
    let far = far[0];
    delete(&store, far).unwrap();
    store.close().unwrap();
    let before = items(&world, &store);
    drop(store);
    rot(&world, newest(&before, ItemKind::TableRegion, 1));
    rot(
        &world,
        newest(&before, ItemKind::TableLeaf, far.0 / LEAF_NIDS),
    );
    for image in before.iter().filter(|item| item.is(ItemKind::Node, far.0)) {
        rot(&world, image);
    }
    let salvage = world.salvage().unwrap();
    assert_eq!(lost(&salvage), [Object::RegionPage(1)]);
    publish(salvage);
    assert_eq!(world.verify().0, []);
    let store = world.open().unwrap();
    while create(&store, Vec::new()).unwrap().0 < REGION_NIDS {}
    store.close().unwrap();
    world.check("after use");
}

/// Both copies of the newest record say something else.
fn forge_record(world: &World, change: impl Fn(&mut CheckpointRecord)) {
    let array = world.array();
    let record = |slot| {
        let block = array.read_slot(slot, 0).unwrap();
        CheckpointRecord::parse(&block, &array.uuid()).unwrap()
    };
    let newest = [record(0), record(1)].into_iter().enumerate();
    let newest = newest.max_by_key(|(_, record)| record.sequence.get());
    let (slot, mut record) = newest.unwrap();
    change(&mut record);
    record.seal();
    array.write_slot(slot, record.as_bytes()).unwrap();
}

/// Bits that mean nothing were found by each check, and repaired by none.
#[test]
fn stray_bits_of_a_pointer_to_a_map_page_do_not_stay() {
    let all = changed(71);
    forge_record(&all.world, |record| {
        let stamp = record.roots[0].stamp.get();
        record.roots[0].stamp = U64::new(stamp | 1 << 40);
    });
    assert_eq!(all.world.verify().0.len(), 1);
    publish(all.world.salvage().unwrap());
    assert_eq!(all.world.verify().0, []);
}

/// The next record would be one that no reader takes. It took the place of the one before, and then that of the last that was any.
#[test]
fn a_record_that_nobody_would_read_is_not_written() {
    let all = changed(72);
    forge_record(&all.world, |record| {
        record.sequence = U64::new(COUNTER_RECORD_MAX);
    });
    for _ in 0..2 {
        let error = all.world.open().map(drop).unwrap_err();
        assert!(error.to_string().contains("out of range"), "{error}");
        let store = all.world.open_with(reading()).unwrap();
        assert_eq!(found(&store, all.second).unwrap()[0], 77);
    }
}

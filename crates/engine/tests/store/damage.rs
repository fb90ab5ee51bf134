//! Damage in one place, and what it must not do to the rest.

use crate::world::{Change, TestStore, World, change, create, delete};
use base::rng::Rng;
use device::sim::{Survival, Times};
use engine::{Error, Finding, Findings, Need, Severity, StoreOptions};
use format::checkpoint::CheckpointRecord;
use format::item::{self, ITEM_ALIGN, ItemKind};
use format::journal::{BATCH_MAGIC, BatchHeader};
use format::label::HEAD_BLOCKS;
use format::table::LEAF_NIDS;
use format::{BLOCK_SIZE, Nid, U32, U64};
use std::ops::Range;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Where the array begins on its only device.
pub const ARRAY_START: u64 = HEAD_BLOCKS * BLOCK_SIZE as u64;

/// A sound item in a segment; it need not be live.
pub struct Item {
    kind: u8,
    id: u64,
    pub version: u64,
    /// Bytes on the device.
    pub range: Range<u64>,
    pub segment: Range<u64>,
}

impl Item {
    pub fn is(&self, kind: ItemKind, id: u64) -> bool {
        self.kind == kind as u8 && self.id == id
    }
}

pub fn items(world: &World, store: &TestStore) -> Vec<Item> {
    let geometry = store.array().geometry();
    let len = geometry.segment_bytes();
    let seed = store.array().checksum_seed();
    let mut found = Vec::new();
    let chunks = (0..).zip(store.meta_chunks());
    for (chunk, _) in chunks.filter(|(_, is_meta)| *is_meta) {
        for index in 0..geometry.segments_per_chunk() as u64 {
            let start = ARRAY_START + geometry.chunk_block(chunk).byte() + index * len as u64;
            let mut bytes = vec![0; len];
            world.devices[0].peek(start, &mut bytes);
            let mut at = 0;
            while let Some(next) = item::next(&bytes, at) {
                at = next;
                let Ok((header, payload)) = item::decode(seed, &bytes[at..]) else {
                    at += ITEM_ALIGN;
                    continue;
                };
                let end = at + item::padded_len(payload.len());
                found.push(Item {
                    kind: header.kind,
                    id: header.id.get(),
                    version: header.version.get(),
                    range: start + at as u64..start + end as u64,
                    segment: start..start + len as u64,
                });
                at = end;
            }
        }
    }
    found
}

/// The newest item of its kind and number.
pub fn newest(items: &[Item], kind: ItemKind, id: u64) -> &Item {
    let these = items.iter().filter(|item| item.is(kind, id));
    these.max_by_key(|i| i.version).expect("it was written")
}

/// A store that was closed with segments of which little is live.
struct Sparse {
    world: World,
    options: StoreOptions,
    /// Nodes that live still.
    nids: Vec<Nid>,
    /// The one that is alone in its segment, and that segment: no other has less. Nodes of two leaf pages of the node
    /// table were in it; this is the other one.
    alone: Nid,
    segment: Range<u64>,
    other_leaf: u64,
    items: Vec<Item>,
}

fn sparse(seed: u64) -> Sparse {
    let world = World::new(seed, &[64]);
    // Deletions alone begin no checkpoint.
    let options = StoreOptions {
        node_cache_bytes: 64 << 20,
        dirty_bytes: Some(16 << 20),
        ..World::options()
    };
    let store = world.open_with(options.clone()).unwrap();
    let make = |_| create(&store, vec![7; 200]).unwrap();
    let all: Vec<Nid> = (0..8000).map(make).collect();
    store.checkpoint().unwrap();
    let written = items(&world, &store);
    let segment_of = |nid: Nid| &newest(&written, ItemKind::Node, nid.0).segment;
    let leaf_of = |nid: Nid| nid.0 / LEAF_NIDS;
    // The creating thread may have wandered from core to core, each with numbers of its own: a leaf may be nearly empty.
    let elsewhere = |leaf: u64, segment: &Range<u64>| {
        let of_leaf = all.iter().filter(|nid| leaf_of(**nid) == leaf);
        of_leaf.filter(|nid| segment_of(**nid) != segment).count()
    };
    let meet = |two: &[Nid]| {
        let segment = segment_of(two[0]);
        leaf_of(two[0]) != leaf_of(two[1])
            && segment == segment_of(two[1])
            && two
                .iter()
                .all(|nid| elsewhere(leaf_of(*nid), segment) > 200)
    };
    let two = all
        .windows(2)
        .find(|two| meet(two))
        .expect("leaves share a segment");
    let (other_leaf, alone) = (leaf_of(two[0]), two[1]);
    let segment = segment_of(alone).clone();
    let beside = |nid: Nid| *segment_of(nid) == segment;
    let lives = |(i, nid): (usize, Nid)| nid == alone || i % 10 == 0 && !beside(nid);
    let mut nids = Vec::new();
    for (i, nid) in all.into_iter().enumerate() {
        match lives((i, nid)) {
            true => nids.push(nid),
            false => delete(&store, nid).unwrap(),
        }
    }
    store.close().unwrap();
    let items = items(&world, &store);
    drop(store);
    Sparse {
        world,
        options,
        nids,
        alone,
        segment,
        other_leaf,
        items,
    }
}

/// Changes nodes and makes checkpoints, which clean if that is due; returns how many segments they have cleaned.
fn work(store: &TestStore, nids: &[Nid]) -> u64 {
    for round in 0..4 {
        for nid in nids {
            change(store, *nid, Need::Reclaim, Change::Set(1, round)).unwrap();
        }
        store.checkpoint().unwrap();
    }
    assert!(store.failed().is_none());
    store.counters().cleaned_segments
}

/// Once the mount failed, and every later one, because each cleaned the same segment first.
#[test]
fn an_unreadable_sector_of_dead_bytes_keeps_nobody_from_mounting() {
    let Sparse {
        world,
        options,
        nids,
        alone,
        segment,
        items,
        ..
    } = sparse(51);
    let live = newest(&items, ItemKind::Node, alone.0).range.clone();
    let block = BLOCK_SIZE as u64;
    let dead = |start: &u64| start + block <= live.start || *start >= live.end;
    let mut blocks = (segment.start..segment.end).step_by(BLOCK_SIZE);
    let sector = blocks.find(dead).expect("much of the segment is dead");
    let device = &world.devices[0];
    device.fail_reads(Times::Always, Some(sector..sector + 512));
    let rest: Vec<Nid> = nids.iter().copied().filter(|nid| *nid != alone).collect();
    for mount in 1..4 {
        let store = world.open_with(options.clone()).unwrap();
        assert!(work(&store, &rest) > 0 || mount > 1);
        assert_eq!(store.get(alone).unwrap().into_read().unwrap().0, [7; 200]);
        store.close().unwrap();
        // Cleaning has looked at the segment, and not again.
        assert!((1..=mount).contains(&device.struck().len()));
    }
    assert_eq!(world.check("after cleaning").len(), nids.len());
}

/// Damages a leaf page of the node table, and works on nodes of others, in several mounts.
fn work_beside_a_damaged_leaf(sparse: &Sparse, leaf: u64) {
    let Sparse {
        world, nids, alone, ..
    } = sparse;
    let page = newest(&sparse.items, ItemKind::TableLeaf, leaf)
        .range
        .clone();
    world.devices[0].corrupt(page.start + 64, 512, &mut Rng::new(leaf));
    let (lost, mut rest): (Vec<Nid>, Vec<Nid>) =
        nids.iter().partition(|nid| nid.0 / LEAF_NIDS == leaf);
    assert!(lost.len() > 10 && rest.len() > 500);
    rest.retain(|nid| nid != alone);
    for mount in 1..3 {
        let store = world.open_with(sparse.options.clone()).unwrap();
        assert!(work(&store, &rest) > 0 || mount > 1);
        for nid in &lost {
            assert!(matches!(store.get(*nid), Err(Error::Damaged(_))));
        }
        store.close().unwrap();
    }
}

/// Whether nodes that are alone in a segment were moved by those who clean.
fn has_moved(sparse: &Sparse) -> bool {
    let store = sparse.world.open_with(sparse.options.clone()).unwrap();
    let images = items(&sparse.world, &store);
    let moved = |item: &Item| item.id == sparse.alone.0 && item.segment != sparse.segment;
    images
        .iter()
        .any(|item| item.kind == ItemKind::Node as u8 && moved(item))
}

#[test]
fn a_damaged_table_page_keeps_nobody_from_mounting() {
    let sparse = sparse(52);
    work_beside_a_damaged_leaf(&sparse, sparse.alone.0 / LEAF_NIDS);
    assert!(!has_moved(&sparse));
}

/// Nobody can tell what of its nodes is live, but what else is in their segments makes up all that is.
#[test]
fn dead_nodes_of_a_damaged_table_page_do_not_keep_a_segment_from_being_cleaned() {
    let sparse = sparse(53);
    work_beside_a_damaged_leaf(&sparse, sparse.other_leaf);
    assert!(has_moved(&sparse));
}

/// A store with more leaf pages in its node table than are kept in memory, and one node of each of them.
fn many_leaves(seed: u64) -> (World, Vec<Nid>) {
    let world = World::new(seed, &[64]);
    let store = world.open().unwrap();
    let mut nids: Vec<Nid> = (0..100 * LEAF_NIDS)
        .map(|_| create(&store, vec![7]).unwrap())
        .collect();
    store.close().unwrap();
    nids.sort_unstable();
    nids.dedup_by_key(|nid| nid.0 / LEAF_NIDS);
    assert!(nids.len() > 90);
    (world, nids)
}

/// Has pages of the node table read until those that may go are gone from memory.
fn read_all(store: &TestStore, nids: &[Nid]) {
    for _ in 0..4 {
        for nid in nids {
            store.get(*nid).unwrap();
        }
    }
}

pub fn damage_leaf(world: &World, store: &TestStore, nid: Nid) {
    let items = items(world, store);
    let page = newest(&items, ItemKind::TableLeaf, nid.0 / LEAF_NIDS);
    // Other pages lie in the same sector.
    let mut byte = [0];
    world.devices[0].peek(page.range.start + 100, &mut byte);
    world.devices[0].poke(page.range.start + 100, &[!byte[0]]);
}

/// A node was in memory, and the page of the table that names it not any more. Who changed the node was told nothing;
/// the checkpoint could not go on without the page, and the store turned read-only.
#[test]
fn a_damaged_table_page_is_an_error_for_who_changes_its_nodes() {
    let (world, nids) = many_leaves(55);
    let store = world.open().unwrap();
    let (lost, rest) = (nids[10], &nids[11..]);
    let held = store.get(lost).unwrap();
    read_all(&store, rest);
    damage_leaf(&world, &store, lost);
    let outcome = change(&store, lost, Need::Reclaim, Change::Set(0, 1));
    assert!(matches!(outcome, Err(Error::Damaged(_))), "{outcome:?}");
    for nid in rest {
        change(&store, *nid, Need::Reclaim, Change::Set(0, 2)).unwrap();
    }
    store.checkpoint().unwrap();
    assert_eq!(held.read().unwrap().0, [7]);
    store.close().unwrap();
}

/// A page that a change has been made by is in memory until the checkpoint has written it anew.
#[test]
fn a_table_page_that_a_checkpoint_needs_is_not_read_again() {
    let (world, nids) = many_leaves(56);
    let store = world.open().unwrap();
    let (changed, rest) = (nids[10], &nids[11..]);
    for value in 1..4 {
        change(&store, changed, Need::Reclaim, Change::Set(0, value)).unwrap();
        damage_leaf(&world, &store, changed);
        read_all(&store, rest);
        store.checkpoint().unwrap();
        read_all(&store, rest);
    }
    store.close().unwrap();
    let nodes = world.check("after the page was written anew");
    assert_eq!(nodes[&changed].0, [3]);
}

/// Bytes of the journal of an array of 64 MiB, which begins with it.
pub const RING: u64 = 4 << 20;
pub const SECTOR: usize = 512;

/// What users may store and have logged: it looks like the header of a long batch of a later mount.
fn forged(uuid: [u8; 16]) -> BatchHeader {
    let mut header = BatchHeader::zeroed();
    header.magic = U32::new(BATCH_MAGIC);
    header.uuid = uuid;
    header.mount_id = U64::new(1 << 40);
    header.sequence = U64::new(1 << 40);
    header.len = U32::new(RING as u32 - 4096);
    header
}

/// Places on the device of headers in the journal, with their sequence numbers, in order.
pub fn batches(world: &World) -> Vec<(u64, u64)> {
    let at = (0..RING).step_by(SECTOR).map(|offset| ARRAY_START + offset);
    let mut found: Vec<(u64, u64)> = at
        .filter_map(|place| {
            let mut bytes = [0; BatchHeader::SIZE];
            world.devices[0].peek(place, &mut bytes);
            let header = BatchHeader::read_from_bytes(&bytes).unwrap();
            (header.magic.get() == BATCH_MAGIC).then_some((header.sequence.get(), place))
        })
        .collect();
    found.sort_unstable();
    found
        .into_iter()
        .map(|(sequence, place)| (place, sequence))
        .collect()
}

/// A synced node, and the power goes.
pub fn cut_after_syncs(seed: u64, syncs: u64) -> World {
    let mut world = World::new(seed, &[64]);
    let store = world.open().unwrap();
    for i in 0..syncs {
        create(&store, vec![i; 1000]).unwrap();
        store.sync().unwrap();
    }
    drop(store);
    world.switch.cut_now();
    world.restart(&mut Rng::new(seed));
    world
}

/// Without writing anything.
pub fn looked_at(world: &World) -> Arc<TestStore> {
    let options = StoreOptions {
        read_only: true,
        ..World::options()
    };
    world.open_with(options).unwrap()
}

/// How often the device is read, beyond what it is without, when a part of the ring is full of what looks like batches.
fn reads_beyond(world: &World, look: impl Fn(&World)) -> u64 {
    let header = forged(looked_at(world).array().uuid());
    let device = &world.devices[0];
    let reads = || {
        let before = device.io_count();
        look(world);
        device.io_count() - before
    };
    let without = reads();
    for offset in (1 << 20..2 << 20).step_by(4096) {
        device.poke(ARRAY_START + offset, header.as_bytes());
    }
    reads().saturating_sub(without)
}

/// Each of them was once read to its end: a ring's length for each.
#[test]
fn what_only_looks_like_batches_is_read_once() {
    let world = cut_after_syncs(54, 3);
    let reads = reads_beyond(&world, |world| drop(looked_at(world)));
    // In pieces of a MiB, and once more round.
    assert!(reads <= 2 * (RING >> 20), "{reads} reads");
    world.open().unwrap().close().unwrap();
}

/// A repair did so still, and from the ring's beginning on.
#[test]
fn a_repair_reads_what_only_looks_like_batches_once() {
    let world = cut_after_syncs(56, 3);
    let reads = reads_beyond(&world, |world| drop(world.salvage().unwrap()));
    // Twice: by who looks behind the run, and by who looks at all of the ring.
    assert!(reads <= 4 * (RING >> 20), "{reads} reads");
    world.open().unwrap().close().unwrap();
}

#[test]
fn a_lost_batch_is_told_from_among_what_only_looks_like_one() {
    let world = cut_after_syncs(55, 4);
    let store = world
        .open_with(StoreOptions {
            read_only: true,
            ..World::options()
        })
        .unwrap();
    let header = forged(store.array().uuid());
    drop(store);
    // The second batch of four is written over, and all that follows the last.
    let batches = batches(&world);
    let [_, (from, _), (to, _), (last, _)] = batches[batches.len() - 4..] else {
        panic!("{batches:?}");
    };
    let (start, end) = (last + 16384, ARRAY_START + RING);
    for place in (from..to)
        .step_by(SECTOR)
        .chain((start..end).step_by(SECTOR))
    {
        world.devices[0].poke(place, header.as_bytes());
    }
    match world.open() {
        Err(Error::Damaged(damage)) => assert!(damage.to_string().contains("was durable")),
        other => panic!("{:?}", other.map(|_| ())),
    }
}

/// Two power cuts in a row, each before one device has its copy of the record that recovery makes, left what an older copy of that device would,
/// before mounts completed the newest record first: of both slots its copies are the older ones. So did two mounts of which it refuses the
/// record. Nothing is lost, so this must be no reason to refuse the array.
#[test]
fn older_copies_of_both_slots_on_one_device_are_no_damage() {
    let world = World::new(21, &[64, 64]);
    let store = world.open().unwrap();
    let nid = create(&store, vec![1, 2, 3]).unwrap();
    store.close().unwrap();
    drop(store);
    let copy = |slot, copy| world.array().read_slot(slot, copy).unwrap();
    let sequence = |slot, c| {
        let record = CheckpointRecord::parse(&copy(slot, c), &world.array().uuid()).unwrap();
        record.sequence.get()
    };
    let old = [0, 1].map(|slot| copy(slot, 0));
    for _ in 0..2 {
        world.open().map(drop).unwrap();
    }
    for (place, old) in (1..).zip(&old) {
        world.devices[0].poke(place * BLOCK_SIZE as u64, old);
    }
    for slot in 0..2 {
        assert!(sequence(slot, 0) < sequence(slot, 1), "slot {slot}");
    }
    let findings = Findings::new();
    engine::check_copies(&world.array(), &findings);
    let found = findings.take().0;
    let is_older = |f: &Finding| f.severity == Severity::Notice && f.what.contains("is older");
    assert!(found.len() == 2 && found.iter().all(is_older), "{found:?}");
    let store = world.open().unwrap();
    let node = store.get(nid).unwrap();
    assert_eq!(node.read().unwrap().0, [1, 2, 3]);
    store.close().unwrap();
    world.check("after two records of which one copy was written");
}

/// A device that refuses its copies of records has one mount begin, and no second one: that would rest on the other device's copy alone.
#[test]
fn no_mount_writes_while_the_newest_record_cannot_be_in_both_copies() {
    let mut world = World::new(21, &[64, 64]);
    let store = world.open().unwrap();
    let nid = create(&store, vec![1, 2, 3]).unwrap();
    store.close().unwrap();
    drop(store);
    let slots = BLOCK_SIZE as u64..3 * BLOCK_SIZE as u64;
    let mut rng = Rng::new(21);
    let mut written = Vec::new();
    for mount in 0..2 {
        world.devices[0].fail_writes(Times::Always, Some(slots.clone()));
        assert!(world.open().is_err(), "mount {mount} writes records");
        // What was in flight to the first device is gone.
        world.switch.cut_now();
        world.switch.restore();
        let restarted = world.devices.iter();
        world.devices = restarted
            .map(|d| d.restart_with(Survival::None, &mut rng))
            .collect();
        written.push([0, 1].map(|slot| world.array().read_slot(slot, 1).unwrap().to_vec()));
    }
    assert!(written[0] == written[1], "the second one had a record");
    let store = world.open().unwrap();
    let node = store.get(nid).unwrap();
    assert_eq!(node.read().unwrap().0, [1, 2, 3]);
    store.close().unwrap();
    world.check("after a record of which one copy was written");
}

/// Only the last one says that the one before it was durable.
#[test]
fn the_loss_of_the_last_batch_but_one_is_told() {
    let world = cut_after_syncs(56, 4);
    let batches = batches(&world);
    let (place, _) = batches[batches.len() - 2];
    let rotten = place + SECTOR as u64;
    world.devices[0].corrupt(rotten, SECTOR as u64, &mut Rng::new(56));
    match world.open() {
        Err(Error::Damaged(damage)) => assert!(damage.to_string().contains("was durable")),
        other => panic!("{:?}", other.map(|_| ())),
    }
}

//! A device returns nothing for a moment, while somebody looks for free space: it is an error for them, and nothing is lost.

use crate::damage::{items, newest};
use crate::world::{Change, TestStore, World, change, create, free};
use device::sim::Times;
use engine::{Error, Extent, Need};
use format::Nid;
use format::item::ItemKind;
use format::table::{LEAF_NIDS, SPACE_MAP_FIRST, space_map_nid};
use std::ops::Range;
use std::sync::Arc;

/// Reads that one search for free space may make in vain.
const FEW: usize = 8;

fn take(store: &TestStore, blocks: u32) -> Result<Extent, Error> {
    let mut promise = store.promise(blocks as u64)?;
    let reservation = store.reserve(&mut promise, blocks, None)?;
    let mut op = store.begin(Need::Reclaim)?;
    let extent = op.take(reservation);
    op.commit();
    Ok(extent)
}

/// So many whole chunks are allocated; the store was opened anew, and has nothing of the maps in memory.
fn with_chunks(seed: u64, chunks: usize) -> (World, Arc<TestStore>, Vec<Extent>) {
    let world = World::new(seed, &[256]);
    let store = world.open().unwrap();
    let blocks = store.array().geometry().chunk_blocks;
    let held: Vec<Extent> = (0..chunks).map(|_| take(&store, blocks).unwrap()).collect();
    assert!(held.iter().all(|extent| extent.len == blocks));
    (world, store, held)
}

fn reopen(world: &World, store: Arc<TestStore>) -> Arc<TestStore> {
    store.close().unwrap();
    drop(store);
    world.open().unwrap()
}

fn chunk_of(store: &TestStore, extent: &Extent) -> u32 {
    let chunk = store.array().geometry().chunk_of(extent.block);
    chunk.unwrap().0
}

fn half(extent: &Extent) -> Extent {
    Extent {
        len: extent.len / 2,
        ..*extent
    }
}

fn free_blocks(store: &TestStore) -> u64 {
    store.space().free_blocks
}

/// Where the newest image of a chunk's map is on the device.
fn map_of(world: &World, store: &TestStore, chunk: u32) -> Range<u64> {
    let nid = space_map_nid(chunk).0;
    newest(&items(world, store), ItemKind::Node, nid)
        .range
        .clone()
}

fn damage_table_of_maps(world: &World, store: &TestStore) {
    let leaf = SPACE_MAP_FIRST / LEAF_NIDS;
    let at = newest(&items(world, store), ItemKind::TableLeaf, leaf)
        .range
        .start
        + 100;
    let mut byte = [0];
    world.devices[0].peek(at, &mut byte);
    world.devices[0].poke(at, &[!byte[0]]);
}

/// In the moment, twice, an allocation fails as it should; all is as before after it, and after another mount.
fn a_moment_costs_nothing(world: &World, store: Arc<TestStore>) {
    let before = free_blocks(&store);
    let device = &world.devices[0];
    device.fail_reads(Times::Always, None);
    for round in 1..3 {
        let outcome = take(&store, 8);
        assert!(matches!(outcome, Err(Error::Device(_))), "{outcome:?}");
        let struck = device.struck().len();
        assert!((round..=round * FEW).contains(&struck), "{struck} reads");
        assert_eq!(free_blocks(&store), before);
    }
    device.heal();
    let taken = take(&store, 8).unwrap();
    assert_eq!(free_blocks(&store), before - 8);
    free(&store, [taken]);
    assert!(store.failed().is_none());
    let store = reopen(world, store);
    assert_eq!(free_blocks(&store), before);
    store.close().unwrap();
    world.check("after the moment");
}

/// The page of the node table that names the maps was not returned: each free chunk was tried, and given up.
#[test]
fn free_chunks_stay_free_when_they_cannot_become_data_for_a_moment() {
    let (world, store, _) = with_chunks(81, 1);
    let store = reopen(&world, store);
    a_moment_costs_nothing(&world, store);
}

#[test]
fn chunks_whose_maps_are_not_returned_for_a_moment_keep_their_space() {
    let (world, store, held) = with_chunks(82, 6);
    free(&store, held.iter().map(half));
    let store = reopen(&world, store);
    a_moment_costs_nothing(&world, store);
}

/// The chunk has been given out from, and its map has left memory.
#[test]
fn a_chunk_in_use_whose_map_is_not_returned_for_a_moment_keeps_its_space() {
    let (world, store, held) = with_chunks(83, 1);
    free(&store, [half(&held[0])]);
    let store = reopen(&world, store);
    let nids = others(&store);
    free(&store, [take(&store, 8).unwrap()]);
    store.checkpoint().unwrap();
    store.sync().unwrap();
    forget_maps(&store, &nids);
    a_moment_costs_nothing(&world, store);
}

/// Nodes enough to push everything else out of memory.
fn others(store: &TestStore) -> Vec<Nid> {
    (0..100 * LEAF_NIDS)
        .map(|_| create(store, vec![7; 4]).unwrap())
        .collect()
}

fn forget_maps(store: &TestStore, nids: &[Nid]) {
    for _ in 0..3 {
        for nid in nids {
            store.get(*nid).unwrap();
        }
    }
}

/// One map lies where the device returns nothing, for as long as the test runs.
#[test]
fn an_allocation_passes_over_a_map_that_is_not_returned() {
    let (world, store, held) = with_chunks(84, 3);
    free(&store, held.iter().map(half));
    let store = reopen(&world, store);
    let before = free_blocks(&store);
    let lost = chunk_of(&store, &held[0]);
    let map = map_of(&world, &store, lost);
    world.devices[0].fail_reads(Times::Always, Some(map));
    let taken: Vec<Extent> = (0..3).map(|_| take(&store, 64).unwrap()).collect();
    assert!(!world.devices[0].struck().is_empty());
    assert!(taken.iter().all(|extent| chunk_of(&store, extent) != lost));
    assert_eq!(free_blocks(&store), before - 3 * 64);
    // A discard passes over it as well.
    assert!(store.trim(0..u64::MAX, 1).unwrap() > 0);
    assert_eq!(free_blocks(&store), before - 3 * 64);
    world.devices[0].heal();
    store.trim(0..u64::MAX, 1).unwrap();
    let mut promise = store.promise(free_blocks(&store)).unwrap();
    let (mut reservations, mut chunks) = (Vec::new(), Vec::new());
    while promise.blocks() > 0 {
        let reservation = store.reserve(&mut promise, 64, None).unwrap();
        chunks.push(chunk_of(&store, &reservation.extent()));
        reservations.push(reservation);
    }
    assert!(chunks.contains(&lost));
}

#[test]
fn a_discard_in_such_a_moment_costs_nothing() {
    let (world, store, held) = with_chunks(85, 6);
    free(&store, held.iter().map(half));
    let store = reopen(&world, store);
    let before = free_blocks(&store);
    world.devices[0].fail_reads(Times::Always, None);
    store.trim(0..u64::MAX, 1).unwrap();
    assert_eq!(free_blocks(&store), before);
    let struck = world.devices[0].struck().len();
    assert!((1..=FEW).contains(&struck), "{struck} reads");
    world.devices[0].heal();
    a_moment_costs_nothing(&world, store);
}

/// Chunks without data are to become free, and their maps are not returned just then.
#[test]
fn a_chunk_that_cannot_be_retired_for_a_moment_keeps_its_space() {
    let (world, store, held) = with_chunks(86, 7);
    let nids = others(&store);
    free(&store, held[..6].iter().copied());
    // Its maps are on the device, and what was freed becomes available behind it.
    store.checkpoint().unwrap();
    store.trim(0..u64::MAX, 1).unwrap();
    forget_maps(&store, &nids);
    let maps: Vec<Range<u64>> = held[..6]
        .iter()
        .map(|extent| map_of(&world, &store, chunk_of(&store, extent)))
        .collect();
    let (start, end) = (
        maps.iter().map(|map| map.start).min().unwrap(),
        maps.iter().map(|map| map.end).max().unwrap(),
    );
    let before = free_blocks(&store);
    world.devices[0].fail_reads(Times::Always, Some(start..end));
    store.checkpoint().unwrap();
    assert!(!world.devices[0].struck().is_empty());
    assert_eq!(free_blocks(&store), before);
    world.devices[0].heal();
    store.trim(0..u64::MAX, 1).unwrap();
    assert_eq!(free_blocks(&store), before);
    store.checkpoint().unwrap();
    store.sync().unwrap();
    store.checkpoint().unwrap();
    assert_eq!(free_blocks(&store), before);
    let store = reopen(&world, store);
    assert_eq!(free_blocks(&store), before);
}

/// Damage lasts, and concerns data alone: metadata has the free chunks, and who needs one for data is told of the damage.
#[test]
fn free_chunks_whose_maps_have_no_place_are_not_tried_one_after_the_other() {
    let (world, store, _) = with_chunks(87, 1);
    let store = reopen(&world, store);
    damage_table_of_maps(&world, &store);
    let before = free_blocks(&store);
    let reads = || store.array().stats().devices[0].reads;
    let mut last = reads();
    for most in [FEW as u64, 0] {
        let outcome = take(&store, 8);
        assert!(matches!(outcome, Err(Error::Damaged(_))), "{outcome:?}");
        assert!(reads() - last <= most, "{} reads", reads() - last);
        last = reads();
        assert_eq!(free_blocks(&store), before);
    }
    let nid = create(&store, vec![1; 100]).unwrap();
    change(&store, nid, Need::Reclaim, Change::Set(0, 2)).unwrap();
    store.checkpoint().unwrap();
    assert!(store.failed().is_none());
}

#[test]
fn damage_of_the_page_that_names_maps_takes_their_free_space_at_once() {
    let (world, store, held) = with_chunks(88, 6);
    free(&store, held.iter().map(half));
    let store = reopen(&world, store);
    damage_table_of_maps(&world, &store);
    let before = free_blocks(&store);
    let outcome = take(&store, 8);
    assert!(matches!(outcome, Err(Error::Damaged(_))), "{outcome:?}");
    let lost: u64 = held.iter().map(|extent| half(extent).len as u64).sum();
    assert_eq!(free_blocks(&store), before - lost);
}

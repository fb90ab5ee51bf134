//! Room that data and metadata take from each other, and give back.

use crate::world::{Change, TestStore, World, change, create, delete, fill, free, take_all};
use base::rng::Rng;
use device::sim::Times;
use engine::{Error, Need, StoreOptions};
use format::Nid;
use format::checkpoint::SPACE_WORDS_MAX;
use format::geometry::{Geometry, GeometryOptions};

/// Options as users have them, without threads.
fn plain() -> StoreOptions {
    StoreOptions {
        dirty_bytes: None,
        node_cache_bytes: 8 << 20,
        ..World::options()
    }
}

/// Nodes of 1,500 numbers that a new array of 64 MiB has room for.
fn nodes_of_a_new_array(seed: u64) -> usize {
    let world = World::new(seed, &[64]);
    fill(&world.open_with(plain()).unwrap(), 1500).len()
}

/// They were data for as long as the array was mounted: nothing had loaded them, and so nothing looked whether they were empty.
#[test]
fn chunks_that_are_emptied_after_a_remount_go_back_to_metadata() {
    let world = World::new(61, &[64]);
    let store = world.open_with(plain()).unwrap();
    let held = take_all(&store, 64);
    store.close().unwrap();
    drop(store);
    let store = world.open_with(plain()).unwrap();
    free(&store, held);
    store.sync().unwrap();
    let (nodes, most) = (fill(&store, 1500).len(), nodes_of_a_new_array(61));
    assert!(nodes * 10 >= most * 9, "{nodes} of {most}");
    store.close().unwrap();
    drop(store);
    world.check("after metadata had the chunks");
}

/// Promises so many blocks, or nearly: statfs counts what a promise cannot have.
fn promise(store: &TestStore, mut blocks: u64) -> u64 {
    loop {
        match store.promise(blocks) {
            Ok(promise) => return promise.into_blocks(),
            Err(error) => assert!(matches!(error, Error::NoSpace), "{error}"),
        }
        blocks -= 64;
    }
}

/// Takes what was promised.
fn redeem(store: &TestStore, blocks: u64) {
    redeem_but(store, blocks, 0);
}

/// The same, but for so many blocks at most.
fn redeem_but(store: &TestStore, blocks: u64, most: u64) {
    let mut promise = store.adopt_promise(blocks);
    while promise.blocks() > 0 {
        let want = promise.blocks().min(64) as u32;
        let left = promise.blocks();
        let reservation = match store.reserve(&mut promise, want, None) {
            Err(Error::NoSpace) if left <= most => return,
            reservation => reservation.unwrap_or_else(|e| panic!("{left} of {blocks}: {e}")),
        };
        let mut op = store.begin(Need::Reclaim).unwrap();
        op.take(reservation);
        op.commit();
    }
}

/// All data that may be promised, and a part of it.
#[test]
fn metadata_grows_beside_what_is_promised() {
    let most = nodes_of_a_new_array(62);
    for part in [1, 2, 8] {
        let world = World::new(62, &[64]);
        let store = world.open_with(plain()).unwrap();
        let blocks = promise(&store, store.space().free_blocks / part);
        let nodes = fill(&store, 1500).len() as u64;
        // What is not promised is there for metadata.
        let least = most as u64 * (part - 1) / part;
        assert!(nodes * 100 >= least * 95, "{nodes} of {most}, 1/{part}");
        redeem(&store, blocks);
        store.close().unwrap();
        drop(store);
        world.check("after promises were redeemed beside metadata");
    }
}

/// Nodes that change leave old images behind, and checkpoints take free chunks before they clean.
#[test]
fn metadata_that_changes_leaves_what_is_promised() {
    let world = World::new(63, &[64]);
    let store = world.open_with(plain()).unwrap();
    let new = |i| create(&store, vec![i; 1500]).unwrap();
    let nids: Vec<Nid> = (0..400).map(new).collect();
    store.checkpoint().unwrap();
    let blocks = promise(&store, store.space().free_blocks);
    for value in 0..100 {
        for nid in &nids {
            change(&store, *nid, Need::Reclaim, Change::Set(0, value)).unwrap();
        }
    }
    redeem(&store, blocks);
    store.close().unwrap();
    drop(store);
    world.check("after promises were redeemed beside changes");
}

/// Changes nodes so often that their old images are much more than they are.
fn churn(store: &TestStore, nids: &[Nid], times: u64) {
    for value in 0..times {
        for nid in nids {
            change(store, *nid, Need::Reclaim, Change::Set(0, value)).unwrap();
        }
    }
}

/// Checkpoints took chunks that were promised before they cleaned, and what they had taken counted as room to grow: metadata filled it, and
/// there was nothing left to redeem promises with.
#[test]
fn metadata_does_not_grow_into_what_checkpoints_have_lent_of_promises() {
    for (seed, words) in [(64, 300), (65, 1500)] {
        let world = World::new(seed, &[64]);
        let options = StoreOptions {
            dirty_bytes: Some(64 << 10),
            ..plain()
        };
        let store = world.open_with(options).unwrap();
        let mut nids: Vec<Nid> = (0..50)
            .map(|i| create(&store, vec![i; words]).unwrap())
            .collect();
        let blocks = promise(&store, store.space().free_blocks);
        for _ in 0..3 {
            churn(
                &store,
                &nids,
                1 + 12_000_000 / (nids.len() * words * 8) as u64,
            );
            nids.extend(fill(&store, words));
        }
        // Of metadata that has grown to its limit the last chunk may be more than it can do without.
        redeem_but(&store, blocks, 256);
        store.close().unwrap();
        drop(store);
        world.check("after promises were redeemed beside metadata that grew again and again");
    }
}

/// Metadata had less room than cleaning is content with, though most of it was old: who had a promise was told that the array is full.
#[test]
fn metadata_gives_up_chunks_for_promises_that_find_nothing_else() {
    let world = World::new(66, &[64]);
    let options = StoreOptions {
        dirty_bytes: Some(64 << 10),
        node_cache_bytes: 256 << 10,
        shards: 1,
        ..plain()
    };
    let store = world.open_with(options).unwrap();
    let nids: Vec<Nid> = (0..8844)
        .map(|i| create(&store, vec![i; 20]).unwrap())
        .collect();
    let blocks = promise(&store, store.space().free_blocks);
    churn(&store, &nids, 3);
    redeem(&store, blocks);
    store.close().unwrap();
    drop(store);
    world.check("after promises were redeemed");
}

/// What was deleted counted as live until the next checkpoint, and nobody made one: an array without anything on it was full for half a minute.
#[test]
fn what_was_deleted_since_the_last_checkpoint_makes_room_for_promises() {
    let world = World::new(66, &[64]);
    let store = world.open_with(plain()).unwrap();
    let before = store.space().free_blocks;
    let nids = fill(&store, 1500);
    store.checkpoint().unwrap();
    for nid in nids {
        delete(&store, nid).unwrap();
    }
    store.sync().unwrap();
    let (blocks, shown) = (before * 7 / 8, store.space().free_blocks);
    assert!(shown >= blocks, "{shown} of {before}");
    let promised = store.promise(blocks).unwrap().into_blocks();
    redeem(&store, promised);
    store.close().unwrap();
    drop(store);
    world.check("after data took the place of what was deleted");
}

/// Chunks of the reserve that metadata had grown into counted as data's, once it had shrunk again.
#[test]
fn room_is_shown_that_data_can_have_after_metadata_has_shrunk() {
    let world = World::new(67, &[130, 130]);
    let store = world.open_with(plain()).unwrap();
    let data = 190 << 8;
    let data = promise(&store, data);
    redeem(&store, data);
    for nid in fill(&store, 250) {
        delete(&store, nid).unwrap();
    }
    store.checkpoint().unwrap();
    let shown = store.space().free_blocks;
    let had = promise(&store, shown);
    assert!(had + 128 >= shown && had > 512, "{had} of {shown}");
    redeem(&store, had);
    store.close().unwrap();
    drop(store);
    world.check("after data had what was shown");
}

/// All nids of the leaf that were ready were tried, each with a read that failed, and nobody got them any more.
#[test]
fn nids_in_a_leaf_that_cannot_be_read_are_left_at_once_and_come_back() {
    const LEAF: u64 = format::table::LEAF_NIDS;
    let world = World::new(31, &[64]);
    let options = StoreOptions {
        shards: 1,
        ..World::options()
    };
    let store = world.open_with(options).unwrap();
    let mut nids: Vec<Nid> = (0..24_100)
        .map(|i| create(&store, vec![i]).unwrap())
        .collect();
    let last = nids[nids.len() - 1].0;
    let (leaf, left) = (last / LEAF, LEAF - 1 - last % LEAF);
    assert!(left > 50, "{left} are ready");
    store.sync().unwrap();
    store.checkpoint().unwrap();
    // Others' leaves push that one out of memory.
    for _ in 0..3 {
        let others = nids.iter().step_by(LEAF as usize / 2);
        for nid in others.filter(|nid| nid.0 / LEAF != leaf) {
            store.get(*nid).unwrap();
        }
    }
    world.devices[0].fail_reads(Times::Always, None);
    let fresh = store.reserve_nid().unwrap();
    let reads = world.devices[0].struck().len();
    assert!((1..=4).contains(&reads), "{reads} reads");
    assert_ne!(fresh.nid().0 / LEAF, leaf);
    drop(fresh);
    world.devices[0].heal();
    // What is free is found again when it is much.
    nids.drain(..).for_each(|nid| delete(&store, nid).unwrap());
    // Each is kept, or the next one is the same.
    let free: Vec<_> = (0..30_000).map(|_| store.reserve_nid().unwrap()).collect();
    let found = free.iter().filter(|fresh| fresh.nid().0 / LEAF == leaf);
    assert_eq!(found.count() as u64, LEAF);
}

/// What was live was two fifths of what the space tables describe of metadata, and less than that of the array: nothing was cleaned as long as other
/// chunks were free, each checkpoint took more of them, and ended with one too many. So did that of each later mount.
#[test]
fn metadata_is_cleaned_before_it_takes_more_chunks_than_the_space_tables_describe() {
    const CHUNKS: u32 = 160;
    const BYTES: u64 = 4 << 40;
    let mut geometry = Geometry::plan(&[BYTES], GeometryOptions::default()).unwrap();
    (geometry.chunk_blocks, geometry.segment_blocks) = (256, 16);
    geometry.chunk_count = SPACE_WORDS_MAX as u32 - CHUNKS * geometry.segments_per_chunk();
    assert_eq!(geometry.meta_chunks_max(), u64::from(CHUNKS));
    let world = World::of(67, &[BYTES], geometry);
    let options = || StoreOptions {
        dirty_bytes: Some(12 << 20),
        ..plain()
    };
    let store = world.open_with(options()).unwrap();
    // 53 MiB beside 8 MiB of space tables, some twenty in each segment.
    let nids: Vec<Nid> = (0..17_000)
        .map(|_| create(&store, vec![0; 400]).unwrap())
        .collect();
    let mut model = vec![0; nids.len()];
    let mut rng = Rng::new(67);
    for round in 1..=16 {
        for _ in 0..4_000 {
            let which = rng.below(nids.len() as u64) as usize;
            change(&store, nids[which], Need::Reclaim, Change::Set(0, round)).unwrap();
            model[which] = round;
        }
        store.checkpoint().unwrap();
    }
    drop(store);
    let store = world.open_with(options()).unwrap();
    for (nid, expected) in nids.iter().zip(model) {
        assert_eq!(store.get(*nid).unwrap().into_read().unwrap().0[0], expected);
    }
    store.close().unwrap();
}

use super::super::new_cell;
use super::super::seekers::{BETWEEN, COMMON};
use super::super::testing::{Way, Word, Words};
use super::*;

/// A cache with a node that two cores hold by themselves.
fn sought(limit: usize) -> NodeCache<Word> {
    let cache = NodeCache::<Word>::new(2, limit);
    cache.insert(new_cell(Nid(70), 1, Body::User(Words)));
    let found = |core| cache.get_held(core, Nid(70)).unwrap();
    let held = |core| found(core).is_own();
    assert!(!held(0) && !held(0) && !held(1));
    (0..2 * COMMON as usize).for_each(|i| drop(found(i % 2)));
    assert!(held(0) && held(1));
    cache
}

/// Nodes that are neighbours.
fn neighbours<const LEADS: bool>() -> NodeCache<Words<LEADS>> {
    let cache = NodeCache::new(2, 1 << 20);
    for nid in 72..80 {
        cache.insert(new_cell(Nid(nid), 1, Body::User(Words)));
    }
    cache
}

fn held<const LEADS: bool>(cache: &NodeCache<Words<LEADS>>, core: usize, nid: u64) -> bool {
    cache.get_held(core, Nid(nid)).unwrap().is_own()
}

#[test]
fn cores_hold_ways_that_are_neighbours_though_each_seeks_its_own() {
    let cache: NodeCache<Way> = neighbours();
    let nid = |core| 72 + core as u64;
    // One core after the other may seek both as long as it likes.
    for core in 0..2 {
        assert!((0..4 * COMMON as usize).all(|_| !held(&cache, core, nid(core))));
    }
    (0..2 * COMMON as usize).for_each(|i| _ = held(&cache, i % 2, nid(i % 2)));
    assert!(held(&cache, 0, 72) && held(&cache, 1, 73));
    // What lies where neither core seeks anything.
    assert!(!held(&cache, 0, 74));
}

#[test]
fn what_is_no_way_is_held_only_if_several_cores_seek_it() {
    let cache: NodeCache<Word> = neighbours();
    (0..8 * COMMON as usize).for_each(|i| assert!(!held(&cache, i % 2, 72 + i as u64 % 2)));
    (0..2 * COMMON as usize).for_each(|i| _ = held(&cache, i % 2, 74));
    assert!(held(&cache, 0, 74) && held(&cache, 1, 74));
}

#[test]
fn ways_that_are_looked_up_now_and_then_are_not_held() {
    let cache: NodeCache<Way> = neighbours();
    for _ in 0..4 * COMMON {
        // Each is disturbed each time, with others of the shard between.
        assert!(!held(&cache, 0, 72) && !held(&cache, 1, 73));
        for _ in 0..BETWEEN {
            assert!(cache.get(Nid(74)).is_some());
        }
    }
}

#[test]
fn a_core_that_holds_a_node_writes_no_count_of_others() {
    let cache = sought(1 << 20);
    let cell = cache.get(Nid(70)).unwrap();
    let before = Arc::strong_count(&cell);
    let _more: Vec<_> = (0..10).map(|i| cache.get_held(i % 2, Nid(70))).collect();
    assert_eq!(Arc::strong_count(&cell), before);
}

#[test]
fn a_glance_sees_what_is_there_and_waits_for_nothing() {
    let cache = NodeCache::<Word>::new(2, 1 << 20);
    let glance = |nid| cache.glance(0, Nid(nid), |_: &Word| Some(()));
    assert_eq!(glance(70), None);
    cache.insert(new_cell(Nid(70), 1, Body::User(Words)));
    cache.insert(new_cell(Nid(71), 1, Body::Gone));
    let cell = cache.get(Nid(70)).unwrap();
    let before = Arc::strong_count(&cell);
    assert_eq!((glance(70), glance(71)), (Some(()), None));
    assert_eq!(cache.glance(0, Nid(70), |_: &Word| None::<()>), None);
    assert_eq!(Arc::strong_count(&cell), before);
    let reader = cell.read();
    assert_eq!(glance(70), Some(()));
    drop(reader);
    let writer = cache.write(&cell);
    assert_eq!(glance(70), None);
    drop(writer);
    assert_eq!(glance(70), Some(()));
}

#[test]
fn a_glance_counts_for_the_cores_that_seek_a_node() {
    let cache = NodeCache::<Word>::new(2, 1 << 20);
    cache.insert(new_cell(Nid(70), 1, Body::User(Words)));
    let glance = |core| cache.glance(core, Nid(70), |_: &Word| Some(()));
    for i in 0..2 * COMMON as usize {
        glance(i % 2);
    }
    // From now on each core is to hold it by itself, which a glance does not bring about.
    assert_eq!((glance(0), glance(1)), (None, None));
    assert!((0..2).all(|core| cache.get_held(core, Nid(70)).unwrap().is_own()));
    let cell = cache.get(Nid(70)).unwrap();
    let before = Arc::strong_count(&cell);
    assert_eq!((glance(0), glance(1)), (Some(()), Some(())));
    assert_eq!(Arc::strong_count(&cell), before);
    // Nobody has a glance at what is gone.
    cell.header.set_gone();
    cache.insert(new_cell(Nid(70), 9, Body::Gone));
    assert_eq!((glance(0), glance(1)), (None, None));
}

#[test]
fn a_node_that_cores_only_hold_is_evicted() {
    let cache = sought(64 * (cell_overhead::<Word>() + 1000));
    let in_use = cache.get_held(1, Nid(70));
    let fill = |from: u64| {
        for nid in (from..from + 10_000).step_by(NEIGHBOURS) {
            cache.insert(new_cell(Nid(nid), 1, Body::User(Words)));
        }
    };
    fill(1000);
    assert!(cache.contains(Nid(70)), "it is in use");
    drop(in_use);
    fill(20_000);
    assert!(!cache.contains(Nid(70)));
    assert!(cache.get_held(0, Nid(70)).is_none() && cache.get_held(1, Nid(70)).is_none());
    assert!(cache.bytes.exact() <= 2 * cache.limit);
}

#[test]
fn a_node_that_is_gone_is_given_to_no_core() {
    let cache = sought(1 << 20);
    cache.get(Nid(70)).unwrap().header.set_gone();
    // Its nid has no other cell yet: whoever asks finds it gone.
    assert!(!cache.get_held(0, Nid(70)).unwrap().is_own());
    cache.insert(new_cell(Nid(70), 9, Body::User(Words)));
    for core in [1, 0, 1] {
        assert_eq!(cache.get_held(core, Nid(70)).unwrap().read().version, 9);
    }
}

#[test]
fn a_replaced_cell_is_charged_no_more() {
    let cache = NodeCache::<Word>::new(1, 1 << 20);
    for version in 0..100 {
        let cell = new_cell::<Word>(Nid(70), version, Body::User(Words));
        cache.insert(Arc::clone(&cell));
        cache.recharge(&cell, &Body::Gone);
        cache.insert(new_cell(Nid(70), version, Body::User(Words)));
        // The checkpoint captures the old cell last.
        cache.recharge(&cell, &Body::User(Words));
    }
    let one = (cell_overhead::<Word>() + 1000) as i64;
    assert_eq!(cache.bytes.exact(), one + GROUP_BYTES);
}

//! Room that data and metadata take from each other, and give back.

use crate::world::{World, fill, free, take_all};
use engine::StoreOptions;

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

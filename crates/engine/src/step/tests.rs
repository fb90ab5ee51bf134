//! What a thread that panics leaves to others: a store that has failed, and says why, in which nobody waits, and on the devices all that was
//! synced.

use crate::error::Error;
use crate::large::Extensive;
use crate::op::Need;
use crate::store::StoreOptions;
use crate::testing::{Bytes, TestStore, Trap, create, create_as, format, log, options};
use base::rng::Rng;
use device::sim::SimDevice;
use device::{Array, BlockDevice};
use format::Nid;
use format::journal::RECORD_MAX;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const SIZE: u64 = 64 << 20;

/// An open store and its device.
fn store_with(options: StoreOptions) -> (Arc<SimDevice>, Arc<TestStore>) {
    let device = SimDevice::new(SIZE, 1);
    let array = format(Arc::clone(&device) as Arc<dyn BlockDevice>);
    let (store, _) = TestStore::open(array, options).unwrap();
    (device, store)
}

fn panics<T>(work: impl FnOnce() -> T) {
    assert!(catch_unwind(AssertUnwindSafe(work)).is_err());
}

fn check_failed(store: &TestStore) {
    let failed = store.failed().expect("a panic is a failure");
    assert!(failed.to_string().contains("panicked"), "{failed}");
}

/// The store as it is found after a crash. Opening it fails where versions of a node lack.
fn after_a_crash(device: &SimDevice) -> Arc<TestStore> {
    let device = device.restart(&mut Rng::new(1));
    let array = Array::assemble(vec![device as Arc<dyn BlockDevice>], false).unwrap();
    TestStore::open(Arc::new(array), options()).unwrap().0
}

fn version(store: &TestStore, nid: Nid) -> u64 {
    let node = store.get(nid).unwrap();
    let mut op = store.begin(Need::Reclaim).unwrap();
    let slot = op.lock(&node).unwrap();
    op.version(slot)
}

/// The thread that made checkpoints was gone, and no more. What it had taken was on no list, and the next checkpoint's record,
/// which anybody made who needed room, freed the journal up to its own epoch: of what the first one had not entered nothing was left.
#[test]
fn a_panic_in_a_checkpoint_keeps_others_from_making_one() {
    for workers in [1, 4] {
        let (device, store) = store_with(StoreOptions {
            workers,
            ..options()
        });
        let trap = Trap::new();
        let mut nids: Vec<Nid> = (0..100).map(|_| create(&store, 1000)).collect();
        nids.push(create_as(&store, Bytes::trapped(1000, &trap)));
        nids.extend((0..100).map(|_| create(&store, 1000)));
        store.sync().unwrap();
        trap.set("encode");
        panics(|| store.checkpoint());
        check_failed(&store);
        let dirty: usize = store.dirty.lists.iter().map(|list| list.lock().len()).sum();
        assert_eq!(dirty, nids.len(), "one that can be evicted is an old one");
        assert!(store.checkpoint().is_err());
        assert!(store.close().is_err());
        drop(store);
        let store = after_a_crash(&device);
        for nid in nids {
            assert_eq!(version(&store, nid), 1);
        }
    }
}

#[test]
fn a_panic_in_a_thread_of_the_store_fails_it() {
    let (_, store) = store_with(options());
    let thread = |_: &TestStore| -> Result<(), Error> { panic!("as a test wants it") };
    let interval = std::time::Duration::from_secs(3600);
    store.start("test", interval, |_| true, thread).unwrap();
    let handles = std::mem::take(&mut *store.threads.lock());
    for handle in handles {
        handle.join().unwrap();
    }
    check_failed(&store);
    assert!(store.close().is_err());
}

/// The node had a new version and the journal none. Whoever changed it next logged one that fits nothing, and whoever closed the
/// store waited for a credit that nobody had.
#[test]
fn a_panic_in_an_operations_commit_leaves_no_gap_in_the_versions_of_a_node() {
    let (device, store) = store_with(options());
    let trap = Trap::new();
    let nid = create_as(&store, Bytes::trapped(1000, &trap));
    store.sync().unwrap();
    trap.set("merges");
    panics(|| log(&store, nid, 10));
    check_failed(&store);
    assert!(!store.journal.has_credits());
    assert!(matches!(store.begin(Need::Reclaim), Err(Error::Failed(_))));
    assert!(store.close().is_err());
    drop(store);
    assert_eq!(version(&after_a_crash(&device), nid), 1);
}

#[test]
fn a_panic_in_the_commit_of_many_records_returns_the_credits_of_all() {
    let (device, store) = store_with(options());
    let trap = Trap::new();
    let nid = create_as(&store, Bytes::trapped(1000, &trap));
    store.sync().unwrap();
    let node = store.get(nid).unwrap();
    let asked = Extensive {
        logged: 2 * RECORD_MAX,
        dirty: 64 << 10,
    };
    let mut op = store.begin_large(asked).unwrap();
    let slot = op.lock(&node).unwrap();
    for _ in 0..40 {
        op.apply(slot, RECORD_MAX / 40);
    }
    trap.set("merges");
    panics(|| op.commit());
    check_failed(&store);
    assert!(!store.journal.has_credits() && store.large_turn.try_lock().is_some());
    assert!(store.close().is_err());
    drop((node, store));
    assert_eq!(version(&after_a_crash(&device), nid), 1);
}

/// That it can be said beforehand is no reason to panic with a node that has changed.
#[test]
fn a_record_over_the_bound_fails_the_store() {
    let (device, store) = store_with(options());
    let nid = create(&store, 1000);
    store.sync().unwrap();
    log(&store, nid, RECORD_MAX);
    let failed = store.failed().unwrap();
    assert!(failed.to_string().contains("over the bound"), "{failed}");
    assert!(!store.journal.has_credits());
    assert!(store.close().is_err());
    drop(store);
    assert_eq!(version(&after_a_crash(&device), nid), 1);
}

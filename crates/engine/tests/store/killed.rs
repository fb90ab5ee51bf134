//! A process dies, and what it has written is in the devices' caches; then the power goes while the next one recovers.

use crate::power_cut::create_vouched;
use crate::world::{World, create};
use base::rng::Rng;
use device::sim::Survival;
use engine::Error;
use format::Nid;

/// The process dies when the batch of a node is written with the data for which it vouches, and nothing of both is flushed.
fn killed(seed: u64) -> (World, Nid, Nid) {
    let commit = |cut: Option<u64>| {
        let world = World::new(seed, &[64]);
        let store = world.open().unwrap();
        let old = create(&store, vec![1]).unwrap();
        store.sync().unwrap();
        let (nid, _, epoch) = create_vouched(&store, &mut Rng::new(seed));
        let before = world.switch.operations();
        if let Some(requests) = cut {
            world.switch.cut_after(requests);
        }
        let done = store.commit_through(epoch);
        assert_eq!(done.is_ok(), cut.is_none());
        (world.switch.operations() - before, (world, old, nid))
    };
    let (requests, _) = commit(None);
    // The last of them is the flush.
    let (_, (mut world, old, nid)) = commit(Some(requests - 1));
    world.switch.restore();
    world.devices = world.devices.iter().map(|d| d.reopen()).collect();
    (world, old, nid)
}

/// It said that the batch was durable, which was lost: a loss of what nobody had been told was there.
#[test]
fn recovery_says_nothing_of_a_batch_that_the_power_may_still_take() {
    let mut interrupted = 0;
    for requests in 0..100 {
        let (mut world, old, nid) = killed(76);
        world.switch.cut_after(requests);
        let recovered = world.open().is_ok();
        interrupted += u64::from(!recovered);
        world.switch.cut_now();
        world.switch.restore();
        let nothing = |d: &std::sync::Arc<device::sim::SimDevice>| {
            d.restart_with(Survival::None, &mut Rng::new(requests))
        };
        world.devices = world.devices.iter().map(nothing).collect();
        let store = world.open().unwrap();
        assert!(store.get(old).is_ok());
        match store.get(nid) {
            Ok(_) => {}
            Err(Error::Gone(_)) => assert!(!recovered),
            Err(error) => panic!("{error}"),
        }
        if recovered {
            assert!(interrupted > 3, "{interrupted}");
            return;
        }
    }
    panic!("recovery takes more requests than that");
}

//! The power goes behind a batch that vouches for data, and a device does not return that data; or a repair is cut off.

use crate::damage::ARRAY_START;
use crate::power_cut::{check_blocks, create_vouched};
use crate::world::{Numbers, World, delete};
use base::rng::Rng;
use device::sim::Times;
use engine::{Error, Extent, Object, SalvageError, Severity, StoreOptions};
use format::Nid;
use std::ops::Range;

struct Cut {
    world: World,
    nid: Nid,
    /// What the last batch vouches for, in bytes of the device.
    data: Range<u64>,
}

fn cut(seed: u64) -> Cut {
    let mut rng = Rng::new(seed);
    let mut world = World::new(seed, &[64]);
    let store = world.open().unwrap();
    let (nid, extent, epoch) = create_vouched(&store, &mut rng);
    store.commit_through(epoch).unwrap();
    let Extent { block, len } = extent;
    let start = ARRAY_START + block.byte();
    drop(store);
    world.switch.cut_now();
    world.restart(&mut rng);
    Cut {
        world,
        nid,
        data: start..start + u64::from(len) * 4096,
    }
}

impl Cut {
    fn fail(&self, times: Times) {
        self.world.devices[0].fail_reads(times, Some(self.data.clone()));
    }

    /// As if the power had gone before it came to the medium.
    fn lose_data(&self) {
        let old = vec![0xA5; (self.data.end - self.data.start) as usize];
        self.world.devices[0].poke(self.data.start, &old);
    }

    fn hash(&self) -> u64 {
        self.world.devices[0].contents_hash()
    }

    /// Whether the node is there, in a store that opens; with what it vouches for.
    fn is_there(&self) -> bool {
        let store = self.world.open().unwrap();
        match store
            .get(self.nid)
            .and_then(|node| Ok(node.read()?.0.clone()))
        {
            Ok(numbers) => {
                check_blocks(&store, &numbers, 0);
                true
            }
            Err(Error::Gone(_)) => false,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn data_that_is_read_at_the_third_time_is_there_or_not() {
    for whole in [true, false] {
        let cut = cut(71);
        if !whole {
            cut.lose_data();
        }
        cut.fail(Times::Next(2));
        assert_eq!(cut.is_there(), whole);
        assert_eq!(cut.world.devices[0].struck().len(), 2);
    }
}

/// It once counted as there, and a batch said so: when the device came back the node had what some other one had written there.
#[test]
fn nobody_confirms_what_a_device_does_not_return() {
    for whole in [true, false] {
        let cut = cut(72);
        if !whole {
            cut.lose_data();
        }
        cut.fail(Times::Always);
        let before = cut.hash();
        for _ in 0..2 {
            let opened = cut.world.open();
            assert!(matches!(opened, Err(Error::Unread(_))));
        }
        assert_eq!(cut.hash(), before, "nothing was written");
        cut.world.devices[0].heal();
        assert_eq!(cut.is_there(), whole);
    }
}

/// It may have been acknowledged: it is not left out without a word.
#[test]
fn what_a_device_does_not_return_is_shown_and_told() {
    let cut = cut(73);
    cut.fail(Times::Always);
    let reading = StoreOptions {
        read_only: true,
        ..World::options()
    };
    let store = cut.world.open_with(reading).unwrap();
    assert!(store.get(cut.nid).is_ok());
    drop(store);
    let (findings, nodes) = cut.world.verify();
    assert!(nodes.contains_key(&cut.nid));
    let found = |severity| {
        let these = findings.iter().filter(move |f| f.severity == severity);
        these.map(|f| f.object.clone()).collect::<Vec<_>>()
    };
    assert_eq!(found(Severity::Error), [Object::Node(cut.nid)]);
    let before = cut.hash();
    let salvage = cut.world.salvage().unwrap();
    let [loss] = salvage.losses() else {
        panic!("{:?}", salvage.losses());
    };
    assert!(loss.lost && loss.kept && loss.object == Object::Node(cut.nid));
    assert!(salvage.store().get(cut.nid).is_ok());
    drop(salvage);
    assert_eq!(cut.hash(), before, "nothing is published");
}

/// It wrote first of all that the batch was durable: a mount after that knew of no doubt.
#[test]
fn a_repair_that_is_cut_off_confirms_nothing() {
    let (mut failed, mut unheard, mut is_published) = (0, 0, false);
    for requests in 0..40 {
        let mut cut = cut(74);
        cut.fail(Times::Always);
        let mut salvage = cut.world.salvage().unwrap();
        salvage.set_space(|_| Vec::new(), |_| true).unwrap();
        cut.world.switch.cut_after(requests);
        let published = salvage.publish();
        cut.world.switch.cut_now();
        cut.world.restart(&mut Rng::new(requests));
        cut.fail(Times::Always);
        match cut.world.open() {
            Err(Error::Unread(_)) => failed += 1,
            Ok(_) => unheard += u32::from(published.is_err()),
            Err(error) => panic!("{error}"),
        }
        is_published = published.is_ok();
        if is_published {
            break;
        }
    }
    assert!(failed > 3, "{failed}");
    // The record, in one of its two places or both, may have come to the device before somebody heard of it.
    assert!(unheard <= 2, "{unheard}");
    assert!(is_published, "no repair came to its end");
}

/// The end of the journal's run rests on data of a node that the run deletes.
#[test]
fn a_repair_writes_nothing_where_the_last_batch_looks() {
    let mut rng = Rng::new(75);
    let mut world = World::new(75, &[64]);
    let store = world.open().unwrap();
    let (nid, extent, epoch) = create_vouched(&store, &mut rng);
    delete(&store, nid).unwrap();
    store.commit_through(epoch).unwrap();
    let start = ARRAY_START + extent.block.byte();
    drop(store);
    world.switch.cut_now();
    world.restart(&mut rng);
    let data = || {
        let mut bytes = vec![0; extent.len as usize * 4096];
        world.devices[0].peek(start, &mut bytes);
        bytes
    };
    let before = data();
    let mut salvage = world.salvage().unwrap();
    // More than all room there is.
    for number in 0..64 << 20 >> 13 {
        let (fresh, _) = salvage.fresh().unwrap();
        let large = Numbers(vec![number; 1900]);
        salvage.put(fresh, large).unwrap();
    }
    salvage.set_space(|_| Vec::new(), |_| false).unwrap();
    let published = salvage.publish();
    assert!(
        matches!(published, Err(SalvageError::Store(Error::NoSpace))),
        "{published:?}"
    );
    assert!(data() == before);
}

/// Segments were written before it turned out that there was no room, which is too late where the latest state of a device was to be had still.
#[test]
fn whether_there_is_room_for_a_repair_is_known_before_it_writes() {
    let (mut fitted, mut refused) = (0, u64::MAX);
    for number in (1..20).map(|step| step * 400) {
        let mut world = World::new(76, &[64]);
        drop(world.open().unwrap());
        world.switch.cut_now();
        world.restart(&mut Rng::new(76));
        let mut salvage = world.salvage().unwrap();
        for value in 0..number {
            let (fresh, _) = salvage.fresh().unwrap();
            salvage.put(fresh, Numbers(vec![value; 1900])).unwrap();
        }
        salvage.set_space(|_| Vec::new(), |_| false).unwrap();
        let before = world.devices[0].contents_hash();
        match salvage.check_room() {
            Ok(()) => {
                fitted = number;
                salvage.publish().unwrap();
                continue;
            }
            Err(SalvageError::Store(Error::NoSpace)) => refused = refused.min(number),
            Err(error) => panic!("{error}"),
        }
        assert_eq!(world.devices[0].contents_hash(), before);
        assert!(fitted < number);
    }
    assert!(
        fitted < refused && refused < u64::MAX,
        "{fitted} and {refused}"
    );
    // Of 64 MiB, with a journal in them.
    assert!(fitted * (15 << 10) > 32 << 20, "{fitted}");
}

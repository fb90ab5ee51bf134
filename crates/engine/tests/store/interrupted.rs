//! What a checkpoint has left that was cut off before its record.

use crate::damage::{Item, items};
use crate::pressure::slot_places;
use crate::world::{Change, Numbers, TestStore, World, change, create, delete};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::thread::spawn;
use device::sim::{PowerSwitch, Times};
use device::{Array, BlockDevice, Operation, Request};
use engine::{Error, Need, Object, Salvage, Store};
use format::Nid;
use format::checkpoint::CheckpointRecord;
use format::item::ItemKind;
use format::label::HEAD_BLOCKS;
use format::table::LEAF_NIDS;
use std::sync::Arc;

type Hook = Box<dyn FnOnce() + Send>;

/// Calls back, once, when something is to be written behind the labels.
struct Tap {
    device: Arc<device::sim::SimDevice>,
    hook: Arc<Mutex<Option<Hook>>>,
}

impl BlockDevice for Tap {
    device::described_by!(device);

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let head = HEAD_BLOCKS * format::BLOCK_SIZE as u64;
        let is_write = |request: &Request<'_>| {
            let operation = &request.operation;
            matches!(operation, Operation::Write { offset, .. } if *offset >= head)
        };
        if requests.iter().any(is_write) {
            let hook = self.hook.lock().take();
            hook.into_iter().for_each(|hook| hook());
        }
        self.device.run(requests, meanwhile);
    }

    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.device.discard(offset, len)
    }
}

/// A store on devices of which the first calls back.
fn tapped(world: &World) -> (Arc<Mutex<Option<Hook>>>, Arc<TestStore>) {
    let hook = Arc::new(Mutex::new(rank::LEAF, None));
    let device = Tap {
        device: Arc::clone(&world.devices[0]),
        hook: Arc::clone(&hook),
    };
    let mut devices: Vec<Arc<dyn BlockDevice>> = vec![Arc::new(device)];
    devices.extend(world.devices.iter().skip(1).map(|d| Arc::clone(d) as _));
    let array = Array::assemble(devices, false).unwrap();
    let (store, _) = Store::open(Arc::new(array), World::options()).unwrap();
    (hook, store)
}

/// The sequence number of a copy of a slot's record.
fn sequence(world: &World, slot: usize, copy: usize) -> u64 {
    let array = world.array();
    let block = array.read_slot(slot, copy).unwrap();
    CheckpointRecord::parse(&block, &array.uuid())
        .unwrap()
        .sequence
        .get()
}

/// Region pages of the first region, and copies of this leaf page, by the checkpoints that wrote them.
fn pages(items: &[Item], kind: ItemKind, id: u64) -> Vec<(u64, u64)> {
    let pages = items.iter().filter(|item| item.is(kind, id));
    let mut pages: Vec<_> = pages.map(|page| (page.version, page.range.start)).collect();
    pages.sort_unstable();
    pages
}

/// A node is deleted, and that is synced, while a checkpoint writes images; the power goes before its record. Pages of that checkpoint had the number
/// of recovery's, and a repair that found both took those that lie lower: the page above was not made anew, or the deleted node was back.
#[test]
fn pages_of_a_checkpoint_that_was_cut_off_are_told_from_those_of_recovery() {
    for higher in [false, true] {
        let world = World::new(91, &[64]);
        let store = world.open().unwrap();
        // So many that their images fill segments below those of the next mount.
        let below: Vec<Nid> = (0..if higher { 4000 } else { 0 })
            .map(|_| create(&store, vec![7; 120]).unwrap())
            .collect();
        store.close().unwrap();
        drop(store);

        let (hook, store) = tapped(&world);
        let all: Vec<Nid> = (0..4 * LEAF_NIDS)
            .map(|_| create(&store, vec![7; 20]).unwrap())
            .collect();
        for nid in below {
            delete(&store, nid).unwrap();
        }
        store.checkpoint().unwrap();
        let leaf = |nid: &Nid| nid.0 / LEAF_NIDS;
        let two = all.windows(2).find(|two| leaf(&two[0]) == leaf(&two[1]));
        let (changed, deleted) = two.map(|two| (two[0], two[1])).unwrap();
        let newest = [0, 1].map(|slot| sequence(&world, slot, 0));
        let slot = usize::from(newest[0] > newest[1]);
        let older = world.array().read_slot(slot, 0).unwrap();

        change(&store, changed, Need::Reclaim, Change::Set(0, 77)).unwrap();
        store.sync().unwrap();
        let during = Arc::clone(&store);
        *hook.lock() = Some(Box::new(move || {
            // On a thread of its own: whoever writes may hold locks.
            let work = move || {
                delete(&during, deleted).unwrap();
                during.sync().unwrap();
            };
            spawn("during", work).unwrap().join().unwrap();
        }));
        store.checkpoint().unwrap();
        assert!(hook.lock().is_none());
        drop(store);
        // As if the power had gone before the record.
        world.array().write_slot(slot, &older).unwrap();
        let store = world.open().unwrap();
        let found = items(&world, &store);
        drop(store);

        let copies = pages(&found, ItemKind::TableLeaf, leaf(&changed));
        let [.., (interrupted, its), (recovered, place)] = copies[..] else {
            panic!("{copies:?}");
        };
        assert_eq!((its > place, interrupted < recovered), (higher, true));
        for page in found
            .iter()
            .filter(|item| item.is(ItemKind::TableRegion, 0))
        {
            world.devices[0].poke(page.range.start + 60, &[0xA5; 64]);
        }
        let mut salvage = world.salvage().unwrap();
        let losses = salvage.losses();
        assert!(
            losses
                .iter()
                .any(|loss| loss.object == Object::RegionPage(0))
        );
        assert!(!losses.iter().any(|loss| loss.lost), "{higher}: {losses:?}");
        let store = salvage.store();
        assert_eq!(store.get(changed).unwrap().into_read().unwrap().0[0], 77);
        assert!(matches!(store.get(deleted), Err(Error::Gone(_))));
        salvage.set_space(|_| Vec::new(), |_| false).unwrap();
        salvage.publish().unwrap();
        assert_eq!(world.check("after the repair").len(), all.len() - 1);
    }
}

/// One mount's record comes to the first device only. The next mount does not get it from there, and cannot write there: it made
/// another record, and that had the same number. The mount after that took the one of which the segments had been written over.
#[test]
fn a_mount_writes_nothing_while_a_record_may_come_back() {
    for clean in [false, true] {
        let world = World::new(92, &[64, 64]);
        let store = world.open().unwrap();
        let nid = create(&store, vec![1, 2, 3]).unwrap();
        match clean {
            true => store.close().unwrap(),
            false => store.sync().unwrap(),
        }
        drop(store);
        let before = [0, 1].map(|slot| sequence(&world, slot, 1));
        let slot = usize::from(before[0] > before[1]);
        let at = |copy: usize| {
            let start = slot_places()[slot][copy];
            start..start + format::BLOCK_SIZE as u64
        };
        let [first, second] = &world.devices[..] else {
            unreachable!()
        };
        second.fail_writes(Times::Always, Some(at(1)));
        world.open().map(drop).unwrap_err();
        assert!(before[slot] < sequence(&world, slot, 0));
        second.heal();
        let copy = || world.array().read_slot(slot, 1).unwrap().to_vec();
        let second_copy = copy();
        first.fail_reads(Times::Always, Some(at(0)));
        first.fail_writes(Times::Always, Some(at(0)));
        world.open().map(drop).unwrap_err();
        first.heal();
        assert!(copy() == second_copy);
        let store = world.open().unwrap();
        assert_eq!(store.get(nid).unwrap().into_read().unwrap().0, [1, 2, 3]);
        store.close().unwrap();
        world.check("after two records");
    }
}

/// The power goes when the first device has a record, and the second one not yet. Returns the slot, and the nodes; see [`whole`].
fn half_a_record(world: &World) -> (usize, Vec<Nid>) {
    let (hook, store) = tapped(world);
    let nids: Vec<Nid> = (0..800)
        .map(|i| create(&store, vec![i; 20]).unwrap())
        .collect();
    store.checkpoint().unwrap();
    for nid in &nids {
        change(&store, *nid, Need::Reclaim, Change::Set(0, 77)).unwrap();
    }
    store.sync().unwrap();
    let before = [0, 1].map(|slot| sequence(world, slot, 1));
    let slot = usize::from(before[0] > before[1]);
    let old = world.array().read_slot(slot, 1).unwrap();
    // What the next mount replays, and writes.
    let (during, all) = (Arc::clone(&store), nids.clone());
    *hook.lock() = Some(Box::new(move || {
        let work = move || {
            for nid in all.into_iter().take(150) {
                change(&during, nid, Need::Reclaim, Change::Set(0, 99)).unwrap();
            }
            during.sync().unwrap();
        };
        spawn("during", work).unwrap().join().unwrap();
    }));
    store.checkpoint().unwrap();
    assert!(hook.lock().is_none());
    drop(store);
    world.devices[1].poke(slot_places()[slot][1], &old);
    (slot, nids)
}

/// The nodes are as they were synced.
fn whole(store: &TestStore, nids: &[Nid]) {
    for (i, nid) in nids.iter().enumerate() {
        let first = if i < 150 { 99 } else { 77 };
        let expected = [&[first], &[i as u64; 19][..]].concat();
        assert_eq!(store.get(*nid).unwrap().into_read().unwrap().0, expected);
    }
}

/// The next mount took the record from the first device, wrote over what the record before it says,
/// and was cut off before its own: with one block of the first device there was nothing left that a mount could start from.
#[test]
fn a_record_is_in_both_copies_before_what_the_one_before_it_says_is_written_over() {
    let world = World::new(94, &[64, 64]);
    let (slot, nids) = half_a_record(&world);
    let copy = |slot: usize, copy: usize| world.array().read_slot(slot, copy).unwrap();
    let place = |slot: usize, copy: usize| slot_places()[slot][copy];
    let [first, second] = &world.devices[..] else {
        unreachable!()
    };

    // Cut off before its record.
    let olds = [0, 1].map(|c| copy(1 - slot, c));
    world.open().map(drop).unwrap();
    first.poke(place(1 - slot, 0), &olds[0]);
    second.poke(place(1 - slot, 1), &olds[1]);

    let block = place(slot, 0)..place(slot, 0) + format::BLOCK_SIZE as u64;
    first.fail_reads(Times::Always, Some(block));
    let store = world.open().unwrap();
    whole(&store, &nids);
    store.close().unwrap();
    first.heal();
    world.check("with the copy on the second device");
}

/// The next mount was not returned the record, went on from the one before it, wrote over what the newer one says, and was cut off
/// before its own. Then the newer one was returned, and named what was no longer there.
#[test]
fn a_record_that_a_mount_was_not_returned_does_not_come_back() {
    let world = World::new(95, &[64, 64]);
    let (slot, nids) = half_a_record(&world);
    let start = slot_places()[slot][0];
    let (mut rng, mut done) = (Rng::new(95), [false; 2]);
    let repair = |array: &Arc<Array>| {
        let mut salvage = Salvage::<Numbers>::open(array, World::options()).ok()?;
        salvage.set_space(|_| Vec::new(), |_| false).ok()?;
        salvage.publish().ok()
    };
    for (repairs, cut) in (0..2_000).flat_map(|cut| [(false, cut), (true, cut)]) {
        let switch = PowerSwitch::new();
        let devices = world.devices.iter().map(|device| device.fork(&switch));
        let devices: Vec<_> = devices.collect();
        let mut fork = World { switch, devices };
        fork.devices[0].fail_reads(Times::Always, Some(start..start + 4096));
        let array = Arc::new(fork.array());
        fork.switch.cut_after(cut);
        let ends = match repairs {
            false => TestStore::open(array, World::options()).is_ok(),
            true => repair(&array).is_some(),
        };
        assert!(ends || fork.switch.is_cut(), "cut after {cut}");
        fork.switch.cut_now();
        fork.restart(&mut rng);
        let store = fork.open();
        let store = store.unwrap_or_else(|error| panic!("{repairs}, cut after {cut}: {error}"));
        whole(&store, &nids);
        store.close().unwrap();
        fork.check(&format!("{repairs}, cut after {cut}"));
        done[usize::from(repairs)] |= ends;
        if done == [true; 2] {
            assert!(cut > 10, "{cut}");
            return;
        }
    }
    panic!("no end");
}

//! The store loses power at random moments and must come back with everything it promised.

use crate::world::{Change, Numbers, TestStore, World, create, delete};
use base::rng::Rng;
use device::{AlignedBuf, Durability};
use engine::{Epoch, Error, Extent, Need, NewData, Op, Reservation, Slot, StoreOptions};
use format::table::REGION_NIDS;
use format::{Block, Nid};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a node must look like after each change, with the epoch of the change.
#[derive(Clone, Default)]
struct History(Vec<(Epoch, Option<Vec<u64>>)>);

/// What the oracle knows: nodes, and the blocks that each version of node 1's list names.
#[derive(Default)]
struct Oracle {
    nodes: BTreeMap<Nid, History>,
    durable: Epoch,
}

impl Oracle {
    fn record(&mut self, nid: Nid, epoch: Epoch, state: Option<Vec<u64>>) {
        self.nodes.entry(nid).or_default().0.push((epoch, state));
    }

    fn now(&self, nid: Nid) -> Option<&Vec<u64>> {
        self.nodes.get(&nid)?.0.last()?.1.as_ref()
    }

    fn living(&self) -> Vec<Nid> {
        self.nodes
            .keys()
            .copied()
            .filter(|n| self.now(*n).is_some())
            .collect()
    }

    /// Every node must be in one of its states, no older than what is durable; and all nodes
    /// must agree on one epoch up to which everything is there.
    fn check_and_settle(&mut self, store: &TestStore, seed: u64) {
        let mut earliest_end = u64::MAX;
        let mut latest_begin = self.durable.0;
        for (nid, history) in &mut self.nodes {
            let found = match store.get(*nid).and_then(|node| Ok(node.read()?.0.clone())) {
                Ok(numbers) => {
                    check_blocks(store, &numbers, seed);
                    Some(numbers)
                }
                Err(Error::Gone(_)) => None,
                Err(error) => panic!("seed {seed}: node {nid}: {error}"),
            };
            let states = &history.0;
            let durable = states.iter().rposition(|(e, _)| *e <= self.durable);
            let oldest = durable.unwrap_or(0);
            let matches = |i: &usize| states[*i].1 == found;
            let Some(at) = (oldest..states.len()).rev().find(matches) else {
                assert!(
                    durable.is_none() && found.is_none(),
                    "seed {seed}: node {nid} is {found:?}; durable epoch {:?}; known {states:?}",
                    self.durable
                );
                earliest_end = earliest_end.min(states[0].0.0);
                history.0.clear();
                continue;
            };
            latest_begin = latest_begin.max(states[at].0.0);
            // Equal states may recur; only a state that never comes back bounds the end.
            if let Some(next) = states.get(at + 1) {
                earliest_end = earliest_end.min(next.0.0);
            }
            history.0 = vec![(Epoch(0), found)];
        }
        assert!(
            latest_begin <= earliest_end,
            "seed {seed}: something of epoch {latest_begin} is there, something of {earliest_end} is not"
        );
        self.nodes
            .retain(|_, h| h.0.last().is_some_and(|(_, s)| s.is_some()));
    }
}

fn is_power(error: &Error) -> bool {
    matches!(
        error,
        Error::Device(_) | Error::Failed(_) | Error::Unread(_)
    )
}

/// First number of a node that names blocks: mark, block, length, stamp in every block.
const MARK: u64 = u64::MAX - 7;

/// Blocks, and what a node says of them.
struct Blocks<'s> {
    reservation: Reservation<'s, Numbers>,
    state: Vec<u64>,
    /// What is written with the record; else it was written before.
    new: Option<NewData>,
}

impl<'s> Blocks<'s> {
    fn take(self, op: &mut Op<'s, Numbers>, slot: Slot) -> Vec<u64> {
        op.take(self.reservation);
        if let Some(new) = self.new {
            op.vouch(slot, new);
        }
        self.state
    }
}

fn new_data(blocks: Extent, bytes: &[u8]) -> NewData {
    NewData::new(blocks, Arc::new(AlignedBuf::from_slice(bytes)), 0)
}

/// Reserves blocks and fills them with a stamp, at once or with the record.
fn write_blocks<'s>(store: &'s TestStore, rng: &mut Rng) -> Result<Blocks<'s>, Error> {
    let mut promise = store.promise(8)?;
    let reservation = store.reserve(&mut promise, rng.below(8) as u32 + 1, None)?;
    let Extent { block, len } = reservation.extent();
    let stamp = rng.next_u64() | 1;
    let bytes = stamp.to_le_bytes().repeat(len as usize * 512);
    let new = rng
        .one_in(2)
        .then(|| new_data(reservation.extent(), &bytes));
    if new.is_none() {
        let array = store.array();
        array.write(block.byte(), &bytes, Durability::Volatile)?;
    }
    Ok(Blocks {
        reservation,
        state: vec![MARK, block.0, len as u64, stamp],
        new,
    })
}

fn extent_of(numbers: &[u64]) -> Option<Extent> {
    match numbers {
        [MARK, block, len, _] => Some(Extent {
            block: Block(*block),
            len: *len as u32,
        }),
        _ => None,
    }
}

/// The blocks that a node names hold its stamp and nothing else.
pub fn check_blocks(store: &TestStore, numbers: &[u64], seed: u64) {
    let Some(extent) = extent_of(numbers) else {
        return;
    };
    let mut bytes = vec![0; extent.len as usize * 4096];
    store.array().read(extent.block.byte(), &mut bytes).unwrap();
    let stamp = numbers[3].to_le_bytes();
    assert!(
        bytes.chunks(8).all(|c| c == stamp),
        "seed {seed}: blocks of {numbers:?} hold other bytes"
    );
}

/// An operation on a node that names blocks.
fn step_blocks(store: &TestStore, oracle: &mut Oracle, rng: &mut Rng) -> Result<(), Error> {
    let named: Vec<Nid> = oracle
        .living()
        .into_iter()
        .filter(|nid| oracle.now(*nid).is_some_and(|n| extent_of(n).is_some()))
        .collect();
    let choice = if named.is_empty() { 0 } else { rng.below(3) };
    if choice == 0 {
        let fresh = store.reserve_nid()?;
        let nid = fresh.nid();
        let blocks = write_blocks(store, rng)?;
        let mut op = store.begin(Need::Grow)?;
        let slot = op.create(fresh, Numbers(blocks.state.clone()));
        let state = blocks.take(&mut op, slot);
        oracle.record(nid, op.commit(), Some(state));
        return Ok(());
    }
    let nid = *rng.pick(&named);
    let node = store.get(nid)?;
    let fresh = (choice == 1)
        .then(|| write_blocks(store, rng))
        .transpose()?;
    let mut op = store.begin(Need::Reclaim)?;
    let slot = op.lock(&node)?;
    let old = extent_of(&op.peek(slot).0).expect("chosen for its blocks");
    op.free(old)?;
    let state = match fresh {
        Some(blocks) => {
            let state = blocks.take(&mut op, slot);
            for (i, number) in state.iter().enumerate() {
                op.apply(slot, Change::Set(i, *number));
            }
            Some(state)
        }
        None => {
            op.delete(slot);
            None
        }
    };
    oracle.record(nid, op.commit(), state);
    Ok(())
}

/// One random operation.
fn step(store: &TestStore, oracle: &mut Oracle, rng: &mut Rng) -> Result<(), Error> {
    let living = oracle.living();
    match rng.below(26) {
        0..=5 => {
            let fresh = store.reserve_nid()?;
            let nid = fresh.nid();
            let state = vec![rng.next_u64(); rng.below(40) as usize];
            let mut op = store.begin(Need::Grow)?;
            op.create(fresh, Numbers(state.clone()));
            let epoch = op.commit();
            oracle.record(nid, epoch, Some(state));
        }
        6..=11 if living.len() >= 2 => {
            // Two nodes change together or not at all.
            let (a, b) = (*rng.pick(&living), *rng.pick(&living));
            let nodes = [store.get(a)?, store.get(b)?];
            let mut op = store.begin(Need::Grow)?;
            let slots = op.lock_sorted(&[&nodes[0], &nodes[1]])?;
            let number = rng.next_u64();
            for slot in slots.iter() {
                let numbers = &op.peek(*slot).0;
                let len = numbers.len();
                let change = match len {
                    _ if numbers.first() == Some(&MARK) => Change::Set(0, MARK),
                    0..200 => Change::Push(number),
                    _ => Change::Set(rng.below(len as u64) as usize, number),
                };
                op.apply(*slot, change);
            }
            let states: Vec<Vec<u64>> = slots.iter().map(|s| op.peek(*s).0.clone()).collect();
            let epoch = op.commit();
            for (nid, state) in [a, b].into_iter().zip(states) {
                oracle.record(nid, epoch, Some(state));
            }
        }
        12..=14 if !living.is_empty() => {
            let nid = *rng.pick(&living);
            let node = store.get(nid)?;
            let mut op = store.begin(Need::Reclaim)?;
            let slot = op.lock(&node)?;
            if let Some(extent) = extent_of(&op.peek(slot).0) {
                op.free(extent)?;
            }
            op.delete(slot);
            let epoch = op.commit();
            oracle.record(nid, epoch, None);
        }
        15 | 16 => {
            let epoch = store.epoch();
            store.commit_through(epoch)?;
            oracle.durable = epoch;
        }
        17 => {
            store.sync()?;
            oracle.durable = Epoch(store.epoch().0 - 1);
        }
        18 if rng.one_in(3) => store.checkpoint()?,
        _ => step_blocks(store, oracle, rng)?,
    }
    Ok(())
}

/// Leaves little free space, so that freed blocks are wanted again at once.
fn take_most_space(world: &World) {
    let store = world.open().unwrap();
    while store.space().free_blocks > 600 {
        let mut promise = store.promise(256).unwrap();
        let reservation = store.reserve(&mut promise, 256, None).unwrap();
        let mut op = store.begin(Need::Reclaim).unwrap();
        op.take(reservation);
        op.commit();
    }
    store.close().unwrap();
}

fn run(seed: u64) {
    let mut rng = Rng::new(seed);
    let layouts: [&[u64]; 3] = [&[64], &[40, 40], &[30, 20, 40]];
    let sizes = *rng.pick(&layouts);
    let mut world = World::new(seed, sizes);
    let mut oracle = Oracle::default();
    if rng.one_in(2) {
        take_most_space(&world);
    }
    for _ in 0..6 {
        // The cut may hit recovery as well.
        world.switch.cut_after(rng.below(400));
        let mut opened = world.open();
        while opened.as_ref().is_err_and(is_power) && world.switch.is_cut() {
            world.restart(&mut rng);
            world.switch.cut_after(rng.below(400) + 20);
            opened = world.open();
        }
        let store = opened.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        world.switch.cut_after(u64::MAX);
        oracle.check_and_settle(&store, seed);
        let nodes = world.check(&format!("seed {seed}, after recovery"));
        assert_eq!(
            oracle.living(),
            nodes.keys().copied().collect::<Vec<_>>(),
            "seed {seed}"
        );
        world.switch.cut_after(rng.below(600));
        oracle.durable = Epoch(store.epoch().0 - 1);
        for history in oracle.nodes.values_mut() {
            history.0[0].0 = oracle.durable;
        }
        let steps = rng.range(1, 400);
        for _ in 0..steps {
            match step(&store, &mut oracle, &mut rng) {
                Ok(()) => {}
                Err(error) if is_power(&error) && world.switch.is_cut() => break,
                Err(Error::NoSpace) => store.sync().unwrap_or_default(),
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        if rng.one_in(4) && !world.switch.is_cut() {
            match store.close() {
                Ok(()) => oracle.durable = Epoch(u64::MAX - 1),
                Err(error) => assert!(is_power(&error), "seed {seed}: {error}"),
            }
        }
        drop(store);
        world.switch.cut_now();
        world.restart(&mut rng);
        world.check(&format!("seed {seed}"));
    }
}

/// `SHEAF_SEEDS=100-200` runs other seeds, `SHEAF_SEEDS=7` that one.
fn seeds() -> std::ops::RangeInclusive<u64> {
    let range = std::env::var("SHEAF_SEEDS").unwrap_or("0-149".into());
    let (first, last) = range.split_once('-').unwrap_or((&range, &range));
    let number = |text: &str| text.parse().expect("SHEAF_SEEDS is no range of numbers");
    let (first, last) = (number(first), number(last));
    assert!(first <= last, "SHEAF_SEEDS has no seed in it");
    first..=last
}

#[test]
fn what_was_synced_survives_power_cuts() {
    for seed in seeds() {
        run(seed);
    }
}

#[test]
fn blocks_are_never_in_two_hands_and_never_lost() {
    let mut rng = Rng::new(3);
    let mut world = World::new(3, &[40, 40]);
    let mut held: Vec<Extent> = Vec::new();
    for round in 0..5 {
        let store = world.open().unwrap();
        let total = store.space().free_blocks + held.iter().map(|e| e.len as u64).sum::<u64>();
        for _ in 0..300 {
            if rng.one_in(3) && !held.is_empty() {
                let extent = held.swap_remove(rng.below(held.len() as u64) as usize);
                let mut op = store.begin(Need::Reclaim).unwrap();
                op.free(extent).unwrap();
                op.commit();
            } else {
                // There is always room for these.
                let mut promise = store.promise(40).unwrap();
                let reservation = store.reserve(&mut promise, 40, None).unwrap();
                let overlaps = |e: &Extent| {
                    let new = reservation.extent();
                    e.block.0 < new.block.0 + new.len as u64
                        && new.block.0 < e.block.0 + e.len as u64
                };
                assert!(!held.iter().any(overlaps));
                let bytes = vec![round; reservation.extent().len as usize * 4096];
                let at = reservation.extent().block.byte();
                store
                    .array()
                    .write(at, &bytes, Durability::Volatile)
                    .unwrap();
                if rng.one_in(4) {
                    continue;
                }
                let mut op = store.begin(Need::Grow).unwrap();
                held.push(op.take(reservation));
                op.commit();
            }
            if rng.one_in(50) {
                store.checkpoint().unwrap();
            }
        }
        store.sync().unwrap();
        let now = store.space().free_blocks + held.iter().map(|e| e.len as u64).sum::<u64>();
        assert!(
            now.abs_diff(total) <= 3 * 256,
            "{now} of {total} blocks are accounted for"
        );
        if rng.one_in(2) {
            store.close().unwrap();
        }
        drop(store);
        world.switch.cut_now();
        world.restart(&mut rng);
        world.check(&format!("round {round}"));
    }
}

#[test]
fn a_ring_that_wraps_many_times_keeps_everything() {
    let mut world = World::new(5, &[64]);
    let mut rng = Rng::new(5);
    let store = world.open().unwrap();
    let fresh = store.reserve_nid().unwrap();
    let nid = fresh.nid();
    let mut op = store.begin(Need::Grow).unwrap();
    op.create(fresh, Numbers(vec![0; 1000]));
    op.commit();
    for i in 0..40_000u64 {
        let node = store.get(nid).unwrap();
        let mut op = store.begin(Need::Grow).unwrap();
        let slot = op.lock(&node).unwrap();
        op.apply(slot, Change::Set(i as usize % 1000, i));
        op.commit();
        if i % 7 == 0 {
            store.sync().unwrap();
        }
    }
    store.sync().unwrap();
    drop(store);
    world.switch.cut_now();
    world.restart(&mut rng);
    let store = world.open().unwrap();
    let node = store.get(nid).unwrap();
    assert_eq!(node.read().unwrap().0[999], 39_999);
}

/// The data of a few synced blocks, and the record that names them, take one flush, which comes last; so does nothing that was
/// synced go with a cut, whatever of the rest does.
#[test]
fn vouched_data_and_its_batch_share_a_flush() {
    let mut rng = Rng::new(44);
    for seed in 0..40 {
        let mut world = World::new(500 + seed, &[64, 64]);
        let store = world.open().unwrap();
        let mut oracle = Oracle::default();
        let requests = || {
            let stats = store.array().stats();
            let sum =
                |of: fn(&device::DeviceStats) -> u64| stats.devices.iter().map(of).sum::<u64>();
            (sum(|d| d.durable_writes), sum(|d| d.flushes))
        };
        create(&store, vec![1]).unwrap();
        store.sync().unwrap();
        for synced in [true, true, false] {
            let blocks = loop {
                let blocks = write_blocks(&store, &mut rng).unwrap();
                if blocks.new.is_some() {
                    break blocks;
                }
                store.flush().unwrap();
            };
            let (fresh, before) = (store.reserve_nid().unwrap(), requests());
            let nid = fresh.nid();
            let mut op = store.begin(Need::Grow).unwrap();
            let slot = op.create(fresh, Numbers(blocks.state.clone()));
            let state = blocks.take(&mut op, slot);
            let epoch = op.commit();
            oracle.record(nid, epoch, Some(state));
            if synced {
                store.commit_through(epoch).unwrap();
                oracle.durable = epoch;
                let after = requests();
                assert_eq!(after.0, before.0, "no durable write");
                // Of the device with the batch, and of those with data.
                assert!(
                    (1..=2).contains(&(after.1 - before.1)),
                    "{before:?} {after:?}"
                );
            } else {
                // The batch may be on the device, and the data not.
                world.switch.cut_after(rng.below(4));
                _ = store.commit_through(epoch);
            }
        }
        drop(store);
        world.switch.cut_now();
        world.restart(&mut rng);
        let store = world.open().unwrap();
        oracle.check_and_settle(&store, seed);
    }
}

/// A node that names blocks for which its record vouches, while all else is flushed.
pub fn create_vouched(store: &TestStore, rng: &mut Rng) -> (Nid, Extent, Epoch) {
    let blocks = loop {
        let blocks = write_blocks(store, rng).unwrap();
        if blocks.new.is_some() {
            break blocks;
        }
    };
    store.flush().unwrap();
    let fresh = store.reserve_nid().unwrap();
    let nid = fresh.nid();
    let mut op = store.begin(Need::Grow).unwrap();
    let slot = op.create(fresh, Numbers(blocks.state.clone()));
    let extent = extent_of(&blocks.take(&mut op, slot)).unwrap();
    (nid, extent, op.commit())
}

/// Blocks for which a batch vouches are written in place, and are freed and given out again: before either a
/// batch says that the other was durable, so that recovery does not look for what they held.
#[test]
fn vouched_blocks_change_only_when_nobody_looks_for_what_they_held() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(600 + seed, &[64]);
        let store = world.open().unwrap();
        let (nid, extent, epoch) = create_vouched(&store, &mut rng);
        assert_eq!(store.vouched(), [extent]);
        store.commit_through(epoch).unwrap();
        assert_eq!(
            store.vouched(),
            [extent],
            "nothing says yet that it was durable"
        );
        let batches = || store.counters().batches.count;
        let before = batches();
        store
            .confirm(Extent {
                block: Block(extent.block.0 + 100),
                len: 4,
            })
            .unwrap();
        assert_eq!(batches(), before, "these are not vouched for");
        if seed % 2 == 0 {
            store.confirm(extent).unwrap();
            assert_eq!(batches(), before + 1);
            let bytes = vec![3; extent.len as usize * 4096];
            store
                .array()
                .write(extent.block.byte(), &bytes, Durability::Volatile)
                .unwrap();
        } else {
            let mut op = store.begin(Need::Reclaim).unwrap();
            let slot = op.lock(&store.get(nid).unwrap()).unwrap();
            op.free(extent).unwrap();
            op.delete(slot);
            store.commit_through(op.commit()).unwrap();
        }
        assert_eq!(store.vouched(), []);
        drop(store);
        world.switch.cut_now();
        world.restart(&mut rng);
        let store = world.open().unwrap();
        let found = store.get(nid).and_then(|node| Ok(node.read()?.0.clone()));
        assert_eq!(found.is_ok(), seed % 2 == 0, "seed {seed}");
    }
}

/// Blocks are vouched for and freed in one batch: until another one says that it was durable they are nobody's, as recovery
/// would look for what they held; then they are given out.
#[test]
fn what_was_vouched_for_and_freed_is_given_out_when_nobody_looks_for_it() {
    let mut rng = Rng::new(7);
    let world = World::new(700, &[64]);
    let store = world.open().unwrap();
    let (nid, extent, _) = create_vouched(&store, &mut rng);
    let mut op = store.begin(Need::Reclaim).unwrap();
    let slot = op.lock(&store.get(nid).unwrap()).unwrap();
    op.free(extent).unwrap();
    op.delete(slot);
    store.commit_through(op.commit()).unwrap();
    assert_eq!(store.vouched(), [extent]);
    let given = || {
        let mut promise = store.promise(1).unwrap();
        let reserved = store.reserve(&mut promise, 1, Some(extent.block));
        reserved.unwrap().extent().block
    };
    assert_ne!(given(), extent.block);
    store.confirm(extent).unwrap();
    store.sync().unwrap();
    assert_eq!(given(), extent.block);
}

/// Blocks are freed in an epoch that is open, and an older one is made durable: a crash would bring back who had them.
#[test]
fn what_is_freed_is_given_out_when_that_is_durable() {
    let world = World::new(701, &[64]);
    let store = world.open().unwrap();
    let given = || {
        let mut promise = store.promise(4).unwrap();
        let mut op = store.begin(Need::Reclaim).unwrap();
        let blocks = store.reserve(&mut promise, 4, None).unwrap();
        let extent = op.take(blocks);
        (extent, op.commit())
    };
    let (extent, epoch) = given();
    store.commit_through(epoch).unwrap();
    let mut op = store.begin(Need::Reclaim).unwrap();
    op.free(extent).unwrap();
    let freed = op.commit();
    assert!(freed > epoch);
    store.commit_through(epoch).unwrap();
    let next = || {
        let mut promise = store.promise(4).unwrap();
        let reserved = store.reserve(&mut promise, 4, Some(extent.block));
        reserved.unwrap().extent().block
    };
    assert_ne!(next(), extent.block);
    store.commit_through(freed).unwrap();
    assert_eq!(next(), extent.block);
}

/// A node in a long record that vouches for a block, in a batch of its own.
fn create_long_vouched(store: &TestStore, number: u64) -> (Nid, Extent) {
    let mut promise = store.promise(1).unwrap();
    let reservation = store.reserve(&mut promise, 1, None).unwrap();
    let blocks = reservation.extent();
    let bytes = number.to_le_bytes().repeat(512);
    let fresh = store.reserve_nid().unwrap();
    let nid = fresh.nid();
    let mut op = store.begin(Need::Grow).unwrap();
    let slot = op.create(fresh, Numbers(vec![number; 1900]));
    op.take(reservation);
    op.vouch(slot, new_data(blocks, &bytes));
    store.commit_through(op.commit()).unwrap();
    (nid, blocks)
}

/// The last batch that fits in the ring vouches for data, and no operation gets room for another: a checkpoint says that it was durable,
/// or recovery does, for which there is always room.
#[test]
fn the_last_batch_of_a_full_ring_is_confirmed() {
    let options = || StoreOptions {
        node_cache_bytes: 64 << 20,
        dirty_bytes: Some(16 << 20),
        ..World::options()
    };
    let fill = |rounds: Option<u64>| {
        let world = World::new(710, &[64]);
        let store = world.open_with(options()).unwrap();
        let checkpoint = store.newest_checkpoint();
        let mut last = None;
        let mut round = 0;
        while rounds != Some(round) && store.newest_checkpoint() == checkpoint {
            last = Some(create_long_vouched(&store, round));
            round += 1;
        }
        (world, store, last.unwrap(), round)
    };
    // The last one needed a checkpoint.
    let (.., rounds) = fill(None);
    for crash in [true, false] {
        let (mut world, store, (nid, blocks), _) = fill(Some(rounds - 1));
        assert_eq!(store.vouched(), [blocks]);
        let checkpoint = store.newest_checkpoint();
        let mut number = rounds - 2;
        if !crash {
            store.confirm(blocks).unwrap();
            assert_eq!(store.newest_checkpoint(), checkpoint + 1);
            assert_eq!(store.vouched(), []);
            number = 1 << 40;
            let bytes = number.to_le_bytes().repeat(512);
            let array = store.array();
            array
                .write(blocks.block.byte(), &bytes, Durability::Durable)
                .unwrap();
        }
        drop(store);
        world.switch.cut_now();
        world.restart(&mut Rng::new(crash as u64));
        let store = world.open_with(options()).unwrap();
        let expected = vec![rounds - 2; 1900];
        assert_eq!(store.get(nid).unwrap().into_read().unwrap().0, expected);
        let mut bytes = vec![0; 4096];
        store.array().read(blocks.block.byte(), &mut bytes).unwrap();
        assert_eq!(bytes, number.to_le_bytes().repeat(512));
    }
}

/// Each mount reserves nids it does not use, on every shard, and ends without notice.
#[test]
fn nids_that_a_crash_found_reserved_are_free_again_and_keep_their_versions() {
    let mut world = World::new(41, &[64]);
    let mut rng = Rng::new(41);
    let mut last: BTreeMap<Nid, u64> = BTreeMap::new();
    let mut live = Vec::new();
    for mount in 0..20 {
        let options = StoreOptions {
            shards: 8,
            ..World::options()
        };
        let store = world.open_with(options).unwrap();
        if mount == 0 {
            // A whole region and more; half of it goes again.
            live = (0..20_000)
                .map(|i| create(&store, vec![i]).unwrap())
                .collect();
            for nid in live.split_off(10_000) {
                delete(&store, nid).unwrap();
            }
            store.checkpoint().unwrap();
        }
        let reserved: Vec<_> = (0..2000).map(|_| store.reserve_nid().unwrap()).collect();
        for fresh in reserved.into_iter().step_by(2) {
            let (nid, version) = (fresh.nid(), fresh.version());
            assert!(last.insert(nid, version).is_none_or(|last| last < version));
            let mut op = store.begin(Need::Grow).unwrap();
            op.create(fresh, Numbers(vec![mount]));
            op.commit();
            live.push(nid);
        }
        for _ in 0..1000 {
            let at = rng.below(live.len() as u64) as usize;
            delete(&store, live.swap_remove(at)).unwrap();
        }
        store.sync().unwrap();
        // A reservation outlives its store only in memory that is lost.
        let held: Vec<_> = (0..500).map(|_| store.reserve_nid().unwrap()).collect();
        world.switch.cut_now();
        held.into_iter().for_each(std::mem::forget);
        drop(store);
        world.restart(&mut rng);
    }
    assert_eq!(world.check("after the end").len(), live.len());
    // Every mount left 2,500 behind, of a bit more than two regions.
    let most = live.iter().max().unwrap().0 / REGION_NIDS;
    assert!(most <= 2, "region {most} is in use");
}

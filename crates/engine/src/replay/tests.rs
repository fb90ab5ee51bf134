//! Replay against what it shall come to: all changes of a node, sorted, one by one ([`Store::replayed_node`]).

use super::*;
use crate::batches::Batch;
use crate::node::Body;
use crate::store::StoreOptions;
use crate::testing::options;
use base::rng::Rng;
use base::sync::{Mutex, rank};
use device::sim::SimDevice;
use device::{Array, BlockDevice};
use format::geometry::{Geometry, GeometryOptions};
use format::item::PAYLOAD_MAX;
use format::journal::{Action, RECORD_HEAD_MAX, put_entry, seal_record};
use format::table::FIRST_FS_KIND;
use format::{Damage, Nid};
use std::collections::BTreeSet;

type TestStore = Store<Trail>;

/// All bytes that a node was given, but those that were merged in any order until they are settled.
struct Trail {
    bytes: Vec<u8>,
    pending: Mutex<Vec<u8>>,
}

impl Clone for Trail {
    fn clone(&self) -> Trail {
        Trail {
            bytes: self.bytes.clone(),
            pending: Mutex::new(rank::LEAF, self.pending.lock().clone()),
        }
    }
}

impl Content for Trail {
    type Delta = Vec<u8>;

    fn kind(&self) -> u8 {
        FIRST_FS_KIND
    }
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes);
    }
    fn decode(_: u8, body: &[u8]) -> Result<Self, Damage> {
        Ok(Trail {
            bytes: body.to_vec(),
            pending: Mutex::new(rank::TALLY, Vec::new()),
        })
    }
    fn apply(&mut self, delta: &Vec<u8>) -> Result<(), Damage> {
        assert!(!self.pending(), "what is pending is settled first");
        self.bytes.extend_from_slice(delta);
        Ok(())
    }
    fn encode_delta(delta: &Vec<u8>, out: &mut Vec<u8>) {
        out.extend_from_slice(delta);
    }
    fn decode_delta(_: u8, bytes: &[u8]) -> Result<Vec<u8>, Damage> {
        Ok(bytes.to_vec())
    }
    fn merges(&self) -> bool {
        true
    }
    fn merge_again(&mut self, _: u8, delta: &[u8]) -> Result<(), Damage> {
        self.pending.get_mut().extend_from_slice(delta);
        Ok(())
    }
    fn pending(&self) -> bool {
        !self.pending.lock().is_empty()
    }
    fn settle(&mut self) {
        let pending = self.pending.get_mut();
        pending.sort_unstable();
        self.bytes.append(pending);
    }
    fn owned(_: u8) -> bool {
        false
    }
    fn memory(&self) -> usize {
        self.bytes.len()
    }
    fn image_len(&self) -> usize {
        self.bytes.len()
    }
}

/// A change that was logged.
#[derive(Clone, Debug)]
struct Made {
    nid: u64,
    version: u64,
    action: Action,
    bytes: Vec<u8>,
}

impl Made {
    fn change(&self) -> Change<'_> {
        Change {
            version: self.version,
            action: self.action,
            kind: FIRST_FS_KIND,
            body: &self.bytes,
        }
    }
}

/// A node while the log is made.
#[derive(Clone, Copy, Default)]
struct Now {
    version: u64,
    exists: bool,
    pending: bool,
}

/// Epochs of changes of some nodes by some cores, as batches have them.
fn log(rng: &mut Rng, nids: &[u64]) -> Vec<Vec<Made>> {
    let mut nodes = vec![Now::default(); nids.len()];
    let cores = 1 + rng.below(3) as usize;
    let deletes = 1 + rng.below(8);
    let mut kept: Vec<Made> = Vec::new();
    let mut epochs = Vec::new();
    for _ in 0..1 + rng.below(12) {
        let mut staged = vec![Vec::new(); cores];
        for _ in 0..rng.below(60) {
            let i = rng.below(nids.len() as u64) as usize;
            let node = &mut nodes[i];
            let action = match rng.below(16) {
                _ if !node.exists => Action::Create,
                n if n < deletes => Action::Delete,
                9..12 => Action::Apply,
                12 if node.pending => Action::Fold,
                _ => Action::Merge,
            };
            node.version += u64::from(action != Action::Merge);
            node.exists = action != Action::Delete;
            node.pending = action == Action::Merge;
            let len = match action {
                Action::Delete | Action::Fold => 0,
                _ => 1 + rng.below(6),
            };
            staged[rng.below(cores as u64) as usize].push(Made {
                nid: nids[i],
                version: node.version,
                action,
                bytes: (0..len).map(|_| rng.next_u64() as u8).collect(),
            });
        }
        let mut batch = std::mem::take(&mut kept);
        batch.extend(staged.concat());
        // Staging keeps folds until something else comes.
        match batch.iter().all(|made| made.action == Action::Fold) {
            true => kept = batch,
            false => epochs.push(batch),
        }
    }
    epochs
}

/// A batch's records, of one or more changes each.
fn records(rng: &mut Rng, batch: &[Made]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = batch;
    while !rest.is_empty() {
        let (some, later) = rest.split_at((1 + rng.below(4) as usize).min(rest.len()));
        let mut record = vec![0; RECORD_HEAD_MAX];
        for made in some {
            let put = |out: &mut Vec<u8>| out.extend_from_slice(&made.bytes);
            let (kind, action) = (FIRST_FS_KIND, made.action);
            put_entry(&mut record, made.nid, made.version, action, kind, put);
        }
        out.extend_from_slice(seal_record(&mut record));
        rest = later;
    }
    out
}

/// An empty store, and later one with the images that a checkpoint made of the log so far, which is any version of
/// each node.
fn store(rng: &mut Rng, log: &[Made], nids: &[u64]) -> std::sync::Arc<TestStore> {
    store_on(&SimDevice::new(64 << 20, 1), rng, log, nids)
}

fn store_on(
    device: &std::sync::Arc<SimDevice>,
    rng: &mut Rng,
    log: &[Made],
    nids: &[u64],
) -> std::sync::Arc<TestStore> {
    let device = std::sync::Arc::clone(device) as std::sync::Arc<dyn BlockDevice>;
    let geometry = Geometry::plan(&[64 << 20], GeometryOptions::default()).unwrap();
    let array = Array::create(vec![device], geometry, "test", [7; 16], [9; 16]).unwrap();
    let array = std::sync::Arc::new(array);
    let options = || StoreOptions {
        workers: 2,
        shards: 2,
        ..options()
    };
    TestStore::format(&array, options()).unwrap();
    array.write_labels().unwrap();
    let (store, _) = TestStore::open(std::sync::Arc::clone(&array), options()).unwrap();
    for nid in nids {
        let of_node = log.iter().filter(|made| made.nid == *nid);
        let newest = of_node.clone().map(|made| made.version).max().unwrap_or(0);
        let image = match rng.below(2) {
            0 => 0,
            _ => rng.below(newest + 1),
        };
        // Merges into the image's own version are not in it.
        let has = |made: &&Made| made.change().is_in(image);
        let changes = of_node.filter(has).map(Made::change).collect();
        let Some((version, mut body)) = store.replayed_node(Nid(*nid), changes).unwrap() else {
            continue;
        };
        assert_eq!(version, image);
        body.settle();
        store.add_replayed(0, Nid(*nid), version, body);
    }
    store.make_checkpoint(false).unwrap();
    store.close().unwrap();
    // Else opening may clean segments, and has nodes in memory for that.
    let read_only = StoreOptions {
        read_only: true,
        ..options()
    };
    let (store, report) = TestStore::open(array, read_only).unwrap();
    assert_eq!((report.clean, report.deltas), (true, 0));
    assert!(nids.iter().all(|nid| store.nodes.get(Nid(*nid)).is_none()));
    store
}

/// What became of a node: its version and image, which is none if it is gone. `None`: nothing, as the table has it all.
type Outcome = Result<Option<(u64, Option<Vec<u8>>)>, ()>;

fn outcome(version: u64, body: &Body<Trail>) -> (u64, Option<Vec<u8>>) {
    let Body::User(_) = body else {
        return (version, None);
    };
    let mut image = Vec::new();
    body.encode(&mut image);
    (version, Some(image))
}

fn expected(store: &TestStore, log: &[Made], nid: u64) -> Outcome {
    let changes = log.iter().filter(|made| made.nid == nid).map(Made::change);
    match store.replayed_node(Nid(nid), changes.collect()) {
        Ok(None) => Ok(None),
        Ok(Some((version, mut body))) => {
            body.settle();
            Ok(Some(outcome(version, &body)))
        }
        Err(Error::Damaged(_) | Error::DamagedNode { .. }) => Err(()),
        Err(error) => panic!("{error}"),
    }
}

/// A batch with these records, wherever it may lie.
fn found(records: &[u8]) -> Found {
    let at = crate::journal::Anchor {
        position: 0,
        sequence: 0,
        previous_crc: 0,
    };
    Found {
        batch: Batch {
            header: BatchHeader::zeroed(),
            records: records.to_vec().into(),
        },
        at,
        after: at,
    }
}

impl<C: Content> Replay<'_, C> {
    /// Reads and links a section.
    fn take(&mut self, batches: &[Vec<u8>]) {
        let found = batches.iter().map(|batch| found(batch)).collect();
        let mut section = self.section(found, true);
        self.step(None, Some(&mut section), None);
        self.read.push_back(section);
        let section = self.next_to_link(1).unwrap();
        self.step(None, None, Some(&section));
        self.linked(section);
    }
}

/// Replays batches in sections of any size, with any memory.
fn replay(rng: &mut Rng, store: &TestStore, batches: &[Vec<u8>]) -> (Damages, RecoveryReport) {
    let mut report = RecoveryReport::default();
    let mut replay = Replay::new(store, 1 + rng.below(60_000) as usize, &mut report);
    let mut rest = batches;
    while !rest.is_empty() {
        let (section, later) = rest.split_at((1 + rng.below(4) as usize).min(rest.len()));
        replay.take(section);
        rest = later;
    }
    replay.finish(0).unwrap();
    let mut damages = replay.damages;
    store.adopt_replayed(&mut damages, &mut report).unwrap();
    (damages, report)
}

fn replayed(store: &TestStore, damages: &Damages, nid: u64) -> Outcome {
    if damages.contains_key(&nid) {
        return Err(());
    }
    Ok(store.nodes.get(Nid(nid)).map(|cell| {
        let state = cell.read();
        assert!(cell.header.dirty.load(base::atomic::Ordering::Acquire));
        outcome(state.version, &state.body)
    }))
}

/// Some are neighbours, some lie far apart.
fn nids(rng: &mut Rng) -> Vec<u64> {
    let count = 1 + rng.below(24);
    let any = |_| match rng.below(3) {
        0 => 100 + rng.below(400),
        1 => 100 + rng.below(1 << 20),
        _ => 200 + rng.below(8),
    };
    let nids: BTreeSet<u64> = (0..count).map(any).collect();
    nids.into_iter().collect()
}

#[test]
fn nodes_become_what_their_changes_one_by_one_make_of_them() {
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let nids = nids(&mut rng);
        let epochs = log(&mut rng, &nids);
        let log = epochs.concat();
        let store = store(&mut rng, &log, &nids);
        let expected: Vec<Outcome> = nids.iter().map(|n| expected(&store, &log, *n)).collect();
        let batches: Vec<Vec<u8>> = epochs.iter().map(|e| records(&mut rng, e)).collect();
        let (damages, report) = replay(&mut rng, &store, &batches);
        assert!(damages.is_empty(), "seed {seed}: {damages:?}");
        let found: Vec<Outcome> = nids
            .iter()
            .map(|n| replayed(&store, &damages, *n))
            .collect();
        assert_eq!(found, expected, "seed {seed}");
        let changed = found.iter().filter(|one| matches!(one, Ok(Some(_))));
        assert_eq!(report.nodes, changed.count() as u64);
        assert_eq!(report.deltas, log.len() as u64);
        // Nobody gets the nid of a node that exists; and whoever gets that of one that is gone begins beyond its version.
        let mut free = BTreeSet::new();
        while free.len() < 2000 {
            let fresh = store.reserve_nid().unwrap();
            free.insert(fresh.nid().0);
            std::mem::forget(fresh);
        }
        for (nid, found) in nids.iter().zip(&found) {
            let Ok(Some((version, image))) = found else {
                continue;
            };
            assert!(image.is_none() || !free.contains(nid), "seed {seed}: {nid}");
            assert_eq!(store.last_version(Nid(*nid)).unwrap(), *version);
        }
    }
}

/// A change that is missing, comes twice, or does what it should not: the node is damaged, and no other is.
#[test]
fn a_chain_that_does_not_hold_is_damage_of_its_node_alone() {
    let mut broken = 0;
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        let nids = nids(&mut rng);
        let mut epochs = log(&mut rng, &nids);
        let store = store(&mut rng, &epochs.concat(), &nids);
        let Some(epoch) = epochs.iter_mut().filter(|epoch| !epoch.is_empty()).last() else {
            continue;
        };
        let i = rng.below(epoch.len() as u64) as usize;
        let nid = epoch[i].nid;
        match rng.below(4) {
            0 => drop(epoch.remove(i)),
            1 => epoch.push(epoch[i].clone()),
            2 => epoch[i].version += 1 + rng.below(3),
            _ => {
                epoch[i].action = [Action::Create, Action::Delete, Action::Merge, Action::Apply]
                    [rng.below(4) as usize]
            }
        }
        let log = epochs.concat();
        let expected: Vec<Outcome> = nids.iter().map(|n| expected(&store, &log, *n)).collect();
        let batches: Vec<Vec<u8>> = epochs.iter().map(|e| records(&mut rng, e)).collect();
        let (damages, _) = replay(&mut rng, &store, &batches);
        broken += usize::from(!damages.is_empty());
        for (other, expected) in nids.iter().zip(expected) {
            let found = replayed(&store, &damages, *other);
            // What the image has is not looked at one by one, and is looked at here.
            let stricter = *other == nid && found.is_err();
            assert!(
                found == expected || stricter,
                "seed {seed}, node {other}: {found:?}, not {expected:?}"
            );
        }
    }
    assert!(broken > 80, "{broken}");
}

/// The directory that several cores share is out of order in every section, and has all of a journal's merges.
#[test]
fn what_a_section_adds_is_sorted_once() {
    const SECTIONS: u64 = 50;
    let mut rng = Rng::new(1);
    let store = store(&mut rng, &[], &[]);
    let mut report = RecoveryReport::default();
    let mut replay = Replay::new(&store, 1 << 20, &mut report);
    let made = |version, action| Made {
        nid: 300,
        version,
        action,
        bytes: vec![version as u8],
    };
    let mut log = vec![made(1, Action::Create)];
    let mut sections = vec![log.clone()];
    for version in 2..SECTIONS + 2 {
        // The core that makes the version is gathered first.
        let merge = |version| made(version, Action::Merge);
        let section = [
            made(version, Action::Apply),
            merge(version),
            merge(version - 1),
        ];
        log.extend_from_slice(&section);
        sections.push(section.to_vec());
    }
    let expected = expected(&store, &log, 300);
    for section in &sections {
        replay.take(&[records(&mut rng, section)]);
    }
    let sorted: usize = replay.chains.iter().map(|chains| chains.sorted).sum();
    assert_eq!(sorted as u64, 3 * SECTIONS);
    replay.finish(0).unwrap();
    let mut damages = std::mem::take(&mut replay.damages);
    store.adopt_replayed(&mut damages, &mut report).unwrap();
    assert_eq!(replayed(&store, &damages, 300), expected);
}

/// Of what a chain deletes again nothing is decoded or read.
#[test]
fn a_node_that_ends_in_its_deletion_needs_no_image() {
    let nids = [300];
    let mut rng = Rng::new(1);
    let made = |version, action, bytes: &[u8]| Made {
        nid: 300,
        version,
        action,
        bytes: bytes.to_vec(),
    };
    let first = [made(1, Action::Create, &[1])];
    let store = loop {
        // With the image of version 1.
        let store = store(&mut rng, &first, &nids);
        if store.table.entry(Nid(300)).unwrap().version == 1 {
            break store;
        }
    };
    let place = store.table.entry(Nid(300)).unwrap().place;
    let block = place.byte / 4096 * 4096;
    store
        .array
        .write(block, &[0xEE; 4096], device::Durability::Volatile)
        .unwrap();
    let run = [
        vec![
            first[0].clone(),
            made(2, Action::Apply, &[2]),
            made(2, Action::Merge, &[3]),
        ],
        vec![made(3, Action::Fold, &[9]), made(4, Action::Delete, &[])],
    ];
    let batches: Vec<Vec<u8>> = run.iter().map(|epoch| records(&mut rng, epoch)).collect();
    let mut report = RecoveryReport::default();
    let mut replay = Replay::new(&store, 1 << 20, &mut report);
    replay.take(&batches);
    replay.finish(0).unwrap();
    let damages = std::mem::take(&mut replay.damages);
    assert!(damages.is_empty(), "{damages:?}");
    assert_eq!(replayed(&store, &damages, 300), Ok(Some((4, None))));
}

/// Memory that nodes take is not replay's any more: it once took as much as ever beside them.
#[test]
fn replay_has_the_room_that_nodes_leave() {
    const ALL: usize = 40 << 20;
    const BODY: usize = 10 << 10;
    let mut rng = Rng::new(1);
    let store = store(&mut rng, &[], &[]);
    let made = |nid, version, action, len| Made {
        nid,
        version,
        action,
        bytes: vec![1; len],
    };
    let mut report = RecoveryReport::default();
    let mut replay = Replay::new(&store, ALL, &mut report);
    // Every other node is deleted again, and leaves nothing.
    let mut sifted = Vec::new();
    let (mut before, mut last) = (0, 0);
    for nid in 300..9300 {
        let mut batch = vec![made(nid, 1, Action::Create, BODY)];
        if nid % 2 == 0 {
            batch.push(made(nid, 2, Action::Delete, 0));
        }
        replay.take(&[records(&mut rng, &batch)]);
        let links: usize = replay.chains.iter().map(Chains::bytes).sum();
        match replay.logs.batches.is_empty() {
            true => {
                assert_eq!(replay.bytes, 0);
                sifted.push((before, last));
                before = store.nodes.bytes();
            }
            false => last = replay.bytes + links,
        }
    }
    // Nodes, and what was read beside them, each time.
    let batch = 2 * BODY;
    for (nodes, read) in &sifted {
        let most = ALL.saturating_sub(*nodes).max(ALL / LEAST_PART) / SIFT_SHARE;
        let all = most - batch..most + batch;
        assert!(all.contains(read), "{read} beside {nodes}");
    }
    let part_full = |(nodes, _): &&(usize, usize)| (1..ALL - ALL / LEAST_PART).contains(nodes);
    assert!(sifted.iter().any(|one| part_full(&one)), "{sifted:?}");
    assert!(sifted.last().unwrap().0 > ALL, "{sifted:?}");
    replay.finish(0).unwrap();
    assert!(replay.damages.is_empty());
}

/// A device failed while chains were sifted, and what was left of them was applied from memory that was theirs no more.
#[test]
fn a_replay_that_failed_applies_nothing_more() {
    let made = |version, action| Made {
        nid: 300,
        version,
        action,
        bytes: vec![version as u8],
    };
    let mut rng = Rng::new(1);
    let (device, store) = loop {
        // With the image of version 1.
        let device = SimDevice::new(64 << 20, 1);
        let store = store_on(&device, &mut rng, &[made(1, Action::Create)], &[300]);
        if store.table.entry(Nid(300)).unwrap().version == 1 {
            break (device, store);
        }
    };
    device.fail_reads(device::sim::Times::Always, None);
    let mut report = RecoveryReport::default();
    let mut replay = Replay::new(&store, 1000, &mut report);
    replay.take(&[records(&mut rng, &[made(2, Action::Apply)])]);
    assert!(matches!(replay.failed, Some(Error::Device(_))));
    assert!(replay.finish(0).is_err());
    assert!(replay.damages.is_empty());
}

/// However many changes came before it, one that makes a node too large for an image is damage.
#[test]
fn a_node_that_outgrows_an_image_is_damaged() {
    let mut rng = Rng::new(1);
    let store = store(&mut rng, &[], &[]);
    let made = |nid, version, len| Made {
        nid,
        version,
        action: if version == 1 {
            Action::Create
        } else {
            Action::Apply
        },
        bytes: vec![1; len],
    };
    for (nid, more) in [(300, 1), (301, 0)] {
        let run: Vec<Made> = (1..=4).map(|v| made(nid, v, PAYLOAD_MAX / 4)).collect();
        let rest = made(nid, 5, PAYLOAD_MAX % 4 + more);
        let batches = [records(&mut rng, &run), records(&mut rng, &[rest])];
        let (damages, _) = replay(&mut rng, &store, &batches);
        assert_eq!(damages.contains_key(&nid), more > 0);
    }
}

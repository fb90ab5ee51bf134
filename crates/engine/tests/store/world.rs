//! A small world to break: simulated devices on one power switch, and a node content simple
//! enough to compare with a model.

use base::rng::Rng;
use base::sync::{Mutex, rank};
use device::sim::{PowerSwitch, SimDevice};
use device::{Array, BlockDevice};
use engine::{
    Content, Error, Extent, Finding, Findings, Need, Salvage, SalvageError, SpaceMap, Store,
    StoreOptions, Visitor,
};
use format::geometry::{Geometry, GeometryOptions};
use format::{Damage, Nid};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A node that is a list of numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbers(pub Vec<u64>);

pub enum Change {
    Push(u64),
    Set(usize, u64),
}

impl Content for Numbers {
    type Delta = Change;

    fn kind(&self) -> u8 {
        format::table::FIRST_FS_KIND
    }

    fn encode(&self, out: &mut Vec<u8>) {
        for number in &self.0 {
            out.extend_from_slice(&number.to_le_bytes());
        }
    }

    fn decode(_: u8, body: &[u8]) -> Result<Self, Damage> {
        if !body.len().is_multiple_of(8) {
            return Err(Damage::new("numbers", "odd size"));
        }
        let number = |c: &[u8]| u64::from_le_bytes(c.try_into().expect("chunks of 8"));
        Ok(Numbers(body.chunks_exact(8).map(number).collect()))
    }

    fn apply(&mut self, delta: &Change) -> Result<(), Damage> {
        match delta {
            Change::Push(number) => self.0.push(*number),
            Change::Set(index, number) => {
                let slot = self.0.get_mut(*index);
                *slot.ok_or_else(|| Damage::new("numbers", "no such index"))? = *number;
            }
        }
        Ok(())
    }

    fn encode_delta(delta: &Change, out: &mut Vec<u8>) {
        let (index, number) = match delta {
            Change::Push(number) => (u64::MAX, *number),
            Change::Set(index, number) => (*index as u64, *number),
        };
        out.extend_from_slice(&index.to_le_bytes());
        out.extend_from_slice(&number.to_le_bytes());
    }

    fn decode_delta(_: u8, bytes: &[u8]) -> Result<Change, Damage> {
        let Numbers(words) = Numbers::decode(0, bytes)?;
        match words[..] {
            [u64::MAX, number] => Ok(Change::Push(number)),
            [index, number] => Ok(Change::Set(index as usize, number)),
            _ => Err(Damage::new("numbers", "delta of the wrong size")),
        }
    }

    fn image_len(&self) -> usize {
        self.0.len() * 8
    }

    fn owned(_: u8) -> bool {
        false
    }

    fn memory(&self) -> usize {
        self.0.len() * 8
    }
}

pub type TestStore = Store<Numbers>;

/// Devices that lose power together.
pub struct World {
    pub switch: Arc<PowerSwitch>,
    pub devices: Vec<Arc<SimDevice>>,
}

impl World {
    /// A formatted array over devices of the given sizes in MiB.
    pub fn new(seed: u64, sizes: &[u64]) -> World {
        let bytes: Vec<u64> = sizes.iter().map(|mib| mib << 20).collect();
        let options = GeometryOptions {
            journal_align: Some(512),
            ..GeometryOptions::default()
        };
        let geometry = Geometry::plan(&bytes, options).unwrap();
        World::of(seed, &bytes, geometry)
    }

    /// A formatted array over devices of so many bytes, divided like this.
    pub fn of(seed: u64, bytes: &[u64], geometry: Geometry) -> World {
        let switch = PowerSwitch::new();
        let devices: Vec<Arc<SimDevice>> = (0..)
            .zip(bytes)
            .map(|(i, bytes)| SimDevice::on_switch(*bytes, seed ^ i, &switch))
            .collect();
        let world = World { switch, devices };
        let array = Array::create(world.handles(), geometry, "test", [7; 16], [9; 16]).unwrap();
        let array = Arc::new(array);
        TestStore::format(&array, World::options()).unwrap();
        array.write_labels().unwrap();
        world
    }

    fn handles(&self) -> Vec<Arc<dyn BlockDevice>> {
        self.devices
            .iter()
            .map(|d| Arc::clone(d) as Arc<dyn BlockDevice>)
            .collect()
    }

    pub fn options() -> StoreOptions {
        StoreOptions {
            background: false,
            workers: 2,
            shards: 2,
            node_cache_bytes: 64 << 10,
            dirty_bytes: Some(256 << 10),
            clock: base::clock::Clock::manual(1),
            ..StoreOptions::default()
        }
    }

    pub fn open(&self) -> Result<Arc<TestStore>, Error> {
        self.open_with(World::options())
    }

    pub fn open_with(&self, options: StoreOptions) -> Result<Arc<TestStore>, Error> {
        let array = Array::assemble(self.handles(), options.read_only)?;
        Store::open(Arc::new(array), options).map(|(store, _)| store)
    }

    /// What a repair begins with.
    pub fn salvage(&self) -> Result<Salvage<Numbers>, SalvageError> {
        Salvage::open(&Arc::new(self.array()), World::options())
    }

    pub fn array(&self) -> Array {
        Array::assemble(self.handles(), false).unwrap()
    }

    /// Where the journal's ring begins on the first device, in bytes.
    pub fn journal_start(&self) -> u64 {
        let array = Array::assemble(self.handles(), true).unwrap();
        let geometry = array.geometry();
        let mut start = None;
        geometry.pieces(geometry.journal_start.byte(), 1, |piece| {
            start = Some(piece)
        });
        let start = start.unwrap();
        assert_eq!(start.device, 0);
        start.offset
    }

    /// Everything that a read-only verification finds wrong, and the nodes it saw.
    pub fn verify(&self) -> (Vec<Finding>, BTreeMap<Nid, Numbers>) {
        let options = StoreOptions {
            read_only: true,
            ..World::options()
        };
        let store = self.open_with(options).unwrap();
        let seen = Seen(Mutex::new(rank::LEAF, BTreeMap::new()));
        let findings = Findings::new();
        store.verify(&seen, &findings, &|_, _| {});
        let nodes = std::mem::take(&mut *seen.0.lock());
        (findings.take().0, nodes)
    }

    /// Fails when verification finds more than a copy of a slot that the power cut tore.
    pub fn check(&self, context: &str) -> BTreeMap<Nid, Numbers> {
        let (findings, nodes) = self.verify();
        let bad = findings
            .iter()
            .find(|f| f.severity > engine::Severity::Notice);
        assert!(bad.is_none(), "{context}: {bad:?}");
        nodes
    }

    /// The power comes back; what was not flushed survives or not, by `rng`.
    pub fn restart(&mut self, rng: &mut Rng) {
        self.switch.restore();
        self.devices = self.devices.iter().map(|d| d.restart(rng)).collect();
    }
}

struct Seen(Mutex<BTreeMap<Nid, Numbers>>);

impl Visitor<Numbers> for Seen {
    fn node(&self, nid: Nid, _version: u64, content: &Numbers) {
        let before = self.0.lock().insert(nid, content.clone());
        assert!(before.is_none(), "node {nid} was shown twice");
    }

    fn space_map(&self, _chunk: u32, map: &SpaceMap) {
        assert!(map.free() <= map.blocks());
    }

    fn unreadable(&self, nid: Nid) {
        panic!("node {nid} is unreadable");
    }
}

pub fn create(store: &TestStore, state: Vec<u64>) -> Result<Nid, Error> {
    let fresh = store.reserve_nid()?;
    let nid = fresh.nid();
    let mut op = store.begin(Need::Grow)?;
    op.create(fresh, Numbers(state));
    op.commit();
    Ok(nid)
}

/// One change in an operation of its own.
pub fn change(store: &TestStore, nid: Nid, need: Need, change: Change) -> Result<(), Error> {
    let node = store.get(nid)?;
    let mut op = store.begin(need)?;
    let slot = op.lock(&node)?;
    op.apply(slot, change);
    op.commit();
    Ok(())
}

pub fn delete(store: &TestStore, nid: Nid) -> Result<(), Error> {
    let node = store.get(nid)?;
    let mut op = store.begin(Need::Reclaim)?;
    let slot = op.lock(&node)?;
    op.delete(slot);
    op.commit();
    Ok(())
}

/// Creates nodes of `words` numbers each until no more fit.
pub fn fill(store: &TestStore, words: usize) -> Vec<Nid> {
    let mut nids = Vec::new();
    loop {
        match create(store, vec![1; words]) {
            Ok(nid) => nids.push(nid),
            Err(Error::NoSpace) => return nids,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Data takes all that may be promised, in extents of up to `blocks`; returns them.
pub fn take_all(store: &TestStore, blocks: u32) -> Vec<Extent> {
    let mut held = Vec::new();
    while let Ok(mut promise) = store.promise(blocks as u64) {
        let reservation = store
            .reserve(&mut promise, blocks, None)
            .expect("a promise holds");
        let mut op = store.begin(Need::Reclaim).unwrap();
        held.push(op.take(reservation));
        op.commit();
    }
    held
}

/// Frees each extent in an operation of its own.
pub fn free(store: &TestStore, extents: impl IntoIterator<Item = Extent>) {
    for extent in extents {
        let mut op = store.begin(Need::Reclaim).unwrap();
        op.free(extent).unwrap();
        op.commit();
    }
}

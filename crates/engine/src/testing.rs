//! A small store for tests that look inside.

use crate::op::Need;
use crate::store::StoreOptions;
use crate::{Content, Store};
use base::clock::Clock;
use base::sync::{Mutex, rank};
use device::{Array, BlockDevice};
use format::geometry::{Geometry, GeometryOptions};
use format::{Damage, Nid};
use std::sync::Arc;

pub(crate) type TestStore = Store<Bytes>;

/// A node of some bytes that never change. A change is no more than so many bytes in the journal.
#[derive(Clone)]
pub(crate) struct Bytes(Vec<u8>, Option<Trap>);

impl Bytes {
    pub fn of(bytes: usize) -> Bytes {
        Bytes(vec![7; bytes], None)
    }

    /// One that panics when the trap is set.
    pub fn trapped(bytes: usize, trap: &Trap) -> Bytes {
        Bytes(vec![7; bytes], Some(trap.clone()))
    }

    fn step_on(&self, call: &'static str) {
        if let Some(trap) = &self.1 {
            trap.step_on(call);
        }
    }
}

/// The call of a content that panics, once.
#[derive(Clone)]
pub(crate) struct Trap(Arc<Mutex<Option<&'static str>>>);

impl Trap {
    pub fn new() -> Trap {
        Trap(Arc::new(Mutex::new(rank::LEAF, None)))
    }

    pub fn set(&self, call: &'static str) {
        *self.0.lock() = Some(call);
    }

    pub fn step_on(&self, call: &'static str) {
        let sprung = self.0.lock().take_if(|trapped| *trapped == call);
        assert!(sprung.is_none(), "a trap for tests");
    }
}

impl Content for Bytes {
    type Delta = usize;

    fn kind(&self) -> u8 {
        format::table::FIRST_FS_KIND
    }

    fn encode(&self, out: &mut Vec<u8>) {
        self.step_on("encode");
        out.extend_from_slice(&self.0);
    }

    fn decode(_: u8, body: &[u8]) -> Result<Self, Damage> {
        Ok(Bytes(body.to_vec(), None))
    }

    fn apply(&mut self, _: &usize) -> Result<(), Damage> {
        Ok(())
    }

    fn merges(&self) -> bool {
        self.step_on("merges");
        false
    }

    fn encode_delta(bytes: &usize, out: &mut Vec<u8>) {
        out.resize(out.len() + bytes, 0);
    }

    fn decode_delta(_: u8, bytes: &[u8]) -> Result<usize, Damage> {
        Ok(bytes.len())
    }

    fn owned(_: u8) -> bool {
        false
    }

    fn memory(&self) -> usize {
        self.0.len()
    }

    fn image_len(&self) -> usize {
        self.0.len()
    }
}

pub(crate) fn options() -> StoreOptions {
    StoreOptions {
        background: false,
        workers: 1,
        shards: 1,
        clock: Clock::manual(1),
        ..StoreOptions::default()
    }
}

/// An empty store on the device.
pub(crate) fn format(device: Arc<dyn BlockDevice>) -> Arc<Array> {
    let geometry = Geometry::plan(&[device.bytes()], GeometryOptions::default()).unwrap();
    let array = Array::create(vec![device], geometry, "test", [7; 16], [9; 16]).unwrap();
    let array = Arc::new(array);
    TestStore::format(&array, options()).unwrap();
    array.write_labels().unwrap();
    array
}

pub(crate) fn create(store: &TestStore, bytes: usize) -> Nid {
    create_as(store, Bytes::of(bytes))
}

pub(crate) fn create_as(store: &TestStore, content: Bytes) -> Nid {
    let fresh = store.reserve_nid().unwrap();
    let nid = fresh.nid();
    let mut op = store.begin(Need::Grow).unwrap();
    op.create(fresh, content);
    op.commit();
    nid
}

/// Logs so many bytes for the node.
pub(crate) fn log(store: &TestStore, nid: Nid, bytes: usize) {
    let node = store.get(nid).unwrap();
    let mut op = store.begin(Need::Reclaim).unwrap();
    let slot = op.lock(&node).unwrap();
    op.apply(slot, bytes);
    op.commit();
}

//! A small store for tests that look inside.

use crate::op::Need;
use crate::store::StoreOptions;
use crate::{Content, Store};
use base::clock::Clock;
use device::{Array, BlockDevice};
use format::geometry::{Geometry, GeometryOptions};
use format::{Damage, Nid};
use std::sync::Arc;

pub(crate) type TestStore = Store<Bytes>;

/// A node of some bytes that never change. A change is no more than so many bytes in the journal.
#[derive(Clone)]
pub(crate) struct Bytes(Vec<u8>);

impl Bytes {
    pub fn of(bytes: usize) -> Bytes {
        Bytes(vec![7; bytes])
    }
}

impl Content for Bytes {
    type Delta = usize;

    fn kind(&self) -> u8 {
        format::table::FIRST_FS_KIND
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }

    fn decode(_: u8, body: &[u8]) -> Result<Self, Damage> {
        Ok(Bytes(body.to_vec()))
    }

    fn apply(&mut self, _: &usize) -> Result<(), Damage> {
        Ok(())
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
    let fresh = store.reserve_nid().unwrap();
    let nid = fresh.nid();
    let mut op = store.begin(Need::Grow).unwrap();
    op.create(fresh, Bytes::of(bytes));
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

//! The table in little memory: pages come, change, are written and go.

use super::*;
use base::rng::Rng;
use device::sim::SimDevice;
use device::{BlockDevice, Durability};
use format::geometry::{Geometry, GeometryOptions};
use format::item;

/// Writes each page behind the last one, all together in the end.
struct Log<'a> {
    array: &'a Array,
    end: u64,
    kept: Vec<(u64, Vec<u8>)>,
}

impl Log<'_> {
    fn finish(&mut self) {
        for (byte, bytes) in self.kept.drain(..) {
            self.array
                .write(byte, &bytes, Durability::Volatile)
                .unwrap();
        }
    }
}

impl PageSink for Log<'_> {
    fn write(&mut self, kind: ItemKind, id: u64, payload: &[u8]) -> Result<Written, Error> {
        let mut bytes = Vec::new();
        let crc = item::encode(&mut bytes, kind, 0, id, 0, |out| {
            out.extend_from_slice(payload)
        });
        let place = Place {
            byte: self.end,
            len: bytes.len() as u32,
        };
        bytes.resize(bytes.len().next_multiple_of(format::BLOCK_SIZE), 0);
        let len = bytes.len() as u64;
        self.kept.push((self.end, bytes));
        self.end += len;
        Ok(Written { place, crc })
    }

    fn discard(&mut self, _: Place) {}
}

fn array(mib: u64) -> std::sync::Arc<Array> {
    let device = SimDevice::new(mib << 20, 1) as std::sync::Arc<dyn BlockDevice>;
    let geometry = Geometry::plan(&[mib << 20], GeometryOptions::default()).unwrap();
    std::sync::Arc::new(Array::create(vec![device], geometry, "test", [7; 16], [9; 16]).unwrap())
}

const REGIONS: u64 = 800;
const LIMIT: usize = 64;
/// Regions changed between two checkpoints.
const CHANGES: u64 = 20;

/// A nid of each region.
fn nid(region: u64) -> Nid {
    Nid(region * REGION_NIDS + region % REGION_LEAVES * LEAF_NIDS + 17)
}

/// One thread changes entries and writes checkpoints, others look at them meanwhile; far more regions
/// than there is memory for.
#[test]
fn memory_is_bounded_with_many_regions_and_no_change_is_lost() {
    let array = array(512);
    let table = Table::new(array.clone(), LIMIT);
    let newest: Vec<AtomicU64> = (0..REGIONS).map(|_| AtomicU64::new(0)).collect();
    let check = |region: u64| {
        let least = newest[region as usize].load(Ordering::SeqCst);
        let version = table.entry(nid(region)).unwrap().version;
        assert!(version >= least, "region {region}: {version} < {least}");
    };
    base::thread::parallel(3, |thread| {
        let mut rng = Rng::new(thread as u64);
        if thread > 0 {
            for _ in 0..60_000 {
                check(rng.below(REGIONS));
            }
            return;
        }
        let end = 1 << 20;
        let kept = Vec::new();
        let mut log = Log {
            array: &array,
            end,
            kept,
        };
        for round in 1..=300 {
            for _ in 0..CHANGES {
                let region = rng.below(REGIONS);
                let entry = Entry {
                    place: Place { byte: 64, len: 64 },
                    version: round,
                };
                let replaced = table.set(&[(nid(region), entry)]).unwrap();
                assert!(replaced[0].is_some(), "region {region} has a newer version");
                newest[region as usize].store(round, Ordering::SeqCst);
            }
            let regions = table.dirty_regions();
            let written = regions
                .iter()
                .map(|one| write_region(one, &mut log).unwrap());
            let written = written.collect();
            table.write_maps(written, &mut log).unwrap();
            log.finish();
            table.written(&regions);
            // What is dirty is not evicted, nor what the others are looking at.
            let most = LIMIT + 2 * CHANGES as usize + 3 * LOOKS;
            assert!(table.pages() <= most, "{} pages", table.pages());
        }
    });
    (0..REGIONS).for_each(check);
    // Memory comes back down to the limit once nothing is dirty.
    assert!(table.pages() <= LIMIT + LOOKS, "{} pages", table.pages());
    assert_eq!(table.nodes.load(Ordering::Relaxed) as usize, {
        let used = |version: &&AtomicU64| version.load(Ordering::Relaxed) > 0;
        newest.iter().filter(used).count()
    });
}

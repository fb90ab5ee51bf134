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
        let crc = item::encode(
            self.array.checksum_seed(),
            &mut bytes,
            kind,
            0,
            id,
            0,
            |out| out.extend_from_slice(payload),
        );
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
                .flat_map(|one| one.parts(1).into_iter().map(move |leaves| (one, leaves)))
                .filter_map(|(one, leaves)| write_part(one, leaves, &mut log).unwrap());
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

#[test]
fn memory_is_bounded_where_all_of_it_is_looked_at_all_the_time() {
    let array = array(512);
    let table = Table::new(array.clone(), LIMIT);
    let limit = table.page_limit;
    for region in 0..8 * limit as u64 {
        table.entry(nid(region)).unwrap();
        let regions: Vec<_> = table.regions.lock().values().cloned().collect();
        for region in regions {
            region.state.lock().recent = u64::MAX;
        }
    }
    let most = KEPT_SHARE * limit + LOOKS;
    let pages = table.pages();
    assert!((limit..=most).contains(&pages), "{pages} pages");
}

/// Leaves of one region are written by several workers, and its page once, when all of them are.
#[test]
fn a_region_is_written_in_parts_and_its_page_points_at_all_leaves() {
    let array = array(256);
    let table = Table::new(array.clone(), LIMIT);
    let nids: Vec<Nid> = (0..3 * REGION_LEAVES)
        .map(|leaf| Nid(leaf * LEAF_NIDS + leaf % 7))
        .collect();
    for round in 1..=20u64 {
        // Pages that the table may read again are not written over.
        let entry = |nid: Nid| Entry {
            place: Place { byte: 64, len: 64 },
            version: round * 1000 + nid.0 % 1000,
        };
        let changes = nids.iter().filter(|nid| nid.0 % (round + 1) != 0);
        let changed: Vec<Nid> = changes.copied().collect();
        for nid in &changed {
            table.set(&[(*nid, entry(*nid))]).unwrap();
        }
        let regions = table.dirty_regions();
        let most = round as usize % 5 + 1;
        let parts = |one| {
            DirtyRegion::parts(one, most)
                .into_iter()
                .map(move |p| (one, p))
        };
        let parts: Vec<_> = regions.iter().flat_map(parts).collect();
        assert!(
            parts
                .iter()
                .all(|(_, leaves)| leaves.count_ones() as usize <= most)
        );
        let next = AtomicUsize::new(0);
        let written = base::thread::parallel(3, |worker| {
            let mut log = Log {
                array: &array,
                end: (8 * round + 2 * worker as u64) << 20,
                kept: Vec::new(),
            };
            let mut written = Vec::new();
            while let Some((one, leaves)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                written.extend(write_part(one, *leaves, &mut log).unwrap());
            }
            log.finish();
            written
        });
        let mut written: Vec<_> = written.into_iter().flatten().collect();
        written.sort_unstable_by_key(|(region, _)| *region);
        let indices: Vec<u64> = written.iter().map(|(region, _)| *region).collect();
        assert_eq!(indices, [0, 1, 2], "each page once");
        let mut log = Log {
            array: &array,
            end: (8 * round + 7) << 20,
            kept: Vec::new(),
        };
        let mut record = CheckpointRecord::zeroed();
        record.roots = table.write_maps(written, &mut log).unwrap();
        log.finish();
        table.written(&regions);
        let stored = Table::open(array.clone(), &record, LIMIT).unwrap();
        for nid in &changed {
            assert_eq!(stored.entry(*nid).unwrap(), entry(*nid), "round {round}");
        }
    }
}

#[test]
fn a_leaf_is_kept_until_the_checkpoint_that_took_it_has_set_its_entries() {
    let leaves = ChangedLeaves::new();
    assert!(leaves.add(70) && !leaves.add(70));
    assert!(leaves.has(70) && leaves.keeps(70) && !leaves.keeps(71));
    assert_eq!(leaves.begin(), 1);
    assert!(!leaves.has(70) && leaves.keeps(70));
    // It changes again before the first checkpoint has done with it.
    assert!(leaves.add(70) && leaves.add(71));
    leaves.entered();
    assert!(leaves.keeps(70) && leaves.keeps(71));
    assert_eq!(leaves.begin(), 2);
    leaves.entered();
    assert!(!leaves.keeps(70) && !leaves.keeps(71));
}

#[test]
fn leaves_anywhere_are_found_and_words_without_any_are_not_looked_at() {
    let leaves = ChangedLeaves::new();
    let last = NID_LIMIT / LEAF_NIDS - 1;
    let all = [0, 63, 64, 64 * 63, 64 * 64, last / 2, last];
    for round in 1..3 {
        assert!(all.iter().all(|leaf| leaves.add(*leaf)));
        assert_eq!(leaves.begin(), all.len() as u64);
        assert!(all.iter().all(|leaf| !leaves.has(*leaf)));
        assert!(all.iter().all(|leaf| leaves.keeps(*leaf)));
        leaves.entered();
        assert!(all.iter().all(|leaf| !leaves.keeps(*leaf)), "{round}");
        assert_eq!(leaves.words().count(), 6);
    }
}

//! Free nids: per-core region leases over two-level bitmaps.
//!
//! A region's bitmap has a summary level (one bit per word), so finding a free nid looks at
//! one summary word and one bitmap word and never at the node table. A shard (core) allocates
//! from the region it leases; a free, from any core, is one atomic bit operation on the
//! word and, when the word was empty, one on the summary.
//!
//! Invariants:
//! 1. A set bit in a region's bitmap means: the nid is free and in nobody's hands.
//! 2. A region is leased by at most one shard; only the lessee takes from its bitmap.
//! 3. A free nid of a region that is not loaded waits in `deferred` and is applied at load.

use crate::bitmap::Bitmap;
use base::map::HashMap;
use base::sync::{Arc, Mutex, RwLock, rank};
use format::Nid;
use format::table::{MAP_REGIONS, REGION_NIDS, RESERVED_NIDS, ROOTS};

const WORDS: usize = (REGION_NIDS / 64) as usize;
/// Regions below the ones kept for space maps.
const REGION_LIMIT: u32 = ((ROOTS - 1) * MAP_REGIONS) as u32;

/// In-memory allocation state of one region.
#[derive(Debug)]
struct Region {
    index: u32,
    bits: Bitmap,
}

impl Region {
    /// `used` has a set bit for every nid in use.
    fn new(index: u32, used: &[u64]) -> Region {
        let mut free_words: Vec<u64> = used.iter().map(|w| !w).collect();
        if index == 0 {
            free_words[0] = 0;
            const { assert!(RESERVED_NIDS == 64) };
        }
        let bits = Bitmap::new(free_words);
        Region { index, bits }
    }

    /// Takes a free nid; only the lessee calls this (invariant 2).
    fn take(&self) -> Option<u64> {
        let within = self.bits.take()?;
        Some(self.index as u64 * REGION_NIDS + within)
    }
}

#[derive(Debug, Default)]
struct Regions {
    loaded: HashMap<u32, Arc<Region>>,
    leased: Vec<u32>,
    /// Free counts of regions that exist on disk and are not loaded.
    unloaded: HashMap<u32, u32>,
    /// Regions ever used; the next new one has this index.
    count: u32,
    deferred: HashMap<u32, Box<[u64; WORDS]>>,
}

/// Where a region's bitmap comes from when it is first needed.
pub(crate) trait RegionBitmaps {
    type Error;
    /// Set bit: in use. One word per 64 nids.
    fn used_nids(&self, region: u32) -> Result<Vec<u64>, Self::Error>;
}

#[derive(Debug)]
pub(crate) struct Nids {
    leases: Vec<Mutex<Option<Arc<Region>>>>,
    /// Loaded regions for the free path, which takes this shared and only for a look-up.
    index: RwLock<Vec<Option<Arc<Region>>>>,
    regions: Mutex<Regions>,
}

impl Nids {
    /// `free_counts[i]` is the checkpointed number of free nids in region `i`.
    pub fn new(shards: usize, free_counts: Vec<u32>) -> Nids {
        let regions = Regions {
            count: free_counts.len() as u32,
            unloaded: (0..).zip(free_counts).collect(),
            ..Regions::default()
        };
        Nids {
            leases: (0..shards)
                .map(|i| Mutex::keyed(rank::NID_LEASE, i as u64, None))
                .collect(),
            index: RwLock::new(rank::LEAF, Vec::new()),
            regions: Mutex::new(rank::NID_REGIONS, regions),
        }
    }

    /// Regions ever used.
    pub fn region_count(&self) -> u32 {
        self.regions.lock().count
    }

    /// A free nid for `shard`, or `None` when nid space is exhausted.
    pub fn take<B: RegionBitmaps>(
        &self,
        shard: usize,
        bitmaps: &B,
    ) -> Result<Option<Nid>, B::Error> {
        let mut lease = self.leases[shard % self.leases.len()].lock();
        loop {
            if let Some(nid) = lease.as_ref().and_then(|region| region.take()) {
                return Ok(Some(Nid(nid)));
            }
            match self.lease(lease.take(), bitmaps)? {
                Some(region) => *lease = Some(region),
                None => return Ok(None),
            }
        }
    }

    /// Returns the exhausted region and leases another: a loaded one with free nids, else an
    /// unloaded one, else a new one, else (nid space full) any that a free came back to.
    fn lease<B: RegionBitmaps>(
        &self,
        old: Option<Arc<Region>>,
        bitmaps: &B,
    ) -> Result<Option<Arc<Region>>, B::Error> {
        let mut regions = self.regions.lock();
        if let Some(old) = old {
            regions.leased.retain(|&r| r != old.index);
        }
        // A quarter free at least, so that leases do not bounce for single nids.
        let worth = REGION_NIDS as u32 / 4;
        let candidate = |regions: &Regions, least: u32| {
            let free = |r: &Arc<Region>| r.bits.free();
            regions
                .loaded
                .values()
                .filter(|r| free(r) >= least && !regions.leased.contains(&r.index))
                .min_by_key(|r| r.index)
                .cloned()
        };
        if let Some(region) = candidate(&regions, worth) {
            regions.leased.push(region.index);
            return Ok(Some(region));
        }
        let unloaded = |regions: &Regions, least: u32| {
            regions
                .unloaded
                .iter()
                .filter(|(_, f)| **f >= least)
                .map(|(r, _)| *r)
                .min()
        };
        let index = match unloaded(&regions, worth) {
            Some(index) => index,
            None if regions.count < REGION_LIMIT => regions.count,
            None => match (candidate(&regions, 1), unloaded(&regions, 1)) {
                (Some(region), _) => {
                    regions.leased.push(region.index);
                    return Ok(Some(region));
                }
                (None, Some(index)) => index,
                (None, None) => return Ok(None),
            },
        };
        let region = self.load(&mut regions, index, bitmaps)?;
        regions.leased.push(index);
        Ok(Some(region))
    }

    fn load<B: RegionBitmaps>(
        &self,
        regions: &mut Regions,
        index: u32,
        bitmaps: &B,
    ) -> Result<Arc<Region>, B::Error> {
        let known = index < regions.count;
        // Out of the list even if its page is unreadable, or everybody would try it again.
        regions.unloaded.remove(&index);
        let mut used = match known {
            true => bitmaps.used_nids(index)?,
            false => vec![0; WORDS],
        };
        if let Some(freed) = regions.deferred.remove(&index) {
            for (used, freed) in used.iter_mut().zip(freed.iter()) {
                *used &= !freed;
            }
        }
        let region = Arc::new(Region::new(index, &used));
        for skipped in regions.count..index {
            regions.unloaded.insert(skipped, REGION_NIDS as u32);
        }
        regions.count = regions.count.max(index + 1);
        regions.loaded.insert(index, Arc::clone(&region));
        let mut table = self.index.write();
        if table.len() <= index as usize {
            table.resize(index as usize + 1, None);
        }
        table[index as usize] = Some(Arc::clone(&region));
        Ok(region)
    }

    /// Makes a nid free again. Reserved nids stay reserved.
    pub fn put(&self, nid: Nid) {
        if nid.0 < RESERVED_NIDS || nid.0 / REGION_NIDS >= REGION_LIMIT as u64 {
            return;
        }
        let index = (nid.0 / REGION_NIDS) as usize;
        let loaded = self.index.read().get(index).cloned().flatten();
        if let Some(region) = loaded {
            region.bits.put(nid.0 % REGION_NIDS);
            return;
        }
        let mut regions = self.regions.lock();
        if let Some(region) = regions.loaded.get(&(index as u32)) {
            region.bits.put(nid.0 % REGION_NIDS);
        } else {
            let (word, bit) = ((nid.0 % REGION_NIDS) as usize / 64, 1 << (nid.0 % 64));
            let freed = regions.deferred.entry(index as u32);
            let freed = freed.or_insert_with(|| Box::new([0; WORDS]));
            let new = freed[word] & bit == 0;
            freed[word] |= bit;
            // Enough of them make the region worth a lease.
            if let Some(free) = regions.unloaded.get_mut(&(index as u32)).filter(|_| new) {
                *free += 1;
            }
        }
    }

    /// Recovery found `nid` in use (or free) beyond what the checkpoint says.
    pub fn recover<B: RegionBitmaps>(
        &self,
        nid: Nid,
        in_use: bool,
        bitmaps: &B,
    ) -> Result<(), B::Error> {
        let index = (nid.0 / REGION_NIDS) as u32;
        if nid.0 < RESERVED_NIDS || index >= REGION_LIMIT {
            return Ok(());
        }
        let mut regions = self.regions.lock();
        let region = match regions.loaded.get(&index) {
            Some(region) => Arc::clone(region),
            None => self.load(&mut regions, index, bitmaps)?,
        };
        if in_use {
            region.bits.mark_used(nid.0 % REGION_NIDS);
        } else {
            region.bits.put(nid.0 % REGION_NIDS);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    struct Empty;
    impl RegionBitmaps for Empty {
        type Error = ();
        fn used_nids(&self, _: u32) -> Result<Vec<u64>, ()> {
            Ok(vec![0; WORDS])
        }
    }

    #[test]
    fn every_nid_is_given_out_once_and_again_after_a_free() {
        let nids = Nids::new(2, vec![]);
        let mut seen = HashSet::new();
        for i in 0..REGION_NIDS as usize * 3 {
            assert!(seen.insert(nids.take(i % 2, &Empty).unwrap().unwrap()));
        }
        assert!(seen.iter().all(|n| n.0 >= RESERVED_NIDS));
        for nid in &seen {
            nids.put(*nid);
        }
        let regions = nids.region_count();
        for _ in 0..seen.len() - 64 {
            nids.take(0, &Empty).unwrap().unwrap();
        }
        assert!(
            nids.region_count() <= regions + 1,
            "freed nids are used before new regions"
        );
    }

    #[test]
    fn nids_freed_in_regions_of_an_earlier_mount_are_used_before_new_regions() {
        struct Full;
        impl RegionBitmaps for Full {
            type Error = ();
            fn used_nids(&self, _: u32) -> Result<Vec<u64>, ()> {
                Ok(vec![u64::MAX; WORDS])
            }
        }
        let nids = Nids::new(1, vec![0; 4]);
        for nid in REGION_NIDS..3 * REGION_NIDS {
            nids.put(Nid(nid));
            nids.put(Nid(nid));
        }
        let mut seen = HashSet::new();
        for _ in 0..2 * REGION_NIDS {
            assert!(seen.insert(nids.take(0, &Full).unwrap().unwrap()));
        }
        assert_eq!(nids.region_count(), 4);
    }

    #[test]
    fn two_threads_never_share_a_nid() {
        let nids = Nids::new(2, vec![]);
        let taken = base::thread::parallel(2, |shard| {
            let mut mine = Vec::new();
            for i in 0..40_000u64 {
                mine.push(nids.take(shard, &Empty).unwrap().unwrap());
                if i % 3 == 0 {
                    nids.put(mine.swap_remove((i as usize * 7) % mine.len()));
                }
            }
            mine
        });
        let all: HashSet<Nid> = taken.iter().flatten().copied().collect();
        assert_eq!(all.len(), taken[0].len() + taken[1].len());
    }
}

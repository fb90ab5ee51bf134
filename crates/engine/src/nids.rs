//! Free nids: what each shard (core) has ready, and the bitmaps that the rest is in.
//!
//! A shard leases a *region* of the node table. It takes the free nids of one leaf of it at a
//! time, with the versions that the nids had, and puts them into a ring: a new node takes its nid
//! from there, without a lock and without a write to memory that another shard uses. A nid that
//! becomes free is kept by the shard that made it so, if that has fewer than a few, and used again
//! next; else it goes back to its region's bitmap by one atomic operation, from any core, and is
//! given out again when somebody takes its leaf.
//!
//! Above the bitmaps is one more, of the regions *worth* a lease. So what is free is found in four
//! steps down, however much is in use: region, leaf, words, nids.
//!
//! A lease keeps shards apart; nothing depends on it. A shard with no region left takes, in
//! this order: a region worth a lease; that of a shard that took nothing since this one took its own
//! last lease (or of any, for a first lease), to use it together; a new region.
//!
//! Invariants:
//! 1. A nid is in use, or reserved by an operation, or ready in one shard, or has its bit set. Nothing of
//!    that is on disk: after a crash what no node uses is free.
//! 2. No nid of a region is given out before what the node table says of the region was added to its
//!    bitmap: the table follows behind.
//! 3. A shard leaves a region behind when less than [`WORTH_WORDS`] of its words are rich, and it is
//!    found again when a nid that comes back makes it as many. So with W words of 64 nids in a region
//!    at least (W - `WORTH_WORDS`) * 49 of its nids are in use, and the number of regions is
//!    bounded by the number of nodes that once were at the same time, and of shards.

use crate::bitmap::Bitmap;
use crate::ready::{Ready, Recycled};
use crate::region::{LEAF_WORDS, Region};
use base::atomic::{AtomicU32, AtomicU64, Ordering};
use base::sync::{Mutex, rank};
use format::Nid;
use format::table::{LEAF_NIDS, MAP_REGIONS, REGION_NIDS, RESERVED_NIDS, ROOTS};
use std::sync::OnceLock;

const WORDS: usize = (REGION_NIDS / 64) as usize;
/// Regions below the ones kept for space maps.
const REGION_LIMIT: u32 = ((ROOTS - 1) * MAP_REGIONS) as u32;
/// Rich words that make a region worth a lease: a quarter.
const WORTH_WORDS: u32 = WORDS as u32 / 4;
/// Free nids that make one worth a lease of which only their number is known: a quarter, too.
const WORTH_NIDS: u32 = REGION_NIDS as u32 / 4;

/// A bit for each nid of a leaf.
pub(crate) type LeafNids = [u64; LEAF_WORDS];
const _: () = assert!(LEAF_WORDS as u64 * 64 == LEAF_NIDS);

/// Neither given out by number at mkfs nor that of a space map.
fn is_ordinary(nid: Nid) -> bool {
    nid.0 >= RESERVED_NIDS && nid.0 / REGION_NIDS < REGION_LIMIT as u64
}

/// What is known of nids elsewhere.
pub(crate) trait NidSource {
    type Error;

    /// Whether the same may succeed another time.
    fn may_pass(error: &Self::Error) -> bool;

    /// A region's bitmap, one word per 64 nids; set bit: the node table has a node there.
    fn used_nids(&self, region: u32) -> Result<Vec<u64>, Self::Error>;

    /// The versions that nids from `first`, a leaf's, on were last used with; 0: never. Asked for
    /// those with a bit in `wanted`, which nobody else has; takes those out that must stay out
    /// of use.
    fn last_versions(
        &self,
        first: Nid,
        wanted: &mut LeafNids,
    ) -> Result<Box<[u64; LEAF_NIDS as usize]>, Self::Error>;
}

/// A map page's share of the regions.
type Regions = Box<[OnceLock<Region>]>;

#[derive(Debug)]
pub(crate) struct Nids {
    shards: Box<[Shard]>,
    /// Regions that were leased, or that nids came back to.
    maps: Box<[OnceLock<Regions>]>,
    /// Regions worth a lease, by number; one that is leased may be among them.
    worth: Bitmap,
    /// Free nids of each region that the last checkpoint before this mount knew.
    checkpointed: Vec<u32>,
    /// Regions ever used; the next new one has this number.
    count: AtomicU32,
    /// Leases so far.
    leases: AtomicU64,
}

/// On cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    recycled: Recycled,
    ready: Ready,
    /// Held by the one who fills the ring.
    lease: Mutex<Lease>,
    /// For other shards to look at: number of the leased region, and 1 more; 0: none.
    region: AtomicU32,
    /// How many leases there had been when the shard last took a leaf.
    used: AtomicU64,
}

#[derive(Debug)]
struct Lease {
    region: Option<u32>,
    /// The leaf to go on at. Going round gives nids time to come back.
    leaf: usize,
    /// How many leases there had been when this one began. A shard that never had one takes part
    /// in any.
    since: u64,
}

impl Shard {
    fn take(&self) -> Option<(u64, u64)> {
        self.recycled.take().or_else(|| self.ready.take())
    }
}

impl Nids {
    /// `free_counts[i]` is the checkpointed number of free nids in region `i`.
    pub fn new(shards: usize, free_counts: Vec<u32>) -> Nids {
        let shard = |i| Shard {
            recycled: Recycled::new(),
            ready: Ready::new(LEAF_NIDS as usize),
            lease: Mutex::keyed(
                rank::NID_LEASE,
                i as u64,
                Lease {
                    region: None,
                    leaf: 0,
                    since: u64::MAX,
                },
            ),
            region: AtomicU32::new(0),
            used: AtomicU64::new(0),
        };
        let worth = Bitmap::new((REGION_LIMIT as usize).div_ceil(64));
        let free = (0..REGION_LIMIT as u64).zip(&free_counts);
        free.filter(|(_, free)| **free >= WORTH_NIDS)
            .for_each(|(index, _)| {
                worth.put(index);
            });
        Nids {
            shards: (0..shards).map(shard).collect(),
            maps: (1..ROOTS).map(|_| OnceLock::new()).collect(),
            worth,
            count: AtomicU32::new(free_counts.len() as u32),
            checkpointed: free_counts,
            leases: AtomicU64::new(0),
        }
    }

    /// Regions ever used.
    pub fn region_count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    fn region(&self, index: u32) -> &Region {
        let (map, slot) = (
            index as usize / MAP_REGIONS as usize,
            index as usize % MAP_REGIONS as usize,
        );
        let regions =
            self.maps[map].get_or_init(|| (0..MAP_REGIONS).map(|_| OnceLock::new()).collect());
        regions[slot].get_or_init(|| Region::new(WORDS))
    }

    /// A free nid for `shard` and the version it was last used with, or `None` when nid space is
    /// exhausted.
    pub fn take<S: NidSource>(
        &self,
        shard: usize,
        source: &S,
    ) -> Result<Option<(Nid, u64)>, S::Error> {
        let shard = &self.shards[shard % self.shards.len()];
        loop {
            if let Some((nid, version)) = shard.take() {
                return Ok(Some((Nid(nid), version)));
            }
            let mut lease = shard.lease.lock();
            if shard.ready.is_empty() && !self.refill(shard, &mut lease, source)? {
                // What others have ready is the rest.
                let rest = self.shards.iter().find_map(Shard::take);
                return Ok(rest.map(|(nid, version)| (Nid(nid), version)));
            }
        }
    }

    /// Fills the ring with the free nids of a leaf; false: there are none.
    fn refill<S: NidSource>(
        &self,
        shard: &Shard,
        lease: &mut Lease,
        source: &S,
    ) -> Result<bool, S::Error> {
        // One leaf may be passed over that a device does not return just now.
        let mut failed = None;
        loop {
            let Some(index) = lease.region else {
                if !self.lease(shard, lease, source)? {
                    return failed.map_or(Ok(false), Err);
                }
                continue;
            };
            let region = self.region(index);
            let Some((leaf, mut free)) = region.take_leaf(lease.leaf) else {
                if lease.leaf == 0 || region.rich_words() < WORTH_WORDS {
                    lease.region = None;
                    shard.region.store(0, Ordering::Relaxed);
                }
                lease.leaf = 0;
                continue;
            };
            lease.leaf = leaf + 1;
            let now = self.leases.load(Ordering::Relaxed);
            shard.used.store(now, Ordering::Relaxed);
            let first = index as u64 * REGION_NIDS + leaf as u64 * LEAF_NIDS;
            let taken = free;
            let versions = match source.last_versions(Nid(first), &mut free) {
                Ok(versions) => versions,
                Err(error) => {
                    for (w, free) in taken.into_iter().enumerate() {
                        region.add(leaf * LEAF_WORDS + w, free);
                    }
                    if failed.is_some() || !S::may_pass(&error) {
                        return Err(error);
                    }
                    failed = Some(error);
                    continue;
                }
            };
            let ready = (0..LEAF_NIDS).filter(|i| free[*i as usize / 64] >> (i % 64) & 1 == 1);
            shard
                .ready
                .fill(ready.map(|i| (first + i, versions[i as usize])));
            if free != [0; LEAF_WORDS] {
                return Ok(true);
            }
        }
    }

    /// Leases a region to a shard that has none; false: nid space is exhausted.
    fn lease<S: NidSource>(
        &self,
        shard: &Shard,
        lease: &mut Lease,
        source: &S,
    ) -> Result<bool, S::Error> {
        let Some(index) = self.find_region(shard, lease.since, source)? else {
            return Ok(false);
        };
        *lease = Lease {
            region: Some(index),
            leaf: 0,
            since: self.leases.fetch_add(1, Ordering::Relaxed) + 1,
        };
        shard.region.store(index + 1, Ordering::Relaxed);
        Ok(true)
    }

    fn find_region<S: NidSource>(
        &self,
        shard: &Shard,
        since: u64,
        source: &S,
    ) -> Result<Option<u32>, S::Error> {
        while let Some(index) = self.worth.take() {
            if self.can_lease(index as u32, source)? {
                return Ok(Some(index as u32));
            }
        }
        if let Some(index) = self.idle_lease(shard, since) {
            return Ok(Some(index));
        }
        let next = |count: u32| (count < REGION_LIMIT).then_some(count + 1);
        let (set, fetch) = (Ordering::AcqRel, Ordering::Acquire);
        while let Ok(index) = self.count.fetch_update(set, fetch, next) {
            if self.can_lease(index, source)? {
                return Ok(Some(index));
            }
        }
        // Nid space is full: any region that has a free nid.
        for index in 0..self.region_count() {
            let checkpointed = self.checkpointed.get(index as usize);
            let region = self.region(index);
            let unknown = !region.is_loaded() && checkpointed.is_some_and(|free| *free > 0);
            if (unknown || region.has_free()) && self.can_lease(index, source)? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// A region worth a lease whose lessee does not use it.
    fn idle_lease(&self, shard: &Shard, since: u64) -> Option<u32> {
        let others = self.shards.iter().filter(|s| !std::ptr::eq(*s, shard));
        let idle = others.filter(|other| other.used.load(Ordering::Relaxed) < since);
        let leased = idle.filter_map(|other| other.region.load(Ordering::Relaxed).checked_sub(1));
        let mut worth = leased.filter(|index| {
            let region = self.region(*index);
            // A word may be taken for rich that is no more; a region that is empty would be
            // found again and again.
            region.rich_words() >= WORTH_WORDS && region.has_free()
        });
        worth.next()
    }

    /// As [`load`](Self::load). Damage of one region costs its nids, and nobody who wants any: others have some.
    fn can_lease<S: NidSource>(&self, index: u32, source: &S) -> Result<bool, S::Error> {
        match self.load(index, source) {
            Err(error) if !S::may_pass(&error) => Ok(false),
            loaded => loaded,
        }
    }

    /// Sees to it that a region's bitmap has what the node table says (invariant 2); false when
    /// somebody else is about to, or it is damaged. In that case it is not tried again; after an error that
    /// may pass it is when nids of it come back.
    fn load<S: NidSource>(&self, index: u32, source: &S) -> Result<bool, S::Error> {
        let region = self.region(index);
        if region.claim() {
            let used = source.used_nids(index).inspect_err(|error| {
                if S::may_pass(error) {
                    region.unclaim();
                }
            });
            for (w, used) in used?.into_iter().enumerate() {
                // The first word's nids are reserved.
                if (index, w) != (0, 0) {
                    region.add(w, !used);
                }
            }
            const { assert!(RESERVED_NIDS == 64) };
            region.loaded();
        }
        Ok(region.is_loaded())
    }

    /// Makes a nid free again, which was last used with this version. Reserved nids stay
    /// reserved.
    pub fn put(&self, shard: usize, nid: Nid, version: u64) {
        if !is_ordinary(nid) {
            return;
        }
        let shard = &self.shards[shard % self.shards.len()];
        let region = self.region((nid.0 / REGION_NIDS) as u32);
        // Invariant 2: the table may call free what is in use again before it is asked.
        if !region.is_loaded() || !shard.recycled.put(nid.0, version) {
            self.put_bit(nid);
        }
    }

    /// A nid that was taken cannot be used, and none of its leaf, for now or until the next mount: no shard's ring has more of them than this one's.
    pub fn leave_leaf(&self, shard: usize, nid: Nid, for_now: bool) {
        let ready = &self.shards[shard % self.shards.len()].ready;
        let of_leaf = |nid: u64| nid / LEAF_NIDS;
        let mut taken = Some(nid.0);
        while let Some(other) = taken {
            let is_of_leaf = of_leaf(other) == of_leaf(nid.0);
            if for_now || !is_of_leaf {
                // Its bit alone: who takes the leaf from there reads it again.
                self.put_bit(Nid(other));
            }
            taken = match is_of_leaf {
                true => ready.take().map(|(other, _)| other),
                false => None,
            };
        }
    }

    fn put_bit(&self, nid: Nid) {
        let index = nid.0 / REGION_NIDS;
        let region = self.region(index as u32);
        if region.put(nid.0 % REGION_NIDS) && self.is_worth(index as u32, region) {
            self.worth.put(index);
        }
    }

    fn is_worth(&self, index: u32, region: &Region) -> bool {
        let mut rich = region.rich_words();
        if !region.is_loaded() {
            // Those free on the devices are not in the bitmap.
            let free = self.checkpointed.get(index as usize);
            rich += free.map_or(0, |free| *free / (WORTH_NIDS / WORTH_WORDS));
        }
        rich >= WORTH_WORDS
    }

    /// Recovery found `nid` in use (or free) beyond what the checkpoint says.
    pub fn recover<S: NidSource>(
        &self,
        nid: Nid,
        in_use: bool,
        source: &S,
    ) -> Result<(), S::Error> {
        if !is_ordinary(nid) {
            return Ok(());
        }
        let index = (nid.0 / REGION_NIDS) as u32;
        let known = self.count.fetch_max(index + 1, Ordering::AcqRel);
        self.load(index, source)?;
        let region = self.region(index);
        if in_use {
            region.take_nid(nid.0 % REGION_NIDS);
        } else {
            self.put_bit(nid);
        }
        // Regions that the checkpoint does not know are free but for such nids.
        for new in known..=index {
            self.worth.put(new as u64);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeSet, HashSet};

    /// A node table in which nothing, or everything, is in use.
    struct Table {
        used: u64,
    }

    const EMPTY: Table = Table { used: 0 };
    const FULL: Table = Table { used: u64::MAX };

    impl NidSource for Table {
        type Error = ();
        fn may_pass(_: &()) -> bool {
            false
        }
        fn used_nids(&self, _: u32) -> Result<Vec<u64>, ()> {
            Ok(vec![self.used; WORDS])
        }
        fn last_versions(
            &self,
            first: Nid,
            _: &mut LeafNids,
        ) -> Result<Box<[u64; LEAF_NIDS as usize]>, ()> {
            let mut versions = Box::new([0; LEAF_NIDS as usize]);
            for (nid, version) in (first.0..).zip(versions.iter_mut()) {
                *version = nid * 3;
            }
            Ok(versions)
        }
    }

    /// What a region has in use, and which leaves cannot be read; whether what fails may pass.
    struct Source<const MAY_PASS: bool, U, F> {
        used: U,
        fails: F,
    }

    impl<const MAY_PASS: bool, U, F> NidSource for Source<MAY_PASS, U, F>
    where
        U: Fn(u32) -> Result<Vec<u64>, ()>,
        F: Fn(u64) -> bool,
    {
        type Error = ();
        fn may_pass(_: &()) -> bool {
            MAY_PASS
        }
        fn used_nids(&self, region: u32) -> Result<Vec<u64>, ()> {
            (self.used)(region)
        }
        fn last_versions(
            &self,
            first: Nid,
            _: &mut LeafNids,
        ) -> Result<Box<[u64; LEAF_NIDS as usize]>, ()> {
            match (self.fails)(first.0 / LEAF_NIDS) {
                true => Err(()),
                false => Ok(Box::new([0; LEAF_NIDS as usize])),
            }
        }
    }

    /// All leaves can be read.
    fn source<const MAY_PASS: bool, U>(used: U) -> Source<MAY_PASS, U, fn(u64) -> bool> {
        let fails = |_| false;
        Source { used, fails }
    }

    fn take(nids: &Nids, shard: usize, table: &Table) -> Nid {
        let (nid, version) = nids.take(shard, table).unwrap().unwrap();
        assert_eq!(version, nid.0 * 3, "a nid comes with its own version");
        nid
    }

    fn put(nids: &Nids, shard: usize, nid: Nid) {
        nids.put(shard, nid, nid.0 * 3);
    }

    #[test]
    fn every_nid_is_given_out_once_and_again_after_a_free() {
        let nids = Nids::new(2, vec![]);
        let mut seen = HashSet::new();
        for i in 0..REGION_NIDS as usize * 3 {
            assert!(seen.insert(take(&nids, i % 2, &EMPTY)));
        }
        assert!(seen.iter().all(|n| n.0 >= RESERVED_NIDS));
        for nid in &seen {
            put(&nids, 0, *nid);
        }
        let regions = nids.region_count();
        for _ in 0..seen.len() - 64 {
            take(&nids, 0, &EMPTY);
        }
        assert!(
            nids.region_count() <= regions + 1,
            "freed nids are used before new regions"
        );
    }

    #[test]
    fn nids_freed_in_regions_of_an_earlier_mount_are_used_before_new_regions() {
        let nids = Nids::new(1, vec![0; 4]);
        for nid in REGION_NIDS..3 * REGION_NIDS {
            put(&nids, 0, Nid(nid));
        }
        let mut seen = HashSet::new();
        for _ in 0..2 * REGION_NIDS {
            assert!(seen.insert(take(&nids, 0, &FULL)));
        }
        assert_eq!(nids.region_count(), 4);
    }

    /// A checkpoint says how many regions there are: who opens the store next looks at no others.
    #[test]
    fn the_region_of_a_nid_that_recovery_finds_counts() {
        for in_use in [true, false] {
            let nids = Nids::new(1, vec![0; 2]);
            let found = Nid(4 * REGION_NIDS + 7);
            nids.recover(found, in_use, &EMPTY).unwrap();
            assert_eq!(nids.region_count(), 5);
        }
    }

    /// A quarter free on the devices, a quarter more since.
    #[test]
    fn free_nids_on_the_devices_and_in_memory_make_a_region_worth_a_lease_together() {
        let quarters = source::<false, _>(|_| Ok(vec![u64::MAX << 15; WORDS]));
        let nids = Nids::new(1, vec![0, 15 * WORDS as u32]);
        for word in 0..WORDS as u64 / 2 {
            for bit in 20..40 {
                put(&nids, 0, Nid(REGION_NIDS + word * 64 + bit));
            }
        }
        for _ in 0..(15 + 20 / 2) * WORDS {
            let (nid, _) = nids.take(0, &quarters).unwrap().unwrap();
            assert_eq!(nid.0 / REGION_NIDS, 1);
        }
        assert_eq!(nids.region_count(), 2);
    }

    /// A device did not return the bitmap of a region once: its nids stayed out of use until the next mount.
    #[test]
    fn a_region_that_could_not_be_read_is_read_again_when_nids_of_it_come_back() {
        let reads = AtomicU32::new(0);
        let source = source::<true, _>(|region| {
            let mut used = vec![u64::MAX; WORDS];
            if region == 1 {
                used[1..].fill(0);
                if reads.fetch_add(1, Ordering::Relaxed) == 0 {
                    return Err(());
                }
            }
            Ok(used)
        });
        let nids = Nids::new(1, vec![0, 63 * 256]);
        assert_eq!(nids.take(0, &source), Err(()));
        for i in 0..32 {
            nids.put(0, Nid(REGION_NIDS + i), 7);
        }
        for _ in 0..200 {
            let (nid, _) = nids.take(0, &source).unwrap().unwrap();
            assert_eq!(nid.0 / REGION_NIDS, 1);
        }
    }

    /// Each create that came to such a leaf failed, though others had free nids.
    #[test]
    fn a_leaf_that_cannot_be_read_is_passed_over() {
        let silent: Source<true, _, _> = Source {
            used: |_| Ok(vec![0; WORDS]),
            fails: |leaf| (1..=2).contains(&leaf),
        };
        let nids = Nids::new(1, vec![REGION_NIDS as u32]);
        let mut leaves = BTreeSet::new();
        let mut errors = 0;
        for _ in 0..4 * LEAF_NIDS {
            match nids.take(0, &silent) {
                Ok(nid) => leaves.extend(nid.map(|(nid, _)| nid.0 / LEAF_NIDS)),
                Err(()) => errors += 1,
            }
        }
        // Of two at a time one is told.
        assert_eq!(errors, 1);
        assert!(leaves.contains(&0) && leaves.contains(&3), "{leaves:?}");
    }

    /// Its damage cost one create an error, though other regions had free nids.
    #[test]
    fn a_damaged_region_is_passed_over() {
        let damaged = source::<false, _>(|region| match region {
            1 => Err(()),
            _ => Ok(vec![0; WORDS]),
        });
        let nids = Nids::new(1, vec![0, 63 * 256, 63 * 256]);
        let (nid, _) = nids.take(0, &damaged).unwrap().unwrap();
        assert_eq!(nid.0 / REGION_NIDS, 2);
    }

    /// A nid of a region not looked at yet was deleted, the checkpoint has seen that, and then
    /// the nid was used again. Given out before its region was loaded, it would be free once more.
    #[test]
    fn a_nid_used_again_is_not_free_because_the_table_has_its_deletion() {
        const DELETED: u64 = REGION_NIDS + 5;
        let behind = source::<false, _>(|region| {
            let mut used = vec![u64::MAX; WORDS];
            match region {
                0 => {}
                1 => used[0] &= !(1 << 5),
                _ => used.fill(0),
            }
            Ok(used)
        });
        let nids = Nids::new(1, vec![0; 2]);
        let mut live = HashSet::new();
        nids.put(0, Nid(DELETED), 7);
        // Enough to make the region worth a lease, in turn with creations.
        for i in 0..REGION_NIDS - 10 {
            nids.put(0, Nid(REGION_NIDS + 10 + i), 7);
            if i % 3 == 0 && i > REGION_NIDS / 2 {
                let (nid, _) = nids.take(0, &behind).unwrap().unwrap();
                assert!(live.insert(nid), "{nid} is given out twice");
            }
        }
        while nids.region_count() == 2 {
            let (nid, _) = nids.take(0, &behind).unwrap().unwrap();
            assert!(live.insert(nid), "{nid} is given out twice");
        }
    }

    #[test]
    fn two_threads_never_share_a_nid() {
        let nids = Nids::new(2, vec![]);
        let taken = base::thread::parallel(2, |shard| {
            let mut mine = Vec::new();
            for i in 0..40_000u64 {
                mine.push(take(&nids, shard, &EMPTY));
                if i % 3 == 0 {
                    put(
                        &nids,
                        shard,
                        mine.swap_remove((i as usize * 7) % mine.len()),
                    );
                }
            }
            mine
        });
        let all: HashSet<Nid> = taken.iter().flatten().copied().collect();
        assert_eq!(all.len(), taken[0].len() + taken[1].len());
    }

    /// More threads than shards, so that each ring has several takers.
    #[test]
    fn threads_that_share_a_shard_never_share_a_nid() {
        let nids = Nids::new(1, vec![]);
        let taken = base::thread::parallel(4, |_| {
            let mut mine = Vec::new();
            for i in 0..30_000u64 {
                mine.push(take(&nids, 0, &EMPTY));
                if i % 2 == 0 {
                    put(&nids, 0, mine.swap_remove((i as usize * 7) % mine.len()));
                }
            }
            mine
        });
        let all: HashSet<Nid> = taken.iter().flatten().copied().collect();
        assert_eq!(all.len(), 4 * 15_000);
        assert!(nids.region_count() <= 60_000 / 9408 + 2);
    }

    /// Regions that may be in use when `live` nodes are: invariant 3.
    fn bound(live: usize, shards: usize) -> u32 {
        let in_use = (WORDS as u32 - WORTH_WORDS) * 49;
        live as u32 / in_use + 1 + shards as u32
    }

    /// Shard 0 creates and shard 1 deletes; then each shard in turn creates what others delete.
    ///
    /// Without a lease that goes from shard to shard, each shard would keep a region that it took
    /// hardly anything from.
    #[test]
    fn regions_are_bounded_by_live_nids_when_one_shard_takes_and_others_put_back() {
        const LIVE: usize = 30_000;
        for shards in [2, 64] {
            let nids = Nids::new(shards, vec![]);
            let mut rng = base::rng::Rng::new(5);
            let mut live: Vec<Nid> = (0..LIVE).map(|_| take(&nids, 0, &EMPTY)).collect();
            for round in 0..10 * shards {
                for _ in 0..20_000 / shards {
                    let i = rng.below(LIVE as u64) as usize;
                    let new = take(&nids, round % shards, &EMPTY);
                    let old = std::mem::replace(&mut live[i], new);
                    put(&nids, (round + 1) % shards, old);
                }
            }
            let all: HashSet<Nid> = live.iter().copied().collect();
            assert_eq!(all.len(), LIVE);
            // One of all shards takes at a time.
            let regions = nids.region_count();
            assert!(regions <= bound(LIVE, 1), "{regions} regions");
        }
    }

    #[test]
    fn a_shard_takes_over_the_region_of_one_that_is_idle() {
        let nids = Nids::new(2, vec![]);
        // Each gets a region of its own, but for the first.
        for i in 0..2 * REGION_NIDS as usize {
            take(&nids, i % 2, &EMPTY);
        }
        let regions = nids.region_count();
        // Then one goes on alone. What it has left, a region that it opens because the other
        // was busy just now, and at last what the other has left.
        let half = REGION_NIDS / 2;
        let mut others = 0;
        while nids.region_count() <= regions + 1 {
            take(&nids, 0, &EMPTY);
            others += 1;
        }
        assert!(others > half + REGION_NIDS + half / 2, "{others}");
    }

    #[test]
    fn nids_whose_versions_are_unreadable_are_left_out_and_a_failure_loses_none() {
        use std::cell::Cell;
        struct Holes(Cell<u32>);
        impl NidSource for Holes {
            type Error = &'static str;
            fn may_pass(_: &&'static str) -> bool {
                false
            }
            fn used_nids(&self, _: u32) -> Result<Vec<u64>, Self::Error> {
                Ok(vec![0; WORDS])
            }
            fn last_versions(
                &self,
                first: Nid,
                wanted: &mut LeafNids,
            ) -> Result<Box<[u64; LEAF_NIDS as usize]>, Self::Error> {
                self.0.set(self.0.get() + 1);
                if self.0.get().is_multiple_of(3) {
                    return Err("no memory");
                }
                if first.0 / LEAF_NIDS % 2 == 1 {
                    *wanted = [0; LEAF_WORDS];
                }
                Ok(Box::new([0; LEAF_NIDS as usize]))
            }
        }
        let nids = Nids::new(1, vec![]);
        let source = Holes(Cell::new(0));
        let mut seen = HashSet::new();
        let mut failures = 0;
        while nids.region_count() <= 1 {
            match nids.take(0, &source) {
                Ok(taken) => assert!(seen.insert(taken.unwrap().0.0)),
                Err(_) => failures += 1,
            }
        }
        assert!(failures > 10);
        assert!(seen.iter().all(|nid| (nid / LEAF_NIDS).is_multiple_of(2)));
        let taken = seen.iter().filter(|nid| **nid < REGION_NIDS).count();
        // Half of the leaves are left out, or were given back with a failure.
        let rest = std::iter::from_fn(|| nids.region(0).take_leaf(0));
        let rest = rest.filter(|(leaf, _)| leaf.is_multiple_of(2));
        let rest: u32 = rest.flat_map(|(_, free)| free.map(u64::count_ones)).sum();
        let usable = REGION_NIDS / 2 - RESERVED_NIDS;
        assert_eq!(taken as u64 + rest as u64, usable);
    }
}

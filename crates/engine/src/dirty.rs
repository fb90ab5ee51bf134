//! What has changed since the last checkpoint: how much memory it holds, and how much the checkpoint will write.
//!
//! The two are bounds of different things and are counted apart. Memory is short when nodes are large that take few
//! bytes on the devices; room on the devices when many table pages change. As long as neither is, and the journal has
//! room, changes of a node go on meeting in one image.
//!
//! Invariants:
//! 1. `memory` has what each node takes that is on a dirty list or in the hands of a checkpoint, until the checkpoint
//!    lets go of it: no such node can be evicted. A node that changed again meanwhile counts twice.
//! 2. `images` has what the images of nodes take at most, but for changes too small to be charged yet, until the
//!    images count as live bytes of segments; `leaves` the pages of the node table that will change with them. Both
//!    together, `to_write`, are a bound. Leaf pages take as much as it has only when all that they name was
//!    scattered; `expected` has them as the last checkpoint found them, and is none.
//! 3. A checkpoint finds room for all of the bound. For `limit` that is so for ever: operations wait at twice that, and
//!    three times that is kept from data. Beyond it the bound may grow twice as much as what is expected, and six times as much
//!    is kept: so it is never more than two thirds of what is kept, and no more than a quarter of what is free
//!    when the limits are set. That room is given up when anybody else has need of it (`Store::give_way`).

use crate::node::Cell;
use crate::store::StoreOptions;
use crate::sum::{Padded, Sum};
use crate::table::ChangedLeaves;
use base::atomic::{AtomicI64, Ordering};
use base::sync::{Arc, Latch, rank};
use base::thread::lane;
use device::Array;
use format::table::LEAF_NIDS;
use format::{BLOCK_SIZE, Nid};
use std::ops::AddAssign;

/// Memory charged for a dirty node beyond its own: list entries and padding.
const OVERHEAD: i64 = 96;
/// Bytes that a changed leaf page of the node table costs a checkpoint, with its share of the
/// region pages above.
pub(crate) const LEAF_COST: i64 = 4160 + 64;
/// The most that a checkpoint begins at.
const WRITES_MOST: i64 = 1 << 30;
/// By how many times as much as what is expected the bound may grow beyond `limit` (invariant 3).
const BOUND_GROWTH: i64 = 2;
/// Least that a leaf page is expected to take.
const LEAF_LEAST: i64 = 512;
/// Least of all limits.
const LEAST: i64 = 32 << 10;

/// An entry of a dirty list. With the nid, so that a checkpoint sorts them and enters their images into
/// the node table without a look at cells that other cores have written.
#[derive(Debug)]
pub(crate) struct Dirty<C> {
    pub nid: Nid,
    pub cell: Arc<Cell<C>>,
}

impl<C> Clone for Dirty<C> {
    fn clone(&self) -> Self {
        Dirty {
            nid: self.nid,
            cell: Arc::clone(&self.cell),
        }
    }
}

/// What dirty nodes count for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Charge {
    pub memory: i64,
    pub image: i64,
}

impl Charge {
    /// Of a node that becomes dirty.
    pub fn of_dirty(memory: usize, image: usize) -> Charge {
        Charge {
            memory: memory as i64 + OVERHEAD,
            image: image as i64,
        }
    }
}

impl AddAssign for Charge {
    fn add_assign(&mut self, other: Charge) {
        self.memory += other.memory;
        self.image += other.image;
    }
}

/// What a dirty node was charged for, in one word: changing both takes one locked instruction. Either may be less than nothing for a while.
#[derive(Debug, Default)]
pub(crate) struct Charged(AtomicI64);

impl Charged {
    pub fn add(&self, more: Charge) {
        self.0.fetch_add(packed(more), Ordering::Relaxed);
    }

    /// Returns what was charged before.
    pub fn replace(&self, now: Charge) -> Charge {
        unpacked(self.0.swap(packed(now), Ordering::Relaxed))
    }

    /// Of a node that nobody else knows.
    pub fn set(&self, now: Charge) {
        self.0.store(packed(now), Ordering::Relaxed);
    }
}

/// Sums of packed charges are those of the charges.
fn packed(charge: Charge) -> i64 {
    (charge.memory << 32).wrapping_add(charge.image)
}

fn unpacked(word: i64) -> Charge {
    let image = i64::from(word as i32);
    Charge {
        memory: word.wrapping_sub(image) >> 32,
        image,
    }
}

#[derive(Debug)]
pub(crate) struct DirtyNodes<C> {
    pub lists: Vec<Padded<Latch<Vec<Dirty<C>>>>>,
    memory: Sum,
    images: Sum,
    pub leaves: DirtyLeaves,
    /// Memory at which a checkpoint begins.
    memory_limit: i64,
    /// Bytes to be written at which a checkpoint begins, however little room there is beside what is reserved.
    pub limit: i64,
    /// The same while there is much room.
    limit_most: i64,
    /// What holds now: less than `limit` when checkpoints have little room.
    limit_now: AtomicI64,
}

impl<C> DirtyNodes<C> {
    pub fn new(array: &Array, options: &StoreOptions, changed: Arc<ChangedLeaves>) -> Self {
        let shards = options.shards;
        let list = |i| Padded(Latch::keyed(rank::DIRTY_LIST, i as u64, Vec::new()));
        let (memory, limit) = (memory_limit(options), write_limit(array, options));
        // By how much the sums may be wrong for who looks at them.
        let slack = memory.min(limit) / 64;
        DirtyNodes {
            lists: (0..shards).map(list).collect(),
            memory: Sum::new(shards, slack),
            images: Sum::new(shards, slack),
            leaves: DirtyLeaves::new(changed, shards, slack),
            memory_limit: memory,
            limit,
            limit_most: (array_bytes(array) / 16).clamp(limit, WRITES_MOST.max(limit)),
            limit_now: AtomicI64::new(limit),
        }
    }

    /// The smaller one of what begins a checkpoint for good.
    pub fn least_limit(&self) -> i64 {
        self.memory_limit.min(self.limit)
    }

    /// The same of what holds now.
    pub fn least_limit_now(&self) -> i64 {
        self.memory_limit.min(self.limit_now())
    }

    pub fn charge(&self, charge: Charge) {
        self.memory.add(lane(), charge.memory);
        self.images.add(lane(), charge.image);
    }

    /// Images count as live bytes from now on.
    pub fn written(&self, bytes: i64) {
        self.images.add(lane(), -bytes);
    }

    /// The checkpoint let go of nodes.
    pub fn let_go(&self, memory: i64) {
        self.memory.add(lane(), -memory);
    }

    /// What a checkpoint begun now would have to write at most, roughly.
    pub fn to_write(&self) -> i64 {
        self.images.about() + self.leaves.count.about() * LEAF_COST
    }

    /// Changes hold so much memory that nothing but what must be should add to it.
    pub fn is_memory_short(&self) -> bool {
        self.memory.about() * 2 > self.memory_limit * 3
    }

    /// All that is charged now.
    pub fn charged(&self) -> Charge {
        Charge {
            memory: self.memory.exact(),
            image: self.images.exact(),
        }
    }

    /// What of that has no room in what is always kept.
    pub fn beyond_reserve(&self) -> i64 {
        (self.to_write() - 2 * self.limit).max(0) / 2 * 3
    }

    /// Anything waits for a checkpoint.
    pub fn any(&self) -> bool {
        self.memory.exact() > 0
    }

    /// How near it is to where operations wait, in thousandths; at half of that a checkpoint is to begin.
    #[inline]
    pub fn pressure(&self) -> i64 {
        self.pressure_with(0)
    }

    /// The same when so many bytes of nodes more have changed.
    #[inline]
    pub fn pressure_with(&self, more: i64) -> i64 {
        let (images, leaves, now) = (
            self.images.about() + more,
            self.leaves.count.about(),
            self.limit_now(),
        );
        let bound = (images + leaves * LEAF_COST) * 500 / self.bound(now);
        let memory = (self.memory.about() + more) * 500 / self.memory_limit;
        let least = bound.max(memory);
        match now > self.limit {
            true => least.max((images + leaves * self.leaves.expected()) * 500 / now),
            // Then the bound's limit is the same, and the bound more.
            false => least,
        }
    }

    /// The bound at which a checkpoint is to begin, for a limit of what is expected (invariant 3).
    fn bound(&self, now: i64) -> i64 {
        now + (now - self.limit).max(0) * (BOUND_GROWTH - 1)
    }

    pub fn limit_now(&self) -> i64 {
        self.limit_now.load(Ordering::Relaxed)
    }

    /// Sets the limit by the room that checkpoints have, and by what of it nobody else may have been promised, in
    /// bytes (invariant 3).
    pub fn adapt(&self, room: i64, unpromised: i64) {
        let always = (room / 8).clamp(LEAST, self.limit);
        let beyond = (room / (8 * BOUND_GROWTH)).min(self.limit_most) - self.limit;
        // Half of what nobody was promised stays for data at once: checkpoints shrink as it comes, and need not give way.
        let beyond = beyond.min(unpromised / (2 * 3 * BOUND_GROWTH)).max(0);
        self.limit_now.store(always + beyond, Ordering::Relaxed);
    }

    /// Bytes kept from data beyond what is always kept (invariant 3).
    pub fn kept(&self) -> i64 {
        (self.limit_now() - self.limit).max(0) * 3 * BOUND_GROWTH
    }
}

fn memory_limit(options: &StoreOptions) -> i64 {
    let half = options.node_cache_bytes / 2;
    let limit = options.dirty_bytes.unwrap_or(half.max(1 << 20));
    limit.clamp(LEAST as usize, 1 << 50) as i64
}

fn array_bytes(array: &Array) -> i64 {
    (array.geometry().total_blocks() * BLOCK_SIZE as u64) as i64
}

/// Bytes to write for which there is room always. Images take about as much memory, so there is no use for more.
fn write_limit(array: &Array, options: &StoreOptions) -> i64 {
    let by_size = (array_bytes(array) / 64).clamp(1 << 20, 256 << 20);
    by_size.min(memory_limit(options))
}

/// Chunks that only checkpoints and deletions may take: room for a checkpoint of all that may be
/// dirty (twice the limit, table pages included), with half as much again for segments that its workers open
/// (`Store::packers`) and for rounding.
pub(crate) fn reserve_chunks(array: &Array, options: &StoreOptions) -> u32 {
    let geometry = array.geometry();
    let chunk = geometry.chunk_bytes();
    let wanted = (write_limit(array, options) as u64 * 3).div_ceil(chunk) as u32 + 1;
    wanted.min(geometry.chunk_count / 4).max(2)
}

/// What writing the changed leaf pages of the node table will cost, so that changes scattered over many of them count for
/// that.
#[derive(Debug)]
pub(crate) struct DirtyLeaves {
    changed: Arc<ChangedLeaves>,
    count: Sum,
    /// Bytes that one is expected to take.
    expected: AtomicI64,
}

impl DirtyLeaves {
    /// For so many shards; the count may be wrong by what is worth `slack`.
    fn new(changed: Arc<ChangedLeaves>, shards: usize, slack: i64) -> Self {
        DirtyLeaves {
            changed,
            count: Sum::new(shards, slack / LEAF_COST),
            expected: AtomicI64::new(LEAF_COST),
        }
    }

    fn expected(&self) -> i64 {
        self.expected.load(Ordering::Relaxed)
    }

    /// A checkpoint wrote so many, in so many bytes: the next one's are expected to be as large, and somewhat more.
    pub fn wrote(&self, leaves: u32, bytes: u64) {
        if leaves > 0 {
            let mean = bytes as i64 / leaves as i64;
            let expected = (mean + mean / 8).clamp(LEAF_LEAST, LEAF_COST);
            self.expected.store(expected, Ordering::Relaxed);
        }
    }

    /// What changing these leaves adds to the next checkpoint.
    pub fn cost_of(&self, leaves: &[u64]) -> i64 {
        let clean = leaves.iter().filter(|leaf| !self.changed.has(**leaf));
        clean.count() as i64 * LEAF_COST
    }

    pub fn touch(&self, nid: Nid) {
        if self.changed.add(nid.0 / LEAF_NIDS) {
            self.count.add(lane(), 1);
        }
    }

    /// A checkpoint takes the dirty nodes and their leaves.
    pub fn begin(&self) {
        self.count.add(lane(), -(self.changed.begin() as i64));
    }

    /// It has entered all of them into the node table.
    pub fn entered(&self) {
        self.changed.entered();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::BlockDevice;
    use device::sim::SimDevice;
    use format::geometry::{Geometry, GeometryOptions};

    const SIZE: u64 = 1 << 30;

    fn dirty() -> DirtyNodes<()> {
        let device = SimDevice::new(SIZE, 1) as Arc<dyn BlockDevice>;
        let geometry = Geometry::plan(&[SIZE], GeometryOptions::default()).unwrap();
        let array = Array::create(vec![device], geometry, "test", [7; 16], [9; 16]).unwrap();
        let options = StoreOptions {
            dirty_bytes: Some(1 << 30),
            shards: 1,
            ..StoreOptions::default()
        };
        DirtyNodes::new(&array, &options, Arc::new(ChangedLeaves::new()))
    }

    /// Leaf pages change.
    fn touch(dirty: &DirtyNodes<()>, leaves: u64) {
        (0..leaves).for_each(|leaf| dirty.leaves.touch(Nid(leaf * LEAF_NIDS)));
    }

    /// The sums may be that much away.
    fn is_near(a: i64, b: i64) -> bool {
        (a - b).abs() <= 16
    }

    #[test]
    fn with_little_room_leaf_pages_count_as_the_largest() {
        let dirty = dirty();
        dirty.leaves.wrote(100, 100 * 800);
        touch(&dirty, 2000);
        dirty.charge(Charge {
            memory: 0,
            image: 1 << 20,
        });
        for room in [8 * dirty.limit, dirty.limit, 0] {
            dirty.adapt(room, i64::MAX);
            assert!(dirty.limit_now() <= dirty.limit);
            assert_eq!(dirty.kept(), 0);
            let bound = dirty.to_write() * 500 / dirty.limit_now();
            assert_eq!(dirty.pressure(), bound);
        }
        dirty.adapt(1 << 40, 0);
        assert_eq!(dirty.limit_now(), dirty.limit);
        assert_eq!(dirty.pressure(), dirty.to_write() * 500 / dirty.limit);
    }

    #[test]
    fn with_room_leaf_pages_count_as_the_last_ones_took() {
        let dirty = dirty();
        dirty.adapt(1 << 40, 1 << 40);
        let most = dirty.limit_now();
        assert_eq!(most, dirty.limit * 4);
        let images = 20 << 20;
        touch(&dirty, 2000);
        dirty.charge(Charge {
            memory: 0,
            image: images,
        });
        assert!(is_near(
            dirty.pressure(),
            (images + 2000 * LEAF_COST) * 500 / most
        ));
        dirty.leaves.wrote(2000, 2000 * 1600);
        assert!(is_near(
            dirty.pressure(),
            (images + 2000 * 1800) * 500 / most
        ));
        // None were written: nothing is learned from that.
        dirty.leaves.wrote(0, 0);
        assert!(is_near(
            dirty.pressure(),
            (images + 2000 * 1800) * 500 / most
        ));
    }

    #[test]
    fn what_is_kept_suffices_however_wrong_the_expectation_is() {
        for room in [SIZE as i64 / 4, SIZE as i64 / 2, SIZE as i64] {
            let dirty = dirty();
            dirty.leaves.wrote(100, 100);
            dirty.adapt(room, 1 << 40);
            let mut leaves = 0;
            while dirty.pressure() <= 1000 {
                leaves += 100;
                touch(&dirty, leaves);
            }
            let worst = leaves as i64 * LEAF_COST;
            let kept = dirty.limit * 3 + dirty.kept();
            assert!(worst <= kept / 100 * 68, "{worst} of {kept}");
            assert!(worst <= room / 100 * 27, "{worst} of {room}");
        }
    }
}

//! What a check remembers of inodes and blocks, as compactly as it can.

use base::sync::{Mutex, OnceLock, rank};
use engine::{Extent, SpaceMap};
use format::geometry::Geometry;
use format::table::REGION_NIDS;
use format::{Block, Nid};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// The nid is an inode; its type is in the low bits.
pub const INODE: u16 = 1 << 4;
/// The nid is another node, which belongs to an inode.
pub const OWNED: u16 = 1 << 5;
/// An owned node: some tree has it. A directory: some directory names it.
pub const CLAIMED: u16 = 1 << 6;
/// The nid may be in use, and its content is unreadable.
pub const UNREADABLE: u16 = 1 << 7;
/// An orphan directory lists it.
pub const LISTED: u16 = 1 << 8;
/// The inode's link count is 0.
pub const UNLINKED: u16 = 1 << 9;
/// A truncation of the inode is to be finished.
pub const TRUNCATING: u16 = 1 << 10;
/// The directory can be reached from the root.
pub const REACHED: u16 = 1 << 11;
/// The walk from the directory to the root is under way.
pub const WALKING: u16 = 1 << 12;
/// Something is wrong with it: of more nodes than findings are kept of.
pub const WRONG: u16 = 1 << 13;
/// The type bits, as in `d_type`.
pub const TYPE: u16 = 0xF;

/// Everything about one nid.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub flags: u16,
    pub generation: u64,
    pub nlink: u32,
    /// Names that refer to the inode.
    pub refs: u32,
    /// A directory's parent as its inode states it; of another inode, a directory that names
    /// it; of an owned node, the inode. 0: unknown.
    pub above: Nid,
}

impl Facts {
    pub fn is(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// File type as in `d_type`.
    pub fn kind(&self) -> u8 {
        (self.flags & TYPE) as u8
    }

    pub fn is_dir(&self) -> bool {
        self.is(INODE) && self.kind() == libc::DT_DIR
    }
}

/// A part of the table points at it: nothing yet of its nids.
#[derive(Default)]
struct Region {
    /// There once anything is known of a single nid, for it takes much memory and a table can point at more regions than have nodes.
    known: OnceLock<Known>,
    /// None of it can be read: each nid is [`UNREADABLE`].
    lost: AtomicBool,
}

/// By nid of a region.
struct Known {
    flags: Vec<AtomicU16>,
    generation: Vec<AtomicU64>,
    nlink: Vec<AtomicU32>,
    refs: Vec<AtomicU32>,
    above: Vec<AtomicU32>,
}

impl Region {
    /// Flags of all of its nids.
    fn common(&self) -> u16 {
        match self.lost.load(Ordering::Relaxed) {
            true => UNREADABLE,
            false => 0,
        }
    }

    fn known(&self) -> &Known {
        self.known.get_or_init(|| Known {
            flags: zeros(|| AtomicU16::new(0)),
            generation: zeros(|| AtomicU64::new(0)),
            nlink: zeros(|| AtomicU32::new(0)),
            refs: zeros(|| AtomicU32::new(0)),
            above: zeros(|| AtomicU32::new(0)),
        })
    }

    /// `None`: there is no such node.
    fn facts(&self, i: usize) -> Option<Facts> {
        let facts = match self.known.get() {
            Some(known) => Facts {
                flags: known.flags[i].load(Ordering::Relaxed) | self.common(),
                generation: known.generation[i].load(Ordering::Relaxed),
                nlink: known.nlink[i].load(Ordering::Relaxed),
                refs: known.refs[i].load(Ordering::Relaxed),
                above: Nid(known.above[i].load(Ordering::Relaxed) as u64),
            },
            None => Facts {
                flags: self.common(),
                generation: 0,
                nlink: 0,
                refs: 0,
                above: Nid(0),
            },
        };
        facts.is(INODE | OWNED | UNREADABLE).then_some(facts)
    }
}

/// Facts by nid, for the regions that nodes are in. All atomics are relaxed: a pass ends with
/// its threads joined, and within a pass only single values matter.
pub struct Inodes {
    regions: BTreeMap<u64, Region>,
}

fn zeros<T>(zero: impl Fn() -> T) -> Vec<T> {
    (0..REGION_NIDS).map(|_| zero()).collect()
}

impl Inodes {
    pub fn new(regions: &[u64]) -> Inodes {
        // Space maps are not the file system's.
        let limit = format::table::SPACE_MAP_FIRST / REGION_NIDS;
        let ours = regions.iter().filter(|index| **index < limit);
        Inodes {
            regions: ours.map(|index| (*index, Region::default())).collect(),
        }
    }

    fn at(&self, nid: Nid) -> Option<(&Region, usize)> {
        let region = self.regions.get(&(nid.0 / REGION_NIDS))?;
        Some((region, (nid.0 % REGION_NIDS) as usize))
    }

    /// `None`: there is no such node.
    pub fn get(&self, nid: Nid) -> Option<Facts> {
        let (region, i) = self.at(nid)?;
        region.facts(i)
    }

    /// Nothing of a region can be read.
    pub fn lose(&self, region: u64) {
        if let Some(region) = self.regions.get(&region) {
            region.lost.store(true, Ordering::Relaxed);
        }
    }

    /// Sets flags; returns those that were set before.
    pub fn mark(&self, nid: Nid, flags: u16) -> u16 {
        match self.at(nid) {
            Some((region, i)) => {
                let before = region.known().flags[i].fetch_or(flags, Ordering::Relaxed);
                before | region.common()
            }
            None => 0,
        }
    }

    pub fn clear(&self, nid: Nid, flags: u16) {
        if let Some((region, i)) = self.at(nid) {
            region.known().flags[i].fetch_and(!flags, Ordering::Relaxed);
        }
    }

    pub fn inode(&self, nid: Nid, flags: u16, generation: u64, nlink: u32, parent: Nid) {
        if let Some((region, i)) = self.at(nid) {
            let known = region.known();
            known.generation[i].store(generation, Ordering::Relaxed);
            known.nlink[i].store(nlink, Ordering::Relaxed);
            known.above[i].store(low(parent), Ordering::Relaxed);
            known.flags[i].fetch_or(flags | INODE, Ordering::Relaxed);
        }
    }

    pub fn set_above(&self, nid: Nid, above: Nid) {
        if let Some((region, i)) = self.at(nid) {
            region.known().above[i].store(low(above), Ordering::Relaxed);
        }
    }

    pub fn add_ref(&self, nid: Nid) {
        if let Some((region, i)) = self.at(nid) {
            region.known().refs[i].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An inode refers to one of its nodes: `Some(true)` for the first reference. `None`: no node
    /// can have this nid. The nodes of this pass may be seen later.
    pub fn claim(&self, nid: Nid, owner: Nid) -> Option<bool> {
        let (region, i) = self.at(nid)?;
        let known = region.known();
        let before = known.flags[i].fetch_or(CLAIMED, Ordering::Relaxed);
        if before & CLAIMED == 0 && before & INODE == 0 {
            known.above[i].store(low(owner), Ordering::Relaxed);
        }
        Some(before & CLAIMED == 0)
    }

    /// Every nid that is or may be in use, ascending.
    pub fn each(&self, mut each: impl FnMut(Nid, Facts)) {
        for (index, region) in &self.regions {
            for (i, nid) in (index * REGION_NIDS..)
                .take(REGION_NIDS as usize)
                .enumerate()
            {
                if let Some(facts) = region.facts(i) {
                    each(Nid(nid), facts);
                }
            }
        }
    }
}

/// Nids are below 2^29; one that is not names no node.
fn low(nid: Nid) -> u32 {
    u32::try_from(nid.0).unwrap_or(0)
}

/// Which blocks of the data area extents claim, and which more than one does: a bitmap for each chunk, once there is one.
pub struct Blocks {
    geometry: Geometry,
    chunks: Vec<Mutex<Claims>>,
    any_shared: AtomicBool,
}

#[derive(Default)]
struct Claims {
    once: Vec<u64>,
    again: Vec<u64>,
}

/// Runs of a comparison that are reported one by one.
pub struct Difference {
    pub extent: Extent,
    /// Allocated and unclaimed; else claimed and free.
    pub leaked: bool,
}

impl Blocks {
    pub fn new(geometry: &Geometry) -> Blocks {
        let chunk = |i| Mutex::keyed(rank::LEAF, i as u64, Claims::default());
        Blocks {
            any_shared: AtomicBool::new(false),
            chunks: (0..geometry.chunk_count).map(chunk).collect(),
            geometry: geometry.clone(),
        }
    }

    /// Claims blocks, as far as they lie in the data area; false: some were claimed before, and are shared now.
    pub fn claim(&self, extent: Extent) -> bool {
        let mut alone = true;
        let (mut block, end) = (extent.block.0, extent.block.0 + extent.len as u64);
        while block < end {
            let Some((chunk, start)) = self.geometry.chunk_of(Block(block)) else {
                return alone;
            };
            let len = (end - block).min((self.geometry.chunk_blocks - start) as u64) as u32;
            let mut claims = self.chunks[chunk as usize].lock();
            let Claims { once, again } = &mut *claims;
            if once.is_empty() {
                *once = vec![0; self.words()];
            }
            for index in start..start + len {
                let (word, bit) = (index as usize / 64, 1 << (index % 64));
                if once[word] & bit != 0 {
                    alone = false;
                    again.resize(once.len(), 0);
                    again[word] |= bit;
                }
                once[word] |= bit;
            }
            drop(claims);
            block += len as u64;
        }
        if !alone {
            self.any_shared.store(true, Ordering::Relaxed);
        }
        alone
    }

    /// Some blocks were claimed twice.
    pub fn any_shared(&self) -> bool {
        self.any_shared.load(Ordering::Relaxed)
    }

    /// The first of these blocks that was claimed twice.
    pub fn first_shared(&self, extent: Extent) -> Option<Block> {
        if !self.any_shared() {
            return None;
        }
        let (mut block, end) = (extent.block.0, extent.block.0 + extent.len as u64);
        while block < end {
            let (chunk, start) = self.geometry.chunk_of(Block(block))?;
            let len = (end - block).min((self.geometry.chunk_blocks - start) as u64) as u32;
            let claims = self.chunks[chunk as usize].lock();
            let shared = |index: &u32| {
                let word = claims.again.get(*index as usize / 64);
                word.is_some_and(|word| word >> (index % 64) & 1 == 1)
            };
            if !claims.again.is_empty()
                && let Some(index) = (start..start + len).find(shared)
            {
                return Some(Block(block + u64::from(index - start)));
            }
            block += u64::from(len);
        }
        None
    }

    pub fn is_shared(&self, block: Block) -> bool {
        self.first_shared(Extent { block, len: 1 }).is_some()
    }

    fn words(&self) -> usize {
        (self.geometry.chunk_blocks as usize).div_ceil(64)
    }

    /// Compares a chunk's claims with its space map, or with none at all, and forgets them.
    pub fn compare(&self, chunk: u32, map: Option<&SpaceMap>, mut each: impl FnMut(Difference)) {
        let Some(slot) = self.chunks.get(chunk as usize) else {
            return;
        };
        let claimed = std::mem::take(&mut slot.lock().once);
        let first = self.geometry.chunk_block(chunk).0;
        let mut run: Option<Difference> = None;
        for index in 0..self.geometry.chunk_blocks {
            let claim = claimed
                .get(index as usize / 64)
                .is_some_and(|word| word >> (index % 64) & 1 == 1);
            let allocated = map.is_some_and(|m| index < m.blocks() && m.is_allocated(index));
            match &mut run {
                Some(run) if claim != allocated && run.leaked == allocated => run.extent.len += 1,
                _ => {
                    if let Some(done) = run.take() {
                        each(done);
                    }
                    run = (claim != allocated).then_some(Difference {
                        extent: Extent {
                            block: Block(first + index as u64),
                            len: 1,
                        },
                        leaked: allocated,
                    });
                }
            }
        }
        if let Some(done) = run {
            each(done);
        }
    }

    /// The claims of a chunk, a bit for each block; empty when there are none.
    pub fn claims(&self, chunk: u32) -> Vec<u64> {
        self.chunks[chunk as usize].lock().once.clone()
    }

    /// Chunks with claims that nothing was compared with.
    pub fn left(&self) -> Vec<u32> {
        let chunks = (0..).zip(&self.chunks);
        chunks
            .filter(|(_, claims)| !claims.lock().once.is_empty())
            .map(|(chunk, _)| chunk)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table that was forged points at 32,512 regions, which took 11 GiB before any of it was looked at.
    #[test]
    fn a_region_takes_memory_once_there_is_something_of_it_to_know() {
        let inodes = Inodes::new(&[0, 1, 2]);
        let nid = |region: u64| Nid(region * REGION_NIDS + 7);
        inodes.lose(1);
        assert_eq!(inodes.mark(nid(2), OWNED), 0);
        let flags = |region| inodes.get(nid(region)).map(|facts| facts.flags);
        let all = [None, Some(UNREADABLE), Some(OWNED), None];
        assert_eq!([0, 1, 2, 3].map(flags), all);
        let known = inodes.regions.values().map(|r| r.known.get().is_some());
        assert_eq!(known.collect::<Vec<_>>(), [false, false, true]);
        let mut lost = 0;
        inodes
            .each(|nid, facts| lost += u64::from(nid.0 / REGION_NIDS == 1 && facts.is(UNREADABLE)));
        assert_eq!(lost, REGION_NIDS);
        // What others say of a lost one is kept beside that.
        assert_eq!(inodes.mark(nid(1), CLAIMED), UNREADABLE);
        assert_eq!(flags(1), Some(UNREADABLE | CLAIMED));
    }
}

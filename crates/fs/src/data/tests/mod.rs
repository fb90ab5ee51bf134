//! File data against a plain model, on simulated devices.

mod ahead;
mod behind;
mod clean;
mod crash;
mod ending;
mod failures;
mod flushes;
mod fragments;
mod groups;
mod guards;
mod model;
mod outgrow;
mod pace;
mod promises;
mod ranges;
mod shared;
mod stories;
mod stream;
mod tails;

use super::*;
use crate::content::{Body, Inode};
use base::clock::Clock;
use base::rng::Rng;
use device::sim::{PowerSwitch, SimDevice};
use device::{Array, BlockDevice};
use engine::{Need, StoreOptions};
use format::Nid;
use format::geometry::{Geometry, GeometryOptions};
use format::inode::{FIRST_ORPHANS, ORPHAN_DIRECTORIES};

/// Devices that lose power together, with a formatted store on them.
pub(super) struct World {
    pub switch: Arc<PowerSwitch>,
    pub devices: Vec<Arc<SimDevice>>,
    pub clock: Clock,
    pub options: DataOptions,
}

/// A mounted world.
pub(super) struct Mounted {
    pub store: Arc<Store<FsNode>>,
    pub files: Arc<Files>,
    pub owners: Owners,
}

impl World {
    pub fn new(seed: u64, mib: u64, frames: usize) -> World {
        let switch = PowerSwitch::new();
        let devices: Vec<Arc<SimDevice>> = (0..2)
            .map(|i| SimDevice::on_switch((mib << 20) / 2, seed ^ i, &switch))
            .collect();
        let world = World {
            switch,
            devices,
            clock: Clock::manual(1_000_000_000_000_000_000),
            options: DataOptions {
                cache_bytes: frames * BLOCK_SIZE,
                ..DataOptions::default()
            },
        };
        // What tests write lies on both.
        let geometry = GeometryOptions {
            stripe_bytes: Some(128 << 10),
            ..GeometryOptions::default()
        };
        let geometry = Geometry::plan(&[(mib << 20) / 2; 2], geometry).unwrap();
        let array = Array::create(world.handles(), geometry, "test", [7; 16], [9; 16]).unwrap();
        let array = Arc::new(array);
        Store::<FsNode>::format(&array, world.store_options()).unwrap();
        array.write_labels().unwrap();
        let mounted = world.mount();
        let store = &mounted.store;
        let fresh: Vec<_> = (FIRST_ORPHANS..FIRST_ORPHANS + ORPHAN_DIRECTORIES)
            .map(|nid| store.reserved_nid(Nid(nid)).unwrap())
            .collect();
        let mut op = store.begin(Need::Grow).unwrap();
        for fresh in fresh {
            let mut inode = Inode::new(libc::S_IFDIR, fresh.version(), world.clock.now());
            inode.body = Body::Orphans(Vec::new());
            op.create(fresh, FsNode::Inode(inode));
        }
        op.commit();
        mounted.close();
        world
    }

    fn handles(&self) -> Vec<Arc<dyn BlockDevice>> {
        let handle = |d: &Arc<SimDevice>| Arc::clone(d) as Arc<dyn BlockDevice>;
        self.devices.iter().map(handle).collect()
    }

    fn store_options(&self) -> StoreOptions {
        StoreOptions {
            background: false,
            workers: 1,
            shards: 1,
            node_cache_bytes: 1 << 20,
            clock: self.clock.clone(),
            ..StoreOptions::default()
        }
    }

    pub fn mount(&self) -> Mounted {
        self.mount_on(self.handles())
    }

    /// On these devices, which are its own or stand before them.
    pub fn mount_on(&self, devices: Vec<Arc<dyn BlockDevice>>) -> Mounted {
        let array = Array::assemble(devices, false).unwrap();
        let (store, _) = Store::open(Arc::new(array), self.store_options()).unwrap();
        let times = Arc::new(Times::new(self.clock.clone()));
        let pages = super::page_cache(&self.options).unwrap();
        let files = Files::new(Arc::clone(&store), times, pages, self.options.clone());
        let owners = Owners::new(&files);
        Mounted {
            store,
            files,
            owners,
        }
    }

    /// The power comes back; what was not flushed survives or not, by `rng`.
    pub fn restart(&mut self, rng: &mut Rng) {
        self.switch.restore();
        self.devices = self.devices.iter().map(|d| d.restart(rng)).collect();
    }
}

impl Mounted {
    /// A new empty file.
    pub fn make(&self) -> Ino {
        let fresh = self.store.reserve_nid().unwrap();
        let ino = fresh.nid();
        let mut op = self.store.begin(Need::Grow).unwrap();
        let inode = Inode::new(libc::S_IFREG | 0o644, fresh.version(), self.files.now());
        op.create(fresh, FsNode::Inode(inode));
        op.commit();
        ino
    }

    pub fn open(&self, ino: Ino) -> Arc<OpenFile> {
        self.files.open(&self.owners, ino, libc::O_RDWR).unwrap()
    }

    /// For calls past the cache.
    pub fn open_direct(&self, ino: Ino) -> Arc<OpenFile> {
        let flags = libc::O_RDWR | libc::O_DIRECT;
        self.files.open(&self.owners, ino, flags).unwrap()
    }

    /// Deletes a file as unlink does, blocks and all.
    pub fn delete(&self, ino: Ino) {
        self.files.release_data(ino).unwrap();
        let node = self.store.get(ino).unwrap();
        let mut op = self.store.begin(Need::Reclaim).unwrap();
        let slot = op.lock(&node).unwrap();
        op.delete(slot);
        op.commit();
    }

    pub fn inode(&self, ino: Ino) -> Inode {
        let content = self.store.get(ino).unwrap().into_read().unwrap();
        content.inode().unwrap().clone()
    }

    pub fn size(&self, ino: Ino) -> u64 {
        let inode = self.inode(ino);
        let volatile = self.files.volatile(ino, inode.generation);
        volatile.map_or(inode.size, |v| v.size)
    }

    /// All of a (small) file.
    pub fn contents(&self, ino: Ino) -> Vec<u8> {
        let file = self.open(ino);
        let mut buf = vec![0xEE; self.size(ino) as usize];
        assert_eq!(self.files.read(&file, 0, &mut buf).unwrap(), buf.len());
        buf
    }

    /// A commit of something else, which confirms those before it: what they vouch for may be written in place.
    pub fn commit_more(&self) {
        self.make();
        self.store.sync().unwrap();
    }

    pub fn write(&self, file: &OpenFile, offset: u64, data: &[u8]) {
        assert_eq!(self.files.write(file, offset, data).unwrap(), data.len());
    }

    pub fn close(self) {
        self.files.write_back_all().unwrap();
        self.store.close().unwrap();
    }

    /// The inode's block count is what its extents say, and extents do not overlap.
    pub fn check(&self, ino: Ino) -> u64 {
        let inode = self.inode(ino);
        let extents =
            extents::lookup(&self.store, &inode, 0..extents::PAGE_LIMIT, usize::MAX).unwrap();
        let mut floor = 0;
        for extent in &extents {
            assert!(extent.page >= floor, "extents overlap: {extents:?}");
            floor = extent.end();
        }
        let blocks: u64 = extents.iter().map(|e| e.len as u64).sum();
        assert_eq!(blocks, inode.blocks, "inode {ino}");
        blocks
    }

    /// Free blocks once everything freed is usable again.
    pub fn free_blocks(&self) -> u64 {
        self.store.sync().unwrap();
        self.store.space().free_blocks
    }
}

pub(super) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    Rng::new(seed).fill(&mut data);
    data
}

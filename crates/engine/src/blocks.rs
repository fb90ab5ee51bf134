//! Blocks of metadata in the page cache, beside those of files.
//!
//! A node that is not in memory, and a page of the node table, take part of a block, which holds many more of them. So
//! memory that files do not use keeps metadata from being read from the devices again, in the form that takes least.
//! Which of the two stays is decided by use, as between any pages.
//!
//! Invariants:
//! 1. A block here is a hint. Segments are written again without a look at it, so what it has at a place is taken only if
//!    that is an item with a right checksum, and the very one that the table names: a node of that nid and
//!    version, a page with that checksum.
//! 2. Only what was read from a device comes here, for who looks up nodes; who verifies what is on the devices
//!    reads it from there.

use crate::cache::{FileKey, PageCache};
use crate::error::Error;
use crate::items::{self, ReadItem};
use base::sync::OnceLock;
use device::Array;
use format::item::{self, ItemHeader, ItemKind, Place};
use format::{BLOCK_SIZE, Damage, Nid};
use std::sync::Arc;

/// Whose pages these are: no node has this nid.
const METADATA: FileKey = FileKey {
    nid: Nid(u64::MAX),
    generation: 0,
};

#[derive(Debug)]
pub(crate) struct Blocks {
    array: Arc<Array>,
    pages: OnceLock<Arc<PageCache>>,
}

impl Blocks {
    pub fn new(array: Arc<Array>) -> Blocks {
        Blocks {
            array,
            pages: OnceLock::new(),
        }
    }

    /// Blocks are kept in this cache from now on.
    pub fn keep_in(&self, pages: Arc<PageCache>) {
        // Another one would be a bug of the caller's; the first stays.
        let first = self.pages.set(pages).is_ok();
        debug_assert!(first, "one file system has this store");
    }

    /// [`items::read_node`], from memory if it is there.
    pub fn node(
        &self,
        nid: Nid,
        version: u64,
        place: Place,
    ) -> Result<Result<ReadItem, Damage>, Error> {
        self.item(place, |header| items::check_node(header, nid, version))
    }

    /// [`items::read_page`], from memory if it is there.
    pub fn page(
        &self,
        place: Place,
        kind: ItemKind,
        id: u64,
        crc: u32,
    ) -> Result<Result<ReadItem, Damage>, Error> {
        self.item(place, |header| items::check_page(header, kind, id, crc))
    }

    /// [`items::read_page`].
    pub fn stored_page(
        &self,
        place: Place,
        kind: ItemKind,
        id: u64,
        crc: u32,
    ) -> Result<Result<ReadItem, Damage>, Error> {
        items::read_page(&self.array, place, kind, id, crc)
    }

    fn item(
        &self,
        place: Place,
        check: impl Fn(&ItemHeader) -> Result<(), Damage>,
    ) -> Result<Result<ReadItem, Damage>, Error> {
        let Some(pages) = self.pages.get() else {
            let read = items::read_item(&self.array, place)?;
            return Ok(read.and_then(|item| check(&item.header).map(|()| item)));
        };
        if let Some(found) = look(self.array.checksum_seed(), pages, place)
            && check(&found.header).is_ok()
        {
            return Ok(Ok(found));
        }
        let read = items::read_blocks(&self.array, place, |block, bytes| {
            pages.keep(METADATA, block, bytes);
        })?;
        Ok(read.and_then(|item| check(&item.header).map(|()| item)))
    }
}

/// The item at a place, if all its blocks are in memory and it is sound.
fn look(seed: u32, pages: &PageCache, place: Place) -> Option<ReadItem> {
    if place.is_none() || place.len as usize > item::ITEM_MAX {
        return None;
    }
    let mut bytes = vec![0; place.len as usize];
    let (mut at, mut rest) = (place.byte, &mut bytes[..]);
    while !rest.is_empty() {
        let offset = (at % BLOCK_SIZE as u64) as usize;
        let here = rest.len().min(BLOCK_SIZE - offset);
        let (part, after) = rest.split_at_mut(here);
        if !pages.look(METADATA, at / BLOCK_SIZE as u64, offset, part) {
            return None;
        }
        (at, rest) = (at + here as u64, after);
    }
    ReadItem::new(seed, bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::AlignedBuf;
    use device::sim::SimDevice;
    use device::{BlockDevice, Durability};
    use format::geometry::{Geometry, GeometryOptions};

    const SIZE: u64 = 64 << 20;

    /// A device whose content changes without the cache's knowledge.
    struct World {
        array: Arc<Array>,
        pages: Arc<PageCache>,
        blocks: Blocks,
    }

    impl World {
        fn new() -> World {
            let device = SimDevice::new(SIZE, 1) as Arc<dyn BlockDevice>;
            let geometry = Geometry::plan(&[SIZE], GeometryOptions::default()).unwrap();
            let array = Array::create(vec![device], geometry, "test", [7; 16], [9; 16]);
            let array = Arc::new(array.unwrap());
            let (pages, blocks) = (
                Arc::new(PageCache::new(1 << 20)),
                Blocks::new(array.clone()),
            );
            blocks.keep_in(Arc::clone(&pages));
            World {
                array,
                pages,
                blocks,
            }
        }

        /// Puts images of these nodes, of version 1, into a segment; returns their places.
        fn write(&self, nids: &[u64], payload: &[u8]) -> Vec<Place> {
            let start = self.array.geometry().chunk_block(0).byte();
            let (mut bytes, mut places) = (Vec::new(), Vec::new());
            for nid in nids {
                let at = bytes.len();
                let put = |out: &mut Vec<u8>| out.extend_from_slice(payload);
                item::encode(
                    self.array.checksum_seed(),
                    &mut bytes,
                    ItemKind::Node,
                    3,
                    *nid,
                    1,
                    put,
                );
                places.push(Place {
                    byte: start + at as u64,
                    len: (bytes.len() - at) as u32,
                });
            }
            bytes.resize(bytes.len().next_multiple_of(BLOCK_SIZE), 0);
            let written = self.array.write(start, &bytes, Durability::Volatile);
            written.unwrap();
            places
        }

        fn node(&self, nid: u64, place: Place) -> Option<Vec<u8>> {
            let read = self.blocks.node(Nid(nid), 1, place).unwrap();
            read.ok().map(|item| item.payload().to_vec())
        }
    }

    #[test]
    fn a_block_that_was_read_serves_all_that_lies_in_it() {
        let world = World::new();
        let places = world.write(&[70, 71, 72], &[5; 3000]);
        assert_eq!(world.node(70, places[0]), Some(vec![5; 3000]));
        world.write(&[0], &[0; 12_000]);
        assert_eq!(world.node(70, places[0]), Some(vec![5; 3000]));
        // The second goes on in a block that nobody has read.
        assert_eq!(world.node(71, places[1]), None);
        assert!(world.pages.dirty_files().is_empty());
    }

    #[test]
    fn what_was_written_over_is_read_again() {
        let world = World::new();
        let places = world.write(&[70, 71], &[5; 100]);
        assert_eq!(world.node(70, places[0]), Some(vec![5; 100]));
        // The segment was free meanwhile, and has other nodes now, and a new block in the cache then.
        assert_eq!(world.write(&[80, 81], &[6; 100]), places);
        assert_eq!(world.node(80, places[0]), Some(vec![6; 100]));
        assert_eq!(world.node(70, places[0]), None);
        world.write(&[0], &[0; 300]);
        assert_eq!(world.node(81, places[1]), Some(vec![6; 100]));
    }

    #[test]
    fn damage_is_not_kept() {
        let world = World::new();
        let places = world.write(&[70], &[5; 100]);
        let mut bytes = AlignedBuf::zeroed(BLOCK_SIZE);
        let start = places[0].byte;
        world.array.read(start, &mut bytes).unwrap();
        let sound = bytes.to_vec();
        bytes[50] ^= 1;
        let put = |bytes: &[u8]| world.array.write(start, bytes, Durability::Volatile);
        put(&bytes).unwrap();
        assert_eq!(world.node(70, places[0]), None);
        put(&sound).unwrap();
        assert_eq!(world.node(70, places[0]), Some(vec![5; 100]));
    }
}

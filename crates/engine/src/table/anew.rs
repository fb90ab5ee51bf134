//! Pages of the node table that are lost, made anew of the pages below them, to see whether those are what they pointed at.
//!
//! A page above leaves follows from those below it: it has their pointers, with their checksums, and a bitmap; and the checkpoint
//! that wrote it wrote one of them at least, the newest. So if what is made of pages that a search found has the checksum
//! that the pointer to the lost page says, then they are what it pointed at, and neither an older state of that nor less.
//!
//! That the counts of nodes and of live bytes add up would prove less: an older state often has as many of both. A page that
//! a repair wrote without any below it is not recognized; what it pointed at counts as uncertain then.

use super::{BITMAP_WORDS, Entry, MapPage, encode_region};
use format::U64;
use format::item::{self, ItemKind, ItemPointer};
use format::table::{LEAF_NIDS, MAP_REGIONS, REGION_LEAVES};
use zerocopy::IntoBytes;

/// A page that a search found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// As the page above would have it.
    pub pointer: ItemPointer,
    /// Of the checkpoint that wrote it.
    pub sequence: u64,
}

/// Whether a region's page at `lost` pointed at these leaf pages, and no others; they come with their places in the region, and
/// with their entries. Checksums of items begin with `seed`.
pub(crate) fn is_region<'f>(
    seed: u32,
    region: u64,
    lost: ItemPointer,
    leaves: impl Iterator<Item = (u64, Found, &'f [Entry])>,
) -> bool {
    let mut pointers = [ItemPointer::zeroed(); REGION_LEAVES as usize];
    let mut bitmap = [0; BITMAP_WORDS];
    let mut newest = 0;
    for (leaf, found, entries) in leaves {
        pointers[leaf as usize] = found.pointer;
        newest = newest.max(found.sequence);
        let used = (leaf * LEAF_NIDS..).zip(entries);
        for (bit, _) in used.filter(|(_, entry)| !entry.place.is_none()) {
            bitmap[bit as usize / 64] |= 1 << (bit % 64);
        }
    }
    let (page, free) = encode_region(&pointers, &bitmap);
    stamp(seed, ItemKind::TableRegion, region, newest, &page, free) == lost.stamp
}

/// The map page at `lost`, if it pointed at these region pages, and no others; they come with their places in it.
pub(crate) fn map(
    seed: u32,
    map: u64,
    lost: ItemPointer,
    regions: impl Iterator<Item = (u64, Found)>,
) -> Option<MapPage> {
    let mut page = Box::new([ItemPointer::zeroed(); MAP_REGIONS as usize]);
    let mut newest = 0;
    for (region, found) in regions {
        page[region as usize] = found.pointer;
        newest = newest.max(found.sequence);
    }
    let same = stamp(seed, ItemKind::TableMap, map, newest, page.as_bytes(), 0) == lost.stamp;
    same.then_some(page)
}

/// What the pointer to such a page says of it.
fn stamp(seed: u32, kind: ItemKind, id: u64, sequence: u64, page: &[u8], free: u64) -> U64 {
    let crc = item::encode(seed, &mut Vec::new(), kind, 0, id, sequence, |out| {
        out.extend_from_slice(page);
    });
    U64::new(u64::from(crc) | free << 32)
}

//! The node table on disk: a copy-on-write radix tree of items.
//!
//! ```text
//! checkpoint record ─ 128 roots ─► map page: 256 regions ─► region page: 64 leaves + bitmap
//!                                                            └► leaf page: 256 node entries
//! ```

use crate::item::PAYLOAD_MAX;
use crate::packed::{NUMBER_MAX, number, put_number, signed, unsigned};
use crate::{COUNTER_MAX, Damage, Nid};

/// Node entries in a leaf page.
pub const LEAF_NIDS: u64 = 256;
/// Leaf pages in a region.
pub const REGION_LEAVES: u64 = 64;
/// Nids in a region.
pub const REGION_NIDS: u64 = LEAF_NIDS * REGION_LEAVES;
/// Regions in a map page.
pub const MAP_REGIONS: u64 = 256;
/// Map pages that the checkpoint record points at.
pub const ROOTS: u64 = 128;
/// Nids at or above this do not exist.
pub const NID_LIMIT: u64 = ROOTS * MAP_REGIONS * REGION_NIDS;
/// Bytes of a region's allocation bitmap (bit set: nid in use).
pub const REGION_BITMAP_BYTES: usize = (REGION_NIDS / 8) as usize;
/// Payload of a region page: 64 pointers, then the bitmap.
pub const REGION_PAGE_BYTES: usize = REGION_LEAVES as usize * 16 + REGION_BITMAP_BYTES;

/// The space map of chunk `c` has nid `SPACE_MAP_FIRST + c`; ordinary nids lie below.
pub const SPACE_MAP_FIRST: u64 = (ROOTS - 1) * MAP_REGIONS * REGION_NIDS;
/// Nids below this are given out by number at mkfs, never by the allocator.
pub const RESERVED_NIDS: u64 = 64;

/// The node kind of a space map; file-system kinds start at [`FIRST_FS_KIND`].
pub const KIND_SPACE_MAP: u8 = 1;
pub const FIRST_FS_KIND: u8 = 16;
/// Node kinds are below this.
pub const KIND_LIMIT: u8 = 32;

pub fn space_map_nid(chunk: u32) -> Nid {
    Nid(SPACE_MAP_FIRST + chunk as u64)
}

packed! {
    /// One of the 256 entries of a leaf page of the node table, which follow each other in the order of their nids.
    LeafEntry {
        /// 0: there is no image. Else twice the padded length / 8 of the newest checkpointed one, plus 1 if `distance` is there.
        size: "number",
        /// How far from the end of the image that the entry before has (the last one that has any; else from address 0)
        /// this image begins, / 8; without it, right there.
        distance: "number with a sign",
        /// Version of that image, or of the deletion; never reset, so that deltas of an
        /// earlier use of the nid are told from those of a later one.
        version: "number",
    }
}

/// What the node table says of a nid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeEntry {
    /// The image's place, packed as in `ItemPointer`; 0: no node.
    pub place: u64,
    pub version: u64,
}

/// The entries of one leaf page.
pub type LeafEntries = [NodeEntry; LEAF_NIDS as usize];

/// Bits of a packed place for its length.
const LEN_BITS: u32 = 12;
const LEN_MASK: u64 = (1 << LEN_BITS) - 1;
/// Bytes of a leaf page, at most.
pub const LEAF_PAGE_MAX: usize = LEAF_NIDS as usize * (2 + 2 * NUMBER_MAX);
const _: () = assert!(LEAF_PAGE_MAX <= PAYLOAD_MAX);

/// Appends a leaf page.
pub fn encode_leaf(entries: &LeafEntries, out: &mut Vec<u8>) {
    let mut end = 0;
    for entry in entries {
        let (start, len) = (entry.place >> LEN_BITS, entry.place & LEN_MASK);
        let distance = start as i64 - end as i64;
        match len {
            0 => out.push(0),
            _ if distance == 0 => put_number(out, len << 1),
            _ => {
                put_number(out, len << 1 | 1);
                put_number(out, unsigned(distance));
            }
        }
        put_number(out, entry.version);
        if len > 0 {
            end = start + len;
        }
    }
}

/// Reads a leaf page; total over any bytes.
pub fn decode_leaf(mut bytes: &[u8]) -> Result<Box<LeafEntries>, Damage> {
    let damage = |what: &str| Damage::new("leaf page", what);
    let mut next = || -> Result<u64, Damage> {
        let (found, rest) = number(bytes).ok_or_else(|| damage("cut short"))?;
        bytes = rest;
        Ok(found)
    };
    let mut entries = Box::new([NodeEntry::default(); LEAF_NIDS as usize]);
    let mut end = 0u64;
    for entry in entries.iter_mut() {
        let size = next()?;
        let len = size >> 1;
        let distance = match size & 1 {
            0 => 0,
            _ => match signed(next()?) {
                0 => return Err(damage("a distance that says nothing")),
                distance => distance,
            },
        };
        if size > 0 {
            let start = end.checked_add_signed(distance);
            let start = start.filter(|start| *start < 1 << (u64::BITS - LEN_BITS));
            let start = start.ok_or_else(|| damage("a place out of range"))?;
            if len == 0 || len > LEN_MASK {
                return Err(damage("a length out of range"));
            }
            entry.place = start << LEN_BITS | len;
            end = start + len;
        }
        entry.version = next()?;
        if entry.version > COUNTER_MAX {
            return Err(damage("a version out of range"));
        }
    }
    match bytes.is_empty() {
        true => Ok(entries),
        false => Err(damage("longer than its entries")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::Place;

    fn encoded(entries: &LeafEntries) -> Vec<u8> {
        let mut out = Vec::new();
        encode_leaf(entries, &mut out);
        out
    }

    fn sample() -> LeafEntries {
        let mut entries = [NodeEntry::default(); LEAF_NIDS as usize];
        let mut byte = 1 << 40;
        for (i, entry) in (0..).zip(entries.iter_mut()) {
            entry.version = [1, 1, 200, 0][i as usize % 4] << (i / 8);
            if i % 5 == 4 {
                continue;
            }
            let len = if i % 7 == 0 { 16 << 10 } else { 40 };
            // Now and then elsewhere, before or behind.
            byte = if i % 16 == 9 { (i % 32) << 30 } else { byte };
            entry.place = Place { byte, len }.pack();
            byte += len as u64;
        }
        entries[255].place = u64::MAX;
        entries[255].version = COUNTER_MAX;
        entries
    }

    #[test]
    fn leaf_pages_survive_a_round_trip_and_neighbours_take_two_bytes() {
        let entries = sample();
        let page = encoded(&entries);
        assert_eq!(*decode_leaf(&page).unwrap(), entries);
        let mut near = [NodeEntry::default(); LEAF_NIDS as usize];
        assert_eq!(encoded(&near).len(), 512);
        for (i, entry) in (0..).zip(near.iter_mut()) {
            let byte = (1 << 36) + i * 40;
            entry.place = Place { byte, len: 40 }.pack();
            entry.version = 1;
        }
        assert!(encoded(&near).len() <= 512 + NUMBER_MAX);
        assert_eq!(*decode_leaf(&encoded(&near)).unwrap(), near);
    }

    /// The version of the next change was a sum that overflowed.
    #[test]
    fn a_version_that_nothing_can_follow_is_damage() {
        let mut entries = sample();
        for version in [COUNTER_MAX + 1, u64::MAX] {
            entries[7].version = version;
            assert!(decode_leaf(&encoded(&entries)).is_err());
        }
    }

    #[test]
    fn any_bytes_are_a_page_in_its_one_form_or_damage() {
        let page = encoded(&sample());
        for cut in 0..page.len() {
            assert!(decode_leaf(&page[..cut]).is_err());
        }
        assert!(decode_leaf(&[&page[..], &[0]].concat()).is_err());
        for at in 0..page.len() {
            for value in [0, 1, 2, 0x7F, 0x80, 0xFF, page[at] ^ 1] {
                let mut other = page.clone();
                other[at] = value;
                if let Ok(entries) = decode_leaf(&other) {
                    assert_eq!(encoded(&entries), other);
                }
            }
        }
    }
}

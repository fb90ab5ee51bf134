//! Items: checksummed, self-describing byte strings packed 8-byte aligned into segments.
//! Node images, node-table pages and space-table pages are items.

use crate::{Damage, U16, U32, U64, checksum};
use zerocopy::{FromBytes, IntoBytes};

/// Items start at multiples of this many bytes.
pub const ITEM_ALIGN: usize = 8;
/// The largest item with its header, in bytes: the bound on a node image.
pub const ITEM_MAX: usize = 16 << 10;
/// The largest item payload.
pub const PAYLOAD_MAX: usize = ITEM_MAX - ItemHeader::SIZE;
const _: () = assert!(ITEM_MAX / ITEM_ALIGN < 1 << 12 && PAYLOAD_MAX <= u16::MAX as usize);

layout! {
    /// Where an item is: 16 bytes, used in the node table and in every table page.
    pub struct ItemPointer: 16 {
        /// Byte address / 8 in the high 52 bits, padded length / 8 in the low 12; 0: none.
        pub place: U64,
        /// For nodes the version; for table pages the CRC-32C in the low 32 bits and the
        /// number of free nids below in the high 32.
        pub stamp: U64,
    }

    /// Header of an item.
    pub struct ItemHeader: 24 {
        /// CRC-32C of the rest of the header and the payload, begun with that of the label's `hash_key`: data of files and what a former file system left must not pass for an item.
        pub crc: U32,
        /// What the payload is; see `ItemKind`.
        pub kind: u8,
        /// Node kind, for node images; else 0.
        pub node_kind: u8,
        /// Payload bytes.
        pub len: U16,
        /// Nid, or table page index.
        pub id: U64,
        /// Node version, or the checkpoint's sequence number.
        pub version: U64,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ItemKind {
    Node = 1,
    TableLeaf = 2,
    TableRegion = 3,
    TableMap = 4,
    SpacePage = 5,
    SpaceRoot = 6,
}

impl ItemKind {
    pub fn from_byte(byte: u8) -> Option<Self> {
        use ItemKind::*;
        [Node, TableLeaf, TableRegion, TableMap, SpacePage, SpaceRoot]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// Byte address and padded length of an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place {
    pub byte: u64,
    pub len: u32,
}

impl Place {
    pub const NONE: Place = Place { byte: 0, len: 0 };

    pub fn is_none(self) -> bool {
        self.len == 0
    }

    pub fn pack(self) -> u64 {
        let unit = ITEM_ALIGN as u64;
        debug_assert!(self.byte.is_multiple_of(unit) && self.len.is_multiple_of(unit as u32));
        (self.byte / unit) << 12 | (self.len as u64 / unit)
    }

    pub fn unpack(raw: u64) -> Place {
        Place {
            byte: (raw >> 12) * ITEM_ALIGN as u64,
            len: (raw & 0xFFF) as u32 * ITEM_ALIGN as u32,
        }
    }
}

/// Bytes an item with `payload` bytes takes in a segment.
pub fn padded_len(payload: usize) -> usize {
    (ItemHeader::SIZE + payload).next_multiple_of(ITEM_ALIGN)
}

/// Appends an item to `out`, padded; returns its checksum, which begins with `seed`: users do not know it, and nothing they write to a file passes for an item.
pub fn encode(
    seed: u32,
    out: &mut Vec<u8>,
    kind: ItemKind,
    node_kind: u8,
    id: u64,
    version: u64,
    payload: impl FnOnce(&mut Vec<u8>),
) -> u32 {
    let start = out.len();
    debug_assert!(start.is_multiple_of(ITEM_ALIGN));
    out.extend_from_slice(&[0; ItemHeader::SIZE]);
    payload(out);
    let len = out.len() - start - ItemHeader::SIZE;
    assert!(len <= PAYLOAD_MAX, "item of {len} bytes is over the bound");
    let mut header = ItemHeader::zeroed();
    header.kind = kind as u8;
    header.node_kind = node_kind;
    header.len = U16::new(len as u16);
    header.id = U64::new(id);
    header.version = U64::new(version);
    out[start..start + ItemHeader::SIZE].copy_from_slice(header.as_bytes());
    let crc = checksum(seed, &out[start + 4..]);
    out[start..start + 4].copy_from_slice(&crc.to_le_bytes());
    out.resize(start + padded_len(len), 0);
    crc
}

/// What an encoded item is: its kind and node kind.
pub fn kinds(bytes: &[u8]) -> Option<(ItemKind, u8)> {
    let (header, _) = ItemHeader::ref_from_prefix(bytes).ok()?;
    Some((ItemKind::from_byte(header.kind)?, header.node_kind))
}

/// Where at or after `at` an item can begin, so that a search need not decode what is none; `None`: nowhere.
pub fn next(bytes: &[u8], at: usize) -> Option<usize> {
    let offset = core::mem::offset_of!(ItemHeader, kind);
    let rest = bytes.get(at..)?;
    let places = rest.chunks_exact(ITEM_ALIGN);
    // A header is longer than the alignment, and the kind in its first part.
    let found = places
        .map(|place| place[offset])
        .position(|kind| ItemKind::from_byte(kind).is_some());
    found.map(|i| at + i * ITEM_ALIGN)
}

/// Checks and splits the item at the start of `bytes`, whose checksum begins with `seed`.
pub fn decode(seed: u32, bytes: &[u8]) -> Result<(ItemHeader, &[u8]), Damage> {
    let damage = |what: &str| Damage::new("item", what);
    let (header, rest) =
        ItemHeader::read_from_prefix(bytes).map_err(|_| damage("shorter than its header"))?;
    let len = header.len.get() as usize;
    if ItemKind::from_byte(header.kind).is_none() || len > PAYLOAD_MAX || len > rest.len() {
        return Err(damage("kind or length out of range"));
    }
    if checksum(seed, &bytes[4..ItemHeader::SIZE + len]) != header.crc.get() {
        return Err(damage("checksum does not match"));
    }
    Ok((header, &rest[..len]))
}

impl ItemPointer {
    pub fn place(&self) -> Place {
        Place::unpack(self.place.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u32 = 0xBEEF;

    #[test]
    fn an_item_survives_a_round_trip_and_no_flipped_byte() {
        let mut out = Vec::new();
        encode(SEED, &mut out, ItemKind::Node, 3, 77, 9, |o| {
            o.extend_from_slice(b"payload")
        });
        assert_eq!(out.len(), 32);
        let (header, payload) = decode(SEED, &out).unwrap();
        assert_eq!(
            (header.id.get(), header.version.get(), payload),
            (77, 9, &b"payload"[..])
        );
        assert!(decode(SEED + 1, &out).is_err());
        for i in 0..ItemHeader::SIZE + 7 {
            let mut bad = out.clone();
            bad[i] ^= 1;
            assert!(decode(SEED, &bad).is_err(), "byte {i}");
        }
    }

    #[test]
    fn a_search_finds_every_item_and_stops_at_little_else() {
        let mut out = vec![0; 4096];
        let mut wanted = Vec::new();
        for (i, len) in [0, 1, 100, 3000].into_iter().enumerate() {
            out.resize(out.len() + i * ITEM_ALIGN, 0);
            wanted.push(out.len());
            encode(SEED, &mut out, ItemKind::Node, 3, 77, 9, |o| {
                o.resize(o.len() + len, 0)
            });
        }
        out.resize(out.len() + 800, 0);
        let (mut at, mut found) = (0, Vec::new());
        while let Some(place) = next(&out, at) {
            let (_, payload) = decode(SEED, &out[place..]).unwrap();
            found.push(place);
            at = place + padded_len(payload.len());
        }
        assert_eq!(found, wanted);
        assert_eq!(next(&out[..out.len() - 1], out.len()), None);
    }

    #[test]
    fn a_place_packs() {
        let place = Place {
            byte: (1 << 54) + 8,
            len: 16 << 10,
        };
        assert_eq!(Place::unpack(place.pack()), place);
    }
}

//! Reading items from the array.

use crate::error::Error;
use device::{AlignedBuf, Array, Io};
use format::BLOCK_SIZE;
use format::item::{self, ItemHeader, ItemKind, Place};
use format::{Damage, Nid};
use std::ops::Range;

/// The bytes of an item.
pub(crate) struct ReadItem {
    bytes: Vec<u8>,
    len: usize,
    pub header: ItemHeader,
}

impl ReadItem {
    /// Of all bytes of a place.
    pub fn new(seed: u32, bytes: Vec<u8>) -> Result<ReadItem, Damage> {
        let (header, payload) = item::decode(seed, &bytes)?;
        let len = payload.len();
        if item::padded_len(len) != bytes.len() {
            return Err(Damage::new("item", "length differs from its pointer's"));
        }
        Ok(ReadItem { bytes, len, header })
    }

    pub fn payload(&self) -> &[u8] {
        &self.bytes[ItemHeader::SIZE..ItemHeader::SIZE + self.len]
    }
}

/// Reads the item at `place`. The outer error is the device's, the inner one the bytes'.
pub(crate) fn read_item(array: &Array, place: Place) -> Result<Result<ReadItem, Damage>, Error> {
    read_blocks(array, place, |_, _| {})
}

/// The same; `each` gets the blocks that were read, with their numbers.
pub(crate) fn read_blocks(
    array: &Array,
    place: Place,
    each: impl Fn(u64, &[u8]),
) -> Result<Result<ReadItem, Damage>, Error> {
    let block = BLOCK_SIZE as u64;
    let first = place.byte / block * block;
    let end = (place.byte + place.len as u64).next_multiple_of(block);
    let limit = array.geometry().total_blocks() * block;
    if place.is_none() || end > limit || place.len as usize > item::ITEM_MAX {
        return Ok(Err(Damage::new("item pointer", "points outside the array")));
    }
    let mut bytes = AlignedBuf::zeroed((end - first) as usize);
    array.read(first, &mut bytes)?;
    for (number, block) in (first / block..).zip(bytes.chunks_exact(BLOCK_SIZE)) {
        each(number, block);
    }
    let at = (place.byte - first) as usize;
    let bytes = bytes[at..at + place.len as usize].to_vec();
    Ok(ReadItem::new(array.checksum_seed(), bytes))
}

/// Bytes between two items that are read along with them rather than split a read.
const GAP_MAX: u64 = 16 << 10;
/// A read of several items goes on to the next only below this length, in bytes.
const RUN_MAX: u64 = 256 << 10;

/// Reads the bytes at several places, all at once, and calls `each` with the number of every place and
/// what lies there. The places are in their order on the array, and those that point outside
/// of it are left out.
pub(crate) fn read_places(
    array: &Array,
    places: &[Place],
    mut each: impl FnMut(usize, &[u8]),
) -> Result<(), Error> {
    let block = BLOCK_SIZE as u64;
    let limit = array.geometry().total_blocks() * block;
    let mut runs: Vec<(Range<u64>, Vec<usize>)> = Vec::new();
    for (i, place) in places.iter().enumerate() {
        let first = place.byte / block * block;
        let end = (place.byte + place.len as u64).next_multiple_of(block);
        if place.is_none() || end > limit || place.len as usize > item::ITEM_MAX {
            continue;
        }
        match runs.last_mut() {
            Some((run, items)) if first <= run.end + GAP_MAX && end - run.start <= RUN_MAX => {
                run.end = run.end.max(end);
                items.push(i);
            }
            _ => runs.push((first..end, vec![i])),
        }
    }
    let len = |run: &Range<u64>| (run.end - run.start) as usize;
    let buffers = runs.iter().map(|(run, _)| AlignedBuf::zeroed(len(run)));
    let mut buffers: Vec<AlignedBuf> = buffers.collect();
    let reads = runs.iter().zip(&mut buffers).map(|((run, _), buf)| {
        let byte = run.start;
        Io::Read { byte, buf }
    });
    array.execute(&mut reads.collect::<Vec<_>>())?;
    for ((run, items), bytes) in runs.iter().zip(&buffers) {
        for &i in items {
            let at = (places[i].byte - run.start) as usize;
            each(i, &bytes[at..at + places[i].len as usize]);
        }
    }
    Ok(())
}

/// Reads a table or space page and checks that it is the one asked for.
pub(crate) fn read_page(
    array: &Array,
    place: Place,
    kind: ItemKind,
    id: u64,
    crc: u32,
) -> Result<Result<ReadItem, Damage>, Error> {
    let read = read_item(array, place)?;
    Ok(read.and_then(|read| check_page(&read.header, kind, id, crc).map(|()| read)))
}

pub(crate) fn check_page(
    header: &ItemHeader,
    kind: ItemKind,
    id: u64,
    crc: u32,
) -> Result<(), Damage> {
    if header.kind != kind as u8 || header.id.get() != id || header.crc.get() != crc {
        let what = format!("{kind:?} {id} is not what is there");
        return Err(Damage::new("table page", what));
    }
    Ok(())
}

/// Reads a node image and checks that it is the version asked for.
pub(crate) fn read_node(
    array: &Array,
    nid: Nid,
    version: u64,
    place: Place,
) -> Result<Result<ReadItem, Damage>, Error> {
    let read = read_item(array, place)?;
    Ok(read.and_then(|read| {
        check_node(&read.header, nid, version)?;
        Ok(read)
    }))
}

pub(crate) fn check_node(header: &ItemHeader, nid: Nid, version: u64) -> Result<(), Damage> {
    if header.kind != ItemKind::Node as u8
        || header.id.get() != nid.0
        || header.version.get() != version
    {
        return Err(Damage::new(
            "node image",
            "another node or version lies there",
        ));
    }
    Ok(())
}

/// The node kind and payload of an image in memory; `bytes` is all of its place.
pub(crate) fn node_in(
    seed: u32,
    bytes: &[u8],
    nid: Nid,
    version: u64,
) -> Result<(u8, &[u8]), Damage> {
    let (header, payload) = item::decode(seed, bytes)?;
    if item::padded_len(payload.len()) != bytes.len() {
        return Err(Damage::new("item", "length differs from its pointer's"));
    }
    check_node(&header, nid, version)?;
    Ok((header.node_kind, payload))
}

//! The journal: any bytes in it, and records of good form that are out of order.

use super::image::{assemble, image, options, use_everything};
use device::Durability;
use engine::Content;
use format::checkpoint::CheckpointRecord;
use format::geometry::Geometry;
use format::inode::KIND_INODE;
use format::journal::{Action, BATCH_MAGIC, BatchHeader, RECORD_HEAD_MAX, put_entry, seal_record};
use format::{BLOCK_SIZE, U32, U64, checksum};
use fs::content::{AttrChange, Delta, FsNode};
use fs::{Error, FileSystem, Ino, ROOT};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Where the next batch goes, and what it must name.
#[derive(Clone, Copy)]
struct Chain {
    position: u64,
    sequence: u64,
    previous_crc: u32,
    epoch: u64,
    mount_id: u64,
    seed: u32,
}

impl Chain {
    /// The end of the journal that the image's newest checkpoint names: it is empty.
    fn of(array: &device::Array) -> Chain {
        let records = [0, 1].map(|slot| {
            let block = array
                .read_slot(slot, 0)
                .expect("healthy devices can be read");
            CheckpointRecord::parse(&block, &array.uuid()).ok()
        });
        let newest = records
            .into_iter()
            .flatten()
            .max_by_key(|r| r.sequence.get());
        let record = newest.expect("the image has a checkpoint");
        Chain {
            position: record.anchor_position.get(),
            sequence: record.anchor_sequence.get(),
            previous_crc: record.anchor_checksum.get(),
            epoch: record.image_epoch.get().max(record.epoch.get()) + 1,
            mount_id: record.mount_id.get(),
            seed: array.checksum_seed(),
        }
    }

    /// A batch of these records with a good checksum; the chain goes on behind it.
    fn batch(
        &mut self,
        geometry: &Geometry,
        uuid: [u8; 16],
        count: u32,
        records: &[u8],
    ) -> Vec<u8> {
        let mut header = BatchHeader::zeroed();
        header.magic = U32::new(BATCH_MAGIC);
        header.previous_crc = U32::new(self.previous_crc);
        header.len = U32::new(records.len() as u32);
        header.uuid = uuid;
        header.mount_id = U64::new(self.mount_id);
        header.sequence = U64::new(self.sequence);
        header.epoch = U64::new(self.epoch);
        header.records = U32::new(count);
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(records);
        let crc = checksum(self.seed, &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        bytes.resize(
            bytes
                .len()
                .next_multiple_of(geometry.journal_align as usize),
            0,
        );
        self.position += bytes.len() as u64;
        self.sequence += 1;
        self.epoch += 1;
        self.previous_crc = crc;
        bytes
    }
}

fn put(array: &device::Array, position: u64, bytes: &[u8]) {
    let mut padded = bytes.to_vec();
    padded.resize(padded.len().next_multiple_of(BLOCK_SIZE), 0);
    let at = array.geometry().journal_start.byte() + position;
    let written = array.write(at, &padded, Durability::Durable);
    written.expect("healthy devices can be written");
}

/// The first byte says how much of a batch is given: nothing, its header, or that of two.
pub fn check_bytes(input: &[u8]) {
    let device = image().device();
    let Some((how, bytes)) = input.split_first() else {
        return;
    };
    let array = assemble(&device, false).expect("the image is whole");
    let mut chain = Chain::of(&array);
    let (geometry, uuid) = (array.geometry().clone(), array.uuid());
    let start = chain.position;
    let content = match how % 4 {
        0 => bytes.to_vec(),
        1 | 2 => chain.batch(&geometry, uuid, 1, bytes),
        _ => {
            let (first, second) = bytes.split_at(bytes.len() / 2);
            let mut content = chain.batch(&geometry, uuid, 1, first);
            content.extend(chain.batch(&geometry, uuid, 1, second));
            content
        }
    };
    put(&array, start, &content);
    drop(array);
    let opened = assemble(&device, false).and_then(|array| FileSystem::open(array, options()));
    if let Ok(fs) = opened {
        use_everything(&fs);
    }
}

/// A change of the mode of one file, in the version that it makes.
fn entry(ino: Ino, version: u64, mode: u32) -> Vec<u8> {
    let change = AttrChange {
        mode: Some(mode),
        ..AttrChange::default()
    };
    let mut record = vec![0; RECORD_HEAD_MAX];
    put_entry(
        &mut record,
        ino.0,
        version,
        Action::Apply,
        KIND_INODE,
        |out| FsNode::encode_delta(&Delta::Attrs(change), out),
    );
    seal_record(&mut record).to_vec()
}

/// What the image's file is before any journal: its number, version and mode.
fn file_before(fs: &FileSystem) -> Result<(Ino, u64, u32), Error> {
    let attr = fs.lookup(ROOT, b"file")?;
    let version = fs.store().get(attr.ino)?.into_read()?.version();
    Ok((attr.ino, version, attr.mode))
}

/// The first two bytes: which batch names a wrong predecessor, and which a wrong mount. Each that
/// follows is a change of one file, in a batch of its own: its version follows, repeats or
/// leaves one out.
pub fn check_records(input: &[u8]) {
    let [wrong_chain, wrong_mount, steps @ ..] = input else {
        return;
    };
    let device = image().device();
    let read_only = |device| {
        let array = assemble(device, true)?;
        FileSystem::open(array, options().read_only())
    };
    let fs = read_only(&device).expect("the image is whole");
    let (ino, first, mode) = file_before(&fs).expect("the image has the file");
    drop(fs);
    let array = assemble(&device, false).expect("the image is whole");
    let mut chain = Chain::of(&array);
    let (geometry, uuid) = (array.geometry().clone(), array.uuid());
    let start = chain.position;
    let (mut content, mut version, mut ended) = (Vec::new(), first, false);
    let mut taken: Vec<(u64, u32)> = Vec::new();
    for (i, step) in steps.iter().take(60).enumerate() {
        version = match step % 16 {
            0 => version + 2,
            1 => version,
            _ => version + 1,
        };
        let new_mode = mode & libc::S_IFMT | (*step as u32) << 1 & 0o777;
        let good = chain;
        if i == *wrong_chain as usize {
            chain.previous_crc ^= 1;
        }
        if i == *wrong_mount as usize {
            chain.mount_id -= 1;
        }
        ended |= chain.previous_crc != good.previous_crc || chain.mount_id != good.mount_id;
        let batch = chain.batch(&geometry, uuid, 1, &entry(ino, version, new_mode));
        content.extend(batch);
        chain.mount_id = good.mount_id;
        if !ended {
            taken.push((version, new_mode));
        }
    }
    put(&array, start, &content);
    drop(array);
    // Versions must follow each other, those, too, that the image has already and that are passed over.
    let versions: Vec<u64> = taken.iter().map(|(version, _)| *version).collect();
    let follows = versions.windows(2).all(|pair| pair[1] == pair[0] + 1);
    let whole = follows && versions.first().is_none_or(|due| *due <= first + 1);
    taken.retain(|(version, _)| *version > first);
    let opened = assemble(&device, false).and_then(|array| FileSystem::open(array, options()));
    match opened {
        Ok(fs) => {
            assert!(whole, "replayed {versions:?} on version {first}");
            let due = taken.last().map_or(mode, |(_, mode)| *mode);
            assert_eq!(fs.getattr(ino).map(|a| a.mode).ok(), Some(due));
            fs.close().expect("healthy devices take a checkpoint");
        }
        Err(error) => assert!(!whole, "{error}"),
    }
    drop(Arc::clone(&device));
}

#[cfg(test)]
mod tests {
    use super::*;
    use format::table::{FIRST_FS_KIND, KIND_SPACE_MAP, NID_LIMIT, SPACE_MAP_FIRST};

    /// A record that creates one node, and with it, if wanted, deletes it again.
    fn creation(nid: u64, kind: u8, body: &[u8], deleted: bool) -> Vec<u8> {
        let mut record = vec![0; RECORD_HEAD_MAX];
        let actions = [(Action::Create, body), (Action::Delete, &[][..])];
        for (version, (action, body)) in (1..).zip(&actions[..1 + deleted as usize]) {
            put_entry(&mut record, nid, version, *action, kind, |out| {
                out.extend_from_slice(body)
            });
        }
        seal_record(&mut record).to_vec()
    }

    /// The image of a space map of so many blocks, all free.
    fn space_map(blocks: u32) -> Vec<u8> {
        let words = vec![0u8; (blocks as usize).div_ceil(64) * 8];
        [&blocks.to_le_bytes()[..], &words].concat()
    }

    /// What the journal named as space maps was taken for the maps of other chunks, because their
    /// numbers were cut to 32 bits, or went into tables at places that these do not have.
    #[test]
    fn a_journal_with_nodes_where_none_can_be_is_damage() {
        let device = image().device();
        let array = assemble(&device, false).expect("the image is whole");
        let geometry = array.geometry().clone();
        drop(array);
        let (last, blocks) = (geometry.chunk_count as u64 - 1, geometry.chunk_blocks);
        let free = SPACE_MAP_FIRST + last;
        let map = space_map(blocks);
        let records = [
            creation(free + 1, KIND_SPACE_MAP, &map, false),
            creation(SPACE_MAP_FIRST + (1 << 32), KIND_SPACE_MAP, &map, false),
            creation(SPACE_MAP_FIRST + (1 << 32), KIND_SPACE_MAP, &map, true),
            creation(NID_LIMIT, KIND_SPACE_MAP, &map, false),
            creation(free, KIND_SPACE_MAP, &space_map(64), false),
            creation(free, KIND_SPACE_MAP, &space_map(2 * blocks), false),
            creation(free, FIRST_FS_KIND, &[], false),
            creation(1 << 20, KIND_SPACE_MAP, &map, false),
        ];
        for (i, record) in records.iter().enumerate() {
            let device = image().device();
            let array = assemble(&device, false).expect("the image is whole");
            let mut chain = Chain::of(&array);
            let start = chain.position;
            let batch = chain.batch(&geometry, array.uuid(), 1, record);
            put(&array, start, &batch);
            drop(array);
            let opened = assemble(&device, false).and_then(|a| FileSystem::open(a, options()));
            assert!(opened.is_err(), "record {i} is replayed");
        }
    }
}

//! The checkpoint record: the root of everything that is not in the journal.

use crate::item::{ItemHeader, ItemPointer, PAYLOAD_MAX};
use crate::table::{MAP_REGIONS, ROOTS};
use crate::{BLOCK_SIZE, COUNTER_RECORD_MAX, Damage, U32, U64, checksum};
use zerocopy::{FromBytes, IntoBytes};

/// Payload of a space page: with its header two whole blocks.
pub const SPACE_PAGE_BYTES: usize = 2 * BLOCK_SIZE - ItemHeader::SIZE;
/// The space root names at most this many pages.
pub const SPACE_PAGES_MAX: usize = PAYLOAD_MAX / ItemPointer::SIZE;
/// Words of 4 bytes in the space tables at most: one for each chunk, and one more for each segment.
pub const SPACE_WORDS_MAX: u64 = (SPACE_PAGES_MAX * SPACE_PAGE_BYTES / 4) as u64;

pub const CHECKPOINT_MAGIC: [u8; 8] = *b"SheafCP\x01";

layout! {
    /// The checkpoint record, one block, in two slots with two copies each.
    pub struct CheckpointRecord: 4096 {
        /// `SheafCP` and the byte 1.
        pub magic: [u8; 8],
        /// CRC-32C of the record with this field zero.
        pub crc: U32,
        /// 1: everything was on the devices and the journal empty when it was written.
        pub clean: U32,
        /// The UUID that the file system was made with.
        pub uuid: [u8; 16],
        /// Grows with every checkpoint, by 1, 3 or 5; slot = sequence mod 2.
        pub sequence: U64,
        /// The mount that wrote it.
        pub mount_id: U64,
        /// E0: every record of this epoch or an earlier one is in the images.
        pub epoch: U64,
        /// Ef: the newest epoch that any image holds; recovery must reach it.
        pub image_epoch: U64,
        /// Sequence number after the newest batch that an image can depend on; recovery must
        /// find every batch below it.
        pub image_sequence: U64,
        /// Journal anchor: ring position (bytes, never wraps) of the first batch to replay.
        pub anchor_position: U64,
        /// Journal anchor: sequence number of that batch.
        pub anchor_sequence: U64,
        /// Journal anchor: checksum of the batch before it.
        pub anchor_checksum: U32,
        /// Regions in use at the low end of nid space.
        pub regions: U32,
        /// Nodes in the table.
        pub node_count: U64,
        /// Time of writing, seconds since the epoch.
        pub time: U64,
        /// The space root item.
        pub space_root: ItemPointer,
        /// The file system's own: base, start and limit of change cookies, the mount that ended cleanly
        /// with them (`fs/cookies.rs`); the rest is zero.
        pub user: [U64; 8],
        /// Zero.
        pub reserved: [u8; 1856],
        /// Map pages of the node table.
        pub roots: [ItemPointer; 128],
    }
}

const _: () = assert!(CheckpointRecord::SIZE == BLOCK_SIZE);

impl CheckpointRecord {
    pub fn seal(&mut self) {
        self.crc = U32::new(0);
        self.crc = U32::new(checksum(0, self.as_bytes()));
    }

    /// Checks magic, checksum, owner, and that its counters can be counted on.
    pub fn parse(block: &[u8], uuid: &[u8; 16]) -> Result<CheckpointRecord, Damage> {
        let damage = |what: &str| Damage::new("checkpoint record", what);
        let record = CheckpointRecord::read_from_bytes(block).map_err(|_| damage("wrong size"))?;
        if record.magic != CHECKPOINT_MAGIC {
            return Err(damage("no record here"));
        }
        let mut copy = record;
        copy.seal();
        if copy.crc != record.crc {
            return Err(damage("checksum does not match"));
        }
        if record.uuid != *uuid {
            return Err(damage("belongs to another file system"));
        }
        let counters = [
            record.sequence,
            record.mount_id,
            record.epoch,
            record.image_epoch,
            record.image_sequence,
            record.anchor_position,
            record.anchor_sequence,
        ];
        let beyond = |counter: &U64| counter.get() > COUNTER_RECORD_MAX;
        if counters.iter().any(beyond) {
            return Err(damage("a counter is out of range"));
        }
        if record.anchor_sequence.get() == 0 {
            return Err(damage("names a batch before the first"));
        }
        if record.regions.get() as u64 > (ROOTS - 1) * MAP_REGIONS {
            return Err(damage("more regions than there can be"));
        }
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::COUNTER_MAX;
    use zerocopy::FromZeros;

    fn parsed(mut record: CheckpointRecord) -> Result<CheckpointRecord, Damage> {
        record.seal();
        CheckpointRecord::parse(record.as_bytes(), &[0; 16])
    }

    fn sample() -> CheckpointRecord {
        let mut record = CheckpointRecord::new_zeroed();
        record.magic = CHECKPOINT_MAGIC;
        record.sequence = U64::new(7);
        record.anchor_sequence = U64::new(1);
        record
    }

    /// The next checkpoint's number was a sum that overflowed, or one that no reader took; then both slots were gone.
    #[test]
    fn a_record_that_nothing_can_follow_is_damaged() {
        let with = |sequence| {
            let mut record = sample();
            record.sequence = U64::new(sequence);
            parsed(record)
        };
        assert!(with(COUNTER_RECORD_MAX).is_ok());
        for sequence in [COUNTER_RECORD_MAX + 1, COUNTER_MAX, u64::MAX] {
            let damage = with(sequence).unwrap_err();
            assert!(damage.to_string().contains("out of range"), "{damage}");
        }
        for mount in [COUNTER_RECORD_MAX + 1, u64::MAX] {
            let mut record = sample();
            record.mount_id = U64::new(mount);
            let damage = parsed(record).unwrap_err();
            assert!(damage.to_string().contains("out of range"), "{damage}");
        }
    }

    /// The number of the batch before it was a difference that overflowed.
    #[test]
    fn a_record_of_a_batch_before_the_first_is_damaged() {
        let mut record = sample();
        assert!(parsed(record).is_ok());
        record.anchor_sequence = U64::new(0);
        assert!(parsed(record).is_err());
    }

    /// Recovery made room for a number of each region.
    #[test]
    fn a_record_of_more_regions_than_there_can_be_is_damaged() {
        let mut record = sample();
        record.regions = U32::new(((ROOTS - 1) * MAP_REGIONS) as u32);
        assert!(parsed(record).is_ok());
        for more in [record.regions.get() + 1, u32::MAX] {
            record.regions = U32::new(more);
            assert!(parsed(record).is_err());
        }
    }
}

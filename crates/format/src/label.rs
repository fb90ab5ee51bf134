//! The label at the head and at the tail of every device: who it belongs to, and the
//! geometry of the whole array, so that any one label describes all of it.

use crate::{
    BLOCK_SIZE, COUNTER_RECORD_MAX, Damage, FORMAT_VERSION, I64, MAX_DEVICES, U16, U32, U64,
    checksum,
};
use zerocopy::{FromBytes, IntoBytes};

pub const LABEL_MAGIC: [u8; 8] = *b"SheafFS\x01";

/// Blocks at the head of each device that hold the label and checkpoint slots.
pub const HEAD_BLOCKS: u64 = 16;
/// Blocks at the tail of each device that hold the second label and slot copies.
pub const TAIL_BLOCKS: u64 = 16;

layout! {
    /// One zone of logical space: a range striped over a set of devices.
    pub struct ZoneEntry: 32 {
        /// First logical block of the zone.
        pub logical_start: U64,
        /// Length of the zone in logical blocks; 0 marks an unused entry.
        pub blocks: U64,
        /// First block of the zone on each of its devices.
        pub device_start: U64,
        /// Bit i set: device i is a member.
        pub device_mask: U32,
        /// Copies kept of each block; 1 in this version.
        pub copies: U32,
    }

    /// The device label: block 0 of each device, and again its last block.
    pub struct Label: 4096 {
        /// `SheafFS` and the byte 1.
        pub magic: [u8; 8],
        /// Format version; readers refuse any but their own.
        pub version: U32,
        /// CRC-32C of the label with this field zero.
        pub crc: U32,
        /// Identifies the file system; equal on all member devices.
        pub uuid: [u8; 16],
        /// Feature bits that an unknowing implementation may ignore.
        pub compatible: U64,
        /// Feature bits that an unknowing implementation may mount read-only.
        pub read_only_compatible: U64,
        /// Feature bits that an unknowing implementation must refuse.
        pub incompatible: U64,
        /// This device's place in the array, from 0.
        pub device_index: U16,
        /// Devices in the array.
        pub device_count: U16,
        /// Stripe unit in blocks, a power of two.
        pub stripe_blocks: U32,
        /// Alignment of journal batches in bytes: the largest physical block of the devices, at most 4,096.
        pub journal_align: U32,
        /// Blocks in a chunk, a power of two.
        pub chunk_blocks: U32,
        /// Blocks in a segment, a power of two.
        pub segment_blocks: U32,
        /// Number of chunks.
        pub chunk_count: U32,
        /// First logical block of the journal ring.
        pub journal_start: U64,
        /// Length of the journal ring in blocks.
        pub journal_blocks: U64,
        /// First logical block of chunk 0.
        pub chunk_start: U64,
        /// Creation time, seconds since the epoch.
        pub created: I64,
        /// Key of the directory hash; the checksums of batches and items begin with its own.
        pub hash_key: [u8; 16],
        /// Name given by the user, UTF-8, zero-padded.
        pub name: [u8; 64],
        /// Size of each device in blocks as used by the array.
        pub device_blocks: [U64; 16],
        /// Zones in logical order.
        pub zones: [ZoneEntry; 16],
        /// Newest mount that wrote this label, before its first checkpoint record; 0: none did.
        pub mount_id: U64,
        /// The UUID that checkpoint records and batches have; it counts if the feature `metadata-uuid` is set, and is
        /// zero otherwise.
        pub metadata_uuid: [u8; 16],
        /// 1: UUID and name are being changed, and labels of other devices may have those from before.
        pub changing: U64,
        /// The UUID before, while it is being changed; otherwise zero.
        pub former_uuid: [u8; 16],
        /// The name before, while it is being changed; otherwise zero.
        pub former_name: [u8; 64],
        /// Zero.
        pub reserved: [u8; 3152],
    }
}

const _: () = assert!(Label::SIZE == BLOCK_SIZE);
const _: () = assert!(MAX_DEVICES == 16);

/// A named feature bit.
#[derive(Debug)]
pub struct Feature {
    pub bit: u64,
    pub name: &'static str,
}

/// The UUID is another one than the file system was made with, which is in its metadata still: one would not find it without.
pub const METADATA_UUID: u64 = 1 << 0;

/// Features this version knows, by class.
pub const COMPATIBLE: &[Feature] = &[];
pub const READ_ONLY_COMPATIBLE: &[Feature] = &[];
pub const INCOMPATIBLE: &[Feature] = &[Feature {
    bit: METADATA_UUID,
    name: "metadata-uuid",
}];

/// The bits of `flags` that `known` does not name.
pub fn unknown_features(flags: u64, known: &[Feature]) -> u64 {
    known
        .iter()
        .fold(flags, |rest, feature| rest & !feature.bit)
}

/// What a file system is called by: all that may change of a label while it is the same file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub uuid: [u8; 16],
    /// UTF-8, zero-padded.
    pub name: [u8; 64],
}

impl Label {
    /// By what the file system is called.
    pub fn identity(&self) -> Identity {
        Identity {
            uuid: self.uuid,
            name: self.name,
        }
    }

    /// By what it was called before, if labels of other devices may still say so.
    pub fn former(&self) -> Option<Identity> {
        (self.changing.get() != 0).then_some(Identity {
            uuid: self.former_uuid,
            name: self.former_name,
        })
    }

    /// Calls the file system so, and its metadata as ever.
    pub fn set_identity(&mut self, new: Identity, former: Option<Identity>) {
        let metadata = self.metadata_uuid();
        (self.uuid, self.name) = (new.uuid, new.name);
        let bits = self.incompatible.get() & !METADATA_UUID;
        (self.incompatible, self.metadata_uuid) = match metadata == new.uuid {
            true => (U64::new(bits), [0; 16]),
            false => (U64::new(bits | METADATA_UUID), metadata),
        };
        self.changing = U64::new(former.is_some().into());
        self.former_uuid = former.map_or([0; 16], |former| former.uuid);
        self.former_name = former.map_or([0; 64], |former| former.name);
    }

    /// The UUID in checkpoint records and batches, which no change of the file system's own touches.
    pub fn metadata_uuid(&self) -> [u8; 16] {
        match self.incompatible.get() & METADATA_UUID != 0 {
            true => self.metadata_uuid,
            false => self.uuid,
        }
    }

    /// What the checksums of batches and items begin with.
    pub fn checksum_seed(&self) -> u32 {
        checksum(0, &self.hash_key)
    }

    /// Fills in the checksum.
    pub fn seal(&mut self) {
        self.crc = U32::new(0);
        self.crc = U32::new(checksum(0, self.as_bytes()));
    }

    /// True when the block starts with the magic, whatever follows.
    pub fn has_magic(block: &[u8]) -> bool {
        block.starts_with(&LABEL_MAGIC)
    }

    /// Checks magic, checksum, version and the numbers that others follow, and nothing that needs other devices.
    pub fn parse(block: &[u8]) -> Result<Label, Damage> {
        let damage = |what: &str| Damage::new("label", what);
        let label = Label::read_from_bytes(block).map_err(|_| damage("wrong size"))?;
        if label.magic != LABEL_MAGIC {
            return Err(damage("no Sheaf label here"));
        }
        let mut copy = label;
        copy.seal();
        if copy.crc != label.crc {
            return Err(damage("checksum does not match"));
        }
        if label.version.get() != FORMAT_VERSION {
            let version = label.version;
            return Err(Damage::new(
                "label",
                format!("format version {version}, not {FORMAT_VERSION}"),
            ));
        }
        let count = label.device_count.get();
        if count == 0 || count as usize > MAX_DEVICES || label.device_index.get() >= count {
            return Err(damage("device index or count out of range"));
        }
        // The mount after it has a record.
        if label.mount_id.get() > COUNTER_RECORD_MAX {
            return Err(damage("mount number out of range"));
        }
        crate::geometry::Geometry::from_label(&label)?;
        Ok(label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn metadata_keeps_its_uuid_whatever_the_file_system_is_called() {
        let named = |uuid: u8, name: u8| Identity {
            uuid: [uuid; 16],
            name: [name; 64],
        };
        let mut label = Label::new_zeroed();
        label.set_identity(named(1, 1), None);
        label.incompatible = U64::new(0);
        label.metadata_uuid = [0; 16];
        let first = label;
        label.set_identity(named(2, 1), Some(named(1, 1)));
        assert_eq!(label.metadata_uuid(), [1; 16]);
        assert_eq!((label.uuid, label.former()), ([2; 16], Some(named(1, 1))));
        label.set_identity(named(3, 2), None);
        assert_eq!((label.metadata_uuid(), label.former()), ([1; 16], None));
        label.set_identity(named(1, 1), None);
        assert_eq!(label.as_bytes(), first.as_bytes());
    }
}

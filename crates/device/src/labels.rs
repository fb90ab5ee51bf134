//! Labels and checkpoint slots: which devices make an array, and where its roots lie.
//!
//! 1. `create` wipes every old label and slot durably before the array is used;
//!    `write_labels` comes last and device 0's label is its last write, so that an
//!    interrupted mkfs leaves nothing that assembles.
//! 2. A label is taken from the device's last block only when its first block is damaged
//!    and holds nothing of another owner.

use crate::array::Array;
use crate::block::{BlockDevice, Durability, Operation, Request};
use crate::buf::AlignedBuf;
use crate::error::Error;
use crate::identity::{self, is_kin, resolved};
use crate::probe;
use crate::unlabelled;
use crate::uuid::uuid_text;
use crate::writer::Writer;
use base::clock::{Clock, Timestamp};
use format::geometry::Geometry;
use format::label::{
    COMPATIBLE, Feature, HEAD_BLOCKS, INCOMPATIBLE, LABEL_MAGIC, Label, READ_ONLY_COMPATIBLE,
    TAIL_BLOCKS, unknown_features,
};
use format::{BLOCK_SIZE, Damage, FORMAT_VERSION, I64, U16, U32, U64};
use std::path::Path;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// The place of slot 0's second copy within a device's tail.
const TAIL_SLOT: u64 = 13;

/// A label copy that was found damaged; the other copy was good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelRepair {
    pub device: usize,
    /// 0: the first block; 1: the last block.
    pub copy: usize,
    pub damage: Damage,
}

/// A device's label, and its other copy, or why that is not good.
#[derive(Debug)]
pub(crate) struct Found {
    pub label: Label,
    /// The other copy, if that is good and of this array: what it is called, and the mount, may differ.
    pub other: Option<Label>,
    pub damaged: Option<(usize, Damage)>,
}

impl Found {
    pub fn copy(&self) -> Found {
        let damaged = self.damaged.clone();
        Found {
            label: self.label,
            other: self.other,
            damaged,
        }
    }
}

/// Why one label copy was not accepted.
enum Refusal {
    /// The magic is not there.
    Absent(Damage),
    Damaged(Damage),
    /// Another format than this code's, which has the same magic.
    Version(u32),
    Features(String),
    Unreadable(Error),
}

impl Refusal {
    fn damage(self) -> Damage {
        match self {
            Refusal::Absent(damage) | Refusal::Damaged(damage) => damage,
            Refusal::Version(version) => Damage::new("label", format!("format version {version}")),
            Refusal::Features(features) => {
                Damage::new("label", format!("unknown features: {features}"))
            }
            Refusal::Unreadable(error) => Damage::new("label", error.to_string()),
        }
    }
}

impl Array {
    /// Puts an array together from its devices, in any order. Reads the labels only. Errors
    /// name the device: missing, foreign, duplicate, too small, not Sheaf's, damaged, of
    /// another version or with unknown features. Where labels of an array are gone beside others that are
    /// there: [`Error::LabelLost`], and [`Incomplete`](crate::Incomplete) goes on from there.
    pub fn assemble(devices: Vec<Arc<dyn BlockDevice>>, read_only: bool) -> Result<Array, Error> {
        if devices.is_empty() {
            return Err(Error::NoDevices);
        }
        let given: Vec<String> = devices.iter().map(|d| d.name().to_owned()).collect();
        let (found, bare) = unlabelled::read_all(devices)?;
        if !bare.is_empty() {
            return Err(unlabelled::told(found, bare, given));
        }
        check_same_owner(&found)?;
        let mut by_index = sort_by_index(found)?;
        let all = by_index.iter().map(|(_, found)| found);
        let (label, settled) = identity::agreed(all, &by_index[0].1.label, true);
        let geometry = Geometry::from_label(&label)?;
        for (index, (device, found)) in by_index.iter().enumerate() {
            check_member(device.as_ref(), index, &found.label, &geometry, read_only)?;
            if !is_kin(&found.label, &label) {
                return Err(Error::LabelsDisagree {
                    device: device.name().to_owned(),
                    other: by_index[0].0.name().to_owned(),
                    what: identity::disagreement(&found.label, &label),
                });
            }
        }
        let mut repairs = Vec::new();
        for (device, (_, found)) in by_index.iter_mut().enumerate() {
            if let Some((copy, damage)) = found.damaged.take() {
                repairs.push(LabelRepair {
                    device,
                    copy,
                    damage,
                });
            }
        }
        let age = |(_, found): &Labelled| found.label.mount_id.get();
        let ages = Some(by_index.iter().map(age).collect());
        let devices = by_index.into_iter().map(|(device, _)| device).collect();
        let mut array = Array::new(devices, geometry, label, read_only, repairs, ages);
        array.settled = settled;
        Ok(array)
    }

    /// A new array over `devices` (index = position), without labels: wipes old labels,
    /// slots and known signatures of other owners, durably. Everything else is left as it
    /// is. [`write_labels`](Self::write_labels) makes it one that assembles.
    ///
    /// # Errors
    /// [`Error::InUse`] while somebody [writes](Self::writer) to one of the devices; what does not fit; those of writing.
    pub fn create(
        devices: Vec<Arc<dyn BlockDevice>>,
        geometry: Geometry,
        name: &str,
        uuid: [u8; 16],
        hash_key: [u8; 16],
    ) -> Result<Array, Error> {
        if devices.len() != geometry.device_blocks.len() {
            return Err(Error::DeviceCount {
                given: devices.len(),
                expected: geometry.device_blocks.len(),
            });
        }
        let label = new_label(&geometry, name, uuid, hash_key)?;
        // The label must be one that assembles, or the array would be lost at its unmount.
        Label::parse(label.as_bytes())?;
        for (index, device) in devices.iter().enumerate() {
            fit(device.as_ref(), index, &geometry)?;
        }
        let _writer = Writer::of(devices.iter())?;
        for (index, device) in devices.iter().enumerate() {
            wipe(device.as_ref(), geometry.device_blocks[index])?;
        }
        Ok(Array::new(
            devices,
            geometry,
            label,
            false,
            Vec::new(),
            None,
        ))
    }

    /// Another time of making than the machine's, for an image that must be the same each time.
    pub fn created_at(mut self, time: Timestamp) -> Array {
        self.label.created = I64::new(time.sec());
        self
    }

    /// Writes the labels of all devices, device 0 last: the last step of mkfs. Everything
    /// written before is flushed first. They are of no mount.
    ///
    /// # Errors
    /// [`Error::InUse`] while somebody [writes](Self::writer) to one of the devices, through this array too; those of writing.
    pub fn write_labels(&self) -> Result<(), Error> {
        let _writer = self.writer()?;
        self.flush()?;
        for index in (0..self.members.len()).rev() {
            self.write_label(index, 0)?;
        }
        *self.ages.lock() = Some(vec![0; self.members.len()]);
        Ok(())
    }

    /// Writes the label copies that [`label_repairs`](Self::label_repairs) lists again. For its [writer](Self::writer).
    pub fn repair_labels(&self) -> Result<(), Error> {
        self.repairs
            .iter()
            .try_for_each(|repair| self.write_label(repair.device, self.age(repair.device)))
    }

    /// Writes both copies of labels that are gone ([`Incomplete`](crate::Incomplete)), durably. Interrupted, it leaves devices with
    /// a label and devices without, or with its second copy only. For its [writer](Self::writer).
    pub fn write_lost_labels(&self, devices: &[usize]) -> Result<(), Error> {
        devices
            .iter()
            .try_for_each(|index| self.write_label(*index, self.age(*index)))
    }

    /// The mount that a device's label is of, or should be.
    pub(crate) fn age(&self, index: usize) -> u64 {
        let ages = self.ages.lock();
        ages.as_ref().map_or(0, |ages| ages[index])
    }

    /// Both copies of one label, durably, the second one first; but if the first one is damaged, that one: a power cut tears what is
    /// being written, and one must be good.
    pub(crate) fn write_label(&self, index: usize, mount: u64) -> Result<(), Error> {
        let mut label = self.label;
        label.device_index = U16::new(index as u16);
        label.mount_id = U64::new(mount);
        label.seal();
        let block = AlignedBuf::from_slice(label.as_bytes());
        let last = self.geometry.device_blocks[index] - 1;
        let damaged = |repair: &LabelRepair| (repair.device, repair.copy) == (index, 0);
        let blocks = match self.repairs.iter().any(damaged) {
            true => [0, last],
            false => [last, 0],
        };
        let mut blocks = blocks.into_iter();
        blocks.try_for_each(|number| self.write_device(index, number * BLOCK, &block))
    }

    /// Reads a member's label again and checks that it is still this array's.
    pub fn verify_label(&self, device: usize) -> Result<(), Error> {
        let member = &self.member(device)?.device;
        let found = read_label_of(member.as_ref(), self.geometry.device_blocks[device])?;
        let is_here = found.label.device_index.get() as usize == device;
        if !is_here || !is_kin(&found.label, &self.label) {
            return Err(Error::Foreign {
                device: member.name().to_owned(),
                uuid: uuid_text(&found.label.uuid),
                other: format!("the open array's device {device}"),
                expected: uuid_text(&self.label.uuid),
            });
        }
        Ok(())
    }

    /// Reads both copies of a member's label again and checks that they are still this array's.
    /// Returns a damaged copy, if the other is good.
    pub fn check_label(&self, device: usize) -> Result<Option<LabelRepair>, Error> {
        self.verify_label(device)?;
        let member = &self.member(device)?.device;
        let found = read_label_of(member.as_ref(), self.geometry.device_blocks[device])?;
        Ok(found.damaged.map(|(copy, damage)| LabelRepair {
            device,
            copy,
            damage,
        }))
    }

    /// One copy of a checkpoint slot, 4,096 bytes, unchecked. Slots 0 and 1, copies 0 and 1.
    pub fn read_slot(&self, slot: usize, copy: usize) -> Result<AlignedBuf, Error> {
        let (device, offset) = self.slot_place(slot, copy)?;
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        self.read_device(device, offset, &mut block)?;
        Ok(block)
    }

    /// Writes both copies of a checkpoint slot, durable on success. Not atomic: the record's
    /// checksum tells a torn one.
    pub fn write_slot(&self, slot: usize, block: &[u8]) -> Result<(), Error> {
        self.write_slot_copies(slot, &[0, 1], block)
    }

    /// The same of these copies alone: a good one is best left, as a power cut may tear what is written, be it what was there.
    pub fn write_slot_copies(
        &self,
        slot: usize,
        copies: &[usize],
        block: &[u8],
    ) -> Result<(), Error> {
        if block.len() != BLOCK_SIZE {
            return Err(Error::Misaligned {
                byte: 0,
                len: block.len() as u64,
                align: BLOCK_SIZE as u32,
            });
        }
        let places = copies.iter().map(|copy| self.slot_place(slot, *copy));
        let places: Vec<(usize, u64)> = places.collect::<Result<_, _>>()?;
        self.write_copies(&places, &AlignedBuf::from_slice(block))
    }

    /// Device and byte offset of one copy of a slot.
    fn slot_place(&self, slot: usize, copy: usize) -> Result<(usize, u64), Error> {
        let second = 1.min(self.members.len() - 1);
        match (slot, copy) {
            (0 | 1, 0) => Ok((0, (1 + slot as u64) * BLOCK)),
            (0 | 1, 1) => {
                let tail = self.geometry.device_blocks[second] - TAIL_BLOCKS;
                Ok((second, (tail + TAIL_SLOT + slot as u64) * BLOCK))
            }
            _ => Err(Error::NoSlot { slot, copy }),
        }
    }
}

fn new_label(
    geometry: &Geometry,
    name: &str,
    uuid: [u8; 16],
    hash_key: [u8; 16],
) -> Result<Label, Error> {
    let mut label = Label::zeroed();
    label.magic = LABEL_MAGIC;
    label.version = U32::new(FORMAT_VERSION);
    label.uuid = uuid;
    label.hash_key = hash_key;
    label.created = I64::new(Clock::real().now().sec());
    label.name = name_bytes(name)?;
    geometry.store(&mut label);
    label.seal();
    Ok(label)
}

/// A name as labels have it.
///
/// # Errors
/// It is too long, or has control characters.
pub fn name_bytes(name: &str) -> Result<[u8; 64], Error> {
    if name.contains(char::is_control) {
        return Err(Error::ControlInName {
            name: name.to_owned(),
        });
    }
    let mut field = [0; 64];
    let limit = field.len();
    match field.get_mut(..name.len()) {
        Some(place) => place.copy_from_slice(name.as_bytes()),
        None => {
            return Err(Error::NameTooLong {
                name: name.to_owned(),
                limit,
            });
        }
    }
    Ok(field)
}

/// The name in a label, as text.
pub fn label_name(label: &Label) -> String {
    let end = label.name.iter().position(|&b| b == 0);
    String::from_utf8_lossy(&label.name[..end.unwrap_or(label.name.len())]).into_owned()
}

/// Zeroes head, tail and other owners' signatures, durably.
fn wipe(device: &dyn BlockDevice, blocks: u64) -> Result<(), Error> {
    let actual = device.bytes() / BLOCK;
    let zeros = AlignedBuf::zeroed((HEAD_BLOCKS * BLOCK) as usize);
    let mut starts = vec![0, blocks - TAIL_BLOCKS];
    if actual != blocks {
        starts.push(actual - TAIL_BLOCKS);
    }
    let mut writes: Vec<(u64, &[u8])> = starts.iter().map(|s| (s * BLOCK, &zeros[..])).collect();
    for hit in probe::signatures(device) {
        // The last block may be one in which the device ends.
        let block = hit.offset / BLOCK * BLOCK;
        writes.push((block, &zeros[..probe::block_len(device, block)]));
    }
    for (offset, buf) in writes {
        let write = Operation::Write {
            offset,
            buf,
            durability: Durability::Durable,
        };
        run_one(device, write)?;
    }
    run_one(device, Operation::Flush)
}

fn run_one(device: &dyn BlockDevice, operation: Operation<'_>) -> Result<(), Error> {
    let mut request = [Request::new(operation, 0)];
    device.run(&mut request, None);
    match request[0].error {
        Some(_) => Err(crate::array::io_error(device, &request[0])),
        None => Ok(()),
    }
}

pub(crate) fn read_block(device: &dyn BlockDevice, block: u64) -> Result<AlignedBuf, Error> {
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    let read = Operation::Read {
        offset: block * BLOCK,
        buf: &mut buf,
    };
    run_one(device, read)?;
    Ok(buf)
}

/// Reads a device's label from its first block, or failing that from its last.
pub(crate) fn read_label(device: &dyn BlockDevice) -> Result<Found, Error> {
    read_label_of(device, device.bytes() / BLOCK)
}

/// The same of a device that had so many blocks when its label was written.
pub(crate) fn read_label_of(device: &dyn BlockDevice, blocks: u64) -> Result<Found, Error> {
    let name = || device.name().to_owned();
    if blocks < HEAD_BLOCKS + TAIL_BLOCKS || blocks > device.bytes() / BLOCK {
        return Err(Error::NotSheaf {
            device: name(),
            found: None,
        });
    }
    let head = match read_copy(device, 0) {
        Ok(label) => {
            let (other, damaged) = match second_copy(device, &label) {
                Ok(other) => (other, None),
                Err(damage) => (None, Some((1, damage))),
            };
            return Ok(Found {
                label,
                other,
                damaged,
            });
        }
        Err(refusal) => refusal,
    };
    let tail = read_copy(device, blocks - 1);
    for refusal in [Some(&head), tail.as_ref().err()].into_iter().flatten() {
        match refusal {
            Refusal::Version(version) => {
                let (device, version, known) = (name(), *version, FORMAT_VERSION);
                return Err(match version > known {
                    true => Error::NewerVersion {
                        device,
                        version,
                        known,
                    },
                    false => Error::OlderVersion {
                        device,
                        version,
                        known,
                    },
                });
            }
            Refusal::Features(features) => {
                return Err(Error::UnknownFeatures {
                    device: name(),
                    features: features.clone(),
                });
            }
            Refusal::Absent(_) | Refusal::Damaged(_) | Refusal::Unreadable(_) => {}
        }
    }
    // Invariant 2: the last block speaks for the device only if nobody else owns it.
    if matches!(head, Refusal::Absent(_))
        && let Some(other) = probe::signatures(device)
            .into_iter()
            .find(|hit| hit.name != "sheaf")
    {
        let (device, found) = (name(), other.name.to_owned());
        return Err(match tail {
            Ok(label) => Error::LabelCovered {
                device,
                found,
                index: label.device_index.get() as usize,
                count: label.device_count.get() as usize,
                uuid: uuid_text(&label.uuid),
                name: label_name(&label),
            },
            Err(_) => Error::NotSheaf {
                device,
                found: Some(found),
            },
        });
    }
    match (head, tail) {
        (head, Ok(label)) => Ok(Found {
            label,
            other: None,
            damaged: Some((0, head.damage())),
        }),
        (Refusal::Unreadable(error), _) | (_, Err(Refusal::Unreadable(error))) => Err(error),
        (Refusal::Absent(_), Err(Refusal::Absent(_))) => Err(Error::NotSheaf {
            device: name(),
            found: None,
        }),
        (head, Err(tail)) => Err(Error::LabelDamaged {
            device: name(),
            head: head.damage(),
            tail: tail.damage(),
        }),
    }
}

/// The second copy of a good label, or what is wrong with it; none where the device has shrunk, which is another error and told as such.
fn second_copy(device: &dyn BlockDevice, label: &Label) -> Result<Option<Label>, Damage> {
    let index = label.device_index.get() as usize;
    let last = label.device_blocks[index].get().saturating_sub(1);
    if last == 0 || last >= device.bytes() / BLOCK {
        return Ok(None);
    }
    match read_copy(device, last) {
        // Of two mounts they are when the newer one's beginning was cut off, and of two identities when a change was.
        Ok(copy) if copy.device_index == label.device_index && is_kin(&copy, label) => {
            Ok(Some(copy))
        }
        Ok(_) => Err(Damage::new("label", "the copies differ")),
        Err(refusal) => Err(refusal.damage()),
    }
}

/// One label copy.
fn read_copy(device: &dyn BlockDevice, block: u64) -> Result<Label, Refusal> {
    let bytes = read_block(device, block).map_err(Refusal::Unreadable)?;
    parse_label(&bytes)
}

/// Parses a label; version and features come before the geometry, which a newer format may
/// describe in ways that look like damage.
fn parse_label(bytes: &[u8]) -> Result<Label, Refusal> {
    let parsed = Label::parse(bytes);
    let sealed = Label::read_from_bytes(bytes).is_ok_and(|raw| {
        let mut copy = raw;
        copy.seal();
        raw.magic == LABEL_MAGIC && copy.crc == raw.crc
    });
    if sealed && let Ok(raw) = Label::read_from_bytes(bytes) {
        if raw.version.get() != FORMAT_VERSION {
            return Err(Refusal::Version(raw.version.get()));
        }
        let unknown = unknown_features(raw.incompatible.get(), INCOMPATIBLE);
        if unknown != 0 {
            return Err(Refusal::Features(feature_text(unknown, INCOMPATIBLE)));
        }
    }
    parsed.map_err(|damage| match Label::has_magic(bytes) {
        true => Refusal::Damaged(damage),
        false => Refusal::Absent(damage),
    })
}

/// Feature bits by name, or by number where the name is unknown.
pub fn feature_text(flags: u64, known: &[Feature]) -> String {
    let bits = (0..64).filter(|bit| flags >> bit & 1 == 1);
    let names: Vec<String> = bits
        .map(|bit| {
            known
                .iter()
                .find(|f| f.bit == 1 << bit)
                .map_or_else(|| format!("bit {bit}"), |f| f.name.to_owned())
        })
        .collect();
    names.join(", ")
}

/// All features a label names, for `sheaf info`.
pub fn label_features(label: &Label) -> Vec<String> {
    [
        (label.compatible.get(), COMPATIBLE),
        (label.read_only_compatible.get(), READ_ONLY_COMPATIBLE),
        (label.incompatible.get(), INCOMPATIBLE),
    ]
    .into_iter()
    .filter(|(flags, _)| *flags != 0)
    .map(|(flags, known)| feature_text(flags, known))
    .collect()
}

type Labelled = (Arc<dyn BlockDevice>, Found);

/// All devices carry the UUID that most of them carry (of equals, the first given).
pub(crate) fn check_same_owner(found: &[Labelled]) -> Result<(), Error> {
    let labels = found.iter().map(|(_, found)| &found.label);
    let uuids: Vec<[u8; 16]> = labels
        .clone()
        .map(|label| resolved(label, labels.clone()).uuid)
        .collect();
    let votes = |uuid: &[u8; 16]| uuids.iter().filter(|other| *other == uuid).count();
    let (mut owner, mut most) = (0, 0);
    for (i, uuid) in uuids.iter().enumerate() {
        if votes(uuid) > most {
            (owner, most) = (i, votes(uuid));
        }
    }
    match uuids.iter().position(|uuid| *uuid != uuids[owner]) {
        Some(foreign) => Err(Error::Foreign {
            device: found[foreign].0.name().to_owned(),
            uuid: uuid_text(&found[foreign].1.label.uuid),
            other: found[owner].0.name().to_owned(),
            expected: uuid_text(&found[owner].1.label.uuid),
        }),
        None => Ok(()),
    }
}

/// The devices by index, each index once and none missing.
pub(crate) fn sort_by_index(found: Vec<Labelled>) -> Result<Vec<Labelled>, Error> {
    let label = found[0].1.label;
    let count = found
        .iter()
        .map(|(_, f)| f.label.device_count.get() as usize)
        .max()
        .unwrap_or(0);
    let mut places: Vec<Option<Labelled>> = (0..count).map(|_| None).collect();
    for entry in found {
        let index = entry.1.label.device_index.get() as usize;
        if let Some((first, _)) = &places[index] {
            return Err(Error::Duplicate {
                first: first.name().to_owned(),
                second: entry.0.name().to_owned(),
                index,
                uuid: uuid_text(&label.uuid),
            });
        }
        places[index] = Some(entry);
    }
    let missing: Vec<usize> = (0..count).filter(|&i| places[i].is_none()).collect();
    if !missing.is_empty() {
        return Err(Error::Missing {
            missing,
            count,
            uuid: uuid_text(&label.uuid),
            name: label_name(&label),
        });
    }
    Ok(places.into_iter().flatten().collect())
}

pub(crate) fn check_member(
    device: &dyn BlockDevice,
    index: usize,
    label: &Label,
    geometry: &Geometry,
    read_only: bool,
) -> Result<(), Error> {
    let unknown = unknown_features(label.read_only_compatible.get(), READ_ONLY_COMPATIBLE);
    if unknown != 0 && !read_only {
        return Err(Error::ReadOnlyFeatures {
            device: device.name().to_owned(),
            features: feature_text(unknown, READ_ONLY_COMPATIBLE),
        });
    }
    fit(device, index, geometry)
}

/// Has a member take blocks as small as those that the array was made for, if it can; a file can, on whatever host it has
/// come to.
fn fit(device: &dyn BlockDevice, index: usize, geometry: &Geometry) -> Result<(), Error> {
    let needed = geometry.device_blocks[index].saturating_mul(BLOCK);
    if device.bytes() < needed {
        return Err(Error::TooSmall {
            device: device.name().to_owned(),
            bytes: device.bytes(),
            needed,
        });
    }
    if device.logical_block() > geometry.journal_align {
        let made = device.take_smaller_blocks(geometry.journal_align);
        made.map_err(|e| Error::open(Path::new(device.name()), e))?;
    }
    if device.logical_block() > geometry.journal_align {
        return Err(Error::LogicalBlock {
            device: device.name().to_owned(),
            logical_block: device.logical_block(),
            align: geometry.journal_align,
        });
    }
    Ok(())
}

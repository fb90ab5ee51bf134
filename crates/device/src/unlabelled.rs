//! Devices whose label is gone, both copies, beside others of their array that have theirs: which places of the array could be theirs.
//!
//! Every label describes the whole array, so one that is gone can be made anew. Which device it belongs on, no label says.
//!
//! 1. Nothing here takes a device for a member because its place is empty: a caller looks at what lies on it, in an array that is open
//!    read-only, and only then has its label written ([`Array::write_lost_labels`]).
//! 2. A device that shows signs of another owner, another array or another place gets none.
//! 3. The mount of a label that is written again is what is left of it says, or what puts it in order with the others', in whatever order the
//!    devices were named: an old copy stays known as one.

use crate::array::Array;
use crate::block::BlockDevice;
use crate::error::{Error, LostLabel, LostLabels};
use crate::identity;
use crate::labels::{
    Found, LabelRepair, check_member, check_same_owner, label_name, read_label, read_label_of,
    sort_by_index,
};
use crate::probe;
use crate::uuid::uuid_text;
use format::checkpoint::{CHECKPOINT_MAGIC, CheckpointRecord};
use format::geometry::Geometry;
use format::label::{Label, TAIL_BLOCKS};
use format::{BLOCK_SIZE, COUNTER_RECORD_MAX, U16, U64};
use std::collections::BTreeSet;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Devices whose places are tried in every order: six for three.
const LOST_MAX: usize = 3;
/// Bits in which a damaged label may differ from the one that it was.
const FLIPPED_MAX: u32 = 64;
/// Bits in which a damaged UUID may differ from the one that it was.
const UUID_FLIPPED_MAX: u32 = 8;

type Labelled = (Arc<dyn BlockDevice>, Found);
type Bare = (Arc<dyn BlockDevice>, Error);

/// Whether a device has no label because none of it is there, or nothing good of it.
pub(crate) fn is_bare(error: &Error) -> bool {
    matches!(
        error,
        Error::NotSheaf { .. } | Error::LabelCovered { .. } | Error::LabelDamaged { .. }
    )
}

/// The devices that have a label, and those that have none. One that was enlarged has its second copy where it ended before, as the others' labels say.
///
/// # Errors
/// Anything but that a label is gone.
pub(crate) fn read_all(
    devices: Vec<Arc<dyn BlockDevice>>,
) -> Result<(Vec<Labelled>, Vec<Bare>), Error> {
    let (mut found, mut without) = (Vec::new(), Vec::new());
    for device in devices {
        match read_label(device.as_ref()) {
            Ok(label) => found.push((device, label)),
            Err(error) if is_bare(&error) || matches!(error, Error::Io { .. }) => {
                without.push((device, error));
            }
            Err(error) => return Err(error),
        }
    }
    let mut bare = Vec::new();
    for (device, error) in without {
        match before_it_grew(device.as_ref(), &found) {
            Some(label) => found.push((device, label)),
            None if is_bare(&error) => bare.push((device, error)),
            None => return Err(error),
        }
    }
    Ok((found, bare))
}

/// The label of a device that is larger than when that was written, and has only the second copy left.
fn before_it_grew(device: &dyn BlockDevice, others: &[Labelled]) -> Option<Found> {
    let places: BTreeSet<(usize, u64)> = others
        .iter()
        .flat_map(|(_, found)| {
            let count = found.label.device_count.get() as usize;
            let blocks = found.label.device_blocks.iter().map(|blocks| blocks.get());
            blocks.take(count).enumerate()
        })
        .filter(|(_, blocks)| *blocks < device.bytes() / BLOCK)
        .collect();
    places.into_iter().find_map(|(index, blocks)| {
        let found = read_label_of(device, blocks).ok()?;
        let label = &found.label;
        let is_its = label.device_index.get() as usize == index
            && others
                .iter()
                .any(|(_, o)| identity::is_kin(&o.label, label));
        is_its.then_some(found)
    })
}

/// What is wrong with devices of which some have a label and some have none; `given` are all, as they were given.
pub(crate) fn told(found: Vec<Labelled>, bare: Vec<Bare>, given: Vec<String>) -> Error {
    let Some((_, first)) = bare.first() else {
        return Error::NoDevices;
    };
    let Some(label) = found.first().map(|(_, found)| found.label) else {
        return first.clone();
    };
    let first = first.clone();
    let labelled = found.iter().map(|(d, _)| d.name().to_owned()).collect();
    if let Err(error) = check_same_owner(&found) {
        return error;
    }
    match sort_by_index(found) {
        // It is one too many, whatever it was once.
        Ok(_) => match first {
            Error::LabelCovered { device, found, .. } => Error::NotSheaf {
                device,
                found: Some(found),
            },
            first => first,
        },
        Err(Error::Missing { missing, count, .. }) => {
            let sizes = missing
                .iter()
                .map(|i| label.device_blocks[*i].get() * BLOCK);
            let sizes = sizes.collect();
            let lost = bare.into_iter().map(|(device, error)| LostLabel {
                device: device.name().to_owned(),
                bytes: device.bytes(),
                why: why(error),
            });
            Error::LabelLost(Box::new(LostLabels {
                lost: lost.collect(),
                missing,
                sizes,
                count,
                uuid: uuid_text(&label.uuid),
                name: label_name(&label),
                labelled,
                given,
            }))
        }
        Err(error) => error,
    }
}

fn why(error: Error) -> String {
    match error {
        Error::NotSheaf { found: None, .. } => "nothing of them is left".to_owned(),
        Error::NotSheaf {
            found: Some(found), ..
        }
        | Error::LabelCovered { found, .. } => format!("it holds {found}"),
        Error::LabelDamaged { head, tail, .. } => format!("first: {head}; last: {tail}"),
        other => other.to_string(),
    }
}

/// An array of which some devices have no label.
pub struct Incomplete {
    /// By place.
    labelled: Vec<Option<Labelled>>,
    bare: Vec<Arc<dyn BlockDevice>>,
    missing: Vec<usize>,
    label: Label,
    geometry: Geometry,
}

/// A place for each device without a label: the place, and which of these devices.
pub type Places = Vec<(usize, usize)>;

impl Incomplete {
    /// Of the devices of an array, all of them, that [`Array::assemble`] has refused with [`Error::LabelLost`].
    ///
    /// # Errors
    /// That error, or what else keeps them from being an array: more places than devices, a member that is too small.
    pub fn of(devices: &[Arc<dyn BlockDevice>]) -> Result<Incomplete, Error> {
        let given: Vec<String> = devices.iter().map(|d| d.name().to_owned()).collect();
        let (found, bare) = read_all(devices.to_vec())?;
        let devices: Vec<_> = bare.iter().map(|(device, _)| Arc::clone(device)).collect();
        let Some(first) = found.first().map(|(_, found)| found.label) else {
            return Err(told(found, bare, given));
        };
        let all = found.iter().map(|(_, found)| found);
        let (label, _) = identity::agreed(all, &first, false);
        let mut labelled: Vec<Option<Labelled>> = Vec::new();
        labelled.resize_with(label.device_count.get() as usize, || None);
        let error = told(
            found
                .iter()
                .map(|(d, f)| (Arc::clone(d), f.copy()))
                .collect(),
            bare,
            given,
        );
        let missing = match &error {
            Error::LabelLost(all) if all.missing.len() == devices.len() => all.missing.clone(),
            _ => return Err(error),
        };
        let geometry = Geometry::from_label(&label)?;
        let first = found[0].0.name().to_owned();
        for (device, found) in found {
            let index = found.label.device_index.get() as usize;
            if !identity::is_kin(&found.label, &label) {
                return Err(Error::LabelsDisagree {
                    device: device.name().to_owned(),
                    other: first,
                    what: identity::disagreement(&found.label, &label),
                });
            }
            labelled[index] = Some((device, found));
        }
        Ok(Incomplete {
            labelled,
            bare: devices,
            missing,
            label,
            geometry,
        })
    }

    /// The names of the devices without a label.
    pub fn lost(&self) -> Vec<String> {
        self.bare.iter().map(|d| d.name().to_owned()).collect()
    }

    /// What says of a device without a label that it is none of this array's, or holds something that is wanted, if anything does.
    pub fn objection(&self, which: usize) -> Option<String> {
        let device = self.bare[which].as_ref();
        let tables = "partition table";
        let other = probe::signatures(device).into_iter().find(|hit| {
            hit.name != "sheaf" && (!hit.name.starts_with(tables) || probe::has_partitions(device))
        });
        if let Some(other) = other {
            return Some(format!(
                "it holds {}; if nothing of that is wanted, remove it with `wipefs --all {}` and repeat",
                other.name,
                device.name()
            ));
        }
        self.stranger(device)
    }

    /// The UUID of another file system in what is left of a label or a checkpoint record.
    fn stranger(&self, device: &dyn BlockDevice) -> Option<String> {
        let own = [Some(self.label.identity()), self.label.former()];
        let is_other = |uuid: &[u8; 16]| {
            let mut own = own.iter().flatten();
            own.all(|own| flipped(uuid, &own.uuid) > UUID_FLIPPED_MAX)
        };
        let last = device.bytes() / BLOCK - 1;
        let tail = last + 1 - TAIL_BLOCKS;
        for block in [0, last] {
            let Some(label) = read(device, block).filter(|bytes| Label::has_magic(bytes)) else {
                continue;
            };
            let uuid = Label::read_from_bytes(&label).ok()?.uuid;
            if is_other(&uuid) {
                return Some(format!(
                    "what is left of its label is of file system {}",
                    uuid_text(&uuid)
                ));
            }
        }
        for block in [1, 2, tail + 13, tail + 14] {
            let record = read(device, block).filter(|bytes| bytes.starts_with(&CHECKPOINT_MAGIC));
            let raw = record.and_then(|bytes| CheckpointRecord::read_from_bytes(&bytes).ok());
            let Some(raw) = raw.filter(|raw| raw.uuid != self.label.metadata_uuid()) else {
                continue;
            };
            if CheckpointRecord::parse(raw.as_bytes(), &raw.uuid).is_ok() {
                return Some(format!(
                    "it has a checkpoint of file system {}",
                    uuid_text(&raw.uuid)
                ));
            }
        }
        None
    }

    /// Whether most of a label of this array is there still, which says that the device has this place.
    pub fn remembers(&self, which: usize, place: usize) -> bool {
        let remnant = self.remnant(self.bare[which].as_ref());
        remnant.is_some_and(|(index, _)| index == place)
    }

    /// All ways to give each device without a label a place of its size, or of one that it may have grown from.
    pub fn ways(&self) -> Vec<Places> {
        let mut ways = Vec::new();
        if self.bare.len() <= LOST_MAX {
            self.add_ways(&mut Vec::new(), &mut ways);
        }
        ways
    }

    fn add_ways(&self, so_far: &mut Places, ways: &mut Vec<Places>) {
        let Some(place) = self.missing.get(so_far.len()).copied() else {
            return ways.push(so_far.clone());
        };
        for which in 0..self.bare.len() {
            if so_far.iter().all(|(_, taken)| *taken != which) && self.could_be(which, place) {
                so_far.push((place, which));
                self.add_ways(so_far, ways);
                so_far.pop();
            }
        }
    }

    /// By its size, and by what is left of its label.
    fn could_be(&self, which: usize, place: usize) -> bool {
        let device = self.bare[which].as_ref();
        let fits = device.bytes() / BLOCK >= self.geometry.device_blocks[place];
        fits && self.remnant(device).is_none_or(|(index, _)| index == place)
    }

    /// The place and the mount that a label of this array says which has but few wrong bits, or none. With another mount than it was of, its
    /// checksum would have many.
    fn remnant(&self, device: &dyn BlockDevice) -> Option<(usize, u64)> {
        let end = device.bytes() / BLOCK;
        // Where it ends, or ended before it grew.
        let missing = self.missing.iter();
        let ends = missing.map(|place| self.geometry.device_blocks[*place]);
        let ends: BTreeSet<u64> = ends.filter(|then| *then < end).chain([end]).collect();
        let blocks = [0].into_iter().chain(ends.iter().map(|end| end - 1));
        let copies = blocks.filter_map(|block| read(device, block));
        let labels = self.labelled.iter().flatten();
        let ages: BTreeSet<u64> = labels
            .map(|(_, found)| found.label.mount_id.get())
            .collect();
        let nearest = copies.flat_map(|bytes| {
            let mut mounts = ages.clone();
            let own = Label::read_from_bytes(&bytes).map(|label| label.mount_id.get());
            // Of another one no label can be written again.
            mounts.extend(own.ok().filter(|mount| *mount <= COUNTER_RECORD_MAX));
            let candidates = (0..self.labelled.len())
                .flat_map(move |index| mounts.clone().into_iter().map(move |mount| (index, mount)));
            candidates.map(move |(index, mount)| {
                let mut label = self.label;
                label.device_index = U16::new(index as u16);
                label.mount_id = U64::new(mount);
                label.seal();
                (flipped(&bytes, label.as_bytes()), index, mount)
            })
        });
        let (bits, index, mount) = nearest.min()?;
        (bits <= FLIPPED_MAX).then_some((index, mount))
    }

    /// The mount that the label of a device without one was of: what is left of it says so, or it is that of the next device behind it that has a
    /// label, which is in order whatever the record says ([`crate::ages`], invariant 2); or of the one before it, if it is the last.
    fn lost_age(&self, device: &dyn BlockDevice, place: usize) -> u64 {
        if let Some((index, mount)) = self.remnant(device)
            && index == place
        {
            return mount;
        }
        let behind = self.labelled[place..].iter().flatten().next();
        let before = || self.labelled[..place].iter().flatten().next_back();
        let nearest = behind.or_else(before);
        let label = nearest.map_or(&self.label, |(_, found)| &found.label);
        label.mount_id.get()
    }

    /// The array with its devices in such places.
    ///
    /// # Errors
    /// As [`Array::assemble`].
    pub fn array(&self, places: &Places, read_only: bool) -> Result<Array, Error> {
        let (mut devices, mut repairs) = (Vec::new(), Vec::new());
        for (index, labelled) in self.labelled.iter().enumerate() {
            let device = match labelled {
                Some((device, found)) => {
                    let damaged = found.damaged.clone().into_iter();
                    repairs.extend(damaged.map(|(copy, damage)| LabelRepair {
                        device: index,
                        copy,
                        damage,
                    }));
                    device
                }
                None => {
                    let place = places.iter().find(|(place, _)| *place == index);
                    &self.bare[place.map_or(0, |(_, which)| *which)]
                }
            };
            check_member(
                device.as_ref(),
                index,
                &self.label,
                &self.geometry,
                read_only,
            )?;
            devices.push(Arc::clone(device));
        }
        let ages = self.labelled.iter().zip(&devices).enumerate();
        let ages = ages.map(|(place, (labelled, device))| match labelled {
            Some((_, found)) => found.label.mount_id.get(),
            None => self.lost_age(device.as_ref(), place),
        });
        let ages = ages.collect();
        let (geometry, label) = (self.geometry.clone(), self.label);
        Ok(Array::new(
            devices,
            geometry,
            label,
            read_only,
            repairs,
            Some(ages),
        ))
    }
}

impl std::fmt::Debug for Incomplete {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Incomplete")
            .field("lost", &self.lost())
            .field("missing", &self.missing)
            .finish_non_exhaustive()
    }
}

fn read(device: &dyn BlockDevice, block: u64) -> Option<Vec<u8>> {
    let bytes = crate::labels::read_block(device, block).ok()?;
    Some(bytes.to_vec())
}

fn flipped(a: &[u8], b: &[u8]) -> u32 {
    a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones()).sum()
}

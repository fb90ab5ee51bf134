//! Finding an array's devices by their labels: for `UUID=` and `LABEL=` in fstab, and for one device of several.
//!
//! 1. One storage by several names is one device; of its names the first is taken.
//! 2. Where two storages claim one place in an array, nobody chooses between them: one is a copy whose content is old, and an array
//!    with an old device is destroyed by the first write. Only a device that the user named is taken in spite of a twin.

use crate::block::BlockDevice;
use crate::error::Error;
use crate::file::{self, Storage};
use crate::identity::{is_kin, resolved, same_label};
use crate::labels::{label_name, read_label};
use crate::uuid::{parse_uuid, uuid_text};
use format::label::Label;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What a user calls an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArrayId {
    Uuid([u8; 16]),
    Name(String),
}

/// A device that carries a Sheaf label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub path: PathBuf,
    pub uuid: [u8; 16],
    pub name: String,
    /// The device's place in the array, from 0.
    pub index: usize,
    /// Devices in the array.
    pub count: usize,
    pub bytes: u64,
}

impl ArrayId {
    /// Parses `UUID=…` and `LABEL=…`; `None` for anything else, a path say. An empty name is no name: it would be that of
    /// any file system that was given none.
    pub fn parse(text: &str) -> Option<ArrayId> {
        let (key, value) = text.split_once('=')?;
        let value = value.trim_matches('"');
        match key {
            "UUID" => parse_uuid(value).map(ArrayId::Uuid),
            "LABEL" if !value.is_empty() => Some(ArrayId::Name(value.to_owned())),
            _ => None,
        }
    }

    fn matches(&self, member: &Member) -> bool {
        match self {
            ArrayId::Uuid(uuid) => member.uuid == *uuid,
            ArrayId::Name(name) => member.name == *name,
        }
    }
}

impl std::fmt::Display for ArrayId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ArrayId::Uuid(uuid) => write!(f, "UUID={}", uuid_text(uuid)),
            ArrayId::Name(name) => write!(f, "LABEL={name}"),
        }
    }
}

/// All block devices of this machine that could be members: not empty, and not a part of
/// another device (an opened encrypted volume's disk, say), which would show the same label
/// twice.
pub fn candidates() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/sys/class/block") else {
        // Without sysfs there is nothing to find; the caller says which array is missing.
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .filter(|entry| is_candidate(&entry.path()))
        .map(|entry| {
            // sysfs writes `!` for the `/` of names such as cciss/c0d0.
            let name = entry.file_name().to_string_lossy().replace('!', "/");
            Path::new("/dev").join(name)
        })
        .filter(|path| path.exists())
        .collect();
    paths.sort();
    paths
}

fn is_candidate(sys: &Path) -> bool {
    let size = fs::read_to_string(sys.join("size")).unwrap_or_default();
    let held = fs::read_dir(sys.join("holders")).is_ok_and(|mut holders| holders.next().is_some());
    size.trim().parse::<u64>().unwrap_or(0) > 0 && !held
}

/// The Sheaf devices among `candidates`, of one array or of all. What cannot be read or has
/// no good label is passed over. Takes no locks.
pub fn scan(which: Option<&ArrayId>, candidates: &[PathBuf]) -> Vec<Member> {
    let all = labelled(candidates).into_iter();
    let mut members: Vec<Member> = all.map(|(member, _)| member).collect();
    members.retain(|member| which.is_none_or(|id| id.matches(member)));
    members
}

type Labelled = (Member, Label);

fn labelled(candidates: &[PathBuf]) -> Vec<Labelled> {
    let candidates = candidates.iter();
    candidates.filter_map(|path| read_member(path)).collect()
}

fn read_member(path: &Path) -> Option<Labelled> {
    let device = file::open_to_look(path, false).ok()?;
    let label = read_label(&device).ok()?.label;
    let member = Member {
        uuid: label.uuid,
        name: label_name(&label),
        index: label.device_index.get() as usize,
        count: label.device_count.get() as usize,
        bytes: device.bytes(),
        path: path.to_owned(),
    };
    Some((member, label))
}

/// The devices of one array, by device index; at least one must exist. Which are missing, `Array::assemble` says.
///
/// # Errors
/// [`Error::NotFound`]; [`Error::SameName`], when several arrays have the name; [`Error::Duplicate`], when there is a copy of a device.
pub fn find_members(which: &ArrayId, candidates: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    let (mut members, others): (Vec<Labelled>, Vec<Labelled>) = labelled(candidates)
        .into_iter()
        .partition(|(member, _)| which.matches(member));
    let Some((first, label)) = members.first().cloned() else {
        return Err(Error::NotFound {
            which: which.to_string(),
        });
    };
    let uuid_of = |of: &Label| resolved(of, members.iter().map(|(_, of)| of)).uuid;
    let uuid = uuid_of(&label);
    if members.iter().any(|(_, of)| uuid_of(of) != uuid) {
        let members: Vec<Member> = members.into_iter().map(|(member, _)| member).collect();
        return Err(same_name(&first.name, &members));
    }
    // A change of what it is called was cut off: the places that are empty are those of labels that say the other.
    let kin: Vec<Labelled> = others
        .into_iter()
        .filter(|(other, _)| {
            members
                .iter()
                .all(|(member, _)| member.index != other.index)
        })
        .filter(|(_, of)| members.iter().any(|(_, label)| is_kin(of, label)))
        .collect();
    members.extend(kin);
    one_of_each(members.into_iter().map(|(member, _)| member).collect())
}

/// A device with the others of its array that are among `candidates`, by device index; only itself if it has no good label. It is taken
/// for its own place whoever else claims that, and the others by labels that say the same as its own, if there are such, or would but for a change of
/// name or UUID that was cut off. Which are
/// missing, `Array::assemble` says.
///
/// # Errors
/// [`Error::Duplicate`], when there is a copy of one of the others.
pub fn companions(path: &Path, candidates: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    let itself = vec![path.to_owned()];
    let Some((named, label)) = read_member(path) else {
        return Ok(itself);
    };
    if named.count == 1 {
        return Ok(itself);
    }
    let distance = |(other, of): &Labelled| match () {
        () if same_label(of, &label) => Some(0),
        () if is_kin(of, &label) => Some(1),
        // Of who alone claims a place opening tells that the labels disagree.
        () => (other.uuid == named.uuid).then_some(2),
    };
    let others = labelled(candidates)
        .into_iter()
        .filter(|(other, _)| other.index != named.index);
    let mut others: Vec<(u32, Labelled)> = others
        .filter_map(|other| Some((distance(&other)?, other)))
        .collect();
    let mut nearest: BTreeMap<usize, u32> = BTreeMap::new();
    for (distance, (other, _)) in &others {
        let least = nearest.entry(other.index).or_insert(*distance);
        *least = (*least).min(*distance);
    }
    others.retain(|(distance, (other, _))| nearest[&other.index] == *distance);
    let others = others.into_iter().map(|(_, (other, _))| other);
    one_of_each(others.chain([named]).collect())
}

/// The paths of one array's members by device index, each storage by one of its names.
fn one_of_each(mut members: Vec<Member>) -> Result<Vec<PathBuf>, Error> {
    // A name that shows less of a storage than another one may be too short for the array.
    members.sort_by(|a, b| (a.index, b.bytes, &a.path).cmp(&(b.index, a.bytes, &b.path)));
    let mut kept: Vec<(Member, Option<Storage>)> = Vec::new();
    for member in members {
        let storage = Storage::of(&member.path).ok();
        let twin = kept.last().filter(|(last, _)| last.index == member.index);
        let Some((first, other)) = twin else {
            kept.push((member, storage));
            continue;
        };
        let same = |(a, b): (&Storage, &Storage)| a.overlaps(b);
        if !storage.as_ref().zip(other.as_ref()).is_some_and(same) {
            return Err(Error::Duplicate {
                first: first.path.display().to_string(),
                second: member.path.display().to_string(),
                index: member.index,
                uuid: uuid_text(&member.uuid),
            });
        }
    }
    Ok(kept.into_iter().map(|(member, _)| member.path).collect())
}

/// All arrays of a name, each with its devices.
fn same_name(name: &str, members: &[Member]) -> Error {
    let mut arrays: BTreeMap<[u8; 16], Vec<String>> = BTreeMap::new();
    for member in members {
        let devices = arrays.entry(member.uuid).or_default();
        devices.push(member.path.display().to_string());
    }
    Error::SameName {
        name: name.to_owned(),
        arrays: arrays
            .into_iter()
            .map(|(uuid, devices)| format!("UUID={} on {}", uuid_text(&uuid), devices.join(", ")))
            .collect(),
    }
}

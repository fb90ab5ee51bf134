//! Finding an array's devices by their labels, for `UUID=` and `LABEL=` in fstab.

use crate::block::BlockDevice;
use crate::error::Error;
use crate::file;
use crate::labels::{label_name, read_label};
use crate::uuid::{parse_uuid, uuid_text};
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
    /// Parses `UUID=…` and `LABEL=…` (also `NAME=…`); `None` for anything else, a path say.
    pub fn parse(text: &str) -> Option<ArrayId> {
        let (key, value) = text.split_once('=')?;
        let value = value.trim_matches('"');
        match key {
            "UUID" => parse_uuid(value).map(ArrayId::Uuid),
            "LABEL" | "NAME" => Some(ArrayId::Name(value.to_owned())),
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
    candidates
        .iter()
        .filter_map(|path| read_member(path))
        .filter(|member| which.is_none_or(|id| id.matches(member)))
        .collect()
}

fn read_member(path: &Path) -> Option<Member> {
    let device = file::open_to_look(path, false).ok()?;
    let label = read_label(&device).ok()?.label;
    Some(Member {
        uuid: label.uuid,
        name: label_name(&label),
        index: label.device_index.get() as usize,
        count: label.device_count.get() as usize,
        bytes: device.bytes(),
        path: path.to_owned(),
    })
}

/// The devices of one array, by device index. Which are missing or there twice,
/// `Array::assemble` says; here at least one must exist.
pub fn find_members(which: &ArrayId, candidates: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    let mut members = scan(Some(which), candidates);
    if members.is_empty() {
        return Err(Error::NotFound {
            which: which.to_string(),
        });
    }
    members.sort_by_key(|m| (m.uuid, m.index));
    Ok(members.into_iter().map(|m| m.path).collect())
}

//! From what the user names to an open array: `UUID=`, `LABEL=`, devices separated by ':',
//! or one device of several, whose companions are found by their labels.

use std::fs::DirEntry;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::sync::{Condvar, Mutex, rank};
use device::{Array, ArrayId, Backend, BlockDevice, OpenOptions, ReapRing, Reaping, Topology};
use format::MAX_DEVICES;

use crate::failure::Failure;
use crate::output::harmless;

/// The paths of all devices of the one array that `given` names.
pub fn find(given: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut paths = Vec::new();
    for spec in given {
        match spec.to_str().and_then(ArrayId::parse) {
            Some(id) => paths.extend(members(&id)?),
            None if is_tag(spec) && !spec.exists() => return Err(no_such_tag(spec)),
            None => paths.extend(split(spec)),
        }
        if paths.iter().any(|path| path.as_os_str().is_empty()) {
            return Err(empty_name(spec));
        }
    }
    check_count(&paths)?;
    match &paths[..] {
        [single] => with_companions(single),
        _ => Ok(paths),
    }
}

/// Whether an array can have as many.
pub fn check_count(paths: &[PathBuf]) -> Result<(), Failure> {
    match paths.len() {
        1..=MAX_DEVICES => Ok(()),
        given => Err(Failure::usage(format!(
            "an array has 1 to {MAX_DEVICES} devices, not {given}"
        ))),
    }
}

/// The devices of this machine that an array has.
fn members(id: &ArrayId) -> Result<Vec<PathBuf>, Failure> {
    let candidates = device::candidates();
    let found = device::find_members(id, &candidates);
    // One that may not be looked at may be it.
    found.map_err(|error| match unreadable(&candidates) {
        Some(refused) => Failure::new(format!("{error}; {refused}")),
        None => error.into(),
    })
}

/// Says which devices cannot be looked at for lack of rights, if any.
pub fn unreadable(candidates: &[PathBuf]) -> Option<String> {
    let is_refused = |path: &&PathBuf| {
        let opened = std::fs::File::open(path);
        // What a container keeps from root as well is no question of rights.
        opened.is_err_and(|error| error.raw_os_error() == Some(libc::EACCES))
    };
    let refused: Vec<_> = candidates.iter().filter(is_refused).collect();
    let (first, others) = refused.split_first()?;
    let others = match others.len() {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    Some(format!(
        "{}{others}: cannot open: Permission denied; run as root or get access",
        first.display()
    ))
}

/// Of a list of devices in which one has no name.
fn empty_name(spec: &Path) -> Failure {
    Failure::usage(format!(
        "'{}': an empty device name; names are divided by one ':' each",
        spec.display()
    ))
}

/// Whether it begins as what names a file system instead of a device.
pub fn is_tag(spec: &Path) -> bool {
    let text = spec.to_str().unwrap_or_default();
    ["UUID=", "LABEL="].iter().any(|tag| text.starts_with(tag))
}

/// Of something that begins as a UUID or a label does, and is none.
fn no_such_tag(spec: &Path) -> Failure {
    let what = match spec.to_str().is_some_and(|text| text.starts_with("LABEL=")) {
        true => {
            "no label; give the name that the file system has, or its UUID (`sheaf info` shows both)"
        }
        false => {
            "no UUID; give all of it, as UUID=01234567-89ab-cdef-0123-456789abcdef (`sheaf info` shows it)"
        }
    };
    Failure::usage(format!("{}: {what}", spec.display()))
}

/// `a:b:c` is three devices, unless a file has just that name.
pub fn split(spec: &Path) -> Vec<PathBuf> {
    match spec.to_str() {
        Some(text) if text.contains(':') && !spec.exists() => {
            text.split(':').map(PathBuf::from).collect()
        }
        _ => vec![spec.to_owned()],
    }
}

/// The device with the others of its array: block devices of this machine, or files in the
/// same folder. Of those that are not found opening says that they are missing.
fn with_companions(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let candidates = match path.is_file() {
        true => files_beside(path),
        false => device::candidates(),
    };
    Ok(device::companions(path, &candidates)?)
}

fn files_beside(path: &Path) -> Vec<PathBuf> {
    let folder = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    // Of a folder nothing is asked: what is mounted there may be hung.
    let is_file = |entry: &DirEntry| {
        let kind = entry.file_type();
        kind.is_ok_and(|kind| kind.is_file() || kind.is_symlink() && entry.path().is_file())
    };
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .filter(is_file)
        .map(|entry| entry.path())
        .collect();
    files.sort();
    files
}

/// How to open an array.
#[derive(Clone, Copy, Debug, Default)]
pub struct Access {
    pub read_only: bool,
    pub backend: Backend,
    pub topology: Topology,
    pub reap: Reaping,
    pub reap_ring: ReapRing,
    /// What who may only read a device can do without writing to it.
    pub instead: Option<&'static str>,
}

/// Opens the array over `paths`.
pub fn open(paths: &[PathBuf], access: Access) -> Result<Arc<Array>, Failure> {
    let devices = claim(paths, access)?;
    Ok(Arc::new(Array::assemble(devices, access.read_only)?))
}

/// Opens the devices at `paths`, as they are.
pub fn claim(paths: &[PathBuf], access: Access) -> Result<Vec<Arc<dyn BlockDevice>>, Failure> {
    let options = OpenOptions {
        read_only: access.read_only,
        backend: access.backend,
        topology: access.topology,
        reap: access.reap,
        reap_ring: access.reap_ring,
        ..OpenOptions::default()
    };
    device::open_when_free(paths, &options).map_err(|error| {
        let refused = !access.read_only && is_refused_to_write(&error);
        match access.instead.filter(|_| refused) {
            Some(instead) => Failure::from(error).after(instead),
            None => error.into(),
        }
    })
}

/// Whether who only reads could do without; not with threads or rings, which everybody needs.
fn is_refused_to_write(error: &device::Error) -> bool {
    matches!(error, device::Error::Open { .. })
        && matches!(
            error.raw_os_error(),
            Some(libc::EACCES | libc::EPERM | libc::EROFS)
        )
}

/// Waits.
pub fn pause(time: Duration) {
    let (lock, never) = (Mutex::new(rank::LEAF, ()), Condvar::new());
    never.wait_for(&mut lock.lock(), time);
}

/// Opens the array for a look that disturbs nobody: read-only, and though it be in use.
pub fn look(paths: &[PathBuf], access: Access) -> Result<Arc<Array>, Failure> {
    let options = OpenOptions {
        read_only: true,
        exclusive: false,
        backend: access.backend,
        ..OpenOptions::default()
    };
    let devices = device::open_devices(paths, &options)?;
    Ok(Arc::new(Array::assemble(devices, true)?))
}

/// The name and UUID of an array, for messages.
pub fn title(array: &Array) -> String {
    let name = harmless(device::label_name(array.label()).as_bytes());
    let uuid = device::uuid_text(&array.uuid());
    match name.is_empty() {
        true => uuid,
        false => format!("\"{name}\" ({uuid})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where there is no io_uring a mount to read fails as well, which was told to be the remedy.
    #[test]
    fn only_who_may_not_write_a_device_is_told_how_to_read_it() {
        let source = || Arc::new(std::io::Error::from_raw_os_error(libc::EPERM));
        assert!(is_refused_to_write(&device::Error::Open {
            device: "a.img".into(),
            source: source(),
            remedy: "",
        }));
        assert!(!is_refused_to_write(&device::Error::NoIoUring {
            source: source()
        }));
    }
}

//! Where a benchmark's files and mounts are: one folder, with a tmpfs over it where that is
//! possible and nothing else was asked for.
//!
//! 1. Everything that a benchmark makes on the host lies in the folder, which goes with the
//!    value: mounts first.
//! 2. Mounts are made in a mount table of this process's own, so that nobody else sees them
//!    and that they, and the loop devices below them, end with the process, however it ends: a daemon of
//!    Sheaf, which has that table, too, ends with it. A kill leaves the folder, and what is in it where no tmpfs of ours covers it.
//! 3. Devices that are given are claimed, all of them, before anything else is done, and again each time before a side gets them
//!    ([`Place::claim`]). The claim is given up for a side that makes one of its own, as Sheaf, `mkfs` and mounts do; sides that write
//!    to devices themselves do it under the claim. Between sides nobody claims them: who takes one then, and not just for the moment in
//!    which a mount of ours ends, has the next side fail.
//! 4. Of these, those that a side got are wiped at the end, under a claim, and no others: one that somebody has taken is left alone.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use device::Claim;
use rustix::fs::{Advice, fadvise};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::claim::claim_unused;
use super::disk::{self, Disk};
use crate::Error;

/// Image files that hold a Sheaf file system.
const IMAGES: u64 = 4;
/// Has the kernel drop clean pages, inodes and names.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
const SHARED_MEMORY: &str = "/dev/shm";
/// Bytes at either end of a device where file systems put what they are known by.
const SIGNATURES: u64 = 1 << 20;

/// Made so far by this process: it may have several.
static PLACES: AtomicU64 = AtomicU64::new(0);

/// Where the user wants it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// In memory: a tmpfs.
    #[default]
    Memory,
    /// Image files in this folder.
    Dir(PathBuf),
    /// One loop device over an image file in this folder, or in memory, for all sides in turn; every block of it was written.
    Loop(Option<PathBuf>),
    /// So many loop devices over image files of which every block was written, for all sides in turn.
    Loops(Option<PathBuf>, u64),
    /// These block devices, whose content is lost.
    Devices(Vec<PathBuf>),
}

impl Storage {
    /// The same, but for all sides on one device in turn.
    pub fn shared(self) -> Storage {
        match self {
            Storage::Memory => Storage::Loop(None),
            Storage::Dir(dir) => Storage::Loop(Some(dir)),
            same => same,
        }
    }

    /// Where the files of loop devices are, and how many there are of them.
    fn loops(&self) -> Option<(&Option<PathBuf>, u64)> {
        match self {
            Storage::Loop(dir) => Some((dir, 1)),
            Storage::Loops(dir, count) => Some((dir, *count)),
            _ => None,
        }
    }
}

/// What users can give where a suite has too little room.
#[derive(Clone, Copy, Debug)]
pub struct Remedies {
    /// The suite's options by which it wants less.
    pub less: &'static str,
    /// It takes --dir for what it has in memory.
    pub dir: bool,
    /// The options by which it needs no root, if there are any.
    pub rootless: &'static str,
}

impl Remedies {
    /// Of a suite that takes --dir.
    pub const fn less(less: &'static str) -> Remedies {
        Remedies {
            less,
            dir: true,
            rootless: "",
        }
    }

    /// Of one that always is in memory.
    pub const fn in_memory(less: &'static str) -> Remedies {
        Remedies {
            less,
            dir: false,
            rootless: "",
        }
    }

    /// The same of a suite that needs no root by these options.
    pub const fn without_root(self, rootless: &'static str) -> Remedies {
        Remedies { rootless, ..self }
    }

    /// Where --loop is given, that has to go, too.
    fn without_loop(self) -> Remedies {
        let rootless = match self.rootless {
            "" => "",
            _ => "--against none without --loop",
        };
        Remedies { rootless, ..self }
    }

    /// For who is not root: what takes that, and what helps.
    pub fn root(self, what: &str) -> Error {
        let other = match self.rootless {
            "" => String::new(),
            options => format!(", or give {options}"),
        };
        Error::Unable(format!("{what} root is needed: run this as root{other}"))
    }

    /// A message, and what helps: less, or `other`.
    fn after(self, message: &str, other: Option<&str>) -> Error {
        let less = (!self.less.is_empty()).then(|| format!("want less ({})", self.less));
        let other = other.map(|other| format!("give {other}"));
        let ways: Vec<String> = less.into_iter().chain(other).collect();
        Error::Unable(match ways.is_empty() {
            true => message.to_owned(),
            false => format!("{message}: {}", ways.join(", or ")),
        })
    }
}

pub struct Place {
    dir: PathBuf,
    /// A tmpfs of ours covers `dir`.
    covered: bool,
    devices: Vec<PathBuf>,
    /// So many of the first of these were for a side to write to.
    handed: AtomicUsize,
    /// The loop device that they are stays as long as somebody has it open.
    attached: Vec<File>,
    /// Files below those.
    below: Vec<PathBuf>,
    /// Files below devices of which every block was written, and stays so.
    written: Vec<PathBuf>,
    /// Size of a side's storage in all.
    bytes: u64,
}

/// Whether the process may mount.
pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

impl Place {
    /// A place where each side finds storage of `bytes` bytes, one at a time. With `mounts`
    /// it is one where file systems can be mounted. To be called before the process has other
    /// threads, which would go on seeing the old mount table.
    pub fn new(
        storage: &Storage,
        bytes: u64,
        mounts: bool,
        remedies: Remedies,
    ) -> Result<Place, Error> {
        if !is_root() {
            match storage {
                Storage::Loop(_) => return Err(remedies.without_loop().root("for a loop device")),
                Storage::Loops(..) => return Err(remedies.root("for loop devices")),
                _ => {}
            }
        }
        if let Some((dir, count)) = storage.loops() {
            let images = dir.clone().map_or(Storage::Memory, Storage::Dir);
            return Place::new(&images, bytes, true, remedies)?.on_loops(count);
        }
        if mounts && !is_root() {
            return Err(
                remedies.root("to mount file systems (on loop devices that are set up for it)")
            );
        }
        // Until the place is there.
        let _claim = match storage {
            Storage::Devices(devices) => {
                let claim = claim_unused(devices)?;
                check_size(devices, bytes, mounts, remedies)?;
                Some(claim)
            }
            _ => None,
        };
        if *storage == Storage::Memory {
            check_memory(bytes, remedies)?;
        }
        if let Storage::Dir(dir) = storage {
            check_room(dir, bytes, remedies)?;
        }
        if mounts {
            base::sys::private_mounts().map_err(|source| Error::Io {
                what: "cannot have mounts of its own".to_owned(),
                source,
            })?;
        }
        let home = match storage {
            Storage::Dir(dir) => dir.clone(),
            Storage::Memory if !mounts && Path::new(SHARED_MEMORY).is_dir() => {
                PathBuf::from(SHARED_MEMORY)
            }
            _ => std::env::temp_dir(),
        };
        let home = home.canonicalize().map_err(|e| Error::io(&home, e))?;
        let number = PLACES.fetch_add(1, Ordering::Relaxed);
        let dir = home.join(format!("sheaf-bench-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir).map_err(|e| Error::io(&dir, e))?;
        let mut place = Place {
            dir,
            covered: false,
            devices: Vec::new(),
            handed: AtomicUsize::new(0),
            attached: Vec::new(),
            below: Vec::new(),
            written: Vec::new(),
            bytes,
        };
        if let Storage::Devices(devices) = storage {
            place.devices.clone_from(devices);
        }
        if mounts && *storage == Storage::Memory {
            // As much as there is to hold, and room for its own bookkeeping.
            let size = format!("size={},mode=0700", bytes + bytes / 8 + (64 << 20));
            let size = std::ffi::CString::new(size).unwrap_or_default();
            mount(
                "sheaf-bench",
                &place.dir,
                "tmpfs",
                MountFlags::empty(),
                &*size,
            )?;
            place.covered = true;
        }
        Ok(place)
    }

    /// One on this device, where file systems can be mounted.
    pub fn over(disk: &Disk, bytes: u64, remedies: Remedies) -> Result<Place, Error> {
        let storage = Storage::Devices(vec![disk.path().to_owned()]);
        let mut place = Place::new(&storage, bytes, true, remedies)?;
        place.written.extend(disk.image().map(Path::to_owned));
        Ok(place)
    }

    /// The same with so many loop devices over image files for all sides. A file that is made only as it is written to has whoever
    /// comes first pay for its blocks.
    fn on_loops(mut self, count: u64) -> Result<Place, Error> {
        let mut images = self.written(count)?;
        for image in &images.paths {
            self.attach(image)?;
        }
        // From here on they go with the folder.
        images.images = false;
        self.written.append(&mut images.paths);
        Ok(self)
    }

    /// One more device: a loop device over this file.
    fn attach(&mut self, image: &Path) -> Result<(), Error> {
        let opened = File::options().read(true).write(true).open(image);
        let opened = opened.map_err(|e| Error::io(image, e))?;
        let (path, attached) = base::sys::attach_loop(&opened).map_err(|source| Error::Io {
            what: "a loop device".to_owned(),
            source,
        })?;
        self.devices.push(path);
        self.attached.push(attached);
        self.below.push(image.to_owned());
        Ok(())
    }

    /// Has the kernel forget what it has in memory of these devices, of files below, and of what is mounted: reads then
    /// come from where the files are. A tmpfs forgets nothing. Needs the rights of root.
    pub fn forget(&self, devices: &Devices) -> Result<(), Error> {
        for path in devices.paths.iter().chain(&self.below) {
            forget_pages(path).map_err(|e| Error::io(path, e))?;
        }
        std::fs::write(DROP_CACHES, "3").map_err(|e| Error::io(Path::new(DROP_CACHES), e))
    }

    /// A place for one side's sparse storage of `bytes` bytes, of which at most `written` are ever written.
    pub fn sparse(
        storage: &Storage,
        bytes: u64,
        written: u64,
        remedies: Remedies,
    ) -> Result<Place, Error> {
        let mut place = Place::new(storage, written, false, remedies)?;
        place.bytes = bytes;
        Ok(place)
    }

    /// A folder in it that does not exist, to mount on.
    pub fn mount_point(&self) -> Result<PathBuf, Error> {
        let dir = self.dir.join("mnt");
        std::fs::create_dir_all(&dir).map_err(|e| Error::io(&dir, e))?;
        Ok(dir)
    }

    /// A name in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The block devices that were given, or loop devices in their place.
    pub fn devices(&self) -> &[PathBuf] {
        &self.devices
    }

    /// Size of a side's storage in bytes, in all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where every block was written, as nobody shall pay for the first time: those are written again that have become holes.
    pub fn write_holes(&self) -> Result<(), Error> {
        self.written
            .iter()
            .try_for_each(|path| disk::write_holes(path))
    }

    /// What a Sheaf array is made on: the devices, or fresh image files.
    pub fn array(&self) -> Result<Devices, Error> {
        match self.devices.is_empty() {
            false => self.first(self.devices.len()),
            true => self.images(IMAGES, "device"),
        }
    }

    /// The first of the devices that were given, so many of them, for a side that claims them itself.
    pub fn first(&self, count: usize) -> Result<Devices, Error> {
        drop(self.claim(count)?);
        self.write_holes()?;
        Ok(Devices::given(self.devices[..count].to_vec()))
    }

    /// All of them, for who claims them each time.
    pub fn all(&self) -> Devices {
        Devices::given(self.devices.clone())
    }

    /// Keeps others from the first of the devices that were given, which will be written to (invariants 3 and 4). Of files, and of loop
    /// devices, that were made here nobody else knows.
    pub fn claim(&self, count: usize) -> Result<Option<Claim>, Error> {
        if self.devices.is_empty() || !self.attached.is_empty() {
            return Ok(None);
        }
        let claim = device::claim_when_free(&self.devices[..count])?;
        self.handed.fetch_max(count, Ordering::Relaxed);
        Ok(Some(claim))
    }

    /// What a kernel file system is made on: the first device, or a fresh image file.
    pub fn single(&self) -> Result<Devices, Error> {
        match self.devices.is_empty() {
            false => self.first(1),
            true => self.images(1, "image"),
        }
    }

    /// Fresh image files of equal size, of which every block was written: no side pays for the first time.
    pub fn written(&self, count: u64) -> Result<Devices, Error> {
        let images = self.images(count, "device")?;
        images.fill(self.bytes.div_ceil(count))?;
        Ok(images)
    }

    /// Fresh image files of equal size.
    pub fn images(&self, count: u64, name: &str) -> Result<Devices, Error> {
        let mut images = Devices {
            paths: Vec::new(),
            images: true,
        };
        for i in 0..count {
            let path = self.dir.join(format!("{name}{i}"));
            device::create_image(&path, self.bytes.div_ceil(count))?;
            images.paths.push(path);
        }
        Ok(images)
    }
}

/// Only what is at the device can be dropped.
fn forget_pages(path: &Path) -> std::io::Result<()> {
    let file = File::open(path)?;
    file.sync_data()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

/// The largest `bytes` of storage may grow in memory, and about as much again is needed to
/// work on it.
fn check_memory(bytes: u64, remedies: Remedies) -> Result<(), Error> {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = info.lines().find_map(|line| {
        let kib = line.strip_prefix("MemAvailable:")?.trim();
        kib.strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    match available.map(|kib| kib << 10) {
        Some(available) if bytes > available / 2 => {
            let message = format!(
                "{} MiB in memory are wanted and {} MiB are available",
                bytes >> 20,
                available >> 20
            );
            let disk = remedies.dir.then_some("--dir with a folder on a disk");
            Err(remedies.after(&message, disk))
        }
        _ => Ok(()),
    }
}

/// The file system of a folder has so many bytes left for us.
pub(super) fn check_room(dir: &Path, bytes: u64, remedies: Remedies) -> Result<(), Error> {
    let found = rustix::fs::statvfs(dir).map_err(|e| Error::io(dir, e.into()))?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    match bytes > free {
        true => {
            let message = format!(
                "{} MiB in {} are wanted and {} MiB are free",
                bytes >> 20,
                dir.display(),
                free >> 20
            );
            Err(remedies.after(&message, Some("--dir with a folder that has more room")))
        }
        false => Ok(()),
    }
}

/// All devices together hold `bytes`, and with `mounts` the first does.
fn check_size(
    devices: &[PathBuf],
    bytes: u64,
    mounts: bool,
    remedies: Remedies,
) -> Result<(), Error> {
    let size = |path: &PathBuf| {
        let mut file = File::open(path).map_err(|e| Error::io(path, e))?;
        file.seek(SeekFrom::End(0)).map_err(|e| Error::io(path, e))
    };
    let sizes = devices.iter().map(size).collect::<Result<Vec<u64>, _>>()?;
    let (whose, size, larger) = match mounts {
        true => {
            let first = sizes.first().copied().unwrap_or(0);
            ("the first device has", first, "a larger one")
        }
        false => {
            let all = sizes.iter().sum();
            ("the devices together have", all, "larger ones")
        }
    };
    match size < bytes {
        true => {
            let message = format!(
                "{} MiB are needed and {whose} {} MiB",
                bytes.div_ceil(1 << 20),
                size >> 20
            );
            Err(remedies.after(&message, Some(larger)))
        }
        false => Ok(()),
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Loop devices of ours are not among them: their content goes with its file.
        for device in &self.devices[..*self.handed.get_mut()] {
            if let Err(error) = wipe(device) {
                tracing::warn!("not wiped, and may hold what the benchmark wrote: {error}");
            }
        }
        if self.covered
            && let Err(error) = unmount(&self.dir, UnmountFlags::DETACH)
        {
            tracing::warn!("{}: not unmounted: {error}", self.dir.display());
        }
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            tracing::warn!("{}: not removed: {error}", self.dir.display());
        }
    }
}

/// Zeros where file systems put what they are known by, unless somebody else has the device by now.
fn wipe(path: &PathBuf) -> Result<(), Error> {
    use std::os::unix::fs::FileExt;
    let _claim = device::claim_when_free(std::slice::from_ref(path))?;
    let write = || {
        let mut file = File::options().write(true).open(path)?;
        let bytes = file.seek(SeekFrom::End(0))?;
        let zeros = vec![0; SIGNATURES.min(bytes) as usize];
        file.write_all_at(&zeros, 0)?;
        file.write_all_at(&zeros, bytes - zeros.len() as u64)?;
        file.sync_all()
    };
    write().map_err(|e| Error::io(path, e))
}

/// Devices of one side; image files among them go with the value.
#[derive(Debug)]
pub struct Devices {
    pub paths: Vec<PathBuf>,
    /// They are files that were made for it.
    pub images: bool,
}

impl Devices {
    /// Writes so many bytes of each, from the start on. Those that were given are claimed by the caller.
    pub fn fill(&self, bytes: u64) -> Result<(), Error> {
        for path in &self.paths {
            let opened = File::options().write(true).open(path);
            let file = opened.map_err(|e| Error::io(path, e))?;
            super::disk::fill(&file, bytes).map_err(|error| match error {
                Error::Io { source, .. } => Error::io(path, source),
                other => other,
            })?;
        }
        Ok(())
    }

    fn given(paths: Vec<PathBuf>) -> Devices {
        Devices {
            paths,
            images: false,
        }
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        for path in self.paths.iter().filter(|_| self.images) {
            if let Err(error) = std::fs::remove_file(path) {
                tracing::warn!("{}: not removed: {error}", path.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REMEDIES: Remedies = Remedies::less("--count");

    #[test]
    fn nothing_is_left_of_a_place() {
        let home = tempfile::tempdir().unwrap();
        let storage = Storage::Dir(home.path().to_owned());
        let place = Place::new(&storage, 8 << 20, false, REMEDIES).unwrap();
        let array = place.array().unwrap();
        assert_eq!(array.paths.len(), 4);
        assert!(array.paths.iter().all(|path| path.is_file()));
        let image = array.paths[0].clone();
        drop(array);
        assert!(!image.exists());
        std::fs::write(place.file("other"), "left behind").unwrap();
        drop(place);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn sides_share_one_loop_device_where_that_is_asked_for() {
        let home = tempfile::tempdir().unwrap();
        let storage = Storage::Dir(home.path().to_owned()).shared();
        let place = Place::new(&storage, 8 << 20, false, REMEDIES);
        if !is_root() || !Path::new("/dev/loop-control").exists() {
            base::skip("loop devices");
            return assert!(place.is_err());
        }
        let place = place.unwrap();
        let (array, single) = (place.array().unwrap(), place.single().unwrap());
        assert_eq!(array.paths, single.paths);
        assert_eq!(array.paths, place.devices());
        assert!(array.paths[0].starts_with("/dev") && !array.images);
        assert!(check_size(&array.paths, 8 << 20, true, REMEDIES).is_ok());
        // Every block was written.
        let image = File::open(&place.below[0]).unwrap();
        let hole = rustix::fs::seek(&image, rustix::fs::SeekFrom::Hole(0)).unwrap();
        assert_eq!(hole, 8 << 20);
        drop((array, single, place, image));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn several_loop_devices_are_of_one_place() {
        let home = tempfile::tempdir().unwrap();
        let storage = Storage::Loops(Some(home.path().to_owned()), 3);
        let place = Place::new(&storage, 3 << 20, false, REMEDIES);
        if !is_root() || !Path::new("/dev/loop-control").exists() {
            base::skip("loop devices");
            return assert!(place.is_err());
        }
        let place = place.unwrap();
        let array = place.array().unwrap();
        assert_eq!((array.paths.len(), array.images), (3, false));
        assert_eq!(place.first(2).unwrap().paths, array.paths[..2]);
        assert!(check_size(&array.paths, 3 << 20, false, REMEDIES).is_ok());
        drop((array, place));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn devices_are_large_enough() {
        let dir = tempfile::tempdir().unwrap();
        let devices = ["a", "b"].map(|name| dir.path().join(name));
        let devices = devices.to_vec();
        for device in &devices {
            device::create_image(device, 8 << 20).unwrap();
        }
        assert!(check_size(&devices, 16 << 20, false, REMEDIES).is_ok());
        assert!(check_size(&devices, (16 << 20) + 1, false, REMEDIES).is_err());
        assert!(check_size(&devices, 8 << 20, true, REMEDIES).is_ok());
        assert!(check_size(&devices, 16 << 20, true, REMEDIES).is_err());
    }

    #[test]
    fn more_than_a_folder_has_room_for_is_refused_before_anything_is_made() {
        let home = tempfile::tempdir().unwrap();
        let storage = Storage::Dir(home.path().to_owned());
        let refused = Place::new(&storage, 1 << 60, false, REMEDIES);
        let told = refused.err().unwrap().to_string();
        assert!(
            told.contains("are free") && told.contains("--count"),
            "{told}"
        );
        assert!(told.contains("more room"), "{told}");
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        let refused = Disk::make(home.path(), 1 << 60, REMEDIES);
        assert!(matches!(refused, Err(Error::Unable(_))));
    }

    #[test]
    fn who_is_not_root_is_told_what_helps_if_anything_does() {
        let told = REMEDIES.root("for loop devices").to_string();
        assert_eq!(told, "for loop devices root is needed: run this as root");
        let told = REMEDIES.without_root("--against none");
        let told = told.root("for loop devices").to_string();
        assert!(
            told.ends_with("run this as root, or give --against none"),
            "{told}"
        );
        let told = REMEDIES
            .without_loop()
            .root("for a loop device")
            .to_string();
        assert!(told.ends_with("run this as root"), "{told}");
    }

    #[test]
    fn more_than_the_memory_is_refused() {
        let refused = Place::new(&Storage::Memory, 1 << 60, false, REMEDIES);
        assert!(matches!(refused, Err(Error::Unable(_))));
    }

    #[test]
    fn what_helps_is_what_a_suite_takes() {
        let dir = tempfile::tempdir().unwrap();
        let device = dir.path().join("a");
        device::create_image(&device, 8 << 20).unwrap();
        let devices = [device];
        let said = |refused: Result<(), Error>| refused.unwrap_err().to_string();
        let none = Remedies::in_memory("");
        assert_eq!(
            said(check_size(&devices, 9 << 20, true, none)),
            "9 MiB are needed and the first device has 8 MiB: give a larger one"
        );
        assert_eq!(
            said(check_size(&devices, 9 << 20, false, REMEDIES)),
            "9 MiB are needed and the devices together have 8 MiB: want less (--count), or give larger ones"
        );
        assert!(said(check_memory(1 << 60, none)).ends_with("MiB are available"));
        let large = said(check_memory(1 << 60, REMEDIES));
        assert!(
            large.contains("--count") && large.contains("--dir"),
            "{large}"
        );
    }
}

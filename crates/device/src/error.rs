//! What can go wrong with devices and arrays, each message with the device and the remedy.

use format::Damage;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// An error of this crate. Cloning shares the source.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{device}: {operation} of {len} bytes at byte {offset} failed: {source}{}",
        io_remedy(source)
    )]
    Io {
        device: String,
        operation: &'static str,
        /// Byte offset on the device.
        offset: u64,
        len: u64,
        source: Arc<io::Error>,
    },
    #[error(
        "{device}: flush failed, so data written since the last good flush may be lost: {source}"
    )]
    Flush {
        device: String,
        source: Arc<io::Error>,
    },
    #[error("{device}: cannot open: {source}{remedy}")]
    Open {
        device: String,
        source: Arc<io::Error>,
        /// Starts with a separator, or is empty.
        remedy: &'static str,
    },
    #[error(
        "{device} is in use: mounted, or open in another process or in this one; unmount or close it first"
    )]
    InUse { device: String },
    #[error("{device} is neither a block device nor a regular file; name one of these")]
    NotADevice { device: String },
    #[error(
        "{first} and {second} are the same device, or share a part of it; name each device once"
    )]
    GivenTwice { first: String, second: String },
    #[error("cannot create the image {path}: {source}")]
    Image {
        path: String,
        source: Arc<io::Error>,
    },
    #[error("cannot start I/O threads: {source}")]
    Threads { source: Arc<io::Error> },
    #[error(
        "a transfer in flight moves bytes of its memory, and is no durable write: a flush that fails with it would be \
         told to nobody else; use the calls that wait for those"
    )]
    NotInFlight,
    #[error(
        "io_uring {}: {source}{}; use `io=threads` instead",
        if ring_remedy(source).is_empty() { "is not available here" } else { "has no ring to give" },
        ring_remedy(source)
    )]
    NoIoUring { source: Arc<io::Error> },

    #[error(
        "{device} is not a Sheaf device{}; name the array's devices. If it is one whose label was lost, name it with all others of its \
         array, one by one: that tells how `sheaf fsck --relabel` writes the label again",
        found.as_ref().map(|f| format!(" (it holds {f})")).unwrap_or_default()
    )]
    NotSheaf {
        device: String,
        found: Option<String>,
    },
    /// Somebody else's signature lies where the first label was.
    #[error(
        "{device} holds {found}, but a label in its last block says that it is, or was, device {index} of {count} of file system {uuid} ({name:?}), counted \
         from 0. If that is wanted, do not run mkfs: if nothing of {found} is, `wipefs --all {device}` removes it, and then \
         `sheaf fsck --repair` writes the first label again"
    )]
    LabelCovered {
        device: String,
        found: String,
        index: usize,
        count: usize,
        uuid: String,
        name: String,
    },
    #[error(
        "{device}: both copies of the label are damaged (first: {head}; last: {tail}); \
         restore this device from a backup"
    )]
    LabelDamaged {
        device: String,
        head: Damage,
        tail: Damage,
    },
    #[error("{0}")]
    LabelLost(Box<LostLabels>),
    #[error(
        "{device}: format version {version} is newer than the newest known, {known}; \
         use a newer version of Sheaf"
    )]
    NewerVersion {
        device: String,
        version: u32,
        known: u32,
    },
    #[error(
        "{device}: format version {version} is older than the oldest known, {known}; \
         use the version of Sheaf that made it, and copy the files to a new array"
    )]
    OlderVersion {
        device: String,
        version: u32,
        known: u32,
    },
    #[error(
        "{device}: needs features this version does not know: {features}; use a newer version of Sheaf"
    )]
    UnknownFeatures { device: String, features: String },
    #[error(
        "{device}: has features this version can only read: {features}; \
         mount read-only or use a newer version of Sheaf"
    )]
    ReadOnlyFeatures { device: String, features: String },
    #[error(
        "{} of file system {uuid} ({name:?}) {} missing (of {count} devices, numbered 0 to {}); give all of its devices, or, if one \
         has lost its label, name all one by one for `sheaf fsck --relabel`",
        device_list(missing),
        if missing.len() == 1 { "is" } else { "are" },
        count.saturating_sub(1)
    )]
    Missing {
        /// Indices of the missing devices, from 0.
        missing: Vec<usize>,
        count: usize,
        uuid: String,
        name: String,
    },
    #[error(
        "{device} belongs to another file system ({uuid}) than {other} ({expected}); \
         leave it out"
    )]
    Foreign {
        device: String,
        uuid: String,
        other: String,
        expected: String,
    },
    #[error(
        "{first} and {second} both are device {index} of file system {uuid}; \
         one is a copy: leave it out and name the other devices one by one, or move it away"
    )]
    Duplicate {
        first: String,
        second: String,
        index: usize,
        uuid: String,
    },
    #[error(
        "{device} has {bytes} bytes, but the array needs {needed} of it; \
         grow it back to that size"
    )]
    TooSmall {
        device: String,
        bytes: u64,
        needed: u64,
    },
    #[error(
        "{device} has logical blocks of {logical_block} bytes, but the array was made for {align}; \
         use a device with blocks of {align} bytes or fewer"
    )]
    LogicalBlock {
        device: String,
        logical_block: u32,
        align: u32,
    },
    #[error(
        "the labels of {device} and {other} disagree about {what}; one of them is an old copy, or was put back to one: \
         give the latest state of each device"
    )]
    LabelsDisagree {
        device: String,
        other: String,
        what: &'static str,
    },
    /// As after a label or record that somebody has forged: no array lives to see it.
    #[error(
        "the next mount would be number {mount}, and no mount can follow number {}: copy the files out (mount -o ro), and to a new array",
        format::COUNTER_RECORD_MAX
    )]
    LastMount { mount: u64 },
    #[error("no device given; name the array's devices")]
    NoDevices,
    #[error("{given} devices given, but the geometry is for {expected}")]
    DeviceCount { given: usize, expected: usize },
    #[error("the name {name:?} is longer than {limit} bytes; choose a shorter one")]
    NameTooLong { name: String, limit: usize },
    #[error(
        "the name {name:?} has control characters, which nobody could type or see; choose one without"
    )]
    ControlInName { name: String },
    #[error("the array is open read-only; open it for writing first")]
    ReadOnly,
    #[error("bytes {byte} to {byte}+{len} lie outside the array of {limit} bytes")]
    OutOfRange { byte: u64, len: u64, limit: u64 },
    #[error("byte {byte} or length {len} is not a multiple of {align}")]
    Misaligned { byte: u64, len: u64, align: u32 },
    #[error("there is no checkpoint slot {slot}, copy {copy}")]
    NoSlot { slot: usize, copy: usize },
    #[error(
        "no block device carries a label of file system {which}; attach its devices first, or name image files, which are not searched \
         for, by their paths"
    )]
    NotFound { which: String },
    #[error(
        "{} file systems are called {name:?}: {}; name the one that is meant by its UUID",
        arrays.len(),
        arrays.join("; ")
    )]
    SameName {
        name: String,
        /// As `UUID=… on /dev/a, /dev/b`.
        arrays: Vec<String>,
    },
    #[error(transparent)]
    Geometry(#[from] Damage),
}

/// A device both copies of whose label are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostLabel {
    pub device: String,
    pub bytes: u64,
    /// What is there instead.
    pub why: String,
}

/// Devices without a label beside others of an array that has no device in some places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostLabels {
    pub lost: Vec<LostLabel>,
    /// These places, from 0, and the sizes of their devices in bytes.
    pub missing: Vec<usize>,
    pub sizes: Vec<u64>,
    /// Places in all.
    pub count: usize,
    pub uuid: String,
    pub name: String,
    pub labelled: Vec<String>,
    /// All devices, as they were given.
    pub given: Vec<String>,
}

impl Error {
    /// The error number of the system call that failed, where one did.
    pub fn raw_os_error(&self) -> Option<i32> {
        self.io_source().and_then(io::Error::raw_os_error)
    }

    /// The I/O error behind this one, where there is one.
    pub fn io_source(&self) -> Option<&io::Error> {
        match self {
            Error::Io { source, .. }
            | Error::Flush { source, .. }
            | Error::Open { source, .. }
            | Error::Image { source, .. }
            | Error::Threads { source }
            | Error::NoIoUring { source } => Some(source),
            _ => None,
        }
    }

    /// As [`open`](Self::open), of something that was to be written, and may be there to be read.
    pub(crate) fn open_to_write(path: &Path, source: io::Error) -> Error {
        let wanted = match source.raw_os_error() {
            // Whose rights do not suffice for a file is told EACCES.
            Some(libc::EPERM) if path.is_file() => {
                "; it is immutable or append-only, for root as well: `lsattr` shows it, `chattr -i -a` ends it"
            }
            Some(libc::EACCES | libc::EPERM) => {
                "; run as root or get access to it that lets you write"
            }
            _ => return Error::open(path, source),
        };
        let mut error = Error::open(path, source);
        if let Error::Open { remedy, .. } = &mut error {
            *remedy = wanted;
        }
        error
    }

    /// A block device that was to be written, and that the kernel takes no writes to.
    pub(crate) fn write_protected(path: &Path) -> Error {
        Error::Open {
            device: path.display().to_string(),
            source: Arc::new(io::Error::from_raw_os_error(libc::EROFS)),
            remedy: "; the device takes no writes: let it take them (`blockdev --setrw`; losetup without --read-only)",
        }
    }

    /// An open that failed, with the remedy for the usual reasons.
    pub(crate) fn open(path: &Path, source: io::Error) -> Error {
        let device = path.display().to_string();
        let remedy = match source.raw_os_error() {
            Some(libc::EBUSY) => return Error::InUse { device },
            Some(libc::ENOENT) => "; check the path and that the device is attached",
            Some(libc::EACCES | libc::EPERM) => "; run as root or get access to it",
            Some(libc::EROFS) => "; it can only be read: make what it lies on writable",
            Some(libc::ENXIO | libc::ENOMEDIUM) => "; no medium is attached to it",
            _ => "",
        };
        Error::Open {
            device,
            source: Arc::new(source),
            remedy,
        }
    }
}

/// Starts with a separator, or is empty.
fn io_remedy(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => {
            "; what this device lies on is full (the host of a sparse image, the pool of a thin volume): make room there, and if \
             the file system has turned read-only, unmount it and mount it again"
        }
        _ => "",
    }
}

/// What helps who gets no ring; starts with a separator, or is empty.
pub(crate) fn ring_remedy(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOMEM) => "; there is no memory that may be locked: raise `ulimit -l`",
        Some(libc::EMFILE) => "; there are no descriptors left: raise `ulimit -n`",
        Some(libc::ENFILE) => "; there are no descriptors left: raise the sysctl fs.file-max",
        _ => "",
    }
}

impl std::fmt::Display for LostLabels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let LostLabels {
            lost,
            missing,
            sizes,
            count,
            uuid,
            name,
            labelled,
            given,
        } = self;
        let one = |lost: &LostLabel| {
            format!(
                "{}: both copies of the label are gone ({})",
                lost.device, lost.why
            )
        };
        let what: Vec<String> = lost.iter().map(one).collect();
        let carry = match labelled.len() {
            1 => "carries a label",
            _ => "carry labels",
        };
        write!(
            f,
            "{}; {} {carry} of file system {uuid} ({name:?}), which misses {} of {count}, counted from 0",
            what.join("; "),
            labelled.join(", "),
            device_list(missing),
        )?;
        if let ([lost], [size]) = (&lost[..], &sizes[..])
            && lost.bytes / 4096 < size / 4096
        {
            return write!(
                f,
                "; that has {size} bytes, {} has {}, so it is another device: name the right one",
                lost.device, lost.bytes
            );
        }
        if lost.len() != missing.len() {
            return f.write_str("; name all devices of this file system, and no others");
        }
        if let ([lost], [size]) = (&lost[..], &sizes[..])
            && lost.bytes / 4096 > size / 4096
        {
            return write!(
                f,
                "; that has {size} bytes, {} has {}: if it was enlarged, `sheaf fsck --relabel {}` writes its label again if what lies there proves it, \
                 unless this is a copy of the device; if it was not, it is another device: name the right one. Do not run mkfs",
                lost.device,
                lost.bytes,
                given.join(" ")
            );
        }
        let (this, its, itself) = match lost.len() {
            1 => (
                "this should be it",
                "its label",
                "this is the device itself, not a copy of it",
            ),
            _ => (
                "these should be they",
                "their labels",
                "these are the devices themselves, not copies of them",
            ),
        };
        write!(
            f,
            ": {this}. Do not run mkfs: `sheaf fsck --relabel {}` writes {its} again if what lies there proves it; say it only if {itself}",
            given.join(" ")
        )
    }
}

fn device_list(indices: &[usize]) -> String {
    let names: Vec<String> = indices.iter().map(usize::to_string).collect();
    let noun = if names.len() == 1 {
        "device"
    } else {
        "devices"
    };
    format!("{noun} {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who met it read "No space left on device" of a file system with room, and not whose.
    #[test]
    fn a_full_host_is_named_with_the_remedy() {
        let error = |number| Error::Io {
            device: "a.img".to_owned(),
            operation: "write",
            offset: 4096,
            len: 512,
            source: Arc::new(io::Error::from_raw_os_error(number)),
        };
        let told = |number| error(number).to_string().contains("make room there");
        assert!(told(libc::ENOSPC) && told(libc::EDQUOT) && !told(libc::EIO));
    }

    /// Whose image it was, and could read it, was told nothing but to become root; and who made or repaired one, to mount it.
    #[test]
    fn who_may_only_read_is_told_what_it_takes_to_write() {
        let path = Path::new("a.img");
        let source = io::Error::from_raw_os_error;
        for (number, words) in [
            (libc::EACCES, "lets you write"),
            (libc::EPERM, "lets you write"),
            (libc::EROFS, "writable"),
        ] {
            let error = Error::open_to_write(path, source(number));
            let text = error.to_string();
            assert!(text.contains(words) && !text.contains("mount"), "{text}");
            assert_eq!(error.raw_os_error(), Some(number));
        }
        // Root was told to become root.
        let image = tempfile::NamedTempFile::new().unwrap();
        let error = Error::open_to_write(image.path(), source(libc::EPERM));
        assert!(error.to_string().contains("`lsattr` shows"), "{error}");
        let error = Error::open(path, source(libc::EACCES));
        assert!(!error.to_string().contains("write"), "{error}");
        let error = Error::open_to_write(path, source(libc::EBUSY));
        assert!(matches!(error, Error::InUse { .. }), "{error}");
    }

    /// It read as if the machine had no io_uring.
    #[test]
    fn who_gets_no_ring_learns_what_there_is_none_of() {
        let text = |number| {
            let source = Arc::new(io::Error::from_raw_os_error(number));
            Error::NoIoUring { source }.to_string()
        };
        assert!(text(libc::ENOMEM).contains("memory that may be locked: raise `ulimit -l`"));
        assert!(text(libc::EMFILE).contains("no descriptors left"));
        assert!(text(libc::ENFILE).contains("no descriptors left"));
        for number in [libc::ENOMEM, libc::EMFILE, libc::ENFILE] {
            assert!(!text(number).contains("not available"));
        }
        assert!(text(libc::EPERM).contains("io_uring is not available here"));
        assert!(text(libc::EPERM).contains("use `io=threads` instead"));
    }
}

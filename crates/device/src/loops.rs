//! Loop devices and the files behind them: one storage by two names.
//!
//! A block device is claimed by `O_EXCL`, a file by `flock`, and neither sees the other. So whoever opens one exclusively claims the others,
//! too: of a loop device the file behind it, alone if the device shows it whole, and every other loop device that shows some of the same bytes;
//! of a file every loop device that shows a part of it. What the kernel does not tell, or does not let us open, is passed over: the file may be
//! gone, or in a place that this process does not see.

use crate::error::Error;
use std::fs::{self, File, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes of a regular file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The file's device and inode.
    file: (u64, u64),
    bytes: Range<u64>,
}

impl Part {
    pub fn whole(file: &fs::Metadata) -> Part {
        Part {
            file: (file.dev(), file.ino()),
            bytes: 0..u64::MAX,
        }
    }

    fn is_whole(&self) -> bool {
        self.bytes == (0..u64::MAX)
    }

    pub fn overlaps(&self, other: &Part) -> bool {
        let (a, b) = (&self.bytes, &other.bytes);
        self.file == other.file && a.start < b.end && b.start < a.end
    }
}

/// What a block device that is a loop device shows of which regular file. Of devices behind loop devices others take flock's locks.
pub(crate) fn behind(device: u64) -> Option<(PathBuf, Part)> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    shown(&PathBuf::from(format!(
        "/sys/dev/block/{major}:{minor}/loop"
    )))
}

fn shown(settings: &Path) -> Option<(PathBuf, Part)> {
    let behind = PathBuf::from(text(settings, "backing_file")?);
    let file = fs::metadata(&behind).ok().filter(fs::Metadata::is_file)?;
    let number = |name| text(settings, name)?.parse::<u64>().ok();
    let (start, limit) = (number("offset")?, number("sizelimit")?);
    let end = match limit {
        0 => u64::MAX,
        limit => start.saturating_add(limit),
    };
    let part = Part {
        bytes: start..end,
        ..Part::whole(&file)
    };
    Some((behind, part))
}

fn text(settings: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(settings.join(name)).ok()?;
    Some(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// Loop devices that show some of these bytes.
fn devices_over(part: &Part) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/sys/block") else {
        return Vec::new();
    };
    let shows_some = |entry: &fs::DirEntry| {
        let shown = shown(&entry.path().join("loop"));
        shown.is_some_and(|(_, shown)| shown.overlaps(part))
    };
    entries
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"loop"))
        .filter(shows_some)
        .map(|entry| Path::new("/dev").join(entry.file_name()))
        .collect()
}

/// Claims the loop devices over these bytes but that of the caller's, until what is returned is dropped; if they are only read none has to be
/// kept.
fn claim_over(
    path: &Path,
    (part, own): (&Part, Option<u64>),
    read_only: bool,
) -> Result<Vec<File>, Error> {
    let mut claims = Vec::new();
    for device in devices_over(part) {
        if own.is_some() && fs::metadata(&device).ok().map(|meta| meta.rdev()) == own {
            continue;
        }
        let opened = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_EXCL)
            .open(&device);
        match opened {
            Ok(claim) => claims.push(claim),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                return Err(in_use(path, &device));
            }
            Err(error) => pass_over(&device, &error),
        }
    }
    if read_only {
        claims.clear();
    }
    Ok(claims)
}

/// Claims all other names of what an image file holds, which the caller has opened and locked.
pub(crate) fn claim_of_file(
    path: &Path,
    file: &fs::Metadata,
    read_only: bool,
) -> Result<Vec<File>, Error> {
    claim_over(path, (&Part::whole(file), None), read_only)
}

/// The same of a block device, if it is a loop device. The file behind one that shows it whole is locked as if it had been opened; that behind
/// another is shared with those that show other parts.
pub(crate) fn claim_of_device(
    path: &Path,
    device: u64,
    read_only: bool,
) -> Result<Vec<File>, Error> {
    let Some((behind, part)) = behind(device) else {
        return Ok(Vec::new());
    };
    let mut claims = claim_over(path, (&part, Some(device)), read_only)?;
    let locked = File::open(&behind).map(|file| {
        let locked = match read_only || !part.is_whole() {
            true => file.try_lock_shared(),
            false => file.try_lock(),
        };
        (file, locked)
    });
    match locked {
        Ok((file, Ok(()))) => claims.push(file),
        Ok((_, Err(TryLockError::WouldBlock))) => return Err(in_use(path, &behind)),
        Ok((_, Err(TryLockError::Error(error)))) | Err(error) => pass_over(&behind, &error),
    }
    Ok(claims)
}

fn in_use(path: &Path, other: &Path) -> Error {
    Error::InUse {
        device: format!("{} (which is also {})", path.display(), other.display()),
    }
}

fn pass_over(path: &Path, error: &io::Error) {
    tracing::debug!("{} is not claimed as well: {error}", path.display());
}

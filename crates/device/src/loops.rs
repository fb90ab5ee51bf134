//! Loop devices and the files behind them: one storage by two names.
//!
//! A block device is claimed by `O_EXCL`, a file by `flock`, and neither sees the other. So whoever opens one exclusively claims the other,
//! too: the file that a loop device shows whole, and every loop device that shows a part of a file. What the kernel does not tell, or
//! does not let us open, is passed over: the file may be gone, or in a place that this process does not see.

use crate::error::Error;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The regular file behind a block device that is a loop device and shows all of it. Of devices behind loop devices others take flock's locks.
pub(crate) fn file_behind(device: u64) -> Option<PathBuf> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let settings = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/loop"));
    let is_zero = |name| text(&settings, name).is_some_and(|text| text == "0");
    if !is_zero("offset") || !is_zero("sizelimit") {
        return None;
    }
    let behind = PathBuf::from(text(&settings, "backing_file")?);
    fs::metadata(&behind).ok()?.is_file().then_some(behind)
}

fn text(settings: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(settings.join(name)).ok()?;
    Some(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// Loop devices that show this file, or a part of it.
fn devices_over(file: &fs::Metadata) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/sys/block") else {
        return Vec::new();
    };
    let shows_it = |entry: &fs::DirEntry| {
        let behind = text(&entry.path().join("loop"), "backing_file");
        let behind = behind.and_then(|behind| fs::metadata(behind).ok());
        behind.is_some_and(|behind| (behind.dev(), behind.ino()) == (file.dev(), file.ino()))
    };
    entries
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"loop"))
        .filter(shows_it)
        .map(|entry| Path::new("/dev").join(entry.file_name()))
        .collect()
}

/// Claims the loop devices over a file, until what is returned is dropped; of a file that is only read none has to be kept.
pub(crate) fn claim_over(
    path: &Path,
    file: &fs::Metadata,
    read_only: bool,
) -> Result<Vec<File>, Error> {
    let mut claims = Vec::new();
    for device in devices_over(file) {
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

/// Claims the file behind a loop device, until what is returned is dropped.
pub(crate) fn claim_behind(
    path: &Path,
    device: u64,
    read_only: bool,
) -> Result<Option<File>, Error> {
    let Some(behind) = file_behind(device) else {
        return Ok(None);
    };
    let locked = File::open(&behind).map(|file| {
        let locked = match read_only {
            true => file.try_lock_shared(),
            false => file.try_lock(),
        };
        (file, locked)
    });
    match locked {
        Ok((file, Ok(()))) => return Ok(Some(file)),
        Ok((_, Err(TryLockError::WouldBlock))) => return Err(in_use(path, &behind)),
        Ok((_, Err(TryLockError::Error(error)))) | Err(error) => pass_over(&behind, &error),
    }
    Ok(None)
}

fn in_use(path: &Path, other: &Path) -> Error {
    Error::InUse {
        device: format!("{} (which is also {})", path.display(), other.display()),
    }
}

fn pass_over(path: &Path, error: &io::Error) {
    tracing::debug!("{} is not claimed as well: {error}", path.display());
}

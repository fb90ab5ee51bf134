//! One block device that all sides of a comparison use in turn: a loop device over a file on a
//! disk, or one that was given.
//!
//! Every block of the file is written before: a disk's file system would otherwise have to allocate, or to mark as
//! written, what a side writes first, within that side's flushes.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::{Error, interrupt};

/// Written at once.
const PIECE: usize = 4 << 20;

pub struct Disk {
    path: PathBuf,
    /// The file below the loop device, which goes with the value.
    image: Option<PathBuf>,
    /// The loop device stays as long as somebody has it open.
    _attached: Option<File>,
}

impl Disk {
    /// The device at `path`.
    pub fn given(path: &Path) -> Disk {
        Disk {
            path: path.to_owned(),
            image: None,
            _attached: None,
        }
    }

    /// A loop device over a new file of `bytes` bytes in `dir`. Needs the rights of root.
    pub fn make(dir: &Path, bytes: u64) -> Result<Disk, Error> {
        let image = dir.join(format!("sheaf-bench-{}.img", std::process::id()));
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&image);
        let file = file.map_err(|e| Error::io(&image, e))?;
        // From here on the file goes, whatever happens.
        let mut disk = Disk {
            path: PathBuf::new(),
            image: Some(image.clone()),
            _attached: None,
        };
        fill(&file, bytes).map_err(|error| match error {
            Error::Io { source, .. } => Error::io(&image, source),
            other => other,
        })?;
        let (path, attached) = base::sys::attach_loop(&file).map_err(|source| Error::Io {
            what: "a loop device".to_owned(),
            source,
        })?;
        disk.path = path;
        disk._attached = Some(attached);
        Ok(disk)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Writes each block once.
pub(super) fn fill(mut file: &File, bytes: u64) -> Result<(), Error> {
    let io = |source| Error::Io {
        what: String::new(),
        source,
    };
    let piece = vec![0; PIECE];
    let mut left = bytes;
    while left > 0 {
        interrupt::check()?;
        let part = left.min(PIECE as u64);
        file.write_all(&piece[..part as usize]).map_err(io)?;
        left -= part;
    }
    file.sync_all().map_err(io)
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Some(image) = &self.image
            && let Err(error) = std::fs::remove_file(image)
        {
            tracing::warn!("{}: not removed: {error}", image.display());
        }
    }
}

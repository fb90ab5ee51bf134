//! One block device that all sides of a comparison use in turn: a loop device over a file on a
//! disk, or one that was given.
//!
//! Every block of the file is written before: a disk's file system would otherwise have to allocate, or to mark as
//! written, what a side writes first, within that side's flushes. Who has zeros written by the device, as `mkfs` of ext4 and XFS does for a journal,
//! makes holes of them, or what is as good as one: so what is a hole is [written](write_holes) again, between `mkfs` and `mount`, too.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::place::{Remedies, check_room, is_root};
use crate::{Error, interrupt};

/// Written at once.
const PIECE: usize = 4 << 20;

pub struct Disk {
    path: PathBuf,
    image: Option<Image>,
}

/// The file below the loop device, which has no name: it goes with the device and this value, however the process ends.
struct Image {
    /// As this process can open it again.
    path: PathBuf,
    _file: File,
    /// The loop device stays as long as somebody has it open.
    _attached: File,
}

impl Disk {
    /// The device at `path`.
    pub fn given(path: &Path) -> Disk {
        Disk {
            path: path.to_owned(),
            image: None,
        }
    }

    /// A loop device over a new file of `bytes` bytes in `dir`. Needs the rights of root, and room: both is known before
    /// anything is written.
    pub fn make(dir: &Path, bytes: u64, remedies: Remedies) -> Result<Disk, Error> {
        if !is_root() {
            return Err(remedies.root("for a loop device"));
        }
        check_room(dir, bytes, remedies)?;
        let image = dir.join(format!("sheaf-bench-{}.img", std::process::id()));
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&image);
        let file = file.map_err(|e| Error::io(&image, e))?;
        std::fs::remove_file(&image).map_err(|e| Error::io(&image, e))?;
        fill(&file, bytes).map_err(|error| match error {
            Error::Io { source, .. } => Error::io(&image, source),
            other => other,
        })?;
        let (path, attached) = base::sys::attach_loop(&file).map_err(|source| Error::Io {
            what: "a loop device".to_owned(),
            source,
        })?;
        let number = file.as_raw_fd();
        Ok(Disk {
            path,
            image: Some(Image {
                path: PathBuf::from(format!("/proc/self/fd/{number}")),
                _file: file,
                _attached: attached,
            }),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file below the loop device, as long as this value lives.
    pub fn image(&self) -> Option<&Path> {
        self.image.as_ref().map(|image| &*image.path)
    }
}

/// Writes zeros where a file has holes, or blocks that were allocated and not written. Nobody else may use it meanwhile.
pub(super) fn write_holes(path: &Path) -> Result<(), Error> {
    let fail = |e: std::io::Error| Error::io(path, e);
    let file = File::options().read(true).write(true).open(path);
    let file = file.map_err(fail)?;
    // What is in memory only is none.
    file.sync_all().map_err(fail)?;
    let len = file.metadata().map_err(fail)?.len();
    let piece = vec![0; PIECE];
    let (mut at, mut filled) = (0, false);
    while at < len {
        interrupt::check()?;
        let hole = seek(&file, SeekFrom::Hole(at)).map_err(|e| fail(e.into()))?;
        if hole >= len {
            break;
        }
        let end = match seek(&file, SeekFrom::Data(hole)) {
            Ok(data) => data,
            // None comes after it.
            Err(Errno::NXIO) => len,
            Err(error) => return Err(fail(error.into())),
        };
        at = hole;
        while at < end {
            let part = (end - at).min(PIECE as u64);
            file.write_all_at(&piece[..part as usize], at)
                .map_err(fail)?;
            at += part;
        }
        filled = true;
    }
    match filled {
        true => file.sync_all().map_err(fail),
        false => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_no_file_that_could_be_left() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::make(dir.path(), 8 << 20, Remedies::less(""));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            base::skip("loop devices");
            return assert!(disk.is_err());
        }
        let disk = disk.unwrap();
        let image = File::options().write(true).open(disk.image().unwrap());
        let image = image.unwrap();
        base::sys::punch_hole(&image, 1 << 20, 1 << 20).unwrap();
        write_holes(disk.image().unwrap()).unwrap();
        assert_eq!(image.metadata().unwrap().len(), 8 << 20);
        assert!(disk.path().starts_with("/dev"));
    }

    #[test]
    fn holes_are_written_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let mut file = File::create(&path).unwrap();
        file.write_all(&[7; 3 << 20]).unwrap();
        file.set_len(8 << 20).unwrap();
        base::sys::punch_hole(&file, 1 << 20, 1 << 20).unwrap();
        let holes = || seek(&file, SeekFrom::Hole(0)).unwrap();
        file.sync_all().unwrap();
        if holes() == 8 << 20 {
            return base::skip("file system that tells of holes");
        }
        write_holes(&path).unwrap();
        assert_eq!(holes(), 8 << 20);
        let content = std::fs::read(&path).unwrap();
        let (head, rest) = content.split_at(1 << 20);
        assert!(head.iter().all(|&byte| byte == 7));
        assert!(rest[..1 << 20].iter().all(|&byte| byte == 0));
        assert!(rest[1 << 20..2 << 20].iter().all(|&byte| byte == 7));
        assert!(rest[2 << 20..].iter().all(|&byte| byte == 0));
    }
}

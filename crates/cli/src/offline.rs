//! A file system used without a mount: opened in this process, read and written by path.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::Occupied;
use fs::{Attr, Caller, FileSystem, FsOptions, Ino, Removed};

use crate::devices::{self, Access};
use crate::failure::Failure;

/// Bytes moved at once between a file here and one of the host.
pub const PIECE: usize = 1 << 20;

pub struct Offline {
    pub fs: Arc<FileSystem>,
    /// What its devices lie on.
    pub occupied: Occupied,
    /// The user of this process, who may do what root may.
    pub who: Caller,
}

/// A name in a folder, and what it says itself of what it leads to.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub struct Named {
    pub name: Vec<u8>,
    pub ino: Ino,
    /// The bits of the file type.
    pub mode: u32,
}

impl Offline {
    /// Opens the file system whose devices are `given`.
    pub fn open(given: &[PathBuf], read_only: bool) -> Result<Self, Failure> {
        let access = Access {
            read_only,
            ..Access::default()
        };
        let paths = devices::find(given)?;
        let array = devices::open(&paths, access)?;
        let occupied = Occupied::by(&paths)?;
        let options = match read_only {
            true => FsOptions::default().read_only(),
            false => FsOptions::default(),
        };
        let who = Caller {
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            ..Caller::root()
        };
        let fs = FileSystem::open(Arc::clone(&array), options);
        let fs = fs.map_err(|error| Failure::unopened(error, &array))?;
        Ok(Offline { fs, occupied, who })
    }

    /// Ends the use; after it everything written is on the devices.
    pub fn close(self) -> Result<(), Failure> {
        Ok(self.fs.close()?)
    }

    /// What is at `path`, symbolic links followed.
    pub fn find(&self, path: &[u8]) -> Result<Attr, Failure> {
        self.fs.resolve(path).map_err(|e| named(path, e))
    }

    /// What is at `path`; a symbolic link that is its last name is not followed, unless a slash is behind it.
    pub fn find_itself(&self, path: &[u8]) -> Result<Attr, Failure> {
        match last_name(path) {
            b"" | b"." | b".." => self.find(path),
            _ if path.ends_with(b"/") => self.find(path),
            name => {
                let folder = self.find(parent(path))?;
                self.fs.lookup(folder.ino, name).map_err(|e| named(path, e))
            }
        }
    }

    /// The names in a folder but "." and "..", sorted. Of a damaged one those that can be found; `lost` is told of the rest.
    pub fn names(&self, path: &[u8], ino: Ino, mut lost: impl FnMut(Failure)) -> Vec<Named> {
        let mut names: Vec<Named> = Vec::new();
        let listed = self.fs.readdir_around(ino, &mut |entry| {
            match entry {
                Ok(entry) if entry.name == b"." || entry.name == b".." => {}
                Ok(entry) => names.push(Named {
                    name: entry.name.to_vec(),
                    ino: entry.ino,
                    mode: u32::from(entry.kind) << 12,
                }),
                Err(error) => lost(named(path, error).after("names in this folder are missing")),
            }
            true
        });
        if let Err(error) = listed {
            lost(named(path, error));
        }
        names.sort();
        names
    }

    /// What a name found in a folder, whose path is `folder`, leads to.
    pub fn look(&self, folder: &[u8], ino: Ino, name: &[u8]) -> Result<Attr, Failure> {
        let found = self.fs.lookup(ino, name);
        found.map_err(|e| named(&join(folder, name), e))
    }

    /// Hands the content of a file to `each`, piece by piece.
    pub fn read(
        &self,
        path: &[u8],
        ino: Ino,
        mut each: impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let file = self
            .fs
            .open_file(ino, libc::O_RDONLY)
            .map_err(|e| named(path, e))?;
        let mut buffer = vec![0; PIECE];
        let mut offset = 0;
        loop {
            let read = self
                .fs
                .read(&file, offset, &mut buffer)
                .map_err(|e| named(path, e))?;
            if read == 0 {
                return Ok(());
            }
            each(&buffer[..read])?;
            offset += read as u64;
        }
    }

    /// Makes or replaces the file `name` in a folder with what `next` fills in, until that
    /// returns 0.
    pub fn write(
        &self,
        folder: Ino,
        name: &[u8],
        mode: u32,
        mut next: impl FnMut(&mut [u8]) -> Result<usize, Failure>,
    ) -> Result<Ino, Failure> {
        let failed = |e| named(name, e);
        let (attr, file) = match self.fs.lookup(folder, name) {
            Err(fs::Error::NotFound) => self
                .fs
                .create(&self.who, folder, name, mode, libc::O_RDWR)
                .map_err(failed)?,
            Err(error) => return Err(failed(error)),
            Ok(attr) => {
                let flags = libc::O_RDWR | libc::O_TRUNC;
                let file = self.fs.open_file_as(&self.who, attr.ino, flags);
                let file = file.map_err(failed)?;
                (attr, file)
            }
        };
        let mut buffer = vec![0; PIECE];
        let mut offset = 0;
        loop {
            let filled = next(&mut buffer)?;
            if filled == 0 {
                self.fs.flush(&file).map_err(failed)?;
                return Ok(attr.ino);
            }
            let mut written = 0;
            while written < filled {
                let n = self
                    .fs
                    .write(&file, offset, &buffer[written..filled])
                    .map_err(failed)?;
                written += n;
                offset += n as u64;
            }
        }
    }

    /// The folder `name` in another one, made if it is not there.
    pub fn make_folder(&self, folder: Ino, name: &[u8], mode: u32) -> Result<Ino, Failure> {
        let failed = |e| named(name, e);
        match self.fs.lookup(folder, name) {
            Ok(attr) if attr.is_dir() => Ok(attr.ino),
            Ok(_) => Err(failed(fs::Error::NotADirectory)),
            Err(fs::Error::NotFound) => {
                let made = self.fs.mkdir(&self.who, folder, name, mode);
                Ok(made.map_err(failed)?.ino)
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Removes a name in a folder; with `recursive` also a folder, with everything in it.
    pub fn remove(
        &self,
        folder: Ino,
        name: &[u8],
        recursive: bool,
        workers: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Removed, fs::Error> {
        if recursive {
            return self
                .fs
                .remove_all(&self.who, folder, name, workers, progress);
        }
        self.fs.unlink(&self.who, folder, name)?;
        progress(1);
        Ok(Removed {
            files: 1,
            directories: 0,
        })
    }
}

/// An error with the path it is about.
pub fn named(path: &[u8], error: fs::Error) -> Failure {
    Failure::from(error).at(crate::output::harmless(path))
}

/// `folder/name`.
pub fn join(folder: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = folder.to_vec();
    if !path.ends_with(b"/") {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// The path inside the file system that `:PATH` names; `None` without the colon. What no ':'
/// begins is a path of the host where both are possible, as in cp, and else one inside.
pub fn inside(path: &Path) -> Option<&[u8]> {
    match bytes(path).strip_prefix(b":") {
        Some(b"") => Some(b"/"),
        inside => inside,
    }
}

/// A path's bytes.
pub fn bytes(path: &Path) -> &[u8] {
    use std::os::unix::ffi::OsStrExt;
    path.as_os_str().as_bytes()
}

/// The last component; nothing for the root.
pub fn last_name(path: &[u8]) -> &[u8] {
    let path = trimmed(path);
    path.rsplit(|&b| b == b'/').next().unwrap_or(path)
}

/// All but the last component.
pub fn parent(path: &[u8]) -> &[u8] {
    let path = trimmed(path);
    match path.iter().rposition(|&b| b == b'/') {
        Some(at) => &path[..at.max(1)],
        None => b"/",
    }
}

fn trimmed(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&b| b != b'/').map_or(0, |at| at + 1);
    &path[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_apart() {
        for (path, folder, name) in [
            ("/a/b", "/a", "b"),
            ("a", "/", "a"),
            ("/a/", "/", "a"),
            ("a/b/c//", "a/b", "c"),
        ] {
            assert_eq!(parent(path.as_bytes()), folder.as_bytes(), "{path}");
            assert_eq!(last_name(path.as_bytes()), name.as_bytes(), "{path}");
        }
    }
}

//! Opening by path, as open(2) does it.
//!
//! Invariants:
//! 1. The last name is looked up, and made, in a directory that is open: whatever becomes of the path meanwhile, that is the directory which the names
//!    before it led to at one time.
//! 2. What is opened is what the name referred to when it was looked up: a number that has become another file's since is looked up anew.

use crate::Error;
use crate::api::{Attr, Caller};
use crate::data::OpenFile;
use crate::directory::{At, Dir, LOOKS};
use crate::filesystem::FileSystem;
use crate::path::LINKS_FOLLOWED;
use std::sync::Arc;

impl FileSystem {
    /// Opens the directory that a path leads to from another one, or from the root if it begins with a slash. Symbolic links are followed.
    ///
    /// # Errors
    /// Those of [`FileSystem::stat_at`]; [`Error::NotADirectory`]; [`Error::Busy`] when others rename faster than this looks.
    pub fn open_dir_path<'d>(
        self: &Arc<Self>,
        from: impl Into<At<'d>>,
        path: &[u8],
    ) -> Result<Dir, Error> {
        let from = from.into();
        for _ in 0..LOOKS {
            let attr = self.stat_at(from, path)?;
            if let Some(dir) = self.open_found_dir(&attr)? {
                return Ok(dir);
            }
        }
        Err(Error::Busy)
    }

    /// Opens the regular file that a path leads to from a directory, or from the root if it begins with a slash, and tells its attributes.
    /// `flags` are `O_*`, as for open(2), those that count for [`FileSystem::open_file`] and five more: with `O_CREAT` a file that is not there is made, with the permission bits of `mode`, also where
    /// a symbolic link leads, and with `O_EXCL` nothing else is opened; `O_NOFOLLOW` does not follow a link that is the last name; `O_DIRECTORY` opens no file, and is refused with `O_CREAT`
    /// ([`open_dir_path`](Self::open_dir_path) opens directories). `O_PATH`, `O_TMPFILE` and the access mode 3 are refused; other flags do nothing. The directories of the path
    /// must be there. Permissions are the caller's affair: nothing is refused for them. `O_TRUNC` is as for [`FileSystem::open_file_as`].
    ///
    /// What it made is durable after an fsync of the file.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Exists`], [`Error::IsADirectory`], [`Error::NotADirectory`] and [`Error::TooManySymlinks`] as open(2) has them; those of
    /// [`FileSystem::stat_at`], [`FileSystem::create`] and [`FileSystem::open_file`]; [`Error::Busy`] when others rename faster than this looks.
    pub fn open_path<'d>(
        self: &Arc<Self>,
        who: &Caller,
        from: impl Into<At<'d>>,
        path: &[u8],
        flags: i32,
        mode: u32,
    ) -> Result<(Attr, Arc<OpenFile>), Error> {
        check_flags(flags)?;
        let creates = flags & libc::O_CREAT != 0;
        let is_new = creates && flags & libc::O_EXCL != 0;
        let follows = !is_new && flags & libc::O_NOFOLLOW == 0;
        let from = from.into();
        let (above, mut name) = match last_name(path) {
            Some(parts) => parts,
            None => return Err(self.no_file(from, path, creates)),
        };
        let mut dir = self.open_dir_path(from, above)?;
        let mut target;
        let (mut links, mut looks) = (0, 0);
        loop {
            looks += 1;
            if looks > LOOKS {
                return Err(Error::Busy);
            }
            let found = match self.lookup(&dir, name) {
                Ok(attr) => attr,
                Err(Error::NotFound) if creates => {
                    match self.create(who, &dir, name, mode, flags) {
                        // Somebody else was first.
                        Err(Error::Exists) if !is_new => continue,
                        made => return made,
                    }
                }
                Err(error) => return Err(error),
            };
            if is_new {
                return Err(Error::Exists);
            }
            let is_last = !found.is_symlink() || !follows;
            if flags & libc::O_DIRECTORY != 0 && is_last && !found.is_dir() {
                return Err(Error::NotADirectory);
            }
            if !found.is_symlink() {
                match self.open_found(&found, |ino| self.open_file_as(who, ino, flags))? {
                    Some(opened) => return Ok(opened),
                    None => continue,
                }
            }
            if !follows || links == LINKS_FOLLOWED {
                return Err(Error::TooManySymlinks);
            }
            target = match self.target_of(&found)? {
                Some(target) => target,
                None => continue,
            };
            (links, looks) = (links + 1, 0);
            let above;
            (above, name) = match last_name(&target) {
                Some(parts) => parts,
                None => return Err(self.no_file((&dir).into(), &target, creates)),
            };
            dir = self.open_dir_path(&dir, above)?;
        }
    }

    /// Where a symbolic link leads that a look-up found. `None`: it is gone, and perhaps its number reused.
    fn target_of(&self, found: &Attr) -> Result<Option<Vec<u8>>, Error> {
        // While we refer to it the number is not reused.
        if !self.ref_found(found) {
            return Ok(None);
        }
        let target = match self.getattr(found.ino) {
            Ok(attr) if attr.generation == found.generation => self.readlink(found.ino).map(Some),
            Ok(_) => Ok(None),
            Err(error) => Err(error),
        };
        self.forget(found.ino, 1);
        match target {
            Err(Error::Stale(_)) => Ok(None),
            other => other,
        }
    }

    /// Why nothing is opened by a path without a last name.
    fn no_file(&self, from: At<'_>, path: &[u8], creates: bool) -> Error {
        if path.is_empty() {
            return Error::NotFound;
        }
        match self.stat_at(from, path) {
            Ok(_) => Error::IsADirectory,
            Err(Error::NotFound) if creates => Error::IsADirectory,
            Err(error) => error,
        }
    }
}

/// Refuses what open(2) refuses whatever the path leads to, and what no regular file is opened by.
pub(crate) fn check_flags(flags: i32) -> Result<(), Error> {
    let has = |wanted: i32| flags & wanted == wanted;
    match flags {
        _ if has(libc::O_ACCMODE) => Err(Error::Invalid("an access mode that is none")),
        _ if has(libc::O_PATH) => Err(Error::Invalid(
            "O_PATH: stat_at tells of a file that is not to be opened",
        )),
        // It has the bit of O_DIRECTORY.
        _ if has(libc::O_TMPFILE) => Err(Error::Unsupported(
            "O_TMPFILE by a path: use FileSystem::tmpfile",
        )),
        _ if has(libc::O_CREAT | libc::O_DIRECTORY) => {
            Err(Error::Invalid("O_CREAT with O_DIRECTORY: use mkdir"))
        }
        _ => Ok(()),
    }
}

/// The part of a path before its last name, and that. `None`: it is empty, or ends with a slash, and no file can be meant.
fn last_name(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.last().is_none_or(|byte| *byte == b'/') {
        return None;
    }
    let slash = path.iter().rposition(|byte| *byte == b'/');
    Some(path.split_at(slash.map_or(0, |at| at + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_name_is_what_follows_the_last_slash() {
        let parts = |path: &'static str| {
            let (above, name) = last_name(path.as_bytes())?;
            Some((
                str::from_utf8(above).unwrap(),
                str::from_utf8(name).unwrap(),
            ))
        };
        assert_eq!(parts("a"), Some(("", "a")));
        assert_eq!(parts("/a"), Some(("/", "a")));
        assert_eq!(parts("a//b"), Some(("a//", "b")));
        assert_eq!(parts("/a/.."), Some(("/a/", "..")));
        assert_eq!(parts(""), None);
        assert_eq!(parts("a/"), None);
    }
}

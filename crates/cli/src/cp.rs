//! `sheaf cp`: files out of and into a file system that is not mounted.
//!
//! 1. No symbolic link is followed but one that the user names as the target: what lies at a place below it may have come
//!    from anybody.
//! 2. Nobody can read more of a copy, while it is made, than of the original: files and folders are the owner's alone
//!    until they have their permissions, folders after all that is in them.

use std::fs::{self as host, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use fs::{Attr, Ino};
use indicatif::ProgressBar;

use crate::args::Cp;
use crate::failure::{Failure, Outcome};
use crate::offline::{Offline, bytes, inside, join, last_name, parent};
use crate::output::harmless;
use crate::progress;

/// A path of one of the two sides.
enum Place {
    Host(PathBuf),
    Inside(Vec<u8>),
}

impl Place {
    fn parse(path: &Path) -> Self {
        match inside(path) {
            Some(inside) => Place::Inside(inside.to_vec()),
            None => Place::Host(path.to_owned()),
        }
    }
}

pub fn run(args: &Cp) -> Outcome {
    let (target, sources) = args
        .paths
        .split_last()
        .ok_or_else(|| Failure::usage("no target given"))?;
    let target = Place::parse(target);
    let offline = Offline::open(&args.source.devices, matches!(target, Place::Host(_)))?;
    let copy = Copy {
        offline: &offline,
        recursive: args.recursive,
        several: sources.len() > 1,
        bar: progress::bar("Files copied:", 0),
    };
    let mut result = Ok(());
    for source in sources {
        result = match (Place::parse(source), &target) {
            (Place::Inside(from), Place::Host(to)) => copy.outwards(&from, to),
            (Place::Host(from), Place::Inside(to)) => copy.inwards(&from, to),
            _ => Err(Failure::usage(
                "one side must be inside the file system: write its paths with a leading ':'",
            )),
        };
        if result.is_err() {
            break;
        }
    }
    copy.bar.finish_and_clear();
    // What was copied before a failure is kept, so the file system is closed either way.
    offline.close()?;
    result.map(|()| 0)
}

/// What becomes of a symbolic link in the place of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Links {
    Followed,
    Refused,
}

fn not_followed() -> io::Error {
    io::Error::other("it is a symbolic link, which is not followed; remove it first")
}

/// Opens a file that becomes a copy; only its owner may read a new one.
fn open_host_file(to: &Path, links: Links) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    if links == Links::Refused {
        options.custom_flags(libc::O_NOFOLLOW);
    }
    match options.open(to) {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Err(not_followed()),
        opened => opened,
    }
}

/// Makes a folder that only its owner may enter; false if there is one.
fn make_host_folder(to: &Path) -> io::Result<bool> {
    match host::DirBuilder::new().mode(0o700).create(to) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = host::symlink_metadata(to)?.file_type();
            match found {
                found if found.is_dir() => Ok(false),
                found if found.is_symlink() => Err(not_followed()),
                _ => Err(error),
            }
        }
        Err(error) => Err(error),
    }
}

struct Copy<'a> {
    offline: &'a Offline,
    recursive: bool,
    several: bool,
    bar: ProgressBar,
}

impl Copy<'_> {
    fn refuse_folder(&self, name: impl std::fmt::Display) -> Result<(), Failure> {
        match self.recursive {
            true => Ok(()),
            false => Err(Failure::new(format!(
                "{name} is a folder; to copy it give --recursive"
            ))),
        }
    }

    fn outwards(&self, from: &[u8], to: &Path) -> Result<(), Failure> {
        let attr = self.offline.find(from)?;
        let (to, links) = match to.is_dir() {
            true => {
                let name = std::ffi::OsStr::from_bytes(last_name(from));
                (to.join(name), Links::Refused)
            }
            false if self.several => {
                return Err(Failure::new(format!("{} is not a folder", to.display())));
            }
            false => (to.to_owned(), Links::Followed),
        };
        if !attr.is_dir() {
            self.one_outwards(from, &attr, &to, links)?;
            self.bar.inc(1);
            return Ok(());
        }
        let mut folders = Vec::new();
        let mut waiting = vec![(from.to_vec(), attr, to)];
        while let Some((from, attr, to)) = waiting.pop() {
            if attr.is_dir() {
                self.refuse_folder(harmless(&from))?;
                if make_host_folder(&to).map_err(|e| Failure::io(to.display(), &e))? {
                    folders.push((to.clone(), attr.mode & 0o777));
                }
                for entry in self.offline.list(&from, attr.ino)? {
                    let name = std::ffi::OsString::from_vec(entry.name.clone());
                    waiting.push((join(&from, &entry.name), entry.attr, to.join(name)));
                }
            } else {
                self.one_outwards(&from, &attr, &to, Links::Refused)?;
                self.bar.inc(1);
            }
        }
        // The deepest first: one that its owner may not enter is entered no more.
        for (folder, mode) in folders.into_iter().rev() {
            host::set_permissions(&folder, host::Permissions::from_mode(mode))
                .map_err(|e| Failure::io(folder.display(), &e))?;
        }
        Ok(())
    }

    fn one_outwards(
        &self,
        from: &[u8],
        attr: &Attr,
        to: &Path,
        links: Links,
    ) -> Result<(), Failure> {
        let failed = |e: io::Error| Failure::io(to.display(), &e);
        match attr.mode & libc::S_IFMT {
            libc::S_IFREG => {
                let mut file = open_host_file(to, links).map_err(failed)?;
                // What is no file, the terminal for example, keeps its permissions.
                let is_file = file.metadata().map_err(failed)?.is_file();
                let permit = |file: &File, mode| match is_file {
                    true => file.set_permissions(host::Permissions::from_mode(mode)),
                    false => Ok(()),
                };
                permit(&file, 0o600).map_err(failed)?;
                self.offline.read(from, attr.ino, |piece| {
                    file.write_all(piece).map_err(failed)
                })?;
                permit(&file, attr.mode & 0o777).map_err(failed)
            }
            libc::S_IFLNK => {
                let target = self.offline.fs.readlink(attr.ino)?;
                symlink(std::ffi::OsString::from_vec(target), to).map_err(failed)
            }
            _ => {
                let name = harmless(from);
                Err(Failure::new(format!(
                    "{name} is a special file; it cannot be copied"
                )))
            }
        }
    }

    fn inwards(&self, from: &Path, to: &[u8]) -> Result<(), Failure> {
        let (folder, name) = match self.offline.fs.resolve(to) {
            Ok(attr) if attr.is_dir() => {
                let name = from
                    .file_name()
                    .ok_or_else(|| Failure::usage(format!("{} has no name", from.display())))?;
                (attr.ino, name.as_bytes().to_vec())
            }
            _ if self.several => {
                let name = harmless(to);
                return Err(Failure::new(format!("{name} is not a folder")));
            }
            _ => {
                let parent = self.offline.find(parent(to))?;
                (parent.ino, last_name(to).to_vec())
            }
        };
        let mut waiting = vec![(from.to_owned(), folder, name)];
        while let Some((from, folder, name)) = waiting.pop() {
            let failed = |e: io::Error| Failure::io(from.display(), &e);
            let meta = host::symlink_metadata(&from).map_err(failed)?;
            if meta.is_dir() {
                self.refuse_folder(from.display())?;
                let mode = meta.permissions().mode() & 0o777;
                let made = self.offline.make_folder(folder, &name, mode)?;
                for entry in host::read_dir(&from).map_err(failed)? {
                    let entry = entry.map_err(failed)?;
                    let name = entry.file_name().into_vec();
                    waiting.push((entry.path(), made, name));
                }
            } else {
                self.one_inwards(&from, &meta, folder, &name)?;
                self.bar.inc(1);
            }
        }
        Ok(())
    }

    fn one_inwards(
        &self,
        from: &Path,
        meta: &host::Metadata,
        folder: Ino,
        name: &[u8],
    ) -> Result<(), Failure> {
        let failed = |e: io::Error| Failure::io(from.display(), &e);
        if meta.is_symlink() {
            let target = host::read_link(from).map_err(failed)?;
            return self.offline.make_symlink(folder, name, bytes(&target));
        }
        if !meta.is_file() {
            let name = from.display();
            return Err(Failure::new(format!(
                "{name} is a special file; it cannot be copied"
            )));
        }
        let mut file = File::open(from).map_err(failed)?;
        let mode = meta.permissions().mode() & 0o777;
        self.offline.write(folder, name, mode, |buffer| {
            file.read(buffer).map_err(failed)
        })?;
        Ok(())
    }
}

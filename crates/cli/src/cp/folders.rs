//! Files of the host by folder and name.
//!
//! 1. Only the path that the user has named is handed to the host as a whole. Each folder below it is entered from the one that it is in, by its
//!    name, and no symbolic link is followed.
//! 2. A folder that is entered again is the one that was there before, by device and inode.
//! 3. What is at a name may be another thing each time. What is copied, or gets attributes or a further name, is held by a descriptor and known for
//!    what was made or looked at; calls that take no such descriptor get a path that ends at it ([`path_to`]). By name things are made and removed only.
//! 4. Only the folder that was entered last is kept open: no tree is too deep or too wide for the descriptors that there are.

use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{self as calls, AtFlags, CWD, Dir, Mode, OFlags};
use rustix::io::Errno;

use crate::offline::bytes;

/// Device and inode.
pub type Identity = (u64, u64);

/// A folder that was entered.
pub struct Folder {
    path: PathBuf,
    /// How many bytes of the path are the user's.
    given: usize,
    pub id: Identity,
}

/// A name in a folder; without one, a path that the user has named.
pub struct Name {
    folder: Option<(Rc<Folder>, OsString)>,
    /// All of the path, for messages.
    pub path: PathBuf,
}

impl Name {
    pub fn given(path: PathBuf) -> Self {
        Name { folder: None, path }
    }

    pub fn within(folder: &Rc<Folder>, name: &OsStr) -> Self {
        Name {
            folder: Some((Rc::clone(folder), name.to_owned())),
            path: folder.path.join(name),
        }
    }
}

/// A name whose folder is open.
pub struct Entered<'n> {
    folder: Option<Rc<OwnedFd>>,
    name: &'n Path,
}

impl Entered<'_> {
    pub fn at(&self) -> (BorrowedFd<'_>, &Path) {
        let folder = self.folder.as_ref().map_or(CWD, |folder| folder.as_fd());
        (folder, self.name)
    }

    /// Opens what is there, or makes a file, as open(2) does.
    pub fn open(&self, flags: OFlags, mode: Mode) -> io::Result<File> {
        let (folder, name) = self.at();
        let flags = flags | OFlags::CLOEXEC;
        Ok(File::from(calls::openat(folder, name, flags, mode)?))
    }

    /// Opens a folder to enter what is in it, which needs no permission to read it.
    fn open_folder(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        Ok(OwnedFd::from(self.open(flags, Mode::empty())?))
    }

    /// A descriptor of what is there, a link itself. It is not opened to be read or written.
    pub fn locate(&self) -> io::Result<File> {
        self.open(OFlags::PATH | OFlags::NOFOLLOW, Mode::empty())
    }

    /// What is there, a link itself.
    pub fn look(&self) -> io::Result<Metadata> {
        self.locate()?.metadata()
    }

    /// Which one is there, a link itself.
    pub fn identity(&self) -> Option<Identity> {
        let (folder, name) = self.at();
        let found = calls::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some((found.st_dev, found.st_ino))
    }

    /// Removes what is no folder.
    pub fn remove(&self) -> io::Result<()> {
        let (folder, name) = self.at();
        Ok(calls::unlinkat(folder, name, AtFlags::empty())?)
    }
}

/// A path to what a descriptor is of, for calls that take none which is not opened to be read. It ends there, at a symbolic link itself, too.
pub fn path_to(file: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}

/// What a symbolic link says.
pub fn target(link: &File) -> io::Result<Vec<u8>> {
    Ok(calls::readlinkat(link, "", Vec::new())?.into_bytes())
}

/// Enters folders.
#[derive(Default)]
pub struct Folders {
    last: RefCell<Option<(Rc<Folder>, Rc<OwnedFd>)>>,
}

impl Folders {
    /// Opens the folder that a name is in.
    pub fn enter<'n>(&self, name: &'n Name) -> io::Result<Entered<'n>> {
        let Some((folder, name)) = &name.folder else {
            return Ok(Entered {
                folder: None,
                name: &name.path,
            });
        };
        // What is none leads elsewhere, whoever has written it.
        if name == ".." || name.as_bytes().contains(&b'/') {
            return Err(Errno::INVAL.into());
        }
        Ok(Entered {
            folder: Some(self.open(folder)?),
            name: Path::new(name),
        })
    }

    /// The folder of a name, from now on the one that is entered by it.
    pub fn folder(&self, name: &Name) -> io::Result<Rc<Folder>> {
        // The host takes no longer ones, and so no tree is deeper than this.
        if name.path.as_os_str().len() >= libc::PATH_MAX as usize {
            return Err(Errno::NAMETOOLONG.into());
        }
        let open = File::from(self.enter(name)?.open_folder()?);
        let entered = Rc::new(Folder {
            path: name.path.clone(),
            given: match &name.folder {
                Some((above, _)) => above.given,
                None => name.path.as_os_str().len(),
            },
            id: id(&open.metadata()?),
        });
        *self.last.borrow_mut() = Some((Rc::clone(&entered), Rc::new(open.into())));
        Ok(entered)
    }

    fn open(&self, folder: &Rc<Folder>) -> io::Result<Rc<OwnedFd>> {
        if let Some((last, open)) = &*self.last.borrow()
            && Rc::ptr_eq(last, folder)
        {
            return Ok(Rc::clone(open));
        }
        let (given, below) = bytes(&folder.path).split_at(folder.given);
        let root = Entered {
            folder: None,
            name: Path::new(OsStr::from_bytes(given)),
        };
        let was_folder = |error: io::Error| match error.raw_os_error() {
            Some(libc::ENOTDIR | libc::ELOOP) => replaced(),
            _ => error,
        };
        let mut at = root.open_folder().map_err(was_folder)?;
        for name in below.split(|byte| *byte == b'/').filter(|n| !n.is_empty()) {
            let next = Entered {
                folder: Some(Rc::new(at)),
                name: Path::new(OsStr::from_bytes(name)),
            };
            at = next.open_folder().map_err(was_folder)?;
        }
        let at = File::from(at);
        if id(&at.metadata()?) != folder.id {
            return Err(replaced());
        }
        let at = Rc::new(OwnedFd::from(at));
        *self.last.borrow_mut() = Some((Rc::clone(folder), Rc::clone(&at)));
        Ok(at)
    }

    /// Opens a folder itself, to be read.
    pub fn readable(&self, folder: &Rc<Folder>) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let open = self.open(folder)?;
        let itself = Entered {
            folder: None,
            name: &path_to(&open),
        };
        match itself.open(flags, Mode::empty()) {
            // No /proc. As "." it has to be one that may be searched, too.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let itself = Entered {
                    folder: Some(open),
                    name: Path::new("."),
                };
                itself.open(flags, Mode::empty())
            }
            done => done,
        }
    }
}

pub fn id(meta: &Metadata) -> Identity {
    (meta.dev(), meta.ino())
}

/// The names in an open folder but "." and "..".
pub fn names(folder: File) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::new(folder)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name));
        }
    }
    Ok(names)
}

/// What was looked at is there no more, but something else.
pub fn replaced() -> io::Error {
    io::Error::other("somebody has replaced it meanwhile")
}

//! Any mounted file system, by the system calls that FxMark makes: with whole paths; or by the same calls relative to
//! open directories.

use std::cell::RefCell;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use base::clock::process_cpu_ns;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawDir};

use super::{Side, program, short};
use crate::Error;

/// Permission bits of what is made, as FxMark has them.
const MODE: Mode = Mode::RWXU;
/// What a C library reads of a directory at once.
const LIST_BYTES: usize = 32 << 10;
/// Clock ticks of /proc in a second; the kernel gives user space no other.
const TICKS: u64 = 100;

/// A directory: its path, and where calls are relative to open directories its descriptor.
#[derive(Clone)]
pub struct Folder {
    path: Arc<str>,
    opened: Option<Arc<OwnedFd>>,
}

impl Folder {
    pub fn path(&self) -> &Path {
        Path::new(&*self.path)
    }
}

/// A folder of a mounted file system.
pub struct Posix {
    root: Folder,
    /// The process that serves it, whose CPU time counts.
    daemon: Option<u32>,
    /// The program `sheaf`, where no sync reaches the daemon: it asks that for a checkpoint.
    checkpoints: Option<PathBuf>,
}

thread_local! {
    /// Where the paths of a call are put together.
    static PATHS: RefCell<(String, String)> = const { RefCell::new((String::new(), String::new())) };
}

fn join(into: &mut String, dir: &str, name: &str) {
    into.clear();
    into.push_str(dir);
    into.push('/');
    into.push_str(name);
}

/// Calls `body` with a directory and a path from there: with the open directory and the name, or with
/// the whole path.
fn at<T>(
    dir: &Folder,
    name: &str,
    body: impl FnOnce(BorrowedFd<'_>, &str) -> rustix::io::Result<T>,
) -> Result<T, Error> {
    if let Some(opened) = &dir.opened {
        return Ok(body(opened.as_fd(), name)?);
    }
    PATHS.with_borrow_mut(|(path, _)| {
        join(path, &dir.path, name);
        Ok(body(CWD, path)?)
    })
}

fn open_dir(path: &str) -> Result<Arc<OwnedFd>, Error> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(Arc::new(rustix::fs::open(path, flags, Mode::empty())?))
}

impl Posix {
    /// A benchmark in `root`, which exists.
    pub fn new(root: &Path, daemon: Option<u32>) -> Result<Posix, Error> {
        let root = root
            .to_str()
            .ok_or_else(|| Error::Usage(format!("{}: the path is not UTF-8", root.display())))?;
        Ok(Posix {
            root: Folder {
                path: Arc::from(root),
                opened: None,
            },
            daemon,
            checkpoints: None,
        })
    }

    /// From now on a sync is a checkpoint of a mount of Sheaf, asked for by this program.
    pub fn with_checkpoints(mut self, sheaf: &Path) -> Posix {
        self.checkpoints = Some(sheaf.to_owned());
        self
    }

    /// From now on directories are open, and calls are relative to them.
    pub fn relative(mut self) -> Result<Posix, Error> {
        self.root.opened = Some(open_dir(&self.root.path)?);
        Ok(self)
    }

    fn open_with(&self, dir: &Folder, name: &str, flags: OFlags) -> Result<OwnedFd, Error> {
        let flags = flags | OFlags::RDWR | OFlags::CLOEXEC;
        at(dir, name, |dir, path| {
            rustix::fs::openat(dir, path, flags, MODE)
        })
    }
}

/// CPU time of another process, in nanoseconds.
fn process_ns(pid: u32) -> Result<u64, Error> {
    let path = PathBuf::from(format!("/proc/{pid}/stat"));
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
    // The second field is the program's name in parentheses, which may hold anything.
    let fields = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = fields.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let total = ticks().zip(ticks()).map(|(user, system)| user + system);
    let total = total.ok_or_else(|| Error::Unable(format!("{}: no times", path.display())))?;
    Ok(total * (1_000_000_000 / TICKS))
}

impl Side for Posix {
    type Dir = Folder;
    type File = OwnedFd;

    fn root(&self) -> Folder {
        self.root.clone()
    }

    fn make_dir(&self, parent: &Folder, name: &str) -> Result<Folder, Error> {
        at(parent, name, |dir, path| {
            rustix::fs::mkdirat(dir, path, MODE)
        })?;
        let path: Arc<str> = Arc::from(format!("{}/{name}", parent.path));
        let opened = match &self.root.opened {
            Some(_) => Some(open_dir(&path)?),
            None => None,
        };
        Ok(Folder { path, opened })
    }

    fn create(&self, dir: &Folder, name: &str) -> Result<OwnedFd, Error> {
        self.open_with(dir, name, OFlags::CREATE)
    }

    fn open(&self, dir: &Folder, name: &str) -> Result<OwnedFd, Error> {
        self.open_with(dir, name, OFlags::empty())
    }

    fn unlink(&self, dir: &Folder, name: &str) -> Result<(), Error> {
        at(dir, name, |dir, path| {
            rustix::fs::unlinkat(dir, path, AtFlags::empty())
        })
    }

    fn rename(
        &self,
        dir: &Folder,
        name: &str,
        new_dir: &Folder,
        new_name: &str,
    ) -> Result<(), Error> {
        if let (Some(from), Some(to)) = (&dir.opened, &new_dir.opened) {
            return Ok(rustix::fs::renameat(from, name, to, new_name)?);
        }
        PATHS.with_borrow_mut(|(old, new)| {
            join(old, &dir.path, name);
            join(new, &new_dir.path, new_name);
            Ok(rustix::fs::rename(&**old, &**new)?)
        })
    }

    fn stat(&self, dir: &Folder, path: &str) -> Result<u64, Error> {
        let stat = at(dir, path, |dir, path| {
            rustix::fs::statat(dir, path, AtFlags::empty())
        })?;
        Ok(stat.st_size as u64)
    }

    fn truncate(&self, dir: &Folder, name: &str, size: u64) -> Result<(), Error> {
        // There is no call for it relative to a directory, and rustix has truncate(2) for open files only.
        PATHS.with_borrow_mut(|(path, _)| {
            join(path, &dir.path, name);
            base::sys::truncate(Path::new(path), size)
                .map_err(|e| rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::IO))
        })?;
        Ok(())
    }

    fn list(&self, dir: &Folder, each: &mut dyn FnMut() -> bool) -> Result<(), Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // An open directory is opened anew, for a position of its own.
        let opened = match &dir.opened {
            Some(opened) => rustix::fs::openat(opened, ".", flags, Mode::empty())?,
            None => rustix::fs::open(&*dir.path, flags, Mode::empty())?,
        };
        let mut buffer = vec![MaybeUninit::uninit(); LIST_BYTES];
        let mut entries = RawDir::new(&opened, &mut buffer);
        while let Some(entry) = entries.next() {
            entry?;
            if !each() {
                break;
            }
        }
        Ok(())
    }

    fn read(&self, file: &OwnedFd, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let wanted = buf.len();
        short(rustix::io::pread(file, buf, offset)?, wanted)
    }

    fn write(&self, file: &OwnedFd, offset: u64, data: &[u8]) -> Result<(), Error> {
        short(rustix::io::pwrite(file, data, offset)?, data.len())
    }

    fn fsync(&self, file: &OwnedFd) -> Result<(), Error> {
        Ok(rustix::fs::fsync(file)?)
    }

    fn fdatasync(&self, file: &OwnedFd) -> Result<(), Error> {
        Ok(rustix::fs::fdatasync(file)?)
    }

    fn fstat(&self, file: &OwnedFd) -> Result<u64, Error> {
        Ok(rustix::fs::fstat(file)?.st_size as u64)
    }

    fn sync(&self) -> Result<(), Error> {
        let root = Path::new(&*self.root.path);
        if let Some(sheaf) = &self.checkpoints {
            return program::run(Command::new(sheaf).arg("checkpoint").arg(root));
        }
        let root = File::open(root).map_err(|e| Error::io(root, e))?;
        Ok(rustix::fs::syncfs(root)?)
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        let daemon = self.daemon.map_or(Ok(0), process_ns)?;
        Ok(process_cpu_ns() + daemon)
    }
}

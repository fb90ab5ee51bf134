//! Any mounted file system, by the system calls that FxMark makes: with whole paths.

use std::cell::RefCell;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::clock::process_cpu_ns;
use rustix::fs::{Mode, OFlags, RawDir};

use super::{Side, short};
use crate::Error;

/// Permission bits of what is made, as FxMark has them.
const MODE: Mode = Mode::RWXU;
/// What a C library reads of a directory at once.
const LIST_BYTES: usize = 32 << 10;
/// Clock ticks of /proc in a second; the kernel gives user space no other.
const TICKS: u64 = 100;

/// A folder of a mounted file system.
pub struct Posix {
    root: Arc<str>,
    /// The process that serves it, whose CPU time counts.
    daemon: Option<u32>,
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

/// Calls `body` with `dir/name`.
fn at<T>(
    dir: &str,
    name: &str,
    body: impl FnOnce(&str) -> rustix::io::Result<T>,
) -> Result<T, Error> {
    PATHS.with_borrow_mut(|(path, _)| {
        join(path, dir, name);
        Ok(body(path)?)
    })
}

impl Posix {
    /// A benchmark in `root`, which exists.
    pub fn new(root: &Path, daemon: Option<u32>) -> Result<Posix, Error> {
        let root = root
            .to_str()
            .ok_or_else(|| Error::Usage(format!("{}: the path is not UTF-8", root.display())))?;
        Ok(Posix {
            root: Arc::from(root),
            daemon,
        })
    }

    fn open_with(&self, dir: &str, name: &str, flags: OFlags) -> Result<OwnedFd, Error> {
        let flags = flags | OFlags::RDWR | OFlags::CLOEXEC;
        at(dir, name, |path| rustix::fs::open(path, flags, MODE))
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
    type Dir = Arc<str>;
    type File = OwnedFd;

    fn root(&self) -> Arc<str> {
        Arc::clone(&self.root)
    }

    fn make_dir(&self, parent: &Arc<str>, name: &str) -> Result<Arc<str>, Error> {
        at(parent, name, |path| rustix::fs::mkdir(path, MODE))?;
        Ok(Arc::from(format!("{parent}/{name}")))
    }

    fn create(&self, dir: &Arc<str>, name: &str) -> Result<OwnedFd, Error> {
        self.open_with(dir, name, OFlags::CREATE)
    }

    fn open(&self, dir: &Arc<str>, name: &str) -> Result<OwnedFd, Error> {
        self.open_with(dir, name, OFlags::empty())
    }

    fn unlink(&self, dir: &Arc<str>, name: &str) -> Result<(), Error> {
        at(dir, name, |path| rustix::fs::unlink(path))
    }

    fn rename(
        &self,
        dir: &Arc<str>,
        name: &str,
        new_dir: &Arc<str>,
        new_name: &str,
    ) -> Result<(), Error> {
        PATHS.with_borrow_mut(|(old, new)| {
            join(old, dir, name);
            join(new, new_dir, new_name);
            Ok(rustix::fs::rename(&**old, &**new)?)
        })
    }

    fn stat(&self, dir: &Arc<str>, path: &str) -> Result<u64, Error> {
        let stat = at(dir, path, |path| rustix::fs::stat(path))?;
        Ok(stat.st_size as u64)
    }

    fn truncate(&self, dir: &Arc<str>, name: &str, size: u64) -> Result<(), Error> {
        // rustix has truncate(2) for open files only.
        at(dir, name, |path| {
            base::sys::truncate(Path::new(path), size)
                .map_err(|e| rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::IO))
        })
    }

    fn list(&self, dir: &Arc<str>, each: &mut dyn FnMut() -> bool) -> Result<(), Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&**dir, flags, Mode::empty())?;
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

    fn sync(&self) -> Result<(), Error> {
        let root = Path::new(&*self.root);
        let root = File::open(root).map_err(|e| Error::io(root, e))?;
        Ok(rustix::fs::syncfs(root)?)
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        let daemon = self.daemon.map_or(Ok(0), process_ns)?;
        Ok(process_cpu_ns() + daemon)
    }
}

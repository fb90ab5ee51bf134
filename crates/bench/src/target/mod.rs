//! The sides of a comparison: the calls that workloads make ([`Side`]), by Sheaf in this
//! process and by the system calls on any mounted file system; and how each side is set up.

mod claim;
mod disk;
mod in_process;
mod kernel;
mod place;
mod posix;
mod program;
mod queue;
mod sheaf_mount;
mod slow;

use std::path::PathBuf;

use base::thread::cpu_count;

use crate::Error;
use crate::runner::Background;

pub(crate) use claim::claim_unused;
pub use disk::Disk;
pub use in_process::{Arrangement, InProcess};
pub use kernel::{Kernel, KernelMount};
pub use place::{Devices, Place, Remedies, Storage};
pub use posix::Posix;
pub(crate) use program::{exists as program_exists, run as run_program};
pub use queue::{ContextQueue, Interface, Queue, SlowQueue, Transfer};
pub(crate) use queue::{check_stamp, keep_busy, open_direct, stamp, whole};
pub use sheaf_mount::SheafMount;
pub use slow::{Slow, Writes};

/// What a workload does to a file system. Names are those of entries in a directory, not paths.
///
/// In this process a directory is an inode number, and each call is one of the file system's
/// interface with (directory, name). On a mounted file system a directory is its path, and each
/// call is one system call with the whole path, as FxMark makes it. Either side can be told to keep directories
/// open, and to call relative to them: by handle, and by openat(2) and the like.
pub trait Side: Sync {
    type Dir: Clone + Send + Sync;
    type File: Send + Sync;

    /// Where everything a benchmark makes lies.
    fn root(&self) -> Self::Dir;
    fn make_dir(&self, parent: &Self::Dir, name: &str) -> Result<Self::Dir, Error>;
    /// Makes an empty file, which must not exist, and opens it for reading and writing;
    /// dropping the value closes it.
    fn create(&self, dir: &Self::Dir, name: &str) -> Result<Self::File, Error>;
    fn open(&self, dir: &Self::Dir, name: &str) -> Result<Self::File, Error>;
    fn unlink(&self, dir: &Self::Dir, name: &str) -> Result<(), Error>;
    fn rename(
        &self,
        dir: &Self::Dir,
        name: &str,
        new_dir: &Self::Dir,
        new_name: &str,
    ) -> Result<(), Error>;
    /// The attributes of what `path` names, its components separated by `/`; the size.
    fn stat(&self, dir: &Self::Dir, path: &str) -> Result<u64, Error>;
    fn truncate(&self, dir: &Self::Dir, name: &str, size: u64) -> Result<(), Error>;
    /// Opens the directory and calls `each` for its entries, those of the directory itself and
    /// its parent included, until that returns false.
    fn list(&self, dir: &Self::Dir, each: &mut dyn FnMut() -> bool) -> Result<(), Error>;
    /// Fills `buf`; fewer bytes are an error.
    fn read(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> Result<(), Error>;
    /// Writes all of `data`.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> Result<(), Error>;
    fn fsync(&self, file: &Self::File) -> Result<(), Error>;
    /// Makes durable what it takes to read the file's data back.
    fn fdatasync(&self, file: &Self::File) -> Result<(), Error>;
    /// The attributes of an open file; the size.
    fn fstat(&self, file: &Self::File) -> Result<u64, Error>;
    /// Brings everything done so far to the devices.
    fn sync(&self) -> Result<(), Error>;
    /// CPU time used so far by this process and, where there is one, the daemon; nanoseconds.
    /// The kernel's own threads are not in it.
    fn cpu_ns(&self) -> Result<u64, Error>;
    /// What was done so far besides what was asked for, where that is known.
    fn background(&self) -> Option<Background> {
        None
    }
}

/// Fewer bytes were moved than asked for.
fn short(moved: usize, wanted: usize) -> Result<(), Error> {
    match moved == wanted {
        true => Ok(()),
        false => Err(Error::Unable(format!("{moved} of {wanted} bytes moved"))),
    }
}

/// Which file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Sheaf in this process.
    Sheaf,
    /// Sheaf in this process with all of its threads on one CPU.
    SheafOneCpu,
    SheafMount,
    Kernel(Kernel),
    /// A folder of whatever is mounted there.
    Path(PathBuf),
}

impl Target {
    /// A comparator as the user names it.
    pub fn parse(name: &str) -> Result<Target, Error> {
        if let Some(kernel) = Kernel::parse(name) {
            return Ok(Target::Kernel(kernel));
        }
        match name {
            "sheaf-mount" => Ok(Target::SheafMount),
            path if path.contains('/') => Ok(Target::Path(PathBuf::from(path))),
            _ => Err(Error::Usage(format!(
                "'{name}' is no file system to compare with: give ext4, ext4-lazytime, \
                 ext4-fast_commit, xfs, f2fs, btrfs, btrfs-raid0, tmpfs, sheaf-mount, or the path of a folder"
            ))),
        }
    }

    /// As rows have it.
    pub fn name(&self) -> String {
        match self {
            Target::Sheaf => "sheaf".to_owned(),
            Target::SheafOneCpu => "sheaf-one-cpu".to_owned(),
            Target::SheafMount => "sheaf-mount".to_owned(),
            Target::Kernel(kernel) => kernel.name().to_owned(),
            Target::Path(path) => path.display().to_string(),
        }
    }

    /// Something has to be mounted for it.
    pub fn needs_mount(&self) -> bool {
        matches!(self, Target::SheafMount | Target::Kernel(_))
    }

    /// What can be known before anything is set up: programs and folders are there.
    pub fn check(&self) -> Result<(), Error> {
        match self {
            Target::Kernel(kernel) => kernel.check(),
            Target::Path(path) if !path.is_dir() => Err(Error::Usage(format!(
                "{} is no folder: a path to compare with must be one",
                path.display()
            ))),
            _ => Ok(()),
        }
    }
}

/// Whom most suites compare with by default.
pub const AGAINST: [&str; 2] = ["ext4", "xfs"];

/// Comparators from the list that the user gave; `none` stands for no one.
pub fn parse_against(names: &[String]) -> Result<Vec<Target>, Error> {
    let mut targets = Vec::new();
    for name in names.iter().map(|name| name.trim()) {
        if name.is_empty() || name == "none" {
            continue;
        }
        let target = Target::parse(name)?;
        target.check()?;
        if targets.contains(&target) {
            return Err(Error::Usage(format!("'{name}' is given twice")));
        }
        targets.push(target);
    }
    Ok(targets)
}

/// What an empty file takes at most, in bytes, with its part of directories, of the journal and of room for cleaning: in Sheaf,
/// or in the most generous of those it is compared with.
pub(crate) fn file_bytes(against: &[Target]) -> u64 {
    match against.is_empty() {
        true => 512,
        false => 1536,
    }
}

/// How those that were compared with are made, for a report.
pub(crate) fn notes(against: &[Target]) -> impl Iterator<Item = String> {
    against.iter().filter_map(|target| match target {
        Target::Kernel(kernel) => Some(kernel.note()),
        _ => None,
    })
}

/// That nobody of the kernel takes part, for a report: with the names that were asked for.
pub(crate) fn left_out(against: &[Target], why: &str) -> String {
    let asked: Vec<String> = against.iter().map(Target::name).collect();
    let asked = match asked.is_empty() {
        true => String::new(),
        false => format!(" ({})", asked.join(", ")),
    };
    format!("file systems of the kernel{asked} are left out: {why}")
}

/// For suites that make each side's file system themselves.
pub(crate) fn only_kernels(against: &[Target]) -> Result<(), Error> {
    only(against, "xfs, f2fs, btrfs (-raid0) and tmpfs")
}

/// For those of them on a device; `without` says what a side without one, a tmpfs, would be no comparison for.
pub(crate) fn only_on_devices(against: &[Target], without: &str) -> Result<(), Error> {
    match against.contains(&Target::Kernel(Kernel::Tmpfs)) {
        true => Err(Error::Usage(without.to_owned())),
        false => only(against, "xfs, f2fs and btrfs (-raid0)"),
    }
}

fn only(against: &[Target], kernels: &str) -> Result<(), Error> {
    match against.iter().all(|t| matches!(t, Target::Kernel(_))) {
        true => Ok(()),
        false => Err(Error::Usage(format!(
            "this is compared with ext4 (-lazytime, -fast_commit), {kernels} only"
        ))),
    }
}

/// One thread, and as many as there are CPUs, with the powers of two between.
pub fn default_threads() -> Vec<usize> {
    let cpus = cpu_count();
    let mut threads: Vec<usize> = (0..)
        .map(|bit| 1 << bit)
        .take_while(|&count| count < cpus)
        .collect();
    threads.push(cpus);
    threads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparators_have_names_or_paths() {
        assert_eq!(Target::parse("sheaf-mount").unwrap(), Target::SheafMount);
        assert_eq!(Target::parse("xfs").unwrap().name(), "xfs");
        assert_eq!(
            Target::parse("/tmp").unwrap(),
            Target::Path(PathBuf::from("/tmp"))
        );
        assert!(matches!(Target::parse("fat"), Err(Error::Usage(_))));
    }

    #[test]
    fn lists_of_comparators_are_checked() {
        let parse = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            parse_against(&names)
        };
        assert!(parse(&["none"]).unwrap().is_empty());
        assert_eq!(parse(&["tmpfs", "/"]).unwrap().len(), 2);
        assert!(matches!(parse(&["tmpfs", "tmpfs"]), Err(Error::Usage(_))));
        assert!(matches!(parse(&["/no/such/folder"]), Err(Error::Usage(_))));
        assert!(matches!(parse(&["raw"]), Err(Error::Usage(_))));
    }

    #[test]
    fn threads_by_default_end_at_the_number_of_cpus() {
        let threads = default_threads();
        assert_eq!(threads.first(), Some(&1));
        assert_eq!(threads.last(), Some(&cpu_count()));
        assert!(threads.windows(2).all(|pair| pair[0] < pair[1]));
    }
}

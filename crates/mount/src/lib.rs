//! A Sheaf file system as a mount of this machine: FUSE requests to `fs` calls.
//!
//! - [`abi`], [`decode`], [`encode`](mod@encode), [`dirent`]: the kernel's messages.
//! - [`ops`]: what a file system answers, as one trait; [`dispatch`] calls it.
//! - [`transport`], [`session`], `flushes`: how requests arrive, and the threads that serve them.
//! - [`sheaf_ops`], [`handles`]: those operations on a [`FileSystem`](fs::FileSystem).
//! - [`live`], [`metrics`], `http`, [`scrub`]: what can be asked of the daemon while it serves.
//! - [`mounting`], [`options`], [`mount_table`], [`signals`]: getting into and out of the tree;
//!   [`outcome`]: how the daemon tells `umount` whether all was written.
//!
//! Deliberately absent: permission checks and file locks (the kernel does both), a cache
//! (the kernel's and the engine's suffice), anything that knows blocks or nodes.

pub mod abi;
mod atomic;
pub mod decode;
pub mod dirent;
pub mod dispatch;
pub mod encode;
mod flushes;
pub mod handles;
mod http;
pub mod live;
pub mod metrics;
pub mod mount_table;
pub mod mounting;
pub mod notify;
pub mod ops;
pub mod options;
pub mod outcome;
mod process;
mod rereads;
pub mod scrub;
pub mod session;
pub mod sheaf_ops;
pub mod signals;
mod sys;
pub mod transport;
mod trim;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use atomic::ioctl as atomic_ioctl;
pub use live::Live;
pub use mounting::{
    DeviceClaim, Insist, Unmounter, check_mountpoint, clean_up, is_stale_mount, unmount,
    unmount_now,
};
pub use options::{AtimePolicy, FuseIo, MountOptions};
pub use outcome::Outcome;
pub use signals::SignalWatch;
pub use trim::{TrimRange, root_of, trim};

use metrics::FuseWay;
use signals::Closing;
use transport::dev_fuse::DevFuse;
use transport::uring::{self, RingFuse};

/// Why a mount failed, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("unknown mount option '{0}'")]
    UnknownOption(String),
    #[error("mount option '{name}' cannot be '{value}'; give {expected}")]
    BadOption {
        name: String,
        value: String,
        expected: String,
    },
    #[error("options cannot change while mounted: unmount, then mount with the new options")]
    Remount,
    #[error("{0:?} contains a zero byte")]
    BadPath(PathBuf),
    #[error("mount point {mountpoint:?}: {error}")]
    MountPoint {
        mountpoint: PathBuf,
        error: std::io::Error,
    },
    #[error("cannot open /dev/fuse: {0} ({remedy})", remedy = fuse_remedy(.0))]
    DevFuse(std::io::Error),
    #[error("cannot mount at {mountpoint:?}: {error}")]
    Mount {
        mountpoint: PathBuf,
        error: std::io::Error,
    },
    #[error("cannot run fusermount3: {0} (install the package fuse3, or do it as root)")]
    Helper(std::io::Error),
    #[error("fusermount3 at {mountpoint:?}: {message}")]
    HelperFailed {
        mountpoint: PathBuf,
        message: String,
    },
    #[error("cannot hand {device:?} over to the kernel: {error}")]
    Claim {
        device: PathBuf,
        error: std::io::Error,
    },
    #[error("no Sheaf file system is mounted at {0:?}")]
    NotMounted(PathBuf),
    #[error("cannot discard the free space of {mountpoint:?}: {error}")]
    Trim {
        mountpoint: PathBuf,
        error: std::io::Error,
    },
    #[error("cannot scrub {mountpoint:?}: {error}")]
    Scrub {
        mountpoint: PathBuf,
        error: std::io::Error,
    },
    #[error("cannot ask the daemon of {mountpoint:?}: {error}")]
    Ask {
        mountpoint: PathBuf,
        error: std::io::Error,
    },
    #[error("cannot serve metrics at {endpoint}: {error}")]
    Metrics {
        endpoint: String,
        error: std::io::Error,
    },
    #[error("cannot unmount {mountpoint:?}: {error}")]
    Unmount {
        mountpoint: PathBuf,
        error: std::io::Error,
    },
    #[error(
        "unmounted at {mountpoint:?}, but the file system is still mounted at {other:?}: the daemon \
         goes on until it is unmounted there, too"
    )]
    StillMounted { mountpoint: PathBuf, other: PathBuf },
    #[error(
        "what was mounted at {mountpoint:?} is taken away, but nobody served it any more: its daemon had died, or the connection to it was broken off. What \
         was not synced may be lost; the next mount recovers what was"
    )]
    DaemonDied { mountpoint: PathBuf },
    #[error("unmounted, but not everything was written: {0}")]
    NotWritten(String),
    #[error(
        "the kernel speaks FUSE {major}.{minor}; {}.{} (Linux 5.4) is needed",
        abi::KERNEL_VERSION,
        abi::KERNEL_MINOR_VERSION_MIN
    )]
    KernelTooOld { major: u32, minor: u32 },
    #[error(
        "the kernel does not offer FUSE over io_uring: as root, write Y to {} (Linux 6.14 or later), or mount without \
         fuse_io=uring",
        uring::PARAMETER
    )]
    NoFuseUring,
    #[error("FUSE over io_uring cannot be served here: {0}; mount with -o fuse_io=dev")]
    NoRings(std::io::Error),
    #[error("the kernel ended the mount before it began")]
    NoInit,
    #[error("serving requests: {0}")]
    Serve(std::io::Error),
    #[error("closing the file system: {0}")]
    Close(fs::Error),
}

fn fuse_remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES) => "its permissions keep this user out: they are 0666 as a rule",
        Some(libc::EPERM) => "this process may not open the device: a container has to be given it",
        _ => "is the fuse kernel module loaded?",
    }
}

/// Mounts a file system and serves it until it is unmounted: see [`mount_operations`]. Every
/// open file is closed then, and the file system, too, unless the mount was broken off: the
/// caller closes it for that case.
///
/// `outcome` is where an unmounting process hears of the end; the caller tells it once all
/// is done.
///
/// No thread of this process may map a file of the mount shared and writable: the kernel waits, with the process's memory map locked, until what a mapping
/// stored is written back, and whoever serves that may need the lock. Other processes may.
///
/// # Errors
/// [`Error::Close`] when not everything could be written at the end.
pub fn mount(
    fs: Arc<fs::FileSystem>,
    mountpoint: &Path,
    options: &MountOptions,
    claim: Option<&mut dyn DeviceClaim>,
    outcome: Option<Arc<Outcome>>,
    ready: impl FnOnce(Unmounter),
) -> Result<(), Error> {
    let way = FuseWay::default();
    let (ended, _signals) =
        mount_holding_signals(fs, mountpoint, options, claim, outcome, way, ready);
    ended
}

/// As [`mount`], for a process that has more to do when the mount has ended: signals do not end
/// it, but are only logged, while it keeps the watch that it is given. `way` is told how requests come.
pub fn mount_holding_signals(
    fs: Arc<fs::FileSystem>,
    mountpoint: &Path,
    options: &MountOptions,
    claim: Option<&mut dyn DeviceClaim>,
    outcome: Option<Arc<Outcome>>,
    way: FuseWay,
    ready: impl FnOnce(Unmounter),
) -> (Result<(), Error>, Option<SignalWatch>) {
    let mut options = options.clone();
    options.read_only |= fs.read_only();
    let operations = sheaf_ops::SheafOps::new(fs, &options)
        .with_outcome(outcome)
        .with_way(way);
    let (closing, closed) = (operations.closing(), operations.closed());
    let (served, signals) = serve(operations, mountpoint, &options, claim, ready, &closing);
    let ended = served.and_then(|()| match closed.take() {
        Some(error) => Err(Error::Close(error)),
        None => Ok(()),
    });
    (ended, signals)
}

/// Mounts `operations` at `mountpoint` and serves it until it is unmounted, from outside or
/// by SIGTERM or SIGINT; when this returns, no request is in progress.
///
/// `ready` is called once the mount is usable. SIGTERM, SIGINT and SIGHUP are taken over for
/// the whole process meanwhile.
pub fn mount_operations<O: ops::Operations + 'static>(
    operations: O,
    mountpoint: &Path,
    options: &MountOptions,
    claim: Option<&mut dyn DeviceClaim>,
    ready: impl FnOnce(Unmounter),
) -> Result<(), Error> {
    let closing = Closing::default();
    let (served, _signals) = serve(operations, mountpoint, options, claim, ready, &closing);
    served
}

fn serve<O: ops::Operations + 'static>(
    operations: O,
    mountpoint: &Path,
    options: &MountOptions,
    claim: Option<&mut dyn DeviceClaim>,
    ready: impl FnOnce(Unmounter),
    closing: &Closing,
) -> (Result<(), Error>, Option<SignalWatch>) {
    let mut config = session::Config::default();
    if let Some(workers) = options.workers {
        config.workers_max = workers;
    }
    config.access_lists = !options.no_xattr;
    let plan = match plan_rings(options.fuse_io, &config) {
        Ok(plan) => plan,
        Err(error) => return (Err(error), None),
    };
    become_io_flusher();
    let mounted = match mounting::mount(mountpoint, options, claim) {
        Ok(mounted) => mounted,
        Err(error) => return (Err(error), None),
    };
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    config.asynchronous_direct = session::may_be_asynchronous(mounted.on_block_device, &release);
    let (unmounter, dev) = (mounted.unmounter, DevFuse::new(mounted.fd));
    let left = unmounter.clone();
    let signals = match SignalWatch::start(unmounter.clone(), closing.clone()) {
        Ok(signals) => signals,
        Err(error) => {
            drop(dev);
            left.take_away();
            return (Err(Error::Serve(error)), None);
        }
    };
    let ready = || {
        if let Err(error) = mounting::raise_read_ahead(unmounter.mountpoint()) {
            tracing::debug!(%error, "the kernel's read-ahead stays at its default");
        }
        ready(unmounter);
    };
    let served = match plan {
        None => session::serve(dev, operations, &config, ready),
        Some(plan) => session::serve(RingFuse::new(dev, plan), operations, &config, ready),
    };
    if served.is_err() {
        left.take_away();
    }
    closing.begin();
    (served, signals)
}

/// The queues by which requests come, if not by /dev/fuse.
fn plan_rings(fuse_io: FuseIo, config: &session::Config) -> Result<Option<uring::Plan>, Error> {
    match (fuse_io, uring::is_enabled()) {
        (FuseIo::Dev, _) | (FuseIo::Auto, false) => return Ok(None),
        (FuseIo::Uring, false) => return Err(Error::NoFuseUring),
        (FuseIo::Auto | FuseIo::Uring, true) => {}
    }
    match uring::Plan::new(config) {
        Ok(plan) => Ok(Some(plan)),
        Err(error) if fuse_io == FuseIo::Uring => Err(Error::NoRings(error)),
        Err(error) => {
            tracing::info!(%error, "requests come by /dev/fuse, not by io_uring");
            Ok(None)
        }
    }
}

/// Has this process asked to end, as by SIGTERM, as soon as another one has ended. To end without an unmount would not do for who is the
/// last in a mount table: the kernel then unmounts as the process ends, and waits for an answer that nobody gives any more.
///
/// # Errors
/// That process is not there, or no thread can be started.
pub fn end_with(process: u32) -> std::io::Result<()> {
    let other = sys::pidfd_open(process)?;
    let wait = move || match sys::wait_for_input(other.as_fd()) {
        Ok(()) => sys::ask_to_end(),
        Err(error) => tracing::error!(%error, "process {process} is no longer watched"),
    };
    base::thread::spawn("sheaf-end-with", wait).map(drop)
}

/// How little the kernel likes to end the process where memory is short: as what a machine cannot do without, but not never.
const OOM_SCORE: i32 = -900;

/// Has the kernel end others first where the machine is short of memory: whoever has the mount's files open would lose them. Needs privileges; without them, and
/// where somebody has chosen no more, nothing changes.
pub fn spare_from_oom_killer() {
    const PATH: &str = "/proc/self/oom_score_adj";
    let now = std::fs::read_to_string(PATH).ok();
    let now = now.and_then(|text| text.trim().parse::<i32>().ok());
    if now.is_some_and(|now| now <= OOM_SCORE) {
        return;
    }
    if let Err(error) = std::fs::write(PATH, OOM_SCORE.to_string()) {
        tracing::debug!(%error, "{PATH}: not spared where memory is short");
    }
}

/// Makes the calling thread, and those it starts, safe to serve write-back: call it before
/// the file system is opened. Needs the capability CAP_SYS_RESOURCE; without it nothing changes, and memory that a thread asks for may
/// wait for pages of the mount, which it is to write back itself: in control groups of version 1 that have none left.
pub fn become_io_flusher() {
    if let Err(error) = sys::set_io_flusher() {
        tracing::info!(
            "without CAP_SYS_RESOURCE the mount may hang in a full memory control group of version 1 that it shares with writers: {error}"
        );
    }
}

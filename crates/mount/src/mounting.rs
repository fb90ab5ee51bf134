//! Mounting, unmounting, and cleaning up after a daemon that died.
//!
//! Root mounts with mount(2); others through `fusermount3`, which is set-uid and hands the
//! mounted descriptor back over a socket.
//!
//! A remount would change only what the kernel itself enforces (`ro`, `nosuid` …), and never reaches the daemon. Where this code is given one it refuses:
//! unmount and mount again. mount(8) gives it here for a line of fstab; otherwise the type in the kernel's table, `fuse.sheaf`, has no program of ours, and
//! it asks the kernel, or `mount.fuse` where there is that.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::Error;
use crate::mount_table::{self, MountedAt};
use crate::options::{AtimePolicy, MountOptions};
use crate::outcome::{Ear, IOC_OUTCOME};
use crate::sys::{self, Wanted};
use crate::transport::dev_fuse;

/// The ioctl on any directory of a mount that tells its daemon's process id: `_IOR('S', 1, u32)`.
pub const IOC_DAEMON_PID: u32 = 0x8004_5301;

/// The ioctl on any directory of a mount that tells by which number the daemon knows the calling thread: `_IOR('S', 6, u32)`.
pub const IOC_CALLER: u32 = 0x8004_5306;

/// The subtype shown in the mount table.
pub const SUBTYPE: &str = "sheaf";

/// Read-ahead of a mount in KiB; the kernel's default of 128 starves streaming reads.
const READ_AHEAD_KB: &str = "1024";

/// The claim on the first device, where that is a block device: the kernel then opens it
/// for itself alone (`fuseblk`), and in exchange passes sync(2) on to the daemon.
pub trait DeviceClaim {
    /// The block device.
    fn path(&self) -> &Path;
    /// Gives up the exclusive claim, so that the kernel can take it.
    fn release(&mut self) -> std::io::Result<()>;
    /// After the mount: the kernel holds the claim, or (false) could not take it and the
    /// caller shall. Either way the device was free for a moment: verify it again.
    fn settle(&mut self, kernel_holds: bool) -> std::io::Result<()>;
}

/// A fresh mount and the descriptor to serve it by.
#[derive(Debug)]
pub struct Mounted {
    pub fd: OwnedFd,
    pub unmounter: Unmounter,
    /// The kernel has the first device, and waits for more answers.
    pub on_block_device: bool,
}

/// Ends a mount from anywhere.
#[derive(Clone, Debug)]
pub struct Unmounter {
    mountpoint: PathBuf,
    /// The kernel's name for the connection, if it could be found out.
    connection: Option<String>,
}

/// How insistently to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insist {
    /// Fails while anything in it is in use.
    No,
    /// Detaches it from the tree now; it ends when the last user is gone.
    Lazy,
    /// Also breaks its connection: whoever still uses it gets errors.
    Abort,
}

impl Unmounter {
    /// For what is mounted at `mountpoint` now.
    fn new(mountpoint: PathBuf) -> Self {
        let found = mount_table::find(&mountpoint).ok().flatten();
        Unmounter::of(mountpoint, found)
    }

    /// For what was found to be mounted there.
    fn of(mountpoint: PathBuf, found: Option<MountedAt>) -> Self {
        Unmounter {
            mountpoint,
            connection: found.and_then(|m| m.connection()),
        }
    }

    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Unmounts. Returns when the mount is out of the tree; the daemon's sessions end after.
    ///
    /// # Errors
    /// [`Error::Unmount`], of the kind `ResourceBusy` while it is in use, or while something else is mounted over it or in its place.
    pub fn unmount(&self, insist: Insist) -> Result<(), Error> {
        let target = c_string(self.mountpoint.as_os_str())?;
        let flags = match insist {
            Insist::No => libc::UMOUNT_NOFOLLOW,
            Insist::Lazy => libc::UMOUNT_NOFOLLOW | libc::MNT_DETACH,
            Insist::Abort => return self.abort(),
        };
        self.check_topmost()?;
        match sys::umount(&target, flags) {
            Ok(()) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                fusermount_unmount(&self.mountpoint, insist != Insist::No)
            }
            Err(error) => Err(Error::Unmount {
                mountpoint: self.mountpoint.clone(),
                error,
            }),
        }
    }
}

impl Unmounter {
    /// Takes a mount out of the tree that nobody serves any more, and with it the kernel's claim on its device.
    pub(crate) fn take_away(&self) {
        let there = mount_table::find(&self.mountpoint).ok().flatten();
        let is_left = there.is_some_and(|topmost| topmost.connection() == self.connection);
        if is_left && let Err(error) = self.unmount(Insist::Lazy) {
            tracing::warn!(%error, "a mount is left that nobody serves");
        }
    }

    /// Fails where something else has been mounted since, which would be unmounted in place of this.
    fn check_topmost(&self) -> Result<(), Error> {
        let at = |error| Error::Unmount {
            mountpoint: self.mountpoint.clone(),
            error,
        };
        let Some(topmost) = mount_table::find(&self.mountpoint).map_err(at)? else {
            return Ok(());
        };
        if self.connection.is_none() || topmost.connection() == self.connection {
            return Ok(());
        }
        let what = format!(
            "{:?} ({}) has been mounted there since: unmount that first",
            topmost.source, topmost.kind
        );
        Err(at(std::io::Error::new(ErrorKind::ResourceBusy, what)))
    }

    /// Breaks the connection through the kernel's control file system, which is mounted
    /// first where it is not. What is mounted then has no server and is taken away.
    fn abort(&self) -> Result<(), Error> {
        let at = |error| Error::Unmount {
            mountpoint: self.mountpoint.clone(),
            error,
        };
        let Some(connection) = &self.connection else {
            return Err(at(ErrorKind::NotFound.into()));
        };
        let control = Path::new(CONTROL).join(connection).join("abort");
        if !control.exists() {
            let target = c_string(OsStr::new(CONTROL))?;
            sys::mount(c"fusectl", &target, c"fusectl", 0, c"").map_err(at)?;
        }
        std::fs::write(&control, "1").map_err(at)?;
        if is_stale_mount(&self.mountpoint)? {
            self.unmount(Insist::Lazy)?;
        }
        Ok(())
    }
}

/// Where the control file system belongs.
const CONTROL: &str = "/sys/fs/fuse/connections";

fn c_string(text: &OsStr) -> Result<CString, Error> {
    CString::new(text.as_bytes()).map_err(|_| Error::BadPath(PathBuf::from(text)))
}

fn is_root() -> bool {
    sys::effective_ids().0 == 0
}

/// Mounts at `mountpoint`; requests queue up until the descriptor is served.
pub fn mount(
    mountpoint: &Path,
    options: &MountOptions,
    claim: Option<&mut dyn DeviceClaim>,
) -> Result<Mounted, Error> {
    let mountpoint = mount_table::resolve(mountpoint).map_err(|error| Error::MountPoint {
        mountpoint: mountpoint.to_owned(),
        error,
    })?;
    check_mountpoint(&mountpoint)?;
    let fd = if is_root() {
        match mount_as_root(&mountpoint, options, claim) {
            // Root of a container without the right to mount.
            Err(Error::Mount { error, .. }) if error.raw_os_error() == Some(libc::EPERM) => {
                mount_by_helper(&mountpoint, options)?
            }
            result => result?,
        }
    } else {
        mount_by_helper(&mountpoint, options)?
    };
    let found = mount_table::find(&mountpoint).ok().flatten();
    // Of what cannot be looked up the worse is assumed.
    let on_block_device = found.as_ref().is_none_or(|found| found.on_block_device());
    let unmounter = Unmounter::of(mountpoint, found);
    Ok(Mounted {
        fd,
        unmounter,
        on_block_device,
    })
}

/// Takes away what dead daemons left at `mountpoint`, and with it the kernel's claims on their
/// devices.
pub fn clean_up(mountpoint: &Path) -> Result<(), Error> {
    while is_stale_mount(mountpoint)? {
        tracing::info!(mountpoint = %mountpoint.display(), "unmounting what a dead daemon left");
        unmount_now(mountpoint, Insist::Lazy)?;
    }
    Ok(())
}

/// Cleans up after a dead daemon; what is left must be a directory.
pub fn check_mountpoint(mountpoint: &Path) -> Result<(), Error> {
    clean_up(mountpoint)?;
    let error = match std::fs::metadata(mountpoint) {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(_) => ErrorKind::NotADirectory.into(),
        Err(error) => error,
    };
    Err(Error::MountPoint {
        mountpoint: mountpoint.to_owned(),
        error,
    })
}

fn mount_flags(options: &MountOptions) -> libc::c_ulong {
    let mut flags = 0;
    for (wanted, flag) in [
        (options.read_only, libc::MS_RDONLY),
        (options.no_dev, libc::MS_NODEV),
        (options.no_suid, libc::MS_NOSUID),
        (options.no_exec, libc::MS_NOEXEC),
        (options.no_symlink_follow, libc::MS_NOSYMFOLLOW),
        (options.sync, libc::MS_SYNCHRONOUS),
        (options.dirsync, libc::MS_DIRSYNC),
        (options.no_diratime, libc::MS_NODIRATIME),
        (options.atime == AtimePolicy::Relative, libc::MS_RELATIME),
        (options.atime == AtimePolicy::Never, libc::MS_NOATIME),
        (options.atime == AtimePolicy::Always, libc::MS_STRICTATIME),
    ] {
        if wanted {
            flags |= flag;
        }
    }
    flags
}

/// The kernel's option string, but for what `fusermount3` adds itself.
fn kernel_options(options: &MountOptions) -> String {
    let mut text = String::from("default_permissions");
    if options.allow_other.unwrap_or_else(is_root) {
        text.push_str(",allow_other");
    }
    if let Some(max_read) = options.max_read {
        text.push_str(&format!(",max_read={max_read}"));
    }
    text
}

fn subtype(options: &MountOptions) -> &str {
    options.subtype.as_deref().unwrap_or(SUBTYPE)
}

fn mount_as_root(
    mountpoint: &Path,
    options: &MountOptions,
    claim: Option<&mut dyn DeviceClaim>,
) -> Result<OwnedFd, Error> {
    if let Some(claim) = claim
        && let Some(fd) = mount_block_device(mountpoint, options, claim)?
    {
        return Ok(fd);
    }
    let source = options.fsname.as_deref().unwrap_or(SUBTYPE);
    let kind = format!("fuse.{}", subtype(options));
    mount_with(mountpoint, options, OsStr::new(source), &kind, "")
}

/// Mounts as `fuseblk`; `None` when the kernel could not claim the device, so that the
/// mount has to do without (and sync(2) does not reach it).
fn mount_block_device(
    mountpoint: &Path,
    options: &MountOptions,
    claim: &mut dyn DeviceClaim,
) -> Result<Option<OwnedFd>, Error> {
    let source = claim.path().as_os_str().to_owned();
    let claim_error = |error| Error::Claim {
        device: PathBuf::from(&source),
        error,
    };
    claim.release().map_err(claim_error)?;
    let kind = format!("fuseblk.{}", subtype(options));
    let mounted = mount_with(mountpoint, options, &source, &kind, ",blksize=4096");
    if let Err(error) = &mounted {
        tracing::warn!(%error, "not mounted as a block device: sync(2) will not reach the array");
    }
    if let Err(error) = claim.settle(mounted.is_ok()) {
        if mounted.is_ok() {
            Unmounter::new(mountpoint.to_owned()).unmount(Insist::Lazy)?;
        }
        return Err(claim_error(error));
    }
    Ok(mounted.ok())
}

fn mount_with(
    mountpoint: &Path,
    options: &MountOptions,
    source: &OsStr,
    kind: &str,
    more: &str,
) -> Result<OwnedFd, Error> {
    let fd = dev_fuse::open().map_err(Error::DevFuse)?;
    let (uid, gid) = sys::real_ids();
    let data = format!(
        "fd={},rootmode=40000,user_id={uid},group_id={gid},{}{more}",
        fd.as_raw_fd(),
        kernel_options(options),
    );
    sys::mount(
        &c_string(source)?,
        &c_string(mountpoint.as_os_str())?,
        &c_string(OsStr::new(kind))?,
        mount_flags(options),
        &c_string(OsStr::new(&data))?,
    )
    .map_err(|error| Error::Mount {
        mountpoint: mountpoint.to_owned(),
        error,
    })?;
    Ok(fd)
}

/// The options as `fusermount3` wants them. It sets `nosuid` and `nodev` for users itself.
fn helper_options(options: &MountOptions) -> String {
    let mut text = kernel_options(options);
    for (wanted, name) in [
        (options.read_only, "ro"),
        (options.no_dev, "nodev"),
        (options.no_suid, "nosuid"),
        (options.no_exec, "noexec"),
        // Older ones refuse it by name.
        (options.no_symlink_follow, "nosymfollow"),
        (options.sync, "sync"),
        (options.dirsync, "dirsync"),
        (options.atime == AtimePolicy::Never, "noatime"),
    ] {
        if wanted {
            text.push(',');
            text.push_str(name);
        }
    }
    let source = options.fsname.as_deref().unwrap_or(SUBTYPE);
    text.push_str(&format!(",fsname={source},subtype={}", subtype(options)));
    text
}

fn mount_by_helper(mountpoint: &Path, options: &MountOptions) -> Result<OwnedFd, Error> {
    let (ours, theirs) = UnixStream::pair().map_err(Error::Helper)?;
    let mut child = Command::new("fusermount3")
        .arg("-o")
        .arg(helper_options(options))
        .arg("--")
        .arg(mountpoint)
        // The socket becomes the child's standard input, so that no descriptor has to be
        // inheritable in this, multi-threaded, process.
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(Error::Helper)?;
    let received = sys::receive_fd(&ours);
    let mut message = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        use std::io::Read;
        // Only for the error message below.
        if let Err(error) = stderr.read_to_string(&mut message) {
            message = error.to_string();
        }
    }
    let status = child.wait().map_err(Error::Helper)?;
    match received.map_err(Error::Helper)? {
        Some(fd) if status.success() => Ok(fd),
        _ => Err(Error::HelperFailed {
            mountpoint: mountpoint.to_owned(),
            message: message.trim().to_owned(),
        }),
    }
}

fn fusermount_unmount(mountpoint: &Path, lazy: bool) -> Result<(), Error> {
    let mut command = Command::new("fusermount3");
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    let output = command
        .arg("--")
        .arg(mountpoint)
        .stdin(Stdio::null())
        .output()
        .map_err(Error::Helper)?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(Error::HelperFailed {
        mountpoint: mountpoint.to_owned(),
        message: message.trim().to_owned(),
    })
}

/// Whether a Sheaf file system is mounted at `mountpoint` whose daemon is gone.
pub fn is_stale_mount(mountpoint: &Path) -> Result<bool, Error> {
    let table_error = |error| Error::MountPoint {
        mountpoint: mountpoint.to_owned(),
        error,
    };
    let resolved = match mount_table::resolve(mountpoint) {
        Ok(resolved) => resolved,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(table_error(error)),
    };
    let found = mount_table::find(&resolved).map_err(table_error)?;
    if !found.is_some_and(|m| m.is_sheaf()) {
        return Ok(false);
    }
    is_dead(&resolved)
}

/// Whether nobody serves what is mounted here: every request then fails in the kernel. A
/// look at attributes would not tell, because those are still cached.
fn is_dead(mountpoint: &Path) -> Result<bool, Error> {
    let probed = sys::probe(&c_string(mountpoint.as_os_str())?);
    Ok(probed.is_err_and(|error| is_of_dead(&error)))
}

/// What a mount whose daemon has died answers to everything.
fn is_of_dead(error: &std::io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        // The last: by the rings of a daemon that is just going.
        Some(libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED)
    )
}

/// What is mounted at `mountpoint`, without asking whoever serves it.
fn fuse_mount(mountpoint: &Path) -> Result<(PathBuf, MountedAt), Error> {
    let at = |error| Error::MountPoint {
        mountpoint: mountpoint.to_owned(),
        error,
    };
    let resolved = mount_table::resolve(mountpoint).map_err(at)?;
    match mount_table::find(&resolved).map_err(at)? {
        Some(found) if found.kind.starts_with("fuse") => Ok((resolved, found)),
        _ => Err(Error::NotMounted(resolved)),
    }
}

/// Unmounts the file system at `mountpoint` without a word to its daemon, which may hang, and
/// without waiting for it: it writes everything back and ends in its own time.
pub fn unmount_now(mountpoint: &Path, insist: Insist) -> Result<(), Error> {
    let (resolved, _) = fuse_mount(mountpoint)?;
    Unmounter::new(resolved).unmount(insist)
}

/// So long nobody wonders why an unmount takes its time.
const PATIENCE: Duration = Duration::from_secs(5);

/// Unmounts the Sheaf file system at `mountpoint` and waits until its daemon has everything
/// on the devices and is gone; calls `still_waiting` with the daemon's process once that takes
/// long.
///
/// # Errors
/// [`Error::DaemonDied`] when its daemon had died, or the connection to it was broken off; the mount is taken away then.
/// [`Error::NotWritten`] when the mount is gone, but the daemon could not write everything;
/// [`Error::StillMounted`] when it is gone from here, but not from everywhere.
pub fn unmount(mountpoint: &Path, still_waiting: &dyn Fn(u32)) -> Result<(), Error> {
    let at = |error| Error::MountPoint {
        mountpoint: mountpoint.to_owned(),
        error,
    };
    let (resolved, found) = fuse_mount(mountpoint)?;
    let unmounter = Unmounter::new(resolved.clone());
    // What is on the devices nobody can tell.
    let take_away_dead = || {
        unmounter.unmount(Insist::Lazy)?;
        Err(Error::DaemonDied {
            mountpoint: resolved.clone(),
        })
    };
    if is_dead(&resolved)? {
        return take_away_dead();
    }
    let root = match File::open(&resolved) {
        Err(error) if is_of_dead(&error) => return take_away_dead(),
        // Somebody else's, who lets not even root in. The kernel waits until the daemon has
        // closed its file system, but how that went is in its log only.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            return unmounter.unmount(Insist::No);
        }
        root => root.map_err(at)?,
    };
    // A mount of another kind, or by an older daemon, is unmounted without waiting.
    let pid = match sys::ioctl_u32(root.as_fd(), IOC_DAEMON_PID) {
        Err(error) if is_of_dead(&error) => return take_away_dead(),
        pid => pid.ok().filter(|&pid| pid != std::process::id()),
    };
    // In another namespace of processes the daemon's number is somebody else's, as is ours there.
    let caller = sys::ioctl_u32(root.as_fd(), IOC_CALLER);
    let hidden = caller.is_ok_and(|caller| caller != sys::thread_id());
    if hidden {
        tracing::warn!(
            "the daemon is not to be seen from here: when and how it ends is in its log"
        );
    }
    let pid = pid.filter(|_| !hidden);
    let daemon = pid.and_then(|pid| sys::pidfd_open(pid).ok());
    let ear = pid.and_then(|pid| {
        let number = sys::ioctl_u32(root.as_fd(), IOC_OUTCOME).ok()?;
        let heard = Ear::open(pid, number);
        if let Err(error) = &heard {
            tracing::warn!(%error, "how the daemon ends will be in its log only");
        }
        heard.ok()
    });
    drop(root);
    unmounter.unmount(Insist::No)?;
    let everything = mount_table::all().map_err(at)?;
    if let Some(other) = everything.into_iter().find(|m| m.device == found.device) {
        return Err(Error::StillMounted {
            mountpoint: resolved,
            other: other.mountpoint,
        });
    }
    if let (Some(daemon), Some(pid)) = (daemon, pid) {
        let daemon = daemon.as_fd();
        let waited = sys::wait_for(daemon, Wanted::Read, daemon, Some(PATIENCE));
        if waited.map_err(at)? == (false, false) {
            still_waiting(pid);
        }
        sys::wait_readable(daemon, daemon).map_err(at)?;
    }
    match ear {
        Some(ear) => ear.hear().map_err(Error::NotWritten),
        None => Ok(()),
    }
}

/// Raises the kernel's read-ahead for the mount at `mountpoint`, where that is permitted.
pub fn raise_read_ahead(mountpoint: &Path) -> std::io::Result<()> {
    let Some(found) = mount_table::find(mountpoint)? else {
        return Ok(());
    };
    let suffix = if found.on_block_device() {
        "-fuseblk"
    } else {
        ""
    };
    let path = format!("/sys/class/bdi/{}{suffix}/read_ahead_kb", found.device);
    std::fs::write(path, READ_AHEAD_KB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_daemon_left_is_recognised_and_taken_away() {
        if !Path::new("/dev/fuse").exists() {
            return base::skip("/dev/fuse");
        }
        let dir = tempfile::tempdir().unwrap();
        let options = MountOptions::parse("fsname=images").unwrap();
        // Through the helper, which works for root as well.
        let fd = mount_by_helper(dir.path(), &options).unwrap();
        let found = mount_table::find(dir.path()).unwrap().unwrap();
        assert!(found.is_sheaf());
        assert_eq!(found.source, "images");
        drop(fd);
        assert!(is_stale_mount(dir.path()).unwrap());
        // The next mount cleans up by itself.
        check_mountpoint(dir.path()).unwrap();
        assert!(!is_stale_mount(dir.path()).unwrap());
        assert!(matches!(
            unmount(dir.path(), &|_| {}),
            Err(Error::NotMounted(_))
        ));
    }

    /// Whoever had no right to it was asked whether there is such a device.
    #[test]
    fn what_keeps_somebody_from_fuse_is_named() {
        for (number, words) in [
            (libc::EACCES, "permissions"),
            (libc::EPERM, "container"),
            (libc::ENOENT, "module loaded"),
        ] {
            let error = Error::DevFuse(std::io::Error::from_raw_os_error(number));
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn a_mount_point_must_be_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        for bad in [file, dir.path().join("missing")] {
            let error = mount(&bad, &MountOptions::default(), None).unwrap_err();
            assert!(matches!(error, Error::MountPoint { .. }), "{error}");
        }
    }
}

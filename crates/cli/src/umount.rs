//! `sheaf umount`: the mount crate asks the daemon who it is, unmounts, and waits until that
//! process, which writes everything back before it ends, is gone and has said that it did.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use mount::Insist;

use crate::args::Umount;
use crate::devices::pause;
use crate::failure::{Failure, Outcome};
use crate::output::tell;
use crate::users::processes;

/// A mount may be busy for a moment: a process that was just started still has copies of the
/// descriptors of the one that started it (they close after its exec has let its parent go on),
/// somebody looks at it (df, an indexer), a program left something running in the background
/// (git its clean-up), or the kernel has not let go of the files of a process that ended with
/// asynchronous I/O under way.
const ATTEMPTS: u32 = 30;
const PAUSE: Duration = Duration::from_millis(100);
/// Processes that a message names.
const NAMED_MAX: usize = 5;

pub fn run(args: &Umount) -> Outcome {
    let mountpoint = std::path::absolute(&args.mountpoint);
    let mountpoint = mountpoint.map_err(|e| Failure::io("the current folder", &e))?;
    // Called in the mount, this process would be one that uses it.
    std::env::set_current_dir("/").map_err(|e| Failure::io("/", &e))?;
    match (args.force, args.lazy) {
        (true, _) => mount::unmount_now(&mountpoint, Insist::Abort)?,
        (false, true) => mount::unmount_now(&mountpoint, Insist::Lazy)?,
        (false, false) => unmount(&mountpoint)?,
    }
    Ok(0)
}

pub fn unmount(mountpoint: &Path) -> Result<(), Failure> {
    for _ in 1..ATTEMPTS {
        match mount::unmount(mountpoint, &still_waiting) {
            Err(error) if is_busy(&error) => pause(PAUSE),
            result => return Ok(result?),
        }
    }
    mount::unmount(mountpoint, &still_waiting).map_err(|error| match is_busy(&error) {
        true => Failure::new(format!("{error}: {}", who_uses(mountpoint))),
        false => Failure::from(error),
    })
}

/// It is unmounted; to wait no longer is safe, and up to the user.
fn still_waiting(daemon: u32) {
    tell(format!(
        "Unmounted. Waiting for the daemon (process {daemon}): it is writing, or the file system is still \
         mounted in another mount namespace, a container's say. It goes on without being waited for."
    ));
}

fn is_busy(error: &mount::Error) -> bool {
    match error {
        mount::Error::Unmount { error, .. } => error.kind() == std::io::ErrorKind::ResourceBusy,
        // fusermount3 has no exit code for it.
        mount::Error::HelperFailed { message, .. } => message.contains("busy"),
        _ => false,
    }
}

/// Whom the user may ask to let go of the mount, as far as /proc tells.
fn who_uses(mountpoint: &Path) -> String {
    let Ok(inside) = mount::mount_table::resolve(mountpoint) else {
        return "something in it is in use".to_owned();
    };
    match in_use_by(&inside) {
        None => "no process that can be seen has anything open there; the kernel may be about to \
              finish the I/O of one that ended: try again"
            .to_owned(),
        Some(users) => format!("in use by {users}; end that and try again"),
    }
}

/// Who still uses what a dead daemon has left mounted, and with it the kernel's claim on its device. Once that is out of the tree nobody can be told from
/// who uses another one.
pub fn users_of_dead(mountpoint: &Path) -> Option<String> {
    if !mount::is_stale_mount(mountpoint).is_ok_and(|is_stale| is_stale) {
        return None;
    }
    in_use_by(&mount::mount_table::resolve(mountpoint).ok()?)
}

/// Some of those who have something of the mount there, and how many more.
fn in_use_by(inside: &Path) -> Option<String> {
    let mut users = mounts_below(inside);
    users.extend(processes().filter_map(|(pid, dir)| user(pid, &dir, inside)));
    let more = match users.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    users.truncate(NAMED_MAX);
    (!users.is_empty()).then(|| format!("{}{more}", users.join(", ")))
}

/// The process by name, if one of its links leads into the mount. Links are read, never
/// followed: the file system may hang.
fn user(pid: u32, dir: &Path, mountpoint: &Path) -> Option<String> {
    let descriptors = fs::read_dir(dir.join("fd")).into_iter().flatten().flatten();
    let links = ["cwd", "root", "exe"].map(|name| dir.join(name));
    let uses = links
        .into_iter()
        .chain(descriptors.map(|entry| entry.path()))
        .any(|link| fs::read_link(link).is_ok_and(|to| to.starts_with(mountpoint)));
    let maps = || {
        let maps = fs::read(dir.join("maps")).unwrap_or_default();
        let inside = [b" ", mountpoint.as_os_str().as_bytes(), b"/"].concat();
        maps.windows(inside.len()).any(|window| window == inside)
    };
    if !uses && !maps() {
        return None;
    }
    let name = fs::read_to_string(dir.join("comm")).unwrap_or_default();
    Some(format!("{} (process {pid})", name.trim()))
}

fn mounts_below(mountpoint: &Path) -> Vec<String> {
    let all = mount::mount_table::all().unwrap_or_default();
    all.iter()
        .map(|mounted| mounted.mountpoint.as_path())
        .filter(|other| other.starts_with(mountpoint) && *other != mountpoint)
        .map(|other| format!("the mount at {}", other.display()))
        .collect()
}

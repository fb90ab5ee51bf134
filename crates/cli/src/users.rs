//! Who has the devices of an array open, where the array is mounted, and what its daemon says of itself.
//!
//! 1. Links in `/proc` are read; one is followed only where it leads to a device of the array by name, or to a block device: what else
//!    a process has open may be on a file system that hangs.
//! 2. A daemon is asked by a thread that nobody waits for longer than [`PATIENCE`].

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::sync::{Condvar, Mutex, rank};
use device::Occupied;
use mount::Live;
use mount::mount_table::{self, MountedAt};
use serde::Serialize;

use crate::live;

/// How long a daemon has to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// A process that has devices of the array open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct User {
    pub process: u32,
    pub name: String,
}

/// As far as this process may see it.
#[derive(Debug, Default)]
pub struct Users {
    pub processes: Vec<User>,
    /// Mount points in this mount namespace.
    pub mounted_at: Vec<PathBuf>,
}

/// What a daemon says of the time since the mount.
#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    /// An error has made the file system read-only.
    pub failed: bool,
    /// Requests that failed, by device.
    pub device_errors: BTreeMap<String, u64>,
}

impl Users {
    /// Those of the devices at these paths, but for this process.
    pub fn of(paths: &[PathBuf]) -> Users {
        let Ok(occupied) = Occupied::by(paths) else {
            return Users::default();
        };
        let names: Vec<PathBuf> = paths
            .iter()
            .filter_map(|path| fs::canonicalize(path).ok())
            .collect();
        let mut users = Users::default();
        let mut connections = Vec::new();
        for (pid, dir) in processes() {
            if has_open(&dir, &names, &occupied) {
                let name = fs::read_to_string(dir.join("comm")).unwrap_or_default();
                users.processes.push(User {
                    process: pid,
                    name: crate::output::one_line(name.trim()),
                });
                connections.extend(served_by(&dir));
            }
        }
        users.processes.sort_by_key(|user| user.process);
        for mounted in mount_table::all().unwrap_or_default() {
            if mounted.is_sheaf() && users.serve(&mounted, &connections, &occupied) {
                users.mounted_at.push(mounted.mountpoint);
            }
        }
        users
    }

    /// Whether a mount is of this array.
    fn serve(&self, mounted: &MountedAt, connections: &[String], occupied: &Occupied) -> bool {
        if mounted.on_block_device() {
            // Device nodes: no file system that hangs is in the way.
            return fs::metadata(&mounted.source).is_ok_and(|source| occupied.has(&source));
        }
        if !connections.is_empty() {
            return mounted
                .connection()
                .is_some_and(|c| connections.contains(&c));
        }
        // Before Linux 6.16 only the daemon says which mount it serves.
        let at = mounted.mountpoint.clone();
        !self.processes.is_empty()
            && patiently(move || Live::new(&at).ok()?.daemon().ok())
                .flatten()
                .is_some_and(|daemon| self.processes.iter().any(|user| user.process == daemon))
    }

    /// What the daemon says, if there is a mount and it answers this user.
    pub fn health(&self) -> Option<Health> {
        let at = self.mounted_at.first()?.clone();
        patiently(move || live::health(&at)).flatten()
    }
}

/// All but this one, whose descriptors go with it.
pub fn processes() -> impl Iterator<Item = (u32, PathBuf)> {
    let own = std::process::id();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        (pid != own).then(|| (pid, entry.path()))
    })
}

/// The descriptors of a process, each with where its link says that it leads.
fn descriptors(dir: &Path) -> impl Iterator<Item = (PathBuf, PathBuf)> {
    let entries = fs::read_dir(dir.join("fd")).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((fs::read_link(entry.path()).ok()?, entry.path())))
}

fn has_open(dir: &Path, names: &[PathBuf], occupied: &Occupied) -> bool {
    descriptors(dir).any(|(to, link)| {
        let is_device =
            names.contains(&to) || (to.starts_with("/dev") && !to.starts_with("/dev/shm"));
        is_device && fs::metadata(link).is_ok_and(|of| occupied.has(&of))
    })
}

/// The FUSE connections that a process serves, where the kernel tells.
fn served_by(dir: &Path) -> Vec<String> {
    let of = |(to, link): (PathBuf, PathBuf)| {
        let number = link.file_name().filter(|_| to == Path::new("/dev/fuse"))?;
        let info = fs::read_to_string(dir.join("fdinfo").join(number)).ok()?;
        connection_in(&info)
    };
    descriptors(dir).filter_map(of).collect()
}

fn connection_in(info: &str) -> Option<String> {
    let mut lines = info.lines();
    let number = lines.find_map(|line| line.strip_prefix("fuse_connection:"))?;
    Some(number.trim().to_owned())
}

/// What `ask` returns, if it does in time.
fn patiently<T: Send + 'static>(ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let answer = Arc::new((Mutex::new(rank::LEAF, None), Condvar::new()));
    let theirs = Arc::clone(&answer);
    let asking = base::thread::spawn("sheaf-ask", move || {
        let answered = ask();
        *theirs.0.lock() = Some(answered);
        theirs.1.notify_all();
    });
    // Without a thread nobody can be asked.
    asking.ok()?;
    let mut answered = answer.0.lock();
    while answered.is_none() {
        if answer.1.wait_for(&mut answered, PATIENCE) {
            break;
        }
    }
    answered.take()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_none_of_the_users() {
        let own = std::process::id();
        let parent = std::os::unix::process::parent_id();
        assert!(processes().all(|(pid, _)| pid != own));
        assert!(processes().any(|(pid, _)| pid == parent));
    }

    #[test]
    fn a_connection_is_found_in_what_the_kernel_says_of_a_descriptor() {
        let info = "pos:\t0\nflags:\t02000002\nmnt_id:\t29\nino:\t85\nfuse_connection:\t46\n";
        assert_eq!(connection_in(info).as_deref(), Some("46"));
        assert_eq!(connection_in("pos:\t0\nflags:\t02\n"), None);
    }

    #[test]
    fn what_does_not_come_in_time_is_not_waited_for() {
        assert_eq!(patiently(|| 7), Some(7));
    }
}

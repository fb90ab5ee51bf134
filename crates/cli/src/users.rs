//! Who has the devices of an array open, where the array is mounted, and what its daemon says of itself.
//!
//! 1. Links in `/proc` are read; one is followed only where it leads to a device of the array by name, or to a block device: what else
//!    a process has open may be on a file system that hangs.
//! 2. A daemon is asked by a process of its own, which is left behind where no answer comes within [`PATIENCE`]: the kernel ends no thread that waits for
//!    an answer to a request which a daemon has, or has room for in a ring, and no process that has such a thread.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::Duration;

use base::clock::{Clock, ns_of};
use device::Occupied;
use mount::mount_table::{self, MountedAt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;

use crate::{daemon, live};

/// How long a daemon has to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of an answer that are read at once.
const PIECE: usize = 4096;

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
    daemons: Vec<Daemon>,
}

/// One of the processes that serves a mount.
#[derive(Debug)]
struct Daemon {
    process: u32,
    /// By a signal or a debugger: it answers nothing.
    is_stopped: bool,
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
                if let Some(served) = served_by(&dir) {
                    let stat = fs::read_to_string(dir.join("stat"));
                    users.daemons.push(Daemon {
                        process: pid,
                        is_stopped: stat.is_ok_and(|stat| is_stopped(&stat)),
                    });
                    connections.extend(served);
                }
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
        // Before Linux 6.16 only the daemon says which mount it serves. What is mounted elsewhere is not asked where nobody can say yes.
        let is_one = |process| self.daemons.iter().any(|daemon| daemon.process == process);
        self.daemons.iter().any(|daemon| !daemon.is_stopped)
            && ask(&mounted.mountpoint).is_some_and(|answer| is_one(answer.daemon))
    }

    /// What the daemon says, if there is a mount and it answers this user.
    pub fn health(&self) -> Option<Health> {
        let at = self.mounted_at.first()?;
        // One that is not seen may answer.
        let is_hopeless =
            !self.daemons.is_empty() && self.daemons.iter().all(|daemon| daemon.is_stopped);
        match is_hopeless {
            true => None,
            false => live::health(&ask(at)?.metrics),
        }
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

/// The FUSE connections that a process serves, as far as the kernel tells; nothing if it serves none.
fn served_by(dir: &Path) -> Option<Vec<String>> {
    let mut ends = descriptors(dir)
        .filter(|(to, _)| to.ends_with("dev/fuse"))
        .peekable();
    ends.peek()?;
    let of = |link: PathBuf| {
        let info = fs::read_to_string(dir.join("fdinfo").join(link.file_name()?)).ok()?;
        connection_in(&info)
    };
    Some(ends.filter_map(|(_, link)| of(link)).collect())
}

/// Whether the line `stat` of a process says so.
fn is_stopped(stat: &str) -> bool {
    // The program's name, in parentheses, may hold anything.
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    after.trim_start().starts_with(['T', 't'])
}

fn connection_in(info: &str) -> Option<String> {
    let mut lines = info.lines();
    let number = lines.find_map(|line| line.strip_prefix("fuse_connection:"))?;
    Some(number.trim().to_owned())
}

/// What a daemon says of itself.
struct Answer {
    /// The number of its process, as it knows itself.
    daemon: u32,
    /// Empty where it does not tell this user.
    metrics: String,
}

fn ask(mountpoint: &Path) -> Option<Answer> {
    let mut asking = daemon::myself();
    asking
        .args(["info", "--unwaited", "--live"])
        .arg(mountpoint);
    let said = String::from_utf8(patiently(&mut asking)?).ok()?;
    let (daemon, metrics) = said.split_once('\n')?;
    Some(Answer {
        daemon: daemon.parse().ok()?,
        metrics: metrics.to_owned(),
    })
}

/// What a program prints, if it ends in time. One that does not keeps nothing open that this process or its caller has.
fn patiently(program: &mut Command) -> Option<Vec<u8>> {
    // Where the kernel cannot do that, what a caller left open stays so.
    let _ = daemon::keep_nothing_open();
    let program = program.current_dir("/").stdin(Stdio::null());
    let mut child = program
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let said = child.stdout.take().and_then(all_in_time);
    if said.is_none() {
        // It ends now or, where it cannot be ended, when the answer comes; nobody waits for that.
        let _ = child.kill();
    }
    let _ = child.try_wait();
    said
}

fn all_in_time(mut from: ChildStdout) -> Option<Vec<u8>> {
    let clock = Clock::real();
    let (mut said, mut piece) = (Vec::new(), [0; PIECE]);
    loop {
        let left = ns_of(PATIENCE).checked_sub(clock.monotonic_ns())?;
        let left = Timespec::try_from(Duration::from_nanos(left)).ok()?;
        match poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&left)) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return None,
        }
        match from.read(&mut piece) {
            Ok(0) => return Some(said),
            Ok(read) => said.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
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
    fn a_process_is_stopped_by_its_state_and_not_by_its_name() {
        assert!(is_stopped("7 (sheaf) T 1 7"));
        assert!(is_stopped("7 (sheaf) t 1 7"));
        assert!(!is_stopped("7 (a) T 1) S 1 7"));
        assert!(!is_stopped(""));
    }

    /// Who asked waited for what did not come, and then could not end.
    #[test]
    fn what_does_not_come_in_time_is_not_waited_for() {
        let said = patiently(Command::new("echo").arg("7"));
        assert_eq!(said.unwrap(), b"7\n");
        let clock = Clock::real();
        assert_eq!(patiently(Command::new("sleep").arg("60")), None);
        // What is said bit by bit takes no longer.
        let endless = ["-c", "while echo 7; do sleep 0.1; done"];
        assert_eq!(patiently(Command::new("sh").args(endless)), None);
        let waited = Duration::from_nanos(clock.monotonic_ns());
        assert!(waited >= 2 * PATIENCE && waited < Duration::from_secs(30));
    }
}

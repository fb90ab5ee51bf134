//! The demo on a mount: the files are used through the kernel, the daemon is killed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bench::interrupt;
use rustix::process::{Pid, Signal};

use super::tree::{self, Tree};
use super::{Stage, at, child_failed, record};
use crate::daemon::myself;
use crate::devices::pause;
use crate::failure::Failure;
use crate::umount;

pub const MOUNT_POINT: &str = "mnt";
/// Files are synced by this many threads, which share commits and flushes.
const SYNCERS: usize = 8;
const WRITING: Duration = Duration::from_secs(2);
/// For half a minute at most the first record is waited for.
const FIRST_SYNC_ROUNDS: u32 = 300;
const FIRST_SYNC_PAUSE: Duration = Duration::from_millis(100);

/// Why mounting is not possible here, if that is known beforehand.
pub fn why_not() -> Option<String> {
    if !Path::new("/dev/fuse").exists() {
        return Some(
            "there is no /dev/fuse here (modprobe fuse, or give the container the device)".into(),
        );
    }
    let root = rustix::process::geteuid().is_root();
    let helper = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|d| d.join("fusermount3").exists()));
    match root || helper {
        true => None,
        false => Some("fusermount3 is missing (install the package fuse3, or run as root)".into()),
    }
}

/// The array, mounted; unmounted with the value.
pub struct Mounted {
    devices: Vec<PathBuf>,
    mnt: PathBuf,
    pid_file: PathBuf,
}

impl Mounted {
    pub fn new(folder: &Path, devices: &[PathBuf]) -> Result<Self, Failure> {
        let mounted = Mounted {
            devices: devices.to_vec(),
            mnt: folder.join(MOUNT_POINT),
            pid_file: folder.join("daemon.pid"),
        };
        fs::create_dir(&mounted.mnt).map_err(at(&mounted.mnt))?;
        mounted.mount()?;
        Ok(mounted)
    }

    fn mount(&self) -> Result<(), Failure> {
        interrupt::check()?;
        let own = std::process::id().to_string();
        let status = myself()
            .arg("mount")
            // However the demo ends: no mount is left.
            .args(["--end-with", &own])
            .arg("--pid-file")
            .arg(&self.pid_file)
            .arg("--log")
            .arg(self.pid_file.with_extension("log"))
            .args(&self.devices)
            .arg(&self.mnt)
            .stdin(Stdio::null())
            // A signal of the terminal ended it while the daemon that it has started went on to mount.
            .process_group(0)
            .status()
            .map_err(|e| Failure::new(format!("cannot start sheaf mount: {e}")))?;
        match status.success() {
            true => Ok(()),
            false => Err(child_failed("sheaf mount", status)),
        }
    }

    fn kill_daemon(&self) -> Result<(), Failure> {
        let text = fs::read_to_string(&self.pid_file).map_err(at(&self.pid_file))?;
        let pid = text
            .trim()
            .parse()
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| Failure::new(format!("'{text}' is not a process id")))?;
        rustix::process::kill_process(pid, Signal::KILL)
            .map_err(|e| Failure::new(format!("cannot kill the daemon: {e}")))
    }
}

impl Stage for Mounted {
    fn copy(&mut self, tree: &Tree) -> Result<(), Failure> {
        let folders = tree.folders();
        for folder in &folders {
            let path = self.mnt.join(folder);
            fs::create_dir(&path).map_err(at(&path))?;
        }
        for file in &tree.files {
            interrupt::check()?;
            let to = self.mnt.join(&file.name);
            fs::copy(&file.source, &to).map_err(at(&to))?;
        }
        let files = tree.files.iter().map(|f| &f.name);
        let paths: Vec<PathBuf> = files
            .chain(&folders)
            .map(|name| self.mnt.join(name))
            .chain([self.mnt.clone()])
            .collect();
        sync_all(&paths)
    }

    fn verify(&mut self, tree: &Tree) -> Result<(), Failure> {
        for file in &tree.files {
            interrupt::check()?;
            let path = self.mnt.join(&file.name);
            if tree::checksum(&path)? != (file.bytes, file.checksum) {
                return Err(Failure::new(format!(
                    "{} differs from its source",
                    path.display()
                )));
            }
        }
        Ok(())
    }

    fn write_and_kill(&mut self) -> Result<u64, Failure> {
        let path = self.mnt.join(record::FILE);
        let course = Course::default();
        let results = base::thread::parallel(2, |role| match role {
            0 => write_until_killed(&path, &course),
            _ => kill_when_due(self, &course),
        });
        results.into_iter().collect::<Result<(), Failure>>()?;
        Ok(course.synced.load(Ordering::SeqCst))
    }

    fn reopen_and_count(&mut self) -> Result<u64, Failure> {
        self.mount()?;
        let path = self.mnt.join(record::FILE);
        record::count(&fs::read(&path).map_err(at(&path))?)
    }

    fn finish(&mut self) -> Result<(), Failure> {
        umount::unmount(&self.mnt)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        match mount::unmount(&self.mnt, &|_| {}) {
            // It may have been killed on purpose.
            Ok(()) | Err(mount::Error::NotMounted(_) | mount::Error::DaemonDied { .. }) => {}
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

/// What writer and killer tell one another.
#[derive(Default)]
struct Course {
    synced: AtomicU64,
    /// Set before the signal is sent: whatever fails earlier is a failure.
    killed: AtomicBool,
    writer_ended: AtomicBool,
}

/// Appends records and syncs each, until the daemon is gone.
fn write_until_killed(path: &Path, course: &Course) -> Result<(), Failure> {
    let written = write_records(path, course);
    course.writer_ended.store(true, Ordering::SeqCst);
    written
}

fn write_records(path: &Path, course: &Course) -> Result<(), Failure> {
    let mut file = File::create_new(path).map_err(at(path))?;
    let parent = path.parent().unwrap_or(path);
    let folder = File::open(parent).map_err(at(parent))?;
    folder.sync_all().map_err(at(path))?;
    for number in 0.. {
        let written = file
            .write_all(&record::make(number))
            .and_then(|()| file.sync_data());
        if let Err(error) = written {
            return match course.is_end_of_daemon(&error) {
                true => Ok(()),
                false => Err(Failure::io(path.display(), &error)),
            };
        }
        course.synced.store(number + 1, Ordering::SeqCst);
    }
    Ok(())
}

impl Course {
    /// EIO is also what a sync gets that fails for another reason.
    fn is_end_of_daemon(&self, error: &io::Error) -> bool {
        let can_be = matches!(
            error.raw_os_error(),
            Some(libc::ENOTCONN | libc::ECONNABORTED | libc::EIO | libc::ENODEV)
        );
        can_be && self.killed.load(Ordering::SeqCst)
    }
}

/// Kills the daemon when the writer has been writing for a while, and, on a slow disk, has synced something.
fn kill_when_due(stage: &Mounted, course: &Course) -> Result<(), Failure> {
    pause(WRITING);
    for _ in 0..FIRST_SYNC_ROUNDS {
        let ended = course.writer_ended.load(Ordering::SeqCst);
        if ended || course.synced.load(Ordering::SeqCst) > 0 {
            break;
        }
        pause(FIRST_SYNC_PAUSE);
    }
    course.killed.store(true, Ordering::SeqCst);
    stage.kill_daemon()
}

fn sync_all(paths: &[PathBuf]) -> Result<(), Failure> {
    let results = base::thread::parallel(SYNCERS, |worker| {
        for path in paths.iter().skip(worker).step_by(SYNCERS) {
            interrupt::check()?;
            let file = File::open(path).map_err(at(path))?;
            file.sync_all().map_err(at(path))?;
        }
        Ok(())
    });
    results.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lost fsync ended the writer as if the daemon had been killed.
    #[test]
    fn no_error_before_the_kill_is_taken_for_it() {
        let course = Course::default();
        let errors = [libc::EIO, libc::ENOTCONN, libc::ECONNABORTED];
        let errors = errors.map(io::Error::from_raw_os_error);
        assert!(!errors.iter().any(|e| course.is_end_of_daemon(e)));
        course.killed.store(true, Ordering::SeqCst);
        assert!(errors.iter().all(|e| course.is_end_of_daemon(e)));
        let other = io::Error::from_raw_os_error(libc::ENOSPC);
        assert!(!course.is_end_of_daemon(&other));
    }
}

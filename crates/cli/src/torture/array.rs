//! The array that is tortured: image files in a folder, their mount, and its daemon as a child
//! of this process.
//!
//! Invariants:
//! 1. Dropping the value leaves no daemon and no mount behind, and no file unless they are to be
//!    kept.
//! 2. What lies there already is removed only under a lock on the folder that the user names, which
//!    a run holds from its start to its end: the images of a run under way are safe.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal};

use crate::args::Mkfs;
use crate::daemon::myself;
use crate::failure::Failure;
use crate::mount_command::USABLE;
use crate::{fsck, mkfs, umount};

/// In the folder that the user names.
const FOLDER: &str = "sheaf-torture";
/// In that.
const MOUNT_POINT: &str = "mnt";
const LOG: &str = "daemon.log";
/// Unequal, so that there are several zones. The files are sparse.
const DEVICE_BYTES: [u64; 4] = [768 << 20, 768 << 20, 1 << 30, 512 << 20];
/// How long recovery may take until the mount is usable.
const READY: Duration = Duration::from_secs(120);
/// Findings of one check that are shown.
const FINDINGS_SHOWN: usize = 5;

pub struct Array {
    folder: PathBuf,
    images: Vec<PathBuf>,
    mnt: PathBuf,
    log: PathBuf,
    options: Vec<String>,
    daemon: Option<Child>,
    keep: bool,
    /// Invariant 2.
    _lock: File,
}

impl Array {
    /// A fresh file system in `dir`; what a run that was killed left there goes first.
    pub fn make(dir: &Path, options: &[String]) -> Result<Self, Failure> {
        let at = |e: std::io::Error| Failure::io(dir.display(), &e);
        let dir = fs::canonicalize(dir).map_err(at)?;
        let lock = lock(&dir)?;
        let folder = dir.join(FOLDER);
        let image = |i| folder.join(format!("device{i}.img"));
        let images: Vec<PathBuf> = (0..DEVICE_BYTES.len()).map(image).collect();
        let mnt = folder.join(MOUNT_POINT);
        make_folder(&folder, &images, &mnt)?;
        let array = Array {
            images,
            mnt,
            log: folder.join(LOG),
            folder,
            options: options.to_vec(),
            daemon: None,
            keep: false,
            _lock: lock,
        };
        for (image, bytes) in array.images.iter().zip(DEVICE_BYTES) {
            device::create_image(image, bytes)?;
        }
        mkfs::make(&Mkfs {
            devices: array.images.clone(),
            label: "torture".to_owned(),
            stripe_unit: None,
            journal_size: None,
            size: None,
            uuid: None,
            force: false,
            no_discard: true,
            quiet: true,
            json: false,
        })?;
        Ok(array)
    }

    pub fn mnt(&self) -> &Path {
        &self.mnt
    }

    /// Ends the use, leaves the files in place under a name that no later run removes, and says
    /// where they are.
    pub fn keep(&mut self, seed: u64) -> &Path {
        self.keep = true;
        self.take_down();
        let name = |n: u32| format!("{FOLDER}-kept-{seed}-{n}");
        let kept = (1..).map(|n| self.folder.with_file_name(name(n)));
        if let Some(kept) = kept.into_iter().find(|kept| !kept.exists()) {
            match fs::rename(&self.folder, &kept) {
                Ok(()) => self.folder = kept,
                Err(error) => tracing::warn!("{}: {error}", self.folder.display()),
            }
        }
        &self.folder
    }

    /// Kills the daemon, if there is one, and takes the mount away.
    fn take_down(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            // It may have ended already.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        if let Err(error) = mount::clean_up(&self.mnt) {
            tracing::warn!("{error}");
        }
    }

    /// The end of the daemon's log.
    pub fn log_tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }

    /// Starts a daemon and waits until its mount is usable.
    pub fn start(&mut self) -> Result<(), Failure> {
        let output = self.start_without_waiting()?;
        let (tell, told) = mpsc::channel();
        // It ends with the daemon at the latest.
        base::thread::spawn("ready", move || {
            let mut lines = BufReader::new(output).lines().map_while(Result::ok);
            // What recovery took comes first.
            let usable = lines.any(|line| line.starts_with(USABLE));
            // Nobody listens any more when it took too long.
            let _ = tell.send(usable);
        })
        .map_err(|e| Failure::io("a thread", &e))?;
        match told.recv_timeout(READY) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Failure::new("the daemon ended before the mount was usable")),
            Err(_) => Err(Failure::new("the mount is not usable in time")),
        }
    }

    pub fn start_without_waiting(&mut self) -> Result<ChildStdout, Failure> {
        let failed = |e: std::io::Error| Failure::io("cannot start sheaf mount", &e);
        let mut command = myself();
        command
            .args(["mount", "--foreground", "--log"])
            .arg(&self.log);
        for options in &self.options {
            command.args(["-o", options]);
        }
        let mut child = command
            .args(&self.images)
            .arg(&self.mnt)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let output = child.stdout.take();
        self.daemon = Some(child);
        output.ok_or_else(|| Failure::new("the daemon has no output"))
    }

    /// SIGKILL; [`reap_killed`](Self::reap_killed) follows.
    pub fn signal_kill(&self) -> Result<(), Failure> {
        let daemon = self.daemon.as_ref();
        let daemon = daemon.ok_or_else(|| Failure::new("there is no daemon to kill"))?;
        rustix::process::kill_process(Pid::from_child(daemon), Signal::KILL)
            .map_err(|e| Failure::new(format!("cannot kill the daemon: {e}")))
    }

    /// Waits for the end of the daemon, which must be the signal's work.
    pub fn reap_killed(&mut self) -> Result<(), Failure> {
        let Some(mut daemon) = self.daemon.take() else {
            return Ok(());
        };
        let status = daemon
            .wait()
            .map_err(|e| Failure::io("cannot wait for the daemon", &e))?;
        match status.signal() {
            Some(signal) if signal == Signal::KILL.as_raw() => Ok(()),
            _ => Err(Failure::new(format!(
                "the daemon ended by itself: {status}"
            ))),
        }
    }

    /// Takes away what a killed daemon left; an unmount must not say that all of it is on the devices.
    pub fn unmount_dead(&self) -> Result<(), Failure> {
        match mount::unmount(&self.mnt, &|_| {}) {
            Err(mount::Error::DaemonDied { .. }) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(()) => Err(Failure::new(
                "the unmount of a mount whose daemon was killed says that all is well",
            )),
        }
    }

    /// Unmounts a living daemon, which must end well.
    pub fn unmount(&mut self) -> Result<(), Failure> {
        umount::unmount(&self.mnt)?;
        let Some(mut daemon) = self.daemon.take() else {
            return Ok(());
        };
        let status = daemon
            .wait()
            .map_err(|e| Failure::io("cannot wait for the daemon", &e))?;
        match status.success() {
            true => Ok(()),
            false => Err(Failure::new(format!("the daemon ended with {status}"))),
        }
    }

    /// What a full check finds.
    pub fn fsck(&self, when: &str) -> Result<Vec<String>, Failure> {
        let report = fsck::examine(&fsck::open(&self.images)?)?;
        let findings = report.findings.iter().take(FINDINGS_SHOWN);
        Ok(findings.map(|f| format!("fsck {when}: {f}")).collect())
    }
}

/// Ends with the process at the latest.
fn lock(dir: &Path) -> Result<File, Failure> {
    let failed = |e: std::io::Error| Failure::io(dir.display(), &e);
    let folder = File::open(dir).map_err(failed)?;
    match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(folder),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Failure::new(format!(
            "{}: another torture is under way there; wait for its end, or torture elsewhere",
            dir.display()
        ))),
        Err(error) => Err(failed(error.into())),
    }
}

/// The folder, empty but for the mount point. What a run that was killed left there goes first,
/// its daemon included.
fn make_folder(folder: &Path, images: &[PathBuf], mnt: &Path) -> Result<(), Failure> {
    let at = |e: std::io::Error| Failure::io(folder.display(), &e);
    if folder.exists() {
        if !images.iter().any(|image| image.exists()) {
            return Err(Failure::new(format!(
                "{} is there already, and somebody else's; remove it, or torture elsewhere",
                folder.display()
            )));
        }
        mount::clean_up(mnt)?;
        if mount::mount_table::find(mnt).map_err(at)?.is_some() {
            umount::unmount(mnt)?;
        }
        remove_own(folder, images).map_err(|e| {
            at(e).at("cannot remove what another run left; remove it, or torture elsewhere")
        })?;
    }
    fs::create_dir_all(mnt).map_err(at)
}

/// Removes the folder and what a run makes in it, and nothing else.
fn remove_own(folder: &Path, images: &[PathBuf]) -> std::io::Result<()> {
    let gone = |result: std::io::Result<()>| match result {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    gone(fs::remove_dir(folder.join(MOUNT_POINT)))?;
    for image in images {
        gone(fs::remove_file(image))?;
    }
    gone(fs::remove_file(folder.join(LOG)))?;
    fs::remove_dir(folder)
}

impl Drop for Array {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        self.take_down();
        if let Err(error) = remove_own(&self.folder, &self.images) {
            tracing::warn!("{}: cannot remove: {error}", self.folder.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second torture in the same folder took the images of the first for leftovers.
    #[test]
    fn a_run_under_way_keeps_its_images() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join(FOLDER).join("device0.img");
        fs::create_dir(dir.path().join(FOLDER)).unwrap();
        fs::write(&image, b"in use").unwrap();
        let first = lock(dir.path()).unwrap();
        let second = Array::make(dir.path(), &[]);
        let message = second.err().and_then(|e| e.message().map(str::to_owned));
        assert!(message.is_some_and(|m| m.contains("under way")));
        assert_eq!(fs::read(&image).unwrap(), b"in use");
        drop(first);
        assert!(lock(dir.path()).is_ok());
    }

    /// What lay beside the images went with them.
    #[test]
    fn what_a_run_did_not_make_stays() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(FOLDER);
        let images = [folder.join("device0.img"), folder.join("device1.img")];
        let (mnt, letter) = (folder.join(MOUNT_POINT), folder.join("letter"));
        make_folder(&folder, &images, &mnt).unwrap();
        fs::write(&letter, b"mine").unwrap();
        assert!(make_folder(&folder, &images, &mnt).is_err());
        fs::write(&images[1], b"left over").unwrap();
        assert!(make_folder(&folder, &images, &mnt).is_err());
        assert_eq!(fs::read(&letter).unwrap(), b"mine");
        fs::remove_file(&letter).unwrap();
        fs::write(&images[0], b"left over").unwrap();
        make_folder(&folder, &images, &mnt).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }
}

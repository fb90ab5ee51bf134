//! Sheaf as unmodified programs use it: the `sheaf` program makes, mounts and unmounts it.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::Posix;
use super::place::{Devices, Place};
use super::program;
use crate::Error;

/// A mount, its daemon and its devices, which go away with the value.
pub struct SheafMount {
    sheaf: PathBuf,
    mnt: PathBuf,
    pid_file: PathBuf,
    /// Mount options.
    options: Vec<String>,
    /// The daemon of the mount there is.
    daemon: Option<u32>,
    devices: Devices,
}

impl SheafMount {
    /// A fresh file system, made and mounted by the program `sheaf` with `options`.
    pub fn make(sheaf: &Path, place: &Place, options: &[String]) -> Result<SheafMount, Error> {
        let mut side = SheafMount {
            sheaf: sheaf.to_owned(),
            mnt: place.mount_point()?,
            pid_file: place.file("daemon.pid"),
            options: options.to_vec(),
            daemon: None,
            devices: place.array()?,
        };
        let mut mkfs = side.command("mkfs");
        mkfs.args(["--quiet", "--force", "--label", "bench"]);
        program::run(mkfs.args(&side.devices.paths))?;
        side.mount()?;
        Ok(side)
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.sheaf);
        command.arg(name);
        command
    }

    fn mount(&mut self) -> Result<(), Error> {
        let mut mount = self.command("mount");
        mount.args(&self.devices.paths).arg(&self.mnt);
        for options in &self.options {
            mount.args(["-o", options]);
        }
        mount.arg("--pid-file").arg(&self.pid_file);
        // However this one ends: the mount is in its mount table, where nobody else would find it.
        let own = std::process::id().to_string();
        program::run(mount.args(["--end-with", &own]))?;
        let text = std::fs::read_to_string(&self.pid_file);
        let text = text.map_err(|e| Error::io(&self.pid_file, e))?;
        let pid = text.trim().parse().ok();
        self.daemon = Some(pid.ok_or_else(|| Error::Unable("no daemon's pid".to_owned()))?);
        Ok(())
    }

    fn unmount(&mut self) -> Result<(), Error> {
        let mut umount = self.command("umount");
        program::run(umount.arg(&self.mnt))?;
        self.daemon = None;
        Ok(())
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mnt
    }

    /// What workloads call. On image files a mount is of type `fuse`, and the kernel passes no sync on to the daemon: a
    /// checkpoint takes its place, which writes home as well what a sync would leave in the journal.
    pub fn side(&self) -> Result<Posix, Error> {
        let side = Posix::new(&self.mnt, self.daemon)?;
        match self.devices.images {
            true => Ok(side.with_checkpoints(&self.sheaf)),
            false => Ok(side),
        }
    }

    /// What the daemon counts under this name, with this label where there are several.
    pub fn metric(&self, name: &str, label: Option<(&str, &str)>) -> Result<f64, Error> {
        let mut info = self.command("info");
        let told = program::output(info.args(["--json", "--live"]).arg(&self.mnt))?;
        counted(&told, name, label)
            .ok_or_else(|| Error::Unable(format!("the daemon does not count {name}")))
    }

    /// Brings everything to the devices and forgets what was read.
    pub fn remount(&mut self) -> Result<(), Error> {
        self.unmount()?;
        self.mount()
    }

    /// What the kernel has of it, or of what is below, is read again.
    pub fn forget(&self, place: &Place) -> Result<(), Error> {
        place.forget(&self.devices)
    }

    /// The most memory that the daemon has used so far, in bytes.
    pub fn peak_bytes(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.daemon?)).ok()?;
        let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib << 10)
    }

    /// Unmounts, which writes everything back.
    pub fn close(mut self) -> Result<(), Error> {
        self.unmount()
    }
}

/// The value of a metric in what `sheaf info --live --json` prints.
fn counted(told: &[u8], name: &str, label: Option<(&str, &str)>) -> Option<f64> {
    let told: Value = serde_json::from_slice(told).ok()?;
    let wanted = |sample: &&Value| {
        let labelled = |(key, value)| sample["labels"][key] == value;
        sample["name"] == name && label.is_none_or(labelled)
    };
    told["metrics"].as_array()?.iter().find(wanted)?["value"].as_f64()
}

impl Drop for SheafMount {
    fn drop(&mut self) {
        let Some(pid) = self.daemon else {
            return;
        };
        if let Err(error) = self.unmount() {
            tracing::warn!("{}: not unmounted: {error}", self.mnt.display());
            // The mount may be gone, and the daemon with it.
            let _ = unmount(&self.mnt, UnmountFlags::DETACH);
            let _ = Pid::from_raw(pid as i32).map(|pid| kill_process(pid, Signal::KILL));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn metrics_are_found_by_name_and_label() {
        let told = br#"{"mountpoint":"/mnt","metrics":[{"name":"a","value":1.0},
            {"name":"b","labels":{"event":"started"},"value":2.0},
            {"name":"b","labels":{"event":"committed"},"value":3.0}]}"#;
        assert_eq!(counted(told, "a", None), Some(1.0));
        assert_eq!(counted(told, "b", Some(("event", "committed"))), Some(3.0));
        assert_eq!(counted(told, "b", Some(("event", "aborted"))), None);
        assert_eq!(counted(b"", "a", None), None);
    }
}

//! A kernel file system: fresh, on a loop device over an image file or on a device, mounted
//! with the defaults of its mkfs and of mount(8).

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{UnmountFlags, unmount};

use super::place::{Devices, Place};
use super::program;
use crate::Error;

/// No work is left for after the mount.
const EXT4_MADE: &str = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";

/// Those that a benchmark can set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    Ext4,
    /// Times of inodes that changed in nothing else stay in memory for up to a day.
    Ext4Lazytime,
    /// With a second journal of small records.
    Ext4FastCommit,
    Xfs,
    F2fs,
    Btrfs,
    /// Data and metadata striped over all devices.
    BtrfsRaid0,
    Tmpfs,
}

impl Kernel {
    pub fn parse(name: &str) -> Option<Kernel> {
        let all = [
            Kernel::Ext4,
            Kernel::Ext4Lazytime,
            Kernel::Ext4FastCommit,
            Kernel::Xfs,
            Kernel::F2fs,
            Kernel::Btrfs,
            Kernel::BtrfsRaid0,
            Kernel::Tmpfs,
        ];
        all.into_iter().find(|kernel| kernel.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Kernel::Ext4 => "ext4",
            Kernel::Ext4Lazytime => "ext4-lazytime",
            Kernel::Ext4FastCommit => "ext4-fast_commit",
            Kernel::Xfs => "xfs",
            Kernel::F2fs => "f2fs",
            Kernel::Btrfs => "btrfs",
            Kernel::BtrfsRaid0 => "btrfs-raid0",
            Kernel::Tmpfs => "tmpfs",
        }
    }

    /// As mount(8) and mkfs(8) have it.
    fn file_system(self) -> &'static str {
        match self {
            Kernel::Ext4Lazytime | Kernel::Ext4FastCommit => "ext4",
            Kernel::BtrfsRaid0 => "btrfs",
            kernel => kernel.name(),
        }
    }

    /// The Debian package its mkfs is in.
    fn package(self) -> &'static str {
        match self {
            Kernel::Ext4 | Kernel::Ext4Lazytime | Kernel::Ext4FastCommit => "e2fsprogs",
            Kernel::Xfs => "xfsprogs",
            Kernel::F2fs => "f2fs-tools",
            Kernel::Btrfs | Kernel::BtrfsRaid0 => "btrfs-progs",
            Kernel::Tmpfs => "mount",
        }
    }

    fn program(self) -> String {
        match self {
            Kernel::Tmpfs => "mount".to_owned(),
            kernel => format!("mkfs.{}", kernel.file_system()),
        }
    }

    /// Its programs are there.
    pub fn check(self) -> Result<(), Error> {
        let program = self.program();
        match program::exists(&program) {
            true => Ok(()),
            false => Err(Error::Unable(format!(
                "{} cannot take part: there is no {program} (Debian package {})",
                self.name(),
                self.package()
            ))),
        }
    }

    /// How it is made and mounted, for a report: what is not its default in that.
    pub fn note(self) -> String {
        let name = self.name();
        let how = match self {
            Kernel::Tmpfs => "mounted with a size".to_owned(),
            Kernel::Ext4 | Kernel::Ext4Lazytime | Kernel::Ext4FastCommit => {
                format!("mkfs.ext4 -N <inodes for all files> -E {EXT4_MADE}")
            }
            Kernel::Xfs | Kernel::Btrfs => format!("{} -K, without discarding", self.program()),
            Kernel::BtrfsRaid0 => {
                "mkfs.btrfs -d raid0 -m raid0 -K on all devices, but of image files on one alone; without discarding"
                    .to_owned()
            }
            Kernel::F2fs => "mkfs.f2fs -t 0, without discarding".to_owned(),
        };
        let more = match self {
            Kernel::Ext4Lazytime => ", mounted with -o lazytime",
            Kernel::Ext4FastCommit => " -O fast_commit",
            _ => "",
        };
        format!("{name}: {how}{more}; else the defaults of mkfs and mount")
    }

    /// Without discarding, as Sheaf is made here.
    fn mkfs(self, devices: &[PathBuf], files: u64) -> Option<Command> {
        let mut mkfs = program::system(&self.program());
        match self {
            Kernel::Tmpfs => return None,
            Kernel::Ext4 | Kernel::Ext4Lazytime | Kernel::Ext4FastCommit => {
                // Inodes for all files.
                let inodes = files.to_string();
                mkfs.args(["-q", "-F", "-N", &inodes, "-E", EXT4_MADE])
            }
            Kernel::Xfs | Kernel::Btrfs => mkfs.args(["-q", "-f", "-K"]),
            Kernel::BtrfsRaid0 => mkfs.args(["-q", "-f", "-K", "-d", "raid0", "-m", "raid0"]),
            Kernel::F2fs => mkfs.args(["-q", "-f", "-t", "0"]),
        };
        if self == Kernel::Ext4FastCommit {
            mkfs.args(["-O", "fast_commit"]);
        }
        mkfs.args(devices);
        Some(mkfs)
    }
}

/// A mount that goes away with the value, and its storage with it. A loop device is let go by
/// the kernel when it is unmounted.
pub struct KernelMount {
    kernel: Kernel,
    mnt: PathBuf,
    mounted: bool,
    devices: Devices,
}

impl KernelMount {
    /// A fresh file system with room for `files` inodes.
    pub fn make(kernel: Kernel, place: &Place, files: u64) -> Result<KernelMount, Error> {
        let devices = match kernel {
            Kernel::BtrfsRaid0 if !place.devices().is_empty() => place.array()?,
            _ => place.single()?,
        };
        KernelMount::over(kernel, place, devices, files)
    }

    /// The same on these devices of the place.
    pub fn over(
        kernel: Kernel,
        place: &Place,
        devices: Devices,
        files: u64,
    ) -> Result<KernelMount, Error> {
        let mut side = KernelMount {
            kernel,
            mnt: place.mount_point()?,
            mounted: false,
            devices,
        };
        if let Some(mut mkfs) = kernel.mkfs(&side.devices.paths, files) {
            program::run(&mut mkfs)?;
            place.write_holes()?;
        }
        side.mount(place.bytes())?;
        Ok(side)
    }

    fn device(&self) -> Result<&Path, Error> {
        let device = self.devices.paths.first();
        device
            .map(PathBuf::as_path)
            .ok_or_else(|| Error::Usage("a device is needed".to_owned()))
    }

    fn mount(&mut self, bytes: u64) -> Result<(), Error> {
        let mut mount = program::system("mount");
        mount.args(["-t", self.kernel.file_system()]);
        if self.kernel == Kernel::Ext4Lazytime {
            mount.args(["-o", "lazytime"]);
        }
        match self.kernel {
            Kernel::Tmpfs => {
                mount.arg("-o").arg(format!("size={bytes}")).arg("tmpfs");
            }
            _ => {
                if self.devices.images {
                    mount.args(["-o", "loop"]);
                }
                // Those that the first does not tell of itself.
                for other in &self.devices.paths[1..] {
                    let device = format!("device={}", other.display());
                    mount.arg("-o").arg(device);
                }
                mount.arg(self.device()?);
            }
        }
        mount.arg(&self.mnt);
        program::run(&mut mount)?;
        self.mounted = true;
        Ok(())
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mnt
    }

    /// Brings everything home: nothing is left in a journal alone.
    pub fn make_read_only(&self) -> Result<(), Error> {
        let mut mount = program::system("mount");
        program::run(mount.args(["-o", "remount,ro"]).arg(&self.mnt))
    }

    /// Brings everything to the device and forgets what was read. A tmpfs has no device.
    pub fn remount(&mut self, place: &Place) -> Result<(), Error> {
        if self.kernel == Kernel::Tmpfs {
            return Ok(());
        }
        self.unmount()?;
        self.mount(place.bytes())
    }

    /// What was read of it, or of what is below, is read again.
    pub fn forget(&self, place: &Place) -> Result<(), Error> {
        place.forget(&self.devices)
    }

    fn unmount(&mut self) -> Result<(), Error> {
        unmount(&self.mnt, UnmountFlags::empty())?;
        self.mounted = false;
        Ok(())
    }

    /// Unmounts, which writes everything back.
    pub fn close(mut self) -> Result<(), Error> {
        self.unmount()
    }
}

impl Drop for KernelMount {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) = unmount(&self.mnt, UnmountFlags::DETACH)
        {
            tracing::warn!("{}: not unmounted: {error}", self.mnt.display());
        }
    }
}

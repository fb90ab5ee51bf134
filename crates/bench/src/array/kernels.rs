//! File systems of the kernel beside the devices that they are on: one large file, of which every block was written, past the cache.
//!
//! 1. The file has as many bytes as raw sides use of all devices, and as many transfers of it are in flight, by Linux AIO; one at
//!    a time they are plain calls, too.
//! 2. Those of one device take part where one device is measured, btrfs as RAID-0 where several are: no other stripes by itself.
//! 3. Nothing is asked for through their caches. Of a file that fits in one, reads at random places would soon be those of memory, and
//!    writes would wait for no device (`bench ior` reads each page once, and syncs).

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use device::AlignedBuf;
use rustix::fs::{FallocateFlags, fallocate};

use super::{FILE, LARGE, Options};
use crate::target::{Kernel, KernelMount, Place, Storage, Target};
use crate::{Error, interrupt};

/// XFS takes no less.
const XFS_BYTES: u64 = 320 << 20;
/// Of each device of btrfs, beside the chunks of its metadata.
const BTRFS_BYTES: u64 = 256 << 20;

/// It takes part where so many devices are measured.
pub(super) fn is_on(kernel: Kernel, members: usize) -> bool {
    (kernel == Kernel::BtrfsRaid0) == (members > 1)
}

/// Those that can be on the devices: files by themselves, and devices of this process, can hold none.
pub(super) fn taking_part(options: &Options) -> Vec<Kernel> {
    let blocks = matches!(options.storage, Storage::Loops(..) | Storage::Devices(_));
    let against = options.against.iter();
    let kernels = against.filter_map(|target| match target {
        Target::Kernel(kernel) => Some(*kernel),
        _ => None,
    });
    kernels
        .filter(|_| blocks && options.latency.is_none())
        .filter(|kernel| {
            options
                .devices
                .iter()
                .any(|&members| is_on(*kernel, members))
        })
        .collect()
}

/// Bytes of each device, so that these have room. What is overwritten in btrfs is free again only after its next commit.
pub(super) fn device_bytes(options: &Options, kernels: &[Kernel]) -> u64 {
    let least = kernels.iter().map(|kernel| match kernel {
        Kernel::Xfs => XFS_BYTES,
        Kernel::Btrfs | Kernel::BtrfsRaid0 => BTRFS_BYTES.max(2 * options.bytes),
        _ => options.bytes,
    });
    least.fold(options.bytes, u64::max)
}

/// A fresh file system on the first devices, and the file.
pub(super) struct LargeFile {
    pub path: PathBuf,
    mount: KernelMount,
}

impl LargeFile {
    pub fn make(
        kernel: Kernel,
        place: &Place,
        members: usize,
        bytes: u64,
    ) -> Result<LargeFile, Error> {
        let mount = KernelMount::over(kernel, place, place.first(members)?, 10_000)?;
        let path = mount.path().join(FILE);
        let io = |e| Error::io(&path, e);
        let mut options = File::options();
        options
            .write(true)
            .create_new(true)
            .custom_flags(libc::O_DIRECT);
        let file = options.open(&path).map_err(io)?;
        fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(|e| io(e.into()))?;
        let piece = AlignedBuf::from_slice(&[0xa5; LARGE]);
        for at in (0..bytes).step_by(LARGE) {
            interrupt::check()?;
            file.write_all_at(&piece, at).map_err(io)?;
        }
        file.sync_all().map_err(io)?;
        Ok(LargeFile { path, mount })
    }

    pub fn close(self) -> Result<(), Error> {
        self.mount.close()
    }
}

/// Who takes part, how, and who does not and why.
pub(super) fn notes(options: &Options, kernels: &[Kernel]) -> Vec<String> {
    if options.latency.is_some() {
        let why = "they cannot be put on devices that exist in this process only";
        return vec![crate::target::left_out(&options.against, why)];
    }
    if !matches!(options.storage, Storage::Loops(..) | Storage::Devices(_)) {
        let why =
            "they take block devices, and these are files (--loop has loop devices over them)";
        return vec![crate::target::left_out(&options.against, why)];
    }
    let mut notes = Vec::new();
    let is_out = |target: &&Target| !matches!(target, Target::Kernel(k) if kernels.contains(k));
    let out: Vec<Target> = options.against.iter().filter(is_out).cloned().collect();
    if !out.is_empty() {
        let why =
            "btrfs-raid0 takes part where several devices are measured, the others where one is";
        notes.push(crate::target::left_out(&out, why));
    }
    if kernels.is_empty() {
        return notes;
    }
    notes.push(
        "file systems of the kernel have one large file past the cache, by Linux AIO with as many transfers in flight as the others: \
         btrfs-raid0 on several devices, the others on one; what goes through their caches is left out: it would be memory that is \
         measured"
            .to_owned(),
    );
    if kernels.contains(&Kernel::BtrfsRaid0) || kernels.contains(&Kernel::Btrfs) {
        notes.push(
            "since Linux 6.14 btrfs has direct writes of data with checksums go through its cache, and waits for them"
                .to_owned(),
        );
    }
    let taking = kernels.iter().map(|kernel| kernel.note());
    notes.extend(taking);
    notes
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::super::run;
    use super::super::tests::{extra, options};
    use super::*;
    use crate::contract::Row;

    #[test]
    fn kernel_file_systems_are_beside_the_devices_and_are_no_floor() {
        let control = Path::new("/dev/loop-control");
        if !rustix::process::geteuid().is_root() || !control.exists() {
            return base::skip("loop devices");
        }
        let kernels = [Kernel::Ext4, Kernel::Xfs, Kernel::BtrfsRaid0];
        if kernels.iter().any(|kernel| kernel.check().is_err()) {
            return base::skip("kernel file systems");
        }
        let home = tempfile::tempdir().unwrap();
        let options = Options {
            runs: 1,
            against: kernels.map(Target::Kernel).into(),
            storage: Storage::Loops(Some(home.path().to_owned()), 2),
            ..options(home.path())
        };
        let report = run(&options, &|_| {}).unwrap();
        let targets = |name: &str, members: f64| -> Vec<&str> {
            let same = |row: &&Row| row.name == name && extra(row, "members") == members;
            let all = report.rows.iter().filter(same);
            let all = all.map(|row| row.target.as_str());
            all.filter(|target| !target.starts_with("raw") && !target.starts_with("sheaf"))
                .collect()
        };
        for deed in ["read", "write"] {
            let (deep, lone) = (format!("random {deed}"), format!("lone {deed}"));
            assert_eq!(targets(&deep, 1.0), ["ext4-aio", "xfs-aio"]);
            assert_eq!(targets(&deep, 2.0), ["btrfs-raid0-aio"]);
            assert_eq!(
                targets(&lone, 1.0),
                ["ext4-aio", "ext4-direct", "xfs-aio", "xfs-direct"]
            );
        }
        assert!(report.rows.iter().all(|row| row.median > 0.0));
        let of_all = report.rows.iter().find(|r| r.target == "btrfs-raid0-aio");
        assert_eq!(extra(of_all.unwrap(), "in_flight"), 8.0);
        let beside_raw = |check: &crate::contract::Check| check.name.contains(" raw-");
        assert!(report.checks.iter().all(beside_raw), "{:?}", report.checks);
        assert!(report.notes.iter().any(|note| note.contains("Linux AIO")));
        let shown = [crate::text::render(&report), crate::html::render(&report)];
        for target in ["ext4-aio", "xfs-direct", "btrfs-raid0-aio"] {
            assert!(shown.iter().all(|page| page.contains(target)), "{target}");
        }
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn devices_have_room_for_those_that_take_part() {
        let with = |devices: &[usize], latency: Option<Duration>, storage: Storage| Options {
            devices: devices.to_vec(),
            latency,
            against: [Kernel::Ext4, Kernel::Xfs, Kernel::BtrfsRaid0]
                .map(Target::Kernel)
                .into(),
            storage,
            ..options(Path::new("/nowhere"))
        };
        let loops = || Storage::Loops(None, 4);
        let of = |options: &Options| {
            let kernels = taking_part(options);
            (kernels.len(), device_bytes(options, &kernels) >> 20)
        };
        assert_eq!(of(&with(&[1, 4], None, loops())), (3, 320));
        assert_eq!(of(&with(&[2, 4], None, loops())), (1, 256));
        let slow = with(&[1, 4], Some(Duration::from_millis(1)), loops());
        let files = with(&[1, 4], None, Storage::Dir("/nowhere".into()));
        for (options, why) in [(slow, "in this process only"), (files, "--loop")] {
            assert_eq!(of(&options), (0, 64));
            let notes = super::notes(&options, &[]);
            assert!(notes[0].contains("(ext4, xfs, btrfs-raid0) are left out"));
            assert!(notes[0].contains(why), "{notes:?}");
        }
        let one = with(&[1], None, loops());
        let notes = super::notes(&one, &taking_part(&one));
        assert!(notes[0].contains("(btrfs-raid0) are left out"), "{notes:?}");
    }
}

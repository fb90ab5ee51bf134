//! What the whole machine does from one moment to another: time that passes, time in which
//! its CPUs run something, bytes written to devices, and flushes of them.
//!
//! Unlike the CPU time of a process this has what kernel threads do for a file system; it also
//! has whatever else runs, and so means something on a machine that does nothing else.

use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::clock::Clock;
use rustix::fs::{major, minor};

use crate::Error;
use crate::target::Writes;

/// The scheduler's own account, to the nanosecond; /proc/stat has hundredths of a second.
const SCHEDULER: &str = "/proc/schedstat";
/// The unit of a block device's account, whatever its own sectors are.
const SECTOR: u64 = 512;

/// Tells moments, and what happened since.
pub struct Meter {
    clock: Clock,
    /// The accounts of devices.
    devices: Vec<PathBuf>,
    /// Those that have the flushes of these devices: a partition's are its disk's, and those of a device made of others are theirs.
    flushed: Vec<PathBuf>,
    /// Of devices in this process, in the place of those.
    own: Option<Arc<Writes>>,
}

/// A moment.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    ns: u64,
    busy_ns: Option<u64>,
    written: Option<Account>,
}

/// What a block device has done so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Account {
    pub written_bytes: u64,
    pub flushes: u64,
}

/// From one moment to another.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub seconds: f64,
    /// Sum over all CPUs; `None` where the kernel does not tell.
    pub busy_seconds: Option<f64>,
    /// To the devices that are watched; `None` without any.
    pub written_bytes: Option<u64>,
    /// Of these devices, or of the disks below them, whoever asked for them there.
    pub flushes: Option<u64>,
}

impl Meter {
    /// Watches these block devices.
    pub fn new(devices: &[PathBuf]) -> Result<Meter, Error> {
        let mut meter = Meter {
            clock: Clock::real(),
            devices: Vec::new(),
            flushed: Vec::new(),
            own: None,
        };
        for path in devices {
            let device = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
            let (major, minor) = (major(device.st_rdev()), minor(device.st_rdev()));
            let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
            meter.devices.push(device.join("stat"));
            meter.flushed.extend(disks(&device));
        }
        meter.flushed.sort_unstable();
        meter.flushed.dedup();
        Ok(meter)
    }

    /// Watches devices in this process by their account.
    pub fn of(writes: Arc<Writes>) -> Meter {
        Meter {
            clock: Clock::real(),
            devices: Vec::new(),
            flushed: Vec::new(),
            own: Some(writes),
        }
    }

    pub fn mark(&self) -> Result<Mark, Error> {
        Ok(Mark {
            busy_ns: busy_ns(),
            written: self.written()?,
            ns: self.clock.monotonic_ns(),
        })
    }

    pub fn since(&self, start: Mark) -> Result<Span, Error> {
        let ns = self.clock.monotonic_ns();
        let since = |now: Option<u64>, then: Option<u64>| Some(now?.saturating_sub(then?));
        let busy = since(busy_ns(), start.busy_ns);
        let (now, then) = (self.written()?, start.written);
        let of = |get: fn(Account) -> u64| since(now.map(get), then.map(get));
        Ok(Span {
            seconds: (ns - start.ns) as f64 / 1e9,
            busy_seconds: busy.map(|ns| ns as f64 / 1e9),
            written_bytes: of(|account| account.written_bytes),
            flushes: of(|account| account.flushes),
        })
    }

    fn written(&self) -> Result<Option<Account>, Error> {
        if let Some(own) = &self.own {
            return Ok(Some(Account {
                written_bytes: own.bytes(),
                flushes: own.flushes(),
            }));
        }
        let mut sum = Account::default();
        for path in &self.devices {
            sum.written_bytes += account_of(path)?.written_bytes;
        }
        for path in &self.flushed {
            sum.flushes += account_of(path)?.flushes;
        }
        Ok((!self.devices.is_empty()).then_some(sum))
    }
}

/// The accounts of the disks that flushes of a device reach, from its folder in sysfs.
fn disks(device: &Path) -> Vec<PathBuf> {
    let real = device.canonicalize().unwrap_or_else(|_| device.to_owned());
    // A partition's folder is in its disk's.
    if let Some(disk) = real.parent().filter(|_| real.join("partition").exists()) {
        return disks(disk);
    }
    let below = std::fs::read_dir(real.join("slaves")).into_iter().flatten();
    let mut below: Vec<PathBuf> = below.flatten().map(|entry| entry.path()).collect();
    below.sort_unstable();
    match below.is_empty() {
        true => vec![real.join("stat")],
        false => below.iter().flat_map(|device| disks(device)).collect(),
    }
}

/// What a block device has done so far, by its account.
pub fn account_of(path: &Path) -> Result<Account, Error> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
    let number = |index| field(&text, index).ok_or_else(|| no_number(path));
    Ok(Account {
        written_bytes: number(6)? * SECTOR,
        flushes: number(15)?,
    })
}

fn no_number(path: &Path) -> Error {
    Error::Unable(format!("{}: a number is missing", path.display()))
}

/// The number at `index` in a line of them.
fn field(line: &str, index: usize) -> Option<u64> {
    line.split_whitespace().nth(index)?.parse().ok()
}

/// Time that all CPUs have run tasks. A kernel may have been built without this account.
fn busy_ns() -> Option<u64> {
    busy_in(&std::fs::read_to_string(SCHEDULER).ok()?)
}

fn busy_in(text: &str) -> Option<u64> {
    let cpus = text.lines().filter(|line| line.starts_with("cpu"));
    let times: Option<Vec<u64>> = cpus.map(|line| field(line, 7)).collect();
    times
        .filter(|times| !times.is_empty())
        .map(|times| times.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_all_cpus_is_summed() {
        let text = "version 16\ntimestamp 4294893569\ncpu0 0 0 0 0 0 0 300 5 1822\n\
                    domain0 3 1 2 3\ncpu1 0 0 0 0 0 0 20 7 9\n";
        assert_eq!(busy_in(text), Some(320));
        assert_eq!(busy_in("version 99\ncpu0 1 2\n"), None);
        assert_eq!(busy_in(""), None);
    }

    #[test]
    fn time_passes_and_nothing_is_said_of_no_devices() {
        let meter = Meter::new(&[]).unwrap();
        let start = meter.mark().unwrap();
        let span = meter.since(start).unwrap();
        assert!(span.seconds > 0.0 && span.seconds < 3600.0, "{span:?}");
        assert_eq!(span.written_bytes, None);
    }

    #[test]
    fn flushes_of_a_partition_and_of_a_stacked_device_are_their_disks() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().canonicalize().unwrap();
        let make = |path: &str| {
            let path = home.join(path);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let (disk, part) = (make("vda"), make("vda/vda1"));
        std::fs::write(part.join("partition"), "1").unwrap();
        let (other, slaves) = (make("vdb"), make("dm-0/slaves"));
        std::os::unix::fs::symlink(&part, slaves.join("vda1")).unwrap();
        std::os::unix::fs::symlink(&other, slaves.join("vdb")).unwrap();
        let stats =
            |of: &[&PathBuf]| -> Vec<PathBuf> { of.iter().map(|path| path.join("stat")).collect() };
        assert_eq!(disks(&disk), stats(&[&disk]));
        assert_eq!(disks(&part), stats(&[&disk]));
        assert_eq!(disks(&home.join("dm-0")), stats(&[&disk, &other]));
    }

    #[test]
    fn what_is_no_block_device_has_no_account() {
        let meter = Meter::new(&[PathBuf::from("/proc/self/stat")]).unwrap();
        assert!(matches!(meter.mark(), Err(Error::Io { .. })));
    }
}

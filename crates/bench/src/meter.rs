//! What the whole machine does from one moment to another: time that passes, time in which
//! its CPUs run something, bytes written to devices, and flushes of them.
//!
//! Unlike the CPU time of a process this has what kernel threads do for a file system; it also
//! has whatever else runs, and so means something on a machine that does nothing else.

use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};

use base::clock::Clock;
use rustix::fs::{major, minor};

use crate::Error;

/// The scheduler's own account, to the nanosecond; /proc/stat has hundredths of a second.
const SCHEDULER: &str = "/proc/schedstat";
/// The unit of a block device's account, whatever its own sectors are.
const SECTOR: u64 = 512;

/// Tells moments, and what happened since.
pub struct Meter {
    clock: Clock,
    /// The accounts of devices.
    devices: Vec<PathBuf>,
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
    /// Of these devices.
    pub flushes: Option<u64>,
}

impl Meter {
    /// Watches these block devices.
    pub fn new(devices: &[PathBuf]) -> Result<Meter, Error> {
        let account = |path: &PathBuf| {
            let device = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
            let (major, minor) = (major(device.st_rdev()), minor(device.st_rdev()));
            Ok(PathBuf::from(format!(
                "/sys/dev/block/{major}:{minor}/stat"
            )))
        };
        Ok(Meter {
            clock: Clock::real(),
            devices: devices.iter().map(account).collect::<Result<_, Error>>()?,
        })
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
        let mut sum = Account::default();
        for path in &self.devices {
            let one = account_of(path)?;
            sum.written_bytes += one.written_bytes;
            sum.flushes += one.flushes;
        }
        Ok((!self.devices.is_empty()).then_some(sum))
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
    fn what_is_no_block_device_has_no_account() {
        let meter = Meter::new(&[PathBuf::from("/proc/self/stat")]).unwrap();
        assert!(matches!(meter.mark(), Err(Error::Io { .. })));
    }
}

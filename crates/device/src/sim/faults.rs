//! The faults that can be asked for, and what has come of them.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;

/// How often a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Times {
    /// The next `n` operations concerned, then never again.
    Next(u64),
    Always,
}

/// How often faults strike by themselves: one in so many operations concerned, on average;
/// 0: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Odds {
    /// A read fails, and works when it is tried again.
    pub read_error: u64,
    /// A read fails, and so does every later one of its first sector until that is written.
    pub latent_error: u64,
    pub write_error: u64,
    pub flush_error: u64,
    /// After a write, bits rot in some sector that holds data.
    pub rot: u64,
    /// A write that is reported as good goes to another place that holds data.
    pub misdirected: u64,
    /// A write that is reported as good does not happen.
    pub lost: u64,
}

/// What went wrong with an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    ReadError,
    WriteError,
    FlushError,
    /// Bits flipped.
    Rot,
    /// A good write never came here: the old bytes are here still.
    Lost,
    /// A write meant for another place came here.
    Overwritten,
}

/// A fault that has struck.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Struck {
    /// The number of the operation, as [`super::SimDevice::io_count`] counted it.
    pub operation: u64,
    pub kind: FaultKind,
    /// Bytes on the device.
    pub range: Range<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct Fault {
    left: Times,
    /// Byte range on the device that an operation must touch.
    range: Range<u64>,
}

impl Fault {
    pub fn new(times: Times, range: Option<Range<u64>>) -> Option<Fault> {
        Some(Fault {
            left: times,
            range: range.unwrap_or(0..u64::MAX),
        })
    }
}

/// All that a device is asked to do wrong.
#[derive(Clone, Debug, Default)]
pub(super) struct Faults {
    pub reads: Option<Fault>,
    pub writes: Option<Fault>,
    pub flushes: Option<Fault>,
    pub misdirections: Option<Fault>,
    pub losses: Option<Fault>,
    pub odds: Odds,
    /// Sectors, by number, that cannot be read until they are written.
    pub bad: BTreeSet<u64>,
    /// Operations until the device is gone for good.
    pub gone_after: Option<u64>,
    /// No operation is answered.
    pub stuck: bool,
}

/// True when the fault concerns the range; one of its times is then used up.
pub(super) fn strikes(fault: &mut Option<Fault>, range: &Range<u64>) -> bool {
    let Some(f) = fault else {
        return false;
    };
    if f.range.start >= range.end || range.start >= f.range.end {
        return false;
    }
    match &mut f.left {
        Times::Always => true,
        Times::Next(0) => false,
        Times::Next(n) => {
            *n -= 1;
            true
        }
    }
}

const NO_POWER: &str = "the device has no power";

pub(super) fn no_power() -> io::Error {
    io::Error::other(NO_POWER)
}

pub(super) fn is_no_power(error: &io::Error) -> bool {
    (error.get_ref()).is_some_and(|inner| inner.to_string() == NO_POWER)
}

pub(super) fn medium_error() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

pub(super) fn no_device() -> io::Error {
    io::Error::from_raw_os_error(libc::ENODEV)
}

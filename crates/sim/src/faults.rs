//! The faults that machines' devices are given, by name.

use crate::world::Machine;
use base::clock::Clock;
use base::rng::Rng;
use base::sched;
use device::BlockDevice;
use device::sim::{SECTOR, SimDevice, Times};
use format::BLOCK_SIZE;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// A fault that a device is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Reads,
    Writes,
    /// Writes to the journal's ring only.
    Journal,
    /// Writes to anything but the ring.
    Data,
    Flushes,
    Vanish,
    /// What was asked for ends.
    Heal,
    /// Bits flip in the journal while the power is off.
    RotJournal,
    /// Writes are reported as good, and lost.
    Lose,
    LoseJournal,
    /// Writes are reported as good, and go to another place.
    Misdirect,
    /// Bits flip somewhere, now.
    Rot,
    /// Bits flip in a label or in copies of checkpoint records, or in all that an end of the device has of these.
    RotEnd,
    /// All operations take so many milliseconds (0: hardly any time).
    Slow,
    /// The next operation takes so many milliseconds.
    Stall,
}

const NAMES: [(Fault, &str); 15] = [
    (Fault::Reads, "fail-reads"),
    (Fault::Writes, "fail-writes"),
    (Fault::Journal, "fail-journal-writes"),
    (Fault::Data, "fail-data-writes"),
    (Fault::Flushes, "fail-flushes"),
    (Fault::Vanish, "vanish"),
    (Fault::Heal, "heal"),
    (Fault::RotJournal, "rot-journal"),
    (Fault::Lose, "lose-writes"),
    (Fault::LoseJournal, "lose-journal-writes"),
    (Fault::Misdirect, "misdirect-writes"),
    (Fault::Rot, "rot"),
    (Fault::RotEnd, "rot-end"),
    (Fault::Slow, "slow"),
    (Fault::Stall, "stall"),
];

/// Where the ring is on each of the small arrays' devices, and nothing else is, in bytes.
const RING: Range<u64> = 0..2 << 20;

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(known, _)| known == self);
        f.write_str(name.map_or("", |(_, name)| name))
    }
}

impl Fault {
    pub fn from_name(name: &str) -> Option<Fault> {
        let found = NAMES.iter().find(|(_, known)| *known == name);
        found.map(|(fault, _)| *fault)
    }

    /// Gives a device the fault, this often (0: always), or as the fault says. Devices take their
    /// time of `clock`, or of the world that the caller is a task of; then the caller waits until
    /// a stuck device answers again.
    pub fn inject(self, machine: &Machine, device: u64, times: u64, clock: Option<&Clock>) {
        let device = &machine.devices[device as usize % machine.devices.len()];
        let often = match times {
            0 => Times::Always,
            n => Times::Next(n),
        };
        let time = Duration::from_millis(times);
        match self {
            Fault::Reads => device.fail_reads(often, None),
            Fault::Writes => device.fail_writes(often, None),
            Fault::Journal => device.fail_writes(often, Some(RING)),
            Fault::Data => device.fail_writes(often, Some(RING.end..u64::MAX)),
            Fault::Flushes => device.fail_flushes(often),
            Fault::Vanish => device.vanish_after(times * 5),
            Fault::Lose => device.lose_writes(often, None),
            Fault::LoseJournal => device.lose_writes(often, Some(RING)),
            Fault::Misdirect => device.misdirect_writes(often, None),
            Fault::Rot => drop(device.rot(&mut Rng::new(times))),
            Fault::RotEnd => {
                let mut rng = Rng::new(times);
                rot_end(device, rng.one_in(2), &mut rng);
            }
            Fault::Slow => device.slow_down(time, clock.cloned()),
            Fault::Stall => match clock {
                Some(clock) => device.stall(time, clock),
                None => {
                    device.stick();
                    sched::spend(time);
                    device.release();
                }
            },
            Fault::Heal | Fault::RotJournal => device.heal(),
        }
    }
}

/// A label is in the first block and in the last, and beside it copies of both checkpoint records may be.
pub fn rot_end(device: &SimDevice, is_last: bool, rng: &mut Rng) {
    let last = device.bytes() / BLOCK_SIZE as u64 - 1;
    let alone = rng.below(6);
    for nth in (0..3).filter(|nth| alone >= 3 || *nth == alone) {
        let block = if is_last { last - nth } else { nth };
        device.corrupt(block * BLOCK_SIZE as u64, SECTOR as u64, rng);
    }
}

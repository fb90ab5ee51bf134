//! Which mount each device's label is of, by which a device is known that was put back to what it was before, as from an old copy.
//!
//! Invariants:
//! 1. Before the first checkpoint record of a mount every label says that mount, durably; they are written one after the other, in the order of the devices.
//!    A repair that takes old devices as they are writes their labels after its record, so that nobody else takes them before.
//! 2. So whenever that is cut off, no label is of an older mount than the newest record, none is of a newer one than the mount after that, and none of a newer one
//!    than the label of a device before it. Where that does not hold, a device is not what it was when the array was used last.
//! 3. No label gets a smaller number than it has, and none a number before all that are written have the newest of theirs: so no number is given out twice, and
//!    labels that are written when it is cut off are of two mounts at most.
//! 4. A label is of no mount until the first one that writes it: nothing is known of an array of which all are so.
//!
//! It tells no copy that was made during the last mount, or after it, and none of all devices.

use crate::array::Array;
use crate::error::Error;
use format::COUNTER_RECORD_MAX;
use std::collections::BTreeSet;

/// A device whose content is older than the array's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outdated {
    pub device: usize,
    /// The mount that its label is of, or, if it has a checkpoint record that is too old, that this is of.
    pub mount: u64,
    /// The newest one that is known of.
    pub newest: u64,
}

/// The mounts of labels, by device; `None` while there are no labels.
pub(crate) type Ages = Option<Vec<u64>>;

/// Looks for what contradicts invariant 2.
fn outdated(ages: &[u64], record: u64) -> Option<Outdated> {
    let newest = ages.iter().copied().max().unwrap_or(0);
    if newest == 0 {
        return None;
    }
    let found = |device, mount| {
        let newest = newest.max(record);
        Some(Outdated {
            device,
            mount,
            newest,
        })
    };
    // The records are on the first two devices: neither has one that the others' labels ask for.
    if newest > record.saturating_add(1) {
        return found(0, record.min(ages[0]));
    }
    let mut before = ages[0];
    for (device, age) in ages.iter().copied().enumerate() {
        // The first mount was cut off.
        let had_none = age == 0 && ages[0] > record;
        if age > before {
            return found(device - 1, before);
        }
        if age < record && !had_none {
            return found(device, age);
        }
        before = age;
    }
    None
}

/// One after the other, each as if those before it were not.
fn all_outdated(mut ages: Vec<u64>, mut record: u64) -> Vec<Outdated> {
    let mut all = Vec::new();
    while let Some(found) = outdated(&ages, record) {
        if found.newest > record.saturating_add(1) {
            record = found.newest;
        }
        ages[found.device] = found.newest;
        all.push(found);
    }
    all
}

impl Array {
    /// Devices that are older than the array, as far as the labels, as they were when it was put together, and the newest
    /// checkpoint record's mount say so.
    pub fn outdated(&self, record: u64) -> Vec<Outdated> {
        let ages = self.ages.lock().clone();
        all_outdated(ages.unwrap_or_default(), record)
    }

    /// The newest mount that a label is of; 0: none.
    pub fn newest_label(&self) -> u64 {
        let ages = self.ages.lock();
        ages.iter().flatten().copied().max().unwrap_or(0)
    }

    /// Has all labels say this mount (invariant 1), if there are labels.
    ///
    /// # Errors
    /// Those of the devices. Nothing is written of a mount whose labels nobody would take.
    pub fn note_mount(&self, mount: u64) -> Result<(), Error> {
        self.note_mount_on_others(mount, &BTreeSet::new())
    }

    /// The same of all labels but those of some devices.
    ///
    /// # Errors
    /// Those of the devices.
    pub fn note_mount_on_others(&self, mount: u64, but: &BTreeSet<usize>) -> Result<(), Error> {
        let Some(ages) = self.ages.lock().clone() else {
            return Ok(());
        };
        if mount > COUNTER_RECORD_MAX {
            return Err(Error::LastMount { mount });
        }
        let others = (0..ages.len()).filter(|device| !but.contains(device));
        let others: Vec<usize> = others.collect();
        // Of these the second copy spoke, which is the newer one where labels were being written; the first may be read again one day.
        let first_is_lost = |device: &usize| {
            let mut repairs = self.repairs.iter();
            repairs.any(|repair| (repair.device, repair.copy) == (*device, 0))
        };
        let mut unsure: BTreeSet<usize> = others.iter().copied().filter(first_is_lost).collect();
        let newest = others.iter().map(|device| ages[*device]).max().unwrap_or(0);
        // Invariant 3.
        for mount in [newest.min(mount), mount] {
            for device in &others {
                if self.age(*device) < mount || unsure.contains(device) {
                    self.write_label(*device, mount)?;
                    unsure.remove(device);
                    if let Some(ages) = &mut *self.ages.lock() {
                        ages[*device] = mount;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn which(ages: &[u64], record: u64) -> Option<usize> {
        outdated(ages, record).map(|outdated| outdated.device)
    }

    #[test]
    fn all_devices_that_are_older_are_found() {
        let all = |ages: &[u64], record| -> Vec<usize> {
            let all = all_outdated(ages.to_vec(), record);
            all.iter().map(|outdated| outdated.device).collect()
        };
        assert_eq!(all(&[8, 3, 8, 0], 8), [1, 3]);
        assert_eq!(all(&[2, 2, 8, 2], 2), [0, 1, 3]);
        assert_eq!(all(&[8, 7, 6, 8], 8), [1, 2]);
        assert!(all(&[9, 9, 8, 8], 8).is_empty() && all(&[0; 3], 5).is_empty());
    }

    /// The number after the record's was 0, above which the newest label always was: it took all memory.
    #[test]
    fn the_search_ends_whatever_the_numbers_are() {
        let numbers = [0, 1, u64::MAX - 1, u64::MAX];
        for first in numbers {
            for (second, record) in numbers
                .iter()
                .flat_map(|n| numbers.map(|record| (*n, record)))
            {
                let all = all_outdated(vec![first, second], record);
                assert!(all.len() <= 2, "{first} {second} {record}: {all:?}");
            }
        }
        assert_eq!(all_outdated(vec![u64::MAX; 2], 1).len(), 1);
    }

    #[test]
    fn what_a_mount_that_is_cut_off_leaves_is_in_order() {
        for devices in 1..5 {
            for old in [0, 7] {
                // A mount begins by labels, and then has its record; the next one likewise.
                for written in 0..=devices {
                    let mut ages = vec![old; devices];
                    ages[..written].fill(8);
                    assert_eq!(which(&ages, 7), None, "{ages:?}");
                    // It begins anew, with the same number.
                    ages[..written.saturating_sub(1)].fill(8);
                    assert_eq!(which(&ages, 7), None, "{ages:?}");
                }
                assert_eq!(which(&vec![8; devices], 8), None);
            }
        }
        assert_eq!(which(&[0, 0], 12), None, "nothing is known");
    }

    #[test]
    fn a_device_that_is_older_than_the_others_is_found() {
        for old in [0, 1, 6] {
            assert_eq!(which(&[8, 8, old], 8), Some(2));
            assert_eq!(which(&[8, old, 8], 8), Some(1));
            assert_eq!(
                which(&[old, 8, 8], 8),
                Some(0),
                "the second one has the record"
            );
            // Both that have records are.
            assert_eq!(which(&[old, old, 8], old), Some(0));
        }
        // By one mount.
        assert_eq!(which(&[7, 7, 8], 7), Some(1));
        assert_eq!(which(&[7, 8, 8], 8), Some(0));
        assert_eq!(which(&[8, 8, 7], 8), Some(2));
    }
}

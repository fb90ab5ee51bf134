//! What a check saw of metadata on each device, and whether that proves that a device without a label is a member of the array.
//!
//! An item has a checksum over what it is (node and version, or page) and what it holds, and the table, whose pages lie on other devices as
//! well, says which item lies where. So a device whose items are all right is the member: no blank disk, no other member, no disk of another
//! array has them there, and no older state of the member has all of them. What that leaves is an array that was made
//! in exactly the same steps; its inodes were changed at other times.
//!
//! Records of checkpoints and the journal carry the UUID, and prove more ([`engine::proves`]). Nothing vouches for file data, so a device
//! that holds nothing else proves nothing.

use super::{Finding, Report};
use crate::Error;
use crate::content::FsNode;
use base::sync::{Mutex, rank};
use device::Array;
use engine::{Seen, Severity};
use format::checkpoint::CheckpointRecord;
use format::item::Place;
use format::{BLOCK_SIZE, MAX_DEVICES};

/// Items of metadata that the last checkpoint has on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceItems {
    /// Those that lie nowhere else, and are right.
    pub right: u64,
    /// Those that lie there, or a part of them does, and are not what they should be, or cannot be read.
    pub wrong: u64,
    /// The earliest and the latest time at which the inodes among the right ones were made or changed, in seconds.
    pub times: Option<(i64, i64)>,
}

/// Counts items by device.
pub(super) struct Tally(Mutex<Vec<DeviceItems>>);

impl Tally {
    pub fn new(array: &Array) -> Tally {
        let devices = array.geometry().device_blocks.len();
        Tally(Mutex::new(
            rank::LEAF,
            vec![DeviceItems::default(); devices],
        ))
    }

    pub fn add(&self, array: &Array, place: Place, seen: Seen<'_, FsNode>) {
        let geometry = array.geometry();
        let limit = geometry.total_blocks() * BLOCK_SIZE as u64;
        let end = place.byte.checked_add(place.len.into());
        if end.is_none_or(|end| end > limit) {
            return;
        }
        let mut lies_on = [false; MAX_DEVICES];
        geometry.pieces(place.byte, place.len as usize, |piece| {
            lies_on[piece.device] = true;
        });
        let several = lies_on.iter().filter(|on| **on).count() > 1;
        let mut devices = self.0.lock();
        for (device, _) in devices.iter_mut().zip(lies_on).filter(|(_, on)| *on) {
            match seen {
                Seen::Wrong => device.wrong += 1,
                _ if several => {}
                Seen::Page => device.right += 1,
                Seen::Image(node) => {
                    device.right += 1;
                    device.look(node);
                }
            }
        }
    }

    pub fn take(&self) -> Vec<DeviceItems> {
        std::mem::take(&mut *self.0.lock())
    }
}

impl DeviceItems {
    fn look(&mut self, node: &FsNode) {
        let FsNode::Inode(inode) = node else { return };
        // Nobody can set these.
        for time in [inode.btime.sec(), inode.ctime.sec()] {
            let (first, last) = self.times.unwrap_or((time, time));
            self.times = Some((first.min(time), last.max(time)));
        }
    }
}

/// Whether the check of an array, put together without a label of this device, proves that it is the array's; else why not. Returns
/// what proves it. `known`: what is left of its label does already, if its metadata does not say otherwise.
///
/// # Errors
/// The outer one is a device that does not return what it holds.
pub fn is_member(
    array: &Array,
    report: &Report,
    device: usize,
    known: bool,
) -> Result<Result<String, String>, Error> {
    let right = match what_items_say(report, device) {
        Ok(right) => right,
        Err(doubt) => return Ok(Err(doubt)),
    };
    let chained = known || engine::proves(array, device)?;
    let doubt = match right {
        0 if known => return Ok(Ok("most of it is there still".to_owned())),
        0 if chained => {
            return Ok(Ok(
                "its part of the journal or of the checkpoints is there".to_owned()
            ));
        }
        0 => {
            "no metadata of the file system lies on it, and file data has no checksums: a blank disk would look the same"
        }
        _ if !chained && is_of_other_times(array, report, device) => {
            "its inodes are of another time than this file system, so it is of one that was made in the same way"
        }
        _ => {
            return Ok(Ok(format!(
                "all {right} nodes and tables that lie on it are right"
            )));
        }
    };
    Ok(Err(doubt.to_owned()))
}

/// How many items on a device are right; an error if any is not.
fn what_items_say(report: &Report, device: usize) -> Result<u64, String> {
    let fatal = |f: &&Finding| f.severity == Severity::Fatal;
    if let Some(fatal) = report.findings.iter().find(fatal) {
        return Err(format!("with it the file system does not open: {fatal}"));
    }
    let items = report.devices.get(device).cloned().unwrap_or_default();
    let DeviceItems { right, wrong, .. } = items;
    if wrong > 0 {
        let of = right + wrong;
        return Err(format!(
            "{wrong} of {of} nodes and tables that should lie on it are not there: it is another disk, an old copy, or was written over"
        ));
    }
    Ok(right)
}

/// Whether times on a device lie outside of those from the making of the array to its last checkpoint, and of those on other
/// devices: a clock that was wrong was so for all of them.
fn is_of_other_times(array: &Array, report: &Report, device: usize) -> bool {
    let Some(times) = report.devices.get(device).and_then(|items| items.times) else {
        return false;
    };
    let others = report.devices.iter().enumerate();
    let others = others.filter(|(other, _)| *other != device);
    let made = array.label().created.get();
    let (mut first, mut last) = (made, made);
    for (_, items) in others {
        if let Some((oldest, newest)) = items.times {
            (first, last) = (first.min(oldest), last.max(newest));
        }
    }
    let places = [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter();
    let records = places.filter_map(|(slot, copy)| {
        let block = array.read_slot(slot, copy).ok()?;
        CheckpointRecord::parse(&block, &array.uuid()).ok()
    });
    let written = records.map(|record| record.time.get()).max();
    last = last.max(written.map_or(i64::MAX, |time| i64::try_from(time).unwrap_or(i64::MAX)));
    times.0 < first || times.1 > last
}

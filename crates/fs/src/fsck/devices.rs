//! What a check saw of metadata on each device, and whether that proves that a device without a label is a member of the array.
//!
//! An item has a checksum over what it is (node and version, or page) and what it holds, and the table, whose pages lie on other devices as
//! well, says which item lies where. So no blank disk and no other member has them all there, nor an older state of the member that lacks any
//! of them. But an array that was made in the same steps within the same second has, for items do not say of which file system they are.
//!
//! So they are asked for, and are not enough: records of checkpoints and the journal carry the UUID, and the device must have some of
//! that ([`engine::proves`]). That cannot tell an old copy which differs only in file data, for which nothing vouches, or only in
//! what it is not asked for: in nothing, if all that was written since lies on other devices.

use super::{Finding, Report};
use crate::Error;
use crate::content::FsNode;
use base::sync::{Mutex, rank};
use device::Array;
use engine::{Proof, Seen, Severity};
use format::item::Place;
use format::{BLOCK_SIZE, MAX_DEVICES};

/// Items of metadata that the last checkpoint has on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceItems {
    /// Those that lie nowhere else, and are right.
    pub right: u64,
    /// Those that lie there, or a part of them does, and are not what they should be, or cannot be read.
    pub wrong: u64,
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
                Seen::Page | Seen::Image(_) => device.right += 1,
            }
        }
    }

    pub fn take(&self) -> Vec<DeviceItems> {
        std::mem::take(&mut *self.0.lock())
    }
}

/// Whether the check of an array, put together without a label of this device, proves that it is the array's; else why not. Returns
/// what proves it. `known`: what is left of its label does already, if nothing else says otherwise. `alone`: no other label is lost.
///
/// # Errors
/// The outer one is a device that does not return what it holds.
pub fn is_member(
    array: &Array,
    report: &Report,
    device: usize,
    known: bool,
    alone: bool,
) -> Result<Result<String, String>, Error> {
    let proof = match engine::proves(array, device)? {
        Proof::Against(objection) => return Ok(Err(objection)),
        proof => proof,
    };
    let right = match what_items_say(report, device) {
        Ok(right) => right,
        Err(doubt) => return Ok(Err(doubt)),
    };
    if !known && matches!(proof, Proof::Nothing) {
        let doubt = match right {
            0 => {
                "no metadata of the file system lies on it, and file data has no checksums: a blank disk would look the same"
            }
            _ => {
                "nothing on it carries this file system's UUID, so it may be of another one that was made in the same way"
            }
        };
        return Ok(Err(doubt.to_owned()));
    }
    // Damage elsewhere is no reason to leave the array without its device, but several can be old copies that vouch for each other.
    let chained = matches!(proof, Proof::Chain) && alone;
    let error = report
        .findings
        .iter()
        .find(|f| f.severity > Severity::Notice);
    if let (false, false, Some(error)) = (known, chained, error) {
        return Ok(Err(format!("with it the array is not sound: {error}")));
    }
    Ok(Ok(match right {
        0 if known => "most of it is there still".to_owned(),
        0 => "its part of the journal or of the checkpoints is there".to_owned(),
        _ => format!("all {right} nodes and tables that lie on it are right"),
    }))
}

/// How many items on a device are right; an error if any is not.
fn what_items_say(report: &Report, device: usize) -> Result<u64, String> {
    let fatal = |f: &&Finding| f.severity == Severity::Fatal;
    if let Some(fatal) = report.findings.iter().find(fatal) {
        return Err(format!("with it the file system does not open: {fatal}"));
    }
    let items = report.devices.get(device).cloned().unwrap_or_default();
    let DeviceItems { right, wrong } = items;
    if wrong > 0 {
        let of = right + wrong;
        return Err(format!(
            "{wrong} of {of} nodes and tables that should lie on it are not there: it is another disk, an old copy, or was written over"
        ));
    }
    Ok(right)
}

//! A label that is gone, both copies, written again by `sheaf fsck --relabel`, where what lies on the device proves whose it was.
//!
//! It has an option of its own, since an old copy of the device may carry the same proof: only who asks for it knows that it is none.
//!
//! 1. Nothing is written before a full check, read-only, has found all metadata of that device where it should be
//!    ([`fs::fsck::is_member`]), and in only one way of giving the devices places.
//! 2. Interrupted, it leaves labels as they were before, or good, or with one good copy; the repeat goes on from there.

use std::path::PathBuf;
use std::sync::Arc;

use device::{Array, ArrayId, BlockDevice, Incomplete, Places};
use fs::fsck::is_member;

use crate::failure::Failure;
use crate::fsck::examine;

/// A label that was written, or would be.
pub struct Relabelled {
    pub index: usize,
    pub device: String,
    /// What proves that it is this device.
    pub proof: String,
}

/// Whether all devices are named one by one: only then the user has said that these make the array.
pub fn are_named(given: &[PathBuf]) -> bool {
    let names_one = |spec: &PathBuf| spec.to_str().and_then(ArrayId::parse).is_none();
    given.iter().all(names_one)
}

/// The array, with its lost labels written again; `dry_run`: as it would be then, to be read only.
pub fn restore(
    devices: &[Arc<dyn BlockDevice>],
    dry_run: bool,
) -> Result<(Arc<Array>, Vec<Relabelled>), Failure> {
    let incomplete = Incomplete::of(devices)?;
    let lost = incomplete.lost();
    for (which, name) in lost.iter().enumerate() {
        if let Some(objection) = incomplete.objection(which) {
            return Err(refused(name, &objection));
        }
    }
    let (places, relabelled) = proven(&incomplete)?;
    if dry_run {
        return Ok((Arc::new(incomplete.array(&places, true)?), relabelled));
    }
    let array = Arc::new(incomplete.array(&places, false)?);
    {
        let _writer = array.writer()?;
        let indices: Vec<usize> = places.iter().map(|(index, _)| *index).collect();
        array.write_lost_labels(&indices)?;
    }
    drop(array);
    Ok((
        Arc::new(Array::assemble(devices.to_vec(), false)?),
        relabelled,
    ))
}

/// The one way to give the devices places that what lies on them proves.
fn proven(incomplete: &Incomplete) -> Result<(Places, Vec<Relabelled>), Failure> {
    let lost = incomplete.lost();
    let names = lost.join(", ");
    let mut ways = Vec::new();
    let mut first_doubt = None;
    for places in incomplete.ways() {
        match look(incomplete, &places)? {
            Ok(relabelled) => ways.push((places, relabelled)),
            Err(doubt) => drop(first_doubt.get_or_insert(doubt)),
        }
    }
    match (ways.pop(), ways.is_empty(), first_doubt, lost.len()) {
        (Some(way), true, ..) => Ok(way),
        (Some(_), false, ..) => Err(refused(&names, "they fit into each other's places")),
        (None, _, Some((name, doubt)), 1) => Err(refused(&name, &doubt)),
        (None, _, Some(_), _) => Err(refused(
            &names,
            "in no order what lies on each of them proves that it is there; repair with those whose labels can be had first",
        )),
        (None, _, None, _) => Err(refused(
            &names,
            "they are smaller than the missing devices, what is left of their labels says otherwise, or they are too many",
        )),
    }
}

/// A device's name, and what speaks against it.
type Doubt = (String, String);

/// The full check of the array with its devices in such places; read-only.
fn look(
    incomplete: &Incomplete,
    places: &Places,
) -> Result<Result<Vec<Relabelled>, Doubt>, Failure> {
    let array = Arc::new(incomplete.array(places, true)?);
    let report = examine(&array)?;
    let names = array.device_names();
    let mut relabelled = Vec::new();
    let alone = places.len() == 1;
    for (index, which) in places {
        let known = incomplete.remembers(*which, *index);
        let device = names[*index].clone();
        match is_member(&array, &report, *index, known, alone)? {
            Ok(proof) => relabelled.push(Relabelled {
                index: *index,
                device,
                proof,
            }),
            Err(doubt) => return Ok(Err((device, doubt))),
        }
    }
    Ok(Ok(relabelled))
}

fn refused(device: &str, why: &str) -> Failure {
    Failure::damaged(format!(
        "NOT REPAIRED, and nothing was written: the label of {device} is gone, and nothing proves that it is the missing device: {why}"
    ))
}

//! Waiting for devices that are not there yet: at system start they appear one after the other, and the link by
//! which fstab or a service names the array is made with the first of them.
//!
//! Only looks, as `sheaf info` does, and holds no device. Whether the array can be opened, opening it says.

use std::path::PathBuf;
use std::time::Duration;

use base::clock::{Clock, ns_of};

use crate::devices::{self, Access, pause};
use crate::failure::{Failure, USAGE};
use crate::output::{shown, tell};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(200);

/// Returns once all devices of what `given` names are there, or after `timeout`.
pub fn wait(given: &[PathBuf], timeout: Duration) {
    if timeout.is_zero() || is_there(given) {
        return;
    }
    let names: Vec<_> = given.iter().map(|path| shown(path)).collect();
    tell(format!(
        "sheaf: waiting up to {} s for the devices of {}",
        timeout.as_secs_f64(),
        names.join(" ")
    ));
    let clock = Clock::real();
    let end = clock.monotonic_ns().saturating_add(ns_of(timeout));
    while !is_there(given) {
        let left = Duration::from_nanos(end.saturating_sub(clock.monotonic_ns()));
        if left.is_zero() {
            return;
        }
        pause(PAUSE.min(left));
    }
}

/// What is said of a device that is not there; nothing if all are, whatever else may be wrong with them.
pub fn absent(given: &[PathBuf]) -> Option<Failure> {
    let looked = devices::find(given).and_then(|paths| devices::look(&paths, Access::default()));
    looked.err().filter(Failure::is_of_absent_device)
}

/// Whether nothing can be missing that could still appear.
fn is_there(given: &[PathBuf]) -> bool {
    match devices::find(given) {
        Ok(paths) => paths.iter().all(|path| path.exists()) && are_whole(&paths),
        // A wrong call is not set right by a device.
        Err(failure) => failure.code() == USAGE,
    }
}

/// Whether each array that devices among `paths` belong to has all of its devices among them.
fn are_whole(paths: &[PathBuf]) -> bool {
    let members = device::scan(None, paths);
    let is_whole = |of: &device::Member| {
        (0..of.count).all(|index| {
            let mut others = members.iter();
            others.any(|member| member.uuid == of.uuid && member.index == index)
        })
    };
    members.iter().all(is_whole)
}

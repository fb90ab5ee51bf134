//! Devices that were put back to what they held before the last mount.

use crate::images::*;
use crate::repair::{repair_options, try_repair};
use base::rng::Rng;
use device::BlockDevice;
use device::sim::{PowerSwitch, SimDevice, Snapshot, Times};
use engine::Object;
use fs::fsck::repair::{Action, ActionKind, Outcome, RepairOptions, repair};
use fs::{Caller, FileSystem, ROOT};
use std::sync::Arc;

const COUNT: usize = 4;
const DEVICE: u64 = 24 << 20;

fn contents(devices: &[Arc<SimDevice>]) -> Vec<Snapshot> {
    devices.iter().map(|device| device.snapshot()).collect()
}

fn add(fs: &FileSystem, round: usize) {
    for i in 0..40 {
        let name = format!("{round} {i}");
        let made = fs.create(&Caller::root(), ROOT, name.as_bytes(), 0o644, libc::O_RDWR);
        let file = made.unwrap().1;
        fs.write(&file, 0, &vec![i as u8; 1000 * i]).unwrap();
        fs.fsync(&file, false).unwrap();
    }
}

/// Contents after mkfs, and after each of so many mounts that made files, which were cut off or not.
fn mounts(cut: bool, count: usize) -> (Vec<Arc<SimDevice>>, Vec<Vec<Snapshot>>) {
    let devices = make(&[DEVICE; COUNT]);
    let mut states = vec![contents(&devices)];
    for round in 0..count {
        let fs = open(&devices, false).unwrap();
        add(&fs, round);
        if !cut {
            fs.close().unwrap();
        }
        drop(fs);
        states.push(contents(&devices));
    }
    (devices, states)
}

fn put_back(devices: &[Arc<SimDevice>], states: [&[Snapshot]; 2], old: &[usize]) {
    for (i, device) in devices.iter().enumerate() {
        device.restore(&states[usize::from(old.contains(&i))][i]);
    }
}

#[test]
fn a_device_that_was_put_back_is_told_and_taken_by_a_repair_alone() {
    for cut in [false, true] {
        let (devices, states) = mounts(cut, 3);
        let now = &states[3][..];
        for (before, then) in states.iter().enumerate().take(3) {
            for old in [&[0][..], &[1], &[2], &[3], &[0, 1], &[2, 3], &[1, 2, 3]] {
                let context = format!("{old:?} as after {before} mounts, cut: {cut}");
                put_back(&devices, [now, then], old);
                for read_only in [true, false] {
                    let refused = open(&devices, read_only).unwrap_err().to_string();
                    let named = old.iter().any(|i| refused.contains(devices[*i].name()));
                    assert!(
                        named && refused.contains("old copy"),
                        "{context}: {refused}"
                    );
                }
                let report = fsck(&devices);
                assert!(!report.is_sound(), "{context}");
                // Nothing was written by all that.
                let report = try_repair(&devices, true).unwrap();
                assert!(
                    report.outcome != Outcome::Sound && report.lost(),
                    "{context}"
                );
                let automatic = RepairOptions {
                    lossless: true,
                    ..repair_options(false)
                };
                let array = assemble(&devices, false).unwrap();
                let report = repair(&array, &automatic, &|_| {}).unwrap();
                let is_refused = matches!(report.outcome, Outcome::Refused { .. });
                assert!(is_refused && open(&devices, true).is_err(), "{context}");
                drop(array);
                let report = try_repair(&devices, false).unwrap();
                let taken = |a: &&Action| a.kind == ActionKind::Outdated;
                let mut all: Vec<usize> = Vec::new();
                for action in report.actions.iter().filter(taken) {
                    let Object::Label { device, .. } = action.object else {
                        panic!("{context}: {action}");
                    };
                    all.push(device);
                }
                all.sort_unstable();
                assert_eq!(all, old, "{context}");
                assert!(fsck(&devices).is_sound(), "{context}");
                open(&devices, false).unwrap().close().unwrap();
            }
        }
    }
}

/// A repair that takes old devices as they are is cut off. Until it is done a mount is refused as before: their labels had been made those of the others first of
/// all, and whoever mounted then was told nothing.
#[test]
fn old_devices_are_told_until_a_repair_has_taken_them() {
    let mut rng = Rng::new(7);
    let (devices, states) = mounts(true, 3);
    for old in [&[0][..], &[2], &[0, 1], &[1, 3]] {
        put_back(&devices, [&states[3], &states[1]], old);
        let forked = |switch: &Arc<PowerSwitch>| -> Vec<_> {
            devices.iter().map(|device| device.fork(switch)).collect()
        };
        let switch = PowerSwitch::new();
        let whole = forked(&switch);
        assert!(try_repair(&whole, true).unwrap().lost());
        let read = switch.operations();
        try_repair(&whole, false).unwrap();
        let ends = switch.operations() - read;
        let (mut refused, mut done) = (0, 0);
        for at in read.saturating_sub(4).min(ends)..=ends {
            let context = format!("{old:?}, cut at {at} of {ends}");
            let switch = PowerSwitch::new();
            let cut = forked(&switch);
            switch.cut_after(at);
            drop(try_repair(&cut, false));
            switch.cut_now();
            let cut: Vec<_> = cut.iter().map(|device| device.restart(&mut rng)).collect();
            switch.restore();
            match open(&cut, true) {
                Ok(_) => {
                    assert!(fsck(&cut).is_sound(), "{context}");
                    done += 1;
                }
                Err(error) => {
                    assert!(error.to_string().contains("old copy"), "{context}: {error}");
                    let report = try_repair(&cut, false).unwrap();
                    assert_eq!(report.outcome, Outcome::Repaired, "{context}");
                    open(&cut, false).unwrap().close().unwrap();
                    refused += 1;
                }
            }
        }
        assert!(refused > 0 && done > 0, "{old:?}: {refused}, {done}");
    }
}

/// Its mount had a number that there had been before, and labels fell to that: once mounts had reached it again, the latest state of the first device was taken
/// for one of theirs, and the array was a mix of two histories.
#[test]
fn a_repair_that_takes_old_devices_gives_no_number_out_again() {
    let label = |device: &SimDevice| {
        let mut block = vec![0; BLOCK as usize];
        device.peek(0, &mut block);
        format::label::Label::parse(&block).unwrap().mount_id.get()
    };
    let (devices, states) = mounts(false, 3);
    for _ in 0..3 {
        // No batch tells of it.
        open(&devices, false).unwrap().close().unwrap();
    }
    let latest = contents(&devices);
    put_back(&devices, [&latest, &states[3]], &[0, 1]);
    let mut newest = label(&devices[2]);
    let report = try_repair(&devices, false).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired);
    for round in 0..6 {
        for device in &devices {
            assert!(
                label(device) > newest,
                "{round}: {} is told again",
                device.name()
            );
        }
        newest = label(&devices[0]);
        let now = contents(&devices);
        for old in [&[0][..], &[1], &[0, 1]] {
            put_back(&devices, [&now, &latest], old);
            let refused = open(&devices, true).unwrap_err().to_string();
            assert!(refused.contains("old copy"), "{round}: {old:?}: {refused}");
        }
        put_back(&devices, [&now, &now], &[]);
        open(&devices, false).unwrap().close().unwrap();
    }
}

/// It said that nothing was written, and to attach the latest states, which by then fitted no more.
#[test]
fn a_repair_that_fails_once_it_takes_old_devices_says_that_writing_had_begun() {
    let (devices, states) = mounts(false, 3);
    // Labels of others are written before.
    for (old, failing) in [(0, 3), (0, 2), (2, 1), (3, 2)] {
        let context = format!("{old} is old, {failing} fails");
        let now = &states[3][..];
        put_back(&devices, [now, &states[1]], &[old]);
        devices[failing].fail_writes(Times::Always, None);
        let report = try_repair(&devices, false).unwrap();
        // What it accepted is lost by then.
        assert!(report.lost(), "{context}");
        let Outcome::Unfinished { why, remedy, .. } = report.outcome else {
            panic!("{context}: {:?}", report.outcome);
        };
        assert!(why.contains(devices[failing].name()), "{context}: {why}");
        assert!(remedy.contains("ddrescue"), "{context}: {remedy}");
        devices[failing].heal();
        let refused = open(&devices, true).unwrap_err().to_string();
        assert!(refused.contains("old copy"), "{context}: {refused}");
        assert!(refused.contains("unless a repair has begun"), "{refused}");
        if old == 0 {
            let begun = devices[old].snapshot();
            devices[old].restore(&now[old]);
            let refused = open(&devices, true).unwrap_err().to_string();
            assert!(refused.contains("old copy"), "{context}: {refused}");
            devices[old].restore(&begun);
        }
        let report = try_repair(&devices, false).unwrap();
        assert_eq!(report.outcome, Outcome::Repaired, "{context}");
        assert!(fsck(&devices).is_sound(), "{context}");
    }
}

#[test]
fn an_array_that_was_put_back_as_a_whole_is_what_it_was() {
    for cut in [false, true] {
        let (devices, states) = mounts(cut, 3);
        for (mounts, state) in states.iter().enumerate() {
            put_back(&devices, [state, state], &[]);
            let fs = open(&devices, false).unwrap();
            for round in 0..3 {
                let name = format!("{round} 39");
                let there = fs.lookup(ROOT, name.as_bytes()).is_ok();
                assert_eq!(there, round < mounts);
            }
            fs.close().unwrap();
            assert!(fsck(&devices).is_sound());
        }
    }
}

/// A label of a mount whose beginning was cut off is no damage.
#[test]
fn copies_of_a_label_of_two_mounts_are_good() {
    let (devices, states) = mounts(false, 2);
    put_back(&devices, [&states[2], &states[2]], &[]);
    let now = contents(&devices);
    drop(open(&devices, false).unwrap());
    // As the devices were before the first record of that mount, but for the last head.
    for device in &devices[..COUNT - 1] {
        let mut label = vec![0; BLOCK as usize];
        device.peek(0, &mut label);
        let index = devices.iter().position(|d| Arc::ptr_eq(d, device)).unwrap();
        device.restore(&now[index]);
        device.poke(0, &label);
    }
    let last = &devices[COUNT - 1];
    let mut tail = vec![0; BLOCK as usize];
    let at = DEVICE - BLOCK;
    last.peek(at, &mut tail);
    last.restore(&now[COUNT - 1]);
    last.poke(at, &tail);
    let report = fsck(&devices);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert!(report.is_sound());
    open(&devices, false).unwrap().close().unwrap();
    assert!(fsck(&devices).is_sound());
}

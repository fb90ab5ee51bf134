//! Repairs that fail while they write.

use crate::images::*;
use crate::repair::{copies, newest_record, try_repair};
use device::BlockDevice;
use device::sim::{SimDevice, Times};
use engine::Object;
use fs::fsck::repair::{ActionKind, Outcome};

fn fails(device: &SimDevice, block: u64) {
    let range = || Some(block * BLOCK..(block + 1) * BLOCK);
    device.fail_reads(Times::Always, range());
    device.fail_writes(Times::Always, range());
}

/// The error took the list of actions with it, and no other check found what was lost.
#[test]
fn a_repair_that_fails_once_it_is_written_names_what_it_lost() {
    let image = clean_image();
    let (nodes, bucket) = (nodes(&image), bucket(&image, b"/many"));
    let newest = newest_record(&image);
    let slots = copies();
    let others = slots[4..].iter().filter(|place| !newest.contains(place));
    // The record goes into the other slot: whether it is there is in doubt then.
    let places = newest.iter().map(|place| (place, false));
    for ((device, block), doubt) in places.chain(others.map(|place| (place, true))) {
        let context = format!("block {block} of device {device}");
        let devices = image.devices();
        rot(&devices, &nodes, bucket);
        fails(&devices[*device], *block);
        let planned = try_repair(&devices, true).unwrap();
        let report = try_repair(&devices, false).unwrap_or_else(|e| panic!("{context}: {e}"));
        let Outcome::Unfinished {
            why,
            remedy,
            in_doubt,
        } = &report.outcome
        else {
            panic!("{context}: {:?}", report.outcome);
        };
        assert!(why.contains(devices[*device].name()), "{context}: {why}");
        assert!(remedy.contains("ddrescue"), "{context}: {remedy}");
        assert_eq!(*in_doubt, doubt, "{context}");
        assert!(report.lost(), "{context}");
        let lost = |a: &&fs::fsck::repair::Action| a.lost;
        let named: Vec<_> = report.actions.iter().filter(lost).collect();
        assert_eq!(named.len(), planned.actions.iter().filter(lost).count());
        assert!(named.iter().any(|a| a.path.as_deref() == Some("/many")));
        // Nobody knows which copies are written.
        let copy = |a: &fs::fsck::repair::Action| a.kind == ActionKind::Copy;
        assert!(!report.actions.iter().any(copy), "{context}");
        devices[*device].heal();
        let left = fsck(&devices);
        let wrong = |f: &&fs::fsck::Finding| !matches!(f.object, Object::Slot { .. });
        let named = left.findings.iter().any(|f| wrong(&f));
        assert!(doubt || !named, "{context}: {:?}", left.findings);
        try_repair(&devices, false).unwrap();
        assert_eq!(fsck(&devices).findings, [], "{context}");
    }
}

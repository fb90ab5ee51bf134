//! Which devices make an array, and what is said when they do not.

use crate::fixture::{Sims, UNEQUAL, UUID, create, plan};
use base::rng::Rng;
use device::sim::SimDevice;
use device::{Array, BlockDevice, Error, Incomplete, Outdated, label_name, parse_uuid};
use format::label::Label;
use format::{COUNTER_RECORD_MAX, FORMAT_VERSION};
use format::{U16, U32, U64};
use proptest::prelude::*;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

fn labelled(sizes: &[u64], seed: u64) -> Sims {
    let sims = Sims::new(sizes, seed);
    create(sims.members(), 4096).write_labels().unwrap();
    sims
}

fn assemble(devices: Vec<Arc<dyn BlockDevice>>) -> Result<Array, Error> {
    Array::assemble(devices, false)
}

/// Changes both label copies of a device and seals them again.
fn edit(device: &SimDevice, change: impl Fn(&mut Label)) {
    for offset in [0, device.bytes() - 4096] {
        let mut block = vec![0; 4096];
        device.peek(offset, &mut block);
        let mut label = Label::read_from_bytes(&block).unwrap();
        change(&mut label);
        label.seal();
        device.poke(offset, label.as_bytes());
    }
}

fn zero_block(device: &SimDevice, offset: u64) {
    device.poke(offset, &[0; 4096]);
}

#[test]
fn an_array_assembles_in_any_order_and_knows_itself() {
    let sims = labelled(&UNEQUAL, 1);
    let members = sims.members();
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let devices = order.iter().map(|&i| Arc::clone(&members[i])).collect();
        let array = assemble(devices).unwrap();
        assert_eq!(array.device_names(), ["sim1", "sim2", "sim3"]);
        assert_eq!(array.uuid(), UUID);
        assert_eq!(array.label().hash_key, [7; 16]);
        assert_eq!(label_name(array.label()), "test");
        assert_eq!(*array.geometry(), plan(&UNEQUAL, 4096));
        assert!(array.label_repairs().is_empty());
        for device in 0..3 {
            array.verify_label(device).unwrap();
        }
        assert!(array.verify_label(3).is_err());
    }
}

#[test]
fn a_missing_device_is_named_by_its_index() {
    let sims = labelled(&UNEQUAL, 1);
    let mut devices = sims.members();
    devices.remove(1);
    let error = assemble(devices).unwrap_err();
    assert!(matches!(&error, Error::Missing { missing, count: 3, .. } if missing == &[1]));
    let text = error.to_string();
    assert!(
        text.contains("device 1 of") && text.contains("is missing"),
        "{text}"
    );
    let devices = sims.members().split_off(2);
    let text = assemble(devices).unwrap_err().to_string();
    assert!(
        text.contains("devices 0, 1 of") && text.contains("are missing"),
        "{text}"
    );
    assert!(matches!(assemble(vec![]), Err(Error::NoDevices)));
}

#[test]
fn a_foreign_device_is_the_one_outvoted() {
    let ours = labelled(&UNEQUAL, 1);
    let theirs = labelled(&UNEQUAL, 10);
    for device in &theirs.devices {
        edit(device, |label| label.uuid = [9; 16]);
    }
    let mut devices = ours.members();
    devices[0] = theirs.members()[0].clone();
    let error = assemble(devices).unwrap_err();
    assert!(
        matches!(&error, Error::Foreign { device, uuid, .. }
            if device == "sim10" && parse_uuid(uuid) == Some([9; 16])),
        "{error}"
    );
}

#[test]
fn a_duplicate_device_is_named_with_its_twin() {
    let sims = labelled(&UNEQUAL, 1);
    let mut devices = sims.members();
    devices.push(sims.devices[1].clone_state(5));
    let error = assemble(devices).unwrap_err();
    assert!(
        matches!(&error, Error::Duplicate { index: 1, .. }),
        "{error}"
    );
}

#[test]
fn a_device_that_shrank_is_too_small() {
    let sims = labelled(&UNEQUAL, 1);
    let small = SimDevice::new(UNEQUAL[2] - (1 << 20), 8);
    let mut head = vec![0; 65_536];
    sims.devices[2].peek(0, &mut head);
    small.poke(0, &head);
    let mut devices = sims.members();
    devices[2] = small;
    let error = assemble(devices).unwrap_err();
    assert!(
        matches!(&error, Error::TooSmall { device, needed, .. }
            if device == "sim8" && *needed == UNEQUAL[2]),
        "{error}"
    );
}

#[test]
fn a_device_with_larger_blocks_than_the_array_is_refused() {
    let sims = labelled(&UNEQUAL, 1);
    let coarse = SimDevice::with(
        "coarse",
        UNEQUAL[0],
        4096,
        1,
        device::sim::PowerSwitch::new(),
    );
    coarse.restore(&sims.devices[0].snapshot());
    let mut devices = sims.members();
    devices[0] = coarse;
    let error = assemble(devices).unwrap_err();
    assert!(
        matches!(&error, Error::LogicalBlock { device, logical_block: 4096, align: 512 }
            if device == "coarse"),
        "{error}"
    );
}

#[test]
fn other_versions_and_unknown_features_are_refused_by_name() {
    let sims = labelled(&UNEQUAL, 1);
    edit(&sims.devices[1], |label| {
        label.version = U32::new(FORMAT_VERSION + 1);
        // A newer format may describe its zones in ways this one cannot read.
        label.zones[0].copies = U32::new(2);
    });
    let error = assemble(sims.members()).unwrap_err();
    assert!(
        matches!(&error, Error::NewerVersion { device, version, known: FORMAT_VERSION }
            if device == "sim2" && *version == FORMAT_VERSION + 1),
        "{error}"
    );

    // The checksums of its journal are others: what it holds would be taken for an empty one.
    let sims = labelled(&UNEQUAL, 1);
    edit(&sims.devices[2], |label| label.version = U32::new(1));
    let error = assemble(sims.members()).unwrap_err();
    assert!(
        matches!(&error, Error::OlderVersion { device, version: 1, known: FORMAT_VERSION } if device == "sim3"),
        "{error}"
    );

    let sims = labelled(&UNEQUAL, 1);
    edit(&sims.devices[0], |label| {
        label.incompatible = U64::new(1 << 5 | 1 << 63);
        label.zones[0].copies = U32::new(2);
    });
    let error = assemble(sims.members()).unwrap_err();
    assert!(
        matches!(&error, Error::UnknownFeatures { device, features }
            if device == "sim1" && features == "bit 5, bit 63"),
        "{error}"
    );

    let sims = labelled(&UNEQUAL, 1);
    for device in &sims.devices {
        edit(device, |label| label.read_only_compatible = U64::new(4));
    }
    let error = assemble(sims.members()).unwrap_err();
    assert!(
        matches!(&error, Error::ReadOnlyFeatures { features, .. } if features == "bit 2"),
        "{error}"
    );
    Array::assemble(sims.members(), true).unwrap();

    let sims = labelled(&UNEQUAL, 1);
    for device in &sims.devices {
        edit(device, |label| label.compatible = U64::new(4));
    }
    assemble(sims.members()).unwrap();
}

#[test]
fn an_old_copy_of_a_device_is_noticed() {
    let sims = labelled(&UNEQUAL, 1);
    edit(&sims.devices[2], |label| label.created = (-1).into());
    let error = assemble(sims.members()).unwrap_err();
    assert!(matches!(&error, Error::LabelsDisagree { device, .. } if device == "sim3"));
    // It was the geometry, whatever it was.
    let said = |label: fn(&mut Label)| {
        let sims = labelled(&UNEQUAL, 1);
        edit(&sims.devices[2], label);
        assemble(sims.members()).unwrap_err().to_string()
    };
    for (error, what) in [
        (
            said(|label| label.created = (-1).into()),
            "about when the array was made, or",
        ),
        (
            said(|label| label.name[0] = b'x'),
            "about what the array is called;",
        ),
        (
            said(|label| label.chunk_count = U32::new(label.chunk_count.get() - 1)),
            "about the array's geometry;",
        ),
    ] {
        assert!(error.contains(what), "{error}");
        assert!(error.ends_with("give the latest state of each device"));
    }
}

#[test]
fn either_copy_of_a_label_serves_and_repair_restores_the_other() {
    for copy in 0..2 {
        let sims = labelled(&UNEQUAL, 1);
        let device = &sims.devices[1];
        let offset = if copy == 0 { 0 } else { UNEQUAL[1] - 4096 };
        device.corrupt(offset + 100, 50, &mut Rng::new(3));
        let array = assemble(sims.members()).unwrap();
        let repairs = array.label_repairs();
        assert_eq!(repairs.len(), 1);
        assert_eq!((repairs[0].device, repairs[0].copy), (1, copy));
        array.repair_labels().unwrap();
        let array = assemble(sims.members()).unwrap();
        assert!(array.label_repairs().is_empty());
    }
}

/// Each mount writes labels, and a power cut can tear what is being written: both copies were gone if the first one had been damaged before,
/// as by a power cut in the mount before.
#[test]
fn no_power_cut_costs_the_copy_of_a_label_that_is_good() {
    for copy in 0..2 {
        for (cut, seed) in (0..6).flat_map(|cut| (0..20).map(move |seed| (cut, seed))) {
            let mut sims = labelled(&UNEQUAL, 1);
            let mut rng = Rng::new(seed);
            let offset = if copy == 0 { 0 } else { UNEQUAL[1] - 4096 };
            sims.devices[1].corrupt(offset + 100, 50, &mut rng);
            let array = assemble(sims.members()).unwrap();
            sims.switch.cut_after(cut);
            let noted = array.note_mount(1);
            assert!(noted.is_err());
            sims.restart(&mut rng);
            let array = assemble(sims.members());
            let array = array.unwrap_or_else(|e| panic!("copy {copy}, cut at {cut}, {seed}: {e}"));
            array.note_mount(1).unwrap();
        }
    }
}

#[test]
fn an_unreadable_first_copy_is_read_from_the_second() {
    let sims = labelled(&UNEQUAL, 1);
    sims.devices[0].fail_reads(device::sim::Times::Always, Some(0..4096));
    let array = assemble(sims.members()).unwrap();
    assert_eq!(array.label_repairs()[0].copy, 0);
    // With both unreadable it is the device's error, not a claim about its contents.
    sims.devices[0].fail_reads(device::sim::Times::Always, None);
    let error = assemble(sims.members()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
}

#[test]
fn two_damaged_copies_are_damage_and_none_is_not_sheaf() {
    let sims = labelled(&UNEQUAL, 1);
    let device = &sims.devices[1];
    let alone = || assemble(vec![Arc::clone(&sims.members()[1])]).unwrap_err();
    device.corrupt(100, 50, &mut Rng::new(3));
    device.corrupt(UNEQUAL[1] - 3000, 50, &mut Rng::new(4));
    let error = alone();
    assert!(matches!(&error, Error::LabelDamaged { device, .. } if device == "sim2"));
    zero_block(device, 0);
    zero_block(device, UNEQUAL[1] - 4096);
    let error = alone();
    assert!(matches!(&error, Error::NotSheaf { device, found: None } if device == "sim2"));
}

fn lose_label(device: &SimDevice) {
    zero_block(device, 0);
    zero_block(device, device.bytes() - 4096);
}

/// It was told to make a file system on a device whose label was gone, while the others said what it was.
#[test]
fn a_label_that_is_gone_is_told_by_those_of_the_others() {
    let sims = labelled(&UNEQUAL, 1);
    lose_label(&sims.devices[1]);
    let error = assemble(sims.members()).unwrap_err();
    let Error::LabelLost(all) = &error else {
        panic!("{error}");
    };
    assert_eq!((&all.lost[0].device[..], all.count), ("sim2", 3));
    assert_eq!(all.missing, [1]);
    assert_eq!(all.labelled, ["sim1", "sim3"]);
    let text = error.to_string();
    assert!(
        text.contains("`sheaf fsck --relabel sim1 sim2 sim3`"),
        "{text}"
    );
    assert!(text.contains("not a copy of it"), "{text}");
    assert!(!text.contains("make a file system"), "{text}");
    // One that is too many is none of theirs.
    let whole = labelled_with_blank();
    let error = assemble(whole).unwrap_err();
    assert!(matches!(error, Error::NotSheaf { .. }), "{error}");
}

/// All devices of an array, and one more.
fn labelled_with_blank() -> Vec<Arc<dyn BlockDevice>> {
    let (sims, blank) = (labelled(&UNEQUAL, 1), Sims::new(&UNEQUAL[..1], 2));
    [sims.members(), blank.members()].concat()
}

/// A device of this array, in a file that was made longer since.
fn enlarged(sims: &Sims, which: usize) -> (Arc<SimDevice>, Vec<Arc<dyn BlockDevice>>) {
    let (old, bytes) = (&sims.devices[which], sims.devices[which].bytes());
    let new = SimDevice::on_switch(bytes + (8 << 20), 9, &sims.switch);
    let mut content = vec![0; bytes as usize];
    old.peek(0, &mut content);
    new.poke(0, &content);
    let mut members = sims.members();
    members[which] = Arc::clone(&new) as Arc<dyn BlockDevice>;
    (new, members)
}

/// The second copy was looked for where the device ends now, and it was told to be another device.
#[test]
fn the_second_copy_of_a_device_that_has_grown_is_where_it_ended_before() {
    let sims = labelled(&UNEQUAL, 1);
    let (device, members) = enlarged(&sims, 1);
    zero_block(&device, 0);
    let array = assemble(members.clone()).unwrap();
    let repairs = array.label_repairs();
    assert_eq!((repairs[0].device, repairs[0].copy), (1, 0));
    array.verify_label(1).unwrap();
    array.repair_labels().unwrap();
    drop(array);
    assert!(
        assemble(members.clone())
            .unwrap()
            .label_repairs()
            .is_empty()
    );
    // Somebody else's first block is theirs.
    device.poke(0, b"XFSB");
    let error = assemble(members).unwrap_err();
    assert!(matches!(error, Error::LabelLost(_)), "{error}");
}

#[test]
fn a_device_that_has_grown_and_lost_its_label_may_have_it_again() {
    let sims = labelled(&UNEQUAL, 1);
    let (device, members) = enlarged(&sims, 1);
    zero_block(&device, 0);
    zero_block(&device, UNEQUAL[1] - 4096);
    let error = assemble(members.clone()).unwrap_err().to_string();
    assert!(error.contains("if it was enlarged"), "{error}");
    let incomplete = Incomplete::of(&members).unwrap();
    assert_eq!(incomplete.ways(), [vec![(1, 0)]]);
    let array = incomplete.array(&vec![(1, 0)], false).unwrap();
    array.write_lost_labels(&[1]).unwrap();
    drop(array);
    assert!(assemble(members).unwrap().label_repairs().is_empty());
}

#[test]
fn lost_labels_are_as_they_were_when_they_are_written_again() {
    let sims = labelled(&UNEQUAL, 1);
    let label = |i: usize| {
        let mut block = vec![0; 4096];
        sims.devices[i].peek(0, &mut block);
        block
    };
    let before = [label(1), label(2)];
    lose_label(&sims.devices[1]);
    lose_label(&sims.devices[2]);
    let members = sims.members();
    // Their sizes differ, so there is one way.
    let incomplete = Incomplete::of(&members).unwrap();
    assert_eq!(incomplete.lost(), ["sim2", "sim3"]);
    assert_eq!(incomplete.ways(), [vec![(1, 0), (2, 1)]]);
    assert!((0..2).all(|which| incomplete.objection(which).is_none()));
    assert!(!incomplete.remembers(0, 1));
    let array = incomplete.array(&incomplete.ways()[0], false).unwrap();
    array.write_lost_labels(&[1, 2]).unwrap();
    assert_eq!([label(1), label(2)], before);
    assert!(assemble(members).unwrap().label_repairs().is_empty());
}

/// Its checksum needs no key: everything that read it went on without end, and took all memory.
#[test]
fn a_label_of_a_mount_that_cannot_be_is_damaged() {
    let sims = labelled(&UNEQUAL, 1);
    for mount in [COUNTER_RECORD_MAX + 1, u64::MAX] {
        edit(&sims.devices[1], |label| label.mount_id = U64::new(mount));
        let error = assemble(sims.members()).unwrap_err().to_string();
        assert!(error.contains("sim2") && error.contains("mount"), "{error}");
        assert!(error.contains("fsck --relabel"), "{error}");
        // What is left of it is no proof of that mount.
        let incomplete = Incomplete::of(&sims.members()).unwrap();
        let array = incomplete.array(&vec![(1, 0)], true).unwrap();
        assert_eq!(array.outdated(0), []);
    }
    for device in &sims.devices {
        edit(device, |label| label.mount_id = U64::new(u64::MAX));
    }
    let error = assemble(sims.members()).unwrap_err();
    assert!(matches!(error, Error::LabelDamaged { .. }), "{error}");
    // One copy serves.
    let sims = labelled(&UNEQUAL, 1);
    let sound = {
        let mut block = vec![0; 4096];
        sims.devices[1].peek(0, &mut block);
        block
    };
    edit(&sims.devices[1], |label| {
        label.mount_id = U64::new(u64::MAX)
    });
    sims.devices[1].poke(UNEQUAL[1] - 4096, &sound);
    let array = assemble(sims.members()).unwrap();
    let repairs = array.label_repairs();
    assert_eq!(
        (repairs.len(), repairs[0].device, repairs[0].copy),
        (1, 1, 0)
    );
}

/// The next mount's labels would be ones that nobody takes.
#[test]
fn no_label_is_written_that_nobody_would_read() {
    let sims = of_mounts(&[COUNTER_RECORD_MAX; 3]);
    let array = assemble(sims.members()).unwrap();
    let error = array.note_mount(COUNTER_RECORD_MAX + 1).unwrap_err();
    assert!(error.to_string().contains("no mount can follow"), "{error}");
    array.note_mount(COUNTER_RECORD_MAX).unwrap();
    drop(array);
    assemble(sims.members()).unwrap();
}

/// A mount was cut off between the two copies of the first label, and the next one could not read the first of them: it took that label for written, wrote the
/// others, and nobody opened the array any more, for the first copy could be read again.
#[test]
fn a_label_of_which_only_the_newer_copy_was_readable_is_written_again() {
    for device in 0..3 {
        let ages = [0, 1, 2].map(|other| if other < device { 8 } else { 7 });
        let sims = of_mounts(&ages);
        let newer = &sims.devices[device];
        let mut block = vec![0; 4096];
        newer.peek(0, &mut block);
        let mut label = Label::read_from_bytes(&block).unwrap();
        label.mount_id = U64::new(8);
        label.seal();
        newer.poke(newer.bytes() - 4096, label.as_bytes());
        newer.fail_reads(device::sim::Times::Always, Some(0..4096));
        let array = assemble(sims.members()).unwrap();
        array.note_mount(8).unwrap();
        newer.heal();
        for sim in &sims.devices {
            for offset in [0, sim.bytes() - 4096] {
                sim.peek(offset, &mut block);
                let label = Label::parse(&block).unwrap();
                assert_eq!(
                    label.mount_id.get(),
                    8,
                    "{device}: {} at {offset}",
                    sim.name()
                );
            }
        }
        assert_eq!(assemble(sims.members()).unwrap().outdated(8), []);
    }
}

/// Labels of these mounts, by device.
fn of_mounts(ages: &[u64]) -> Sims {
    let sims = labelled(&UNEQUAL, 1);
    for (device, age) in sims.devices.iter().zip(ages) {
        edit(device, |label| label.mount_id = U64::new(*age));
    }
    sims
}

/// It got the mount of whichever device was named first: another order, and the label was refused for ever.
#[test]
fn the_mount_of_a_lost_label_is_in_order_with_the_others_in_whatever_order_they_are_named() {
    let ages = [[8, 8, 7], [8, 7, 7], [7, 7, 7], [8, 8, 8]];
    for (ages, lost) in ages
        .iter()
        .flat_map(|ages| [0, 1, 2].map(|lost| (ages, lost)))
    {
        let sims = of_mounts(ages);
        lose_label(&sims.devices[lost]);
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
            let members = sims.members();
            let named = order.map(|i| Arc::clone(&members[i]));
            let incomplete = Incomplete::of(&named).unwrap();
            let array = incomplete.array(&vec![(lost, 0)], true).unwrap();
            let record = ages.iter().min().unwrap();
            let context = format!("{ages:?} without {lost}, named as {order:?}");
            assert_eq!(array.outdated(*record), [], "{context}");
        }
    }
}

/// The proof that it is an old copy was written over.
#[test]
fn what_is_left_of_a_lost_label_says_which_mount_it_was_of() {
    let of = |change: &dyn Fn(&SimDevice)| {
        let sims = of_mounts(&[8, 5, 8]);
        change(&sims.devices[1]);
        let incomplete = Incomplete::of(&sims.members()).unwrap();
        assert!(incomplete.remembers(0, 1));
        let array = incomplete.array(&vec![(1, 0)], true).unwrap();
        array.outdated(8)
    };
    let old = [Outdated {
        device: 1,
        mount: 5,
        newest: 8,
    }];
    assert_eq!(of(&|device| device.poke(0, b"XFSB")), old);
    // Both copies, each with some wrong bits.
    let last = UNEQUAL[1] - 4096;
    let damaged = |device: &SimDevice| {
        device.poke(3000, &[1]);
        device.poke(last + 200, &[4]);
    };
    assert_eq!(of(&damaged), old);
}

#[test]
fn what_shows_another_owner_may_not_have_a_label() {
    let objection = |change: &dyn Fn(&SimDevice)| {
        let sims = labelled(&UNEQUAL, 1);
        lose_label(&sims.devices[1]);
        change(&sims.devices[1]);
        let incomplete = Incomplete::of(&sims.members()).unwrap();
        incomplete.objection(0).unwrap_or_default()
    };
    assert_eq!(objection(&|_| {}), "");
    assert!(objection(&|d| d.poke(0, b"XFSB")).contains("holds xfs"));
    let other = labelled(&UNEQUAL, 1);
    edit(&other.devices[1], |label| label.uuid = [0x55; 16]);
    let mut block = vec![0; 4096];
    other.devices[1].peek(0, &mut block);
    block[3000] ^= 1;
    let left = objection(&|d| d.poke(0, &block));
    assert!(left.contains("label is of file system 55555555"), "{left}");
}

#[test]
fn a_device_that_somebody_else_formatted_is_not_taken_by_its_last_block() {
    let sims = labelled(&UNEQUAL, 1);
    zero_block(&sims.devices[1], 0);
    assemble(sims.members()).unwrap();
    sims.devices[1].poke(0, b"XFSB");
    let error = assemble(sims.members()).unwrap_err();
    assert!(
        matches!(&error, Error::LabelLost(all)
            if all.lost[0].device == "sim2" && all.lost[0].why == "it holds xfs"),
        "{error}"
    );
}

#[test]
fn every_changed_byte_of_a_label_is_detected() {
    let sims = labelled(&UNEQUAL, 1);
    let mut block = vec![0; 4096];
    sims.devices[0].peek(0, &mut block);
    for at in 0..4096 {
        for flip in [0x01, 0x80, 0xff] {
            block[at] ^= flip;
            assert!(Label::parse(&block).is_err(), "byte {at} xor {flip}");
            block[at] ^= flip;
        }
    }
    Label::parse(&block).unwrap();
}

#[test]
fn an_interrupted_mkfs_leaves_nothing_that_assembles() {
    // Over an older array of the same devices, with the power cut after each operation.
    let mut finished = false;
    for cut in 0.. {
        let mut sims = labelled(&UNEQUAL, 1);
        let mut rng = Rng::new(cut);
        sims.switch.cut_after(cut);
        let sizes: Vec<u64> = UNEQUAL.to_vec();
        let made = Array::create(sims.members(), plan(&sizes, 8192), "new", [3; 16], [4; 16])
            .and_then(|array| array.write_labels());
        sims.restart(&mut rng);
        match (made, assemble(sims.members())) {
            (Ok(()), array) => {
                assert_eq!(array.unwrap().uuid(), [3; 16]);
                finished = true;
                break;
            }
            // Before the first wipe, the old one; with device 0's label, all of the new one.
            (Err(_), Ok(array)) => assert!(array.uuid() == UUID || array.uuid() == [3; 16]),
            (Err(_), Err(error)) => assert!(
                matches!(
                    error,
                    Error::NotSheaf { .. }
                        | Error::LabelDamaged { .. }
                        | Error::LabelLost(_)
                        | Error::Missing { .. }
                        | Error::Foreign { .. }
                ),
                "{error}"
            ),
        }
    }
    assert!(finished);
}

/// Nobody looked at the last, partial block of a device, and the partition table in it came back.
#[test]
fn what_is_in_a_partial_block_at_the_end_is_seen_and_wiped() {
    for sectors in [1, 3, 7] {
        let bytes = (64 << 20) + sectors * 512;
        let sims = Sims::new(&[bytes], 1);
        let device = &sims.devices[0];
        device.poke(bytes - 512, b"EFI PART");
        let found = device::signatures(device.as_ref());
        assert_eq!(found[0].name, "partition table (gpt)");
        assert_eq!(found[0].offset, bytes - 512);
        create(sims.members(), 4096).write_labels().unwrap();
        let mut last = [1; 512];
        device.peek(bytes - 512, &mut last);
        assert_eq!(last, [0; 512]);
        assemble(sims.members()).unwrap();
    }
}

#[test]
fn mkfs_refuses_what_could_not_be_assembled() {
    let sims = Sims::new(&UNEQUAL, 1);
    let g = plan(&UNEQUAL, 4096);
    let create = |devices, name: &str| Array::create(devices, g.clone(), name, UUID, [0; 16]);
    let error = create(sims.members(), &"ä".repeat(33)).unwrap_err();
    assert!(matches!(error, Error::NameTooLong { limit: 64, .. }));
    create(sims.members(), &"ä".repeat(32)).unwrap();
    let error = create(sims.members().split_off(1), "x").unwrap_err();
    assert!(matches!(
        error,
        Error::DeviceCount {
            given: 2,
            expected: 3
        }
    ));
    let mut swapped = sims.members();
    swapped.swap(0, 2);
    let error = create(swapped, "x").unwrap_err();
    assert!(matches!(error, Error::TooSmall { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// A label with a good checksum and nonsense inside is refused or usable, never a panic.
    #[test]
    fn nonsense_in_a_sealed_label_never_panics(
        edits in prop::collection::vec((16usize..900, any::<u8>()), 1..6),
        words in prop::collection::vec((2usize..110, prop_oneof![
            Just(0u64), Just(1), Just(u64::MAX), Just(1 << 52), any::<u64>()
        ]), 0..3),
    ) {
        let sims = labelled(&[64 << 20], 1);
        let device = &sims.devices[0];
        let mut block = vec![0; 4096];
        device.peek(0, &mut block);
        for (at, byte) in edits {
            block[at] = byte;
        }
        for (word, value) in words {
            block[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        let mut label = Label::read_from_bytes(&block).unwrap();
        label.device_index = U16::new(label.device_index.get() % 2);
        label.seal();
        device.poke(0, label.as_bytes());
        device.poke((64 << 20) - 4096, label.as_bytes());
        if let Ok(array) = Array::assemble(sims.members(), true) {
            let mut buf = vec![0; 65_536];
            let last = array.bytes() - buf.len() as u64;
            array.read(last, &mut buf).unwrap();
            array.read(0, &mut buf).unwrap();
            array.read_slot(1, 1).unwrap();
        }
    }
}

//! What an array is called changes over all devices, whatever comes between.

use crate::files::{Images, relabel};
use crate::fixture::{Sims, UNEQUAL, UUID, create};
use base::rng::Rng;
use device::sim::{SimDevice, Times};
use device::{
    Array, ArrayId, BlockDevice, Durability, Error, Incomplete, OpenOptions, Operation, Request,
    companions, find_members, name_bytes,
};
use format::label::{Identity, Label};
use std::path::PathBuf;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

fn called(uuid: u8, name: &str) -> Identity {
    Identity {
        uuid: if uuid == 0 { UUID } else { [uuid; 16] },
        name: name_bytes(name).unwrap(),
    }
}

/// As it was made, and what it is to be: by name, by UUID, by both.
fn changes() -> [(Identity, Identity); 3] {
    let made = called(0, "test");
    [called(0, "new"), called(5, "test"), called(5, "new")].map(|new| (made, new))
}

fn assemble(sims: &Sims) -> Result<Array, Error> {
    Array::assemble(sims.members(), false)
}

/// An array in use since its third mount.
fn made() -> Sims {
    let sims = Sims::new(&UNEQUAL, 1);
    create(sims.members(), 4096).write_labels().unwrap();
    assemble(&sims).unwrap().note_mount(3).unwrap();
    sims
}

fn copies(device: &SimDevice) -> [u64; 2] {
    [0, device.bytes() - 4096]
}

fn label_at(device: &SimDevice, at: u64) -> Label {
    let mut block = vec![0; 4096];
    device.peek(at, &mut block);
    Label::read_from_bytes(&block).unwrap()
}

/// Both copies of all labels.
fn labels(sims: &Sims) -> Vec<Label> {
    let all = sims
        .devices
        .iter()
        .flat_map(|device| copies(device).map(|at| label_at(device, at)));
    all.collect()
}

fn all_say(sims: &Sims, identity: Identity) -> bool {
    let mut all = labels(sims).into_iter();
    all.all(|label| label.identity() == identity && label.former().is_none())
}

/// That it opens as one of these, and as what a mount was last that wrote labels; returns which.
fn opens(sims: &Sims, one_of: &[Identity], told: &dyn std::fmt::Display) -> Identity {
    let array = assemble(sims).unwrap_or_else(|error| panic!("{told}: {error}"));
    let identity = array.identity();
    assert!(one_of.contains(&identity), "{told}: {identity:?}");
    assert_eq!(array.metadata_uuid(), UUID, "{told}");
    assert!(array.outdated(3).is_empty(), "{told}");
    for device in 0..UNEQUAL.len() {
        array
            .verify_label(device)
            .unwrap_or_else(|error| panic!("{told}: {error}"));
    }
    identity
}

#[test]
fn all_labels_say_what_the_array_is_called() {
    for (old, new) in changes() {
        let sims = made();
        let array = assemble(&sims).unwrap();
        assert_eq!(array.identity(), old);
        let array = array.with_identity(new).unwrap();
        assert!(!array.is_changing());
        assert!(all_say(&sims, new));
        assert_eq!(opens(&sims, &[new], &"changed"), new);
        // And back, which leaves nothing of it.
        assemble(&sims).unwrap().with_identity(old).unwrap();
        assert!(
            labels(&sims)
                .iter()
                .all(|label| label.incompatible.get() == 0)
        );
        assert_eq!(opens(&sims, &[old], &"changed back"), old);
        let read_only = Array::assemble(sims.members(), true).unwrap();
        assert!(matches!(read_only.with_identity(new), Err(Error::ReadOnly)));
    }
}

/// Labels that were written one after the other were of two file systems between.
#[test]
fn a_change_that_is_cut_off_anywhere_leaves_the_old_or_the_new_array() {
    for (old, new) in changes() {
        let (mut was_old, mut was_new) = (false, false);
        for seed in 0..8 {
            let mut rng = Rng::new(seed);
            for cut in 0.. {
                let told = format!("cut at {cut}, seed {seed}");
                let mut sims = made();
                let array = assemble(&sims).unwrap();
                sims.switch.cut_after(cut);
                if array.with_identity(new).is_ok() {
                    assert!(cut > 12);
                    break;
                }
                sims.restart(&mut rng);
                let now = opens(&sims, &[old, new], &told);
                was_old |= now == old;
                was_new |= now == new;
                // Nothing happened but a look, and it is as it was.
                assert_eq!(opens(&sims, &[old, new], &told), now);
                // Mounts end it, and they are cut off as well; of what that tore the next one writes again.
                for (mount, cut) in [(4, cut), (4, 99), (5, cut), (5, 99), (6, 99), (7, 99)] {
                    let array = assemble(&sims).unwrap_or_else(|e| panic!("{told}: {e}"));
                    sims.switch.cut_after(cut);
                    let begun = array.flush().and_then(|_| array.note_mount(mount));
                    drop(array);
                    match begun {
                        Ok(()) => sims.switch.restore(),
                        Err(_) => sims.restart(&mut rng),
                    }
                    let told = format!("{told}, in mount {mount}");
                    let array = assemble(&sims).unwrap_or_else(|e| panic!("{told}: {e}"));
                    assert_eq!(array.identity(), now, "{told}");
                    assert!(array.outdated(mount - 1).is_empty(), "{told}");
                }
                assert!(all_say(&sims, now), "{told}");
            }
        }
        assert!(was_old && was_new);
    }
}

#[test]
fn a_change_after_one_that_was_cut_off_is_cut_off_as_well() {
    let (old, new) = changes()[2];
    let third = called(9, "third");
    for (first, seed) in (0..16).flat_map(|first| (0..2).map(move |seed| (first, seed))) {
        let mut rng = Rng::new(seed);
        for cut in 0.. {
            let told = format!("cut at {first} and {cut}, seed {seed}");
            let mut sims = made();
            for (to, cut) in [(new, first), (third, cut)] {
                let array = assemble(&sims).unwrap_or_else(|e| panic!("{told}: {e}"));
                sims.switch.cut_after(cut);
                drop(array.with_identity(to));
                sims.restart(&mut rng);
            }
            let now = opens(&sims, &[old, new, third], &told);
            for to in [old, third] {
                let array = assemble(&sims).unwrap().with_identity(to).unwrap();
                drop(array);
                assert!(all_say(&sims, to), "{told}");
            }
            if now == third && cut > 40 {
                break;
            }
        }
    }
}

/// Writes that fail one after the other, and then none does.
#[test]
fn a_change_that_a_device_refuses_can_be_tried_again() {
    let (old, new) = changes()[2];
    for failing in 0.. {
        let sims = made();
        let array = assemble(&sims).unwrap();
        sims.switch.fail_after(failing, Times::Next(1));
        let changed = array.with_identity(new).is_ok();
        opens(&sims, &[old, new], &format!("operation {failing} failed"));
        assemble(&sims).unwrap().with_identity(new).unwrap();
        assert!(all_say(&sims, new));
        if changed {
            break;
        }
    }
}

/// A process that died in the first round had written the last copy to a device's cache: what was seen there was gone with the next power cut.
#[test]
fn what_a_change_left_in_a_cache_is_durable_before_labels_rely_on_it() {
    let (old, new) = changes()[2];
    for (cut, seed) in (0..16).flat_map(|cut| (0..8).map(move |seed| (cut, seed))) {
        let mut sims = made();
        let [first, second, third] = &sims.devices[..] else {
            panic!("three devices");
        };
        let name_both = |label: &mut Label| label.set_identity(new, Some(old));
        edit(first, name_both);
        edit(second, name_both);
        let before = label_at(third, 0);
        edit(third, name_both);
        let named = label_at(third, 0);
        third.poke(0, before.as_bytes());
        let write = Operation::Write {
            offset: 0,
            buf: named.as_bytes(),
            durability: Durability::Volatile,
        };
        let mut request = [Request::new(write, 0)];
        third.run(&mut request, None);
        assert!(request[0].error.is_none());
        let array = assemble(&sims).unwrap();
        assert!(!array.is_changing());
        sims.switch.cut_after(cut);
        match seed % 2 {
            0 => drop(array.with_identity(old)),
            _ => _ = array.flush().and_then(|_| array.note_mount(4)),
        }
        sims.restart(&mut Rng::new(seed));
        opens(&sims, &[old, new], &format!("cut at {cut}, seed {seed}"));
    }
}

/// A copy that is gone may be the only one that said what came next.
#[test]
fn a_damaged_copy_of_a_label_keeps_no_array_from_opening_between() {
    let (old, new) = changes()[2];
    for cut in 0..14 {
        for damaged in 0..6 {
            let told = format!("cut at {cut}, copy {damaged} damaged");
            let mut rng = Rng::new(cut);
            let mut sims = made();
            let damage = |sims: &Sims, rng: &mut Rng| {
                let device = &sims.devices[damaged / 2];
                device.corrupt(copies(device)[damaged % 2] + 100, 50, rng);
            };
            // Before, and after.
            for early in [true, false] {
                if early {
                    damage(&sims, &mut rng);
                }
                let array = assemble(&sims).unwrap_or_else(|e| panic!("{told}: {e}"));
                let to = if early { new } else { old };
                sims.switch.cut_after(cut);
                drop(array.with_identity(to));
                sims.restart(&mut rng);
                opens(&sims, &[old, new], &told);
            }
            let array = assemble(&sims).unwrap().with_identity(new).unwrap();
            drop(array);
            let array = assemble(&sims).unwrap();
            sims.switch.cut_after(cut);
            drop(array.with_identity(old));
            sims.restart(&mut rng);
            // With what else a cut tears both copies may be gone.
            if assemble(&sims).unwrap().label_repairs().is_empty() {
                damage(&sims, &mut rng);
                opens(&sims, &[old, new], &told);
            }
        }
    }
}

/// It was a label of another file system, and its device could not be had again.
#[test]
fn a_label_that_is_lost_between_is_written_again() {
    let (old, new) = changes()[2];
    for changed in 1..3 {
        let sims = made();
        for device in &sims.devices[..changed] {
            edit(device, |label| label.set_identity(new, Some(old)));
        }
        for at in copies(&sims.devices[2]) {
            sims.devices[2].poke(at, &[0; 4096]);
        }
        assert!(matches!(assemble(&sims), Err(Error::LabelLost(_))));
        let incomplete = Incomplete::of(&sims.members()).unwrap();
        assert_eq!(incomplete.objection(0), None);
        let array = incomplete.array(&vec![(2, 0)], false).unwrap();
        assert!(array.identity() == new && array.is_changing());
        array.write_lost_labels(&[2]).unwrap();
        drop(array);
        assert_eq!(opens(&sims, &[new], &"written again"), new);
    }
}

fn edit(device: &SimDevice, change: impl Fn(&mut Label)) {
    for at in copies(device) {
        let mut label = label_at(device, at);
        change(&mut label);
        label.seal();
        device.poke(at, label.as_bytes());
    }
}

#[test]
fn a_device_of_a_copy_with_a_uuid_of_its_own_is_foreign() {
    let (_, new) = changes()[1];
    let ours = made();
    let copy = Sims {
        switch: Arc::clone(&ours.switch),
        devices: ours
            .devices
            .iter()
            .map(|device| device.clone_state(7))
            .collect(),
    };
    assemble(&copy).unwrap().with_identity(new).unwrap();
    opens(&ours, &[called(0, "test")], &"the original");
    let mut devices = ours.members();
    devices[1] = copy.members()[1].clone();
    let error = Array::assemble(devices, false).unwrap_err();
    assert!(matches!(&error, Error::Foreign { .. }), "{error}");
}

/// The others of a label's array were those that said the same.
#[test]
fn devices_are_found_by_the_old_name_and_by_the_new_one_between() {
    for (old, new) in changes() {
        let images = Images::new(&UNEQUAL);
        images
            .create(&OpenOptions::default())
            .write_labels()
            .unwrap();
        for changed in 1..=2 {
            for (path, bytes) in images.paths[..changed].iter().zip(UNEQUAL) {
                let image = std::fs::File::options()
                    .read(true)
                    .write(true)
                    .open(path)
                    .unwrap();
                relabel(&image, bytes, |label| label.set_identity(new, Some(old)));
            }
            let candidates = images.paths.clone();
            let found = |id: ArrayId| find_members(&id, &candidates).unwrap();
            let name = |of: &Identity| {
                let end = of.name.iter().position(|b| *b == 0).unwrap();
                ArrayId::Name(String::from_utf8(of.name[..end].to_vec()).unwrap())
            };
            for identity in [old, new] {
                assert_eq!(found(ArrayId::Uuid(identity.uuid)), images.paths);
                assert_eq!(found(name(&identity)), images.paths);
            }
            for path in &images.paths {
                assert_eq!(companions(path, &candidates).unwrap(), images.paths);
            }
            // A copy in its last place is as good, and nobody chooses.
            let copy = images.dir.path().join("copy");
            std::fs::copy(&images.paths[2], &copy).unwrap();
            let with_copy: Vec<PathBuf> =
                candidates.iter().cloned().chain([copy.clone()]).collect();
            let found = find_members(&ArrayId::Uuid(new.uuid), &with_copy);
            assert!(matches!(found, Err(Error::Duplicate { index: 2, .. })));
            let found = companions(&images.paths[0], &with_copy);
            assert!(matches!(found, Err(Error::Duplicate { index: 2, .. })));
            std::fs::remove_file(copy).unwrap();
        }
    }
}

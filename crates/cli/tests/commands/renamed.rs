//! `sheaf label`: what a file system is called, and by what it is found then.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ::fs::{Caller, FileSystem, FsOptions, OpenOptions, ROOT, open_devices};
use format::label::Label;
use zerocopy::{FromBytes, IntoBytes};

use crate::{Array, OPERATIONAL, Ran, USAGE, sheaf};

const UUID: &str = "2b69a226-557b-48a2-b2df-320af2ea5166";

fn label(array: &Array, options: &[&str]) -> Ran {
    sheaf(&["label"], options, &array.images)
}

fn called(array: &Array) -> (String, String) {
    let shown = label(array, &["--json"]).succeeds().json();
    let of = |key: &str| shown[key].as_str().unwrap().to_owned();
    (of("uuid"), of("label"))
}

fn open(array: &Array) -> Arc<FileSystem> {
    let devices = open_devices(&array.images, &OpenOptions::default()).unwrap();
    let devices = ::fs::Array::assemble(devices, false).unwrap();
    FileSystem::open(Arc::new(devices), FsOptions::default()).unwrap()
}

/// Only mkfs gave names. A snapshot could not be mounted beside its original.
#[test]
fn label_and_uuid_change_and_what_a_crash_left_is_there() {
    let array = Array::made(2);
    let (uuid, name) = called(&array);
    assert_eq!(name, "test");
    let fs = open(&array);
    let (_, file) = fs
        .create(&Caller::root(), ROOT, b"file", 0o644, libc::O_RDWR)
        .unwrap();
    fs.write(&file, 0, b"synced").unwrap();
    fs.fsync(&file, false).unwrap();
    label(&array, &["-L", "new"])
        .exits(OPERATIONAL)
        .says("in use");
    // It is shown all the same.
    assert_eq!(called(&array), (uuid.clone(), name));
    // As a crash leaves it.
    drop((file, fs));
    label(&array, &["-L", "new"])
        .succeeds()
        .says(&format!("UUID          {uuid}\nLabel         new\n"));
    let changed = label(&array, &["-U", UUID, "--json"]).succeeds().json();
    assert_eq!(changed["former"]["uuid"], *uuid);
    assert_eq!(called(&array), (UUID.to_owned(), "new".to_owned()));
    let info = sheaf(&["info"], &[], &array.images).succeeds();
    info.says("metadata-uuid")
        .says("needs recovery: the next mount replays ");
    let one = array.images[..1].to_vec();
    sheaf(&["fsck"], &[], &one)
        .succeeds()
        .says("not unmounted cleanly");
    let device = array.images[0].to_str().unwrap();
    let cat = sheaf(&["cat", "-d", device, "/file"], &[], &[]).succeeds();
    assert_eq!(cat.output(), "synced");
    sheaf(&["fsck"], &[], &one).succeeds().says("no errors");
    // Each call makes another one, and mkfs's again leaves no trace.
    label(&array, &["-U", "random"]).succeeds();
    let random = called(&array).0;
    label(&array, &["-U", "random"]).succeeds();
    assert!(random != UUID && random != called(&array).0);
    label(&array, &["--uuid", &uuid, "--label", ""]).succeeds();
    assert_eq!(called(&array), (uuid, String::new()));
    sheaf(&["info"], &[], &one)
        .succeeds()
        .says("features: none");
    sheaf(&["fsck"], &[], &one).succeeds().says("1 file");
}

#[test]
fn names_that_nothing_can_be_called_by_are_refused() {
    let array = Array::made(1);
    let before = fs::read(&array.images[0]).unwrap();
    for (options, words) in [
        (&["-L", "a\nb"][..], "control characters"),
        (&["-L", &"x".repeat(65)], "longer than 64 bytes"),
        (&["-U", "12-34"], "not a UUID"),
        (
            &["-U", "00000000-0000-0000-0000-000000000000"],
            "stands for none",
        ),
    ] {
        label(&array, options).exits(USAGE).says(words);
    }
    assert!(fs::read(&array.images[0]).unwrap() == before, "it wrote");
}

/// A copy of both devices, of which each is named.
#[test]
fn a_copy_with_a_uuid_of_its_own_is_another_file_system() {
    let array = Array::made(2);
    let mut copy = Array::unmade(2);
    for (from, to) in array.images.iter().zip(&copy.images) {
        fs::copy(from, to).unwrap();
    }
    label(&copy, &["-U", "random"]).succeeds();
    assert_ne!(called(&copy).0, called(&array).0);
    // Side by side each is found.
    let beside = array.path("copy.img");
    fs::rename(&copy.images[1], &beside).unwrap();
    sheaf(&["fsck"], &[], &array.images[..1]).succeeds();
    copy.images[1] = beside;
    sheaf(&["fsck"], &[], &copy.images).succeeds();
    let mixed = [array.images[0].clone(), copy.images[1].clone()];
    sheaf(&["fsck"], &[], &mixed)
        .exits(USAGE)
        .says("belongs to another file system");
}

#[test]
fn a_change_that_was_cut_off_is_told_and_ended() {
    let array = Array::made(2);
    let image = File::options()
        .read(true)
        .write(true)
        .open(&array.images[0])
        .unwrap();
    for at in [0, (64 << 20) - 4096] {
        let mut block = [0; 4096];
        image.read_exact_at(&mut block, at).unwrap();
        let mut label = Label::read_from_bytes(&block).unwrap();
        let former = label.identity();
        let mut new = former;
        new.uuid[0] ^= 1;
        label.set_identity(new, Some(former));
        label.seal();
        image.write_all_at(label.as_bytes(), at).unwrap();
    }
    for one in &array.images {
        sheaf(&["label"], &[], std::slice::from_ref(one))
            .succeeds()
            .says("a change was cut off");
        sheaf(&["fsck"], &[], std::slice::from_ref(one)).succeeds();
    }
    label(&array, &["-L", "ended"])
        .succeeds()
        .says_not("cut off");
    label(&array, &[])
        .succeeds()
        .says("ended")
        .says_not("cut off");
    sheaf(&["fsck"], &[], &array.images[1..]).succeeds();
}

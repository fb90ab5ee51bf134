//! What names a file system or a device, and what does not.

use std::path::PathBuf;
use std::process::Command;

use crate::{Array, Ran, USAGE, sheaf};

/// It was any file system that had been made without a label, and rm and fsck --repair took it.
#[test]
fn no_label_is_nobodys() {
    for none in ["LABEL=", "LABEL=\"\""] {
        for command in [&["info"][..], &["fsck", "-y"], &["rm", "-r", "/x", "-d"]] {
            sheaf(command, &[], &[PathBuf::from(none)])
                .exits(USAGE)
                .says("no label");
        }
        let paths = [PathBuf::from(none), PathBuf::from("/mnt")];
        sheaf(&["mount"], &[], &paths).exits(USAGE).says("no label");
    }
}

/// The image that it made no other command opened by that name.
#[test]
fn mkfs_makes_nothing_that_other_commands_take_for_a_label() {
    let array = Array::unmade(1);
    let mkfs = |name: &str| {
        let mut mkfs = Command::new(env!("CARGO_BIN_EXE_sheaf"));
        mkfs.args(["mkfs", "--size", "64M", name]);
        Ran(mkfs.current_dir(array.dir.path()).output().unwrap())
    };
    for name in ["LABEL=data", "UUID=12", "UUID="] {
        mkfs(name).exits(USAGE).says(&format!("write ./{name}"));
        assert!(!array.path(name).exists());
    }
    mkfs("./LABEL=data").succeeds();
    sheaf(&["fsck"], &[], &[array.path("LABEL=data")]).succeeds();
}

#[test]
fn mkfs_takes_no_uuid_that_stands_for_none() {
    let array = Array::unmade(1);
    let nil = "00000000-0000-0000-0000-000000000000";
    for (uuid, word) in [(nil, "zeros"), ("12", "not a UUID")] {
        let options = ["--size", "64M", "-U", uuid];
        array.mkfs(&options).exits(USAGE).says(word);
    }
    assert!(!array.images[0].exists());
}

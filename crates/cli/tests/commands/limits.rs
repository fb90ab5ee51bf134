//! What limits of the process (ulimit) keep commands from doing, in words.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::untold::can_mount;
use crate::{Array, OPERATIONAL, Ran};

/// The program below a limit.
fn limited(ulimit: &str, command: &[&str], paths: &[PathBuf]) -> Ran {
    let script = format!("ulimit {ulimit}; exec \"$0\" \"$@\"");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_sheaf")]);
    Ran(shell.args(command).args(paths).output().unwrap())
}

/// A signal ended it, without a word, and an empty image was left.
#[test]
fn an_image_that_may_not_be_as_large_is_not_made() {
    let array = Array::unmade(2);
    limited("-f 10240", &["mkfs", "--size", "64M"], &array.images)
        .exits(OPERATIONAL)
        .says("device0.img")
        .says("File too large");
    assert_eq!(fs::read_dir(array.dir.path()).unwrap().count(), 0);
}

/// The image that was created last, and could not be opened any more, was left.
#[test]
fn a_mkfs_that_runs_out_of_descriptors_leaves_no_image() {
    for descriptors in 8..16 {
        let array = Array::unmade(16);
        let limit = format!("-n {descriptors}");
        limited(&limit, &["mkfs", "--size", "64M"], &array.images)
            .exits(OPERATIONAL)
            .says("Too many open files");
        assert_eq!(fs::read_dir(array.dir.path()).unwrap().count(), 0);
    }
}

/// The daemon was gone at the first write behind the limit.
#[test]
fn a_device_that_may_not_be_written_is_an_error_of_that() {
    let array = Array::made(2);
    let file = array.path("file");
    fs::write(&file, vec![7; 30 << 20]).unwrap();
    let (device, from) = (array.images[0].to_str().unwrap(), file.to_str().unwrap());
    limited("-f 10240", &["cp", "-d", device, from, ":/"], &[])
        .exits(OPERATIONAL)
        .says("File too large");
}

/// It panicked, and told where in its source.
#[test]
fn a_cache_that_has_no_room_is_refused_before_anything_is_written() {
    if !can_mount() {
        return;
    }
    let array = Array::made(1);
    let at = array.path("mnt");
    fs::create_dir(&at).unwrap();
    let before = fs::read(&array.images[0]).unwrap();
    let paths = [array.images[0].clone(), at];
    for limit in ["-v 400000", "-d 200000"] {
        let ran = limited(limit, &["mount", "-o", "cache_size=1G"], &paths);
        let ran = ran.exits(OPERATIONAL).says("a smaller cache_size");
        let ran = ran.says(&format!("`ulimit {}`", &limit[..2]));
        assert_eq!(ran.to_string().lines().count(), 1, "{ran}");
    }
    assert!(fs::read(&array.images[0]).unwrap() == before, "it wrote");
}

/// A copy has few folders open at a time, however many there are in a tree, and each in how many others.
#[test]
fn a_tree_is_copied_that_has_more_folders_than_there_are_descriptors() {
    let array = Array::made(1);
    let (deep, wide) = ("d/".repeat(100), "w/".repeat(50));
    fs::create_dir_all(array.path("tree").join(&deep)).unwrap();
    fs::write(array.path("tree").join(&deep).join("file"), "deep").unwrap();
    for i in 0..100 {
        let folder = array.path("tree").join(&wide).join(i.to_string());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("file"), "wide").unwrap();
        fs::hard_link(folder.join("file"), array.path(&format!("tree/{i}"))).unwrap();
    }
    let (device, tree) = (&array.images[0], array.path("tree"));
    let copy = ["cp", "-a", "-d", device.to_str().unwrap()];
    limited("-n 40", &copy, &[tree.clone(), PathBuf::from(":/")]).succeeds();
    let back = array.path("back");
    limited("-n 40", &copy, &[PathBuf::from(":/tree"), back.clone()]).succeeds();
    let same = Command::new("diff").arg("-r").args([&tree, &back]).status();
    assert!(same.unwrap().success());
}

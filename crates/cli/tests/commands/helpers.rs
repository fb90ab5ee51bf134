//! The names that mount(8) and umount(8) call: what they wait for, and codes as those expect them.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::{Array, OPERATIONAL, Ran, USAGE, one, sheaf};

/// To mount(8): nothing is mounted, or unmounted.
const FAILED: i32 = 32;
/// To mount(8): called wrongly.
const CALLED_WRONGLY: i32 = 1;

/// The program under the name by which mount(8) calls it. The mount itself fails in any case, for want of a folder
/// for the socket, once the array has been opened.
fn mount_helper(array: &Array, options: &str) -> Command {
    let at = array.path("mnt");
    fs::create_dir_all(&at).unwrap();
    let helper = array.path("mount.sheaf");
    if !helper.is_symlink() {
        symlink(env!("CARGO_BIN_EXE_sheaf"), &helper).unwrap();
    }
    let socket = array.path("none/socket");
    let mut command = Command::new(helper);
    command.arg(&array.images[0]).arg(at);
    command.args(["-o", &format!("{options},metrics={}", socket.display())]);
    command
}

const WAITING: &str = "waiting up to";

/// Devices that appear after the first, as at system start, were not waited for.
#[test]
fn mount_8_waits_for_a_device_that_appears_late() {
    let array = Array::made(2);
    let away = array.path("away");
    fs::create_dir(&away).unwrap();
    let away = away.join("late.img");
    fs::rename(&array.images[1], &away).unwrap();
    let mut command = mount_helper(&array, "device_timeout=600");
    let mut mount = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(mount.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains(WAITING) && line.contains("600 s"), "{line}");
    fs::rename(&away, &array.images[1]).unwrap();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert_eq!(mount.wait().unwrap().code(), Some(FAILED));
    assert!(rest.contains("none/socket"), "it is opened: {rest}");
}

#[test]
fn a_device_that_does_not_appear_is_named_when_the_time_is_over_and_else_at_once() {
    let array = Array::made(2);
    let away = array.path("away");
    fs::create_dir(&away).unwrap();
    fs::rename(&array.images[1], away.join("late.img")).unwrap();
    let ran = Ran(mount_helper(&array, "device_timeout=0.1").output().unwrap());
    ran.exits(FAILED).says(WAITING).says("missing");
    let told = mount_helper(&array, "device_timeout=0").output().unwrap();
    let paths = [array.images[0].clone(), array.path("mnt")];
    let mount = sheaf(&["mount"], &[], &paths).exits(OPERATIONAL);
    for ran in [Ran(told).exits(FAILED), mount] {
        let ran = ran.says("missing");
        assert!(!ran.to_string().contains(WAITING), "{ran}");
    }
    // Nor is there anything to wait for in an array that is whole, or in what is none.
    fs::rename(away.join("late.img"), &array.images[1]).unwrap();
    let whole = Ran(mount_helper(&array, "noatime").output().unwrap());
    fs::write(&array.images[0], [0; 1 << 20]).unwrap();
    let none = Ran(mount_helper(&array, "noatime").output().unwrap());
    for ran in [whole.says("none/socket"), none] {
        let ran = ran.exits(FAILED);
        assert!(!ran.to_string().contains(WAITING), "{ran}");
    }
}

/// The program under another name.
fn called(array: &Array, name: &str, arguments: &[&str]) -> Ran {
    let helper = array.path(name);
    if !helper.is_symlink() {
        symlink(env!("CARGO_BIN_EXE_sheaf"), &helper).unwrap();
    }
    Ran(Command::new(helper).args(arguments).output().unwrap())
}

/// They were those of fsck(8): to mount(8) 16 is trouble with its table, and 8 an interruption.
#[test]
fn mount_8_and_umount_8_get_codes_of_their_own() {
    let array = Array::made(1);
    let device = array.images[0].to_str().unwrap();
    let at = array.path("mnt");
    fs::create_dir(&at).unwrap();
    let at = at.to_str().unwrap();
    let mount = |arguments: &[&str]| called(&array, "mount.sheaf", arguments);
    mount(&[device, at, "-o", "bogus"])
        .exits(CALLED_WRONGLY)
        .says("bogus");
    mount(&[device]).exits(CALLED_WRONGLY);
    mount(&["--frobnicate", device, at]).exits(CALLED_WRONGLY);
    mount(&["/none", at, "-o", "device_timeout=0"]).exits(FAILED);
    mount(&["-f", device, at]).succeeds();
    mount(&["--help"]).succeeds();
    for name in ["umount.fuse.sheaf", "umount.fuseblk.sheaf", "umount.sheaf"] {
        called(&array, name, &[at])
            .exits(FAILED)
            .says("no Sheaf file system");
        called(&array, name, &["--frobnicate"]).exits(CALLED_WRONGLY);
    }
    // Those of others are as they were.
    called(&array, "fsck.sheaf", &[]).exits(USAGE);
    sheaf(&["umount", at], &[], &[]).exits(OPERATIONAL);
}

/// It was ignored, and `mount -a` failed at every start without that disk.
#[test]
fn nofail_forgives_devices_that_are_missing_and_nothing_else() {
    let array = Array::made(2);
    let away = array.path("away");
    fs::create_dir(&away).unwrap();
    let at = array.path("mnt");
    fs::create_dir(&at).unwrap();
    let mount = |spec: &Path, options: &str| {
        let [spec, at] = [spec, &at].map(|path| path.to_str().unwrap());
        let options = format!("{options}device_timeout=0");
        called(&array, "mount.sheaf", &[spec, at, "-o", &options])
    };
    let none = "UUID=2b69a226-557b-48a2-b2df-320af2ea5166";
    fs::rename(&array.images[1], away.join("other.img")).unwrap();
    for (spec, word) in [
        (array.images[0].as_path(), "missing"),
        (&array.images[1], "No such file"),
        (Path::new(none), "no block device carries"),
    ] {
        mount(spec, "").exits(FAILED).says(word);
        let ran = mount(spec, "noatime,nofail,").exits(0);
        ran.says(word).says("nofail");
    }
    // By its own name it does what it is asked for, or fails.
    let mut paths = one(&array.images[0]);
    paths.push(at.clone());
    sheaf(&["mount"], &["-o", "nofail"], &paths).exits(OPERATIONAL);
    // A wrong option, a copy too many, a wrong place and damage are told in any case.
    mount(&array.images[0], "nofail,bogus,").exits(CALLED_WRONGLY);
    fs::copy(&array.images[0], array.path("copy")).unwrap();
    fs::rename(away.join("other.img"), &array.images[1]).unwrap();
    mount(&array.images[1], "nofail,")
        .exits(FAILED)
        .says("one is a copy");
    fs::remove_file(array.path("copy")).unwrap();
    let spec = array.images[0].to_str().unwrap();
    let nowhere = [spec, "/none/there", "-o", "nofail"];
    called(&array, "mount.sheaf", &nowhere).exits(CALLED_WRONGLY);
    fs::write(&array.images[0], vec![0xa5; 64 << 20]).unwrap();
    mount(&array.images[0], "nofail,").exits(FAILED);
}

/// Labels and the number of the mount were written first: a copy of one member, made before, was an old one then.
#[test]
fn a_mistyped_mount_point_is_told_before_anything_is_written() {
    let array = Array::made(2);
    let before: Vec<_> = array.images.iter().map(|i| fs::read(i).unwrap()).collect();
    let file = array.path("file");
    fs::write(&file, "no folder").unwrap();
    for (at, word) in [
        (array.path("none"), "No such file"),
        (file.clone(), "ot a directory"),
        (file.join("below"), "ot a directory"),
    ] {
        let paths = [&array.images[..], &[at]].concat();
        for options in [&[][..], &["--foreground"]] {
            // Which the service is not started again after.
            let ran = sheaf(&["mount"], options, &paths).exits(USAGE);
            ran.says("mount point").says(word);
        }
    }
    for (image, before) in array.images.iter().zip(before) {
        assert!(fs::read(image).unwrap() == before, "it wrote");
    }
}

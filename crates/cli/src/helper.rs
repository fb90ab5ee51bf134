//! The names that mount(8), umount(8), mkfs(8) and fsck(8) call: `mount.sheaf`, `umount.fuse.sheaf`, `umount.fuseblk.sheaf`, `mkfs.sheaf` and
//! `fsck.sheaf` are this program under another name. Their conventions are turned into the
//! arguments of the commands, and exit codes into theirs: those of mount(8) and umount(8) are not those of fsck(8).

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::args::helpers::{FSCK_FLAGS, MOUNT_FLAGS};
use crate::failure::{Failure, USAGE};

/// What umount(8) calls, by the type that the mount table has.
const UMOUNT: [&str; 3] = ["umount.sheaf", "umount.fuse.sheaf", "umount.fuseblk.sheaf"];

/// To mount(8) and umount(8): called wrongly.
const MOUNT_USAGE: u8 = 1;
/// To them: what was asked for did not happen.
const MOUNT_FAILED: u8 = 32;

/// The name by which this program was called.
pub fn called_as(arguments: &[OsString]) -> String {
    let program = arguments.first().map(Path::new);
    let name = program.and_then(Path::file_name).and_then(OsStr::to_str);
    name.unwrap_or("sheaf").to_owned()
}

/// A command's exit code as who calls this name understands it.
pub fn exit_code(name: &str, code: u8) -> u8 {
    match code {
        code if name != "mount.sheaf" && !UMOUNT.contains(&name) => code,
        0 => 0,
        USAGE => MOUNT_USAGE,
        _ => MOUNT_FAILED,
    }
}

/// The arguments as if `sheaf` had been called.
pub fn translate(arguments: Vec<OsString>) -> Result<Vec<OsString>, Failure> {
    let name = called_as(&arguments);
    let rest = arguments.get(1..).unwrap_or_default();
    match name.as_str() {
        "mkfs.sheaf" => Ok(command("mkfs", rest.to_vec())),
        "mount.sheaf" if !asks_for_help(rest) => Ok(command("mount", mount(rest)?)),
        "mount.sheaf" => Ok(command("mount", rest.to_vec())),
        "fsck.sheaf" if rest.iter().any(|a| a == "-V") => {
            Ok(command("fsck", vec![OsString::from("-V")]))
        }
        "fsck.sheaf" => Ok(command("fsck", fsck(rest))),
        name if UMOUNT.contains(&name) => Ok(command("umount", umount(rest))),
        _ => Ok(arguments),
    }
}

fn asks_for_help(arguments: &[OsString]) -> bool {
    arguments
        .iter()
        .any(|a| a == "--help" || a == "-h" || a == "--version" || a == "-V")
}

fn command(name: &str, rest: Vec<OsString>) -> Vec<OsString> {
    [OsString::from("sheaf"), OsString::from(name)]
        .into_iter()
        .chain(rest)
        .collect()
}

/// How long mount(8) has us wait for devices. At system start they appear one after the other, and the link by
/// which fstab names the array is there with the first.
const PATIENCE: &str = "device_timeout=10";

/// `mount.sheaf SPEC DIR [-sfnv] [-N namespace] [-o options] [-t type.subtype]`.
fn mount(arguments: &[OsString]) -> Result<Vec<OsString>, Failure> {
    // Of options that contradict each other the last counts.
    let mut out = ["-o", PATIENCE].map(OsString::from).to_vec();
    let mut places = Vec::new();
    let (mut fake, mut may_be_absent) = (false, false);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let mut value = || {
            arguments
                .next()
                .cloned()
                .ok_or_else(|| Failure::usage(format!("{} needs a value", argument.display())))
        };
        match argument.to_str() {
            Some("-o") => {
                let options = value()?;
                let mut each = options.as_encoded_bytes().split(|byte| *byte == b',');
                may_be_absent |= each.any(|option| option.trim_ascii() == b"nofail");
                out.extend([OsString::from("-o"), options]);
            }
            Some("-t" | "-N") => drop(value()?),
            Some(flags) if is_flags(flags, MOUNT_FLAGS) => fake |= flags.contains('f'),
            Some(option) if option.starts_with('-') => out.push(argument.clone()),
            _ => places.push(argument.clone()),
        }
    }
    if fake {
        return Err(Failure::silent(0));
    }
    if places.len() < 2 {
        return Err(Failure::usage(
            "usage: mount.sheaf DEVICE DIRECTORY [-o OPTIONS]",
        ));
    }
    if may_be_absent {
        out.push(OsString::from("--may-be-absent"));
    }
    out.push(OsString::from("--"));
    out.extend(places);
    Ok(out)
}

/// fsck(8) and the system's start pass options of other checkers: -a and -p ask for what can be
/// done without questions, which here is the quick check, or with -f a check that repairs what
/// loses nothing; -y repairs, but accepts no device that was put back to an old copy, -n changes nothing.
fn fsck(arguments: &[OsString]) -> Vec<OsString> {
    let (mut automatic, mut force) = (false, false);
    let mut out = Vec::new();
    for argument in arguments {
        match argument.to_str() {
            Some(progress) if progress.starts_with("-C") => {}
            Some(flags) if is_flags(flags, FSCK_FLAGS) => {
                force |= flags.contains('f');
                automatic |= flags.contains(['a', 'p']);
                for flag in ['y', 'n'].into_iter().filter(|f| flags.contains(*f)) {
                    out.push(OsString::from(format!("-{flag}")));
                }
            }
            _ => out.push(argument.clone()),
        }
    }
    let asked = out.iter().any(|a| a == "-y" || a == "--repair");
    match (automatic && !asked, force) {
        (true, false) => out.insert(0, OsString::from("--quick")),
        (true, true) => out.insert(0, OsString::from("--preen")),
        _ => {}
    }
    if asked {
        out.insert(0, OsString::from("--unattended"));
    }
    out
}

/// `umount.sheaf DIR [-nlfvr] [-N namespace] [-t type.subtype]`; of the flags -l and -f mean
/// something here.
fn umount(arguments: &[OsString]) -> Vec<OsString> {
    let mut out = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            // The value may be missing: there is nothing to be done with it anyway.
            Some("-t" | "-N") => drop(arguments.next()),
            Some(flags) if is_flags(flags, "nlfvr") => {
                for flag in ['l', 'f'].into_iter().filter(|f| flags.contains(*f)) {
                    out.push(OsString::from(format!("-{flag}")));
                }
            }
            _ => out.push(argument.clone()),
        }
    }
    out
}

/// Whether this is one or more of these one-letter flags.
fn is_flags(text: &str, letters: &str) -> bool {
    text.strip_prefix('-')
        .is_some_and(|flags| !flags.is_empty() && flags.chars().all(|c| letters.contains(c)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(line: &str) -> String {
        let arguments = line.split(' ').map(OsString::from).collect();
        translate(arguments)
            .unwrap()
            .iter()
            .map(|a| a.to_str().unwrap())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn mount_8_can_call() {
        assert_eq!(
            translated("/sbin/mount.sheaf UUID=1 /mnt -n -o rw,noatime -t sheaf"),
            "sheaf mount -o device_timeout=10 -o rw,noatime -- UUID=1 /mnt"
        );
        assert_eq!(translated("mount.sheaf --help"), "sheaf mount --help");
        let fake = ["mount.sheaf", "a", "b", "-f"].map(OsString::from);
        assert_eq!(translate(fake.to_vec()).unwrap_err().code(), 0);
    }

    #[test]
    fn umount_8_can_call() {
        for (line, called) in [
            ("umount.fuse.sheaf -N 1 /mnt", "sheaf umount /mnt"),
            (
                "/sbin/umount.fuseblk.sheaf /mnt -n -v -r -t fuseblk.sheaf",
                "sheaf umount /mnt",
            ),
            ("umount.sheaf /mnt -lv", "sheaf umount /mnt -l"),
            (
                "umount.sheaf /mnt -f -l -N /proc/1/ns/mnt",
                "sheaf umount /mnt -f -l",
            ),
        ] {
            assert_eq!(translated(line), called);
        }
    }

    #[test]
    fn fsck_8_can_call() {
        assert_eq!(
            translated("fsck.sheaf -a -C0 /dev/sda"),
            "sheaf fsck --quick /dev/sda"
        );
        assert_eq!(
            translated("fsck.sheaf -f -p /dev/sda"),
            "sheaf fsck --preen /dev/sda"
        );
        assert_eq!(
            translated("fsck.sheaf -fy /dev/sda"),
            "sheaf fsck --unattended -y /dev/sda"
        );
        assert_eq!(
            translated("fsck.sheaf -y /dev/sda"),
            "sheaf fsck --unattended -y /dev/sda"
        );
        // As of all checkers; it asked for the devices.
        assert_eq!(translated("fsck.sheaf -V"), "sheaf fsck -V");
    }

    #[test]
    fn other_names_are_the_program_itself() {
        assert_eq!(translated("/usr/bin/sheaf info x"), "/usr/bin/sheaf info x");
    }
}

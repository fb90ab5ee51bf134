//! The names that mount(8) and fsck(8) call, for their manual: what these make of such arguments is in [`crate::helper`].

use clap::{Arg, ArgAction, Command};

/// Flags of mount(8) that `mount.sheaf` takes.
pub const MOUNT_FLAGS: &str = "sfnv";
/// Flags of fsck(8) and its checkers that `fsck.sheaf` takes.
pub const FSCK_FLAGS: &str = "apAnrlMPRTVfy";

/// As the pages of the manual are called, each with its command.
pub fn pages() -> [Command; 2] {
    [mount(), fsck()]
}

/// Its name is its letter.
fn flag(letter: &'static str, help: &'static str) -> Arg {
    Arg::new(letter)
        .short(letter.chars().next())
        .action(ArgAction::SetTrue)
        .help(help)
}

fn value(letter: &'static str, name: &'static str, help: &'static str) -> Arg {
    Arg::new(letter)
        .short(letter.chars().next())
        .value_name(name)
        .help(help)
}

fn mount() -> Command {
    let unused = "Taken, and means nothing here";
    Command::new("mount.sheaf")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Mount a Sheaf file system for mount(8)")
        .long_about(
            "What mount(8) runs for the type sheaf, as for a line of /etc/fstab. It does what sheaf-mount(8) does, but waits 10 seconds for \
             devices that are not there yet, unless device_timeout= says otherwise. Long options of sheaf-mount(8) that take no value are taken, too.",
        )
        .arg(
            Arg::new("DEVICE")
                .required(true)
                .help("The devices, separated by ':', or UUID=\u{2026} or LABEL=\u{2026}; one is enough if the others are found"),
        )
        .arg(Arg::new("DIRECTORY").required(true).help("The mount point"))
        .arg(value(
            "o",
            "OPTIONS",
            "Options of sheaf-mount(8) and of fstab(5), separated by commas. With nofail nothing is mounted where a device is not there, \
             and that is no failure",
        ))
        .arg(flag("f", "Fake: do nothing, and succeed"))
        .args(["s", "n", "v"].map(|letter| flag(letter, unused)))
        .arg(value("t", "TYPE", unused))
        .arg(value("N", "NAMESPACE", unused))
        .after_help("Exit status: those of mount(8): 0 mounted, 1 called wrongly, 32 not mounted.")
}

fn fsck() -> Command {
    let unused = "Taken, and means nothing here";
    Command::new("fsck.sheaf")
        .version(env!("CARGO_PKG_VERSION"))
        // It has one of its own.
        .disable_version_flag(true)
        .about("Check a Sheaf file system for fsck(8)")
        .long_about(
            "What fsck(8) and the system's start run for the type sheaf. It does what sheaf-fsck(8) does, but -a, -p, -f and -y mean what other \
             checkers mean by them. Without any of these it is a check that writes nothing. Long options of sheaf-fsck(8) are taken, too.",
        )
        .arg(
            Arg::new("DEVICES")
                .required(true)
                .num_args(1..)
                .help("The devices (also separated by ':', or UUID=\u{2026} or LABEL=\u{2026})"),
        )
        .arg(flag(
            "a",
            "What needs no questions: check that all devices are there and can be mounted, as sheaf-fsck(8) does with --quick; with -f, \
             check everything, and repair if nothing is lost by it, as with --preen",
        ))
        .arg(flag("p", "The same as -a"))
        .arg(flag("f", "Check everything though it looks clean, for -a and -p; others do so anyway"))
        .arg(flag(
            "y",
            "Repair, as sheaf-fsck(8) does with --repair, but accept no device that was put back to an old copy: only \
             sheaf fsck --repair does",
        ))
        .arg(flag("n", "Change nothing; exit with 4 if anything would be repaired"))
        .arg(flag("V", "Print the version, and do nothing else, where it stands alone"))
        .arg(value("C", "DESCRIPTOR", "Taken with its descriptor as one word, and means nothing here"))
        .args(["A", "r", "l", "M", "P", "R", "T"].map(|letter| flag(letter, unused)))
        .after_help(
            "Exit status: that of fsck(8): 0 no errors, 1 errors corrected, 4 errors left, or with -n anything that would be repaired, \
             8 operational error, 16 usage error.",
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_flag_that_is_taken_is_in_the_manual() {
        for (page, flags) in pages().iter_mut().zip([MOUNT_FLAGS, FSCK_FLAGS]) {
            page.clone().debug_assert();
            let has = |letter| {
                page.get_arguments()
                    .any(|arg| arg.get_short() == Some(letter))
            };
            assert!(flags.chars().all(has), "{}", page.get_name());
        }
    }
}

//! Why a command failed, in words for the user, and its exit code (those of fsck(8)).

use std::io;

use device::Array;
use serde::Serialize;

use crate::fsck::{is_outdated, with_remedy};
use crate::output::{one_line, shown, tell};

/// Errors are left on the devices.
pub const DAMAGED: u8 = 4;
/// Some other error kept the command from doing its work.
pub const OPERATIONAL: u8 = 8;
/// The command was called wrongly.
pub const USAGE: u8 = 16;

/// What went wrong, as it appears on standard output where `--json` was given.
#[derive(Serialize)]
pub struct Failed<'a> {
    pub error: &'a str,
    pub exit_code: u8,
}

/// What a command ends with: an exit code, or a failure to report.
pub type Outcome = Result<u8, Failure>;

#[derive(Debug)]
pub struct Failure {
    code: u8,
    /// One line, whatever names are in it, but of what has lines of its own ([`followed_by`](Self::followed_by)).
    message: Option<String>,
    absent_device: bool,
    device_in_use: bool,
}

impl Failure {
    /// Something did not work. The message names the thing and, where there is one, the remedy.
    pub fn new(message: impl Into<String>) -> Self {
        Failure::with(OPERATIONAL, &message.into())
    }

    /// What was looked at is damaged.
    pub fn damaged(message: impl Into<String>) -> Self {
        Failure::with(DAMAGED, &message.into())
    }

    /// The command was called wrongly.
    pub fn usage(message: impl Into<String>) -> Self {
        Failure::with(USAGE, &message.into())
    }

    fn with(code: u8, message: &str) -> Self {
        Failure {
            code,
            message: Some(one_line(message)),
            absent_device: false,
            device_in_use: false,
        }
    }

    /// An exit code that speaks for itself.
    pub fn silent(code: u8) -> Self {
        Failure {
            code,
            message: None,
            absent_device: false,
            device_in_use: false,
        }
    }

    /// An I/O error of something that has a name.
    pub fn io(name: impl std::fmt::Display, error: &io::Error) -> Self {
        Failure::new(format!("{name}: {error}"))
    }

    /// Of an error whose message says all.
    pub fn of(error: impl std::error::Error) -> Self {
        Failure::new(error.to_string())
    }

    /// Tells the user of a failure after which the command goes on.
    pub fn tell(&self) {
        if let Some(message) = &self.message {
            tell(format!("sheaf: {message}"));
        }
    }

    pub fn message(&self) -> Option<&str> {
        self.message.as_deref()
    }

    /// As `--json` shows it; nothing of what speaks for itself.
    pub fn shown(&self) -> Option<Failed<'_>> {
        let error = self.message()?;
        Some(Failed {
            error,
            exit_code: self.code,
        })
    }

    pub fn code(&self) -> u8 {
        self.code
    }

    /// A device, or the file system that is named, is not there.
    pub fn is_of_absent_device(&self) -> bool {
        self.absent_device
    }

    /// Somebody else has a device.
    pub fn is_of_device_in_use(&self) -> bool {
        self.device_in_use
    }

    /// With another exit code.
    pub fn with_code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    /// A file system does not open, or not for writing. Of damage, with what tells more, and what a repair would do; of a device that was put
    /// back to an old copy with that remedy.
    pub fn unopened(error: fs::Error, array: &Array) -> Self {
        let damaged = matches!(error, fs::Error::Damage(_) | fs::Error::Damaged { .. });
        let outdated = damaged && is_outdated(array);
        let failure = Failure::new(error.to_string());
        if outdated {
            return with_remedy(failure, &error);
        }
        if !damaged {
            return failure;
        }
        let devices = array.device_names().join(" ");
        failure.after(format!(
            "the file system is damaged: `sheaf fsck {devices}` says where, and `sheaf fsck --repair -n {devices}` what a repair would do"
        ))
    }

    /// With more words after the message.
    pub fn after(mut self, more: impl std::fmt::Display) -> Self {
        let more = one_line(&more.to_string());
        self.message = self.message.map(|m| format!("{m}; {more}"));
        self
    }

    /// With more lines below the message.
    pub fn followed_by(mut self, lines: &str) -> Self {
        for line in lines.lines() {
            let line = one_line(line);
            self.message = self.message.map(|m| format!("{m}\n{line}"));
        }
        self
    }

    /// With more words before the message.
    pub fn at(mut self, context: impl std::fmt::Display) -> Self {
        let context = one_line(&context.to_string());
        self.message = self.message.map(|m| format!("{context}: {m}"));
        self
    }
}

fn is_of_absent_device(error: &device::Error) -> bool {
    match error {
        device::Error::NotFound { .. } | device::Error::Missing { .. } => true,
        device::Error::Open { source, .. } => matches!(
            source.raw_os_error(),
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM)
        ),
        _ => false,
    }
}

fn is_wrong_path(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
        || error.kind() == io::ErrorKind::NotADirectory
}

impl From<device::Error> for Failure {
    fn from(error: device::Error) -> Self {
        match error {
            device::Error::GivenTwice { .. }
            | device::Error::NoDevices
            | device::Error::NotADevice { .. }
            | device::Error::Foreign { .. }
            | device::Error::NameTooLong { .. }
            | device::Error::ControlInName { .. } => Failure::usage(error.to_string()),
            error => Failure {
                absent_device: is_of_absent_device(&error),
                device_in_use: matches!(error, device::Error::InUse { .. }),
                ..Failure::new(error.to_string())
            },
        }
    }
}

impl From<format::Damage> for Failure {
    fn from(error: format::Damage) -> Self {
        Failure::new(error.to_string())
    }
}

impl From<fs::Error> for Failure {
    fn from(error: fs::Error) -> Self {
        Failure::new(error.to_string())
    }
}

impl From<bench::Error> for Failure {
    fn from(error: bench::Error) -> Self {
        match error {
            bench::Error::Usage(message) => Failure::usage(message),
            error => Failure::new(error.to_string()),
        }
    }
}

impl From<mount::Error> for Failure {
    fn from(error: mount::Error) -> Self {
        let told = error.to_string();
        match &error {
            mount::Error::UnknownOption(_)
            | mount::Error::BadOption { .. }
            | mount::Error::Remount
            | mount::Error::BadPath(_) => Failure::usage(told),
            // A path that leads nowhere, or to no folder.
            mount::Error::MountPoint { error, .. }
            | mount::Error::Ask { error, .. }
            | mount::Error::Scrub { error, .. }
            | mount::Error::Trim { error, .. }
                if is_wrong_path(error) =>
            {
                Failure::usage(told)
            }
            mount::Error::Ask { mountpoint, error }
            | mount::Error::Scrub { mountpoint, error }
            | mount::Error::Trim { mountpoint, error }
                if error.raw_os_error() == Some(libc::ENOTCONN) =>
            {
                let at = shown(mountpoint);
                Failure::new(told).after(format!(
                    "its daemon has died: `sheaf umount {at}` cleans up, and what was synced is safe"
                ))
            }
            mount::Error::Trim { error, .. } if error.raw_os_error() == Some(libc::EPERM) => {
                Failure::new(told).after("run it as root")
            }
            mount::Error::Ask { error, .. } | mount::Error::Scrub { error, .. }
                if error.raw_os_error() == Some(libc::EPERM) =>
            {
                Failure::new(told).after("run it as root, or as the user whose daemon it is")
            }
            _ => Failure::new(told),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// "Operation not permitted", and whose it was to be was not said.
    #[test]
    fn who_may_not_ask_a_daemon_is_told_who_may() {
        let (mountpoint, error) = (PathBuf::from("/data"), || {
            io::Error::from_raw_os_error(libc::EPERM)
        });
        let at = || mountpoint.clone();
        for (refused, who) in [
            (
                mount::Error::Ask {
                    mountpoint: at(),
                    error: error(),
                },
                "user whose daemon",
            ),
            (
                mount::Error::Scrub {
                    mountpoint: at(),
                    error: error(),
                },
                "user whose daemon",
            ),
            (
                mount::Error::Trim {
                    mountpoint: at(),
                    error: error(),
                },
                "run it as root",
            ),
        ] {
            let failure = Failure::from(refused);
            assert!(failure.message().unwrap().contains(who), "{failure:?}");
        }
    }
}

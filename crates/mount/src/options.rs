//! Mount options: one text, as in fstab, to a value.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::Error;

/// When reading updates the access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtimePolicy {
    /// If it is older than the last change, or than a day.
    #[default]
    Relative,
    Never,
    Always,
}

/// Takes the options that are not for the mount: name and value, to whether it knows them.
pub type OtherOptions<'a> = dyn FnMut(&str, Option<&str>) -> Result<bool, Error> + 'a;

/// What `-o` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    pub read_only: bool,
    /// Others than the mounting user may use the mount. By default: when root mounts.
    pub allow_other: Option<bool>,
    pub no_dev: bool,
    pub no_suid: bool,
    pub no_exec: bool,
    /// Symbolic links can be read, and lead nowhere.
    pub no_symlink_follow: bool,
    /// Every write is on the devices before it returns.
    pub sync: bool,
    /// Every change of a directory is on the devices before it returns.
    pub dirsync: bool,
    pub atime: AtimePolicy,
    /// Listing a directory leaves its access time alone. The kernel leaves that to the daemon.
    pub no_diratime: bool,
    /// The largest READ in bytes, for tests; the default is 1 MiB.
    pub max_read: Option<u32>,
    /// The first column of /proc/mounts, where the source is not a block device.
    pub fsname: Option<String>,
    /// The type is shown as `fuse.SUBTYPE`; the default is `sheaf`.
    pub subtype: Option<String>,
    /// Worker threads at most.
    pub workers: Option<usize>,
    pub fuse_io: FuseIo,
    /// Extended attributes, access lists among them, can neither be read nor set, nor do lists count, and the kernel asks for none.
    pub no_xattr: bool,
}

/// How requests come from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FuseIo {
    /// By reads of /dev/fuse.
    #[default]
    Dev,
    /// By io_uring, if the kernel offers that. A trial: see decision 0032 for what is known of it.
    Auto,
    /// The same; where the kernel's parameter for it is off, or rings cannot be served, there is no mount.
    Uring,
}

/// Options of fstab and mount(8) that are not for the file system.
const IGNORED: &[&str] = &[
    "",
    "defaults",
    "rw",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "_netdev",
    "nofail",
    "async",
    "suid",
    "dev",
    "exec",
    "diratime",
    "lazytime",
    "nolazytime",
    "default_permissions",
    "iversion",
    "noiversion",
    "nomand",
    "silent",
    "loud",
];

impl MountOptions {
    /// Parses comma-separated options; the last of contradicting ones counts. An unknown one
    /// is an error that names it.
    pub fn parse(text: &str) -> Result<Self, Error> {
        Self::parse_with(text, &mut |_, _| Ok(false))
    }

    /// Like [`parse`](Self::parse); an option that is not for the mount itself is offered to
    /// `other` as name and value, which says whether it knows it.
    pub fn parse_with(text: &str, other: &mut OtherOptions<'_>) -> Result<Self, Error> {
        let mut options = MountOptions::default();
        for item in text.split(',').map(str::trim) {
            let (name, value) = match item.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (item, None),
            };
            let known = match value {
                None => options.set_flag(name)?,
                Some(value) => options.set_value(name, value)?,
            };
            if !known && !other(name, value)? {
                return Err(Error::UnknownOption(item.to_owned()));
            }
        }
        Ok(options)
    }

    /// Allows no more workers than whose buffers fit into `bytes`, but a few in any case; a number given as an option counts, and what it takes beyond that is
    /// returned.
    pub fn limit_workers(&mut self, bytes: usize) -> usize {
        const WORKERS_FEW: usize = 4;
        let fit = bytes / crate::transport::WORKER_BYTES;
        let most = crate::session::Config::default().workers_max;
        let workers = *self.workers.get_or_insert(fit.max(WORKERS_FEW).min(most));
        workers.saturating_sub(fit.max(WORKERS_FEW)) * crate::transport::WORKER_BYTES
    }

    fn set_flag(&mut self, name: &str) -> Result<bool, Error> {
        match name {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.allow_other = Some(true),
            "noallow_other" => self.allow_other = Some(false),
            "nodev" => self.no_dev = true,
            "dev" => self.no_dev = false,
            "nosuid" => self.no_suid = true,
            "suid" => self.no_suid = false,
            "noexec" => self.no_exec = true,
            "exec" => self.no_exec = false,
            "nosymfollow" => self.no_symlink_follow = true,
            "symfollow" => self.no_symlink_follow = false,
            "sync" => self.sync = true,
            "async" => self.sync = false,
            "dirsync" => self.dirsync = true,
            "noatime" => self.atime = AtimePolicy::Never,
            // Without an update policy of its own, `atime` means the default.
            "atime" | "relatime" => self.atime = AtimePolicy::Relative,
            "norelatime" | "strictatime" => self.atime = AtimePolicy::Always,
            "nostrictatime" => self.atime = AtimePolicy::Relative,
            "nodiratime" => self.no_diratime = true,
            "noxattr" => self.no_xattr = true,
            "xattr" => self.no_xattr = false,
            "diratime" => self.no_diratime = false,
            // mount(8) implies these for `user` and `owner` mounts.
            "user" | "users" => self.is_of_user(),
            "owner" | "group" => (self.no_dev, self.no_suid) = (true, true),
            "remount" => return Err(Error::Remount),
            _ => return Ok(IGNORED.contains(&name) || is_comment(name)),
        }
        Ok(true)
    }

    /// As anybody may mount it.
    fn is_of_user(&mut self) {
        (self.no_dev, self.no_suid, self.no_exec) = (true, true, true);
    }

    fn set_value(&mut self, name: &str, value: &str) -> Result<bool, Error> {
        let bad = |expected: &str| Error::BadOption {
            name: name.to_owned(),
            value: value.to_owned(),
            expected: expected.to_owned(),
        };
        let name_only = || bad("a name without commas, backslashes and control characters");
        match name {
            "max_read" => {
                let bytes = within(value, &MAX_READ);
                self.max_read = Some(bytes.map_err(|range| bad(&range))?);
            }
            "workers" => {
                let workers = within(value, &WORKERS);
                self.workers = Some(workers.map_err(|range| bad(&range))?);
            }
            "fuse_io" => {
                self.fuse_io = match value {
                    "auto" => FuseIo::Auto,
                    "dev" => FuseIo::Dev,
                    "uring" => FuseIo::Uring,
                    _ => return Err(bad("one of auto, dev, uring")),
                }
            }
            // So mount(8) says who it was.
            "user" => self.is_of_user(),
            "fsname" => self.fsname = Some(plain(value).ok_or_else(name_only)?),
            "subtype" => self.subtype = Some(plain(value).ok_or_else(name_only)?),
            _ => return Ok(is_comment(name)),
        }
        Ok(true)
    }
}

/// Of less the kernel makes a page; for more it never asks.
const MAX_READ: RangeInclusive<u32> = 4096..=crate::transport::DATA_MAX as u32;
const WORKERS: RangeInclusive<usize> = 2..=1024;

/// A number of a range, or what the range is.
fn within<T: FromStr + PartialOrd + Display>(
    value: &str,
    range: &RangeInclusive<T>,
) -> Result<T, String> {
    let number = value.parse().ok();
    number
        .filter(|number| range.contains(number))
        .ok_or_else(|| format!("a number from {} to {}", range.start(), range.end()))
}

/// `x-…` options and `comment=` are for other programs that read fstab.
fn is_comment(name: &str) -> bool {
    name == "comment" || name.starts_with("x-") || name.starts_with("X-")
}

/// A value that cannot break out of the kernel's option string or a mount table.
fn plain(value: &str) -> Option<String> {
    let fine = |c: char| !c.is_control() && c != ',' && c != '\\';
    (!value.is_empty() && value.chars().all(fine)).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fstab_options_are_understood() {
        let options = MountOptions::parse(
            "defaults,_netdev,nofail,x-systemd.automount,x-gvfs-name=a,ro,noatime,nosuid,noxattr",
        )
        .unwrap();
        assert!(options.read_only && options.no_suid && !options.no_dev);
        assert_eq!(options.atime, AtimePolicy::Never);
        assert!(options.no_xattr && !MountOptions::parse("noxattr,xattr").unwrap().no_xattr);
        assert_eq!(MountOptions::parse("").unwrap(), MountOptions::default());
        assert!(!MountOptions::parse("ro,rw").unwrap().read_only);
    }

    /// mount(8) names the user who may unmount it: such a line of fstab was of use to root only.
    #[test]
    fn an_ordinary_user_mounts_what_fstab_lets_him() {
        let of = |options: MountOptions| (options.no_exec, options.no_suid, options.no_dev);
        for text in ["user=fred", "rw,noexec,nosuid,nodev,user=fred", "user"] {
            let options = MountOptions::parse(text).unwrap();
            assert_eq!(of(options), (true, true, true), "{text}");
        }
        let options = MountOptions::parse("user=fred,exec").unwrap();
        assert_eq!(of(options), (false, true, true));
    }

    #[test]
    fn symbolic_links_need_not_be_followed() {
        let parsed = |text| MountOptions::parse(text).unwrap().no_symlink_follow;
        assert!(parsed("nosymfollow") && !parsed("nosymfollow,symfollow") && !parsed(""));
    }

    #[test]
    fn an_unknown_option_is_named() {
        let error = MountOptions::parse("ro,frobnicate=3").unwrap_err();
        assert!(error.to_string().contains("frobnicate=3"), "{error}");
        // Nobody learned what they may be, and of a number of bytes that is no size the kernel made another one.
        for (option, word) in [
            ("workers=0", "from 2 to 1024"),
            ("workers=1", "from 2 to 1024"),
            ("workers=1000000", "from 2 to 1024"),
            ("workers=many", "from 2 to 1024"),
            ("max_read=0", "from 4096 to 1048576"),
            ("max_read=4095", "from 4096 to 1048576"),
            ("max_read=1048577", "from 4096 to 1048576"),
            ("fuse_io=fast", "auto, dev, uring"),
        ] {
            let error = MountOptions::parse(option).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        for option in ["max_read=4096", "max_read=1048576", "workers=2"] {
            MountOptions::parse(option).unwrap();
        }
        assert!(MountOptions::parse("fsname=a\\b").is_err());
        assert!(MountOptions::parse("remount,ro").is_err());
    }

    #[test]
    fn the_caller_may_add_options_of_its_own() {
        let mut seen = Vec::new();
        MountOptions::parse_with("discard,cache_size=1G", &mut |name, value| {
            seen.push((name.to_owned(), value.map(str::to_owned)));
            Ok(true)
        })
        .unwrap();
        assert_eq!(
            seen,
            [
                ("discard".to_owned(), None),
                ("cache_size".to_owned(), Some("1G".to_owned()))
            ]
        );
    }
}

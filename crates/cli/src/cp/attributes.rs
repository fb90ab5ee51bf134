//! What of a file is beside its content: owner, mode, times, extended attributes and access lists.

use std::ffi::{OsStr, OsString};
use std::fs::{self as host, File, Permissions};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use base::clock::Timestamp;
use fs::{Attr, Ino, SetAttr, SetTime};
use rustix::fs::{self as calls, AtFlags, CWD, Gid, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use super::Copy;
use super::folders::path_to;
use crate::failure::Failure;
use crate::output::{harmless, shown};

/// A change of the owner takes these away, so they come after it.
const CAPABILITY: &[u8] = b"security.capability";
/// What a new file may have got from its folder.
const LISTS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
/// The most that Linux has of a value, and of all names.
const ATTRIBUTE_MAX: usize = 64 << 10;

/// A file of the host.
pub struct HostFile<'a> {
    pub path: &'a Path,
    pub held: Held<'a>,
}

/// How a file is reached: by a descriptor, so that it stays the one that was looked at.
pub enum Held<'a> {
    Open(&'a File),
    /// What is never opened to be read or written: a link, or a special file.
    Located(&'a File),
}

impl HostFile<'_> {
    fn attribute_names(&self) -> io::Result<Vec<OsString>> {
        let mut names = vec![0; ATTRIBUTE_MAX];
        let listed = match self.held {
            Held::Open(file) => calls::flistxattr(file, &mut names[..]),
            Held::Located(file) => calls::listxattr(path_to(file), &mut names[..]),
        };
        let len = match listed {
            Err(Errno::OPNOTSUPP) => 0,
            other => other?,
        };
        let names = names[..len].split(|byte| *byte == 0);
        Ok(names
            .filter(|name| !name.is_empty())
            .map(|name| OsString::from_vec(name.to_vec()))
            .collect())
    }

    fn attribute(&self, name: &OsStr) -> io::Result<Vec<u8>> {
        let mut value = vec![0; ATTRIBUTE_MAX];
        let len = match self.held {
            Held::Open(file) => calls::fgetxattr(file, name, &mut value[..])?,
            Held::Located(file) => calls::getxattr(path_to(file), name, &mut value[..])?,
        };
        value.truncate(len);
        Ok(value)
    }

    fn set_attribute(&self, name: &[u8], value: &[u8]) -> io::Result<()> {
        let flags = XattrFlags::empty();
        match self.held {
            Held::Open(file) => calls::fsetxattr(file, name, value, flags)?,
            Held::Located(file) => calls::setxattr(path_to(file), name, value, flags)?,
        }
        Ok(())
    }

    /// Removes an attribute if there is one.
    fn unset_attribute(&self, name: &[u8]) -> io::Result<()> {
        let removed = match self.held {
            Held::Open(file) => calls::fremovexattr(file, name),
            Held::Located(file) => calls::removexattr(path_to(file), name),
        };
        match removed {
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
            other => Ok(other?),
        }
    }

    fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        match self.held {
            Held::Open(file) => fchown(file, uid, gid),
            Held::Located(file) => {
                let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                Ok(calls::chownat(file, "", uid, gid, AtFlags::EMPTY_PATH)?)
            }
        }
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        let mode = Permissions::from_mode(mode);
        match self.held {
            Held::Open(file) => file.set_permissions(mode),
            Held::Located(file) => host::set_permissions(path_to(file), mode),
        }
    }

    fn set_times(&self, times: &Timestamps) -> io::Result<()> {
        match self.held {
            Held::Open(file) => calls::futimens(file, times)?,
            Held::Located(file) => match calls::utimensat(file, "", times, AtFlags::EMPTY_PATH) {
                // Linux before 5.8.
                Err(Errno::INVAL) => {
                    calls::utimensat(CWD, path_to(file), times, AtFlags::empty())?;
                }
                done => done?,
            },
        }
        Ok(())
    }
}

/// Seconds and nanoseconds for the host.
fn timespec(time: Timestamp) -> Timespec {
    Timespec {
        tv_sec: time.sec(),
        tv_nsec: i64::from(time.nsec()),
    }
}

impl Copy<'_> {
    fn tell_unkept(&self, name: &str, what: &str, error: impl std::fmt::Display) {
        self.tell_of(Err(Failure::new(format!(
            "{name}: {what} not kept: {error}"
        ))));
    }

    /// Gives a copy on the host what the original has inside.
    pub fn keep_outwards(&self, attr: &Attr, copy: &HostFile<'_>) {
        let name = shown(copy.path);
        let unkept = |what: &str, error: &io::Error| self.tell_unkept(&name, what, error);
        let mut mode = attr.mode & 0o7777;
        match copy.set_owner(Some(attr.uid), Some(attr.gid)) {
            Ok(()) => {}
            // As with cp(1), who is not root keeps the group at most, and no rights that were another's.
            Err(error) if is_refused(&error) && !rustix::process::geteuid().is_root() => {
                mode &= !libc::S_ISUID;
                if copy.set_owner(None, Some(attr.gid)).is_err() {
                    mode &= !libc::S_ISGID;
                }
            }
            Err(error) => {
                mode &= !(libc::S_ISUID | libc::S_ISGID);
                unkept("owner and group", &error);
            }
        }
        let attributes = self.attributes_inside(attr.ino, &name);
        let set = |attribute: &[u8], value: &[u8]| {
            if let Err(error) = copy.set_attribute(attribute, value) {
                unkept(&harmless(attribute), &error);
            }
        };
        for list in LISTS {
            let has_it = attributes.iter().any(|(attribute, _)| attribute == list);
            if !has_it
                && !attr.is_symlink()
                && let Err(error) = copy.unset_attribute(list)
            {
                unkept(&harmless(list), &error);
            }
        }
        for (attribute, value) in &attributes {
            if attribute != CAPABILITY {
                set(attribute, value);
            }
        }
        if !attr.is_symlink()
            && let Err(error) = copy.set_mode(mode)
        {
            unkept("mode", &error);
        }
        for (attribute, value) in &attributes {
            if attribute == CAPABILITY {
                set(attribute, value);
            }
        }
        let times = Timestamps {
            last_access: timespec(attr.atime),
            last_modification: timespec(attr.mtime),
        };
        if let Err(error) = copy.set_times(&times) {
            unkept("times", &error);
        }
    }

    /// The extended attributes of something inside; tells of those that cannot be read.
    fn attributes_inside(&self, ino: Ino, copy: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
        let names = match self.offline.fs.listxattr(ino) {
            Ok(names) => names,
            Err(error) => {
                self.tell_unkept(copy, "attributes", error);
                return Vec::new();
            }
        };
        let mut found = Vec::new();
        for name in names.split(|byte| *byte == 0).filter(|n| !n.is_empty()) {
            match self.offline.fs.getxattr(ino, name) {
                Ok(value) => found.push((name.to_vec(), value)),
                Err(error) => self.tell_unkept(copy, &harmless(name), error),
            }
        }
        found
    }

    /// Gives a copy inside what the original has on the host.
    pub fn keep_inwards(&self, from: &HostFile<'_>, meta: &host::Metadata, copy: Ino) {
        let (fs, who) = (&self.offline.fs, &self.who);
        let name = shown(from.path);
        let attributes = self.attributes_of_host(from, &name);
        for list in LISTS {
            let has_it = attributes.iter().any(|(attribute, _)| attribute == list);
            if !has_it
                && !meta.is_symlink()
                && let Err(error) = fs.removexattr(who, copy, list)
            {
                self.tell_unkept(&name, &harmless(list), error);
            }
        }
        let set = |attribute: &[u8], value: &[u8]| {
            if let Err(error) = fs.setxattr(who, copy, attribute, value, 0) {
                self.tell_unkept(&name, &harmless(attribute), error);
            }
        };
        for (attribute, value) in &attributes {
            if attribute != CAPABILITY {
                set(attribute, value);
            }
        }
        let at = |sec, nsec| Some(SetTime::At(Timestamp::new(sec, nsec as u32)));
        let change = SetAttr {
            mode: (!meta.is_symlink()).then(|| meta.mode() & 0o7777),
            uid: Some(meta.uid()),
            gid: Some(meta.gid()),
            atime: at(meta.atime(), meta.atime_nsec()),
            mtime: at(meta.mtime(), meta.mtime_nsec()),
            ..SetAttr::default()
        };
        if let Err(error) = fs.setattr(who, copy, &change) {
            self.tell_unkept(&name, "owner, mode and times", error);
        }
        for (attribute, value) in &attributes {
            if attribute == CAPABILITY {
                set(attribute, value);
            }
        }
    }

    /// The extended attributes of something on the host; tells of those that cannot be read.
    fn attributes_of_host(&self, from: &HostFile<'_>, name: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
        let names = match from.attribute_names() {
            Ok(names) => names,
            Err(error) => {
                self.tell_unkept(name, "attributes", error);
                return Vec::new();
            }
        };
        let mut found = Vec::new();
        for attribute in names {
            match from.attribute(&attribute) {
                Ok(value) => found.push((attribute.into_vec(), value)),
                Err(error) => self.tell_unkept(name, &harmless(attribute.as_bytes()), error),
            }
        }
        found
    }
}

fn is_refused(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EPERM)
}

//! /proc/self/mountinfo: what is mounted where, without touching it.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

const TABLE: &str = "/proc/self/mountinfo";

/// One line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountedAt {
    /// `MAJOR:MINOR` of the file system.
    pub device: String,
    pub mountpoint: PathBuf,
    /// `fuse.sheaf`, say.
    pub kind: String,
    pub source: OsString,
}

impl MountedAt {
    /// A mount that a Sheaf daemon serves, or served.
    pub fn is_sheaf(&self) -> bool {
        self.is_of("sheaf")
    }

    /// A FUSE mount of this subtype.
    pub fn is_of(&self, subtype: &str) -> bool {
        ["fuse.", "fuseblk."]
            .iter()
            .any(|kind| self.kind.strip_prefix(kind) == Some(subtype))
    }

    /// Whether files of this device number lie in it.
    pub fn is_of_device(&self, number: u64) -> bool {
        self.device == format!("{}:{}", libc::major(number), libc::minor(number))
    }

    /// The name of its directory in the FUSE control file system: the device number as the
    /// kernel counts it.
    pub fn connection(&self) -> Option<String> {
        let (major, minor) = self.device.split_once(':')?;
        let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
        Some(((major << 20) | minor).to_string())
    }

    pub fn on_block_device(&self) -> bool {
        self.kind.starts_with("fuseblk")
    }
}

/// The topmost mount at exactly `mountpoint` (absolute, without symbolic links).
pub fn find(mountpoint: &Path) -> std::io::Result<Option<MountedAt>> {
    Ok(find_in(&read()?, mountpoint))
}

/// Everything that is mounted.
pub fn all() -> std::io::Result<Vec<MountedAt>> {
    let table = read()?;
    Ok(table.split(|&b| b == b'\n').filter_map(parse).collect())
}

fn read() -> std::io::Result<Vec<u8>> {
    std::fs::read(TABLE).map_err(|error| match error.kind() {
        ErrorKind::NotFound => std::io::Error::other(format!(
            "{TABLE} is not there: /proc has to be mounted (`mount -t proc proc /proc`)"
        )),
        _ => error,
    })
}

fn find_in(table: &[u8], mountpoint: &Path) -> Option<MountedAt> {
    // Later lines cover earlier ones.
    let lines = table.split(|&b| b == b'\n');
    lines
        .filter_map(parse)
        .rfind(|m| m.mountpoint == mountpoint)
}

fn parse(line: &[u8]) -> Option<MountedAt> {
    let mut fields = line.split(|&b| b == b' ');
    let device = fields.nth(2)?;
    let mountpoint = fields.nth(1)?;
    // A variable number of optional fields ends with a dash.
    fields.find(|f| *f == b"-")?;
    let kind = fields.next()?;
    let source = fields.next()?;
    Some(MountedAt {
        device: String::from_utf8(device.to_vec()).ok()?,
        mountpoint: PathBuf::from(unescape(mountpoint)),
        kind: String::from_utf8_lossy(kind).into_owned(),
        source: unescape(source),
    })
}

/// The table writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| byte == b'\\').and_then(|d| {
            let digits = std::str::from_utf8(d).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        match octal {
            Some(value) => {
                out.push(value);
                rest = &after[3..];
            }
            None => {
                out.push(byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(out)
}

/// `path` made absolute and free of symbolic links without looking at what is mounted
/// there: the file system may be dead or hanging.
pub fn resolve(path: &Path) -> std::io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
        // The root, or a path that ends in `..`: where that leads, only the way there tells.
        return std::fs::canonicalize(&absolute);
    };
    let parent = std::fs::canonicalize(parent)?;
    let resolved = parent.join(name);
    // The mount point itself may be reached through a link; a mounted one never is a link.
    if find(&resolved)?.is_none() && resolved.is_symlink() {
        return std::fs::canonicalize(&resolved);
    }
    Ok(resolved)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    const TABLE: &[u8] = b"22 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw\n\
        40 22 0:33 / /mnt/a\\040b rw - fuse.sheaf images rw,user_id=0\n\
        41 22 0:34 / /mnt/x rw - tmpfs tmpfs rw\n\
        42 22 0:35 / /mnt/x rw - fuseblk.sheaf /dev/sda rw\n\
        broken line\n";

    #[test]
    fn the_topmost_mount_is_found_by_its_unescaped_path() {
        let m = find_in(TABLE, Path::new("/mnt/a b")).unwrap();
        assert!(m.is_sheaf() && !m.on_block_device());
        assert_eq!(
            (m.device.as_str(), m.source.as_bytes()),
            ("0:33", &b"images"[..])
        );
        let m = find_in(TABLE, Path::new("/mnt/x")).unwrap();
        assert!(m.is_sheaf() && m.on_block_device());
        assert_eq!(m.connection().unwrap(), "35");
        assert!(find_in(TABLE, Path::new("/mnt")).is_none());
        assert!(!find_in(TABLE, Path::new("/")).unwrap().is_sheaf());
    }

    /// A path that ends in `..` was taken for the root, and an array mounted over that.
    #[test]
    fn a_path_that_ends_in_dots_leads_to_the_folder_above() {
        let folder = tempfile::TempDir::new().unwrap();
        let folder = folder.path();
        let sub = folder.join("point/sub");
        std::fs::create_dir_all(&sub).unwrap();
        std::os::unix::fs::symlink(&sub, folder.join("link")).unwrap();
        let point = std::fs::canonicalize(folder.join("point")).unwrap();
        let resolved = |path: &str| resolve(&folder.join(path));
        for path in [
            "point",
            "point/",
            "point/.",
            "point/sub/..",
            "point/sub/../",
            "point/sub/../.",
            "point/sub/../../point",
            "link/..",
        ] {
            assert_eq!(resolved(path).unwrap(), point, "{path}");
        }
        assert_eq!(resolved("link").unwrap(), point.join("sub"));
        assert_eq!(resolved("new").unwrap(), point.with_file_name("new"));
        assert!(resolved("none/..").is_err());
        for path in ["/", "/..", "/./", "//"] {
            assert_eq!(resolve(Path::new(path)).unwrap(), Path::new("/"), "{path}");
        }
    }
}

//! Tests that cannot run on a machine for want of something say so, and are not taken for ones that have passed.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file to which each skipped test adds a line: its package and name, a tab, and what is missing.
pub const SKIPPED: &str = "SHEAF_SKIPPED";

/// The device by which the kernel passes on what is asked of a mount.
const FUSE: &str = "/dev/fuse";
/// By what those mount who are not root.
const MOUNT_HELPER: &str = "fusermount3";

/// What tests under a mount lack on this machine.
pub fn missing_for_mounts() -> Option<&'static str> {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let helper = std::env::split_paths(&path).any(|dir| dir.join(MOUNT_HELPER).is_file());
    match Path::new(FUSE).exists() {
        false => Some(FUSE),
        true if is_root || helper => None,
        true => Some(MOUNT_HELPER),
    }
}

/// Notes that the calling test, or a part of it, is not run for want of `what`; it returns then.
pub fn skip(what: &str) {
    eprintln!("skipped: no {what}");
    let Some(path) = std::env::var_os(SKIPPED) else {
        return;
    };
    let thread = std::thread::current();
    let (package, name) = (std::env::var("CARGO_PKG_NAME"), thread.name());
    let (package, name) = (package.unwrap_or_default(), name.unwrap_or("unknown"));
    let line = format!("{package}::{name}\t{what}\n");
    let file = OpenOptions::new().append(true).create(true).open(&path);
    let noted = file.and_then(|mut file| file.write_all(line.as_bytes()));
    noted.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

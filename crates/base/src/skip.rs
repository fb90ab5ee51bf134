//! Tests that cannot run on a machine for want of something say so, and are not taken for ones that have passed.

use std::fs::OpenOptions;
use std::io::Write;

/// A file to which each skipped test adds a line: its package and name, a tab, and what is missing.
pub const SKIPPED: &str = "SHEAF_SKIPPED";

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

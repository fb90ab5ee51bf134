use std::sync::Arc;

use fs::Caller;

use super::SheafOps;
use crate::atomic::tests::file_system;
use crate::ops::{Context, Operations};
use crate::options::MountOptions;

/// It was found by its file handle while its blocks went, step by step; then its number went to another file, which the kernel took for it.
#[test]
fn a_file_that_is_being_deleted_is_not_found_by_its_handle() {
    let dir = tempfile::tempdir().unwrap();
    let fs = file_system(dir.path());
    let who = Caller::root();
    let attr = fs.mknod(&who, fs::ROOT, b"f", libc::S_IFREG | 0o600, 0);
    let attr = attr.unwrap();
    let ops = SheafOps::new(Arc::clone(&fs), &MountOptions::default());
    let looked = || ops.lookup(&Context::default(), attr.ino.0, b".");
    looked().unwrap();
    fs.unlink(&who, fs::ROOT, b"f").unwrap();
    assert_eq!(looked().unwrap_err().0, libc::ESTALE);
    // Its deletion stops before the inode goes, as nothing is changed from now on.
    fs.close().unwrap();
    ops.forget(attr.ino.0, 1);
    assert!(fs.getattr(attr.ino).is_ok());
    assert_eq!(looked().unwrap_err().0, libc::ESTALE);
}

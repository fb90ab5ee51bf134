//! Devices that somebody has in use who may be gone.

use crate::{BlockDevice, Claim, Error, OpenOptions, claim, open_devices};
use base::clock;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PAUSE_NS: u64 = 50_000_000;

/// As [`open_devices`], but waits a little for one in use: the kernel may hold the devices of a process that was
/// killed until the I/O that it had begun is over, which takes longer on a busy machine. Two seconds where a living process has it, at most ten.
///
/// # Errors
/// Those of [`open_devices`]: [`Error::InUse`], when somebody still has it then.
pub fn open_when_free(
    paths: &[PathBuf],
    options: &OpenOptions,
) -> Result<Vec<Arc<dyn BlockDevice>>, Error> {
    when_free(|| open_devices(paths, options))
}

/// As [`claim`], but waits so.
///
/// # Errors
/// Those of [`claim`]: [`Error::InUse`], when somebody still has it then.
pub fn claim_when_free(paths: &[PathBuf]) -> Result<Claim, Error> {
    when_free(|| claim(paths))
}

fn when_free<T>(open: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    let mut pauses = 0;
    loop {
        match open() {
            Err(Error::InUse { device }) if pauses < patience(Path::new(&device)) => {
                pauses += 1;
                clock::nap(PAUSE_NS);
            }
            other => return other,
        }
    }
}

/// Pauses that a device in use is worth, by what can be told of its user.
fn patience(path: &Path) -> u32 {
    const LIVING: u32 = 40;
    const UNKNOWN: u32 = 80;
    const DEAD: u32 = 200;
    let Ok(meta) = std::fs::metadata(path) else {
        return LIVING;
    };
    if meta.file_type().is_block_device() {
        return UNKNOWN;
    }
    // The lock on a file is listed only while the process that took it lives.
    let (major, minor) = (libc::major(meta.dev()), libc::minor(meta.dev()));
    let file = format!(" {major:02x}:{minor:02x}:{} ", meta.ino());
    let locks = std::fs::read_to_string("/proc/locks");
    match locks.is_ok_and(|locks| !locks.contains(&file)) {
        true => DEAD,
        false => LIVING,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::thread;

    #[test]
    fn who_comes_while_a_device_is_let_go_waits_for_it() {
        let home = tempfile::tempdir().unwrap();
        let paths = [home.path().join("image")];
        crate::create_image(&paths[0], 1 << 20).unwrap();
        let options = OpenOptions::default();
        let held = open_devices(&paths, &options).unwrap();
        assert!(matches!(
            open_devices(&paths, &options),
            Err(Error::InUse { .. })
        ));
        let other = thread::spawn("holder", move || {
            clock::nap(3 * PAUSE_NS);
            drop(held);
        });
        let opened = open_when_free(&paths, &options);
        other.unwrap().join().unwrap();
        assert_eq!(opened.unwrap().len(), 1);
    }
}

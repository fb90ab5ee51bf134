//! `sheaf umount`: the mount crate asks the daemon who it is, unmounts, and waits until that
//! process, which writes everything back before it ends, is gone.

use std::path::Path;
use std::time::Duration;

use crate::args::Umount;
use crate::devices::pause;
use crate::failure::{Failure, Outcome};

/// A mount may be busy for a moment because somebody just looks at it (df, an indexer).
const ATTEMPTS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(100);

pub fn run(args: &Umount) -> Outcome {
    unmount(&args.mountpoint)?;
    Ok(0)
}

pub fn unmount(mountpoint: &Path) -> Result<(), Failure> {
    for _ in 1..ATTEMPTS {
        match mount::unmount(mountpoint) {
            Err(error) if is_busy(&error) => pause(PAUSE),
            result => return Ok(result?),
        }
    }
    mount::unmount(mountpoint).map_err(|error| match is_busy(&error) {
        true => Failure::new(format!(
            "{error}; close what is open there (fuser -vm MOUNTPOINT lists it) and try again"
        )),
        false => Failure::from(error),
    })
}

fn is_busy(error: &mount::Error) -> bool {
    matches!(
        error,
        mount::Error::Unmount { error, .. } if error.kind() == std::io::ErrorKind::ResourceBusy
    )
}

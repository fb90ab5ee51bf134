//! `sheaf umount`: the mount crate asks the daemon who it is, unmounts, and waits until that
//! process, which writes everything back before it ends, is gone.

use crate::args::Umount;
use crate::failure::{Failure, Outcome};

pub fn run(args: &Umount) -> Outcome {
    mount::unmount(&args.mountpoint).map_err(explain)?;
    Ok(0)
}

fn explain(error: mount::Error) -> Failure {
    let busy = matches!(
        &error,
        mount::Error::Unmount { error, .. } if error.kind() == std::io::ErrorKind::ResourceBusy
    );
    match busy {
        true => Failure::new(format!(
            "{error}; close what is open there (fuser -vm MOUNTPOINT lists it) and try again"
        )),
        false => Failure::from(error),
    }
}

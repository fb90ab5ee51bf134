//! Claims of what the user gives to be overwritten.

use std::path::{Path, PathBuf};

use device::Claim;

use crate::Error;

/// Keeps others from these devices and files. One that somebody uses is refused, and so is one that holds something known: that is
/// looked for once nobody else can write it.
pub(crate) fn claim_unused(paths: &[PathBuf]) -> Result<Claim, Error> {
    let claim = device::claim(paths)?;
    paths.iter().try_for_each(|path| refuse_used(path))?;
    Ok(claim)
}

/// A device whose content somebody may want is none to measure on.
fn refuse_used(path: &Path) -> Result<(), Error> {
    match device::probe(path) {
        None => Ok(()),
        Some(found) => Err(Error::Unable(format!(
            "{} holds {found}; a benchmark overwrites its devices: wipe it (wipefs --all), or \
             give another",
            path.display()
        ))),
    }
}

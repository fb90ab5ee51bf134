//! SIGINT, SIGTERM and SIGHUP as a flag, so that what a benchmark (or another command) has set up is taken down
//! before the process ends.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::Error;

static REQUESTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From here on the first signal only sets the flag; a second one ends the process at once.
pub fn catch() -> Result<(), Error> {
    if REQUESTED.get().is_some() {
        return Ok(());
    }
    let requested = Arc::new(AtomicBool::new(false));
    let install = |signal| -> io::Result<()> {
        flag::register_conditional_shutdown(signal, 130, Arc::clone(&requested))?;
        flag::register(signal, Arc::clone(&requested))?;
        Ok(())
    };
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        install(signal).map_err(|source| Error::Io {
            what: "a signal handler".to_owned(),
            source,
        })?;
    }
    REQUESTED.get_or_init(|| requested);
    Ok(())
}

pub fn requested() -> bool {
    let flag = REQUESTED.get();
    flag.is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// An error once a signal has come.
pub fn check() -> Result<(), Error> {
    match requested() {
        true => Err(Error::Interrupted),
        false => Ok(()),
    }
}

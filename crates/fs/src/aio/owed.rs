//! Writes that failed, or found no room for all of it, and syncs that tell of such, until somebody is told of it.
//!
//! A request that fails is told by its completion. Where that goes to nobody, because its context or its future was dropped, the file has the failure,
//! as of a write-back that failed: every handle's next fsync reports it, and so does the next sync. A sync that tells of a failure takes it off the file, for
//! handles that are opened later: what nobody has heard is a failure again, and may be told twice.

use crate::data::Files;
use crate::{Error, Ino};
use std::sync::{Arc, Weak};

/// Dropped before anybody was told, the file has it.
pub(super) struct Owed {
    /// A future that nobody asks any more keeps no file system.
    files: Option<Weak<Files>>,
    /// Of which file: its number and generation.
    of: (Ino, u64),
    why: String,
}

impl std::fmt::Debug for Owed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owed")
            .field("of", &self.of)
            .field("why", &self.why)
            .finish_non_exhaustive()
    }
}

impl Owed {
    /// Of a write of `len` bytes, or a sync, of none. `None`: all of it is there, or its owner should not have asked for it.
    pub fn new(
        files: &Arc<Files>,
        of: (Ino, u64),
        result: &Result<usize, Error>,
        len: usize,
    ) -> Option<Owed> {
        let why = match result {
            Ok(written) if *written < len => format!("{written} of {len} bytes found room"),
            Err(
                error @ (Error::Store(_)
                | Error::WriteFailed { .. }
                | Error::NoSpace
                | Error::Damage(_)
                | Error::Damaged { .. }),
            ) => error.to_string(),
            _ => return None,
        };
        Some(Owed {
            files: Some(Arc::downgrade(files)),
            of,
            why: format!("a request that nobody waited for: {why}"),
        })
    }

    pub fn told(mut self) {
        self.files = None;
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if let Some(files) = self.files.take().and_then(|files| files.upgrade()) {
            files.untold(self.of, &self.why);
        }
    }
}

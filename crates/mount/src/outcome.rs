//! How the daemon tells whoever unmounts whether everything is on the devices.
//!
//! The last write-back happens after the mount has left the tree, so no request can answer for
//! it, and the exit status of a daemon is its parent's to know. The daemon therefore holds a
//! pipe; `umount` opens its reading end through /proc before it unmounts (the ioctl
//! [`IOC_OUTCOME`] tells its number), and reads until the daemon is gone.
//!
//! Invariant: only [`Outcome::tell`] with success, called last of all, writes [`WRITTEN`]; so
//! silence, however it came about, is never taken for success.

use crate::sys;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

/// The ioctl on any directory of a mount that tells which descriptor of its daemon is the
/// reading end of its outcome: `_IOR('S', 2, u32)`.
pub const IOC_OUTCOME: u32 = 0x8004_5302;

/// All is well.
const WRITTEN: &str = "written\n";
/// Bytes of a message that are passed on: a pipe holds as much without a reader.
const MESSAGE_MAX: usize = 2048;

/// The daemon's side.
#[derive(Debug)]
pub struct Outcome {
    reader: OwnedFd,
    writer: File,
}

impl Outcome {
    pub fn new() -> std::io::Result<Self> {
        let (reader, writer) = std::io::pipe()?;
        Ok(Outcome {
            reader: reader.into(),
            writer: File::from(OwnedFd::from(writer)),
        })
    }

    /// The last thing a daemon does: tells how it ended. `failure`: what went wrong.
    pub fn tell(&self, failure: Option<&str>) -> std::io::Result<()> {
        let text = failure.map_or(WRITTEN, |message| {
            &message[..message.floor_char_boundary(MESSAGE_MAX)]
        });
        (&self.writer).write_all(text.as_bytes())
    }

    /// The answer to [`IOC_OUTCOME`].
    pub(crate) fn number(&self) -> u32 {
        self.reader.as_raw_fd() as u32
    }
}

/// The side of whoever unmounts.
#[derive(Debug)]
pub(crate) struct Ear(File);

impl Ear {
    /// Opens the outcome of process `pid` that is to come. Permitted to the daemon's own user
    /// and to root.
    pub fn open(pid: u32, number: u32) -> std::io::Result<Self> {
        // Whoever serves the mount says what is opened: it may be what blocks, or ends never.
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(format!("/proc/{pid}/fd/{number}"))?;
        // In another PID namespace the number is somebody else's.
        if !file.metadata()?.file_type().is_fifo() {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        sys::wait_in_reads(file.as_fd())?;
        Ok(Ear(file))
    }

    /// Waits for the daemon's end. `Err`: what it left as its last words.
    pub fn hear(mut self) -> Result<(), String> {
        let mut heard = Vec::new();
        let most = MESSAGE_MAX as u64;
        if let Err(error) = (&mut self.0).take(most).read_to_end(&mut heard) {
            return Err(format!("the daemon's outcome cannot be read: {error}"));
        }
        match String::from_utf8_lossy(&heard) {
            text if text == WRITTEN => Ok(()),
            text if text.is_empty() => Err("the daemon died before it was done".to_owned()),
            text => Err(text.into_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(tell: impl FnOnce(&Outcome)) -> Result<(), String> {
        let outcome = Outcome::new().unwrap();
        let ear = Ear::open(std::process::id(), outcome.number()).unwrap();
        tell(&outcome);
        drop(outcome);
        ear.hear()
    }

    #[test]
    fn only_a_word_of_success_is_success() {
        assert_eq!(heard(|outcome| outcome.tell(None).unwrap()), Ok(()));
        let failed = heard(|outcome| outcome.tell(Some("device full")).unwrap());
        assert_eq!(failed, Err("device full".to_owned()));
        assert!(heard(|_| {}).is_err());
        let long = "é".repeat(5000);
        let cut = heard(|outcome| outcome.tell(Some(&long)).unwrap()).unwrap_err();
        assert!(long.starts_with(&cut) && cut.len() <= MESSAGE_MAX);
    }
}

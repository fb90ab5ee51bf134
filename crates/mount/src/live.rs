//! What can be asked of the daemon of a mount while it serves: its metrics, and a checkpoint. Each is an ioctl
//! on the root directory, for root and the daemon's own user.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use crate::mounting::IOC_DAEMON_PID;
use crate::{Error, sys};

/// `_IOWR('S', 4, MetricsMessage)`.
pub const IOC_METRICS: u32 = 0xc000_0000 | (MESSAGE_BYTES as u32) << 16 | 0x5304;
/// `_IOWR('S', 5, u64)`: makes a checkpoint; answers with its number.
pub const IOC_CHECKPOINT: u32 = 0xc008_5305;

const MESSAGE_BYTES: usize = 12 << 10;
const TEXT_BYTES: usize = MESSAGE_BYTES - 24;

/// A part of the lines of [`exposition`](crate::metrics::exposition): what is asked, and what is answered.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MetricsMessage {
    /// The first line; in the answer the one to go on with, or `u64::MAX` at the end.
    position: u64,
    text_len: u64,
    _reserved: u64,
    text: [u8; TEXT_BYTES],
}

const _: () = assert!(size_of::<MetricsMessage>() == MESSAGE_BYTES);

impl MetricsMessage {
    fn new(position: u64) -> Box<Self> {
        let zeros = [0u8; MESSAGE_BYTES];
        // Every pattern of bytes is a message.
        let mut message: Box<Self> = Box::new(zerocopy::transmute!(zeros));
        message.position = position;
        message
    }

    /// In the daemon: the first line asked for in `input`.
    pub(crate) fn asked(input: &[u8]) -> Option<u64> {
        Some(Self::try_ref_from_bytes(input).ok()?.position)
    }

    /// In the daemon: as many lines of `text` from that one on as have room. A line that would have none anywhere is left out.
    pub(crate) fn reply(text: &str, position: u64) -> Box<Self> {
        let mut message = Self::new(u64::MAX);
        let mut filled = 0;
        for (number, line) in text
            .split_inclusive('\n')
            .enumerate()
            .skip(position as usize)
        {
            if line.len() > TEXT_BYTES {
                continue;
            }
            let Some(room) = message.text.get_mut(filled..filled + line.len()) else {
                message.position = number as u64;
                break;
            };
            room.copy_from_slice(line.as_bytes());
            filled += line.len();
        }
        message.text_len = filled as u64;
        message
    }

    fn lines(&self) -> String {
        let text = self.text.get(..self.text_len as usize).unwrap_or(&[]);
        String::from_utf8_lossy(text).into_owned()
    }

    fn next(&self) -> Option<u64> {
        (self.position != u64::MAX).then_some(self.position)
    }
}

/// A mounted file system, as somebody sees it who wants to ask its daemon.
#[derive(Debug)]
pub struct Live {
    root: File,
    mountpoint: PathBuf,
}

impl Live {
    /// # Errors
    /// [`Error::Ask`] when the mount point cannot be opened.
    pub fn new(mountpoint: &Path) -> Result<Self, Error> {
        let mountpoint = mountpoint.to_owned();
        match File::open(&mountpoint) {
            Ok(root) => Ok(Live { root, mountpoint }),
            Err(error) => Err(Error::Ask { mountpoint, error }),
        }
    }

    /// What the file system has done since it was mounted, in the text format of Prometheus.
    pub fn metrics(&self) -> Result<String, Error> {
        let mut all = String::new();
        let mut position = Some(0);
        while let Some(from) = position {
            let mut message = MetricsMessage::new(from);
            self.ask(IOC_METRICS, message.as_mut_bytes())?;
            all += &message.lines();
            // Each answer is of its own moment, but has the same lines in the same order.
            position = message.next().filter(|next| *next > from);
        }
        Ok(all)
    }

    /// Has all that was written and changed before this call written home: when it returns, a mount after a crash has nothing
    /// of it to apply. Changes go on meanwhile. Returns the checkpoint's number.
    pub fn checkpoint(&self) -> Result<u64, Error> {
        let mut number = 0u64;
        self.ask(IOC_CHECKPOINT, number.as_mut_bytes())?;
        Ok(number)
    }

    /// The number of the daemon's process, as it knows itself.
    pub fn daemon(&self) -> Result<u32, Error> {
        sys::ioctl_u32(self.root.as_fd(), IOC_DAEMON_PID).map_err(|error| self.failed(error))
    }

    fn ask(&self, command: u32, message: &mut [u8]) -> Result<(), Error> {
        let asked = sys::ioctl_message(self.root.as_fd(), command, message);
        asked.map_err(|error| self.failed(error))
    }

    fn failed(&self, error: io::Error) -> Error {
        match error.raw_os_error() {
            // No file system of ours answers here.
            Some(libc::ENOTTY) => Error::NotMounted(self.mountpoint.clone()),
            _ => Error::Ask {
                mountpoint: self.mountpoint.clone(),
                error,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_arrive_in_parts_as_they_were() {
        let line = |number: usize| format!("name{{device=\"/dev/{number}\"}} {number}\n");
        let mut text: String = (0..2000).map(line).collect();
        let wanted = text.clone();
        text += &format!("{}\n", "x".repeat(TEXT_BYTES));
        let (mut all, mut position, mut parts) = (String::new(), Some(0), 0);
        while let Some(from) = position {
            let asked = MetricsMessage::new(from);
            let from = MetricsMessage::asked(asked.as_bytes()).unwrap();
            let answer = MetricsMessage::reply(&text, from);
            all += &answer.lines();
            position = answer.next();
            parts += 1;
        }
        assert!(all == wanted && parts > 1, "{parts} parts");
        assert_eq!(MetricsMessage::asked(&[0; 8]), None);
        assert_eq!(MetricsMessage::reply(&text, u64::MAX).next(), None);
    }
}

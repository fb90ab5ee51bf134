//! Asking the daemon of a mount to verify its metadata: the messages of one ioctl, by which it
//! does so step by step. Whoever asks decides on the pace.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use fs::scrub::ScrubStep;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use crate::{Error, sys};

/// The ioctl on the root directory of a mount: `_IOWR('S', 3, ScrubMessage)`.
pub const IOC_SCRUB: u32 = 0xc000_0000 | (MESSAGE_BYTES as u32) << 16 | 0x5303;

const MESSAGE_BYTES: usize = 12 << 10;
const TEXT_BYTES: usize = MESSAGE_BYTES - 80;

/// What is asked, and what is answered.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ScrubMessage {
    /// Where to begin; in the answer where to go on, or `u64::MAX` at the end.
    position: u64,
    /// Bytes to read, about; in the answer bytes read.
    bytes: u64,
    nodes: u64,
    nodes_total: u64,
    pages: u64,
    /// Findings that are not in the text, which is too short.
    findings_left_out: u64,
    text_len: u64,
    uuid: [u8; 16],
    _reserved: u64,
    /// Findings, a line each, fields divided by tabs: severity, class, object, what.
    text: [u8; TEXT_BYTES],
}

const _: () = assert!(size_of::<ScrubMessage>() == MESSAGE_BYTES);

/// The answer to one step.
#[derive(Clone, Debug)]
pub struct Answer {
    pub next: Option<u64>,
    pub nodes: u64,
    pub nodes_total: u64,
    pub pages: u64,
    pub bytes: u64,
    pub uuid: [u8; 16],
    pub findings: Vec<Finding>,
    pub findings_left_out: u64,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// `notice`, `error` or `fatal`.
    pub severity: String,
    pub class: String,
    pub object: String,
    pub what: String,
}

/// A scrub of a mounted file system.
#[derive(Debug)]
pub struct Scrub {
    root: File,
    mountpoint: PathBuf,
}

impl Scrub {
    pub fn new(mountpoint: &Path) -> Result<Self, Error> {
        let root = File::open(mountpoint).map_err(|error| Error::Scrub {
            mountpoint: mountpoint.to_owned(),
            error,
        })?;
        Ok(Scrub {
            root,
            mountpoint: mountpoint.to_owned(),
        })
    }

    /// Has the daemon read about `bytes` of metadata from `position` on, and verify it. Needs
    /// root or the daemon's own user.
    pub fn step(&self, position: u64, bytes: u64) -> Result<Answer, Error> {
        let failed = |error: std::io::Error| match error.raw_os_error() {
            // No file system of ours answers here.
            Some(libc::ENOTTY) => Error::NotMounted(self.mountpoint.clone()),
            _ => Error::Scrub {
                mountpoint: self.mountpoint.clone(),
                error,
            },
        };
        let mut message = ScrubMessage::new_zeroed();
        message.position = position;
        message.bytes = bytes;
        sys::ioctl_message(self.root.as_fd(), IOC_SCRUB, message.as_mut_bytes()).map_err(failed)?;
        Ok(message.answer())
    }
}

impl ScrubMessage {
    fn new_zeroed() -> Box<Self> {
        let zeros = [0u8; MESSAGE_BYTES];
        // Every pattern of bytes is a message.
        Box::new(zerocopy::transmute!(zeros))
    }

    /// In the daemon: what is asked for in `input`; position and bytes.
    pub(crate) fn asked(input: &[u8]) -> Option<(u64, u64)> {
        let message = Self::try_ref_from_bytes(input).ok()?;
        Some((message.position, message.bytes))
    }

    /// In the daemon: the answer.
    pub(crate) fn reply(step: &ScrubStep, uuid: [u8; 16]) -> Box<Self> {
        let mut message = Self::new_zeroed();
        message.position = step.next.unwrap_or(u64::MAX);
        message.bytes = step.bytes;
        message.nodes = step.nodes;
        message.nodes_total = step.nodes_total;
        message.pages = step.pages;
        message.uuid = uuid;
        let mut text = String::new();
        for finding in &step.findings {
            let severity = match finding.severity {
                fs::scrub::Severity::Notice => "notice",
                fs::scrub::Severity::Error => "error",
                fs::scrub::Severity::Fatal => "fatal",
            };
            let what = finding.what.replace(['\t', '\n'], " ");
            let line = format!(
                "{severity}\t{}\t{}\t{what}\n",
                finding.class, finding.object
            );
            match text.len() + line.len() <= TEXT_BYTES {
                true => text += &line,
                false => message.findings_left_out += 1,
            }
        }
        message.text_len = text.len() as u64;
        message.text[..text.len()].copy_from_slice(text.as_bytes());
        message
    }

    fn answer(&self) -> Answer {
        let text = self.text.get(..self.text_len as usize).unwrap_or(&[]);
        let text = String::from_utf8_lossy(text);
        let finding = |line: &str| {
            let mut fields = line.splitn(4, '\t').map(str::to_owned);
            Some(Finding {
                severity: fields.next()?,
                class: fields.next()?,
                object: fields.next()?,
                what: fields.next()?,
            })
        };
        Answer {
            next: (self.position != u64::MAX).then_some(self.position),
            nodes: self.nodes,
            nodes_total: self.nodes_total,
            pages: self.pages,
            bytes: self.bytes,
            uuid: self.uuid,
            findings: text.lines().filter_map(finding).collect(),
            findings_left_out: self.findings_left_out,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fs::scrub::{ScrubFinding, Severity};

    #[test]
    fn an_answer_arrives_as_it_was_sent() {
        let finding = |n: usize| ScrubFinding {
            severity: Severity::Error,
            class: "node",
            object: format!("node {n}"),
            what: "checksum\tdiffers".into(),
        };
        let step = ScrubStep {
            next: Some(77),
            nodes: 5,
            nodes_total: 10,
            pages: 2,
            bytes: 4096,
            findings: (0..1000).map(finding).collect(),
        };
        let answer = ScrubMessage::reply(&step, [7; 16]).answer();
        assert_eq!((answer.next, answer.nodes, answer.pages), (Some(77), 5, 2));
        assert_eq!(answer.uuid, [7; 16]);
        assert_eq!(answer.findings[3].object, "node 3");
        assert_eq!(answer.findings[3].what, "checksum differs");
        let all = answer.findings.len() as u64 + answer.findings_left_out;
        assert_eq!(all, 1000);
        let done = ScrubStep { next: None, ..step };
        assert_eq!(ScrubMessage::reply(&done, [7; 16]).answer().next, None);
    }
}

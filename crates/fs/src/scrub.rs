//! Scrubbing while the file system is in use: what [`engine`]'s scrub finds, in words.

use crate::{Error, FileSystem};
use engine::Findings;
pub use engine::Severity;

/// What one step of a scrub did.
#[derive(Clone, Debug)]
pub struct ScrubStep {
    /// Where to go on, if anything is left. A position means the same in every mount.
    pub next: Option<u64>,
    /// Nodes verified, and nodes in all at the last checkpoint.
    pub nodes: u64,
    pub nodes_total: u64,
    /// Labels, checkpoint slots and table pages verified.
    pub pages: u64,
    /// Bytes read from the devices.
    pub bytes: u64,
    pub findings: Vec<ScrubFinding>,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubFinding {
    pub severity: Severity,
    /// A word for the class of object, for programs.
    pub class: &'static str,
    pub object: String,
    pub what: String,
}

impl FileSystem {
    /// Reads metadata from the devices and verifies it, from `position` (0 at first) on, until
    /// about `bytes` are read. Anything may happen to the file system meanwhile.
    ///
    /// # Errors
    /// The failure that turned the file system read-only, if one did: what its tables name may
    /// not be on the devices then.
    pub fn scrub(&self, position: u64, bytes: u64) -> Result<ScrubStep, Error> {
        let findings = Findings::new();
        let step = self.store.scrub(position, bytes, &findings)?;
        let (found, _) = findings.take();
        let shown = |finding: engine::Finding| ScrubFinding {
            severity: finding.severity,
            class: finding.object.class(),
            object: finding.object.to_string(),
            what: finding.what,
        };
        Ok(ScrubStep {
            next: step.next,
            nodes: step.nodes,
            nodes_total: self.store.space().nodes,
            pages: step.pages,
            bytes: step.bytes,
            findings: found.into_iter().map(shown).collect(),
        })
    }
}

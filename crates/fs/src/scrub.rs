//! Scrubbing while the file system is in use: what [`engine`]'s scrub finds, in words.

use crate::content::FsNode;
use crate::{Error, FileSystem};
pub use engine::Severity;
use engine::{Findings, Object};
use format::Nid;
use format::table::SPACE_MAP_FIRST;

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
    /// Of a node also what kind of node it is, if that is known.
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
        let shown = |finding: engine::Finding| {
            let kind = match finding.object {
                Object::Node(nid) => self.kind_of(nid),
                _ => None,
            };
            ScrubFinding {
                severity: finding.severity,
                class: finding.object.class(),
                object: finding.object.to_string(),
                what: match kind {
                    Some(kind) => format!("{}; it is {kind}", finding.what),
                    None => finding.what,
                },
            }
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

    /// What a node is, in words. Of one whose image is damaged that is known while it is in memory, where it is whole.
    fn kind_of(&self, nid: Nid) -> Option<String> {
        if nid.0 >= SPACE_MAP_FIRST {
            return Some("a map of free space, which a repair makes anew".to_owned());
        }
        // That it cannot be read is what the finding says.
        let node = self.store.get(nid).and_then(|node| node.into_read()).ok()?;
        let kind = match &*node {
            FsNode::Inode(inode) if inode.is_dir() => {
                return Some(format!("the inode of a folder in inode {}", inode.parent));
            }
            FsNode::Inode(_) => "the inode of a file",
            FsNode::Index(_) => "an inner part of a folder, a file or its attributes, and no inode",
            FsNode::Bucket(_) => "a part of a folder, and no inode",
            FsNode::Extents(_) => "a part of a file, and no inode",
            FsNode::Xattrs(_) | FsNode::Value(_) => "attributes of a file, and no inode",
            FsNode::Orphans(_) => "a list of unlinked files, and no inode",
        };
        Some(kind.to_owned())
    }
}

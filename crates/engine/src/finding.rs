//! What verification finds wrong, and a bounded list of it.

use crate::space::Extent;
use base::sync::{Mutex, rank};
use base::tight;
use format::{Block, Nid};
use std::fmt;

/// What a finding is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// The store as a whole: it cannot be opened.
    Store,
    /// A copy of a device's label; copy 0 is the device's first block, 1 its last.
    Label {
        device: usize,
        copy: usize,
    },
    /// A copy of a checkpoint slot.
    Slot {
        slot: usize,
        copy: usize,
    },
    /// The journal.
    Journal,
    /// The node table as a whole.
    Table,
    /// A region page of the node table, and with it 16,384 nodes.
    RegionPage(u64),
    /// A leaf page of the node table, and with it 256 nodes.
    LeafPage(u64),
    /// The tables of chunk states and segments.
    SpaceTables,
    Chunk(u32),
    /// A segment, by chunk and index in it.
    Segment {
        chunk: u32,
        index: u32,
    },
    /// A node: an inode, or a node that belongs to one.
    Node(Nid),
    /// Blocks of the data area.
    Blocks(Extent),
}

impl Object {
    /// A word for the class of object, for programs that read reports.
    pub fn class(&self) -> &'static str {
        match self {
            Object::Store => "store",
            Object::Label { .. } => "label",
            Object::Slot { .. } => "slot",
            Object::Journal => "journal",
            Object::Table => "table",
            Object::RegionPage(_) => "region-page",
            Object::LeafPage(_) => "leaf-page",
            Object::SpaceTables => "space-tables",
            Object::Chunk(_) => "chunk",
            Object::Segment { .. } => "segment",
            Object::Node(_) => "node",
            Object::Blocks(_) => "blocks",
        }
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::Store => write!(f, "file system"),
            Object::Label { device, copy } => write!(f, "label of device {device}, copy {copy}"),
            Object::Slot { slot, copy } => write!(f, "checkpoint slot {slot}, copy {copy}"),
            Object::Journal => write!(f, "journal"),
            Object::Table => write!(f, "node table"),
            Object::RegionPage(index) => write!(f, "node table, region page {index}"),
            Object::LeafPage(index) => write!(f, "node table, leaf page {index}"),
            Object::SpaceTables => write!(f, "space tables"),
            Object::Chunk(chunk) => write!(f, "chunk {chunk}"),
            Object::Segment { chunk, index } => write!(f, "segment {index} of chunk {chunk}"),
            Object::Node(nid) => write!(f, "node {nid}"),
            Object::Blocks(Extent { block, len: 1 }) => write!(f, "block {block}"),
            Object::Blocks(Extent { block, len }) => {
                write!(f, "blocks {block} to {}", Block(block.0 + *len as u64 - 1))
            }
        }
    }
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Nothing is lost: a second copy serves, or the next mount puts it right.
    Notice,
    /// One object is damaged or inconsistent.
    Error,
    /// The check could not go on; there may be more.
    Fatal,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub object: Object,
    pub what: String,
    pub severity: Severity,
}

/// Findings that are kept; more are counted only.
pub const FINDINGS_MAX: usize = 10_000;

/// A bounded list that several threads add to.
#[derive(Debug)]
pub struct Findings {
    most: usize,
    kept: Mutex<(Vec<Finding>, u64)>,
}

impl Default for Findings {
    fn default() -> Self {
        Findings::new()
    }
}

impl Findings {
    pub fn new() -> Findings {
        Findings {
            most: tight::limit(FINDINGS_MAX, 8),
            kept: Mutex::new(rank::LEAF, (Vec::new(), 0)),
        }
    }

    pub fn add(&self, object: Object, severity: Severity, what: impl Into<String>) {
        let mut kept = self.kept.lock();
        if kept.0.len() >= self.most {
            kept.1 += 1;
            return;
        }
        kept.0.push(Finding {
            object,
            what: what.into(),
            severity,
        });
    }

    pub fn error(&self, object: Object, what: impl Into<String>) {
        self.add(object, Severity::Error, what);
    }

    /// The findings, and how many more there were.
    pub fn take(&self) -> (Vec<Finding>, u64) {
        std::mem::take(&mut *self.kept.lock())
    }
}

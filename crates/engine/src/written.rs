//! Bytes of metadata written to the devices, by cause.
//!
//! Counted where they are written, never for each operation: a batch adds to the counters once, and
//! each worker of a checkpoint counts its items apart and adds the sums when it is done.

use base::atomic::{AtomicU64, Ordering};
use format::item::{self, ItemKind};

/// Kinds of nodes are below this.
pub(crate) const NODE_KINDS: usize = format::table::KIND_LIMIT as usize;

/// Bytes of metadata written since a store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BytesWritten {
    /// Records of operations in the journal.
    pub records: u64,
    /// Headers of the journal's batches, and what fills them up to the devices' blocks.
    pub batches: u64,
    /// Images of nodes by node kind, header and padding included.
    pub nodes: [u64; NODE_KINDS],
    /// Leaf pages of the node table.
    pub table_leaves: u64,
    /// Its region and map pages.
    pub table_inner: u64,
    /// The space tables.
    pub space: u64,
    /// What fills the end of what a worker writes up to whole blocks.
    pub padding: u64,
    /// Checkpoint records, all copies.
    pub slots: u64,
}

impl BytesWritten {
    pub fn total(&self) -> u64 {
        let nodes: u64 = self.nodes.iter().sum();
        let journal = self.records + self.batches;
        let table = self.table_leaves + self.table_inner;
        journal + nodes + table + self.space + self.padding + self.slots
    }

    /// Counts an item that has just been encoded.
    pub(crate) fn add_item(&mut self, bytes: &[u8]) {
        let len = bytes.len() as u64;
        match item::kinds(bytes) {
            Some((ItemKind::Node, node)) => self.nodes[node as usize % NODE_KINDS] += len,
            Some((ItemKind::TableLeaf, _)) => self.table_leaves += len,
            Some((ItemKind::TableRegion | ItemKind::TableMap, _)) => self.table_inner += len,
            Some((ItemKind::SpacePage | ItemKind::SpaceRoot, _)) => self.space += len,
            None => {}
        }
    }

    /// Adds to each of `sums` what this one has of it.
    fn each<'a>(&self, sums: &'a Counters) -> impl Iterator<Item = (&'a AtomicU64, u64)> {
        let fields = [
            (&sums.records, self.records),
            (&sums.batches, self.batches),
            (&sums.table_leaves, self.table_leaves),
            (&sums.table_inner, self.table_inner),
            (&sums.space, self.space),
            (&sums.padding, self.padding),
            (&sums.slots, self.slots),
        ];
        fields.into_iter().chain(sums.nodes.iter().zip(self.nodes))
    }
}

/// [`BytesWritten`] of all threads.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    records: AtomicU64,
    batches: AtomicU64,
    nodes: [AtomicU64; NODE_KINDS],
    table_leaves: AtomicU64,
    table_inner: AtomicU64,
    space: AtomicU64,
    padding: AtomicU64,
    slots: AtomicU64,
}

impl Counters {
    pub fn add(&self, bytes: &BytesWritten) {
        for (sum, bytes) in bytes.each(self).filter(|(_, bytes)| *bytes > 0) {
            sum.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub fn get(&self) -> BytesWritten {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        BytesWritten {
            records: get(&self.records),
            batches: get(&self.batches),
            nodes: std::array::from_fn(|kind| get(&self.nodes[kind])),
            table_leaves: get(&self.table_leaves),
            table_inner: get(&self.table_inner),
            space: get(&self.space),
            padding: get(&self.padding),
            slots: get(&self.slots),
        }
    }
}

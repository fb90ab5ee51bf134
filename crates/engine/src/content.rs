//! What a node holds is the file system's business; this is all the store asks of it.

use format::Damage;

/// What became of a change that was to be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Nothing was pending before.
    pub first: bool,
    /// It is pending now; else its maker must make another one in its place.
    pub taken: bool,
}

/// The content of a node. Implemented once, as an enum over the file system's node kinds.
pub trait Content: Clone + Send + Sync + Sized + 'static {
    /// A change of one node, small and deterministic.
    type Delta: Send;

    /// The node's kind, at least [`format::table::FIRST_FS_KIND`]; constant over its life.
    fn kind(&self) -> u8;
    /// Appends the image, at most [`format::item::PAYLOAD_MAX`] bytes.
    fn encode(&self, out: &mut Vec<u8>);
    /// Reads an image; total over any bytes.
    fn decode(kind: u8, body: &[u8]) -> Result<Self, Damage>;
    /// Makes a change. The forward path and recovery both come through here, and nothing
    /// else changes a node but merged changes that are settled.
    fn apply(&mut self, delta: &Self::Delta) -> Result<(), Damage>;
    fn encode_delta(delta: &Self::Delta, out: &mut Vec<u8>);
    fn decode_delta(kind: u8, bytes: &[u8]) -> Result<Self::Delta, Damage>;
    /// Whether [`Content::merge`] takes changes now.
    fn merges(&self) -> bool {
        false
    }
    /// Adds a change under a shared lock, in any order among others that are merged. It stays
    /// pending, which means that it is not in the image, until [`Content::settle`].
    fn merge(&self, _delta: &Self::Delta) -> Result<Merged, Damage> {
        Err(Damage::new("node", "takes no merged changes"))
    }
    /// Adds a change that was merged, as the journal has it: it is pending again, whatever else is. Those of one version
    /// come back in any order. They are a third of all that a full journal may have, so none is made a `Delta` of.
    fn merge_again(&mut self, _kind: u8, _delta: &[u8]) -> Result<(), Damage> {
        Err(Damage::new("node", "takes no merged changes"))
    }
    /// Whether merged changes are pending.
    fn pending(&self) -> bool {
        false
    }
    /// Makes the pending changes part of the image, as if they had been applied.
    fn settle(&mut self) {}
    /// Whether those who look for other nodes mostly look at this one first: constant over its life.
    fn leads(&self) -> bool {
        false
    }
    /// True for kinds that belong to an inode and are locked only under its lock.
    fn owned(kind: u8) -> bool;
    /// Approximate heap bytes.
    fn memory(&self) -> usize;
    /// Bytes of the image, or a few more: it is asked for often.
    fn image_len(&self) -> usize;
}

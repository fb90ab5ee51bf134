//! What somebody has of a store for operations to come, and who drops it gives back: fresh nids, reserved blocks, promised space.
//!
//! Invariant: what is held is nobody else's. It passes from one kind to the other ([`Promise::take_back`], [`Promise::consume`]) without being free in
//! between.

use crate::content::Content;
use crate::node::Node;
use crate::space::Extent;
use crate::store::Store;
use format::{Block, Nid};

/// A nid nobody else has. Goes back to the free nids unless an operation creates it.
#[derive(Debug)]
pub struct FreshNid<'s, C: Content> {
    pub(crate) store: &'s Store<C>,
    pub(crate) nid: Nid,
    pub(crate) last_version: u64,
    pub(crate) used: bool,
}

impl<C: Content> FreshNid<'_, C> {
    pub fn nid(&self) -> Nid {
        self.nid
    }

    /// The version the node will have when created: unique among all uses of this nid.
    pub fn version(&self) -> u64 {
        self.last_version + 1
    }
}

impl<C: Content> Drop for FreshNid<'_, C> {
    fn drop(&mut self) {
        if !self.used {
            let shard = self.store.shard();
            self.store.nids.put(shard, self.nid, self.last_version);
        }
    }
}

/// Blocks reserved for the holder; given back on drop unless an operation takes them.
#[derive(Debug)]
pub struct Reservation<'s, C: Content> {
    pub(crate) store: &'s Store<C>,
    pub(crate) extent: Extent,
    pub(crate) map: Node<C>,
    pub(crate) taken: bool,
}

impl<C: Content> Reservation<'_, C> {
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Takes the first `blocks` of them away as a reservation of their own.
    pub fn split_off(&mut self, blocks: u32) -> Self {
        let Extent { block, len } = self.extent;
        assert!(blocks <= len, "{blocks} blocks of {len}");
        self.extent = Extent {
            block: Block(block.0 + blocks as u64),
            len: len - blocks,
        };
        Reservation {
            store: self.store,
            extent: Extent { block, len: blocks },
            map: self.map.clone(),
            taken: false,
        }
    }
}

impl<C: Content> Reservation<'_, C> {
    /// Leaves the blocks reserved without a borrow of the store; [`Store::adopt_reservation`] picks them up. What nobody picks
    /// up is free again after the next mount.
    pub fn keep(mut self) -> Kept<C> {
        self.taken = true;
        Kept {
            extent: self.extent,
            map: self.map.clone(),
        }
    }
}

/// Reserved blocks whose holder is on the way from one call to the next.
#[derive(Debug)]
pub struct Kept<C: Content> {
    pub(crate) extent: Extent,
    pub(crate) map: Node<C>,
}

impl<C: Content> Drop for Reservation<'_, C> {
    fn drop(&mut self) {
        if !self.taken && self.extent.len > 0 {
            self.store.space.give(self.extent);
        }
    }
}

/// A share of the free space, for data that is not allocated yet.
#[derive(Debug)]
pub struct Promise<'s, C: Content> {
    pub(crate) store: &'s Store<C>,
    pub(crate) blocks: u64,
}

impl<C: Content> Promise<'_, C> {
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Leaves the promise standing without a holder; [`Store::adopt_promise`] picks it up.
    pub fn into_blocks(mut self) -> u64 {
        std::mem::take(&mut self.blocks)
    }

    /// Blocks that were reserved out of a promise and are not used are a part of it again, and nobody's in between.
    pub fn take_back(&mut self, mut reservation: Reservation<'_, C>) {
        reservation.taken = true;
        let extent = reservation.extent;
        self.blocks += u64::from(extent.len);
        self.store.space.give_promised(extent);
    }

    /// So many blocks were taken for it; returns how many of them it covers.
    pub(crate) fn consume(&mut self, blocks: u64) -> u64 {
        let consumed = blocks.min(self.blocks);
        self.blocks -= consumed;
        self.store.space.unpromise(consumed);
        consumed
    }

    /// Takes [`Promise::consume`] back, before the blocks are available again.
    pub(crate) fn restore(&mut self, consumed: u64) {
        self.blocks += consumed;
        self.store.space.promise_again(consumed);
    }
}

impl<C: Content> Drop for Promise<'_, C> {
    fn drop(&mut self) {
        self.store.space.unpromise(self.blocks);
    }
}

//! Model checks of the parts that take no lock, or few: [loom](https://docs.rs/loom) runs each model
//! under every order of its threads' steps, and with every value that the memory model lets a load
//! return, up to a bound on the threads' interruptions.
//!
//! The sources are those of the product, compiled against a `base` that is made of the checker's
//! threads, locks and atomics. What is checked:
//!
//! - [`epoch`], [`staging`]: an epoch is gathered whole (journal, invariant 1);
//! - [`sum`]: what is added to a sum is in it once;
//! - [`ring`]: credits keep the ring from being overrun (journal, invariant 3);
//! - [`commit`]: who waits for a commit goes on when it is durable, or has failed (invariants 4, 5);
//! - [`totals`]: a block is promised once;
//! - [`bitmap`], [`region`], [`ready`]: a nid is given out once, with its own version, and none is
//!   lost; a region with many free nids is found;
//! - [`latch`]: one thread at a time has a latch, and who looks under one at what another lock protects meets no writer;
//! - [`readers`]: no writer meets a reader that entered a lock without taking it;
//! - [`tags`]: who copies a cached page without a lock gets that page, as it was at one moment;
//! - [`gate`], [`ranges`]: writes of several pages are seen whole, and those that overlap come one after the other;
//! - [`mark`]: who waits for a count is woken, whoever counts meanwhile;
//! - [`mail`], [`returns`], [`bell`]: what is sent to a device's thread comes back, and nobody sleeps for ever;
//! - [`changed`]: the leaf page of a node that changed is kept until the checkpoint that took the node has set its entry;
//! - [`meta`], [`present`], [`tally`], [`times`]: who looked at a file or a directory is shown a newer time when what it was has changed;
//! - [`vouched`]: who reads or writes a block finds that a batch vouches for it, or has what that says;
//! - [`flush`]: a write is taken for flushed only after a flush that was issued after it, a
//!   failed flush is forgiven only while nobody relies on it, and who writes durably beside it learns of it (R17).
//!
//! What else is shared is behind locks; `docs/concurrency.md` says which.

#[cfg(test)]
#[expect(dead_code, reason = "nobody sleeps in the kernel here")]
#[path = "../../crates/device/src/queue/bell.rs"]
mod bell;
#[cfg(test)]
#[path = "../../crates/engine/src/bitmap.rs"]
mod bitmap;
#[cfg(test)]
#[expect(dead_code, reason = "that of the product is as long as its table")]
#[path = "../../crates/engine/src/table/changed.rs"]
mod changed;
#[cfg(test)]
#[path = "../../crates/engine/src/commit.rs"]
mod commit;
#[cfg(test)]
#[path = "../../crates/engine/src/epoch.rs"]
mod epoch;
#[cfg(test)]
#[path = "../../crates/device/src/flush.rs"]
mod flush;
#[cfg(test)]
#[path = "../../crates/fs/src/data/gate.rs"]
mod gate;
#[cfg(test)]
#[expect(dead_code, reason = "nobody tries again without writing here")]
#[path = "../../crates/base/src/latch.rs"]
mod latch;
#[cfg(test)]
#[expect(dead_code, reason = "some of it has nothing to model")]
#[path = "../../crates/device/src/driver/mail.rs"]
mod mail;
#[cfg(test)]
#[path = "../../crates/engine/src/cache/mark.rs"]
mod mark;
#[cfg(test)]
#[expect(dead_code, reason = "some of it has nothing to model")]
#[path = "../../crates/fs/src/data/meta.rs"]
mod meta;
#[cfg(test)]
#[path = "../../crates/fs/src/data/present.rs"]
mod present;
#[cfg(test)]
#[path = "../../crates/fs/src/data/ranges.rs"]
mod ranges;
#[cfg(test)]
#[path = "../../crates/base/src/readers.rs"]
mod readers;
#[cfg(test)]
#[path = "../../crates/engine/src/ready.rs"]
mod ready;
#[cfg(test)]
#[expect(dead_code, reason = "some of it has nothing to model")]
#[path = "../../crates/engine/src/region.rs"]
mod region;
#[cfg(test)]
#[path = "../../crates/device/src/driver/returns.rs"]
mod returns;
#[cfg(test)]
#[path = "../../crates/engine/src/ring.rs"]
mod ring;
#[cfg(test)]
#[path = "../../crates/engine/src/staging.rs"]
mod staging;
#[cfg(test)]
#[expect(dead_code, reason = "some of it has nothing to model")]
#[path = "../../crates/engine/src/cache/standby.rs"]
mod standby;
#[cfg(test)]
#[path = "../../crates/engine/src/sum.rs"]
mod sum;
#[cfg(test)]
#[path = "../../crates/engine/src/cache/tags.rs"]
mod tags;
#[cfg(test)]
#[expect(dead_code, reason = "some of it has nothing to model")]
#[path = "../../crates/fs/src/content/tally.rs"]
mod tally;
#[cfg(test)]
#[path = "../../crates/fs/src/times.rs"]
mod times;
#[cfg(test)]
#[expect(dead_code, reason = "some of it has nothing to model")]
#[path = "../../crates/engine/src/totals.rs"]
mod totals;
#[cfg(test)]
#[expect(dead_code, reason = "some of it has nothing to model")]
#[path = "../../crates/engine/src/vouched.rs"]
mod vouched;

/// What mail and returns name of their crate.
#[cfg(test)]
mod queue {
    pub use crate::bell::Bell;
}
#[cfg(test)]
mod topology {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Urgency {
        High,
        Low,
    }
}

/// What tally and meta name of the engine.
#[cfg(test)]
extern crate self as engine;
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(pub u64);
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merged {
    pub first: bool,
    pub taken: bool,
}

/// What vouched names of its crate: the content of a block is a number.
#[cfg(test)]
mod new_data {
    use crate::space::Extent;

    #[derive(Clone, Debug)]
    pub struct NewData {
        pub blocks: Extent,
        pub content: u32,
    }

    impl NewData {
        pub fn blocks(&self) -> Extent {
            self.blocks
        }

        pub fn len(&self) -> usize {
            self.blocks.len as usize
        }
    }
}
#[cfg(test)]
mod space {
    use format::Block;

    #[derive(Clone, Copy, Debug)]
    pub struct Extent {
        pub block: Block,
        pub len: u32,
    }

    impl Extent {
        pub fn end(self) -> Block {
            Block(self.block.0 + u64::from(self.len))
        }
    }
}

#[cfg(test)]
mod tests;

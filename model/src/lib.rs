//! Model checks of the parts that take no lock, or few: [loom](https://docs.rs/loom) runs each model
//! under every order of its threads' steps, and with every value that the memory model lets a load
//! return, up to a bound on the threads' interruptions.
//!
//! The sources are those of the product, compiled against a `base` that is made of the checker's
//! threads, locks and atomics. What is checked:
//!
//! - [`epoch`]: an epoch is gathered whole (journal, invariant 1);
//! - [`bitmap`]: a nid is given out once, and none is lost (free bitmaps of `nids`);
//! - [`flush`]: a write is taken for flushed only after a flush that was issued after it (R17).
//!
//! Staging buffers are behind a lock of their own; the order in which they are filled and taken is
//! part of the model of `epoch`. The page cache's sets are behind a lock each, hits included, so there
//! is nothing to check in them.

#[cfg(test)]
#[path = "../../crates/engine/src/bitmap.rs"]
mod bitmap;
#[cfg(test)]
#[path = "../../crates/engine/src/epoch.rs"]
mod epoch;
#[cfg(test)]
#[path = "../../crates/device/src/flush.rs"]
mod flush;

#[cfg(test)]
mod tests;

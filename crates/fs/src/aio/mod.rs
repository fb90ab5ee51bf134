//! Requests that are handed over now and end later.
//!
//! ```text
//! submit ─► in the cache ─────────────► done at once ──┐
//!        ─► reads, direct overwrites ──► devices ──────┼─► poll, wait ─► completion or callback
//!        ─► whatever else ─► a thread of the pool ─────┘   (a sync for all of its file that wait)
//! ```
//!
//! What flies is a read, through the cache or past it, whose part of the file's mapping is in memory, and a direct write over blocks that the file has. A read through the cache that
//! goes on where another ended, and misses, takes a thread: it reads ahead.
//!
//! A request has its memory and its file until it is completed. Requests in flight have no order among each other: who needs
//! one waits for the first before it submits the second.

mod context;
mod future;
mod owed;
mod syncs;
mod waiting;

pub use context::{Completion, IoContext, Request};
pub(crate) use future::Driver;
pub use future::IoFuture;
pub(crate) use waiting::Workers;

//! What nodes mean: a POSIX file system over the engine's crash-safe node store.
//!
//! Every change is one operation of the store: one atomic journal record of deltas, applied
//! by [`content`] alone. Nothing here knows of FUSE.

pub mod api;
pub mod content;
mod data;
pub mod dir;
mod error;
pub mod list;
pub mod times;
pub mod tree;

pub use api::{AtimePolicy, Attr, Caller, DirEntry, Ino, ROOT, SetAttr, SetTime, StatFs};
pub use data::{DataOptions, OpenFile};
pub use error::Error;

//! What nodes mean: a POSIX file system over the engine's crash-safe node store.
//!
//! Every change is one operation of the store: one atomic journal record of deltas, applied
//! by [`content`] alone. Nothing here knows of FUSE.
//!
//! A program begins with [`FileSystem::open`]. Files are opened by path ([`FileSystem::open_path`]) or relative to a directory
//! ([`FileSystem::open_at`], [`Dir`]), read and written by the calls of [`FileSystem`], several at a time by an [`IoContext`] or as futures
//! ([`FileSystem::read_future`]), and changed together by a [`Transaction`]. `examples/program.rs` has all of them.
//!
//! Calls check no permissions: the kernel does that for a mount, and programs do it for themselves. A [`Caller`] says who owns what is made, and whether
//! set-id bits stay.

mod acl;
mod aio;
pub mod api;
mod attr;
pub mod content;
mod cookies;
mod data;
pub mod dir;
mod directory;
mod error;
mod filesystem;
pub mod fsck;
mod handle;
pub mod list;
mod listing;
mod many;
mod metrics;
mod namespace;
mod open;
mod orphan;
mod path;
mod rename;
pub mod scrub;
pub mod times;
pub mod tree;
mod tx;
mod walk;
mod xattr;

pub use aio::{Completion, IoContext, IoFuture, Request};
pub use api::{AtimePolicy, Attr, Caller, DirEntry, Ino, ROOT, SetAttr, SetTime, StatFs};
pub use attr::{needs_group, without_privileges};
pub use data::{Advice, DataOptions, OpenFile, PageGuard};
pub use directory::{At, Dir};
pub use error::Error;
pub use filesystem::{DIR_LINK_MAX, FileSystem, FsOptions, LINK_MAX, MkfsOptions};
pub use metrics::{Metric, Quantiles, Value, causes};
pub use rename::{RENAME_EXCHANGE, RENAME_NOREPLACE};
pub use tx::Transaction;
pub use tx::atomic::AtomicWrite;
pub use walk::Removed;
pub use xattr::{XATTR_ACL_KILL_SGID, XATTR_CREATE, XATTR_REPLACE};

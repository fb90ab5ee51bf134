//! What nodes mean: a POSIX file system over the engine's crash-safe node store.
//!
//! Every change is one operation of the store: one atomic journal record of deltas, applied
//! by [`content`] alone. Nothing here knows of FUSE.
//!
//! A program needs no other crate of Sheaf: what it makes and opens an array with is here, too, and the rest of that in [`mod@array`].
//!
//! ```no_run
//! use fs::{Array, Caller, FileSystem, FsOptions, MkfsOptions, OpenOptions, ROOT};
//! use fs::{Geometry, GeometryOptions, create_image, entropy, new_uuid, open_devices};
//! use std::path::PathBuf;
//! use std::sync::Arc;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let images = ["a.img", "b.img"].map(PathBuf::from);
//!
//!     // Once, as `sheaf mkfs` does it. The labels are last: what was interrupted before does not open.
//!     for image in &images {
//!         create_image(image, 256 << 20)?;
//!     }
//!     let devices = open_devices(&images, &OpenOptions::default())?;
//!     let sizes: Vec<u64> = devices.iter().map(|device| device.bytes()).collect();
//!     let geometry = Geometry::plan(&sizes, GeometryOptions::default())?;
//!     let array = Array::create(devices, geometry, "events", new_uuid()?, entropy()?)?;
//!     let array = Arc::new(array);
//!     FileSystem::mkfs(&array, &MkfsOptions::default())?;
//!     array.write_labels()?;
//!     drop(array);
//!
//!     // From then on.
//!     let devices = open_devices(&images, &OpenOptions::default())?;
//!     let fs = FileSystem::open(Arc::new(Array::assemble(devices, false)?), FsOptions::default())?;
//!     let flags = libc::O_RDWR | libc::O_CREAT;
//!     let (_, log) = fs.open_path(&Caller::root(), ROOT, b"/events", flags, 0o644)?;
//!     fs.append(&log, b"an event")?;
//!     fs.fsync(&log, true)?; // durable
//!     drop(log);
//!     fs.close()?;
//!     Ok(())
//! }
//! ```
//!
//! Files are opened by path ([`FileSystem::open_path`]) or relative to a directory
//! ([`FileSystem::open_at`], [`Dir`]), read and written by the calls of [`FileSystem`], several at a time by an [`IoContext`] or as futures
//! ([`FileSystem::read_future`]), and changed together by a [`Transaction`]. `examples/program.rs` has all of them.
//!
//! Calls check no permissions: the kernel does that for a mount, and programs do it for themselves. A [`Caller`] says who owns what is made, and whether
//! set-id bits stay.

mod acl;
mod aio;
mod ancestry;
pub mod api;
pub mod array;
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
pub use array::{
    AlignedBuf, Array, Geometry, GeometryOptions, OpenOptions, create_image, entropy, new_uuid,
    open_devices,
};
pub use attr::{needs_group, without_privileges};
pub use base::clock::{Clock, Timestamp};
pub use data::{Advice, DataOptions, Gone, OpenFile, PageGuard};
pub use directory::{At, Dir};
pub use engine::StoreOptions;
pub use error::Error;
pub use filesystem::{DIR_LINK_MAX, FileSystem, FsOptions, LINK_MAX, MkfsOptions};
pub use metrics::{Metric, Quantiles, Value, causes};
pub use rename::{RENAME_EXCHANGE, RENAME_NOREPLACE};
pub use tx::Transaction;
pub use tx::atomic::AtomicWrite;
pub use walk::Removed;
pub use xattr::{XATTR_ACL_KILL_SGID, XATTR_CREATE, XATTR_REPLACE};

//! What can go wrong in the store.

use format::{Damage, Nid};
use std::sync::Arc;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A device failed or refused.
    #[error("{0}")]
    Device(Arc<device::Error>),
    /// A device does not return data for which the journal's last batches vouch, so nobody knows whether these were ever whole; or what lies
    /// in the journal where the next batch would be. Nothing was written.
    #[error(
        "cannot tell whether what was synced last is whole: {0}; try again when the device returns it. Until then \
         it can be mounted read-only, and `sheaf fsck --repair` goes on without it and names what is concerned"
    )]
    Unread(Arc<device::Error>),
    /// The node was deleted, or never existed.
    #[error("node {0} does not exist")]
    Gone(Nid),
    /// A node's image or its table entry is damaged; other nodes are not concerned.
    #[error("node {nid} is damaged: {damage}")]
    DamagedNode { nid: Nid, damage: Damage },
    /// A structure that the whole store rests on is damaged.
    #[error("the file system is damaged: {0}; run `sheaf fsck` on it")]
    Damaged(Damage),
    /// No space left for what was asked.
    #[error("no space left on the array")]
    NoSpace,
    /// An operation changes more than the journal takes at once.
    #[error("more than the journal takes in one step")]
    TooLarge,
    /// The store was opened read-only.
    #[error("the file system is mounted read-only")]
    ReadOnly,
    /// The store latched read-only after a failure that it could not contain.
    #[error("the file system turned read-only: {0}")]
    Failed(Arc<str>),
    /// A thread of the store could not be started.
    #[error("cannot start a thread of the store: {0}")]
    Thread(Arc<std::io::Error>),
}

impl From<device::Error> for Error {
    fn from(error: device::Error) -> Self {
        Error::Device(Arc::new(error))
    }
}

impl Error {
    pub(crate) fn node(nid: Nid, damage: Damage) -> Self {
        Error::DamagedNode { nid, damage }
    }
}

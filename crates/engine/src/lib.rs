//! The crash-safe node store: nodes and their table, space, the journal, checkpoints,
//! recovery, and the data cache. It knows nothing of names and inodes.
//!
//! A node changes only by a delta, every delta is in the journal's record of its operation,
//! and recovery applies the same deltas by the same code. See [`op`] for operations,
//! [`journal`] for durability, [`checkpoint`] for the way home, [`recovery`] for the way back.

mod ahead;
mod batches;
mod bitmap;
mod blocks;
pub mod cache;
mod chains;
mod checkpoint;
mod claims;
mod clean;
mod commit;
mod content;
mod counters;
mod dirty;
mod epoch;
mod error;
mod finding;
mod growth;
mod held;
mod items;
mod journal;
mod large;
mod new_data;
mod nids;
mod node;
mod op;
mod proof;
mod ready;
mod recovery;
mod region;
mod replay;
mod ring;
mod ring_reader;
mod salvage;
mod scrub;
mod segments;
mod space;
mod space_map;
mod staging;
mod standing;
mod step;
mod store;
pub mod sum;
mod table;
#[cfg(test)]
mod testing;
mod threads;
mod totals;
mod verify;
mod vouched;
mod written;

pub use checkpoint::{CheckpointReport, USER_WORDS};
pub use claims::{FreshNid, Kept, Promise, Reservation};
pub use content::{Content, Merged};
pub use counters::{Distribution, StoreCounters, Summary, Waits};
pub use error::Error;
pub use finding::{FINDINGS_MAX, Finding, Findings, Object, Severity};
pub use growth::Growth;
pub use large::{Extensive, Touched};
pub use new_data::NewData;
pub use node::{Node, NodeLock, NodeRead, NodeRef};
pub use op::{Epoch, Mode, Need, Op, Slot, Slots};
pub use proof::{Proof, proves};
pub use recovery::{RecoveryReport, outdated, outdated_text};
pub use replay::RecoveryPhases;
pub use salvage::{Loss, Salvage, SalvageError};
pub use scrub::ScrubStep;
pub use space::{ChunkState, Extent};
pub use space_map::SpaceMap;
pub use standing::{Standing, standing};
pub use store::{STAGING_MAX, SpaceInfo, Store, StoreOptions, THREADS_MAX};
pub use verify::{Seen, Unread, Verified, Visitor, check_copies};
pub use written::BytesWritten;

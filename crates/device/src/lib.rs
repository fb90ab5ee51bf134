//! One device and the array: aligned buffers, submission and completion, striping, labels,
//! flushes, and the simulated device that loses power. Knows nothing of files or nodes.
//!
//! ```text
//! Array ── geometry ──► per-device batches ──► BlockDevice::run
//!   │                                            ├─ FileDevice ── uring | threads
//!   └─ FlushGate (one per device)                ├─ LatencyDevice, over one of these
//!                                                ├─ Driven, a thread over one of these
//!                                                └─ sim::SimDevice
//! ```

mod ages;
mod array;
mod block;
pub mod buf;
mod doubt;
mod driver;
mod error;
mod file;
mod flush;
mod identity;
mod kept;
mod labels;
mod latency;
mod loops;
mod probe;
mod queue;
mod reap;
mod scan;
pub mod sim;
mod threads;
mod topology;
mod unlabelled;
mod uring;
mod uuid;
mod vectored;
mod when_free;
mod writer;

pub use ages::Outdated;
pub use array::{Array, ArrayStats, DeviceStats, Io};
pub use block::{BlockDevice, DeviceInfo, Durability, Operation, Request, journal_align};
pub use buf::{AlignedBuf, Shared};
pub use error::{Error, LostLabel, LostLabels};
pub use file::{
    Backend, Claim, Occupied, OpenOptions, check_distinct, claim, create_image, has_poll_queues,
    open_devices,
};
pub use labels::{LabelRepair, feature_text, label_features, label_name, name_bytes};
pub use latency::{Latency, LatencyDevice, Stall};
pub use probe::{Signature, probe, signatures};
pub use queue::{Bell, DeviceQueue, Flight, FlightId, Kind, Landed, Queues, Refused, Run};
pub use reap::{Costs, Histogram, Reaped, Reaping};
pub use scan::{ArrayId, Member, candidates, companions, find_members, scan};
pub use topology::{Hurried, Topology, Unhurried};
pub use unlabelled::{Incomplete, Places};
pub use uring::polled::ReapRing;
pub use uring::raw::{Completion, RawQueue};
pub use uuid::{new_uuid, parse_uuid, uuid_text};
pub use vectored::{Scattered, Vectored};
pub use when_free::{claim_when_free, open_when_free};
pub use writer::Writer;

//! The array below a file system, for programs: all of this is from the crates below, which a program need not name.
//!
//! An array is made by [`Array::create`], over devices that [`open_devices`] has opened and by what [`Geometry::plan`] says; then
//! comes [`FileSystem::mkfs`](crate::FileSystem::mkfs), and [`Array::write_labels`] last. From then on [`Array::assemble`] has it, for
//! [`FileSystem::open`](crate::FileSystem::open). Which devices are an array's is found by [`companions`], or by [`find_members`] with an [`ArrayId`]
//! among [`candidates`].

pub use base::rng::entropy;
pub use device::{
    AlignedBuf, Array, ArrayId, Backend, BlockDevice, Error, Member, OpenOptions, ReapRing,
    Reaping, Signature, Topology, candidates, companions, create_image, find_members, label_name,
    new_uuid, open_devices, open_when_free, parse_uuid, probe, uuid_text,
};
pub use format::Damage;
pub use format::geometry::{Geometry, GeometryOptions};

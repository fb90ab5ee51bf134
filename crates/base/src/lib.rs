//! The machine as the rest of Sheaf sees it: clocks, seeded randomness, ranked
//! locks, threads and CPU topology. This is the only crate that names
//! `std::time`, `std::thread`, a lock type or a random number generator, so that
//! a simulator can replace each of them in one place. It knows nothing of storage.

pub mod canary;
pub mod clock;
pub mod rng;
pub mod sync;
pub mod sys;
pub mod thread;

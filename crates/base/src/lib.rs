//! What the rest of Sheaf needs of the machine: clocks, randomness, ranked locks, threads, CPU topology, memory mappings, thin wrappers of
//! system calls, and the hooks of simulation and tracing. No other crate reads a clock, starts a thread, or uses a lock or a random
//! number generator of the standard library, so that a simulator can replace each of them in one place (`Duration`, `Arc`, `OnceLock` and
//! channels are free to use). It knows nothing of storage.

// Parts that `model/` compiles against a crate of its own name this one.
extern crate self as base;

pub mod aio;
pub mod allocations;
#[cfg(feature = "trace")]
mod arc;
pub mod atomic;
pub mod canary;
pub mod cgroup;
pub mod clock;
pub mod counted;
pub mod counter;
mod latch;
pub mod limited;
pub mod map;
pub mod mapping;
pub mod moves;
pub mod prefetch;
pub mod racy;
pub mod readers;
pub mod rng;
#[cfg(feature = "simulate")]
pub mod sched;
#[cfg(not(feature = "simulate"))]
pub mod sched {
    //! The seeded scheduler exists in simulation builds only; elsewhere its points are nothing.

    #[inline(always)]
    pub fn point() {}

    #[inline(always)]
    pub fn spend(_: std::time::Duration) {}
}
mod skip;
pub mod spares;
pub mod sync;
pub mod sys;
pub mod thread;
pub mod tight;
pub mod trace;

pub use skip::{SKIPPED, missing_for_mounts, skip};

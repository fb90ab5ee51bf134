//! What an operation touches that other cores may touch too: locks, atomics, reference counts.
//!
//! With the feature `trace` every lock of [`crate::sync`], every atomic of [`crate::atomic`] and
//! every count of [`crate::sync::Arc`] and [`crate::counted::Counted`] tells the calling thread's recorder, and the types stay as
//! large as they are without, so that what shares a cache line does so too. Without the feature,
//! which is how users build, the functions here are empty and those types are the library's own.
//!
//! What the types cannot see is told by hand: [`shared`] and [`unshared`] for a count of the
//! standard library's `Arc`, [`device`] for time that a device takes, [`mark`] and
//! [`joined`] for parts of a longer job that several threads can share.

#[cfg(feature = "trace")]
mod hooks;
mod recorder;

#[cfg(feature = "trace")]
pub(crate) use hooks::{ahead, atomic, born, born_at, counted, locked, tried, unlocked};
#[cfg(feature = "trace")]
pub use hooks::{device, joined, mark, processor, shared, unshared};
pub use recorder::{Event, Kind, cpu, pause, record, reserve, set_cpu, start, stop, ticks};

/// In this build there is something to record.
pub const AVAILABLE: bool = cfg!(feature = "trace");

/// See [`device`].
#[must_use]
#[derive(Debug)]
pub struct Waiting {
    /// The thread's processor time when it began, in nanoseconds.
    #[cfg(feature = "trace")]
    cpu_ns: u64,
}

/// Of the standard library's `Arc`: a reference was made from this one.
#[cfg(not(feature = "trace"))]
#[inline(always)]
pub fn shared<T: ?Sized>(_arc: &std::sync::Arc<T>) {}

/// Of the standard library's `Arc`: this reference is about to go.
#[cfg(not(feature = "trace"))]
#[inline(always)]
pub fn unshared<T: ?Sized>(_arc: &std::sync::Arc<T>) {}

/// Memory is asked for before it is needed, to be read or changed.
#[cfg(not(feature = "trace"))]
#[inline(always)]
pub(crate) fn ahead(_start: *const u8, _len: usize, _change: bool) {}

/// The caller waits for a device that moves this many bytes, as long as the value lives.
#[cfg(not(feature = "trace"))]
#[inline(always)]
pub fn device(_bytes: impl FnOnce() -> u64) -> Waiting {
    Waiting {}
}

/// The caller begins a part of its work that several threads can share; parts of one stage have one name.
#[cfg(not(feature = "trace"))]
#[inline(always)]
pub fn mark(_stage: &'static str) {}

/// All parts of a stage are done.
#[cfg(not(feature = "trace"))]
#[inline(always)]
pub fn joined() {}

/// Tells what processor time the thread has had, by which a recording knows what other processes took.
#[cfg(not(feature = "trace"))]
#[inline(always)]
pub fn processor() {}

//! Streams: long runs of large requests, one behind the other, go past the cache, which gains nothing by them.

mod reading;
mod writing;

pub(super) use reading::{Reader, Readers, Streamed};
pub(super) use writing::{Run, Streams};

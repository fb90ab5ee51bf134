//! Streams: long runs of large requests, one behind the other, go past the cache, which gains nothing by them.

mod behind;
mod reading;
mod writing;

pub(super) use behind::{Behind, Seated};
pub(super) use reading::{Reader, Readers, Streamed};
pub(super) use writing::Streams;

//! Benchmarks, each with its counterparts in the same run: `sheaf bench` is this crate.
//!
//! A suite sets its comparators up itself, lets the sides take turns, takes everything down
//! again, also when it is interrupted, and reports one [`contract::Report`]. Sheaf runs as
//! users run it, with journal, checksums and checkpoints. Deliberately absent: command-line
//! parsing, which is `cli`'s, and anything that only a benchmark could call in the layers below.

pub mod array;
pub mod cache;
pub mod checkpoint;
pub mod contract;
mod counted;
mod error;
pub mod files;
pub mod fsync;
pub mod fxmark;
pub mod html;
pub mod interrupt;
pub mod ior;
pub mod list;
mod meter;
mod page;
pub mod pool;
pub mod reap;
pub mod recovery;
pub mod remove;
mod runner;
pub mod scale;
pub mod target;
pub mod text;
mod timing;
pub mod tx;
pub mod written;

pub use error::Error;

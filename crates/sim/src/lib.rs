//! Crashes the real engine and file system, over simulated devices, in every way that the fault
//! model of [`device::sim`] allows, and compares what is left with a model. See
//! `docs/simulator.md`.

pub mod aimed;
pub mod all;
mod atomic_files;
pub mod atomics;
mod beside;
pub mod canaries;
pub mod content;
pub mod crowd;
pub mod drive;
pub mod explore;
pub mod faults;
mod flights;
mod forgiven;
pub mod fuzz;
pub mod lies;
pub mod look;
pub mod noticed;
pub mod op;
pub mod oracle;
mod pages;
pub mod random;
mod reclaim;
pub mod run;
mod scans;
pub mod sequences;
pub mod setting;
mod shared;
mod sparse;
mod staged;
pub mod stamps;
mod streams;
pub mod threads;
pub mod times;
pub mod transact;
pub mod transacted;
pub mod tree;
mod unreadable;
pub mod versioned;
pub mod world;

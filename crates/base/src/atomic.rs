//! Atomics of the parts that take no lock. Those parts name them by this path, so that `model/` can
//! put a model checker's in their place.

pub use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

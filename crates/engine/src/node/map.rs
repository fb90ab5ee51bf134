//! Tables by nids.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Spreads nids over hash buckets (Fibonacci hashing); nids are ours, nobody can flood it.
#[derive(Default)]
pub(crate) struct NidHasher(u64);

impl Hasher for NidHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte as u64);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(29);
    }
}

pub(crate) type NidMap<V> = HashMap<u64, V, BuildHasherDefault<NidHasher>>;

//! Hash tables whose order of iteration is the same in every run, so that nothing that
//! follows from it makes a simulation unrepeatable. Keys are our own numbers, never chosen by
//! a stranger: for names there is the keyed hash of the directory. So a multiplication is all
//! the hashing they need.

use std::hash::{BuildHasherDefault, Hasher};

pub type HashMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<NumberHasher>>;
pub type HashSet<K> = std::collections::HashSet<K, BuildHasherDefault<NumberHasher>>;

/// Multiplicative hashing. The factor is none of those by which tables are chosen elsewhere:
/// numbers that have a table in common still spread over its places.
#[derive(Clone, Copy, Debug, Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        // A table takes its place from the lowest bits and a tag from the highest: numbers that
        // agree in their lowest bits differ in the product's upper half.
        let product = u128::from(self.0 ^ value) * 0xD6E8_FEB8_6659_FD93;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{BuildHasher, Hash};

    fn hash(value: impl Hash) -> u64 {
        BuildHasherDefault::<NumberHasher>::default().hash_one(value)
    }

    #[test]
    fn numbers_in_a_row_or_far_apart_spread_over_places_and_tags() {
        for step in [1, 4, 64, 256, 4096, 1 << 20, 1 << 32] {
            let hashes: Vec<u64> = (0..4096_u64).map(|i| hash((7, i * step))).collect();
            let distinct = |part: &dyn Fn(u64) -> u64| {
                let all: HashSet<u64> = hashes.iter().map(|&hash| part(hash)).collect();
                all.len()
            };
            // Of 4,096 places random numbers would meet about 2,590.
            let places = distinct(&|hash| hash & 4095);
            assert!(places > 2000, "step {step}: {places} places");
            let tags = distinct(&|hash| hash >> 57);
            assert!(tags > 100, "step {step}: {tags} tags");
        }
    }
}

//! Hash tables whose order of iteration is the same in every run, so that nothing that
//! follows from it makes a simulation unrepeatable. Keys are our own numbers, never chosen by
//! a stranger: for names there is the keyed hash of the directory. So a multiplication is all
//! the hashing they need.

use std::hash::{BuildHasherDefault, Hasher};

pub type HashMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<NumberHasher>>;
pub type HashSet<K> = std::collections::HashSet<K, BuildHasherDefault<NumberHasher>>;

/// A table by numbers that are neighbours and are used one after the other: they lie in places that follow each other, so that who goes
/// through them in their order, and makes or removes them so, finds several on one line of memory.
pub type NearMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<NearHasher>>;

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

/// Numbers that lie side by side in a [`NearMap`]: half of what the table looks at in one step, so that they fill no such step by themselves. What is
/// removed from a full one leaves a mark behind, and who looks for what is not there goes on to the next.
const NEIGHBOURS: u64 = 8;
/// The bits of a hash that the table has as a tag, and looks at before it looks at a key.
const TAG: u64 = 0x7F << 57;

/// The place is that of the first number of a key, the tag is of all of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct NearHasher {
    first: Option<u64>,
    all: NumberHasher,
}

impl Hasher for NearHasher {
    fn finish(&self) -> u64 {
        let first = self.first.unwrap_or(0);
        let mut place = NumberHasher::default();
        place.write_u64(first / NEIGHBOURS);
        let place = place.finish().wrapping_mul(NEIGHBOURS) + first % NEIGHBOURS;
        self.all.finish() & TAG | place & !TAG
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.first.get_or_insert(value);
        self.all.write_u64(value);
    }
}

/// Few cores, and how many times as many shards each of many has at most.
const FEW: usize = 8;
const MORE: usize = 4;

/// How many shards a table has that is to have so many for each of a few cores, a power of two; each of twice as many cores has twice as
/// many, and so on up to [`MORE`] times: one of many finds more seldom that it was itself that used a shard last. Those of few stay in their caches.
pub fn shards_for(cores: usize, each: usize) -> usize {
    let more = cores.div_ceil(FEW).min(MORE);
    (cores * each * more).next_power_of_two()
}

/// The shard, of a power of two of them, of a group of numbers that are used together. Groups come in rows, of a power of two each: who takes
/// numbers in their order goes along a row, and others along other rows. Groups of a row are in shards that follow each other, and rows
/// begin as far apart as so many rows can, so that those who go along them at the same time are seldom in one shard.
#[inline]
pub fn shard_of(group: u64, row: u64, shards: usize) -> usize {
    debug_assert!(shards.is_power_of_two() && row.is_power_of_two());
    // After van der Corput: the first row's beginning, then the middle, then the middles of both halves, and so on.
    let begin = (group / row)
        .reverse_bits()
        .rotate_left(shards.trailing_zeros());
    (begin + group % row) as usize & (shards - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{BuildHasher, Hash};

    fn hash(value: impl Hash) -> u64 {
        BuildHasherDefault::<NumberHasher>::default().hash_one(value)
    }

    #[test]
    fn neighbours_lie_side_by_side_and_their_tags_differ() {
        let near = |value: (u64, u64)| BuildHasherDefault::<NearHasher>::default().hash_one(value);
        let places = |step: u64| -> HashSet<u64> {
            let first = (0..4096_u64).map(|i| near((i * step, 7)));
            first.map(|hash| hash % 4096 / NEIGHBOURS).collect()
        };
        for step in [NEIGHBOURS, 256, 4096, 1 << 32] {
            // Of 512 places.
            assert!(places(step).len() > 490, "step {step}");
        }
        for group in 0..256 {
            let all = |i| near((group * NEIGHBOURS + i, 7));
            assert!((1..NEIGHBOURS).all(|i| all(i) & !TAG == (all(0) & !TAG) + i));
        }
        let tags: HashSet<u64> = (0..256).map(|i| near((i, 7)) >> 57).collect();
        assert!(tags.len() > 90, "{} tags", tags.len());
        let uses: HashSet<u64> = (0..256).map(|i| near((7, i)) >> 57).collect();
        assert!(uses.len() > 90, "{} tags", uses.len());
    }

    #[test]
    fn each_of_many_cores_has_more_shards() {
        let shards = [1, 2, 8, 9, 16, 40, 128].map(|cores| shards_for(cores, 64));
        assert_eq!(shards, [64, 128, 512, 2048, 2048, 16384, 32768]);
    }

    #[test]
    fn who_goes_along_other_rows_is_in_other_shards() {
        for shards in [64, 1024, 4096] {
            let rows = shards as u64 / 16;
            for at in [0, 1, 77, 255] {
                let used: HashSet<usize> = (0..rows)
                    .map(|i| shard_of(i * 256 + at, 256, shards))
                    .collect();
                assert_eq!(used.len() as u64, rows);
            }
            // Far apart, as long as rows are few.
            let mut begins: Vec<usize> =
                (0..rows).map(|i| shard_of(i * 256, 256, shards)).collect();
            begins.sort_unstable();
            assert!(begins.windows(2).all(|pair| pair[1] - pair[0] == 16));
        }
        let all: HashSet<usize> = (0..4096).map(|group| shard_of(group, 256, 1024)).collect();
        assert_eq!(all.len(), 1024);
        assert_eq!(shard_of(u64::MAX, 256, 1), 0);
    }

    #[test]
    fn what_comes_and_goes_by_neighbours_takes_no_more_room() {
        let mut map: NearMap<u64, u64> = NearMap::default();
        map.reserve(400);
        let room = map.capacity();
        for number in 0..200_000 {
            map.insert(number, number);
            if number >= 200 {
                assert_eq!(map.remove(&(number - 200)), Some(number - 200));
            }
            let older = number / 2;
            assert_eq!(map.contains_key(&older), older + 200 > number);
        }
        assert!(map.len() == 200 && map.capacity() <= room);
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

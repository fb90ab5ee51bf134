//! The names of a directory that are in one node.
//!
//! Invariants:
//! 1. Names are in the order of their keys, and no key is there twice.
//! 2. `bytes` is the length of all encoded, `heap` what they take beyond the list itself: who puts
//!    a name into a node asks for the one each time, who charges for the node for the other.

use super::codec::Reader;
use super::entry::{self, Entry, Name, heap, list_len};
use format::{Damage, Nid};
use std::ops::Deref;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameList {
    list: Vec<Name>,
    bytes: usize,
    heap: usize,
}

impl From<Vec<Name>> for NameList {
    /// The names are in order.
    fn from(list: Vec<Name>) -> NameList {
        NameList {
            bytes: list_len(&list),
            heap: list.iter().map(Entry::memory).sum(),
            list,
        }
    }
}

impl Deref for NameList {
    type Target = [Name];
    fn deref(&self) -> &[Name] {
        &self.list
    }
}

impl NameList {
    /// Reads names to the end of the reader.
    pub fn decode(reader: &mut Reader<'_>) -> Result<NameList, Damage> {
        let bytes = reader.left();
        let list: Vec<Name> = entry::decode_list(reader)?;
        Ok(NameList {
            bytes,
            heap: list.iter().map(Entry::memory).sum(),
            list,
        })
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(self.bytes);
        entry::encode_list(&self.list, out);
    }

    pub fn encoded_len(&self) -> usize {
        self.bytes
    }

    pub fn insert(&mut self, name: Name) -> Result<(), Damage> {
        let (bytes, heap) = (name.encoded_len(), name.memory());
        entry::insert(&mut self.list, name)?;
        self.bytes += bytes;
        self.heap += heap;
        Ok(())
    }

    pub fn remove(&mut self, key: u64) -> Result<(), Damage> {
        let name = entry::remove(&mut self.list, key)?;
        self.bytes -= name.encoded_len();
        self.heap -= name.memory();
        Ok(())
    }

    /// The name of this key refers to another inode from now on.
    pub fn retarget(
        &mut self,
        key: u64,
        nid: Nid,
        generation: u64,
        kind: u8,
    ) -> Result<(), Damage> {
        let at = self.list.binary_search_by_key(&key, |name| name.key);
        let at = at.map_err(|_| Damage::new("delta", "retargets a key that is not there"))?;
        let name = &mut self.list[at];
        self.bytes -= name.encoded_len();
        (name.nid, name.generation, name.kind) = (nid, generation, kind);
        self.bytes += name.encoded_len();
        Ok(())
    }

    /// Loses the names from this key on.
    pub fn drop_from(&mut self, key: u64) {
        let at = self.list.partition_point(|name| name.key < key);
        for name in self.list.drain(at..) {
            self.bytes -= name.encoded_len();
            self.heap -= name.memory();
        }
    }

    pub fn into_vec(self) -> Vec<Name> {
        self.list
    }

    pub fn memory(&self) -> usize {
        heap(self.list.capacity() * size_of::<Name>()) + self.heap
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;

    #[test]
    fn sums_are_those_of_the_names() {
        let mut rng = Rng::new(3);
        let mut names = NameList::default();
        for _ in 0..5000 {
            let (key, len) = (rng.below(200), 1 + rng.below(60) as usize);
            let name = Name {
                key,
                nid: Nid(1),
                generation: 1,
                kind: 8,
                name: vec![b'x'; len].as_slice().into(),
            };
            let there = names.iter().any(|name| name.key == key);
            let number = rng.next_u64() >> rng.below(64);
            match rng.below(24) {
                0 => names.drop_from(key),
                20.. => {
                    let changed = names.retarget(key, Nid(number), number, 4);
                    assert_eq!(changed.is_ok(), there);
                }
                1..8 => assert_eq!(names.remove(key).is_ok(), there),
                _ => assert_eq!(names.insert(name).is_ok(), !there),
            }
            let mut encoded = Vec::new();
            names.encode(&mut encoded);
            assert_eq!(encoded.len(), names.encoded_len());
            assert_eq!(names.heap, names.iter().map(Entry::memory).sum::<usize>());
            let again = NameList::decode(&mut Reader::new("names", &encoded)).unwrap();
            assert_eq!(again, names);
            assert_eq!(NameList::from(names.to_vec()), names);
        }
    }
}

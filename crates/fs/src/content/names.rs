//! The names of a directory that are in one node.
//!
//! They are held as the node's image has them. So a node is read and written by copying bytes, takes little more
//! memory than its image, and goes by two frees. Where there are more than a few, an index beside the bytes finds a key in a
//! few cache lines; few are gone through, which takes no other line than theirs.
//!
//! Invariants:
//! 1. `bytes` has the names in their encoded form, one after another in the order of their keys; no key is there
//!    twice. All of it was checked when it came in.
//! 2. `index` is empty, or has a place for each name, in the same order. It is there for more than `FEW` bytes, and not
//!    for less than half of them.
//! 3. `ends` are a hint: of the first key and the last, as they were when the index was made or lost its end.

use super::codec::Reader;
use super::entry::{Entry, Name, NameView, heap};
use super::leaf::{Elements, Pick};
use base::prefetch;
use format::dir::{COLLISION_BITS, HASH_BITS};
use format::item::PAYLOAD_MAX;
use format::{Damage, Nid};
use std::ops::Range;

#[derive(Clone, Default)]
pub struct NameList {
    bytes: Vec<u8>,
    index: Vec<Place>,
    ends: (u32, u32),
}

/// The upper bits of a name's key, and below them where the name begins.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place(u64);

const AT_BITS: u32 = 16;
/// Bits of a key that no place has.
const BELOW: u32 = HASH_BITS + COLLISION_BITS + AT_BITS - u64::BITS;
/// Bytes of all names.
const LEN_MAX: usize = (1 << AT_BITS) - 1;
const _: () = assert!(LEN_MAX >= PAYLOAD_MAX);

impl Place {
    fn new(key: u64, at: usize) -> Place {
        Place(key >> BELOW << AT_BITS | at as u64)
    }

    fn upper(self) -> u64 {
        self.0 >> AT_BITS
    }

    fn at(self) -> usize {
        self.0 as usize & LEN_MAX
    }
}

/// The first bits of the upper bits of a key.
fn foremost(upper: u64) -> u32 {
    (upper >> (u64::BITS - AT_BITS - u32::BITS)) as u32
}

/// Bytes of names that have no index: two cache lines.
const FEW: usize = 128;

/// How many of these a list takes memory for that has so many: sizes recur, for the allocator's sake, and the next name
/// mostly fits.
fn room_for<T>(len: usize) -> usize {
    let bytes = len * size_of::<T>();
    let step = match bytes < 512 {
        true => 64,
        false => 256,
    };
    (bytes + step / 8).next_multiple_of(step) / size_of::<T>()
}

fn reserve<T>(list: &mut Vec<T>, more: usize) {
    if list.capacity() - list.len() < more {
        let room = room_for::<T>(list.len() + more);
        list.reserve_exact(room - list.len());
    }
}

impl From<Vec<Name>> for NameList {
    /// The names are in order.
    fn from(list: Vec<Name>) -> NameList {
        let mut names = NameList::default();
        reserve(&mut names.bytes, list.iter().map(Entry::encoded_len).sum());
        list.iter().for_each(|name| name.encode(&mut names.bytes));
        assert!(names.bytes.len() <= LEN_MAX, "names of one node");
        names.index_many();
        names
    }
}

impl PartialEq for NameList {
    fn eq(&self, other: &NameList) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for NameList {}

impl NameList {
    /// Reads names to the end of the reader; damage when they are not in strict order.
    pub fn decode(reader: &mut Reader<'_>) -> Result<NameList, Damage> {
        if reader.left() > LEN_MAX {
            return Err(reader.damage("too many names"));
        }
        let mut names = NameList::default();
        reserve(&mut names.bytes, reader.left());
        names.bytes.extend_from_slice(reader.peek());
        let many = names.bytes.len() > FEW;
        let mut index = Vec::with_capacity(if many { names.bytes.len() / USUAL } else { 0 });
        let mut last = None;
        while !reader.is_empty() {
            let at = names.bytes.len() - reader.left();
            let key = NameView::read(reader)?.key;
            if last.is_some_and(|last| last >= key) {
                return Err(reader.damage("entries out of order"));
            }
            last = Some(key);
            if many {
                index.push(Place::new(key, at));
            }
        }
        index.shrink_to(room_for::<Place>(index.len()));
        names.index = index;
        names.note_ends();
        Ok(names)
    }

    /// Makes the index, if there are enough names for one.
    fn index_many(&mut self) {
        if self.bytes.len() <= FEW || self.is_indexed() {
            return;
        }
        let mut index = Vec::new();
        reserve(&mut index, self.starts().count());
        let place = |at| Place::new(NameView::key_at(&self.bytes[at..]), at);
        index.extend(self.starts().map(place));
        self.index = index;
        self.note_ends();
    }

    fn note_ends(&mut self) {
        let end = |place: Option<&Place>| place.map_or(0, |place| foremost(place.upper()));
        self.ends = (end(self.index.first()), end(self.index.last()));
    }

    /// Gives the index up, if few names are left.
    fn forget_index(&mut self) {
        if self.bytes.len() < FEW / 2 {
            self.index = Vec::new();
        }
    }

    fn is_indexed(&self) -> bool {
        !self.index.is_empty()
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes);
    }

    pub fn encoded_len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn len(&self) -> usize {
        match self.is_indexed() {
            true => self.index.len(),
            false => self.starts().count(),
        }
    }

    /// Where names begin.
    fn starts(&self) -> impl Iterator<Item = usize> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = at;
            let name = self.bytes.get(start..).filter(|rest| !rest.is_empty())?;
            at += NameView::len_at(name);
            Some(start)
        })
    }

    pub fn iter(&self) -> impl Iterator<Item = Name> + '_ {
        self.views().map(Name::from)
    }

    pub fn to_vec(&self) -> Vec<Name> {
        self.iter().collect()
    }

    fn views(&self) -> Views<'_> {
        Views(&self.bytes)
    }

    /// Where name `i` begins, or all end.
    #[inline]
    fn start(&self, i: usize) -> usize {
        match self.is_indexed() {
            true => self
                .index
                .get(i)
                .map_or(self.bytes.len(), |place| place.at()),
            false => self.starts().nth(i).unwrap_or(self.bytes.len()),
        }
    }

    /// Where the first name begins whose key is not below this one, or all end, without an index.
    #[inline]
    fn go_through(&self, key: u64) -> usize {
        let mut at = 0;
        while let Some(name) = self.bytes.get(at..).filter(|rest| !rest.is_empty()) {
            // All but the last are mostly of this kind.
            let (own, len) = match NameView::plain(name) {
                Some(plain) => plain,
                None => (NameView::key_at(name), NameView::len_at(name)),
            };
            if own >= key {
                break;
            }
            at += len;
        }
        at
    }

    /// About where the places and the bytes of a key with these upper bits are, in a long index: keys are hashes, so that can be told
    /// roughly by the first and the last, of which the list itself has a hint.
    #[inline]
    fn guess(&self, upper: u64) -> Option<(Range<usize>, usize)> {
        let len = self.index.len();
        if len <= 2 * NEAR {
            return None;
        }
        let (low, high) = (u64::from(self.ends.0), u64::from(self.ends.1));
        let above = u64::from(foremost(upper)).saturating_sub(low);
        let part = |of: usize| (above * of as u64 / (high - low).max(1)).min(of as u64) as usize;
        let (bytes, place) = (part(self.bytes.len()), part(len));
        let places = place.saturating_sub(NEAR)..(place + NEAR).min(len);
        Some((places, bytes.saturating_sub(NEAR_BYTES / 2)))
    }

    #[inline]
    fn ask_bytes(&self, from: usize) {
        let bytes = &self.bytes[from..];
        prefetch::start(bytes.as_ptr(), bytes.len().min(NEAR_BYTES));
    }

    /// How many places have upper bits below these. The few lines of memory where these may be, and those of the names there, are
    /// fetched at once, instead of one after the other by a search.
    fn lower_place(&self, upper: u64) -> usize {
        let below = |places: &[Place]| places.partition_point(|place| place.upper() < upper);
        let Some((Range { start, end }, bytes)) = self.guess(upper) else {
            return below(&self.index);
        };
        self.ask_bytes(bytes);
        match below(&self.index[start..end]) {
            0 if start > 0 => below(&self.index[..start]),
            n if n == end - start => end + below(&self.index[end..]),
            n => start + n,
        }
    }

    /// Where a key has its name, or would have it: in the index, if there is one, and in the bytes.
    fn find(&self, key: u64) -> Result<(usize, usize), (usize, usize)> {
        let (i, at) = match self.is_indexed() {
            true => {
                let i = self.lower(key);
                (i, self.start(i))
            }
            false => (0, self.go_through(key)),
        };
        match at < self.bytes.len() && NameView::key_at(&self.bytes[at..]) == key {
            true => Ok((i, at)),
            false => Err((i, at)),
        }
    }

    pub fn insert(&mut self, name: &Name) -> Result<(), Damage> {
        let damage = |what: &str| Err(Damage::new("delta", what));
        let (len, before) = (name.encoded_len(), self.bytes.len());
        let Err((i, at)) = self.find(name.key) else {
            return damage("inserts a key that is there");
        };
        if before + len > LEN_MAX {
            return damage("inserts a name where there is no room");
        }
        reserve(&mut self.bytes, len);
        name.encode(&mut self.bytes);
        self.bytes[at..].rotate_right(len);
        if self.is_indexed() {
            reserve(&mut self.index, 1);
            self.index.insert(i, Place::new(name.key, at));
            // What is below stays below: all of it is at most LEN_MAX.
            self.index[i + 1..]
                .iter_mut()
                .for_each(|later| later.0 += len as u64);
        }
        self.index_many();
        Ok(())
    }

    pub fn remove(&mut self, key: u64) -> Result<(), Damage> {
        let Ok((i, at)) = self.find(key) else {
            return Err(Damage::new("delta", "removes a key that is not there"));
        };
        let len = NameView::len_at(&self.bytes[at..]);
        self.bytes.drain(at..at + len);
        if self.is_indexed() {
            self.index.remove(i);
            let later = self.index[i..].iter_mut();
            later.for_each(|later| later.0 -= len as u64);
        }
        self.forget_index();
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
        let Ok((_, at)) = self.find(key) else {
            return Err(Damage::new("delta", "retargets a key that is not there"));
        };
        let name = Name {
            nid,
            generation,
            kind,
            ..NameView::at(&self.bytes[at..]).into()
        };
        self.remove(key)?;
        self.insert(&name)
    }

    /// Loses the names from this key on.
    pub fn drop_from(&mut self, key: u64) {
        let (Ok((i, at)) | Err((i, at))) = self.find(key);
        if at < self.bytes.len() {
            self.bytes.truncate(at);
            self.index.truncate(i);
            self.note_ends();
            self.bytes.shrink_to(room_for::<u8>(at));
            self.index.shrink_to(room_for::<Place>(self.index.len()));
            self.forget_index();
        }
    }

    pub fn memory(&self) -> usize {
        heap(self.bytes.capacity()) + heap(self.index.capacity() * size_of::<Place>())
    }
}

/// Places to either side of where one is looked for first: two lines of memory.
const NEAR: usize = 8;
/// Bytes of names around where one is thought to be.
const NEAR_BYTES: usize = 256;
/// Bytes of a short name.
const USUAL: usize = 16;

/// Names from one on, where they lie.
struct Views<'a>(&'a [u8]);

impl<'a> Iterator for Views<'a> {
    type Item = NameView<'a>;

    fn next(&mut self) -> Option<NameView<'a>> {
        if self.0.is_empty() {
            return None;
        }
        let (view, rest) = NameView::split(self.0);
        self.0 = rest;
        Some(view)
    }
}

impl Elements<Name> for NameList {
    type View<'a> = NameView<'a>;

    #[inline]
    fn view(&self, i: usize) -> NameView<'_> {
        NameView::at(&self.bytes[self.start(i)..])
    }

    fn len(&self) -> usize {
        NameList::len(self)
    }

    fn at(&self, i: usize) -> Name {
        self.view(i).into()
    }

    #[inline]
    fn key_at(&self, i: usize) -> u64 {
        NameView::key_at(&self.bytes[self.start(i)..])
    }

    fn len_at(&self, i: usize) -> usize {
        match self.is_indexed() {
            true => self.start(i + 1) - self.start(i),
            false => NameView::len_at(&self.bytes[self.start(i)..]),
        }
    }

    fn lower(&self, key: u64) -> usize {
        if !self.is_indexed() {
            let at = self.go_through(key);
            return self.starts().take_while(|start| *start < at).count();
        }
        let upper = key >> BELOW;
        let mut i = self.lower_place(upper);
        // Mostly none or one.
        while i < self.index.len() && self.index[i].upper() == upper && self.key_at(i) < key {
            i += 1;
        }
        i
    }

    fn encoded_len(&self) -> usize {
        self.bytes.len()
    }

    fn copy(&self, some: Range<usize>) -> Vec<Name> {
        let views = Views(&self.bytes[self.start(some.start)..]);
        views.take(some.len()).map(Name::from).collect()
    }

    fn is_single(&self) -> bool {
        !self.is_empty() && NameView::len_at(&self.bytes) == self.bytes.len()
    }

    #[inline]
    fn ask(&self, first: u64) {
        let (places, bytes) = self
            .guess(first >> BELOW)
            .unwrap_or((0..self.index.len(), 0));
        let places = &self.index[places];
        prefetch::start(places.as_ptr().cast(), size_of_val(places));
        self.ask_bytes(bytes);
    }

    fn with_key(&self, key: u64) -> Option<NameView<'_>> {
        let (_, at) = self.find(key).ok()?;
        Some(NameView::at(&self.bytes[at..]))
    }

    fn len_of(&self, key: u64) -> usize {
        match self.find(key) {
            Ok((_, at)) => NameView::len_at(&self.bytes[at..]),
            Err(_) => 0,
        }
    }

    #[inline]
    fn pick(
        &self,
        first: u64,
        bits: u32,
        wanted: impl Fn(NameView<'_>) -> bool,
    ) -> Pick<NameView<'_>> {
        // A group is mostly one, or nothing.
        let inside = |view: &NameView<'_>| view.key >> bits == first >> bits;
        let wanted = |view: &NameView<'_>| wanted(*view);
        if !self.is_indexed() {
            let group = Views(&self.bytes[self.go_through(first)..]);
            return Pick::of(group.take_while(inside), wanted);
        }
        debug_assert!(bits <= BELOW);
        let upper = first >> BELOW;
        let near = self.index[self.lower_place(upper)..].iter();
        let near = near.take_while(|place| place.upper() == upper);
        let near = near.map(|place| NameView::at(&self.bytes[place.at()..]));
        Pick::of(near.filter(inside), wanted)
    }
}

impl std::fmt::Debug for NameList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;
    use std::collections::BTreeMap;

    /// Keys that differ in what places have, in what they do not have, and in the tie alone.
    fn any_key(rng: &mut Rng) -> u64 {
        let upper = rng.below(12) << 50;
        match rng.below(3) {
            0 => upper,
            1 => upper | rng.below(4) << COLLISION_BITS,
            _ => upper | rng.below(1 << COLLISION_BITS),
        }
    }

    #[test]
    fn names_are_those_of_a_map() {
        let mut rng = Rng::new(3);
        let (mut names, mut model) = (NameList::default(), BTreeMap::new());
        for _ in 0..20_000 {
            let (key, len) = (any_key(&mut rng), 1 + rng.below(60) as usize);
            let number = rng.next_u64() >> rng.below(64);
            let there = model.contains_key(&key);
            match rng.below(96) {
                0 => {
                    names.drop_from(key);
                    model.split_off(&key);
                }
                1..20 => {
                    let changed = names.retarget(key, Nid(number), number | 1, 4);
                    assert_eq!(changed.is_ok(), there);
                    model.entry(key).and_modify(|name: &mut Name| {
                        (name.nid, name.generation, name.kind) = (Nid(number), number | 1, 4);
                    });
                }
                20..50 => assert_eq!(names.remove(key).is_ok(), model.remove(&key).is_some()),
                _ => {
                    let name = Name {
                        key,
                        nid: Nid(number),
                        generation: 1,
                        kind: 8,
                        name: vec![b'x'; len].as_slice().into(),
                    };
                    assert_eq!(names.insert(&name).is_ok(), !there);
                    model.entry(key).or_insert(name);
                }
            }
            let expected: Vec<Name> = model.values().cloned().collect();
            assert_eq!(names.to_vec(), expected);
            assert_eq!(names.lower(key), model.range(..key).count());
            let first = key >> COLLISION_BITS << COLLISION_BITS;
            for asked in [first, key] {
                let found = names.pick(first, COLLISION_BITS, |view| view.key >= asked);
                let end = first + (1 << COLLISION_BITS);
                let others = model.range(first..end).count();
                assert_eq!(found == Pick::Nothing, others == 0);
                let (found, expected) = (found.found(), model.range(asked..end).next());
                assert_eq!(
                    found.map(Name::from).as_ref(),
                    expected.map(|(_, name)| name)
                );
            }
            let same = model.get(&key);
            assert_eq!(names.with_key(key).map(Name::from).as_ref(), same);
            assert_eq!(names.len_of(key), same.map_or(0, Entry::encoded_len));
            assert_eq!(names.is_single(), model.len() == 1);
            let lens = (model.len(), model.is_empty());
            assert_eq!((names.len(), names.is_empty()), lens);
            assert!(match names.encoded_len() {
                ..64 => !names.is_indexed(),
                129.. => names.is_indexed() && names.index.len() == model.len(),
                _ => true,
            });
            assert_eq!(NameList::from(expected.clone()), names);
            let mut encoded = Vec::new();
            names.encode(&mut encoded);
            assert_eq!(encoded.len(), names.encoded_len());
            let again = NameList::decode(&mut Reader::new("names", &encoded)).unwrap();
            assert_eq!(again, names);
            let lens = (0..names.len()).map(|i| names.len_at(i));
            assert!(lens.eq(expected.iter().map(Entry::encoded_len)));
        }
    }

    #[test]
    fn names_take_little_more_memory_than_their_image() {
        let mut names = NameList::default();
        for i in 0..100u64 {
            let name = Name {
                key: (i * 37 % 101) << 50,
                nid: Nid(1 << 20),
                generation: 1,
                kind: 8,
                name: format!("file-{i:08}").as_bytes().into(),
            };
            names.insert(&name).unwrap();
        }
        assert!(names.memory() < names.encoded_len() * 3 / 2 + 400);
        let again = NameList::from(names.to_vec());
        assert!(again.memory() <= names.memory());
        names.drop_from(1 << 50);
        assert!(names.memory() < 200);
    }

    #[test]
    fn a_place_is_found_wherever_the_keys_lie() {
        let mut rng = Rng::new(4);
        for round in 0..300 {
            let spread = 1 + rng.below(62);
            let mut keys: Vec<u64> = (0..rng.below(400))
                .map(|_| (rng.next_u64() >> 2) >> rng.below(spread))
                .collect();
            keys.sort_unstable();
            keys.dedup();
            let name = |key: &u64| Name {
                key: *key,
                nid: Nid(1),
                generation: 1,
                kind: 8,
                name: b"n".as_slice().into(),
            };
            let names = NameList::from(keys.iter().map(name).collect::<Vec<_>>());
            for _ in 0..100 {
                let near = rng.below(keys.len() as u64 + 1) as usize;
                let key = match keys.get(near) {
                    Some(key) => (key + rng.below(3)).saturating_sub(1),
                    None => rng.next_u64() >> 2,
                };
                let expected = keys.partition_point(|other| *other < key);
                assert_eq!(names.lower(key), expected, "round {round}");
            }
        }
    }

    #[test]
    fn a_list_takes_no_more_than_its_places_can_tell() {
        let mut names = NameList::default();
        let name = |key| Name {
            key,
            nid: Nid(1),
            generation: 1,
            kind: 8,
            name: vec![b'x'; 255].as_slice().into(),
        };
        let fits = (0..1000).take_while(|i| names.insert(&name(i << 20)).is_ok());
        assert_eq!(fits.count(), LEN_MAX / name(0).encoded_len());
        let before = names.clone();
        assert!(names.insert(&name(1)).is_err());
        assert_eq!(names, before);
    }
}

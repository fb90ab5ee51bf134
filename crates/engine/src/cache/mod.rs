//! The page cache: file pages in memory, bounded, set-associative.
//!
//! It owns the frames, and the index of dirty pages per file. It does no I/O and knows no
//! blocks: the file layer fills frames, writes dirty pages back and says when they are clean.
//! Bytes are copied in and out under the lock of one set, so nothing is locked, pinned or
//! busy while a device works.
//!
//! Invariants:
//! 1. A page is in at most one frame, and that frame is in the set its key hashes to.
//! 2. A dirty page is never evicted. It stops being dirty by `complete` with the stamp it was
//!    copied at (a write in between changes the stamp), or by `invalidate`.
//! 3. A page is in the dirty index exactly when its frame is dirty: both change under the
//!    lock of its set.
//! 4. `dirty` counts the dirty frames, `promised` of an index entry the frames among them
//!    that hold a promised block.
//! 5. The print of a frame is that of its page, and 0 exactly when it is empty.
//! 6. `Set::departed` counts the frames that lost their page to another one and had been written since that page came.
//!    So a page that is absent, in a set whose count is what it was when the page was absent before, has not been
//!    written in between, unless somebody invalidated it: what was read from its device meanwhile is its content.
//! 7. A way of a set gets its frame when it first holds a page, and keeps it. Frames are given out in order, so memory that was
//!    touched is at the front of the region.
//!
//! Transitions: absent → clean (`admit`), absent or clean → dirty (`write`), clean → dirty (`overwrite`), dirty → clean
//! (`complete`, `inlined`), clean → absent (eviction), any → absent (`invalidate`).

mod dirty;
mod frames;
mod policy;

use crate::sum::Padded;
use base::atomic::{AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::map::HashMap;
use base::sync::{Mutex, MutexGuard, rank};
use dirty::PageSet;
use format::{BLOCK_SIZE, Nid};
use frames::Frames;
use policy::Policy;
use std::ops::Range;

/// Frames in a set.
pub const WAYS: usize = 16;
/// Shards of the dirty index.
const DIRTY_SHARDS: usize = 64;

/// Whose page it is: a nid and the version at which this use of it began, so that pages of
/// a deleted file are never taken for those of its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    pub nid: Nid,
    pub generation: u64,
}

impl FileKey {
    /// Keys are equal only if their generations are (R11).
    fn same(self, other: FileKey) -> bool {
        self == other || (planted(Canary::GenerationIgnored) && self.nid == other.nid)
    }

    fn hash(self) -> u64 {
        match planted(Canary::GenerationIgnored) {
            true => mix(self.nid.0),
            false => mix(self.nid.0 ^ self.generation.rotate_left(32)),
        }
    }
}

/// What surrounds the written part of a page that is not in the cache.
#[derive(Clone, Copy, Debug)]
pub enum Rest<'a> {
    /// Unknown: the write is refused with [`Wrote::Absent`] unless it covers the page.
    Unknown,
    /// This page; bytes beyond the slice are zeros.
    From(&'a [u8]),
}

/// The block behind a page that becomes dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// It has a block of its own.
    Allocated,
    /// One promised block is set aside for it.
    Promised,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrote {
    Done,
    /// Not cached, and the rest of the page is unknown: load it first.
    Absent,
    /// Every frame of the set is dirty: write something back, then try again.
    NoRoom,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrote {
    Done,
    /// Cached, and not known to have a block.
    Clean,
    Absent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    Clean,
    Dirty(Backing),
}

/// Names the content of a dirty page at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

/// What `invalidate` threw away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    pub pages: u64,
    pub dirty: u64,
    /// Promised blocks that are no longer needed.
    pub promised: u64,
}

/// A file with dirty pages.
#[derive(Clone, Copy, Debug)]
pub struct DirtyFile {
    pub key: FileKey,
    pub pages: usize,
    /// Monotonic time at which it had no dirty page last, in nanoseconds.
    pub since_ns: u64,
}

/// Counters since the cache was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    pub hits: u64,
    pub misses: u64,
    pub inserted: u64,
    pub evicted: u64,
    pub written: u64,
    pub cleaned: u64,
    pub no_room: u64,
}

impl CacheCounters {
    fn add(&mut self, other: &CacheCounters) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.inserted += other.inserted;
        self.evicted += other.evicted;
        self.written += other.written;
        self.cleaned += other.cleaned;
        self.no_room += other.no_room;
    }
}

/// That a page was not cached, and when; see [`PageCache::admit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absence(u64);

/// What a frame holds.
#[derive(Clone, Copy, Debug)]
struct Tag {
    key: FileKey,
    page: u64,
    /// 0: not written since it came.
    stamp: u64,
    /// Of the way, whatever it holds; [`NO_FRAME`] until it first holds something (invariant 7).
    frame: u32,
    state: TagState,
}

const NO_FRAME: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TagState {
    Empty,
    Clean,
    Dirty(Backing),
}

const EMPTY: Tag = Tag {
    key: FileKey {
        nid: Nid(0),
        generation: 0,
    },
    page: 0,
    stamp: 0,
    frame: NO_FRAME,
    state: TagState::Empty,
};

/// The tags of one set lie in many cache lines, of which a look-up touches those whose prints match.
#[derive(Debug)]
struct Set {
    /// Some bits of the hash of what each frame holds, 0 of an empty one (invariant 5).
    prints: [u16; WAYS],
    /// The ways whose pages are dirty, a bit each.
    dirty: u16,
    policy: Policy,
    next_stamp: u64,
    /// Invariant 6.
    departed: u64,
    /// Of this set alone: whoever counts has its lock.
    counters: CacheCounters,
    tags: [Tag; WAYS],
}

impl Set {
    /// The frames with this print, one bit each.
    fn printed(&self, print: u16) -> u16 {
        let bits = self.prints.iter().enumerate();
        bits.fold(0, |all, (way, &p)| all | u16::from(p == print) << way)
    }

    fn find(&self, place: Place, key: FileKey, page: u64) -> Option<usize> {
        let mut candidates = self.printed(place.print);
        while candidates != 0 {
            let way = candidates.trailing_zeros() as usize;
            let tag = &self.tags[way];
            if tag.page == page && tag.key.same(key) {
                return Some(way);
            }
            candidates &= candidates - 1;
        }
        None
    }

    fn fill(&mut self, way: usize, print: u16, tag: Tag) {
        self.prints[way] = print;
        let frame = self.tags[way].frame;
        self.tags[way] = Tag { frame, ..tag };
        self.set_state(way, tag.state);
    }

    fn set_state(&mut self, way: usize, state: TagState) {
        self.tags[way].state = state;
        let dirty = matches!(state, TagState::Dirty(_));
        self.dirty = self.dirty & !(1 << way) | u16::from(dirty) << way;
    }

    /// The frame of a way that holds a page.
    fn frame(&self, way: usize) -> usize {
        self.tags[way].frame as usize
    }

    fn empty(&mut self, way: usize) {
        self.fill(way, 0, EMPTY);
    }

    fn stamp(&mut self) -> u64 {
        self.next_stamp += 1;
        self.next_stamp
    }

    /// A way for a new page with this print: an empty one, else that of a clean page; none when all are dirty (invariant 2).
    /// The tag is empty on return.
    fn room_for(&mut self, print: u16) -> Option<usize> {
        let empty = self.printed(0);
        let way = match empty {
            0 => self.evict()?,
            _ => empty.trailing_zeros() as usize,
        };
        self.policy.came(way, print);
        Some(way)
    }

    fn evict(&mut self) -> Option<usize> {
        let way = self.policy.victim(!self.dirty, &self.prints)?;
        self.departed += (self.tags[way].stamp != 0) as u64;
        self.empty(way);
        self.counters.evicted += 1;
        Some(way)
    }
}

/// Dirty pages of one file (invariant 3).
#[derive(Debug)]
struct DirtyIndex {
    pages: PageSet,
    promised: u64,
    since_ns: u64,
}

type DirtyFiles = HashMap<FileKey, DirtyIndex>;

/// On cache lines of its own.
#[repr(align(128))]
#[derive(Debug)]
struct DirtyShard {
    /// Files that have a dirty page. Changes under the lock.
    count: AtomicUsize,
    files: Mutex<DirtyFiles>,
}

impl DirtyShard {
    fn lock(&self) -> MutexGuard<'_, DirtyFiles> {
        self.files.lock()
    }

    /// After every change of which files there are.
    fn count(&self, files: &DirtyFiles) {
        self.count.store(files.len(), Ordering::Release);
    }
}

/// Where a page is, if it is cached: its set, and its print there.
#[derive(Clone, Copy)]
struct Place {
    set: usize,
    print: u16,
}

#[derive(Debug)]
pub struct PageCache {
    sets: Box<[Mutex<Set>]>,
    frames: Frames,
    index: Box<[DirtyShard]>,
    /// On lines of their own: all who write look at the first, and who changes one often changes both.
    counts: Padded<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Dirty frames.
    dirty: AtomicUsize,
    /// Frames that ways have (invariant 7).
    given: AtomicUsize,
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl PageCache {
    /// A cache of at most `bytes` of pages (at least one set).
    pub fn new(bytes: usize) -> Self {
        let sets = (bytes / BLOCK_SIZE / WAYS).max(1);
        let set = |i| {
            let set = Set {
                prints: [0; WAYS],
                dirty: 0,
                policy: Policy::new(),
                next_stamp: 0,
                departed: 0,
                counters: CacheCounters::default(),
                tags: [EMPTY; WAYS],
            };
            Mutex::keyed(rank::PAGE_SET, i as u64, set)
        };
        let shard = |i| DirtyShard {
            count: AtomicUsize::new(0),
            files: Mutex::keyed(rank::DIRTY_PAGES, i as u64, DirtyFiles::default()),
        };
        PageCache {
            sets: (0..sets).map(set).collect(),
            frames: Frames::new(sets * WAYS),
            index: (0..DIRTY_SHARDS).map(shard).collect(),
            counts: Padded::default(),
        }
    }

    /// Frames in all.
    pub fn capacity(&self) -> usize {
        self.sets.len() * WAYS
    }

    /// Dirty frames now.
    pub fn dirty(&self) -> usize {
        self.counts.dirty.load(Ordering::Relaxed)
    }

    pub fn counters(&self) -> CacheCounters {
        let mut all = CacheCounters::default();
        for set in &self.sets {
            all.add(&set.lock().counters);
        }
        all
    }

    /// As many pages of a file as there are sets, one after the other, have one set each, from a set on that follows from
    /// which file and which such run it is. So a file that nearly fills the cache fills all sets evenly.
    fn place(&self, key: FileKey, page: u64) -> Place {
        let sets = self.sets.len() as u64;
        let run = page / sets;
        let hash = mix(key.hash() ^ run);
        let first = (u128::from(hash) * u128::from(sets)) >> 64;
        let set = first as u64 + (page - run * sets);
        Place {
            set: (if set < sets { set } else { set - sets }) as usize,
            // Of bits that have little to do with the choice of the set.
            print: (hash as u16).max(1),
        }
    }

    fn shard(&self, key: FileKey) -> &DirtyShard {
        &self.index[mix(key.nid.0) as usize % DIRTY_SHARDS]
    }

    /// The frame of a way that is about to hold a page.
    fn frame_for(&self, set: &mut Set, way: usize) -> usize {
        let frame = &mut set.tags[way].frame;
        if *frame == NO_FRAME {
            // As many frames as ways, and none is given out twice.
            *frame = self.counts.given.fetch_add(1, Ordering::Relaxed) as u32;
        }
        *frame as usize
    }

    /// Copies `out.len()` bytes from `offset` within the page; false when it is not cached.
    pub fn read(&self, key: FileKey, page: u64, offset: usize, out: &mut [u8]) -> bool {
        let place = self.place(key, page);
        let mut set = self.sets[place.set].lock();
        let Some(way) = set.find(place, key, page) else {
            set.counters.misses += 1;
            return false;
        };
        set.policy.used(way);
        // SAFETY: the set is locked, and a tag that is not empty names a filled frame.
        let frame = unsafe { self.frames.frame(set.frame(way)) };
        out.copy_from_slice(&frame[offset..offset + out.len()]);
        set.counters.hits += 1;
        true
    }

    /// [`read`](Self::read) without waiting, for a page that can be had elsewhere: false also when somebody is at
    /// its set. So the caller may hold any lock. Not counted.
    pub fn look(&self, key: FileKey, page: u64, offset: usize, out: &mut [u8]) -> bool {
        let place = self.place(key, page);
        let Some(mut set) = self.sets[place.set].try_lock() else {
            return false;
        };
        let Some(way) = set.find(place, key, page) else {
            return false;
        };
        set.policy.used(way);
        // SAFETY: the set is locked, and a tag that is not empty names a filled frame.
        let frame = unsafe { self.frames.frame(set.frame(way)) };
        out.copy_from_slice(&frame[offset..offset + out.len()]);
        true
    }

    /// Keeps a page just read from its device, in place of the one that is cached, if no wait is needed for that. The
    /// key has no dirty pages. Not counted.
    pub fn keep(&self, key: FileKey, page: u64, content: &[u8]) {
        let place = self.place(key, page);
        let Some(mut set) = self.sets[place.set].try_lock() else {
            return;
        };
        let found = set.find(place, key, page);
        let Some(way) = found.or_else(|| set.room_for(place.print)) else {
            return;
        };
        debug_assert!(!matches!(set.tags[way].state, TagState::Dirty(_)));
        // SAFETY: the set is locked and no reference to its frames exists.
        unsafe { self.frames.fill(self.frame_for(&mut set, way), content) };
        let tag = Tag {
            key,
            page,
            state: TagState::Clean,
            ..EMPTY
        };
        set.fill(way, place.print, tag);
    }

    /// What the cache knows of a page; not a use of it.
    pub fn state(&self, key: FileKey, page: u64) -> Option<PageState> {
        let place = self.place(key, page);
        let set = self.sets[place.set].lock();
        match set.tags[set.find(place, key, page)?].state {
            TagState::Empty => None,
            TagState::Clean => Some(PageState::Clean),
            TagState::Dirty(backing) => Some(PageState::Dirty(backing)),
        }
    }

    /// `None`: it is cached. Not a use of it.
    pub fn absence(&self, key: FileKey, page: u64) -> Option<Absence> {
        let place = self.place(key, page);
        let set = self.sets[place.set].lock();
        match set.find(place, key, page) {
            Some(_) => None,
            None => Some(Absence(set.departed)),
        }
    }

    /// Takes in a page just read from its device, which was absent before it was read; zeros follow a short slice. True if
    /// this is what it holds: nobody has written it since then (invariant 6). One that is cached by now stays as it
    /// is. `keep`: it is cached from now on if a frame can be had.
    pub fn admit(
        &self,
        key: FileKey,
        page: u64,
        Absence(departed): Absence,
        content: &[u8],
        keep: bool,
    ) -> bool {
        let place = self.place(key, page);
        let mut set = self.sets[place.set].lock();
        if let Some(way) = set.find(place, key, page) {
            return set.tags[way].stamp == 0 && set.departed == departed;
        }
        if set.departed != departed {
            return false;
        }
        if keep && let Some(way) = set.room_for(place.print) {
            // SAFETY: the set is locked and no reference to its frames exists.
            unsafe { self.frames.fill(self.frame_for(&mut set, way), content) };
            let tag = Tag {
                key,
                page,
                state: TagState::Clean,
                ..EMPTY
            };
            set.fill(way, place.print, tag);
            set.counters.inserted += 1;
        }
        true
    }

    /// Changes part of a page and makes it dirty. `backing` says what stands behind it; a page
    /// that is dirty already keeps the backing it has. `now_ns` is the monotonic time.
    pub fn write(
        &self,
        key: FileKey,
        page: u64,
        (offset, data): (usize, &[u8]),
        rest: Rest<'_>,
        backing: Backing,
        now_ns: u64,
    ) -> Wrote {
        let place = self.place(key, page);
        let mut set = self.sets[place.set].lock();
        let way = match set.find(place, key, page) {
            Some(way) => {
                set.policy.used(way);
                way
            }
            None => {
                let around = match rest {
                    Rest::From(around) => around,
                    Rest::Unknown if data.len() == BLOCK_SIZE => &[],
                    Rest::Unknown => return Wrote::Absent,
                };
                let Some(way) = set.room_for(place.print) else {
                    set.counters.no_room += 1;
                    return Wrote::NoRoom;
                };
                if data.len() < BLOCK_SIZE {
                    // SAFETY: the set is locked and no reference to its frames exists.
                    unsafe { self.frames.fill(self.frame_for(&mut set, way), around) };
                }
                let tag = Tag {
                    key,
                    page,
                    state: TagState::Clean,
                    ..EMPTY
                };
                set.fill(way, place.print, tag);
                way
            }
        };
        // What is not filled above is covered by this: data of a page's length has no offset.
        self.put(&mut set, way, (offset, data));
        if set.tags[way].state == TagState::Clean {
            set.set_state(way, TagState::Dirty(backing));
            self.now_dirty(key, page, backing, now_ns);
        }
        Wrote::Done
    }

    /// Changes part of a page that is cached. `dirty_at`: one that is clean has a block, and becomes dirty at this
    /// monotonic time; without it only a dirty one is changed. So it never takes a block, nor a frame.
    pub fn overwrite(
        &self,
        key: FileKey,
        page: u64,
        part: (usize, &[u8]),
        dirty_at: Option<u64>,
    ) -> Overwrote {
        let place = self.place(key, page);
        let mut set = self.sets[place.set].lock();
        let Some(way) = set.find(place, key, page) else {
            return Overwrote::Absent;
        };
        let clean = set.tags[way].state == TagState::Clean;
        if clean {
            let Some(now_ns) = dirty_at else {
                return Overwrote::Clean;
            };
            set.set_state(way, TagState::Dirty(Backing::Allocated));
            self.now_dirty(key, page, Backing::Allocated, now_ns);
        }
        set.policy.used(way);
        self.put(&mut set, way, part);
        Overwrote::Done
    }

    /// Writes into the frame of a page, for its set, which is locked.
    fn put(&self, set: &mut Set, way: usize, (offset, data): (usize, &[u8])) {
        // SAFETY: the set is locked, by the caller's reference to what is behind its lock, and no reference to its
        // frames exists.
        unsafe { self.frames.copy_in(self.frame_for(set, way), offset, data) };
        let stamp = set.stamp();
        set.tags[way].stamp = stamp;
        set.counters.written += 1;
    }

    fn now_dirty(&self, key: FileKey, page: u64, backing: Backing, now_ns: u64) {
        self.counts.dirty.fetch_add(1, Ordering::Relaxed);
        let shard = self.shard(key);
        let mut files = shard.lock();
        let file = files.entry(key).or_insert_with(|| DirtyIndex {
            pages: PageSet::new(),
            promised: 0,
            since_ns: now_ns,
        });
        let fresh = file.pages.insert(page);
        debug_assert!(fresh, "invariant 3");
        file.promised += (backing == Backing::Promised) as u64;
        if file.pages.len() == 1 {
            shard.count(&files);
        }
    }

    fn not_dirty(&self, key: FileKey, page: u64, backing: Backing) {
        self.counts.dirty.fetch_sub(1, Ordering::Relaxed);
        let shard = self.shard(key);
        let mut files = shard.lock();
        let Some(file) = files.get_mut(&key) else {
            debug_assert!(false, "invariant 3");
            return;
        };
        let was = file.pages.remove(page);
        debug_assert!(was, "invariant 3");
        file.promised -= (backing == Backing::Promised) as u64;
        if file.pages.is_empty() {
            files.remove(&key);
            shard.count(&files);
        }
    }

    /// Up to `most` dirty pages of a file at or after `from`, ascending.
    pub fn dirty_pages(&self, key: FileKey, pages: Range<u64>, most: usize) -> Vec<u64> {
        let mut found = Vec::new();
        self.append_dirty(key, pages, most, &mut found);
        found
    }

    /// As [`dirty_pages`](Self::dirty_pages), appended to a list.
    pub fn append_dirty(&self, key: FileKey, pages: Range<u64>, most: usize, out: &mut Vec<u64>) {
        if let Some(file) = self
            .shard(key)
            .lock()
            .get(&key)
            .filter(|_| !pages.is_empty())
        {
            file.pages.append(pages, most, out);
        }
    }

    /// Whether a file has any dirty page. Takes no lock where none has: whatever was done before the
    /// call counts, what is done meanwhile may.
    pub fn is_dirty(&self, key: FileKey) -> bool {
        let shard = self.shard(key);
        shard.count.load(Ordering::Acquire) > 0 && shard.lock().contains_key(&key)
    }

    /// Since when a file has had dirty pages, if it has any: a monotonic time.
    pub fn dirty_since(&self, key: FileKey) -> Option<u64> {
        let shard = self.shard(key);
        match shard.count.load(Ordering::Acquire) {
            0 => None,
            _ => shard.lock().get(&key).map(|file| file.since_ns),
        }
    }

    /// Promised blocks behind a file's dirty pages.
    pub fn promised(&self, key: FileKey) -> u64 {
        self.shard(key).lock().get(&key).map_or(0, |f| f.promised)
    }

    /// All files with dirty pages.
    pub fn dirty_files(&self) -> Vec<DirtyFile> {
        let mut files = Vec::new();
        for shard in &self.index {
            files.extend(shard.lock().iter().map(|(&key, file)| DirtyFile {
                key,
                pages: file.pages.len(),
                since_ns: file.since_ns,
            }));
        }
        files
    }

    /// Copies a dirty page (`out` is one page) for writing it to its device.
    pub fn copy_dirty(&self, key: FileKey, page: u64, out: &mut [u8]) -> Option<(Stamp, Backing)> {
        let place = self.place(key, page);
        let set = self.sets[place.set].lock();
        let way = set.find(place, key, page)?;
        let TagState::Dirty(backing) = set.tags[way].state else {
            return None;
        };
        // SAFETY: the set is locked, and a dirty tag names a filled frame.
        out.copy_from_slice(unsafe { self.frames.frame(set.frame(way)) });
        Some((Stamp(set.tags[way].stamp), backing))
    }

    /// The page as copied with `stamp` is on its device, in a block of its own. False when it was
    /// written again since (it stays dirty, with a block now) or is gone.
    pub fn complete(&self, key: FileKey, page: u64, stamp: Stamp) -> bool {
        self.settle(key, page, stamp, true)
    }

    /// The page as copied with `stamp` is in its inode: written again since it stays dirty, and has no block.
    pub fn inlined(&self, key: FileKey, page: u64, stamp: Stamp) -> bool {
        self.settle(key, page, stamp, false)
    }

    fn settle(&self, key: FileKey, page: u64, stamp: Stamp, has_block: bool) -> bool {
        let place = self.place(key, page);
        let mut set = self.sets[place.set].lock();
        let Some(way) = set.find(place, key, page) else {
            return false;
        };
        let tag = &set.tags[way];
        let TagState::Dirty(backing) = tag.state else {
            return false;
        };
        if tag.stamp != stamp.0 && !has_block {
            return false;
        }
        if tag.stamp != stamp.0 {
            set.set_state(way, TagState::Dirty(Backing::Allocated));
            if backing == Backing::Promised
                && let Some(file) = self.shard(key).lock().get_mut(&key)
            {
                file.promised -= 1;
            }
            return false;
        }
        set.set_state(way, TagState::Clean);
        self.not_dirty(key, page, backing);
        set.counters.cleaned += 1;
        true
    }

    /// Forgets the pages of a range, dirty ones too. A range of more pages than the cache has
    /// frames costs one look at every set.
    pub fn invalidate(&self, key: FileKey, pages: Range<u64>) -> Dropped {
        let mut dropped = Dropped::default();
        if pages.is_empty() {
            return dropped;
        }
        let wanted = |t: &Tag| t.key == key && pages.contains(&t.page);
        if pages.end - pages.start > self.sets.len() as u64 {
            for set in &self.sets {
                let mut set = set.lock();
                for way in 0..WAYS {
                    if set.prints[way] != 0 && wanted(&set.tags[way]) {
                        self.drop_from(&mut set, way, &mut dropped);
                    }
                }
            }
        } else {
            for page in pages.clone() {
                let place = self.place(key, page);
                let mut set = self.sets[place.set].lock();
                if let Some(way) = set.find(place, key, page) {
                    self.drop_from(&mut set, way, &mut dropped);
                }
            }
        }
        dropped
    }

    fn drop_from(&self, set: &mut Set, way: usize, dropped: &mut Dropped) {
        let Tag {
            key, page, state, ..
        } = set.tags[way];
        dropped.pages += 1;
        if let TagState::Dirty(backing) = state {
            dropped.dirty += 1;
            dropped.promised += (backing == Backing::Promised) as u64;
            self.not_dirty(key, page, backing);
        }
        set.empty(way);
    }

    /// Zeroes part of a page if it is cached, leaving it clean or dirty as it was; for bytes
    /// beyond the end of the file, which every load zeroes anyway.
    pub fn zero(&self, key: FileKey, page: u64, bytes: Range<usize>) -> bool {
        let place = self.place(key, page);
        let mut set = self.sets[place.set].lock();
        let Some(way) = set.find(place, key, page) else {
            return false;
        };
        // SAFETY: the set is locked and no reference to its frames exists.
        unsafe { self.frames.zero(set.frame(way), bytes) };
        let stamp = set.stamp();
        set.tags[way].stamp = stamp;
        true
    }
}

#[cfg(test)]
mod tests;

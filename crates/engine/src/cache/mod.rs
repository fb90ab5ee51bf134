//! The page cache: file pages in memory, bounded, set-associative.
//!
//! It owns the frames, and the index of dirty pages per file. It does no I/O and knows no
//! blocks: the file layer fills frames, writes dirty pages back and says when they are clean.
//! Bytes are copied in under the lock of one set, and out without it ([`tags`]), so nothing is locked, pinned or
//! busy while a device works, and who reads a page that is cached writes no memory that other cores read.
//!
//! Invariants (those of one set are in [`set`], of a look without its lock in [`tags`]):
//! 1. A page is in at most one frame, and that frame is in the set its key hashes to.
//! 2. A dirty page is never evicted. It stops being dirty by `complete` or `inlined` with the stamp it was
//!    copied at (a write in between changes the stamp), by `invalidate`, or by `supersede`.
//! 3. A page is in the dirty index exactly when its frame is dirty: both change under the
//!    lock of its set.
//! 4. `dirty` counts the dirty frames, `promised` the frames among them that hold a promised block, each in parts that are right together when
//!    nobody adds; that of an index entry those of its file.
//! 5. A read returns what its page held at one moment while it ran: it comes before or after each overwrite as a whole.
//! 6. A page that is absent, in a set whose count of pages that were written and departed, or were written past the cache, is what it
//!    was when the page was absent before, has not been written in between, unless somebody invalidated it, or kept another content of it: what was read from its
//!    device meanwhile is its content.
//! 7. Frames are given to ways in order, so memory that was touched is at the front of the region. Behind those of all ways are
//!    the spare ones ([`guards`]).
//! 8. A page that becomes dirty is in the index, and then counted ([`PageCache::dirtied`]), before anybody sees what makes it so. Who takes the
//!    number, then finds the page not in the index, reads its block and finds the number as it was, has read what nobody had seen change by then.
//!
//! Transitions: absent → clean (`admit`, `keep`, `Load::publish`), absent or clean → dirty (`write`), clean → dirty (`overwrite`), dirty → clean
//! (`complete`, `inlined`), clean → absent (eviction, `forget`), any → absent (`invalidate`, `supersede`).

mod counters;
mod crowd;
mod dirty;
mod frames;
mod guards;
mod large;
mod loads;
mod mark;
mod place;
mod policy;
mod set;
mod sets;
mod standby;
mod tags;
mod touched;

use crate::sum::{Padded, Sum};
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::map::NearMap;
use base::sync::{Latch, LatchGuard, rank};
use base::thread::{cpu_count, lane};
pub use counters::CacheCounters;
use counters::Counters;
use crowd::Crowd;
use dirty::PageSet;
use format::{BLOCK_SIZE, Nid};
use frames::Frames;
use guards::Spares;
pub use guards::{Guard, Guarded};
use large::Large;
pub use loads::Load;
use place::{Place, Spread};
use set::{Locked, Sources};
use sets::Sets;
use std::ops::Range;
use tags::Name;
use touched::Touched;

/// Frames in a set.
pub const WAYS: usize = 16;
/// Shards of the dirty index.
const DIRTY_SHARDS: usize = 64;
/// Counts of pages that became dirty, in each of them; and files with neighbouring nids that are in one.
const COUNTED: usize = 4;
/// Parts of each count of pages at most, and the part of all frames by which a count that is looked at in passing may be wrong.
const PARTS_MAX: usize = 64;
const SLACK: usize = 16;

/// Whose page it is: a nid and the version at which this use of it began, so that pages of
/// a deleted file are never taken for those of its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    pub nid: Nid,
    pub generation: u64,
}

impl FileKey {
    fn page(self, page: u64) -> Name {
        Name {
            nid: self.nid.0,
            generation: self.generation,
            page,
        }
    }
}

impl Name {
    fn key(&self) -> FileKey {
        FileKey {
            nid: Nid(self.nid),
            generation: self.generation,
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
    /// Every frame of the set that it may have is dirty: write something back, then try again.
    NoRoom,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrote {
    Done,
    /// Cached, and not known to have a block.
    Clean,
    Absent,
    /// As many pages of its set are dirty as overwrites may make: write something back, then try again.
    NoRoom,
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
    /// Of these, such with a promised block.
    pub promised: u64,
    /// Monotonic time since when some page may have been dirty, in nanoseconds.
    pub since_ns: u64,
}

/// That a page was not cached, and when; see [`PageCache::admit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absence(u64);

impl Absence {
    /// Of a page for which nobody has looked: nothing is admitted by it.
    pub const UNSEEN: Absence = Absence(u64::MAX);
}

/// Pages of a set that were written past the cache are counted from here on, those that departed below.
const SUPERSEDED: u64 = 1 << 32;

/// Pages of a set that were written and departed, of its count.
fn departed(count: u64) -> u64 {
    count % SUPERSEDED
}

/// Dirty pages of one file (invariant 3).
#[derive(Debug)]
struct DirtyIndex {
    pages: PageSet,
    promised: u64,
    since_ns: u64,
}

type DirtyFiles = NearMap<FileKey, DirtyIndex>;

/// On cache lines of its own.
#[repr(align(128))]
#[derive(Debug)]
struct DirtyShard {
    /// Files that have a dirty page. Changes under the lock.
    count: AtomicUsize,
    /// How often a page has become dirty, of files whose nids have the same remainder: neighbours are in one shard, and each has another one
    /// of these. Change under the lock.
    dirtied: [AtomicU64; COUNTED],
    files: Latch<DirtyFiles>,
}

impl DirtyShard {
    fn lock(&self) -> LatchGuard<'_, DirtyFiles> {
        self.files.lock()
    }

    fn dirtied(&self, key: FileKey) -> &AtomicU64 {
        &self.dirtied[key.nid.0 as usize % COUNTED]
    }

    /// After every change of which files there are.
    fn count(&self, files: &DirtyFiles) {
        self.count.store(files.len(), Ordering::Release);
    }
}

#[derive(Debug)]
pub struct PageCache {
    sets: Sets,
    spread: Spread,
    frames: Frames,
    spares: Spares,
    counters: Counters,
    index: Box<[DirtyShard]>,
    crowd: Crowd,
    large: Large,
    touched: Touched,
    /// Dirty pages of a set that overwrites may make.
    own_most: u32,
    /// Dirty frames, and those of them that hold a promised block: all who write and who write back change them, seldom two threads
    /// in one line of memory.
    dirty: Sum,
    promised: Sum,
    /// Frames that ways have (invariant 7).
    given: Padded<AtomicUsize>,
}

impl PageCache {
    /// A cache of at most `bytes` of pages (at least one set), spare ones for who reads with guards included, unless it is small.
    ///
    /// # Panics
    /// If there is no room for it.
    pub fn new(bytes: usize) -> Self {
        Self::try_new(bytes).expect("the process has address space for a cache")
    }

    /// The same; `None`: the address space that the process may have has no room for it.
    pub fn try_new(bytes: usize) -> Option<Self> {
        let frames = bytes / BLOCK_SIZE;
        let spares = guards::spares_of(frames);
        let within = if guards::are_within(frames) {
            spares
        } else {
            0
        };
        let sets = ((frames - within) / WAYS).max(1);
        let shard = |i| DirtyShard {
            count: AtomicUsize::new(0),
            dirtied: Default::default(),
            files: Latch::keyed(rank::DIRTY_PAGES, i as u64, DirtyFiles::default()),
        };
        // Threads are more than CPUs.
        let parts = (8 * cpu_count()).next_power_of_two().min(PARTS_MAX);
        let count = || Sum::new(parts, (sets * WAYS / SLACK) as i64);
        Some(PageCache {
            sets: Sets::try_new(sets)?,
            spread: Spread::over(sets),
            frames: Frames::try_new(sets * WAYS + spares)?,
            spares: Spares::new(sets * WAYS, spares),
            counters: Counters::new(),
            index: (0..DIRTY_SHARDS).map(shard).collect(),
            crowd: Crowd::new(sets),
            large: Large::new(),
            touched: Touched::new(),
            own_most: WAYS as u32,
            dirty: count(),
            promised: count(),
            given: Padded::default(),
        })
    }

    /// Overwrites leave some ways of each set to others ([`crowd`], 3): for who has crowded sets cleaned.
    pub fn keeping_ways(mut self) -> Self {
        self.own_most = crowd::own_most();
        self
    }

    /// Frames in all.
    pub fn capacity(&self) -> usize {
        self.sets.len() * WAYS
    }

    /// Dirty frames now.
    pub fn dirty(&self) -> usize {
        self.dirty.exact().max(0) as usize
    }

    /// The same, wrong by a few of a hundred frames: for who asks often.
    pub fn about_dirty(&self) -> usize {
        self.dirty.about().max(0) as usize
    }

    /// Those of them that hold a promised block.
    pub fn promised_pages(&self) -> usize {
        self.promised.exact().max(0) as usize
    }

    /// The same, as [`about_dirty`](Self::about_dirty).
    pub fn about_promised(&self) -> usize {
        self.promised.about().max(0) as usize
    }

    /// Sets that should be cleaned ([`crowd`]).
    pub fn crowded(&self) -> usize {
        self.crowd.count()
    }

    /// The first of them from this set on.
    pub fn next_crowded(&self, from: usize) -> Option<usize> {
        self.crowd.next(from)
    }

    /// The set of a page.
    pub fn set_of(&self, key: FileKey, page: u64) -> usize {
        self.place(key, page).set.lock().index()
    }

    /// Whether an overwrite finds room in a set.
    pub fn has_room(&self, set: usize) -> bool {
        let set = self.sets[set].lock();
        set.dirty() < self.own_most && set.has_frame()
    }

    /// Appends the dirty pages of a set that have blocks of their own, the coldest first; returns how many of its dirty pages
    /// should be cleaned.
    pub fn append_cold(&self, set: usize, out: &mut Vec<(FileKey, u64)>) -> usize {
        let set = self.sets[set].lock();
        if !set.inner.crowded {
            return 0;
        }
        let pages = set.cold().map(|way| set.name(way));
        out.extend(pages.map(|name| (name.key(), name.page)));
        set.dirty().saturating_sub(crowd::eased()) as usize
    }

    pub fn counters(&self) -> CacheCounters {
        self.counters.all()
    }

    /// Copies `out.len()` bytes from `offset` within the page, which counts as a hit; false when it is not cached: see [`brought`](Self::brought).
    #[inline]
    pub fn read(&self, key: FileKey, page: u64, offset: usize, out: &mut [u8]) -> bool {
        let found = self.copy(key, page, offset, out);
        if found {
            self.counters.mine().hits();
        }
        found
    }

    /// [`read`](Self::read), not counted.
    #[inline]
    pub fn copy(&self, key: FileKey, page: u64, offset: usize, out: &mut [u8]) -> bool {
        let place = self.place(key, page);
        place
            .set
            .hit(place.print, &place.page, &self.frames, (offset, &mut *out))
            || self.read_locked(&place, offset, out)
    }

    /// Counts pages that a read wanted which were not cached, and such as it brought beside them.
    pub fn brought(&self, wanted: u64, ahead: u64) {
        let counters = self.counters.mine();
        (0..wanted).for_each(|_| counters.misses());
        (0..ahead).for_each(|_| counters.ahead());
    }

    /// As `read`, where that found nothing: only under the lock is it known that nothing is there.
    #[inline(never)]
    fn read_locked(&self, place: &Place<'_>, offset: usize, out: &mut [u8]) -> bool {
        let set = place.set.lock();
        let Some(way) = set.find(place.print, &place.page) else {
            return false;
        };
        set.used(way);
        self.frames.copy_out(place.set.number(way), offset, out);
        true
    }

    /// [`read`](Self::read) without waiting, for a page that can be had elsewhere: false also when somebody is changing
    /// it. So the caller may hold any lock. Not counted.
    pub fn look(&self, key: FileKey, page: u64, offset: usize, out: &mut [u8]) -> bool {
        let place = self.place(key, page);
        place
            .set
            .hit(place.print, &place.page, &self.frames, (offset, out))
    }

    /// Keeps a page just read from its device, in place of the one that is cached, if no wait is needed for that. The
    /// key has no dirty pages. Not counted, nor does invariant 6 count it: nobody else reads the page meanwhile, as the caller has the file's I/O lock
    /// exclusively, or it is metadata's.
    pub fn keep(&self, key: FileKey, page: u64, content: &[u8]) {
        let place = self.place(key, page);
        let Some(mut set) = place.set.try_lock() else {
            return;
        };
        let found = set.find(place.print, &place.page);
        if let Some(way) = found.or_else(|| self.room_for(&mut set, place.print)) {
            debug_assert!(set.backing(way).is_none());
            self.fill(&mut set, way, &place, content, (0, &[]));
        }
    }

    /// See [`Locked::room_for`].
    fn room_for(&self, set: &mut Locked<'_>, print: u16) -> Option<usize> {
        let (way, evicted) = set.room_for(print)?;
        if evicted {
            self.counters.mine().evicted();
        }
        Some(way)
    }

    /// Puts a page, clean, into a way that is empty or has it already: what is `around`, then zeros, and `part` over it.
    fn fill(
        &self,
        set: &mut Locked<'_>,
        way: usize,
        place: &Place<'_>,
        around: &[u8],
        part: (usize, &[u8]),
    ) {
        let (offset, data) = part;
        let fill = |frame: u32| {
            // SAFETY: the set is locked.
            unsafe {
                if data.len() < BLOCK_SIZE {
                    self.frames.fill(frame, around);
                }
                self.frames.copy_in(frame, offset, data);
            }
        };
        set.fill(way, (place.print, place.page), self, fill);
    }

    /// What the cache knows of a page; not a use of it.
    pub fn state(&self, key: FileKey, page: u64) -> Option<PageState> {
        let place = self.place(key, page);
        let set = place.set.lock();
        let way = set.find(place.print, &place.page)?;
        Some(set.backing(way).map_or(PageState::Clean, PageState::Dirty))
    }

    /// Asks for the memory that tells whether a page is cached, for who will want to know soon.
    pub fn ask_for(&self, key: FileKey, page: u64) {
        self.place(key, page).set.ask_for();
    }

    /// Asks for the memory that changes when a page is written, for who will do so soon.
    pub fn ask_to_write(&self, key: FileKey, page: u64) {
        self.place(key, page).set.ask_to_change();
    }

    /// `None`: it is cached. Not a use of it.
    pub fn absence(&self, key: FileKey, page: u64) -> Option<Absence> {
        let place = self.place(key, page);
        let set = place.set.lock();
        match set.find(place.print, &place.page) {
            Some(_) => None,
            None => Some(Absence(set.inner.departed)),
        }
    }

    /// Takes in a page just read from its device, which was absent before it was read; zeros follow a short slice. True if
    /// this is what it holds: nobody has written it since then (invariant 6). One that is cached by now stays as it
    /// is. `keep`: it is cached from now on if a frame can be had.
    pub fn admit(
        &self,
        key: FileKey,
        page: u64,
        Absence(before): Absence,
        content: &[u8],
        keep: bool,
    ) -> bool {
        self.admit_if(key, page, |now| now == before, content, |_| keep)
    }

    /// As [`admit`](Self::admit) by who knows that nobody has written this page past the cache meanwhile, whatever was so written
    /// of its set.
    pub fn admit_apart(
        &self,
        key: FileKey,
        page: u64,
        Absence(before): Absence,
        content: &[u8],
        keep: bool,
    ) -> bool {
        let fresh = |now| departed(now) == departed(before);
        self.admit_if(key, page, fresh, content, |_| keep)
    }

    /// As [`admit_apart`](Self::admit_apart), kept if a frame can be had, by who knew a moment ago that nobody had written this page past the cache, and
    /// keeps nobody from doing so now. That write may be over, and has forgotten what was cached: so the page is used, but kept only if nothing of its set was so written.
    pub fn admit_landed(
        &self,
        key: FileKey,
        page: u64,
        Absence(before): Absence,
        content: &[u8],
    ) -> bool {
        let fresh = |now| departed(now) == departed(before);
        let keep = |now| now == before || planted(Canary::FlightKeptLate);
        self.admit_if(key, page, fresh, content, keep)
    }

    fn admit_if(
        &self,
        key: FileKey,
        page: u64,
        is_fresh: impl Fn(u64) -> bool,
        content: &[u8],
        keep: impl Fn(u64) -> bool,
    ) -> bool {
        let place = self.place(key, page);
        let mut set = place.set.lock();
        let fresh = is_fresh(set.inner.departed);
        if let Some(way) = set.find(place.print, &place.page) {
            return set.stamp(way) == 0 && fresh;
        }
        if !fresh {
            return false;
        }
        if keep(set.inner.departed)
            && let Some(way) = self.room_for(&mut set, place.print)
        {
            self.fill(&mut set, way, &place, content, (0, &[]));
            self.counters.mine().inserted();
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
        self.write_among(
            key,
            page,
            (offset, data),
            rest,
            (backing, WAYS as u32),
            now_ns,
        )
    }

    /// Overwrites a whole page that has a block of its own, cached or not, as far as its set may have one more dirty page.
    pub fn overwrite_whole(&self, key: FileKey, page: u64, data: &[u8], now_ns: u64) -> Wrote {
        let backing = (Backing::Allocated, self.own_most);
        self.write_among(key, page, (0, data), Rest::Unknown, backing, now_ns)
    }

    /// [`write`](Self::write), if fewer pages of the set are dirty than `most`, or this one is.
    fn write_among(
        &self,
        key: FileKey,
        page: u64,
        (offset, data): (usize, &[u8]),
        rest: Rest<'_>,
        (backing, most): (Backing, u32),
        now_ns: u64,
    ) -> Wrote {
        let place = self.place(key, page);
        let mut set = place.set.lock();
        let found = set.find(place.print, &place.page);
        let is_dirty = found.is_some_and(|way| set.backing(way).is_some());
        if !is_dirty && set.dirty() >= most {
            self.counters.mine().no_room();
            return Wrote::NoRoom;
        }
        let way = match found {
            Some(way) => {
                set.used(way);
                if !is_dirty {
                    self.list_dirty(key, page, backing, now_ns);
                }
                self.put(&mut set, way, (offset, data));
                way
            }
            None => {
                let around = match rest {
                    Rest::From(around) => around,
                    Rest::Unknown if data.len() == BLOCK_SIZE => &[],
                    Rest::Unknown => return Wrote::Absent,
                };
                let Some(way) = self.room_for(&mut set, place.print) else {
                    self.counters.mine().no_room();
                    return Wrote::NoRoom;
                };
                self.list_dirty(key, page, backing, now_ns);
                // The content comes with the name, so that nobody ever finds another's under it.
                self.fill(&mut set, way, &place, around, (offset, data));
                set.written(way);
                way
            }
        };
        self.counters.mine().written();
        if !is_dirty {
            set.set_backing(way, Some(backing));
            self.count_dirty(&mut set, backing);
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
        place.set.prefetch();
        let mut set = place.set.lock();
        let Some(way) = set.find(place.print, &place.page) else {
            return Overwrote::Absent;
        };
        if set.backing(way).is_none() {
            let Some(now_ns) = dirty_at else {
                return Overwrote::Clean;
            };
            if set.dirty() >= self.own_most {
                self.counters.mine().no_room();
                return Overwrote::NoRoom;
            }
            self.list_dirty(key, page, Backing::Allocated, now_ns);
            set.set_backing(way, Some(Backing::Allocated));
            self.count_dirty(&mut set, Backing::Allocated);
        }
        set.used(way);
        self.put(&mut set, way, part);
        self.counters.mine().written();
        Overwrote::Done
    }

    /// Writes into the frame of a page.
    fn put(&self, set: &mut Locked<'_>, way: usize, (offset, data): (usize, &[u8])) {
        // SAFETY: the set is locked.
        set.change(way, self, |frame| unsafe {
            self.frames.copy_in(frame, offset, data)
        });
    }

    /// The set has more dirty pages or fewer than it had.
    fn note_crowd(&self, set: &mut Locked<'_>) {
        let most = match set.inner.crowded {
            true => crowd::eased(),
            false => crowd::crowded(),
        };
        let crowded = set.dirty() > most;
        if crowded != set.inner.crowded {
            set.inner.crowded = crowded;
            self.crowd.set(set.index(), crowded);
        }
    }

    /// A page of the set has become dirty, and is listed.
    fn count_dirty(&self, set: &mut Locked<'_>, backing: Backing) {
        self.note_crowd(set);
        self.dirty.add(lane(), 1);
        if backing == Backing::Promised {
            self.promised.add(lane(), 1);
        }
    }

    /// Lists a page that becomes dirty, whose set is locked: before anybody can see what is written to it (invariant 8).
    fn list_dirty(&self, key: FileKey, page: u64, backing: Backing, now_ns: u64) {
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
        // The last: who sees this number finds the page in the list, also without the lock where there is none.
        let dirtied = shard.dirtied(key);
        dirtied.store(dirtied.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// A page of the set is dirty no more.
    fn not_dirty(&self, set: &mut Locked<'_>, key: FileKey, page: u64, backing: Backing) {
        self.note_crowd(set);
        self.dirty.add(lane(), -1);
        if backing == Backing::Promised {
            self.promised.add(lane(), -1);
        }
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

    /// A count that stays as long as no page of this file becomes dirty, for who saw then that some pages were not: what their blocks hold is what they
    /// hold still, unless somebody writes past the cache. Others' pages may change it.
    pub fn dirtied(&self, key: FileKey) -> u64 {
        self.shard(key).dirtied(key).load(Ordering::Acquire)
    }

    /// Since when a file has had dirty pages, if it has any: a monotonic time.
    pub fn dirty_since(&self, key: FileKey) -> Option<u64> {
        let shard = self.shard(key);
        match shard.count.load(Ordering::Acquire) {
            0 => None,
            _ => shard.lock().get(&key).map(|file| file.since_ns),
        }
    }

    /// All pages of a file that were dirty at this time have been written since; those that are dirty were written over again.
    pub fn written_back(&self, key: FileKey, began_ns: u64) {
        if let Some(file) = self.shard(key).lock().get_mut(&key) {
            file.since_ns = file.since_ns.max(began_ns);
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
                promised: file.promised,
                since_ns: file.since_ns,
            }));
        }
        files
    }

    /// Copies a dirty page (`out` is one page) for writing it to its device.
    pub fn copy_dirty(&self, key: FileKey, page: u64, out: &mut [u8]) -> Option<(Stamp, Backing)> {
        let place = self.place(key, page);
        let set = place.set.lock();
        let way = set.find(place.print, &place.page)?;
        let backing = set.backing(way)?;
        self.frames.copy_out(place.set.number(way), 0, out);
        Some((Stamp(set.stamp(way)), backing))
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
        let mut set = place.set.lock();
        let Some(way) = set.find(place.print, &place.page) else {
            return false;
        };
        let Some(backing) = set.backing(way) else {
            return false;
        };
        let same = set.stamp(way) == stamp.0;
        if !same && !has_block {
            return false;
        }
        if !same {
            set.set_backing(way, Some(Backing::Allocated));
            if backing == Backing::Promised {
                self.promised.add(lane(), -1);
                if let Some(file) = self.shard(key).lock().get_mut(&key) {
                    file.promised -= 1;
                }
            }
            return false;
        }
        set.set_backing(way, None);
        self.not_dirty(&mut set, key, page, backing);
        self.counters.mine().cleaned();
        true
    }

    /// Forgets the pages of a range, dirty ones too. A range of more pages than the cache has
    /// frames costs one look at every set.
    pub fn invalidate(&self, key: FileKey, pages: Range<u64>) -> Dropped {
        let mut dropped = Dropped::default();
        if pages.is_empty() {
            return dropped;
        }
        let wanted = |name: &Name| name.key() == key && pages.contains(&name.page);
        if pages.end - pages.start > self.sets.len() as u64 {
            for set in self.sets.iter() {
                let mut set = set.lock();
                for way in set.held() {
                    if wanted(&set.name(way)) {
                        self.drop_from(&mut set, way, &mut dropped);
                    }
                }
            }
        } else {
            for page in pages.clone() {
                let place = self.place(key, page);
                let mut set = place.set.lock();
                if let Some(way) = set.find(place.print, &place.page) {
                    self.drop_from(&mut set, way, &mut dropped);
                }
            }
        }
        dropped
    }

    /// The blocks of these pages have been written past the cache: it forgets those that are clean, and with `dirty` the dirty
    /// ones, too. What somebody has read from the device before the call is not admitted after it (invariant 6).
    pub fn supersede(&self, key: FileKey, pages: Range<u64>, dirty: bool) -> Dropped {
        let mut dropped = Dropped::default();
        for page in pages {
            self.ask_for(key, page + 4);
            let place = self.place(key, page);
            let mut set = place.set.lock();
            if let Some(way) = set.find(place.print, &place.page)
                && (dirty || set.backing(way).is_none())
            {
                self.drop_from(&mut set, way, &mut dropped);
            }
            set.inner.departed += SUPERSEDED * !planted(Canary::LoadUndoomed) as u64;
        }
        dropped
    }

    /// Forgets the clean pages of a range, as if they had to make room; with `unused` only those that were used once. Returns how
    /// many those were.
    pub fn forget(&self, key: FileKey, pages: Range<u64>, unused: bool) -> u64 {
        let mut forgotten = 0;
        let mut forget = |set: &mut Locked<'_>, way: usize| {
            if set.backing(way).is_none() && !(unused && set.is_used_again(way)) {
                set.lose(way);
                forgotten += 1;
            }
        };
        let wanted = |name: &Name| name.key() == key && pages.contains(&name.page);
        if pages.end.saturating_sub(pages.start) > self.sets.len() as u64 {
            for set in self.sets.iter() {
                let mut set = set.lock();
                for way in set.held() {
                    if wanted(&set.name(way)) {
                        forget(&mut set, way);
                    }
                }
            }
        } else {
            for page in pages.clone() {
                let place = self.place(key, page);
                let mut set = place.set.lock();
                if let Some(way) = set.find(place.print, &place.page) {
                    forget(&mut set, way);
                }
            }
        }
        forgotten
    }

    fn drop_from(&self, set: &mut Locked<'_>, way: usize, dropped: &mut Dropped) {
        let (name, backing) = (set.name(way), set.backing(way));
        dropped.pages += 1;
        set.empty(way);
        if let Some(backing) = backing {
            dropped.dirty += 1;
            dropped.promised += (backing == Backing::Promised) as u64;
            self.not_dirty(set, name.key(), name.page, backing);
        }
    }

    /// Zeroes part of a page if it is cached, leaving it clean or dirty as it was; for bytes
    /// beyond the end of the file, which every load zeroes anyway.
    pub fn zero(&self, key: FileKey, page: u64, bytes: Range<usize>) -> bool {
        let place = self.place(key, page);
        let mut set = place.set.lock();
        let Some(way) = set.find(place.print, &place.page) else {
            return false;
        };
        // SAFETY: the set is locked.
        set.change(way, self, |frame| unsafe { self.frames.zero(frame, bytes) });
        true
    }
}

impl Sources for PageCache {
    /// As many frames as ways, and none is given out twice.
    fn give(&self) -> u32 {
        let frame = self.given.fetch_add(1, Ordering::Relaxed);
        self.large.given(frame);
        self.touched.mark.counted(frame + 1);
        frame as u32
    }

    fn take_apart(&self, frame: u32, guards: u8) -> u32 {
        self.spares.take_apart(frame, guards)
    }

    fn copy(&self, from: u32, to: u32) {
        // SAFETY: the set whose way gets the frame is locked, and the other one has guards.
        unsafe { self.frames.copy(from, to) };
    }
}

#[cfg(test)]
mod tests;

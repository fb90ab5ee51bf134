//! File data: the page cache's use, mapping onto blocks, write-back and fsync.
//!
//! ```text
//! write ─► page cache (dirty, a block promised) ─► write_back: blocks ─► one record:
//!                                                                extents + size + times
//!       fsync of one page ─► one record: its bytes + size + times (`tail`); it stays dirty
//! ```
//!
//! Invariants (those of one file's state are in [`file`], of its mapping in [`extents`], of overwrites beside each other in
//! [`write`]):
//! 1. A page becomes dirty only with a block behind it: its own, or a promised one. So
//!    write-back never meets a full disk; the write does.
//! 2. Data reaches its device before the record that names its blocks is appended, and the
//!    record before its pages become clean.
//! 3. Pages are written back in file order, and the logged size never passes a page that is
//!    still to be written.
//! 4. Whoever misses a page in the cache under the I/O lock finds its newest content in the inode or
//!    on the device: a dirty page never leaves the cache otherwise. Under the shared one the page may be another by the time it is
//!    read: whoever reads it asks the cache once more ([`write`], 6).
//! 5. No wait for a device, a commit or a checkpoint happens under a node lock, but one: of a file whose extents are in a tree, who looks them up
//!    or plans a change of them reads nodes of it that are not in memory under the lock of the inode.
//! 6. A sync does not wait for other files' data, but for one piece of it ([`pace`]).
//! 7. A write that needs no record to go home leaves its pages to the threads of [`clean`]; all other dirty pages are write-back's.
//! 8. Who changes content looks under the file's I/O lock whether the file system is being closed, and who writes content to the devices, under that lock as well, whether
//!    that has ended ([`Files::end`], which has each lock after it has said so). What is on its way beside the lock, flights and streams' pieces, is refused and waited for before
//!    ([`Files::finish_writes`]); what a transaction stages is counted, looks after that, and is waited for last ([`transact::Staging`]); and what a record vouches for is written by a
//!    commit, of which the store's end has the last. So a file system that has ended has all that was not refused, and its devices change no more.

mod advice;
mod ahead;
mod background;
mod bounce;
mod clean;
mod extents;
mod fallocate;
mod file;
mod fill;
mod flight;
mod fsync;
mod gate;
mod guards;
mod meta;
mod pace;
mod present;
mod ranges;
mod read;
mod references;
mod runs;
mod seek;
mod stream;
mod table;
mod tail;
#[cfg(test)]
mod tests;
mod together;
mod told;
pub(crate) mod transact;
mod truncate;
mod vectored;
mod write;
mod writeback;

pub(crate) use crate::content::inode::SIZE_MAX;
pub use advice::Advice;
pub(crate) use extents::FREE_MAX;
pub(crate) use file::Entered;
pub use file::OpenFile;
pub(crate) use file::{Owners, Volatile};
pub(crate) use flight::{Began, Flying, InFlight, Writing};
pub use guards::PageGuard;
pub(crate) use read::Going;

use crate::content::FsNode;
use crate::metrics::FileCounts;
use crate::namespace::between_steps;
use crate::orphan::OrphanSet;
use crate::times::Times;
use crate::{AtimePolicy, Error, Ino};
use ahead::Ahead;
use background::Background;
use base::atomic::{AtomicBool, AtomicU64, Ordering};
use base::clock::Timestamp;
use base::counted::Counted;
use base::map::HashMap;
use base::sync::{Mutex, rank};
use base::sys::memory_bytes;
use bounce::Bounces;
use clean::Cleaning;
use engine::Store;
use engine::cache::{CacheCounters, FileKey, PageCache};
use file::{FileState, Losses};
use format::BLOCK_SIZE;
use pace::Pace;
use ranges::{Held, Mode, Ranges};
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use stream::{Behind, Readers, Streams};
use table::{FileTable, StateUse};
use tail::LoggedFiles;
use told::Told;

/// Bytes in a page, as file offsets count.
const PAGE: u64 = BLOCK_SIZE as u64;

/// Bytes by which metadata grows at most for a page that becomes dirty: of one extent it makes two or three.
pub(crate) const EXTENT_BYTES: u64 = 32;

/// Of the memory for pages, one part in so many is kept for what is on its way besides.
const KEPT_SHARE: usize = 16;

/// How file data is handled; run-time values all.
#[derive(Clone, Debug)]
pub struct DataOptions {
    /// Memory for pages, in bytes. More than seven eighths of the machine's counts as that.
    pub cache_bytes: usize,
    /// How long new times of a file that is only written over may stay in memory, though its fsync returns
    /// at once; zero: each fsync makes them durable. See docs/durability.md, *Times*.
    pub mtime_persist: Duration,
    /// Background write-back takes pages that have been dirty for this long.
    pub write_back_age: Duration,
    /// Pages that are written over go home before somebody needs their frames, by a thread for each device.
    pub pre_clean: bool,
    /// A file being rewritten from nothing, and times alone, are logged after this long.
    pub settle_age: Duration,
    pub atime: AtimePolicy,
    /// Reading a directory updates its access time as `atime` says; otherwise never.
    pub directory_atime: bool,
    /// Most bytes read beyond what was asked for.
    pub read_ahead: u64,
}

impl Default for DataOptions {
    fn default() -> Self {
        DataOptions {
            cache_bytes: 64 << 20,
            mtime_persist: Duration::from_secs(1),
            write_back_age: Duration::from_secs(5),
            pre_clean: true,
            settle_age: Duration::from_secs(25),
            atime: AtimePolicy::Relative,
            directory_atime: true,
            read_ahead: 4 << 20,
        }
    }
}

/// Who deletes unlinked inodes when nobody refers to them any more.
pub(crate) trait LastReference: Send + Sync {
    fn last_reference_gone(&self, ino: Ino);
}

/// Who that is, and which inodes may be unlinked.
struct Deleter {
    orphans: Arc<OrphanSet>,
    who: Weak<dyn LastReference>,
}

/// Told of a file of which something that had been written is gone: whoever keeps a copy of its size or content has what is not there any more. By any
/// thread, which may have locks of that file: it waits for nothing, and calls nothing of the file system.
pub type Gone = dyn Fn(Ino) + Send + Sync;

/// All files of a file system.
pub(crate) struct Files {
    store: Arc<Store<FsNode>>,
    times: Arc<Times>,
    /// Beside pages of files, it has blocks of metadata.
    pages: Arc<PageCache>,
    ahead: base::sync::Arc<Ahead>,
    cleaning: base::sync::Arc<Cleaning>,
    memory: std::sync::Arc<Bounces>,
    table: FileTable,
    /// Pages that somebody writes, or reads as one, beside others.
    ranges: Ranges,
    /// No content changes any more (invariant 8).
    ending: AtomicBool,
    /// The log has it that the clock was set back, and it has not caught up since.
    told_set_back: AtomicBool,
    /// Nor is any written.
    ended: AtomicBool,
    /// All was written by then.
    ended_whole: AtomicBool,
    /// What transactions write under no file's lock.
    staging: transact::Staging,
    /// Who may have writes in flight.
    in_flight: Mutex<Vec<Weak<dyn InFlight>>>,
    /// No write begins to fly any more.
    closing: AtomicBool,
    options: DataOptions,
    deleter: OnceLock<Deleter>,
    counts: FileCounts,
    /// Files with data written in place that nothing has flushed yet.
    unflushed: Mutex<HashMap<Ino, Counted<FileState>>>,
    /// Syncs of files that are running.
    syncing: AtomicU64,
    /// Of what is written back beside syncs.
    pace: Pace,
    streams: Streams,
    readers: Readers,
    behind: Behind,
    /// Those whose logged pages have not been taken to go home.
    logged: Mutex<LoggedFiles>,
    /// Pages that somebody asked to be written soon.
    hints: Mutex<Vec<(FileKey, Range<u64>)>>,
    losses: Mutex<Losses>,
    told: Told,
    gone: Mutex<Option<Weak<Gone>>>,
    /// Held by the writer that makes room for all.
    balancer: Mutex<()>,
    background: base::sync::Arc<Background>,
    /// Monotonic time at which data written in place was first seen without a flush since.
    unflushed_since_ns: Mutex<Option<u64>>,
    threads: Mutex<Vec<base::thread::JoinHandle>>,
}

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Files")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// The kernel maps no more at once than the machine has.
fn cache_bytes(options: &DataOptions) -> usize {
    options.cache_bytes.min(memory_bytes() as usize / 8 * 7)
}

/// The pages of an open file system, apart from it: whether there is room for them is known before anything is written.
///
/// # Errors
/// [`Error::NoRoom`].
pub fn page_cache(options: &DataOptions) -> Result<PageCache, Error> {
    let bytes = cache_bytes(options);
    let pages = PageCache::try_new(bytes).ok_or(Error::NoRoom { bytes })?;
    Ok(match options.pre_clean {
        true => pages.keeping_ways(),
        false => pages,
    })
}

impl Files {
    /// `pages`: of [`page_cache`].
    pub fn new(
        store: Arc<Store<FsNode>>,
        times: Arc<Times>,
        pages: PageCache,
        mut options: DataOptions,
    ) -> Arc<Files> {
        options.cache_bytes = cache_bytes(&options);
        options.read_ahead = options.read_ahead.min(SIZE_MAX);
        let pages = Arc::new(pages);
        let cleaning = Cleaning::new(&pages, store.array().devices().count());
        store.share_pages(Arc::clone(&pages));
        Arc::new(Files {
            pages,
            ahead: base::sync::Arc::new(Ahead::new()),
            cleaning: base::sync::Arc::new(cleaning),
            readers: Readers::new(options.cache_bytes, options.read_ahead),
            behind: Behind::new(options.cache_bytes),
            memory: std::sync::Arc::new(Bounces::new(options.cache_bytes / KEPT_SHARE)),
            table: FileTable::new(store.options().shards),
            ranges: Ranges::new(store.options().shards),
            ending: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            ended_whole: AtomicBool::new(false),
            staging: transact::Staging::new(),
            in_flight: Mutex::new(rank::LEAF, Vec::new()),
            closing: AtomicBool::new(false),
            store,
            times,
            options,
            deleter: OnceLock::new(),
            counts: FileCounts::default(),
            unflushed: Mutex::new(rank::LEAF, HashMap::default()),
            syncing: AtomicU64::new(0),
            told_set_back: AtomicBool::new(false),
            pace: Pace::new(),
            streams: Streams::default(),
            logged: Mutex::new(rank::LEAF, LoggedFiles::default()),
            hints: Mutex::new(rank::LEAF, Vec::new()),
            losses: Mutex::new(rank::LEAF, Losses::default()),
            told: Told::new(),
            gone: Mutex::new(rank::LEAF, None),
            balancer: Mutex::new(rank::FILE_BALANCE, ()),
            background: base::sync::Arc::new(Background::new()),
            unflushed_since_ns: Mutex::new(rank::LEAF, None),
            threads: Mutex::new(rank::LEAF, Vec::new()),
        })
    }

    /// Says which inodes are unlinked, and who deletes them; once, right after opening.
    pub fn set_deleter(&self, orphans: Arc<OrphanSet>, who: Weak<dyn LastReference>) {
        // A second one would be a bug of the caller's; the first stays.
        let first = self.deleter.set(Deleter { orphans, who }).is_ok();
        debug_assert!(first, "one file system owns these files");
    }

    /// Says whom to tell from now on.
    pub fn tell_gone(&self, told: Weak<Gone>) {
        *self.gone.lock() = Some(told);
    }

    /// What had been written of a file is gone: after that is so for everybody who asks.
    fn is_gone(&self, ino: Ino) {
        let told = self.gone.lock().as_ref().and_then(Weak::upgrade);
        if let Some(told) = told {
            told(ino);
        }
    }

    fn last_reference_gone(&self, ino: Ino) {
        // Nearly every file has a name when it is closed, and then no count is written that all cores share.
        if let Some(deleter) = self.deleter.get()
            && deleter.orphans.may_have(ino)
            && let Some(who) = deleter.who.upgrade()
        {
            who.last_reference_gone(ino);
        }
    }

    pub fn options(&self) -> &DataOptions {
        &self.options
    }

    pub fn counts(&self) -> &FileCounts {
        &self.counts
    }

    pub fn page_counters(&self) -> CacheCounters {
        self.pages.counters()
    }

    /// See [`Cleaning::counts`].
    pub fn cleaning_counts(&self) -> [u64; 3] {
        self.cleaning.counts()
    }

    /// Bytes that streams have written past the cache.
    pub fn streamed_bytes(&self) -> u64 {
        self.streams.bytes() + self.behind.bytes()
    }

    /// Those of them that were written behind.
    pub fn behind_bytes(&self) -> u64 {
        self.behind.bytes()
    }

    /// Bytes that streams have read past the cache.
    pub fn streamed_read_bytes(&self) -> u64 {
        self.readers.bytes()
    }

    pub fn dirty_pages(&self) -> usize {
        self.pages.dirty()
    }

    /// See [`PageCache::large_bytes`].
    pub fn large_bytes(&self) -> u64 {
        self.pages.large_bytes()
    }

    /// Has memory put behind the page cache ahead of its first use, and large pages behind what is in use, until it is stopped.
    pub fn start_keeping(&self) -> Result<(), Error> {
        if self.pages.may_be_touched() {
            let pages = Arc::clone(&self.pages);
            let started = base::thread::spawn("sheaf-touch", move || pages.keep_touched());
            let handle = started.map_err(|e| engine::Error::Thread(Arc::new(e)))?;
            self.threads.lock().push(handle);
        }
        if self.pages.may_be_large() {
            let pages = Arc::clone(&self.pages);
            // It does not keep the devices.
            let array = Arc::downgrade(self.store.array());
            let transfers = move || array.upgrade().map_or(0, |array| array.stats().transfers());
            let started = base::thread::spawn("sheaf-large", move || pages.keep_large(transfers));
            let handle = started.map_err(|e| engine::Error::Thread(Arc::new(e)))?;
            self.threads.lock().push(handle);
        }
        Ok(())
    }

    fn now(&self) -> Timestamp {
        self.times.now()
    }

    fn now_ns(&self) -> u64 {
        self.store.clock().monotonic_ns()
    }

    /// Refuses changes on a read-only file system.
    pub(crate) fn check_writable(&self) -> Result<(), Error> {
        if let Some(failed) = self.store.failed() {
            return Err(failed.into());
        }
        if self.store.read_only() {
            return Err(Error::ReadOnly);
        }
        self.check_open()?;
        between_steps();
        Ok(())
    }

    /// Writes all back for the last time: no content changes any more once this has begun to, nor does what the devices have of it when this
    /// returns, whatever the outcome, but by what is committed until the store ends. Writes in flight have [landed](Self::finish_writes), and the threads in the background have [stopped](Self::stop).
    pub(crate) fn end(&self) -> Result<(), Error> {
        self.ending.store(true, Ordering::SeqCst);
        self.let_all_through();
        let written = match self.store.read_only() {
            true => Ok(()),
            false => self.write_back_all(),
        };
        self.ended.store(true, Ordering::SeqCst);
        self.let_all_through();
        self.staging.finish();
        self.ended_whole.store(written.is_ok(), Ordering::SeqCst);
        written
    }

    /// What a sync is told that may have met the end. Refused, as nothing is written any more, it may be of what the end has made durable. The caller holds no lock of files.
    pub(crate) fn or_ended_well(&self, outcome: Result<(), Error>) -> Result<(), Error> {
        match outcome {
            Err(Error::ReadOnly) if self.has_ended_well() => Ok(()),
            outcome => outcome,
        }
    }

    /// The store's end tells last, and comes after all else.
    fn has_ended_well(&self) -> bool {
        self.store.has_ended_well() && self.ended_whole.load(Ordering::SeqCst)
    }

    /// Has the I/O lock of each file for a moment: whoever had it before has done what he does, and whoever has it afterwards sees what the caller
    /// set before. So does who has a state that is not among these: it came to the table after the look.
    fn let_all_through(&self) {
        for ino in self.table.inos() {
            if let Some(state) = self.table.enter_present(ino) {
                let state = StateUse::new(self, state);
                drop(self.lock_alone(&state));
            }
        }
    }

    /// For who changes content, under the file's I/O lock.
    #[inline]
    fn check_open(&self) -> Result<(), Error> {
        match self.ending.load(Ordering::Relaxed) {
            true => Err(Error::ReadOnly),
            false => Ok(()),
        }
    }

    /// For who writes to blocks, under the I/O locks of the files that have them; to nobody's, while that is counted ([`transact::Staging`]).
    fn check_not_ended(&self) -> Result<(), Error> {
        match self.ended.load(Ordering::Relaxed) {
            true => Err(Error::ReadOnly),
            false => Ok(()),
        }
    }

    /// Waits until these pages of a file are the caller's, who holds neither an I/O lock nor a range.
    fn hold(&self, state: &FileState, pages: Range<u64>, mode: Mode) -> Held<'_> {
        (self.ranges).hold(state.ino().0, pages, mode, || self.land_writes())
    }

    /// Takes blocks out of the free space for pages that are about to become dirty.
    fn promise(&self, blocks: u64) -> Result<Promised<'_>, Error> {
        let blocks = match blocks {
            0 => 0,
            _ => {
                self.accept_extents()?;
                self.store.promise(blocks)?.into_blocks()
            }
        };
        Ok(Promised {
            files: self,
            blocks,
        })
    }

    /// Before pages become dirty that are yet to be mapped, or to be told to hold data: their extents make metadata grow. Of what is dirty already
    /// each page may be by itself.
    fn accept_extents(&self) -> Result<(), Error> {
        Ok(self.store.accept(self.waiting_extents())?)
    }

    /// The same without a look for room where there is none.
    fn has_room_for_extents(&self) -> bool {
        self.store.may_accept(self.waiting_extents())
    }

    fn waiting_extents(&self) -> u64 {
        self.pages.about_dirty() as u64 * EXTENT_BYTES
    }

    /// The same beside what is in hand, of which it takes as many as there are.
    fn promise_beside<'s>(
        &'s self,
        in_hand: &mut Promised<'s>,
        blocks: u64,
    ) -> Result<Promised<'s>, Error> {
        let given = in_hand.give(blocks);
        match self.promise(blocks - given) {
            Ok(mut promise) => {
                promise.blocks += given;
                Ok(promise)
            }
            Err(error) => {
                in_hand.blocks += given;
                Err(error)
            }
        }
    }

    /// Takes blocks out of what is promised to a file, for who holds its I/O lock alone and has just had them promised to it.
    fn out_of_promise(&self, state: &FileState, blocks: u64) -> Promised<'_> {
        let mut meta = state.meta.lock();
        let blocks = blocks.min(meta.promised);
        meta.promised -= blocks;
        Promised {
            files: self,
            blocks,
        }
    }

    /// Gives back promised blocks that no dirty page needs. The caller holds the I/O lock so
    /// that no write is between its promise and its pages.
    fn trim_promise(&self, state: &Counted<FileState>) {
        let needed = self.pages.promised(state.key);
        let surplus = {
            let mut meta = state.meta.lock();
            let surplus = meta.promised.saturating_sub(needed);
            meta.promised -= surplus;
            surplus
        };
        if surplus > 0 {
            drop(self.store.adopt_promise(surplus));
        }
    }

    /// Forgets pages and returns the blocks promised for them.
    fn drop_pages(&self, state: &Counted<FileState>, pages: Range<u64>) -> engine::cache::Dropped {
        let dropped = self.pages.invalidate(state.key, pages);
        if dropped.dirty > 0 {
            self.not_logged(state);
        }
        self.trim_promise(state);
        dropped
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.background.stop();
        self.ahead.close();
        self.cleaning.close();
        self.pages.stop_keeping();
    }
}

/// Promised blocks that no page has yet; they go back when this is dropped.
#[derive(Debug)]
struct Promised<'a> {
    files: &'a Files,
    blocks: u64,
}

impl Promised<'_> {
    /// Hands out up to `blocks` of them.
    fn give(&mut self, blocks: u64) -> u64 {
        let given = self.blocks.min(blocks);
        self.blocks -= given;
        given
    }
}

impl Drop for Promised<'_> {
    fn drop(&mut self) {
        if self.blocks > 0 {
            drop(self.files.store.adopt_promise(self.blocks));
        }
    }
}

/// Whether so many bytes from there on touch one page, or none.
fn is_one_page(offset: u64, len: usize) -> bool {
    (offset % PAGE) as usize + len <= BLOCK_SIZE
}

/// The pages that bytes `start..end` touch.
fn pages_of(bytes: Range<u64>) -> Range<u64> {
    bytes.start / PAGE..bytes.end.div_ceil(PAGE)
}

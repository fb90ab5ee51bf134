//! Pre-cleaning: dirty pages are written home before somebody needs their frames, by a thread for each device.
//!
//! Write-back goes file by file, because most of it needs a record. What was written over in place needs none: such a page can go home
//! alone, at any time, in any order. So sets of the cache in which many pages are dirty (`engine/cache/crowd.rs`), and files that have
//! been written over for long, are cleaned page by page, each with those dirty neighbours that lie next to it on its device. Of all other dirty pages
//! write-back of their files is told.
//!
//! A page is *wanted* by the list of its device, then *taken* by that device's thread, which writes up to [`BATCH`] pieces at once and waits
//! for them.
//!
//! Invariants:
//! 1. What is cleaned needs no record: it has a written block of its own, for which no batch vouches; it lies below the logged size; it
//!    is not the tail's; the file is not replaced, nor being cut, and its newest write-back has not failed. Write-back finds the rest as if nobody cleaned.
//! 2. From its copy until it is clean a page's file is locked shared, and its range held (`Home`): nobody takes the block away, writes past
//!    the cache there, vouches for the block, or writes another copy of the page home; a sync of the file waits. Both are tried only, so a
//!    thread that cleans waits for nothing but its device and the inode of a file. Its turn beside syncs ([`super::pace`]) it only tries, too.
//! 3. A page is clean by the stamp of its copy, and after the file is known to have unflushed data: who finds it clean flushes. A flush that
//!    failed since the copy was made counts as a failed write (R17).
//! 4. A device has one batch in flight, and [`work::LIST`] pages wanted. One that does not answer keeps these, and the files they are of from being
//!    cut and synced; all other devices go on, with what comes after its pages in their sets: pages of a device that is late are not counted
//!    on. Beside calls that read from devices
//!    a batch has [`work::BATCH_BESIDE_READS`] pieces, unless somebody waits for room.
//! 5. Who waits for room in a set holds no lock. He is told when there is room, and when no cleaning will make any; else he gives up after
//!    [`work::PATIENCE`]. A range he may hold, so a circle is possible, of several who write many pages and others who want those past the cache: patience ends it.

mod work;

pub(super) use work::Cleaning;
use work::{Asked, BATCH, Sweep, Wanted};

use super::bounce::Bounce;
use super::extents;
use super::file::FileState;
use super::meta::Meta;
use super::ranges::{Held, Mode};
use super::table::StateUse;
use super::writeback::Writes;
use super::{Files, PAGE, pace};
use crate::Error;
use base::atomic::Ordering;
use base::canary::{Canary, planted};
use base::counted::Counted;
use base::sync::{Arc, MutexGuard, ReadGuard};
use engine::Extent;
use engine::cache::{Backing, FileKey, Stamp};
use format::{BLOCK_SIZE, Block};
use std::ops::Range;

/// Pages of a piece at most.
const PIECE: u64 = 32;
/// Pages of a batch at most; fewer in a small cache.
const PAGES_MAX: usize = 256;
/// Crowded sets that one look for work goes through.
const LOOKS: usize = 32;
/// Of an old file, pages that one look goes through.
const SWEPT: usize = 256;

/// Dirty pages of a file that goes by itself; smaller ones write-back takes in groups.
const MANY: usize = super::together::PAGES_MAX;

/// What a look at a page says.
enum Home {
    /// The device it goes to.
    On(usize),
    /// Write-back of its file has to take it.
    File,
    /// Nothing is to be done.
    Gone,
}

/// Neighbouring pages that are being written.
struct Piece<'a> {
    state: &'a Counted<FileState>,
    pages: Range<u64>,
    stamps: Vec<Stamp>,
    block: Block,
    /// Where its copy begins.
    at: usize,
    _range: Held<'a>,
    _shared: ReadGuard<'a, ()>,
}

/// What a thread does next.
enum Turn {
    Again,
    /// What there is, others have.
    Nap,
    /// There is nothing; crowded sets had nothing either.
    Rest {
        fruitless: bool,
    },
    End,
}

/// Threads that clean have something to hold on to while [`Files`] may go.
struct Cleaner {
    device: usize,
    cold: Vec<Wanted>,
    batch: Vec<Wanted>,
}

impl Cleaner {
    fn new(device: usize) -> Cleaner {
        Cleaner {
            device,
            cold: Vec::new(),
            batch: Vec::new(),
        }
    }
}

impl Files {
    /// Starts the threads that clean, if that is wanted.
    pub(crate) fn start_cleaning(self: &std::sync::Arc<Self>) -> Result<(), Error> {
        if !self.options.pre_clean {
            return Ok(());
        }
        for device in 0..self.store.array().devices().count() {
            let (files, cleaning) = (std::sync::Arc::downgrade(self), Arc::clone(&self.cleaning));
            let body = move || {
                let _unhurried = device::Unhurried::begin();
                let mut cleaner = Cleaner::new(device);
                while let Some(files) = files.upgrade() {
                    let turn = files.clean_turn(&mut cleaner);
                    drop(files);
                    match turn {
                        Turn::Again => {}
                        Turn::Rest { fruitless } => cleaning.rest(device, fruitless),
                        Turn::Nap => cleaning.nap(),
                        Turn::End => return,
                    }
                }
            };
            let started = base::thread::spawn("sheaf-clean", body);
            let handle = started.map_err(|e| engine::Error::Thread(std::sync::Arc::new(e)))?;
            self.threads.lock().push(handle);
        }
        self.cleaning.set_running();
        Ok(())
    }

    /// The same without threads: cleans what is crowded now, once.
    pub(super) fn clean_now(&self) {
        let mut from = 0;
        let mut cold = Vec::new();
        while let Some(set) = self.pages.next_crowded(from) {
            from = set + 1;
            self.look_at(set, false, &mut cold);
            for device in 0..self.store.array().devices().count() {
                let mut cleaner = Cleaner::new(device);
                self.clean_batch(&mut cleaner);
            }
        }
    }

    /// Sweeps a file on one device; whether a batch of that seems to be under way then.
    #[cfg(test)]
    pub(super) fn sweep_once(&self, device: usize, key: FileKey) -> bool {
        self.sweep_pages(&mut Cleaner::new(device), key, 0);
        self.cleaning.work.lock().batches[device].began_ns.is_some()
    }

    fn clean_turn(&self, cleaner: &mut Cleaner) -> Turn {
        if !self.cleaning.work.lock().open {
            return Turn::End;
        }
        if self.store.read_only() || self.store.failed().is_some() {
            // Nothing is written any more.
            self.cleaning.close();
            return Turn::End;
        }
        let looked = self.look_for_work(cleaner);
        match self.clean_batch(cleaner) {
            Some(true) => Turn::Again,
            Some(false) => Turn::Nap,
            None if self.sweep_some(cleaner) => Turn::Again,
            None => Turn::Rest { fruitless: looked },
        }
    }

    /// Looks at sets that somebody waits for, then at others that are crowded until there is enough for this device's thread;
    /// true if there was any.
    fn look_for_work(&self, cleaner: &mut Cleaner) -> bool {
        let asked: Vec<(u64, usize)> = {
            let mut work = self.cleaning.work.lock();
            let fresh = work.asked.iter_mut().filter(|asked| asked.fresh);
            let look = |asked: &mut Asked| {
                asked.fresh = false;
                (asked.ticket, asked.set)
            };
            fresh.map(look).collect()
        };
        for (ticket, set) in asked {
            if !self.look_at(set, true, &mut cleaner.cold) && !self.pages.has_room(set) {
                self.tell_hopeless(ticket);
            }
        }
        for looked in 0..LOOKS {
            if self.cleaning.work.lock().lists[cleaner.device].len() >= BATCH {
                return true;
            }
            let from = self.cleaning.next_set.load(Ordering::Relaxed);
            let next = self.pages.next_crowded(from);
            let Some(set) = next.or_else(|| self.pages.next_crowded(0)) else {
                return looked > 0;
            };
            // Two that look at the same one find it taken.
            self.cleaning.next_set.store(set + 1, Ordering::Relaxed);
            self.look_at(set, false, &mut cleaner.cold);
        }
        true
    }

    fn tell_hopeless(&self, ticket: u64) {
        let mut work = self.cleaning.work.lock();
        for asked in work.asked.iter_mut().filter(|a| a.ticket == ticket) {
            asked.hopeless = true;
        }
        self.cleaning.eased.notify_all();
    }

    /// Has as many pages of a crowded set cleaned as makes it crowded no more, the coldest first. `urgent`: besides those that are being
    /// cleaned. False: none of its pages is being cleaned, or waits for its device.
    fn look_at(&self, set: usize, urgent: bool, cold: &mut Vec<Wanted>) -> bool {
        cold.clear();
        let now_ns = self.now_ns();
        let mut wanted = self.pages.append_cold(set, cold);
        let mut state: Option<StateUse<'_>> = None;
        let mut helps = false;
        for &(key, page) in cold.iter() {
            if wanted == 0 {
                break;
            }
            if let Some(soon) = self.cleaning.is_taken(&(key, page), now_ns) {
                wanted -= (soon && !urgent) as usize;
                helps = true;
                continue;
            }
            if state.as_ref().is_none_or(|state| state.key != key) {
                state = self.use_dirty(key);
            }
            match state.as_ref().map_or(Home::Gone, |s| self.home_of(s, page)) {
                Home::On(device) => {
                    helps = true;
                    // Else the device has enough to do: those behind it may be others'.
                    wanted -= self.cleaning.want(device, (key, page), now_ns) as usize;
                }
                Home::File => state.iter().for_each(|s| self.needs_write_back(s, now_ns)),
                Home::Gone => {}
            }
        }
        helps
    }

    fn needs_write_back(&self, state: &FileState, now_ns: u64) {
        // As long as its pages crowd a set, each look would find it again.
        if state.meta.lock().failed_lately(now_ns) {
            return;
        }
        if self.cleaning.work.lock().files.insert(state.ino()) {
            self.hurry();
        }
    }

    fn use_dirty(&self, key: FileKey) -> Option<StateUse<'_>> {
        let state = self.use_active(key.nid);
        state.filter(|state| state.key == key)
    }

    /// Where a dirty page goes.
    fn home_of(&self, state: &Counted<FileState>, page: u64) -> Home {
        if !is_plain(&state.meta.lock(), page) {
            return Home::File;
        }
        match self.block_of(state, &(page..page + 1)) {
            Ok(Some((_, block))) if !self.store.is_vouched(Extent { block, len: 1 }) => {
                Home::On(self.place_of(block, 1).0)
            }
            _ => Home::File,
        }
    }

    /// The device of a block, and how many of this many blocks from there on lie there one behind the other.
    pub(super) fn place_of(&self, block: Block, blocks: u64) -> (usize, u64) {
        let geometry = self.store.array().geometry();
        let mut first: Option<(usize, u64, u64)> = None;
        let mut ended = false;
        geometry.pieces(
            block.byte(),
            blocks as usize * BLOCK_SIZE,
            |piece| match &mut first {
                None => first = Some((piece.device, piece.offset, piece.len as u64)),
                Some((device, offset, len))
                    if !ended && *device == piece.device && *offset + *len == piece.offset =>
                {
                    *len += piece.len as u64;
                }
                Some(_) => ended = true,
            },
        );
        first.map_or((0, 0), |(device, _, len)| (device, len / PAGE))
    }

    /// The first of these pages that have a written block and no tail, with those behind it that lie next to it, and its block.
    /// `None`: there is none, or to tell would take a wait.
    pub(super) fn block_of(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
    ) -> Result<Option<(Range<u64>, Block)>, Error> {
        let content = state.node.read()?;
        let inode = content.inode()?;
        let tail = inode.tail.as_ref();
        if tail.is_some_and(|tail| pages.contains(&tail.page)) {
            return Ok(None);
        }
        let found = extents::glance(&self.store, inode, pages);
        let first = found.and_then(|found| found.iter().find(|e| e.written).copied());
        Ok(first.map(|extent| (extent.page..extent.end(), extent.block)))
    }

    /// Writes what is on a device's list; whether it could have any of that. `None`: there was nothing.
    fn clean_batch(&self, cleaner: &mut Cleaner) -> Option<bool> {
        cleaner.batch.clear();
        let most = self.cleaning.most_pieces();
        (self.cleaning).take(cleaner.device, most, self.now_ns(), &mut cleaner.batch);
        if cleaner.batch.is_empty() {
            return None;
        }
        let mut ended = Ended {
            files: self,
            device: cleaner.device,
            wanted: &cleaner.batch,
            in_vain: false,
        };
        let missed = self.clean(cleaner.device, &cleaner.batch);
        ended.in_vain = missed == cleaner.batch.len();
        Some(!ended.in_vain)
    }

    /// Goes on with files that are cleaned whole; false if there was nothing.
    fn sweep_some(&self, cleaner: &mut Cleaner) -> bool {
        let device = cleaner.device;
        let next = {
            let work = self.cleaning.work.lock();
            let due = |(key, sweep): (&FileKey, &Sweep)| Some((*key, sweep.next[device]?));
            work.sweeps.iter().find_map(due)
        };
        let Some((key, from)) = next else {
            return false;
        };
        let (passed, missed) = self.sweep_pages(cleaner, key, from);
        let done = {
            let mut work = self.cleaning.work.lock();
            let Some(sweep) = work.sweeps.get_mut(&key) else {
                return true;
            };
            sweep.next[device] = passed;
            sweep.missed |= missed;
            let done = sweep
                .next
                .iter()
                .all(Option::is_none)
                .then(|| sweep.clone());
            if done.is_some() {
                work.sweeps.remove(&key);
            }
            done
        };
        if let Some(sweep) = done
            && !sweep.missed
        {
            self.pages.written_back(key, sweep.began_ns);
        }
        true
    }

    /// Cleans some dirty pages of a file that are on this device, from a page on; returns where to go on, and whether one was left that
    /// could not be had.
    fn sweep_pages(&self, cleaner: &mut Cleaner, key: FileKey, from: u64) -> (Option<u64>, bool) {
        let Some(state) = self.use_dirty(key) else {
            return (None, true);
        };
        let pages = self
            .pages
            .dirty_pages(key, from..extents::PAGE_LIMIT, SWEPT);
        let mut next = pages.last().filter(|_| pages.len() == SWEPT).map(|p| p + 1);
        let (most, room, mut missed) = (self.cleaning.most_pieces(), self.copied_pages(), false);
        cleaner.batch.clear();
        let mut last: Option<u64> = None;
        let mut pieces = 0;
        for page in pages {
            match self.home_of(&state, page) {
                Home::On(device) if device == cleaner.device => {
                    let goes_on = last.is_some_and(|last| last + 1 == page) && page % PIECE != 0;
                    if !goes_on && pieces == most || cleaner.batch.len() == room {
                        next = Some(page);
                        break;
                    }
                    pieces += !goes_on as usize;
                    last = Some(page);
                    cleaner.batch.push((key, page));
                }
                Home::On(_) => {}
                Home::File | Home::Gone => {
                    missed = true;
                    self.needs_write_back(&state, self.now_ns());
                }
            }
        }
        {
            // Others leave them alone; what is on a list already is somebody's.
            let mut work = self.cleaning.work.lock();
            let device = cleaner.device;
            let fresh = |wanted: &Wanted| work.taken.insert(*wanted, device).is_none();
            let all = cleaner.batch.len();
            cleaner.batch.retain(fresh);
            missed |= cleaner.batch.len() < all;
            if !cleaner.batch.is_empty() {
                // Else nothing would end it, and the device look late.
                work.batches[device].began_ns = Some(self.now_ns());
            }
        }
        if !cleaner.batch.is_empty() {
            let _ended = Ended {
                files: self,
                device: cleaner.device,
                wanted: &cleaner.batch,
                in_vain: false,
            };
            missed |= self.clean(cleaner.device, &cleaner.batch) > 0;
        }
        (next, missed)
    }

    /// Writes these pages home, as far as they can be had at once, with their neighbours; returns how many could
    /// not.
    pub(super) fn clean(&self, device: usize, wanted: &[Wanted]) -> usize {
        let flush_failures = self.store.array().flush_failures();
        let mut states: Vec<StateUse<'_>> = Vec::new();
        for (key, _) in wanted {
            if !states.iter().any(|state| state.key == *key) {
                states.extend(self.use_dirty(*key));
            }
        }
        let paced = self.keeps_pace();
        let most = match paced {
            true => self.copied_pages().min(pace::piece_pages()),
            false => self.copied_pages(),
        };
        let mut copies = self.memory.take(most * BLOCK_SIZE);
        let mut pieces: Vec<Piece<'_>> = Vec::with_capacity(wanted.len());
        let mut taken = 0;
        for &(key, page) in wanted {
            let Some(state) = states.iter().find(|state| state.key == key) else {
                continue;
            };
            let mine = |piece: &&Piece<'_>| piece.state.key == key && piece.pages.contains(&page);
            if taken == most || pieces.iter().any(|piece| mine(&piece)) {
                continue;
            }
            let piece = self.gather(state, (device, page), (taken, most), &mut copies);
            if let Some(piece) = piece {
                taken += piece.stamps.len();
                pieces.push(piece);
            }
        }
        let turn = if paced { self.pace.try_turn() } else { None };
        if paced && turn.is_none() {
            // Nobody waits for the locks of these files until another device answers.
            return wanted.len();
        }
        if planted(Canary::CleanedTooEarly) {
            pieces.iter().for_each(|piece| self.complete_piece(piece));
        }
        self.write_pieces(&pieces, &copies, flush_failures, turn.as_ref());
        let is_in = |(key, page): &&Wanted| {
            let mut pieces = pieces.iter();
            pieces.any(|piece| piece.state.key == *key && piece.pages.contains(page))
        };
        wanted.len() - wanted.iter().filter(is_in).count()
    }

    /// Pages that a device's thread copies at once: they come on top of the cache.
    fn copied_pages(&self) -> usize {
        let devices = self.store.array().devices().count();
        (self.pages.capacity() / 64 / devices).clamp(8, PAGES_MAX)
    }

    /// Locks a page and those of its neighbours that go with it, and copies them (invariants 1 and 2).
    fn gather<'a>(
        &'a self,
        state: &'a Counted<FileState>,
        (device, page): (usize, u64),
        (taken, most): (usize, usize),
        copies: &mut Bounce<'_>,
    ) -> Option<Piece<'a>> {
        let run = self.dirty_run(state, page, (most - taken) as u64);
        let hold = |pages: Range<u64>| (self.ranges).try_hold(state.ino().0, pages, Mode::Home);
        let (run, range) = match hold(run.clone()) {
            Some(range) => (run, range),
            None => (page..page + 1, hold(page..page + 1)?),
        };
        let shared = state.try_shared_beside_pieces().ok().flatten()?;
        let run = {
            let meta = state.meta.lock();
            // The last ones may not be.
            let plain = (run.clone()).take_while(|&p| is_plain(&meta, p)).count() as u64;
            run.start..run.start + plain
        };
        if !run.contains(&page) {
            return None;
        }
        let alone = || self.block_on(state, device, page, page..page + 1);
        let (pages, block) = self.block_on(state, device, page, run).or_else(alone)?;
        let (mut stamps, mut first) = (Vec::new(), pages.start);
        for p in pages.clone() {
            let at = (taken + stamps.len()) * BLOCK_SIZE;
            let out = &mut copies[at..at + BLOCK_SIZE];
            match self.pages.copy_dirty(state.key, p, out) {
                Some((stamp, Backing::Allocated)) => stamps.push(stamp),
                // Cleaned by whoever had the range before.
                _ if p < page => (first, _) = (p + 1, stamps.clear()),
                _ => break,
            }
        }
        let len = stamps.len() as u64;
        (len > 0).then_some(Piece {
            state,
            pages: first..first + len,
            stamps,
            block: Block(block.0 + (first - pages.start)),
            at: taken * BLOCK_SIZE,
            _range: range,
            _shared: shared,
        })
    }

    /// The dirty pages around a page without a gap.
    fn dirty_run(&self, state: &FileState, page: u64, most: u64) -> Range<u64> {
        let first = page / PIECE * PIECE;
        let window = first..first + PIECE;
        let dirty = self.pages.dirty_pages(state.key, window, PIECE as usize);
        let has = |p: u64| dirty.binary_search(&p).is_ok();
        let (mut start, mut end) = (page, page + 1);
        while end - start < most && has(end) {
            end += 1;
        }
        while end - start < most && start > first && has(start - 1) {
            start -= 1;
        }
        start..end
    }

    /// Those of these pages around a page that lie in one piece on a device, and the block of the first. `None`: they are not to be
    /// cleaned all, or to tell would take a wait.
    fn block_on(
        &self,
        state: &Counted<FileState>,
        device: usize,
        page: u64,
        run: Range<u64>,
    ) -> Option<(Range<u64>, Block)> {
        let mut from = run.start;
        while from <= page {
            let (pages, block) = self.block_of(state, &(from..run.end)).ok().flatten()?;
            let (on, len) = self.place_of(block, pages.end - pages.start);
            let piece = pages.start..pages.start + len;
            if piece.contains(&page) {
                let vouched = self.store.is_vouched(Extent {
                    block,
                    len: len as u32,
                });
                return (on == device && !vouched).then_some((piece, block));
            }
            from = piece.end;
        }
        None
    }

    /// Writes what was copied, and makes it clean (invariant 3).
    fn write_pieces(
        &self,
        pieces: &[Piece<'_>],
        copies: &[u8],
        flush_failures: u64,
        turn: Option<&MutexGuard<'_, ()>>,
    ) {
        if pieces.is_empty() {
            return;
        }
        let writes = |pieces: &[Piece<'_>]| {
            let mut writes = Writes::new(copies);
            for piece in pieces {
                writes.add(piece.at, [(piece.block, piece.stamps.len() as u64)]);
            }
            self.write_out_by(writes, |ios| match turn {
                Some(turn) => self.write_in_turn(turn, ios),
                None => Ok(self.store.array().execute(ios)?),
            })
        };
        let all = writes(pieces);
        for piece in pieces {
            // Who of several it was that failed.
            let written = match &all {
                Ok(()) => Ok(()),
                Err(_) => writes(std::slice::from_ref(piece)),
            };
            let noted = written.and_then(|()| self.wrote_in_place(piece.state, flush_failures));
            match noted {
                Ok(()) => self.complete_piece(piece),
                Err(error) => {
                    let now_ns = self.now_ns();
                    (piece.state.meta.lock()).fail_write_back(error.to_string(), now_ns);
                    if let Some(left_out) = self.told.failed.may_say(now_ns) {
                        let ino = piece.state.ino();
                        tracing::error!(left_out, "cleaning of inode {ino} failed: {error}");
                    }
                }
            }
        }
        let pages: usize = pieces.iter().map(|piece| piece.stamps.len()).sum();
        (self.cleaning.cleaned).fetch_add(pages as u64, Ordering::Relaxed);
        (self.cleaning.writes).fetch_add(pieces.len() as u64, Ordering::Relaxed);
    }

    fn complete_piece(&self, piece: &Piece<'_>) {
        for (page, &stamp) in piece.pages.clone().zip(&piece.stamps) {
            self.pages.complete(piece.state.key, page, stamp);
        }
    }

    /// Whether all that a file has to write back can be cleaned, and that is much.
    pub(super) fn is_swept(&self, state: &FileState) -> bool {
        if !self.cleaning.is_running() || self.pages.promised(state.key) > 0 {
            return false;
        }
        let plain = {
            let meta = state.meta.lock();
            is_plain(&meta, 0) && meta.size == meta.logged_size && meta.logged.is_none()
        };
        plain
            && self
                .pages
                .dirty_pages(state.key, 0..extents::PAGE_LIMIT, MANY + 1)
                .len()
                > MANY
    }
}

/// Ends what was taken, even if its thread panics.
struct Ended<'a> {
    files: &'a Files,
    device: usize,
    wanted: &'a [Wanted],
    in_vain: bool,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let now_ns = self.files.now_ns();
        (self.files.cleaning).end(self.device, self.wanted, self.in_vain, now_ns);
    }
}

/// Whether a page that has a block can be cleaned (invariant 1), as far as its file's state tells.
fn is_plain(meta: &Meta, page: u64) -> bool {
    needs_no_record(meta, page) && meta.failing_ns.is_none()
}

/// The same of a file whose write-back may have failed.
pub(super) fn needs_no_record(meta: &Meta, page: u64) -> bool {
    let inside = (page + 1) * PAGE <= meta.logged_size || meta.size == meta.logged_size;
    let whole = !meta.dead && !meta.replaced && !meta.cutting;
    whole && inside
}

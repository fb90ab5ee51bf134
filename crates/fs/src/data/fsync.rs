//! Making data durable: fsync, background write-back, what happens at close.

use super::extents::PAGE_LIMIT;
use super::file::{FileState, OpenFile};
use super::meta::Meta;
use super::pace::piece_pages;
use super::table::Usage;
use super::tail::How;
use super::together::{Room, TOGETHER};
use super::{Files, PAGE};
use crate::content::AttrChange;
use crate::content::Delta;
use crate::{Error, Ino};
use base::atomic::{AtomicU64, Ordering};
use base::canary::{Canary, planted};
use base::clock::ns_of;
use base::counted::Counted;
use base::sync::Arc;
use engine::Need;
use engine::cache::FileKey;
use std::ops::Range;
use std::time::Duration;

/// How often the background thread looks, at least and at most.
const TICK: Duration = Duration::from_secs(1);
const TICK_MIN: Duration = Duration::from_millis(10);
/// A clock that is so far behind the newest stamp was set back: exact stamps are ahead of it by less.
const SET_BACK_NS: i64 = 1_000_000_000;
/// Why what was written may be lost although no call of the writer's failed.
pub(super) const FLUSH_FAILED: &str = "a flush failed after it was written";
/// Ranges that may wait for the background thread to write them.
const HINTS_MAX: usize = 1024;
/// States beyond which one that only an access time keeps is settled at close.
const STATES_MANY: usize = 4096;
/// More than one part in so many of the cache that is dirty goes home before its time; of files that are open and being replaced, one in so many.
const CROWDED_SHARE: usize = 4;
const REPLACED_SHARE: usize = 2;

/// A sync that is running.
pub(super) struct Syncing<'a> {
    count: &'a AtomicU64,
    /// None other was when it began.
    alone: bool,
}

impl<'a> Syncing<'a> {
    pub fn begin(count: &'a AtomicU64) -> Syncing<'a> {
        let alone = count.fetch_add(1, Ordering::Relaxed) == 0;
        Syncing { count, alone }
    }
}

impl Drop for Syncing<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Files {
    /// Reports a failed write-back of this file, as `close` does.
    pub fn flush(&self, file: &OpenFile) -> Result<(), Error> {
        file.check_failure()
    }

    /// Makes the file durable: its data and size, and, unless `data_only`, its times as far as
    /// `docs/durability.md` promises. Waits for no other file's pages.
    ///
    /// A file whose blocks and size did not change since they were last durable needs no
    /// journal commit: its data is written in place and the devices are flushed. One that
    /// grew a little, or is small and new, needs nothing but the commit: its data is logged.
    ///
    /// # Errors
    /// [`Error::WriteFailed`] when data of the file could not be written since it was opened,
    /// on every call until it is opened again.
    pub fn fsync(&self, file: &OpenFile, data_only: bool) -> Result<(), Error> {
        let outcome = self.fsync_state(&file.state, data_only);
        file.check_failure()?;
        outcome
    }

    /// As [`fsync`](Self::fsync) of each of these handles, of one file, in one call. Returns what each is told.
    pub(crate) fn fsync_together(
        &self,
        handles: &[&OpenFile],
        data_only: bool,
    ) -> Vec<Result<(), Error>> {
        let Some(first) = handles.first() else {
            return Vec::new();
        };
        let outcome = self.fsync_state(&first.state, data_only);
        let told = |file: &&OpenFile| file.check_failure().and_then(|()| outcome.clone());
        handles.iter().map(told).collect()
    }

    /// A hint, as `sync_file_range(2)`: begins to write the dirty pages of `bytes`, so that a later fsync has less to write.
    /// `wait`: returns when they are written. Nothing is durable by that: neither are devices flushed nor is anything
    /// committed. The content of a file that was cut to nothing and is written anew stays in memory, up to 64 MiB: a part of it would take the old content's place.
    ///
    /// # Errors
    /// With `wait` those of writing, which are latched on the file as well; else what failed before.
    pub fn write_range(&self, file: &OpenFile, bytes: Range<u64>, wait: bool) -> Result<(), Error> {
        if self.store.read_only() && self.store.failed().is_none() {
            // As with fsync: there is nothing to write.
            return Ok(());
        }
        let bytes = bytes.start..bytes.end.min(file.state.size());
        if bytes.is_empty() {
            return file.check_failure();
        }
        let pages = super::pages_of(bytes);
        if wait {
            self.flush_range(&file.state, pages)?;
        } else {
            let mut hints = self.hints.lock();
            // More than these are written when their time comes.
            if hints.len() < HINTS_MAX {
                hints.push((file.state.key, pages));
            }
            drop(hints);
            self.hurry();
        }
        file.check_failure()
    }

    /// Writes what somebody asked to be written soon. Failures are latched on the files.
    fn follow_hints(&self) {
        let hints = std::mem::take(&mut *self.hints.lock());
        for (key, pages) in hints {
            let Some(state) = self.use_active(key.nid) else {
                continue;
            };
            if state.key == key
                && let Err(error) = self.flush_range(&state, pages)
            {
                self.pass(&error);
            }
        }
    }

    /// Says that it goes on after that.
    fn pass(&self, error: &Error) {
        if let Some(left_out) = self.told.passed.may_say(self.now_ns()) {
            tracing::warn!(left_out, "write-back: {error}");
        }
    }

    /// As `fsync` of a file opened for it, by inode; of anything but a regular file it is a commit.
    pub(crate) fn fsync_inode(&self, ino: Ino, data_only: bool) -> Result<(), Error> {
        match self.use_file(ino) {
            Ok(state) => {
                let forgiven = state.forgiven();
                let outcome = self.fsync_state(&state, data_only);
                state.check_failure(forgiven)?;
                outcome
            }
            Err(Error::IsADirectory | Error::Invalid(_)) => {
                self.pace.note_sync(self.now_ns());
                if planted(Canary::DirectoryUncommitted) {
                    return Ok(());
                }
                let committed = self.store.commit_through(self.store.epoch());
                self.or_ended_well(committed.map_err(Error::from))
            }
            Err(error) => Err(error),
        }
    }

    fn fsync_state(&self, state: &Counted<FileState>, data_only: bool) -> Result<(), Error> {
        if self.store.read_only() && self.store.failed().is_none() {
            return Ok(());
        }
        let began = self.now_ns();
        let syncing = Syncing::begin(&self.syncing);
        let done = self.make_durable(state, data_only, syncing.alone);
        drop(syncing);
        let done = self.or_ended_well(done);
        let passed = self.now_ns().saturating_sub(began);
        self.counts.fsyncs.record(passed);
        done
    }

    fn make_durable(
        &self,
        state: &Counted<FileState>,
        data_only: bool,
        alone: bool,
    ) -> Result<(), Error> {
        let how = match alone {
            true => How::Alone,
            false => How::Logged,
        };
        self.flush_file_by(state, how)?;
        let times_due = !data_only && self.times_due(state);
        if times_due {
            self.persist_times(state)?;
            self.store.commit_through(self.store.epoch())?;
        }
        // Where each sync has the times durable, others may have logged them since they changed, and committed nothing.
        let with_times = !data_only && self.options.mtime_persist.is_zero();
        let (changed, unflushed) = {
            let meta = state.meta.lock();
            let changed = match with_times {
                true => meta.changed.max(meta.times_logged),
                false => meta.changed,
            };
            (changed, meta.in_place.unflushed())
        };
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        // R7: the last change of anything but coarse times must be durable, and of these where they are not coarse.
        let commit = changed > self.store.durable_epoch();
        if commit && !planted(Canary::FsyncUncommitted) {
            let written = self.pace.written();
            self.store.commit_through(changed)?;
            self.flushed_one(written);
        }
        if commit || times_due {
            count(&self.counts.committed);
        } else if !data_only && self.times_kept(state) {
            count(&self.counts.times_kept);
        }
        // Data written in place after that change, which no commit needs to have flushed.
        if unflushed && !planted(Canary::OverwriteUnflushed) {
            count(&self.counts.flushed);
            self.flush_devices()?;
        }
        // What failed may have concerned this file, and nothing is written any more.
        match self.store.failed() {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    fn times_due(&self, state: &Counted<FileState>) -> bool {
        let interval = ns_of(self.options.mtime_persist);
        let (persisted_ns, is_owed) = {
            let meta = state.meta.lock();
            (meta.persisted_ns, meta.owed.is_some())
        };
        let is_long_ago = || self.now_ns().saturating_sub(persisted_ns) >= interval;
        self.times_coarse(state) && (is_owed || is_long_ago())
    }

    /// Times in memory are ahead of the inode's.
    fn times_coarse(&self, state: &Counted<FileState>) -> bool {
        let meta = state.meta.lock();
        meta.times.mtime.is_some() || meta.times.ctime.is_some()
    }

    /// Times are ahead of the inode's that no earlier sync has left so.
    fn times_kept(&self, state: &Counted<FileState>) -> bool {
        let mut meta = state.meta.lock();
        let ahead = (meta.times.mtime, meta.times.ctime);
        let kept = std::mem::replace(&mut meta.kept, ahead);
        ahead != (None, None) && ahead != kept
    }

    /// Flushes the devices for all files that wrote in place. A failure is latched on each of
    /// them: what they wrote may be lost (R17). No lock is held.
    fn flush_devices(&self) -> Result<(), Error> {
        let waiting = self.written_in_place();
        let outcome = self.flush_counted();
        let failures = self.store.array().flush_failures();
        match outcome {
            Ok(()) => {
                self.flushed(waiting, failures);
                Ok(())
            }
            Err(error) => {
                self.flush_failed(&error);
                Err(error.into())
            }
        }
    }

    /// Files that wait for a flush, each with the count of what it wrote in place so far.
    pub(super) fn written_in_place(&self) -> Vec<(Counted<FileState>, u64)> {
        let states: Vec<Counted<FileState>> = self.unflushed.lock().values().cloned().collect();
        let count = |state: Counted<FileState>| {
            let written = state.meta.lock().in_place.written;
            (state, written)
        };
        states.into_iter().map(count).collect()
    }

    /// What these files had written was flushed, if none of the `failures` concerned it.
    pub(super) fn flushed(&self, waiting: Vec<(Counted<FileState>, u64)>, failures: u64) {
        for (state, written) in waiting {
            let mut meta = state.meta.lock();
            if meta.in_place.unflushed() && meta.in_place.flush_failures != failures {
                // Ours succeeded, but somebody else's did not.
                self.lost(&state, &mut meta, FLUSH_FAILED);
                meta.in_place.all_flushed();
            }
            meta.in_place.flushed(written);
            if !meta.in_place.unflushed() {
                self.forget_unflushed(&state);
                drop(meta);
                self.leave_closed(&state);
            }
        }
    }

    /// A state that was kept until its file was flushed goes, if nothing else keeps it.
    fn leave_closed(&self, state: &Counted<FileState>) {
        if !self.table.is_open(state.ino()) {
            // Leaving is what removes it.
            drop(self.use_active(state.ino()));
        }
    }

    /// Nothing that this file wrote in place waits for a flush any more. Its nid may be another
    /// file's by now, whose entry stays.
    pub(super) fn forget_unflushed(&self, state: &Counted<FileState>) {
        let mut unflushed = self.unflushed.lock();
        let ino = state.ino();
        if unflushed
            .get(&ino)
            .is_some_and(|s| Counted::ptr_eq(s, state))
        {
            unflushed.remove(&ino);
        }
    }

    /// Latches a failed flush on all files that wrote in place. Those that note their write after
    /// this look see by the array's count of failures that it may be lost.
    fn flush_failed(&self, error: &engine::Error) {
        let states: Vec<Counted<FileState>> = self.unflushed.lock().values().cloned().collect();
        for state in states {
            let mut meta = state.meta.lock();
            if !planted(Canary::FailedFlushForgotten) {
                self.lost(&state, &mut meta, &error.to_string());
            }
            meta.in_place.all_flushed();
            self.forget_unflushed(&state);
            drop(meta);
            self.leave_closed(&state);
        }
    }

    /// Logs times that are ahead of the inode, and nothing else: no change in the sense of R7. For who syncs, also if somebody has made the file longer since: the
    /// times of what was synced are no later.
    pub(super) fn persist_times(&self, state: &Counted<FileState>) -> Result<(), Error> {
        self.persist_times_if(state, |_| true)
    }

    /// The same for whom nobody has asked: times of content that is ahead go with that.
    fn persist_times_alone(&self, state: &Counted<FileState>) -> Result<(), Error> {
        self.persist_times_if(state, |meta| !meta.content_is_ahead())
    }

    fn persist_times_if(
        &self,
        state: &Counted<FileState>,
        may: impl Fn(&Meta) -> bool,
    ) -> Result<(), Error> {
        let (mut op, slot) = match self.begin(state, Need::Reclaim) {
            // Deleted meanwhile, and its times with it.
            Err(Error::Stale(ino)) if ino == state.ino() => return Ok(()),
            begun => begun?,
        };
        let times = {
            let meta = state.meta.lock();
            if !may(&meta) {
                // Not any more, since the caller looked.
                return Ok(());
            }
            meta.times
        };
        if times.any() {
            let attrs = AttrChange {
                atime: times.atime,
                mtime: times.mtime,
                ctime: times.ctime,
                ..AttrChange::default()
            };
            op.apply(slot, Delta::Attrs(attrs));
            op.commit_noting(|epoch| {
                let mut meta = state.meta.lock();
                meta.times_logged = meta.times_logged.max(epoch);
            });
        }
        let now_ns = self.now_ns();
        let mut meta = state.meta.lock();
        meta.persisted_ns = now_ns;
        meta.logged_times(times);
        Ok(())
    }

    /// Writes back one file if it has anything to write; nothing is made durable. Rename calls
    /// it, so that a file never takes another's name before it has its content.
    pub(crate) fn write_back(&self, ino: Ino) -> Result<(), Error> {
        match self.use_active(ino) {
            Some(state) => {
                // What is logged, but for a little, need not go home for that.
                let how = match state.meta.lock().logged {
                    Some(_) => How::Logged,
                    None => How::Home,
                };
                self.flush_file_by(&state, how)
            }
            // Deleted meanwhile, its pages with it.
            None => Ok(()),
        }
    }

    /// What was written of this file and is clean in memory may be lost.
    pub(super) fn lost(&self, state: &FileState, meta: &mut Meta, why: &str) {
        meta.fail(why.to_owned());
        meta.failure.lost = true;
        if !planted(Canary::LossUntold) {
            self.losses.lock().note(state.ino(), why);
        }
    }

    /// A write of this file has failed, and nobody was told.
    pub(crate) fn untold(&self, (ino, generation): (Ino, u64), why: &str) {
        match self.use_file(ino) {
            Ok(state) if state.key.generation == generation => {
                self.lost(&state, &mut state.meta.lock(), why);
            }
            // It is deleted.
            Ok(_) | Err(Error::Stale(_)) => {}
            Err(_) => self.losses.lock().note(ino, why),
        }
    }

    /// Losses that a sync that begins now does not report; see [`check_losses`](Self::check_losses).
    pub(crate) fn losses_told(&self) -> u64 {
        self.losses.lock().told()
    }

    /// For the end of a sync: fails if anything was lost that none had reported before it began.
    /// So each loss fails every sync that runs then, or the next.
    pub(crate) fn check_losses(&self, told: u64) -> Result<(), Error> {
        self.losses.lock().check(told)
    }

    /// Writes back all files, logs all times and flushes what was written in place; for sync
    /// and unmount, which commit afterwards. All are attempted; the first error is returned.
    pub(crate) fn write_back_all(&self) -> Result<(), Error> {
        let mut outcome = Ok(());
        let mut note = |done: Result<(), Error>| {
            if outcome.is_ok() {
                outcome = done;
            }
        };
        let mut inos = self.table.inos();
        inos.sort_unstable();
        self.write_back_each(&inos, &|state| self.settle(state), &mut note);
        let unflushed = !self.unflushed.lock().is_empty();
        if unflushed {
            let done = self.flush_devices();
            if outcome.is_ok() {
                outcome = done;
            }
        }
        outcome
    }

    fn settle(&self, state: &Counted<FileState>) -> Result<(), Error> {
        self.flush_file(state)?;
        if state.meta.lock().times.any() {
            self.persist_times(state)?;
        }
        Ok(())
    }

    /// Dirty pages that only write-back takes home: where threads clean, those without a block. Wrong by a 16th of the cache at most.
    pub(super) fn unwritten(&self) -> usize {
        match self.cleaning.is_running() {
            true => self.pages.about_promised(),
            false => self.pages.about_dirty(),
        }
    }

    /// Keeps such pages below half of the cache: above it one writer writes back the oldest
    /// files, and those that follow wait for it when hardly a clean page is left. Beside syncs a file with little to write
    /// does not, so that who syncs does not write back for others. No lock is held.
    pub(super) fn balance(&self, state: &Counted<FileState>) -> Result<(), Error> {
        self.cleaning.note_dirty();
        let capacity = self.pages.capacity();
        if self.unwritten() <= capacity / 4 {
            return Ok(());
        }
        self.hurry();
        if self.unwritten() <= capacity / 2 {
            return Ok(());
        }
        if self.unwritten() <= capacity / 8 * 7 && self.keeps_pace() && self.has_few_dirty(state) {
            return Ok(());
        }
        let turn = match self.balancer.try_lock() {
            Some(turn) => turn,
            None if self.unwritten() <= capacity / 8 * 7 => return Ok(()),
            None => self.balancer.lock(),
        };
        if self.pages.is_dirty(state.key) {
            self.flush_file(state)?;
        }
        let mut files = self.pages.dirty_files();
        if self.cleaning.is_running() {
            files.retain(|file| file.promised > 0);
        }
        files.sort_unstable_by_key(|f| f.since_ns);
        let now_ns = self.now_ns();
        let fails = |ino| {
            self.use_active(ino)
                .is_some_and(|state| state.meta.lock().failed_lately(now_ns))
        };
        let inos = files.iter().map(|f| f.key.nid);
        let inos: Vec<Ino> = inos.filter(|ino| !fails(*ino)).collect();
        let mut room = Room::new();
        for inos in inos.chunks(TOGETHER) {
            if self.unwritten() <= capacity / 8 * 3 {
                break;
            }
            let alone = |state: &Counted<FileState>| self.flush_file(state);
            self.write_back_some(inos, &mut room, &alone, &mut |done| {
                if let Err(error) = done {
                    // Latched on that file, and reported to whoever syncs it.
                    self.pass(&error);
                }
            });
        }
        drop(turn);
        Ok(())
    }

    /// Whether a file has no more to write than one piece.
    fn has_few_dirty(&self, state: &FileState) -> bool {
        let most = piece_pages();
        let pages = self.pages.dirty_pages(state.key, 0..PAGE_LIMIT, most + 1);
        pages.len() <= most
    }

    pub(super) fn hurry(&self) {
        self.background.hurry();
    }

    /// How far the clock is behind the newest stamp, if it was set back: times stand still for that long ([`times`](crate::times), invariant 1).
    pub(super) fn set_back(&self) -> Option<Duration> {
        let now = self.store.clock().now_coarse();
        let behind = self.times.floor().saturating_sub(now.ns());
        (behind > SET_BACK_NS).then(|| Duration::from_nanos(behind as u64))
    }

    /// Says, once, that the clock was set back.
    fn look_at_clock(&self) {
        let set_back = self.set_back();
        let told = self
            .told_set_back
            .swap(set_back.is_some(), Ordering::Relaxed);
        if let (Some(by), false) = (set_back, told) {
            tracing::warn!(
                "the clock was set back by {} s: what changes gets the time that it was, until the clock comes to that again or the file system is mounted anew",
                by.as_secs()
            );
        }
    }

    /// One step of background work: pages that are dirty for long or too many, sizes and times
    /// that are ahead of their inodes, in-place writes that nobody flushed. The first error
    /// is returned after everything was attempted; failures are latched on their files.
    pub(crate) fn tick(&self) -> Result<(), Error> {
        if self.store.read_only() {
            return Ok(());
        }
        self.look_at_clock();
        self.follow_hints();
        self.end_idle_pieces();
        let now_ns = self.now_ns();
        let mut outcome = Ok(());
        let mut note = |done: Result<(), Error>| {
            if let (Err(error), true) = (done, outcome.is_ok()) {
                outcome = Err(error);
            }
        };
        match self.cleaning.is_running() {
            true => self.cleaning.note_dirty(),
            false if self.options.pre_clean => self.clean_now(),
            false => {}
        }
        let unwritten = self.unwritten();
        let crowded = |share: usize| unwritten > self.pages.capacity() / share;
        let (mut due, mut old, mut hopeless) = (Vec::new(), Vec::new(), Vec::new());
        self.table.each_state(|state| {
            let since = self.pages.dirty_since(state.key);
            if self.write_back_due(state, since, &crowded, now_ns) {
                match self.is_swept(state) {
                    true => self.cleaning.sweep(state.key, now_ns),
                    false => due.push(state.ino()),
                }
            }
            if self.times_old(state, now_ns) {
                old.push(state.ino());
            }
            if state.meta.lock().failed_for_long(now_ns) && !self.table.is_open(state.ino()) {
                hopeless.push(Counted::clone(state));
            }
        });
        due.extend(self.take_logged());
        due.extend(self.cleaning.take_files());
        due.sort_unstable();
        due.dedup();
        self.write_back_each(&due, &|state| self.flush_file(state), &mut note);
        hopeless.iter().for_each(|state| self.settle_failed(state));
        note(self.persist_old_times(&old, now_ns));
        let unflushed: Vec<Ino> = self.unflushed.lock().keys().copied().collect();
        let closed = unflushed.iter().any(|ino| !self.table.is_open(*ino));
        if closed || self.flush_due(!unflushed.is_empty(), now_ns) {
            note(self.flush_devices());
        }
        outcome
    }

    /// Writes back files, small ones in groups: neighbours, if they come in the order of their numbers. `alone` is for
    /// those that do not go with others, and those that had nothing to write.
    fn write_back_each(
        &self,
        inos: &[Ino],
        alone: &dyn Fn(&Counted<FileState>) -> Result<(), Error>,
        note: &mut dyn FnMut(Result<(), Error>),
    ) {
        let mut room = Room::new();
        for inos in inos.chunks(TOGETHER) {
            self.write_back_some(inos, &mut room, alone, note);
        }
    }

    fn write_back_some(
        &self,
        inos: &[Ino],
        room: &mut Room,
        alone: &dyn Fn(&Counted<FileState>) -> Result<(), Error>,
        note: &mut dyn FnMut(Result<(), Error>),
    ) {
        let mut held = Vec::with_capacity(inos.len());
        for &ino in inos {
            // Else it is deleted meanwhile, its pages with it; or nothing was left to write.
            held.extend(self.use_active(ino));
        }
        for state in self.flush_together(&held, room) {
            note(alone(state));
        }
    }

    /// Whether what open files wrote in place has been in the devices' caches for as long as
    /// write-back may wait. `unflushed`: there is any.
    fn flush_due(&self, unflushed: bool, now_ns: u64) -> bool {
        let age = ns_of(self.options.write_back_age);
        let mut first_seen = self.unflushed_since_ns.lock();
        let since = match unflushed {
            true => *first_seen.get_or_insert(now_ns),
            false => now_ns,
        };
        let due = unflushed && now_ns.saturating_sub(since) >= age;
        if due || !unflushed {
            *first_seen = None;
        }
        due
    }

    fn write_back_due(
        &self,
        state: &Counted<FileState>,
        dirty_since: Option<u64>,
        crowded: &dyn Fn(usize) -> bool,
        now_ns: u64,
    ) -> bool {
        let age = ns_of(self.options.write_back_age);
        let settle = ns_of(self.options.settle_age);
        let (replaced, resized, ahead_since) = {
            let meta = state.meta.lock();
            if meta.failed_lately(now_ns) {
                return false;
            }
            let resized = meta.size != meta.logged_size;
            (meta.replaced, resized, meta.ahead_since_ns)
        };
        let old = |since: u64, age: u64| now_ns.saturating_sub(since) >= age;
        if replaced && self.table.is_open(state.ino()) && !crowded(REPLACED_SHARE) {
            // The new content is still being written: log it in one piece if it ends soon.
            return ahead_since.is_some_and(|since| old(since, settle));
        }
        match dirty_since {
            Some(since) => crowded(CROWDED_SHARE) || old(since, age),
            None => (resized || replaced) && ahead_since.is_some_and(|since| old(since, age)),
        }
    }

    /// How often the background thread looks: so often that times are durable after the interval in which they are to
    /// be persisted and that of commits, as far as a timer is good for that.
    fn period(&self) -> Duration {
        let commits = self.store.options().commit_interval;
        let bound = self.options.mtime_persist.saturating_add(commits);
        bound.clamp(TICK_MIN, TICK)
    }

    /// Logs the times of files that would be due before the next look, though nothing but overwrites happened, unless these
    /// have been logged since they were looked at.
    fn persist_old_times(&self, old: &[Ino], now_ns: u64) -> Result<(), Error> {
        let mut outcome = Ok(());
        let mut any = false;
        for &ino in old {
            let Some(state) = self.use_active(ino) else {
                continue;
            };
            // Who changes the size, or cuts the file, has its time before that. He is looked after the next time.
            let Ok(Some(_shared)) = state.try_shared_beside_pieces() else {
                continue;
            };
            if self.times_old(&state, now_ns) {
                any = true;
                outcome = outcome.and(self.persist_times_alone(&state));
            }
        }
        if any && self.options.mtime_persist < self.period() {
            // The interval is over by now, and the commit's must not be added to what the look came late.
            self.store.commit_through(self.store.epoch())?;
        }
        outcome
    }

    /// Times of what is not in the inode yet go with that: the old content, or size, would be under a time that it never had.
    fn times_old(&self, state: &Counted<FileState>, now_ns: u64) -> bool {
        let meta = state.meta.lock();
        if meta.content_is_ahead() {
            return false;
        }
        let content = meta.times.mtime.is_some() || meta.times.ctime.is_some();
        if content && planted(Canary::TimesNotPersisted) {
            return false;
        }
        let age = match content {
            true => self.options.mtime_persist.saturating_sub(self.period()),
            false => self.options.settle_age,
        };
        let since = meta.ahead_since_ns.unwrap_or(now_ns);
        !meta.dead && meta.times.any() && now_ns.saturating_sub(since) >= ns_of(age)
    }

    /// A handle goes, and the use that it was. In one step, where nothing is to be done for what it leaves behind.
    pub(super) fn close(&self, state: &mut Counted<FileState>, usage: Usage, wrote: bool) {
        let (ino, key) = (state.ino(), state.key);
        let may = |meta: &Meta| meta.failure.count == 0 && !self.closing_logs(key, meta, wrote);
        if let Some(last) = self.table.leave_if(state, usage, &self.pages, may) {
            if last {
                self.last_reference_gone(ino);
            }
            return;
        }
        self.closing(state, wrote);
        if self.table.leave(state, usage, &self.pages) {
            self.last_reference_gone(ino);
        }
        if state.meta.lock().failure.count > 0 {
            self.settle_failed(state);
        }
    }

    /// Whether times are to be logged before a handle goes, as nothing else will carry them.
    fn closing_logs(&self, key: FileKey, meta: &Meta, wrote: bool) -> bool {
        let times = &meta.times;
        let content = wrote && (times.mtime.is_some() || times.ctime.is_some());
        let crowded = times.any() && self.table.len() > STATES_MANY;
        (content || crowded) && !meta.content_is_ahead() && !self.pages.is_dirty(key)
    }

    /// A handle goes. Times are logged if nothing else will carry them.
    fn closing(&self, state: &Counted<FileState>, wrote: bool) {
        if !self.closing_logs(state.key, &state.meta.lock(), wrote) {
            return;
        }
        let linked = state
            .node
            .read()
            .is_ok_and(|content| content.inode().is_ok_and(|inode| inode.nlink > 0));
        if linked
            && !self.store.read_only()
            && let Err(error) = self.persist_times_alone(state)
        {
            tracing::warn!("times of inode {} are not logged: {error}", state.ino());
        }
    }

    /// A handle of a file has gone that could not be written, or the background has tried it for long. If nobody has it open, tries once more, and then drops what
    /// cannot be written, so that the file is what its inode says: the failure stays latched, and is reported by the next
    /// handle's fsync if by nobody before. What only was to go home from the inode is there still: then nothing is lost. What a new handle writes is not dropped. Once the store has failed nothing is: nothing can be written any more, and
    /// all that was done can be read until the unmount.
    pub(super) fn settle_failed(&self, mine: &Counted<FileState>) {
        let ino = mine.ino();
        // Deleted meanwhile, its pages with it; or it is as its inode says.
        let Some(state) = self.use_active(ino) else {
            return;
        };
        if state.key != mine.key {
            return;
        }
        let _exclusive = self.lock_alone(&state);
        let may_drop = !self.table.is_open(ino) && self.store.failed().is_none();
        // To try may be what makes the store fail.
        if !may_drop || self.flush_locked(&state).is_ok() || self.store.failed().is_some() {
            return;
        }
        // What cannot be told is taken for lost.
        let loses = !self.is_all_logged(&state).unwrap_or(false);
        if loses {
            let mut meta = state.meta.lock();
            let why = meta.failure.why.clone();
            self.lost(&state, &mut meta, &why);
        }
        let size = state.size();
        self.drop_pages(&state, 0..size.div_ceil(PAGE));
        {
            let mut meta = state.meta.lock();
            meta.size = meta.logged_size;
            meta.end_replacement();
            meta.fails_no_more();
        }
        if !loses {
            self.fails_no_more(&state);
            return;
        }
        // Whoever looked at what is given up sees by its times that it is gone.
        self.note_ahead(&state);
        if let Some(left_out) = self.told.given_up.may_say(self.now_ns()) {
            tracing::error!(left_out, "unwritten data of inode {ino} is given up");
        }
        self.is_gone(ino);
    }

    /// Starts the thread that writes back. It has this only for the length of a look: who drops the file system without an end has the
    /// devices back when none is under way, and no other follows.
    pub(crate) fn start(self: &std::sync::Arc<Self>) -> Result<(), Error> {
        let files = std::sync::Arc::downgrade(self);
        let (background, period) = (Arc::clone(&self.background), self.period());
        let body = move || {
            let _unhurried = device::Unhurried::begin();
            while background.rest(period) {
                let Some(files) = files.upgrade() else {
                    return;
                };
                if let Err(error) = files.tick() {
                    // Latched where it belongs; whoever syncs is told.
                    tracing::warn!("background write-back: {error}");
                }
            }
        };
        let started = base::thread::spawn("sheaf-write-back", body);
        let handle = started.map_err(|e| engine::Error::Thread(std::sync::Arc::new(e)))?;
        self.threads.lock().push(handle);
        Ok(())
    }

    /// Stops the background threads and waits for them.
    pub(crate) fn stop(&self) {
        self.background.stop();
        self.ahead.stop();
        self.cleaning.close();
        self.pages.stop_keeping();
        let handles = std::mem::take(&mut *self.threads.lock());
        for handle in handles {
            if handle.join().is_err() {
                self.store.latch("a background thread panicked");
            }
        }
    }
}

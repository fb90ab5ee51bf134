//! Files in use: their volatile size and times, who refers to them, what went wrong.
//!
//! A [`FileState`] exists while a file is open, has something that is not logged yet, or is
//! being worked on. Invariants:
//!
//! 1. There is at most one state per inode, in the table. It is made of the inode as it is then, under the inode's shared lock, or by the operation that makes
//!    the inode, before that is unlocked. So who has the inode's exclusive lock finds the state, or nobody has one before the lock goes.
//! 2. `Meta::size` is the size that programs see. It changes only under the exclusive I/O
//!    lock. `Meta::logged_size` is the size in the inode; they differ only while something is
//!    left to write back.
//! 3. Bytes of a cached page beyond `Meta::size` are zero.
//! 4. `Meta::promised` is the number of blocks that the store has promised this file; it covers
//!    every dirty page that has none of its own.
//! 5. `Meta::changed` is at least the epoch of the inode's last logged change other than of
//!    times alone (R7), for everybody who has seen that change, also by a name of the file's: it is noted before the operation
//!    unlocks anything. What an operation changes of the content under the exclusive I/O lock, for which every sync waits, may be noted before that is given back.
//! 6. A state leaves the [table](super::table) only when nobody uses it, nothing in it is ahead of the inode
//!    and no page of the file is dirty: write-back finds dirty pages through their states.
//! 7. What is seen without the lock of [`Meta`] agrees with it: see [`meta`](super::meta).

use super::Files;
use super::advice::Advice;
use super::gate::Stores;
use super::meta::{Meta, MetaLock, NewTimes};
use super::present;
use super::runs::{ReadRun, ReadRuns, WriteRuns};
use super::stream::Seated;
use super::table::{StateUse, Usage};
use super::write::is_inside;
use crate::content::{AttrChange, FsNode};
use crate::times::Stamp;
use crate::{Error, Ino};
use base::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use base::clock::Timestamp;
use base::counted::Counted;
use base::sync::{Arc, Mutex, ReadGuard, RwLock, WriteGuard, rank};
use base::thread::current_cpu;
use engine::cache::{FileKey, PageCache};
use engine::sum::Padded;
use engine::{Epoch, Node};

impl NewTimes {
    /// A change of attributes with these times.
    pub(super) fn on(self, mut attrs: AttrChange) -> AttrChange {
        attrs.atime = self.atime.or(attrs.atime);
        attrs.mtime = self.mtime.or(attrs.mtime);
        attrs.ctime = self.ctime.or(attrs.ctime);
        attrs
    }
}

impl Meta {
    /// Nothing is left of a file that nobody uses: its state may go.
    pub fn is_idle(&self, key: FileKey, pages: &PageCache) -> bool {
        let told = self.failure.count == 0 || self.failure.reported;
        let ahead = self.is_ahead() || self.promised > 0 || self.in_place.unflushed();
        self.dead || (!ahead && told && !pages.is_dirty(key))
    }
}

/// A file in use.
#[derive(Debug)]
pub(crate) struct FileState {
    pub key: FileKey,
    pub node: Node<FsNode>,
    /// Shared for reading, write-back, and writes over what the file has; exclusive for whatever changes size or mapping.
    pub(super) io: RwLock<(), u64>,
    /// One write-back at a time among those that hold `io` shared. The number of the newest of all of the file that went well.
    pub(super) flusher: Mutex<u32>,
    /// Write-backs of all of the file that have begun, one after the other: the number of the newest, which may wrap.
    pub(super) flushes: AtomicU32,
    pub(super) meta: MetaLock,
    /// Writes of several pages, and past the cache, beside readers: under the shared lock, or in flight.
    pub(super) stores: Stores,
    /// How often somebody has held `io` exclusively.
    exclusives: AtomicU64,
    /// Whether a stream's pieces have to end before somebody else has `io`.
    pub(super) behind: Seated,
    /// Handles for reading and writing; changed under the lock of the table's shard.
    pub(super) mappable: AtomicU32,
}

impl FileState {
    pub(super) fn new(key: FileKey, node: Node<FsNode>) -> Self {
        let nid = key.nid.0;
        FileState {
            key,
            node,
            io: RwLock::with_header(rank::FILE_IO, nid, ()),
            flusher: Mutex::keyed(rank::FILE_FLUSH, nid, 0),
            flushes: AtomicU32::new(0),
            meta: MetaLock::new(key.nid),
            stores: Stores::new(),
            exclusives: AtomicU64::new(0),
            behind: Seated::default(),
            mappable: AtomicU32::new(0),
        }
    }

    pub fn ino(&self) -> Ino {
        self.key.nid
    }

    /// As [`Files::lock_shared`], if nothing has to be waited for.
    pub(super) fn try_lock_shared(&self) -> Result<Option<ReadGuard<'_, ()>>, Error> {
        let guard = self.try_shared();
        self.check_alive()?;
        Ok(guard)
    }

    /// The same, also of a file that is being deleted.
    pub(super) fn try_shared(&self) -> Option<ReadGuard<'_, ()>> {
        self.io.try_read().filter(|_| self.behind.seat().is_none())
    }

    /// The same beside pieces of a stream, for who only cleans pages.
    pub(super) fn try_shared_beside_pieces(&self) -> Result<Option<ReadGuard<'_, ()>>, Error> {
        let guard = self.io.try_read();
        self.check_alive()?;
        Ok(guard)
    }

    /// The I/O lock, exclusive, beside writes in flight; for [`Files::lock_alone`] only, the one way to it (see
    /// [`flight`](super::flight), 2).
    pub(super) fn lock_beside_flights(&self) -> WriteGuard<'_, ()> {
        let guard = self.io.write();
        self.exclusives.fetch_add(1, Ordering::SeqCst);
        guard
    }

    /// How often somebody held the I/O lock exclusively. Who asks under the shared one, and again with none, knows by the same
    /// answer that nobody has in between.
    pub(super) fn exclusives(&self) -> u64 {
        self.exclusives.load(Ordering::SeqCst)
    }

    pub(super) fn check_alive(&self) -> Result<(), Error> {
        match self.meta.is_dead() {
            true => Err(Error::Stale(self.ino())),
            false => Ok(()),
        }
    }

    /// The size that programs see; it stays while the caller holds the I/O lock.
    pub(super) fn size(&self) -> u64 {
        self.meta.size()
    }

    /// Failures that whoever opens the file now does not report.
    pub(super) fn forgiven(&self) -> u64 {
        self.meta.lock().forgiven()
    }

    /// Reports a failure beyond those forgiven.
    pub(super) fn check_failure(&self, forgiven: u64) -> Result<(), Error> {
        let mut meta = self.meta.lock();
        if meta.failure.count > forgiven {
            meta.failure.reported = true;
            return Err(Error::WriteFailed {
                ino: self.ino(),
                why: meta.failure.why.clone(),
            });
        }
        Ok(())
    }
}

/// What was written and is lost, of all files. Invariant: a loss is noted before anything else
/// hides it: before its pages are dropped, and before its file leaves the list of those to flush.
#[derive(Debug, Default)]
pub(super) struct Losses {
    count: u64,
    /// Losses before the last sync that failed because of one.
    told: u64,
    /// The newest one.
    ino: Ino,
    why: String,
}

impl Losses {
    pub fn note(&mut self, ino: Ino, why: &str) {
        self.count += 1;
        (self.ino, self.why) = (ino, why.to_owned());
    }

    /// Losses that a sync that begins now does not report.
    pub fn told(&self) -> u64 {
        self.told
    }

    /// Reports a loss beyond those that had been told when the sync began.
    pub fn check(&mut self, told: u64) -> Result<(), Error> {
        if self.count <= told {
            return Ok(());
        }
        self.told = self.count;
        Err(Error::WriteFailed {
            ino: self.ino,
            why: self.why.clone(),
        })
    }
}

/// What `stat` must show in place of the inode's fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Volatile {
    pub size: u64,
    /// 4 KiB blocks to come.
    pub promised: u64,
    pub times: NewTimes,
}

/// A file whose open is counted, and that must be opened or the count stays.
#[must_use]
#[derive(Debug)]
pub(crate) struct Entered {
    state: Counted<FileState>,
    flags: i32,
    forgiven: u64,
}

/// What an open file keeps [`Files`] alive by: a count of references for each core.
#[derive(Debug)]
pub(crate) struct Owners(Box<[Owner]>);

/// Padded, so that no two counts are on one line.
type Owner = Arc<Padded<std::sync::Arc<Files>>>;

impl Owners {
    pub fn new(files: &std::sync::Arc<Files>) -> Owners {
        let owner = |_| Arc::new(Padded(std::sync::Arc::clone(files)));
        Owners((0..files.store.options().shards).map(owner).collect())
    }

    fn mine(&self) -> &Owner {
        &self.0[current_cpu() % self.0.len()]
    }
}

/// An open file. Dropping the last handle releases it: an unlinked file is deleted then.
#[derive(Debug)]
pub struct OpenFile {
    files: Owner,
    pub(super) state: Counted<FileState>,
    flags: i32,
    /// Failures of the file that this handle does not report: they were reported before.
    forgiven: u64,
    pub(super) reads: ReadRuns,
    pub(super) writes: WriteRuns,
    /// See [`FileSystem::close_file`](crate::FileSystem::close_file).
    closed: AtomicBool,
    /// An [`Advice`](super::Advice), as a number.
    pub(super) advice: AtomicU8,
}

impl OpenFile {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub fn ino(&self) -> Ino {
        self.state.ino()
    }

    pub(crate) fn generation(&self) -> u64 {
        self.state.key.generation
    }

    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    /// A number that all handles of this file have, and no other file as long as one of them is open.
    pub(crate) fn identity(&self) -> usize {
        Counted::as_ptr(&self.state).addr()
    }

    /// Whether a write takes the file alone, because it makes it longer. A hint: others may make it longer first.
    pub(crate) fn is_longer_by(&self, offset: u64, len: usize) -> bool {
        self.has(libc::O_APPEND) || !is_inside(&self.state, offset, len)
    }

    /// Whether somebody has the file who may wait for devices: who writes it back, or has it alone. A hint, by locks that are tried; who only reads is not seen.
    pub(crate) fn is_taken(&self) -> bool {
        self.state.flusher.try_lock().is_none() || self.state.try_shared().is_none()
    }

    /// The `O_*` flags it was opened with.
    pub fn flags(&self) -> i32 {
        self.flags
    }

    pub(super) fn has(&self, flag: i32) -> bool {
        self.flags & flag == flag
    }

    pub(super) fn writable(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }

    /// Refuses reads through a handle that is for writing alone.
    pub(super) fn check_readable(&self) -> Result<(), Error> {
        match self.flags & libc::O_ACCMODE == libc::O_WRONLY {
            true => Err(Error::BadHandle),
            false => Ok(()),
        }
    }

    /// The failure that this handle must report, if any.
    pub(super) fn check_failure(&self) -> Result<(), Error> {
        self.state.check_failure(self.forgiven)
    }
}

impl Usage {
    /// Of a handle with these flags.
    fn with(flags: i32) -> Usage {
        Usage::Handle {
            both: flags & libc::O_ACCMODE == libc::O_RDWR,
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.files.end_ahead(self);
        self.files.readers.leave(self, &self.files.memory);
        self.files.end_pieces_of(&self.state);
        let (usage, wrote) = (Usage::with(self.flags), self.writable());
        self.files.close(&mut self.state, usage, wrote);
    }
}

impl Files {
    /// Opens a regular file. `O_TRUNC` is the caller's to do.
    pub(crate) fn open(
        &self,
        owners: &Owners,
        ino: Ino,
        flags: i32,
    ) -> Result<std::sync::Arc<OpenFile>, Error> {
        let usage = Usage::with(flags);
        let (mut state, is_new) = self.enter(ino, usage)?;
        // A failure nobody was told of yet is this handle's to report.
        let forgiven = match is_new {
            true => Some(0),
            false => {
                let meta = state.meta.lock();
                (!meta.dead).then(|| meta.forgiven())
            }
        };
        let Some(forgiven) = forgiven else {
            if self.table.leave(&mut state, usage, &self.pages) {
                self.last_reference_gone(ino);
            }
            return Err(Error::Stale(ino));
        };
        let entered = Entered {
            state,
            flags,
            forgiven,
        };
        Ok(Self::handle(owners, entered))
    }

    /// Counts an open of a file that a record of this epoch makes, of this size and shown with this stamp, before that is unlocked.
    pub(crate) fn enter_new(
        &self,
        node: Node<FsNode>,
        generation: u64,
        flags: i32,
        (epoch, size, shown): (Epoch, u64, Stamp),
    ) -> Option<Entered> {
        let fill = |meta: &mut Meta| {
            (meta.size, meta.logged_size) = (size, size);
            (meta.looked, meta.changed) = (shown, epoch);
        };
        let key = FileKey {
            nid: node.nid(),
            generation,
        };
        let usage = Usage::with(flags);
        let (state, is_new) = self.table.enter(key, usage, || node, fill)?;
        let forgiven = match is_new {
            true => 0,
            false => state.forgiven(),
        };
        Some(Entered {
            state,
            flags,
            forgiven,
        })
    }

    /// These files, if one of them is what the handle is of.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    #[inline]
    pub(crate) fn owning(&self, file: &OpenFile) -> Result<&Files, Error> {
        match std::ptr::eq(file.files(), self) {
            true => Ok(self),
            false => Err(Error::Invalid("a file of another file system")),
        }
    }

    /// Opens a file whose open is counted.
    pub(crate) fn handle(owners: &Owners, entered: Entered) -> std::sync::Arc<OpenFile> {
        let Entered {
            state,
            flags,
            forgiven,
        } = entered;
        std::sync::Arc::new(OpenFile {
            files: Arc::clone(owners.mine()),
            state,
            flags,
            forgiven,
            reads: ReadRuns::default(),
            writes: WriteRuns::default(),
            closed: AtomicBool::new(false),
            advice: AtomicU8::new(Advice::Normal as u8),
        })
    }

    /// Counts a use of a regular file and returns its state, and whether that was made of the inode now (invariant 1). One that was there says no more than
    /// what is known of the file: whether the inode is still there may be another thing by the time that the caller gets to it anyway.
    fn enter(&self, ino: Ino, usage: Usage) -> Result<(Counted<FileState>, bool), Error> {
        let node = self.store.get(ino)?;
        let content = node.read()?;
        // The number may be an old one, of what has been deleted.
        let FsNode::Inode(inode) = &*content else {
            return Err(Error::Stale(ino));
        };
        if inode.is_dir() {
            return Err(Error::IsADirectory);
        }
        if !inode.is_file() {
            return Err(Error::Invalid("not a regular file"));
        }
        let fill = |meta: &mut Meta| {
            (meta.size, meta.logged_size) = (inode.size, inode.size);
            meta.cutting = inode.seldom.pending_truncate.is_some();
            // Whoever looks from now on finds that there is a state, and looked at the inode before that.
            meta.looked = present::shown_before(|| inode.shown());
            // Whatever made the inode what it is belongs to this epoch or to an earlier one.
            meta.changed = self.store.epoch();
        };
        let key = FileKey {
            nid: ino,
            generation: inode.generation,
        };
        let entered = self.table.enter(key, usage, || node.clone(), fill);
        entered.ok_or(Error::Stale(ino))
    }

    /// The state of a file for the length of an operation.
    pub(super) fn use_file(&self, ino: Ino) -> Result<StateUse<'_>, Error> {
        let (state, _) = self.enter(ino, Usage::Operation)?;
        let held = StateUse::new(self, state);
        held.check_alive()?;
        Ok(held)
    }

    /// The state of a file only if it has one. `None` also when the file is deleted meanwhile:
    /// looking it up by its number, which another inode may have by now, would not do.
    pub(super) fn use_active(&self, ino: Ino) -> Option<StateUse<'_>> {
        let state = self.table.enter_present(ino)?;
        let held = StateUse::new(self, state);
        (!held.meta.is_dead()).then_some(held)
    }

    pub(crate) fn may_be_mapped(&self, ino: Ino) -> bool {
        self.table.has_both(ino)
    }

    /// Whether there may be more to show of a file than its inode has. No lock is taken.
    #[inline]
    pub(crate) fn may_be_volatile(&self, ino: Ino) -> bool {
        self.table.may_have(ino)
    }

    /// The same once `mark` has noted that the inode is shown, under its lock.
    #[inline]
    pub(crate) fn may_be_volatile_after(&self, ino: Ino, mark: impl FnOnce()) -> bool {
        self.table.may_have_after(ino, mark)
    }

    /// What `stat` shows in place of the inode's own; `None`: the inode says it all.
    pub(crate) fn volatile(&self, ino: Ino, generation: u64) -> Option<Volatile> {
        self.volatile_of(ino, generation, None)
    }

    /// The same for who shows it to somebody, who is shown `ctime` if nothing is newer.
    pub(crate) fn volatile_shown(
        &self,
        ino: Ino,
        generation: u64,
        ctime: Timestamp,
    ) -> Option<Volatile> {
        self.volatile_of(ino, generation, Some(ctime))
    }

    #[inline]
    fn volatile_of(&self, ino: Ino, generation: u64, shown: Option<Timestamp>) -> Option<Volatile> {
        let state = self.table.peek(ino)?;
        let mut meta = state.meta.lock();
        if state.key.generation != generation {
            return None;
        }
        if let Some(ctime) = shown {
            meta.look(ctime);
        }
        Some(Volatile {
            size: meta.size,
            promised: meta.promised + meta.pending,
            times: meta.times,
        })
    }

    /// The inode was changed by a record of this epoch; fsync must wait for that (R7).
    /// Called by whoever changes an inode outside this module, before it is unlocked (invariant 5). The state of a file that nobody
    /// uses goes if the change has superseded what was left in it.
    pub(crate) fn changed(&self, ino: Ino, epoch: Epoch) {
        if let Some(state) = self.use_active(ino) {
            let mut meta = state.meta.lock();
            meta.changed = meta.changed.max(epoch);
            meta.times_changed();
        }
    }

    /// An operation that has the inode locked is about to set its ctime, and `mtime`, `atime` or both. Newer times
    /// in memory are superseded by those. Returns an mtime that is not logged yet and that the record must carry; one of content that is ahead goes
    /// with that.
    #[must_use]
    pub(crate) fn times_set(&self, ino: Ino, atime: bool, mtime: bool) -> Option<Timestamp> {
        let state = self.table.peek(ino)?;
        let mut meta = state.meta.lock();
        if meta.dead {
            // The number may be another inode's by now.
            return None;
        }
        meta.times.sets += 1;
        if atime {
            meta.times.atime = None;
        }
        meta.times.ctime = None;
        meta.times_changed();
        let carried = match mtime || !meta.content_is_ahead() {
            true => meta.times.mtime.take().filter(|_| !mtime),
            false => None,
        };
        if !meta.is_ahead() {
            meta.ahead_since_ns = None;
        }
        carried
    }

    /// The same of an inode that is deleted: nothing need be carried.
    pub(crate) fn times_gone(&self, ino: Ino) {
        let _ = self.times_set(ino, true, true);
    }

    /// Kernel references; see [`FileTable`].
    pub(crate) fn is_referenced(&self, ino: Ino) -> bool {
        self.table.is_referenced(ino)
    }

    /// The same, or the file has a state: what is known of it beyond its inode, or somebody who works on it.
    pub(crate) fn is_active(&self, ino: Ino, generation: u64) -> bool {
        self.table.is_active(FileKey {
            nid: ino,
            generation,
        })
    }

    /// Nobody opens the inode from now on; false when somebody refers to it.
    pub(crate) fn condemn(&self, ino: Ino, generation: u64) -> bool {
        self.table.condemn(FileKey {
            nid: ino,
            generation,
        })
    }

    /// The inode is deleted.
    pub(crate) fn pardon(&self, ino: Ino, generation: u64) {
        self.table.pardon(FileKey {
            nid: ino,
            generation,
        });
    }

    pub(crate) fn ref_inode(&self, ino: Ino) {
        self.table.ref_inode(ino);
    }

    /// The same of what a look-up has found; false: it is being deleted.
    pub(crate) fn ref_found(&self, ino: Ino, generation: u64) -> bool {
        self.table.ref_found(FileKey {
            nid: ino,
            generation,
        })
    }

    /// True when nobody refers to the inode any more: an unlinked one is to be deleted now.
    pub(crate) fn forget(&self, ino: Ino, count: u64) -> bool {
        self.table.forget(ino, count)
    }
}

impl OpenFile {
    /// See [`ReadRuns::go_on`].
    pub(super) fn go_on_reading(
        &self,
        offset: u64,
        len: u64,
        most: u64,
    ) -> Option<(&ReadRun, u64)> {
        let all = self.is_advised(Advice::Sequential);
        self.reads.go_on(offset, len, most, all)
    }

    /// Tells it from other handles that are open.
    pub(super) fn id(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

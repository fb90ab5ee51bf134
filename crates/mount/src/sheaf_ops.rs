//! The mount of a [`FileSystem`]: kernel requests as its calls.
//!
//! Owns the open-file table and, through [`FileSystem::ref_inode`], the kernel's references.
//! Invariants:
//!
//! 1. Every entry answered to the kernel holds one reference of its inode, taken before the
//!    answer is sent and given back by FORGET: an inode the kernel knows is never reused, and one that is being deleted is not found any more.
//! 2. A node id is the inode's number; nothing is kept per inode here, so that neither descriptors nor memory bound the number of files, and file handles stay good across
//!    mounts. They name a use of that number by [`Attr::handle_generation`], which no crash hands out again.
//!
//! # How long the kernel may keep what it learned
//!
//! Every change goes through the one kernel that caches it, and that kernel itself drops
//! what its own requests change: size, times and blocks after a write, truncate, fallocate or
//! copy; everything about a directory whose entries change; link count and ctime after link,
//! unlink, rename and setxattr. But attributes that were answered before a change may still be on their way to it, and it has to
//! know them as old when they arrive. It does where it counts the change as a version of the attributes: SETATTR and LINK, whose answers bring new
//! ones, a write or copy, and a name that goes. Where it only marks what it has as out of date, such an answer takes that
//! mark away. Hence
//!
//! 3. Before the answer to a change of extended attributes (an access list changes the mode), of a directory's entries, to a rename and to a fallocate that keeps
//!    the size, and after the change itself, the kernel is told to drop the attributes of the directory, of what moved and of the file
//!    ([`Notifier::drop_attributes`]), which counts as a version. So answers from before the change are old to it, and those asked for later show the change.
//!
//! That takes no lock that the waiting request holds, nor ends the life of an inode: its caller refers to it. It is done whether anybody
//! looks or not: before it makes a name, the kernel itself asks for the attributes of the directory, which it has dropped after the last one.
//!
//! Names, missing names and attributes therefore stay valid for an hour, with these exceptions:
//!
//! - the number of blocks of a file is an estimate until its data is written back, some
//!   time later (`write_back`) and unseen by the kernel: what a file that changed within the last minute, or twice that time,
//!   shows stays valid for another minute only;
//! - a change of content clears set-user-ID and set-group-ID here, and the kernel does not notice: the
//!   attributes of such files are never kept.
//!
//! Two races are left, which change times alone: a stat beside a read may keep the access time from before it, and one beside the write-back of a
//! mapping the time of change. Who drops attributes before the answer to write-back may be the last to refer to the inode, and would wait for itself.
//! Of data that is given up since devices do not take it the kernel is told (`failed.rs`), but soon after only.
//!
//! # Opening and closing
//!
//! There is nothing to report to close(2): failed write-back is reported by fsync, as with other local file systems. Only of handles that can
//! read and write the kernel tells when a descriptor is closed, for their atomic writes ([`crate::atomic`]); for others close(2) is
//! spared a round trip.
//! `O_DIRECT` needs no `FOPEN_DIRECT_IO`: the kernel then sends unaltered requests and keeps
//! its cached pages coherent with them, but for asynchronous writes (`direct.rs`). Cached pages survive every open: the kernel drops them without regard to a write of
//! them that is on its way, and what is read meanwhile stays, old as it is. So an access time that is due is renewed when a file is opened for
//! reading, whether the reads reach this side or not.

mod direct;
mod extended;
mod failed;
mod mapped;
mod opened;
mod set_id;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base::clock::{Clock, now_ns};
use base::sync::{Mutex, rank};
use fs::{Attr, Caller, FileSystem, Ino};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::init;
use crate::atomic::{self, AtomicWrites, Pending};
use crate::dirent::DirectoryReply;
use crate::handles::Handles;
use crate::live::{IOC_CHECKPOINT, IOC_METRICS, MetricsMessage};
use crate::metrics::{self, FuseWay, exposition};
use crate::notify::{Notifier, Pages};
use crate::ops::{
    Attributes, Context, CopySide, Entry, Errno, NewNode, NodeId, Opened, Operations, Result,
    SetAttributes, SetTime, Span, Statistics,
};
use crate::options::MountOptions;
use crate::outcome::{IOC_OUTCOME, Outcome};
use crate::scrub::{IOC_SCRUB, ScrubMessage};
use crate::signals::Closing;
use base::limited::Limited;
use direct::DirectFiles;
use opened::{Handle, KERNEL_FLAGS};

const LONG: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_secs(60);
/// The data of the last change is written back after as long as that takes at most, twice, or this, if it is longer.
const SETTLED_AFTER: Duration = Duration::from_secs(60);

/// How often a look-up is tried again because the inode went meanwhile.
const FOUND_ATTEMPTS: u32 = 16;

/// Bytes that one request copies at most: its caller cannot be interrupted meanwhile, and
/// asks again for the rest.
const COPY_MAX: u64 = 64 << 20;

/// Serves a [`FileSystem`].
pub struct SheafOps {
    fs: Arc<FileSystem>,
    handles: Handles<Handle>,
    direct: DirectFiles,
    atomic: AtomicWrites,
    clock: Clock,
    /// In seconds; see [`SETTLED_AFTER`].
    settled_after: i64,
    /// Changes of content and attributes are on the devices before they are answered.
    sync: bool,
    /// Changes of directories are committed before they are answered.
    dirsync: bool,
    /// Extended attributes are refused as unknown: see [`extended`].
    no_xattr: bool,
    way: FuseWay,
    notifier: OnceLock<Notifier>,
    /// Kept for the file system, which tells it.
    gone: OnceLock<Arc<fs::Gone>>,
    outcome: Option<Arc<Outcome>>,
    closing: Closing,
    closed: Closed,
}

/// Why closing the file system failed, for whoever serves it: the kernel, which asks for it,
/// takes no answer.
#[derive(Clone, Debug)]
pub struct Closed(Arc<Mutex<Option<fs::Error>>>);

impl Closed {
    pub fn take(&self) -> Option<fs::Error> {
        self.0.lock().take()
    }
}

/// Of requests, as of who reads again and again what is damaged.
static FAILURES: Limited = Limited::new();

fn errno(error: fs::Error) -> Errno {
    let errno = error.errno();
    if errno == libc::EIO
        && let Some(left_out) = FAILURES.may_say(now_ns())
    {
        tracing::error!(%error, left_out, "a request failed");
    }
    Errno(errno)
}

/// The kernel has checked permissions, capabilities and group membership, and says so where
/// set-id bits have to go; of whom they go, [`SheafOps::who_loses`].
fn caller(context: &Context, umask: u32) -> Caller {
    Caller {
        uid: context.uid,
        gid: context.gid,
        umask,
        privileged: true,
        in_group: true,
        keeps_attributes: true,
    }
}

fn ino(node: NodeId) -> Ino {
    // A newtype known here by an alias, which has no constructor.
    Ino { 0: node }
}

type FsResult<T> = std::result::Result<T, fs::Error>;

fn set_time(time: SetTime) -> fs::SetTime {
    match time {
        SetTime::Now => fs::SetTime::Now,
        SetTime::At(at) => fs::SetTime::At(at),
    }
}

impl SheafOps {
    pub fn new(fs: Arc<FileSystem>, options: &MountOptions) -> Self {
        let settled = SETTLED_AFTER.max(fs.write_back_age().saturating_mul(2));
        SheafOps {
            fs,
            settled_after: i64::try_from(settled.as_secs()).unwrap_or(i64::MAX),
            handles: Handles::new(),
            direct: DirectFiles::default(),
            atomic: AtomicWrites::default(),
            way: FuseWay::default(),
            clock: Clock::real(),
            sync: options.sync,
            dirsync: options.dirsync || options.sync,
            no_xattr: options.no_xattr,
            notifier: OnceLock::new(),
            gone: OnceLock::new(),
            outcome: None,
            closing: Closing::default(),
            closed: Closed(Arc::new(Mutex::new(rank::LEAF, None))),
        }
    }

    /// Tells whoever asks where the daemon's outcome will be heard.
    pub fn with_outcome(mut self, outcome: Option<Arc<Outcome>>) -> Self {
        self.outcome = outcome;
        self
    }

    /// Tells others how requests come.
    pub fn with_way(mut self, way: FuseWay) -> Self {
        self.way = way;
        self
    }

    /// Told when the kernel asks for the file system to be closed.
    pub fn closing(&self) -> Closing {
        self.closing.clone()
    }

    /// How closing the file system went, once the mount has ended.
    pub fn closed(&self) -> Closed {
        self.closed.clone()
    }

    #[cfg(test)]
    pub(crate) fn atomic(&self) -> &AtomicWrites {
        &self.atomic
    }

    /// How long attributes stay valid: see the module's description.
    fn valid(&self, attr: &Attr) -> Duration {
        if attr.mode & libc::S_IFMT != libc::S_IFREG {
            return LONG;
        }
        if attr.mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
            return Duration::ZERO;
        }
        if attr.ctime.sec().saturating_add(self.settled_after) > self.clock.now().sec() {
            return SHORT;
        }
        LONG
    }

    fn attributes(&self, attr: &Attr) -> Attributes {
        self.attributes_beside(attr, self.atomic.of(attr.ino.0))
    }

    /// Those of a file that has this atomic write, or had it when the answer to a SETATTR or LINK began: the kernel takes the size of such an answer whatever has happened
    /// since, and a commit may have made the file longer. What it has staged meanwhile, it has staged before: writes wait for the lock under which the kernel asks.
    pub(crate) fn attributes_beside(
        &self,
        attr: &Attr,
        pending: Option<Arc<Pending>>,
    ) -> Attributes {
        // Asked for again with what is staged: of one moment.
        let looked = pending.as_ref().map(|pending| {
            let now = pending.attributes(&self.fs, attr.ino);
            now.unwrap_or((*attr, attr.size))
        });
        let (attr, size) = match &looked {
            Some((attr, size)) => (attr, *size),
            None => (attr, attr.size),
        };
        if looked.is_none() {
            self.atomic.tells(attr.ino.0);
        }
        Attributes {
            ino: attr.ino.0,
            size,
            blocks: attr.blocks,
            atime: attr.atime,
            mtime: attr.mtime,
            ctime: attr.ctime,
            btime: attr.btime,
            mode: attr.mode,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            blksize: 4096,
            valid: match looked {
                Some(_) => Duration::ZERO,
                None => self.valid(attr),
            },
        }
    }

    fn entry(&self, attr: &Attr) -> Entry {
        Entry {
            node: attr.ino.0,
            generation: attr.handle_generation().into(),
            attributes: self.attributes(attr),
            valid: LONG,
        }
    }

    /// The entry of an inode that was just made under a name: the kernel holds the
    /// directory's lock, so it cannot vanish before the reference is taken.
    fn made(&self, parent: NodeId, attr: FsResult<Attr>) -> Result<Entry> {
        let attr = attr.map_err(errno)?;
        self.fs.ref_inode(attr.ino);
        if let Err(error) = self.directory_changed(parent) {
            self.fs.forget(attr.ino, 1);
            return Err(error);
        }
        Ok(self.entry(&attr))
    }

    /// Takes a reference on the inode that `find` gives, and makes sure that it still was
    /// that inode then, and stays it: the kernel revalidates names without any lock, and asks for numbers whose inodes are being deleted.
    fn found(&self, find: impl Fn() -> FsResult<Attr>) -> FsResult<Entry> {
        let mut attempts = 0;
        loop {
            let attr = find()?;
            let mut failed = fs::Error::Stale(attr.ino);
            if self.fs.ref_found(&attr) {
                match self.fs.getattr(attr.ino) {
                    Ok(now) if now.generation == attr.generation => return Ok(self.entry(&now)),
                    Ok(_) => {}
                    Err(error) => failed = error,
                }
                self.fs.forget(attr.ino, 1);
            }
            attempts += 1;
            // Whoever loses this race so often meets damage, or a deletion that goes on, not a race.
            if attempts == FOUND_ATTEMPTS {
                return Err(failed);
            }
        }
    }

    /// Attributes of a node that were answered before now are old to the kernel: invariant 3.
    fn attributes_changed(&self, node: NodeId) {
        if let Some(notifier) = self.notifier.get() {
            notifier.drop_attributes(node);
        }
    }

    /// A name of a directory was made, changed or removed.
    fn directory_changed(&self, directory: NodeId) -> Result<()> {
        // Whatever comes of the rest: the kernel drops nothing by itself where it reads of an error.
        self.attributes_changed(directory);
        match self.dirsync {
            true => self.make_change_durable(directory),
            false => Ok(()),
        }
    }

    /// Attributes of a node were changed, or its size.
    fn node_changed(&self, node: NodeId) -> Result<()> {
        match self.sync {
            true => self.make_change_durable(node),
            false => Ok(()),
        }
    }

    /// With the content: a cut to nothing may be known in memory alone, where a commit does not find it.
    fn make_change_durable(&self, node: NodeId) -> Result<()> {
        let synced = self.fs.fsync_inode(ino(node), false).map_err(errno);
        // The change is made: who reads that there was no space would think that it is not.
        synced.map_err(|error| match error {
            Errno::NOSPC => Errno::IO,
            error => error,
        })
    }
}

impl Operations for SheafOps {
    fn init(&self, negotiated: u64, notifier: Notifier) {
        self.way.agreed(negotiated & init::OVER_IO_URING != 0);
        self.direct.agreed(negotiated & init::ASYNC_DIO != 0);
        self.notifier.get_or_init(|| notifier.clone());
        self.forgets_what_goes(&notifier);
        self.atomic.init(notifier);
    }

    fn destroy(&self) {
        // The kernel gives its claim on the first device up after this: nothing may be
        // written later. The caller's own close then finds all done.
        self.closing.begin();
        self.atomic.clear();
        self.handles.clear();
        if let Err(error) = self.fs.close() {
            tracing::error!(%error, "closing the file system failed");
            self.closed.0.lock().get_or_insert(error);
        }
    }

    fn lookup(&self, _: &Context, parent: NodeId, name: &[u8]) -> Result<Entry> {
        if name == b"." {
            // A file handle is being opened: any number may come, of any kind of node. What has lost its last name and is
            // still used is in the kernel, which does not ask for it then; else it only was not told yet that the kernel forgot it.
            let named = || match self.fs.getattr(ino(parent)) {
                Ok(attr) if attr.nlink == 0 => Err(fs::Error::Stale(attr.ino)),
                asked => asked,
            };
            return self.found(named).map_err(|_| Errno(libc::ESTALE));
        }
        match self.found(|| self.fs.lookup(ino(parent), name)) {
            Err(fs::Error::NotFound) => Ok(Entry {
                node: 0,
                generation: 0,
                attributes: Attributes::default(),
                valid: LONG,
            }),
            result => result.map_err(errno),
        }
    }

    fn forget(&self, node: NodeId, lookups: u64) {
        self.atomic.forgets(node);
        self.fs.forget(ino(node), lookups);
    }

    fn getattr(&self, _: &Context, node: NodeId, _: Option<u64>) -> Result<Attributes> {
        let attr = self.fs.getattr(ino(node)).map_err(errno)?;
        Ok(self.attributes(&attr))
    }

    fn setattr(
        &self,
        context: &Context,
        node: NodeId,
        changes: &SetAttributes,
    ) -> Result<Attributes> {
        let pending = self.atomic.of(node);
        let staged = changes.size.and_then(|size| {
            let pending = pending.as_ref()?;
            pending.truncate(changes.handle, size)
        });
        let size = match staged {
            Some(staged) => {
                staged.map_err(errno)?;
                None
            }
            None => changes.size,
        };
        if size.is_some() {
            self.refuse_misled(node, changes.handle, pending.as_deref())?;
        }
        let set = fs::SetAttr {
            mode: changes.mode,
            uid: changes.uid,
            gid: changes.gid,
            size,
            atime: changes.atime.map(set_time),
            mtime: changes.mtime.map(set_time),
            // A kernel that keeps no writes back sends no ctime, which is this side's to set.
            kill_suidgid: changes.kill_suid_sgid,
        };
        let (who, set) = self.who_sets(context, node, changes, set)?;
        let setattr = || self.fs.setattr(&who, ino(node), &set).map_err(errno);
        let attr = match (size, changes.handle) {
            (None, _) => setattr(),
            (Some(_), None) => self.unstaged_change(node, None, setattr),
            (Some(_), Some(handle)) => {
                self.atomic.check(handle)?;
                self.unstaged_change(node, None, setattr)
            }
        };
        let changed = attr.and_then(|attr| self.node_changed(node).map(|()| attr));
        let attr = self.or_attributes_forgotten(node, size, changed)?;
        Ok(self.attributes_beside(&attr, pending.or_else(|| self.atomic.of(node))))
    }

    fn readlink(&self, _: &Context, node: NodeId) -> Result<Vec<u8>> {
        self.fs.readlink(ino(node)).map_err(errno)
    }

    fn symlink(&self, ctx: &Context, parent: NodeId, name: &[u8], target: &[u8]) -> Result<Entry> {
        let attr = self.fs.symlink(&caller(ctx, 0), ino(parent), name, target);
        self.made(parent, attr)
    }

    fn mknod(&self, ctx: &Context, parent: NodeId, name: &[u8], new: &NewNode) -> Result<Entry> {
        let who = caller(ctx, new.umask);
        let attr = self.fs.mknod(&who, ino(parent), name, new.mode, new.rdev);
        self.made(parent, attr)
    }

    fn mkdir(&self, ctx: &Context, parent: NodeId, name: &[u8], new: &NewNode) -> Result<Entry> {
        let who = caller(ctx, new.umask);
        let attr = self.fs.mkdir(&who, ino(parent), name, new.mode & 0o7777);
        self.made(parent, attr)
    }

    fn unlink(&self, ctx: &Context, parent: NodeId, name: &[u8]) -> Result<()> {
        self.fs
            .unlink(&caller(ctx, 0), ino(parent), name)
            .map_err(errno)?;
        self.directory_changed(parent)
    }

    fn rmdir(&self, ctx: &Context, parent: NodeId, name: &[u8]) -> Result<()> {
        self.fs
            .rmdir(&caller(ctx, 0), ino(parent), name)
            .map_err(errno)?;
        self.directory_changed(parent)
    }

    fn rename(
        &self,
        ctx: &Context,
        from: (NodeId, &[u8]),
        to: (NodeId, &[u8]),
        flags: u32,
    ) -> Result<()> {
        self.fs
            .rename(&caller(ctx, 0), ino(from.0), from.1, ino(to.0), to.1, flags)
            .map_err(errno)?;
        if from.0 != to.0 {
            self.attributes_changed(from.0);
        }
        // The kernel holds both directories' locks, so these are what moved. What was replaced lost a name, which it counts.
        let back = (flags & fs::RENAME_EXCHANGE != 0).then_some(from);
        for (directory, name) in [Some(to), back].into_iter().flatten() {
            // One that cannot be looked up keeps an old time of change at most.
            if let Ok(moved) = self.fs.lookup(ino(directory), name) {
                self.attributes_changed(moved.ino.0);
                let is_moved = from.0 != to.0 && moved.mode & libc::S_IFMT == libc::S_IFDIR;
                if let (true, Some(notifier)) = (is_moved, self.notifier.get()) {
                    // It has another parent, which the kernel's listing of it does not show.
                    notifier.drop_listing(moved.ino.0);
                }
            }
        }
        // One record holds both sides.
        self.directory_changed(to.0)
    }

    fn link(&self, ctx: &Context, node: NodeId, parent: NodeId, name: &[u8]) -> Result<Entry> {
        let pending = self.atomic.of(node);
        let attr = self.fs.link(&caller(ctx, 0), ino(node), ino(parent), name);
        let mut entry = self.made(parent, attr.clone())?;
        if let (Some(pending), Ok(attr)) = (pending, attr) {
            entry.attributes = self.attributes_beside(&attr, Some(pending));
        }
        Ok(entry)
    }

    fn open(&self, _: &Context, node: NodeId, flags: u32) -> Result<Opened> {
        let file = self
            .fs
            .open_file(ino(node), flags as i32 & !KERNEL_FLAGS)
            .map_err(errno)?;
        let reads = flags as i32 & libc::O_ACCMODE != libc::O_WRONLY;
        if reads && self.fs.note_read(&file).map_err(errno)? {
            self.attributes_changed(node);
        }
        Ok(self.opened(file, flags as i32))
    }

    fn create(
        &self,
        ctx: &Context,
        parent: NodeId,
        name: &[u8],
        new: &NewNode,
        flags: u32,
    ) -> Result<(Entry, Opened)> {
        let who = caller(ctx, new.umask);
        let flags = flags as i32;
        let created = (self.fs).create(&who, ino(parent), name, new.mode, flags & !KERNEL_FLAGS);
        self.created(parent, created, flags)
    }

    fn tmpfile(
        &self,
        ctx: &Context,
        parent: NodeId,
        new: &NewNode,
        flags: u32,
    ) -> Result<(Entry, Opened)> {
        let who = caller(ctx, new.umask);
        let flags = flags as i32 & !libc::O_TMPFILE;
        let created = (self.fs).tmpfile(&who, ino(parent), new.mode, flags & !KERNEL_FLAGS);
        self.created(parent, created, flags)
    }

    fn read(&self, _: &Context, node: NodeId, span: &Span, out: &mut [u8]) -> Result<usize> {
        let file = self.file(node, span.handle)?;
        if let Some(notifier) = self.notifier.get() {
            let bytes = span.offset..span.offset.saturating_add(out.len() as u64);
            notifier.reads(node, bytes, span.request);
        }
        if !span.past_page_cache {
            self.direct.cached(node);
        }
        let pending = self.atomic.of(node);
        let staged = pending.and_then(|pending| pending.read(&file, span, out));
        let read = staged.unwrap_or_else(|| self.fs.read(&file, span.offset, out));
        read.map_err(errno)
    }

    fn write(&self, context: &Context, node: NodeId, span: &Span, data: &[u8]) -> Result<usize> {
        let file = self.file(node, span.handle)?;
        self.content_changes(context, &file, span.kill_suid_sgid)?;
        if span.open_flags as i32 & libc::O_DIRECT == 0 {
            self.direct.cached(node);
        }
        let written = self.write_file(&file, span, data);
        // One that failed may have been made in part.
        self.written_past(node, span);
        let written = written?;
        if self.direct.is_asynchronous(span) {
            self.make_durable(&file, span.open_flags as i32)?;
        }
        Ok(written)
    }

    fn is_outdated(&self, node: NodeId, span: &Span) -> bool {
        let flags = || self.handles.get(span.handle).map_or(0, |it| it.flags);
        self.direct.is_asynchronous(span) && self.direct.may_be_cached(node, flags())
    }

    fn drop_written(&self, node: NodeId, bytes: Range<u64>, answer: Box<dyn FnOnce() + Send>) {
        match self.notifier.get() {
            Some(notifier) => notifier.drop_written(node, bytes, answer),
            None => answer(),
        }
    }

    fn wrote(&self, node: NodeId) {
        self.atomic.wrote(node);
    }

    fn space_to_come(&self) -> Option<u64> {
        self.fs.orphans_leaving()
    }

    fn await_space(&self, mark: u64, most: Duration) -> bool {
        // The few that must go on bring it, perhaps.
        let wait = |allowed: Duration| self.fs.await_orphan(mark, allowed.min(most));
        (self.notifier.get()).is_some_and(|notifier| notifier.wait(Duration::ZERO, wait))
    }

    fn flush(&self, context: &Context, node: NodeId, handle: u64) -> Result<()> {
        self.atomic.flush(&self.fs, (node, handle), context.pid);
        Ok(())
    }

    fn release(&self, node: NodeId, handle: u64) {
        self.atomic.abort(&self.fs, node, handle);
        // Dropped without the table's lock: an unlinked file is deleted here.
        if let Some(Handle { file, flags }) = self.handles.remove(handle) {
            self.direct.closed(file.ino().0, flags);
        }
    }

    fn fsync(&self, _: &Context, node: NodeId, handle: u64, data_only: bool) -> Result<()> {
        let file = self.file(node, handle)?;
        self.fs.fsync(&file, data_only).map_err(errno)
    }

    fn readdir(
        &self,
        _: &Context,
        node: NodeId,
        offset: u64,
        reply: &mut DirectoryReply<'_>,
    ) -> Result<()> {
        if reply.wants_attributes() {
            return self.readdir_plus(node, offset, reply);
        }
        self.fs
            .readdir(ino(node), offset, &mut |e| {
                reply.add(e.ino.0, u32::from(e.kind) << 12, e.name, e.next)
            })
            .map_err(errno)
    }

    fn fsyncdir(&self, _: &Context, node: NodeId, data_only: bool) -> Result<()> {
        self.fs.fsync_inode(ino(node), data_only).map_err(errno)
    }

    fn statfs(&self, _: &Context, _: NodeId) -> Result<Statistics> {
        let s = self.fs.statfs();
        Ok(Statistics {
            blocks: s.blocks,
            blocks_free: s.blocks_free,
            blocks_available: s.blocks_available,
            files: s.files,
            files_free: s.files_free,
            block_size: s.block_size,
            fragment_size: s.block_size,
            name_max: s.name_max,
        })
    }

    fn syncfs(&self, _: &Context) -> Result<()> {
        self.fs.sync().map_err(errno)
    }

    fn setxattr(
        &self,
        ctx: &Context,
        node: NodeId,
        name: &[u8],
        value: &[u8],
        flags: u32,
        acl_kill_sgid: bool,
    ) -> Result<()> {
        self.set_extended(ctx, node, (name, value), flags, acl_kill_sgid)
    }

    fn getxattr(&self, _: &Context, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.get_extended(node, name)
    }

    fn listxattr(&self, context: &Context, node: NodeId) -> Result<Vec<u8>> {
        self.list_extended(context, node)
    }

    fn removexattr(&self, ctx: &Context, node: NodeId, name: &[u8]) -> Result<()> {
        self.remove_extended(ctx, node, name)
    }

    fn fallocate(
        &self,
        context: &Context,
        node: NodeId,
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        let opened = self.handle(node, handle)?;
        let file = &opened.file;
        let changed = self.unstaged_change(node, Some(handle), || {
            self.content_changes(context, file, context.uid != 0)?;
            let done = self.fs.fallocate(file, mode as i32, offset, length);
            done.map_err(errno)
        });
        let changed = changed.and_then(|()| {
            if mode as i32 & libc::FALLOC_FL_KEEP_SIZE != 0 {
                self.attributes_changed(node);
            }
            self.make_durable(file, opened.flags)
        });
        // Otherwise none of its bytes changes.
        let empties = mode as i32 & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        self.or_forgotten(node, empties.then_some((offset, length)), changed)
    }

    fn lseek(
        &self,
        _: &Context,
        node: NodeId,
        handle: u64,
        offset: u64,
        whence: u32,
    ) -> Result<u64> {
        let file = self.file(node, handle)?;
        let whence = whence as i32;
        // The kernel asks under its lock of the file.
        if !self.write_back_mapped(Pages::all_unwritten(node), node) {
            let attr = self.fs.getattr(file.ino()).map_err(errno)?;
            return mapped::all_is_data(attr.size, offset, whence);
        }
        self.fs.seek(&file, offset, whence).map_err(errno)
    }

    fn copy_file_range(
        &self,
        context: &Context,
        from: &CopySide,
        to: &CopySide,
        length: u64,
    ) -> Result<u64> {
        let source = self.file(from.node, from.handle)?;
        let opened = self.handle(to.node, to.handle)?;
        let target = &opened.file;
        if self.atomic.of(from.node).is_some() {
            // The kernel then copies what its cache shows.
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let length = length.min(COPY_MAX);
        let changed = self.unstaged_change(to.node, Some(to.handle), || {
            self.content_changes(context, target, context.uid != 0)?;
            let copied = (self.fs).copy_range(&source, from.offset, target, to.offset, length);
            copied.map_err(errno)
        });
        let changed = changed.and_then(|copied| {
            self.make_durable(target, opened.flags)?;
            Ok(copied)
        });
        self.or_forgotten(to.node, Some((to.offset, length)), changed)
    }

    fn ioctl(
        &self,
        context: &Context,
        node: NodeId,
        handle: u64,
        command: u32,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<usize> {
        match command {
            FITRIM => self.trim(context, input, output),
            IOC_SCRUB => self.scrub(context, input, output),
            IOC_METRICS => self.metrics(context, input, output),
            IOC_CHECKPOINT => self.checkpoint(context, output),
            IOC_OUTCOME => self.outcome(output),
            atomic::ioctl::GET_FEATURES => features(output),
            atomic::ioctl::START => self.start_atomic(context, node, handle),
            atomic::ioctl::COMMIT => {
                let file = self.file(node, handle)?;
                let is_whole = self.atomic.check(handle);
                self.atomic.resume(handle);
                is_whole?;
                // Those, too, that were set since it was staged.
                if self.atomic.is_of(node, handle)
                    && let Err(error) = self.content_changes(context, &file, context.uid != 0)
                {
                    // Whatever is answered, it is over.
                    self.atomic.abort_and_wait(&self.fs, node, handle);
                    return Err(error);
                }
                self.atomic.commit(&self.fs, node, handle).map_err(errno)?;
                Ok(0)
            }
            atomic::ioctl::ABORT => {
                self.file(node, handle)?;
                self.atomic.abort_and_wait(&self.fs, node, handle);
                Ok(0)
            }
            _ => Err(Errno::NOTTY),
        }
    }
}

/// Bytes that one step of a scrub reads at most, or its caller could not be interrupted.
const SCRUB_MAX: u64 = 16 << 20;

/// `fstrim`: `_IOWR('X', 121, struct fstrim_range)`.
const FITRIM: u32 = 0xc018_5879;

/// The argument of [`FITRIM`], in bytes.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct TrimRange {
    start: u64,
    len: u64,
    min_len: u64,
}

/// Refuses all but root and the daemon's own user.
fn own_user(context: &Context) -> Result<()> {
    match context.uid != 0 && context.uid != crate::sys::effective_ids().0 {
        true => Err(Errno(libc::EPERM)),
        false => Ok(()),
    }
}

/// Answers [`atomic::ioctl::GET_FEATURES`].
fn features(output: &mut [u8]) -> Result<usize> {
    let features = atomic::ioctl::FEATURE_ATOMIC_WRITE;
    features.write_to(output).map_err(|_| Errno::INVAL)?;
    Ok(output.len())
}

impl SheafOps {
    /// Answers [`atomic::ioctl::START`].
    fn start_atomic(&self, context: &Context, node: NodeId, handle: u64) -> Result<usize> {
        let file = self.file(node, handle)?;
        // What mappings have stored until now is no part of it: an abort, which drops the kernel's pages, takes none of that.
        if !self.write_back_mapped(Pages::all(node), node) {
            return Err(Errno(libc::EBUSY));
        }
        let who = caller(context, 0);
        let started = self
            .atomic
            .start(&self.fs, (&who, context.pid), (&file, handle));
        started.map_err(errno)?;
        Ok(0)
    }

    /// Changes a file otherwise than by what its atomic write stages, through a handle if that is told.
    fn unstaged_change<T>(
        &self,
        node: NodeId,
        handle: Option<u64>,
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let check = || handle.map_or(Ok(()), |handle| self.atomic.check(handle));
        match self.atomic.of(node) {
            Some(pending) => {
                pending.refuse(handle)?;
                check()?;
                pending.change(change)
            }
            None => {
                check()?;
                change()
            }
        }
    }

    /// Answers [`IOC_OUTCOME`].
    fn outcome(&self, output: &mut [u8]) -> Result<usize> {
        let outcome = self.outcome.as_ref().ok_or(Errno::NOTTY)?;
        outcome
            .number()
            .write_to(output)
            .map_err(|_| Errno::INVAL)?;
        Ok(output.len())
    }

    /// Answers [`IOC_METRICS`].
    fn metrics(&self, context: &Context, input: &[u8], output: &mut [u8]) -> Result<usize> {
        own_user(context)?;
        let position = MetricsMessage::asked(input).ok_or(Errno::INVAL)?;
        let text = exposition(&metrics::of(&self.fs, &self.way));
        let reply = MetricsMessage::reply(&text, position);
        reply.write_to(output).map_err(|_| Errno::INVAL)?;
        Ok(output.len())
    }

    /// Answers [`IOC_CHECKPOINT`].
    fn checkpoint(&self, context: &Context, output: &mut [u8]) -> Result<usize> {
        own_user(context)?;
        let number = self.fs.checkpoint().map_err(errno)?;
        number.write_to(output).map_err(|_| Errno::INVAL)?;
        Ok(output.len())
    }

    /// One step of a scrub.
    fn scrub(&self, context: &Context, input: &[u8], output: &mut [u8]) -> Result<usize> {
        own_user(context)?;
        let (position, bytes) = ScrubMessage::asked(input).ok_or(Errno::INVAL)?;
        let step = self.fs.scrub(position, bytes.min(SCRUB_MAX));
        let step = step.map_err(errno)?;
        for finding in &step.findings {
            let (object, what) = (&finding.object, &finding.what);
            match finding.severity {
                fs::scrub::Severity::Notice => tracing::warn!("scrub: {object}: {what}"),
                fs::scrub::Severity::Error | fs::scrub::Severity::Fatal => {
                    tracing::error!("scrub: {object}: {what}");
                }
            }
        }
        let uuid = self.fs.store().array().uuid();
        let reply = ScrubMessage::reply(&step, uuid);
        reply.write_to(output).map_err(|_| Errno::INVAL)?;
        Ok(output.len())
    }

    /// Discards the free space in a range, in runs of `min_len` or more, and answers with how much that was. Addresses are those of
    /// [`TrimRange`](crate::TrimRange). A range that has no block is refused, as by file systems of the kernel.
    fn trim(&self, context: &Context, input: &[u8], output: &mut [u8]) -> Result<usize> {
        if context.uid != 0 {
            return Err(Errno(libc::EPERM));
        }
        let mut range = TrimRange::read_from_bytes(input).map_err(|_| Errno::INVAL)?;
        let statfs = self.fs.statfs();
        let block = u64::from(statfs.block_size);
        if range.len < block || range.start >= statfs.blocks.saturating_mul(block) {
            return Err(Errno::INVAL);
        }
        let least = range.min_len.div_ceil(block);
        let end = range.start.saturating_add(range.len) / block;
        let blocks = range.start.div_ceil(block)..end;
        let trimmed = self.fs.store().trim(blocks, least);
        range.len = trimmed.map_err(|error| errno(error.into()))?;
        range.write_to(output).map_err(|_| Errno::INVAL)?;
        Ok(output.len())
    }

    fn readdir_plus(
        &self,
        node: NodeId,
        offset: u64,
        reply: &mut DirectoryReply<'_>,
    ) -> Result<()> {
        self.fs
            .readdir_plus(ino(node), offset, &mut |e| {
                // Asked first: no reference is to be taken in vain.
                if !reply.has_room(e.name.len()) {
                    return false;
                }
                if e.name != b"." && e.name != b".." {
                    self.fs.ref_inode(e.ino);
                    match self.fs.getattr(e.ino) {
                        Ok(attr) => return reply.add_with(&self.entry(&attr), e.name, e.next),
                        Err(error) => {
                            // Listed without attributes: a lookup of it tells why.
                            if let Some(left_out) = FAILURES.may_say(now_ns()) {
                                tracing::warn!(ino = e.ino.0, %error, left_out, "listed without attributes");
                            }
                            self.fs.forget(e.ino, 1);
                        }
                    }
                }
                reply.add(e.ino.0, u32::from(e.kind) << 12, e.name, e.next)
            })
            .map_err(errno)
    }
}

//! The file system as a whole: what it is made of, how it is made, opened and closed.
//!
//! Locks, outermost first: the rename lock, a file's I/O lock, inodes in nid order, the nodes
//! of those inodes. Nothing waits for a commit or a checkpoint under a node lock.

use crate::Error;
use crate::aio::{Driver, Workers};
use crate::api::{AtimePolicy, Ino, ROOT, StatFs};
use crate::content::{Body, FsNode, Inode};
use crate::cookies::Cookies;
use crate::data::{self, DataOptions, Files, Gone, LastReference, Owners};
use crate::dir::NameHash;
use crate::listing::Ahead;
use crate::orphan::OrphanSet;
use crate::times::Times;
use crate::tx::atomic::{ALL_BYTES_MAX, AtomicCounts};
use base::clock::Clock;
use base::sync::{Mutex, rank};
use base::sys::memory_bytes;
use device::Array;
use engine::{Need, Node, RecoveryReport, Store, StoreOptions};
use format::dir::NAME_MAX;
use format::inode::{FIRST_ORPHANS, ORPHAN_DIRECTORIES};
use format::{BLOCK_SIZE, Nid};
use std::sync::{Arc, Weak};

/// Hard links that an inode can have.
pub const LINK_MAX: u32 = 65_000;
/// Subdirectories that a directory can have, and two more.
pub const DIR_LINK_MAX: u32 = i32::MAX as u32;

/// Memory that the program takes before it has opened anything, with its threads' stacks.
const OWN_BYTES: usize = 16 << 20;
/// Memory for buffers, at most: more threads than that is for are not at work at once.
const BUFFER_BYTES: usize = 192 << 20;
/// Memory limit per thread of a checkpoint.
const WORKER_BYTES: usize = 32 << 20;

/// Memory for what atomic writes have staged, however little there is.
const ATOMIC_BYTES_MIN: usize = 1 << 20;

/// Bytes of metadata that an empty file takes, about: its inode, its name, its entry in the table.
const EMPTY_FILE: u64 = 256;

/// How a file system runs; none of it is on disk.
#[derive(Clone, Debug, Default)]
pub struct FsOptions {
    pub store: StoreOptions,
    pub data: DataOptions,
    /// A mask on name hashes, for tests of collisions. `None`: the whole hash.
    pub hash_mask: Option<u64>,
    /// Memory, in bytes, of all that [`AtomicWrite`](crate::AtomicWrite)s have staged. `None`: 256 MiB.
    pub atomic_bytes: Option<usize>,
}

impl FsOptions {
    /// Nothing is written; what a crash left is repaired in memory only.
    pub fn read_only(mut self) -> FsOptions {
        self.store.read_only = true;
        self.data.atime = AtimePolicy::Never;
        self
    }

    /// Divides a memory limit, in bytes, which counts as the machine's memory if it is more, for all that this process takes: 16 MiB are for
    /// the program itself; of the rest three eighths are for file pages, a quarter for nodes,
    /// up to half as much for node table pages, a thirty-second for staged records, and what is
    /// left for the same again while it is written, the copies of pages on their way to the
    /// devices and the buffers of callers; what these need no more of is for nodes, two thirds, and table pages. Changed nodes and table
    /// pages are within their shares: a checkpoint begins when changed nodes take a third of theirs, and
    /// operations wait at two thirds, what a running checkpoint holds included. File pages leave room that
    /// they do not take to blocks of metadata. [`Transaction`](crate::Transaction)s come on top, each with up to some 75 MiB of pages while it is staged and three times
    /// that while it commits: a program that begins them under a limit keeps room for these. A mount begins none but those of atomic writes, which are within the limit until they commit.
    pub fn with_memory(mut self, bytes: usize) -> FsOptions {
        let bytes = bytes.min(memory_bytes() as usize);
        let rest = bytes - OWN_BYTES.min(bytes / 4);
        self.data.cache_bytes = rest / 8 * 3;
        let unneeded = (rest / 32 * 7).saturating_sub(BUFFER_BYTES);
        // Half as much is for the table (`StoreOptions::table_bytes_max`).
        let nodes = rest / 4 + unneeded / 3 * 2;
        self.store.node_cache_bytes = nodes;
        self.store.dirty_bytes = Some(nodes / 3);
        self.store.staging_bytes = (rest / 64).clamp(128 << 10, engine::STAGING_MAX);
        self.atomic_bytes = Some((rest / 8).clamp(ATOMIC_BYTES_MIN, ALL_BYTES_MAX));
        // Each packs a segment of its own in a checkpoint.
        let workers = (bytes / WORKER_BYTES).max(2);
        self.store.workers = self.store.workers.min(workers);
        self
    }

    /// No threads: the caller's `tick` and `sync` do all there is to do.
    pub fn without_threads(mut self, clock: Clock) -> FsOptions {
        self.store.background = false;
        self.store.clock = clock;
        self
    }
}

/// What mkfs may be told.
#[derive(Clone, Debug)]
pub struct MkfsOptions {
    /// Owner of the root directory.
    pub uid: u32,
    pub gid: u32,
    /// Permission bits of the root directory.
    pub mode: u32,
    pub clock: Clock,
}

impl Default for MkfsOptions {
    fn default() -> Self {
        MkfsOptions {
            uid: 0,
            gid: 0,
            mode: 0o755,
            clock: Clock::real(),
        }
    }
}

/// An open file system. All methods may be called from any thread.
///
/// It ends well by [`close`](FileSystem::close). A drop without that is as a crash: what was synced or committed is there at the next
/// [`open`](FileSystem::open), which recovers it, and of the rest what happened to be written. After either, the devices stay
/// claimed until nobody has it any more, nor an open file or directory, a context or a future of it. Where a future was ever used and it ends without
/// [`close`](FileSystem::close), a thread of it lets go last, some milliseconds after whoever dropped it: who opens the devices again then does so by
/// [`open_when_free`](crate::array::open_when_free).
pub struct FileSystem {
    pub(crate) store: Arc<Store<FsNode>>,
    pub(crate) files: Arc<Files>,
    pub(crate) owners: Owners,
    pub(crate) hash: NameHash,
    pub(crate) times: Arc<Times>,
    pub(crate) cookies: Cookies,
    /// Held by a rename that moves a directory to another parent (R13).
    pub(crate) renames: Mutex<()>,
    pub(crate) orphans: Arc<OrphanSet>,
    /// Inodes that listings come to next.
    pub(crate) listings: Arc<Ahead>,
    /// For requests that need not be waited for.
    pub(crate) workers: Workers,
    pub(crate) driver: Driver,
    /// Atomic writes of open files.
    pub(crate) atomic: AtomicCounts,
    /// How it ended.
    ended: Mutex<Option<Result<(), Error>>>,
    recovery: RecoveryReport,
}

impl FileSystem {
    /// Makes an empty file system on an array whose labels are not written yet: the caller
    /// writes them last, so that an interrupted mkfs leaves nothing that opens.
    ///
    /// # Errors
    /// [`device::Error::InUse`] while a file system is open on the array's devices, as for [`open`](Self::open); those of writing.
    pub fn mkfs(array: &Arc<Array>, options: &MkfsOptions) -> Result<(), Error> {
        let store_options = StoreOptions {
            background: false,
            clock: options.clock.clone(),
            ..StoreOptions::default()
        };
        let _writer = array.writer().map_err(engine::Error::from)?;
        Store::<FsNode>::format(array, store_options.clone())?;
        let (store, _) = Store::<FsNode>::open(Arc::clone(array), store_options)?;
        let now = options.clock.now();
        let root = store.reserved_nid(ROOT)?;
        let mut orphans = Vec::new();
        for i in 0..ORPHAN_DIRECTORIES {
            orphans.push(store.reserved_nid(Nid(FIRST_ORPHANS + i))?);
        }
        let mut op = store.begin(Need::Grow)?;
        let mode = libc::S_IFDIR | (options.mode & 0o7777);
        let mut inode = Inode::new(mode, root.version(), now);
        (inode.uid, inode.gid, inode.parent) = (options.uid, options.gid, ROOT);
        op.create(root, FsNode::Inode(inode));
        for fresh in orphans {
            let mut inode = Inode::new(libc::S_IFDIR, fresh.version(), now);
            inode.body = Body::Orphans(Vec::new());
            op.create(fresh, FsNode::Inode(inode));
        }
        op.commit();
        store.close()?;
        Ok(())
    }

    /// Opens a file system: recovers it, finishes what a crash interrupted, starts threads.
    ///
    /// A process that forks must not use it in the child, nor anything that is open of it, and not drop it there: the child has none of
    /// the threads, and its memory is a copy whose state the devices do not follow. Fork first, and open in one process.
    ///
    /// # Errors
    /// [`device::Error::InUse`] while the array, or another one over one of its devices, is open for writing, or is being made or repaired: it may be opened read-only then,
    /// which shows what the devices have. [`Error::NoRoom`], before anything is written. Damage, what a device fails to do, and [`device::Error::Threads`] and the like.
    pub fn open(array: Arc<Array>, options: FsOptions) -> Result<Arc<FileSystem>, Error> {
        let key = array.label().hash_key;
        let writer = match options.store.read_only {
            true => None,
            false => Some(array.writer().map_err(engine::Error::from)?),
        };
        let pages = data::page_cache(&options.data)?;
        let (store, recovery) = Store::<FsNode>::open(array, options.store.clone())?;
        writer.into_iter().for_each(|writer| store.keep(writer));
        let times = Arc::new(Times::new(store.clock().clone()));
        let (of_files, data) = (Arc::clone(&store), options.data.clone());
        let files = Files::new(of_files, Arc::clone(&times), pages, data);
        let hash = match options.hash_mask {
            Some(mask) => NameHash::weakened(&key, mask),
            None => NameHash::new(&key),
        };
        let cookies = Cookies::open(&store, &times);
        let fs = Arc::new(FileSystem {
            store,
            cookies,
            times,
            owners: Owners::new(&files),
            files,
            hash,
            ended: Mutex::new(rank::FILE_SYSTEM_END, None),
            renames: Mutex::new(rank::RENAME, ()),
            orphans: Arc::new(OrphanSet::new()),
            listings: Arc::new(Ahead::new()),
            workers: Workers::default(),
            driver: Driver::default(),
            atomic: AtomicCounts::new(options.atomic_bytes.unwrap_or(ALL_BYTES_MAX)),
            recovery,
        });
        let deleter: Weak<FileSystem> = Arc::downgrade(&fs);
        fs.files.set_deleter(Arc::clone(&fs.orphans), deleter);
        if let Err(error) = fs.start(options.store.background) {
            // Its threads would have the devices for a while yet.
            if let Err(besides) = fs.close() {
                tracing::debug!("after an open that failed: {besides}");
            }
            return Err(error);
        }
        Ok(fs)
    }

    fn start(&self, background: bool) -> Result<(), Error> {
        self.inode(ROOT)?;
        if background {
            self.files.start_ahead()?;
            self.listings.start(&self.store)?;
            self.files.start_keeping()?;
        }
        if !self.store.read_only() {
            self.finish_orphans();
            if background {
                self.files.start()?;
                self.files.start_cleaning()?;
            }
        }
        Ok(())
    }

    /// What recovery found when this was opened.
    pub fn recovery(&self) -> &RecoveryReport {
        &self.recovery
    }

    pub fn store(&self) -> &Arc<Store<FsNode>> {
        &self.store
    }

    pub fn clock(&self) -> &Clock {
        self.store.clock()
    }

    pub fn read_only(&self) -> bool {
        self.store.read_only()
    }

    /// Data that has been dirty for so long is written back without being asked for.
    pub fn write_back_age(&self) -> std::time::Duration {
        self.files.options().write_back_age
    }

    /// Writes everything back, and ends: after this the devices hold all of it, cleanly. Requests that futures and contexts have handed over are
    /// done first, but for reads that contexts have in flight, which are not waited for and may land afterwards; futures that are polled later end with [`Error::Cancelled`]. What other threads change meanwhile is part of it, or
    /// fails. The file system changes no more, whatever the outcome. Calling it again waits for that, and returns the same.
    ///
    /// # Errors
    /// [`Error::Busy`] in a waker, while another thread is at it. After a device's fault a flush of a sync that was under way may still be sent when this returns; nothing is
    /// written. As those of [`sync`](Self::sync): what was synced, and no more, is sure to be there after the next open.
    pub fn close(&self) -> Result<(), Error> {
        let mut ended = match self.driver.is_ours() {
            // Whoever is at it may be waiting for this thread.
            true => self.ended.try_lock().ok_or(Error::Busy)?,
            false => self.ended.lock(),
        };
        if let Some(outcome) = &*ended {
            return outcome.clone();
        }
        let outcome = self.end();
        *ended = Some(outcome.clone());
        outcome
    }

    fn end(&self) -> Result<(), Error> {
        self.driver.close();
        self.workers.finish();
        self.files.finish_writes();
        self.listings.stop();
        self.files.stop();
        let told = self.files.losses_told();
        let written = self.files.end();
        self.store.close_with(|| {
            if written.is_ok() {
                self.cookies.end(&self.store, self.times.floor());
            }
        })?;
        written.and(self.files.check_losses(told))
    }

    /// Everything done so far, data included, is durable when this returns. One that meets the end of the file system waits for it, and succeeds if that
    /// [does](Self::close), as one does that comes later.
    ///
    /// # Errors
    /// What cannot be made durable now, and what was lost since the last sync that reported a
    /// loss: data that could not be written until its file was closed, or that a device was
    /// given and may not have when a flush fails. Each loss fails every sync that runs then, or
    /// the next one; the file's own fsync reports it besides.
    pub fn sync(&self) -> Result<(), Error> {
        if self.store.read_only() {
            return match self.store.failed() {
                Some(error) => self.files.or_ended_well(Err(error.into())),
                None => Ok(()),
            };
        }
        let told = self.files.losses_told();
        let written = self.files.write_back_all();
        let synced = written.and_then(|()| Ok(self.store.sync()?));
        let synced = self.files.or_ended_well(synced);
        // Whoever is told of another failure is told of these with it.
        synced.and(self.files.check_losses(told))
    }

    /// Writes home all that was written and changed before the call, while work goes on: recovery has nothing of it to apply
    /// afterwards. The journal may hold folds that the checkpoint itself has logged, and that its images have. Returns the newest checkpoint's number.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], where the file system is only read: what a crash left in the journal stays there.
    pub fn checkpoint(&self) -> Result<u64, Error> {
        self.sync()?;
        if self.store.read_only() {
            return Err(Error::ReadOnly);
        }
        self.store.checkpoint()?;
        Ok(self.store.newest_checkpoint())
    }

    /// One step of background work: write-back that is due, coarse times.
    pub fn tick(&self) -> Result<(), Error> {
        if self.store.read_only() {
            return Ok(());
        }
        self.files.tick()
    }

    /// Has `told` told, as long as it lives, of files of which something is gone that had been written and that devices do not take; in the place of whoever was told before.
    pub fn tell_gone(&self, told: Weak<Gone>) {
        self.files.tell_gone(told);
    }

    pub fn statfs(&self) -> StatFs {
        let space = self.store.space();
        let files_free = space.growth_bytes / EMPTY_FILE;
        StatFs {
            block_size: BLOCK_SIZE as u32,
            blocks: space.total_blocks,
            blocks_free: space.free_blocks,
            blocks_available: space.free_blocks,
            files: space.nodes_now.saturating_add(files_free),
            files_free,
            name_max: NAME_MAX as u32,
        }
    }

    /// The node of an inode that a caller names.
    #[inline]
    pub(crate) fn node(&self, ino: Ino) -> Result<Node<FsNode>, Error> {
        if is_hidden(ino) {
            return Err(Error::Stale(ino));
        }
        let node = self.store.get(ino)?;
        if node.is_owned() {
            return Err(Error::Stale(ino));
        }
        Ok(node)
    }

    /// The node of an inode that a name refers to, to change it. Gone is also one whose number belongs to
    /// another kind of node by now: unlinked, and the number reused, since the name was read.
    pub(crate) fn named_node(&self, nid: Nid) -> Result<Node<FsNode>, engine::Error> {
        let node = self.store.get_to_change(nid)?;
        match node.is_owned() {
            true => Err(engine::Error::Gone(nid)),
            false => Ok(node),
        }
    }

    /// The inode that a caller names, locked shared.
    #[inline]
    pub(crate) fn inode(&self, ino: Ino) -> Result<engine::NodeRead<FsNode>, Error> {
        let node = self.node(ino)?.into_read()?;
        match &*node {
            FsNode::Inode(_) => Ok(node),
            _ => Err(Error::Stale(ino)),
        }
    }
}

/// Orphan directories are nobody's business.
pub(crate) fn is_hidden(ino: Ino) -> bool {
    (FIRST_ORPHANS..FIRST_ORPHANS + ORPHAN_DIRECTORIES).contains(&ino.0) || ino.0 == 0
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        self.listings.close();
    }
}

impl LastReference for FileSystem {
    fn last_reference_gone(&self, ino: Ino) {
        self.unreferenced(ino);
    }
}

impl std::fmt::Debug for FileSystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileSystem").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From 1.3 GiB on the table's share, half as much as the nodes', was beyond what there is.
    #[test]
    fn the_shares_of_a_memory_limit_are_within_it() {
        for mib in [
            16,
            64,
            128,
            512,
            800,
            1 << 10,
            1400,
            2 << 10,
            3 << 10,
            8 << 10,
            64 << 10,
        ] {
            let bytes = mib << 20;
            let FsOptions { store, data, .. } = FsOptions::default().with_memory(bytes);
            let bytes = bytes.min(memory_bytes() as usize);
            let buffers = (bytes / 32 * 7).min(BUFFER_BYTES);
            let nodes = store.node_cache_bytes + store.table_bytes_max();
            let all = data.cache_bytes + nodes + 2 * store.staging_bytes + buffers;
            assert!(all <= bytes, "{mib} MiB: {all} of {bytes}");
        }
    }
}

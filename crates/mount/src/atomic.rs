//! Atomic writes of open files through the mount: the ioctls of F2FS, whose numbers programs know.
//!
//! ```text
//! START ─► Staging: the handle's writes and cuts go to an `fs::AtomicWrite` ─► COMMIT ─► Ended; the kernel asks for attributes anew
//!                     │ ABORT, close, end of the process, a commit that failed
//!                     └─► Dropping: the kernel drops its pages ─► Ended
//! ```
//!
//! The kernel has one page cache and one size for a file, and puts what is written there before it asks the daemon: whoever reads
//! the file buffered, or maps it, may see what another handle has staged. What this side can do is to keep that one view whole, and to
//! take it back. Invariants ([decision 0030](../../../docs/decisions/0030-atomic-writes-through-the-mount.md)):
//!
//! 1. A file has one atomic write at most, which belongs to one handle.
//! 2. While it is staged, all that fills the kernel's caches shows it: reads through whatever handle, and sizes. So
//!    the page cache is never a mixture, also when a page goes and comes back. `O_DIRECT` makes no difference: a fault of a mapping and read-ahead
//!    come with the flags of the open file, and fill the cache.
//! 3. A page of a mapping that the kernel writes back is staged, too, if a part of it is, or lies behind a staged cut: it has staged bytes. While the
//!    kernel drops pages after an abort, such pages are thrown away. Others go to the file, but no further than it reaches: the
//!    kernel writes as far as it knows it to.
//! 4. What other handles change goes to the file, under the lock of its atomic write, so that it is there before a commit or after.
//!    What is appended goes to the end of the file as the handle has it, staged or not ([`AtomicWrites::write`]): the kernel may know another
//!    one, also long after an abort. So a size that the kernel sets after a direct write that fails, which is the one that it knows, is refused where it may be staged, or was
//!    ([`AtomicWrites::knows_size`]). Direct writes stay where the kernel puts them: a long one comes in several requests at once. The kernel's pages may differ from it after a commit then, and are dropped.
//! 5. The file is locked here over the commit: who reads meanwhile sees what was staged, before it or after. Nothing else is waited for under this
//!    lock, and nobody notifies the kernel who holds it ([`Notifier`]).
//! 6. It is over before the process that started it loses a POSIX lock: the kernel frees these when a descriptor is closed, and asks this daemon first
//!    ([`AtomicWrites::flush`]). The answer waits until the kernel's pages are dropped, but not for ever (`wait_until_gone`). What another process writes through the same open file is refused from then on ([`AtomicWrites::check`]), until somebody
//!    starts, commits or aborts through it: it is the rest of a batch whose beginning is gone.

#[cfg(test)]
pub(crate) mod tests;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base::map::{HashMap, HashSet};
use base::sync::{Condvar, Mutex, rank};
use fs::{AtomicWrite, Attr, Caller, Error, FileSystem, Ino, OpenFile};

use crate::notify::{self, Notifier, Pages};
use crate::ops::{Errno, NodeId, Span};
use crate::process::{self, Processes};

/// The numbers, as in the kernel's `linux/f2fs.h`.
pub mod ioctl {
    /// `_IO(0xf5, 1)`
    pub const START: u32 = 0xf501;
    /// `_IO(0xf5, 2)`
    pub const COMMIT: u32 = 0xf502;
    /// `_IO(0xf5, 5)`
    pub const ABORT: u32 = 0xf505;
    /// `_IOR(0xf5, 12, u32)`
    pub const GET_FEATURES: u32 = 0x8004_f50c;
    /// The one feature that [`GET_FEATURES`] tells.
    pub const FEATURE_ATOMIC_WRITE: u32 = 4;
}

/// Of the kernel, and of what is staged.
const PAGE: u64 = 4096;
/// How long somebody who gives up locks waits for pages to be dropped where nearly all workers are at that.
const WAIT_CROWDED: Duration = Duration::from_millis(200);
/// Files that are remembered.
const KNOWN_MAX: usize = 4096;

/// The atomic writes of a mount. Its copies are one.
#[derive(Clone, Debug, Default)]
pub(crate) struct AtomicWrites(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Files that have one, and handles that are cancelled: all that others look at.
    count: AtomicUsize,
    tables: Mutex<Tables>,
    /// One is no more in [`Tables::files`].
    removed: Condvar,
    /// Something is in [`Tables::known`].
    any_known: AtomicBool,
    /// Something is in [`Tables::resized`].
    any_resized: AtomicBool,
    /// Those of [`Tables::resized`] of which the kernel has asked for no attributes since; all, once these are too many. One is here before what it had staged is none any more.
    misled: Mutex<Known>,
    misled_count: AtomicUsize,
    /// Pages to be dropped after the answer to what has changed them: the kernel has them at another place, or as they were before; so many there are.
    outdated: Mutex<Vec<Pages>>,
    outdated_count: AtomicUsize,
    notifier: OnceLock<Notifier>,
    processes: Processes,
}

#[derive(Debug, Default)]
struct Tables {
    files: HashMap<NodeId, Arc<Pending>>,
    /// Handles of invariant 6 that are refused writes.
    cancelled: HashSet<u64>,
    /// Files of which one was started.
    known: Known,
    /// Files of which one ended without having become the file: the kernel may have its size still.
    resized: Known,
}

impl Tables {
    fn has(&self, pending: &Arc<Pending>) -> bool {
        let found = self.files.get(&pending.node);
        found.is_some_and(|found| Arc::ptr_eq(found, pending))
    }
}

/// Files that something has happened to; all, once these are too many.
#[derive(Debug)]
enum Known {
    These(HashSet<NodeId>),
    All,
}

impl Default for Known {
    fn default() -> Self {
        Known::These(HashSet::default())
    }
}

impl Known {
    fn add(&mut self, node: NodeId) {
        if let Known::These(nodes) = self {
            nodes.insert(node);
            if nodes.len() > KNOWN_MAX {
                *self = Known::All;
            }
        }
    }

    /// All stay what they are.
    fn remove(&mut self, node: NodeId) {
        if let Known::These(nodes) = self {
            nodes.remove(&node);
        }
    }

    fn has(&self, node: NodeId) -> bool {
        match self {
            Known::These(nodes) => nodes.contains(&node),
            Known::All => true,
        }
    }

    /// How many are told apart, or one for all.
    fn count(&self) -> usize {
        match self {
            Known::These(nodes) => nodes.len(),
            Known::All => 1,
        }
    }
}

impl Default for Inner {
    fn default() -> Self {
        Inner {
            count: AtomicUsize::new(0),
            tables: Mutex::new(rank::MOUNT_ATOMIC, Tables::default()),
            removed: Condvar::new(),
            any_known: AtomicBool::new(false),
            any_resized: AtomicBool::new(false),
            misled: Mutex::new(rank::LEAF, Known::default()),
            misled_count: AtomicUsize::new(0),
            outdated: Mutex::new(rank::LEAF, Vec::new()),
            outdated_count: AtomicUsize::new(0),
            notifier: OnceLock::new(),
            processes: Processes::default(),
        }
    }
}

/// The atomic write of one file.
#[derive(Debug)]
pub(crate) struct Pending {
    node: NodeId,
    handle: u64,
    /// Who started it, where that can be told.
    process: Option<u32>,
    /// The kernel has given back references to the file since.
    is_forgotten: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Staging {
        write: Box<AtomicWrite>,
        /// Others have changed the file meanwhile.
        is_disturbed: bool,
    },
    /// The kernel may have these still.
    Dropping(Gone),
    Ended,
}

/// Pages that show what was staged.
#[derive(Debug)]
struct Gone {
    /// In order.
    pages: Vec<u64>,
    /// All from here on.
    cut: Option<u64>,
}

impl Gone {
    fn of(write: &AtomicWrite) -> Gone {
        Gone {
            pages: write.pages().collect(),
            cut: write.cut(),
        }
    }

    fn has(&self, page: u64) -> bool {
        self.pages.binary_search(&page).is_ok() || is_cut(self.cut, page)
    }
}

fn is_cut(cut: Option<u64>, page: u64) -> bool {
    cut.is_some_and(|cut| cut < (page + 1) * PAGE)
}

type Result<T> = std::result::Result<T, Error>;

impl AtomicWrites {
    pub fn init(&self, notifier: Notifier) {
        // A session begins once.
        self.0.notifier.get_or_init(|| notifier);
    }

    /// The one of a file, if it has one.
    pub fn of(&self, node: NodeId) -> Option<Arc<Pending>> {
        match self.0.count.load(Ordering::Relaxed) {
            0 => None,
            _ => self.0.tables.lock().files.get(&node).cloned(),
        }
    }

    /// Whether the kernel has to tell when a descriptor of a file is closed that is opened with these flags: through such a handle an atomic
    /// write can be started, or one was started before, and the same process may have opened the file twice.
    pub fn needs_flush(&self, node: NodeId, flags: i32) -> bool {
        may_start(flags)
            || (self.0.any_known.load(Ordering::Relaxed) && self.0.tables.lock().known.has(node))
    }

    /// Begins one, for a task. Again through the same handle: goes on with it. Waits while the kernel drops pages of the last one.
    ///
    /// # Errors
    /// [`Error::Busy`] when another handle has one, or those pages take too long; [`Error::BadHandle`] when the handle cannot both read and write; those of
    /// [`FileSystem::atomic_write`].
    pub fn start(
        &self,
        fs: &Arc<FileSystem>,
        (who, task): (&Caller, u32),
        (file, handle): (&OpenFile, u64),
    ) -> Result<()> {
        let node = file.ino().0;
        if !may_start(file.flags()) {
            return Err(Error::BadHandle);
        }
        self.resume(handle);
        if let Some(pending) = self.of(node) {
            match pending.is_staging() {
                true if pending.handle == handle => return Ok(()),
                true => return Err(Error::Busy),
                false if self.wait_for(&pending, Duration::ZERO) => {}
                false => return Err(Error::Busy),
            }
        }
        let state = State::Staging {
            write: Box::new(fs.atomic_write(who, file)?),
            is_disturbed: false,
        };
        let pending = Arc::new(Pending {
            node,
            handle,
            process: self.0.processes.of(task),
            is_forgotten: AtomicBool::new(false),
            state: Mutex::keyed(rank::ATOMIC_WRITE, node, state),
        });
        let others = {
            let mut tables = self.0.tables.lock();
            tables.known.add(node);
            self.0.any_known.store(true, Ordering::Relaxed);
            match tables.files.contains_key(&node) {
                true => Some(pending),
                false => {
                    tables.files.insert(node, pending);
                    self.0.count.fetch_add(1, Ordering::Relaxed);
                    None
                }
            }
        };
        match others {
            Some(_) => Err(Error::Busy),
            None => Ok(()),
        }
    }

    /// Whether what the handle changes is staged.
    pub fn is_of(&self, node: NodeId, handle: u64) -> bool {
        self.of(node).is_some_and(|pending| pending.is_of(handle))
    }

    /// Makes what the handle has staged the file's content, durably. It is over then, whatever comes of it.
    ///
    /// # Errors
    /// [`Error::Invalid`] when nothing was started; those of [`AtomicWrite::commit`].
    pub fn commit(&self, fs: &FileSystem, node: NodeId, handle: u64) -> Result<()> {
        let none = Error::Invalid("no atomic write was started");
        let Some(pending) = self.of(node).filter(|pending| pending.handle == handle) else {
            return Err(none);
        };
        let (committed, is_disturbed, is_misled) = {
            let mut state = pending.state.lock();
            let State::Staging { .. } = *state else {
                return Err(none);
            };
            let State::Staging {
                write,
                is_disturbed,
            } = std::mem::replace(&mut *state, State::Ended)
            else {
                unreachable!("it was looked at")
            };
            let gone = Gone::of(&write);
            let is_misled = misleads(fs, node, &write, is_disturbed);
            let committed = write.commit();
            if is_misled && (committed.is_err() || is_disturbed) {
                self.mislead(node);
            }
            if committed.is_err() {
                *state = State::Dropping(gone);
            }
            (committed, is_disturbed, is_misled)
        };
        if committed.is_err() || is_disturbed {
            self.drop_pages(Arc::clone(&pending), is_misled);
            // Who is told that it failed reads what the kernel has.
            self.wait_until_gone(&pending);
        } else {
            // Answers with the size and times from before may be on their way. Those that find it gone below were asked for later, or are
            // older for the kernel than this.
            if let Some(notifier) = self.0.notifier.get() {
                notifier.drop_attributes(node);
            }
            self.remove(&pending);
        }
        committed
    }

    /// Forgets what the handle has staged; without anything, does nothing.
    pub fn abort(&self, fs: &FileSystem, node: NodeId, handle: u64) {
        self.resume(handle);
        if let Some(pending) = self.of(node).filter(|pending| pending.handle == handle) {
            self.abort_it(fs, &pending);
        }
    }

    /// The same for who gives up a lock next: waits until the kernel has nothing of it, as well as can be.
    pub fn abort_and_wait(&self, fs: &FileSystem, node: NodeId, handle: u64) {
        let pending = self.of(node).filter(|pending| pending.handle == handle);
        self.abort(fs, node, handle);
        if let Some(pending) = pending {
            self.wait_until_gone(&pending);
        }
    }

    /// A task closes a descriptor of a handle, and its locks of the file go when this returns. What the same process has started through this handle is
    /// over then, or through whatever handle if the process ends or executes another program; and what was over before is gone from the kernel's cache.
    pub fn flush(&self, fs: &FileSystem, (node, handle): (NodeId, u64), task: u32) {
        let Some(pending) = self.of(node) else {
            return;
        };
        // Who cannot be told from the other is taken for it.
        let of_another = match (pending.process, self.0.processes.of(task)) {
            (Some(starter), Some(closer)) => starter != closer,
            _ => false,
        };
        if of_another || (pending.handle != handle && !process::is_ending(task)) {
            return;
        }
        if pending.is_staging() {
            self.cancel(fs, &pending);
        }
        // Whoever gets the locks reads what the kernel has, also when somebody else is dropping it.
        self.wait_until_gone(&pending);
    }

    fn cancel(&self, fs: &FileSystem, pending: &Arc<Pending>) {
        // First of all, or a write could slip through between.
        let is_new = self.0.tables.lock().cancelled.insert(pending.handle);
        if is_new {
            self.0.count.fetch_add(1, Ordering::Relaxed);
        }
        let was_staging = self.abort_it(fs, pending);
        if is_new && !was_staging {
            // It was committed or given up meanwhile: there is nothing that a write could be torn from.
            self.resume(pending.handle);
        }
    }

    /// A write of a file, staged or not.
    ///
    /// # Errors
    /// `ECANCELED`: see invariant 6.
    pub fn write(
        &self,
        fs: &FileSystem,
        file: &OpenFile,
        span: &Span,
        data: &[u8],
    ) -> std::result::Result<Result<usize>, Errno> {
        let mut is_displaced = false;
        // Until it is known what the kernel has read back meanwhile.
        let notifier = self.0.notifier.get().filter(|_| is_buffered(span));
        let _writing = notifier.map(|told| told.writes(file.ino().0));
        let written = self.write_somewhere(fs, file, span, data, &mut is_displaced);
        if let Ok(Ok(_)) = written
            && let Some(pages) = self.outdated_by(file.ino().0, span, data.len(), is_displaced)
        {
            self.outdated(pages);
        }
        written
    }

    /// Has the kernel drop these once the request of its file that is being served is answered ([`wrote`](Self::wrote)).
    pub fn outdated(&self, pages: Pages) {
        let mut outdated = self.0.outdated.lock();
        outdated.push(pages);
        (self.0.outdated_count).store(outdated.len(), Ordering::Relaxed);
    }

    /// Pages that the kernel has and a write has made something else of.
    fn outdated_by(
        &self,
        node: NodeId,
        span: &Span,
        len: usize,
        is_displaced: bool,
    ) -> Option<Pages> {
        if is_displaced {
            return Some(Pages::all(node));
        }
        let bytes = span.offset..span.offset.saturating_add(len as u64);
        // The kernel drops no page that it writes back.
        let is_read = !span.from_page_cache
            && (self.0.notifier.get()).is_some_and(|told| {
                told.may_be_outdated(node, &bytes, (span.request, is_buffered(span)))
            });
        is_read.then(|| Pages::outdated(node, bytes))
    }

    /// As `write`; says whether it went elsewhere than the kernel put it, which is told so by [`AtomicWrites::wrote`].
    fn write_somewhere(
        &self,
        fs: &FileSystem,
        file: &OpenFile,
        span: &Span,
        data: &[u8],
        is_displaced: &mut bool,
    ) -> std::result::Result<Result<usize>, Errno> {
        let node = file.ino().0;
        let mut append_at = |end: u64, span: &mut Span| {
            *is_displaced = span.offset != end;
            span.offset = end;
        };
        // Long direct writes come in several requests at once, which know of each other where they go.
        let flags = span.open_flags as i32 & (libc::O_APPEND | libc::O_DIRECT);
        let appends = !span.from_page_cache && flags == libc::O_APPEND;
        let mut span = *span;
        let Some(pending) = self.of(node) else {
            if span.from_page_cache {
                return Ok(write_within(fs, file, span.offset, data).map(|()| data.len()));
            }
            self.check(span.handle)?;
            let may_be_resized = appends && self.0.any_resized.load(Ordering::Relaxed);
            if may_be_resized && self.0.tables.lock().resized.has(node) {
                match fs.getattr(file.ino()) {
                    Ok(attr) => append_at(attr.size, &mut span),
                    Err(error) => return Ok(Err(error)),
                }
            }
            return Ok(fs.write(file, span.offset, data));
        };
        if span.from_page_cache {
            let state = &mut *pending.state.lock();
            return Ok(write_back(state, fs, file, span.offset, data));
        }
        let mut state = loop {
            let is_staged = pending.is_of(span.handle);
            if !is_staged {
                self.check(span.handle)?;
            }
            let state = pending.state.lock();
            if !is_staged || pending.stages(&state, span.handle) {
                break state;
            }
            // It ended meanwhile.
        };
        if appends {
            match fs.getattr(file.ino()) {
                Ok(attr) => {
                    let end = match &*state {
                        State::Staging { write, .. } if span.handle == pending.handle => {
                            write.size(attr.size)
                        }
                        _ => attr.size,
                    };
                    append_at(end, &mut span);
                }
                Err(error) => return Ok(Err(error)),
            }
        }
        match &mut *state {
            State::Staging { write, .. } if span.handle == pending.handle => {
                return Ok(write.write(span.offset, data).map(|()| data.len()));
            }
            State::Staging { is_disturbed, .. } => *is_disturbed = true,
            State::Dropping(_) | State::Ended => {}
        }
        Ok(fs.write(file, span.offset, data))
    }

    /// A write of a file was answered, or a change of its attributes.
    pub fn wrote(&self, node: NodeId) {
        if self.0.outdated_count.load(Ordering::Relaxed) == 0 {
            return;
        }
        // A write that was tried again has left some each time.
        let pages: Vec<Pages> = {
            let mut outdated = self.0.outdated.lock();
            let of_node = outdated.extract_if(.., |pages| pages.is_of(node));
            let pages: Vec<Pages> = of_node.collect();
            (self.0.outdated_count).store(outdated.len(), Ordering::Relaxed);
            pages
        };
        if let Some(notifier) = self.0.notifier.get() {
            pages
                .into_iter()
                .for_each(|pages| notifier.drop_outdated(pages));
        }
    }

    /// Whether what a handle changes may go to the file.
    ///
    /// # Errors
    /// `ECANCELED`: see invariant 6.
    pub fn check(&self, handle: u64) -> std::result::Result<(), Errno> {
        match self.is_cancelled(handle) {
            true => Err(Errno(libc::ECANCELED)),
            false => Ok(()),
        }
    }

    fn is_cancelled(&self, handle: u64) -> bool {
        self.0.count.load(Ordering::Relaxed) > 0 && self.0.tables.lock().cancelled.contains(&handle)
    }

    /// A handle is as good as any again.
    pub fn resume(&self, handle: u64) {
        if self.is_cancelled(handle) && self.0.tables.lock().cancelled.remove(&handle) {
            self.0.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Gives up what is staged, if anything is.
    fn abort_it(&self, fs: &FileSystem, pending: &Arc<Pending>) -> bool {
        let is_misled = {
            let mut state = pending.state.lock();
            let State::Staging {
                write,
                is_disturbed,
            } = &*state
            else {
                return false;
            };
            let is_misled = misleads(fs, pending.node, write, *is_disturbed);
            if is_misled {
                self.mislead(pending.node);
            }
            *state = State::Dropping(Gone::of(write));
            is_misled
        };
        self.drop_pages(Arc::clone(pending), is_misled);
        true
    }

    /// Forgets all of them, when the mount has ended.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.0.tables.lock());
        let count = all.files.len() + all.cancelled.len();
        self.0.count.fetch_sub(count, Ordering::Relaxed);
        {
            let mut misled = self.0.misled.lock();
            *misled = Known::default();
            self.0.misled_count.store(0, Ordering::Relaxed);
        }
        for pending in all.files.into_values() {
            *pending.state.lock() = State::Ended;
        }
        self.0.removed.notify_all();
    }

    /// What the kernel has cached of the file goes, and then the atomic write. Where that has misled the kernel, [`mislead`](Self::mislead) was called.
    fn drop_pages(&self, pending: Arc<Pending>, is_misled: bool) {
        {
            let mut tables = self.0.tables.lock();
            tables.resized.add(pending.node);
            self.0.any_resized.store(true, Ordering::Relaxed);
        }
        let Some(notifier) = self.0.notifier.get() else {
            return self.remove(&pending);
        };
        let (all, node) = (self.clone(), pending.node);
        let then = move || {
            // Answers to what the kernel has asked before the drop are old to it.
            if is_misled {
                all.mislead(node);
                // Looked at after that: nobody would take it away again.
                if pending.is_forgotten.load(Ordering::SeqCst) {
                    all.tells(node);
                }
            }
            all.remove(&pending);
        };
        notifier.drop_pages(Pages::all(node), Box::new(then));
    }

    /// The kernel may know a file by a size that it never had. Called under the lock of the atomic write, before that stages nothing any more: there is no moment
    /// in which [`knows_size`](Self::knows_size) finds neither.
    fn mislead(&self, node: NodeId) {
        let mut misled = self.0.misled.lock();
        misled.add(node);
        self.0.misled_count.store(misled.count(), Ordering::Relaxed);
    }

    /// The kernel is told the attributes of a file that has no atomic write, or has forgotten it.
    pub fn tells(&self, node: NodeId) {
        if self.0.misled_count.load(Ordering::Relaxed) > 0 {
            let mut misled = self.0.misled.lock();
            misled.remove(node);
            self.0.misled_count.store(misled.count(), Ordering::Relaxed);
        }
    }

    /// The kernel refers to a file no more.
    pub fn forgets(&self, node: NodeId) {
        if let Some(pending) = self.of(node) {
            pending.is_forgotten.store(true, Ordering::SeqCst);
        }
        self.tells(node);
    }

    /// Whether the kernel knows a file by the size that it has, as far as can be told.
    pub fn knows_size(&self, fs: &FileSystem, node: NodeId, pending: Option<&Pending>) -> bool {
        // First: what is not staged any more is found below.
        let is_staged = pending.is_some_and(|pending| {
            let now = pending.attributes(fs, Ino { 0: node });
            now.is_ok_and(|(attr, size)| attr.size != size)
        });
        let is_misled =
            || self.0.misled_count.load(Ordering::Relaxed) > 0 && self.0.misled.lock().has(node);
        !is_staged && !is_misled()
    }

    /// Waits until one that has ended is no more, and its pages are dropped, as well as can be: false, they may not be. As long as `crowded` if too few
    /// workers would be left.
    fn wait_for(&self, pending: &Arc<Pending>, crowded: Duration) -> bool {
        let is_gone = |tables: &Tables| !tables.has(pending);
        let Some(notifier) = self.0.notifier.get() else {
            return is_gone(&self.0.tables.lock());
        };
        notifier.wait(crowded, |most| {
            notify::wait_at_most(most, &self.0.removed, &mut self.0.tables.lock(), is_gone)
        })
    }

    /// The same for who should not do without, and goes on in any case.
    fn wait_until_gone(&self, pending: &Arc<Pending>) {
        if !self.wait_for(pending, WAIT_CROWDED) {
            tracing::warn!(pending.node, "a file's pages are still cached");
        }
    }

    fn remove(&self, pending: &Arc<Pending>) {
        let files = &mut self.0.tables.lock().files;
        if let Some(found) = files.get(&pending.node)
            && Arc::ptr_eq(found, pending)
        {
            files.remove(&pending.node);
            self.0.count.fetch_sub(1, Ordering::Relaxed);
            self.0.removed.notify_all();
        }
    }
}

impl Pending {
    /// Whether the handle's changes are staged.
    fn is_of(&self, handle: u64) -> bool {
        self.stages(&self.state.lock(), handle)
    }

    fn is_staging(&self) -> bool {
        matches!(*self.state.lock(), State::Staging { .. })
    }

    /// Refuses what cannot be staged of a handle whose changes are.
    ///
    /// # Errors
    /// `EOPNOTSUPP`
    pub fn refuse(&self, handle: Option<u64>) -> std::result::Result<(), Errno> {
        match handle.is_some_and(|handle| self.is_of(handle)) {
            true => Err(Errno(libc::EOPNOTSUPP)),
            false => Ok(()),
        }
    }

    /// A change of the file that is not staged. The file is locked over it.
    pub fn change<T>(&self, change: impl FnOnce() -> T) -> T {
        let mut state = self.state.lock();
        if let State::Staging { is_disturbed, .. } = &mut *state {
            *is_disturbed = true;
        }
        change()
    }

    /// A read beside what is staged; `None`: it is one of the file.
    pub fn read(&self, file: &OpenFile, span: &Span, out: &mut [u8]) -> Option<Result<usize>> {
        let State::Staging { write, .. } = &*self.state.lock() else {
            return None;
        };
        Some(write.read(file, span.offset, out))
    }

    fn stages(&self, state: &State, handle: u64) -> bool {
        self.handle == handle && matches!(state, State::Staging { .. })
    }

    /// A new size that is staged; `None`: it is one of the file.
    pub fn truncate(&self, handle: Option<u64>, size: u64) -> Option<Result<()>> {
        match &mut *self.state.lock() {
            State::Staging { write, .. } if handle == Some(self.handle) => {
                Some(write.truncate(size))
            }
            _ => None,
        }
    }

    /// The file's attributes, and the size that the kernel has to know, of one moment.
    pub fn attributes(&self, fs: &FileSystem, ino: Ino) -> Result<(Attr, u64)> {
        let state = self.state.lock();
        let attr = fs.getattr(ino)?;
        let size = match &*state {
            State::Staging { write, .. } => write.size(attr.size),
            _ => attr.size,
        };
        Ok((attr, size))
    }
}

/// Whether an atomic write may be started through a handle with these open flags. Who opens files to write to them alone makes new ones mostly,
/// and is spared a request for each.
fn may_start(flags: i32) -> bool {
    flags & libc::O_ACCMODE == libc::O_RDWR
}

/// Whether the kernel may know another size than the file's once this is over: where another one is staged, and where others' changes went beside it, which the
/// kernel put behind the staged end. Who cannot be asked is taken for such a file.
fn misleads(fs: &FileSystem, node: NodeId, write: &AtomicWrite, is_disturbed: bool) -> bool {
    let real = fs.getattr(Ino { 0: node });
    is_disturbed || real.map_or(true, |attr| write.size(attr.size) != attr.size)
}

/// Whether the kernel sends a write under its lock of the file, one at a time.
fn is_buffered(span: &Span) -> bool {
    !span.from_page_cache && span.open_flags as i32 & libc::O_DIRECT == 0
}

/// Pages of a mapping, as the kernel has them: see invariant 3.
fn write_back(
    state: &mut State,
    fs: &FileSystem,
    file: &OpenFile,
    offset: u64,
    data: &[u8],
) -> Result<usize> {
    let real = fs.getattr(file.ino())?.size;
    let end = offset.saturating_add(data.len() as u64);
    let mut at = offset;
    while at < end {
        let page = at / PAGE;
        let next = ((page + 1) * PAGE).min(end);
        let part = |reaches: u64| {
            let to = next.min(reaches).max(at);
            &data[(at - offset) as usize..(to - offset) as usize]
        };
        match state {
            State::Staging { write, .. }
                if write.touches(&(at..next)) || is_cut(write.cut(), page) =>
            {
                let size = write.size(real);
                write.write(at, part(size))?;
            }
            State::Dropping(gone) if gone.has(page) => {}
            _ => write_all(fs, file, at, part(real))?,
        }
        at = next;
    }
    Ok(data.len())
}

/// Pages of a mapping of a file that has no atomic write. A mapping makes no file longer: what reaches further was cut meanwhile.
fn write_within(fs: &FileSystem, file: &OpenFile, offset: u64, data: &[u8]) -> Result<()> {
    let size = fs.getattr(file.ino())?.size;
    let reaches = size.saturating_sub(offset).min(data.len() as u64);
    write_all(fs, file, offset, &data[..reaches as usize])
}

fn write_all(fs: &FileSystem, file: &OpenFile, mut at: u64, mut left: &[u8]) -> Result<()> {
    while !left.is_empty() {
        let written = fs.write(file, at, left)?;
        (at, left) = (at + written as u64, &left[written..]);
    }
    Ok(())
}

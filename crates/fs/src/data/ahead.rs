//! Read-ahead by threads of their own: while a reader goes on where it stopped, they bring what it asks for next, so that the
//! devices work while it copies out. These fill the frames where the pages stay ([`engine::cache::Load`]).
//!
//! A task is a run of pages of one file. It is *queued*, then *taken* by a thread, which gets the file's I/O lock, shared as any
//! reader does, and then *loads*: from there to its end it waits for nothing but devices.
//!
//! Invariants:
//! 1. Who waits for a task holds the file's I/O lock, shared, and waits only while the task loads. So there is no circle: one that does
//!    not load yet may wait for that lock behind a writer that waits for the reader. Its pages the reader takes over, if it has asked
//!    for them, or else reads what it needs by itself.
//! 2. A task that was taken over or given up loads nothing: `begin` looks again, under the I/O lock.
//! 3. What a task brings is what a reader would bring: absences say whether it is still the pages' content ([`super::write`], 6), and
//!    the I/O lock keeps who cuts the file waiting until the task is done.
//! 4. There are at most [`TASKS`]; who finds no room for one reads for itself.

use super::file::{FileState, OpenFile};
use super::runs::ReadRun;
use super::{Files, PAGE};
use crate::Error;
use base::atomic::{AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::counted::Counted;
use base::sync::{Arc, Condvar, Mutex, rank};
use engine::cache::{FileKey, Load, WAYS};
use std::ops::Range;

/// Threads that read ahead: while one waits for devices, another has found what comes next.
const THREADS: usize = 2;
/// Pages of a task: a reader that has caught up waits for one.
pub(super) const PIECE: u64 = 256;
pub(super) const TASKS: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Queued,
    Taken,
    Loading,
}

#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) number: u64,
    /// Whose reader asked.
    handle: usize,
    pub(super) key: FileKey,
    pub(super) pages: Range<u64>,
    stage: Stage,
}

#[derive(Debug, Default)]
pub(super) struct Tasks {
    /// In the order in which they came.
    pub(super) list: Vec<Task>,
    next: u64,
    /// Threads take tasks.
    pub(super) open: bool,
}

/// What a reader that misses a page finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It was being loaded, and is cached by now, or cannot be.
    Loaded,
    /// Nobody loads it but the reader from now on; and as far as this page, which a task had asked for, nobody else will.
    Free(u64),
}

/// What is being read ahead.
#[derive(Debug)]
pub(super) struct Ahead {
    pub(super) tasks: Mutex<Tasks>,
    /// Tasks there are; a hint for who looks without the lock.
    count: AtomicUsize,
    /// A task is queued, or none will be any more.
    news: Condvar,
    /// A task has ended that somebody may wait for.
    ended: Condvar,
    handles: Mutex<Vec<base::thread::JoinHandle>>,
}

impl Ahead {
    pub fn new() -> Ahead {
        Ahead {
            tasks: Mutex::new(rank::LEAF, Tasks::default()),
            count: AtomicUsize::new(0),
            news: Condvar::new(),
            ended: Condvar::new(),
            handles: Mutex::new(rank::LEAF, Vec::new()),
        }
    }

    /// Asks for pages; false: nobody will read them.
    pub(super) fn ask(&self, handle: usize, key: FileKey, pages: Range<u64>) -> bool {
        if self.count.load(Ordering::Relaxed) >= TASKS {
            return false;
        }
        let mut tasks = self.tasks.lock();
        if !tasks.open || tasks.list.len() >= TASKS {
            return false;
        }
        if tasks.list.iter().any(|task| task.has(key, pages.start)) {
            return true;
        }
        tasks.next += 1;
        let number = tasks.next;
        tasks.list.push(Task {
            number,
            handle,
            key,
            pages,
            stage: Stage::Queued,
        });
        self.count.store(tasks.list.len(), Ordering::Relaxed);
        drop(tasks);
        self.news.notify_one();
        true
    }

    /// The next task; `None`: there will be no more.
    pub(super) fn take(&self) -> Option<Task> {
        let mut tasks = self.tasks.lock();
        loop {
            if !tasks.open {
                return None;
            }
            let next = tasks.list.iter_mut().find(|t| t.stage == Stage::Queued);
            if let Some(task) = next {
                task.stage = Stage::Taken;
                return Some(task.clone());
            }
            self.news.wait(&mut tasks);
        }
    }

    /// Invariant 2. The caller holds the file's I/O lock. False: the task is no more.
    pub(super) fn begin(&self, number: u64) -> bool {
        let mut tasks = self.tasks.lock();
        let task = tasks.list.iter_mut().find(|t| t.number == number);
        task.map(|task| task.stage = Stage::Loading).is_some()
    }

    pub(super) fn end(&self, number: u64) {
        self.retain(|task| task.number != number);
        self.ended.notify_all();
    }

    /// A reader that holds the file's I/O lock needs a page that is not cached.
    pub fn look_for(&self, handle: usize, key: FileKey, page: u64) -> Found {
        if self.count.load(Ordering::Relaxed) == 0 {
            return Found::Free(page + 1);
        }
        let mut tasks = self.tasks.lock();
        let mut waited = false;
        loop {
            let mut list = tasks.list.iter().enumerate();
            let Some((at, task)) = list.find(|(_, task)| task.has(key, page)) else {
                return match waited {
                    true => Found::Loaded,
                    false => Found::Free(page + 1),
                };
            };
            if task.stage != Stage::Loading {
                // Another reader's, which may want all of it, finds this page cached.
                if task.handle != handle {
                    return Found::Free(page + 1);
                }
                let task = tasks.list.remove(at);
                self.count.store(tasks.list.len(), Ordering::Relaxed);
                return Found::Free(task.pages.end);
            }
            waited = true;
            self.ended.wait(&mut tasks);
        }
    }

    /// Nobody wants what this handle has asked for.
    pub(super) fn give_up(&self, handle: usize) {
        self.retain(|task| task.handle != handle || task.stage == Stage::Loading);
    }

    fn retain(&self, wanted: impl Fn(&Task) -> bool) {
        let mut tasks = self.tasks.lock();
        tasks.list.retain(wanted);
        self.count.store(tasks.list.len(), Ordering::Relaxed);
    }

    /// No task begins from now on.
    pub fn close(&self) {
        self.tasks.lock().open = false;
        self.news.notify_all();
    }

    /// The same, and waits for the threads.
    pub fn stop(&self) {
        self.close();
        for thread in std::mem::take(&mut *self.handles.lock()) {
            if thread.join().is_err() {
                // Nothing is lost: readers read.
                tracing::error!("a thread that reads ahead panicked");
            }
        }
    }
}

impl Task {
    fn has(&self, key: FileKey, page: u64) -> bool {
        self.key == key && self.pages.contains(&page)
    }
}

/// Ends a task, even if its thread panics: readers wait for that.
struct Ending<'a>(&'a Ahead, u64);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

impl Files {
    /// Has read what lies behind a request that goes on where the last one ended, `window` pages of it, if this run has
    /// had to wait for a device: what is cached needs nobody. Returns how many the request itself reads beyond what it wants, if it must read.
    pub(super) fn ask_ahead(
        &self,
        file: &OpenFile,
        run: &ReadRun,
        bytes: Range<u64>,
        window: u64,
    ) -> u64 {
        let asked = run.asked.load(Ordering::Relaxed);
        if asked == 0 {
            return window;
        }
        // These must not push out each other: one page for each set, at most.
        let window = window.min((self.pages.capacity() / WAYS) as u64).max(1);
        let (end, last) = (bytes.end.div_ceil(PAGE), file.state.size().div_ceil(PAGE));
        let (mut from, wanted) = (asked.max(end), (end + window).min(last));
        // In pieces, each as soon as there is room for it; not what is less, but at the end of the file.
        let piece = PIECE.min(window.div_ceil(2));
        while from < wanted && (from + piece <= wanted || wanted == last) {
            let pages = from..(from + PIECE).min(wanted);
            let absent = |page| self.pages.absence(file.state.key, page).is_some();
            let needed = absent(pages.start) || absent(pages.end - 1);
            if needed && !self.ahead.ask(file.id(), file.state.key, pages.clone()) {
                break;
            }
            from = pages.end;
        }
        run.asked.store(from, Ordering::Relaxed);
        match from > end {
            true => 0,
            false => window,
        }
    }

    /// A handle is closed: what it has asked for may be wanted by nobody.
    pub(super) fn end_ahead(&self, file: &OpenFile) {
        let mut runs = file.reads.iter();
        if runs.any(|run| run.asked.load(Ordering::Relaxed) > 0) {
            self.ahead.give_up(file.id());
        }
    }

    /// Starts the threads that read ahead.
    pub(crate) fn start_ahead(self: &std::sync::Arc<Self>) -> Result<(), Error> {
        self.ahead.tasks.lock().open = true;
        for _ in 0..THREADS {
            let (files, ahead) = (std::sync::Arc::downgrade(self), Arc::clone(&self.ahead));
            let body = move || {
                let _unhurried = device::Unhurried::begin();
                while let Some(task) = ahead.take() {
                    let _end = Ending(&ahead, task.number);
                    let Some(files) = files.upgrade() else {
                        return;
                    };
                    if let Err(error) = files.read_task(&task) {
                        // Who needs these pages reads them, and is told.
                        tracing::debug!("read-ahead of inode {}: {error}", task.key.nid);
                    }
                }
            };
            let started = base::thread::spawn("sheaf-read-ahead", body);
            let handle = started.map_err(|e| engine::Error::Thread(std::sync::Arc::new(e)))?;
            self.ahead.handles.lock().push(handle);
        }
        Ok(())
    }

    pub(super) fn read_task(&self, task: &Task) -> Result<(), Error> {
        let Some(state) = self.use_active(task.key.nid) else {
            return Ok(());
        };
        if state.key != task.key {
            return Ok(());
        }
        let shared = match planted(Canary::AheadPastCut) {
            true => None,
            // It is a hint: no thread waits for somebody who writes, while others read.
            false => match state.try_lock_shared()? {
                None => return Ok(()),
                shared => shared,
            },
        };
        if !self.ahead.begin(task.number) {
            return Ok(());
        }
        self.bring(&state, task.pages.clone())?;
        drop(shared);
        Ok(())
    }

    /// Caches those of these pages that are not, in the frames where they stay. The caller holds the I/O lock.
    fn bring(&self, state: &Counted<FileState>, pages: Range<u64>) -> Result<(), Error> {
        let end = pages.end.min(state.size().div_ceil(PAGE));
        let mut at = pages.start;
        while at < end {
            let Some(loads) = self.framed(state, at..end, 1)? else {
                // They would not be kept.
                return Ok(());
            };
            at += (loads.len() as u64).max(1);
            let kept = loads.into_iter().map(Load::publish);
            let kept = kept.filter(|&kept| kept).count();
            self.pages.brought(0, kept as u64);
        }
        Ok(())
    }
}

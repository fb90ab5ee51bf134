//! Inodes that a listing with attributes comes to next, read ahead of it by a thread: while a reader makes use of what it was
//! given, as the kernel does of a READDIRPLUS reply, the devices and the other processors work on what it asks for next.
//!
//! A *course* is a listing that goes on where it stopped and had to read inodes. It is *due* when its reader has come to what the last
//! task of it brought; then the thread *takes* it, finds the names, and *brings* their inodes in the order of the names.
//!
//! Invariants:
//! 1. Who waits for a task holds nothing, and waits only for names that the task brings: it is sure to come to them, or to end.
//! 2. A course whose next inodes are all in memory ends, and so does one at the end of its directory: a listing of what is cached
//!    wakes nobody.
//! 3. There are at most [`COURSES`], each with one task of [`NAMES`] names at a time. What one brings is what the reader would
//!    have read by itself ([`Store::read_ahead`]), and it does so where no task does.

use super::INODES_AT_ONCE;
use crate::Error;
use crate::api::Ino;
use crate::content::{FsNode, Name};
use crate::directory::dir_of;
use crate::list;
use base::atomic::{AtomicUsize, Ordering};
use base::sync::{Condvar, Mutex, MutexGuard, rank};
use engine::Store;
use std::ops::Range;
use std::sync::Arc;

/// Names of one task: a bit more than two replies of the size that programs ask for have.
pub(super) const NAMES: usize = 512;
pub(super) const COURSES: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    /// Until the reader comes to what was brought.
    Resting,
    Due,
    Taken,
    /// Keys of which the inodes are still to come.
    Bringing(Range<u64>),
}

#[derive(Debug)]
struct Course {
    number: u64,
    dir: Ino,
    /// Where the reader's last request began and ended.
    reader: Range<u64>,
    /// Where the last task began, and where the next one does.
    brought: Range<u64>,
    stage: Stage,
}

/// What the thread is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Task {
    number: u64,
    dir: Ino,
    pub(super) from: u64,
}

#[derive(Debug, Default)]
struct Courses {
    /// Those that were served last come last.
    list: Vec<Course>,
    next: u64,
    waiting: usize,
    /// There is a thread.
    open: bool,
}

/// What is read ahead of listings.
#[derive(Debug)]
pub(crate) struct Ahead {
    courses: Mutex<Courses>,
    /// Courses there are; a hint for who looks without the lock.
    count: AtomicUsize,
    /// A course is due, or none will be any more.
    news: Condvar,
    /// A task has gone on, and somebody waits for that.
    moved: Condvar,
    thread: Mutex<Option<base::thread::JoinHandle>>,
}

impl Course {
    fn is_due(&self) -> bool {
        let used = self.reader.end > self.brought.start;
        self.stage == Stage::Resting && (used || self.brought.is_empty())
    }
}

impl Ahead {
    pub fn new() -> Ahead {
        Ahead {
            courses: Mutex::new(rank::LEAF, Courses::default()),
            count: AtomicUsize::new(0),
            news: Condvar::new(),
            moved: Condvar::new(),
            thread: Mutex::new(rank::LEAF, None),
        }
    }

    /// Waits while a task brings any of these keys' inodes.
    pub fn wait_for(&self, dir: Ino, keys: Range<u64>) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let coming = |course: &Course| match &course.stage {
            Stage::Bringing(rest) => {
                course.dir == dir && rest.start < keys.end && keys.start < rest.end
            }
            _ => false,
        };
        let mut courses = self.courses.lock();
        while courses.list.iter().any(coming) {
            courses.waiting += 1;
            self.moved.wait(&mut courses);
            courses.waiting -= 1;
        }
    }

    /// A listing went on, over these keys, and goes on behind them; `read`: it had to read inodes by itself.
    pub fn went_on(&self, dir: Ino, keys: Range<u64>, read: bool) {
        if !read && self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut courses = self.courses.lock();
        if !courses.open {
            return;
        }
        let follows = |course: &&mut Course| {
            course.dir == dir && (course.reader.start..=course.brought.end).contains(&keys.start)
        };
        let at = match courses.list.iter_mut().find(follows) {
            Some(course) => {
                course.brought.end = course.brought.end.max(keys.end);
                course.reader = keys;
                course
            }
            None if read => {
                if courses.list.len() == COURSES {
                    let idle =
                        |course: &Course| matches!(course.stage, Stage::Resting | Stage::Due);
                    let Some(longest) = courses.list.iter().position(idle) else {
                        return;
                    };
                    courses.list.remove(longest);
                }
                courses.next += 1;
                let course = Course {
                    number: courses.next,
                    dir,
                    brought: keys.end..keys.end,
                    reader: keys,
                    stage: Stage::Resting,
                };
                courses.list.push(course);
                self.count.store(courses.list.len(), Ordering::Relaxed);
                let Some(course) = courses.list.last_mut() else {
                    return;
                };
                course
            }
            None => return,
        };
        if at.is_due() {
            at.stage = Stage::Due;
            drop(courses);
            self.news.notify_one();
        }
    }

    /// The next task; `None`: there will be no more.
    pub(super) fn take(&self) -> Option<Task> {
        let mut courses = self.courses.lock();
        loop {
            if !courses.open {
                return None;
            }
            let mut list = courses.list.iter_mut();
            if let Some(course) = list.find(|course| course.stage == Stage::Due) {
                course.stage = Stage::Taken;
                return Some(Task {
                    number: course.number,
                    dir: course.dir,
                    from: course.brought.end,
                });
            }
            self.news.wait(&mut courses);
        }
    }

    /// A task brings these keys' inodes from now on.
    pub(super) fn begin(&self, task: Task, keys: Range<u64>) {
        self.update(task, |course| {
            course.brought = task.from..keys.end.max(course.brought.end);
            course.stage = Stage::Bringing(keys);
        });
    }

    /// It has brought those before `key`.
    pub(super) fn reached(&self, task: Task, key: u64) {
        self.update(task, |course| {
            if let Stage::Bringing(rest) = &mut course.stage {
                rest.start = key;
            }
        });
    }

    /// It is over; `more`: the course goes on (invariant 2).
    pub(super) fn end(&self, task: Task, more: bool) {
        let mut courses = self.courses.lock();
        let mut list = courses.list.iter();
        if let Some(at) = list.position(|course| course.number == task.number) {
            let mut course = courses.list.remove(at);
            if more {
                course.stage = Stage::Resting;
                if course.is_due() {
                    course.stage = Stage::Due;
                }
                courses.list.push(course);
            }
            self.count.store(courses.list.len(), Ordering::Relaxed);
        }
        self.tell(courses);
    }

    fn update(&self, task: Task, change: impl FnOnce(&mut Course)) {
        let mut courses = self.courses.lock();
        let mut list = courses.list.iter_mut();
        if let Some(course) = list.find(|course| course.number == task.number) {
            change(course);
        }
        self.tell(courses);
    }

    fn tell(&self, courses: MutexGuard<'_, Courses>) {
        if courses.waiting > 0 {
            drop(courses);
            self.moved.notify_all();
        }
    }

    /// Starts the thread; it keeps the store only while it is at a task.
    pub fn start(self: &Arc<Self>, store: &Arc<Store<FsNode>>) -> Result<(), Error> {
        self.courses.lock().open = true;
        let (store, ahead) = (Arc::downgrade(store), Arc::clone(self));
        let body = move || {
            let _unhurried = device::Unhurried::begin();
            while let Some(task) = ahead.take() {
                let mut ending = Ending {
                    ahead: &ahead,
                    task,
                    more: false,
                };
                let Some(store) = store.upgrade() else {
                    return;
                };
                match ahead.bring(&store, task) {
                    Ok(more) => ending.more = more,
                    // Who lists finds the same, and tells.
                    Err(error) => tracing::debug!("ahead of a listing of {}: {error}", task.dir),
                }
            }
        };
        let started = base::thread::spawn("sheaf-list-ahead", body);
        let handle = started.map_err(|e| engine::Error::Thread(Arc::new(e)))?;
        *self.thread.lock() = Some(handle);
        Ok(())
    }

    /// Whether any had to be read, and there are more names.
    fn bring(&self, store: &Store<FsNode>, task: Task) -> Result<bool, Error> {
        let mut names: Vec<Name> = Vec::new();
        let mut from = Some(task.from);
        while let Some(key) = from
            && names.len() < NAMES
        {
            let node = dir_of(store.get(task.dir)?.into_read()?)?;
            let (run, next) = list::run_from::<Name>(store, node.inode()?, key)?;
            names.extend(run);
            from = next;
        }
        let Some(last) = names.last() else {
            return Ok(false);
        };
        self.begin(task, task.from..last.key + 1);
        let mut read = 0;
        for names in names.chunks(INODES_AT_ONCE) {
            read += store.read_ahead(names.iter().map(|name| name.nid));
            if let Some(last) = names.last() {
                self.reached(task, last.key + 1);
            }
        }
        Ok(read > 0 && from.is_some())
    }

    /// No task begins from now on.
    pub fn close(&self) {
        self.courses.lock().open = false;
        self.news.notify_all();
    }

    /// The same, and waits for the thread.
    pub fn stop(&self) {
        self.close();
        let thread = self.thread.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            // Nothing is lost: who lists reads.
            tracing::error!("the thread that reads ahead of listings panicked");
        }
    }
}

/// Ends a task, even if its thread panics: readers wait for that.
struct Ending<'a> {
    ahead: &'a Ahead,
    task: Task,
    more: bool,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.ahead.end(self.task, self.more);
    }
}

#[cfg(test)]
impl Ahead {
    /// As with a thread, whose turns the test takes.
    pub(super) fn open_for_test(&self) {
        self.courses.lock().open = true;
    }

    /// Does one task.
    pub(super) fn turn(&self, store: &Store<FsNode>) {
        if let Some(task) = self.take() {
            let more = self.bring(store, task).unwrap_or_default();
            self.end(task, more);
        }
    }

    pub(super) fn courses(&self) -> usize {
        self.courses.lock().list.len()
    }

    pub(super) fn is_due(&self) -> bool {
        let courses = self.courses.lock();
        let mut list = courses.list.iter();
        courses.open && list.any(|course| course.stage == Stage::Due)
    }

    pub(super) fn is_waited_for(&self) -> bool {
        self.courses.lock().waiting > 0
    }

    /// The key that a task for a directory comes to next, if there is one.
    pub(super) fn came_to(&self, dir: Ino) -> u64 {
        let courses = self.courses.lock();
        let mut list = courses.list.iter().filter(|course| course.dir == dir);
        list.find_map(|course| match &course.stage {
            Stage::Bringing(rest) => Some(rest.start),
            _ => None,
        })
        .unwrap_or(u64::MAX)
    }
}

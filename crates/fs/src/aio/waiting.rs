//! What has to wait is done by threads of a pool, by the same calls as of a program that waits.
//!
//! 1. A request that was handed over is answered once, also when the call panics.
//! 2. A thread drops its hold of the file before it answers: that may delete the file, which takes a while. Syncs of one file share threads ([`syncs`](super::syncs)).
//! 3. A thread may be the last to let the file system go, with a file that it deletes: so nothing that ends with the file system waits
//!    for one of these threads, but [`Workers::finish`], which [`FileSystem::close`](crate::FileSystem::close) calls.
//! 4. What needs no device is not kept waiting by what does, as long as there may be more threads: reads that wait for devices are none of what is soon over, nor are
//!    writes to a file that somebody writes back just now; and of one file so many writes are given to threads at a time that those of others have some, too ([`needs`]).

use super::context::{Done, Request};
use super::syncs::Syncs;
use crate::data::{Files, Going, OpenFile};
use crate::{Error, Ino};
use base::sync::{Mutex, rank};
use base::thread::{GrowingPool, Line, Needs, cpu_count};
use device::{AlignedBuf, Bell};
use std::sync::{Arc, OnceLock};

/// Threads that wait for devices at most, of a file system. There are as many as requests that wait at once, and 2 s longer ([`GrowingPool`]).
const THREADS_MAX: usize = 128;
/// Threads for what is soon over, for each CPU, and altogether; and as many for reads in order.
const FEW_PER_CPU: usize = 4;
const FEW_MAX: usize = 16;
/// Bytes of a read that is large.
const LARGE: usize = 128 << 10;

/// The pool, made when somebody needs it.
#[derive(Debug, Default)]
pub(crate) struct Workers(OnceLock<Pool>);

/// Its copies are one.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    threads: Arc<GrowingPool>,
    /// For what is soon over.
    few: usize,
    syncs: Arc<Syncs>,
}

impl Pool {
    /// As [`GrowingPool::give`].
    pub fn give(&self, needs: Needs, job: impl FnOnce() + Send + 'static) {
        self.threads.give(needs, job);
    }

    /// Whether the threads are still there.
    #[cfg(test)]
    pub fn watch(&self) -> std::sync::Weak<GrowingPool> {
        Arc::downgrade(&self.threads)
    }
}

impl Workers {
    pub(super) fn pool(&self) -> Result<Pool, Error> {
        if let Some(pool) = self.0.get() {
            return Ok(pool.clone());
        }
        let few = (cpu_count() * FEW_PER_CPU).min(FEW_MAX);
        let threads = GrowingPool::start("sheaf-aio", THREADS_MAX, few).map_err(|error| {
            Error::Store(engine::Error::from(device::Error::Threads {
                source: Arc::new(error),
            }))
        })?;
        let pool = Pool {
            threads: Arc::new(threads),
            few,
            syncs: Syncs::new(),
        };
        // Another one's is as good.
        Ok(self.0.get_or_init(|| pool).clone())
    }

    /// Waits for all that the threads were given.
    pub fn finish(&self) {
        if let Some(pool) = self.0.get() {
            // Some of these are given to threads by others that end.
            pool.syncs.finish();
            pool.threads.finish();
        }
    }
}

/// Answers of the pool, for one owner.
#[derive(Debug)]
pub(super) struct Answers {
    done: Mutex<Vec<(u32, Done)>>,
    bell: Arc<Bell>,
}

impl Answers {
    pub fn new(bell: Arc<Bell>) -> Arc<Answers> {
        let done = Mutex::new(rank::LEAF, Vec::new());
        Arc::new(Answers { done, bell })
    }

    pub fn take(&self, all: &mut Vec<(u32, Done)>) {
        all.append(&mut self.done.lock());
    }

    /// Has the pool do a request, and answer with this number. `going`: what was noted of a read.
    pub fn ask(self: &Arc<Self>, pool: &Pool, number: u32, request: Request, going: Option<Going>) {
        let mut answer = Answer {
            to: Arc::clone(self),
            number,
            ino: request.file().ino(),
            told: false,
        };
        match request {
            Request::Fsync { file, data_only } => {
                (pool.syncs).ask(&pool.threads, file, data_only, answer);
            }
            request => {
                let (needs, line) = needs(&request, going, pool.few);
                let job = move || {
                    let done = perform(request, going);
                    answer.tell(done);
                };
                match line {
                    Some(line) => pool.threads.give_in_line(needs, line, job),
                    None => pool.give(needs, job),
                }
            }
        }
    }
}

/// The duty to answer (invariant 1).
#[derive(Debug)]
pub(super) struct Answer {
    to: Arc<Answers>,
    number: u32,
    ino: Ino,
    told: bool,
}

impl Answer {
    pub fn tell(&mut self, done: Done) {
        self.told = true;
        self.to.done.lock().push((self.number, done));
        self.to.bell.ring();
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.told {
            let why = "the thread that was at it panicked".to_owned();
            let result = Err(Error::WriteFailed { ino: self.ino, why });
            let buf = AlignedBuf::zeroed(0);
            self.tell(Done {
                buf,
                offset: None,
                result,
            });
        }
    }
}

/// What a request does for which there is a thread, by what can be told at once, and the line in which it stands with others of its file. `few`: threads
/// for what is soon over.
fn needs(request: &Request, going: Option<Going>, few: usize) -> (Needs, Option<Line>) {
    let file = request.file();
    let is_past = file.flags() & (libc::O_DIRECT | libc::O_DSYNC) != 0;
    let alone = match request {
        // Threads that read ahead bring it; or it is so much that memory takes as long as devices.
        Request::Read { buf, .. } => {
            let is_common = going.is_some_and(Going::is_ahead) || buf.len() >= LARGE;
            return match is_common {
                true => (Needs::Common, None),
                false => (Needs::Wait, None),
            };
        }
        Request::Write { offset, buf, .. } => {
            if is_past || file.files().has_to_load(file, *offset, buf.len()) {
                return (Needs::Wait, None);
            }
            file.is_longer_by(*offset, buf.len())
        }
        Request::Append { .. } if is_past => return (Needs::Wait, None),
        Request::Append { .. } => true,
        Request::Fsync { .. } => unreachable!("they have threads together"),
    };
    let line = Line {
        name: file.identity(),
        // One at a time can be at what takes a file alone.
        at_once: if alone { 1 } else { few / 2 },
    };
    match file.is_taken() {
        true => (Needs::Wait, Some(line)),
        false => (Needs::Little, Some(line)),
    }
}

fn perform(request: Request, going: Option<Going>) -> Done {
    fn files(file: &OpenFile) -> &Files {
        file.files()
    }
    let mut appended = None;
    let (buf, result) = match request {
        Request::Read {
            file,
            offset,
            mut buf,
        } => {
            let result = files(&file).read_going(&file, offset, &mut buf, going);
            (buf, result)
        }
        Request::Write { file, offset, buf } => {
            let result = files(&file).write(&file, offset, &buf);
            (buf, result)
        }
        Request::Append { file, buf } => {
            let done = files(&file).append(&file, &buf);
            appended = done.as_ref().ok().map(|(offset, _)| *offset);
            (buf, done.map(|(_, len)| len))
        }
        Request::Fsync { .. } => unreachable!("they have threads together"),
    };
    Done {
        buf,
        offset: appended,
        result,
    }
}

//! Requests of one owner, who hands them over in batches and asks for those that are done.
//!
//! 1. Each request that was taken is completed once: by `poll`, by `wait`, or by its callback, and none by `submit`. One that
//!    was not taken is the caller's still.
//! 2. A context has its requests alone, and may be handed from thread to thread. Between calls it holds nothing that
//!    somebody else waits for but the ranges of writes in flight; and who waits for these lands them himself ([`InFlight`]). So an
//!    owner who never asks again hurts nobody.
//! 3. A context that is dropped cancels reads, waits for the rest, and completes nothing; of writes and syncs that failed the files know ([`Owed`]).
//! 4. Nothing here waits for a device but `wait` and `drop`, where devices know how to do things meanwhile (io_uring, a pool); but
//!    beginning a transfer may wait for whoever has the file's inode locked while a part of its mapping is read.
//! 5. What is in flight, and what became of it, is behind one lock, which the owner has while it is at it, also while it waits, and
//!    others only try. Who has it waits for no range and no file's I/O lock.
//! 6. Who lands writes for others may be the last to have what is in flight, and has a file's I/O lock. So a context that is dropped leaves
//!    him nothing of which the end waits: neither a request, nor the pool, whose threads may wait for that very lock.

use super::owed::Owed;
use super::waiting::{Answers, Pool};
use crate::data::{Began, Files, Flying, InFlight, OpenFile, Writing};
use crate::{Error, FileSystem, Ino};
use base::atomic::{AtomicU64, Ordering};
use base::clock::{self, Clock};
use base::sync::{Mutex, MutexGuard, rank};
use base::thread::Needs;
use device::{AlignedBuf, Bell, Durability, Flight, FlightId, Kind, Landed, Queues, Run};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Requests of one context at most.
const DEPTH_MAX: u32 = 1 << 16;
/// Transfers of one context that a device has at a time; more wait in the context.
const DEVICE_DEPTH_MAX: usize = 256;
/// How often a read begins again before it is done by a call that keeps others out.
const TRIES: u8 = 3;

/// Something to be done to a file.
#[derive(Debug)]
pub enum Request {
    /// Reads up to as many bytes as the buffer has; fewer only at the end of the file.
    Read {
        file: Arc<OpenFile>,
        offset: u64,
        buf: AlignedBuf,
    },
    /// Writes the buffer, at the end of a file that was opened with `O_APPEND`.
    Write {
        file: Arc<OpenFile>,
        offset: u64,
        buf: AlignedBuf,
    },
    /// As [`FileSystem::append`]: the completion tells where.
    Append {
        file: Arc<OpenFile>,
        buf: AlignedBuf,
    },
    /// As [`FileSystem::fsync`], of all that was completed before. Those of one file that are in flight at once share calls.
    Fsync {
        file: Arc<OpenFile>,
        data_only: bool,
    },
}

impl Request {
    pub(super) fn file(&self) -> &Arc<OpenFile> {
        match self {
            Request::Read { file, .. }
            | Request::Write { file, .. }
            | Request::Append { file, .. }
            | Request::Fsync { file, .. } => file,
        }
    }

    pub(super) fn into_buf(self) -> AlignedBuf {
        match self {
            Request::Read { buf, .. }
            | Request::Write { buf, .. }
            | Request::Append { buf, .. } => buf,
            Request::Fsync { .. } => AlignedBuf::zeroed(0),
        }
    }
}

/// A request that has ended.
#[derive(Debug)]
pub struct Completion {
    /// The number it was submitted with.
    pub user: u64,
    /// The request's buffer; empty of one that had none. What a read that failed leaves in it is nothing to rely on.
    pub buf: AlignedBuf,
    /// Where in the file: the request's own offset, or where an append was written.
    pub offset: u64,
    /// Bytes read or written.
    pub result: Result<usize, Error>,
    /// Of a write that failed, or wrote less, and of a sync that told of one, until somebody has this.
    pub(super) owed: Option<Box<Owed>>,
}

impl Completion {
    /// It is the caller's from now on.
    pub(super) fn hand_over(mut self) -> Completion {
        if let Some(owed) = self.owed.take() {
            owed.told();
        }
        self
    }
}

/// How a request ended, without its number.
#[derive(Debug)]
pub(super) struct Done {
    pub buf: AlignedBuf,
    /// Of an append.
    pub offset: Option<u64>,
    pub result: Result<usize, Error>,
}

/// When what was taken, or begins again, is started.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// Also if nobody waits, while there is always something that has ended.
    Now,
    /// By the call of the kernel that waits, if it comes to one; its owner sees to that.
    ByWait,
}

type Callback = Box<dyn FnOnce(&mut IoContext, Completion) + Send>;

/// A request that was taken.
#[derive(Default)]
struct Pending {
    user: u64,
    then: Option<Callback>,
    /// Whose content it writes, or makes durable.
    writes: Option<(Ino, u64)>,
    /// Of a request in flight, and until it is completed.
    file: Option<Arc<OpenFile>>,
    offset: u64,
    flying: Flying,
    /// The request's memory, while what flies is another.
    own: Option<AlignedBuf>,
    writing: Option<Writing>,
    flight: Option<FlightId>,
    tries: u8,
}

/// Up to so many requests in flight at a time, of one owner: made by [`FileSystem::io_context`], as many as are wanted, and handed from thread to
/// thread as one likes.
///
/// [`submit`](Self::submit) takes [`Request`]s as long as there is room, each with its memory and its file, and does not wait for devices: reads, and direct writes over blocks that
/// the file has, are handed to these, and whatever else has to wait is for a thread of a pool. Up to 65,536 requests are a context's depth; a device has
/// 256 transfers of it at a time at most, and the rest wait in the context.
/// Requests in flight have no order among each other: who needs one waits for the first before it submits the second.
///
/// Each request that was taken is completed once, by [`poll`](Self::poll), which does not wait, or by [`wait`](Self::wait): as a [`Completion`] that has the memory again, or by
/// the callback that it was [submitted with](Self::submit_with). Callbacks are called in whoever polls or waits, and may submit. Nobody has to ask: other
/// calls, syncs and the end of the file system do not wait for an owner who never does.
///
/// Errors are those that the plain calls have, in [`Completion::result`]; [`Error::Cancelled`] of a read that was [cancelled](Self::cancel) or whose handle was
/// [closed](FileSystem::close_file) meanwhile, [`Error::BadHandle`] of a handle that was closed before. A write that failed and that nobody was told of is
/// reported by the file's next sync.
///
/// Dropped, it cancels reads, waits for writes and syncs, and completes nothing: no callback is called. So a drop blocks while a device that has one of its writes, or a read that
/// cannot be cancelled, does not answer.
pub struct IoContext {
    shared: Arc<Shared>,
    depth: usize,
    bell: Arc<Bell>,
    /// What is being completed.
    ended: VecDeque<(Option<Callback>, Completion)>,
}

/// What others may land.
struct Shared {
    inner: Mutex<Inner>,
    bell: Arc<Bell>,
    /// How often a handle was closed.
    closed: AtomicU64,
    /// Writes that have begun and not landed; counted before it is asked whether they may begin.
    writes: Arc<AtomicU64>,
}

struct Inner {
    files: Arc<Files>,
    /// Until the context is dropped: its end waits for threads, so it is nothing for who lands writes (invariant 6).
    pool: Option<Pool>,
    queues: Queues,
    /// By the numbers that flights and answers have.
    pending: Vec<Pending>,
    free: Vec<u32>,
    done: VecDeque<(u32, Done)>,
    answers: Arc<Answers>,
    /// Requests that the pool has.
    asked: usize,
    /// As [`Shared::writes`].
    writes: Arc<AtomicU64>,
    /// Handles that had been closed when this was looked at.
    closed: u64,
    /// Reads that somebody else has found landed.
    reads: Vec<Landed>,
    /// Kept for their memory.
    landed: Vec<Landed>,
    answered: Vec<(u32, Done)>,
    runs: Vec<Run>,
}

impl FileSystem {
    /// A context for up to `depth` requests at a time.
    ///
    /// # Errors
    /// There are no threads or rings to be had.
    pub fn io_context(&self, depth: u32) -> Result<IoContext, Error> {
        let depth = depth.clamp(1, DEPTH_MAX) as usize;
        let device_depth = depth.min(DEVICE_DEPTH_MAX);
        let queues = Queues::new(self.store.array(), depth, device_depth);
        let queues = queues.map_err(engine::Error::from)?;
        let bell = Arc::clone(queues.bell());
        let writes = Arc::new(AtomicU64::new(0));
        let inner = Inner {
            files: Arc::clone(&self.files),
            pool: Some(self.workers.pool()?),
            answers: Answers::new(Arc::clone(&bell)),
            queues,
            pending: (0..depth).map(|_| Pending::default()).collect(),
            free: (0..depth as u32).rev().collect(),
            done: VecDeque::with_capacity(depth),
            asked: 0,
            writes: Arc::clone(&writes),
            closed: 0,
            reads: Vec::with_capacity(depth),
            landed: Vec::with_capacity(depth),
            answered: Vec::with_capacity(depth),
            runs: Vec::with_capacity(8),
        };
        let shared = Arc::new(Shared {
            inner: Mutex::new(rank::IO_CONTEXT, inner),
            bell: Arc::clone(&bell),
            closed: AtomicU64::new(0),
            writes,
        });
        let weak = Arc::downgrade(&shared);
        self.files.add_in_flight(weak);
        Ok(IoContext {
            shared,
            depth,
            bell,
            ended: VecDeque::with_capacity(depth),
        })
    }
}

impl IoContext {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.shared.inner.lock()
    }

    /// Requests that were taken and are not completed.
    pub fn in_flight(&self) -> usize {
        self.inner().in_flight() + self.ended.len()
    }

    /// So many buffers of `len` bytes each, zeroed, for requests of this context. Where devices are reached by io_uring the kernel looks their memory up now, once, in
    /// the place of once for each transfer ("registered buffers"): some 0.3 µs less of processor time for 4 KiB. To everything else they are buffers like
    /// others, also to other contexts, and they outlive this one.
    ///
    /// For who keeps them: all of their memory stays until the last of them, and the context, are gone. Up to 16 calls for a context count, of at most 1 GiB each, and no more than the
    /// process may lock (`ulimit -l`); buffers beyond that are ordinary ones.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the machine has no memory for so many.
    pub fn buffers(&mut self, len: usize, count: usize) -> Result<Vec<AlignedBuf>, Error> {
        let made = self.inner().queues.buffers(len, count);
        made.ok_or(Error::Invalid("more buffers than there is memory for"))
    }

    /// Takes requests from the front, each with a number of the caller's, as long as there is room; returns how many. They are
    /// started together.
    #[must_use = "requests for which there was no room stay in the vector"]
    pub fn submit(&mut self, requests: &mut Vec<(u64, Request)>) -> usize {
        let mut inner = self.inner();
        let taken = inner.take_all(requests);
        inner.queues.ring();
        taken
    }

    /// [`submit`](Self::submit), then [`wait`](Self::wait), with one call of the kernel where that does both; returns how many
    /// requests it took.
    pub fn submit_and_wait(
        &mut self,
        requests: &mut Vec<(u64, Request)>,
        at_least: usize,
        out: &mut Vec<Completion>,
        patience: Option<Duration>,
    ) -> usize {
        let taken = self.inner().take_all(requests);
        self.wait(at_least, out, patience);
        taken
    }

    /// As [`submit`](Self::submit) of one request, and `then` is called with its completion by `poll` or `wait`, under no lock;
    /// it may submit others.
    ///
    /// # Errors
    /// There is no room; the request is given back.
    pub fn submit_with(
        &mut self,
        request: Request,
        then: impl FnOnce(&mut IoContext, Completion) + Send + 'static,
    ) -> Result<(), Box<Request>> {
        let mut inner = self.inner();
        if inner.free.is_empty() {
            return Err(Box::new(request));
        }
        let then = move |context: &mut IoContext, done: Completion| then(context, done.hand_over());
        inner.take(0, request, Some(Box::new(then)));
        inner.queues.ring();
        Ok(())
    }

    pub(super) fn has_room(&self) -> bool {
        !self.inner().free.is_empty()
    }

    /// As [`submit_with`](Self::submit_with) when there is room, but that somebody else has it started: by waiting, or by
    /// asking for what is done. Who gets the completion may be gone: it is for `then` to hand it over.
    pub(super) fn add(
        &mut self,
        number: u64,
        request: Request,
        then: impl FnOnce(&mut IoContext, Completion) + Send + 'static,
    ) {
        self.inner().take(number, request, Some(Box::new(then)));
    }

    /// Lets go of the file of a request that is not to be made: the last one to do so may have to delete it, and wait for that.
    pub(super) fn let_go(&mut self, request: Request) {
        let file = Arc::clone(request.file());
        drop(request);
        self.inner().let_go(file);
    }

    /// As [`cancel`](Self::cancel), of those that were [added](Self::add) with such numbers.
    pub(super) fn cancel_added(&mut self, which: impl Fn(u64) -> bool) {
        self.inner()
            .cancel(|pending| pending.then.is_some() && which(pending.user));
    }

    /// Completes what has ended, without waiting: puts completions behind those in `out`, and calls callbacks. Returns how many
    /// requests it completed.
    pub fn poll(&mut self, out: &mut Vec<Completion>) -> usize {
        self.complete(Start::Now, |completion| out.push(completion.hand_over()))
    }

    /// As [`poll`](Self::poll), with completions for whoever that is.
    fn complete(&mut self, start: Start, mut to: impl FnMut(Completion)) -> usize {
        {
            let mut inner = self.shared.inner.lock();
            inner.give_up_closed(&self.shared.closed);
            inner.reap();
            inner.end(&mut self.ended);
            // Callbacks may take their time.
            if start == Start::Now || self.ended.iter().any(|(then, _)| then.is_some()) {
                inner.queues.ring();
            }
        }
        // Callbacks may complete some of these, and add to them for ever.
        let ended = self.ended.len();
        for completed in 0..ended {
            match self.ended.pop_front() {
                Some((Some(then), completion)) => then(self, completion),
                Some((None, completion)) => to(completion),
                None => return completed,
            }
        }
        ended
    }

    /// As [`poll`](Self::poll), until `at_least` requests are completed, none is left, or `patience` is over.
    pub fn wait(
        &mut self,
        at_least: usize,
        out: &mut Vec<Completion>,
        patience: Option<Duration>,
    ) -> usize {
        // Of the caller's time, whatever the file system's is.
        let end = patience.map(|time| {
            let clock = Clock::real();
            let end = clock.monotonic_ns().saturating_add(clock::ns_of(time));
            (clock, end)
        });
        let mut completed = 0;
        loop {
            let (bell, rung) = (Arc::clone(&self.bell), self.bell.rung());
            completed += self.complete(Start::ByWait, |done| out.push(done.hand_over()));
            let left = end
                .as_ref()
                .map(|(clock, end)| Duration::from_nanos(end.saturating_sub(clock.monotonic_ns())));
            let is_over = left.is_some_and(|left| left.is_zero());
            let mut inner = self.inner();
            if completed >= at_least || is_over || inner.in_flight() + self.ended.len() == 0 {
                inner.queues.ring();
                return completed;
            }
            // A callback may have put another context here: how often that one's bell was rung nobody has looked yet.
            if Arc::ptr_eq(&self.bell, &bell) {
                inner.sleep(false, rung, left);
            }
        }
    }

    /// Waits until there may be something to reap, or somebody rings the bell that was rung so often.
    pub(super) fn sleep_or_ring(&mut self, rung: u64) {
        self.inner().sleep(true, rung, None);
    }

    pub(super) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Asks for an early end of the reads in flight that were submitted with this number; they are completed as they would be, or with
    /// [`Error::Cancelled`]. A write in flight, and what a thread is at, go on.
    /// All reads of a handle: [`FileSystem::close_file`].
    pub fn cancel(&mut self, user: u64) {
        self.inner()
            .cancel(|pending| pending.then.is_none() && pending.user == user);
    }
}

impl Inner {
    fn in_flight(&self) -> usize {
        self.pending.len() - self.free.len()
    }

    /// There is something to complete, or to look at, without a wait.
    fn has_news(&self) -> bool {
        !self.done.is_empty() || !self.reads.is_empty()
    }

    /// Asks for an early end of the reads in flight that are meant.
    fn cancel(&mut self, which: impl Fn(&Pending) -> bool) {
        for pending in self.pending.iter().filter(|pending| which(pending)) {
            if let Some(flight) = pending.flight {
                self.queues.cancel(flight);
            }
        }
    }

    fn take_all(&mut self, requests: &mut Vec<(u64, Request)>) -> usize {
        let taken = requests.len().min(self.free.len());
        for (user, request) in requests.drain(..taken) {
            self.take(user, request, None);
        }
        taken
    }

    fn take(&mut self, user: u64, request: Request, then: Option<Callback>) {
        let number = self.free.pop().expect("the caller looked for room");
        let pending = &mut self.pending[number as usize];
        (pending.user, pending.then, pending.tries) = (user, then, 0);
        pending.offset = match &request {
            Request::Read { offset, .. } | Request::Write { offset, .. } => *offset,
            Request::Append { .. } | Request::Fsync { .. } => 0,
        };
        pending.writes = match &request {
            Request::Write { file, .. }
            | Request::Append { file, .. }
            | Request::Fsync { file, .. } => Some((file.ino(), file.generation())),
            Request::Read { .. } => None,
        };
        let refused = match request.file().is_closed() {
            true => Some(Error::BadHandle),
            false => self.files.owning(request.file()).err(),
        };
        if let Some(error) = refused {
            let file = Arc::clone(request.file());
            let buf = request.into_buf();
            return self.finish(number, Some(file), Err(error), buf);
        }
        match request {
            Request::Read { file, buf, .. } => self.read(number, file, buf),
            Request::Write { file, offset, buf } => self.write(number, file, offset, buf),
            other => self.ask(number, other),
        }
    }

    /// Begins a read, or begins it again.
    fn read(&mut self, number: u32, file: Arc<OpenFile>, mut buf: AlignedBuf) {
        let pending = &mut self.pending[number as usize];
        let offset = pending.offset;
        let (flying, runs) = (&mut pending.flying, &mut self.runs);
        if pending.tries == 0 {
            flying.going = self.files.note_going(&file, offset, buf.len());
        }
        let began = match pending.tries < TRIES {
            true => self.files.begin_read(&file, offset, &mut buf, flying, runs),
            false => Ok(Began::Waits),
        };
        let result = match began {
            Ok(Began::Done(len)) => Ok(len),
            Err(error) => Err(error),
            Ok(Began::Waits) => return self.ask(number, Request::Read { file, offset, buf }),
            Ok(Began::Flies) => {
                let (memory, own) = match flying.apart.take() {
                    Some(memory) => (memory, Some(buf)),
                    None => (buf, None),
                };
                match self.fly(number, Kind::Read, memory) {
                    Ok(()) => {
                        let pending = &mut self.pending[number as usize];
                        (pending.file, pending.own) = (Some(file), own);
                        return;
                    }
                    Err((memory, error)) => {
                        buf = self.own_again(number, memory, own);
                        match error {
                            Some(error) => Err(error),
                            None => return self.ask(number, Request::Read { file, offset, buf }),
                        }
                    }
                }
            }
        };
        self.finish(number, Some(file), result, buf);
    }

    /// The request's memory, of a flight that has ended.
    fn own_again(
        &mut self,
        number: u32,
        memory: AlignedBuf,
        own: Option<AlignedBuf>,
    ) -> AlignedBuf {
        let Some(own) = own else {
            return memory;
        };
        let flying = &mut self.pending[number as usize].flying;
        flying.apart = Some(memory);
        self.files.end_apart(flying);
        own
    }

    fn write(&mut self, number: u32, file: Arc<OpenFile>, offset: u64, buf: AlignedBuf) {
        let len = buf.len();
        match self.files.write_now(&file, offset, &buf) {
            Ok(false) => {}
            done => return self.finish(number, Some(file), done.map(|_| len), buf),
        }
        self.writes.fetch_add(1, Ordering::SeqCst);
        let writing = match self.files.begin_write(&file, offset, len, &mut self.runs) {
            Ok(Some(writing)) => writing,
            other => {
                self.writes.fetch_sub(1, Ordering::Release);
                return match other {
                    Err(error) => self.finish(number, Some(file), Err(error), buf),
                    _ => self.ask(number, Request::Write { file, offset, buf }),
                };
            }
        };
        match self.fly(number, Kind::Write(Durability::Volatile), buf) {
            Ok(()) => {
                let pending = &mut self.pending[number as usize];
                (pending.file, pending.writing) = (Some(file), Some(writing));
            }
            Err((buf, error)) => {
                writing.never_flew();
                self.writes.fetch_sub(1, Ordering::Release);
                match error {
                    None => self.ask(number, Request::Write { file, offset, buf }),
                    Some(error) => self.finish(number, Some(file), Err(error), buf),
                }
            }
        }
    }

    /// Sends what was begun. It may be refused with an error; or without one, since another that was cancelled and has not been told of
    /// has its place.
    fn fly(
        &mut self,
        number: u32,
        kind: Kind,
        memory: AlignedBuf,
    ) -> Result<(), (AlignedBuf, Option<Error>)> {
        let tag = u64::from(number);
        let flight = Flight { kind, memory, tag };
        match self.queues.submit(flight, &self.runs) {
            Ok(flight) => {
                self.pending[number as usize].flight = Some(flight);
                Ok(())
            }
            Err(refused) => {
                let error = refused.error.map(|e| engine::Error::from(*e).into());
                Err((refused.flight.memory, error))
            }
        }
    }

    fn ask(&mut self, number: u32, request: Request) {
        self.asked += 1;
        let going = self.pending[number as usize].flying.going;
        let pool = self.pool.as_ref().expect("until the context is dropped");
        self.answers.ask(pool, number, request, going);
    }

    fn finish(
        &mut self,
        number: u32,
        file: Option<Arc<OpenFile>>,
        result: Result<usize, Error>,
        buf: AlignedBuf,
    ) {
        self.pending[number as usize].file = file;
        let offset = None;
        let done = Done {
            buf,
            offset,
            result,
        };
        self.done.push_back((number, done));
    }

    /// A read has landed, or begins again.
    fn land_read(&mut self, landed: Landed) {
        let number = landed.tag as u32;
        let pending = &mut self.pending[number as usize];
        pending.flight = None;
        let Some(file) = pending.file.take() else {
            return;
        };
        let (mut memory, mut own) = (landed.memory, pending.own.take());
        let (flying, came) = (&pending.flying, landed.result.is_ok());
        let whole = own.as_deref_mut();
        let stands = (self.files).land_read(&file, flying, &mut memory, whole, came);
        let len = flying.len;
        let mut buf = self.own_again(number, memory, own);
        if !stands {
            // It may be another file's.
            buf.fill(0);
        }
        let result = match landed.result {
            Ok(()) if stands => Ok(len),
            Err(error) if stands || is_cancelled(&error) => Err(match is_cancelled(&error) {
                true => Error::Cancelled,
                false => engine::Error::from(*error).into(),
            }),
            // Also of an error: the blocks may not be the file's any more.
            _ if file.is_closed() => Err(Error::Cancelled),
            _ => {
                self.pending[number as usize].tries += 1;
                self.read(number, file, buf);
                return;
            }
        };
        self.finish(number, Some(file), result, buf);
    }

    /// Takes out what has landed, and lands writes. Waits for nothing, and lets go of no file.
    fn land_writes(&mut self) {
        let mut landed = std::mem::take(&mut self.landed);
        self.queues.reap(&mut landed);
        for flight in landed.drain(..) {
            let number = flight.tag as u32;
            let pending = &mut self.pending[number as usize];
            let Some(writing) = pending.writing.take() else {
                self.reads.push(flight);
                continue;
            };
            pending.flight = None;
            let (buf, result) = (flight.memory, flight.result);
            let written = writing.land(result.map_err(|error| engine::Error::from(*error).into()));
            let result = written.map(|()| buf.len());
            self.writes.fetch_sub(1, Ordering::Release);
            let file = pending.file.take();
            self.finish(number, file, result, buf);
        }
        self.landed = landed;
    }

    /// Takes in what has ended.
    fn reap(&mut self) {
        self.land_writes();
        let mut reads = std::mem::take(&mut self.reads);
        for flight in reads.drain(..) {
            self.land_read(flight);
        }
        self.reads = reads;
        if self.asked > 0 {
            self.answers.take(&mut self.answered);
            self.asked -= self.answered.len();
            self.done.extend(self.answered.drain(..));
        }
    }

    fn let_go(&self, file: Arc<OpenFile>) {
        if let Some(last) = Arc::into_inner(file) {
            let pool = self.pool.as_ref().expect("until the context is dropped");
            pool.give(Needs::Wait, move || drop(last));
        }
    }

    /// Takes out what is to be completed.
    fn end(&mut self, ended: &mut VecDeque<(Option<Callback>, Completion)>) {
        for (number, done) in self.done.drain(..) {
            self.free.push(number);
            let pending = &mut self.pending[number as usize];
            // The last one to let go of a file may have to delete it, and wait for that.
            if let Some(last) = pending.file.take().and_then(Arc::into_inner) {
                let pool = self.pool.as_ref().expect("until the context is dropped");
                pool.give(Needs::Wait, move || drop(last));
            }
            let (files, writes) = (&self.files, pending.writes.take());
            let owed = |of| Owed::new(files, of, &done.result, done.buf.len()).map(Box::new);
            let completion = Completion {
                user: pending.user,
                owed: writes.and_then(owed),
                buf: done.buf,
                offset: done.offset.unwrap_or(pending.offset),
                result: done.result,
            };
            ended.push_back((pending.then.take(), completion));
        }
    }

    /// Waits until there may be something to reap, or somebody rings the bell that was rung so often. Others may do that to
    /// send something, if it `is_sent` any.
    fn sleep(&mut self, is_sent: bool, rung: u64, patience: Option<Duration>) {
        if !self.has_news() {
            // A sleep to a time is more exact without a bell; who closes a handle can wait for that.
            let listens = is_sent || self.asked > 0 || !self.queues.keep_time();
            self.queues.wait(listens.then_some(rung), patience);
        }
    }

    /// Asks for an early end of the reads of handles that were closed since.
    fn give_up_closed(&mut self, closed: &AtomicU64) {
        let closed = closed.load(Ordering::Acquire);
        if std::mem::replace(&mut self.closed, closed) == closed {
            return;
        }
        let is_closed = |file: &Arc<OpenFile>| file.is_closed();
        self.cancel(|pending| pending.file.as_ref().is_some_and(is_closed));
    }
}

impl InFlight for Shared {
    fn land(&self) {
        if self.writes() > 0
            && let Some(mut inner) = self.inner.try_lock()
        {
            // Its owner may have begun some and be elsewhere before he starts them.
            inner.queues.ring();
            inner.land_writes();
        }
    }

    fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }

    fn closed(&self) {
        self.closed.fetch_add(1, Ordering::Release);
        match self.inner.try_lock() {
            Some(mut inner) => inner.give_up_closed(&self.closed),
            // Its owner is at it, and looks when he is woken.
            None => self.bell.ring(),
        }
    }
}

impl Drop for IoContext {
    /// Invariant 3.
    fn drop(&mut self) {
        let mut callbacks = Vec::new();
        for pending in &mut self.inner().pending {
            callbacks.extend(pending.then.take());
            pending.tries = TRIES;
        }
        // What they hold, and what was not completed, may be anything: it goes under no lock.
        drop((callbacks, std::mem::take(&mut self.ended)));
        // Writes that failed are their files' then.
        let mut gone = Vec::new();
        while self.in_flight() > 0 {
            // Also what began again meanwhile.
            self.inner().queues.cancel_all();
            let rung = self.bell.rung();
            let complete = self.complete(Start::ByWait, |completion| gone.push(completion));
            if complete == 0 {
                self.inner().sleep(false, rung, None);
            }
            gone.clear();
        }
        // Invariant 6.
        let pool = self.inner().pool.take();
        drop(pool);
    }
}

impl std::fmt::Debug for IoContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoContext")
            .field("depth", &self.depth)
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

fn is_cancelled(error: &device::Error) -> bool {
    match error {
        device::Error::Io { source, .. } => source.raw_os_error() == Some(libc::ECANCELED),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FsOptions, MkfsOptions};
    use device::Array;
    use device::sim::SimDevice;
    use format::BLOCK_SIZE;
    use format::geometry::{Geometry, GeometryOptions};

    const BYTES: u64 = 64 << 20;

    fn fresh() -> Arc<FileSystem> {
        let devices = vec![SimDevice::new(BYTES, 1) as Arc<dyn device::BlockDevice>];
        let geometry = Geometry::plan(&[BYTES], GeometryOptions::default()).unwrap();
        let array = Array::create(devices, geometry, "test", [7; 16], [9; 16]).unwrap();
        let array = Arc::new(array);
        FileSystem::mkfs(&array, &MkfsOptions::default()).unwrap();
        array.write_labels().unwrap();
        let options = FsOptions::default().without_threads(Clock::real());
        FileSystem::open(array, options).unwrap()
    }

    /// The device was not asked until nothing ended for once.
    #[test]
    fn what_is_added_is_started_though_something_else_ends_all_the_time() {
        let fs = fresh();
        let (flags, who) = (libc::O_RDWR | libc::O_DIRECT, crate::Caller::root());
        let made = fs.create(&who, crate::ROOT, b"file", 0o600, flags);
        let (_, file) = made.unwrap();
        fs.write(&file, 0, &[7; BLOCK_SIZE]).unwrap();
        let read = |file: &Arc<OpenFile>, offset| Request::Read {
            file: Arc::clone(file),
            offset,
            buf: AlignedBuf::zeroed(BLOCK_SIZE),
        };
        let mut context = fs.io_context(8).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        context.add(0, read(&file, 0), move |_, done| {
            tell.send(done.result).unwrap();
        });
        let ended = (0..1000).find_map(|_| {
            context.add(0, read(&file, 1 << 20), |_, _| {});
            assert!(context.poll(&mut Vec::new()) > 0, "the end of the file");
            told.try_recv().ok()
        });
        assert_eq!(ended.unwrap().unwrap(), BLOCK_SIZE);
    }

    /// Who waited for a file's flights ended the pool, under the file's lock, and waited for a thread that waited for that lock: a
    /// context had been dropped meanwhile, and the file system before it.
    #[test]
    fn who_lands_writes_for_a_context_is_not_the_one_who_ends_the_pool() {
        let fs = fresh();
        let context = fs.io_context(4).unwrap();
        let lands: Arc<dyn InFlight> = Arc::clone(&context.shared) as Arc<dyn InFlight>;
        let (pool, ended) = std::sync::mpsc::channel::<()>();
        fs.workers
            .pool()
            .unwrap()
            .give(Needs::Wait, move || drop(pool));
        assert!(ended.recv().is_err(), "there is a thread");
        let threads = fs.workers.pool().unwrap().watch();
        drop(fs);
        assert!(threads.upgrade().is_some(), "the context has them");
        drop(context);
        assert!(threads.upgrade().is_none(), "they end with the context");
        drop(lands);
    }

    /// It slept until its patience was over: it waited for the new context's bell to be rung more often than the old one's had been.
    #[test]
    fn who_waits_for_a_context_that_a_callback_replaced_sees_what_had_ended_in_the_new_one() {
        let fs = fresh();
        let who = crate::Caller::root();
        let made = fs.create(&who, crate::ROOT, b"file", 0o600, libc::O_RDWR);
        let (_, file) = made.unwrap();
        let [mut first, mut second] = [0, 1].map(|_| fs.io_context(4).unwrap());
        // Both bells are rung once.
        let until_rung = |context: &mut IoContext| {
            while context.bell().rung() == 0 {
                context.sleep_or_ring(0);
            }
        };
        let fsync = || Request::Fsync {
            file: Arc::clone(&file),
            data_only: false,
        };
        assert_eq!(second.submit(&mut vec![(2, fsync())]), 1);
        until_rung(&mut second);
        let bell = Arc::clone(second.bell());
        let replace = |context: &mut IoContext, _| drop(std::mem::replace(context, second));
        first.submit_with(fsync(), replace).unwrap();
        until_rung(&mut first);
        assert_eq!(first.bell().rung(), bell.rung());
        let (tell, told) = std::sync::mpsc::channel();
        let thread = base::thread::spawn("waits", move || {
            let mut out = Vec::new();
            first.wait(2, &mut out, None);
            tell.send(out.len()).unwrap();
        });
        let done = told.recv_timeout(Duration::from_secs(60));
        assert_eq!(done, Ok(1), "beside the one of the callback");
        thread.unwrap().join().unwrap();
    }
}

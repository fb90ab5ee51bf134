//! Requests of one owner, who hands them over in batches and asks for those that are done.
//!
//! 1. Each request that was taken is completed once: by `poll`, by `wait`, or by its callback, and none by `submit`. One that
//!    was not taken is the caller's still.
//! 2. A context has its requests alone, and may be handed from thread to thread. It holds nothing between calls that
//!    somebody else could wait for: an owner who never asks again hurts nobody.
//! 3. A context that is dropped cancels reads, waits for the rest, and completes nothing.
//! 4. Nothing here waits for a device but `wait` and `drop`, where devices know how to do things meanwhile (io_uring, a pool); but
//!    beginning a read may wait for whoever has the file's inode locked while a part of its mapping is read.

use super::waiting::Answers;
use crate::data::{Began, Files, Flying, OpenFile};
use crate::{Error, FileSystem};
use base::clock::Clock;
use base::thread::Pool;
use device::{AlignedBuf, Flight, FlightId, Kind, Landed, Queues, Run};
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
    /// As [`FileSystem::fsync`], of all that was completed before.
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
            | Request::Fsync { file, .. } => file,
        }
    }

    pub(super) fn into_buf(self) -> AlignedBuf {
        match self {
            Request::Read { buf, .. } | Request::Write { buf, .. } => buf,
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
    /// Bytes read or written.
    pub result: Result<usize, Error>,
}

/// How a request ended, without its number.
#[derive(Debug)]
pub(super) struct Done {
    pub buf: AlignedBuf,
    pub result: Result<usize, Error>,
}

type Callback = Box<dyn FnOnce(&mut IoContext, Completion) + Send>;

/// A request that was taken.
#[derive(Default)]
struct Pending {
    user: u64,
    then: Option<Callback>,
    /// Of a read in flight.
    file: Option<Arc<OpenFile>>,
    offset: u64,
    flying: Flying,
    flight: Option<FlightId>,
    tries: u8,
}

/// See the module's head.
pub struct IoContext {
    files: Arc<Files>,
    pool: Arc<Pool>,
    queues: Queues,
    /// By the numbers that flights and answers have.
    pending: Vec<Pending>,
    free: Vec<u32>,
    done: VecDeque<(u32, Done)>,
    answers: Arc<Answers>,
    /// Requests that the pool has.
    asked: usize,
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
        Ok(IoContext {
            files: Arc::clone(&self.files),
            pool: self.workers.pool()?,
            answers: Answers::new(Arc::clone(queues.bell())),
            queues,
            pending: (0..depth).map(|_| Pending::default()).collect(),
            free: (0..depth as u32).rev().collect(),
            done: VecDeque::with_capacity(depth),
            asked: 0,
            landed: Vec::with_capacity(depth),
            answered: Vec::with_capacity(depth),
            runs: Vec::with_capacity(8),
        })
    }
}

impl IoContext {
    /// Requests that were taken and are not completed.
    pub fn in_flight(&self) -> usize {
        self.pending.len() - self.free.len()
    }

    /// Takes requests from the front, each with a number of the caller's, as long as there is room; returns how many. They are
    /// started together.
    pub fn submit(&mut self, requests: &mut Vec<(u64, Request)>) -> usize {
        let taken = self.take_all(requests);
        self.queues.ring();
        taken
    }

    fn take_all(&mut self, requests: &mut Vec<(u64, Request)>) -> usize {
        let taken = requests.len().min(self.free.len());
        for (user, request) in requests.drain(..taken) {
            self.take(user, request, None);
        }
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
        let taken = self.take_all(requests);
        self.wait(at_least, out, patience);
        self.queues.ring();
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
        if self.free.is_empty() {
            return Err(Box::new(request));
        }
        self.take(0, request, Some(Box::new(then)));
        self.queues.ring();
        Ok(())
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// As [`submit_with`](Self::submit_with) when there is room, but that somebody else has it started: by waiting, or by
    /// asking for what is done.
    pub(super) fn add(
        &mut self,
        request: Request,
        then: impl FnOnce(&mut IoContext, Completion) + Send + 'static,
    ) {
        self.take(0, request, Some(Box::new(then)));
    }

    fn take(&mut self, user: u64, request: Request, then: Option<Callback>) {
        let number = self.free.pop().expect("the caller looked for room");
        let pending = &mut self.pending[number as usize];
        (pending.user, pending.then, pending.tries) = (user, then, 0);
        match request {
            Request::Read { file, offset, buf } => {
                pending.offset = offset;
                self.read(number, file, buf);
            }
            other => self.ask(number, other),
        }
    }

    /// Begins a read, or begins it again.
    fn read(&mut self, number: u32, file: Arc<OpenFile>, mut buf: AlignedBuf) {
        let pending = &mut self.pending[number as usize];
        let offset = pending.offset;
        let (flying, runs) = (&mut pending.flying, &mut self.runs);
        let began = match pending.tries < TRIES {
            true => self.files.begin_read(&file, offset, &mut buf, flying, runs),
            false => Ok(Began::Waits),
        };
        let (buf, result) = match began {
            Ok(Began::Done(len)) => (buf, Ok(len)),
            Err(error) => (buf, Err(error)),
            Ok(Began::Waits) => return self.ask(number, Request::Read { file, offset, buf }),
            Ok(Began::Flies) => {
                let flight = Flight {
                    kind: Kind::Read,
                    memory: buf,
                    tag: u64::from(number),
                };
                match self.queues.submit(flight, &self.runs) {
                    Ok(flight) => {
                        (pending.file, pending.flight) = (Some(file), Some(flight));
                        return;
                    }
                    Err(refused) => {
                        let buf = refused.flight.memory;
                        match refused.error {
                            Some(error) => (buf, Err(engine::Error::from(*error).into())),
                            // One that was cancelled and has not been told of has the place.
                            None => return self.ask(number, Request::Read { file, offset, buf }),
                        }
                    }
                }
            }
        };
        self.let_go(file);
        self.done.push_back((number, Done { buf, result }));
    }

    fn ask(&mut self, number: u32, request: Request) {
        self.asked += 1;
        self.answers.ask(&self.pool, number, request);
    }

    /// A flight has landed. False: its request began again.
    fn land(&mut self, landed: Landed) -> bool {
        let number = landed.tag as u32;
        let pending = &mut self.pending[number as usize];
        pending.flight = None;
        let Some(file) = pending.file.take() else {
            return true;
        };
        let mut buf = landed.memory;
        let stands = self.files.land_read(&file, &pending.flying, &mut buf);
        if !stands {
            // It may be another file's.
            buf.fill(0);
        }
        let result = match landed.result {
            Ok(()) if stands => Ok(pending.flying.len),
            Err(error) if stands || is_cancelled(&error) => Err(match is_cancelled(&error) {
                true => Error::Cancelled,
                false => engine::Error::from(error).into(),
            }),
            // Also of an error: the blocks may not be the file's any more.
            _ => {
                pending.tries += 1;
                self.read(number, file, buf);
                return false;
            }
        };
        self.let_go(file);
        self.done.push_back((number, Done { buf, result }));
        true
    }

    /// The last one to let go of a file may have to delete it, and wait for that.
    fn let_go(&self, file: Arc<OpenFile>) {
        if let Some(last) = Arc::into_inner(file) {
            self.pool.give(move || drop(last));
        }
    }

    /// Takes in what has ended.
    fn reap(&mut self) {
        let mut landed = std::mem::take(&mut self.landed);
        self.queues.reap(&mut landed);
        let mut again = false;
        for flight in landed.drain(..) {
            again |= !self.land(flight);
        }
        self.landed = landed;
        if again {
            self.queues.ring();
        }
        if self.asked > 0 {
            self.answers.take(&mut self.answered);
            self.asked -= self.answered.len();
            self.done.extend(self.answered.drain(..));
        }
    }

    /// Completes what has ended, without waiting: puts completions behind those in `out`, and calls callbacks. Returns how many
    /// requests it completed.
    pub fn poll(&mut self, out: &mut Vec<Completion>) -> usize {
        self.reap();
        self.complete(out)
    }

    fn complete(&mut self, out: &mut Vec<Completion>) -> usize {
        // Callbacks may add to these, for ever.
        let ended = self.done.len();
        for _ in 0..ended {
            let Some((number, Done { buf, result })) = self.done.pop_front() else {
                break;
            };
            self.free.push(number);
            let pending = &mut self.pending[number as usize];
            let completion = Completion {
                user: pending.user,
                buf,
                result,
            };
            match pending.then.take() {
                Some(then) => then(self, completion),
                None => out.push(completion),
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
            let end = clock.monotonic_ns().saturating_add(time.as_nanos() as u64);
            (clock, end)
        });
        let mut completed = 0;
        loop {
            let rung = self.queues.bell().rung();
            completed += self.poll(out);
            if completed >= at_least || self.in_flight() == 0 {
                return completed;
            }
            let left = end
                .as_ref()
                .map(|(clock, end)| Duration::from_nanos(end.saturating_sub(clock.monotonic_ns())));
            if left.is_some_and(|left| left.is_zero()) {
                return completed;
            }
            self.sleep(rung, left);
        }
    }

    /// Waits until there may be something to reap.
    fn sleep(&mut self, rung: u64, patience: Option<Duration>) {
        if self.done.is_empty() {
            let rung = (self.asked > 0).then_some(rung);
            self.queues.wait(rung, patience);
        }
    }

    /// Waits until there may be something to reap, or somebody rings the bell that was rung so often.
    pub(super) fn sleep_or_ring(&mut self, rung: u64) {
        if self.done.is_empty() {
            self.queues.wait(Some(rung), None);
        }
    }

    pub(super) fn bell(&self) -> &Arc<device::Bell> {
        self.queues.bell()
    }

    /// Asks for an early end of the reads in flight that have this number; they are completed as they would be, or with
    /// [`Error::Cancelled`]. What a thread is at goes on.
    pub fn cancel(&mut self, user: u64) {
        for pending in &self.pending {
            if pending.user == user
                && let Some(flight) = pending.flight
            {
                self.queues.cancel(flight);
            }
        }
    }
}

impl Drop for IoContext {
    /// Invariant 3.
    fn drop(&mut self) {
        for pending in &mut self.pending {
            pending.then = None;
            pending.tries = TRIES;
        }
        while self.in_flight() > 0 {
            // Also what began again meanwhile.
            self.queues.cancel_all();
            let rung = self.queues.bell().rung();
            let mut gone = Vec::new();
            if self.poll(&mut gone) == 0 {
                self.sleep(rung, None);
            }
        }
    }
}

impl std::fmt::Debug for IoContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoContext")
            .field("depth", &self.pending.len())
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

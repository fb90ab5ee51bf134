//! Requests as futures, for any executor.
//!
//! One thread, the *driver*, has a context for all futures of a file system, and wakes whoever waits for one. So a future makes
//! progress wherever it is polled, however seldom, and may go from task to task.
//!
//! 1. A request is sent by the first poll. A write or a sync that was sent is done, whether somebody still waits for it or not: a future that is
//!    dropped leaves its memory to the driver until the devices have done with it, and of a write that fails then its file knows ([`owed`](super::owed)). A read for which
//!    nobody waits any more is withdrawn if it has not begun, and given up if a device does that: who tries again and again, at a device that does
//!    not answer, has no more in flight, and in memory, than that device has taken.
//! 2. A result is put into the future's cell before its waker is called, and a waker into the cell before it is looked for a
//!    result, both under the cell's lock: no wake-up is lost.
//! 3. A driver that ends, even by a panic, has answered all letters it had, and takes no more. Whoever lets the file system go asks
//!    it to end and does not wait: it may be a thread that the driver waits for. [`FileSystem::close`] waits, unless a waker calls it,
//!    in the driver's own thread: what other futures have handed over may fail then.
//! 4. Wakers are called, cloned and dropped under no lock. One that panics harms nobody else.

use super::context::{Completion, IoContext, Request};
use crate::data::OpenFile;
use crate::{Error, FileSystem};
use base::sync::{Mutex, rank};
use base::thread::{Id, JoinHandle, spawn};
use device::{AlignedBuf, Bell};
use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

/// Requests of futures in flight at a time; more wait.
const DEPTH: u32 = 1024;

/// Where a result is left.
#[derive(Debug)]
struct Cell(Mutex<State>);

#[derive(Debug)]
enum State {
    Waiting(Option<Waker>),
    Done(Completion),
    Taken,
}

impl Cell {
    fn finish(&self, completion: Completion) {
        let before = std::mem::replace(&mut *self.0.lock(), State::Done(completion));
        if let State::Waiting(Some(waker)) = before
            && catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err()
        {
            tracing::error!("a waker panicked");
        }
    }
}

/// The duty to leave a result (invariant 3).
#[derive(Debug)]
struct Reply(Option<Arc<Cell>>);

impl Reply {
    fn finish(mut self, completion: Completion) {
        if let Some(cell) = self.0.take() {
            cell.finish(completion);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(cell) = self.0.take() {
            cell.finish(Completion {
                user: 0,
                buf: AlignedBuf::zeroed(0),
                offset: 0,
                result: Err(Error::Cancelled),
                owed: None,
            });
        }
    }
}

#[derive(Debug)]
struct Letter {
    /// Its own, among those of the driver.
    number: u64,
    request: Request,
    reply: Reply,
}

/// What futures send to the driver.
#[derive(Debug)]
struct Mail {
    letters: Mutex<Letters>,
    bell: Arc<Bell>,
}

#[derive(Debug, Default)]
struct Letters {
    unread: VecDeque<Letter>,
    sent: u64,
    /// Numbers of reads for which nobody waits any more.
    given_up: Vec<u64>,
    /// Nobody looks here any more.
    closed: bool,
}

impl Mail {
    /// Returns the letter's number, or gives it back if nobody would read it.
    fn send(&self, mut letter: Letter) -> Result<u64, Letter> {
        let number = {
            let mut mail = self.letters.lock();
            if mail.closed {
                return Err(letter);
            }
            mail.sent += 1;
            letter.number = mail.sent;
            mail.unread.push_back(letter);
            mail.sent
        };
        self.bell.ring();
        Ok(number)
    }

    /// Nobody waits any more for the read with this number.
    fn give_up(&self, number: u64) {
        let unread = {
            let mut mail = self.letters.lock();
            if mail.closed {
                return;
            }
            let at = (mail.unread).binary_search_by_key(&number, |letter| letter.number);
            if at.is_err() {
                mail.given_up.push(number);
            }
            at.ok().and_then(|at| mail.unread.remove(at))
        };
        if unread.is_none() {
            self.bell.ring();
        }
    }
}

/// The driver of a file system, once there was a future.
#[derive(Debug)]
pub(crate) struct Driver {
    running: OnceLock<Running>,
    /// Whoever makes the driver has this; true: nobody will any more.
    ended: Mutex<bool>,
}

impl Default for Driver {
    fn default() -> Self {
        Driver {
            running: OnceLock::new(),
            ended: Mutex::new(rank::FUTURES, false),
        }
    }
}

#[derive(Debug)]
struct Running {
    mail: Arc<Mail>,
    id: Id,
    thread: Mutex<Option<JoinHandle>>,
}

impl Driver {
    fn mail(&self, fs: &FileSystem) -> Result<Arc<Mail>, Error> {
        if let Some(running) = self.running.get() {
            return Ok(Arc::clone(&running.mail));
        }
        // A second one's thread would have the files for a moment longer than anybody waits for.
        let ended = self.ended.lock();
        if let Some(running) = self.running.get() {
            return Ok(Arc::clone(&running.mail));
        }
        if *ended {
            return Err(Error::Cancelled);
        }
        let context = fs.io_context(DEPTH)?;
        let mail = Arc::new(Mail {
            letters: Mutex::new(rank::LEAF, Letters::default()),
            bell: Arc::clone(context.bell()),
        });
        let theirs = Arc::clone(&mail);
        let thread = spawn("sheaf-futures", move || drive(&theirs, context));
        let thread = thread.map_err(|error| {
            Error::Store(engine::Error::from(device::Error::Threads {
                source: Arc::new(error),
            }))
        })?;
        let running = Running {
            mail,
            id: thread.id(),
            thread: Mutex::new(rank::LEAF, Some(thread)),
        };
        Ok(Arc::clone(&self.running.get_or_init(|| running).mail))
    }

    /// The caller is the driver itself, which those wait for who close it.
    pub fn is_ours(&self) -> bool {
        self.running
            .get()
            .is_some_and(|running| running.id.is_ours())
    }

    /// Takes no more requests, and waits until those it had are done; the driver itself does those later.
    pub fn close(&self) {
        *self.ended.lock() = true;
        if let Some(running) = self.running.get() {
            running.mail.close();
            let thread = running.thread.lock().take_if(|thread| !thread.is_ours());
            if let Some(thread) = thread
                && thread.join().is_err()
            {
                tracing::error!("the thread of futures panicked");
            }
        }
    }
}

impl Mail {
    fn close(&self) {
        self.letters.lock().closed = true;
        self.bell.ring();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.mail.close();
    }
}

/// Nobody looks at the mail any more, for whatever reason.
struct Closing<'a>(&'a Mail);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let unread = {
            let mut mail = self.0.letters.lock();
            mail.closed = true;
            std::mem::take(&mut mail.unread)
        };
        drop(unread);
    }
}

fn drive(mail: &Mail, mut context: IoContext) {
    let _closing = Closing(mail);
    let (mut letters, mut completions) = (VecDeque::<Letter>::new(), Vec::new());
    loop {
        let rung = mail.bell.rung();
        let (closed, mut given_up) = {
            let mut mail = mail.letters.lock();
            letters.append(&mut mail.unread);
            (mail.closed, std::mem::take(&mut mail.given_up))
        };
        if !given_up.is_empty() {
            given_up.sort_unstable();
            let is_given_up = |number: u64| given_up.binary_search(&number).is_ok();
            let all = std::mem::take(&mut letters).into_iter();
            let (gone, left) = all.partition(|letter| is_given_up(letter.number));
            letters = left;
            let gone: VecDeque<Letter> = gone;
            gone.into_iter()
                .for_each(|letter| context.let_go(letter.request));
            context.cancel_added(is_given_up);
        }
        while context.has_room()
            && let Some(letter) = letters.pop_front()
        {
            let Letter { request, reply, .. } = letter;
            context.add(letter.number, request, move |_, completion| {
                reply.finish(completion)
            });
        }
        if context.poll(&mut completions) > 0 {
            continue;
        }
        if closed && letters.is_empty() && context.in_flight() == 0 {
            return;
        }
        context.sleep_or_ring(rung);
    }
}

/// A request that is sent when it is first polled, and its result.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct IoFuture(Sent);

#[derive(Debug)]
struct Sent {
    mail: Result<Arc<Mail>, Error>,
    request: Option<Request>,
    /// Of a read that was sent: its number.
    read: Option<u64>,
    cell: Arc<Cell>,
}

impl Sent {
    fn new(fs: &FileSystem, request: Request) -> Sent {
        Sent {
            mail: fs.driver.mail(fs),
            request: Some(request),
            read: None,
            cell: Arc::new(Cell(Mutex::new(rank::LEAF, State::Waiting(None)))),
        }
    }
}

/// The request's buffer, empty of one that had none, and the bytes moved.
type Output = (AlignedBuf, Result<usize, Error>);

impl Future for IoFuture {
    type Output = Output;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Output> {
        let done = Pin::new(&mut self.0).poll(task);
        done.map(|done| (done.buf, done.result))
    }
}

impl Future for Sent {
    type Output = Completion;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Completion> {
        let fresh = task.waker().clone();
        let before = {
            let mut state = self.cell.0.lock();
            let before = std::mem::replace(&mut *state, State::Taken);
            if let State::Waiting(_) = before {
                *state = State::Waiting(Some(fresh));
            }
            before
        };
        match before {
            State::Waiting(_) => {}
            State::Done(done) => return Poll::Ready(done.hand_over()),
            State::Taken => panic!("polled after it was ready"),
        }
        let Some(request) = self.request.take() else {
            return Poll::Pending;
        };
        let reply = Reply(Some(Arc::clone(&self.cell)));
        let reads = matches!(request, Request::Read { .. });
        let letter = Letter {
            number: 0,
            request,
            reply,
        };
        let (letter, error) = match &self.mail {
            Ok(mail) => match mail.send(letter) {
                Ok(number) => {
                    self.read = reads.then_some(number);
                    return Poll::Pending;
                }
                Err(letter) => (letter, Error::Cancelled),
            },
            Err(error) => (letter, error.clone()),
        };
        let Letter {
            request, mut reply, ..
        } = letter;
        reply.0 = None;
        let buf = request.into_buf();
        let before = std::mem::replace(&mut *self.cell.0.lock(), State::Taken);
        drop(before);
        Poll::Ready(Completion {
            user: 0,
            buf,
            offset: 0,
            result: Err(error),
            owed: None,
        })
    }
}

/// Invariant 1.
impl Drop for Sent {
    fn drop(&mut self) {
        let before = std::mem::replace(&mut *self.cell.0.lock(), State::Taken);
        if let (Some(number), Ok(mail), State::Waiting(_)) = (self.read, &self.mail, before) {
            mail.give_up(number);
        }
    }
}

impl FileSystem {
    /// As [`FileSystem::read`] into the whole of `buf`, which comes back with the bytes read.
    pub fn read_future(&self, file: &Arc<OpenFile>, offset: u64, buf: AlignedBuf) -> IoFuture {
        let file = Arc::clone(file);
        IoFuture(Sent::new(self, Request::Read { file, offset, buf }))
    }

    /// As [`FileSystem::write`] of the whole of `buf`, which comes back with the bytes written.
    pub fn write_future(&self, file: &Arc<OpenFile>, offset: u64, buf: AlignedBuf) -> IoFuture {
        let file = Arc::clone(file);
        IoFuture(Sent::new(self, Request::Write { file, offset, buf }))
    }

    /// As [`FileSystem::append`] of the whole of `buf`, which comes back with where it was written and how much of it.
    pub fn append_future(
        &self,
        file: &Arc<OpenFile>,
        buf: AlignedBuf,
    ) -> impl Future<Output = (AlignedBuf, Result<(u64, usize), Error>)> + Send + use<> {
        let file = Arc::clone(file);
        let sent = Sent::new(self, Request::Append { file, buf });
        async move {
            let done = sent.await;
            (done.buf, done.result.map(|len| (done.offset, len)))
        }
    }

    /// As [`FileSystem::fsync`].
    pub fn fsync_future(&self, file: &Arc<OpenFile>, data_only: bool) -> IoFuture {
        let file = Arc::clone(file);
        IoFuture(Sent::new(self, Request::Fsync { file, data_only }))
    }
}

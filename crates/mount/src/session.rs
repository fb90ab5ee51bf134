//! One mount being served: INIT, then workers until the kernel says it is over.
//!
//! Owns the worker threads. Invariants:
//!
//! 1. INIT is answered before the first worker runs, so that `negotiated` never changes
//!    under a request.
//! 2. `live` counts workers that may still read a request; the session is over when it is
//!    zero. It grows before a thread starts and shrinks when one ends ([`Workers::start`],
//!    [`Workers::end`]).
//! 3. At each queue there is always a worker waiting for requests unless `workers_max` of its own are busy:
//!    whoever takes a request as the last idle one starts another first. Flushes alone keep half of them busy at most ([`Flushes`]).
//! 4. What may wait for requests and nobody can wake meanwhile is no worker's: pages that the kernel has cached are dropped by threads of their own (`notify`).
//! 5. Every thread is joined: one that ended early by whoever starts the next, the others at the end
//!    of the session, when all is answered. When [`serve`] returns, nobody holds anything of it any more.
//!
//! A worker that panics aborts the process: the file system is crash-safe, callers get
//! ENOTCONN at once, and no half-done operation goes on behind held locks.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base::sync::{Condvar, Mutex, rank};
use base::thread;
use zerocopy::IntoBytes;

use crate::Error;
use crate::abi::{self, init};
use crate::decode::{Operation, decode};
use crate::dispatch::{Dispatcher, Reply};
use crate::flushes::{Flushes, is_one as is_flush};
use crate::notify::{self, Hands, Notifier};
use crate::ops::Operations;
use crate::sys;
use crate::transport::{Channel, DATA_MAX, Queue, Transport};

/// How a session is served.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Workers at most: bounds the requests in progress at once, but for flushes ([`Flushes`]).
    pub workers_max: usize,
    /// Workers kept waiting for requests; more come and go with the load. Few, because the
    /// kernel wakes the one that slept longest, and with it a cold CPU.
    pub workers_idle: usize,
    /// The kernel checks access lists.
    pub access_lists: bool,
    /// Direct transfers of libaio and io_uring run beside each other.
    pub asynchronous_direct: bool,
}

impl Default for Config {
    fn default() -> Self {
        let cpus = thread::cpu_count();
        Config {
            workers_max: (4 * cpus).clamp(16, 64),
            workers_idle: cpus.clamp(2, 16),
            access_lists: true,
            asynchronous_direct: true,
        }
    }
}

/// The first Linux whose answers to asynchronous transfers wait for nothing, where the mount is of a block device.
const ASYNC_ON_BLOCK_DEVICES: (u32, u32) = (6, 18);

/// Whether asynchronous direct transfers are safe on a kernel of this release. Where the mount is of a block device, the kernel waits for the answer to RELEASE; older ones do so within the
/// answer to a transfer, if the program has closed the file meanwhile. Of workers that all wait so none would answer.
pub(crate) fn may_be_asynchronous(on_block_device: bool, release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next().and_then(|text| text.parse().ok());
    let version = (number().unwrap_or(0), number().unwrap_or(0));
    !on_block_device || version >= ASYNC_ON_BLOCK_DEVICES
}

/// After this many requests in a row that found too many idle workers, one ends.
const SURPLUS_PATIENCE: u32 = 1024;

/// The INIT flags asked for; what the kernel lacks is done without.
///
/// - `POSIX_ACL`, `DONT_MASK`: the kernel checks ACLs; the server, which alone knows a
///   directory's default ACL, applies it or the umask to new nodes.
/// - `HANDLE_KILLPRIV_V2`: the server clears suid and sgid, in the same operation, and the
///   kernel saves a getxattr of `security.capability` per write.
/// - `EXPLICIT_INVAL_DATA`: every change goes through this kernel, so cached pages never
///   go stale by themselves and a size or mtime that changed is no reason to drop them.
/// - `ASYNC_DIO`: direct reads and writes of libaio and io_uring run in parallel. What the kernel does for others after such a write, it does not then:
///   `sheaf_ops/direct.rs`. Not where the kernel may wait for itself: [`may_be_asynchronous`].
/// - `NO_OPENDIR_SUPPORT`: positions in a directory are stable by themselves, so that
///   reading one needs no handle; the kernel also caches listings then.
///
/// Left out on purpose: [`REFUSED`].
pub const WANTED: u64 = init::ASYNC_READ
    | init::EXPORT_SUPPORT
    | init::BIG_WRITES
    | init::DONT_MASK
    | init::HAS_IOCTL_DIR
    | init::DO_READDIRPLUS
    | init::READDIRPLUS_AUTO
    | init::ASYNC_DIO
    | init::PARALLEL_DIROPS
    | init::POSIX_ACL
    | init::ABORT_ERROR
    | init::MAX_PAGES
    | init::CACHE_SYMLINKS
    | init::NO_OPENDIR_SUPPORT
    | init::EXPLICIT_INVAL_DATA
    | init::HANDLE_KILLPRIV_V2
    | init::SETXATTR_EXT
    | init::INIT_EXT;

/// The INIT flags that are left out on purpose: `ATOMIC_O_TRUNC` (write-back of a mapping that is on its way would come after the cut, and the kernel holds it back for a
/// SETATTR only), `WRITEBACK_CACHE` (two caches for one file; write(2) could not say
/// ENOSPC; replace-by-rename could not order data before the name; truncate and mtime would
/// be the kernel's guess), `POSIX_LOCKS` and `FLOCK_LOCKS` (one kernel, so its own lock
/// tables serve), `AUTO_INVAL_DATA` (see [`WANTED`]), `NO_OPEN_SUPPORT` (a handle remembers
/// failed write-back until it is closed).
pub const REFUSED: u64 = init::ATOMIC_O_TRUNC
    | init::WRITEBACK_CACHE
    | init::POSIX_LOCKS
    | init::FLOCK_LOCKS
    | init::AUTO_INVAL_DATA
    | init::NO_OPEN_SUPPORT;

const _: () = assert!(WANTED & REFUSED == 0);

/// Requests the kernel sends in the background (read-ahead, async direct I/O, releases)
/// before it waits for answers, and when it calls itself congested.
pub(crate) const BACKGROUND_MAX: u16 = 256;
const CONGESTED_AT: u16 = 192;

/// Answers INIT until the kernel agrees; returns the negotiated flags.
fn negotiate(channel: &mut impl Channel, wanted: u64) -> Result<u64, Error> {
    let mut outcome = None;
    while outcome.is_none() {
        let more = channel.serve_one(&mut |message, _, reply| {
            outcome = answer_init(message, wanted, reply);
        });
        match more {
            Ok(true) => {}
            Ok(false) => return Err(Error::NoInit),
            Err(error) => return Err(Error::Serve(error)),
        }
    }
    outcome.unwrap_or(Err(Error::NoInit))
}

/// One step of the INIT exchange; `None` when another message has to follow.
fn answer_init(message: &[u8], wanted: u64, reply: &mut dyn Reply) -> Option<Result<u64, Error>> {
    let Ok(request) = decode(message, 0) else {
        return Some(Err(Error::NoInit));
    };
    let Operation::Init {
        major,
        minor,
        max_readahead,
        flags,
    } = request.operation
    else {
        return Some(Err(Error::NoInit));
    };
    if major < abi::KERNEL_VERSION
        || (major == abi::KERNEL_VERSION && minor < abi::KERNEL_MINOR_VERSION_MIN)
    {
        let refusal = abi::OutHeader {
            len: size_of::<abi::OutHeader>() as u32,
            error: -libc::EPROTO,
            unique: request.unique,
        };
        return Some(send(reply, &refusal, &[]).and(Err(Error::KernelTooOld { major, minor })));
    }
    let agreed = flags & wanted;
    let out = abi::InitOut {
        major: abi::KERNEL_VERSION,
        minor: abi::KERNEL_MINOR_VERSION,
        max_readahead,
        flags: agreed as u32,
        flags2: (agreed >> 32) as u32,
        max_background: BACKGROUND_MAX,
        congestion_threshold: CONGESTED_AT,
        max_write: DATA_MAX as u32,
        time_gran: 1,
        max_pages: max_pages(sys::page_size()),
        ..Default::default()
    };
    let header = abi::OutHeader {
        len: (size_of::<abi::OutHeader>() + size_of::<abi::InitOut>()) as u32,
        error: 0,
        unique: request.unique,
    };
    let sent = send(reply, &header, out.as_bytes());
    if major > abi::KERNEL_VERSION && sent.is_ok() {
        // The kernel falls back to our major version and asks again.
        return None;
    }
    tracing::debug!(major, minor, flags = agreed, "FUSE protocol agreed");
    Some(sent.map(|()| agreed))
}

/// How many of the kernel's pages a request has at most. Of more than [`DATA_MAX`] a READ would find no room.
fn max_pages(page_size: usize) -> u16 {
    u16::try_from(DATA_MAX / page_size)
        .unwrap_or(u16::MAX)
        .max(1)
}

fn send(reply: &mut dyn Reply, header: &abi::OutHeader, body: &[u8]) -> Result<(), Error> {
    use std::io::IoSlice;
    let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(body)];
    match reply.send(&parts) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::NoInit),
        Err(error) => Err(Error::Serve(error)),
    }
}

/// What the workers of one session share.
struct Workers<T, O> {
    transport: T,
    dispatcher: Dispatcher<O>,
    queues: Vec<Crew>,
    /// Invariant 2. Changed under `state`.
    live: AtomicUsize,
    state: Mutex<State>,
    over: Condvar,
    flushes: Arc<Flushes>,
}

/// The workers of one queue.
struct Crew {
    queue: Queue,
    /// Those waiting for a request.
    idle: Arc<AtomicUsize>,
    /// Those that there are. Changed under `state`.
    live: AtomicUsize,
}

impl From<Queue> for Crew {
    fn from(queue: Queue) -> Crew {
        Crew {
            queue,
            idle: Arc::default(),
            live: AtomicUsize::new(0),
        }
    }
}

#[derive(Default)]
struct State {
    /// The threads by number, those that ended since the last start included.
    threads: BTreeMap<u64, thread::JoinHandle>,
    /// Threads that have nothing left to do but to let go of what they hold.
    ended: Vec<u64>,
    /// Threads started so far.
    started: u64,
    /// Why a worker stopped early, if one did.
    error: Option<std::io::Error>,
}

impl State {
    /// The threads that ended, but for those whose starter has not put them down yet.
    fn take_ended(&mut self) -> Vec<thread::JoinHandle> {
        let mut taken = Vec::new();
        let threads = &mut self.threads;
        self.ended.retain(|number| match threads.remove(number) {
            Some(thread) => {
                taken.push(thread);
                false
            }
            None => true,
        });
        taken
    }
}

/// For want of a worker that requests hang without.
fn abort_without(error: &std::io::Error) -> ! {
    tracing::error!(%error, "requests of a CPU cannot be taken; aborting so that no caller hangs");
    std::process::abort();
}

/// Waits for the end of a worker that has left its loop.
fn join_worker(thread: thread::JoinHandle) {
    if thread.join().is_err() {
        tracing::error!("a FUSE worker panicked as it let go of its buffers");
    }
}

/// One worker.
#[derive(Clone, Copy)]
struct Worker {
    number: u64,
    queue: usize,
    /// Without it nobody serves its queue.
    needed: bool,
}

impl Crew {
    /// Whether the worker that asks is one too many, and need not be counted as idle any more. Decided and done in one step, so that
    /// of several that see the same number not more go than are too many.
    fn leaves(&self) -> bool {
        let least = self.queue.workers_idle;
        let less = |idle: usize| (idle > least).then(|| idle - 1);
        let counted = self
            .idle
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        counted.is_ok()
    }
}

impl<T: Transport, O: Operations + 'static> Workers<T, O> {
    /// Starts one worker of a queue. Without memory or threads for it the others go on.
    fn start(self: &Arc<Self>, queue: usize) -> std::io::Result<()> {
        let crew = &self.queues[queue];
        if crew.live.load(Ordering::Relaxed) >= crew.queue.workers_max {
            return Ok(());
        }
        let (number, ended) = {
            let mut state = self.state.lock();
            let live = crew.live.load(Ordering::Relaxed);
            if live >= crew.queue.workers_max {
                return Ok(());
            }
            crew.live.fetch_add(1, Ordering::Relaxed);
            self.live.fetch_add(1, Ordering::Relaxed);
            crew.idle.fetch_add(1, Ordering::Relaxed);
            state.started += 1;
            (state.started, state.take_ended())
        };
        ended.into_iter().for_each(join_worker);
        let workers = Arc::clone(self);
        let worker = Worker {
            number,
            queue,
            needed: self.transport.needs_all(),
        };
        let started = self
            .transport
            .channel(queue)
            .and_then(|channel| thread::spawn("fuse", move || workers.run(worker, channel)));
        match started {
            Ok(thread) => {
                self.state.lock().threads.insert(number, thread);
                Ok(())
            }
            Err(error) => {
                crew.idle.fetch_sub(1, Ordering::Relaxed);
                self.gone(queue, &mut self.state.lock());
                Err(error)
            }
        }
    }

    fn run(self: Arc<Self>, worker: Worker, mut channel: T::Channel) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve(worker.queue, &mut channel)));
        match outcome {
            Ok(Err(error)) if worker.needed => abort_without(&error),
            Ok(result) => self.end(worker, result.err()),
            Err(_) => {
                tracing::error!("a FUSE worker panicked; aborting so that no caller hangs");
                std::process::abort();
            }
        }
    }

    fn serve(self: &Arc<Self>, queue: usize, channel: &mut T::Channel) -> std::io::Result<()> {
        let crew = &self.queues[queue];
        if let Err(error) = channel.begin() {
            crew.idle.fetch_sub(1, Ordering::Relaxed);
            return Err(error);
        }
        if crew.queue.workers_max == 1 {
            notify::works_alone();
        }
        let mut surplus = 0;
        loop {
            let more = channel.serve_one(&mut |message, scratch, reply| {
                if crew.idle.fetch_sub(1, Ordering::Relaxed) == 1
                    && let Err(error) = self.start(queue)
                {
                    tracing::debug!(%error, "cannot start another FUSE worker");
                }
                self.handle(message, scratch, reply);
                let idle = crew.idle.fetch_add(1, Ordering::Relaxed) + 1;
                surplus = if idle > crew.queue.workers_idle {
                    surplus + 1
                } else {
                    0
                };
            });
            match more {
                Ok(true) if surplus < SURPLUS_PATIENCE => {}
                Ok(true) if crew.leaves() => return Ok(()),
                Ok(true) => surplus = 0,
                ended => {
                    crew.idle.fetch_sub(1, Ordering::Relaxed);
                    return ended.map(drop);
                }
            }
        }
    }

    /// Serves a request, or leaves it to others: what would have one worker too many wait for a flush.
    fn handle(self: &Arc<Self>, message: &[u8], scratch: &mut [u8], reply: &mut dyn Reply) {
        if !is_flush(message) {
            return self.answer(message, scratch, reply);
        }
        let mut turn = self.flushes.turn();
        if turn.is_none()
            && let Some(mut way) = reply.detached()
        {
            let (workers, message) = (Arc::clone(self), message.to_vec());
            let bytes = message.len();
            let job = move || workers.answer(&message, &mut [], &mut *way);
            turn = self.flushes.leave(Box::new(job), bytes);
            if turn.is_none() {
                return;
            }
        }
        self.answer(message, scratch, reply);
        drop(turn);
    }

    fn answer(&self, message: &[u8], scratch: &mut [u8], reply: &mut dyn Reply) {
        self.dispatcher.handle(message, scratch, reply);
    }

    fn end(&self, worker: Worker, error: Option<std::io::Error>) {
        let mut state = self.state.lock();
        state.ended.push(worker.number);
        if let Some(error) = error {
            tracing::error!(%error, "a FUSE worker stopped");
            state.error.get_or_insert(error);
        }
        self.gone(worker.queue, &mut state);
    }

    /// One less of a queue lives; under the session's lock.
    fn gone(&self, queue: usize, _state: &mut State) {
        self.queues[queue].live.fetch_sub(1, Ordering::Relaxed);
        if self.live.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.over.notify_all();
        }
    }

    /// Waits until no worker is left, nor holds anything of the session.
    fn join(&self) -> Result<(), Error> {
        let (threads, error) = {
            let mut state = self.state.lock();
            while self.live.load(Ordering::Relaxed) > 0 {
                self.over.wait(&mut state);
            }
            (std::mem::take(&mut state.threads), state.error.take())
        };
        threads.into_values().for_each(join_worker);
        match error {
            Some(error) => Err(Error::Serve(error)),
            None => Ok(()),
        }
    }
}

/// Serves `operations` over `transport` until the file system is unmounted, and returns when
/// the last request is answered. `ready` is called once the kernel may send requests.
pub fn serve<T: Transport, O: Operations + 'static>(
    mut transport: T,
    operations: O,
    config: &Config,
    ready: impl FnOnce(),
) -> Result<(), Error> {
    let mut first = transport.channel(0).map_err(Error::Serve)?;
    let mut wanted = (WANTED | transport.wants()) & !transport.refuses();
    if !config.access_lists {
        wanted &= !init::POSIX_ACL;
    }
    if !config.asynchronous_direct {
        wanted &= !init::ASYNC_DIO;
    }
    let negotiated = negotiate(&mut first, wanted)?;
    drop(first);
    transport.agreed(negotiated);
    let workers_max = config.workers_max.max(2);
    let config = Config {
        workers_max,
        workers_idle: config.workers_idle.clamp(1, workers_max),
        ..*config
    };
    let queues: Vec<Crew> = transport
        .queues(&config)
        .into_iter()
        .map(Crew::from)
        .collect();
    let notifier = Notifier::new(transport.bell(), fewest(&queues));
    let droppers = notifier.start().map_err(Error::Serve)?;
    operations.init(negotiated, notifier);
    let backlog = transport.backlog();
    let workers = Arc::new(Workers {
        transport,
        dispatcher: Dispatcher {
            operations,
            negotiated,
            backlog,
        },
        queues,
        live: AtomicUsize::new(0),
        state: Mutex::new(rank::MOUNT_SESSION, State::default()),
        over: Condvar::new(),
        flushes: Arc::new(Flushes::new(workers_max)),
    });
    for (queue, crew) in workers.queues.iter().enumerate() {
        for n in 0..crew.queue.workers_first {
            match workers.start(queue) {
                Ok(()) => {}
                Err(error) if workers.transport.needs_all() => abort_without(&error),
                // One worker is enough to go on with.
                Err(error) if n > 0 => tracing::warn!(%error, "fewer FUSE workers than wanted"),
                Err(error) => return Err(Error::Serve(error)),
            }
        }
    }
    ready();
    let ended = workers.join();
    workers.flushes.finish();
    drop(droppers);
    ended
}

/// The workers of the only queue; of several queues those of the one that has the fewest, but for queues of one, which serve little. These are not
/// looked at: so many as there can be at a queue are there before all of them are busy.
fn fewest(queues: &[Crew]) -> Hands {
    match queues {
        [only] => Hands {
            most: only.queue.workers_max,
            idle: Arc::clone(&only.idle),
        },
        _ => {
            let most = queues.iter().map(|crew| crew.queue.workers_max);
            Hands {
                most: most.filter(|&most| most > 1).min().unwrap_or(1),
                idle: Arc::new(AtomicUsize::new(1)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::IoSlice;

    /// Keeps what was sent.
    struct Kept(Vec<u8>);

    impl Reply for Kept {
        fn send(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
            for part in parts {
                self.0.extend_from_slice(part);
            }
            Ok(true)
        }
    }

    #[test]
    fn requests_fit_whatever_the_kernel_s_pages_are() {
        for page_size in [4096, 16 << 10, 64 << 10, 4 << 20] {
            let pages = usize::from(max_pages(page_size));
            assert!(pages == 1 || pages * page_size == DATA_MAX);
        }
    }

    /// The daemon hung when programs closed files with transfers under way, and so did all who used the mount.
    #[test]
    fn old_kernels_have_no_asynchronous_transfers_on_block_devices() {
        for (release, is_safe) in [
            ("6.18.0", true),
            ("6.18-rc1", true),
            ("7.0.3-generic", true),
            ("10.1", true),
            ("6.17.9", false),
            ("6.8.0-1018-aws", false),
            ("5.4.0", false),
            ("6", false),
            ("", false),
            ("unknown", false),
        ] {
            assert_eq!(may_be_asynchronous(true, release), is_safe, "{release}");
            assert!(may_be_asynchronous(false, release));
        }
    }

    fn init_message(major: u32, minor: u32, flags: u64) -> Vec<u8> {
        let input = abi::InitIn {
            major,
            minor,
            max_readahead: 131_072,
            flags: flags as u32,
        };
        let mut body = input.as_bytes().to_vec();
        body.extend_from_slice(&((flags >> 32) as u32).to_ne_bytes());
        body.extend_from_slice(&[0; 44]);
        let header = abi::InHeader {
            len: (size_of::<abi::InHeader>() + body.len()) as u32,
            opcode: abi::opcode::INIT,
            unique: 2,
            ..Default::default()
        };
        [header.as_bytes(), &body].concat()
    }

    #[test]
    fn only_offered_flags_are_taken() {
        let mut reply = Kept(Vec::new());
        let offered = init::INIT_EXT | init::POSIX_ACL | init::WRITEBACK_CACHE;
        let flags = answer_init(&init_message(7, 38, offered), WANTED, &mut reply);
        assert_eq!(flags.unwrap().unwrap(), init::INIT_EXT | init::POSIX_ACL);
        assert_eq!(reply.0.len(), 16 + 64);
    }

    #[test]
    fn a_newer_major_version_is_asked_to_fall_back() {
        let mut reply = Kept(Vec::new());
        assert!(answer_init(&init_message(8, 0, 0), WANTED, &mut reply).is_none());
        assert_eq!(reply.0.len(), 16 + 64);
    }

    #[test]
    fn an_old_kernel_is_refused_by_name() {
        let mut reply = Kept(Vec::new());
        let refused = answer_init(&init_message(7, 26, 0), WANTED, &mut reply).unwrap();
        assert!(matches!(
            refused,
            Err(Error::KernelTooOld {
                major: 7,
                minor: 26
            })
        ));
    }

    #[test]
    fn something_else_than_init_first_is_an_error() {
        let mut reply = Kept(Vec::new());
        assert!(
            answer_init(b"garbage", WANTED, &mut reply)
                .unwrap()
                .is_err()
        );
    }
}

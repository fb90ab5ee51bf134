//! The io_uring backend: a ring per device and thread for who waits, and one per owner of queues.
//!
//! Owns the calling thread's rings and, during [`run`], the requests in flight on one.
//!
//! 1. A thread's ring belongs to it and one device, so that nothing is shared and a slow
//!    device stalls only those who wait for it. It is made at the first I/O and dropped when
//!    the thread ends, or when the thread makes another ring after the device is gone.
//! 2. The ring of a [`RingQueue`] is for all of its owner's devices, and may be used by one thread after another: with as
//!    many devices one call of the kernel starts and finds what is in flight on all of them.
//! 3. A batch on a ring that polls the device ([`polled`]) has nothing but transfers, and is waited for by who looks.
//! 4. The kernel uses memory between submission and completion (see [`ring`](Ring)): [`Batch`] and [`RingQueue`] do not go
//!    away, by return or by panic, before all has completed.
//!
//! 5. Threads keep no more rings for calls that wait than leave the program most of its descriptors ([`bound`]).
//!
//! A thread that cannot get a ring (out of descriptors) does its I/O by plain calls, and who has queues gets a smaller ring, or a
//! pool's threads ([`as_deep`]). Fork
//! before opening devices: a ring does not follow into the child, which dies if it touches one.

mod bound;
pub(crate) mod polled;
pub(crate) mod raw;
mod ring;
pub(crate) mod vectored;
mod workers;

use crate::block::{Durability, Operation, Request};
use crate::buf::{self, Loans};
use crate::file::FileDevice;
use crate::kept::Kept;
use crate::queue::{Bell, Ended, Kind, Part, Queue, Wake};
use crate::reap::{Class, Group, Reaper, Seen, Times};
use crate::threads;
use base::clock;
use base::mapping::Mapping;
use base::sys;
use bound::{Bound, Counted};
use io_uring::{IoUring, Probe, opcode};
use polled::Looked;
use ring::{All, News, Ring};
use std::cell::RefCell;
use std::io;
use std::iter;
use std::slice;
use std::sync::Arc;
use std::time::Duration;
use workers::Workers;

const RING_ENTRIES: u32 = 64;

thread_local! {
    /// Of each sort.
    static RINGS: [RefCell<Kept<OfThread<Ring>>>; 2] = const { [const { RefCell::new(Kept::new()) }; 2] };
}

/// Of all threads' rings.
static BOUND: Bound = Bound::new();

/// The kernel's, for all rings of the process.
static WORKERS: Workers = Workers::new();

type OfThread<R> = Counted<'static, R>;

/// How the completions of a ring come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    /// By interrupts of the device.
    Ordinary,
    /// Who looks for them polls the device.
    Polled,
}

/// Finds out whether this process may use io_uring and it has all that is needed.
pub(crate) fn probe() -> io::Result<()> {
    let mut ring = make_ring(2, Sort::Ordinary)?;
    try_enter(&mut ring)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE];
    if needed.iter().all(|&code| probe.is_supported(code)) {
        Ok(())
    } else {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Has the kernel do nothing: where rings may be made, and not be used, as under some filters of system calls (seccomp), no transfer is to find that out.
fn try_enter(ring: &mut IoUring) -> io::Result<()> {
    // SAFETY: the entry names neither memory nor a descriptor.
    let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    pushed.map_err(io::Error::other)?;
    loop {
        match ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        if let Some(done) = ring.completion().next() {
            return match done.result() {
                error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
                _ => Ok(()),
            };
        }
    }
}

/// What every ring is made by. Its queues are not in the memory of a child that the process forks: who uses one there dies of it,
/// and does not take from the parent what is in flight.
fn builder() -> io_uring::Builder {
    let mut builder = IoUring::builder();
    builder.dontfork();
    builder
}

/// Parts of a device at a time below which a pool's threads do as well as a ring.
const DEPTH_MIN: usize = 2;

/// A ring for so many parts of each device, or for half as many, as often as it takes while the kernel lacks memory for more; with
/// how many it is. `None`: the kernel gives no ring now.
///
/// # Errors
/// It is something else than a lack.
pub(crate) fn as_deep<R>(
    most: usize,
    make: impl Fn(usize) -> io::Result<R>,
) -> io::Result<Option<(R, usize)>> {
    let mut depth = most;
    loop {
        match make(depth) {
            Ok(ring) => return Ok(Some((ring, depth))),
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && depth > DEPTH_MIN => {
                depth = (depth / 2).max(DEPTH_MIN);
            }
            Err(error) if is_lack(&error) => {
                let remedy = crate::error::ring_remedy(&error);
                tracing::warn!("no ring for transfers in flight, threads do them: {error}{remedy}");
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
    }
}

/// The kernel has no ring to give now, or to this process; it had one, or none of that size, when the devices were opened.
fn is_lack(error: &io::Error) -> bool {
    let lacks = [
        libc::ENOMEM,
        libc::EAGAIN,
        libc::EMFILE,
        libc::ENFILE,
        libc::EPERM,
        libc::EACCES,
        libc::ENOSYS,
    ];
    error.raw_os_error().is_some_and(|n| lacks.contains(&n))
}

fn make_ring(entries: u32, sort: Sort) -> io::Result<IoUring> {
    if sort == Sort::Polled {
        return polled::build(entries);
    }
    // Completions are run when the owner waits, not by interrupting it; kernels before 6.1
    // do not know this and do without.
    builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(entries)
        .or_else(|_| builder().build(entries))
}

/// A ring of a thread's, within the bound; for many requests also one that is not kept.
fn make_counted<R>(many: bool, make: impl FnOnce() -> io::Result<R>) -> io::Result<OfThread<R>> {
    BOUND.make((clock::now_ns(), sys::descriptors_max()), many, make)
}

fn take_ring(device: &FileDevice, sort: Sort, many: bool) -> io::Result<OfThread<Ring>> {
    match RINGS.try_with(|rings| rings[sort as usize].borrow_mut().take(&device.id)) {
        Ok(Some(ring)) => Ok(ring),
        // While a thread ends its table is gone: a ring for this batch alone.
        Ok(None) | Err(_) => make_counted(many, || {
            let ring = make_ring(RING_ENTRIES, sort)?;
            Ok(Ring::new(ring, RING_ENTRIES as usize).of_sort(sort))
        }),
    }
}

fn keep_ring(device: &FileDevice, ring: OfThread<Ring>) {
    if !ring.may_stay() {
        return;
    }
    let sort = ring.ring.sort();
    // An error means that the thread ends: the ring is dropped with the closure.
    let keep = |rings: &[RefCell<Kept<OfThread<Ring>>>; 2]| {
        let kept = &rings[sort as usize];
        kept.borrow_mut().keep(&device.id, ring);
    };
    let kept = RINGS.try_with(keep);
    tracing::trace!(kept = kept.is_ok(), "ring");
}

/// See [`crate::BlockDevice::run`].
pub(crate) fn run(
    device: &FileDevice,
    requests: &mut [Request<'_>],
    meanwhile: Option<&mut dyn FnMut()>,
) {
    let reaper = &device.reaper;
    let mut times = reaper.take();
    let class = Class::of_operations(requests.iter().map(|request| &request.operation));
    let group = reaper.begin(&mut times, class);
    let sort = match device.polled && !group.blocks() && polled::takes(requests) {
        true => Sort::Polled,
        false => Sort::Ordinary,
    };
    if let ([request], None) = (&mut *requests, &meanwhile)
        && call_is_as_good(device, request, group)
    {
        let perform = || threads::perform(device, request);
        reaper.block(&mut times, group, perform);
    } else {
        let waiting = Waiting {
            reaper,
            times: &mut times,
            group: (requests.len() <= RING_ENTRIES as usize).then_some(group),
        };
        let seen = run_on_ring((device, sort), requests, meanwhile, waiting);
        if let Some(seen) = seen.filter(|seen| seen.tells() && reaper.learns()) {
            // With all that a ring is more than the call that blocks.
            reaper.judge(&mut times, group, seen, clock::now_ns());
        }
    }
    reaper.keep(times);
}

/// How the requests of one call are waited for.
struct Waiting<'r> {
    reaper: &'r Reaper,
    times: &'r mut Times,
    /// `None`: they are more than are in flight at a time.
    group: Option<Group>,
}

fn run_on_ring(
    (device, sort): (&FileDevice, Sort),
    requests: &mut [Request<'_>],
    meanwhile: Option<&mut dyn FnMut()>,
    waiting: Waiting<'_>,
) -> Option<Seen> {
    let many = requests.len() > 1 || meanwhile.is_some();
    let ordinary = |error: io::Error| match sort {
        Sort::Polled => take_ring(device, Sort::Ordinary, many),
        Sort::Ordinary => Err(error),
    };
    let mut ring = match take_ring(device, sort, many).or_else(ordinary) {
        Ok(ring) => ring,
        Err(error) => {
            tracing::debug!(%error, "no ring for this thread");
            if let Some(meanwhile) = meanwhile {
                meanwhile();
            }
            for request in requests {
                threads::perform(device, request);
            }
            return None;
        }
    };
    let mut seen = None;
    buf::scope(|loans| {
        let mut batch = Batch {
            errors: Vec::with_capacity(requests.len()),
            ring: &mut ring.ring,
            device,
            loans,
            rest: requests.iter_mut(),
            ended: Vec::new(),
        };
        batch.fill();
        if let Some(meanwhile) = meanwhile {
            batch.ring.start();
            meanwhile();
        }
        seen = batch.finish(waiting);
    });
    keep_ring(device, ring);
    seen
}

/// Blocking in the kernel for one request is what a plain call does, without the ring's
/// detour (for a flush, through a worker thread of the kernel's). Batches on other devices,
/// if any, are in flight already. A durable write to a block device is the exception: a call
/// flushes the whole device after a write that was forced to the medium by itself.
fn call_is_as_good(device: &FileDevice, request: &Request<'_>, group: Group) -> bool {
    let durable = matches!(
        request.operation,
        Operation::Write {
            durability: Durability::Durable,
            ..
        }
    );
    group.blocks() && !(durable && device.block_device)
}

/// The requests of one call of [`run`] (invariant 4).
struct Batch<'r, 'b, 'a> {
    ring: &'r mut Ring,
    device: &'r FileDevice,
    loans: &'r mut Loans<'b>,
    /// Requests that were never submitted.
    rest: slice::IterMut<'b, Request<'a>>,
    /// Where each that was submitted tells its error; a part's mark is its place here.
    errors: Vec<&'b mut Option<io::Error>>,
    ended: Vec<Ended>,
}

impl<'b> Batch<'_, 'b, '_> {
    /// Queues requests while the ring has room; those that failed before are passed over.
    fn fill(&mut self) {
        while !self.ring.is_full() {
            let Some(request) = self.rest.by_ref().find(|r| r.error.is_none()) else {
                return;
            };
            let part = Part::lent(request, &mut self.errors, self.loans);
            self.ring.push(&[self.device], part);
        }
    }

    /// Submits and waits until every request has ended; how the last wait of a group did.
    fn finish(&mut self, waiting: Waiting<'_>) -> Option<Seen> {
        let mut seen = None;
        let Waiting {
            reaper,
            times,
            group,
        } = waiting;
        loop {
            self.fill();
            if self.ring.in_flight() == 0 {
                return seen;
            }
            // With more to submit, the first free entry is worth waking up for.
            let more = self.rest.len() > 0;
            let want = if more { 1 } else { self.ring.in_flight() };
            match group {
                Some(group) => {
                    let ring = &mut *self.ring;
                    seen = Some(match ring.sort() {
                        Sort::Ordinary => {
                            reaper.wait_within(times, group, &mut All::new(ring, want))
                        }
                        Sort::Polled => reaper.wait_within(times, group, &mut Looked(ring)),
                    });
                }
                None => self.ring.wait(want),
            }
            self.collect();
        }
    }

    fn collect(&mut self) {
        self.ring.collect(&[self.device], &mut self.ended);
        for Ended { part, result } in self.ended.drain(..) {
            *self.errors[part.user as usize] = result.err();
            if part.kind != Kind::Flush {
                self.loans.give_back(part.segment);
            }
        }
    }
}

impl Drop for Batch<'_, '_, '_> {
    /// Reached with requests in flight only by a panic in between: waits for them.
    fn drop(&mut self) {
        while self.ring.in_flight() > 0 {
            self.ring.wait(self.ring.in_flight());
            self.collect();
        }
    }
}

/// What an owner has in flight on all of its devices that are reached by io_uring (invariant 2).
pub(crate) struct RingQueue {
    ring: Ring,
    devices: Vec<Arc<FileDevice>>,
    /// Failed before they got there.
    refused: Vec<Ended>,
    /// Nobody but one thread uses it.
    own: bool,
}

impl RingQueue {
    /// A queue with room for so many parts.
    pub fn new(devices: &[Arc<FileDevice>], parts: usize) -> io::Result<RingQueue> {
        let entries = u32::try_from(parts).map_err(|_| io::ErrorKind::InvalidInput)?;
        // Not of one issuer, as a thread's own: the owner may go to another thread while parts are in flight. Completions
        // are run when a thread enters the kernel anyway; kernels before 5.19 interrupt it.
        let build = |modern| {
            let mut builder = builder();
            builder.setup_cqsize(2 * entries + 2);
            if modern {
                builder.setup_coop_taskrun().setup_taskrun_flag();
            }
            builder.build(entries)
        };
        let ring = build(true).or_else(|_| build(false))?;
        let reapers = devices.iter().map(|device| Arc::clone(&device.reaper));
        Ok(RingQueue {
            ring: Ring::new(ring, parts).timed(reapers),
            devices: devices.to_vec(),
            refused: Vec::new(),
            own: false,
        })
    }

    /// The same of one device, for nobody but the calling thread.
    pub fn of_thread(device: Arc<FileDevice>, parts: usize) -> io::Result<RingQueue> {
        let entries = u32::try_from(parts).map_err(|_| io::ErrorKind::InvalidInput)?;
        let build = |modern| {
            let mut builder = builder();
            builder.setup_cqsize(2 * entries + 2);
            if modern {
                builder.setup_single_issuer().setup_defer_taskrun();
                builder.setup_taskrun_flag();
            }
            builder.build(entries)
        };
        let ring = build(true).or_else(|_| build(false))?;
        Ok(RingQueue {
            ring: Ring::new(ring, parts).timed(iter::once(Arc::clone(&device.reaper))),
            devices: vec![device],
            refused: Vec::new(),
            own: true,
        })
    }
}

impl Queue for RingQueue {
    fn push(&mut self, part: Part) {
        match self.devices[part.device].refuses(part.kind == Kind::Read) {
            Some(error) => self.refused.push(Ended {
                part,
                result: Err(error),
            }),
            None => self.ring.push(&self.devices, part),
        }
    }

    fn register(&mut self, memory: &Arc<Mapping>) {
        self.ring.register(memory);
    }

    fn ring(&mut self) {
        self.ring.start();
    }

    fn reap(&mut self, ended: &mut Vec<Ended>) {
        ended.append(&mut self.refused);
        // What was pushed since is started by its owner, or by a wait, which does both by one call.
        if let News::InKernel = self.ring.has_news() {
            self.ring.enter();
        }
        self.ring.collect(&self.devices, ended);
        self.ring.start_again();
    }

    fn wake(&self) -> Wake<'_> {
        match self.refused.is_empty() {
            true => Wake::Kernel,
            false => Wake::Now,
        }
    }

    fn wait(&mut self, bell: Option<(&Bell, u64)>, patience: Option<Duration>) {
        // The wait of a ring's own thread starts and finds all by one call.
        if !self.own
            && let News::InKernel = self.ring.has_news()
        {
            // What another thread submitted may say so for as long as that thread does something else: nobody spins for it.
            self.ring.enter();
        }
        match self.ring.has_news() {
            News::Here => self.ring.start(),
            News::InKernel | News::None => self.ring.wait_first(bell, patience),
        }
    }

    fn cancel(&mut self, mine: &dyn Fn(u64) -> bool) {
        self.ring.cancel(mine);
    }
}

impl Drop for RingQueue {
    fn drop(&mut self) {
        self.ring.drain(&self.devices, &mut self.refused);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::AlignedBuf;
    use crate::error::Error;
    use crate::file::{Backend, Engine, OpenOptions, open_devices};
    use crate::reap::{Costs, Reaping};
    use base::clock::Clock;
    use polled::ReapRing;

    /// The first transfer found it out, and ended the process.
    #[test]
    fn a_ring_that_may_be_made_and_not_used_is_none() {
        if probe().is_err() {
            return base::skip("io_uring");
        }
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        crate::create_image(&path, 1 << 20).unwrap();
        for number in [libc::ENOSYS, libc::EPERM] {
            let paths = vec![path.clone()];
            let forbidden = move || {
                if let Err(error) = forbid(libc::SYS_io_uring_enter, number) {
                    return base::skip(&format!("filters of system calls ({error})"));
                }
                assert_eq!(probe().unwrap_err().raw_os_error(), Some(number));
                let mut options = OpenOptions {
                    backend: Backend::IoUring,
                    ..OpenOptions::default()
                };
                let refused = open_devices(&paths, &options).err().unwrap();
                assert!(matches!(refused, Error::NoIoUring { .. }), "{refused}");
                options.backend = Backend::Auto;
                let devices = open_devices(&paths, &options).unwrap();
                let mut read = AlignedBuf::zeroed(4096);
                let operation = Operation::Read {
                    offset: 0,
                    buf: &mut read,
                };
                let mut requests = [Request::new(operation, 0)];
                devices[0].run(&mut requests, None);
                assert!(requests[0].error.is_none());
            };
            // The filter is its own, and goes with it.
            let other = base::thread::spawn("filtered", forbidden).unwrap();
            other.join().unwrap();
        }
    }

    /// Has a system call of the calling thread fail so.
    fn forbid(call: libc::c_long, number: i32) -> io::Result<()> {
        let step = |code, k, jf| libc::sock_filter {
            code: code as u16,
            jt: 0,
            jf,
            k,
        };
        let mut filter = [
            // The number is what begins `seccomp_data`.
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
            step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, 1),
            step(
                libc::BPF_RET | libc::BPF_K,
                libc::SECCOMP_RET_ERRNO | number as u32,
                0,
            ),
            step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
        ];
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_mut_ptr(),
        };
        let mode = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
        // SAFETY: the kernel copies the program, which names the filter, before it returns.
        let done = unsafe {
            match libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) {
                0 => libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program),
                failed => failed,
            }
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// On a file, or a file system, that knows no such queues the kernel refuses each transfer.
    #[test]
    fn what_a_polled_ring_does_not_take_is_done_by_calls() {
        if probe().is_err() || make_ring(2, Sort::Polled).is_err() {
            return base::skip("polled io_uring");
        }
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        crate::create_image(&path, 1 << 20).unwrap();
        for reap in [Reaping::Poll, Reaping::Lazy] {
            let options = OpenOptions {
                reap,
                reap_ring: ReapRing::Iopoll,
                ..OpenOptions::default()
            };
            let mut device = FileDevice::open(&path, &options, Engine::Uring).unwrap();
            assert!(!device.polled);
            device.polled = true;
            for round in 0..100u8 {
                let written: Vec<AlignedBuf> = (0..4)
                    .map(|at| AlignedBuf::from_slice(&[round ^ at; 4096]))
                    .collect();
                let mut writes: Vec<Request<'_>> = written
                    .iter()
                    .zip((0..).step_by(4096))
                    .map(|(buf, offset)| {
                        let durability = Durability::Volatile;
                        Request::new(
                            Operation::Write {
                                offset,
                                buf,
                                durability,
                            },
                            0,
                        )
                    })
                    .collect();
                run(&device, &mut writes, None);
                assert!(writes.iter().all(|request| request.error.is_none()));
                let mut read = AlignedBuf::zeroed(4 * 4096);
                let mut reads: Vec<Request<'_>> = read
                    .chunks_mut(4096)
                    .zip((0..).step_by(4096))
                    .map(|(buf, offset)| Request::new(Operation::Read { offset, buf }, 0))
                    .collect();
                run(&device, &mut reads, None);
                assert!(reads.iter().all(|request| request.error.is_none()));
                for (read, written) in read.chunks(4096).zip(&written) {
                    assert_eq!(read, &written[..]);
                }
            }
        }
    }

    /// Who looked before he slept found what had ended a moment ago, and left what was pushed where nobody else would start it.
    #[test]
    fn a_lazy_wait_starts_what_was_pushed_also_if_it_has_not_to_wait() {
        if probe().is_err() {
            return base::skip("io_uring");
        }
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        crate::create_image(&path, 1 << 20).unwrap();
        let options = OpenOptions {
            reap: Reaping::Lazy,
            ..OpenOptions::default()
        };
        let device = FileDevice::open(&path, &options, Engine::Uring).unwrap();
        let mut queue = RingQueue::new(&[Arc::new(device)], 4).unwrap();
        for count in [1, 2] {
            let class = Class::of(Kind::Read, 4096, count);
            queue.ring.teach(class, 50 * Costs::get().wake_ns);
        }
        let mut lent = buf::Lent::new(AlignedBuf::zeroed(8192));
        let mut part = |user: u64| Part {
            user,
            device: 0,
            kind: Kind::Read,
            offset: 0,
            segment: lent.lend(user as usize * 4096..(user as usize + 1) * 4096),
        };
        let (first, second) = (part(0), part(1));
        queue.push(first);
        queue.ring();
        while !queue.ring.has_completed() {
            queue.ring.enter();
        }
        queue.push(second);
        assert!(queue.ring.has_queued());
        queue.ring.wait_first(None, None);
        assert!(!queue.ring.has_queued());
        let mut ended = Vec::new();
        queue.ring.drain(&queue.devices, &mut ended);
        assert_eq!(ended.len(), 2);
        for Ended { part, result } in ended {
            result.unwrap();
            lent.give_back(part.segment);
        }
    }

    #[test]
    fn memory_that_was_told_is_registered_and_other_memory_goes_on_beside_it() {
        if probe().is_err() {
            return base::skip("io_uring");
        }
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        crate::create_image(&path, 1 << 20).unwrap();
        let options = OpenOptions::default();
        let device = FileDevice::open(&path, &options, Engine::Uring).unwrap();
        let mut queue = RingQueue::new(&[Arc::new(device)], 4).unwrap();
        let mut known = AlignedBuf::in_large_pages(4096, 2);
        queue.register(known[0].mapping().unwrap());
        // Nothing that a process may not lock by default, 8 MiB.
        assert_eq!(queue.ring.registered_count(), 1);
        let (known, unknown) = (known.pop().unwrap(), AlignedBuf::zeroed(4096));
        for (mut memory, kept, value) in [(known, true, 7), (unknown, false, 8)] {
            for kind in [Kind::Write(Durability::Durable), Kind::Read] {
                if kind != Kind::Read {
                    memory.fill(value);
                }
                let mut lent = buf::Lent::new(memory);
                let part = Part {
                    user: 1,
                    device: 0,
                    kind,
                    offset: 8192,
                    segment: lent.lend(0..4096),
                };
                assert_eq!(queue.ring.number_of(&part).is_some(), kept);
                queue.push(part);
                let mut ended = Vec::new();
                while ended.is_empty() {
                    queue.wait(None, None);
                    queue.reap(&mut ended);
                }
                let Ended { part, result } = ended.pop().unwrap();
                result.unwrap();
                lent.give_back(part.segment);
                memory = lent.into_inner();
                assert!(memory.iter().all(|&byte| byte == value), "{kind:?}");
                memory.fill(0);
            }
        }
        // More than are taken, of which nobody need know.
        for _ in 0..40 {
            let more = AlignedBuf::in_large_pages(512, 1);
            queue.register(more[0].mapping().unwrap());
        }
        assert_eq!(queue.ring.registered_count(), 16);
    }

    /// One of all the entries or none at all was what an owner got.
    #[test]
    fn a_ring_is_as_deep_as_the_kernel_has_memory_for() {
        let lack = |number| move || io::Error::from_raw_os_error(number);
        let within = |room: usize| {
            move |depth: usize| (depth <= room).then_some(()).ok_or_else(lack(libc::ENOMEM))
        };
        let depth = |most, room| as_deep(most, within(room)).unwrap().map(|(_, depth)| depth);
        assert_eq!(depth(256, 256), Some(256));
        assert_eq!(depth(256, 100), Some(64));
        assert_eq!(depth(5, 2), Some(2));
        assert_eq!(depth(1, 1), Some(1));
        assert_eq!((depth(256, 1), depth(1, 0)), (None, None));
        for number in [libc::EMFILE, libc::ENFILE, libc::EPERM] {
            // Smaller ones need as many descriptors.
            let tries = std::cell::Cell::new(0);
            let made = as_deep(256, |_| {
                tries.set(tries.get() + 1);
                Err::<(), _>(lack(number)())
            });
            assert!(matches!(made, Ok(None)) && tries.get() == 1);
        }
        assert!(as_deep(256, |_| Err::<(), _>(lack(libc::EINVAL)())).is_err());
    }

    /// It was a call that sleeps, whatever the policy.
    #[test]
    fn a_flush_by_itself_is_waited_for_by_the_policy() {
        if probe().is_err() {
            return base::skip("io_uring");
        }
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        crate::create_image(&path, 1 << 20).unwrap();
        for (reap, blocked) in [(Reaping::Interrupt, 8), (Reaping::Poll, 0)] {
            let options = OpenOptions {
                reap,
                ..OpenOptions::default()
            };
            let device = FileDevice::open(&path, &options, Engine::Uring).unwrap();
            for _ in 0..8 {
                let mut flush = [Request::new(Operation::Flush, 0)];
                run(&device, &mut flush, None);
                assert!(flush[0].error.is_none());
            }
            let reaped = device.reaper.reaped();
            assert_eq!((reaped.waits, reaped.timed), (8, 8));
            assert_eq!((reaped.blocked, reaped.caught), (blocked, 8 - blocked));
        }
    }

    #[test]
    fn only_transfers_without_a_flush_go_to_a_polled_ring() {
        let buf = [0; 512];
        let write = |durability| {
            let buf = &buf[..];
            Request::new(
                Operation::Write {
                    offset: 0,
                    buf,
                    durability,
                },
                0,
            )
        };
        assert!(polled::takes(&[
            write(Durability::Volatile),
            write(Durability::Checked)
        ]));
        assert!(!polled::takes(&[
            write(Durability::Volatile),
            write(Durability::Durable)
        ]));
        assert!(!polled::takes(&[Request::new(Operation::Flush, 0)]));
        let many: Vec<Request<'_>> = (0..=RING_ENTRIES)
            .map(|_| write(Durability::Volatile))
            .collect();
        assert!(!polled::takes(&many) && polled::takes(&many[1..]));
    }

    #[test]
    fn whoever_waits_for_a_ring_hears_a_bell_and_has_patience() {
        let Ok(mut queue) = RingQueue::new(&[], 4) else {
            return base::skip("io_uring");
        };
        let bell = Arc::new(Bell::new());
        for _ in 0..100 {
            let rung = bell.rung();
            let rings = Arc::clone(&bell);
            let other = base::thread::spawn("rings", move || rings.ring()).unwrap();
            while bell.rung() == rung {
                queue.wait(Some((&bell, rung)), None);
                queue.reap(&mut Vec::new());
            }
            other.join().unwrap();
        }
        let (clock, time) = (Clock::real(), Duration::from_millis(20));
        let start = clock.monotonic_ns();
        // It may end early, not late for ever.
        while clock.monotonic_ns() - start < time.as_nanos() as u64 {
            queue.wait(Some((&bell, bell.rung())), Some(time));
            queue.reap(&mut Vec::new());
        }
        queue.wait(None, Some(time));
    }
}

//! Parts in flight on one ring, whoever owns it: a batch of a thread, or somebody's queue.
//!
//! 1. The kernel uses a part's memory between submission and completion. The part is in a slot until then, and nobody else
//!    has it; a ring is not dropped before its slots are empty ([`Ring::drop`]).
//! 2. A slot is in flight once at most, and there are no more slots than entries: the submission queue has room for all of
//!    them, and the completion queue, longer than twice as many, for each of them, a cancel of each, and the bell.
//! 3. Short transfers go on where they stopped; what the kernel turned away is submitted again, and after so many times done
//!    by a plain call. It also turns away what a thread has submitted that has ended since. Where it gives back a part twice, it has no thread for it
//!    ([`Workers`]): that is done by a call at once, and for a while so are all flushes, and writes that would need one.
//! 4. Memory that is registered is mapped as long as the ring is there, and a mapping has one number at most. So a part whose memory is of such a
//!    mapping lies in what the kernel has under its number.

use super::workers::Workers;
use super::{Sort, WORKERS};
use crate::block::{BlockDevice, Durability};
use crate::file::FileDevice;
use crate::queue::{Bell, Ended, Kind, Part, Sleep, cancelled};
use crate::reap::{BELL_EACH, Class, Group, Reaper, Seen, Source, Times, enter};
use crate::threads;
use base::mapping::Mapping;
use base::{clock, thread};
use io_uring::{IoUring, opcode, squeue, types};
use std::collections::VecDeque;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

/// Largest single transfer; the kernel's own limit is just below 2 GiB.
const TRANSFER_MAX: usize = 1 << 30;
/// How often a request that the kernel turned away is submitted again before it is done by a
/// plain call instead.
const RETRIES_MAX: u8 = 16;
/// Marks of entries that are no part's.
const CANCELS: u64 = u64::MAX;
const BELL: u64 = u64::MAX - 1;
/// How long who cannot be woken by a bell sleeps at a time.
const DEAF: Duration = Duration::from_millis(1);
/// Mappings that a ring registers at most.
const REGISTERED_MAX: u32 = 16;
/// Bytes of one at most, to the kernel.
const REGISTERED_BYTES_MAX: usize = 1 << 30;
/// With more in flight something ends all the time, and who waits for it sleeps as by an interrupt.
const LOOKED_AT: usize = 64;

/// A ring and what is in flight on it; see the module's head.
pub(super) struct Ring {
    ring: IoUring,
    sort: Sort,
    /// Completions that were taken out and not collected. On a ring that polls they are once they are found: the kernel does not look
    /// for more while its queue has some.
    taken: VecDeque<(u64, i32)>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots to submit again.
    again: Vec<u32>,
    /// Entries that the kernel has not seen.
    queued: usize,
    /// None of them was offered to it.
    untried: bool,
    /// Some of these were in flight before.
    resubmitted: bool,
    /// The kernel looks at the bell.
    listens: bool,
    /// What times parts, each by itself.
    timed: Option<Timed>,
    /// Memory that the kernel knows, by its numbers.
    registered: Vec<Arc<Mapping>>,
    /// The process's; a test's own.
    workers: &'static Workers,
}

struct Timed {
    /// Of each device.
    devices: Vec<(Arc<Reaper>, Times)>,
    /// Parts of each device that were pushed.
    pushed: Vec<u64>,
    /// How what is in the completion queue was found; `None`: by nobody yet.
    seen: Option<Seen>,
}

#[derive(Default)]
struct Slot {
    part: Option<Part>,
    done: usize,
    retries: u8,
    /// It has been [given back](is_given_back).
    was_given_back: bool,
    way: Way,
    cancelled: bool,
    /// With what it has in common how long it takes, and when it was pushed, if its time is taken.
    pushed: Option<(Class, u64)>,
}

/// How the kernel was asked for a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Way {
    /// To do it, by a thread of its own if need be.
    #[default]
    Any,
    /// To do it at once, or to say that it cannot.
    AtOnce,
    /// For its completion alone: whoever collects that does the part by a call.
    Call,
}

impl Way {
    fn of(kind: Kind, lacks_workers: bool) -> Way {
        match kind {
            // The kernel reads at once what it can read at all, past the page cache; it may wait for what is in its cache.
            _ if !lacks_workers => Way::Any,
            Kind::Read => Way::Any,
            Kind::Write(_) => Way::AtOnce,
            Kind::Flush => Way::Call,
        }
    }
}

impl Ring {
    pub fn new(ring: IoUring, entries: usize) -> Ring {
        Ring {
            ring,
            sort: Sort::Ordinary,
            taken: VecDeque::new(),
            slots: (0..entries).map(|_| Slot::default()).collect(),
            free: (0..entries as u32).rev().collect(),
            again: Vec::with_capacity(entries),
            queued: 0,
            untried: false,
            resubmitted: false,
            listens: false,
            timed: None,
            registered: Vec::new(),
            workers: &WORKERS,
        }
    }

    /// A ring that was made so.
    pub fn of_sort(mut self, sort: Sort) -> Ring {
        self.sort = sort;
        self
    }

    pub fn sort(&self) -> Sort {
        self.sort
    }

    /// Parts of each device are waited for as its reaper says; all have one policy.
    pub fn timed(mut self, reapers: impl Iterator<Item = Arc<Reaper>>) -> Ring {
        let devices: Vec<_> = reapers.map(|reaper| (reaper, Times::default())).collect();
        self.timed = (!devices.is_empty()).then(|| Timed {
            pushed: vec![0; devices.len()],
            devices,
            seen: None,
        });
        self
    }

    /// Tells the kernel of memory that parts may be of: it looks its pages up now, not for each part. Where it has no room for that, or
    /// this process no right to (`ulimit -l`), parts of it are like any others.
    pub fn register(&mut self, memory: &Arc<Mapping>) {
        let number = self.registered.len() as u32;
        if number >= REGISTERED_MAX || memory.size() > REGISTERED_BYTES_MAX {
            return;
        }
        let vector = libc::iovec {
            iov_base: memory.start().as_ptr().cast(),
            iov_len: memory.size(),
        };
        let submitter = self.ring.submitter();
        let table = match number {
            0 => submitter.register_buffers_sparse(REGISTERED_MAX),
            _ => Ok(()),
        };
        // SAFETY: the memory stays mapped as long as the ring is there (invariant 4), and the kernel uses it for parts alone (invariant 1).
        let told = table
            .and_then(|()| unsafe { submitter.register_buffers_update(number, &[vector], None) });
        match told {
            Ok(()) => self.registered.push(Arc::clone(memory)),
            Err(error) => {
                tracing::debug!(%error, "memory is not registered with io_uring, each transfer costs a little more");
                // The table, if it was made, is of no use, and a second cannot be made beside it.
                if number == 0
                    && let Err(error) = submitter.unregister_buffers()
                {
                    tracing::trace!(%error, "there was no table of memory");
                }
            }
        }
    }

    /// Has transfers of a class take so long.
    #[cfg(test)]
    pub fn teach(&mut self, class: Class, ns: u64) {
        for (_, times) in self.timed.iter_mut().flat_map(|timed| &mut timed.devices) {
            times.teach(class, ns);
        }
    }

    #[cfg(test)]
    pub fn has_queued(&self) -> bool {
        self.queued > 0
    }

    #[cfg(test)]
    pub fn registered_count(&self) -> usize {
        self.registered.len()
    }

    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether a thread of the kernel's does some of what is in flight.
    fn has_threads(&self) -> bool {
        let mut parts = self.slots.iter().filter_map(|slot| slot.part.as_ref());
        parts.any(|part| part.kind.takes_a_thread())
    }

    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Queues a part of one of these devices; there is a free slot. The devices are open until it has been collected.
    pub fn push<D: Deref<Target = FileDevice>>(&mut self, devices: &[D], part: Part) {
        let index = self.free.pop().expect("there is room (invariant 2)");
        let pushed = self.times(&part);
        self.slots[index as usize] = Slot {
            pushed,
            part: Some(part),
            ..Slot::default()
        };
        self.submit(devices, index);
    }

    /// When it is pushed, and what times like its are kept under.
    fn times(&mut self, part: &Part) -> Option<(Class, u64)> {
        let in_flight = self.in_flight();
        let timed = self.timed.as_mut()?;
        let number = timed.pushed.get_mut(part.device)?;
        *number += 1;
        let since = timed.devices.get(part.device)?.0.start(*number)?;
        let class = Class::of(part.kind, part.segment.len(), in_flight);
        Some((class, since))
    }

    fn submit<D: Deref<Target = FileDevice>>(&mut self, devices: &[D], index: u32) {
        let slot = &self.slots[index as usize];
        let part = slot.part.as_ref().expect("a slot in use has a part");
        let number = self.number_of(part);
        let way = Way::of(part.kind, self.workers.lack(clock::now_ns));
        let entry = entry(&devices[part.device], part, slot.done, (number, way));
        self.slots[index as usize].way = way;
        let entry = entry.user_data(u64::from(index));
        self.queue(&entry);
    }

    /// What the memory of a part is registered under, if it is.
    pub fn number_of(&self, part: &Part) -> Option<u16> {
        let mut registered = self.registered.iter();
        let number = registered.position(|memory| part.segment.is_of(memory));
        number.map(|number| number as u16)
    }

    fn queue(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry's memory, if any, is that of a part in a slot, which nobody else uses before its completion
        // (invariant 1). Its descriptor is open as long as the device, or the bell, which outlives the wait for it.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // Cancels have taken up the room.
            self.enter();
        }
        self.untried |= self.queued == 0;
        self.queued += 1;
    }

    /// Hands what is queued to the kernel, as far as it takes it now.
    pub fn start(&mut self) {
        if self.queued > 0 {
            self.enter();
        }
    }

    /// Hands what is queued to the kernel and waits until so much has completed, or sometimes less.
    pub fn wait(&mut self, want: usize) {
        enter::wait(&mut self.ring, want);
        self.count_queued();
    }

    /// Whether so much has completed, also if the kernel has yet to tell.
    pub fn has(&mut self, want: usize) -> bool {
        if self.sort == Sort::Polled {
            self.enter();
            self.take_out();
            return self.taken.len() >= want;
        }
        if self.ring.completion().len() >= want {
            return true;
        }
        // What it did not take at once it is given again: who spins does not come by another way.
        (self.queued > 0 || self.ring.submission().taskrun()) && {
            self.enter();
            self.ring.completion().len() >= want
        }
    }

    /// How much has been taken out of the completion queue, and not collected.
    pub fn found(&self) -> usize {
        self.taken.len()
    }

    /// Takes what has completed out of the completion queue.
    fn take_out(&mut self) {
        let found = self.ring.completion();
        self.taken
            .extend(found.map(|entry| (entry.user_data(), entry.result())));
    }

    /// The part that should be the first to end, as a group of its own, and its device; where nothing is learnt, any.
    fn first(&mut self) -> Option<(usize, Group)> {
        let in_flight = self.in_flight();
        let timed = self.timed.as_mut()?;
        let (any, _) = timed.devices.first()?;
        if !any.learns() {
            return Some((0, any.begin_any()));
        }
        if in_flight > LOOKED_AT {
            return None;
        }
        let parts = self.slots.iter().filter_map(|slot| {
            let part = slot.part.as_ref()?;
            Some((part.device, slot.pushed))
        });
        let pushed = parts
            .take(in_flight)
            .filter_map(|(device, pushed)| Some((device, pushed?)));
        let finish = |(device, (class, since)): &(usize, (Class, u64))| {
            let ns = timed.devices[*device].1.prediction(*class);
            ns.map_or(u64::MAX, |ns| since + ns)
        };
        let (device, first) = pushed.min_by_key(finish)?;
        let (reaper, times) = &mut timed.devices[device];
        Some((device, reaper.begin_first(times, first, in_flight)))
    }

    /// As [`wait_or`](Ring::wait_or), by the policy of the ring's devices. What was pushed is started, also if nothing had to be waited for.
    pub fn wait_first(&mut self, bell: Option<(&Bell, u64)>, patience: Option<Duration>) {
        let Some((device, group)) = self.first() else {
            return self.wait_or(bell, patience);
        };
        let Some(mut timed) = self.timed.take() else {
            return self.wait_or(bell, patience);
        };
        let mut first = First {
            ring: self,
            bell,
            until: patience.map(|time| clock::now_ns().saturating_add(clock::ns_of(time))),
            looks: 0,
            has_threads: false,
        };
        let (reaper, times) = &mut timed.devices[device];
        timed.seen = Some(reaper.wait_for_first(times, group, &mut first));
        self.timed = Some(timed);
        // Who looks before he sleeps may have found something that ended since his caller did.
        self.start();
    }

    /// Whether something lies in the completion queue.
    pub fn has_completed(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    fn count_queued(&mut self) {
        (self.queued, self.untried) = (self.ring.submission().len(), false);
    }

    /// As [`wait`](Ring::wait) for one, no longer than that, and of a bell that was rung so often until it is rung again.
    pub fn wait_or(&mut self, bell: Option<(&Bell, u64)>, mut patience: Option<Duration>) {
        let Some((bell, rung)) = bell else {
            self.sleep(patience);
            return;
        };
        match bell.sleeping(rung) {
            Sleep::Rung => {
                self.start();
                return bell.awake();
            }
            Sleep::Until(event) => self.listen(event),
            Sleep::Deaf => patience = Some(patience.map_or(DEAF, |time| time.min(DEAF))),
        }
        self.sleep(patience);
        bell.awake();
    }

    fn sleep(&mut self, patience: Option<Duration>) {
        enter::wait_for(&mut self.ring, 1, patience);
        self.count_queued();
    }

    fn listen(&mut self, bell: RawFd) {
        if !std::mem::replace(&mut self.listens, true) {
            let entry = opcode::PollAdd::new(types::Fd(bell), libc::POLLIN as u32).build();
            self.queue(&entry.user_data(BELL));
        }
    }

    /// Takes out what has ended; queues again what has not.
    pub fn collect<D: Deref<Target = FileDevice>>(
        &mut self,
        devices: &[D],
        ended: &mut Vec<Ended>,
    ) {
        let mut seen = self.timed.as_mut().and_then(|timed| timed.seen.take());
        self.take_out();
        // One by one: what is behind one stays, whatever comes of that.
        while let Some(entry) = self.taken.pop_front() {
            match entry {
                (CANCELS, _) => {}
                (BELL, _) => self.listens = false,
                (index, result) => {
                    ended.extend(self.complete(devices, index as u32, result, &mut seen));
                }
            }
        }
        while let Some(index) = self.again.pop() {
            self.submit(devices, index);
            self.resubmitted = true;
        }
    }

    /// Hands to the kernel what [`collect`](Ring::collect) has queued again: nobody else would before the next wait.
    pub fn start_again(&mut self) {
        if std::mem::take(&mut self.resubmitted) {
            self.start();
        }
    }

    /// A part that has ended with this, if it is at its end.
    fn complete<D: Deref<Target = FileDevice>>(
        &mut self,
        devices: &[D],
        index: u32,
        result: i32,
        seen: &mut Option<Seen>,
    ) -> Option<Ended> {
        let slot = &mut self.slots[index as usize];
        let part = slot.part.as_mut().expect("a slot in flight has a part");
        let device = &*devices[part.device];
        let left = part.segment.len() - slot.done;
        let result = match usize::try_from(result) {
            _ if slot.way == Way::Call && slot.cancelled => Err(cancelled()),
            _ if slot.way == Way::Call => by_call(device, part, &mut slot.pushed),
            Ok(moved) => {
                let read = part.kind == Kind::Read;
                match threads::usable_progress(moved, left, device.logical_block(), read) {
                    Ok(moved) if moved < left && slot.cancelled => Err(cancelled()),
                    Ok(moved) if moved < left => {
                        (slot.done, slot.retries) = (slot.done + moved, 0);
                        self.again.push(index);
                        return None;
                    }
                    moved => moved.map(drop),
                }
            }
            Err(_) if slot.cancelled && is_passing(-result) => Err(cancelled()),
            // It cannot at once, or knows no such way of this file.
            Err(_) if slot.way == Way::AtOnce && is_refusal(-result) => {
                by_call(device, part, &mut slot.pushed)
            }
            // The first time it may have been asked by a thread that has ended.
            Err(_)
                if is_given_back(part.kind, -result)
                    && (slot.was_given_back || self.workers.lacked(clock::now_ns)) =>
            {
                self.workers.tell_lack(clock::now_ns);
                by_call(device, part, &mut slot.pushed)
            }
            Err(_) if is_passing(-result) => {
                slot.was_given_back |= is_given_back(part.kind, -result);
                slot.retries += 1;
                if slot.retries < RETRIES_MAX {
                    self.again.push(index);
                    return None;
                }
                by_call(device, part, &mut slot.pushed)
            }
            // The device has no such queues any more.
            Err(_) if self.sort == Sort::Polled && result == -libc::EOPNOTSUPP => {
                by_call(device, part, &mut slot.pushed)
            }
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        };
        let part = slot.part.take()?;
        // What failed, or was given up, tells nothing of how long transfers take.
        if let (Some(pushed), Ok(())) = (slot.pushed, &result)
            && let Some(timed) = &mut self.timed
            && let Some((reaper, times)) = timed.devices.get_mut(part.device)
        {
            reaper.ended(times, pushed, *seen.get_or_insert_with(Seen::found));
        }
        self.free.push(index);
        Some(Ended { part, result })
    }

    /// Whether [`collect`](Ring::collect) would find something, or would after a call of the kernel's. Of what was never started there is none.
    pub fn has_news(&mut self) -> News {
        if !self.ring.completion().is_empty() {
            News::Here
        } else if self.ring.submission().taskrun() || (self.queued > 0 && !self.untried) {
            News::InKernel
        } else {
            News::None
        }
    }

    /// Lets the kernel write the completions that wait for a call.
    pub fn enter(&mut self) {
        enter::start(&mut self.ring);
        self.count_queued();
    }

    /// Asks the kernel to give up parts with such marks, if it still can.
    pub fn cancel(&mut self, mine: &dyn Fn(u64) -> bool) {
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if !slot.cancelled && slot.part.as_ref().is_some_and(|part| mine(part.user)) {
                slot.cancelled = true;
                let entry = opcode::AsyncCancel::new(index as u64).build();
                self.queue(&entry.user_data(CANCELS));
            }
        }
    }

    /// Waits for all that is in flight and takes it out.
    pub fn drain<D: Deref<Target = FileDevice>>(&mut self, devices: &[D], ended: &mut Vec<Ended>) {
        while self.in_flight() > 0 {
            self.wait(1);
            self.collect(devices, ended);
        }
    }
}

/// Between two looks at a ring.
fn pause(has_threads: bool) {
    match has_threads {
        true => thread::yield_now(),
        false => thread::relax(),
    }
}

/// The completions of all that is in flight on a ring, or of so many.
pub(super) struct All<'a> {
    ring: &'a mut Ring,
    want: usize,
    has_threads: bool,
}

impl All<'_> {
    pub fn new(ring: &mut Ring, want: usize) -> All<'_> {
        All {
            ring,
            want,
            has_threads: false,
        }
    }
}

impl Source for All<'_> {
    fn is_there(&mut self) -> bool {
        self.ring.has(self.want)
    }

    fn start(&mut self) {
        self.ring.start();
        self.has_threads = self.ring.has_threads();
    }

    fn sleep(&mut self, until: Option<u64>) {
        enter::wait_for(&mut self.ring.ring, self.want, until.map(left));
        self.ring.count_queued();
    }

    fn pause(&mut self) {
        pause(self.has_threads);
    }
}

/// The first completion, a bell that was rung so often, or the end of the owner's patience.
struct First<'a> {
    ring: &'a mut Ring,
    bell: Option<(&'a Bell, u64)>,
    until: Option<u64>,
    looks: u32,
    has_threads: bool,
}

impl Source for First<'_> {
    fn is_there(&mut self) -> bool {
        self.looks += 1;
        // A bell has a lock.
        let rung = self.looks.is_multiple_of(BELL_EACH)
            && self.bell.is_some_and(|(bell, rung)| bell.rung() != rung);
        rung || self.ring.has(1) || self.until.is_some_and(|until| clock::now_ns() >= until)
    }

    fn start(&mut self) {
        self.ring.start();
        self.has_threads = self.ring.has_threads();
    }

    fn sleep(&mut self, until: Option<u64>) {
        let until = until.into_iter().chain(self.until).min();
        self.ring.wait_or(self.bell, until.map(left));
        // Rung or not, it is the next to be looked at.
        self.looks = BELL_EACH - 1;
    }

    fn pause(&mut self) {
        pause(self.has_threads);
    }

    fn is_other(&mut self) -> bool {
        // The bell's own completion lies among those of parts.
        let is_rung = self.bell.is_some_and(|(bell, rung)| bell.rung() != rung);
        is_rung || !self.ring.has_completed()
    }
}

fn left(until: u64) -> Duration {
    Duration::from_nanos(until.saturating_sub(clock::now_ns()))
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Whoever owns a ring drains it; there is nothing to be done here without its devices.
        if self.in_flight() > 0 {
            tracing::error!("a ring was dropped with I/O in flight");
            std::process::abort();
        }
    }
}

/// What is known of completions without waiting.
pub(super) enum News {
    Here,
    InKernel,
    None,
}

/// The kernel says so of what it may do when it is asked again, by whoever asks. The memory is good: a bad address is what a
/// thread tells of its own memory when it has ended.
fn is_passing(error: i32) -> bool {
    matches!(
        error,
        libc::EINTR | libc::EAGAIN | libc::ECANCELED | libc::EFAULT
    )
}

/// Does a part by a call, which tells nothing of how long a ring takes.
fn by_call(
    device: &FileDevice,
    part: &mut Part,
    pushed: &mut Option<(Class, u64)>,
) -> io::Result<()> {
    *pushed = None;
    threads::perform_part(device, part)
}

/// The kernel should have done this by a thread of its own, and nothing of it is done.
fn is_given_back(kind: Kind, error: i32) -> bool {
    error == libc::ECANCELED || (error == libc::EAGAIN && kind == Kind::Flush)
}

/// The kernel cannot do at once what it was asked to do so.
fn is_refusal(error: i32) -> bool {
    matches!(error, libc::EAGAIN | libc::EOPNOTSUPP)
}

/// What of a part is not done yet; its memory is registered under that number.
fn entry(
    device: &FileDevice,
    part: &Part,
    done: usize,
    (registered, way): (Option<u16>, Way),
) -> squeue::Entry {
    if way == Way::Call {
        return opcode::Nop::new().build();
    }
    let fd = types::Fd(device.file.as_raw_fd());
    let len = (part.segment.len() - done).min(TRANSFER_MAX) as u32;
    let start = part.segment.start().wrapping_add(done);
    let offset = part.offset + done as u64;
    match part.kind {
        Kind::Read => match registered {
            Some(number) => opcode::ReadFixed::new(fd, start, len, number)
                .offset(offset)
                .build(),
            None => opcode::Read::new(fd, start, len).offset(offset).build(),
        },
        Kind::Write(durability) => {
            let flags = match durability {
                Durability::Volatile | Durability::Checked => 0,
                Durability::Durable => libc::RWF_DSYNC,
            };
            let flags = match way {
                Way::AtOnce => flags | libc::RWF_NOWAIT,
                Way::Any | Way::Call => flags,
            };
            match registered {
                Some(number) => opcode::WriteFixed::new(fd, start, len, number)
                    .offset(offset)
                    .rw_flags(flags)
                    .build(),
                None => opcode::Write::new(fd, start, len)
                    .offset(offset)
                    .rw_flags(flags)
                    .build(),
            }
        }
        Kind::Flush => opcode::Fsync::new(fd)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{builder, probe};
    use super::*;
    use crate::block::{Operation, Request};
    use crate::buf::{AlignedBuf, Lent, Segment};
    use crate::file::{Engine, OpenOptions};
    use base::atomic::Ordering;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// A ring on an image, with a lack of threads of its own.
    struct Scene {
        device: FileDevice,
        ring: Ring,
        _home: tempfile::TempDir,
    }

    impl Scene {
        fn new() -> Option<Scene> {
            probe().ok()?;
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("image");
            crate::create_image(&path, 1 << 20).unwrap();
            let device = FileDevice::open(&path, &OpenOptions::default(), Engine::Uring).unwrap();
            let mut ring = Ring::new(builder().build(4).unwrap(), 4);
            ring.workers = Box::leak(Box::new(Workers::new()));
            Some(Scene {
                device,
                ring,
                _home: home,
            })
        }

        fn push(&mut self, kind: Kind, segment: Segment) {
            let part = Part {
                user: 0,
                device: 0,
                kind,
                offset: 0,
                segment,
            };
            self.ring.push(&[&self.device], part);
        }

        /// What becomes of what is in flight as the kernel answers this instead of what it did, if anything.
        fn answer(&mut self, answer: Option<i32>) -> Option<Ended> {
            self.ring.wait(1);
            self.ring.take_out();
            if let Some(number) = answer {
                self.ring.taken[0].1 = -number;
            }
            let mut ended = Vec::new();
            self.ring.collect(&[&self.device], &mut ended);
            ended.pop()
        }

        /// Whether a call did it: the next one panics, which fails its part.
        fn is_by_call(&mut self, answer: Option<i32>) -> bool {
            self.device.panics.store(true, Ordering::SeqCst);
            let ended = self.answer(answer).expect("it has ended");
            let is_by_call = !self.device.panics.swap(false, Ordering::SeqCst);
            assert_eq!(is_by_call, ended.result.is_err(), "no failure is hidden");
            is_by_call
        }
    }

    /// Where the process could have no more threads the kernel tried for 50 ms to start one and gave the flush back, sixteen times for each.
    #[test]
    fn a_flush_that_the_kernel_has_no_thread_for_is_done_by_a_call_and_so_are_the_next_ones() {
        let Some(mut scene) = Scene::new() else {
            return base::skip("io_uring");
        };
        for error in [libc::ECANCELED, libc::EAGAIN] {
            scene.ring.workers = Box::leak(Box::new(Workers::new()));
            scene.push(Kind::Flush, Segment::empty());
            // Whoever submitted it may have ended.
            assert!(scene.answer(Some(error)).is_none());
            assert!(!scene.ring.workers.lacked(clock::now_ns));
            assert!(scene.is_by_call(Some(error)));
            // The kernel is not asked for these.
            for _ in 0..3 {
                scene.push(Kind::Flush, Segment::empty());
                assert!(scene.is_by_call(None));
            }
            scene.push(Kind::Flush, Segment::empty());
            scene.answer(None).unwrap().result.unwrap();
            // One that nobody wants any more is not done.
            scene.push(Kind::Flush, Segment::empty());
            scene
                .ring
                .slots
                .iter_mut()
                .for_each(|slot| slot.cancelled = true);
            assert!(scene.answer(None).unwrap().result.is_err());
        }
        // The kernel may have threads again.
        scene.ring.workers = Box::leak(Box::new(Workers::new()));
        scene.push(Kind::Flush, Segment::empty());
        assert!(!scene.is_by_call(None));
    }

    #[test]
    fn a_transfer_that_the_kernel_has_no_thread_for_is_done_by_a_call() {
        let Some(mut scene) = Scene::new() else {
            return base::skip("io_uring");
        };
        let mut memory = AlignedBuf::zeroed(4096);
        let write = Kind::Write(Durability::Volatile);
        for (kind, value, answers) in [
            (write, 1, &[libc::ECANCELED, libc::ECANCELED][..]),
            // It is known by now.
            (write, 2, &[libc::ECANCELED]),
            (Kind::Write(Durability::Durable), 3, &[libc::EAGAIN]),
            (write, 4, &[libc::EOPNOTSUPP]),
            (Kind::Read, 4, &[libc::ECANCELED]),
        ] {
            if kind != Kind::Read {
                memory.fill(value);
            }
            let mut lent = Lent::new(memory);
            scene.push(kind, lent.lend(0..4096));
            let (last, first) = answers.split_last().unwrap();
            for answer in first {
                assert!(scene.answer(Some(*answer)).is_none());
            }
            let Ended { part, result } = scene.answer(Some(*last)).expect("it has ended");
            result.unwrap();
            lent.give_back(part.segment);
            memory = lent.into_inner();
            let mut read = AlignedBuf::zeroed(4096);
            let buf = &mut read[..];
            threads::perform(
                &scene.device,
                &mut Request::new(Operation::Read { offset: 0, buf }, 0),
            );
            assert!(read.iter().all(|&byte| byte == value), "{kind:?}");
            assert_eq!(read[..], memory[..]);
        }
        // What fails otherwise has failed.
        let mut lent = Lent::new(memory);
        scene.push(write, lent.lend(0..4096));
        let Ended { part, result } = scene.answer(Some(libc::ENOSPC)).expect("it has ended");
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        lent.give_back(part.segment);
    }

    /// What the kernel had told besides was lost, and its owners waited for ever.
    #[test]
    fn a_call_in_place_of_the_kernel_that_panics_fails_its_part_and_no_other() {
        if probe().is_err() {
            return base::skip("io_uring");
        }
        const PARTS: usize = 4;
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        crate::create_image(&path, 1 << 20).unwrap();
        let device = FileDevice::open(&path, &OpenOptions::default(), Engine::Uring).unwrap();
        let devices = [&device];
        let ring = builder().build(PARTS as u32).unwrap();
        let mut ring = Ring::new(ring, PARTS).of_sort(Sort::Polled);
        for panics in [true, false] {
            let mut lent = Lent::new(AlignedBuf::zeroed(PARTS * 4096));
            for user in 0..PARTS {
                let at = user * 4096;
                let part = Part {
                    user: user as u64,
                    device: 0,
                    kind: Kind::Read,
                    offset: at as u64,
                    segment: lent.lend(at..at + 4096),
                };
                ring.push(&devices, part);
            }
            ring.wait(PARTS);
            ring.take_out();
            assert_eq!(ring.found(), PARTS);
            // As if the device had lost its queues.
            ring.taken[1].1 = -libc::EOPNOTSUPP;
            device.panics.store(panics, Ordering::SeqCst);
            let mut ended = Vec::new();
            if panics {
                // And as if the kernel had told of what nobody has started.
                ring.taken.push_front((PARTS as u64, 0));
                let collects = || ring.collect(&devices, &mut ended);
                assert!(catch_unwind(AssertUnwindSafe(collects)).is_err());
            }
            ring.collect(&devices, &mut ended);
            assert_eq!((ended.len(), ring.in_flight()), (PARTS, 0));
            let failed = ended.iter().filter(|ended| ended.result.is_err()).count();
            assert_eq!(failed, usize::from(panics));
            for Ended { part, .. } in ended {
                lent.give_back(part.segment);
            }
        }
    }
}

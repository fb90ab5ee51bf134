//! A device in memory that loses power and does everything else that devices do wrong.
//!
//! # Fault model
//!
//! **Power.** A completed volatile write sits in the device's cache: reads see it at once, but
//! when the power is cut it may survive whole, not at all, in its first sectors only, or in any
//! subset of its sectors, each independently of the other writes (so writes are reordered). A
//! sector of 512 bytes is never torn. A sector that was lost shows what was there before: the
//! newest older write of it that survived, or the durable contents.
//!
//! A durable write survives from its completion on; it does nothing for other writes. A
//! flush makes every write durable that was complete when it was begun, and none that completes while it takes its time. The write in flight when the power
//! goes, those of its batch that have not completed, on whichever devices, and under the seeded scheduler those of other threads, are like completed
//! volatile writes, durable or not; a flush in flight does nothing. So are writes that somebody has in his queue
//! and has not reaped: they may happen at any time, whatever completes before or after them. Every device loses its own
//! writes, and flushing one says nothing of another; a [`PowerSwitch`] cuts several at one moment.
//! After the cut every operation fails until [`SimDevice::restart`].
//!
//! A device may write more than it is asked to ([`SimDevice::with_physical_block`]): of a block of 4,096 bytes it reads the rest, and writes all.
//! What survives in part, in its first sectors or in any, may then have damaged the other sectors of its first and its last block, whoever had made
//! them durable: they hold anything.
//!
//! A device may have no cache ([`SimDevice::without_cache`]): then every write is a durable one. Or it cannot force a write
//! ([`SimDevice::without_forced_writes`]), as drives without FUA and files cannot: a durable write goes to the cache, and a flush behind it, which may fail as any
//! other, makes it durable, and nothing else. What another flush that fails in between has dropped it reports as good.
//!
//! A discarded range reads as zeros or as before, sector by sector, and that is as volatile
//! as a write.
//!
//! **Errors.** A read, write or flush fails with `EIO` when asked to ([`SimDevice::fail_reads`] and
//! the like: the next so many, or always, anywhere or in a range), when its turn has come among
//! those of all devices ([`PowerSwitch::fail_after`]), or one in so many times ([`Odds`]). A read error may stay until its sector is written. A write that failed may still
//! have written any of its sectors; or, if it was to be durable, it was written, and the flush that the kernel does with it failed: then the next write of that device works. After a flush that failed, a later good flush may or may not
//! make the writes before it durable (a kernel that drops dirty state at a failed flush), though
//! reads still show them.
//!
//! **Lies.** Bits rot ([`SimDevice::corrupt`], [`SimDevice::rot`]), in durable and cached contents
//! alike. A write that is reported as good goes to another place that holds data
//! (misdirected), or nowhere (lost); where it was meant to go the old bytes stay, and are read
//! at once. What has struck is listed ([`SimDevice::struck`]).
//!
//! **Absence.** A slow device takes its time of the clock ([`SimDevice::slow_down`]); a stuck one
//! answers nothing until it is released ([`SimDevice::stick`]), or answers after a while
//! ([`SimDevice::stall`]); one that is gone fails everything
//! with `ENODEV` from then on ([`SimDevice::vanish_after`]).
//!
//! What never happens unless asked for: a completed write that reads do not see, a durable or
//! flushed sector lost (but for such damage), a write to another address. What never happens at all: a sector with bytes
//! of two writes, a flush or a durable write that is reported as good and is not (but for the lies
//! above, and for what a flush that failed has dropped).
//!
//! Everything is decided by the device's seed and by the generators given to its methods, so that
//! the same seed and the same operations give the same [`SimDevice::trace_hash`]. Powers are methods
//! of `SimDevice`; the production trait has none.

mod batch;
mod cached;
mod faults;
mod pages;
mod power;
mod queue;
mod state;

pub use batch::Batch;
pub use cached::{Keep, Survival};
pub use faults::{FaultKind, Odds, Struck, Times};
pub use power::PowerSwitch;

use crate::block::{BlockDevice, DeviceInfo, Durability, Operation, Request};
use crate::queue::{Bell, DeviceQueue};
use crate::reap::Reaping;
use crate::topology::Topology;
use base::atomic::AtomicBool;
use base::clock::Clock;
use base::rng::Rng;
use base::sync::{Condvar, Mutex, MutexGuard, rank};
use base::thread;
use cached::Cached;
use faults::{Fault, Faults, medium_error, no_device, no_power};
use pages::{Pages, hash_bytes, hash_pages, load, mix, store};
use power::Power;
use queue::SimQueue;
use state::State;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The unit that is never torn, in bytes.
pub const SECTOR: usize = 512;
/// What an operation takes of the time of the world that the device is in.
const SERVICE_TIME: Duration = Duration::from_micros(20);

/// The durable contents of a device at one moment. Cheap: pages are shared until changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot(Pages);

/// How long operations take.
#[derive(Clone, Debug)]
struct Pace {
    service: Duration,
    /// A manual clock that no world moves.
    clock: Option<Clock>,
    /// What the next operation alone takes, of such a clock.
    stall: Option<(Duration, Clock)>,
}

/// The simulated device. See the module's head for what it may do.
#[derive(Debug)]
pub struct SimDevice {
    name: String,
    bytes: u64,
    logical_block: u32,
    physical_block: u32,
    has_cache: bool,
    /// A durable write is none with a flush behind it.
    forces_writes: bool,
    has_writer: AtomicBool,
    switch: Arc<PowerSwitch>,
    state: Mutex<State>,
    pace: Mutex<Pace>,
    /// A stuck device answers again.
    released: Condvar,
    /// Of those who have something in flight, and are not inside.
    waiters: Mutex<Vec<Weak<Bell>>>,
}

/// Making devices, and making them from others.
impl SimDevice {
    /// A device of `bytes` bytes (a multiple of 512), all zero, with 512-byte logical blocks
    /// and a power switch of its own.
    pub fn new(bytes: u64, seed: u64) -> Arc<SimDevice> {
        Self::with(&format!("sim{seed}"), bytes, 512, seed, PowerSwitch::new())
    }

    /// As [`new`](Self::new), sharing a power switch with other devices.
    pub fn on_switch(bytes: u64, seed: u64, switch: &Arc<PowerSwitch>) -> Arc<SimDevice> {
        Self::with(&format!("sim{seed}"), bytes, 512, seed, Arc::clone(switch))
    }

    /// Everything chosen.
    pub fn with(
        name: &str,
        bytes: u64,
        logical_block: u32,
        seed: u64,
        switch: Arc<PowerSwitch>,
    ) -> Arc<SimDevice> {
        assert!(bytes.is_multiple_of(SECTOR as u64));
        assert!(matches!(logical_block, 512 | 4096));
        Arc::new(SimDevice {
            name: name.to_owned(),
            bytes,
            logical_block,
            physical_block: logical_block,
            has_cache: true,
            forces_writes: true,
            has_writer: AtomicBool::new(false),
            switch,
            state: Mutex::new(rank::DEVICE_STATE, State::new(seed)),
            pace: Mutex::new(
                rank::LEAF,
                Pace {
                    service: SERVICE_TIME,
                    clock: None,
                    stall: None,
                },
            ),
            released: Condvar::new(),
            waiters: Mutex::new(rank::LEAF, Vec::new()),
        })
    }

    /// A new device without a cache: every write is durable when it has completed.
    pub fn without_cache(self: Arc<SimDevice>) -> Arc<SimDevice> {
        let mut device = Arc::into_inner(self).expect("nobody else has it yet");
        device.has_cache = false;
        Arc::new(device)
    }

    /// A new device that reads and writes so many bytes to write less.
    pub fn with_physical_block(self: Arc<SimDevice>, bytes: u32) -> Arc<SimDevice> {
        let mut device = Arc::into_inner(self).expect("nobody else has it yet");
        assert!(matches!(bytes, 512 | 4096) && device.bytes.is_multiple_of(bytes as u64));
        device.physical_block = bytes.max(device.logical_block);
        Arc::new(device)
    }

    /// A new device that does a durable write as one to its cache and a flush behind it.
    pub fn without_forced_writes(self: Arc<SimDevice>) -> Arc<SimDevice> {
        let mut device = Arc::into_inner(self).expect("nobody else has it yet");
        device.forces_writes = false;
        Arc::new(device)
    }

    /// Another device like this one, in a state of its own and without faults.
    fn like(&self, mut state: State, switch: &Arc<PowerSwitch>) -> Arc<SimDevice> {
        state.faults = Faults::default();
        (state.retired, state.waiting) = (false, 0);
        let like = Self::with(
            &self.name,
            self.bytes,
            self.logical_block,
            0,
            Arc::clone(switch),
        );
        *like.state.lock() = state;
        let like = like.with_physical_block(self.physical_block);
        let like = match self.forces_writes {
            true => like,
            false => like.without_forced_writes(),
        };
        match self.has_cache {
            true => like,
            false => like.without_cache(),
        }
    }

    /// Another device like this one that starts with these contents, durably.
    fn successor(&self, pages: Pages, seed: u64, switch: &Arc<PowerSwitch>) -> Arc<SimDevice> {
        let mut state = State::new(seed);
        state.set_contents(pages);
        self.like(state, switch)
    }

    /// The device after a power cut: cached writes survive as the generator decides, faults
    /// are gone. This one is retired and fails from now on, so that threads that still hold
    /// it do no harm. The switch is shared and must be restored by the caller.
    pub fn restart(&self, rng: &mut Rng) -> Arc<SimDevice> {
        let survival = *rng.pick(&[
            Survival::Mixed,
            Survival::Mixed,
            Survival::None,
            Survival::All,
            Survival::Subset,
            Survival::Prefix,
        ]);
        self.restart_with(survival, rng)
    }

    /// As [`restart`](Self::restart), with the class of survival given. The trace goes on.
    pub fn restart_with(&self, survival: Survival, rng: &mut Rng) -> Arc<SimDevice> {
        let trace = self.retire();
        let next = self.fork_crash(survival, rng, &self.switch);
        next.state.lock().trace = trace;
        next
    }

    /// The device as a process finds it that was killed and started again with the power on:
    /// nothing is lost, and what was cached still is. This one is retired.
    pub fn reopen(&self) -> Arc<SimDevice> {
        self.retire();
        let mut copy = self.state.lock().clone();
        copy.let_go();
        self.like(copy, &self.switch)
    }

    /// Fails everything from now on; returns the trace so far.
    fn retire(&self) -> u64 {
        let mut state = self.state.lock();
        state.retired = true;
        let trace = state.trace;
        drop(state);
        self.answer();
        trace
    }

    /// A second device with the durable contents of this one and a switch of its own; this
    /// one goes on.
    pub fn clone_state(&self, seed: u64) -> Arc<SimDevice> {
        let pages = self.state.lock().durable.clone();
        self.successor(pages, seed, &PowerSwitch::new())
    }

    /// A second device exactly as this one is now, cached writes included, on another switch
    /// and without faults; this one goes on.
    pub fn fork(&self, switch: &Arc<PowerSwitch>) -> Arc<SimDevice> {
        self.fork_during(&[], switch)
    }

    /// A fork at a moment when a batch for this device is under way: any part of its writes may
    /// have happened, so a crash of the fork treats them as cached ones. Call it before the
    /// batch runs.
    pub fn fork_during(&self, batch: &[Request<'_>], switch: &Arc<PowerSwitch>) -> Arc<SimDevice> {
        let mut copy = self.state.lock().clone();
        copy.let_go();
        for request in batch {
            if let Operation::Write { offset, buf, .. } = &request.operation
                && !buf.is_empty()
            {
                copy.cache(*offset, buf);
            }
        }
        self.like(copy, switch)
    }

    /// What a power cut now would leave, as a device on another switch; this one goes on.
    pub fn fork_crash(
        &self,
        survival: Survival,
        rng: &mut Rng,
        switch: &Arc<PowerSwitch>,
    ) -> Arc<SimDevice> {
        let (mut pages, cached) = self.contents();
        for write in &cached {
            write.survive(survival, self.physical_block as u64, rng, &mut pages);
        }
        self.successor(pages, rng.next_u64(), switch)
    }

    /// As [`fork_crash`](Self::fork_crash), with the survival of each write chosen: `keep` is given
    /// the number of the cached write, oldest first, and its bytes on the device.
    pub fn fork_crash_keeping(
        &self,
        switch: &Arc<PowerSwitch>,
        mut keep: impl FnMut(usize, Range<u64>) -> Keep,
    ) -> Arc<SimDevice> {
        let (mut pages, cached) = self.contents();
        for (number, write) in cached.iter().enumerate() {
            match keep(number, write.range()) {
                Keep::All => write.apply(&mut pages, |_| true),
                Keep::Nothing => {}
                Keep::First(sectors) => write.apply(&mut pages, |i| i < sectors),
            }
        }
        self.successor(pages, 1, switch)
    }

    fn contents(&self) -> (Pages, Vec<Cached>) {
        let state = self.state.lock();
        (state.durable.clone(), state.volatile().cloned().collect())
    }
}

/// Looking at a device, past faults and the power switch, uncounted.
impl SimDevice {
    pub fn switch(&self) -> &Arc<PowerSwitch> {
        &self.switch
    }

    /// Operations this device has been asked for: reads, writes, flushes and discards.
    pub fn io_count(&self) -> u64 {
        self.state.lock().io_count
    }

    /// A hash of every operation so far: its kind, place, contents and outcome, in their order. A
    /// device made by `restart` or `reopen` goes on with the hash of the one it replaces.
    pub fn trace_hash(&self) -> u64 {
        self.state.lock().trace
    }

    /// A hash of the durable contents: equal for equal contents. Pages that were hashed before
    /// and have not changed cost nothing.
    pub fn contents_hash(&self) -> u64 {
        hash_pages(&self.state.lock().durable)
    }

    /// The places of the writes that a power cut could lose now, oldest first, in bytes.
    pub fn cached_writes(&self) -> Vec<Range<u64>> {
        let state = self.state.lock();
        state.volatile().map(Cached::range).collect()
    }

    /// Bytes of writes that a power cut could lose now.
    pub fn volatile_bytes(&self) -> u64 {
        let state = self.state.lock();
        state.volatile().map(|w| w.bytes.len() as u64).sum()
    }

    /// The faults that have struck, oldest first.
    pub fn struck(&self) -> Vec<Struck> {
        self.state.lock().struck.clone()
    }

    /// The durable contents. Two are equal if every byte is.
    pub fn snapshot(&self) -> Snapshot {
        let state = self.state.lock();
        let pages = state.durable.iter();
        let pages = pages
            .filter(|(_, page)| !page.is_zero())
            .map(|(number, page)| (*number, Arc::clone(page)));
        Snapshot(pages.collect())
    }

    /// Replaces all contents, durably.
    pub fn restore(&self, snapshot: &Snapshot) {
        self.state.lock().set_contents(snapshot.0.clone());
    }

    /// Reads what any later read would see.
    pub fn peek(&self, offset: u64, buf: &mut [u8]) {
        load(&self.state.lock().current, offset, buf);
    }

    /// What the checksums of batches and items of the array begin with that this is a device of.
    ///
    /// # Panics
    /// When its first label is none.
    pub fn checksum_seed(&self) -> u32 {
        let mut label = [0; format::BLOCK_SIZE];
        self.peek(0, &mut label);
        let label = format::label::Label::parse(&label).expect("a label");
        label.checksum_seed()
    }

    /// Reads what is durable.
    pub fn peek_durable(&self, offset: u64, buf: &mut [u8]) {
        load(&self.state.lock().durable, offset, buf);
    }

    /// Changes contents durably.
    pub fn poke(&self, offset: u64, bytes: &[u8]) {
        let mut state = self.state.lock();
        store(&mut state.current, offset, bytes);
        store(&mut state.durable, offset, bytes);
    }
}

/// Faults.
impl SimDevice {
    fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.state.lock().faults);
    }

    /// Makes reads that touch `range` (bytes; `None`: any) fail.
    pub fn fail_reads(&self, times: Times, range: Option<Range<u64>>) {
        self.faults(|f| f.reads = Fault::new(times, range));
    }

    /// Makes the sector at this byte unreadable until it is written.
    pub fn lose_sector(&self, offset: u64) {
        self.faults(|f| f.bad.extend([offset / SECTOR as u64]));
    }

    /// Makes writes that touch `range` fail; some of their sectors may be written anyway.
    pub fn fail_writes(&self, times: Times, range: Option<Range<u64>>) {
        self.faults(|f| f.writes = Fault::new(times, range));
    }

    /// Makes flushes fail.
    pub fn fail_flushes(&self, times: Times) {
        self.faults(|f| f.flushes = Fault::new(times, None));
    }

    /// Reports writes that touch `range` as good and drops them.
    pub fn lose_writes(&self, times: Times, range: Option<Range<u64>>) {
        self.faults(|f| f.losses = Fault::new(times, range));
    }

    /// Reports writes that touch `range` as good and puts their bytes over other data.
    pub fn misdirect_writes(&self, times: Times, range: Option<Range<u64>>) {
        self.faults(|f| f.misdirections = Fault::new(times, range));
    }

    /// Lets faults strike by themselves, as the device's seed decides.
    pub fn set_odds(&self, odds: Odds) {
        self.faults(|f| f.odds = odds);
    }

    /// Ends all injected faults; what is stuck or gone answers again. What they did stays done.
    pub fn heal(&self) {
        self.faults(|f| *f = Faults::default());
        self.answer();
    }

    /// Bit rot: flips bits of the range, at least one of them.
    pub fn corrupt(&self, offset: u64, len: u64, rng: &mut Rng) {
        assert!(len > 0 && offset + len <= self.bytes);
        self.state.lock().rot(offset, len, rng);
    }

    /// Bit rot in one sector that holds data; returns its place in bytes. `None`: nothing does.
    pub fn rot(&self, rng: &mut Rng) -> Option<Range<u64>> {
        self.state.lock().rot_somewhere(rng)
    }

    /// Makes every operation take this long: of the time of the world that the caller is in, or
    /// of `clock`, which is a manual one.
    pub fn slow_down(&self, service: Duration, clock: Option<Clock>) {
        let mut pace = self.pace.lock();
        (pace.service, pace.clock) = (service, clock);
    }

    /// Makes the next operation alone take this long of a manual clock: the device is stuck, and
    /// answers at last.
    pub fn stall(&self, service: Duration, clock: &Clock) {
        self.pace.lock().stall = Some((service, clock.clone()));
    }

    /// Answers nothing from now on until [`release`](Self::release) or [`heal`](Self::heal), or
    /// until another device takes this one's place.
    pub fn stick(&self) {
        self.faults(|f| f.stuck = true);
    }

    /// Lets a stuck device answer.
    pub fn release(&self) {
        self.faults(|f| f.stuck = false);
        self.answer();
    }

    /// Operations that wait for a stuck device now.
    pub fn waiting(&self) -> u64 {
        self.state.lock().waiting
    }

    /// Lets `count` more operations happen; then the device is gone, and everything fails.
    pub fn vanish_after(&self, count: u64) {
        self.faults(|f| f.gone_after = Some(count));
    }
}

/// Operations.
impl SimDevice {
    fn perform(&self, operation: &mut Operation<'_>) -> io::Result<()> {
        let flush = self.begin_flush(operation);
        self.spend_time();
        self.perform_on(self.answering(), operation, flush)?;
        if !self.is_flushed_behind(operation) {
            return Ok(());
        }
        // Whatever others do meanwhile.
        self.spend_time();
        self.flush_behind(&mut self.answering(), flush)
    }

    /// The number of a flush, its own or the one behind it.
    fn begin_flush(&self, operation: &Operation<'_>) -> u64 {
        match operation {
            Operation::Flush => self.state.lock().begin_flush(),
            _ if self.is_flushed_behind(operation) => self.state.lock().begin_flush(),
            _ => 0,
        }
    }

    fn is_flushed_behind(&self, operation: &Operation<'_>) -> bool {
        let durable = matches!(
            operation,
            Operation::Write {
                durability: Durability::Durable,
                ..
            }
        );
        durable && self.has_cache && !self.forces_writes
    }

    /// The second half of a durable write that was not forced.
    fn flush_behind(&self, state: &mut State, number: u64) -> io::Result<()> {
        let outcome = match state.retired || self.switch.is_cut() {
            true => Err(no_power()),
            false => state.flush_behind(number),
        };
        state.trace(6, (0, 0), 0, &outcome);
        outcome
    }

    /// The marks of writes that are under way while other threads go on.
    fn take_in_hand(&self, batch: &[Request<'_>]) -> Vec<Option<u64>> {
        if !thread::is_scheduled() || self.switch.is_cut() {
            return vec![None; batch.len()];
        }
        let mut state = self.state.lock();
        let mut mark = |request: &Request<'_>| match &request.operation {
            Operation::Write { offset, buf, .. } if !buf.is_empty() => {
                Some(state.take_in_hand(*offset, buf))
            }
            _ => None,
        };
        batch.iter().map(&mut mark).collect()
    }

    /// As [`perform`](Self::perform), unless the device is stuck.
    fn perform_if_it_answers(&self, operation: &mut Operation<'_>) -> Option<io::Result<()>> {
        let flush = self.begin_flush(operation);
        self.spend_time();
        let state = self.state.lock();
        if state.is_stuck() {
            return None;
        }
        let written = self.perform_on(state, operation, flush);
        Some(match self.is_flushed_behind(operation) {
            true => written.and_then(|()| self.flush_behind(&mut self.state.lock(), flush)),
            false => written,
        })
    }

    fn perform_on(
        &self,
        mut state: MutexGuard<'_, State>,
        operation: &mut Operation<'_>,
        flush: u64,
    ) -> io::Result<()> {
        let outcome = self.attempt(&mut state, operation, flush);
        let kind = match operation {
            Operation::Read { .. } => 1,
            Operation::Write {
                durability: Durability::Volatile,
                ..
            } => 2,
            Operation::Write { .. } => 3,
            Operation::Flush => 4,
        };
        let content = match operation {
            // What is read follows from what was written and from the faults; recovery reads a
            // lot.
            Operation::Read { .. } => 0,
            Operation::Write { buf, .. } => hash_bytes(buf),
            _ => 0,
        };
        let place = (operation.offset(), operation.bytes() as u64);
        state.trace(kind, place, content, &outcome);
        outcome
    }

    fn attempt(
        &self,
        state: &mut State,
        operation: &mut Operation<'_>,
        flush: u64,
    ) -> io::Result<()> {
        let power = self.admit(state)?;
        self.check(operation)?;
        match operation {
            Operation::Read { .. } | Operation::Flush if power == Power::Going => Err(no_power()),
            Operation::Read { offset, buf } => state.read(*offset, buf, power),
            Operation::Write {
                offset,
                buf,
                durability,
            } => {
                let durability = match self.has_cache {
                    true => *durability,
                    false => Durability::Durable,
                };
                let behind = (!self.forces_writes && self.has_cache).then_some(flush);
                state.write((*offset, buf), durability, behind, power)
            }
            Operation::Flush => state.flush(flush, power),
        }
    }

    fn spend_time(&self) {
        let (service, clock, stall) = {
            let mut pace = self.pace.lock();
            (pace.service, pace.clock.clone(), pace.stall.take())
        };
        if let Some((service, clock)) = stall {
            clock.advance(service);
        }
        match clock {
            Some(clock) => clock.advance(service),
            None => base::sched::spend(service),
        }
    }

    /// Wakes who waits for a device that was stuck.
    fn answer(&self) {
        self.released.notify_all();
        let waiters = self.waiters.lock().clone();
        for bell in waiters.iter().filter_map(Weak::upgrade) {
            bell.ring();
        }
    }

    /// No operation would be answered now.
    fn is_stuck(&self) -> bool {
        self.state.lock().is_stuck()
    }

    /// The state, once the device answers.
    fn answering(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        state.waiting += 1;
        while state.is_stuck() {
            self.released.wait(&mut state);
        }
        state.waiting -= 1;
        state
    }

    /// Counts an operation, and says whether there is power for it.
    fn admit(&self, state: &mut State) -> io::Result<Power> {
        if state.retired {
            return Err(no_power());
        }
        let power = self.switch.meet();
        state.io_count += 1;
        if power == Power::Off {
            return Err(no_power());
        }
        match &mut state.faults.gone_after {
            Some(0) => return Err(no_device()),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(power)
    }

    fn check(&self, operation: &Operation<'_>) -> io::Result<()> {
        let (offset, len) = (operation.offset(), operation.bytes() as u64);
        let unit = self.logical_block as u64;
        if !offset.is_multiple_of(unit) || !len.is_multiple_of(unit) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    fn try_discard(&self, state: &mut State, offset: u64, len: u64) -> io::Result<()> {
        match self.admit(state)? {
            Power::On => {}
            Power::Failing => return Err(medium_error()),
            Power::Going | Power::Off => return Err(no_power()),
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => state.discard(offset, len),
            _ => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
        Ok(())
    }
}

impl State {
    fn is_stuck(&self) -> bool {
        self.faults.stuck && !self.retired
    }

    /// Adds an operation to the running hash.
    fn trace(&mut self, kind: u64, place: (u64, u64), content: u64, outcome: &io::Result<()>) {
        let outcome = match outcome {
            Ok(()) => 0,
            Err(error) => 1 + error.raw_os_error().unwrap_or(0) as u64,
        };
        for word in [kind, place.0, place.1, content, outcome] {
            self.trace = mix(self.trace ^ word).wrapping_add(word);
        }
    }
}

impl BlockDevice for SimDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn logical_block(&self) -> u32 {
        self.logical_block
    }

    fn physical_block(&self) -> u32 {
        self.physical_block
    }

    fn memory_align(&self) -> usize {
        1
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.name.clone(),
            backend: "simulated",
            kind: "memory",
            direct: true,
            bytes: self.bytes,
            logical_block: self.logical_block,
            rotational: Some(false),
            topology: Topology::PerCore,
            reap: Reaping::Interrupt,
            polled: false,
            numa_node: None,
        }
    }

    fn has_writer(&self) -> &AtomicBool {
        &self.has_writer
    }

    fn has_cache(&self) -> bool {
        self.has_cache
    }

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let mut batch = self.begin(requests);
        for request in requests {
            batch.perform(request);
        }
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
    }

    fn queue(self: Arc<Self>, bell: &Arc<Bell>) -> DeviceQueue {
        let mut waiters = self.waiters.lock();
        waiters.retain(|waiter| waiter.strong_count() > 0);
        waiters.push(Arc::downgrade(bell));
        drop(waiters);
        let seed = self.state.lock().rng.next_u64();
        DeviceQueue::alone(SimQueue::new(self, seed))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut state = self.answering();
        let outcome = self.try_discard(&mut state, offset, len);
        state.trace(5, (offset, len), 0, &outcome);
        outcome
    }
}

//! A device in memory that loses power.
//!
//! # Fault model
//!
//! A completed volatile write sits in the device's cache: reads see it at once, but when the
//! power is cut it may survive whole, not at all, in its first sectors only, or in any subset
//! of its sectors, each independently of the other writes (so writes are reordered). A sector
//! of 512 bytes is never torn. A sector that was lost shows what was there before: the
//! newest older write of it that survived, or the durable contents.
//!
//! A durable write survives from its completion on; it does nothing for other writes. A
//! flush makes every write completed before it durable. The write in flight when the power
//! goes is like a completed volatile write, durable or not; a flush in flight does nothing.
//! Every device loses its own writes; a [`PowerSwitch`] cuts several at one moment. After the
//! cut every operation fails until [`SimDevice::restart`].
//!
//! A discarded range reads as zeros or as before, sector by sector, and that is as volatile
//! as a write. A write made to fail may still have written any of its sectors. After a flush
//! made to fail, a later good flush may or may not make the writes before it durable (a
//! kernel that drops dirty state at a failed flush), though reads still show them. Bit rot
//! ([`SimDevice::corrupt`]) changes durable and cached contents alike.
//!
//! What never happens: a completed write that reads do not see, a durable or flushed sector
//! lost, a sector with bytes of two writes, a write to another address.
//!
//! Everything is decided by the device's seed and by the generator given to `restart`.
//! Crash powers are methods of `SimDevice`; the production trait has none.

use crate::block::{BlockDevice, DeviceInfo, Durability, Operation, Request};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The unit that is never torn, in bytes.
pub const SECTOR: usize = 512;
const PAGE: usize = 4096;
/// What an operation takes of the time of the world that the device is in.
const SERVICE_TIME: Duration = Duration::from_micros(20);

/// Cuts the power of all devices that share it, after a number of operations.
#[derive(Debug)]
pub struct PowerSwitch {
    operations: AtomicU64,
    /// Operations that still happen; the one after is caught by the cut.
    cut_after: AtomicU64,
    off: AtomicBool,
}

/// What an operation meets at the switch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Power {
    On,
    /// The power goes while this operation is in flight.
    Going,
    Off,
}

impl PowerSwitch {
    pub fn new() -> Arc<PowerSwitch> {
        Arc::new(PowerSwitch {
            operations: AtomicU64::new(0),
            cut_after: AtomicU64::new(u64::MAX),
            off: AtomicBool::new(false),
        })
    }

    /// Operations started since the start or the last [`restore`](Self::restore).
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Acquire)
    }

    /// Lets `count` more operations complete; the next one is caught in flight, and the
    /// power is off from then on.
    pub fn cut_after(&self, count: u64) {
        let now = self.operations();
        self.cut_after
            .store(now.saturating_add(count), Ordering::Release);
    }

    /// Cuts the power between two operations.
    pub fn cut_now(&self) {
        self.off.store(true, Ordering::Release);
    }

    pub fn is_cut(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }

    /// Turns the power on again, counting from 0 and with no cut ahead.
    pub fn restore(&self) {
        self.cut_after.store(u64::MAX, Ordering::Release);
        self.operations.store(0, Ordering::Release);
        self.off.store(false, Ordering::Release);
    }

    fn meet(&self) -> Power {
        if self.is_cut() {
            return Power::Off;
        }
        let number = self.operations.fetch_add(1, Ordering::AcqRel);
        let cut = self.cut_after.load(Ordering::Acquire);
        if number < cut {
            return Power::On;
        }
        self.cut_now();
        if number == cut {
            Power::Going
        } else {
            Power::Off
        }
    }
}

/// How often a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Times {
    /// The next `n` operations concerned, then never again.
    Next(u64),
    Always,
}

#[derive(Clone, Debug)]
struct Fault {
    left: Times,
    /// Byte range on the device that an operation must touch.
    range: Range<u64>,
}

/// What of a cached write survives a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// For each write one of the others, at random.
    Mixed,
    None,
    All,
    /// Each sector by the toss of a coin.
    Subset,
    /// The first sectors of each write.
    Prefix,
}

/// Sparse contents: absent pages are zeros.
type Pages = BTreeMap<u64, Arc<Page>>;

/// A page, and its hash once somebody asked for it (0: not yet).
#[derive(Debug)]
struct Page {
    bytes: [u8; PAGE],
    hash: AtomicU64,
}

impl Page {
    fn zeroed() -> Arc<Page> {
        Arc::new(Page {
            bytes: [0; PAGE],
            hash: AtomicU64::new(0),
        })
    }

    fn is_zero(&self) -> bool {
        self.bytes.iter().all(|b| *b == 0)
    }

    /// Never 0, and [`ZERO_PAGE`] for zeros alone; computed once for all copies of the page.
    fn hash(&self) -> u64 {
        let known = self.hash.load(Ordering::Relaxed);
        if known != 0 {
            return known;
        }
        if self.is_zero() {
            self.hash.store(ZERO_PAGE, Ordering::Relaxed);
            return ZERO_PAGE;
        }
        let mut hash = 0xCBF2_9CE4_8422_2325u64;
        for word in self.bytes.chunks_exact(8) {
            let word = word.iter().rev().fold(0, |w, b| w << 8 | *b as u64);
            hash = mix(hash ^ word);
        }
        let hash = hash | 1 << 63;
        self.hash.store(hash, Ordering::Relaxed);
        hash
    }
}

impl Clone for Page {
    /// For a change: the copy has no hash yet.
    fn clone(&self) -> Page {
        Page {
            bytes: self.bytes,
            hash: AtomicU64::new(0),
        }
    }
}

impl PartialEq for Page {
    fn eq(&self, other: &Page) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Page {}

/// The hash of a page of zeros, which counts like an absent one.
const ZERO_PAGE: u64 = 1;

/// Spreads every bit of a word over all of them.
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    (word ^ (word >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// The durable contents of a device at one moment. Cheap: pages are shared until changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot(Pages);

/// A completed write that is not durable.
#[derive(Clone, Debug)]
struct Cached {
    offset: u64,
    bytes: Arc<[u8]>,
    /// Sectors that a later durable write replaced.
    replaced: Vec<bool>,
    /// A flush failed after it: no later flush makes it durable.
    doomed: bool,
}

#[derive(Clone, Debug)]
struct State {
    /// What survives a power cut for certain.
    durable: Pages,
    /// What reads see.
    current: Pages,
    cached: Vec<Cached>,
    rng: Rng,
    read_fault: Option<Fault>,
    write_fault: Option<Fault>,
    flush_fault: Option<Fault>,
    /// Another device has taken this one's place.
    retired: bool,
    io_count: u64,
}

/// The simulated device. See the module's head for what it may do.
#[derive(Debug)]
pub struct SimDevice {
    name: String,
    bytes: u64,
    logical_block: u32,
    switch: Arc<PowerSwitch>,
    state: Mutex<State>,
}

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
        let state = State {
            durable: Pages::new(),
            current: Pages::new(),
            cached: Vec::new(),
            rng: Rng::new(seed),
            read_fault: None,
            write_fault: None,
            flush_fault: None,
            retired: false,
            io_count: 0,
        };
        Arc::new(SimDevice {
            name: name.to_owned(),
            bytes,
            logical_block,
            switch,
            state: Mutex::new(rank::DEVICE_STATE, state),
        })
    }

    pub fn switch(&self) -> &Arc<PowerSwitch> {
        &self.switch
    }

    /// Operations this device has been asked for: reads, writes, flushes and discards.
    pub fn io_count(&self) -> u64 {
        self.state.lock().io_count
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

    /// As [`restart`](Self::restart), with the class of survival given.
    pub fn restart_with(&self, survival: Survival, rng: &mut Rng) -> Arc<SimDevice> {
        let (mut pages, cached) = {
            let mut state = self.state.lock();
            state.retired = true;
            (state.durable.clone(), state.cached.clone())
        };
        for write in &cached {
            let keep = surviving_sectors(survival, write, rng);
            apply(&mut pages, write, &keep);
        }
        self.successor(pages, rng.next_u64())
    }

    /// The device as a process finds it that was killed and started again with the power on:
    /// nothing is lost, and what was cached still is.
    pub fn reopen(&self) -> Arc<SimDevice> {
        let mut state = self.state.lock();
        let mut copy = state.clone();
        state.retired = true;
        (copy.read_fault, copy.write_fault, copy.flush_fault) = (None, None, None);
        Arc::new(SimDevice {
            name: self.name.clone(),
            bytes: self.bytes,
            logical_block: self.logical_block,
            switch: Arc::clone(&self.switch),
            state: Mutex::new(rank::DEVICE_STATE, copy),
        })
    }

    /// A second device with the durable contents of this one and a switch of its own; this
    /// one goes on.
    pub fn clone_state(&self, seed: u64) -> Arc<SimDevice> {
        let pages = self.state.lock().durable.clone();
        let copy = Self::with(
            &self.name,
            self.bytes,
            self.logical_block,
            seed,
            PowerSwitch::new(),
        );
        copy.set_contents(pages);
        copy
    }

    /// A second device exactly as this one is now, cached writes included, on another switch
    /// and without faults; this one goes on.
    pub fn fork(&self, switch: &Arc<PowerSwitch>) -> Arc<SimDevice> {
        let mut copy = self.state.lock().clone();
        (copy.read_fault, copy.write_fault, copy.flush_fault) = (None, None, None);
        Arc::new(SimDevice {
            name: self.name.clone(),
            bytes: self.bytes,
            logical_block: self.logical_block,
            switch: Arc::clone(switch),
            state: Mutex::new(rank::DEVICE_STATE, copy),
        })
    }

    /// A hash of the durable contents: equal for equal contents. Pages that were hashed before
    /// and have not changed cost nothing.
    pub fn contents_hash(&self) -> u64 {
        let state = self.state.lock();
        let pages = state.durable.iter();
        pages.fold(0, |hash: u64, (number, page)| match page.hash() {
            ZERO_PAGE => hash,
            page => hash.wrapping_add(mix(page ^ mix(*number))),
        })
    }

    fn successor(&self, pages: Pages, seed: u64) -> Arc<SimDevice> {
        let next = Self::with(
            &self.name,
            self.bytes,
            self.logical_block,
            seed,
            Arc::clone(&self.switch),
        );
        next.set_contents(pages);
        next
    }

    fn set_contents(&self, pages: Pages) {
        let mut state = self.state.lock();
        state.current = pages.clone();
        state.durable = pages;
        state.cached.clear();
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
        self.set_contents(snapshot.0.clone());
    }

    /// Bytes of writes that a power cut could lose now.
    pub fn volatile_bytes(&self) -> u64 {
        let state = self.state.lock();
        state.cached.iter().map(|w| w.bytes.len() as u64).sum()
    }

    /// Makes reads that touch `range` (bytes; `None`: any) fail.
    pub fn fail_reads(&self, times: Times, range: Option<Range<u64>>) {
        self.state.lock().read_fault = Some(fault(times, range));
    }

    /// Makes writes that touch `range` fail; some of their sectors may be written anyway.
    pub fn fail_writes(&self, times: Times, range: Option<Range<u64>>) {
        self.state.lock().write_fault = Some(fault(times, range));
    }

    /// Makes flushes fail.
    pub fn fail_flushes(&self, times: Times) {
        self.state.lock().flush_fault = Some(fault(times, None));
    }

    /// Ends all injected faults.
    pub fn heal(&self) {
        let mut state = self.state.lock();
        (state.read_fault, state.write_fault, state.flush_fault) = (None, None, None);
    }

    /// Bit rot: flips bits of the range, at least one of them.
    pub fn corrupt(&self, offset: u64, len: u64, rng: &mut Rng) {
        assert!(len > 0 && offset + len <= self.bytes);
        let mut state = self.state.lock();
        // Distinct bytes, so that no flip undoes another.
        let mut places: Vec<u64> = (0..1 + rng.below(len.min(16)))
            .map(|_| offset + rng.below(len))
            .collect();
        places.sort_unstable();
        places.dedup();
        for at in places {
            let flip = 1u8 << rng.below(8);
            let (page, within) = (at / PAGE as u64, (at % PAGE as u64) as usize);
            page_mut(&mut state.durable, page)[within] ^= flip;
            page_mut(&mut state.current, page)[within] ^= flip;
            for write in &mut state.cached {
                if let Some(byte) = at
                    .checked_sub(write.offset)
                    .and_then(|d| Arc::make_mut(&mut write.bytes).get_mut(d as usize))
                {
                    *byte ^= flip;
                }
            }
        }
    }

    /// Reads what any later read would see, past faults and the power switch, uncounted.
    pub fn peek(&self, offset: u64, buf: &mut [u8]) {
        load(&self.state.lock().current, offset, buf);
    }

    /// Changes contents durably, past faults and the power switch, uncounted.
    pub fn poke(&self, offset: u64, bytes: &[u8]) {
        let mut state = self.state.lock();
        store(&mut state.current, offset, bytes);
        store(&mut state.durable, offset, bytes);
    }

    fn perform(&self, operation: &mut Operation<'_>) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.retired {
            return Err(no_power());
        }
        let power = self.switch.meet();
        state.io_count += 1;
        if power == Power::Off {
            return Err(no_power());
        }
        self.check(operation)?;
        match operation {
            Operation::Read { offset, buf } => {
                if power == Power::Going {
                    return Err(no_power());
                }
                let range = *offset..*offset + buf.len() as u64;
                if strikes(&mut state.read_fault, &range) {
                    return Err(medium_error());
                }
                load(&state.current, *offset, buf);
                Ok(())
            }
            Operation::Write {
                offset,
                buf,
                durability,
            } => state.write(*offset, buf, *durability, power),
            Operation::Flush if power == Power::Going => Err(no_power()),
            Operation::Flush => state.flush(),
        }
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
}

impl State {
    fn write(
        &mut self,
        offset: u64,
        buf: &[u8],
        durability: Durability,
        power: Power,
    ) -> io::Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        let range = offset..offset + buf.len() as u64;
        let failed = strikes(&mut self.write_fault, &range);
        if failed {
            self.write_in_part(offset, buf);
            return Err(medium_error());
        }
        let whole = Cached {
            offset,
            bytes: buf.into(),
            replaced: vec![false; buf.len() / SECTOR],
            doomed: false,
        };
        store(&mut self.current, offset, buf);
        match (power, durability) {
            (Power::On, Durability::Durable) => {
                self.replace_cached(&range);
                store(&mut self.durable, offset, buf);
                Ok(())
            }
            (Power::On, Durability::Volatile) => {
                self.cached.push(whole);
                Ok(())
            }
            _ => {
                self.cached.push(whole);
                Err(no_power())
            }
        }
    }

    /// A failed write: any of its sectors are written, and cached.
    fn write_in_part(&mut self, offset: u64, buf: &[u8]) {
        for (i, sector) in buf.chunks(SECTOR).enumerate() {
            if self.rng.one_in(2) {
                let at = offset + (i * SECTOR) as u64;
                store(&mut self.current, at, sector);
                self.cached.push(Cached {
                    offset: at,
                    bytes: sector.into(),
                    replaced: vec![false],
                    doomed: false,
                });
            }
        }
    }

    /// A durable write is newer than everything cached at its address.
    fn replace_cached(&mut self, range: &Range<u64>) {
        for write in &mut self.cached {
            for (i, replaced) in write.replaced.iter_mut().enumerate() {
                let at = write.offset + (i * SECTOR) as u64;
                *replaced |= range.contains(&at);
            }
        }
        self.cached.retain(|w| w.replaced.iter().any(|r| !r));
    }

    fn flush(&mut self) -> io::Result<()> {
        if strikes(&mut self.flush_fault, &(0..u64::MAX)) {
            let dooms = self.rng.one_in(2);
            for write in &mut self.cached {
                write.doomed |= dooms;
            }
            return Err(medium_error());
        }
        let State {
            durable, cached, ..
        } = self;
        let mut doomed: Vec<Cached> = Vec::new();
        for write in cached.drain(..) {
            if write.doomed {
                doomed.push(write);
                continue;
            }
            apply(durable, &write, &vec![true; write.replaced.len()]);
            // What is durable now is newer than a doomed write before it.
            for older in &mut doomed {
                for (i, replaced) in older.replaced.iter_mut().enumerate() {
                    let at = older.offset + (i * SECTOR) as u64;
                    *replaced |= write.holds(at);
                }
            }
        }
        self.cached = doomed;
        Ok(())
    }

    fn discard(&mut self, offset: u64, len: u64) {
        // Whole runs keep the cache small: a discard of a whole device is one decision per
        // run, not per sector.
        const RUN: u64 = 1 << 20;
        let mut at = offset;
        while at < offset + len {
            let run = RUN.min(offset + len - at);
            let pages = at / PAGE as u64..(at + run).div_ceil(PAGE as u64);
            let written = self.current.range(pages).next().is_some();
            if written && self.rng.one_in(2) {
                let zeros = vec![0u8; run as usize];
                store(&mut self.current, at, &zeros);
                self.cached.push(Cached {
                    offset: at,
                    replaced: vec![false; zeros.len() / SECTOR],
                    bytes: zeros.into(),
                    doomed: false,
                });
            }
            at += run;
        }
    }
}

impl Cached {
    /// True when the sector at byte `at` is one of this write's, and not replaced.
    fn holds(&self, at: u64) -> bool {
        at.checked_sub(self.offset)
            .and_then(|d| self.replaced.get(d as usize / SECTOR))
            .is_some_and(|replaced| !replaced)
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
        }
    }

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        for request in requests {
            base::sched::spend(SERVICE_TIME);
            request.error = self.perform(&mut request.operation).err();
        }
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.retired || self.switch.meet() != Power::On {
            return Err(no_power());
        }
        state.io_count += 1;
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => state.discard(offset, len),
            _ => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
        Ok(())
    }
}

fn fault(times: Times, range: Option<Range<u64>>) -> Fault {
    Fault {
        left: times,
        range: range.unwrap_or(0..u64::MAX),
    }
}

/// True when the fault concerns the range; one of its times is then used up.
fn strikes(fault: &mut Option<Fault>, range: &Range<u64>) -> bool {
    let Some(f) = fault else {
        return false;
    };
    if f.range.start >= range.end || range.start >= f.range.end {
        return false;
    }
    match &mut f.left {
        Times::Always => true,
        Times::Next(0) => false,
        Times::Next(n) => {
            *n -= 1;
            true
        }
    }
}

fn no_power() -> io::Error {
    io::Error::other("the device has no power")
}

fn medium_error() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

fn surviving_sectors(survival: Survival, write: &Cached, rng: &mut Rng) -> Vec<bool> {
    let count = write.replaced.len();
    let class = match survival {
        Survival::Mixed => *rng.pick(&[
            Survival::None,
            Survival::All,
            Survival::Subset,
            Survival::Prefix,
        ]),
        class => class,
    };
    match class {
        Survival::None | Survival::Mixed => vec![false; count],
        Survival::All => vec![true; count],
        Survival::Subset => (0..count).map(|_| rng.one_in(2)).collect(),
        Survival::Prefix => {
            let kept = rng.below(count as u64 + 1) as usize;
            (0..count).map(|i| i < kept).collect()
        }
    }
}

/// Puts the chosen sectors of a write into `pages`, those replaced since excepted.
fn apply(pages: &mut Pages, write: &Cached, keep: &[bool]) {
    let sectors = write.bytes.chunks(SECTOR).zip(keep).zip(&write.replaced);
    for (i, ((sector, keep), replaced)) in sectors.enumerate() {
        if *keep && !replaced {
            store(pages, write.offset + (i * SECTOR) as u64, sector);
        }
    }
}

fn page_mut(pages: &mut Pages, number: u64) -> &mut [u8; PAGE] {
    let page = Arc::make_mut(pages.entry(number).or_insert_with(Page::zeroed));
    *page.hash.get_mut() = 0;
    &mut page.bytes
}

fn load(pages: &Pages, mut offset: u64, mut buf: &mut [u8]) {
    while !buf.is_empty() {
        let (number, within) = (offset / PAGE as u64, (offset % PAGE as u64) as usize);
        let take = (PAGE - within).min(buf.len());
        let (head, tail) = buf.split_at_mut(take);
        match pages.get(&number) {
            Some(page) => head.copy_from_slice(&page.bytes[within..within + take]),
            None => head.fill(0),
        }
        buf = tail;
        offset += take as u64;
    }
}

fn store(pages: &mut Pages, mut offset: u64, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let (number, within) = (offset / PAGE as u64, (offset % PAGE as u64) as usize);
        let take = (PAGE - within).min(bytes.len());
        page_mut(pages, number)[within..within + take].copy_from_slice(&bytes[..take]);
        bytes = &bytes[take..];
        offset += take as u64;
    }
}

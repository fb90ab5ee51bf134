//! The array: logical bytes onto devices, batches over all devices at once, flushes.
//!
//! Owns the member devices, the geometry that maps onto them and what is unflushed on each.
//!
//! 1. A request that reaches outside the array or is not aligned is refused before any I/O.
//! 2. All other requests of a batch are attempted, whatever becomes of the others.
//! 3. A volatile write counts as unflushed before its completion is reported, failed or not.
//! 4. A read-only array never writes, flushes or discards.
//! 5. Of whatever fails that may have been a flush the failure is counted before anything is told to have ended that was under way meanwhile and that it may
//!    have lost: a flush, or a durable write to the same device (R17).

use crate::ages::Ages;
use crate::block::{BlockDevice, Durability, Operation, Request};
use crate::buf::{AlignedBuf, is_aligned};
use crate::doubt::{Doubt, Doubts};
use crate::error::Error;
use crate::flush::{Failures, FlushGate, Lead, Share, Turn};
use crate::labels::LabelRepair;
use crate::queue::{Kind, Part};
use crate::reap::{Reaped, Reaping};
use crate::topology::Topology;
use base::atomic::{AtomicU64, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Mutex, rank};
use format::geometry::{Geometry, Piece};
use format::label::Label;
use format::{BLOCK_SIZE, Damage};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// One transfer of a batch; `byte` is a logical byte address in the array.
#[derive(Debug)]
pub enum Io<'a> {
    Read {
        byte: u64,
        buf: &'a mut [u8],
    },
    Write {
        byte: u64,
        buf: &'a [u8],
        durability: Durability,
    },
}

impl Io<'_> {
    pub fn bytes(&self) -> u64 {
        match self {
            Io::Read { buf, .. } => buf.len() as u64,
            Io::Write { buf, .. } => buf.len() as u64,
        }
    }

    /// Where in the array it begins.
    pub fn byte(&self) -> u64 {
        match self {
            Io::Read { byte, .. } | Io::Write { byte, .. } => *byte,
        }
    }
}

/// What an array has done since it was opened.
#[derive(Clone, Debug, Default)]
pub struct ArrayStats {
    pub devices: Vec<DeviceStats>,
}

impl ArrayStats {
    /// Reads, writes and flushes of all devices.
    pub fn transfers(&self) -> u64 {
        let all = |d: &DeviceStats| d.reads + d.writes + d.flushes;
        self.devices.iter().map(all).sum()
    }
}

/// What one device has done since it was opened.
#[derive(Clone, Debug, Default)]
pub struct DeviceStats {
    pub name: String,
    pub backend: &'static str,
    /// Read requests, after splitting over devices.
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    /// Of these writes those that were durable by themselves: what a device without forced writes does with a flush each.
    pub durable_writes: u64,
    pub flushes: u64,
    /// Requests that failed, flushes included.
    pub errors: u64,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    durable_writes: AtomicU64,
    flushes: AtomicU64,
    errors: AtomicU64,
}

pub(crate) struct Member {
    pub device: Arc<dyn BlockDevice>,
    gate: FlushGate,
    counters: Counters,
}

/// An array of devices, open. Shared as `Arc<Array>`; all methods may be called at once.
pub struct Array {
    pub(crate) members: Vec<Member>,
    pub(crate) geometry: Geometry,
    pub(crate) label: Label,
    /// Both copies of all labels were read, and say the same but for the mount.
    pub(crate) settled: bool,
    pub(crate) read_only: bool,
    pub(crate) repairs: Vec<LabelRepair>,
    bytes: u64,
    memory_align: usize,
    flush_failures: Failures,
    /// `None`: no device has a cache, so that no durable write is a flush.
    doubts: Option<Doubts>,
    /// Which mount each label is of, and whether there are labels.
    pub(crate) ages: Mutex<Ages>,
}

/// Requests of one device within a batch.
type DeviceBatch<'a> = (usize, SmallVec<[Request<'a>; 1]>);
/// Those of all devices. What goes to one device in one piece takes no memory from the heap.
type DeviceBatches<'a> = SmallVec<[DeviceBatch<'a>; 1]>;

/// Has a function called with the number of each of some devices.
type ForEachDevice<'a> = dyn Fn(&mut dyn FnMut(usize)) + 'a;

impl Array {
    pub(crate) fn new(
        devices: Vec<Arc<dyn BlockDevice>>,
        geometry: Geometry,
        label: Label,
        read_only: bool,
        repairs: Vec<LabelRepair>,
        ages: Ages,
    ) -> Array {
        let memory_align = devices.iter().map(|d| d.memory_align()).max().unwrap_or(1);
        let cached = devices.iter().any(|device| device.has_cache());
        let members = devices
            .into_iter()
            .enumerate()
            .map(|(index, device)| Member {
                device,
                gate: FlushGate::new(index),
                counters: Counters::default(),
            })
            .collect();
        Array {
            members,
            bytes: geometry.total_blocks() * BLOCK_SIZE as u64,
            geometry,
            label,
            settled: false,
            read_only,
            repairs,
            memory_align,
            flush_failures: Failures::new(),
            doubts: cached.then(Doubts::new),
            ages: Mutex::new(rank::LEAF, ages),
        }
    }

    /// Memory that lies at multiples of so many bytes is given to the devices as it is; other memory is copied.
    pub fn memory_align(&self) -> usize {
        self.memory_align
    }

    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Device 0's label: UUID, hash key, name and features of the file system.
    pub fn label(&self) -> &Label {
        &self.label
    }

    pub fn uuid(&self) -> [u8; 16] {
        self.label.uuid
    }

    /// The UUID that checkpoint records and batches have.
    pub fn metadata_uuid(&self) -> [u8; 16] {
        self.label.metadata_uuid()
    }

    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Size of the logical space in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Who submits to the devices.
    pub fn topology(&self) -> Topology {
        let topology = self.members.first().map(|m| m.device.info().topology);
        topology.unwrap_or_default()
    }

    /// How threads wait for the devices.
    pub fn reaping(&self) -> Reaping {
        let reaping = self.members.first().map(|m| m.device.info().reap);
        reaping.unwrap_or_default()
    }

    /// What waits for all devices came to so far.
    pub fn reaped(&self) -> Reaped {
        let mut all = Reaped::default();
        for reaped in self.members.iter().filter_map(|m| m.device.reaped()) {
            all.add(reaped);
        }
        all
    }

    /// The members' names (paths), by device index.
    pub fn device_names(&self) -> Vec<String> {
        self.members
            .iter()
            .map(|m| m.device.name().to_owned())
            .collect()
    }

    /// The members, by device index.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<dyn BlockDevice>> {
        self.members.iter().map(|m| &m.device)
    }

    /// Reads `buf.len()` bytes at logical address `byte`. Both are multiples of
    /// `geometry().journal_align`; memory may be aligned as it likes, but an [`AlignedBuf`]
    /// saves a copy. Blocks until done.
    pub fn read(&self, byte: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.execute(&mut [Io::Read { byte, buf }])
    }

    /// What the checksums of batches and items begin with. Users do not know it, so that nothing they have written to the journal or
    /// to a file passes for one, nor what another file system has left on the devices.
    pub fn checksum_seed(&self) -> u32 {
        self.label.checksum_seed()
    }

    /// Writes `buf` at logical address `byte`; alignment as for [`read`](Self::read). Atomic
    /// only within a logical block. Blocks until done.
    pub fn write(&self, byte: u64, buf: &[u8], durability: Durability) -> Result<(), Error> {
        self.execute(&mut [Io::Write {
            byte,
            buf,
            durability,
        }])
    }

    /// Runs all transfers at once, over all devices in parallel, in no particular order;
    /// returns when all have completed. All are attempted; the error is that of the first
    /// transfer, in the caller's order, that failed. Only an address or alignment that is
    /// wrong is refused before anything starts.
    pub fn execute(&self, ios: &mut [Io<'_>]) -> Result<(), Error> {
        for io in ios.iter() {
            self.check(io)?;
        }
        if self.memory_align > 1 && ios.iter().any(|io| self.needs_bounce(io)) {
            return self.execute_bounced(ios);
        }
        self.dispatch(ios)
    }

    fn check(&self, io: &Io<'_>) -> Result<(), Error> {
        let (byte, len) = match io {
            Io::Read { byte, buf } => (*byte, buf.len() as u64),
            Io::Write { byte, buf, .. } => {
                if self.read_only {
                    return Err(Error::ReadOnly);
                }
                (*byte, buf.len() as u64)
            }
        };
        self.check_range(byte, len)
    }

    pub(crate) fn check_range(&self, byte: u64, len: u64) -> Result<(), Error> {
        let limit = self.bytes;
        if byte.checked_add(len).is_none_or(|end| end > limit) {
            return Err(Error::OutOfRange { byte, len, limit });
        }
        let align = self.geometry.journal_align;
        if !byte.is_multiple_of(align as u64) || !len.is_multiple_of(align as u64) {
            return Err(Error::Misaligned { byte, len, align });
        }
        Ok(())
    }

    fn needs_bounce(&self, io: &Io<'_>) -> bool {
        match io {
            Io::Read { buf, .. } => !is_aligned(buf, self.memory_align),
            Io::Write { buf, .. } => !is_aligned(buf, self.memory_align),
        }
    }

    /// The same transfers, with aligned copies in place of the buffers that devices refuse.
    fn execute_bounced(&self, ios: &mut [Io<'_>]) -> Result<(), Error> {
        let mut copies: Vec<Option<AlignedBuf>> = ios
            .iter()
            .map(|io| match io {
                Io::Read { buf, .. } if self.needs_bounce(io) => {
                    Some(AlignedBuf::zeroed(buf.len()))
                }
                Io::Write { buf, .. } if self.needs_bounce(io) => Some(AlignedBuf::from_slice(buf)),
                _ => None,
            })
            .collect();
        let mut aligned: Vec<Io<'_>> = ios
            .iter_mut()
            .zip(&mut copies)
            .map(|(io, copy)| match (io, copy) {
                (Io::Read { byte, buf }, copy) => Io::Read {
                    byte: *byte,
                    buf: match copy {
                        Some(copy) => copy,
                        None => buf,
                    },
                },
                (
                    Io::Write {
                        byte,
                        buf,
                        durability,
                    },
                    copy,
                ) => Io::Write {
                    byte: *byte,
                    buf: match copy {
                        Some(copy) => copy,
                        None => buf,
                    },
                    durability: *durability,
                },
            })
            .collect();
        let outcome = self.dispatch(&mut aligned);
        for (io, copy) in ios.iter_mut().zip(&copies) {
            if let (Io::Read { buf, .. }, Some(copy)) = (io, copy) {
                buf.copy_from_slice(copy);
            }
        }
        outcome
    }

    /// Splits the transfers over the devices, runs them and finds the first error.
    fn dispatch(&self, ios: &mut [Io<'_>]) -> Result<(), Error> {
        let _waiting = base::trace::device(|| ios.iter().map(Io::bytes).sum());
        let mut batches = DeviceBatches::new();
        for (tag, io) in ios.iter_mut().enumerate() {
            match io {
                Io::Read { byte, buf } => {
                    let mut rest: &mut [u8] = buf;
                    self.each_piece(*byte, rest.len(), |piece| {
                        let (buf, tail) = std::mem::take(&mut rest).split_at_mut(piece.len);
                        rest = tail;
                        let offset = piece.offset;
                        let read = Operation::Read { offset, buf };
                        add_request(&mut batches, piece.device, Request::new(read, tag));
                    });
                }
                Io::Write {
                    byte,
                    buf,
                    durability,
                } => {
                    let mut rest: &[u8] = buf;
                    self.each_piece(*byte, rest.len(), |piece| {
                        let (buf, tail) = rest.split_at(piece.len);
                        rest = tail;
                        let write = Operation::Write {
                            offset: piece.offset,
                            buf,
                            durability: *durability,
                        };
                        add_request(&mut batches, piece.device, Request::new(write, tag));
                    });
                }
            }
        }
        self.run(&mut batches, &mut |_, _| {});
        self.first_error(&batches)
    }

    /// Accounts what somebody has done on a device, and forgets it: before anybody is told (invariant 3).
    pub(crate) fn account(&self, device: usize, tally: &mut Tally) {
        self.members[device].count(tally);
        *tally = Tally::default();
    }

    /// The error of a part that failed.
    pub(crate) fn part_error(&self, device: usize, part: &Part, source: io::Error) -> Error {
        Error::Io {
            device: self.members[device].device.name().to_owned(),
            operation: part.kind.name(),
            offset: part.offset,
            len: part.segment.len() as u64,
            source: Arc::new(source),
        }
    }

    /// Whether a transfer of this range is a single one of a single device.
    pub fn is_one_piece(&self, byte: u64, len: usize) -> bool {
        let mut pieces = 0;
        self.each_piece(byte, len, |_| pieces += 1);
        pieces == 1
    }

    /// The device pieces of a range, neighbours on one device merged.
    pub(crate) fn each_piece(&self, byte: u64, len: usize, mut each: impl FnMut(Piece)) {
        let mut last: Option<Piece> = None;
        self.geometry.pieces(byte, len, |piece| match &mut last {
            Some(p) if p.device == piece.device && p.offset + p.len as u64 == piece.offset => {
                p.len += piece.len;
            }
            _ => {
                if let Some(done) = last.replace(piece) {
                    each(done);
                }
            }
        });
        if let Some(done) = last {
            each(done);
        }
    }

    /// Starts the batches of all devices before it waits for any; `ended` is called as each
    /// device's batch has completed.
    fn run(
        &self,
        batches: &mut [DeviceBatch<'_>],
        ended: &mut dyn FnMut(usize, &mut [Request<'_>]),
    ) {
        let Some(((index, requests), rest)) = batches.split_first_mut() else {
            return;
        };
        let member = &self.members[*index];
        if rest.is_empty() {
            member.device.run(requests, None);
        } else {
            let mut others = || self.run(rest, &mut *ended);
            member.device.run(requests, Some(&mut others));
        }
        member.account(requests);
        ended(*index, requests);
    }

    fn first_error(&self, batches: &[DeviceBatch<'_>]) -> Result<(), Error> {
        let failed = batches
            .iter()
            .flat_map(|(device, requests)| requests.iter().map(move |r| (*device, r)))
            .filter(|(_, request)| request.error.is_some())
            .min_by_key(|(_, request)| request.tag);
        match failed {
            Some((device, request)) => Err(io_error(self.members[device].device.as_ref(), request)),
            None => Ok(()),
        }
    }

    /// Makes every write completed before the call durable, on all devices in parallel.
    /// Devices without unflushed writes are left alone. Coalesced: callers that arrive
    /// before a flush is issued share it, its error included. After an error the device
    /// still counts as unflushed, but what was written before may be lost for good (R17).
    /// Returns how many devices this caller flushed; others it waited for.
    pub fn flush(&self) -> Result<u64, Error> {
        if self.read_only {
            return Ok(0);
        }
        let mut issued = 0;
        let _waiting = base::trace::device(|| 0);
        let mut shares: Vec<(usize, Share)> = Vec::new();
        for (index, member) in self.members.iter().enumerate() {
            if index > 0 && planted(Canary::FirstDeviceFlushed) {
                break;
            }
            shares.extend(member.gate.draw().map(|share| (index, share)));
        }
        let mut outcomes: Vec<(usize, Arc<io::Error>)> = Vec::new();
        while !shares.is_empty() {
            let mut leads: Vec<(usize, Lead<'_>)> = Vec::new();
            shares.retain(
                |(index, share)| match self.members[*index].gate.turn(share) {
                    Turn::Done(outcome) => {
                        outcomes.extend(outcome.err().map(|e| (*index, e)));
                        false
                    }
                    Turn::Lead(lead) => {
                        leads.push((*index, lead));
                        true
                    }
                    Turn::Wait => true,
                },
            );
            // Only a thread with no flush of its own in flight waits, so that leaders of
            // different devices never wait for each other.
            if leads.is_empty()
                && let Some((index, share)) = shares.first()
                && let Turn::Lead(lead) = self.members[*index].gate.wait(share)
            {
                leads.push((*index, lead));
            }
            issued += leads.len() as u64;
            self.lead_flushes(leads);
        }
        match outcomes.into_iter().min_by_key(|(index, _)| *index) {
            Some((index, source)) => Err(Error::Flush {
                device: self.members[index].device.name().to_owned(),
                source,
            }),
            None => Ok(issued),
        }
    }

    /// Issues the flushes that are ours, in parallel, and publishes how each ended.
    fn lead_flushes(&self, leads: Vec<(usize, Lead<'_>)>) {
        let mut batches: DeviceBatches<'_> = leads
            .iter()
            .map(|(index, _)| (*index, smallvec![Request::new(Operation::Flush, 0)]))
            .collect();
        let mut leads: BTreeMap<usize, Lead<'_>> = leads.into_iter().collect();
        let mut in_doubt = Vec::new();
        self.run(&mut batches, &mut |index, requests| {
            let error = requests.iter_mut().find_map(|r| r.error.take());
            if error.is_some() {
                self.count_failed_flush();
            }
            let outcome = error.map_or(Ok(()), |e| Err(Arc::new(e)));
            let lead = leads.remove(&index).expect("a flush of each that leads");
            // It comes to the last device of the batch first, and to each other one once those behind it have ended: who waits for the last alone waits for no other.
            match self.nothing_in_doubt() {
                true => lead.finish(outcome),
                false => {
                    lead.answered();
                    in_doubt.push((lead, outcome));
                }
            }
        });
        // What they flushed may be what a write has lost that does not know yet.
        self.settle_doubts();
        for (lead, outcome) in in_doubt {
            lead.finish(outcome);
        }
    }

    /// Whether everything written so far is durable that no checksum vouches for: what names it may be written, if no
    /// flush has failed by then.
    pub fn is_ordered(&self) -> bool {
        self.members.iter().all(|member| member.gate.is_ordered())
    }

    /// Flushes that have failed since the array was opened. Whoever remembers the count
    /// from before a write sees by it that the write may be lost, even if a later flush
    /// succeeded (R17).
    pub fn flush_failures(&self) -> u64 {
        self.flush_failures.get()
    }

    /// Notes that a flush failed which was a part of something else.
    pub fn count_failed_flush(&self) {
        self.flush_failures.count();
    }

    /// As `execute` of writes that are durable by themselves. A device that cannot force a single write is flushed by the kernel after it, and the error does not
    /// tell which of the two failed: it counts as a flush that failed, with which may have gone what others wrote (R17). That the write fails again would tell
    /// no more, as a link that was reset fails both. No flush, good or not, ends before it is known, so that nobody takes what is lost for flushed.
    ///
    /// Between the write and its flush another flush may fail, and lose it, or of a file the kernel may tell another writer that this could not be written: after success it is durable if no flush has failed since before the call
    /// ([`flush_failures`](Self::flush_failures)), and of all that may have done so the failure is counted by then.
    pub fn write_durably(&self, ios: &mut [Io<'_>]) -> Result<(), Error> {
        set_durability(ios, Durability::Durable);
        let doubt = self.doubt();
        let outcome = self.execute(ios);
        let each_device = |each: &mut dyn FnMut(usize)| {
            for io in ios.iter() {
                self.each_piece(io.byte(), io.bytes() as usize, |piece| each(piece.device));
            }
        };
        self.end_durably(doubt, outcome, &each_device)
    }

    /// What follows durable writes to these devices, whatever came of them.
    fn end_durably(
        &self,
        doubt: Option<Doubt<'_>>,
        outcome: Result<(), Error>,
        each_device: &ForEachDevice<'_>,
    ) -> Result<(), Error> {
        let outcome = outcome.inspect_err(|error| {
            let mut is_cached = false;
            each_device(&mut |device| is_cached |= self.members[device].device.has_cache());
            self.note_failed(error, is_cached);
        });
        drop(doubt);
        if outcome.is_ok() {
            each_device(&mut |device| self.settle_flush(device));
            self.settle_doubts();
        }
        outcome
    }

    /// Counts what has failed of durable writes, if it may have been a flush: not what never got there, nor where no device `is_cached`.
    fn note_failed(&self, error: &Error, is_cached: bool) {
        if is_cached && matches!(error, Error::Io { .. }) {
            self.count_failed_flush();
        }
    }

    /// Returns when of each flush of a device that was begun by now it is known whether it has failed. Where none is under way that is a look.
    fn settle_flush(&self, device: usize) {
        let member = &self.members[device];
        if member.device.has_cache() && !planted(Canary::FlushBesideUnseen) {
            member.gate.settle();
        }
    }

    fn doubt(&self) -> Option<Doubt<'_>> {
        self.doubts.as_ref().map(Doubts::begin)
    }

    fn nothing_in_doubt(&self) -> bool {
        self.doubts.as_ref().is_none_or(Doubts::is_empty)
    }

    fn settle_doubts(&self) {
        if let Some(doubts) = &self.doubts {
            doubts.settle();
        }
    }

    /// Treats every device as if it had unflushed writes (R8). A newly opened array starts
    /// that way.
    pub fn mark_all_unflushed(&self) {
        for member in &self.members {
            member.gate.wrote();
        }
    }

    /// Tells the devices that a range holds nothing of value; it reads back as anything.
    /// Not supported counts as success.
    pub fn discard(&self, byte: u64, len: u64) -> Result<(), Error> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        self.check_range(byte, len)?;
        // Larger ranges first: one discard per device and zone costs less than one per
        // stripe unit, and `usize` bounds a single walk.
        let mut ranges: Vec<Piece> = Vec::new();
        let (mut at, mut left) = (byte, len);
        while left > 0 {
            let take = left.min(1 << 30) as usize;
            self.each_piece(at, take, |piece| merge_piece(&mut ranges, piece));
            at += take as u64;
            left -= take as u64;
        }
        let mut first = Ok(());
        for piece in ranges {
            let member = &self.members[piece.device];
            member.gate.wrote();
            let done = member.device.discard(piece.offset, piece.len as u64);
            if let (Err(source), Ok(())) = (done, &first) {
                first = Err(Error::Io {
                    device: member.device.name().to_owned(),
                    operation: "discard",
                    offset: piece.offset,
                    len: piece.len as u64,
                    source: Arc::new(source),
                });
            }
        }
        first
    }

    pub fn stats(&self) -> ArrayStats {
        let devices = self
            .members
            .iter()
            .map(|m| m.counters.read(m.device.as_ref()));
        ArrayStats {
            devices: devices.collect(),
        }
    }

    /// Label copies that were found damaged when the array was assembled.
    pub fn label_repairs(&self) -> &[LabelRepair] {
        &self.repairs
    }

    /// Reads from one member directly, past the geometry.
    pub(crate) fn read_device(
        &self,
        device: usize,
        offset: u64,
        buf: &mut AlignedBuf,
    ) -> Result<(), Error> {
        self.run_on(device, Operation::Read { offset, buf })
    }

    /// Writes to one member directly, past the geometry, durably.
    pub(crate) fn write_device(&self, device: usize, offset: u64, buf: &[u8]) -> Result<(), Error> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        let write = Operation::Write {
            offset,
            buf,
            durability: Durability::Durable,
        };
        self.run_on(device, write)
    }

    fn run_on(&self, device: usize, operation: Operation<'_>) -> Result<(), Error> {
        let mut batch = [(device, smallvec![Request::new(operation, 0)])];
        self.run(&mut batch, &mut |_, _| {});
        self.first_error(&batch)
    }

    /// Writes one buffer to several places on members directly, all at once, as [`write_durably`](Self::write_durably) does.
    pub(crate) fn write_copies(&self, places: &[(usize, u64)], buf: &[u8]) -> Result<(), Error> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        let mut batches = DeviceBatches::new();
        for (tag, &(device, offset)) in places.iter().enumerate() {
            let write = Operation::Write {
                offset,
                buf,
                durability: Durability::Durable,
            };
            add_request(&mut batches, device, Request::new(write, tag));
        }
        let doubt = self.doubt();
        self.run(&mut batches, &mut |_, _| {});
        let outcome = self.first_error(&batches);
        let each_device = |each: &mut dyn FnMut(usize)| {
            places.iter().for_each(|&(device, _)| each(device));
        };
        self.end_durably(doubt, outcome, &each_device)
    }

    /// Drops the exclusive claim on a member while keeping it open, so that the kernel can
    /// claim the device itself when it mounts. What it holds is verified again with
    /// [`verify_label`](Self::verify_label) afterwards.
    pub fn release_claim(&self, device: usize) -> Result<(), Error> {
        let member = self.member(device)?;
        let name = std::path::Path::new(member.device.name());
        member
            .device
            .release_claim()
            .map_err(|e| Error::open(name, e))
    }

    pub(crate) fn member(&self, device: usize) -> Result<&Member, Error> {
        self.members
            .get(device)
            .ok_or_else(|| Damage::new("array", format!("there is no device {device}")).into())
    }
}

impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Array")
            .field("devices", &self.device_names())
            .field("bytes", &self.bytes)
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}

/// What some operations of a device were, until it is accounted.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    reads: u64,
    read_bytes: u64,
    writes: u64,
    written_bytes: u64,
    durable_writes: u64,
    flushes: u64,
    errors: u64,
    /// Something may be unflushed, and something for which no checksum vouches.
    wrote: bool,
    ordered: bool,
}

impl Tally {
    pub fn add(&mut self, kind: Kind, bytes: usize, failed: bool) {
        match kind {
            Kind::Read => {
                self.reads += 1;
                self.read_bytes += bytes as u64;
            }
            Kind::Write(durability) => {
                // A durable write that failed may sit in the cache in part.
                self.wrote |= durability != Durability::Durable || failed;
                self.ordered |= durability == Durability::Volatile || failed;
                self.durable_writes += u64::from(durability == Durability::Durable);
                self.writes += 1;
                self.written_bytes += bytes as u64;
            }
            Kind::Flush => self.flushes += 1,
        }
        self.errors += u64::from(failed);
    }
}

impl Member {
    fn account(&self, requests: &[Request<'_>]) {
        let mut tally = Tally::default();
        for request in requests {
            let operation = &request.operation;
            let kind = match operation {
                Operation::Read { .. } => Kind::Read,
                Operation::Write { durability, .. } => Kind::Write(*durability),
                Operation::Flush => Kind::Flush,
            };
            tally.add(kind, operation.bytes(), request.error.is_some());
        }
        self.count(&tally);
    }

    fn count(&self, tally: &Tally) {
        let c = &self.counters;
        let counts = [
            (&c.reads, tally.reads),
            (&c.read_bytes, tally.read_bytes),
            (&c.writes, tally.writes),
            (&c.written_bytes, tally.written_bytes),
            (&c.durable_writes, tally.durable_writes),
            (&c.flushes, tally.flushes),
            (&c.errors, tally.errors),
        ];
        for (counter, more) in counts.into_iter().filter(|(_, more)| *more > 0) {
            counter.fetch_add(more, Ordering::Relaxed);
        }
        match (tally.wrote, tally.ordered) {
            (_, true) => self.gate.wrote(),
            (true, false) => self.gate.wrote_checked(),
            (false, false) => {}
        }
    }
}

impl Counters {
    fn read(&self, device: &dyn BlockDevice) -> DeviceStats {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        DeviceStats {
            name: device.name().to_owned(),
            backend: device.info().backend,
            reads: get(&self.reads),
            read_bytes: get(&self.read_bytes),
            writes: get(&self.writes),
            written_bytes: get(&self.written_bytes),
            durable_writes: get(&self.durable_writes),
            flushes: get(&self.flushes),
            errors: get(&self.errors),
        }
    }
}

fn set_durability(ios: &mut [Io<'_>], wanted: Durability) {
    for io in ios {
        if let Io::Write { durability, .. } = io {
            *durability = wanted;
        }
    }
}

fn add_request<'a>(batches: &mut DeviceBatches<'a>, device: usize, request: Request<'a>) {
    match batches.iter_mut().find(|(d, _)| *d == device) {
        Some((_, requests)) => requests.push(request),
        None => batches.push((device, smallvec![request])),
    }
}

/// Adds a piece to the last range of its device if it continues it, else as a new one.
fn merge_piece(ranges: &mut Vec<Piece>, piece: Piece) {
    match ranges.iter_mut().rev().find(|r| r.device == piece.device) {
        Some(r) if r.offset + r.len as u64 == piece.offset => r.len += piece.len,
        _ => ranges.push(piece),
    }
}

/// The error of a failed request on `device`.
pub(crate) fn io_error(device: &dyn BlockDevice, request: &Request<'_>) -> Error {
    let source = match &request.error {
        Some(e) => match e.raw_os_error() {
            Some(number) => io::Error::from_raw_os_error(number),
            None => io::Error::new(e.kind(), e.to_string()),
        },
        None => io::Error::other("no error"),
    };
    Error::Io {
        device: device.name().to_owned(),
        operation: request.operation.name(),
        offset: request.operation.offset(),
        len: request.operation.bytes() as u64,
        source: Arc::new(source),
    }
}

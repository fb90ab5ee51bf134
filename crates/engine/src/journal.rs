//! The journal: per-core staging, epochs, pipelined group commit.
//!
//! An operation pins the current epoch, appends its record to its shard's staging buffer for
//! that epoch and unpins. To commit, a leader closes the epoch, waits for its pins, gathers
//! all staging buffers into one batch, assigns it a place in the ring and its predecessor's
//! checksum (all under `gather`), and then, without that lock, flushes the devices that hold
//! ordered data and writes the batch with data-sync semantics. Or, when the batch vouches for all data that is not
//! flushed ([`crate::vouched`]), writes it, and that data, at once and flushes both. Batches may be written
//! at once; `durable` advances in their order.
//!
//! Invariants:
//! 1. A batch holds all records of its epoch; but a checkpoint's folds, if they are all that an epoch has, are in that
//!    of a later one (`staging.rs`, invariant 5). What a fold says follows from what was merged before it, so nobody
//!    waits for one to be durable but the checkpoint, which makes all so before it writes what rests on them. Whatever
//!    has a version beyond the fold's is in the same batch or in a later one, so recovery finds the changes of
//!    each node in their order.
//! 2. `gather` is held from closing an epoch to giving its batch a place, so epochs, places in the
//!    ring and the order of completion agree.
//! 3. A batch never overwrites what a checkpoint still needs (`ring.rs`).
//! 4. Epoch e is durable only if every batch of an epoch up to e is on the devices (`commit.rs`),
//!    and so is the data that was written before those records were staged, and what they vouch for (R14). All records of operations in these
//!    epochs are in these batches (invariant 1).
//! 5. After a failure no later epoch is ever durable, and nothing is gathered. Batches that have their places by then may
//!    still be written. A thread that panics is a failure, if it has records in its hands: of an operation that it stages, before
//!    they can be gathered; or of an epoch that it gathers, before another can be.
//! 6. No batch is written once a flush has failed that may have lost data which its records
//!    name (R17): a later flush that succeeds says nothing of it. None is told to be durable beside whose write one has failed,
//!    which may have lost the batch itself before its own flush. Only a failure at a moment when no record waited for a commit
//!    is forgiven.
//! 7. Whoever begins operations keeps what is staged bounded by committing
//!    ([`Journal::staged`]), so the memory of the journal is that of what is staged, once more
//!    for the batch being gathered, and the batches being written; and of data that waits, which is bounded
//!    ([`Vouched::has_room`]).
//! 8. A batch whose data could not be written is taken back, as far as the device lets that be done: recovery would have to ask for data
//!    that may be unreadable, of a batch of which nobody was told.

#[cfg(test)]
mod tests;

use crate::commit::{Commits, Place, Ticket};
use crate::counters::{Distribution, StoreCounters};
use crate::error::Error;
use crate::new_data::NewData;
use crate::ring::{Credit, Ring, Slack};
use crate::staging::{Pin, Records, Staging};
use crate::store::StoreOptions;
use crate::vouched::Vouched;
use base::atomic::{AtomicU64, Ordering};
use base::canary::{Canary, planted};
use base::clock::Clock;
use base::sync::{Mutex, rank};
use base::thread::Pool;
use base::tight;
use device::{AlignedBuf, Array, Durability, Io};
use format::geometry::Geometry;
use format::journal::{
    BATCH_MAGIC, BatchHeader, ENTRY_HEAD_MAX, RECORD_HEAD_MAX, RECORD_MAX, seal_record,
};
use format::{BLOCK_SIZE, U32, U64, checksum, checksum_joined};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Header and padding of one batch.
const BATCH_SLACK: u64 = 2 * BLOCK_SIZE as u64;
/// The longest record that folds what was merged into a node.
const FOLD: u64 = (RECORD_HEAD_MAX + ENTRY_HEAD_MAX) as u64;
/// Nodes that one operation merges changes into, at most.
pub(crate) const MERGES_MAX: usize = 4;
/// Credit of one operation: no record is longer, the batch that takes it may be its own, and it
/// may leave some folds to a checkpoint.
pub(crate) const CREDIT: u64 = RECORD_MAX as u64 + BATCH_SLACK + MERGES_MAX as u64 * FOLD;
const SLACK: Slack = Slack {
    credit: CREDIT,
    batches: UNPAID * BATCH_SLACK,
};
/// Batches behind the ring's tail that nobody pays for. Of folds alone: two of the checkpoint that runs, and the last one of
/// the checkpoint that moved the tail, which comes after it. And the one by which recovery confirms the last ones.
const UNPAID: u64 = 4;

/// Where a batch goes on from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Anchor {
    /// Ring position in bytes; grows for ever.
    pub position: u64,
    /// Sequence number of the batch at that position.
    pub sequence: u64,
    /// Checksum of the batch before.
    pub previous_crc: u32,
}

/// Serialises closing and gathering.
#[derive(Debug)]
struct Gather {
    next: Anchor,
    /// Records that wait for a batch that is paid for.
    kept: Records,
}

/// Pieces of a batch and where they belong, filled in by one thread.
#[derive(Default)]
struct Part<'b> {
    copies: Vec<(Vec<u8>, &'b mut [u8])>,
    /// Bytes of all of them, and their checksum.
    len: u64,
    crc: u32,
}

/// Bytes of a part, at least, unless it is the last.
fn part_bytes() -> usize {
    tight::limit(64 << 10, 256)
}

/// Parts for one thread, at least.
fn parts_each() -> usize {
    tight::limit(4, 1)
}

impl Part<'_> {
    fn fill(&mut self) {
        base::trace::mark("fill");
        // Each piece is freed as soon as it is copied.
        for (piece, to) in self.copies.drain(..) {
            to.copy_from_slice(&piece);
            self.crc = checksum(self.crc, to);
            self.len += to.len() as u64;
        }
    }
}

/// A batch that was gathered and must now be written.
struct Batch<'a> {
    epoch: u64,
    ticket: Ticket<'a, Error>,
    position: u64,
    bytes: Option<AlignedBuf>,
    /// What is written beside it, or, if it does not vouch for that, before it.
    data: Vec<NewData>,
    flush: Flush,
    /// The newest epoch that it says is durable.
    confirms: u64,
}

/// A batch as it will lie in the ring.
struct Sealed {
    bytes: AlignedBuf,
    flush: Flush,
    confirms: u64,
}

/// How what a batch's records name becomes durable. Decided once, when its header is made, which says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flush {
    /// Before the batch, if anything is not durable that must be by then.
    IfNeeded,
    /// Before the batch: it could vouch for data and does not.
    Before,
    /// With the batch, which vouches for it.
    With,
}

#[derive(Debug, Default)]
pub(crate) struct JournalStats {
    pub batches: AtomicU64,
    pub records: AtomicU64,
    /// Bytes of all records, and of all batches with them.
    pub record_bytes: AtomicU64,
    pub batch_bytes: AtomicU64,
    flushes: AtomicU64,
    written_durably: AtomicU64,
    /// Nanoseconds, records and bytes of each batch.
    each_ns: Distribution,
    each_records: Distribution,
    each_bytes: Distribution,
}

impl JournalStats {
    fn sealed(&self, records: u64, payload: u64, bytes: u64) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.records.fetch_add(records, Ordering::Relaxed);
        self.record_bytes.fetch_add(payload, Ordering::Relaxed);
        self.batch_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.each_records.record(records);
        self.each_bytes.record(bytes);
    }

    /// Adds what the journal knows.
    pub fn add_to(&self, counters: &mut StoreCounters) {
        counters.records = self.records.load(Ordering::Relaxed);
        counters.journal_flushes = self.flushes.load(Ordering::Relaxed);
        counters.journal_durably = self.written_durably.load(Ordering::Relaxed);
        counters.batches = self.each_ns.summary();
        counters.batch_records = self.each_records.summary();
        counters.batch_bytes = self.each_bytes.summary();
    }
}

#[derive(Debug)]
pub(crate) struct Journal {
    array: Arc<Array>,
    base: u64,
    align: u64,
    uuid: [u8; 16],
    pub mount_id: u64,
    staging: Staging,
    ring: Ring,
    commits: Commits<Error>,
    /// Failed flushes of the array that lost nothing that a record names.
    forgiven: AtomicU64,
    pub vouched: Vouched,
    /// Sequence of the newest checkpoint, for batch headers (R9).
    pub checkpoint_sequence: AtomicU64,
    gather: Mutex<Gather>,
    /// Threads that fill batches, and how many they are with the leader.
    pool: Arc<Pool>,
    workers: usize,
    clock: Clock,
    pub stats: JournalStats,
}

/// How an opened journal continues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resume {
    pub anchor: Anchor,
    pub epoch: u64,
    pub mount_id: u64,
    pub checkpoint_sequence: u64,
}

/// What everybody is told when a thread has panicked that had records of others in its hands.
fn batch_lost() -> Error {
    let why = "a thread panicked during a commit";
    tracing::error!("the file system turns read-only: {why}");
    Error::Failed(why.into())
}

impl Journal {
    pub fn new(
        array: Arc<Array>,
        pool: Arc<Pool>,
        options: &StoreOptions,
        resume: Resume,
    ) -> Journal {
        let shards = options.shards;
        // By how much `staged` may be too small.
        let staged_slack = options.staging_bytes as u64 / 8;
        let geometry: &Geometry = array.geometry();
        let (base, size) = (geometry.journal_start.byte(), geometry.journal_bytes());
        let align = geometry.journal_align as u64;
        let uuid = array.metadata_uuid();
        Journal {
            forgiven: AtomicU64::new(array.flush_failures()),
            array,
            base,
            align,
            uuid,
            mount_id: resume.mount_id,
            staging: Staging::new(resume.epoch, shards, staged_slack),
            ring: Ring::new(size, resume.anchor.position, SLACK, shards),
            commits: Commits::new(resume.epoch - 1, resume.anchor.sequence - 1, batch_lost),
            vouched: Vouched::new(resume.epoch - 1),
            checkpoint_sequence: AtomicU64::new(resume.checkpoint_sequence),
            gather: Mutex::new(
                rank::GATHER,
                Gather {
                    next: resume.anchor,
                    kept: Records::default(),
                },
            ),
            pool,
            workers: options.workers,
            clock: options.clock.clone(),
            stats: JournalStats::default(),
        }
    }

    /// The open epoch.
    pub fn epoch(&self) -> u64 {
        self.staging.epoch()
    }

    pub fn durable_epoch(&self) -> u64 {
        self.commits.durable_epoch()
    }

    pub fn failed(&self) -> Option<Error> {
        self.commits.failed()
    }

    /// Share of the ring in use, 0 to 1000, as the shard knows it.
    pub fn fill_permille(&self, shard: usize) -> u64 {
        self.ring.fill_permille(shard)
    }

    /// Takes the credit of one operation; `None` when the ring has no room (invariant 3).
    pub fn try_credit(&self, shard: usize) -> Option<Credit> {
        self.ring.try_credit(shard)
    }

    pub fn return_credit(&self, credit: Credit) {
        self.ring.return_credit(credit);
    }

    /// Operations have credits, and have not staged their records.
    pub fn has_credits(&self) -> bool {
        self.ring.has_credits()
    }

    /// Pins the open epoch. Nothing may block until the pin is dropped.
    pub fn pin(&self, shard: usize) -> Pin<'_> {
        self.staging.pin(shard)
    }

    /// Stages a record under a pin, which vouches for this data; what it leaves of its credit goes back.
    pub fn stage(&self, pin: &Pin<'_>, record: &[u8], data: Vec<NewData>, credit: Credit) {
        debug_assert!(record.len() <= RECORD_MAX);
        let sums = data.len() as u32;
        self.vouched.add(pin.epoch(), data);
        let batch = match self.staging.push(pin, record, sums, true) {
            true => BATCH_SLACK,
            false => 0,
        };
        self.ring.staged(credit, record.len() as u64 + batch);
    }

    /// A checkpoint will have to fold one more node. Who merges has a credit.
    pub fn owe_fold(&self, credit: Option<&mut Credit>) {
        debug_assert!(credit.is_some());
        credit.into_iter().for_each(|credit| credit.owe(FOLD));
    }

    /// A change of the node made that fold unnecessary. Who changes it so has a credit.
    pub fn fold_done(&self, credit: Option<&mut Credit>) {
        debug_assert!(credit.is_some());
        credit
            .into_iter()
            .for_each(|credit| credit.release_owed(FOLD));
    }

    /// Stages a fold under a pin; it was owed.
    pub fn stage_fold(&self, pin: &Pin<'_>, record: &[u8]) {
        let len = record.len() as u64;
        debug_assert!(len <= FOLD);
        self.staging.push(pin, record, 0, false);
        self.ring.staged_owed(FOLD, len);
    }

    /// Whether anything waits to be gathered for a commit, or may come to, as operations hold credits.
    pub fn outstanding(&self) -> bool {
        self.ring.outstanding(|| self.staging.has_records())
    }

    /// Bytes of memory that records waiting for a commit take, roughly.
    pub fn staged(&self) -> u64 {
        self.staging.bytes()
    }

    /// Returns when every record of an epoch up to `epoch` is durable. Callers share batches:
    /// whoever finds nobody gathering leads, the others wait for the outcome.
    pub fn commit_through(&self, epoch: u64) -> Result<(), Error> {
        base::sync::assert_none_held_from(rank::INODE);
        self.commits.through(
            epoch,
            || self.epoch(),
            |place| {
                let mut gather = self.gather.lock();
                if self.epoch() > epoch || self.failed().is_some() {
                    drop(gather);
                    place.leave();
                    return None;
                }
                Some(self.close_epoch(&mut gather, false, place))
            },
            |batch| self.write_batch(batch),
        )
    }

    /// Stages a record that changes nothing for a credit, so that there is a batch. Returns its epoch.
    pub fn stage_nothing(&self, shard: usize, credit: Credit) -> u64 {
        let mut record = vec![0; RECORD_HEAD_MAX];
        let pin = self.pin(shard);
        self.stage(&pin, seal_record(&mut record), Vec::new(), credit);
        pin.epoch()
    }

    /// Closes the open epoch, makes it durable and returns it with the anchor after its batch.
    /// Every record of an epoch up to it is durable then, folds too. For checkpoints: see [`UNPAID`].
    pub fn close_and_commit(&self) -> Result<(u64, Anchor), Error> {
        let (batch, anchor) = {
            let mut gather = self.gather.lock();
            if let Some(error) = self.failed() {
                return Err(error);
            }
            let batch = self.close_epoch(&mut gather, true, self.commits.place());
            (batch, gather.next)
        };
        let epoch = batch.epoch;
        self.write_batch(batch)?;
        self.commit_through(epoch)?;
        Ok((epoch, anchor))
    }

    /// Closes the epoch and gathers its records (invariants 1 and 2) for this place; `folds` says whether a batch may hold nothing else.
    fn close_epoch<'a>(
        &self,
        gather: &mut Gather,
        folds: bool,
        place: Place<'a, Error>,
    ) -> Batch<'a> {
        let (epoch, records) = self.staging.close(&mut gather.kept, folds);
        let data = self.vouched.take(epoch);
        let (position, sequence) = (gather.next.position, gather.next.sequence);
        // Whoever fails before it releases its pin may have staged a part of what belongs together.
        let whole = self.failed().is_none();
        let bytes = (whole && records.count > 0).then(|| {
            let reserved = records.payload() + records.paid as u64 * BATCH_SLACK;
            let sealed = self.seal(&mut gather.next, epoch, records);
            let fits = self.ring.gathered(reserved, sealed.bytes.len() as u64);
            debug_assert!(fits, "invariant 3");
            fits.then_some(sealed)
        });
        if let Some(None) = bytes {
            // What is durable stays, as this is not written.
            let what = "the journal has no room for a batch that was promised some";
            self.fail(Error::Failed(what.into()));
        }
        let sealed = bytes.flatten();
        let (flush, confirms) = match &sealed {
            Some(sealed) => (sealed.flush, sealed.confirms),
            None => (Flush::IfNeeded, 0),
        };
        Batch {
            epoch,
            ticket: place.issue(epoch, sealed.is_some().then_some(sequence)),
            position,
            bytes: sealed.map(|sealed| sealed.bytes),
            data,
            flush,
            confirms,
        }
    }

    /// Makes one batch of the staged pieces, and moves `next` past it.
    fn seal(&self, next: &mut Anchor, epoch: u64, records: Records) -> Sealed {
        let payload = records.payload() as usize;
        // What its records name and do not vouch for was written before they were staged, and is counted by now.
        let flush = match records.sums {
            0 => Flush::IfNeeded,
            _ if self.array.is_ordered() => Flush::With,
            _ => Flush::Before,
        };
        let checked = match flush {
            Flush::With => records.sums,
            _ => 0,
        };
        // No older than what the header says in sequence numbers, which recovery goes by: that is read after it.
        let confirms = self.durable_epoch();
        let mut header = BatchHeader::zeroed();
        header.magic = U32::new(BATCH_MAGIC);
        header.previous_crc = U32::new(next.previous_crc);
        header.len = U32::new(payload as u32);
        header.uuid = self.uuid;
        header.mount_id = U64::new(self.mount_id);
        header.sequence = U64::new(next.sequence);
        header.epoch = U64::new(epoch);
        header.durable_epoch = U64::new(confirms);
        header.durable_sequence = U64::new(self.commits.durable_sequence());
        header.checkpoint_sequence = U64::new(self.checkpoint_sequence.load(Ordering::SeqCst));
        header.records = U32::new(records.count);
        header.checked = U32::new(checked);
        let used = BatchHeader::SIZE + payload;
        let padded = (used as u64).next_multiple_of(self.align);
        let mut buf = AlignedBuf::zeroed(padded as usize);
        let (head, body) = buf[..used].split_at_mut(BatchHeader::SIZE);
        head.copy_from_slice(header.as_bytes());
        let crc = checksum(self.array.checksum_seed(), &head[8..]);
        let crc = self.fill(crc, records.pieces, body);
        head[4..8].copy_from_slice(&crc.to_le_bytes());
        *next = Anchor {
            position: next.position + padded,
            sequence: next.sequence + 1,
            previous_crc: crc,
        };
        self.stats
            .sealed(records.count as u64, payload as u64, padded);
        Sealed {
            bytes: buf,
            flush,
            confirms,
        }
    }

    /// Copies pieces into the body of a batch, and continues a checksum over them. Of a long one several threads
    /// do so at once: the commits of all cores have one leader.
    fn fill(&self, crc: u32, pieces: Vec<Vec<u8>>, mut body: &mut [u8]) -> u32 {
        let mut parts: Vec<Part<'_>> = Vec::new();
        let enough = part_bytes();
        let mut last = enough;
        for piece in pieces {
            let (to, rest) = body.split_at_mut(piece.len());
            body = rest;
            if last >= enough {
                parts.push(Part::default());
                last = 0;
            }
            last += piece.len();
            if let Some(part) = parts.last_mut() {
                part.copies.push((piece, to));
            }
        }
        let share = parts.len().div_ceil(self.workers).max(parts_each());
        let fill = |share: &mut &mut [Part<'_>]| share.iter_mut().for_each(Part::fill);
        let mut shares: Vec<&mut [Part<'_>]> = parts.chunks_mut(share).collect();
        match &mut shares[..] {
            [one] => fill(one),
            many => self.pool.run(many, &fill, None),
        }
        base::trace::joined();
        let join = |crc, part: &Part<'_>| checksum_joined(crc, part.crc, part.len);
        parts.iter().fold(crc, join)
    }

    /// Writes a gathered batch and completes it in order (invariant 4).
    fn write_batch(&self, batch: Batch<'_>) -> Result<(), Error> {
        let result = match &batch.bytes {
            Some(bytes) => {
                let began = self.clock.monotonic_ns();
                let written = match batch.flush {
                    Flush::With => self.write_and_flush(batch.position, bytes, &batch.data),
                    Flush::Before => self
                        .write_data(&batch.data)
                        .and_then(|()| self.flush_and_write(batch.position, bytes, true)),
                    Flush::IfNeeded => {
                        debug_assert!(batch.data.is_empty(), "it would vouch for that");
                        let needed = !self.array.is_ordered();
                        self.flush_and_write(batch.position, bytes, needed)
                    }
                };
                let passed = self.clock.monotonic_ns().saturating_sub(began);
                self.stats.each_ns.record(passed);
                written
            }
            None => {
                debug_assert!(batch.data.is_empty() || self.failed().is_some());
                Ok(())
            }
        };
        let result =
            result.map_err(|error| Error::Failed(format!("journal write: {error}").into()));
        if let (Err(error), None) = (&result, self.failed()) {
            // Callers are told no more than that nothing can be changed.
            tracing::error!("{error}");
        }
        self.commits.complete(batch.ticket, result)?;
        self.vouched.written(batch.epoch);
        if batch.flush == Flush::Before {
            self.vouched.flushed(batch.epoch);
        }
        self.vouched.confirm(batch.confirms);
        Ok(())
    }

    /// R14: the records' data has been written; it must be durable before the batch that names it can be.
    fn flush_and_write(&self, position: u64, bytes: &[u8], flush: bool) -> Result<(), Error> {
        if flush && !planted(Canary::SkipPreflush) {
            self.flush_all()?;
        }
        self.check_flushes()?;
        let durability = match planted(Canary::BatchNotDurable) {
            true => Durability::Volatile,
            false => Durability::Durable,
        };
        let written = self.write_ring(position, bytes, durability, &[]);
        if planted(Canary::FailedBatchIgnored) {
            return Ok(());
        }
        if planted(Canary::BatchBesideUnseen) {
            return written;
        }
        // What failed beside the write is counted by now.
        written.and_then(|()| self.check_flushes())
    }

    /// The batch has checksums of all data that its records name and that is not durable yet: both are written at once.
    fn write_and_flush(&self, position: u64, bytes: &[u8], data: &[NewData]) -> Result<(), Error> {
        // Whoever leads, syncs wait for it.
        let _hurried = device::Hurried::begin();
        self.check_flushes()?;
        let mut written = self.write_ring(position, bytes, Durability::Checked, data);
        if let (Err(error), false) = (&written, data.is_empty()) {
            // That it was logged cannot be undone, so it is tried once more.
            tracing::warn!("a commit is written again: {error}");
            written = self.write_ring(position, bytes, Durability::Checked, data);
        }
        match written {
            Err(_) if planted(Canary::FailedBatchIgnored) => {}
            Err(error) => {
                if !data.is_empty() {
                    self.take_back(position);
                }
                return Err(error);
            }
            Ok(()) => {}
        }
        let flushed = match planted(Canary::BatchNotDurable) {
            true => Ok(()),
            false => self.flush_all(),
        };
        // What failed meanwhile, or since the data was written, may have lost that.
        let done = flushed.and_then(|()| self.check_flushes());
        if done.is_err() && !data.is_empty() {
            self.take_back(position);
        }
        done
    }

    /// Has the ring no batch where one was just written, which nobody will be told of (invariant 8).
    fn take_back(&self, position: u64) {
        let nothing = AlignedBuf::zeroed(self.align as usize);
        if let Err(error) = self.write_ring(position, &nothing, Durability::Durable, &[]) {
            tracing::warn!("a batch without its data stays in the journal: {error}");
        }
    }

    /// Data for which the batch that names it does not vouch.
    fn write_data(&self, data: &[NewData]) -> Result<(), Error> {
        let _hurried = device::Hurried::begin();
        let write = || {
            let mut ios: Vec<Io<'_>> = NewData::writes(data).collect();
            self.array.execute(&mut ios)
        };
        // As with its batch.
        let again = |error: device::Error| {
            tracing::warn!("data of a commit is written again: {error}");
            write()
        };
        Ok(write().or_else(again)?)
    }

    fn flush_all(&self) -> Result<(), Error> {
        let flushed = self.array.flush()?;
        self.stats.flushes.fetch_add(flushed, Ordering::Relaxed);
        Ok(())
    }

    /// Invariant 6.
    fn check_flushes(&self) -> Result<(), Error> {
        match self.array.flush_failures() == self.forgiven.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(Error::Failed("an earlier flush failed".into())),
        }
    }

    fn write_ring(
        &self,
        position: u64,
        bytes: &[u8],
        durability: Durability,
        beside: &[NewData],
    ) -> Result<(), Error> {
        let at = position % self.ring.size();
        let first = ((self.ring.size() - at) as usize).min(bytes.len());
        let (head, rest) = bytes.split_at(first);
        let mut ios = vec![Io::Write {
            byte: self.base + at,
            buf: head,
            durability,
        }];
        if !rest.is_empty() {
            ios.push(Io::Write {
                byte: self.base,
                buf: rest,
                durability,
            });
        }
        if durability == Durability::Durable {
            debug_assert!(beside.is_empty(), "no more than checked");
            let durably = &self.stats.written_durably;
            durably.fetch_add(ios.len() as u64, Ordering::Relaxed);
            return Ok(self.array.write_durably(&mut ios)?);
        }
        ios.extend(NewData::writes(beside));
        Ok(self.array.execute(&mut ios)?)
    }

    /// Goes on after a flush that failed outside a commit; false when data of records that wait
    /// for their commit may be lost (invariant 6).
    pub fn forgive_flush(&self) -> bool {
        // Under `gather` no batch is between being staged and being counted as issued.
        let _gather = self.gather.lock();
        // First of all: of what fails from here on others may have written data already, and not begun when it is looked for them.
        let failures = self.array.flush_failures();
        if failures == self.forgiven.load(Ordering::SeqCst) {
            // Somebody who shared the flush has looked; what waits by now has nothing to do with it.
            return true;
        }
        if self.outstanding() || !self.commits.idle() {
            return false;
        }
        self.forgiven.store(failures, Ordering::SeqCst);
        true
    }

    /// A failure elsewhere stops the journal (invariant 5).
    pub fn fail(&self, error: Error) {
        self.commits.fail(error);
    }

    /// Returns when no batch is on its way to the devices. The journal has failed: none follows (invariant 5).
    pub fn await_batches(&self) {
        // Who gathers has not seen that, and is about to give its batch a place.
        drop(self.gather.lock());
        self.commits.await_idle();
    }

    /// A checkpoint made everything before `tail` unnecessary.
    pub fn release(&self, tail: u64, checkpoint_sequence: u64) {
        self.ring.release(tail);
        self.checkpoint_sequence
            .store(checkpoint_sequence, Ordering::SeqCst);
    }
}

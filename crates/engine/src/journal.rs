//! The journal: per-core staging, epochs, pipelined group commit.
//!
//! An operation pins the current epoch, appends its record to its shard's staging buffer for
//! that epoch and unpins. To commit, a leader closes the epoch, waits for its pins, gathers
//! all staging buffers into one batch, assigns it a place in the ring and its predecessor's
//! checksum (all under `gather`), and then, without that lock, flushes the devices that hold
//! ordered data and writes the batch with data-sync semantics. Batches may be written
//! at once; `durable` advances in their order.
//!
//! Invariants:
//! 1. A record is staged under a pin of its epoch; an epoch is gathered only when it is closed
//!    and its pins are gone. So a batch holds all records of its epoch.
//! 2. Only two staging slots exist: epoch e+2 opens after e was gathered, because `gather`
//!    is held from closing to gathering.
//! 3. `head - tail + outstanding` never exceeds the ring: credits are taken before an operation
//!    locks anything (R6), and a batch never overwrites what a checkpoint still needs.
//! 4. `durable` = e only if every batch of an epoch up to e is on the devices, and so is the
//!    data that was written before those records were staged (R14).
//! 5. After a failure nothing more is written and `durable` never advances again.
//! 6. No batch is written once a flush has failed that may have lost data which its records
//!    name (R17): a later flush that succeeds says nothing of it. Only a failure at a moment when
//!    no record waited for a commit is forgiven.
//! 7. `staged` is the payload of all staging slots. Whoever begins operations keeps it bounded
//!    by committing ([`Journal::staged`]), so the memory of the journal is that of what is
//!    staged, once more for the batch being gathered, and the batches being written.

use crate::epoch::{EpochPin, OpenEpoch, Pins};
use crate::error::Error;
use base::canary::{Canary, planted};
use base::sync::{Condvar, Mutex, MutexGuard, rank};
use device::{AlignedBuf, Array, Durability, Io};
use format::geometry::Geometry;
use format::journal::{BATCH_MAGIC, BatchHeader, RECORD_MAX};
use format::{BLOCK_SIZE, U32, U64, checksum};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use zerocopy::IntoBytes;

/// Batches that may be on their way to the devices at once.
const PIPELINE: u64 = 4;
/// Room that headers and padding of the batches in flight may need beyond their records.
const BATCH_SLACK: u64 = (PIPELINE + 2) * 2 * BLOCK_SIZE as u64;
/// Credit of one operation: no record is longer, and the batch that takes it may be its own.
pub(crate) const CREDIT: u64 = RECORD_MAX as u64 + 2 * BLOCK_SIZE as u64;

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

/// One shard's staging; on cache lines of its own.
#[repr(align(128))]
#[derive(Debug)]
struct Shard {
    pins: Pins,
    staged: Mutex<[Staged; 2]>,
}

/// Records of one shard and epoch, in pieces, so that staging many moves none of them.
#[derive(Debug, Default)]
struct Staged {
    pieces: Vec<Vec<u8>>,
    records: u32,
}

/// Capacity of a piece that takes several records.
const PIECE: usize = 64 << 10;

impl Staged {
    fn push(&mut self, record: &[u8]) {
        let fits = |piece: &Vec<u8>| piece.capacity() - piece.len() >= record.len();
        match self.pieces.last_mut().filter(|piece| fits(piece)) {
            Some(piece) => piece.extend_from_slice(record),
            None => {
                // The first piece is small: with frequent commits it is the only one.
                let least = if self.pieces.is_empty() {
                    PIECE / 16
                } else {
                    PIECE
                };
                let mut piece = Vec::with_capacity(least.max(record.len()));
                piece.extend_from_slice(record);
                self.pieces.push(piece);
            }
        }
        self.records += 1;
    }
}

/// Serialises closing and gathering.
#[derive(Debug)]
struct Gather {
    next: Anchor,
}

#[derive(Debug)]
struct CommitState {
    /// Sequence numbers of batches: given out, and completed in order.
    issued: u64,
    completed: u64,
    durable: u64,
    failed: Option<Error>,
}

/// A pinned epoch; unpinned on drop.
#[derive(Debug)]
pub(crate) struct Pin<'a> {
    shard: &'a Shard,
    pin: EpochPin<'a>,
}

impl Pin<'_> {
    pub fn epoch(&self) -> u64 {
        self.pin.epoch
    }
}

/// A batch that was gathered and must now be written.
struct Batch {
    epoch: u64,
    ticket: u64,
    sequence: u64,
    position: u64,
    bytes: Option<AlignedBuf>,
}

#[derive(Debug, Default)]
pub(crate) struct JournalStats {
    pub batches: AtomicU64,
    pub batch_bytes: AtomicU64,
    pub records: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Journal {
    array: Arc<Array>,
    base: u64,
    size: u64,
    align: u64,
    uuid: [u8; 16],
    pub mount_id: u64,
    shards: Vec<Shard>,
    epoch: OpenEpoch,
    durable: AtomicU64,
    /// Sequence number of the newest durable batch.
    durable_sequence: AtomicU64,
    head: AtomicU64,
    tail: AtomicU64,
    /// Credits given out and bytes staged, not yet part of `head`.
    outstanding: AtomicU64,
    /// Failed flushes of the array that lost nothing that a record names.
    forgiven: AtomicU64,
    /// Bytes staged (invariant 7).
    staged: AtomicU64,
    /// Sequence of the newest checkpoint, for batch headers (R9).
    pub checkpoint_sequence: AtomicU64,
    gather: Mutex<Gather>,
    state: Mutex<CommitState>,
    /// Whether `state.failed` holds an error.
    has_failed: AtomicBool,
    changed: Condvar,
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

impl Journal {
    pub fn new(array: Arc<Array>, shards: usize, resume: Resume) -> Journal {
        let geometry: &Geometry = array.geometry();
        let (base, size) = (geometry.journal_start.byte(), geometry.journal_bytes());
        let align = geometry.journal_align as u64;
        let uuid = array.uuid();
        let shard = |i| Shard {
            pins: Pins::new(),
            staged: Mutex::keyed(rank::STAGING, i as u64, Default::default()),
        };
        let durable = resume.epoch - 1;
        Journal {
            forgiven: AtomicU64::new(array.flush_failures()),
            array,
            base,
            size,
            align,
            uuid,
            mount_id: resume.mount_id,
            shards: (0..shards).map(shard).collect(),
            epoch: OpenEpoch::new(resume.epoch),
            durable: AtomicU64::new(durable),
            durable_sequence: AtomicU64::new(resume.anchor.sequence - 1),
            head: AtomicU64::new(resume.anchor.position),
            tail: AtomicU64::new(resume.anchor.position),
            outstanding: AtomicU64::new(0),
            staged: AtomicU64::new(0),
            checkpoint_sequence: AtomicU64::new(resume.checkpoint_sequence),
            gather: Mutex::new(
                rank::GATHER,
                Gather {
                    next: resume.anchor,
                },
            ),
            state: Mutex::new(
                rank::COMMIT_STATE,
                CommitState {
                    issued: 0,
                    completed: 0,
                    durable,
                    failed: None,
                },
            ),
            has_failed: AtomicBool::new(false),
            changed: Condvar::new(),
            stats: JournalStats::default(),
        }
    }

    /// The open epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    pub fn durable_epoch(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    pub fn failed(&self) -> Option<Error> {
        // Every operation asks; only a failure is worth the lock.
        if !self.has_failed.load(Ordering::Acquire) {
            return None;
        }
        self.state.lock().failed.clone()
    }

    /// Share of the ring in use, 0 to 1000.
    pub fn fill_permille(&self) -> u64 {
        self.used() * 1000 / self.size
    }

    fn used(&self) -> u64 {
        // The tail first, which never passes the head: a checkpoint that ends between these
        // loads makes the result too large, never negative. Outstanding before head: bytes
        // move from there to head, and counting them twice is safe.
        let tail = self.tail.load(Ordering::SeqCst);
        let outstanding = self.outstanding.load(Ordering::SeqCst);
        let head = self.head.load(Ordering::SeqCst);
        (head - tail) + outstanding + BATCH_SLACK
    }

    /// Takes the credit of one operation; false when the ring has no room (invariant 3).
    pub fn try_credit(&self) -> bool {
        self.outstanding.fetch_add(CREDIT, Ordering::SeqCst);
        if self.used() > self.size && !planted(Canary::NoCredits) {
            self.outstanding.fetch_sub(CREDIT, Ordering::SeqCst);
            return false;
        }
        true
    }

    pub fn return_credit(&self) {
        self.outstanding.fetch_sub(CREDIT, Ordering::SeqCst);
    }

    /// Pins the open epoch. Nothing may block until the pin is dropped.
    pub fn pin(&self, shard: usize) -> Pin<'_> {
        let shard = &self.shards[shard % self.shards.len()];
        let pin = self.epoch.pin(&shard.pins);
        Pin { shard, pin }
    }

    /// Stages a record under a pin; its credit shrinks to its size.
    pub fn stage(&self, pin: &Pin<'_>, record: &[u8]) {
        debug_assert!(record.len() <= RECORD_MAX);
        let mut staged = pin.shard.staged.lock();
        staged[(pin.epoch() % 2) as usize].push(record);
        self.staged
            .fetch_add(record.len() as u64, Ordering::Relaxed);
        self.outstanding
            .fetch_sub(CREDIT - record.len() as u64, Ordering::SeqCst);
    }

    /// Bytes that wait for a commit, credits in use included.
    pub fn outstanding(&self) -> u64 {
        self.outstanding.load(Ordering::Relaxed)
    }

    /// Bytes of memory that records waiting for a commit take.
    pub fn staged(&self) -> u64 {
        self.staged.load(Ordering::Relaxed)
    }

    /// Returns when every record of an epoch up to `epoch` is durable. Callers share batches:
    /// whoever finds the gather lock free leads, the others wait for the outcome.
    pub fn commit_through(&self, epoch: u64) -> Result<(), Error> {
        base::sync::assert_none_held_from(rank::INODE);
        loop {
            if self.durable_epoch() >= epoch {
                return Ok(());
            }
            let state = self.state.lock();
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if self.epoch() > epoch || state.issued - state.completed >= PIPELINE {
                // Gathered by somebody, or the pipeline is full: wait for a change.
                self.wait(state, epoch);
                continue;
            }
            drop(state);
            let Some(mut gather) = self.gather.try_lock() else {
                self.wait(self.state.lock(), epoch);
                continue;
            };
            if self.epoch() > epoch {
                continue;
            }
            let batch = self.close_epoch(&mut gather);
            drop(gather);
            self.write_batch(batch)?;
        }
    }

    /// Closes the open epoch, makes it durable and returns it with the anchor after its batch.
    /// Every epoch up to it is durable then.
    pub fn close_and_commit(&self) -> Result<(u64, Anchor), Error> {
        let (batch, anchor) = {
            let mut gather = self.gather.lock();
            if let Some(error) = self.failed() {
                return Err(error);
            }
            let batch = self.close_epoch(&mut gather);
            (batch, gather.next)
        };
        let epoch = batch.epoch;
        self.write_batch(batch)?;
        self.commit_through(epoch)?;
        Ok((epoch, anchor))
    }

    fn wait(&self, mut state: MutexGuard<'_, CommitState>, epoch: u64) {
        // A gather in progress ends by taking `state` and notifying, so a bounded wait only
        // covers the moment between a failed try_lock and that notification.
        if state.durable < epoch && state.failed.is_none() {
            self.changed
                .wait_for(&mut state, std::time::Duration::from_millis(1));
        }
    }

    /// Closes the epoch and gathers its records (invariants 1 and 2).
    fn close_epoch(&self, gather: &mut Gather) -> Batch {
        let epoch = self.epoch.close();
        let slot = (epoch % 2) as usize;
        let mut pieces: Vec<Vec<u8>> = Vec::new();
        let mut records = 0;
        for shard in &self.shards {
            if !planted(Canary::PinsIgnored) {
                shard.pins.wait(epoch);
            }
            let mut staged = shard.staged.lock();
            let staged = std::mem::take(&mut staged[slot]);
            pieces.extend(staged.pieces);
            records += staged.records;
        }
        let sequence = gather.next.sequence;
        let (position, bytes) = if records == 0 {
            (gather.next.position, None)
        } else {
            let payload = pieces.iter().map(|p| p.len() as u64).sum();
            let position = gather.next.position;
            let sealed = self.seal(&mut gather.next, epoch, records, pieces);
            self.head.fetch_add(sealed.len() as u64, Ordering::SeqCst);
            self.outstanding.fetch_sub(payload, Ordering::SeqCst);
            self.staged.fetch_sub(payload, Ordering::Relaxed);
            (position, Some(sealed))
        };
        let mut state = self.state.lock();
        let ticket = state.issued;
        state.issued += 1;
        drop(state);
        self.changed.notify_all();
        Batch {
            epoch,
            ticket,
            sequence,
            position,
            bytes,
        }
    }

    /// Makes one batch of the staged pieces, and moves `next` past it.
    fn seal(
        &self,
        next: &mut Anchor,
        epoch: u64,
        records: u32,
        pieces: Vec<Vec<u8>>,
    ) -> AlignedBuf {
        let payload: usize = pieces.iter().map(Vec::len).sum();
        let mut header = BatchHeader::zeroed();
        header.magic = U32::new(BATCH_MAGIC);
        header.previous_crc = U32::new(next.previous_crc);
        header.len = U32::new(payload as u32);
        header.uuid = self.uuid;
        header.mount_id = U64::new(self.mount_id);
        header.sequence = U64::new(next.sequence);
        header.epoch = U64::new(epoch);
        header.durable_epoch = U64::new(self.durable_epoch());
        header.durable_sequence = U64::new(self.durable_sequence.load(Ordering::Acquire));
        header.checkpoint_sequence = U64::new(self.checkpoint_sequence.load(Ordering::SeqCst));
        header.records = U32::new(records);
        let used = BatchHeader::SIZE + payload;
        let padded = (used as u64).next_multiple_of(self.align);
        let mut buf = AlignedBuf::zeroed(padded as usize);
        buf[..BatchHeader::SIZE].copy_from_slice(header.as_bytes());
        let mut at = BatchHeader::SIZE;
        // Each piece is freed as soon as it is copied.
        for piece in pieces {
            buf[at..at + piece.len()].copy_from_slice(&piece);
            at += piece.len();
        }
        let crc = checksum(self.array.journal_seed(), &buf[8..used]);
        buf[4..8].copy_from_slice(&crc.to_le_bytes());
        *next = Anchor {
            position: next.position + padded,
            sequence: next.sequence + 1,
            previous_crc: crc,
        };
        self.stats.batches.fetch_add(1, Ordering::Relaxed);
        self.stats.batch_bytes.fetch_add(padded, Ordering::Relaxed);
        self.stats
            .records
            .fetch_add(records as u64, Ordering::Relaxed);
        buf
    }

    /// Writes a gathered batch and completes it in order (invariant 4).
    fn write_batch(&self, batch: Batch) -> Result<(), Error> {
        let result = match &batch.bytes {
            Some(bytes) => self.write_ring(batch.position, bytes),
            None => Ok(()),
        };
        let mut state = self.state.lock();
        let in_order = !planted(Canary::DurableOutOfOrder);
        while state.completed != batch.ticket && state.failed.is_none() && in_order {
            self.changed.wait(&mut state);
        }
        if let Err(error) = result
            && state.failed.is_none()
        {
            state.failed = Some(Error::Failed(format!("journal write: {error}").into()));
            self.has_failed.store(true, Ordering::Release);
        }
        state.completed += 1;
        let outcome = match &state.failed {
            Some(error) => Err(error.clone()),
            None => {
                state.durable = batch.epoch;
                if batch.bytes.is_some() {
                    self.durable_sequence
                        .store(batch.sequence, Ordering::Release);
                }
                self.durable.store(batch.epoch, Ordering::Release);
                Ok(())
            }
        };
        drop(state);
        self.changed.notify_all();
        outcome
    }

    fn write_ring(&self, position: u64, bytes: &[u8]) -> Result<(), Error> {
        // R14: the records' data was written before they were staged; it must be durable
        // before the batch that names it can be.
        if !planted(Canary::SkipPreflush) {
            self.array.flush()?;
        }
        if self.array.flush_failures() != self.forgiven.load(Ordering::SeqCst) {
            return Err(Error::Failed("an earlier flush failed".into()));
        }
        let at = position % self.size;
        let first = ((self.size - at) as usize).min(bytes.len());
        let (head, rest) = bytes.split_at(first);
        let durability = match planted(Canary::BatchNotDurable) {
            true => Durability::Volatile,
            false => Durability::Durable,
        };
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
        match self.array.execute(&mut ios) {
            Err(_) if planted(Canary::FailedBatchIgnored) => Ok(()),
            done => Ok(done?),
        }
    }

    /// Goes on after a flush that failed outside a commit; false when data of records that wait
    /// for their commit may be lost (invariant 6).
    pub fn forgive_flush(&self) -> bool {
        // Under `gather` no batch is between being staged and being counted as issued.
        let _gather = self.gather.lock();
        let state = self.state.lock();
        if self.outstanding.load(Ordering::SeqCst) > 0 || state.issued != state.completed {
            return false;
        }
        let failures = self.array.flush_failures();
        self.forgiven.store(failures, Ordering::SeqCst);
        true
    }

    /// A failure elsewhere stops the journal (invariant 5).
    pub fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        if state.failed.is_none() {
            state.failed = Some(error);
            self.has_failed.store(true, Ordering::Release);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// A checkpoint made everything before `tail` unnecessary.
    pub fn release(&self, tail: u64, checkpoint_sequence: u64) {
        self.tail.store(tail, Ordering::SeqCst);
        self.checkpoint_sequence
            .store(checkpoint_sequence, Ordering::SeqCst);
    }
}

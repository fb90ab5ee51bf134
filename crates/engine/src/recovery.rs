//! Making an empty store, and opening one after a clean end or a crash.
//!
//! What recovery decides, from the checkpoint slots and the journal:
//!
//! | newest valid record | journal from its anchor | outcome |
//! |---|---|---|
//! | none | any | damaged: nothing to start from |
//! | found | a batch names a newer checkpoint | damaged: the newer record was lost (R9) |
//! | found | unbroken run reaches every batch that it must | replay the run |
//! | found | run ends before a batch that an image depends on | damaged (R9) |
//! | found | a batch behind the end names one at or past it as durable | damaged (R9) |
//! | found | a version gap, or a delta that does not apply | damaged; read-only: that node is |
//!
//! *Damaged* is decided before the first write. Two copies of each slot exist; one suffices.
//!
//! Invariants:
//! 1. Devices are flushed before the journal is read, so what is replayed stays (R8).
//! 2. What is replayed (in [`crate::replay`]) is in memory only until the run is done.
//! 3. After replay a checkpoint empties the journal before the first user operation (R8), under
//!    a new mount id, so that no batch of the last mount can follow a batch of this one.

use crate::checkpoint::{CheckpointState, read_space};
use crate::content::Content;
use crate::error::Error;
use crate::journal::{Anchor, Resume};
use crate::space::ChunkState;
use crate::store::{Parts, Store, StoreOptions};
use crate::table::Table;
use base::canary::{Canary, planted};
use device::{AlignedBuf, Array};
use format::checkpoint::CheckpointRecord;
use format::journal::{BATCH_MAGIC, BatchHeader};
use format::{BLOCK_SIZE, Damage, Nid, checksum};
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::FromBytes;

/// What opening a store found and did.
#[derive(Clone, Debug, Default)]
pub struct RecoveryReport {
    /// The last mount ended with everything on the devices and an empty journal.
    pub clean: bool,
    pub batches: u64,
    pub records: u64,
    pub deltas: u64,
    pub nodes: u64,
    /// Checkpoint record copies that were unreadable or damaged, as (slot, copy, why).
    pub damaged_copies: Vec<(usize, usize, String)>,
}

/// A batch read from the ring.
pub(crate) struct Batch {
    pub header: BatchHeader,
    pub records: Vec<u8>,
}

pub(crate) fn damaged(structure: &'static str, what: impl Into<String>) -> Error {
    Error::Damaged(Damage::new(structure, what))
}

impl<C: Content> Store<C> {
    /// Writes the first checkpoint of an empty store. Labels are the caller's, and come last.
    pub fn format(array: &Arc<Array>, options: StoreOptions) -> Result<(), Error> {
        let chunks = vec![ChunkState::Free; array.geometry().chunk_count as usize];
        let resume = Resume {
            anchor: Anchor {
                position: 0,
                sequence: 1,
                previous_crc: 0,
            },
            epoch: 1,
            mount_id: 1,
            checkpoint_sequence: 0,
        };
        let parts = Parts {
            table: Table::new(Arc::clone(array), 64),
            free_nids: Vec::new(),
            chunks: chunks.clone(),
            live: BTreeMap::new(),
            resume,
            checkpoint_state: CheckpointState {
                sequence: 0,
                chunks,
                space_places: Vec::new(),
                clean: false,
            },
            array: Arc::clone(array),
            options: StoreOptions {
                background: false,
                ..options
            },
        };
        let store = Store::<C>::assemble(parts)?;
        store.make_checkpoint(true)?;
        Ok(())
    }

    /// Opens a store: recovers it if it was not closed cleanly, and starts its threads.
    pub fn open(
        array: Arc<Array>,
        options: StoreOptions,
    ) -> Result<(Arc<Self>, RecoveryReport), Error> {
        let read_only = options.read_only;
        if !read_only {
            array.mark_all_unflushed();
            array.flush()?;
        }
        let mut report = RecoveryReport::default();
        let record = newest_record(&array, &mut report)?;
        report.clean = record.clean.get() == 1;
        let run = read_run(&array, &record)?;
        if let Some(loss) = run.loss {
            return Err(Error::Damaged(loss));
        }
        report.batches = run.end.sequence - run.start.sequence;

        let leaf_limit = options.node_cache_bytes / 4 / BLOCK_SIZE;
        let table = Table::open(Arc::clone(&array), &record, leaf_limit)?;
        let space = read_space(&array, record.space_root)?;
        let mut states = space.chunks.clone();
        for chunk in space.live.keys() {
            states[*chunk as usize] = ChunkState::Meta;
        }
        let resume = Resume {
            anchor: run.end,
            epoch: run.next_epoch,
            mount_id: record.mount_id.get() + 1,
            checkpoint_sequence: record.sequence.get(),
        };
        let parts = Parts {
            free_nids: table.free_counts(record.regions.get()),
            chunks: states,
            live: space.live,
            resume,
            checkpoint_state: CheckpointState {
                sequence: record.sequence.get(),
                chunks: space.chunks,
                space_places: space.places,
                clean: false,
            },
            table,
            array,
            options,
        };
        let mut store = Store::<C>::assemble(parts)?;
        store.adapt_limits();
        let damaged = store.replay(&record, &run, &mut report)?;
        if let Some((nid, damage)) = damaged.iter().next()
            && !read_only
        {
            return Err(Error::node(Nid(*nid), damage.clone()));
        }
        store.unreplayed = damaged;
        if !read_only && !planted(Canary::NoClosingCheckpoint) {
            store.make_checkpoint(false)?;
        }
        let store = Arc::new(store);
        if !read_only && store.options.background {
            store.start_threads()?;
        }
        Ok((store, report))
    }
}

/// The valid record with the highest sequence among two slots of two copies.
pub(crate) fn newest_record(
    array: &Array,
    report: &mut RecoveryReport,
) -> Result<CheckpointRecord, Error> {
    let mut newest: Option<CheckpointRecord> = None;
    let mut unreadable = None;
    for (slot, copy) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let parsed = match array.read_slot(slot, copy) {
            Ok(block) if block.iter().all(|b| *b == 0) => continue,
            Ok(block) => CheckpointRecord::parse(&block, &array.uuid()).map_err(|d| d.to_string()),
            Err(error) => {
                let why = error.to_string();
                unreadable = Some(error);
                Err(why)
            }
        };
        match parsed {
            Ok(record) if newest.is_none_or(|n| n.sequence.get() < record.sequence.get()) => {
                newest = Some(record);
            }
            Ok(_) => {}
            Err(why) => report.damaged_copies.push((slot, copy, why)),
        }
    }
    newest.ok_or_else(|| match unreadable {
        Some(error) => error.into(),
        None => damaged("checkpoint", "no slot holds a valid record"),
    })
}

/// The unbroken run of batches from a record's anchor. The batches themselves may be more than
/// memory has room for, and are read again one by one.
pub(crate) struct Run {
    pub start: Anchor,
    pub end: Anchor,
    pub next_epoch: u64,
    /// Something behind its end is lost, and what says so (R9).
    pub loss: Option<Damage>,
}

impl Run {
    /// Reads the run again, batch by batch.
    pub fn for_each(
        &self,
        array: &Array,
        record: &CheckpointRecord,
        mut each: impl FnMut(Batch) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut ring = Ring::new(array);
        let mut next = self.start;
        while next.sequence < self.end.sequence {
            let read = read_batch(&mut ring, array, record, next)?;
            let (batch, after) = read.ok_or_else(|| {
                let what = format!("batch {} reads differently the second time", next.sequence);
                damaged("journal", what)
            })?;
            each(batch)?;
            next = after;
        }
        Ok(())
    }
}

/// Reads the ring in large pieces.
pub(crate) struct Ring<'a> {
    array: &'a Array,
    base: u64,
    pub size: u64,
    window: AlignedBuf,
    window_start: Option<u64>,
}

const WINDOW: u64 = 1 << 20;
/// How far behind the run's end batches that prove a loss are looked for: more than the
/// pipeline of commits can have had under way.
const LOOK_AHEAD: u64 = 16 << 20;

impl<'a> Ring<'a> {
    pub fn new(array: &'a Array) -> Self {
        let geometry = array.geometry();
        Ring {
            array,
            base: geometry.journal_start.byte(),
            size: geometry.journal_bytes(),
            window: AlignedBuf::zeroed(WINDOW as usize),
            window_start: None,
        }
    }

    /// Copies `out.len()` bytes at a ring position.
    pub fn read(&mut self, mut position: u64, mut out: &mut [u8]) -> Result<(), Error> {
        while !out.is_empty() {
            let window = self.peek(position)?;
            let take = out.len().min(window.len());
            let (now, later) = out.split_at_mut(take);
            now.copy_from_slice(&window[..take]);
            out = later;
            position += take as u64;
        }
        Ok(())
    }

    /// What is in memory from a ring position on: at least a byte, and all up to a multiple of
    /// [`WINDOW`].
    fn peek(&mut self, position: u64) -> Result<&[u8], Error> {
        const { assert!(format::geometry::MIN_JOURNAL_BYTES.is_multiple_of(WINDOW)) };
        let at = position % self.size;
        let start = at / WINDOW * WINDOW;
        let len = WINDOW.min(self.size - start) as usize;
        if self.window_start != Some(start) {
            self.window_start = None;
            self.array
                .read(self.base + start, &mut self.window[..len])?;
            self.window_start = Some(start);
        }
        Ok(&self.window[(at - start) as usize..len])
    }
}

/// Reads batches from the anchor while each is the exact successor of the one before, and
/// checks the end against everything that says how far the journal must reach (R9).
pub(crate) fn read_run(array: &Array, record: &CheckpointRecord) -> Result<Run, Error> {
    let mut ring = Ring::new(array);
    let start = Anchor {
        position: record.anchor_position.get(),
        sequence: record.anchor_sequence.get(),
        previous_crc: record.anchor_checksum.get(),
    };
    let align = array.geometry().journal_align as u64;
    if !start.position.is_multiple_of(align) {
        return Err(damaged(
            "checkpoint record",
            "the journal anchor is not aligned",
        ));
    }
    let mut next = start;
    let mut last_epoch = record.epoch.get();
    let mut loss: Option<Damage> = None;
    while let Some((batch, after)) = read_batch(&mut ring, array, record, next)? {
        let old = batch.header.epoch.get() <= last_epoch && !planted(Canary::StaleBatchAccepted);
        if after.position - start.position > ring.size || old {
            break;
        }
        if batch.header.checkpoint_sequence.get() > record.sequence.get() {
            loss.get_or_insert_with(|| lost_record(record, &batch.header));
        }
        next = after;
        last_epoch = batch.header.epoch.get();
    }
    let image_epoch = record.image_epoch.get();
    if next.sequence < record.image_sequence.get() {
        let what = format!(
            "the journal ends before batch {}, but images depend on all before batch {}",
            next.sequence, record.image_sequence
        );
        loss.get_or_insert_with(|| Damage::new("journal", what));
    }
    if loss.is_none() && !planted(Canary::SilentTruncation) {
        loss = check_end(&mut ring, array, record, next)?;
    }
    Ok(Run {
        start,
        end: next,
        next_epoch: last_epoch.max(image_epoch) + 1,
        loss,
    })
}

/// The batch at `at` if it is the one that must follow, and where the next one is.
fn read_batch(
    ring: &mut Ring<'_>,
    array: &Array,
    record: &CheckpointRecord,
    at: Anchor,
) -> Result<Option<(Batch, Anchor)>, Error> {
    let mut raw = [0; BatchHeader::SIZE];
    ring.read(at.position, &mut raw)?;
    let header = BatchHeader::read_from_bytes(&raw).expect("sizes match");
    let len = header.len.get() as u64;
    let stale = header.mount_id != record.mount_id || header.previous_crc.get() != at.previous_crc;
    if header.magic.get() != BATCH_MAGIC
        || header.uuid != array.uuid()
        || !header.is_countable()
        || (stale && !planted(Canary::StaleBatchAccepted))
        || header.sequence.get() != at.sequence
        || BatchHeader::SIZE as u64 + len > ring.size
    {
        return Ok(None);
    }
    // The length is only as good as the checksum: memory is taken for what passed it.
    if len > WINDOW && !whole(ring, at.position, &raw, &header)? {
        return Ok(None);
    }
    let mut records = vec![0; len as usize];
    ring.read(at.position + BatchHeader::SIZE as u64, &mut records)?;
    let crc = checksum(checksum(array.journal_seed(), &raw[8..]), &records);
    if crc != header.crc.get() && !planted(Canary::TornBatchAccepted) {
        return Ok(None);
    }
    let align = array.geometry().journal_align as u64;
    let size = BatchHeader::SIZE as u64 + len;
    let after = Anchor {
        position: at.position + size.next_multiple_of(align),
        sequence: at.sequence + 1,
        previous_crc: crc,
    };
    Ok(Some((Batch { header, records }, after)))
}

fn lost_record(record: &CheckpointRecord, batch: &BatchHeader) -> Damage {
    Damage::new(
        "checkpoint",
        format!(
            "record {} is lost: the journal names it, and the newest found is {}",
            batch.checkpoint_sequence, record.sequence
        ),
    )
}

/// A run that ends too early is a loss, not a crash.
fn check_end(
    ring: &mut Ring<'_>,
    array: &Array,
    record: &CheckpointRecord,
    end: Anchor,
) -> Result<Option<Damage>, Error> {
    let align = array.geometry().journal_align as u64;
    let limit = LOOK_AHEAD.min(ring.size - (end.position - record.anchor_position.get()));
    let mut known_durable = 0;
    let mut offset = 0;
    while offset + BatchHeader::SIZE as u64 <= limit {
        let position = end.position + offset;
        offset += align;
        // Both are aligned: no window ends in the middle of the magic.
        if ring.peek(position)?.first_chunk() != Some(&BATCH_MAGIC.to_le_bytes()) {
            continue;
        }
        let mut raw = [0; BatchHeader::SIZE];
        ring.read(position, &mut raw)?;
        let header = BatchHeader::read_from_bytes(&raw).expect("sizes match");
        if header.uuid != array.uuid() {
            continue;
        }
        let later = header.mount_id == record.mount_id && header.sequence.get() > end.sequence;
        // A mount goes on here only after its first checkpoint was durable.
        let newer = header.mount_id.get() > record.mount_id.get();
        // The header's checksum covers the records too; a torn batch proves nothing.
        if (later || newer) && whole(ring, position, &raw, &header)? {
            if header.checkpoint_sequence.get() > record.sequence.get() {
                return Ok(Some(lost_record(record, &header)));
            }
            known_durable = known_durable.max(header.durable_sequence.get());
        }
    }
    if known_durable >= end.sequence {
        let what = format!(
            "the journal ends before batch {}, but batch {known_durable} was durable",
            end.sequence
        );
        return Ok(Some(Damage::new("journal", what)));
    }
    Ok(None)
}

/// Whether a batch's checksum is right.
pub(crate) fn whole(
    ring: &mut Ring<'_>,
    position: u64,
    raw: &[u8],
    header: &BatchHeader,
) -> Result<bool, Error> {
    let len = header.len.get() as u64;
    if BatchHeader::SIZE as u64 + len > ring.size {
        return Ok(false);
    }
    let mut part = vec![0; len.min(64 << 10) as usize];
    let mut crc = checksum(ring.array.journal_seed(), &raw[8..]);
    let mut done = 0;
    while done < len {
        let part = &mut part[..(len - done).min(64 << 10) as usize];
        ring.read(position + BatchHeader::SIZE as u64 + done, part)?;
        crc = checksum(crc, part);
        done += part.len() as u64;
    }
    Ok(crc == header.crc.get())
}

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
//! 2. A delta is applied only if its version is exactly the node's next; older ones are in
//!    the image already.
//! 3. After replay a checkpoint empties the journal before the first user operation (R8), under
//!    a new mount id, so that no batch of the last mount can follow a batch of this one.

use crate::checkpoint::{CheckpointState, read_space};
use crate::content::Content;
use crate::error::Error;
use crate::journal::{Anchor, Journal, Resume};
use crate::nids::Nids;
use crate::node::{Body, new_cell};
use crate::segments::Segments;
use crate::space::{ChunkState, Space};
use crate::space_map::SpaceDelta;
use crate::store::{Parts, Store, StoreOptions, reserve_chunks};
use crate::table::Table;
use base::canary::{Canary, planted};
use base::sync::{Mutex, rank};
use device::{AlignedBuf, Array};
use format::checkpoint::CheckpointRecord;
use format::journal::{Action, BATCH_MAGIC, BatchHeader, parse_records};
use format::table::{KIND_SPACE_MAP, SPACE_MAP_FIRST};
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

/// A logged change of one node.
pub(crate) struct Change {
    pub version: u64,
    pub action: Action,
    pub kind: u8,
    pub body: Vec<u8>,
}

fn damaged(structure: &'static str, what: impl Into<String>) -> Error {
    Error::Damaged(Damage::new(structure, what))
}

impl<C: Content> Store<C> {
    /// Writes the first checkpoint of an empty store. Labels are the caller's, and come last.
    pub fn format(array: &Arc<Array>, options: StoreOptions) -> Result<(), Error> {
        let geometry = array.geometry().clone();
        let chunks = vec![ChunkState::Free; geometry.chunk_count as usize];
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
            nids: Nids::new(options.shards, Vec::new()),
            space: Space::new(
                &geometry,
                options.shards,
                chunks.clone(),
                reserve_chunks(array, &options),
            ),
            journal: Journal::new(Arc::clone(array), options.shards, resume),
            table: Table::new(Arc::clone(array), 64),
            segments: Segments::new(&geometry, BTreeMap::new()),
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
        let end = run.end;
        report.batches = run.batches.len() as u64;

        let geometry = array.geometry().clone();
        let leaf_limit = options.node_cache_bytes / 4 / BLOCK_SIZE;
        let table = Table::open(Arc::clone(&array), &record, leaf_limit)?;
        let space = read_space(&array, record.space_root)?;
        let mut states = space.chunks.clone();
        for chunk in space.live.keys() {
            states[*chunk as usize] = ChunkState::Meta;
        }
        let resume = Resume {
            anchor: end,
            epoch: run.next_epoch,
            mount_id: record.mount_id.get() + 1,
            checkpoint_sequence: record.sequence.get(),
        };
        let parts = Parts {
            nids: Nids::new(options.shards, table.free_counts(record.regions.get())),
            space: Space::new(
                &geometry,
                options.shards,
                states,
                reserve_chunks(&array, &options),
            ),
            journal: Journal::new(Arc::clone(&array), options.shards, resume),
            segments: Segments::new(&geometry, space.live),
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
        let damaged = store.replay(run.batches, &mut report)?;
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

    /// Brings nodes to the state that the journal's run describes; returns those it cannot.
    fn replay(
        &self,
        batches: Vec<Batch>,
        report: &mut RecoveryReport,
    ) -> Result<BTreeMap<u64, Damage>, Error> {
        let mut changes: BTreeMap<u64, Vec<Change>> = BTreeMap::new();
        for batch in &batches {
            let parsed = parse_records(&batch.records, |entries| {
                for entry in entries {
                    report.deltas += 1;
                    changes.entry(entry.nid).or_default().push(Change {
                        version: entry.version,
                        action: entry.action,
                        kind: entry.kind,
                        body: entry.body.to_vec(),
                    });
                }
                Ok(())
            });
            report.records += parsed.map_err(Error::Damaged)? as u64;
        }
        drop(batches);
        report.nodes = changes.len() as u64;
        let work: Mutex<Vec<(u64, Vec<Change>)>> =
            Mutex::new(rank::INODE, changes.into_iter().rev().collect());
        let damaged: Mutex<BTreeMap<u64, Damage>> = Mutex::new(rank::LEAF, BTreeMap::new());
        let workers = self.options.workers.min(report.nodes as usize / 256 + 1);
        let results = self.fan_out(workers, |_| {
            loop {
                let next = work.lock().pop();
                let Some((nid, list)) = next else {
                    return Ok(());
                };
                match self.replay_node(Nid(nid), list) {
                    Err(Error::DamagedNode { damage, .. } | Error::Damaged(damage)) => {
                        damaged.lock().insert(nid, damage);
                    }
                    other => other?,
                }
            }
        });
        results.into_iter().collect::<Result<(), Error>>()?;
        Ok(std::mem::take(&mut *damaged.lock()))
    }

    /// Applies one node's changes in version order (invariant 2).
    fn replay_node(&self, nid: Nid, changes: Vec<Change>) -> Result<(), Error> {
        match self.replayed_node(nid, changes)? {
            Some((version, body)) => self.adopt(nid, version, body),
            None => Ok(()),
        }
    }

    /// A node with its changes applied in version order; `None`: its image has them all.
    pub(crate) fn replayed_node(
        &self,
        nid: Nid,
        mut changes: Vec<Change>,
    ) -> Result<Option<(u64, Body<C>)>, Error> {
        changes.sort_by_key(|change| change.version);
        let entry = self.table.entry(nid)?;
        let mut version = entry.version;
        changes.retain(|change| change.version > version);
        let Some(first) = changes.first() else {
            return Ok(None);
        };
        let mut body: Body<C> = match first.action {
            Action::Create => Body::Gone,
            _ if entry.place.is_none() => Body::Gone,
            _ => {
                let read = crate::items::read_node(&self.array, nid, version, entry.place)?;
                let item = read.map_err(|d| Error::node(nid, d))?;
                let kind = item.header.node_kind;
                Body::decode(kind, item.payload()).map_err(|d| Error::node(nid, d))?
            }
        };
        for change in changes {
            if change.version != version + 1 && !planted(Canary::VersionGapAccepted) {
                return Err(damaged(
                    "journal",
                    format!(
                        "node {nid} goes from version {version} to {}",
                        change.version
                    ),
                ));
            }
            body = apply_change(body, change).map_err(|damage| Error::node(nid, damage))?;
            version += 1;
        }
        Ok(Some((version, body)))
    }

    /// Enters a replayed node into the cache, the nid allocator and the space allocator.
    fn adopt(&self, nid: Nid, version: u64, body: Body<C>) -> Result<(), Error> {
        let in_use = !matches!(body, Body::Gone);
        if nid.0 >= SPACE_MAP_FIRST {
            let chunk = (nid.0 - SPACE_MAP_FIRST) as u32;
            if chunk >= self.array.geometry().chunk_count {
                return Err(damaged("journal", format!("space map of chunk {chunk}")));
            }
            match &body {
                Body::Space(map) => self.space.recovered(chunk, Some(map.words())),
                _ => self.space.recovered(chunk, None),
            }
        } else {
            self.nids.recover(nid, in_use, &self.table)?;
        }
        let cell = new_cell(nid, version, body);
        self.nodes.insert(Arc::clone(&cell));
        self.mark_dirty(0, &cell);
        Ok(())
    }
}

fn apply_change<C: Content>(body: Body<C>, change: Change) -> Result<Body<C>, Damage> {
    let misfit = |what: &str| Damage::new("journal record", what);
    match (change.action, body) {
        (Action::Create, Body::Gone) => {
            if change.body.len() > format::item::PAYLOAD_MAX {
                return Err(misfit("creates a node over the bound"));
            }
            Body::decode(change.kind, &change.body)
        }
        (Action::Create, _) => Err(misfit("creates a node that exists")),
        (_, Body::Gone) => Err(misfit("changes a node that does not exist")),
        (Action::Delete, _) => Ok(Body::Gone),
        (Action::Apply, Body::Space(mut map)) if change.kind == KIND_SPACE_MAP => {
            map.apply(&SpaceDelta::decode(&change.body)?)?;
            Ok(Body::Space(map))
        }
        (Action::Apply, Body::User(mut content)) => {
            content.apply(&C::decode_delta(change.kind, &change.body)?)?;
            Ok(Body::User(content))
        }
        (Action::Apply, Body::Space(_)) => Err(misfit("has the wrong kind for a space map")),
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

/// The unbroken run of batches from a record's anchor.
pub(crate) struct Run {
    pub batches: Vec<Batch>,
    pub end: Anchor,
    pub next_epoch: u64,
    /// Something behind its end is lost, and what says so (R9).
    pub loss: Option<Damage>,
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
        const { assert!(format::geometry::MIN_JOURNAL_BYTES.is_multiple_of(WINDOW)) };
        while !out.is_empty() {
            let at = position % self.size;
            let start = at / WINDOW * WINDOW;
            let len = WINDOW.min(self.size - start) as usize;
            if self.window_start != Some(start) {
                self.window_start = None;
                self.array
                    .read(self.base + start, &mut self.window[..len])?;
                self.window_start = Some(start);
            }
            let within = (at - start) as usize;
            let take = out.len().min(len - within);
            let (now, later) = out.split_at_mut(take);
            now.copy_from_slice(&self.window[within..within + take]);
            out = later;
            position += take as u64;
        }
        Ok(())
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
    let mut batches: Vec<Batch> = Vec::new();
    let mut loss: Option<Damage> = None;
    while let Some((batch, crc)) = read_batch(&mut ring, array, record, next)? {
        let size = (BatchHeader::SIZE + batch.records.len()) as u64;
        let position = next.position + size.next_multiple_of(align);
        if position - start.position > ring.size || batch.header.epoch.get() <= last_epoch {
            break;
        }
        if batch.header.checkpoint_sequence.get() > record.sequence.get() {
            loss.get_or_insert_with(|| lost_record(record, &batch.header));
        }
        next = Anchor {
            position,
            sequence: next.sequence + 1,
            previous_crc: crc,
        };
        last_epoch = batch.header.epoch.get();
        batches.push(batch);
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
        batches,
        end: next,
        next_epoch: last_epoch.max(image_epoch) + 1,
        loss,
    })
}

/// The batch at `at` if it is the one that must follow.
fn read_batch(
    ring: &mut Ring<'_>,
    array: &Array,
    record: &CheckpointRecord,
    at: Anchor,
) -> Result<Option<(Batch, u32)>, Error> {
    let mut raw = [0; BatchHeader::SIZE];
    ring.read(at.position, &mut raw)?;
    let header = BatchHeader::read_from_bytes(&raw).expect("sizes match");
    let len = header.len.get() as u64;
    let stale = header.mount_id != record.mount_id || header.previous_crc.get() != at.previous_crc;
    if header.magic.get() != BATCH_MAGIC
        || header.uuid != array.uuid()
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
    let crc = checksum(checksum(0, &raw[8..]), &records);
    if crc != header.crc.get() && !planted(Canary::TornBatchAccepted) {
        return Ok(None);
    }
    Ok(Some((Batch { header, records }, crc)))
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
        let mut raw = [0; BatchHeader::SIZE];
        ring.read(end.position + offset, &mut raw)?;
        let header = BatchHeader::read_from_bytes(&raw).expect("sizes match");
        offset += align;
        if header.magic.get() != BATCH_MAGIC || header.uuid != array.uuid() {
            continue;
        }
        let later = header.mount_id == record.mount_id && header.sequence.get() > end.sequence;
        // A mount goes on here only after its first checkpoint was durable.
        let newer = header.mount_id.get() > record.mount_id.get();
        // The header's checksum covers the records too; a torn batch proves nothing.
        if (later || newer) && whole(ring, end.position + offset - align, &raw, &header)? {
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
    let mut crc = checksum(0, &raw[8..]);
    let mut done = 0;
    while done < len {
        let part = &mut part[..(len - done).min(64 << 10) as usize];
        ring.read(position + BatchHeader::SIZE as u64 + done, part)?;
        crc = checksum(crc, part);
        done += part.len() as u64;
    }
    Ok(crc == header.crc.get())
}

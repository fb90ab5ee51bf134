//! Making an empty store, and opening one after a clean end or a crash.
//!
//! What recovery decides, from the checkpoint slots and the journal:
//!
//! | newest valid record | journal from its anchor | outcome |
//! |---|---|---|
//! | none | any | damaged: nothing to start from |
//! | found, but a device's label is of another mount (`device/ages.rs`) | any | damaged: it is an old copy |
//! | found | a batch names a newer checkpoint | damaged: the newer record was lost (R9) |
//! | found | unbroken run reaches every batch that it must | replay the run |
//! | found | run ends before a batch that an image depends on | damaged (R9) |
//! | found | a device does not return data for which one of the last batches vouches | not opened but read-only: the batch may have been acknowledged, or never been whole |
//! | found | a device does not return what lies where the next batch would be, and the record does not say that the journal was empty | not opened but read-only, with the run up to there |
//! | found | the same, and a batch behind it is to be reached | damaged (R9) |
//! | found | a device does not return something elsewhere behind the end | as if nothing lay there |
//! | found | a batch behind the end names one at or past it as durable | damaged (R9) |
//! | found | a version gap, or a delta that does not apply | damaged; read-only: that node is |
//!
//! *Damaged* is decided before the first write. Two copies of each slot exist; one suffices.
//!
//! Invariants:
//! 1. Devices are flushed before the journal is read, so what is replayed stays (R8).
//! 2. Before anything else is written, but for what invariant 6 says, a batch without records behind the run says that this was durable, if its end rests on
//!    data: what recovery or a user writes may be where a file's data was that the run deletes, and the next
//!    recovery, if this one is cut off, must find the same end.
//! 3. What is replayed (in [`crate::replay`]) is in memory only until the run is done.
//! 4. No page of the node table that a checkpoint without a record has left has the number of one that has a record. A mount numbers its checkpoints one
//!    by one, and ends at the first that fails: so behind the newest record there is at most one without, and the next mount's first leaves
//!    its number out ([`next_sequence`]); and so that of a record that was not returned, which is none any more (invariant 6). Who makes a lost page
//!    anew of what lies in segments takes the newest, and no number twice. (That first one, cut off and made again, has its number twice; it is of the same state each time.)
//! 5. After replay a checkpoint empties the journal before the first user operation (R8), under
//!    a new mount id, so that no batch of the last mount can follow a batch of this one. All labels have the id before.
//! 6. Before anything else is written both copies of its slot hold the newest record, of which one may never have come or be damaged: what the record before it says
//!    is written over from then on, so that this is no longer one to fall back to. Then what a device does not return of the other slot is
//!    written over, by what the other copy of that has, or zeros: it may be a newer record, of which the power went before the other copy, and what that
//!    says is written over from then on, so that it must not come back. Cut off before that, or refused, nothing that any record says has changed, and it may be the newest
//!    one again; cut off within it, it is that or none.

use crate::batches::{Run, read_run};
use crate::checkpoint::{CheckpointState, read_space};
use crate::content::Content;
use crate::error::Error;
use crate::journal::{Anchor, Resume};
use crate::replay::RecoveryPhases;
use crate::salvage::newest_mount;
use crate::space::ChunkState;
use crate::store::{Parts, Store, StoreOptions};
use crate::table::Table;
use base::canary::{Canary, planted};
use device::{AlignedBuf, Array, Durability, Outdated};
use format::checkpoint::CheckpointRecord;
use format::journal::{BATCH_MAGIC, BatchHeader};
use format::{BLOCK_SIZE, Damage, Nid, U32, U64, checksum};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// What opening a store found and did.
#[derive(Clone, Debug, Default)]
pub struct RecoveryReport {
    /// The last mount ended with everything on the devices and an empty journal.
    pub clean: bool,
    pub batches: u64,
    pub records: u64,
    pub deltas: u64,
    pub nodes: u64,
    /// Where the time went.
    pub phases: RecoveryPhases,
    /// From the first look at the devices until the store was usable.
    pub took: Duration,
    /// Checkpoint record copies that were unreadable or damaged, as (slot, copy, why).
    pub damaged_copies: Vec<(usize, usize, String)>,
    pub(crate) slots: Slots,
}

/// What is to be put in order in the slots of checkpoint records.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots {
    /// The newest record's slot, and copies of it that do not hold that.
    newest: usize,
    lacking: Vec<usize>,
    /// Copies, as (slot, copy), that a device does not return.
    hidden: Vec<(usize, usize)>,
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
                user: Default::default(),
                images_first: false,
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
        let began = options.clock.monotonic_ns();
        if !read_only {
            array.mark_all_unflushed();
            array.flush()?;
        }
        let mut report = RecoveryReport::default();
        let record = newest_record(&array, &mut report)?;
        let old = older(&array, &record)?;
        if !old.is_empty() {
            return Err(damaged("label", outdated_text(&array, &old)));
        }
        report.clean = record.clean.get() == 1;
        let clock = options.clock.clone();
        let passed = |since: u64| Duration::from_nanos(clock.monotonic_ns().saturating_sub(since));
        let next = next_sequence(&record, false);
        let mut store = match Self::of_checkpoint(&array, &record, next, options) {
            Ok(store) => store,
            // What is lost says why.
            Err(error) => {
                let loss = read_run(&array, &record)?.loss;
                return Err(loss.map_or(error, Error::Damaged));
            }
        };
        let (mut run, damaged) = store.replay(&record, &mut report)?;
        report.batches = run.end.sequence - run.start.sequence;
        if let Some((nid, damage)) = damaged.iter().next()
            && !read_only
        {
            return Err(Error::node(Nid(*nid), damage.clone()));
        }
        if !read_only {
            let confirmation = match run.unconfirmed {
                true => Some(Confirmation::of(&array, &record, &mut run)?),
                false => None,
            };
            report.slots.settle(&array, &record)?;
            if let Some(batch) = confirmation {
                batch.write(&array)?;
            }
        }
        store.resume(resume(&record, run.goes_on(&array), run.next_epoch));
        store.unreplayed = damaged;
        store.unread = std::mem::take(&mut run.unread);
        store.doubt = run.doubt.take();
        if !read_only && !planted(Canary::NoClosingCheckpoint) {
            let began = store.clock().monotonic_ns();
            let late = planted(Canary::LabelsAfterRecord);
            if !late {
                array.note_mount(store.journal.mount_id)?;
            }
            store.make_checkpoint(false)?;
            if late {
                array.note_mount(store.journal.mount_id)?;
            }
            report.phases.checkpoint = passed(began);
        }
        store.nodes_opened = store.table.node_count();
        let store = Arc::new(store);
        if !read_only && store.options.background {
            store.start_threads()?;
        }
        report.took = passed(began);
        Ok((store, report))
    }

    /// A store as a checkpoint left it, whose next one has the number `next`: the journal is not looked at, and where it goes on is not
    /// known yet.
    fn of_checkpoint(
        array: &Arc<Array>,
        record: &CheckpointRecord,
        next: u64,
        options: StoreOptions,
    ) -> Result<Self, Error> {
        let page_limit = options.page_limit();
        let table = Table::open(Arc::clone(array), record, page_limit)?;
        let space = read_space(array, record.space_root)?;
        let mut states = space.chunks.clone();
        for chunk in space.live.keys() {
            states[*chunk as usize] = ChunkState::Meta;
        }
        let start = Anchor {
            position: record.anchor_position.get(),
            sequence: record.anchor_sequence.get(),
            previous_crc: record.anchor_checksum.get(),
        };
        let parts = Parts {
            free_nids: table.free_counts(record.regions.get()),
            chunks: states,
            live: space.live,
            resume: resume(record, start, record.epoch.get() + 1),
            checkpoint_state: CheckpointState {
                sequence: next - 1,
                chunks: space.chunks,
                space_places: space.places,
                clean: false,
                user: record.user.map(U64::get),
                images_first: false,
            },
            table,
            array: Arc::clone(array),
            options,
        };
        let store = Store::<C>::assemble(parts)?;
        store.adapt_limits();
        Ok(store)
    }
}

/// Devices that are older than the array, which no store opens with. Where the journal cannot be read, all that the record and the labels do not clear.
/// Where there is no record, those that the labels tell whatever it was: of the mount before the newest label at least, and no older than the journal.
pub fn outdated(array: &Array) -> Vec<Outdated> {
    match newest_record(array, &mut RecoveryReport::default()) {
        Ok(record) => {
            older(array, &record).unwrap_or_else(|_| array.outdated(record.mount_id.get()))
        }
        Err(_) => {
            let begun = array.newest_label().saturating_sub(1);
            let told = newest_mount(array).map_or(0, |(newest, _)| newest);
            array.outdated(begun.max(told))
        }
    }
}

/// Devices that are older than the array, as it is by its labels and this record. The newest record can be lost, and the labels say already
/// which mount a repair would be; then the journal knows of the mount between.
pub(crate) fn older(array: &Array, record: &CheckpointRecord) -> Result<Vec<Outdated>, Error> {
    let mount = record.mount_id.get();
    let old = array.outdated(mount);
    if old.is_empty() {
        return Ok(old);
    }
    let (newest, gaps) = newest_mount(array)?;
    let old = array.outdated(mount.max(newest));
    match gaps.first() {
        // The mount between may be in it.
        Some(error) if !old.is_empty() => Err(error.clone().into()),
        _ => Ok(old),
    }
}

/// What such devices are, and the remedy, in words.
pub fn outdated_text(array: &Array, all: &[Outdated]) -> String {
    let names = array.device_names();
    let told = |old: &Outdated| {
        let (name, mount) = (&names[old.device], old.mount);
        format!("{name} holds its state of mount {mount}")
    };
    let told: Vec<String> = all.iter().map(told).collect();
    let newest = all.iter().map(|old| old.newest).max().unwrap_or(0);
    format!(
        "{}, but the array was mounted later, up to mount {newest}: an old copy, or a device that was put back to one. Attach the latest state of each device, and \
         nothing is lost, unless a repair has begun to write since. `sheaf fsck --repair` accepts the old state, and loses what was written there since: \
         once it has begun to write, the latest state is worthless, though it may not end",
        told.join(", and ")
    )
}

/// Where a new mount goes on.
fn resume(record: &CheckpointRecord, anchor: Anchor, epoch: u64) -> Resume {
    Resume {
        anchor,
        epoch,
        mount_id: record.mount_id.get() + 1,
        checkpoint_sequence: record.sequence.get(),
    }
}

impl Slots {
    /// A device does not return a copy.
    pub fn are_hidden(&self) -> bool {
        !self.hidden.is_empty()
    }

    /// Has the newest record, and no other that could come back, in the slots (invariant 6).
    pub fn settle(&self, array: &Array, newest: &CheckpointRecord) -> Result<(), Error> {
        if !self.lacking.is_empty() {
            array.write_slot_copies(self.newest, &self.lacking, newest.as_bytes())?;
        }
        self.silence(array, newest)
    }

    /// Has no record in the other slot that could come back.
    pub fn silence(&self, array: &Array, newest: &CheckpointRecord) -> Result<(), Error> {
        let others = self.hidden.iter().filter(|(slot, _)| *slot != self.newest);
        for (slot, copy) in others {
            // It has an older record than the newest, or none.
            let good = array.read_slot(*slot, 1 - copy).ok().filter(|block| {
                let parsed = CheckpointRecord::parse(block, &array.metadata_uuid());
                parsed.is_ok_and(|record| record.sequence.get() < newest.sequence.get())
            });
            let block = good.unwrap_or_else(|| AlignedBuf::zeroed(BLOCK_SIZE));
            array.write_slot_copies(*slot, &[*copy], &block)?;
        }
        Ok(())
    }
}

/// What the first checkpoint after this record has for a number (invariant 4), in the other slot. `hidden`: a device does not return a copy of a
/// record, and nothing is written over that. It may be a newer one, of which the other copy was never written: once it is returned it must not be taken
/// for this checkpoint's.
pub(crate) fn next_sequence(record: &CheckpointRecord, hidden: bool) -> u64 {
    let without_record = record.clean.get() != 1;
    let (interrupted, hidden) = (u64::from(without_record), u64::from(hidden));
    record.sequence.get() + 1 + 2 * (interrupted + hidden)
}

/// No more is ever between the number of a record and that of the next one while none is lost.
pub(crate) const SEQUENCE_STEP_MAX: u64 = 5;

/// A batch without records that says of those before it that they were durable (invariant 2).
#[derive(Debug)]
pub(crate) struct Confirmation {
    byte: u64,
    batch: AlignedBuf,
}

impl Confirmation {
    /// The next batch of the run, which goes on behind it. There is room: the ring keeps some that no operation gets
    /// (`journal.rs`, `UNPAID`).
    pub fn of(
        array: &Array,
        record: &CheckpointRecord,
        run: &mut Run,
    ) -> Result<Confirmation, Error> {
        let at = run.end;
        let mut header = BatchHeader::zeroed();
        header.magic = U32::new(BATCH_MAGIC);
        header.previous_crc = U32::new(at.previous_crc);
        header.uuid = array.metadata_uuid();
        header.mount_id = record.mount_id;
        header.sequence = U64::new(at.sequence);
        header.epoch = U64::new(run.next_epoch);
        header.durable_epoch = U64::new(run.next_epoch - 1);
        header.durable_sequence = U64::new(at.sequence - 1);
        header.checkpoint_sequence = record.sequence;
        let crc = checksum(array.checksum_seed(), &header.as_bytes()[8..]);
        header.crc = U32::new(crc);
        let geometry = array.geometry();
        let size = (BatchHeader::SIZE as u64).next_multiple_of(geometry.journal_align as u64);
        let ring = geometry.journal_bytes();
        if at.position + size - run.start.position > ring {
            return Err(damaged("journal", "there is no room behind its last batch"));
        }
        let mut batch = AlignedBuf::zeroed(size as usize);
        batch[..BatchHeader::SIZE].copy_from_slice(header.as_bytes());
        run.end = Anchor {
            position: at.position + size,
            sequence: at.sequence + 1,
            previous_crc: crc,
        };
        run.next_epoch += 1;
        let byte = geometry.journal_start.byte() + at.position % ring;
        Ok(Confirmation { byte, batch })
    }

    pub fn write(&self, array: &Array) -> Result<(), Error> {
        array.write(self.byte, &self.batch, Durability::Durable)?;
        Ok(())
    }
}

/// The valid record with the highest sequence among two slots of two copies.
pub(crate) fn newest_record(
    array: &Array,
    report: &mut RecoveryReport,
) -> Result<CheckpointRecord, Error> {
    let mut records: Vec<(usize, usize, CheckpointRecord)> = Vec::new();
    let mut unreadable = None;
    for (slot, copy) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        if copy == 1 && planted(Canary::SecondCopyIgnored) {
            continue;
        }
        let parsed = match array.read_slot(slot, copy) {
            Ok(block) if block.iter().all(|b| *b == 0) => continue,
            Ok(block) => {
                CheckpointRecord::parse(&block, &array.metadata_uuid()).map_err(|d| d.to_string())
            }
            Err(error) => {
                let why = error.to_string();
                report.slots.hidden.push((slot, copy));
                unreadable = Some(error);
                Err(why)
            }
        };
        match parsed {
            Ok(record) => records.push((slot, copy, record)),
            Err(why) => report.damaged_copies.push((slot, copy, why)),
        }
    }
    // Of two with one number the first.
    let newest = records.iter().rev().max_by_key(|(.., r)| r.sequence.get());
    let Some(&(slot, _, newest)) = newest else {
        return Err(match unreadable {
            Some(error) => error.into(),
            None => damaged("checkpoint", "no slot holds a valid record"),
        });
    };
    let holds = |copy: &usize| {
        let its = records.iter().find(|(s, c, _)| (s, c) == (&slot, copy));
        its.is_some_and(|(.., record)| record.as_bytes() == newest.as_bytes())
    };
    report.slots.newest = slot;
    report.slots.lacking = (0..2).filter(|copy| !holds(copy)).collect();
    Ok(newest)
}

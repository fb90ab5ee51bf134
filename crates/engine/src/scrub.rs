//! Scrubbing: everything that the last checkpoint reaches is read from the devices and verified,
//! in small steps, while the store is in use.
//!
//! Invariants:
//! 1. Nothing is believed of the caches but what the table and the checkpoint name; every page
//!    and image is read from its device.
//! 2. What is read without a lock may move meanwhile, and its place be written anew. So a
//!    mismatch proves nothing: it is looked at again under the checkpoint's lock, where nothing
//!    moves and all that is named is written, and only what is wrong there is a finding (R11).
//! 3. A step is bounded by one leaf of the node table beyond the bytes asked for, and holds the
//!    checkpoint's lock only for what did not match. Position 0 is the exception: labels, slots,
//!    space tables and map pages, all small, are read under it.
//!
//! A position is 0 for the roots, else 1 + the number of a leaf of the node table. It means the
//! same in every mount of the file system: nids never move. What is created behind the position
//! while a scrub runs is left to the next.

use crate::content::Content;
use crate::error::Error;
use crate::finding::{Findings, Object, Severity};
use crate::items::{node_in, read_node, read_page};
use crate::node::Body;
use crate::store::Store;
use crate::table::Entry;
use crate::verify::check_slots;
use device::{AlignedBuf, LabelRepair};
use format::checkpoint::CheckpointRecord;
use format::item::{ITEM_MAX, ItemKind, Place};
use format::table::{LEAF_NIDS, REGION_LEAVES};
use format::{BLOCK_SIZE, Nid};

/// Bytes that one read of neighbouring images takes at most, and how large a gap it bridges.
const RUN_MAX: u64 = 256 << 10;
const GAP_MAX: u64 = 16 << 10;

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubStep {
    /// Where to go on; `None`: all is done.
    pub next: Option<u64>,
    /// Node images verified.
    pub nodes: u64,
    /// Labels, slots, and pages of the node table and the space tables verified.
    pub pages: u64,
    /// Bytes read.
    pub bytes: u64,
}

/// A page that could not be read, and why.
type BadPage = (Object, Error);

/// An image and where it lies.
#[derive(Clone, Copy)]
struct Located {
    nid: Nid,
    entry: Entry,
}

impl<C: Content> Store<C> {
    /// Reads and verifies metadata from `position` on, until about `bytes` are read. What is wrong
    /// goes to `findings`. Any number of operations may run meanwhile.
    ///
    /// # Errors
    /// The failure that latched the store: a checkpoint that failed half-way leaves the table
    /// ahead of the devices.
    pub fn scrub(
        &self,
        position: u64,
        bytes: u64,
        findings: &Findings,
    ) -> Result<ScrubStep, Error> {
        if let Some(error) = self.failed() {
            return Err(error);
        }
        let mut step = ScrubStep::default();
        let Some(first) = position.checked_sub(1) else {
            self.scrub_roots(&mut step, findings);
            step.next = Some(1);
            return Ok(step);
        };
        let mut leaf = first;
        while let Some(next) = self.next_leaf(leaf) {
            leaf = self.scrub_leaf(next, &mut step, findings);
            if step.bytes >= bytes {
                step.next = Some(1 + leaf);
                break;
            }
        }
        Ok(step)
    }

    /// The first leaf from `leaf` on in a region that the last checkpoint knows.
    fn next_leaf(&self, leaf: u64) -> Option<u64> {
        let mut regions = self.table.region_pointers().into_iter();
        let (region, _) = regions.find(|(region, _)| (region + 1) * REGION_LEAVES > leaf)?;
        Some(leaf.max(region * REGION_LEAVES))
    }

    fn scrub_roots(&self, step: &mut ScrubStep, findings: &Findings) {
        let _none_is_written = self.checkpoint_state.lock();
        // The state has the number before that of this mount's next one, which no record may have.
        let written = self.newest_checkpoint();
        let devices = self.check_labels(findings);
        check_slots(&self.array, findings);
        step.pages += 2 * devices as u64 + 4;
        let copies = [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter();
        let newest = copies.filter_map(|(slot, copy)| {
            let block = self.array.read_slot(slot, copy).ok()?;
            CheckpointRecord::parse(&block, &self.array.metadata_uuid()).ok()
        });
        let record = newest.max_by_key(|record| record.sequence.get());
        match record {
            Some(record) if record.sequence.get() == written => {
                match crate::checkpoint::read_space(&self.array, record.space_root) {
                    Ok(tables) => step.pages += tables.places.len() as u64,
                    Err(error) => findings.error(Object::SpaceTables, text(error)),
                }
            }
            Some(record) => {
                let found = record.sequence.get();
                let what = format!(
                    "the newest readable record is that of checkpoint {found}, not {written}"
                );
                findings.error(Object::Store, what);
            }
            // The slots' own findings say it.
            None => {}
        }
        for (index, pointer) in self.table.map_pointers() {
            let crc = pointer.stamp.get() as u32;
            let (place, kind) = (pointer.place(), ItemKind::TableMap);
            let read = read_page(&self.array, place, kind, index, crc);
            if let Err(error) = read.and_then(|page| page.map_err(Error::Damaged)) {
                findings.error(Object::Table, format!("map page {index}: {}", text(error)));
            }
            step.pages += 1;
        }
        step.bytes = step.pages * BLOCK_SIZE as u64;
    }

    /// Reads both copies of all labels from the devices. Returns the number of devices.
    fn check_labels(&self, findings: &Findings) -> usize {
        let devices = self.array.devices().count();
        for device in 0..devices {
            match self.array.check_label(device) {
                Ok(None) => {}
                Ok(Some(LabelRepair { copy, damage, .. })) => {
                    let what = format!("{damage}; the other copy serves");
                    findings.add(Object::Label { device, copy }, Severity::Notice, what);
                }
                Err(error) => findings.error(Object::Label { device, copy: 0 }, error.to_string()),
            }
        }
        devices
    }

    /// Verifies one leaf page and the images it names, and with the first leaf of a region the
    /// region's page. Returns the leaf to go on with.
    fn scrub_leaf(&self, leaf: u64, step: &mut ScrubStep, findings: &Findings) -> u64 {
        let entries = self.stored_leaf(leaf).or_else(|_| {
            let _nothing_moves = self.checkpoint_state.lock();
            self.stored_leaf(leaf)
        });
        let region_page = u64::from(leaf.is_multiple_of(REGION_LEAVES));
        step.pages += region_page;
        step.bytes += region_page * BLOCK_SIZE as u64;
        match entries {
            Ok(None) => {}
            Ok(Some(entries)) => {
                step.pages += 1;
                step.bytes += 2 * BLOCK_SIZE as u64;
                self.scrub_images(located(leaf, &entries), step, findings);
            }
            Err((Object::RegionPage(region), error)) => {
                findings.error(Object::RegionPage(region), text(error));
                return (region + 1) * REGION_LEAVES;
            }
            Err((object, error)) => findings.error(object, text(error)),
        }
        leaf + 1
    }

    /// The entries of a leaf page, all of its way read from the devices. `None`: there is none.
    fn stored_leaf(&self, leaf: u64) -> Result<Option<Vec<Entry>>, BadPage> {
        let (region, index) = (leaf / REGION_LEAVES, (leaf % REGION_LEAVES) as usize);
        let bad = |object: Object| move |error| (object, error);
        let mut pointers = self.table.region_pointers().into_iter();
        let Some((_, pointer)) = pointers.find(|(number, _)| *number == region) else {
            return Ok(None);
        };
        let page = self.table.stored_region(region, pointer);
        let page = page.map_err(bad(Object::RegionPage(region)))?;
        let pointer = page.pointers[index];
        if pointer.place().is_none() {
            return Ok(None);
        }
        let entries = self.table.leaf_entries(region, index, pointer);
        entries.map(Some).map_err(bad(Object::LeafPage(leaf)))
    }

    /// Verifies images, neighbours together.
    fn scrub_images(&self, mut images: Vec<Located>, step: &mut ScrubStep, findings: &Findings) {
        images.sort_unstable_by_key(|at| at.entry.place.byte);
        let mut buf = AlignedBuf::zeroed(RUN_MAX as usize + 2 * ITEM_MAX);
        let mut suspects = Vec::new();
        let mut rest = &images[..];
        while let Some(first) = rest.first() {
            let start = first.entry.place.byte;
            let mut end = start;
            let joins = |at: &&Located| {
                let Place { byte, len } = at.entry.place;
                let joined = byte <= end + GAP_MAX && byte < start + RUN_MAX;
                end = end.max(byte.saturating_add(u64::from(len)));
                joined
            };
            let count = rest.iter().take_while(joins).count().max(1);
            let (run, later) = rest.split_at(count);
            self.scrub_run(run, &mut buf, step, &mut suspects);
            rest = later;
        }
        step.nodes += images.len() as u64;
        if !suspects.is_empty() {
            self.look_again(&suspects, findings);
        }
    }

    fn scrub_run(
        &self,
        run: &[Located],
        buf: &mut AlignedBuf,
        step: &mut ScrubStep,
        suspects: &mut Vec<Located>,
    ) {
        let block = BLOCK_SIZE as u64;
        let start = run[0].entry.place.byte / block * block;
        let ends = run.iter().map(|at| {
            at.entry
                .place
                .byte
                .saturating_add(at.entry.place.len.into())
        });
        let end = ends.max().unwrap_or(start);
        let limit = self.array.geometry().total_blocks() * block;
        let fits = |at: &Located| at.entry.place.len as usize <= ITEM_MAX;
        if end > limit || !run.iter().all(fits) {
            suspects.extend(run);
            return;
        }
        let bytes = &mut buf[..(end.next_multiple_of(block) - start) as usize];
        step.bytes += bytes.len() as u64;
        if self.array.read(start, bytes).is_err() {
            suspects.extend(run);
            return;
        }
        for at in run {
            let from = (at.entry.place.byte - start) as usize;
            let item = &bytes[from..from + at.entry.place.len as usize];
            let image = node_in(self.array.checksum_seed(), item, at.nid, at.entry.version)
                .and_then(|(kind, payload)| Body::<C>::decode(kind, payload));
            if image.is_err() {
                suspects.push(*at);
            }
        }
    }

    /// Verifies images that did not match once more, where nothing moves (invariant 2).
    fn look_again(&self, suspects: &[Located], findings: &Findings) {
        let _nothing_moves = self.checkpoint_state.lock();
        for at in suspects {
            let entry = match self.table.entry(at.nid) {
                // Deleted meanwhile.
                Ok(entry) if entry.place.is_none() => continue,
                Ok(entry) => entry,
                Err(error) => {
                    findings.error(Object::LeafPage(at.nid.0 / LEAF_NIDS), text(error));
                    continue;
                }
            };
            let image = read_node(&self.array, at.nid, entry.version, entry.place);
            let image = image.and_then(|item| item.map_err(Error::Damaged));
            let decoded = image.and_then(|item| {
                let body = Body::<C>::decode(item.header.node_kind, item.payload());
                body.map(drop).map_err(Error::Damaged)
            });
            if let Err(error) = decoded {
                findings.error(Object::Node(at.nid), text(error));
            }
        }
    }
}

/// The images that a leaf's entries name.
fn located(leaf: u64, entries: &[Entry]) -> Vec<Located> {
    let all = (leaf * LEAF_NIDS..).map(Nid).zip(entries);
    all.filter(|(_, entry)| !entry.place.is_none())
        .map(|(nid, entry)| Located { nid, entry: *entry })
        .collect()
}

fn text(error: Error) -> String {
    match error {
        Error::Damaged(damage) => damage.to_string(),
        other => other.to_string(),
    }
}

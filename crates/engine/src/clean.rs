//! Cleaning: segments with little live in them become free.
//!
//! The live items of a segment are marked dirty, and the checkpoint that follows writes them
//! elsewhere; nothing is moved by hand. Moving a node changes its entry in the node table too,
//! so a segment of nodes from many table pages costs far more than its live bytes. What a segment
//! costs is therefore counted before it is chosen, and the whole must fit into what is free now,
//! because the old copies are free only after the commit point.

use crate::content::Content;
use crate::error::Error;
use crate::segments::SegmentId;
use crate::store::Store;
use base::atomic::Ordering;
use device::AlignedBuf;
use format::Nid;
use format::item::{self, ITEM_ALIGN, ItemKind, Place};
use format::table::LEAF_NIDS;

/// Segments looked at per checkpoint.
const LOOKS_MAX: usize = 64;
/// Segments cleaned per checkpoint while free chunks are left; more when checkpoints are large: this part of those
/// that one may write.
const UNHURRIED_MAX: usize = 16;
const UNHURRIED_PART: usize = 8;

/// The part of the array, as one over this, up to which metadata may be spread widely.
const LAVISH_PART: u64 = 4;

/// Rounds of cleaning that an operation waits for.
const ROUNDS_MAX: usize = 16;

/// A live item of a segment.
#[derive(Clone, Copy, Debug)]
struct Live {
    kind: ItemKind,
    id: u64,
    place: Place,
}

impl<C: Content> Store<C> {
    /// Marks the live contents of the emptiest segments dirty when free segments run short.
    /// Returns the number of segments chosen.
    ///
    /// With free chunks left, only segments that are at least half dead are worth it, and as long as metadata takes up
    /// little of the array only those that are three quarters dead: the emptier, the less is written again for each byte
    /// gained. Without free chunks, any that gain something.
    pub(crate) fn clean_segments(&self) -> Result<u64, Error> {
        let segment = self.array.geometry().segment_bytes() as i64;
        let tight = self.space.free_chunks() <= 2 * self.space.reserve_chunks();
        // With no chunks to fall back on, a sweep over the whole table must always fit.
        let wanted = match tight {
            true => (self.clean_room() / segment) as usize,
            false => self.free_segments_wanted(),
        };
        let written = self.segments_for(self.dirty.limit_now());
        let unhurried = UNHURRIED_MAX.max(written / UNHURRIED_PART);
        let free = self.segments.free_segments();
        if free >= wanted {
            return Ok(0);
        }
        let (total, live) = self.segments.usage();
        let lavish = total < self.array.bytes() / LAVISH_PART;
        let (share, most) = match tight {
            true => (95, LOOKS_MAX),
            false if lavish && live * 4 < total => (25, unhurried),
            false if !lavish && live * 2 < total => (50, unhurried),
            false => return Ok(0),
        };
        let slack = (self.options.workers as i64 + 3) * segment;
        let budget = (self.free_meta_bytes() - slack) * 2 / 3;
        let mut gain = (wanted - free) as i64 * segment + self.dirty.to_write();
        let mut cleaned = 0;
        for (id, live) in self.segments.emptiest(share, most) {
            let may = tight || !self.dirty.is_memory_short();
            if gain <= 0 || self.dirty.to_write() >= budget || !may {
                break;
            }
            let (bytes, items) = self.live_items(id)?;
            if self.dirty.to_write() + self.moving_cost(&items) > budget {
                continue;
            }
            let start = self.segments.first_block(id).byte();
            for item in &items {
                let at = (item.place.byte - start) as usize;
                self.move_item(item, &bytes[at..at + item.place.len as usize])?;
            }
            gain -= segment - live as i64;
            cleaned += 1;
        }
        Ok(cleaned)
    }

    /// Room that cleaning aims at.
    pub(crate) fn clean_room(&self) -> i64 {
        let segment = self.array.geometry().segment_bytes() as i64;
        self.free_segments_wanted() as i64 * segment + self.table_bytes()
    }

    /// Checkpoints that clean and change nothing else, until there is enough room for the
    /// others again or nothing to gain. Cleaning in little room gains little, so this begins
    /// well before the room is used up.
    pub(crate) fn clean_up(&self) -> Result<(), Error> {
        let enough = self.clean_room() * 3 / 4;
        let mut before = self.free_meta_bytes();
        let stalled = self.stalled_room.load(Ordering::Relaxed);
        if stalled > 0 && before > stalled * 7 / 8 {
            return Ok(());
        }
        let mut idle = 0;
        for _ in 0..ROUNDS_MAX {
            self.make_room(self.journal.checkpoint_sequence.load(Ordering::SeqCst))?;
            let now = self.free_meta_bytes();
            if now >= enough {
                self.stalled_room.store(0, Ordering::Relaxed);
                return Ok(());
            }
            idle = if now <= before { idle + 1 } else { 0 };
            if idle == 3 {
                break;
            }
            before = now;
        }
        let room = self.free_meta_bytes().max(1);
        self.stalled_room.store(room, Ordering::Relaxed);
        Ok(())
    }

    /// A segment's bytes, and what is live in it.
    fn live_items(&self, segment: SegmentId) -> Result<(AlignedBuf, Vec<Live>), Error> {
        let start = self.segments.first_block(segment).byte();
        let mut bytes = AlignedBuf::zeroed(self.array.geometry().segment_bytes());
        self.array.read(start, &mut bytes)?;
        let mut items = Vec::new();
        let mut at = 0;
        while let Some(next) = item::next(&bytes, at) {
            at = next;
            // Dead items may be of any age, and the gap to the next block is zeros: whatever
            // does not decode is skipped, because a live item always does (or is reported
            // when it is read).
            let Ok((header, payload)) = item::decode(&bytes[at..]) else {
                at += ITEM_ALIGN;
                continue;
            };
            let len = item::padded_len(payload.len());
            let place = Place {
                byte: start + at as u64,
                len: len as u32,
            };
            if let Some(kind) = ItemKind::from_byte(header.kind) {
                let item = Live {
                    kind,
                    id: header.id.get(),
                    place,
                };
                if self.is_live(&item)? {
                    items.push(item);
                }
            }
            at += len;
        }
        Ok((bytes, items))
    }

    fn is_live(&self, item: &Live) -> Result<bool, Error> {
        match item.kind {
            ItemKind::Node => Ok(self.table.entry(Nid(item.id))?.place == item.place),
            kind => self.table.names_page(kind, item.id, item.place),
        }
    }

    /// Bytes that the checkpoint will write more when these items move.
    fn moving_cost(&self, items: &[Live]) -> i64 {
        let bytes: i64 = items.iter().map(|i| i.place.len as i64).sum();
        let mut leaves: Vec<u64> = items
            .iter()
            .filter(|i| i.kind == ItemKind::Node)
            .map(|i| i.id / LEAF_NIDS)
            .collect();
        leaves.dedup();
        bytes + self.dirty.leaves.cost_of(&leaves)
    }

    /// Marks a live item dirty; `image` is what was read of it.
    fn move_item(&self, item: &Live, image: &[u8]) -> Result<(), Error> {
        if item.kind != ItemKind::Node {
            self.table.touch_page(item.kind, item.id, item.place)?;
            if item.kind == ItemKind::TableLeaf {
                self.dirty
                    .leaves
                    .touch(self.shard(), Nid(item.id * LEAF_NIDS));
            }
            return Ok(());
        }
        self.take_in(Nid(item.id), item.place, image)?;
        // A damaged node stays where it is; it is reported to whoever reads it.
        match self.load(Nid(item.id)) {
            Ok(node) => self.mark_dirty(self.shard(), node.0.all()),
            Err(Error::Gone(_) | Error::DamagedNode { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

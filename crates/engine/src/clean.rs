//! Cleaning: segments with little live in them become free.
//!
//! The live items of a segment are marked dirty, and the checkpoint that follows writes them
//! elsewhere; nothing is moved by hand. Moving a node changes its entry in the node table too,
//! so a segment of nodes from many table pages costs far more than its live bytes. What a segment
//! costs is therefore counted before it is chosen, and the whole must fit into what is free now,
//! because the old copies are free only after the commit point.
//!
//! With enough segments free, chunks of metadata are emptied the same way: they go back to data when nothing in them is
//! live, and after many deletions a little is live in each.
//!
//! Invariants:
//! 1. Damage in a segment, or in a table page that its items are looked up in, concerns whoever needs what is damaged,
//!    and nobody else: cleaning only wants room. A segment whose live bytes are not all found and readable cannot
//!    become free, so it is set aside: looked at no more until the next mount, or until nothing in it is live; where a device
//!    did not return what it holds, for some time only: a second, and twice as long each time that it goes on, up to a minute.
//! 2. All looks at a segment come before its first item is marked, but for those at pages of the node table.
//! 3. Emptying leaves as many segments free as cleaning wants, and as much room as metadata keeps from data: what goes
//!    back to data does not have to come back at once.
//! 4. As long as segments are set aside, unless that is for damage in a few, operations leave a quarter of the room alone that cleaning aims at
//!    ([`Store::leave_last_room`]): each checkpoint takes room, and with none left there would be no other, not even that of a
//!    mount, once everything can be read again.

use crate::content::Content;
use crate::error::Error;
use crate::node::Node;
use crate::segments::{Aside, SegmentId};
use crate::store::Store;
use base::atomic::Ordering;
use device::AlignedBuf;
use format::item::{self, ITEM_ALIGN, ItemKind, Place};
use format::table::LEAF_NIDS;
use format::{Damage, Nid};
use std::collections::BTreeSet;

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

/// Checkpoints after which what is emptied may have gained nothing yet: one chooses a chunk and takes what was free in it, it or
/// the next ones empty that, and the one after them gives it up.
const IDLE_MAX: usize = 4;

/// Segments that a checkpoint finds unreadable before it takes it that the device returns nothing at the moment.
const UNREAD_MAX: usize = 4;
/// How long they are set aside at first, and at most.
const UNREAD_FIRST_NS: u64 = 1_000_000_000;
const UNREAD_MOST_NS: u64 = 64 * UNREAD_FIRST_NS;

/// Segments that devices did not return.
#[derive(Debug, Default)]
pub(crate) struct HeldUp {
    /// Why one was not; `None`: none is set aside for that.
    why: Option<Error>,
    /// When they are looked at again.
    until_ns: u64,
    /// How long they were set aside the last time.
    wait_ns: u64,
}

/// What is live in a segment, but for space tables and what is damaged.
struct Contents {
    bytes: AlignedBuf,
    items: Vec<Live>,
    /// What a device did not return that says more.
    unread: Option<Error>,
}

/// A live item of a segment.
#[derive(Clone, Copy, Debug)]
struct Live {
    kind: ItemKind,
    id: u64,
    place: Place,
}

/// Leaf pages of the node table that cannot be read: nobody can say what of their nodes is live. If all live bytes of
/// a segment are found elsewhere in it, the rest is dead.
#[derive(Default)]
struct Unknown {
    leaves: BTreeSet<u64>,
    unread: Option<Error>,
}

impl Unknown {
    /// Whether an item is live, as `look` finds; no if that cannot be found out.
    fn or(
        &mut self,
        item: &Live,
        look: impl FnOnce() -> Result<bool, Error>,
    ) -> Result<bool, Error> {
        let leaf = item.id / LEAF_NIDS;
        if item.kind == ItemKind::Node && self.leaves.contains(&leaf) {
            return Ok(false);
        }
        match look() {
            Err(error @ (Error::Device(_) | Error::Damaged(_))) => {
                if item.kind == ItemKind::Node {
                    self.leaves.insert(leaf);
                }
                if let Error::Device(_) = error {
                    self.unread = Some(error);
                }
                Ok(false)
            }
            found => found,
        }
    }
}

impl<C: Content> Store<C> {
    /// Marks the live contents of the emptiest segments dirty when free segments run short, and else those of chunks that are
    /// emptied for data.
    /// Returns the number of segments chosen.
    ///
    /// With free chunks left, only segments that are at least half dead are worth it, and as long as metadata takes up
    /// little of the array only those that are three quarters dead: the emptier, the less is written again for each byte
    /// gained. Without free chunks, any that gain something.
    /// `space_places` are where the space tables lie, which each checkpoint writes anew.
    pub(crate) fn clean_segments(&self, space_places: &[Place]) -> Result<u64, Error> {
        self.look_at_unread();
        let segment = self.array.geometry().segment_bytes() as i64;
        let waits = self.data_waits.load(Ordering::Relaxed) > 0;
        let tight = waits || self.meta_chunks_to_take() <= 2 * self.space.reserve_chunks();
        // With no chunks to fall back on, a sweep over the whole table must always fit.
        let wanted = match tight {
            true => (self.clean_room() / segment) as usize,
            false => self.free_segments_wanted(),
        };
        let written = self.segments_for(self.dirty.limit_now());
        let unhurried = UNHURRIED_MAX.max(written / UNHURRIED_PART);
        if self.segments.free_segments() < wanted {
            self.segments.stay();
        }
        let free = self.segments.free_segments();
        let (total, live) = self.segments.usage();
        let lavish = total < self.array.bytes() / LAVISH_PART;
        let (share, most) = match tight {
            true => (95, LOOKS_MAX),
            false if lavish && live * 4 < total => (25, unhurried),
            false if !lavish && live * 2 < total => (50, unhurried),
            false => return Ok(0),
        };
        let missing = |wanted: usize| (wanted as i64 - free as i64) * segment;
        let (mut gain, segments) = match free < wanted {
            true => (missing(wanted), self.segments.emptiest(share, most)),
            false if lavish && !tight => return Ok(0),
            false => {
                let share = if waits { share } else { share.min(50) };
                match self.to_empty(share, most, wanted) {
                    // No chunk can be emptied into what is free beside it.
                    leaving if leaving.is_empty() && waits => {
                        let target = self.free_for_emptying(wanted);
                        (missing(target), self.segments.emptiest(share, most))
                    }
                    leaving => (i64::MAX / 2, leaving),
                }
            }
        };
        // The sum may be somewhat less than none.
        gain += self.dirty.to_write().max(0);
        let slack = (self.packers() as i64 + 3) * segment;
        let budget = (self.free_meta_bytes() - slack) * 2 / 3;
        let (mut cleaned, mut unread) = (0, 0);
        for (id, live) in segments {
            let may = tight || !self.dirty.is_memory_short();
            if gain <= 0 || self.dirty.to_write() >= budget || !may || unread == UNREAD_MAX {
                break;
            }
            let in_segment = |place: &&Place| self.segments.segment_of(place.byte) == Some(id);
            let space = space_places.iter().filter(in_segment);
            let space: u64 = space.map(|place| place.len as u64).sum();
            match self.clean_segment(id, (live as u64).saturating_sub(space), budget) {
                Ok(true) => {
                    gain -= segment - live as i64;
                    cleaned += 1;
                }
                Ok(false) => {}
                // Invariant 1.
                Err(error @ (Error::Device(_) | Error::Damaged(_) | Error::DamagedNode { .. })) => {
                    let start = self.segments.first_block(id).byte();
                    tracing::warn!("the segment at byte {start} is not cleaned: {error}");
                    let why = match error {
                        Error::Device(_) => Aside::Unread,
                        _ => Aside::Damaged,
                    };
                    self.segments.set_aside(id, why);
                    if why == Aside::Unread {
                        unread += 1;
                        self.note_unread(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(cleaned)
    }

    fn note_unread(&self, why: Error) {
        let now = self.clock().monotonic_ns();
        let mut unread = self.held_up.lock();
        if unread.why.replace(why).is_none() {
            // Another time, if the last one has long been over.
            let again = now < unread.until_ns.saturating_add(UNREAD_MOST_NS);
            let doubled = if again { 2 * unread.wait_ns } else { 0 };
            let wait = doubled.clamp(UNREAD_FIRST_NS, UNREAD_MOST_NS);
            unread.wait_ns = wait;
            unread.until_ns = now.saturating_add(wait);
        }
    }

    /// Has those segments looked at again that a device did not return, if it is time.
    fn look_at_unread(&self) {
        {
            let mut unread = self.held_up.lock();
            if unread.why.is_none() || self.clock().monotonic_ns() < unread.until_ns {
                return;
            }
            unread.why = None;
        }
        self.segments.look_again();
        self.stalled_room.store(0, Ordering::Relaxed);
        // What could not be read then was not emptied for that alone.
        self.emptied_in_vain.store(0, Ordering::Relaxed);
    }

    /// Room that is left when cleaning has done what it could is not for operations while it is held up (invariant 4).
    ///
    /// # Errors
    /// What holds it up: the device's error, or [`Error::NoSpace`] if it is damage.
    pub(crate) fn leave_last_room(&self) -> Result<(), Error> {
        let room = self.clean_room();
        let held_up = self.segments.held_up() as i64;
        if held_up == 0 || self.free_meta_bytes() >= room / 4 {
            return Ok(());
        }
        let why = self.held_up.lock().why.clone();
        match why {
            Some(why) => Err(why),
            // Damage here and there takes no more than cleaning gains elsewhere.
            None if held_up < room / 8 => Ok(()),
            None => Err(Error::NoSpace),
        }
    }

    /// At most so many segments of chunks that are being emptied: those which are emptied now join them (invariant 3).
    fn to_empty(&self, share: u32, most: usize, keep: usize) -> Vec<(SegmentId, u32)> {
        let spare = self.spare_beside(self.segments.usage().1);
        loop {
            let mut leaving = self.segments.leaving();
            if leaving.len() >= most || !self.segments.empty_one(share, keep, spare) {
                leaving.truncate(most);
                return leaving;
            }
        }
    }

    /// With so many free segments any chunk can be emptied and `wanted` are left.
    fn free_for_emptying(&self, wanted: usize) -> usize {
        wanted + self.array.geometry().segments_per_chunk() as usize
    }

    /// Chunks that data would get if it waited for them, about: metadata is that much more than what is live in it. What was deleted since the last checkpoint
    /// counts as live until the next one, and so does what is kept beside it; here both are less by the nodes that have gone.
    pub(crate) fn sparse_chunks(&self) -> u64 {
        let geometry = self.array.geometry();
        let (written, now) = (self.table.node_count(), self.nodes_now());
        let left = |bytes: u64| match now < written {
            true => (u128::from(bytes) * u128::from(now) / u128::from(written)) as u64,
            false => bytes,
        };
        let (total, all) = (self.segments.total_bytes(), self.segments.live_about());
        let live = left(all);
        let spare = left(self.spare_beside(all));
        // Segments end with what the next item had no room in.
        let kept = spare.max(self.clean_room() as u64) + live / 8;
        let sparse = total.saturating_sub(live + kept) / geometry.chunk_bytes();
        // The first ones are for the reserve, if metadata has grown into that.
        let missing = self.space.reserve_chunks() - self.space.free_chunks();
        let sparse = sparse.saturating_sub(missing.max(0) as u64);
        let in_vain = self.emptied_in_vain.fetch_min(sparse, Ordering::Relaxed);
        sparse.saturating_sub(in_vain)
    }

    /// Empties chunks of metadata until data has what it waits for (`enough`); false: nothing is gained any more.
    /// The caller holds no node lock.
    pub(crate) fn empty_until(&self, enough: impl Fn() -> bool) -> Result<bool, Error> {
        self.look_at_unread();
        if self.sparse_chunks() == 0 {
            return Ok(false);
        }
        self.data_waits.fetch_add(1, Ordering::SeqCst);
        let outcome = self.empty_by_rounds(enough);
        self.data_waits.fetch_sub(1, Ordering::SeqCst);
        if let Ok(false) = outcome {
            self.emptied_in_vain.store(u64::MAX, Ordering::Relaxed);
        }
        outcome
    }

    fn empty_by_rounds(&self, enough: impl Fn() -> bool) -> Result<bool, Error> {
        let segment = self.array.geometry().segment_bytes() as i64;
        // What has to become less; of two numbers the first counts.
        let left = || {
            let wanted = self.free_for_emptying((self.clean_room() / segment) as usize);
            let missing = wanted.saturating_sub(self.segments.free_segments()) as u64;
            let leaving = self.segments.leaving();
            let leaving: u64 = leaving.iter().map(|(_, live)| *live as u64).sum();
            (
                self.segments.total_bytes(),
                missing * segment as u64 + leaving,
            )
        };
        let (mut least, mut idle) = ((u64::MAX, 0), 0);
        while idle < IDLE_MAX {
            self.make_room(self.newest_checkpoint())?;
            self.give_way()?;
            if enough() {
                return Ok(true);
            }
            let now = left();
            idle = if now < least { 0 } else { idle + 1 };
            least = least.min(now);
        }
        Ok(false)
    }

    /// Marks the contents of a segment dirty, `live` bytes; false if writing them elsewhere takes more than is left
    /// of `budget`.
    fn clean_segment(&self, id: SegmentId, live: u64, budget: i64) -> Result<bool, Error> {
        let Contents {
            bytes,
            items,
            unread,
        } = self.contents(id)?;
        let found: u64 = items.iter().map(|item| item.place.len as u64).sum();
        if found != live {
            let what = format!("{live} bytes in it are live, and {found} are found");
            let damaged = Error::Damaged(Damage::new("segment", what));
            return Err(unread.unwrap_or(damaged));
        }
        if self.dirty.to_write() + self.moving_cost(&items) > budget {
            return Ok(false);
        }
        let start = self.segments.first_block(id).byte();
        let mut nodes = Vec::new();
        for item in items.iter().filter(|item| item.kind == ItemKind::Node) {
            let at = (item.place.byte - start) as usize;
            nodes.extend(self.live_node(item, &bytes[at..at + item.place.len as usize])?);
        }
        // A page that is marked is written again, no more, should the next one not be there.
        for item in items.iter().filter(|item| item.kind != ItemKind::Node) {
            self.move_page(item)?;
        }
        for node in &nodes {
            self.mark_dirty(self.shard(), node.0.all());
        }
        let count = &self.counts.cleaned_bytes;
        count.fetch_add(live, Ordering::Relaxed);
        Ok(true)
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
        self.look_at_unread();
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

    fn contents(&self, segment: SegmentId) -> Result<Contents, Error> {
        let start = self.segments.first_block(segment).byte();
        let mut bytes = AlignedBuf::zeroed(self.array.geometry().segment_bytes());
        self.array.read(start, &mut bytes)?;
        let seed = self.array.checksum_seed();
        let mut items = Vec::new();
        let mut unknown = Unknown::default();
        let mut at = 0;
        while let Some(next) = item::next(&bytes, at) {
            at = next;
            // Dead items may be of any age, and the gap to the next block is zeros: whatever
            // does not decode is skipped, because a live item always does (or is reported
            // when it is read).
            let Ok((header, payload)) = item::decode(seed, &bytes[at..]) else {
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
                if unknown.or(&item, || self.is_live(&item))? {
                    items.push(item);
                }
            }
            at += len;
        }
        Ok(Contents {
            bytes,
            items,
            unread: unknown.unread,
        })
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

    /// Marks a page of the node table that is live dirty.
    fn move_page(&self, item: &Live) -> Result<(), Error> {
        self.table.touch_page(item.kind, item.id, item.place)?;
        if item.kind == ItemKind::TableLeaf {
            let first = Nid(item.id * LEAF_NIDS);
            self.dirty.leaves.touch(first);
        }
        Ok(())
    }

    /// The node of a live item, of which `image` was read; `None`: it was deleted meanwhile.
    fn live_node(&self, item: &Live, image: &[u8]) -> Result<Option<Node<C>>, Error> {
        self.take_in(Nid(item.id), item.place, image)?;
        match self.load(Nid(item.id)) {
            Ok(node) => Ok(Some(node)),
            Err(Error::Gone(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

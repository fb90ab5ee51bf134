//! Many small files written back at once, in groups: one device batch, and one record, for all of a group.
//!
//! The pages of a group are copied next to each other. Files that have no block yet get theirs from one
//! run, in the order of their numbers, as far as there is such a run; so the devices get few large writes
//! where there were many small ones, and the record changes the space map once.
//!
//! Invariants:
//! 1. The locks of several files are held together. They are tried, never waited for, so holding them
//!    cannot close a circle. A file that is busy, large, or not the simple case is left to `flush_file`.
//! 2. From the list of its dirty pages to the end of its record nobody changes a file's size or mapping, and its content
//!    by overwrites alone (`write`), and none past the cache: its write-back turn is held, its range, and its I/O lock, shared.
//! 3. The record is begun after all writes of the group have completed. If one of them failed nothing is
//!    logged of those that share it: `flush_file` then finds out whose bytes cannot be written, and
//!    latches that on these files alone.
//! 4. Nobody waits in a group for a commit: a file with a block for which a batch vouches is left to `flush_file`, which has
//!    another one confirm that and keeps no other file waiting. What a batch vouches for stays as it is while a file's locks are
//!    held: only its own write-back and direct writes make it more.
//! 5. Promised blocks that a file brought along are reserved for it, or are in its promise again.

use super::Files;
use super::extents::PAGE_LIMIT;
use super::file::FileState;
use super::ranges::{Held, Mode};
use super::table::StateUse;
use super::writeback::{FLUSH_FAILED_MEANWHILE, Layout, Writes, size_limit};
use crate::Error;
use crate::content::inode::{INLINE_DATA_MAX, INLINE_EXTENTS_MAX};
use crate::content::{AttrChange, Body, Delta, FileExtent, FsNode, Inode};
use base::counted::Counted;
use base::sync::{MutexGuard, ReadGuard};
use device::AlignedBuf;
use engine::cache::Stamp;
use engine::{Extent, Need, Op, Promise, Reservation, Slot};
use format::BLOCK_SIZE;
use format::journal::RECORD_MAX;
use std::ops::Range;

/// Files in one group.
pub(super) const TOGETHER: usize = 64;
/// Dirty pages of a file that still goes with others.
pub(super) const PAGES_MAX: usize = 64;
/// Pages of a group at most: who syncs one of its files waits for all of them.
const GROUP_PAGES: usize = 256;

/// Bytes of a file in a group's record, and of a run of blocks: more than they take.
const FILE_BYTES: usize = 256 + 32 * INLINE_EXTENTS_MAX;
const RUN_BYTES: usize = 64;
/// Bytes of a file of one extent there, or some more.
const USUAL_BYTES: usize = 64;
const _: () = assert!(TOGETHER * FILE_BYTES + GROUP_PAGES * RUN_BYTES < RECORD_MAX / 2);

/// Room for the copies of one group after the other.
pub(super) struct Room {
    pages: Vec<u64>,
    stamps: Vec<Stamp>,
    /// Empty until it is used.
    data: AlignedBuf,
}

impl Room {
    pub fn new() -> Room {
        Room {
            pages: Vec::new(),
            stamps: Vec::new(),
            data: AlignedBuf::zeroed(0),
        }
    }

    fn truncate(&mut self, pages: usize) {
        self.pages.truncate(pages);
        self.stamps.truncate(pages);
    }
}

/// A file whose dirty pages are copied.
struct Member<'a> {
    /// Its place among the files given.
    index: usize,
    state: &'a Counted<FileState>,
    /// The places of its pages in the room.
    pages: Range<usize>,
    /// To be logged once they are written.
    size: u64,
    target: Target<'a>,
    _turn: MutexGuard<'a, u32>,
    _range: Held<'a>,
    _shared: ReadGuard<'a, ()>,
}

enum Target<'a> {
    /// It had no block: all its pages need some, and these are those reserved so far.
    New(Vec<FileExtent>),
    Mapped(Layout<'a>),
    /// All is in the record.
    Logged,
    /// It is left to `flush_file`.
    None,
}

#[allow(
    clippy::large_enum_variant,
    reason = "it is taken apart at once; locks are smaller without their checks"
)]
enum Joined<'a> {
    Member(Member<'a>),
    /// It has nothing to write, or must be written by itself.
    Alone,
    /// It is for the next group.
    Full,
}

/// Files that are written together. In the order of their numbers, once they are all there.
struct Group<'a> {
    files: &'a Files,
    members: Vec<Member<'a>>,
    /// Blocks of those that had none: with the member, in their order.
    reserved: Vec<(usize, Reservation<'a, FsNode>)>,
    /// Failed flushes of the array before anything was written.
    flush_failures: u64,
}

impl Files {
    /// Writes back the small files among `states`, as far as that works at once. Returns the others: what
    /// failed is latched, or met again by `flush_file`.
    pub(super) fn flush_together<'s, 'f>(
        &'s self,
        states: &'s [StateUse<'f>],
        room: &mut Room,
    ) -> Vec<&'s StateUse<'f>> {
        let mut done = vec![false; states.len()];
        let mut next = 0;
        while next < states.len() {
            let mut group = Group {
                files: self,
                members: Vec::with_capacity(TOGETHER),
                reserved: Vec::new(),
                flush_failures: self.store.array().flush_failures(),
            };
            next = group.gather(states, next, room);
            if !group.members.is_empty() {
                group.flush(room, &mut done);
            }
        }
        let left = states.iter().zip(done).filter(|(_, done)| !done);
        left.map(|(state, _)| state).collect()
    }
}

impl<'a> Group<'a> {
    /// Takes in files from the one at `next` on; returns the first that is for the next group.
    fn gather(&mut self, states: &'a [StateUse<'_>], next: usize, room: &mut Room) -> usize {
        room.truncate(0);
        let mut at = next;
        while at < states.len() && self.members.len() < TOGETHER {
            match self.join(at, &states[at], room) {
                Joined::Member(member) => self.members.push(member),
                Joined::Alone => {}
                Joined::Full => break,
            }
            at += 1;
        }
        self.members.sort_unstable_by_key(|m| m.state.ino());
        at
    }

    /// Locks a file and copies its pages (invariants 1 and 2).
    fn join(&self, index: usize, state: &'a Counted<FileState>, room: &mut Room) -> Joined<'a> {
        let ranges = &self.files.ranges;
        let (Some(turn), Some(range), Some(shared)) = (
            state.flusher.try_lock(),
            ranges.try_hold(state.ino().0, 0..PAGE_LIMIT, Mode::Home),
            state.try_shared(),
        ) else {
            return Joined::Alone;
        };
        let (size, logged_size, simple) = {
            let meta = state.meta.lock();
            let simple = !meta.dead && !meta.replaced && meta.failure.count == 0;
            (meta.size, meta.logged_size, simple)
        };
        if !simple || size <= INLINE_DATA_MAX as u64 {
            return Joined::Alone;
        }
        let from = room.pages.len();
        let cache = &self.files.pages;
        cache.append_dirty(state.key, 0..PAGE_LIMIT, PAGES_MAX + 1, &mut room.pages);
        let pages = from..room.pages.len();
        let (most, all) = (self.files.batch_pages().min(GROUP_PAGES), pages.len());
        let joined = match all {
            0 => Joined::Alone,
            _ if all > PAGES_MAX => Joined::Alone,
            _ if pages.end > most => Joined::Full,
            // A failure here is met again, and latched, by `flush_file`.
            _ => match self.target(state, pages.clone(), most, room) {
                None => Joined::Alone,
                Some(target) => {
                    let size = match &target {
                        // No other page was dirty.
                        Target::Mapped(layout) if layout.covered < all => {
                            size_limit(size, Some(room.pages[pages.start + layout.covered]))
                        }
                        _ => size,
                    };
                    Joined::Member(Member {
                        index,
                        state,
                        pages,
                        size: size.max(logged_size),
                        target,
                        _turn: turn,
                        _range: range,
                        _shared: shared,
                    })
                }
            },
        };
        if !matches!(joined, Joined::Member(_)) {
            room.truncate(from);
        }
        joined
    }

    /// Copies the pages at `places` and says where they go. A file without a block brings its promise along.
    fn target(
        &self,
        state: &'a Counted<FileState>,
        places: Range<usize>,
        most: usize,
        room: &mut Room,
    ) -> Option<Target<'a>> {
        if room.data.is_empty() {
            room.data = AlignedBuf::zeroed(most * BLOCK_SIZE);
        }
        for at in places.clone() {
            let out = &mut room.data[at * BLOCK_SIZE..(at + 1) * BLOCK_SIZE];
            let (stamp, _) = self
                .files
                .pages
                .copy_dirty(state.key, room.pages[at], out)?;
            room.stamps.push(stamp);
        }
        let pages = &room.pages[places.clone()];
        let new = {
            let content = state.node.read().ok()?;
            let inode = content.inode().ok()?;
            if inode.has_inline() && pages.first() != Some(&0) {
                // Its extents would take the place of what is in the inode alone.
                return None;
            }
            has_no_block(inode)
        };
        if !new {
            if self.files.is_vouched_for(state, pages).ok()? {
                // Before anything is reserved: what was given back might not be had again.
                return None;
            }
            let layout = self.files.lay_out(state, &room.pages[places], false).ok()?;
            if self.files.must_confirm(&layout) {
                self.files.unreserve(state, layout);
                return None;
            }
            return Some(Target::Mapped(layout));
        }
        let mut meta = state.meta.lock();
        meta.promised = meta.promised.checked_sub(places.len() as u64)?;
        Some(Target::New(Vec::new()))
    }

    fn flush(mut self, room: &Room, done: &mut [bool]) {
        self.give_blocks(room);
        if self.write(room).is_err() {
            (0..self.members.len()).for_each(|at| self.fall_out(at));
        }
        self.log_new();
        for Member {
            index,
            state,
            pages,
            size,
            target,
            ..
        } in self.members
        {
            let (logged, covered) = match target {
                Target::New(_) | Target::None => continue,
                Target::Logged => (Ok(()), pages.len()),
                Target::Mapped(layout) => {
                    let covered = layout.covered;
                    (self.files.log_stored(state, layout, size), covered)
                }
            };
            match logged {
                Ok(()) => {
                    let written = pages.start..pages.start + covered;
                    let stamps = &room.stamps[written.clone()];
                    self.files
                        .complete_pages(state, &room.pages[written], stamps);
                    // What was written in place has no record, and its times are ahead still.
                    done[index] = covered == pages.len() && !state.meta.lock().is_ahead();
                }
                Err(error) => state.meta.lock().fail(error.to_string()),
            }
            if state.meta.lock().promised > 0 {
                self.files.trim_promise(state);
            }
        }
    }

    /// Reserves blocks for the files that have none, out of what they brought along: one run, if there is
    /// one. A file that does not get enough falls out.
    fn give_blocks(&mut self, room: &Room) {
        let is_new = |m: &&Member<'_>| matches!(m.target, Target::New(_));
        self.reserved.reserve(self.members.len());
        let wanted: usize = self
            .members
            .iter()
            .filter(is_new)
            .map(|m| m.pages.len())
            .sum();
        let mut source = Source {
            files: self.files,
            promise: self.files.store.adopt_promise(wanted as u64),
            run: None,
            dry: false,
        };
        for (at, member) in self.members.iter_mut().enumerate() {
            let Target::New(extents) = &mut member.target else {
                continue;
            };
            extents.reserve_exact(1);
            for run in room.pages[member.pages.clone()].chunk_by(|a, b| a + 1 == *b) {
                let (mut page, end) = (run[0], run[0] + run.len() as u64);
                while page < end
                    && let Some(blocks) = source.take((end - page) as u32)
                {
                    let Extent { block, len } = blocks.extent();
                    extents.push(FileExtent {
                        page,
                        block,
                        len,
                        written: true,
                    });
                    page += len as u64;
                    self.reserved.push((at, blocks));
                }
            }
        }
        // What is left of it goes back to those that fall out.
        source.promise.into_blocks();
        for at in 0..self.members.len() {
            let Member { target, pages, .. } = &self.members[at];
            if let Target::New(extents) = target
                && (blocks_of(extents) < pages.len() || extents.len() > INLINE_EXTENTS_MAX)
            {
                self.fall_out(at);
            }
        }
    }

    /// Leaves a file to `flush_file`: its blocks go back (invariant 5).
    fn fall_out(&mut self, at: usize) {
        let Member {
            state,
            pages,
            target,
            ..
        } = &mut self.members[at];
        match std::mem::replace(target, Target::None) {
            Target::New(extents) => {
                let missing = pages.len() - blocks_of(&extents);
                let mine = self.reserved.extract_if(.., |(member, _)| *member == at);
                self.files.take_back(state, mine.map(|(_, blocks)| blocks));
                state.meta.lock().promised += missing as u64;
            }
            Target::Mapped(layout) => self.files.unreserve(state, layout),
            Target::Logged | Target::None => {}
        }
    }

    /// One device batch.
    fn write(&self, room: &Room) -> Result<(), Error> {
        let mut writes = Writes::new(&room.data);
        for Member { pages, target, .. } in &self.members {
            let at = pages.start * BLOCK_SIZE;
            match target {
                Target::New(extents) => {
                    writes.add(at, extents.iter().map(|e| (e.block, e.len.into())));
                }
                Target::Mapped(layout) => writes.add_segments(at, &layout.segments),
                Target::Logged | Target::None => {}
            }
        }
        self.files.write_out(writes)
    }

    /// One record for all files that had no block (invariant 3).
    fn log_new(&mut self) {
        if !self.members.iter().any(Member::is_new) {
            return;
        }
        let op = match self.files.store.begin(Need::Accepted) {
            Ok(op) => op,
            Err(error) => return self.fail_new(&error.to_string()),
        };
        // The operation has begun: a flush that fails from here on finds it.
        if self.files.flush_failed_since(self.flush_failures) {
            drop(op);
            return self.fail_new(FLUSH_FAILED_MEANWHILE);
        }
        self.log_locked(op);
        for at in 0..self.members.len() {
            if self.members[at].is_new() {
                self.fall_out(at);
            }
        }
    }

    /// Logs those that are still what they were when they joined; all are, but one that turns out to be damaged.
    fn log_locked(&mut self, mut op: Op<'a, FsNode>) {
        let mut slots: Vec<Option<Slot>> = Vec::with_capacity(self.members.len());
        // And the space map.
        op.expect(self.members.len() + 1, self.members.len() * USUAL_BYTES);
        for member in &self.members {
            let slot = match member.is_new() {
                true => op.lock(&member.state.node).ok(),
                false => None,
            };
            let fits = |slot: &Slot| {
                op.peek(*slot).inode().is_ok_and(|inode| {
                    let keeps = !inode.has_inline() || member.covers_first();
                    keeps && has_no_block(inode) && inode.generation == member.state.key.generation
                })
            };
            slots.push(slot.filter(fits));
        }
        for (at, blocks) in std::mem::take(&mut self.reserved) {
            match slots[at] {
                Some(_) => drop(op.take(blocks)),
                None => self.reserved.push((at, blocks)),
            }
        }
        let mut logged = [None; TOGETHER];
        for ((member, logged), slot) in self.members.iter_mut().zip(&mut logged).zip(&slots) {
            let (Some(slot), Target::New(extents)) = (slot, &mut member.target) else {
                continue;
            };
            let extents = std::mem::take(extents);
            let (all, times) = self.files.about_to_log(member.state, Some(member.size));
            *logged = Some(all);
            let blocks = op.peek(*slot).inode().map_or(0, |inode| inode.blocks);
            let attrs = AttrChange {
                size: Some(member.size),
                blocks: Some(blocks + blocks_of(&extents) as u64),
                ..AttrChange::default()
            };
            let tail = tail_of(op.peek(*slot), &extents);
            op.apply(*slot, Delta::Body(Body::Extents(extents)));
            if tail {
                op.apply(*slot, Delta::EndTail);
            }
            op.apply(*slot, Delta::Attrs(times.on(attrs)));
            member.target = Target::Logged;
        }
        op.commit_noting(|epoch| {
            for (member, logged) in self.members.iter().zip(logged) {
                if let Some(logged) = logged {
                    self.files.note_logged(member.state, epoch, logged);
                }
            }
        });
    }

    /// Latches a failure on all files that had no block; `flush_file` tries them again.
    fn fail_new(&mut self, why: &str) {
        for at in 0..self.members.len() {
            if self.members[at].is_new() {
                self.members[at].state.meta.lock().fail(why.to_owned());
                self.fall_out(at);
            }
        }
    }
}

impl Member<'_> {
    fn is_new(&self) -> bool {
        matches!(self.target, Target::New(_))
    }

    /// It is to have a block for its first page.
    fn covers_first(&self) -> bool {
        matches!(&self.target, Target::New(extents) if extents.first().is_some_and(|e| e.page == 0))
    }
}

/// Where the blocks of a group come from.
struct Source<'a> {
    files: &'a Files,
    promise: Promise<'a, FsNode>,
    run: Option<Reservation<'a, FsNode>>,
    /// A reservation has failed.
    dry: bool,
}

impl<'a> Source<'a> {
    /// Up to `most` contiguous blocks; none when a reservation has failed.
    fn take(&mut self, most: u32) -> Option<Reservation<'a, FsNode>> {
        if self.run.as_ref().is_none_or(|run| run.extent().len == 0) {
            // Not more than a group has pages.
            let all = self.promise.blocks() as u32;
            let reserve = || self.files.store.reserve(&mut self.promise, all, None).ok();
            self.run = (!self.dry && all > 0).then(reserve).flatten();
            self.dry = self.run.is_none();
        }
        let run = self.run.as_mut()?;
        let len = run.extent().len.min(most);
        Some(run.split_off(len))
    }
}

/// Nothing is mapped in the inode, and no chain of operations frees what was.
fn has_no_block(inode: &Inode) -> bool {
    let empty = match &inode.body {
        Body::Inline(_) => true,
        Body::Extents(list) => list.is_empty(),
        _ => false,
    };
    empty && inode.seldom.pending_truncate.is_none()
}

/// Whether an inode has a tail, and it is of one of these pages.
fn tail_of(node: &FsNode, extents: &[FileExtent]) -> bool {
    let tail = node.inode().ok().and_then(|inode| inode.tail.as_ref());
    tail.is_some_and(|t| (extents.iter()).any(|e| (e.page..e.end()).contains(&t.page)))
}

fn blocks_of(extents: &[FileExtent]) -> usize {
    extents.iter().map(|e| e.len as usize).sum()
}

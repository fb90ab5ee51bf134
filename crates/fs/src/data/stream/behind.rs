//! What streams have written and the devices do not have yet.
//!
//! Why. A stream that waits for its devices with each request leaves them idle while it has the next one made, and is idle itself while they work.
//! So a request is copied to memory of its own, sent, and over for who wrote it. The copy costs less than the wait: the device's own reading of memory that was
//! just written is cheap.
//!
//! A *piece* is such a request, between its beginning and its end. A file with pieces has a *seat*: queues to the devices, and the pieces in the order in which
//! they were written.
//!
//! ```text
//! write ─► copy ─► I/O lock ─► [end what has landed] ─► lay out, send ─► return
//!                                                       next write, or whoever needs the lock ─► wait ─► record
//! ```
//!
//! Invariants:
//! 1. It is as if who wrote a piece had the file's I/O lock exclusively until the piece has ended. Whoever else gets the lock, shared or exclusive, ends all pieces
//!    first, in the order in which they were written ([`Files::lock_shared`], [`Files::lock_alone`]): so nobody waits for the program that writes, and nobody
//!    sees a file without what was written to it. Only who cleans pages may be beside them: no page of a piece is dirty.
//! 2. A piece goes over blocks that the file has, all written and logged, or into new ones right behind its end. What else a write may need is done by a call
//!    that waits.
//! 3. A piece's record is logged after it has landed, and after those of all before it. Until then a file's size in memory is ahead of its inode, as it is with
//!    dirty pages.
//! 4. A piece that failed goes through the cache, as any write of a stream does, and so do those behind it that make the file longer: no record maps
//!    what lies behind a size that is not home. The room that a piece was accepted for stays promised to it on the way there, though the array is full.
//!    What finds no place there all the same is lost, and that is latched on the file.
//! 5. All pieces together are no more than one part in [`SHARE`] of the cache. A seat without pieces is anybody's; its ring and memory stay.
//! 6. A handle that is closed ends its file's pieces, and so does a tick that finds a seat as the last one left it: what nobody waits for is
//!    not held for long.

use super::super::file::FileState;
use super::super::writeback::{Layout, Parts};
use super::super::{Files, PAGE, Promised, pages_of};
use crate::Error;
use base::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::counted::Counted;
use base::sync::{Mutex, MutexGuard, ReadGuard, rank};
use base::tight;
use device::{AlignedBuf, Array, Durability, Flight, Kind, Landed, Queues, Run};
use engine::Extent;
use format::{BLOCK_SIZE, Block};
use std::collections::VecDeque;
use std::ops::Range;

const SHARE: usize = 32;
const SEATS: usize = 8;
/// Bytes of a seat's pieces at most: what keeps four devices at work while the next request is copied.
const ROOM: usize = 4 << 20;
const PIECES_MAX: usize = 16;
/// Parts that each device has of a seat at a time.
const DEVICE_DEPTH: usize = 64;
/// Who had its pieces ended by somebody else writes so many requests by calls that wait: there is somebody who would wait for each.
const SPARED: u32 = 16;

/// One request on its way.
struct Piece {
    number: u64,
    pages: Range<u64>,
    /// In new blocks, behind the end that the file had.
    grows: bool,
    parts: Parts,
    /// Bytes of its memory, which may be more than its own.
    taken: usize,
    /// `None`: the devices have it.
    memory: Option<AlignedBuf>,
    result: Option<Result<(), Box<device::Error>>>,
}

/// A piece that is to go through the cache.
struct Failed<'s> {
    pages: Range<u64>,
    grows: bool,
    memory: AlignedBuf,
    /// What it was accepted for.
    promise: Promised<'s>,
}

impl Piece {
    fn bytes(&self) -> usize {
        ((self.pages.end - self.pages.start) * PAGE) as usize
    }
}

#[derive(Default)]
struct Seat {
    /// Whose pieces these are.
    file: Option<Counted<FileState>>,
    queues: Option<Queues>,
    pieces: VecDeque<Piece>,
    numbers: u64,
    /// As the last tick found it.
    seen: u64,
    /// When the newest wait for room was over, if no request has found room since.
    waited_ns: Option<u64>,
    /// Bytes that have ended since.
    since: usize,
    /// Kept for its memory.
    landed: Vec<Landed>,
}

/// The seats of a file system.
pub(in super::super) struct Behind {
    seats: Box<[Mutex<Seat>]>,
    /// Bytes of a seat's pieces at most.
    room: usize,
    /// Seats that files have.
    taken: AtomicUsize,
    /// Bytes that were written so.
    bytes: AtomicU64,
}

impl Behind {
    /// For a cache of so many bytes.
    pub fn new(cache: usize) -> Behind {
        let all = cache / SHARE;
        let seats = tight::limit((all / ROOM).clamp(1, SEATS), 2);
        let seat = |at| Mutex::keyed(rank::FILE_BEHIND, at as u64, Seat::default());
        Behind {
            seats: (0..seats).map(seat).collect(),
            room: ROOM.min(all / seats),
            taken: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether it is worth to ask for one.
    fn may_have_seat(&self, state: &FileState) -> bool {
        state.behind.seat().is_some() || self.taken.load(Ordering::Relaxed) < self.seats.len()
    }

    /// The seat is nobody's from now on.
    fn leave(&self, seat: &mut Seat) {
        if let Some(state) = seat.file.take() {
            state.behind.leave();
            self.taken.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// A seat without pieces.
    fn claim(&self, state: &Counted<FileState>) -> Option<MutexGuard<'_, Seat>> {
        for (at, seat) in self.seats.iter().enumerate() {
            let Some(mut seat) = seat.try_lock() else {
                continue;
            };
            if seat.file.is_none() {
                seat.file = Some(Counted::clone(state));
                (seat.waited_ns, seat.since) = (None, 0);
                state.behind.sit(at);
                self.taken.fetch_add(1, Ordering::Relaxed);
                return Some(seat);
            }
        }
        None
    }
}

/// Which seat a file has, if any. It stays while the file's I/O lock is held.
#[derive(Debug, Default)]
pub(in super::super) struct Seated {
    /// One more than the seat; 0: none.
    seat: AtomicU32,
    /// Requests that are to be written by calls that wait.
    spared: AtomicU32,
}

impl Seated {
    #[inline]
    pub fn seat(&self) -> Option<usize> {
        (self.seat.load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    fn sit(&self, seat: usize) {
        self.seat.store(seat as u32 + 1, Ordering::Relaxed);
    }

    fn leave(&self) {
        self.seat.store(0, Ordering::Relaxed);
    }

    fn spare(&self) {
        let requests = tight::limit(SPARED as usize, 1) as u32;
        self.spared.store(requests, Ordering::Relaxed);
    }

    /// Whether the next request is to be spared. Of threads that ask at once one may be forgotten.
    fn is_spared(&self) -> bool {
        let left = self.spared.load(Ordering::Relaxed);
        if left > 0 {
            self.spared.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }
}

impl Seat {
    /// Bytes of memory of its pieces.
    fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.taken).sum()
    }

    /// False: there are none to be had, and who writes waits for the devices.
    fn has_queues(&mut self, array: &std::sync::Arc<Array>) -> bool {
        if self.queues.is_none() {
            self.queues = Queues::new(array, PIECES_MAX, DEVICE_DEPTH).ok();
        }
        self.queues.is_some()
    }

    /// Notes what has landed.
    fn reap(&mut self) {
        let Some(queues) = &mut self.queues else {
            return;
        };
        queues.reap(&mut self.landed);
        for landed in self.landed.drain(..) {
            let mut pieces = self.pieces.iter_mut();
            if let Some(piece) = pieces.find(|piece| piece.number == landed.tag) {
                (piece.memory, piece.result) = (Some(landed.memory), Some(landed.result));
            }
        }
    }

    /// Waits until the first so many pieces have landed.
    fn wait_for(&mut self, pieces: usize) {
        if planted(Canary::PieceLoggedEarly) {
            return;
        }
        loop {
            self.reap();
            if self.pieces.iter().take(pieces).all(|p| p.result.is_some()) {
                return;
            }
            if let Some(queues) = &mut self.queues {
                queues.wait(None, None);
            }
        }
    }
}

impl Files {
    /// Begins to write whole pages behind a stream, and returns before the devices have them. `None`: nothing is begun, it has to be a call that waits.
    pub(super) fn write_behind(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<Option<usize>, Error> {
        let fits = 2 * data.len() <= tight::limit(self.behind.room, usize::MAX);
        if !fits || !self.behind.may_have_seat(state) || state.behind.is_spared() {
            return Ok(None);
        }
        // Before the lock: others may have it meanwhile.
        let mut memory = self.memory.take_out(data.len());
        memory[..data.len()].copy_from_slice(data);
        let pages = pages_of(offset..offset + data.len() as u64);
        let exclusive = self.lock_landed(state);
        let begun = match state.check_alive() {
            // Whoever closes takes this lock after that was said.
            Ok(()) if self.closing.load(Ordering::SeqCst) => Err(memory),
            Ok(()) => self.begin_behind(state, pages, memory),
            Err(_) => Err(memory),
        };
        drop(exclusive);
        match begun {
            Ok(()) => {
                let bytes = &self.behind.bytes;
                bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
                Ok(Some(data.len()))
            }
            Err(memory) => {
                self.memory.give(memory);
                // The next ones would be copied for nothing, too.
                state.behind.spare();
                Ok(None)
            }
        }
    }

    /// The file's I/O lock, shared, of a file that is not being deleted: who opened it by a number that nobody held would else see its blocks go one
    /// by one.
    pub(in super::super) fn lock_shared<'a>(
        &self,
        state: &'a Counted<FileState>,
    ) -> Result<ReadGuard<'a, ()>, Error> {
        let guard = self.lock_ended(state);
        state.check_alive()?;
        Ok(guard)
    }

    /// The same for who changes content.
    #[inline]
    pub(in super::super) fn share_to_change<'a>(
        &self,
        state: &'a Counted<FileState>,
    ) -> Result<ReadGuard<'a, ()>, Error> {
        let guard = self.lock_shared(state)?;
        self.check_open()?;
        Ok(guard)
    }

    /// As `lock_shared` of a file that may be being deleted.
    #[inline]
    pub(in super::super) fn lock_ended<'a>(
        &self,
        state: &'a Counted<FileState>,
    ) -> ReadGuard<'a, ()> {
        loop {
            let guard = state.io.read();
            if state.behind.seat().is_none() || planted(Canary::PiecesNotEnded) {
                return guard;
            }
            drop(guard);
            // Who writes them does so no more for a while.
            drop(self.lock_alone(state));
        }
    }

    /// A handle of the file goes.
    pub(in super::super) fn end_pieces_of(&self, state: &Counted<FileState>) {
        if state.behind.seat().is_some() {
            let _exclusive = self.lock_landed(state);
            self.end_pieces(state, false);
        }
    }

    /// The I/O lock is held exclusively. An error: it is none that may be on its way, or there is no place for it.
    fn begin_behind(
        &self,
        state: &Counted<FileState>,
        pages: Range<u64>,
        memory: AlignedBuf,
    ) -> Result<(), AlignedBuf> {
        let own = state.behind.seat().map(|at| self.behind.seats[at].lock());
        let Some(mut seat) = own.or_else(|| self.behind.claim(state)) else {
            return Err(memory);
        };
        let sent = match seat.has_queues(self.store.array()) {
            false => Err(memory),
            true => {
                self.make_room(state, &mut seat, memory.len());
                match self.lay_out_piece(state, &seat, &pages) {
                    Ok(Some((layout, grows))) => {
                        self.send(state, &mut seat, (pages, grows), layout, memory)
                    }
                    Ok(None) => Err(memory),
                    Err(error) => {
                        // The call that waits meets it again, if it lasts.
                        tracing::debug!("inode {} is not written behind: {error}", state.ino());
                        Err(memory)
                    }
                }
            }
        };
        if seat.pieces.is_empty() {
            self.behind.leave(&mut seat);
        }
        sent
    }

    /// Ends what has landed, and waits until there is room for so many bytes more.
    fn make_room(&self, state: &Counted<FileState>, seat: &mut Seat, bytes: usize) {
        seat.reap();
        let landed = |seat: &Seat| seat.pieces.front().is_some_and(|p| p.result.is_some());
        while landed(seat) {
            self.end_first(state, seat);
        }
        let room = tight::limit(self.behind.room, 3 * bytes);
        let is_full = |seat: &Seat| {
            let full = seat.bytes() + bytes > room || seat.pieces.len() == PIECES_MAX;
            full && !seat.pieces.is_empty()
        };
        if !is_full(seat) {
            seat.waited_ns = None;
            return;
        }
        while is_full(seat) {
            seat.wait_for(1);
            self.end_first(state, seat);
        }
        // The devices have been at work since the last wait was over: there was no room then, and is none now.
        let now_ns = self.now_ns();
        if let Some(since_ns) = seat.waited_ns.replace(now_ns) {
            self.streams
                .judge(seat.since.max(1), now_ns.saturating_sub(since_ns));
        }
        seat.since = 0;
    }

    /// Where a piece goes, and whether the file grows by it. `None`: not in a way that suits invariant 2.
    fn lay_out_piece(
        &self,
        state: &Counted<FileState>,
        seat: &Seat,
        pages: &Range<u64>,
    ) -> Result<Option<(Layout<'_>, bool)>, Error> {
        let meets = |piece: &Piece| piece.pages.start < pages.end && pages.start < piece.pages.end;
        let dirty = || {
            !self
                .pages
                .dirty_pages(state.key, pages.clone(), 1)
                .is_empty()
        };
        if seat.pieces.iter().any(meets) || dirty() {
            return Ok(None);
        }
        if pages.end * PAGE <= state.size() {
            let Some(runs) = self.written_blocks(state, pages)? else {
                return Ok(None);
            };
            self.touch(state, pages.end * PAGE)?;
            let layout = self.lay_out_over(pages.clone(), runs);
            layout
                .blocks()
                .try_for_each(|blocks| self.store.confirm(blocks))?;
            return Ok(Some((layout, false)));
        }
        if pages.start * PAGE != state.size() {
            return Ok(None);
        }
        if seat.pieces.iter().any(|piece| piece.grows) {
            // Nothing but pieces has come since the first of them made way.
            self.touch(state, pages.end * PAGE)?;
        } else {
            self.make_way(state, pages.clone())?;
        }
        let last = seat
            .pieces
            .back()
            .filter(|last| last.pages.end == pages.start);
        let goal = last.and_then(|last| last.parts.end());
        let layout = self.lay_out_new(state, pages, goal)?;
        Ok(layout.map(|layout| (layout, true)))
    }

    /// New blocks for pages that have none. `None`: they have some, or one record does not take all.
    fn lay_out_new(
        &self,
        state: &Counted<FileState>,
        pages: &Range<u64>,
        goal: Option<Block>,
    ) -> Result<Option<Layout<'_>>, Error> {
        let kept = {
            let meta = state.meta.lock();
            meta.replaced || meta.cutting
        };
        // What is in the inode gets a block before extents take its place, to which a piece's record does not see.
        if kept || state.node.read()?.inode()?.has_inline() {
            return Ok(None);
        }
        if !self.mapped(state, pages.clone())?.is_empty() {
            return Ok(None);
        }
        let mut promise = self.promise(pages.end - pages.start)?;
        state.meta.lock().promised += promise.give(u64::MAX);
        let list: Vec<u64> = pages.clone().collect();
        let layout = self
            .lay_out_from(state, &list, false, goal)
            .and_then(|layout| {
                let confirmed = layout
                    .blocks()
                    .try_for_each(|blocks| self.store.confirm(blocks));
                match (confirmed, layout.covered == list.len()) {
                    (Ok(()), true) => Ok(Some(layout)),
                    (outcome, _) => {
                        self.unreserve(state, layout);
                        Ok(outcome.map(|()| None)?)
                    }
                }
            });
        self.trim_promise(state);
        layout
    }

    /// Sends a piece that is laid out. An error: it was refused, and nothing of it is left.
    fn send(
        &self,
        state: &Counted<FileState>,
        seat: &mut Seat,
        (pages, grows): (Range<u64>, bool),
        layout: Layout<'_>,
        memory: AlignedBuf,
    ) -> Result<(), AlignedBuf> {
        let (mut at, taken) = (0, memory.len());
        let runs: Vec<Run> = layout
            .blocks()
            .map(|Extent { block, len }| {
                let len = len as usize * BLOCK_SIZE;
                at += len;
                let byte = block.byte();
                Run {
                    byte,
                    at: at - len,
                    len,
                }
            })
            .collect();
        let number = seat.numbers;
        let kind = Kind::Write(Durability::Volatile);
        let flight = Flight {
            kind,
            memory,
            tag: number,
        };
        let sent = match &mut seat.queues {
            Some(queues) => queues.submit(flight, &runs).map_err(|r| r.flight),
            None => Err(flight),
        };
        if let Err(flight) = sent {
            self.unreserve(state, layout);
            self.trim_promise(state);
            return Err(flight.memory);
        }
        seat.numbers += 1;
        let bytes = ((pages.end - pages.start) * PAGE) as usize;
        // What the cache has of them is clean, and old from now on.
        self.drop_pages(state, pages.clone());
        {
            let mut meta = state.meta.lock();
            meta.size = meta.size.max(pages.end * PAGE);
            if grows {
                meta.pending += pages.end - pages.start;
            }
        }
        self.note_ahead(state);
        self.counts
            .data_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
        seat.pieces.push_back(Piece {
            number,
            pages,
            grows,
            parts: layout.keep(),
            taken,
            memory: None,
            result: None,
        });
        if let Some(queues) = &mut seat.queues {
            queues.ring();
        }
        Ok(())
    }

    /// Ends all pieces of a file. The I/O lock is held exclusively. `spare`: somebody else than who writes them would wait for them again.
    pub(in super::super) fn end_pieces(&self, state: &Counted<FileState>, spare: bool) {
        let Some(at) = state.behind.seat() else {
            return;
        };
        let mut seat = self.behind.seats[at].lock();
        seat.wait_for(usize::MAX);
        while !seat.pieces.is_empty() {
            self.end_first(state, &mut seat);
        }
        self.behind.leave(&mut seat);
        if spare {
            state.behind.spare();
        }
    }

    /// The first piece has landed, and ends; with it all others, if it failed (invariant 4).
    fn end_first(&self, state: &Counted<FileState>, seat: &mut Seat) {
        let Some(first) = seat.pieces.pop_front() else {
            return;
        };
        seat.since += first.bytes();
        let Err(failed) = self.log_piece(state, first) else {
            return;
        };
        let (first, error) = *failed;
        self.spare_devices(state, &error);
        seat.wait_for(usize::MAX);
        let mut gap = first.grows;
        let mut failed = vec![first];
        for piece in std::mem::take(&mut seat.pieces) {
            if gap && piece.grows {
                failed.push(self.give_up(state, piece));
            } else if let Err(refused) = self.log_piece(state, piece) {
                let (piece, _) = *refused;
                gap |= piece.grows;
                failed.push(piece);
            }
        }
        // Those that grow first, in their order: the file's size is that of what is before them.
        failed.sort_by_key(|piece| !piece.grows);
        if let Some(first) = failed.first().filter(|piece| piece.grows) {
            let mut meta = state.meta.lock();
            meta.size = meta.size.min(first.pages.start * PAGE);
        }
        for mut piece in failed {
            self.write_instead(state, &mut piece);
            self.memory.give(piece.memory);
        }
    }

    /// Logs a piece that has landed. An error: it has failed.
    fn log_piece(
        &self,
        state: &Counted<FileState>,
        piece: Piece,
    ) -> Result<(), Box<(Failed<'_>, Error)>> {
        let landed = match planted(Canary::PieceLoggedEarly) {
            true => Ok(()),
            false => match &piece.result {
                Some(Ok(())) => Ok(()),
                Some(Err(error)) => Err(engine::Error::from((**error).clone()).into()),
                None => Err(Error::Invalid("a piece ends that has not landed")),
            },
        };
        if let Err(error) = landed {
            return Err(Box::new((self.give_up(state, piece), error)));
        }
        let Piece {
            pages,
            grows,
            parts,
            memory,
            ..
        } = piece;
        let layout = parts.layout(&self.store);
        let reserved = layout.reserved();
        let size = match grows {
            true => pages.end * PAGE,
            false => state.meta.lock().logged_size,
        };
        let logged = match state.meta.is_dead() {
            // Nobody will look for it, and its blocks are free when this is dropped.
            true => {
                drop(layout);
                Ok(())
            }
            false => self.log_stored(state, layout, size),
        };
        self.not_pending(state, grows, &pages);
        let memory = memory.unwrap_or_else(|| AlignedBuf::zeroed(0));
        match logged {
            Ok(()) => {
                self.memory.give(memory);
                Ok(())
            }
            Err(error) => {
                let failed = Failed {
                    pages,
                    grows,
                    memory,
                    promise: self.out_of_promise(state, reserved),
                };
                Err(Box::new((failed, error)))
            }
        }
    }

    /// A piece that is not logged gives its blocks back, and has them promised.
    fn give_up(&self, state: &Counted<FileState>, piece: Piece) -> Failed<'_> {
        let layout = piece.parts.layout(&self.store);
        let reserved = layout.reserved();
        self.unreserve(state, layout);
        self.not_pending(state, piece.grows, &piece.pages);
        Failed {
            pages: piece.pages,
            grows: piece.grows,
            memory: piece.memory.unwrap_or_else(|| AlignedBuf::zeroed(0)),
            promise: self.out_of_promise(state, reserved),
        }
    }

    /// A piece's blocks are its file's by now, or nobody's.
    fn not_pending(&self, state: &FileState, grows: bool, pages: &Range<u64>) {
        if grows {
            let mut meta = state.meta.lock();
            meta.pending = meta.pending.saturating_sub(pages.end - pages.start);
        }
    }

    /// What could not be written past the cache goes through it.
    fn write_instead<'s>(&'s self, state: &Counted<FileState>, piece: &mut Failed<'s>) {
        if state.meta.is_dead() {
            return;
        }
        let bytes = ((piece.pages.end - piece.pages.start) * PAGE) as usize;
        let data = piece.memory.get(..bytes).unwrap_or(&[]);
        let offset = piece.pages.start * PAGE;
        let why = match self.write_promised(state, offset, data, &mut piece.promise) {
            Ok(len) if len == bytes => return,
            Ok(len) => format!("only {len} of {bytes} bytes go through the cache"),
            Err(error) => error.to_string(),
        };
        let ino = state.ino();
        if let Some(left_out) = self.told.lost.may_say(self.now_ns()) {
            tracing::error!(left_out, "what was written to inode {ino} is lost: {why}");
        }
        self.lost(state, &mut state.meta.lock(), &why);
        self.is_gone(ino);
    }

    /// Ends the pieces of files that nobody has written since the last look.
    pub(in super::super) fn end_idle_pieces(&self) {
        for seat in &self.behind.seats {
            let Some(mut seat) = seat.try_lock() else {
                continue;
            };
            let numbers = seat.numbers;
            let idle = std::mem::replace(&mut seat.seen, numbers) == numbers;
            let Some(state) = seat.file.clone().filter(|_| idle) else {
                continue;
            };
            drop(seat);
            let _exclusive = self.lock_landed(&state);
            self.end_pieces(&state, false);
        }
    }
}

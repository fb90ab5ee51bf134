//! Long reads of files that the cache cannot keep: what comes next is brought while the program has what came before, into memory of
//! the stream's own, and handed out from there.
//!
//! Why. Through the cache each page takes a place from another, is looked up, filled apart from its neighbours and published, and by the time that the
//! file's end is read its beginning has gone: who reads it again finds nothing, and nobody finds what was there before.
//!
//! A run of reads that has gone on for [`RUN_MIN`] gets a *seat*: queues to the devices, and the pieces that they bring, in the order of
//! the file. Each of them begins as many pieces as are read ahead, waits for those that it needs, copies out of them, and asks whether that is what
//! the file holds. Threads that take the requests of a run in turn ([`runs`](super::super::runs)) come out of order, one by one: what one of them has left out is kept for
//! the others while there is room.
//!
//! Invariants:
//! 1. A piece is a read in flight ([`flight`](super::super::flight)): it holds nothing that anybody waits for, and counts only as far as it stands when it is
//!    handed out. Of the pages that a read hands out, all were what the file held at one moment of the read: the later one of its beginning and of the youngest
//!    piece's, since all pieces are asked after both.
//! 2. A piece brings all pages, if none was dirty when it began; or else those that were not cached. The others are read from the cache when they are handed out; one that has left it by
//!    then is missing.
//! 3. A read is handed out by pieces as a whole, or not by them at all: where a piece has failed, is over, or is missing, it goes through the cache, and its error is
//!    told there, and so do the next ones, for half of [`RUN_MIN`].
//! 4. There are [`SEATS`] at most, and all pieces together are no more than one part in [`SHARE`] of the cache, half of which may be *left behind*: pieces that were not
//!    read when their turn came. A seat is its run's until the handle is closed, or has not
//!    read for [`IDLE_NS`] while somebody else wants one; with something in flight it is nobody else's. A run has one; threads that go on with it at once
//!    wait for each other.
//! 5. No piece is handed out that is older than the reads of [`LISTED`] pieces, with at most [`IDLE_NS`] between two of them: what tells whether it stands counts, and counts go round ([`ranges`](super::super::ranges)).

use super::super::advice::Advice;
use super::super::bounce::Bounces;
use super::super::file::OpenFile;
use super::super::flight::{Began, Flying};
use super::super::runs::ReadRun;
use super::super::{Files, KEPT_SHARE, PAGE, pages_of};
use base::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use base::sync::{Condvar, Mutex, MutexGuard, rank};
use base::tight;
use device::{AlignedBuf, Array, Flight, Kind, Landed, Queues, Run};
use format::BLOCK_SIZE;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a request at least.
const REQUEST_MIN: usize = 64 << 10;
/// Bytes of a run that go through the cache first.
const RUN_MIN: usize = 2 << 20;
/// Bytes that one flight reads.
const PIECE: usize = 1 << 20;
const SEATS: usize = 8;
const SHARE: usize = KEPT_SHARE;
const IDLE_NS: u64 = 1_000_000_000;
/// Pieces of a seat that fly at most.
const PIECES_MAX: usize = 16;
/// Pieces from the first that was not read to the last that was begun, at most.
const LISTED: usize = 64;
/// Parts that each device has of a seat at a time.
const DEVICE_DEPTH: usize = 64;
/// So long, and so many times in vain, a read waits for one that is behind, so that nobody loses what was brought for it.
const LAGGARD_WAIT: Duration = Duration::from_millis(4);
const LAGGARD_WAITS: u32 = 4;
/// So many reads after all these were in vain there is no waiting; as many again each time, up to so many, until one was not.
const REST: u32 = 64;
const REST_MOST: u32 = 4096;
/// Pieces that are looked at page by page when one did not stand: others may write all the time.
const CAREFUL: usize = 256;
/// A handle without a seat.
const NOWHERE: usize = usize::MAX;

fn request_min() -> usize {
    tight::limit(REQUEST_MIN, 2 * BLOCK_SIZE)
}

fn run_min() -> u64 {
    tight::limit(RUN_MIN, 0) as u64
}

fn piece_bytes() -> u64 {
    tight::limit(PIECE, 4 * BLOCK_SIZE) as u64
}

/// What is known of a run besides.
#[derive(Debug)]
pub(in super::super) struct Reader {
    /// Where the run began.
    start: AtomicU64,
    /// Its seat, if it has not lost that.
    seat: AtomicUsize,
    /// What the seat has is of an earlier run.
    begun: AtomicBool,
}

impl Default for Reader {
    fn default() -> Reader {
        Reader {
            start: AtomicU64::new(0),
            seat: AtomicUsize::new(NOWHERE),
            begun: AtomicBool::new(false),
        }
    }
}

impl Reader {
    /// A run begins here.
    pub fn begin(&self, offset: u64) {
        self.start.store(offset, Ordering::Relaxed);
        self.begun.store(true, Ordering::Relaxed);
    }
}

/// What became of a read that may be a stream's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Streamed {
    /// So many bytes are read.
    Read(usize),
    /// It goes through the cache, and nothing needs to be brought ahead: the stream does that, or threads have.
    Beside,
    /// It goes through the cache.
    Not,
}

/// A part of the file on its way, or there.
struct Piece {
    number: u64,
    bytes: Range<u64>,
    /// Bytes that were not handed out. 0: it is over, and has no memory.
    left: u64,
    flying: Flying,
    /// `None`: it flies, or is over.
    memory: Option<AlignedBuf>,
}

/// What became of a read by pieces.
enum Handed {
    /// So many bytes are read.
    Read(usize),
    /// It comes too late for these.
    Late,
    /// These are not what the file holds.
    Not,
}

#[derive(Default)]
struct Seat {
    used_ns: u64,
    queues: Option<Queues>,
    /// One behind the other.
    pieces: VecDeque<Piece>,
    /// Here a piece could not be begun: it is tried again when it is needed.
    refused: Option<u64>,
    numbers: u64,
    /// Bytes that are left behind.
    behind: u64,
    /// Where the read that came farthest began.
    lead: u64,
    /// So many times it is worth to wait for who is behind.
    waits: u32,
    /// So many reads it is not, and how long the last such time was.
    rest: u32,
    rested: u32,
    /// So many pieces are to be looked at page by page: something had changed lately.
    careful: usize,
    /// Kept for their memory.
    landed: Vec<Landed>,
    runs: Vec<Run>,
    spare: Vec<Flying>,
}

/// The seats of a file system.
pub(in super::super) struct Readers {
    seats: Box<[Mutex<Seat>]>,
    /// Somebody has read what was left behind, for each seat.
    caught_up: Box<[Condvar]>,
    /// [`ReadRun::id`] of whose each is; 0: nobody's. Changed by who has it locked.
    holders: Box<[AtomicUsize]>,
    /// Bytes of pieces that a seat has at most, but for what is left behind.
    room: u64,
    /// Bytes of all pieces at most.
    all: u64,
    /// Bytes that are left behind in all seats.
    behind: AtomicU64,
    /// Bytes that were handed out.
    bytes: AtomicU64,
}

impl Readers {
    /// For a cache of so many bytes, and so many bytes read ahead of a reader.
    pub fn new(cache: usize, ahead: u64) -> Readers {
        let all = (cache / SHARE) as u64;
        let wanted = ahead + piece_bytes();
        let seats = tight::limit(((all / wanted) as usize).clamp(1, SEATS), 2);
        let seat = |at| Mutex::keyed(rank::FILE_STREAM, at as u64, Seat::default());
        let room = wanted
            .min(all)
            .min(PIECES_MAX as u64 * piece_bytes())
            .max(tight::limit(0, 3) as u64 * piece_bytes());
        Readers {
            seats: (0..seats).map(seat).collect(),
            caught_up: (0..seats).map(|_| Condvar::new()).collect(),
            holders: (0..seats).map(|_| AtomicUsize::new(0)).collect(),
            room,
            all: all.max(seats as u64 * room),
            behind: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether this run has a seat, and which; it may lose it as long as it has not locked that.
    fn own(&self, run: &ReadRun) -> Option<usize> {
        let at = run.reader.seat.load(Ordering::Relaxed);
        let holder = self.holders.get(at)?.load(Ordering::Acquire);
        (holder == run.id()).then_some(at)
    }

    #[cfg(test)]
    pub fn left_behind(&self) -> u64 {
        self.behind.load(Ordering::Relaxed)
    }

    /// Seats that somebody has.
    fn held(&self) -> u64 {
        let holders = self.holders.iter();
        let held = holders.filter(|holder| holder.load(Ordering::Relaxed) != 0);
        held.count() as u64
    }

    /// Whether so many bytes may be left behind (invariant 4).
    fn may_leave(&self, bytes: u64) -> bool {
        let most = (self.all / 2).min(self.all.saturating_sub(self.held() * self.room));
        bytes <= tight::limit(most as usize, 4 * piece_bytes() as usize) as u64
    }

    /// Notes what a seat leaves behind.
    fn note_behind(&self, seat: &mut Seat, bytes: u64) {
        let before = std::mem::replace(&mut seat.behind, bytes);
        // Wraps around to what it is less.
        self.behind
            .fetch_add(bytes.wrapping_sub(before), Ordering::Relaxed);
    }

    /// Whether a read from `offset` on leaves more behind than there is room for.
    fn is_crowded(&self, seat: &Seat, offset: u64) -> bool {
        let others = self
            .behind
            .load(Ordering::Relaxed)
            .wrapping_sub(seat.behind);
        let before = seat.pieces.front().is_some_and(|p| p.bytes.end <= offset);
        let listed = seat.pieces.len() >= LISTED / 2;
        before && (listed || !self.may_leave(others.wrapping_add(seat.left_behind(offset))))
    }

    /// The seat of a run, locked, with room for a read from `offset` on: waits for those that are behind, or lets go of what they have not read. `None`: it has become
    /// another's.
    fn lock(
        &self,
        at: usize,
        run: &ReadRun,
        offset: u64,
        memory: &Bounces,
    ) -> Option<MutexGuard<'_, Seat>> {
        let mut seat = self.seats[at].lock();
        seat.rest = seat.rest.saturating_sub(1);
        while self.own(run) == Some(at) && self.is_crowded(&seat, offset) && seat.waits > 0 {
            match self.caught_up[at].wait_for(&mut seat, LAGGARD_WAIT) {
                true => seat.waited_in_vain(),
                false => seat.rested = 0,
            }
        }
        if self.own(run) != Some(at) {
            return None;
        }
        while self.is_crowded(&seat, offset) {
            seat.let_go(memory);
            seat.let_go_of_read(memory);
        }
        let behind = seat.left_behind(offset.max(seat.lead));
        self.note_behind(&mut seat, behind);
        Some(seat)
    }

    /// A seat that nobody needs.
    fn take(
        &self,
        run: &ReadRun,
        now_ns: u64,
        memory: &Bounces,
    ) -> Option<(usize, MutexGuard<'_, Seat>)> {
        let taken = self.held() * self.room + self.behind.load(Ordering::Relaxed);
        let full = taken + self.room > self.all;
        for (at, seat) in self.seats.iter().enumerate() {
            let Some(mut seat) = seat.try_lock() else {
                continue;
            };
            let holder = &self.holders[at];
            let idle = match holder.load(Ordering::Acquire) {
                0 => !full,
                _ => seat.is_idle(now_ns),
            };
            if idle && self.is_cleared(&mut seat, memory) {
                (seat.rest, seat.rested, seat.careful) = (0, 0, 0);
                holder.store(run.id(), Ordering::Release);
                run.reader.seat.store(at, Ordering::Relaxed);
                return Some((at, seat));
            }
        }
        None
    }

    /// A handle is closed.
    pub fn leave(&self, file: &OpenFile, memory: &Bounces) {
        // Who looks whether it is free finds out later that it is.
        for run in file.reads.iter() {
            // Of threads that began it at once each may have taken one.
            for (at, holder) in self.holders.iter().enumerate() {
                let is_its = || holder.load(Ordering::Acquire) == run.id();
                if is_its()
                    && let Some(mut seat) = self.seats[at].try_lock()
                    && is_its()
                {
                    self.clear(&mut seat, memory);
                    holder.store(0, Ordering::Release);
                }
            }
        }
    }

    /// Lets go of all pieces.
    fn clear(&self, seat: &mut Seat, memory: &Bounces) {
        if let Some(queues) = &mut seat.queues
            && queues.in_flight() > 0
        {
            queues.cancel_all();
        }
        while !seat.pieces.is_empty() {
            seat.let_go(memory);
        }
        self.note_behind(seat, 0);
        (seat.refused, seat.lead, seat.waits) = (None, 0, 0);
    }

    /// Lets go of all pieces; false: some still fly.
    fn is_cleared(&self, seat: &mut Seat, memory: &Bounces) -> bool {
        self.clear(seat, memory);
        let Some(queues) = &mut seat.queues else {
            return true;
        };
        queues.reap(&mut seat.landed);
        for landed in seat.landed.drain(..) {
            memory.give(landed.memory);
        }
        queues.in_flight() == 0
    }
}

impl Seat {
    fn is_idle(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.used_ns) >= IDLE_NS
    }

    /// Lets go of the first piece.
    fn let_go(&mut self, memory: &Bounces) {
        if let Some(piece) = self.pieces.pop_front() {
            piece.memory.into_iter().for_each(|m| memory.give(m));
            if self.spare.len() < PIECES_MAX {
                self.spare.push(piece.flying);
            }
        }
    }

    /// Somebody has come who is behind.
    fn is_met(&mut self) {
        if self.rest == 0 {
            self.waits = LAGGARD_WAITS;
        }
    }

    fn waited_in_vain(&mut self) {
        self.waits = self.waits.saturating_sub(1);
        if self.waits == 0 {
            self.rested = (2 * self.rested).clamp(REST, REST_MOST);
            self.rest = self.rested;
        }
    }

    /// Lets go of the first pieces, as far as they were handed out.
    fn let_go_of_read(&mut self, memory: &Bounces) {
        while self.pieces.front().is_some_and(|piece| piece.left == 0) {
            self.let_go(memory);
        }
    }

    /// Bytes of pieces that lie before `offset`, and were not handed out.
    fn left_behind(&self, offset: u64) -> u64 {
        let before = self.pieces.iter().take_while(|p| p.bytes.end <= offset);
        let left = before.filter(|piece| piece.left > 0);
        left.map(|piece| piece.bytes.end - piece.bytes.start).sum()
    }

    /// The pieces that have these bytes.
    fn find(&self, bytes: &Range<u64>) -> Option<Range<usize>> {
        let has = |byte: u64| {
            let mut pieces = self.pieces.iter();
            pieces.position(|piece| piece.bytes.contains(&byte))
        };
        Some(has(bytes.start)?..has(bytes.end - 1)? + 1)
    }

    /// Where the next piece begins.
    fn end(&self) -> Option<u64> {
        self.pieces.back().map(|piece| piece.bytes.end)
    }

    fn queues(&mut self, array: &Arc<Array>) -> Option<&mut Queues> {
        if self.queues.is_none() {
            // Who gets none reads through the cache.
            self.queues = Queues::new(array, PIECES_MAX, DEVICE_DEPTH).ok();
        }
        self.queues.as_mut()
    }
}

impl Files {
    /// Reads past the cache what [`is_stream`](Self::is_stream), if it can.
    pub(in super::super) fn read_stream(
        &self,
        (file, run): (&OpenFile, &ReadRun),
        offset: u64,
        buf: &mut [u8],
    ) -> Streamed {
        if offset >= file.state.size() {
            // Others may not have come so far.
            return Streamed::Beside;
        }
        let end = offset.saturating_add(buf.len() as u64);
        let now_ns = self.now_ns();
        let seat = match self.readers.own(run) {
            None => self.readers.take(run, now_ns, &self.memory),
            // Who goes on with this run at once needs what this one waits for.
            Some(at) => {
                let seat = self.readers.lock(at, run, offset, &self.memory);
                seat.map(|seat| (at, seat))
            }
        };
        let Some((at, mut seat)) = seat else {
            run.reader.begin(end.saturating_sub(run_min() / 8 * 7));
            return Streamed::Not;
        };
        let anew = run.reader.begun.swap(false, Ordering::Relaxed);
        if anew || seat.is_idle(now_ns) {
            // Invariant 5.
            self.readers.clear(&mut seat, &self.memory);
        }
        seat.used_ns = seat.used_ns.max(now_ns);
        if run.asked.load(Ordering::Relaxed) * PAGE > offset {
            // What threads bring ahead is handed out first.
            return Streamed::Beside;
        }
        match self.read_pieces(file, offset, buf, &mut seat) {
            Handed::Read(len) => {
                if offset < seat.lead {
                    seat.is_met();
                    self.readers.caught_up[at].notify_all();
                }
                seat.lead = seat.lead.max(offset);
                drop(seat);
                self.readers.bytes.fetch_add(len as u64, Ordering::Relaxed);
                Streamed::Read(len)
            }
            Handed::Late => {
                seat.is_met();
                Streamed::Beside
            }
            Handed::Not => {
                self.readers.clear(&mut seat, &self.memory);
                seat.careful = tight::limit(CAREFUL, 2);
                run.reader.begin(end.saturating_sub(run_min() / 2));
                Streamed::Not
            }
        }
    }

    /// Whether a read that goes on where the last one ended is one of a long run. What it needs may still be on its way into the cache.
    pub(in super::super) fn is_stream(
        &self,
        file: &OpenFile,
        run: &ReadRun,
        offset: u64,
        len: usize,
    ) -> bool {
        let before = offset.saturating_sub(run.reader.start.load(Ordering::Relaxed));
        if len < request_min() || before < run_min() {
            return false;
        }
        let kept = self.pages.capacity().saturating_mul(BLOCK_SIZE);
        let keeps = file.state.size() <= tight::limit(kept, 0) as u64;
        let room = self.readers.room;
        let fits = room >= 2 * piece_bytes() && room >= len as u64 + piece_bytes();
        fits && (!keeps || file.is_advised(Advice::NoReuse))
    }

    fn read_pieces(&self, file: &OpenFile, offset: u64, buf: &mut [u8], seat: &mut Seat) -> Handed {
        let size = file.state.size();
        let bytes = offset..size.min(offset.saturating_add(buf.len() as u64));
        if bytes.is_empty() {
            return Handed::Not;
        }
        if seat.pieces.front().is_some_and(|p| p.bytes.start > offset) {
            return Handed::Late;
        }
        // What lies between was asked for by nobody.
        let far = |end: u64| end.saturating_add(self.readers.room) < offset;
        if seat.end().is_some_and(far) {
            self.readers.clear(seat, &self.memory);
        }
        let first = seat.end().unwrap_or(offset / PAGE * PAGE);
        if seat.refused.is_some_and(|at| at < bytes.end) {
            seat.refused = None;
        }
        self.begin_pieces(file, first, offset, seat);
        let Some(needed) = seat.find(&bytes) else {
            return Handed::Not;
        };
        if seat.pieces.range(needed.clone()).any(|p| p.left == 0) {
            return Handed::Late;
        }
        match self.read_found(file, &bytes, buf, (seat, needed.clone()), size) {
            None => Handed::Not,
            Some(()) => {
                for piece in seat.pieces.range_mut(needed) {
                    let (from, to) = (piece.bytes.start, piece.bytes.end);
                    let read = bytes.end.min(to) - bytes.start.max(from);
                    piece.left = piece.left.saturating_sub(read);
                    if piece.left == 0 {
                        piece
                            .memory
                            .take()
                            .into_iter()
                            .for_each(|m| self.memory.give(m));
                    }
                }
                seat.let_go_of_read(&self.memory);
                Handed::Read((bytes.end - bytes.start) as usize)
            }
        }
    }

    /// Waits for pieces, and hands out bytes of them. `None`: they are not what the file holds.
    fn read_found(
        &self,
        file: &OpenFile,
        bytes: &Range<u64>,
        buf: &mut [u8],
        (seat, needed): (&mut Seat, Range<usize>),
        size: u64,
    ) -> Option<()> {
        let beside = self.cleaning.beside_read();
        self.wait_for(seat, needed.clone())?;
        drop(beside);
        let mut at = bytes.start;
        for piece in seat.pieces.range(needed.clone()) {
            let stop = bytes.end.min(piece.bytes.end);
            let out = &mut buf[(at - bytes.start) as usize..(stop - bytes.start) as usize];
            self.hand_out(file, piece, at, out)?;
            at = stop;
        }
        // All of them now: they were the file's at one moment.
        let mut at = bytes.start;
        for piece in seat.pieces.range(needed) {
            let stop = bytes.end.min(piece.bytes.end);
            let memory = piece.memory.as_ref()?;
            if !self.stands(file, &piece.flying, &pages_of(at..stop), memory) {
                return None;
            }
            at = stop;
        }
        // It has been this size all the time: a change counts as an exclusive one, which the pieces would have met.
        let stands = file.state.size() == size && self.touch_atime(&file.state).is_ok();
        stands.then_some(())
    }

    /// Copies bytes of a piece that is there. `None`: what was cached has left the cache.
    fn hand_out(&self, file: &OpenFile, piece: &Piece, at: u64, out: &mut [u8]) -> Option<()> {
        let memory = piece.memory.as_ref()?;
        let end = at + out.len() as u64;
        let mut from = at;
        for (brought, pages) in piece.flying.runs(pages_of(at..end)) {
            let stop = end.min(pages.end * PAGE);
            let here = &mut out[(from - at) as usize..(stop - at) as usize];
            if brought {
                let first = (from - piece.bytes.start) as usize;
                here.copy_from_slice(&memory[first..first + here.len()]);
            } else {
                self.copy_cached(file, from, here)?;
            }
            from = stop;
        }
        Some(())
    }

    fn copy_cached(&self, file: &OpenFile, mut at: u64, out: &mut [u8]) -> Option<()> {
        let mut rest = out;
        while !rest.is_empty() {
            let within = (at % PAGE) as usize;
            let len = rest.len().min(BLOCK_SIZE - within);
            let (here, behind) = rest.split_at_mut(len);
            if !self.pages.read(file.state.key, at / PAGE, within, here) {
                return None;
            }
            (at, rest) = (at + len as u64, behind);
        }
        Some(())
    }

    /// Begins what is read ahead of `offset`, from byte `next` on, as far as it can be begun.
    fn begin_pieces(&self, file: &OpenFile, mut next: u64, offset: u64, seat: &mut Seat) {
        let size = file.state.size();
        let last = offset.saturating_add(self.readers.room);
        let mut begun = false;
        while next < size.min(last) && seat.refused.is_none() && seat.pieces.len() < LISTED {
            let end = (next + piece_bytes()).min(size);
            // A piece is begun as a whole.
            if end > last && !seat.pieces.is_empty() {
                break;
            }
            match self.begin_piece(file, next..end, offset, seat) {
                Some(()) => (next, begun) = (end, true),
                None => seat.refused = Some(next),
            }
        }
        if begun && let Some(queues) = &mut seat.queues {
            queues.ring();
        }
    }

    /// Begins a piece for who reads from `offset` on.
    fn begin_piece(
        &self,
        file: &OpenFile,
        bytes: Range<u64>,
        offset: u64,
        seat: &mut Seat,
    ) -> Option<()> {
        let pages = pages_of(bytes.clone());
        let len = ((pages.end - pages.start) * PAGE) as usize;
        seat.queues(self.store.array())?;
        let mut memory = self.memory.take_out(len);
        let mut flying = seat.spare.pop().unwrap_or_default();
        let mut runs = std::mem::take(&mut seat.runs);
        flying.past = true;
        flying.one_by_one = seat.careful > 0;
        seat.careful = seat.careful.saturating_sub(1);
        let piece = &mut memory[..len];
        let began = self.begin_read(file, bytes.start, piece, &mut flying, &mut runs);
        let number = seat.numbers;
        seat.numbers += 1;
        // Of the first one as much as is read.
        let from = match seat.pieces.is_empty() && bytes.contains(&offset) {
            true => offset,
            false => bytes.start,
        };
        // Of a file that is shorter by now it is not what it should be.
        let began = began
            .ok()
            .filter(|_| flying.len as u64 == bytes.end - bytes.start);
        let piece = match began {
            Some(Began::Done(_)) => Some(Some(memory)),
            Some(Began::Flies) => {
                let flight = Flight {
                    kind: Kind::Read,
                    memory,
                    tag: number,
                };
                let queues = seat.queues.as_mut()?;
                match queues.submit(flight, &runs) {
                    Ok(_) => Some(None),
                    Err(refused) => {
                        self.memory.give(refused.flight.memory);
                        None
                    }
                }
            }
            Some(Began::Waits) | None => {
                self.memory.give(memory);
                None
            }
        };
        seat.runs = runs;
        seat.pieces.push_back(Piece {
            number,
            left: bytes.end - from,
            bytes,
            flying,
            memory: piece?,
        });
        Some(())
    }

    /// Waits until these pieces are there. `None`: one has failed.
    fn wait_for(&self, seat: &mut Seat, needed: Range<usize>) -> Option<()> {
        loop {
            let queues = seat.queues.as_mut()?;
            queues.reap(&mut seat.landed);
            for landed in seat.landed.drain(..) {
                let mut pieces = seat.pieces.iter_mut();
                let piece = pieces.find(|piece| piece.number == landed.tag);
                match (piece, landed.result) {
                    (Some(piece), Ok(())) => piece.memory = Some(landed.memory),
                    // A former holder's.
                    (None, _) => self.memory.give(landed.memory),
                    (Some(_), Err(_)) => return None,
                }
            }
            let mut pieces = seat.pieces.range(needed.clone());
            if pieces.all(|piece| piece.memory.is_some()) {
                return Some(());
            }
            seat.queues.as_mut()?.wait(None, None);
        }
    }
}

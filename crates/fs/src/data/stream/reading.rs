//! Long reads of files that the cache cannot keep: what comes next is brought while the program has what came before, into memory of
//! the stream's own, and handed out from there.
//!
//! Why. Through the cache each page takes a place from another, is looked up, filled apart from its neighbours and published, and by the time that the
//! file's end is read its beginning has gone: who reads it again finds nothing, and nobody finds what was there before.
//!
//! A run of reads that has gone on for [`RUN_MIN`] gets a *seat*: queues to the devices, and the pieces that they bring, in the order of
//! the file. Each of them begins as many pieces as are read ahead, waits for those that it needs, copies out of them, and asks whether that is what
//! the file holds.
//!
//! Invariants:
//! 1. A piece is a read in flight ([`flight`](super::super::flight)): it holds nothing that anybody waits for, and counts only as far as it stands when it is
//!    handed out. Of the pages that a read hands out, all that pieces brought were what the file held at one moment of the read: the later one of its beginning
//!    and of the youngest piece's, since all pieces are asked after both. Each of the others was that at a moment of its own.
//! 2. A piece brings all pages, if none was dirty when it began; or else those that were not cached. The others are read from the cache when they are handed out; one that has left it by
//!    then is missing.
//! 3. A read is handed out by pieces as a whole, or not by them at all: where a piece has failed, is over, or is missing, it goes through the cache, and its error is
//!    told there, and so do the next ones, for half of [`RUN_MIN`].
//! 4. There are [`SEATS`] at most, and all pieces together are no more than one part in [`SHARE`] of the cache. A seat is its run's until the handle is closed, or has not
//!    read for [`IDLE_NS`] while somebody else wants one; with something in flight it is nobody else's. A run has one; of threads that go on with it at once one
//!    has the seat, the others go through the cache.
//! 5. No piece is handed out that is older than [`IDLE_NS`] and a read: what tells whether it stands counts, and counts go round ([`ranges`](super::super::ranges)).

use super::super::advice::Advice;
use super::super::bounce::Bounces;
use super::super::file::OpenFile;
use super::super::flight::{Began, Flying};
use super::super::runs::ReadRun;
use super::super::{Files, KEPT_SHARE, PAGE, pages_of};
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::moves;
use base::sync::{Mutex, MutexGuard, rank};
use base::thread::yield_now;
use base::tight;
use device::{AlignedBuf, Array, Flight, Kind, Landed, Queues, Run};
use format::BLOCK_SIZE;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a request at least.
const REQUEST_MIN: usize = 64 << 10;
/// Bytes of a run that go through the cache first.
const RUN_MIN: usize = 2 << 20;
/// Bytes that one flight reads.
const PIECE: usize = 1 << 20;
const SEATS: usize = 8;
const SHARE: usize = KEPT_SHARE;
const IDLE_NS: u64 = 1_000_000_000;
/// Pieces of a seat at most.
const PIECES_MAX: usize = 16;
/// Parts that each device has of a seat at a time.
const DEVICE_DEPTH: usize = 64;
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
}

impl Default for Reader {
    fn default() -> Reader {
        Reader {
            start: AtomicU64::new(0),
            seat: AtomicUsize::new(NOWHERE),
        }
    }
}

impl Reader {
    /// A run begins here.
    pub fn begin(&self, offset: u64) {
        self.start.store(offset, Ordering::Relaxed);
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
    flying: Flying,
    /// `None`: it flies.
    memory: Option<AlignedBuf>,
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
    /// [`ReadRun::id`] of whose each is; 0: nobody's. Changed by who has it locked.
    holders: Box<[AtomicUsize]>,
    /// Bytes of pieces that a seat has at most.
    room: u64,
    /// Bytes that were handed out.
    bytes: AtomicU64,
}

impl Readers {
    /// For a cache of so many bytes, and so many bytes read ahead of a reader.
    pub fn new(cache: usize, ahead: u64) -> Readers {
        let all = (cache / SHARE) as u64;
        let wanted = ahead.saturating_add(piece_bytes());
        let seats = tight::limit(((all / wanted) as usize).clamp(1, SEATS), 2);
        let seat = |at| Mutex::keyed(rank::FILE_STREAM, at as u64, Seat::default());
        Readers {
            seats: (0..seats).map(seat).collect(),
            holders: (0..seats).map(|_| AtomicUsize::new(0)).collect(),
            room: wanted
                .min(all)
                .min(PIECES_MAX as u64 * piece_bytes())
                .max(tight::limit(0, 3) as u64 * piece_bytes()),
            bytes: AtomicU64::new(0),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Pieces that seats look at page by page.
    #[cfg(test)]
    pub fn careful(&self) -> usize {
        self.seats.iter().map(|seat| seat.lock().careful).sum()
    }

    /// Seats that are some run's.
    #[cfg(test)]
    pub fn taken(&self) -> usize {
        let holders = self.holders.iter();
        holders.filter(|h| h.load(Ordering::Acquire) != 0).count()
    }

    /// Has all of them locked.
    #[cfg(test)]
    pub fn look_at_all(&self) -> impl Sized + '_ {
        self.seats.iter().map(Mutex::lock).collect::<Vec<_>>()
    }

    /// Whether this run has a seat, and which; it may lose it as long as it has not locked that.
    fn own(&self, run: &ReadRun) -> Option<usize> {
        let at = run.reader.seat.load(Ordering::Relaxed);
        let holder = self.holders.get(at)?.load(Ordering::Acquire);
        (holder == run.id()).then_some(at)
    }

    /// A seat that nobody needs.
    fn take(&self, run: &ReadRun, now_ns: u64, memory: &Bounces) -> Option<MutexGuard<'_, Seat>> {
        for (at, seat) in self.seats.iter().enumerate() {
            let Some(mut seat) = seat.try_lock() else {
                continue;
            };
            let holder = &self.holders[at];
            let idle = holder.load(Ordering::Acquire) == 0 || seat.is_idle(now_ns);
            if idle && seat.is_cleared(memory) {
                // Learnt of another file.
                seat.careful = 0;
                holder.store(run.id(), Ordering::Release);
                run.reader.seat.store(at, Ordering::Relaxed);
                return Some(seat);
            }
        }
        None
    }

    /// A handle is closed: nobody reads through it any more.
    pub fn leave(&self, file: &OpenFile, memory: &Bounces) {
        for run in file.reads.iter() {
            // Of threads that began it at once each may have taken one.
            for (seat, holder) in self.seats.iter().zip(&self.holders) {
                let is_its = || holder.load(Ordering::Acquire) == run.id();
                while is_its() {
                    let Some(mut seat) = seat.try_lock() else {
                        // Others have it locked only to see that it is not free, or else it is theirs before they wait for anything.
                        yield_now();
                        continue;
                    };
                    if is_its() {
                        seat.clear(memory);
                        holder.store(0, Ordering::Release);
                    }
                }
            }
        }
    }
}

impl Seat {
    fn is_idle(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.used_ns) >= IDLE_NS
    }

    /// Lets go of all pieces.
    fn clear(&mut self, memory: &Bounces) {
        if let Some(queues) = &mut self.queues
            && queues.in_flight() > 0
        {
            queues.cancel_all();
        }
        while !self.pieces.is_empty() {
            self.let_go(memory);
        }
        self.refused = None;
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

    /// Lets go of all pieces; false: some still fly.
    fn is_cleared(&mut self, memory: &Bounces) -> bool {
        self.clear(memory);
        let Some(queues) = &mut self.queues else {
            return true;
        };
        queues.reap(&mut self.landed);
        for landed in self.landed.drain(..) {
            memory.give(landed.memory);
        }
        queues.in_flight() == 0
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
            // The end of the file ends no run: who looks for more gets none, and pieces stay what they are.
            return Streamed::Beside;
        }
        let end = offset.saturating_add(buf.len() as u64);
        let now_ns = self.now_ns();
        let seat = match self.readers.own(run) {
            None => self.readers.take(run, now_ns, &self.memory),
            Some(at) => match self.readers.seats[at].try_lock() {
                Some(seat) => self.readers.own(run).map(|_| seat),
                None => return Streamed::Beside,
            },
        };
        let Some(mut seat) = seat else {
            // Soon there may be one.
            run.reader.begin(end.saturating_sub(run_min() / 8 * 7));
            return Streamed::Not;
        };
        if seat.is_idle(now_ns) {
            // Invariant 5.
            seat.clear(&self.memory);
        }
        seat.used_ns = now_ns;
        if run.asked.load(Ordering::Relaxed) * PAGE > offset {
            // What threads bring ahead is handed out first.
            return Streamed::Beside;
        }
        match self.read_pieces(file, offset, buf, &mut seat) {
            Some(len) => {
                self.readers.bytes.fetch_add(len as u64, Ordering::Relaxed);
                Streamed::Read(len)
            }
            None => {
                seat.clear(&self.memory);
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

    fn read_pieces(
        &self,
        file: &OpenFile,
        offset: u64,
        buf: &mut [u8],
        seat: &mut Seat,
    ) -> Option<usize> {
        let size = file.state.size();
        let end = size.min(offset.saturating_add(buf.len() as u64));
        if offset >= end {
            return None;
        }
        while seat.pieces.front().is_some_and(|p| p.bytes.end <= offset) {
            seat.let_go(&self.memory);
        }
        if seat.pieces.front().is_some_and(|p| p.bytes.start > offset) {
            seat.clear(&self.memory);
        }
        let first = seat.end().unwrap_or(offset / PAGE * PAGE);
        if seat.refused.is_some_and(|at| at < end) {
            seat.refused = None;
        }
        self.begin_pieces(file, first, offset, seat);
        if seat.end().is_none_or(|last| last < end) {
            return None;
        }
        let beside = self.cleaning.beside_read();
        let needed = seat
            .pieces
            .iter()
            .position(|piece| piece.bytes.end >= end)?
            + 1;
        self.wait_for(seat, needed)?;
        drop(beside);
        let mut at = offset;
        for piece in seat.pieces.iter().take(needed) {
            let stop = end.min(piece.bytes.end);
            let out = &mut buf[(at - offset) as usize..(stop - offset) as usize];
            self.hand_out(file, piece, at, out)?;
            at = stop;
        }
        // All of them now: they were the file's at one moment.
        let mut at = offset;
        for piece in seat.pieces.iter().take(needed) {
            let stop = end.min(piece.bytes.end);
            let memory = piece.memory.as_ref()?;
            if !self.stands(file, &piece.flying, &pages_of(at..stop), memory) {
                return None;
            }
            at = stop;
        }
        // It has been this size all the time: a change counts as an exclusive one, which the pieces would have met.
        if file.state.size() != size || self.note_read(file).is_err() {
            return None;
        }
        Some((end - offset) as usize)
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
                moves::copy(&memory[first..first + here.len()], here);
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
        while next < size.min(last) && seat.refused.is_none() && seat.pieces.len() < PIECES_MAX {
            let end = (next + piece_bytes()).min(size);
            // A piece is begun as a whole.
            if end > last && !seat.pieces.is_empty() {
                break;
            }
            match self.begin_piece(file, next..end, seat) {
                Some(()) => (next, begun) = (end, true),
                None => seat.refused = Some(next),
            }
        }
        if begun && let Some(queues) = &mut seat.queues {
            queues.ring();
        }
    }

    fn begin_piece(&self, file: &OpenFile, bytes: Range<u64>, seat: &mut Seat) -> Option<()> {
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
            bytes,
            flying,
            memory: piece?,
        });
        Some(())
    }

    /// Waits until the first so many pieces are there. `None`: one has failed.
    fn wait_for(&self, seat: &mut Seat, needed: usize) -> Option<()> {
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
            if seat.pieces.iter().take(needed).all(|p| p.memory.is_some()) {
                return Some(());
            }
            seat.queues.as_mut()?.wait(None, None);
        }
    }
}

//! Long reads of files that the cache cannot keep: what comes next is brought while the program has what came before, into memory of
//! the stream's own, and handed out from there.
//!
//! Why. Through the cache each page takes a place from another, is looked up, filled apart from its neighbours and published, and by the time that the
//! file's end is read its beginning has gone: who reads it again finds nothing, and nobody finds what was there before.
//!
//! A handle whose reads went on where they stopped for [`RUN_MIN`] gets a *seat*: queues to the devices, and the pieces that they bring, in the order of
//! the file. Each of its reads begins as many pieces as are read ahead, waits for those that it needs, copies out of them, and asks whether that is what
//! the file holds.
//!
//! Invariants:
//! 1. A piece is a read in flight ([`flight`](super::super::flight)): it holds nothing that anybody waits for, and counts only as far as it stands when it is
//!    handed out. Of the pages that a read hands out, all were what the file held at one moment of the read: the later one of its beginning and of the youngest
//!    piece's, since all pieces are asked after both.
//! 2. A piece brings the pages that were not cached when it began. The others are read from the cache when they are handed out; one that has left it by
//!    then is missing.
//! 3. A read is handed out by pieces as a whole, or not by them at all: where a piece has failed, is over, or is missing, it goes through the cache, and its error is
//!    told there, and so do the next ones, for half of [`RUN_MIN`].
//! 4. There are [`SEATS`] at most, and all pieces together are no more than one part in [`SHARE`] of the cache. A seat is its handle's until that is closed, or has not
//!    read for [`IDLE_NS`] while somebody else wants one; with something in flight it is nobody else's.

use super::super::advice::Advice;
use super::super::file::OpenFile;
use super::super::flight::{Began, Flying};
use super::super::{Files, KEPT_SHARE, PAGE, pages_of};
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::sync::{Mutex, MutexGuard, rank};
use base::tight;
use device::{AlignedBuf, Array, Flight, Kind, Landed, Queues, Run};
use format::BLOCK_SIZE;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a request at least.
const REQUEST_MIN: usize = 64 << 10;
/// Bytes of a run that go through the cache first.
const RUN_MIN: usize = 8 << 20;
/// Bytes that one flight reads.
const PIECE: usize = 1 << 20;
const SEATS: usize = 8;
const SHARE: usize = KEPT_SHARE;
const IDLE_NS: u64 = 1_000_000_000;
/// Pieces of a seat at most.
const PIECES_MAX: usize = 16;
/// Parts that each device has of a seat at a time.
const DEVICE_DEPTH: usize = 64;
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

/// What an open file knows of its reader.
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
    /// [`OpenFile::id`] of whose it is; 0: nobody's.
    holder: usize,
    used_ns: u64,
    queues: Option<Queues>,
    /// One behind the other.
    pieces: VecDeque<Piece>,
    numbers: u64,
    /// Kept for their memory.
    landed: Vec<Landed>,
    runs: Vec<Run>,
    spare: Vec<Flying>,
}

/// The seats of a file system.
pub(in super::super) struct Readers {
    seats: Box<[Mutex<Seat>]>,
    /// Bytes of pieces that a seat has at most.
    room: u64,
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
        Readers {
            seats: (0..seats).map(seat).collect(),
            room: wanted
                .min(all)
                .max(tight::limit(0, 3) as u64 * piece_bytes()),
            bytes: AtomicU64::new(0),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The seat that this handle has, if nobody else uses the handle.
    fn own(&self, file: &OpenFile) -> Option<MutexGuard<'_, Seat>> {
        let seat = self.seats.get(file.reader.seat.load(Ordering::Relaxed))?;
        let seat = seat.try_lock()?;
        (seat.holder == file.id()).then_some(seat)
    }

    /// A seat that nobody needs.
    fn take(&self, file: &OpenFile, now_ns: u64) -> Option<MutexGuard<'_, Seat>> {
        for (at, seat) in self.seats.iter().enumerate() {
            let Some(mut seat) = seat.try_lock() else {
                continue;
            };
            let idle = seat.holder == 0 || now_ns.saturating_sub(seat.used_ns) >= IDLE_NS;
            if idle && seat.is_cleared() {
                seat.holder = file.id();
                file.reader.seat.store(at, Ordering::Relaxed);
                return Some(seat);
            }
        }
        None
    }

    /// A handle is closed.
    pub fn leave(&self, file: &OpenFile) {
        // Who looks whether it is free finds out later that it is.
        if let Some(mut seat) = self.own(file) {
            seat.clear();
            seat.holder = 0;
        }
    }
}

impl Seat {
    /// Lets go of all pieces.
    fn clear(&mut self) {
        if let Some(queues) = &mut self.queues
            && queues.in_flight() > 0
        {
            queues.cancel_all();
        }
        self.spare
            .extend(self.pieces.drain(..).map(|piece| piece.flying));
        self.spare.truncate(PIECES_MAX);
    }

    /// Lets go of all pieces; false: some still fly.
    fn is_cleared(&mut self) -> bool {
        self.clear();
        let Some(queues) = &mut self.queues else {
            return true;
        };
        queues.reap(&mut self.landed);
        self.landed.clear();
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
    /// Reads past the cache what [`is_stream`](Self::is_stream). `None`: nothing is read.
    pub(in super::super) fn read_stream(
        &self,
        file: &OpenFile,
        offset: u64,
        buf: &mut [u8],
    ) -> Option<usize> {
        if file.asked.load(Ordering::Relaxed) * PAGE > offset {
            // What threads bring ahead is handed out first.
            return None;
        }
        let now_ns = self.now_ns();
        let mut seat = self
            .readers
            .own(file)
            .or_else(|| self.readers.take(file, now_ns))?;
        seat.used_ns = now_ns;
        let len = self.read_pieces(file, offset, buf, &mut seat);
        match len {
            Some(len) => {
                self.readers.bytes.fetch_add(len as u64, Ordering::Relaxed);
            }
            None => {
                seat.clear();
                let end = offset + buf.len() as u64;
                file.reader.begin(end.saturating_sub(run_min() / 2));
            }
        }
        len
    }

    /// Whether a read that goes on where the last one ended is one of a long run. What it needs may still be on its way into the cache.
    pub(in super::super) fn is_stream(&self, file: &OpenFile, offset: u64, len: usize) -> bool {
        let run = offset.saturating_sub(file.reader.start.load(Ordering::Relaxed));
        if len < request_min() || run < run_min() {
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
            self.let_go(seat);
        }
        if seat.pieces.front().is_some_and(|p| p.bytes.start > offset) {
            seat.clear();
        }
        let first = seat.end().unwrap_or(offset / PAGE * PAGE);
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
        while next < size && next < last && seat.pieces.len() < PIECES_MAX {
            let end = (next + piece_bytes()).min(size);
            // A piece is begun as a whole.
            if end > last && !seat.pieces.is_empty() {
                break;
            }
            if self.begin_piece(file, next..end, seat).is_none() {
                break;
            }
            (next, begun) = (end, true);
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
        let piece = &mut memory[..len];
        let began = self.begin_read(file, bytes.start, piece, &mut flying, &mut runs);
        let number = seat.numbers;
        seat.numbers += 1;
        let piece = match began {
            Ok(Began::Done(_)) => Some(Some(memory)),
            Ok(Began::Flies) => {
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
            Ok(Began::Waits) | Err(_) => {
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

    /// The first piece has been handed out.
    fn let_go(&self, seat: &mut Seat) {
        if let Some(piece) = seat.pieces.pop_front() {
            if let Some(memory) = piece.memory {
                self.memory.give(memory);
            }
            seat.spare.push(piece.flying);
        }
    }
}

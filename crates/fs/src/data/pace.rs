//! The pace of write-back beside syncs: no sync waits for more of other files' data than one piece of it.
//!
//! Why. A device has one queue, and its flush brings home all that was written before it. A sync's write and its flush come
//! behind whatever write-back has given the device by then: a batch of 4 MiB, several of them from several threads, and in
//! the flush all that was written since the last one, however long ago that was.
//!
//! Owns whose turn it is to write, and how much was written in turns that no flush has brought home.
//!
//! A sync is *small* if all that its file has to write is one piece or less, and one record's. The pace is kept for
//! [`RECENT_NS`] after the last one began: between two syncs of one program there are moments without any.
//!
//! Invariants, while the pace is kept:
//! 1. All data that the page cache writes is written in turns, one piece in a turn, but that of small syncs. So of all files
//!    and threads together no more than one piece is on its way to the devices: who writes back on a timer, because the
//!    cache is full, because somebody hinted at it, or for a large sync.
//! 2. When [`UNFLUSHED_MAX`] bytes have been written in turns, and no sync has flushed them, the devices are flushed before the turn
//!    ends. So a sync's flush finds no more than that and one piece, however rarely there is one.
//! 3. A small sync takes no turn, and no lock that is held in a turn but those of its own file: it waits for a turn only if write-back
//!    has its own file in hands. A direct write takes none either: its program waits for it, and chose how much it writes at a time.
//! 4. A write to a file with little to write makes no room for all, as long as there is room.
//! 5. A thread that has copied [`COPIED_MAX`] bytes into the cache offers its CPU to others ([`Files::give_way`]). It blocks for nothing while there is room, and
//!    a thread that is woken on its CPU, who syncs or the kernel's that serves the device, would wait for the next tick of the kernel's scheduler: for up
//!    to 4 ms at 250 ticks a second, while the device is idle.
//!
//! Otherwise a batch is given to the devices at once, and nobody flushes for its sake. A batch on its way when the first small sync
//! begins is not called back.
//!
//! What it costs: one piece at a time keeps a device with a long queue less busy, and a flush for each `UNFLUSHED_MAX` bytes
//! stops writing as long as it takes. Who offers its CPU gives away what is left of its turn on it, where others want one; beside programs that
//! compute all the time the writer was no slower by that.

use super::Files;
use base::atomic::{AtomicU64, Ordering};
use base::sync::{Mutex, MutexGuard, rank};
use base::{thread, tight};
use device::Io;
use format::BLOCK_SIZE;
use std::cell::Cell;

/// Pages of one piece: 256 KiB.
const PIECE_PAGES: usize = 64;
/// Bytes written in turns between two flushes.
const UNFLUSHED_MAX: u64 = 1 << 20;
/// Bytes that a thread copies into the cache, some 0.3 ms, before it offers its CPU.
const COPIED_MAX: usize = 1 << 20;
/// How long a small sync is remembered. Programs that sync once a second are those that sync.
const RECENT_NS: u64 = 2_000_000_000;
/// How old what is remembered may be before it is noted anew: syncs of many cores write no line of memory each.
const STALE_NS: u64 = RECENT_NS / 16;

thread_local! {
    /// Bytes that this thread has copied since it last might have offered its CPU.
    static COPIED: Cell<usize> = const { Cell::new(0) };
}

/// Pages of one piece at most.
pub(super) fn piece_pages() -> usize {
    tight::limit(PIECE_PAGES, 2)
}

fn unflushed_max() -> u64 {
    tight::limit(UNFLUSHED_MAX as usize, 16 * BLOCK_SIZE) as u64
}

#[derive(Debug)]
pub(super) struct Pace {
    /// When a small sync was last seen, or a little before; 0: never. A hint.
    synced_ns: AtomicU64,
    /// Held in a turn.
    turn: Mutex<()>,
    /// Bytes written in turns, and those of them that a flush has brought home that began after them.
    written: AtomicU64,
    home: AtomicU64,
}

impl Pace {
    pub fn new() -> Pace {
        Pace {
            synced_ns: AtomicU64::new(0),
            turn: Mutex::new(rank::FILE_TURN, ()),
            written: AtomicU64::new(0),
            home: AtomicU64::new(0),
        }
    }

    /// A small sync begins.
    pub fn note_sync(&self, now_ns: u64) {
        let noted = self.synced_ns.load(Ordering::Relaxed);
        if noted == 0 || now_ns.saturating_sub(noted) >= STALE_NS {
            self.synced_ns.store(now_ns.max(1), Ordering::Relaxed);
        }
    }

    /// Whether the pace is kept.
    pub fn is_kept(&self, now_ns: u64) -> bool {
        let noted = self.synced_ns.load(Ordering::Relaxed);
        noted != 0 && now_ns.saturating_sub(noted) < RECENT_NS
    }

    /// Bytes that a flush which begins now will bring home.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// A flush of all devices has succeeded that began when so much was [`written`](Self::written).
    pub fn flushed(&self, written: u64) {
        // Most syncs have nobody to flush for, and write nothing here.
        if self.home.load(Ordering::Relaxed) < written {
            self.home.fetch_max(written, Ordering::Relaxed);
        }
    }

    fn is_flush_due(&self) -> bool {
        let home = self.home.load(Ordering::Relaxed);
        self.written().saturating_sub(home) >= unflushed_max()
    }

    /// A turn, for who holds what others wait for. `None`: it is somebody else's.
    pub fn try_turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.turn.try_lock()
    }

    /// Whether it is somebody's turn.
    #[cfg(test)]
    pub fn is_taken(&self) -> bool {
        self.turn.try_lock().is_none()
    }
}

impl Files {
    /// Whether write-back keeps the pace.
    pub(super) fn keeps_pace(&self) -> bool {
        self.pace.is_kept(self.now_ns())
    }

    /// The calling thread has copied so many bytes more into the cache, and holds no lock; returns whether it has let others go first. The
    /// seeded scheduler decides by itself who does.
    pub(super) fn give_way(&self, bytes: usize) -> bool {
        let copied = COPIED.get().saturating_add(bytes);
        let is_due = copied >= COPIED_MAX;
        COPIED.set(if is_due { 0 } else { copied });
        let gives = is_due && !thread::is_scheduled() && self.keeps_pace();
        if gives {
            thread::yield_now();
        }
        gives
    }

    /// Writes what no small sync waits for: at once, or in turns.
    pub(super) fn write_at_pace(&self, ios: &mut [Io<'_>]) -> Result<(), engine::Error> {
        let array = self.store.array();
        if !self.keeps_pace() {
            return Ok(array.execute(ios)?);
        }
        for mut piece in pieces(ios, piece_pages() * BLOCK_SIZE) {
            let turn = self.pace.turn.lock();
            self.write_in_turn(&turn, &mut piece)?;
        }
        Ok(())
    }

    /// Writes one piece, and flushes if that is due.
    pub(super) fn write_in_turn(
        &self,
        _turn: &MutexGuard<'_, ()>,
        piece: &mut [Io<'_>],
    ) -> Result<(), engine::Error> {
        let outcome = self.store.array().execute(piece);
        let bytes = piece.iter().map(Io::bytes).sum::<u64>();
        self.pace.written.fetch_add(bytes, Ordering::Release);
        outcome?;
        if self.pace.is_flush_due() {
            // Others' writes may be lost if it fails: they see that by the array's count of failures (R17).
            self.flush_counted()?;
        }
        Ok(())
    }

    /// A commit has ended: where there is one device, its flush is in that.
    pub(super) fn flushed_one(&self, written: u64) {
        if self.store.array().devices().count() == 1 {
            self.pace.flushed(written);
        }
    }

    /// Flushes all devices, with what was written in turns.
    pub(super) fn flush_counted(&self) -> Result<(), engine::Error> {
        let written = self.pace.written();
        self.store.flush()?;
        self.pace.flushed(written);
        Ok(())
    }
}

/// Writes, cut and put together to as many bytes at a time, in their order.
fn pieces<'a>(ios: &[Io<'a>], most: usize) -> Vec<Vec<Io<'a>>> {
    let mut pieces = Vec::new();
    let (mut piece, mut room) = (Vec::new(), most);
    for io in ios {
        let Io::Write {
            byte,
            buf,
            durability,
        } = io
        else {
            continue;
        };
        let (mut byte, mut rest) = (*byte, *buf);
        while !rest.is_empty() {
            let (buf, behind) = rest.split_at(rest.len().min(room));
            piece.push(Io::Write {
                byte,
                buf,
                durability: *durability,
            });
            (byte, rest, room) = (byte + buf.len() as u64, behind, room - buf.len());
            if room == 0 {
                pieces.push(std::mem::take(&mut piece));
                room = most;
            }
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

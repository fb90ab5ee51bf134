//! Ranges of pages that are written, or read as one: those that overlap have their turns, all others run beside each other.
//!
//! Owns, for all files, who holds which pages and who waits for some.
//!
//! The file's I/O lock stays what it was: exclusive for what changes size or mapping, shared for the rest. A range is held
//! *beside* the shared lock, by what is more than one step for others:
//!
//! | conflicts | Load | Store | Direct | Home |
//! |---|---|---|---|---|
//! | Load: a read that must see all of a write or nothing | – | yes | yes | – |
//! | Store: a write into the cache | | yes | yes | – (stamps) |
//! | Direct: a write past the cache | | | yes | yes |
//! | Home: write-back | | | | yes |
//!
//! Reads, and writes of one page, hold none unless [`gate`](super::gate) says that they meet a Store or a Direct.
//!
//! Invariants:
//! 1. A range is held when no earlier one, held or waited for, conflicts with it: first come, first served, where ranges overlap;
//!    elsewhere nobody waits. So nobody starves.
//! 2. A range is waited for before the file's I/O lock is taken, after its write-back turn; under an I/O lock it is only tried. Else
//!    there is a circle: a writer with the shared lock waits for the range of another, which waits for the lock behind one who wants
//!    it exclusively, who waits for the first.
//! 3. What a range is held for is done under the shared I/O lock, or under the exclusive one; or begun so, by the devices. So who has the lock exclusively,
//!    and has waited until nothing is in flight, is alone and needs no range; who has a range and waits for the lock is met by nobody at work.
//! 4. Who waits for a range holds none.
//! 5. A range may be held by a write in flight, which no thread waits for. Who waits behind one does what is left of it, if the
//!    devices have done their part ([`flight`](super::flight)).
//! 6. Who reads beside writes, and holds no range, asks afterwards whether one that overlaps was at it ([`Ranges::is_apart`]): that is
//!    held still, or has left since: for each piece of a file, by a hash, a table knows which write of it left last.
//!
//! Checked by `model/`.

use base::atomic::{AtomicU32, Ordering};
use base::canary::{Canary, planted};
use base::sync::{Condvar, Mutex, MutexGuard, assert_none_held_from, rank};
use std::ops::Range;
use std::time::Duration;

/// Tables for each core. Files share them; one has as many entries as threads are at work and writes in flight, and all of it is looked at.
const TABLES: usize = 16;
/// Pages of a piece, and places for pieces of which a write has left. Pieces that share one only make a read begin again.
const PIECE: u64 = 16;
const PIECES: usize = 8192;
/// How long who waits for a write in flight leaves it to its owner before looking at it again.
const PATIENCE: Duration = Duration::from_micros(200);

/// What a range is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Load,
    Store,
    Direct,
    Home,
}

impl Mode {
    pub fn conflicts(self, other: Mode) -> bool {
        use Mode::{Direct, Home, Load, Store};
        match (self, other) {
            (Load, Load | Home) | (Home, Load) => false,
            (Store, Home) | (Home, Store) => false,
            (Direct, Home) | (Home, Direct) => !planted(Canary::DirectUnderHome),
            _ => true,
        }
    }
}

#[derive(Debug)]
struct Entry {
    file: u64,
    pages: Range<u64>,
    mode: Mode,
    ticket: u64,
    /// No thread waits for what it is held for.
    flies: bool,
}

impl Entry {
    fn overlaps(&self, file: u64, pages: &Range<u64>) -> bool {
        self.file == file && self.pages.start.max(pages.start) < self.pages.end.min(pages.end)
    }

    fn conflicts(&self, other: &Entry) -> bool {
        self.overlaps(other.file, &other.pages) && self.mode.conflicts(other.mode)
    }
}

/// Held ranges and those waited for, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: Vec<Entry>,
    next: u64,
    /// Waiters that have no entry.
    waiting: usize,
    /// Which write of a piece has left last, by a count that goes round after 2^32: none takes so long. Empty before the first.
    left: Vec<u32>,
    /// Writes that have left.
    gone: u32,
}

impl Table {
    /// Enters a range behind all others; returns its ticket.
    pub fn enter(&mut self, file: u64, pages: Range<u64>, mode: Mode) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.entries.push(Entry {
            file,
            pages,
            mode,
            ticket,
            flies: false,
        });
        ticket
    }

    /// Invariant 1.
    pub fn is_held(&self, ticket: u64) -> bool {
        let Some(at) = self.entries.iter().position(|e| e.ticket == ticket) else {
            return false;
        };
        let (earlier, rest) = self.entries.split_at(at);
        !earlier.iter().any(|other| other.conflicts(&rest[0]))
    }

    /// As [`enter`](Self::enter), if the range is held then.
    fn try_enter(&mut self, file: u64, pages: Range<u64>, mode: Mode, flies: bool) -> Option<u64> {
        let ticket = self.next;
        let entry = Entry {
            file,
            pages,
            mode,
            ticket,
            flies,
        };
        if self.entries.iter().any(|other| other.conflicts(&entry)) {
            return None;
        }
        self.next += 1;
        self.entries.push(entry);
        Some(ticket)
    }

    /// Whether one of those it waits for is a write in flight.
    fn is_behind_flight(&self, ticket: u64) -> bool {
        let Some(mine) = self.entries.iter().find(|e| e.ticket == ticket) else {
            return false;
        };
        let mut earlier = self.entries.iter().take_while(|e| e.ticket != ticket);
        earlier.any(|other| other.flies && other.conflicts(mine))
    }

    /// True: somebody may have waited for that.
    pub fn leave(&mut self, ticket: u64) -> bool {
        let Some(at) = self.entries.iter().position(|e| e.ticket == ticket) else {
            return false;
        };
        let gone = self.entries.remove(at);
        if matches!(gone.mode, Mode::Store | Mode::Direct) {
            self.remember(gone.file, &gone.pages);
        }
        self.waiting > 0 || self.entries[at..].iter().any(|e| e.conflicts(&gone))
    }

    fn remember(&mut self, file: u64, pages: &Range<u64>) {
        self.gone = self.gone.wrapping_add(1);
        if self.left.is_empty() {
            self.left = vec![self.gone.wrapping_sub(1); PIECES];
        }
        for place in places_of(file, pages) {
            self.left[place] = self.gone;
        }
    }

    /// No write of these pages is held, or waited for, and none has left since so many had.
    fn is_apart(&self, file: u64, pages: &Range<u64>, since: u32) -> bool {
        let mut writes = (self.entries.iter()).filter(|e| e.mode.conflicts(Mode::Load));
        let is_later = |place: usize| self.left[place].wrapping_sub(since).cast_signed() > 0;
        !writes.any(|e| e.overlaps(file, pages))
            && (self.left.is_empty() || !places_of(file, pages).any(is_later))
    }
}

/// Where it is noted which writes of these pages have left; each place at most once.
fn places_of(file: u64, pages: &Range<u64>) -> impl Iterator<Item = usize> {
    let pieces = pages.start / PIECE..pages.end.div_ceil(PIECE);
    let first = file.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    let pieces = pieces.start..pieces.end.min(pieces.start + PIECES as u64);
    pieces.map(move |piece| (first.wrapping_add(piece) % PIECES as u64) as usize)
}

/// On lines of its own.
#[repr(align(128))]
#[derive(Debug)]
struct Shard {
    table: Mutex<Table>,
    /// Somebody has left.
    news: Condvar,
    /// The table's count of writes that have left; changed under its lock.
    gone: AtomicU32,
}

impl Shard {
    fn leave(&self, ticket: u64) {
        let mut table = self.table.lock();
        let before = table.gone;
        let awaited = table.leave(ticket);
        if table.gone != before {
            self.gone.store(table.gone, Ordering::Release);
        }
        drop(table);
        if awaited {
            self.news.notify_all();
        }
    }

    /// Until `done`, for who may have to wait for a write in flight: has it ended by `help`, which takes no table's lock before it is
    /// let go.
    fn wait_helping<'a>(
        &'a self,
        mut table: MutexGuard<'a, Table>,
        help: &impl Fn(),
        done: impl Fn(&Table) -> bool,
    ) -> MutexGuard<'a, Table> {
        loop {
            drop(table);
            help();
            table = self.table.lock();
            table.waiting += 1;
            let mut late = false;
            while !done(&table) && !late {
                late = self.news.wait_for(&mut table, PATIENCE);
            }
            table.waiting -= 1;
            if done(&table) {
                return table;
            }
        }
    }
}

/// A moment, for [`Ranges::is_apart`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment(u32);

#[derive(Debug)]
pub(super) struct Ranges(Box<[Shard]>);

/// A range that is held, until it is dropped.
#[derive(Debug)]
pub(super) struct Held<'a> {
    shard: &'a Shard,
    ticket: u64,
}

impl Ranges {
    /// Ranges of so many cores' threads.
    pub fn new(cores: usize) -> Ranges {
        let shard = |i| Shard {
            table: Mutex::keyed(rank::FILE_RANGES, i as u64, Table::default()),
            news: Condvar::new(),
            gone: AtomicU32::new(0),
        };
        Ranges((0..cores * TABLES).map(shard).collect())
    }

    fn shard(&self, file: u64) -> &Shard {
        let hash = file.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        &self.0[hash as usize % self.0.len()]
    }

    /// Waits until these pages of a file are held. The caller holds neither an I/O lock nor a range (invariants 2 and 4). `help` ends
    /// writes in flight, as far as that needs no wait.
    pub fn hold(&self, file: u64, pages: Range<u64>, mode: Mode, help: impl Fn()) -> Held<'_> {
        assert_none_held_from(rank::FILE_IO);
        let shard = self.shard(file);
        let mut table = shard.table.lock();
        let ticket = table.enter(file, pages, mode);
        // Left also by who does not come out of `help`.
        let held = Held { shard, ticket };
        while !table.is_held(ticket) && !planted(Canary::RangeIgnored) {
            if table.is_behind_flight(ticket) {
                let may_go_on = |table: &Table| !table.is_behind_flight(ticket);
                table = shard.wait_helping(table, &help, may_go_on);
            } else {
                shard.news.wait(&mut table);
            }
        }
        held
    }

    /// `None`: there would be a wait.
    pub fn try_hold(&self, file: u64, pages: Range<u64>, mode: Mode) -> Option<Held<'_>> {
        let shard = self.shard(file);
        let ticket = shard.table.lock().try_enter(file, pages, mode, false)?;
        Some(Held { shard, ticket })
    }

    /// As [`try_hold`](Self::try_hold) for a write in flight, until [`land`](Self::land) is told of the ticket.
    pub fn try_fly(&self, file: u64, pages: Range<u64>) -> Option<u64> {
        let mut table = self.shard(file).table.lock();
        table.try_enter(file, pages, Mode::Direct, true)
    }

    pub fn land(&self, file: u64, ticket: u64) {
        self.shard(file).leave(ticket);
    }

    /// Waits, with `help` as in [`hold`](Self::hold), until `landed`, which becomes true before somebody [lands](Self::land).
    pub fn wait_landed(&self, file: u64, help: impl Fn(), landed: impl Fn() -> bool) {
        let shard = self.shard(file);
        drop(shard.wait_helping(shard.table.lock(), &help, |_| landed()));
    }

    /// For [`is_apart`](Self::is_apart), before anything of the file is looked at.
    pub fn moment(&self, file: u64) -> Moment {
        Moment(self.shard(file).gone.load(Ordering::Acquire))
    }

    /// Whether no write that holds a range was at these pages since then. May be false though none was.
    pub fn is_apart(&self, file: u64, pages: &Range<u64>, Moment(since): Moment) -> bool {
        let shard = self.shard(file);
        shard.table.lock().is_apart(file, pages, since)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.shard.leave(self.ticket);
    }
}

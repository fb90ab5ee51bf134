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
//! 3. What a range is held for is done under the shared I/O lock, or under the exclusive one. So who has the lock exclusively is alone,
//!    and needs no range; who has a range and waits for the lock is met by nobody at work.
//! 4. Who waits for a range holds none.
//!
//! Checked by `model/`.

use base::canary::{Canary, planted};
use base::sync::{Condvar, Mutex, assert_none_held_from, rank};
use std::ops::Range;

/// Tables for each core. Files share them; one has as many entries as threads are at work, so all of it is looked at.
const TABLES: usize = 16;

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
}

impl Entry {
    fn conflicts(&self, other: &Entry) -> bool {
        self.file == other.file
            && self.pages.start.max(other.pages.start) < self.pages.end.min(other.pages.end)
            && self.mode.conflicts(other.mode)
    }
}

/// Held ranges and those waited for, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: Vec<Entry>,
    next: u64,
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

    pub fn leave(&mut self, ticket: u64) {
        self.entries.retain(|e| e.ticket != ticket);
    }
}

/// On lines of its own.
#[repr(align(128))]
#[derive(Debug)]
struct Shard {
    table: Mutex<Table>,
    /// Somebody has left.
    news: Condvar,
}

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
        };
        Ranges((0..cores * TABLES).map(shard).collect())
    }

    fn shard(&self, file: u64) -> &Shard {
        let hash = file.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        &self.0[hash as usize % self.0.len()]
    }

    /// Waits until these pages of a file are held. The caller holds neither an I/O lock nor a range (invariants 2 and 4).
    pub fn hold(&self, file: u64, pages: Range<u64>, mode: Mode) -> Held<'_> {
        assert_none_held_from(rank::FILE_IO);
        let shard = self.shard(file);
        let mut table = shard.table.lock();
        let ticket = table.enter(file, pages, mode);
        while !table.is_held(ticket) && !planted(Canary::RangeIgnored) {
            shard.news.wait(&mut table);
        }
        Held { shard, ticket }
    }

    /// `None`: there would be a wait.
    pub fn try_hold(&self, file: u64, pages: Range<u64>, mode: Mode) -> Option<Held<'_>> {
        let shard = self.shard(file);
        let mut table = shard.table.lock();
        let ticket = table.enter(file, pages, mode);
        if !table.is_held(ticket) {
            table.leave(ticket);
            return None;
        }
        Some(Held { shard, ticket })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.shard.table.lock().leave(self.ticket);
        self.shard.news.notify_all();
    }
}

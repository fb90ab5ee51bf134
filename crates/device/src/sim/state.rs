//! What a device holds, and what an operation does to it.

use super::SECTOR;
use super::cached::Cached;
use super::faults::{FaultKind, Faults, Struck, is_no_power, medium_error, no_power, strikes};
use super::pages::{PAGE, Pages, any_in, load, page_mut, store};
use super::power::Power;
use crate::block::Durability;
use base::rng::Rng;
use std::io;
use std::ops::Range;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(super) struct State {
    /// What survives a power cut for certain.
    pub durable: Pages,
    /// What reads see.
    pub current: Pages,
    pub cached: Vec<Cached>,
    /// Writes that somebody has in flight, by marks of their own: any part of each may have happened.
    pub in_hand: Vec<(u64, Cached)>,
    /// Marks that were given.
    marks: u64,
    /// Flushes that were begun.
    flushes: u64,
    /// Decides what a failed operation leaves, and what a discard does.
    pub rng: Rng,
    /// Decides which faults strike by themselves, and where.
    pub fortune: Rng,
    pub faults: Faults,
    /// It was a flush that failed with the last write, which works when it is tried again.
    flush_failed: bool,
    pub struck: Vec<Struck>,
    /// Another device has taken this one's place.
    pub retired: bool,
    pub io_count: u64,
    /// Running hash of all operations and their outcomes.
    pub trace: u64,
    /// Operations that wait for a stuck device.
    pub waiting: u64,
}

impl State {
    pub fn new(seed: u64) -> State {
        State {
            durable: Pages::new(),
            current: Pages::new(),
            cached: Vec::new(),
            in_hand: Vec::new(),
            marks: 0,
            flushes: 0,
            rng: Rng::new(seed),
            fortune: Rng::new(!seed),
            faults: Faults::default(),
            flush_failed: false,
            struck: Vec::new(),
            retired: false,
            io_count: 0,
            trace: 0,
            waiting: 0,
        }
    }

    pub fn set_contents(&mut self, pages: Pages) {
        self.current = pages.clone();
        self.durable = pages;
        self.cached.clear();
        self.in_hand.clear();
    }

    /// The writes that a power cut could lose now, oldest first.
    pub fn volatile(&self) -> impl Iterator<Item = &Cached> {
        self.cached
            .iter()
            .chain(self.in_hand.iter().map(|(_, write)| write))
    }

    /// Nobody will reap what is in hand: of each write any sectors happen now, or none.
    pub fn let_go(&mut self) {
        for (_, write) in std::mem::take(&mut self.in_hand) {
            self.write_in_part(write.offset, &write.bytes);
        }
    }

    /// Somebody has this write in flight from now on.
    pub fn take_in_hand(&mut self, offset: u64, bytes: &[u8]) -> u64 {
        self.marks += 1;
        let write = Cached::new(offset, bytes.into());
        self.in_hand.push((self.marks, write));
        self.marks
    }

    /// It was performed, with this result.
    pub fn performed(&mut self, mark: u64, result: &io::Result<()>) {
        let write = self.in_hand.extract_if(.., |(other, _)| *other == mark);
        let write = write.map(|(_, write)| write).next();
        // The power had gone before: it was under way then.
        if let Some(write) = write
            && result.as_ref().is_err_and(is_no_power)
        {
            self.cache(write.offset, &write.bytes);
        }
    }

    /// A write that reads see, and that a power cut may lose.
    pub fn cache(&mut self, offset: u64, bytes: &[u8]) {
        self.cache_in_part(offset, bytes);
        if let Some(write) = self.cached.last_mut() {
            write.in_part = false;
        }
    }

    /// The same of a sector of a write that failed.
    fn cache_in_part(&mut self, offset: u64, bytes: &[u8]) {
        store(&mut self.current, offset, bytes);
        self.keep(offset, bytes.into(), None);
        if let Some(write) = self.cached.last_mut() {
            write.in_part = true;
        }
    }

    fn keep(&mut self, offset: u64, bytes: Arc<[u8]>, behind: Option<u64>) {
        let before = self.flushes;
        self.cached.push(Cached {
            before,
            behind,
            ..Cached::new(offset, bytes)
        });
    }

    /// A flush is begun, which has this number: what completes from now on is none of its business.
    pub fn begin_flush(&mut self) -> u64 {
        self.flushes += 1;
        self.flushes
    }

    /// One in `odds` times; never when that is 0.
    fn chance(&mut self, odds: u64) -> bool {
        odds > 0 && self.fortune.one_in(odds)
    }

    fn note(&mut self, kind: FaultKind, range: Range<u64>) {
        let operation = self.io_count;
        self.struck.push(Struck {
            operation,
            kind,
            range,
        });
    }

    pub fn read(&mut self, offset: u64, buf: &mut [u8], power: Power) -> io::Result<()> {
        let range = offset..offset + buf.len() as u64;
        let odds = self.faults.odds;
        if self.chance(odds.latent_error) {
            self.faults.bad.insert(offset / SECTOR as u64);
        }
        let failed = strikes(&mut self.faults.reads, &range)
            || power == Power::Failing
            || self.chance(odds.read_error)
            || self.faults.bad.range(sectors(&range)).next().is_some();
        if failed {
            self.note(FaultKind::ReadError, range);
            return Err(medium_error());
        }
        load(&self.current, offset, buf);
        Ok(())
    }

    /// `behind`: if it is durable it is not forced, and [`flush_behind`](Self::flush_behind) of this number follows.
    pub fn write(
        &mut self,
        (offset, buf): (u64, &[u8]),
        durability: Durability,
        behind: Option<u64>,
        power: Power,
    ) -> io::Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        let range = offset..offset + buf.len() as u64;
        let odds = self.faults.odds;
        let asked = strikes(&mut self.faults.writes, &range);
        let failed = asked || power == Power::Failing || self.chance(odds.write_error);
        let after_flush = std::mem::take(&mut self.flush_failed);
        if failed && (asked || !after_flush) {
            self.note(FaultKind::WriteError, range);
            if !asked && durability == Durability::Durable && self.rng.one_in(2) {
                self.flush_failed = true;
                self.put((offset, buf), Durability::Volatile, None, Power::On)?;
                self.doom();
            } else {
                self.write_in_part(offset, buf);
            }
            return Err(medium_error());
        }
        let power = match power {
            // It works, whatever the switch says.
            Power::Failing => Power::On,
            other => other,
        };
        if strikes(&mut self.faults.losses, &range) || self.chance(odds.lost) {
            self.note(FaultKind::Lost, range);
            return Ok(());
        }
        let mut at = offset;
        if strikes(&mut self.faults.misdirections, &range) || self.chance(odds.misdirected) {
            self.note(FaultKind::Lost, range.clone());
            match self.elsewhere(&range) {
                Some(place) => at = place,
                None => return Ok(()),
            }
            self.note(FaultKind::Overwritten, at..at + buf.len() as u64);
        }
        let outcome = self.put((at, buf), durability, behind, power);
        if self.chance(odds.rot) {
            let mut rng = self.fortune.clone();
            self.rot_somewhere(&mut rng);
            self.fortune = rng;
        }
        outcome
    }

    fn put(
        &mut self,
        (offset, buf): (u64, &[u8]),
        durability: Durability,
        behind: Option<u64>,
        power: Power,
    ) -> io::Result<()> {
        let range = offset..offset + buf.len() as u64;
        for sector in sectors(&range) {
            self.faults.bad.remove(&sector);
        }
        store(&mut self.current, offset, buf);
        match (power, durability) {
            (Power::On, Durability::Durable) if behind.is_some() => {
                self.keep(offset, buf.into(), behind);
                Ok(())
            }
            (Power::On, Durability::Durable) => {
                // It is newer than everything cached at its address.
                for write in &mut self.cached {
                    write.replace(|at| range.contains(&at));
                }
                self.cached.retain(|w| w.replaced.iter().any(|r| !r));
                store(&mut self.durable, offset, buf);
                Ok(())
            }
            (Power::On, Durability::Volatile | Durability::Checked) => {
                self.keep(offset, buf.into(), None);
                Ok(())
            }
            _ => {
                self.keep(offset, buf.into(), None);
                Err(no_power())
            }
        }
    }

    /// A failed write: any of its sectors are written, and cached.
    fn write_in_part(&mut self, offset: u64, buf: &[u8]) {
        for (i, sector) in buf.chunks(SECTOR).enumerate() {
            if self.rng.one_in(2) {
                let at = offset + (i * SECTOR) as u64;
                self.cache_in_part(at, sector);
            }
        }
    }

    /// A place of the same length that holds data and is not `range`.
    fn elsewhere(&mut self, range: &Range<u64>) -> Option<u64> {
        let len = range.end - range.start;
        let pages = self.current.len() as u64;
        for _ in 0..16 {
            let nth = self.fortune.below(pages.max(1)) as usize;
            let page = *self.current.keys().nth(nth)?;
            let last = *self.current.keys().next_back()? * PAGE as u64 + PAGE as u64;
            let at = (page * PAGE as u64).min(last.saturating_sub(len));
            if at + len <= range.start || at >= range.end {
                return Some(at);
            }
        }
        None
    }

    /// The flush of this number.
    pub fn flush(&mut self, number: u64, power: Power) -> io::Result<()> {
        self.may_fail_to_flush(power)?;
        let mut kept: Vec<Cached> = Vec::new();
        for write in self.cached.drain(..) {
            if write.doomed || write.before >= number {
                kept.push(write);
                continue;
            }
            write.apply(&mut self.durable, |_| true);
            // What is durable now is newer than a doomed write before it.
            for older in &mut kept {
                older.replace(|at| write.holds(at));
            }
        }
        self.cached = kept;
        Ok(())
    }

    fn may_fail_to_flush(&mut self, power: Power) -> io::Result<()> {
        let odds = self.faults.odds;
        let failed = strikes(&mut self.faults.flushes, &(0..u64::MAX))
            || power == Power::Failing
            || self.chance(odds.flush_error);
        if !failed {
            return Ok(());
        }
        self.note(FaultKind::FlushError, 0..0);
        self.doom();
        Err(medium_error())
    }

    /// The flush of this number, behind a durable write: it makes that durable, unless another flush that failed meanwhile has dropped it.
    pub fn flush_behind(&mut self, number: u64) -> io::Result<()> {
        self.may_fail_to_flush(Power::On)?;
        let mine = |write: &Cached| write.behind == Some(number) && !write.doomed;
        // Another flush may have been faster.
        if let Some(at) = self.cached.iter().position(mine) {
            let write = self.cached.remove(at);
            write.apply(&mut self.durable, |_| true);
            for older in &mut self.cached[..at] {
                older.replace(|at| write.holds(at));
            }
            self.cached.retain(|w| w.replaced.iter().any(|r| !r));
        }
        Ok(())
    }

    /// A flush has failed: a later one may not write what is cached now.
    fn doom(&mut self) {
        let dooms = self.rng.one_in(2);
        for write in &mut self.cached {
            write.doomed |= dooms;
        }
    }

    pub fn discard(&mut self, offset: u64, len: u64) {
        // Whole runs keep the cache small: a discard of a whole device is one decision per
        // run, not per sector.
        const RUN: u64 = 1 << 20;
        let mut at = offset;
        while at < offset + len {
            let run = RUN.min(offset + len - at);
            if any_in(&self.current, at..at + run) && self.rng.one_in(2) {
                let zeros: Arc<[u8]> = vec![0u8; run as usize].into();
                store(&mut self.current, at, &zeros);
                self.keep(at, zeros, None);
            }
            at += run;
        }
    }

    /// Flips bits of the range, at least one of them, durably and in the cache alike.
    pub fn rot(&mut self, offset: u64, len: u64, rng: &mut Rng) {
        self.note(FaultKind::Rot, offset..offset + len);
        // Distinct bytes, so that no flip undoes another.
        let mut places: Vec<u64> = (0..1 + rng.below(len.min(16)))
            .map(|_| offset + rng.below(len))
            .collect();
        places.sort_unstable();
        places.dedup();
        for at in places {
            let flip = 1u8 << rng.below(8);
            let (page, within) = (at / PAGE as u64, (at % PAGE as u64) as usize);
            page_mut(&mut self.durable, page)[within] ^= flip;
            page_mut(&mut self.current, page)[within] ^= flip;
            for write in &mut self.cached {
                if let Some(byte) = at
                    .checked_sub(write.offset)
                    .and_then(|d| Arc::make_mut(&mut write.bytes).get_mut(d as usize))
                {
                    *byte ^= flip;
                }
            }
        }
    }

    /// Rot in one sector that holds data; `None`: there is none.
    pub fn rot_somewhere(&mut self, rng: &mut Rng) -> Option<Range<u64>> {
        let mut filled = Vec::new();
        for (number, page) in &self.current {
            let filled_sector = |i: &u64| page.sector(*i as usize).iter().any(|b| *b != 0);
            let per_page = (PAGE / SECTOR) as u64;
            filled.extend(
                (0..per_page)
                    .filter(filled_sector)
                    .map(|i| number * per_page + i),
            );
        }
        if filled.is_empty() {
            return None;
        }
        let offset = *rng.pick(&filled) * SECTOR as u64;
        self.rot(offset, SECTOR as u64, rng);
        Some(offset..offset + SECTOR as u64)
    }
}

/// The sectors of a range of bytes, by number.
fn sectors(range: &Range<u64>) -> Range<u64> {
    range.start / SECTOR as u64..range.end.div_ceil(SECTOR as u64)
}

//! The machine's cache lines: where each is, and what it costs a core to get it.
//!
//! 1. A line is where its last writer is, and with whoever has read it since. Reading it from
//!    elsewhere fetches it; writing it fetches it, takes all copies away, and nobody else fetches
//!    it meanwhile. So a line that all write is handed on one after the other.
//! 2. What is asked for ahead comes meanwhile, [`Costs::fills`](super::Costs::fills) lines at once; who asks for more waits until one of these is there.

use std::collections::{HashMap, VecDeque};

use super::super::costs::Time;
use super::super::steps::PRIVATE;
use super::Run;

/// Lines that a core has asked for, as far as anybody remembers.
const ASKED: usize = 256;

/// A set of cores.
pub(super) type Cores = u128;
/// Most cores, threads in the background included.
pub const CORES_MAX: usize = 128;

#[derive(Clone, Copy, Default)]
pub(super) struct Line {
    /// That have a copy.
    pub(super) sharers: Cores,
    /// Nobody else fetches it before.
    free: Time,
}

/// What a core has asked for ahead, and when it comes.
#[derive(Clone, Default)]
pub(super) struct Ahead {
    lines: HashMap<u32, Time>,
    /// What locks protect.
    pub(super) locks: HashMap<u32, Time>,
    /// The lines that are on their way, those that come first in front.
    under_way: VecDeque<Time>,
}

impl Ahead {
    /// When one more can be asked for.
    pub(super) fn free(&mut self, now: Time, fills: usize) -> Time {
        while self.under_way.front().is_some_and(|comes| *comes <= now) {
            self.under_way.pop_front();
        }
        match self.under_way.len() < fills {
            true => now,
            false => self.under_way.pop_front().unwrap_or(now),
        }
    }

    /// Forgets what nobody came for.
    pub(super) fn tidy(&mut self, now: Time) {
        if self.lines.len() + self.locks.len() > ASKED {
            self.lines.retain(|_, comes| *comes > now);
            self.locks.retain(|_, comes| *comes > now);
        }
    }

    pub(super) fn send(&mut self, comes: Time) {
        let at = self.under_way.partition_point(|other| *other <= comes);
        self.under_way.insert(at, comes);
    }

    /// When what the core has been told it has is there.
    pub(super) fn comes(of: &mut HashMap<u32, Time>, number: u32, now: Time) -> Time {
        match of.is_empty() {
            true => now,
            false => of.remove(&number).map_or(now, |comes| comes.max(now)),
        }
    }
}

pub(super) fn bit(core: usize) -> Cores {
    1 << core
}

impl Run<'_> {
    fn socket(&self, core: usize) -> usize {
        core / self.costs.socket_cores
    }

    /// What fetching costs a core from the nearest, or taking away from the farthest, of others.
    pub(super) fn transfer(&self, core: usize, others: Cores, farthest: bool) -> Time {
        let first = self.socket(core) * self.costs.socket_cores;
        let width = self.costs.socket_cores.min(CORES_MAX - first);
        let socket = match width {
            CORES_MAX => Cores::MAX,
            width => ((1 << width) - 1) << first,
        };
        let far = match farthest {
            true => others & !socket != 0,
            false => others & socket == 0,
        };
        match far {
            true => self.costs.far_line,
            false => self.costs.line,
        }
    }

    /// Returns when the core has the line.
    pub(super) fn touch(
        &mut self,
        core: usize,
        line: u32,
        write: bool,
        now: Time,
        counted: bool,
    ) -> Time {
        if line == PRIVATE {
            return now;
        }
        let at = self.lines[line as usize];
        let others = at.sharers & !bit(core);
        let has = at.sharers & bit(core) != 0;
        let asked = self.ahead[core].lines.contains_key(&line);
        let comes = Ahead::comes(&mut self.ahead[core].lines, line, now);
        if at.sharers == 0 || (has && (!write || others == 0)) {
            self.lines[line as usize].sharers |= bit(core);
            if counted && asked {
                self.spent.lines[line as usize] += comes - now;
                self.spent.transfers[line as usize] += 1;
            }
            return comes;
        }
        let until = now.max(at.free) + self.transfer(core, others, write);
        let at = &mut self.lines[line as usize];
        if write {
            at.sharers = bit(core);
            at.free = until;
        } else {
            at.sharers |= bit(core);
        }
        if counted {
            self.spent.lines[line as usize] += until - now;
            self.spent.transfers[line as usize] += 1;
        }
        until
    }

    /// A core asks for a line. Returns when it goes on.
    pub(super) fn ask_line(&mut self, core: usize, line: u32, write: bool, now: Time) -> Time {
        let at = self.lines[line as usize];
        let others = at.sharers & !bit(core);
        let has = at.sharers & bit(core) != 0;
        if at.sharers == 0 || (has && (!write || others == 0)) {
            return now;
        }
        let asked = self.ahead[core].free(now, self.costs.fills);
        let comes = asked.max(at.free) + self.transfer(core, others, write);
        let at = &mut self.lines[line as usize];
        if write {
            at.sharers = bit(core);
            at.free = comes;
        } else {
            at.sharers |= bit(core);
        }
        self.ahead[core].tidy(now);
        self.ahead[core].send(comes);
        self.ahead[core].lines.insert(line, comes);
        asked
    }
}

//! Replay: nodes are brought to the state that the journal's run describes.
//!
//! The ring is gone through once, window by window, and what is in memory are some windows and the nodes that changed, not the
//! journal. The batches of a window are a section. All workers have a part in each of three stages, which are of different sections
//! at the same time: a window is fetched; batches are verified and read, entry by entry; and entries are
//! linked to chains of their nodes ([`crate::chains`], which says what of a node that is deleted again is looked at). When
//! batches and links take up their memory, chains are sifted: those of young nodes are carried on, others are applied to theirs.
//!
//! Here are the stages, and what they have in memory: a [`section`] is read, and says of [`nodes`] what [`changes`] they had.
//!
//! Invariants:
//! 1. A section has all changes of some consecutive epochs, and is linked after those before it, once it is known that the run
//!    reaches its end: that its batches are whole, and count. What follows on a node never has a
//!    smaller epoch, so a chain has a node's changes in their order, and what comes after it was applied comes later.
//! 2. Of what is found wrong a loss comes first: the run is gone through to its end, whatever cannot be replayed.

mod changes;
mod nodes;
mod section;
#[cfg(test)]
mod tests;

pub(crate) use changes::{Change, fits_an_image};

use crate::ahead::{Ahead, Fetch, Found};
use crate::batches::{Run, Walk, in_doubt};
use crate::chains::{Arena, Chains, Logs};
use crate::content::Content;
use crate::error::Error;
use crate::recovery::RecoveryReport;
use crate::ring_reader::Records;
use crate::store::Store;
use base::canary::{Canary, planted};
use base::tight;
use device::AlignedBuf;
use format::checkpoint::CheckpointRecord;
use format::journal::BatchHeader;
use nodes::Damages;
use section::{Reader, Section};
use std::collections::VecDeque;
use std::time::Duration;

/// Memory of replay: a part of that for nodes, which has none when this begins; the nodes that it leaves in memory (invariant 1 of [`nodes`])
/// leave less of it. It is at least so many bytes. A batch, which is as large as its writer let records wait for a commit, is
/// never divided.
const MEMORY_PART: (usize, usize) = (3, 4);
const MEMORY_MIN: usize = 4 << 20;
/// The part that it has however much nodes take: who sifts often finds few nodes that are deleted again.
/// Operations wait when changed nodes take two thirds of their memory, so with three sixteenths all stays within it.
const LEAST_PART: usize = 4;
/// The part of it that batches and their links take before they are sifted; and at most so much, as memory that was used before costs
/// less than other.
const SIFT_SHARE: usize = 3;
const SIFT_BYTES: usize = 192 << 20;
/// The part of that which can be carried on, and that chains may take without links.
const CARRY_SHARE: usize = 4;
const CHAINS_SHARE: usize = 2;
/// Readers of a section for each worker, and chains: the last to end do not keep all waiting.
const PARTS_EACH: usize = 4;

/// Time of each phase. Several go on at the same time: their times are those of all workers, divided by their number.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecoveryPhases {
    /// The journal's run was verified, and its end found.
    pub verify: Duration,
    /// It was read.
    pub read: Duration,
    pub parse: Duration,
    pub link: Duration,
    pub apply: Duration,
    /// Allocators were told.
    pub adopt: Duration,
    /// The checkpoint at the end.
    pub checkpoint: Duration,
}

/// Bytes of memory that replay has.
pub(crate) fn replay_bytes(node_cache_bytes: usize) -> usize {
    let (part, of) = MEMORY_PART;
    let bytes = (node_cache_bytes / of * part).max(MEMORY_MIN);
    tight::limit(bytes, 8 << 10)
}

fn least_room(replay_bytes: usize) -> usize {
    (replay_bytes / LEAST_PART).max(MEMORY_MIN.min(replay_bytes))
}

/// Something for a worker to do.
enum Work<'w> {
    Fetch(&'w mut Fetch),
    Read {
        reader: &'w mut Reader,
        found: &'w [Found],
        first: usize,
        verified: bool,
    },
    Link(usize, &'w mut Chains),
}

/// Nanoseconds of all workers.
#[derive(Default)]
struct Busy {
    fetch: u64,
    verify: u64,
    parse: u64,
    link: u64,
    apply: u64,
}

/// A replay under way: sections, and what they say of nodes.
struct Replay<'s, C: Content> {
    store: &'s Store<C>,
    report: &'s mut RecoveryReport,
    damages: Damages,
    replay_bytes: usize,
    logs: Logs,
    /// Of batches that are linked.
    bytes: usize,
    /// Sections that were read and not linked, and memory of readers. Those that wait to be known to count are few: a batch names
    /// the newest durable one, and writers do not wait for more than some batches to become so.
    read: VecDeque<Section>,
    spare: Vec<Vec<Reader>>,
    chains: Vec<Chains>,
    /// Memory for what is carried on, of each of them.
    arenas: Vec<Option<AlignedBuf>>,
    /// What ended it (invariant 2).
    failed: Option<Error>,
    busy: Busy,
}

impl<'s, C: Content> Replay<'s, C> {
    fn new(
        store: &'s Store<C>,
        replay_bytes: usize,
        report: &'s mut RecoveryReport,
    ) -> Replay<'s, C> {
        let parts = (store.options.workers * PARTS_EACH).next_power_of_two();
        Replay {
            store,
            report,
            damages: Damages::new(),
            replay_bytes,
            logs: Logs::new(parts),
            bytes: 0,
            read: VecDeque::new(),
            spare: Vec::new(),
            chains: (0..parts).map(|_| Chains::new()).collect(),
            arenas: (0..parts).map(|_| None).collect(),
            failed: None,
            busy: Busy::default(),
        }
    }

    /// Goes through the run, and links what is known to count.
    fn run(&mut self, walk: &mut Walk<'_>, ahead: &mut Ahead<'_>) -> Result<(), Error> {
        loop {
            let found = ahead.find()?;
            let mut section = (!found.is_empty()).then(|| self.section(found, false));
            let (mut fetch, link) = (ahead.fetch(), self.next_to_link(walk.sure()));
            if section.is_none() && fetch.is_none() && link.is_none() {
                return Ok(());
            }
            self.step(fetch.as_mut(), section.as_mut(), link.as_ref());
            if let Some(fetch) = fetch {
                ahead.fetched(fetch);
            }
            if let Some(section) = section
                && !self.walk(walk, section)
            {
                ahead.end();
            }
            if let Some(link) = link {
                self.linked(link);
            }
            ahead.reclaim();
        }
    }

    /// Divides batches, the next ones, among readers.
    fn section(&mut self, found: Vec<Found>, verified: bool) -> Section {
        let parts = self.chains.len();
        let readers = self.spare.pop();
        let readers = readers.unwrap_or_else(|| (0..parts).map(|_| Reader::new(parts)).collect());
        let section = Section::new(self.logs.next(), found, verified, readers);
        let records = section
            .found
            .iter()
            .map(|found| found.batch.records.clone());
        self.logs.batches.extend(records);
        section
    }

    /// One step of each stage, by all workers.
    fn step(
        &mut self,
        fetch: Option<&mut Fetch>,
        read: Option<&mut Section>,
        link: Option<&Section>,
    ) {
        let mut work: Vec<(Work<'_>, u64)> = Vec::new();
        work.extend(fetch.map(|fetch| (Work::Fetch(fetch), 0)));
        if let Some(section) = read {
            let verified = section.verified;
            work.extend(section.parts().map(|(reader, first, found)| {
                let read = Work::Read {
                    reader,
                    found,
                    first,
                    verified,
                };
                (read, 0)
            }));
        }
        if link.is_some() {
            let chains = self.chains.iter_mut().enumerate();
            work.extend(chains.map(|(part, chains)| (Work::Link(part, chains), 0)));
        }
        let (array, logs, clock) = (&self.store.array, &self.logs, self.store.clock());
        let now = || clock.monotonic_ns();
        self.store.run_parts(&mut work, &|(work, took)| {
            let began = now();
            match work {
                Work::Fetch(fetch) => fetch.run(array),
                Work::Read {
                    reader,
                    found,
                    first,
                    verified,
                } => {
                    let is_whole = |found: &Found| {
                        let given = *verified || planted(Canary::TornBatchAccepted);
                        given || found.batch.is_whole(array)
                    };
                    reader.read(found, *first, &is_whole, &now);
                }
                Work::Link(part, chains) => {
                    let readers = link.into_iter().flat_map(Section::reading);
                    for reader in readers {
                        reader.lists[*part].iter().for_each(|one| chains.push(one));
                    }
                    chains.end_section(logs);
                }
            }
            *took = now().saturating_sub(began);
        });
        for (work, took) in work {
            match work {
                Work::Fetch(_) => self.busy.fetch += took,
                Work::Read { reader, .. } => {
                    self.busy.verify += reader.verify_ns;
                    self.busy.parse += took.saturating_sub(reader.verify_ns);
                }
                Work::Link(..) => self.busy.link += took,
            }
        }
    }

    /// Takes the batches of a section that was read; false: the run ends in it.
    fn walk(&mut self, walk: &mut Walk<'_>, section: Section) -> bool {
        let whole = section.whole();
        let taken = section.found[..whole].iter().enumerate();
        let taken = taken
            .take_while(|(i, found)| {
                walk.take(&found.batch.header, found.after, || section.sums_of(*i))
            })
            .count();
        let goes_on = taken == section.found.len();
        self.read.push_back(section);
        self.keep(if self.failed.is_some() { 0 } else { taken });
        goes_on
    }

    /// Of the last section that was read only so many batches count.
    fn keep(&mut self, count: usize) {
        let Some(mut section) = self.read.pop_back() else {
            return;
        };
        if count < section.found.len() {
            let end = section.first + count;
            self.logs.batches.truncate(end - self.logs.first);
            section.keep(count);
            self.step(None, Some(&mut section), None);
        }
        match section.found.is_empty() {
            true => self.spare.push(section.readers),
            false => self.read.push_back(section),
        }
    }

    /// The next section, if all of it is before the batch that has this number.
    fn next_to_link(&mut self, sure: u64) -> Option<Section> {
        let section = self.read.front()?;
        let last = section.found.last()?;
        if self.failed.is_some() || last.at.sequence >= sure {
            return None;
        }
        if let Some((_, damage)) = section.reading().find_map(|reader| reader.damage.as_ref()) {
            self.failed = Some(Error::Damaged(damage.clone()));
            return None;
        }
        self.read.pop_front()
    }

    /// A section was linked.
    fn linked(&mut self, section: Section) {
        for reader in section.reading() {
            self.report.records += reader.records;
            self.report.deltas += reader.deltas;
        }
        // The window that batches lie in is in memory with their headers and what pads them.
        let align = self.store.array.geometry().journal_align as usize;
        let lie = |records: usize| (BatchHeader::SIZE + records).next_multiple_of(align);
        let lens = section.found.iter().map(|found| found.batch.records.len());
        self.bytes += lens
            .map(|len| lie(len) + size_of::<Records>())
            .sum::<usize>();
        self.spare.push(section.readers);
        let links: usize = self.chains.iter().map(Chains::bytes).sum();
        if self.bytes + links >= self.sift_bytes() {
            self.sift();
        }
    }

    fn sift_bytes(&self) -> usize {
        let room = self.replay_bytes.saturating_sub(self.store.nodes.bytes());
        let room = room.max(least_room(self.replay_bytes));
        (room / SIFT_SHARE).min(SIFT_BYTES)
    }

    /// Carries young chains on, applies others, and lets go of linked batches.
    fn sift(&mut self) {
        let most = self.sift_bytes();
        let arena = most / CARRY_SHARE / self.chains.len();
        let took = |memory: &mut Option<AlignedBuf>| Arena {
            bytes: memory.take().unwrap_or_else(|| AlignedBuf::zeroed(arena)),
            used: 0,
        };
        let arenas: Vec<Arena> = self.arenas.iter_mut().map(took).collect();
        let mut work: Vec<_> = self
            .chains
            .iter_mut()
            .zip(arenas)
            .enumerate()
            .map(|one| (one, Ok(Damages::new()), 0))
            .collect();
        let (store, logs, damages) = (self.store, &self.logs, &self.damages);
        store.run_parts(&mut work, &|((part, (chains, arena)), found, took)| {
            let began = store.clock().monotonic_ns();
            *found = store.sift_chains(*part, chains, logs, Some(arena), damages);
            *took = store.since(began);
        });
        let mut outcomes = Vec::new();
        for ((part, (_, arena)), found, took) in work {
            self.busy.apply += took;
            let carried = Records::new(std::sync::Arc::new(arena.bytes), 0..arena.used);
            let before = std::mem::replace(&mut self.logs.carried[part], carried);
            self.arenas[part] = before.into_memory().filter(|memory| !memory.is_empty());
            outcomes.push(found);
        }
        let linked = self
            .read
            .front()
            .map_or(self.logs.next(), |section| section.first);
        self.logs.batches.drain(..linked - self.logs.first);
        (self.logs.first, self.bytes) = (linked, 0);
        self.note(outcomes);
        let known: usize = self.chains.iter().map(Chains::node_bytes).sum();
        // Who failed has left chains as they were, and their batches are gone.
        if self.failed.is_none() && known >= most / CHAINS_SHARE {
            self.apply();
        }
    }

    /// Applies all chains, and forgets them.
    fn apply(&mut self) {
        let (store, logs, damages) = (self.store, &self.logs, &self.damages);
        let chains = self.chains.iter_mut().enumerate();
        let mut work: Vec<_> = chains.map(|one| (one, Ok(Damages::new()), 0)).collect();
        store.run_parts(&mut work, &|((part, chains), found, took)| {
            let began = store.clock().monotonic_ns();
            *found = store.sift_chains(*part, chains, logs, None, damages);
            *took = store.since(began);
        });
        let mut outcomes = Vec::new();
        for (_, found, took) in work {
            self.busy.apply += took;
            outcomes.push(found);
        }
        self.note(outcomes);
    }

    fn note(&mut self, outcomes: Vec<Result<Damages, Error>>) {
        for found in outcomes {
            match found {
                Ok(mut found) => self.damages.append(&mut found),
                Err(error) => drop(self.failed.get_or_insert(error)),
            }
        }
    }

    /// Links what is before the batch that has this number, where the run ends, and applies it all.
    fn finish(&mut self, end: u64) -> Result<(), Error> {
        while let Some(last) = self.read.back() {
            let inside = |found: &&Found| found.at.sequence < end;
            let count = last.found.iter().filter(inside).count();
            self.keep(count);
            if count > 0 {
                break;
            }
        }
        while let Some(section) = self.next_to_link(end) {
            self.step(None, None, Some(&section));
            self.linked(section);
        }
        if self.failed.is_none() {
            self.apply();
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Tells how long workers were at each phase.
    fn tell_phases(&mut self) {
        let workers = self.store.options.workers as u64;
        let of = |nanoseconds: u64| Duration::from_nanos(nanoseconds / workers);
        let (phases, busy) = (&mut self.report.phases, &self.busy);
        phases.read += of(busy.fetch);
        phases.verify += of(busy.verify);
        phases.parse += of(busy.parse);
        phases.link += of(busy.link);
        phases.apply += of(busy.apply);
    }
}

impl<C: Content> Store<C> {
    /// Replays the journal's run; returns it, and the nodes that it cannot bring up to date.
    pub(crate) fn replay(
        &self,
        record: &CheckpointRecord,
        report: &mut RecoveryReport,
    ) -> Result<(Run, Damages), Error> {
        let bytes = replay_bytes(self.options.node_cache_bytes);
        let mut walk = Walk::begin(&self.array, record)?;
        let mut ahead = Ahead::new(&self.array, record, walk.start, bytes);
        let mut replay = Replay::new(self, bytes, report);
        replay.run(&mut walk, &mut ahead)?;
        if let Some((at, error)) = ahead.gap() {
            walk.gap(at, error);
        }
        let began = self.clock().monotonic_ns();
        let mut run = walk.end()?;
        replay.report.phases.verify += Duration::from_nanos(self.since(began));
        if let Some(loss) = run.loss.take() {
            return Err(Error::Damaged(loss));
        }
        for unread in &run.unread {
            tracing::warn!("node {}: {unread}", unread.nid);
        }
        match (&run.doubt, run.gaps.first()) {
            (Some(error), _) => tracing::warn!("journal: {}", in_doubt(error)),
            (None, Some(error)) => {
                tracing::warn!("a part of the journal that nothing is in cannot be read: {error}");
            }
            (None, None) => {}
        }
        let unread = run.unread.first().map(|unread| &unread.error);
        if let Some(error) = run.doubt.as_ref().or(unread)
            && !self.options.read_only
        {
            return Err(Error::Unread(std::sync::Arc::new(error.clone())));
        }
        replay.finish(run.end.sequence)?;
        replay.tell_phases();
        let mut damages = replay.damages;
        self.let_go(replay.chains);
        let began = self.clock().monotonic_ns();
        self.adopt_replayed(&mut damages, report)?;
        report.phases.adopt = Duration::from_nanos(self.since(began));
        Ok((run, damages))
    }

    /// Frees much memory: the system takes a while for each page, so all workers do.
    fn let_go<T: Send>(&self, things: Vec<T>) {
        let share = things.len().div_ceil(self.options.workers).max(1);
        let mut things = things.into_iter();
        let part = |_| things.by_ref().take(share).collect();
        let mut parts: Vec<Vec<T>> = (0..self.options.workers).map(part).collect();
        self.run_parts(&mut parts, &|part| part.clear());
    }
}

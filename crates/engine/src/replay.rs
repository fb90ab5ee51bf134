//! Replay: nodes are brought to the state that the journal's run describes.
//!
//! The ring is gone through once, window by window, and what is in memory are some windows and the nodes that changed, not the
//! journal. The batches of a window are a section. All workers have a part in each of three stages, which are of different sections
//! at the same time: a window is fetched; batches are verified and read, entry by entry; and entries are
//! linked to chains of their nodes ([`crate::chains`], which says what of a node that is deleted again is looked at). When
//! batches and links take up their memory, chains are sifted: those of young nodes are carried on, others are applied to theirs.
//!
//! Invariants:
//! 1. A section has all changes of some consecutive epochs, and is linked after those before it, once it is known that the run
//!    reaches its end: that its batches are whole, and count. What follows on a node never has a
//!    smaller epoch, so a chain has a node's changes in their order, and what comes after it was applied comes later.
//! 2. A delta is applied only if its version is exactly the node's next; those up to the version
//!    that the table names are in the image already. A merge is applied only to the version that
//!    it names; the image has those of earlier versions, and none of its own (`op.rs`, invariant 6).
//!    It is pending again until the next change of the node, or the end of the run, settles it with all others of
//!    its version: the journal has these in no order.
//! 3. Until all is done every replayed node is in the cache, dirty, and so stays
//!    there; nobody else looks. Allocators hear of nodes after that, once each.
//! 4. Of a node that a chain deletes nothing older than the deletion is read or decoded, not even its image, unless the image is newer.
//!    What is checked of that is that the versions of all its changes follow one another, and the first of them on the
//!    image's, and that each finds a node or, to create it, none. So no change is lost unnoticed, and with
//!    the deletion's version the node is gone: whoever gets its nid next begins beyond.
//! 5. What a chain does to a node depends on no other node: any worker may do it at any time.
//! 6. Of what is found wrong a loss comes first: the run is gone through to its end, whatever cannot be replayed.

#[cfg(test)]
mod tests;

use crate::ahead::{Ahead, Fetch, Found};
use crate::batches::{Records, Run, Walk};
use crate::chains::{Arena, Chains, Changed, Logged, Logs, part_of};
use crate::content::Content;
use crate::error::Error;
use crate::node::{Body, Cell, new_cell, suits};
use crate::op::Dirty;
use crate::recovery::{RecoveryReport, damaged};
use crate::space_map::SpaceDelta;
use crate::store::Store;
use base::canary::{Canary, planted};
use base::sync::Arc;
use base::tight;
use device::AlignedBuf;
use format::checkpoint::CheckpointRecord;
use format::item::PAYLOAD_MAX;
use format::journal::{Action, BatchHeader, DataSum, Entry, each_entry};
use format::table::{KIND_SPACE_MAP, SPACE_MAP_FIRST};
use format::{Damage, Nid};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// Memory of replay: a part of that for nodes, which has none when this begins; the nodes that it leaves in memory (invariant 3)
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
/// Bytes of batches for one of a section's readers, at least.
fn reader_bytes() -> usize {
    tight::limit(64 << 10, 256)
}
/// Readers of a section for each worker, and chains: the last to end do not keep all waiting.
const PARTS_EACH: usize = 4;

/// A logged change of one node.
#[derive(Clone, Copy)]
pub(crate) struct Change<'a> {
    pub version: u64,
    pub action: Action,
    pub kind: u8,
    pub body: &'a [u8],
}

impl<'a> From<Entry<'a>> for Change<'a> {
    fn from(entry: Entry<'a>) -> Change<'a> {
        Change {
            version: entry.version,
            action: entry.action,
            kind: entry.kind,
            body: entry.body,
        }
    }
}

impl Change<'_> {
    /// Whether an image of this version has it (invariant 2).
    fn is_in(&self, version: u64) -> bool {
        match self.action {
            Action::Merge if planted(Canary::MergesReplayedTwice) => false,
            Action::Merge => self.version < version,
            _ => self.version <= version,
        }
    }

    /// Its place among a node's changes.
    fn order(&self) -> (u64, bool) {
        (self.version, self.action == Action::Merge)
    }
}

/// Nodes that cannot be brought up to date, and why.
type Damages = BTreeMap<u64, Damage>;

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

/// Some batches of a section, and their entries in lists for each of the chains.
#[derive(Default)]
struct Reader {
    lists: Vec<Vec<Logged>>,
    records: u64,
    deltas: u64,
    /// The first batch that is not whole, by number; nothing of those behind it was read.
    torn: Option<usize>,
    /// The first whose records say nothing sensible: those behind it were not read, either.
    damage: Option<(usize, Damage)>,
    /// Of data for which batches vouch.
    sums: Vec<(usize, Nid, Result<DataSum, Damage>)>,
    verify_ns: u64,
}

impl Reader {
    fn new(parts: usize) -> Reader {
        Reader {
            lists: vec![Vec::new(); parts],
            ..Reader::default()
        }
    }

    fn clear(&mut self) {
        let mut lists = std::mem::take(&mut self.lists);
        lists.iter_mut().for_each(Vec::clear);
        *self = Reader {
            lists,
            ..Reader::default()
        };
    }

    /// Reads batches, the first of which has the number `first`. `is_whole` looks at a batch that was not verified.
    fn read(
        &mut self,
        found: &[Found],
        first: usize,
        is_whole: &impl Fn(&Found) -> bool,
        now: &impl Fn() -> u64,
    ) {
        for (number, found) in (first..).zip(found) {
            let began = now();
            let whole = is_whole(found);
            self.verify_ns += now().saturating_sub(began);
            if !whole {
                self.torn = Some(number);
                return;
            }
            if self.damage.is_none() {
                self.parse(number, found);
            }
        }
    }

    fn parse(&mut self, number: usize, found: &Found) {
        let parts = self.lists.len();
        let vouches = found.batch.header.checked.get() > 0;
        let parsed = each_entry(&found.batch.records, |at, entry| {
            if entry.action == Action::Sum {
                if vouches {
                    let sum = DataSum::decode(entry.body);
                    self.sums.push((number, Nid(entry.nid), sum));
                }
                return;
            }
            self.deltas += 1;
            self.lists[part_of(entry.nid, parts)].push(Logged::new(number, at, &entry));
        });
        match parsed {
            Ok(records) => self.records += u64::from(records),
            Err(damage) => self.damage = Some((number, damage)),
        }
    }

    /// The checksums of data in a batch's records, and the nodes that it belongs to.
    fn sums_of(&self, number: usize) -> Result<Vec<(Nid, DataSum)>, Damage> {
        match &self.damage {
            Some((at, damage)) if *at == number => Err(damage.clone()),
            _ => {
                let sums = self.sums.iter().filter(|(at, ..)| *at == number);
                sums.map(|(_, nid, sum)| Ok((*nid, sum.clone()?))).collect()
            }
        }
    }
}

/// Batches that are read together.
struct Section {
    /// The number of the first.
    first: usize,
    found: Vec<Found>,
    verified: bool,
    /// What each reader reads.
    shares: Vec<Range<usize>>,
    readers: Vec<Reader>,
}

impl Section {
    fn reading(&self) -> impl Iterator<Item = &Reader> {
        self.readers.iter().take(self.shares.len())
    }

    /// How many batches are whole, from the first on.
    fn whole(&self) -> usize {
        let torn = self.reading().filter_map(|reader| reader.torn).min();
        torn.map_or(self.found.len(), |number| number - self.first)
    }

    fn sums_of(&self, i: usize) -> Result<Vec<(Nid, DataSum)>, Damage> {
        let reader = self.shares.iter().position(|share| share.contains(&i));
        reader.map_or(Ok(Vec::new()), |r| self.readers[r].sums_of(self.first + i))
    }
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
    /// What ended it (invariant 6).
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
        let mut section = Section {
            first: self.logs.next(),
            found,
            verified,
            shares: Vec::new(),
            readers: readers.unwrap_or_else(|| (0..parts).map(|_| Reader::new(parts)).collect()),
        };
        self.divide(&mut section);
        let records = section
            .found
            .iter()
            .map(|found| found.batch.records.clone());
        self.logs.batches.extend(records);
        section
    }

    fn divide(&self, section: &mut Section) {
        let found = section.found.iter();
        let lens: Vec<usize> = found.map(|found| found.batch.records.len()).collect();
        let wanted = lens.iter().sum::<usize>() / reader_bytes();
        section.shares = shares(&lens, wanted.clamp(1, section.readers.len()));
        section.readers.iter_mut().for_each(Reader::clear);
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
            let readers = section.readers.iter_mut().zip(&section.shares);
            work.extend(readers.map(|(reader, share)| {
                let read = Work::Read {
                    reader,
                    found: &section.found[share.clone()],
                    first: section.first + share.start,
                    verified: section.verified,
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
            section.found.truncate(count);
            let end = section.first + count;
            self.logs.batches.truncate(end - self.logs.first);
            section.verified = true;
            self.divide(&mut section);
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
        let began = self.clock().monotonic_ns();
        let mut run = walk.end()?;
        replay.report.phases.verify += Duration::from_nanos(self.since(began));
        if let Some(loss) = run.loss.take() {
            return Err(Error::Damaged(loss));
        }
        for unread in &run.unread {
            tracing::warn!("node {}: {unread}", unread.nid);
        }
        if let Some(unread) = run.unread.first()
            && !self.options.read_only
        {
            return Err(Error::Unread(std::sync::Arc::new(unread.error.clone())));
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

    /// Applies what some chains have for nodes that are not among `damaged`, but for those that are carried on into an arena; returns
    /// those that become so. Dirty ones go to the list that has the number `part`.
    fn sift_chains(
        &self,
        part: usize,
        chains: &mut Chains,
        logs: &Logs,
        arena: Option<&mut Arena>,
        damaged: &Damages,
    ) -> Result<Damages, Error> {
        let mut found = chains.damages().clone();
        found.retain(|nid, _| !damaged.contains_key(nid));
        chains.sift(logs, arena.map(|arena| (part, arena)), |changed| {
            self.replay_or_note(part, changed, logs, damaged, &mut found)
        })?;
        Ok(found)
    }

    fn replay_or_note(
        &self,
        part: usize,
        changed: &Changed<'_>,
        logs: &Logs,
        damaged: &Damages,
        found: &mut Damages,
    ) -> Result<(), Error> {
        if damaged.contains_key(&changed.nid.0) {
            return Ok(());
        }
        match self.replay_node(part, changed, logs) {
            Err(Error::DamagedNode { damage, .. } | Error::Damaged(damage)) => {
                found.insert(changed.nid.0, damage);
                Ok(())
            }
            other => other,
        }
    }

    /// Applies a chain to its node.
    fn replay_node(&self, part: usize, changed: &Changed<'_>, logs: &Logs) -> Result<(), Error> {
        let nid = changed.nid;
        let changes = changed.entries(logs).map(Change::from);
        // Of an earlier chain (invariant 3).
        let Some(cell) = self.nodes.get(nid) else {
            let replayed = match self.replayed_cut(changed)? {
                Some(version) => Some(self.apply_changes(nid, version, Body::Gone, changes)?),
                None => self.replayed_image(nid, changes)?,
            };
            if let Some((version, body)) = replayed {
                self.add_replayed(part, nid, version, body);
            }
            return Ok(());
        };
        let (version, body) = {
            let mut state = cell.write();
            let body = std::mem::replace(&mut state.body, Body::Gone);
            (state.version, body)
        };
        let (version, body) = match changed.cut() {
            Some(cut) => {
                // Whatever is there came from the journal: nothing comes twice.
                let exists = !matches!(body, Body::Gone);
                check_first(changed, changed.first().is_next(version), version, exists)?;
                self.apply_changes(nid, cut, Body::Gone, changes)?
            }
            None => self.apply_changes(nid, version, body, changes)?,
        };
        if !suits(&cell, &body) {
            self.add_replayed(part, nid, version, body);
            return Ok(());
        }
        let mut state = cell.write();
        state.version = version;
        state.body = body;
        self.recharge(&cell, &state.body);
        Ok(())
    }

    /// The version with which the journal says that a node is gone, if that is newer than what the table has (invariant 4).
    fn replayed_cut(&self, changed: &Changed<'_>) -> Result<Option<u64>, Error> {
        let Some(cut) = changed.cut() else {
            return Ok(None);
        };
        let entry = self.table.entry(changed.nid)?;
        if cut <= entry.version {
            return Ok(None);
        }
        let (follows, exists) = (
            changed.first().follows(entry.version),
            !entry.place.is_none(),
        );
        check_first(changed, follows, entry.version, exists)?;
        Ok(Some(cut))
    }

    fn add_replayed(&self, part: usize, nid: Nid, version: u64, body: Body<C>) {
        let cell = new_cell(nid, version, body);
        self.nodes.insert(Arc::clone(&cell));
        self.mark_dirty(part, &cell);
    }

    /// A node as the table has it, with changes applied, which come in any order; `None`: its image has them all.
    pub(crate) fn replayed_node(
        &self,
        nid: Nid,
        mut changes: Vec<Change<'_>>,
    ) -> Result<Option<(u64, Body<C>)>, Error> {
        changes.sort_by_key(Change::order);
        self.replayed_image(nid, changes.into_iter())
    }

    /// A node as these changes alone have it, which come in any order, with the version that they give it: what they say from its
    /// last creation or deletion on is all that there is to know, whatever an image or they said before. `None`: there is neither.
    pub(crate) fn replayed_anew(
        &self,
        nid: Nid,
        changes: &[Change<'_>],
    ) -> Option<Result<(u64, Body<C>), Error>> {
        let mut changes = changes.to_vec();
        changes.sort_by_key(Change::order);
        let all_there_is =
            |change: &Change<'_>| matches!(change.action, Action::Create | Action::Delete);
        let last = changes.iter().rposition(all_there_is)?;
        let (first, later) = (changes[last], changes[last + 1..].iter().copied());
        // It was there before it was deleted, and not before it was created.
        let (version, changes) = match first.action {
            Action::Create => (first.version.checked_sub(1)?, Some(first)),
            _ => (first.version, None),
        };
        Some(self.apply_changes(nid, version, Body::Gone, changes.into_iter().chain(later)))
    }

    /// As [`Store::replayed_node`], with changes in their order.
    fn replayed_image<'a>(
        &self,
        nid: Nid,
        changes: impl Iterator<Item = Change<'a>>,
    ) -> Result<Option<(u64, Body<C>)>, Error> {
        let entry = self.table.entry(nid)?;
        let mut changes = changes
            .filter(|change| !change.is_in(entry.version))
            .peekable();
        let Some(first) = changes.peek() else {
            return Ok(None);
        };
        let body = match first.action {
            Action::Create => Body::Gone,
            _ if entry.place.is_none() => Body::Gone,
            _ => {
                let read = crate::items::read_node(&self.array, nid, entry.version, entry.place)?;
                let item = read.map_err(|d| Error::node(nid, d))?;
                let kind = item.header.node_kind;
                Body::decode(kind, item.payload()).map_err(|d| Error::node(nid, d))?
            }
        };
        self.apply_changes(nid, entry.version, body, changes)
            .map(Some)
    }

    /// Tells the allocators of nids and of space what replay made of the nodes (invariant 3).
    fn adopt_replayed(
        &self,
        damages: &mut Damages,
        report: &mut RecoveryReport,
    ) -> Result<(), Error> {
        let lists = self.dirty.lists.iter().map(|list| list.lock().clone());
        let mut parts: Vec<(Vec<Dirty<C>>, Settled)> =
            lists.map(|list| (list, Settled::default())).collect();
        self.run_parts(&mut parts, &|(list, settled)| {
            for Dirty { nid, cell } in list.drain(..) {
                if !damages.contains_key(&nid.0) && !cell.header.is_gone() {
                    self.settle_replayed(nid, &cell, settled);
                }
            }
        });
        for (_, mut settled) in parts {
            damages.append(&mut settled.damages);
            report.nodes += settled.nodes;
            for (nid, in_use) in settled.nids {
                self.nids.recover(nid, in_use, self)?;
            }
        }
        Ok(())
    }

    /// The run's end settles what is pending still (invariant 2).
    fn settle_replayed(&self, nid: Nid, cell: &Arc<Cell<C>>, settled: &mut Settled) {
        if cell.read().body.is_pending() {
            let mut state = cell.write();
            state.body.settle();
            self.recharge(cell, &state.body);
            if let Err(damage) = fits_an_image(&state.body) {
                settled.damages.insert(nid.0, damage);
                return;
            }
        }
        settled.nodes += 1;
        let state = cell.read();
        if nid.0 < SPACE_MAP_FIRST {
            let in_use = !matches!(state.body, Body::Gone);
            settled.nids.push((nid, in_use));
            return;
        }
        // A chunk of this array, or the node would be damaged.
        let chunk = (nid.0 - SPACE_MAP_FIRST) as u32;
        match &state.body {
            Body::Space(map) => self.space.recovered(chunk, Some(map.words())),
            _ => self.space.recovered(chunk, None),
        }
    }

    /// Applies changes that are in their order (invariant 2). The last merges are pending afterwards.
    fn apply_changes<'a>(
        &self,
        nid: Nid,
        mut version: u64,
        mut body: Body<C>,
        changes: impl Iterator<Item = Change<'a>>,
    ) -> Result<(u64, Body<C>), Error> {
        for change in changes {
            let (merge, to) = (change.action == Action::Merge, change.version);
            let follows = to == version + u64::from(!merge)
                || planted(Canary::VersionGapAccepted)
                || (merge && planted(Canary::MergesReplayedTwice));
            if !follows {
                return Err(gap(nid, version, to, merge));
            }
            apply_change(&mut body, change).map_err(|damage| Error::node(nid, damage))?;
            version += u64::from(!merge);
        }
        if let Some(why) = self.misfit(nid, &body) {
            return Err(Error::node(nid, Damage::new("journal", why)));
        }
        fits_an_image(&body).map_err(|damage| Error::node(nid, damage))?;
        Ok((version, body))
    }
}

/// Divides batches of these lengths into so many runs at most, of about the same bytes. The last takes what is left: batches that are
/// empty, too.
fn shares(lens: &[usize], most: usize) -> Vec<Range<usize>> {
    let share = lens.iter().sum::<usize>().div_ceil(most).max(1);
    let (mut shares, mut from, mut bytes) = (Vec::with_capacity(most), 0, 0);
    for (at, len) in lens.iter().enumerate() {
        bytes += len;
        if bytes >= share && shares.len() + 1 < most {
            shares.push(from..at + 1);
            (from, bytes) = (at + 1, 0);
        }
    }
    if from < lens.len() {
        shares.push(from..lens.len());
    }
    shares
}

/// What the allocators are to be told of some nodes.
#[derive(Default)]
struct Settled {
    nodes: u64,
    nids: Vec<(Nid, bool)>,
    damages: Damages,
}

fn gap(nid: Nid, version: u64, to: u64, merge: bool) -> Error {
    let what = match merge {
        false => format!("node {nid} goes from version {version} to {to}"),
        true => format!("node {nid} merges at version {to}, but is at {version}"),
    };
    damaged("journal", what)
}

/// Checks the first change of a node that a chain deletes, where the node has this version before, and exists or does not
/// (invariant 4).
fn check_first(
    changed: &Changed<'_>,
    follows: bool,
    version: u64,
    exists: bool,
) -> Result<(), Error> {
    let (nid, first) = (changed.nid, changed.first());
    if !follows && !planted(Canary::VersionGapAccepted) {
        return Err(gap(nid, version, first.version(), first.is_merge()));
    }
    if first.is_next(version) && changed.finds_node() != exists {
        let what = match exists {
            true => format!("node {nid} is created and exists"),
            false => format!("node {nid} is changed and does not exist"),
        };
        return Err(damaged("journal", what));
    }
    Ok(())
}

/// Each change fits a node that it may find; together they may outgrow what an image holds.
fn fits_an_image<C: Content>(body: &Body<C>) -> Result<(), Damage> {
    // What that says is right but for a few bytes; encoding looks at every one.
    if body.image() <= PAYLOAD_MAX / 2 {
        return Ok(());
    }
    let mut image = Vec::new();
    body.encode(&mut image);
    match image.len() <= PAYLOAD_MAX {
        true => Ok(()),
        false => Err(Damage::new(
            "journal",
            "its changes make the node larger than an image",
        )),
    }
}

/// Applies one change; where that fails the body is of no use any more.
#[inline]
fn apply_change<C: Content>(body: &mut Body<C>, change: Change<'_>) -> Result<(), Damage> {
    let misfit = |what: &str| Damage::new("journal record", what);
    if change.action != Action::Merge || planted(Canary::MergesInLogOrder) {
        body.settle();
    }
    match (change.action, &mut *body) {
        // A third of a full journal may be merges: nothing is moved for them.
        (Action::Merge, Body::User(content)) => match content.merges() {
            true => content.merge_again(change.kind, change.body)?,
            false => return Err(misfit("merges into a node that takes no merged changes")),
        },
        (Action::Create, Body::Gone) => {
            if change.body.len() > PAYLOAD_MAX {
                return Err(misfit("creates a node over the bound"));
            }
            *body = Body::decode(change.kind, change.body)?;
        }
        (Action::Create, _) => return Err(misfit("creates a node that exists")),
        (_, Body::Gone) => return Err(misfit("changes a node that does not exist")),
        (Action::Delete, _) => *body = Body::Gone,
        (Action::Apply, Body::Space(map)) if change.kind == KIND_SPACE_MAP => {
            map.apply(&SpaceDelta::decode(change.body)?)?;
        }
        (Action::Fold, _) if change.body.is_empty() => {}
        (Action::Fold, _) => return Err(misfit("folds with something else besides")),
        // Left out before.
        (Action::Sum, _) => return Err(misfit("takes a checksum for a change")),
        (Action::Apply, Body::User(content)) => {
            content.apply(&C::decode_delta(change.kind, change.body)?)?;
        }
        (Action::Apply | Action::Merge, Body::Space(_)) => {
            return Err(misfit("has the wrong kind for a space map"));
        }
    }
    Ok(())
}

//! Replay: nodes are brought to the state that the journal's run describes.
//!
//! The run was verified whole before. It is replayed in groups of batches, as large as memory allows, so that what is in
//! memory is one group and the nodes that changed, not the journal. A group has three phases, each by all workers:
//! batches are read, entry by entry; entries are linked to chains of their nodes ([`crate::chains`], which says what of
//! a node that is deleted again is looked at); and chains are applied to nodes. The first two alternate, section by
//! section, so that what they hand over stays near the processor.
//!
//! Invariants:
//! 1. A group has all changes of some consecutive epochs. What follows on a node never has a
//!    smaller epoch, so a chain has a node's changes of the group in their order, and the next group's come later.
//! 2. A delta is applied only if its version is exactly the node's next; those up to the version
//!    that the table names are in the image already. A merge is applied only to the version that
//!    it names; the image has those of earlier versions, and none of its own (`op.rs`, invariant 6).
//!    It is pending again until the next change of the node, or the end of the run, settles it with all others of
//!    its version: the journal has these in no order.
//! 3. Until the last group is done every replayed node is in the cache, dirty, and so stays
//!    there; nobody else looks. Allocators hear of nodes after that, once each.
//! 4. Of a node that a group deletes nothing older than the deletion is read or decoded, not even its image, unless the image is newer.
//!    What is checked of that is that the versions of all its changes follow one another, and the first of them on the
//!    image's, and that each finds a node or, to create it, none. So no change is lost unnoticed, and with
//!    the deletion's version the node is gone: whoever gets its nid next begins beyond.
//! 5. What a group does to a node depends on the group alone, and on no other node: any worker may do it at any time.

#[cfg(test)]
mod tests;

use crate::batches::{Records, Run};
use crate::chains::{BATCHES_MAX, Chains, Changed, Logged, part_of};
use crate::content::Content;
use crate::error::Error;
use crate::node::{Body, Cell, new_cell, suits};
use crate::op::Dirty;
use crate::recovery::{RecoveryReport, damaged};
use crate::space_map::SpaceDelta;
use crate::store::{STAGING_MAX, Store};
use base::canary::{Canary, planted};
use base::sync::Arc;
use base::tight;
use format::checkpoint::CheckpointRecord;
use format::item::PAYLOAD_MAX;
use format::journal::{Action, BatchHeader, Entry, each_entry};
use format::table::{KIND_SPACE_MAP, SPACE_MAP_FIRST};
use format::{Damage, Nid};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

/// Bytes of batches, of links for their entries, and of the nodes that earlier groups have left in memory (invariant 3), that make
/// a group: a part of the memory for nodes, which has none when this begins; and so many at least. A batch, which
/// is as large as its writer let records wait for a commit, is never divided.
const GROUP_PART: (usize, usize) = (3, 4);
const GROUP_BYTES_MIN: usize = 4 << 20;
/// The part of that which batches and links have, however much nodes take: small groups find few nodes that are deleted again.
/// Operations wait when changed nodes take two thirds of their memory, so with three sixteenths all stays within it.
const GROUP_LEAST_PART: usize = 4;
/// Bytes of batches of a section for each worker: two of the largest that are usual, so that all have something to read.
/// What a worker leaves for the next phase is as much again, and should stay near it.
const SECTION_BYTES: usize = 2 * STAGING_MAX;
/// The part of a group that is a section, at most.
const SECTION_SHARE: usize = 8;
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

/// Time of each phase.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecoveryPhases {
    /// The journal's run was found and verified.
    pub verify: Duration,
    /// What of it had no room in memory was read again.
    pub read: Duration,
    pub parse: Duration,
    pub link: Duration,
    pub apply: Duration,
    /// Allocators were told.
    pub adopt: Duration,
    /// The checkpoint at the end.
    pub checkpoint: Duration,
}

/// Bytes of a group that the store's memory has room for.
pub(crate) fn group_bytes(node_cache_bytes: usize) -> usize {
    let (part, of) = GROUP_PART;
    let bytes = (node_cache_bytes / of * part).max(GROUP_BYTES_MIN);
    tight::limit(bytes, 8 << 10)
}

fn least_room(group_bytes: usize) -> usize {
    (group_bytes / GROUP_LEAST_PART).max(GROUP_BYTES_MIN.min(group_bytes))
}

/// Some batches of a section, and their entries in lists for each of the chains.
#[derive(Default)]
struct Reader {
    lists: Vec<Vec<Logged>>,
    records: u64,
    deltas: u64,
    damage: Option<Damage>,
}

impl Reader {
    /// Reads batches, the first of which is the group's number `first`.
    fn read(&mut self, batches: &[Records], first: usize) {
        let parts = self.lists.len();
        self.lists.iter_mut().for_each(Vec::clear);
        (self.records, self.deltas) = (0, 0);
        for (number, records) in (first..).zip(batches) {
            let parsed = each_entry(records, |at, entry| {
                if entry.action == Action::Sum {
                    return;
                }
                self.deltas += 1;
                self.lists[part_of(entry.nid, parts)].push(Logged::new(number, at, &entry));
            });
            match parsed {
                Ok(records) => self.records += u64::from(records),
                Err(damage) => {
                    self.damage = Some(damage);
                    return;
                }
            }
        }
    }
}

/// A replay under way: the batches of a group, and what they say of nodes.
struct Replay<'s, C: Content> {
    store: &'s Store<C>,
    report: &'s mut RecoveryReport,
    damages: Damages,
    group_bytes: usize,
    /// Of these the part that earlier groups have left.
    group_room: usize,
    section_bytes: usize,
    batches: Vec<Records>,
    bytes: usize,
    /// So many of them are in sections that ended, and bytes in others.
    linked: usize,
    unlinked_bytes: usize,
    readers: Vec<Reader>,
    chains: Vec<Chains>,
}

impl<'s, C: Content> Replay<'s, C> {
    fn new(
        store: &'s Store<C>,
        group_bytes: usize,
        report: &'s mut RecoveryReport,
    ) -> Replay<'s, C> {
        let workers = store.options.workers;
        let parts = (workers * PARTS_EACH).next_power_of_two();
        let section = (workers * SECTION_BYTES).min(group_bytes / SECTION_SHARE);
        let reader = || Reader {
            lists: vec![Vec::new(); parts],
            ..Reader::default()
        };
        Replay {
            store,
            report,
            damages: Damages::new(),
            group_bytes,
            group_room: group_bytes,
            section_bytes: tight::limit(section, 1 << 10),
            batches: Vec::new(),
            bytes: 0,
            linked: 0,
            unlinked_bytes: 0,
            readers: (0..parts).map(|_| reader()).collect(),
            chains: (0..parts).map(|_| Chains::new()).collect(),
        }
    }

    fn take(&mut self, records: Records) -> Result<(), Error> {
        // The window that it lies in is in memory with its header and what pads it.
        let align = self.store.array.geometry().journal_align as usize;
        let lies = (BatchHeader::SIZE + records.len()).next_multiple_of(align);
        self.bytes += lies + size_of::<Records>();
        self.unlinked_bytes += records.len();
        self.batches.push(records);
        if self.unlinked_bytes >= self.section_bytes {
            self.end_section()?;
        }
        let links: usize = self.chains.iter().map(Chains::bytes).sum();
        if self.bytes + links >= self.group_room || self.batches.len() >= BATCHES_MAX {
            self.end_group()?;
        }
        Ok(())
    }

    /// Links what is not linked.
    fn end_section(&mut self) -> Result<(), Error> {
        let began = self.store.clock().monotonic_ns();
        let section = &self.batches[self.linked..];
        let wanted = (self.unlinked_bytes / reader_bytes()).clamp(1, self.readers.len());
        let lens: Vec<usize> = section.iter().map(|records| records.len()).collect();
        let mut work: Vec<_> = self.readers.iter_mut().zip(shares(&lens, wanted)).collect();
        self.store.run_parts(&mut work, &|(reader, range)| {
            reader.read(&section[range.clone()], self.linked + range.start);
        });
        let read: Vec<&Reader> = work.into_iter().map(|(reader, _)| &*reader).collect();
        for reader in &read {
            self.report.records += reader.records;
            self.report.deltas += reader.deltas;
            if let Some(damage) = &reader.damage {
                return Err(Error::Damaged(damage.clone()));
            }
        }
        let parsed = self.store.clock().monotonic_ns();
        let mut work: Vec<_> = self.chains.iter_mut().enumerate().collect();
        self.store.run_parts(&mut work, &|(part, chains)| {
            for reader in &read {
                reader.lists[*part].iter().for_each(|one| chains.push(one));
            }
            chains.end_section(&self.batches);
        });
        (self.linked, self.unlinked_bytes) = (self.batches.len(), 0);
        let phases = &mut self.report.phases;
        phases.parse += Duration::from_nanos(parsed.saturating_sub(began));
        phases.link += Duration::from_nanos(self.store.since(parsed));
        Ok(())
    }

    /// Applies the chains, and forgets them.
    fn end_group(&mut self) -> Result<(), Error> {
        self.end_section()?;
        let began = self.store.clock().monotonic_ns();
        let apply = |(part, chains): (usize, &Chains)| {
            self.store
                .apply_chains(part, chains, &self.batches, &self.damages)
        };
        let mut work: Vec<_> = self
            .chains
            .iter()
            .enumerate()
            .map(|one| (one, Ok(Damages::new())))
            .collect();
        self.store
            .run_parts(&mut work, &|(one, found)| *found = apply(*one));
        let found: Vec<_> = work.into_iter().map(|(_, found)| found).collect();
        for found in found {
            self.damages.append(&mut found?);
        }
        self.chains.iter_mut().for_each(Chains::clear);
        let batches = std::mem::take(&mut self.batches);
        self.store.let_go(batches);
        (self.bytes, self.linked) = (0, 0);
        let room = self.group_bytes.saturating_sub(self.store.nodes.bytes());
        self.group_room = room.max(least_room(self.group_bytes));
        self.report.phases.apply += Duration::from_nanos(self.store.since(began));
        Ok(())
    }
}

impl<C: Content> Store<C> {
    /// Replays the run; returns the nodes that it cannot bring up to date.
    pub(crate) fn replay(
        &self,
        record: &CheckpointRecord,
        run: &mut Run,
        report: &mut RecoveryReport,
    ) -> Result<Damages, Error> {
        let began = self.clock().monotonic_ns();
        let group_bytes = group_bytes(self.options.node_cache_bytes);
        let mut replay = Replay::new(self, group_bytes, report);
        run.for_each(&self.array, record, |batch| replay.take(batch.records))?;
        replay.end_group()?;
        let mut damages = replay.damages;
        self.let_go(replay.chains);
        let phases = &mut report.phases;
        let rest = Duration::from_nanos(self.since(began));
        phases.read = rest.saturating_sub(phases.parse + phases.link + phases.apply);
        let began = self.clock().monotonic_ns();
        self.adopt_replayed(&mut damages, report)?;
        report.phases.adopt = Duration::from_nanos(self.since(began));
        Ok(damages)
    }

    /// Frees much memory: the system takes a while for each page, so all workers do.
    fn let_go<T: Send>(&self, things: Vec<T>) {
        let share = things.len().div_ceil(self.options.workers).max(1);
        let mut things = things.into_iter();
        let part = |_| things.by_ref().take(share).collect();
        let mut parts: Vec<Vec<T>> = (0..self.options.workers).map(part).collect();
        self.run_parts(&mut parts, &|part| part.clear());
    }

    /// Applies what some chains have for nodes that are not among `damaged`; returns those that become so. Dirty
    /// ones go to the list that has the number `part`.
    fn apply_chains(
        &self,
        part: usize,
        chains: &Chains,
        batches: &[Records],
        damaged: &Damages,
    ) -> Result<Damages, Error> {
        let mut found = chains.damages().clone();
        found.retain(|nid, _| !damaged.contains_key(nid));
        for changed in chains.changed() {
            if damaged.contains_key(&changed.nid.0) {
                continue;
            }
            match self.replay_node(part, &changed, batches) {
                Err(Error::DamagedNode { damage, .. } | Error::Damaged(damage)) => {
                    found.insert(changed.nid.0, damage);
                }
                other => other?,
            }
        }
        Ok(found)
    }

    /// Applies one node's changes of a group.
    fn replay_node(
        &self,
        part: usize,
        changed: &Changed<'_>,
        batches: &[Records],
    ) -> Result<(), Error> {
        let nid = changed.nid;
        let changes = changed.entries(batches).map(Change::from);
        // Of an earlier group (invariant 3).
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

/// Checks the first change of a node that the group deletes, where the node has this version before, and exists or does not
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

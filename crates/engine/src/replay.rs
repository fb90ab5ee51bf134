//! Replay: nodes are brought to the state that the journal's run describes.
//!
//! The run was verified whole before; it is read again here in groups of batches, so that what
//! is in memory is one group and the nodes that changed, not the journal.
//!
//! Invariants:
//! 1. A group has all changes of some consecutive epochs. What follows on a node never has a
//!    smaller epoch, so sorting a node's changes by version within a group puts all in order.
//! 2. A delta is applied only if its version is exactly the node's next; those up to the version
//!    that the table names are in the image already. A merge is applied only to the version that
//!    it names; the image has those of earlier versions, and none of its own (`op.rs`, invariant 6).
//!    It is pending again until the next change of the node, or the end of the run, settles it with all others of
//!    its version: the journal has these in no order.
//! 3. Until the last group is done every replayed node is in the cache, dirty, and so stays
//!    there; nobody else looks. Allocators hear of nodes after that, once each.

use crate::batches::Run;
use crate::content::Content;
use crate::error::Error;
use crate::node::{Body, Cell, new_cell, suits};
use crate::op::Dirty;
use crate::recovery::{RecoveryReport, damaged};
use crate::space_map::SpaceDelta;
use crate::store::Store;
use base::canary::{Canary, planted};
use base::sync::{Arc, Mutex, rank};
use format::checkpoint::CheckpointRecord;
use format::journal::{Action, parse_records};
use format::table::{KIND_SPACE_MAP, SPACE_MAP_FIRST};
use format::{Damage, Nid};
use std::collections::BTreeMap;

/// Bytes of batches that make a group, at most: enough work for all workers. A batch, which is
/// as large as its writer let records wait for a commit, is never divided.
const GROUP_BYTES_MAX: usize = 4 << 20;

/// A logged change of one node.
pub(crate) struct Change<'a> {
    pub version: u64,
    pub action: Action,
    pub kind: u8,
    pub body: &'a [u8],
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

impl<C: Content> Store<C> {
    /// Replays the run; returns the nodes that it cannot bring up to date.
    pub(crate) fn replay(
        &self,
        record: &CheckpointRecord,
        run: &Run,
        report: &mut RecoveryReport,
    ) -> Result<Damages, Error> {
        let group_bytes = self.options.staging_bytes.min(GROUP_BYTES_MAX);
        let mut damages = Damages::new();
        let mut group: Vec<Vec<u8>> = Vec::new();
        let mut bytes = 0;
        run.for_each(&self.array, record, |batch| {
            bytes += batch.records.len();
            group.push(batch.records);
            if bytes >= group_bytes {
                self.replay_group(&group, &mut damages, report)?;
                group.clear();
                bytes = 0;
            }
            Ok(())
        })?;
        self.replay_group(&group, &mut damages, report)?;
        self.adopt_replayed(&mut damages, report)?;
        Ok(damages)
    }

    fn replay_group(
        &self,
        group: &[Vec<u8>],
        damages: &mut Damages,
        report: &mut RecoveryReport,
    ) -> Result<(), Error> {
        let mut changes: BTreeMap<u64, Vec<Change<'_>>> = BTreeMap::new();
        for records in group {
            let parsed = parse_records(records, |entries| {
                for entry in entries.iter().filter(|e| e.action != Action::Sum) {
                    report.deltas += 1;
                    changes.entry(entry.nid).or_default().push(Change {
                        version: entry.version,
                        action: entry.action,
                        kind: entry.kind,
                        body: entry.body,
                    });
                }
                Ok(())
            });
            report.records += parsed.map_err(Error::Damaged)? as u64;
        }
        changes.retain(|nid, _| !damages.contains_key(nid));
        let workers = self.options.workers.min(changes.len() / 256 + 1);
        let work = Mutex::new(rank::INODE, changes.into_iter());
        let found: Mutex<Damages> = Mutex::new(rank::LEAF, Damages::new());
        let results = self.fan_out(workers, |_| {
            loop {
                let next = work.lock().next();
                let Some((nid, list)) = next else {
                    return Ok(());
                };
                match self.replay_node(Nid(nid), list) {
                    Err(Error::DamagedNode { damage, .. } | Error::Damaged(damage)) => {
                        found.lock().insert(nid, damage);
                    }
                    other => other?,
                }
            }
        });
        damages.append(&mut found.into_inner());
        results.into_iter().collect()
    }

    /// Applies one node's changes of a group.
    fn replay_node(&self, nid: Nid, changes: Vec<Change<'_>>) -> Result<(), Error> {
        // Of an earlier group (invariant 3).
        let Some(cell) = self.nodes.get(nid) else {
            if let Some((version, body)) = self.replayed_node(nid, changes)? {
                self.add_replayed(nid, version, body);
            }
            return Ok(());
        };
        let (version, body) = {
            let mut state = cell.write();
            (
                state.version,
                std::mem::replace(&mut state.body, Body::Gone),
            )
        };
        let (version, body) = self.apply_changes(nid, version, body, changes)?;
        if !suits(&cell, &body) {
            self.add_replayed(nid, version, body);
            return Ok(());
        }
        let mut state = cell.write();
        state.version = version;
        state.body = body;
        self.recharge(&cell, &state.body);
        Ok(())
    }

    fn add_replayed(&self, nid: Nid, version: u64, body: Body<C>) {
        let cell = new_cell(nid, version, body);
        self.nodes.insert(Arc::clone(&cell));
        self.mark_dirty(0, &cell);
    }

    /// A node as the table has it, with changes applied; `None`: its image has them all.
    pub(crate) fn replayed_node(
        &self,
        nid: Nid,
        mut changes: Vec<Change<'_>>,
    ) -> Result<Option<(u64, Body<C>)>, Error> {
        let entry = self.table.entry(nid)?;
        changes.retain(|change| !change.is_in(entry.version));
        let Some(first) = changes.iter().min_by_key(|change| change.order()) else {
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
        let dirty = self.dirty.lists[0].lock().clone();
        for Dirty { nid, cell } in dirty {
            let newest = self.nodes.get(nid);
            if damages.contains_key(&nid.0) || !newest.is_some_and(|n| Arc::ptr_eq(&n, &cell)) {
                continue;
            }
            if let Err(damage) = self.settle_replayed(&cell) {
                damages.insert(nid.0, damage);
                continue;
            }
            report.nodes += 1;
            let state = cell.read();
            if nid.0 < SPACE_MAP_FIRST {
                let in_use = !matches!(state.body, Body::Gone);
                self.nids.recover(nid, in_use, self)?;
                continue;
            }
            // A chunk of this array, or the node would be damaged.
            let chunk = (nid.0 - SPACE_MAP_FIRST) as u32;
            match &state.body {
                Body::Space(map) => self.space.recovered(chunk, Some(map.words())),
                _ => self.space.recovered(chunk, None),
            }
        }
        Ok(())
    }

    /// The run's end settles what is pending still (invariant 2).
    fn settle_replayed(&self, cell: &Arc<Cell<C>>) -> Result<(), Damage> {
        if !cell.read().body.is_pending() {
            return Ok(());
        }
        let mut state = cell.write();
        state.body.settle();
        self.recharge(cell, &state.body);
        fits_an_image(&state.body)
    }

    /// Applies changes in version order (invariant 2). The last merges are pending afterwards.
    fn apply_changes(
        &self,
        nid: Nid,
        mut version: u64,
        mut body: Body<C>,
        mut changes: Vec<Change<'_>>,
    ) -> Result<(u64, Body<C>), Error> {
        changes.sort_by_key(Change::order);
        for change in changes {
            let (merge, to) = (change.action == Action::Merge, change.version);
            let follows = to == version + u64::from(!merge)
                || planted(Canary::VersionGapAccepted)
                || (merge && planted(Canary::MergesReplayedTwice));
            if !follows {
                let what = match merge {
                    false => format!("node {nid} goes from version {version} to {to}"),
                    true => format!("node {nid} merges at version {to}, but is at {version}"),
                };
                return Err(damaged("journal", what));
            }
            body = apply_change(body, change).map_err(|damage| Error::node(nid, damage))?;
            version += u64::from(!merge);
        }
        if let Some(why) = self.misfit(nid, &body) {
            return Err(Error::node(nid, Damage::new("journal", why)));
        }
        fits_an_image(&body).map_err(|damage| Error::node(nid, damage))?;
        Ok((version, body))
    }
}

/// Each change fits a node that it may find; together they may outgrow what an image holds.
fn fits_an_image<C: Content>(body: &Body<C>) -> Result<(), Damage> {
    let mut image = Vec::new();
    body.encode(&mut image);
    match image.len() <= format::item::PAYLOAD_MAX {
        true => Ok(()),
        false => Err(Damage::new(
            "journal",
            "its changes make the node larger than an image",
        )),
    }
}

fn apply_change<C: Content>(mut body: Body<C>, change: Change<'_>) -> Result<Body<C>, Damage> {
    let misfit = |what: &str| Damage::new("journal record", what);
    if change.action != Action::Merge || planted(Canary::MergesInLogOrder) {
        body.settle();
    }
    match (change.action, body) {
        (Action::Create, Body::Gone) => {
            if change.body.len() > format::item::PAYLOAD_MAX {
                return Err(misfit("creates a node over the bound"));
            }
            Body::decode(change.kind, change.body)
        }
        (Action::Create, _) => Err(misfit("creates a node that exists")),
        (_, Body::Gone) => Err(misfit("changes a node that does not exist")),
        (Action::Delete, _) => Ok(Body::Gone),
        (Action::Apply, Body::Space(mut map)) if change.kind == KIND_SPACE_MAP => {
            map.apply(&SpaceDelta::decode(change.body)?)?;
            Ok(Body::Space(map))
        }
        (Action::Fold, body) if change.body.is_empty() => Ok(body),
        (Action::Fold, _) => Err(misfit("folds with something else besides")),
        // Left out before.
        (Action::Sum, _) => Err(misfit("takes a checksum for a change")),
        (Action::Merge, Body::User(content)) if !content.merges() => {
            Err(misfit("merges into a node that takes no merged changes"))
        }
        (Action::Merge, Body::User(content)) => {
            content.merge_again(&C::decode_delta(change.kind, change.body)?)?;
            Ok(Body::User(content))
        }
        (Action::Apply, Body::User(mut content)) => {
            content.apply(&C::decode_delta(change.kind, change.body)?)?;
            Ok(Body::User(content))
        }
        (Action::Apply | Action::Merge, Body::Space(_)) => {
            Err(misfit("has the wrong kind for a space map"))
        }
    }
}

//! Chains are applied to their nodes, and allocators are told of these.
//!
//! 1. Until all is done every replayed node is in the cache, dirty, and so stays
//!    there; nobody else looks. Allocators hear of nodes after that, once each.
//! 2. Of a node that a chain deletes nothing older than the deletion is read or decoded, not even its image, unless the image is newer.
//!    What is checked of that is that the versions of all its changes follow one another, and the first of them on the
//!    image's, and that each finds a node or, to create it, none. So no change is lost unnoticed, and with
//!    the deletion's version the node is gone: whoever gets its nid next begins beyond.
//! 3. What a chain does to a node depends on no other node: any worker may do it at any time.

use super::Change;
use super::changes::{fits_an_image, gap};
use crate::chains::{Arena, Chains, Changed, Logs};
use crate::content::Content;
use crate::dirty::Dirty;
use crate::error::Error;
use crate::node::{Body, Cell, new_cell, suits};
use crate::recovery::{RecoveryReport, damaged};
use crate::store::Store;
use base::canary::{Canary, planted};
use base::sync::Arc;
use format::table::SPACE_MAP_FIRST;
use format::{Damage, Nid};
use std::collections::BTreeMap;

/// Nodes that cannot be brought up to date, and why.
pub(super) type Damages = BTreeMap<u64, Damage>;

/// What the allocators are to be told of some nodes.
#[derive(Default)]
struct Settled {
    nodes: u64,
    nids: Vec<(Nid, bool)>,
    damages: Damages,
}

impl<C: Content> Store<C> {
    /// Applies what some chains have for nodes that are not among `damaged`, but for those that are carried on into an arena; returns
    /// those that become so. Dirty ones go to the list that has the number `part`.
    pub(super) fn sift_chains(
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
        // Of an earlier chain (invariant 1).
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
            let mut state = self.nodes.write(&cell);
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
        let mut state = self.nodes.write(&cell);
        state.version = version;
        state.body = body;
        self.recharge(&cell, &state.body);
        Ok(())
    }

    /// The version with which the journal says that a node is gone, if that is newer than what the table has (invariant 2).
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

    pub(super) fn add_replayed(&self, part: usize, nid: Nid, version: u64, body: Body<C>) {
        let cell = new_cell(nid, version, body);
        self.nodes.insert(Arc::clone(&cell));
        self.mark_dirty(part, &cell);
    }

    /// Tells the allocators of nids and of space what replay made of the nodes (invariant 1).
    pub(super) fn adopt_replayed(
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

    /// The run's end settles what is pending still (invariant 1 of [`changes`](super::changes)).
    fn settle_replayed(&self, nid: Nid, cell: &Arc<Cell<C>>, settled: &mut Settled) {
        if cell.read().body.is_pending() {
            let mut state = self.nodes.write(cell);
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
}

/// Checks the first change of a node that a chain deletes, where the node has this version before, and exists or does not
/// (invariant 2).
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

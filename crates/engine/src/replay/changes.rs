//! What logged changes make of a node.
//!
//! 1. A delta is applied only if its version is exactly the node's next; those up to the version
//!    that the table names are in the image already. A merge is applied only to the version that
//!    it names; the image has those of earlier versions, and none of its own (`op.rs`, invariant 6).
//!    It is pending again until the next change of the node, or the end of the run, settles it with all others of
//!    its version: the journal has these in no order.

use crate::content::Content;
use crate::error::Error;
use crate::node::Body;
use crate::recovery::damaged;
use crate::space_map::SpaceDelta;
use crate::store::Store;
use base::canary::{Canary, planted};
use format::item::PAYLOAD_MAX;
use format::journal::{Action, Entry};
use format::table::KIND_SPACE_MAP;
use format::{Damage, Nid};

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
    /// Whether an image of this version has it (invariant 1).
    pub(super) fn is_in(&self, version: u64) -> bool {
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

impl<C: Content> Store<C> {
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
    pub(super) fn replayed_image<'a>(
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

    /// Applies changes that are in their order (invariant 1). The last merges are pending afterwards.
    pub(super) fn apply_changes<'a>(
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

pub(super) fn gap(nid: Nid, version: u64, to: u64, merge: bool) -> Error {
    let what = match merge {
        false => format!("node {nid} goes from version {version} to {to}"),
        true => format!("node {nid} merges at version {to}, but is at {version}"),
    };
    damaged("journal", what)
}

/// Each change fits a node that it may find; together they may outgrow what an image holds.
pub(crate) fn fits_an_image<C: Content>(body: &Body<C>) -> Result<(), Damage> {
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

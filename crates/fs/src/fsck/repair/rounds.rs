//! The rounds of a repair: check, mend, check again, until nothing is left.
//!
//! Invariants:
//! 1. Everything is decided by facts of one check, and a stage runs only in a round in which the
//!    stages before it changed nothing, so no decision rests on what the round itself changed.
//! 2. A round that finds something changes something; [`ROUNDS_MAX`] bounds what slips through. It mends all nodes with findings, also those of which none is kept.

use super::super::paths;
use super::super::state::{Blocks, CLAIMED, Facts, INODE, WRONG};
use super::super::{Check, Phase, Progress, contents};
use super::names::Subdirectories;
use super::{Action, ActionKind, Actions};
use crate::Error;
use crate::api::ROOT;
use crate::content::FsNode;
use crate::dir::NameHash;
use base::clock::Timestamp;
use engine::{Finding, Findings, Object, Salvage};
use format::Nid;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// More rounds than any sum of damages is known to take.
const ROUNDS_MAX: usize = 64;

/// What a round did.
enum Step {
    Changed,
    /// Nothing was found, or nothing can be done about it.
    Still,
    Trouble(String),
}

/// What keeps a repair from being made.
pub(super) enum Left {
    Finding(Finding),
    /// A device does not return what it holds.
    Trouble(String),
}

/// A repair in memory.
pub(super) struct Rounds<'a> {
    salvage: Salvage<FsNode>,
    hash: NameHash,
    progress: &'a (dyn Fn(Progress) + Sync),
    actions: Actions,
    /// Losses of the store that are among the actions already.
    losses: usize,
    /// Chunks that files had blocks in, in any round.
    ever: BTreeSet<u32>,
}

/// One round: what a check found, and what is changed because of it.
pub(super) struct Round<'r> {
    pub salvage: &'r Salvage<FsNode>,
    pub check: &'r Check<'r>,
    pub hash: &'r NameHash,
    pub now: Timestamp,
    pub actions: &'r mut Actions,
    /// Nodes with findings.
    pub nids: BTreeSet<Nid>,
    pub paths: BTreeMap<Nid, String>,
    /// Of the blocks that two extents claim, those that somebody got.
    pub taken: Blocks,
    /// New parents of directories.
    pub parents: BTreeMap<Nid, Nid>,
    pub subdirectories: Subdirectories,
    pub changed: bool,
}

impl<'a> Rounds<'a> {
    pub fn new(
        salvage: Salvage<FsNode>,
        hash: NameHash,
        progress: &'a (dyn Fn(Progress) + Sync),
    ) -> Self {
        Rounds {
            salvage,
            hash,
            progress,
            actions: Actions::default(),
            losses: 0,
            ever: BTreeSet::new(),
        }
    }

    pub fn take_actions(&mut self) -> Actions {
        self.note_losses();
        std::mem::take(&mut self.actions)
    }

    pub fn into_salvage(self) -> Salvage<FsNode> {
        self.salvage
    }

    /// Mends until nothing is found; says what keeps that from happening.
    pub fn run(&mut self) -> Result<Option<Left>, Error> {
        self.note_losses();
        for round in 0..ROUNDS_MAX {
            (self.progress)(Progress {
                phase: Phase::Mending,
                done: round as u64,
                total: ROUNDS_MAX as u64,
            });
            match self.round()? {
                Step::Changed => {}
                Step::Still => return self.conclude(),
                Step::Trouble(why) => return Ok(Some(Left::Trouble(why))),
            }
        }
        self.conclude()
    }

    fn note_losses(&mut self) {
        let losses = self.salvage.losses();
        for loss in &losses[self.losses.min(losses.len())..] {
            let kind = match (&loss.object, loss.lost) {
                _ if loss.kept => ActionKind::Doubtful,
                (Object::Journal, _) => ActionKind::Journal,
                (Object::Node(_), true) => ActionKind::Dropped,
                _ => ActionKind::Rebuilt,
            };
            self.actions.add(Action {
                kind,
                object: loss.object.clone(),
                path: None,
                what: loss.what.clone(),
                lost: loss.lost,
            });
        }
        self.losses = losses.len();
    }

    fn check(&self) -> Check<'a> {
        let store = Arc::clone(self.salvage.store());
        Check::new(store, self.hash.clone(), Findings::new(), self.progress)
    }

    fn round(&mut self) -> Result<Step, Error> {
        let check = self.check();
        check.examine();
        if let Some(why) = check.trouble() {
            return Ok(Step::Trouble(why));
        }
        self.ever.extend(check.blocks.left());
        let (findings, _) = check.findings.take();
        if findings.is_empty() {
            return Ok(Step::Still);
        }
        let kept = findings.iter().filter_map(|f| match f.object {
            Object::Node(nid) => Some(nid),
            _ => None,
        });
        let mut nids: BTreeSet<Nid> = kept.collect();
        check.inodes.each(|nid, facts| {
            if facts.is(WRONG) {
                nids.insert(nid);
            }
        });
        let mut round = Round {
            salvage: &self.salvage,
            hash: &self.hash,
            now: self.salvage.store().clock().now(),
            actions: &mut self.actions,
            nids,
            paths: paths::resolve(&check, &findings),
            taken: Blocks::new(self.salvage.store().array().geometry()),
            parents: BTreeMap::new(),
            subdirectories: Subdirectories::default(),
            check: &check,
            changed: false,
        };
        round.mend()?;
        Ok(match round.changed {
            true => Step::Changed,
            false => Step::Still,
        })
    }

    /// Makes the space maps, and checks everything once more.
    fn conclude(&mut self) -> Result<Option<Left>, Error> {
        let check = self.check();
        check.examine();
        if let Some(left) = check.left() {
            return Ok(Some(left));
        }
        let blocks = check.close();
        let ever = &self.ever;
        let set = self
            .salvage
            .set_space(|chunk| blocks.claims(chunk), |chunk| ever.contains(&chunk));
        set.map_err(|error| match error {
            engine::SalvageError::Store(error) => Error::from(error),
            error => Error::Damage(format::Damage::new("space map", error.to_string())),
        })?;
        self.note_losses();
        let check = self.check();
        check.examine();
        check.check_space();
        Ok(check.left())
    }
}

impl Check<'_> {
    /// All passes but the one over space maps.
    fn examine(&self) {
        self.store.visit(&|_| true, &contents::Contents(self));
        self.check_names();
        self.check_links();
        self.check_reach();
        self.check_shared_blocks();
    }

    /// A device did not return something, and what was found means nothing.
    fn trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    fn left(&self) -> Option<Left> {
        let (left, _) = self.findings.take();
        let worst = left.into_iter().max_by_key(|finding| finding.severity);
        let trouble = self.trouble().map(Left::Trouble);
        trouble.or(worst.map(Left::Finding))
    }

    fn close(self) -> Blocks {
        self.blocks
    }
}

impl Round<'_> {
    /// Invariant 1.
    fn mend(&mut self) -> Result<(), Error> {
        self.structure()?;
        if !self.changed {
            self.place()?;
        }
        if !self.changed {
            self.counts()?;
        }
        Ok(())
    }

    fn structure(&mut self) -> Result<(), Error> {
        self.required()?;
        // What is below a node that has gone to another is by this check its former owner's still. The next one tells whose it is, once that owner
        // has let go of the node.
        let losers = self.settle_contested()?;
        let any_lost = !losers.is_empty();
        for nid in self.ranked(losers.into_iter().collect())? {
            self.mend_inode(nid)?;
        }
        if any_lost && self.changed {
            return Ok(());
        }
        let inodes: Vec<Nid> = self
            .nids
            .iter()
            .copied()
            .filter(|nid| self.facts(*nid).is_some_and(|facts| facts.is(INODE)))
            .collect();
        for nid in self.ranked(inodes)? {
            self.mend_inode(nid)?;
        }
        Ok(())
    }

    /// Inodes in the order in which they are mended: who comes first keeps a contested block.
    fn ranked(&self, inodes: Vec<Nid>) -> Result<Vec<Nid>, Error> {
        if !self.check.blocks.any_shared() {
            return Ok(inodes);
        }
        let mut ranked = Vec::new();
        for nid in inodes {
            let changed = self.load(nid)?.map(|node| match node {
                FsNode::Inode(inode) => (inode.ctime.sec(), inode.ctime.nsec()),
                _ => (0, 0),
            });
            let nameless = self.facts(nid).is_none_or(|facts| facts.refs == 0);
            ranked.push((nameless, std::cmp::Reverse(changed), nid));
        }
        ranked.sort_unstable();
        Ok(ranked.into_iter().map(|(_, _, nid)| nid).collect())
    }

    pub fn facts(&self, nid: Nid) -> Option<Facts> {
        self.check.inodes.get(nid)
    }

    /// An inode that some directory names.
    pub fn is_named(facts: &Facts) -> bool {
        match facts.is_dir() {
            true => facts.is(CLAIMED),
            false => facts.refs > 0,
        }
    }

    /// The node as it is now; `None` when there is none.
    pub fn load(&self, nid: Nid) -> Result<Option<FsNode>, Error> {
        let node = self
            .salvage
            .store()
            .get(nid)
            .and_then(|node| node.into_read());
        match node {
            Ok(node) => Ok(Some(node.clone())),
            Err(engine::Error::Gone(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    pub fn put(&mut self, nid: Nid, node: FsNode) -> Result<(), Error> {
        self.changed = true;
        self.subdirectories.forget(nid);
        Ok(self.salvage.put(nid, node)?)
    }

    pub fn delete(&mut self, nid: Nid) -> Result<(), Error> {
        self.changed = true;
        self.subdirectories.forget(nid);
        Ok(self.salvage.delete(nid)?)
    }

    pub fn path(&self, nid: Nid) -> Option<String> {
        match nid {
            ROOT => Some("/".into()),
            nid => self.paths.get(&nid).cloned(),
        }
    }

    pub fn act(&mut self, kind: ActionKind, nid: Nid, lost: bool, what: impl Into<String>) {
        let path = self.path(nid);
        self.act_at(kind, nid, path, lost, what);
    }

    pub fn act_at(
        &mut self,
        kind: ActionKind,
        nid: Nid,
        path: Option<String>,
        lost: bool,
        what: impl Into<String>,
    ) {
        self.actions.add(Action {
            kind,
            object: Object::Node(nid),
            path,
            what: what.into(),
            lost,
        });
    }
}

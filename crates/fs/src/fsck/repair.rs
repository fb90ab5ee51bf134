//! Repair: what can be made right is made right, and only what is damaged goes.
//!
//! **What is truth**: inodes, names, extents, attributes: node images that can be read. **What is
//! derived**, and made anew where it does not agree: link counts, a directory's size, its
//! parent, block counts, the lists of unlinked inodes, and below (`engine`'s `Salvage`) space
//! maps, segment table, chunk states, free nids.
//!
//! **Order of work**
//!
//! 1. [`engine::Salvage`] puts together what can be read of the store, in memory.
//! 2. Rounds: the check of [`super`] looks at it, and what it names is mended, in memory, in
//!    stages; a later stage waits for a round in which the earlier ones change nothing.
//!    - *structure* (`contents`, `names`): each inode by itself, its trees rebuilt from the
//!      leaves that are there; names that refer to nothing go;
//!    - *place* (`places`): what has no name, or is its own ancestor, gets one in `/lost+found`;
//!    - *counts* (`places`): links, lists of unlinked inodes; nodes that nobody owns go.
//! 3. When the check finds nothing more, the space maps are made from the files, and the check runs
//!    once more, over everything. If it finds anything, nothing is written. Nor is anything where old devices are to be accepted and the room may not be enough:
//!    from the first write on their latest states no longer fit the others.
//! 4. `Salvage::publish`, **the one commit point**: a checkpoint beside the old state.
//! 5. Labels of old devices, which are refused until then; copies of labels and checkpoint records; then the file system is opened and closed once, which
//!    deletes unlinked files and makes both checkpoint slots good.
//!
//! An interruption before step 4's record leaves the old state, and the repeat starts from it; after
//! it the file system is sound, and a repeat does what is left of step 5; it names old devices again whose labels it finds. So a repair that is
//! interrupted any number of times ends like one that is not. One that fails after the record tells what is lost
//! ([`Outcome::Unfinished`]): no repeat finds it any more.
//!
//! **Who keeps what two claim.** A block: the file that has a name before one that has none, then
//! the one whose inode changed last (a block is given away after its former owner lost it), then
//! the lower inode number; the others read as holes there. A node: the inode whose tree adds up
//! with it, then the one seen first. A directory with two names: the one in the directory that it
//! says is its parent.
//!
//! What a repair cannot know: whether a block that an old state names has been written by another
//! file since (file data has no checksums), and whether an image found by a scan belongs to a
//! node that was deleted meanwhile; such files come back in `/lost+found`.

mod collect;
mod contents;
mod names;
mod places;
mod rounds;
#[cfg(test)]
mod tests;

use super::{FsckOptions, Phase, Progress, Report, fsck};
use crate::filesystem::{FileSystem, FsOptions};
use crate::{DataOptions, Error};
use base::clock::Clock;
use device::Array;
use engine::{Object, Salvage, SalvageError, Severity};
use format::Nid;
use format::checkpoint::CheckpointRecord;
use rounds::{Left, Rounds};
use std::collections::HashMap;
use std::sync::Arc;

/// How a repair runs.
#[derive(Clone, Debug)]
pub struct RepairOptions {
    /// Of the checks.
    pub check: FsckOptions,
    /// Nothing is written: the report says what would be done.
    pub dry_run: bool,
    /// Nothing is written if anything would be lost that only the damaged parts held.
    pub lossless: bool,
    pub clock: Clock,
}

impl Default for RepairOptions {
    fn default() -> Self {
        RepairOptions {
            check: FsckOptions::default(),
            dry_run: false,
            lossless: false,
            clock: Clock::real(),
        }
    }
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ActionKind {
    /// A damaged node, or one that nobody owns, is gone.
    Dropped,
    /// What a file synced last cannot be read, so nobody knows whether it is there; the file stays as it is.
    Doubtful,
    /// A part of a file reads as zeros.
    Hole,
    /// A name was removed, or corrected.
    Name,
    /// An extended attribute was removed, or corrected.
    Attribute,
    /// A field of an inode was corrected.
    Field,
    /// A link count was corrected.
    Links,
    /// What had no name has one in `/lost+found`.
    Found,
    /// A directory that must exist was made.
    Created,
    /// The list of unlinked inodes was made anew.
    Orphans,
    /// A table, a map or a tree was made anew.
    Rebuilt,
    /// The journal was cut.
    Journal,
    /// A second copy was written again.
    Copy,
    /// What a device held before the last mounts counts as what it holds now.
    Outdated,
}

impl ActionKind {
    /// A word for programs that read reports.
    pub fn name(self) -> &'static str {
        match self {
            ActionKind::Dropped => "dropped",
            ActionKind::Doubtful => "doubtful",
            ActionKind::Hole => "hole",
            ActionKind::Name => "name",
            ActionKind::Attribute => "attribute",
            ActionKind::Field => "field",
            ActionKind::Links => "links",
            ActionKind::Found => "found",
            ActionKind::Created => "created",
            ActionKind::Orphans => "orphans",
            ActionKind::Rebuilt => "rebuilt",
            ActionKind::Journal => "journal",
            ActionKind::Copy => "copy",
            ActionKind::Outdated => "outdated",
        }
    }
}

/// One thing that a repair did, or would do.
#[derive(Clone, Debug)]
pub struct Action {
    pub kind: ActionKind,
    pub object: Object,
    /// A path of the file concerned, if one is known; bytes that are not UTF-8 are replaced.
    pub path: Option<String>,
    pub what: String,
    /// Something is gone for good.
    pub lost: bool,
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{path} ({}): {}", self.object, self.what),
            None => write!(f, "{}: {}", self.object, self.what),
        }
    }
}

/// How a repair ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing was wrong.
    Sound,
    /// Nothing was written, as asked for; the actions would repair it.
    Planned,
    /// Everything that was wrong is repaired, as the last check in memory found. Whether the devices hold it, a
    /// [`fsck()`] of the array, assembled anew, tells; `sheaf fsck` makes one.
    Repaired,
    /// Nothing was written: the array is as it was.
    Refused { why: String, remedy: String },
    /// Old states of devices were to be accepted, and the repair failed after its first write and before its record, for want of room or by what cannot be read. The array is refused as before; the latest
    /// states of those devices no longer fit it.
    Begun { why: String, remedy: String },
    /// The repair is written, with the losses that the actions name, and this kept what follows it from its end: copies of labels and
    /// checkpoint records, and the deletion of unlinked files. Whether the devices hold it is in doubt if one failed before the record was written for certain. Where old states of devices are accepted
    /// the array may be refused as before until a repeat, and their latest states no longer fit it.
    Unfinished {
        why: String,
        remedy: String,
        in_doubt: bool,
    },
}

/// What a repair found and did.
#[derive(Clone, Debug)]
pub struct RepairReport {
    pub outcome: Outcome,
    /// The check before.
    pub before: Report,
    pub actions: Vec<Action>,
    /// Actions beyond the most that are kept.
    pub more_actions: u64,
    lost: bool,
}

impl RepairReport {
    /// Whether something is gone for good, by any action, kept or not.
    pub fn lost(&self) -> bool {
        self.lost
    }
}

/// Actions that are kept; more are counted only.
pub const ACTIONS_MAX: usize = 10_000;

/// A bounded list of actions.
#[derive(Debug, Default)]
struct Actions {
    list: Vec<Action>,
    more: u64,
    /// One of them, kept or not, loses something.
    lost: bool,
    /// Those on nodes without a path, by node.
    pathless: HashMap<Nid, Vec<usize>>,
}

impl Actions {
    fn add(&mut self, action: Action) {
        self.lost |= action.lost;
        if self.list.len() >= ACTIONS_MAX {
            self.more += 1;
            return;
        }
        // A round may say again what an earlier one said.
        let again = |a: &Action| {
            (a.kind, &a.object, &a.path, &a.what)
                == (action.kind, &action.object, &action.path, &action.what)
        };
        if self.list.iter().rev().take(200).any(again) {
            return;
        }
        if let (Object::Node(nid), None) = (&action.object, &action.path) {
            self.pathless.entry(*nid).or_default().push(self.list.len());
        }
        self.list.push(action);
    }

    /// A path for what was noted before anybody knew its name.
    fn name(&mut self, nid: Nid, path: &str) {
        for index in self.pathless.remove(&nid).unwrap_or_default() {
            self.list[index].path = Some(path.to_owned());
        }
    }
}

fn refused(why: impl std::fmt::Display, remedy: &str) -> Outcome {
    Outcome::Refused {
        why: why.to_string(),
        remedy: remedy.to_owned(),
    }
}

const RESCUE: &str = "copy that device to a sound one with ddrescue, and repair the copy";
const COPY_OUT: &str = "mount it read-only, copy out what is needed, make the file system anew";
const BACKUP: &str = "make the file system anew, and copy back from a backup";
const REPEAT: &str = "repeat the repair, which goes on from what the devices hold now";

/// Checks a file system and repairs what is wrong; see the module's head. The array is open for
/// writing, except for a dry run. Damage is never an error of this function.
///
/// # Errors
/// What is not the devices' fault (a thread that cannot be started, say); or a device that fails
/// while nothing but copies of labels and records is written; or
/// [`device::Error::InUse`] while a file system is open on the array's devices.
pub fn repair(
    array: &Arc<Array>,
    options: &RepairOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<RepairReport, Error> {
    if !options.dry_run {
        // Each step that writes takes the right anew; here it is asked for before anything is done.
        drop(array.writer().map_err(engine::Error::from)?);
    }
    let before = fsck(Arc::clone(array), &options.check, progress)?;
    let mut report = RepairReport {
        outcome: Outcome::Sound,
        before,
        actions: Vec::new(),
        more_actions: 0,
        lost: false,
    };
    let copy = |object: &Object| matches!(object, Object::Label { .. } | Object::Slot { .. });
    let (copies, rest): (Vec<_>, Vec<_>) = report
        .before
        .findings
        .iter()
        .partition(|finding| copy(&finding.object));
    if copies.is_empty() && rest.is_empty() {
        return Ok(report);
    }
    let mut actions = Actions::default();
    let mut salvage = None;
    if !rest.is_empty() {
        match mend(array, options, &mut actions, progress)? {
            Ok(mended) => {
                salvage = Some(mended);
                outdated(array).for_each(|old| actions.add(old));
                for finding in &rest {
                    if let (Object::Node(nid), Some(path)) = (&finding.object, &finding.path) {
                        actions.name(*nid, path);
                    }
                }
            }
            Err(outcome) => {
                report.outcome = outcome;
                return Ok(report.with(actions));
            }
        }
    }
    for finding in &copies {
        // Where both copies of the newer slot are gone, the journal has what came since, or its
        // batches tell that something is lost, and that is an action then.
        let what = format!("{}; written again", finding.what);
        actions.add(Action {
            kind: ActionKind::Copy,
            object: finding.object.clone(),
            path: None,
            what,
            lost: false,
        });
    }
    if options.lossless && actions.lost {
        let why = "something would be lost";
        report.outcome = refused(why, "look at the list, then run `sheaf fsck --repair`");
    } else if options.dry_run {
        report.outcome = Outcome::Planned;
    } else {
        report.outcome = match salvage {
            Some(salvage) if !engine::outdated(array).is_empty() => {
                accept(array, options, salvage, progress)?
            }
            salvage => write(array, options, salvage, progress)?,
        };
    }
    if matches!(report.outcome, Outcome::Unfinished { .. }) {
        // Which of them are written another check tells.
        actions
            .list
            .retain(|action| action.kind != ActionKind::Copy);
    }
    Ok(report.with(actions))
}

/// What was written to a device since it was as it is now is gone, whatever else is right.
fn outdated(array: &Array) -> impl Iterator<Item = Action> {
    let action = |found: device::Outdated| Action {
        kind: ActionKind::Outdated,
        object: Object::Label {
            device: found.device,
            copy: 0,
        },
        path: None,
        what: format!(
            "accepted as it was at mount {}: all that was written to it up to mount {} is lost, also in files that are not named here",
            found.mount, found.newest
        ),
        lost: true,
    };
    engine::outdated(array).into_iter().map(action)
}

impl RepairReport {
    fn with(mut self, actions: Actions) -> RepairReport {
        (self.actions, self.more_actions, self.lost) = (actions.list, actions.more, actions.lost);
        // What does not open is not mounted read-only either.
        if let Outcome::Refused { remedy, .. } | Outcome::Begun { remedy, .. } = &mut self.outcome
            && self.before.worst() == Some(Severity::Fatal)
            && remedy == COPY_OUT
        {
            *remedy = BACKUP.to_owned();
        }
        self
    }
}

/// Steps 1 to 3.
fn mend(
    array: &Arc<Array>,
    options: &RepairOptions,
    actions: &mut Actions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Result<Salvage<crate::content::FsNode>, Outcome>, Error> {
    let mut store_options = options.check.store();
    store_options.clock = options.clock.clone();
    let salvage = match Salvage::open(array, store_options) {
        Ok(salvage) => salvage,
        Err(error) => return outcome_of(error).map(Err),
    };
    let mut rounds = Rounds::new(salvage, options.check.hash(array), progress);
    let mended = rounds.run();
    *actions = rounds.take_actions();
    Ok(match refusal(mended)? {
        None => Ok(rounds.into_salvage()),
        Some(refused) => Err(refused),
    })
}

/// What keeps rounds that ended so from being published; `None`: nothing.
fn refusal(mended: Result<Option<Left>, Error>) -> Result<Option<Outcome>, Error> {
    let (why, remedy) = match mended {
        Ok(None) => return Ok(None),
        Ok(Some(Left::Trouble(why))) => (why, RESCUE),
        Ok(Some(Left::Finding(left))) => {
            let why = format!("this would be left: {}: {}", left.object, left.what);
            (why, COPY_OUT)
        }
        Err(Error::NoSpace) => ("no inode number is left".into(), COPY_OUT),
        Err(Error::Store(error @ engine::Error::Device(_))) => (error.to_string(), RESCUE),
        // Something that no round made right, and that the next stumbled over.
        Err(error @ (Error::Damage(_) | Error::Damaged { .. })) => (error.to_string(), COPY_OUT),
        Err(error) => return Err(error),
    };
    Ok(Some(refused(why, remedy)))
}

/// What keeps a repair from being made; an error if that is not the array's fault.
fn outcome_of(error: SalvageError) -> Result<Outcome, Error> {
    match error {
        SalvageError::Unreadable(why) => Ok(refused(why, RESCUE)),
        SalvageError::Store(engine::Error::Device(error)) => Ok(refused(error, RESCUE)),
        SalvageError::Store(engine::Error::Damaged(damage)) => Ok(refused(damage, BACKUP)),
        SalvageError::Store(engine::Error::NoSpace) => {
            let why = "there is no room to write the repaired metadata beside the damaged";
            Ok(refused(why, COPY_OUT))
        }
        SalvageError::Store(error) => Err(error.into()),
    }
}

/// Steps 4 and 5 where old states of devices are accepted. From the first write on their latest states are worthless, so what can be known to fail is not begun.
fn accept(
    array: &Arc<Array>,
    options: &RepairOptions,
    salvage: Salvage<crate::content::FsNode>,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Outcome, Error> {
    if let Err(error) = salvage.check_room() {
        return outcome_of(error);
    }
    let (why, remedy) = match write(array, options, Some(salvage), progress) {
        Ok(Outcome::Refused { why, remedy }) => (why, remedy),
        Err(error @ Error::Store(engine::Error::Device(_))) => (error.to_string(), RESCUE.into()),
        Err(error) => (error.to_string(), REPEAT.into()),
        done => return done,
    };
    Ok(Outcome::Begun { why, remedy })
}

/// Steps 4 and 5.
fn write(
    array: &Arc<Array>,
    options: &RepairOptions,
    salvage: Option<Salvage<crate::content::FsNode>>,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Outcome, Error> {
    let step = |done| {
        progress(Progress {
            phase: Phase::Writing,
            done,
            total: 3,
        });
    };
    step(0);
    let Some(salvage) = salvage else {
        finish(array, options, None, &step)?;
        return Ok(Outcome::Repaired);
    };
    let mount = match salvage.publish() {
        Ok(mount) => mount,
        Err(
            error @ (SalvageError::Unreadable(_)
            | SalvageError::Store(engine::Error::NoSpace | engine::Error::Damaged(_))),
        ) => return outcome_of(error),
        // One copy of the record may be there.
        Err(SalvageError::Store(error)) => return Ok(unfinished(&error.into(), true)),
    };
    // From here on what is lost is lost, whatever fails.
    Ok(match finish(array, options, Some(mount), &step) {
        Ok(()) => Outcome::Repaired,
        Err(error) => unfinished(&error, false),
    })
}

fn unfinished(error: &Error, in_doubt: bool) -> Outcome {
    let remedy = match error {
        Error::Store(engine::Error::Device(error)) => match **error {
            // Somebody came between two steps.
            device::Error::InUse { .. } => REPEAT,
            _ => RESCUE,
        },
        _ => REPEAT,
    };
    Outcome::Unfinished {
        why: error.to_string(),
        remedy: remedy.to_owned(),
        in_doubt,
    }
}

/// Step 5. All labels say the mount, if there is a new one.
fn finish(
    array: &Arc<Array>,
    options: &RepairOptions,
    mount: Option<u64>,
    step: &dyn Fn(u64),
) -> Result<(), Error> {
    step(1);
    {
        let _writer = array.writer().map_err(engine::Error::from)?;
        if let Some(mount) = mount {
            array.note_mount(mount).map_err(engine::Error::from)?;
        }
        array.repair_labels().map_err(engine::Error::from)?;
        write_slots(array)?;
        array.flush().map_err(engine::Error::from)?;
    }
    step(2);
    settle(array, options)?;
    step(3);
    Ok(())
}

/// Writes damaged copies of checkpoint records again from the good ones, which are left alone: a power cut may tear what is written.
fn write_slots(array: &Array) -> Result<(), Error> {
    for slot in 0..2 {
        let copies = [0, 1].map(|copy| {
            let block = array.read_slot(slot, copy).ok()?;
            let record = CheckpointRecord::parse(&block, &array.metadata_uuid()).ok()?;
            Some((record.sequence.get(), block))
        });
        let newest = copies
            .iter()
            .flatten()
            .max_by_key(|(sequence, _)| *sequence);
        let Some((sequence, good)) = newest else {
            continue;
        };
        let same = |copy: &Option<(u64, _)>| copy.as_ref().is_some_and(|c| c.0 == *sequence);
        let bad: Vec<usize> = (0..2).filter(|copy| !same(&copies[*copy])).collect();
        if !bad.is_empty() {
            let written = array.write_slot_copies(slot, &bad, good);
            written.map_err(engine::Error::from)?;
        }
    }
    Ok(())
}

/// An ordinary open and close: unlinked inodes are deleted, and both slots are written.
fn settle(array: &Arc<Array>, options: &RepairOptions) -> Result<(), Error> {
    let mut store = options.check.store();
    store.read_only = false;
    store.clock = options.clock.clone();
    let fs = FileSystem::open(
        Arc::clone(array),
        FsOptions {
            store,
            data: DataOptions::default(),
            hash_mask: options.check.hash_mask,
            atomic_bytes: None,
        },
    )?;
    fs.close()
}

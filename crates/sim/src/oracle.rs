//! What a crash may leave, by what was done before it.
//!
//! 1. Names, links and attributes are those after some prefix of the operations, since all
//!    metadata goes through one journal in order. The prefix contains everything synced.
//! 2. A file's content is made of what it held when it was last synced and of later writes,
//!    sector by sector ([`History`]); a file that was cut to nothing and rewritten is old or new.
//! 3. A file that took another's place by rename has at least the content of that moment.
//! 4. Times are those of some operation of the prefix ([`Changes`]).
//! 5. What an atomic write has staged is nowhere until its commit, which is an operation of its own; the version that it makes of its file is
//!    there exactly when that operation is.

use crate::content::History;
use crate::lies::Spared;
use crate::look::Found;
use crate::op::{Atomic, How, Op, pattern};
use crate::staged::Staged;
use crate::times::{Beginnings, Changes, Shown, Stamp};
use crate::tree::{Change, Id, Kind, Outcome, TOP, Tree};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// After this many operations, the file has at least that version.
#[derive(Clone, Debug)]
struct Barrier {
    operations: usize,
    file: Id,
    version: usize,
}

#[derive(Clone, Debug)]
pub struct Oracle {
    /// After each operation since the newest that is known durable; that one is first.
    states: Vec<Arc<Tree>>,
    /// Operations before the first of `states`.
    before: usize,
    contents: BTreeMap<Id, History>,
    /// When the content of each file changed.
    changes: BTreeMap<Id, Changes>,
    /// When operations began.
    when: Beginnings,
    /// The last operation on each thing's names and attributes.
    touched: BTreeMap<Id, usize>,
    /// What it was before the newest operation.
    untouched: Vec<(Id, Option<usize>)>,
    barriers: Vec<Barrier>,
    /// Of transactions: the version is there exactly when the operation is.
    atomic: Vec<Barrier>,
    /// Files that somebody has open, with a name or without.
    held: BTreeSet<Id>,
    /// What atomic writes have staged, by their numbers.
    staged: BTreeMap<u64, Staged>,
    /// The one that staged last, as it was before.
    unstaged: Option<Staged>,
    /// The newest operation is the commit of an atomic write.
    is_commit: bool,
    /// Nothing but a sync writes data back: no shortage of memory or space.
    calm: bool,
}

impl Oracle {
    pub fn new(calm: bool) -> Oracle {
        Oracle {
            states: vec![Arc::default()],
            before: 0,
            contents: BTreeMap::new(),
            changes: BTreeMap::new(),
            when: Beginnings::default(),
            touched: BTreeMap::new(),
            untouched: Vec::new(),
            barriers: Vec::new(),
            atomic: Vec::new(),
            held: BTreeSet::new(),
            staged: BTreeMap::new(),
            unstaged: None,
            is_commit: false,
            calm,
        }
    }

    pub fn now(&self) -> &Tree {
        self.states.last().expect("there is a state")
    }

    /// The regular file at a path, or the one with the number behind an `@` if it is held, whatever has become of its names.
    pub fn file(&self, path: &str) -> Option<Id> {
        match path.strip_prefix('@') {
            Some(number) => number.parse().ok().filter(|id| self.held.contains(id)),
            None => self.now().file(path),
        }
    }

    /// Files that are held and have no name any more.
    pub fn orphans(&self) -> Vec<Id> {
        let named = &self.now().things;
        let held = self.held.iter().copied();
        held.filter(|id| !named.contains_key(id)).collect()
    }

    /// The newest content of a file.
    pub fn content(&self, id: Id) -> &Arc<Vec<u8>> {
        self.contents[&id].now()
    }

    fn operations(&self) -> usize {
        self.before + self.states.len() - 1
    }

    fn history(&mut self, id: Id) -> &mut History {
        self.contents.get_mut(&id).expect("a file has a history")
    }

    fn durable_through(&mut self, operations: usize) {
        let drop = operations.saturating_sub(self.before);
        self.states.drain(..drop);
        self.before += drop;
    }

    /// Whether names and attributes are what they may be, whatever files hold.
    pub fn allows_names(&self, found: &Found) -> bool {
        let mut states = self.states.iter();
        states.any(|tree| found.matches(tree).is_some())
    }

    /// Everything done so far is durable.
    pub fn all_durable(&mut self) {
        self.durable_through(self.operations());
        self.contents.values_mut().for_each(History::durable);
        self.changes.values_mut().for_each(Changes::durable);
    }

    /// The first directory shows these times, which no operation of the model has set.
    pub fn learn_top(&mut self, shown: Shown) {
        let newest = self.states.last_mut().expect("there is a state");
        let top = Arc::make_mut(newest).at_mut(TOP);
        (top.mtime, top.ctime) = (shown.mtime, shown.ctime);
    }

    /// Notes that an operation begins at `now`: from then on a crash may leave its outcome. An
    /// errno means that it must fail with that.
    pub fn begin(&mut self, op: &Op, now: Stamp) -> Outcome<Change> {
        self.when.push(now);
        self.is_commit = false;
        self.untouched.clear();
        match op {
            Op::Tx { ops, .. } => return self.begin_transaction(ops, now),
            Op::Atomic { number, step } => return self.begin_atomic(*number, step, now),
            Op::Remount => {
                self.staged.clear();
                self.held.clear();
            }
            Op::Hold(path) => self.held.extend(self.file(path)),
            Op::Release(path) => {
                if let Some(id) = self.file(path) {
                    self.held.remove(&id);
                }
            }
            _ => {}
        }
        if let Op::Rename(from, ..) = op
            && let Some(id) = self.now().file(from)
        {
            self.history(id).write_back();
        }
        let mut next = self.now().clone();
        next.began = now;
        let change = next.apply(op)?;
        if !change.idle {
            self.states.push(Arc::new(next));
            let number = self.operations();
            self.touch(&change.touched, number);
            if let Some(id) = change.created {
                self.contents.insert(id, History::new(Vec::new()));
                if self.now().at(id).kind == Kind::File {
                    self.changes.insert(id, Changes::new(now, 0));
                }
            }
            self.write_back_before(&change.replacers, number);
        }
        self.begin_content(op, &change);
        self.begin_change(op, &change, now);
        Ok(change)
    }

    /// Notes a transaction: one state, and one version of each file.
    fn begin_transaction(&mut self, ops: &[Op], now: Stamp) -> Outcome<Change> {
        let mut next = self.now().clone();
        next.began = now;
        let mut whole = Change::default();
        let mut contents: BTreeMap<Id, Vec<u8>> = BTreeMap::new();
        let mut times: BTreeMap<Id, Vec<Result<u64, Option<u64>>>> = BTreeMap::new();
        let mut replacers = Vec::new();
        for op in ops {
            let change = next.apply(op)?;
            whole.touched.extend(change.touched);
            replacers.extend(change.replacers);
            if let Some(id) = change.created {
                whole.made.push(id);
                contents.insert(id, Vec::new());
            }
            let path = match op {
                Op::Write { path, .. } | Op::Rewrite { path, .. } => path,
                Op::Truncate(path, _) | Op::SetTime(path, _) => path,
                _ => continue,
            };
            let Some(id) = next.file(path) else {
                continue;
            };
            if let Op::SetTime(_, time) = op {
                times.entry(id).or_default().push(Err(*time));
                continue;
            }
            let before = || self.contents[&id].now().to_vec();
            let bytes = contents.entry(id).or_insert_with(before);
            match op {
                Op::Write { at, len, tag, .. } => {
                    let offset = at.unwrap_or(bytes.len() as u64);
                    *bytes = written(bytes, offset, *len, *tag);
                }
                Op::Rewrite { len, tag, .. } => *bytes = pattern(*tag, 0, *len),
                Op::Truncate(_, size) => bytes.resize(*size as usize, 0),
                _ => {}
            }
            times.entry(id).or_default().push(Ok(bytes.len() as u64));
        }
        self.states.push(Arc::new(next));
        let number = self.operations();
        for id in &whole.made {
            self.contents.insert(*id, History::new(Vec::new()));
            let made = self.now().things.get(id);
            if made.is_some_and(|thing| thing.kind == Kind::File) {
                self.changes.insert(*id, Changes::new(now, 0));
            }
        }
        for (id, bytes) in contents {
            self.begin_version(id, bytes, &mut whole);
        }
        for (id, times) in times {
            let Some(changes) = self.changes.get_mut(&id) else {
                continue;
            };
            for time in times {
                match time {
                    Ok(size) => changes.push(now, size),
                    Err(time) => changes.set(now, time),
                }
            }
        }
        self.write_back_before(&replacers, number);
        self.touch(&whole.touched, number);
        Ok(whole)
    }

    /// Notes that these files were written back before an operation: no crash leaves it without what they had then.
    fn write_back_before(&mut self, files: &[Id], operations: usize) {
        for &file in files {
            let history = self.history(file);
            history.write_back();
            let version = history.number();
            self.barriers.push(Barrier {
                operations,
                file,
                version,
            });
        }
    }

    /// Notes a version of a file's content that is there exactly when the newest operation is.
    fn begin_version(&mut self, id: Id, bytes: Vec<u8>, change: &mut Change) {
        let number = self.operations();
        let history = self.history(id);
        history.write_back();
        history.change(bytes, false);
        let version = history.number();
        self.atomic.push(Barrier {
            operations: number,
            file: id,
            version,
        });
        change.touched.push(id);
        change.written.push(id);
    }

    /// What the atomic write of this number has staged.
    pub fn staged(&self, number: u64) -> Option<&Staged> {
        self.staged.get(&number)
    }

    /// What its file holds for who reads through the atomic write of this number.
    pub fn shown_by(&self, number: u64) -> Option<Vec<u8>> {
        let staged = self.staged.get(&number)?;
        Some(staged.over(self.content(staged.file)))
    }

    /// Notes a step of an atomic write: all but commits change nothing that a crash could leave.
    fn begin_atomic(&mut self, number: u64, step: &Atomic, now: Stamp) -> Outcome<Change> {
        let mut change = Change {
            idle: true,
            ..Change::default()
        };
        let before = self.staged.get(&number).cloned();
        match (step, self.shown_by(number)) {
            (Atomic::Start(path), None) => {
                let Some(file) = self.now().file(path) else {
                    return Ok(change);
                };
                self.staged.insert(number, Staged::new(file));
                change.staged = Some(number);
            }
            (Atomic::Start(_), Some(_)) | (_, None) => {}
            (Atomic::Write { .. } | Atomic::Truncate(_), Some(shown)) => {
                let staged = self.staged.get_mut(&number);
                staged.into_iter().for_each(|one| one.add(step, &shown));
                change.staged = Some(number);
            }
            (Atomic::Drop, Some(_)) => drop(self.staged.remove(&number)),
            (Atomic::Commit, Some(shown)) => {
                let Some(staged) = self.staged.remove(&number).filter(|one| !one.is_empty()) else {
                    return Ok(change);
                };
                if !self.now().things.contains_key(&staged.file) {
                    return Err(libc::ESTALE);
                }
                return Ok(self.begin_commit(staged.file, shown, now));
            }
        }
        self.unstaged = before;
        Ok(change)
    }

    fn begin_commit(&mut self, file: Id, bytes: Vec<u8>, now: Stamp) -> Change {
        let mut next = self.now().clone();
        next.began = now;
        self.states.push(Arc::new(next));
        let mut change = Change::default();
        let size = bytes.len() as u64;
        self.begin_version(file, bytes, &mut change);
        if let Some(changes) = self.changes.get_mut(&file) {
            changes.push(now, size);
        }
        self.touch(&[file], self.operations());
        self.is_commit = true;
        change
    }

    fn touch(&mut self, ids: &[Id], operation: usize) {
        for id in ids {
            let before = self.touched.insert(*id, operation);
            self.untouched.push((*id, before));
        }
    }

    /// An operation that began did not happen.
    pub fn undo(&mut self, change: &Change) {
        if let Some(number) = change.staged {
            match self.unstaged.take() {
                Some(before) => drop(self.staged.insert(number, before)),
                None => drop(self.staged.remove(&number)),
            }
        }
        if change.idle {
            return;
        }
        let undone = self.states.pop();
        for (id, before) in self.untouched.drain(..).rev() {
            match before {
                Some(operation) => self.touched.insert(id, operation),
                None => self.touched.remove(&id),
            };
        }
        let left = self.operations();
        for id in &change.written {
            self.history(*id).undo();
        }
        self.atomic.retain(|barrier| barrier.operations <= left);
        self.barriers.retain(|barrier| barrier.operations <= left);
        for id in &change.made {
            self.contents.remove(id);
            self.changes.remove(id);
        }
        if !change.written.is_empty() || !change.made.is_empty() {
            let began = undone.map_or(0, |tree| tree.began);
            for id in &change.touched {
                if let (Some(changes), Some(history)) =
                    (self.changes.get_mut(id), self.contents.get(id))
                {
                    changes.failed(began, false, history.now().len() as u64);
                }
            }
        }
        if let Some(id) = change.created {
            self.contents.remove(&id);
            self.changes.remove(&id);
        }
    }

    /// A file holds this now, after the operation that began at `began` failed half-way.
    pub fn observe(&mut self, id: Id, bytes: Vec<u8>, shown: Shown, began: Stamp) {
        if let Some(changes) = self.changes.get_mut(&id) {
            changes.failed(began, shown.mtime >= began, bytes.len() as u64);
        }
        let history = self.history(id);
        history.write_back();
        history.change(bytes, true);
    }

    /// A file has lost what was written to it before: it holds this since the operation that began at `began`, which did not happen.
    pub fn lose(&mut self, id: Id, bytes: Vec<u8>, shown: Shown, began: Stamp) {
        if let Some(changes) = self.changes.get_mut(&id)
            && shown.mtime >= began
        {
            changes.push(began, bytes.len() as u64);
        }
        self.observe(id, bytes, shown, began);
    }

    /// The same of a file of which nobody knows what it holds.
    pub fn may_lose(&mut self, id: Id, began: Stamp) {
        let size = self.content(id).len() as u64;
        if let Some(changes) = self.changes.get_mut(&id) {
            changes.push(began, size);
        }
    }

    /// Whether a file may hold this, if what was written since it was last durable is lost or not.
    pub fn allows_content(&self, id: Id, bytes: &[u8]) -> Result<(), String> {
        self.contents[&id].allows(bytes)
    }

    /// Nothing is known any more of what files had when they took others' names.
    pub fn drop_barriers(&mut self) {
        self.barriers.clear();
    }

    fn begin_content(&mut self, op: &Op, change: &Change) {
        let calm = self.calm;
        match op {
            Op::Write {
                path,
                at,
                len,
                tag,
                how,
            } => {
                let Some(id) = self.file(path) else {
                    return;
                };
                let history = self.history(id);
                // A direct one leaves what is pending so.
                let offset = at.unwrap_or(history.now().len() as u64);
                history.change(written(history.now(), offset, *len, *tag), false);
                if *how == How::Synced {
                    history.write_back();
                }
            }
            Op::Rewrite { path, len, tag } => {
                if let Some(id) = self.file(path) {
                    let history = self.history(id);
                    history.cut_to_nothing(calm);
                    history.change(pattern(*tag, 0, *len), false);
                }
            }
            Op::TmpLink { len, tag, .. } => {
                if let Some(id) = change.created {
                    self.history(id).change(pattern(*tag, 0, *len), false);
                }
            }
            Op::Truncate(path, size) => {
                if let Some(id) = self.file(path) {
                    let history = self.history(id);
                    let mut bytes = history.now().to_vec();
                    let cut = (*size as usize) < bytes.len();
                    bytes.resize(*size as usize, 0);
                    match size {
                        0 => history.cut_to_nothing(calm),
                        _ => history.change(bytes, cut),
                    }
                }
            }
            Op::Fallocate {
                path,
                mode,
                at,
                len,
            } => {
                if let Some(id) = self.file(path) {
                    let history = self.history(id);
                    history.write_back();
                    let bytes = fallocated(history.now(), *mode, *at, *len);
                    history.change(bytes, false);
                }
            }
            Op::Fsync(path) | Op::Fdatasync(path) => {
                if let Some(id) = self.file(path) {
                    self.history(id).write_back();
                }
            }
            Op::Sync | Op::Tick(_) | Op::Remount => {
                self.contents.values_mut().for_each(History::write_back);
            }
            _ => {}
        }
    }

    /// Notes what an operation does to a file's times.
    fn begin_change(&mut self, op: &Op, change: &Change, now: Stamp) {
        let id = match op {
            Op::SetTime(path, time) => {
                let changes = self.file(path).and_then(|id| self.changes.get_mut(&id));
                if let Some(changes) = changes {
                    changes.set(now, *time);
                }
                return;
            }
            Op::Write { path, .. }
            | Op::Rewrite { path, .. }
            | Op::Truncate(path, _)
            | Op::Fallocate { path, .. } => self.file(path),
            Op::TmpLink { .. } => change.created,
            _ => None,
        };
        let Some(id) = id else {
            return;
        };
        let size = self.contents[&id].now().len() as u64;
        if let Some(changes) = self.changes.get_mut(&id) {
            if matches!(op, Op::Rewrite { .. }) {
                changes.push(now, 0);
            }
            changes.push(now, size);
        }
    }

    /// Notes that an operation has returned without an error: what it promises holds.
    pub fn done(&mut self, op: &Op) {
        match op {
            Op::Fsync(path) | Op::Fdatasync(path) => self.synced(path),
            Op::Write {
                path,
                how: How::Synced,
                ..
            } => self.synced(path),
            Op::Sync | Op::Remount => self.all_durable(),
            Op::Checkpoint => self.durable_through(self.operations()),
            Op::Tx { durable: true, .. } => self.committed(),
            Op::Atomic { .. } if self.is_commit => self.committed(),
            _ => {}
        }
    }

    /// The newest operation is a transaction, or an atomic write's commit, that is durable.
    fn committed(&mut self) {
        let number = self.operations();
        self.durable_through(number);
        let newest = self.atomic.iter().filter(|b| b.operations == number);
        let files: Vec<Id> = newest.map(|b| b.file).collect();
        for id in files {
            self.history(id).durable();
            if let Some(changes) = self.changes.get_mut(&id) {
                changes.durable();
            }
        }
    }

    /// As `done`, for names and attributes alone.
    pub fn done_with_names(&mut self, op: &Op) {
        match op {
            Op::Fsync(path) | Op::Fdatasync(path) => {
                let id = self.thing(path);
                if let Some(operation) = id.and_then(|id| self.touched.get(&id)) {
                    self.durable_through(*operation);
                }
            }
            Op::Sync | Op::Remount | Op::Checkpoint => self.durable_through(self.operations()),
            // One with content was left out.
            Op::Tx { durable: true, .. } if !op.changes_content() => {
                self.durable_through(self.operations());
            }
            _ => {}
        }
    }

    /// What is synced by this path.
    fn thing(&self, path: &str) -> Option<Id> {
        let file = self.file(path);
        file.or_else(|| self.now().resolve(path).ok())
    }

    fn synced(&mut self, path: &str) {
        let Some(id) = self.thing(path) else {
            return;
        };
        if let Some(history) = self.contents.get_mut(&id) {
            history.durable();
        }
        if let Some(changes) = self.changes.get_mut(&id) {
            changes.size_durable();
        }
        if let Some(operation) = self.touched.get(&id) {
            self.durable_through(*operation);
        }
    }

    /// Compares what a crash left with what it may leave. If all is well, returns what is
    /// certain from now on, with the thing found for each of the model's.
    pub fn check(&self, found: &Found) -> Result<(Oracle, BTreeMap<Id, usize>), String> {
        self.check_but(found, &Spared::default())
    }

    /// As `check`, but for the pages of files that are spared.
    pub fn check_but(
        &self,
        found: &Found,
        spared: &Spared,
    ) -> Result<(Oracle, BTreeMap<Id, usize>), String> {
        let mut complaint = None;
        for (at, tree) in self.states.iter().enumerate().rev() {
            let Some(pairs) = found.matches(tree) else {
                continue;
            };
            let checked = self
                .check_times(found, &pairs, at)
                .and_then(|()| self.check_contents(found, &pairs, self.before + at, spared));
            match checked {
                Ok(contents) => {
                    let settled = Oracle {
                        states: vec![Arc::new(timed(tree, found, &pairs))],
                        before: 0,
                        contents,
                        changes: changes_of(found, &pairs),
                        when: Beginnings::default(),
                        touched: BTreeMap::new(),
                        untouched: Vec::new(),
                        barriers: Vec::new(),
                        atomic: Vec::new(),
                        held: BTreeSet::new(),
                        staged: BTreeMap::new(),
                        unstaged: None,
                        is_commit: false,
                        calm: self.calm,
                    };
                    return Ok((settled, pairs));
                }
                Err(what) => complaint = complaint.or(Some(what)),
            }
        }
        Err(complaint.unwrap_or_else(|| {
            format!(
                "names and attributes are those after none of the operations {} to {}\nfound: {found}\nnewest: {}\noldest: {}",
                self.before,
                self.operations(),
                crate::look::describe(self.now()),
                crate::look::describe(&self.states[0]),
            )
        }))
    }

    /// Compares times with what a crash may leave when the state with this number is the last
    /// one that survived.
    fn check_times(
        &self,
        found: &Found,
        pairs: &BTreeMap<Id, usize>,
        at: usize,
    ) -> Result<(), String> {
        let end = self.states.get(at + 1).map_or(u64::MAX, |next| next.began);
        let tree = &self.states[at];
        for (id, index) in pairs {
            let (thing, model) = (&found.things[*index], tree.at(*id));
            let (shown, size) = (&thing.times, thing.size());
            if shown.mtime.max(shown.ctime) > found.now_ns {
                return Err(format!("{}: {shown:?} is in the future", thing.path));
            }
            let checked = match self.changes.get(id) {
                Some(changes) => changes.allows(shown, size, model.ctime, end, &self.when),
                None => shown.is(model.mtime, model.ctime, &self.when),
            };
            checked.map_err(|what| format!("{}: {what}", thing.path))?;
        }
        Ok(())
    }

    /// Compares times with what programs must see now.
    pub fn shows_times(&self, found: &Found, pairs: &BTreeMap<Id, usize>) -> Result<(), String> {
        for (id, index) in pairs {
            let (thing, model) = (&found.things[*index], self.now().at(*id));
            let checked = match self.changes.get(id) {
                Some(changes) => changes.shows(&thing.times, model.ctime, &self.when),
                None => thing.times.is(model.mtime, model.ctime, &self.when),
            };
            checked.map_err(|what| format!("{}: {what}", thing.path))?;
        }
        Ok(())
    }

    fn check_contents(
        &self,
        found: &Found,
        pairs: &BTreeMap<Id, usize>,
        operations: usize,
        spared: &Spared,
    ) -> Result<BTreeMap<Id, History>, String> {
        let mut contents = BTreeMap::new();
        for (id, index) in pairs {
            let Some(history) = self.contents.get(id) else {
                continue;
            };
            let thing = &found.things[*index];
            let Some(bytes) = &thing.content else {
                continue;
            };
            let barriers = self.barriers.iter();
            let barriers = barriers.filter(|b| b.file == *id && b.operations <= operations);
            let least = barriers.map(|b| b.version).max().unwrap_or(0);
            let atomic = || self.atomic.iter().filter(|b| b.file == *id);
            let there = atomic().filter(|b| b.operations <= operations);
            let least = there.map(|b| b.version).max().unwrap_or(0).max(least);
            let absent = atomic().filter(|b| b.operations > operations);
            let absent: Vec<usize> = absent.map(|b| b.version).collect();
            let history = history.after(least).without(&absent);
            let none = || format!("{}: part of a transaction that is not there", thing.path);
            let history = history.ok_or_else(none)?;
            history
                .allows_but(bytes, &|page| spared.has(*id, *index, page))
                .map_err(|what| format!("{}: {what}", thing.path))?;
            contents.insert(*id, History::new(bytes.clone()));
        }
        Ok(contents)
    }
}

/// The tree with the times that were found.
fn timed(tree: &Tree, found: &Found, pairs: &BTreeMap<Id, usize>) -> Tree {
    let mut tree = tree.clone();
    tree.began = 0;
    for (id, index) in pairs {
        let (thing, times) = (tree.at_mut(*id), found.things[*index].times);
        (thing.mtime, thing.ctime) = (times.mtime, times.ctime);
    }
    tree
}

fn changes_of(found: &Found, pairs: &BTreeMap<Id, usize>) -> BTreeMap<Id, Changes> {
    let files = pairs.iter().map(|(id, index)| (id, &found.things[*index]));
    files
        .filter(|(_, thing)| thing.kind == Kind::File)
        .map(|(id, thing)| (*id, Changes::new(thing.times.mtime, thing.size())))
        .collect()
}

fn written(before: &[u8], offset: u64, len: u64, tag: u64) -> Vec<u8> {
    let mut bytes = before.to_vec();
    let end = (offset + len) as usize;
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset as usize..end].copy_from_slice(&pattern(tag, offset, len));
    bytes
}

fn fallocated(before: &[u8], mode: i32, at: u64, len: u64) -> Vec<u8> {
    let mut bytes = before.to_vec();
    let (start, end) = (at as usize, (at + len) as usize);
    if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0 {
        let size = bytes.len();
        bytes[start.min(size)..end.min(size)].fill(0);
    }
    if mode & libc::FALLOC_FL_KEEP_SIZE == 0 && end > bytes.len() {
        bytes.resize(end, 0);
    }
    bytes
}

//! Several threads at work in one directory whose tree has small nodes, in an order that a seed
//! decides: names come and go, one by one and many in one call, leaves are split and emptied, while others look, list, and remove and
//! rename directories under one another.
//!
//! Each thread's names are its own, so at every moment it knows what it must find:
//!
//! 1. a name that was made is found, with its inode, until it is removed, and not afterwards;
//! 2. a listing has every name that exists throughout exactly once, and no other of the thread's;
//! 3. a name that was made in a directory which others try to remove is there afterwards, for that
//!    directory was not empty any more (R12).
//!
//! The power goes about when a checkpoint writes its record, or after a last sync; or names are
//! removed until index nodes have no leaf left, and others are made. Then `fsck` finds nothing, so
//! counts and tree are right; and where all was synced, the directory has exactly the names that there were.

use crate::look;
use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::{sched, thread};
use device::sim::Survival;
use fs::{Caller, Error, FileSystem, Ino, ROOT};
use std::collections::BTreeMap;
use std::sync::Arc;

const DIR: &[u8] = b"crowded";
const TASKS: usize = 3;
/// Operations of each thread.
const STEPS: u64 = 40;
/// Names that are there before, and while, the threads work.
const KEPT: u64 = 40;

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut shape = Shape::small(1);
    shape.tight = true;
    shape.options.store.shards = 2;
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let mut rng = Rng::new(seed);
    let end = *rng.pick(&[End::AtRecord, End::Synced, End::ThinnedOut]);
    let switch = Arc::clone(&machine.switch);
    let (skip, after) = (rng.below(4), rng.below(4));
    let synced = sched::run("a crowd", seed, &machine.clock, || {
        let fs = machine.open().map_err(|e| e.to_string())?;
        let crowd = Crowd::prepare(&fs).map_err(|e| e.to_string())?;
        if let End::AtRecord = end {
            let switch = Arc::clone(&switch);
            let cut = move || switch.cut_after(after);
            machine.tap.interpose_at_label(skip, Box::new(cut));
        }
        let worked = thread::parallel(TASKS, |me| {
            let rng = Rng::new(seed ^ (me as u64 + 1));
            let names = BTreeMap::new();
            let mut task = Task {
                crowd: &crowd,
                me,
                rng,
                names,
                made: 0,
            };
            match task.work() {
                Err(_) if switch.is_cut() => Ok(task.names),
                done => done.map(|()| task.names),
            }
        });
        let worked: Result<Vec<_>, String> = worked.into_iter().collect();
        let worked = worked?;
        if let End::AtRecord | End::Synced = end {
            let synced = match fs.sync() {
                Err(_) if switch.is_cut() => false,
                done => must("sync", done).map(|()| true)?,
            };
            switch.cut_now();
            return match fs.close() {
                Ok(()) => Err("a file system closes without power".to_owned()),
                Err(_) => Ok(synced.then(|| crowd.all_with(worked))),
            };
        }
        crowd.thin_out(worked)?;
        must("close", fs.close())?;
        Ok(None)
    })?;
    if !switch.is_cut() {
        return machine.fsck();
    }
    let now_ns = machine.now_ns();
    let crashed = machine.cut(*rng.pick(&Survival::ALL), &mut rng);
    let after = Machine::after(&shape, crashed, now_ns);
    after.fsck()?;
    match synced {
        Some(names) => are_there(&after, &names),
        None => Ok(()),
    }
}

/// After a cut behind a sync the crowded directory has these names, and no others.
fn are_there(machine: &Machine, names: &Names) -> Result<(), String> {
    let fs = machine.open().map_err(|e| format!("recovery: {e}"))?;
    let dir = must("the directory", fs.lookup(ROOT, DIR))?.ino;
    let listed = must("readdir", look::list(&fs, dir))?;
    let count = listed.len();
    let listed: Names = listed.into_iter().collect();
    if let Some((name, ino)) = names
        .iter()
        .find(|(name, ino)| listed.get(*name) != Some(ino))
    {
        let (name, found) = (String::from_utf8_lossy(name), listed.get(name));
        return Err(format!("{name} was synced as {ino}, and is {found:?}"));
    }
    if count != names.len() {
        return Err(format!("{count} names where {} were synced", names.len()));
    }
    for (name, ino) in names {
        let found = must("lookup", fs.lookup(dir, name))?.ino;
        if found != *ino {
            let name = String::from_utf8_lossy(name);
            return Err(format!("{name} is listed as {ino}, and found as {found}"));
        }
    }
    must("close", fs.close())
}

/// How a run ends.
#[derive(Clone, Copy)]
enum End {
    /// The power goes while a checkpoint writes its record, or soon after.
    AtRecord,
    /// The power goes after a sync.
    Synced,
    ThinnedOut,
}

type Names = BTreeMap<Vec<u8>, Ino>;

/// The directories that all use.
struct Crowd<'a> {
    fs: &'a FileSystem,
    dir: Ino,
    kept: Names,
}

struct Task<'a> {
    crowd: &'a Crowd<'a>,
    me: usize,
    rng: Rng,
    names: Names,
    made: u64,
}

/// An error of an operation that must succeed.
fn must<T>(what: &str, done: Result<T, Error>) -> Result<T, String> {
    done.map_err(|error| format!("{what}: {error}"))
}

impl Crowd<'_> {
    fn prepare(fs: &FileSystem) -> Result<Crowd<'_>, Error> {
        let who = Caller::root();
        let dir = fs.mkdir(&who, ROOT, DIR, 0o755)?.ino;
        let mut crowd = Crowd {
            fs,
            dir,
            kept: Names::new(),
        };
        for i in 0..KEPT {
            let name = format!("kept-{i:090}").into_bytes();
            let made = fs.mknod(&who, dir, &name, libc::S_IFREG | 0o644, 0)?;
            crowd.kept.insert(name, made.ino);
        }
        Ok(crowd)
    }

    fn find(&self, name: &[u8], expected: Option<Ino>) -> Result<(), String> {
        let found = match self.fs.lookup(self.dir, name) {
            Ok(attr) => Some(attr.ino),
            Err(Error::NotFound) => None,
            Err(error) => return Err(format!("lookup: {error}")),
        };
        let text = String::from_utf8_lossy(name);
        match found == expected {
            true => Ok(()),
            false => Err(format!("{text} is {found:?}, not {expected:?}")),
        }
    }

    /// All names in the directory, those of the tasks included.
    fn all_with(&self, worked: Vec<Names>) -> Names {
        let mut names: Names = worked.into_iter().flatten().collect();
        names.extend(self.kept.clone());
        names
    }

    /// Removes most names, so that index nodes lose all their leaves, and makes others.
    fn thin_out(&self, worked: Vec<Names>) -> Result<(), String> {
        let mut names = self.all_with(worked);
        let who = Caller::root();
        let all: Vec<Vec<u8>> = names.keys().cloned().collect();
        for (i, name) in all.iter().enumerate().filter(|(i, _)| i % 8 != 0) {
            must("unlink", self.fs.unlink(&who, self.dir, name))?;
            names.remove(name);
            if i % 16 == 1 {
                must(
                    "checkpoint",
                    self.fs.store().checkpoint().map_err(Error::from),
                )?;
            }
        }
        for i in 0..KEPT {
            let name = format!("late-{i:090}").into_bytes();
            let mode = libc::S_IFREG | 0o644;
            let made = must("create", self.fs.mknod(&who, self.dir, &name, mode, 0))?;
            names.insert(name, made.ino);
        }
        for (name, ino) in &names {
            self.find(name, Some(*ino))?;
        }
        Ok(())
    }
}

impl Task<'_> {
    fn work(&mut self) -> Result<(), String> {
        for _ in 0..STEPS {
            match self.rng.below(12) {
                0..4 => self.create()?,
                4..6 => self.unlink()?,
                6 => self.rename()?,
                7 => self.list()?,
                8 => self.create_many()?,
                9 => self.unlink_many()?,
                10 => {
                    let store = self.crowd.fs.store();
                    must("checkpoint", store.checkpoint().map_err(Error::from))?;
                }
                _ => self.visit()?,
            }
            if !self.names.is_empty() {
                let all: Vec<_> = self.names.iter().collect();
                let (name, ino) = *self.rng.pick(&all);
                self.crowd.find(name, Some(*ino))?;
            }
        }
        Ok(())
    }

    fn fresh(&mut self) -> Vec<u8> {
        self.made += 1;
        format!("{}-{:090}", self.me, self.made).into_bytes()
    }

    fn pick(&mut self) -> Option<Vec<u8>> {
        let all: Vec<_> = self.names.keys().cloned().collect();
        (!all.is_empty()).then(|| self.rng.pick(&all).clone())
    }

    fn create(&mut self) -> Result<(), String> {
        let (fs, dir) = (self.crowd.fs, self.crowd.dir);
        let name = self.fresh();
        let mode = libc::S_IFREG | 0o644;
        let made = must("create", fs.mknod(&Caller::root(), dir, &name, mode, 0))?;
        match fs.mknod(&Caller::root(), dir, &name, mode, 0) {
            Err(Error::Exists) => {}
            other => return Err(format!("a name is made twice: {other:?}")),
        }
        self.names.insert(name, made.ino);
        Ok(())
    }

    fn unlink(&mut self) -> Result<(), String> {
        let Some(name) = self.pick() else {
            return Ok(());
        };
        let (fs, dir) = (self.crowd.fs, self.crowd.dir);
        must("unlink", fs.unlink(&Caller::root(), dir, &name))?;
        self.names.remove(&name);
        self.crowd.find(&name, None)
    }

    /// Makes several names in one call, among them one that is there already.
    fn create_many(&mut self) -> Result<(), String> {
        let (fs, who) = (self.crowd.fs, Caller::root());
        let mut batch: Vec<Vec<u8>> = (0..self.rng.below(8)).map(|_| self.fresh()).collect();
        batch.extend(self.pick());
        let results = fs.create_many(&who, self.crowd.dir, &batch, 0o644);
        for (name, result) in batch.into_iter().zip(results) {
            match (self.names.contains_key(&name), result) {
                (false, Ok(made)) => drop(self.names.insert(name, made.ino)),
                (true, Err(Error::Exists)) => {}
                (_, result) => return Err(format!("create_many: {result:?}")),
            }
        }
        Ok(())
    }

    /// Unlinks several names in one call, among them one that is not there, and looks at all first.
    fn unlink_many(&mut self) -> Result<(), String> {
        let (fs, who) = (self.crowd.fs, Caller::root());
        let all: Vec<Vec<u8>> = self.names.keys().cloned().collect();
        let mut batch: Vec<Vec<u8>> = Vec::new();
        for name in all {
            if self.rng.one_in(3) {
                batch.push(name);
            }
        }
        batch.push(self.fresh());
        for (name, found) in batch.iter().zip(fs.stat_many(self.crowd.dir, &batch)) {
            match (self.names.get(name), found) {
                (Some(ino), Ok(attr)) if attr.ino == *ino => {}
                (None, Err(Error::NotFound)) => {}
                (_, found) => return Err(format!("stat_many: {found:?}")),
            }
        }
        let results = fs.unlink_many(&who, self.crowd.dir, &batch);
        for (name, result) in batch.iter().zip(results) {
            match (self.names.remove(name), result) {
                (Some(_), Ok(())) => {}
                (None, Err(Error::NotFound)) => {}
                (_, result) => return Err(format!("unlink_many: {result:?}")),
            }
            self.crowd.find(name, None)?;
        }
        Ok(())
    }

    fn rename(&mut self) -> Result<(), String> {
        let Some(name) = self.pick() else {
            return Ok(());
        };
        let (fs, dir, to) = (self.crowd.fs, self.crowd.dir, self.fresh());
        must(
            "rename",
            fs.rename(&Caller::root(), dir, &name, dir, &to, 0),
        )?;
        let ino = self.names.remove(&name).ok_or("a name of this task")?;
        self.names.insert(to, ino);
        self.crowd.find(&name, None)
    }

    fn list(&mut self) -> Result<(), String> {
        let mut listed: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
        let list = self.crowd.fs.readdir(self.crowd.dir, 0, &mut |entry| {
            *listed.entry(entry.name.to_vec()).or_default() += 1;
            true
        });
        must("readdir", list)?;
        for name in self.names.keys().chain(self.crowd.kept.keys()) {
            if listed.get(name) != Some(&1) {
                let (name, times) = (String::from_utf8_lossy(name), listed.get(name));
                return Err(format!("{name} exists, and is listed {times:?} times"));
            }
        }
        let mine = format!("{}-", self.me).into_bytes();
        let gone = |name: &&Vec<u8>| name.starts_with(&mine) && !self.names.contains_key(*name);
        match listed.keys().find(gone) {
            Some(name) => Err(format!("{} is listed", String::from_utf8_lossy(name))),
            None => Ok(()),
        }
    }

    /// Makes a name in a directory that others remove and move meanwhile.
    fn visit(&mut self) -> Result<(), String> {
        let (fs, who) = (self.crowd.fs, Caller::root());
        let contended = [&b"contended"[..], b"elsewhere"];
        let name = contended[self.rng.below(2) as usize];
        let other = contended[self.rng.below(2) as usize];
        match self.rng.below(4) {
            3 => {
                let not_there = [libc::ENOENT];
                let found = fs.stat_at(ROOT, name);
                if found.as_ref().is_ok_and(|attr| !attr.is_dir()) {
                    return Err("a path leads to what took a number".into());
                }
                allowed(found.map(drop), &not_there)?;
                let inside = [name, b"/../", other, b"/none"].concat();
                allowed(fs.stat_at(ROOT, &inside).map(drop), &not_there)
            }
            0 => allowed(fs.rmdir(&who, ROOT, name), &[libc::ENOENT, libc::ENOTEMPTY]),
            1 => {
                let allowed_errors = [libc::ENOENT, libc::ENOTEMPTY];
                allowed(fs.rename(&who, ROOT, name, ROOT, other, 0), &allowed_errors)
            }
            _ => {
                allowed(fs.mkdir(&who, ROOT, name, 0o755).map(drop), &[libc::EEXIST])?;
                let Ok(dir) = fs.lookup(ROOT, name) else {
                    return Ok(());
                };
                let mine = self.fresh();
                let mode = libc::S_IFREG | 0o644;
                match fs.mknod(&who, dir.ino, &mine, mode, 0) {
                    Ok(made) => {
                        // Nobody can remove the directory now, by whatever name it goes.
                        let found = must("the name just made", fs.lookup(dir.ino, &mine))?;
                        if found.ino != made.ino {
                            return Err("a name refers to another inode".into());
                        }
                        must("its unlink", fs.unlink(&who, dir.ino, &mine))
                    }
                    Err(error) => allowed(Err(error), &[libc::ENOENT, libc::ESTALE]),
                }
            }
        }
    }
}

fn allowed(done: Result<(), Error>, errors: &[i32]) -> Result<(), String> {
    match done {
        Err(error) if !errors.contains(&error.errno()) => Err(format!("{error:?}")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Behind a sync and a cut only `fsck` looked, to which a directory without some of its names is as good.
    #[test]
    fn a_name_that_is_missing_or_too_many_is_told_of() {
        let machine = Machine::new(&Image::format(&Shape::small(1)).unwrap(), 1);
        let fs = machine.open().unwrap();
        let crowd = Crowd::prepare(&fs).unwrap();
        let names = crowd.all_with(Vec::new());
        fs.close().unwrap();
        drop(fs);
        are_there(&machine, &names).unwrap();
        let (mut fewer, mut more, mut others) = (names.clone(), names.clone(), names);
        fewer.pop_first();
        more.insert(b"another".to_vec(), ROOT);
        others.values_mut().for_each(|ino| *ino = ROOT);
        for wrong in [fewer, more, others] {
            assert!(are_there(&machine, &wrong).is_err());
        }
    }
}

//! Runs operations on a real file system and on the oracle side by side.

mod failures;

pub use failures::refuses_changes;

use crate::look::{self, Amiss, Found};
use crate::op::{Atomic, How, Op, pattern};
use crate::oracle::Oracle;
use crate::transact;
use crate::tree::{Change, Id, TOP, link_target};
use crate::world::Machine;
use format::BLOCK_SIZE;
use fs::{AtomicWrite, Caller, FileSystem, Ino, OpenFile, ROOT, SetAttr, SetTime};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Why an operation did not simply work.
#[derive(Clone, Debug)]
pub enum Stop {
    /// The environment's doing: no power, or a fault that was injected.
    Environment(String),
    /// The file system does what it must not.
    Violation(String),
}

/// Beside one of so many files without a name there is one that is large and in many places, and is cut, and goes.
const SCATTERED: u64 = 8;

/// Blocks that an atomic write has promised beside those of its pages.
const BESIDES: u64 = 2;

/// An atomic write.
struct Writing {
    write: AtomicWrite,
    ino: Ino,
    /// The handle that began it, unless that was closed.
    file: Option<Arc<OpenFile>>,
    /// Blocks that it has.
    promised: u64,
}

/// A file system under test, with what is known of it.
pub struct Driver {
    pub machine: Arc<Machine>,
    fs: Option<Arc<FileSystem>>,
    /// The directory that the model's paths begin at.
    root: Ino,
    pub oracle: Oracle,
    inos: BTreeMap<Id, Ino>,
    /// When the last operation began.
    began: u64,
    /// What the file had before it whose content it changes.
    before: Option<Arc<Vec<u8>>>,
    held: BTreeMap<Id, Arc<OpenFile>>,
    /// Held files whose handle was told that a device lost what was written.
    told: BTreeSet<Id>,
    /// Atomic writes, by their numbers.
    writing: BTreeMap<u64, Writing>,
    /// What the last operation did although it must not.
    wrong: Option<String>,
    /// Devices fail, or lie: that explains errors.
    pub faulty: bool,
    /// Data could not be written: some file may be what its inode says, and not what was
    /// written last. Contents are left alone from then on.
    pub given_up: bool,
}

impl Driver {
    /// Opens a file system of which nothing is known but that it is empty.
    pub fn fresh(machine: Machine, calm: bool) -> Result<Driver, String> {
        let fs = machine.open().map_err(|e| format!("open: {e}"))?;
        let mut driver = Driver::over(Arc::new(machine), fs, ROOT, calm);
        driver.learn_top()?;
        Ok(driver)
    }

    /// A driver for what is at and below an empty directory of an open file system.
    fn over(machine: Arc<Machine>, fs: Arc<FileSystem>, root: Ino, calm: bool) -> Driver {
        Driver {
            machine,
            fs: Some(fs),
            root,
            oracle: Oracle::new(calm),
            inos: BTreeMap::from([(TOP, root)]),
            began: 0,
            before: None,
            held: BTreeMap::new(),
            told: BTreeSet::new(),
            writing: BTreeMap::new(),
            wrong: None,
            faulty: false,
            given_up: false,
        }
    }

    /// Takes the times of the first directory for right, after something that the model did not do.
    pub fn learn_top(&mut self) -> Result<(), String> {
        let attr = self.fs().getattr(self.root).map_err(|e| e.to_string())?;
        self.oracle.learn_top(look::shown(&attr));
        Ok(())
    }

    /// Recovers after a power cut and compares with what the oracle allows.
    pub fn recover(machine: Machine, oracle: &Oracle) -> Result<Driver, String> {
        let fs = machine.open().map_err(|e| format!("recovery: {e}"))?;
        Driver::recovered(Arc::new(machine), fs, ROOT, oracle)
    }

    /// Compares what is at and below a directory of a file system that has recovered.
    pub fn recovered(
        machine: Arc<Machine>,
        fs: Arc<FileSystem>,
        root: Ino,
        oracle: &Oracle,
    ) -> Result<Driver, String> {
        let found = look::look_below(&fs, root)?;
        let (oracle, pairs) = oracle.check(&found)?;
        Ok(Driver::judged(machine, fs, root, &found, oracle, &pairs))
    }

    /// A driver for what was looked at and is as the oracle says.
    pub fn judged(
        machine: Arc<Machine>,
        fs: Arc<FileSystem>,
        root: Ino,
        found: &Found,
        oracle: Oracle,
        pairs: &BTreeMap<Id, usize>,
    ) -> Driver {
        Driver {
            machine,
            fs: Some(fs),
            root,
            inos: inos_of(found, pairs),
            oracle,
            began: 0,
            before: None,
            held: BTreeMap::new(),
            told: BTreeSet::new(),
            writing: BTreeMap::new(),
            wrong: None,
            faulty: false,
            given_up: false,
        }
    }

    /// Opens a file system of which all is known.
    pub fn resume(
        machine: Machine,
        oracle: Oracle,
        inos: BTreeMap<Id, Ino>,
    ) -> Result<Driver, String> {
        let fs = machine.open().map_err(|e| format!("open: {e}"))?;
        Ok(Driver {
            machine: Arc::new(machine),
            fs: Some(fs),
            root: ROOT,
            oracle,
            inos,
            began: 0,
            before: None,
            held: BTreeMap::new(),
            told: BTreeSet::new(),
            writing: BTreeMap::new(),
            wrong: None,
            faulty: false,
            given_up: false,
        })
    }

    /// The inode of each thing of the model.
    pub fn inos(&self) -> &BTreeMap<Id, Ino> {
        &self.inos
    }

    /// Batches that went to the journal since the file system was opened; `None` while it is not.
    pub fn batches(&self) -> Option<u64> {
        self.fs.as_ref().map(|fs| fs.store().journal_batches())
    }

    /// The file system, unless it could not be opened again.
    pub fn opened(&self) -> Option<&Arc<FileSystem>> {
        self.fs.as_ref()
    }

    pub fn fs(&self) -> &Arc<FileSystem> {
        self.fs.as_ref().expect("open until dropped")
    }

    /// Compares what is shown now with the newest state of the model. Where data could not be written, that is names and attributes alone.
    pub fn verify_now(&self) -> Result<(), Amiss> {
        let found = look::try_look(self.fs(), self.root)?;
        let Some(pairs) = found.matches(self.oracle.now()) else {
            let model = look::describe(self.oracle.now());
            let what = format!("the file system shows {found}\nthe model has {model}");
            return Err(Amiss::Wrong(what));
        };
        if self.given_up {
            return Ok(());
        }
        let times = self.oracle.shows_times(&found, &pairs);
        times.map_err(Amiss::Wrong)?;
        for (id, index) in &pairs {
            let thing = &found.things[*index];
            if let Some(bytes) = &thing.content
                && *self.oracle.content(*id) != Arc::new(bytes.clone())
            {
                let what = format!("{} does not read as written", thing.path);
                return Err(Amiss::Wrong(what));
            }
        }
        Ok(())
    }

    /// Forgets handles, as the end of the process would, and the file system with them.
    pub fn stop(mut self) -> Arc<Machine> {
        self.held.clear();
        self.writing.clear();
        self.fs = None;
        self.machine
    }

    /// Runs one operation. What it promises is noted once it has returned.
    pub fn run(&mut self, op: &Op) -> Result<(), Stop> {
        let expected = self.begin(op);
        let result = self.perform(op, expected.as_ref().ok());
        self.end(op, expected, result)
    }

    /// Notes that an operation is about to run.
    pub fn begin(&mut self, op: &Op) -> Result<Change, i32> {
        // What two operations stamp differs.
        self.machine.advance(1);
        self.began = self.machine.now_ns();
        if self.given_up && op.changes_content() {
            return Ok(Change {
                idle: true,
                ..Change::default()
            });
        }
        self.before = self.content_before(op);
        let change = self.oracle.begin(op, self.began)?;
        if self.given_up {
            // What a file had before it took another's name may be lost already.
            self.oracle.drop_barriers();
        }
        Ok(change)
    }

    /// Compares an operation's outcome with the expected one. When the file system has failed, nothing may be changed from then on.
    pub fn end(
        &mut self,
        op: &Op,
        expected: Result<Change, i32>,
        result: Result<(), fs::Error>,
    ) -> Result<(), Stop> {
        let ended = self.compare(op, expected, result);
        if let (Err(Stop::Environment(_)), Some(fs), false) =
            (&ended, &self.fs, self.machine.switch.is_cut())
            && fs.store().failed().is_some()
        {
            refuses_changes(fs, self.held.values()).map_err(Stop::Violation)?;
        }
        ended
    }

    fn compare(
        &mut self,
        op: &Op,
        expected: Result<Change, i32>,
        result: Result<(), fs::Error>,
    ) -> Result<(), Stop> {
        if let Op::Fsync(path) | Op::Fdatasync(path) = op {
            self.remember(path, &result)?;
        }
        if let Some(what) = self.wrong.take() {
            return Err(Stop::Violation(format!("{op}: {what}")));
        }
        if let (Op::Atomic { step, .. }, Err(error), Ok(change)) = (op, &result, &expected)
            && *step == Atomic::Commit
            && !self.machine.switch.is_cut()
        {
            return self.commit_failed(error, change);
        }
        if let Err(error) = &result
            && op.is_sync()
            && expected.is_ok()
            && !self.machine.switch.is_cut()
            && self.is_broken_promise(error)
        {
            return Err(Stop::Violation(format!(
                "{op} finds no room for what was accepted: {error}"
            )));
        }
        match (result, expected) {
            (Ok(()), Ok(_)) if self.given_up => {
                self.oracle.done_with_names(op);
                self.check_promises(op)
            }
            (Ok(()), Ok(_)) => {
                self.oracle.done(op);
                self.check_promises(op)?;
                self.check_orphans()?;
                self.check_staged()
            }
            (Err(error), Err(errno)) if error.errno() == errno => Ok(()),
            // With limits as tight as here; it is told before anything is done.
            (Err(fs::Error::TransactionTooLarge), Ok(change)) => {
                self.oracle.undo(&change);
                Ok(())
            }
            (Err(fs::Error::TransactionTooLarge), Err(_)) => Ok(()),
            (Err(fs::Error::NoSpace), Ok(change)) if self.may_lack_room(op) => {
                self.out_of_space(op, &change)
            }
            (Err(fs::Error::NoSpace), Err(_)) if self.may_lack_room(op) => Ok(()),
            (Err(fs::Error::NoSpace), _) if !self.machine.switch.is_cut() => {
                let space = self.fs().store().space();
                Err(Stop::Violation(format!(
                    "{op} finds no room where there is some: {space:?}"
                )))
            }
            (Err(_), Ok(_)) if self.faulty && self.goes_on_after(op) => {
                // It promised nothing then.
                self.given_up = true;
                Ok(())
            }
            (Err(error), _) if self.faulty || self.machine.switch.is_cut() => {
                Err(Stop::Environment(error.to_string()))
            }
            (Err(error), Ok(_)) => Err(Stop::Violation(format!("{op} fails: {error}"))),
            (Err(error), Err(errno)) => Err(Stop::Violation(format!(
                "{op} fails with {error} where errno {errno} is due"
            ))),
            (Ok(()), Err(errno)) => Err(Stop::Violation(format!(
                "{op} succeeds where errno {errno} is due"
            ))),
        }
    }

    /// Who holds a file without a name reads what was written to it.
    fn check_orphans(&self) -> Result<(), Stop> {
        if self.faulty {
            return Ok(());
        }
        for id in self.oracle.orphans() {
            let Some(file) = self.held.get(&id) else {
                continue;
            };
            match look::content_of(self.fs(), file) {
                Err(error) if self.machine.switch.is_cut() => {
                    return Err(Stop::Environment(error.to_string()));
                }
                Ok(bytes) if bytes == **self.oracle.content(id) => {}
                read => {
                    let what = read.map_or_else(|e| e.to_string(), |_| "something else".into());
                    let what =
                        format!("@{id}, which has no name, does not read as written: {what}");
                    return Err(Stop::Violation(what));
                }
            }
        }
        Ok(())
    }

    /// Who reads through an atomic write sees what it has staged over what its file holds now.
    fn check_staged(&self) -> Result<(), Stop> {
        if self.faulty {
            return Ok(());
        }
        for (number, one) in &self.writing {
            let Some(shown) = self.oracle.shown_by(*number) else {
                continue;
            };
            let there = self.oracle.staged(*number).map(|staged| staged.file);
            let there = there.is_some_and(|id| self.oracle.now().things.contains_key(&id));
            let again = || self.fs().open_file(one.ino, libc::O_RDONLY);
            let file = match &one.file {
                Some(file) => Ok(Arc::clone(file)),
                None if there => again(),
                // Its number may be another's.
                None => continue,
            };
            let mut seen = vec![0; shown.len() + 1];
            let read = file.and_then(|file| one.write.read(&file, 0, &mut seen));
            let len = read.map_err(|error| match self.machine.switch.is_cut() {
                true => Stop::Environment(error.to_string()),
                false => Stop::Violation(format!("atomic write {number} cannot be read: {error}")),
            })?;
            if seen[..len] != shown {
                let what = format!("atomic write {number} does not read as staged");
                return Err(Stop::Violation(what));
            }
        }
        Ok(())
    }

    /// Where a path's last name is: the real directory, and the name.
    fn place<'p>(&self, path: &'p str) -> Result<(Ino, &'p [u8]), fs::Error> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.ino(dir)?, name.as_bytes()))
    }

    /// What the file system has at a path.
    fn ino(&self, path: &str) -> Result<Ino, fs::Error> {
        let mut at = self.root;
        for name in path.split('/').filter(|n| !n.is_empty()) {
            at = self.fs().lookup(at, name.as_bytes())?.ino;
        }
        Ok(at)
    }

    /// As [`Oracle::file`], also of one that is just let go of.
    fn file(&self, path: &str) -> Option<Id> {
        match path.strip_prefix('@') {
            Some(number) => number.parse().ok().filter(|id| self.held.contains_key(id)),
            None => self.oracle.file(path),
        }
    }

    /// A handle of the regular file that the model has at a path; `None` when it has none.
    fn handle(&self, path: &str, flags: i32) -> Result<Option<Arc<OpenFile>>, fs::Error> {
        let Some(id) = self.file(path) else {
            return Ok(None);
        };
        match self.held.get(&id) {
            Some(file) if flags == 0 => Ok(Some(Arc::clone(file))),
            _ => {
                let ino = self.inos.get(&id).copied();
                let ino = ino.map_or_else(|| self.ino(path), Ok)?;
                Ok(Some(self.fs().open_file(ino, libc::O_RDWR | flags)?))
            }
        }
    }

    /// Runs an operation on the real file system alone.
    pub fn perform(&mut self, op: &Op, change: Option<&Change>) -> Result<(), fs::Error> {
        match op {
            _ if self.given_up && op.changes_content() => Ok(()),
            Op::Create(_) | Op::Mkdir(_) | Op::Symlink(_) | Op::Mknod(..) | Op::TmpLink { .. } => {
                self.make(op, change)
            }
            Op::Sync => self.fs().sync(),
            Op::Checkpoint => Ok(self.fs().store().checkpoint()?),
            Op::Tick(ms) => {
                self.machine.advance(*ms);
                self.fs().tick()
            }
            Op::Remount => self.remount(),
            Op::Hold(path) => {
                if let Some(file) = self.handle(path, 0)?
                    && let Some(id) = self.file(path)
                {
                    self.held.insert(id, file);
                    self.told.remove(&id);
                }
                Ok(())
            }
            Op::Release(path) => {
                if let Some(id) = self.file(path)
                    && let Some(file) = self.held.remove(&id)
                {
                    self.told.remove(&id);
                    self.close(&file);
                }
                Ok(())
            }
            Op::Link(..) | Op::Rename(..) | Op::Unlink(_) | Op::Rmdir(_) => self.rename(op),
            Op::Tx { durable, ops } => self.transact(*durable, ops, change),
            Op::Atomic { number, step } => self.write_atomically(*number, step),
            Op::Chmod(..)
            | Op::Chown(..)
            | Op::SetTime(..)
            | Op::SetXattr { .. }
            | Op::RemoveXattr(..) => self.mark(op),
            _ => self.data(op),
        }
    }

    fn make(&mut self, op: &Op, change: Option<&Change>) -> Result<(), fs::Error> {
        let (who, fs) = (Caller::root(), Arc::clone(self.fs()));
        let ino = match op {
            Op::Create(path) => {
                let (dir, name) = self.place(path)?;
                fs.mknod(&who, dir, name, libc::S_IFREG | 0o644, 0)?.ino
            }
            Op::Mkdir(path) => {
                let (dir, name) = self.place(path)?;
                fs.mkdir(&who, dir, name, 0o755)?.ino
            }
            Op::Symlink(path) => {
                let (dir, name) = self.place(path)?;
                fs.symlink(&who, dir, name, &link_target(path))?.ino
            }
            Op::Mknod(path, mode, rdev) => {
                let (dir, name) = self.place(path)?;
                fs.mknod(&who, dir, name, *mode, *rdev)?.ino
            }
            Op::TmpLink { path, len, tag } => {
                let (dir, name) = self.place(path)?;
                let without_name = || fs.tmpfile(&who, dir, 0o644, libc::O_RDWR);
                if tag.is_multiple_of(SCATTERED) {
                    scatter_and_cut(&fs, &without_name()?.1)?;
                }
                let (attr, file) = without_name()?;
                write_all(&fs, &file, 0, &pattern(*tag, 0, *len), self.faulty)?;
                fs.link(&who, attr.ino, dir, name)?;
                attr.ino
            }
            _ => return Ok(()),
        };
        if let Some(id) = change.and_then(|c| c.created) {
            self.inos.insert(id, ino);
        }
        Ok(())
    }

    fn transact(
        &mut self,
        durable: bool,
        ops: &[Op],
        change: Option<&Change>,
    ) -> Result<(), fs::Error> {
        let fs = Arc::clone(self.fs());
        let mut tx = fs.transaction(&Caller::root())?;
        let mut made = Vec::new();
        for op in ops {
            made.extend(transact::stage(&mut tx, self.root, op)?);
        }
        let committed = match durable {
            true => tx.commit(),
            false => tx.commit_relaxed(),
        };
        if let Err(fs::Error::NoSpace) = committed {
            let what = "the commit finds no room, which was promised when it was staged";
            self.wrong = Some(what.into());
        }
        committed?;
        let ids = change.into_iter().flat_map(|change| &change.made);
        self.inos.extend(ids.copied().zip(made));
        Ok(())
    }

    fn write_atomically(&mut self, number: u64, step: &Atomic) -> Result<(), fs::Error> {
        if let Atomic::Start(path) = step {
            if self.writing.contains_key(&number) {
                return Ok(());
            }
            let Some(file) = self.handle(path, 0)? else {
                return Ok(());
            };
            let one = Writing {
                write: self.fs().atomic_write(&Caller::root(), &file)?,
                ino: file.ino(),
                file: (number % 2 == 1).then_some(file),
                promised: 0,
            };
            self.writing.insert(number, one);
            return Ok(());
        }
        let Some(one) = self.writing.get_mut(&number) else {
            return Ok(());
        };
        match step {
            Atomic::Start(_) => {}
            Atomic::Write { .. } | Atomic::Truncate(_) => {
                // The model has staged it already.
                let newest = self
                    .oracle
                    .staged(number)
                    .and_then(|staged| staged.newest());
                let grows = match (step, newest) {
                    (Atomic::Truncate(size), _) => {
                        let fs = self.fs.as_ref();
                        let base = fs.and_then(|fs| fs.getattr(one.ino).ok());
                        let left =
                            base.map(|base| one.write.cut().unwrap_or(u64::MAX).min(base.size));
                        one.write.truncate(*size)?;
                        left.is_some_and(|left| *size > left)
                    }
                    (_, Some((offset, bytes))) => {
                        one.write.write(offset, bytes)?;
                        true
                    }
                    (_, None) => true,
                };
                // A cut promises nothing.
                if grows {
                    let pages = one.write.pages().count() as u64;
                    one.promised = one.promised.max(pages + BESIDES);
                }
            }
            Atomic::Commit => {
                if let Some(one) = self.writing.remove(&number) {
                    one.write.commit()?;
                }
            }
            Atomic::Drop => {
                if let Some(one) = self.writing.remove(&number) {
                    let available = || self.fs().statfs().blocks_available;
                    let before = available();
                    drop(one.write);
                    let after = available();
                    // With nothing left it does not show how much is missing.
                    if before > 0 && after != before + one.promised {
                        let back = i128::from(after) - i128::from(before);
                        let promised = one.promised;
                        let what = format!("{back} blocks come back of {promised}");
                        self.wrong = Some(what);
                    }
                }
            }
        }
        Ok(())
    }

    fn rename(&self, op: &Op) -> Result<(), fs::Error> {
        let (who, fs) = (Caller::root(), self.fs());
        match op {
            Op::Link(from, to) => {
                let ino = self.ino(from)?;
                let (dir, name) = self.place(to)?;
                fs.link(&who, ino, dir, name).map(|_| ())
            }
            Op::Rename(from, to, flags) => {
                let (from, name) = self.place(from)?;
                let (to, new_name) = self.place(to)?;
                fs.rename(&who, from, name, to, new_name, *flags)
            }
            Op::Unlink(path) => {
                let (dir, name) = self.place(path)?;
                fs.unlink(&who, dir, name)
            }
            Op::Rmdir(path) => {
                let (dir, name) = self.place(path)?;
                fs.rmdir(&who, dir, name)
            }
            _ => Ok(()),
        }
    }

    fn mark(&self, op: &Op) -> Result<(), fs::Error> {
        let (who, fs) = (Caller::root(), self.fs());
        let mut set = SetAttr::default();
        let path = match op {
            Op::SetXattr {
                path,
                name,
                len,
                tag,
            } => {
                let value = pattern(*tag, 0, *len);
                return fs.setxattr(&who, self.ino(path)?, name.as_bytes(), &value, 0);
            }
            Op::RemoveXattr(path, name) => {
                return fs.removexattr(&who, self.ino(path)?, name.as_bytes());
            }
            Op::Chmod(path, mode) => {
                set.mode = Some(*mode);
                path
            }
            Op::Chown(path, uid, gid) => {
                (set.uid, set.gid) = (Some(*uid), Some(*gid));
                path
            }
            Op::SetTime(path, time) => {
                set.mtime = Some(time.map_or(SetTime::Now, |ns| SetTime::At(look::timestamp(ns))));
                path
            }
            _ => return Ok(()),
        };
        fs.setattr(&who, self.ino(path)?, &set).map(|_| ())
    }

    /// Reads, writes and syncs of what the model has at a path; where it has no file, nothing.
    fn data(&mut self, op: &Op) -> Result<(), fs::Error> {
        let fs = Arc::clone(self.fs());
        let fs = &fs;
        match op {
            Op::Write {
                path,
                at,
                len,
                tag,
                how,
            } => {
                let flags = match how {
                    How::Buffered => 0,
                    How::Direct => libc::O_DIRECT,
                    How::Synced => libc::O_SYNC,
                };
                let Some(file) = self.handle(path, flags)? else {
                    return Ok(());
                };
                let id = self.file(path).expect("it has a handle");
                // The model has the new content already.
                let size = self.oracle.content(id).len() as u64;
                let at = at.unwrap_or(size - len);
                write_all(fs, &file, at, &pattern(*tag, at, *len), self.faulty)?;
                self.close(&file);
                Ok(())
            }
            Op::Rewrite { path, len, tag } => {
                let Some(file) = self.handle(path, libc::O_TRUNC)? else {
                    return Ok(());
                };
                write_all(fs, &file, 0, &pattern(*tag, 0, *len), self.faulty)?;
                self.close(&file);
                Ok(())
            }
            Op::Truncate(path, size) => {
                let Some(id) = self.file(path) else {
                    return Ok(());
                };
                let ino = match self.held.get(&id) {
                    Some(file) => file.ino(),
                    None => self.ino(path)?,
                };
                fs.truncate(&Caller::root(), ino, *size)
            }
            Op::Fallocate {
                path,
                mode,
                at,
                len,
            } => match self.handle(path, 0)? {
                Some(file) => fs.fallocate(&file, *mode, *at, *len),
                None => Ok(()),
            },
            Op::WriteRange { path, at, len } => match self.handle(path, 0)? {
                Some(file) => fs.write_range(&file, *at, *len, true),
                None => Ok(()),
            },
            Op::Fsync(path) | Op::Fdatasync(path) => {
                let data_only = matches!(op, Op::Fdatasync(_));
                match (self.handle(path, 0)?, self.oracle.now().resolve(path)) {
                    (Some(file), _) => fs.fsync(&file, data_only),
                    (None, Ok(_)) => fs.fsync_inode(self.ino(path)?, data_only),
                    (None, Err(_)) => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// What a program learns when it closes a file.
    fn close(&mut self, file: &OpenFile) {
        let Err(error) = self.fs().flush(file) else {
            return;
        };
        self.given_up |= self.faulty;
        if !self.machine.switch.is_cut() && self.is_broken_promise(&error) {
            self.wrong = Some(format!(
                "a file is closed, and what was accepted is not stored: {error}"
            ));
        }
    }

    fn remount(&mut self) -> Result<(), fs::Error> {
        self.held.clear();
        self.told.clear();
        self.writing.clear();
        if let Some(fs) = self.fs.take() {
            let closed = fs.close();
            // Whatever happens, there is a file system to ask.
            let alone = Arc::strong_count(&fs) == 1;
            debug_assert!(alone, "nobody else holds the file system");
            self.fs = Some(fs);
            closed?;
        }
        self.fs = None;
        self.fs = Some(self.machine.open()?);
        Ok(())
    }
}

fn inos_of(found: &Found, pairs: &BTreeMap<Id, usize>) -> BTreeMap<Id, Ino> {
    pairs
        .iter()
        .map(|(id, index)| (*id, found.things[*index].ino))
        .collect()
}

/// Gives a file space in so many places that its mapping has several leaves, and takes it away in two cuts, the first of which takes several
/// records.
fn scatter_and_cut(fs: &FileSystem, file: &OpenFile) -> Result<(), fs::Error> {
    const PLACES: u64 = 1300;
    let page = BLOCK_SIZE as u64;
    let scatter = |place| fs.fallocate(file, 0, place * 2 * page, page);
    match (0..PLACES).try_for_each(scatter) {
        // There is something to cut all the same.
        Err(fs::Error::NoSpace) => {}
        scattered => scattered?,
    }
    let cut = |size| fs.truncate(&Caller::root(), file.ino(), size);
    cut(5 * page)?;
    cut(0)
}

pub fn write_all(
    fs: &FileSystem,
    file: &OpenFile,
    mut offset: u64,
    mut data: &[u8],
    faulty: bool,
) -> Result<(), fs::Error> {
    while !data.is_empty() {
        let n = fs.write(file, offset, data)?;
        offset += n as u64;
        data = &data[n..];
        if faulty && !data.is_empty() {
            // The rest would be a write of its own, with a time of its own.
            let (ino, why) = (file.ino(), "a device stops it in the middle".into());
            return Err(fs::Error::WriteFailed { ino, why });
        }
    }
    Ok(())
}

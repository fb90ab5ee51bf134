//! What the tasks do, and how each notes it in its ledger.

use super::ledger::{Creating, Entries, Entry, History, Kind, Known, Ledger, Place, Span};
use super::{DIRS, JUGGLED, MARK};
use crate::drive::write_all;
use crate::faults::Fault;
use crate::look::content_of;
use crate::setting::Trouble;
use crate::world::Machine;
use base::rng::Rng;
use base::sync::Mutex;
use fs::{Caller, FileSystem, Ino, OpenFile, ROOT, SetAttr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const ERRORS: [Fault; 9] = [
    Fault::Reads,
    Fault::Writes,
    Fault::Data,
    Fault::Data,
    Fault::Flushes,
    Fault::Flushes,
    Fault::Vanish,
    Fault::Heal,
    Fault::Heal,
];

const LIES: [Fault; 5] = [
    Fault::Lose,
    Fault::LoseJournal,
    Fault::Misdirect,
    Fault::Rot,
    Fault::Rot,
];

/// A task, while it works.
pub(super) struct Task<'a> {
    pub me: usize,
    pub machine: &'a Machine,
    pub fs: &'a FileSystem,
    pub dirs: &'a [Ino],
    pub known: &'a Known,
    pub rng: Rng,
}

impl Task<'_> {
    fn ledger(&self) -> base::sync::MutexGuard<'_, Ledger> {
        self.known.ledgers[self.me].lock()
    }

    /// Whether there is nothing to go on with: no power, or the file system has turned read-only.
    pub fn is_halted(&self) -> bool {
        self.machine.switch.is_cut() || self.fs.read_only()
    }

    fn in_trouble(&self) -> bool {
        self.known.may_fail()
    }

    /// Whether the environment explains that an operation failed.
    pub fn is_excused(&self, error: &fs::Error) -> bool {
        use fs::Error::{Damage, Damaged, ReadOnly, Store, WriteFailed};
        let failed = matches!(error, Store(_) | ReadOnly | WriteFailed { .. });
        let noticed = matches!(error, Damage(_) | Damaged { .. }) && self.known.lied();
        self.machine.switch.is_cut() || (failed && self.in_trouble()) || noticed
    }

    fn place(&mut self) -> Place {
        let number = self.rng.below(self.known.names);
        let width = self.known.name_len;
        let name = format!("{}-{number:0width$}", self.me);
        (self.rng.below(DIRS as u64) as usize, name.into_bytes())
    }

    /// One of the task's files: where, and its entry.
    fn file(&mut self) -> Option<(Place, Entry)> {
        let entries = self.ledger().now().clone();
        let files: Vec<_> = entries
            .into_iter()
            .filter(|(_, entry)| entry.kind == Kind::File)
            .collect();
        (!files.is_empty()).then(|| self.rng.pick(&files).clone())
    }

    /// Runs an operation that turns the entries into `next`: the state is there from the call
    /// on, since a crash may find it done before it returns. One that fails has done nothing.
    fn change(
        &self,
        next: Entries,
        touched: &[Ino],
        real: impl FnOnce() -> Result<(), fs::Error>,
    ) -> Result<(), fs::Error> {
        {
            let mut ledger = self.ledger();
            ledger.states.push(next);
            let called = self.known.tick();
            ledger.spans.push(Span {
                called,
                returned: u64::MAX,
            });
            ledger.pending = true;
        }
        let outcome = real();
        if outcome.is_err() && self.is_halted() {
            return outcome;
        }
        let mut ledger = self.ledger();
        ledger.pending = false;
        if outcome.is_err() {
            ledger.states.pop();
            ledger.spans.pop();
            return outcome;
        }
        let number = ledger.operations();
        ledger.spans.last_mut().expect("pushed above").returned = self.known.tick();
        for ino in touched {
            ledger.touched.insert(*ino, number);
        }
        Ok(())
    }

    fn create(&mut self, kind: Kind) -> Result<(), fs::Error> {
        let place = self.place();
        let entries = self.ledger().now().clone();
        if entries.contains_key(&place) {
            return Ok(());
        }
        let (dir, who) = (self.dirs[place.0], Caller::root());
        // The inode number is known only afterwards: the state is filled in then. A crash
        // before that leaves an entry that no state has; `creating` allows it.
        let called = {
            let mut ledger = self.ledger();
            ledger.pending = false;
            let called = self.known.tick();
            ledger.creating = Some(Creating {
                place: place.clone(),
                kind,
                called,
            });
            called
        };
        let (fs, mode) = (self.fs, kind.mode());
        let attr = match kind {
            Kind::File => fs.mknod(&who, dir, &place.1, libc::S_IFREG | mode, 0)?,
            Kind::Dir => fs.mkdir(&who, dir, &place.1, mode)?,
        };
        let entry = Entry {
            ino: attr.ino,
            generation: attr.generation,
            kind,
            mode: attr.mode & 0o7777,
            links: attr.nlink,
            mark: None,
        };
        let mut next = entries;
        next.insert(place, entry);
        let mut ledger = self.ledger();
        ledger.states.push(next);
        ledger.creating = None;
        let returned = self.known.tick();
        ledger.spans.push(Span { called, returned });
        let number = ledger.operations();
        for ino in [dir, attr.ino] {
            ledger.touched.insert(ino, number);
        }
        if kind == Kind::File {
            let id = (attr.ino, attr.generation);
            ledger.files.insert(id, History::new(Vec::new()));
        }
        Ok(())
    }

    fn rename(&mut self) -> Result<(), fs::Error> {
        let (from, to) = (self.place(), self.place());
        let mut next = self.ledger().now().clone();
        let (Some(moved), target) = (next.get(&from).cloned(), next.get(&to).cloned()) else {
            return Ok(());
        };
        if let Some(target) = &target
            && (target.kind != moved.kind || target.ino == moved.ino)
        {
            return Ok(());
        }
        let (a, b) = (self.dirs[from.0], self.dirs[to.0]);
        let mut touched = vec![moved.ino, a, b];
        if let Some(target) = target {
            touched.push(target.ino);
            unlink(&mut next, &target);
        }
        next.remove(&from);
        next.insert(to.clone(), moved);
        let who = Caller::root();
        self.change(next, &touched, || {
            self.fs.rename(&who, a, &from.1, b, &to.1, 0)
        })
    }

    fn link(&mut self) -> Result<(), fs::Error> {
        let to = self.place();
        let Some((_, entry)) = self.file() else {
            return Ok(());
        };
        let mut next = self.ledger().now().clone();
        if next.contains_key(&to) {
            return Ok(());
        }
        let ino = entry.ino;
        next.insert(to.clone(), entry);
        for entry in next.values_mut().filter(|e| e.ino == ino) {
            entry.links += u32::from(entry.kind == Kind::File);
        }
        let links = next.values().filter(|e| e.ino == ino).count() as u32;
        for entry in next.values_mut().filter(|e| e.ino == ino) {
            entry.links = links;
        }
        let who = Caller::root();
        let dir = self.dirs[to.0];
        self.change(next, &[ino, dir], || {
            self.fs.link(&who, ino, dir, &to.1).map(|_| ())
        })
    }

    fn remove(&mut self) -> Result<(), fs::Error> {
        let place = self.place();
        let mut next = self.ledger().now().clone();
        let Some(entry) = next.remove(&place) else {
            return Ok(());
        };
        unlink(&mut next, &entry);
        let (who, dir) = (Caller::root(), self.dirs[place.0]);
        self.change(next, &[entry.ino, dir], || match entry.kind {
            Kind::File => self.fs.unlink(&who, dir, &place.1),
            Kind::Dir => self.fs.rmdir(&who, dir, &place.1),
        })
    }

    fn chmod(&mut self) -> Result<(), fs::Error> {
        let Some((_, entry)) = self.file() else {
            return Ok(());
        };
        let mode = 0o600 + self.rng.below(0o177) as u32;
        let mut next = self.ledger().now().clone();
        for other in next.values_mut().filter(|e| e.ino == entry.ino) {
            other.mode = mode;
        }
        let set = SetAttr {
            mode: Some(mode),
            ..SetAttr::default()
        };
        self.change(next, &[entry.ino], || {
            self.fs
                .setattr(&Caller::root(), entry.ino, &set)
                .map(|_| ())
        })
    }

    fn mark(&mut self) -> Result<(), fs::Error> {
        let Some((_, entry)) = self.file() else {
            return Ok(());
        };
        let mut value = vec![0; self.rng.below(self.known.mark_max) as usize];
        self.rng.fill(&mut value);
        let mut next = self.ledger().now().clone();
        for other in next.values_mut().filter(|e| e.ino == entry.ino) {
            other.mark = Some((value.len(), format::checksum(0, &value)));
        }
        self.change(next, &[entry.ino], || {
            self.fs
                .setxattr(&Caller::root(), entry.ino, MARK, &value, 0)
        })
    }

    /// Moves one of the common directories into another.
    fn juggle(&mut self) -> Result<(), fs::Error> {
        let (what, into) = (self.rng.below(JUGGLED), self.rng.below(JUGGLED + 1));
        let juggled = &self.known.juggled;
        let into = *juggled.get(into as usize).unwrap_or(&ROOT);
        let name = format!("j{what}").into_bytes();
        // Wherever it is by now.
        for from in juggled.iter().chain([&ROOT]) {
            let moved = self
                .fs
                .rename(&Caller::root(), *from, &name, into, &name, 0);
            match moved {
                Err(error) if error.errno() == libc::ENOENT => {}
                // It is above the one that it should move into.
                Err(error) if error.errno() == libc::EINVAL => return Ok(()),
                other => return other,
            }
        }
        Ok(())
    }

    fn write(&mut self) -> Result<(), fs::Error> {
        let Some((_, entry)) = self.file() else {
            return Ok(());
        };
        let id = (entry.ino, entry.generation);
        let file = self.open(&entry)?;
        let mut bytes = self.ledger().files[&id].newest().clone();
        let most = *self.rng.pick(&[100, 3000, 20_000, 60_000]);
        if self.rng.one_in(6) {
            let cut = self.rng.below(bytes.len() as u64 * 5 / 4 + 1) as usize;
            bytes.resize(cut, 0);
            self.begin_write(id, bytes, 0..0);
            self.known
                .note(|| format!("task {}: truncate {id:?} to {cut}", self.me));
            let outcome = self.fs.truncate(&Caller::root(), entry.ino, cut as u64);
            return self.end_write(&file, id, outcome);
        }
        let mut data = vec![0; self.rng.below(most) as usize + 1];
        self.rng.fill(&mut data);
        let offset = match self.rng.below(3) {
            0 => 0,
            1 => bytes.len(),
            _ => self.rng.below(most) as usize,
        };
        let offset = offset.min(150_000);
        bytes.resize(bytes.len().max(offset + data.len()), 0);
        bytes[offset..offset + data.len()].copy_from_slice(&data);
        let end = offset + data.len();
        self.begin_write(id, bytes, offset..end);
        self.known
            .note(|| format!("task {}: write {id:?} at {offset} to {end}", self.me));
        let outcome = write_all(self.fs, &file, offset as u64, &data, false);
        self.end_write(&file, id, outcome)?;
        if self.rng.one_in(3) {
            self.fsync(&file, &entry)?;
        }
        Ok(())
    }

    /// A handle of one of the task's files. Where something may have failed, what the file holds
    /// is looked at first: data that could not be written may have been given up before, and
    /// while this handle is open none is.
    fn open(&self, entry: &Entry) -> Result<Arc<OpenFile>, fs::Error> {
        let file = self.fs.open_file(entry.ino, libc::O_RDWR)?;
        if self.in_trouble() {
            self.observe(&file, (entry.ino, entry.generation))?;
        }
        Ok(file)
    }

    fn observe(&self, file: &OpenFile, id: (Ino, u64)) -> Result<(), fs::Error> {
        let bytes = content_of(self.fs, file)?;
        let deceit = self.known.deceit.as_deref();
        let observed = self.history(id, |history| history.observe(bytes, deceit));
        if let Err(what) = observed {
            panic!("task {} looks at its file {id:?}: {what}", self.me);
        }
        Ok(())
    }

    fn history<T>(&self, id: (Ino, u64), change: impl FnOnce(&mut History) -> T) -> T {
        let mut ledger = self.ledger();
        change(ledger.files.get_mut(&id).expect("files have content"))
    }

    fn begin_write(&self, id: (Ino, u64), version: Vec<u8>, bytes: Range<usize>) {
        self.history(id, |history| history.begin(version, bytes));
    }

    /// The write of the newest version has returned. One that failed was done in part.
    fn end_write(
        &self,
        file: &OpenFile,
        id: (Ino, u64),
        outcome: Result<(), fs::Error>,
    ) -> Result<(), fs::Error> {
        match &outcome {
            Ok(()) => self.history(id, |history| history.written = history.versions.number()),
            Err(_) if self.is_halted() => {}
            Err(_) => {
                if self.observe(file, id).is_err() {
                    self.history(id, |history| history.unknown = true);
                }
            }
        }
        outcome
    }

    fn fsync(&mut self, file: &OpenFile, entry: &Entry) -> Result<(), fs::Error> {
        let id = (entry.ino, entry.generation);
        self.known
            .note(|| format!("task {}: fsync {id:?}", self.me));
        let data_only = self.rng.one_in(3);
        match self.fs.fsync(file, data_only) {
            Ok(()) => {}
            Err(error @ fs::Error::WriteFailed { .. }) => {
                self.history(id, History::doubt);
                if self.fs.fsync(file, data_only).is_ok() {
                    panic!("fsync of {id:?} succeeds through a handle that has lost data");
                }
                return Err(error);
            }
            Err(error) => return Err(error),
        }
        let mark = self.known.mark();
        let mut ledger = self.ledger();
        let history = ledger.files.get_mut(&id).expect("files have content");
        history.durable(history.versions.number(), mark);
        if let Some(operation) = ledger.touched.get(&entry.ino).copied() {
            ledger.durable(operation, mark);
        }
        Ok(())
    }

    /// Makes durable what all tasks have done in a common directory.
    fn fsync_directory(&mut self) -> Result<(), fs::Error> {
        let dir = *self.rng.pick(self.dirs);
        let last = |ledger: &Mutex<Ledger>| ledger.lock().touched.get(&dir).copied();
        let covered: Vec<_> = self.known.ledgers.iter().map(last).collect();
        self.fs.fsync_inode(dir, self.rng.one_in(3))?;
        let mark = self.known.mark();
        for (ledger, operation) in self.known.ledgers.iter().zip(covered) {
            if let Some(operation) = operation {
                ledger.lock().durable(operation, mark);
            }
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), fs::Error> {
        let covered = self.known.covered();
        self.known.syncing.fetch_add(1, Ordering::Relaxed);
        let outcome = self.fs.sync();
        match outcome {
            Ok(()) => self.known.cover(covered),
            Err(_) => self.known.doubt(),
        }
        self.known.syncing.fetch_sub(1, Ordering::Relaxed);
        outcome
    }

    /// Reads a file piece by piece, so that threads read ahead: what they bring is looked at by others. False: it is gone.
    fn run_through(&mut self, file: &OpenFile, bytes: &mut [u8]) -> Result<bool, fs::Error> {
        let piece = 1 + self.rng.below(10_000) as usize;
        let mut at = 0;
        loop {
            let piece = piece.min(bytes.len());
            match self.fs.read(file, at, &mut bytes[..piece]) {
                Ok(0) => return Ok(true),
                Ok(len) => at += len as u64,
                Err(error) if error.errno() == libc::ESTALE => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads a file of any task: it holds one of the versions there were meanwhile.
    fn read(&mut self) -> Result<(), fs::Error> {
        let whose = self.rng.below(self.known.ledgers.len() as u64) as usize;
        let ledger = self.known.ledgers[whose].lock();
        let files: Vec<_> = ledger.files.keys().copied().collect();
        drop(ledger);
        if files.is_empty() {
            return Ok(());
        }
        let id = *self.rng.pick(&files);
        let file = match self.fs.open_file(id.0, libc::O_RDONLY) {
            Ok(file) => file,
            Err(error) if matches!(error.errno(), libc::ENOENT | libc::ESTALE | libc::EISDIR) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        // A name that is looked up is no reference: the file may go at any moment.
        let gone = |error: &fs::Error| error.errno() == libc::ESTALE;
        match self.fs.getattr(id.0) {
            Ok(attr) if attr.generation == id.1 => {}
            Ok(_) => return Ok(()),
            Err(error) if gone(&error) => return Ok(()),
            Err(error) => return Err(error),
        }
        let before = self.known.ledgers[whose].lock().files[&id].clone();
        self.known
            .note(|| format!("task {}: read {id:?} of task {whose}", self.me));
        let longest = before.versions.iter().map(Vec::len).max().unwrap_or(0);
        let mut bytes = vec![0; longest + 100_000];
        if self.rng.one_in(2) && !self.run_through(&file, &mut bytes)? {
            return Ok(());
        }
        let len = match self.fs.read(&file, 0, &mut bytes) {
            Err(error) if gone(&error) => return Ok(()),
            done => done?,
        };
        match self.fs.getattr(id.0) {
            // It was being deleted when it was opened, by number alone: what it held is going.
            Err(error) if gone(&error) => return Ok(()),
            other => other?,
        };
        let history = self.known.ledgers[whose].lock().files[&id].clone();
        let unknown = before.unknown || history.unknown;
        // What was given up meanwhile is old again.
        let oldest = match self.in_trouble() {
            true => 0,
            false => before.versions.number().saturating_sub(1),
        };
        let history = history.since(&before, oldest);
        // Without power a page can no more be written: it is given up with the last handle, and what is in memory is read.
        if unknown || self.machine.switch.is_cut() {
            return Ok(());
        }
        if whose == self.me && !self.in_trouble() {
            assert!(
                bytes[..len] == **history.newest(),
                "task {whose} reads its file {id:?}"
            );
            return Ok(());
        }
        let found = &bytes[..len];
        let mut allowed = history.allows(found, self.known.deceit.as_deref());
        if !self.in_trouble() && self.known.deceit.is_none() {
            allowed = allowed.and_then(|()| history.allows_pages(found));
        }
        if let Err(what) = allowed {
            panic!("task {} reads file {id:?} of task {whose}: {what}", self.me);
        }
        Ok(())
    }

    /// Something with names that all tasks fight for: what comes of it need only be sound.
    fn jostle(&mut self) -> Result<(), fs::Error> {
        let (rng, who) = (&mut self.rng, Caller::root());
        let name = |rng: &mut Rng| format!(".{}", rng.below(3)).into_bytes();
        let (a, b) = (
            self.dirs[rng.below(2) as usize],
            self.dirs[rng.below(2) as usize],
        );
        let (from, to) = (name(rng), name(rng));
        let outcome = match rng.below(8) {
            0 | 1 => {
                let mode = libc::S_IFREG | 0o644;
                self.fs.mknod(&who, a, &from, mode, 0).map(|_| ())
            }
            2 => self.fs.unlink(&who, a, &from),
            _ => self.fs.rename(&who, a, &from, b, &to, 0),
        };
        let lost = [libc::ENOENT, libc::EEXIST, libc::ESTALE, libc::EBUSY];
        match outcome {
            Err(error) if lost.contains(&error.errno()) => Ok(()),
            other => other,
        }
    }

    /// Trees that all tasks build, move and remove at once: what comes of it need only be sound.
    fn fell(&mut self) -> Result<(), fs::Error> {
        let (rng, who) = (&mut self.rng, Caller::root());
        let tree = |rng: &mut Rng| format!(".tree{}", rng.below(2)).into_bytes();
        let (a, b) = (self.dirs[0], self.dirs[rng.below(2) as usize]);
        let (from, to) = (tree(rng), tree(rng));
        let outcome = match rng.below(8) {
            0 => self.fs.mkdir(&who, a, &from, 0o755).map(|_| ()),
            1 => self.fs.rename(&who, a, &from, b, &to, 0),
            2 => {
                let workers = 1 + rng.below(3) as usize;
                let removed = self.fs.remove_all(&who, b, &from, workers, &|_| {});
                removed.map(|_| ())
            }
            what => self.fs.lookup(a, &from).and_then(|top| {
                let name = format!("x{}", rng.below(20)).into_bytes();
                let made = match what {
                    3 => self.fs.mkdir(&who, top.ino, &name, 0o755),
                    _ => self
                        .fs
                        .mknod(&who, top.ino, &name, libc::S_IFREG | 0o644, 0),
                };
                made.map(|_| ())
            }),
        };
        // By the time that a tree's number is used it may be a file's.
        let lost = [
            libc::ENOENT,
            libc::EEXIST,
            libc::ESTALE,
            libc::ENOTEMPTY,
            libc::ENOTDIR,
        ];
        match outcome {
            Err(error) if lost.contains(&error.errno()) => Ok(()),
            other => other,
        }
    }

    /// Gives a device a fault, of the kind that the round is in.
    fn fault(&mut self) {
        let rng = &mut self.rng;
        let (fault, times) = match self.known.trouble {
            Trouble::Errors => (*rng.pick(&ERRORS), *rng.pick(&[0, 1, 1, 1, 2])),
            Trouble::Lies => match *rng.pick(&LIES) {
                Fault::Rot => (Fault::Rot, rng.next_u64()),
                fault => (fault, *rng.pick(&[0, 1, 1, 1, 2])),
            },
            Trouble::Slow if rng.one_in(3) => (Fault::Stall, *rng.pick(&[200, 40_000, 600_000])),
            Trouble::Slow => (Fault::Slow, *rng.pick(&[0, 1, 30, 700])),
            _ => return,
        };
        let device = rng.below(self.machine.devices.len() as u64);
        self.known
            .note(|| format!("task {}: {fault} {device} {times}", self.me));
        fault.inject(self.machine, device, times, None);
        if let Some(deceit) = &self.known.deceit {
            deceit.look();
        }
    }

    pub fn step(&mut self) -> Result<(), fs::Error> {
        if self.known.trouble != Trouble::None && self.rng.one_in(self.known.fault_every) {
            self.fault();
        }
        let what = self.rng.below(58);
        self.known
            .note(|| format!("task {}: {}", self.me, step_name(what)));
        match what {
            0..=7 => self.create(Kind::File),
            8 => self.create(Kind::Dir),
            9..=14 => self.rename(),
            15..=17 => self.remove(),
            18 => self.link(),
            19..=20 => self.chmod(),
            21..=30 => self.write(),
            31..=33 => self.read(),
            34..=35 => {
                let Some((_, entry)) = self.file() else {
                    return Ok(());
                };
                let file = self.open(&entry)?;
                self.fsync(&file, &entry)
            }
            36 => self.sync(),
            37 => Ok(self.fs.store().checkpoint()?),
            38..=41 => self.mark(),
            42..=43 => self.juggle(),
            44..=49 => self.jostle(),
            50 => Ok(self.fs.store().trim(0..u64::MAX, 1).map(drop)?),
            52..=55 => self.fell(),
            56..=57 => self.fsync_directory(),
            _ => self.fs.tick(),
        }
    }
}

fn step_name(step: u64) -> &'static str {
    match step {
        0..=7 => "create",
        8 => "mkdir",
        9..=14 => "rename",
        15..=17 => "remove",
        18 => "link",
        19..=20 => "chmod",
        21..=30 => "write",
        31..=33 => "read",
        34..=35 => "fsync",
        36 => "sync",
        37 => "checkpoint",
        38..=41 => "setxattr",
        42..=43 => "move a common directory",
        44..=49 => "fight for a name",
        50 => "trim",
        52..=55 => "fight for a tree",
        56..=57 => "fsync a directory",
        _ => "tick",
    }
}

/// One name of an inode less.
fn unlink(entries: &mut Entries, gone: &Entry) {
    if gone.kind == Kind::File {
        for entry in entries.values_mut().filter(|e| e.ino == gone.ino) {
            entry.links -= 1;
        }
    }
}
